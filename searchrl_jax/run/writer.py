"""A run's folder: what it did, in files that outlive it.

  config.json          the resolved config
  environment.json     each start: versions, commit, machine, changed fields
  metrics.jsonl        one line a step
  trajectories/, eval/ one file a step (`records.read` gives them back)
  tensorboard/, wandb/ the same metrics, where the config asks for them

A start at step s removes lines and files of steps >= s, since they will be
written again: nothing stands twice after a resume. A start at step 0 is the
first or takes everything again, so those of step -1 (an evaluation before any
update) go too.

Trajectories are written by a thread, one step at a time: whoever writes the
next step waits until the last one is on disk, and gets its error. `flush`
before a checkpoint, so that a resume finds all steps before its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
import contextlib
import fcntl
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import secrets
import subprocess
import sys
import time
from typing import Any, TextIO

from ml_collections import ConfigDict
import numpy as np

from searchrl_jax.run.records import (
  JsonlFile,
  Record,
  RunError,
  begun,
  drop_steps,
  encode,
  explained,
  plain,
  step_file,
  write_bytes,
  write_json,
  write_text,
)
from searchrl_jax.types import Group, Rewards

# Fields that may change between two starts of a run: they say where it runs,
# how long and what it prints, never what it computes.
MAY_DIFFER = (
  'log',
  'source.url',
  'source.simulator.url',
  'data.dir',
  'train.seconds',
  'checkpoint.every',
  'checkpoint.keep',
  'rollout.mismatch_alarm',
  # Where the engine's servers are, not what they compute.
  'engine.url',
  'engine.venv',
  'engine.device',
  'engine.gpu_memory',
  'engine.host_gib',
  'engine.kv_cache_gib',
  'engine.start_seconds',
  'engine.timeout',
  'engine.deadline',
  'engine.attempts',
)
_PACKAGES = (
  'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy', 'grain',
  'transformers', 'tokenizers', 'bm25s', 'httpx', 'ml_collections',
)  # fmt: skip


class Writer:
  """Everything that a run leaves behind; a context manager."""

  def __init__(
    self,
    folder: os.PathLike | str,
    config: ConfigDict,
    *,
    step: int = 0,
    steps: int = 0,
    about: Mapping[str, Any] | None = None,
    may_differ: Sequence[str] = MAY_DIFFER,
    out: TextIO | None = None,
  ):
    """Opens the folder, or makes it.

    Args:
      folder: the run's folder.
      config: the resolved config; reads config.name and config.log.
      step: the first that will be written; later lines are removed.
      steps: in all, for the time that remains; 0 = unknown.
      about: what environment.json also says of this start (devices, ...).
      may_differ: fields, or their beginnings, that another start may change.
      out: where progress goes; standard error if None.

    Raises:
      RunError: the folder is another run's, and that run has begun (the first
        differing field is named); is in use; or cannot be written.
    """
    self.folder = pathlib.Path(folder)
    self._log, self._steps = config.log, steps
    self._out = sys.stderr if out is None else out
    self._seconds: dict[str, float] = {}
    self._thread = futures.ThreadPoolExecutor(1, 'writer')
    self._pending: futures.Future | None = None
    self._start = self._last = time.monotonic()
    self._first = self._step = step
    with explained(self.folder):
      self.folder.mkdir(parents=True, exist_ok=True)
      self._lock = open(self.folder / '.lock', 'w')
    try:
      fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      self._lock.close()
      raise RunError(
        f'{self.folder} is in use by another process; end it, or choose '
        'another --workdir'
      ) from error
    try:
      changed = self._claim(config, may_differ)
      self._note_start(step, changed, about or {})
      self._metrics = JsonlFile(self.folder / 'metrics.jsonl', step or -1)
      drop_steps(self.folder, step or -1)
      self._board = _Board(self.folder, step) if self._log.tensorboard else None
      self._wandb = _wandb(self.folder, config)
    except BaseException:
      self._lock.close()
      raise

  def write(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Writes one step's metrics, with the seconds that timers measured.

    Seconds of the phases stand under 'time/NAME', those since the last step
    under 'time/step'.

    Returns:
      What was written, as plain floats.
    """
    now = time.monotonic()
    seconds = {f'time/{k}': v for k, v in self._seconds.items()}
    seconds['time/step'] = now - self._last
    self._last, self._seconds, self._step = now, {}, step
    values = {k: _number(k, v) for k, v in {**metrics, **seconds}.items()}
    self._metrics.write([{'step': step, **plain(values)}])
    finite = {k: v for k, v in values.items() if math.isfinite(v)}
    if self._board is not None:
      self._board.write(step, finite)
    if self._wandb is not None:
      self._wandb.log({'step': step, **finite})
    return values

  def trajectories(
    self,
    step: int,
    groups: Sequence[Group],
    rewards: Rewards | None = None,
    *,
    kept: Sequence[bool] | None = None,
    advantages: Sequence | None = None,
    trainer_logps: Sequence[np.ndarray] | None = None,
    name: str = 'trajectories',
    part: str = '',
    every: int = 1,
  ) -> None:
    """Has the thread write each trajectory, in order, to a file of the step.

    Args:
      step: training step.
      groups: B trajectories in all.
      rewards: theirs, if they have any.
      kept: bool [B], which of them the step was trained on, if it was.
      advantages: [B], or B arrays [n], if they have any.
      trainer_logps: B arrays [n], if the trainer scored them.
      name: of the folder, so that evaluations keep theirs apart.
      part: of the step, where it writes several files.
      every: writes only in steps that it divides; 0 = never.

    Raises:
      RunError: what was to be written before could not be.
    """
    self.flush()
    if not every or step % every:
      return
    found = []
    for i, t in enumerate(t for group in groups for t in group):
      earned = {}
      if rewards is not None:
        earned = {
          'reward': np.sum(rewards.value[i]),
          'valid': rewards.valid[i],
          'rewards': {k: v[i] for k, v in rewards.parts.items()},
        }
        if rewards.at != 'trajectory':
          earned |= {'earned': rewards.value[i], 'earned_at': rewards.at}
      for column, values in (
        ('kept', kept),
        ('advantages', advantages),
        ('trainer_logps', trainer_logps),
      ):
        if values is not None:
          earned[column] = values[i]
      found.append(Record(step, t, **earned))
    path = step_file(self.folder / name, step, part)
    self._pending = self._thread.submit(
      lambda: write_bytes(path, encode(found))
    )

  def flush(self) -> None:
    """Waits until all trajectories are on disk.

    Raises:
      RunError: they could not be written.
    """
    pending, self._pending = self._pending, None
    if pending is not None:
      pending.result()

  @contextlib.contextmanager
  def timer(self, name: str) -> Iterator[None]:
    """Adds the seconds inside to 'time/NAME' of the next `write`."""
    begin = time.monotonic()
    try:
      yield
    finally:
      seconds = time.monotonic() - begin
      self._seconds[name] = self._seconds.get(name, 0.0) + seconds

  def progress(self, metrics: Mapping[str, float], **names: str) -> None:
    """Prints the line of the step written last, if config.log.progress.

    Args:
      metrics: what `write` returned.
      **names: label='metric', in the order of the line; an absent metric is
        left out. An underscore of a label is printed as a space.
    """
    if not self._log.progress:
      return
    done = self._step + 1 - self._first
    parts = [f'step {self._step + 1}' + (f'/{self._steps}' * (self._steps > 0))]
    parts += [
      f'{label.replace("_", " ")} {_short(metrics[name])}'
      for label, name in names.items()
      if name in metrics
    ]
    if self._steps and done > 0:
      left = (self._steps - self._step - 1) / done
      parts.append(f'ETA {_clock((time.monotonic() - self._start) * left)}')
    self.say('  '.join(parts), passing=True)

  def say(self, line: str, *, passing: bool = False) -> None:
    """Prints a line; a passing one gives way to the next on a terminal."""
    if self._out.isatty():
      # Carriage return, then erase to the end of the line.
      print(f'\r\x1b[K{line}', end='' if passing else '\n', file=self._out)
      if passing and self._steps and self._step + 1 >= self._steps:
        print(file=self._out)
    else:
      print(line, file=self._out)
    self._out.flush()

  def close(self) -> None:
    """Flushes and closes every file and lets the folder go."""
    try:
      self.flush()
    finally:
      self._thread.shutdown()
      self._metrics.close()
      if self._board is not None:
        self._board.close()
      if self._wandb is not None:
        self._wandb.finish()
      self._lock.close()

  def __enter__(self) -> 'Writer':
    return self

  def __exit__(self, kind: object, error: BaseException | None, _: object):
    try:
      self.close()
    except RunError as failure:
      if error is None:
        raise
      error.add_note(str(failure))  # what ended the run comes first

  def _claim(self, config: ConfigDict, may_differ: Sequence[str]) -> dict:
    """Writes config.json, or compares it: {field: [before, now]}."""
    path = self.folder / 'config.json'
    now = plain(config)
    changed = {}
    if path.exists() and begun(self.folder):
      try:
        before = json.loads(path.read_text(encoding='utf-8'))
      except ValueError as error:
        raise RunError(
          f'{path} is not JSON ({error}); choose another --workdir'
        ) from error
      changed = differences(before, now)
      for field, (old, new) in changed.items():
        if not any(f'{field}.'.startswith(f'{name}.') for name in may_differ):
          raise RunError(
            f'{self.folder} holds a run of another config: config.{field} is '
            f'{_shown(old)} there and {_shown(new)} now. Use the same value '
            'to go on with that run, or choose another --workdir'
          )
    write_json(path, now)
    return changed

  def _note_start(self, step: int, changed: dict, about: Mapping) -> None:
    path = self.folder / 'environment.json'
    starts = []
    if path.exists():
      starts = json.loads(path.read_text(encoding='utf-8'))['starts']
    start = {'step': step, 'config_changed': changed, **environment(), **about}
    write_json(path, {'starts': [*starts, start]})


def differences(before: Any, now: Any, at: str = '') -> dict[str, list]:
  """Fields that differ between two plain configs: {path: [before, now]}."""
  if isinstance(before, dict) and isinstance(now, dict):
    out = {}
    for name in sorted({*before, *now}):
      path = f'{at}.{name}' if at else name
      if name not in before:
        out[path] = [None, now[name]]
      elif name not in now:
        out[path] = [before[name], None]
      else:
        out |= differences(before[name], now[name], path)
    return out
  return {} if before == now else {at: [before, now]}


def environment() -> dict[str, Any]:
  """Versions, commit, machine and command of this process."""
  versions = {}
  for name in _PACKAGES:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      versions[name] = importlib.metadata.version(name)
  return {
    'time': time.strftime('%Y-%m-%dT%H:%M:%S%z'),
    'command': sys.argv,
    'commit': _git('rev-parse', 'HEAD'),
    'changed_files': (_git('status', '--porcelain') or '').splitlines(),
    'python': platform.python_version(),
    'packages': versions,
    'machine': {
      'host': platform.node(),
      'system': platform.platform(),
      'processor': platform.machine(),
      'cores': os.cpu_count(),
      'memory_bytes': os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'),
    },
  }


def _git(*command: str) -> str | None:
  """What git says of this source; None outside a repository."""
  try:
    done = subprocess.run(
      ['git', *command],
      cwd=pathlib.Path(__file__).parent,
      capture_output=True,
      text=True,
      timeout=10,
      check=False,
    )
  except (OSError, subprocess.TimeoutExpired):
    return None
  return done.stdout.rstrip() if done.returncode == 0 else None


class _Board:
  """TensorBoard's event file, by its own writer: no TensorFlow, no torch."""

  def __init__(self, folder: pathlib.Path, step: int):
    # Here and not above: a run without TensorBoard need not have it.
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    self._event, self._summary = event_pb2.Event, summary_pb2.Summary
    self._path = folder / 'tensorboard'
    with explained(self._path):
      self._writer = EventFileWriter(str(self._path))
      # Tells TensorBoard to drop points of steps >= `step` seen before.
      start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
      self._writer.add_event(
        self._event(wall_time=time.time(), step=step, session_log=start)
      )

  def write(self, step: int, values: Mapping[str, float]) -> None:
    summary = self._summary(
      value=[
        self._summary.Value(tag=name, simple_value=value)
        for name, value in values.items()
      ]
    )
    event = self._event(wall_time=time.time(), step=step, summary=summary)
    with explained(self._path):
      self._writer.add_event(event)
      self._writer.flush()

  def close(self) -> None:
    with explained(self._path):
      self._writer.close()


def _wandb(folder: pathlib.Path, config: ConfigDict) -> Any:
  modes = ('disabled', 'offline', 'online')
  if config.log.wandb not in modes:
    raise RunError(f'config.log.wandb={config.log.wandb!r} is none of {modes}')
  # What the machine's owner says counts more than a config.
  mode = os.environ.get('WANDB_MODE') or config.log.wandb
  if mode == 'disabled':
    return None
  try:
    import wandb
  except ImportError as error:
    raise RunError(
      f'config.log.wandb={config.log.wandb!r} needs the package wandb: pip '
      'install wandb'
    ) from error
  name = folder / 'wandb_id.txt'
  if not name.exists():
    write_text(name, secrets.token_hex(4) + '\n')
  try:
    run = wandb.init(
      project=config.log.project,
      name=config.name,
      id=name.read_text().strip(),
      resume='allow' if mode == 'online' else None,
      dir=str(folder),
      mode=mode,
      config=plain(config),
      settings=wandb.Settings(silent=True),
    )
  except wandb.errors.Error as error:
    raise RunError(
      f'config.log.wandb={config.log.wandb!r}: {error}. Use offline, or '
      'disabled'
    ) from error
  # Our own step is the axis: wandb's counter refuses to go back on a resume.
  run.define_metric('*', step_metric='step')
  return run


def _number(name: str, value: Any) -> float:
  array = np.asarray(value)
  if array.size != 1 or array.dtype.kind not in 'biuf':
    raise ValueError(f'metric {name!r} is not one number: {value!r}')
  return float(array.reshape(()))


def _short(value: float) -> str:
  return f'{value:,.0f}' if abs(value) >= 1000 else f'{value:.3g}'


def _shown(value: Any) -> str:
  return 'absent' if value is None else json.dumps(value)


def _clock(seconds: float) -> str:
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f'{hours}:{minutes:02d}:{seconds:02d}'
  return f'{minutes}:{seconds:02d}'
