"""A cross-encoder over the first passages of another index.

The cross-encoder (Nogueira & Cho, 2019) reads a query and a passage together:
BERT with a pooler and one label, as the ms-marco models have it. Scores are
its logits; a sigmoid would not change the order.
"""

from collections.abc import Callable, Sequence
import functools
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from retrieval import bert
from retrieval.core import Index
from retrieval.devices import data_mesh, put
from retrieval.encoder import Tokens, clean, sha256, tell_dtype
from retrieval.metrics import stage

_LENGTH = 512  # tokens of a pair, where the model has as many


class CrossEncoder:
  """Scores pairs of a query and a passage."""

  def __init__(
    self,
    path: str | os.PathLike,
    *,
    dtype: str = 'auto',
    length: int | None = None,
    batch: int | None = None,
  ):
    """Loads a BertForSequenceClassification of one label.

    Args:
      path: a folder with config.json, *.safetensors and a tokenizer.
      dtype: of parameters and activations: float32, bfloat16, or auto, see
        `tell_dtype`.
      length: tokens of a pair, special ones included; None: 512, or all
        positions of a model that has fewer. The passage is cut; a query only
        where it alone is longer.
      batch: the most tokens of a batch; None: what suits the device.

    Raises:
      FileNotFoundError, ValueError: see `bert.load` and `encoder.Tokens`.
    """
    path, dtype = pathlib.Path(path), tell_dtype(dtype)
    self.cfg, params = bert.load(path, jnp.dtype(dtype), head=True)
    if self.cfg.type_vocab_size < 2:
      raise ValueError(
        f'{path}: type_vocab_size={self.cfg.type_vocab_size}; a pair needs 2'
      )
    self._tokens = Tokens(path, self.cfg, batch)
    if length is None:
      length = min(_LENGTH, self.cfg.max_position_embeddings)
    self._tokenizer = self._tokens.to_length('length', length)
    self._tokenizer.no_truncation()  # a pair is cut here, see _encode
    self.length, self.dtype = length, dtype
    self._sha256 = sha256(path)
    self._mesh = data_mesh()
    self._params = jax.device_put(
      params, NamedSharding(self._mesh, PartitionSpec())
    )
    self._logits = jax.jit(
      lambda *batch: bert.classify(batch[0], self.cfg, *batch[1:])
    )

  @property
  def parameters(self) -> dict[str, Any]:
    """What scores depend on, for JSON."""
    return {'length': self.length, 'dtype': self.dtype, 'sha256': self._sha256}

  def score(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
    """Logits of (query, passage) pairs, float32 [N]; larger is better."""
    out = np.empty(len(pairs), np.float32)
    rows = self._encode(pairs)
    done = []
    lengths = [len(row.ids) for row in rows]
    for at, R, T in self._tokens.batches(lengths, self.length):
      batch = np.zeros((2, R, T), np.int32)
      size = np.ones(R, np.int32)
      for r, i in enumerate(at):
        size[r] = lengths[i]
        batch[:, r, : lengths[i]] = rows[i].ids, rows[i].type_ids
      ids, types, size = put(self._mesh, *batch, size)
      done.append((at, self._logits(self._params, ids, size, types)))
    for at, logits in done:
      out[at] = np.asarray(logits)[: len(at)]
    return out

  def programs(self, count: int) -> list[Callable[[], None]]:
    """Calls, each of which compiles one program or loads it from the disk.

    They may run in any threads. After all of them, `score` compiles nothing
    for at most `count` pairs.
    """
    return [
      functools.partial(self._compile, *shape)
      for shape in self._tokens.shapes(count, self.length)
    ]

  def _compile(self, R: int, T: int) -> None:
    ids, size = np.zeros((R, T), np.int32), np.ones(R, np.int32)
    ids, types, size = put(self._mesh, ids, ids, size)
    self._logits.lower(self._params, ids, size, types).compile()

  def _encode(self, pairs: Sequence[tuple[str, str]]) -> list:
    """[CLS] query [SEP] passage [SEP], the passage cut to fit."""
    queries = {query: None for query, _ in pairs}
    room = self.length - 3

    def tokens(texts):
      return self._tokenizer.encode_batch_fast(
        [clean(text) for text in texts], add_special_tokens=False
      )

    for query, encoding in zip(queries, tokens(queries), strict=True):
      encoding.truncate(room)
      queries[query] = encoding
    passages = tokens([passage for _, passage in pairs])
    rows = []
    for (query, _), passage in zip(pairs, passages, strict=True):
      first = queries[query]
      passage.truncate(room - len(first.ids))
      rows.append(self._tokenizer.post_process(first, passage))
    return rows


class Rerank:
  """An index whose first n passages a cross-encoder orders anew."""

  name = 'rerank'

  def __init__(
    self,
    index: Index,
    contents: Sequence[str],
    cross_encoder: CrossEncoder,
    n: int,
  ):
    """Wraps an index.

    Args:
      index: over the P passages of `contents`.
      contents: [P] texts.
      cross_encoder: gives the scores.
      n: passages of `index` for each query. There are no others to be had:
        a search for k > n ends after n, since scores of two kinds do not mix.

    Raises:
      ValueError: n < 1, or an index of another corpus.
    """
    if n < 1:
      raise ValueError(f'n={n} must be at least 1')
    if len(index) != len(contents):
      raise ValueError(
        f'the index holds {len(index)} passages, contents {len(contents)}'
      )
    self._index, self._contents = index, contents
    self._cross_encoder, self.n = cross_encoder, n

  @property
  def parameters(self) -> dict[str, Any]:
    return {
      'name': self.name,
      'n': self.n,
      'index': dict(self._index.parameters),
      'cross_encoder': self._cross_encoder.parameters,
    }

  def __len__(self) -> int:
    return len(self._index)

  def search(
    self, queries: Sequence[str], k: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """See `retrieval.core.Index.search`."""
    if k < 1:
      raise ValueError(f'k={k} must be at least 1')
    first, _ = self._index.search(queries, self.n)
    rows, columns = np.nonzero(first >= 0)
    with stage('rerank'):
      scores = np.full(first.shape, -np.inf, np.float32)
      scores[rows, columns] = self._cross_encoder.score(
        [
          (queries[row], self._contents[i])
          for row, i in zip(rows.tolist(), first[rows, columns].tolist())
        ]
      )
    order = np.lexsort((first, -scores))[:, :k]
    ids = np.full((len(queries), min(k, len(self))), -1, np.int64)
    best = np.full(ids.shape, -np.inf, np.float32)
    ids[:, : order.shape[1]] = np.take_along_axis(first, order, 1)
    best[:, : order.shape[1]] = np.take_along_axis(scores, order, 1)
    return ids, best
