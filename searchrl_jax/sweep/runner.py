"""Runs the stages of a sweep, each in a process, here or by SLURM."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from typing import Any

from absl import flags
from rich import live, table

from searchrl_jax import lookup
from searchrl_jax.run import command
from searchrl_jax.store import records
from searchrl_jax.store.progress import Progress
from searchrl_jax.sweep import core, stages
from searchrl_jax.sweep.core import Sweep

SBATCH = 'experiments/cluster/sweep.sbatch'
# glibc reads it when a process starts (docs/benchmarks.md).
HUGE_PAGES = {'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=1'}

# What is defined here is the calling command's: `--help` shows it.
flags.disclaim_key_flags()


class SweepError(RuntimeError):
  """Stages failed; what did not need them is done."""


class Board:
  """What the stages do: a live table on a terminal, else a line for each."""

  def __init__(self, sweep: Sweep, planned: Sequence[str], folder):
    self._sweep, self._planned, self._folder = sweep, planned, folder
    self._screen = sys.stdout.isatty()
    self._lines = Progress(sys.stdout, shown=not self._screen)
    self.running: dict[str, int] = {}  # stage -> its number of steps
    self._cells = {stage: self._score(stage) for stage in planned}
    self._begun, self._left = 0, sum(not x for x in self._cells.values())

  @contextlib.contextmanager
  def shown(self) -> Iterator[None]:
    screen: Any = contextlib.nullcontext()
    if self._screen:
      screen = live.Live(get_renderable=self.table, refresh_per_second=1)
    with self._lines, self._lines.phase('stages', self._count), screen:
      yield

  @property
  def left(self) -> list[str]:
    """The stages that are not done."""
    return [stage for stage, cell in self._cells.items() if not cell]

  def _count(self) -> tuple[int, int]:
    return self._begun - len(self.running), self._left

  def started(self, stage: str) -> None:
    config = stages.config_of(self._sweep, stage, self._folder)
    part = config.sft if stage.startswith('warm/') else config.train
    self.running[stage] = part.steps
    self._begun += 1
    self._lines.print(f'[{self._begun}/{self._left}] {stage}')

  def ended(self, stage: str, error: str = '') -> None:
    self.running.pop(stage, None)
    self._cells[stage] = 'failed' if error else self._score(stage)
    self._lines.print(f'{stage}: {error or self._cells[stage]}')

  def _score(self, stage: str) -> str:
    """What a cell shows of a complete stage; '' of another."""
    if not stages.done(self._sweep, stage, self._folder):
      return ''
    path = self._folder / stage / 'after' / 'values.json'
    values = json.loads(path.read_text()) if path.exists() else {}
    score = next(iter(self._sweep.curves), '')
    return f'{values[score]:.3f}' if score in values else 'done'

  def _cell(self, stage: str) -> str:
    path = self._folder / stage / 'run' / 'metrics.jsonl'
    if self._cells.get(stage) or not path.exists():
      return self._cells.get(stage, '')
    with path.open('rb') as file:  # the last lines
      file.seek(max(path.stat().st_size - (1 << 18), 0))
      found = re.findall(rb'^{"step": (-?\d+)', file.read(), re.M)
    steps = int(found[-1]) + 1 if found else 0
    of = self.running.get(stage)
    return f'{steps}/{of}' if of else f'stopped after {steps}'

  def table(self) -> table.Table:
    """A line for each arm and warm start, a column for each case."""
    cases = [stage.rpartition('/')[2] for stage in self._planned]
    shown = table.Table('')
    for case in dict.fromkeys(cases):
      purpose = self._sweep.purpose(self._sweep.arms[0], case)
      shown.add_column(f'{case} ({purpose})', justify='right')
    for name in dict.fromkeys(s.rpartition('/')[0] for s in self._planned):
      cells = [self._cell(f'{name}/{case}') for case in dict.fromkeys(cases)]
      shown.add_row(name, *cells)
    return shown


def run(
  spec: str,
  sweep: Sweep,
  planned: Sequence[str],
  folder: pathlib.Path,
  *,
  parallel: int = 1,
  after: Callable[[], object] = lambda: None,
) -> None:
  """Runs the stages that are not done, as many at a time as `parallel`.

  after: called whenever a stage has ended.

  Raises:
    SweepError: some failed; all others that can be done are done.
    ConfigError: a stage was run with another config; nothing has run.
  """
  failed: dict[str, str] = {}
  running: dict[str, tuple[subprocess.Popen, int]] = {}  # process, its slot
  with contextlib.ExitStack() as stack:
    board = Board(sweep, planned, folder)
    left = board.left
    servers = stack.enter_context(stages.Servers(folder))
    stack.enter_context(board.shown())
    stack.callback(end, running)

    def fail(stage, error):
      failed[stage] = error
      board.ended(stage, f'failed: {error}')

    while left or running:
      for stage in [*left]:
        needs = set(sweep.needs(stage).values())
        if needs & failed.keys():
          left.remove(stage)
          fail(stage, f'it needs {", ".join(needs & failed.keys())}')
        elif len(running) < parallel and not needs & {*left, *running}:
          left.remove(stage)
          slot = min({*range(parallel)} - {n for _, n in running.values()})
          board.started(stage)
          try:
            url = servers.url(stages.config_of(sweep, stage, folder))
          except Exception as e:  # of this world alone
            if not command.is_user_error(e):
              raise
            fail(stage, str(e))
            continue
          running[stage] = spawn(spec, stage, folder, url, slot, parallel), slot
      for stage, (process, _) in [*running.items()]:
        if process.poll() is not None:
          del running[stage]
          if code := process.returncode:
            killed = f'killed by signal {-code}: ' if code < 0 else ''
            said = f'{killed}{reason(folder, stage)}'
            fail(stage, f'{said} ({log_of(folder, stage)})')
          else:
            board.ended(stage)
          after()
      time.sleep(0.1)
  if failed:
    raise SweepError(
      f'{len(failed)} of {len(planned)} stages failed, and the same command '
      'tries them again:\n'
      + '\n'.join(f'  {stage}: {error}' for stage, error in failed.items())
    )


def log_of(folder: pathlib.Path, stage: str) -> pathlib.Path:
  return folder / 'logs' / f'{stage.replace("/", "_")}.txt'


def reason(folder: pathlib.Path, stage: str) -> str:
  """The error in a stage's log, or its last line."""
  lines = log_of(folder, stage).read_text(errors='replace').split('\n')
  lines = [line for line in lines if line.strip()]
  errors = [line for line in lines if line.startswith('error: ')]
  return (errors or lines or ['it printed nothing'])[-1]


def spawn(
  spec: str, stage: str, folder: pathlib.Path, url: str, slot: int, slots: int
) -> subprocess.Popen:
  """Starts a stage in a process that saves and ends with this one."""
  log = log_of(folder, stage)
  log.parent.mkdir(parents=True, exist_ok=True)
  env = HUGE_PAGES | os.environ
  devices = env.get('CUDA_VISIBLE_DEVICES', '')
  if len(devices.split(',')) >= slots > 1:
    env['CUDA_VISIBLE_DEVICES'] = ','.join(devices.split(',')[slot::slots])
  with log.open('w') as out:
    process = subprocess.Popen(
      [
        *(sys.executable, '-m', 'searchrl_jax.sweep', f'--sweep={spec}'),
        *(f'--workdir={folder}', f'--stage={stage}', f'--url={url}'),
        '--child',
      ],
      # Closes when this process ends for any reason. In a new session, Ctrl-C
      # reaches only this process.
      stdin=subprocess.PIPE,
      start_new_session=True,
      stdout=out,
      stderr=out,
      env=env,
    )
  # Before it imports JAX, which starts a thread for each of its cores. Where
  # two processes share cores, handing work to such threads costs a third.
  if hasattr(os, 'sched_setaffinity'):
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // slots  # as many for all: bits can depend on it
    if each and slots > 1:
      os.sched_setaffinity(process.pid, cores[slot * each :][:each])
  return process


def end(running: dict[str, tuple[subprocess.Popen, int]]) -> None:
  """Lets the processes save and end."""
  for process, _ in running.values():
    process.stdin.close()
  for process, _ in running.values():
    process.wait()


def submit(
  spec: str,
  sweep: Sweep,
  planned: Sequence[str],
  folder: pathlib.Path,
  options: Sequence[str] = (),
) -> list[str]:
  """Submits what is not done as SLURM arrays, warm starts first.

  Returns:
    The ids of the jobs. The tasks of a job wait for the job before it.

  Raises:
    ConfigError: there is no sbatch, or it refuses.
  """
  lookup.require(shutil.which('sbatch'), '--slurm: this machine has no sbatch')
  depths: dict[str, int] = {}
  for stage in planned:  # each after those that it needs
    if not stages.done(sweep, stage, folder):
      before = [depths.get(s, -1) for s in sweep.needs(stage).values()]
      depths[stage] = 1 + max(before, default=-1)
  jobs: list[str] = []
  for depth in sorted({*depths.values()}):
    tasks = [stage for stage, n in depths.items() if n == depth]
    path = folder / 'slurm' / f'stages_{depth}.txt'
    records.write_text(path, '\n'.join([*tasks, '']))
    done = subprocess.run(
      [
        *('sbatch', '--parsable', f'--array=0-{len(tasks) - 1}'),
        f'--output={path.parent}/%A_%a.log',
        # Also after failures: what needs them says so.
        *([f'--dependency=afterany:{jobs[-1]}'] if jobs else []),
        *(*options, SBATCH, str(path), f'--sweep={spec}'),
        f'--workdir={folder}',
      ],
      capture_output=True,
      text=True,
    )
    lookup.require(not done.returncode, f'sbatch: {done.stderr.strip()}')
    jobs.append(done.stdout.split(';')[0].strip())
  return jobs


def run_child(spec: str, stage: str, folder: pathlib.Path, url: str) -> None:
  """A stage in this process."""
  import jax

  # Stages compile the same programs, most of them in less than the second from
  # which JAX would keep them.
  jax.config.update('jax_compilation_cache_dir', str(folder / 'compiled'))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
  # The sweep that started this process has checked it.
  stages.run_stage(core.read(spec), stage, folder, url)


def define_flags() -> None:
  """Defines the flags that experiments/rows.py has too."""
  command.define_workdir()
  command.define_data_dir()
  flags.DEFINE_list('only', [], 'Arms to run; default: all.')
  flags.DEFINE_list(
    'seeds', [], 'Seeds to run; default: those that are reported.'
  )
  flags.DEFINE_integer('parallel', 1, 'Stages that run at a time.', 1)


def chosen(
  sweep: Sweep, only: Sequence[str], seeds: Sequence[str]
) -> list[str]:
  """The stages that the flags name.

  Raises:
    ConfigError: a flag names what there is not.
  """
  with lookup.of(f'--seeds={",".join(seeds)}'):
    numbers = [int(seed) for seed in seeds]
  return core.plan(sweep, [*map(sweep.arm, only)] or sweep.arms, numbers)
