"""A retrieval server as a source, with batched queries.

Queries that arrive within `batch_ms` of the first are sent in one request,
equal ones once. The client has deadlines, retries and typed errors.
"""

import asyncio
from collections.abc import Mapping, Sequence
import dataclasses
import logging
import time
import weakref

from ml_collections import ConfigDict

from retrieval.client import Hit, RetrievalClient, RetrievalError
from searchrl_jax.run import lookup
from searchrl_jax.sources.core import SourceError
from searchrl_jax.types import Passage, SearchError, SearchRequest, SearchResult

_log = logging.getLogger(__name__)
# Errors that one query can cause for its whole batch (too long for the server,
# or one that it cannot process), so the batch is split and sent again. Other
# errors concern the state of the server, and splitting would add load.
_SPLIT = ('rejected', 'bad_response')


@dataclasses.dataclass
class _Queue:
  """The queries of one event loop."""

  waiting: list[tuple[SearchRequest, asyncio.Future]]
  tasks: set[asyncio.Task]  # strong references; a loop has only weak ones


class ServiceSource:
  """Gets passages from a retrieval server (protocol: retrieval/README.md).

  Works in one event loop after another (`asyncio.run` for each step).
  """

  def __init__(self, config: ConfigDict):
    """Sends no request yet.

    Args:
      config: config.source: url (or several, separated by commas, of servers
        with the same index), timeout and deadline in seconds, attempts,
        batch_ms. The token is the variable RETRIEVAL_TOKEN, because configs are
        stored.

    Raises:
      ValueError: a URL is not http(s)://host, or attempts < 1.
    """
    lookup.require(
      config.attempts >= 1,
      f'config.source.attempts={config.attempts} must be at least 1',
    )
    self._client = RetrievalClient(
      config.url,
      timeout_s=config.timeout,
      deadline_s=config.deadline,
      retries=config.attempts - 1,
    )
    self._batch_s = config.batch_ms / 1000
    self._queues: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
    self.queries = 0  # queries to this source
    self.sent = 0  # queries to the server, equal ones of a batch once
    self.batches = 0  # HTTP requests, without retries

  @property
  def url(self) -> str:
    return self._client.url

  async def search(
    self, requests: Sequence[SearchRequest]
  ) -> list[SearchResult | SearchError]:
    """Returns one answer per request, in order; does not raise for a query."""
    if not requests:
      return []
    loop = asyncio.get_running_loop()
    queue = self._queues.setdefault(loop, _Queue([], set()))
    if not queue.waiting:
      loop.call_later(self._batch_s, self._flush, queue)
    begin = time.monotonic()
    futures = [loop.create_future() for _ in requests]
    queue.waiting.extend(zip(requests, futures, strict=True))
    self.queries += len(requests)
    answers = await asyncio.gather(*futures)
    seconds = time.monotonic() - begin
    return [
      SearchError(request, answer.kind, str(answer))
      if isinstance(answer, RetrievalError)
      else SearchResult(request, tuple(map(_passage, answer)), seconds)
      for request, answer in zip(requests, answers, strict=True)
    ]

  async def check(self) -> Mapping[str, object]:
    """Returns the health of the server, or of the first that answers.

    A server without /health (Search-R1's) gets a query instead.

    Raises:
      SourceError: there is no server, it does not implement the protocol, or
        several servers do not serve the same.
    """
    urls = self._client.urls
    answers = await asyncio.gather(*map(self._check, urls))
    good = {}
    for url, answer in zip(urls, answers, strict=True):
      if isinstance(answer, RetrievalError):
        _log.warning('continues without a replica: %s', answer)
      else:
        good[url] = answer
    if not good:
      raise SourceError(f'config.source.url: {answers[0]}') from answers[0]
    served = {url: answer.get('identity') for url, answer in good.items()}
    first, *others = served
    for url in others:
      if served[url] != served[first]:
        raise SourceError(
          f'config.source.url: {first} and {url} do not serve the same: '
          f'{served[first]} and {served[url]}'
        )
    return good[first]

  async def _check(self, url: str) -> Mapping[str, object] | RetrievalError:
    health = {'url': url, 'health': 'no /health; /retrieve answers'}
    try:
      health = dict(await self._client.health(url))
      if 'identity' in health:
        return health
    except RetrievalError as error:
      if error.kind != 'rejected':
        return error
    # No identity: another implementation, or the token is missing.
    try:
      await self._client.retrieve(['health'], 1, url)
    except RetrievalError as error:
      return error
    return health

  async def close(self) -> None:
    """Cancels the requests and closes the connections of this event loop."""
    queue = self._queues.pop(asyncio.get_running_loop(), None)
    if queue is not None:
      tasks = list(queue.tasks)
      for task in tasks:
        task.cancel()
      await asyncio.gather(*tasks, return_exceptions=True)
      for _, future in queue.waiting:
        future.cancel()
    await self._client.close()

  def _flush(self, queue: _Queue) -> None:
    """Sends the waiting queries, in one request per number of passages."""
    waiting, queue.waiting = queue.waiting, []
    by_k: dict[int, dict[str, list[asyncio.Future]]] = {}
    for request, future in waiting:
      if not future.done():  # it is done if its trajectory was cancelled
        queries = by_k.setdefault(request.k, {})
        queries.setdefault(request.query, []).append(future)
    for k, queries in by_k.items():
      task = asyncio.get_running_loop().create_task(self._send(queries, k))
      queue.tasks.add(task)
      task.add_done_callback(queue.tasks.discard)

  async def _send(
    self, queries: dict[str, list[asyncio.Future]], k: int
  ) -> None:
    try:
      answers = await self._ask(list(queries), k)
    except asyncio.CancelledError:
      for future in _open(queries):
        future.cancel()
      raise
    except Exception as error:
      # Otherwise the waiting queries would never end.
      for future in _open(queries):
        future.set_exception(error)
      return
    for query, futures in queries.items():
      for future in futures:
        if not future.done():
          future.set_result(answers[query])

  async def _ask(
    self, queries: list[str], k: int
  ) -> dict[str, list[Hit] | RetrievalError]:
    self.batches += 1
    self.sent += len(queries)
    try:
      hits = await self._client.retrieve(queries, k)
      return dict(zip(queries, hits, strict=True))
    except RetrievalError as error:
      named = set(error.queries)
      rest = [query for i, query in enumerate(queries) if i not in named]
      if len(rest) < len(queries):  # the server names the queries that failed
        answers = await self._ask(rest, k) if rest else {}
        return dict.fromkeys(queries, error) | answers
      single = len(queries) == 1
      if single and error.kind == 'rejected' and await self._is_healthy(k):
        return {queries[0]: []}  # the server cannot process this query
      if single or error.kind not in _SPLIT:
        return dict.fromkeys(queries, error)
    half = len(queries) // 2
    first, second = await asyncio.gather(
      self._ask(queries[:half], k), self._ask(queries[half:], k)
    )
    return first | second

  async def _is_healthy(self, k: int) -> bool:
    """Whether the server answers a valid query."""
    try:
      return bool(await self._client.retrieve(['health'], k))
    except RetrievalError:
      return False


def make(config: ConfigDict, **_: object) -> ServiceSource:
  """The source of `config.source` (module='service')."""
  return ServiceSource(config)


def _open(queries: dict[str, list[asyncio.Future]]) -> list[asyncio.Future]:
  return [f for futures in queries.values() for f in futures if not f.done()]


def _passage(hit: Hit) -> Passage:
  return Passage(hit.id, hit.title, hit.text, hit.score)
