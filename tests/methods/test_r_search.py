"""R-Search by hand, and evidence that nothing was read for."""

import asyncio
import dataclasses

from ml_collections import ConfigDict
import numpy as np
import pytest

from configs.methods import r_search
from searchrl_jax import checks
from searchrl_jax.data.checks import DataError
from searchrl_jax.rewards import core
from searchrl_jax.rewards.core import RewardError
from searchrl_jax.sources.chat import ChatError
from tests.methods import played

ASKED = dataclasses.replace(
  played.QUESTION,
  answers=('Mukwick',),
  meta={
    'facts': (
      ('Mira Dok', 'teacher', 'Kova Len'),
      ('Kova Len', 'home', 'Mukwick'),
    )
  },
)


def cites(*evidence, says='Mukwick', searches=1, before=()):
  written = ''.join(f'<refine>{text}</refine>\n' for text in evidence)
  turns = [*before, *[played.search()] * searches]
  return played.attempt(*turns, written + played.says(says), question=ASKED)


def earned(arg, *group):
  return played.earned(r_search, arg, *group)


def test_golden_values():
  group = (
    cites('home Mukwick'),  # 1 + 1 + .2 + .2
    cites('home Mukwick', says='Bob'),  # 0 + 1 + .2 + .2
    cites('teacher Kova Len'),  # which says no home: 1 + 0 + .2 + .2
    cites('Mukwick'),  # the reader does not know of what: 1 + 0 + .2 + .2
    # Two words for one: F1 2 / (2 + 1). 1 + .667 + .2 + .2
    cites('home Mukwick Tenwick'),
    cites('home Tenwick; home Mukwick.'),  # the last one is read: 2.4
    cites('teacher Kova Len', 'home Mukwick'),  # two blocks: 1 + 1 + .2 + 0
    cites(),  # no evidence of what was read: 1 + 0 + .2 + 0
    cites('home Mukwick', before=['hm']),  # an invalid action: 1 + 1 + 0 + .2
    # No answer: 0 + 1 + 0 + .2.
    played.attempt(
      played.search(),
      '<refine>home Mukwick</refine>',
      *['hm'] * 6,
      question=ASKED,
    ),
  )
  wanted = [2.4, 1.4, 1.4, 1.4, 2.4 - 1 / 3, 2.4, 2.2, 1.2, 2.2, 1.2]
  assert earned('', *group) == pytest.approx(wanted)
  assert earned('version=as_released', *group) == pytest.approx(wanted)
  assert earned('form=0.0', *group[:3]) == pytest.approx([2, 1, 1])
  half = cites('home Mukwick', says='Mukwick Tenwick')
  assert earned('outcome=em', half) == pytest.approx([1.4])


@pytest.mark.parametrize('says', ['Mukwick', 'Bob'])
def test_without_search_and_evidence_there_is_no_form_of_evidence(says):
  idle = cites(searches=0, says=says)
  [sound] = earned('', idle)
  [released] = earned('version=as_released', idle)
  assert sound == pytest.approx((says == 'Mukwick') + 0.2)
  assert released == pytest.approx(sound + 0.2)


def test_evidence_from_before_an_observation_is_none():
  # 1 + 0 + .2 + 0, though the block states the fact; a passage is none either.
  early = cites('home Mukwick', searches=0)
  quoted = played.attempt(
    played.search('<refine>home Mukwick</refine>'),
    played.says('Mukwick'),
    question=ASKED,
  )
  assert earned('', early, quoted) == pytest.approx([1.2, 1.2])


def test_what_two_people_have_in_common():
  facts = (('A', 'visited', 'Tenwick'), ('B', 'visited', 'Tenwick'))
  asked = dataclasses.replace(
    ASKED, answers=('Tenwick',), meta={'facts': facts}
  )
  written = f'<refine>both Tenwick</refine>\n{played.says("Tenwick")}'
  t = played.attempt(played.search(), written, question=asked)
  assert earned('', t) == pytest.approx([2.4])


class Reader:
  """A judge whose verdicts are given."""

  def __init__(self, *verdicts):
    self.given, self.asked, self.required = verdicts, [], []

  async def verdicts(self, items):
    self.asked = [*items]
    return [*self.given]

  def require(self, trajectories, judged):
    self.required = judged.tolist()


def test_another_model_reads():
  failed = ChatError('unreachable', 'no')
  reader = Reader(True, False, failed, ChatError('unusable', 'what?'))
  group = tuple(cites(f'note {n}') for n in range(4))
  terms = r_search.get_config('reader=judge').reward.to_dict()
  context = core.RewardContext(env=played.ENV, judge=reader)
  found = asyncio.run(core.combine(ConfigDict(terms), [group], context))
  # 1.4 for answer and forms. A reader that fails leaves the trajectory out; a
  # note that it cannot judge is worth nothing.
  np.testing.assert_allclose(found.value, [2.4, 1.4, 0, 1.4], rtol=1e-6)
  assert found.valid.tolist() == [True, True, False, True]
  assert reader.required == found.valid.tolist()
  assert reader.asked[0] == ('who?', ('Mukwick',), 'note 0')


def test_what_is_refused():
  with pytest.raises(DataError, match=r"meta\['facts'\].*reward.evidence"):
    checks.check_data(r_search.get_config(), [played.QUESTION])
  for arg, message in (
    ('reader=jugde', "reader='jugde'.*judge"),
    ('reader=judge', 'config.reward.evidence needs a judge.*config.judge.url'),
    ('version=released', "version='released'.*as_released"),
  ):
    with pytest.raises(RewardError, match=message):
      checks.check_data(r_search.get_config(arg), ())
  with pytest.raises(ValueError, match="outcome='en'"):
    r_search.get_config('outcome=en')
  c = r_search.get_config()
  c.env.template = 'micro'
  with pytest.raises(RewardError, match="'refine'.*micro_notes"):
    checks.check_data(c, ())
  c = r_search.get_config()
  c.env.information = 'policy'
  with pytest.raises(RewardError, match="information='policy'.*'source'"):
    checks.check_data(c, ())
  full = r_search.get_config('base=search_r1,model=x')
  assert full.env.template == 'cited'
  checks.check_data(full, [ASKED])  # it needs golden answers alone
