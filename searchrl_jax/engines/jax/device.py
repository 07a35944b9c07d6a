"""The device side of the sampler: weights, caches, and execution of plans.

Prefixes are copied between slots, and to and from host memory, in pieces of
`PIECE` positions: one program for each direction, and only cached positions.
Axis letters: R rows, L layers, K kv heads, S positions of a piece, H head dim.
"""

import dataclasses
import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from searchrl_jax.engines.core import EngineError, SyncError
from searchrl_jax.engines.jax import caches as kv
from searchrl_jax.engines.jax import decode
from searchrl_jax.engines.jax.slots import Box, Copy, Piece, Plan, Room
from searchrl_jax.engines.weights import checksum
from searchrl_jax.models import decoder
from searchrl_jax.models.decoder import DecoderConfig
from searchrl_jax.run import sharding

PIECE = 256


def bytes_per_token(cfg: DecoderConfig) -> int:
  """Of keys and values, in all layers."""
  numbers = 2 * cfg.n_layers * cfg.n_kv_heads * cfg.head_dim
  return numbers * jnp.dtype(cfg.dtype).itemsize


def room(cfg: DecoderConfig, config) -> Room:
  """The capacity of config.engine.slots and config.engine.host_gib.

  Raises:
    EngineError: host_gib is less than one sequence of max_len takes.
  """
  size = bytes_per_token(cfg)
  piece = min(PIECE, kv.length(config.max_len))
  out = Room(
    config.slots, int(config.host_gib * 2**30 / size), piece, config.max_len
  )
  least = out.size(config.max_len)
  if out.tokens < least:
    raise EngineError(
      f'config.engine.host_gib={config.host_gib}: at least '
      f'{least * size / 2**30:.3g}, which one paused sequence of '
      f'config.engine.max_len={config.max_len} tokens takes'
    )
  return out


def _indices(caches, slots, start):
  """[R, 2]: (slot, first position) in this part of the caches."""
  slots = sharding.own_rows(slots, len(caches[0][0]))
  return jnp.stack([slots, jnp.full_like(slots, start)], -1)


def _read(cfg, caches, slots, start, size):
  """(k, v) of each layer, [R, ...]: `size` positions from `start` of rows."""
  at = _indices(caches, slots, start)

  def read(cache, names):
    time = names.index('time')
    shape = [1, *cache.shape[1:]]
    shape[time] = size
    numbers = lax.GatherDimensionNumbers((1, 2, 3), (0,), (0, time))
    return sharding.total(
      lax.gather(cache, at, numbers, tuple(shape), mode='fill', fill_value=0)
    )

  return [tuple(map(read, pair, kv.axes(cfg))) for pair in caches]


def _write(cfg, caches, pairs, slots, start, mesh):
  """The inverse of `_read`; skips slots that do not exist."""
  at = _indices(caches, slots, start)

  def write(cache, new, names):
    time = names.index('time')
    numbers = lax.ScatterDimensionNumbers((1, 2, 3), (0,), (0, time))
    out = lax.scatter(cache, at, new, numbers, mode='drop')
    return sharding.constrain(out, mesh, *names)

  axes = kv.axes(cfg)
  return [tuple(map(write, *pair, axes)) for pair in zip(caches, pairs)]


def _on_own_devices(f, mesh, caches, *args, out=0):
  """f(caches, *args), for each part of the slots on its own devices."""
  ins = (0, *[-1] * len(args))
  return sharding.by_rows(f, mesh, len(caches[0][0]), ins, out)(caches, *args)


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def read_piece(cfg, caches, slots, start, size, mesh):
  """Keys and values [L, 1, ...] of a piece of the slot `slots` int32 [1]."""

  def read(*args):
    return tuple(map(jnp.stack, zip(*_read(cfg, *args, size))))

  return _on_own_devices(read, mesh, caches, slots, start, out=-1)


@functools.partial(jax.jit, static_argnums=(0, 5), donate_argnums=1)
def write_piece(cfg, caches, piece, slots, start, mesh):
  """Writes the result of `read_piece`, bit for bit."""

  def write(caches, piece, *where):
    return _write(cfg, caches, zip(*piece), *where, mesh)

  return _on_own_devices(write, mesh, caches, piece, slots, start)


@functools.partial(jax.jit, static_argnums=(0, 5, 6), donate_argnums=1)
def copy_piece(cfg, caches, source, target, start, size, mesh):
  """Copies a piece between slots: source, target int32 [R]."""

  def copy(caches, source, target, start):
    pairs = _read(cfg, caches, source, start, size)
    return _write(cfg, caches, pairs, target, start, mesh)

  return _on_own_devices(copy, mesh, caches, source, target, start)


class Device:
  """The engine's copy of the weights, and the caches; one caller at a time."""

  def __init__(self, cfg: DecoderConfig, shape: decode.Shape, mesh, params):
    shape = dataclasses.replace(shape, parts=sharding.parts(mesh, shape.slots))
    self._cfg, self._shape, self._mesh = cfg, shape, mesh
    self._programs = decode.programs(cfg, shape, mesh)
    self._length = kv.length(shape.max_len)
    self._piece = min(PIECE, self._length)
    self._weights = None
    self._caches = None
    self.load(params)
    self.reset()

  def load(self, params: dict) -> None:
    """Copies the trainer's parameters.

    Raises:
      SyncError: a missing, surplus or misshapen tensor; nothing is loaded.
    """
    try:
      decoder.flatten_checked(self._cfg, params)
    except ValueError as e:
      raise SyncError(f'the weights do not fit the model: {e}') from e
    self._weights = None  # frees the old copy before the new one is made
    self._weights = decode.load(params, self._cfg, self._mesh)

  def reset(self) -> None:
    """Fills the caches with zeros, so that no NaN of old weights remains."""
    self._caches = None
    self._caches = kv.make(
      self._cfg, self._shape.slots, self._shape.max_len, self._mesh
    )

  @property
  def nbytes(self) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(self._weights))

  def manifest(self) -> dict[str, str]:
    """Checksums of the loaded weights, named as the trainer's parameters."""
    parts = {k: v for k, v in self._weights.items() if k != 'layers'}
    for name in self._weights['layers'][0]:
      parts[f'layers/{name}'] = [p[name] for p in self._weights['layers']]
    return checksum.checksums(parts)

  def decode(self, state: dict):
    """ids, logps [chunk, B], counts, ended [B] (numpy), and the steps run."""
    self._caches, *out = self._programs.decode(
      self._weights, self._caches, state
    )
    *arrays, steps = jax.device_get(out)
    return *arrays, int(steps.max())

  def run(self, plan: Plan) -> None:
    """Evicts, restores, copies and prefills."""
    self._evict(plan)
    for level in sorted({*plan.copies, *plan.pieces}):
      self._copy(plan.copies.get(level, []))
      self._prefill(plan.pieces.get(level, []))

  def score(self, ids: list[int]) -> np.ndarray:
    """Teacher-forced log-probs, float32 [n]."""
    width = decode.fit(self._shape.score_widths, len(ids))
    rows = np.zeros((self._shape.rows(width), width), np.int32)
    rows[0, : len(ids)] = ids
    return np.asarray(self._programs.score(self._weights, rows))[0, : len(ids)]

  def warmup(self) -> None:
    """Compiles every program; the content of the caches is unchanged."""
    p, shape = self._programs, self._shape
    self.decode(decode.idle_state(shape.slots))
    for width in shape.widths:
      args = self._arrays([], shape.rows(width), width)
      for program in (p.fresh, p.extend):
        self._caches = program(self._weights, self._caches, *args)
    none, box, plan = shape.slots, Box(1), Plan(0)  # no such slot
    plan.evictions = [(0, box)]
    plan.copies = {1: [Copy(None, box, none, 1), Copy(none, None, none, 1)]}
    self.run(plan)
    for width in shape.score_widths:
      self.score([0] * min(width, shape.max_len))
    self.manifest()
    jax.block_until_ready(self._caches)

  def _evict(self, plan: Plan) -> None:
    for slot, box in plan.evictions:
      at = np.array([slot], np.int32)
      pieces = [
        read_piece(self._cfg, self._caches, at, i, self._piece, self._mesh)
        for i in self._starts(box.length)
      ]
      box.data = jax.device_get(pieces)

  def _copy(self, copies: list[Copy]) -> None:
    cfg, mesh, rows = self._cfg, self._mesh, self._shape.rows(self._piece)
    for c in copies:
      at = np.array([c.target], np.int32)
      for piece, i in zip(c.box.data if c.box else [], self._starts(c.length)):
        self._caches = write_piece(cfg, self._caches, piece, at, i, mesh)
    within = [c for c in copies if c.box is None]
    for start in self._starts(max((c.length for c in within), default=0)):
      for batch in _batches([c for c in within if c.length > start], rows):
        pairs = np.full((2, rows), self._shape.slots, np.int32)
        pairs[:, : len(batch)] = np.transpose(
          [(c.source, c.target) for c in batch]
        )
        self._caches = copy_piece(
          cfg, self._caches, *pairs, start, self._piece, mesh
        )

  def _starts(self, length: int) -> list[np.int32]:
    """The first positions of a prefix's pieces; the last two may overlap."""
    last = self._length - self._piece
    return [np.int32(min(i, last)) for i in range(0, length, self._piece)]

  def _prefill(self, pieces: list[Piece]) -> None:
    groups = {}
    for piece in pieces:
      width = decode.fit(self._shape.widths, len(piece.ids))
      groups.setdefault((piece.start == 0, width), []).append(piece)
    for (fresh, width), members in groups.items():
      program = self._programs.fresh if fresh else self._programs.extend
      rows = self._shape.rows(width)
      for batch in self._deal(members, rows):
        self._caches = program(
          self._weights, self._caches, *self._arrays(batch, rows, width)
        )

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
    """ids [rows, width], slots, start, lengths [rows] for a prefill."""
    ids = np.zeros((rows, width), np.int32)
    slots = np.full(rows, self._shape.slots, np.int32)
    start, lengths = np.zeros((2, rows), np.int32)
    for i, piece in pieces:
      n = len(piece.ids)
      ids[i, :n] = piece.ids
      slots[i], start[i], lengths[i] = piece.slot, piece.start, n
    return ids, slots, start, lengths


def _batches(items: list, size: int):
  for i in range(0, len(items), size):
    yield items[i : i + size]
