"""Co-rewarding-I by hand: whose majority labels whom."""

import asyncio
import dataclasses

from ml_collections import ConfigDict
import numpy as np
import pytest

from configs.methods import co_rewarding
from searchrl_jax import checks
from searchrl_jax.data import core as data
from searchrl_jax.data.checks import DataError
from searchrl_jax.rewards import core
from searchrl_jax.rewards.core import RewardError
from searchrl_jax.types import Question
from searchrl_jax.worlds import atlas
from tests.rewards.test_vote import BOX, ENV, MATH, group


def asked(id, *answers, env=ENV, **kw):
  return group(*answers, id=id, pair=id[0], env=env, **kw)


def crossed(*groups, env=ENV, match='text', max_abstained=0.5):
  c = ConfigDict(co_rewarding.get_config().reward.to_dict())
  c.vote.update(votes=4, train=4, match=match, max_abstained=max_abstained)
  return asyncio.run(core.combine(c, groups, core.RewardContext(env=env)))


FIRST = asked('a', 'Ann', 'Ann', 'Bob', 'Cy')
SECOND = asked('a-b', 'Bob', 'Bob', 'Ann', 'Bob')


def test_golden():
  # The second's majority, Bob, labels the first, and Ann the second; each one's
  # own would pay two and three of them.
  found = crossed(FIRST, SECOND)
  assert found.value.tolist() == [0, 0, 1, 0, 0, 0, 1, 0]
  assert found.valid.all()
  part = lambda name: found.parts[f'vote/{name}'].tolist()
  assert part('label_accuracy') == [0] * 4 + [1] * 4  # golden: Ann
  assert part('majority_ratio') == [0.25] * 8
  assert part('abstained') == [0] * 8


def test_the_order_of_questions_does_not_matter():
  other = asked('c', *['Cy'] * 4), asked('c-b', 'Cy', 'Ann', 'Cy', None)
  for groups in ((FIRST, SECOND, *other), (SECOND, other[0], FIRST, other[1])):
    found = crossed(*groups)
    paid = dict(
      zip((g[0].question.id for g in groups), np.split(found.value, 4))
    )
    wanted = {'a': 'ooxo', 'a-b': 'ooxo', 'c': 'xxxx', 'c-b': 'xoxo'}
    assert {
      name: ''.join('ox'[int(x)] for x in row) for name, row in paid.items()
    } == wanted


def test_without_a_majority_a_question_is_left_out():
  """As released, the empty answer is its label, which no answer equals."""
  silent = asked('a-b', None, None, None, None)
  found = crossed(FIRST, silent)
  assert found.valid.tolist() == [False] * 4 + [True] * 4
  assert not found.value.any()  # the silent have no answer
  assert found.parts['vote/abstained'].tolist() == [1] * 4 + [0] * 4
  with pytest.raises(RewardError, match="1 of 2 questions.*'a-b'"):
    crossed(FIRST, silent, max_abstained=0.4)


def test_lost_votes_that_could_change_a_majority_leave_it_out():
  lost = lambda group, n: tuple(
    dataclasses.replace(t, end='failed') if i < n else t
    for i, t in enumerate(group)
  )
  close = asked('a-b', 'Cy', 'Bob', 'Bob', 'Ann')  # one vote ahead, one lost
  found = crossed(FIRST, lost(close, 1))
  assert not found.valid.any()
  clear = lost(asked('a-b', 'Cy', *['Bob'] * 3), 1)
  found = crossed(asked('a', *['Ann'] * 3, 'Bob'), clear)
  assert found.valid.tolist() == [True] * 4 + [False] + [True] * 3
  assert found.value.tolist() == [0, 0, 0, 1, 0, 0, 0, 0]


def test_equal_answers_of_other_forms_are_one():
  pair = (
    asked('a', '1/2', '1/2', '7', '7', env=BOX, golds=()),
    asked('a-b', '0.5', '0.5', '0.5', '7', env=BOX, golds=()),
  )
  found = crossed(*pair, env=BOX, match=MATH)
  assert found.value.tolist() == [1, 1, 0, 0, 1, 1, 1, 0]


def test_a_question_alone_is_refused():
  with pytest.raises(RewardError, match="'a'.*side by side"):
    crossed(FIRST)
  with pytest.raises(DataError, match=r"meta\['pair'\].*reward.vote"):
    checks.check_data(co_rewarding.get_config(), [Question('q', 'w', ('x',))])


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'data.shuffle': True}, 'data.shuffle=True.*use False'),
    ({'rollout.questions': 15}, 'rollout.questions=15.*even'),
    ({'rollout.group': 1}, 'votes=1'),
    ({'rollout.refill': 1}, 'refill=1'),
  ],
)
def test_what_is_refused(fields, message):
  c = co_rewarding.get_config()
  c.update_from_flattened_dict(fields)
  with pytest.raises(RewardError, match=message):
    checks.check_data(c, ())


@pytest.mark.parametrize('labels', ['votes', 'golden'])
def test_both_wordings_are_in_one_step(labels):
  c = co_rewarding.get_config(f'labels={labels}')
  assert [*c.reward] == [{'votes': 'vote', 'golden': 'em'}[labels]]
  c.data.world.update(train=60, heldout=40)
  c.data.eval.atlas.n = 0
  assert c.sft.data.reworded == 0.5
  stream = data.open_stream(c.data, seed=0)
  checks.check_data(c, stream.questions)
  for _ in range(3):
    step = stream.next(c.rollout.questions)
    for one, other in zip(step[::2], step[1::2], strict=True):
      assert one.meta['pair'] == other.meta['pair'] == one.id != other.id
      assert one.text != other.text and one.answers == other.answers
  # Evaluations ask as before.
  sets = data.load_sets(c.data.eval, c.data)['atlas']
  assert not any('pair' in q.meta for q in sets)


def test_the_other_wording_by_hand():
  say = lambda *path, parallel=False: (
    atlas.reworded(
      Question('q', 'x', meta={'path': path, 'parallel': parallel})
    ).text
  )
  assert say('Mira Dok', 'teacher', 'home') == (
    'What is the home of the teacher of Mira Dok?'
  )
  assert say('Mira Dok', 'Kova Len', parallel=True) == (
    'What town did Kova Len and Mira Dok both visit?'
  )
