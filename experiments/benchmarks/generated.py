"""Generated passages and vectors for benchmarks of retrieval.

Words come independently, by Zipf's law, the English stop words being the most
frequent. Vectors lie around random centres.
"""

from collections.abc import Iterator
import functools
import time

import numpy as np

DIM = 768  # of the vectors, as e5-base's
_VOCABULARY = 8_000_000
_CHUNK = 10_000  # passages generated at once
_CENTRES = 4096
_LETTERS = str.maketrans('0123456789abcdef', 'bcdfghjklmnpqrtv')


def word(rank: int) -> str:
  """The word of a rank, from 0; stop words come first."""
  stop = _stop_words()
  if rank < len(stop):
    return stop[rank]
  # Digits are letters that no stemmer takes for a suffix.
  return f'{rank:x}'.translate(_LETTERS)


@functools.cache
def _stop_words() -> list[str]:
  from retrieval.index.bm25 import STOP_WORDS

  return sorted(STOP_WORDS['english'])


def shares() -> np.ndarray:
  """Of words up to each rank, by Zipf's law, steeper among rare words.

  The bend is that of Ferrer i Cancho and Sole, 2001: 100,000 different words
  in 26,000 passages, as in Wikipedia, and 4 million in 21 million.
  """
  rank = np.arange(_VOCABULARY)
  found = np.cumsum((1 + rank / 5000) ** -0.7 / (rank + 2.7))
  return found / found[-1]


def texts(count: int, words: int, seed: int) -> Iterator[str]:
  """`count` texts of independent words."""
  upto, rng = shares(), np.random.default_rng(seed)
  for first in range(0, count, _CHUNK):
    size = (min(_CHUNK, count - first), words)
    for row in np.searchsorted(upto, rng.random(size)).tolist():
      yield ' '.join(map(word, row))


class Generated:
  """Vectors in place of an encoder's, of length 1."""

  dim, dtype, parameters = DIM, 'float32', {'generated': 0}

  def __init__(self):
    self.seconds = 0.0
    self._rng = np.random.default_rng(0)
    self._centres = self._normal(_CENTRES)

  def _normal(self, count: int) -> np.ndarray:
    """[count, D], of length about 1."""
    drawn = self._rng.standard_normal((count, DIM), np.float32)
    drawn *= np.float32(DIM**-0.5)
    return drawn

  def encode_passages(self, passages: list[str]) -> np.ndarray:
    begun = time.perf_counter()
    rows = self._normal(len(passages))
    rows += self._centres[self._rng.integers(_CENTRES, size=len(rows))]
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    self.seconds += time.perf_counter() - begun
    return rows
