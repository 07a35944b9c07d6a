"""cuDNN's causal attention over packed rows.

JAX's public attention function does not pack. The function under it takes the
place of each sequence in its row, and is private: it is used in this module
alone, and where a version of JAX does not have it, `available` says so.
"""

from collections.abc import Iterator
import contextlib
import inspect
import math

import jax.numpy as jnp

try:
  from jax._src.cudnn import fused_attention_stablehlo as _fused
except ImportError:
  _fused = None
_NEEDED = {'q_seqlen', 'kv_seqlen', 'q_offsets', 'kv_offsets', 'mask_type'}
_HOPPER = '9.0'  # the first that packs


def available() -> bool:
  """Whether this JAX packs, and the device that programs are compiled for."""
  if _fused is None:
    return False
  known = inspect.signature(_fused.dot_product_attention).parameters
  return known.keys() >= _NEEDED and _fused.check_compute_capability(_HOPPER)


@contextlib.contextmanager
def compiling_for_hopper() -> Iterator[None]:
  """Compiles for GPUs of this family, or newer, that are only described.

  The private function asks a device what it is able to do.
  """
  if _fused is None:
    yield
    return
  asked = _fused.check_compute_capability
  _fused.check_compute_capability = lambda capability: True
  try:
    yield
  finally:
    _fused.check_compute_capability = asked


def attention(q, k, v, starts, window: int = 0):
  """Each token attends to those of its own sequence up to itself.

  Padding is part of the sequence before it, so that every token has finite
  values: cuDNN writes none for a token that is in no sequence, and 0 times NaN
  would reach the gradients.

  Args:
    q: [B, T, N, H], bfloat16 or float16.
    k, v: [B, T, K, H].
    starts: int32 [B, M], see `attention.Packed`; M is above 1.

  Returns:
    [B, T, N, H].
  """
  T, N, H = q.shape[1:]
  # Offsets of keys are counted in heads of the queries (`_fix_seqlen_offsets`
  # in JAX 0.10.2), so there have to be as many.
  k, v = (jnp.repeat(x, N // x.shape[2], axis=2) for x in (k, v))
  starts = starts.at[:, 0].set(0)
  ends = jnp.pad(starts[:, 1:], ((0, 0), (0, 1)), constant_values=T)
  real = starts < T
  lengths = jnp.where(real, ends - starts, -1)
  offsets = jnp.where(real, starts, -1)
  offsets = jnp.pad(offsets, ((0, 0), (0, 1)), constant_values=-1)
  return _fused.dot_product_attention(
    q,
    k,
    v,
    q_seqlen=lengths,
    kv_seqlen=lengths,
    q_offsets=offsets,
    kv_offsets=offsets,
    scale=1.0 / math.sqrt(H),
    mask_type=_fused.MaskType.PADDING_CAUSAL,
    sliding_window_length=window or None,
  )
