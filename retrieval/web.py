"""Web search as a searcher; `retrieval.providers` lists the APIs.

Each query is one paid call, counted before it goes out (`retrieval.budget`).
A failure is a `SearchFailed` in its query's place, never an empty list: an
empty list means that the provider found nothing, or that it refuses this query
where it has answered others.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
import concurrent.futures
import contextlib
import functools
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
import urllib.parse

import httpx

from retrieval import metrics
from retrieval.bm25 import BM25Index
from retrieval.budget import Budget
from retrieval.core import Found, SearchFailed
from retrieval.corpus import join_contents
from retrieval.fetch import TRANSIENT, Fetcher, FetchFailed, read_body, shown
from retrieval.providers import (
  KEY_REFUSED,
  NOTHING,
  PROVIDERS,
  SPENT,
  Provider,
  Row,
  sendable,
)
from retrieval.retry import retry_after

MODES = ('snippet', 'page')
_RETRIED = (408, 429, 500, 502, 503, 504)
_REFUSED = (400, 413, 422)  # of a query, where others are answered
_PASSAGE = 400  # characters: what a page is cut into before it is ranked
# A process that has loaded these forks one for each page. Besides the parser
# it is what retrieval.server imports: multiprocessing runs the main module in
# each process, so that it would import them anew for each page.
LOADED = (
  'absl.app',
  'retrieval.app',
  'retrieval.served',
  'retrieval.web',
  'trafilatura',
  'uvicorn.protocols.http.h11_impl',
)
_FORKS = multiprocessing.get_context('forkserver')
_FORKS.set_forkserver_preload([*LOADED])


class _Keyed(httpx.AsyncHTTPTransport):
  """Adds the key below httpx, whose log and errors show each URL."""

  def __init__(self, provider: Provider, key: str):
    super().__init__()
    self._provider, self._key = provider, key

  async def handle_async_request(self, request):
    url, headers = request.url, request.headers
    if self._provider.in_header:
      headers = {**headers, self._provider.secret: self._key}
    else:
      url = url.copy_set_param(self._provider.secret, self._key)
    return await super().handle_async_request(
      httpx.Request(
        request.method,
        url,
        headers=headers,
        stream=request.stream,
        extensions=request.extensions,
      )
    )


class WebSearcher:
  """A `Searcher` over a search API; a Found's id is its URL.

  Attributes:
    budget: what was spent.
    identity: what answers depend on; the web itself changes all the same.
    threads: that may search at once.
  """

  def __init__(
    self,
    provider: str,
    *,
    mode: str = 'snippet',
    base_url: str | None = None,
    options: Mapping[str, str] | None = None,
    rate: float | None = None,
    max_calls: int | None = None,
    max_cost: float | None = None,
    price: float | None = None,
    ledger: str | os.PathLike | None = None,
    timeout_s: float = 15.0,
    retries: int = 3,
    backoff_s: float = 0.5,
    max_wait_s: float = 30.0,
    max_bytes: int = 4 << 20,
    concurrency: int = 8,
    page_chars: int = 1000,
    page_concurrency: int = 16,
    page_cpu_s: int = 3,
    fetcher: Fetcher | None = None,
    environ: Mapping[str, str] = os.environ,
  ):
    """Makes a searcher; nothing is sent yet.

    Args:
      provider: a key of `PROVIDERS`.
      mode: 'snippet': what the provider shows of each page; 'page': the
        passages of each page that match the query best.
      base_url: `http(s)://host` in place of the provider's.
      options: further parameters of the API, such as {'gl': 'us'}.
      rate: calls a second, at the most.
      max_calls, max_cost, price, ledger: see `Budget`.
      timeout_s: for one attempt, from connecting to the last byte.
      retries: attempts after the first, for 429, 5xx and broken connections;
        each is a call of the budget.
      backoff_s: the n-th pause (from 0) is backoff_s * 2**n, more or less.
      max_wait_s: the longest pause; a Retry-After beyond it is the query's
        failure.
      max_bytes: of one answer, unpacked.
      concurrency: calls under way at once.
      page_chars: of one page, in page mode.
      page_concurrency: pages fetched at once.
      page_cpu_s: of the process that reads one page, before it is killed.
      fetcher: of the pages.
      environ: where the keys are.

    Raises:
      ValueError: an unknown provider or mode, a key missing or unfit, or a
        rate or bound of the budget out of its range.
      RuntimeError: the ledger cannot be used.
    """
    if provider not in PROVIDERS:
      raise ValueError(
        f'provider {provider!r} is none of {", ".join(PROVIDERS)}'
      )
    if mode not in MODES:
      raise ValueError(f'mode {mode!r} is none of {", ".join(MODES)}')
    if rate is not None and not rate > 0:
      raise ValueError(f'rate={rate} must be above 0 calls a second')
    self._api = api = PROVIDERS[provider]
    key = api.read_key(environ)
    self.provider, self.mode = provider, mode
    self.base_url = (base_url or api.base_url).rstrip('/')
    if not re.fullmatch(r'https?://[^@?#\s]+', self.base_url):
      raise ValueError('base_url is not of the form http(s)://host:port/path')
    self._options = {**api.fixed, **(options or {})}
    self.identity = {
      'web': provider,
      'url': self.base_url,
      'mode': mode,
      'options': self._options,
      **({'page_chars': page_chars} if mode == 'page' else {}),
    }
    self._secrets = key, urllib.parse.quote(key, '')
    self._pause_s = 1 / rate if rate else 0.0
    self._answered = False  # some query
    self._next = 0.0  # when the next call may go out, of time.monotonic
    self.timeout_s, self.retries = timeout_s, retries
    self.backoff_s, self.max_wait_s = backoff_s, max_wait_s
    self.max_bytes, self.page_chars = max_bytes, page_chars
    self.page_cpu_s = page_cpu_s
    self.threads = concurrency + page_concurrency
    self._calls = asyncio.Semaphore(concurrency)
    self._fetches = asyncio.Semaphore(page_concurrency)
    self.budget = Budget(
      provider, max_calls=max_calls, max_cost=max_cost, price=price, path=ledger
    )
    # No proxy of the environment: the transport is ours. No timeout: that of
    # httpx is for each read, which a drip of bytes never reaches.
    self._client = httpx.AsyncClient(
      transport=_Keyed(api, key),
      timeout=None,
      headers={'Accept': 'application/json', 'Accept-Encoding': 'gzip'},
    )
    # Runs all searches, whichever thread asks.
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
    self._thread.start()
    # The last pages, since other queries may find them too.
    self._page = functools.lru_cache(64)(
      lambda url: self._loop.create_task(self._read(url))
    )
    # Threads that wait for a page's process.
    self._readers = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
    if mode == 'page':
      self._fetcher = fetcher or Fetcher()
      # Starts the process that forks: not within the first query's time.
      self._readers.submit(self._apart, str)

  def search(
    self, queries: Sequence[str], k: int
  ) -> list[list[Found] | SearchFailed]:
    """As `Searcher.search`; one call of the API for each different query.

    At most as many results as the provider gives in one call. A query is
    sent without what is beyond 400 characters or 50 words; one without any
    word is not sent and finds nothing. Scores are 1 / rank.

    Raises:
      ValueError: k < 1.
    """
    if k < 1:
      raise ValueError(f'k={k} must be at least 1')
    return self._run(self._search(queries, k))

  def close(self) -> None:
    self._run(self._client.aclose())
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join()
    self._loop.close()
    self._readers.shutdown()
    self.budget.close()

  def _run(self, work: Coroutine):
    return asyncio.run_coroutine_threadsafe(work, self._loop).result()

  async def _search(
    self, queries: Sequence[str], k: int
  ) -> list[list[Found] | SearchFailed]:
    different = {
      query: self._loop.create_task(self._answer(query, k))
      for query in dict.fromkeys(queries)
    }
    return [await different[query] for query in queries]

  async def _answer(self, query: str, k: int) -> list[Found] | SearchFailed:
    sent = sendable(query)
    if not sent:
      return []
    try:
      async with self._calls:
        rows = (await self._ask(sent, k))[:k]
    except SearchFailed as error:
      metrics.WEB.labels('failed').inc()
      return error
    texts = await asyncio.gather(*(self._text(row, query) for row in rows))
    return [
      # An answer that Google gives by itself has no URL.
      Found(
        row.url or f'{self.provider}:answer_box',
        join_contents(row.title, text),
        1 / rank,
        transient,
      )
      for rank, (row, (text, transient)) in enumerate(zip(rows, texts), 1)
    ]

  async def _ask(self, query: str, k: int) -> list[Row]:
    """The results, after as many attempts as it takes."""
    fields = {'q': query, self._api.count: min(k, self._api.most)}
    fields |= self._options
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
      # Half to one and a half: clients that failed together come apart.
      own = self.backoff_s * 2**attempt * random.uniform(0.5, 1.5)
      wait = max(wait, min(own, self.max_wait_s))
      if attempt == self.retries or wait > self.max_wait_s:
        break
      await asyncio.sleep(wait)
    problem = f'{failure}' + f' after {attempt + 1} attempts' * (attempt > 0)
    for secret in self._secrets:
      problem = problem.replace(secret, '***')
    raise SearchFailed(
      f'{self.provider}, {self.base_url}: {shown(problem, 300)}',
      wait if wait is None else max(1.0, wait),
    )

  async def _once(self, fields: Mapping[str, object]) -> list[Row]:
    """The results of one attempt, or why there are none, in raw words."""
    async with self._client.stream(
      self._api.method, self.base_url + self._api.path, **fields
    ) as response:
      body = await read_body(
        response.aiter_raw(),
        response.headers.get('Content-Encoding', ''),
        self.max_bytes,
      )
    status, headers = response.status_code, response.headers
    said = ' '.join(body.decode('utf-8', 'replace').split())
    problem = f'HTTP {status} {said}'
    if status != 200:
      # Brave's limits are by the second and by the month, in this order.
      _, month, left = headers.get('X-RateLimit-Remaining', '').rpartition(',')
      if SPENT.search(said) or status == 429 and month and left.strip() == '0':
        raise SearchFailed(f'the quota is used up: {problem}')
      reset = headers.get('X-RateLimit-Reset', '').split(',')[0]
      if status in _RETRIED:
        raise SearchFailed(
          problem, retry_after(headers.get('Retry-After', reset))
        )
      if status in _REFUSED and self._answered and KEY_REFUSED not in said:
        metrics.WEB.labels('refused').inc()
        return []
      raise SearchFailed(problem)
    try:
      answer = json.loads(body)
      error = answer.get('error') if isinstance(answer, dict) else None
      # SerpAPI reports some failures, and nothing found, with 200.
      if error and not str(error).startswith(NOTHING):
        raise SearchFailed(f'error: {error}', 0)
      rows = self._api.parse(answer)
      self._answered = True
      return rows
    except (ValueError, RecursionError) as error:
      raise SearchFailed(f'not as documented: {error}') from None

  async def _text(self, row: Row, query: str) -> tuple[str, bool]:
    """What a result shows, and whether it may show more another time."""
    if self.mode == 'snippet' or not row.url:
      return row.text, False
    try:
      text = await self._page(row.url)
      if len(text) > self.page_chars:
        text = await self._loop.run_in_executor(
          self._readers, self._apart, cut, text, query, self.page_chars
        )
      shows = 'pages' if text else 'fallbacks'
    # Whatever a stranger's page brings about fails this page, not the batch.
    except Exception as error:
      lasting = isinstance(error, FetchFailed) and error.kind not in TRANSIENT
      text, shows = '', 'fallbacks' if lasting else 'transient'
      if not lasting:
        self._page.cache_clear()
    metrics.WEB.labels(shows).inc()
    return text or row.text, shows == 'transient'

  async def _read(self, url: str) -> str:
    """The main text of a page, empty where there is none."""
    async with self._fetches:
      page = await self._fetcher.fetch(url)
      if page.media_type == 'text/plain':
        return page.text.strip()
      return await self._loop.run_in_executor(
        self._readers, self._apart, _main_text, page.text
      )

  def _apart(self, function: Callable[..., str], *args: object) -> str:
    """What a function returns in a process of its own; '' if it raises.

    Raises:
      EOFError: the process ran out of time.
    """
    pipe, theirs = _FORKS.Pipe(duplex=False)
    limits = self.page_cpu_s, math.ceil(self.timeout_s)
    with pipe:
      _FORKS.Process(
        target=_work, args=(theirs, *limits, function, args), daemon=True
      ).start()
      theirs.close()
      return pipe.recv_bytes().decode('utf-8', 'surrogatepass')


def cut(text: str, query: str, size: int) -> str:
  """The passages of `text` that match `query` best, in their order.

  Passages are lines, long ones split between words; BM25 ranks them, and the
  best are taken until `size` characters are full. Without any match, the
  text's beginning.
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
  # The system kills it: no parser in C can hold that up.
  resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
  signal.alarm(wall_s)
  text = ''
  with contextlib.suppress(Exception):
    text = function(*args)
  pipe.send_bytes(text.encode('utf-8', 'surrogatepass'))


def _main_text(html: str) -> str:
  import trafilatura

  # It reports each odd page, strangers' bytes included.
  logging.getLogger('trafilatura').setLevel(logging.CRITICAL)
  return trafilatura.extract(html, include_comments=False) or ''
