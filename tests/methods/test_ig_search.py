"""IG-Search by hand: what was found, less what chance would have found."""

import math

import numpy as np
import pytest

from configs.methods import ig_search
from searchrl_jax import checks
from searchrl_jax.data.checks import DataError
from searchrl_jax.learn.potential import Levels
from searchrl_jax.lookup import ConfigError
from searchrl_jax.types import Question
from tests.methods import group as hand

S, _ = hand.arrays()
A, B = 1.154699, -0.577350  # GRPO's of 1 0 0: 2/3 and -1/3 over sqrt(1/3)


def levels(real, swapped):
  return Levels(np.array(real, float), np.array(swapped, float))


GOLD = [
  levels([-3, -1, -0.5], [-2, -0.5]),
  levels([-3, -4, -4], [-2, math.nan]),
  levels([-3], []),
]


def test_golden():
  # Right: -1 - -2 = 1, -.5 - -.5 = 0. Wrong: -4 - -2 = -2, and nothing to
  # replace the second one by.
  fields = ig_search.get_config().algorithm.advantage_kw.to_dict()
  fields |= dict(eps=0.0)
  a = ig_search.with_gains(
    np.array([1.0, 0, 0]), [True] * 3, [0] * 3, S, GOLD, **fields
  )
  got = hand.by_turn(S, a)
  np.testing.assert_allclose(got[0], [A + 0.2, A, A], rtol=1e-5)
  np.testing.assert_allclose(got[1], [B - 0.4, B, B], rtol=1e-5)
  np.testing.assert_allclose(got[2], [B], rtol=1e-5)


def test_its_config():
  c = ig_search.get_config('swaps=2')
  assert (c.teacher.gold.swaps, c.teacher.gold.first) == (2, 3.0)
  checks.check(c)
  with pytest.raises(DataError, match='golden answers'):
    checks.check_data(c, [Question('q', 'who?')])
  c.teacher.gold.swaps = 0
  with pytest.raises(ConfigError, match='swaps=0'):
    checks.check(c)
