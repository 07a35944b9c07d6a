"""Vectors: the file of a corpus, and what dense indexes over it share.

Every dense index reads INDEX/vectors.npy. Encoding 21 million passages takes
hours to days, so it survives a kill: the file has its full size from the start
(`vectors.npy.part`), blocks of rows are written and flushed to the disk, and
only then `vectors.json` counts them as done. That record also identifies
corpus and encoder, so that only the same work is continued.
"""

import abc
from collections.abc import Callable, Iterator, Sequence
import pathlib
from typing import Any

import numpy as np

from retrieval import files
from retrieval.core import Ranked, check_k
from retrieval.corpus import Corpus

DTYPES = ('float32', 'float16')
SPARE = 8  # results beyond k that cost FAISS next to nothing
TIES = 1024  # how far down equal scores are followed, see `ranked`
_CALL = 1024  # passages of similar length in one call of the encoder
_NOTHING = np.iinfo(np.int64).max  # position of -1 in corpus order


class VectorsError(ValueError):
  """The vectors cannot be made or used; the message says how to fix it."""


class DenseIndex(abc.ABC):
  """Base class of the indexes over vectors; see `core.Index`."""

  name: str

  def __init__(self, encoder: Any, shape: tuple[int, int], what: str, **about):
    """Checks the encoder.

    Args:
      encoder: an `encoder.Encoder`, of queries; None if only `search_vectors`
        is used.
      shape: (P, D), of the vectors.
      what: names them in an error.
      about: further parameters of the index.

    Raises:
      ValueError: the encoder has another dimension.
    """
    self._count, self.dim = shape
    if encoder is not None and encoder.dim != self.dim:
      problem = f'{what} {self.dim} dimensions, the encoder {encoder.dim}'
      raise ValueError(f'{problem}; use the encoder that made the vectors')
    self._encoder = encoder
    self._about = {'name': self.name, **about}

  def __len__(self) -> int:
    return self._count

  @property
  def parameters(self) -> dict[str, Any]:
    if (encoder := self._encoder) is None:
      return self._about
    about = self._about | {'encoder': dict(encoder.parameters)}
    about['encoder_dtype'] = encoder.dtype
    return about | {'query_length': encoder.query_length}

  def search(self, queries: Sequence[str], k: int) -> Ranked:
    """See `core.Index.search`; needs an encoder."""
    return self.search_vectors(self._encoder.encode_queries(queries), k)

  @abc.abstractmethod
  def search_vectors(self, q: np.ndarray, k: int) -> Ranked:
    """`search` for vectors of queries, [Q, D]."""

  def check_k(self, k: int, limit: int) -> int:
    """min(k, P); ValueError for k < 1, or both k and P above limit."""
    check_k(k)
    if (k := min(k, len(self))) > limit:
      raise ValueError(f'k={k}: this index gives at most {limit} passages')
    return k


def not_finite(vectors: np.ndarray) -> int | None:
  """The first row of vectors [n, D] that is not finite, or None."""
  bad = np.flatnonzero(~np.isfinite(vectors).all(-1))
  return int(bad[0]) if len(bad) else None


def blocks(
  vectors: np.ndarray, size: int, start: int = 0
) -> Iterator[tuple[int, np.ndarray]]:
  """Yields (first row, float32 [n, D]) of vectors, n <= size, from `start`.

  Raises:
    ValueError: a vector that is not finite.
  """
  for first in range(start, len(vectors), size):
    part = np.ascontiguousarray(vectors[first : first + size], np.float32)
    if (bad := not_finite(part)) is not None:
      fix = 'encode the corpus in float32'
      raise ValueError(f'vectors: row {first + bad} is not finite; {fix}')
    yield first, part


def ranked(
  ask: Callable, q: np.ndarray, k: int, *, spare=SPARE, floor=0, most=TIES
) -> Ranked:
  """Finds the k best of each query, equal scores in corpus order.

  Libraries cut between equal scores arbitrarily. This function therefore asks
  for a few more than k, and up to `most` if the last of those equals the k-th.
  Longer ties are cut as the library does.

  Args:
    ask: vectors [Q, D] and n -> (ids, scores), [Q, n] each, best first, ties
      in any order; id -1 for none.
    q: [Q, D].
    k: >= 1, at most the size of the index.
    spare: results beyond k of the first call.
    floor: the smallest n to ask for.
    most: the largest n to ask for.

  Returns:
    ids: int64 [Q, k], -1 at the end of a row without more results.
    scores: float32 [Q, k], -inf where ids is -1.
  """

  def sort(q, n):
    ids, scores = ask(q, n)
    ids = np.asarray(ids, np.int64)
    scores = np.where(ids < 0, -np.inf, scores).astype(np.float32)
    order = np.lexsort((np.where(ids < 0, _NOTHING, ids), -scores))
    return (np.take_along_axis(x, order, 1) for x in (ids, scores))

  most = max(most, k)
  n = min(max(k + spare, floor), most)
  ids, scores = sort(q, n)
  tied = (scores[:, -1] == scores[:, k - 1]) & (ids[:, -1] >= 0)
  if n < most and tied.any():
    deeper = sort(q[tied], most)
    ids[tied, :k], scores[tied, :k] = (x[:, :k] for x in deeper)
  return ids[:, :k], scores[:, :k]


def identity(corpus: Corpus, encoder: Any, dtype: str) -> dict:
  """What vectors depend on: equal identities give equal vectors."""
  by = {**encoder.parameters, 'arithmetic': encoder.dtype}
  return {'corpus': corpus.identity, 'encoder': by, 'dtype': dtype}


def open_vectors(folder: pathlib.Path) -> np.ndarray:
  """vectors.npy, [P, D], memory-mapped."""
  return np.load(folder / 'vectors.npy', mmap_mode='r')


def encode(
  corpus: Corpus, encoder: Any, folder, *, dtype='float32', block=8192
) -> np.ndarray:
  """Writes the vectors of a corpus, or those that are missing.

  Args:
    corpus: P passages; one block of them is in memory at a time.
    encoder: encodes passages as [n, D] float32.
    folder: where `vectors.npy` and `vectors.json` are.
    dtype: of the file, one of `DTYPES`.
    block: passages between two records of progress. A block is sorted by
      length to save padding; rows are in corpus order.

  Returns:
    [P, D], memory-mapped.

  Raises:
    VectorsError: the folder has vectors of another corpus, encoder or dtype,
      or the encoder returned a vector that is not finite.
    files.FilesError: the disk is too small or a record is damaged.
  """
  about = identity(corpus, encoder, dtype)
  done = check_done(folder / 'vectors.json', about)
  if (folder / 'vectors.npy').exists() and done == len(corpus):
    return open_vectors(folder)
  if not (folder / 'vectors.npy.part').exists():
    done = 0

  def encoded():
    for start in range(done, len(corpus), block):
      texts = corpus.contents[start : start + block]
      vectors = np.empty((len(texts), encoder.dim), np.float32)
      # The longest first, so that too little memory shows at once.
      order = np.argsort([-len(t) for t in texts], kind='stable')
      for few in np.split(order, range(_CALL, len(order), _CALL)):
        vectors[few] = encoder.encode_passages([texts[i] for i in few])
      yield vectors

  return write(encoded(), (len(corpus), encoder.dim), about, folder, done)


def check_done(record: pathlib.Path, about: dict) -> int:
  """The number of rows that are on the disk already.

  Raises:
    VectorsError: they have another identity.
  """
  if (saved := files.read_json(record)) is None:
    return 0
  if differ := files.differences(saved['identity'], about):
    problem = f'holds vectors of something else: {"; ".join(differ)}'
    raise VectorsError(f'{record.parent}: {problem}. --restart discards them.')
  return saved['done']


def write(
  rows: Iterator, shape: tuple[int, int], about: dict, folder, done=0
) -> np.ndarray:
  """Writes vectors.npy block by block; a kill keeps the written blocks.

  Args:
    rows: blocks [n, D] in corpus order, from row `done` on.
    shape: [P, D].
    about: see `identity`; its dtype is that of the file.
    folder: of the index.
    done: rows that are there already.

  Raises:
    VectorsError: a vector is not finite.
    files.FilesError: the disk is too small.
  """
  final, part = folder / 'vectors.npy', folder / 'vectors.npy.part'
  record, dtype = folder / 'vectors.json', about['dtype']
  if not done:
    part.unlink(missing_ok=True)  # frees its blocks
    files.need_space(part, shape[0] * shape[1] * np.dtype(dtype).itemsize)
    np.lib.format.open_memmap(part, 'w+', dtype, shape)
    files.write_json(record, {'identity': about, 'done': 0})
  mapped = np.lib.format.open_memmap(part, 'r')
  # Written and not mapped: a full disk is then an error instead of a SIGBUS.
  with (
    open(part, 'r+b') as file,
    files.progress(shape[0], 'write', unit=' vectors', initial=done) as bar,
  ):
    file.seek(mapped.offset + done * mapped.strides[0])
    for block in rows:
      with np.errstate(over='ignore'):
        block = np.ascontiguousarray(block, dtype)
      if (bad := not_finite(block)) is not None:
        problem = f'vector {done + bad}, counted from 0, is not finite'
        raise VectorsError(f'{problem}. Use --vectors=float32 --dtype=float32.')
      file.write(block)
      files.sync(file)
      done += len(block)
      bar.update(len(block))
      files.write_json(record, {'identity': about, 'done': done})
    files.commit(file, part, final)
  return open_vectors(folder)
