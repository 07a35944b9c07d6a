"""Experts: routes, kernels against every expert of every token, and meshes."""

import dataclasses
import functools

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax import schema
from searchrl_jax.devices import sharding
from searchrl_jax.lookup import ConfigError
from searchrl_jax.models import (
  attention,
  decoder,
  experts,
  flops,
  grouped,
  parameters,
)
from searchrl_jax.models.experts import Sizes
from tests.golden import models
from tests.learn import test_update as common

pytestmark = pytest.mark.slow

CFG = dataclasses.replace(
  common.CFG, family='qwen3_moe', moe=Sizes(4, 2, 8, normalised=True)
)
D, F = 32, 48  # both are multiples of the least tile
S = Sizes(5, 2, F, True)
PARTS = experts.Parts(S)


def params(s: Sizes, seed=0):
  table = experts.table(s, D)
  keys = jax.random.split(jax.random.key(seed), len(table))
  return {
    name: 0.3 * jax.random.normal(key, shape)
    for key, (name, (shape, _)) in zip(keys, table.items())
  }


def test_a_route_by_hand():
  """Shares .2, .4, .1, .3: the two largest, or these divided by .7."""
  scores = jnp.log(jnp.array([[[2.0, 4.0, 1.0, 3.0]]]))
  ids, weights, _ = experts.route(Sizes(4, 2, 8, False), scores)
  np.testing.assert_array_equal(ids, [[[1, 3]]])
  np.testing.assert_allclose(weights, [[[0.4, 0.3]]], rtol=1e-6)
  _, weights, _ = experts.route(Sizes(4, 2, 8, True), scores)
  np.testing.assert_allclose(weights, [[[4 / 7, 3 / 7]]], rtol=1e-6)


def test_given_experts_by_hand():
  """Of shares .2, .4, .1, .3 the first and the third; not known: the best."""
  scores = jnp.log(jnp.array([[[2.0, 4.0, 1.0, 3.0]] * 3]))
  given = jnp.array([[[2, 0], [-1, -1], [3, 1]]])
  ids, weights, own = experts.route(Sizes(4, 2, 8, True), scores, given)
  np.testing.assert_array_equal(ids, [[[2, 0], [1, 3], [3, 1]]])
  np.testing.assert_array_equal(own, [[[1, 3]] * 3])
  want = [[[1 / 3, 2 / 3], [4 / 7, 3 / 7], [3 / 7, 4 / 7]]]
  np.testing.assert_allclose(weights, want, rtol=1e-6)
  np.testing.assert_array_equal(
    experts.differ(own, given), [[True, False, False]]
  )


def chosen(p, cfg, ids):
  """The experts of each token and layer, int32 [B, T, L, k]."""
  at = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
  x, found = decoder.embed(p, cfg, ids), []
  for i, layer in enumerate(decoder.layers_of(cfg, at)):
    own = {name: stack[i] for name, stack in p['layers'].items()}
    mix = functools.partial(attention.causal, kernel='xla')
    x = decoder.block(own, cfg, x, layer, mix, None, found.append)
  return jnp.stack(found, 2)


def test_experts_of_a_sequence_can_be_given(tile):
  """Its own change nothing; others of a token in one of two layers are half."""
  p = decoder.init_params(CFG, jax.random.key(0), scale=0.3)
  ids = np.random.default_rng(0).integers(0, CFG.vocab_size, (2, 9), np.int32)
  run = jax.jit(functools.partial(decoder.replayed, p, CFG, ids))
  free = jax.jit(functools.partial(decoder.hidden_states, p, CFG, ids))()
  routes = np.asarray(chosen(p, CFG, ids))
  same, differs = run(routes)
  np.testing.assert_allclose(same, free, rtol=1e-5, atol=1e-6)
  assert not np.asarray(differs).any()
  unknown, differs = run(np.full_like(routes, -1))
  np.testing.assert_array_equal(unknown, same)
  assert not np.asarray(differs).any()
  other = np.flip(routes, -1).copy()  # the order does not count
  other[0, 3, 1] = [i for i in range(4) if i not in routes[0, 3, 1]]
  moved, differs = run(other)
  want = np.zeros((2, 9))
  want[0, 3] = 0.5
  np.testing.assert_array_equal(differs, want)
  moved = np.abs(np.asarray(moved) - same).max(-1) > 1e-5
  np.testing.assert_array_equal(moved, want > 0)


def test_the_router_learns_from_what_it_chose():
  """Also from the experts that it did not choose, by the softmax."""
  s, scores = Sizes(4, 2, 8, False), jnp.log(jnp.array([2.0, 4.0, 1.0, 3.0]))
  first = lambda x: experts.route(s, x[None, None])[1][0, 0, 0]
  # d p1 / d score_j = p1 ((j = 1) - p_j), with p = (.2, .4, .1, .3).
  want = [-0.08, 0.24, -0.04, -0.12]
  np.testing.assert_allclose(jax.grad(first)(scores), want, rtol=1e-5)


@settings(max_examples=50)
@given(st.data())
def test_a_plan_has_each_copy_once(data):
  E, k = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
  tile = data.draw(st.sampled_from([1, 16]))
  # -1 and E are experts of other devices.
  one = st.lists(st.integers(-1, E), min_size=k, max_size=k)
  ids = np.array(data.draw(st.lists(one, min_size=1, max_size=40)))
  copies, rows, counts = map(
    np.asarray, experts.plan(jnp.asarray(ids), E, tile)
  )
  here = (ids >= 0) & (ids < E)
  assert (rows[~here] == len(copies)).all()
  np.testing.assert_array_equal(copies[rows[here]], np.flatnonzero(here))
  assert (copies == ids.size).sum() == len(copies) - here.sum()
  ends = np.cumsum(counts)
  assert ends[-1] <= len(copies) and (counts % tile == 0).all()
  owner = np.searchsorted(ends, rows[here], side='right')
  np.testing.assert_array_equal(owner, ids[here])


def computed(local, dtype, ids, seed=0):
  """y, and the gradients of x, the weights and the matrices."""
  rng = np.random.default_rng(seed)
  p = params(S)
  matrices = [p[name] for name in experts.MATRICES]
  x = jnp.asarray(rng.normal(size=(2, len(ids[0]), D)), dtype)
  weights = jnp.asarray(rng.uniform(size=ids.shape), dtype)
  pull = jnp.asarray(rng.normal(size=x.shape), dtype)

  def total(x, weights, matrices):
    y = local(jax.nn.silu, PARTS, x, ids, weights, *matrices)
    return jnp.sum((y * pull).astype(jnp.float32)), y

  found = jax.grad(total, (0, 1, 2), has_aux=True)(x, weights, matrices)
  return jax.tree.map(lambda y: np.asarray(y, np.float32), found)


def routes(kind: str):
  rng = np.random.default_rng(3)
  ids = np.stack([rng.permutation(5)[:2] for _ in range(2 * 21)])
  if kind == 'one':  # and experts without a token
    ids[:] = 3, 1
  if kind == 'elsewhere':  # some experts are on other devices
    ids = ids * 3 - 4
  return jnp.asarray(ids.reshape(2, 21, 2))


@pytest.mark.parametrize('kind', ['any', 'one', 'elsewhere'])
@pytest.mark.parametrize('tile', [1, 16, 32], ids=['tpu', 'gpu16', 'gpu32'])
def test_kernels_compute_what_every_expert_computes(tile, kind):
  ids = routes(kind)
  got = computed(functools.partial(experts._grouped, tile), 'float32', ids)
  want = computed(experts._dense, 'float32', ids)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max())


@pytest.mark.parametrize('tile', [1, 16], ids=['tpu', 'gpu'])
def test_kernels_in_half_precision(tile):
  """Within the rounding of bfloat16; gradients of matrices stay float32."""
  ids = routes('any')
  got = computed(functools.partial(experts._grouped, tile), 'bfloat16', ids)
  want = computed(experts._dense, 'float32', ids)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert np.abs(a - b).mean() <= 1e-2 * np.abs(b).max()
  (_, _, matrices), _ = got
  for g in matrices:  # of which half precision would have kept 8 bits
    assert (g != np.asarray(jnp.asarray(g, jnp.bfloat16), np.float32)).any()


@pytest.mark.parametrize(
  'local',
  [
    experts._dense,
    functools.partial(experts._grouped, 1),
    functools.partial(experts._grouped, 16),
  ],
  ids=['cpu', 'tpu', 'gpu'],
)
def test_a_token_changes_no_bit_of_another(local):
  """Wherever its copies lie among the rows."""
  p = params(S)
  x = jax.random.normal(jax.random.key(1), (1, 40, D))

  @jax.jit
  def run(x):
    ids, weights, _ = experts.route(S, x @ p['router'])
    matrices = [p[name] for name in experts.MATRICES]
    return ids, local(jax.nn.silu, PARTS, x, ids, weights, *matrices)

  ids, before = run(x)
  ids_, after = run(x.at[0, ::3].mul(-1.0))
  moved = np.asarray(ids != ids_).any(-1)[0]
  assert moved[::3].any()
  kept = np.arange(40) % 3 > 0
  np.testing.assert_array_equal(before[:, kept], after[:, kept])
  assert (before != after)[:, ~kept].any()


def loss(p, cfg, ids, mesh=None, routes=None):
  hidden, _ = decoder.replayed(p, cfg, ids, routes, mesh)
  logits = decoder.logits(p, cfg, hidden)
  weight = jnp.cos(jnp.arange(logits.size)).reshape(logits.shape)
  return jnp.mean(weight * logits)


@pytest.fixture(params=[None, 1, 16], ids=['cpu', 'tpu', 'gpu'])
def tile(request, monkeypatch):
  """What is computed on a machine of this kind."""
  if request.param:
    monkeypatch.setattr(grouped, 'fits', lambda *_: True)
    monkeypatch.setattr(grouped, 'tile', lambda rows: request.param)
  return request.param


@pytest.mark.parametrize(
  'shape, rows, dtype, given',
  [
    ((1, 2, 4), 8, 'float32', False),
    ((1, 8, 1), 8, 'float32', False),
    ((2, 2, 2), 8, 'bfloat16', False),
    ((2, 2, 2), 6, 'float32', False),  # which the devices do not divide
    ((2, 2, 2), 8, 'float32', True),
  ],
)
def test_values_and_gradients_on_a_mesh(shape, rows, dtype, given, tile):
  """As on one device, where every expert is computed."""
  mesh = sharding.make_mesh(*shape)
  moe = dataclasses.replace(CFG.moe, d_ff=16, count=8)
  cfg = dataclasses.replace(CFG, moe=moe, remat='block')
  p = decoder.init_params(cfg, jax.random.key(0), scale=0.3)
  rng = np.random.default_rng(0)
  ids = rng.integers(0, cfg.vocab_size, (rows, 12)).astype(np.int32)
  routes = None
  if given:
    routes = rng.integers(0, 4, (*ids.shape, cfg.n_layers, 1)) * 2 + [0, 1]
    routes[:, ::3] = -1
  with pytest.MonkeyPatch.context() as m:
    m.setattr(grouped, 'fits', lambda *_: False)
    want = jax.value_and_grad(loss)(p, cfg, ids, routes=routes)
  layout = decoder.param_shardings(cfg, mesh)
  run = dataclasses.replace(cfg, dtype=dtype)
  of = jax.jit(
    functools.partial(jax.value_and_grad(loss), cfg=run, mesh=mesh),
    out_shardings=(None, layout),
  )
  got = of(jax.device_put(p, layout), ids=ids, routes=routes)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    a, b = np.asarray(a), np.asarray(b)
    if dtype == 'float32':
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    else:  # some routes differ
      assert a.dtype == b.dtype
      assert np.abs(a - b).mean() <= 0.1 * np.abs(b).mean() + 1e-6


@pytest.mark.parametrize('remat', ['block', 'mlp'])
def test_what_is_computed_again_is_the_same(remat):
  p = decoder.init_params(CFG, jax.random.key(0), scale=0.3)
  ids = jnp.arange(24, dtype=jnp.int32).reshape(2, 12)
  want = jax.grad(loss)(p, CFG, ids)
  got = jax.grad(loss)(p, dataclasses.replace(CFG, remat=remat), ids)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8)


def test_a_mesh_that_does_not_divide_the_experts_is_refused():
  mesh = sharding.make_mesh(1, 1, 8)
  p = decoder.init_params(CFG, jax.random.key(0))
  with pytest.raises(ConfigError, match='tensor=8: .* the 4 experts'):
    loss(p, CFG, jnp.zeros((1, 4), jnp.int32), mesh)
  experts.require_divisible(None, 8, 1)
  config = schema.base()
  config.model.arch.update(models.CONFIGS['qwen3.moe'])  # 8 experts
  config.mesh.fsdp, config.mesh.tensor = 8, 2
  with pytest.raises(ConfigError, match='fsdp=8, tensor=2: .* the 8 experts'):
    parameters.model_config(config, 48)


def test_flops_are_those_of_the_experts_that_a_token_has():
  """6 of each parameter of a matrix, of two experts of four."""
  dense = dataclasses.replace(CFG, moe=None, d_ff=2 * CFG.moe.d_ff)
  router = 6 * CFG.n_layers * CFG.d_model * CFG.moe.count * 9
  got, want = (flops.of_rows(cfg, [9], 4) for cfg in (CFG, dense))
  assert got == want + router


def test_tiles_follow_the_rows_of_an_expert():
  with sharding.compiling_for('gpu'):
    assert [grouped.tile(n) for n in (0, 63, 64, 128, 256)] == [
      *(16, 16, 32, 64, 128)
    ]
    half = [jnp.zeros((2, 64, n), jnp.bfloat16) for n in (16, 24)]
    assert grouped.fits(half[0].dtype, half[0])
    assert not grouped.fits(half[0].dtype, *half)
    assert not grouped.fits(jnp.float64, half[0])
  assert experts.compile_at_once(CFG.moe)
  with sharding.compiling_for('tpu'):
    assert experts.compile_at_once(None)
    assert not experts.compile_at_once(CFG.moe)
    assert grouped.tile(1000) == 1 and grouped.rows(1000, 1) == 1024
