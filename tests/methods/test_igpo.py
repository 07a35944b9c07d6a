"""IGPO: likelihoods of the answer, and what the release does to them."""

import asyncio
import dataclasses
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from configs.methods import igpo
from searchrl_jax import checks
from searchrl_jax.data.checks import DataError
from searchrl_jax.learn import advantages
from searchrl_jax.rewards import core, progress
from tests.methods import group as hand
from tests.methods.group import CONTEXT, GROUP

FOUND = (0.1, 0.4, 0.9)  # likelihood with 0, 1, 2 supporting passages read


class Scorer:
  """An engine that is the surer of ' Ann' the more it has read."""

  max_len = 10**6

  def __init__(self, found=FOUND):
    self.asked, self.found = [], found

  async def logps(self, ids):
    text = bytes(ids).decode()
    self.asked.append(text)
    assert text.endswith('<answer> Ann')
    p = self.found[sum(f'text of {i}' in text for i in 'ab')]
    out = np.full(len(ids), -99.0, np.float32)  # outside the answer
    # A mean of log-probs, not of probabilities.
    out[-4:] = np.log(p) + np.array([1.0, -1.0, 0.5, -0.5])
    return out


def rewards(scorer, group=GROUP, arg=''):
  c = igpo.get_config(arg)
  context = dataclasses.replace(
    CONTEXT, tokenizer=hand.ENV.tokenizer, engine=scorer
  )
  return asyncio.run(core.combine(c.reward, [group], context))


def test_golden_gains():
  scorer = Scorer()
  found = rewards(scorer)
  # Right: 0.1, 0.4, 0.9 and the outcome 1; wrong: 0.1, 0.1, 0.4, outcome 0.
  for turns, wanted in zip(
    hand.credits(found), [[0.3, 0.5, 1], [0, 0.3, 0], [0]], strict=True
  ):
    np.testing.assert_allclose(turns, wanted, atol=1e-6)
  # The prompt, which all share, is scored once; then two histories each.
  assert len(scorer.asked) == len({*scorer.asked}) == 5
  [prompt] = [x for x in scorer.asked if 'text of' not in x]
  assert prompt == 'Q: who?\n<answer> Ann'
  assert all('</information>\n<answer> Ann' in x for x in scorer.asked[1:])


def test_golden_advantages():
  found = rewards(Scorer())
  s, masks = hand.arrays()
  tokens = core.at_tokens([GROUP], found)
  kw = igpo.VERSIONS['as_written']['advantage_kw']
  a = advantages.turn_normalised(tokens, [True] * 3, [0] * 3, masks, s, **kw)
  # Turns .3 .5 1, 0 .3 0, 0: mean .3, squared deviations .04 + .49 + 3 x .09 =
  # .8, / 6 = .1333, deviation .3651. z = 0 .5477 1.9170, -.8216 0 -.8216,
  # -.8216; each turn has the sum of its own and later ones.
  for turns, wanted in zip(
    hand.by_turn(s, a),
    [[2.4648, 2.4648, 1.9170], [-1.6432, -0.8216, -0.8216], [-0.8216]],
    strict=True,
  ):
    np.testing.assert_allclose(turns, wanted, atol=2e-4)


def test_golden_as_released():
  # Rewards at tokens 1 and 3 of the first row; the others' are 0. At both
  # positions (x, 0, 0) is (2, -1, -1) / 3 x over a deviation of x / sqrt(3):
  # 1.1547, -.5774, -.5774 whatever x is.
  values = [np.array([0, 0.3, 0, 1.0]), np.zeros(4), np.zeros(2)]
  masks = [np.array(m, bool) for m in ([0, 1, 0, 1], [0, 1, 1, 1], [0, 1])]
  kw = igpo.VERSIONS['as_released']['advantage_kw']
  found = igpo.by_position(values, [True] * 3, [0] * 3, masks, **kw)
  # An observation cuts the first sum; the second runs through.
  np.testing.assert_allclose(found[0], [0, 1.1547, 0, 1.1547], atol=1e-4)
  np.testing.assert_allclose(
    found[1], [0, -1.1547, -0.5774, -0.5774], atol=1e-4
  )
  np.testing.assert_allclose(found[2], [0, -0.5774], atol=1e-4)


def test_as_released_failed_rows_and_other_questions_play_no_part():
  values = [np.array([0, 0.3, 1.0]), np.zeros(3), np.array([0, 5.0, 5.0])]
  masks, kw = [np.array([0, 1, 1], bool)] * 3, dict(eps=0.0, ddof=1)
  pair = igpo.by_position(values[:2], [True] * 2, [0] * 2, masks[:2], **kw)
  for valid, ids in (([1, 1, 0], [0, 0, 0]), ([1, 1, 1], [0, 0, 1])):
    found = igpo.by_position(values, np.array(valid, bool), ids, masks, **kw)
    np.testing.assert_array_equal(found, [*pair, np.zeros(3)])


def test_a_search_that_misleads_costs_and_the_first_answer_counts():
  asked = dataclasses.replace(hand.QUESTION, answers=('Ann', 'Anna'))
  group = tuple(dataclasses.replace(t, question=asked) for t in GROUP)
  found = hand.credits(rewards(Scorer((0.4, 0.1, 0.9)), group), group)
  np.testing.assert_allclose(found[0], [-0.3, 0.8, 1], atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9))
def test_a_longer_thought_changes_no_statistic(longer):
  """As released it does: rows are compared by position, not by turn."""
  base = [hand.play(('w', 'a'), sample=i, answer=x) for i, x in enumerate('AB')]
  other = hand.play(('w' * (1 + longer), 'a'), sample=1, answer='B')

  def turns(group, name):
    fields = igpo.VERSIONS[name]
    s, masks = hand.arrays(group)
    values = hand.outcome(group, [1.0, 0.0])
    for row, x in enumerate((0.5, 0.2)):  # of the first turns, at their end
      first = np.flatnonzero(s.owner == row)[0]
      values[row][np.flatnonzero(s.turns[row] == first)[-1]] = x
    fn = advantages.turn_normalised
    if name == 'as_released':
      found = igpo.by_position(
        values, [True] * 2, [0, 0], masks, **fields['advantage_kw']
      )
    else:
      found = fn(values, [True] * 2, [0, 0], masks, s, **fields['advantage_kw'])
    return [np.unique(np.round(x[m], 5)).tolist() for x, m in zip(found, masks)]

  assert turns(base, 'as_written') == turns([base[0], other], 'as_written')
  assert turns(base, 'as_released') != turns([base[0], other], 'as_released')


def test_a_history_without_room_keeps_the_last_likelihood():
  scorer = Scorer()
  rewards(scorer)
  scorer.max_len = sorted(len(x.encode()) for x in scorer.asked)[1]
  found = hand.credits(rewards(scorer))
  np.testing.assert_allclose(found[1], [0, 0, 0], atol=1e-6)
  scorer.max_len = 3  # not even for the prompt
  assert hand.credits(rewards(scorer))[0] == [0, 0, 1]


def test_a_history_without_room_can_stand_between_others(monkeypatch):
  """Of contexts, a later one can be shorter."""
  texts = '', 'text of a' * 9, 'text of a, text of b'
  scorer, attempt = Scorer(), mock.Mock(question=hand.QUESTION)
  attempt.before = lambda n: np.frombuffer(texts[n].encode(), np.uint8)
  monkeypatch.setattr(progress, 'histories', lambda t: range(3))
  context = dataclasses.replace(
    CONTEXT, tokenizer=hand.ENV.tokenizer, engine=scorer
  )
  scorer.max_len = 60
  [phi] = asyncio.run(igpo.likelihood([attempt], context, frame=''))
  np.testing.assert_allclose(phi, [0.1, 0.1, 0.9], rtol=1e-6)


def test_what_it_needs_and_its_arguments():
  c = igpo.get_config('scale=0.5,version=as_released')
  assert c.reward.progress.scale == 0.5
  checks.check(c)
  checks.check_data(c, [hand.QUESTION])
  bare = dataclasses.replace(hand.QUESTION, answers=())
  with pytest.raises(DataError, match='golden answers'):
    checks.check_data(c, [bare])
  exact = igpo.get_config('oracle=True')
  assert exact.reward.progress.phi == 'supporting'
  bare = dataclasses.replace(hand.QUESTION, supporting=())
  with pytest.raises(DataError, match='supporting.*config.reward.progress'):
    checks.check_data(exact, [bare])
  framed = igpo.get_config('frame=<x><answer>').reward.progress.phi_kw
  assert framed.frame == '<x><answer>'
