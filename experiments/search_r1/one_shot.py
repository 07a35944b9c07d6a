"""One-shot retrieval (RAG): the passages stand in the prompt, and no search.

A data module. `load` wraps any other set: each question is searched for once,
as it stands, and what is found is put before it. `traces` scripts a warm start
on such questions of generated worlds.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
import dataclasses

from ml_collections import ConfigDict
import numpy as np

from searchrl_jax import schema
from searchrl_jax.data import core as data
from searchrl_jax.data.checks import DataError
from searchrl_jax.data.core import Trace
from searchrl_jax.sft import searcher
from searchrl_jax.sources import service
from searchrl_jax.types import Passage, Question
from searchrl_jax.worlds import microtraces, microworld

AT_ONCE = 512  # queries in flight


def load(
  of: Mapping,
  url: str,
  k: int,
  world_seed: int,
  prompt: str,
  folder: str,
  world_module: str = '',
  world: Mapping | None = None,
) -> list[Question]:
  """The questions of another set, each behind its passages.

  Args:
    of: that set, {module, ...its fields}.
    url: of the retrieval server, config.source.url.
    k: passages for a question.
    world_seed: config.data's, for `of`; so are those below.
    prompt: see above; 'template', since a prompt as it is has no place.
    folder, world_module, world: see `data.core`.

  Raises:
    DataError: no url; prompt='as_is'; or what `of` raises.
    SourceError: a search failed for good.
  """
  if not url:
    raise DataError(
      'one-shot retrieval searches while it loads: give --config.source.url='
      'URL of a running retrieval server'
    )
  if prompt != 'template':
    raise DataError(
      f'config.data.prompt={prompt!r}: one-shot retrieval puts passages before '
      "the question, so it needs 'template'"
    )
  where = ConfigDict(dict(world_seed=world_seed, prompt=prompt, dir=folder))
  where.update(world_module=world_module, world=world or {})
  (questions,) = data.load_sets({'': of}, where).values()
  fields = schema.base().source
  fields.url, fields.k = url, k
  source = service.ServiceSource(fields)
  search = searcher(source, asyncio.run)
  out = []
  for at in range(0, len(questions), AT_ONCE):
    part = questions[at : at + AT_ONCE]
    found = search([q.text for q in part], k)
    out += [behind(q, p) for q, p in zip(part, found, strict=True)]
  asyncio.run(source.close())
  return out


def behind(question: Question, passages: Sequence[Passage]) -> Question:
  """The question after its passages, a line each."""
  lines = [f'{p.title}: {p.text}' for p in passages]
  return dataclasses.replace(question, text='\n'.join([*lines, question.text]))


def traces(
  *,
  world_seed: int,
  worlds: int,
  n: int,
  k: int,
  train: int,
  relations: int,
  seed: int = 0,
) -> list[Trace]:
  """Answers read from the passages; a guess where they do not hold it.

  Worlds and people as in `microtraces.traces`; all of them read as well as
  they can, so that what the baseline lacks is the search and not the will.

  Args:
    world_seed: of the run's world; those of the traces follow from it.
    worlds: how many worlds.
    n: how many traces, shared evenly.
    k: passages for a question.
    train: people of each world, see `microworld.generate`.
    relations: see there.
    seed: of the guesses.
  """
  rng = np.random.default_rng(seed)
  out = []
  for _, own_seed, count in microtraces.shares(world_seed, worlds, n):
    world = microworld.generate(own_seed, train=train, relations=relations)
    pool = microworld.pick(world, 'train')
    asked = [pool[j % len(pool)] for j in range(count)]
    found = microtraces.searcher(world)([q.text for q in asked], k)
    out += [
      Trace(behind(q, passages), tuple(_said(world, q, passages, rng)))
      for q, passages in zip(asked, found, strict=True)
    ]
  return out


def _said(world, question, passages, rng) -> Iterator[tuple[str, str]]:
  name, *path = question.meta['path']
  read = {p.title: world.facts[p.title] for p in passages}
  for relation in path:
    value = read.get(name, {}).get(relation)
    if value is None:
      break
    yield 'think', f'{relation} {value}'
    name = value
  if value is None:
    values = microworld.names(world.settings, 'train')
    if pool := microworld.ATTRIBUTES.get(relation):
      values = microworld.pools(world.settings)[pool]
    value = values[rng.integers(microtraces.FAVOURITES)]
    yield 'think', f'maybe {value}'
  yield 'answer', value
