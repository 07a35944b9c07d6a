"""Web search as a searcher; `providers` lists the APIs.

Each query is one paid call, counted before it is sent (`budget`). A
failure is a `SearchFailed` in the place of its query and never an empty list:
an empty list means that the provider found nothing, or that it refuses this
query but has answered others.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
import concurrent.futures
import functools
import hashlib
import json
import logging
import math
import multiprocessing
import os
import random
import re
import resource
import signal
import threading
import time
from typing import Any
import urllib.parse

import httpx

from retrieval import metrics
from retrieval.core import Answer, Found, SearchFailed
from retrieval.corpus import join_contents
from retrieval.files import require_one_of, shown
from retrieval.index.bm25 import BM25Index
from retrieval.retry import retry_after
from retrieval.web import providers
from retrieval.web.budget import Budget
from retrieval.web.fetch import TRANSIENT, Fetcher, FetchFailed, read_body
from retrieval.web.providers import PROVIDERS, Provider, Row

_log = logging.getLogger(__name__)
MODES = ('snippet', 'page')
_RETRIED = (408, 429, 500, 502, 503, 504)
_REFUSED = (400, 413, 422)  # of one query, if others were answered
_PASSAGE = 400  # characters of the passages of a page that are ranked
_FETCHES = 16  # pages fetched at once
# A process that has loaded these modules forks one process for each page. They
# are the parser and what retrieval.server imports: multiprocessing runs the
# main module in each process, which would import them again for each page.
LOADED = """absl.app retrieval.serve.app retrieval.proxies
  retrieval.serve.searcher retrieval.web.searcher trafilatura
  uvicorn.protocols.http.h11_impl""".split()
_FORKS = multiprocessing.get_context('forkserver')
_FORKS.set_forkserver_preload(LOADED)


class _Keyed(httpx.AsyncHTTPTransport):
  """Adds the key below httpx, whose log and errors contain each URL."""

  def __init__(self, provider: Provider, key: str):
    super().__init__()
    self._provider, self._key = provider, key

  async def handle_async_request(self, request):
    url, headers = request.url, request.headers
    if self._provider.in_header:
      headers = {**headers, self._provider.secret: self._key}
    else:
      url = url.copy_set_param(self._provider.secret, self._key)
    same = {'stream': request.stream, 'extensions': request.extensions}
    sent = httpx.Request(request.method, url, headers=headers, **same)
    return await super().handle_async_request(sent)


class WebSearcher:
  """A `Searcher` over a search API; a Found's id is its URL.

  Attributes:
    budget: the spending.
    identity: what answers depend on, besides changes of the web.
    threads: that may search at once.
    document: in page mode, the main text of the page of a URL; None: it has
      none, or cannot be read in `document_s`. None in snippet mode.
  """

  def __init__(
    self,
    provider: str,
    *,
    mode: str = 'snippet',
    base_url: str | None = None,
    rate: float | None = None,
    timeout_s: float = 15.0,
    retries: int = 3,
    backoff_s: float = 0.5,
    max_wait_s: float = 30.0,
    max_bytes: int = 4 << 20,
    concurrency: int = 8,
    page_chars: int = 1000,
    page_cpu_s: int = 3,
    document_s: float = 6.0,
    fetcher: Fetcher | None = None,
    environ: Mapping[str, str] = os.environ,
    **limits: Any,
  ):
    """Makes a searcher; nothing is sent yet.

    Args:
      provider: a key of `PROVIDERS`.
      mode: 'snippet': the snippets of the provider; 'page': the passages of
        each page that match the query best.
      base_url: `http(s)://host` instead of the provider's.
      rate: maximal calls per second.
      timeout_s: of one attempt, from connecting to the last byte.
      retries: attempts after the first, for 429, 5xx and broken connections;
        each is a call of the budget.
      backoff_s: the n-th pause (from 0) is about backoff_s * 2**n.
      max_wait_s: the longest pause; a longer Retry-After fails the query.
      max_bytes: of one answer, unpacked.
      concurrency: calls at once.
      page_chars: of one page, in page mode.
      page_cpu_s: CPU time of the process that reads one page.
      document_s: of a page that `document` shows, less than clients wait for:
        a page that is slow is no failure of this server.
      fetcher: of the pages.
      environ: the environment with the keys.
      limits: max_calls, max_cost, price and ledger of `Budget`.

    Raises:
      ValueError: an unknown provider or mode, a missing or invalid key, or a
        rate or limit of the budget out of range.
      RuntimeError: the ledger cannot be used.
    """
    require_one_of('provider', provider, PROVIDERS)
    require_one_of('mode', mode, MODES)
    if rate is not None and not rate > 0:
      raise ValueError(f'rate={rate} must be above 0 calls a second')
    self._api = api = PROVIDERS[provider]
    key = api.read_key(environ)
    self.provider, self.mode = provider, mode
    self.base_url = (base_url or api.base_url).rstrip('/')
    if not re.fullmatch(r'https?://[^@?#\s]+', self.base_url):
      raise ValueError('base_url is not of the form http(s)://host:port/path')
    self.identity = {'web': provider, 'url': self.base_url, 'mode': mode}
    self.identity['options'] = api.fixed
    if mode == 'page':
      self.identity['page_chars'] = page_chars
    self._secrets = key, urllib.parse.quote(key, '')
    self._pause_s = 1 / rate if rate else 0.0
    self._answered = False  # any query
    self._next = 0.0  # earliest time.monotonic of the next call
    self.timeout_s, self.retries = timeout_s, retries
    self.backoff_s, self.max_wait_s = backoff_s, max_wait_s
    self.max_bytes, self.page_chars = max_bytes, page_chars
    self.page_cpu_s, self.document_s = page_cpu_s, document_s
    self.threads = concurrency + _FETCHES
    self._calls = asyncio.Semaphore(concurrency)
    self._fetches = asyncio.Semaphore(_FETCHES)
    self.budget = Budget(provider, **limits)
    # A transport of our own uses no proxy of the environment. The timeout of
    # httpx limits each read, which a slow stream of bytes never exceeds.
    headers = {'Accept': 'application/json', 'Accept-Encoding': 'gzip'}
    options = {'transport': _Keyed(api, key), 'headers': headers}
    self._client = httpx.AsyncClient(**options, timeout=None)
    # Runs the searches of all threads.
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
    self._thread.start()
    # Caches the last pages, which other queries may find too.
    read = lambda url: self._loop.create_task(self._read(url))
    self._page = functools.lru_cache(64)(read)
    # Threads that wait for the process of a page.
    self._readers = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
    self.document = self._document if mode == 'page' else None
    if mode == 'page':
      self._fetcher = fetcher or Fetcher()
      # Starts the forking process before the first query.
      self._readers.submit(self._apart, str)

  def search(self, queries: Sequence[str], k: int) -> list[Answer]:
    """See `Searcher.search`; one call of the API for each different query.

    The number of results is limited to those of one call. A query is cut at
    400 characters or 50 words; a query without words is not sent and finds
    nothing. Scores are 1 / rank.
    """
    return self._run(self._search(queries, k))

  def close(self) -> None:
    self._run(self._client.aclose())
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join()
    self._loop.close()
    self._readers.shutdown()
    self.budget.close()

  def _document(self, url: str) -> str | None:
    async def read() -> str:
      text = self._text(Row('', url, ''), '', whole=True)
      # Not cancelled at its end: others may wait for the same page.
      await asyncio.wait([task := asyncio.create_task(text)], timeout=seconds)
      return task.result()[0] if task.done() else ''

    seconds = self.document_s
    return self._run(read()) or None

  def _run(self, work: Coroutine):
    return asyncio.run_coroutine_threadsafe(work, self._loop).result()

  async def _search(self, queries: Sequence[str], k: int) -> list[Answer]:
    start = self._loop.create_task
    tasks = {q: start(self._answer(q, k)) for q in dict.fromkeys(queries)}
    return [await tasks[query] for query in queries]

  async def _answer(self, query: str, k: int) -> Answer:
    sent = providers.sendable(query)
    if not sent:
      return []
    try:
      async with self._calls:
        rows = (await self._ask(sent, k))[:k]
    except SearchFailed as error:
      metrics.WEB.labels('failed').inc()
      return error
    texts = await asyncio.gather(*(self._text(row, query) for row in rows))
    found = []
    for row, (text, transient) in zip(rows, texts):
      contents, rank = join_contents(row.title, text), len(found) + 1
      # Google's own answer above the results has no URL, and is another for
      # each query.
      url = row.url or f'{self.provider}:answer_box:{_digest(contents)}'
      found.append(Found(url, contents, 1 / rank, transient))
    return found

  async def _ask(self, query: str, k: int) -> list[Row]:
    """The results, after up to `retries` further attempts."""
    fields = {'q': query, self._api.count: min(k, self._api.most)}
    fields |= self._api.fixed
    place = 'params' if self._api.method == 'GET' else 'json'
    for attempt in range(self.retries + 1):
      self.budget.take()
      now = time.monotonic()
      self._next = max(now, self._next) + self._pause_s
      await asyncio.sleep(self._next - self._pause_s - now)
      metrics.WEB.labels('calls').inc()
      try:
        async with asyncio.timeout(self.timeout_s):
          return await self._once({place: fields})
      except TimeoutError:
        failure = SearchFailed(f'no answer within {self.timeout_s:g} s', 0)
      except httpx.TransportError as error:
        failure = SearchFailed(f'{type(error).__name__} {error}'.rstrip(), 0)
      except FetchFailed as error:
        failure = SearchFailed(f'unusable answer: {error}')
      except SearchFailed as error:
        failure = error
      wait = failure.retry_after_s
      if wait is None:
        break
      # Jitter separates clients that failed together.
      own = self.backoff_s * 2**attempt * random.uniform(0.5, 1.5)
      wait = max(wait, min(own, self.max_wait_s))
      if attempt == self.retries or wait > self.max_wait_s:
        break
      await asyncio.sleep(wait)
    problem = f'{failure}' + f' after {attempt + 1} attempts' * (attempt > 0)
    for secret in self._secrets:
      problem = problem.replace(secret, '***')
    problem = f'{self.provider}, {self.base_url}: {shown(problem, 300)}'
    raise SearchFailed(problem, None if wait is None else max(1.0, wait))

  async def _once(self, fields: Mapping[str, object]) -> list[Row]:
    """The results of one attempt; raises SearchFailed with unescaped text."""
    method, url = self._api.method, self.base_url + self._api.path
    async with self._client.stream(method, url, **fields) as response:
      status, headers = response.status_code, response.headers
      encoding = headers.get('Content-Encoding', '')
      body = await read_body(response.aiter_raw(), encoding, self.max_bytes)
    said = ' '.join(body.decode('utf-8', 'replace').split())
    problem = f'HTTP {status} {said}'
    if status != 200:
      # Brave's limits are per second and per month, in this order.
      _, month, left = headers.get('X-RateLimit-Remaining', '').rpartition(',')
      spent = status == 429 and month and left.strip() == '0'
      if spent or providers.SPENT.search(said):
        raise SearchFailed(f'the quota is used up: {problem}')
      if status in _RETRIED:
        reset = headers.get('X-RateLimit-Reset', '').split(',')[0]
        wait = retry_after(headers.get('Retry-After', reset))
        raise SearchFailed(problem, wait)
      key_refused = providers.KEY_REFUSED in said
      if status in _REFUSED and self._answered and not key_refused:
        metrics.WEB.labels('refused').inc()
        return []
      raise SearchFailed(problem)
    try:
      answer = json.loads(body)
      error = answer.get('error') if isinstance(answer, dict) else None
      # SerpAPI reports some failures, and no results, with 200.
      if error and not str(error).startswith(providers.NOTHING):
        raise SearchFailed(f'error: {error}', 0)
      rows = self._api.parse(answer)
      self._answered = True
      return rows
    except (ValueError, RecursionError) as error:
      raise SearchFailed(f'not as documented: {error}') from None

  async def _text(self, row: Row, query: str, whole=False) -> tuple[str, bool]:
    """The text of a result, and whether a later fetch may find more."""
    if self.mode == 'snippet' or not row.url:
      return row.text, False
    try:
      text = await self._page(row.url)
      if len(text) > self.page_chars and not whole:
        text = await self._elsewhere(cut, text, query, self.page_chars)
      shows = 'pages' if text else 'fallbacks'
    # Any error of an untrusted page fails only this page.
    except Exception as error:
      lasting = isinstance(error, FetchFailed) and error.kind not in TRANSIENT
      text, shows = '', 'fallbacks' if lasting else 'transient'
      if not lasting:
        self._page.cache_clear()
    metrics.WEB.labels(shows).inc()
    return text or row.text, shows == 'transient'

  async def _read(self, url: str) -> str:
    """The main text of a page; '' if there is none."""
    async with self._fetches:
      page = await self._fetcher.fetch(url)
      if page.media_type == 'text/plain':
        return page.text.strip()
      return await self._elsewhere(_main_text, page.text)

  def _elsewhere(self, *work) -> asyncio.Future:
    return self._loop.run_in_executor(self._readers, self._apart, *work)

  def _apart(self, function: Callable[..., str], *args: object) -> str:
    """Calls a function in a new process; returns '' and logs if it raises.

    Raises:
      EOFError: the process ran out of time.
    """
    pipe, theirs = _FORKS.Pipe(duplex=False)
    limits = self.page_cpu_s, math.ceil(self.timeout_s)
    work = (theirs, *limits, function, args)
    with pipe:
      _FORKS.Process(target=_work, args=work, daemon=True).start()
      theirs.close()
      text = pipe.recv_bytes().decode('utf-8', 'surrogatepass')
      if error := pipe.recv_bytes().decode('utf-8', 'surrogatepass'):
        _log.warning('%s: %s', function.__name__, shown(error))
      return text


def cut(text: str, query: str, size: int) -> str:
  """The passages of `text` that match `query` best, in their order.

  Passages are lines, and long lines are split between words. BM25 ranks them,
  and the best are taken up to `size` characters. Without any match, the begin
  of the text is returned.
  """
  if len(text) <= size:
    return text
  passages = []
  for line in filter(None, map(str.strip, text.splitlines())):
    while len(line) > _PASSAGE:
      at = line.rfind(' ', _PASSAGE // 2, _PASSAGE)
      at = _PASSAGE if at < 0 else at
      passages.append(line[:at])
      line = line[at:].lstrip()
    passages.append(line)
  taken, left = {}, size
  if passages:
    ids, _ = BM25Index(passages).search([query], len(passages))
    for i in ids[0][ids[0] >= 0].tolist():
      if left <= 0:
        break
      taken[i] = passages[i][:left]
      left -= len(taken[i]) + 1
  return '\n'.join(taken[i] for i in sorted(taken)) or text[:size]


def _work(pipe, cpu_s: int, wall_s: int, function, args) -> None:
  # The system kills the process; a parser in C cannot prevent that.
  resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
  signal.alarm(wall_s)
  text = problem = ''
  try:
    text = function(*args)
  except Exception as error:
    problem = f'{type(error).__name__} {error}'
  for said in (text, problem):
    pipe.send_bytes(said.encode('utf-8', 'surrogatepass'))


def _main_text(html: str) -> str:
  import trafilatura

  # It logs each malformed page, including untrusted bytes.
  logging.getLogger('trafilatura').setLevel(logging.CRITICAL)
  return trafilatura.extract(html, include_comments=False) or ''


def _digest(text: str) -> str:
  data = text.encode('utf-8', 'surrogatepass')
  return hashlib.sha256(data).hexdigest()[:12]
