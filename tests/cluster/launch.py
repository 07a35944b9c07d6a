"""Starts the processes of a command on this machine."""

import dataclasses
import functools
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

from tests.conftest import ROOT

DEVICES = 2  # of each process


def free_port() -> int:
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    return s.getsockname()[1]


@dataclasses.dataclass
class Processes:
  """Some processes, which end with the `with` block."""

  running: list
  logs: list[pathlib.Path]

  def __enter__(self):
    return self

  def __exit__(self, *_):
    for process in self.running:
      process.kill()
      process.wait()

  def wait(self, seconds: float) -> list[int]:
    """The exit statuses; fails if one does not end in time."""
    end = time.monotonic() + seconds
    return [p.wait(max(end - time.monotonic(), 0.01)) for p in self.running]

  def said(self, rank: int) -> str:
    return self.logs[rank].read_text()

  def send(self, rank: int, number: signal.Signals) -> None:
    self.running[rank].send_signal(number)


# As `make test` has them: a process spends most of its time compiling.
QUICK = (
  '--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false '
  '--xla_cpu_parallel_codegen_split_count=1'
)


def start(
  count: int,
  folder: pathlib.Path,
  module: str,
  *args,
  each=None,
  devices=DEVICES,
  own=None,
):
  """Starts `count` processes of `python -m module args`.

  Args:
    each: rank -> further arguments.
    devices: of each process; a list: of every one by rank.
    own: rank -> further variables of the environment.
  """
  devices = devices if isinstance(devices, list) else [devices] * count
  port, folder = free_port(), pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  running, logs = [], []
  for rank in range(count):
    flags = f'--xla_force_host_platform_device_count={devices[rank]}'
    env = dict(os.environ, JAX_PLATFORMS='cpu', PYTHONPATH=str(ROOT))
    env['XLA_FLAGS'] = f'{flags} {QUICK}'
    env |= dict(NNODES=str(count), RANK=str(rank))
    env |= dict(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
    env |= (own or {}).get(rank, {})
    more = (each or {}).get(rank, ())
    command = [sys.executable, '-m', module, *map(str, (*args, *more))]
    logs.append(folder / f'log_{count}_{rank}_{time.time_ns()}')
    with open(logs[-1], 'w') as log:
      options = dict(cwd=ROOT, env=env, stdout=log, stderr=log)
      running.append(subprocess.Popen(command, **options))
  return Processes(running, logs)


def command(name: str, count: int, folder, url: str, *args, steps=2, **how):
  """Starts train or sft with the recipe in `folder`/run."""
  recipe = ROOT / 'tests' / 'cluster' / 'recipe.py'
  config = f'--config={recipe}:steps={steps}{",traces" * (name == "sft")}'
  where = f'--workdir={folder}/run', f'--config.source.url={url}'
  module = f'searchrl_jax.{name}'
  return start(count, folder, module, config, *where, *args, **how)


train = functools.partial(command, 'train')
sft = functools.partial(command, 'sft')
