"""Search-R2 by hand: what attempts and the verdicts on them earn."""

import asyncio
import dataclasses

import numpy as np
import pytest

from configs.methods import search_r2
from searchrl_jax import checks, sft
from searchrl_jax.data.checks import DataError
from searchrl_jax.learn import advantages, batching
from searchrl_jax.lookup import ConfigError
from searchrl_jax.rewards import core
from searchrl_jax.rollout import revise
from searchrl_jax.text import prompts, structure
from searchrl_jax.types import Question
from searchrl_jax.worlds import atlas, atlas_traces
from tests.methods import group as hand

# The hand-made group, as four attempts: GROUP, and RIGHT once more, which was
# wrong before its third step was cut. a and b support the question.
FOUND = [[['a', 'x'], ['b', 'y'], []], [['x', 'z'], ['a', 'x', 'z'], []], [[]]]
ATTEMPTS = [
  dataclasses.replace(t, sample=i, meta=dict(cut=cut, draft=draft, found=found))
  for i, (t, cut, draft, found) in enumerate(
    [
      (hand.RIGHT, 0, 'Ann', FOUND[0]),
      (hand.WRONG, 2, 'Bob', FOUND[1]),
      (hand.IDLE, 0, 'Bobby', FOUND[2]),
      (hand.RIGHT, 3, None, FOUND[0]),
    ]
  )
]


def verdict(on, step, found, **meta):
  """A reply to the attempt; its question is another text."""
  text = dataclasses.replace(hand.QUESTION, text='who?\n1: ...')
  t = hand.play(answer=str(step), sample=4 + on, question=text)
  meta = dict(on=on, step=step, found=found, asked=True) | meta
  return dataclasses.replace(t, role='refiner', meta=meta)


# Accepts; names the second step, where the first went wrong; cannot be read;
# names the third, which answered.
VERDICTS = [
  verdict(0, 0, FOUND[0]),
  verdict(1, 2, FOUND[1]),
  verdict(2, None, FOUND[2]),
  verdict(3, 3, FOUND[0]),
]
GROUP = (*ATTEMPTS, *VERDICTS)


def reward(group=GROUP, bonus=1.0):
  found = search_r2.reward([group], hand.CONTEXT, bonus=bonus)
  return asyncio.run(found)


def test_golden_rewards():
  # Right, and both searches found new evidence: 1 x (1 + 1 x 2 / 2) = 2. What
  # is wrong earns nothing, nor does a verdict that cannot be read; the others
  # earn what their attempts earn.
  found = reward()
  np.testing.assert_allclose(found.value, [2, 0, 0, 2, 2, 0, 0, 2])
  assert found.valid.all()
  np.testing.assert_allclose(
    reward(bonus=0.5).value, [1.5, 0, 0, 1.5, 1.5, 0, 0, 1.5]
  )


def test_golden_parts():
  parts, no = reward().parts, np.nan
  wanted = {
    'em': [1, 0, 0, 1] + [no] * 4,
    # Of WRONG's searches the second found a: 1 / 2. IDLE has none: 0.
    'evidence': [1, 0.5, 0, 1] + [no] * 4,
    'draft': [1, 0, 0, 0] + [no] * 4,
    'cut': [0, 1, 0, 1] + [no] * 4,
    'asked': [no] * 4 + [1] * 4,
    'unread': [no] * 4 + [0, 0, 1, 0],
    # RIGHT was right. The first step of WRONG found nothing needed; IDLE's only
    # one neither. The last draft found all, and then was wrong.
    'named': [no] * 5 + [0, 0, 1],
  }
  assert parts.keys() == wanted.keys()
  for name, column in wanted.items():
    np.testing.assert_allclose(parts[name], column, err_msg=name)


def test_evidence_that_is_found_again_is_not_new():
  t = hand.play(('q', 'ax'), ('r', 'ay'), ('s', 'b'))
  found = [['a', 'x'], ['a', 'y'], ['b'], []]
  meta = dict(cut=0, draft='Ann', found=found)
  earned = reward((dataclasses.replace(t, meta=meta),))
  np.testing.assert_allclose(earned.value, [1 + 2 / 3], rtol=1e-6)


@pytest.mark.parametrize(
  'found, step',
  [
    (['x', 'ab', ''], 1),
    (['a', 'a', ''], 2),
    (['a', 'b', ''], 3),  # the answer
    (['a', 'b'], 2),  # there was no room for one
    ([''], 1),
  ],
)
def test_the_first_fault_of_a_wrong_attempt(found, step):
  assert atlas.fault(('a', 'b'), found) == step


def test_a_failed_service_is_no_reward_and_no_fault():
  # It fails what is sampled again after a cut; the verdict was given before.
  failed = dataclasses.replace(ATTEMPTS[1], end='failed')
  group = (ATTEMPTS[0], failed, *ATTEMPTS[2:], *VERDICTS)
  found = reward(group)
  assert found.valid.tolist() == [i not in (1, 5) for i in range(8)]
  np.testing.assert_array_equal(found.parts['asked'][4:], [1, np.nan, 1, 1])
  # There was no room for the verdict.
  group = (*GROUP[:4], verdict(0, None, FOUND[0], asked=False), *GROUP[5:])
  found = reward(group)
  assert found.valid.tolist() == [i != 4 for i in range(8)]
  assert np.isnan(found.parts['unread'][4])
  np.testing.assert_array_equal(found.parts['asked'][4:], [0, 1, 1, 1])


def test_golden_advantages():
  # Attempts 2 0 0 2: mean 1, unbiased deviation sqrt(4 / 3) = 1.1547. Verdicts
  # 2 0 0 (0: unread) with the last not valid: mean 2/3, deviation 1.1547.
  structure_of = structure.of(GROUP, batching.masks(GROUP))
  values = np.array([2.0, 0, 0, 2, 2, 0, 0, 2])
  got = advantages.grpo_within(
    values, [True] * 7 + [False], [0] * 8, structure_of,
    label='role', eps=0.0, ddof=1,
  )  # fmt: skip
  np.testing.assert_allclose(got[:4], [0.8660, -0.8660, -0.8660, 0.8660], 1e-4)
  np.testing.assert_allclose(got[4:], [1.1547, -0.5774, -0.5774, 0], 1e-4)


def test_a_label_that_is_not_there_is_named():
  structure_of = structure.of(GROUP, batching.masks(GROUP))
  labelled = lambda valid: advantages.grpo_within(
    np.arange(8.0), valid, [0] * 8, structure_of, label='on', eps=0.0, ddof=1
  )
  with pytest.raises(ValueError, match="q/solver/0.*'on'"):
    labelled([True] * 8)
  # A trajectory that is left out needs none; each verdict is alone here.
  assert not labelled([False] * 4 + [True] * 4).any()


@pytest.fixture(scope='module')
def env():
  from experiments.arena import hinted

  return hinted._environment()


def test_verdicts_of_a_warm_start_read_what_a_refiner_reads(env):
  made = dict(world_seed=1, mix='even', worlds=1, n=240, people=60, known=0)
  plain = atlas_traces.traces(**made)
  told = atlas_traces.traces(refined=1.0, **made)
  assert {t.template for t in told} == {'micro_refiner'}
  steps = set()
  for trace, said in zip(plain, told, strict=True):
    t = sft.render(trace, env, 0)
    text = revise.shown(env, t)
    assert said.question.text == text
    [(kind, number)] = said.actions
    right = env.answer(t) in t.question.answers
    assert kind == 'answer' and (number == '0') == right
    assert int(number) <= text.count('\n')
    steps.add(number)
  assert {'0', '1', '2', '3'} <= steps
  some = atlas_traces.traces(refined=0.3, **made)
  assert 48 <= sum(t.template == 'micro_refiner' for t in some) <= 96


def test_a_verdict_is_played_as_it_is_shown(env):
  """The prompt of the warm start is that of the sampler."""
  [trace, *_] = atlas_traces.traces(
    world_seed=1, mix='even', worlds=1, n=9, people=60, known=0, refined=1.0
  )
  template = prompts.load(trace.template)
  other = type(env)(env.tokenizer, template, env.config, env.prompt_mode, env.k)
  shown = sft.render(trace, other, 0)
  reader = revise._reading(env, 'micro_refiner')
  prompt = reader.reset(trace.question, 'refiner')[1].prompt
  assert shown.segments[0].ids.tolist() == list(prompt.ids)


def test_its_config_and_what_it_needs():
  c = search_r2.get_config('bonus=0.5')
  base = search_r2.core.on_base('', lambda c, a: None)
  assert c.rollout.group == 2 * base.rollout.group
  assert c.sft.data.refined == 0.3 and c.reward.r2.bonus == 0.5
  checks.check(c)
  full = search_r2.get_config('base=search_r1,model=x')
  assert full.rollout.refiner == 'refiner' and 'refined' not in full.sft.data
  with pytest.raises(DataError, match='supporting passages'):
    checks.check_data(full, [Question('q', 'who?', ('Ann',))])
  c.rollout.group = 2
  with pytest.raises(ConfigError, match="group=2.*equal 'role'"):
    checks.check(c)
  c.rollout.sampler = 'chains'
  with pytest.raises(core.RewardError, match="sampler='chains'.*'revise'"):
    checks.check_data(c, [hand.QUESTION])
