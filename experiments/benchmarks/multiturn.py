"""Trajectories/s through slow searches, with and without a turn barrier.

  python -m experiments.benchmarks.multiturn --out=multiturn.json

Both drive the same engine, prompts, lengths and searches. `rollout` lets each
trajectory go its own way; the barrier is Search-R1's loop: all trajectories
generate, all search, all go on. A search takes 200 ms +- 100 ms, uniform. The
barrier is measured twice: its turn's searches take that time each, and it
waits for the slowest (`each`, the bar); or all of them together take it once,
as from a server that answers a whole batch at once (`one`, printed beside it,
kinder to the barrier; ours still waits for each search by itself).

Lengths are drawn once (geometric, as a policy's are) and the model is random:
what it says does not matter here, only how long it takes. 96 trajectories of
1 to 4 searches go through 32 slots. `multiturn_recomputed_tokens` is counted
with slots to spare, where no token should be prefilled twice.
"""

import asyncio
import dataclasses
import statistics
import time
from typing import Any

import jax
import numpy as np
from absl import app, flags

from configs import common as config_lib
from experiments.benchmarks import common
from searchrl_jax.engines.core import Sampling
from searchrl_jax.engines.jax_sampler import JaxSampler
from searchrl_jax.env import Done, Generate, Search
from searchrl_jax.models import decoder
from searchrl_jax.rollout import rollout
from searchrl_jax.types import (
  Prompt,
  Question,
  SearchRequest,
  SearchResult,
  Trajectory,
)

VOCAB, PROMPT, OBSERVATION = 2048, 64, 32  # ids, tokens, tokens
SEARCHES = 4  # of one trajectory at most; it has 1 to 4
MEAN, LONGEST = 32, 128  # sampled tokens of a turn
TRAJECTORIES, SLOTS = 96, 32  # as in a step of several times the slots
SPARE = 24  # trajectories where slots are to spare


@dataclasses.dataclass(frozen=True)
class State:
  question: Question
  role: str = 'solver'
  turn: int = 0
  length: int = PROMPT
  segments: tuple = ()

  @property
  def name(self) -> str:
    return f'{self.question.id}/{self.role}'


class ScriptedEnv:
  """Turns of given lengths with a search after each but the last."""

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

  def trajectory(self, state: State, sample: int, seconds: float):
    return Trajectory(
      state.question, (), (), 'answer', sample=sample, seconds=seconds
    )

  def _generate(self, state: State, prompt=None, append=()):
    tokens = state.question.meta['lengths'][state.turn]
    return Generate('policy', tokens, (), (), append=append, prompt=prompt)


class SlowSource:
  """Each query takes 100 to 300 ms, given by whose and which it is."""

  async def search(self, requests, one: bool = False):
    seconds = [
      0.1 + 0.2 * _uniform(r.question.id, r.trajectory, r.turn)
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
        'prompt': rng.integers(VOCAB, size=PROMPT),
        'observation': rng.integers(VOCAB, size=OBSERVATION),
        'lengths': [int(n) for n in lengths],
      },
    )

  return [one(i) for i in range(count)]


def free(engine, items) -> None:
  """`rollout`: no barrier."""
  config = config_lib.base().rollout
  config.group = 1
  asyncio.run(
    rollout(
      items, env=ScriptedEnv(), engine=engine, source=SlowSource(),
      config=config, seed=0, step=0,
    )
  )  # fmt: skip


def barrier(engine, items, one: bool) -> None:
  """All generate, all search, all go on."""
  env, source = ScriptedEnv(), SlowSource()

  async def turn(handle, action):
    if action.append:
      engine.append(handle, action.append)
    return await engine.generate(handle, Sampling(action.max_tokens))

  async def main():
    rows = []
    for item in items:
      state, action = env.reset(item, 'solver')
      handle = engine.open(action.prompt)
      rows.append((state, action, handle, f'{state.name}/0'))
    while rows:
      events = await asyncio.gather(*(turn(h, a) for _, a, h, _ in rows))
      searching, requests = [], []
      for (state, _, handle, name), event in zip(rows, events, strict=True):
        state, action = env.step(state, event)
        if isinstance(action, Done):
          engine.close(handle)
          continue
        searching.append((state, handle, name))
        requests += [
          dataclasses.replace(r, trajectory=name) for r in action.requests
        ]
      if not searching:
        return
      found = await source.search(requests, one)
      rows = [
        (*env.step(state, [answer]), handle, name)
        for (state, handle, name), answer in zip(searching, found, strict=True)
      ]

  asyncio.run(main())


def make_engine(slots: int) -> tuple[JaxSampler, dict]:
  """The engine, warm, and the parameters it has a copy of."""
  cfg = decoder.DecoderConfig(
    vocab_size=VOCAB, d_model=128, n_layers=4, n_heads=4, n_kv_heads=2,
    head_dim=32, d_ff=512, qkv_bias=True,
  )  # fmt: skip
  config = config_lib.base().engine
  config.slots = slots
  config.max_len = PROMPT + SEARCHES * (OBSERVATION + LONGEST) + LONGEST
  params = decoder.init_params(cfg, jax.random.key(0))
  engine = JaxSampler(cfg, params, Ids(), config)
  engine.warmup()
  return engine, params


class Ids:
  """No stop strings are used, so ids need no text."""

  vocab_size = VOCAB

  def token_bytes(self, token_id: int) -> bytes:
    return b''


DRIVERS = {
  'free': free,
  'barrier_one': lambda engine, items: barrier(engine, items, one=True),
  'barrier_each': lambda engine, items: barrier(engine, items, one=False),
}


def measure(engine, name: str, items) -> dict[str, float]:
  """One repetition: trajectories/s and what the engine counted meanwhile."""
  before = engine.stats()
  begin = time.monotonic()
  DRIVERS[name](engine, items)
  seconds = time.monotonic() - begin
  counted = {k: v - before[k] for k, v in engine.stats().items()}
  return {
    'seconds': seconds,
    'trajectories_per_s': len(items) / seconds,
    **{
      k: counted[k]
      for k in ('generated_tokens', 'recomputed_tokens', 'evictions')
    },
  }


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  common.require_idle(allow=_ALLOW.value)
  before = common.environment()
  engine, _ = make_engine(SLOTS)
  for name in DRIVERS:  # what a first use costs is not the turns' matter
    measure(engine, name, questions(SPARE, seed=0))
  items = questions(TRAJECTORIES, seed=1)
  found = common.interleave(
    {name: lambda name=name: measure(engine, name, items) for name in DRIVERS},
    _REPS.value,
  )
  found['free_spare_slots'] = [
    measure(engine, 'free', questions(SPARE, seed=2 + i))
    for i in range(_REPS.value)
  ]
  rows = [
    {'driver': name, 'repetition': i, **row}
    for name, repetitions in found.items()
    for i, row in enumerate(repetitions)
  ]
  speed = {
    name: statistics.median(row['trajectories_per_s'] for row in repetitions)
    for name, repetitions in found.items()
  }
  recomputed = sum(
    row['recomputed_tokens'] for row in found['free_spare_slots']
  )
  bars = [
    common.bar('multiturn_barrier', speed['free'] / speed['barrier_each'], 1.5),
    common.bar('multiturn_recomputed_tokens', recomputed, 0, at_most=True),
  ]
  print(
    'against a barrier whose searches of a turn take their time once: '
    f'{speed["free"] / speed["barrier_one"]:.2f}x'
  )
  common.report(_OUT.value, 'multiturn', rows, bars, before)


if __name__ == '__main__':
  _OUT = flags.DEFINE_string('out', '', 'JSON file to write')
  _REPS = flags.DEFINE_integer('reps', 3, 'interleaved repetitions', 3)
  _ALLOW = flags.DEFINE_bool(
    'allow_load', False, 'run on a busy machine; the load stands in the file'
  )
  app.run(main)
