"""The protocol: checks requests, formats answers, and describes both.

The formats are those of Search-R1; retrieval/README.md describes them.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import itertools
import json
import re
from typing import Any, NamedTuple
import zlib

import orjson

from retrieval.core import Answer, Found, SearchFailed

VERSION = '1'
_TERM = re.compile(r'\w+')
# Content-Encoding -> forms that zlib tries. Some clients send deflate raw.
_FORMS = {'gzip': (31,), 'x-gzip': (31,), 'deflate': (15, -15)}


def _limit(default: float, text: str) -> Any:
  return dataclasses.field(default=default, metadata={'help': text})


@dataclasses.dataclass(frozen=True)
class Limits:
  """Limits of requests and parameters of their batching; flags."""

  topk: int = _limit(3, 'Passages for a query when a request names no topk.')
  max_topk: int = _limit(100, 'Largest topk.')
  piece_chars: int = _limit(4000, 'Most characters of a piece of a document.')
  max_queries: int = _limit(4096, 'Most queries in one request, else 422.')
  max_batch: int = _limit(1024, 'Most queries in one call of the index.')
  max_query_bytes: int = _limit(16384, 'Bytes (UTF-8) read of a query.')
  max_query_terms: int = _limit(256, 'Words read of a query.')
  max_pending: int = _limit(65536, 'Most queries not yet answered, else 503.')
  max_requests: int = _limit(1024, 'Most requests in flight, else 429.')
  max_body_bytes: int = _limit(1 << 25, 'Most bytes of one request, else 413.')
  max_bytes: int = _limit(1 << 28, 'Most bytes in flight in all, else 503.')
  deadline_s: float = _limit(60.0, 'Seconds from head to answer, else 504.')
  head_s: float = _limit(10.0, "Seconds to send a request's head.")
  batch_ms: float = _limit(2.0, 'How long a request waits for others.')
  piece_ms: float = _limit(250.0, 'How long one call of the index should take.')
  warm_s: float = _limit(60.0, 'How long the first search may delay the start.')


class Rejected(Exception):
  """A request that is refused or cannot be answered.

  Attributes:
    status: the HTTP status.
    detail: of the body: a sentence, or a list of problems as in FastAPI.
    reason: label of the metric.
    retry_after_s: seconds for Retry-After; 0: none.
  """

  def __init__(self, status: int, reason: str, detail: Any, retry_after_s=0.0):
    super().__init__(detail)
    self.status, self.reason, self.detail = status, reason, detail
    self.retry_after_s = retry_after_s


def bad_request(where: Sequence, message: str, status: int = 422) -> Rejected:
  """The error of a request that is invalid at the path `where`."""
  detail = {'loc': list(where), 'msg': message, 'type': 'value_error'}
  return Rejected(status, 'request', [detail])


class RetrieveRequest(NamedTuple):
  queries: tuple[str, ...]
  topk: int
  return_scores: bool


_MOST = 1 << 20  # pieces of a document


def unpacked(body: bytes, encoding: str, most: int) -> bytes:
  """A body without its Content-Encoding.

  Raises:
    Rejected: 413 unpacked it has more than `most` bytes, of which no more are
      in memory; 415 another encoding than gzip or deflate; 422 it is damaged.
  """
  encoding = encoding.strip().lower()
  if encoding in ('', 'identity'):
    return body
  if encoding not in _FORMS:
    where, fix = ['header', 'content-encoding'], 'send gzip, deflate or none'
    raise bad_request(where, f'{encoding[:40]!r} is not known; {fix}', 415)
  for form in _FORMS[encoding]:
    unpacker = zlib.decompressobj(form)
    try:
      out = unpacker.decompress(body, most + 1)
    except zlib.error:
      continue
    if len(out) > most:
      raise too_large(most)
    if unpacker.eof and not unpacker.unused_data:
      return out
  raise _bad([], f'not one whole {encoding} stream (Content-Encoding)')


def too_large(most: int) -> Rejected:
  problem = f'more than --max_body_bytes={most}; send fewer queries'
  return bad_request(['body'], problem, 413)


def parse_request(body: bytes, limits: Limits) -> RetrieveRequest:
  """Checks the body of POST /retrieve, and cuts queries that are too long.

  A policy may write any query; refusing it would fail all other queries of the
  request.

  This does not use a pydantic model because FastAPI's own 422 repeats the
  input, and fails (500) if that is not valid Unicode.

  Raises:
    Rejected: the message names the field and the fix.
  """
  data = _object_of(body, RetrieveRequest._fields)
  scores, queries = data.get('return_scores'), data.get('queries')
  if scores is not None and not isinstance(scores, bool):
    raise _bad(['return_scores'], 'must be true or false')
  if not isinstance(queries, list):
    raise _bad(['queries'], 'must be a list of strings')
  if len(queries) > (most := limits.max_queries):
    fix = f'send at most {most} (--max_queries)'
    raise _bad(['queries'], f'{len(queries)} queries; {fix}')
  for i, query in enumerate(queries):
    if not isinstance(query, str):
      raise _bad(['queries', i], 'must be a string')
  read = tuple(cut(query, limits) for query in queries)
  topk = _whole(data, 'topk', limits.topk, limits.max_topk, ' (--max_topk)')
  return RetrieveRequest(read, topk, bool(scores))


def parse_document(body: bytes, limits: Limits) -> tuple[str, int, int]:
  """Checks the body of POST /document: an id, the number of a piece, and the
  characters of one.

  Raises:
    Rejected: the message names the field and the fix.
  """
  data, most = _object_of(body, ('id', 'piece', 'chars')), limits.piece_chars
  if not isinstance(data.get('id'), str):
    raise _bad(['id'], 'must be a string')
  size = _whole(data, 'chars', most, most, ' (--piece_chars)')
  return data['id'], _whole(data, 'piece', 1, _MOST), size


def _object_of(body: bytes, fields: Sequence[str]) -> dict[str, Any]:
  """The JSON object of a body, which has no other fields."""
  try:
    data = json.loads(body.decode('utf-8'))
  except (ValueError, RecursionError) as error:
    gzipped = body.startswith(b'\x1f\x8b')
    why = 'gzip without the header Content-Encoding: gzip' if gzipped else error
    raise _bad([], f'not JSON: {why}') from None
  if not isinstance(data, dict):
    raise _bad([], f'must be a JSON object {{"{fields[0]}": ...}}')
  for name in data:
    if name not in fields:
      # A response cannot contain a lone surrogate.
      where = name[:80].encode('utf-8', 'replace').decode()
      raise _bad([where], f'unknown field; known: {", ".join(fields)}')
  return data


def cut(query: str, limits: Limits) -> str:
  """The part of a query that is searched."""
  if len(query) * 4 > limits.max_query_bytes:  # a character has up to 4 bytes
    # A lone surrogate is not part of a word.
    data = query.encode('utf-8', 'replace')[: limits.max_query_bytes]
    query = data.decode('utf-8', 'ignore')
  if len(query) > 2 * limits.max_query_terms:  # words do not touch
    ends = (word.end() for word in _TERM.finditer(query))
    end = next(itertools.islice(ends, limits.max_query_terms - 1, None), None)
    query = query[:end]
  return query


def _whole(data: Mapping, name: str, usual: int, most: int, flag='') -> int:
  """The number from 1 in a field; `usual` where it is left out."""
  value = data.get(name)
  if value is None:
    return usual
  # JSON does not distinguish 3.0 from 3.
  whole = type(value) is int or isinstance(value, float) and value.is_integer()
  if not whole or not 1 <= value <= most:
    raise _bad([name], f'must be an integer from 1 to {most}{flag}')
  return int(value)


def _bad(where: Sequence[str | int], message: str) -> Rejected:
  return bad_request(['body', *where], message)


def answer(found: Sequence[Answer], scores: bool) -> bytes:
  """The body of a whole answer.

  Raises:
    Rejected: queries failed. 503: a retry may succeed; 502: it will not.
  """
  waits, detail = [], []
  for i, row in enumerate(found):
    if isinstance(row, SearchFailed):
      where = {'loc': ['body', 'queries', i], 'type': 'search_failed'}
      detail.append({**where, 'msg': str(row)})
      waits.append(row.retry_after_s)
  if detail:
    if None in waits:
      raise Rejected(502, 'failed', detail)
    raise Rejected(503, 'failed', detail, max(1.0, *waits))

  def shown(one: Found) -> dict[str, object]:
    document = {'id': one.id, 'contents': one.contents}
    return {'document': document, 'score': one.score} if scores else document

  return _packed([[shown(one) for one in row] for row in found])


def piece(text: str | None, number: int, size: int) -> bytes:
  """The body of an answer with a piece of a document; None: there is none."""
  if text is None:
    return _packed(None)
  part = text[(number - 1) * size : number * size]
  return _packed({'contents': part, 'pieces': max(1, -(-len(text) // size))})


def _packed(result: Any) -> bytes:
  try:
    return orjson.dumps({'result': result})
  except TypeError:  # a lone surrogate, shown as '?'
    text = json.dumps({'result': result}, ensure_ascii=False)
    return text.encode('utf-8', 'replace')


def openapi(limits: Limits, token: bool) -> dict[str, object]:
  """The OpenAPI description of POST /retrieve."""
  request = _object(queries=_array(_TEXT) | {'maxItems': limits.max_queries})
  scores = {'type': ['boolean', 'null'], 'default': False}
  optional = {'topk': _count(limits.max_topk), 'return_scores': scores}
  document = _object(id=_TEXT, contents=_TEXT)
  scored = _object(document=document, score={'type': 'number'})
  rows = _array({'anyOf': [_array(document), _array(scored)]})
  about = 'One list for each query, best first.'
  return _operation(request, optional, about, rows, token)


def document_openapi(limits: Limits, token: bool) -> dict[str, object]:
  """The OpenAPI description of POST /document."""
  optional = {'piece': _count(_MOST), 'chars': _count(limits.piece_chars)}
  found = _object(contents=_TEXT, pieces={'type': 'integer'})
  either = {'anyOf': [found, {'type': 'null'}]}
  about = 'A piece; null: there is no such document.'
  return _operation(_object(id=_TEXT), optional, about, either, token)


def _operation(
  request: dict, optional: dict, about: str, result: dict, token: bool
) -> dict[str, object]:
  """Of a request with further, optional fields; about, result: the answer."""
  fields = request['properties'] | optional
  request |= {'properties': fields, 'additionalProperties': False}
  said = {
    '400': 'The body was cut short.',
    '413': 'The body is too large.',
    '415': 'The Content-Encoding is not known.',
    '422': 'The request is wrong; names the field.',
    '429': 'Too many requests in flight; Retry-After says when to come back.',
    '502': 'A query cannot be answered; names it.',
    '503': 'Busy, or a query failed; Retry-After says when to come back.',
    '504': 'Not answered within the deadline.',
  } | ({'401': 'The token is missing or wrong.'} if token else {})
  responses = {status: response(text, ERROR) for status, text in said.items()}
  responses['200'] = response(about, _object(result=result))
  body = {'required': True, 'content': _json(request)}
  return {'requestBody': body, 'responses': responses}


def response(description: str, schema: dict) -> dict[str, object]:
  return {'description': description, 'content': _json(schema)}


def _json(schema: dict) -> dict:
  return {'application/json': {'schema': schema}}


def _array(items: dict) -> dict:
  return {'type': 'array', 'items': items}


def _count(most: int) -> dict:
  return {'type': ['integer', 'null'], 'minimum': 1, 'maximum': most}


def _object(**properties: dict) -> dict:
  return {'type': 'object', 'required': [*properties], 'properties': properties}


_TEXT = {'type': 'string'}
_PLACE = _array({'type': ['string', 'integer']})
_PROBLEM = _object(loc=_PLACE, msg=_TEXT, type=_TEXT)
READY = _object(ready={'type': 'boolean'})
ERROR = _object(detail={'anyOf': [_TEXT, _array(_PROBLEM)]})
