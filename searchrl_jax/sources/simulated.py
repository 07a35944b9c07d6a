"""A language model in place of the search engine (ZeroSearch).

Sun et al., arXiv 2505.04588: while a policy trains, a simulator writes the
documents of each query, useful ones or, with probability p(t) in step t of T,

    p(t) = p_s + (b ** (t / T) - 1) / (b - 1) * (p_e - p_s),

noisy ones. Its prompt may contain the query's question and golden answers. Its
text is outside text, like a passage. A reply without a document is requested
again; if no reply has one, the result of the search is empty. If the server
does not reply, the search fails (design 5.4). The values in a prompt's slots
are sent to a server as the inside of a JSON string (chat.payload).
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
_TEST = Question('check', 'What is the capital of France?', ('Paris',))
_log = logging.getLogger(__name__)


class DocumentWriter(NamedTuple):
  """The engine that writes documents if no server does."""

  engine: Callable[[], Engine]  # called for each document
  tokenizer: Any
  # Starts an engine for the source; None: the engine is the policy's.
  start: Callable[[], Awaitable[None]] | None


def check(config: ConfigDict) -> None:
  """Checks the fields of config.source.simulator.

  Raises:
    ValueError: names the field, its value and what it must be.
  """
  for name in ('useful', 'noisy'):
    try:
      used = {field for _, field in _slots(config[name]) if field is not None}
    except ValueError as e:
      raise ValueError(f'{_WHERE}.{name}: {e}; write a brace twice') from e
    lookup.require(
      'query' in used and used <= set(SLOTS),
      f'{_WHERE}.{name}={config[name]!r} must contain {{query}}, and may '
      f'contain any of {SLOTS}',
    )
  try:
    pattern = re.compile(config.document)
  except re.error as e:
    raise ValueError(f'{_WHERE}.document: no regular expression: {e}') from e
  lookup.require(
    pattern.groups
    and ('text' in pattern.groupindex or 'title' not in pattern.groupindex),
    f'{_WHERE}.document={config.document!r}: needs a group for the text of one '
    'document, named (?P<text>...) if it is beside a named title',
  )
  lookup.require(
    not config.url or (config.chat and not (config.path or config.stops)),
    f'{_WHERE}.url={config.url!r} cannot be combined with path, stops or '
    'chat=False: a server has its own model and receives messages',
  )
  for names, low, high in (
    (('noise_from', 'noise_to'), 0, 1),
    (('steps', 'max_tokens', 'attempts'), 1, float('inf')),
    (('temperature',), 0, float('inf')),
    (('base',), 1.001, float('inf')),
  ):
    for name in names:
      lookup.require(
        low <= config[name] <= high,
        f'{_WHERE}.{name}={config[name]} must be between {low} and {high}',
      )


def noise(config: ConfigDict, step: int) -> float:
  """p(t), the probability of noisy documents in training step t."""
  grown = config.base ** min(step / config.steps, 1.0) - 1
  span = config.noise_to - config.noise_from
  return config.noise_from + grown / (config.base - 1) * span


class SimulatedSource:
  """Answers queries with documents that a language model writes.

  Whether they are useful, and the random stream that they are sampled from,
  depend only on (seed, trajectory, turn, step) and the query, not on the order
  of arrival. A resumed run repeats them.
  """

  def __init__(
    self, config: ConfigDict, seed: int, writer: Callable[[], DocumentWriter]
  ):
    """Sends no request yet.

    Args:
      config: config.source; see `check` for config.source.simulator.
      seed: config.seed.
      writer: returns the writer; called if config.simulator.url is empty.
    """
    self._config, self._seed = config.simulator, seed
    check(self._config)
    self._document = re.compile(self._config.document)
    url = self._config.url
    self._chat = Chat(self._config, _WHERE) if url else None
    self._writer = None if url else writer()

  async def search(
    self, requests: Sequence[SearchRequest]
  ) -> list[SearchResult | SearchError]:
    """One answer for each request, in order; never raises for a query."""
    return list(await asyncio.gather(*map(self._answer, requests)))

  async def check(self) -> Mapping[str, object]:
    """Starts the simulator and returns its model as `identity`.

    Raises:
      SourceError: the server at config.source.simulator.url does not serve the
        model or writes no document, or the tokenizer has no chat template.
    """
    name = self._config.path or 'the policy'
    lookup.require(
      self._chat or not self._config.chat or self._writer.tokenizer.has_chat,
      f'{_WHERE}.chat=True, but the tokenizer of {name} has no chat template; '
      'use chat=False',
      SourceError,
    )
    if self._chat:
      try:
        name = (await self._chat.check())['model']
      except ChatError as e:
        raise SourceError(str(e)) from e
      answer = await self._answer(SearchRequest('capital France', 1, _TEST))
      why = getattr(answer, 'message', f'correct {_WHERE}.document or prompts')
      lookup.require(
        isinstance(answer, SearchResult) and answer.passages,
        f'{_WHERE}.url={self._config.url!r} answers the query '
        f'{answer.request.query!r} with no document: {why}',
        SourceError,
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
    begin, question = time.monotonic(), request.question or Question('', '')
    noisy = self._draw(request) < noise(self._config, request.step)
    kind = 'noisy' if noisy else 'useful'
    answers = ' or '.join(question.answers)
    values = dict(
      query=request.query,
      k=str(request.k),
      question=question.text,
      answers=answers,
    )
    parts = []
    for literal, field in _slots(self._config[kind]):
      parts.append((literal, True))
      if field is not None and not values[field]:
        message = (
          f"{_WHERE}.{kind} contains {{{field}}}, and the query's question has "
          "none; use a real search, with config.source.module='service'"
        )
        return SearchError(request, 'rejected', message)
      if field is not None:
        parts.append((values[field], False))
    for attempt in range(self._config.attempts):
      seed = int(self._draw(request, request.query, attempt) * 2**32)
      try:
        reply = await self._write(parts, seed)
      except ChatError as e:
        if e.kind not in ('bad_response', 'unusable'):
          return SearchError(request, e.kind, str(e))
        last = e
        continue
      except EngineError as e:
        return SearchError(request, 'rejected', f'{_WHERE}: {e}')
      documents = list(self._document.finditer(reply))[: request.k]
      passages = tuple(
        _passage(match, f'{kind}-{i}') for i, match in enumerate(documents, 1)
      )
      if passages and all(p.text for p in passages):
        return SearchResult(request, passages, time.monotonic() - begin)
      last = ChatError('unusable', repr(reply[:200]))
    message = (
      f'{_WHERE}: {self._config.attempts} replies without a document '
      f'({_WHERE}.document), the last: {last}'
    )
    if last.kind != 'unusable':
      return SearchError(request, last.kind, message)
    _log.debug('%r: %s', request.query, message)
    return SearchResult(request, (), time.monotonic() - begin)

  def _draw(self, request: SearchRequest, *key) -> float:
    """A number in [0, 1), a multiple of 2**-32, that depends on the request."""
    name = (self._seed, request.trajectory, request.turn, request.step, *key)
    digest = hashlib.blake2b(repr(name).encode(), digest_size=4).digest()
    return int.from_bytes(digest) / 2**32

  async def _write(self, parts: Sequence[untrusted.Part], seed: int) -> str:
    """Returns a complete reply, without empty lines.

    Raises:
      ChatError: 'unusable' if it is cut, or the prompt leaves no room for it.
    """
    c = self._config
    options = dict(
      max_tokens=c.max_tokens, temperature=c.temperature, seed=seed
    )
    if self._chat:
      content = ''.join(
        text if ours else payload(text)[1:-1] for text, ours in parts
      )
      message = {'role': 'user', 'content': content}
      return _without_empty_lines(await self._chat.reply([message], **options))
    engine, tokenizer = self._writer.engine(), self._writer.tokenizer
    if c.chat:
      parts = untrusted.chat_parts(tokenizer, [('user', parts)])
    ids = tokenizer.encode_parts(parts, start=True)
    if len(ids) + c.max_tokens > engine.max_len:
      message = (
        f'a prompt of {len(ids)} tokens and {_WHERE}.max_tokens={c.max_tokens} '
        f'exceed the {engine.max_len} tokens of the engine'
      )
      raise ChatError('unusable', message)
    sampling = Sampling(stops=c.stops, stop_ids=tokenizer.eos_ids, **options)
    handle = engine.open(Prompt(tuple(ids)))
    try:
      done = await engine.generate(handle, sampling)
    finally:
      engine.close(handle)
    reply = tokenizer.decode(done.ids)
    if done.stop == 'length':
      raise ChatError('unusable', f'cut after {c.max_tokens}: {reply!r}')
    return _without_empty_lines(reply)


def make(
  config: ConfigDict,
  *,
  seed: int,
  writer: Callable[[], DocumentWriter],
  **_: object,
) -> SimulatedSource:
  """The source of `config.source` (module='simulated')."""
  return SimulatedSource(config, seed, writer)


def _without_empty_lines(reply: str) -> str:
  # On hundreds of empty lines, a pattern that spans lines can take minutes.
  return '\n'.join(line for line in reply.splitlines() if line.strip())


def _slots(text: str):
  """Yields (literal, field after it or None)."""
  for literal, field, _, _ in string.Formatter().parse(text):
    yield literal, field


def _passage(match: re.Match, name: str) -> Passage:
  fields = {'title': '', 'text': match.group(1) or '', **match.groupdict('')}
  title, text = (' '.join(fields[f].split()) for f in ('title', 'text'))
  return Passage(f'simulated-{name}', title, text)
