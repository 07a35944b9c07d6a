"""The application without a process: protocol, bounds, batching, fuzz."""

import asyncio
import json
import threading
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from retrieval.app import Batcher, Limits, Overloaded, create_app
from retrieval.bm25 import BM25Index

LIMITS = Limits(max_topk=5, max_queries=8, max_query_bytes=64, batch_ms=0)


@pytest.fixture(scope='module')
def http(corpus):
  app = create_app(corpus, BM25Index(corpus.contents), LIMITS)
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
    ({}, ['queries'], 'missing'),
    ({'queries': 'hamlet'}, ['queries'], 'list of strings'),
    ({'queries': []}, ['queries'], '0 queries'),
    ({'queries': ['x'] * 9}, ['queries'], '9 queries; send 1 to 8'),
    ({'queries': ['x', None]}, ['queries', 1], 'string'),
    ({'queries': ['x', ['y']]}, ['queries', 1], 'string'),
    ({'queries': ['é' * 33]}, ['queries', 0], '66 bytes'),
    ({'queries': ['x'], 'topk': 0}, ['topk'], 'between 1 and 5'),
    ({'queries': ['x'], 'topk': -1}, ['topk'], 'between 1 and 5'),
    ({'queries': ['x'], 'topk': 10**9}, ['topk'], 'between 1 and 5'),
    ({'queries': ['x'], 'topk': 2.0}, ['topk'], 'integer'),
    ({'queries': ['x'], 'topk': True}, ['topk'], 'integer'),
    ({'queries': ['x'], 'topk': '3'}, ['topk'], 'integer'),
    ({'queries': ['x'], 'return_scores': 1}, ['return_scores'], 'true or'),
    ({'queries': ['x'], 'top_k': 3}, ['top_k'], "meant 'topk'"),
    ({'queries': ['x'], 'zebra': 3}, ['zebra'], 'known: queries'),
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
    b'', b'{', b'{"queries": ["x"]', b'\xff\xfe', b'"\xed\xa0\x80"',
    b'[' * 5000, b'{"queries": ["x"], "topk": ' + b'9' * 5000 + b'}',
    b'{"queries": ["x"], "topk": NaN}', b'{"queries": ["x"], "topk": 1e999}',
    b'{"\\ud800": 1, "queries": ["x"]}', b'\x00', b'null',
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


def test_body_too_large(http):
  response = http.post('/retrieve', content=b' ' * (LIMITS.max_body_bytes + 1))
  assert response.status_code == 413


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
  lambda inner: st.lists(inner, max_size=4)
  | st.dictionaries(st.text(max_size=8), inner, max_size=4),
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
  max_examples=300,
  deadline=None,
  suppress_health_check=[HealthCheck.function_scoped_fixture],
)


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
    assert len(answer['result']) == len(json.loads(response.request.content)[
      'queries'
    ])
  else:
    assert answer['detail'][0]['msg']


class Recorder:
  """An index that keeps the calls, and works only when let."""

  parameters = {'name': 'recorder'}

  def __init__(self):
    self.calls, self.go = [], threading.Event()
    self.go.set()

  def search(self, queries, k):
    self.calls.append((list(queries), k))
    assert self.go.wait(10)
    if 'boom' in queries:
      raise RuntimeError('the index broke')
    ids = np.tile(np.arange(k), (len(queries), 1))
    return ids, -ids.astype(np.float32)


def with_batcher(index, limits, body):
  async def run():
    batcher = Batcher(index, limits)
    batcher.start()
    try:
      return await body(batcher)
    finally:
      index.go.set()
      await batcher.stop()

  return asyncio.run(run())


def test_requests_of_many_clients_become_one_call():
  index = Recorder()

  async def body(batcher):
    answers = await asyncio.gather(
      batcher.search(['a', 'b', 'a'], 2),
      batcher.search(['b', 'c'], 4),
      batcher.search(['a'], 1),
    )
    return answers, batcher.counters

  answers, counters = with_batcher(index, Limits(batch_ms=20), body)
  assert index.calls == [(['a', 'b', 'c'], 4)]
  assert [[len(row) for row in answer] for answer in answers] == [
    [2, 2, 2], [4, 4], [1]
  ]
  assert (counters.requests, counters.queries) == (3, 6)
  assert (counters.searched, counters.batches) == (3, 1)


def test_a_batch_is_bounded_and_in_order():
  index = Recorder()

  async def body(batcher):
    await asyncio.gather(*(batcher.search([str(i)] * 2, 1) for i in range(4)))

  with_batcher(index, Limits(batch_ms=20, max_queries=4), body)
  assert [queries for queries, _ in index.calls] == [['0', '1'], ['2', '3']]


def test_a_lone_request_waits_milliseconds():
  async def body(batcher):
    begun = time.monotonic()
    await batcher.search(['a'], 1)
    return time.monotonic() - begun

  assert with_batcher(Recorder(), Limits(batch_ms=2), body) < 0.5


def test_broken_index_fails_its_batch_only():
  async def body(batcher):
    with pytest.raises(RuntimeError, match='broke'):
      await batcher.search(['boom'], 1)
    return await batcher.search(['a'], 1)

  assert with_batcher(Recorder(), Limits(), body) == [[(0, 0.0)]]


def test_client_that_left_does_not_spoil_the_batch():
  index = Recorder()

  async def body(batcher):
    gone = asyncio.create_task(batcher.search(['a'], 1))
    stays = asyncio.create_task(batcher.search(['a'], 1))
    await asyncio.sleep(0)
    gone.cancel()
    return await stays

  assert with_batcher(index, Limits(), body) == [[(0, 0.0)]]


def test_what_nobody_waits_for_is_not_searched():
  index = Recorder()
  index.go.clear()

  async def body(batcher):
    first = asyncio.create_task(batcher.search(['a'], 1))
    await asyncio.sleep(0.05)
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


def test_a_client_that_disconnects_gives_its_place_up(corpus):
  index = Recorder()
  index.go.clear()
  app = create_app(corpus, index, Limits(batch_ms=0, max_queries=1))
  scope = dict(
    type='http', method='POST', path='/retrieve', raw_path=b'/retrieve',
    query_string=b'', headers=[], http_version='1.1', scheme='http',
    server=('x', 80), client=('x', 1), root_path='',
  )

  async def call(query, left):
    """Posts a query and disconnects when `left` is set."""
    sent = iter([json.dumps({'queries': [query], 'topk': 1}).encode()])
    out = []

    async def receive():
      for data in sent:
        return {'type': 'http.request', 'body': data, 'more_body': False}
      await left.wait()
      return {'type': 'http.disconnect'}

    async def send(message):
      out.append(message)

    await app(dict(scope), receive, send)
    return out[0]['status']

  async def run():
    async with app.router.lifespan_context(app):
      stays, leaves = asyncio.Event(), asyncio.Event()
      first = asyncio.create_task(call('a', stays))
      await asyncio.sleep(0.05)
      second = asyncio.create_task(call('b', leaves))
      await asyncio.sleep(0.05)
      leaves.set()
      assert await asyncio.wait_for(second, 5) == 400  # while 'a' is searched
      index.go.set()
      assert await first == 200
      assert await call('c', stays) == 200

  asyncio.run(run())
  assert [queries for queries, _ in index.calls] == [['a'], ['c']]


def test_pending_queries_are_bounded():
  index = Recorder()
  index.go.clear()

  async def body(batcher):
    first = asyncio.create_task(batcher.search(['a', 'b'], 1))
    await asyncio.sleep(0.05)
    with pytest.raises(Overloaded):
      await batcher.search(['c', 'd'], 1)
    index.go.set()
    assert len(await first) == 2
    return await batcher.search(['c', 'd'], 1)

  assert len(with_batcher(index, Limits(max_pending=3), body)) == 2


def test_overload_is_503_with_retry_after(corpus):
  limits = Limits(max_pending=1)
  app = create_app(corpus, BM25Index(corpus.contents), limits)
  with TestClient(app) as client:
    response = client.post('/retrieve', json={'queries': ['a', 'b']})
  assert response.status_code == 503
  assert response.headers['Retry-After'] == '1'
