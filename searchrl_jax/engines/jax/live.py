"""Attention of one token over the live part of a cache, as Pallas kernels.

Axis letters: B slots, K kv heads, G queries of a kv head, H head dim, S cache
positions, R runs of the cache, which programs of a GPU share.

A program reads the blocks of its row from the first that the row sees to the
last, in order, and nothing else: so the bytes follow the lengths of the rows,
and a row's result does not depend on other rows, bit by bit (design 5.10).
Softmax as in Milakov and Gimelshein 2018 (arXiv 1805.02867).
"""

import math

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import numpy as np

NAME = 'live_attention_'  # of the kernels, before their window
BLOCK = 128  # positions that are read at once
_ROWS = 16  # of a tile of a matrix product: those beyond G are not used
_PROGRAMS = 256  # that keep a GPU busy


def fits(k, v) -> bool:
  """Whether the kernels can read the caches k and v."""
  S, H = v.shape[2:]
  return S % BLOCK == 0 and S > BLOCK and H in (64, 128, 256)


def attend(q, k, v, positions, *, window=0, time=2, platform, interpret=False):
  """Softmax(q k) v over the positions that each row sees.

  Args:
    q: [B, K, G, H], of `attention.grouped_queries`.
    k: as v, or [B, K, H, S].
    v: [B, K, S, H].
    positions: int32 [B], the last one that a row sees.
    window: positions that a row sees, its last included; 0: all.
    time: the axis of k that has the positions, 2 or 3.
    platform: gpu or tpu.
    interpret: on any machine, slowly.

  Returns:
    float32 [B, K, G, H], and int32 [B, K, R], the blocks that each program has
    read, as it counted them.
  """
  call = {'gpu': _on_gpu, 'tpu': _on_tpu}[platform]
  # By its name, it is known not to read all of k and v (`share`).
  with jax.named_scope(f'{NAME}{window}'):
    return call(q, k, v, positions, window, time == 3, interpret)


def share(positions, window: int, S: int) -> float:
  """The share of a cache of S positions that is read."""
  first, last = _span(np.asarray(positions), window)
  return float(np.mean(last - first)) * BLOCK / S


def _span(at, window: int):
  """(first, past the last) block of a row that sees up to position `at`."""
  low = jnp.maximum(at - window + 1, 0) if window else 0 * at
  return low // BLOCK, at // BLOCK + 1


def _block(q, k, v, first, at, window: int, carry, transposed: bool):
  """Takes one block of keys and values into (maximum, sum, output)."""
  top, total, o = carry
  k = k if transposed else k.T
  s = jnp.dot(q, k, preferred_element_type=jnp.float32)
  if q.dtype != jnp.float32:
    s *= 1 / math.sqrt(q.shape[-1])
  here = first + jax.lax.broadcasted_iota(jnp.int32, s.shape, 1)
  seen = here <= at
  if window:
    seen &= here > at - window
  s = jnp.where(seen, s, -jnp.inf)  # each block that is read has one that is
  new = jnp.maximum(top, jnp.max(s, -1, keepdims=True))
  w, shrink = jnp.exp(s - new), jnp.exp(top - new)
  total = total * shrink + jnp.sum(w, -1, keepdims=True)
  mixed = jnp.dot(w.astype(v.dtype), v, preferred_element_type=jnp.float32)
  return new, total, o * shrink + mixed


def _zero(rows: int, H: int):
  top = jnp.full((rows, 1), -jnp.inf, jnp.float32)
  return top, jnp.zeros((rows, 1)), jnp.zeros((rows, H), jnp.float32)


def _on_gpu(q, k, v, positions, window: int, transposed, interpret):
  """A program for each row, head and run: as many runs as keep it busy."""
  from jax.experimental.pallas import triton

  B, K, G, H = q.shape
  S, rows = v.shape[2], -(-G // _ROWS) * _ROWS
  blocks = S // BLOCK
  runs = min(-(-_PROGRAMS // (B * K)), blocks)
  run = -(-blocks // runs)  # blocks
  runs = -(-blocks // run)

  def kernel(at, q, k, v, o, top, total, counts):
    at, begin = at[...], pl.program_id(2) * run
    first, last = _span(at, window)
    first, last = jnp.maximum(first, begin), jnp.minimum(last, begin + run)
    real = jax.lax.broadcasted_iota(jnp.int32, (rows, 1), 0) < G
    tile = pl.ds(0, rows), slice(None)
    mask = jnp.broadcast_to(real, (rows, H))
    queries = triton.load(q.at[tile], mask=mask, other=0.0)

    def step(i, carry):
      *carry, n = carry
      here = pl.ds(i * BLOCK, BLOCK)
      keys = k[:, here] if transposed else k[here, :]
      how = i * BLOCK, at, window
      return *_block(queries, keys, v[here, :], *how, carry, transposed), n + 1

    start = *_zero(rows, H), jnp.int32(0)
    *found, counts[...] = jax.lax.fori_loop(first, last, step, start)
    for ref, value in zip((top, total, o), found):
      mask = jnp.broadcast_to(real, value.shape)
      triton.store(ref.at[tile], value, mask=mask)

  row = lambda *size: pl.BlockSpec(
    (None, None, *size), lambda b, h, r: (b, h, 0, 0)
  )
  part = lambda *size: pl.BlockSpec(
    (None, None, None, *size), lambda b, h, r: (b, h, r, *(0,) * len(size))
  )
  shape = lambda dtype, *size: jax.ShapeDtypeStruct((B, K, runs, *size), dtype)
  o, top, total, counts = pl.pallas_call(
    kernel,
    grid=(B, K, runs),
    in_specs=[
      pl.BlockSpec((None,), lambda b, h, r: (b,)),
      row(G, H),
      row(*k.shape[2:]),
      row(S, H),
    ],
    out_specs=[part(G, H), part(G, 1), part(G, 1), part()],
    out_shape=[
      shape(jnp.float32, G, H),
      shape(jnp.float32, G, 1),
      shape(jnp.float32, G, 1),
      shape(jnp.int32),
    ],
    compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
    interpret=interpret,
  )(positions, q, k, v)
  # A run without a position that is seen has the weight exp(-inf) = 0.
  weight = jnp.exp(top - jnp.max(top, 2, keepdims=True))
  total = jnp.sum(total * weight, 2)
  return jnp.sum(o * weight, 2) / total, counts


def _on_tpu(q, k, v, positions, window: int, transposed, interpret):
  """A program for each row and head, with blocks in sequence.

  A step beyond the last block asks for the last one again, which is not read
  again: the pipeline copies a block where its index changes.
  """
  from jax.experimental.pallas import tpu

  B, K, heads, H = q.shape
  q = jnp.pad(q, ((0, 0), (0, 0), (0, -heads % _ROWS), (0, 0)))
  S, G = v.shape[2], q.shape[2]
  steps = S // BLOCK
  if window:
    steps = min(steps, (window - 2) // BLOCK + 2)

  def kernel(at, q, k, v, o, counts, top, total, mixed):
    b, j = pl.program_id(0), pl.program_id(2)
    first, last = _span(at[b], window)

    @pl.when(j == 0)
    def _():
      top[...], total[...], mixed[...] = _zero(G, H)
      counts[...] = jnp.zeros_like(counts)

    @pl.when(first + j < last)
    def _():
      carry = top[...], total[...], mixed[...]
      how = (first + j) * BLOCK, at[b], window
      found = _block(q[...], k[...], v[...], *how, carry, transposed)
      top[...], total[...], mixed[...] = found
      counts[...] += 1

    @pl.when(j == steps - 1)
    def _():
      o[...] = mixed[...] / total[...]

  def index(b, h, j, at):
    first, last = _span(at[b], window)
    return jnp.minimum(first + j, last - 1)

  row = lambda *size: pl.BlockSpec(
    (None, None, *size), lambda b, h, j, at: (b, h, 0, 0)
  )
  values = pl.BlockSpec(
    (None, None, BLOCK, H), lambda b, h, j, at: (b, h, index(b, h, j, at), 0)
  )
  keys = values
  if transposed:
    keys = pl.BlockSpec(
      (None, None, H, BLOCK), lambda b, h, j, at: (b, h, 0, index(b, h, j, at))
    )
  o, counts = pl.pallas_call(
    kernel,
    grid_spec=tpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(B, K, steps),
      in_specs=[row(G, H), keys, values],
      out_specs=[row(G, H), row(8, 128)],
      scratch_shapes=[
        tpu.VMEM((G, 1), jnp.float32),
        tpu.VMEM((G, 1), jnp.float32),
        tpu.VMEM((G, H), jnp.float32),
      ],
    ),
    out_shape=[
      jax.ShapeDtypeStruct((B, K, G, H), jnp.float32),
      jax.ShapeDtypeStruct((B, K, 8, 128), jnp.int32),
    ],
    compiler_params=tpu.CompilerParams(
      dimension_semantics=('parallel', 'parallel', 'arbitrary')
    ),
    interpret=interpret,
  )(positions, q, k, v)
  return o[:, :, :heads], counts[:, :, :1, 0]
