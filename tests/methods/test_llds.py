"""LLDS: the term and its gradient by hand, and what the release lets in."""

import functools

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.methods import llds
from searchrl_jax import checks, lookup
from searchrl_jax.learn import losses, objectives

# Rows: right (A 1), wrong (A -1), of an all-equal group (A 0). Two runs each.
MASK = np.array([[1, 1, 0, 1, 1]] * 3, bool)
A = np.array([[1.0], [-1], [0]], np.float32) * MASK
OLD = np.full((3, 5), -1.0, np.float32)
# Of the right row, the first run fell by .2 - .1 in sum, the second rose.
NEW = np.array(
  [[-1.2, -0.9, 9, -0.8, -1.05], [-1.5, -1, 9, -2, -1], [-1.5, -1, 9, -1, -1]],
  np.float32,
)


def fields(arg=''):
  a = llds.get_config(arg).algorithm
  return lookup.arguments(llds.held, a, 'config.algorithm.loss')


@functools.cache
def compiled(kw):
  kw = dict(kw)
  clip = {k: v for k, v in kw.items() if not k.startswith('llds')}

  def added(new, *rest):
    whole, _ = llds.held(new, *rest, **kw)
    term = whole - losses.clip(new, *rest, **clip)[0]
    return term.sum(), term

  return jax.jit(jax.value_and_grad(added, has_aux=True))


def term(new=NEW, mask=MASK, **changed):
  """The added loss [B, T] and its gradient."""
  fn = compiled(tuple((fields() | changed).items()))
  (_, added), gradient = fn(new, OLD, OLD, A, mask)
  return added, gradient


def test_golden_term_and_gradient():
  # The first run of the right row is active: 0.2 x max(0, .2), 0.2 x max(0,
  # -.1). The second rose by .2 and fell by .05: not active.
  found, gradient = term()
  wanted = np.zeros((3, 5))
  wanted[0, 0] = 0.2 * 0.2
  np.testing.assert_allclose(found, wanted, atol=1e-6)
  wanted[0, 0] = -0.2
  np.testing.assert_allclose(gradient, wanted, atol=1e-6)


def test_golden_gate_of_a_row():
  # .2 - .1 - .2 + .05 < 0: no fall. Without the third of them, .15: active.
  for mask, size in ((MASK, 0.0), (MASK & (np.arange(5) != 3), 0.2)):
    found, _ = term(mask=mask, llds_gate='row')
    np.testing.assert_allclose(found[0, 0], 0.2 * size, atol=1e-6)
  np.testing.assert_allclose(found[0, 4], 0.2 * 0.05, atol=1e-6)


def test_as_released_an_all_equal_group_is_held_in_place():
  released = fields('version=as_released')
  assert released['llds_zero'] and not fields()['llds_zero']
  found, _ = term(**released)
  np.testing.assert_allclose(found[2], [0.2 * 0.5, 0, 0, 0, 0], atol=1e-6)
  assert not term()[0][1:].any()
  assert not found[1].any(), 'never what earned badly'


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(-9, 9), min_size=5, max_size=5))
def test_rounding_moves_nothing(noise):
  """As released, any fall has a gradient of full size."""
  new = OLD + np.tile(np.float32(1e-6) * np.array(noise, np.float32), (3, 1))
  assert not term(new)[1].any()
  runs = (OLD - new)[0][:2], (OLD - new)[0][3:]
  fell = any(run.sum() > 0 for run in runs)
  released = np.asarray(term(new, **fields('version=as_released'))[1])[0]
  assert released.any() == fell
  assert {*np.round(released, 5).tolist()} <= {0.0, float(np.float32(-0.2))}


def test_a_run_ends_with_its_row():
  # The last run of a row and the first of the next are next to each other.
  mask = np.ones((2, 3), bool)
  new = np.array([[-1, -1, -1.5], [-0.1, -1, -1]], np.float32)
  fell = jnp.asarray(OLD[:2, :3] - new)
  found = jax.jit(llds.of_runs, static_argnums=2)(fell, mask, 'run')
  np.testing.assert_allclose(found, [[0.5] * 3, [-0.9] * 3], atol=1e-6)


def test_it_is_the_loss_of_the_config():
  c = llds.get_config('scale=0.5')
  objective = objectives.policy(c)
  assert objective.needs_old
  arrays = dict(mask=MASK, behaviour_logps=OLD, advantages=A, old=OLD, ref=OLD)
  arrays = jax.tree.map(jnp.asarray, arrays)
  fn = functools.partial(objective.fn, entropy=jnp.zeros((3, 5)))
  loss, sums = fn(jnp.asarray(NEW), arrays=arrays)
  # One token fell by .2, and the run that it is in has two tokens.
  np.testing.assert_allclose(
    [sums['llds'], sums['llds_active']], [0.2, 2], rtol=1e-6
  )
  plain = llds.get_config('scale=0')
  less, _ = objectives.policy(plain).fn(
    jnp.asarray(NEW), jnp.zeros((3, 5)), arrays
  )
  np.testing.assert_allclose((loss - less).sum(), 0.5 * 0.2, atol=1e-6)


def test_one_update_of_a_step_is_refused():
  c = llds.get_config()
  assert c.algorithm.minibatches == 4
  checks.check(c)
  c.algorithm.minibatches = 1
  with pytest.raises(checks.ConfigError, match='minibatches=1'):
    checks.check(c)
  c.algorithm.epochs = 2
  checks.check(c)
  with pytest.raises(ValueError, match="gate='token'"):
    llds.get_config('gate=token')
