"""Web search as a searcher; `retrieval.providers` lists the APIs.

Each query is one paid call, counted before it goes out (`retrieval.budget`).
A failure is a `SearchFailed` in its query's place, never an empty list: an
empty list means that the provider found nothing.
"""

import asyncio
import collections
import contextlib
import hashlib
import json
import logging
import os
import random
import re
import time
import urllib.parse
from collections.abc import Mapping, Sequence

import httpx

from retrieval.bm25 import BM25Index
from retrieval.budget import Budget
from retrieval.core import Found, SearchFailed
from retrieval.corpus import join_contents
from retrieval.fetch import Fetcher, FetchFailed, Page, read_body
from retrieval.providers import (
  NOTHING, PROVIDERS, SPENT, Provider, Row, sendable
)
from retrieval.retry import retry_after

MODES = ('snippet', 'page')
_RETRIED = (408, 429, 500, 502, 503, 504)
_PASSAGE = 400  # characters: what a page is cut into before it is ranked


class _Retry(Exception):
  """One attempt failed, another may not."""

  def __init__(self, message: str, wait_s: float = 0.0):
    super().__init__(message)
    self.wait_s = wait_s


class _Keyed(httpx.AsyncBaseTransport):
  """Adds the key below httpx, whose log and errors show each URL."""

  def __init__(self, provider: Provider, key: str):
    self._provider, self._key = provider, key
    self._inner = httpx.AsyncHTTPTransport()

  async def handle_async_request(self, request):
    url, headers = request.url, request.headers
    if self._provider.in_header:
      headers = {**headers, self._provider.secret: self._key}
    else:
      url = url.copy_set_param(self._provider.secret, self._key)
    return await self._inner.handle_async_request(httpx.Request(
      request.method, url, headers=headers, stream=request.stream,
      extensions=request.extensions,
    ))

  async def aclose(self):
    await self._inner.aclose()


class WebSearcher:
  """A `Searcher` over a search API; a Found's id is its URL.

  Attributes:
    counts: calls, retries, failed (queries), pages (fetched), fallbacks
      (pages that could not be had; their snippet stands in).
    budget: what was spent.
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
      fetcher: of the pages.
      environ: where the keys are.

    Raises:
      ValueError: an unknown provider or mode, a key missing or unfit, or a
        parameter out of its range.
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
    for name, value in dict(
      concurrency=concurrency, page_concurrency=page_concurrency,
      page_chars=page_chars, max_bytes=max_bytes,
    ).items():
      if value < 1:
        raise ValueError(f'{name}={value} must be at least 1')
    self._api = api = PROVIDERS[provider]
    keys = api.read_keys(environ)
    self.provider, self.mode = provider, mode
    self.base_url = (base_url or api.base_url).rstrip('/')
    if not re.fullmatch(r'https?://[^@?#\s]+', self.base_url):
      raise ValueError('base_url is not of the form http(s)://host:port/path')
    self._options = {**api.fixed, **(options or {})}
    if provider == 'google':
      self._options['cx'] = keys[1]
    self._secrets = tuple(
      form for key in keys for form in (key, urllib.parse.quote(key, ''))
    )
    self._pause_s = 1 / rate if rate else 0.0
    self._next = 0.0  # when the next call may go out, of time.monotonic
    self.timeout_s, self.retries = timeout_s, retries
    self.backoff_s, self.max_wait_s = backoff_s, max_wait_s
    self.max_bytes, self.page_chars = max_bytes, page_chars
    self._calls = asyncio.Semaphore(concurrency)
    self._fetches = asyncio.Semaphore(page_concurrency)
    self.counts: collections.Counter[str] = collections.Counter()
    self.budget = Budget(
      provider, max_calls=max_calls, max_cost=max_cost, price=price,
      path=ledger,
    )
    # No proxy of the environment: the transport is ours. No timeout: that of
    # httpx is for each read, which a drip of bytes never reaches.
    self._client = httpx.AsyncClient(
      transport=_Keyed(api, keys[0]), timeout=None,
      headers={'Accept': 'application/json', 'Accept-Encoding': 'gzip'},
    )
    if mode == 'page':
      self._fetcher = fetcher or Fetcher()
      _extractor()  # now, not within the first query's time
    # Kept over calls, for its connections.
    self._loop = asyncio.new_event_loop()

  @property
  def identity(self) -> dict[str, object]:
    """What answers depend on; the web itself changes all the same."""
    options = dict(self._options)
    if 'cx' in options:
      options['cx'] = hashlib.sha256(options['cx'].encode()).hexdigest()[:16]
    identity = {
      'web': self.provider, 'url': self.base_url, 'options': options,
      'mode': self.mode,
    }
    if self.mode == 'page':
      identity['page_chars'] = self.page_chars
    return identity

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
    return self._loop.run_until_complete(self._search(queries, k))

  def close(self) -> None:
    self._loop.run_until_complete(self._client.aclose())
    self._loop.close()
    self.budget.close()

  async def _search(
    self, queries: Sequence[str], k: int
  ) -> list[list[Found] | SearchFailed]:
    pages: dict[str, asyncio.Task] = {}  # each page once for a batch
    different = list(dict.fromkeys(queries))
    answers = await asyncio.gather(
      *(self._answer(query, k, pages) for query in different)
    )
    found = dict(zip(different, answers, strict=True))
    return [found[query] for query in queries]

  async def _answer(
    self, query: str, k: int, pages: dict
  ) -> list[Found] | SearchFailed:
    sent = sendable(query)
    if not sent:
      return []
    try:
      async with self._calls:
        rows = (await self._ask(sent, k))[:k]
    except SearchFailed as error:
      self.counts['failed'] += 1
      return error
    texts = [row.text for row in rows]
    if self.mode == 'page':
      texts = await asyncio.gather(
        *(self._page_text(row, query, pages) for row in rows)
      )
    return [
      # An answer that Google gives by itself has no URL.
      Found(row.url or f'{self.provider}:answer_box',
            join_contents(row.title, text), 1 / rank)
      for rank, (row, text) in enumerate(zip(rows, texts, strict=True), 1)
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
      self.counts['calls'] += 1
      self.counts['retries'] += attempt > 0
      try:
        async with asyncio.timeout(self.timeout_s):
          return await self._once({place: fields})
      except TimeoutError:
        failure = _Retry(f'no answer within {self.timeout_s:g} s')
      except httpx.TransportError as error:
        failure = _Retry(f'{type(error).__name__} {error}'.rstrip())
      except _Retry as error:
        failure = error
      # Half to one and a half: clients that failed together come apart.
      own = self.backoff_s * 2**attempt * random.uniform(0.5, 1.5)
      wait = max(failure.wait_s, min(own, self.max_wait_s))
      if attempt == self.retries or wait > self.max_wait_s:
        break
      await asyncio.sleep(wait)
    tried = f' after {attempt + 1} attempts' if attempt else ''
    raise self._failed(f'{failure}{tried}', max(1.0, wait))

  async def _once(self, fields: Mapping[str, object]) -> list[Row]:
    async with self._client.stream(
      self._api.method, self.base_url + self._api.path, **fields
    ) as response:
      try:
        body = await read_body(
          response.aiter_raw(), response.headers.get('Content-Encoding', ''),
          self.max_bytes,
        )
      except FetchFailed as error:
        raise self._failed(f'unusable answer: {error}') from None
    status = response.status_code
    said = ' '.join(body.decode('utf-8', 'replace').split())
    problem = f'HTTP {status} {said}'
    if status != 200:
      # Google says with 403 what others say with 429.
      limited = status == 403 and 'ratelimitexceeded' in said.lower()
      if SPENT.search(said) or _month_spent(response):
        raise self._failed(f'the quota is used up: {problem}')
      if status in _RETRIED or limited:
        raise _Retry(problem, _retry_after(response))
      raise self._failed(problem)
    try:
      answer = json.loads(body)
      error = answer.get('error') if isinstance(answer, dict) else None
      # SerpAPI reports some failures, and nothing found, with 200.
      if error and not str(error).startswith(NOTHING):
        raise _Retry(f'error: {error}')
      return self._api.parse(answer)
    except (ValueError, RecursionError) as error:
      raise self._failed(f'not as documented: {error}') from None

  async def _page_text(self, row: Row, query: str, pages: dict) -> str:
    if not row.url:
      return row.text
    if row.url not in pages:
      pages[row.url] = asyncio.ensure_future(self._page(row.url))
    text = await pages[row.url]
    return cut(text, query, self.page_chars) if text else row.text

  async def _page(self, url: str) -> str:
    """The main text of a page, empty where there is none."""
    text = ''
    # Exception: whatever a stranger's page makes of the parser, it is this
    # page's failure and not the batch's.
    with contextlib.suppress(Exception):
      async with self._fetches:
        page = await self._fetcher.fetch(url)
        async with asyncio.timeout(self.timeout_s):
          text = await asyncio.to_thread(_main_text, page)
    self.counts['pages' if text else 'fallbacks'] += 1
    return text

  def _failed(self, problem: str, after: float | None = None) -> SearchFailed:
    for secret in self._secrets:
      problem = problem.replace(secret, '***')
    if len(problem) > 300:
      problem = problem[:297] + '...'
    # No bytes of a stranger reach a terminal raw.
    problem = problem.encode('ascii', 'backslashreplace').decode()
    problem = re.sub(r'[\x00-\x1f\x7f]', '?', problem)
    return SearchFailed(f'{self.provider}, {self.base_url}: {problem}', after)


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


def _extractor():
  """trafilatura takes seconds to import; snippet mode does without."""
  import trafilatura
  # It reports each odd page, strangers' bytes included.
  logging.getLogger('trafilatura').setLevel(logging.CRITICAL)
  return trafilatura


def _main_text(page: Page) -> str:
  if page.media_type == 'text/plain':
    return page.text.strip()
  return _extractor().extract(page.text, include_comments=False) or ''


def _month_spent(response: httpx.Response) -> bool:
  """Brave's limits are by the second and by the month, in this order."""
  left = response.headers.get('X-RateLimit-Remaining', '').split(',')
  return response.status_code == 429 and len(left) > 1 and (
    left[-1].strip() == '0'
  )


def _retry_after(response: httpx.Response) -> float:
  """Seconds that the provider asks to wait, 0 where it asks nothing."""
  reset = response.headers.get('X-RateLimit-Reset', '').split(',')[0]
  return retry_after(response.headers.get('Retry-After', reset))
