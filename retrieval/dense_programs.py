"""The device programs of `dense_jax`: exact inner products over a corpus.

Rows are spread over the devices of a mesh. A device ranks its own in one of
two ways, and the devices' best are merged:

  blocks   scores a block of rows against all queries, keeps the best c, and
           takes the next block: CPUs.
  maxima   a kernel multiplies tiles of rows and queries and writes only the
           largest score of each `GROUP` rows; the c groups with the largest
           maxima hold the best c (each of these has a member at least as good
           as any in the others), and their members are scored again, in
           float32 and without a matrix product: accelerators.

By arithmetic for an H200 (4.8 TB/s), 128 queries, 21M x 768 in 16 bits and
c = 16: the corpus takes 32.3 GB, 6.7 ms. All scores would be 10.8 GB, written
and read: 4.5 ms more. Maxima are 0.17 GB, the second scores read 0.2 GB: 0.1
ms. Tiles of queries, read again from the L2, make that the limit: 48 GB, 8.8
ms at an assumed 5.5 TB/s. `experiments.benchmarks.retrieval_aot` compiles the
program for that device; it has not run on one.

Of equal scores the first in the corpus are kept, at every step.
"""

import math

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

PRECISIONS = ('float32', 'float16', 'bfloat16', 'int8')
GROUP = 64  # rows that leave one maximum; a block of rows is a multiple
ROWS = 512  # queries scored at once
_SCORE_BYTES = 16 << 20  # of a block: fewer selections, and near the cache
_MAXIMA_BYTES = 1 << 30  # of maxima, and of rows scored again, at once
_LOADED = 1 << 14  # rows that go to an accelerator at once
# Of the kernel, on GPUs: queries are read again for each tile of rows, from
# the cache, so that rows are the longer side.
_TILE, _TILE_QUERIES, _TILE_DIM, _STAGES = 256, 128, 32, 4
_TPU_TILE = 512  # the output's tiles have 8 rows there


def default_precision(platform: str) -> str:
  """Of a device: 16 bits read half of what float32 does.

  Passages are stored in float32 or float16. float16 rounds a number by at
  most 2^-11 of it, so a score of unit vectors of 768 numbers by about
  2^-11 / sqrt(3 x 768) = 1e-5; bfloat16 by 8 times as much, but TPUs multiply
  no float16.
  """
  return {'cpu': 'float32', 'tpu': 'bfloat16'}.get(platform, 'float16')


class Programs:
  """Search over P rows of D numbers, for one mesh; holds no vectors.

  Attributes:
    blocks, block: a device has blocks x block rows, with padding.
    shard: rows of a device without padding.
    dim: D, padded to what the kernel takes.
    maxima: which way, see the module.
    host: the host scores the candidates again: on CPU, where the vectors are
      in memory, and for int8, whose scores are blurred.
  """

  def __init__(
    self,
    count: int,
    dim: int,
    mesh: Mesh,
    precision: str,
    *,
    maxima: bool | None = None,
    platform: str | None = None,
  ):
    """Lays the rows out.

    Args:
      count: P.
      dim: D.
      mesh: the devices.
      precision: of the rows, one of `PRECISIONS`.
      maxima: see the module; None: on accelerators.
      platform: that the programs are lowered for; None: the mesh's.

    Raises:
      ValueError: an unknown precision.
    """
    if precision not in PRECISIONS:
      raise ValueError(
        f'precision={precision!r}; expected {", ".join(PRECISIONS)}'
      )
    self.count, self.precision = count, precision
    self.mesh = Mesh(mesh.devices.reshape(-1), ('data',))
    self.platform = platform or self.mesh.devices[0].platform
    cpu = self.platform == 'cpu'
    self.maxima = not cpu if maxima is None else maxima
    self.host = precision == 'int8' or not self.maxima
    # CPUs multiply float32 fastest, accelerators 16 bits.
    self._dtype = jnp.dtype('bfloat16' if precision == 'int8' else precision)
    if cpu and precision in ('float16', 'int8'):
      self._dtype = jnp.dtype('float32')
    self.shard = -(-count // self.mesh.size)
    self.dim, self._rows = dim, ROWS
    if self.maxima:
      self.dim = -(-dim // _TILE_DIM) * _TILE_DIM
      align = GROUP * GROUP  # maxima come in groups of their own, see `_top`
      self.blocks = -(-self.shard // _LOADED)
      groups = self.blocks * _LOADED // GROUP
      most = max(1, _MAXIMA_BYTES // (4 * groups))
      self._rows = min(ROWS, max(16, 1 << most.bit_length() - 1))
    else:
      align = GROUP
      columns = _SCORE_BYTES // (4 * ROWS) // align * align
      # A power of two: for fewer queries blocks are joined into larger ones.
      self.blocks = 1 << (-(-self.shard // columns) - 1).bit_length()
    self.block = -(-self.shard // (self.blocks * align)) * align

  def arrays(self) -> dict[str, jax.ShapeDtypeStruct]:
    """The corpus as `search` takes it: [devices x blocks, block, dim]."""
    shape = (self.mesh.size * self.blocks, self.block, self.dim)
    sharding = NamedSharding(self.mesh, PartitionSpec('data'))
    kinds = {'rows': (shape, self.precision)}
    if self.precision == 'int8':
      kinds['scale'] = shape[:2], 'float32'
    return {
      name: jax.ShapeDtypeStruct(s, jnp.dtype(kind), sharding=sharding)
      for name, (s, kind) in kinds.items()
    }

  def search(
    self, q: jax.Array, corpus: dict[str, jax.Array], c: int
  ) -> tuple[jax.Array, jax.Array]:
    """The best c rows of each query; traceable.

    Args:
      q: float32 [R, D], R a power of two or at most `ROWS`.
      corpus: see `arrays`.
      c: rows to find, static.

    Returns:
      scores: float32 [R, c], best first. With `maxima` the inner products of
        the float32 queries and the rows as they are stored; else of what was
        multiplied.
      ids: int32 [R, c], numbers of rows in the corpus.
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
    corpus = {
      name: x.reshape(-1, columns, *x.shape[2:]) for name, x in corpus.items()
    }

    def block(at):
      start, part = at[0] * columns, at[1]
      scores = jnp.einsum(
        'qd,pd->qp',
        q,
        part['rows'].astype(self._dtype),
        precision='highest',
        preferred_element_type=jnp.float32,
      )
      if 'scale' in part:
        scores *= part['scale']
      scores, ids = _top(scores, size - start, c)
      return scores, ids + start

    found = jax.lax.map(block, (jnp.arange(self.blocks // joined), corpus))
    scores, ids = (jnp.moveaxis(x, 0, 1).reshape(len(q), -1) for x in found)
    return _merge(scores, ids, c)

  def _by_maxima(self, q, corpus, size, c):
    """The maxima of all groups, then the members of the best c groups."""
    groups = {
      name: x.reshape(-1, GROUP, *x.shape[2:]) for name, x in corpus.items()
    }
    best = _top(self._maxima(q, corpus), -(-size // GROUP), c)[1]
    best = jnp.sort(best, 1)  # in corpus order, so that ties are

    def again(at):
      q, best = at
      number = best[:, None] * GROUP + jnp.arange(GROUP)
      # Not a matrix product: there a score depends on its place.
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
    # Triton multiplies no fewer than 16 columns.
    padded = jnp.pad(q, ((0, max(0, 16 - len(q))), (0, 0))).astype(self._dtype)
    tpu = self.platform == 'tpu'
    # Without tensor cores a tile of so many numbers fits no registers.
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
        return scores + jax.lax.dot_general(
          rows[at].astype(q.dtype),
          q[at],
          (((1,), (1,)), ((), ())),
          precision=exact,
          preferred_element_type=jnp.float32,
        )

      scores = jax.lax.fori_loop(
        0, self.dim // step, add, jnp.zeros((tile, queries), jnp.float32)
      )
      if scale:
        scores *= scale[0][...]
      out[...] = scores.reshape(tile // GROUP, GROUP, queries).max(1)

    options = {}
    if not tpu:
      options['compiler_params'] = triton.CompilerParams(
        num_warps=8, num_stages=_STAGES
      )
    maxima = pl.pallas_call(
      kernel,
      out_shape=jax.ShapeDtypeStruct(
        (len(parts[0]) // GROUP, len(padded)), jnp.float32
      ),
      # All queries of a tile of rows together, while the cache has it.
      grid=(len(parts[0]) // tile * turns,),
      in_specs=[
        pl.BlockSpec((queries, self.dim), lambda i: (jax.lax.rem(i, turns), 0)),
        *(
          pl.BlockSpec((tile, x.shape[1]), lambda i: (jax.lax.div(i, turns), 0))
          for x in parts
        ),
      ],
      out_specs=pl.BlockSpec(
        (tile // GROUP, queries),
        lambda i: (jax.lax.div(i, turns), jax.lax.rem(i, turns)),
      ),
      interpret=self.platform == 'cpu',
      **options,
    )(padded, *parts)
    return maxima.T[: len(q)]


def _merge(scores, ids, c):
  """The best c, or all where they are fewer, of [R, N]."""
  scores, at = jax.lax.top_k(scores, min(c, scores.shape[1]))
  return scores, jnp.take_along_axis(ids, at, 1)


def _top(scores, size, c):
  """The best c of the first `size` columns of each row, equal ones in order.

  Masked where they are read, not before: that would write all of them again.
  """
  rows, columns = scores.shape
  c = min(c, columns)
  # About as many groups as members of the c chosen ones.
  members = 1 << max(0, (columns // c).bit_length() // 2)
  members = min(members, GROUP)
  groups = columns // members
  number = jnp.arange(columns)
  if members == 1 or c > groups:
    return jax.lax.top_k(jnp.where(number < size, scores, -jnp.inf), c)
  grouped = scores.reshape(rows, groups, members)
  number = number.reshape(groups, members)
  maxima = jnp.where(number < size, grouped, -jnp.inf).max(2)
  best = jax.lax.top_k(maxima, c)[1]
  best = -jax.lax.top_k(-best, c)[0]  # columns in order, so that ties are too
  inside = jnp.take_along_axis(grouped, best[:, :, None], 1)
  inside = jnp.where(number[best] < size, inside, -jnp.inf)
  scores, at = jax.lax.top_k(inside.reshape(rows, -1), c)
  return scores, jnp.take_along_axis(number[best].reshape(rows, -1), at, 1)
