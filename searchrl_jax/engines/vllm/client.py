"""The engine of vLLM servers: this process keeps the ids, they keep caches.

A handle is a list of ids in this process. Every request sends all of them, and
the server's prefix cache avoids recomputing them. A failed request can
therefore be sent again, to any server; only one answer is used.

Tokens of two versions are never mixed unnoticed: a server is loaded only after
each request sent to it has returned. A sync ends running requests, keeps their
tokens with the version that sampled them, and the same generate call continues
after `resume`.

Differences from the in-process engine: the draw of a token depends on the seed
and on the position at which its request began, so a completion that was split
differs from an unsplit one; and the composition of a server's batches may
affect the last bits.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent import futures
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import logging
import pathlib
import time
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from searchrl_jax.devices import cluster
from searchrl_jax.engines import core
from searchrl_jax.engines.core import (
  Completion,
  DeltaError,
  EngineError,
  Sampling,
)
from searchrl_jax.engines.handles import Request
from searchrl_jax.engines.vllm import launcher, servers
from searchrl_jax.engines.vllm.servers import Handle, Server
from searchrl_jax.engines.vllm.transport import Down, Output
from searchrl_jax.engines.weights import publication, published
from searchrl_jax.models import decoder, families, lora

_HERE = ('localhost', launcher.HOST)
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that --max-lora-rank takes
_COUNTERS = """
  requests retries aborted_requests generated_tokens discarded_tokens
  prefilled_tokens prefix_tokens scored_tokens syncs restarts refused_deltas
"""
_log = logging.getLogger(__name__)


class VllmEngine(core.Engine):
  """See engines/core.py. The weights come with the first `sync`.

  Of `stats`, prefix_tokens are prompt tokens found in a server's cache, and
  prefilled_tokens the other ones; restarts are servers that came back as other
  processes; discarded_tokens were sampled past a stop that began in an earlier
  request; refused_deltas are syncs that published everything because what
  changed could not be published or loaded.

  It is used from one event loop at a time.

  Args:
    model_cfg: a `DecoderConfig`; servers of another model are refused.
    tokenizer: a tokenizer.Tokenizer.
    config: config.engine; schema.py explains its fields.
    folder: of the run, for the publications and the servers' logs.

  Raises:
    EngineError: servers that cannot be started, or an invalid URL.
  """

  handle_type, exact = Handle, families.SERVED
  # `warmup` has no effect: a server compiles before it answers.
  min_temperature = 0.01  # vLLM raises temperatures between 0 and 0.01 to 0.01

  def __init__(
    self, model_cfg, params, tokenizer, config, mesh=None, folder=None
  ):
    del params, mesh  # `sync` publishes the parameters
    self._capacity = capacity(model_cfg, config, config.max_len)
    super().__init__(model_cfg.vocab_size, tokenizer, config, _COUNTERS, 'sync')
    core.require(
      not (model_cfg.lora and config.sleep),
      'config.engine.sleep with config.model.lora: the adapters of a server '
      'do not sleep with its weights; use False',
    )
    self._cfg = model_cfg
    self._base: published.Published | None = None  # below the adapters
    folder = pathlib.Path(folder).absolute()
    urls, self._sidecars = config.url.split(','), []
    near = all(urlsplit(url).hostname in _HERE for url in urls if url)
    core.require(
      near or config.sync == 'full',
      f'config.engine.sync={config.sync!r} with config.engine.url='
      f"{config.url!r}: a server changes the trainer's own files, which must "
      "lie on its machine; use 'full'",
    )
    memory = config.memory if near and cluster.size() == 1 else ''
    self._publisher = publication.Publisher(
      folder / 'published', model_cfg, config.dtype, memory
    )
    self.version = None  # nothing is loaded yet
    model = {**families.fields(model_cfg), 'dtype': config.dtype}
    model = json.loads(json.dumps(model))  # as servers say it
    if not config.url:
      published.write_serving_folder(
        folder / 'serving', model, tokenizer.path, config.dtype, config.max_len
      )
      self._sidecars = _start(config, folder, model_cfg)
      urls = [sidecar.url for sidecar in self._sidecars]
    del model['tied']  # a server may hold a tied model untied
    self._servers = [
      Server(url.strip(), model, config, self._counters, sidecar)
      for url, sidecar in itertools.zip_longest(urls, self._sidecars)
    ]
    self.replicas = tuple(_Replica(self, s) for s in self._servers)
    self._loop: asyncio.AbstractEventLoop | None = None
    self._open: asyncio.Event  # not set: calls wait, except probes

  def _enter(self) -> None:
    """Creates the objects that belong to the running event loop."""
    loop = asyncio.get_running_loop()
    if self._loop is not loop:
      self._loop, self._open = loop, asyncio.Event()
      self._open.set()
      for server in self._servers:
        server.enter()

  def fork(self, handle: Handle) -> Handle:
    self._check_open(handle)
    child = Handle(list(handle.ids))
    child.move(handle.home)
    return child

  def _release(self, handle: Handle) -> None:
    handle.move(None)

  async def generate(
    self, handle: Handle, sampling: Sampling, server: Server | None = None
  ) -> Completion:
    """Samples up to sampling.max_tokens ids and appends them to the handle.

    Log-probs are those of the distribution sampled from; greedy: of the
    argmax at temperature 1. A cancelled call leaves the handle as it was and
    ends its request.

    server: the only one to use; None: any.

    Raises:
      EngineError: invalid sampling; config.engine.attempts of a request failed,
        or config.engine.deadline is over; no server comes back; a server
        refuses the request.
      SyncError: a server came back and cannot be loaded with the weights.
    """
    self._check_open(handle)
    self._check_sampling(handle, sampling)
    self._enter()
    loaded = self.version is not None or sampling.probe
    core.require(loaded, 'the servers hold no weights yet; call sync first')
    request = Request(handle, sampling)
    handle.busy = True
    try:
      while not request.stop:  # a sync may end a server's request
        await self._continue(request, server)
      handle.ids += request.ids
    finally:
      handle.busy = False
    return request.completion()

  async def logps(self, ids, server: Server | None = None) -> np.ndarray:
    """Log-prob of each id given those before it: float32 [n], [0] is 0.

    A full forward pass at temperature 1, without the prefix cache.

    Raises:
      EngineError, SyncError: as `generate`.
    """
    ids = self._check_ids(ids, 0, 'logps')
    if len(ids) < 2:
      return np.zeros(len(ids), np.float32)
    self._enter()
    handle, logps = Handle(ids), None
    send = lambda server: server.http.score(server.model, ids)
    try:
      while logps is None:  # a sync ended the request
        logps = await self._ask(send, handle, server, True)
    finally:
      handle.move(None)
    self._counters['scored_tokens'] += len(ids)
    return logps

  async def sync(self, update: core.WeightsUpdate) -> core.SyncReport:
    """Publishes weights and loads them into every server, which stay held.

    `update.params` may be the folder of a publication. The checksums of each
    server are compared with those of the publication; older publications are
    deleted once all servers have loaded it. If what changed cannot be published
    or loaded (config.engine.sync='delta'), everything is.

    Raises:
      SyncError: names the server, and the tensors that differ; or another
        client has loaded weights into one since the last sync.
      EngineError: a server that is absent, or of another model.
      CheckpointError, PublishedError: the publication.
    """
    adapter = update.kind == 'adapter'
    what = 'an adapter, which needs config.model.lora and a full sync before'
    core.require(self._base or not adapter, f'got {what}')
    self._enter()
    await self._all(Server.check_claim)
    start, size = time.perf_counter(), 0

    async def send(whole: bool):
      nonlocal size
      target = await asyncio.to_thread(self._publish, update, whole)
      size += 0 if adapter else target.sent
      size += target.adapter.bytes if target.adapter else 0
      self._open.clear()
      return target, await self._all(lambda server: server.prepare(target))

    try:
      target, (checksums, *_) = await send(False)
    except DeltaError as e:
      self._counters['refused_deltas'] += 1
      _log.warning('version %d is published as a whole: %s', update.version, e)
      target, (checksums, *_) = await send(True)
    if adapter:  # a server that came back loaded all
      checksums = {
        k: v for k, v in checksums.items() if k in target.adapter.shapes
      }
    self.version = target.version
    if isinstance(update.params, Mapping):
      await asyncio.to_thread(self._publisher.prune, target.version)
    return self._sync_report(target.version, start, size, checksums)

  async def resume(self) -> None:
    self._open.set()

  async def rest(self) -> None:
    """With config.engine.sleep: the weights leave the GPU until `wake`.

    Running requests are ended; their calls continue after `wake`.

    Raises:
      SyncError: another client has loaded weights into a server, which may
        have sampled since the sync with those.
    """
    self._enter()
    await self._all(Server.check_claim)
    if self._config.sleep:
      self._open.clear()
      await self._all(Server.sleep)

  async def wake(self) -> None:
    if self._config.sleep:
      await self._all(Server.prepare)
      self._open.set()

  async def shutdown(self) -> None:
    """Closes the connections, stops the servers that it started, and deletes
    the publications, because the run's checkpoints contain the weights.
    """
    async with contextlib.AsyncExitStack() as stack:  # all, despite errors
      for last in (self._publisher.clear, *(s.stop for s in self._sidecars)):
        stack.push_async_callback(asyncio.to_thread, last)
      if self._loop is asyncio.get_running_loop():
        await self._all(lambda server: server.http.close())

  def capacity(self, tokens: int) -> int:
    return self._capacity

  # Requests.

  async def _continue(self, request: Request, only: Server | None) -> None:
    """Samples one request's part of a completion."""
    ids, sampling = request.tokens(), request.sampling
    # The stream of the request that begins here: a seed in [0, 2**63).
    name = repr((sampling.seed, len(ids))).encode()
    seed = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest()) >> 1
    left = sampling.max_tokens - len(request.ids)

    async def send(server: Server) -> tuple[int, Output]:
      version = server.version
      return version, await server.http.complete(
        server.model, ids, sampling, left, seed, f'v{version}'
      )

    version, out = await self._ask(send, request.handle, only, sampling.probe)
    # The client detects the end, because a stop string may begin in one request
    # and end in the next.
    discarded = request.add(out.ids, out.logps, version, self._tokenizer)
    counters = self._counters
    counters['aborted_requests'] += out.end == 'abort'
    counters['generated_tokens'] += len(out.ids) - discarded
    counters['discarded_tokens'] += discarded
    if out.ids:  # without any, it may have ended before its prefill
      counters['prefix_tokens'] += out.cached
      counters['prefilled_tokens'] += len(ids) - out.cached
      request.handle.home.prefilled += len(ids) - out.cached

  async def _ask(
    self,
    send: Callable[[Server], Awaitable[Any]],
    handle: Handle,
    only: Server | None,
    probe: bool,
  ) -> Any:
    """The result of `await send(server)`, tried again if a server fails.

    Calls wait for a place at their server, except probes.
    """
    failures, begin = 0, 0.0
    while True:
      server = await self._choose(handle, only, probe)
      server.calls += 1
      try:
        async with contextlib.nullcontext() if probe else server.places:
          if not server.ready or not (probe or self._open.is_set()):
            continue
          self._counters['requests'] += 1
          begin = begin or time.monotonic()
          return await send(server)
      except Down as e:
        if server.ready:
          _log.warning('%s is not used until it recovers: %s', server.url, e)
        server.ready = False
        failures, config = failures + 1, self._config
        late = time.monotonic() - begin > config.deadline
        if late or failures >= config.attempts:
          raise EngineError(
            f'{e}; {failures} attempts failed (config.engine.attempts='
            f'{config.attempts}, config.engine.deadline={config.deadline} s)'
          ) from e
      finally:
        server.calls -= 1
      self._counters['retries'] += 1
      await asyncio.sleep(servers.POLL * 2**failures)

  async def _choose(
    self, handle: Handle, only: Server | None, probe: bool
  ) -> Server:
    """The server of the handle's prefix, else the least loaded.

    Calls wait while all are held, except probes, and for a server to recover.
    """
    while True:
      if not probe:
        await self._open.wait()
      allowed = [only] if only else self._servers
      lost = [s.recovery() for s in allowed if not s.ready]
      ready = [s for s in allowed if s.ready]
      if ready:
        if handle.home not in ready:
          handle.move(min(ready, key=lambda s: (s.calls, s.handles)))
        return handle.home
      # One whose recovery failed ends no call while another serves or recovers;
      # the next sync raises its error.
      waiting = [task for task in lost if not task.done()]
      if waiting:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
      else:
        for task in lost:
          task.result()

  async def _all(self, work: Callable[[Server], Awaitable]) -> list:
    """All results; the first error, once the others have ended.

    A DeltaError comes last: a server with another one may not be waited for
    again.
    """
    found = await asyncio.gather(
      *map(work, self._servers), return_exceptions=True
    )
    errors = [one for one in found if isinstance(one, BaseException)]
    for error in sorted(errors, key=lambda e: isinstance(e, DeltaError)):
      raise error
    return found

  def _publish(
    self, update: core.WeightsUpdate, whole: bool = False
  ) -> published.Published:
    params, version, known = update.params, update.version, update.checksums
    if not isinstance(params, Mapping):
      return published.open_published(params)
    if self._config.sync == 'delta' and not whole:
      return self._publisher.publish_delta(params, version, known)
    adapters, base = lora.split(self._cfg, params)
    if not self._cfg.lora:
      return self._publisher.publish(params, version, known)
    if update.kind == 'full':
      self._base = self._publisher.publish(base, version, known)
    adapter = self._publisher.publish_adapter(adapters, version, known)
    return dataclasses.replace(self._base, version=version, adapter=adapter)


class _Replica:
  """The engine with only one of its servers, to verify that server."""

  def __init__(self, engine: VllmEngine, server: Server):
    self.open, self.close = engine.open, engine.close
    self.truncate = engine.truncate
    self.generate = functools.partial(engine.generate, server=server)
    self.logps = functools.partial(engine.logps, server=server)
    self.stats = lambda: {'prefilled_tokens': server.prefilled}


def lora_flags(adapters: decoder.Lora | None) -> dict[str, Any]:
  """vLLM's flags for servers with one adapter at a time.

  Raises:
    EngineError: a rank that vLLM cannot serve.
  """
  if adapters is None:
    return {}
  ranks = [r for r in _RANKS if r >= adapters.rank]
  limit = f'vLLM serves ranks up to {_RANKS[-1]}'
  core.require(ranks, f'config.model.lora.rank={adapters.rank}: {limit}')
  most = {'max_lora_rank': ranks[0], 'max_loras': 1, 'max_cpu_loras': 1}
  return {'enable_lora': True, **most}


def _start(config, folder: pathlib.Path, cfg) -> list[launcher.Sidecar]:
  """Starts the servers of config.engine.device in parallel.

  Raises:
    EngineError: an unknown device; or a server does not start. The others end
      with this process.
  """
  devices: list[dict] = [{'cpu': True, 'kv_cache_gib': config.kv_cache_gib}]
  if cfg.delta:  # vLLM caches their states with prompts in parts (`host`)
    devices[0]['no_enable_prefix_caching'] = True
  if config.device != 'cpu':
    share = {'gpu_memory_utilization': config.gpu_memory}
    groups = config.device.removeprefix('gpus:').split(';')
    devices = [{'gpus': group.strip(), **share} for group in groups]

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
      load_format='dummy',
      **lora_flags(cfg.lora),
      **devices[n],
    )

  with futures.ThreadPoolExecutor(len(devices)) as pool:
    return list(pool.map(start, range(len(devices))))


def capacity(model_cfg, config, tokens: int) -> int:
  """The number of requests that are sent to the servers at once.

  It does not depend on the tokens: servers recompute evicted prefixes.

  Raises:
    EngineError: a model that no server may hold.
  """
  core.require(
    not (model_cfg.delta or model_cfg.moe)
    or config.sync == 'full'
    and not model_cfg.lora,
    f"config.engine.module='vllm': family {model_cfg.family} has "
    f'{"delta nets" if model_cfg.delta else "experts"}, which need '
    "config.engine.sync='full' and model.lora.rank=0; or use "
    "config.engine.module='jax'",
  )
  core.require(
    not config.record_routes,
    "config.engine.module='vllm': record_routes is of the engine in process; "
    "use config.engine.record_routes=False, or module='jax'",
  )
  more = config.url.count(',') if config.url else config.device.count(';')
  return servers.REQUESTS_PER_SLOT * config.slots * (1 + more)


make = VllmEngine  # called for config.engine.module = 'vllm'
