"""A chat model behind an OpenAI-compatible server: a judge, a simulator.

Any vLLM server is one. The `openai` package sends, waits, and tries again what
may pass (refused connections, timeouts, 408, 409, 429, 5xx), with growing
pauses; what fails for good is a `ChatError`, never an empty reply. Its kind
tells a service that failed from one that answered, and not usably because of
what it was asked: nobody may profit from asking such things.

The server parses control tokens in the whole text of a chat, so that of a
policy, or of anybody else, goes into a message as `payload` alone.
"""

import asyncio
from collections.abc import Mapping, Sequence
import json
import os
import re
from typing import Any
import urllib.parse
import weakref

import httpx
from ml_collections import ConfigDict

from searchrl_jax.run import lookup

_LOOPBACK = ('127.0.0.1', 'localhost', '::1')
_PAUSE = 10.0  # seconds, above the longest that openai waits between attempts
_START = 'searchrl-'  # what engines/vllm/host.py names a start

# What no control token is spelt without, as it stands and in the forms that
# Unicode normalisation makes it of; and what UTF-8 does not encode.
_SPELLING = re.compile('[<|\\[＜﹤≮｜［﹇\ud800-\udfff]')
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')

# Statuses of a request that is too long or filtered, and how a reply ends that
# is. A server that is asked wrongly each time is found by who checks it.
_ASKED = (400, 413, 422)
_NOT_WHOLE = ('length', 'content_filter')

# What reading a reply of another form than a chat server's raises.
_ODD = (AttributeError, IndexError, TypeError, ValueError, TimeoutError)


def payload(value: Any) -> str:
  """`value` as JSON in which no control token can be spelt.

  `<`, `|` and `[` in its strings are written as \\u003c, \\u007c, \\u005b, and
  what normalises to them likewise; json.loads gives `value` back.
  """
  return _STRING.sub(
    lambda string: _SPELLING.sub(
      lambda char: f'\\u{ord(char[0]):04x}', string[0]
    ),
    json.dumps(value, ensure_ascii=False),
  )


class ChatError(RuntimeError):
  """No reply; the message names the URL and the mend.

  kind: unreachable, timeout, overloaded, rejected or bad_response of a service
    that failed; unusable of one that answered, and refused, filtered, cut or
    left empty its reply because of what it was asked.
  """

  def __init__(self, kind: str, message: str):
    super().__init__(message)
    self.kind = kind


class Chat:
  """Asks one model of one server; usable in several event loops in turn.

  The token is OPENAI_API_KEY of the environment, since configs are kept.
  """

  def __init__(self, config: ConfigDict, where: str = 'config.judge'):
    """Sends nothing yet.

    Args:
      config: url (with or without /v1), model ('' = the only one served),
        timeout in seconds of an attempt, attempts, concurrency (requests in
        flight).
      where: what to call `config` in errors.

    Raises:
      ValueError: names the field.
    """
    try:
      parts = urllib.parse.urlsplit(config.url)
      good = parts.scheme in ('http', 'https') and parts.hostname
      assert good and (parts.port is None or parts.port)
    except (ValueError, AssertionError):
      raise ValueError(
        f'{where}.url={config.url!r}: expected http(s)://host[:port] of an '
        'OpenAI-compatible server'
      ) from None
    for field in ('attempts', 'concurrency'):
      lookup.require(
        config[field] >= 1, f'{where}.{field}={config[field]}: at least 1'
      )
    lookup.require(
      config.timeout > 0, f'{where}.timeout={config.timeout}: above 0 seconds'
    )
    self._config, self._where = config, where
    self.url = config.url.rstrip('/').removesuffix('/v1') + '/v1'
    self._outside = parts.hostname not in _LOOPBACK
    self._model = config.model
    # Connections belong to the event loop that opened them.
    self._clients: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

  async def reply(
    self,
    messages: Sequence[Mapping[str, str]],
    *,
    max_tokens: int,
    temperature: float,
    seed: int | None = None,
    schema: Mapping[str, Any] | None = None,
  ) -> str:
    """What the model says next.

    Args:
      messages: {'role', 'content'} each.
      max_tokens: of the reply; one that is cut there is unusable.
      temperature: 0 = greedy.
      seed: of the sampling, where the server knows one.
      schema: a JSON schema that the reply shall follow. A server may ignore
        it: what comes still has to be checked.

    Raises:
      ChatError: there is no reply.
    """
    import openai  # a second that who asks nobody need not wait

    client, slots = self._client(openai)
    asked = {}
    if seed is not None:
      asked['seed'] = seed
    if schema is not None:
      asked['response_format'] = {
        'type': 'json_schema',
        'json_schema': {'name': 'reply', 'schema': schema, 'strict': True},
      }
    try:
      async with slots, self._limit():
        if not self._model:
          self._model = (await self._served(client))[0]
        found = await client.chat.completions.create(
          model=self._model,
          messages=list(messages),
          max_tokens=max_tokens,
          temperature=temperature,
          **asked,
        )
      end, text = 'filtered', ''  # some filters answer with no choice at all
      if found.choices != []:
        choice = found.choices[0]
        end, text = choice.finish_reason, choice.message.content
    except (openai.OpenAIError, *_ODD) as e:
      raise self._error(openai, e) from e
    if not isinstance(text, str) or not text.strip() or end in _NOT_WHOLE:
      raise ChatError(
        'unusable',
        f'{self.url}: no whole reply within {max_tokens} tokens '
        f'(finish_reason={end!r}): {str(text)[:200]!r}',
      )
    return text

  async def check(self) -> dict[str, object]:
    """{'url', 'model'}: the server is there and has the model.

    Raises:
      ChatError: it is not, or has not.
    """
    import openai

    client, _ = self._client(openai)
    try:
      async with self._limit():
        served = await self._served(client)
    except (openai.OpenAIError, *_ODD) as e:
      raise self._error(openai, e) from e
    if self._config.model and self._config.model not in served:
      raise ChatError(
        'rejected',
        f'{self._where}.model={self._config.model!r} is not '
        f'served at {self.url}, which has: {", ".join(served)}',
      )
    return {'url': self.url, 'model': self._config.model or served[0]}

  async def close(self) -> None:
    """Ends the connections of this event loop."""
    found = self._clients.pop(asyncio.get_running_loop(), None)
    if found:
      await found[0].close()

  def _limit(self) -> asyncio.Timeout:
    # A server that sends a byte now and then meets every limit of httpx.
    c = self._config
    return asyncio.timeout(c.attempts * (c.timeout + _PAUSE))

  async def _served(self, client) -> list[str]:
    names = [getattr(m, 'id', None) for m in (await client.models.list()).data]
    if not names or not all(isinstance(name, str) for name in names):
      raise ValueError('it lists no models')
    # Those that last: a server of ours has a name for each start, too.
    names = [name for name in names if not name.startswith(_START)]
    if not self._config.model and len(names) != 1:
      raise ChatError(
        'rejected',
        f'{self.url} serves {", ".join(names) or "no model"}: say '
        f'which by {self._where}.model',
      )
    return names

  def _client(self, openai):
    loop = asyncio.get_running_loop()
    if loop not in self._clients:
      c = self._config
      self._clients[loop] = (
        openai.AsyncOpenAI(
          base_url=self.url,
          api_key=os.environ.get('OPENAI_API_KEY', 'none'),
          timeout=c.timeout,
          max_retries=c.attempts - 1,
          http_client=httpx.AsyncClient(
            trust_env=self._outside,
            timeout=c.timeout,
            limits=httpx.Limits(max_connections=c.concurrency),
          ),
        ),
        asyncio.Semaphore(c.concurrency),
      )
    return self._clients[loop]

  def _error(self, openai, e: Exception) -> ChatError:
    kind = next(
      (
        kind
        for error, kind in (
          ((openai.APITimeoutError, TimeoutError), 'timeout'),
          (openai.APIConnectionError, 'unreachable'),
          (openai.RateLimitError, 'overloaded'),
          (openai.InternalServerError, 'overloaded'),
          (openai.APIStatusError, 'rejected'),
        )
        if isinstance(e, error)
      ),
      'bad_response',
    )
    if getattr(e, 'status_code', None) in _ASKED:
      kind = 'unusable'
    said = ' '.join(str(e).split())[:300]
    return ChatError(
      kind,
      f'{self.url}: {kind} after {self._config.attempts} attempt(s): '
      f'{said}; start the server, or correct {self._where}',
    )
