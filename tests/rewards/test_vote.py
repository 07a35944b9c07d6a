"""Majority votes as rewards, and each mistake of TTRL's release."""

import asyncio
import dataclasses

from ml_collections import ConfigDict
import numpy as np
import pytest

from searchrl_jax import schema
from searchrl_jax.rewards import core, vote
from searchrl_jax.types import Question, SearchRequest, SearchResult
from tests.fakes import make_env, run_script

MATH = 'experiments.ttrl.mathematics.equal'
ENV = make_env()
BOX = make_env(answer='boxed', max_turns=0)


def group(*answers, golds=('Ann',), env=ENV, id='q', **meta):
  question = Question(id, 'who?', golds, meta=meta)
  out = []
  for i, answer in enumerate(answers):
    text = (
      'none'
      if answer is None
      else (
        f'\\boxed{{{answer}}}' if env is BOX else f'<answer>{answer}</answer>'
      )
    )
    turns = [text] * (env.config.max_turns + 1)
    t = run_script(turns, env=env, question=question)
    out.append(dataclasses.replace(t, sample=i))
  return tuple(out)


def voted(
  *groups,
  env=ENV,
  train=None,
  match='text',
  max_abstained=0.5,
  fn='vote.majority',
):
  n = len(groups[0])
  config = ConfigDict(
    dict(
      v=dict(
        fn=fn,
        weight=1.0,
        votes=n,
        train=train or n,
        match=match,
        max_abstained=max_abstained,
      )
    )
  )
  return asyncio.run(core.combine(config, groups, core.RewardContext(env=env)))


def part(found, name):
  return found.parts[f'v/{name}'].tolist()


def test_golden_votes():
  # 3 of 5 say Bob, by normal form; Ann is right: 2 of 5.
  found = voted(group('Bob', 'Ann', 'the bob!', 'bob', 'ann'), train=3)
  assert found.value.tolist() == [1, 0, 1, 0, 0]  # the invalid are 0
  assert found.valid.tolist() == [True, True, True, False, False]
  assert part(found, 'majority_ratio') == pytest.approx([3 / 5] * 5)
  assert part(found, 'label_accuracy') == [0] * 5
  assert part(found, 'right') == [0, 1, 0, 0, 1]
  assert part(found, 'maj@5') == [0] * 5
  assert part(found, 'pass@5') == [1] * 5
  # 1 - C(3, 3) / C(5, 3)
  assert part(found, 'pass@3') == pytest.approx([9 / 10] * 5)
  # Of the trained: Bob 1 is right 0; Ann 0 is right 1; Bob again. None agree.
  np.testing.assert_array_equal(
    found.parts['v/reward_accuracy'], [0, 0, 0, np.nan, np.nan]
  )
  assert part(found, 'tie') == part(found, 'abstained') == [0] * 5


def test_golden_signs_without_golden_answers():
  start = {'label': 'ann', 'share': 0.3, 'searches': 2.5}
  with_start = group('Bob', 'Ann', 'bob', None, start_votes=start)
  without = group('Cy', 'Cy', 'Cy', 'Cy', id='p')
  # Searches of the first group: 1, 3, 2 and 0.
  made = [searches(n) for n in (1, 3, 2, 0)]
  with_start = tuple(
    dataclasses.replace(t, searches=s) for t, s in zip(with_start, made)
  )
  found = voted(with_start, without)
  nan = [np.nan] * 4
  want = {
    'distinct': [2] * 4 + [1] * 4,
    'agreement': [2 / 4] * 4 + [1] * 4,
    'voting': [1, 1, 1, 0] + [1] * 4,
    # Bob (1 + 2) / 2, the others (3 + 0) / 2; of one answer there are none.
    'ahead': [0] * 4 + nan,
    'gained': [0.5 - 0.3] * 4 + nan,
    'lost': [2.5 - 6 / 4] * 4 + nan,
    'flipped': [1] * 4 + nan,
  }
  for name, column in want.items():
    np.testing.assert_allclose(found.parts[f'v/{name}'], column, rtol=1e-6)
  same = group('Bob', 'ann', 'Ann', None, start_votes=start)
  assert part(voted(same), 'flipped') == [0] * 4
  silent = group(None, None, start_votes={**start, 'label': None})
  found = voted(silent, group('x', 'x', id='p'))
  assert part(found, 'lost')[:2] == [2.5] * 2
  assert 'v/flipped' not in found.parts


def searches(n):
  request = SearchRequest('who', 1)
  return tuple(SearchResult(request, ()) for _ in range(n))


def test_a_tie_goes_to_the_earliest_vote_and_is_counted():
  found = voted(group('Bob', 'Ann', 'Bob', 'Ann'))
  assert found.value.tolist() == [1, 0, 1, 0]
  assert part(found, 'tie') == [1] * 4
  assert part(found, 'maj@4') == [0.5] * 4


def test_no_answer_is_no_vote():
  """There, the empty string won and unparsed samples rewarded each other."""
  found = voted(group(None, '', None, 'Ann'))
  assert found.value.tolist() == [0, 0, 0, 1] and found.valid.all()
  assert part(found, 'majority_ratio') == [1 / 4] * 4


def test_a_question_without_a_vote_is_left_out_and_counted():
  found = voted(group(None, ''), group('x', 'x', id='p'))
  assert found.valid.tolist() == [False, False, True, True]
  assert part(found, 'abstained') == [1, 1, 0, 0]
  np.testing.assert_array_equal(
    found.parts['v/label_accuracy'], [np.nan, np.nan, 0, 0]
  )
  assert part(found, 'right') == [0] * 4


def test_votes_count_what_answers_mean():
  """There 0.5 and 1/2 split, and 3 would have won."""
  group_ = group(
    '3', '0.5', r'\frac12', '1/2', '3', golds=(r'\frac{2}{4}',), env=BOX
  )
  found = voted(group_, env=BOX, match=MATH)
  assert found.value.tolist() == [0, 1, 1, 1, 0]
  assert part(found, 'label_accuracy') == part(found, 'maj@5') == [1] * 5
  assert voted(group_, env=BOX).value.tolist() == [1, 0, 0, 0, 1]  # as text


def test_a_fraction_is_a_label_as_it_stands():
  """There the label was extracted again, and 14/3 became 3."""
  found = voted(
    group(r'\frac{14}{3}', r'\frac{14}{3}', '3', golds=('3',), env=BOX),
    env=BOX,
    match=MATH,
  )
  assert part(found, 'label_accuracy') == [0] * 3
  assert part(found, 'reward_accuracy') == [0] * 3


@pytest.mark.parametrize('match', ['text', MATH])
def test_the_article_is_no_choice(match):
  """There "a" in the last sentence was GPQA's A."""
  question = Question('q', 'Which?', ('B',))
  texts = (
    r'So \boxed{B} is a good choice',
    r'\boxed{B}. It is a fact.',
    'It is a fact, a clear one',
  )
  found = voted(
    tuple(
      dataclasses.replace(
        run_script([text], env=BOX, question=question), sample=i
      )
      for i, text in enumerate(texts)
    ),
    env=BOX,
    match=match,
  )
  assert found.value.tolist() == [1, 1, 0]
  assert part(found, 'label_accuracy') == [1] * 3


def test_each_reward_is_the_trajectorys_own():
  """There, all stood at the last sample's length: lost to PPO."""
  trajectories = group('Bob', 'Bob with many words behind', 'Bob')
  found = voted(trajectories)
  assert found.at == 'trajectory' and found.value.tolist() == [1, 0, 1]
  for tokens, value in zip(
    core.at_tokens([trajectories], found), found.value, strict=True
  ):
    assert tokens.sum() == tokens[-1] == value  # where its own answer ends


def test_golds_reach_the_metrics_alone():
  answers = ('Bob', 'Ann', 'Bob', None)
  found = [
    voted(group(*answers, golds=golds), train=3)
    for golds in (('Ann',), ('Bob',), ('Cy', 'Ann', 'Bob'), ())
  ]
  for other in found[1:]:
    np.testing.assert_array_equal(found[0].value, other.value)
    np.testing.assert_array_equal(found[0].valid, other.valid)
  assert part(found[0], 'label_accuracy') != part(found[1], 'label_accuracy')
  assert 'v/label_accuracy' not in found[3].parts
  assert 'v/majority_ratio' in found[3].parts


def test_a_failed_search_is_no_vote():
  first, *rest = group('Bob', 'Bob', 'Ann', 'Ann', None)
  failed = dataclasses.replace(first, end='failed')
  found = voted((failed, *rest), train=3)
  # Ann leads by 2 to 1, which the failed one could have made a tie.
  assert not found.valid.any() and not found.value.any()
  assert np.isnan(found.parts['v/abstained'][0])
  assert part(found, 'abstained')[1:] == [1] * 4
  first, *rest = group('Bob', 'Bob', 'Ann', 'Ann', 'Ann')
  failed = dataclasses.replace(first, end='failed')
  found = voted((failed, *rest), train=3)
  assert found.value.tolist() == [0, 0, 1, 0, 0]  # Ann by 3 to 1
  assert found.valid.tolist() == [False, True, True, False, False]
  assert part(found, 'majority_ratio')[1:] == pytest.approx([3 / 5] * 4)
  assert 'v/maj@5' not in found.parts  # of 5 samples
  gone = tuple(dataclasses.replace(t, end='failed') for t in rest)
  assert not voted(gone, group(*'xxxx')).valid[:4].any()


def test_the_last_one_alive_is_no_majority():
  one, *rest = group('Bob', 'Ann', 'Ann', 'Ann')
  failed = [dataclasses.replace(t, end='failed') for t in rest]
  assert not voted((one, *failed)).valid.any()


def test_further_rounds_are_refused():
  c = schema.base()
  c.rollout.update(group=4, refill=2)
  with pytest.raises(core.RewardError, match='rollout.refill=2'):
    vote.check(c, dict(votes=4, train=2, match='text'))


@pytest.mark.parametrize(
  'sampler',
  [
    *('revise', 'traces', 'searchrl_jax.rollout.traces.sample'),
    'configs.methods.seele.scaffolded',
  ],
)
def test_verdicts_and_traces_are_no_votes(sampler):
  c = schema.base()
  c.rollout.update(group=4, sampler=sampler)
  with pytest.raises(core.RewardError, match=f'sampler={sampler!r}'):
    vote.check(c, dict(votes=4, train=2, match='text'))


def test_an_answer_type_that_nothing_parses_stops_with_the_fix():
  silent = [group('half of 4', '1 2 3', env=BOX, id=str(i)) for i in range(3)]
  sums = group('5', '5', env=BOX)
  with pytest.raises(
    core.RewardError,
    match=(
      r"3 of 4 .*match='experiments\.ttrl\.mathe.*"
      r"\('0', '1', '2', .*"
      r'max_abstained=0\.5.*config\.env\.answer'
    ),
  ):
    voted(*silent, sums, env=BOX, match=MATH)
  assert voted(*silent[:1], sums, env=BOX, match=MATH).valid.sum() == 2


def test_a_group_of_another_size_is_refused():
  with pytest.raises(core.RewardError, match='2 samples.*votes=3'):
    voted(group('a', 'b', 'c'), group('a', 'b'))


@pytest.mark.parametrize(
  'fields, says',
  [
    (dict(votes=1), r'votes=1.*config\.rollout\.group=1'),
    (dict(votes=4, group=8), r'votes=4.*config\.rollout\.group=8'),
    (dict(votes=4, train=5), 'train=5.*votes=4'),
    (dict(votes=4, train=0), 'train=0'),
    (dict(votes=4, match='math'), r"config\.reward\.v: match='math'"),
  ],
)
def test_what_cannot_be_is_found_at_the_start(fields, says):
  c = schema.base()
  c.rollout.group = fields.pop('group', fields['votes'])
  c.reward.v = ConfigDict(
    dict(
      fn='vote.majority', weight=1.0, train=1, match='text', max_abstained=0.5
    )
    | fields
  )
  with pytest.raises(core.RewardError, match=says):
    core.check(c, [Question('q', 'who?')])
  c.rollout.group = 4
  c.reward.v.update(votes=4, train=2, match='text')
  core.check(c, [Question('q', 'who?')])  # no golds needed


def test_a_single_greedy_answer_has_no_majority():
  c = schema.base()
  c.rollout.group = 4
  term = dict(votes=4, train=2, match='text', max_abstained=0.5)
  c.reward.v = ConfigDict(dict(fn='vote.majority', weight=1.0) | term)
  core.check(c)
  c.algorithm.advantage = 'remax'
  with pytest.raises(core.RewardError, match='config.algorithm.advantage'):
    core.check(c)


def test_aliases_of_the_golden_answer_are_votes_of_their_own():
  """FlashRAG's metadata may hold them under such names."""
  found = voted(
    group(
      'NYC',
      'New York City',
      'Rome',
      'Rome',
      golds=('NYC', 'New York City'),
      aliases=[['NYC', 'New York City']],
      answer_aliases=['NYC'],
    )
  )
  assert found.value.tolist() == [0, 0, 1, 1]
