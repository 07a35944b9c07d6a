"""Client of a retrieval server: deadlines, retries, typed errors.

  async with RetrievalClient('http://127.0.0.1:8000') as client:
    hits = await client.retrieve(['who wrote hamlet'], k=3)

A failure is an error, never an empty list: an outage that looked like "no
passages" would become a false reward. An empty list means that no passage has
any word of the query.
"""

import asyncio
import dataclasses
import datetime
import email.utils
import json
import logging
import math
import random
import re
import time
import urllib.parse
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from retrieval.corpus import split_contents

# httpx tells every request at INFO, which absl shows: thousands in a run.
if logging.getLogger('httpx').level == logging.NOTSET:
  logging.getLogger('httpx').setLevel(logging.WARNING)

KINDS = ('unreachable', 'timeout', 'overloaded', 'bad_response', 'rejected')
# 502 and 504 are a proxy's words for an absent and for a slow server.
_RETRIED = {
  429: 'overloaded',
  502: 'unreachable',
  503: 'overloaded',
  504: 'timeout',
}
_MEND = {
  'unreachable': (
    'Start it (python -m retrieval.server --corpus=...) or correct the URL.'
  ),
  'timeout': 'See whether the server is overloaded, or raise timeout_s.',
  'overloaded': 'Send fewer requests at once, or raise deadline_s.',
  'bad_response': 'See that the URL is a retrieval server, and its log.',
  'rejected': 'Correct the request, or raise the limit that it names.',
}
_SURROGATE = re.compile('[\ud800-\udfff]')
_LOOPBACK = ('127.0.0.1', 'localhost', '::1')


class RetrievalError(RuntimeError):
  """A request that got no usable answer.

  Attributes:
    kind: one of `KINDS`. `rejected` and `bad_response` were not tried again,
      since the same request would fare the same.
    url: what was asked.
    attempts: how often.
  """

  def __init__(self, kind: str, url: str, problem: str, attempts: int = 1):
    tried = f' after {attempts} attempts' if attempts > 1 else ''
    super().__init__(f'{url}: {problem}{tried} [{kind}]. {_MEND[kind]}')
    self.kind, self.url, self.attempts = kind, url, attempts


@dataclasses.dataclass(frozen=True)
class Hit:
  """A passage found: `contents` as sent, `title` and `text` taken from it."""

  id: str
  contents: str
  title: str
  text: str
  score: float


class _Failure(Exception):
  """One attempt that may be repeated."""

  def __init__(self, kind: str, problem: str, wait_s: float = 0.0):
    super().__init__(problem)
    self.kind, self.problem, self.wait_s = kind, problem, wait_s


class RetrievalClient:
  """Asks one server; safe to share between tasks.

  Connections are pooled for each event loop, since they belong to the loop
  that opened them. One client thus serves several `asyncio.run` in turn: a
  loop that ended takes its connections with it.
  """

  def __init__(
    self,
    url: str,
    *,
    timeout_s: float = 10.0,
    deadline_s: float = 60.0,
    retries: int = 4,
    backoff_s: float = 0.1,
    max_backoff_s: float = 5.0,
    max_connections: int = 32,
    max_queries: int = 1024,
    max_query_bytes: int = 16384,
    seed: int | None = None,
  ):
    """Makes a client; nothing is sent yet.

    Args:
      url: `http://host:port`; a path is kept as a prefix.
      timeout_s: for one attempt, from connecting to the last byte.
      deadline_s: for one call with all its attempts and pauses.
      retries: attempts after the first.
      backoff_s: the n-th pause (from 0) is uniform between 0 and
        backoff_s * 2**n (full jitter), on top of what Retry-After asks.
      max_backoff_s: the longest pause of our own.
      max_connections: open at once, for each event loop.
      max_queries: in one request; a longer call is split.
      max_query_bytes: UTF-8, of one query; a longer one is sent cut, at a
        character. A policy may write any query, and the server's refusal
        would look like a fault of the service.
      seed: of the jitter, for tests.

    Raises:
      ValueError: the URL is not http(s)://host.
    """
    try:
      parts = urllib.parse.urlsplit(url)
      usable = parts.scheme in ('http', 'https') and parts.hostname
      parts.port  # noqa: B018, raises where it is no number up to 65535
    except ValueError:
      usable = False
    if not usable:
      raise ValueError(f'url {url!r} is not of the form http://host:port')
    self.url = url.rstrip('/')
    self.timeout_s, self.deadline_s = timeout_s, deadline_s
    self.retries = retries
    self.backoff_s, self.max_backoff_s = backoff_s, max_backoff_s
    self.max_queries, self.max_query_bytes = max_queries, max_query_bytes
    # A proxy of the environment is no way to this very machine.
    self._trust_env = parts.hostname not in _LOOPBACK
    self._limits = httpx.Limits(
      max_connections=max_connections,
      max_keepalive_connections=max_connections,
      keepalive_expiry=30.0,  # below the server's 75 s
    )
    self._random = random.Random(seed)
    self._pools: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

  async def retrieve(
    self, queries: Sequence[str], k: int
  ) -> list[list[Hit]]:
    """Finds passages for each query.

    Args:
      queries: [Q] texts; none sends nothing. Lone surrogates are sent as
        U+FFFD, which matches nothing; what is beyond max_query_bytes is not
        sent.
      k: the most passages for one query, >= 1.

    Returns:
      [Q] lists of at most k hits, best first.

    Raises:
      RetrievalError: no usable answer for all of them; see its kind.
    """
    if isinstance(queries, str):
      raise TypeError('queries is a string; pass a list of strings')
    queries = [_sendable(query, self.max_query_bytes) for query in queries]
    parts = [
      queries[i : i + self.max_queries]
      for i in range(0, len(queries), self.max_queries)
    ]
    async with asyncio.TaskGroup() as group:
      tasks = [group.create_task(self._catch(part, k)) for part in parts]
    answers = [task.result() for task in tasks]
    for answer in answers:
      if isinstance(answer, RetrievalError):
        raise answer
    return [hits for answer in answers for hits in answer]

  async def health(self) -> Mapping[str, Any]:
    """What the server says of itself: corpus, index, limits.

    Raises:
      RetrievalError: as `retrieve`; `rejected` (404) from a server of the
        protocol that has no /health, such as Search-R1's own.
    """
    data = await self._ask('GET', '/health', None)
    if not isinstance(data, dict):
      raise self._bad('/health', 'the answer is not a JSON object')
    return data

  async def close(self) -> None:
    """Closes the connections of the running event loop."""
    pool = self._pools.pop(asyncio.get_running_loop(), None)
    if pool is not None:
      await pool.aclose()

  async def __aenter__(self) -> 'RetrievalClient':
    return self

  async def __aexit__(self, *_: object) -> None:
    await self.close()

  async def _catch(
    self, queries: list[str], k: int
  ) -> list[list[Hit]] | RetrievalError:
    # Returned, not raised: a TaskGroup would wrap it in an ExceptionGroup.
    try:
      body = {'queries': queries, 'topk': k, 'return_scores': True}
      data = await self._ask('POST', '/retrieve', body)
      return self._hits(data, len(queries), k)
    except RetrievalError as error:
      return error

  def _pool(self) -> httpx.AsyncClient:
    loop = asyncio.get_running_loop()
    if loop not in self._pools:
      # A pool holds its loop, so no weak reference to that ever dies: without
      # this each loop would leave its sockets open for good.
      for ended in [other for other in self._pools if other.is_closed()]:
        del self._pools[ended]
      self._pools[loop] = httpx.AsyncClient(
        limits=self._limits,
        trust_env=self._trust_env,
        # asyncio.timeout bounds the attempt as a whole; httpx's own bounds
        # each read, so a server that drips bytes would never reach them.
        timeout=None,
      )
    return self._pools[loop]

  async def _ask(
    self, method: str, path: str, body: Mapping[str, Any] | None
  ) -> Any:
    """The decoded JSON of the answer, after as many attempts as it takes."""
    content = None if body is None else json.dumps(body).encode()
    end = time.monotonic() + self.deadline_s
    attempt, before = 0, None
    while True:
      attempt += 1
      left = end - time.monotonic()
      try:
        return await self._once(method, path, content, left)
      except _Failure as failure:
        # An attempt that the deadline cut short says less than the one before.
        if before is not None and failure.kind == 'timeout' and (
          left < self.timeout_s
        ):
          failure = before
        before = failure
        # Added to Retry-After, which tells all clients the same moment.
        pause = failure.wait_s + self._random.uniform(
          0, min(self.max_backoff_s, self.backoff_s * 2.0 ** (attempt - 1))
        )
        # A pause that outlasts the deadline would only put the error off.
        late = time.monotonic() + pause >= end
        if attempt > self.retries or late:
          raise RetrievalError(
            failure.kind, self.url + path, failure.problem, attempt
          ) from failure.__cause__
        await asyncio.sleep(pause)

  async def _once(
    self, method: str, path: str, content: bytes | None, left: float
  ) -> Any:
    limit = max(0.001, min(self.timeout_s, left))
    try:
      async with asyncio.timeout(limit):
        response = await self._pool().request(
          method,
          self.url + path,
          content=content,
          headers={'Content-Type': 'application/json'},
        )
    except TimeoutError as error:
      raise _Failure('timeout', f'no answer within {limit:.3g} s') from error
    except httpx.DecodingError as error:
      raise self._bad(path, f'an undecodable answer ({error})') from error
    except httpx.TransportError as error:
      # Refused, reset, or closed in the middle of the answer. Asking again is
      # safe: a search changes nothing.
      raise _Failure('unreachable', _said(error)) from error
    status = response.status_code
    if status in _RETRIED:
      raise _Failure(
        _RETRIED[status],
        f'HTTP {status} {_excerpt(response)}',
        _retry_after(response),
      )
    if status != 200:
      kind = 'rejected' if 400 <= status < 500 else 'bad_response'
      raise RetrievalError(
        kind, self.url + path, f'HTTP {status} {_excerpt(response)}'
      )
    try:
      return json.loads(response.content.decode('utf-8'))
    except (ValueError, RecursionError) as error:
      raise self._bad(
        path, f'the answer is not JSON ({_excerpt(response)})'
      ) from error

  def _hits(self, data: Any, count: int, k: int) -> list[list[Hit]]:
    result = data.get('result') if isinstance(data, dict) else None
    if not isinstance(result, list):
      raise self._bad('/retrieve', "the answer has no list 'result'")
    if len(result) != count:
      raise self._bad(
        '/retrieve', f'{len(result)} results for {count} queries'
      )
    return [self._row(row, f'result[{i}]', k) for i, row in enumerate(result)]

  def _row(self, row: Any, where: str, k: int) -> list[Hit]:
    if not isinstance(row, list):
      raise self._bad('/retrieve', f'{where} is not a list')
    if len(row) > k:
      raise self._bad(
        '/retrieve', f'{where} has {len(row)} passages where topk was {k}'
      )
    return [self._hit(item, f'{where}[{i}]') for i, item in enumerate(row)]

  def _hit(self, item: Any, where: str) -> Hit:
    document = item.get('document') if isinstance(item, dict) else None
    if not isinstance(document, dict):
      raise self._bad('/retrieve', f"{where} has no object 'document'")
    for name in ('id', 'contents'):
      if not isinstance(document.get(name), str):
        raise self._bad('/retrieve', f'{where}.document.{name} is no string')
    score = item.get('score')
    if (
      isinstance(score, bool)
      or not isinstance(score, (int, float))
      or not math.isfinite(score)
    ):
      raise self._bad('/retrieve', f'{where}.score is no finite number')
    title, text = split_contents(document['contents'])
    return Hit(
      document['id'], document['contents'], title, text, float(score)
    )

  def _bad(self, path: str, problem: str) -> RetrievalError:
    return RetrievalError('bad_response', self.url + path, problem)


def retrieve_sync(
  url: str, queries: Sequence[str], k: int, **options: Any
) -> list[list[Hit]]:
  """`RetrievalClient(url, **options).retrieve` for scripts.

  Raises:
    RetrievalError: as `retrieve`.
    RuntimeError: called from a coroutine; await `retrieve` there.
  """

  async def run() -> list[list[Hit]]:
    async with RetrievalClient(url, **options) as client:
      return await client.retrieve(queries, k)

  return _run(run)


def health_sync(url: str, **options: Any) -> Mapping[str, Any]:
  """`RetrievalClient(url, **options).health` for scripts."""

  async def run() -> Mapping[str, Any]:
    async with RetrievalClient(url, **options) as client:
      return await client.health()

  return _run(run)


def _run(function) -> Any:
  try:
    asyncio.get_running_loop()
  except RuntimeError:
    return asyncio.run(function())
  raise RuntimeError(
    'an event loop is running; await RetrievalClient.retrieve instead'
  )


def _sendable(query: str, most: int) -> str:
  if not isinstance(query, str):
    raise TypeError(f'a query is a {type(query).__name__}, not a string')
  query = _SURROGATE.sub('\ufffd', query)
  if len(query) * 4 <= most:  # no character has more than 4 bytes
    return query
  return query.encode()[:most].decode('utf-8', 'ignore')


def _said(error: Exception) -> str:
  return f'{type(error).__name__} {error}'.rstrip()


def _excerpt(response: httpx.Response, size: int = 200) -> str:
  text = ' '.join(response.content.decode('utf-8', 'replace').split())
  return repr(text if len(text) <= size else text[: size - 3] + '...')


def _retry_after(response: httpx.Response) -> float:
  """Seconds that the server asks to wait, 0 where it asks nothing."""
  value = response.headers.get('Retry-After', '').strip()
  if value.isdecimal() and len(value) < 10:
    return float(value)
  try:
    when = email.utils.parsedate_to_datetime(value)
  except ValueError:
    return 0.0
  if when.tzinfo is None:
    when = when.replace(tzinfo=datetime.UTC)
  now = datetime.datetime.now(datetime.UTC)
  return max(0.0, (when - now).total_seconds())
