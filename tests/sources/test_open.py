"""Opening documents: pieces, ids, errors of the policy and of the server."""

import asyncio
import json

from ml_collections import ConfigDict
import pytest

from retrieval.replicas import RetrievalError
from searchrl_jax import schema
from searchrl_jax.lookup import ConfigError
from searchrl_jax.run import build, services
from searchrl_jax.sources import open as opening
from searchrl_jax.sources.core import SourceError
from searchrl_jax.types import Passage, SearchError, SearchRequest, SearchResult
from tests.retrieval.conftest import serve, write_corpus

PASSAGES = (
  ('0', 'Long', 'word ' * 1500),
  ('a', 'Book', 'one'),
  ('b', 'Book', 'two'),
)


@pytest.fixture(scope='module')
def url(tmp_path_factory):
  path = write_corpus(tmp_path_factory.mktemp('open') / 'c.jsonl', PASSAGES)
  with serve(path) as found:
    yield found


def source(url, found=False, chars=500):
  c = schema.base()
  c.tools.open = ConfigDict(dict(module='open', found=found, chars=chars))
  return services.source(c, url)


def ask(source, *queries, earlier=()):
  async def run():
    try:
      return await source.search(
        [SearchRequest(q, 3, tool='open', earlier=earlier) for q in queries]
      )
    finally:
      await source.close()

  return asyncio.run(run())


def call(**arguments):
  return json.dumps({'name': 'open', 'arguments': arguments})


def test_documents_in_pieces(url):
  whole = '"Long"\n' + 'word ' * 1500  # 7,507 characters
  first, second, plain, book = ask(
    source(url, chars=4000),
    *(call(id='0'), call(id='0', piece=2), '[0]', call(id='b')),
  )
  assert first.text == f'0, piece 1 of 2:\n{whole[:4000]}'
  assert second.text == f'0, piece 2 of 2:\n{whole[4000:]}'
  assert plain.text == first.text  # as a block of tags writes it
  assert book.text == 'b, piece 1 of 1:\n"Book"\none\ntwo'
  assert all(r.passages == () for r in (first, second, plain, book))


@pytest.mark.parametrize(
  'query, said',
  [
    (call(id='x'), 'there is no document x'),
    (call(id='0', piece=17), 'the pieces 1 to 16'),
    (call(id='0', piece=0), 'the pieces 1 to 16'),
    (call(id='0', piece=-(10**30)), 'the pieces 1 to 16'),
    (call(id='0', piece=10**30), 'the pieces 1 to 16'),
    (call(id='0', piece='2'), "'piece' is not of the type integer"),
    ('{"name"', 'there is no document'),
    ('', 'there is no document'),
    ('\ud800', 'there is no document'),
  ],
)
def test_an_error_of_the_policy_is_text(url, query, said):
  [result] = ask(source(url), query)
  assert isinstance(result, SearchResult)
  assert result.text.startswith('error: ') and said in result.text


def test_only_what_was_found_is_opened(url):
  request = SearchRequest('q', 3)
  earlier = (SearchResult(request, (Passage('a', 'Book', 'one'),)),)
  a, b = ask(source(url, True), call(id='a'), call(id='b'), earlier=earlier)
  assert a.text.startswith('a, piece') and b.text == (
    'error: no search has found b'
  )
  # What another tool has shown was not found.
  other = SearchRequest('q', 3, tool='archive')
  earlier = (SearchResult(other, (Passage('a', 'Book', 'one'),)),)
  [a] = ask(source(url, True), 'a', earlier=earlier)
  assert a.text == 'error: no search has found a'


def test_the_identity_is_that_of_the_documents(url):
  async def check():
    both = source(url)
    try:
      return (await both.check())['identity']
    finally:
      await both.close()

  identity = asyncio.run(check())
  assert identity['open/corpus'] == identity['corpus']
  assert identity['open/chars'] == 500


def test_every_server_that_answers_has_documents(url, monkeypatch):
  told = {}

  async def health(self, url=None):
    if url not in told:
      raise RetrievalError('unreachable', url, 'down')
    return told[url]

  monkeypatch.setattr(opening.RetrievalClient, 'health', health)
  fields = schema.base().source.copy_and_resolve_references()
  fields.url = 'http://a,http://b'
  own = ConfigDict(dict(found=False, chars=500))
  check = lambda: asyncio.run(opening.make(own, source=fields).check())
  good = dict(identity={}, documents=True, limits=dict(piece_chars=500))
  told['http://b'] = good
  assert check() == {'identity': {'chars': 500}}  # the other may come later
  for bad, said in (
    ({'identity': {}}, 'http://a has no documents.*older server'),
    (good | dict(limits=dict(piece_chars=499)), 'http://a has --piece_chars'),
  ):
    told['http://a'] = bad
    with pytest.raises(SourceError, match=said):
      check()


@pytest.mark.parametrize(
  'fields, named',
  [
    ({'tools.open.chars': 513}, 'chars=513: give 1 to 512'),
    ({'tools.open.chars': 0}, 'chars=0: give 1 to 512'),
    ({'env.template': 'qwen_tools'}, 'chars=500: give 1 to 128.* 4 results'),
    ({'source.module': 'none'}, "source.module='none' has no documents"),
    ({'source.module': 'simulated'}, 'has no documents'),
    ({'source.dials.missing': 0.1}, r"set \['missing'\]"),
    ({'source.dials.contradict': 0.1}, r"set \['contradict'\]"),
  ],
)
def test_configs_that_cannot_be_are_refused_early(fields, named):
  c = schema.base()
  c.tools.open = ConfigDict(dict(module='open', found=True, chars=500))
  build.check_environment(c)
  c.update_from_flattened_dict(fields)
  with pytest.raises(ConfigError, match=f'config.tools.open: .*{named}'):
    build.check_environment(c)


def test_a_server_that_is_not_there_has_failed():
  c = schema.base()
  c.source.update(timeout=0.5, deadline=0.5, attempts=1)
  fields = c.source.copy_and_resolve_references()
  fields.url = 'http://127.0.0.1:9'
  own = ConfigDict(dict(found=False, chars=500))
  tool = opening.make(own, source=fields)
  [error] = ask(tool, '0')
  assert isinstance(error, SearchError) and error.kind == 'unreachable'
  with pytest.raises(SourceError, match='127.0.0.1:9'):
    asyncio.run(tool.check())


def test_what_a_policy_may_call():
  c = schema.base()
  c.tools.calculator = ConfigDict(dict(module='calculator', cost=0.0))
  c.tools.open = ConfigDict(dict(module='open', found=False))
  found = build.functions(c)
  assert [(f[0], f[1]['function']['name'], f[2]) for f in found] == [
    ('search', 'search', 'query'),
    ('calculator', 'calculator', 'expression'),
    ('open', 'open', ''),
  ]
  c.source.module = 'none'
  assert [f[0] for f in build.functions(c)] == ['calculator', 'open']


@pytest.mark.parametrize(
  'tools, named',
  [
    (dict(a=dict(module='none')), "config.tools.a.module: .*'functions'"),
    (
      dict(
        a=dict(module='open', found=True), b=dict(module='open', found=True)
      ),
      "'search', 'open', 'open'",
    ),
  ],
)
def test_tools_that_cannot_be_called_are_named(tools, named):
  c = schema.base()
  c.tools = ConfigDict(tools)
  with pytest.raises(ValueError, match=named):
    build.functions(c)
