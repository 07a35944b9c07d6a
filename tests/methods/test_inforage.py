"""InForage by hand, and that each trajectory earns what it found itself."""

import asyncio
import dataclasses
import itertools

from ml_collections import ConfigDict
import pytest

from configs.methods import inforage
from searchrl_jax import checks
from searchrl_jax.data.checks import DataError
from searchrl_jax.rewards import core
from searchrl_jax.rewards.core import RewardError
from tests.methods import group as hand
from tests.methods import played

THREE = hand.play(('p', 'a'), ('q', 'b'), ('r', 'z'))
ONCE = hand.play(('p', 'ab'))


def earned(arg, *groups, step=0):
  terms = ConfigDict(inforage.get_config(arg).reward.to_dict())
  context = core.RewardContext(step, env=hand.ENV)
  return asyncio.run(core.combine(terms, groups, context)).value.tolist()


def test_golden_values():
  # RIGHT finds a, then b: 1 + .2. WRONG finds a in the second search: .2 / 2.
  # IDLE: 0. THREE: (1 + .2) .95^2. ONCE: 1 + .2.
  group = (*hand.GROUP, THREE, ONCE)
  assert earned('', group) == pytest.approx([1.2, 0.1, 0, 1.2 * 0.9025, 1.2])
  # The best search of RIGHT, and of THREE, finds one of two: .2 / 2.
  assert earned('version=as_released', group) == pytest.approx(
    [1.1, 0.1, 0, 1.1 * 0.9025, 1.2]
  )
  assert earned('scale=1.0,decay=0.5', group) == pytest.approx(
    [2, 0.5, 0, 2 / 4, 2]
  )
  near = hand.play(('p', 'z'), answer='Ann Lee')  # F1 2 / (2 + 1)
  assert earned('', (near,)) == pytest.approx([2 / 3])
  assert earned('outcome=em', (near,)) == [0]


def test_each_trajectory_earns_what_it_found():
  """Whoever else stops early or searches on, in whatever order.

  As released, what is found goes to the trajectory of the same rank among those
  that still search, and to other rows when these are reordered.
  """
  other = dataclasses.replace(hand.QUESTION, id='other', supporting=('x', 'z'))
  second = (
    hand.play(('p', 'x'), question=other),  # 1 + .2 / 2
    hand.play(answer='Bob', question=other),
    hand.play(('p', 'ab'), ('q', 'xz'), question=other),
  )
  alone = {id(t): earned('', (t,))[0] for t in (*hand.GROUP, *second)}
  assert len({*alone.values()}) == 4
  for first in itertools.permutations(hand.GROUP):
    for groups in ((first, second), (second[::-1], first)):
      found = earned('', *groups)
      assert found == [alone[id(t)] for group in groups for t in group]


def test_shuffled_credit_says_nothing_about_who_found_it():
  wrong = tuple(
    hand.play(('p', ids), answer='Bob', sample=n)
    for n, ids in enumerate(('ab', 'z'))
  )
  paid = [earned('credit=shuffled', wrong, step=s) for s in range(20)]
  assert {tuple(pair) for pair in paid} == {
    *itertools.product(*[earned('', wrong)] * 2)
  }


def test_what_is_refused():
  with pytest.raises(DataError, match='no supporting passages.*inforage'):
    checks.check_data(inforage.get_config(), [played.QUESTION])
  with pytest.raises(RewardError, match="version='sound'.*as_written"):
    checks.check_data(inforage.get_config('version=sound'), ())
