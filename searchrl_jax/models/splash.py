"""Causal attention within segments by splash attention, JAX's TPU kernel.

Importing the kernel takes seconds, so `decoder` imports this module where it
is used.
"""

import functools
import math

import jax
from jax.experimental.pallas.ops.tpu import splash_attention as splash
import jax.numpy as jnp

from searchrl_jax.devices import sharding

_LANES = 128  # the kernel's blocks are multiples of it


def attention(q, k, v, segments, mesh=None, window: int = 0):
  """Attention of each token to the tokens before it in its segment.

  The kernel has no scale of its own: q is scaled before the product, and in
  half precision rounded once more than by cuDNN and the sampler.

  Args:
    q: [B, T, N, H].
    k, v: [B, T, K, H]; the devices of the axis `tensor` divide K.
    segments: int32 [B, T]; padding is a segment too.
    mesh: the devices, each of which computes its own rows and heads.

  On a CPU the kernel is interpreted, slowly, for tests.
  """
  B, T, N, H = q.shape
  q = (q.astype(jnp.float32) * (1.0 / math.sqrt(H))).astype(q.dtype)
  extra = -T % _LANES

  def heads_first(x):
    x = jnp.pad(x, ((0, 0), (0, extra), (0, 0), (0, 0)))
    return x.transpose(0, 2, 1, 3)

  segments = jnp.pad(segments, ((0, 0), (0, extra)), constant_values=-1)

  def local(q, k, v, segments):
    cpu = sharding.platform() == 'cpu'
    kernel = _kernel(q.shape[1], T + extra, cpu, window)
    pair = splash.SegmentIds(segments, segments)
    return jax.vmap(kernel)(q, k, v, pair)

  if mesh is not None and mesh.size > 1:
    queries = sharding.spec(mesh, ('batch', 'heads', None, None), (B, N, 1, 1))
    rows = sharding.spec(mesh, ('batch', 'time'), (B, T))
    layout = (queries, queries, queries, rows)
    local = jax.shard_map(
      local, mesh=mesh, in_specs=layout, out_specs=queries, check_vma=False
    )
  o = local(heads_first(q), heads_first(k), heads_first(v), segments)
  return o.transpose(0, 2, 1, 3)[:, :T]


@functools.cache
def _kernel(heads: int, length: int, interpret: bool, window: int):
  """The kernel for `heads` query heads; length: a multiple of _LANES."""
  block = next(n for n in (512, 384, 256, _LANES) if length % n == 0)
  sizes = splash.BlockSizes(
    block_q=block,
    block_kv=block,
    block_q_dkv=block,
    block_kv_dkv=block,
    block_q_dq=block,
    block_kv_dq=block,
  )
  square = (length, length)
  mask = splash.CausalMask(square)
  if window:
    mask = splash.LocalMask(square, (window - 1, 0), 0)
  causal = splash.MultiHeadMask([mask] * heads)
  with jax.ensure_compile_time_eval():  # the tables of blocks are constants
    return splash.make_splash_mha(
      causal,
      block_sizes=sizes,
      head_shards=1,
      q_seq_shards=1,
      residual_checkpoint_name='attention',  # as `decoder.block` names it
      interpret=interpret,
    )
