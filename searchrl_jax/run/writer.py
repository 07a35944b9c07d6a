"""Writes the run folder.

  config.json          the resolved config
  environment.json     per start: versions, commit, machine, changed fields
  metrics.jsonl        one line per step
  trajectories/, eval/ one file per step (`records.read` reads them)
  tensorboard/, wandb/ the same metrics, if the config asks for them

A start at step s removes lines and files of steps >= s, which the run writes
again. A start at step 0 also removes those of step -1 (an evaluation before
the first update).

A thread writes trajectories, one step at a time. The call for the next step
waits for the previous one and raises its error. Call `flush` before saving a
checkpoint, so that a resumed run finds the trajectories of all earlier steps.
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
import re
import subprocess
import sys
import time
from typing import Any, TextIO

from ml_collections import ConfigDict
import numpy as np

from searchrl_jax.run import records, trackers
from searchrl_jax.types import Group, Rewards

# Fields that may change between two starts of a run. They state where it runs,
# for how long and what it prints, never what it computes.
MAY_DIFFER = (
  'log', 'source.url', 'source.simulator.url', 'data.dir', 'train.seconds',
  'checkpoint.every', 'checkpoint.keep', 'rollout.mismatch_alarm',
  # Where the engine's servers run, not what they compute.
  'engine.url', 'engine.venv', 'engine.device', 'engine.gpu_memory',
  'engine.host_gib', 'engine.kv_cache_gib', 'engine.start_seconds',
  'engine.timeout', 'engine.deadline', 'engine.attempts',
)  # fmt: skip
_PACKAGES = (
  'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy', 'grain',
  'transformers', 'tokenizers', 'bm25s', 'httpx', 'ml_collections',
)  # fmt: skip
_STEP = re.compile(rb'\{"step": (-?\d+)[,}]')


class Writer:
  """Writes everything that a run stores but checkpoints; a context manager."""

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
    """Opens or creates the folder.

    Args:
      folder: the run folder.
      config: the resolved config; reads config.name and config.log.
      step: the first step that will be written; later lines are removed.
      steps: total number, for the remaining time; 0 = unknown.
      about: more to record about this start in environment.json (devices, ...).
      may_differ: fields, or their prefixes, that another start may change.
      out: stream for progress; None = standard error.

    Raises:
      RunError: the folder holds a run of another config (the message names the
        first field that differs), is in use, or cannot be written to.
    """
    self.folder = pathlib.Path(folder)
    self._log, self._steps = config.log, steps
    self._out = sys.stderr if out is None else out
    self._seconds: dict[str, float] = {}
    self._thread = futures.ThreadPoolExecutor(1, 'writer')
    self._pending: futures.Future | None = None
    self._start = self._last = time.monotonic()
    self._first = self._step = step
    with records.explained(self.folder):
      self.folder.mkdir(parents=True, exist_ok=True)
      self._lock = open(self.folder / '.lock', 'w')
    try:
      fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      self._lock.close()
      raise records.RunError(
        f'{self.folder} is in use by another process; end it, or choose '
        'another --workdir'
      ) from error
    try:
      changed = self._write_config(config, may_differ)
      path, starts = self.folder / 'environment.json', []
      if path.exists():
        starts = json.loads(path.read_text(encoding='utf-8'))['starts']
      start = {'step': step, 'config_changed': changed, **environment()}
      records.write_json(path, {'starts': [*starts, start | dict(about or {})]})
      self._metrics = JsonlFile(self.folder / 'metrics.jsonl', step or -1)
      records.drop_steps(self.folder, step or -1)
      self._board = (
        trackers.TensorBoard(self.folder, step)
        if self._log.tensorboard
        else None
      )
      self._wandb = trackers.wandb_run(self.folder, config)
    except BaseException:
      self._lock.close()
      raise

  def write(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Writes one step's metrics.

    Adds 'time/NAME', the seconds that each timer measured, and 'time/step',
    the seconds since the previous step.

    Returns:
      What was written, as floats.
    """
    now = time.monotonic()
    seconds = {f'time/{k}': v for k, v in self._seconds.items()}
    seconds['time/step'] = now - self._last
    self._last, self._seconds, self._step = now, {}, step
    values = {k: _number(k, v) for k, v in {**metrics, **seconds}.items()}
    self._metrics.write([{'step': step, **records.plain(values)}])
    self._copy(step, values)
    return values

  def amend(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Adds metrics to those of `step`, the last one in the folder.

    Returns:
      What was added, as floats.
    """
    values = {k: _number(k, v) for k, v in metrics.items()}
    self._metrics.amend(records.plain(values))
    self._copy(step, values)
    return values

  def _copy(self, step: int, values: Mapping[str, float]) -> None:
    finite = {k: v for k, v in values.items() if math.isfinite(v)}
    if self._board is not None:
      self._board.write(step, finite)
    if self._wandb is not None:
      self._wandb.log({'step': step, **finite})

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
    """Starts writing the trajectories, in order, to the step's file.

    Args:
      step: training step.
      groups: B trajectories in total.
      rewards: their rewards, if any.
      kept: bool [B], whether the step trained on each; None = no training.
      advantages: [B], or B arrays [n], if any.
      trainer_logps: B arrays [n], if the trainer scored them.
      name: subfolder; evaluations use their own.
      part: suffix of the file, for a step that writes several.
      every: writes only steps that this divides; 0 = never.

    Raises:
      RunError: the previous trajectories could not be written.
    """
    self.flush()
    if not every or step % every:
      return
    columns = dict(
      kept=kept, advantages=advantages, trainer_logps=trainer_logps
    )
    columns = {name: v for name, v in columns.items() if v is not None}
    rows = []
    for i, t in enumerate(t for group in groups for t in group):
      row = {name: values[i] for name, values in columns.items()}
      if rewards is not None:
        row |= dict(reward=np.sum(rewards.value[i]), valid=rewards.valid[i])
        row['rewards'] = {k: v[i] for k, v in rewards.parts.items()}
        if rewards.at != 'trajectory':
          row |= dict(earned=rewards.value[i], earned_at=rewards.at)
      rows.append(records.Record(step, t, **row))
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
    if pending is not None:
      pending.result()

  @contextlib.contextmanager
  def timer(self, name: str) -> Iterator[None]:
    """Adds the seconds of the block to 'time/NAME' of the next `write`."""
    begin = time.monotonic()
    try:
      yield
    finally:
      seconds = time.monotonic() - begin
      self._seconds[name] = self._seconds.get(name, 0.0) + seconds

  def progress(self, metrics: Mapping[str, float], **names: str) -> None:
    """Prints a line about the last step, if config.log.progress.

    Args:
      metrics: what `write` returned.
      **names: label='metric', in order; metrics that are absent are left out.
        Underscores in labels are printed as spaces.
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
    """Prints a line. On a terminal the next line overwrites a `passing` one."""
    if self._out.isatty():
      # Carriage return, then erase to the end of the line.
      print(f'\r\x1b[K{line}', end='' if passing else '\n', file=self._out)
      if passing and self._steps and self._step + 1 >= self._steps:
        print(file=self._out)
    else:
      print(line, file=self._out)
    self._out.flush()

  def close(self) -> None:
    """Flushes and closes every file and unlocks the folder."""
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
    except Exception as failure:
      if error is None:
        raise
      error.add_note(str(failure))  # keep the error that ended the run

  def _write_config(self, config, may_differ: Sequence[str]) -> dict:
    """Writes config.json. Returns changed fields: {field: [before, now]}."""
    path = self.folder / 'config.json'
    now, changed = records.plain(config), {}
    if path.exists() and records.begun(self.folder):
      try:
        before = json.loads(path.read_text(encoding='utf-8'))
      except ValueError as error:
        raise records.RunError(
          f'{path} is not JSON ({error}); choose another --workdir'
        ) from error
      changed = differences(before, now)
      for field, (old, new) in changed.items():
        if not any(f'{field}.'.startswith(f'{name}.') for name in may_differ):
          raise records.RunError(
            f'{self.folder} holds a run of another config: config.{field} is '
            f'{_shown(old)} there and {_shown(new)} now. Use the same value '
            'to continue that run, or choose another --workdir'
          )
    records.write_json(path, now)
    return changed


class JsonlFile:
  """A JSON-lines file that is appended to; partial lines are removed."""

  def __init__(self, path: os.PathLike | str, step: int):
    """Opens `path` and drops lines of steps >= `step` and a partial line."""
    self._path = pathlib.Path(path)
    with records.explained(self._path):
      self._path.parent.mkdir(parents=True, exist_ok=True)
      if self._path.exists():
        _drop_from(self._path, step)
      self._file = open(self._path, 'ab')

  def write(self, rows: Sequence[Mapping]) -> None:
    """Appends rows. The first field of each must be 'step'.

    Raises:
      RunError: the disk is full. No part of the rows is left in the file.
    """
    lines = [json.dumps(row) + '\n' for row in rows]
    begin = self._file.tell()
    with records.explained(self._path):
      try:
        self._file.write(''.join(lines).encode())
        self._file.flush()
      except OSError:
        # close() would write the rest of the buffer again.
        with contextlib.suppress(OSError):
          self._file.close()
        os.truncate(self._path, begin)
        raise

  def amend(self, fields: Mapping) -> None:
    """Adds fields to the last row, atomically."""
    *before, last = self._path.read_bytes().splitlines(keepends=True)
    row = json.dumps(json.loads(last) | fields) + '\n'
    records.write_bytes(self._path, b''.join([*before, row.encode()]))
    self.close()
    with records.explained(self._path):
      self._file = open(self._path, 'ab')

  def close(self) -> None:
    with records.explained(self._path):
      self._file.close()


def _drop_from(path: pathlib.Path, step: int) -> None:
  end = 0
  with open(path, 'rb') as f:
    for line in f:
      if not line.endswith(b'\n'):
        break  # the process ended while it wrote
      match = _STEP.match(line)
      if match is None:
        raise records.RunError(
          f'{path}: a line does not start with "step": {line[:60]!r}; another '
          'program wrote this file, so choose another --workdir'
        )
      if int(match[1]) >= step:
        break  # steps increase within a file
      end += len(line)
  os.truncate(path, end)


def differences(before: Any, now: Any, at: str = '') -> dict[str, list]:
  """Fields in which two JSON values differ: {path: [before, now]}.

  None stands for a field that is absent.
  """
  if not (isinstance(before, dict) and isinstance(now, dict)):
    return {} if before == now else {at: [before, now]}
  out = {}
  for name in sorted({*before, *now}):
    path = f'{at}.{name}' if at else name
    if name in before and name in now:
      out |= differences(before[name], now[name], path)
    else:
      out[path] = [before.get(name), now.get(name)]
  return out


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
  """The output of git for this source tree; None outside a repository."""
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
  start = f'{hours}:{minutes:02d}' if hours else f'{minutes}'
  return f'{start}:{seconds:02d}'
