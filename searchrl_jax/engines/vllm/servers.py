"""One server of the vLLM engine: its state, its weights, its recovery.

A server is `ready` if it serves our model, under a name that this process has
seen, and its own checksums show that it holds the weights of the last sync.
After a failure it gets no request before `prepare` has checked it. If it has
become another process (its model has another name, see launcher.py, which
restarts servers), the weights are loaded first.
"""

import asyncio
from collections.abc import Iterator
import contextlib
import dataclasses
import time
from typing import Any
import uuid

from searchrl_jax.engines import handles
from searchrl_jax.engines.core import (
  DeltaError,
  EngineError,
  SyncError,
  require,
)
from searchrl_jax.engines.vllm.transport import Client, Down
from searchrl_jax.engines.weights import checksum
from searchrl_jax.engines.weights.published import Published, Weights

REQUESTS_PER_SLOT = 2  # at a server: the one that it serves, and the next
POLL = 0.2  # seconds between attempts to reach a server
_NAME = 'searchrl-'  # prefix of the model names that launcher.py assigns


class Handle(handles.Handle):
  home: 'Server | None' = None  # the server that caches its prefix

  def move(self, server: 'Server | None') -> None:
    """Its prefix will be cached on `server`."""
    if self.home is not None:
      self.home.handles -= 1
    if server is not None:
      server.handles += 1
    self.home = server


class Server:
  """The state of one server, used from one event loop at a time.

  Args:
    model: the fields (families.FIELDS, and dtype) of the model that it must
      serve.
    config: config.engine.
    counters: of the engine; `restarts` is how often a server came back as
      another process.
    sidecar: the launcher.Sidecar that restarts it; None: not started by us.
  """

  def __init__(
    self, url: str, model: dict[str, Any], config, counters, sidecar=None
  ):
    good = url.startswith('http')
    require(good, f'config.engine.url: {url!r} is no http://host:port')
    self.url = url
    self._model, self._config, self._sidecar = model, config, sidecar
    self._counters = counters
    self._nonce = uuid.uuid4().hex  # distinguishes our weights from others'
    self._target: Published | None = None  # the weights of the last sync
    self.ready = False  # may get requests
    self.name = ''  # of the model, when last seen
    self.model = ''  # to ask for: that name, or that of the loaded adapter
    self._base: Any = None  # path of the weights below the adapter
    self.version = -1  # of verified weights under that name; -1: its own
    self.handles = 0  # whose prefixes it caches
    self.prefilled = 0  # prompt tokens computed

  def enter(self) -> None:
    """Creates the objects that belong to the running event loop."""
    self.http = Client(self.url, self._config)
    # For requests that sample. Others wait in this process, because a wait at
    # the server would count towards their timeout.
    self.places = asyncio.Semaphore(REQUESTS_PER_SLOT * self._config.slots)
    self.calls = 0  # that have a place or wait for one
    self._recovery: asyncio.Task | None = None
    self._lock = asyncio.Lock()

  def recovery(self) -> asyncio.Task:
    """The task of `prepare` that runs, or has failed; else it is started."""
    if self._recovery is None:
      self._recovery = asyncio.create_task(self.prepare())
    return self._recovery

  async def prepare(self, target: Published | None = None) -> dict[str, str]:
    """Waits for the server and loads the weights unless it holds them.

    Args:
      target: other weights to load from now on.

    Returns:
      Their checksums; {} if it holds them already, or there are none yet.

    Raises:
      EngineError: it is absent, not ours, or failed while it was loaded.
      SyncError: it does not hold the weights; names the tensors. DeltaError:
        because of the difference by which they were sent.
    """
    async with self._lock:
      if target is not None:
        self.ready, self.version, self._target = False, -1, target
      await self._connect()
      loaded = {}
      if self.version < 0 and self._target is not None:
        loaded = await self._load(self._target)
      self.ready, self._recovery = True, None
      return loaded

  async def sleep(self) -> None:
    """Ends its requests and moves the weights to host memory."""
    # A server that crashed is restored first: otherwise it would take the
    # device's memory later, during the update.
    await self.prepare()
    async with self._lock:
      self.ready = False
      await self._pause()
      await self.http.post('/sleep', level='1')

  async def check_claim(self) -> None:
    """Raises SyncError if another client has loaded weights into it.

    If it does not answer, or is another process now, it is not ready.
    """
    if not self.ready or self._target is None:
      return
    try:
      claim = (await self.http.get('/weight_info'))['weight_version']
      name, _ = await self._served()
    except Down:
      name = ''
    if name != self.name:
      self.ready = False
    elif claim != self._claim(self._target):
      what = f'another client has loaded weights into {self.url} ({claim})'
      raise SyncError(f'{what}; give each run its own servers')

  def _claim(self, target: Published) -> str:
    return f'{self._nonce}-{target.version}'

  async def _served(self) -> tuple[str, int]:
    """The name of the model, and the longest sequence."""
    model = (await self.http.get('/v1/models'))['data'][0]
    return model['id'], model.get('max_model_len', 0)  # vLLM's own field

  async def _connect(self) -> None:
    """Waits until the server can serve; checks it if it is another process."""
    seconds = self._config.start_seconds
    end = time.monotonic() + seconds
    late = f'{self.url}: no answer in config.engine.start_seconds={seconds} s'
    while True:
      try:
        name, max_len = await self._served()
        await self.http.get('/health')  # the engine behind the server
        if name != self.name:
          self.ready, self.version, self._base = False, -1, None
          await self._check_model(name, max_len)
          self._counters['restarts'] += self.name != ''
          self.name = self.model = name
        # Ends a sleep and a pause: ours, or those of a trainer that died.
        if (await self.http.get('/is_sleeping'))['is_sleeping']:
          await self.http.post('/wake_up')
        await self.http.post('/resume')
        return
      except Down as e:
        failure = self._sidecar and self._sidecar.failure
        if failure or time.monotonic() > end:
          raise EngineError(f'{late} ({failure or e})') from e
      await asyncio.sleep(POLL)

  async def _pause(self) -> None:
    """Returns when the server is paused and every answer has arrived.

    A request that arrives after the pause waits in the server and would be
    served with other weights than its sender expects.
    """
    await self.http.post('/pause', mode='abort')
    while self.calls:
      await self.http.post('/abort_requests', {'request_ids': []})
      await asyncio.sleep(0.02)

  async def _load(self, target: Published) -> dict[str, str]:
    adapter, base = target.adapter, self._base != target.path
    path = adapter.path if adapter else target.path
    sent = f'version {target.version} ({path})'
    await self._pause()
    try:
      if base:
        self._base = None
        changes = [target.delta.path] if target.delta else []
        paths = [str(p.absolute()) for p in (target.path, *changes)]
        with _by_difference(target):
          await self.http.rpc('searchrl_load', *paths)
      if adapter:
        await self._load_adapter(adapter)
      if not (await self.http.post('/reset_prefix_cache'))['success']:
        raise EngineError('it did not drop its prefix cache; restart it')
      claim = {'new_version': self._claim(target)}
      await self.http.post('/update_weight_version', claim)
      await self.http.post('/resume')
      loaded, wanted = {}, {}
      if base:
        with _by_difference(target):
          loaded = checksum.combine(await self.http.rpc('searchrl_checksums'))
        wanted = dict(target.checksums)
      if adapter:
        sums = await self.http.rpc('searchrl_adapter_checksums', adapter.shapes)
        loaded |= checksum.combine(sums)
        wanted |= adapter.checksums
    except Down:
      raise
    except EngineError as e:
      raise SyncError(f'{self.url}: {sent} could not be loaded: {e}') from e
    with _by_difference(target):
      checksum.compare(wanted, loaded, f'{self.url}, sent {sent},')
    self.version = target.version
    # Another process of this server loads what `path` holds now.
    self._target = dataclasses.replace(target, delta=None)
    # Without an adapter, every version has weights of its own.
    self._base = target.path if adapter else None
    return loaded

  async def _load_adapter(self, adapter: Weights) -> None:
    """Loads it in place of another; the server must be paused."""
    # A name that it had before would keep the adapter, and caches, of then.
    name, before = f'{self.name}-{uuid.uuid4().hex}', self.model
    body = {'lora_name': name, 'lora_path': str(adapter.path.absolute())}
    await self.http.post('/v1/load_lora_adapter', body)
    self.model = name
    if before != self.name:
      await self.http.post('/v1/unload_lora_adapter', {'lora_name': before})

  async def _check_model(self, name: str, max_len: int) -> None:
    """Raises EngineError for a server of another model or kind."""
    ours = name.startswith(_NAME)  # another one at each start
    fix = 'start it with python -m searchrl_jax.engines.vllm.launcher'
    require(ours, f'{self.url}: serves {name!r}; {fix}')
    differ = [
      f'{field}={served.get(field)!r}, expected {expected!r}'
      for served in await self.http.rpc('searchrl_describe')
      for field, expected in self._model.items()
      if served.get(field) != expected
    ]
    if max_len <= self._config.max_len:
      least = f'more than config.engine.max_len={self._config.max_len}'
      differ.append(f'max_model_len={max_len}, expected {least}, for scoring')
    what = f'serves another model: {"; ".join(differ)}'
    fix = "set config.engine.url to another URL, or to '' to start servers"
    require(not differ, f'{self.url}: {what}; {fix}')


@contextlib.contextmanager
def _by_difference(target: Published) -> Iterator[None]:
  """Makes errors of loading a difference, or verifying it, a DeltaError."""
  try:
    yield
  except (EngineError, SyncError) as e:
    if target.delta:
      raise DeltaError(str(e)) from e
    raise
