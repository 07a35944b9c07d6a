"""The servers of the vLLM engine: choosing one, loading weights, recovery.

A server is `ready` if it serves our model, under a name that this process has
seen, and its own checksums show that it holds the weights of the last sync.
After a failure it gets no request before it has been checked. If it has become
another process (its model has another name, see launcher.py, which restarts
servers), the weights are loaded first. A server that does not recover, or that
fails while it is loaded, stops the run.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
import contextlib
import logging
import time
from typing import Any
import uuid

from searchrl_jax.engines import handles
from searchrl_jax.engines.core import EngineError, SyncError
from searchrl_jax.engines.vllm import launcher
from searchrl_jax.engines.vllm.transport import (
  Client,
  Deadline,
  Down,
  Model,
  Refused,
  Restarted,
)
from searchrl_jax.engines.weights import checksum
from searchrl_jax.engines.weights.published import Published

REQUESTS_PER_SLOT = 2  # at a server: the one that it serves, and the next
POLL = 0.2  # seconds between attempts to reach a server
_NAME = 'searchrl-'  # prefix of the model names that launcher.py assigns
_PROBED = 256  # ids whose text identifies a tokenizer
_FIX = "set config.engine.url to another URL, or to '' to start servers"
_log = logging.getLogger(__name__)


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
  """The state of one server.

  sidecar: the launcher.Sidecar that restarts it; None: not started by us.
  """

  def __init__(self, url: str, sidecar: Any = None):
    self.url, self.sidecar = url, sidecar
    self.http: Client  # of the running event loop, as are the next two
    self.places: asyncio.Semaphore  # for requests that sample
    self.recovery: asyncio.Task | None = None
    self.ready = False  # may get requests
    self.name: str | None = None  # of the model, when last seen
    self.version: int | None = None  # verified weights under that name
    self.error: EngineError | SyncError | None = None  # of the recovery
    self.problem = ''  # why it was not ready, when last checked
    self.in_flight = 0  # requests
    self.queued = 0  # requests that wait for `places`
    self.handles = 0  # whose prefixes it caches
    self.prefilled = 0  # prompt tokens computed


class Fleet:
  """The servers of one engine, used from one event loop at a time.

  Args:
    model: the fields (families.FIELDS, and dtype) of the model that the servers
      must serve.
    tokenizer: the tokenizer.Tokenizer that they must have.
    config: config.engine.
  """

  def __init__(
    self, servers: Sequence[Server], model: dict[str, Any], tokenizer, config
  ):
    self.servers = servers
    self.holds: set[str] = set()  # 'sync', 'rest': why calls wait
    self.weights: Published | None = None  # of the last sync
    self.restarts = 0  # servers that came back as other processes
    self.seconds_held = 0.0  # summed over calls
    self._model, self._tokenizer, self._config = model, tokenizer, config
    self._nonce = uuid.uuid4().hex  # distinguishes our weights from others'
    self._loading = False  # no recovery starts meanwhile
    self._loop: asyncio.AbstractEventLoop | None = None
    self._event: asyncio.Event

  def enter(self) -> None:
    """Creates the objects that belong to the running event loop."""
    loop = asyncio.get_running_loop()
    if self._loop is loop:
      return
    if self._loop is not None and self._loop.is_running():
      raise EngineError('the engine is in use by another event loop')
    self._loop, self._event = loop, asyncio.Event()
    config = self._config
    most = REQUESTS_PER_SLOT * config.slots
    for s in self.servers:
      s.http = Client(s.url, config.timeout, config.start_seconds, most)
      s.places = asyncio.Semaphore(most)
      s.recovery, s.in_flight, s.queued = None, 0, 0

  async def close(self) -> None:
    if self._loop is asyncio.get_running_loop():
      await self._cancel_recoveries()
      for server in self.servers:
        await server.http.close()
      self._loop = None

  # Requests.

  @contextlib.asynccontextmanager
  async def lease(
    self, handle: Handle, only: Server | None, probe: bool, deadline: Deadline
  ) -> AsyncIterator[Server]:
    """A server for one request: that of the prefix, else the least loaded.

    Requests beyond REQUESTS_PER_SLOT wait in this process, because a wait at
    the server would count towards their timeout. Calls also wait while all are
    held. Probes wait for neither.

    Raises:
      EngineError: no server is up in time, or one does not recover.
      SyncError: one cannot be loaded with the weights.
    """
    while True:
      server = await self._choose(handle, only, probe, deadline)
      async with contextlib.AsyncExitStack() as stack:
        if not probe:
          server.queued += 1
          try:
            with deadline.paused():
              await stack.enter_async_context(server.places)
          finally:
            server.queued -= 1
          if not server.ready or self.holds:
            continue
        server.in_flight += 1
        try:
          yield server
        finally:
          server.in_flight -= 1
        return

  async def _choose(self, handle, only, probe, deadline) -> Server:
    pool = self.servers if only is None else [only]
    while True:
      for server in self.servers:
        if server.error is not None:
          raise type(server.error)(str(server.error)) from server.error
      if self.holds and not probe:
        begin = time.monotonic()
        with deadline.paused():
          await self._event.wait()
        self.seconds_held += time.monotonic() - begin
        continue
      ready = [s for s in pool if s.ready]
      if ready:
        if handle.home not in ready:
          load = lambda s: (s.in_flight + s.queued, s.handles)
          handle.move(min(ready, key=load))
        return handle.home
      for server in pool:
        self._recover(server)
      if not deadline.left():
        raise self.late('no server is up')
      with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(self._event.wait(), deadline.left())

  def late(self, why: str, last: Exception | None = None) -> EngineError:
    """last: the previous failure, if there was one."""
    causes = [str(last)] if last else [s.problem for s in self.servers]
    why = '; '.join([why, *filter(None, causes)])
    return EngineError(
      f'{", ".join(s.url for s in self.servers)}: no answer in config.engine.'
      f'deadline={self._config.deadline} s ({why})'
    )

  def report_failure(self, server: Server, why: Exception) -> None:
    """Sends no more requests to a server before it has been checked."""
    if server.ready:
      _log.warning('%s failed, not used until it recovers: %s', server.url, why)
    server.ready, server.problem = False, str(why)
    self._recover(server)

  def hold(self, why: str) -> None:
    self.holds.add(why)

  def release(self, why: str) -> None:
    self.holds.discard(why)
    self._notify()

  def _notify(self) -> None:
    """Wakes the calls that wait for a server or for the end of a hold."""
    self._event.set()
    self._event = asyncio.Event()

  # Weights.

  async def load(self, target: Published) -> dict[str, str]:
    """Loads `target` into every server; returns the verified checksums.

    Raises:
      EngineError: a server is absent, or does not serve our model.
      SyncError: a server does not hold the weights; names the tensors.
    """
    self._loading = True
    try:
      await self._cancel_recoveries()
      for server in self.servers:
        server.ready, server.version = False, None
      loaded = await _all([self._prepare(s, target) for s in self.servers])
    finally:
      self._loading = False
    self.weights = target
    self._notify()
    return loaded[0]

  async def sleep(self) -> None:
    """Ends running requests and moves the weights to host memory."""

    async def one(server: Server) -> None:
      # A server that crashed is restored first: otherwise it would take the
      # device's memory later, during the update.
      await self._prepare(server, self.weights)
      server.ready = False
      await self._pause(server)
      await server.http.sleep()

    self._loading = True
    try:
      await self._cancel_recoveries()
      await _all([one(s) for s in self.servers])
    except BaseException:
      self._loading = False
      raise

  async def wake(self) -> None:
    try:
      await _all([self._prepare(s, self.weights) for s in self.servers])
    finally:
      self._loading = False
      self._notify()

  async def check_claims(self) -> None:
    """Raises SyncError if another client has loaded weights into a server.

    A server that does not answer, or is another process now, is recovered.
    """
    for server in self.servers:
      version = server.version
      if not server.ready or version is None:
        continue
      try:
        claim = await server.http.version()
        if claim == self._claim(version):
          continue
        if (await server.http.model()).name != server.name:
          raise Restarted(f'{server.url}: restarted')
      except (Down, Restarted) as e:
        self.report_failure(server, e)
        continue
      if server.ready and server.version == version:
        raise SyncError(
          f'another client has loaded weights into {server.url} (version '
          f'{claim!r}, expected {self._claim(version)!r}); give each run '
          'its own servers'
        )

  def _claim(self, version: int) -> str:
    return f'{self._nonce}-{version}'

  def _recover(self, server: Server) -> None:
    """Starts the recovery of a server, unless it runs or has failed."""
    if server.recovery or server.error or self._loading:
      return

    async def recover():
      failed = server.problem
      try:
        await self._prepare(server, self.weights)
        if failed:
          _log.warning('%s recovered', server.url)
      except (EngineError, SyncError) as e:
        server.error = e
      except Exception as e:  # passed to the calls that wait for the server
        server.error = EngineError(f'{server.url}: {e!r} in its recovery')
        server.error.__cause__ = e
      finally:
        server.recovery = None
        self._notify()

    server.recovery = asyncio.get_running_loop().create_task(recover())

  async def _cancel_recoveries(self) -> None:
    tasks = [s.recovery for s in self.servers if s.recovery]
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for server in self.servers:  # a task may be cancelled before it starts
      server.recovery = None

  async def _prepare(
    self, server: Server, target: Published | None
  ) -> dict[str, str]:
    """Waits for a server and loads `target` unless it holds that already.

    Returns the checksums of the loaded weights; {} if there was nothing to
    load: no target yet, or the same process with these weights.

    Raises:
      EngineError: it is absent, not ours, or failed while it was loaded.
      SyncError: it does not hold the weights.
    """
    server.error = None
    name, loaded = await self._connect(server), {}
    if target is not None and server.version is None:
      loaded = await self._load(server, target)
      if (await server.http.model()).name != name:
        raise Restarted(f'{server.url}: restarted while it was loaded')
      server.version = target.version
    server.ready, server.problem = True, ''
    self._notify()
    return loaded

  async def _connect(self, server: Server) -> str:
    """Waits for a server to answer; returns the name of its model."""
    end = time.monotonic() + self._config.start_seconds
    while True:
      try:
        model = await server.http.model()
        await server.http.health()
        # Ends a sleep and a pause: ours, or those of a trainer that died.
        if await server.http.is_sleeping():
          await server.http.wake()
        await server.http.resume()
        break
      except Down as e:
        server.problem = str(e)
        if server.sidecar and server.sidecar.failure:
          raise EngineError(f'{server.url}: {server.sidecar.failure}') from e
        if time.monotonic() > end:
          raise EngineError(
            f'{server.url}: no answer in config.engine.start_seconds='
            f'{self._config.start_seconds} s ({e})'
          ) from e
        await asyncio.sleep(POLL)
    if model.name != server.name:
      server.version = None
      await self._check_model(server, model)
      self.restarts += server.name is not None
      server.name = model.name
    return model.name

  async def _pause(self, server: Server) -> None:
    """Returns when the server is paused and every answer has arrived.

    A request that arrives after the pause waits in the server and would be
    served with other weights than its sender expects.
    """
    await server.http.pause()
    while server.in_flight:
      await server.http.abort()
      await asyncio.sleep(0.02)

  async def _load(self, server: Server, target: Published) -> dict[str, str]:
    http = server.http
    what = f'version {target.version} ({target.path})'
    await self._pause(server)
    try:
      await http.rpc('searchrl_load', str(target.path.absolute()))
      if not await http.reset_prefix_cache():
        raise SyncError(
          f'{server.url}: did not drop its prefix cache; restart it'
        )
      await http.set_version(self._claim(target.version))
      await http.resume()
      loaded = checksum.combine(await http.rpc('searchrl_checksums'))
    except (Refused, ValueError) as e:
      raise SyncError(f'{server.url}: {what} could not be loaded: {e}') from e
    checksum.compare(target.manifest, loaded, f'{server.url}, sent {what},')
    return loaded

  async def _check_model(self, server: Server, model: Model) -> None:
    """Raises EngineError for a server of another model or kind."""
    url, http = server.url, server.http
    start = 'python -m searchrl_jax.engines.vllm.launcher'
    if not model.name.startswith(_NAME):
      raise EngineError(
        f'{url}: serves {model.name!r}; expected a server of {start}, which '
        f'names the model {_NAME}... differently at each start, so that a '
        'restart is detected'
      )
    if model.max_len <= self._config.max_len:
      raise EngineError(
        f'{url}: holds {model.max_len} tokens (--max_model_len); expected more '
        f'than config.engine.max_len={self._config.max_len}, one for scoring'
      )
    try:
      workers = await http.rpc('searchrl_describe')
    except Refused as e:
      raise EngineError(
        f'{url}: cannot load weights ({e}); start it with '
        f'--plugin={launcher.PLUGIN}, the default of {start}'
      ) from e
    for worker in workers:
      served = {**worker['model'], 'dtype': worker['dtype']}
      for field, expected in self._model.items():
        if served.get(field) != expected:
          raise EngineError(
            f'{url}: serves a model with {field}={served.get(field)!r}; '
            f'expected {expected!r}; {_FIX}'
          )
    # Compare the text of ids spread over the vocabulary.
    tok = self._tokenizer
    step = max(1, tok.vocab_size // _PROBED)
    ids = [i for i in range(0, tok.vocab_size, step) if tok.token_bytes(i)]
    ours = b''.join(map(tok.token_bytes, ids)).decode('utf-8', 'replace')
    theirs = await http.detokenize(model.name, ids)
    # Some decoders drop the first space of a text.
    ours, theirs = ours.lstrip(' '), theirs.lstrip(' ')
    if ours != theirs:
      pairs = enumerate(zip(ours, theirs))
      at = next((i for i, (a, b) in pairs if a != b), 0)
      raise EngineError(
        f'{url}: serves another tokenizer: our {ours[at : at + 20]!r} is its '
        f'{theirs[at : at + 20]!r}; {_FIX}'
      )


async def _all(work: Sequence[Awaitable]) -> list:
  """All results; the first error, once the others have ended."""
  results = await asyncio.gather(*work, return_exceptions=True)
  for result in results:
    if isinstance(result, BaseException):
      raise result
  return results
