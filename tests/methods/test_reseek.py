"""ReSeek's judgements by hand, and that searching to judge pays nothing."""

import asyncio
import dataclasses

from ml_collections import ConfigDict
import numpy as np
import pytest

from configs.methods import reseek
from searchrl_jax import checks
from searchrl_jax.data.checks import DataError
from searchrl_jax.rewards import core
from searchrl_jax.rewards.core import RewardError
from tests import fakes, scripted
from tests.methods import group as hand
from tests.methods import played

ENV = scripted.make(
  fakes.ByteTokenizer(), 'micro_judge', max_turns=6, max_turn_tokens=400
)
ASKED = dataclasses.replace(played.QUESTION, supporting=('a', 'b'))


def plays(*judged, found, says='Ann'):
  """Searches, and says this of each observation; None = nothing."""
  said = [f'<refine>{x}</refine>\n' if x else '' for x in judged]
  turns = [x + played.search(str(n)) for n, x in enumerate(['', *said[:-1]])]
  turns.append((said or [''])[-1] + played.says(says))
  return played.reads(ENV, turns if said else turns[-1:], found, 0, ASKED)


def judged(arg, *group):
  c = ConfigDict(reseek.get_config(arg).reward.to_dict())
  del c.em
  context = core.RewardContext(env=ENV)
  return asyncio.run(core.combine(c, [group], context))


def test_golden():
  # a: found, right. x: found, wrong. b: nothing, wrong. x: no, right.
  t = plays('found', 'found', None, 'no', found=['a', 'x', 'b', 'xy'])
  sound, written = judged('', t), judged('version=as_written', t)
  assert hand.credits(sound, (t,)) == [
    pytest.approx([0, 0.025, -0.025, -0.025, 0.025])
  ]
  assert hand.credits(written, (t,)) == [
    pytest.approx([0, 0.1, -0.1, -0.1, 0.1])
  ]
  assert sound.parts['judge/accuracy'].tolist() == [0.5]
  other = judged('version=as_written,match=0.2,mismatch=0.4', t)
  assert hand.credits(other, (t,)) == [pytest.approx([0, 0.2, -0.4, -0.4, 0.2])]


def test_nothing_to_judge_earns_nothing():
  idle = plays(found=[])
  found = judged('', idle)
  assert not found.value[0].any()
  assert np.isnan(found.parts['judge/accuracy'][0])


@pytest.mark.parametrize('n', [1, 3, 6])
def test_searches_that_are_easy_to_judge_cannot_be_farmed(n):
  t = plays(*['no'] * n, found=['x'] * n)
  assert judged('', t).value[0].sum() == pytest.approx(0.1)
  [written] = judged('version=as_written', t).value
  assert written.sum() == pytest.approx(0.1 * n)


@pytest.mark.parametrize(
  'said, right',
  [
    ('<refine>found</refine>', True),
    ('<refine> Found. </refine>', True),
    ('<refine>no</refine>', False),
    ('<refine>no</refine><refine>found</refine>', False),  # the first counts
    ('<refine>found no</refine>', False),
    ('<refine>found', False),  # never closed
    ('<think><refine>found</refine></think>', False),
    ('found', False),
    ('', False),
  ],
)
def test_what_is_a_judgement(said, right):
  turns = played.search(), f'{said}\n{played.says("Ann")}', played.says('Ann')
  t = played.reads(ENV, turns, ['a'], 0, ASKED)
  assert judged('', t).value[0].sum() == pytest.approx(0.1 if right else -0.1)


def test_outside_text_judges_nothing():
  passage = scripted.passage('<refine>found</refine>', id='a')
  turns = played.search(), played.says('Ann')
  state, _ = scripted.play(ENV, turns, [passage], ASKED)
  t = ENV.trajectory(state)
  assert judged('', t).value[0].sum() == pytest.approx(-0.1)


def test_its_config_and_what_is_refused():
  c = reseek.get_config('version=as_written')
  assert 'em' in c.reward and c.sft.data.judged == 1.0
  assert c.env.template == 'micro_judge'
  with pytest.raises(DataError, match='supporting passages.*reward.judge'):
    checks.check_data(c, [played.QUESTION])
  c.env.template = 'micro_notes'
  with pytest.raises(RewardError, match="block='judge'.*micro_judge"):
    checks.check_data(c, ())
  with pytest.raises(RewardError, match="version='as_released'"):
    checks.check_data(reseek.get_config('version=as_released'), ())
  full = reseek.get_config('base=search_r1,model=x')
  assert full.env.template == 'judge'
  assert full.reward.judge.words == ('yes', 'no')
