"""What all benchmarks share; each has its cases, a measurement and bars.

  if __name__ == '__main__':
    harness.run('sampler', measure, bars, cases=models.SIZES, reps=5, peer=True)

`run` defines the flags, refuses to start on a busy machine, measures the
cases, writes the record (experiments/common.py) and prints the table. Sides of
a comparison take `turns`. A side in torch is a `torch_peer`; one of ours that
needs a process of its own runs `apart`.

Exit status: 0 if everything was measured, whether the bars hold or not (the
table says so). 2 if it cannot be measured, because the machine is busy, or
because data or a peer are missing; one line says what to do.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
import contextlib
import importlib
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

from absl import flags

from experiments import common
from searchrl_jax import lookup
from searchrl_jax.run import command

MAX_LOAD = 0.3  # of the minute before, for a fair comparison
THREADS = 1, 2  # of a peer; the better counts
_TORCH = pathlib.Path(__file__).with_name('torch_peers.py')
flags.disclaim_key_flags()  # --help of a benchmark lists those of `run`


def run(
  name: str,
  measure: Callable[..., Sequence[Mapping]],
  bars: Callable[[Sequence[Mapping]], list[dict]] = lambda rows: [],
  *,
  cases: Collection[str] = (),
  default: Collection[str] = (),
  reps: int = 0,
  peer: bool = False,
  inputs: Callable[[], tuple] = tuple,
  timed: Callable[[], bool] = lambda: True,
) -> None:
  """Runs a benchmark as a command.

  Args:
    name: of the benchmark in its record.
    measure: gives the rows of a case, or of everything if there are no cases.
      Its arguments: the case, and what `inputs` returns.
    bars: gives the bars (`common.bar`) of all rows.
    cases: names that --cases may have.
    default: those that it has unless it is given; (): all.
    reps: default of --reps, which `turns` reads; 0: there is no such flag.
    peer: whether a Python with torch is needed (--peer_python).
    inputs: reads data and checks what is needed; called before the idle check.
    timed: whether this run measures time, and so needs an idle machine.
  """
  flags.DEFINE_string('out', '', 'JSON file to write.')
  flags.DEFINE_bool('allow_load', False, 'Run on a busy machine.')
  if reps:
    flags.DEFINE_integer('reps', reps, 'Repetitions.', lower_bound=1)
  if cases:
    flags.DEFINE_list('cases', [*(default or cases)], 'Which cases.')
    flags.register_validator(
      'cases', {*cases}.issuperset, f'there are {", ".join(cases)}'
    )
  if peer:
    flags.DEFINE_string(
      'peer_python',
      '.venv-parity/bin/python',
      'A Python with torch and transformers (make test-parity makes it).',
    )

  def main():
    if peer:
      require_file(
        flags.FLAGS.peer_python,
        '`make test-parity` makes .venv-parity; or name with --peer_python a '
        'Python that has torch and transformers',
      )
    given = inputs()
    if timed():
      require_idle(flags.FLAGS.allow_load)
    before, rows = common.environment(), []
    for case in [[c] for c in flags.FLAGS.cases] if cases else [[]]:
      rows += measure(*case, *given)
      print(f'{" ".join([name, *case])}: measured', flush=True)
    common.report(flags.FLAGS.out, name, rows, bars(rows), before)

  command.run(main)


def require_idle(allow: bool = False) -> None:
  """Raises ConfigError on a busy machine: that spoils torch more than JAX.

  allow: measure anyway; the load stands in the record.
  """
  lookup.require(
    allow or common.LOAD <= MAX_LOAD,
    f'the machine is busy: load {common.LOAD:.2f}, at most {MAX_LOAD} for a '
    'fair comparison; wait, or pass --allow_load and say so beside the figures',
  )


def require_file(path: str | os.PathLike, fix: str) -> pathlib.Path:
  """The file or folder, relative to the checkout.

  Raises ConfigError if it does not exist; `fix` says where it comes from.
  """
  full = common.ROOT / path
  lookup.require(full.exists(), f'{full} does not exist: {fix}')
  return full


def turns(
  sides: Mapping[str, Callable[[], Any]], *, warm: int = 0, each: int = 1
) -> dict[str, list]:
  """{name: results}: all sides once, then all again, --reps times.

  What changes slowly on a machine (heat, neighbours) then touches every side.

  Args:
    sides: by name.
    warm: calls of each before, which are not counted.
    each: turns of a repetition.
  """
  for side in sides.values():
    for _ in range(warm):
      side()
  out = {name: [] for name in sides}
  for _ in range(each * flags.FLAGS.reps):
    for name, side in sides.items():
      out[name].append(side())
  return out


def seconds(function: Callable, *args) -> float:
  """Of one call."""
  start = time.perf_counter()
  function(*args)
  return time.perf_counter() - start


def better(speed: Mapping[str, float], peer: str = 'torch') -> str:
  """Which of PEER_1 and PEER_2, named by their threads, is faster."""
  return max((f'{peer}_{n}' for n in THREADS), key=speed.__getitem__)


def against(speed: Mapping[str, float], unit: str, peer: str = 'torch') -> dict:
  """Our speed (`jax`) beside that of the `better` peer."""
  best = better(speed, peer)
  return {
    unit: speed['jax'],
    f'{peer}_{unit}': speed[best],
    f'{peer}_threads': int(best[-1]),
    'ratio': speed['jax'] / speed[best],
  }


class Process:
  """A process that answers lines of JSON; a context manager.

  A call sends it a value and gives its answer.

  Attributes:
    about: its first line, when it is ready.
  """

  def __init__(
    self, command: Sequence[str], env: Mapping[str, str] | None = None
  ):
    """Starts a command with further environment variables."""
    self._process = subprocess.Popen(
      command,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      env=os.environ | (env or {}),
    )
    self.about = self._read()

  def _read(self) -> Any:
    line = self._process.stdout.readline()
    if not line:
      raise RuntimeError(
        f'{self._process.args[0]} ended with status {self._process.wait()}; '
        'its error stands above'
      )
    return json.loads(line)

  def __call__(self, value: Any = None) -> Any:
    print(json.dumps(value), file=self._process.stdin, flush=True)
    return self._read()

  def __enter__(self):
    return self

  def __exit__(self, *unused):
    self._process.stdin.close()
    self._process.wait()


def torch_peer(
  name: str, threads: int, env: Mapping[str, str] | None = None, **fields
) -> Process:
  """A side in torch: a function of torch_peers.py, its arguments as fields."""
  python = str(common.ROOT / flags.FLAGS.peer_python)
  fields = json.dumps(dict(fields, threads=threads))
  env = {'HF_HUB_OFFLINE': '1'} | (env or {})
  # -P: our files are no modules of its.
  return Process([python, '-P', str(_TORCH), name, fields], env)


@contextlib.contextmanager
def peers(name: str, **fields) -> Iterator[dict[str, Process]]:
  """The peer with one thread, `torch_1`, and with two, `torch_2`."""
  with contextlib.ExitStack() as stack:
    yield {
      f'torch_{n}': stack.enter_context(torch_peer(name, n, **fields))
      for n in THREADS
    }


def apart(
  function: Callable, *args, env: Mapping[str, str] | None = None
) -> Any:
  """What `function(*args)`, all JSON, returns in a process of its own.

  Memory, compilation and imports are then its own.

  Args:
    function: of a module; it reads no flags.
    *args: its arguments.
    env: further environment variables.
  """
  module = function.__module__
  if module == '__main__':
    module = sys.modules['__main__'].__spec__.name
  done = subprocess.run(
    [sys.executable, '-m', __name__, module, function.__name__],
    cwd=common.ROOT,
    env=os.environ | (env or {}),
    input=json.dumps(args),
    text=True,
    stdout=subprocess.PIPE,
  )
  if done.returncode:
    raise RuntimeError(
      f'{function.__name__} ended with status {done.returncode}; its error '
      'stands above'
    )
  return json.loads(done.stdout.splitlines()[-1])


if __name__ == '__main__':  # the process of `apart`
  _MODULE, _FUNCTION = sys.argv[1:]
  _CALL = getattr(importlib.import_module(_MODULE), _FUNCTION)
  print(json.dumps(_CALL(*json.load(sys.stdin))))
