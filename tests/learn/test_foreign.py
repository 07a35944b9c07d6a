"""Tokens that the policy did not sample, in a loss (`losses.mixed`)."""

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax import lookup
from searchrl_jax.learn import batching, losses, objectives, update
from tests.learn.test_losses import KW, draw
from tests.learn.test_update import config, microbatches, params, updater

pytestmark = pytest.mark.slow

MIXED = {
  'algorithm.loss': 'mixed',
  'algorithm.foreign_objective': 'tests.learn.test_foreign.f',
}


def f(logps, old_logps, advantages):
  """pi^2 A, which no loss of the package has."""
  del old_logps
  return jnp.exp(2 * logps) * advantages


def loss_of(fn, arrays, *foreign, **kw):
  args = [*map(jnp.asarray, (*arrays, *foreign))]

  def total(x):
    loss, sums = fn(x, *args[1:], **kw)
    return loss.sum(), (loss, sums)

  (_, out), gradient = jax.value_and_grad(total, has_aux=True)(args[0])
  return *out, gradient


def mixed(arrays, foreign, **kw):
  own = dict(foreign_objective='tests.learn.test_foreign.f')
  return loss_of(losses.mixed, arrays, foreign, **KW | own | kw)


def same(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(['token', 'sequence', 'product']))
def test_without_a_foreign_token_it_is_clip_bit_for_bit(seed, ratio):
  arrays = draw(seed)
  nobody = np.zeros_like(arrays[-1])
  loss, sums, gradient = mixed(arrays, nobody, ratio=ratio)
  wanted = loss_of(losses.clip, arrays, **KW | dict(ratio=ratio))
  assert sums.pop('foreign_prob') == 0
  same((loss, sums, gradient), wanted)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(['token', 'sequence']))
def test_each_token_has_its_own_loss_and_its_own_gradient(seed, ratio):
  logps, old, behaviour, adv, mask = draw(seed)
  foreign = mask & (np.arange(4) % 2 == 0)[:, None]  # whole rows, as in groups
  # Nothing that a foreign token was sampled with is read.
  unknown = np.where(foreign, np.nan, behaviour)
  arrays = logps, old, unknown, adv, mask
  loss, sums, gradient = mixed(arrays, foreign, ratio=ratio)
  own = logps, old, behaviour, adv, mask & ~foreign
  rest = loss_of(losses.clip, own, **KW | dict(ratio=ratio))
  prob = np.exp(logps.astype(np.float64))
  np.testing.assert_allclose(
    loss, np.where(foreign, -(prob**2) * adv, rest[0]), rtol=1e-5
  )
  np.testing.assert_allclose(
    gradient, np.where(foreign, -2 * prob**2 * adv, rest[2]), rtol=1e-5
  )
  # Ratios, weights and bounds are of the other tokens, bit for bit.
  np.testing.assert_allclose(
    sums.pop('foreign_prob'), prob[foreign].sum(), rtol=1e-5
  )
  same(sums, rest[1])


def objective(**fields):
  c = config(**MIXED | fields)
  return objectives.policy(c), objectives.policy(
    config(**{k: v for k, v in fields.items()})
  )


def test_the_objective_without_foreign_tokens_is_grpos_bit_for_bit():
  kl = {'algorithm.kl': 'loss', 'algorithm.kl_coef': 0.1}
  ours, grpo = objective(**kl, **{'algorithm.entropy_coef': 0.01})
  logps, old, behaviour, adv, mask = map(jnp.asarray, draw(3))
  arrays = dict(
    mask=mask, behaviour_logps=behaviour, advantages=adv, old=old, ref=old
  )
  run = lambda o: jax.value_and_grad(
    lambda x: (o.fn(x, -x, arrays)[0].sum(), o.fn(x, -x, arrays)), has_aux=True
  )(logps)
  ((_, (loss, sums)), gradient), ((_, wanted), theirs) = run(ours), run(grpo)
  assert sums.pop('sampled') == mask.sum() and sums.pop('foreign_prob') == 0
  same((loss, sums), wanted)
  same(gradient, theirs)


def test_metrics_of_ratios_are_those_of_the_sampled_tokens():
  """As if the rows of traces were in another batch."""
  kl = {'algorithm.kl': 'loss', 'algorithm.kl_coef': 0.1}
  ours, grpo = objective(**kl, **{'algorithm.minibatches': 2})
  logps, old, behaviour, adv, mask = draw(7, B=6)
  mask[:, 1] = True
  foreign = mask & (np.arange(6) < 2)[:, None]
  behaviour = np.where(foreign, np.nan, behaviour)
  entropy = jnp.zeros((6, 6))

  def told(o, rows):
    arrays = dict(
      mask=mask, behaviour_logps=behaviour, advantages=adv, old=old, ref=old - 1
    )
    arrays = {k: jnp.asarray(v[rows]) for k, v in arrays.items()}
    x = jnp.where(arrays['mask'], logps[rows], 0.0)  # as a batch has them
    loss, sums = o.fn(x, entropy[rows], arrays)
    sums = dict(sums) | {'tokens': arrays['mask'].sum()}
    return loss, losses.summarise(sums)

  loss, all_ = told(ours, slice(None))
  plain, alone = told(grpo, slice(2, None))
  np.testing.assert_array_equal(loss[2:], plain)
  assert all_['foreign'] == pytest.approx(foreign.sum() / mask.sum())
  assert all_['foreign_prob'] == pytest.approx(np.exp(logps[foreign]).mean())
  read = [k for k in alone if k not in ('tokens', 'entropy', 'nll', 'loss')]
  assert {'mismatch_ess', 'tis_weight', 'kl_old', 'kl_ref'} <= {*read}
  for k in read:
    assert all_[k] == pytest.approx(alone[k], rel=1e-5), k
  # The KL to the reference is estimated where the policy sampled.
  np.testing.assert_allclose(
    loss[:2], np.where(foreign, -np.exp(2 * logps) * adv, 0)[:2], rtol=1e-5
  )


def test_a_batch_of_traces_alone_has_no_ratio():
  ours, _ = objective()
  logps, _, behaviour, adv, mask = map(jnp.asarray, draw(1))
  arrays = dict(
    mask=mask, behaviour_logps=jnp.full_like(behaviour, jnp.nan),
    advantages=adv, old=logps, ref=logps,
  )  # fmt: skip
  _, sums = ours.fn(logps, jnp.zeros_like(logps), arrays)
  found = losses.summarise(dict(sums) | {'tokens': mask.sum()})
  assert found['foreign'] == 1 and found['mismatch_ess'] == 1
  assert found['mismatch_abs'] == found['tis_weight'] == found['kl_old'] == 0


@pytest.mark.long
@pytest.mark.slow
def test_the_gradient_of_the_model_is_that_of_the_formula():
  """REINFORCE with NumPy's derivatives as advantages has the same gradient."""
  lengths = {'batch.lengths': (16,)}
  u = updater(config(**MIXED, **lengths))
  state = u.init(update.copy(params()))
  batches = microbatches(config(**lengths))
  # Every other trajectory is a trace.
  traces = [
    batching.packed([batches], [np.full(16, i % 2) for i in range(12)], bool)
  ][0][0]
  unknown = [
    dataclasses.replace(
      b, behaviour_logps=np.where(t & b.mask, np.nan, b.behaviour_logps)
    )
    for b, t in zip(batches, traces)
  ]
  found, sums = u.grads(state, unknown)
  assert losses.summarise(jax.device_get(sums))['foreign'] > 0.2

  plain = {'algorithm.loss': 'reinforce', 'algorithm.tis': 'none'}
  v = updater(config(**plain, **lengths))
  scaled = []
  for b, t in zip(batches, traces):
    logp = u.output(state.params, b)
    # d(p^2 A) = 2 p^2 A d(log p); of a sampled token, ratio 1: w A d(log p).
    weight = np.minimum(np.exp(logp - b.behaviour_logps), 2.0)
    weight = np.where(t, 2 * np.exp(2 * logp), weight)
    scaled.append(
      dataclasses.replace(
        b, advantages=(b.advantages * weight).astype(np.float32)
      )
    )
  wanted, _ = v.grads(state, scaled)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6),
    found,
    wanted,
  )


def test_losses_that_take_no_foreign_tokens_are_as_they_were():
  for name in losses.NAMES:
    taken = lookup.inputs(getattr(losses, name))
    assert ('foreign' in taken) == (name == 'mixed')
