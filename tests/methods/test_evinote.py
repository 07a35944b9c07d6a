"""EviNote-RAG by hand, and the faults of its release."""

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from configs.methods import evinote
from searchrl_jax import checks
from searchrl_jax.data.checks import DataError
from searchrl_jax.rewards.core import RewardError
from tests.methods import played

GOLD = 'Ann ' + ' '.join(f'w{i}' for i in range(38))  # 39 words
ASKED = dataclasses.replace(
  played.QUESTION,
  answers=(GOLD, 'Mukwick'),
  meta={'facts': (('Kova Len', 'home', 'Mukwick'),)},
)


def noted(*notes, says='Bob'):
  written = ''.join(f'<refine>{note}</refine>\n' for note in notes)
  said = written + played.says(says)
  return played.attempt(played.search(), said, question=ASKED)


def earned(arg, *group):
  return played.earned(evinote, arg, *group)


def test_golden_values():
  group = (
    noted('home Mukwick', says='Mukwick'),  # 1 + 1
    noted('*home* Mukwick'),  # .1 + 1
    noted('it is *here*'),  # .1 + 0
    noted('nothing'),  # 0 + 0; .1 as released
    noted('*nothing'),  # one asterisk: the same
    noted(),  # no note: 0
    # One word of 39 (F1 2 / (1 + 39) = .05): .1; as released .05.
    noted('it is *here*', says='Ann'),
    # The last of two notes counts, in both terms; any, as released.
    noted('*home* Mukwick', 'hm'),
  )
  assert earned('', *group) == pytest.approx([2, 1.1, 0.1, 0, 0, 0, 0.1, 0])
  assert earned('version=as_released', *group) == pytest.approx(
    [2, 1.1, 0.1, 0.1, 0.1, 0, 0.05, 0.1]
  )
  assert earned('scale=0.5,bonus=0.0', *group[:3]) == pytest.approx(
    [1.5, 0.5, 0]
  )


@settings(max_examples=20, deadline=None)
@given(st.text('abc ', min_size=1, max_size=9))
def test_a_note_without_a_mark_earns_nothing(note):
  """As released, the prompt's own marks pay for it."""
  [sound] = earned('', noted(note))
  [released] = earned('version=as_released', noted(note))
  assert sound == 0 and released == pytest.approx(0.1)


WORDS = GOLD.split()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 39), st.integers(0, 39), st.sampled_from(['hm', '*a*']))
def test_a_better_answer_earns_no_less(some, more, note):
  answers = [' '.join(WORDS[:n]) or 'Bob' for n in sorted((some, more))]
  [a, b] = earned('', *[noted(note, says=text) for text in answers])
  assert a <= b


def test_notes_that_cannot_be_read_shift_no_other_reward():
  """As released, empty and long notes are dropped before probabilities are."""
  notes = ('', 'home Mukwick', 'x ' * 150, 'home Mukwick', 'hm')
  group = [noted(note) for note in notes]
  assert earned('', *group) == [x for t in group for x in earned('', t)]
  assert earned('', *group) == [0, 1, 0, 1, 0]


def test_what_is_refused():
  with pytest.raises(DataError, match=r"meta\['facts'\].*reward.entailed"):
    checks.check_data(evinote.get_config(), [played.QUESTION])
  with pytest.raises(RewardError, match="outcome='en'"):
    checks.check_data(evinote.get_config('outcome=en'), ())
  with pytest.raises(ValueError, match="credit='oracle'"):
    evinote.get_config('credit=oracle')
  full = evinote.get_config('base=search_r1,model=x')
  assert full.env.template == 'summary'
  checks.check_data(full, [ASKED])
