"""The device side of the sampler: weights, caches, and plans carried out."""

import jax
import numpy as np

from searchrl_jax.engines import caches as kv
from searchrl_jax.engines import checksum
from searchrl_jax.engines import decode
from searchrl_jax.engines.core import SyncError
from searchrl_jax.engines.slots import Copy, Piece, Plan
from searchrl_jax.models import decoder
from searchrl_jax.models.decoder import DecoderConfig


class Device:
  """Owns its copy of the weights and the caches; one caller at a time."""

  def __init__(self, cfg: DecoderConfig, shape: decode.Shape, mesh, params):
    self._cfg, self._shape, self._mesh = cfg, shape, mesh
    self._programs = decode.programs(cfg, shape, mesh)
    self._weights = None
    self._caches = None
    self.load(params)
    self.reset()

  def load(self, params: dict) -> None:
    """Copies the trainer's parameters.

    Raises:
      SyncError: a missing, surplus or misshapen tensor; nothing is loaded.
    """
    table = decoder.param_table(self._cfg)
    flat = decoder.flatten(params)
    for name in [*table, *flat]:
      if name not in flat:
        raise SyncError(f'the update has no tensor {name!r}')
      if name not in table:
        raise SyncError(f'the model has no tensor {name!r}; the update does')
      shape, wanted = tuple(flat[name].shape), table[name][0]
      if shape != wanted:
        raise SyncError(f'tensor {name!r} is {shape}; the model has {wanted}')
    self._weights = None  # two copies at once would be one too many
    self._weights = decode.load(params, self._cfg, self._mesh)

  def reset(self) -> None:
    """Fresh zeros in the caches: no NaN of old weights stays."""
    self._caches = None
    self._caches = kv.make(
      self._cfg, self._shape.slots, self._shape.max_len, self._mesh
    )

  @property
  def nbytes(self) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(self._weights))

  def manifest(self) -> dict[str, str]:
    """Checksums of what is loaded, named as the trainer's parameters."""
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
    return *arrays, int(steps)

  def run(self, plan: Plan) -> int:
    """Evicts, restores, copies and prefills; returns the prefill calls."""
    calls = 0
    self._evict(plan)
    for level in plan.levels:
      self._copy(plan.copies.get(level, []))
      calls += self._prefill(plan.pieces.get(level, []))
    return calls

  def score(self, sequences: list[list[int]]) -> list[np.ndarray]:
    """Teacher-forced log-probs, float32 [n] of each sequence."""
    out = [None] * len(sequences)
    groups = {}
    for i, ids in enumerate(sequences):
      width = decode.fit(self._shape.score_widths, len(ids))
      groups.setdefault(width, []).append(i)
    for width, members in groups.items():
      rows = self._shape.rows(width)
      for batch in _batches(members, rows):
        ids = np.zeros((rows, width), np.int32)
        for row, i in enumerate(batch):
          ids[row, :len(sequences[i])] = sequences[i]
        logps = np.asarray(self._programs.score(self._weights, ids))
        for row, i in enumerate(batch):
          out[i] = logps[row, :len(sequences[i])].copy()
    return out

  def warmup(self) -> None:
    """Compiles every program; the caches keep what they hold."""
    p, shape = self._programs, self._shape
    self.decode(decode.idle_state(shape.slots))
    for width in shape.widths:
      args = self._arrays([], shape.rows(width), width)
      for program in (p.fresh, p.extend):
        self._caches = program(self._weights, self._caches, *args)
    none = self._slots([])
    self._caches = p.copy_rows(self._caches, none, none)
    rows = jax.device_get(p.take_rows(self._caches, none))
    self._caches = p.put_rows(self._caches, rows, none)
    for width in shape.score_widths:
      self.score([[0] * min(width, shape.max_len)])
    self.manifest()
    jax.block_until_ready(self._caches)

  def _slots(self, slots: list[int]):
    """Padded with a slot that does not exist, which scatters drop."""
    out = np.full(self._shape.prefill_rows, self._shape.slots, np.int32)
    out[:len(slots)] = slots
    return out

  def _evict(self, plan: Plan) -> None:
    for batch in _batches(plan.evictions, self._shape.prefill_rows):
      slots = self._slots([slot for slot, _ in batch])
      taken = jax.device_get(self._programs.take_rows(self._caches, slots))
      for i, (_, box) in enumerate(batch):
        box.data = [
          tuple(x[i][self._upto(names, box.length)].copy()
                for x, names in zip(pair, kv.axes(self._cfg)))
          for pair in taken
        ]

  @staticmethod
  def _upto(names: tuple[str, ...], n: int):
    """The first n positions of a row, which has no batch axis."""
    return tuple(slice(n) if a == 'time' else slice(None) for a in names[1:])

  def _copy(self, copies: list[Copy]) -> None:
    R, p = self._shape.prefill_rows, self._programs
    for batch in _batches([c for c in copies if c.box is None], R):
      self._caches = p.copy_rows(
        self._caches, self._slots([c.source for c in batch]),
        self._slots([c.target for c in batch]),
      )

    def empty(cache):
      return np.zeros((R, *cache.shape[1:]), cache.dtype)

    for batch in _batches([c for c in copies if c.box is not None], R):
      rows = jax.tree.map(empty, self._caches)
      for i, c in enumerate(batch):
        for pair, kept in zip(rows, c.box.data):
          for x, y, names in zip(pair, kept, kv.axes(self._cfg)):
            x[i][self._upto(names, c.box.length)] = y
      self._caches = p.put_rows(
        self._caches, rows, self._slots([c.target for c in batch])
      )

  def _prefill(self, pieces: list[Piece]) -> int:
    calls, groups = 0, {}
    for piece in pieces:
      width = decode.fit(self._shape.widths, len(piece.ids))
      groups.setdefault((piece.start == 0, width), []).append(piece)
    for (fresh, width), members in groups.items():
      program = self._programs.fresh if fresh else self._programs.extend
      rows = self._shape.rows(width)
      for batch in _batches(members, rows):
        self._caches = program(
          self._weights, self._caches, *self._arrays(batch, rows, width)
        )
        calls += 1
    return calls

  def _arrays(self, pieces: list[Piece], rows: int, width: int):
    """ids [rows, width], slots, start, lengths [rows] for a prefill."""
    ids = np.zeros((rows, width), np.int32)
    slots = np.full(rows, self._shape.slots, np.int32)
    start, lengths = np.zeros((2, rows), np.int32)
    for i, piece in enumerate(pieces):
      n = len(piece.ids)
      ids[i, :n] = piece.ids
      slots[i], start[i], lengths[i] = piece.slot, piece.start, n
    return ids, slots, start, lengths


def _batches(items: list, size: int):
  for i in range(0, len(items), size):
    yield items[i:i + size]
