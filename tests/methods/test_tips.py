"""TIPS by hand: a reward where a call of a tool ends."""

import numpy as np
import pytest

from configs.methods import tips
from searchrl_jax import checks
from searchrl_jax.data.checks import DataError
from searchrl_jax.learn import advantages
from searchrl_jax.learn.potential import Levels
from searchrl_jax.types import Question
from tests.methods import group as hand
from tests.methods.test_trace import GOLD

S, MASKS = hand.arrays()
CRITIC = [np.zeros(len(m)) for m in MASKS]


def test_golden():
  # No discount, lambda 1, values 0: each token has what is earned from it on.
  # Right: .02 x (1.6 + 1.2), .02 x 1.2, then 1. Wrong: .02 x -1, 0, 0.
  fields = tips.get_config().algorithm.advantage_kw.to_dict()
  fields |= dict(whiten=False, gamma=1.0, lam=1.0)
  values = hand.outcome(hand.GROUP, [1, 0, 0])
  args = values, [True] * 3, [0] * 3, MASKS, CRITIC, S, GOLD
  got = hand.by_turn(S, tips.shaped_gae(*args, **fields))
  np.testing.assert_allclose(got[0], [1.056, 1.024, 1], rtol=1e-5)
  np.testing.assert_allclose(got[1], [-0.02, 0, 0], atol=1e-7)
  np.testing.assert_allclose(got[2], [0])
  plain = dict(fields)
  plain.pop('scale')
  none = tips.shaped_gae(*args, **fields | dict(scale=0.0))
  want = advantages.gae(*args[:5], **plain)
  for a, b in zip(none, want, strict=True):
    np.testing.assert_array_equal(a, b)


def test_what_was_not_scored_is_not_the_best():
  """The release gives 0, above every log-prob, where its scorer fails."""
  values = hand.outcome(hand.GROUP, [1, 0, 0])
  unknown = Levels(np.full(3, np.nan), np.array([]))
  none = tips._shaped(values, S, [unknown, *GOLD[1:]], 0.02)
  np.testing.assert_array_equal(none[0], values[0])
  some = tips._shaped(values, S, GOLD, 0.02)
  assert some[0].sum() > none[0].sum()
  np.testing.assert_array_equal(none[1], some[1])


def test_the_critic_learns_the_shaped_returns():
  values = hand.outcome(hand.GROUP, [1, 0, 0])
  got = tips.shaped_gae.targets(
    values, [True] * 3, MASKS, CRITIC, S, GOLD, scale=0.02, gamma=1.0, lam=1.0
  )
  at = np.flatnonzero(MASKS[0])
  assert got[0][at[0]] == pytest.approx(1.056)


def test_its_config_and_what_it_needs():
  c = tips.get_config('every=20')
  assert (c.teacher.weights, c.teacher.every) == ('copy', 20)
  assert c.teacher.gold.aliases == 0 and c.critic.lr > 0
  checks.check(c)
  with pytest.raises(DataError, match='golden answers'):
    checks.check_data(c, [Question('q', 'who?')])
