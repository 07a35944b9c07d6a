"""A hand-made group: a right trajectory, a wrong one, one that does not search.

    right  reads a x, then b y; answers Ann
    wrong  reads x z, then a x z; answers Bob
    idle   answers Bobby at once

a and b support the question. A token is a byte.
"""

import numpy as np

from searchrl_jax.learn import batching
from searchrl_jax.rewards.core import RewardContext
from searchrl_jax.text import structure
from searchrl_jax.types import Passage, Question, SearchResult
from tests import scripted
from tests.fakes import ByteTokenizer, make_env

ENV = make_env()
QUESTION = Question(
  'q',
  'who?',
  ('Ann',),
  supporting=('a', 'b'),
  meta={'queries': (('who wrote it',), ('where is Ann',))},
)


def attempting(attempts, max_tokens=2000):
  """An environment whose answers are refined, all in one context."""
  return scripted.make(
    ByteTokenizer(),
    'micro_contexts',
    max_turns=2,
    attempts=attempts,
    on_answer='refine',
    max_note_tokens=60,
    max_turn_tokens=200,
    max_tokens=max_tokens,
  )


def play(*searches, answer='Ann', sample=0, question=QUESTION):
  """A trajectory of (query, ids of passages), then an answer or none."""
  state, action = ENV.reset(question)

  def write(text):
    return ENV.step(state, scripted.sample(ENV, action, text))

  for n, (query, found) in enumerate(searches):
    state, action = write(f'<think>{n}</think><search>{query}</search>')
    passages = tuple(Passage(i, i, f'text of {i}') for i in found)
    results = [SearchResult(r, passages) for r in action.requests]
    state, action = ENV.step(state, results)
  if answer is not None:
    state, action = write(f'<think>so</think><answer>{answer}</answer>')
  while state.end is None:  # invalid turns until the limit
    state, action = write('no')
  return ENV.trajectory(state, sample)


RIGHT = play(('who wrote it', 'ax'), ('where is Ann', 'by'))
WRONG = play(('who wrote', 'xz'), ('who', 'axz'), answer='Bob', sample=1)
IDLE = play(answer='Bobby', sample=2)
GROUP = (RIGHT, WRONG, IDLE)
CONTEXT = RewardContext(step=3, env=ENV)


def arrays(group=GROUP):
  """(structure, masks) of the rows."""
  masks = batching.masks(group)
  return structure.of(group, masks), masks


def outcome(group, values):
  """The outcome, on the last loss token of each row."""
  out = []
  for mask, value in zip(batching.masks(group), values, strict=True):
    row = np.zeros(len(mask))
    row[np.flatnonzero(mask)[-1]] = value
    out.append(row)
  return out


def by_turn(s, tokens):
  """For each trajectory, what all tokens of each turn have; 0 elsewhere."""
  out = [[] for _ in s.trajectories]
  for turn, row in enumerate(s.owner):
    own = np.asarray(tokens[row])[s.turns[row] == turn]
    assert (own == own[0]).all()
    out[row].append(float(own[0]))
  for row, turns in enumerate(s.turns):
    assert not np.asarray(tokens[row])[turns < 0].any()
  return out


def credits(rewards, group=GROUP):
  """For each trajectory, the rewards of its last segments, by turn."""
  from searchrl_jax.rewards import progress

  out = []
  for value, t in zip(rewards.value, group, strict=True):
    places = [*progress.last_segments(t).values()]
    out.append([float(value[i]) for i in places])
    assert np.isclose(sum(out[-1]), value.sum())
  return out
