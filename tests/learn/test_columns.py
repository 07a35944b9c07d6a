"""A teacher's distributions in the loss, against full softmaxes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax import checks
from searchrl_jax.learn import (
  batching,
  learner,
  losses,
  objectives,
  optim,
  teacher,
  update,
)
from searchrl_jax.lookup import ConfigError
from searchrl_jax.models import decoder
from tests.learn import test_teacher as by_hand
from tests.methods import group as hand

pytestmark = pytest.mark.slow
K = 5
SIBLING = dict(right=1.0, fewest=False)


def config(context='sibling', **kw):
  kw = {'teacher.context_kw': SIBLING if context == 'sibling' else {}} | kw
  c = by_hand.config(context, **kw)
  c.teacher.columns.k = K
  c.algorithm.advantage = 'grpo'
  return c


@functools.cache
def updater(distance='reverse', alpha=0.5):
  c = config()
  c.teacher.columns.update(distance=distance, alpha=alpha)
  return update.Updater(
    by_hand.CFG,
    c.batch,
    temperature=1.0,
    objective=objectives.policy(c),
    tx=optim.make(c.optim, 10),
  )


@functools.cache
def full(ids, params=None):
  """Log-probs [n, V] of the id at each place after those before it."""
  x = jnp.asarray(ids)[None]
  found = by_hand.params() if params is None else params
  hidden = decoder.hidden_states(found, by_hand.CFG, x)
  logits = decoder.logits(found, by_hand.CFG, hidden)[0]
  logp = jax.nn.log_softmax(logits.astype(jnp.float32))
  return np.concatenate([np.zeros((1, logp.shape[1])), np.asarray(logp)[:-1]])


def of(t):
  return full(tuple(by_hand.ids_of(t).tolist()))


def compared(c, batch):
  [asked] = teacher.ask(batch, c, hand.ENV, shards=1, seed=3)
  both = by_hand.params(), by_hand.params()
  return teacher.compare(asked, batch, updater(), *both), asked


@pytest.mark.long
def test_ids_and_log_probs_are_those_of_full_softmaxes():
  batch, c = by_hand.step(), config()
  (told, metrics), asked = compared(c, batch)
  own = batch.minibatches
  unpack = lambda name: batching.unpacked(
    own, [[getattr(t, name) for t in mini] for mini in told], batch.masks
  )
  at, log_t, weight = map(unpack, ('at', 'log_t', 'weight'))
  for i, (t, mask) in enumerate(zip(batch.trajectories, batch.masks)):
    places = np.flatnonzero(mask)
    order = np.argsort(-of(t)[places], axis=-1, kind='stable')[:, :K]
    np.testing.assert_array_equal(at[i][places], order)
    if not asked.rows.taught[i]:
      assert not log_t[i].any() and not weight[i].any()
      continue
    other = of(asked.rows.trajectories[i])
    n = sum(len(s.ids) for s in t.segments if s.author != 'prompt')
    there = np.zeros((len(mask), other.shape[1]))
    there[-n:] = other[-n:]
    wanted = np.take_along_axis(there[places], order, -1)
    np.testing.assert_allclose(log_t[i][places], wanted, atol=3e-5)
  # Weights: N / n of the loss tokens N, on the n that have a teacher.
  total = sum(m.sum() for m in batch.masks)
  some = sum(m.sum() for m, ok in zip(batch.masks, asked.rows.taught) if ok)
  flat = np.concatenate(weight)
  np.testing.assert_allclose(flat[flat > 0], total / some, rtol=1e-6)
  assert metrics['teacher_tokens'] == some == (flat > 0).sum()


@pytest.mark.long
def test_a_step_without_a_hint_has_no_weight():
  c = config()
  batch = by_hand.step(returns=(0, 0, 0, 0, 0))
  (told, metrics), _ = compared(c, batch)
  assert metrics['teacher_rows'] == metrics['teacher_tokens'] == 0
  u = updater()
  state = u.init(update.copy(by_hand.params()))
  grads, sums = u.grads(state, batch.minibatches[0], told=told[0])
  assert float(sums['teacher_distance']) == 0
  assert not any(np.any(x) for x in jax.tree.leaves(grads))


def test_only_the_kinds_that_are_named_are_compared():
  c = config(**{'teacher.columns.kinds': ('search',)})
  batch = by_hand.step()
  (_, metrics), asked = compared(c, batch)
  queries = [
    sum(len(s.ids) for s in t.segments if s.kind == 'search')
    for t, ok in zip(batch.trajectories, asked.rows.taught)
    if ok
  ]
  assert metrics['teacher_tokens'] == sum(queries) > 0


@pytest.mark.long
@pytest.mark.parametrize('kind', losses.DISTANCES)
def test_the_update_has_the_gradient_of_the_full_computation(kind):
  """Loss and gradient beside plain autodiff over the teacher's rows."""
  batch, c, u = by_hand.step(), config(), updater(kind, 0.25)
  (told, _), asked = compared(c, batch)
  filled = [batching.set_advantages(m, np.zeros(5)) for m in batch.minibatches]
  # A state owns its arrays; the fixture's stay.
  state = u.init(update.copy(by_hand.params()))
  grads, sums = u.grads(state, filled[0], told=told[0])
  total = sum(m.sum() for m in batch.masks)

  def plain(params):
    out = 0.0
    for i, (t, mask) in enumerate(zip(batch.trajectories, batch.masks)):
      if not asked.rows.taught[i]:
        continue
      x = jnp.asarray(by_hand.ids_of(t))[None]
      hidden = decoder.hidden_states(params, by_hand.CFG, x)
      logits = decoder.logits(params, by_hand.CFG, hidden)[0]
      log_s = jax.nn.log_softmax(logits.astype(jnp.float32))[:-1]
      new = of(asked.rows.trajectories[i])
      n = sum(len(s.ids) for s in t.segments if s.author != 'prompt')
      for p in np.flatnonzero(mask):
        ids = np.argsort(-of(t)[p], kind='stable')[:K]
        log_t = new[len(new) - n + (p - (len(mask) - n))][ids]
        a = log_s[p - 1][ids]
        rest = lambda y: jnp.log1p(-jnp.exp(y).sum())
        a = jnp.append(a, rest(a))
        b = jnp.append(log_t, rest(jnp.asarray(log_t)))
        s, q = jnp.exp(a), jnp.exp(b)
        if kind == 'forward':
          d = (q * (b - a)).sum()
        elif kind == 'reverse':
          d = (s * (a - b)).sum()
        else:
          m = jnp.log(0.75 * s + 0.25 * q)
          d = 0.75 * (s * (a - m)).sum() + 0.25 * (q * (b - m)).sum()
        out += d
    some = sum(m.sum() for m, ok in zip(batch.masks, asked.rows.taught) if ok)
    return out / some

  value, wanted = jax.value_and_grad(plain)(by_hand.params())
  np.testing.assert_allclose(float(sums['loss']), value, rtol=2e-4)
  np.testing.assert_allclose(
    float(sums['teacher_distance']) / total, value, rtol=2e-4
  )
  for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted)):
    np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-3)


@pytest.mark.parametrize(
  'fields, message',
  [
    # Neither is written by the policy: one has another template, the other is
    # a source's.
    ({'teacher.columns.kinds': ('tool_call',)}, 'columns.kinds.*tool_call'),
    ({'teacher.columns.kinds': ('information',)}, 'columns.kinds.*informat'),
    ({'algorithm.aggregation': 'sequence'}, "aggregation='sequence'"),
    # A group of equal rewards has a distance.
    ({'algorithm.drop_zero_variance': True}, 'drop_zero_variance'),
  ],
)
def test_columns_that_cannot_work_are_refused(fields, message):
  checks.check(config())
  with pytest.raises(ConfigError, match=message):
    checks.check(config(**fields))


def test_more_ids_than_the_vocabulary_has_are_refused():
  c = config()
  c.teacher.columns.k = by_hand.CFG.vocab_size + 1
  with pytest.raises(ConfigError, match='k=301 ids of a vocabulary of 300'):
    learner.Learner(c, by_hand.CFG, None)


def test_golden_distances():
  # S = .5 .3 and .2 left, T = .25 .5 and .25.
  s, t = np.array([[[0.5, 0.3]]]), np.array([[[0.25, 0.5]]])
  far = functools.partial(losses.distance, jnp.log(s), jnp.log(t))
  log = np.log
  forward = 0.25 * log(0.25 / 0.5) + 0.5 * log(0.5 / 0.3) + 0.25 * log(1.25)
  np.testing.assert_allclose(far('forward', 0.0), [[forward]], rtol=1e-5)
  reverse = 0.5 * log(2) + 0.3 * log(0.6) + 0.2 * log(0.8)
  np.testing.assert_allclose(far('reverse', 0.0), [[reverse]], rtol=1e-5)
  # M of alpha .5: .375 .4 .225.
  of = lambda p: sum(x * log(x / m) for x, m in zip(p, (0.375, 0.4, 0.225)))
  js = 0.5 * of((0.5, 0.3, 0.2)) + 0.5 * of((0.25, 0.5, 0.25))
  np.testing.assert_allclose(far('js', 0.5), [[js]], rtol=1e-5)


@pytest.mark.parametrize('kind', losses.DISTANCES)
def test_gradients_to_logits_are_the_known_ones(kind):
  """forward S - T; reverse S (log S/T - KL); js (1 - a) S (log S/M - sum)."""
  rng = np.random.default_rng(1)
  z, log_t = rng.normal(size=6), np.log(rng.dirichlet(np.ones(6)))
  alpha = 0.3

  def loss(z):
    log_s = jax.nn.log_softmax(z)[None, None, :5]
    return losses.distance(log_s, log_t[None, None, :5], kind, alpha).sum()

  found = jax.grad(loss)(jnp.asarray(z))
  s, t = np.exp(z) / np.exp(z).sum(), np.exp(log_t)
  m = (1 - alpha) * s + alpha * t
  of = lambda q: s * (np.log(s / q) - (s * np.log(s / q)).sum())
  wanted = {'forward': s - t, 'reverse': of(t), 'js': (1 - alpha) * of(m)}
  np.testing.assert_allclose(found, wanted[kind], atol=2e-5)


@pytest.mark.parametrize('kind', losses.DISTANCES)
@pytest.mark.parametrize('k', [1, 20, 100, 128])
def test_a_token_without_a_teacher_is_finite(kind, k):
  """Its K ids are 0, and so are its K log-probs; its weight is 0, too."""
  own, none = jnp.full((1, 1, k), jnp.log(0.7)), jnp.zeros((1, 1, k))
  far = lambda own: losses.distance(own, none, kind, 0.5).sum()
  value, gradient = jax.value_and_grad(far)(own)
  assert np.isfinite(value) and np.isfinite(gradient).all()


def test_equal_distributions_have_no_distance_and_no_nan():
  c = config('own', **{'teacher.context_kw': {}})
  batch = by_hand.step()
  (told, _), _ = compared(c, batch)
  u = updater()
  state = u.init(update.copy(by_hand.params()))
  grads, sums = u.grads(state, batch.minibatches[0], told=told[0])
  assert abs(float(sums['teacher_distance'])) < 1e-4
  for x in jax.tree.leaves(grads):
    assert np.isfinite(x).all() and np.abs(x).max() < 1e-4
  # One that is sure of one id: nothing is left for the others.
  sure = jnp.log(jnp.array([[[1.0, 0.0]]]) + 1e-30)
  for kind in losses.DISTANCES:
    assert np.isfinite(
      losses.distance(sure, jnp.log(jnp.full((1, 1, 2), 0.5)), kind, 0.5)
    ).all()
