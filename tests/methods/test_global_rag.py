"""GlobalRAG by hand, and weights that follow the length of the run."""

import asyncio
import dataclasses
import math

from ml_collections import ConfigDict
import pytest

from configs.methods import global_rag
from searchrl_jax import checks
from searchrl_jax.data.checks import DataError
from searchrl_jax.rewards import core
from searchrl_jax.rewards.core import RewardError
from tests.methods import played

CHAIN = dataclasses.replace(
  played.QUESTION,
  answers=('Mukwick',),
  meta={
    'facts': (
      ('Mira Dok', 'teacher', 'Kova Len'),
      ('Kova Len', 'home', 'Mukwick'),
    ),
    'parallel': False,
  },
)
BOTH = dataclasses.replace(
  played.QUESTION,
  answers=('Tenwick',),
  meta={
    'facts': (('A', 'visited', 'Tenwick'), ('B', 'visited', 'Tenwick')),
    'parallel': True,
  },
)


def plays(plan, *notes, question=CHAIN):
  """Plans, then searches once for each note, or once without."""
  written = [f'<refine>{note}</refine>\n' if note else '' for note in notes]
  turns = [f'<think>{plan}</think>\n<search>x</search>']
  turns += [x + played.search('y') for x in written[:-1]]
  turns.append(written[-1] + played.says(question.answers[0]))
  return played.attempt(*turns, question=question)


def earned(arg, *group, step=0, steps=20):
  c = global_rag.get_config(arg)
  c.train.steps = steps
  terms = ConfigDict(c.reward.to_dict())
  context = core.RewardContext(step, env=played.ENV)
  return asyncio.run(core.combine(terms, [group], context))


TOLD = 'teacher Kova Len', 'home Mukwick'
PLAN = 'teacher; home'


def test_golden():
  group = (
    plays(PLAN, *TOLD),  # .1 + .5 (1 + 1 + 1)
    plays('home; teacher', *TOLD),  # another order: .1 + .5 (1 + 0 + 1)
    # One of two is named, and so one of two notes counts.
    plays('teacher', *TOLD),  # .1 + .5 (.5 + 0 + .5)
    plays(f'{PLAN}; craft', *TOLD),  # one too many: .1 + .5 (1 + 0 + 1)
    plays(PLAN, TOLD[0], ''),  # .1 + .5 (1 + 1 + .5); as released: 1 + 1 + 0
    # F1 of Mukwick and Mukwick Tenwick: 2 / 3. .1 + .5 (1 + 1 + 5 / 6)
    plays(PLAN, TOLD[0], 'home Mukwick Tenwick'),
    plays('hm', ''),  # .1
    plays('visited & visited', 'both Tenwick', question=BOTH),  # 1.6
    plays('visited; visited', 'both Tenwick', question=BOTH),  # 1.1
    # An invalid action costs .1.
    played.attempt('hm', played.says('Mukwick'), question=CHAIN),
  )
  terms = [1.6, 1.1, 0.6, 1.1, 1.35, 0.1 + 17 / 12, 0.1, 1.6, 1.1, 0]
  found = earned('anneal=False', *group)
  assert found.value.tolist() == pytest.approx([1 + x for x in terms])
  # At step 0 all of it but exact match is worth .989.
  w = 1 / (1 + math.exp(-0.9 / 0.2))
  assert w == pytest.approx(0.989, abs=1e-3)
  found = earned('', *group)
  assert found.value.tolist() == pytest.approx([1 + w * x for x in terms])
  assert found.parts['plan/steps'][4] == 0.5
  terms[4] = 1.1
  found = earned('version=as_released', *group)
  assert found.value.tolist() == pytest.approx([1 + w * x for x in terms])
  found = earned('scale=0.0', *group)
  assert found.value.tolist() == [1] * len(group)


@pytest.mark.parametrize('steps', [10, 20, 1000])
def test_the_terms_lose_weight_with_the_run(steps):
  """As released the run is over after 50 steps, whatever its length."""
  t = plays(PLAN, *TOLD)
  at = lambda arg, share: earned(arg, t, step=int(share * steps), steps=steps)
  weight = lambda arg, share: (at(arg, share).value[0] - 1) / 1.6
  for share in (0, 0.5, 1):
    wanted = 1 / (1 + math.exp((share - 0.9) / 0.2))
    assert weight('', share) == pytest.approx(wanted, rel=1e-5)
  released = weight('version=as_released', 1)
  # (t - 45) / 10, as in the release.
  wanted = 1 / (1 + math.exp((steps - 45) / 10))
  assert released == pytest.approx(wanted, abs=1e-6)


def test_a_long_run_does_not_overflow():
  t = plays(PLAN, *TOLD)
  assert earned('version=as_released', t, step=10**6).value[0] == 1


def test_a_fact_that_was_not_read_is_no_step():
  plan = f'<think>{PLAN}</think>\n'
  note = '<refine>home Mukwick</refine>\n'
  said = f'{plan}{note}<answer>Mukwick</answer>'
  t = played.attempt(said, question=CHAIN)
  # .1 + .5 (1 + 1 + 0)
  assert earned('anneal=False', t).value.tolist() == pytest.approx([2.1])


def test_its_config_and_what_is_refused():
  c = global_rag.get_config()
  c.train.steps = 7
  assert c.reward.plan.steps == 7 and c.sft.data.planned == 1.0
  with pytest.raises(DataError, match=r"meta\['facts'\].*reward.plan"):
    checks.check_data(c, [played.QUESTION])
  with pytest.raises(RewardError, match="version='released'"):
    checks.check_data(global_rag.get_config('version=released'), ())
  full = global_rag.get_config('base=search_r1,model=x')
  assert full.env.template == 'plan'
  full.env.template = 'refine'
  with pytest.raises(RewardError, match="block='plan'"):
    checks.check_data(full, ())
