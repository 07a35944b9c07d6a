"""Golden values with their arithmetic, and what must hold for any batch."""

import functools
import math

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from searchrl_jax import advantages

ALL = (
  advantages.grpo, advantages.dr_grpo, advantages.rloo, advantages.whitened,
)
GROUPED = tuple(getattr(advantages, n) for n in advantages.NEEDS_GROUP)


def ids(*sizes):
  return np.repeat(np.arange(len(sizes)), sizes)


def test_golden_grpo():
  # Rewards 1 0 0 1 0: mean 0.4; deviations .6 -.4 -.4 .6 -.4, squares sum to
  # .36 * 2 + .16 * 3 = 1.2; unbiased variance 1.2 / 4 = 0.3.
  r = np.array([1.0, 0, 0, 1, 0])
  std = math.sqrt(0.3)
  got = advantages.grpo(r, np.ones(5, bool), ids(5))
  want = np.array([0.6, -0.4, -0.4, 0.6, -0.4]) / (std + 1e-6)
  np.testing.assert_allclose(got, want, rtol=1e-6)
  # Biased: variance 1.2 / 5 = 0.24.
  got = advantages.grpo(r, np.ones(5, bool), ids(5), ddof=0, eps=0.0)
  np.testing.assert_allclose(got[0], 0.6 / math.sqrt(0.24), rtol=1e-6)


def test_golden_dr_grpo_and_rloo():
  # Group 0: 1 0 0 -> mean 1/3. Group 1: 2 4 -> mean 3.
  r, ok, g = np.array([1.0, 0, 0, 2, 4]), np.ones(5, bool), ids(3, 2)
  np.testing.assert_allclose(
    advantages.dr_grpo(r, ok, g), [2 / 3, -1 / 3, -1 / 3, -1, 1], rtol=1e-6
  )
  # Leave one out: 1 - (0 + 0) / 2 = 1; 0 - (1 + 0) / 2 = -1/2; 2 - 4; 4 - 2.
  np.testing.assert_allclose(
    advantages.rloo(r, ok, g), [1, -0.5, -0.5, -2, 2], rtol=1e-6
  )


def test_golden_whitened():
  # 0 2 4: mean 2, biased variance (4 + 0 + 4) / 3.
  got = advantages.whitened(np.array([0.0, 2, 4]), np.ones(3, bool), ids(3))
  s = math.sqrt(8 / 3)
  np.testing.assert_allclose(got, [-2 / s, 0, 2 / s], rtol=1e-6)


def test_token_values_are_summed():
  tokens = np.array([[1.0, 0, 1], [0, 0, 1], [0, 0, 0]])
  ok, g = np.ones(3, bool), ids(3)
  want = advantages.grpo(np.array([2.0, 1, 0]), ok, g)
  np.testing.assert_array_equal(advantages.grpo(tokens, ok, g), want)
  ragged = (np.array([1.0, 1]), np.array([1.0]), np.array([]))
  np.testing.assert_array_equal(advantages.grpo(ragged, ok, g), want)


@pytest.mark.parametrize('fn', GROUPED)
def test_a_group_of_one_gets_zero(fn):
  ok = np.array([True, True, False, True])
  got = fn(np.array([1.0, 0, 5, 7]), ok, np.array([0, 0, 1, 1]))
  assert got[2] == got[3] == 0  # row 3 is all that is left of its group
  assert np.all(np.isfinite(got)) and got[0] > 0 > got[1]


@pytest.mark.parametrize('fn', ALL)
def test_zero_variance_gets_exactly_zero(fn):
  # The mean of five 0.1 is not 0.1 in binary.
  for value in (0.1, 1 / 3, 1e6 + 0.1):
    got = fn(np.full(5, value), np.ones(5, bool), ids(5))
    assert not got.any()


@pytest.mark.parametrize('fn', ALL)
def test_bad_values_are_named(fn):
  with pytest.raises(ValueError, match='row 1 is nan'):
    fn(np.array([0.0, np.nan]), np.ones(2, bool), ids(2))
  with pytest.raises(ValueError, match='one entry for each trajectory'):
    fn(np.zeros(3), np.ones(2, bool), ids(2))
  # A row left out may hold anything.
  got = fn(np.array([0.0, np.nan, 1]), np.array([True, False, True]), ids(3))
  assert got[1] == 0 and np.all(np.isfinite(got))


@settings(max_examples=40, deadline=None)
@given(
  st.lists(
    st.tuples(
      st.floats(-10, 10, width=32), st.booleans(), st.integers(0, 3)
    ), min_size=1, max_size=24,
  ),
  st.randoms(use_true_random=False),
)
def test_properties(batch, random):
  values, ok, group = (np.array(x) for x in zip(*batch))
  order = list(range(len(values)))
  random.shuffle(order)
  for fn in ALL:
    got = fn(values, ok, group)
    assert got.dtype == np.float32 and np.all(np.isfinite(got))
    assert not got[~ok].any()
    # Order cannot show, bit for bit; names of groups neither.
    np.testing.assert_array_equal(
      fn(values[order], ok[order], group[order]), got[order]
    )
    np.testing.assert_array_equal(fn(values, ok, 7 - group), got)
    # What is left out cannot show.
    other = np.where(ok, values, 99.0)
    np.testing.assert_array_equal(fn(other, ok, group), got)
  for fn in (advantages.grpo, advantages.dr_grpo, advantages.rloo):
    got = fn(values, ok, group).astype(np.float64)
    for g in np.unique(group):
      np.testing.assert_allclose(got[group == g].sum(), 0, atol=1e-3)


def test_grpo_does_not_see_scale():
  rng = np.random.default_rng(0)
  r, ok, g = rng.random(12), np.ones(12, bool), ids(4, 4, 4)
  fn = functools.partial(advantages.grpo, eps=0.0)
  np.testing.assert_allclose(
    fn(r, ok, g), fn(5 * r - 3, ok, g), rtol=1e-4, atol=1e-6
  )
