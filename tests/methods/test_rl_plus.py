"""RL-PLUS: the objective of a trace's tokens by hand."""

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.methods import rl_plus
from searchrl_jax import checks
from searchrl_jax.data.checks import DataError
from searchrl_jax.learn import objectives
from searchrl_jax.types import Question

pytestmark = pytest.mark.slow


def gradient(new, old, advantages):
  fn = lambda x: rl_plus.weighed(x, jnp.log(old), advantages).sum()
  value, found = jax.value_and_grad(fn)(jnp.log(jnp.asarray(new)))
  return float(value), np.asarray(found)


def test_golden_objective_and_gradient():
  # pi = .36, pi_old = .2: 2 x .36 / (.2 + .6) = .9; (1 - .36)^.5 = .8; A = .5.
  value, found = gradient(jnp.array([0.36]), jnp.array([0.2]), 0.5)
  np.testing.assert_allclose(value, 0.9 * 0.8 * 0.5, rtol=1e-5)
  # The weight alone is differentiated, and d pi = pi d log pi.
  np.testing.assert_allclose(found, [0.36], rtol=1e-5)
  # On policy: pi = pi_old = .19: .38 / (.19 + .595) x .9 x -1.
  value, _ = gradient(jnp.array([0.19]), jnp.array([0.19]), -1.0)
  np.testing.assert_allclose(value, -0.38 / 0.785 * 0.9, rtol=1e-5)


@settings(max_examples=20, deadline=None)
@given(st.floats(1e-4, 1.0), st.floats(1e-4, 1.0))
def test_it_stays_finite_and_favours_the_unlikely(p, old):
  new = jnp.array([p, 1.0, 0.0])
  _, found = gradient(jnp.maximum(new, 1e-30), jnp.array([old] * 3), 1.0)
  assert np.isfinite(found).all() and found[1] == 0
  omega = (old + 1) / 2
  wanted = 2 * p / (old + omega) * np.sqrt(1 - p)
  np.testing.assert_allclose(found[0], wanted, rtol=1e-3, atol=1e-5)


def test_it_is_the_loss_of_the_config():
  c = rl_plus.get_config()
  assert c.rollout.sampler == 'traces' and c.rollout.trace_most == 1
  assert c.algorithm.advantage == 'dr_grpo'
  c.algorithm.entropy_coef = 0.0
  c.algorithm.minibatches = 2
  # An attempt, and the trace of the first golden value.
  new = jnp.log(jnp.array([[0.6], [0.36]]))
  old = jnp.log(jnp.array([[0.2], [0.2]]))
  arrays = dict(
    mask=jnp.ones((2, 1), bool),
    behaviour_logps=jnp.array([old[0], [jnp.nan]]),
    advantages=jnp.array([[-0.5], [0.5]]),
    old=old,
    ref=old,
  )
  loss, _ = objectives.policy(c).fn(new, jnp.zeros((2, 1)), arrays)
  # The attempt's ratio is 3, without a bound.
  np.testing.assert_allclose(loss, [[1.5], [-0.36]], rtol=1e-5)


def test_what_it_needs():
  c = rl_plus.get_config('most=2')
  checks.check(c)
  assert c.rollout.trace_most == 2
  with pytest.raises(DataError, match='facts'):
    checks.check_data(c, [Question('q', 'who?', ('Ann',))])
