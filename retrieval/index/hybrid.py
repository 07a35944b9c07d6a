"""Reciprocal rank fusion: combines several indexes over one corpus.

  score(p) = sum over lists that hold p of 1 / (60 + rank of p)

with ranks from 1 (Cormack, Clarke & Buettcher, SIGIR 2009). Different kinds of
scores, such as BM25 and cosines, thus need no common scale.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from retrieval.core import Index, Ranked, check_k, no_results

_CONSTANT = 60


class Hybrid:
  """An index over other indexes; see `retrieval.core.Index`."""

  name = 'hybrid'

  def __init__(self, indexes: Sequence[Index], *, depth: int = 100):
    """Combines indexes.

    Args:
      indexes: over the same corpus.
      depth: passages taken from each index for any k, so that the results for
        a small k begin those for a larger one.
    """
    self._indexes, self.depth = tuple(indexes), depth

  @property
  def parameters(self) -> dict[str, Any]:
    about = {'name': self.name, 'constant': _CONSTANT, 'depth': self.depth}
    return about | {'indexes': [dict(i.parameters) for i in self._indexes]}

  def __len__(self) -> int:
    return len(self._indexes[0])

  def search(self, queries: Sequence[str], k: int) -> Ranked:
    """See `retrieval.core.Index.search`.

    A row has at most `depth` passages of each index.
    """
    check_k(k)
    lists = [index.search(queries, self.depth)[0] for index in self._indexes]
    ids, scores = no_results(len(queries), min(k, len(self)))
    gain_at = 1 / (_CONSTANT + 1 + np.arange(self.depth))
    for row in range(len(queries)):
      held = [found[row] >= 0 for found in lists]
      found = np.concatenate([x[row][h] for x, h in zip(lists, held)])
      gain = np.concatenate([gain_at[: len(h)][h] for h in held])
      # Sorted, so that a sum does not depend on which list gave which rank.
      order = np.lexsort((gain, found))
      passages, at = np.unique(found, return_inverse=True)
      sums = np.bincount(at[order], gain[order]).astype(np.float32)
      best = np.lexsort((passages, -sums))[: ids.shape[1]]
      ids[row, : len(best)] = passages[best]
      scores[row, : len(best)] = sums[best]
    return ids, scores
