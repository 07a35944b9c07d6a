"""Products of rows with the matrices of their experts, on GPUs and TPUs.

The rows of an expert follow each other (`experts.Plan`). On a GPU, kernels of
Pallas (compiled by Triton) multiply tiles of rows, each with the matrix of its
expert, and sum up gradients tile by tile, in order; on a TPU, JAX's `megablox`
does it. On a CPU either is interpreted, slowly, for tests. XLA's own product of
this kind, `ragged_dot`, writes every row once for each expert on a GPU.

Axis letters: R rows, I inputs, O outputs, E experts.
"""

import functools
import importlib
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from searchrl_jax.devices import sharding

_BLOCK = 128  # columns of a tile
_DEPTH = 128  # bytes of a row that are read at once
_LEAST = 16  # of a tile, in any direction
# Of megablox: rows, and at most this many, inputs and outputs.
_TPU = 128, 512, 512
_MEGABLOX = 'jax.experimental.pallas.ops.tpu.megablox'


class How(NamedTuple):
  """What a product is compiled for.

  tile: rows, of which an expert has whole multiples.
  axis: of the mesh, along which the experts lie; None: there is none.
  devices: among which the experts are divided. On average each computes one
    in so many rows, which the estimate for XLA says; that of a TPU's kernels
    says all.
  """

  tile: int
  axis: str | None = None
  devices: int = 1


def fits(dtype, *matrices) -> bool:
  """Whether there is a kernel, for what is compiled for."""
  if sharding.platform() == 'tpu':
    return dtype in (jnp.float32, jnp.bfloat16)
  known = dtype in (jnp.float32, jnp.bfloat16, jnp.float16)
  return (
    sharding.triton()
    and known
    and all(
      math.gcd(size, _BLOCK) >= _LEAST for w in matrices for size in w.shape[1:]
    )
  )


def tile(rows: int) -> int:
  """Rows of a tile, for experts that have so many on average.

  1 on a TPU, whose kernels find the rows of an expert in tiles of any.
  """
  if sharding.platform() == 'tpu':
    return 1
  return next((t for t in (128, 64, 32) if rows >= 2 * t), _LEAST)


def rows(least: int, tile: int) -> int:
  """At least so many, that are whole tiles."""
  tile = tile if tile > 1 else _TPU[0]
  return -(-least // tile) * tile


def whole(w, dtype, axis: str | None):
  """The matrices of all experts along an axis of the mesh, as `dtype`."""
  w = w.astype(dtype)
  return jax.lax.all_gather(w, axis, tiled=True) if axis else w


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(how: How, x, w, counts):
  """y [R, O]: each row of x times the matrix of its expert.

  In the precision of x. The gradient of a float32 w is summed up in float32,
  over devices too, whatever x is. Rows after those of all experts have no
  meaning.

  Args:
    x: [R, I].
    w: [E, I, O], or those of the experts that this device has.
    counts: int32 [E], rows of each expert.
  """
  return _forward(how, x, w, counts)[0]


def _forward(how, x, w, counts):
  half = whole(w, x.dtype, how.axis)
  # The dtype of w, without w.
  return _rows(how, x, half, counts), (x, half, counts, w[:0])


def _backward(how, saved, g):
  x, half, counts, like = saved
  dx = _rows(how, g, half, counts, transposed=True)
  dw = _matrices(how, x, g, counts)
  if how.axis:
    dw = jax.lax.psum_scatter(dw, how.axis, tiled=True)
  return dx, dw.astype(like.dtype), None


product.defvjp(_forward, _backward)


def _rows(how: How, x, w, counts, transposed=False):
  """x times w, or w transposed, of each row's expert: in x's dtype."""
  (R, I), O = x.shape, w.shape[1 if transposed else 2]
  if how.tile == 1:
    own = x, w, counts, x.dtype
    return _megablox('gmm', how, (I, O), *own, transpose_rhs=transposed)
  from jax.experimental import pallas as pl  # only here: slow

  step = math.gcd(I, _DEPTH // x.dtype.itemsize)
  block = math.gcd(O, _BLOCK)

  def kernel(owner, x, w, y):
    e, columns = owner[...], pl.ds(pl.program_id(1) * block, block)

    def add(i, sums):
      here = pl.ds(i * step, step)
      part = w[e, columns, here].T if transposed else w[e, here, columns]
      return sums + _dot(x[:, here], part)

    steps = (e < w.shape[0]).astype(jnp.int32) * (I // step)
    zero = jnp.zeros((how.tile, block), jnp.float32)
    y[...] = jax.lax.fori_loop(0, steps, add, zero).astype(y.dtype)

  call = pl.pallas_call(
    kernel,
    grid=(R // how.tile, O // block),
    in_specs=[
      pl.BlockSpec((None,), lambda i, j: (i,)),
      pl.BlockSpec((how.tile, I), lambda i, j: (i, 0)),
      pl.BlockSpec(w.shape, lambda i, j: (0, 0, 0)),
    ],
    out_specs=pl.BlockSpec((how.tile, block), lambda i, j: (i, j)),
    out_shape=jax.ShapeDtypeStruct((R, O), x.dtype),
    **_options(how, x, O),
  )
  # The expert of each tile; E: none.
  tiles = jnp.arange(R // how.tile, dtype=jnp.int32)
  owners = jnp.searchsorted(_ends(how.tile, counts), tiles, side='right')
  with jax.named_scope('grouped_rows'):
    return call(owners.astype(jnp.int32), x, w)


def _matrices(how: How, x, g, counts):
  """The sums of x^T g over the rows of each expert: float32 [E, I, O]."""
  I, O, E = x.shape[1], g.shape[1], len(counts)
  if how.tile == 1:
    return _megablox('tgmm', how, (I, O), x.T, g, counts, jnp.float32)
  from jax.experimental import pallas as pl

  high, wide = math.gcd(I, _BLOCK), math.gcd(O, _BLOCK)
  step = min(how.tile, _DEPTH // x.dtype.itemsize)  # rows

  def kernel(first, last, x, g, w):
    inputs = pl.ds(pl.program_id(1) * high, high)
    outputs = pl.ds(pl.program_id(2) * wide, wide)

    def add(i, sums):
      here = pl.ds(i * step, step)
      return sums + _dot(x[here, inputs].T, g[here, outputs])

    zero = jnp.zeros((high, wide), jnp.float32)
    w[...] = jax.lax.fori_loop(first[...], last[...], add, zero)

  expert = pl.BlockSpec((None,), lambda e, i, j: (e,))
  call = pl.pallas_call(
    kernel,
    grid=(E, I // high, O // wide),
    in_specs=[
      expert,
      expert,
      pl.BlockSpec(x.shape, lambda e, i, j: (0, 0)),
      pl.BlockSpec(g.shape, lambda e, i, j: (0, 0)),
    ],
    out_specs=pl.BlockSpec((None, high, wide), lambda e, i, j: (e, i, j)),
    out_shape=jax.ShapeDtypeStruct((E, I, O), jnp.float32),
    **_options(how, x, O),
  )
  ends = _ends(step, counts)
  with jax.named_scope('grouped_matrices'):
    return call(ends - counts // step, ends, x, g)


def _ends(tile: int, counts):
  """The tile after the last of each expert."""
  return jnp.cumsum(counts // tile).astype(jnp.int32)


def _interpret() -> bool:
  return sharding.platform() == 'cpu'


def _options(how: How, x, O: int) -> dict:
  """Of a kernel that multiplies rows x by O columns."""
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import triton

  warps = 8 if how.tile == 128 else 4
  return {
    'compiler_params': triton.CompilerParams(num_warps=warps, num_stages=3),
    'cost_estimate': pl.CostEstimate(
      flops=2 * x.size * O // how.devices, transcendentals=0, bytes_accessed=0
    ),
    'interpret': _interpret(),
  }


def _dot(a, b):
  precision = 'highest' if a.dtype == jnp.float32 else None
  kind = dict(preferred_element_type=jnp.float32, precision=precision)
  return jnp.dot(a, b, **kind)


def _megablox(name: str, how: How, sizes, x, other, counts, dtype, **more):
  """A kernel of JAX for TPUs. sizes: inputs and outputs."""
  # Its package has a function of the same name. It takes seconds to import.
  kernels = importlib.import_module(f'{_MEGABLOX}.gmm')
  R = x.shape[name == 'tgmm']
  tiling = (math.gcd(R, _TPU[1]), *(min(n, _TPU[2]) for n in sizes))
  own = dict(tiling=tiling, interpret=_interpret(), **more)
  with jax.numpy_dtype_promotion('standard'):  # it mixes kinds of numbers
    return getattr(kernels, name)(x, other, counts, dtype, **own)
