"""Dials: what each does to a result, and that its draws repeat."""

import asyncio
import dataclasses
import subprocess
import sys

from ml_collections import ConfigDict
import pytest

from configs import atlas as recipe
from searchrl_jax import schema
from searchrl_jax.lookup import ConfigError
from searchrl_jax.run import services
from searchrl_jax.sources.core import SourceError, require_same_source
from searchrl_jax.sources.dials import Dials, Setting, wrap
from searchrl_jax.types import (
  Passage,
  Question,
  SearchError,
  SearchRequest,
  SearchResult,
)
from searchrl_jax.worlds import atlas, atlas_traces
from tests.conftest import ROOT

MANY = [f'q{i}' for i in range(400)]
QUESTION = Question(
  'a', 'who?', ('Bo',), supporting=('q-0', 'q-1'),
  meta=dict(
    facts=(('Ann', 'teacher', 'Cy'), ('Cy', 'home', 'Bo')),
    false=('Di', 'Ed'),
  ),
)  # fmt: skip


class Listing:
  """Finds the passages q-0, q-1, ... of a query q, as many as asked for."""

  async def search(self, requests):
    return [
      SearchError(r, 'timeout', 'late')
      if r.query == 'late'
      else SearchResult(
        r,
        tuple(
          Passage(f'{r.query}-{i}', 'T', f'{r.query}: Ann Cy Bo {i}')
          for i in range(r.k)
        ),
      )
      for r in requests
    ]

  async def check(self):
    return {'identity': {'corpus': 'x'}}

  async def close(self):
    pass


def make(config, **_):
  """The source of config.source.module='tests.sources.test_dials'."""
  return Listing()


def ask(queries, k=2, question=QUESTION, seed=0, others=(), **setting):
  dials = Dials(Listing(), Setting(**setting), seed, [question, *others])
  requests = [
    SearchRequest(q, k, question, trajectory=f't{i}', turn=i, step=i)
    for i, q in enumerate(queries)
  ]
  answers = asyncio.run(dials.search(requests))
  assert [a.request for a in answers] == requests
  return [[p.id for p in a.passages] for a in answers]


def share(flags) -> float:
  flags = [*flags]
  return sum(flags) / len(flags)


def test_no_dial_is_no_wrapper():
  source, config = Listing(), schema.base()
  assert wrap(source, config.source.dials, 0, lambda: 1 / 0) is source


def test_empty_results():
  found = ask(MANY, empty=0.3)
  assert share(not x for x in found) == pytest.approx(0.3, abs=0.07)
  assert {len(x) for x in found} == {0, 2}
  assert ask(MANY, empty=1.0) == [[]] * 400


def test_random_results_are_of_another_question():
  other = Question('b', 'where?', ('Al',))
  found = ask(MANY, random=0.3, others=[other])
  random = [x == ['where?-0', 'where?-1'] for x in found]
  assert share(random) == pytest.approx(0.3, abs=0.07)
  for query, passages, was in zip(MANY, found, random):
    assert was or passages == [f'{query}-0', f'{query}-1']
  with pytest.raises(SourceError, match='two different answers'):
    ask(['x'], random=0.3, others=[Question('b', 'where?', ('Bo',))])
  dials = Dials(Listing(), Setting(random=1.0), 0, [QUESTION, other])
  proposed = SearchRequest('x', 1, Question('new', 'what?'))
  with pytest.raises(SourceError, match="'new'"):
    asyncio.run(dials.search([proposed]))


def test_a_missing_passage_is_missing_for_every_query_and_question():
  found = ask(['q'] * 3, k=50, missing=0.4, depth=200)
  assert found[0] == found[1] == found[2] and len(found[0]) == 50
  # In the order of the source, and those that are left move up.
  places = [int(id.removeprefix('q-')) for id in found[0]]
  assert places == sorted(places)
  # 50 are left of the first 50 / 0.6 = 83, give or take.
  assert 65 < places[-1] < 105
  again = dataclasses.replace(QUESTION, id='other')
  assert ask(['q'], k=50, missing=0.4, depth=200, question=again)[0] == found[0]
  assert ask(['q'], k=50, missing=0.4, depth=200, seed=1)[0] != found[0]


def test_the_first_passage_gets_a_random_rank():
  found = ask(MANY, k=4, rank=1.0)
  ranks = [x.index(f'{q}-0') for q, x in zip(MANY, found)]
  for rank in range(4):
    assert share(r == rank for r in ranks) == pytest.approx(0.25, abs=0.08)
  for query, passages in zip(MANY, found):
    assert sorted(passages) == [f'{query}-{i}' for i in range(4)]
  # Of eight candidates, four are shown, so half of the first ones are not.
  deeper = ask(MANY, k=4, rank=1.0, depth=8)
  shown = share(f'{q}-0' in x for q, x in zip(MANY, deeper))
  assert shown == pytest.approx(0.5, abs=0.08)


def test_contradictions_stand_beside_the_passages_that_state_needed_facts():
  source = Dials(Listing(), Setting(contradict=1.0), 0, [QUESTION])
  request = SearchRequest('q', 8, QUESTION)
  (answer,) = asyncio.run(source.search([request]))
  text = {p.id: p.text for p in answer.passages}
  assert text['q-0'] == 'q: Ann Cy Bo 0'
  assert text['q-0~false'] == 'q: Ann Di Bo 0'  # its fact: (Ann, teacher, Cy)
  assert text['q-1~false'] == 'q: Ann Cy Ed 1'  # its fact: (Cy, home, Bo)
  assert sum(id.endswith('~false') for id in text) == 2
  # Before or after the true one.
  first = []
  for i in range(300):
    asked = dataclasses.replace(QUESTION, id=f'a{i}')
    ((id,),) = ask(['q'], k=1, question=asked, contradict=1.0)
    first.append(id == 'q-0~false')
  assert share(first) == pytest.approx(0.5, abs=0.1)
  with pytest.raises(SourceError, match="'bare'.*meta.facts"):
    Dials(Listing(), Setting(contradict=0.1), 0, [Question('bare', 'who?')])


ALL = dict(empty=0.2, missing=0.2, contradict=0.5, rank=0.5, depth=5)


def test_draws_depend_on_seed_question_and_query_alone():
  found = ask(['q', *MANY], **ALL)
  assert ask(['q', *MANY], **ALL) == found
  assert ask([*MANY, 'q'][::-1], **ALL) == [found[0], *found[:0:-1]]
  # A question that a step asks twice has a suffix, or two.
  for id in 'a#2', 'a#2#3':
    twice = dataclasses.replace(QUESTION, id=id)
    assert ask(['q', *MANY], question=twice, **ALL) == found
  assert ask(['q', *MANY], seed=1, **ALL) != found


def test_random_passages_are_not_those_of_a_question_with_a_similar_id():
  asked = [Question(f'q#{i}', f'who is {i}?', (str(i),)) for i in (1, 2)]
  dials = Dials(Listing(), Setting(random=1.0), 0, asked)
  for question, other in zip(asked, asked[::-1]):
    for id in question.id, f'{question.id}#2':
      again = dataclasses.replace(question, id=id)
      [found] = asyncio.run(dials.search([SearchRequest('x', 1, again)]))
      assert found.passages[0].text.startswith(other.text)


def test_more_of_a_dial_changes_what_less_changed_too():
  less, more = ask(MANY, empty=0.2), ask(MANY, empty=0.5)
  assert {q for q, x in zip(MANY, less) if not x} < {
    q for q, x in zip(MANY, more) if not x
  }


@pytest.mark.long
def test_the_same_in_another_process():
  code = f'from tests.sources.test_dials import *; print(ask(MANY, **{ALL}))'
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, cwd=ROOT,
    check=True, env={'PYTHONHASHSEED': '5', 'JAX_PLATFORMS': 'cpu'},
  )  # fmt: skip
  assert done.stdout.strip() == str(ask(MANY, **ALL))


def test_errors_and_other_tools_pass_through():
  dials = Dials(Listing(), Setting(empty=1.0), 0)
  requests = [
    SearchRequest('late', 2),
    SearchRequest('1 + 1', 2, tool='calculator'),
  ]
  late, calculated = asyncio.run(dials.search(requests))
  assert isinstance(late, SearchError) and late.request == requests[0]
  assert len(calculated.passages) == 2


def test_a_run_has_the_dials_of_its_config():
  config = schema.base()
  config.source.module = 'tests.sources.test_dials'
  assert type(services.source(config, '')) is Listing
  config.source.dials.contradict = 1.0
  config.source.dials.random = 0.001
  data = dict(module='searchrl_jax.worlds.atlas', split='train', n=60)
  config.data.train.atlas = ConfigDict(data)
  source = services.source(config, '')
  assert type(source) is Dials
  # Another setting is another source, with which no run goes on.
  now = asyncio.run(source.check())['identity']
  assert now['corpus'] == 'x' and now['dials']['contradict'] == 1.0
  before = now | {'dials': now['dials'] | {'contradict': 0.5}}
  with pytest.raises(SourceError, match='dials: .*0.5.*before'):
    require_same_source(before, now)
  config.source.dials.contradict = 1.5
  with pytest.raises(ConfigError, match='dials.contradict=1.5'):
    schema.check(config)


def test_in_the_world_they_contradict_every_kind_of_question():
  sizes = dict(train=60, heldout=40, known=20)
  world = atlas.generate(0, **sizes)
  people = [name for r in (False, True) for name in atlas.names('train', r)]
  search = atlas_traces.searcher(world, people, tuple(atlas.SECTION))

  class Indexed(Listing):
    async def search(self, requests):
      return [SearchResult(r, search([r.query], r.k)[0]) for r in requests]

  assert recipe.get_config().source.dials.contradict == 0
  for kind in atlas.KINDS:
    question = atlas.pick(world, 'train', kinds=(kind,))[0]
    dials = Dials(Indexed(), Setting(contradict=1.0), 0, [question])
    for fact, false, id in zip(
      question.meta['facts'], question.meta['false'], question.supporting
    ):
      name, relation, value = fact
      query = f'{name} {atlas.SECTION[relation]}'
      request = SearchRequest(query, 2, question)
      (answer,) = asyncio.run(dials.search([request]))
      found = {p.id: p.text for p in answer.passages}
      assert value in found[id]
      wrong = found[f'{id}~false']
      assert false in wrong and value not in wrong and wrong != found[id]
