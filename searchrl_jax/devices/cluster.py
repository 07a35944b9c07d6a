"""Several processes that run as one: start, exchange, stops and end.

Every process runs the same program. It plays its share of the questions with
its own engine; then all processes have all groups, compute the same advantages
and batches, and put their own rows on their own devices. What only the host
needs travels through the key-value store of JAX's coordinator, in process 0.

No process may enter a collective that another one does not enter. Errors,
signals and limits of time are therefore exchanged first (`gather`), and every
process then does the same. A process that ends otherwise says so
(`leave`), or is missed by the coordinator; the others end too.

With one process every function returns at once, and JAX is not imported.
Processes trust each other: what they exchange is pickled.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import hashlib
import os
import pathlib
import pickle
import signal
import sys
import threading
import time
from typing import Any, TypeVar
import zlib

from searchrl_jax import lookup
from searchrl_jax.devices.signals import CAUGHT, Signals, Stopped
from searchrl_jax.lookup import ConfigError

T = TypeVar('T')
E = TypeVar('E', bound=Exception)

PORT = 29400  # of the coordinator, where MASTER_PORT names none
START_S = 300  # that a process waits for the others at the start
# The coordinator misses a dead process after this time and ends the others.
HEARTBEAT_S = 20
SHUTDOWN_S = 15  # that a process which ends waits for the others
# After a failure elsewhere a process has this time to notice; it may be in a
# collective that will not end.
GRACE_S = 20
_POLL_S = 0.5
# Of one value in the store: a wait of a second includes its transfer.
_CHUNK = 4 * 2**20
_PREFIX = 'searchrl'
_NOTED = 'stopped by a signal, without a save'


class ProcessError(RuntimeError):
  """Another process has failed; the message has its number and its error."""

  def __init__(self, message: str, root: str = ''):
    super().__init__(message)
    self.root = root or message  # the error there


class _World:
  """This process among the others."""

  def __init__(self, client, rank: int, size: int, host: str):
    self.client, self.rank, self.size, self.host = client, rank, size, host
    self.signals: Signals | None = None
    self.noted = False  # a signal came that nobody else handles
    self.seconds = 0.0  # in exchanges
    self._calls = 0
    self.closed = threading.Event()
    self._left = False
    threading.Thread(target=self._watch, name='cluster', daemon=True).start()

  # The key-value store.

  def get(self, key: str) -> str | None:
    """The value of a key; None: nobody has set it.

    Raises:
      ProcessError: the coordinator does not answer.
    """
    try:
      return self.client.key_value_try_get(f'{_PREFIX}/{key}')
    except Exception as e:  # jax.errors.JaxRuntimeError, with a status
      if 'NOT_FOUND' in str(e):
        return None
      raise _lost(e) from e

  def set(self, key: str, value: str) -> bool:
    """Sets a key; False: another process has done so."""
    try:
      self.client.key_value_set(f'{_PREFIX}/{key}', value)
    except Exception as e:
      if 'ALREADY_EXISTS' in str(e):
        return False
      raise _lost(e) from e
    return True

  def exchange(self, what: str, value: Any) -> list:
    """The values of all processes, in their order."""
    begin = time.monotonic()
    self._calls += 1
    name = lambda call, rank: f'{_PREFIX}/{call}/{rank}'
    own = name(self._calls, self.rank)
    data = zlib.compress(pickle.dumps((what, value), 5), 1)
    chunks = [data[i : i + _CHUNK] for i in range(0, len(data), _CHUNK)]
    try:
      for i, chunk in enumerate(chunks):
        self.client.key_value_set_bytes(f'{own}/{i}', chunk)
      self.client.key_value_set_bytes(f'{own}/count', b'%d' % len(chunks))
    except Exception as e:
      raise _lost(e) from e
    values = []
    for rank in range(self.size):
      if rank != self.rank:
        theirs = name(self._calls, rank)
        count = int(self._wait(f'{theirs}/count'))
        data = b''.join(self._wait(f'{theirs}/{i}') for i in range(count))
        theirs, other = pickle.loads(zlib.decompress(data))
        at = f'process {rank} is at {theirs!r} and process {self.rank} at'
        lookup.require(theirs == what, f'{at} {what!r}', ProcessError)
      values.append(value if rank == self.rank else other)
    # Whoever takes part in this exchange has read all of the last one.
    self.client.key_value_delete(name(self._calls - 1, self.rank))
    self.seconds += time.monotonic() - begin
    return values

  def _wait(self, key: str) -> bytes:
    while True:
      try:
        # Short waits, between which Python handles signals.
        return self.client.blocking_key_value_get_bytes(key, 1000)
      except Exception as e:
        if 'DEADLINE_EXCEEDED' not in str(e):
          raise _lost(e) from e
      failed = self.get('failed')
      if failed is not None:
        raise ProcessError(failed, failed.partition(': ')[2])

  # What happens elsewhere.

  def _watch(self) -> None:
    """In a thread: passes stops on, and ends a process that waits in vain."""
    failed, since = None, 0.0
    while not self.closed.wait(_POLL_S):
      try:
        self._pass_stop()
        failed = failed or self.get('failed')
      except ProcessError as e:
        failed = str(e)
      failed = failed or self.noted and _NOTED
      if failed and not since:
        since = time.monotonic()
      if since and not self._left and time.monotonic() > since + GRACE_S:
        text = f'error: process {self.rank} ends, as it waits in vain: {failed}'
        print(text, file=sys.stderr, flush=True)
        if self.noted:
          self.leave(_NOTED)
        os._exit(143 if self.noted else 1)

  def _pass_stop(self) -> None:
    signals = self.signals  # the main thread may end them meanwhile
    if signals is None:
      return
    if signals.stop:
      self.set('stop', str(self.rank))
    elif self.get('stop') is not None:
      signals.interrupt()

  def note(self, signum, frame) -> None:
    """Handles the first signal; a second one ends the process."""
    signal.signal(signum, signal.SIG_DFL)
    self.noted = True

  def leave(self, message: str) -> None:
    """Tells the others that this process ends, and why."""
    self._left = True
    with contextlib.suppress(ProcessError):
      if message:
        self.set('failed', f'process {self.rank}: {message}')
        time.sleep(2 * _POLL_S)  # the coordinator ends with process 0


def _lost(error: Exception) -> ProcessError:
  line = str(error).partition('\n')[0][:300]
  return ProcessError(
    f'process 0, the coordinator, does not answer ({line}); see its log'
  )


_world: _World | None = None


# The start.


def initialize(
  coordinator: str = '', processes: int = 0, process_id: int = -1
) -> None:
  """Joins the other processes, if there are any; call it before JAX is used.

  The first of: the arguments (HOST:PORT of process 0, the number of processes,
  the number of this one); the variables NNODES, RANK, MASTER_ADDR and
  MASTER_PORT, as torchrun names them, with one process for each node; a SLURM
  step of several tasks, or a TPU slice of several hosts, which JAX recognises.
  Otherwise this process is alone.

  Raises:
    ConfigError: a variable or an argument is missing or wrong.
    ProcessError: the others do not come within START_S.
  """
  global _world
  peers = _given(coordinator, processes, process_id)
  if peers is None:
    return
  import jax
  from jax._src import distributed

  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  # Its handler of SIGTERM would only take note of the signal.
  jax.config.update('jax_enable_preemption_service', False)
  address = peers.get('coordinator_address', '')
  if address.startswith(('127.0.0.1:', 'localhost:')):
    # Otherwise it listens on all addresses.
    peers['coordinator_bind_address'] = address
  try:
    jax.distributed.initialize(
      **peers,
      initialization_timeout=START_S,
      heartbeat_timeout_seconds=HEARTBEAT_S,
      shutdown_timeout_seconds=SHUTDOWN_S,
    )
  except RuntimeError as e:
    line = str(e).partition('\n')[0]
    what = peers or 'of SLURM or TPU'
    raise ProcessError(f'the processes {what} did not meet: {line}') from e
  state = distributed.global_state
  host = state.coordinator_address.rpartition(':')[0]
  if state.num_processes > 1:
    _world = _World(state.client, state.process_id, state.num_processes, host)
    # Until the run handles them, the next exchange stops all processes.
    for number in CAUGHT:
      signal.signal(number, _world.note)


def _given(coordinator: str, processes: int, process_id: int) -> dict | None:
  """Arguments of jax.distributed.initialize; None: there is one process."""
  env = os.environ
  if coordinator or processes or process_id >= 0:
    named = coordinator, processes, process_id
    names = '--coordinator', '--processes', '--process_id'
  elif env.get('NNODES', '1') != '1':
    address = f'{env.get("MASTER_ADDR", "")}:{env.get("MASTER_PORT", PORT)}'
    named = address, _number('NNODES'), _number('RANK')
    names = 'MASTER_ADDR', 'NNODES', 'RANK'
  elif int(env.get('SLURM_STEP_NUM_TASKS', '1')) > 1:
    # JAX gives each task one GPU; the only task of a node takes all, or those
    # that the variable of JAX names, which `initialize` would not read.
    gpus = env.get('CUDA_VISIBLE_DEVICES', '').split(',')
    visible = env.get('JAX_CUDA_VISIBLE_DEVICES', 'all')
    alone = env.get('SLURM_STEP_TASKS_PER_NODE', '').partition('(')[0] == '1'
    ids = [*range(len(gpus))] if alone and gpus[0] else None
    if alone and visible != 'all':
      ids = [int(n) for n in visible.split(',')]
    return {'cluster_detection_method': 'slurm', 'local_device_ids': ids}
  elif ',' in env.get('TPU_WORKER_HOSTNAMES', ''):
    return {}
  else:
    return None
  address, size, rank = named
  host, _, port = address.rpartition(':')
  message = f'{names[0]}={address!r}: the HOST:PORT of process 0 is needed'
  lookup.require(host and port.isdigit(), message)
  lookup.require(size >= 1, f'{names[1]}={size}: the number of processes')
  message = f'{names[2]}={rank} of {size} processes: a number from 0 on, each'
  lookup.require(0 <= rank < size, f'{message} one once')
  if size == 1:
    return None
  return {
    'coordinator_address': address,
    'num_processes': size,
    'process_id': rank,
    'cluster_detection_method': 'deactivate',
  }


def _number(name: str) -> int:
  text = os.environ.get(name, '')
  lookup.require(text.isdigit(), f'{name}={text!r}: a number is needed')
  return int(text)


# Who this process is.


def size() -> int:
  """The number of processes."""
  return 1 if _world is None else _world.size


def rank() -> int:
  """The number of this process."""
  return 0 if _world is None else _world.rank


def main() -> bool:
  """Whether this process writes what is written once."""
  return rank() == 0


def host() -> str:
  """The host of process 0, as the others reach it."""
  return '127.0.0.1' if _world is None else _world.host


def folder(workdir) -> pathlib.Path:
  """The run's folder for files of this process alone, such as logs."""
  own = f'process_{rank():03}' if rank() else ''
  return pathlib.Path(workdir) / own


def waited() -> float:
  """Seconds in which this process waited for what others sent, in all."""
  return 0.0 if _world is None else _world.seconds


def part(items: Sequence[T]) -> Sequence[T]:
  """This process's share of a sequence; shares follow each other."""
  n, ways = len(items), size()
  return items[n * rank() // ways : n * (rank() + 1) // ways]


# What all do together.


def gather(what: str, work: Callable[[], T]) -> list[T]:
  """Runs `work` on every process; returns all results, in order of processes.

  An error of one is raised on all: there itself, elsewhere a `ProcessError`
  (or `Stopped`). Meanwhile rollouts of the others are stopped, as by a signal.

  what: names the call in messages; the same on all processes.
  """
  world = _world
  if world is None:
    return [work()]
  value: Any = None
  error, failure = None, None
  try:
    value = work()
    if world.noted:
      raise Stopped(_NOTED)
  except Exception as e:
    error, failure = e, (isinstance(e, Stopped), world.rank, str(e) or repr(e))
    world.set('stop', str(world.rank))
  try:
    found = world.exchange(what, (value, failure))
  except ProcessError as e:
    # The error that kept this process from making the call of the others.
    if error is not None and not isinstance(error, (ProcessError, Stopped)):
      raise error from e
    raise
  failures = [failure for _, failure in found if failure is not None]
  if not failures:
    return [value for value, _ in found]
  # A stop may only follow from the error of another process.
  stopped, first, message = min(failures)
  if stopped:
    raise on_all(Stopped(message)) from error
  if first == world.rank:
    raise on_all(error)
  raise ProcessError(f'process {first}: {message}', message) from error


def agree(what: str, work: Callable[[], T]) -> T:
  """Runs `work` on every process; returns this one's result.

  Raises:
    As `gather`.
  """
  if _world is None:
    return work()
  kept = []
  gather(what, lambda: kept.append(work()))
  return kept[0]


def first(what: str, work: Callable[[], T]) -> T:
  """Runs `work` on process 0, and returns its result on all.

  Raises:
    As `gather`.
  """
  return gather(what, lambda: work() if main() else None)[0]


def require_agreement(facts: Callable[[], Mapping[str, Any]]) -> None:
  """Compares what all processes have to have in common.

  facts: returns names -> JSON, nested.

  Raises:
    ConfigError: names the first that differs, and the processes.
  """
  if _world is None:
    return
  first, *others = gather('comparison', facts)
  for i, other in enumerate(others, 1):
    for name, values in lookup.differences(first, other).items():
      a, b = ('absent' if v is None else repr(v) for v in values)
      text = (
        f'{name} is {a} on process 0 and {b} on process {i}: start every '
        'process with the same config, code and data'
      )
      raise on_all(ConfigError(text))


def alone(error: BaseException) -> bool:
  """Whether this process has an error that the others do not know of."""
  agreed = getattr(error, 'agreed', False) or isinstance(error, ProcessError)
  return size() > 1 and not agreed


def on_all(error: E) -> E:
  """Marks an error that every process raises by itself."""
  error.agreed = True  # type: ignore[attr-defined]
  return error


def code() -> str:
  """A digest of the package's source files, and of configs/ and experiments/
  beside it."""
  package, digest = pathlib.Path(__file__).parents[1], hashlib.sha256()
  root = package.parent
  for folder in (package, root / 'configs', root / 'experiments'):
    for path in sorted(p for p in folder.rglob('*.py') if p.is_file()):
      digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
  return digest.hexdigest()[:16]


# The end.


@contextlib.contextmanager
def attending(signals: Signals) -> Iterator[None]:
  """Passes stops of `signals` to the other processes, and theirs to it."""
  if _world is not None:
    _world.signals = signals
  try:
    yield
  finally:
    if _world is not None:
      _world.signals = None


def leave(error: BaseException | None) -> bool:
  """Says to the others that this process ends, unless they do as well.

  Returns:
    Whether this process shall print the error: one of those that have it does.
  """
  if _world is None:
    return True
  message, told = str(error or '') or repr(error), True
  if error is None:
    _world.exchange('end', None)  # JAX's own barrier waits for SHUTDOWN_S only
    _world.leave('')
  else:
    if isinstance(error, Stopped) and not alone(error):
      with contextlib.suppress(ProcessError):
        _world.exchange('end', None)
    root = getattr(error, 'root', message).encode()
    with contextlib.suppress(ProcessError):
      key = hashlib.sha256(root).hexdigest()
      told = _world.set(f'told/{key}', str(_world.rank))
    _world.leave(message if alone(error) else '')
  _world.closed.set()
  return told
