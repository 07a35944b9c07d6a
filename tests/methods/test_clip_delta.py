"""Clip and Delta by hand, and what they are for: no search pays by itself."""

import asyncio

import numpy as np
import pytest

from configs.methods import clip_delta
from searchrl_jax import checks
from searchrl_jax.data.checks import DataError
from searchrl_jax.lookup import ConfigError
from searchrl_jax.types import Question
from tests.methods import group as hand


def earned(kind, group=hand.GROUP, **kw):
  fields = dict(kind=kind, eta=0.1, scale=1.0) | kw
  reward = clip_delta.reward([group], hand.CONTEXT, **fields)
  return asyncio.run(reward)


def by_turn(rewards, group=hand.GROUP):
  from searchrl_jax.rewards import progress

  out = []
  for value, t in zip(rewards.value, group, strict=True):
    out.append([float(value[i]) for i in progress.last_segments(t).values()])
  return out


def test_golden():
  # a and b support: RIGHT gains 1/2 and 1/2, WRONG 0 (x z) and 1/2 (a).
  assert by_turn(earned('none')) == [[0.5, 0.5, 0], [0, 0.5, 0], [0]]
  np.testing.assert_allclose(by_turn(earned('clip'))[0], [0, 0, -0.1])
  np.testing.assert_allclose(by_turn(earned('clip'))[1], [-0.1, 0, -0.1])
  # .5 - .5, .5 - 0, 0; 0 - .5, .5 - 0, 0.
  assert by_turn(earned('delta')) == [[0, 0.5, 0], [-0.5, 0.5, 0], [0]]


@pytest.mark.parametrize('n', [1, 2])
def test_further_searches_cannot_be_farmed(n):
  """Delta adds up to the first step's reward; Clip is never above 0."""
  many = hand.play(*[('w', 'a')] + [('w', 'ab')] * n)
  total = lambda kind: sum(by_turn(earned(kind, (many,)), (many,))[0])
  assert total('delta') == pytest.approx(0.5)
  assert total('clip') <= 0
  assert total('none') == pytest.approx(1.0)


def test_its_config():
  c = clip_delta.get_config('kind=clip,eta=0.2')
  assert c.reward.steps.eta == 0.2 and 'em' in c.reward
  checks.check(c)
  with pytest.raises(DataError, match='supporting passages'):
    checks.check_data(c, [Question('q', 'who?', ('Ann',))])
  with pytest.raises(ConfigError, match="kind='cut'"):
    clip_delta.get_config('kind=cut')
