"""TRACE by hand: distances to the golden answer, averaged ahead."""

import numpy as np
import pytest

from configs.methods import trace
from searchrl_jax import checks
from searchrl_jax.data.checks import DataError
from searchrl_jax.learn.potential import Levels
from searchrl_jax.lookup import ConfigError
from searchrl_jax.types import Question
from tests.methods import group as hand

S, _ = hand.arrays()
A, B = 2**0.5, -(2**-0.5)  # of 1 0 0: 2/3 and -1/3 over sqrt(2/9)


def levels(*real):
  return Levels(np.array(real, float), np.zeros(max(len(real) - 1, 0)))


# d = .1 - l: right 3.2, 1.6, .4; wrong 1, 2, 2.
GOLD = [levels(-3.1, -1.5, -0.3), levels(-0.9, -1.9, -1.9), levels(-0.9)]


def turns(gold=GOLD, valid=(True, True, True), **kw):
  fields = trace.get_config().algorithm.advantage_kw.to_dict()
  fields |= dict(eps=0.0) | kw
  values = np.array([1.0, 0, 0])
  a = trace.with_levels(values, valid, [0] * 3, S, gold, **fields)
  return hand.by_turn(S, a)


def test_golden():
  # Searches earn log 2, log 4, and log .5, 0. Averages ahead, with weights 1,
  # .8: (log 2 + .8 log 4) / 1.8, log 4; and log .5 / 1.8, 0. The windows of
  # both reach the last of T = 2 searches: + 2 x .8^2, 2 x .8 of the outcome.
  # Answers have the outcome alone.
  log = np.log
  right = np.array([(log(2) + 0.8 * log(4)) / 1.8, log(4), 0])
  wrong = np.array([log(0.5) / 1.8, 0, 0])
  end = 2 * np.array([0.64, 0.8, 0])
  got = turns()
  np.testing.assert_allclose(got[0], A + 0.2 * (right + end * A), rtol=1e-5)
  np.testing.assert_allclose(got[1], B + 0.2 * (wrong + end * B), rtol=1e-5)
  np.testing.assert_allclose(got[2], [B], rtol=1e-5)


def test_a_window_that_ends_before_the_last_search_has_no_outcome():
  got = turns(window=1)
  log = np.log
  last = A + 0.2 * (log(4) + 2 * 0.8 * A)
  np.testing.assert_allclose(got[0], [A + 0.2 * log(2), last, A], rtol=1e-5)


def test_groups_that_earn_the_same_still_learn_from_searches():
  fields = trace.get_config().algorithm.advantage_kw.to_dict()
  a = trace.with_levels(np.ones(3), [True] * 3, [0] * 3, S, GOLD, **fields)
  got = hand.by_turn(S, a)
  assert got[0][0] > 0 > got[1][0] and got[2] == [0]


def test_what_is_in_no_batch_learns_nothing():
  gold = [GOLD[0], levels(), GOLD[2]]
  got = turns(gold, valid=(True, False, True))
  assert got[1] == [0, 0, 0]


def test_its_config_and_what_it_needs():
  assert trace.get_config().teacher.weights == 'frozen'
  c = trace.get_config('weights=copy')
  assert c.teacher.weights == 'copy' and not c.teacher.context
  checks.check(c)
  with pytest.raises(DataError, match='golden answers'):
    checks.check_data(c, [Question('q', 'who?')])
  c.teacher.gold.aliases = 0
  with pytest.raises(ConfigError, match='gold.aliases=0'):
    checks.check(c)
