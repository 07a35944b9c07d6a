"""Splash attention, interpreted, against the formula and the decoder's own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax.devices import sharding
from searchrl_jax.models import decoder, splash
from tests.learn import test_update as base

pytestmark = pytest.mark.slow

CFG = base.CFG

B, N, K, H = 2, 4, 2, 32


def inputs(T, dtype=jnp.float32):
  keys = jax.random.split(jax.random.key(0), 3)
  shapes = (B, T, N, H), (B, T, K, H), (B, T, K, H)
  return [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes)]


def segments(T):
  """Row 0 has three segments; row 1 is one with padding behind it."""
  at = np.arange(T)
  rows = np.stack([(at >= 10) + (at >= T // 2) * 1, (at >= T - 7) * 1])
  return jnp.asarray(rows, jnp.int32)


def reference(q, k, v, segments, window=0):
  """Softmax over the tokens before and of the same segment, all at once."""
  T = q.shape[1]
  k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
  s = jnp.einsum('BTNH,BSNH->BNTS', q, k) / np.sqrt(H)
  own = segments[:, None, :, None] == segments[:, None, None, :]
  seen = np.tril(np.ones((T, T), bool))
  if window:
    seen &= np.triu(seen, 1 - window)
  s = jnp.where(own & seen, s, -np.inf)
  return jnp.einsum('BNTS,BSNH->BTNH', jax.nn.softmax(s), v)


@pytest.mark.long
@pytest.mark.parametrize('T, window', [(128, 0), (200, 0), (200, 33)])
def test_values_and_gradients_are_those_of_the_formula(T, window):
  q, k, v = inputs(T)
  own = segments(T)
  attend = functools.partial(splash.attention, window=window)
  formula = functools.partial(reference, window=window)

  def total(f):
    # A weight for each output, so that no gradient cancels.
    weight = jnp.cos(jnp.arange(q.size, dtype=jnp.float32)).reshape(q.shape)
    return lambda *a: jnp.sum(weight * f(*a, own))

  np.testing.assert_allclose(
    attend(q, k, v, own), formula(q, k, v, own), atol=2e-6
  )
  got = jax.grad(total(attend), (0, 1, 2))(q, k, v)
  want = jax.grad(total(formula), (0, 1, 2))(q, k, v)
  for a, b in zip(got, want):
    np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_token_changes_no_bit_of_another_segment():
  q, k, v = inputs(128)
  own = segments(128)
  before = splash.attention(q, k, v, own)
  after = splash.attention(q, k.at[0, 3].add(1.0), v.at[0, 3].add(1.0), own)
  changed = np.any(np.asarray(before != after), (2, 3))
  np.testing.assert_array_equal(np.flatnonzero(changed[0]), np.arange(3, 10))
  assert not changed[1].any()


def test_devices_compute_their_rows_and_heads():
  mesh = sharding.make_mesh(1, 2, 2, devices=jax.devices()[:4])
  q, k, v = inputs(128)
  own = segments(128)
  alone = splash.attention(q, k, v, own)
  cut = jax.jit(lambda *a: splash.attention(*a, own, mesh))(q, k, v)
  np.testing.assert_allclose(cut, alone, atol=1e-6)


@pytest.mark.parametrize('tensor', [1, 4])
def test_packed_rows_through_the_decoder(tensor):
  """As XLA's attention; 4 devices of the axis tensor share 2 KV heads."""
  mesh = sharding.make_mesh(1, 2, tensor, devices=jax.devices()[: 2 * tensor])
  ids = jax.random.randint(jax.random.key(1), (B, 96), 0, CFG.vocab_size)
  starts = jnp.asarray([[0, 40, 41], [0, 70, 96]], jnp.int32)
  p = base.params()

  def states(cfg, mesh=None):
    return jax.jit(decoder.hidden_states, static_argnums=(1, 3))(
      p, cfg, ids, mesh, starts
    )

  found = states(dataclasses.replace(CFG, attention='splash'), mesh)
  np.testing.assert_allclose(found, states(CFG), atol=1e-5)
