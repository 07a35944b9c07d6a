import asyncio
import dataclasses

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from searchrl_jax.evaluate import health
from searchrl_jax.rewards import answer
from searchrl_jax.rewards import core as rewards
from searchrl_jax.text import parser as parsing
from searchrl_jax.types import Question, Segment, Trajectory
from tests.fakes import FakeSource, make_env, run_script

ENV = make_env()
THINK = '<think>a</think>'


def question():
  return Question('q', 'Who is it?', ('Ann',))


def test_health():
  question_ = Question('q', 'Who is it?', ('Ann',))

  def one(*turns, **kw):
    return run_script(turns, env=ENV, question=question_, **kw)

  good = one(THINK + '<search>Who is it?</search>', '<answer>Ann</answer>')
  cut = one('<think>' + 'abcd' * 49, *['<answer>x</answer>'])
  failed = one(
    '<search>a</search>', source=FakeSource(fails=lambda q, attempt: True)
  )
  found = health.signs(
    [(good, cut), (failed,)],
    ENV,
    [0.5, 0.5, 0.0],
    [True, True, False],
    match='text',
  )
  assert found['health/failed'] == 1
  assert found['health/searches'] == 0.5 and found['health/copied'] == 1.0
  assert found['health/valid_format'] == 0.5
  assert found['health/answered'] == 1.0 and found['health/guessed'] == 0.5
  assert found['health/invalid_actions'] == 0.5
  # '<think>a</think>' has 16 bytes; the other thought is the turn's 200
  # tokens, that is 7 + 193 of its bytes and more that was cut off.
  assert found['health/think_tokens'] == (16 + 200) / 2
  assert found['health/zero_variance'] == 1.0  # one group of two, both 0.5
  assert set(found) >= {'health/repetition', 'health/end_tokens'}


def test_another_role_in_a_group_is_not_counted():
  def one(text, role):
    found = run_script((text,), env=ENV, question=question())
    return dataclasses.replace(found, role=role)

  attempt = one('<answer>Ann</answer>', 'solver')
  alone = health.signs([(attempt,)], ENV, [1.0], [True], match='text')
  both = attempt, one(f'{THINK}<answer>0 or 1</answer>', 'refiner')
  found = health.signs([both], ENV, [1.0, 1.0], [True] * 2, match='text')
  assert found.pop('health/zero_variance') == 1.0  # of two that earn alike
  del alone['health/zero_variance']
  assert found == alone


def test_zero_variance_looks_at_each_group_without_failed_ones():
  def one(failed=False):
    source = FakeSource(fails=lambda q, attempt: True) if failed else None
    turn = '<search>a</search>' if failed else '<answer>x</answer>'
    return run_script((turn,), env=ENV, question=question(), source=source)

  a, bad = one(), one(failed=True)
  groups = [(a, a), (a, a), (a, a, bad), (a, bad)]
  values = [0, 1, 1, 1, 0, 0, 9, 1, 1]
  valid = [not t.failed for group in groups for t in group]
  found = health.signs(groups, ENV, values, valid, match='text')
  # Groups: mixed, equal, equal but for the failed one, too small: 2 of 3.
  assert found['health/zero_variance'] == pytest.approx(2 / 3)


def test_searches_by_hops():
  def one(hops, searches):
    turns = ['<search>a</search>'] * searches + ['<answer>x</answer>']
    asked = Question(f'q{hops}', 'Who?', ('Ann',), hops=hops)
    return run_script(turns, env=ENV, question=asked)

  groups = [(one(1, 0), one(1, 1)), (one(2, 3), one(2, 2))]
  found = health.signs(groups, ENV, match='text')
  assert found['health/hops=1/searches'] == 0.5
  assert found['health/hops=2/searches'] == 2.5
  assert 'health/hops=1/searches' not in health.signs(
    groups[:1], ENV, match='text'
  )


@pytest.mark.parametrize('labelled', [True, False])
def test_likelihood_of_right_and_of_wrong_trajectories(labelled):
  def one(answer):
    asked = Question('q', 'Who?', ('Ann',) if labelled else ())
    return run_script(
      ('<search>a</search>', f'<answer>{answer}</answer>'),
      env=ENV,
      question=asked,
    )

  def mean(*trajectories):
    return np.mean(
      np.concatenate(
        [
          s.logps
          for t in trajectories
          for s in t.segments
          if s.author == 'policy'
        ]
      )
    )

  a, b, c = one('Ann'), one('Bobby'), one('Cy')
  # Golden answers decide; without them, rewards do.
  values = np.float32([0, 5, 5] if labelled else [2, 0, 0])
  found = health.signs([(a, b, c)], ENV, values, [True] * 3, match='text')
  assert found['health/logp_right'] == pytest.approx(mean(a), rel=1e-6)
  assert found['health/logp_wrong'] == pytest.approx(mean(b, c), rel=1e-6)
  if not labelled:
    assert not any(
      'logp' in name for name in health.signs([(a, b)], ENV, match='text')
    )


def test_likelihood_goes_by_what_makes_answers_equal():
  half = run_script(
    ('<answer>1/2</answer>',),
    env=ENV,
    question=Question('q', 'What?', ('0.5',)),
  )
  for match, name in (
    ('text', 'wrong'),
    ('experiments.ttrl.mathematics.equal', 'right'),
  ):
    found = health.signs([(half,)], ENV, match=match)
    assert {k for k in found if 'logp' in k} == {f'health/logp_{name}'}


def test_repetition():
  def of(*turns):
    trajectory = run_script(turns, env=ENV, question=question())
    return health.repetition(trajectory)

  # 'abcdabcdabcd</...' cannot be told apart from its tags, so: 4-grams of
  # 'xyxyxyxy' + '<answer>z</answer>'. 26 bytes give 23 4-grams; xyxy occurs 3
  # times and yxyx 2 times, 3 repeats; the closing tag repeats 'answ', 'nswe',
  # 'swer', 'wer>': 4 more. 7 / 23.
  assert of('xyxyxyxy<answer>z</answer>') == pytest.approx(7 / 23)
  # Turns are not joined, yet what was said in one counts in the next.
  assert (
    of('<search>a</search>', '<search>a</search>', '<answer>z</answer>') > 0.3
  )


def plain_repetition(segments, n):
  """The definition, gram by gram."""
  runs = [[]]
  for author, ids in segments:
    if author == 'policy':
      runs[-1] += ids
    else:
      runs.append([])
  grams = [
    tuple(run[i : i + n]) for run in runs for i in range(len(run) - n + 1)
  ]
  return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


@hypothesis.given(
  st.lists(
    st.tuples(
      st.sampled_from(['policy', 'policy', 'environment', 'prompt']),
      st.lists(st.sampled_from([0, 1, 2, 151_668, 2**31 - 1]), max_size=12),
    ),
    max_size=6,
  ),
  st.integers(1, 5),
)
def test_repetition_is_that_of_the_definition(segments, n):
  found = Trajectory(
    question(),
    tuple(
      Segment(np.array(ids, np.int32), author, 'other')
      for author, ids in segments
    ),
    (),
    'eos',
  )
  assert health.repetition(found, n) == plain_repetition(segments, n)


def test_long_grams_of_many_tokens_do_not_overflow():
  ids = list(range(2**12)) * 2  # 4,096 ** 8 = 2 ** 96
  found = Trajectory(
    question(),
    (Segment(np.array(ids, np.int32), 'policy', 'other'),),
    (),
    'eos',
  )
  assert health.repetition(found, 8) == plain_repetition([('policy', ids)], 8)


def test_a_trajectory_is_parsed_once(monkeypatch):
  """By rewards, signs of collapse and evaluation together."""
  real, calls = parsing.blocks, []

  def blocks(*args):
    calls.append(args)
    return real(*args)

  monkeypatch.setattr(parsing, 'blocks', blocks)
  found = run_script(
    (THINK + '<search>b</search>', '<answer>Ann</answer>'),
    env=ENV,
    question=question(),
    passage='x',
  )
  context = rewards.RewardContext(0, ENV)
  for reward in (answer.em, answer.f1):
    asyncio.run(reward([(found,)], context))
  assert asyncio.run(
    answer.format_valid([(found,)], context, require_think=False)
  ).value == [1.0]
  health.signs([(found,)], ENV, match='text')
  assert ENV.blocks(found) == real(found.segments, ENV.template, ENV.tokenizer)
  assert len(calls) == 1
  # Another environment has other tags.
  other = make_env()
  assert other.blocks(found) == ENV.blocks(found) and len(calls) == 2
