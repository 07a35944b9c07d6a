"""SimpleTIR by hand: void turns leave the gradient, not the statistics."""

import dataclasses

import numpy as np

from configs.methods import simpletir
from searchrl_jax import checks
from tests import scripted
from tests.fakes import make_env
from tests.methods import group as hand

VOID = dataclasses.replace(hand.WRONG, invalid_actions=1)
S, _ = hand.arrays((hand.RIGHT, VOID, hand.IDLE))


def found(values, arg='', valid=(True, True, True)):
  kw = simpletir.get_config(arg).algorithm.advantage_kw.to_dict()
  kw |= dict(eps=0.0)
  return simpletir.unless_void(np.array(values), valid, [0] * 3, S, **kw)


def test_golden():
  # Of 1 0 0: 2/3 and -1/3 over sqrt(1/3). The void one has no gradient.
  np.testing.assert_allclose(found([1.0, 0, 0]), [1.154699, 0, -0.57735], 1e-5)
  # Removed: of 1 0, +-1/2 over sqrt(1/2).
  got = found([1.0, 0, 0], 'version=removed')
  np.testing.assert_allclose(got, [0.707107, 0, -0.707107], rtol=1e-5)


def test_a_void_success_is_not_learnt_and_still_lowers_the_others():
  got = found([0.0, 1, 0])
  np.testing.assert_allclose(got, [-0.57735, 0, -0.57735], rtol=1e-5)
  assert not found([0.0, 1, 0], 'version=removed').any()
  assert not found([1.0, 0, 0], valid=(True, True, False))[2]


def test_a_turn_that_is_cut_with_the_trajectory_is_void():
  """It is no invalid action: the environment has no room to say so."""
  env = make_env(max_tokens=60, max_turn_tokens=200)
  state, action = env.reset(hand.QUESTION)
  state, _ = env.step(state, scripted.sample(env, action, 'so ' * 60))
  cut = env.trajectory(state, 1)
  assert (cut.end, cut.invalid_actions) == ('tokens', 0)
  s, _ = hand.arrays((hand.RIGHT, cut, hand.IDLE))
  fields = dict(removed=False, eps=0.0, ddof=1)
  got = simpletir.unless_void(np.eye(3)[0], [True] * 3, [0] * 3, s, **fields)
  np.testing.assert_allclose(got, [1.154699, 0, -0.57735], rtol=1e-5)


def test_its_config():
  for arg in ('', 'version=removed'):
    checks.check(simpletir.get_config(arg))
