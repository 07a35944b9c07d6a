"""Replicas: servers of the same corpus and index, and their health.

A replica that failed several times in a row gets no requests for some time (its
circuit is open); then one request probes it (Nygard, Release It!, 2007).

A restarted server may serve another corpus or index, and its answers would look
valid. The client therefore first requests the identity (/health) of a replica
that was unreachable or is new. Each answer has a hash of the identity in its
header, which reveals a server that was replaced in between. A replica whose
identity differs from that of the first one gets no further requests.
"""

import asyncio
from collections.abc import Coroutine, Sequence
import dataclasses
import logging
import math
import re
from typing import Any
import urllib.parse

import httpx

from retrieval import files, proxies
from retrieval.core import identity_hash

_log = logging.getLogger(__name__)

_FIX = {  # kind of an error -> what to do
  'unreachable': (
    'Start it (python -m retrieval.server --corpus=...), correct the URL, or '
    'name the certificate of your https server in RETRIEVAL_CA_FILE.'
  ),
  'timeout': 'Check the load of the server, or raise timeout_s.',
  'overloaded': 'Send fewer requests at once, or raise deadline_s.',
  'bad_response': 'Check that the URL is a retrieval server, and its log.',
  'rejected': 'Correct the request, or raise the limit that it names.',
  'unauthorised': 'Set RETRIEVAL_TOKEN to the token of the server.',
  'search_failed': 'The server works, but cannot answer these queries.',
  'different': 'Serve the previous corpus and index, and start again.',
}
KINDS = (*_FIX,)
_PATH = re.compile('(?<![:/])(/retrieve)?/*$')


class RetrievalError(RuntimeError):
  """A request without a usable answer.

  Attributes:
    kind: one of `KINDS`. Only the first three are retried; a retry of the
      others would fail again.
    url: the URL that was asked last.
    attempts: the number of attempts.
    queries: positions of the queries that the server could not answer, if it
      named them: the others may be asked without them.
  """

  def __init__(
    self, kind: str, url: str, problem: str, attempts=1, queries=(), fix=''
  ):
    tried = f' after {attempts} attempts' if attempts > 1 else ''
    super().__init__(f'{url}: {problem}{tried} [{kind}]. {fix or _FIX[kind]}')
    self.kind, self.url, self.problem = kind, url, problem
    self.attempts, self.queries = attempts, tuple(queries)
    # Whether another replica may answer.
    self.of_replica = kind in ('bad_response', 'unauthorised', 'different')


@dataclasses.dataclass(eq=False)
class Failure(Exception):
  """A failed attempt that may be repeated."""

  kind: str
  problem: str
  wait_s: float = 0.0
  queries: Sequence[int] = ()

  def error(self, url: str, attempts: int) -> RetrievalError:
    return RetrievalError(self.kind, url, self.problem, attempts, self.queries)


@dataclasses.dataclass(eq=False)
class Replica:
  """The state of one server."""

  url: str
  in_flight: int = 0
  failures: int = 0  # in a row
  open_until: float = -math.inf  # not asked until then
  probing: bool = False
  busy_until: float = -math.inf  # by its Retry-After
  problem: Failure | None = None  # the last one
  known: bool = False  # its identity was checked
  differs: str = ''  # how its identity differs; it is then excluded for good

  def require_same_corpus(self, path: str) -> None:
    if self.differs:
      raise RetrievalError('different', self.url + path, self.differs)


class Replicas:
  """Chooses which replica to ask, and keeps track of their health."""

  def __init__(
    self, urls: Sequence[str], failures: int, cooldown_s: float, rng, clock
  ):
    """See `RetrievalClient` for the arguments.

    Raises:
      ValueError: a URL that is not http(s)://host.
    """
    # A single server has nothing to differ from at first.
    self.all = [Replica(_checked_url(u), known=len(urls) == 1) for u in urls]
    self.served: tuple[str, Any] | None = None  # the first (URL, identity)
    self._hash: tuple[str, str] | None = None  # the first (URL, identity hash)
    self._failures, self._cooldown_s = failures, cooldown_s
    self._random, self._clock, self._turn = rng, clock, 0

  async def choose(
    self, replicas, last: Replica | None, end: float, path: str, attempts: int
  ) -> tuple[Replica, bool]:
    """Returns the least busy replica, and whether the request is a probe.

    A replica of unknown identity is probed like one whose circuit was open.

    If all circuits are open, this waits for the first probe: a server that is
    restarted within the deadline then costs time, whereas an error would cost
    the trajectory. Waiting does not count as an attempt.

    Raises:
      RetrievalError: the deadline would pass while waiting, or no replica has
        the expected identity.
    """

    def cost(r: Replica) -> tuple[bool, bool, int]:
      return r.busy_until > self._clock(), r is last, r.in_flight

    while True:
      now = self._clock()
      alike = [r for r in replicas if not r.differs]
      if not alike:
        replicas[-1].require_same_corpus(path)
      closed = [r for r in alike if r.known and r.failures < self._failures]
      idle = [r for r in alike if not r.probing and r.open_until <= now]
      if ready := [r for r in idle if r not in closed]:
        r = min(ready, key=cost)
        # A busy one, or one that just failed, waits while others may answer.
        others = closed or any(other.probing for other in alike)
        if not (others and any(cost(r)[:2])):
          r.probing = True
          return r, True
      if closed:
        self._turn += 1  # equally busy replicas take turns
        turn = self._turn % len(closed)
        return min(closed[turn:] + closed[:turn], key=cost), False
      first = min(alike, key=lambda r: r.open_until)
      # Jitter, so that waiting requests do not all continue at once.
      pause = max(0.0, first.open_until - now) + self._random.uniform(0.01, 0.2)
      if now + pause >= end:
        last = 'another request still checks its identity'
        cause = first.problem or Failure('timeout', last)
        said = f'{cause.problem}; it failed {first.failures} times in a row'
        failure = Failure(cause.kind, f'{said} and is left alone for a while')
        raise failure.error(first.url + path, max(attempts, 1)) from cause
      await asyncio.sleep(pause)

  async def watch(
    self, replica: Replica, probe: bool, attempt: Coroutine, whole: bool
  ) -> Any:
    """Awaits an attempt and updates the circuit of the replica.

    whole: the attempt has its full timeout; else a timeout is not counted.
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
      # The circuit of a single server stays closed: the query may be at fault.
      if error.of_replica and len(self.all) > 1:
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
    """Compares the identity of a replica with that of the first one.

    identity: of its /health; None if it has none, like Search-R1's servers. It
      is then equal to others without one.
    """
    if self.served is None and identity is not None:
      self.compare(replica, identity_hash(identity))
      if replica.differs:
        return
      self.served = replica.url, identity
      for other in self.all:  # those without an identity
        other.known = False
    url, served = self.served or (replica.url, None)
    differ = files.differences({'identity': served}, {'identity': identity})
    replica.known = not differ
    if differ:
      self._leave_out(replica, url, '; '.join(differ))

  def compare(self, replica: Replica, found: str) -> None:
    """Compares `identity_hash` of an answer with that of the first answer."""
    self._hash = self._hash or (replica.url, found)
    url, served = self._hash
    if found != served:
      how = f'the hash of its identity was {served}, is {found}'
      self._leave_out(replica, url, how)

  def _leave_out(self, replica: Replica, url: str, how: str) -> None:
    if not replica.differs:
      replica.differs = f'does not serve what {url} served: {how}'
      _log.error('%s %s; it is excluded for good', replica.url, replica.differs)

  def _failed(self, replica: Replica, probe: bool, failure: Failure) -> None:
    replica.failures += 1
    replica.problem = failure
    # An unreachable server may be another one when it is back.
    if failure.kind == 'unreachable' or replica.failures >= self._failures:
      replica.known = len(self.all) == 1 and self.served is None
    # Of requests in flight together, only one opens the circuit.
    above = replica.failures - self._failures
    if above == 0 or probe and above > 0:
      cooldown = self._cooldown_s * self._random.uniform(1, 1.5)
      replica.open_until = self._clock() + cooldown


def _checked_url(url: str) -> str:
  # Search-R1's own setting is the address with the path of the request.
  url = _PATH.sub('', proxies.askable(url.strip()))
  problem = f'url {url!r} is not of the form http://host:port'
  with files.convert((ValueError, httpx.InvalidURL), ValueError, problem):
    parts, _ = urllib.parse.urlsplit(url), httpx.URL(url)
    parts.port  # noqa: B018, raises where it is no number up to 65535
    usable = parts.scheme in ('http', 'https') and parts.hostname
    if not usable or parts.query or parts.fragment:
      raise ValueError
  return url
