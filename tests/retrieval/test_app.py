"""The application without a process: protocol, bounds, batching, fuzz."""

import asyncio
import dataclasses
import json
import threading
import time

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from retrieval.app import create_app
from retrieval.batcher import Batcher
from retrieval.bm25 import BM25Index
from retrieval.core import (
  IDENTITY_HEADER,
  Found,
  LocalSearcher,
  SearchFailed,
  identity_hash,
)
from retrieval.protocol import Limits, Rejected
from tests.clock import until, within

LIMITS = Limits(max_topk=5, max_queries=8, max_query_bytes=64, batch_ms=0)


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
    ({'queries': ['x'], 'topk': 2.5}, ['topk'], 'integer'),
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
    ['a', 'b', 'a'], ['b', 'c'], ['a']
  ]
  assert (counters.requests, counters.queries) == (3, 6)
  assert (counters.searched, counters.batches) == (3, 1)


def test_requests_of_different_k_do_not_meet():
  index = Recorder()

  async def body(batcher):
    return await asyncio.gather(
      *(batcher.search(['a'], k) for k in (3, 1, 3))
    )

  answers = with_batcher(index, Limits(batch_ms=20), body)
  assert index.calls == [(['a'], 1), (['a'], 3)]
  assert [len(answer[0]) for answer in answers] == [3, 1, 3]


def test_a_batch_is_bounded_and_in_order():
  index = Recorder()

  async def body(batcher):
    await asyncio.gather(*(batcher.search([str(i)] * 2, 1) for i in range(4)))

  with_batcher(index, Limits(batch_ms=20, max_queries=4), body)
  assert [queries for queries, _ in index.calls] == [['0', '1'], ['2', '3']]


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
    False, False, True, False
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
  assert calls < 60  # not once for each query
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


def test_a_client_that_disconnects_gives_its_place_up():
  index = Recorder()
  index.go.clear()
  app = create_app(index, Limits(batch_ms=0, max_queries=1))
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
      await until(lambda: index.calls)
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
    Recorder(), {'queries': ['a', 'fail']}, {'queries': ['busy', 'a']},
    {'queries': ['busy', 'fail']}, {'queries': ['a']},
  )
  assert failed.status_code == 502 and 'Retry-After' not in failed.headers
  assert failed.json()['detail'] == [
    {'loc': ['body', 'queries', 1], 'msg': 'no answer to it',
     'type': 'search_failed'}
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
      return await asyncio.gather(*(
        client.post('/retrieve', json={'queries': queries, 'topk': 1})
        for queries in (['a'], ['b', 'fail'], ['boom'], ['c'])
      ))

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
      stats = (await client.get('/stats')).json()
      index.go.set()
      return late, stats, await first, await post('c')

  late, stats, first, last = asyncio.run(run())
  assert late.status_code == 504 and '0.05 s' in late.json()['detail']
  assert stats['pending_queries'] == 1 and stats['in_flight'] == 1
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
      while (await client.get('/stats')).json()['in_flight'] < 2:
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
  assert refused.status_code == 503 and '--max_bytes' in refused.text
  assert [response.status_code for response in good] == [200, 200]


def test_the_token_guards_everything_but_health_and_ready(corpus):
  app = create_app(searcher(corpus), LIMITS, token='s3cret')
  with TestClient(app) as client:
    for headers in (
      {}, {'Authorization': 's3cret'}, {'Authorization': 'Bearer'},
      {'Authorization': 'Bearer wrong'}, {'Authorization': 'Basic s3cret'},
      {'Authorization': b'Bearer \xff\xfe'}, {'X-Token': 's3cret'},
    ):
      for method, path in (
        ('POST', '/retrieve'), ('GET', '/metrics'), ('GET', '/stats'),
        ('GET', '/openapi.json'), ('GET', '/docs'), ('GET', '/none'),
      ):
        response = client.request(
          method, path, headers=headers,
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
    create_app(searcher(corpus), LIMITS, loopback=True),
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
    assert client.get('/stats', headers={'Host': 'a.b'}).status_code == 403
  with TestClient(
    create_app(searcher(corpus), LIMITS, loopback=True, token='t'),
    base_url='http://tunnel.example', headers={'Authorization': 'Bearer t'},
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
    assert set(Cold.shapes) == {1, 8}  # up to max_queries
    assert client.get('/health').json()['served']['queries'] == 0


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
    assert client.get('/health').json()['identity'] == index.identity
  assert index.calls == [] and index.closed == 1


def test_metrics_and_stats(http):
  before = http.get('/stats').json()
  ask(http, queries=['hamlet', 'hamlet', 'same'])
  http.post('/retrieve', json={'queries': 3})
  after = http.get('/stats').json()
  assert after['queries'] - before['queries'] == 3
  assert after['searched'] - before['searched'] == 2
  assert after['responses']['422'] == before['responses'].get('422', 0) + 1
  assert after['recent_p99_ms'] >= after['recent_p50_ms'] > 0
  assert after['recent_queries_per_s'] > 0 and after['rss_bytes'] > 10**6
  response = http.get('/metrics')
  assert response.headers['content-type'].startswith('text/plain')
  values = dict(
    line.rsplit(' ', 1) for line in response.text.splitlines()
    if not line.startswith('#')
  )
  for name in (
    'retrieval_stage_seconds_count{stage="batch"}',
    'retrieval_request_seconds_count', 'retrieval_batch_queries_count',
    'retrieval_responses_total{status="200"}',
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
