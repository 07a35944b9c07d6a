"""Votes that need evidence, and RESTRAIN: golden values and refusals."""

import asyncio
import dataclasses
import math

from hypothesis import given, settings
from hypothesis import strategies as st
from ml_collections import ConfigDict
import numpy as np
import pytest

from searchrl_jax import schema
from searchrl_jax.data.checks import DataError
from searchrl_jax.learn import advantages
from searchrl_jax.rewards import core
from searchrl_jax.types import Question
from tests.methods import group as hand

START = {'label': 'bob', 'share': 0.8, 'searches': 2.0}
QUESTION = Question('q', 'b y', ('b',), meta={'start_votes': START})
RESTRAIN = dict(centre=1.0, sigma=0.5, least=2, penalty=1.0)
COVER = 'tests.rewards.test_guarded.cover'


def cover(text, passages):
  """The share of a question's words that are ids of passages."""
  if text == 'odd':
    return None
  asked = {*text.split()}
  return len(asked & {p.id for p in passages}) / len(asked)


def voted(fn, *trajectories, train=None, question=QUESTION, **fields):
  n = len(trajectories)
  fields |= dict(fn=f'guarded.{fn}', weight=1.0, votes=n, train=train or n)
  fields |= dict(match='text', max_abstained=1.0)
  group = tuple(
    dataclasses.replace(t, sample=i, question=question)
    for i, t in enumerate(trajectories)
  )
  config = ConfigDict(dict(v=fields))
  return asyncio.run(core.combine(config, [group], hand.CONTEXT))


def part(found, name):
  return found.parts[f'v/{name}'].tolist()


def said(*answers):
  return [hand.play(answer=answer) for answer in answers]


# ---- Evidence.


def test_golden_only_what_stands_in_an_observation_votes():
  # Three say z, which no passage states ("text of x", "text of zz"). b stands
  # in what the first found, and not in what the second did.
  group = (
    hand.play(('who', 'bx'), answer='b'),
    hand.play(('who', 'xy'), answer='b'),
    hand.play(('who', ('x', 'zz')), answer='z'),
    *said('z', 'z', None),
  )
  found = voted('found', *group)
  assert found.value.tolist() == [1, 0, 0, 0, 0, 0] and found.valid.all()
  assert part(found, 'voting') == [1, 0, 0, 0, 0, 0]
  assert part(found, 'majority_ratio') == pytest.approx([1 / 6] * 6)
  assert part(found, 'agreement') == [3 / 6] * 6
  assert part(found, 'distinct') == [2] * 6
  assert part(found, 'label_accuracy') == [1] * 6
  # One search, against 1, 1, 0, 0 and 0 of the others.
  assert part(found, 'ahead') == pytest.approx([1 - 2 / 5] * 6)


def test_without_evidence_a_question_is_left_out_and_counted():
  found = voted('found', *said('z', 'z', 'b'))
  assert not found.valid.any() and not found.value.any()
  assert (
    part(found, 'abstained') == [1] * 3 and part(found, 'silent') == [0] * 3
  )
  assert part(found, 'voting') == [0] * 3
  assert 'v/label_accuracy' not in found.parts


def test_golden_only_who_covers_the_question_votes():
  # The question is "b y". An early stop found b alone, and three agree on it.
  early = hand.play(('who', 'bx'), answer='b')
  whole = hand.play(('who', 'bx'), ('where', 'y'), answer='y')
  found = voted('covered', early, early, early, whole, cover=COVER)
  assert found.value.tolist() == [0, 0, 0, 1] and found.valid.all()
  assert part(found, 'voting') == [0, 0, 0, 1]
  assert part(found, 'agreement') == [3 / 4] * 4
  # Who agrees with the label without its evidence earns nothing.
  guess = hand.play(answer='y')
  found = voted('covered', early, guess, whole, cover=COVER)
  assert found.value.tolist() == [0, 0, 1]
  # Unanimous early stops teach nothing, where a plain vote would pay them all.
  found = voted('covered', early, early, early, cover=COVER)
  assert not found.valid.any() and part(found, 'abstained') == [1] * 3


def test_coverage_sees_the_question_and_the_passages_alone():
  early = hand.play(('who', 'bx'), answer='b')
  whole = hand.play(('who', 'by'), answer='y')
  meta = {'path': ('q', 'r'), 'facts': (('q', 'r', 'z'),)}
  others = (
    Question('q', 'b y', ('y',), supporting=('b', 'y')),
    Question('q', 'b y', (), 'source', 4, ('x',), meta=meta),
  )
  for fn, fields in (('covered', dict(cover=COVER)), ('found', {})):
    want = voted(fn, early, early, whole, **fields)
    for question in others:
      got = voted(fn, early, early, whole, question=question, **fields)
      np.testing.assert_array_equal(got.value, want.value)
      np.testing.assert_array_equal(got.valid, want.valid)


def test_a_question_that_cannot_be_read_is_named():
  odd = Question('q7', 'odd', ())
  with pytest.raises(core.RewardError, match="'q7'.*cover.*'odd'"):
    voted('covered', *said('a', 'b'), question=odd, cover=COVER)


def test_a_failed_search_is_no_vote_and_may_leave_no_label():
  whole = hand.play(('who', 'by'), answer='y')
  other = hand.play(('who', 'by'), answer='b')
  failed = dataclasses.replace(whole, end='failed')
  # 2 to 1 of those alive; the failed one could have made it a tie.
  found = voted('covered', whole, whole, other, failed, cover=COVER)
  assert not found.valid.any() and part(found, 'abstained')[:3] == [1] * 3
  found = voted('covered', whole, whole, whole, failed, cover=COVER)
  assert found.value.tolist() == [1, 1, 1, 0]
  assert found.valid.tolist() == [True, True, True, False]


# ---- RESTRAIN.


def test_golden_restrain():
  # Shares of six samples: Bob 3/6, Ann 2/6; one has no answer.
  # g(1/2) = exp(-(1/2)^2 / (2/4)) = exp(-1/2); g(1/3) = exp(-(2/3)^2 / (2/4)).
  bob, ann = math.exp(-1 / 2), math.exp(-8 / 9)
  bob, ann = bob / (bob + ann), ann / (bob + ann)
  # Of the first four, Bob Bob Ann Bob. For Bob 1 1 0 1: mean 3/4, variance
  # (3 / 16 + 9 / 16) / 3 = 1/4, so 1/2 1/2 -3/2 1/2; for Ann the negative.
  want = (bob - ann) * np.array([0.5, 0.5, -1.5, 0.5])
  # The start agreed on 0.8: g = exp(-0.2^2 / (2/4)) = exp(-0.08).
  group = said('Bob', 'Bob', 'Ann', 'Bob', 'Ann', None)
  found = voted('restrain', *group, train=4, **RESTRAIN)
  np.testing.assert_allclose(found.value[:4], math.exp(-0.08) * want, rtol=1e-5)
  assert found.valid.tolist() == [True] * 4 + [False] * 2
  assert found.value[4:].tolist() == [0, 0]
  # Its metrics are those of the majority.
  assert part(found, 'majority_ratio') == [1 / 2] * 6
  assert part(found, 'flipped') == [0] * 6  # the start's label is bob, too
  assert part(found, 'gained') == pytest.approx([0.5 - 0.8] * 6)
  assert part(found, 'lost') == [2.0] * 6  # it made 2 searches, these none


def test_golden_few_votes_are_a_penalty():
  group = said('Bob', 'Bob', 'Ann', 'Cy', None)
  fields = RESTRAIN | dict(least=3, penalty=0.5)
  found = voted('restrain', *group, train=3, **fields)
  want = [-0.5 * math.exp(-0.08)] * 3 + [0, 0]
  np.testing.assert_allclose(found.value, want, rtol=1e-6)
  assert not voted('restrain', *said(None, None), **RESTRAIN).valid.any()


def test_the_last_one_alive_has_no_advantage():
  first, *rest = said('Bob', 'Bob', 'Bob', 'Ann', 'Bob')
  failed = dataclasses.replace(first, end='failed')
  found = voted('restrain', failed, *rest, train=2, **RESTRAIN)
  assert found.valid.tolist() == [False, True, False, False, False]
  assert found.value.tolist() == [0] * 5


def test_a_small_sigma_is_the_majoritys_grpo():
  group = said('Bob', 'Bob', 'Ann', 'Bob', 'Ann', 'Cy')
  agreed = QUESTION.meta['start_votes'] | {'share': 1.0}  # u = 1
  question = dataclasses.replace(QUESTION, meta={'start_votes': agreed})
  fields = RESTRAIN | dict(sigma=1e-3)
  found = voted('restrain', *group, question=question, **fields)
  r, ok = np.array([1.0, 1, 0, 1, 0, 0]), np.ones(6, bool)
  want = advantages.grpo(r, ok, np.zeros(6, int))
  np.testing.assert_allclose(found.value, want, rtol=1e-5)


@settings(max_examples=30)
@given(st.lists(st.sampled_from('ABC'), min_size=3, max_size=6), st.randoms())
def test_properties_of_restrain(answers, random):
  group = said(*(f'x{a}' for a in answers))
  order = list(range(len(answers)))
  random.shuffle(order)
  found = voted('restrain', *group, **(RESTRAIN | dict(least=1)))
  # An advantage: it adds up to 0, and unanimous votes teach nothing.
  assert abs(found.value.sum()) < 1e-4
  if len({*answers}) == 1:
    assert not found.value.any()
  again = [group[i] for i in order]
  other = voted('restrain', *again, **(RESTRAIN | dict(least=1)))
  np.testing.assert_allclose(other.value, found.value[order], atol=1e-6)
  # Golden answers reach no reward.
  changed = dataclasses.replace(QUESTION, answers=('xA',))
  other = voted(
    'restrain', *group, question=changed, **(RESTRAIN | dict(least=1))
  )
  np.testing.assert_array_equal(other.value, found.value)


# ---- Refusals.


def config(fn, **fields):
  c = schema.base()
  c.rollout.group = 4
  own = dict(restrain=RESTRAIN, covered=dict(cover=COVER)).get(fn, {})
  term = dict(fn=f'guarded.{fn}', weight=1.0, votes=4, train=2, match='text')
  c.reward.v = ConfigDict(term | own | dict(max_abstained=0.5) | fields)
  if fn == 'restrain':
    c.algorithm.advantage = 'given'
  return c


@pytest.mark.parametrize('fn', ['found', 'covered', 'restrain'])
def test_what_they_need_is_found_at_the_start(fn):
  core.check(config(fn), [QUESTION])
  c = config(fn)
  c.algorithm.advantage = 'remax'
  with pytest.raises(core.RewardError):
    core.check(c, [QUESTION])
  with pytest.raises(core.RewardError, match='train=5'):
    core.check(config(fn, train=5), [QUESTION])


@pytest.mark.parametrize('fn', ['found', 'covered'])
@pytest.mark.parametrize(
  'fields', [{'max_turns': 0}, {'information': 'policy'}]
)
def test_evidence_needs_a_source(fn, fields):
  c = config(fn)
  c.env.update(fields)
  with pytest.raises(core.RewardError, match='env.information=.*max_turns='):
    core.check(c, [QUESTION])


def test_restrain_needs_the_votes_of_the_start():
  with pytest.raises(
    DataError, match="'p' has no meta.'start_votes'.*reward.v"
  ):
    core.check(config('restrain'), [QUESTION, Question('p', 'who')])


@pytest.mark.parametrize(
  'fields, says',
  [
    (dict(train=1), 'train=1'),
    (dict(centre=1.5), 'centre=1.5'),
    (dict(sigma=0.0), 'sigma=0.0'),
    (dict(least=5), 'least=5'),
    (dict(penalty=-1.0), 'penalty=-1.0'),
  ],
)
def test_fields_out_of_range_are_named(fields, says):
  with pytest.raises(core.RewardError, match=says):
    core.check(config('restrain', **fields), [QUESTION])


def test_restrain_is_an_advantage_already():
  c = config('restrain')
  c.algorithm.advantage = 'grpo'
  with pytest.raises(core.RewardError, match="advantage='grpo'.*'given'"):
    core.check(c, [QUESTION])


def test_a_function_that_is_not_there_is_named():
  with pytest.raises(core.RewardError, match='covers'):
    core.check(config('covered', cover='tests.rewards.covers'), [QUESTION])
