"""On meshes of 1 and 8 devices: one device's loss and gradients."""

import jax
import numpy as np
import pytest

from searchrl_jax.devices import sharding
from searchrl_jax.learn import update
from searchrl_jax.models import decoder
from tests.learn import test_update as base

pytestmark = pytest.mark.slow

# One, two and three axes.
MESHES = [(1, 1, 1), (8, 1, 1), (1, 4, 2), (1, 1, 8), (2, 2, 2)]
# Two KV heads: replicated where tensor is 4 or 8. Dimensions that 8 divides
# elsewhere, so that every axis really shards something.
CFG = decoder.DecoderConfig(
  vocab_size=40,
  d_model=16,
  n_layers=2,
  n_heads=8,
  n_kv_heads=2,
  head_dim=4,
  d_ff=24,
  family='qwen2',
)
KW = {
  'batch.lengths': (16,),
  'batch.tokens': 32,
  'batch.loss_fraction': 0.75,
  'batch.head_chunk': 16,
  'algorithm.aggregation': 'sequence',
  'algorithm.ratio': 'sequence',
  'algorithm.entropy_coef': 0.01,
}


@pytest.fixture(scope='module')
def reference():
  out = run(None)
  assert out['microbatches'] >= 3
  return out


def run(mesh, optimizer=False):
  """Gradients of one minibatch; the optimizer's programs only if asked."""
  c = base.config(**KW)
  u = base.updater(c, cfg=CFG, mesh=mesh)
  params = decoder.init_params(CFG, jax.random.key(0), scale=0.3)
  if optimizer:
    state = u.init(params)
  else:
    if mesh is not None:
      params = jax.device_put(params, decoder.param_shardings(CFG, mesh))
    state = update.TrainState(params, None, None)
  batches = base.microbatches(c, shards=u.shards)
  grads, sums = u.grads(state, batches)
  return {
    'grads': grads,
    'sums': sums,
    'microbatches': len(batches),
    'updater': u,
    'state': state,
    'batches': batches,
  }


def close(got, want, tol=1e-5):
  for path, x, y in zip(
    update.optim.paths(want),
    jax.tree.leaves(got),
    jax.tree.leaves(want),
    strict=True,
  ):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    error = np.abs(x - y).max() / max(np.abs(y).max(), 1e-12)
    assert error <= tol, f'{path}: relative error {error:.2e}'


@pytest.mark.long
@pytest.mark.parametrize('shape', MESHES, ids=lambda s: 'x'.join(map(str, s)))
def test_loss_and_gradients(shape, reference):
  n = int(np.prod(shape))
  if len(jax.devices()) < n:
    pytest.skip(
      f'{n} devices need XLA_FLAGS=--xla_force_host_platform_device'
      '_count=8 before JAX starts'
    )
  mesh = sharding.make_mesh(*shape, devices=jax.devices()[:n])
  got = run(mesh)
  if shape[0] * shape[1] == 1:
    assert got['microbatches'] == reference['microbatches']
  np.testing.assert_allclose(
    got['sums']['loss'], reference['sums']['loss'], rtol=1e-5
  )
  close(got['grads'], reference['grads'])
  layout = decoder.param_shardings(CFG, mesh)
  jax.tree.map(
    lambda g, s: (
      g.sharding.is_equivalent_to(s, g.ndim)
      or pytest.fail(f'{g.sharding} is not {s}')
    ),
    got['grads'],
    layout,
  )


@pytest.mark.long
def test_steps_and_score():
  """Two optimizer steps and the scorer, sharded state included."""
  one = run(None, optimizer=True)
  many = run(sharding.make_mesh(2, 2, 2), optimizer=True)
  out = []
  for r in (one, many):
    u, state = r['updater'], r['state']
    scores = np.zeros((12, 16))
    for b in r['batches']:
      found = u.output(state.params, b)
      for i, at in b.spans():
        scores[i, : b.ids[at].size] = found[at]
    for _ in range(2):
      state, metrics = u.step(state, r['batches'])
      assert metrics['finite'] == 1
    out.append((scores, state, metrics))
  np.testing.assert_allclose(out[1][0], out[0][0], rtol=1e-5, atol=1e-5)
  for k in ('loss', 'entropy', 'grad_norm', 'mismatch_abs', 'mismatch_ess'):
    np.testing.assert_allclose(out[1][2][k], out[0][2][k], rtol=1e-4, err_msg=k)
  # Adam's moments are sharded as their parameters are.
  state = out[1][1]
  moments = [
    x
    for x in jax.tree.leaves(state.opt_state)
    if x.shape == state.params['embed'].shape
  ]
  assert len(moments) == 2
  for x in moments:
    assert x.sharding.is_equivalent_to(state.params['embed'].sharding, x.ndim)
    assert not x.sharding.is_fully_replicated
