"""SSPO and RLSD by hand: weights of a teacher's log-probs."""

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from configs.methods import sspo
from searchrl_jax import checks
from searchrl_jax.data.checks import DataError
from searchrl_jax.lookup import ConfigError
from searchrl_jax.types import Question
from tests.methods import group as hand

A, B = 1.154699, -0.577350  # GRPO's of 1 0 0: 2/3 and -1/3 over sqrt(1/3)
S, MASKS = hand.arrays()


def weighed(per_turn, arg='', outcome=(1, 0, 0)):
  """From a delta for each turn, spread evenly over the turn's tokens."""
  kw = sspo.get_config(arg).algorithm.advantage_kw.to_dict() | dict(eps=0.0)
  values = np.array(outcome, float)
  return sspo.weighed(values, [True] * 3, [0] * 3, S, spread(per_turn), **kw)


def spread(per_turn):
  flat, out = [x for own in per_turn for x in own], []
  for turns in S.turns:
    d = np.zeros(len(turns), np.float32)
    for k in np.unique(turns[turns >= 0]):
      d[turns == k] = flat[k] / (turns == k).sum()
    out.append(d)
  return out


# Turns: three of the right trajectory, three of the wrong one, one of the idle.
DELTA = [[5.0, 5, 5], [0.1, -0.5, 2], [-0.1]]


def test_golden_turn_weights():
  # Right: GRPO's. Wrong, A < 0: exp(-.1), min(exp(.5), 1.2), exp(-2). Idle:
  # exp(.1).
  got = hand.by_turn(S, weighed(DELTA))
  wanted = [
    [A] * 3,
    [B * np.exp(-0.1), B * 1.2, B * np.exp(-2)],
    [B * np.exp(0.1)],
  ]
  for a, b in zip(got, wanted, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4)


def test_golden_weights_of_one_that_is_good_but_not_right():
  # Of .6 0 0 the advantages are those of 1 0 0. A > 0: exp(.1), exp(-.5),
  # min(exp(2), 1.2).
  got = hand.by_turn(S, weighed([DELTA[1], *DELTA[1:]], outcome=(0.6, 0, 0)))
  wanted = A * np.array([np.exp(0.1), np.exp(-0.5), 1.2])
  np.testing.assert_allclose(got[0], wanted, rtol=1e-4)


def test_golden_shuffled_turns():
  # Four wrong turns of .1 -.5 2 -.1 have the delta of the turn two before.
  got = hand.by_turn(S, weighed(DELTA, 'pool=shuffled'))
  x = B * np.exp([-2, 0.1, -0.1, 0.5])
  for own, want in zip(got, ([A] * 3, [*x[:3]], [B * 1.2]), strict=True):
    np.testing.assert_allclose(own, want, rtol=1e-4)


def test_golden_mean_over_a_turn():
  # The wrong trajectory's second turn: -.5 over its n tokens.
  n = int((S.turns[1] == 4).sum())
  got = hand.by_turn(S, weighed(DELTA, 'pool=mean'))
  np.testing.assert_allclose(got[1][1], B * np.exp(0.5 / n), rtol=1e-5)


def test_golden_tokens_of_rlsd():
  # By token, in every row: w within .8 and 1.2, half of the credit uniform.
  delta = [np.zeros(len(m), np.float32) for m in MASKS]
  at = [np.flatnonzero(m)[:3] for m in MASKS]
  delta[0][at[0]] = [0.1, 9, -9]
  delta[1][at[1]] = [0.1, 9, -9]
  kw = sspo.get_config('arm=rlsd').algorithm.advantage_kw.to_dict()
  kw |= dict(eps=0.0)
  got = sspo.weighed(np.array([1.0, 0, 0]), [True] * 3, [0] * 3, S, delta, **kw)
  half = lambda w: 1 + 0.5 * (w - 1)
  wanted = A * half(np.array([np.exp(0.1), 1.2, 0.8]))
  np.testing.assert_allclose(got[0][at[0]], wanted, rtol=1e-5)
  wanted = B * half(np.array([np.exp(-0.1), 0.8, 1.2]))
  np.testing.assert_allclose(got[1][at[1]], wanted, rtol=1e-5)
  np.testing.assert_allclose(got[2][at[2]], B, rtol=1e-5)


@settings(max_examples=30)
@given(st.lists(st.floats(-1e4, 1e4), min_size=7, max_size=7))
def test_no_weight_changes_a_sign_or_exceeds_the_bound(x):
  got = hand.by_turn(S, weighed([x[:3], x[3:6], x[6:]]))
  assert got[0] == pytest.approx([A] * 3, rel=1e-5)
  for own in got[1:]:
    assert all(1.2 * B - 1e-5 <= a <= 0 for a in own)


def test_without_a_teacher_it_is_grpo():
  for arg in ('', 'arm=rlsd', 'pool=mean'):
    got = hand.by_turn(S, weighed([[0.0] * 3, [0.0] * 3, [0.0]], arg))
    for own, a in zip(got, (A, B, B), strict=True):
      np.testing.assert_allclose(own, a, rtol=1e-5)


def test_its_config_and_what_it_needs():
  c = sspo.get_config('every=7,others=True')
  assert (c.teacher.weights, c.teacher.every) == ('copy', 7)
  assert c.teacher.others and c.teacher.context == 'anchors'
  checks.check(c)
  for arm, wrong in (('sspo', 'not'), ('rlsd', '')):
    told = sspo.get_config(f'arm={arm}').teacher.context_kw.to_dict()
    assert told == dict(right=1.0, wrong=wrong, everyone=not wrong)
  bare = Question('q', 'who?', ('Ann',))
  with pytest.raises(DataError, match='teacher.context needs'):
    checks.check_data(c, [bare])
  with pytest.raises(ConfigError, match="pool='max'"):
    sspo.get_config('pool=max')
