"""Credit for searches: golden values, what it sums to, and its controls."""

import asyncio
import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st
from ml_collections import ConfigDict
import numpy as np
import pytest

from configs.methods import core as methods
from searchrl_jax.rewards import core, progress
from tests import tiny
from tests.methods import group as hand
from tests.methods.group import CONTEXT, GROUP, IDLE, RIGHT, WRONG

FIELDS = {
  k: v for k, v in methods.PROGRESS.items() if k not in ('fn', 'weight')
}


def earned(group=GROUP, context=CONTEXT, **fields):
  return asyncio.run(progress.progress([group], context, **(FIELDS | fields)))


def test_golden_differences():
  # Right: 0, 1/2, 1 of a and b found. Wrong: 0, 0 (x z), 1/2 (a x z).
  found = earned()
  assert hand.credits(found) == [[0.5, 0.5, 0], [0, 0.5, 0], [0]]
  assert found.at == 'segment' and found.valid.all()
  assert found.parts['phi'].tolist() == [1, 0.5, 0]
  # Of a x z, x and z were found before.
  np.testing.assert_allclose(found.parts['redundant'], [0, 2 / 3, 0])


def test_credit_lies_where_a_search_is_closed():
  [value, *_] = earned().value
  segments = [s for s, x in zip(RIGHT.trained, value, strict=True) if x]
  assert [s.kind for s in segments] == ['search', 'search']
  assert all(s.author == 'policy' for s in segments)
  tokens = core.at_tokens([GROUP], earned())[0]
  at = np.flatnonzero(tokens)
  ids = np.concatenate([s.ids for s in RIGHT.trained])
  for t in at:
    assert bytes(ids[: t + 1].tolist()).endswith(b'</search>')


def test_redundancy_is_taken_off_and_scaled():
  # Wrong: 0 - 0; 1/2 - 2/3 = -1/6; times 0.6: -0.1.
  found = hand.credits(earned(redundancy=1.0, scale=0.6))
  np.testing.assert_allclose(found[1], [0, -0.1, 0], atol=1e-7)
  np.testing.assert_allclose(found[0], [0.3, 0.3, 0], atol=1e-7)
  twice = hand.play(('w', 'aa'))
  # The second place shows what the first did: 1/2 of two.
  found = hand.credits(earned((twice,), redundancy=1.0), (twice,))
  assert found == [[0.5 - 0.5, 0]]


def test_the_level_is_paid_again_for_each_search():
  again = hand.play(('w', 'a'), ('w', 'a'), ('w', 'a'))
  for kind, total in (('difference', 0.5), ('gain', 0.5), ('level', 1.5)):
    [credit] = hand.credits(earned((again,), kind=kind), (again,))
    assert sum(credit) == total, kind


async def falling(trajectories, context, *, to: float):
  """A potential that falls at the second search."""
  del context
  return [np.array([0.0, 1.0, to]) for _ in trajectories]


def test_gains_can_be_farmed_where_the_potential_falls():
  fields = dict(phi=f'{__name__}.falling', phi_kw=dict(to=0.25))
  for kind, credit in (
    ('difference', [1, -0.75, 0]),
    ('gain', [1, 0, 0]),
    ('level', [1, 0.25, 0]),
  ):
    found = hand.credits(earned((RIGHT,), kind=kind, **fields), (RIGHT,))
    assert found == [credit], kind


def test_closed_shaping_pays_nothing_in_all():
  assert hand.credits(earned(closed=True)) == [
    [0.5, 0.5, -1], [0, 0.5, -0.5], [0],
  ]  # fmt: skip


def test_no_credit_without_an_answer_if_it_is_forfeited():
  cut = hand.play(('w', 'ab'), answer=None)
  assert hand.ENV.answer(cut) is None
  [kept], [lost] = (
    hand.credits(earned((cut,), forfeit=f), (cut,)) for f in (False, True)
  )
  assert sum(kept) == 1 and not any(lost)


def test_a_failed_trajectory_has_none():
  failed = dataclasses.replace(RIGHT, end='failed')
  found = earned((failed, WRONG))
  assert found.valid.tolist() == [False, True]
  assert not found.value[0].any() and found.value[1].any()


FOUND = st.lists(st.lists(st.sampled_from('abxyz'), max_size=3), max_size=3)


@settings(max_examples=25, deadline=None)
@given(FOUND)
def test_sums(found):
  """What was reached; nothing if closed; and controls keep it."""
  t = hand.play(*(('w', ids) for ids in found))
  reached = len({*'ab'} & {i for ids in found for i in ids}) / 2

  def total(**fields):
    return sum(hand.credits(earned((t,), **fields), (t,))[0])

  assert total() == total(kind='gain') == pytest.approx(reached)
  assert total(closed=True) == pytest.approx(0)
  fields = dict(redundancy=0.7, kind='level')
  whole = hand.credits(earned((t,), **fields), (t,))[0]
  moved = hand.credits(earned((t,), **fields, shuffle=True), (t,))[0]
  late = hand.credits(earned((t,), **fields, at_end=True), (t,))[0]
  assert sorted(moved) == sorted(whole)
  assert not any(late[:-1]) and late[-1] == pytest.approx(sum(whole), abs=1e-6)


def test_the_shuffle_depends_on_question_sample_and_step_alone():
  def orders(step, sample=0, found=('a', 'b', 'x')):
    t = hand.play(*(('w', i) for i in found), sample=sample)
    context = dataclasses.replace(CONTEXT, step=step)
    fields = dict(phi=f'{__name__}.numbered', shuffle=True)
    return tuple(hand.credits(earned((t,), context, **fields), (t,))[0])

  assert orders(3) == orders(3, found=('x', 'x', 'x'))
  assert len({orders(3, sample) for sample in range(8)}) > 3
  assert len({orders(step) for step in range(8)}) > 3


async def numbered(trajectories, context):
  """Steps of 1, 2, 3."""
  del context
  return [np.array([0.0, 1.0, 3.0, 6.0]) for _ in trajectories]


def config(**fields):
  c = tiny.config()
  c.algorithm.advantage = 'turn_normalised'
  c.reward.progress = ConfigDict(methods.PROGRESS | fields)
  return c


@pytest.mark.parametrize(
  'fields, message',
  [
    (dict(kind='gains'), "kind='gains'.*'gain'"),
    (dict(phi='support'), "'support'.*'supporting'"),
    (dict(phi_kw=dict(x=1)), 'phi_kw.x'),
    (dict(shuffle=True, at_end=True), 'at_end'),
  ],
)
def test_errors_name_the_field(fields, message):
  with pytest.raises(ValueError, match=f'config.reward.progress.*{message}'):
    core.check(config(**fields))


def test_a_shuffle_that_nothing_sees_is_refused():
  c = config(shuffle=True)
  core.check(c)
  c.algorithm.advantage = 'grpo'
  with pytest.raises(core.RewardError, match="shuffle=True.*'grpo'.*'gae'"):
    core.check(c)


def test_data_without_supporting_passages_is_refused():
  bare = dataclasses.replace(hand.QUESTION, supporting=())
  with pytest.raises(ValueError, match="'q'.*supporting.*reward.progress"):
    core.check(config(), [bare])
  core.check(config(phi=f'{__name__}.numbered'), [bare])
  core.check(config(), [IDLE.question])
