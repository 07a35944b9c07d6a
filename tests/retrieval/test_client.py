"""The client against servers that misbehave in every way we know."""

import asyncio
import contextlib
import gc
import json
import logging
import os
import random
import socket
import sys
import threading
import time

import pytest

from retrieval.client import (
  Hit,
  RetrievalClient,
  RetrievalError,
  health_sync,
  retrieve_sync,
)
from retrieval.replicas import KINDS, Failure, Replicas
from tests.clock import within
from tests.retrieval.conftest import PASSAGES, serve, write_corpus

pytestmark = pytest.mark.slow

FAST = dict(timeout_s=5.0, deadline_s=10.0, backoff_s=0.001, seed=0)


def reply(body, status='200 OK', headers=(), length=None):
  if not isinstance(body, bytes):
    body = json.dumps(body).encode()
  head = [
    f'HTTP/1.1 {status}',
    f'Content-Length: {len(body) if length is None else length}',
    'Connection: close',
    *headers,
  ]
  return '\r\n'.join(head).encode() + b'\r\n\r\n' + body


def hit(**changes):
  item = {'document': {'id': '1', 'contents': '"T"\nx'}, 'score': 1.5}
  return {**item, **changes}


GOOD = reply({'result': [[hit()]]})
BUSY = reply({'detail': 'busy'}, '503 Service Unavailable')
HANG = None  # answers nothing until the test ends


class Faults:
  """A server that gives the scripted answers in turn, the last for ever."""

  def __init__(self, *answers):
    self.answers, self.requests = list(answers), []
    self._end = threading.Event()
    self._socket = socket.create_server(('127.0.0.1', 0))
    self._threads = [threading.Thread(target=self._accept)]
    self.url = f'http://127.0.0.1:{self._socket.getsockname()[1]}'

  def __enter__(self):
    self._threads[0].start()
    return self

  def __exit__(self, *_):
    self._end.set()
    with contextlib.suppress(OSError):
      self._socket.shutdown(socket.SHUT_RDWR)
    self._socket.close()
    for thread in self._threads:
      thread.join(5)

  def _accept(self):
    while not self._end.is_set():
      try:
        connection, _ = self._socket.accept()
      except OSError:
        return
      # Read and counted here, so that answers go out in order of arrival.
      self.requests.append((time.monotonic(), read_request(connection)))
      answer = self.answers[min(len(self.requests), len(self.answers)) - 1]
      thread = threading.Thread(target=self._answer, args=(connection, answer))
      thread.start()
      self._threads.append(thread)

  def _answer(self, connection, answer):
    with connection, contextlib.suppress(OSError):
      if answer is HANG:
        self._end.wait(20)
      elif callable(answer):
        answer(connection, self._end)
      else:
        connection.sendall(answer)


def read_request(connection):
  data = b''
  while b'\r\n\r\n' not in data:
    data += connection.recv(65536) or b'\r\n\r\n'
  head, _, body = data.partition(b'\r\n\r\n')
  length = 0
  for line in head.split(b'\r\n'):
    if line.lower().startswith(b'content-length:'):
      length = int(line.split(b':')[1])
  while len(body) < length and (more := connection.recv(65536)):
    body += more
  return body


def ask(url, queries=('q',), k=3, **options):
  return retrieve_sync(url, list(queries), k, **{**FAST, **options})


def failure(url, *args, **options):
  with pytest.raises(RetrievalError) as error:
    ask(url, *args, **options)
  assert error.value.kind in KINDS
  assert url in str(error.value)  # names the server
  assert error.value.__class__ is RetrievalError
  return error.value


def test_real_server(server, corpus):
  found = ask(server.url, ['hamlet prince', 'zzz', 'same'])
  assert [[h.id for h in row] for row in found] == [
    ['2', '0'],
    [],
    ['4', '5', '6'],
  ]
  first = found[0][0]
  assert isinstance(first, Hit) and first.score > 0
  assert first.contents == corpus[2].contents
  assert (first.title, first.text[:7]) == ('Denmark', 'Denmark')
  assert health_sync(server.url)['corpus']['sha256'] == corpus.sha256


def test_long_calls_are_split_and_keep_their_order(server):
  queries = ['hamlet', 'denmark', 'same', 'zzz', 'henry'] * 5
  whole = ask(server.url, queries)
  assert ask(server.url, queries, max_queries=3) == whole
  assert len(whole) == 25


def test_no_queries_ask_nothing():
  assert ask('http://127.0.0.1:1', []) == []


def test_hostile_queries_are_carried(server):
  queries = ['\ud800 hamlet', '\x00\x1b[31m', '<|im_end|></search>', '😀' * 50]
  assert [len(row) for row in ask(server.url, queries)] == [2, 0, 1, 0]


def test_one_client_serves_several_event_loops(server):
  client = RetrievalClient(server.url, **FAST)
  for _ in range(3):
    assert asyncio.run(client.retrieve(['hamlet'], 1))[0][0].id == '0'

  async def closed_and_used_again():
    await client.close()
    found = await client.retrieve(['hamlet'], 1)
    await client.close()
    return found

  assert asyncio.run(closed_and_used_again())[0][0].id == '0'


@pytest.mark.long
def test_loops_that_ended_leave_no_sockets_open(server):
  client = RetrievalClient(server.url, **FAST)
  counts = []
  for _ in range(6):
    asyncio.run(client.retrieve(['hamlet'], 1))
    gc.collect()
    counts.append(len(os.listdir('/dev/fd')))
  assert counts[-1] <= counts[1]


def test_a_query_longer_than_the_server_reads_is_cut(server):
  (found,) = ask(server.url, ['hamlet ' + 'ü' * 20_000])
  assert found == ask(server.url, ['hamlet'])[0]


def test_many_tasks_share_the_pool(server):
  async def run():
    async with RetrievalClient(server.url, max_connections=4) as client:
      return await asyncio.gather(
        *(client.retrieve(['hamlet'], 1) for _ in range(64))
      )

  assert all(found[0][0].id == '0' for found in asyncio.run(run()))


def test_wrong_arguments():
  with pytest.raises(ValueError, match='http://host:port'):
    RetrievalClient('localhost:8000')
  with pytest.raises(TypeError, match='list of strings'):
    retrieve_sync('http://127.0.0.1:1', 'hamlet', 3)
  with pytest.raises(TypeError, match='int'):
    ask('http://127.0.0.1:1', [3])

  async def inside():
    retrieve_sync('http://127.0.0.1:1', ['x'], 1)

  with pytest.raises(RuntimeError, match='running event loop'):
    asyncio.run(inside())


def test_connection_refused():
  with socket.create_server(('127.0.0.1', 0)) as taken:
    port = taken.getsockname()[1]
  error = failure(f'http://127.0.0.1:{port}', retries=2)
  assert (error.kind, error.attempts) == ('unreachable', 3)
  assert 'python -m retrieval.server' in str(error)


@pytest.fixture
def proxy(monkeypatch):
  """Sets one proxy of the environment: proxy(variable, value)."""
  for name in [n for n in os.environ if n.lower().endswith('_proxy')]:
    monkeypatch.delenv(name)
  return monkeypatch.setenv


def test_proxies_of_the_environment_are_not_asked_for_loopback(proxy):
  proxy('HTTP_PROXY', 'http://127.0.0.1:1')
  with Faults(GOOD) as faults:
    assert len(ask(faults.url)[0]) == 1


def test_an_error_behind_a_proxy_names_it(proxy):
  proxy('http_proxy', 'http://me:secret@127.0.0.1:1')
  error = failure('http://10.0.0.1:8000', retries=0)
  assert error.kind == 'unreachable' and 'secret' not in str(error)
  assert 'http_proxy=http://127.0.0.1:1' in str(error)
  with Faults(reply(b'', '403 Forbidden')) as faults:
    proxy('http_proxy', faults.url)
    said = str(failure('http://10.0.0.1:8000'))
    assert 'HTTP 403' in said and f'http_proxy={faults.url}' in said
  proxy('no_proxy', '10.0.0.1')
  assert 'proxy' not in str(
    failure('http://10.0.0.1:9', timeout_s=0.1, retries=0)
  )


@pytest.mark.parametrize(
  'value', ['socks5://me:secret@h:9', 'gopher://h', 'http://h:x']
)
def test_a_proxy_that_cannot_be_used_is_named(proxy, monkeypatch, value):
  monkeypatch.setitem(sys.modules, 'socksio', None)  # not installed
  proxy('ALL_PROXY', value)
  error = failure('http://10.0.0.1:8000')
  shown = value.replace('me:secret@', '')
  assert f'ALL_PROXY={shown}' in str(error)
  assert 'httpx[socks]' in str(error) and 'secret' not in str(error)
  assert error.attempts == 1


def test_addresses_that_mean_the_server(server, corpus):
  port = server.url.rpartition(':')[2]
  for url in (
    f'{server.url}/retrieve',
    f'{server.url}/retrieve/',
    f'http://0.0.0.0:{port}',
  ):
    assert ask(url, ['hamlet prince'])[0][0].contents == corpus[2].contents
  for given, asked in (
    ('http://[::]:80/p/retrieve', 'http://[::1]:80/p'),
    ('http://retrieve', 'http://retrieve'),
    ('http://h//', 'http://h'),
  ):
    assert RetrievalClient(given).url == asked


def test_refusals_have_a_remedy(server):
  assert 'before /retrieve' in str(failure(f'{server.url}/prefix'))
  refused = reply({'detail': 'the header Host is ...'}, '403 Forbidden')
  with Faults(refused) as faults:
    said = str(failure(faults.url))
    assert '--allow_host' in said and 'RETRIEVAL_TOKEN' not in said


def titled(**fields):
  return hit(document={'id': '7', **fields})


# What other servers of the protocol answer.
@pytest.mark.parametrize(
  'item, name, found',
  [
    (titled(id=7, contents='"T"\nx'), '7', ('T', 'x', 1.5)),
    (titled(id=None, contents='"T"\nx'), None, ('T', 'x', 1.5)),
    ({'document': {'contents': '"T"\nx'}}, None, ('T', 'x', None)),
    ({'document': {'_id': 'e', 'contents': 'x'}}, 'e', ('', 'x', None)),
    ({'document': {'docid': 7, 'contents': 'x'}}, '7', ('', 'x', None)),
    ({'id': '', 'doc_id': '7', 'text': 'x'}, '7', ('', 'x', None)),
    (titled(contents='', text='x'), '7', ('', 'x', 1.5)),
    (titled(title=1984, text='x'), '7', ('1984', 'x', 1.5)),
    (titled(content='"T"\nx'), '7', ('T', 'x', 1.5)),
    (titled(title='T', text='x'), '7', ('T', 'x', 1.5)),
    (titled(title='T', contents='x'), '7', ('T', 'x', 1.5)),
    (titled(title='T', contents='x\ny'), '7', ('T', 'x\ny', 1.5)),
    (titled(title='T', contents='"T"\nx'), '7', ('T', 'x', 1.5)),
    (titled(title='T\nU', text='x'), '7', ('T U', 'x', 1.5)),
    (titled(title=None, text='x'), '7', ('', 'x', 1.5)),
    ({'id': '7', 'contents': '"T"\nx'}, '7', ('T', 'x', None)),
    ({'id': '7', 'contents': 'x', 'score': 2}, '7', ('', 'x', 2.0)),
    (hit(document='x'), None, ('', 'x', 1.5)),
    ('"T"\nx', None, ('T', 'x', None)),
    (hit(score=None), '1', ('T', 'x', None)),
    (hit(score='0.5'), '1', ('T', 'x', 0.5)),
    (hit(score='high'), '1', ('T', 'x', None)),
    (hit(score=10**400), '1', ('T', 'x', None)),
  ],
)
def test_forms_of_other_servers(item, name, found):
  other = {'document': {'contents': 'another'}}
  with Faults(reply({'result': [[item, other]]})) as faults:
    first, last = ask(faults.url)[0]
  assert (first.title, first.text, first.score) == found
  assert name is None or first.id == name
  assert first.id and first.id != last.id  # a hash, where there is none


@pytest.mark.parametrize(
  'answer',
  [
    b'<html>hello</html>',
    b'',
    b'{"result": [[',
    b'\xff\xfe',
    b'[' * 5000,
    [],
    None,
    {},
    {'result': None},
    {'results': [[]]},
    {'result': {}},
    {'result': []},
    {'result': [[], []]},  # for one query
    {'result': [None]},
    {'result': [{}]},
    {'result': [[None]]},
    {'result': [[[]]]},
    {'result': [[hit(document=None)]]},
    {'result': [[hit(document={'id': '1'})]]},
    {'result': [[hit(document={'id': [1], 'contents': 'x'})]]},
    {'result': [[hit(document={'id': True, 'contents': 'x'})]]},
    {'result': [[hit(document={'id': '1', 'contents': None})]]},
    {'result': [[hit(document={'id': '1', 'contents': 'x', 'title': ['T']})]]},
    {'result': [[hit(score=float('nan'))]]},
    {'result': [[hit(score=float('inf'))]]},
  ],
)
def test_garbage_is_a_bad_response_and_not_asked_again(answer):
  with Faults(reply(answer)) as faults:
    assert failure(faults.url).kind == 'bad_response'
    assert len(faults.requests) == 1


def test_more_passages_than_asked_for_are_cut():
  """By servers that do not read `topk`."""
  many = [titled(id=i, contents=f'x{i}') for i in range(5)]
  with Faults(reply({'result': [many, many[:1]]})) as faults:
    found = ask(faults.url, ['a', 'b'])
  assert [[h.text for h in row] for row in found] == [
    ['x0', 'x1', 'x2'],
    ['x0'],
  ]


def test_a_title_beside_the_contents_is_kept():
  document = {'id': '7', 'title': 'Hamlet', 'contents': 'A play.'}
  for given in (document, document | {'contents': '"Hamlet"\nA play.'}):
    with Faults(reply({'result': [[hit(document=given)]]})) as faults:
      [[found]] = retrieve_sync(faults.url, ['x'], 1, **FAST)
    assert (found.title, found.text) == ('Hamlet', 'A play.')
    assert found.contents == '"Hamlet"\nA play.'


@pytest.mark.parametrize(
  'status, kind',
  [
    ('400 Bad Request', 'rejected'),
    ('401 Unauthorized', 'unauthorised'),
    ('403 Forbidden', 'unauthorised'),
    ('404 Not Found', 'bad_response'),
    ('405 Method Not Allowed', 'bad_response'),
    ('413 Too Large', 'rejected'),
    ('422 Unprocessable', 'rejected'),
    ('500 Internal Server Error', 'bad_response'),
    ('302 Found', 'bad_response'),
    ('204 No Content', 'bad_response'),
  ],
)
def test_final_statuses(status, kind):
  with Faults(reply({'detail': 'the reason'}, status)) as faults:
    error = failure(faults.url)
    assert (error.kind, error.attempts) == (kind, 1)
    assert status[:3] in str(error)
    assert len(faults.requests) == 1


def test_rejection_names_the_field(server):
  error = failure(server.url, k=10**9)
  assert error.kind == 'rejected' and 'topk' in str(error)


@pytest.mark.parametrize(
  'status, kind',
  [
    ('429 Too Many Requests', 'overloaded'),
    ('502 Bad Gateway', 'unreachable'),
    ('503 Service Unavailable', 'overloaded'),
    ('504 Gateway Timeout', 'timeout'),
  ],
)
def test_passing_statuses_are_tried_again(status, kind):
  busy = reply({}, status)
  with Faults(busy, busy, GOOD) as faults:
    assert ask(faults.url)[0][0].id == '1'
    assert len(faults.requests) == 3
    assert len({body for _, body in faults.requests}) == 1
  with Faults(busy) as faults:
    error = failure(faults.url, retries=2)
    assert (error.kind, error.attempts) == (kind, 3)
    assert len(faults.requests) == 3


def test_retry_after_is_honoured():
  busy = reply({}, '503 Service Unavailable', ['Retry-After: 1'])
  with Faults(busy, GOOD) as faults:
    ask(faults.url)
    first, second = (when for when, _ in faults.requests)
    assert second - first >= 1.0


def test_retry_after_beyond_the_deadline_ends_at_once():
  for value in ('3600', 'Wed, 21 Oct 2099 07:28:00 GMT'):
    busy = reply({}, '429 Too Many Requests', [f'Retry-After: {value}'])
    with Faults(busy) as faults:
      error = within(2, lambda: failure(faults.url))
      assert error.kind == 'overloaded'


@pytest.mark.parametrize('value', ['', 'soon', '-1', '9' * 99, '٣'])
def test_senseless_retry_after(value):
  busy = reply({}, '503 Service Unavailable', [f'Retry-After: {value}'])
  busy = (
    busy.decode('latin-1', 'replace').encode('latin-1', 'replace')
    if (value.isascii())
    else busy
  )
  with Faults(busy, GOOD) as faults:
    assert len(ask(faults.url)[0]) == 1


def test_hang_ends_at_the_timeout():
  with Faults(HANG) as faults:
    error = within(2, lambda: failure(faults.url, timeout_s=0.2, retries=1))
    assert (error.kind, error.attempts) == ('timeout', 2)


def test_hang_then_recovery():
  with Faults(HANG, GOOD) as faults:
    assert len(ask(faults.url, timeout_s=0.3)[0]) == 1


def test_deadline_bounds_all_attempts():
  with Faults(HANG) as faults:
    error = within(
      1.5,
      lambda: failure(faults.url, timeout_s=0.2, deadline_s=0.5, retries=1000),
    )
    assert error.kind == 'timeout'
  with Faults(BUSY) as faults:
    error = within(
      3,
      lambda: failure(
        faults.url, deadline_s=1.0, retries=10**6, max_backoff_s=0.05
      ),
    )
    assert error.kind == 'overloaded'


def test_dripping_answer_does_not_outlive_the_timeout():
  def drip(connection, end):
    connection.sendall(GOOD.split(b'\r\n\r\n')[0] + b'\r\n\r\n')
    while not end.wait(0.05):
      connection.sendall(b' ')

  slow = reply(b'', length=10**6)

  def endless(connection, end):
    connection.sendall(slow)
    drip(connection, end)

  with Faults(endless) as faults:
    error = within(1.5, lambda: failure(faults.url, timeout_s=0.3, retries=0))
    assert error.kind == 'timeout'


def test_connection_closed_in_the_middle():
  cut = reply({'result': [[hit()]]}, length=10**6)
  with Faults(cut, b'', b'HTTP/1.1 200', GOOD) as faults:
    assert len(ask(faults.url)[0]) == 1
    assert len(faults.requests) == 4
  with Faults(cut) as faults:
    error = failure(faults.url, retries=1)
    assert (error.kind, error.attempts) == ('unreachable', 2)


def test_not_http_at_all():
  with Faults(b'SSH-2.0-OpenSSH_9.6\r\n') as faults:
    assert failure(faults.url, retries=1).kind == 'unreachable'


def test_undecodable_encoding():
  with Faults(reply(b'zzz', headers=['Content-Encoding: gzip'])) as faults:
    assert failure(faults.url).kind == 'bad_response'


def test_cancelling_is_no_error_of_retrieval():
  async def run(url):
    async with RetrievalClient(url) as client:
      with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
          await client.retrieve(['q'], 1)

  with Faults(HANG) as faults:
    asyncio.run(run(faults.url))


def test_health_of_a_server_without_it():
  with Faults(reply({'detail': 'Not Found'}, '404 Not Found')) as faults:
    with pytest.raises(RetrievalError) as error:
      health_sync(faults.url)
    assert error.value.kind == 'rejected'
  with Faults(reply([])) as faults:
    with pytest.raises(RetrievalError) as error:
      health_sync(faults.url)
    assert error.value.kind == 'bad_response'


def test_pauses_grow_are_jittered_and_bounded(monkeypatch):
  pauses, sleep = [], asyncio.sleep

  async def fake(seconds, *args):
    pauses.append(seconds)
    await sleep(0)

  monkeypatch.setattr('retrieval.client.asyncio.sleep', fake)
  with Faults(BUSY) as faults:
    failure(
      faults.url, retries=8, backoff_s=1, max_backoff_s=16, deadline_s=1000
    )
  assert len(pauses) == 8
  for n, pause in enumerate(pauses):
    assert 0 <= pause <= min(16, 2**n)
  assert len(set(pauses)) == 8  # full jitter, not a fixed ladder


class Clock:
  """Time that passes only in sleeping."""

  def __init__(self, monkeypatch):
    self.now, self.sleeps, real = 0.0, [], asyncio.sleep

    async def sleep(seconds, *_):
      self.sleeps.append(seconds)
      self.now += seconds
      await real(0)

    monkeypatch.setattr('asyncio.sleep', sleep)

  def __call__(self):
    return self.now


SERVED = {'corpus': {'sha256': 'a'}, 'index': {'k1': 1.2}}


def replicas(clock, count=2, **options):
  group = Replicas(
    [f'http://r{i}' for i in range(count)],
    **dict(failures=3, cooldown_s=10.0, rng=random.Random(0), clock=clock)
    | options,
  )
  for replica in group.all[1:] and group.all:
    group.learn(replica, SERVED)
  return group


async def attempt(group, kind=None, end=1000.0, last=None, whole=True):
  """One attempt that fails as `kind`, or does not; the replica asked."""
  replica, probe = await group.choose(group.all, last, end, '/retrieve', 0)

  async def once():
    if kind == 'rejected':
      raise RetrievalError('rejected', replica.url, 'no')
    if kind:
      raise Failure(kind, 'down')
    if not replica.known:
      group.learn(replica, SERVED)

  with contextlib.suppress(Failure, RetrievalError):
    await group.watch(replica, probe, once(), whole)
  return replica.url[-1], probe


def test_replicas_take_turns_and_the_next_attempt_goes_elsewhere(monkeypatch):
  async def run():
    group = replicas(Clock(monkeypatch), 3)
    asked = [(await attempt(group))[0] for _ in range(6)]
    assert sorted(asked) == ['0', '0', '1', '1', '2', '2']
    for last in group.all * 3:
      assert (await attempt(group, last=last))[0] != last.url[-1]
    group.all[0].in_flight, group.all[2].in_flight = 2, 1  # the least busy
    assert {(await attempt(group))[0] for _ in range(5)} == {'1'}

  asyncio.run(run())


def test_a_circuit_opens_is_probed_once_and_closes(monkeypatch):
  clock = Clock(monkeypatch)

  async def run():
    group = replicas(clock, 1)
    for _ in range(3):
      assert await attempt(group, 'unreachable') == ('0', False)
    # Open: nobody asks before the cool-down, then one alone does.
    replica, probe = await group.choose(group.all, None, 1000, '/', 0)
    assert probe and 10 <= clock.now <= 15.2
    waiting = asyncio.create_task(attempt(group))
    await asyncio.sleep(0)
    assert not waiting.done()

    async def fails():
      raise Failure('timeout', 'late')

    begun = clock.now
    with pytest.raises(Failure):
      await group.watch(replica, probe, fails(), True)
    # The probe failed: another cool-down, then the one that waits probes.
    assert await waiting == ('0', True)
    assert clock.now - begun >= 10
    assert await attempt(group) == ('0', False)  # closed
    now = clock.now
    await attempt(group, 'unreachable')
    await attempt(group)
    assert clock.now == now  # one failure opens nothing

  asyncio.run(run())


def test_a_probe_that_is_cancelled_is_made_again(monkeypatch):
  clock = Clock(monkeypatch)

  async def run():
    group = replicas(clock, 1)
    for _ in range(3):
      await attempt(group, 'unreachable')
    replica, probe = await group.choose(group.all, None, 1000, '/', 0)
    hang = asyncio.get_running_loop().create_future()
    probing = asyncio.create_task(group.watch(replica, probe, hang, True))
    await asyncio.sleep(0)
    probing.cancel()
    await asyncio.gather(probing, return_exceptions=True)
    assert replica.in_flight == 0
    assert await attempt(group) == ('0', True)

  asyncio.run(run())


def test_the_others_are_asked_while_a_circuit_is_open(monkeypatch):
  clock = Clock(monkeypatch)

  async def run():
    group = replicas(clock, 2)
    while group.all[0].failures < 3:
      replica = await group.choose(group.all, group.all[1], 1000, '/', 0)

      async def fails():
        raise Failure('unreachable', 'down')

      with pytest.raises(Failure):
        await group.watch(*replica, fails(), True)
    asked = [await attempt(group) for _ in range(5)]
    assert asked == [('1', False)] * 5 and clock.now == 0
    clock.now = 20  # one request goes to see, no more
    assert await attempt(group, 'unreachable') == ('0', True)
    assert [await attempt(group) for _ in range(5)] == asked

  asyncio.run(run())


def test_what_counts_as_a_failure(monkeypatch):
  async def run():
    group = replicas(Clock(monkeypatch), 1)
    for kind in ('overloaded', 'rejected'):  # it answered
      for _ in range(5):
        await attempt(group, kind)
        assert group.all[0].failures == 0
    for _ in range(5):  # the deadline was short, not the server slow
      await attempt(group, 'timeout', whole=False)
    assert group.all[0].failures == 0
    for _ in range(2):
      await attempt(group, 'timeout')
    await attempt(group, 'overloaded')
    assert group.all[0].failures == 0

  asyncio.run(run())


def test_an_open_circuit_ends_at_the_deadline(monkeypatch):
  clock = Clock(monkeypatch)

  async def run():
    group = replicas(clock, 2)
    for _ in range(6):
      await attempt(group, 'unreachable')
    with pytest.raises(RetrievalError, match='left alone') as error:
      await attempt(group, end=5.0)
    assert error.value.kind == 'unreachable' and clock.now == 0

  asyncio.run(run())


@pytest.mark.long
def test_a_dead_server_is_probed_by_one_of_many():
  """Forty callers, and after the first wave one at a time."""
  with Faults(b'') as faults:

    async def run():
      async with RetrievalClient(
        faults.url,
        **FAST | dict(deadline_s=3.0, retries=50),
        cooldown_s=0.4,
        max_connections=50,
      ) as client:
        found = await asyncio.gather(
          *(client.retrieve([str(i)], 1) for i in range(40)),
          return_exceptions=True,
        )
      return found

    found = asyncio.run(run())
    assert {error.kind for error in found} == {'unreachable'}
    first = faults.requests[39][0]  # the last of the first wave
    later = [when for when, _ in faults.requests if when > first + 1.5]
    # A cool-down is at least 0.4 s.
    assert len(later) <= 5
    # Without a circuit 40 callers would have asked 51 times each.
    assert len(faults.requests) < 120


def test_a_restart_is_waited_for_without_spending_attempts():
  with Faults(*[b''] * 8, GOOD) as faults:
    found = ask(
      faults.url, retries=9, failures=2, cooldown_s=0.05, deadline_s=20
    )
    assert found[0][0].id == '1' and len(faults.requests) == 9


def test_failover_to_another_replica(server):
  with Faults(b'', BUSY, b'') as faults:
    for urls in ([faults.url, server.url], f'{server.url},{faults.url}'):

      async def run(urls=urls):
        async with RetrievalClient(urls, **FAST | {'retries': 1}) as client:
          return [await client.retrieve(['hamlet'], 1) for _ in range(4)]

      for rows in asyncio.run(run()):
        assert rows[0][0].id == '0'
    assert faults.requests


@pytest.mark.parametrize(
  'answer',
  [
    reply(b'rubbish'),
    reply({'result': []}),
    reply({}, '500 Oops'),
    reply({}, '404 Not Found'),
    reply({}, '422 Unprocessable'),
    reply({}, '401 Unauthorized'),
  ],
)
def test_a_replica_that_answers_rubbish_is_passed_over(server, answer):
  with Faults(answer) as faults:

    async def run():
      urls = [faults.url, server.url]
      async with RetrievalClient(
        urls, **FAST, failures=3, cooldown_s=1000.0
      ) as client:
        return [await client.retrieve(['hamlet'], 1) for _ in range(12)]

    if b' 422 ' in answer:  # the request's own fault: nobody else is asked
      with pytest.raises(RetrievalError, match='rejected'):
        asyncio.run(run())
      return
    assert [rows[0][0].id for rows in asyncio.run(run())] == ['0'] * 12
    # Then its circuit is open. One is the first question for its health.
    assert len(faults.requests) in (3, 4)


def queries_answered(url):
  """Of the server's own counting."""
  return health_sync(url)['served']['queries']


def test_a_replica_that_comes_back_with_another_corpus_is_left_out(
  corpus_path, tmp_path, caplog
):
  other = write_corpus(tmp_path / 'other.jsonl', PASSAGES[1:])

  async def ask_often(client):
    found = [await client.retrieve(['hamlet'], 1) for _ in range(12)]
    return {rows[0][0].id for rows in found}

  with serve(corpus_path) as first:
    with serve(corpus_path) as second:
      client = RetrievalClient(
        [first, second], **FAST, failures=2, cooldown_s=0.05
      )
      assert asyncio.run(ask_often(client)) == {'0'}
      assert queries_answered(second)
    assert asyncio.run(ask_often(client)) == {'0'}
    with serve(other, port_of(second)) as stranger:
      idle = queries_answered(stranger)
      time.sleep(0.1)  # the cool-down
      assert asyncio.run(ask_often(client)) == {'0'}
      assert asyncio.run(ask_often(client)) == {'0'}
      assert queries_answered(stranger) == idle
    said = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert len(said) == 1
    names = (stranger, first, 'identity.corpus.sha256', 'for good')
    assert all(name in said[0].getMessage() for name in names)
  # None but it is left.
  with pytest.raises(RetrievalError, match='unreachable'):
    asyncio.run(client.retrieve(['hamlet'], 1))
  with serve(other, port_of(first)) as stranger:
    idle = queries_answered(stranger)
    for _ in range(2):
      with pytest.raises(RetrievalError, match='does not serve') as error:
        asyncio.run(ask_often(client))
      assert error.value.kind == 'different'
    assert queries_answered(stranger) == idle


def port_of(url):
  return int(url.rpartition(':')[2])


def health(sha):
  return reply({'identity': {'corpus': {'sha256': sha}}})


def test_a_replica_that_was_away_at_the_start_says_first_what_it_serves():
  with (
    Faults(health('a'), GOOD) as well,
    Faults(b'', b'', BUSY, health('b'), GOOD) as late,
  ):

    async def run():
      async with RetrievalClient(
        [well.url, late.url], **FAST, cooldown_s=0.01
      ) as client:
        await client.health(well.url)
        for _ in range(20):
          assert await client.retrieve(['q'], 1)
          await asyncio.sleep(0.01)

    asyncio.run(run())
    assert [body for _, body in late.requests] == [b''] * 4  # no query


def test_one_server_that_said_what_it_serves_is_held_to_it():
  answers = [health('a'), b'', b'', health('b'), GOOD]
  with Faults(*answers) as faults:

    async def run():
      async with RetrievalClient(faults.url, **FAST) as client:
        await client.health()
        await client.retrieve(['q'], 1)

    with pytest.raises(RetrievalError, match="sha256 .*'a'.*'b'") as error:
      asyncio.run(run())
    assert error.value.kind == 'different'
    assert len(faults.requests) == 4
  answers[3] = health('a')
  with Faults(*answers) as faults:
    asyncio.run(run())


ABSENT = reply({}, '404 Not Found')


async def ask_six_times(*servers):
  urls = [server.url for server in servers]
  async with RetrievalClient(urls, **FAST) as client:
    for _ in range(6):
      await client.retrieve(['q'], 1)


@pytest.mark.parametrize(
  'other',
  [
    ABSENT,
    *map(reply, (b'', b'OK', b'<html>', [])),
    *(reply({}, status) for status in ('500 Error', '501 Not Implemented')),
  ],
)
def test_servers_without_health_are_no_different_from_each_other(other):
  with Faults(other, GOOD) as one, Faults(other, GOOD) as two:
    asyncio.run(ask_six_times(one, two))
    assert len(one.requests) == len(two.requests) == 4


def test_one_that_says_what_it_serves_shows_that_nobody_knows_it_of_another():
  with Faults(ABSENT, GOOD, ABSENT) as one, Faults(health('a'), GOOD) as two:
    asyncio.run(ask_six_times(one, two))
    assert len(one.requests) == 3 and len(two.requests) == 6
  # A page of a proxy, for a moment, is no difference.
  page = reply(b'<html>', '500 Error')
  with (
    Faults(page, GOOD, page, health('a'), GOOD) as one,
    Faults(health('a'), GOOD) as two,
  ):
    asyncio.run(ask_six_times(one, two))
    assert len(one.requests) > 4


def test_what_a_replica_serves_is_asked_once_by_many():
  with Faults(health('a'), GOOD) as one, Faults(health('a'), GOOD) as two:

    async def run():
      async with RetrievalClient([one.url, two.url], **FAST) as client:
        await asyncio.gather(*(client.retrieve([str(i)], 1) for i in range(20)))

    asyncio.run(run())
    for faults in (one, two):
      bodies = [body for _, body in faults.requests]
      assert bodies.count(b'') == 1 and len(bodies) > 1


def said(identity):
  return reply({'result': [[hit()]]}, headers=[f'X-Identity: {identity}'])


def test_a_server_replaced_while_nobody_asks_is_not_believed(caplog):
  with Faults(said('a'), said('a'), said('b'), said('a')) as faults:

    async def run():
      async with RetrievalClient(faults.url, **FAST) as client:
        for _ in range(2):
          assert await client.retrieve(['q'], 1)
        for _ in range(2):  # for good
          with pytest.raises(RetrievalError, match='was a, is b') as error:
            await client.retrieve(['q'], 1)
          assert error.value.kind == 'different'

    asyncio.run(run())
    assert len(faults.requests) == 3
  assert len([r for r in caplog.records if r.levelno == logging.ERROR]) == 1
  # What an error says is another's too: no query has failed here.
  named = [{'loc': ['body', 'queries', 0], 'type': 'search_failed'}]
  failed = reply({'detail': named}, '502 Bad Gateway', ['X-Identity: b'])
  with Faults(said('a'), failed) as faults:
    client = RetrievalClient(faults.url, **FAST)
    asyncio.run(client.retrieve(['q'], 1))
    with pytest.raises(RetrievalError, match='different'):
      asyncio.run(client.retrieve(['q'], 1))


def test_a_replica_replaced_while_nobody_asks_is_left_out(
  corpus_path, tmp_path
):
  other = write_corpus(tmp_path / 'other.jsonl', PASSAGES[1:])

  async def ask_often(client):
    found = [await client.retrieve(['hamlet'], 1) for _ in range(6)]
    return {rows[0][0].id for rows in found}

  with serve(corpus_path) as first:
    with serve(corpus_path) as second:
      client = RetrievalClient([first, second], **FAST)
      assert asyncio.run(ask_often(client)) == {'0'}
      assert queries_answered(second)
    with serve(other, port_of(second)) as stranger:
      assert asyncio.run(ask_often(client)) == {'0'}
      assert asyncio.run(ask_often(client)) == {'0'}
      # Its first answer told.
      assert queries_answered(stranger) == 1


def test_an_identity_told_later_is_that_of_the_answers_before():
  with Faults(said('a'), health('b')) as faults:

    async def run():
      async with RetrievalClient(faults.url, **FAST) as client:
        await client.retrieve(['q'], 1)
        await client.health()
        await client.retrieve(['q'], 1)

    with pytest.raises(RetrievalError, match='identity was a'):
      asyncio.run(run())


def test_a_token_that_one_replica_does_not_take_is_no_difference():
  # What /health tells one who has not the token.
  hidden = reply({'status': 'ok', 'version': '1'})
  refused = reply({'detail': 'send the header'}, '401 Unauthorized')
  with (
    Faults(health('a'), GOOD) as well,
    Faults(hidden, refused, health('a'), GOOD) as other,
  ):

    async def run():
      async with RetrievalClient(
        [well.url, other.url], **FAST, failures=1, cooldown_s=0.01
      ) as client:
        await client.health(well.url)
        with pytest.raises(RetrievalError, match='header') as error:
          await client.retrieve(['q'], 1, other.url)
        for _ in range(20):
          assert await client.retrieve(['q'], 1)
          await asyncio.sleep(0.01)
        return error.value

    assert asyncio.run(run()).kind == 'unauthorised'
    assert len(other.requests) > 4  # its token was mended
  # Who lets a query in without a word of what it serves is another server.
  with (
    Faults(health('a'), GOOD) as well,
    Faults(hidden, reply({'result': [[hit(score=9)]]})) as other,
  ):

    async def run():
      async with RetrievalClient([well.url, other.url], **FAST) as client:
        await client.health(well.url)
        return [await client.retrieve(['q'], 1) for _ in range(8)]

    assert {rows[0][0].score for rows in asyncio.run(run())} == {1.5}
    assert len(other.requests) == 2


def test_retry_after_outlives_a_dead_replica():
  busy = reply({}, '503 Service Unavailable', ['Retry-After: 1'])
  with socket.create_server(('127.0.0.1', 0)) as free:
    dead = f'http://127.0.0.1:{free.getsockname()[1]}'
  with Faults(busy, GOOD) as faults:
    ask([dead, faults.url], failures=1, cooldown_s=100)
    (first, _), (second, _), _ = faults.requests  # it is asked for its health
    assert second - first >= 0.99


def test_retry_after_holds_for_its_replica_alone(server):
  busy = reply({}, '503 Service Unavailable', ['Retry-After: 3600'])
  with Faults(busy) as faults:
    for _ in range(3):
      assert ask([faults.url, server.url], ['hamlet'])[0][0].id == '0'


@pytest.mark.parametrize(
  'detail, queries',
  [
    ([{'loc': ['body', 'queries', 1], 'type': 'search_failed'}], (1,)),
    ([{'loc': ['body', 'queries', 'x'], 'type': 'search_failed'}], ()),
    ([{'loc': ['body'], 'type': 'search_failed'}], ()),
    ([{'type': 'search_failed'}], ()),
    ([None], ()),
    ('a proxy', ()),
    (None, ()),
  ],
)
def test_a_server_may_name_the_queries_it_failed_on(detail, queries):
  with Faults(reply({'detail': detail}, '502 Bad Gateway')) as faults:
    error = failure(faults.url, ['a', 'b'], retries=1)
    assert error.queries == queries
    assert error.kind == ('search_failed' if queries else 'unreachable')
    assert len(faults.requests) == (1 if queries else 2)


def test_named_queries_are_those_of_the_whole_call():
  named = [{'loc': ['body', 'queries', 1], 'type': 'search_failed'}]
  with Faults(
    reply({'result': [[], []]}), reply({'detail': named}, '502 Bad Gateway')
  ) as faults:
    error = failure(faults.url, list('abcd'), max_queries=2, max_connections=1)
    assert error.queries in ((1,), (3,))
    assert ['a', 'b'] in [
      json.loads(body)['queries'] for _, body in faults.requests
    ]


@pytest.mark.parametrize('token', ['with space', 'ünicode', 'new\nline'])
def test_a_token_that_cannot_be_sent(token, monkeypatch):
  with pytest.raises(ValueError) as error:
    RetrievalClient('http://x', token=token)
  assert token not in str(error.value)
  monkeypatch.setenv('RETRIEVAL_TOKEN', token)
  with pytest.raises(ValueError):
    RetrievalClient('http://x')


@pytest.mark.parametrize(
  'urls',
  [
    *('', [], 'http://a,', ['http://a', 'b'], 'http://a,,http://b'),
    *('http://a?x=1', 'http://a#x', 'http://é..:1'),
  ],
)
def test_bad_lists_of_urls(urls):
  with pytest.raises(ValueError, match='http://host:port'):
    RetrievalClient(urls)


# Documents.


def test_a_document_comes_in_pieces(corpus_path):
  async def ask(url):
    async with RetrievalClient(url, **FAST) as client:
      found = await client.document('0'), await client.document('0', 2)
      return *found, await client.document('\ud800')

  with serve(corpus_path) as url:
    first, second, absent = asyncio.run(ask(url))
  assert first[0].startswith('"Hamlet"\n') and first[1] == 1
  assert second == ('', 1) and absent is None


@pytest.mark.parametrize(
  'body',
  [
    {}, [], {'result': []}, {'result': {}}, {'result': {'contents': 'x'}},
    {'result': {'contents': 3, 'pieces': 1}},
    {'result': {'contents': 'x', 'pieces': True}},
  ],
)  # fmt: skip
def test_an_answer_that_is_no_document_is_an_error(body):
  async def ask(url):
    async with RetrievalClient(url, **FAST) as client:
      return await client.document('0')

  with Faults(reply(body)) as it:
    with pytest.raises(RetrievalError) as error:
      asyncio.run(ask(it.url))
  assert error.value.kind == 'bad_response'
