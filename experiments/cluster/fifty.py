"""Stops and kills a run of two processes again and again; none may hang.

  python -m experiments.cluster.fifty --rounds=50 --steps=300

Every round starts the tiny run of tests/cluster on this machine, or resumes it.
After a random time, some of it in the start and some of it in the steps, a
random process gets SIGTERM, SIGUSR1 or SIGKILL. All processes have to end
within 60 seconds, with the exit status that docs/cluster.md gives. At last the
run goes on to its end. Parameters and metrics then equal, bit for bit, those of
a run that nobody stopped.
"""

import json
import math
import os
import pathlib
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, NoReturn

from absl import app, flags
import jax

from experiments import common
from retrieval import process
from searchrl_jax.store import checkpoint, records
from searchrl_jax.worlds import microworld
from tests import tiny
from tests.cluster import launch

LIMIT_S = 60  # in which every process ends after a signal to one
START_S = 600  # until a process has met the others, and of a whole start
SIGNALS = signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1
COUNT = 2
# Metrics of what a start measured: times, and rollouts of that start alone.
MEASURED = 'time/', 'rollout/', 'sync/', 'second', 'memory', 'mfu', 'flops'
_ROUNDS = flags.DEFINE_integer('rounds', 50, 'Starts that are ended.')
_STEPS = flags.DEFINE_integer('steps', 300, 'Of the run; all rounds need some.')
_FOLDER = flags.DEFINE_string(
  'folder', '', 'For the runs; default: a temporary one.'
)
_SEED = flags.DEFINE_integer('seed', 0, 'Of times, signals and processes.')


def met(pid: int) -> bool:
  """Whether a process has joined the others: it then catches SIGUSR1."""
  status = pathlib.Path(f'/proc/{pid}/status').read_text()
  caught = int(status.partition('SigCgt:')[2].split()[0], 16)
  return bool(caught >> (signal.SIGUSR1 - 1) & 1)


def until(condition, processes, seconds: float) -> bool:
  """Waits for a condition; False if a process ends, or it takes too long."""
  end = time.monotonic() + seconds
  while all(p.poll() is None for p in processes.running):
    if condition():
      return True
    if time.monotonic() > end:
      return False
    time.sleep(0.02)
  return False


def fail(processes, message: str) -> NoReturn:
  """Prints the ends of the logs of all processes, and exits."""
  for rank in range(COUNT):
    print(f'-- process {rank}:\n{processes.said(rank)[-6000:]}')
  sys.exit(message)


def ended(processes, seconds: float) -> list[int]:
  """The exit statuses.

  Raises:
    SystemExit: a process hangs; prints the Python stacks of all its threads.
  """
  try:
    return processes.wait(seconds)
  except subprocess.TimeoutExpired:
    hanging = [i for i, p in enumerate(processes.running) if p.poll() is None]
    for rank in hanging:
      processes.send(rank, signal.SIGABRT)  # faulthandler prints the stacks
    time.sleep(2)
    fail(processes, f'processes {hanging} did not end within {seconds:.0f} s')


def saved(folder: pathlib.Path) -> int:
  """The last step that has a checkpoint."""
  path = folder / 'run' / records.CHECKPOINTS
  return checkpoint.Checkpointer(path, None, '').latest() or 0


def a_round(folder: pathlib.Path, url: str, draw: random.Random) -> str:
  """Starts the run and ends it by a signal; returns a row of the table."""
  number, rank = draw.choice(SIGNALS), draw.randrange(COUNT)
  in_steps, share = draw.random() < 0.6, draw.random()
  metrics, before = folder / 'run' / 'metrics.jsonl', saved(folder)
  length = lambda: metrics.stat().st_size if metrics.exists() else 0
  begin = time.monotonic()
  with launch.train(COUNT, folder, url, steps=_STEPS.value) as processes:
    pids = [p.pid for p in processes.running]
    ready = until(lambda: all(map(met, pids)), processes, START_S)
    if ready and in_steps:
      size = length()
      ready = until(lambda: length() > size, processes, START_S)
    # From the meeting to the first step it takes ten seconds or more.
    ready = ready and not until(
      lambda: False, processes, share * (1.5 if in_steps else 10)
    )
    if not all(p.poll() is None for p in processes.running):
      fail(processes, f'ended by itself: {ended(processes, LIMIT_S)}')
    at = time.monotonic()
    processes.send(rank, number)
    statuses = ended(processes, LIMIT_S)
    took = time.monotonic() - at
    if number == signal.SIGKILL:
      good = statuses[rank] == -number and statuses[1 - rank] not in (0, 143)
    else:
      good = statuses == [143] * COUNT
    if not good:
      what = f'{number.name} to process {rank}: exit statuses {statuses}'
      fail(processes, what)
  after = saved(folder)
  if after < before:
    sys.exit(f'the run went back from step {before} to {after}')
  when = f'{"steps" if in_steps else "start"} {at - begin:.1f} s'
  return (
    f'{number.name:<8} {rank:>4}  {when:<13} {before:>5} {after:>5} '
    f'{took:>9.1f}  {statuses}'
  )


def arrays(folder: pathlib.Path) -> dict[str, Any]:
  """Every array of the last checkpoint, as it was stored."""
  path = folder / 'run' / records.CHECKPOINTS
  return common.stored(path / f'{saved(folder):08d}')


def metrics_of(folder: pathlib.Path) -> list[dict]:
  lines = (folder / 'run' / 'metrics.jsonl').read_text().splitlines()
  skip = lambda name: any(part in name for part in MEASURED)
  return [
    {k: v for k, v in json.loads(line).items() if not skip(k)} for line in lines
  ]


def same(folder: pathlib.Path, other: pathlib.Path) -> str:
  """Compares two finished runs; returns what was compared.

  Raises:
    SystemExit: something differs.
  """
  ours, theirs = metrics_of(folder), metrics_of(other)
  if len(ours) != len(theirs):
    sys.exit(f'{len(ours)} steps, and {len(theirs)} without stops')
  nan = lambda x: isinstance(x, float) and math.isnan(x)
  differ = {
    name: (a['step'], a.get(name), b.get(name))
    for a, b in zip(ours, theirs, strict=True)
    for name in {*a, *b}
    if a.get(name) != b.get(name)
    and not (nan(a.get(name)) and nan(b.get(name)))
  }
  if differ:
    sys.exit(f'metrics (step, value, value without stops) differ: {differ}')
  ours_, theirs_ = arrays(folder), arrays(other)
  if ours_.keys() != theirs_.keys():
    sys.exit(f'arrays differ: {sorted(ours_.keys() ^ theirs_.keys())}')
  for name, value in ours_.items():
    if value.tobytes() != theirs_[name].tobytes():
      sys.exit(f'{name} differs from that of the run without stops')
  return (
    f'{len(ours)} steps of {len(ours[-1])} metrics and {len(ours_)} arrays '
    f'({sum(x.nbytes for x in ours_.values()):,} bytes) are equal bit for bit'
  )


def complete(folder: pathlib.Path, url: str) -> None:
  """Lets the run go on to its end."""
  with launch.train(COUNT, folder, url, steps=_STEPS.value) as processes:
    statuses = ended(processes, START_S)
    if any(statuses):
      fail(processes, f'exit statuses {statuses}')


def main(argv) -> None:
  del argv
  say = lambda text: print(text, flush=True)
  say(f'python -m experiments.cluster.fifty {" ".join(sys.argv[1:])}'.rstrip())
  versions = f'JAX {jax.__version__}, Python {platform.python_version()}'
  say(
    f'{time.strftime("%Y-%m-%d %H:%M")}, {os.cpu_count()} cores, {versions}\n'
  )
  draw = random.Random(_SEED.value)
  with tempfile.TemporaryDirectory() as made:
    base = pathlib.Path(_FOLDER.value or made)
    os.environ['PYTHONFAULTHANDLER'] = '1'
    os.environ['JAX_COMPILATION_CACHE_DIR'] = str(base / 'compiled')
    os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
    world = microworld.generate(3, **tiny.WORLD)
    corpus = microworld.write(world, base / 'world')['corpus']
    with process.start_server(corpus, log_path=base / 'log') as server:
      begin = time.monotonic()
      complete(base / 'whole', server.url)
      say(
        f'{_STEPS.value} steps without stops: {time.monotonic() - begin:.0f} s'
      )
      say(
        '\nround signal   rank  sent in       saved after  s to end  statuses'
      )
      for i in range(_ROUNDS.value):
        say(f'{i + 1:>5} {a_round(base / "stopped", server.url, draw)}')
      complete(base / 'stopped', server.url)
      equal = same(base / 'stopped', base / 'whole')
      say(f'\nafter {_ROUNDS.value} stops: {equal}')


if __name__ == '__main__':
  app.run(main)
