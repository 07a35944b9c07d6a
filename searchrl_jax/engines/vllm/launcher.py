"""Starts a vLLM server beside the trainer, minds it, and stops it.

  python -m searchrl_jax.engines.vllm.launcher --model=DIR --port=8000 --gpus=0

or, from a program,

  with start_sidecar('exported', log_file='vllm.log', cpu=True) as sidecar:
    ... sidecar.url ...

vLLM lives in a virtual environment of its own (`make sidecar`). It serves on
127.0.0.1 alone: its routes for development, which change weights, ask nobody
for a password. After a crash it is started again, once (--max_restarts), under
the same address and with the weights of --model; who had sent it newer ones
must send them again (GET /weight_info says 'default' then).

This module needs no JAX: any Python with psutil can run it, that of the
virtual environment too.
"""

import argparse
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time

from searchrl_jax.engines.vllm import host
from searchrl_jax.engines.vllm.group import Group
from searchrl_jax.engines.vllm.host import HOST, SidecarError

PLUGIN = 'searchrl_jax.engines.vllm.plugin:Worker'
_POLL_S = 0.25  # between looks at the server
_CLOSED_S = 5.0  # for a server that no longer listens to end
_SAY_S = 10.0  # between lines while it starts


class Manager:
  """Keeps one server alive until `stop` is set; `run` is the whole life."""

  def __init__(self, args: argparse.Namespace, stop: threading.Event):
    self.args, self.stop = args, stop
    self.port = self.restarts = 0
    self._group: Group | None = None
    self._log_start = 0  # byte of the log where this server's part begins

  @property
  def url(self) -> str:
    return f'http://{HOST}:{self.port}'

  def run(self) -> None:
    """Raises SidecarError if the server cannot start or crashes too often."""
    try:
      host.check_model(
        self.args.model, '--load-format=dummy' not in self.args.vllm_arg
      )
      host.check_environment(self.args.venv, self.args.gpus)
      self.port = host.free_port(self.args.port)
      self._start()
      while not self.stop.is_set():
        self._report('ready')
        problem = self._mind()
        if problem is not None:
          self._restart(problem)
    except SidecarError as e:
      self._end()
      self._report('failed', str(e))
      raise
    finally:
      self._end()

  def _start(self) -> None:
    """Returns when the server is ready, or `stop` is set."""
    args = self.args
    with open(args.log_file, 'ab') as log:
      self._log_start = log.tell()
      self._group = Group(
        host.command(args, self.port),
        host.environment(args),
        log,
        args.stop_timeout_s,
      )
    self._report('starting')
    begin = said = time.monotonic()
    while not self.stop.wait(_POLL_S):
      waited = time.monotonic() - begin
      if (status := self._group.poll()) is not None:
        raise SidecarError(self._failure(f'ended with {_status(status)}'))
      if host.health(self.port) == 200:
        say(f'ready after {waited:.0f} s: {self.url} (log: {args.log_file})')
        return
      if waited > args.start_timeout_s:
        raise SidecarError(
          self._failure(
            f'was not ready after {waited:.0f} s (--start_timeout_s)'
          )
        )
      if time.monotonic() - said > _SAY_S:
        said = time.monotonic()
        last = host.log_lines(args.log_file, self._log_start)[-1:]
        say(f'starting vLLM, {waited:.0f} s: {"".join(last)[:100]}')

  def _mind(self) -> str | None:
    """Returns what is wrong with the server; None when `stop` is set."""
    answered = listened = time.monotonic()
    while not self.stop.wait(_POLL_S):
      if (status := self._group.poll()) is not None:
        return self._failure(f'ended with {_status(status)}')
      health = host.health(self.port)
      if health >= 0:
        listened = time.monotonic()
      if health == 200:
        answered = time.monotonic()
      elif health == 503:  # for good: there is no use in waiting
        return self._failure('says that its engine is dead')
      elif time.monotonic() - listened > _CLOSED_S:
        return self._failure('closed its port and did not end')
      elif time.monotonic() - answered > self.args.health_timeout_s:
        return self._failure(
          f'gave no sign of health for {self.args.health_timeout_s:g} s '
          '(--health_timeout_s)'
        )
    return None

  def _restart(self, problem: str) -> None:
    self._end()
    if self.restarts >= self.args.max_restarts:
      raise SidecarError(
        f'crash {self.restarts + 1} (--max_restarts={self.args.max_restarts}): '
        f'{problem}'
      )
    self.restarts += 1
    self._report('restarting')
    say(f'{problem}\nsidecar: starting it again ({self.restarts})')
    self._start()

  def _end(self) -> None:
    if self._group:
      self._group.stop()
    self._group = None

  def _failure(self, problem: str) -> str:
    log = self.args.log_file
    return f'the vLLM server {problem}; {log} says:\n' + host.cause(
      host.log_lines(log, self._log_start)
    )

  def _report(self, state: str, error: str | None = None) -> None:
    if state == 'ready' and self.args.port_file:
      _write(self.args.port_file, str(self.port))
    if self.args.status_file:
      _write(
        self.args.status_file,
        json.dumps(
          dict(
            state=state,
            port=self.port,
            restarts=self.restarts,
            error=error,
            server_pid=self._group.pid if self._group else None,
          )
        ),
      )


def _status(status: int) -> str:
  if status >= 0:
    return f'exit status {status}'
  name = signal.Signals(-status).name
  return name + (' (out of memory?)' if status == -signal.SIGKILL else '')


def _write(path: str, text: str) -> None:
  """Whole or not at all: others read it meanwhile."""
  part = f'{path}.part'
  pathlib.Path(part).write_text(text)
  os.replace(part, path)


def say(message: str) -> None:
  print(f'sidecar: {message}', file=sys.stderr, flush=True)


class Sidecar:
  """A running server and the process that minds it; a context manager."""

  def __init__(
    self, process: subprocess.Popen, folder, log_file: str, log_start: int
  ):
    self.log_file, self._log_start = log_file, log_start
    self._process, self._folder = process, folder

  def status(self) -> dict[str, object]:
    """state, port, restarts, error and server_pid, as last reported.

    state: starting, ready, restarting or failed.
    """
    return _read_status(self._folder.name)

  @property
  def url(self) -> str:
    """Stays the same when the server is started again."""
    return f'http://{HOST}:{self.status()["port"]}'

  @property
  def pid(self) -> int:
    """Of the process that minds the server."""
    return self._process.pid

  @property
  def server_pid(self) -> int | None:
    """Of vLLM's API process; None between two of them."""
    return self.status()['server_pid']

  @property
  def restarts(self) -> int:
    return self.status()['restarts']

  @property
  def running(self) -> bool:
    """Whether the server is minded: False once it crashed too often."""
    return self._process.poll() is None

  @property
  def failure(self) -> str | None:
    """Why nobody minds the server any more; None while somebody does."""
    if self.running:
      return None
    return self.status()['error'] or (
      f'the sidecar ended with {_status(self._process.returncode)}; '
      f'{self.log_file} says:\n'
      + host.cause(host.log_lines(self.log_file, self._log_start))
    )

  def stop(self) -> None:
    """Stops the server and all its processes. Twice is harmless."""
    if self.running:
      self._process.send_signal(signal.SIGTERM)
    self._process.wait()

  def __enter__(self) -> 'Sidecar':
    return self

  def __exit__(self, *_: object) -> None:
    self.stop()


def _read_status(folder: str) -> dict[str, object]:
  try:
    with open(os.path.join(folder, 'status')) as f:
      return json.load(f)
  except FileNotFoundError:
    return dict(
      state='starting', port=0, restarts=0, error=None, server_pid=None
    )


def start_sidecar(
  model: str | os.PathLike, *, log_file: str | os.PathLike, **flags: object
) -> Sidecar:
  """Starts a server that ends with this process, and waits until it answers.

  Args:
    model: a Hugging Face checkpoint folder, with its tokenizer.
    log_file: gets the output of vLLM and of the process that minds it.
    **flags: further flags of this module's command: cpu=True or gpus='0,1',
      dtype='float32', max_model_len=512, plugin='package.module:Class',
      vllm_arg=['--enable-scale-out'], ...

  Raises:
    SidecarError: it does not start; the message says why.
  """
  log_file = os.path.abspath(log_file)
  os.makedirs(os.path.dirname(log_file), exist_ok=True)
  folder = tempfile.TemporaryDirectory(prefix='sidecar')
  argv = [sys.executable, '-m', 'searchrl_jax.engines.vllm.launcher']
  flags = dict(
    model=os.path.abspath(model),
    log_file=log_file,
    parent_pid=os.getpid(),
    status_file=os.path.join(folder.name, 'status'),
    **flags,
  )
  for name, value in flags.items():
    for one in value if isinstance(value, (list, tuple)) else [value]:
      if one is True:
        argv.append(f'--{name}')
      elif one is not None and one is not False:
        argv.append(f'--{name}={one}')
  paths = [str(host.ROOT), os.environ.get('PYTHONPATH')]
  with open(log_file, 'ab') as log:
    log_start = log.tell()
    # A session of its own: Ctrl-C reaches the caller alone, which can then
    # save and stop it.
    process = subprocess.Popen(
      argv,
      stdin=subprocess.DEVNULL,
      stdout=log,
      stderr=subprocess.STDOUT,
      env=dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, paths))),
      start_new_session=True,
    )
  sidecar = Sidecar(process, folder, log_file, log_start)
  try:
    while sidecar.status()['state'] != 'ready':
      if not sidecar.running:
        raise SidecarError(sidecar.failure)
      time.sleep(_POLL_S)
  except BaseException:  # Ctrl-C while waiting leaves no server either
    sidecar.stop()
    raise
  return sidecar


def watch(pid: int, stop: threading.Event) -> None:
  """Sets `stop` when process `pid` ends, however it ends (Linux).

  Raises:
    SidecarError: there is no such process.
  """
  try:
    descriptor = os.pidfd_open(pid)  # no confusion by a reused pid
  except ProcessLookupError as e:
    raise SidecarError(
      f'--parent_pid={pid}: no such process; give that of the program the '
      'server is to end with'
    ) from e

  def run() -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()
    say(f'process {pid} (--parent_pid) has ended: stopping')
    stop.set()

  threading.Thread(target=run, daemon=True).start()


def _gpus(text: str) -> list[int]:
  numbers = [int(x) for x in text.split(',')]
  if min(numbers) < 0 or len(set(numbers)) < len(numbers):
    raise ValueError(text)
  return numbers


def parse(argv: list[str]) -> argparse.Namespace:
  """The flags; a mistake is one line and exit status 2."""
  p = argparse.ArgumentParser(
    prog='searchrl_jax.engines.vllm.launcher',
    allow_abbrev=False,
    description='Starts a vLLM server, minds it, and stops it.',
  )
  add = p.add_argument
  add('--model', required=True, help='Hugging Face checkpoint folder.')
  where = p.add_mutually_exclusive_group(required=True)
  where.add_argument('--cpu', action='store_true', help='Serve on the CPU.')
  where.add_argument(
    '--gpus',
    type=_gpus,
    help='Numbers of GPUs, as in 0,1; '
    'of those in CUDA_VISIBLE_DEVICES, if that is set.',
  )
  add('--port', type=int, default=0, help='0 takes a free one.')
  add('--port_file', help='Gets the port when the server is ready.')
  add('--status_file', help='Gets state, port, restarts, ... as JSON.')
  add('--log_file', default='vllm.log', help='Gets the output of vLLM.')
  add(
    '--venv',
    default=str(host.ROOT / '.venv-sidecar'),
    help='Virtual environment with vLLM (make sidecar).',
  )
  add(
    '--plugin',
    default=PLUGIN,
    help='package.module:Class mixed into '
    "vLLM's worker; the default takes weights from a trainer.",
  )
  add('--served_name', default='policy', help='Of the model, in requests.')
  add(
    '--dtype',
    default='auto',
    help='float32, bfloat16, ...; auto = as the checkpoint says.',
  )
  add('--max_model_len', type=int, help='Longest sequence, tokens.')
  add('--max_num_seqs', type=int, help='Most sequences decoded at once.')
  add(
    '--block_size',
    type=int,
    help='Tokens in a block of the prefix cache; '
    'shorter prefixes are not reused (vLLM: 16, on the CPU 128).',
  )
  add('--kv_cache_gib', type=float, help='Memory of the KV cache.')
  add(
    '--gpu_memory_utilization',
    type=float,
    help="Share of a GPU's memory that vLLM may take.",
  )
  add('--tensor_parallel_size', type=int, help='Default: all of --gpus.')
  add('--seed', type=int, default=0)
  add(
    '--enable_sleep',
    action='store_true',
    help='vLLM can give its memory back between rollouts (GPU).',
  )
  add(
    '--enforce_eager',
    action='store_true',
    help='No compilation: a faster start, a slower server.',
  )
  add(
    '--vllm_arg',
    action='append',
    default=[],
    help='Passed on as it is; repeatable.',
  )
  add('--start_timeout_s', type=float, default=900.0)
  add(
    '--stop_timeout_s',
    type=float,
    default=15.0,
    help='From SIGTERM to SIGKILL.',
  )
  add(
    '--health_timeout_s',
    type=float,
    default=120.0,
    help='A server that gives no answer for so long is started again.',
  )
  add(
    '--max_restarts',
    type=int,
    default=1,
    help='Times that a server which crashed is started again.',
  )
  add('--parent_pid', type=int, help='Stop when this process ends.')
  args = p.parse_args(argv)
  if args.tensor_parallel_size is None:
    args.tensor_parallel_size = len(args.gpus or [0])
  if args.gpus and args.tensor_parallel_size > len(args.gpus):
    p.error(
      f'--tensor_parallel_size={args.tensor_parallel_size} needs as many '
      f'GPUs; --gpus names {len(args.gpus)}'
    )
  if args.cpu and args.enable_sleep:
    p.error('--enable_sleep: vLLM cannot sleep on a CPU; give --gpus')
  return args


def main(argv: list[str]) -> int:
  args = parse(argv)
  stop = threading.Event()
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: stop.set())
  try:
    if args.parent_pid is not None:
      watch(args.parent_pid, stop)
    Manager(args, stop).run()
  except SidecarError as e:
    say(f'error: {e}')
    return 2
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
