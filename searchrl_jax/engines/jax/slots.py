"""Assigns cache slots to sequences: bookkeeping on the host, no device work.

A `Rows` is the K/V of one prefix, in a slot or in host memory. Handles share
one until a handle writes below what another still reads (copy on write). A
fork, a second `open` of the same prompt, and tokens that another handle with
the same past has been given too (what two samples of a group found with one
query; not with delta nets) copy instead of computing.

The content of a cache must not depend on the order of arrival (design 5.10):

* the prompt, without its last token, is prefilled alone, in pieces of fixed
  width; appended tokens are prefilled from the last token before them;
* the last token of a sequence is never in the cache between calls, wherever
  the chunk that sampled it ended, and `decode` always computes it;
* an evicted prefix goes to host memory and comes back bit for bit. An eviction
  has nothing computed again: prefill and decode may differ in last bits.

Keys and values serve every shorter prefix too. The states of delta nets serve
those alone that their log reaches (`states`). So those of a fork are kept in
host memory before the slot that it shares goes on; and a sequence that is cut
before its last chunk, or whose call was cancelled, is computed again: its own
history decides that, whatever has become of its slot.

Host memory must therefore suffice. Admission ensures it: a sequence starts only
if slots and host memory can hold all started sequences, each at its limit.
"""

from collections.abc import Iterable
import dataclasses
import heapq
import itertools

from searchrl_jax.engines import handles
from searchrl_jax.engines.core import Sampling

# Ranks of requests. Slots go to probes (checks of the engine), then to started
# sequences. Calls that a trajectory waits for start before new trajectories.
PROBE, BEGUN, CALL, NEW = range(4)


@dataclasses.dataclass(frozen=True)
class Room:
  """The capacity of slots and host memory; host memory counts in tokens."""

  slots: int
  tokens: int  # of host memory
  piece: int  # tokens of a sequence that are copied, and counted, together
  max_len: int
  state: int = 0  # tokens' memory that the states of delta nets take; 0: none

  def size(self, tokens: int) -> int:
    """Tokens of host memory that a sequence of `tokens` takes."""
    return -(-tokens // self.piece) * self.piece + self.state

  def holds(self, sizes: Iterable[int], guests: int) -> bool:
    """Whether sequences of these sizes fit, whichever of them are in slots.

    guests: those that read the slot of another; host memory may hold their
    states beside it.
    """
    held = sum(sorted(sizes)[self.slots :])
    return held + guests * self.state <= self.tokens

  def capacity(self, tokens: int) -> int:
    """The number of sequences of `tokens` that may run at the same time.

    One more of max_len fits beside them: a call that one of them waits for (a
    simulator's reply) can always be served, so no deadlock can arise.
    """
    free = self.tokens - self.size(self.max_len)
    return self.slots + free // self.size(tokens)


class Handle(handles.Handle):
  """A sequence and its place in the caches."""

  def __init__(self, ids: list[int]):
    super().__init__(ids)
    self.prompt = tuple(ids)  # prefilled as one unit, shared by equal prompts
    self.rows: Rows | None = None
    self.cached = 0  # leading tokens whose K/V `rows` holds for this handle
    # [start, stop) of each prefill after the prompt. `cached` may be less.
    self.pieces: tuple[tuple[int, int], ...] = ()
    self.computed = 0  # the maximum of `cached` over all versions
    self.since = 0  # the shortest prefix that its states can be cut back to
    self.ended = 0.0  # when its last call ended (time.monotonic)


class Request(handles.Request):
  """One generate call, its rank and its random stream."""

  def __init__(self, handle: Handle, sampling: Sampling, future):
    super().__init__(handle, sampling)
    self.future = future
    self.rank = (NEW, 0)  # with its step, see JaxEngine._enqueue
    self.limit = sampling.limit or len(handle) + sampling.max_tokens
    seed = sampling.seed & (2**64 - 1)
    self.seed = (seed >> 32, seed & (2**32 - 1))

  @property
  def length(self) -> int:
    return len(self.handle.ids) + len(self.ids)


class Rows:
  """The K/V of one prefix, in `slot`, or in host memory (`box`)."""

  def __init__(self, slot: int, owner: Handle):
    self.slot: int | None = slot
    self.box: Box | None = None
    self.owner: Handle | None = owner  # the only handle that may write
    self.users = {owner}
    self.used = 0  # time of the last admission, for LRU eviction
    self.since = 0  # `Handle.since` of those whose states are there
    self.kept: list[Box] = []  # the states of others


class Box:
  """Host memory for one evicted prefix; filled when the plan runs."""

  def __init__(self, length: int):
    self.length = length  # positions to keep
    self.data: list = []  # the (k, v) of each piece, see engines/jax/device.py
    self.states: list = []  # of the delta nets
    self.since = 0  # see `Rows`


@dataclasses.dataclass
class Copy:
  """Fills `target` from a slot, or from host memory if that was evicted."""

  source: int | None
  box: Box | None
  target: int
  length: int  # positions
  start: int = 0  # the target has those before it
  states: Box | None = None  # in place of the source's


@dataclasses.dataclass(frozen=True)
class Piece:
  """Tokens to prefill: ids at positions start, start + 1, ... of a slot."""

  slot: int
  start: int
  ids: tuple[int, ...]
  replay: int = 0  # tokens of the log before them, see `states`


class Plan:
  """Device work, by levels: each may read what the levels before it wrote."""

  def __init__(self, epoch: int):
    self.epoch = epoch
    self.evictions: list[tuple[int, Box]] = []  # before every level
    self.kept: list[tuple[int, Box]] = []  # states, at the same time
    self.copies: dict[int, list[Copy]] = {}
    self.pieces: dict[int, list[Piece]] = {}
    self.ready: dict[Rows, int] = {}  # level at which they are complete


class SlotTable:
  """Assigns slots; every method runs between device calls."""

  def __init__(self, room: Room, max_width: int, counters: dict):
    self.room = room
    self._max_width = max_width
    self._counters = counters
    self._clock = 0
    self._prompts: dict[tuple[int, ...], set[Handle]] = {}
    self._sizes: dict[Handle, int] = {}  # tokens reserved by started handles
    self.epoch = 0
    self.reset()

  def reset(self) -> None:
    """Forgets every cached prefix (the weights or the caches are new)."""
    self.epoch += 1
    for handle in itertools.chain.from_iterable(self._prompts.values()):
      handle.rows, handle.cached, handle.pieces, handle.since = None, 0, (), 0
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
    child = Handle(list(handle.ids))
    child.prompt = handle.prompt
    if handle.rows is not None:
      self._share(child, handle.rows, handle.cached)
      child.pieces, child.since = handle.pieces, handle.since
      self._sizes[child] = self._sizes.get(handle, 0)  # of the shared rows
    elif handle in self._sizes:  # new weights came: what has begun goes on
      self._sizes[child] = self._sizes[handle]
    self.add(child)
    return child

  def truncated(self, handle: Handle) -> None:
    """Updates the cached length after handle.ids became shorter."""
    if len(handle) < len(handle.prompt):
      # A shorter prompt is another prompt, prefilled as its own unit.
      self.remove(handle)
      handle.prompt = tuple(handle.ids)
      self.add(handle)
    self.rewind(handle)

  def rewind(self, handle: Handle) -> None:
    """Treats the tokens from the last one on as not cached."""
    handle.cached = cached = min(handle.cached, len(handle) - 1)
    handle.computed = min(handle.computed, len(handle) - 1)
    # The rest of a piece that is cut is not prefilled with it: an empty piece
    # says so.
    cut = any(start < cached < stop for start, stop in handle.pieces)
    handle.pieces = tuple(p for p in handle.pieces if p[0] < cached)
    handle.pieces += ((cached, cached),) * cut
    if cached < handle.since:
      self.forget(handle)

  def forget(self, handle: Handle) -> None:
    """Has the handle computed again, where delta nets have no way back."""
    if self.room.state:
      self.drop(handle)
      handle.pieces = ()

  def drop(self, handle: Handle) -> None:
    """Releases the handle's rows; the last user frees the slot."""
    rows = handle.rows
    handle.rows, handle.cached, handle.since = None, 0, 0
    if rows is None:
      return
    rows.users.discard(handle)
    if rows.owner is handle:
      rows.owner = None
    needed = {user.since for user in rows.users}
    self._keep(rows, [box for box in rows.kept if box.since in needed])
    if rows.users:
      return
    if rows.slot is None:
      self._hold(-self.room.size(rows.box.length))
    else:
      del self._held[rows.slot]
      heapq.heappush(self._free, rows.slot)

  def _keep(self, rows: Rows, kept: list[Box]) -> None:
    """Changes which states host memory holds beside the rows."""
    self._hold((len(kept) - len(rows.kept)) * self.room.state)
    rows.kept = kept

  def _hold(self, tokens: int) -> None:
    """Counts tokens that host memory holds from now on, or no more."""
    self._paused += tokens
    most = max(self._counters['paused_tokens'], self._paused)
    self._counters['paused_tokens'] = most

  def _share(self, handle: Handle, rows: Rows, cached: int) -> None:
    rows.users.add(handle)
    handle.rows = rows
    self._hit(handle, cached, cached)

  def _hit(self, handle: Handle, cached: int, tokens: int) -> None:
    """Counts tokens that are not computed, up to the position `cached`."""
    handle.cached = cached
    handle.computed = max(handle.computed, cached)
    self._counters['prefix_hits'] += 1
    self._counters['prefix_tokens'] += tokens

  # Planning.

  def settled(self, handle: Handle) -> bool:
    """Whether the handle can continue in the slot that it has."""
    rows = handle.rows
    return rows is not None and rows.slot is not None and self._own(handle)

  def started(self, handle: Handle) -> bool:
    """Whether room is reserved for the handle, in a slot or host memory."""
    return handle in self._sizes

  def start(self, handle: Handle, limit: int, last: bool) -> bool:
    """Reserves room for a handle of at most `limit` tokens; False if full.

    last: the handle ends with this call, so it may use the room that is kept
    free for calls that others wait for. Forks may wait for it too: their states
    do not keep it from its start.
    """
    size, spare = self.room.size(limit), self.room.size(self.room.max_len)
    sizes = [*self._sizes.values(), size, *([] if last else [spare])]
    guest = lambda h: h.rows is not None and h.rows.owner is not h
    guests = 0 if last else sum(map(guest, self._sizes))
    if not self.started(handle) and not self.room.holds(sizes, guests):
      return False
    self._sizes[handle] = max(self._sizes.get(handle, 0), size)
    return True

  def _own(self, handle: Handle) -> bool:
    """Whether the handle may write to its rows; takes them if not owned."""
    rows = handle.rows
    if any(u.cached > handle.cached for u in rows.users):
      return False
    if self._kept(rows, handle.since):
      return False
    if rows.owner is None:
      rows.owner = handle
    return rows.owner is handle

  def admit(self, handle: Handle, tokens, plan: Plan, busy) -> bool:
    """Plans the device work before a started handle can decode.

    tokens: the whole sequence. busy: the slots that are decoding.

    Returns False if no slot can be freed.
    """
    self._take_back(handle, plan)
    if not self.settled(handle) and not self._place(handle, plan, busy):
      return False
    self._clock += 1
    rows = handle.rows
    rows.used = self._clock
    self._keep_states(handle, plan)
    level = plan.ready.get(rows, 0)
    prompt = len(handle.prompt) - 1
    if handle.cached < prompt:
      level = self._prefill(handle, tokens, prompt, level, plan)
    plan.ready[rows] = self._append(handle, tokens, level, plan)
    return True

  def advance(self, handle: Handle, start: int) -> int:
    """Says that states go on from `start`; returns how many tokens of their log
    come before, -1 if no token does."""
    rows = handle.rows
    replay = start - rows.since if start else -1
    rows.since = handle.since = start
    return replay

  def _kept(self, rows: Rows, since: int) -> Box | None:
    """Where states are that can be cut back to `since`; None: with the rows."""
    if not self.room.state or rows.since == since:
      return None
    return next(box for box in rows.kept if box.since == since)

  def _take_back(self, handle: Handle, plan: Plan) -> None:
    """Gives a slot the states that were kept of the handle, if no other handle
    has the slot any more.

    The states in a slot are the owner's, if it has one: rows.since is that of
    rows.owner. So those of a single user are there, or they were kept when an
    owner went on that has left since; what is in the slot is then nobody's.
    """
    rows = handle.rows
    if rows is None or rows.slot is None or len(rows.users) > 1:
      return
    if box := self._kept(rows, handle.since):
      level = plan.ready[rows] = plan.ready.get(rows, 0) + 1
      copy = Copy(rows.slot, None, rows.slot, 0, states=box)
      plan.copies.setdefault(level, []).append(copy)
      rows.since, rows.owner = handle.since, handle
      self._keep(rows, [])

  def _keep_states(self, handle: Handle, plan: Plan) -> None:
    """Keeps the states of others in the handle's slot, which goes on."""
    rows = handle.rows
    shared = any(u is not handle and u.since == rows.since for u in rows.users)
    if self.room.state and shared:
      box = Box(0)
      box.since = rows.since
      # An earlier one served a handle that nothing of its log belongs to.
      others = [old for old in rows.kept if old.since != box.since]
      self._keep(rows, [*others, box])
      plan.kept.append((rows.slot, box))

  def _append(self, handle: Handle, tokens, level: int, plan: Plan) -> int:
    """Plans what follows the prompt; returns the level at which it is there.

    Content that differs in last bits must not be taken for the same: the twin
    has prefilled the same pieces, and sampled the other tokens.
    """
    start, end = handle.cached, len(tokens) - 1
    handle.pieces += tuple(self._pieces(start, end))

    def same(other: Handle) -> bool:
      return (
        other is not handle
        and other.cached >= end
        and tuple(p for p in other.pieces if p[0] < end) == handle.pieces
        and other.ids[:end] == tokens[:end]
      )

    # A state depends on how its tokens were divided, which is not compared.
    known = start < end and not self.room.state
    twins = filter(same, self._prompts[handle.prompt]) if known else ()
    ready = lambda other: plan.ready.get(other.rows, 0)
    twin = min(twins, key=ready, default=None)
    if twin is None:
      return self._prefill(handle, tokens, end, level, plan)
    rows, level = twin.rows, max(level, ready(twin)) + 1
    copy = Copy(rows.slot, rows.box, handle.rows.slot, end, start)
    plan.copies.setdefault(level, []).append(copy)
    self._hit(handle, end, end - start)
    return level

  def _pieces(self, start: int, end: int) -> Iterable[tuple[int, int]]:
    """What is prefilled in one call each."""
    for first in range(start, end, self._max_width):
      yield first, min(end, first + self._max_width)

  def _place(self, handle: Handle, plan: Plan, busy) -> bool:
    """Gives the handle a slot and copies an existing prefix into it."""
    slot = self._free_slot(plan, busy)
    if slot is None:
      return False
    rows = handle.rows
    if rows is None:
      rows = self._same_prompt(handle)
      if rows is not None:
        self._share(handle, rows, len(handle.prompt) - 1)
        handle.since = handle.cached
    cached, since, level = handle.cached, handle.since, None
    if rows is not None:
      if rows.slot is None:
        self._counters['restored_tokens'] += cached
      level = plan.ready.get(rows, 0) + 1
      kept = self._kept(rows, since)
      copy = Copy(rows.slot, rows.box, slot, cached, states=kept)
      plan.copies.setdefault(level, []).append(copy)
    if rows is not None and len(rows.users) == 1:
      self._hold(-self.room.size(rows.box.length))
      rows.slot, rows.box, rows.owner = slot, None, handle
      self._keep(rows, [])
    else:
      self.drop(handle)  # other users keep the rows
      handle.rows, handle.cached = Rows(slot, handle), cached
    handle.rows.since = handle.since = since
    self._held[slot] = handle.rows
    if level is not None:
      plan.ready[handle.rows] = level
    return True

  def _same_prompt(self, handle: Handle) -> Rows | None:
    """Rows of an open handle that hold the whole of the same prompt."""
    need = len(handle.prompt) - 1
    group = self._prompts[handle.prompt] if need else ()
    holds = (other.rows for other in group if other.cached >= need)
    sinces = lambda rows: {rows.since, *(box.since for box in rows.kept)}
    fit = lambda rows: rows and (not self.room.state or need in sinces(rows))
    return next(filter(fit, holds), None)

  def _free_slot(self, plan: Plan, busy) -> int | None:
    """A free slot, else that of the least recently used idle prefix."""
    if self._free:
      return heapq.heappop(self._free)
    # A slot that this plan fills must be decoded from before it is evicted.
    free = lambda s, rows: s not in busy and rows not in plan.ready
    idle = [s for s, rows in self._held.items() if free(s, rows)]
    slot = min(idle, key=lambda s: self._held[s].used, default=None)
    if slot is None:
      return None
    rows = self._held.pop(slot)
    rows.slot = None
    rows.box = Box(max(u.cached for u in rows.users))
    plan.evictions.append((slot, rows.box))
    for copies in plan.copies.values():
      for copy in copies:
        if copy.source == slot:
          copy.source, copy.box = None, rows.box
    self._counters['evictions'] += 1
    self._hold(self.room.size(rows.box.length))
    return slot

  def _prefill(self, handle, tokens, end: int, level: int, plan: Plan) -> int:
    """Plans pieces up to `end`; returns the level of the last one."""
    for start, stop in self._pieces(handle.cached, end):
      level += 1
      ids, replay = tuple(tokens[start:stop]), self.advance(handle, start)
      piece = Piece(handle.rows.slot, start, ids, replay)
      self.advance(handle, stop)
      plan.pieces.setdefault(level, []).append(piece)
      self._counters['prefilled_tokens'] += stop - start
      recomputed = min(stop, handle.computed) - start
      self._counters['recomputed_tokens'] += max(0, recomputed)
      handle.cached = stop
      handle.computed = max(handle.computed, stop)
    return level
