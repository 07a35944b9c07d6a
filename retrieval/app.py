"""The HTTP application: checks requests, batches queries, shapes answers.

`retrieval.server` runs it as a process; tests run it without one.
"""

import asyncio
import collections
import concurrent.futures
import dataclasses
import difflib
import json
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import fastapi
import numpy as np
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from retrieval.corpus import Corpus

VERSION = '1'  # of the protocol


class Index(Protocol):
  """Anything that ranks: see `BM25Index.search` for the shapes."""

  @property
  def parameters(self) -> Mapping[str, object]: ...
  def search(
    self, queries: Sequence[str], k: int
  ) -> tuple[np.ndarray, np.ndarray]: ...


@dataclasses.dataclass(frozen=True)
class Limits:
  """What one request may ask for, and how requests are batched."""

  topk: int = 3  # when a request names none
  max_topk: int = 100
  max_queries: int = 1024  # in one request
  max_query_bytes: int = 16384  # UTF-8, of one query
  max_pending: int = 65536  # queries taken and not yet searched, else 503
  batch_ms: float = 2.0  # how long the first request waits for others

  @property
  def max_body_bytes(self) -> int:
    # A byte of a query takes up to six in JSON (\u0000).
    return self.max_queries * (6 * self.max_query_bytes + 8) + 4096


class BadRequest(Exception):
  """A request that breaks the protocol: 422, or 413 for the body's size."""

  def __init__(self, where: Sequence[str | int], message: str, status=422):
    super().__init__(message)
    self.where, self.message, self.status = list(where), message, status


@dataclasses.dataclass(frozen=True)
class RetrieveRequest:
  queries: tuple[str, ...]
  topk: int
  return_scores: bool


_FIELDS = tuple(f.name for f in dataclasses.fields(RetrieveRequest))


def parse_request(body: bytes, limits: Limits) -> RetrieveRequest:
  """Checks the body of POST /retrieve.

  By hand rather than by a pydantic model: FastAPI's own 422 repeats the input,
  and fails (500) where that is not valid Unicode.

  Raises:
    BadRequest: naming the field and the mend.
  """
  try:
    data = json.loads(body.decode('utf-8'))
  except UnicodeDecodeError as error:
    raise BadRequest([], f'not UTF-8 at byte {error.start}') from None
  except (ValueError, RecursionError) as error:
    raise BadRequest([], f'not JSON: {error}') from None
  if not isinstance(data, dict):
    raise BadRequest([], 'must be a JSON object {"queries": [...]}')
  for name in data:
    if name not in _FIELDS:
      near = difflib.get_close_matches(name, _FIELDS, 1, 0.5)
      raise BadRequest(
        [_printable(name)],
        'unknown field; '
        + (f'meant {near[0]!r}?' if near else f'known: {", ".join(_FIELDS)}'),
      )
  scores = data.get('return_scores')
  if scores is not None and not isinstance(scores, bool):
    raise BadRequest(['return_scores'], 'must be true or false')
  return RetrieveRequest(
    _queries(data, limits), _topk(data, limits), bool(scores)
  )


def _queries(data: Mapping[str, Any], limits: Limits) -> tuple[str, ...]:
  if 'queries' not in data:
    raise BadRequest(['queries'], 'is missing; send a list of strings')
  queries = data['queries']
  if not isinstance(queries, list):
    raise BadRequest(['queries'], 'must be a list of strings')
  if not 1 <= len(queries) <= limits.max_queries:
    raise BadRequest(
      ['queries'],
      f'{len(queries)} queries; send 1 to {limits.max_queries} '
      '(--max_queries)',
    )
  for i, query in enumerate(queries):
    if not isinstance(query, str):
      raise BadRequest(['queries', i], 'must be a string')
    # surrogatepass: a lone surrogate is searched as the non-word it is.
    size = len(query.encode('utf-8', 'surrogatepass'))
    if size > limits.max_query_bytes:
      raise BadRequest(
        ['queries', i],
        f'{size} bytes; a query has at most {limits.max_query_bytes} '
        '(--max_query_bytes)',
      )
  return tuple(queries)


def _topk(data: Mapping[str, Any], limits: Limits) -> int:
  topk = data.get('topk')
  if topk is None:
    return limits.topk
  if isinstance(topk, bool) or not isinstance(topk, int):
    raise BadRequest(['topk'], 'must be an integer')
  if not 1 <= topk <= limits.max_topk:
    raise BadRequest(
      ['topk'], f'must lie between 1 and {limits.max_topk} (--max_topk)'
    )
  return topk


class Overloaded(Exception):
  """More queries wait than `Limits.max_pending`."""


@dataclasses.dataclass
class Counters:
  requests: int = 0  # accepted
  queries: int = 0  # in them
  searched: int = 0  # asked of the index, duplicates once
  batches: int = 0


class Batcher:
  """Puts the queries of many requests to the index as one call.

  The first request waits `batch_ms` for others; while the index works, those
  that arrive gather for the next call. A query that occurs twice in a batch
  is searched once, with the largest k: indexes order results totally, so a
  shorter list is a prefix of a longer one.
  """

  def __init__(self, index: Index, limits: Limits):
    self.counters = Counters()
    self._index, self._limits = index, limits
    self._waiting: collections.deque = collections.deque()
    self._pending = 0
    self._arrived = asyncio.Event()
    # One thread: the index is at work on one batch at a time.
    self._thread = concurrent.futures.ThreadPoolExecutor(1, 'index')
    self._task: asyncio.Task | None = None

  def start(self) -> None:
    self._task = asyncio.create_task(self._run())

  async def stop(self) -> None:
    if self._task is not None:
      self._task.cancel()
      await asyncio.gather(self._task, return_exceptions=True)
    self._thread.shutdown(wait=False, cancel_futures=True)

  async def search(
    self, queries: Sequence[str], k: int
  ) -> list[list[tuple[int, float]]]:
    """Ranks the queries: for each, (position, score) best first, at most k.

    Raises:
      Overloaded: too many queries wait already.
    """
    if self._pending + len(queries) > self._limits.max_pending:
      raise Overloaded
    future = asyncio.get_running_loop().create_future()
    self.counters.requests += 1
    self.counters.queries += len(queries)
    self._pending += len(queries)
    self._waiting.append((queries, k, future))
    self._arrived.set()
    return await future

  async def _run(self) -> None:
    while True:
      await self._arrived.wait()
      await asyncio.sleep(self._limits.batch_ms / 1000)
      batch = self._take()
      if not self._waiting:
        self._arrived.clear()
      if not batch:
        continue
      try:
        await self._answer(batch)
      except Exception as error:  # the index broke: this batch fails, not all
        for _, _, future in batch:
          if not future.done():
            future.set_exception(error)
      finally:
        self._pending -= sum(len(queries) for queries, _, _ in batch)

  def _take(self) -> list:
    """Whole requests, at most max_queries queries; one at the least.

    Without those whose client has gone; none if all have.
    """
    batch, size = [], 0
    while self._waiting:
      queries, _, future = self._waiting[0]
      if future.done():
        self._pending -= len(queries)
        self._waiting.popleft()
        continue
      size += len(queries)
      if batch and size > self._limits.max_queries:
        break
      batch.append(self._waiting.popleft())
    return batch

  async def _answer(self, batch: list) -> None:
    rows = {}  # query -> its row in the call
    for queries, _, _ in batch:
      for query in queries:
        rows.setdefault(query, len(rows))
    most = max(k for _, k, _ in batch)
    self.counters.searched += len(rows)
    self.counters.batches += 1
    ids, scores = await asyncio.get_running_loop().run_in_executor(
      self._thread, self._index.search, list(rows), most
    )
    ranked = [
      [(i, s) for i, s in zip(*row, strict=True) if i >= 0]
      for row in zip(ids.tolist(), scores.tolist(), strict=True)
    ]
    for queries, k, future in batch:
      if not future.done():  # the client may have gone
        future.set_result([ranked[rows[query]][:k] for query in queries])


def create_app(
  corpus: Corpus, index: Index, limits: Limits = Limits()
) -> fastapi.FastAPI:
  """The HTTP application; its lifespan starts and stops the batcher."""
  batcher = Batcher(index, limits)
  started = time.time()

  @asynccontextmanager
  async def lifespan(_: fastapi.FastAPI) -> AsyncIterator[None]:
    batcher.start()
    yield
    await batcher.stop()

  app = fastapi.FastAPI(
    title='searchrl retrieval', version=VERSION, lifespan=lifespan
  )

  @app.exception_handler(BadRequest)
  async def bad_request(_: fastapi.Request, error: BadRequest) -> Response:
    detail = {
      'loc': ['body', *error.where],
      'msg': error.message,
      'type': 'value_error',
    }
    return JSONResponse({'detail': [detail]}, error.status)

  @app.exception_handler(Overloaded)
  async def overloaded(_: fastapi.Request, error: Overloaded) -> Response:
    return JSONResponse(
      {'detail': 'too many queries are waiting; try again'},
      503,
      {'Retry-After': '1'},
    )

  @app.post('/retrieve', openapi_extra=_openapi(limits))
  async def retrieve(http: fastapi.Request) -> Response:
    """Ranks passages for each query; see retrieval/README.md."""
    request = parse_request(await _body(http, limits.max_body_bytes), limits)
    ranked = await _while_there(
      http, batcher.search(request.queries, request.topk)
    )

    def shown(position: int, score: float) -> dict:
      document = {
        'id': corpus.ids[position],
        'contents': corpus.contents[position],
      }
      if not request.return_scores:
        return document
      return {'document': document, 'score': score}

    result = [[shown(*found) for found in row] for row in ranked]
    body = json.dumps({'result': result}, ensure_ascii=False, allow_nan=False)
    return Response(body.encode(), media_type='application/json')

  @app.get('/health')
  async def health() -> dict:
    """What is served: a client compares the hash with its expectation."""
    return {
      'status': 'ok',
      'version': VERSION,
      'corpus': {
        'path': corpus.path, 'count': len(corpus), 'sha256': corpus.sha256
      },
      'index': dict(index.parameters),
      'limits': dataclasses.asdict(limits),
      'served': dataclasses.asdict(batcher.counters),
      'uptime_s': round(time.time() - started, 3),
    }

  return app


async def _body(http: fastapi.Request, limit: int) -> bytes:
  body = bytearray()
  try:
    async for chunk in http.stream():
      body += chunk
      if len(body) > limit:
        raise BadRequest(
          [], f'more than {limit} bytes; send fewer queries', 413
        )
  except ClientDisconnect:  # nobody reads this; it keeps the log quiet
    raise BadRequest([], 'cut short', 400) from None
  return bytes(body)


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
      raise BadRequest([], 'the client has gone', 400)
    return tasks[0].result()
  finally:
    for task in tasks:
      task.cancel()


def _openapi(limits: Limits) -> dict:
  query = {'type': 'string', 'maxLength': limits.max_query_bytes}
  schema = {
    'type': 'object',
    'required': ['queries'],
    'additionalProperties': False,
    'properties': {
      'queries': {
        'type': 'array',
        'items': query,
        'minItems': 1,
        'maxItems': limits.max_queries,
      },
      'topk': {
        'type': ['integer', 'null'],
        'minimum': 1,
        'maximum': limits.max_topk,
      },
      'return_scores': {'type': ['boolean', 'null'], 'default': False},
    },
  }
  return {
    'requestBody': {
      'required': True,
      'content': {'application/json': {'schema': schema}},
    },
    'responses': {
      '413': {'description': 'The body is too large.'},
      '422': {'description': 'The request is wrong; names the field.'},
      '503': {'description': 'Busy; Retry-After says when to come back.'},
    },
  }


def _printable(name: str) -> str:
  """A field's name that any response can carry, however hostile."""
  return name[:80].encode('ascii', 'backslashreplace').decode()
