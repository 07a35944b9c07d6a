"""The servers behind the vLLM engine: found, checked, loaded.

A server may be asked once it is `ready`: it serves our model, under a name
that this process has seen, and holds the weights of the last sync, by its own
checksums. One that fails is looked at before anything else is sent to it: if
another process has come in its place (its model has another name then, see
sidecar.py, which starts a server a second time and no more), that one is loaded
first. One that does not come back, or dies while it is loaded, stops the run.
"""

import asyncio
from collections.abc import (
  AsyncIterator,
  Awaitable,
  Callable,
  Mapping,
  Sequence,
)
import contextlib
import logging
import time
from typing import Any
import uuid

from searchrl_jax.engines.core import EngineError, SyncError
from searchrl_jax.engines.requests import AHEAD, Handle, Patience
from searchrl_jax.engines.vllm import launcher
from searchrl_jax.engines.vllm.transport import (
  Client,
  Down,
  Model,
  Refused,
  Restarted,
)
from searchrl_jax.engines.weights import checksum
from searchrl_jax.engines.weights.publication import Publication

NAME = 'searchrl-'  # what the names begin with that sidecar.py gives models
POLL = 0.2  # seconds between looks at a server that is not there
_PROBED = 256  # ids whose text tells one tokenizer from another
_MEND = 'give config.engine.url another, or none to have servers started'
_log = logging.getLogger(__name__)


class Server:
  """What is known of one server.

  failure: says why nobody will start it again; None while that may be.
  """

  def __init__(self, url: str, failure: Callable[[], str | None]):
    self.url = url
    self.failure = failure
    self.http: Client  # of the running event loop, as is
    self.places: asyncio.Semaphore  # for requests that sample
    self.ready = False  # may be asked
    self.name: str | None = None  # of the model, when last seen
    self.version: int | None = None  # held under that name, and checked
    self.coming: asyncio.Task | None = None  # that brings it back
    self.error: EngineError | SyncError | None = None  # why it cannot be
    self.trouble = ''  # why it was not ready, when last looked at
    self.in_flight = 0  # requests
    self.queued = 0  # requests that wait here for a place there
    self.handles = 0  # whose prefixes it caches
    self.prefilled = 0  # tokens computed of prompts

  def seat(self, handle: Handle) -> None:
    """The handle's prefix will be cached here."""
    unseat(handle)
    handle.home = self
    self.handles += 1


def unseat(handle: Handle) -> None:
  if handle.home is not None:
    handle.home.handles -= 1
    handle.home = None


class Fleet:
  """The servers of one engine, used from one event loop at a time.

  Args:
    servers: as yet unseen.
    model: the fields (families.FIELDS, and dtype) of the model that they
      must serve.
    tokenizer: the tokenizer.Tokenizer that they must have.
    config: config.engine.
  """

  def __init__(
    self, servers: Sequence[Server], model: Mapping[str, Any], tokenizer, config
  ):
    self.servers = servers
    self.holds: set[str] = set()  # 'sync', 'rest': why calls wait
    self.current: Publication | None = None  # of the last sync
    self.restarts = 0  # servers that came back as other processes
    self.seconds_held = 0.0  # summed over calls
    self._model, self._tokenizer, self._config = model, tokenizer, config
    self._nonce = uuid.uuid4().hex  # tells our weights from those of others
    self._loading = False  # nothing is brought back meanwhile
    self._loop: asyncio.AbstractEventLoop | None = None
    self._event: asyncio.Event

  def enter(self) -> None:
    """Makes what belongs to the running event loop."""
    loop = asyncio.get_running_loop()
    if self._loop is loop:
      return
    if self._loop is not None and self._loop.is_running():
      raise EngineError('the engine is in use by another event loop')
    self._loop, self._event = loop, asyncio.Event()
    most = AHEAD * self._config.slots
    for server in self.servers:
      server.http = Client(
        server.url, self._config.timeout, self._config.start_seconds, most
      )
      server.places = asyncio.Semaphore(most)
      server.coming, server.in_flight, server.queued = None, 0, 0

  async def close(self) -> None:
    if self._loop is asyncio.get_running_loop():
      await self._end_coming()
      for server in self.servers:
        await server.http.close()
      self._loop = None

  # Who may be asked.

  async def take(
    self, seat: Handle, pinned: Server | None, probe: bool, patience: Patience
  ) -> Server:
    """The server to ask: that of the prefix, else the least loaded one.

    Waits while all are held (unless `probe`), and for one that is up.

    Raises:
      EngineError: none is up in time, or one does not come back.
      SyncError: one cannot be brought to the weights.
    """
    pool = self.servers if pinned is None else [pinned]
    while True:
      for server in self.servers:
        if server.error is not None:
          raise type(server.error)(str(server.error)) from server.error
      if self.holds and not probe:
        begin = time.monotonic()
        with patience.paused():
          await self._event.wait()
        self.seconds_held += time.monotonic() - begin
        continue
      up = [s for s in pool if s.ready]
      if up:
        if seat.home not in up:
          min(up, key=lambda s: (s.in_flight + s.queued, s.handles)).seat(seat)
        return seat.home
      for server in pool:
        self._bring_back(server)
      if not patience.left():
        raise self.late('no server is up')
      with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(self._event.wait(), patience.left())

  @contextlib.asynccontextmanager
  async def place(
    self, server: Server, probe: bool, patience: Patience
  ) -> AsyncIterator[bool]:
    """A place among the requests of a server: those wait here, in turn, that
    would wait there, where a request's time runs. Probes pass by.

    Gives whether the server may still be asked.
    """
    if probe:
      yield True
      return
    server.queued += 1
    try:
      with patience.paused():
        await server.places.acquire()
    finally:
      server.queued -= 1
    try:
      yield server.ready and not self.holds
    finally:
      server.places.release()

  def late(self, why: str, last: Exception | None = None) -> EngineError:
    """last: what went wrong before, if anything did."""
    causes = [str(last)] if last else [s.trouble for s in self.servers]
    why = '; '.join([why, *filter(None, causes)])
    return EngineError(
      f'{", ".join(s.url for s in self.servers)}: no answer in config.engine.'
      f'deadline={self._config.deadline} s ({why})'
    )

  def suspect(self, server: Server, why: Exception) -> None:
    """It failed: it is looked at before it is asked again."""
    if server.ready:
      _log.warning(
        '%s is not asked until it is well again: %s', server.url, why
      )
    server.ready, server.trouble = False, str(why)
    self._bring_back(server)

  def hold(self, why: str) -> None:
    self.holds.add(why)

  def release(self, why: str) -> None:
    self.holds.discard(why)
    self._changed()

  def _changed(self) -> None:
    """Wakes whoever waits for a server or for the end of a hold."""
    self._event.set()
    self._event = asyncio.Event()

  # Weights.

  async def load(self, target: Publication) -> dict[str, str]:
    """Has every server hold `target`; returns the checksums of what they do.

    Raises:
      EngineError: one is not there, or not ours.
      SyncError: one does not hold it; names the tensors.
    """
    self._loading = True
    try:
      await self._end_coming()
      for server in self.servers:
        server.ready, server.version = False, None
      found = await _all([self._bring(s, target) for s in self.servers])
    finally:
      self._loading = False
    self.current = target
    self._changed()
    return found[0]

  async def sleep(self) -> None:
    """Ends what is under way; the weights go to the host's memory."""
    self._loading = True
    try:
      await self._end_coming()
      await _all([self._lull(s) for s in self.servers])
    except BaseException:
      self._loading = False
      raise

  async def _lull(self, server: Server) -> None:
    """One that crashed is brought back first: it would take its memory when
    nobody expects it.
    """
    await self._bring(server, self.current)
    server.ready = False
    await self._quiet(server)
    await server.http.sleep()

  async def wake(self) -> None:
    try:
      await _all([self._bring(s, self.current) for s in self.servers])
    finally:
      self._loading = False
      self._changed()

  async def check_claims(self) -> None:
    """Raises SyncError if another client has loaded weights into a server.

    One that does not answer, or is another process now, is brought back.
    """
    for server in self.servers:
      version = server.version
      if not server.ready or version is None:
        continue
      try:
        found = await server.http.version()
        if found == self._claim(version):
          continue
        if (await server.http.model()).name != server.name:
          raise Restarted(f'{server.url}: restarted')
      except (Down, Restarted) as e:
        self.suspect(server, e)
        continue
      if server.ready and server.version == version:
        raise SyncError(
          f'another client has loaded weights into {server.url} (it says '
          f'{found!r}, expected {self._claim(version)!r}); give each run '
          'servers of its own'
        )

  def _claim(self, version: int) -> str:
    return f'{self._nonce}-{version}'

  def _bring_back(self, server: Server) -> None:
    """Begins to, unless that is being done, or cannot be."""
    if server.coming or server.error or self._loading:
      return

    async def come():
      lost = server.trouble
      try:
        await self._bring(server, self.current)
        if lost:
          _log.warning('%s is back', server.url)
      except (EngineError, SyncError) as e:
        server.error = e
      except Exception as e:  # whoever waits for the server is told
        server.error = EngineError(f'{server.url}: {e!r} as it was looked at')
        server.error.__cause__ = e
      finally:
        server.coming = None
        self._changed()

    server.coming = asyncio.get_running_loop().create_task(come())

  async def _end_coming(self) -> None:
    tasks = [s.coming for s in self.servers if s.coming]
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for server in self.servers:  # one may have ended before it began
      server.coming = None

  async def _bring(
    self, server: Server, target: Publication | None
  ) -> dict[str, str]:
    """Waits until a server is there and has it hold `target`, checked.

    Returns the checksums of what it holds; {} if there was nothing to load:
    no target yet, or the same process with these weights.

    Raises:
      EngineError: it is not there, not ours, or died while it was loaded.
      SyncError: it does not hold the weights.
    """
    server.error = None
    name, found = await self._connect(server), {}
    if target is not None and server.version is None:
      found = await self._load(server, target)
      if (await server.http.model()).name != name:
        raise Restarted(f'{server.url}: restarted while it was loaded')
      server.version = target.version
    server.ready, server.trouble = True, ''
    self._changed()
    return found

  async def _connect(self, server: Server) -> str:
    """The name under which it serves our model; waits for it to be there."""
    until = time.monotonic() + self._config.start_seconds
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
        server.trouble = str(e)
        if (failure := server.failure()) is not None:
          raise EngineError(f'{server.url}: {failure}') from e
        if time.monotonic() > until:
          raise EngineError(
            f'{server.url}: not there in config.engine.start_seconds='
            f'{self._config.start_seconds} s ({e})'
          ) from e
        await asyncio.sleep(POLL)
    if model.name != server.name:
      server.version = None
      await self._check(server, model)
      self.restarts += server.name is not None
      server.name = model.name
    return model.name

  async def _quiet(self, server: Server) -> None:
    """Returns when the server is paused and every answer is in.

    A request that reached it after the pause waits there, and would be
    served with other weights than its sender thinks.
    """
    await server.http.pause()
    while server.in_flight:
      await server.http.abort()
      await asyncio.sleep(0.02)

  async def _load(self, server: Server, target: Publication) -> dict[str, str]:
    http = server.http
    what = f'version {target.version} ({target.path})'
    await self._quiet(server)
    try:
      await http.rpc('searchrl_load', str(target.path))
      if not await http.reset_prefix_cache():
        raise SyncError(
          f'{server.url}: did not drop its prefix cache; restart it'
        )
      await http.set_version(self._claim(target.version))
      await http.resume()
      found = checksum.combine(await http.rpc('searchrl_checksums'))
    except (Refused, ValueError) as e:
      raise SyncError(f'{server.url}: {what} could not be loaded: {e}') from e
    wanted = target.manifest
    wrong = [
      f'{name}: published {wanted.get(name, "absent")}, it holds '
      f'{found.get(name, "absent")}'
      for name in sorted({*wanted, *found})
      if wanted.get(name) != found.get(name)
    ]
    if wrong:
      raise SyncError(
        f'{server.url} does not hold {what}; {len(wrong)} of {len(wanted)} '
        'tensors differ:\n  ' + '\n  '.join(wrong)
      )
    return found

  # Whether it is ours.

  async def _check(self, server: Server, model: Model) -> None:
    """Raises EngineError for a server of another model or kind."""
    url, http = server.url, server.http
    if not model.name.startswith(NAME):
      raise EngineError(
        f'{url}: serves {model.name!r}; expected a server of python -m '
        'searchrl_jax.engines.vllm.launcher, which gives each start a name of '
        f'its own ({NAME}...), so that a restart cannot pass unseen'
      )
    if model.max_len <= self._config.max_len:
      raise EngineError(
        f'{url}: holds {model.max_len} tokens (--max_model_len); expected '
        f'config.engine.max_len={self._config.max_len} and one more, for '
        'scoring'
      )
    try:
      workers = await http.rpc('searchrl_describe')
    except Refused as e:
      raise EngineError(
        f'{url}: cannot be given weights ({e}); start it with '
        f'--plugin={launcher.PLUGIN}, the default of python -m '
        'searchrl_jax.engines.vllm.launcher'
      ) from e
    for said in workers:
      said = {**said['model'], 'dtype': said['dtype']}
      for field, want in self._model.items():
        if said.get(field) != want:
          flag = ' (--dtype)' * (field == 'dtype')
          raise EngineError(
            f'{url}: serves a model with {field}={said.get(field)!r}; '
            f'expected {want!r}{flag}; {_MEND}'
          )
    await self._check_tokenizer(server, model)

  async def _check_tokenizer(self, server: Server, model: Model) -> None:
    """Compares the text of ids spread over the vocabulary."""
    tok = self._tokenizer
    step = max(1, tok.vocab_size // _PROBED)
    ids = [i for i in range(0, tok.vocab_size, step) if tok.token_bytes(i)]
    ours = b''.join(map(tok.token_bytes, ids)).decode('utf-8', 'replace')
    theirs = await server.http.detokenize(model.name, ids)
    # Some decoders drop the first space of a text.
    ours, theirs = ours.lstrip(' '), theirs.lstrip(' ')
    if ours != theirs:
      pairs = zip(ours, theirs)
      at = next((i for i, (a, b) in enumerate(pairs) if a != b), 0)
      raise EngineError(
        f'{server.url}: serves another tokenizer: what reads '
        f'{ours[at : at + 20]!r} here reads {theirs[at : at + 20]!r} there; '
        f'{_MEND}'
      )


async def _all(work: Sequence[Awaitable]) -> list:
  """All results; the first error, once the others have ended."""
  found = await asyncio.gather(*work, return_exceptions=True)
  for result in found:
    if isinstance(result, BaseException):
      raise result
  return found
