"""What may be asked of an engine, and for how long: what engines share."""

from collections.abc import Iterator
import contextlib
import math
import time
from typing import Any

from searchrl_jax.engines.core import EngineError, Sampling

AHEAD = 2  # requests of a server's slot: that which it serves, and the next


class Handle:
  """A growing sequence of ids, held here for a remote engine."""

  def __init__(self, ids: list[int]):
    self.ids = ids
    self.home: Any = None  # the server that caches its prefix
    self.busy = False  # a generate call is running
    self.closed = False

  def __len__(self) -> int:
    return len(self.ids)


class Patience:
  """The time left for a call, seconds; that of a hold does not count."""

  def __init__(self, seconds: float):
    self._until = time.monotonic() + seconds

  def left(self) -> float:
    return max(0.0, self._until - time.monotonic())

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    begin = time.monotonic()
    try:
      yield
    finally:
      self._until += time.monotonic() - begin


def check_open(handle: Any) -> None:
  """Raises EngineError for what is no open, idle handle."""
  if not isinstance(handle, Handle):
    raise EngineError(f'{handle!r} is no handle of this engine')
  if handle.closed:
    raise EngineError('the handle is closed; open or fork another')
  if handle.busy:
    raise EngineError(
      'the handle is generating; await that call (or cancel it) first'
    )


def token_bytes(tokenizer, token: int) -> bytes:
  """b'' for the padding ids of a model with more ids than its tokenizer."""
  if token >= tokenizer.vocab_size:
    return b''
  return tokenizer.token_bytes(token)


def check_ids(
  ids, held: int, what: str, vocab_size: int, max_len: int
) -> list[int]:
  """The ids as a list; EngineError if `held` tokens and they do not fit."""
  ids = [int(i) for i in ids]
  if held + len(ids) > max_len:
    raise EngineError(
      f'{what}: {held} + {len(ids)} tokens are more than '
      f'config.engine.max_len={max_len}'
    )
  for i in ids:
    if not 0 <= i < vocab_size:
      raise EngineError(f'{what}: id {i} is not in 0..{vocab_size - 1}')
  return ids


def check_sampling(
  s: Sampling, held: int, max_len: int, coolest: float
) -> None:
  """EngineError unless `s` can be sampled after `held` tokens.

  coolest: the least temperature above 0 that the engine tells from 0.
  """
  if s.max_tokens < 1:
    raise EngineError(f'Sampling.max_tokens={s.max_tokens}: at least 1')
  if held + s.max_tokens > max_len:
    raise EngineError(
      f'the handle has {held} tokens; {s.max_tokens} more exceed '
      f'config.engine.max_len={max_len}'
    )
  if s.limit and not held + s.max_tokens <= s.limit <= max_len:
    raise EngineError(
      f'Sampling.limit={s.limit}: the handle has {held} tokens and may get '
      f'{s.max_tokens} more, of config.engine.max_len={max_len} in all'
    )
  if s.temperature != 0 and not coolest <= s.temperature < math.inf:
    raise EngineError(
      f'Sampling.temperature={s.temperature}: 0 (greedy) or at least {coolest}'
    )
  if not 0 < s.top_p <= 1:
    raise EngineError(f'Sampling.top_p={s.top_p}: in (0, 1]')
  if s.top_k < 0:
    raise EngineError(f'Sampling.top_k={s.top_k}: 0 (all) or more')
  if not all(s.stops):
    raise EngineError('Sampling.stops holds an empty string')
