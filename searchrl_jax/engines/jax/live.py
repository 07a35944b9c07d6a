"""Attention of one token over the live part of a cache, by a kernel for GPUs.

Axis letters: B slots, K kv heads, G queries of a kv head, H head dim, S cache
positions, R runs of blocks that a cache is cut into.

A program of the kernel has a row, a kv head and a run. It reads the blocks of
its run from the first that the row sees to the last, in order, and no other: so
the bytes follow the length of each row, and a row's result does not depend on
other rows, bit by bit (design 5.10). Softmax with a running maximum: Milakov
and Gimelshein 2018 (arXiv 1805.02867).

Pallas compiles it by Triton, which JAX 0.11 calls deprecated and still has.
For TPUs: `ragged`.
"""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np

from searchrl_jax.devices import sharding

NAME = 'live_attention'  # of a kernel, before what `scope` says
BLOCK = 128  # positions that are read at once, at most
_BYTES = 2**15  # of a block: two of keys and two of values are held at once
_ROWS = 16  # of a tile of queries, of which G are used
_PROGRAMS = 256  # that keep a GPU busy


def fits(q, v) -> bool:
  """Whether the kernel takes these arrays, for what is compiled for.

  Refused are caches of one block or less, or of no whole ones, head dims that
  are no tile, and more than 16 queries of a head.

  q: [B, K, G, T, H] of any T. v: [B, K, S, H].
  """
  if not sharding.triton():
    return False
  (_, _, G, _, H), S = q.shape, v.shape[2]
  known = q.dtype == v.dtype in (jnp.float32, jnp.bfloat16, jnp.float16)
  tile = H in (64, 128, 256) and G <= _ROWS
  return known and tile and S % BLOCK == 0 and S > BLOCK


def compiling_for_hopper() -> None:
  """Compiles for GPUs of this family that are only described, from now on.

  As of JAX 0.11, Pallas asks the device, and refuses those that it does not
  know; what it knows is private.
  """
  try:
    from jax._src.pallas.triton import gpu_info
  except ImportError:
    return
  hopper = gpu_info.GpuVersion.H100
  known = lambda: gpu_info.get_gpu_info_from_version(hopper)
  gpu_info.registry.setdefault('cpu', known)


def attend(q, k, v, positions, window=0, time=2, interpret=False):
  """Softmax(q k) v over the positions that each row sees.

  Args:
    q: [B, K, G, H], of `attention.grouped_queries`; `fits` has held.
    k: as v if time is 2, [B, K, H, S] if it is 3.
    v: [B, K, S, H].
    positions: int32 [B], the last one that a row sees, from 0 to S - 1.
    window: positions that a row sees, its last included; 0: all.
    time: the axis of k that has the positions.
    interpret: on any machine, slowly.

  Returns:
    float32 [B, K, G, H], and int32 [B, K, R], the blocks that each program has
    read, as it counted them.
  """
  from jax.experimental import pallas as pl  # only GPUs need it
  from jax.experimental.pallas import triton

  B, K, G, H = q.shape
  size = _block(v)
  blocks = v.shape[2] // size
  runs = min(pl.cdiv(_PROGRAMS, B * K), blocks)
  run = pl.cdiv(blocks, runs)  # blocks
  runs = pl.cdiv(blocks, run)

  def kernel(at, q, k, v, o, top, total, counts):
    at, begin = at[...], pl.program_id(2) * run
    first, last = _span(at, window, size)
    first, last = jnp.maximum(first, begin), jnp.minimum(last, begin + run)
    real = jax.lax.broadcasted_iota(jnp.int32, (_ROWS, 1), 0) < G
    tile = pl.ds(0, _ROWS), slice(None)
    mask = jnp.broadcast_to(real, (_ROWS, H))
    queries = triton.load(q.at[tile], mask=mask, other=0.0)

    def step(i, carry):
      top, total, o, count = carry
      here = pl.ds(i * size, size)
      keys, values = k[:, here] if time == 3 else k[here, :].T, v[here, :]
      s = jnp.dot(queries, keys, preferred_element_type=jnp.float32)
      if q.dtype != jnp.float32:
        s *= 1 / math.sqrt(H)
      here = i * size + jax.lax.broadcasted_iota(jnp.int32, s.shape, 1)
      seen = here <= at
      if window:
        seen &= here > at - window
      s = jnp.where(seen, s, -jnp.inf)  # of a block, at least one is seen
      new = jnp.maximum(top, jnp.max(s, -1, keepdims=True))
      w, shrink = jnp.exp(s - new), jnp.exp(top - new)
      total = total * shrink + jnp.sum(w, -1, keepdims=True)
      w = w.astype(values.dtype)
      mixed = jnp.dot(w, values, preferred_element_type=jnp.float32)
      return new, total, o * shrink + mixed, count + 1

    zero = jnp.zeros((_ROWS, 1), jnp.float32)
    start = zero - jnp.inf, zero, jnp.zeros((_ROWS, H), jnp.float32), 0
    *found, counts[...] = jax.lax.fori_loop(first, last, step, start)
    for ref, value in zip((top, total, o), found):
      mask = jnp.broadcast_to(real, value.shape)
      triton.store(ref.at[tile], value, mask=mask)

  row = lambda *shape: pl.BlockSpec(
    (None, None, *shape), lambda b, h, r: (b, h, 0, 0)
  )
  part = lambda *shape: pl.BlockSpec(
    (None, None, None, *shape), lambda b, h, r: (b, h, r, *(0,) * len(shape))
  )
  shapes = (G, H), (G, 1), (G, 1), ()
  dtypes = jnp.float32, jnp.float32, jnp.float32, jnp.int32
  call = pl.pallas_call(
    kernel,
    grid=(B, K, runs),
    in_specs=[
      pl.BlockSpec((None,), lambda b, h, r: (b,)),
      row(G, H),
      row(*k.shape[2:]),
      row(*v.shape[2:]),
    ],
    out_specs=[part(*shape) for shape in shapes],
    out_shape=[
      jax.ShapeDtypeStruct((B, K, runs, *shape), dtype)
      for shape, dtype in zip(shapes, dtypes)
    ],
    compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
    interpret=interpret,
  )
  with jax.named_scope(scope(window, size, B, B)):
    o, top, total, counts = call(positions, q, k, v)
  # A run without a position that is seen has the weight exp(-inf) = 0.
  weight = jnp.exp(top - jnp.max(top, 2, keepdims=True))
  total = jnp.sum(total * weight, 2)
  return jnp.sum(o * weight, 2) / total, counts


def scope(window: int, size: int, rows: int, slots: int) -> str:
  """A name for a kernel that reads of a cache of so many slots what some rows
  see of theirs, in blocks of `size` positions: `share` reads it."""
  return f'{NAME}_{window}_{size}_{rows}_{slots}'


def share(op: str, positions, length: int) -> float:
  """The share of caches that a kernel reads for rows at such last positions.

  op: of XLA; 1 if it is in no `scope`. length: positions of a slot.
  """
  found = re.search(rf'{NAME}_(\d+)_(\d+)_(\d+)_(\d+)', op)
  if not found:
    return 1.0
  window, size, rows, slots = map(int, found.groups())
  first, last = _span(jnp.asarray(positions, jnp.int32), window, size)
  return float(np.mean(last - first)) * size / length * rows / slots


def _block(v) -> int:
  return min(BLOCK, _BYTES // (v.shape[3] * v.dtype.itemsize))


def _span(at, window: int, size: int):
  """(first, past the last) block of a row that sees up to position `at`."""
  # No `//`, which floors: no position is negative.
  block = lambda x: jax.lax.div(x, jnp.full_like(x, size))
  low = jnp.maximum(at - window + 1, 0) if window else jnp.zeros_like(at)
  return block(low), block(at) + 1
