"""Starts a vLLM server, restarts it after a crash, and stops it.

  python -m searchrl_jax.engines.vllm.launcher --model=DIR --port=8000 --gpus=0

or, from a program,

  with start_sidecar('exported', log_file='vllm.log', cpu=True) as sidecar:
    ... sidecar.url ...

Flags that this command does not have are vLLM's (--dtype, --max_model_len).
vLLM is installed in a separate virtual environment (`make sidecar`). It serves
on 127.0.0.1 only, because its development routes, which change weights, have no
authentication. After a crash it is started again (--max_restarts), under the
same address and with the weights of --model; a client that had loaded newer
weights must load them again (GET /weight_info then returns 'default').

This module imports no JAX: any Python with psutil can run it.
"""

import argparse
import logging
import os
import signal
import sys
import threading
import time

from searchrl_jax.engines.vllm import host
from searchrl_jax.engines.vllm.host import HOST, SidecarError
from searchrl_jax.engines.vllm.process_tree import ProcessTree

PLUGIN = 'searchrl_jax.engines.vllm.plugin:Worker'
_POLL_S = 0.25  # between health checks
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
    host.check(args)
    self._args, self._port = args, host.free_port(args.port)
    self.url = f'http://{HOST}:{self._port}'
    self.ready, self.restarts = False, 0
    self.failure: str | None = None
    self.stopping = threading.Event()
    self._group: ProcessTree | None = None
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
      if problem := self._launch():
        raise SidecarError(problem)
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

  def _launch(self) -> str | None:
    """Starts vLLM; returns its problem, None when it is ready or stopped."""
    args = self._args
    with open(args.log_file, 'ab') as log:
      self._log_start = log.tell()
      command, env = host.command(args, self._port), host.environment(args)
      self._group = ProcessTree(command, env, log, args.stop_timeout_s)
    _log.info('starting vLLM (log: %s)', args.log_file)
    problem = self._watch('start', args.start_timeout_s)
    self.ready = not (problem or self.stopping.is_set())
    if self.ready:
      _log.info('ready: %s', self.url)
    return problem

  def _supervise(self) -> None:
    """The thread: restarts the server after a crash, until `stopping`."""
    limit, window = self._args.max_restarts, self._args.restart_window_s
    crashes: list[float] = []  # when, within the window
    try:
      while problem := self._watch('health', self._args.health_timeout_s):
        while problem:
          self._end()
          now = time.monotonic()
          crashes = [*(t for t in crashes if t > now - window), now]
          if len(crashes) > limit:
            what = f'{len(crashes)} crashes within {window:g} s'
            limits = f'--max_restarts={limit}'
            self.failure = f'{what} ({limits}); the last: {problem}'
            return
          self.restarts += 1
          _log.warning('%s\nrestart %d of %d', problem, len(crashes), limit)
          problem = self._launch()
    except OSError as e:  # of the log; read by `wait` and by the engine
      self.failure = str(e)
    finally:
      self._end()

  def _watch(self, until: str, limit: float) -> str | None:
    """Returns the server's problem, such as no answer for `limit` seconds.

    None when `stopping` is set, and with until='start' when it answers.
    """
    last_ok = time.monotonic()
    while not self.stopping.wait(_POLL_S):
      health, now = host.health(self._port), time.monotonic()
      if health == 200:
        if until == 'start':
          return None
        last_ok = now
      problem = ''
      if (status := self._group.poll()) is not None:
        name = signal.Signals(-status).name if status < 0 else status
        problem = f'ended with exit status {name}'
      elif health == 503:  # permanent
        problem = 'reports that its engine is dead'
      elif now - last_ok > limit:
        problem = f'did not answer for {limit:g} s (--{until}_timeout_s)'
      if problem:
        log = self._args.log_file
        cause = host.cause(log, self._log_start)
        return f'the vLLM server {problem}; from {log}:\n{cause}'
    return None

  def _end(self) -> None:
    self.ready = False
    if self._group:
      self._group.stop()
    self._group = None


def start_sidecar(
  model: str | os.PathLike, *, log_file: str | os.PathLike, **flags: object
) -> Sidecar:
  """Starts a server that ends with this process, and waits until it answers.

  Args:
    model: a Hugging Face checkpoint folder, with its tokenizer.
    log_file: for the output of vLLM.
    **flags: further flags of this module's command or of vLLM: cpu=True or
      gpus='0,1', dtype='float32', max_model_len=512, ...

  Raises:
    SidecarError: it does not start; the message contains the cause.
  """
  log_file = os.path.abspath(log_file)
  os.makedirs(os.path.dirname(log_file), exist_ok=True)
  argv = [f'--model={os.path.abspath(model)}', f'--log_file={log_file}']
  argv += [
    f'--{name}' if value is True else f'--{name}={value}'
    for name, value in flags.items()
    if value is not False
  ]
  sidecar = Sidecar(parse(argv))
  sidecar.start()
  return sidecar


class _Parser(argparse.ArgumentParser):
  def error(self, message: str):
    raise SidecarError(f'{message} (python -m {self.prog} --help)')


def _gpus(text: str) -> list[str]:
  """The names of GPUs among those that this process may use."""
  shown = os.environ.get('CUDA_VISIBLE_DEVICES')
  numbers = [int(x) for x in text.split(',')]
  if min(numbers) < 0 or len(set(numbers)) < len(numbers):
    raise ValueError(text)
  if shown is None:
    return [str(n) for n in numbers]
  names = [x.strip() for x in shown.split(',') if x.strip()]
  if max(numbers) >= len(names):
    has = f'CUDA_VISIBLE_DEVICES={shown} has {len(names)} GPUs'
    raise argparse.ArgumentTypeError(f'{text}, but {has}')
  return [names[n] for n in numbers]


def parse(argv: list[str]) -> argparse.Namespace:
  """The flags, with those of vLLM in `vllm`; SidecarError if they are wrong."""
  p = _Parser(
    prog='searchrl_jax.engines.vllm.launcher',
    allow_abbrev=False,
    description='Starts a vLLM server, restarts it after a crash, stops it. '
    'Further flags are passed to vLLM (--dtype=bfloat16).',
  )
  add = p.add_argument
  add('--model', required=True, help='Hugging Face checkpoint folder.')
  where = p.add_mutually_exclusive_group(required=True)
  where.add_argument('--cpu', action='store_true', help='Serve on the CPU.')
  help_ = 'Numbers of GPUs, as in 0,1, among those of CUDA_VISIBLE_DEVICES.'
  where.add_argument('--gpus', type=_gpus, help=help_)
  add('--kv_cache_gib', type=float, help='Memory of the KV cache.')
  help_ = 'vLLM can give its memory back between rollouts (GPU).'
  add('--enable_sleep', action='store_true', help=help_)
  for name, default, help_ in (
    ('port', 0, '0: a free one.'),
    ('log_file', 'vllm.log', 'File for the output of vLLM.'),
    ('venv', str(host.ROOT / '.venv-sidecar'), 'Has vLLM (make sidecar).'),
    ('plugin', PLUGIN, 'package.module:Class, a worker extension of vLLM.'),
    ('start_timeout_s', 900.0, 'Maximum time to start, seconds.'),
    ('stop_timeout_s', 15.0, 'From SIGTERM to SIGKILL, seconds.'),
    ('health_timeout_s', 120.0, 'Without an answer, before a restart.'),
    ('max_restarts', 3, 'After crashes within --restart_window_s.'),
    ('restart_window_s', 1800.0, 'Seconds.'),
  ):
    add(f'--{name}', type=type(default), default=default, help=help_)
  args, args.vllm = p.parse_known_args(argv)
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
