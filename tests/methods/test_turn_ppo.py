"""Turn-level PPO: values, advantages and targets of turns by hand."""

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from configs.methods import turn_ppo
from searchrl_jax import checks
from searchrl_jax.learn import advantages, credit
from searchrl_jax.types import Rewards
from tests.learn import test_credit
from tests.methods import group as hand
from tests.methods.group import GROUP

KW = turn_ppo.ADVANTAGE['advantage_kw'] | dict(gamma=0.9, lam=0.5)


def critic(s, values):
  """A critic with these values at the first tokens of turns, NaN elsewhere."""
  out = [np.full(len(t), np.nan) for t in s.turns]
  for row, start, v in zip(s.owner, s.start, values, strict=True):
    out[row][start] = v
  return out


def raw(group, outcome, values, **kw):
  """(advantages before whitening, targets), by turn."""
  s, masks = hand.arrays(group)
  earned = hand.outcome(group, outcome)
  g, v = turn_ppo._returns(earned, critic(s, values), s, kw['gamma'], kw['lam'])
  valid = [True] * len(group)
  found = turn_ppo.targets(earned, valid, masks, critic(s, values), s, **kw)
  return g - v, hand.by_turn(s, found)


def test_golden_values():
  # Right: V .2 .4 .6, outcome 1. G_2 = 1; G_1 = .9 (.5 x .6 + .5 x 1) = .72;
  # G_0 = .9 (.5 x .4 + .5 x .72) = .504. A = .304 .32 .4.
  # Wrong: V .3 .1 .5, 0: G = .9 (.5 x .1 + .5 x .225) = .14625, .225, 0.
  # Idle: V .1, 0.
  a, targets = raw(
    GROUP, (1, 0, 0), [0.2, 0.4, 0.6, 0.3, 0.1, 0.5, 0.1], gamma=0.9, lam=0.5
  )
  np.testing.assert_allclose(
    a, [0.304, 0.32, 0.4, -0.15375, 0.125, -0.5, -0.1], atol=1e-7
  )
  for found, wanted in zip(
    targets, [[0.504, 0.72, 1], [0.14625, 0.225, 0], [0]], strict=True
  ):
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_golden_values_of_the_config():
  # G_1 = .99 (.1 x .6 + .9) = .9504; G_0 = .99 (.1 x .4 + .9 x .9504) = .88641.
  kw = turn_ppo.get_config().algorithm.advantage_kw
  kw = dict(gamma=kw.gamma, lam=kw.lam)
  a, _ = raw(GROUP[:1], (1,), [0.2, 0.4, 0.6], **kw)
  np.testing.assert_allclose(a, [0.68641, 0.5504, 0.4], atol=1e-5)


def test_advantages_are_whitened_over_turns_and_shared_by_tokens():
  s, masks = hand.arrays()
  values = [0.2, 0.4, 0.6, 0.3, 0.1, 0.5, 0.1]
  a, _ = raw(GROUP, (1, 0, 0), values, gamma=0.9, lam=0.5)
  earned = hand.outcome(GROUP, (1, 0, 0))
  given = [True] * 3, [0] * 3, masks, critic(s, values), s
  found = turn_ppo.turn_gae(earned, *given, **KW)
  wanted = (a - a.mean()) / a.std()
  np.testing.assert_allclose(
    np.concatenate(hand.by_turn(s, found)), wanted, atol=1e-5
  )
  moved = turn_ppo.turn_gae(earned, *given, **(KW | dict(shuffle=True)))
  for x, y in zip(hand.by_turn(s, moved), hand.by_turn(s, found), strict=True):
    assert sorted(x) == sorted(y)


def test_observations_in_the_loss_are_refused():
  c = turn_ppo.get_config()
  checks.check(c)
  c.env.train_observations = True
  with pytest.raises(ValueError, match='env.train_observations.*turn_gae'):
    checks.check(c)


def test_a_failed_trajectory_is_left_out():
  s, masks = hand.arrays()
  values = [0.2, 0.4, 0.6, *[np.nan] * 3, 0.1]
  earned = hand.outcome(GROUP, (1, 0, 0))
  valid = [True, False, True]
  given = [0] * 3, masks, critic(s, values), s
  found = turn_ppo.turn_gae(earned, valid, *given, **KW)
  assert np.isfinite(np.concatenate(found)).all() and not found[1].any()
  targets = turn_ppo.targets(
    earned, valid, *given[1:], gamma=KW['gamma'], lam=KW['lam']
  )
  assert not targets[1].any() and targets[0].any()


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 12), st.floats(0.1, 0.99), st.floats(0.0, 1.0))
def test_the_length_of_a_turn_changes_no_credit(longer, gamma, lam):
  short, long = (hand.play(('w' * n, 'a'), sample=0) for n in (1, 2 + longer))
  values, kw = [0.3, 0.6], dict(gamma=gamma, lam=lam)
  assert np.array_equal(
    *(raw((t,), (1,), values, **kw)[0] for t in (short, long))
  )


def test_a_discount_for_each_token_prefers_short_turns():
  """What a turn as one action avoids."""
  first = []
  for t in (hand.play(('w', 'a')), hand.play(('www', 'a'))):
    s, masks = hand.arrays((t,))
    none = [np.zeros(len(masks[0]))]
    found = advantages.lambda_returns(
      hand.outcome((t,), (1,)), [True], masks, none, gamma=0.9, lam=1.0
    )
    first.append(found[0][s.start[0]])
  np.testing.assert_allclose(first[1], 0.9**2 * first[0])


def test_a_critic_is_given_these_targets():
  c, minibatches, kept = test_credit.make('PPO', **{'algorithm.kl': 'none'})
  c.algorithm.update(turn_ppo.ADVANTAGE)
  c.algorithm.advantage_kw = dict(gamma=0.5, lam=1.0, eps=0.0, shuffle=False)
  reward = Rewards(np.array([1, 0, 1, 0], np.float32), kept)
  batch = test_credit.step(reward, kept, minibatches)
  values = test_credit.arrays(
    minibatches, np.tile([0, 0.25, 9, 9, 0.5], (4, 1))
  )
  given = credit.assign(
    c, batch, old=None, ref=None, values=values, greedy=None
  )
  # Turns of 2 tokens and of 1: the second earns 1, the first half of that.
  assert given.targets[0].tolist() == [0, 0.5, 0.5, 0, 1]
  assert not given.targets[1].any()
  # A: .25 .5 and -.25 -.5, twice: deviation sqrt((.0625 + .25) / 2) = .39528.
  np.testing.assert_allclose(
    given.advantages[0], [0, 0.63246, 0.63246, 0, 1.26491], atol=1e-4
  )
