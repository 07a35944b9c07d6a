"""Shuffled credit says nothing about who earned it."""

import collections

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from searchrl_jax.lookup import ConfigError
from searchrl_jax.rewards import ablations
from searchrl_jax.types import Question, Trajectory


def group(n, id='q'):
  return [Trajectory(Question(id, ''), (), (), 'answer', i) for i in range(n)]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.integers(0, 99))
def test_a_draw_has_the_same_outcome_and_depends_on_names_alone(outcomes, step):
  found = ablations.drawn(group(len(outcomes)), outcomes, step)
  assert [outcomes[i] for i in found] == outcomes
  assert found == ablations.drawn(group(len(outcomes)), outcomes, step)


def test_every_one_of_the_outcome_is_drawn_as_often_itself_included():
  counts = collections.Counter()
  for step in range(600):
    found = ablations.drawn(group(4), 'aaba', step)
    assert found[2] == 2
    counts.update((i, found[i]) for i in (0, 1, 3))
  # 600 draws over 3: 200, with a deviation of sqrt(600 / 3 * 2 / 3) = 12.
  assert len(counts) == 9
  assert all(abs(n - 200) < 60 for n in counts.values())


def test_questions_and_steps_draw_apart():
  every = {
    tuple(ablations.drawn(group(8, id), 'a' * 8, step))
    for id in 'qr'
    for step in range(4)
  }
  assert len(every) == 8


def test_a_value_that_is_not_allowed_is_named():
  with pytest.raises(ConfigError, match="credit='shufled'.*'shuffled'"):
    ablations.choose({'credit': 'shufled'}, credit=ablations.CREDITS)
