"""The critic: its values, what they may depend on, and what it learns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax.devices import sharding
from searchrl_jax.learn import batching, critic, objectives, optim, update
from searchrl_jax.models import decoder
from tests.learn import test_update as common

pytestmark = pytest.mark.slow

CFG = critic.config(common.UNTIED)


def params():
  found = critic.init(common.params(tied=False), CFG)
  rng = np.random.default_rng(0)
  found['value'] = jnp.asarray(rng.normal(size=CFG.d_model), jnp.float32)
  found['value_bias'] = jnp.full((1,), 0.25)
  return found


def make(c, mesh=None):
  c.critic.lr = 1e-2
  return update.Updater(
    CFG,
    c.batch,
    temperature=1.0,
    objective=objectives.value(c),
    mesh=mesh,
    tx=optim.make(c.optim, 100),
  )


def plain(p, batch):
  """V before each loss token, without gathering: [B, T]."""
  ids, pack = common.alone(batch)
  hidden = decoder.hidden_states(p, CFG, ids)
  value = hidden @ p['value'] + p['value_bias']
  return pack(jnp.pad(value[:, :-1], ((0, 0), (1, 0))))


@pytest.mark.long
def test_a_fresh_critic_is_the_backbone_and_says_zero():
  policy = common.params(tied=False)
  found = critic.init(policy, CFG)
  assert set(found) == {'embed', 'layers', 'final_norm', 'value', 'value_bias'}
  assert {p: x.shape for p, x in decoder.flatten(found).items()} == {
    p: shape for p, (shape, _) in critic.param_table(CFG).items()
  }
  for path, x in decoder.flatten(policy).items():
    if path != 'head':
      other = decoder.flatten(found)[path]
      np.testing.assert_array_equal(x, other)
      assert x.unsafe_buffer_pointer() != other.unsafe_buffer_pointer()
  c = common.config()
  for b in common.microbatches(c):
    assert not make(c).output(found, b).any()


@pytest.mark.long
def test_values_are_those_of_the_hidden_states_before():
  c, p = common.config(), params()
  for b in common.microbatches(c):
    np.testing.assert_allclose(
      make(c).output(p, b), plain(p, b), rtol=1e-5, atol=1e-5
    )


def test_a_value_does_not_see_the_token_it_stands_before():
  c, p = common.config(), params()
  [b, *_] = common.microbatches(c)
  row = int(np.flatnonzero(b.mask.any(1))[0])
  at = int(np.flatnonzero(b.mask[row])[-1])
  before = make(c).output(p, b)
  b.ids[row, at] = (b.ids[row, at] + 1) % CFG.vocab_size
  np.testing.assert_array_equal(make(c).output(p, b), before)
  b.ids[row, at - 1] = (b.ids[row, at - 1] + 1) % CFG.vocab_size
  assert make(c).output(p, b)[row, at] != before[row, at]


@pytest.mark.long
@pytest.mark.parametrize('clip', [0.0, 0.05])
def test_loss_and_gradient_are_autodiffs_of_the_clipped_error(clip):
  c, p = common.config(**{'critic.clip': clip}), params()
  u, batches = make(c), common.microbatches(c)
  targets = [b.advantages for b in batches]
  old = [
    u.output(p, b) + 0.1 * np.cos(np.arange(b.ids.shape[1])) for b in batches
  ]
  tokens = float(sum(b.mask.sum() for b in batches))

  def want(p):
    total = 0.0
    for b, before, goal in zip(batches, old, targets):
      v = plain(p, b)
      near = before + jnp.clip(v - before, -clip, clip)
      error = (v - goal) ** 2
      if clip:
        error = jnp.maximum(error, (near - goal) ** 2)
      total += jnp.sum(jnp.where(b.mask, error, 0.0)) / 2
    return total / tokens

  grads, sums = u.grads(u.init(update.copy(p)), batches, old)
  value, wanted = jax.value_and_grad(want)(p)
  np.testing.assert_allclose(sums['loss'], value, rtol=1e-5)
  for (path, a), b in zip(
    jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(grads)
  ):
    np.testing.assert_allclose(b, a, rtol=2e-4, atol=1e-6, err_msg=str(path))


@pytest.mark.long
def test_it_learns_returns_and_says_how_much_it_explains():
  c = common.config(**{'critic.clip': 0.0})
  u, batches = make(c), common.microbatches(c)
  state, found = u.init(update.copy(params())), []
  for _ in range(80):
    old = [u.output(state.params, b) for b in batches]
    state, metrics = u.step(state, batches, old)
    found.append(objectives.explained(metrics))
  assert found[0]['critic_explained_variance'] < 0.1
  assert found[-1]['critic_explained_variance'] > 0.8
  goal = np.concatenate([b.advantages[b.mask] for b in batches])
  np.testing.assert_allclose(found[-1]['critic_return'], goal.mean(), rtol=1e-4)


@pytest.mark.long
def test_a_mesh_does_not_show():
  c, p = common.config(), params()
  mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
  alone, wide = make(c), make(c, mesh)
  one = common.microbatches(c)
  many = common.microbatches(c, shards=wide.shards)
  masks = batching.masks(common.world()[0])
  found = []
  for u, batches in ((alone, one), (wide, many)):
    state = u.init(update.copy(p))
    old = [u.output(state.params, b) for b in batches]
    found.append(batching.unpacked([batches], [old], masks))
    state, metrics = u.step(state, batches, old)
    found[-1].append(np.asarray(state.params['layers']['q']).ravel())
    found[-1].append(np.array([metrics['loss']]))
  for a, b in zip(*found):
    np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
