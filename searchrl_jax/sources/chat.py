"""A chat model behind an OpenAI-compatible server: a judge or a simulator.

vLLM is such a server. The `openai` package retries refused connections,
timeouts, 408, 409, 429 and 5xx with growing pauses. A request that still fails
raises `ChatError`; it never gives an empty reply. The error's kind separates a
service that failed from one whose reply is unusable because of the request, so
that a policy cannot gain from such requests.

The server parses control tokens in the whole text of a chat. Put text of a
policy, or any outside text, into a message with `payload` only.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
import contextlib
import json
import logging
import os
import re
from typing import Any
from urllib.parse import urlsplit
import weakref

import httpx
from ml_collections import ConfigDict

from retrieval import proxies
from searchrl_jax import lookup

_PAUSE = 10.0  # seconds, more than openai waits between attempts
_START = 'searchrl-'  # prefix of the model names of engines/vllm/host.py

# Characters that every control token contains, with those that Unicode
# normalisation maps to them, and surrogates, which UTF-8 cannot encode.
_SPELLING = re.compile('[<|\\[◁＜﹤≮｜［﹇\ud800-\udfff]')
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
# Ends of paths that are complete, and of those that other clients are given.
_VERSION = re.compile('(?<![:/])/v\\d((beta|alpha)\\d*)?(/openai)?$')
_PATH = re.compile('(?<![:/])/+(v1/*)?((chat/)?completions/*)?$')
_THOUGHT = re.compile(
  '(?i:[<◁]/?(?:seed:)?(?:think(?:ing)?|thought|reasoning)[>▷])|\\[/?THINK]'
)

# What servers say of an option that they do not take -> its name, and the one
# that they take in its place.
_OPTIONS = {
  re.compile('response_format|json_schema'): ('response_format', None),
  re.compile("max_completion_tokens'? instead"): (
    'max_tokens',
    'max_completion_tokens',
  ),
  re.compile("'temperature' (does|is) not support"): ('temperature', None),
}
# HTTP statuses of a request that is too long or filtered, and the finish
# reasons of such a reply. `check` finds servers that reject every request.
_UNUSABLE = (400, 413, 422)
_INCOMPLETE = ('length', 'content_filter')

# Errors of reading a reply that is not of the OpenAI format.
_MALFORMED = (AttributeError, IndexError, TypeError, ValueError, TimeoutError)


def payload(value: Any) -> str:
  """Returns `value` as JSON that cannot contain a control token.

  In strings, `<`, `|`, `[`, `◁` and the characters that normalise to them are
  escaped (\\u003c, \\u007c, \\u005b); json.loads restores `value`.
  """

  def escaped(string):
    return _SPELLING.sub(lambda c: f'\\u{ord(c[0]):04x}', string[0])

  return _STRING.sub(escaped, json.dumps(value, ensure_ascii=False))


def without_thoughts(text: str) -> str:
  """What a model says after its thoughts; '' if it only thinks.

  The last tag decides. The first may be absent: many chat templates end with
  it. Servers with a parser of reasoning send no thoughts.
  """
  *_, last = [None, *_THOUGHT.finditer(text)]
  if last is None:
    return text
  return text[last.end() :] if '/' in last[0] else ''


def thinks(where: str) -> str:
  """What to do about replies of thoughts; where: the config of the model."""
  return (
    f'the model thinks: raise {where}.max_tokens, or switch thinking off in '
    'its chat template'
  )


def without_tags(text: str) -> str:
  """Text in which no thought begins or ends, however a model repeats it."""
  return _THOUGHT.sub(' ', text)


class ChatError(RuntimeError):
  """There is no reply; the message names the URL and the fix.

  kind: 'unreachable', 'timeout', 'overloaded', 'rejected' or 'bad_response' if
    the service failed; 'unusable' if it refused, filtered, cut or left empty
    the reply because of the request.
  """

  def __init__(self, kind: str, message: str):
    super().__init__(message)
    self.kind = kind


async def separate_failures(
  replies: Mapping[Any, Any], plain: Callable[[], Awaitable[Any]]
) -> dict[Any, Any]:
  """Separates failures of the service from requests that it cannot use.

  If a plain request is refused too, 'unusable' replies become 'rejected' ones:
  failures of the service.

  Args:
    replies: by any key; a value is a reply or a ChatError.
    plain: sends the plain request; gives a reply or a ChatError.
  """
  unusable = [
    key
    for key, reply in replies.items()
    if isinstance(reply, ChatError) and reply.kind == 'unusable'
  ]
  refused = await plain() if unusable else None
  if not isinstance(refused, ChatError):
    return dict(replies)
  error = ChatError('rejected', f'a plain request is refused too: {refused}')
  return {**replies, **dict.fromkeys(unusable, error)}


class Chat:
  """A client of one model of one server, for one event loop after another.

  The token is the variable OPENAI_API_KEY, because configs are stored.
  """

  def __init__(self, config: ConfigDict, where: str = 'config.judge'):
    """Sends no request yet.

    Args:
      config: url (with or without /v1 or /v1/chat/completions), model ('' = the
        only one served), timeout of an attempt in seconds, attempts,
        concurrency (requests at a time).
      where: name of `config` in errors.

    Raises:
      ValueError: the URL is invalid.
    """
    with lookup.of(f'{where}.url={config.url!r}'):
      url = urlsplit(config.url)
      good = url.scheme in ('http', 'https') and url.hostname and url.port != 0
      good = good and not (url.query or url.fragment)
    server = 'must be http(s)://host[:port] of an OpenAI-compatible server'
    lookup.require(good, f'{where}.url={config.url!r} {server}')
    self._config, self._where = config, where
    given = proxies.askable(f'{config.url}/')
    end = _PATH.search(given)
    self.url = _PATH.sub('', given)
    if (end and end[1]) or not _VERSION.search(self.url):
      self.url += '/v1'
    self._model = config.model
    self._renamed: dict[str, str | None] = {}  # options that it does not take
    # Connections belong to the event loop that opened them.
    self._clients: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

  async def reply(
    self, messages, max_tokens: int, temperature: float, seed=None, schema=None
  ) -> str:
    """Returns the model's next message, without thoughts before it.

    Args:
      messages: each with 'role' and 'content'.
      max_tokens: of the reply and thoughts; one that reaches it is unusable.
      temperature: 0 = greedy.
      seed: of the sampling, if the server supports it.
      schema: JSON schema for the reply. Servers may ignore it, so check the
        reply.

    Raises:
      ChatError: there is no reply.
    """
    options: dict = {'max_tokens': max_tokens, 'temperature': temperature}
    if seed is not None:
      options['seed'] = seed
    if schema is not None:
      spec = {'name': 'reply', 'schema': schema, 'strict': True}
      options['response_format'] = {'type': 'json_schema', 'json_schema': spec}
    while True:
      renamed = dict(self._renamed)
      sent = {renamed.get(name, name): x for name, x in options.items()}
      sent.pop(None, None)
      try:
        return await self._reply(list(messages), max_tokens, sent)
      except ChatError as e:
        cause = e.__cause__
        refused = getattr(cause, 'status_code', None) in (400, 422)
        # Its text may name the format whose tokens were too many.
        refused &= getattr(cause, 'code', None) != 'context_length_exceeded'
        named = (x for pattern, x in _OPTIONS.items() if pattern.search(str(e)))
        old, new = next(named, ('', None))
        if not refused or old not in sent:
          raise
        if old not in self._renamed:
          instead = f'sending {new}' if new else 'leaving it out'
          logging.warning(f'{self.url} does not take {old}; {instead}: {e}')
        self._renamed[old] = new

  async def _reply(self, messages, max_tokens: int, options: dict) -> str:
    """`reply`, with the options that the server takes."""
    async with self._asking() as client:
      if not self._model:
        self._model = (await self._served(client))[0]
      reply = await client.chat.completions.create(
        model=self._model, messages=messages, **options
      )
      if reply.choices is None:
        raise ValueError(f'no choices; error={getattr(reply, "error", None)}')
      end, said, thought = 'filtered', '', False  # some filters: no choice
      if reply.choices:
        end, said = reply.choices[0].finish_reason, reply.choices[0].message
        # Names under which servers with a parser of reasoning send it.
        names = ('reasoning_content', 'reasoning')
        thought = any(getattr(said, name, None) for name in names)
        said = said.content
    if isinstance(said, list):  # parts; those of thoughts have no text
      texts = (x.get('text') if isinstance(x, dict) else x for x in said)
      said = ''.join(str(text or '') for text in texts)
    text = without_thoughts(said) if isinstance(said, str) else ''
    if not text.strip() or end in _INCOMPLETE:
      what = f'within {max_tokens} tokens (finish_reason={end!r})'
      message = f'{self.url}: no complete reply {what}: {str(said)[:200]!r}'
      if thought or isinstance(said, str) and _THOUGHT.search(said):
        message += f'; {thinks(self._where)}'
      elif end == 'length':
        message += f'; raise {self._where}.max_tokens'
      raise ChatError('unusable', message)
    return text

  async def check(self) -> dict[str, object]:
    """Returns {'url', 'model'} of the server.

    Raises:
      ChatError: the server cannot be reached or does not have the model.
    """
    model = self._config.model
    async with self._asking() as client:
      served = await self._served(client)
    if model and model not in served:
      has = f'{self.url}, which has: {", ".join(served)}'
      message = f'{self._where}.model={model!r} is not served at {has}'
      raise ChatError('rejected', message)
    return {'url': self.url, 'model': model or served[0]}

  async def close(self) -> None:
    """Closes the connections of this event loop."""
    client, _ = self._clients.pop(asyncio.get_running_loop(), (None, None))
    if client:
      await client.close()

  async def _served(self, client) -> list[str]:
    names = [getattr(m, 'id', None) for m in (await client.models.list()).data]
    if not names or not all(isinstance(name, str) for name in names):
      raise ValueError('it lists no models')
    # This project's servers also have a name for each start; leave it out.
    names = [name for name in names if not name.startswith(_START)]
    if not self._config.model and len(names) != 1:
      message = f'{self.url} serves {", ".join(names) or "no model"}: say which'
      raise ChatError('rejected', f'{message} in {self._where}.model')
    return names

  def _client(self, openai):
    loop, c = asyncio.get_running_loop(), self._config
    if loop not in self._clients:
      limits = httpx.Limits(max_connections=c.concurrency)
      http = proxies.open_client(
        httpx.AsyncClient,
        trust_env=not proxies.is_near(self.url),
        timeout=c.timeout,
        limits=limits,
      )
      client = openai.AsyncOpenAI(
        base_url=self.url,
        api_key=os.environ.get('OPENAI_API_KEY', 'none'),
        timeout=c.timeout,
        max_retries=c.attempts - 1,
        http_client=http,
      )
      self._clients[loop] = client, asyncio.Semaphore(c.concurrency)
    return self._clients[loop]

  @contextlib.asynccontextmanager
  async def _asking(self) -> AsyncIterator:
    """The client; waits for a slot, and turns every failure into ChatError."""
    import openai  # takes a second

    c = self._config
    try:
      client, slots = self._client(openai)
    except proxies.ProxyError as e:
      raise ChatError('unreachable', f'{self.url}: {e}') from e
    try:
      # The timeouts of httpx do not end a reply that arrives byte by byte.
      async with slots, asyncio.timeout(c.attempts * (c.timeout + _PAUSE)):
        yield client
    except (openai.OpenAIError, *_MALFORMED) as e:
      kinds = (  # subclasses first
        ((openai.APITimeoutError, TimeoutError), 'timeout'),
        (openai.APIConnectionError, 'unreachable'),
        ((openai.RateLimitError, openai.InternalServerError), 'overloaded'),
        (openai.APIStatusError, 'rejected'),
        (Exception, 'bad_response'),
      )
      kind = next(name for types, name in kinds if isinstance(e, types))
      if getattr(e, 'status_code', None) in _UNUSABLE:
        kind = 'unusable'
      fix = f'start the server, or correct {self._where}'
      proxy = proxies.via(self.url)
      what = f'{kind} after {c.attempts} attempt(s){proxy}'
      why = ' '.join(str(e).split())[:300]
      raise ChatError(kind, f'{self.url}: {what}: {why}; {fix}') from e
