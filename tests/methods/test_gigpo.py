"""GiGPO: both levels by hand, and who counts how often in the episode's."""

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np

from configs.methods import gigpo
from tests.methods import group as hand
from tests.methods.group import GROUP, IDLE, RIGHT, WRONG


def turns(
  arg='', group=GROUP, outcome=(1, 0, 0), valid=None, ids=None, **fields
):
  kw = gigpo.get_config(arg).algorithm.advantage_kw.to_dict() | fields
  s, masks = hand.arrays(group)
  valid = [True] * len(group) if valid is None else valid
  values, ids = hand.outcome(group, outcome), ids or [0] * len(group)
  found = gigpo.two_levels(values, valid, ids, masks, s, **kw)
  return hand.by_turn(s, found)


def same(found, wanted):
  for a, b in zip(found, wanted, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-4)


def test_golden_values():
  # Episode, 1 0 0: mean 1/3, deviation sqrt(1/3) = .57735: 1.1547, -.57735 x 2.
  # Step: returns to go .81 .9 1 (discount .9 a turn), 0 0 0, 0. First turns
  # follow nothing: .81 0 0, normalised, is 1 0 0, normalised. The second and
  # third turns of right and wrong follow a x and x z, b y and a x z: alone, 0.
  a = 1.1547
  same(turns(), [[2 * a, a, a], [-a, -a / 2, -a / 2], [-a]])
  same(turns('weight=0'), [[a] * 3, [-a / 2] * 3, [-a / 2]])


def test_golden_discount():
  # Both are right, after two searches and one. First turns: .81 .9 0, mean .57,
  # squared deviations .0576 + .1089 + .3249 = .4914, / 2, root .49568: .48418
  # .66575 -1.14993. Episode, 1 1 0: mean 2/3, root 1/3 = .57735: .57735 twice,
  # -1.15470. No other turns are alike.
  short = hand.play(('who wrote it', 'a'), sample=1)
  e, group = 0.57735, (RIGHT, short, IDLE)
  wanted = [[e + 0.48418, e, e], [e + 0.66575, e], [-1.15470 - 1.14993]]
  same(turns(group=group, outcome=(1, 1, 0)), wanted)


def test_questions_are_compared_apart():
  other = (WRONG, RIGHT)
  both = (*GROUP, *other), (1, 0, 0, 0, 1)
  for arg in ('', 'version=as_released'):
    alone = turns(arg) + turns(arg, other, (0, 1))
    same(turns(arg, *both, ids=[0, 0, 0, 1, 1]), alone)


def test_golden_as_released():
  # Each trajectory counts for each of its turns: 1 1 1 0 0 0 0. Mean 3/7,
  # squared deviations 3 (4/7)^2 + 4 (3/7)^2 = 12/7, / 6 = 2/7; its root .53452.
  # (4/7) / .53452 = 1.06904; -(3/7) / .53452 = -.80178.
  same(
    turns('version=as_released,weight=0'),
    [[1.06904] * 3, [-0.80178] * 3, [-0.80178]],
  )


def test_turns_that_read_the_same_are_compared():
  # Both read a and x, in any order: the second turns share a state, in which
  # one earned 1 and the other 0: +-.7071 of two, as do the first turns.
  group = (
    hand.play(('w', 'ax')), hand.play(('v', 'xa'), answer='Bob', sample=1),
  )  # fmt: skip
  r = 0.70711
  same(turns(group=group, outcome=(1, 0)), [[2 * r] * 2, [-2 * r] * 2])


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 3))
def test_a_further_turn_of_a_wrong_trajectory_changes_no_others_episode(n):
  """As released it does: a long trajectory weighs more."""
  longer = hand.play(*[('w', 'x')] * n, answer='Bob', sample=1)
  short = hand.play(answer='Bob', sample=1)

  def episode(version, other):
    group = (GROUP[0], other, GROUP[2])
    return turns(f'version={version},weight=0', group)[0][0]

  assert episode('sound', longer) == episode('sound', short)
  assert episode('as_released', longer) > episode('as_released', short) + 0.1


def test_a_failed_trajectory_is_in_no_statistic():
  valid = [True, True, False]
  found = turns(valid=valid)
  assert found[2] == [0.0]
  same(turns(group=GROUP[:2], outcome=(1, 0)), found[:2])


def test_the_control_moves_steps_between_turns_alone():
  # Of the wrong one the steps are -.57735 0 0, the episode's -.57735 each.
  found = set()
  for i in range(12):
    searches = ('who wrote', 'xz'), ('who', 'axz')
    wrong = hand.play(*searches, answer='Bob', sample=i)
    moved = turns(shuffle=True, group=(GROUP[0], wrong, GROUP[2]))[1]
    found.add(tuple(np.round(moved, 3).tolist()))
  low, high = -0.577, -1.155
  assert found == {(high, low, low), (low, high, low), (low, low, high)}
