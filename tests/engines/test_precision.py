"""In half precision, attention scales the scores, as cuDNN does."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax.engines.jax import caches
from searchrl_jax.models import attention, decoder

CFG = decoder.DecoderConfig(
  vocab_size=8,
  d_model=8,
  n_layers=1,
  n_heads=4,
  n_kv_heads=2,
  head_dim=128,
  d_ff=8,
  attention='xla',
)
B, T = 2, 64  # one block of queries for the trainer, one of keys here


def attended(dtype):
  """q, k, v, what the trainer makes of them, and what the sampler does."""
  cfg = dataclasses.replace(CFG, dtype=dtype)
  rng = np.random.default_rng(0)
  # Scores of some ten units, as trained models have them.
  q, k, v = (
    jnp.asarray(scale * rng.normal(size=(B, T, heads, 128)), dtype)
    for scale, heads in ((3, 4), (1, 2), (1, 2))
  )
  at = np.broadcast_to(np.arange(T), (B, T))
  cache = caches.make(cfg, B, T)[0]
  cache = caches.write(cfg, cache, np.arange(B), at, (k, v), None)
  trainer = attention.causal(q, k, v, np.full(B, T))
  return q, k, v, trainer, caches.attend(cfg, q, cache, at)


def plain(q, k, v, scale_first: bool):
  """[B, T, N, H]: products of whole matrices, scaled before or after."""
  q = q.reshape(B, T, 2, 2, 128).transpose(0, 2, 3, 1, 4)
  k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
  scale = 1 / math.sqrt(128)
  s = jnp.einsum(
    'BKGTH,BKSH->BKGTS',
    q * scale if scale_first else q,
    k,
    preferred_element_type=jnp.float32,
  )
  s = jnp.where(np.tri(T, dtype=bool), s if scale_first else s * scale, -1e30)
  w = jnp.exp(s - s.max(-1, keepdims=True))
  o = jnp.einsum(
    'BKGTS,BKSH->BKGTH',
    w.astype(v.dtype),
    v,
    preferred_element_type=jnp.float32,
  ) / w.sum(-1, keepdims=True)
  return np.asarray(o.transpose(0, 3, 1, 2, 4).reshape(B, T, 4, 128))


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_half_precision_scales_the_scores(dtype):
  q, k, v, trainer, sampler = attended(dtype)
  wanted, before = (
    plain(q, k, v, first).astype(dtype).astype(np.float32)
    for first in (False, True)
  )
  before = np.abs(before - wanted).mean()
  for o in (trainer, sampler):
    assert np.abs(np.asarray(o, np.float32) - wanted).mean() < before / 50


def test_float32_scales_the_queries_as_ever():
  q, k, v, trainer, sampler = attended('float32')
  wanted = plain(q, k, v, scale_first=True)
  np.testing.assert_array_equal(trainer, wanted)
  np.testing.assert_array_equal(sampler, wanted)
