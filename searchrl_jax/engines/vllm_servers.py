"""The servers behind the vLLM engine: found, checked, loaded, mended.

A server may be asked once it is `ready`: it serves our model, under a name
that this process has seen, and holds the weights of the last sync, by its own
checksums. One that fails is looked at before anything else is sent to it: if
another process has come in its place (its model has another name then, see
sidecar.py), that one is loaded first.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
import contextlib
import time
from typing import Any

from searchrl_jax.engines.core import EngineError, SyncError
from searchrl_jax.engines.requests import Handle
from searchrl_jax.engines.vllm_http import (
  Client, Down, Model, Refused, Restarted,
)
from searchrl_jax.publication import Publication

NAME = 'searchrl-'  # what the names begin with that sidecar.py gives models
POLL = 0.2  # seconds between looks at a server that is not there
_PROBED = 256  # ids whose text tells one tokenizer from another
_MEND = 'give config.engine.url another, or none to have servers started'


class Server:
  """What is known of one server.

  failure: says why nobody will start it again; None while that may be.
  """

  def __init__(self, url: str, failure: Callable[[], str | None]):
    self.url = url
    self.failure = failure
    self.http: Client  # of the running event loop
    self.ready = False  # may be asked
    self.name: str | None = None  # of the model, when last seen
    self.version: int | None = None  # held under that name, and checked
    self.mending: asyncio.Task | None = None
    self.error: EngineError | SyncError | None = None  # why it was given up
    self.in_flight = 0  # requests
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


class Patience:
  """The time left for a call; that of a hold does not count."""

  def __init__(self, seconds: float):
    self._until = time.monotonic() + seconds

  def left(self) -> float:
    return max(0.0, self._until - time.monotonic())

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    begin = time.monotonic()
    try:
      yield
    finally:
      self._until += time.monotonic() - begin


class Fleet:
  """The servers of one engine, used from one event loop at a time.

  Args:
    servers: as yet unseen.
    model: the fields (families.FIELDS, and dtype) of the model that they
      must serve.
    tokenizer: the tokenizer.Tokenizer that they must have.
    config: config.engine.
  """

  def __init__(self, servers: Sequence[Server], model: Mapping[str, Any],
               tokenizer, config):
    self.servers = servers
    self.holds: set[str] = set()  # 'sync', 'rest': why calls wait
    self.current: Publication | None = None  # of the last sync
    self.restarts = 0  # servers that came back as other processes
    self.seconds_held = 0.0  # summed over calls
    self._model, self._tokenizer, self._config = model, tokenizer, config
    self._loading = False  # nothing is mended meanwhile
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
    for server in self.servers:
      server.http = Client(
        server.url, self._config.timeout, self._config.start_seconds
      )
      server.mending, server.in_flight = None, 0

  async def close(self) -> None:
    if self._loop is asyncio.get_running_loop():
      await self._end_mending()
      for server in self.servers:
        await server.http.close()
      self._loop = None

  # Who may be asked.

  async def take(self, seat: Handle, pinned: Server | None, probe: bool,
                 patience: Patience) -> Server:
    """The server to ask: that of the prefix, else the least loaded one.

    Waits while all are held (unless `probe`), and for one that is up.

    Raises:
      EngineError: none is up in time, or all were given up.
      SyncError: one cannot be brought to the weights.
    """
    pool = self.servers if pinned is None else [pinned]
    while True:
      if self.holds and not probe:
        begin = time.monotonic()
        with patience.paused():
          await self._event.wait()
        self.seconds_held += time.monotonic() - begin
        continue
      up = [s for s in pool if s.ready]
      if up:
        if seat.home not in up:
          min(up, key=lambda s: (s.in_flight, s.handles)).seat(seat)
        return seat.home
      for server in pool:
        self._mend(server)
      self._raise_lost(pool)
      if not patience.left():
        raise self.late('no server is up')
      with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(self._event.wait(), patience.left())

  def _raise_lost(self, pool: Sequence[Server]) -> None:
    lost = [s.error for s in self.servers if s.error is not None]
    for error in lost:
      if isinstance(error, SyncError):
        raise SyncError(str(error)) from error
    if all(s.error is not None for s in pool):
      raise EngineError(f'no server is left; {lost[-1]}') from lost[-1]

  def late(self, why: str) -> EngineError:
    return EngineError(
      f'{", ".join(s.url for s in self.servers)}: no answer in config.engine.'
      f'deadline={self._config.deadline} s ({why})'
    )

  def suspect(self, server: Server) -> None:
    """It failed: it is looked at before it is asked again."""
    server.ready = False
    self._mend(server)

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
      await self._end_mending()
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
    await self._end_mending()
    for server in self.servers:
      server.ready = False
      await self._quiet(server)
      await server.http.sleep()

  async def wake(self) -> None:
    for server in self.servers:
      await server.http.wake()
      await server.http.resume()
      server.ready = True
    self._loading = False
    self._changed()

  def _mend(self, server: Server) -> None:
    """Brings a server back, unless that is being done or was given up."""
    if server.mending or server.error or self._loading:
      return

    async def mend():
      try:
        await self._bring(server, self.current)
      except (EngineError, SyncError) as e:
        server.error = e
      finally:
        server.mending = None
        self._changed()

    server.mending = asyncio.get_running_loop().create_task(mend())

  async def _end_mending(self) -> None:
    tasks = [s.mending for s in self.servers if s.mending]
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

  async def _bring(self, server: Server,
                   target: Publication | None) -> dict[str, str]:
    """Waits until a server is there and has it hold `target`, checked.

    Returns the checksums of what it holds; {} if there was nothing to load:
    no target yet, or the same process with these weights.
    """
    server.error = None
    until, failures = time.monotonic() + self._config.start_seconds, 0
    while True:
      try:
        name, found = await self._connect(server, until), {}
        if target is not None and server.version is None:
          found = await self._load(server, target)
          if (await server.http.model()).name != name:
            raise Restarted(f'{server.url}: restarted while it was loaded')
          server.version = target.version
        server.ready = True
        self._changed()
        return found
      except (Down, Restarted) as e:
        failures += 1
        if failures >= self._config.attempts:
          raise EngineError(
            f'{e}; {failures} attempts to load it failed (config.engine.'
            'attempts)'
          ) from e
        await asyncio.sleep(POLL)

  async def _connect(self, server: Server, until: float) -> str:
    """The name under which it serves our model; waits for it to be there."""
    while True:
      try:
        model = await server.http.model()
        break
      except Down as e:
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
    http, url = server.http, server.url
    await self._quiet(server)
    try:
      await http.rpc('searchrl_load', str(target.path))
      if not await http.reset_prefix_cache():
        raise SyncError(f'{url}: did not drop its prefix cache; restart it')
      await http.set_version(target.version)
      await http.resume()
      found = checksums(await http.rpc('searchrl_checksums'))
    except Refused as e:
      raise SyncError(
        f'{url}: version {target.version} could not be loaded: {e}'
      ) from e
    wanted = dict(target.manifest)
    # A tied model is served untied: its head must be the embedding.
    wanted.setdefault('head', wanted['embed'])
    wrong = [
      f'{name}: published {wanted.get(name, "absent")}, it holds '
      f'{found.get(name, "absent")}'
      for name in sorted({*wanted, *found})
      if wanted.get(name) != found.get(name)
    ]
    if wrong:
      raise SyncError(
        f'{url} does not hold version {target.version}; {len(wrong)} of '
        f'{len(wanted)} tensors differ:\n  ' + '\n  '.join(wrong)
      )
    return {name: found[name] for name in target.manifest}

  # Whether it is ours.

  async def _check(self, server: Server, model: Model) -> None:
    """Raises EngineError for a server of another model or kind."""
    url, http = server.url, server.http
    if not model.name.startswith(NAME):
      raise EngineError(
        f'{url}: serves {model.name!r}; expected a server of python -m '
        'searchrl_jax.engines.sidecar, which gives each start a name of its '
        f'own ({NAME}...), so that a restart cannot pass unseen'
      )
    if model.max_len <= self._config.max_len:
      raise EngineError(
        f'{url}: holds {model.max_len} tokens (--max_model_len); expected '
        f'config.engine.max_len={self._config.max_len} and one more, for '
        'scoring'
      )
    # A trainer that died may have left it so.
    if await http.is_sleeping():
      await http.wake()
    await http.resume()
    for said in await http.rpc('searchrl_describe'):
      said = {**said['model'], 'dtype': said['dtype']}
      for field, want in self._model.items():
        if said.get(field) != want:
          raise EngineError(
            f'{url}: serves a model with {field}={said.get(field)!r}; '
            f'expected {want!r}; {_MEND}'
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
        f'{ours[at:at + 20]!r} here reads {theirs[at:at + 20]!r} there; '
        f'{_MEND}'
      )


def checksums(workers: Sequence[Mapping[str, Sequence]]) -> dict[str, str]:
  """`engines.checksum.checksums` of a model from its workers' parts.

  workers: what `searchrl_checksums` of our extension gives, for each.
  """
  out = {}
  for name in sorted(set().union(*workers)):
    parts = [w[name] for w in workers if name in w]
    dtype, shape = parts[0][:2]
    low, high = (sum(p[i] for p in parts) & 0xFFFFFFFF for i in (2, 3))
    dims = ','.join(map(str, shape))
    out[name] = f'{dtype}[{dims}]:{low:08x}{high:08x}'
  return out


async def _all(work: Sequence[Awaitable]) -> list:
  """All results; the first error, once the others have ended."""
  found = await asyncio.gather(*work, return_exceptions=True)
  for result in found:
    if isinstance(result, BaseException):
      raise result
  return found
