"""What both engines share: handles, requests, and checks of their arguments."""

import abc
import math
import time
from typing import Any

import numpy as np

from searchrl_jax.engines import core
from searchrl_jax.engines.core import Completion, Sampling, require
from searchrl_jax.types import Prompt


class StopFinder:
  """Finds stop strings in the text of one completion, token by token."""

  def __init__(self, stops: tuple[str, ...]):
    self._stops = [(s, s.encode()) for s in stops]
    self._longest = max((len(b) for _, b in self._stops), default=0)
    self._tail = b''

  def __call__(self, text: bytes) -> str | None:
    """Adds one token's bytes; returns the stop string that ends first in them.

    Returns None if the text so far contains no stop string.
    """
    text = self._tail + text
    matches = [
      (at + len(b), -len(b), s)
      for s, b in self._stops
      if (at := text.find(b)) >= 0
    ]
    keep = self._longest - 1
    self._tail = text[-keep:] if keep > 0 else b''
    return min(matches)[2] if matches else None


class Handle:
  """A growing sequence of token ids; len(handle) is its number of tokens."""

  def __init__(self, ids: list[int]):
    self.ids = ids
    self.busy = False  # a generate call is running
    self.closed = False

  def __len__(self) -> int:
    return len(self.ids)


class Request:
  """One generate call and the tokens that were sampled for it."""

  def __init__(self, handle: Any, sampling: Sampling):
    self.handle, self.sampling = handle, sampling
    self.ids: list[int] = []
    self.logps: list[float] = []
    self.versions: list[int] = []
    self.stop = ''
    self._find_stop = StopFinder(sampling.stops)

  def tokens(self) -> list[int]:
    """The handle's tokens and those of this request."""
    return self.handle.ids + self.ids

  def add(self, ids, logps, version: int, tokenizer) -> int:
    """Adds sampled tokens up to the end of the completion.

    Sets `stop` where a stop string, a stop id or max_tokens ends it.

    Returns:
      The number of tokens left over, sampled beyond the end.
    """
    s = self.sampling
    for n, (token, logp) in enumerate(zip(ids, logps, strict=True), 1):
      self.ids.append(token)
      self.logps.append(logp)
      self.versions.append(version)
      if s.stops:
        self.stop = self._find_stop(tokenizer.token_bytes(token)) or ''
      if not self.stop and token in s.stop_ids:
        self.stop = 'eos'
      if not self.stop and len(self.ids) >= s.max_tokens:
        self.stop = 'length'
      if self.stop:
        return len(ids) - n
    return 0

  def completion(self) -> Completion:
    ids, versions = (np.array(x, np.int32) for x in (self.ids, self.versions))
    logps = np.array(self.logps, np.float32)
    return Completion(ids, logps, self.stop, versions)


class HandleEngine(core.Engine):
  """The methods of an engine that only check arguments, change ids or count.

  Args:
    config: config.engine.
    counters, seconds: names of entries of `stats`, separated by spaces.
  """

  handle_type: type[Handle] = Handle
  # The lowest temperature above 0 that the engine distinguishes from 0.
  min_temperature: float

  def __init__(
    self, vocab_size: int, tokenizer, config, counters: str, seconds: str
  ):
    self._tokenizer, self._config = tokenizer, config
    self.vocab_size, self.max_len = vocab_size, config.max_len
    self.dtype = config.dtype  # of its copy of the weights
    self._counters = dict.fromkeys(counters.split(), 0)
    self._seconds = dict.fromkeys(seconds.split(), 0.0)

  def open(self, prompt: Prompt) -> Handle:
    """Raises EngineError: no ids, ids out of range, or too many."""
    require(not prompt.media, 'Prompt.media must be (): it is not supported')
    require(prompt.ids, 'the prompt is empty; it needs at least one token')
    return self.handle_type(self._check_ids(prompt.ids, 0, 'the prompt'))

  def truncate(self, handle: Any, n: int) -> None:
    """Keeps the first n tokens (1 <= n <= len(handle))."""
    self._check_open(handle)
    has = f'the handle has {len(handle)} tokens, at least 1 must stay'
    require(1 <= n <= len(handle), f'truncate to {n}: {has}')
    del handle.ids[n:]

  def append(self, handle: Handle, ids) -> None:
    self._check_open(handle)
    handle.ids.extend(self._check_ids(ids, len(handle), 'append'))

  def close(self, handle: Handle) -> None:
    """Frees what the handle holds. Closing it again has no effect."""
    if not handle.closed:
      self._check_open(handle)
      handle.closed = True
      self._release(handle)

  @abc.abstractmethod
  def _release(self, handle: Any) -> None:
    """Frees what a closed handle holds."""

  def stats(self) -> dict[str, float]:
    seconds = {f'seconds_{k}': v for k, v in self._seconds.items()}
    return {**self._counters, **seconds}

  def _sync_report(
    self, version: int, start: float, n_bytes: int, manifest
  ) -> core.SyncReport:
    """start: time.perf_counter() at the start of the sync."""
    seconds = time.perf_counter() - start
    self._counters['syncs'] += 1
    self._seconds['sync'] += seconds
    return core.SyncReport(
      version, seconds, len(manifest), n_bytes, math.nan, manifest
    )

  def _check_open(self, handle: Handle) -> None:
    """Raises EngineError unless the handle is open and not generating."""
    require(not handle.closed, 'the handle is closed; open or fork another')
    require(not handle.busy, 'the handle is generating; await that call first')

  def _check_ids(self, ids, n_before: int, what: str) -> list[int]:
    """The ids as a list; EngineError if they do not fit after n_before."""
    ids, last = [int(i) for i in ids], self.vocab_size - 1
    fits = n_before + len(ids) <= self.max_len
    more = f'{n_before} + {len(ids)} tokens are more than'
    require(fits, f'{what}: {more} config.engine.max_len={self.max_len}')
    wrong = [i for i in ids if not 0 <= i <= last]
    require(not wrong, f'{what}: ids {wrong[:9]} are not in 0..{last}')
    return ids

  def _check_sampling(self, handle: Handle, s: Sampling) -> None:
    """Raises EngineError unless `s` can be sampled after the handle's ids."""
    low, most = self.min_temperature, self.max_len
    total = len(handle) + s.max_tokens
    fits = s.max_tokens >= 1 and total <= (s.limit or most) <= most
    warm = s.temperature == 0 or low <= s.temperature < math.inf
    good = fits and warm and 0 < s.top_p <= 1 and s.top_k >= 0 and all(s.stops)
    if not good:  # so that the message is not written at every call
      raise core.EngineError(
        f'{s} after {len(handle)} tokens: expected at least 1 of max_tokens, '
        f'all within limit and config.engine.max_len={most}; temperature 0 '
        f'(greedy) or from {low}; top_p in (0, 1]; top_k from 0; no empty stop'
      )
