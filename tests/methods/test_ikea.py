"""IKEA: the released table, and tags that are no searches."""

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from configs.methods import ikea
from searchrl_jax import checks
from searchrl_jax.data.checks import DataError
from searchrl_jax.rewards.core import RewardError
from tests.methods import played

ASKED = dataclasses.replace(
  played.QUESTION, meta={'known': False, 'recalled': (False, True)}
)


def after(n, text='Ann', thought='so'):
  turns = [played.search(f'x{i}') for i in range(n)]
  last = f'<think>{thought}</think>\n<answer>{text}</answer>'
  return played.attempt(*turns, last, question=ASKED)


def test_golden_values():
  # Right: 1 + .6, .4, .2, 0, 0; wrong .05 or 0; an invalid turn -1, though the
  # answer is right; no thought, or an empty one, -1.
  group = [after(n) for n in (0, 1, 2, 3, 4)]
  group += [after(1, 'Bob'), after(0, 'Bob')]
  group += [
    played.attempt('hm', played.says('Ann'), question=ASKED),
    played.attempt('<answer>Ann</answer>', question=ASKED),
    after(0, thought=''),
  ]
  wanted = [1.6, 1.4, 1.2, 1, 1, 0.05, 0, -1, -1, -1]
  assert earned('', *group) == pytest.approx(wanted)
  assert earned('version=as_released', *group) == pytest.approx(wanted)
  assert earned('bonus=0.3', *group[:2]) == pytest.approx([1.3, 1.2])


def earned(arg, *group):
  return played.earned(ikea, arg, *group)


def test_a_search_for_two_things_is_two():
  """As released it is one, by its tag."""
  both = played.attempt(
    played.search('a & b'), played.says('Ann'), question=ASKED
  )
  assert earned('', both) == pytest.approx([1.2])
  assert earned('version=as_released', both) == pytest.approx([1.4])


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 3), st.integers(1, 3))
def test_a_tag_in_a_thought_is_no_search(searches, forged):
  forging = after(searches, thought='<search>' * forged)
  honest = after(searches)
  [a, b] = earned('', forging, honest)
  assert a == b
  [a, b] = earned('version=as_released', forging, honest)
  assert a < b or searches == 3


def test_the_oracle_counts_what_is_beyond_the_need():
  # One search is needed: 0 and 1 cost nothing, the second .2.
  found = earned('credit=oracle', *[after(n) for n in (0, 1, 2)])
  assert found == pytest.approx([1.6, 1.6, 1.4])


def test_what_is_refused():
  with pytest.raises(DataError, match=r"meta\['known'\].*config.reward.ikea"):
    checks.check_data(ikea.get_config(), [played.QUESTION])
  with pytest.raises(RewardError, match="version='as_writen'"):
    checks.check_data(ikea.get_config('version=as_writen'), ())
