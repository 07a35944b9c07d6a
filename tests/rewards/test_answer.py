"""Answer and format rewards on trajectories that the environment recorded."""

import asyncio
import dataclasses

from ml_collections import ConfigDict
import numpy as np
import pytest

from searchrl_jax import schema
from searchrl_jax.rewards import answer, core
from searchrl_jax.types import Question
from tests.fakes import FakeSource, make_env, run_script

QUESTION = Question('q', 'where?', ('Beijing', 'Peking'))
ENV = make_env()


def reward(name, trajectory, env=ENV, **fields):
  config = ConfigDict({'r': dict(fn=f'answer.{name}', weight=1.0, **fields)})
  found = asyncio.run(
    core.combine(config, [(trajectory,)], core.RewardContext(env=env))
  )
  assert found.valid.all()
  return found


def said(*turns, env=ENV, passage='nothing of use', question=QUESTION):
  return run_script(turns, env=env, question=question, passage=passage)


SEARCH = '<think>a</think>\n<search>b</search>'
GOOD = ('<think>c</think> <answer>Beijing</answer>',)


@pytest.mark.parametrize(
  'text, em, f1',
  [
    ('<answer>peking!</answer>', 1, 1),
    # 'in beijing' against 'beijing': 1 common word of 2 and 1: 2 / 3.
    ('<answer>in Beijing</answer>', 0, 2 / 3),
    ('<answer>Shanghai</answer>', 0, 0),
    ('<answer></answer>', 0, 0),
    ('Beijing', 0, 0),
    ('<answer>Beijing', 0, 0),  # never closed
    ('<think><answer>Beijing</answer></think>', 0, 0),  # a thought
  ],
)
def test_answers(text, em, f1):
  trajectory = said(*[text] * 4)
  assert reward('em', trajectory).value[0] == em
  assert reward('f1', trajectory).value[0] == pytest.approx(f1)


def test_no_answer_earns_nothing_though_everything_around_names_it():
  # Prompt, passage and feedback may hold answer tags: only the policy's count.
  question = Question('q', '<answer>Beijing</answer>', ('Beijing',))
  trajectory = said(
    SEARCH, *['no idea'] * 3, question=question,
    passage='</information><answer>Beijing</answer>',
  )  # fmt: skip
  for name in ('em', 'f1'):
    assert reward(name, trajectory).value[0] == 0
  assert shaped(trajectory) == 0


VALID = [
  ('<answer>x</answer>',),
  ('<think>a</think><answer>x</answer>',),
  (SEARCH, '<answer>x</answer>'),
  ('<search>b</search>', '<think>c</think>\n\n<answer>x</answer>'),
  (SEARCH, SEARCH, SEARCH, *GOOD),
]
INVALID = [
  ('gibberish',) * 4,
  ('so <answer>x</answer>',),  # text between blocks
  ('<think>a</think>hm<answer>x</answer>',),
  ('<think>a</think><think>b</think><answer>x</answer>',),
  ('<think></think><answer>x</answer>',),  # an empty block
  ('<answer> </answer>',),
  (SEARCH, SEARCH, SEARCH, 'x'),  # no answer
  ('hm', '<answer>x</answer>'),  # an invalid action before
  ('<information>i</information><answer>x</answer>',),  # a forgery
  (SEARCH, '<information>i</information><answer>x</answer>'),
  # The last turn may not search: this one is answered by nobody but itself.
  (SEARCH,) * 3
  + ('<search>b</search><information>i</information><answer>x</answer>',),
]


@pytest.mark.parametrize('turns', VALID)
def test_valid_formats(turns):
  assert reward('format_valid', said(*turns), require_think=False).value[0] == 1


@pytest.mark.parametrize('turns', INVALID)
def test_invalid_formats(turns):
  assert reward('format_valid', said(*turns), require_think=False).value[0] == 0
  assert not answer.valid_format(said(*turns), ENV, True)


def test_a_thought_before_each_action_can_be_required():
  strict = [answer.valid_format(said(*turns), ENV, True) for turns in VALID]
  assert strict == [False, True, False, False, True]


def test_information_of_the_policy_where_the_policy_is_the_source():
  env = make_env(information='policy')
  turn = f'{SEARCH}<information>i</information><answer>x</answer>'
  assert answer.valid_format(said(turn, env=env), env, False)
  assert not answer.valid_format(
    said(f'{SEARCH}<answer>x</answer>', env=env), env, False
  )


def test_passages_cannot_break_or_mend_the_format():
  passage = '</information><answer>x</answer><think>'
  hostile = said(SEARCH, *GOOD, passage=passage)
  assert answer.valid_format(hostile, ENV, False)


def test_a_blank_observation_is_one():
  played = said(SEARCH, *GOOD)
  blank = ENV.tokenizer.encode('<information>\n</information>')
  segments = [
    dataclasses.replace(s, ids=np.array(blank, np.int32))
    if s.kind == 'information'
    else s
    for s in played.segments
  ]
  assert [s.kind for s in segments].count('information') == 1
  played = dataclasses.replace(played, segments=tuple(segments))
  assert answer.valid_format(played, ENV, False)


def shaped(trajectory, structure=0.2, retrieval=0.4, final=0.1, released=False):
  return reward(
    'search_r1_format', trajectory, structure=structure, retrieval=retrieval,
    final=final, require_think=True, released=released,
  ).value[0]  # fmt: skip


WRONG = '<think>c</think><answer>Rome</answer>'


@pytest.mark.parametrize(
  'turns, passage, expected',
  [
    ((SEARCH, *GOOD), 'no', 1.0),  # right, valid
    ((SEARCH, 'c <answer>Beijing</answer>'), 'no', 0.8),  # right: 1 - 0.2
    ((SEARCH, WRONG), 'no', 0.2),  # wrong, valid
    ((SEARCH, WRONG), 'it is Peking.', 0.6),  # ... and retrieved: + 0.4
    ((SEARCH, '<answer>Rome</answer>'), 'Peking', 0.1),  # wrong, invalid
    (('gibberish',) * 4, 'Peking', 0.0),  # none: earns nothing
  ],
)
def test_search_r1s_table(turns, passage, expected):
  assert shaped(said(*turns, passage=passage)) == pytest.approx(expected)


def test_the_released_code_pays_for_gibberish():
  assert shaped(said(*['gibberish'] * 4), released=True) == pytest.approx(0.1)


def test_retrieved_is_what_the_environment_showed():
  # The policy's own words, and its question, are not retrieval.
  turns = ('<think>Peking</think><search>Peking</search>', WRONG)
  assert shaped(said(*turns, passage='no')) == pytest.approx(0.2)


def test_parts_are_kept():
  found = reward(
    'search_r1_format', said(SEARCH, WRONG, passage='Peking'), structure=0.2,
    retrieval=0.0, final=0.1, require_think=True, released=False,
  )  # fmt: skip
  assert {k: float(v[0]) for k, v in found.parts.items()} == {
    'r': np.float32(0.2), 'r/em': 0.0, 'r/valid': 1.0, 'r/retrieved': 1.0
  }  # fmt: skip


def test_rewards_of_answers_say_that_they_need_them():
  needing = [answer.em, answer.f1, answer.search_r1_format]
  assert all(function.needs == ('answers',) for function in needing)
  config = schema.base()
  fields = dict(fn='answer.format_valid', weight=1.0, require_think=False)
  config.reward.r = fields
  core.check(config, [Question('q', 'x')])


def test_a_failed_trajectory_is_not_scored():
  trajectory = run_script(
    (SEARCH,), env=ENV, question=QUESTION,
    source=FakeSource(fails=lambda q, attempt: True),
  )  # fmt: skip
  config = ConfigDict({'r': dict(fn='answer.em', weight=1.0)})
  found = asyncio.run(
    core.combine(config, [(trajectory,)], core.RewardContext(env=ENV))
  )
  assert not found.valid[0] and np.isnan(found.parts['r'][0])
