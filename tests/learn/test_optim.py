"""Schedules by arithmetic, AdamW against NumPy, freezing, bad fields."""

import contextlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from searchrl_jax import schema
from searchrl_jax.learn import optim
from searchrl_jax.learn.learner import Learner, Outputs
from searchrl_jax.lookup import ConfigError
from searchrl_jax.models import parameters
from tests import tiny

PARAMS = {
  'embed': np.ones((4, 3), np.float32),
  'layers': {
    'q': np.full((2, 3, 2, 2), 0.5, np.float32),
    'q_bias': np.full((2, 2, 2), 0.5, np.float32),
    'attn_norm': np.ones((2, 3), np.float32),
  },
  'final_norm': np.ones(3, np.float32),
}


def config(**kw):
  c = schema.base().optim
  c.update(kw)
  return c


def test_schedules():
  # Warm-up of 4: a quarter more at each update.
  rate = optim.schedule(config(lr=1.0, warmup=4), 10)
  np.testing.assert_allclose(
    [rate(i) for i in (0, 1, 2, 3, 4, 9)], [0.25, 0.5, 0.75, 1, 1, 1]
  )
  # Linear over the 8 updates after a warm-up of 2.
  rate = optim.schedule(config(lr=2.0, warmup=2, schedule='linear'), 10)
  np.testing.assert_allclose(
    [rate(i) for i in (0, 1, 2, 6, 9, 10)], [1, 2, 2, 1, 0.25, 0]
  )
  rate = optim.schedule(config(lr=1.0, schedule='cosine'), 8)
  np.testing.assert_allclose(
    [rate(i) for i in (0, 4, 8)], [1, 0.5, 0], atol=1e-6
  )


@pytest.mark.long
def test_adamw_equals_numpy():
  c = config(lr=0.1, b1=0.8, b2=0.9, eps=1e-8, weight_decay=0.01, clip_norm=1.0)
  params = jax.tree.map(jnp.asarray, PARAMS)
  tx = optim.make(c, 10)
  state = tx.init(params)
  want = {
    k: v.astype(np.float64)
    for k, v in zip(optim.paths(PARAMS), jax.tree.leaves(PARAMS))
  }
  m = {k: 0.0 for k in want}
  v = {k: 0.0 for k in want}
  rng = np.random.default_rng(0)
  for i in range(3):
    grads = jax.tree.map(
      lambda x: rng.normal(size=x.shape).astype(np.float32), PARAMS
    )
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    flat = dict(zip(optim.paths(grads), jax.tree.leaves(grads)))
    norm = np.sqrt(
      sum((g.astype(np.float64) ** 2).sum() for g in flat.values())
    )
    for k, g in flat.items():
      g = g / max(norm, 1.0)
      m[k] = 0.8 * m[k] + 0.2 * g
      v[k] = 0.9 * v[k] + 0.1 * g * g
      step = (
        m[k]
        / (1 - 0.8 ** (i + 1))
        / (np.sqrt(v[k] / (1 - 0.9 ** (i + 1))) + 1e-8)
      )
      if k in ('embed', 'layers/q'):  # matrices alone decay
        step = step + 0.01 * want[k]
      want[k] = want[k] - 0.1 * step
  got = dict(zip(optim.paths(params), jax.tree.leaves(params)))
  for k in want:
    np.testing.assert_allclose(got[k], want[k], rtol=2e-4, atol=1e-5)


def test_a_warmup_of_the_whole_run_is_refused():
  with pytest.raises(ValueError, match='warmup=10'):
    optim.make(config(schedule='cosine', warmup=10), 10)


@pytest.mark.parametrize(
  'kind, rates',
  # 4 updates a step, 12 in all: 1 of the first step took place, none of the
  # second, 2 of the third.
  [
    (('linear', 0), [1, 1, 1 - 9 / 12]),
    (('linear', 3), [1 / 3, 1 / 3, 1]),  # a warm-up counts those that did
    (('constant', 0), [1, 1, 1]),
  ],
)
def test_a_schedule_goes_on_where_minibatches_fall_away(kind, rates):
  c = tiny.config()
  schedule, warmup = kind
  c.optim.update(lr=1.0, schedule=schedule, warmup=warmup)
  c.algorithm.minibatches = 4
  learner = Learner(c, parameters.model_config(c, 8), None)
  updater, learner._peak = learner.updater, 0.0
  zeros = lambda x: np.zeros(x.shape, x.dtype)
  learner.start(jax.tree.map(zeros, updater.shapes))
  apply = jax.jit(lambda moments, params: updater.tx.update(params, moments))

  def step(state, mini, old, ref):
    _, moments = apply(state.opt_state, state.params)
    return state._replace(opt_state=moments, step=state.step + 1), {}

  updater.step = step
  credit = types.SimpleNamespace(advantages=None, targets=None)
  timer = types.SimpleNamespace(timer=lambda name: contextlib.nullcontext())
  for number, (kept, rate) in enumerate(zip((1, 0, 2), rates, strict=True)):
    run = types.SimpleNamespace(
      step=number, writer=timer, check_finite=lambda *batch: None
    )
    outputs = Outputs([None] * kept, [None] * kept, None)
    learner.update([[]] * kept, outputs, credit, run)
    assert learner.rates()['train/lr'] == pytest.approx(rate)
  state = learner.tree()['state']
  is_adam = lambda x: isinstance(x, optax.ScaleByAdamState)
  [adam] = filter(is_adam, jax.tree.leaves(state.opt_state, is_leaf=is_adam))
  assert int(state.step) == int(adam.count) == 3


def test_no_clipping():
  tx = optim.make(config(lr=1.0, clip_norm=0.0, eps=1e30), 1)
  grads = jax.tree.map(lambda x: np.full_like(x, 1e3), PARAMS)
  updates, _ = tx.update(grads, tx.init(PARAMS), PARAMS)
  # Adam with a huge eps: -lr * g / eps, so the scale of g shows.
  np.testing.assert_allclose(updates['embed'], -1e-27, rtol=1e-4)


def test_gradients_that_16_bits_of_float_cannot_hold_are_refused():
  c = tiny.config()
  c.model.dtype = 'float16'
  with pytest.raises(ConfigError, match="model.dtype='float16'.*bfloat16"):
    Learner(c, parameters.model_config(c, 8), None)
