"""AutoRefine: the released reward, and that a better answer earns no less."""

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from configs.methods import autorefine
from searchrl_jax import checks
from searchrl_jax.data.checks import DataError
from searchrl_jax.rewards.core import RewardError
from tests.methods import played

GOLD = 'Ann ' + ' '.join(f'w{i}' for i in range(38))  # 39 words
ASKED = dataclasses.replace(played.QUESTION, answers=(GOLD, 'no'))


def noted(note, text, question=ASKED):
  said = f'<refine>{note}</refine>\n{played.says(text)}'
  return played.attempt(played.search(), said, question=question)


def earned(arg, *group, step=0):
  return played.earned(autorefine, arg, *group, step=step)


def test_golden_values():
  # Right; one word of 39 (F1 2 / (1 + 39) = .05) with and without evidence;
  # wrong with and without; right notes, but no answer; idle.
  group = (
    noted('hm', 'no'),
    noted('it is no', 'Ann'),
    noted('hm', 'Ann'),
    noted('it is no', 'Bob'),
    noted('hm', 'Bob'),
    played.attempt('<refine>no</refine>', *['hm'] * 6, question=ASKED),
    played.attempt(played.says('Bob'), question=ASKED),
  )
  assert earned('', *group) == pytest.approx([1, 0.1, 0.05, 0.1, 0, 0, 0])
  assert earned('version=as_released', *group) == pytest.approx(
    [1, 0.05, 0.05, 0.1, 0, 0, 0]
  )
  assert earned('outcome=em,bonus=0.3', *group) == pytest.approx(
    [1, 0.3, 0, 0.3, 0, 0, 0]
  )


def test_a_golden_answer_within_a_word_is_no_evidence():
  group = (noted('I know', 'Bob'),)
  assert earned('', *group) == [0]
  assert earned('version=as_released', *group) == pytest.approx([0.1])


def test_any_complete_note_counts():
  first = played.attempt(
    played.search(),
    f'<refine>it is no</refine>\n{played.search()}',
    f'<refine>hm</refine>\n{played.says("Bob")}',
    question=ASKED,
  )
  turns = played.search(), '<refine>it is no', played.says('Bob')
  for arg in ('', 'version=as_released'):
    found = earned(arg, first, played.attempt(*turns, question=ASKED))
    assert found == pytest.approx([0.1, 0])


WORDS = GOLD.split()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 39), st.integers(0, 39), st.sampled_from(['hm', 'no']))
def test_a_better_answer_earns_no_less(some, more, note):
  """As released it can: F1 .05 is worth less than 0, as above."""
  answers = [' '.join(WORDS[:n]) or 'Bob' for n in sorted((some, more))]
  [a, b] = earned('', *[noted(note, text) for text in answers])
  assert a <= b


def test_controls():
  question = dataclasses.replace(
    played.QUESTION,
    meta={
      'facts': (('A B', 'teacher', 'Kova Len'), ('Kova Len', 'home', 'Ann')),
      'recalled': (False, False),
    },
  )
  note = lambda text, n: dataclasses.replace(
    noted(text, 'Bob', question), sample=n
  )
  # Both, one and none of two facts: a note of everything is none.
  both = played.attempt(
    played.search(),
    f'<refine>teacher Kova Len</refine>\n{played.search()}',
    f'<refine>home Ann</refine>\n{played.says("Bob")}',
    question=question,
  )
  group = (both, note('home Ann', 1), note('teacher Kova Len home Ann', 2))
  assert earned('credit=oracle', *group) == pytest.approx([0.1, 0.05, 0])
  with pytest.raises(DataError, match=r"meta\['facts'\].*reward.autorefine"):
    earned('credit=oracle', noted('hm', 'Bob'))
  # Shuffled: what one of two wrong ones noted is paid to either of them.
  group = (note('home Ann', 0), note('hm', 1))
  paid = {tuple(earned('credit=shuffled', *group, step=s)) for s in range(20)}
  assert len(paid) == 4


def test_what_is_refused():
  c = autorefine.get_config()
  c.env.template = 'micro'
  with pytest.raises(RewardError, match="'refine'.*micro_notes"):
    checks.check_data(c, ())
  with pytest.raises(RewardError, match="outcome='en'"):
    checks.check_data(autorefine.get_config('outcome=en'), ())
  full = autorefine.get_config('base=search_r1,model=x')
  assert full.env.template == 'refine'
