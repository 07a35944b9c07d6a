"""CalibAdv by hand, and the two faults of its release."""

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from configs.methods import calib_adv
from searchrl_jax import checks
from searchrl_jax.data.checks import DataError
from searchrl_jax.text import structure
from searchrl_jax.types import Segment
from tests.methods import group as hand
from tests.methods.group import GROUP, IDLE, RIGHT, WRONG

A, B = 1.154699, -0.577350  # GRPO's of 1 0 0: 2/3 and -1/3 over sqrt(1/3)
LAST = len('<think>so</think><answer>Ann</answer>')  # tokens; Bobby has 2 more


def turns(arg='', group=GROUP, outcome=(1, 0, 0), ids=None, **fields):
  kw = calib_adv.get_config(arg).algorithm.advantage_kw.to_dict()
  kw |= dict(similar=1.0, eps=0.0) | fields
  s, _ = hand.arrays(group)
  found = calib_adv.calibrated(
    np.array(outcome, float),
    [True] * len(group),
    ids or [0] * len(group),
    s,
    **kw,
  )
  return hand.by_turn(s, found)


def same(found, wanted):
  for a, b in zip(found, wanted, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


def test_golden_soft_penalty():
  # The silver set is what the right one read: a x b y. The wrong one's first
  # search found x of x z: q = 1/2. Its second found a x z: x and z came back,
  # two of them, so q = 0 although a is new. The answer has no search.
  same(
    turns('rebalance=False'), [[A, A, A], [B / 2, B, B], [B]]
  )  # fmt: skip
  # The oracle set is a b: x is not in it.
  same(turns('rebalance=False,silver=oracle'), [[A] * 3, [B, B, B], [B]])
  # 0.7 makes a silver set, and nobody reaches it here: none.
  assert turns('rebalance=False', outcome=(0.7, 0, 0))[1][0] > B
  same(turns('rebalance=False', outcome=(0.6, 0, 0)), [[A] * 3, [B] * 3, [B]])


def test_golden_passages_that_come_back():
  # x is of the silver set: q = 1. Then x came back, one alone, and a is new:
  # 1/2 of a x.
  again = hand.play(('w', 'x'), ('w', 'ax'), answer='Bob', sample=1)
  found = turns('rebalance=False', (RIGHT, again, IDLE))
  same(found[1:], [[0, B / 2, B], [B]])


def test_questions_are_compared_apart():
  # In the other one, nobody reaches 0.7.
  other, scores = (WRONG, RIGHT), (0, 0.6)
  both = (*GROUP, *other), (1, 0, 0, *scores)
  alone = turns() + turns('', other, scores)
  same(turns('', *both, ids=[0] * 3 + [1] * 2), alone)


def test_the_control_moves_what_is_spared_between_turns_alone():
  # The wrong one has q = 1/2 0 0.
  found = set()
  for i in range(12):
    searches = ('who wrote', 'xz'), ('who', 'axz')
    wrong = hand.play(*searches, answer='Bob', sample=i)
    group = RIGHT, wrong, IDLE
    moved = turns('rebalance=False', group, shuffle=True)[1]
    found.add(tuple(np.round(moved, 3).tolist()))
  low, high = -0.577, -0.289
  assert found == {(high, low, low), (low, high, low), (low, low, high)}


def test_golden_rebalance():
  # Last turns: 37 tokens of A, 37 of B and 39 of B. The positive one is scaled
  # by 76 x 0.57735 / (37 x 1.1547) = 76 / 74.
  assert LAST == 37
  same(turns('soft=False'), [[A, A, A * 76 / 74], [B] * 3, [B]])
  same(turns(), [[A, A, A * 76 / 74], [B / 2, B, B], [B]])


def test_a_group_with_one_sign_has_nothing_to_rebalance():
  cut = hand.play(('w', 'a'), answer=None, sample=1)
  group = (RIGHT, cut)
  # Only the right one answers: no negative sum, so its last turn gets 0.
  r = 0.707107
  found = turns(group=group, outcome=(1, 0))
  np.testing.assert_allclose(found[0], [r, r, 0], atol=1e-5)
  np.testing.assert_allclose(found[1], [-r] * len(found[1]), atol=1e-5)


def test_a_run_cut_short_is_rebalanced_as_released_alone():
  cut = hand.play(('w', 'x'), answer=None, sample=2)
  kept, released = (
    turns(f'version={v}', (RIGHT, WRONG, cut)) for v in ('sound', 'as_released')
  )
  # Sound: 37 tokens each way: A becomes 37 B / 37 = .57735 in size.
  assert kept[0][-1] == pytest.approx(-B, abs=1e-5)
  # Released: its last turn, "no" and eos, counts 3 tokens more.
  assert released[0][-1] == pytest.approx(-B * 40 / 37, abs=1e-5)


def test_an_answer_after_an_invalid_action_is_rebalanced():
  group = [dataclasses.replace(t, invalid_actions=1) for t in (WRONG, IDLE)]
  # 76 tokens of B against 37 of A, as in the golden values.
  found = turns('soft=False', (RIGHT, *group))
  same(found, [[A, A, A * 76 / 74], [B] * 3, [B]])


@settings(max_examples=20, deadline=None)
@given(
  st.floats(0.25, 4.0), st.lists(st.integers(0, 1), min_size=4, max_size=4)
)
def test_the_sums_have_the_ratio_that_is_asked_for(ratio, outcome):
  """As released they have its inverse."""
  group = [hand.play(answer='x' * (i + 1), sample=i) for i in range(4)]
  s, _ = hand.arrays(group)
  tokens = np.array([(s.turns[i] >= 0).sum() for i in range(4)])
  for version, wanted in (('sound', ratio), ('as_released', 1 / ratio)):
    found = turns(f'version={version},ratio={ratio}', group, outcome)
    x = tokens * np.array([t[-1] for t in found])
    if len({*outcome}) == 1:
      assert not x.any()
    else:
      assert x[x > 0].sum() == pytest.approx(-wanted * x[x < 0].sum(), rel=1e-4)


@settings(max_examples=20, deadline=None)
@given(
  st.lists(st.integers(0, 1), min_size=3, max_size=3),
  st.sampled_from(['silver=group', 'silver=oracle']),
)
def test_only_wrong_trajectories_are_spared_and_never_pushed_up(
  outcome, silver
):
  plain = turns('soft=False,rebalance=False', outcome=outcome)
  found = turns(f'rebalance=False,{silver}', outcome=outcome)
  for a, b in zip(np.concatenate(plain), np.concatenate(found), strict=True):
    assert b == a if a >= 0 else a <= b <= 0


def test_a_malformed_trajectory_is_not_spared_and_makes_no_silver_set():
  bad = dataclasses.replace(WRONG, invalid_actions=1)
  same(turns('rebalance=False', (RIGHT, bad, IDLE))[1:], [[B] * 3, [B]])
  cut = dataclasses.replace(WRONG, end='tokens')
  same(turns('rebalance=False', (RIGHT, cut, IDLE))[1:], [[B] * 3, [B]])
  bad = dataclasses.replace(RIGHT, invalid_actions=1)
  same(turns('rebalance=False', (bad, WRONG, IDLE))[1:], [[B] * 3, [B]])


def test_thoughts_that_are_alike():
  # One of four is another; one was added; nothing is shared.
  assert calib_adv.alike([1, 2, 3, 4], [1, 9, 3, 4]) == 0.75
  assert calib_adv.alike([1, 2, 3], [1, 2, 3, 4]) == 0.75
  assert calib_adv.alike([1, 2], [3, 4]) == 0.0
  assert calib_adv.alike([], []) == 1.0 == calib_adv.alike([5], [5])
  assert calib_adv.alike([1, 2, 3, 4], [2, 3, 4, 1]) == 0.5


def test_a_repeated_thought_makes_its_search_worthless():
  def thinking(ids):
    """WRONG, whose second thought is these tokens between tags."""
    segments, seen = [], 0
    for x in WRONG.segments:
      if x.kind == 'think':
        seen += 1
        new = [7, *([1, 2, 3, 4] if seen == 1 else ids), 8]
        x = Segment(np.array(new, np.int32), 'policy', 'think', train=True)
      segments.append(x)
    t = dataclasses.replace(WRONG, segments=tuple(segments))
    return structure.spans_of(
      dataclasses.replace(t, searches=(t.searches[0],) + RIGHT.searches[1:])
    )

  # The second search found b y, both of the silver set; 3/4 and 1/2 are alike.
  similar = calib_adv.get_config().algorithm.advantage_kw.similar
  for ids, q in (
    ([5, 6], 1.0),
    ([1, 2, 3, 4], 0.0),
    ([1, 2, 3, 9], 0.0),
    ([1, 2, 9, 9], 1.0),
  ):
    assert calib_adv.quality(thinking(ids), 'by', similar) == {0: 0.0, 1: q}


def test_what_it_needs_and_its_arguments():
  bare = dataclasses.replace(hand.QUESTION, supporting=())
  checks.check_data(calib_adv.get_config(), [bare])
  c = calib_adv.get_config('silver=oracle')
  checks.check(c)
  with pytest.raises(DataError, match='supporting.*config.algorithm.advantage'):
    checks.check_data(c, [bare])
  for field, value, what in (
    ('silver', 'gold', "silver='gold'.*group, oracle"),
    ('ratio', 0.0, 'ratio=0.0'),
  ):
    c = calib_adv.get_config(f'{field}={value}')
    with pytest.raises(ValueError, match=what):
      checks.check(c)
