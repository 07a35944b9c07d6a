"""Trajectories of a policy in atlas's template, and what a method pays them.

A token is a byte. `search` and `says` are turns.
"""

import asyncio
import functools

from ml_collections import ConfigDict

from searchrl_jax.rewards import core
from searchrl_jax.text.states import Search
from searchrl_jax.types import Passage, Question, SearchResult
from tests import fakes, scripted

ENV = scripted.make(
  fakes.ByteTokenizer(), 'micro_notes', max_turns=6, max_turn_tokens=400
)
QUESTION = Question('q', 'who?', ('Ann',))


def search(query='x') -> str:
  return f'<think>find</think>\n<search>{query}</search>'


def says(text) -> str:
  return f'<think>so</think>\n<answer>{text}</answer>'


def attempt(*turns, sample=0, question=QUESTION):
  state, _ = scripted.play(ENV, turns, question=question)
  return ENV.trajectory(state, sample)


def reads(env, turns, found, sample=0, question=QUESTION):
  """An attempt whose nth search finds the nth of `found`, ids of passages."""
  state, action = env.reset(question)
  turns, found = iter(turns), iter(found)
  while state.end is None:
    if isinstance(action, Search):
      passages = tuple(Passage(i, i, f'text of {i}') for i in next(found))
      event = [SearchResult(r, passages) for r in action.requests]
    else:
      event = scripted.sample(env, action, next(turns))
    state, action = env.step(state, event)
  return env.trajectory(state, sample)


@functools.cache
def after(searches: int, text='Ann', sample=0):
  """Searches so many times, then says `text`."""
  turns = [search(f'x{i}') for i in range(searches)]
  return attempt(*turns, says(text), sample=sample)


def earned(module, arg, *group, step=0) -> list[float]:
  """What the method's config pays the trajectories of a group."""
  terms = ConfigDict(module.get_config(arg).reward.to_dict())
  context = core.RewardContext(step, env=ENV)
  return asyncio.run(core.combine(terms, [group], context)).value.tolist()
