"""The device programs of `dense_jax`: exact inner products over a corpus.

Rows are sharded over the devices of a mesh. A device ranks its rows in one of
two ways, and the best rows of all devices are merged:

  blocks   (CPUs) scores a block of rows against all queries, keeps the best c
           and continues with the next block.
  maxima   (accelerators) a kernel multiplies tiles of rows and queries and
           writes only the largest score of each group of `GROUP` rows. The c
           groups with the largest maxima contain the best c rows, since each
           of these groups has a member at least as good as any row of the
           other groups. Their members are scored again in float32, without a
           matrix product.

Estimate for an H200 (4.8 TB/s), 128 queries, 21M x 768 in 16 bits and c = 16:
reading the corpus (32.3 GB) takes 6.7 ms. Writing and reading all scores (10.8
GB) would take 4.5 ms more; the maxima (0.17 GB) and the rows scored again (0.2
GB) take 0.1 ms. Tiles of queries are read again from the L2 cache, which is
the limit: 48 GB, 8.8 ms at an assumed 5.5 TB/s.
`experiments.benchmarks.retrieval_gpu` measures it: 10M rows took 5.0 ms on one.

Of equal scores, the first in the corpus are kept at every step.
"""

import functools
import math

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from retrieval.files import require_one_of

PRECISIONS = ('float32', 'float16', 'bfloat16', 'int8')
GROUP = 64  # rows of one maximum; a block of rows is a multiple
ROWS = 512  # queries scored at once
_SCORE_BYTES = 16 << 20  # scores of a block: few selections, near the cache
_MAXIMA_BYTES = 1 << 30  # of maxima, and of rows scored again, at once
_LOADED = 1 << 14  # rows copied to an accelerator at once
# Tiles of the kernel on GPUs. Queries are read again for each tile of rows from
# the cache, so rows are the longer side.
_TILE, _TILE_QUERIES, _TILE_DIM, _STAGES = 256, 128, 32, 4
_EXACT = {'precision': 'highest', 'preferred_element_type': jnp.float32}
_TPU_TILE = 512  # TPU tiles of the output have 8 rows


def default_precision(platform: str) -> str:
  """The default precision of a device; 16 bits need half the bandwidth.

  Passages are stored in float32 or float16. float16 has a relative rounding
  error of at most 2^-11, which changes a score of unit vectors of 768 numbers
  by about 2^-11 / sqrt(3 x 768) = 1e-5. bfloat16 has 8 times that error, but
  TPUs cannot multiply float16.
  """
  return {'cpu': 'float32', 'tpu': 'bfloat16'}.get(platform, 'float16')


class Programs:
  """Search over P rows of D numbers, for one mesh; holds no vectors.

  Attributes:
    precision: of the rows.
    blocks, block: a device has blocks x block rows, with padding.
    shard: rows of a device without padding.
    dim: D, padded to a multiple of what the kernel needs.
    maxima: whether rows are ranked by maxima, see the module.
    host: whether the host scores the candidates again: on CPU, where the
      vectors are in memory, and for int8, whose scores are imprecise.
  """

  def __init__(
    self, count: int, dim: int, mesh, precision, *, maxima=None, platform=None
  ):
    """Computes the layout of the rows.

    Args:
      count: P.
      dim: D.
      mesh: the devices.
      precision: of the rows, one of `PRECISIONS`; None: `default_precision`.
      maxima: see the module; None: on accelerators.
      platform: target of the programs; None: that of the mesh.

    Raises:
      ValueError: an unknown precision.
    """
    if precision is None:
      precision = default_precision(mesh.devices.flat[0].platform)
    require_one_of('precision', precision, PRECISIONS)
    self.count, self.precision = count, precision
    self.mesh = Mesh(mesh.devices.reshape(-1), ('data',))
    self.platform = platform or self.mesh.devices[0].platform
    cpu = self.platform == 'cpu'
    self.maxima = not cpu if maxima is None else maxima
    self.host = precision == 'int8' or not self.maxima
    # CPUs are fastest in float32, accelerators in 16 bits.
    if precision == 'int8' or cpu and precision == 'float16':
      self._dtype = jnp.dtype('float32' if cpu else 'bfloat16')
    else:
      self._dtype = jnp.dtype(precision)
    self.shard = -(-count // self.mesh.size)
    self.dim, self._rows = dim, ROWS
    if self.maxima:
      self.dim = -(-dim // _TILE_DIM) * _TILE_DIM
      align = GROUP * GROUP  # maxima are grouped again, see `_top`
      self.blocks = -(-self.shard // _LOADED)
      groups = self.blocks * _LOADED // GROUP
      most = max(1, _MAXIMA_BYTES // (4 * groups))
      self._rows = min(ROWS, max(16, 1 << most.bit_length() - 1))
    else:
      align = GROUP
      columns = _SCORE_BYTES // (4 * ROWS) // align * align
      # A power of two, since blocks are joined for few queries.
      self.blocks = 1 << (-(-self.shard // columns) - 1).bit_length()
    self.block = -(-self.shard // (self.blocks * align)) * align

  def arrays(self) -> dict[str, jax.ShapeDtypeStruct]:
    """The corpus as `search` expects it: [devices x blocks, block, dim]."""
    shape = (self.mesh.size * self.blocks, self.block, self.dim)
    sharding = NamedSharding(self.mesh, PartitionSpec('data'))
    kinds = {'rows': (shape, self.precision)}
    if self.precision == 'int8':
      kinds['scale'] = shape[:2], 'float32'
    struct = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    return {k: struct(s, jnp.dtype(kind)) for k, (s, kind) in kinds.items()}

  def search(self, q: jax.Array, corpus: dict[str, jax.Array], c: int):
    """Finds the best c rows of each query; traceable.

    Args:
      q: float32 [R, D], R a power of two or at most `ROWS`.
      corpus: see `arrays`.
      c: rows to find, static.

    Returns:
      scores: float32 [R, c], best first. With `maxima` the inner products of
        the float32 queries and the rows as they are stored; else in the
        precision of the product.
      ids: int32 [R, c], rows of the corpus.
    """
    spec = PartitionSpec
    q = jnp.pad(q, ((0, 0), (0, self.dim - q.shape[1])))
    scores, ids = jax.shard_map(
      lambda q, corpus: self._best_of_shard(q, corpus, c),
      mesh=self.mesh,
      in_specs=(spec(), spec('data')),
      out_specs=spec(None, 'data'),
      check_vma=False,
    )(q, corpus)
    return _merge(scores, ids, c)

  def _best_of_shard(self, q, corpus, c):
    if len(q) > self._rows:
      parts = q.reshape(-1, self._rows, q.shape[1])
      found = jax.lax.map(lambda q: self._best_of_shard(q, corpus, c), parts)
      return tuple(x.reshape(len(q), -1) for x in found)
    first = jax.lax.axis_index('data') * self.shard
    size = jnp.clip(self.count - first, 0, self.shard)
    best = self._by_maxima if self.maxima else self._by_blocks
    scores, ids = best(q, corpus, size, c)
    return scores, ids + first

  def _by_blocks(self, q, corpus, size, c):
    """The best c of each block, then of all."""
    q = q.astype(self._dtype)
    joined = min(self.blocks, 1 << (ROWS // len(q)).bit_length() - 1)
    columns = joined * self.block
    parts = jax.tree.map(lambda x: x.reshape(-1, columns, *x.shape[2:]), corpus)

    def block(at):
      start, part = at[0] * columns, at[1]
      rows = part['rows'].astype(self._dtype)
      scores = jnp.einsum('qd,pd->qp', q, rows, **_EXACT)
      if 'scale' in part:
        scores *= part['scale']
      scores, ids = _top(scores, size - start, c)
      return scores, ids + start

    found = jax.lax.map(block, (jnp.arange(self.blocks // joined), parts))
    scores, ids = (jnp.moveaxis(x, 0, 1).reshape(len(q), -1) for x in found)
    return _merge(scores, ids, c)

  def _by_maxima(self, q, corpus, size, c):
    """Ranks by the maxima of all groups, then members of the best c groups."""
    groups = jax.tree.map(lambda x: x.reshape(-1, GROUP, *x.shape[2:]), corpus)
    best = _top(self._maxima(q, corpus), -(-size // GROUP), c)[1]
    best = jnp.sort(best, 1)  # keeps ties in corpus order

    def again(at):
      q, best = at
      number = best[:, None] * GROUP + jnp.arange(GROUP)
      # Not a matrix product, in which rounding depends on the position.
      scores = (q * groups['rows'][best].astype(jnp.float32)).sum(-1)
      if 'scale' in groups:
        scores *= groups['scale'][best]
      scores = jnp.where(number < size, scores, -jnp.inf)
      return _merge(scores.reshape(1, -1), number.reshape(1, -1), c)

    room = best.shape[1] * GROUP * self.dim * groups['rows'].dtype.itemsize
    most = 1 << max(1, _MAXIMA_BYTES // room).bit_length() - 1
    found = jax.lax.map(again, (q, best), batch_size=min(len(q), most))
    return tuple(x[:, 0] for x in found)

  def _maxima(self, q, corpus):
    """float32 [R, groups]: the largest score of each group of rows."""
    parts = [corpus['rows'].reshape(-1, self.dim)]
    if 'scale' in corpus:
      parts.append(corpus['scale'].reshape(-1, 1))
    # Triton needs at least 16 columns.
    padded = jnp.pad(q, ((0, max(0, 16 - len(q))), (0, 0))).astype(self._dtype)
    tpu = self.platform == 'tpu'
    # Without tensor cores, a larger tile does not fit into the registers.
    few = self._dtype == jnp.float32 and not tpu
    queries = math.gcd(len(padded), 16 if few else _TILE_QUERIES)
    turns = len(padded) // queries
    tile = _TPU_TILE if tpu else _TILE
    step = self.dim if tpu else _TILE_DIM
    exact = 'highest' if self._dtype == jnp.float32 else None

    def kernel(q, rows, *rest):
      *scale, out = rest

      def add(n, scores):
        at = (slice(None), pl.ds(n * step, step))
        product = (((1,), (1,)), ((), ()))
        options = {'precision': exact, 'preferred_element_type': jnp.float32}
        part = rows[at].astype(q.dtype)
        return scores + jax.lax.dot_general(part, q[at], product, **options)

      scores = jnp.zeros((tile, queries), jnp.float32)
      scores = jax.lax.fori_loop(0, self.dim // step, add, scores)
      if scale:
        scores *= scale[0][...]
      out[...] = scores.reshape(tile // GROUP, GROUP, queries).max(1)

    # All queries of a tile of rows follow each other, while it is cached.
    of_rows = lambda i: (jax.lax.div(i, turns), 0)
    of_queries = lambda i: (jax.lax.rem(i, turns), 0)
    of_both = lambda i: (jax.lax.div(i, turns), jax.lax.rem(i, turns))
    groups = len(parts[0]) // GROUP
    params = triton.CompilerParams(num_warps=8, num_stages=_STAGES)
    maxima = pl.pallas_call(
      kernel,
      out_shape=jax.ShapeDtypeStruct((groups, len(padded)), jnp.float32),
      grid=(len(parts[0]) // tile * turns,),
      in_specs=[
        pl.BlockSpec((queries, self.dim), of_queries),
        *(pl.BlockSpec((tile, x.shape[1]), of_rows) for x in parts),
      ],
      out_specs=pl.BlockSpec((tile // GROUP, queries), of_both),
      interpret=self.platform == 'cpu',
      compiler_params=None if tpu else params,
    )(padded, *parts)
    return maxima.T[: len(q)]


def _merge(scores, ids, c):
  """The best min(c, N) of [R, N]."""
  scores, at = jax.lax.top_k(scores, min(c, scores.shape[1]))
  return scores, jnp.take_along_axis(ids, at, 1)


def _top(scores, size, c):
  """The best c of the first `size` columns of each row, ties in order.

  Scores are masked where they are read, to avoid writing all of them again.
  """
  rows, columns = scores.shape
  c = min(c, columns)
  # About as many groups as members of the c best groups.
  members = min(GROUP, 1 << max(0, (columns // c).bit_length() // 2))
  groups = columns // members
  number = jnp.arange(columns)
  if members == 1 or c > groups:
    return jax.lax.top_k(jnp.where(number < size, scores, -jnp.inf), c)
  grouped = scores.reshape(rows, groups, members)
  number = number.reshape(groups, members)
  maxima = jnp.where(number < size, grouped, -jnp.inf).max(2)
  best = jax.lax.top_k(maxima, c)[1]
  best = -jax.lax.top_k(-best, c)[0]  # columns in order keep ties in order
  inside = jnp.take_along_axis(grouped, best[:, :, None], 1)
  inside = jnp.where(number[best] < size, inside, -jnp.inf)
  scores, at = jax.lax.top_k(inside.reshape(rows, -1), c)
  return scores, jnp.take_along_axis(number[best].reshape(rows, -1), at, 1)
