"""Starts a vLLM server, restarts it after a crash, and stops it.

  python -m searchrl_jax.engines.vllm.launcher --model=DIR --port=8000 --gpus=0

or, from a program,

  with start_sidecar('exported', log_file='vllm.log', cpu=True) as sidecar:
    ... sidecar.url ...

vLLM is installed in a separate virtual environment (`make sidecar`). It serves
on 127.0.0.1 only, because its development routes, which change weights, have no
authentication. After a crash it is started again (--max_restarts), under the
same address and with the weights of --model; a client that had loaded newer
weights must load them again (GET /weight_info then returns 'default').

This module imports no JAX, so any Python with psutil can run it, also that of
the virtual environment.
"""

import argparse
import logging
import os
import pathlib
import signal
import sys
import threading
import time

from searchrl_jax.engines.vllm import host
from searchrl_jax.engines.vllm.group import ProcessGroup
from searchrl_jax.engines.vllm.host import HOST, SidecarError

PLUGIN = 'searchrl_jax.engines.vllm.plugin:Worker'
_POLL_S = 0.25  # between health checks
_CLOSED_S = 5.0  # from a closed port to a restart
_PROGRESS_S = 10.0  # between messages while it starts
_log = logging.getLogger(__name__)


class Sidecar:
  """A vLLM server and the thread that supervises it; a context manager.

  Attributes:
    url: the same after a restart.
    ready: whether the server answers.
    restarts: the number of restarts.
    failure: why the server is no longer restarted; None before.
    stopping: set it to end the server.

  Raises:
    SidecarError: --model, --venv or --port cannot be used.
  """

  def __init__(self, args: argparse.Namespace):
    host.check_model(args.model, '--load-format=dummy' not in args.vllm_arg)
    host.check_environment(args.venv, args.gpus)
    self._args, self._port = args, host.free_port(args.port)
    self.url = f'http://{HOST}:{self._port}'
    self.ready, self.restarts = False, 0
    self.failure: str | None = None
    self.stopping = threading.Event()
    self._group: ProcessGroup | None = None
    self._log_start = 0  # byte of the log at which this server's part begins
    self._thread = threading.Thread(target=self._supervise, daemon=True)

  @property
  def server_pid(self) -> int | None:
    """The pid of vLLM's API process; None if it does not run."""
    return self._group.pid if self._group else None

  @property
  def running(self) -> bool:
    """Whether the server is supervised: False after `stop` or a failure."""
    return self._thread.is_alive()

  def start(self) -> None:
    """Returns when the server is ready, or `stopping` is set.

    Raises:
      SidecarError: it does not start; the message contains the cause.
    """
    try:
      self._launch()
    except BaseException:  # Ctrl-C while waiting also ends the server
      self._end()
      raise
    self._thread.start()

  def wait(self) -> None:
    """Returns when the server was stopped; SidecarError if it failed."""
    self._thread.join()
    if self.failure:
      raise SidecarError(self.failure)

  def stop(self) -> None:
    """Stops the server and all its processes; a second call has no effect."""
    self.stopping.set()
    if self.running:
      self._thread.join()

  def __enter__(self) -> 'Sidecar':
    return self

  def __exit__(self, *_: object) -> None:
    self.stop()

  def _launch(self) -> None:
    args = self._args
    with open(args.log_file, 'ab') as log:
      self._log_start = log.tell()
      command, env = host.command(args, self._port), host.environment(args)
      self._group = ProcessGroup(command, env, log, args.stop_timeout_s)
    begin = reported = time.monotonic()
    while not self.stopping.wait(_POLL_S):
      now = time.monotonic()
      if (status := self._group.poll()) is not None:
        raise SidecarError(self._problem(f'ended with {_status(status)}'))
      if host.health(self._port) == 200:
        break
      if now - begin > args.start_timeout_s:
        limit = f'after {now - begin:.0f} s (--start_timeout_s)'
        raise SidecarError(self._problem(f'was not ready {limit}'))
      if now - reported > _PROGRESS_S:
        reported = now
        last = host.log_lines(args.log_file, self._log_start)[-1:]
        _log.info('starting, %.0f s: %s', now - begin, ''.join(last)[:100])
    self.ready = not self.stopping.is_set()
    if self.ready:
      _log.info('ready: %s (log: %s)', self.url, args.log_file)
      if args.port_file:  # appears only when complete
        part = pathlib.Path(f'{args.port_file}.part')
        part.write_text(str(self._port))
        part.replace(args.port_file)

  def _supervise(self) -> None:
    """The thread: restarts the server after a crash, until `stopping`."""
    limit, window = self._args.max_restarts, self._args.restart_window_s
    crashes: list[float] = []  # when, within the window
    problem = self._watch()
    try:
      while problem is not None:
        self._end()
        now = time.monotonic()
        crashes = [*(t for t in crashes if t > now - window), now]
        if len(crashes) > limit:
          raise SidecarError(
            f'{len(crashes)} crashes within {window:g} s (--max_restarts='
            f'{limit}); the last: {problem}'
          )
        self.restarts += 1
        _log.warning('%s\nrestart %d of %d', problem, len(crashes), limit)
        try:
          self._launch()
          problem = self._watch()
        except SidecarError as e:
          problem = str(e)
    except Exception as e:  # read by `wait` and by the engine
      self.failure = str(e)
    finally:
      self._end()

  def _watch(self) -> str | None:
    """Returns the server's problem; None when `stopping` is set."""
    last_ok = last_open = time.monotonic()
    limit = self._args.health_timeout_s
    while not self.stopping.wait(_POLL_S):
      health, now = host.health(self._port), time.monotonic()
      last_open = now if health >= 0 else last_open
      last_ok = now if health == 200 else last_ok
      if (status := self._group.poll()) is not None:
        return self._problem(f'ended with {_status(status)}')
      if health == 503:  # permanent
        return self._problem('reports that its engine is dead')
      if now - last_open > _CLOSED_S:
        return self._problem('closed its port and did not end')
      if now - last_ok > limit:
        return self._problem(
          f'failed its health check for {limit:g} s (--health_timeout_s)'
        )
    return None

  def _end(self) -> None:
    self.ready = False
    if self._group:
      self._group.stop()
    self._group = None

  def _problem(self, problem: str) -> str:
    log = self._args.log_file
    cause = host.cause(host.log_lines(log, self._log_start))
    return f'the vLLM server {problem}; from {log}:\n{cause}'


def _status(status: int) -> str:
  if status >= 0:
    return f'exit status {status}'
  name = signal.Signals(-status).name
  return name + ' (out of memory?)' * (status == -signal.SIGKILL)


def start_sidecar(
  model: str | os.PathLike, *, log_file: str | os.PathLike, **flags: object
) -> Sidecar:
  """Starts a server that ends with this process, and waits until it answers.

  Args:
    model: a Hugging Face checkpoint folder, with its tokenizer.
    log_file: for the output of vLLM.
    **flags: further flags of this module's command: cpu=True or gpus='0,1',
      dtype='float32', max_model_len=512, plugin='package.module:Class',
      vllm_arg=['--enable-scale-out'], ...

  Raises:
    SidecarError: it does not start; the message contains the cause.
  """
  log_file = os.path.abspath(log_file)
  os.makedirs(os.path.dirname(log_file), exist_ok=True)
  argv = [f'--model={os.path.abspath(model)}', f'--log_file={log_file}']
  for name, value in flags.items():
    for one in value if isinstance(value, (list, tuple)) else [value]:
      if one is True:
        argv.append(f'--{name}')
      elif one is not None and one is not False:
        argv.append(f'--{name}={one}')
  sidecar = Sidecar(parse(argv))
  sidecar.start()
  return sidecar


class _Parser(argparse.ArgumentParser):
  def error(self, message: str):
    raise SidecarError(f'{message} (python -m {self.prog} --help)')


def _gpus(text: str) -> list[int]:
  numbers = [int(x) for x in text.split(',')]
  if min(numbers) < 0 or len(set(numbers)) < len(numbers):
    raise ValueError(text)
  return numbers


def parse(argv: list[str]) -> argparse.Namespace:
  """The flags; SidecarError if they are wrong."""
  p = _Parser(
    prog='searchrl_jax.engines.vllm.launcher',
    allow_abbrev=False,
    description='Starts a vLLM server, restarts it after a crash, stops it.',
  )
  add = p.add_argument
  add('--model', required=True, help='Hugging Face checkpoint folder.')
  where = p.add_mutually_exclusive_group(required=True)
  where.add_argument('--cpu', action='store_true', help='Serve on the CPU.')
  help_ = 'Numbers of GPUs, as in 0,1, among those of CUDA_VISIBLE_DEVICES.'
  where.add_argument('--gpus', type=_gpus, help=help_)
  add('--port', type=int, default=0, help='0: a free one.')
  add('--port_file', help='File for the port; written when ready.')
  add('--log_file', default='vllm.log', help='File for the output of vLLM.')
  venv = str(host.ROOT / '.venv-sidecar')
  add('--venv', default=venv, help='Environment with vLLM (make sidecar).')
  help_ = 'package.module:Class for --worker-extension-cls of vLLM.'
  add('--plugin', default=PLUGIN, help=help_)
  add('--served_name', default='policy', help='Of the model, in requests.')
  for name, kind, default, help_ in host.PASSED_ON:
    add(f'--{name}', type=kind, default=default, help=help_)
  add('--kv_cache_gib', type=float, help='Memory of the KV cache.')
  help_ = 'vLLM can give its memory back between rollouts (GPU).'
  add('--enable_sleep', action='store_true', help=help_)
  help_ = 'No compilation: a faster start, a slower server.'
  add('--enforce_eager', action='store_true', help=help_)
  help_ = 'Passed to vLLM unchanged; repeatable.'
  add('--vllm_arg', action='append', default=[], help=help_)
  for name, seconds, help_ in (
    ('start', 900.0, 'Maximum time to start, seconds.'),
    ('stop', 15.0, 'From SIGTERM to SIGKILL, seconds.'),
    ('health', 120.0, 'Without an answer, seconds, before a restart.'),
  ):
    add(f'--{name}_timeout_s', type=float, default=seconds, help=help_)
  help_ = 'After crashes and failed restarts within --restart_window_s.'
  add('--max_restarts', type=int, default=3, help=help_)
  add('--restart_window_s', type=float, default=1800.0, help='Seconds.')
  args = p.parse_args(argv)
  gpus, ways = args.gpus or [0], args.tensor_parallel_size
  args.tensor_parallel_size = ways = len(gpus) if ways is None else ways
  if args.gpus and ways > len(gpus):
    p.error(
      f'--tensor_parallel_size={ways} needs as many GPUs; --gpus names '
      f'{len(gpus)}'
    )
  if args.cpu and args.enable_sleep:
    p.error('--enable_sleep: vLLM cannot sleep on a CPU; use --gpus')
  return args


def main(argv: list[str]) -> int:
  logging.basicConfig(level=logging.INFO, format='sidecar: %(message)s')
  try:
    sidecar = Sidecar(parse(argv))
    for number in (signal.SIGTERM, signal.SIGINT):
      signal.signal(number, lambda *_: sidecar.stopping.set())
    sidecar.start()
    sidecar.wait()
  except SidecarError as e:
    _log.error('error: %s', e)
    return 2
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
