"""What a note says, in the exact form of generated worlds."""

import pytest

from searchrl_jax.rewards import blocks


@pytest.mark.parametrize(
  'notes, f1',
  [
    (['home Mukwick'], 1),
    (['teacher Kova Len; home Mukwick.'], 1),
    (['both Mukwick'], 1),
    (['home Mukwick Tenwick'], 2 / 3),  # 2 / (1 + 2)
    (['home Mukwick', 'craft weaver'], 1),
    (['home Mukwick', 'home Tenwick'], 0),  # the last place
    (['home Tenwick, home Mukwick'], 1),
    (['home'], 0),
    (['hometown Mukwick'], None),
    (['Mukwick'], None),
    ([''], None),
    ([], None),
  ],
)
def test_what_notes_say_of_a_relation(notes, f1):
  found = blocks.fact_f1(notes, 'home', 'Mukwick')
  assert found == (f1 if f1 is None else pytest.approx(f1))


def test_values_that_are_named_in_turn_earn_no_more_than_one():
  """A policy that lists all values is paid for the last."""
  towns = ['Tenwick', 'Mukwick', 'Sormar']
  listed = [f'home {town}' for town in towns]
  assert blocks.fact_f1(listed, 'home', 'Mukwick') == 0
  assert blocks.fact_f1(['; '.join(listed)], 'home', 'Mukwick') == 0
