"""The engine of vLLM servers: this process keeps the ids, they keep caches.

A handle is a list of ids held here; every request sends all of it, and the
server's prefix cache spares the computing. So a lost request is sent again, to
any server: what counts is the one answer that is taken.

Tokens of two versions never mix unseen: a server is loaded only after each
request sent to it has come back. What was under way is ended, its tokens are
kept with the version that wrote them, and the same generate call goes on
after `resume`.

Departures from the in-process sampler: the draw of a token depends on the
seed and on the position at which its request began, so that a completion cut
in two is another one than the same in one piece; and how requests fall
together in a server's batches may show in the last bits.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent import futures
import dataclasses
import hashlib
import math
import pathlib
import time
from typing import Any

import numpy as np

from searchrl_jax.engines import core, requests
from searchrl_jax.engines.core import (
  Completion,
  EngineError,
  Sampling,
  SyncReport,
  WeightsUpdate,
)
from searchrl_jax.engines.jax.stops import StopFinder
from searchrl_jax.engines.requests import Handle, Patience, check_open
from searchrl_jax.engines.vllm import launcher
from searchrl_jax.engines.vllm.servers import POLL, Fleet, Server, unseat
from searchrl_jax.engines.vllm.transport import Down, Output, Refused, Restarted
from searchrl_jax.engines.weights import publication, published
from searchrl_jax.models import families
from searchrl_jax.models.decoder import DecoderConfig
from searchrl_jax.types import Prompt

COOLEST = 0.01  # vLLM takes a temperature between 0 and this one for this one
_BACKOFF = 5.0  # seconds between two tries, at most


class _Call:
  """One generate call, over as many requests as it takes."""

  def __init__(self, handle: Handle, sampling: Sampling):
    self.handle, self.sampling = handle, sampling
    self.ids: list[int] = []
    self.logps: list[float] = []
    self.versions: list[int] = []
    self.stop = ''
    self._find = StopFinder(sampling.stops)

  @property
  def left(self) -> int:
    return self.sampling.max_tokens - len(self.ids)

  def tokens(self) -> list[int]:
    return [*self.handle.ids, *self.ids]

  def seed(self) -> int:
    """Of the request that begins here, in [0, 2**63)."""
    name = repr((self.sampling.seed, len(self.handle) + len(self.ids)))
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1

  def take(self, out: Output, version: int, tokenizer) -> int:
    """Adds a request's tokens up to the end; returns how many were left over.

    The end is found here, by the rule of all engines: a stop may begin in one
    request and end in the next, and a server sees only its own.
    """
    for n, (token, logp) in enumerate(zip(out.ids, out.logps), 1):
      self.ids.append(token)
      self.logps.append(logp)
      self.versions.append(version)
      self.stop = self._find(requests.token_bytes(tokenizer, token)) or ''
      if not self.stop and token in self.sampling.stop_ids:
        self.stop = 'eos'
      if not self.stop and not self.left:
        self.stop = 'length'
      if self.stop:
        return len(out.ids) - n
    return 0


class VllmEngine(core.Engine):
  """See engines/core.py. The weights come with the first `sync`.

  Args:
    model_cfg: of the model; servers of another are refused.
    tokenizer: a tokenizer.Tokenizer; servers with another are refused.
    config: config.engine; its fields are explained in run/schema.py.
    folder: of the run: gets the publications and the servers' logs.

  Raises:
    EngineError: servers that cannot be started, or no URL that could be one.
  """

  def __init__(
    self,
    model_cfg: DecoderConfig,
    params,
    tokenizer,
    config,
    mesh=None,
    folder=None,
  ):
    del params, mesh  # publications bring them
    if config.attempts < 1:
      raise EngineError(f'config.engine.attempts={config.attempts}: at least 1')
    self._tokenizer, self._config = tokenizer, config
    folder = pathlib.Path(folder).absolute()
    self._publisher = publication.Publisher(
      folder / 'published', model_cfg, config.dtype
    )
    self.vocab_size = model_cfg.vocab_size
    self.max_len = config.max_len
    self.dtype = config.dtype
    self.version = None  # nothing is loaded yet
    self._counters = dict.fromkeys(
      (
        'requests',
        'retries',
        'aborted_requests',
        'generated_tokens',
        'discarded_tokens',
        'prefilled_tokens',
        'prefix_tokens',
        'scored_tokens',
        'syncs',
      ),
      0,
    )
    self._seconds = {'request': 0.0, 'publish': 0.0, 'sync': 0.0}
    fields = dataclasses.asdict(model_cfg)
    model = {name: fields[name] for name in families.FIELDS}
    urls = [u.strip() for u in config.url.split(',') if u.strip()]
    for url in urls:
      if not url.startswith(('http://', 'https://')):
        raise EngineError(
          f'config.engine.url: {url!r} is no URL; expected http://host:port'
        )
    self._sidecars = []
    if not urls:
      published.write_serving_folder(
        folder / 'serving', model, tokenizer.path, config.dtype
      )
      self._sidecars = _start(config, folder)
    servers = [Server(url, lambda: None) for url in urls] + [
      Server(s.url, lambda s=s: s.failure) for s in self._sidecars
    ]
    # It may be served untied.
    model = {k: v for k, v in model.items() if k != 'tied'}
    self._fleet = Fleet(
      servers, {**model, 'dtype': config.dtype}, tokenizer, config
    )
    self.replicas = tuple(_Replica(self, s) for s in servers)

  def open(self, prompt: Prompt) -> Handle:
    """Raises EngineError: no ids, ids out of range, or too many."""
    if prompt.media:
      raise EngineError('vllm takes no media here; Prompt.media must be ()')
    ids = self._checked(prompt.ids, 0, 'the prompt')
    if not ids:
      raise EngineError('the prompt is empty; it needs at least one token')
    return Handle(ids)

  def fork(self, handle: Handle) -> Handle:
    check_open(handle)
    child = Handle(list(handle.ids))
    if handle.home is not None:
      handle.home.seat(child)
    return child

  def truncate(self, handle: Handle, n: int) -> None:
    """Keeps the first n tokens (1 <= n <= len(handle))."""
    check_open(handle)
    if not 1 <= n <= len(handle):
      raise EngineError(
        f'truncate to {n}: the handle has {len(handle)} tokens, at least 1 '
        'must stay'
      )
    del handle.ids[n:]

  def append(self, handle: Handle, ids) -> None:
    check_open(handle)
    handle.ids.extend(self._checked(ids, len(handle), 'append'))

  def close(self, handle: Handle) -> None:
    """Closing twice is harmless."""
    if isinstance(handle, Handle) and handle.closed:
      return
    check_open(handle)
    handle.closed = True
    unseat(handle)

  async def generate(self, handle: Handle, sampling: Sampling) -> Completion:
    """Samples up to sampling.max_tokens ids and appends them to the handle.

    Log-probs are those of the distribution sampled from; greedy: of the
    argmax at temperature 1. A cancelled call leaves the handle as it was and
    ends its request.

    Raises:
      EngineError: bad sampling; no server answers within config.engine.
        deadline seconds (waiting for `resume`, or for a place among the
        requests of a server, does not count) and config.engine.attempts tries
        of a request; one refuses it.
      SyncError: a server came back and cannot be brought to the weights.
    """
    return await self._generate(handle, sampling, None)

  async def score(self, ids) -> np.ndarray:
    """Log-prob of each id given those before it: float32 [n], [0] is 0.

    A full forward pass at temperature 1, past the prefix cache.

    Raises:
      EngineError, SyncError: as `generate`.
    """
    return await self._score(ids, None)

  async def sync(self, update: WeightsUpdate) -> SyncReport:
    """Publishes weights, loads them into every server, leaves all held.

    `update.params` may be the folder of a publication. What each server holds
    is compared with the publication's checksums; older publications are
    deleted once all have it.

    Raises:
      SyncError: names the server, and the tensors that differ; or another
        client has loaded weights into one since the last sync.
      EngineError: a server that is not there, or of another model.
      CheckpointError, PublishedError: the publication.
    """
    if update.kind != 'full':
      raise EngineError(
        f'vllm takes WeightsUpdate(kind="full"); got kind={update.kind!r}'
      )
    self._fleet.enter()
    await self._fleet.check_claims()
    start = time.perf_counter()
    target = await asyncio.to_thread(self._publish, update)
    self._seconds['publish'] += time.perf_counter() - start
    self._fleet.hold('sync')
    manifest = await self._fleet.load(target)
    self.version = update.version
    if isinstance(update.params, Mapping):
      await asyncio.to_thread(self._publisher.prune, update.version)
    seconds = time.perf_counter() - start
    self._counters['syncs'] += 1
    self._seconds['sync'] += seconds
    return SyncReport(
      update.version, seconds, len(manifest), target.bytes, math.nan, manifest
    )

  async def resume(self) -> None:
    self._fleet.release('sync')

  async def rest(self) -> None:
    """With config.engine.sleep: the weights leave the GPU until `wake`.

    What is under way is ended, and goes on then.

    Raises:
      SyncError: another client has loaded weights into a server: what was
        generated since the sync may be of those.
    """
    self._fleet.enter()
    await self._fleet.check_claims()
    if self._config.sleep:
      self._fleet.hold('rest')
      await self._fleet.sleep()

  async def wake(self) -> None:
    if self._config.sleep:
      await self._fleet.wake()
      self._fleet.release('rest')

  async def shutdown(self) -> None:
    """Closes the connections and stops the servers that it started.

    The publications go: the run's checkpoints have the weights.
    """
    await self._fleet.close()
    for one in self._sidecars:
      await asyncio.to_thread(one.stop)
    await asyncio.to_thread(self._publisher.clear)

  def stats(self) -> dict[str, float]:
    """Counters since the start, in tokens, requests or seconds.

    prefix_tokens: prompt tokens found in a server's cache; prefilled_tokens:
    those that were not. restarts: servers that came back as other processes.
    discarded_tokens: sampled past a stop that began in an earlier request.
    seconds_request and seconds_held are summed over calls.
    """
    return {
      **self._counters,
      **{f'seconds_{k}': v for k, v in self._seconds.items()},
      'seconds_held': self._fleet.seconds_held,
      'restarts': self._fleet.restarts,
    }

  def warmup(self) -> None:
    """Nothing: a server compiles what it needs before it answers."""

  def capacity(self, tokens: int) -> int:
    return capacity(None, self._config, tokens)

  # What a replica asks of one server.

  async def _generate(
    self, handle: Handle, sampling: Sampling, pinned: Server | None
  ) -> Completion:
    check_open(handle)
    requests.check_sampling(sampling, len(handle), self.max_len, COOLEST)
    self._fleet.enter()
    if self._fleet.current is None and not sampling.probe:
      raise EngineError('the servers hold no weights yet; call sync first')
    call, patience = _Call(handle, sampling), Patience(self._config.deadline)
    handle.busy = True
    try:
      while not call.stop:
        await self._write(call, pinned, patience)
      handle.ids += call.ids
    finally:
      handle.busy = False
    return Completion(
      np.array(call.ids, np.int32),
      np.array(call.logps, np.float32),
      call.stop,
      np.array(call.versions, np.int32),
    )

  async def _score(self, ids, pinned: Server | None) -> np.ndarray:
    ids = self._checked(ids, 0, 'score')
    if len(ids) < 2:
      return np.zeros(len(ids), np.float32)
    self._fleet.enter()
    seat, patience = Handle(ids), Patience(self._config.deadline)

    async def send(server: Server) -> np.ndarray | None:
      return await server.http.score(server.name, ids)

    try:
      found = None
      while found is None:  # a sync ended it: again, on the new weights
        found = await self._ask(send, seat, pinned, True, patience)
    finally:
      unseat(seat)
    self._counters['scored_tokens'] += len(ids)
    return found

  # Requests.

  async def _write(
    self, call: _Call, pinned: Server | None, patience: Patience
  ) -> None:
    """One request's part of a completion."""
    ids = call.tokens()

    async def send(server: Server) -> tuple[Server, int, Output]:
      version = server.version
      if version is None:
        if self._fleet.current is not None:
          raise Restarted(f'{server.url}: holds no weights of ours')
        version = -1  # a probe, before the first sync, of what it started with
      out = await server.http.complete(
        server.name, ids, call.sampling, call.left, call.seed(), f'v{version}'
      )
      if out.end == 'abort' and not (out.ids or self._fleet.holds):
        raise Down(f'{server.url}: ended a request before its first token')
      return server, version, out

    server, version, out = await self._ask(
      send, call.handle, pinned, call.sampling.probe, patience
    )
    if any(not 0 <= i < self.vocab_size for i in out.ids):
      raise Refused(
        f'{server.url}: sampled ids outside of 0..{self.vocab_size - 1}'
      )
    over = call.take(out, version, self._tokenizer)
    counters = self._counters
    counters['aborted_requests'] += out.end == 'abort'
    counters['generated_tokens'] += len(out.ids) - over
    counters['discarded_tokens'] += over
    if out.ids:  # else it may have ended before its prefill
      counters['prefix_tokens'] += out.cached
      counters['prefilled_tokens'] += len(ids) - out.cached
      server.prefilled += len(ids) - out.cached

  async def _ask(
    self,
    send: Callable[[Server], Awaitable[Any]],
    seat: Handle,
    pinned: Server | None,
    probe: bool,
    patience: Patience,
  ) -> Any:
    """What `send(server)` gives, from a server that is up."""
    failures, last = 0, None
    while True:
      server = await self._fleet.take(seat, pinned, probe, patience)
      async with self._fleet.place(server, probe, patience) as there:
        if not there:
          continue
        server.in_flight += 1
        self._counters['requests'] += 1
        begin = time.perf_counter()
        try:
          async with asyncio.timeout(patience.left()):
            return await send(server)
        except TimeoutError as e:
          raise self._fleet.late('a request is still under way', last) from e
        except (Down, Restarted) as e:
          self._fleet.suspect(server, e)
          failures, last = failures + 1, e
          if failures >= self._config.attempts:
            raise EngineError(
              f'{e}; {failures} attempts failed (config.engine.attempts)'
            ) from e
        finally:
          server.in_flight -= 1
          self._seconds['request'] += time.perf_counter() - begin
      self._counters['retries'] += 1
      await asyncio.sleep(min(POLL * 2 ** (failures - 1), _BACKOFF))

  def _checked(self, ids, held: int, what: str) -> list[int]:
    return requests.check_ids(ids, held, what, self.vocab_size, self.max_len)

  def _publish(self, update: WeightsUpdate) -> publication.Publication:
    if isinstance(update.params, Mapping):
      return self._publisher.publish(update.params, update.version)
    found = published.open_published(update.params)
    if (found.version, found.dtype) != (update.version, self.dtype):
      raise EngineError(
        f'{found.path}: holds version {found.version} in {found.dtype}; '
        f'expected version {update.version} in {self.dtype}'
      )
    elements = sum(math.prod(s) for s in found.shapes.values())
    return publication.Publication(
      found.path.absolute(),
      found.version,
      found.manifest,
      elements * (4 if found.dtype == 'float32' else 2),
      0.0,
    )


class _Replica:
  """The engine with one of its servers alone, to check that one."""

  def __init__(self, engine: VllmEngine, server: Server):
    self._engine, self._server = engine, server
    self.open, self.truncate = engine.open, engine.truncate
    self.close = engine.close

  async def generate(self, handle: Handle, sampling: Sampling) -> Completion:
    return await self._engine._generate(handle, sampling, self._server)

  async def score(self, ids) -> np.ndarray:
    return await self._engine._score(ids, self._server)

  def stats(self) -> dict[str, float]:
    return {'prefilled_tokens': self._server.prefilled}


def _start(config, folder: pathlib.Path) -> list[launcher.Sidecar]:
  """Starts the servers of config.engine.device, all at once.

  Raises:
    EngineError: no such device; or one does not start, the others end then.
  """
  kind, _, groups = config.device.partition(':')
  devices = [{'gpus': group.strip()} for group in groups.split(';')]
  if config.device == 'cpu':
    devices = [{'cpu': True}]
  elif kind != 'gpus' or not all(d['gpus'] for d in devices):
    raise EngineError(
      f"config.engine.device={config.device!r}: expected 'cpu', 'gpus:0' (one "
      "server), 'gpus:0,1' (one over both) or 'gpus:0;1' (one on each)"
    )
  device_flags = {'kv_cache_gib': config.kv_cache_gib}
  if kind == 'gpus':
    device_flags = {'gpu_memory_utilization': config.gpu_memory}

  def start(n: int) -> launcher.Sidecar:
    return launcher.start_sidecar(
      folder / 'serving',
      log_file=folder / f'vllm_{n}.log',
      venv=config.venv,
      dtype=config.dtype,
      max_model_len=config.max_len + 1,  # scoring samples one token
      max_num_seqs=config.slots,
      block_size=config.block_size,
      enable_sleep=config.sleep,
      start_timeout_s=config.start_seconds,
      vllm_arg=['--load-format=dummy'],
      **device_flags,
      **devices[n],
    )

  with futures.ThreadPoolExecutor(len(devices)) as pool:
    jobs = [pool.submit(start, n) for n in range(len(devices))]
  errors = [e for job in jobs if (e := job.exception()) is not None]
  if errors:
    for job in jobs:
      if job.exception() is None:
        job.result().stop()
    raise errors[0]
  return [job.result() for job in jobs]


def capacity(model_cfg, config, tokens: int) -> int:
  """As many as are sent to the servers at once. They compute again what falls
  out of their caches, whatever the sequences' number."""
  more = config.url.count(',') if config.url else config.device.count(';')
  return requests.AHEAD * config.slots * (1 + more)


make = VllmEngine  # what config.engine.module = 'vllm' builds
