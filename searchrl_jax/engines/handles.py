"""What both engines share beside `core.Engine`: handles and requests."""

from typing import Any

import numpy as np

from searchrl_jax.engines.core import Completion, Sampling


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
    found = ((text.find(b), len(b), s) for s, b in self._stops)
    matches = [(at + n, -n, s) for at, n, s in found if at >= 0]
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
