"""A session of a program with the policy: chats in, sampled tokens recorded.

The sequence of a session grows while each request continues what it holds. A
request whose messages are not those of the session so far, and a reply that the
client has changed, begin a new context (`types.Context`): history is never
encoded again where the policy wrote it, and each sampled token is in exactly
one context, after what it was sampled after.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
import secrets
import time
from typing import Any, NamedTuple

import numpy as np

from searchrl_jax import types
from searchrl_jax.endpoint.streaming import Streamed, Tell
from searchrl_jax.engines.core import Completion, Sampling
from searchrl_jax.text import chat, states
from searchrl_jax.text.chat import ChatError


@dataclasses.dataclass(frozen=True)
class Request:
  """A request of a client, read (`app.read`)."""

  messages: Sequence[Mapping[str, Any]]
  tools: Sequence[Mapping[str, Any]] = ()
  max_tokens: int = 0  # 0: what the context has room for
  temperature: float | None = None  # None: not said
  top_p: float | None = None
  stops: tuple[str, ...] = ()
  seed: int | None = None
  shows_stop: bool = False  # whether the reply has the stop string


class Reply(NamedTuple):
  content: str
  calls: Sequence[chat.Call]
  finish: str  # stop, length or tool_calls
  prompt_tokens: int
  completion: Completion


class _Node(NamedTuple):
  """The chat after a reply: who sends its messages continues its ids."""

  keys: tuple[str, ...]  # of the tools, then of the messages
  ids: list[int]
  end: str  # the control token that the policy ended it with, or ''


@dataclasses.dataclass(eq=False)
class Session:
  """One trajectory of a program; see the module.

  Args:
    question, sample, role: whose trajectory it is.
    engine, tokenizer: of the policy.
    sampling: temperature, top_p, top_k and priority of its requests, whatever
      these say: the trainer scores what was sampled at those of the run.
    seeds: index of a context -> seed of its random stream.
    limits: config.env: max_tokens of a context, and max_contexts.
    find: async (queries, k, turn) -> an answer for each; None: none.
    count: called with counters of `rollout.core.RolloutStats`.

  Attributes:
    key: by which a client names it.
    returned: what it earned, as its program says.
    broken: an error of the engine or the source, for which the run has to stop.
  """

  question: types.Question
  sample: int
  _: dataclasses.KW_ONLY
  engine: Any
  tokenizer: Any
  sampling: Sampling
  seeds: Callable[[int], int]
  limits: Any
  find: Callable | None = None
  count: Callable[..., None] = lambda **counts: None
  role: str = 'solver'

  def __post_init__(self):
    self.key = secrets.token_urlsafe(32)
    self.returned: float | None = None
    self.broken: Exception | None = None
    self._searches: list[types.SearchResult | types.SearchError] = []
    self._record, self._handle = states.Record(), None
    self._nodes: list[_Node] = []
    self._begin, self._replies = time.monotonic(), 0
    self._busy: asyncio.Task | None = None
    self._idle = asyncio.Event()
    self._idle.set()
    self._closed = False

  @property
  def replies(self) -> int:
    """What the policy has been asked and has answered."""
    return self._replies

  @property
  def edits(self) -> int:
    """Contexts that began because a client changed or dropped history."""
    return len(self._record.contexts)

  async def reply(self, request: Request, tell: Tell | None = None) -> Reply:
    """Samples the next message of a chat.

    tell: called with the ids as they are sampled.

    Raises:
      ChatError: the request cannot be used; nothing was sampled.
      Busy: the session is sampling for another request.
      Closed: it has ended.
      asyncio.CancelledError: what was told is recorded, as a reply that the
        client has cut.
      EngineError, ...: also in `broken`: the run has to stop.
    """
    if self._closed:
      raise Closed('the session has ended')
    if self._busy:
      raise Busy('the session is answering another request: one at a time')
    self._busy = asyncio.current_task()
    self._idle.clear()
    try:
      return await self._reply(request, tell)
    finally:
      self._busy = None
      self._idle.set()

  async def _reply(self, request: Request, tell: Tell | None) -> Reply:
    tok, record = self.tokenizer, self._record
    most = self.limits.max_tokens
    tools = json.dumps([*request.tools], sort_keys=True)
    keys = tools, *map(chat.key, request.messages)
    # Others would wait while megabytes are tokenised, which cannot fit.
    size = sum(map(len, keys))
    if size > most * tok.max_token_bytes:
      raise ChatError(
        f'the chat has {size} characters, and the maximum context length is '
        f'{most} tokens (config.env.max_tokens)'
      )
    ids = self._ids(request, keys)
    if not ids:
      raise ChatError('the chat is empty: it has no tokens')
    room = most - len(ids)
    if room < 1:  # programs look for these three words of vLLM's message
      raise ChatError(
        f'the chat has {len(ids)} tokens, and the maximum context length is '
        f'{most} (config.env.max_tokens), with the reply'
      )
    record = self._continued(record, ids)
    n = min(request.max_tokens or room, room)
    streamed = Streamed(self.engine, tok, tell) if tell else None
    try:
      done = await self._sample(record, ids, n, request, streamed)
    except asyncio.CancelledError:
      if streamed and streamed.told:
        self._add(record, streamed.told)
      raise
    except Exception as error:
      self.broken = error
      raise
    self._add(record, done)
    said = full = tok.decode(done.ids)
    # A client may choose 'length' or 'eos', which are ends too, as a stop.
    stopped = done.stop in request.stops and done.stop in said
    if stopped and not request.shows_stop:
      said = said[: said.index(done.stop)]
    content, calls = chat.read_calls(said, request.tools)
    finish = 'length' if done.stop == 'length' and not stopped else 'stop'
    finish = 'tool_calls' if calls else finish
    made = [chat.call({'function': call._asdict()}) for call in calls]
    message = {'role': 'assistant', 'content': content, 'tool_calls': made}
    whole = [*ids, *done.ids.tolist()]
    end = tok.control_name(whole[-1]) if whole[-1] in tok.control else ''
    # Some clients put the stop string back.
    for text in dict.fromkeys((content, content if calls else full)):
      key = chat.key(message | {'content': text})
      self._nodes.append(_Node((*keys, key), whole, end))
    return Reply(content, calls, finish, len(ids), done)

  def _add(self, record: states.Record, done: Completion) -> None:
    """Records a reply, and what `record` has before it."""
    sampled = {'logps': done.logps, 'versions': done.versions}
    new = _segment(done.ids, 'policy', train=True, **sampled)
    begun = len(record.contexts) - self.edits
    before = types.length(self._record.segments)
    added = types.cut(record.segments, before)
    outside = types.length([s for s in added if s.author == 'environment'])
    self._record = dataclasses.replace(states.add(record, [new]), keep=None)
    self._replies += 1
    self.count(
      generations=1,
      sampled_tokens=len(done.ids),
      outside_tokens=outside,
      contexts=begun,
    )

  def _ids(self, request: Request, keys: tuple[str, ...]) -> list[int]:
    """The ids of a chat: as they were sampled, where they were."""
    tok = self.tokenizer
    known = [n for n in self._nodes if keys[: len(n.keys)] == n.keys]
    # Of equal replies the latest, which is held.
    for node in sorted(reversed(known), key=lambda n: -len(n.keys)):
      at = len(node.keys) - 2  # index of the reply among the messages
      try:
        rest = chat.render(tok, request.messages, request.tools, after=at)
      except ChatError:
        continue
      if rest and rest[0][1] and rest[0][0].startswith(node.end):
        rest = [(rest[0][0][len(node.end) :], True), *rest[1:]]
      return node.ids + tok.encode_parts(rest)
    parts = chat.render(tok, request.messages, request.tools)
    return tok.encode_parts(parts, start=True)

  def _continued(self, record: states.Record, ids) -> states.Record:
    """The record with what the request adds, or with a new context."""
    held = record.ids.tolist()
    if not held:
      return states.add(record, [_segment(ids, 'prompt')])
    if ids[: len(held)] == held:
      return states.add(record, [_segment(ids[len(held) :], 'environment')])
    if len(record.contexts) + 1 >= self.limits.max_contexts:
      raise ChatError(
        'the messages are not those of this session so far, and it has no '
        f'further context (config.env.max_contexts={self.limits.max_contexts})'
      )
    # What both have in common is the context's prompt; the rest stands in the
    # record, between the replies.
    differ = (i for i, (a, b) in enumerate(zip(ids, held)) if a != b)
    n = max(next(differ, len(ids) - 1), 1)
    record = states.begin(record, [_segment(ids[:n], 'prompt')], 'edited')
    return states.add(record, [_segment(ids[n:], 'environment')])

  async def _sample(
    self, record, ids, n: int, request: Request, streamed: Streamed | None
  ) -> Completion:
    engine, handle = streamed or self.engine, self._handle
    sampling = dataclasses.replace(
      self.sampling,
      max_tokens=n,
      stops=request.stops,
      stop_ids=self.tokenizer.eos_ids,
      seed=self.seeds(len(record.contexts)),
      limit=self.limits.max_tokens,
    )
    self._handle = None  # until the call has ended, it holds what nobody knows
    try:
      if handle is not None and record.keep == 0:  # nothing in common
        engine.close(handle)
        handle = None
      if handle is None:
        handle = engine.open(types.Prompt(tuple(ids)))
      elif record.keep is not None:
        engine.truncate(handle, record.keep)
      engine.append(handle, ids[len(handle) :])
      done = await engine.generate(handle, sampling)
    except BaseException:
      if handle is not None:
        engine.close(handle)
      raise
    self._handle = handle
    return done

  async def search(
    self, queries: Sequence[str], k: int
  ) -> list[types.SearchResult]:
    """What the run's source finds; the trajectory has it as its searches.

    Raises:
      ChatError: the session has no search.
      SearchFailed: a search failed, and with it the trajectory.
      Exception: of the source, which should raise none; also in `broken`.
    """
    if self.find is None:
      raise ChatError('nothing is searched here', 'queries')
    try:
      found = await self.find(queries, k, max(self._replies - 1, 0))
    except Exception as error:
      self.broken = error
      raise
    self._searches += found
    for one in found:
      if isinstance(one, types.SearchError):
        raise SearchFailed(f'{one.kind}: {one.message}')
    return found

  def close(self) -> None:
    """Ends it, the request that it is answering too; frees what it holds.

    What the client was told of that request is recorded when it is `settled`.
    """
    self._closed = True
    if self._busy:
      self._busy.cancel()
    if self._handle is not None:
      self.engine.close(self._handle)
      self._handle = None

  async def settled(self) -> None:
    """Waits until the request that was answered, if there is one, has ended."""
    await self._idle.wait()

  def trajectory(self, failed: str = '') -> types.Trajectory:
    """What was recorded; `failed`: why it has failed, if it has."""
    segments = self._record.segments
    if not segments:  # no request came
      ids = self.tokenizer.encode_parts([(self.question.text, False)], True)
      segments = (_segment(ids, 'prompt'),)
    meta: dict[str, Any] = {'edits': self.edits}
    if failed:
      meta['error'] = failed[:1000]
    if self.returned is not None:
      meta['returned'] = self.returned
    lost = any(isinstance(s, types.SearchError) for s in self._searches)
    return types.Trajectory(
      self.question,
      segments,
      tuple(self._searches),
      'failed' if failed or lost else 'answer',
      sample=self.sample,
      role=self.role,
      turns=self._replies,
      seconds=time.monotonic() - self._begin,
      contexts=self._record.contexts,
      meta=meta,
    )


class Busy(RuntimeError):
  """The session is answering another request."""


class SearchFailed(RuntimeError):
  """A search of a program failed."""


class Closed(RuntimeError):
  """The session has ended, or never was."""


class Sessions:
  """The sessions that are open, by their key."""

  def __init__(self):
    self._open: dict[str, Session] = {}

  def open(self, session: Session) -> Session:
    self._open[session.key] = session
    return session

  def find(self, key: str) -> Session:
    """Raises Closed if there is none."""
    for known, session in self._open.items():
      # As bytes: a text that is not ASCII would be an error.
      if secrets.compare_digest(known.encode(), key.encode()):
        return session
    raise Closed('no session has this key, or it has ended')

  def close(self, session: Session) -> None:
    self._open.pop(session.key, None)
    session.close()


def _segment(ids, author: str, **more) -> types.Segment:
  return types.Segment(np.asarray(ids, np.int32), author, 'other', **more)
