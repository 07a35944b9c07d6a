"""Writes the run folder.

  config.json          the resolved config
  environment.json     per start: versions, commit, machine, changed fields
  metrics.jsonl        one line per step
  trajectories/, eval/ one file per step (`records.read` reads them)
  tensorboard/, wandb/ the same metrics, if the config asks for them

A start at step s removes lines and files of steps >= s, which the run writes
again. A start at step 0 also removes those of step -1 (an evaluation before
the first update).

Of several processes, process 0 alone writes all this but the trajectories, of
which each writes a share.

A thread writes trajectories, one step at a time. The call for the next step
waits for the previous one and raises its error. Call `sync` before saving a
checkpoint, so that a resumed run finds the trajectories of all earlier steps.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
import contextlib
import datetime
import fnmatch
import functools
import importlib.metadata
import json
import logging
import math
import operator
import os
import pathlib
import platform
import shlex
import subprocess
import sys
import time
from typing import Any

import numpy as np

from searchrl_jax import lookup
from searchrl_jax.devices import cluster, signals
from searchrl_jax.store import (
  alarms,
  folders,
  progress,
  records,
  remote,
  trackers,
)
from searchrl_jax.types import Group, Rewards

# Fields that may differ between the processes of a run: where each runs, what
# it prints, how long and often it asks a service. Process 0 times the run.
_OWN = (
  'log', 'source.url', 'source.simulator.url', 'data.dir', 'judge.url',
  'train.seconds', 'sft.seconds', 'checkpoint.keep',
  'rollout.concurrency', 'rollout.search_attempts',
  'source.timeout', 'source.deadline', 'source.attempts', 'source.batch_ms',
  'source.simulator.timeout', 'source.simulator.concurrency',
  'judge.timeout', 'judge.attempts', 'judge.concurrency',
  'engine.url', 'engine.venv', 'engine.device', 'engine.gpu_memory',
  'engine.host_gib', 'engine.kv_cache_gib', 'engine.start_seconds',
  'engine.timeout', 'engine.deadline', 'engine.attempts', 'engine.memory',
  'engine.sync',
)  # fmt: skip
# Fields that may change between two starts of a run. They state where it runs,
# for how long, what stops it and what it prints, never what it computes.
MAY_DIFFER = (
  *_OWN, 'mesh', 'source.servers', 'sft.save_every', 'checkpoint.every',
  'checkpoint.background', 'rollout.mismatch_alarm', 'rollout.max_failed',
  'judge.max_failed', 'judge.max_tokens', 'engine.canary_tolerance',
)  # fmt: skip
# The model of a server that has several: '' may become a name.
_MODELS = 'judge.model', 'source.simulator.model'
# A number of steps -> the fields that depend on it, unless they are 'constant'.
_ENDS = {
  'train.steps': ('optim.schedule', 'critic.schedule'),
  'sft.steps': ('sft.schedule',),
}
_SAMPLES = 3  # trajectories of a file whose text trackers show
# To read the metadata of all that is installed takes up to 2 s of a start.
_PACKAGES = (
  'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy', 'grain',
  'transformers', 'tokenizers', 'bm25s', 'httpx', 'ml_collections',
)  # fmt: skip


class Writer:
  """Writes everything that a run stores but checkpoints; a context manager."""

  def __init__(
    self,
    folder,
    config,
    *,
    step=0,
    steps=None,
    about=None,
    contents=None,
    out=None,
  ):
    """Opens or creates the folder, and holds its lock.

    Args:
      folder: the run folder.
      config: the resolved config; reads config.name and config.log.
      step: the first step that will be written; later lines are removed.
      steps: total number; None = of an evaluation.
      about: more to record about this start in environment.json (devices, ...).
      contents: what decides the results and no field holds: name -> JSON, such
        as a digest of what a field names. A start with others is refused.
      out: stream for progress; None = standard error.

    Raises:
      RunError: the folder holds a run of another config or of other contents
        (the message names the first that differs), or a config.json that no run
        wrote; it is in use, or cannot be written to.
    """
    self.folder = pathlib.Path(folder)
    self._steps = steps
    self._progress = progress.Progress(out, config.log.progress)
    self._seconds: dict[str, float] = collections.defaultdict(float)
    self._pending: futures.Future | None = None
    self._start = self._last = time.monotonic()
    self._first = self._next = step
    self._began = False
    self._waited = cluster.waited()
    self._metrics = self.folder / 'metrics.jsonl'
    self._lock: Any = None  # the open file, of the process that has it
    # Ids -> text. With it, trackers show the first trajectories of a file.
    self.decode: Callable[[Iterable[int]], str] | None = None
    self._trackers: list[trackers.Tracker] = []
    with contextlib.ExitStack() as stack, records.explained(self.folder):
      about, contents = dict(about or {}), dict(contents or {})
      open_ = lambda: self._open(stack, config, about, contents)
      cluster.first('writer', open_)
      self._thread = futures.ThreadPoolExecutor(1, 'writer')
      stack.callback(self._thread.shutdown)
      stack.enter_context(self._progress)
      self._stack = stack.pop_all()

  def _open(self, stack, config, about: dict, contents: dict) -> None:
    """Opens the files that one process writes; `stack` closes them."""
    self._lock = stack.enter_context(folders.locked(self.folder))
    step, file = self._first, self.folder / 'config.json'
    records.require_ours(self.folder)
    starts, begun = records.starts(self.folder), remote.begun(self.folder)
    records.require(  # which every start writes first
      file.exists() or not begun,
      f'{self.folder} has metrics or checkpoints, and not the config.json of '
      'their run: put it back, or use another folder',
    )
    changed, before = {}, {}
    if begun:
      changed = self._changed(file, config)
      before = starts[-1]['contents'] if starts else {}
      now = records.plain(contents)
      lookup.require_contents(self.folder, before, now, records.RunError)
    start = {'step': step, 'config_changed': changed, **environment()}
    start |= {**about, 'contents': before | contents}
    path = self.folder / records.ENVIRONMENT
    records.write_json(path, {'starts': [*starts, start]})
    records.write_json(file, config)
    self._metrics.touch()
    self._alarms = alarms.Alarms(_kept(self._metrics, step or -1))
    for folder in {self.folder, remote.place(self.folder)}:
      records.drop_steps(folder, step or -1)
    self._trackers = trackers.trackers(self.folder, config, step, stack)

  def write(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Writes one step's metrics.

    Warns of a collapse, and adds 'alarm/NAME' (`alarms`; only process 0) and
    'time/NAME', the seconds that each timer measured, and 'time/step',
    the seconds since the previous step. Of several processes also
    'time/exchange': of process 0, the seconds in which it waited for what
    others sent; other timers include a part of them.

    Returns:
      What was written, as floats.
    """
    self._require_folder()
    now = time.monotonic()
    seconds = {f'time/{k}': v for k, v in self._seconds.items()}
    seconds['time/step'] = now - self._last
    if cluster.size() > 1:
      seconds['time/exchange'] = cluster.waited() - self._waited
      self._waited = cluster.waited()
    self._last, self._next = now, step + 1
    self._seconds.clear()
    values = {k: float(v) for k, v in {**metrics, **seconds}.items()}
    if cluster.main():
      raised, begun = self._alarms(step, values)
      values |= raised
      for text in begun:
        logging.warning(text)
      line = json.dumps({'step': step, **records.plain(values)})
      with records.explained(self._metrics), open(self._metrics, 'a') as file:
        file.write(f'{line}\n')
    self._track(step, values)
    return values

  def amend(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Adds metrics to those of `step`, the last one in the folder.

    Returns:
      What was added, as floats.
    """
    values = {k: float(v) for k, v in metrics.items()}
    if not cluster.main():
      return values
    lines = self._metrics.read_text().splitlines()
    line = {'step': step}
    # A machine that went down may have lost it, and kept the checkpoint.
    if lines and json.loads(lines[-1])['step'] == step:
      line = json.loads(lines.pop())
    line = json.dumps(line | records.plain(values))
    records.write_text(self._metrics, '\n'.join([*lines, line, '']))
    self._track(step, values)
    return values

  def _require_folder(self) -> None:
    """Raises RunError if the folder was removed while the run had it.

    Another start may have made it anew, which this one must not write to.
    """
    if self._lock is not None and not os.fstat(self._lock.fileno()).st_nlink:
      raise records.RunError(
        f'{self.folder} was removed while this run was writing to it; it stops'
      )

  def _track(self, step: int, values: Mapping[str, float]) -> None:
    finite = {k: v for k, v in values.items() if math.isfinite(v)}
    for tracker in self._trackers:
      tracker.write(step, finite)

  def trajectories(
    self,
    step: int,
    groups: Sequence[Group],
    rewards: Rewards | None = None,
    name: str = 'trajectories',
    part: str = '',
    every: int = 1,
    own: bool = False,
    **columns: Sequence | None,
  ) -> None:
    """Starts writing the trajectories, in order, to the step's file.

    Args:
      step: training step.
      groups: B trajectories in total.
      rewards: their rewards, if any.
      name: subfolder; evaluations use their own.
      part: suffix of the file, for a step that writes several.
      every: writes only steps that this divides; 0 = never.
      own: whether `groups` are those of this process; if not, each process has
        all and writes a share.
      **columns: B values each, or None, of `records.Record`: kept, advantages
        and trainer_logps.

    Raises:
      RunError: the previous trajectories could not be written.
    """
    self.flush()
    self._require_folder()
    if not every or step % every:
      return
    rows = []
    flat = [*enumerate(t for group in groups for t in group)]
    if cluster.size() > 1:
      part = f'{part}{part and "_"}p{cluster.rank():03}'
    for i, t in flat if own else cluster.part(flat):
      row = {k: v[i] for k, v in columns.items() if v is not None}
      if rewards is not None:
        row |= dict(reward=np.sum(rewards.value[i]), valid=rewards.valid[i])
        row['rewards'] = {k: v[i] for k, v in rewards.parts.items()}
        if rewards.at != 'trajectory':
          row |= dict(earned=rewards.value[i], earned_at=rewards.at)
      rows.append(records.Record(step, t, **row))
    shows = [t.show for t in self._trackers if self.decode and t.show]
    for n, record in enumerate(rows[:_SAMPLES] if shows else ()):
      ids = [i for segment in record.trajectory.segments for i in segment.ids]
      for show in shows:
        show(step, f'{name}/{n}', f'reward {record.reward}\n{self.decode(ids)}')
    path = records.step_file(self.folder / name, step, part)
    self._pending = self._thread.submit(
      lambda: records.write_bytes(path, records.encode(rows))
    )

  def flush(self) -> None:
    """Waits until all trajectories are on disk.

    Raises:
      RunError: they could not be written.
    """
    pending, self._pending = self._pending, None
    if pending:
      pending.result()

  def sync(self) -> None:
    """Waits as `flush` does, then brings the files of all processes to where
    the run is kept, if that is elsewhere; a collective.

    Raises:
      RunError: they could not be written.
    """
    self.flush()

    def push():
      self._require_folder()  # before a checkpoint is written to it
      if self._metrics.exists():
        with open(self._metrics, 'a') as file:
          os.fsync(file.fileno())
      remote.push(self.folder)

    cluster.agree('push', push)

  def phase(self, name: str, count: progress.Count | None = None):
    """A context whose progress is shown, if config.log.progress.

    count: returns how much of it is done, and of how much (0 = unknown).
    """
    if self._began and self._steps:
      name = f'step {self._next + 1}/{self._steps} {name}'
    return self._progress.phase(name, count)

  @contextlib.contextmanager
  def timer(
    self, name: str, count: progress.Count | None = None
  ) -> Iterator[None]:
    """A `phase`; adds its seconds to 'time/NAME' of the next `write`."""
    begin = time.monotonic()
    try:
      with self.phase(name, count):
        yield
    finally:
      self._seconds[name] += time.monotonic() - begin

  def begin(self) -> None:
    """The steps begin: what came before counts for none of them."""
    self._began, self._start = True, time.monotonic()

  def say(self, text: str) -> None:
    """Prints a line, if config.log.progress."""
    self._progress.print(text)

  def progress(self, metrics: Mapping[str, float], **names: str) -> None:
    """Prints a line about the last step, if config.log.progress.

    Args:
      metrics: what `write` returned.
      **names: label='metric', in order; metrics that are absent are left out.
        Underscores in labels are printed as spaces.
    """
    now, all_ = self._next, self._steps
    parts = [f'step {now}/{all_}' if all_ else f'step {now}']
    parts += [
      f'{label.replace("_", " ")} {_short(metrics[name])}'
      for label, name in names.items()
      if name in metrics
    ]
    if now > self._first and all_:
      each = (time.monotonic() - self._start) / (now - self._first)
      left = datetime.timedelta(seconds=round(each * (all_ - now)))
      parts.append(f'ETA {left} ({_short(each)} s a step)')
    self._progress.print('  '.join(parts))

  def close(self, error: BaseException | None = None) -> None:
    """Flushes and closes every file and unlocks the folder.

    error: what ended the run; what closing raises becomes a note of it.
    """
    with signals.after(error), self._stack:
      self.flush()

  def __enter__(self) -> 'Writer':
    return self

  def __exit__(self, kind: object, error: BaseException | None, _: object):
    self.close(error)

  def _changed(self, path: pathlib.Path, config) -> dict:
    """Compares with config.json; the changed fields: {field: [before, now]}."""
    before = records.plain(records.config(path))
    changed = lookup.differences(before, records.plain(config))
    for field, values in changed.items():
      old, new = ('absent' if v is None else json.dumps(v) for v in values)
      what = f'config.{field} is {old} there and {new} now'
      if field in _ENDS and self._steps is None:
        continue  # of an evaluation, whose checkpoint is one of the contents
      if field in _ENDS and operator.attrgetter(field)(config) == self._steps:
        self._require_open_end(field, what, config)
        continue
      records.require(
        is_free(field)
        or (field in _MODELS and values[0] == '')
        or fnmatch.fnmatchcase(field, 'reward.*.max_abstained'),
        f'{self.folder} holds a run of another config: {what}. Use the same '
        'value to continue that run, or choose another --workdir',
      )
    return changed

  def _require_open_end(self, field: str, what: str, config) -> None:
    """Refuses another number of steps if steps would have been others with it.

    What a step computes does not depend on how many follow, unless a schedule
    ends with the last one.
    """
    records.require(
      self._steps >= self._first,
      f'{self.folder} has done {self._first} steps: {what}',
    )
    for schedule in _ENDS[field]:
      part, _, _ = schedule.partition('.')
      records.require(
        config[part].schedule == 'constant' or not config[part].lr,
        f'{self.folder}: {what}, and config.{schedule}='
        f'{config[part].schedule!r} ends with the last step: the learning rates'
        f' of its {self._first} steps would have been others. Use the same '
        'value, or train on in another --workdir with --config.train.init='
        f'{self.folder}, which begins with a new optimizer',
      )


def is_free(field: str) -> bool:
  """Whether a field is in MAY_DIFFER, or in a part that is."""
  return f'{field}.'.startswith(tuple(f'{x}.' for x in MAY_DIFFER))


def shared(config) -> dict:
  """The config as JSON without what may differ between processes."""
  out = records.plain(config)
  for field in _OWN:
    *path, name = field.split('.')
    functools.reduce(operator.getitem, path, out).pop(name, None)
  return out


def _kept(path: pathlib.Path, step: int) -> list[dict]:
  """The metrics of steps before `step`; drops what follows in the file."""
  kept: list[dict] = []
  end = 0
  for line in path.read_bytes().splitlines(keepends=True):
    try:
      metrics = json.loads(line) if line.endswith(b'\n') else {'step': step}
      if metrics['step'] >= step:
        break  # or half a line of a process that was killed; steps increase
    except (ValueError, KeyError, TypeError) as error:
      raise records.RunError(
        f'{path}: another program wrote {line[:60]!r}; use another --workdir'
      ) from error
    kept.append(metrics)
    end += len(line)
  os.truncate(path, end)
  return kept


def cores() -> int | None:
  """How many CPU cores this process may use."""
  if hasattr(os, 'sched_getaffinity'):  # not on macOS
    return len(os.sched_getaffinity(0))
  return os.cpu_count()


def environment() -> dict[str, Any]:
  """Versions, commit, machine and command of this process."""
  installed = importlib.metadata.distributions
  return {
    'time': time.strftime('%Y-%m-%dT%H:%M:%S%z'),
    'command': sys.argv,
    'commit': _git('rev-parse HEAD'),
    'changed_files': (_git('status --porcelain') or '').splitlines(),
    'python': platform.python_version(),
    'packages': {n: d.version for n in _PACKAGES for d in installed(name=n)},
    'machine': {
      'host': platform.node(),
      'system': platform.platform(),
      'processor': platform.machine(),
      'cores': cores(),
      'memory_bytes': os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'),
    },
  }


def _git(command: str) -> str | None:
  """The output of git for this source tree; None outside a repository."""
  here = shlex.quote(str(pathlib.Path(__file__).parent))
  status, text = subprocess.getstatusoutput(f'git -C {here} {command}')
  return text if status == 0 else None


def _short(value: float) -> str:
  return f'{value:,.0f}' if abs(value) >= 1000 else f'{value:.3g}'
