"""Reranks the first passages of another index with a cross-encoder.

The cross-encoder (Nogueira & Cho, 2019) reads a query and a passage together:
BERT with a pooler and one label, as in the ms-marco models. Scores are its
logits; a sigmoid would not change the order.
"""

from collections.abc import Callable, Sequence
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from retrieval.core import Index, Ranked, check_k, no_results
from retrieval.devices import data_mesh, put, replicate
from retrieval.files import PathLike
from retrieval.index import bert
from retrieval.index.encoder import Tokens, clean, resolve_dtype, sha256
from retrieval.metrics import stage

_LENGTH = 512  # tokens of a pair, if the model has as many positions


class CrossEncoder:
  """Scores pairs of a query and a passage."""

  def __init__(self, path: PathLike, *, dtype='auto', length=None):
    """Loads a BertForSequenceClassification of one label.

    Args:
      path: a folder with config.json, *.safetensors and a tokenizer.
      dtype: of parameters and activations: float32, bfloat16, or auto, see
        `resolve_dtype`.
      length: tokens of a pair, including special tokens; None: 512, or all
        positions of a model that has fewer. The passage is cut; the query is
        cut only if it alone is longer.

    Raises:
      FileNotFoundError, ValueError: see `bert.load` and `encoder.Tokens`.
    """
    path, dtype = pathlib.Path(path), resolve_dtype(dtype)
    self.cfg, params = bert.load(path, jnp.dtype(dtype), head=True)
    if (types := self.cfg.type_vocab_size) < 2:
      raise ValueError(f'{path}: type_vocab_size={types}; a pair needs 2')
    self._tokens = Tokens(path, self.cfg)
    self._tokenizer = self._tokens.to_length('length', length, _LENGTH)
    self.length = self._tokenizer.truncation['max_length']
    self._tokenizer.no_truncation()  # `_encode` cuts pairs
    self.dtype = dtype
    self._sha256 = sha256(path)
    self._mesh = data_mesh()
    self._params = replicate(self._mesh, params)
    self._logits = jax.jit(bert.classify, static_argnames='cfg')

  @property
  def parameters(self) -> dict[str, Any]:
    """JSON of what scores depend on."""
    return {'length': self.length, 'dtype': self.dtype, 'sha256': self._sha256}

  def score(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
    """Logits of (query, passage) pairs, float32 [N]; larger is better."""
    out = np.empty(len(pairs), np.float32)
    batches = self._tokens.batches(self._encode(pairs), self.length)
    done = [(at, self._logits(*self._inputs(*b))) for at, *b in batches]
    for at, logits in done:
      out[at] = np.asarray(logits)[: len(at)]
    return out

  def programs(self, count: int) -> list[Callable[[], None]]:
    """Functions that each compile a program or load it from the disk.

    They may run in any threads. After all of them, `score` compiles nothing
    for at most `count` pairs.
    """

    def build(R: int, T: int) -> None:
      ids, size = np.zeros((R, T), np.int32), np.ones(R, np.int32)
      self._logits.lower(*self._inputs(ids, ids, size)).compile()

    shapes = self._tokens.shapes(count, self.length)
    return [functools.partial(build, *shape) for shape in shapes]

  def _inputs(self, *batch: np.ndarray) -> tuple:
    """The arguments of `bert.classify` for ids, types and lengths."""
    return self._params, self.cfg, *put(self._mesh, *batch)

  def _encode(self, pairs: Sequence[tuple[str, str]]) -> list:
    """[CLS] query [SEP] passage [SEP], the passage cut to fit."""
    queries = {query: None for query, _ in pairs}
    room = self.length - 3

    def tokens(texts):
      texts = [clean(text) for text in texts]
      return self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)

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
  """An index whose first n passages are reordered by a cross-encoder."""

  name = 'rerank'

  def __init__(self, index: Index, contents: Sequence, cross_encoder, n: int):
    """Wraps an index.

    Args:
      index: over the P passages of `contents`.
      contents: [P] texts.
      cross_encoder: gives the scores.
      n: passages of `index` for each query. A search for k > n returns n,
        since scores of the two kinds cannot be compared.
    """
    self._index, self._contents = index, contents
    self._cross_encoder, self.n = cross_encoder, n

  @property
  def parameters(self) -> dict[str, Any]:
    about = {'name': self.name, 'n': self.n}
    about['index'] = dict(self._index.parameters)
    return about | {'cross_encoder': self._cross_encoder.parameters}

  def __len__(self) -> int:
    return len(self._index)

  def search(self, queries: Sequence[str], k: int) -> Ranked:
    """See `retrieval.core.Index.search`."""
    check_k(k)
    first, _ = self._index.search(queries, self.n)
    rows, columns = np.nonzero(first >= 0)
    with stage('rerank'):
      scores = np.full(first.shape, -np.inf, np.float32)
      at = zip(rows.tolist(), first[rows, columns].tolist())
      pairs = [(queries[row], self._contents[i]) for row, i in at]
      scores[rows, columns] = self._cross_encoder.score(pairs)
    order = np.lexsort((first, -scores))[:, :k]
    ids, best = no_results(len(queries), min(k, len(self)))
    ids[:, : order.shape[1]] = np.take_along_axis(first, order, 1)
    best[:, : order.shape[1]] = np.take_along_axis(scores, order, 1)
    return ids, best
