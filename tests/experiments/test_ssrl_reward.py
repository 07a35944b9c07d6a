"""SSRL's reward: the release's values, without what it gets wrong."""

import asyncio
import re

from ml_collections import ConfigDict
import pytest

from experiments.ssrl import reward as ssrl
from searchrl_jax import schema
from searchrl_jax.rewards import core
from searchrl_jax.types import Question
from tests.fakes import make_env, run_script

QUESTION = Question('q', 'where?', ('Beijing', 'Peking'))
ENV = make_env(information='policy', max_turns=0, max_turn_tokens=4000)
THINK = '<think>a</think>'
ROUND = '<search>b</search>\n<information>c\nd</information>'
ANSWER = '<answer>Beijing</answer>'
FULL = f'{THINK}\n{ROUND}\n{THINK}\n{ANSWER}'


def said(text, env=ENV):
  # An engine stops at each closing answer tag, quoted or not.
  turns = re.split('(?<=</answer>)', text)
  return run_script(turns, env=env, question=QUESTION)


def reward(text, fn='graded', weight=0.1, env=ENV):
  config = ConfigDict(
    {
      'r': dict(
        fn=f'experiments.ssrl.reward.{fn}', weight=1.0, format_weight=weight
      )
    }
  )
  found = asyncio.run(
    core.combine(config, [(said(text, env),)], core.RewardContext(env=env))
  )
  return found.value[0]


# What the released code gives, run on texts of these forms; T thoughts and S
# searches give min(T / 2, 1) x min(T, S + 1) / max(T, S + 1).
@pytest.mark.parametrize(
  'text, want',
  [
    (f'{THINK}{ANSWER}', 0.5),
    (FULL, 1.0),
    (f'{THINK}{ROUND}{THINK}{ROUND}{THINK}{ANSWER}', 1.0),
    (f'{THINK}{ROUND}{ANSWER}', 0.25),  # 1/2 x 1/2
    (f'{THINK}{THINK}{ROUND}{THINK}{ANSWER}', 2 / 3),
    (f'{THINK}{ROUND}' * 7 + THINK + ANSWER, 1.0),
    (f'{THINK}{ROUND}' * 8 + THINK + ANSWER, 0),  # nine thoughts
    (f'{THINK} so {ROUND} thus {THINK} then {ANSWER}', 1.0),  # loose text
  ],
)
def test_format_score_is_the_releases(text, want):
  assert ssrl.format_score(said(text), ENV) == pytest.approx(want)


@pytest.mark.parametrize(
  'text',
  [
    '',
    'Beijing',
    ANSWER,
    f'so {FULL}',
    f'{ROUND}{THINK}{ANSWER}',
    f'{THINK}{ROUND}{THINK}',  # no answer
    f'{THINK}<answer>Beijing',  # not closed
    f'{THINK}<search>b</search>{THINK}{ANSWER}',  # a search without information
    f'{THINK}<search>b</search>{THINK}<information>c</information>{ANSWER}',
    f'{THINK}<information>c</information>{ANSWER}',
    f'{THINK}{ROUND}<information>c</information>{THINK}{ANSWER}',
    FULL.replace('>b<', '> <'),
    FULL.replace('>b<', '>b\nc<'),
    FULL.replace('>c\nd<', '><'),
    FULL.replace('>a<', '>Your Thoughts here<'),
    FULL.replace('>b<', '>your query<'),
    FULL.replace('>a<', '>a <b>bold</b> word<'),  # a tag of no block
    FULL.replace('>a<', '>a <answer>x<'),
    f'{THINK} </information> {ANSWER}',
  ],
)
def test_what_breaks_the_format(text):
  assert ssrl.format_score(said(text), ENV) == 0


@pytest.mark.parametrize('word', ['2 < 3, and 5 > 4', 'a <- b -> c', '<3'])
def test_a_comparison_is_no_tag(word):
  """The release finds a tag between any '<' and '>', and gives 0."""
  text = FULL.replace('>a<', f'>{word}<')
  assert ssrl.format_score(said(text), ENV) == 1.0


def test_nothing_but_the_answer_block_earns():
  right = 'Beijing'
  forged = f'<answer>{right}</answer>'
  for text in (
    FULL.replace(ANSWER, '<answer>Rome</answer>').replace('c\nd', forged),
    f'{THINK}<search>b</search><information>{forged}</information>',
    f'<think>{forged}</think>',
    f'<information>{forged}',
  ):
    trajectory = said(text)
    assert forged in ENV.tokenizer.decode(
      [i for s in trajectory.segments for i in s.ids]
    )
    assert reward(text) == 0  # of the format neither: there is a stray tag


def test_graded_and_binary():
  # 0.9 x EM + 0.1 x format; lambda = 0.1.
  wrong = ('Beijing</answer>', 'Rome</answer>')
  direct = f'{THINK}{ANSWER}'
  for text, graded, binary in (
    (FULL, 1.0, 1.0),
    (direct, 0.95, 0.9),
    (FULL.replace(*wrong), 0.1, 0.1),
    (direct.replace(*wrong), 0.05, 0.0),
    (ANSWER, 0.9, 0.9),
    ('Beijing', 0.0, 0.0),
  ):
    assert reward(text) == pytest.approx(graded)
    assert reward(text, 'binary') == pytest.approx(binary)
  assert reward(ANSWER, weight=0.2) == pytest.approx(0.8)
  with pytest.raises(core.RewardError, match='format_weight=2'):
    reward(FULL, weight=2)


def test_answers_are_needed_and_found_at_the_start():
  assert ssrl.graded.needs == ssrl.binary.needs == ('answers',)
  config = schema.base()
  config.reward.r = dict(fn='experiments.ssrl.reward.graded', weight=1.0)
  with pytest.raises(core.RewardError, match="'format_weight'"):
    core.check(config)


def test_information_of_the_environment_counts_as_information():
  """Sim-to-real: the same format where a search was real."""
  env = make_env(max_turns=1)
  found = run_script(
    [f'{THINK}<search>b</search>', f'{THINK}{ANSWER}'],
    env=env,
    question=QUESTION,
    passage='<b> of <x>',
  )
  assert ssrl.format_score(found, env) == 1.0
