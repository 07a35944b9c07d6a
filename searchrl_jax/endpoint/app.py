"""The endpoint as an ASGI application: OpenAI's chat completions over sessions.

  GET  /v1/models
  POST /v1/chat/completions    of the session that the key names
  POST /v1/reward              {"reward": 0.5}: what the program says it earned
  POST /retrieve               {"queries": [...], "topk": 3}: a search of the
                               run, in the protocol of retrieval/README.md

Errors are as OpenAI's clients expect them: {"error": {"message", "type",
"param", "code"}} with the status 400 (the request), 401 (the key), 404 (no such
address), 409 (the session is busy), 410 (it has ended), 413 (too large), 500 or
502 (a search failed).
"""

import asyncio
from collections.abc import Mapping
import contextlib
import json
import socket
import time
from typing import Any
import uuid

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
import uvicorn

from retrieval.corpus import join_contents
from searchrl_jax.endpoint.sessions import (
  Busy,
  Closed,
  Reply,
  Request,
  SearchFailed,
  Session,
  Sessions,
)
from searchrl_jax.text import chat
from searchrl_jax.text.chat import ChatError

MODEL = 'policy'
BODY = 10 << 20  # bytes of a request
# Fields that change nothing here, or only how others show a reply.
_IGNORED = (
  'user metadata store service_tier parallel_tool_calls stream_options '
  'reasoning_effort verbosity prompt_cache_key safety_identifier modalities '
  'presence_penalty frequency_penalty logit_bias top_logprobs prediction'
).split()
_NEUTRAL = {'presence_penalty': 0, 'frequency_penalty': 0, 'logit_bias': {}}
_COUNT = int, lambda x: x >= 1, 'a count of tokens'
_REAL = int, float
# Field -> its type, which values are good, and what they are.
_NUMBERS = {
  'max_completion_tokens': _COUNT,
  'max_tokens': _COUNT,
  'temperature': (_REAL, lambda x: 0 <= x <= 2, '0 to 2'),
  'top_p': (_REAL, lambda x: 0 < x <= 1, 'above 0 to 1'),
  'seed': (int, lambda x: 0 <= x < 1 << 32, '0 to 2**32 - 1'),
  'reward': (_REAL, lambda x: abs(x) < 1 << 64, 'a finite number'),
  'topk': (int, lambda x: 1 <= x <= 100, '1 to 100'),
}
_STATUS = {
  ChatError: 400,
  RecursionError: 400,  # JSON in JSON in JSON ...
  Busy: 409,
  Closed: 410,
  ClientDisconnect: 499,
  SearchFailed: 502,
}


class HttpError(HTTPException):
  """An error with a status; `param` and `code` as OpenAI's errors have them."""

  def __init__(self, status, message, param=None, code=None, headers=None):
    super().__init__(status, message, headers)
    self.param, self.code = param, code


def number(body: Mapping[str, Any], name: str) -> Any:
  """A number of a request; None: it has none.

  Raises:
    ChatError: names the field, and what it may be.
  """
  value, (kind, good, what) = body.get(name), _NUMBERS[name]
  if value is None:
    return None
  wrong = isinstance(value, bool) or not isinstance(value, kind)
  if wrong or not good(value):
    raise ChatError(f'{name}={value!r:.40}: {what}', name)
  return value


def read(body: Mapping[str, Any]) -> tuple[Request, dict[str, Any]]:
  """The request of a body, and how its reply is sent: stream, usage, logprobs.

  Raises:
    ChatError: names the field.
  """
  known = 'model messages tools tool_choice max_tokens max_completion_tokens '
  known += 'temperature top_p stop seed n stream logprobs response_format '
  known += 'include_stop_str_in_output'
  unknown = [k for k in body if k not in (*known.split(), *_IGNORED)]
  if unknown:
    raise ChatError(f'{unknown[0]!r} is not supported here', unknown[0])
  for name, neutral in _NEUTRAL.items():
    if body.get(name) not in (None, neutral):
      raise ChatError(f'{name} is not supported: leave it out', name)
  if body.get('n') not in (None, 1):
    raise ChatError('n: one reply to a request of a session', 'n')
  form = body.get('response_format')
  if form not in (None, {'type': 'text'}):
    raise ChatError('response_format: only text', 'response_format')
  choice = body.get('tool_choice')
  if choice not in (None, 'auto', 'none', 'required'):
    raise ChatError(f'tool_choice={choice!r:.40}: auto or none', 'tool_choice')
  stops = body.get('stop') or []
  stops = [stops] if isinstance(stops, str) else stops
  if not isinstance(stops, list) or not all(
    isinstance(s, str) and s for s in stops
  ):
    raise ChatError(f'stop={stops!r:.40}: a text, or a list of them', 'stop')
  names = 'max_completion_tokens', 'max_tokens'
  tokens = [number(body, name) for name in names]
  tools = chat.read_tools(body.get('tools'))
  request = Request(
    chat.read_messages(body.get('messages')),
    tools=() if choice == 'none' else tools,
    max_tokens=next((n for n in tokens if n), 0),
    temperature=number(body, 'temperature'),
    top_p=number(body, 'top_p'),
    stops=tuple(stops),
    seed=number(body, 'seed'),
    shows_stop=bool(body.get('include_stop_str_in_output')),
  )
  options = body.get('stream_options') or {}
  shown = {
    'stream': bool(body.get('stream')),
    'usage': isinstance(options, dict) and bool(options.get('include_usage')),
    'logprobs': bool(body.get('logprobs')),
  }
  return request, shown


def make(sessions: Sessions, tokenizer) -> Starlette:
  """The application."""

  def session(http: HttpRequest) -> Session:
    kind, _, key = http.headers.get('authorization', '').partition(' ')
    if kind.lower() != 'bearer' or not key:
      raise HttpError(401, 'give the key of a session: Authorization: Bearer')
    try:
      return sessions.find(key.strip())
    except Closed as e:
      raise HttpError(401, str(e)) from e

  async def completions(http: HttpRequest) -> Response:
    own = session(http)
    request, shown = read(await read_body(http))
    reply = await _unless_gone(http, own.reply(request))
    about = {
      'id': f'chatcmpl-{uuid.uuid4().hex}',
      'created': int(time.time()),
      'model': MODEL,
    }
    if shown['stream']:
      lines = _lines(reply, about, shown['usage'])
      return StreamingResponse(lines, media_type='text/event-stream')
    message: dict[str, Any] = {'role': 'assistant', 'content': reply.content}
    if reply.calls:
      message |= {'content': reply.content or None, 'tool_calls': _calls(reply)}
    choice = {'index': 0, 'message': message, 'finish_reason': reply.finish}
    choice['logprobs'] = None
    if shown['logprobs']:
      choice['logprobs'] = _logprobs(reply, tokenizer)
    body = {'object': 'chat.completion', 'choices': [choice]}
    return JSONResponse(about | body | {'usage': _usage(reply)})

  async def reward(http: HttpRequest) -> Response:
    own = session(http)
    value = number(await read_body(http), 'reward')
    if value is None:
      raise HttpError(400, 'reward: expected a number', 'reward')
    if own.returned is not None:
      raise HttpError(409, f'the session has its reward: {own.returned}')
    own.returned = float(value)
    return JSONResponse({'reward': own.returned})

  async def retrieve(http: HttpRequest) -> Response:
    own, body = session(http), await read_body(http)
    queries, k = body.get('queries'), number(body, 'topk') or 3
    good = isinstance(queries, list) and all(
      isinstance(q, str) for q in queries
    )
    if not good or not queries:
      raise HttpError(400, 'queries: expected a list of texts', 'queries')
    found = await own.search(queries, k)
    return JSONResponse(
      {'result': [[*map(_hit, one.passages)] for one in found]}
    )

  async def models(http: HttpRequest) -> Response:
    session(http)
    one = {'id': MODEL, 'object': 'model', 'created': 0, 'owned_by': 'you'}
    return JSONResponse({'object': 'list', 'data': [one]})

  return Starlette(
    routes=[
      Route('/v1/chat/completions', completions, methods=['POST']),
      Route('/v1/reward', reward, methods=['POST']),
      Route('/retrieve', retrieve, methods=['POST']),
      Route('/v1/models', models),
    ],
    exception_handlers=HANDLERS,
  )


def described(error: BaseException) -> tuple[int, dict[str, Any]]:
  """The status of an error, and what OpenAI's clients read of it."""
  status = getattr(error, 'status_code', _STATUS.get(type(error), 500))
  about = {
    'message': getattr(error, 'detail', str(error)),
    'type': 'invalid_request_error' if status < 500 else 'server_error',
    'param': getattr(error, 'param', None),
    'code': getattr(error, 'code', None),
  }
  return status, {'error': about}


async def _failed(http: HttpRequest, error: Exception) -> Response:
  status, content = described(error)
  headers = getattr(error, 'headers', None)
  # In ASCII: a name of the client's may hold half a surrogate pair.
  return Response(json.dumps(content), status, headers, 'application/json')


HANDLERS = dict.fromkeys((*_STATUS, HTTPException, Exception), _failed)


def _hit(passage) -> dict[str, Any]:
  contents = join_contents(passage.title, passage.text)
  document = {'id': passage.id, 'contents': contents}
  return {'document': document, 'score': passage.score}


async def read_body(http: HttpRequest) -> dict[str, Any]:
  """The JSON object of a request; raises HttpError."""
  data = bytearray()
  async for part in http.stream():
    data += part
    if len(data) > BODY:
      raise HttpError(413, f'the body is above {BODY} bytes')
  try:
    found = json.loads(data)
  except (ValueError, RecursionError) as e:
    raise HttpError(400, f'the body is not JSON: {e}') from e
  if not isinstance(found, dict):
    raise HttpError(400, 'the body is no JSON object')
  return found


async def _unless_gone(http: HttpRequest, work) -> Reply:
  """The result; stops the work at once if the client has gone."""
  task = asyncio.ensure_future(work)

  async def gone():
    while (await http.receive())['type'] != 'http.disconnect':
      pass

  watch = asyncio.ensure_future(gone())
  try:
    await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
      raise ClientDisconnect
    if task.cancelled():
      raise Closed('the session has ended')
    return task.result()
  finally:
    for each in (task, watch):
      each.cancel()
    await asyncio.gather(task, watch, return_exceptions=True)


def _calls(reply: Reply) -> list[dict]:
  return [
    {
      'id': f'call_{uuid.uuid4().hex[:24]}',
      'type': 'function',
      'function': {'name': c.name, 'arguments': c.arguments},
    }
    for c in reply.calls
  ]


def _usage(reply: Reply) -> dict[str, int]:
  n, prompt = len(reply.completion.ids), reply.prompt_tokens
  return {
    'prompt_tokens': prompt,
    'completion_tokens': n,
    'total_tokens': prompt + n,
  }


def _logprobs(reply: Reply, tokenizer) -> dict:
  found = zip(reply.completion.ids.tolist(), reply.completion.logps.tolist())
  return {
    'content': [
      {
        'token': tokenizer.decode([i]),
        'logprob': logp,
        'bytes': [*tokenizer.token_bytes(i)],
        'top_logprobs': [],
      }
      for i, logp in found
    ]
  }


async def _lines(reply: Reply, about: dict, usage: bool):
  """The reply as server-sent events."""

  def line(delta: dict, finish=None) -> str:
    choice = {'index': 0, 'delta': delta, 'finish_reason': finish}
    chunk = about | {'object': 'chat.completion.chunk', 'choices': [choice]}
    return f'data: {json.dumps(chunk)}\n\n'

  yield line({'role': 'assistant', 'content': ''})
  if reply.content:
    yield line({'content': reply.content})
  for n, call in enumerate(_calls(reply)):
    yield line({'tool_calls': [{'index': n} | call]})
  yield line({}, reply.finish)
  if usage:
    last = about | {'object': 'chat.completion.chunk', 'choices': []}
    yield f'data: {json.dumps(last | {"usage": _usage(reply)})}\n\n'
  yield 'data: [DONE]\n\n'


@contextlib.asynccontextmanager
async def serving(app, host='127.0.0.1', port=0):
  """Serves the application on the running event loop; gives its base URL."""
  with socket.create_server((host, port)) as listener:
    config = uvicorn.Config(
      app,
      log_level='warning',
      lifespan='off',
      # Of clients that do not read their reply at the end.
      timeout_graceful_shutdown=5,
    )
    server = uvicorn.Server(config)
    task = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
      while not server.started:
        if task.done():
          task.result()
        await asyncio.sleep(0.01)
      yield f'http://{host}:{listener.getsockname()[1]}/v1'
    finally:
      server.should_exit = True
      await task
