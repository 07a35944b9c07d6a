"""Reciprocal rank fusion: several indexes over one corpus, as one.

  score(p) = sum over lists that hold p of 1 / (60 + rank of p)

with ranks from 1 (Cormack, Clarke & Buettcher, SIGIR 2009). Scores of
different kinds, BM25's and cosines, thus need no common scale.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from retrieval.core import Index

_CONSTANT = 60


class Hybrid:
  """An index made of others; see `retrieval.core.Index`."""

  name = 'hybrid'

  def __init__(self, indexes: Sequence[Index], *, depth: int = 100):
    """Joins indexes.

    Args:
      indexes: over the same corpus.
      depth: passages taken from each, whatever k is: a short list is then
        the beginning of a longer one.

    Raises:
      ValueError: no index, indexes of different lengths, or depth < 1.
    """
    if not indexes:
      raise ValueError('hybrid needs at least one index')
    lengths = [len(index) for index in indexes]
    if len(set(lengths)) > 1:
      named = ', '.join(f'{i.name} {n}' for i, n in zip(indexes, lengths))
      raise ValueError(
        f'the indexes hold different numbers of passages ({named}); build all '
        'from one corpus'
      )
    if depth < 1:
      raise ValueError(f'depth={depth} must be at least 1')
    self._indexes, self.depth = tuple(indexes), depth

  @property
  def parameters(self) -> dict[str, Any]:
    return {
      'name': self.name,
      'constant': _CONSTANT,
      'depth': self.depth,
      'indexes': [dict(index.parameters) for index in self._indexes],
    }

  def __len__(self) -> int:
    return len(self._indexes[0])

  def search(
    self, queries: Sequence[str], k: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """See `retrieval.core.Index.search`.

    A row ends with the passages of its lists, at most depth from each.
    """
    if k < 1:
      raise ValueError(f'k={k} must be at least 1')
    k = min(k, len(self))
    lists = [index.search(queries, self.depth)[0] for index in self._indexes]
    ids = np.full((len(queries), k), -1, np.int64)
    scores = np.full((len(queries), k), -np.inf, np.float32)
    gain_at = 1 / (_CONSTANT + 1 + np.arange(self.depth))
    for row in range(len(queries)):
      held = [found[row] >= 0 for found in lists]
      found = np.concatenate([x[row][h] for x, h in zip(lists, held)])
      gain = np.concatenate([gain_at[: len(h)][h] for h in held])
      # Sorted: a sum then does not depend on which list gave which rank.
      order = np.lexsort((gain, found))
      passages, at = np.unique(found, return_inverse=True)
      sums = np.zeros(len(passages))
      np.add.at(sums, at[order], gain[order])
      sums = sums.astype(np.float32)
      best = np.lexsort((passages, -sums))[:k]
      ids[row, : len(best)] = passages[best]
      scores[row, : len(best)] = sums[best]
    return ids, scores
