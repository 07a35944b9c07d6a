"""Puts the queries of many requests to one searcher, a piece at a time.

A searcher that fails fails the queries that it failed on and no others: what
it raises is answered in their place, named in the log, and it is asked again.
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

from retrieval import metrics
from retrieval.core import Found, Searcher, SearchFailed
from retrieval.protocol import Limits, Rejected

Answer = list[Found] | SearchFailed

_log = logging.getLogger(__name__)
# A call that raises is halved until the queries that bring it about stand
# alone. After so many raises without an answer in between the searcher itself
# is broken: halving on would only keep it from its next call.
_MOST_RAISES = 32
_FIRST = 8  # queries of a call before any was measured
_OVERHEAD = 4  # a call may take this many times its fixed cost


@dataclasses.dataclass
class Counters:
  requests: int = 0  # accepted
  queries: int = 0  # in them
  searched: int = 0  # asked of the searcher, duplicates once
  batches: int = 0  # calls of the searcher
  errors: int = 0  # pieces for which the searcher raised


class Pace:
  """How many queries one call of the searcher gets: `size`.

  A call cannot be stopped, so it is kept short. Calls of n queries are taken
  to cost a + b n seconds, fitted to the last ones, each of which counts half
  as much as the next. A call should last `piece_s`; where a alone takes long
  (an exact pass over all vectors), smaller pieces would repeat it for
  nothing, so b n may come to 4 a: at least 0.8 of the throughput stays.
  """

  def __init__(self, piece_s: float, most: int, clock: Callable[[], float]):
    self.size = min(_FIRST, most)
    self._piece_s, self._most, self._clock = piece_s, most, clock
    self._tried = self.size / 2  # twice as many may be next
    self._sums = (0.0,) * 5  # of 1, n, t, n n and n t

  @contextlib.contextmanager
  def timed(self, n: int, asked: Callable[[], int] | None = None):
    """Learns from a call of n queries, unless it raises.

    Args:
      n: of the call.
      asked: how many of them went to the index, known after the call; a store
        of answers takes no time for the rest.
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
    # Calls of one query alone do not tell a from b; then two are tried.
    fits = each * most <= room or n == 1 and not known
    self.size = most if fits else max(1, int(room / each))


class _Request:
  """A request that waits: queries without an answer, and the answers."""

  def __init__(self, queries: Sequence[str]):
    self.left, self.found = set(queries), {}
    self.future = asyncio.get_running_loop().create_future()

  def answer(self, query: str, answer: Answer) -> None:
    self.left.discard(query)
    self.found[query] = answer
    if not self.left and not self.future.done():
      self.future.set_result(None)


class Batcher:
  """Puts the queries of many requests to the searcher, in pieces.

  The first request waits `batch_ms` for others; while the searcher works,
  those that arrive gather. A piece takes queries in the order of arrival, of
  any number of requests; see `Pace` for how many. A query that several
  requests wait for is searched once, one whose requests were all given up is
  not. Requests of different k are different calls: an approximate index may
  find others when asked for more, and the answer to a request must not depend
  on what happened to travel with it.
  """

  def __init__(
    self,
    searcher: Searcher,
    limits: Limits,
    clock: Callable[[], float] = time.perf_counter,
  ):
    self.counters = Counters()
    # One that mostly waits is asked query by query, by several threads.
    self._at_once = n = getattr(searcher, 'threads', 1)
    self._threads = concurrent.futures.ThreadPoolExecutor(n, 'searcher')
    most = limits.max_batch if n == 1 else 1
    self.pace = Pace(limits.piece_ms / 1000, most, clock)
    self._searcher, self._limits = searcher, limits
    # k -> query -> requests that wait for it.
    self._waiting: dict[int, dict[str, set[_Request]]] = {}
    self.pending = 0  # queries of requests that wait
    self._raises = 0  # since the last answer
    self._arrived = asyncio.Event()
    self._tasks: list[asyncio.Task] = []

  def start(self) -> None:
    runs = [self._run() for _ in range(self._at_once)]
    self._tasks = [asyncio.create_task(run) for run in runs]

  async def stop(self) -> None:
    """Ends what waits, then closes the searcher."""
    for task in self._tasks:
      task.cancel()
    await asyncio.gather(*self._tasks, return_exceptions=True)
    await asyncio.to_thread(self._threads.shutdown)  # ends what is searched
    await asyncio.to_thread(self._searcher.close)

  async def call(self, function: Callable[[], Any]) -> Any:
    """Runs a function where the searcher runs, between two pieces."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(self._threads, function)

  async def search(self, queries: Sequence[str], k: int) -> list[Answer]:
    """The answers, at most k passages each; cancelling leaves the queue.

    Raises:
      Rejected: too many queries wait already.
    """
    if self.pending + len(queries) > self._limits.max_pending:
      raise Rejected(
        503, 'pending', 'too many queries are waiting; try again', 1
      )
    self.counters.requests += 1
    self.counters.queries += len(queries)
    if not queries:
      return []
    request = _Request(queries)
    for query in dict.fromkeys(queries):
      waiting = self._waiting.setdefault(k, {})
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
      if self.pending < self.pace.size:  # others may fill the piece
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

  async def _answer(
    self, piece: list[tuple[str, set[_Request]]], k: int
  ) -> None:
    parts, failed = [piece], None
    while parts:
      part = [
        (query, requests)
        for query, requests in parts.pop()
        if not all(request.future.done() for request in requests)
      ]
      if not part:  # their clients have gone
        continue
      asked = [query for query, _ in part]
      self.counters.searched += len(asked)
      self.counters.batches += 1
      metrics.BATCH.observe(len(asked))
      found = await self.call(lambda: self._ask(asked, k))  # noqa: B023
      if isinstance(found, BaseException):
        self._raises += 1
        failed = failed or self._report(found)
        half = len(part) // 2
        if half and self._raises < _MOST_RAISES:
          parts += [part[half:], part[:half]]
          continue
        found = [failed] * len(part)
      else:
        self._raises = 0
      for (query, requests), answer in zip(part, found, strict=True):
        for request in requests:
          request.answer(query, answer)

  def _ask(self, queries: list[str], k: int) -> list[Answer] | BaseException:
    try:
      count = len(queries)
      with (
        metrics.stage('batch'),
        self.pace.timed(count, lambda: getattr(self._searcher, 'asked', count)),
      ):
        answers = self._searcher.search(queries, k)
      if len(answers) != len(queries):
        raise ValueError(f'{len(answers)} answers to {len(queries)} queries')
      for answer in answers:
        if not isinstance(answer, SearchFailed) and not all(
          math.isfinite(found.score) for found in answer
        ):
          raise ValueError('a score that is not finite')
      return answers
    # A panic of a Rust library is no Exception; no signal comes here.
    except BaseException as error:
      return error

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
    self.pending += queries
    metrics.PENDING.set(self.pending)
