"""Rotary position embeddings (RoFormer, arXiv 2104.09864).

`cfg` is a `decoder.DecoderConfig`: head_dim H, of which the first R are rotated
(rotary_dim; None: all), rope_theta, rope_scaling and, for local layers,
local_theta.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """Frequency scaling: Llama 3.1's (arXiv 2407.21783; 'llama3' in HF), or
  'linear', which divides all frequencies by `factor`."""

  kind: str
  factor: float
  low_freq_factor: float = 0.0
  high_freq_factor: float = 0.0
  original_max_position: int = 0


def frequencies(cfg, local: bool = False):
  """float32 [R / 2]: radians per position, in a global or a local layer."""
  R = cfg.rotary_dim or cfg.head_dim
  theta = cfg.local_theta if local else cfg.rope_theta
  freq = 1.0 / theta ** (jnp.arange(0, R, 2, dtype=jnp.float32) / R)
  s = cfg.rope_scaling
  if s is None or local:
    return freq
  if s.kind == 'linear':
    return freq / s.factor
  wave = 2 * math.pi / freq
  low = s.original_max_position / s.low_freq_factor
  high = s.original_max_position / s.high_freq_factor
  smooth = (s.original_max_position / wave - s.low_freq_factor) / (
    s.high_freq_factor - s.low_freq_factor
  )
  mid = (1 - smooth) * freq / s.factor + smooth * freq
  freq = jnp.where(wave > low, freq / s.factor, freq)
  return jnp.where((wave <= low) & (wave >= high), mid, freq)


def tables(cfg, positions, local: bool = False):
  """cos, sin: float32 [..., R / 2] for integer positions [...]."""
  angle = positions[..., None].astype(jnp.float32) * frequencies(cfg, local)
  return jnp.cos(angle), jnp.sin(angle)


@jax.custom_vjp
def apply(x, cos, sin):
  """Rotates halves (HF's layout). x [B, T, heads, H]; cos, sin [B, T, R/2].

  The gradient is the rotation back: autodiff would pad and add halves, which
  costs time on a CPU. cos and sin pass none.
  """
  return _rotate(x, cos, sin)


def _rotate(x, cos, sin):
  R = 2 * cos.shape[-1]
  x1, x2 = jnp.split(x[..., :R].astype(jnp.float32), 2, axis=-1)
  cos, sin = cos[..., None, :], sin[..., None, :]
  out = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)
  out = out.astype(x.dtype)
  return out if R == x.shape[-1] else jnp.concatenate([out, x[..., R:]], -1)


apply.defvjp(
  lambda x, cos, sin: (_rotate(x, cos, sin), (cos, sin)),
  lambda saved, g: (_rotate(g, saved[0], -saved[1]), None, None),
)
