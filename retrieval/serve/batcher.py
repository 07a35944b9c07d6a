"""Batches the queries of many requests for one searcher.

An exception of the searcher fails only the queries that cause it. They are
answered with a failure, the log has the exception, and the search continues.
"""

import asyncio
from collections.abc import Callable, Sequence
import concurrent.futures
import contextlib
import dataclasses
import itertools
import logging
import math
import secrets
import time
import traceback
from typing import Any

from retrieval import files, metrics
from retrieval.core import Answer, Searcher, SearchFailed
from retrieval.serve.protocol import Limits, Rejected

_log = logging.getLogger(__name__)
# A call that raises is halved until the queries that cause it are alone. After
# so many exceptions in a row the searcher itself is broken, and halving would
# only delay other calls.
_MOST_RAISES = 32
_FIRST = 8  # queries of a call before the first measurement
_OVERHEAD = 4  # ratio of variable to fixed cost that is always allowed


@dataclasses.dataclass
class Counters:
  requests: int = 0  # accepted
  queries: int = 0  # in them
  searched: int = 0  # by the searcher, duplicates once
  batches: int = 0  # calls of the searcher
  errors: int = 0  # batches for which the searcher raised


class Pace:
  """Chooses the number of queries of one call of the searcher: `size`.

  A call cannot be stopped, so it is kept short. Its duration is modelled as
  a + b n seconds for n queries, fitted to the last calls, each of which has
  half the weight of the next. A call should take `piece_s`. If a alone is long
  (an exact pass over all vectors), smaller calls would only repeat it, so b n
  may be up to 4 a, which keeps at least 0.8 of the throughput.
  """

  def __init__(self, piece_s: float, most: int, clock: Callable[[], float]):
    self.size = min(_FIRST, most)
    self._piece_s, self._most, self._clock = piece_s, most, clock
    self._tried = self.size / 2  # the next call may have twice as many
    self._sums = (0.0,) * 5  # of 1, n, t, n n and n t

  @contextlib.contextmanager
  def timed(self, n: int, asked: Callable[[], int] | None = None):
    """Measures a call of n queries, unless it raises.

    Args:
      n: queries of the call.
      asked: returns, after the call, the number of queries that reached the
        index; recorded answers take no time.
    """
    begun = self._clock()
    yield
    t = self._clock() - begun
    n = n if asked is None else asked()
    if not n:
      return
    new = (1, n, t, n * n, n * t)
    self._sums = tuple(s / 2 + x for s, x in zip(self._sums, new))
    count, ns, ts, nn, nt = self._sums
    spread = count * nn - ns * ns
    known = spread > 1e-6 * nn
    each = (count * nt - ns * ts) / spread if known else ts / ns
    fixed = (ts - each * ns) / count
    if fixed < 0:
      fixed, each = 0.0, ts / ns
    self._tried = max(n, self._tried / 2)
    most = int(min(self._most, 2 * self._tried))
    room = max(self._piece_s - fixed, _OVERHEAD * fixed)
    # Calls of one query cannot separate a and b; then two are tried.
    fits = each * most <= room or n == 1 and not known
    self.size = most if fits else max(1, int(room / each))


class _Request:
  """A waiting request: its open queries, and the answers so far."""

  def __init__(self, queries: Sequence[str]):
    self.left, self.found = set(queries), {}
    self.future = asyncio.get_running_loop().create_future()

  def answer(self, query: str, answer: Answer) -> None:
    self.left.discard(query)
    self.found[query] = answer
    if not self.left and not self.future.done():
      self.future.set_result(None)


class Batcher:
  """Batches the queries of many requests for the searcher.

  The first request waits `batch_ms` for others; requests that arrive during a
  search wait for its end. A batch takes queries in the order of arrival from
  any number of requests; `Pace` chooses its size. A query of several requests
  is searched once; a query whose requests were all cancelled is not searched.
  Requests of different k are in different calls: an approximate index may find
  other passages for a larger k, and an answer must not depend on the other
  requests of its batch.
  """

  def __init__(
    self, searcher: Searcher, limits: Limits, clock=time.perf_counter
  ):
    self.counters = Counters()
    # A searcher that mostly waits gets single queries, from several threads.
    self._at_once = n = getattr(searcher, 'threads', 1)
    self._threads = concurrent.futures.ThreadPoolExecutor(n, 'searcher')
    most = limits.max_batch if n == 1 else 1
    self.pace = Pace(limits.piece_ms / 1000, most, clock)
    self._searcher, self._limits = searcher, limits
    # k -> query -> requests that wait for it.
    self._waiting: dict[int, dict[str, set[_Request]]] = {}
    self.pending = 0  # queries of waiting requests
    self._raises = 0  # since the last answer
    self._arrived = asyncio.Event()
    self._tasks: list[asyncio.Task] = []

  def start(self) -> None:
    for _ in range(self._at_once):
      self._tasks.append(asyncio.create_task(self._run()))

  async def stop(self) -> None:
    """Cancels waiting requests and closes the searcher."""
    for task in self._tasks:
      task.cancel()
    await asyncio.gather(*self._tasks, return_exceptions=True)
    await asyncio.to_thread(self._threads.shutdown)  # awaits running searches
    await asyncio.to_thread(self._searcher.close)

  async def call(self, function: Callable[[], Any]) -> Any:
    """Runs a function in a thread of the searcher, between two batches."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(self._threads, function)

  async def search(self, queries: Sequence[str], k: int) -> list[Answer]:
    """The answers, at most k passages each; may be cancelled.

    Raises:
      Rejected: too many queries wait already.
    """
    if self.pending + len(queries) > self._limits.max_pending:
      raise Rejected(503, 'pending', 'too many queries are waiting', 1)
    self.counters.requests += 1
    self.counters.queries += len(queries)
    if not queries:
      return []
    request, waiting = _Request(queries), self._waiting.setdefault(k, {})
    for query in queries:
      waiting.setdefault(query, set()).add(request)
    self._arrived.set()
    self._count(len(queries))
    try:
      await request.future
      return [request.found[query] for query in queries]
    finally:
      self._count(-len(queries))
      self._give_up(request, k)

  def _give_up(self, request: _Request, k: int) -> None:
    waiting = self._waiting.get(k, {})
    for query in request.left:
      if requests := waiting.get(query):
        requests.discard(request)
        if not requests:
          del waiting[query]
    if not waiting:
      self._waiting.pop(k, None)

  async def _run(self) -> None:
    while True:
      await self._arrived.wait()
      if self.pending < self.pace.size:  # others may fill the batch
        await asyncio.sleep(self._limits.batch_ms / 1000)
      if not self._waiting:
        self._arrived.clear()
        continue
      k = next(iter(self._waiting))
      waiting = self._waiting.pop(k)
      size = self.pace.size
      piece = [(q, waiting.pop(q)) for q in [*itertools.islice(waiting, size)]]
      if waiting:
        self._waiting[k] = waiting  # behind those of another k
      await self._answer(piece, k)

  async def _answer(self, piece: list[tuple], k: int) -> None:
    parts, failed = [piece], None
    while parts:
      there = lambda pair: not all(x.future.done() for x in pair[1])
      part = [*filter(there, parts.pop())]
      if not part:  # all clients disconnected
        continue
      asked = [query for query, _ in part]
      self.counters.searched += len(asked)
      self.counters.batches += 1
      metrics.BATCH.observe(len(asked))
      found = await self.call(lambda: self._ask(asked, k))  # noqa: B023
      raised = isinstance(found, BaseException)
      self._raises = self._raises + 1 if raised else 0
      if raised:
        failed = failed or self._report(found)
        half = len(part) // 2
        if half and self._raises < _MOST_RAISES:
          parts += [part[half:], part[:half]]
          continue
        found = [failed] * len(part)
      for (query, requests), answer in zip(part, found, strict=True):
        for request in requests:
          request.answer(query, answer)

  def _ask(self, queries: list[str], k: int) -> list[Answer] | BaseException:
    count = len(queries)
    asked = lambda: getattr(self._searcher, 'asked', count)
    timed = self.pace.timed(count, asked)
    try:
      with metrics.stage('batch'), timed:
        answers = self._searcher.search(queries, k)
      if len(answers) != count:
        raise ValueError(f'{len(answers)} answers to {count} queries')
      lists = [x for x in answers if not isinstance(x, SearchFailed)]
      if not all(math.isfinite(found.score) for x in lists for found in x):
        raise ValueError('a score that is not finite')
      return answers
    # A panic of a Rust library is not an Exception; threads get no signals.
    except BaseException as error:
      return error

  def _report(self, error: BaseException) -> SearchFailed:
    """Logs an exception and returns the failure for the client."""
    self.counters.errors += 1
    name = secrets.token_hex(4)
    text = files.printable(''.join(traceback.format_exception(error)))
    _log.error('search failed (error %s)\n%s', name, text)
    cause = f'error {name}; see the log of the server'
    return SearchFailed(f'the search failed ({cause})', 1.0)

  def _count(self, queries: int) -> None:
    self.pending += queries
    metrics.PENDING.set(self.pending)
