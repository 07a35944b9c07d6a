"""The in-process engine: continuous batching in JAX, exact in every bit.

The result of a generate call is a function of only the history of its handle
(prompt, sampled and appended tokens, seeds, versions; with delta nets, where
its calls began, see states.py): decoding always runs all slots of a lane
(`device.lanes`), prefill at a row count and width from the row's own length,
the random stream at (seed, position), and evicted prefixes come back from host
memory bit for bit (see slots.py). Arrival order, concurrency, slots and
evictions therefore have no effect (design 5.5, 5.10).
With config.engine.exact=False a call has as few rows as hold what there is to
compute (`decode.Shape`); their number may show in the last bits of log-probs,
and by them in what is sampled.

All methods belong to one thread, that of the event loop; device work runs in
a worker thread, so that the loop stays responsive. The engine may be used from
several event loops, one after another.
"""

import asyncio
import bisect
from concurrent import futures
import dataclasses
import math
import operator
import threading
import time

import numpy as np

from searchrl_jax.engines import core
from searchrl_jax.engines.core import Completion, EngineError, Sampling
from searchrl_jax.engines.jax import decode
from searchrl_jax.engines.jax import slots as slots_lib
from searchrl_jax.engines.jax.device import Device, bytes_per_token, room
from searchrl_jax.engines.jax.slots import BEGUN, CALL, Handle, Request
from searchrl_jax.models.decoder import DecoderConfig
from searchrl_jax.types import Prompt

_COUNTERS = """
  generated_tokens discarded_tokens prefilled_tokens recomputed_tokens
  prefix_hits prefix_tokens evictions restored_tokens paused_tokens
  decode_steps syncs
"""
_rank = operator.attrgetter('rank')


class JaxEngine(core.Engine):
  """See engines/core.py. `config` is config.engine; `tokenizer` needs
  `token_bytes(id) -> bytes` and `vocab_size`. `rest` and `wake` have no effect:
  the memory belongs to the trainer's process.

  Raises:
    EngineError: sizes that cannot work; the message names the field to change.
    SyncError: `params` do not fit `model_cfg`; names the tensor.
  """

  handle_type = Handle
  min_temperature = 1e-4

  def __init__(
    self, model_cfg, params, tokenizer, config, mesh=None, folder=None
  ):
    del folder
    sizes = config.slots, config.max_len, config.chunk, config.prefill_rows
    shape = decode.Shape(*sizes, exact=config.exact)
    names = _COUNTERS, 'decode prefill sync'
    super().__init__(model_cfg.vocab_size, tokenizer, config, *names)
    self.version, self.piece = 0, config.chunk
    cfg = decode.served(model_cfg, config)
    self._cfg, self._token_bytes = cfg, bytes_per_token(cfg)
    places, width = room(cfg, config), shape.widths[-1]
    self._table = slots_lib.SlotTable(places, width, self._counters)
    self.replicas = (self,)
    self._scores: list[_Score] = []  # calls that wait
    self._held = False  # between sync and resume
    self._waiting: list[Request] = []  # by rank, then by arrival
    self._active: dict[int, Request] = {}  # slot -> request
    self._pause = math.inf  # seconds between calls of a handle, as of late
    self._driver: asyncio.Task | None = None
    self._loop: asyncio.AbstractEventLoop | None = None
    self._lock = threading.Lock()  # held while the device state changes
    self._worker = futures.ThreadPoolExecutor(1, 'jax_engine')
    self._device = Device(cfg, shape, mesh, params)
    # Checksums of the weights in use, named as the trainer's parameters.
    self.checksums = self._device.checksums

  # The contract.

  def open(self, prompt: Prompt) -> Handle:
    handle = super().open(prompt)
    self._table.add(handle)
    return handle

  def fork(self, handle: Handle) -> Handle:
    self._check_open(handle)
    return self._table.fork(handle)

  def truncate(self, handle: Handle, n: int) -> None:
    super().truncate(handle, n)
    self._table.truncated(handle)

  def _release(self, handle: Handle) -> None:
    self._table.remove(handle)
    self._wake_driver()

  def capacity(self, tokens: int) -> int:
    return self._table.room.capacity(tokens)

  async def generate(self, handle: Handle, sampling: Sampling) -> Completion:
    """Samples up to sampling.max_tokens ids and appends them to the handle.

    Log-probs are float32, of the distribution sampled from (temperature and
    truncation included; logits that tie with the last one kept by top-k or
    top-p are kept). Greedy: of the argmax, at temperature 1, untruncated.
    A cancelled call leaves the handle as it was, and what it has prefilled; how
    a prefill is divided shows in the last bits of log-probs.

    Raises:
      EngineError: invalid sampling, a handle that would exceed max_len, or a
        failure on the device (its cause is chained).
    """
    self._check_open(handle)
    self._check_sampling(handle, sampling)
    request = Request(handle, sampling, self._enter().create_future())
    handle.busy = True
    if handle.ended:
      pause = time.monotonic() - handle.ended
      last = self._pause if math.isfinite(self._pause) else pause
      self._pause = 0.9 * last + 0.1 * pause
    self._enqueue(request)
    try:
      await request.future
      done = request.completion()
      core.require(
        np.isfinite(done.logps).all(),
        'a log-prob of a sampled token is not finite: the activations '
        f'overflow in config.engine.dtype={self.dtype!r}; use float32 or '
        'bfloat16',
      )
      handle.ids += request.ids
      return done
    except BaseException:  # its ids may have been complete before it was told
      self._table.forget(handle)
      raise
    finally:
      handle.busy = False
      self._waiting = [r for r in self._waiting if r is not request]
      self._active = {s: r for s, r in self._active.items() if r is not request}
      self._table.rewind(handle)
      self._wake_driver()

  async def logps(self, ids) -> np.ndarray:
    """Log-prob of each id given those before it: float32 [n], [0] is 0.

    A full forward pass at temperature 1, without any cache. Calls that wait
    share one, which does not show in their results.
    """
    ids = self._check_ids(ids, 0, 'logps')
    if not ids:
      return np.zeros(0, np.float32)
    call = _Score(ids)
    self._scores.append(call)
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(self._worker, self._score, call)
    return call.logps

  async def routes(self, handle: Handle) -> np.ndarray | None:
    """The experts of each token, int16 [n, L, k], of the layers that have some.

    Those of its last computation: after a sync, of the new weights. -1 where
    none is kept: of the last token, and of what a sync has dropped. None
    without config.engine.record_routes.
    """
    if not self._cfg.keeps_routes:
      return None
    self._check_open(handle)
    layers = len(self._cfg.layers_with('router'))
    shape = len(handle), layers, self._cfg.moe.chosen
    out, rows = np.full(shape, -1, np.int16), handle.rows
    if rows is not None:
      place = rows.slot, rows.box, handle.cached
      epoch = self._table.epoch  # of the place
      await asyncio.get_running_loop().run_in_executor(
        self._worker, self._read_routes, out, place, epoch
      )
    return out

  async def sync(self, update: core.WeightsUpdate) -> core.SyncReport:
    """Loads new weights (copied; the trainer may donate its own afterwards).

    Waits for the chunk that is running. Drops every cached prefix. Running
    generate calls continue with the new weights after `resume`, which their
    Completion.versions shows. `SyncReport.checksums` is computed from the
    loaded weights; `weights.sync` compares it and fills in the canary.

    Raises:
      SyncError: a missing, surplus or misshapen tensor; nothing is loaded.
    """
    start = time.perf_counter()
    with self._lock:
      self._device.load(update.params, update.kind)
      self._drop_caches()
      self.version = update.version
      self._held = True
    kind, device = update.kind, self._device
    size, checksums = device.nbytes(kind), device.checksums(kind)
    return self._sync_report(update.version, start, size, checksums)

  async def resume(self) -> None:
    self._held = False
    self._wake_driver()

  async def shutdown(self) -> None:
    self._worker.shutdown()

  def stats(self) -> dict[str, float]:
    """Counters since the start, in tokens, calls or seconds.

    recomputed_tokens: prefilled again for the same handle, after a sync and,
    with delta nets, after a call that was cancelled or a cut before the last
    chunk. discarded_tokens: decoded past a stop in the same chunk.
    host_bytes: the maximum of host memory that paused sequences, and states of
      forks whose slot went on, took at once.
    """
    host = self._counters['paused_tokens'] * self._token_bytes
    return {**super().stats(), 'host_bytes': host}

  def warmup(self) -> None:
    """Compiles every program, so that none compiles later (design 5.12).

    Call it before the first generate.
    """
    # In the thread that runs them: JAX's context settings are per thread.
    self._worker.submit(self._device.warmup).result()

  def _drop_caches(self) -> None:
    """Drops every cached prefix."""
    self._device.reset()
    self._table.reset()

  # The driver: a task that runs while there is work.

  def _enter(self) -> asyncio.AbstractEventLoop:
    """Starts the driver on the running loop if it is not running."""
    loop = asyncio.get_running_loop()
    driver = self._driver
    if driver is not None and not driver.done():
      if self._loop is loop:
        return loop
      if not self._loop.is_closed():
        raise EngineError('the engine is in use by another event loop')
      self._fail(EngineError('the event loop of this call was closed'))
    self._loop = loop
    self._driver = loop.create_task(self._drive())
    return loop

  def _wake_driver(self) -> None:
    """Lets the driver look again, because a slot or room may be free."""
    if self._waiting and self._loop.is_running():
      self._enter()

  async def _drive(self) -> None:
    try:
      while self._admissible() or self._active:
        plan = self._plan()
        if not self._active:
          return  # all requests wait for a handle to be closed
        slots, begin = list(self._active.items()), time.monotonic()
        result = await self._loop.run_in_executor(
          self._worker, self._execute, plan, self._state()
        )
        if result is not None:
          self._finish(slots, *result)
        # Callers that this resumed may make the next request at once: let
        # them run before the next chunk starts.
        for _ in range(3):
          await asyncio.sleep(0)
        ended = [r.handle for _, r in slots if r.future.done()]
        await self._wait_for(ended, time.monotonic() - begin)
    except Exception as error:  # passed to every caller
      self._fail(error)
    except BaseException:
      self._fail(EngineError('the engine was stopped'))
      raise

  async def _wait_for(self, handles: list[Handle], seconds: float) -> None:
    """Waits for the next calls of handles whose calls have just ended.

    A caller that comes a moment too late (its search goes over HTTP) leaves its
    slot idle for a whole chunk of `seconds`. Waiting costs all slots, so it
    lasts as long as their share of the chunk, if callers usually are faster,
    and others do not take the slots.
    """
    slots = self._table.room.slots
    if len(self._waiting) + len(self._active) >= slots:
      return
    limit = seconds * len(handles) / slots
    until = time.monotonic() + limit * (self._pause < limit)
    away = lambda handle: not handle.busy and not handle.closed
    while time.monotonic() < until and any(map(away, handles)):
      await asyncio.sleep(1e-3)

  def _fail(self, error: Exception) -> None:
    """Ends every call with `error` and drops the caches."""
    requests = [*self._waiting, *self._active.values()]
    self._waiting, self._active, self._driver = [], {}, None
    with self._lock:
      self._drop_caches()
    for request in requests:
      request.handle.busy = False  # a closed loop never runs `finally`
      future = request.future
      if not (future.done() or future.get_loop().is_closed()):
        wrapped = EngineError(f'the engine failed: {error}')
        wrapped.__cause__ = error
        future.set_exception(wrapped)

  def _enqueue(self, request: Request) -> None:
    """Queues by rank; among equals by training step, then by arrival."""
    s = request.sampling
    rank = slots_lib.NEW if s.limit else CALL
    if self._table.started(request.handle):
      rank = BEGUN
    request.rank = (slots_lib.PROBE if s.probe else rank, s.priority)
    bisect.insort(self._waiting, request, key=_rank)

  def _start(self, r: Request) -> bool:
    """Reserves room for the request's sequence; False if there is none."""
    # A probe needs no room: calls that wait for its sync may hold all of it.
    last = not r.sampling.limit
    return r.sampling.probe or self._table.start(r.handle, r.limit, last)

  def _before(self, rank: int) -> int:
    """The number of waiting requests before a rank."""
    return bisect.bisect_left(self._waiting, (rank,), key=_rank)

  def _admissible(self) -> list[Request]:
    """The waiting requests that may run: only probes while held."""
    return self._waiting[: self._before(BEGUN)] if self._held else self._waiting

  def _plan(self) -> slots_lib.Plan:
    """Admits requests and plans the device work of one round."""
    table, plan = self._table, slots_lib.Plan(self._table.epoch)
    for slot, request in list(self._active.items()):
      if request.handle.rows is None:  # a sync dropped its cache
        del self._active[slot]
        self._enqueue(request)
    ready, probes = self._admissible(), self._before(BEGUN)
    for request in ready[self._before(CALL) :]:
      if not self._start(request):
        break
      self._waiting.remove(request)
      self._enqueue(request)
    admitted = set()

    def admit(request: Request) -> bool:
      if not self._start(request) or not table.admit(
        request.handle, request.tokens(), plan, self._active
      ):
        return False
      self._active[request.handle.rows.slot] = request
      admitted.add(request)
      return True

    for request in ready[:probes]:
      admit(request)
    # Requests that still have their slot come before those that need one, so
    # that no slot is evicted just before its use.
    begun = ready[probes : self._before(CALL)]
    for request in sorted(begun, key=lambda r: not table.settled(r.handle)):
      if not admit(request):
        break
    self._waiting = [r for r in self._waiting if r not in admitted]
    return plan

  def _state(self) -> dict:
    """Of the slots, for the call of the device that comes next."""
    state = decode.idle_state(self._table.room.slots)
    for slot, r in self._active.items():
      s = r.sampling
      state['token'][slot] = r.ids[-1] if r.ids else r.handle.ids[-1]
      state['length'][slot] = r.length
      state['left'][slot] = s.max_tokens - len(r.ids)
      state['seed'][slot] = r.seed
      state['replay'][slot] = self._table.advance(r.handle, r.length - 1)
      state['stop_ids'][slot, : len(s.stop_ids)] = s.stop_ids
      if s.temperature == 0:
        state['greedy'][slot] = True
      else:
        state['inv_temperature'][slot] = 1 / s.temperature
        state['top_p'][slot] = s.top_p
        state['top_k'][slot] = s.top_k
    return state

  def _finish(self, slots, ids, logps, counts, version: int) -> None:
    """Stores the device's results and ends the requests that are complete."""
    for slot, r in slots:
      if self._active.get(slot) is not r or r.future.done():
        continue  # cancelled
      n = int(counts[slot])
      sampled = ids[:n, slot].tolist(), logps[:n, slot].tolist()
      discarded = r.add(*sampled, version, self._tokenizer)
      self._counters['generated_tokens'] += n - discarded
      self._counters['discarded_tokens'] += discarded
      if r.stop:
        # The last token is never in the cache, wherever the chunk ended.
        if r.handle.rows is not None:
          r.handle.cached = r.length - 1
        r.handle.computed = r.length - 1
        r.future.set_result(None)
        r.handle.ended = time.monotonic()
        del self._active[slot]

  # In the worker thread.

  def _execute(self, plan: slots_lib.Plan, state: dict):
    """Runs one round; None if a sync or a failure made the plan stale."""
    with self._lock:
      if plan.epoch != self._table.epoch:
        return None
      begin = time.perf_counter()
      self._device.run(plan)
      middle = time.perf_counter()
      ids, logps, counts, steps = self._device.decode(state)
      self._counters['decode_steps'] += steps
      self._seconds['prefill'] += middle - begin
      self._seconds['decode'] += time.perf_counter() - middle
      return ids, logps, counts, self.version

  def _read_routes(self, out: np.ndarray, place, epoch: int) -> None:
    with self._lock:
      if epoch == self._table.epoch:
        out[: place[-1]] = self._device.routes(*place)

  def _score(self, call: '_Score') -> None:
    """Scores a call, and as many that wait as have a place beside it."""
    with self._lock:
      if call.logps is not None:
        return  # beside an earlier one
      shape_of = lambda c: self._device.score_shape(len(c.ids))
      shape = shape_of(call)
      others = [c for c in self._scores if c is not call]
      alike = [c for c in others if shape_of(c) == shape]
      calls = [call, *alike][: shape[0]]
      # One that the loop adds meanwhile may be lost here; it has its own turn.
      self._scores = [c for c in self._scores if c not in calls]
      found = self._device.score(*(c.ids for c in calls))
      for c, logps in zip(calls, found, strict=True):
        c.logps = logps


@dataclasses.dataclass(eq=False)
class _Score:
  """A call of `logps` that waits."""

  ids: list[int]
  logps: np.ndarray | None = None


def capacity(model_cfg: DecoderConfig, config, tokens: int) -> int:
  """The number of sequences of `tokens` that slots and host memory hold."""
  return room(decode.served(model_cfg, config), config).capacity(tokens)


make = JaxEngine  # called for config.engine.module = 'jax'
