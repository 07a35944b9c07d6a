"""MR-Search by hand: each attempt beside the same attempt of the others."""

import asyncio

import numpy as np
import pytest

from configs.methods import mr_search
from searchrl_jax import checks
from searchrl_jax.data.checks import DataError
from searchrl_jax.learn import batching
from searchrl_jax.rewards import answer, core
from searchrl_jax.text import structure
from searchrl_jax.types import Question
from tests import scripted
from tests.methods.group import QUESTION, attempting, by_turn

ENV = attempting(3)
NOTE = '<refine>no</refine>'
FIND = '<search>x</search>'


def says(text):
  return f'<answer>{text}</answer>'


def attempt(*turns, sample):
  state, _ = scripted.play(ENV, turns, question=QUESTION)
  return ENV.trajectory(state, sample)


# Searches, is wrong, is right twice; is right at once; is never right.
LATE = attempt(
  FIND, says('Bob'), NOTE, says('Ann'), NOTE, FIND, says('Ann'), sample=0
)
ONCE = attempt(says('Ann'), NOTE, says('Bob'), NOTE, says('Ann'), sample=1)
NEVER = attempt(says('Bob'), NOTE, says('Bo'), NOTE, says('B'), sample=2)
GROUP = (LATE, ONCE, NEVER)


def reward(group=GROUP):
  context = core.RewardContext(env=ENV)
  return asyncio.run(answer.each_attempt([group], context))


def advantages(group=GROUP, valid=(True, True, True)):
  masks = batching.masks(group)
  s = structure.of(group, masks)
  values = core.at_tokens([group], reward(group))
  return by_turn(s, mr_search.by_attempt(values, valid, [0] * 3, masks, s))


def test_an_answer_in_a_note_is_none():
  """It would be a free attempt."""
  sly = f'{says("Ann")}{NOTE}'
  t = attempt(says('Bob'), sly, says('Bo'), sly, says('B'), sample=0)
  assert t.meta['attempt'] == [0, 1, 1, 2, 2]
  found = reward((t,))
  assert not found.value[0].any() and ENV.answer(t) == 'B'


def test_turns_know_their_attempt():
  assert LATE.meta['attempt'] == [0, 0, 1, 1, 2, 2, 2]
  assert ONCE.meta['attempt'] == [0, 1, 1, 2, 2]


def test_each_answer_earns_its_own_match():
  found = reward()
  assert found.at == 'segment'
  assert [v[v != 0].tolist() for v in found.value] == [[1, 1], [1, 1], []]
  assert found.parts['first'].tolist() == [0, 1, 0]
  assert found.parts['last'].tolist() == [1, 1, 0]


def test_golden():
  # First attempts 0 1 0: less the mean of the others -1/2 1 -1/2. Second
  # 1 0 0: 1 -1/2 -1/2. Third 1 1 0: 1/2 1/2 -1. A turn has the sum from its
  # attempt on: of LATE 1, 1.5, .5; of ONCE 1, 0, .5; of NEVER -2, -1.5, -1.
  late, once, never = advantages()
  np.testing.assert_allclose(late, [1, 1, 1.5, 1.5, 0.5, 0.5, 0.5])
  np.testing.assert_allclose(once, [1, 0, 0, 0.5, 0.5], atol=1e-7)
  np.testing.assert_allclose(never, [-2, -1.5, -1.5, -1, -1])


def test_an_attempt_is_compared_with_the_same_attempt_only():
  # Without ONCE the first attempts are 0 0: nothing to learn from them.
  late, once, never = advantages(valid=(True, False, True))
  assert not any(once)
  np.testing.assert_allclose(late, [2, 2, 2, 2, 1, 1, 1])
  np.testing.assert_allclose(never, [-2, -2, -2, -1, -1])


def test_an_attempt_that_was_not_begun_has_earned_nothing():
  # The first of CUT is wrong, and its tokens end: -2 as of NEVER, not -1/2.
  env = attempting(3, max_tokens=100)
  state, _ = scripted.play(env, [says('Bob')], question=QUESTION)
  cut = env.trajectory(state, 2)
  assert cut.end == 'tokens' and cut.meta['attempt'] == [0]
  late, once, own = advantages((LATE, ONCE, cut))
  np.testing.assert_allclose(own, [-2])
  np.testing.assert_allclose(late, advantages()[0])
  np.testing.assert_allclose(once, advantages()[1], atol=1e-7)


def test_its_config():
  c = mr_search.get_config()
  checks.check(c)
  assert c.env.attempts == 3 and c.env.max_contexts == 1
  assert c.env.max_tokens == c.engine.max_len == c.batch.lengths[-1] == 960
  several = mr_search.get_config('contexts=3,note=16')
  checks.check(several)
  assert several.env.max_tokens == 320 and several.env.max_contexts == 3
  with pytest.raises(DataError, match='golden answers'):
    checks.check_data(c, [Question('q', 'who?')])
