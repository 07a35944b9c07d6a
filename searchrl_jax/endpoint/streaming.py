"""Tokens and text of a reply while it is sampled.

`Streamed` samples in pieces. A draw depends on the seed and the position alone,
so the in-process engine samples what one call would have sampled, bit for bit
(with delta nets too, because a piece is a chunk: see engines/jax/states.py).
Servers draw by the position at which a request begins: what they sample depends
on the size of the pieces too.
"""

import codecs
from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

from searchrl_jax.engines.core import Completion, Handle, Sampling
from searchrl_jax.engines.handles import Request
from searchrl_jax.text import parser

_CALL = '<tool_call>'  # with which a call begins, see `chat.read_calls`

Tell = Callable[[Sequence[int]], None]  # new ids -> nothing


class Streamed:
  """An engine that tells of ids as they are sampled; else the engine itself.

  Args:
    engine: `engines.core.Engine`.
    tokenizer: has the bytes of tokens, in which stop strings are found.
    tell: called on the event loop with the new ids of each piece.
    piece: the most tokens of one; 0: engine.piece.

  Attributes:
    told: what the last call of `generate` has told; None: nothing yet.
  """

  told: Completion | None = None

  def __init__(self, engine, tokenizer, tell: Tell, piece: int = 0):
    self._engine, self._tokenizer = engine, tokenizer
    self._tell, self._piece = tell, piece or engine.piece

  def __getattr__(self, name: str) -> Any:
    return getattr(self._engine, name)

  async def generate(self, handle: Handle, sampling: Sampling) -> Completion:
    """As `Engine.generate`; an error leaves the handle as it was."""
    engine, before, self.told = self._engine, len(handle), None
    request = Request(handle, sampling)
    limit = sampling.limit or before + sampling.max_tokens
    try:
      while not request.stop:
        n = min(self._piece, sampling.max_tokens - len(request.ids))
        part = dataclasses.replace(sampling, max_tokens=n, limit=limit)
        done = await engine.generate(handle, part)
        ids = done.ids.tolist()
        # A stop string may begin in one piece and end within the next.
        beyond = request.add(ids, done.logps.tolist(), 0, self._tokenizer)
        if beyond:
          engine.truncate(handle, len(handle) - beyond)
        kept = len(ids) - beyond
        request.versions[-kept:] = done.versions[:kept].tolist()
        self.told = request.completion()
        self._tell(ids[:kept])
    except BaseException:
      engine.truncate(handle, before)
      raise
    return self.told


class Deltas:
  """Text of a reply, as soon as it is certain: called with ids, gives text.

  All of them together are the beginning of `sessions.Reply.content`. What may
  still change is held back: bytes of a character that is not complete, what may
  begin a stop string, and, if there are tools, what may begin a call, or be
  white space around one.

  Attributes:
    begun: whether there were ids.
    sent: the text so far.
  """

  def __init__(self, tokenizer, stops: Sequence[str] = (), tools: bool = False):
    self._token_bytes = tokenizer.token_bytes
    self._decode = codecs.getincrementaldecoder('utf-8')('replace').decode
    self._marks, self._tools = (*stops, *[_CALL] * tools), tools
    self._text, self.sent, self.begun = '', '', False

  def __call__(self, ids: Sequence[int]) -> str:
    self.begun = True
    self._text += self._decode(b''.join(map(self._token_bytes, ids)))
    new = self._text[len(self.sent) : self._certain()]
    self.sent += new
    return new

  def _certain(self) -> int:
    """The number of characters that are certain."""
    text = self._text
    # A reply that is one call begins as JSON; around calls, `content` has no
    # white space.
    if self._tools and (text[:1] == '{' or not text[:1].strip()):
      return 0
    ends = [text.find(mark) for mark in self._marks if mark in text]
    end = min([*ends, len(text) - parser.held(text, self._marks)])
    return len(text[:end].rstrip()) if self._tools else end
