"""A language model in place of the search engine (ZeroSearch).

Sun et al., arXiv 2505.04588: while a policy trains, a simulator writes the
documents of each query, useful ones or, with probability p(t) in step t of T,

    p(t) = p_s + (b ** (t / T) - 1) / (b - 1) * (p_e - p_s),

noisy ones. It is told the query's own question and golden answers. What it
writes is outside text, as a passage is. A reply without a document is asked
for again; if none has one, the search has found nothing. A server that does
not reply is a failed search (design 5.4). To a server, the query and what else
stands in a prompt's slots goes as the inside of a JSON string (chat.payload).
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
import hashlib
import logging
import re
import string
import time
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from searchrl_jax.engines.core import Engine, EngineError, Sampling
from searchrl_jax.run import lookup
from searchrl_jax.sources.chat import Chat, ChatError, payload
from searchrl_jax.sources.core import SourceError
from searchrl_jax.text import untrusted
from searchrl_jax.types import (
  Passage,
  Prompt,
  Question,
  SearchError,
  SearchRequest,
  SearchResult,
)

SIMULATED = 'simulated'  # config.source.module
SLOTS = ('question', 'answers', 'query', 'k')
_WHERE = 'config.source.simulator'
_ASKED = Question('check', 'What is the capital of France?', ('Paris',))
_log = logging.getLogger(__name__)


class Writer(NamedTuple):
  """Who writes the documents, where no server does."""

  engine: Callable[[], Engine]  # asked for when it writes
  tokenizer: Any
  # Makes an engine of the source's own ready; None: the policy's engine.
  start: Callable[[], Awaitable[None]] | None


def check(config: ConfigDict) -> None:
  """Finds fields of config.source.simulator that cannot work.

  Raises:
    ValueError: names the field, what it is and the mend.
  """
  for name in ('useful', 'noisy'):
    try:
      used = {field for _, field in _slots(config[name]) if field is not None}
    except ValueError as e:
      raise ValueError(f'{_WHERE}.{name}: {e}; write a brace twice') from e
    lookup.require(
      'query' in used and used <= set(SLOTS),
      f'{_WHERE}.{name}={config[name]!r}: a prompt with {{query}}, and any '
      f'of {SLOTS}',
    )
  try:
    found = re.compile(config.document)
  except re.error as e:
    raise ValueError(f'{_WHERE}.document: no regular expression: {e}') from e
  named = found.groupindex
  lookup.require(
    found.groups and ('text' in named or 'title' not in named),
    f'{_WHERE}.document={config.document!r}: needs a group, the text of one '
    'document; named (?P<text>...) beside a named title',
  )
  lookup.require(
    not config.url or (config.chat and not (config.path or config.stops)),
    f'{_WHERE}.url={config.url!r} with path, stops or chat=False: a server '
    'has its own model, is sent messages, and its replies are whole',
  )
  for name, low, high in (
    ('noise_from', 0, 1),
    ('noise_to', 0, 1),
    ('steps', 1, float('inf')),
    ('max_tokens', 1, float('inf')),
    ('attempts', 1, float('inf')),
    ('temperature', 0, float('inf')),
    ('base', 1.001, float('inf')),
  ):
    lookup.require(
      low <= config[name] <= high,
      f'{_WHERE}.{name}={config[name]}: between {low} and {high}',
    )


def noise(config: ConfigDict, step: int) -> float:
  """p(t): the share of queries that are answered by noisy documents."""
  grown = config.base ** min(step / config.steps, 1.0) - 1
  span = config.noise_to - config.noise_from
  return config.noise_from + grown / (config.base - 1) * span


class SimulatedSource:
  """Documents that a language model writes; see `check` for its config.

  Whether a query's are useful, and the random stream they are sampled from,
  follow from (seed, trajectory, turn, step) and the query: arrival order
  cannot show, and a resumed run asks the same again.
  """

  def __init__(
    self, config: ConfigDict, seed: int, writer: Callable[[], Writer]
  ):
    """Makes a source; a server is asked nothing yet.

    Args:
      config: config.source.
      seed: config.seed.
      writer: makes the engine, called if config.simulator.url is empty.
    """
    self._config, self._seed = config.simulator, seed
    check(self._config)
    self._document = re.compile(self._config.document)
    self._chat = self._writer = None
    if self._config.url:
      self._chat = Chat(self._config, _WHERE)
    else:
      self._writer = writer()

  async def search(
    self, requests: Sequence[SearchRequest]
  ) -> list[SearchResult | SearchError]:
    """One answer for each request, in order; never raises for a query."""
    return list(await asyncio.gather(*map(self._answer, requests)))

  async def check(self) -> Mapping[str, object]:
    """Makes the simulator ready; who it is, as `identity`.

    Raises:
      SourceError: nobody at config.source.simulator.url serves the model, or
        it writes no document; or the tokenizer has no chat template for a
        prompt that is a message.
    """
    name = self._config.path or 'the policy'
    lookup.require(
      self._chat or not self._config.chat or self._writer.tokenizer.has_chat,
      f'{_WHERE}.chat=True, and the tokenizer of {name} has no chat template; '
      'use chat=False',
      SourceError,
    )
    if self._chat:
      try:
        name = (await self._chat.check())['model']
      except ChatError as e:
        raise SourceError(str(e)) from e
      found = await self._answer(SearchRequest('capital France', 1, _ASKED))
      if isinstance(found, SearchError) or not found.passages:
        raise SourceError(
          f'{_WHERE}.url={self._config.url!r} answers the query '
          f'{found.request.query!r} with no document: '
          + (
            found.message
            if isinstance(found, SearchError)
            else (f'look at {_WHERE}.document and its prompts')
          )
        )
    elif self._writer.start:
      await self._writer.start()
    return {'identity': {'simulator': name}}

  async def close(self) -> None:
    if self._chat:
      await self._chat.close()
    elif self._writer.start:
      await self._writer.engine().shutdown()

  async def _answer(self, request: SearchRequest) -> SearchResult | SearchError:
    begin, asked = time.monotonic(), request.question or Question('', '')
    noisy = self._drawn(request) < noise(self._config, request.step)
    kind = 'noisy' if noisy else 'useful'
    values = {
      'query': request.query,
      'k': str(request.k),
      'question': asked.text,
      'answers': ' or '.join(asked.answers),
    }
    parts = []
    for literal, field in _slots(self._config[kind]):
      parts.append((literal, True))
      if field is not None:
        if not values[field]:
          return SearchError(
            request,
            'rejected',
            f'{_WHERE} is told the {field}, and this '
            "query's question has none: search for real, with "
            "config.source.module='service'",
          )
        parts.append((values[field], False))
    for attempt in range(self._config.attempts):
      drawn = self._drawn(request, request.query, attempt)
      try:
        reply = await self._write(parts, int(drawn * 2**32))
      except ChatError as e:
        if e.kind not in ('bad_response', 'unusable'):
          return SearchError(request, e.kind, str(e))
        last = e
        continue
      except EngineError as e:
        return SearchError(request, 'rejected', f'{_WHERE}: {e}')
      found = list(self._document.finditer(reply))[: request.k]
      passages = tuple(
        _passage(m, f'{kind}-{i}') for i, m in enumerate(found, 1)
      )
      if passages and all(p.text for p in passages):
        return SearchResult(request, passages, time.monotonic() - begin)
      last = ChatError('unusable', repr(reply[:200]))
    said = (
      f'{_WHERE}: {self._config.attempts} replies without a document '
      f'({_WHERE}.document), the last: {last}'
    )
    if last.kind != 'unusable':
      return SearchError(request, last.kind, said)
    _log.debug('%r: %s', request.query, said)
    return SearchResult(request, (), time.monotonic() - begin)

  def _drawn(self, request: SearchRequest, *more) -> float:
    """In [0, 1), in steps of 2**-32."""
    name = (self._seed, request.trajectory, request.turn, request.step, *more)
    digest = hashlib.blake2b(repr(name).encode(), digest_size=4).digest()
    return int.from_bytes(digest) / 2**32

  async def _write(self, parts: Sequence[untrusted.Part], seed: int) -> str:
    """A whole reply, without empty lines.

    Raises:
      ChatError: 'unusable' if it is cut, or the prompt leaves no room for it.
    """
    c = self._config
    if self._chat:
      said = ''.join(
        text if ours else payload(text)[1:-1] for text, ours in parts
      )
      return _dense(
        await self._chat.reply(
          [{'role': 'user', 'content': said}],
          max_tokens=c.max_tokens,
          temperature=c.temperature,
          seed=seed,
        )
      )
    engine, tokenizer = self._writer.engine(), self._writer.tokenizer
    if c.chat:
      parts = untrusted.chat_parts(tokenizer, [('user', parts)])
    ids = tokenizer.encode_parts(parts, start=True)
    if len(ids) + c.max_tokens > engine.max_len:
      raise ChatError(
        'unusable',
        (
          f'a prompt of {len(ids)} tokens, {_WHERE}.max_tokens={c.max_tokens} '
          f'and an engine of {engine.max_len}'
        ),
      )
    handle = engine.open(Prompt(tuple(ids)))
    try:
      done = await engine.generate(
        handle,
        Sampling(
          max_tokens=c.max_tokens,
          temperature=c.temperature,
          stops=c.stops,
          stop_ids=tokenizer.eos_ids,
          seed=seed,
        ),
      )
    finally:
      engine.close(handle)
    reply = tokenizer.decode(done.ids)
    if done.stop == 'length':
      raise ChatError('unusable', f'cut after {c.max_tokens}: {reply!r}')
    return _dense(reply)


def make(
  config: ConfigDict, *, seed: int, writer: Callable[[], Writer], **_: object
) -> SimulatedSource:
  """The source of `config.source` (module='simulated')."""
  return SimulatedSource(config, seed, writer)


def _dense(reply: str) -> str:
  # A pattern that spans lines can take minutes over hundreds of empty ones.
  return '\n'.join(line for line in reply.splitlines() if line.strip())


def _slots(text: str):
  """(literal, field after it or None), ..."""
  for literal, field, _, _ in string.Formatter().parse(text):
    yield literal, field


def _passage(match: re.Match, name: str) -> Passage:
  fields = {'title': '', 'text': match.group(1) or '', **match.groupdict('')}
  title, text = (' '.join(fields[f].split()) for f in ('title', 'text'))
  return Passage(f'simulated-{name}', title, text)
