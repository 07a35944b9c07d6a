"""Servers that serve the same, and what is known of their health.

A replica that failed several times in a row is left alone for a while (its
circuit is open), then one request probes it (Nygard, Release It!, 2007).

A server may come back with another corpus or index, and its answers would look
as good as any. So a replica that was away, or was never asked, says first what
it serves (the identity in its /health), and each answer has a hash of that in
its head, for one that was replaced while nobody asked; what differs from what
the first one serves is not asked again.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
import dataclasses
import logging
import math
import random
from typing import Any
import urllib.parse

from retrieval import files
from retrieval.core import identity_hash

_log = logging.getLogger(__name__)

KINDS = (
  'unreachable',
  'timeout',
  'overloaded',
  'bad_response',
  'rejected',
  'unauthorised',
  'search_failed',
  'different',
)
# Of a replica that answers, but not as its like should.
BROKEN = ('bad_response', 'unauthorised', 'different')
_MEND = {
  'unreachable': (
    'Start it (python -m retrieval.server --corpus=...) or correct the URL; '
    'RETRIEVAL_CA_FILE names the certificate of an https server of your own.'
  ),
  'timeout': 'See whether the server is overloaded, or raise timeout_s.',
  'overloaded': 'Send fewer requests at once, or raise deadline_s.',
  'bad_response': 'See that the URL is a retrieval server, and its log.',
  'rejected': 'Correct the request, or raise the limit that it names.',
  'unauthorised': 'Set RETRIEVAL_TOKEN to the token of the server.',
  'search_failed': 'The server is well; it has no answer to these queries.',
  'different': 'Serve the corpus and index of before, and start again.',
}


class RetrievalError(RuntimeError):
  """A request that got no usable answer.

  Attributes:
    kind: one of `KINDS`. The first three were tried again, the others not,
      since the same request would fare the same.
    url: what was asked last.
    attempts: how often.
    queries: positions of the queries that the server failed on, where it said
      so: the others are worth asking without them.
  """

  def __init__(
    self,
    kind: str,
    url: str,
    problem: str,
    attempts: int = 1,
    queries: Sequence[int] = (),
  ):
    tried = f' after {attempts} attempts' if attempts > 1 else ''
    super().__init__(f'{url}: {problem}{tried} [{kind}]. {_MEND[kind]}')
    self.kind, self.url, self.attempts = kind, url, attempts
    self.problem = problem
    self.queries = tuple(queries)


class Failure(Exception):
  """One attempt that may be repeated."""

  def __init__(
    self,
    kind: str,
    problem: str,
    wait_s: float = 0.0,
    queries: Sequence[int] = (),
  ):
    super().__init__(problem)
    self.kind, self.problem, self.wait_s = kind, problem, wait_s
    self.queries = queries


@dataclasses.dataclass(eq=False)
class Replica:
  """A server and what is known of its health."""

  url: str
  in_flight: int = 0
  failures: int = 0  # in a row
  open_until: float = -math.inf  # left alone until then
  probing: bool = False
  busy_until: float = -math.inf  # as its Retry-After said
  problem: Failure | None = None  # the last
  known: bool = False  # it serves what it should
  differs: str = ''  # how, of one that does not: it is left out for good


class Replicas:
  """Chooses whom to ask, and learns from what came of it."""

  def __init__(
    self,
    urls: Sequence[str],
    *,
    failures: int,
    cooldown_s: float,
    rng: random.Random,
    clock: Callable[[], float],
  ):
    """See `RetrievalClient` for the arguments.

    Raises:
      ValueError: no URL, or one that is not http(s)://host.
    """
    if not urls:
      raise ValueError('no url is given: give http://host:port')
    # Of one alone there is nothing that it could differ from, at first.
    self.all = [Replica(_checked_url(u), known=len(urls) == 1) for u in urls]
    self._served: tuple[str, Any] | None = None  # by whom, and its identity
    self._hash: tuple[str, str] | None = None  # likewise, of an identity
    self._failures, self._cooldown_s = failures, cooldown_s
    self._random, self._clock, self._turn = rng, clock, 0

  async def choose(
    self,
    replicas: Sequence[Replica],
    last: Replica | None,
    end: float,
    path: str,
    attempts: int,
  ) -> tuple[Replica, bool]:
    """A replica to ask, and whether that is a probe: else the least busy.

    A replica that is not known is probed like one whose circuit was open.

    Where all circuits are open it waits for the first probe: a server that is
    started again within the deadline then costs time, while an error at once
    would cost whoever asks its trajectory. Waiting is no attempt.

    Raises:
      RetrievalError: the deadline would pass in waiting, or none is left that
        serves what it should.
    """

    def cost(r: Replica) -> tuple[bool, bool, int]:
      return r.busy_until > self._clock(), r is last, r.in_flight

    while True:
      now = self._clock()
      alike = [r for r in replicas if not r.differs]
      if not alike:
        raise RetrievalError(
          'different', replicas[-1].url + path, replicas[-1].differs
        )
      closed = [r for r in alike if r.known and r.failures < self._failures]
      ready = [
        r
        for r in alike
        if r not in closed and not r.probing and r.open_until <= now
      ]
      if ready:
        r = min(ready, key=cost)
        # One that is busy or failed just now waits while another may be well.
        others = closed or any(other.probing for other in alike)
        if not (others and any(cost(r)[:2])):
          r.probing = True
          return r, True
      if closed:
        self._turn += 1  # equally busy ones take turns
        turn = self._turn % len(closed)
        return min(closed[turn:] + closed[:turn], key=cost), False
      first = min(alike, key=lambda r: r.open_until)
      # Spread out: those who waited do not come back all at once.
      pause = max(0.0, first.open_until - now) + self._random.uniform(0.01, 0.2)
      if now + pause >= end:
        problem = first.problem or Failure(
          'timeout', 'another request still asks what it serves'
        )
        raise RetrievalError(
          problem.kind,
          first.url + path,
          f'{problem.problem}; it failed {first.failures} times in a row and '
          'is left alone for a while',
          max(attempts, 1),
        ) from problem
      await asyncio.sleep(pause)

  async def watch(
    self, replica: Replica, probe: bool, attempt: Coroutine, whole: bool
  ) -> Any:
    """The result of an attempt, of which the replica's circuit learns.

    whole: the attempt has its full time; else its timeout says little.
    """
    replica.in_flight += 1
    try:
      answer = await attempt
    except Failure as failure:
      replica.busy_until = self._clock() + failure.wait_s
      if failure.kind == 'overloaded':
        replica.failures = 0  # it answered
      elif failure.kind != 'timeout' or whole:
        self._failed(replica, probe, failure)
      raise
    except RetrievalError as error:
      # One alone goes on: it may be the query that it cannot answer.
      if error.kind in BROKEN and len(self.all) > 1:
        self._failed(replica, probe, Failure(error.kind, error.problem))
      else:
        replica.failures = 0
      raise
    else:
      replica.failures = 0
      return answer
    finally:
      replica.in_flight -= 1
      if probe:
        replica.probing = False

  def learn(self, replica: Replica, identity: Any) -> None:
    """Compares what a replica serves with what the first one serves.

    identity: of its /health; None where it has none: it then is like others
      that have none, as Search-R1's servers are.
    """
    if self._served is None and identity is not None:
      self.compare(replica, identity_hash(identity))
      if replica.differs:
        return
      self._served = replica.url, identity
      for other in self.all:  # those that had none
        other.known = False
    url, served = self._served or (replica.url, None)
    differ = files.differences({'identity': served}, {'identity': identity})
    replica.known = not differ
    if differ:
      self._leave_out(replica, url, '; '.join(differ))

  def compare(self, replica: Replica, found: str) -> None:
    """Compares `identity_hash` of an answer with that of the first one."""
    self._hash = self._hash or (replica.url, found)
    url, served = self._hash
    if found != served:
      self._leave_out(
        replica, url, f'the hash of its identity was {served}, is {found}'
      )

  def _leave_out(self, replica: Replica, url: str, how: str) -> None:
    if not replica.differs:
      replica.differs = f'does not serve what {url} served: {how}'
      _log.error('%s %s; it is left out for good', replica.url, replica.differs)

  def _failed(self, replica: Replica, probe: bool, failure: Failure) -> None:
    replica.failures += 1
    replica.problem = failure
    # What nobody reached may be another server when it is back.
    if failure.kind == 'unreachable' or replica.failures >= self._failures:
      replica.known = len(self.all) == 1 and self._served is None
    # Of those that were under way together only one opens the circuit.
    if replica.failures == self._failures or (
      probe and replica.failures > self._failures
    ):
      replica.open_until = self._clock() + (
        self._cooldown_s * self._random.uniform(1, 1.5)
      )


def _checked_url(url: str) -> str:
  try:
    parts = urllib.parse.urlsplit(url)
    usable = parts.scheme in ('http', 'https') and parts.hostname
    parts.port  # noqa: B018, raises where it is no number up to 65535
  except ValueError:
    usable = False
  if not usable:
    raise ValueError(f'url {url!r} is not of the form http://host:port')
  return url.rstrip('/')
