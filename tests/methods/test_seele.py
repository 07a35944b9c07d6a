"""SEELE: the curve by hand, which hints follow, and whose tokens they are."""

import asyncio
import dataclasses
import math

import numpy as np
import pytest

from configs.methods import seele
from searchrl_jax import checks, schema
from searchrl_jax.data.checks import DataError
from searchrl_jax.learn import batching, credit
from searchrl_jax.lookup import ConfigError
from searchrl_jax.rollout import chains
from searchrl_jax.text import structure
from searchrl_jax.types import Question
from tests.fakes import FakeEngine, FakeSource, make_env

# Steepness 2 log 3: P is 1/4 and 3/4 at a distance of 1/2 from the middle.
# One is in the middle at x = 0, the other at x = 1/2; nobody guesses.
CURVES = (2 * math.log(3),), (0.0, 0.5), (0.0,)
TRACE = [
  *(['search', 'one'], ['information', '']),
  *(['search', 'two'], ['information', '']),
  ['answer', 'Ann'],
]
ASKED = Question('q', 'who?', ('Ann',), meta={'traces': [TRACE]})
ENV = make_env()


def test_golden_hint():
  # Two turns, x = 0, 1/2: the curves are 1/2, 3/4 and 1/4, 1/2. Two that are
  # wrong without a hint: likelihoods 1/4 and 9/16, so 4/13 and 9/13, and P is
  # 4/13 1/2 + 9/13 1/4 = .327 and .577: the hint is nearer to 1/2.
  assert seele.fitted([0, 0], [0, 0], 2, CURVES) == 1
  # Two that are right: 1/4 and 1/16, so 4/5 and 1/5: P = .45 and .7.
  assert seele.fitted([0, 0], [1, 1], 2, CURVES) == 0
  # One of each is 1/4 and 3/16, 4/7 and 3/7: .393 and .643, so none; that a
  # hint did not help either, x 1/4 and 1/2, is 2/5 and 3/5: .35 and .6.
  assert seele.fitted([0, 0], [0, 1], 2, CURVES) == 0
  assert seele.fitted([0, 0, 1], [0, 1, 0], 2, CURVES) == 1


def test_what_is_hard_gets_more_and_what_is_easy_gets_less():
  assert seele.fitted([], [], 5) == 0
  hard = seele.fitted([0, 0], [0, 0], 5)
  some = seele.fitted([0, 0], [0, 1], 5)
  assert hard > some > seele.fitted([0, 0], [1, 1], 5) == 0
  # A hint that makes all right is shortened, one that does not is kept.
  tried = [0, 0, hard, hard]
  assert seele.fitted(tried, [0, 0, 1, 1], 5) < hard
  assert seele.fitted(tried, [0, 0, 0, 0], 5) == hard
  assert seele.fitted([0] * 4, [0] * 4, 1) == 0  # there is no hint


def play(script, question=ASKED, source=None, **rollout):
  c = schema.base().rollout
  c.sampler, c.group = 'configs.methods.seele.scaffolded', 4
  c.traces, c.hint_rounds, c.max_failed = 'traces', 2, 1.0
  c.update(rollout)
  engine = FakeEngine(script)
  found = asyncio.run(
    chains.rollout(
      [question], env=ENV, engine=engine, source=source or FakeSource(),
      config=c, seed=0, step=5,
    )
  )  # fmt: skip
  assert engine.handles == {}
  return found


def told(history, seed):
  """Is right where the second passage has been read."""
  return f'<answer>{"Ann" if "two" in history else "Bob"}</answer>'


def test_the_policy_goes_on_behind_the_hint():
  source = FakeSource()
  found = play(told, source=source)
  plain, other, *hinted = found.groups[0]
  assert [t.meta['round'] for t in found.groups[0]] == [0, 0, 1, 1]
  assert plain.meta['hint'] == other.meta['hint'] == 0
  assert not plain.foreign and ENV.answer(plain) == 'Bob'
  # The trace is searched for once, and not for what had no hint.
  assert source.asked == [['one'], ['two']] and not plain.searches
  assert (found.stats.traces, found.stats.traces_left_out) == (2, 0)
  for t in hinted:
    assert t.meta['hint'] == 2 and ENV.answer(t) == 'Ann'
    assert [s.request.query for s in t.searches] == ['one', 'two']
    authors = [s.author for s in t.segments]
    read = ['teacher', 'environment']
    assert authors == ['prompt', *read, *read, 'policy']
    # The hint is trained, and only what the policy wrote has log-probs.
    [row] = batching.tokens_of(0, t)
    by = np.repeat(authors, [len(s.ids) for s in t.segments])
    np.testing.assert_array_equal(row.mask, np.isin(by, ['teacher', 'policy']))
    np.testing.assert_array_equal(np.isfinite(row.logps), by == 'policy')
  # They draw from streams of their own.
  assert len({t.segments[-1].logps.tobytes() for t in found.groups[0]}) == 4


def test_a_hint_that_helps_enough_is_not_made_longer():
  assert [t.meta['hint'] for t in play(told, hint_rounds=4).groups[0]] == [
    0, 2, 1, 2,
  ]  # fmt: skip
  easy = play(lambda history, seed: '<answer>Ann</answer>', hint_rounds=4)
  assert not any(t.meta['hint'] or t.foreign for t in easy.groups[0])


def test_what_a_service_failed_is_in_no_fit():
  """Half of the first round fail, the other half is right: no hint."""

  def script(history, seed):
    return '<search>down</search>' if seed % 2 else '<answer>Ann</answer>'

  down = FakeSource(fails=lambda query, attempt: query == 'down')
  group = play(script, source=down, group=16).groups[0]
  assert 0 < sum(t.failed for t in group[:8]) < 8
  assert not any(t.meta['hint'] for t in group)


@pytest.mark.parametrize('lacks', ['service', 'passage'])
def test_without_a_trace_that_can_be_played_there_is_no_hint(lacks):
  fails = lambda query, attempt: lacks == 'service' and query == 'two'
  question = ASKED
  if lacks == 'passage':  # that no search finds
    question = dataclasses.replace(ASKED, supporting=('id-three',))
  found = play(told, question, FakeSource(fails=fails))
  assert not any(t.foreign or t.failed for t in found.groups[0])
  assert (found.stats.traces, found.stats.traces_left_out) == (0, 1)
  bare = dataclasses.replace(ASKED, meta={'traces': []})
  assert not any(t.foreign for t in play(told, bare).groups[0])


def test_the_tokens_of_a_hint_are_imitated_whatever_they_earn():
  logps = np.log([[0.5, 0.25]])
  for advantages in (np.zeros((1, 2)), np.full((1, 2), -3.0)):
    found = seele.imitated(logps, logps - 1, advantages)
    np.testing.assert_array_equal(found, logps)


def test_a_round_can_be_compared_with_itself():
  group = play(told).groups[0]
  earned = [0.0, 1.0, 1.0, 3.0]
  for arg, wanted in (
    # Mean 1.25, deviation sqrt((1.25^2 + 2 x .25^2 + 1.75^2) / 3) = 1.2583.
    ('', [-0.9934, -0.1987, -0.1987, 1.3907]),
    # 0 1: mean 1/2, deviation sqrt(1/2); 1 3: mean 2, deviation sqrt(2).
    ('within=True', [-0.7071, 0.7071, -0.7071, 0.7071]),
  ):
    a = seele.get_config(arg).algorithm
    fn = credit.function(a.advantage)
    extra = {'structure': structure.of(group, batching.masks(group))}
    taken = [extra[name] for name in credit.needs(a.advantage)]
    found = fn(earned, [True] * 4, [0] * 4, *taken, **a.advantage_kw)
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_its_config_and_what_it_needs():
  c = seele.get_config('rounds=2')
  assert c.rollout.hint_rounds == 2 and c.algorithm.loss == 'mixed'
  checks.check(c)
  with pytest.raises(ConfigError, match='hint_rounds=9.*group=8'):
    checks.check(seele.get_config('rounds=9'))
  checks.check(seele.get_config('rounds=8'))
  checks.check(seele.get_config('rounds=4,within=True'))
  with pytest.raises(ConfigError, match="group=8.*equal 'round'"):
    checks.check(seele.get_config('rounds=8,within=True'))
  c.algorithm.drop_zero_variance = True
  with pytest.raises(ConfigError, match='drop_zero_variance.*imitated'):
    checks.check(c)
  with pytest.raises(DataError, match='facts'):
    checks.check_data(c, [Question('q', 'who?', ('Ann',))])
  full = seele.get_config('base=search_r1,model=x')
  with pytest.raises(DataError, match='traces'):
    checks.check_data(full, [Question('q', 'who?', ('Ann',))])
  checks.check_data(full, [ASKED])
  with pytest.raises(DataError, match='golden answers'):
    checks.check_data(full, [dataclasses.replace(ASKED, answers=())])
