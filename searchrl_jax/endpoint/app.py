"""The endpoint as an ASGI application: OpenAI's chat completions over sessions.

  GET  /v1/models
  POST /v1/chat/completions    of the session that the key names
  POST /v1/reward              {"reward": 0.5}: what the program says it earned
  POST /retrieve               {"queries": [...], "topk": 3}: a search of the
                               run, in the protocol of retrieval/README.md

Errors are as OpenAI's clients expect them: {"error": {"message", "type",
"param", "code"}} with the status 400 (the request), 401 (the key; also that of
a session that has ended), 404 (no such address), 409 (the session is busy), 410
(it ended meanwhile), 413 (too large), 500 or 502 (a search failed).
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
import contextlib
import functools
import json
import re
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
from starlette.types import ASGIApp
import uvicorn

from retrieval.corpus import join_contents
from searchrl_jax.devices.signals import gather
from searchrl_jax.endpoint.sessions import (
  Busy,
  Closed,
  Reply,
  Request,
  SearchFailed,
  Session,
  Sessions,
)
from searchrl_jax.endpoint.streaming import Deltas, Tell
from searchrl_jax.engines.core import LEAST_TOP_P
from searchrl_jax.text import chat
from searchrl_jax.text.chat import ChatError

Ask = Callable[[Tell | None], Any]  # ids as they come -> awaitable Reply
Tells = Callable[[dict], None]  # an event

MODEL = 'policy'
BODY = 10 << 20  # bytes of a request
_FOLLOWED = (
  'model messages tools tool_choice max_tokens max_completion_tokens n stop '
  'temperature top_p seed stream logprobs include_stop_str_in_output'
).split()
# Fields that change nothing here, or only how others show a reply.
_IGNORED = (
  'user metadata store service_tier parallel_tool_calls stream_options '
  'reasoning_effort verbosity prompt_cache_key safety_identifier'
).split()
_NEUTRAL = {  # field -> the value that means the same as none
  'response_format': {'type': 'text'},
  'presence_penalty': 0,
  'frequency_penalty': 0,
  'logit_bias': {},
  'top_logprobs': 0,
  'modalities': ['text'],
  'prediction': None,
}
_INT, _REAL = (int,), (int, float)
_COUNT = _INT, lambda x: x >= 1, '1 or more'
# Field -> its types, which values are good, and what they are.
_NUMBERS = {
  'max_completion_tokens': _COUNT,
  'max_tokens': _COUNT,
  'n': _COUNT,
  'temperature': (_REAL, lambda x: 0 <= x <= 2, '0 to 2'),
  'top_p': (_REAL, lambda x: LEAST_TOP_P <= x <= 1, f'{LEAST_TOP_P} to 1'),
  'seed': (_INT, lambda x: 0 <= x < 1 << 32, '0 to 2**32 - 1'),
  'reward': (_REAL, lambda x: abs(x) < 1 << 64, 'a finite number'),
  'topk': (_INT, lambda x: 1 <= x <= 100, '1 to 100'),
}
QUERIES = 1000  # of a request; others wait while they are searched
_COLD = 0.01  # below this temperature, servers raise it: it is greedy here
_ENDED = 'the session has ended'
_HALF = re.compile('[\ud800-\udfff]')  # of a surrogate pair
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
  value, (kinds, good, what) = body.get(name), _NUMBERS[name]
  if value is None:
    return None
  if type(value) not in kinds or not good(value):  # True is no number
    raise ChatError(f'{name}={value!r:.40}: {what}', name)
  return value


def switch(body: Mapping[str, Any], name: str) -> bool:
  """A field that is true or false; raises ChatError if it is neither."""
  value = body.get(name) or False
  if not isinstance(value, bool):
    raise ChatError(f'{name}={value!r:.40}: true or false', name)
  return value


def texts(value: Any) -> list[str]:
  """The value if it is a list of texts, else none."""
  good = isinstance(value, list) and all(isinstance(x, str) for x in value)
  return value if good else []


def read(
  body: Mapping[str, Any], most: int = 1
) -> tuple[Request, dict[str, Any]]:
  """The request of a body, and how it is answered: stream, usage, logprobs, n.

  most: replies to one request.

  Raises:
    ChatError: names the field.
  """
  for name in body:
    if name not in (*_FOLLOWED, *_IGNORED, *_NEUTRAL):
      raise ChatError(f'{name!r} is not supported here', name)
  for name, neutral in _NEUTRAL.items():
    if body.get(name) not in (None, neutral):
      what = f'{name}: only {neutral!r} is supported; leave it out'
      raise ChatError(what, name)
  n = number(body, 'n') or 1
  if n > most:
    raise ChatError(f'n={n}: at most {most} to a request', 'n')
  choice = body.get('tool_choice')
  if choice not in (None, 'auto', 'none', 'required'):
    raise ChatError(f'tool_choice={choice!r:.40}: auto or none', 'tool_choice')
  stops = body.get('stop') or []
  stops = [stops] if isinstance(stops, str) else stops
  # Half a surrogate pair has no bytes, in which stop strings are found.
  if texts(stops) != stops or any(not s or _HALF.search(s) for s in stops):
    raise ChatError(f'stop={stops!r:.40}: a text, or a list of them', 'stop')
  warm = number(body, 'temperature')
  tokens = number(body, 'max_tokens')
  tools = chat.read_tools(body.get('tools'))
  request = Request(
    chat.read_messages(body.get('messages')),
    tools=() if choice == 'none' else tools,
    max_tokens=number(body, 'max_completion_tokens') or tokens or 0,
    temperature=0.0 if warm is not None and warm < _COLD else warm,
    top_p=number(body, 'top_p'),
    stops=tuple(stops),
    seed=number(body, 'seed'),
    shows_stop=switch(body, 'include_stop_str_in_output'),
  )
  options = body.get('stream_options') or {}
  if not isinstance(options, dict):
    raise ChatError('stream_options: expected an object', 'stream_options')
  shown = {name: switch(body, name) for name in ('stream', 'logprobs')}
  return request, shown | {'usage': switch(options, 'include_usage'), 'n': n}


def make(sessions: Sessions, tokenizer) -> Starlette:
  """The application."""

  def session(http: HttpRequest) -> Session:
    try:
      return sessions.find(key_of(http))
    except Closed as e:
      raise HttpError(401, str(e)) from e

  async def completions(http: HttpRequest) -> ASGIApp:
    own = session(http)
    request, shown = read(await read_body(http))
    ask = functools.partial(own.reply, request)
    return await respond(http, [ask], request, shown, MODEL, tokenizer)

  async def reward(http: HttpRequest) -> Response:
    session(http)
    value = number(await read_body(http), 'reward')
    own = session(http)  # it may have ended while the body came
    if value is None:
      raise HttpError(400, 'reward: expected a number', 'reward')
    if own.returned is not None:
      raise HttpError(409, f'the session has its reward: {own.returned}')
    own.returned = float(value)
    return JSONResponse({'reward': own.returned})

  async def retrieve(http: HttpRequest) -> Response:
    own, body = session(http), await read_body(http)
    queries, k = texts(body.get('queries')), number(body, 'topk') or 3
    if not 0 < len(queries) <= QUERIES:
      what = f'queries: expected a list of texts, at most {QUERIES}'
      raise HttpError(400, what, 'queries')
    found = await _unless_gone(http, own.search(queries, k))
    hits = [[*map(_hit, one.passages)] for one in found]
    # In ASCII: a passage may hold half of a surrogate pair, which has no UTF-8.
    content = json.dumps({'result': hits})
    return Response(content, media_type='application/json')

  async def models(http: HttpRequest) -> Response:
    session(http)
    return listed([MODEL])

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


def key_of(http: HttpRequest) -> str:
  """The key that a request gives; raises HttpError if there is none."""
  kind, _, key = http.headers.get('authorization', '').partition(' ')
  if kind.lower() != 'bearer' or not key.strip():
    raise HttpError(401, 'give the key: Authorization: Bearer KEY')
  return key.strip()


def listed(names: Iterable[str]) -> Response:
  """The answer of /v1/models."""
  about = {'object': 'model', 'created': 0, 'owned_by': 'you'}
  data = [{'id': name} | about for name in names]
  return JSONResponse({'object': 'list', 'data': data})


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


# Replies.


async def respond(
  http: HttpRequest,
  asks: Sequence[Ask],
  request: Request,
  shown: Mapping[str, Any],
  model: str,
  tokenizer,
) -> ASGIApp:
  """Samples a reply by each of `asks`, at the same time, and sends them.

  They end at once where the client goes. shown: of `read`.
  """
  id, now = f'chatcmpl-{uuid.uuid4().hex}', int(time.time())
  about = {'id': id, 'created': now, 'model': model}
  chunk = about | {'object': 'chat.completion.chunk'}

  def choice(n: int, part: dict, reply: Reply | None = None) -> dict:
    """Choice n, or a part of it; reply: ends with this part."""
    scores = reply and shown['logprobs'] and _logprobs(reply, tokenizer)
    ended = {'finish_reason': reply and reply.finish}
    return {'index': n, 'logprobs': scores or None} | ended | part

  async def told(n: int, ask: Ask, tell: Tells) -> Reply:
    """The reply of choice n, in chunks as it comes."""
    stops = () if request.shows_stop else request.stops
    deltas = Deltas(tokenizer, stops, bool(request.tools))

    def say(delta: dict, reply: Reply | None = None) -> None:
      tell(chunk | {'choices': [choice(n, {'delta': delta}, reply)]})

    def sampled(ids: Sequence[int]) -> None:
      if not deltas.begun:
        say({'role': 'assistant', 'content': ''})
      if text := deltas(ids):
        say({'content': text})

    reply = await ask(sampled)
    if rest := reply.content[len(deltas.sent) :]:
      say({'content': rest})
    for i, call in enumerate(reply.calls):
      say({'tool_calls': [{'index': i} | _call(call)]})
    say({}, reply)
    return reply

  async def work(tell: Tells) -> None:
    replies = await gather(told(n, ask, tell) for n, ask in enumerate(asks))
    if shown['usage']:
      tell(chunk | {'choices': [], 'usage': _usage(replies)})

  if shown['stream']:
    return await stream(http, work)
  replies = await _unless_gone(http, gather(ask(None) for ask in asks))
  choices = []
  for n, reply in enumerate(replies):
    message: dict[str, Any] = {'role': 'assistant', 'content': reply.content}
    if calls := [*map(_call, reply.calls)]:
      message |= {'content': reply.content or None, 'tool_calls': calls}
    choices.append(choice(n, {'message': message}, reply))
  about |= {'object': 'chat.completion', 'choices': choices}
  return JSONResponse(about | {'usage': _usage(replies)})


async def stream(
  http: HttpRequest, work: Callable[[Tells], Awaitable]
) -> ASGIApp:
  """What `work(tell)` tells, as server-sent events; the last one is [DONE].

  The work ends at once where the client goes. An error before the first event
  is raised; a later one is an event.
  """
  events: asyncio.Queue[dict | None] = asyncio.Queue()
  task = asyncio.ensure_future(work(events.put_nowait))
  task.add_done_callback(lambda _: events.put_nowait(None))

  async def lines(event: dict | None):
    while event is not None:
      yield f'data: {json.dumps(event)}\n\n'
      event = await events.get()
    if task.cancelled() or task.exception():
      error = Closed(_ENDED) if task.cancelled() else task.exception()
      yield f'data: {json.dumps(described(error)[1])}\n\n'
    yield 'data: [DONE]\n\n'

  try:
    first = await _unless_gone(http, events.get())
    if first is None:
      await _unless_gone(http, task)  # raises its error
  except BaseException:
    task.cancel()
    raise
  headers = {'Cache-Control': 'no-store'}
  response = StreamingResponse(
    lines(first), headers=headers, media_type='text/event-stream'
  )

  async def answer(scope, receive, send) -> None:
    try:
      await response(scope, receive, send)
    finally:
      task.cancel()

  return answer


async def _unless_gone(http: HttpRequest, work: Awaitable) -> Any:
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
      raise Closed(_ENDED)
    return task.result()
  finally:
    for each in (task, watch):
      each.cancel()
    await asyncio.gather(task, watch, return_exceptions=True)


def _call(call: chat.Call) -> dict[str, Any]:
  id = f'call_{uuid.uuid4().hex[:24]}'
  function = {'name': call.name, 'arguments': call.arguments}
  return {'id': id, 'type': 'function', 'function': function}


def _usage(replies: Sequence[Reply]) -> dict[str, int]:
  n = sum(len(reply.completion.ids) for reply in replies)
  prompt = replies[0].prompt_tokens
  total = {'total_tokens': prompt + n}
  return {'prompt_tokens': prompt, 'completion_tokens': n} | total


def _logprobs(reply: Reply, tokenizer) -> dict:
  done, shown = reply.completion, []
  for i, logp in zip(done.ids.tolist(), done.logps.tolist()):
    data = {'bytes': [*tokenizer.token_bytes(i)], 'top_logprobs': []}
    shown.append({'token': tokenizer.decode([i]), 'logprob': logp} | data)
  return {'content': shown}


@contextlib.asynccontextmanager
async def serving(app, host='127.0.0.1', port=0):
  """Serves the application on the running event loop; gives its base URL."""
  six = ':' in host
  family = socket.AF_INET6 if six else socket.AF_INET
  with socket.create_server((host, port), family=family) as listener:
    # 5 seconds at the end for clients that do not read their reply.
    how = {'lifespan': 'off', 'timeout_graceful_shutdown': 5}
    server = uvicorn.Server(uvicorn.Config(app, log_level='warning', **how))
    task = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
      while not server.started:
        if task.done():
          task.result()
        await asyncio.sleep(0.01)
      name = f'[{host}]' if six else host
      yield f'http://{name}:{listener.getsockname()[1]}/v1'
    finally:
      server.should_exit = True
      await task
