"""The device side of the sampler: weights, caches, and execution of plans.

Prefixes are copied between slots, and to and from host memory, in pieces of
`PIECE` positions: one program for each direction, and only cached positions.
On a CPU the slots are divided into lanes (`lanes`), each with its own caches.
Axis letters: R rows, L layers, K kv heads, S positions of a piece, H head dim.
"""

from concurrent import futures
import dataclasses
import functools
import math

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from searchrl_jax import lookup
from searchrl_jax.devices import compiling, sharding
from searchrl_jax.engines.core import SyncError, require
from searchrl_jax.engines.jax import caches as kv
from searchrl_jax.engines.jax import decode, states
from searchrl_jax.engines.jax.slots import Box, Copy, Piece, Plan, Room
from searchrl_jax.engines.jax.states import State
from searchrl_jax.engines.weights import checksum
from searchrl_jax.models import decoder, experts, lora
from searchrl_jax.models.decoder import DecoderConfig

PIECE = 256


def bytes_per_token(cfg: DecoderConfig) -> int:
  """Of keys and values, in all layers, and of the experts that are kept."""
  layers = cfg.n_layers - len(cfg.delta_layers)
  numbers = 2 * layers * cfg.n_kv_heads * cfg.head_dim
  routes = 2 * layers * cfg.moe.chosen if cfg.keeps_routes else 0
  return numbers * jnp.dtype(cfg.dtype).itemsize + routes


def state_bytes(cfg: DecoderConfig, chunk: int) -> int:
  """Of the delta nets' states of a sequence, in all layers."""
  if not cfg.delta_layers:
    return 0
  fields = states.layouts(cfg, 1, chunk)
  sizes = (jnp.dtype(d or cfg.dtype).itemsize for *_, d in fields)
  one = sum(math.prod(s) * size for (_, s, _), size in zip(fields, sizes))
  return len(cfg.delta_layers) * one


def room(cfg: DecoderConfig, config) -> Room:
  """The capacity of config.engine.slots and config.engine.host_gib.

  Raises:
    EngineError: host_gib is less than one sequence of max_len takes, or
      exact=False with delta nets.
  """
  require(
    config.exact or not cfg.delta,
    f'config.engine.exact=False: family {cfg.family} has delta nets, whose '
    'states are those of all slots; use True',
  )
  size = bytes_per_token(cfg)
  piece = min(PIECE, kv.length(config.max_len))
  held = int(config.host_gib * 2**30 / size)
  state = -(-state_bytes(cfg, config.chunk) // size)
  out = Room(config.slots, held, piece, config.max_len, state)
  least = out.size(config.max_len)
  require(
    out.tokens >= least,
    f'config.engine.host_gib={config.host_gib}: at least '
    f'{least * size / 2**30:.3g}, which one paused sequence of '
    f'config.engine.max_len={config.max_len} tokens takes',
  )
  return out


def lanes(cfg: DecoderConfig, slots: int, mesh) -> int:
  """Parts of the slots whose programs run at once, each in a thread: 1 or 2.

  XLA runs the products of a decode step of a small model on one core of a CPU.
  Two threads take half the time, unless the weights exceed the CPU's caches.
  The cores do not set the number, because the rows of a product can change the
  last bits of its result; a lane has at least 32.
  """
  small = cfg.n_params * jnp.dtype(cfg.dtype).itemsize <= 2**25
  several = slots >= 64 and slots % 2 == 0
  return 2 if _alone(mesh) and small and several else 1


def _alone(mesh) -> bool:
  """Whether there is one device, a CPU."""
  return sharding.platform() == 'cpu' and (mesh is None or mesh.size == 1)


def _indices(caches, slots, start):
  """Slots and first positions [R] in this part of the caches."""
  slots = sharding.own_rows(slots, len(caches[0][0]))
  return slots, jnp.full_like(slots, start)


def _on_own_devices(f, mesh, caches, *args, out=0):
  """f(caches, *args), for each part of the slots on its own devices."""
  ins = (0, *[-1] * len(args))
  return sharding.by_rows(f, mesh, len(caches[0][0]), ins, out)(caches, *args)


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def read_piece(cfg, caches, slots, start, size, mesh):
  """The caches [L, R, ...] of a piece, `size` positions from `start`, of the
  slots int32 [R]."""

  def read(caches, slots, start):
    at = _indices(caches, slots, start)

    def one(cache, names):
      time = names.index('time')
      return sharding.total(kv.read(cache, time, *at, size, mode='fill'))

    axes = kv.axes(cfg, mesh)
    pairs = [tuple(map(one, pair, axes)) for pair in _pairs(caches)]
    return tuple(map(jnp.stack, zip(*pairs)))

  return _on_own_devices(read, mesh, caches, slots, start, out=-1)


@functools.partial(jax.jit, static_argnums=(0, 5), donate_argnums=1)
def write_piece(cfg, caches, piece, slots, start, mesh):
  """Writes the result of `read_piece`, bit for bit; skips missing slots."""

  def write(caches, piece, slots, start):
    at = jnp.stack(_indices(caches, slots, start), -1)

    def one(cache, new, names):
      time = names.index('time')
      numbers = lax.ScatterDimensionNumbers((1, 2, 3), (0,), (0, time))
      out = lax.scatter(cache, at, new, numbers, mode='drop')
      return sharding.constrain(out, mesh, *names)

    axes, new = kv.axes(cfg, mesh), zip(*piece)
    return [
      x if isinstance(x, State) else tuple(map(one, x, next(new), axes))
      for x in caches
    ]

  return _on_own_devices(write, mesh, caches, piece, slots, start)


def _pairs(caches) -> list:
  return [x for x in caches if not isinstance(x, State)]


@functools.partial(jax.jit, static_argnums=2)
def read_states(caches, slots, mesh):
  """The states of the slots int32 [R], of each delta net."""

  def read(caches, slots):
    own = sharding.own_rows(slots, len(caches[0][0]))
    one = lambda x: x.at[own].get(mode='fill', fill_value=0)
    nets = [x for x in caches if isinstance(x, State)]
    return jax.tree.map(lambda x: sharding.total(one(x)), nets)

  return _on_own_devices(read, mesh, caches, slots, out=-1)


@functools.partial(jax.jit, static_argnums=(0, 4), donate_argnums=1)
def write_states(cfg, caches, nets, slots, mesh):
  """Writes the result of `read_states`, bit for bit; skips missing slots."""

  def write(caches, nets, slots):
    own, new = sharding.own_rows(slots, len(caches[0][0])), iter(nets)
    put = lambda x, y: x.at[own].set(y, mode='drop')
    return [
      states.pinned(cfg, jax.tree.map(put, x, next(new)), mesh)
      if isinstance(x, State)
      else x
      for x in caches
    ]

  return _on_own_devices(write, mesh, caches, nets, slots)


class Device:
  """The engine's copy of the weights, and the caches; one caller at a time."""

  def __init__(self, cfg: DecoderConfig, shape: decode.Shape, mesh, params):
    self._lanes = lanes(cfg, shape.slots, mesh)
    # Slot s is row s // lanes of lane s % lanes, so that few sequences are
    # divided evenly too.
    slots, parts = shape.slots // self._lanes, sharding.parts(mesh, shape.slots)
    require(
      shape.exact or _alone(mesh),
      'config.engine.exact=False is for one CPU, where idle slots cost as much '
      'as active ones; use True here',
    )
    shape = dataclasses.replace(shape, slots=slots, parts=parts)
    self._cfg, self._shape, self._mesh = cfg, shape, mesh
    self._pool = futures.ThreadPoolExecutor(self._lanes, 'jax_engine')
    self._programs = decode.programs(cfg, shape, mesh)
    self._length = kv.length(shape.max_len)
    self._piece = min(PIECE, self._length)
    self._nets = bool(cfg.delta_layers)
    self._weights = None
    self._caches: list[list] = []  # of each lane
    self.load(params)
    self.reset()

  def load(self, params: dict, kind: str = 'full') -> None:
    """Copies the trainer's parameters; kind='adapter': of adapters alone.

    Raises:
      SyncError: a missing, surplus or misshapen tensor; nothing is loaded.
    """
    cfg, adapter = self._cfg, kind == 'adapter'
    table = lora.adapter_table(cfg) if adapter else None
    with lookup.of('the weights do not fit the model', SyncError):
      decoder.flatten_checked(cfg, params, table)
    if adapter:
      new = decode.load(params, cfg, self._mesh)['layers']
      layers = [old | own for old, own in zip(self._weights['layers'], new)]
      self._weights = self._weights | {'layers': layers}
      return
    self._weights = None  # frees the old copy before the new one is made
    self._weights = decode.load(params, cfg, self._mesh)

  def reset(self) -> None:
    """Fills the caches with zeros, so that no NaN of old weights remains."""
    self._caches, shape = [], self._shape
    self._caches = [
      kv.make(self._cfg, shape.slots, shape.max_len, self._mesh, shape.chunk)
      for _ in range(self._lanes)
    ]

  def nbytes(self, kind: str = 'full') -> int:
    """Of the loaded weights; kind='adapter': of the adapters alone."""
    return sum(x.nbytes for x in jax.tree.leaves(self._parts(kind)))

  def checksums(self, kind: str = 'full') -> dict[str, str]:
    """Checksums of the loaded weights, named as the trainer's parameters."""
    return checksum.checksums(self._parts(kind))

  def _parts(self, kind: str) -> dict:
    parts = {k: v for k, v in self._weights.items() if k != 'layers'}
    for layer in self._weights['layers']:
      for name, x in layer.items():
        parts.setdefault(f'layers/{name}', []).append(x)
    wanted = lora.adapter_table(self._cfg) if kind == 'adapter' else parts
    return {name: parts[name] for name in wanted}

  def decode(self, state: dict):
    """ids, logps [chunk, B], counts [B] (numpy), and the steps run."""

    def run(lane):
      own = {k: v[lane :: self._lanes] for k, v in state.items()}
      slots = self._slots(own['left'])
      own = {k: v[slots] for k, v in own.items()}
      if len(slots) < self._shape.slots:
        own['slot'] = slots
      self._caches[lane], *out = self._programs.decode(
        self._weights, self._caches[lane], own
      )
      *some, steps = jax.device_get(out)
      shapes = [(*x.shape[:-1], self._shape.slots) for x in some]
      arrays = [np.zeros(s, x.dtype) for s, x in zip(shapes, some)]
      for x, y in zip(arrays, some):
        x[..., slots] = y
      return *arrays, steps

    *arrays, steps = zip(*self._each_lane(run))
    merged = (np.stack(x, -1).reshape(*x[0].shape[:-1], -1) for x in arrays)
    return *merged, int(np.max(steps))

  def _slots(self, left) -> np.ndarray:
    """The slots of a lane that a call decodes, int32 [n], ascending.

    Those that are active, and others up to one of `Shape.decode_sizes`.
    """
    n = decode.fit(self._shape.decode_sizes, np.count_nonzero(left))
    return np.sort(np.argsort(left == 0, kind='stable')[:n]).astype(np.int32)

  def _each_lane(self, f) -> list:
    if self._lanes == 1:
      return [f(0)]
    jobs = [self._pool.submit(f, lane) for lane in range(self._lanes)]
    futures.wait(jobs)  # after an error too: no lane may run during `reset`
    return [job.result() for job in jobs]

  def run(self, plan: Plan) -> None:
    """Evicts, restores, copies and prefills."""
    self._evict(plan)
    for level in sorted({*plan.copies, *plan.pieces}):
      self._copy(plan.copies.get(level, []))
      self._prefill(plan.pieces.get(level, []))

  def score_shape(self, n: int) -> tuple[int, int]:
    """Rows and width of the call that scores n ids."""
    width = decode.fit(self._shape.score_widths, n)
    return self._shape.rows(width), width

  def score(self, *sequences: list[int]) -> list[np.ndarray]:
    """Teacher-forced log-probs, float32 [n] each, of sequences of one shape."""
    rows = np.zeros(self.score_shape(len(sequences[0])), np.int32)
    for row, ids in zip(rows, sequences):
      row[: len(ids)] = ids
    found = np.asarray(self._programs.score(self._weights, rows))
    return [row[: len(ids)] for row, ids in zip(found, sequences)]

  def routes(self, slot: int | None, box: Box | None, n: int) -> np.ndarray:
    """The experts of a prefix of n tokens, in a slot or host memory: int16
    [n, L, k], of the layers that have experts."""
    layers = self._cfg.layers_with('router')
    out = np.empty((self._length, len(layers), self._cfg.moe.chosen), np.int16)
    for i, start in enumerate(self._starts(n)):
      *_, piece = self._read([slot], 1, start) if box is None else box.data[i]
      own = np.asarray(piece)[layers, 0, 0]  # [L, S, k]
      out[start : start + self._piece] = own.swapaxes(0, 1)
    return out[:n]

  def warmup(self) -> None:
    """Compiles every program; the content of the caches is unchanged."""
    p, shape, idle = self._programs, self._shape, decode.idle_state
    prefills = []
    for width in shape.widths:
      for rows in shape.prefill_sizes(width):
        args = self._arrays([], rows, width)
        prefills += [(program, args) for program in (p.fresh, p.extend)]
    held = self._weights, self._caches[0]
    *fewer, slots = shape.decode_sizes
    idles = [idle(slots)]
    idles += [idle(n) | {'slot': np.arange(n, dtype=np.int32)} for n in fewer]
    calls = [(p.decode, (*held, state)) for state in idles]
    calls += [(program, (*held, *args)) for program, args in prefills]
    for width in shape.score_widths:
      ids = np.zeros((shape.rows(width), width), np.int32)
      calls.append((p.score, (self._weights, ids)))
    lowered = (program.lower(*args) for program, args in calls)
    at_once = experts.compile_at_once(self._cfg.moe)
    compiling.concurrently(lowered, at_once)
    for state in idles:
      self._caches[0], *_ = p.decode(self._weights, self._caches[0], state)
    for program, args in prefills:
      self._caches[0] = program(self._weights, self._caches[0], *args)
    none, box, plan = shape.slots * self._lanes, Box(1), Plan(0)  # no such slot
    plan.evictions = [(0, box)]
    plan.copies = {1: [Copy(None, box, none, 1), Copy(none, None, none, 1)]}
    self.run(plan)
    for width in shape.score_widths:
      self.score([0] * min(width, shape.max_len))
    self.checksums()
    jax.block_until_ready(self._caches)

  def _evict(self, plan: Plan) -> None:
    for slot, box in (*plan.evictions, *plan.kept):
      pieces = [self._read([slot], 1, i) for i in self._starts(box.length)]
      nets = self._read_states([slot], 1) if self._nets else []
      box.data, box.states = jax.device_get((pieces, nets))

  def _copy(self, copies: list[Copy]) -> None:
    rows, groups = self._shape.rows(self._piece), {}
    for c in copies:
      held = c.states or c.box
      if held and held.states:
        self._write_states(held.states, [c.target], 1)
      if c.box is None:
        lanes = c.source % self._lanes, c.target % self._lanes
        groups.setdefault(lanes, []).append(c)
        continue
      for piece, start in zip(c.box.data, self._starts(c.length)):
        if start + self._piece > c.start:
          self._write(piece, [c.target], 1, start)
    for group in groups.values():
      for start in self._starts(max(c.length for c in group)):
        longer = [c for c in group if c.start - self._piece < start < c.length]
        for i in range(0, len(longer), rows):
          batch = longer[i : i + rows]
          piece = self._read([c.source for c in batch], rows, start)
          self._write(piece, [c.target for c in batch], rows, start)
      live = [c for c in group if self._nets and c.states is None]
      for i in range(0, len(live), rows):
        batch = live[i : i + rows]
        nets = self._read_states([c.source for c in batch], rows)
        self._write_states(nets, [c.target for c in batch], rows)

  def _read_states(self, slots: list[int], rows: int):
    lane, at = self._at(slots, rows)
    return read_states(self._caches[lane], at, self._mesh)

  def _write_states(self, nets, slots: list[int], rows: int) -> None:
    lane, at = self._at(slots, rows)
    args = nets, at, self._mesh
    self._caches[lane] = write_states(self._cfg, self._caches[lane], *args)

  def _read(self, slots: list[int], rows: int, start):
    """`read_piece` of slots of one lane, in `rows` rows."""
    lane, at = self._at(slots, rows)
    args = start, self._piece, self._mesh
    return read_piece(self._cfg, self._caches[lane], at, *args)

  def _write(self, piece, slots: list[int], rows: int, start) -> None:
    lane, at = self._at(slots, rows)
    args = piece, at, start, self._mesh
    self._caches[lane] = write_piece(self._cfg, self._caches[lane], *args)

  def _at(self, slots: list[int], rows: int):
    """The lane of slots and their rows in it, int32 [rows]."""
    at = np.full(rows, self._shape.slots, np.int32)
    at[: len(slots)] = np.array(slots) // self._lanes
    return slots[0] % self._lanes, at

  def _starts(self, length: int) -> list[np.int32]:
    """The first positions of a prefix's pieces; the last two may overlap."""
    last = self._length - self._piece
    return [np.int32(min(i, last)) for i in range(0, length, self._piece)]

  def _prefill(self, pieces: list[Piece]) -> None:
    groups = [{} for _ in range(self._lanes)]
    for piece in pieces:
      width = decode.fit(self._shape.widths, len(piece.ids))
      group = groups[piece.slot % self._lanes]
      piece = dataclasses.replace(piece, slot=piece.slot // self._lanes)
      group.setdefault((piece.start == 0, width), []).append(piece)

    def run(lane):
      for (fresh, width), members in groups[lane].items():
        program = self._programs.fresh if fresh else self._programs.extend
        sizes = self._shape.prefill_sizes(width)
        for batch in self._deal(members, sizes[-1]):
          rows = decode.fit(sizes, len(batch))
          self._caches[lane] = program(
            self._weights, self._caches[lane], *self._arrays(batch, rows, width)
          )

    self._each_lane(run)

  def _deal(self, pieces: list[Piece], rows: int):
    """Batches of (row, piece): rows of the part that the piece's slot is in."""
    parts = self._shape.parts
    queues, own = [[] for _ in range(parts)], rows // parts
    for piece in pieces:
      queues[piece.slot * parts // self._shape.slots].append(piece)
    for i in range(0, max(map(len, queues)), own):
      yield [
        (part * own + j, piece)
        for part, queue in enumerate(queues)
        for j, piece in enumerate(queue[i : i + own])
      ]

  def _arrays(self, pieces: list[tuple[int, Piece]], rows: int, width: int):
    """ids [rows, width], slots, start, lengths, replay [rows] of a prefill."""
    ids = np.zeros((rows, width), np.int32)
    slots = np.full(rows, self._shape.slots, np.int32)
    start, lengths, replay = np.zeros((3, rows), np.int32)
    for i, piece in pieces:
      n = len(piece.ids)
      ids[i, :n] = piece.ids
      slots[i], start[i], lengths[i] = piece.slot, piece.start, n
      replay[i] = piece.replay
    return ids, slots, start, lengths, replay
