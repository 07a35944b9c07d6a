"""Time per trajectory: a program's sessions against the native environment.

  python -m experiments.benchmarks.sessions --out=sessions.json

64 trajectories at a time, of three searches and four turns of 64 tokens, by a
random model of 28M parameters. One side is the environment; the other the
program of experiments/agents, in a thread for each session, whose chats and
searches go over HTTP to the endpoint in the same process. A search takes no
time. Questions, weights and random streams are the same, and so are the tokens,
which is checked: what differs is the way that they travel.
"""

import asyncio
import functools
import statistics
import tempfile
import time

import jax
import numpy as np

from configs import quickstart
from experiments import common
from experiments.agents import program as agent
from experiments.benchmarks import harness, models
from retrieval.corpus import split_contents
from searchrl_jax.engines.jax.engine import JaxEngine
from searchrl_jax.models import decoder
from searchrl_jax.rollout.chains import rollout
from searchrl_jax.text import prompts, tokenizer
from searchrl_jax.text.env import SearchEnv
from searchrl_jax.text.parser import Block
from searchrl_jax.types import Passage, SearchResult
from searchrl_jax.worlds import microworld

SIZE, SESSIONS, TOKENS, LIMIT = '28m', 64, 64, 448
QUERY = 'otter'


class Searching(SearchEnv):
  """Each turn searches as long as it may, then answers, whatever it says."""

  def _action(self, state, blocks):
    kind = 'search' if self._may_search(state) else 'answer'
    return Block(kind, 'policy', QUERY, turn=state.turn)


def searching(said: str, last: bool) -> tuple[str, str]:
  """The same, of the program."""
  return 'answer' if last else 'search', QUERY


class Source:
  """Finds the same passage, at once."""

  def __init__(self, contents: str):
    self._found = (Passage('0', *split_contents(contents), 1.0),)

  async def search(self, requests):
    return [SearchResult(r, self._found) for r in requests]


def sides():
  """{sampler: () -> (seconds of a trajectory, the ids of all)}."""
  with tempfile.TemporaryDirectory() as folder:
    tok = tokenizer.load(microworld.tokenizer(folder))
  c = quickstart.get_config()
  c.env.update(max_turn_tokens=TOKENS, max_tokens=LIMIT)
  c.engine.update(slots=SESSIONS, max_len=LIMIT)
  c.rollout.update(group=1, concurrency=SESSIONS)
  c.rollout.program = 'experiments.agents.program.play'
  agent.action, agent.TOKENS = searching, TOKENS
  cfg = models.config(SIZE, vocab_size=tok.vocab_size)
  params = decoder.init_params(cfg, jax.random.key(0))
  engine = JaxEngine(cfg, params, tok, c.engine)
  engine.warmup()
  env = Searching(tok, prompts.load('micro'), c.env, 'template', 1)
  world = microworld.generate(0)

  def play(sampler: str):
    c.rollout.sampler = sampler
    begin = time.monotonic()
    played = rollout(
      world.questions['train'][:SESSIONS],
      env=env,
      engine=engine,
      source=Source(world.corpus[0]['contents']),
      config=c.rollout,
      seed=0,
      step=0,
    )
    groups = asyncio.run(played).groups
    seconds = (time.monotonic() - begin) / len(groups)
    return seconds, [
      np.concatenate([s.ids for s in t.segments]).tolist() for (t,) in groups
    ]

  return {
    name: functools.partial(play, name) for name in ('chains', 'sessions')
  }


def measure() -> list[dict]:
  found = harness.turns(sides(), warm=1)
  said = [ids for turns in found.values() for _, ids in turns]
  if any(ids != said[0] for ids in said):
    raise RuntimeError('the two sides have sampled other tokens')
  return [
    {'side': name, 'repetition': n, 'seconds': seconds}
    for name, turns in found.items()
    for n, (seconds, _) in enumerate(turns)
  ]


def bars(rows) -> list[dict]:
  median = lambda side: statistics.median(
    r['seconds'] for r in rows if r['side'] == side
  )
  slower = median('sessions') / median('chains')
  return [common.bar('sessions_slower', slower, 1.15, at_most=True)]


if __name__ == '__main__':
  harness.run('sessions', measure, bars, reps=5)
