"""ParallelSearch: the released reward, and that right answers earn most."""

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from configs.methods import parallel_search
from searchrl_jax import checks
from searchrl_jax.data.checks import DataError
from searchrl_jax.rewards.core import RewardError
from tests.methods import played

PARALLEL = dataclasses.replace(played.QUESTION, hops=2, meta={'parallel': True})
CHAIN = dataclasses.replace(PARALLEL, hops=3, meta={'parallel': False})


def made(*queries, text='Ann', question=PARALLEL, bad=False):
  turns = [*['hm'] * bad, *map(played.search, queries), played.says(text)]
  return played.attempt(*turns, question=question)


def earned(arg, *group, step=0):
  return played.earned(parallel_search, arg, *group, step=step)


def test_golden_values_of_the_release():
  # Right and split: 1 + .45 + .35 (1 - 0) = 1.8. Right, two searches: 1 + 0 +
  # .35 (1 - 1) = 1. Malformed, three: .9 + .35 (1 - 2) = .55. Wrong and split:
  # .1 + .8 = .9. Idle and wrong: .1 + 0 + .35 (1 - 1) = .1.
  group = (
    made('a & b'),
    made('a', 'b'),
    made('a', 'b', 'c', bad=True),
    made('a & b', text='Bob'),
    made(text='Bob'),
  )
  assert earned('version=as_released', *group) == pytest.approx(
    [1.8, 1, 0.55, 0.9, 0.1]
  )
  three = made('a', 'b', 'c')
  assert earned('version=as_released', three) == pytest.approx([0.65])
  # Right ones alone earn the shape, and three searches subtract nothing.
  assert earned('', *group) == pytest.approx([1.8, 1, 0.9, 0.1, 0.1])
  assert earned('scale=0.5', *group[:2]) == pytest.approx([1.4, 1])


def test_the_first_search_is_the_one_to_split():
  # 1 + 0 + .35 (1 - 1).
  assert earned('', made('c', 'a & b')) == [1]


def test_golden_values_of_a_chain():
  # Not split: .15. Released: two or more searches .35, one 0, none -.35.
  group = [made(*'abcd'[:n], question=CHAIN) for n in (0, 1, 2, 4)]
  group.append(made('a & b', 'c', question=CHAIN))
  assert earned('version=as_released', *group) == pytest.approx(
    [0.8, 1.15, 1.5, 1.5, 1.35]
  )
  # A chain of unknown length needs two.
  unknown = dataclasses.replace(CHAIN, hops=0)
  found = earned('', *[made(*'ab'[:n], question=unknown) for n in (1, 2)])
  assert found == pytest.approx([1.15, 1.5])
  # Three hops: 3 or more searches .35, two 0.
  assert earned('', *group) == pytest.approx([1.15, 1.15, 1.15, 1.5, 1])


@settings(max_examples=25, deadline=None)
@given(
  *[st.lists(st.sampled_from(['a', 'b & c', 'd']), max_size=4)] * 2,
  st.booleans(),
  st.sampled_from([PARALLEL, CHAIN]),
)
def test_a_right_answer_earns_more_than_a_wrong_one(one, other, bad, question):
  """As released, .55 for a right one and .9 for a wrong one, as above."""
  right = made(*one, question=question, bad=bad)
  wrong = made(*other, text='Bob', question=question)
  [a, b] = earned('', right, wrong)
  assert round(a, 5) >= 0.9 > 0.1 >= round(b, 5)


def test_shuffled_shapes_stay_among_equal_outcomes():
  group = (made('a & b'), made('a', 'b'), made('a', text='Bob'))
  group = [dataclasses.replace(t, sample=i) for i, t in enumerate(group)]
  paid = {tuple(earned('credit=shuffled', *group, step=s)) for s in range(20)}
  assert {round(row[2], 3) for row in paid} == {0.1}
  assert {round(x, 3) for row in paid for x in row[:2]} == {1.8, 1}
  assert len(paid) == 4


def test_what_is_refused():
  with pytest.raises(DataError, match=r"meta\['parallel'\].*reward.parallel"):
    checks.check_data(parallel_search.get_config(), [played.QUESTION])
  c = parallel_search.get_config()
  c.env.template = 'micro'
  with pytest.raises(RewardError, match="'micro'.*query_sep"):
    checks.check_data(c, ())
  full = parallel_search.get_config('base=search_r1,model=x')
  assert full.env.template == 'parallel'
  assert full.reward.parallel.require_think
