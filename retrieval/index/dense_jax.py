"""Exact inner-product search on the accelerators of this process.

The corpus is sharded over all devices; `dense_programs` defines how a device
ranks its rows, and the default precision. On accelerators the scores of the
device are final: the float32 query with the vectors as the device stores them,
summed in float32. On CPU, and for int8, the host scores the candidates again
from its own vectors, which undoes rounding and gives equal passages equal
scores.
"""

from collections.abc import Callable, Iterable, Sequence
import functools
import hashlib
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from retrieval.core import Ranked, check_k
from retrieval.devices import data_mesh, put, replicate
from retrieval.index import bert
from retrieval.index import encoder as encoders
from retrieval.index import vectors as vectors_lib
from retrieval.index.dense_programs import PRECISIONS, ROWS, Programs
from retrieval.index.encoder import Encoder
from retrieval.metrics import stage

__all__ = ['PRECISIONS', 'DenseJax']
_GATHER_BYTES = 1 << 20  # of vectors scored again at once by the host


class DenseJax(vectors_lib.DenseIndex):
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
      vectors: float32 or float16 [P, D], or a JAX array; kept if the host
        scores again (a memory map stays on disk).
      encoder: of queries; None if only `search_vectors` is used.
      precision: of the vectors on the device: float32, float16, bfloat16, or
        int8 with a scale for each row; None: see `Programs`.
      mesh: the devices; None: all of this process.
      rescore: candidates scored again in float32, at least k; None: 0 for
        float32, 16 if the device does that, else 64.
      maxima: how to rank, see `dense_programs`; None: by the device.

    Raises:
      ValueError: an invalid shape or option; the message names it.
    """
    mesh = data_mesh() if mesh is None else mesh
    self._plan = plan = Programs(*vectors.shape, mesh, precision, maxima=maxima)
    self.precision = precision = plan.precision
    if rescore is None:
      rescore = 0 if precision == 'float32' else 64 if plan.host else 16
    rows = np.linspace(0, len(vectors) - 1, min(64, len(vectors))).astype(int)
    sample = hashlib.sha256(np.asarray(vectors[rows]).tobytes()).hexdigest()
    about = {'precision': precision, 'rescore': rescore}
    about |= {'vectors': str(vectors.dtype), 'sample_sha256': sample}
    super().__init__(encoder, vectors.shape, 'vectors have', **about)
    self.rescore, self._vectors, self._mesh = rescore, vectors, plan.mesh
    self._corpus = self._load()
    self._params = encoder and replicate(self._mesh, encoder.params)
    self._search = jax.jit(plan.search, static_argnames='c')
    self._encode_and_search = jax.jit(self._fused, static_argnames='c')

  def search(self, queries: Sequence[str], k: int) -> Ranked:
    """See `core.Index.search`."""
    c = self._candidates(k)
    run = functools.partial(self._encode_and_search, self._params)
    with stage('search'):
      batches = self._encoder.batches(queries, 'query')
      place = functools.partial(put, self._mesh)
      found = [(at, run(*place(*b), self._corpus, c)) for at, *b in batches]
      return self._finish(found, len(queries), c, k)

  def programs(self, count: int, ks: Iterable[int]) -> list[Callable[[], None]]:
    """Functions that each compile a program or load it from the disk.

    They may run in any threads. After all of them, `search` compiles nothing
    for at most `count` queries of any length and a k of `ks`.
    """

    def build(shape: tuple[int, int], c: int) -> None:
      args = self._params, *self._encoder.blank(*shape), self._corpus, c
      self._encode_and_search.lower(*args).compile()

    shapes, cs = self._encoder.shapes(count), {self._candidates(k) for k in ks}
    return [functools.partial(build, s, c) for c in sorted(cs) for s in shapes]

  def search_vectors(self, q: np.ndarray, k: int) -> Ranked:
    """`search` for vectors of queries, [Q, D]."""
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
    """Candidates per query: few different numbers, so few programs."""
    check_k(k)
    # Rescoring needs candidates beyond k.
    c = max(k if self.precision == 'float32' else 2 * k, self.rescore)
    c = min(c, len(self))
    c = 4 if c <= 4 else max(16, 1 << (c - 1).bit_length())
    return min(len(self), c)

  def _finish(self, found, queries: int, c: int, k: int):
    """The best k in order; scored again in float32 if the host does that."""
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
          # Not a matrix product, in which rounding depends on the position.
          score = np.einsum('qd,qcd->qc', q[rows], near)
        order = np.lexsort((best[rows], -score))[:, :k]
        ids[at[rows]] = np.take_along_axis(best[rows], order, 1)
        scores[at[rows]] = np.take_along_axis(score, order, 1)
    return ids, scores

  def _load(self) -> dict[str, jax.Array]:
    """Puts the corpus on the devices: rows [devices x blocks, block, D]."""
    plan, arrays = self._plan, self._plan.arrays()
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays.values())
    size //= self._mesh.size
    stats = self._mesh.devices[0].memory_stats() or {}  # None on CPU
    room = stats.get('bytes_limit')
    if room and size > room:
      need = f'{size / 1e9:.1f} GB of each device, of {room / 1e9:.1f} GB'
      fix = 'Use float16 or int8, more devices, or dense_faiss'
      raise ValueError(f'precision={self.precision!r}: needs {need}. {fix}')
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
      # One block on the host at a time and no second copy on the device.
      for n, start in enumerate(range(first, end, plan.block)):
        block = self._vectors[start : min(start + plan.block, end)]
        for name, x in self._converted(block, start, rows.dtype).items():
          # Padded with the last row: a maximum of a group is one of its rows.
          pad = [(0, plan.block - len(x))] + [(0, 0)] * (x.ndim - 1)
          x = np.pad(x, pad, 'edge')
          part[name] = _put_block(part[name], x, np.int32(n))
        jax.block_until_ready(part)
      for name, x in part.items():
        shards[name].append(x)
    join = jax.make_array_from_single_device_arrays
    return {k: join(x.shape, x.sharding, shards[k]) for k, x in arrays.items()}

  def _converted(self, block, start: int, kind) -> dict[str, np.ndarray]:
    """Vectors [n, D] from row `start` on, as the device stores them."""
    block = np.asarray(block, np.float32)
    wide = ((0, 0), (0, self._plan.dim - block.shape[1]))
    if self.precision != 'int8':
      with np.errstate(over='ignore'):
        rows = block.astype(kind)
      if (bad := vectors_lib.not_finite(rows)) is not None:
        problem = f'row {start + bad} is not finite in {self.precision}'
        raise ValueError(f'vectors: {problem}; use --precision=float32')
      return {'rows': np.pad(rows, wide)}
    largest = np.abs(block).max(-1)
    scale = np.where(largest > 0, largest, 1) / np.float32(127)
    rows = np.rint(block / scale[:, None]).astype(kind)
    return {'rows': np.pad(rows, wide), 'scale': scale}

  def _fused(self, params, ids, lengths, corpus, c):
    q = self._encoder.embed(params, ids, lengths)
    return q, self._plan.search(q, corpus, c)


def trace(
  mesh: Mesh, cfg: bert.BertConfig, family: str, count: int, rows: int, c: int
) -> jax.stages.Traced:
  """The program of `DenseJax.search`, from shapes alone.

  Args:
    mesh: the devices.
    cfg, family: of the encoder, in bfloat16.
    count: passages.
    rows: queries, of at most 64 tokens.
    c: candidates for a query.
  """
  plan = Programs(count, cfg.hidden_size, mesh, None)
  usage = encoders.FAMILIES[family]

  def _fused(params, ids, lengths, corpus):
    q = encoders.embed(params, cfg, usage, ids, lengths)
    return q, plan.search(q, corpus, c)

  def place(x, *axes):
    where = NamedSharding(plan.mesh, PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

  params = jax.tree.map(place, bert.shapes(cfg, jnp.bfloat16))
  texts = np.zeros((rows, 64), np.int32), np.zeros(rows, np.int32)
  texts = [place(x, 'data') for x in texts]
  return jax.jit(_fused).trace(params, *texts, plan.arrays())


@functools.partial(jax.jit, donate_argnums=0)
def _put_block(blocks, block, n):
  """Replaces the n-th of `blocks` in place."""
  return jax.lax.dynamic_update_index_in_dim(blocks, block, n, 0)
