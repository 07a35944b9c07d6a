"""The engine of vLLM servers: this process keeps the ids, they keep caches.

A handle is a list of ids in this process. Every request sends all of them, and
the server's prefix cache avoids recomputing them. A failed request can
therefore be sent again, to any server; only one answer is used.

Tokens of two versions are never mixed unnoticed: a server is loaded only after
each request sent to it has returned. A sync ends running requests, keeps their
tokens with the version that sampled them, and the same generate call continues
after `resume`.

Differences from the in-process sampler: the draw of a token depends on the seed
and on the position at which its request began, so a completion that was split
differs from an unsplit one; and the composition of a server's batches may
affect the last bits.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent import futures
import contextlib
import functools
import hashlib
import pathlib
import time
from typing import Any

import numpy as np

from searchrl_jax.engines.core import (
  Completion,
  EngineError,
  Sampling,
  SyncReport,
  WeightsUpdate,
)
from searchrl_jax.engines.handles import HandleEngine, Request
from searchrl_jax.engines.vllm import launcher
from searchrl_jax.engines.vllm.servers import (
  POLL,
  REQUESTS_PER_SLOT,
  Fleet,
  Handle,
  Server,
)
from searchrl_jax.engines.vllm.transport import (
  Deadline,
  Down,
  Output,
  Refused,
  Restarted,
)
from searchrl_jax.engines.weights import publication, published
from searchrl_jax.models import families
from searchrl_jax.models.decoder import DecoderConfig

_COUNTERS = """
  requests retries aborted_requests generated_tokens discarded_tokens
  prefilled_tokens prefix_tokens scored_tokens syncs
"""
_BACKOFF = 5.0  # seconds between two attempts, at most


class VllmEngine(HandleEngine):
  """See engines/core.py. The weights come with the first `sync`.

  Args:
    model_cfg: of the model; servers of another model are refused.
    tokenizer: a tokenizer.Tokenizer; servers with another one are refused.
    config: config.engine; run/schema.py explains its fields.
    folder: of the run, for the publications and the servers' logs.

  Raises:
    EngineError: servers that cannot be started, or an invalid URL.
  """

  handle_type = Handle
  min_temperature = 0.01  # vLLM raises temperatures between 0 and 0.01 to 0.01

  def __init__(
    self,
    model_cfg: DecoderConfig,
    params,
    tokenizer,
    config,
    mesh=None,
    folder=None,
  ):
    del params, mesh  # `sync` publishes the parameters
    if config.attempts < 1:
      raise EngineError(f'config.engine.attempts={config.attempts}: at least 1')
    seconds = 'request publish sync'
    super().__init__(
      model_cfg.vocab_size, tokenizer, config, _COUNTERS, seconds
    )
    folder = pathlib.Path(folder).absolute()
    self._publisher = publication.Publisher(
      folder / 'published', model_cfg, config.dtype
    )
    self.version = None  # nothing is loaded yet
    model = families.fields(model_cfg)
    urls = [u.strip() for u in config.url.split(',') if u.strip()]
    for url in urls:
      if not url.startswith(('http://', 'https://')):
        raise EngineError(
          f'config.engine.url: {url!r} is not a URL; expected http://host:port'
        )
    self._sidecars = []
    if not urls:
      published.write_serving_folder(
        folder / 'serving', model, tokenizer.path, config.dtype
      )
      self._sidecars = _start(config, folder)
    servers = [Server(url) for url in urls]
    servers += [Server(s.url, s) for s in self._sidecars]
    del model['tied']  # a server may hold a tied model untied
    self._fleet = Fleet(
      servers, {**model, 'dtype': config.dtype}, tokenizer, config
    )
    self.replicas = tuple(_Replica(self, s) for s in servers)

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
      EngineError: invalid sampling; no server answers within config.engine.
        deadline seconds (waiting for `resume`, or for a place among the
        requests of a server, does not count) and config.engine.attempts
        attempts of a request; a server refuses the request.
      SyncError: a server came back and cannot be loaded with the weights.
    """
    self._check_open(handle)
    self._check_sampling(handle, sampling)
    self._fleet.enter()
    if self._fleet.weights is None and not sampling.probe:
      raise EngineError('the servers hold no weights yet; call sync first')
    request = Request(handle, sampling)
    deadline = Deadline(self._config.deadline)
    handle.busy = True
    try:
      while not request.stop:  # a sync may end a server's request
        await self._continue(request, server, deadline)
      handle.ids += request.ids
    finally:
      handle.busy = False
    return request.completion()

  async def score(self, ids, server: Server | None = None) -> np.ndarray:
    """Log-prob of each id given those before it: float32 [n], [0] is 0.

    A full forward pass at temperature 1, without the prefix cache.

    Raises:
      EngineError, SyncError: as `generate`.
    """
    ids = self._check_ids(ids, 0, 'score')
    if len(ids) < 2:
      return np.zeros(len(ids), np.float32)
    self._fleet.enter()
    handle, deadline = Handle(ids), Deadline(self._config.deadline)
    send = lambda server: server.http.score(server.name, ids)
    try:
      logps = None
      while logps is None:  # a sync ended the request
        logps = await self._ask(send, handle, server, True, deadline)
    finally:
      handle.move(None)
    self._counters['scored_tokens'] += len(ids)
    return logps

  async def sync(self, update: WeightsUpdate) -> SyncReport:
    """Publishes weights and loads them into every server, which stay held.

    `update.params` may be the folder of a publication. The checksums of each
    server are compared with those of the publication; older publications are
    deleted once all servers have loaded it.

    Raises:
      SyncError: names the server, and the tensors that differ; or another
        client has loaded weights into one since the last sync.
      EngineError: a server that is absent, or of another model.
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
    return self._sync_report(update.version, start, target.bytes, manifest)

  async def resume(self) -> None:
    self._fleet.release('sync')

  async def rest(self) -> None:
    """With config.engine.sleep: the weights leave the GPU until `wake`.

    Running requests are ended; their calls continue after `wake`.

    Raises:
      SyncError: another client has loaded weights into a server, which may
        have sampled since the sync with those.
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
    """Closes the connections, stops the servers that it started, and deletes
    the publications, because the run's checkpoints contain the weights.
    """
    async with contextlib.AsyncExitStack() as stack:  # all, despite errors
      for last in (self._publisher.clear, *(s.stop for s in self._sidecars)):
        stack.push_async_callback(asyncio.to_thread, last)
      await self._fleet.close()

  def stats(self) -> dict[str, float]:
    """Counters since the start, in tokens, requests or seconds.

    prefix_tokens: prompt tokens found in a server's cache; prefilled_tokens:
    the other ones. restarts: servers that came back as other processes.
    discarded_tokens: sampled past a stop that began in an earlier request.
    seconds_request and seconds_held are summed over calls.
    """
    return {
      **super().stats(),
      'seconds_held': self._fleet.seconds_held,
      'restarts': self._fleet.restarts,
    }

  def warmup(self) -> None:
    """No effect: a server compiles its programs before it answers."""

  def capacity(self, tokens: int) -> int:
    return capacity(None, self._config, tokens)

  # Requests.

  async def _continue(
    self, request: Request, only: Server | None, deadline: Deadline
  ) -> None:
    """Samples one request's part of a completion."""
    ids, sampling = request.tokens(), request.sampling
    # The stream of the request that begins here: a seed in [0, 2**63).
    name = repr((sampling.seed, len(ids))).encode()
    digest = hashlib.blake2b(name, digest_size=8).digest()
    seed = int.from_bytes(digest) >> 1
    left = sampling.max_tokens - len(request.ids)

    async def send(server: Server) -> tuple[Server, int, Output]:
      version = server.version
      if version is None:
        if self._fleet.weights is not None:
          raise Restarted(f'{server.url}: does not hold our weights')
        version = -1  # a probe of the initial weights, before the first sync
      out = await server.http.complete(
        server.name, ids, sampling, left, seed, f'v{version}'
      )
      if out.end == 'abort' and not (out.ids or self._fleet.holds):
        raise Down(f'{server.url}: ended a request before its first token')
      return server, version, out

    server, version, out = await self._ask(
      send, request.handle, only, sampling.probe, deadline
    )
    if any(not 0 <= i < self.vocab_size for i in out.ids):
      raise Refused(
        f'{server.url}: sampled ids outside of 0..{self.vocab_size - 1}'
      )
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
      server.prefilled += len(ids) - out.cached

  async def _ask(
    self,
    send: Callable[[Server], Awaitable[Any]],
    handle: Handle,
    only: Server | None,
    probe: bool,
    deadline: Deadline,
  ) -> Any:
    """The result of `send(server)`, retried on failure."""
    failures, last = 0, None
    while True:
      async with self._fleet.lease(handle, only, probe, deadline) as server:
        self._counters['requests'] += 1
        begin = time.perf_counter()
        try:
          async with asyncio.timeout(deadline.left()):
            return await send(server)
        except TimeoutError as e:
          raise self._fleet.late('a request is not finished', last) from e
        except (Down, Restarted) as e:
          self._fleet.report_failure(server, e)
          failures, last = failures + 1, e
          if failures >= self._config.attempts:
            raise EngineError(
              f'{e}; {failures} attempts failed (config.engine.attempts)'
            ) from e
        finally:
          self._seconds['request'] += time.perf_counter() - begin
      self._counters['retries'] += 1
      await asyncio.sleep(min(POLL * 2 ** (failures - 1), _BACKOFF))

  def _publish(self, update: WeightsUpdate) -> published.Published:
    if isinstance(update.params, Mapping):
      return self._publisher.publish(update.params, update.version)
    out = published.open_published(update.params)
    if (out.version, out.dtype) != (update.version, self.dtype):
      raise EngineError(
        f'{out.path}: holds version {out.version} in {out.dtype}; '
        f'expected version {update.version} in {self.dtype}'
      )
    return out


class _Replica:
  """The engine with only one of its servers, to verify that server."""

  def __init__(self, engine: VllmEngine, server: Server):
    self.open, self.truncate = engine.open, engine.truncate
    self.close = engine.close
    self.generate = functools.partial(engine.generate, server=server)
    self.score = functools.partial(engine.score, server=server)
    self.stats = lambda: {'prefilled_tokens': server.prefilled}


def _start(config, folder: pathlib.Path) -> list[launcher.Sidecar]:
  """Starts the servers of config.engine.device in parallel.

  Raises:
    EngineError: an unknown device; or a server does not start, which ends the
      others.
  """
  kind, _, groups = config.device.partition(':')
  flags = {'kv_cache_gib': config.kv_cache_gib}
  devices = [{'cpu': True}]
  if config.device != 'cpu':
    flags = {'gpu_memory_utilization': config.gpu_memory}
    devices = [{'gpus': group.strip()} for group in groups.split(';')]
    if kind != 'gpus' or not all(d['gpus'] for d in devices):
      raise EngineError(
        f"config.engine.device={config.device!r}: expected 'cpu', 'gpus:0' "
        "(one server), 'gpus:0,1' (one over both) or 'gpus:0;1' (one on each)"
      )

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
      **flags,
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
  """The number of requests that are sent to the servers at once.

  It does not depend on the tokens: servers recompute evicted prefixes.
  """
  more = config.url.count(',') if config.url else config.device.count(';')
  return REQUESTS_PER_SLOT * config.slots * (1 + more)


make = VllmEngine  # called for config.engine.module = 'vllm'
