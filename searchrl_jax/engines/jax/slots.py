"""Which sequence holds which cache rows: plain bookkeeping, no device work.

A `Rows` is the K/V of one prefix, in a slot or in host memory. Handles share
one as long as nobody writes below what another still reads (copy on write),
so a fork, or a second `open` of the same prompt, copies instead of computing.

What is in a cache must not depend on the order of arrival (design 5.10):

* the prompt, without its last token, is prefilled alone, in pieces of fixed
  width; what is appended later is prefilled from the last token before it;
* the last token of a sequence is never in the cache between calls, wherever
  the chunk that sampled it ended, and `decode` always computes it;
* an evicted prefix goes to host memory and comes back bit for bit. It is
  never computed again, because prefill and decode may differ in last bits.

So host memory has to suffice, and admission sees to it: a sequence begins only
if slots and host memory can then hold all that have begun, each at its limit.
"""

from collections.abc import Iterable
import dataclasses
import heapq
import itertools
from typing import Any

from searchrl_jax.engines.core import EngineError, Sampling
from searchrl_jax.engines.jax.stops import StopFinder

# Who gets a slot first: a check of the engine, what has begun; and who begins
# first: a call that a trajectory waits for, a trajectory.
PROBE, BEGUN, CALL, NEW = range(4)


@dataclasses.dataclass(frozen=True)
class Room:
  """What slots and host memory hold; host memory is counted in tokens."""

  slots: int
  tokens: int  # of host memory
  piece: int  # tokens of a sequence that are copied, and counted, together
  max_len: int

  def size(self, tokens: int) -> int:
    """Tokens of host memory that a sequence of `tokens` takes."""
    return -(-tokens // self.piece) * self.piece

  def holds(self, sizes: Iterable[int]) -> bool:
    """Whether sequences of these sizes fit, whichever of them are in slots."""
    return sum(sorted(sizes)[self.slots :]) <= self.tokens

  def capacity(self, tokens: int) -> int:
    """Sequences of `tokens` that may have begun at the same time.

    Beside them there is room for one more of max_len: a call that one of them
    waits for (a simulator's reply) can always be served, so nobody waits for
    ever.
    """
    free = self.tokens - self.size(self.max_len)
    return self.slots + free // self.size(tokens)


class Handle:
  """A growing sequence; len(handle) is its number of tokens."""

  def __init__(self, ids: list[int], prompt: tuple[int, ...]):
    self.ids = ids
    self.prompt = prompt  # prefilled as one unit, shared by equal prompts
    self.rows: Rows | None = None
    self.cached = 0  # leading tokens whose K/V `rows` holds for this handle
    self.computed = 0  # the most that `cached` has been, over all versions
    self.request: Any = None  # the generate call that is running
    self.closed = False

  def __len__(self) -> int:
    return len(self.ids)


class Request:
  """One generate call."""

  def __init__(self, handle: Handle, sampling: Sampling, future):
    self.handle = handle
    self.sampling = sampling
    self.future = future
    self.rank = (NEW, 0)  # with its step, see JaxSampler._enqueue
    self.limit = sampling.limit or len(handle) + sampling.max_tokens
    self.ids: list[int] = []
    self.logps: list[float] = []
    self.versions: list[int] = []
    self.find = StopFinder(sampling.stops) if sampling.stops else None
    seed = sampling.seed & (2**64 - 1)
    self.seed = (seed >> 32, seed & (2**32 - 1))

  @property
  def length(self) -> int:
    return len(self.handle.ids) + len(self.ids)

  def tokens(self) -> list[int]:
    return self.handle.ids + self.ids


class Rows:
  """The K/V of one prefix, in `slot`, or in host memory (`box`)."""

  def __init__(self, slot: int, owner: Handle):
    self.slot: int | None = slot
    self.box: Box | None = None
    self.owner: Handle | None = owner  # the one that may write
    self.users = {owner}
    self.used = 0  # when it last decoded, for LRU


class Box:
  """Host memory for one evicted prefix; filled when the plan runs."""

  def __init__(self, length: int):
    self.length = length  # positions worth keeping
    self.data: list = []  # the (k, v) of each piece, see engines/jax/device.py


@dataclasses.dataclass
class Copy:
  """Fills `target` from a slot, or from host memory if that was evicted."""

  source: int | None
  box: Box | None
  target: int
  length: int  # positions


@dataclasses.dataclass(frozen=True)
class Piece:
  """Tokens to prefill: ids at positions start, start + 1, ... of a slot."""

  slot: int
  start: int
  ids: tuple[int, ...]


class Plan:
  """Device work, by levels: each may read what the levels before it wrote."""

  def __init__(self, epoch: int):
    self.epoch = epoch
    self.evictions: list[tuple[int, Box]] = []  # before every level
    self.copies: dict[int, list[Copy]] = {}
    self.pieces: dict[int, list[Piece]] = {}
    self.ready: dict[Rows, int] = {}  # level at which a prompt is complete

  @property
  def levels(self) -> list[int]:
    return sorted({*self.copies, *self.pieces})


class SlotTable:
  """Assigns slots; every method runs between device calls."""

  def __init__(self, room: Room, max_width: int, counters: dict):
    self.room = room
    self._max_width = max_width
    self._counters = counters
    self._clock = 0
    self._prompts: dict[tuple[int, ...], set[Handle]] = {}
    self._sizes: dict[Handle, int] = {}  # of those that have begun
    self.epoch = 0
    self.reset()

  def reset(self) -> None:
    """Forgets every cached prefix (the weights or the caches are new)."""
    self.epoch += 1
    for handle in itertools.chain.from_iterable(self._prompts.values()):
      handle.rows, handle.cached = None, 0
    self._free = list(range(self.room.slots))
    self._held: dict[int, Rows] = {}  # slot -> rows
    self._paused = 0  # tokens in host memory

  # Handles.

  def add(self, handle: Handle) -> None:
    self._prompts.setdefault(handle.prompt, set()).add(handle)

  def remove(self, handle: Handle) -> None:
    self.drop(handle)
    self._sizes.pop(handle, None)
    group = self._prompts[handle.prompt]
    group.discard(handle)
    if not group:
      del self._prompts[handle.prompt]

  def fork(self, handle: Handle) -> Handle:
    child = Handle(list(handle.ids), handle.prompt)
    if handle.rows is not None:
      self._share(child, handle.rows, handle.cached)
      self._sizes[child] = self._sizes.get(handle, 0)  # what they share
    self.add(child)
    return child

  def truncate(self, handle: Handle, n: int) -> None:
    del handle.ids[n:]
    if n < len(handle.prompt):
      # A shorter prompt is another prompt, prefilled as its own unit.
      self.remove(handle)
      handle.prompt = tuple(handle.ids)
      self.add(handle)
    self.rewind(handle)

  def rewind(self, handle: Handle) -> None:
    """Nothing from the last token on counts as cached."""
    handle.cached = min(handle.cached, len(handle) - 1)
    handle.computed = min(handle.computed, len(handle) - 1)

  def drop(self, handle: Handle) -> None:
    """The handle lets go of its rows; the last user frees the slot."""
    rows = handle.rows
    handle.rows, handle.cached = None, 0
    if rows is None:
      return
    rows.users.discard(handle)
    if rows.owner is handle:
      rows.owner = None
    if rows.users:
      return
    if rows.slot is None:
      self._paused -= self.room.size(rows.box.length)
    else:
      del self._held[rows.slot]
      heapq.heappush(self._free, rows.slot)

  def _share(self, handle: Handle, rows: Rows, cached: int) -> None:
    rows.users.add(handle)
    handle.rows, handle.cached = rows, cached
    handle.computed = max(handle.computed, cached)
    self._counters['prefix_hits'] += 1
    self._counters['prefix_tokens'] += cached

  # Planning.

  def settled(self, handle: Handle) -> bool:
    """Whether the handle can go on in the slot that it has."""
    rows = handle.rows
    return rows is not None and rows.slot is not None and self._own(handle)

  def begun(self, handle: Handle) -> bool:
    """Whether there is room for the handle, in a slot or host memory."""
    return handle in self._sizes

  def begin(self, handle: Handle, limit: int, last: bool) -> bool:
    """Keeps room for a handle of at most `limit` tokens, if there is room.

    last: it ends with this call; then it may take what is kept for the calls
    that others wait for.
    """
    size, spare = self.room.size(limit), self.room.size(self.room.max_len)
    more = [size] if last else [size, spare]
    if not self.begun(handle) and not self.room.holds(
      [*self._sizes.values(), *more]
    ):
      return False
    self._sizes[handle] = max(self._sizes.get(handle, 0), size)
    return True

  def _own(self, handle: Handle) -> bool:
    """Whether the handle may write to its rows; takes them if nobody does."""
    rows = handle.rows
    if any(u.cached > handle.cached for u in rows.users):
      return False
    if rows.owner is None:
      rows.owner = handle
    return rows.owner is handle

  def admit(self, handle: Handle, tokens, plan: Plan, busy) -> bool:
    """Plans what `handle`, which has begun, needs to decode; False if no slot
    can be had.

    tokens: the whole sequence. busy: the slots that are decoding.
    """
    if not self.settled(handle) and not self._place(handle, plan, busy):
      return False
    self._clock += 1
    rows = handle.rows
    rows.used = self._clock
    level = plan.ready.get(rows, 0)
    prompt = len(handle.prompt) - 1
    if handle.cached < prompt:
      level = self._prefill(handle, tokens, prompt, level, plan)
      plan.ready[rows] = level
    self._prefill(handle, tokens, len(tokens) - 1, level, plan)
    return True

  def _place(self, handle: Handle, plan: Plan, busy) -> bool:
    """Gives the handle a slot, with whatever prefix exists."""
    slot = self._take(plan, busy)
    if slot is None:
      return False
    rows = handle.rows
    if rows is None:
      rows = self._sibling(handle)
      if rows is not None:
        self._share(handle, rows, len(handle.prompt) - 1)
    cached = handle.cached
    if rows is not None:
      copy = Copy(rows.slot, rows.box, slot, cached)
      if rows.slot is None:
        self._counters['restored_tokens'] += cached
      level = plan.ready.get(rows, 0) + 1
      plan.copies.setdefault(level, []).append(copy)
      if len(rows.users) > 1:
        self.drop(handle)  # the others keep it
      else:
        self._paused -= self.room.size(rows.box.length)
        rows.slot, rows.box, rows.owner = slot, None, handle
        self._held[slot] = rows
        plan.ready[rows] = level
        return True
    handle.rows, handle.cached = Rows(slot, handle), cached
    self._held[slot] = handle.rows
    if rows is not None:
      plan.ready[handle.rows] = level
    return True

  def _sibling(self, handle: Handle) -> Rows | None:
    """Rows of a live handle that hold the whole of the same prompt."""
    need = len(handle.prompt) - 1
    for other in self._prompts[handle.prompt] if need else ():
      if other.rows is not None and other.cached >= need:
        return other.rows
    return None

  def _take(self, plan: Plan, busy) -> int | None:
    if self._free:
      return heapq.heappop(self._free)
    idle = [s for s in self._held if s not in busy]
    # A slot that this plan fills must first be decoded from.
    idle = [s for s in idle if self._held[s] not in plan.ready]
    if not idle:
      return None
    slot = min(idle, key=lambda s: self._held[s].used)
    rows = self._held.pop(slot)
    rows.slot = None
    rows.box = Box(max(u.cached for u in rows.users))
    plan.evictions.append((slot, rows.box))
    for copies in plan.copies.values():
      for copy in copies:
        if copy.source == slot:
          copy.source, copy.box = None, rows.box
    self._counters['evictions'] += 1
    self._counters['evicted_tokens'] += rows.box.length
    self._paused += self.room.size(rows.box.length)
    most = max(self._counters['paused_tokens'], self._paused)
    self._counters['paused_tokens'] = most
    return slot

  def _prefill(self, handle, tokens, end: int, level: int, plan: Plan) -> int:
    """Plans pieces up to `end`; returns the level of the last one."""
    while handle.cached < end:
      start, stop = handle.cached, min(end, handle.cached + self._max_width)
      level += 1
      plan.pieces.setdefault(level, []).append(
        Piece(handle.rows.slot, start, tuple(tokens[start:stop]))
      )
      self._counters['prefilled_tokens'] += stop - start
      again = min(stop, handle.computed) - start
      self._counters['recomputed_tokens'] += max(0, again)
      handle.cached = stop
      handle.computed = max(handle.computed, stop)
    return level


def check_open(handle: Handle, idle: bool = False) -> None:
  """Raises EngineError for a closed handle or, if `idle`, a generating one."""
  if not isinstance(handle, Handle):
    raise EngineError(f'{handle!r} is no handle of this engine')
  if handle.closed:
    raise EngineError('the handle is closed; open or fork another')
  if idle and handle.request is not None:
    raise EngineError(
      'the handle is generating; await that call (or cancel it) first'
    )
