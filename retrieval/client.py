"""Client of retrieval servers: deadlines, retries, failover, typed errors.

  async with RetrievalClient('http://127.0.0.1:8000') as client:
    hits = await client.retrieve(['who wrote hamlet'], k=3)

Several servers of one corpus and index (replicas) share the load; a retry goes
to another replica. A replica that serves something else, from the start or
after an outage, is not asked (see `replicas`).

A failure is an error and never an empty list: an outage that looks like "no
passages" would become a false reward. An empty list means that no passage has
any word of the query.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import hashlib
import json
import logging
import math
import os
import random
import re
import ssl
import time
from typing import Any
import weakref

import httpx

from retrieval import proxies
from retrieval.core import IDENTITY_HEADER
from retrieval.corpus import split_contents, titled
from retrieval.files import convert, shown
from retrieval.replicas import Failure, Replica, Replicas, RetrievalError
from retrieval.retry import retry_after

# httpx logs every request at INFO, which absl shows: thousands in a run.
if logging.getLogger('httpx').level == logging.NOTSET:
  logging.getLogger('httpx').setLevel(logging.WARNING)

# Proxies answer 502 for an absent server and 504 for a slow one.
_RETRIED = {429: 'overloaded', 503: 'overloaded'}
_RETRIED |= {502: 'unreachable', 504: 'timeout'}
_SURROGATE = re.compile('[\ud800-\udfff]')
_REFUSED = (400, 413, 414, 422)  # what the request holds is at fault
# Statuses of a request that is not at fault -> what to do.
_FIX = dict.fromkeys(
  (404, 405),
  'Correct the URL: http://host:port of a retrieval server, and the prefix '
  'before /retrieve if it has one.',
)
_FIX[403] = (
  'Use a name that the server accepts, such as 127.0.0.1 on its machine, or '
  'start it with --allow_host=NAME.'
)
# Fields of a document.
_TEXTS = ('contents', 'content', 'text')
_IDS = ('id', '_id', 'docid', 'doc_id')
# Reading the certificates takes 20 ms, which each event loop would spend again.
_tls = functools.cache(httpx.create_ssl_context)


@dataclasses.dataclass(frozen=True)
class Hit:
  """A passage: `contents`, which is its `title` and `text`."""

  id: str
  contents: str
  title: str
  text: str
  score: float | None  # finite; None if the server gives none


@dataclasses.dataclass(frozen=True)
class _Call:
  """A request, and the function that checks and converts its answer."""

  method: str
  path: str
  read: Callable[[Any], Any]
  content: bytes | None = None


class RetrievalClient:
  """Asks a server or its replicas; tasks may share it.

  Each event loop has a pool of connections, since connections belong to the
  loop that opened them. So one client works in several `asyncio.run` in turn.
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
      url: `http://host:port`, or several (a sequence, or separated by commas)
        of replicas; a path is kept as a prefix.
      token: sent as a bearer token; None: the environment variable
        RETRIEVAL_TOKEN, if set.
      timeout_s: of one attempt, from connecting to the last byte.
      deadline_s: of one call with all its attempts and pauses.
      retries: attempts after the first.
      backoff_s: the n-th pause (from 0) is uniform between 0 and
        backoff_s * 2**n (full jitter), in addition to Retry-After.
      max_backoff_s: the upper bound of backoff_s * 2**n.
      max_connections: open at once, for each event loop.
      max_queries: of one request; a longer call is split.
      ca_file: trusted certificates (PEM) for https; None: the environment
        variable RETRIEVAL_CA_FILE, else the usual ones.
      failures: this number of consecutive failures to answer in time opens the
        circuit of a replica.
      cooldown_s: how long an open circuit is not asked, up to 1.5 times that
        (jitter), before one request probes it.
      seed: of the jitter, for tests.
      clock: seconds, for tests.

    Raises:
      ValueError: a URL is not http(s)://host, the token cannot be sent, or
        ca_file cannot be read.
    """
    urls = url.split(',') if isinstance(url, str) else url or ['']
    self._random, self._clock = random.Random(seed), clock
    self._replicas = Replicas(urls, failures, cooldown_s, self._random, clock)
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
    problem = f'ca_file={ca_file!r} (RETRIEVAL_CA_FILE) cannot be read: {{}}'
    with convert(OSError, ValueError, problem):
      own = ca_file and ssl.create_default_context(cafile=ca_file)
    self._verify = own or _tls()
    # All are kept, for less than the 75 s of the server.
    kept = {'keepalive_expiry': 30.0}
    self._limits = httpx.Limits(max_connections=max_connections, **kept)
    self._pools: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

  async def retrieve(
    self, queries: Sequence[str], k: int, url: str | None = None
  ) -> list[list[Hit]]:
    """Finds passages for each query.

    Args:
      queries: [Q] texts; nothing is sent if there are none. Lone surrogates
        are sent as U+FFFD, which matches nothing.
      k: the maximal number of passages per query, >= 1.
      url: one of `urls`; None: any.

    Returns:
      [Q] lists of at most k hits, best first.

    Raises:
      RetrievalError: there is no usable answer to all of them; see its kind.
    """
    if isinstance(queries, str):
      raise TypeError('queries is a string; pass a list of strings')
    queries, size = [_sendable(query) for query in queries], self.max_queries
    starts = range(0, len(queries), size)

    async def part(start: int) -> list[list[Hit]]:
      some = queries[start : start + size]
      body = {'queries': some, 'topk': k, 'return_scores': True}
      read = functools.partial(_hits, len(some), k)
      call = _Call('POST', '/retrieve', read, json.dumps(body).encode())
      try:
        return await self._ask(call, url)
      except RetrievalError as error:
        error.queries = tuple(start + n for n in error.queries)
        raise

    answers = await asyncio.gather(*map(part, starts), return_exceptions=True)
    for answer in answers:
      if isinstance(answer, BaseException):
        raise answer
    return [hits for answer in answers for hits in answer]

  async def document(
    self, name: str, piece: int = 1, chars: int | None = None
  ) -> tuple[str, int] | None:
    """A piece of the document behind a passage.

    Args:
      name: the id of the passage.
      piece: its number, from 1.
      chars: characters of a piece; None: as many as the server allows.

    Returns:
      The piece, '' after the last one, and how many there are; None: there is
      no such document.

    Raises:
      RetrievalError: as `retrieve`; `rejected` (404) from a server without
        documents, whose `health` does not say documents: true.
    """
    asked = {'id': _sendable(name), 'piece': piece, 'chars': chars}
    call = _Call('POST', '/document', _piece, json.dumps(asked).encode())
    return await self._ask(call, None)

  async def health(self, url: str | None = None) -> Mapping[str, Any]:
    """The description of a server: corpus, index, limits.

    The identity in the first answer is the one that all servers must have.

    Args:
      url: one of `urls`; None: any.

    Raises:
      RetrievalError: as `retrieve`; `rejected` (404) from a server of the
        protocol without /health, such as Search-R1's own.
    """
    return await self._ask(_HEALTH, url)

  async def close(self) -> None:
    """Closes the connections of the running event loop."""
    pool = self._pools.pop(asyncio.get_running_loop(), None)
    if pool is not None:
      await pool.aclose()

  async def __aenter__(self) -> 'RetrievalClient':
    return self

  async def __aexit__(self, *_: object) -> None:
    await self.close()

  def _pool(self) -> httpx.AsyncClient:
    loop = asyncio.get_running_loop()
    if loop not in self._pools:
      # A pool references its loop, so weak references to loops never die;
      # without this, each loop would leave its sockets open.
      for ended in [other for other in self._pools if other.is_closed()]:
        del self._pools[ended]
      near = [url for url in self.urls if proxies.is_near(url)]
      self._pools[loop] = proxies.open_client(
        httpx.AsyncClient,
        limits=self._limits,
        verify=self._verify,
        # A proxy of the environment cannot reach this machine.
        trust_env=len(near) < len(self.urls),
        mounts=dict.fromkeys(near),
        # asyncio.timeout limits the whole attempt; the timeout of httpx limits
        # each read, which a server that sends byte by byte never exceeds.
        timeout=None,
      )
    return self._pools[loop]

  async def _ask(self, call: _Call, url: str | None) -> Any:
    """The result of a call after all attempts.

    A replica with an invalid answer, or that refuses the token, is skipped
    while there are others.
    """
    replicas = [r for r in self._replicas.all if url in (None, r.url)]
    replicas = [r for r in replicas if not r.differs] or replicas
    end = self._clock() + self.deadline_s
    attempt, before, replica = 0, None, None
    while True:
      replica, probe = await self._replicas.choose(
        replicas, replica, end, call.path, attempt
      )
      attempt += 1
      left = end - self._clock()
      whole, once = left >= self.timeout_s, self._attempt(replica, call, left)
      try:
        return await self._replicas.watch(replica, probe, once, whole)
      except RetrievalError as error:
        if not error.of_replica or len(replicas) == 1:
          raise
        replicas = [r for r in replicas if r is not replica]
      except Failure as failure:
        # A timeout due to the deadline says less than the previous failure.
        if before is not None and failure.kind == 'timeout' and not whole:
          failure = before
        before, now = failure, self._clock()
        # Jitter on top of Retry-After, which is the same for all clients.
        free = min(max(r.busy_until, r.open_until) for r in replicas)
        own = min(self.max_backoff_s, self.backoff_s * 2.0 ** (attempt - 1))
        pause = max(0.0, free - now) + self._random.uniform(0, own)
        # A pause beyond the deadline would only delay the error.
        if attempt > self.retries or now + pause >= end:
          asked = replica.url + call.path
          raise failure.error(asked, attempt) from failure.__cause__
        await asyncio.sleep(pause)

  async def _attempt(self, replica: Replica, call: _Call, left: float) -> Any:
    """One attempt; requests the identity of an unknown replica first."""
    end = self._clock() + min(self.timeout_s, left)
    silent = False
    if not replica.known and call is not _HEALTH:
      try:
        said = await self._once(replica, _HEALTH, left)
        # A server of ours hides its identity from clients without its token;
        # it will refuse the query.
        silent = 'version' in said and 'identity' not in said
      except RetrievalError as error:
        # /health is not part of Search-R1's protocol, and others have another.
        # Beside a server that says what it serves, a bad answer may pass.
        other = error.kind == 'bad_response' and not self._replicas.served
        if not other and error.kind != 'rejected':
          raise
        said = {}
      if not silent:
        self._learn(replica, said.get('identity'))
      left = end - self._clock()
    answer = await self._once(replica, call, left)
    if silent:
      self._learn(replica, None)
    elif call is _HEALTH and 'identity' in answer:
      self._replicas.learn(replica, answer['identity'])
    return answer

  def _learn(self, replica: Replica, identity: Any) -> None:
    self._replicas.learn(replica, identity)
    replica.require_same_corpus(_HEALTH.path)

  async def _once(self, replica: Replica, call: _Call, left: float) -> Any:
    url = replica.url + call.path
    limit = max(0.001, min(self.timeout_s, left))
    waits = {'X-Deadline-Ms': str(math.ceil(min(limit, 900_000) * 1000))}
    options = {'content': call.content, 'headers': self._headers | waits}
    try:
      async with asyncio.timeout(limit):
        response = await self._pool().request(call.method, url, **options)
    except proxies.ProxyError as error:
      fix = 'A server on this machine needs no proxy.'
      raise RetrievalError('unreachable', url, str(error), fix=fix) from None
    except TimeoutError as error:
      said = f'no answer within {limit:.3g} s{proxies.via(url)}'
      raise Failure('timeout', said) from error
    except httpx.DecodingError as error:
      problem = f'an undecodable answer ({error})'
      raise RetrievalError('bad_response', url, problem) from error
    except httpx.TransportError as error:
      # Refused, reset, or closed during the answer. A search changes nothing,
      # so it can be repeated.
      said = f'{type(error).__name__} {error}'.rstrip() + proxies.via(url)
      raise Failure('unreachable', said) from error
    status, headers = response.status_code, response.headers
    if (found := headers.get(IDENTITY_HEADER)) is not None:
      self._replicas.compare(replica, found)
      replica.require_same_corpus(call.path)
    proxy = proxies.via(url) if status != 200 else ''
    problem = f'HTTP {status} {_excerpt(response)}{proxy}'
    queries = _failed_queries(response) if status in (502, 503) else ()
    if queries and status == 502:
      raise RetrievalError('search_failed', url, problem, queries=queries)
    if status in _RETRIED:
      wait = retry_after(headers.get('Retry-After', ''))
      raise Failure(_RETRIED[status], problem, wait, queries)
    if status != 200:
      # Another status says that this is no server of the protocol.
      refused = _REFUSED if call.path == '/retrieve' else range(400, 500)
      kind = 'rejected' if status in refused else 'bad_response'
      kind = 'unauthorised' if status in (401, 403) else kind
      raise RetrievalError(kind, url, problem, fix=_FIX.get(status, ''))
    try:
      return call.read(json.loads(response.content.decode('utf-8')))
    except (ValueError, RecursionError) as error:
      problem = f'{error} ({_excerpt(response)})'
      fix = "Its answers must be of Search-R1's protocol: retrieval/README.md."
      raise RetrievalError('bad_response', url, problem, fix=fix) from error


def _object(data: Any) -> Mapping[str, Any]:
  if not isinstance(data, dict):
    raise ValueError('the answer is not a JSON object')
  return data


_HEALTH = _Call('GET', '/health', _object)


def _piece(data: Any) -> tuple[str, int] | None:
  found = _object(data).get('result', {})
  if found is None:
    return None
  text, pieces = (_object(found).get(n) for n in ('contents', 'pieces'))
  if not isinstance(text, str) or type(pieces) is not int:
    raise ValueError("the answer has no 'contents' and 'pieces'")
  return text, pieces


def _hits(count: int, k: int, data: Any) -> list[list[Hit]]:
  """Checks an answer; incomplete passages are refused."""
  result = data.get('result') if isinstance(data, dict) else None
  if not isinstance(result, list):
    raise ValueError("the answer has no list 'result'")
  if len(result) != count:
    raise ValueError(f'{len(result)} results for {count} queries')
  for i, row in enumerate(result):
    if not isinstance(row, list):
      raise ValueError(f'result[{i}] is not a list of passages')
  return [
    # Some servers do not read `topk`; the best come first.
    [_hit(item, f'result[{i}][{j}]') for j, item in enumerate(row[:k])]
    for i, row in enumerate(result)
  ]


def _hit(item: Any, where: str) -> Hit:
  """Checks a passage.

  Servers of others leave out the document around it, its score or its id, which
  is then a hash, name its text or id otherwise, or have its title beside it.
  """
  fields = item if isinstance(item, dict) else {'document': item}
  document = fields.get('document', item)
  if isinstance(document, str):
    document = {'contents': document}
  contents = _contents(document, where)
  given = (document.get(field) for field in _IDS)
  name = next((value for value in given if value not in (None, '')), None)
  if name is None:
    digest = hashlib.sha256(contents.encode('utf-8', 'surrogatepass'))
    name = f'sha256:{digest.hexdigest()[:16]}'
  if type(name) is int:
    name = str(name)
  if not isinstance(name, str):
    raise ValueError(f"{where}: 'id' is neither a string nor an integer")
  parts, score = split_contents(contents), _score(fields.get('score'), where)
  return Hit(name, contents, *parts, score)


def _contents(document: Any, where: str) -> str:
  """`"Title"\\ntext` of a document."""
  fields = document if isinstance(document, dict) else {}
  texts = [fields[n] for n in _TEXTS if isinstance(fields.get(n), str)]
  if not texts:
    listed = shown(', '.join(map(repr, fields)) or 'no field')
    wanted = ', '.join(map(repr, _TEXTS))
    raise ValueError(f'{where} has no text in {wanted}; it has {listed}')
  title, text = fields.get('title'), next(filter(str.strip, texts), texts[0])
  if title is None:
    return text
  if type(title) not in (str, int):
    raise ValueError(f"{where}: 'title' is no string")
  return titled(str(title), text)


def _score(value: Any, where: str) -> float | None:
  try:
    score = None if isinstance(value, bool) else float(value)
  except (TypeError, ValueError, OverflowError):  # absent, null, or text
    return None
  if score is not None and not math.isfinite(score):
    raise ValueError(f'{where}.score is not finite')
  return score


def _failed_queries(response: httpx.Response) -> tuple[int, ...]:
  """Positions of the queries that a server of ours could not answer."""
  try:
    problems = json.loads(response.content)['detail']
    failed = [p for p in problems if p['type'] == 'search_failed']
    return tuple(int(problem['loc'][2]) for problem in failed)
  except (ValueError, TypeError, LookupError, RecursionError):
    return ()  # the answer of a proxy or of another server


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


def _excerpt(response: httpx.Response, size: int = 200) -> str:
  text = ' '.join(response.content.decode('utf-8', 'replace').split())
  return repr(text if len(text) <= size else text[: size - 3] + '...')
