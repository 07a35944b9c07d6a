"""Losses against NumPy references, golden values, and their invariances."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np
import pytest

from searchrl_jax import lookup
from searchrl_jax.learn import losses
from searchrl_jax.schema import CHOICES

KW = dict(
  clip_low=0.2,
  clip_high=0.3,
  clip_dual=0.0,
  ratio='token',
  tis='token',
  tis_cap=2.0,
  tis_floor=0.0,
  tis_mode='cap',
)
WHERE = 'config.algorithm.loss'
# `mixed` takes another array: tests/learn/test_foreign.py.
POLICY = tuple(
  getattr(losses, name) for name in losses.NAMES if name != 'mixed'
)


def taken(fn, **kw):
  """What `fn` takes of the fields above, some of them changed."""
  return lookup.arguments(
    fn, ConfigDict(KW | kw | dict(loss=fn.__name__)), WHERE
  )


def draw(seed, B=4, T=6, spread=0.5):
  rng = np.random.default_rng(seed)
  f = lambda: rng.normal(-1.0, spread, (B, T)).astype(np.float32)
  mask = rng.random((B, T)) < 0.6
  mask[:, 0] = False
  adv = np.repeat(rng.normal(size=(B, 1)), T, 1).astype(np.float32)
  return f(), f(), f(), adv, mask


def reference(
  logps,
  old,
  behaviour,
  adv,
  mask,
  clip_low,
  clip_high,
  clip_dual,
  ratio,
  tis,
  tis_cap,
  tis_floor,
  tis_mode,
):
  """The clipped loss of each token, one token at a time, in float64."""
  out = np.zeros(mask.shape)
  for b in range(mask.shape[0]):
    at = np.flatnonzero(mask[b])
    d = {t: float(logps[b, t]) - float(old[b, t]) for t in at}
    m = {t: float(old[b, t]) - float(behaviour[b, t]) for t in at}
    for t in at:
      whole = sum(d.values())
      x = {'token': d[t], 'sequence': whole / len(at), 'product': whole}[ratio]
      r, a = math.exp(x), float(adv[b, t])
      value = min(r * a, min(max(r, 1 - clip_low), 1 + clip_high) * a)
      if clip_dual and a < 0:
        value = max(value, clip_dual * a)
      w = {'none': 0.0, 'token': m[t], 'sequence': sum(m.values())}[tis]
      w = math.exp(w) if tis != 'none' else 1.0
      if tis != 'none' and tis_mode == 'mask':
        w = w if tis_floor <= w <= tis_cap else 0.0
      elif tis != 'none':
        w = min(w, tis_cap)
      out[b, t] = -w * value
  return out


@pytest.mark.parametrize('ratio', CHOICES['algorithm.ratio'])
@pytest.mark.parametrize('tis', CHOICES['algorithm.tis'])
@pytest.mark.parametrize('mode', ['cap', 'mask'])
@pytest.mark.parametrize('dual', [0.0, 1.4])
def test_clip_equals_the_reference(ratio, tis, mode, dual):
  kw = KW | dict(ratio=ratio, tis=tis, tis_mode=mode, clip_dual=dual)
  if mode == 'mask':
    kw |= dict(tis_floor=0.7, tis_cap=1.5)
  for seed in range(3):
    args = draw(seed)
    got, sums = losses.clip(*map(jnp.asarray, args), **kw)
    want = reference(*args, **kw)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)
    assert all(np.isfinite(v) for v in sums.values())


def test_clip_golden():
  # Ratios e^0.5 = 1.6487 (A = 1: clipped to 1.3), e^-0.5 = 0.6065 (A = -1:
  # clipped to 0.8, as max(.6065, .8) costs more), e^-0.5 with A = 1 free.
  logps = jnp.array([[0.0, 0.5, -0.5, -0.5]])
  zero = jnp.zeros((1, 4))
  adv = jnp.array([[0.0, 1.0, -1.0, 1.0]])
  mask = jnp.array([[False, True, True, True]])
  loss, sums = losses.clip(logps, zero, zero, adv, mask, **KW)
  np.testing.assert_allclose(
    loss[0], [0, -1.3, 0.8, -math.exp(-0.5)], rtol=1e-6
  )
  assert sums['clip_high'] == 1 and sums['clip_low'] == 1
  # k3 of old || new: r - 1 - log r.
  want = (math.exp(0.5) - 1.5) + 2 * (math.exp(-0.5) - 0.5)
  np.testing.assert_allclose(sums['kl_old'], want, rtol=1e-5)


def test_weights_come_before_clipping():
  # old - behaviour = log 3, capped at 2, and the step's ratio e^0.5 clipped
  # at 1.3: -2 * 1.3. Were the product 3 * 1.65 clipped, it would be -1.3.
  one = jnp.ones((1, 1))
  loss, sums = losses.clip(
    0.5 * one, 0 * one, -math.log(3) * one, one, one > 0, **KW
  )
  np.testing.assert_allclose(loss[0, 0], -2.6, rtol=1e-6)
  assert sums['tis_truncated'] == 1 and sums['tis_weight'] == 2

  # No gradient through the weight: on policy d loss / d logp = -w A.
  def f(x):
    return losses.clip(
      x, jax.lax.stop_gradient(x), x - math.log(1.5), one, one > 0, **KW
    )[0].sum()

  np.testing.assert_allclose(jax.grad(f)(one), [[-1.5]], rtol=1e-6)


@pytest.mark.parametrize('fn', POLICY)
@pytest.mark.parametrize('ratio', CHOICES['algorithm.ratio'])
def test_on_policy_gradient_is_the_policy_gradient(fn, ratio):
  logps, _, _, adv, mask = draw(3)
  kw = taken(fn, ratio=ratio, tis='none', clip_dual=3.0)

  def f(x):
    old = jnp.asarray(logps)
    loss, _ = fn(x, old, old, jnp.asarray(adv), mask, **kw)
    return losses.aggregate(loss, mask, 'sequence')

  n = np.maximum(mask.sum(1, keepdims=True), 1)
  if fn is losses.clip and ratio == 'product':
    n = 1  # a row is one action: r A, whatever its length
  want = np.where(mask, -adv / n, 0)
  np.testing.assert_allclose(jax.grad(f)(logps), want, rtol=1e-5, atol=1e-7)


def test_kl_golden():
  # logp = log .5, ref = log .25: d = -log 2.
  logp, ref = jnp.log(0.5), jnp.log(0.25)
  ln2 = math.log(2)
  np.testing.assert_allclose(losses.kl(logp, ref, 'k1'), ln2, rtol=1e-6)
  np.testing.assert_allclose(losses.kl(logp, ref, 'k2'), ln2**2 / 2, rtol=1e-6)
  # e^-ln2 + ln2 - 1 = ln2 - 1/2.
  np.testing.assert_allclose(losses.kl(logp, ref, 'k3'), ln2 - 0.5, rtol=1e-5)


def test_kl_estimators_on_average():
  # Exact expectations over p: k1 and k3 give KL(p || q), k2 is close.
  p, q = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
  exact = float((p * np.log(p / q)).sum())
  for name, tol in (('k1', 1e-5), ('k3', 1e-5), ('k2', 5e-2)):
    got = (p * losses.kl(jnp.log(p), jnp.log(q), name)).sum()
    np.testing.assert_allclose(got, exact, rtol=tol, atol=tol / 10)


def test_aggregations_golden():
  loss = jnp.array([[0.0, 1, 2, 3], [0, 5, 9, 9], [7, 7, 7, 7]])
  mask = np.array([[0, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]], bool)
  # Loss tokens 1 2 3 | 5: sum 11 of 4 tokens; means 2 and 5 of 2 rows;
  # horizon 10: 11 / 20.
  for mode, want in (
    ('token', 11 / 4),
    ('sequence', 7 / 2),
    ('sequence_sum', 11 / 20),
  ):
    n = losses.aggregate(loss, mask, mode)
    d = losses.denominator([mask], mode, 10)
    np.testing.assert_allclose(n / d, want, rtol=1e-6)


def test_aggregation_errors():
  with pytest.raises(ValueError, match='horizon=0'):
    losses.denominator([], 'sequence_sum', 0)


@pytest.mark.slow
@pytest.mark.parametrize('fn', POLICY)
@pytest.mark.parametrize('mode', CHOICES['algorithm.aggregation'])
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3))
def test_split_permute_and_pad(fn, mode, seed, cut):
  """Microbatches, the order of rows and empty rows cannot show."""
  args = draw(seed)
  kw = taken(fn, ratio='sequence', tis='sequence')

  def value(parts):
    d = losses.denominator([p[4] for p in parts], mode, 6)
    total, sums = 0.0, None
    for p in parts:
      loss, more = fn(*map(jnp.asarray, p), **kw)
      more = dict(more) | losses.mismatch(
        *map(jnp.asarray, (*p[1:3], p[4], p[4]))
      )
      sums = more if sums is None else losses.add(sums, more)
      total += losses.aggregate(loss, p[4], mode)
    return total / d, sums

  whole, sums = value([args])
  order = np.random.default_rng(seed).permutation(4)
  pad = [np.concatenate([x, np.zeros_like(x[:2])]) for x in args]
  for parts in (
    [[x[:cut] for x in args], [x[cut:] for x in args]],
    [[x[order] for x in args]],
    [pad],
  ):
    again, sums2 = value(parts)
    np.testing.assert_allclose(again, whole, rtol=1e-5, atol=1e-6)
    for k in sums:
      np.testing.assert_allclose(sums2[k], sums[k], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('fn', POLICY)
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6))
def test_nothing_outside_the_mask_counts(fn, seed):
  logps, old, behaviour, adv, mask = draw(seed)
  mask[1] = False

  def f(x, old, behaviour, adv):
    loss, _ = fn(x, old, behaviour, adv, mask, **taken(fn))
    return losses.aggregate(loss, mask, 'sequence')

  junk = lambda x: jnp.asarray(np.where(mask, x, np.inf), jnp.float32)
  clean, g = jax.value_and_grad(f)(
    *map(jnp.asarray, (logps, old, behaviour, adv))
  )
  dirty, g2 = jax.value_and_grad(f)(*map(junk, (logps, old, behaviour, adv)))
  np.testing.assert_allclose(clean, dirty, rtol=1e-6)
  np.testing.assert_allclose(g, g2, rtol=1e-6)
  assert not np.asarray(g)[~mask].any()


@pytest.mark.parametrize('fn', POLICY)
def test_an_empty_mask_is_zero_not_nan(fn):
  args = draw(0)[:4]
  mask = np.zeros((4, 6), bool)
  for ratio in CHOICES['algorithm.ratio']:

    def f(x, ratio=ratio):
      loss, sums = fn(
        x, *map(jnp.asarray, args[1:]), mask, **taken(fn, ratio=ratio)
      )
      return losses.aggregate(loss, mask, 'sequence'), sums

    (value, sums), g = jax.value_and_grad(f, has_aux=True)(args[0])
    assert value == 0 and not np.asarray(g).any()
    assert all(np.isfinite(v) for v in sums.values())
  assert losses.denominator([mask], 'token', 0) == 1


@pytest.mark.parametrize('fn', POLICY)
def test_zero_advantage_zero_gradient(fn):
  logps, old, behaviour, _, mask = draw(5)
  zero = jnp.zeros_like(old)
  g = jax.grad(
    lambda x: fn(x, old, behaviour, zero, mask, **taken(fn))[0].sum()
  )(logps)
  assert not np.asarray(g).any()


@pytest.mark.parametrize('fn', POLICY)
def test_huge_ratios_stay_finite(fn):
  x = jnp.array([[0.0, 300.0, -300.0]])
  zero, mask = jnp.zeros((1, 3)), jnp.array([[False, True, True]])
  adv = jnp.array([[0.0, -1.0, 1.0]])
  loss, sums = fn(x, zero, -x, adv, mask, **taken(fn))
  more = losses.mismatch(x, zero, mask, mask)
  for v in (loss, *sums.values(), *more.values()):
    assert np.all(np.isfinite(v))


def test_mismatch_and_summary():
  # Ratios 1.2, 1, 0.8, 1 -> two outside [0.9, 1.1];
  # ess = (1.2 + 1 + .8 + 1)^2 / (4 (1.44 + 1 + .64 + 1)) = 16 / 16.32.
  old = jnp.log(jnp.array([[1.2, 1.0, 0.8, 1.0]]))
  mask = jnp.ones((1, 4), bool)
  sums = losses.mismatch(old, jnp.zeros((1, 4)), mask, mask)
  out = losses.summarise(dict(sums) | {'tokens': 4.0, 'loss': 0.7})
  assert out['mismatch_outside'] == 0.5
  np.testing.assert_allclose(out['mismatch_ess'], 16 / 16.32, rtol=1e-5)
  np.testing.assert_allclose(
    out['mismatch_abs'], (math.log(1.2) - math.log(0.8)) / 4, rtol=1e-5
  )
  np.testing.assert_allclose(out['mismatch_max'], -math.log(0.8), rtol=1e-5)
  assert out['loss'] == 0.7


def test_dual_clip_golden():
  # Ratio e^2 = 7.389. A = -1: the loss is 7.389, with c = 3 it is 3 and flat;
  # A = 1: clipped at 1.3 as ever. Ratio e^0.5 = 1.649 < 3, A = -1: as it was.
  logps = jnp.array([[2.0, 2.0, 0.5]])
  zero, mask = jnp.zeros((1, 3)), jnp.ones((1, 3), bool)
  adv = jnp.array([[-1.0, 1.0, -1.0]])

  def f(x):
    loss, sums = losses.clip(
      x, zero, zero, adv, mask, **(KW | dict(clip_dual=3.0))
    )
    return loss.sum(), (loss, sums)

  g, (loss, sums) = jax.grad(f, has_aux=True)(logps)
  np.testing.assert_allclose(loss[0], [3, -1.3, math.exp(0.5)], rtol=1e-6)
  np.testing.assert_allclose(g[0], [0, 0, math.exp(0.5)], rtol=1e-6)
  assert sums['clip_dual'] == 1 and sums['clip_high'] == 1


def test_cispo_golden():
  # Ratios e^1 = 2.718 (bounded to 1.3), e^-1 = 0.368 (to 0.8), 1. The
  # gradient is -bounded A everywhere: no token is dropped, as in `clip`.
  logps = jnp.array([[-1.0, -3.0, -2.0]])
  old, mask = jnp.full((1, 3), -2.0), jnp.ones((1, 3), bool)
  adv = jnp.array([[2.0, -1.0, 1.0]])

  def f(x):
    loss, sums = losses.cispo(x, old, old, adv, mask, **taken(losses.cispo))
    return loss.sum(), (loss, sums)

  g, (loss, sums) = jax.grad(f, has_aux=True)(logps)
  # -1.3 x 2 x -1 = 2.6; -0.8 x -1 x -3 = -2.4; -1 x 1 x -2 = 2.
  np.testing.assert_allclose(loss[0], [2.6, -2.4, 2], rtol=1e-6)
  np.testing.assert_allclose(g[0], [-2.6, 0.8, -1], rtol=1e-6)
  assert sums['clip_high'] == 1 and sums['clip_low'] == 1


def test_reinforce_golden():
  # Weights of the policy of now against the engine: e^0.5 = 1.649, e^1 =
  # 2.718 capped at 2, e^-1 = 0.368. Old log-probs are not asked.
  logps = jnp.array([[-1.0, -1.0, -2.0]])
  behaviour = jnp.array([[-1.5, -2.0, -1.0]])
  mask, adv = jnp.ones((1, 3), bool), jnp.array([[1.0, -2.0, 3.0]])

  def f(x, old):
    loss, sums = losses.reinforce(
      x, old, behaviour, adv, mask, **taken(losses.reinforce)
    )
    return loss.sum(), (loss, sums)

  w = np.array([math.exp(0.5), 2.0, math.exp(-1)])
  for old in (logps, logps - 1):
    g, (loss, sums) = jax.grad(f, has_aux=True)(logps, old)
    np.testing.assert_allclose(loss[0], w * [1, -2, 6], rtol=1e-6)
    np.testing.assert_allclose(g[0], -w * [1, -2, 3], rtol=1e-6)
    assert sums['tis_truncated'] == 1
  # Without weights: -A log pi.
  loss, _ = losses.reinforce(
    logps, logps, behaviour, adv, mask, **taken(losses.reinforce, tis='none')
  )
  np.testing.assert_allclose(loss[0], [1, -2, 6], rtol=1e-6)


def test_value_golden():
  # Targets 1. V = 2, V_old = 0, clip 0.5: error 1, near 0.5 with error 0.25:
  # the larger, 1. V = 0.9, V_old = 0: error 0.01, near 0.5 with 0.25: its
  # gradient is 0. V = 0.2, V_old = 0: within the clip, (0.8)^2.
  v = jnp.array([[2.0, 0.9, 0.2]])
  zero, mask = jnp.zeros((1, 3)), jnp.ones((1, 3), bool)

  def f(v, clip):
    loss, sums = losses.value(v, zero, zero + 1, mask, clip=clip)
    return loss.sum(), (loss, sums)

  g, (loss, sums) = jax.grad(f, has_aux=True)(v, 0.5)
  np.testing.assert_allclose(loss[0], [0.5, 0.125, 0.32], rtol=1e-6)
  np.testing.assert_allclose(g[0], [1, 0, -0.8], rtol=1e-6)
  np.testing.assert_allclose(sums['value_error'], 1 + 0.01 + 0.64, rtol=1e-6)
  assert sums['value_clip'] == 1
  g, (loss, sums) = jax.grad(f, has_aux=True)(v, 0.0)
  np.testing.assert_allclose(loss[0], [0.5, 0.005, 0.32], rtol=1e-6)
  np.testing.assert_allclose(g[0], [1, -0.1, -0.8], rtol=1e-5)
  assert sums['value_clip'] == 0


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3))
def test_the_value_loss_splits_and_sees_no_other_token(seed, cut):
  v, old, targets, _, mask = draw(seed)

  def f(v, old, targets, mask):
    loss, sums = losses.value(v, old, targets, mask, clip=0.3)
    return losses.aggregate(loss, mask, 'token'), sums

  whole, g = jax.value_and_grad(f, has_aux=True)(v, old, targets, mask)
  junk = [np.where(mask, x, np.nan) for x in (v, old, targets)]
  dirty, g2 = jax.value_and_grad(f, has_aux=True)(*junk, mask)
  np.testing.assert_array_equal(whole[0], dirty[0])
  np.testing.assert_array_equal(g, g2)
  assert not np.asarray(g)[~mask].any()
  parts = [
    f(*(x[s] for x in (v, old, targets, mask)))
    for s in (slice(cut), slice(cut, None))
  ]
  np.testing.assert_allclose(
    parts[0][0] + parts[1][0], whole[0], rtol=1e-5, atol=1e-6
  )
  sums = losses.add(parts[0][1], parts[1][1])
  for k in sums:
    np.testing.assert_allclose(sums[k], whole[1][k], rtol=1e-5, atol=1e-6)


def test_fields_are_what_a_loss_asks_for():
  config = ConfigDict(KW | dict(loss='mine.fn'))

  def fn(logps, old, behaviour, advantages, mask, *, clip_high, tis):
    pass

  assert lookup.arguments(fn, config, WHERE) == {
    'clip_high': 0.3,
    'tis': 'token',
  }

  def greedy(logps, *, klip):
    pass

  with pytest.raises(ValueError, match="'mine.fn'.*'klip'"):
    lookup.arguments(greedy, config, WHERE)
