"""SCoRe by hand: what each attempt is paid for in either stage."""

import asyncio
import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from configs.methods import mr_search, score
from searchrl_jax import checks
from searchrl_jax.data.checks import DataError
from searchrl_jax.learn import batching
from searchrl_jax.lookup import ConfigError
from searchrl_jax.rewards import answer, core
from searchrl_jax.text import structure
from searchrl_jax.types import Question
from tests import scripted
from tests.methods.group import QUESTION, attempting, by_turn

ENV = attempting(2)
KW = dict(alpha=10.0, strong=0.5, weak=0.1)


def attempt(*answers, sample=0, version=0, search=False):
  """Answers, reflects and answers; `version`: of the weights."""
  first, *again = [f'<answer>{text}</answer>' for text in answers]
  turns = ['<search>x</search>'] * search + [first]
  for text in again:
    turns += ['<refine>no</refine>', text]
  state, _ = scripted.play(ENV, turns, question=QUESTION)
  t = ENV.trajectory(state, sample)
  with_version = lambda s: s.versions is not None and s.versions * 0 + version
  segments = (
    s
    if s.versions is None
    else dataclasses.replace(s, versions=with_version(s))
    for s in t.segments
  )
  return dataclasses.replace(t, segments=tuple(segments))


def group(version=0):
  """Corrects itself, after a search; stays right; undoes; is never right."""
  said = ('Bob', 'Ann'), ('Ann', 'Ann'), ('Ann', 'Bob'), ('Bob', 'Bo')
  return tuple(
    attempt(*pair, sample=i, version=version, search=i == 0)
    for i, pair in enumerate(said)
  )


def advantages(trajectories, first, delta=0.0, valid=None, ids=None, kw=KW):
  n = len(trajectories)
  masks = batching.masks(trajectories)
  s = structure.of(trajectories, masks)
  context = core.RewardContext(env=ENV)
  earned = asyncio.run(answer.each_attempt([trajectories], context))
  found = score.corrected(
    core.at_tokens([trajectories], earned), valid or [True] * n, ids or [0] * n,
    masks, [mask * delta for mask in masks], s, first=first, **kw,
  )  # fmt: skip
  return by_turn(s, found)


def test_golden_values_of_the_first_stage():
  # r2 is 1 1 0 0, and less the mean of the others: 1 - 1/3, and 0 - 2/3. Both
  # attempts have it; the reflection is of the second.
  corrects, stays, undoes, never = advantages(group(), first=1)
  np.testing.assert_allclose(corrects, [2 / 3] * 4, rtol=1e-6)
  np.testing.assert_allclose(stays, [2 / 3] * 3, rtol=1e-6)
  np.testing.assert_allclose(undoes, [-2 / 3] * 3, rtol=1e-6)
  np.testing.assert_allclose(never, [-2 / 3] * 3, rtol=1e-6)


def test_golden_values_of_the_second_stage():
  # First attempts r1 + r2: 1 2 1 0, whose others have the means 1, 2/3, 1, 4/3.
  # Second ones r2 + 10 (r2 - r1): 11 1 -10 0; -3, 1/3, 4, 2/3.
  corrects, stays, undoes, never = advantages(group(1), first=1)
  np.testing.assert_allclose(corrects, [0, 0, 14, 14], rtol=1e-6)
  np.testing.assert_allclose(stays, [4 / 3, 2 / 3, 2 / 3], rtol=1e-6)
  np.testing.assert_allclose(undoes, [0, -14, -14], rtol=1e-6)
  np.testing.assert_allclose(never, [-4 / 3, -2 / 3, -2 / 3], rtol=1e-6)


def test_golden_values_of_the_pull_to_the_first_policy():
  # log T - log S = -.2 of each token: -.1 in first attempts of stage 1, with
  # beta .5, and -.02 elsewhere, with .1.
  for version, first_attempt in ((0, -0.1), (1, -0.02)):
    plain = advantages(group(version), first=1)
    held = advantages(group(version), first=1, delta=-0.2)
    for a, b in zip(plain, held, strict=True):
      n = len(a) - 2  # turns of the first attempt
      moved = np.subtract(b, a)
      np.testing.assert_allclose(moved[:n], first_attempt, rtol=1e-4)
      np.testing.assert_allclose(moved[n:], -0.02, rtol=1e-4)


def test_what_failed_is_in_no_mean_and_has_no_pull():
  valid = [True, True, False, False]
  found = advantages(group(1), first=1, delta=-0.2, valid=valid)
  assert not any(found[2] + found[3])
  # r1 + r2: 1 2; r2 + 10 (r2 - r1): 11 1.
  np.testing.assert_allclose(found[0], [-1.02, -1.02, 9.98, 9.98], rtol=1e-5)
  np.testing.assert_allclose(found[1], [0.98, -10.02, -10.02], rtol=1e-5)


def test_trajectories_of_two_stages_are_not_compared():
  """With rollouts ahead of the update, a step can have both."""
  mixed = (*group(0), *group(1))
  found = advantages(mixed, first=1)
  assert found == [
    *advantages(group(0), first=1),
    *advantages(group(1), first=1),
  ]


def test_who_has_no_second_attempt_is_no_baseline_of_those():
  state, _ = scripted.play(ENV, ['no'] * 3, question=QUESTION)
  idle = dataclasses.replace(ENV.trajectory(state, 2))
  pair = attempt('Ann', 'Ann'), attempt('Bob', 'Bo', sample=1)
  stays, never, none = advantages((*pair, idle), first=0)
  # First attempts 2 0 0; second ones 1 0.
  np.testing.assert_allclose(stays, [2, 1, 1], rtol=1e-6)
  np.testing.assert_allclose(never, [-1, -1, -1], rtol=1e-6)
  np.testing.assert_allclose(none, [-1] * len(none), rtol=1e-6)


@settings(max_examples=20, deadline=None)
@given(
  st.lists(st.sampled_from('ab'), min_size=2, max_size=2), st.floats(2, 20)
)
def test_a_first_attempt_is_never_paid_for_being_wrong(others, alpha):
  """As it is where all tokens have the sum of what is earned."""
  known = {'a': ('Ann', 'Bob'), 'b': ('Bob', 'Ann')}
  rest = [attempt(*known[x], sample=2 + i) for i, x in enumerate(others)]
  kw = KW | dict(alpha=alpha)
  for last in ('Ann', 'Bob'):
    pair = attempt('Ann', last), attempt('Bob', last, sample=1)
    right, wrong, *_ = advantages((*pair, *rest), first=0, kw=kw)
    assert right[0] > wrong[0]
    # The sum: (1 + alpha) r2 + (1 - alpha) r1.
    r1, r2 = np.array([1.0, 0.0]), float(last == 'Ann')
    right, wrong = r1 + r2 + alpha * (r2 - r1)
    assert right < wrong


def test_its_config_and_what_it_needs():
  c = score.get_config()
  checks.check(c)
  assert c.algorithm.advantage_kw.first == c.train.steps // 2
  assert c.env.attempts == 2 and c.env.max_contexts == 1
  assert (
    c.env.max_tokens == 2 * mr_search.get_config('attempts=1').env.max_tokens
  )
  assert score.get_config('first=0').algorithm.advantage_kw.first == 0
  with pytest.raises(DataError, match='golden answers'):
    checks.check_data(c, [Question('q', 'who?')])
  for field, value in dict(attempts=3, max_contexts=2).items():
    c = score.get_config()
    c.batch.tokens *= 2
    c.env[field] = value
    with pytest.raises(ConfigError, match='env.attempts.*use'):
      checks.check(c)
  for field, value, message in (
    ('first', c.train.steps, 'first=.*: 0 to .*train.steps'),
    ('first', -1, 'first=-1'),
    ('alpha', -1.0, 'alpha=-1.0: 0 to'),
    ('strong', -0.1, 'strong=-0.1'),
    ('weak', -0.1, 'weak=-0.1'),
  ):
    c = score.get_config()
    c.algorithm.advantage_kw[field] = value
    with pytest.raises(ConfigError, match=f'advantage_kw.{message}'):
      checks.check(c)
  c = score.get_config()
  c.reward.em.fn = 'answer.em'
  with pytest.raises(ConfigError, match="config.reward.*'answer.em'.*each_att"):
    checks.check(c)
  c = score.get_config()
  c.teacher.weights = 'live'
  with pytest.raises(ConfigError, match='live.*frozen'):
    checks.check(c)
