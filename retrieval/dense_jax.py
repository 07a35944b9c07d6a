"""Exact inner-product search on the accelerators of this process.

The corpus lies over all devices; `dense_programs` says how a device ranks its
rows, and in which precision by default. On accelerators what comes back is
final: the float32 query with the vectors as the device stores them, summed in
float32. On CPU, and for int8, the host scores the candidates again from its
own vectors: that gives what rounding blurred, and gives equal passages equal
scores.
"""

from collections.abc import Callable, Iterable, Sequence
import functools
import hashlib
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from retrieval.dense_programs import (
  PRECISIONS,
  ROWS,
  Programs,
  default_precision,
)
from retrieval.devices import data_mesh, put
from retrieval.encoder import Encoder
from retrieval.metrics import stage

__all__ = ['PRECISIONS', 'DenseJax']
_GATHER_BYTES = 1 << 20  # of vectors scored again at once, by the host


class DenseJax:
  """An index over P vectors; see `retrieval.core.Index`."""

  name = 'dense_jax'

  def __init__(
    self,
    vectors: np.ndarray,
    encoder: Encoder | None,
    *,
    precision: str | None = None,
    mesh: Mesh | None = None,
    rescore: int | None = None,
    maxima: bool | None = None,
  ):
    """Puts the vectors on the devices.

    Args:
      vectors: float32 or float16 [P, D], or a JAX array; kept where the host
        scores again: a memory map stays on disk.
      encoder: of queries; None where only `search_vectors` is used.
      precision: of the vectors on the device: float32, float16, bfloat16, or
        int8 with a scale for each row; None: float32 on CPU, float16 on GPUs,
        bfloat16 on TPUs.
      mesh: the devices; None: all of this process.
      rescore: candidates scored again in float32, at least k; None: 0 for
        float32, 16 where the device does that, else 64.
      maxima: how to rank, see `dense_programs`; None: by the device.

    Raises:
      ValueError: a shape or an option that cannot be; the message names it.
    """
    if vectors.ndim != 2 or not len(vectors):
      raise ValueError(
        f'vectors has shape {vectors.shape}; expected [P, D], P >= 1'
      )
    if encoder is not None and encoder.dim != vectors.shape[1]:
      raise ValueError(
        f'vectors have {vectors.shape[1]} dimensions, the encoder '
        f'{encoder.dim}; encode the corpus with this encoder'
      )
    mesh = data_mesh() if mesh is None else mesh
    if precision is None:
      precision = default_precision(mesh.devices.flat[0].platform)
    self._plan = plan = Programs(*vectors.shape, mesh, precision, maxima=maxima)
    if rescore is None:
      rescore = 0 if precision == 'float32' else 64 if plan.host else 16
    if rescore < 0:
      raise ValueError(f'rescore={rescore}; expected >= 0')
    self.precision, self.rescore = precision, rescore
    self._vectors, self._encoder, self._mesh = vectors, encoder, plan.mesh
    rows = np.linspace(0, len(vectors) - 1, min(64, len(vectors))).astype(int)
    sample = np.asarray(vectors[rows])
    self._sample = hashlib.sha256(sample.tobytes()).hexdigest()
    self._corpus = self._load()
    self._params = None
    if encoder is not None:
      self._params = jax.device_put(
        encoder.params, NamedSharding(self._mesh, PartitionSpec())
      )
    self._search = jax.jit(plan.search, static_argnames='c')
    self._encode_and_search = jax.jit(self._fused, static_argnames='c')

  @property
  def parameters(self) -> dict[str, Any]:
    found = {
      'name': self.name,
      'precision': self.precision,
      'rescore': self.rescore,
      'vectors': str(self._vectors.dtype),
      'sample_sha256': self._sample,
    }
    if self._encoder is not None:
      found |= {
        'encoder': self._encoder.parameters,
        'encoder_dtype': self._encoder.dtype,
        'query_length': self._encoder.query_length,
      }
    return found

  def __len__(self) -> int:
    return len(self._vectors)

  def search(
    self, queries: Sequence[str], k: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """See `retrieval.core.Index.search`."""
    if self._encoder is None:
      raise ValueError('this index has no encoder; use search_vectors')
    c = self._candidates(k)
    with stage('search'):
      found = []
      for at, *batch in self._encoder.batches(queries, 'query'):
        batch = put(self._mesh, *batch)
        found.append(
          (at, self._encode_and_search(self._params, *batch, self._corpus, c))
        )
      return self._finish(found, len(queries), c, k)

  def programs(self, count: int, ks: Iterable[int]) -> list[Callable[[], None]]:
    """Calls, each of which compiles one program or loads it from the disk.

    They may run in any threads. After all of them, `search` compiles nothing
    for at most `count` queries of any length and a k of `ks`.
    """
    return [
      functools.partial(self._compile, R, T, c)
      for c in sorted({self._candidates(k) for k in ks})
      for R, T in self._encoder.shapes(count)
    ]

  def _compile(self, R: int, T: int, c: int) -> None:
    batch = self._encoder.blank(R, T)
    self._encode_and_search.lower(
      self._params, *batch, self._corpus, c
    ).compile()

  def search_vectors(
    self, q: np.ndarray, k: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """The same for vectors of queries, [Q, D]."""
    c = self._candidates(k)
    q = np.asarray(q, np.float32)
    with stage('search'):
      found = []
      for start in range(0, len(q), ROWS):
        part = q[start : start + ROWS]
        rows = min(r for r in (1, 8, 32, 128, ROWS) if r >= len(part))
        padded = np.zeros((rows, q.shape[1]), np.float32)
        padded[: len(part)] = part
        at = np.arange(start, start + len(part))
        padded = put(self._mesh, padded)[0]
        found.append((at, (padded, self._search(padded, self._corpus, c))))
      return self._finish(found, len(q), c, k)

  def _candidates(self, k: int) -> int:
    """How many each query gets to keep: few different ones, few programs."""
    if k < 1:
      raise ValueError(f'k={k} must be at least 1')
    # What rescoring is to mend needs candidates beyond k.
    c = max(k if self.precision == 'float32' else 2 * k, self.rescore)
    c = min(c, len(self))
    c = 4 if c <= 4 else max(16, 1 << (c - 1).bit_length())
    return min(len(self), c)

  def _finish(self, found, queries: int, c: int, k: int):
    """The best k in order; scored again, float32, where the host does that."""
    k = min(k, len(self))
    ids = np.empty((queries, k), np.int64)
    scores = np.empty((queries, k), np.float32)
    step = max(1, _GATHER_BYTES // (4 * c * self._vectors.shape[1]))
    for at, (q, (first, best)) in found:
      q, first, best = map(np.asarray, (q, first, best))
      for start in range(0, len(at), step):
        rows = slice(start, min(start + step, len(at)))
        score = first[rows]
        if self._plan.host:
          near = np.asarray(self._vectors[best[rows]], np.float32)
          # Not a matrix product: there a score depends on its place.
          score = np.einsum('qd,qcd->qc', q[rows], near)
        order = np.lexsort((best[rows], -score))[:, :k]
        ids[at[rows]] = np.take_along_axis(best[rows], order, 1)
        scores[at[rows]] = np.take_along_axis(score, order, 1)
    return ids, scores

  def _load(self) -> dict[str, jax.Array]:
    """The corpus on the devices: rows [devices x blocks, block, D]."""
    plan, arrays = self._plan, self._plan.arrays()
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays.values())
    self._require_room(size // self._mesh.size)
    shards: dict[str, list[jax.Array]] = {name: [] for name in arrays}
    rows = arrays['rows']
    where = rows.sharding.addressable_devices_indices_map(rows.shape)
    for device, index in where.items():
      part = {
        name: jnp.zeros((plan.blocks, *x.shape[1:]), x.dtype, device=device)
        for name, x in arrays.items()
      }
      first = (index[0].start or 0) // plan.blocks * plan.shard
      end = min(first + plan.shard, len(self._vectors))
      # One block on the host at a time, and no second copy on the device.
      for n, start in enumerate(range(first, end, plan.block)):
        block = self._vectors[start : min(start + plan.block, end)]
        for name, x in self._converted(block, start, rows.dtype).items():
          # The last row again: a group's maximum is one of its rows.
          x = np.pad(
            x, [(0, plan.block - len(x))] + [(0, 0)] * (x.ndim - 1), 'edge'
          )
          part[name] = _put_block(part[name], x, np.int32(n))
        jax.block_until_ready(part)
      for name, x in part.items():
        shards[name].append(x)
    return {
      name: jax.make_array_from_single_device_arrays(
        x.shape, x.sharding, shards[name]
      )
      for name, x in arrays.items()
    }

  def _converted(
    self, block: np.ndarray, start: int, kind: np.dtype
  ) -> dict[str, np.ndarray]:
    """Vectors [n, D] from row `start` on, as the device has them."""
    block = np.asarray(block, np.float32)
    wide = ((0, 0), (0, self._plan.dim - block.shape[1]))
    if self.precision != 'int8':
      with np.errstate(over='ignore'):
        rows = block.astype(kind)
      bad = np.flatnonzero(~np.isfinite(rows).all(-1))
      if len(bad):
        raise ValueError(
          f'vectors: row {start + bad[0]} is not finite in {self.precision}; '
          'use bfloat16 or float32 (--precision), or encode the corpus again'
        )
      return {'rows': np.pad(rows, wide)}
    largest = np.abs(block).max(-1)
    scale = np.where(largest > 0, largest, 1) / np.float32(127)
    rows = np.rint(block / scale[:, None]).astype(kind)
    return {'rows': np.pad(rows, wide), 'scale': scale}

  def _require_room(self, size: int) -> None:
    stats = self._mesh.devices[0].memory_stats() or {}  # None on CPU
    room = stats.get('bytes_limit')
    if room and size > room:
      raise ValueError(
        f'precision={self.precision!r}: the vectors take {size / 1e9:.1f} GB '
        f'of each device, which has {room / 1e9:.1f} GB. Use float16 or int8 '
        '(--precision), more devices, or dense_faiss'
      )

  def _fused(self, params, ids, lengths, corpus, c):
    q = self._encoder.embed(params, ids, lengths)
    return q, self._plan.search(q, corpus, c)


@functools.partial(jax.jit, donate_argnums=0)
def _put_block(blocks, block, n):
  """`blocks` with `block` as its n-th, in the same memory."""
  return jax.lax.dynamic_update_index_in_dim(blocks, block, n, 0)
