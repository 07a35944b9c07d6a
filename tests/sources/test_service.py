"""ServiceSource against a scripted HTTP server of the real protocol."""

import asyncio
import http.server
import json
import threading
import time

from ml_collections import ConfigDict
import pytest

from searchrl_jax.sources import service
from searchrl_jax.sources.core import SourceError
from searchrl_jax.types import SearchError, SearchRequest, SearchResult
from tests.clock import until

pytestmark = pytest.mark.slow


class Server:
  """Answers with one passage for each query; `poison` breaks a batch."""

  def __init__(self):
    self.batches, self.poison, self.status = [], {}, None
    self.health, self.delay = {'passages': 3}, 0.0
    self.running = self.most_running = 0
    self.together: threading.Barrier | None = None  # answers wait for others
    self.named, self.named_status, self.token = set(), 502, None
    self.passages = 1  # of each query, whatever topk is
    outer = self

    class Handler(http.server.BaseHTTPRequestHandler):
      protocol_version = 'HTTP/1.1'

      def log_message(self, *_):
        pass

      def _send(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)

      def do_GET(self):
        if outer.health is None:
          self._send(404, {})
        elif isinstance(outer.health, str):  # of another server
          self._send(200, outer.health)
        else:
          self._send(200, outer.health)

      def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
        queries = body['queries']
        if outer.token and (
          self.headers['Authorization'] != f'Bearer {outer.token}'
        ):
          self._send(401, {'detail': 'no'})
          return
        outer.batches.append((queries, body['topk']))
        outer.running += 1
        outer.most_running = max(outer.most_running, outer.running)
        time.sleep(outer.delay)
        if outer.together:
          outer.together.wait(10)
        outer.running -= 1
        status = outer.status or next(
          (s for q, s in outer.poison.items() if q in queries), None
        )
        if status:
          self._send(status, {'detail': 'no'})
          return
        named = [
          {'loc': ['body', 'queries', i], 'msg': 'no', 'type': 'search_failed'}
          for i, query in enumerate(queries)
          if query in outer.named
        ]
        if named:
          self._send(outer.named_status, {'detail': named})
          return
        result = [
          [
            {
              'document': {'id': f'id-{q}', 'contents': f'"{q}"\nabout {q}'},
              'score': 1.5,
            }
          ]
          * outer.passages
          for q in queries
        ]
        self._send(200, {'result': result})

    self._server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    # A client that gives up breaks the pipe: expected here, not worth a trace.
    self._server.handle_error = lambda *_: None
    self.url = f'http://127.0.0.1:{self._server.server_port}'
    threading.Thread(target=self._server.serve_forever, daemon=True).start()

  def stop(self):
    self._server.shutdown()
    self._server.server_close()


@pytest.fixture
def server():
  server = Server()
  yield server
  server.stop()


def config(url, **fields):
  return ConfigDict(
    dict(
      module='service', url=url, k=3, timeout=2.0, deadline=3.0, attempts=2,
      batch_ms=20.0,
    )
    | fields
  )  # fmt: skip


def ask(source, *queries, k=3):
  return source.search([SearchRequest(q, k) for q in queries])


def run(coroutine_of_source, server, **fields):
  async def main():
    source = service.ServiceSource(config(server.url, **fields))
    try:
      return await coroutine_of_source(source)
    finally:
      await source.close()

  return asyncio.run(main())


def test_trajectories_share_a_request_and_equal_queries_are_sent_once(server):
  async def main(source):
    return await asyncio.gather(
      ask(source, 'a', 'b'), ask(source, 'b'), ask(source, 'c'), ask(source)
    )

  first, second, third, none = run(main, server)
  assert server.batches == [(['a', 'b', 'c'], 3)]
  assert [r.request.query for r in first] == ['a', 'b']
  assert [r.passages[0].id for r in first] == ['id-a', 'id-b']
  assert second[0].passages == first[1].passages and none == []
  passage = third[0].passages[0]
  assert (passage.title, passage.text, passage.score) == ('c', 'about c', 1.5)
  assert first[0].seconds >= 0.02  # it was asked before the window began


def test_different_k_are_different_requests(server):
  async def main(source):
    return await asyncio.gather(ask(source, 'a', k=1), ask(source, 'a', k=5))

  run(main, server)
  assert sorted(server.batches) == [(['a'], 1), (['a'], 5)]


def test_queries_of_later_windows_do_not_wait_for_earlier_ones(server):
  server.together = threading.Barrier(2)  # neither is answered alone

  async def main(source):
    async def late():
      await until(lambda: server.batches)
      return await ask(source, 'b')

    await asyncio.gather(ask(source, 'a'), late())

  run(main, server, timeout=10.0, deadline=20.0)
  assert len(server.batches) == server.most_running == 2


def test_a_query_that_the_server_refuses_has_found_nothing(server):
  """Or a policy could leave the loss by writing it."""
  server.poison = {'bad': 422}

  async def main(source):
    return await ask(source, 'a', 'bad', 'c')

  first, bad, last = run(main, server)
  assert isinstance(bad, SearchResult) and bad.passages == ()
  assert first.passages and last.passages
  server.poison['health'] = 422  # whatever it is asked
  alone = run(lambda source: ask(source, 'bad'), server)
  assert isinstance(alone[0], SearchError) and alone[0].kind == 'rejected'


@pytest.mark.parametrize('status', [404, 408, 422])
def test_a_server_that_refuses_everything_finds_nothing_in_no_query(
  server, other, status
):
  """Beside one that answers; queries come one at a time."""
  server.health, other.health, other.status = None, None, status

  async def main():
    source = service.ServiceSource(two(server, other))
    try:
      return [(await ask(source, f'q{n}'))[0] for n in range(6)]
    finally:
      await source.close()

  found = asyncio.run(main())
  answered = [r for r in found if isinstance(r, SearchResult)]
  assert answered and all(r.passages for r in answered)
  if status != 422:  # it is no server of the protocol: the other one is asked
    assert answered == found


def test_a_bad_query_harms_no_other(server):
  server.poison = {'bad': 500}

  async def main(source):
    return await asyncio.gather(
      ask(source, 'a', 'b', 'c'), ask(source, 'bad', 'd')
    )

  (good, mixed) = run(main, server)
  assert all(isinstance(r, SearchResult) for r in (*good, mixed[1]))
  assert isinstance(mixed[0], SearchError)
  assert mixed[0].kind == 'bad_response'
  assert server.url in mixed[0].message
  assert mixed[0].request.query == 'bad'


def test_an_overloaded_server_is_not_asked_in_halves(server):
  server.status = 503

  async def main(source):
    return await ask(source, *'abcdefgh')

  answers = run(main, server)
  assert {a.kind for a in answers} == {'overloaded'}
  assert len(server.batches) == 2  # the client's two attempts


def test_a_request_that_times_out_fails_all_its_queries(server):
  """Those of other trajectories too, and is not asked in halves."""
  server.delay = 3.0

  async def main():
    source = service.ServiceSource(config(server.url, timeout=1.0, attempts=1))
    found = await asyncio.gather(ask(source, 'a', 'b'), ask(source, 'c'))
    await source.close()
    return found

  found = asyncio.run(main())
  assert [[a.kind for a in of] for of in found] == [
    ['timeout'] * 2,
    ['timeout'],
  ]
  assert [sorted(queries) for queries, _ in server.batches] == [[*'abc']]


def test_an_absent_server_is_an_error_for_each_and_check_names_the_fix():
  async def main():
    source = service.ServiceSource(config('http://127.0.0.1:9', attempts=1))
    answers = await ask(source, 'a', 'b')
    with pytest.raises(SourceError) as error:
      await source.check()
    await source.close()
    return answers, str(error.value)

  answers, message = asyncio.run(main())
  assert [a.kind for a in answers] == ['unreachable', 'unreachable']
  assert 'http://127.0.0.1:9' in message and 'config.source.url' in message


def test_check(server):
  async def main(source):
    return await source.check()

  assert run(main, server) == {'passages': 3}
  server.health = None  # Search-R1's own server has no /health
  assert 'retrieve' in run(main, server)['health']
  server.passages = 5  # another does not read topk
  assert 'retrieve' in run(main, server)['health']
  assert len(run(lambda source: ask(source, 'a'), server)[0].passages) == 3
  server.health = 'ok'
  assert 'retrieve' in run(main, server)['health']
  server.status = 500
  with pytest.raises(SourceError, match='500'):
    run(main, server)


def test_check_notices_a_missing_token(server, monkeypatch):
  monkeypatch.delenv('RETRIEVAL_TOKEN', raising=False)
  server.health = {'status': 'ok', 'version': '1'}  # all that a stranger sees
  server.token = 's3cret'

  async def main(source):
    return await source.check()

  with pytest.raises(SourceError, match='RETRIEVAL_TOKEN'):
    run(main, server)
  monkeypatch.setenv('RETRIEVAL_TOKEN', 's3cret')
  assert run(main, server) == server.health


def two(first, second, **fields):
  return config(f'{first.url}, {second.url}', **fields)


@pytest.fixture
def other():
  server = Server()
  yield server
  server.stop()


def test_several_urls_share_and_fail_over(server, other):
  async def main():
    source = service.ServiceSource(two(server, other, attempts=3))
    assert await source.check() == {'passages': 3}
    for i in range(4):
      await ask(source, f'a{i}')
    shared = (len(server.batches), len(other.batches))
    server.stop()
    server.status = 503  # on the connections that are open
    answers = [(await ask(source, f'b{i}'))[0] for i in range(4)]
    await source.close()
    return shared, answers

  shared, answers = asyncio.run(main())
  assert shared == (3, 3)  # one of each is of the check
  assert [a.passages[0].id for a in answers] == [f'id-b{i}' for i in range(4)]


def test_check_of_replicas(server, other, caplog):
  def check(config):
    async def main():
      source = service.ServiceSource(config)
      try:
        return await source.check()
      finally:
        await source.close()

    return asyncio.run(main())

  server.health = {'identity': {'corpus': 1}}
  other.health = {'identity': {'corpus': 1}, 'uptime_s': 5}
  assert check(two(server, other)) == server.health
  other.health = {'identity': {'corpus': 2}}
  with pytest.raises(SourceError, match='config.source.url') as error:
    check(two(server, other))
  assert server.url in str(error.value) and other.url in str(error.value)
  absent = config(f'http://127.0.0.1:9,{other.url}', attempts=1)
  assert check(absent) == other.health
  assert 'http://127.0.0.1:9' in caplog.text and 'unreachable' in caplog.text
  with pytest.raises(SourceError, match='Start it'):
    check(config('http://127.0.0.1:9,http://127.0.0.1:10', attempts=1))


@pytest.mark.parametrize(
  'status, kind', [(502, 'search_failed'), (503, 'overloaded')]
)
def test_queries_that_the_server_names_fail_alone(server, status, kind):
  server.named = {'bad', 'worse'}
  server.named_status = status

  async def main(source):
    return await ask(source, 'a', 'bad', 'b', 'worse', 'c')

  answers = run(main, server, attempts=1)
  assert [isinstance(a, SearchError) for a in answers] == [
    False,
    True,
    False,
    True,
    False,
  ]
  assert answers[1].kind == answers[3].kind == kind
  assert [queries for queries, _ in server.batches] == [
    ['a', 'bad', 'b', 'worse', 'c'],
    ['a', 'b', 'c'],
  ]


def test_the_token_of_the_environment_is_sent(server, monkeypatch):
  monkeypatch.setenv('RETRIEVAL_TOKEN', 's3cret')
  server.token = 's3cret'

  async def main(source):
    return await ask(source, 'a')

  assert isinstance(run(main, server)[0], SearchResult)
  monkeypatch.setenv('RETRIEVAL_TOKEN', 'wrong')
  (answer,) = run(main, server)
  assert answer.kind == 'unauthorised' and 'RETRIEVAL_TOKEN' in answer.message
  assert 'wrong' not in answer.message and len(server.batches) == 1


def test_one_source_serves_several_event_loops(server):
  source = service.ServiceSource(config(server.url))
  for query in 'ab':
    (answer,) = asyncio.run(ask(source, query))
    assert answer.passages[0].id == f'id-{query}'


def test_a_cancelled_trajectory_leaves_the_others_their_answers(server):
  server.delay = 0.2

  async def main(source):
    lost = asyncio.create_task(ask(source, 'a'))
    gone = asyncio.create_task(ask(source, 'x'))
    kept = asyncio.create_task(ask(source, 'a', 'b'))
    await asyncio.sleep(0)
    gone.cancel()  # still waiting to be sent
    await until(lambda: server.batches)
    lost.cancel()  # under way
    return await kept

  assert [a.passages[0].id for a in run(main, server)] == ['id-a', 'id-b']
  assert server.batches == [(['a', 'b'], 3)]


def test_close_ends_what_waits(server):
  server.delay = 10.0

  async def main():
    source = service.ServiceSource(config(server.url, timeout=20.0))
    sent = asyncio.create_task(ask(source, 'a'))
    await until(lambda: server.batches)
    waiting = asyncio.create_task(ask(source, 'b'))
    await asyncio.sleep(0)
    await source.close()
    return await asyncio.gather(sent, waiting, return_exceptions=True)

  ends = asyncio.run(asyncio.wait_for(main(), 9))
  assert all(isinstance(e, asyncio.CancelledError) for e in ends)


def test_bad_configs():
  with pytest.raises(ValueError, match='http://host'):
    service.ServiceSource(config('localhost:8000'))
