"""Shortcuts are measured, and a world with one is refused."""

import pytest

from experiments.arena import shortcuts
from searchrl_jax.types import Question
from searchrl_jax.worlds import atlas

SMALL = dict(train=60, heldout=40, known=20)


def ask(text: str, relation: str, answer: str) -> Question:
  meta = dict(facts=(('A B', relation, answer),))
  return Question(text, text, (answer,), meta=meta)


def test_the_readers_of_train_questions():
  train = [
    ask("What is A B's home?", 'home', 'Tenwick'),
    ask("What is C D's home?", 'home', 'Sormar'),
    ask("What is E F's home?", 'home', 'Sormar'),
    ask("What is E F's craft?", 'craft', 'potter'),
  ]
  assert shortcuts.by_relation(train) == {'home': 'Sormar', 'craft': 'potter'}
  # What, is, A, s, home: five words in common with the first, four with the
  # other two that ask for a home.
  assert shortcuts.nearest(ask("What is A D's home?", 'home', ''), train) in (
    'Tenwick', 'Sormar',
  )  # fmt: skip
  assert shortcuts.nearest(ask("What is A B's craft?", '', ''), train) == (
    'Tenwick'
  )


def test_a_leak_is_above_the_bar(monkeypatch):
  def measured():
    found = shortcuts.shortcuts(0, SMALL)
    return {
      name: {kind: [sum(v) / len(v)] for kind, v in kinds.items()}
      for name, kinds in found.items()
    }

  clean = measured()
  assert clean['first@1']['known'][0] > 0.9 > 0.05 >= clean['bare@1']['1hop'][0]
  # Passages that use the words of questions are found by them.
  words = {
    section: {relation: (relation, relation) for relation in pair}
    for section, pair in atlas.SECTIONS.items()
  }
  monkeypatch.setattr(atlas, 'SECTIONS', words)
  monkeypatch.setattr(
    atlas, 'passage', lambda name, section, stated, form, words_: (
      f'{name} {stated}'
    ),
  )  # fmt: skip
  leaky = measured()
  found = shortcuts.failures(leaky, 1)
  assert any(line.startswith('bare@1, 1hop: ') for line in found)
  assert not any('known' in line for line in found)


@pytest.mark.parametrize('value, failed', [(0.05, []), (0.06, ['1hop'])])
def test_the_bar(value, failed):
  kinds = dict.fromkeys(atlas.KINDS, [0.0]) | {'1hop': [value], 'known': [1.0]}
  rows = dict.fromkeys(('frequent', 'closed book', 'bare@1'), kinds)
  found = shortcuts.failures(rows, 1)
  assert len(found) == 3 * len(failed)
  assert all(kind in line for line in found for kind in failed)
