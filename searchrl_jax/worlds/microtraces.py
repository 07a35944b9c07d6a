"""Scripted warm-start traces in generated worlds.

They mix good searches, poor searches and guesses, as base models do, so that RL
has behaviours to select from. Passages in traces are real search results.
"""

from collections.abc import Callable, Container, Generator, Iterator, Sequence
import dataclasses
import functools
from typing import Any

import numpy as np

from searchrl_jax.data.checks import require
from searchrl_jax.data.core import Search, Trace
from searchrl_jax.types import Passage, Question
from searchrl_jax.worlds import microworld

FAVOURITES = 3
# Seeds of the worlds of traces start here, far from those of users.
TRACE_WORLDS = 1_000_000_000


@dataclasses.dataclass(frozen=True)
class Mix:
  """Probabilities of scripted behaviours; good + poor + guess = 1.

  Base models guess more on topics they know. Therefore the probability of a
  guess depends on the relation: from guess * (1 - tilt) to guess * (1 + tilt).
  The ratio of good to poor searches stays the same.
  """

  good: float  # searches for the person
  poor: float  # searches for the first name or the relation alone
  guess: float  # answers at once, with one of a few favourites
  tilt: float  # 0 to 1
  again: float  # after a poor search: searches for the person
  short: float  # two-hop: answers from the first person's passage
  favourites: int = FAVOURITES  # number of values of a pool that are guessed

  def __post_init__(self):
    total = self.good + self.poor + self.guess
    good = abs(total - 1) <= 1e-6
    require(good, f'good + poor + guess = {total:g} must be 1')
    good = self.guess * (1 + self.tilt) <= 1 + 1e-6
    require(good, 'guess * (1 + tilt) must not exceed 1')


def traces(
  *,
  world_seed: int,
  worlds=60,
  n=12_000,
  seed=0,
  k=1,
  train=120,
  relations=4,
  good=0.4,
  poor=0.2,
  guess=0.4,
  tilt=0.8,
  again=0.3,
  short=0.4,
  favourites=FAVOURITES,
) -> list[Trace]:
  """Returns traces on train questions of several worlds.

  None of these worlds is that of the run, so the traces teach how to search and
  to read, but no facts. Searches find passages of train people only.

  Args:
    world_seed: of the run's world, from which the others' seeds follow.
    worlds: number of worlds.
    n: number of traces, distributed evenly.
    seed: of the behaviours.
    k: passages per query, as in the run.
    train: number of people of each world; see `microworld.generate`.
    relations: per passage; see `microworld.generate`.
    good, poor, guess, tilt, again, short, favourites: see `Mix`.

  Raises:
    DataError: good, poor and guess are not shares of a whole, or a world cannot
      be generated.
  """
  mix = Mix(good, poor, guess, tilt, again, short, favourites)
  out = []
  for i, own_seed, count in shares(world_seed, worlds, n):
    world = microworld.generate(own_seed, train=train, relations=relations)
    out += script(world, count, [seed, i], searcher(world), k, mix)
  return out


def shares(
  world_seed: int, worlds: int, n: int, first: int = TRACE_WORLDS
) -> Iterator[tuple[int, int, int]]:
  """Yields (number, seed, traces) of worlds that share n traces evenly.

  Args:
    world_seed: of the run's world, from which these seeds follow.
    worlds: number of worlds.
    n: number of traces; of 0 there is no world.
    first: where the seeds begin.

  Raises:
    DataError: a world without a trace, or no world.
  """
  good = 1 <= worlds <= n or n == 0
  require(good, f'n={n} traces of worlds={worlds}: at least one of each')
  for i in range(min(worlds, n)):
    count = n * (i + 1) // worlds - n * i // worlds
    yield i, first + world_seed * 1000 + i, count


def searcher(world: microworld.World, splits=('train',)) -> Search:
  """Returns a search with the server's index, over the people of `splits`."""
  people = {n for s in splits for n in microworld.names(world.settings, s)}
  return indexed(world, people)


def indexed(world: microworld.World, titles: Container[str]) -> Search:
  """Returns a search with the server's index, over passages by their titles."""
  from retrieval.index.bm25 import BM25Index  # slow to import

  passages = [p for p in world.passages() if p.title in titles]
  index = BM25Index([f'"{p.title}"\n{p.text}' for p in passages])

  def search(queries: Sequence[str], k: int):
    ids, _ = index.search(queries, k)
    return [tuple(passages[i] for i in row if i >= 0) for row in ids]

  return search


def script(world, n: int, seed, search: Search, k, mix: Mix) -> list[Trace]:
  """Returns n traces on the train questions of one world, hops alternating."""
  pool = microworld.pick(world, 'train')
  return together(
    functools.partial(_Script, world, mix), pool, n, seed, search, k
  )


def together(
  writer: Callable, pool: Sequence[Question], n: int, seed, search: Search, k
) -> list[Trace]:
  """Returns n traces; one search answers the queries of a round.

  Questions of the pool repeat only after all have occurred.

  writer: of one trace, from its random stream; `trace` is a `Script`.
  """
  rng = np.random.default_rng(seed)
  streams = (np.random.default_rng(rng.integers(2**63)) for _ in range(n))
  scripts = [
    writer(stream).trace(pool[i % len(pool)])
    for i, stream in enumerate(streams)
  ]
  done: dict[int, Trace] = {}
  results: dict[int, tuple[Passage, ...] | None] = dict.fromkeys(range(n))
  while results:
    queries = {}
    for i, passages in results.items():
      try:
        queries[i] = scripts[i].send(passages)
      except StopIteration as end:
        done[i] = end.value
    answers = search(list(queries.values()), k) if queries else []
    results = dict(zip(queries, answers, strict=True))
  return [done[i] for i in range(n)]


# Yields queries, receives the passages found, returns the trace.
Script = Generator[str, tuple[Passage, ...], Trace]


class Writer:
  """What all who write traces draw from one random stream."""

  def __init__(self, rng: np.random.Generator):
    self.rng = rng

  def chance(self, p: float) -> bool:
    return self.rng.random() < p

  def one(self, among: Sequence) -> Any:
    return among[self.rng.integers(len(among))]


class _Script(Writer):
  """Writes one trace."""

  def __init__(self, world: microworld.World, mix: Mix, rng):
    super().__init__(rng)
    self.world, self.mix = world, mix
    self.actions = []

  def trace(self, question: Question) -> Script:
    name, *path = question.meta['path']
    relation, mix = path[-1], self.mix
    relations = [*microworld.ATTRIBUTES, *microworld.LINKS]
    where = 2 * relations.index(relation) / (len(relations) - 1) - 1
    if self.chance(mix.guess * (1 + mix.tilt * where)):
      self.guess(relation)
      return Trace(question, tuple(self.actions), False)
    good = self.chance(mix.good / max(mix.good + mix.poor, 1e-9))
    read, again = {}, True
    if not good:
      query = name.split()[0] if self.chance(0.5) else relation
      read = yield from self.look_up(f'find {query}', query)
      again = self.chance(mix.again)
    if again:
      read = yield from self.look_up(f'find {name}', name)
    if len(path) == 2 and path[0] in read:
      if self.chance(mix.short):
        good = False
      else:
        bridge = read[path[0]]
        read = yield from self.look_up(f'{path[0]} {bridge}', bridge)
    if relation in read:
      self.answer(f'{relation} {read[relation]}', read[relation])
    else:
      self.guess(relation)
    right = self.actions[-1] == ('answer', question.answers[0])
    return Trace(question, tuple(self.actions), good and right)

  def look_up(self, thought: str, query: str):
    """Searches; returns the facts of the first passage."""
    found = yield query
    actions = dict(think=thought, search=query, information=found)
    self.actions += actions.items()
    return self.world.facts[found[0].title] if found else {}

  def answer(self, thought: str, value: str) -> None:
    self.actions += [('think', thought), ('answer', value)]

  def guess(self, relation: str) -> None:
    """Answers with one of a few values; more would be memorised as facts."""
    values = microworld.names(self.world.settings, 'train')
    if pool := microworld.ATTRIBUTES.get(relation):
      values = microworld.pools(self.world.settings)[pool]
    value = values[self.rng.integers(self.mix.favourites) % len(values)]
    self.answer(f'maybe {value}', value)
