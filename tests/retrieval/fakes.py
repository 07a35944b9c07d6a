"""Stand-ins: an encoder without a model, a searcher without an index.

Processes that tests kill import this: it imports no conftest.
"""

import functools
import zlib

import numpy as np

from retrieval.core import Found


class FakeEncoder:
  """Sums a random vector for each word: texts with words in common are near.

  `encoded` counts its passages.
  """

  encoded = 0
  dtype = 'float32'
  pause = None  # called before each batch

  def __init__(
    self,
    path='fake',
    *,
    pooling='mean',
    passage_prefix='passage: ',
    normalise=True,
    dim=32,
    **unused,
  ):
    self.dim = dim
    self.parameters = {
      'family': 'fake',
      'pooling': pooling,
      'passage_prefix': passage_prefix,
      'normalise': normalise,
      'dim': dim,
      'sha256': str(path),
    }

  def encode_passages(self, texts):
    if type(self).pause:
      type(self).pause()
    type(self).encoded += len(texts)
    return np.stack([self._encode(text) for text in texts])

  def encode_queries(self, texts):
    return np.stack([self._encode(text) for text in texts])

  def _encode(self, text):
    p = self.parameters
    words = (p['passage_prefix'] + text).split()
    if p['pooling'] == 'cls':
      words = words[:5]
    v = sum(
      (word_vector(p['sha256'] + w, self.dim) for w in words),
      np.full(self.dim, 1e-3, np.float32),
    )
    return v / np.linalg.norm(v) if p['normalise'] else v


@functools.lru_cache(100_000)
def word_vector(word, dim):
  seed = zlib.crc32(word.encode())
  return np.random.default_rng(seed).normal(size=dim).astype(np.float32)


def generate(count, seed=0, words=300):
  """Lines of a corpus of `count` passages of 5 to 30 words."""
  rng = np.random.default_rng(seed)
  return [
    (
      str(i),
      f'title{i}',
      ' '.join(f'w{w}' for w in rng.integers(0, words, rng.integers(5, 30))),
    )
    for i in range(count)
  ]


class Source:
  """A searcher that answers from a dict, and counts what it is asked."""

  def __init__(self, answers=None, identity=None):
    self.answers, self.asked = answers or {}, []
    self.identity = identity or {'index': 'source', 'v': 1}
    self.closed = False

  def search(self, queries, k):
    self.asked += [(query, k) for query in queries]
    return [
      self.answers[query]
      if query in self.answers
      else [
        Found(f'{query}-{i}', f'"T"\n{query}', 1 / i) for i in range(1, k + 1)
      ]
      for query in queries
    ]

  def close(self):
    self.closed = True
