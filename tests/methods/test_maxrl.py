"""MaxRL by hand."""

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from configs.methods import maxrl
from searchrl_jax import checks, lookup


def relative(values, valid=None, ids=None):
  n = len(values)
  valid = [True] * n if valid is None else valid
  return maxrl.relative(np.array(values, float), valid, ids or [0] * n)


def test_golden():
  # A sole success of four: (1 - 1/4) / (1/4) = 3, the others -1.
  np.testing.assert_allclose(relative([1, 0, 0, 0]), [3, -1, -1, -1])
  # Three of four: (1 - 3/4) / (3/4) = 1/3, and -1.
  np.testing.assert_allclose(relative([1, 1, 1, 0]), [1 / 3] * 3 + [-1], 1e-6)
  # What is not valid is in no mean: 1 and 0 of mean 1/2.
  found = relative([1, 0, 9], valid=[True, True, False])
  np.testing.assert_allclose(found, [1, -1, 0])
  two = relative([1, 0, 0.5, 1], ids=[0, 0, 1, 1])
  np.testing.assert_allclose(two, [1, -1, -1 / 3, 1 / 3], rtol=1e-6)


@settings(max_examples=50)
@given(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=8))
def test_a_group_sums_to_nothing_and_one_without_a_success_is_0(values):
  found = relative(values)
  assert abs(found.sum()) < 1e-5 and np.isfinite(found).all()
  if not any(values) or len({*values}) == 1:
    assert not found.any()


def test_negative_returns_are_refused():
  with pytest.raises(ValueError, match='-0.5'):
    relative([1, -0.5])
  relative([1, -0.5], valid=[True, False])  # of no batch
  c = maxrl.get_config()
  checks.check(c)
  c.algorithm.kl, c.algorithm.kl_coef = 'reward', 0.1
  with pytest.raises(lookup.ConfigError, match="kl='reward'"):
    checks.check(c)
