"""The HTTP application: checks requests, shapes answers, says how it is.

`retrieval.server` runs it as a process; tests run it without one.
"""

import asyncio
from collections.abc import (
  AsyncIterator,
  Callable,
  Coroutine,
  Iterator,
  Mapping,
  Sequence,
)
import concurrent.futures
import contextlib
import dataclasses
import hmac
import logging
import math
import os
import time
from typing import Any

import fastapi
from fastapi.responses import JSONResponse, PlainTextResponse, Response
import prometheus_client
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
_log = logging.getLogger(__name__)
_COMPILERS = 8  # threads; XLA compiles one program in about one
_OPEN = ('/health', '/ready')  # answered without the token, telling less
_CHUNK = 1 << 16  # bytes of an answer given to the transport at once
_LINGER_S = 2.0  # what a refused client may go on sending, unread
_WARM = 8  # queries of the warm-up


class Traffic:
  """What passes through the application: bounds and counts it."""

  def __init__(self, limits: Limits):
    self.limits, self.started = limits, time.time()
    self.in_flight = self.bytes = 0

  @contextlib.contextmanager
  def request(self) -> Iterator['Request']:
    """A search request, from its head to the last byte of its answer.

    Raises:
      Rejected: 429, `Limits.max_requests` are in flight.
    """
    if self.in_flight >= self.limits.max_requests:
      raise Rejected(
        429,
        'requests',
        f'{self.in_flight} requests are in flight (--max_requests); send '
        'fewer at once, with more queries each',
        1,
      )
    request = Request(self)
    self.in_flight += 1
    metrics.IN_FLIGHT.set(self.in_flight)
    try:
      with metrics.REQUESTS.time():
        yield request
    finally:
      self.in_flight -= 1
      self.bytes -= request.bytes
      metrics.IN_FLIGHT.set(self.in_flight)


class Request:
  """One search request under way: its bytes, both ways."""

  def __init__(self, traffic: Traffic):
    self._traffic, self.bytes = traffic, 0

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
        if len(body) > limits.max_body_bytes:
          raise bad_request(
            ['body'],
            f'more than {limits.max_body_bytes} bytes; send fewer queries '
            '(--max_body_bytes)',
            413,
          )
        self.hold(len(chunk))
    except ClientDisconnect:  # nobody reads this; it keeps the log quiet
      raise bad_request(['body'], 'cut short', 400) from None
    return bytes(body)

  def hold(self, count: int) -> None:
    """Counts bytes as in flight until the request has ended.

    Raises:
      Rejected: 413, they are too many even alone; 503, together with others.
    """
    self.bytes += count
    self._traffic.bytes += count
    if self.bytes > self._traffic.limits.max_bytes:
      raise bad_request(
        ['body'],
        f'{self.bytes} bytes with the answer, more than --max_bytes='
        f'{self._traffic.limits.max_bytes}; send fewer queries',
        413,
      )
    if self._traffic.bytes > self._traffic.limits.max_bytes:
      raise Rejected(
        503, 'bytes', 'too many bytes are in flight (--max_bytes)', 1
      )


class _Unread(Exception):
  """The client did not read its answer in time."""


class _Guard:
  """Outermost: asks for the token, counts the answers and sees them sent."""

  def __init__(
    self, app, token: str | None, traffic: Traffic, hosts: Sequence[str] | None
  ):
    self._app, self._token, self._traffic = app, token, traffic
    self._hosts = hosts

  async def __call__(self, scope, receive, send) -> None:
    if scope['type'] != 'http':
      return await self._app(scope, receive, send)

    async def counted(message) -> None:
      if message['type'] == 'http.response.start':
        metrics.RESPONSES.labels(message['status']).inc()
        return await send(message)
      # Each call waits until the client has read most of what went before.
      body = memoryview(message.get('body', b''))
      more = message.get('more_body', False)
      try:
        async with asyncio.timeout(self._traffic.limits.deadline_s):
          while len(body) > _CHUNK:
            part, body = body[:_CHUNK], body[_CHUNK:]
            await send(message | {'body': part, 'more_body': True})
          await send(message | {'body': body, 'more_body': more})
      except TimeoutError:
        raise _Unread from None

    async def linger(message) -> None:
      # The answer goes out at once. What the client goes on sending is thrown
      # away for a moment: a connection that is closed with bytes unread is
      # reset, and the client might lose the answer.
      if message['type'] == 'http.response.body':
        await counted(message | {'more_body': True})
        message = message | {'body': b''}
        with contextlib.suppress(TimeoutError):
          async with asyncio.timeout(_LINGER_S):
            while (await receive()).get('more_body'):
              pass
      await counted(message)

    async def refuse(reason: str, status: int, detail: str, **headers) -> None:
      metrics.REJECTED.labels(reason).inc()
      headers['Connection'] = 'close'
      answer = JSONResponse({'detail': detail}, status, headers)
      await answer(scope, receive, linger)

    if self._token is None and (problem := self._foreign(scope)):
      # A page in a browser here reaches this server too.
      return await refuse('origin', 403, problem)
    known = self._token is None or _bears(scope, self._token)
    if not known and scope['path'] not in _OPEN:
      return await refuse(
        'token',
        401,
        'send the header Authorization: Bearer TOKEN',
        **{'WWW-Authenticate': 'Bearer'},
      )
    with contextlib.ExitStack() as held:
      scope.setdefault('state', {}).update(known=known, held=held)
      try:
        await self._app(scope, receive, counted)
      except _Unread:  # without a whole answer, uvicorn closes the connection
        metrics.REJECTED.labels('unread').inc()

  def _foreign(self, scope) -> str:
    """Why this may be a browser that asks for another site's page, or ''."""
    headers = dict(scope['headers'])
    host = headers.get(b'host', b'').decode('latin-1')
    # A name that leads here need not be one of this machine's.
    if self._hosts is not None and not any(
      host == shown or host.startswith(f'{shown}:') for shown in self._hosts
    ):
      return (
        f'the header Host is {host[:80]!r}; without a token, a browser being '
        f'able to use any name, only {", ".join(self._hosts)} are answered: '
        'start the server with --allow_host=NAME, or with --token_file'
      )
    origin = headers.get(b'origin')
    if origin is not None and (
      origin.decode('latin-1').partition('://')[2] != host
    ):
      return (
        'the header Origin names another site than Host; to serve pages of '
        'other sites, start the server with --token_file'
      )
    return ''


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
  hosts: Sequence[str] | None = None,
) -> fastapi.FastAPI:
  """The HTTP application; its lifespan starts the batcher and warms up.

  Args:
    searcher: what answers; closed at the end.
    limits: the bounds.
    local: the corpus and index behind `searcher`, which are warmed up:
      searches that cost nothing. None: the searcher itself, if it is one.
    programs: calls that compile what searches will run, as `DenseJax` and
      `Encoder` list them; it is ready after them.
    token: what all but /health and /ready ask for; None: nothing, and
      pages of other sites in a browser on this machine are refused.
    hosts: names by which it may be reached without a token; None: any.

  Returns:
    The application; `app.state.warm` is a task that ends when it is warm, and
    has the exception of a warm-up that failed.
  """
  if local is None and isinstance(searcher, LocalSearcher):
    local = searcher
  batcher, traffic = Batcher(searcher, limits), Traffic(limits)
  # Two servers that cut queries otherwise do not answer alike.
  identity = {
    **searcher.identity,
    'query': {
      'max_bytes': limits.max_query_bytes,
      'max_terms': limits.max_query_terms,
    },
  }
  served = {}
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
    app.state.batcher = batcher
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
  app.add_middleware(_Guard, token=token, traffic=traffic, hosts=hosts)

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
    # It is held until the answer has been sent.
    request = http.state.held.enter_context(traffic.request())
    seconds = _deadline_s(http, limits)
    try:
      async with asyncio.timeout(seconds):
        asked = protocol.parse_request(await request.body(http), limits)
        answers = await _while_there(
          http, batcher.search(asked.queries, asked.topk)
        )
    except TimeoutError:
      raise Rejected(
        504,
        'deadline',
        f'not answered within {seconds:g} s (--deadline_s, '
        'or X-Deadline-Ms of the request)',
      ) from None
    body = protocol.answer(answers, asked.return_scores)
    request.hold(len(body))
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
      'waiting': {'requests': traffic.in_flight, 'queries': batcher.pending},
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

  return app


async def _warm(
  batcher: Batcher,
  local: LocalSearcher | None,
  limits: Limits,
  programs: Sequence[Callable[[], None]],
) -> None:
  if programs:
    await _compile(programs)
  if local is None:
    return
  queries = [f'{i} warm' for i in range(min(_WARM, limits.max_batch))]

  def search() -> None:
    with batcher.pace.timed(len(queries)):
      local.index.search(queries, limits.topk)

  task = asyncio.ensure_future(batcher.call(search))
  if (await asyncio.wait([task], timeout=limits.warm_s))[0]:
    return task.result()
  _log.warning(
    'the first search took more than %g s (--warm_s): requests wait behind it',
    limits.warm_s,
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
