"""ECHO: what observations are trained with, by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.methods import echo
from searchrl_jax import checks
from searchrl_jax.learn import advantages, batching, update
from searchrl_jax.lookup import ConfigError
from searchrl_jax.models import decoder
from searchrl_jax.text import structure
from tests.learn import test_teacher as by_hand
from tests.methods import group as hand

VALID = np.ones(3, bool)


def observed(group=hand.GROUP):
  """The group with observations, and what else was appended, in the loss."""
  train = lambda s: dataclasses.replace(s, train=s.author != 'prompt')
  return [
    dataclasses.replace(t, segments=tuple(map(train, t.segments)))
    for t in group
  ]


def found(group, valid=VALID, outcome=(1, 0, 0), scale=0.1):
  masks = batching.masks(group)
  s = structure.of(group, masks)
  values = np.array(outcome, float)
  a = echo.with_observations(
    values, valid, [0] * len(group), s, masks, scale=scale, eps=0.0, ddof=1
  )
  return a, masks, s


def test_golden_weights():
  group = observed()
  got, masks, s = found(group)
  plain = advantages.grpo(np.array([1.0, 0, 0]), VALID, [0] * 3, eps=0.0)
  n = sum(m.sum() for m in masks)
  p = sum((t >= 0).sum() for t in s.turns)
  spans = [[x for x in own if x.observes] for own in s.spans]
  o = sum(x.end - x.start for own in spans for x in own)
  assert [len(own) for own in spans] == [2, 2, 0] and n >= p + o
  for a, own, turns, x in zip(got, spans, s.turns, plain, strict=True):
    np.testing.assert_allclose(a[turns >= 0], x * n / p, rtol=1e-5)
    read = np.zeros(len(a), bool)
    for span in own:
      read[span.start : span.end] = True
    np.testing.assert_allclose(a[read], 0.1 * n / o, rtol=1e-5)
    # Nothing else: neither the prompt nor feedback of the environment.
    assert not a[(turns < 0) & ~read].any()


def test_each_part_has_its_own_number_of_tokens_as_divisor():
  """The mean over all loss tokens is GRPO's mean plus scale x a mean of 1."""
  got, masks, s = found(observed(), scale=0.3)
  n = sum(m.sum() for m in masks)
  plain = [np.float64(a) for a in advantages.grpo([1.0, 0, 0], VALID, [0] * 3)]
  p = sum((t >= 0).sum() for t in s.turns)
  mean = sum((t >= 0).sum() * a for t, a in zip(s.turns, plain)) / p
  total = sum(a[m].sum() for a, m in zip(got, masks)) / n
  assert total == pytest.approx(mean + 0.3, abs=1e-4)


def test_what_is_not_valid_is_in_no_count():
  group = observed()
  got, *_ = found(group, valid=np.array([True, False, True]))
  assert not got[1].any()
  two, *_ = found([group[0], group[2]], valid=VALID[:2], outcome=(1, 0))
  for a, b in zip((got[0], got[2]), two, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5)


def test_feedback_is_not_learnt():
  # An invalid action: the environment answers, no tool does.
  lost = observed([hand.play(answer=None)])
  got, masks, s = found(lost, valid=VALID[:1], outcome=(0,))
  assert masks[0].sum() > (s.turns[0] >= 0).sum()
  assert not got[0].any()


@pytest.mark.slow
def test_the_update_is_grpos_and_a_cross_entropy():
  """Through the trainer, beside autodiff of the model on each sequence."""
  group = observed()
  a, _, s = found(group, scale=0.3)
  batch, u = by_hand.step((group,), (1, 0, 0)), by_hand.updater()
  [mini] = batch.minibatches
  filled = batching.set_advantages(mini, a)
  # The first update of a step; the weight of tokens that were sampled is 1.
  state = u.init(update.copy(by_hand.params()))
  old = u.outputs(by_hand.params(), [filled])
  filled = [
    dataclasses.replace(b, behaviour_logps=np.where(
      np.isnan(b.behaviour_logps), np.nan, x)) for b, x in zip(filled, old[0])
  ]  # fmt: skip
  grads, _ = u.grads(state, filled)
  plain = advantages.grpo(np.array([1.0, 0, 0]), VALID, [0] * 3)
  wrote = [turns >= 0 for turns in s.turns]
  read = [np.zeros(len(w), bool) for w in wrote]
  for tokens, spans in zip(read, s.spans, strict=True):
    for span in spans:
      tokens[span.start : span.end] = span.observes
  p, o = (sum(x.sum() for x in of) for of in (wrote, read))

  def loss(params):
    out = 0.0
    for t, x, own, other in zip(group, plain, wrote, read, strict=True):
      ids = jnp.asarray(by_hand.ids_of(t))[None]
      hidden = decoder.hidden_states(params, by_hand.CFG, ids)
      logits = decoder.logits(params, by_hand.CFG, hidden)[0]
      logp = jax.nn.log_softmax(logits.astype(jnp.float32))[:-1]
      logp = jnp.take_along_axis(logp, ids[0, 1:, None], 1)[:, 0]
      out -= x / p * jnp.where(own[1:], logp, 0).sum()
      out -= 0.3 / o * jnp.where(other[1:], logp, 0).sum()
    return out

  wanted = jax.grad(loss)(by_hand.params())
  for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted)):
    np.testing.assert_allclose(x, y, atol=2e-5, rtol=2e-3)


def test_its_config():
  c = echo.get_config('scale=0.2')
  assert c.env.train_observations and c.algorithm.advantage_kw.scale == 0.2
  checks.check(c)
  assert not echo.get_config('base=search_r1').algorithm.entropy_coef
  c.algorithm.entropy_coef = 0.001
  with pytest.raises(ConfigError, match='entropy_coef=0.001.*observations'):
    checks.check(c)
  c.algorithm.entropy_coef = 0.0
  c.algorithm.drop_zero_variance = True
  with pytest.raises(ConfigError, match='drop_zero_variance'):
    checks.check(c)
