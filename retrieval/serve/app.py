"""The HTTP application: requests, answers, health and metrics.

`retrieval.server` runs it as a process; tests run it without one.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
import concurrent.futures
import contextlib
import dataclasses
import hmac
import logging
import math
import os
import time
from typing import Any
import urllib.parse

import fastapi
from fastapi.responses import JSONResponse, PlainTextResponse, Response
import prometheus_client
from starlette.requests import ClientDisconnect

from retrieval import core, files, metrics
from retrieval.core import LocalSearcher, Searcher
from retrieval.serve import protocol
from retrieval.serve.batcher import Batcher
from retrieval.serve.protocol import Limits, Rejected, bad_request

_log = logging.getLogger(__name__)
_COMPILERS = 8  # threads; XLA uses about one thread for a program
_OPEN = ('/health', '/ready')  # answered without the token, with less content
_CHUNK = 1 << 16  # bytes of an answer given to the transport at once
_LINGER_S = 2.0  # how long data of a refused client is read and discarded
_WARM = 8  # queries of the warm-up


class Traffic:
  """Limits and counts the requests and bytes in flight."""

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
      problem = f'{self.in_flight} requests are in flight (--max_requests)'
      raise Rejected(429, 'requests', f'{problem}; send fewer at once', 1)
    request = Request(self)
    self.in_flight += 1
    try:
      with metrics.REQUESTS.time(), metrics.IN_FLIGHT.track_inprogress():
        yield request
    finally:
      self.in_flight -= 1
      self.bytes -= request.bytes


class Request:
  """One search request, with the bytes of its body and its answer."""

  def __init__(self, traffic: Traffic):
    self._traffic, self.bytes = traffic, 0

  async def body(self, http: fastapi.Request) -> bytes:
    """Reads the body and unpacks it.

    Raises:
      Rejected: this body, as sent or unpacked, or all bodies together are too
        large, it cannot be unpacked, or the client left before the end.
    """
    most, sent = self._traffic.limits.max_body_bytes, bytearray()
    try:
      async for chunk in http.stream():
        sent += chunk
        if len(sent) > most:
          raise protocol.too_large(most)
        self.hold(len(chunk))
    except ClientDisconnect:  # the answer is not read; avoids a log entry
      raise bad_request(['body'], 'cut short', 400) from None
    if encoding := http.headers.get('content-encoding'):
      body = protocol.unpacked(bytes(sent), encoding, most)
      self.hold(len(body))
      return body
    return bytes(sent)

  def hold(self, count: int) -> None:
    """Counts bytes as in flight until the request has ended.

    Raises:
      Rejected: too many bytes: 413 of this request alone, 503 of all requests.
    """
    self.bytes += count
    self._traffic.bytes += count
    most = self._traffic.limits.max_bytes
    if self.bytes > most:
      size = f'{self.bytes} bytes with the answer, more than --max_bytes={most}'
      raise bad_request(['body'], f'{size}; send fewer queries', 413)
    if self._traffic.bytes > most:
      raise Rejected(503, 'bytes', 'too many bytes in flight (--max_bytes)', 1)


class _Unread(Exception):
  """The client did not read its answer in time."""


class _Guard:
  """The outermost layer: checks the token, counts answers, limits sending."""

  def __init__(self, app, token, traffic: Traffic, hosts):
    self._app, self._token, self._traffic = app, token, traffic
    self._hosts = hosts

  async def __call__(self, scope, receive, send) -> None:
    if scope['type'] != 'http':
      return await self._app(scope, receive, send)
    scope = _origin_form(scope)

    async def counted(message) -> None:
      if message['type'] == 'http.response.start':
        metrics.RESPONSES.labels(message['status']).inc()
        return await send(message)
      # Each call waits until the client has read most of the previous data.
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
      # The answer is sent at once. Then data from the client is discarded for
      # a moment: closing a connection with unread bytes resets it, and the
      # client might lose the answer.
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
      # Pages in a browser on this machine can reach this server.
      return await refuse('origin', 403, problem)
    given = dict(scope['headers']).get(b'authorization', b'')
    scheme, _, value = given.partition(b' ')
    # Constant time, so that the duration does not reveal a prefix of the token.
    same = hmac.compare_digest(value.strip(), (self._token or '').encode())
    known = self._token is None or same and scheme.lower() == b'bearer'
    if not known and scope['path'] not in _OPEN:
      fix, how = 'Authorization: Bearer TOKEN', {'WWW-Authenticate': 'Bearer'}
      return await refuse('token', 401, f'send the header {fix}', **how)
    with contextlib.ExitStack() as held:
      scope.setdefault('state', {}).update(known=known, held=held)
      try:
        await self._app(scope, receive, counted)
      except _Unread:  # uvicorn then closes the connection
        metrics.REJECTED.labels('unread').inc()

  def _foreign(self, scope) -> str:
    """Why the request may come from a page of another site, or ''."""
    headers = {k: v.decode('latin-1').lower() for k, v in scope['headers']}
    host, names = headers.get(b'host', ''), self._hosts
    known = [f'{host}:'.startswith(f'{n.lower()}:') for n in names or ()]
    if names is not None and not any(known):  # any name may resolve to here
      fix = 'start the server with --allow_host=NAME, or with --token_file'
      return f'the header Host is {host[:80]!r}, not {", ".join(names)}: {fix}'
    if headers.get(b'origin', f'://{host}').partition('://')[2] != host:
      problem = 'the header Origin names another site than Host'
      return f'{problem}: start the server with --token_file'
    return ''


def _origin_form(scope):
  """The scope of a request whose target is a URL, as clients ask proxies.

  The host of the URL then counts, not the header (RFC 9112, 3.2.2).
  """
  if scope['path'].lower().startswith(('http://', 'https://')):
    with contextlib.suppress(ValueError):
      url = urllib.parse.urlsplit(scope['path'])
      host = url.netloc.rpartition('@')[2].encode('latin-1', 'replace')
      headers = [(k, v) for k, v in scope['headers'] if k != b'host']
      headers.append((b'host', host))
      return scope | {'path': url.path or '/', 'headers': headers}
  return scope


def create_app(
  searcher: Searcher,
  limits: Limits,
  *,
  local: LocalSearcher | None = None,
  programs: Sequence[Callable[[], None]] = (),
  token: str | None = None,
  hosts: Sequence[str] | None = None,
) -> fastapi.FastAPI:
  """Makes the HTTP application; its lifespan starts the batcher and warms up.

  Args:
    searcher: answers the queries; closed at the end.
    limits: see `Limits`.
    local: the corpus and index inside `searcher`, which are warmed up since
      their searches cost nothing. None: the searcher itself, if local.
    programs: functions that compile what searches will run, see `DenseJax`
      and `Encoder`; the application is ready after them.
    token: required by all paths but /health and /ready; None: no token, and
      requests by pages of other sites are refused.
    hosts: accepted values of Host without a token; None: any.

  Returns:
    The application; `app.state.warm` is a task that ends when it is warm, or
    has the exception of the warm-up.
  """
  if local is None and isinstance(searcher, LocalSearcher):
    local = searcher
  batcher, traffic = Batcher(searcher, limits), Traffic(limits)
  # The limits of queries change the answers.
  most = limits.max_query_bytes, limits.max_query_terms
  cut = dict(zip(('max_bytes', 'max_terms'), most))
  identity, served = {**searcher.identity, 'query': cut}, {}
  # In every answer, since another server may replace this one.
  said = {core.IDENTITY_HEADER: core.identity_hash(identity)}
  if local is not None:
    served = local.identity
    served['corpus'] = {'path': local.corpus.path, **served['corpus']}
  not_ready = {503: protocol.response('Not warm yet.', protocol.READY)}
  secured = {401: protocol.response('No token.', protocol.ERROR)}
  secured = secured if token else {}

  @contextlib.asynccontextmanager
  async def lifespan(app: fastapi.FastAPI):
    batcher.start()
    warm = _warm(batcher, local, limits, programs)
    app.state.warm, app.state.batcher = asyncio.create_task(warm), batcher
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
    headers = dict(said)
    if error.retry_after_s > 0:
      headers['Retry-After'] = str(math.ceil(error.retry_after_s))
    return JSONResponse({'detail': error.detail}, error.status, headers)

  async def answered(http: fastapi.Request, work) -> Response:
    """The answer that `work` makes of the body, in time.

    The header X-Deadline-Ms says how long the client waits, in milliseconds;
    --deadline_s bounds it.
    """
    # Counted until the answer has been sent.
    request = http.state.held.enter_context(traffic.request())
    seconds = _deadline_s(http, limits)
    late = f'not answered within {seconds:g} s (--deadline_s, X-Deadline-Ms)'
    try:
      async with asyncio.timeout(seconds):
        body = await work(await request.body(http))
    except TimeoutError:
      raise Rejected(504, 'deadline', late) from None
    request.hold(len(body))
    return Response(body, headers=said, media_type='application/json')

  @app.post('/retrieve', openapi_extra=protocol.openapi(limits, bool(token)))
  async def retrieve(http: fastapi.Request) -> Response:
    """Ranks passages for each query; see retrieval/README.md."""

    async def work(body: bytes) -> bytes:
      asked = protocol.parse_request(body, limits)
      search = batcher.search(asked.queries, asked.topk)
      answers = await _while_there(http, search)
      return protocol.answer(answers, asked.return_scores)

    return await answered(http, work)

  document = getattr(searcher, 'document', None)

  async def opened(http: fastapi.Request) -> Response:
    """A piece of the document behind a passage; see retrieval/README.md."""

    async def work(body: bytes) -> bytes:
      name, *which = protocol.parse_document(body, limits)
      find = batcher.call(lambda: document(name))
      return protocol.piece(await _while_there(http, find), *which)

    return await answered(http, work)

  if document is not None:
    about = protocol.document_openapi(limits, bool(token))
    app.post('/document', openapi_extra=about)(opened)

  @app.get('/health')
  async def health(http: fastapi.Request) -> dict:
    """Describes the server; clients compare its identity."""
    status = {'status': 'ok', 'version': protocol.VERSION}
    known = {
      **served,
      'identity': identity,
      'documents': document is not None,
      'limits': dataclasses.asdict(limits),
      'served': dataclasses.asdict(batcher.counters),
      'waiting': {'requests': traffic.in_flight, 'queries': batcher.pending},
      'uptime_s': round(time.time() - traffic.started, 3),
    }
    return status | (known if http.state.known else {})

  @app.get('/ready', responses=not_ready)
  async def ready(http: fastapi.Request) -> Response:
    """503 until the warm-up has succeeded."""
    warm = http.app.state.warm
    if warm.done() and not warm.cancelled() and warm.exception() is None:
      return JSONResponse({'ready': True})
    return JSONResponse({'ready': False}, 503, {'Retry-After': '1'})

  @app.get('/metrics', response_class=PlainTextResponse, responses=secured)
  async def prometheus() -> Response:
    """Metrics of this process for Prometheus."""
    kind = 'text/plain; version=0.0.4; charset=utf-8'
    return Response(prometheus_client.generate_latest(), media_type=kind)

  return app


async def _warm(batcher: Batcher, local, limits: Limits, programs) -> None:
  if programs:
    await _compile(programs)
  if local is None:
    return
  queries = [f'{i} warm' for i in range(min(_WARM, limits.max_batch))]

  def search() -> None:
    with batcher.pace.timed(len(queries)):
      local.index.search(queries, limits.topk)

  task = asyncio.ensure_future(batcher.call(search))
  try:
    await asyncio.wait_for(asyncio.shield(task), limits.warm_s)
  except TimeoutError:
    _log.warning('the first search takes over %g s (--warm_s)', limits.warm_s)


async def _compile(programs: Sequence[Callable[[], None]]) -> None:
  threads = min(_COMPILERS, os.cpu_count() or 1)
  pool = concurrent.futures.ThreadPoolExecutor(threads, 'compile')
  try:
    with files.progress(len(programs), 'compile', unit=' programs') as bar:
      tasks = [pool.submit(program) for program in programs]
      for task in asyncio.as_completed(map(asyncio.wrap_future, tasks)):
        await task
        bar.update()
  finally:
    pool.shutdown(wait=False, cancel_futures=True)


def _deadline_s(http: fastapi.Request, limits: Limits) -> float:
  value = http.headers.get('x-deadline-ms')
  if value is None:
    return limits.deadline_s
  # float() would accept 'nan', 'inf' and '1_0'.
  if not (value.isascii() and value.isdigit() and 0 < len(value) < 10):
    where = ['header', 'x-deadline-ms']
    raise bad_request(where, 'must be a whole number of milliseconds')
  return min(limits.deadline_s, int(value) / 1000)


async def _while_there(http: fastapi.Request, search: Coroutine) -> Any:
  """The result of `search`, unless the client disconnects before.

  A client that gave up will ask again; searching for both requests would double
  the load that made it give up.
  """

  async def gone() -> None:
    while (await http.receive())['type'] != 'http.disconnect':
      pass

  tasks = [asyncio.ensure_future(search), asyncio.ensure_future(gone())]
  try:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    if tasks[0].done():
      return tasks[0].result()
    raise bad_request(['body'], 'the client has gone', 400)
  finally:
    for task in tasks:
      task.cancel()
