"""A retrieval server as a source: queries of many trajectories, one request.

Queries that arrive within `batch_ms` of the first travel together, equal ones
once. The client underneath has deadlines, retries and typed errors.
"""

import asyncio
from collections.abc import Mapping, Sequence
import dataclasses
import logging
import time
import weakref

from ml_collections import ConfigDict

from retrieval.client import Hit, RetrievalClient, RetrievalError
from searchrl_jax.sources.core import SourceError
from searchrl_jax.types import Passage, SearchError, SearchRequest, SearchResult

_log = logging.getLogger(__name__)
# Errors that one query can bring upon those it travels with (too long for the
# server, or one that trips it), so the batch is halved and asked again. The
# others are the server's state: halving would only add to its load.
_HALVED = ('rejected', 'bad_response')


@dataclasses.dataclass
class _Queue:
  """What waits in one event loop."""

  waiting: list[tuple[SearchRequest, asyncio.Future]]
  tasks: set[asyncio.Task]  # requests under way: a loop keeps weak ones only


class ServiceSource:
  """Passages of a retrieval server (retrieval/README.md has the protocol).

  One source serves several event loops in turn (`asyncio.run` for each step).
  """

  def __init__(self, config: ConfigDict):
    """Makes a source; nothing is sent yet.

    Args:
      config: config.source: url (several, of servers that serve the same,
        are separated by commas), timeout and deadline in seconds, attempts,
        batch_ms. A token is no field, since configs are kept: it is
        RETRIEVAL_TOKEN of the environment.

    Raises:
      ValueError: a URL is not http(s)://host, or there are no attempts.
    """
    if config.attempts < 1:
      raise ValueError(
        f'config.source.attempts={config.attempts}: at least 1 is needed'
      )
    self._client = RetrievalClient(
      config.url,
      timeout_s=config.timeout,
      deadline_s=config.deadline,
      retries=config.attempts - 1,
    )
    self._batch_s = config.batch_ms / 1000
    self._queues: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
    self.queries = 0  # asked of this source
    self.sent = 0  # queries sent, equal ones of a batch once
    self.batches = 0  # HTTP requests, the client's repetitions not counted

  @property
  def url(self) -> str:
    return self._client.url

  async def search(
    self, requests: Sequence[SearchRequest]
  ) -> list[SearchResult | SearchError]:
    """One answer for each request, in order; never raises for a query."""
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
    """What the server says of itself; of several, one that answers.

    A server of the protocol without /health (Search-R1's own) is asked one
    query instead.

    Raises:
      SourceError: no server there, or not one that speaks the protocol; or
        several that do not serve the same.
    """
    found = await asyncio.gather(*map(self._check, self._client.urls))
    good = {
      url: answer
      for url, answer in zip(self._client.urls, found, strict=True)
      if not isinstance(answer, RetrievalError)
    }
    if not good:
      raise SourceError(f'config.source.url: {found[0]}') from found[0]
    for error in found:
      if isinstance(error, RetrievalError):
        _log.warning('goes on without a replica: %s', error)
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
    said = {'url': url, 'health': 'no /health; /retrieve answers'}
    try:
      said = dict(await self._client.health(url))
    except RetrievalError as error:
      if error.kind != 'rejected':
        return error
    if 'identity' in said:
      return said
    # A server that does not say who it is: none of ours, or the token lacks.
    try:
      await self._client.retrieve(['health'], 1, url)
    except RetrievalError as error:
      return error
    return said

  async def close(self) -> None:
    """Ends what is under way in this event loop and its connections."""
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
    """Sends what waits: one request for each number of passages asked."""
    waiting, queue.waiting = queue.waiting, []
    by_k: dict[int, dict[str, list[asyncio.Future]]] = {}
    for request, future in waiting:
      if not future.done():  # done: its trajectory was cancelled meanwhile
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
      # Whoever waits must hear of it, or would wait for ever.
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
      if len(rest) < len(queries):  # the server says which it failed on
        answers = await self._ask(rest, k) if rest else {}
        return dict.fromkeys(queries, error) | answers
      if (
        error.kind == 'rejected' and len(queries) == 1 and (await self._well(k))
      ):
        return {queries[0]: []}  # it is the query that cannot be asked
      if len(queries) == 1 or error.kind not in _HALVED:
        return dict.fromkeys(queries, error)
    half = len(queries) // 2
    first, second = await asyncio.gather(
      self._ask(queries[:half], k), self._ask(queries[half:], k)
    )
    return first | second

  async def _well(self, k: int) -> bool:
    """Whether the server answers a query that nothing is wrong with."""
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
