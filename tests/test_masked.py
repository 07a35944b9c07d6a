"""Masked statistics against NumPy on the selected entries."""

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax.learn import masked

rows = st.integers(0, 2**31 - 1)


def draw(seed, shape=(5, 7)):
  rng = np.random.default_rng(seed)
  x = rng.normal(3.0, 2.0, shape).astype(np.float32)
  return x, rng.random(shape) < 0.6


@settings(max_examples=25, deadline=None)
@given(rows)
def test_equals_numpy_on_the_selected(seed):
  x, mask = draw(seed)
  mask[0, :2] = True
  dirty = np.where(mask, x, np.nan).astype(np.float32)
  for array in (np.asarray, jnp.asarray):
    y, m = array(dirty), array(mask)
    np.testing.assert_allclose(masked.mean(y, m), x[mask].mean(), rtol=1e-5)
    for ddof in (0, 1):
      np.testing.assert_allclose(
        masked.std(y, m, ddof=ddof), x[mask].std(ddof=ddof), rtol=1e-4
      )
    white = np.asarray(masked.whiten(y, m, 0.0))
    np.testing.assert_allclose(white[mask].mean(), 0.0, atol=1e-5)
    np.testing.assert_allclose(white[mask].std(), 1.0, rtol=1e-4)
    assert not white[~mask].any()


def test_axis():
  x, mask = draw(0)
  mask[:, 0] = True
  want = [r[m].mean() for r, m in zip(x, mask)]
  np.testing.assert_allclose(masked.mean(x, mask, 1), want, rtol=1e-5)
  want = [r[m].std() for r, m in zip(x, mask)]
  np.testing.assert_allclose(masked.std(x, mask, 1), want, atol=1e-5)


@pytest.mark.parametrize('array', [np.asarray, jnp.asarray])
def test_empty_and_single(array):
  x, none = array(np.ones(3, np.float32)), array(np.zeros(3, bool))
  assert masked.mean(x, none) == 0
  assert masked.std(x, none) == 0
  assert masked.std(x, array(np.array([True, False, False])), ddof=1) == 0
  assert not np.any(np.asarray(masked.whiten(x, none, 1e-6)))


def test_gradient_of_constant_is_finite():
  mask = jnp.ones(3, bool)
  g = jax.grad(lambda x: masked.std(x, mask))(jnp.ones(3))
  assert np.all(np.isfinite(g))
