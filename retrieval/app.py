"""The HTTP application: checks requests, shapes answers, says how it is.

`retrieval.server` runs it as a process; tests run it without one.
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import hmac
import math
import os
import time
from collections.abc import (
  AsyncIterator,
  Callable,
  Coroutine,
  Iterator,
  Mapping,
  Sequence,
)
from typing import Any

import fastapi
import numpy as np
import prometheus_client
import psutil
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.requests import ClientDisconnect

from retrieval import files, metrics, protocol
from retrieval.batcher import Batcher
from retrieval.core import (
  IDENTITY_HEADER,
  LocalSearcher,
  Searcher,
  identity_hash,
)
from retrieval.protocol import Limits, Rejected, bad_request

LOOPBACK = ('127.0.0.1', 'localhost', '::1')
_COMPILERS = 8  # threads; XLA compiles one program in about one
_OPEN = ('/health', '/ready')  # answered without the token, telling less


class Traffic:
  """What passes through the application: bounds and counts it."""

  def __init__(self, limits: Limits):
    self.limits = limits
    self.started = time.time()
    self.in_flight = self.bytes = 0
    self.statuses: collections.Counter = collections.Counter()
    # (end, seconds, queries) of the last answered requests.
    self.recent: collections.deque = collections.deque(maxlen=4096)

  @contextlib.contextmanager
  def request(self) -> Iterator['Request']:
    """A search request, from its head to its answer.

    Raises:
      Rejected: 429, `Limits.max_requests` are in flight.
    """
    if self.in_flight >= self.limits.max_requests:
      raise Rejected(
        429, 'requests',
        f'{self.in_flight} requests are in flight (--max_requests); send '
        'fewer at once, with more queries each', 1,
      )
    request = Request(self)
    self.in_flight += 1
    metrics.IN_FLIGHT.set(self.in_flight)
    try:
      yield request
    finally:
      self.in_flight -= 1
      self.bytes -= request.bytes
      metrics.IN_FLIGHT.set(self.in_flight)

  def stats(self) -> dict[str, object]:
    """Of the last answered requests, at most 4096 and 60 s old."""
    now = time.monotonic()
    recent = [r for r in self.recent if r[0] > now - 60]
    span = min(60.0, time.time() - self.started)
    if len(recent) == self.recent.maxlen:  # what came before is forgotten
      span = now - recent[0][0]
    p50, p99 = (
      np.percentile([r[1] for r in recent], (50, 99)) * 1000
      if recent else (None, None)
    )
    return {
      'uptime_s': round(time.time() - self.started, 3),
      'rss_bytes': psutil.Process().memory_info().rss,
      'in_flight': self.in_flight,
      'responses': {str(s): n for s, n in sorted(self.statuses.items())},
      'recent_requests': len(recent),
      'recent_p50_ms': p50 and round(float(p50), 3),
      'recent_p99_ms': p99 and round(float(p99), 3),
      'recent_queries_per_s': round(
        sum(r[2] for r in recent) / max(span, 1e-3), 3
      ),
    }


class Request:
  """One search request under way: its bytes and its time."""

  def __init__(self, traffic: Traffic):
    self._traffic, self.bytes, self.begun = traffic, 0, time.monotonic()

  async def body(self, http: fastapi.Request) -> bytes:
    """The whole body.

    Raises:
      Rejected: it is too large, those of all requests together are, or the
        client left before its end.
    """
    limits, body = self._traffic.limits, bytearray()
    try:
      async for chunk in http.stream():
        body += chunk
        self.bytes += len(chunk)
        self._traffic.bytes += len(chunk)
        if len(body) > limits.max_body_bytes:
          raise bad_request(
            ['body'],
            f'more than {limits.max_body_bytes} bytes; send fewer queries', 413,
          )
        if self._traffic.bytes > limits.max_bytes:
          raise Rejected(
            503, 'bytes', 'too many bytes are in flight (--max_bytes)', 1
          )
    except ClientDisconnect:  # nobody reads this; it keeps the log quiet
      raise bad_request(['body'], 'cut short', 400) from None
    return bytes(body)

  def done(self, queries: int) -> None:
    now = time.monotonic()
    metrics.REQUESTS.observe(now - self.begun)
    self._traffic.recent.append((now, now - self.begun, queries))


class _Guard:
  """Outermost: asks for the token and counts the answers."""

  def __init__(
    self, app, token: str | None, traffic: Traffic, loopback: bool
  ):
    self._app, self._token, self._traffic = app, token, traffic
    self._loopback = loopback

  async def __call__(self, scope, receive, send) -> None:
    if scope['type'] != 'http':
      return await self._app(scope, receive, send)

    async def counted(message) -> None:
      if message['type'] == 'http.response.start':
        self._traffic.statuses[message['status']] += 1
        metrics.RESPONSES.labels(message['status']).inc()
      await send(message)

    async def refuse(refusal: Response) -> None:
      # Read to its end first: no answer can go out amid a broken body.
      while (message := await receive())['type'] == 'http.request':
        if not message.get('more_body'):
          return await refusal(scope, receive, counted)

    if self._token is None and self._foreign(scope):
      # A page in a browser here reaches this server too.
      metrics.REJECTED.labels('origin').inc()
      return await refuse(JSONResponse({'detail': 'of another site'}, 403))
    known = self._token is None or _bears(scope, self._token)
    scope.setdefault('state', {})['known'] = known
    if known or scope['path'] in _OPEN:
      return await self._app(scope, receive, counted)
    refusal = JSONResponse(
      {'detail': 'send the header Authorization: Bearer TOKEN'}, 401,
      {'WWW-Authenticate': 'Bearer'},
    )
    metrics.REJECTED.labels('token').inc()
    await refuse(refusal)

  def _foreign(self, scope) -> bool:
    """Whether a browser asks on behalf of a site that is not this server."""
    headers = dict(scope['headers'])
    host = headers.get(b'host', b'').decode('latin-1')
    # A name that leads here need not be one of this machine's.
    if self._loopback and not any(
      host == shown or host.startswith(f'{shown}:')
      for shown in ('127.0.0.1', 'localhost', '[::1]')
    ):
      return True
    origin = headers.get(b'origin')
    return origin is not None and (
      origin.decode('latin-1').partition('://')[2] != host
    )


def _bears(scope: Mapping[str, Any], token: str) -> bool:
  given = dict(scope['headers']).get(b'authorization', b'')
  scheme, _, value = given.partition(b' ')
  # In constant time: how long it takes must not tell how much was right.
  same = hmac.compare_digest(value.strip(), token.encode())
  return same and scheme.lower() == b'bearer'


def create_app(
  searcher: Searcher,
  limits: Limits,
  *,
  local: LocalSearcher | None = None,
  programs: Sequence[Callable[[], None]] = (),
  token: str | None = None,
  loopback: bool = False,
) -> fastapi.FastAPI:
  """The HTTP application; its lifespan starts the batcher and warms up.

  Args:
    searcher: what answers; closed at the end.
    limits: the bounds.
    local: the corpus and index behind `searcher`, which are warmed up:
      searches that cost nothing. None: the searcher itself, if it is one.
    programs: calls that compile what searches will run, as `DenseJax` and
      `Encoder` list them; it is ready after them.
    token: what /retrieve, /metrics and /stats ask for; None: nothing, and
      pages of other sites in a browser on this machine are refused.
    loopback: it is reached by names of this machine alone.

  Returns:
    The application; `app.state.warm` is a task that ends when it is warm, and
    has the exception of a warm-up that failed.
  """
  if local is None and isinstance(searcher, LocalSearcher):
    local = searcher
  batcher, traffic = Batcher(searcher, limits), Traffic(limits)
  identity, served = dict(searcher.identity), {}
  # With every answer: another server may take this one's place unseen.
  said = {IDENTITY_HEADER: identity_hash(identity)}
  if local is not None:
    served = local.identity
    served['corpus'] = {'path': local.corpus.path, **served['corpus']}
  not_ready = {503: protocol.response('Not warm yet.', protocol.READY)}
  secured = {}
  if token:
    secured[401] = protocol.response('No token.', protocol.ERROR)

  @contextlib.asynccontextmanager
  async def lifespan(app: fastapi.FastAPI) -> AsyncIterator[None]:
    batcher.start()
    app.state.warm = asyncio.create_task(
      _warm(batcher, local, limits, programs)
    )
    yield
    app.state.warm.cancel()
    await asyncio.gather(app.state.warm, return_exceptions=True)
    await batcher.stop()

  app = fastapi.FastAPI(
    title='searchrl retrieval', version=protocol.VERSION, lifespan=lifespan
  )
  app.add_middleware(
    _Guard, token=token, traffic=traffic, loopback=loopback
  )

  @app.exception_handler(Rejected)
  async def rejected(_: fastapi.Request, error: Rejected) -> Response:
    metrics.REJECTED.labels(error.reason).inc()
    after = error.retry_after_s
    after = {'Retry-After': str(math.ceil(after))} if after > 0 else {}
    return JSONResponse({'detail': error.detail}, error.status, said | after)

  @app.post('/retrieve', openapi_extra=protocol.openapi(limits, bool(token)))
  async def retrieve(http: fastapi.Request) -> Response:
    """Ranks passages for each query; see retrieval/README.md.

    The header X-Deadline-Ms says how long the client waits, in milliseconds;
    --deadline_s bounds it.
    """
    with traffic.request() as request:
      seconds = _deadline_s(http, limits)
      try:
        async with asyncio.timeout(seconds):
          asked = protocol.parse_request(await request.body(http), limits)
          answers = await _while_there(
            http, batcher.search(asked.queries, asked.topk)
          )
      except TimeoutError:
        raise Rejected(
          504, 'deadline', f'not answered within {seconds:g} s'
        ) from None
      body = protocol.answer(answers, asked.return_scores)
      request.done(len(answers))
      return Response(body, headers=said, media_type='application/json')

  @app.get('/health')
  async def health(http: fastapi.Request) -> dict:
    """What is served: a client compares the identity with its expectation."""
    if not http.state.known:
      return {'status': 'ok', 'version': protocol.VERSION}
    return {
      'status': 'ok',
      'version': protocol.VERSION,
      **served,
      'identity': identity,
      'limits': dataclasses.asdict(limits),
      'served': dataclasses.asdict(batcher.counters),
      'uptime_s': round(time.time() - traffic.started, 3),
    }

  @app.get('/ready', responses=not_ready)
  async def ready(http: fastapi.Request) -> Response:
    """503 until the warm-up has ended well."""
    warm = http.app.state.warm
    if warm.done() and not warm.cancelled() and warm.exception() is None:
      return JSONResponse({'ready': True})
    return JSONResponse({'ready': False}, 503, {'Retry-After': '1'})

  @app.get('/metrics', response_class=PlainTextResponse, responses=secured)
  async def prometheus() -> Response:
    """For Prometheus, of this process."""
    return Response(
      prometheus_client.generate_latest(),
      media_type='text/plain; version=0.0.4; charset=utf-8',
    )

  @app.get('/stats', responses=secured)
  async def stats() -> dict:
    """For people: traffic, counters, memory."""
    return {
      **traffic.stats(),
      'pending_queries': batcher.pending,
      **dataclasses.asdict(batcher.counters),
    }

  return app


async def _warm(
  batcher: Batcher, local: LocalSearcher | None, limits: Limits,
  programs: Sequence[Callable[[], None]],
) -> None:
  if programs:
    await _compile(programs)
  if local is None:
    return
  for size in sorted({1, limits.max_queries}):
    queries = [f'{i} warm' for i in range(size)]
    await batcher.call(
      lambda: local.index.search(queries, limits.topk)  # noqa: B023
    )


async def _compile(programs: Sequence[Callable[[], None]]) -> None:
  loop = asyncio.get_running_loop()
  pool = concurrent.futures.ThreadPoolExecutor(
    min(_COMPILERS, os.cpu_count() or 1), 'compile'
  )
  try:
    with files.progress(len(programs), 'compile', unit=' programs') as bar:
      tasks = [loop.run_in_executor(pool, program) for program in programs]
      for task in asyncio.as_completed(tasks):
        await task
        bar.update()
  finally:
    pool.shutdown(wait=False, cancel_futures=True)


def _deadline_s(http: fastapi.Request, limits: Limits) -> float:
  value = http.headers.get('x-deadline-ms')
  if value is None:
    return limits.deadline_s
  # No float(): it takes 'nan', 'inf' and '1_0'.
  if not (value.isascii() and value.isdigit() and 0 < len(value) < 10):
    raise bad_request(
      ['header', 'x-deadline-ms'], 'must be a whole number of milliseconds'
    )
  return min(limits.deadline_s, int(value) / 1000)


async def _while_there(http: fastapi.Request, search: Coroutine) -> Any:
  """The result of `search`, unless the client goes before it is there.

  A client that gave up asks again: to search for both would double the load
  that made it give up.
  """

  async def gone() -> None:
    while (await http.receive())['type'] != 'http.disconnect':
      pass

  tasks = [asyncio.ensure_future(search), asyncio.ensure_future(gone())]
  try:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    if not tasks[0].done():
      raise bad_request(['body'], 'the client has gone', 400)
    return tasks[0].result()
  finally:
    for task in tasks:
      task.cancel()
