"""OTC: the paper's formula by hand, and that wrong answers cannot earn."""

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from configs.methods import otc
from searchrl_jax import checks
from searchrl_jax.data.checks import DataError
from searchrl_jax.rewards import core
from searchrl_jax.rewards.core import RewardError
from searchrl_jax.types import Question
from tests.methods.played import after, attempt, earned, says, search

# Right after 2 and 4 searches, wrong after 1, wrong and idle.
GROUP = (after(2), after(4, sample=1), after(1, 'Bob', 2), after(0, 'Bob', 3))


def test_golden_values():
  # n = 2. m = 2: f = 2 2 2 / 4 = 2, sin(2 pi / 4) = 1. m = 4: f = 2 2 4 / 6 =
  # 8/3, sin(8/3 pi / 4) = sin(2 pi / 3) = .86603.
  assert earned(otc, '', *GROUP) == pytest.approx([1, 0.86603, 0, 0], abs=1e-5)
  # s = .5: 1 - .5 + .5 .86603 = .93301.
  found = earned(otc, 'scale=0.5', *GROUP)
  assert found == pytest.approx([1, 0.93301, 0, 0], abs=1e-5)


def test_golden_values_of_a_question_that_needs_no_search():
  # n = 0, smoothing 6: cos(0) = 1; m = 3: cos(3 pi / 12) = .70711.
  found = earned(otc, '', after(0), after(3, sample=1), after(0, 'Bob', 2))
  assert found == pytest.approx([1, 0.70711, 0], abs=1e-5)


def test_golden_values_without_groups():
  # m = 2: cos(2 pi / 10) = .80902; m = 4: cos(4 pi / 14) = .62349.
  found = earned(otc, 'form=ppo', *GROUP)
  assert found == pytest.approx([0.80902, 0.62349, 0, 0], abs=1e-5)


def test_golden_values_of_the_ports():
  # .7 R + .3 r: .7 + .3; .7 + .3 .86603; wrong, m = 1: .3 sin(pi / 3) = .25981.
  found = earned(otc, 'version=ports,scale=0.3', *GROUP)
  assert found == pytest.approx([1, 0.95981, 0.25981, 0], abs=1e-5)


def test_what_counts_and_the_constant():
  # A search for two things is two: n = 1, m = 2: sin(2 pi / 3) = .86603.
  found = earned(otc, '', attempt(search('a & b'), says('Ann')), after(1))
  assert found == pytest.approx([0.86603, 1], abs=1e-5)
  c = otc.get_config()
  c.env.max_turns = 3
  assert c.reward.otc.smoothing == 3


def test_shuffled_searches_stay_among_equal_outcomes():
  paid = {
    tuple(round(x, 3) for x in earned(otc, 'credit=shuffled', *GROUP, step=i))
    for i in range(20)
  }
  assert paid == {(a, b, 0, 0) for a in (1, 0.866) for b in (1, 0.866)}


@settings(max_examples=30, deadline=None)
@given(
  st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=5),
  st.sampled_from(['grpo', 'ppo']),
)
def test_the_fewest_earn_most_and_wrong_answers_nothing(made, form):
  """The ports pay wrong answers, as above."""
  group = [
    after(m, 'Ann' if ok else 'Bob', i) for i, (m, ok) in enumerate(made)
  ]
  found = earned(otc, f'form={form}', *group)
  right = sorted((m, -x) for (m, ok), x in zip(made, found) if ok)
  assert all(x == 0 for (_, ok), x in zip(made, found) if not ok)
  assert [x for _, x in right] == sorted(x for _, x in right)
  assert all(0 < -x <= 1 + 1e-6 for _, x in right)
  if right and form == 'grpo':
    assert -right[0][1] == pytest.approx(1)


def test_the_oracle_compares_with_what_is_needed():
  asked = Question('q', 'w?', ('Ann',), meta={'recalled': (False, False)})
  lucky = attempt(search(), says('Ann'), question=asked)
  # n = 2, m = 1: sin(pi / 3), though no sibling had fewer.
  [found] = earned(otc, 'credit=oracle', lucky)
  assert found == pytest.approx(0.86603, abs=1e-5)
  with pytest.raises(DataError, match=r"meta\['recalled'\].*reward.otc"):
    earned(otc, 'credit=oracle', after(1))


def test_a_single_greedy_answer_has_no_group_to_compare_with():
  c = otc.get_config()
  c.algorithm.advantage = 'remax'
  with pytest.raises(RewardError, match='config.algorithm.advantage'):
    core.check(c)
  c.reward.otc.form = 'ppo'
  core.check(c)


def test_what_is_refused():
  c = otc.get_config()
  c.rollout.group = 1
  with pytest.raises(RewardError, match="form='grpo'.*form='ppo'"):
    checks.check_data(c, ())
  with pytest.raises(RewardError, match="version='port'.*'ports'"):
    checks.check_data(otc.get_config('version=port'), ())
  with pytest.raises(RewardError, match='scale=2.0'):
    checks.check_data(otc.get_config('scale=2.0'), ())
  checks.check(otc.get_config('form=ppo'))
