"""SimpleTIR by hand: void turns leave the gradient, not the statistics."""

import dataclasses

import numpy as np

from configs.methods import simpletir
from searchrl_jax import checks
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


def test_its_config():
  for arg in ('', 'version=removed'):
    checks.check(simpletir.get_config(arg))
