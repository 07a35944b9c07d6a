"""Web search against servers that answer as each API's documentation says."""

import asyncio
import collections
import http.server
import json
import logging
import subprocess
import sys
import threading
import time
import urllib.parse

import prometheus_client
import pytest

from retrieval.core import Found, SearchFailed
from retrieval.corpus import split_contents
from retrieval.web.budget import Budget
from retrieval.web.cache import Recorded
from retrieval.web.fetch import Fetcher
from retrieval.web.providers import PROVIDERS, sendable
from retrieval.web.searcher import WebSearcher, _digest, cut
from tests.conftest import ROOT
from tests.retrieval.test_fetch import HOME, Site, redirect, reply

pytestmark = pytest.mark.slow

KEY = 'k3y/with+signs=='
ENVIRON = {provider.variable: KEY for provider in PROVIDERS.values()}
URLS = ('https://a.example/1', 'https://b.example/2')


def results(title='title', url='link', text='snippet'):
  return [
    {title: 'First\npage', url: URLS[0], text: 'one  fine\nthing'},
    {title: 'Second', url: URLS[1], text: 'two'},
  ]


# Answers in each API's shape: with results, without, and when the key is bad.
ANSWERS = {
  'serpapi': {
    'search_metadata': {'id': '65', 'status': 'Success'},
    'search_parameters': {'engine': 'google', 'q': 'x'},
    'organic_results': [
      {'position': i, **row} for i, row in enumerate(results(), 1)
    ],
  },
  'serper': {
    'searchParameters': {'q': 'x', 'type': 'search', 'engine': 'google'},
    'organic': [{**row, 'position': i} for i, row in enumerate(results(), 1)],
    'peopleAlsoAsk': [],
    'credits': 1,
  },
  'brave': {
    'type': 'search',
    'query': {'original': 'x'},
    'mixed': {},
    'web': {
      'type': 'search',
      'results': results(url='url', text='description'),
    },
  },
}
EMPTY = {
  'serpapi': {
    'search_metadata': {'status': 'Success'},
    'search_information': {'organic_results_state': 'Fully empty'},
    'error': "Google hasn't returned any results for this query.",
  },
  'serper': {'searchParameters': {'q': 'x'}, 'organic': []},
  'brave': {'type': 'search', 'query': {'original': 'x'}},
}
BAD_KEY = {
  'serpapi': (401, {'error': f'Invalid API key {KEY}.'}),
  'serper': (403, {'message': 'Unauthorized.', 'statusCode': 403}),
  'brave': (
    422,
    {
      'type': 'ErrorResponse',
      'error': {'code': 'SUBSCRIPTION_TOKEN_INVALID', 'status': 422},
    },
  ),
}
SPENT = {
  'serpapi': (429, {'error': 'Your account has run out of searches.'}, {}),
  'serper': (400, {'message': 'Not enough credits', 'statusCode': 400}, {}),
  'brave': (
    429,
    {'type': 'ErrorResponse', 'error': {'code': 'RATE_LIMITED'}},
    {'X-RateLimit-Remaining': '1, 0', 'X-RateLimit-Reset': '1, 99'},
  ),
}


class Api:
  """An API that gives scripted answers in turn, the last for ever.

  An answer is (status, body, headers); a body that is not bytes goes as JSON;
  a number for an answer is that many seconds of silence.
  """

  def __init__(self, *answers):
    self.requests, self.most = [], 0
    self._answers, self._now, self._lock = answers, 0, threading.Lock()
    self.end = threading.Event()
    outer = self

    class Handler(http.server.BaseHTTPRequestHandler):
      protocol_version = 'HTTP/1.1'

      def do_GET(self):
        outer._serve(self)

      do_POST = do_GET

      def log_message(self, *_):
        pass

    self._server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    self._server.daemon_threads = True
    self.url = f'http://127.0.0.1:{self._server.server_port}'
    self._thread = threading.Thread(
      target=self._server.serve_forever, args=(0.01,)
    )

  def __enter__(self):
    self._thread.start()
    return self

  def __exit__(self, *_):
    self.end.set()
    self._server.shutdown()
    self._thread.join(5)
    self._server.server_close()

  def _serve(self, handler):
    url = urllib.parse.urlsplit(handler.path)
    length = int(handler.headers.get('Content-Length', 0))
    with self._lock:
      self.requests.append(
        {
          'at': time.monotonic(),
          'method': handler.command,
          'path': url.path,
          'params': dict(urllib.parse.parse_qsl(url.query)),
          'headers': {k.lower(): v for k, v in handler.headers.items()},
          'body': json.loads(handler.rfile.read(length)) if length else None,
        }
      )
      self._now += 1
      self.most = max(self.most, self._now)
      at = min(len(self.requests), len(self._answers)) - 1
    answer = self._answers[at]
    try:
      if isinstance(answer, (int, float)):
        self.end.wait(answer)
        handler.close_connection = True
        return
      status, body, headers = (*answer, {})[:3]
      body = body if isinstance(body, bytes) else json.dumps(body).encode()
      handler.send_response(status)
      for name, value in {'Content-Length': len(body), **headers}.items():
        handler.send_header(name, value)
      handler.end_headers()
      handler.wfile.write(body)
    except OSError:
      pass  # the client had enough
    finally:
      with self._lock:
        self._now -= 1


def counted():
  """What /metrics says of web search, so far."""
  return collections.Counter(
    {
      event: int(
        prometheus_client.REGISTRY.get_sample_value(
          'retrieval_web_total', {'event': event}
        )
        or 0
      )
      for event in ('calls', 'failed', 'pages', 'fallbacks', 'transient')
    }
  )


def searching(api, queries, k=3, *, provider='serper', **options):
  """The answers, and what was counted for them."""
  options = {'backoff_s': 0.001, 'timeout_s': 20, **options}
  searcher = WebSearcher(provider, base_url=api.url, environ=ENVIRON, **options)
  before = counted()
  try:
    return searcher.search(queries, k), counted() - before
  finally:
    searcher.close()


def ask(api, query='x', k=3, **options):
  (answer,), _ = searching(api, [query], k, **options)
  return answer


every_provider = pytest.mark.parametrize('provider', PROVIDERS)


# Requests and answers of each API.


@every_provider
def test_results_are_documents(provider):
  with Api((200, ANSWERS[provider])) as api:
    found = ask(api, provider=provider)
  assert found == [
    Found(URLS[0], '"First page"\none fine thing', 1.0),
    Found(URLS[1], '"Second"\ntwo', 0.5),
  ]


@pytest.mark.parametrize(
  'provider, method, path, params, header',
  [
    (
      'serpapi',
      'GET',
      '/search.json',
      {'engine': 'google', 'q': 'ü & x', 'num': '7', 'api_key': KEY},
      None,
    ),
    ('serper', 'POST', '/search', {}, 'x-api-key'),
    (
      'brave',
      'GET',
      '/res/v1/web/search',
      {'q': 'ü & x', 'count': '7', 'text_decorations': 'false'},
      'x-subscription-token',
    ),
  ],
)
def test_requests_are_as_documented(provider, method, path, params, header):
  with Api((200, ANSWERS[provider])) as api:
    ask(api, 'ü & x', 7, provider=provider)
  (request,) = api.requests
  assert (request['method'], request['path']) == (method, path)
  assert request['params'] == params
  assert request['body'] == (
    {'q': 'ü & x', 'num': 7} if method == 'POST' else None
  )
  named = [n for n, v in request['headers'].items() if KEY in v]
  assert named == ([header] if header else [])


@every_provider
def test_the_provider_itself_is_asked_by_default(provider):
  searcher = WebSearcher(provider, environ=ENVIRON)
  url = urllib.parse.urlsplit(searcher.base_url)
  assert url.scheme == 'https' and '.' in url.hostname
  searcher.close()


@every_provider
def test_no_more_than_a_call_gives_is_asked_for(provider):
  with Api((200, ANSWERS[provider])) as api:
    assert len(ask(api, k=10**9, provider=provider)) == 2
    assert len(ask(api, k=1, provider=provider)) == 1
  sent = [r['body'] or r['params'] for r in api.requests]
  count = PROVIDERS[provider].count
  assert [int(s[count]) for s in sent] == [PROVIDERS[provider].most, 1]


@every_provider
def test_nothing_found_is_an_empty_answer(provider):
  with Api((200, EMPTY[provider])) as api:
    answers, counts = searching(api, ['x'], provider=provider)
  assert answers == [[]] and counts['failed'] == 0 and counts['calls'] == 1


@every_provider
def test_a_bad_key_fails_at_once_and_is_not_shown(provider):
  with Api(BAD_KEY[provider]) as api:
    failed = ask(api, provider=provider)
  assert isinstance(failed, SearchFailed) and failed.retry_after_s is None
  assert f'HTTP {BAD_KEY[provider][0]}' in str(failed)
  assert provider in str(failed) and KEY not in str(failed)
  assert len(api.requests) == 1


@every_provider
def test_a_spent_quota_is_not_asked_again(provider):
  with Api(SPENT[provider]) as api:
    failed = ask(api, provider=provider)
  assert isinstance(failed, SearchFailed) and failed.retry_after_s is None
  assert 'quota' in str(failed) and len(api.requests) == 1


@pytest.mark.parametrize(
  'provider, answer',
  [
    ('serpapi', (429, {'error': 'You have exceeded the hourly throughput'})),
    (
      'serpapi',
      (
        503,
        {
          'search_metadata': {'status': 'Error'},
          'error': "We couldn't get valid results",
        },
      ),
    ),
    (
      'serpapi',
      (
        200,
        {
          'search_metadata': {'status': 'Error'},
          'error': "We couldn't get valid results",
        },
      ),
    ),
    ('serper', (429, {'message': 'Too many requests', 'statusCode': 429})),
    (
      'brave',
      (
        429,
        {'error': {'code': 'RATE_LIMITED'}},
        {
          'X-RateLimit-Remaining': '0, 14000',
          'X-RateLimit-Reset': '0, 1419704',
        },
      ),
    ),
    ('serper', (429, {'message': 'Too many requests'}, {'Retry-After': '0'})),
    ('serper', (500, b'')),
    ('serper', (502, b'<html>Bad gateway</html>')),
    ('serper', (504, b'\x1b[31m\xff')),
  ],
)
def test_what_passes_is_tried_again(provider, answer):
  with Api(answer, answer, (200, ANSWERS[provider])) as api:
    answers, counts = searching(api, ['x'], provider=provider)
  assert len(answers[0]) == 2
  assert (counts['calls'], counts['failed']) == (3, 0)
  with Api(answer) as api:
    failed = ask(api, provider=provider, retries=1)
  assert isinstance(failed, SearchFailed) and failed.retry_after_s >= 1
  assert 'after 2 attempts' in str(failed) and len(api.requests) == 2
  assert '\x1b' not in str(failed)


@pytest.mark.parametrize(
  'body',
  [
    b'',
    b'<html>',
    b'{"organic": [',
    b'[]',
    b'null',
    b'3',
    b'"x"',
    b'{}',
    b'\xff\xfe',
    b'{"organic": null}',
    b'{"organic": {}}',
    b'[' * 99999,
    b'{"organic": [{"title": "no url"}]}',
    b'{"organic": [1, null, []]}',
    b'{"organic": [{"link": "javascript:alert(1)"}]}',
    b'{"message": "new shape"}',
  ],
)
def test_an_answer_of_another_shape_is_a_failure(body):
  with Api((200, body)) as api:
    failed = ask(api)
  assert isinstance(failed, SearchFailed) and failed.retry_after_s is None
  assert len(api.requests) == 1 and len(str(failed)) < 500


def test_a_query_that_the_provider_refuses_finds_nothing():
  refusal = (422, {'error': 'the query is not well formed'})
  with Api(refusal, (200, ANSWERS['serper']), refusal, refusal) as api:
    # The first may be refused for what is wrong with every call.
    answers, counts = searching(api, ['x', 'y', 'z', 'z2'], concurrency=1)
  first, second, *refused = answers
  assert isinstance(first, SearchFailed) and len(second) == 2
  assert refused == [[], []] and (counts['calls'], counts['failed']) == (4, 1)


def test_a_key_that_is_refused_later_fails_every_query():
  answer = (200, ANSWERS['brave'])
  with Api(answer, BAD_KEY['brave']) as api:
    answers, _ = searching(api, ['x', 'y'], provider='brave', concurrency=1)
  assert isinstance(answers[1], SearchFailed)


@every_provider
def test_an_error_with_status_200_is_no_empty_answer(provider):
  with Api((200, {'error': {'code': 'X'}})) as api:
    failed = ask(api, provider=provider, retries=0)
  assert isinstance(failed, SearchFailed)


def test_rows_without_url_are_left_out_and_urls_come_once():
  rows = [
    {'title': 'none'},
    *results(),
    {**results()[0], 'title': 'again'},
    {'link': 'http://c.example', 'title': 7, 'snippet': None},
  ]
  with Api((200, {'organic': rows})) as api:
    found = ask(api, k=9)
  assert [f.id for f in found] == [*URLS, 'http://c.example']
  assert found[2].contents == '""\n'
  assert [f.score for f in found] == [1, 1 / 2, 1 / 3]


@pytest.mark.parametrize(
  'provider, name', [('serpapi', 'answer_box'), ('serper', 'answerBox')]
)
@pytest.mark.parametrize(
  'box, url, text',
  [
    (
      {
        'title': 'T',
        'answer': '42',
        'snippet': 'It is 42.',
        'link': 'http://x.example',
      },
      'http://x.example',
      '42\nIt is 42.',
    ),
    (
      {'title': 'T', 'type': 'calculator_result', 'result': '3.14'},
      None,
      '3.14',
    ),
    ([{'title': 'T', 'snippet': 's', 'link': URLS[0]}], URLS[0], 's'),
  ],
)
def test_the_answer_box_comes_first(provider, name, box, url, text):
  with Api((200, {**ANSWERS[provider], name: box})) as api:
    found = ask(api, provider=provider)
  contents = f'"T"\n{text}'
  url = url or f'{provider}:answer_box:{_digest(contents)}'
  assert found[0] == Found(url, contents, 1.0)
  assert len({f.id for f in found}) == len(found) == 2 + (url != URLS[0])


@pytest.mark.parametrize('box', [[], {}, 'x', 7, [1], {'title': 'weather'}])
def test_an_answer_box_without_answer_is_left_out(box):
  with Api((200, {**ANSWERS['serper'], 'answerBox': box})) as api:
    assert [f.id for f in ask(api)] == list(URLS)


def test_html_is_unescaped_where_the_api_escapes():
  row = {'title': 'A &amp; B', 'url': URLS[0], 'description': 'it&#x27;s'}
  with Api((200, {'type': 'search', 'web': {'results': [row]}})) as api:
    assert ask(api, provider='brave')[0].contents == '"A & B"\nit\'s'


# Queries.


@pytest.mark.parametrize('query', ['', ' \n\t '])
def test_a_query_without_words_finds_nothing_for_nothing(query):
  with Api((200, ANSWERS['serper'])) as api:
    assert ask(api, query) == []
  assert api.requests == []


@pytest.mark.parametrize(
  'query, sent',
  [
    ('\ud800x', '\ufffdx'),
    ('a\x00b', 'a\ufffdb'),
    ('a\nb', 'a b'),
    ('字' * 999, '字' * 400),
    ('w ' * 99, ' '.join('w' * 50)),
    ('</search> & ?q=1#x %00', '</search> & ?q=1#x %00'),
  ],
)
@pytest.mark.parametrize('provider', ['serper', 'serpapi'])
def test_any_query_can_be_sent(provider, query, sent):
  assert sendable(query) == sent
  with Api((200, ANSWERS[provider])) as api:
    assert len(ask(api, query, provider=provider)) == 2
  (request,) = api.requests
  assert (request['body'] or request['params'])['q'] == sent


def test_queries_keep_their_places_and_duplicates_cost_once():
  with Api((200, ANSWERS['serper'])) as api:
    answers, counts = searching(api, ['a', '', 'b', 'a'])
  assert [len(a) for a in answers] == [2, 0, 2, 2]
  assert sorted(r['body']['q'] for r in api.requests) == ['a', 'b']
  assert counts['calls'] == 2


def test_one_failure_leaves_the_others():
  with Api(
    (200, ANSWERS['serper']), BAD_KEY['serper'], (200, ANSWERS['serper'])
  ) as api:
    answers, _ = searching(api, ['a', 'b', 'c'], concurrency=1)
  assert [isinstance(a, SearchFailed) for a in answers] == [0, 1, 0]


def test_calls_run_together_within_the_bound():
  class Meeting(Api):
    def __init__(self):
      super().__init__((200, ANSWERS['serper']))
      self.barrier = threading.Barrier(3)

    def _serve(self, handler):
      self.barrier.wait(20)  # nobody is answered before three are here
      super()._serve(handler)

  with Meeting() as api:
    answers, _ = searching(api, list('abcdefghi'), concurrency=3)
  assert all(len(a) == 2 for a in answers) and api.most <= 3


def test_a_searcher_serves_many_batches():
  with Api((200, ANSWERS['serper'])) as api:
    searcher = WebSearcher('serper', base_url=api.url, environ=ENVIRON)
    for _ in range(3):
      assert len(searcher.search(['x'], 2)[0]) == 2
    done = []
    thread = threading.Thread(
      target=lambda: done.append(searcher.search(['y'], 2))
    )
    thread.start()
    thread.join(20)
    assert len(done[0][0]) == 2
    searcher.close()


# Time, size, and what is not told.


def test_silence_is_a_failure():
  with Api(30) as api:
    failed = ask(api, timeout_s=0.2, retries=1)
  assert '0.2 s after 2' in str(failed)
  assert failed.retry_after_s >= 1


def test_a_drip_is_a_failure():
  def drip(connection, end):
    connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n')
    while not end.wait(0.02):
      connection.sendall(b' ')

  with Site({'/search': drip}) as api:
    failed = ask(api, timeout_s=0.3, retries=0)
  assert '0.3 s' in str(failed)


def test_nobody_there_is_a_failure():
  with Api((200, {})) as api:
    pass
  failed = ask(api, retries=1)
  assert isinstance(failed, SearchFailed) and failed.retry_after_s >= 1


def test_a_large_answer_is_a_failure():
  with Api((200, b' ' * 5000)) as api:
    failed = ask(api, max_bytes=4999)
  assert '4999 bytes' in str(failed)


def test_a_redirect_does_not_take_the_key_away():
  with Api((200, ANSWERS['serper'])) as other:
    with Api((302, b'', {'Location': other.url + '/search'})) as api:
      failed = ask(api)
    assert 'HTTP 302' in str(failed) and other.requests == []


def test_retry_after_is_kept():
  busy = (429, {'message': 'slow down'}, {'Retry-After': '1'})
  with Api(busy, (200, ANSWERS['serper'])) as api:
    assert len(ask(api)) == 2
  first, second = (r['at'] for r in api.requests)
  assert second - first >= 0.99


@pytest.mark.parametrize('after', ['3600', 'Fri, 31 Dec 2100 23:59:59 GMT'])
def test_a_long_retry_after_is_handed_on(after):
  with Api((429, {}, {'Retry-After': after})) as api:
    failed = ask(api, max_wait_s=5)
  assert failed.retry_after_s >= 3600 and len(api.requests) == 1


@pytest.mark.parametrize('after', ['soon', '-1', '1e9', '', '٣'])
def test_a_retry_after_that_says_nothing(after):
  busy = (503, {}, {'Retry-After': after.encode().decode('latin-1')})
  with Api(busy, (200, ANSWERS['serper'])) as api:
    assert len(ask(api)) == 2


@every_provider
def test_the_key_is_in_no_log_and_no_error(provider, caplog):
  caplog.set_level(logging.DEBUG)
  for name in ('httpx', 'httpcore'):
    caplog.set_level(logging.DEBUG, name)
  echo = json.dumps({'your': KEY, 'url': urllib.parse.quote(KEY, '')})
  texts = []
  for answer in [
    (200, ANSWERS[provider]),
    (400, echo.encode()),
    (200, echo.encode()),
    (500, ('x' * 290 + KEY).encode()),
  ]:
    with Api(answer) as api:
      texts.append(repr(ask(api, provider=provider, retries=1)))
  texts.append(repr(ask(api, provider=provider, retries=0)))  # nobody there
  texts.append(caplog.text)
  assert len(caplog.records) > 10
  for text in texts:
    assert KEY not in text and urllib.parse.quote(KEY, '') not in text


@every_provider
def test_a_missing_key_is_named(provider):
  name = PROVIDERS[provider].variable
  with pytest.raises(ValueError, match=name):
    WebSearcher(provider, environ={**ENVIRON, name: ' '})


@pytest.mark.parametrize('key', ['two words', 'line\nbreak', 'schlüssel'])
def test_an_unfit_key_is_refused_and_not_shown(key):
  with pytest.raises(ValueError, match='SERPER_API_KEY') as error:
    WebSearcher('serper', environ={'SERPER_API_KEY': key})
  assert key not in str(error.value)


@pytest.mark.parametrize(
  'options, words',
  [
    (dict(provider='yahoo'), "provider='yahoo'.*serpapi"),
    (dict(mode='pages'), "mode='pages'.*snippet, page"),
    (dict(rate=0), 'rate=0'),
    (dict(max_cost=1.0), 'price'),
    (dict(base_url='ftp://x'), 'base_url'),
    (dict(base_url='http://user:secret@x'), 'base_url'),
  ],
)
def test_wrong_arguments_are_named(options, words):
  with pytest.raises(ValueError, match=words) as error:
    WebSearcher(**{'provider': 'serper', 'environ': ENVIRON, **options})
  assert 'secret' not in str(error.value)


@every_provider
def test_the_identity_tells_searchers_apart_without_the_key(provider):
  seen = []
  for options in (
    {},
    {'mode': 'page'},
    {'mode': 'page', 'page_chars': 7},
    {'base_url': 'http://other.example'},
  ):
    searcher = WebSearcher(provider, environ=ENVIRON, **options)
    seen.append(json.dumps(searcher.identity, sort_keys=True))
    searcher.close()
  assert len(set(seen)) == 4
  assert not any(KEY in s for s in seen)


# Rate and budget.


def test_calls_keep_their_distance():
  with Api((200, ANSWERS['serper'])) as api:
    begin = time.monotonic()
    searching(api, list('abcd'), rate=10)
    seconds = time.monotonic() - begin
  assert len(api.requests) == 4
  assert seconds >= 0.29  # three pauses of 0.1 s


@pytest.mark.parametrize(
  'options', [dict(max_calls=2), dict(max_cost=0.3, price=0.1, max_calls=99)]
)
def test_a_ceiling_is_kept_before_the_call(options):
  most = options['max_calls'] if 'price' not in options else 3
  with Api((200, ANSWERS['serper'])) as api:
    answers, counts = searching(api, list('abcdef'), **options)
  failed = [a for a in answers if isinstance(a, SearchFailed)]
  assert len(api.requests) == counts['calls'] == most
  assert len(failed) == counts['failed'] == 6 - most
  assert all(f.retry_after_s is None for f in failed)
  assert f'{most} calls' in str(failed[0]) and 'used up' in str(failed[0])


def test_each_attempt_is_a_call():
  with Api((500, {})) as api:
    failed = ask(api, retries=9, max_calls=3)
  assert len(api.requests) == 3 and 'used up' in str(failed)


def test_nothing_may_be_spent():
  with Api((200, ANSWERS['serper'])) as api:
    assert isinstance(ask(api, max_calls=0), SearchFailed)
    assert isinstance(ask(api, max_cost=0.0, price=0.1), SearchFailed)
  assert api.requests == []


def test_a_ledger_outlives_its_searcher(tmp_path):
  options = dict(ledger=tmp_path / 'spent.db', max_cost=0.3, price=0.1)
  with Api((200, ANSWERS['serper'])) as api:
    for expected in (False, False, False, True, True):
      failed = isinstance(ask(api, **options), SearchFailed)
      assert failed == expected
    options['max_cost'] = 0.4  # raised
    assert len(ask(api, **options)) == 2
    # Another provider has a purse of its own.
    budget = Budget('brave', ledger=options['ledger'])
    assert budget.spent == (0, 0.0)
    budget.close()
  assert len(api.requests) == 4


def test_money_does_not_drift(tmp_path):
  budget = Budget('serper', max_cost=1.0, price=0.001)
  for _ in range(1000):
    budget.take()
  assert budget.spent == (1000, 1.0)
  with pytest.raises(SearchFailed):
    budget.take()
  budget.close()


def test_many_purses_one_ledger(tmp_path):
  path, taken = tmp_path / 'spent.db', []

  def spend():
    budget = Budget('serper', max_calls=50, ledger=path)
    try:
      while True:
        budget.take()
        taken.append(1)
    except SearchFailed:
      budget.close()

  threads = [threading.Thread(target=spend) for _ in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(60)
  assert len(taken) == 50


def test_a_file_that_is_no_ledger_is_named(tmp_path):
  path = tmp_path / 'spent.db'
  path.write_bytes(b'not a database, ' * 99)
  with pytest.raises(RuntimeError, match='ledger') as error:
    WebSearcher('serper', environ=ENVIRON, ledger=path)
  assert str(path) in str(error.value)


def test_a_ledger_that_breaks_lets_no_call_out(tmp_path):
  path = tmp_path / 'spent.db'
  with Api((200, ANSWERS['serper'])) as api:
    searcher = WebSearcher(
      'serper', base_url=api.url, environ=ENVIRON, ledger=path
    )
    searcher.budget._db.execute('DROP TABLE spent')
    (failed,) = searcher.search(['x'], 2)
    searcher.close()
  assert str(path) in str(failed) and api.requests == []


# Pages.

ARTICLE = (
  '<html><head><title>T</title></head><body><nav>menu menu</nav>'
  + (
    ''.join(
      f'<p>Paragraph {i} tells at some length of matters that have nothing to '
      f'do with what is asked, such as number {i * 7}.</p>'
      for i in range(40)
    )
    + '<p>The zebra of Grevy was named after Jules Grévy in 1882.</p>'
    + '<p>It closes with more that has nothing to do with anything.</p>'
  )
  + '<script>alert("zebra")</script></body></html>'
)


def pages(site, *paths, **more):
  rows = [
    {'title': p, 'link': site.url + p, 'snippet': f'snippet of {p}'}
    for p in paths
  ]
  return (200, {'organic': rows, **more})


def paging(site, **options):
  return dict(
    mode='page', fetcher=Fetcher(allow=HOME, ports=(site.port,)), **options
  )


def test_a_page_is_cut_to_what_matches():
  with Site({'/a': reply(ARTICLE.encode())}) as site:
    with Api(pages(site, '/a')) as api:
      answers, counts = searching(
        api,
        ['zebra Grevy named', 'paragraph 3'],
        **paging(site, page_chars=300),
      )
  title, text = split_contents(answers[0][0].contents)
  assert title == '/a' and 'Jules Grévy in 1882' in text
  assert len(text) <= 300 and 'alert' not in text and 'menu' not in text
  assert 'Paragraph 3 ' in answers[1][0].contents
  assert len(site.requests) == 1  # once for both
  assert counts['pages'] == 2 and counts['fallbacks'] == 0


def test_a_page_that_cannot_be_had_leaves_its_snippet():
  with Site(
    {
      '/gone': reply(b'', '404 Not Found'),
      '/pdf': reply(b'%PDF', kind='a/pdf'),
      '/inside': redirect('http://169.254.169.254/'),
      '/empty': reply(b'<html></html>'),
      '/none': reply(b''),
      '/noise': reply(bytes(range(256)) * 9),
      '/deep': reply(b'<div>' * 50000),
      '/text': reply(b'plain words', kind='text/plain'),
    }
  ) as site:
    paths = list(site.answers)
    with Api(pages(site, *paths)) as api:
      (found,), counts = searching(api, ['x'], 10, **paging(site))
  assert len(found) == len(paths)
  assert found[-1].contents == '"/text"\nplain words'
  for i, path in enumerate(paths):
    if path not in ('/noise', '/text'):
      assert found[i].contents == f'"{path}"\nsnippet of {path}'
  assert counts['fallbacks'] + counts['pages'] == len(paths)
  assert counts['fallbacks'] >= 6 and counts['failed'] == 0


# Minutes of work for the parser.
HOSTILE = b'<ul><li>words to keep ' * 120 + b'</li></ul>' * 120


@pytest.mark.long
def test_hostile_pages_leave_the_others(tmp_path):
  bad, good = [f'/bad{i}' for i in range(8)], ['/a', '/b', '/c']

  def late(connection, end):
    end.wait(1)  # by now the others are being read
    connection.sendall(reply(ARTICLE.encode()))

  with (
    Site(
      {**dict.fromkeys(bad, reply(HOSTILE * 300)), **dict.fromkeys(good, late)}
    ) as site,
    Api(pages(site, *bad, *good), pages(site, *good)) as api,
  ):
    searcher = WebSearcher(
      'serper',
      base_url=api.url,
      environ=ENVIRON,
      timeout_s=200,
      **paging(site, page_cpu_s=1),
    )
    store, before = Recorded(searcher, tmp_path / 'answers.db'), counted()
    (found,) = store.search(['zebra'], 11)
    assert [f.contents for f in found[:8]] == [
      f'"{path}"\nsnippet of {path}' for path in bad
    ]
    assert all('Jules Grévy' in f.contents for f in found[8:])
    assert [f.transient for f in found] == [True] * 8 + [False] * 3
    counts = counted() - before
    assert (counts['pages'], counts['transient']) == (3, 8)
    # It was not recorded, so it is asked again; what comes now is complete.
    (found,) = store.search(['zebra'], 11)
    assert [f.id for f in found] == [site.url + path for path in good]
    assert store.search(['zebra'], 11) == [found]
    assert len(api.requests) == 2
    store.close()


def test_a_page_that_was_busy_is_fetched_again():
  busy = reply(b'', '503 Service Unavailable')
  with Site({'/a': busy, '/b': reply(b'', '404 Not Found')}) as site:
    with Api(pages(site, '/a', '/b')) as api:
      searcher = WebSearcher(
        'serper', base_url=api.url, environ=ENVIRON, **paging(site)
      )
      (found,) = searcher.search(['x'], 2)
      assert [f.transient for f in found] == [True, False]
      site.answers['/a'] = reply(b'it works again', kind='text/plain')
      (found,) = searcher.search(['x'], 2)
      assert found[0].contents == '"/a"\nit works again'
      assert not found[0].transient
      searcher.close()


def test_an_error_of_the_process_of_a_page_is_logged(caplog):
  searcher = WebSearcher('serper', environ=ENVIRON)
  assert searcher._apart(str.upper, 'a \ud800') == 'A \ud800'
  assert not caplog.records
  assert searcher._apart(str.join, ',', [1]) == ''
  searcher.close()
  assert 'join: TypeError sequence item 0' in caplog.text


def test_a_process_for_a_page_imports_nothing():
  code = (
    'import importlib, sys\n'
    'from retrieval.web.searcher import LOADED\n'
    'for name in LOADED: importlib.import_module(name)\n'
    'loaded = {*sys.modules}\n'
    'import retrieval.server\n'
    'print({*sys.modules} - loaded)\n'
  )
  done = subprocess.run(
    [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True
  )
  assert done.stdout.strip() == "{'retrieval.server'}", done.stderr


def test_a_page_is_a_document_where_pages_are_shown():
  text = 'whole ' * 500
  answers = {
    '/a': reply(text.encode(), kind='text/plain'),
    '/gone': reply(b'', '404 Not Found'),
  }
  with Site(answers) as site:
    web = WebSearcher('serper', environ=ENVIRON, **paging(site))
    recorded = Recorded(web, '')
    try:
      assert recorded.document == web.document
      assert web.document(f'{site.url}/a') == text.strip()
      for url in (f'{site.url}/gone', 'file:///etc/passwd', 'x', '', '\ud800'):
        assert web.document(url) is None, url
    finally:
      recorded.close()
  snippets = WebSearcher('serper', environ=ENVIRON)
  assert snippets.document is None
  snippets.close()


def test_a_slow_page_is_no_document_yet_and_no_failure():
  text = 'whole ' * 500
  answers = {'/a': reply(text.encode(), kind='text/plain')}
  with Site(answers) as site:
    own = paging(site) | {'document_s': 0.2}
    web = WebSearcher('serper', environ=ENVIRON, **own)
    wait, fetch = threading.Event(), web._fetcher.fetch

    async def slow(url):
      await asyncio.to_thread(wait.wait)
      return await fetch(url)

    web._fetcher.fetch = slow
    try:
      assert web.document(f'{site.url}/a') is None
      wait.set()
      web.document_s = 30.0
      assert web.document(f'{site.url}/a') == text.strip()
      assert len(site.requests) == 1
    finally:
      web.close()


def test_pages_of_this_machine_are_not_fetched_by_default():
  with Site({'/a': reply(ARTICLE.encode())}) as site:
    with Api(pages(site, '/a')) as api:
      (found,), counts = searching(api, ['zebra'], mode='page')
    assert site.requests == []
  assert found[0].contents == '"/a"\nsnippet of /a'
  assert counts['fallbacks'] == 1


def test_an_answer_without_page_is_not_fetched():
  with Site({'/a': reply(ARTICLE.encode())}) as site:
    with Api(pages(site, '/a', answerBox={'answer': '42'})) as api:
      (found,), counts = searching(api, ['zebra'], **paging(site))
  contents = '""\n42'
  url = f'serper:answer_box:{_digest(contents)}'
  assert found[0] == Found(url, contents, 1.0)
  assert counts['pages'] == 1


@pytest.mark.parametrize(
  'text, query, size, expected',
  [
    ('short', 'x', 99, 'short'),
    ('one\n\ntwo\nthree', 'two', 3, 'two'),
    ('aa zebra\nbb\ncc zebra zebra', 'zebra', 24, 'aa zebra\ncc zebra zebra'),
    ('no match at all here', 'zebra', 8, 'no match'),
    ('\n \n' * 9, 'zebra', 4, '\n \n\n'),
    ('x' * 5000, 'zebra', 10, 'x' * 10),
  ],
)
def test_cut(text, query, size, expected):
  assert cut(text, query, size) == expected


def test_cut_keeps_the_best_within_the_size():
  text = 'filler words without meaning ' * 200 + 'the zebra ' + 'more ' * 500
  got = cut(text, 'zebra', 400)
  assert 'zebra' in got and len(got) <= 400


# With a store before it.


def test_a_recorded_search_is_replayed_without_service_or_spend(tmp_path):
  path = tmp_path / 'answers.db'
  with Api((200, ANSWERS['serper'])) as api:
    searcher = WebSearcher('serper', base_url=api.url, environ=ENVIRON)
    store = Recorded(searcher, path)
    first = store.search(['a', 'b', ''], 2)
    assert store.search(['b', 'a', ''], 2) == [first[1], first[0], []]
    assert len(api.requests) == searcher.budget.spent[0] == 2
    store.close()
  replay = Recorded(None, path)
  assert replay.search(['a', 'b', ''], 2) == first
  assert KEY.encode() not in path.read_bytes()
  replay.close()
