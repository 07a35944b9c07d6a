"""Trajectories/s through slow searches, with and without a turn barrier.

  python -m experiments.benchmarks.multiturn --out=multiturn.json

256 trajectories of 1 to 4 searches go through 32 slots, by `rollout`, which
lets each go its own way, at several values of config.rollout.concurrency
(`free_slots` = the slots, ..., `free_default` = 0, as many as slots and
config.engine.host_gib hold), and with a host memory that holds 31 paused
sequences (`free_tight`). A search takes 0.5 s +- 0.25 s, uniform.

The barrier is Search-R1's loop: all trajectories generate, all search, all go
on. It is measured twice: its turn's searches take that time each, and it waits
for the slowest (`each`, the bar); or all of them together take it once, as from
a server that answers a whole batch at once (`one`, printed beside it, kinder to
the barrier; ours still waits for each search by itself).

Engine, prompts, lengths and searches are the same everywhere. Lengths are drawn
once (geometric, as a policy's are) and the model is random: what it says does
not matter here, only how long it takes.
"""

import asyncio
import dataclasses
import functools
import statistics
import time
from typing import Any

import jax
from ml_collections import ConfigDict
import numpy as np

from experiments import common
from experiments.benchmarks import harness, models
from experiments.benchmarks.sampler import Ids
from searchrl_jax import schema as config_lib
from searchrl_jax.engines.core import Sampling
from searchrl_jax.engines.jax import device
from searchrl_jax.engines.jax.engine import JaxEngine
from searchrl_jax.models import decoder
from searchrl_jax.rollout.chains import rollout
from searchrl_jax.text.env import Done, Generate, Search
from searchrl_jax.types import (
  Prompt,
  Question,
  SearchRequest,
  SearchResult,
  Trajectory,
)

PROMPT, OBSERVATION = 64, 32  # tokens
SEARCHES = 4  # of one trajectory at most; it has 1 to 4
MEAN, LONGEST = 32, 128  # sampled tokens of a turn
LIMIT = PROMPT + SEARCHES * (OBSERVATION + LONGEST) + LONGEST
SLOTS, TRAJECTORIES = 32, 256  # eight for each slot
MODEL = models.config('1m', d_ff=512)
SECONDS = 0.5  # a search takes half to one and a half times as long


@dataclasses.dataclass(frozen=True)
class State:
  question: Question
  turn: int = 0
  length: int = PROMPT
  segments: tuple = ()

  @property
  def name(self) -> str:
    return f'{self.question.id}/solver'


class ScriptedEnv:
  """Turns of given lengths with a search after each but the last."""

  config = ConfigDict(dict(max_tokens=LIMIT))

  def reset(self, question: Question, role: str):
    ids = tuple(int(i) for i in question.meta['prompt'])
    return State(question), self._generate(State(question), Prompt(ids))

  def step(self, state: State, event: Any):
    lengths = state.question.meta['lengths']
    if isinstance(event, list | tuple):
      ids = tuple(int(i) for i in state.question.meta['observation'])
      state = dataclasses.replace(state, turn=state.turn + 1)
      return state, self._generate(state, append=ids)
    if state.turn + 1 == len(lengths):
      return state, Done('answer')
    request = SearchRequest('q', 3, state.question, turn=state.turn)
    return state, Search((request,))

  def trajectory(self, state: State, sample: int, seconds: float, meta=None):
    return Trajectory(
      state.question, (), (), 'answer', sample=sample, seconds=seconds
    )

  def _generate(self, state: State, prompt=None, append=()):
    tokens = state.question.meta['lengths'][state.turn]
    return Generate('policy', tokens, (), (), append=append, prompt=prompt)


class SlowSource:
  """Each query takes its own time, given by whose and which it is.

  mean: seconds; between half of it and one and a half times as long.
  """

  def __init__(self, mean: float):
    self._mean = mean

  async def search(self, requests, one: bool = False):
    seconds = [
      self._mean * (0.5 + _uniform(r.question.id, r.trajectory, r.turn))
      for r in requests
    ]
    await asyncio.sleep(seconds[0] if one else max(seconds))
    return [SearchResult(r, ()) for r in requests]


def _uniform(*name) -> float:
  seed = [b for part in name for b in str(part).encode()]
  return float(np.random.default_rng(seed).random())


def questions(count: int, seed: int) -> list[Question]:
  rng = np.random.default_rng(seed)

  def one(i: int) -> Question:
    turns = int(rng.integers(1, SEARCHES + 1)) + 1
    lengths = np.clip(rng.geometric(1 / MEAN, turns), 4, LONGEST)
    return Question(
      f'{seed}-{i}',
      '',
      meta={
        'prompt': rng.integers(Ids.vocab_size, size=PROMPT),
        'observation': rng.integers(Ids.vocab_size, size=OBSERVATION),
        'lengths': [int(n) for n in lengths],
      },
    )

  return [one(i) for i in range(count)]


def free(engine, items, concurrency: int = 0, seconds: float = SECONDS):
  """`rollout`, to be awaited: no barrier. seconds: of a search."""
  config = config_lib.base().rollout
  config.group, config.concurrency = 1, concurrency
  return rollout(
    items, env=ScriptedEnv(), engine=engine, source=SlowSource(seconds),
    config=config, seed=0, step=0,
  )  # fmt: skip


async def barrier(engine, items, one: bool) -> None:
  """All generate, all search, all go on."""
  env, source = ScriptedEnv(), SlowSource(SECONDS)

  async def turn(handle, action):
    if action.append:
      engine.append(handle, action.append)
    return await engine.generate(handle, Sampling(action.max_tokens))

  rows = []
  for item in items:
    state, action = env.reset(item, 'solver')
    rows.append((state, action, engine.open(action.prompt)))
  while rows:
    events = await asyncio.gather(*(turn(h, a) for _, a, h in rows))
    searching, requests = [], []
    for (state, _, handle), event in zip(rows, events, strict=True):
      state, action = env.step(state, event)
      if isinstance(action, Done):
        engine.close(handle)
        continue
      searching.append((state, handle))
      (request,) = action.requests
      name = f'{state.name}/0'
      requests.append(dataclasses.replace(request, trajectory=name))
    if not searching:
      return
    found = await source.search(requests, one)
    rows = [
      (*env.step(state, [answer]), handle)
      for (state, handle), answer in zip(searching, found, strict=True)
    ]


def make_engine(slots: int, host_gib: float = 1.0) -> tuple[JaxEngine, dict]:
  """The engine, warm, and the parameters it has a copy of."""
  config = config_lib.base().engine
  config.slots, config.max_len, config.host_gib = slots, LIMIT, host_gib
  params = decoder.init_params(MODEL, jax.random.key(0))
  engine = JaxEngine(MODEL, params, Ids(), config)
  engine.warmup()
  return engine, params


DRIVERS = {
  'free_slots': lambda *x: free(*x, SLOTS),
  'free_2x': lambda *x: free(*x, 2 * SLOTS),
  'free_4x': lambda *x: free(*x, 4 * SLOTS),
  'free_default': free,
  'free_tight': free,
  'barrier_one': lambda *x: barrier(*x, one=True),
  'barrier_each': lambda *x: barrier(*x, one=False),
}


def timed(name: str, engine, items) -> dict[str, float]:
  """One repetition: trajectories/s and what the engine counted meanwhile."""
  before = engine.stats()
  begin = time.monotonic()
  asyncio.run(DRIVERS[name](engine, items))
  seconds = time.monotonic() - begin
  after = engine.stats()
  counted = 'generated_tokens recomputed_tokens evictions decode_steps'
  return {
    'seconds': seconds,
    'trajectories_per_s': len(items) / seconds,
    **{k: after[k] - before[k] for k in counted.split()},
    'host_bytes': after['host_bytes'],  # the most so far, of all repetitions
  }


def tight_gib() -> float:
  """Host memory that holds 31 paused sequences of LIMIT tokens."""
  config = config_lib.base().engine
  config.max_len = LIMIT
  tokens = device.room(MODEL, config).size(LIMIT)
  return (31 + 1) * tokens * device.bytes_per_token(MODEL) / 2**30


def measure() -> list[dict]:
  engines = {
    name: make_engine(SLOTS, tight_gib() if name == 'free_tight' else 1.0)[0]
    for name in DRIVERS
  }
  for name, engine in engines.items():  # the first use of each costs more
    timed(name, engine, questions(SLOTS // 2, seed=0))
  items = questions(TRAJECTORIES, seed=1)
  found = harness.turns(
    {
      name: functools.partial(timed, name, engine, items)
      for name, engine in engines.items()
    }
  )
  return [
    {'driver': name, 'repetition': i, **row}
    for name, repetitions in found.items()
    for i, row in enumerate(repetitions)
  ]


def bars(rows) -> list[dict]:
  of = {name: [r for r in rows if r['driver'] == name] for name in DRIVERS}
  speed = {
    name: statistics.median(r['trajectories_per_s'] for r in repetitions)
    for name, repetitions in of.items()
  }
  free_names = [name for name in DRIVERS if name.startswith('free')]
  default, best = speed['free_default'], max(map(speed.get, free_names))
  host = of['free_tight'][-1]['host_bytes'] / 2**30 / tight_gib()
  again = sum(r['recomputed_tokens'] for name in free_names for r in of[name])
  print(
    'against a barrier whose searches of a turn take their time once: '
    f'{default / speed["barrier_one"]:.2f}x; with host memory for 31 '
    f'sequences: {speed["free_tight"] / default:.2f}x of the default'
  )
  return [
    common.bar('multiturn_barrier', default / speed['barrier_each'], 1.5),
    common.bar('multiturn_default', default / speed['free_slots'], 1.0),
    common.bar('multiturn_default_of_best', default / best, 0.95),
    common.bar('multiturn_host', host, 1.0, at_most=True),
    common.bar('multiturn_recomputed_tokens', again, 0, at_most=True),
  ]


if __name__ == '__main__':
  harness.run('multiturn', measure, bars, reps=3)
