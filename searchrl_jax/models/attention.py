"""Causal attention: cuDNN on GPUs, splash attention on TPUs, XLA elsewhere.

Axis letters: B sequences, T query tokens, S key tokens, N/K query/kv heads,
G queries of a kv head, H head dim, M sequences packed into a row.
"""

import functools
import math
from typing import NamedTuple

from absl import logging
import jax
import jax.numpy as jnp

from searchrl_jax.devices import sharding
from searchrl_jax.models import packed_cudnn

# Of inputs in any precision.
einsum32 = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


class Packed(NamedTuple):
  """Where the sequences of packed rows are; M of them in a row, at most.

  Padding after the last sequence of a row counts as its continuation, which
  causality hides from it.
  """

  starts: jax.Array  # int32 [B, M], ascending; T = none
  segments: jax.Array  # int32 [B, T], the sequence of each token, 0 to M - 1
  positions: jax.Array  # int32 [B, T], of each token in its sequence


class Nodes(NamedTuple):
  """Rows that are prefix trees, see `types.PrefixTree`."""

  positions: jax.Array  # int32 [B, T], the depth of each token
  ends: jax.Array  # int32 [B, T]


def packed(starts, T: int) -> Packed:
  """From starts [B, M] in rows of T tokens."""
  at = jnp.arange(T, dtype=jnp.int32)
  begun = at[:, None] >= starts[:, None, :]
  segments = jnp.maximum(jnp.sum(begun, -1, dtype=jnp.int32) - 1, 0)
  first = jnp.max(jnp.where(begun, starts[:, None, :], 0), -1)
  return Packed(starts, segments, at - first)


_UNPACKED = (
  'cuDNN cannot attend over packed rows on this GPU (which takes compute '
  'capability 9.0, as of H100) or with this version of JAX; XLA attends, '
  'slower and with more memory'
)
# What 'auto' is in half precision, by platform.
_KERNELS = {'gpu': 'cudnn', 'tpu': 'splash'}


def causal(
  q,
  k,
  v,
  lengths=None,
  kernel: str = 'auto',
  packing: Packed | Nodes | None = None,
  mesh=None,
  window: int = 0,
):
  """Causal attention over right-padded rows; softmax in float32.

  lengths: int32 [B], tokens of each row; None: all T of them.
  kernel: `DecoderConfig.attention`. 'auto': in half precision cuDNN on GPU and
  splash attention on TPU, XLA elsewhere.
  Rows past `lengths` hold finite, meaningless values, which no loss may use.
  With `packing`, tokens of a row see their own sequence only, and `lengths` is
  not read; where cuDNN cannot do that (`packed_cudnn.available`), XLA does. In
  a prefix tree tokens see those on the way to them, by XLA.
  window: tokens that a token sees, itself included; 0: all before it.
  """
  window = window if window < q.shape[1] else 0
  tree = isinstance(packing, Nodes)
  if tree:
    kernel = 'xla'
  if kernel == 'auto':
    half = q.dtype in (jnp.bfloat16, jnp.float16)
    kernel = _KERNELS.get(sharding.platform(), 'xla') if half else 'xla'
  if lengths is None:
    lengths = jnp.full(q.shape[:1], q.shape[1], jnp.int32)
  if kernel in _KERNELS.values():
    k, v = (_divisible_heads(x, q.shape[2], mesh) for x in (k, v))
  if kernel == 'splash':
    from searchrl_jax.models import splash  # takes seconds to import

    segments = packing and packing.segments
    if segments is None:
      segments = (jnp.arange(q.shape[1]) < lengths[:, None]).astype(jnp.int32)
    return splash.attention(q, k, v, segments, mesh, window)
  if kernel == 'cudnn' and packing is not None:
    if packed_cudnn.available():
      return packed_cudnn.attention(q, k, v, packing.starts, window)
    logging.warning(_UNPACKED)
  elif kernel == 'cudnn':
    lengths = jnp.maximum(lengths, 1)  # an empty row would give 0 / 0
    own = {'query_seq_lengths': lengths, 'key_value_seq_lengths': lengths}
    own |= {'local_window_size': (window - 1, 0)} if window else {}
    return jax.nn.dot_product_attention(
      q, k, v, is_causal=True, implementation='cudnn', **own
    )
  # Padding is on the right, so causality alone hides it from real queries.
  B, T, N, H = q.shape
  q = grouped_queries(q, k.shape[2])
  k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
  # A block of queries attends to the keys up to its own end only: almost half
  # of the scores are never computed, and those of a block stay in a CPU's
  # cache (forward 5 times, with its gradient 2.4 times as fast as all at once).
  step = max(64, -(-T // 8))
  out = []
  for i in range(0, T, step):
    end = i + step
    first = max(0, i - window + 1) if window and not tree else 0
    block = q[:, :, :, i:end], k[:, :, first:end], v[:, :, first:end]
    same = None
    if isinstance(packing, Nodes):
      nodes = jnp.arange(i, min(end, T))[None, :, None]
      same = nodes < packing.ends[:, None, :end]
      if window:  # distances are those of positions, not of places in the row
        at = packing.positions
        same &= at[:, i:end, None] - at[:, None, :end] < window
    elif packing is not None:
      s = packing.segments
      same = s[:, i:end, None] == s[:, None, first:end]
    out.append(_attend_block(*block, i - first, same, 0 if tree else window))
  o = out[0] if len(out) == 1 else jnp.concatenate(out, 3)
  return o.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def _divisible_heads(x, query_heads: int, mesh):
  """Keys or values [B, T, K, H], repeated until `tensor` divides the heads.

  Kernels need queries and keys cut alike; KV heads that the axis does not
  divide are replicated (`sharding.spec`).
  """
  K, tensor = x.shape[2], mesh.shape['tensor'] if mesh else 1
  if K % tensor == 0 or query_heads % tensor:
    return x
  x = jnp.repeat(x, math.lcm(K, tensor) // K, axis=2)
  return sharding.constrain(x, mesh, 'batch', 'time', 'heads', 'head_dim')


def grouped_queries(q, kv_heads: int):
  """q [B, T, N, H] as [B, K, G, T, H]: batch dimensions lead.

  float32 is scaled by 1 / sqrt(H) here, so `scores` does not scale it again.
  """
  B, T, N, H = q.shape
  if q.dtype == jnp.float32:
    q = q * (1.0 / math.sqrt(H))
  q = q.reshape(B, T, kv_heads, N // kv_heads, H)
  return q.transpose(0, 2, 3, 1, 4)


def scores(axes: str, q, k):
  """float32 attention scores of `grouped_queries`; axes: of the einsum.

  Half precision is scaled after the product, as cuDNN does: scaling q would
  round it once more.
  """
  s = einsum32(axes, q, k)
  return s if q.dtype == jnp.float32 else s * (1.0 / math.sqrt(q.shape[-1]))


def _attend_block(q, k, v, start: int, same=None, window: int = 0):
  """q [B, K, G, T, H], the first at key `start`; k, v [B, K, S, H].

  same: bool [B, T, S], the keys that a query may see besides; None: all.
  """
  B, K, G, T, H = q.shape
  S = k.shape[2]
  s = scores('BKMH,BKSH->BKMS', q.reshape(B, K, G * T, H), k)
  s = s.reshape(B, K, G, T, S)
  at = start + jnp.arange(T)[:, None]
  seen = at >= jnp.arange(S)
  if window:
    seen &= at - jnp.arange(S) < window
  if same is not None:
    seen = (seen & same)[:, None, None]
  s = jnp.where(seen, s, -1e30)
  w = jnp.exp(s - jax.lax.stop_gradient(s.max(-1, keepdims=True)))
  total = w.sum(-1, keepdims=True)
  half = w.astype(v.dtype).reshape(B, K, G * T, S)
  o = einsum32('BKMS,BKSH->BKMH', half, v).reshape(B, K, G, T, H)
  return (o / total).astype(v.dtype)
