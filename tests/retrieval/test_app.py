"""The application without a process: protocol, bounds, batching, fuzz."""

import asyncio
import dataclasses
import gzip
import json
import threading
import time
import zlib

import httpx
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
import pytest
from starlette.testclient import TestClient

from retrieval.core import (
  IDENTITY_HEADER,
  Found,
  LocalSearcher,
  SearchFailed,
  identity_hash,
)
from retrieval.corpus import read_corpus
from retrieval.index.bm25 import BM25Index
from retrieval.serve.app import create_app
from retrieval.serve.batcher import Batcher, Pace
from retrieval.serve.protocol import Limits, Rejected
from retrieval.web.cache import Recorded
from tests.clock import until, within
from tests.retrieval.conftest import write_corpus

LIMITS = Limits(
  max_topk=5,
  max_queries=8,
  max_batch=8,
  max_query_bytes=64,
  max_query_terms=4,
  max_body_bytes=70_000,
  batch_ms=0,
)


HOSTS = ['127.0.0.1', 'localhost', 'gpu01']


def searcher(corpus):
  return LocalSearcher(corpus, BM25Index(corpus.contents))


@pytest.fixture(scope='module')
def http(corpus):
  app = create_app(searcher(corpus), LIMITS)
  with TestClient(app, raise_server_exceptions=False) as client:
    yield client


def ask(http, **body):
  response = http.post('/retrieve', json=body)
  assert response.status_code == 200, response.text
  return response.json()


def test_with_scores(http, corpus):
  answer = ask(http, queries=['Hamlet prince'], topk=2, return_scores=True)
  assert list(answer) == ['result']
  first, second = answer['result'][0]
  assert set(first) == {'document', 'score'}
  assert first['document'] == {'id': '2', 'contents': corpus[2].contents}
  assert second['document']['id'] == '0'
  assert first['score'] > second['score'] > 0


def test_without_scores_the_documents_are_bare(http, corpus):
  scored = ask(http, queries=['Hamlet', 'Henry'], topk=2, return_scores=True)
  for extra in ({}, {'return_scores': False}, {'return_scores': None}):
    bare = ask(http, queries=['Hamlet', 'Henry'], topk=2, **extra)
    assert bare['result'] == [
      [hit['document'] for hit in row] for row in scored['result']
    ]


def test_topk_has_a_default_and_may_exceed_the_matches(http):
  assert len(ask(http, queries=['same'])['result'][0]) == 3
  assert len(ask(http, queries=['same'], topk=None)['result'][0]) == 3
  assert len(ask(http, queries=['denmark'], topk=5)['result'][0]) == 1
  assert len(ask(http, queries=['same'], topk=2.0)['result'][0]) == 2


def test_no_match_is_an_empty_list(http):
  assert ask(http, queries=['zzz', '', 'the', '\x00'])['result'] == [[]] * 4


def test_duplicates_and_ties(http):
  rows = ask(http, queries=['same', 'hamlet', 'same'], topk=5)['result']
  assert [hit['id'] for hit in rows[0]] == ['4', '5', '6']
  assert rows[0] == rows[2] != rows[1]


def test_passages_come_back_unchanged(http, corpus):
  row = ask(http, queries=['東京 café'])['result'][0]
  assert row[0]['contents'] == corpus[3].contents


def test_health(http, corpus):
  body = http.get('/health').json()
  assert body['status'] == 'ok' and body['version']
  assert body['corpus']['count'] == len(corpus)
  assert body['corpus']['sha256'] == corpus.sha256
  assert body['index']['name'] == 'bm25' and body['index']['k1'] == 1.2
  assert body['limits']['max_topk'] == 5
  before = body['served']['queries']
  ask(http, queries=['a', 'b'])
  assert http.get('/health').json()['served']['queries'] == before + 2


@pytest.mark.parametrize(
  'body, loc, said',
  [
    ({}, ['queries'], 'strings'),
    ({'queries': 'hamlet'}, ['queries'], 'strings'),
    ({'queries': ['x'] * 9}, ['queries'], '9 queries'),
    ({'queries': ['x', None]}, ['queries', 1], 'string'),
    ({'queries': ['x', ['y']]}, ['queries', 1], 'string'),
    ({'queries': ['x'], 'topk': 0}, ['topk'], 'from 1 to 5'),
    ({'queries': ['x'], 'topk': -1}, ['topk'], 'from 1 to 5'),
    ({'queries': ['x'], 'topk': 10**9}, ['topk'], 'from 1 to 5'),
    ({'queries': ['x'], 'topk': 2.5}, ['topk'], 'integer'),
    ({'queries': ['x'], 'topk': True}, ['topk'], 'integer'),
    ({'queries': ['x'], 'topk': '3'}, ['topk'], 'integer'),
    ({'queries': ['x'], 'return_scores': 1}, ['return_scores'], 'true or'),
    ({'queries': ['x'], 'top_k': 3}, ['top_k'], 'known: queries, topk'),
    ({'queries': ['x'], 'zebra': 3}, ['zebra'], 'known: queries'),
    ({'queries': ['x'], 'TOPK': 3}, ['TOPK'], 'known: queries, topk'),
    ({'queries': ['x'], 'größe': 3}, ['größe'], 'unknown field'),
    ([], [], 'object'),
  ],
)
def test_bad_field_is_named(http, body, loc, said):
  response = http.post('/retrieve', json=body)
  assert response.status_code == 422
  detail = response.json()['detail'][0]
  assert detail['loc'] == ['body', *loc]
  assert said in detail['msg']


@pytest.mark.parametrize(
  'body',
  [
    b'',
    b'{',
    b'{"queries": ["x"]',
    b'\xff\xfe',
    b'"\xed\xa0\x80"',
    b'[' * 5000,
    b'{"queries": ["x"], "topk": ' + b'9' * 5000 + b'}',
    b'{"queries": ["x"], "topk": NaN}',
    b'{"queries": ["x"], "topk": 1e999}',
    b'{"\\ud800": 1, "queries": ["x"]}',
    b'\x00',
    b'null',
  ],
)
def test_bad_body(http, body):
  response = http.post('/retrieve', content=body)
  assert response.status_code == 422
  assert response.json()['detail'][0]['loc'][0] == 'body'


def test_lone_surrogates_are_searched_as_no_word(http):
  response = http.post(
    '/retrieve', content=b'{"queries": ["hamlet \\ud800", "\\udfff"]}'
  )
  assert [bool(row) for row in response.json()['result']] == [True, False]


def test_a_long_query_is_cut_and_fails_nobody():
  index = Recorder()
  long = ['one two three four five', 'x' * 99, 'é' * 60, 'a-b/c.d.e', 'ok']
  (answer,) = posted(index, {'queries': long, 'topk': 1})
  assert answer.status_code == 200
  assert index.calls == [
    (['one two three four', 'x' * 64, 'é' * 32, 'a-b/c.d', 'ok'], 1)
  ]


def test_body_too_large(http):
  response = http.post('/retrieve', content=b' ' * (LIMITS.max_body_bytes + 1))
  assert response.status_code == 413 and '--max_body_bytes' in response.text


def raw_deflate(data):
  packer = zlib.compressobj(wbits=-15)
  return packer.compress(data) + packer.flush()


def post_packed(http, encoding, body):
  headers = {'Content-Encoding': encoding}
  return http.post('/retrieve', content=body, headers=headers)


@pytest.mark.parametrize(
  'encoding, pack',
  [
    ('gzip', gzip.compress),
    ('X-GZIP', gzip.compress),
    ('deflate', zlib.compress),
    (' Deflate', raw_deflate),
    ('identity', bytes),
  ],
)
def test_a_packed_body_is_read(http, encoding, pack):
  body = {'queries': ['Hamlet'], 'topk': 2}
  answer = post_packed(http, encoding, pack(json.dumps(body).encode()))
  assert answer.status_code == 200 and answer.json() == ask(http, **body)


# The workers of the tests have to read the same names of cases.
PACKED = gzip.compress(b'{}', mtime=0)
BOMB = b' ' * (LIMITS.max_body_bytes + 1)


@pytest.mark.parametrize(
  'encoding, body, status, said',
  [
    ('br', b'x', 415, "'br'"),
    ('gzip, gzip', b'x', 415, "'gzip, gzip'"),
    ('gzip', b'{"queries": ["x"]}', 422, 'gzip stream'),
    ('gzip', PACKED[:-3], 422, 'gzip stream'),
    ('gzip', PACKED + b'x', 422, 'gzip stream'),
    ('deflate', zlib.compress(b'{}')[:-3], 422, 'deflate'),
    ('gzip', b'', 422, 'gzip stream'),
    ('gzip', gzip.compress(BOMB, mtime=0), 413, '--max_body_bytes'),
    ('deflate', zlib.compress(BOMB), 413, '--max_body_bytes'),
    ('deflate', raw_deflate(BOMB), 413, '--max_body_bytes'),
    ('', PACKED, 422, 'Content-Encoding: gzip'),
  ],
)  # fmt: skip
def test_what_cannot_be_unpacked(http, encoding, body, status, said):
  answer = post_packed(http, encoding, body)
  assert answer.status_code == status
  assert said in answer.json()['detail'][0]['msg']


def test_other_paths_and_methods(http):
  assert http.get('/retrieve').status_code == 405
  assert http.post('/nowhere').status_code == 404
  assert 'queries' in http.get('/openapi.json').text


json_values = st.recursive(
  st.none()
  | st.booleans()
  | st.integers()
  | st.floats()
  | st.text(st.characters(), max_size=80),
  lambda inner: (
    st.lists(inner, max_size=4)
    | st.dictionaries(st.text(max_size=8), inner, max_size=4)
  ),
  max_leaves=8,
)
near_requests = st.fixed_dictionaries(
  {
    'queries': st.lists(
      st.text(st.characters(), max_size=40) | json_values, max_size=10
    )
    | json_values
  },
  optional={
    'topk': st.integers(-2, 8) | json_values,
    'return_scores': st.booleans() | json_values,
    'other': json_values,
  },
)
fuzz = settings(
  max_examples=60,
  deadline=None,
  suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.mark.long
@fuzz
@given(near_requests | json_values)
@example({'queries': ['\ud800'], 'topk': 10**400})
def test_fuzz_json(http, body):
  check(http.post('/retrieve', content=json.dumps(body).encode()), body)


@fuzz
@given(st.binary(max_size=200))
def test_fuzz_bytes(http, body):
  check(http.post('/retrieve', content=body), None)


def check(response, body):
  assert response.status_code in (200, 422)
  answer = response.json()
  if response.status_code == 200:
    assert len(answer['result']) == len(
      json.loads(response.request.content)['queries']
    )
  else:
    assert answer['detail'][0]['msg']


class Recorder:
  """A searcher that keeps the calls, and works only when let.

  Queries may fail ('fail', 'busy'), break the call ('boom') or all of it be
  broken. Others are answered with k passages.
  """

  identity = {'name': 'recorder'}

  def __init__(self):
    self.calls, self.go, self.broken = [], threading.Event(), None
    self.closed = 0
    self.go.set()

  def search(self, queries, k):
    self.calls.append((list(queries), k))
    assert self.go.wait(10)
    if self.broken:
      return self.broken(queries, k)
    if 'boom' in queries:
      raise RuntimeError('the index broke \x1b[31m')
    return [self.answer(query, k) for query in queries]

  def answer(self, query, k):
    if query == 'fail':
      return SearchFailed('no answer to it')
    if query == 'busy':
      return SearchFailed('not now', 2.5)
    return [Found(str(i), query, 1.0) for i in range(k)]

  def close(self):
    self.closed += 1


def with_batcher(index, limits, body):
  async def run():
    batcher = Batcher(index, limits)
    batcher.start()
    try:
      return await body(batcher)
    finally:
      index.go.set()
      await batcher.stop()
      assert index.closed == 1 and batcher.pending == 0

  return asyncio.run(run())


def test_requests_of_many_clients_become_one_call():
  index = Recorder()

  async def body(batcher):
    answers = await asyncio.gather(
      batcher.search(['a', 'b', 'a'], 2),
      batcher.search(['b', 'c'], 2),
      batcher.search(['a'], 2),
    )
    return answers, batcher.counters

  answers, counters = with_batcher(index, Limits(batch_ms=20), body)
  assert index.calls == [(['a', 'b', 'c'], 2)]
  assert [[row[0].contents for row in answer] for answer in answers] == [
    ['a', 'b', 'a'],
    ['b', 'c'],
    ['a'],
  ]
  assert (counters.requests, counters.queries) == (3, 6)
  assert (counters.searched, counters.batches) == (3, 1)


def test_requests_of_different_k_do_not_meet():
  index = Recorder()

  async def body(batcher):
    return await asyncio.gather(*(batcher.search(['a'], k) for k in (3, 1, 3)))

  answers = with_batcher(index, Limits(batch_ms=20), body)
  assert index.calls == [(['a'], 3), (['a'], 1)]
  assert [len(answer[0]) for answer in answers] == [3, 1, 3]


def test_a_batch_is_bounded_and_in_order():
  index = Recorder()

  async def body(batcher):
    await asyncio.gather(*(batcher.search([str(i)] * 2, 1) for i in range(4)))

  with_batcher(index, Limits(batch_ms=20, max_batch=3), body)
  assert [queries for queries, _ in index.calls] == [['0', '1', '2'], ['3']]


def test_a_lone_request_waits_milliseconds():
  async def body(batcher):
    await batcher.search(['a'], 1)

  limits = Limits(batch_ms=2)
  within(0.5, lambda: with_batcher(Recorder(), limits, body))


def test_a_query_that_breaks_the_searcher_fails_alone(caplog):
  index = Recorder()

  async def body(batcher):
    first, second = await asyncio.gather(
      batcher.search(['a', 'b', 'boom', 'c'], 1), batcher.search(['d'], 1)
    )
    return first, second, batcher.counters.errors

  first, (second,), errors = with_batcher(index, Limits(batch_ms=20), body)
  assert [isinstance(row, SearchFailed) for row in first] == [
    False,
    False,
    True,
    False,
  ]
  assert (first[3][0].contents, second[0].contents) == ('c', 'd')
  assert first[2].retry_after_s and 'error ' in str(first[2])
  assert 'broke' not in str(first[2])  # the log says it, and once
  assert errors == 1 and len(caplog.records) == 1
  assert 'the index broke ?[31m' in caplog.text and '\x1b' not in caplog.text
  name = str(first[2]).split('error ')[1].split(';')[0]
  assert name in caplog.text


@pytest.mark.parametrize(
  'broken',
  [
    lambda queries, k: [[]] * (len(queries) - 1),  # too few answers
    lambda queries, k: [[Found('1', 'x', float('nan'))]] * len(queries),
    lambda queries, k: [[Found('1', 'x', float('inf'))]] * len(queries),
    lambda queries, k: None,
    lambda queries, k: (_ for _ in ()).throw(BaseException('a panic')),
  ],
)
def test_a_searcher_that_is_broken_fails_every_query_and_is_asked_again(broken):
  index = Recorder()
  index.broken = broken

  async def body(batcher):
    failed = await batcher.search([str(i) for i in range(500)], 1)
    calls = len(index.calls)
    index.broken = None
    return failed, calls, await batcher.search(['a'], 1)

  failed, calls, good = with_batcher(index, Limits(batch_ms=0), body)
  assert all(isinstance(row, SearchFailed) for row in failed)
  assert calls < 120  # not once for each query
  assert good[0][0].contents == 'a'


def test_client_that_left_does_not_spoil_the_batch():
  index = Recorder()

  async def body(batcher):
    gone = asyncio.create_task(batcher.search(['a'], 1))
    stays = asyncio.create_task(batcher.search(['a'], 1))
    await asyncio.sleep(0)
    gone.cancel()
    return await stays

  assert len(with_batcher(index, Limits(), body)[0]) == 1


def test_what_nobody_waits_for_is_not_searched():
  index = Recorder()
  index.go.clear()

  async def body(batcher):
    first = asyncio.create_task(batcher.search(['a'], 1))
    await until(lambda: index.calls)
    gone = [asyncio.create_task(batcher.search(['b'], 1)) for _ in range(3)]
    await asyncio.sleep(0)
    for task in gone:
      task.cancel()
    index.go.set()
    await first
    # Room for one query: those that left no longer count.
    return await batcher.search(['c'], 1)

  limits = Limits(batch_ms=0, max_pending=4, max_queries=1)
  with_batcher(index, limits, body)
  assert [queries for queries, _ in index.calls] == [['a'], ['c']]


async def call(app, queries, left=None, send=None, **body):
  """Posts queries as uvicorn does, and disconnects when `left` is set.

  `send` gets the messages of the answer; the whole answer comes back.
  """
  scope = dict(
    type='http',
    method='POST',
    path='/retrieve',
    raw_path=b'/retrieve',
    query_string=b'',
    headers=[],
    http_version='1.1',
    scheme='http',
    server=('x', 80),
    client=('x', 1),
    root_path='',
  )
  body = json.dumps({'queries': queries, 'topk': 1, **body}).encode()
  sent, out = iter([body]), []

  async def receive():
    for data in sent:
      return {'type': 'http.request', 'body': data, 'more_body': False}
    await (left or asyncio.Event()).wait()
    return {'type': 'http.disconnect'}

  async def keep(message):
    out.append(message)
    if send:
      await send(message)

  await app(scope, receive, keep)
  return out[0]['status'], b''.join(m['body'] for m in out[1:])


def test_a_client_that_disconnects_gives_its_place_up():
  index = Recorder()
  index.go.clear()
  app = create_app(index, Limits(batch_ms=0))

  async def run():
    async with app.router.lifespan_context(app):
      left = asyncio.Event()
      first = asyncio.create_task(call(app, ['a']))
      await until(lambda: index.calls)
      second = asyncio.create_task(call(app, ['b'], left))
      await asyncio.sleep(0.05)
      left.set()
      status, _ = await asyncio.wait_for(second, 5)  # while 'a' is searched
      assert status == 400
      index.go.set()
      assert (await first)[0] == (await call(app, ['c']))[0] == 200

  asyncio.run(run())
  assert [queries for queries, _ in index.calls] == [['a'], ['c']]


@pytest.mark.parametrize('how', ['disconnects', 'deadline'])
def test_what_was_given_up_is_dropped_between_pieces(how):
  index = Recorder()
  index.go.clear()
  app = create_app(index, Limits(batch_ms=0))
  many = [str(i) for i in range(100)]

  async def run():
    async with app.router.lifespan_context(app):
      left = asyncio.Event()
      big = asyncio.create_task(call(app, [*many, 'shared'], left))
      await until(lambda: index.calls)  # its first piece is being searched
      small = asyncio.create_task(call(app, ['mine', 'shared']))
      await until(lambda: app.state.batcher.pending == 103)
      if how == 'deadline':
        big.cancel()
      left.set()
      await asyncio.wait([big])
      index.go.set()
      assert (await asyncio.wait_for(small, 10))[0] == 200

  asyncio.run(run())
  first, *others = [queries for queries, _ in index.calls]
  assert len(first) == 8 and first == many[:8]
  # What another waits for too is searched, nothing else of the request.
  assert others == [['shared', 'mine']]


class Slow(Recorder):
  """A call of n queries takes `fixed` + n `each` seconds of its own clock."""

  def __init__(self, fixed, each):
    super().__init__()
    self.fixed, self.each, self.now = fixed, each, 0.0

  def search(self, queries, k):
    self.now += self.fixed + self.each * len(queries)
    return super().search(queries, k)

  def sizes(self, counts, **limits):
    """Numbers of queries in the calls that requests of `counts` make."""

    async def run():
      limit = Limits(batch_ms=0, **limits)
      batcher = Batcher(self, limit, clock=lambda: self.now)
      batcher.start()
      for count in counts:
        await batcher.search([str(i) for i in range(count)], 1)
      await batcher.stop()

    asyncio.run(run())
    return [len(queries) for queries, _ in self.calls]


def test_pieces_take_as_long_as_they_should():
  sizes = Slow(0, 0.01).sizes([500], piece_ms=250)
  assert sum(sizes) == 500 and sizes[:2] == [8, 16]
  assert {*sizes[2:-1]} <= {24, 25}
  # A query that takes longer than a piece should goes alone.
  assert Slow(0, 3).sizes([20], piece_ms=250) == [8] + [1] * 12


def test_single_queries_do_not_keep_pieces_small():
  # Calls of one size do not tell a call's fixed cost from a query's.
  sizes = Slow(0.2, 0.0005).sizes([1] * 40 + [256], piece_ms=250)
  assert sizes[40:44] != [1] * 4 and len(sizes) < 60


def test_an_index_that_got_slower_gets_less_at_once():
  now = [0.0]
  pace, sizes = Pace(0.25, 1024, lambda: now[0]), []
  for each in [0.001] * 12 + [0.05] * 12:
    sizes.append(pace.size)
    with pace.timed(sizes[-1]):
      now[0] += each * sizes[-1]
  assert sizes[11:13] == [250, 250] and sizes[-1] <= 6


def test_recorded_answers_do_not_teach_what_a_search_costs(tmp_path):
  index, known = Slow(0, 0.05), [str(i) for i in range(900)]
  store = Recorded(index, tmp_path / 'store')
  store.search(known, 1)
  index.calls.clear()

  async def run():
    batcher = Batcher(
      store, Limits(batch_ms=0, piece_ms=250), clock=lambda: index.now
    )
    batcher.start()
    for queries in known, [f'new {i}' for i in range(60)]:
      await batcher.search(queries, 1)
    await batcher.stop()

  asyncio.run(run())
  sizes = [len(queries) for queries, _ in index.calls]
  assert sum(sizes) == 60 and max(sizes) <= 8


def test_pieces_are_no_smaller_than_what_each_costs_at_least():
  # An exact pass over all vectors: 12 s for one query, 20 ms for another.
  sizes = Slow(12, 0.02).sizes([4000], piece_ms=250, max_batch=1024)
  assert sizes[-2:] == [1024, sum(sizes) % 1024] or max(sizes) == 1024
  assert len(sizes) < 20
  # Where a further query costs a twelfth of the first, 4 times that go along.
  sizes = Slow(12, 1).sizes([400], piece_ms=250)
  assert 40 <= sizes[-2] <= 60


def test_a_large_request_is_answered_whole_and_in_order():
  queries = [str(i % 700) for i in range(2560)]
  index = Recorder()

  async def body(batcher):
    return await batcher.search(queries, 1)

  answers = with_batcher(index, Limits(batch_ms=0, max_batch=100), body)
  assert [row[0].contents for row in answers] == queries
  assert max(len(asked) for asked, _ in index.calls) <= 100
  assert sum(len(asked) for asked, _ in index.calls) == 700


def test_a_searcher_that_waits_is_asked_by_several_threads():
  index = Recorder()
  index.threads = 3
  index.go.clear()

  async def body(batcher):
    asked = asyncio.create_task(batcher.search(list('abcd'), 1))
    await until(lambda: len(index.calls) == 3)
    index.go.set()
    return await asked

  answers = with_batcher(index, Limits(), body)
  assert [row[0].contents for row in answers] == list('abcd')
  assert all(len(queries) == 1 for queries, _ in index.calls)


def test_pending_queries_are_bounded():
  index = Recorder()
  index.go.clear()

  async def body(batcher):
    first = asyncio.create_task(batcher.search(['a', 'b'], 1))
    await until(lambda: index.calls)
    with pytest.raises(Rejected):
      await batcher.search(['c', 'd'], 1)
    index.go.set()
    assert len(await first) == 2
    return await batcher.search(['c', 'd'], 1)

  assert len(with_batcher(index, Limits(max_pending=3), body)) == 2


def test_overload_is_503_with_retry_after(corpus):
  limits = Limits(max_pending=1)
  app = create_app(searcher(corpus), limits)
  with TestClient(app) as client:
    response = client.post('/retrieve', json={'queries': ['a', 'b']})
  assert response.status_code == 503
  assert response.headers['Retry-After'] == '1'


def posted(searcher, *bodies, limits=LIMITS, headers=None, **app):
  """The answers to requests that are sent in turn."""
  with TestClient(
    create_app(searcher, limits, **app), raise_server_exceptions=False
  ) as client:
    return [
      client.post('/retrieve', json=body, headers=headers) for body in bodies
    ]


def test_a_failed_query_fails_its_request_only():
  failed, busy, both, good = posted(
    Recorder(),
    {'queries': ['a', 'fail']},
    {'queries': ['busy', 'a']},
    {'queries': ['busy', 'fail']},
    {'queries': ['a']},
  )
  assert failed.status_code == 502 and 'Retry-After' not in failed.headers
  assert failed.json()['detail'] == [
    {
      'loc': ['body', 'queries', 1],
      'msg': 'no answer to it',
      'type': 'search_failed',
    }
  ]
  assert busy.status_code == 503 and busy.headers['Retry-After'] == '3'
  assert busy.json()['detail'][0]['loc'] == ['body', 'queries', 0]
  assert both.status_code == 502 and len(both.json()['detail']) == 2
  assert good.status_code == 200


def test_others_of_the_batch_are_answered():
  index = Recorder()

  async def run():
    app = create_app(index, Limits(batch_ms=50))
    async with (
      app.router.lifespan_context(app),
      httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url='http://x'
      ) as client,
    ):
      return await asyncio.gather(
        *(
          client.post('/retrieve', json={'queries': queries, 'topk': 1})
          for queries in (['a'], ['b', 'fail'], ['boom'], ['c'])
        )
      )

  answers = asyncio.run(run())
  assert [answer.status_code for answer in answers] == [200, 502, 503, 200]
  assert index.calls[0][0] == ['a', 'b', 'fail', 'boom', 'c']  # one batch
  assert answers[3].json()['result'] == [[{'id': '0', 'contents': 'c'}]]


def test_a_broken_searcher_is_503_and_counted():
  app = create_app(Recorder(), LIMITS)
  with TestClient(app, raise_server_exceptions=False) as client:
    response = client.post('/retrieve', json={'queries': ['boom']})
    assert response.status_code == 503 and response.headers['Retry-After']
    assert 'broke' not in response.text and 'error ' in response.text
    assert client.get('/health').json()['served']['errors'] == 1


def test_who_left_while_another_k_was_searched_is_not_searched():
  index = Recorder()
  index.go.clear()

  async def run():
    batcher = Batcher(index, Limits(batch_ms=50))  # both in one batch
    batcher.start()
    first = asyncio.create_task(batcher.search(['a'], 1))
    later = asyncio.create_task(batcher.search(['gone'], 3))
    await until(lambda: index.calls)
    later.cancel()
    await asyncio.gather(later, return_exceptions=True)
    index.go.set()
    await first
    await batcher.search(['b'], 1)  # the batch of both has ended
    await batcher.stop()

  asyncio.run(run())
  assert [call[0] for call in index.calls] == [['a'], ['b']]


def test_a_deadline_ends_a_request_and_its_place():
  index = Recorder()
  index.go.clear()
  app = create_app(index, Limits(batch_ms=0, deadline_s=30))

  async def run():
    async with (
      app.router.lifespan_context(app),
      httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url='http://x'
      ) as client,
    ):

      def post(query, **headers):
        return client.post(
          '/retrieve', json={'queries': [query], 'topk': 1}, headers=headers
        )

      first = asyncio.create_task(post('a'))
      await until(lambda: index.calls)
      late = await post('b', **{'X-Deadline-Ms': '50'})
      await asyncio.sleep(0.01)
      health = (await client.get('/health')).json()
      index.go.set()
      return late, health, await first, await post('c')

  late, health, first, last = asyncio.run(run())
  assert late.status_code == 504 and '0.05 s' in late.json()['detail']
  assert health['waiting'] == {'requests': 1, 'queries': 1}
  assert (first.status_code, last.status_code) == (200, 200)
  assert [queries for queries, _ in index.calls] == [['a'], ['c']]


def test_every_answer_says_what_it_depends_on(corpus):
  def said(**parameters):
    index = BM25Index(corpus.contents, **parameters)
    app = create_app(LocalSearcher(corpus, index), LIMITS)
    with TestClient(app) as client:
      answers = [
        client.post('/retrieve', json=body)
        for body in ({'queries': ['hamlet']}, {'queries': 3})
      ]
      identity = client.get('/health').json()['identity']
    assert [answer.status_code for answer in answers] == [200, 422]
    found = {answer.headers[IDENTITY_HEADER] for answer in answers}
    assert found == {identity_hash(identity)}
    return found

  assert said() == said() != said(k1=0.9)


@pytest.mark.parametrize('value', ['', '0', '-1', 'soon', '1e9', '9' * 30, '٣'])
def test_senseless_deadline(value):
  sent = value.encode()
  (response,) = posted(
    Recorder(), {'queries': ['a']}, headers={'X-Deadline-Ms': sent}
  )
  if value == '0':
    assert response.status_code == 504
  else:
    assert response.status_code == 422
    detail = response.json()['detail'][0]
    assert detail['loc'] == ['header', 'x-deadline-ms']


def test_requests_in_flight_are_bounded():
  index = Recorder()
  index.go.clear()
  app = create_app(index, Limits(batch_ms=0, max_requests=2))

  async def run():
    async with (
      app.router.lifespan_context(app),
      httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url='http://x'
      ) as client,
    ):

      def post():
        return client.post('/retrieve', json={'queries': ['a']})

      taken = [asyncio.create_task(post()) for _ in range(2)]
      await until(lambda: index.calls)
      while (await client.get('/health')).json()['waiting']['requests'] < 2:
        await asyncio.sleep(0.01)
      refused, health = await post(), await client.get('/health')
      index.go.set()
      return refused, health, *(await asyncio.gather(*taken)), await post()

  refused, health, *others = asyncio.run(run())
  assert refused.status_code == 429 and refused.headers['Retry-After'] == '1'
  assert '--max_requests' in refused.json()['detail']
  assert health.status_code == 200
  assert [other.status_code for other in others] == [200] * 3


def test_bytes_in_flight_are_bounded():
  big, small = {'queries': ['a' * 60] * 8}, {'queries': ['a']}
  limits = dataclasses.replace(LIMITS, max_bytes=300)
  refused, *good = posted(Recorder(), big, small, small, limits=limits)
  # Trying again could not help.
  assert refused.status_code == 413 and '--max_bytes' in refused.text
  assert [response.status_code for response in good] == [200, 200]


class Long(Recorder):
  """Answers with passages of 1 MB."""

  def answer(self, query, k):
    return [Found('0', 'x' * 1_000_000, 1.0)]


def test_bytes_of_an_answer_are_in_flight_until_they_are_sent():
  limits = Limits(batch_ms=0, max_bytes=1_500_000)
  app, sizes = create_app(Long(), limits), []

  async def run():
    async with app.router.lifespan_context(app):
      begun, read = asyncio.Event(), asyncio.Event()

      async def send(message):
        sizes.append(len(message.get('body', b'')))
        if len(sizes) == 3:
          begun.set()
          await read.wait()  # a client that does not read

      slow = asyncio.create_task(call(app, ['a'], send=send))
      await asyncio.wait_for(begun.wait(), 10)
      refused = await call(app, ['b'])
      read.set()
      return refused, await slow, await call(app, ['b'])

  refused, first, second = asyncio.run(run())
  assert refused[0] == 503 and b'--max_bytes' in refused[1]
  assert first == second and first[0] == 200 and len(first[1]) > 1_000_000
  assert max(sizes) <= 1 << 16  # so that the transport can hold it back


def test_who_does_not_read_an_answer_gives_its_bytes_back():
  limits = Limits(batch_ms=0, max_bytes=1_500_000, deadline_s=0.2)
  app = create_app(Long(), limits)

  async def run():
    async with app.router.lifespan_context(app):

      async def send(message):
        if message.get('body'):
          await asyncio.Event().wait()

      await asyncio.wait_for(call(app, ['a'], send=send), 20)
      return await call(app, ['b'])

  assert asyncio.run(run())[0] == 200


def test_the_token_guards_everything_but_health_and_ready(corpus):
  app = create_app(searcher(corpus), LIMITS, token='s3cret')
  with TestClient(app) as client:
    for headers in (
      {},
      {'Authorization': 's3cret'},
      {'Authorization': 'Bearer'},
      {'Authorization': 'Bearer wrong'},
      {'Authorization': 'Basic s3cret'},
      {'Authorization': b'Bearer \xff\xfe'},
      {'X-Token': 's3cret'},
    ):
      for method, path in (
        ('POST', '/retrieve'),
        ('GET', '/metrics'),
        ('GET', '/openapi.json'),
        ('GET', '/docs'),
        ('GET', '/none'),
      ):
        response = client.request(
          method,
          path,
          headers=headers,
          json={'queries': ['hamlet']} if method == 'POST' else None,
        )
        assert response.status_code == 401, path
        assert response.headers['WWW-Authenticate'] == 'Bearer'
        assert 'hamlet' not in response.text.lower()
    assert set(client.get('/health').json()) == {'status', 'version'}
    assert client.get('/ready').status_code in (200, 503)
    client.headers['Authorization'] = 'bearer s3cret'
    assert client.post('/retrieve', json={'queries': ['a']}).status_code == 200
    assert client.get('/health').json()['corpus']['sha256'] == corpus.sha256
    assert client.get('/metrics').status_code == 200


def test_pages_of_other_sites_are_refused(corpus):
  body = '{"queries": ["hamlet"]}'
  with TestClient(
    create_app(searcher(corpus), LIMITS, hosts=HOSTS),
    base_url='http://127.0.0.1:8000',
  ) as client:

    def status(**headers):
      return client.post('/retrieve', content=body, headers=headers).status_code

    assert status() == 200
    assert status(Host='localhost:8000') == 200
    assert status(Origin='http://127.0.0.1:8000') == 200
    assert status(Origin='http://evil.example') == 403
    assert status(Origin='null') == 403
    assert status(Host='evil.example') == 403
    assert status(Host='localhost.evil.example') == 403
    assert client.get('/metrics', headers={'Host': 'a.b'}).status_code == 403
    assert status(Host='gpu01:8000') == 200  # --allow_host
    named = client.get('/metrics', headers={'Host': 'a.b:80'}).json()['detail']
    assert "'a.b:80'" in named and '--allow_host=NAME' in named
    other = client.get('/metrics', headers={'Origin': 'http://a.b'}).json()
    assert 'Origin' in other['detail'] and '--token_file' in other['detail']
  with TestClient(
    create_app(searcher(corpus), LIMITS, hosts=HOSTS, token='t'),
    base_url='http://tunnel.example',
    headers={'Authorization': 'Bearer t'},
  ) as client:  # who has the token is no stranger
    assert client.post('/retrieve', content=body).status_code == 200


def test_ready_waits_for_the_warm_up(corpus):
  class Cold(BM25Index):
    go, shapes = threading.Event(), []

    def search(self, queries, k):
      assert self.go.wait(10)
      self.shapes.append(len(queries))
      return super().search(queries, k)

  app = create_app(LocalSearcher(corpus, Cold(corpus.contents)), LIMITS)
  with TestClient(app) as client:
    response = client.get('/ready')
    assert response.status_code == 503 and response.json() == {'ready': False}
    assert client.get('/health').status_code == 200
    Cold.go.set()
    end = time.monotonic() + 10
    while client.get('/ready').status_code != 200:
      assert time.monotonic() < end
    assert client.get('/ready').json() == {'ready': True}
    assert Cold.shapes == [8]  # one small batch
    assert client.get('/health').json()['served']['queries'] == 0


def test_a_first_search_that_takes_long_does_not_hold_the_start(corpus, caplog):
  go = threading.Event()

  class Cold(BM25Index):
    def search(self, queries, k):
      assert go.wait(30)
      return super().search(queries, k)

  limits = dataclasses.replace(LIMITS, warm_s=0.01)
  app = create_app(LocalSearcher(corpus, Cold(corpus.contents)), limits)
  with TestClient(app) as client:
    end = time.monotonic() + 20
    while client.get('/ready').status_code != 200:  # while it is at work
      assert time.monotonic() < end
    assert '--warm_s' in caplog.text
    go.set()
    answer = client.post('/retrieve', json={'queries': ['hamlet']})
    assert answer.status_code == 200 and answer.json()['result'][0]


def test_ready_waits_for_the_programs(corpus):
  go, ran = threading.Event(), []

  def program():
    assert go.wait(10)
    ran.append(1)

  index = BM25Index(corpus.contents)
  app = create_app(
    LocalSearcher(corpus, index), LIMITS, programs=[program] * 20
  )
  with TestClient(app) as client:
    assert client.get('/ready').status_code == 503
    # They keep nobody waiting who does not need them.
    answer = client.post('/retrieve', json={'queries': ['hamlet']})
    assert answer.status_code == 200 and not ran
    go.set()
    end = time.monotonic() + 10
    while client.get('/ready').status_code != 200:
      assert time.monotonic() < end
    assert len(ran) == 20


def test_a_stop_waits_for_no_program_not_begun(corpus):
  began, go = [], threading.Event()

  def program():
    began.append(1)
    assert go.wait(10)

  app = create_app(searcher(corpus), LIMITS, programs=[program] * 50)
  with TestClient(app) as client:
    end = time.monotonic() + 10
    while not began:
      assert time.monotonic() < end
      client.get('/health')
  go.set()
  for thread in threading.enumerate():
    if thread.name.startswith('compile'):
      thread.join(10)
      assert not thread.is_alive()
  assert len(began) <= 8


def test_ready_never_comes_where_a_program_fails(corpus):
  def program():
    raise RuntimeError('no room')

  app = create_app(searcher(corpus), LIMITS, programs=[program])
  with TestClient(app, raise_server_exceptions=False) as client:
    end = time.monotonic() + 10
    while not app.state.warm.done():
      assert time.monotonic() < end
      assert client.get('/ready').status_code == 503
    assert client.get('/ready').status_code == 503


def test_ready_never_comes_where_the_warm_up_fails(corpus):
  class Broken(BM25Index):
    def search(self, queries, k):
      raise RuntimeError('broken')

  app = create_app(LocalSearcher(corpus, Broken(corpus.contents)), LIMITS)
  with TestClient(app, raise_server_exceptions=False) as client:
    assert client.get('/ready').status_code == 503
    response = client.post('/retrieve', json={'queries': ['a']})
    assert response.status_code == 503
    assert client.get('/ready').status_code == 503


def test_searches_that_may_cost_are_not_warmed_up():
  index = Recorder()
  with TestClient(create_app(index, LIMITS)) as client:
    assert client.get('/ready').status_code == 200
    assert client.get('/health').json()['identity'] == index.identity | {
      'query': {'max_bytes': 64, 'max_terms': 4}
    }
  assert index.calls == [] and index.closed == 1


def test_metrics(http):
  before = http.get('/health').json()['served']
  ask(http, queries=['hamlet', 'hamlet', 'same'])
  http.post('/retrieve', json={'queries': 3})
  after = http.get('/health').json()['served']
  assert after['queries'] - before['queries'] == 3
  assert after['searched'] - before['searched'] == 2
  response = http.get('/metrics')
  assert response.headers['content-type'].startswith('text/plain')
  values = dict(
    line.rsplit(' ', 1)
    for line in response.text.splitlines()
    if not line.startswith('#')
  )
  for name in (
    'retrieval_stage_seconds_count{stage="batch"}',
    'retrieval_request_seconds_count',
    'retrieval_batch_queries_count',
    'retrieval_responses_total{status="200"}',
    'retrieval_responses_total{status="422"}',
    'retrieval_rejected_total{reason="request"}',
  ):
    assert float(values[name]) > 0, name
  assert float(values['retrieval_pending_queries']) == 0
  assert float(values['retrieval_requests_in_flight']) == 0


def test_lone_surrogates_in_a_passage_are_sent_as_question_marks():
  class Web(Recorder):
    def answer(self, query, k):
      return [Found('\udfff', 'a \ud800 b', 1.0)]

  for scores in (False, True):
    (response,) = posted(Web(), {'queries': ['a'], 'return_scores': scores})
    assert response.status_code == 200 and 'a ? b' in response.text


# Documents.


def opened(http, **body):
  response = http.post('/document', json=body)
  assert response.status_code == 200, response.text
  return response.json()['result']


def test_a_document_is_its_passages_in_pieces(corpus):
  limits = dataclasses.replace(LIMITS, piece_chars=20)
  with TestClient(create_app(searcher(corpus), limits)) as http:
    assert http.get('/health').json()['documents'] is True
    whole = corpus[0].contents
    pieces = -(-len(whole) // 20)
    parts = [opened(http, id='0', piece=n + 1) for n in range(pieces)]
    assert ''.join(p['contents'] for p in parts) == whole
    assert {p['pieces'] for p in parts} == {pieces}
    assert opened(http, id='0') == opened(http, id='0', piece=1)
    assert opened(http, id='0', piece=pieces + 1)['contents'] == ''
    assert opened(http, id='absent') is None
    assert opened(http, id='0', piece=2, chars=5)['contents'] == whole[5:10]
    # Neighbours of the same title are one document.
    same = [opened(http, id=n) for n in '456']
    assert same[0]['contents'] == '"Twin"\nthe same word'
    assert same == same[:1] * 3 and same[0]['pieces'] == 4


def test_an_article_is_found_by_any_of_its_parts(tmp_path):
  parts = [
    ('a', 'X', 'one'),
    ('b', 'X', 'two'),
    ('c', 'Y', 'x'),
    ('7', '', 'z'),
  ]
  parts += [('8', '', 'z'), ('d', 'X', 'three')]
  found = read_corpus(write_corpus(tmp_path / 'c.jsonl', parts))
  local = searcher(found)
  assert [local.document(n) for n in 'ab'] == ['"X"\none\ntwo'] * 2
  assert local.document('d') == '"X"\nthree'
  assert local.document('7') == '""\nz'  # no title: nothing is alike
  assert [found.position(n) for n in 'abc78d'] == [*range(6)]
  for name in ('', 'e', '0', '-1', '٣', '9' * 5000, '\ud800'):
    assert found.position(name) is None and local.document(name) is None


def test_ids_that_count_need_no_table(tmp_path):
  parts = [(str(n), f'T{n}', 'x') for n in range(30)]
  found = read_corpus(write_corpus(tmp_path / 'c.jsonl', parts))
  assert [found.position(str(n)) for n in range(30)] == [*range(30)]
  assert '_table' not in vars(found)
  assert found.position('01') is None


@pytest.mark.parametrize(
  'body, loc, said',
  [
    ({}, ['id'], 'string'),
    ({'id': 7}, ['id'], 'string'),
    ({'id': '7', 'piece': 0}, ['piece'], 'from 1'),
    ({'id': '7', 'piece': 1.5}, ['piece'], 'integer'),
    ({'id': '7', 'piece': True}, ['piece'], 'integer'),
    ({'id': '7', 'queries': []}, ['queries'], 'known: id, piece, chars'),
    ({'id': '7', 'chars': 4001}, ['chars'], 'to 4000 (--piece_chars)'),
    ([], [], 'object'),
  ],
)
def test_a_bad_request_for_a_document_is_named(http, body, loc, said):
  response = http.post('/document', json=body)
  assert response.status_code == 422
  [detail] = response.json()['detail']
  assert detail['loc'] == ['body', *loc] and said in detail['msg']


def test_what_has_no_documents_has_no_such_path(corpus, tmp_path):
  class Bare(LocalSearcher):
    document = None

  bare = Bare(corpus, BM25Index(corpus.contents))
  recorded = Recorded(searcher(corpus), tmp_path / 'answers')
  for one, there in ((bare, False), (recorded, True)):
    with TestClient(create_app(one, LIMITS)) as http:
      assert http.get('/health').json()['documents'] is there
      response = http.post('/document', json={'id': '0'})
      assert response.status_code == (200 if there else 404)
  replayed = Recorded(None, tmp_path / 'answers')
  assert replayed.document is None
  replayed.close()
