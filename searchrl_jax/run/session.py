"""The life of a run: open, restore, publish, evaluate, save, stop.

A `Session` has no algorithm: a loop (train.py, sft.py,
experiments/ssp/train.py) trains one step and calls `end_step`.
"""

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import time
from typing import Any

import jax
from ml_collections import ConfigDict
import numpy as np

from searchrl_jax.devices import cluster, sharding, signals
from searchrl_jax.engines.core import SyncError
from searchrl_jax.engines.weights import sync
from searchrl_jax.models import lora, parameters
from searchrl_jax.run import services
from searchrl_jax.store import checkpoint, folders, progress, records, remote
from searchrl_jax.store.writer import Writer


class Session(services.Opener):
  """One start of a run, in its folder; a context manager.

  Entering locks the folder (a loop that reads or writes there before has locked
  it by `folders.locked_once`), restores its last checkpoint, or starts the
  parameters that the config names, and opens the retrieval server, the writer
  and the event loop. Leaving closes them, engines and sources first.

  Args:
    config: the resolved config.
    workdir: the run's folder.
    stage: 'train', 'sft', ...: a checkpoint of another stage is refused.
    trained: parameters and optimizer states (`learn.learner`), restored or
      started here: `cfg`, the policy's `DecoderConfig`, `mesh`, the devices,
      `params` of the policy, `frozen`, those that are not trained, `fixed`,
      what never changes, `start(params)`, `tree()` for a checkpoint, `like()`
      as its shapes, `restore(tree, fixed)`, and `warmup()`, which compiles.
    limits: (steps, seconds, every): the run ends after this number of steps
      or seconds (0 = no limit), and is saved after every `every` steps.
    states: name -> state of the recipe between steps, saved in every
      checkpoint: `state()` returns JSON, `restore(state)` takes it.
    unused: trajectories that have ended and were not trained on yet:
      `encode()` returns bytes, `decode(data)` takes them.
    contents: see `Writer`.

  Attributes:
    step: steps done.
    metrics: of the last step.
    writer, signals: of the run; `signals` is its `loop`.
    evaluator: None until the loop of the run sets one.

  Raises:
    CheckpointError, ConfigError: from restoring or reading parameters.
  """

  def __init__(
    self,
    config: ConfigDict,
    workdir: str,
    stage: str,
    trained: Any,
    *,
    limits: tuple[int, float, int],
    states: Mapping[str, Any] | None = None,
    unused: Any = None,
    contents: Mapping[str, Any] | None = None,
  ):
    self.signals = signals.Signals()
    super().__init__(config, workdir, self.signals, trained.cfg, trained.mesh)
    self.trained = trained
    self._steps, self._seconds, self._save_every = limits
    self._states, self._unused = dict(states or {}), unused
    self._contents = dict(contents or {})
    self._saver = checkpoint.of_run(config, workdir)
    self._fingerprint = {'stage': stage, **dataclasses.asdict(self.cfg)}
    self.evaluator: Any = None
    self.metrics: dict[str, float] = {}
    self._late = self._owed = False  # owed: the evaluation of the last step

  def _restore(self) -> None:
    self._fingerprint |= parameters.tokenizer(self.workdir)
    latest = cluster.first('checkpoint', self._saver.latest)
    self._fresh = latest is None
    if latest is None:
      self.step = 0
      start = lambda: parameters.initial(self.config, self.cfg, self.mesh)
      self.trained.start(cluster.agree('parameters', start))
      started = lambda: parameters.contents(self.config)
      self._contents |= cluster.first('contents', started)
      return
    saved = self._saver.restore(
      self.trained.like(), latest, fingerprint=self._fingerprint
    )
    self.step, self.identity = saved.step, saved.extras.get('served', {})
    self._owed = saved.extras.get('evaluation_owed', False)
    self.metrics = saved.metrics
    fixed = parameters.read_fixed(self.workdir, self.trained.fixed)
    self.trained.restore(saved.state, fixed)
    for name, state in self._states.items():
      state.restore(saved.extras[name])
    if self._unused is not None:
      self._unused.decode(base64.b64decode(saved.extras['ended']))

  def __enter__(self) -> 'Session':
    with contextlib.ExitStack() as stack:
      stack.enter_context(folders.locked_once(self.workdir))
      records.require(
        not (self.workdir / records.EVAL).exists(),
        f'{self.workdir} is the folder of an evaluation; use another --workdir',
      )
      with progress.phase('parameters', self.config.log.progress):
        self._restore()
      if self._unused is not None:  # there are rollouts, which search
        retrieval = services.retrieval(self.config, str(self.workdir))
        with progress.phase('retrieval server', self.config.log.progress):
          self.url = stack.enter_context(retrieval)
      devices = [str(d) for d in jax.devices()]
      about = {'devices': devices, 'parameters': self.cfg.n_params}
      how = {'step': self.step, 'steps': self._steps, 'about': about}
      how['contents'] = self._contents
      writer = Writer(self.workdir, self.config, **how)
      self.writer = stack.enter_context(writer)
      if self._fresh:  # while no other start writes to the folder
        parameters.keep_fixed(self.workdir, self.trained.fixed)
      stack.callback(self._saver.wait)
      stack.enter_context(self.signals)
      stack.enter_context(cluster.attending(self.signals))
      self._stack = stack.pop_all()
    return self

  def __exit__(self, *error):
    return self._stack.__exit__(*error)

  def open_engine(self, tok, canary, params=None, folder: str = '') -> Any:
    """As `Opener`, for fixed weights or, without `params`, the trained ones.

    canary: of trained weights, with it `publish` verifies them.
    """
    if params is not None:
      return super().open_engine(tok, canary, params, folder)
    services.check_ahead(self.config, sharding.own_mesh(self.mesh))
    self.engine = super().open_engine(tok, None, self.trained.params)
    self._canary, self._logps = canary, sync.forward_logps(self.cfg, self.mesh)
    self.writer.decode = tok.decode
    return self.engine

  # The steps.

  def begin(self) -> None:
    """Compiles, publishes the weights, and evaluates them if that is due.

    It is due before step 0, and where a signal or an error prevented the
    evaluation of the last step.
    """
    self.writer.say(self._ahead())
    with self.writer.timer('compile'):
      self.trained.warmup()
      for engine in self.engines:
        engine.warmup()
    self._started = time.monotonic()
    if self.engine is not None:
      self._serve()
    self.writer.begin()

  def _ahead(self) -> str:
    """What this start is about to do."""
    c, r = self.config, self.config.rollout
    ahead = f'steps {self.step + 1} to {self._steps}'
    if self.step >= self._steps:
      ahead = f'all of its {self._steps} steps are done'
    text = (
      f'{self._fingerprint["stage"]} of {c.name} in '
      f'{remote.place(self.workdir)}: {ahead}, {self.cfg.n_params:,} parameters'
    )
    if self.engine is not None:
      text += f'; a step is {r.questions} questions x {r.group} trajectories'
      text += f' of up to {c.env.max_tokens:,} tokens'
    if self.evaluator:
      often = f'every {c.eval.every} steps' if c.eval.every else 'at the end'
      text += f'; evaluated {often}'
    return text

  def _serve(self) -> None:
    """Publishes the weights, and evaluates them if that is due."""
    self.publish('full')
    if self.trained.frozen:
      self.publish()  # compiles what later steps call
    if self.step == 0 and self.config.eval.every:
      values = self.evaluate()
      if self.evaluator:
        with self.writer.timer('evaluate'):
          values |= self.evaluator.sampled(self.step - 1, values)
      self.metrics = self.writer.write(-1, values)
    elif self._owed:
      self.metrics |= self.writer.amend(self.step - 1, self.evaluate())
      self._amend(evaluation_owed=False)

  def _amend(self, **extras) -> None:
    """Replaces the metrics and some extras of the last checkpoint."""
    self.writer.sync()
    amend = functools.partial(self._saver.amend, self.step, self.metrics)
    cluster.first('amend', lambda: amend(**extras))

  @property
  def done(self) -> bool:
    return self._late or self.step >= self._steps

  def publish(self, kind: str = '') -> float:
    """Loads the trained weights into the engine and verifies them.

    kind: 'full' or 'adapter', see `WeightsUpdate`; '': what training changes.

    Returns:
      `SyncReport.canary_max_diff`, of the process where it is largest.

    Raises:
      SyncError: the engine does not hold them.
    """
    kind = kind or ('adapter' if self.trained.frozen else 'full')
    with self.writer.timer('sync'):
      params, limit = self.trained.params, self.config.engine.canary_tolerance
      logps, published = functools.partial(self._logps, params), None
      _, params = lora.served(self.cfg, params)
      if kind == 'adapter':
        params, _ = lora.split(self.cfg, params)
      if cluster.size() > 1:
        # What all processes compute together comes first.
        wanted = np.asarray(logps(np.asarray(self._canary, np.int32)))
        published = sync.checksums(params, self.engine.dtype, self.engine.exact)
        params = self.share(params, self.step, published)
        logps = lambda ids: wanted
      how = self.step, self._canary, logps, limit, kind, published
      check = functools.partial(sync.sync_and_verify, self.engine, params, *how)
      reports = cluster.gather('sync', lambda: self.signals.finish(check()))
      if self.publisher:
        self.publisher.prune(self.step)
      return max(r.canary_max_diff for r in reports)

  def rest(self) -> None:
    """Confirms that a step's rollouts have ended, and lets the engine rest.

    Raises:
      SyncError: other weights than those of the last sync sampled them.
    """
    cluster.gather('rest', lambda: self.signals.finish(self.engine.rest()))

  def evaluate(self) -> dict[str, float]:
    """The evaluator's values for the last step done."""
    if not self.evaluator:
      return {}
    with self.writer.timer('evaluate'):
      return dict(self.evaluator.run(self.step - 1))

  @contextlib.contextmanager
  def unfinished(self, give_back: Callable[[bool], Sequence]) -> Iterator[None]:
    """Saves the run if the rollouts of a step fail: the next start repeats it.

    Args:
      give_back: (whether trajectories that have ended may be used) -> all of
        the step that have ended. They are written to show the cause; the next
        start writes them anew.
    """
    try:
      yield
    except Exception as e:  # a service, a signal, a question too long
      with signals.after(e):
        ended = give_back(not isinstance(e, SyncError))
        self.save()
        self.writer.trajectories(self.step, [ended], own=True)
      raise

  def check_finite(self, metrics: Mapping[str, float], batches) -> None:
    """Saves the batch of an update that was not applied, and raises.

    Raises:
      NonFinite: metrics['finite'] is 0.
    """
    if not metrics['finite']:
      path = self.workdir / f'nonfinite_step{self.step}.npz'
      parts = [(i, vars(b)) for i, b in enumerate(batches)]
      arrays = {
        f'{i}/{k}': v for i, b in parts for k, v in b.items() if k != 'tree'
      }
      cluster.first('batch', lambda: np.savez(path, **arrays))
      text = (
        f'step {self.step}: the loss or its gradient is not finite; nothing '
        f'was updated. The batch is in {path}'
      )
      raise cluster.on_all(signals.NonFinite(text))

  def end_step(
    self,
    metrics: Mapping[str, float],
    trajectories: Sequence[Mapping[str, Any]] = (),
    **progress: str,
  ) -> None:
    """Counts the step, publishes its weights, evaluates and saves if that is
    due, and writes the step.

    If publishing fails, or a signal came, the step still counts, since its
    update is complete.

    Args:
      metrics: of the step.
      trajectories: keywords of `Writer.trajectories`, for each of its files.
      **progress: see `Writer.progress`; none: no line is printed.

    Raises:
      Stopped: by a signal. Mismatch: trainer and engine differ by more than
        config.rollout.mismatch_alarm. Any error of publishing or evaluating.
        The run is saved in each case.
    """
    metrics, config, failure = dict(metrics), self.config, None
    self.step += 1
    if self.engine is not None:
      synced, failure = self._advance()
      metrics |= synced
    failure = failure or self._mismatch(metrics)
    late = lambda: 0 < self._seconds < time.monotonic() - self._started
    self._late = cluster.first('time', late)
    stop = self._stops()
    due = self.done or _due(config.eval.every, self.step)
    self._owed = due = bool(due and self.evaluator)
    if due and not stop and failure is None:
      try:
        metrics |= self.evaluate()
        self._owed = False
      except signals.Stopped:
        stop = True  # raised below, after the save
      except Exception as e:
        if cluster.alone(e):
          raise
        failure = e  # raised below: the step itself is complete
    with signals.after(failure):
      with self.writer.timer('write'):
        every = config.log.trajectories_every
        for group in trajectories:
          self.writer.trajectories(self.step - 1, every=every, **group)
      # Before the save: a resume drops lines of steps that were not saved.
      self.metrics = self.writer.write(self.step - 1, metrics)
      stop = stop or self._stops()
      ends = self.done or stop or failure is not None
      best = due and not self._owed and config.checkpoint.best
      if ends or best or _due(self._save_every, self.step):
        self.save(background=config.checkpoint.background and not ends)
      if progress:
        self.writer.progress(self.metrics, **progress)
    if failure is not None:
      raise failure
    if stop:
      text = f'stopped by a signal after step {self.step}; saved'
      raise cluster.on_all(signals.Stopped(text))

  def _advance(self) -> tuple[dict[str, float], Exception | None]:
    """Publishes the weights of the step, unless a signal came.

    Returns:
      Metrics, and the error that all processes have.
    """
    differ, failure = np.nan, None
    try:
      cluster.agree('wake', lambda: self.signals.finish(self.engine.wake()))
      differ = np.nan if self._stops() else self.publish()
    except Exception as e:
      if cluster.alone(e):
        raise  # the others wait for this process
      failure = e
    metrics = {'sync/canary_max_diff': differ}
    refused = self.engine.stats().get('refused_deltas')  # of vLLM servers
    if self.config.engine.sync == 'delta' and refused is not None:
      metrics['sync/refused_deltas'] = refused
    return metrics, failure

  def _stops(self) -> bool:
    """Whether a signal came to any process."""
    return any(cluster.gather('stop', lambda: self.signals.stop))

  def _mismatch(self, metrics: Mapping[str, float]) -> signals.Mismatch | None:
    alarm = self.config.rollout.mismatch_alarm
    differ = metrics.get('train/mismatch_abs', 0.0)
    if not 0 < alarm < differ:
      return None
    text = (
      f'step {self.step - 1}: log-probs of trainer and engine differ by '
      f'{differ} on average (config.rollout.mismatch_alarm={alarm}); saved. '
      'Raise the alarm, lower max_staleness, or use one dtype for both'
    )
    return cluster.on_all(signals.Mismatch(text))

  def save(self, background: bool = False) -> None:
    """Writes a checkpoint of the steps done.

    If there is one already, only the unused trajectories may have changed.

    background: return once the arrays are copied to the host.
    """
    with self.writer.timer('checkpoint'):
      self._saver.wait()
    unused = b'' if self._unused is None else self._unused.encode()
    ended = base64.b64encode(unused).decode()
    if self.step in cluster.first('steps', self._saver.steps):
      self._amend(ended=ended)
      return
    extras = {name: state.state() for name, state in self._states.items()}
    extras |= {'served': self.identity, 'version': self.step, 'ended': ended}
    with self.writer.timer('checkpoint'):
      # The files of steps that a checkpoint counts are there before it.
      self.writer.sync()
      self._saver.save(
        self.step,
        self.trained.tree(),
        metrics=self.metrics,
        extras=extras | {'evaluation_owed': self._owed},
        fingerprint=self._fingerprint,
        background=background,
      )


def _due(every: int, step: int) -> bool:
  return bool(every) and step % every == 0
