"""Delta nets: chunks against the recurrence, packed against alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax import lookup
from searchrl_jax.devices import sharding
from searchrl_jax.models import attention, decoder, deltanet, flops
from tests.learn import test_update as common

pytestmark = pytest.mark.slow

SIZES = deltanet.Sizes(2, 4, 8, 12, 4)
# A period and a layer after it, as Qwen3.5.
CFG = dataclasses.replace(
  common.CFG,
  norm_eps=1e-2,  # see `models.QWEN35` of tests/golden
  family='qwen3_5_text',
  n_layers=5,
  head_dim=8,
  global_every=4,
  rotary_dim=4,
  delta=SIZES,
)


def inputs(rng, B, T, s=SIZES):
  """q, k, v, g, beta as `deltanet.chunked` takes them; decays of all kinds."""
  q, k = (rng.normal(size=(B, T, s.key_heads, s.key_dim)) for _ in range(2))
  q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
  v = rng.normal(size=(B, T, s.value_heads, s.value_dim))
  rate = np.geomspace(0.01, 16, s.value_heads)
  g = -rate * np.log1p(np.exp(rng.normal(size=(B, T, s.value_heads))))
  beta = 1 / (1 + np.exp(-rng.normal(size=(B, T, s.value_heads))))
  return q, k, v, g, beta


def recurrence(q, k, v, g, beta, segments, state):
  """The rule token by token, in float64."""
  out, S = np.zeros(v.shape), np.array(state, np.float64)
  G = v.shape[2] // k.shape[2]
  for b, t in np.ndindex(*segments.shape):
    if t and segments[b, t] != segments[b, t - 1]:
      S[b] = 0
    for j in range(v.shape[2]):
      own, key = S[b, j], k[b, t, j // G]
      own *= np.exp(g[b, t, j])
      own += np.outer(key, beta[b, t, j] * (v[b, t, j] - own.T @ key))
      out[b, t, j] = own.T @ q[b, t, j // G]
  return out, S


def error(got, want):
  got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
  # The decay of a lone token has no gradient.
  return np.linalg.norm(got - want) / (np.linalg.norm(want) or 1.0)


def segments_of(T, *starts):
  return np.searchsorted(starts, np.arange(T), 'right').astype(np.int32)


CASES = {
  # Boundaries in a chunk, several in one, at its border, and none.
  'short': [segments_of(5, 2), segments_of(5)],
  'chunks': [segments_of(192, 64, 130, 131, 150), segments_of(192)],
  'uneven': [segments_of(150, 70, 128), segments_of(150, 1, 149)],
}


@pytest.mark.parametrize('case', CASES)
def test_chunks_are_the_recurrence(case):
  rng = np.random.default_rng(0)
  segments = np.stack(CASES[case])
  B, T = segments.shape
  given = inputs(rng, B, T)
  state = rng.normal(size=(B, 4, 8, 12))
  args = [jnp.asarray(x, jnp.float32) for x in given]
  want, after = recurrence(*given, segments, state)
  got, left = jax.jit(deltanet.chunked)(
    *args, segments, jnp.asarray(state, jnp.float32)
  )
  assert got.dtype == left.dtype == jnp.float32
  assert error(got, want) <= 1e-6 and error(left, after) <= 1e-6


def test_a_strong_decay_costs_what_follows_no_digits():
  """Of eight tokens one forgets nearly all, some next to nothing; keys are
  alike, and beta is 1."""
  rng = np.random.default_rng(0)
  segments = np.stack([segments_of(150), segments_of(150, 70, 128)])
  q, k, v, g, beta = inputs(rng, 2, 150)
  k = k[:, :1] + 0.1 * rng.normal(size=k.shape)
  k /= np.linalg.norm(k, axis=-1, keepdims=True)
  forgets = np.arange(150)[:, None] % 8 == np.arange(g.shape[-1])
  g = np.where(forgets, -80.0, -(rng.random(g.shape) ** 3))
  given, state = (q, k, v, g, np.ones_like(beta)), np.zeros((2, 4, 8, 12))
  want, after = recurrence(*given, segments, state)
  args = [jnp.asarray(x, jnp.float32) for x in given]
  got, left = jax.jit(deltanet.chunked)(*args, segments)
  assert error(got, want) <= 1e-6 and error(left, after) <= 1e-6


@pytest.mark.parametrize('platform', ['cpu', 'gpu'])  # sums in one pass, or not
def test_tokens_behind_a_log_are_the_recurrence(platform, monkeypatch):
  """Whatever the lines hold that are not written yet."""
  monkeypatch.setattr(deltanet.sharding, 'platform', lambda: platform)
  rng = np.random.default_rng(0)
  T = 5
  q, k, v, g, beta = given = inputs(rng, 2, T)
  state = rng.normal(size=(2, 4, 8, 12))
  want, after = recurrence(*given, np.zeros((2, T)), state)
  ks, us, got = np.full_like(k, np.nan), np.full_like(v, np.nan), []
  step = jax.jit(deltanet.step)
  for t in range(T):
    left = np.zeros((2, 1 + T, 4))
    for i in range(t + 1):  # of the state, then of each line
      left[:, i] = np.exp(g[:, i : t + 1].sum(1))
    now = (x[:, t] for x in (q, k, v, beta))
    args = (jnp.asarray(x, jnp.float32) for x in (*now, state, ks, us, left))
    o, u = step(*args)
    ks[:, t], us[:, t] = k[:, t], u
    got.append(o)
  assert error(np.stack(got, 1), want) <= 1e-6
  for t in range(T):
    state = deltanet.written(state, ks[:, t], us[:, t], g[:, t])
  assert error(state, after) <= 1e-6


@pytest.mark.long
def test_gradients_are_those_of_the_recurrence():
  """Along random directions, by differences in float64."""
  rng = np.random.default_rng(1)
  segments = np.stack([segments_of(100, 30, 64), segments_of(100, 99)])
  given, state = inputs(rng, 2, 100), rng.normal(size=(2, 4, 8, 12))
  weights = rng.normal(size=given[2].shape)
  zeros = np.zeros_like(state)

  def loss(*args):
    out, left = deltanet.chunked(*args[:5], segments, args[5])
    return jnp.sum(out * weights) + jnp.sum(left * state)

  def exact(*args):
    out, left = recurrence(*args[:5], segments, args[5])
    return np.sum(out * weights) + np.sum(left * state)

  at = (*given, zeros)
  args = [jnp.asarray(x, jnp.float32) for x in at]
  grads = jax.grad(loss, range(6))(*args)
  for i, grad in enumerate(grads):
    way = rng.normal(size=at[i].shape)
    move = lambda d, i=i, way=way: [
      x + d * way if j == i else x for j, x in enumerate(at)
    ]
    want = (exact(*move(1e-6)) - exact(*move(-1e-6))) / 2e-6
    scale = np.linalg.norm(grad) * np.linalg.norm(way)
    found = np.sum(np.asarray(grad, np.float64) * way)
    assert abs(found - want) <= 1e-6 * scale, i


def test_the_convolution_by_hand():
  """Weights 1, 10, 100 of the tokens from two before to the own one."""
  x = jnp.arange(1.0, 7.0)[None, :, None]
  w = jnp.array([[[1.0, 10.0, 100.0]]])
  positions = jnp.array([[0, 1, 2, 0, 1, 2]])
  want = np.array([100, 210, 321, 400, 540, 654.0])
  found = deltanet.convolve(x, w, positions)
  np.testing.assert_allclose(found[0, :, 0], want, rtol=1e-6)  # SiLU of 100
  later = deltanet.convolve(x[:, 2:3], w, positions[:, 2:3], x[:, :2])
  np.testing.assert_array_equal(later, found[:, 2:3])


@pytest.mark.long
def test_packed_is_separate():
  """Outputs to 1e-6 and gradients to 1e-5 of a layer's mixer."""
  rng = np.random.default_rng(2)
  T, starts = 200, [0, 1, 60, 64, 137]
  s, ends = SIZES, [*starts[1:], T]
  x = jnp.asarray(rng.normal(size=(1, T, s.channels)), jnp.float32)
  w = jnp.asarray(rng.normal(size=(s.channels, 1, s.taps)), jnp.float32)
  _, _, _, g, beta = inputs(rng, 1, T)
  g, beta = jnp.asarray(g, jnp.float32), jnp.asarray(beta, jnp.float32)
  weights = rng.normal(size=(1, T, s.value_heads, s.value_dim))

  def mixed(w, x, g, beta, starts):
    place = attention.packed(jnp.array([starts], jnp.int32), x.shape[1])
    where = place.positions, place.segments
    return deltanet.causal(s, w, x, g, beta, *where)

  def loss(w, x, g, beta, starts, weights):
    out = mixed(w, x, g, beta, starts)
    return jnp.sum(out * weights), out

  whole = jax.jit(jax.grad(loss, range(4), has_aux=True))
  grads, out = whole(w, x, g, beta, starts, weights)
  total = 0
  for i, j in zip(starts, ends):
    at = np.s_[:, i:j]
    (dw, *own), alone = whole(w, x[at], g[at], beta[at], [0], weights[at])
    total += dw
    assert error(out[at], alone) <= 1e-6
    for a, b in zip(grads[1:], own):
      assert error(a[at], b) <= 1e-5
  assert error(grads[0], total) <= 1e-5


@functools.partial(jax.jit, static_argnums=(1, 3))
def hidden(p, cfg, ids, mesh=None):
  return decoder.hidden_states(p, cfg, ids, mesh)


@pytest.mark.long
@pytest.mark.parametrize('layers', [2, 4, 8])
def test_a_scan_over_periods_is_the_layers_one_by_one(layers):
  cfg = dataclasses.replace(CFG, n_layers=layers)
  p = decoder.init_params(cfg, jax.random.key(0), scale=0.3)
  ids = np.random.default_rng(0).integers(0, cfg.vocab_size, (2, 70))
  x = decoder.embed(p, cfg, ids)
  at = jnp.broadcast_to(jnp.arange(70), ids.shape)
  where = dict(positions=at, segments=jnp.zeros_like(at))
  for i, layer in enumerate(decoder.layers_of(cfg, at)):
    assert layer.delta == bool((i + 1) % 4)
    own = {
      k: v[cfg.layers_with(k).index(i)]
      for k, v in p['layers'].items()
      if i in cfg.layers_with(k)
    }
    mix = functools.partial(deltanet.causal, cfg.delta, **where)
    x = decoder.block(
      own, cfg, x, layer, mix if layer.delta else attention.causal
    )
  want = decoder.norm(cfg, x, p['final_norm'])
  assert error(hidden(p, cfg, ids), want) <= 1e-5


@pytest.mark.long
@pytest.mark.parametrize('shape', [(2, 2, 2), (1, 1, 8)])
def test_a_mesh_and_remat_change_nothing(shape):
  """Loss and gradients of one device, without remat."""
  cfg = dataclasses.replace(CFG, n_heads=8, d_model=32)
  p = decoder.init_params(cfg, jax.random.key(0), scale=0.1)
  rng = np.random.default_rng(0)
  ids = rng.integers(0, cfg.vocab_size, (4, 70))
  weights = rng.normal(size=(4, 70, cfg.d_model))

  def grads(p, cfg, mesh=None):
    loss = lambda p: jnp.sum(hidden(p, cfg, ids, mesh) * weights)
    return jax.tree.leaves(jax.grad(loss)(p))

  want = grads(p, cfg)
  mesh = sharding.make_mesh(*shape)
  placed = jax.device_put(p, decoder.param_shardings(cfg, mesh))
  again = dataclasses.replace(cfg, remat='attention')
  for got in grads(placed, cfg, mesh), grads(p, again):
    for x, y in zip(got, want, strict=True):
      assert error(x, y) <= 1e-5


def test_fresh_parameters():
  p = decoder.init_params(CFG, jax.random.key(0))['layers']
  assert p['delta_qkv'].shape == (4, 16, 2 * 2 * 8 + 4 * 12)
  assert p['q'].shape == (1, 16, 4, 2 * 8)
  rate = np.exp(p['delta_a_log'])
  assert rate.min() >= 0.01 and rate.max() <= 16 and np.ptp(rate) > 4
  assert (p['delta_norm'] == 1).all()
  steps = jax.nn.softplus(p['delta_dt_bias'])
  assert 0.001 <= steps.min() < 0.01 < steps.max() <= 0.1
  assert (p['q_norm'] == 0).all() and (p['attn_norm'] == 0).all()
  assert abs(p['delta_conv']).max() <= 0.5 < 4 * abs(p['delta_conv']).mean()


def test_flops_golden():
  # Matrices: MLP 3 x 16 x 24 in five layers; of attention q 16 x 4 x 16, k and
  # v 16 x 2 x 8, o 4 x 8 x 16; of four nets qkv 16 x 80, z and o 16 x 48, a and
  # b 16 x 4, and 80 x 4 of the convolution.
  matrices = 5 * 1152 + 1024 + 2 * 256 + 512
  matrices += 4 * (1280 + 2 * 768 + 2 * 64 + 320)
  want = 6 * matrices * 7 + 12 * 4 * 8 * 49 + 6 * 16 * 37 * 3
  want += 24 * 4 * (4 * 8 * 12) * 7  # states
  assert flops.of_rows(CFG, [7], 3) == want


def test_what_is_not_supported_is_named():
  ids = jnp.zeros((1, 4), jnp.int32)
  tree = attention.Nodes(ids, ids)
  p = decoder.init_params(CFG, jax.random.key(0))
  with pytest.raises(lookup.ConfigError, match='config.batch.prefix_tokens=0'):
    decoder.hidden_states(p, CFG, ids, tree=tree)
