"""Puts the queries of many requests to one searcher, as few calls.

A searcher that fails fails the queries that it failed on and no others: what
it raises is answered in their place, named in the log, and it is asked again.
"""

import asyncio
import collections
import concurrent.futures
import dataclasses
import logging
import math
import secrets
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from retrieval import metrics
from retrieval.core import Found, Searcher, SearchFailed
from retrieval.protocol import Limits, Rejected

Answer = list[Found] | SearchFailed

_log = logging.getLogger(__name__)
# A call that raises is halved until the queries that bring it about stand
# alone. After so many the searcher itself is broken: halving on would only
# keep it from its next call.
_MOST_RAISES = 32


@dataclasses.dataclass
class Counters:
  requests: int = 0  # accepted
  queries: int = 0  # in them
  searched: int = 0  # asked of the searcher, duplicates once
  batches: int = 0
  errors: int = 0  # batches in which the searcher raised


class Batcher:
  """Puts the queries of many requests to the searcher as one call.

  The first request waits `batch_ms` for others; while the searcher works,
  those that arrive gather for the next call. A query that occurs twice in a
  batch is searched once. Requests of different k are different calls: an
  approximate index may find others when asked for more, and the answer to a
  request must not depend on what happened to travel with it.
  """

  def __init__(self, searcher: Searcher, limits: Limits):
    self.counters = Counters()
    self._searcher, self._limits = searcher, limits
    # (queries, k, future), in order of arrival.
    self._waiting: collections.OrderedDict = collections.OrderedDict()
    self._pending = 0
    self._arrived = asyncio.Event()
    # One thread: the searcher is at work on one batch at a time.
    self._thread = concurrent.futures.ThreadPoolExecutor(1, 'searcher')
    self._task: asyncio.Task | None = None

  @property
  def pending(self) -> int:
    """Queries taken and not yet answered."""
    return self._pending

  def start(self) -> None:
    self._task = asyncio.create_task(self._run())

  async def stop(self) -> None:
    """Ends what waits, then closes the searcher."""
    if self._task is not None:
      self._task.cancel()
      await asyncio.gather(self._task, return_exceptions=True)
    self._thread.submit(self._searcher.close)  # behind the search under way
    await asyncio.to_thread(self._thread.shutdown)

  async def call(self, function: Callable[[], Any]) -> Any:
    """Runs a function where the searcher runs, between two batches."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(self._thread, function)

  async def search(self, queries: Sequence[str], k: int) -> list[Answer]:
    """The answers, at most k passages each; cancelling leaves the queue.

    Raises:
      Rejected: too many queries wait already.
    """
    if self._pending + len(queries) > self._limits.max_pending:
      raise Rejected(
        503, 'pending', 'too many queries are waiting; try again', 1
      )
    future = asyncio.get_running_loop().create_future()
    self.counters.requests += 1
    self.counters.queries += len(queries)
    self._count(len(queries))
    self._waiting[id(future)] = (queries, k, future)
    self._arrived.set()
    try:
      return await future
    finally:
      if self._waiting.pop(id(future), None):
        self._count(-len(queries))

  async def _run(self) -> None:
    while True:
      await self._arrived.wait()
      await asyncio.sleep(self._limits.batch_ms / 1000)
      batch = self._take()
      if not self._waiting:
        self._arrived.clear()
      try:
        await self._answer(batch)
      finally:
        self._count(-sum(len(queries) for queries, _, _ in batch))

  def _take(self) -> list:
    """Whole requests, at most max_queries queries; one at the least.

    Without those whose client has gone; none if all have.
    """
    batch, size = [], 0
    for key, (queries, k, future) in list(self._waiting.items()):
      if future.done():
        continue  # its own task takes it out
      size += len(queries)
      if batch and size > self._limits.max_queries:
        break
      batch.append((queries, k, future))
      del self._waiting[key]
    return batch

  async def _answer(self, batch: list) -> None:
    for k in sorted({k for _, k, _ in batch}):
      same = [
        (queries, future) for queries, n, future in batch
        if n == k and not future.done()
      ]
      if not same:  # their clients went while another k was searched
        continue
      asked = list(dict.fromkeys(q for queries, _ in same for q in queries))
      self.counters.searched += len(asked)
      self.counters.batches += 1
      metrics.BATCH.observe(len(asked))
      found = await self.call(lambda: self._ask(asked, k))  # noqa: B023
      answers = dict(zip(asked, found, strict=True))
      for queries, future in same:
        if not future.done():  # the client may have gone
          future.set_result([answers[query] for query in queries])

  def _ask(self, queries: list[str], k: int) -> list[Answer]:
    answers: list[Answer] = []
    parts, raises, failed = [queries], 0, None
    while parts:
      part = parts.pop()
      try:
        answers += self._checked(part, k)
      # A panic of a Rust library is no Exception; no signal comes here.
      except BaseException as error:
        raises += 1
        failed = failed or self._report(error)
        half = len(part) // 2
        if half and raises < _MOST_RAISES:
          parts += [part[half:], part[:half]]
        else:
          answers += [failed] * len(part)
    return answers

  def _checked(self, queries: list[str], k: int) -> list[Answer]:
    with metrics.stage('batch'):
      answers = self._searcher.search(queries, k)
    if len(answers) != len(queries):
      raise ValueError(f'{len(answers)} answers to {len(queries)} queries')
    for answer in answers:
      if not isinstance(answer, SearchFailed) and not all(
        math.isfinite(found.score) for found in answer
      ):
        raise ValueError('a score that is not finite')
    return answers

  def _report(self, error: BaseException) -> SearchFailed:
    """What is answered in its place; the rest is for the log alone."""
    self.counters.errors += 1
    name = secrets.token_hex(4)
    text = ''.join(traceback.format_exception(error))
    # A query may stand in it: no escape sequence reaches a terminal.
    shown = ''.join(c if c.isprintable() or c == '\n' else '?' for c in text)
    _log.error('search failed (error %s)\n%s', name, shown)
    return SearchFailed(
      f'the search failed (error {name}; the log of the server says why)', 1.0
    )

  def _count(self, queries: int) -> None:
    self._pending += queries
    metrics.PENDING.set(self._pending)
