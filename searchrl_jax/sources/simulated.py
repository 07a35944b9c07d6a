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
import time
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from searchrl_jax import lookup, types
from searchrl_jax.engines.core import Engine, EngineError, Sampling
from searchrl_jax.sources.chat import Chat, ChatError, payload, without_thoughts
from searchrl_jax.sources.core import Answer, SourceError, draw
from searchrl_jax.text import untrusted
from searchrl_jax.text.prompts import slots
from searchrl_jax.types import SearchRequest as Request

SIMULATED = 'simulated'  # config.source.module
KINDS = 'useful', 'noisy'
SLOTS = ('question', 'answers', 'query', 'k')
_WHERE = 'config.source.simulator'
_ASKED = types.Question('check', 'What is the capital of France?', ('Paris',))
_PLAIN = Request('capital France', 1, _ASKED)
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
  for name in KINDS:
    with lookup.of(f'{_WHERE}.{name}, where a brace is written twice'):
      used = {field for _, field in slots(config[name])} - {None}
    good, where = {'query'} <= used <= {*SLOTS}, f'{_WHERE}.{name}'
    what = f'must contain {{query}}, and may contain any of {SLOTS}'
    lookup.require(good, f'{where}={config[name]!r} {what}')
  where = f'{_WHERE}.document: no regular expression'
  with lookup.of(where, caught=re.error):
    pattern = re.compile(config.document)
  named = pattern.groupindex
  good = pattern.groups and ('text' in named or 'title' not in named)
  what = f'{_WHERE}.document={config.document!r}: needs a group for the text of'
  fix = 'one document, named (?P<text>...) if it is beside a named title'
  lookup.require(good, f'{what} {fix}')
  local = config.path or config.stops or not config.chat
  what = f'{_WHERE}.url={config.url!r} cannot have path, stops or chat=False'
  why = 'a server has its own model and receives messages'
  lookup.require(not (config.url and local), f'{what}: {why}')


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

  def __init__(self, config: ConfigDict, seed: int, writer: Callable):
    """Sends no request yet.

    Args:
      config: config.source; see `check` for config.source.simulator.
      seed: config.seed.
      writer: returns a DocumentWriter; called if config.simulator.url is empty.
    """
    self._config, self._seed = config.simulator, seed
    check(self._config)
    self._document = re.compile(self._config.document)
    self._chat = Chat(config.simulator, _WHERE) if self._config.url else None
    self._writer = None if self._chat else writer()

  async def search(self, requests: Sequence[Request]) -> list[Answer]:
    """One answer for each request, in order; never raises for a query."""
    return list(await asyncio.gather(*map(self._answer, requests)))

  async def check(self) -> Mapping[str, object]:
    """Starts the simulator and returns its model as `identity`.

    Raises:
      SourceError: the server at config.source.simulator.url does not serve the
        model or writes no document, or the tokenizer has no chat template.
    """
    name = self._config.path or 'the policy'
    if self._chat:
      try:
        name = (await self._chat.check())['model']
      except ChatError as e:
        raise SourceError(str(e)) from e
      answer = await self._answer(_PLAIN, plain=True)
      why = getattr(answer, 'message', f'correct {_WHERE}.document or prompts')
      if not getattr(answer, 'passages', ()):
        where = f'{_WHERE}.url={self._config.url!r}'
        raise SourceError(f'{where} answers a query with no document: {why}')
    elif self._config.chat and not self._writer.tokenizer.has_chat:
      fix = f'but {name} has no chat template; use chat=False'
      raise SourceError(f'{_WHERE}.chat=True, {fix}')
    elif self._writer.start:
      await self._writer.start()
    return {'identity': {'simulator': name}}

  async def close(self) -> None:
    if self._chat:
      await self._chat.close()
    elif self._writer.start:
      await self._writer.engine().shutdown()

  async def _answer(self, request: Request, plain: bool = False) -> Answer:
    """plain: asked to see whether the server answers at all."""
    begin, c, question = time.monotonic(), self._config, request.question
    kind = 'useful'
    if self._draw(request) < noise(c, request.step):
      kind = 'noisy'
    values = {'query': request.query, 'k': str(request.k), None: ''}
    values['question'] = question.text if question else ''
    values['answers'] = ' or '.join(question.answers if question else ())
    found = slots(c[kind])
    for _, field in found:
      if field and not values[field]:
        what = f'{_WHERE}.{kind} has {{{field}}}, which the question lacks'
        fix = "use a real search, with config.source.module='service'"
        return types.SearchError(request, 'rejected', f'{what}; {fix}')
    texts = [[(text, True), (values[field], False)] for text, field in found]
    parts = [part for pair in texts for part in pair if part[0]]
    for attempt in range(c.attempts):
      seed = int(self._draw(request, request.query, attempt) * 2**32)
      try:
        reply = await self._write(parts, seed)
      except ChatError as e:
        if e.kind not in ('bad_response', 'unusable'):
          return types.SearchError(request, e.kind, str(e))
        last = e
        continue
      except EngineError as e:
        return types.SearchError(request, 'rejected', f'{_WHERE}: {e}')
      # On hundreds of empty lines, a pattern that spans lines takes minutes.
      reply = '\n'.join(x for x in reply.splitlines() if x.strip())
      documents = list(self._document.finditer(reply))[: request.k]
      passages = tuple(_passage(match, kind) for match in documents)
      if passages and all(p.text for p in passages):
        return types.SearchResult(request, passages, time.monotonic() - begin)
      last = ChatError('unusable', repr(reply[:200]))
    message = f'{c.attempts} replies without a {_WHERE}.document, last: {last}'
    if last.kind != 'unusable':
      return types.SearchError(request, last.kind, message)
    if self._chat and not plain:  # has the server failed, or is it the query?
      answer = await self._answer(_PLAIN, plain=True)
      if not getattr(answer, 'passages', ()):
        message += '; a plain query has no document either'
        return types.SearchError(request, 'rejected', message)
    _log.debug('%r: %s', request.query, message)
    return types.SearchResult(request, (), time.monotonic() - begin)

  def _draw(self, request: Request, *key) -> float:
    """As `sources.core.draw`, by the request."""
    name = self._seed, request.trajectory, request.turn, request.step
    return draw(*name, *key)

  async def _write(self, parts: Sequence[untrusted.Part], seed: int) -> str:
    """Returns a complete reply.

    Raises:
      ChatError: 'unusable' if it is cut, or the prompt leaves no room for it.
    """
    c = self._config
    how = dict(max_tokens=c.max_tokens, temperature=c.temperature, seed=seed)
    if self._chat:
      texts = (text if ours else payload(text)[1:-1] for text, ours in parts)
      message = {'role': 'user', 'content': ''.join(texts)}
      return await self._chat.reply([message], **how)
    engine, tokenizer = self._writer.engine(), self._writer.tokenizer
    if c.chat:
      parts = untrusted.chat_parts(tokenizer, [('user', parts)])
    ids = tokenizer.encode_parts(parts, start=True)
    if len(ids) + c.max_tokens > engine.max_len:
      size = f'{len(ids)} tokens and {_WHERE}.max_tokens={c.max_tokens}'
      raise ChatError('unusable', f'a prompt of {size} exceed engine.max_len')
    sampling = Sampling(stops=c.stops, stop_ids=tokenizer.eos_ids, **how)
    handle = engine.open(types.Prompt(tuple(ids)))
    try:
      done = await engine.generate(handle, sampling)
    finally:
      engine.close(handle)
    reply = tokenizer.decode(done.ids)
    if done.stop == 'length':
      raise ChatError('unusable', f'cut after {c.max_tokens}: {reply!r}')
    return without_thoughts(reply)


def make(config: ConfigDict, *, seed: int, writer, **_) -> SimulatedSource:
  """The source of `config.source` (module='simulated')."""
  return SimulatedSource(config, seed, writer)


def kind_of(passage: types.Passage) -> str:
  """'useful' or 'noisy'; '' of a passage that was not simulated."""
  if old := re.match('simulated-(useful|noisy)-', passage.id):
    return old[1]  # recorded before 2026-12-01
  text = passage.title, passage.text
  return next((k for k in KINDS if name_of(k, *text) == passage.id), '')


def name_of(kind: str, title: str, text: str) -> str:
  """Of a document, whatever query it is for; who reads it learns no kind."""
  content = f'{kind}\0{title}\0{text}'.encode('utf-8', 'surrogatepass')
  return f'simulated-{hashlib.sha256(content).hexdigest()[:12]}'


def _passage(match: re.Match, kind: str) -> types.Passage:
  fields = {'title': '', 'text': match.group(1) or '', **match.groupdict('')}
  title, text = (' '.join(fields[f].split()) for f in ('title', 'text'))
  return types.Passage(name_of(kind, title, text), title, text)
