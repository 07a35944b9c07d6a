"""Texts and vectors without a model: the same text, the same vector."""

import hashlib

import numpy as np


def unit(x):
  return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)


def clustered(count, dim, seed=0, clusters=20, spread=0.05):
  """Unit vectors in tight clusters: scores are many and close together."""
  rng = np.random.default_rng(seed)
  centres = unit(rng.normal(size=(clusters, dim)))
  return unit(
    centres[rng.integers(0, clusters, count)]
    + spread * rng.normal(size=(count, dim))
  )


def best(vectors, q, k):
  """Exact ids and scores by numpy, ties in order; and all scores, float64."""
  scores = q.astype(np.float64) @ vectors.astype(np.float64).T
  ids = np.argsort(-scores, axis=1, kind='stable')[:, :k]
  return ids, np.take_along_axis(scores, ids, 1), scores


def assert_exact(found, vectors, q, k, within=2e-6):
  """Scores are numpy's; so are ids, up to ties within `within`."""
  ids, scores = found
  _, want, every = best(vectors, q, k)
  np.testing.assert_allclose(scores, want, rtol=0, atol=within)
  theirs = np.take_along_axis(every, ids, 1)
  np.testing.assert_allclose(scores, theirs, rtol=0, atol=within)
  for row in ids.tolist():
    assert len(set(row)) == len(row)


def recall(ids, vectors, q):
  want, _, _ = best(vectors, q, ids.shape[1])
  hits = [len(set(a) & set(b)) for a, b in zip(ids.tolist(), want.tolist())]
  return sum(hits) / want.size


class FakeEncoder:
  """Unit vectors near that of a text's first word.

  Its `batches`, `params` and `embed` are those that `dense_jax` compiles: a
  text's tokens are its vector.
  """

  dtype, query_length, params = 'float32', 256, {}

  def __init__(self, dim=32, name='fake'):
    self.dim, self.parameters = dim, {'family': name, 'dim': dim}

  def encode_passages(self, texts):
    return np.array([self._vector(text) for text in texts], np.float32).reshape(
      len(texts), self.dim
    )

  encode_queries = encode_passages

  def batches(self, texts, kind):
    for start in range(0, len(texts), 64):
      part = self.encode_passages(texts[start : start + 64])
      rows = np.zeros((64, self.dim), np.float32)
      rows[: len(part)] = part
      yield np.arange(start, start + len(part)), rows, np.ones(64, np.int32)

  def embed(self, params, ids, lengths):
    return ids

  def _vector(self, text):
    def random(text):
      digest = hashlib.sha256(text.encode('utf-8', 'surrogatepass')).digest()
      seed = int.from_bytes(digest[:8], 'little')
      return np.random.default_rng(seed).normal(size=self.dim)

    return unit(random((text.split() or [''])[0]) + 0.3 * random(text))


class FakeCrossEncoder:
  """Scores a pair by the words it has in common: few values, many ties."""

  parameters = {'family': 'fake'}

  def score(self, pairs):
    return np.array(
      [len(set(a.split()) & set(b.split())) for a, b in pairs], np.float32
    )
