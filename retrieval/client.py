"""Client of retrieval servers: deadlines, retries, failover, typed errors.

  async with RetrievalClient('http://127.0.0.1:8000') as client:
    hits = await client.retrieve(['who wrote hamlet'], k=3)

Several servers of one corpus and index (replicas) share the load; the next
attempt at a request goes to another one. One that serves something else, from
the start or after it was away, is not asked (see `replicas`).

A failure is an error, never an empty list: an outage that looked like "no
passages" would become a false reward. An empty list means that no passage has
any word of the query.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
import logging
import math
import os
import random
import re
import ssl
import time
from typing import Any
import urllib.parse
import weakref

import httpx

from retrieval.core import IDENTITY_HEADER
from retrieval.corpus import split_contents
from retrieval.replicas import (
  BROKEN,
  Failure,
  Replica,
  Replicas,
  RetrievalError,
)
from retrieval.retry import retry_after

# httpx tells every request at INFO, which absl shows: thousands in a run.
if logging.getLogger('httpx').level == logging.NOTSET:
  logging.getLogger('httpx').setLevel(logging.WARNING)

# 502 and 504 are a proxy's words for an absent and for a slow server.
_RETRIED = {
  429: 'overloaded',
  502: 'unreachable',
  503: 'overloaded',
  504: 'timeout',
}
_SURROGATE = re.compile('[\ud800-\udfff]')
_HEALTH = '/health'
_LOOPBACK = ('127.0.0.1', 'localhost', '::1')


@dataclasses.dataclass(frozen=True)
class Hit:
  """A passage found: `contents` as sent, `title` and `text` taken from it."""

  id: str
  contents: str
  title: str
  text: str
  score: float


class RetrievalClient:
  """Asks a server or its replicas; safe to share between tasks.

  Connections are pooled for each event loop, since they belong to the loop
  that opened them. One client thus serves several `asyncio.run` in turn: a
  loop that ended takes its connections with it.
  """

  def __init__(
    self,
    url: str | Sequence[str],
    *,
    token: str | None = None,
    timeout_s: float = 10.0,
    deadline_s: float = 60.0,
    retries: int = 4,
    backoff_s: float = 0.1,
    max_backoff_s: float = 5.0,
    max_connections: int = 32,
    max_queries: int = 1024,
    ca_file: str | None = None,
    failures: int = 5,
    cooldown_s: float = 2.0,
    seed: int | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Makes a client; nothing is sent yet.

    Args:
      url: `http://host:port`, or several (a sequence, or separated by
        commas) of servers that serve the same; a path is kept as a prefix.
      token: sent as a bearer token; None: RETRIEVAL_TOKEN of the environment,
        where that is set.
      timeout_s: for one attempt, from connecting to the last byte.
      deadline_s: for one call with all its attempts and pauses.
      retries: attempts after the first.
      backoff_s: the n-th pause (from 0) is uniform between 0 and
        backoff_s * 2**n (full jitter), on top of what Retry-After asks.
      max_backoff_s: the longest pause of our own.
      max_connections: open at once, for each event loop.
      max_queries: in one request; a longer call is split.
      ca_file: certificates (PEM) that an https server's must follow from;
        None: RETRIEVAL_CA_FILE of the environment, else the usual ones.
      failures: so many in a row open a replica's circuit: it did not answer,
        or not in time. An overloaded server says itself when to come back.
      cooldown_s: how long an open circuit is left alone, up to half as long
        again (jitter), before one request probes it.
      seed: of the jitter, for tests.
      clock: seconds, for tests.

    Raises:
      ValueError: a URL is not http(s)://host, the token cannot be sent, or
        ca_file cannot be read.
    """
    urls = url.split(',') if isinstance(url, str) else url
    self._random, self._clock = random.Random(seed), clock
    self._replicas = Replicas(
      [one.strip() for one in urls],
      failures=failures,
      cooldown_s=cooldown_s,
      rng=self._random,
      clock=clock,
    )
    self.urls = tuple(replica.url for replica in self._replicas.all)
    self.url = ','.join(self.urls)
    token = os.environ.get('RETRIEVAL_TOKEN') if token is None else token
    self._headers = {'Content-Type': 'application/json'}
    if token:
      if not all('!' <= c <= '~' for c in token):
        raise ValueError('the token has other than visible ASCII characters')
      self._headers['Authorization'] = f'Bearer {token}'
    self.timeout_s, self.deadline_s = timeout_s, deadline_s
    self.retries = retries
    self.backoff_s, self.max_backoff_s = backoff_s, max_backoff_s
    self.max_queries = max_queries
    ca_file = ca_file or os.environ.get('RETRIEVAL_CA_FILE')
    try:
      self._verify = (
        ssl.create_default_context(cafile=ca_file) if ca_file else True
      )
    except OSError as error:
      raise ValueError(
        f'ca_file={ca_file!r} (RETRIEVAL_CA_FILE) cannot be read: {error}'
      ) from None
    self._limits = httpx.Limits(
      max_connections=max_connections,
      max_keepalive_connections=max_connections,
      keepalive_expiry=30.0,  # below the server's 75 s
    )
    self._pools: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

  async def retrieve(
    self, queries: Sequence[str], k: int, url: str | None = None
  ) -> list[list[Hit]]:
    """Finds passages for each query.

    Args:
      queries: [Q] texts; none sends nothing. Lone surrogates are sent as
        U+FFFD, which matches nothing.
      k: the most passages for one query, >= 1.
      url: which of `urls`; None: any.

    Returns:
      [Q] lists of at most k hits, best first.

    Raises:
      RetrievalError: no usable answer for all of them; see its kind.
    """
    if isinstance(queries, str):
      raise TypeError('queries is a string; pass a list of strings')
    queries = [_sendable(query) for query in queries]
    parts = [
      queries[i : i + self.max_queries]
      for i in range(0, len(queries), self.max_queries)
    ]
    async with asyncio.TaskGroup() as group:
      tasks = [group.create_task(self._catch(part, k, url)) for part in parts]
    answers = [task.result() for task in tasks]
    for i, answer in enumerate(answers):
      if isinstance(answer, RetrievalError):
        start = i * self.max_queries
        answer.queries = tuple(start + n for n in answer.queries)
        raise answer
    return [hits for answer in answers for hits in answer]

  async def health(self, url: str | None = None) -> Mapping[str, Any]:
    """What a server says of itself: corpus, index, limits.

    The first one that is told is what all others, and this one when it was
    away, must serve.

    Args:
      url: which of `urls`; None: any.

    Raises:
      RetrievalError: as `retrieve`; `rejected` (404) from a server of the
        protocol that has no /health, such as Search-R1's own.
    """
    return await self._ask('GET', _HEALTH, None, url, _object)

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
    self, queries: list[str], k: int, url: str | None
  ) -> list[list[Hit]] | RetrievalError:
    # Returned, not raised: a TaskGroup would wrap it in an ExceptionGroup.
    try:
      body = {'queries': queries, 'topk': k, 'return_scores': True}
      return await self._ask(
        'POST',
        '/retrieve',
        body,
        url,
        lambda data, url: _hits(data, len(queries), k, url),
      )
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
        verify=self._verify,
        # A proxy of the environment is no way to this very machine.
        trust_env=not all(map(_is_loopback, self.urls)),
        mounts={url: None for url in self.urls if _is_loopback(url)},
        # asyncio.timeout bounds the attempt as a whole; httpx's own bounds
        # each read, so a server that drips bytes would never reach them.
        timeout=None,
      )
    return self._pools[loop]

  async def _ask(
    self,
    method: str,
    path: str,
    body: Mapping[str, Any] | None,
    url: str | None,
    read: Callable[[Any, str], Any],
  ) -> Any:
    """What `read` makes of the answer's JSON and URL, after all attempts.

    A replica that answers rubbish, or refuses the token, is passed over while
    there are others: they may be well.
    """
    replicas = [r for r in self._replicas.all if url in (None, r.url)]
    replicas = [r for r in replicas if not r.differs] or replicas
    content = None if body is None else json.dumps(body).encode()
    end = self._clock() + self.deadline_s
    attempt, before, replica = 0, None, None
    while True:
      replica, probe = await self._replicas.choose(
        replicas, replica, end, path, attempt
      )
      attempt += 1
      url, left = replica.url + path, end - self._clock()
      once = self._attempt(replica, method, path, content, left, read)
      try:
        return await self._replicas.watch(
          replica, probe, once, left >= self.timeout_s
        )
      except RetrievalError as error:
        if error.kind not in BROKEN or len(replicas) == 1:
          raise
        replicas = [r for r in replicas if r is not replica]
      except Failure as failure:
        # An attempt that the deadline cut short says less than the one before.
        if (
          before is not None
          and failure.kind == 'timeout'
          and (left < self.timeout_s)
        ):
          failure = before
        before = failure
        now = self._clock()
        # Added to Retry-After, which tells all clients the same moment.
        pause = max(
          0.0, min(max(r.busy_until, r.open_until) for r in replicas) - now
        )
        pause += self._random.uniform(
          0, min(self.max_backoff_s, self.backoff_s * 2.0 ** (attempt - 1))
        )
        # A pause that outlasts the deadline would only put the error off.
        if attempt > self.retries or now + pause >= end:
          raise RetrievalError(
            failure.kind, url, failure.problem, attempt, failure.queries
          ) from failure.__cause__
        await asyncio.sleep(pause)

  async def _attempt(
    self,
    replica: Replica,
    method: str,
    path: str,
    content: bytes | None,
    left: float,
    read: Callable[[Any, str], Any],
  ) -> Any:
    """One attempt; a replica that is not known says first what it serves."""
    end = self._clock() + min(self.timeout_s, left)
    silent = False
    if not replica.known and path != _HEALTH:
      try:
        said = await self._once(replica, 'GET', _HEALTH, None, left, _object)
        # As one of ours to who lacks its token: the query will say so.
        silent = 'version' in said and 'identity' not in said
      except RetrievalError as error:
        if error.kind != 'rejected':
          raise
        said = {}  # a server of the protocol need not have it
      if not silent:
        self._learn(replica, said.get('identity'))
      left = end - self._clock()
    answer = await self._once(replica, method, path, content, left, read)
    if silent:
      self._learn(replica, None)
    elif path == _HEALTH and 'identity' in answer:
      self._replicas.learn(replica, answer['identity'])
    return answer

  def _learn(self, replica: Replica, identity: Any) -> None:
    self._replicas.learn(replica, identity)
    if replica.differs:
      raise RetrievalError('different', replica.url + _HEALTH, replica.differs)

  async def _once(
    self,
    replica: Replica,
    method: str,
    path: str,
    content: bytes | None,
    left: float,
    read: Callable[[Any, str], Any],
  ) -> Any:
    url = replica.url + path
    limit = max(0.001, min(self.timeout_s, left))
    waits = {'X-Deadline-Ms': str(math.ceil(min(limit, 900_000) * 1000))}
    try:
      async with asyncio.timeout(limit):
        response = await self._pool().request(
          method, url, content=content, headers=self._headers | waits
        )
    except TimeoutError as error:
      raise Failure('timeout', f'no answer within {limit:.3g} s') from error
    except httpx.DecodingError as error:
      raise _bad(url, f'an undecodable answer ({error})') from error
    except httpx.TransportError as error:
      # Refused, reset, or closed in the middle of the answer. Asking again is
      # safe: a search changes nothing.
      raise Failure('unreachable', _said(error)) from error
    status = response.status_code
    if (found := response.headers.get(IDENTITY_HEADER)) is not None:
      self._replicas.compare(replica, found)
      if replica.differs:
        raise RetrievalError('different', url, replica.differs)
    problem = f'HTTP {status} {_excerpt(response)}'
    queries = _failed_queries(response) if status in (502, 503) else ()
    if queries and status == 502:
      raise RetrievalError('search_failed', url, problem, queries=queries)
    if status in _RETRIED:
      raise Failure(
        _RETRIED[status],
        problem,
        retry_after(response.headers.get('Retry-After', '')),
        queries,
      )
    if status in (401, 403):
      raise RetrievalError('unauthorised', url, problem)
    if status != 200:
      kind = 'rejected' if 400 <= status < 500 else 'bad_response'
      raise RetrievalError(kind, url, problem)
    try:
      data = json.loads(response.content.decode('utf-8'))
    except (ValueError, RecursionError) as error:
      raise _bad(
        url, f'the answer is not JSON ({_excerpt(response)})'
      ) from error
    return read(data, url)


def _object(data: Any, url: str) -> Mapping[str, Any]:
  if not isinstance(data, dict):
    raise _bad(url, 'the answer is not a JSON object')
  return data


def _hits(data: Any, count: int, k: int, url: str) -> list[list[Hit]]:
  """The answer, checked; a passage must be whole to count as one."""
  result = data.get('result') if isinstance(data, dict) else None
  if not isinstance(result, list):
    raise _bad(url, "the answer has no list 'result'")
  if len(result) != count:
    raise _bad(url, f'{len(result)} results for {count} queries')
  for i, row in enumerate(result):
    if not isinstance(row, list):
      raise _bad(url, f'result[{i}] is not a list')
    if len(row) > k:
      raise _bad(url, f'result[{i}] has {len(row)} passages where topk was {k}')
  return [
    [_hit(item, f'result[{i}][{j}]', url) for j, item in enumerate(row)]
    for i, row in enumerate(result)
  ]


def _hit(item: Any, where: str, url: str) -> Hit:
  document = item.get('document') if isinstance(item, dict) else None
  if not isinstance(document, dict):
    raise _bad(url, f"{where} has no object 'document'")
  for name in ('id', 'contents'):
    if not isinstance(document.get(name), str):
      raise _bad(url, f'{where}.document.{name} is no string')
  score = item.get('score')
  if (
    isinstance(score, bool)
    or not isinstance(score, (int, float))
    or not math.isfinite(score)
  ):
    raise _bad(url, f'{where}.score is no finite number')
  title, text = split_contents(document['contents'])
  return Hit(document['id'], document['contents'], title, text, float(score))


def _bad(url: str, problem: str) -> RetrievalError:
  return RetrievalError('bad_response', url, problem)


def _failed_queries(response: httpx.Response) -> tuple[int, ...]:
  """The positions of the queries that a server of ours failed on."""
  try:
    return tuple(
      int(problem['loc'][2])
      for problem in json.loads(response.content)['detail']
      if problem['type'] == 'search_failed'
    )
  except (ValueError, TypeError, LookupError, RecursionError):
    return ()  # a proxy's page, or another server's


def _is_loopback(url: str) -> bool:
  return urllib.parse.urlsplit(url).hostname in _LOOPBACK


def retrieve_sync(
  url: str, queries: Sequence[str], k: int, **options: Any
) -> list[list[Hit]]:
  """`RetrievalClient(url, **options).retrieve` for scripts.

  Raises:
    RetrievalError: as `retrieve`.
    RuntimeError: called from a coroutine; await `retrieve` there.
  """
  return _run(url, options, lambda client: client.retrieve(queries, k))


def health_sync(url: str, **options: Any) -> Mapping[str, Any]:
  """`RetrievalClient(url, **options).health` for scripts."""
  return _run(url, options, RetrievalClient.health)


def _run(url: str, options: Mapping[str, Any], ask: Callable) -> Any:
  async def run() -> Any:
    async with RetrievalClient(url, **options) as client:
      return await ask(client)

  return asyncio.run(run())


def _sendable(query: str) -> str:
  if not isinstance(query, str):
    raise TypeError(f'a query is a {type(query).__name__}, not a string')
  return _SURROGATE.sub('\ufffd', query)


def _said(error: Exception) -> str:
  return f'{type(error).__name__} {error}'.rstrip()


def _excerpt(response: httpx.Response, size: int = 200) -> str:
  text = ' '.join(response.content.decode('utf-8', 'replace').split())
  return repr(text if len(text) <= size else text[: size - 3] + '...')
