"""Trajectories/s through slow searches, with and without a turn barrier.

  python -m experiments.benchmarks.multiturn --out=multiturn.json

Both drive the same engine, prompts, lengths and searches. `rollout` lets each
trajectory go its own way; the barrier is Search-R1's loop: all trajectories
generate, all search, all go on. A search takes 200 ms +- 100 ms, uniform. The
barrier is measured twice: its turn's searches as one request that takes one
such time (`one`), or as queries that take one each, the slowest of which it
waits for (`each`). The bar is held against the faster of the two.

Lengths are drawn once (geometric, as a policy's are), the model is random:
what it says does not matter here, only that it takes its time.
"""

import asyncio
import dataclasses
import time
from typing import Any

import jax
import numpy as np

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
MEAN, LONGEST = 24, 96  # sampled tokens of a turn
QUESTIONS, GROUP, SLOTS = 24, 4, 32  # 96 trajectories through 32 slots


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


def free(engine, items, group: int):
  """`rollout`: no barrier. Returns its stats."""
  config = config_lib.base().rollout
  config.group = group
  result = asyncio.run(
    rollout(
      items, env=ScriptedEnv(), engine=engine, source=SlowSource(),
      config=config, seed=0, step=0,
    )
  )  # fmt: skip
  return result.stats


def barrier(engine, items, group: int, one: bool) -> None:
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
      base = engine.open(action.prompt)
      rows += [
        (state, action, engine.fork(base) if i else base, f'{state.name}/{i}')
        for i in reversed(range(group))
      ]
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


def make_engine(slots: int) -> JaxSampler:
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
  return engine


class Ids:
  """No stop strings are used, so ids need no text."""

  vocab_size = VOCAB

  def token_bytes(self, token_id: int) -> bytes:
    return b''
