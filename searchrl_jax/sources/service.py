"""A retrieval server as a source, with batched queries.

Queries that arrive within `batch_ms` of the first are sent in one request,
equal ones once. The client has deadlines, retries and typed errors.
"""

import asyncio
import collections
from collections.abc import Mapping, Sequence
import logging
import time

from ml_collections import ConfigDict

from retrieval.client import RetrievalClient, RetrievalError
from searchrl_jax.sources.core import Answer, SourceError
from searchrl_jax.types import Passage, SearchError, SearchRequest, SearchResult

_log = logging.getLogger(__name__)
# Errors that one query can cause for its whole batch (too long for the server,
# or one that it cannot process), so the batch is split and sent again. Other
# errors concern the state of the server, and splitting would add load.
_SPLIT = ('rejected', 'bad_response')


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
      ValueError: a URL is not http(s)://host.
    """
    seconds = dict(timeout_s=config.timeout, deadline_s=config.deadline)
    retries = config.attempts - 1
    self._client = RetrievalClient(config.url, retries=retries, **seconds)
    self._batch_s = config.batch_ms / 1000
    # k -> queries and how many wait for each, and the task that will send them.
    self._batches: dict[int, tuple[collections.Counter, asyncio.Task]] = {}
    self._tasks: set[asyncio.Task] = set()  # a loop has weak references

  async def search(self, requests: Sequence[SearchRequest]) -> list[Answer]:
    """Returns one answer per request, in order; does not raise for a query."""
    begin = time.monotonic()
    for k in {request.k for request in requests} - self._batches.keys():
      queries: collections.Counter[str] = collections.Counter()
      task = asyncio.create_task(self._send(k, queries))
      self._batches[k] = queries, task
      self._tasks.add(task)
      task.add_done_callback(self._tasks.discard)
    asked = [(request, *self._batches[request.k]) for request in requests]
    for request, queries, _ in asked:
      queries[request.query] += 1
    try:
      answers = [
        (request, (await asyncio.shield(task))[request.query])
        for request, _, task in asked
      ]
    except asyncio.CancelledError:
      for request, queries, _ in asked:
        queries[request.query] -= 1
      raise
    seconds = time.monotonic() - begin
    return [
      SearchError(request, answer.kind, str(answer))
      if isinstance(answer, RetrievalError)
      else SearchResult(request, answer, seconds)
      for request, answer in answers
    ]

  async def check(self) -> Mapping[str, object]:
    """Returns the health of the server, or of the first that answers.

    A server without /health (Search-R1's), or with one of another form, gets a
    query instead.

    Raises:
      SourceError: there is no server, it does not implement the protocol, or
        several servers do not serve the same.
    """
    urls = self._client.urls
    answers = await asyncio.gather(*map(self._check, urls))
    failed = [a for a in answers if isinstance(a, RetrievalError)]
    good = {u: a for u, a in zip(urls, answers) if a not in failed}
    if not good:
      raise SourceError(f'config.source.url: {failed[0]}') from failed[0]
    for error in failed:
      _log.warning('continues without a replica: %s', error)
    served = {url: answer.get('identity') for url, answer in good.items()}
    first = next(iter(good.values()))
    if any(identity != first.get('identity') for identity in served.values()):
      raise SourceError(f'config.source.url: do not serve the same: {served}')
    return first

  async def _check(self, url: str) -> Mapping[str, object] | RetrievalError:
    health = {'url': url, 'health': 'no /health; /retrieve answers'}
    try:
      try:
        health = dict(await self._client.health(url))
      except RetrievalError as error:
        if error.kind not in ('rejected', 'bad_response'):
          raise
      if 'identity' not in health:  # another server, or the token is missing
        await self._client.retrieve(['health'], 1, url)
      return health
    except RetrievalError as error:
      return error

  async def close(self) -> None:
    """Cancels the requests and closes the connections of this event loop."""
    for task in self._tasks:
      task.cancel()
    await asyncio.gather(*self._tasks, return_exceptions=True)
    await self._client.close()

  async def _send(self, k: int, queries: collections.Counter):
    try:
      await asyncio.sleep(self._batch_s)
    finally:
      del self._batches[k]
    return await self._ask([*+queries], k)  # those that somebody waits for

  async def _ask(self, queries: list[str], k: int) -> dict:
    """Query -> a tuple of passages, or a RetrievalError."""
    try:
      found = await self._client.retrieve(queries, k)
      return {
        query: tuple(Passage(h.id, h.title, h.text, h.score) for h in hits)
        for query, hits in zip(queries, found, strict=True)
      }
    except RetrievalError as error:
      named = set(error.queries)
      rest = [query for i, query in enumerate(queries) if i not in named]
      if len(rest) < len(queries):  # the server names the queries that failed
        answers = await self._ask(rest, k) if rest else {}
        return dict.fromkeys(queries, error) | answers
      single = len(queries) == 1
      if single and error.kind == 'rejected':
        if await self._is_healthy(k, error.url.removesuffix('/retrieve')):
          return {queries[0]: ()}  # the server cannot process this query
      if single or error.kind not in _SPLIT:
        return dict.fromkeys(queries, error)
    half = len(queries) // 2
    first, second = await asyncio.gather(
      self._ask(queries[:half], k), self._ask(queries[half:], k)
    )
    return first | second

  async def _is_healthy(self, k: int, url: str) -> bool:
    """Whether this server answers a valid query."""
    try:
      return bool(await self._client.retrieve(['health'], k, url))
    except RetrievalError:
      return False


def make(config: ConfigDict, **_: object) -> ServiceSource:
  """The source of `config.source` (module='service')."""
  return ServiceSource(config)
