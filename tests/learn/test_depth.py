"""Metrics by depth: where a token is counted, and that its parts add up."""

import jax.numpy as jnp
import numpy as np

from searchrl_jax.learn import depth, losses


def test_a_turn_is_a_run_and_a_decile_a_tenth_of_what_was_sampled():
  mask = np.zeros((3, 30), bool)
  mask[0, 2:7] = mask[0, 9:14] = True  # ten tokens in two turns
  mask[1, 1:30:2] = True  # 15 turns of one token
  decile, turn = np.asarray(depth.bins(jnp.asarray(mask)))
  assert decile[0, mask[0]].tolist() == [*range(10)]
  assert turn[0, mask[0]].tolist() == [0] * 5 + [1] * 5
  # 10 i // 15 of token i; turns from the tenth on are the last bin.
  assert decile[1, mask[1]].tolist() == [10 * i // 15 for i in range(15)]
  assert turn[1, mask[1]].tolist() == [*range(9), *[9] * 6]


def test_means_golden():
  # Differences 0, .1 in a first turn and -.3 in a second; a token of another
  # trajectory, .2, is in decile 0 and turn 0. exp(d) - 1 - d: 0, .00517,
  # .04082 and .02140.
  d = np.zeros((2, 6), np.float32)
  d[0, [1, 2, 4]], d[1, 3] = [0.0, 0.1, -0.3], 0.2
  mask = np.zeros((2, 6), bool)
  mask[0, [1, 2, 4]] = mask[1, 3] = True
  sums = losses.mismatch(*map(jnp.asarray, (d, 0 * d, mask, mask)))
  out = losses.summarise(dict(sums) | {'tokens': 4.0})
  found = {k: v for k, v in out.items() if k.startswith('mismatch_kl')}
  wanted = {
    'mismatch_kl': 0.06739 / 4,
    'mismatch_kl/decile=0': 0.02140 / 2,
    'mismatch_kl/decile=3': 0.00517,
    'mismatch_kl/decile=6': 0.04082,
    'mismatch_kl/turn=0': 0.02657 / 3,
    'mismatch_kl/turn=1': 0.04082,
  }
  assert found.keys() == wanted.keys()
  for k, v in wanted.items():
    np.testing.assert_allclose(found[k], v, atol=2e-5, err_msg=k)
  np.testing.assert_allclose(out['mismatch_abs/turn=1'], 0.3, rtol=1e-6)
  np.testing.assert_allclose(out['mismatch_abs/turn=0'], 0.1, rtol=1e-6)
  largest = {k: v for k, v in out.items() if k.startswith('mismatch_max')}
  wanted = {'': 0.3, '/decile=0': 0.2, '/decile=3': 0.1, '/decile=6': 0.3}
  wanted |= {'/turn=0': 0.2, '/turn=1': 0.3}
  assert largest.keys() == {f'mismatch_max{k}' for k in wanted}
  for k, v in wanted.items():
    np.testing.assert_allclose(largest[f'mismatch_max{k}'], v, rtol=1e-6)
  assert out['mismatch_outside/turn=1'] == 1.0
  np.testing.assert_allclose(out['mismatch_outside/turn=0'], 2 / 3)


def test_tokens_without_a_log_prob_of_the_engine_are_at_no_depth():
  mask = np.ones((1, 6), bool)
  recorded = mask & (np.arange(6) != 2)  # an observation, in the loss
  d = np.where(recorded, 0.5, 0.0).astype(np.float32)
  sums = losses.mismatch(*map(jnp.asarray, (d, 0 * d, mask, recorded)))
  out = losses.summarise(dict(sums) | {'tokens': 6.0})
  deep = {k: v for k, v in out.items() if k.startswith('mismatch_abs/')}
  assert {k for k in deep if 'turn' in k} == {
    f'mismatch_abs/turn={i}' for i in (0, 1)
  }
  assert set(deep.values()) == {0.5}


def test_a_small_difference_is_no_rounding():
  """exp(d) - 1 - d = d^2 / 2 of a small d; float32 has exp(1e-4) to 6e-8."""
  d = jnp.full((1, 4), 1e-4)
  mask = jnp.ones((1, 4), bool)
  sums = losses.mismatch(d, 0 * d, mask, mask)
  out = losses.summarise(dict(sums) | {'tokens': 4.0})
  np.testing.assert_allclose(out['mismatch_kl'], 5e-9, rtol=1e-2)


def test_maxima_of_microbatches_are_joined_by_max():
  d = jnp.array([[0.1, 0.0, -0.3], [0.2, 0.0, 0.0]], jnp.float32)
  mask = jnp.array([[1, 0, 1], [1, 0, 0]], bool)
  parts = [
    losses.mismatch(d[i], 0 * d[i], mask[i], mask[i])
    for i in (slice(0, 1), slice(1, 2))
  ]
  whole = losses.mismatch(d, 0 * d, mask, mask)
  joined = losses.add(*parts)
  name = f'mismatch_max{depth.MAXIMA}'
  np.testing.assert_array_equal(joined[name], whole[name])
  assert losses.summarise(joined | {'tokens': 3.0})['mismatch_max/turn=1'] == (
    np.float32(0.3)
  )
