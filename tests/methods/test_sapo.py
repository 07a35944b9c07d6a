"""SAPO: the term by hand, beside LLDS's, whose function it is."""

import math

import numpy as np
import pytest

from configs.methods import llds, sapo
from searchrl_jax import checks, lookup
from searchrl_jax.lookup import ConfigError
from tests.methods import test_llds


def fields(arg=''):
  a = sapo.get_config(arg).algorithm
  return lookup.arguments(llds.held, a, 'config.algorithm.loss')


def test_golden_term_and_gradient():
  # Of the right row the tokens fell by .2, -.1, and -.2, .05. With t = .9, a
  # fall of more than -log .9 = .105 is held: the first, with .2 x .2. The sum
  # over its run, which LLDS needs above 0, does not matter.
  found, gradient = test_llds.term(**fields())
  wanted = np.zeros((3, 5))
  wanted[0, 0] = 0.2 * 0.2
  np.testing.assert_allclose(found, wanted, atol=1e-6)
  wanted[0, 0] = -0.2
  np.testing.assert_allclose(gradient, wanted, atol=1e-6)
  # t = .96: -log t = .041, so the fall of .05 in a run that rose is held too.
  found, _ = test_llds.term(**fields('t=0.96'))
  np.testing.assert_allclose(found[0], [0.04, 0, 0, 0, 0.01], atol=1e-6)
  # t = .8: -log t = .223. Nothing fell as far.
  assert not test_llds.term(**fields('t=0.8'))[0].any()


def test_as_written_an_all_equal_group_is_held_in_place():
  found, _ = test_llds.term(**fields('version=as_written'))
  np.testing.assert_allclose(found[2], [0.2 * 0.5, 0, 0, 0, 0], atol=1e-6)
  assert not test_llds.term(**fields())[0][1:].any()


def test_a_batch_without_a_good_row_has_no_term_and_no_nan():
  mask = test_llds.MASK & np.array([[False], [True], [True]])
  found, gradient = test_llds.term(mask=mask, **fields())
  assert not found.any() and not gradient.any()


def test_its_config():
  c = sapo.get_config('t=0.5,scale=0.1')
  assert c.algorithm.llds_tolerance == pytest.approx(math.log(2))
  assert c.algorithm.llds_coef == 0.1 and c.algorithm.minibatches == 4
  checks.check(c)
  with pytest.raises(ConfigError, match='t=1.0'):
    sapo.get_config('t=1.0')
  c.algorithm.minibatches = 1
  with pytest.raises(ConfigError, match='minibatches=1'):
    checks.check(c)
