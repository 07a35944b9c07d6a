"""Takes vectors that exist already: an index or saved embeddings of a user.

Known are FAISS indexes of inner product (Search-R1's `e5_Flat.index` and
`e5_HNSW64.index`), its headerless `.memmap` of float32, the same of float16,
and .npy. A file in parts is joined. Nothing is loaded whole.

That a file fits corpus and encoder is measured: a sample of passages is
encoded again and compared with the rows that ought to be theirs. The bars:

  exact storage   median cosine >= 0.999, at most 10 % of them below 0.99 (a
  (float, HNSW,   limit of length differs), own row the nearest of the sample
  IVF-Flat)       for >= 95 %, median length within 1 %
  lossy storage   median cosine >= 0.7, own row the nearest for >= 90 %; a
  (PQ, SQ)        prefix or pooling that differs may pass unseen

What falls short is refused, with what was measured and the setting, order or
shift under which it would fit, where one is found.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import os
import pathlib
from typing import Any

import faiss
import numpy as np

from retrieval import faiss_build, files, vectors
from retrieval.corpus import Corpus

_BLOCK = 16384  # rows in memory at once
_SCAN = 1 << 18  # rows in which a misplaced passage is looked for
_TRIED = [
  {'pooling': pooling, 'passage_prefix': prefix}
  for pooling in ('mean', 'cls')
  for prefix in ('', 'passage: ', 'query: ')
]


class AdoptError(ValueError):
  """The file does not fit; the message says what was measured."""


@dataclasses.dataclass
class Stored:
  """Vectors in a file of a user."""

  path: pathlib.Path
  kind: str  # for people
  shape: tuple[int, int]  # [P, D]
  rows: Callable[[int, int], np.ndarray]  # (start, count) -> [count, D]
  dtype: str = 'float32'
  exact: bool = True
  factory: str | None = None  # of a FAISS index

  def pick(self, positions: Sequence[int]) -> np.ndarray:
    return np.concatenate(
      [np.asarray(self.rows(int(i), 1), np.float32) for i in positions]
    )

  def blocks(self, most: int | None = None) -> Iterator[np.ndarray]:
    count = min(self.shape[0], most or self.shape[0])
    for start in range(0, count, _BLOCK):
      yield self.rows(start, min(_BLOCK, count - start))


def open_stored(path: pathlib.Path, count: int, dim: int) -> Stored:
  """Opens a file of vectors, told by its bytes and its size.

  Args:
    path: the file.
    count: P, the passages of the corpus.
    dim: D, of the encoder.

  Raises:
    AdoptError: it is of no kind that is known, or of another P, D or metric.
  """
  size = path.stat().st_size
  with open(path, 'rb') as file:
    magic = file.read(6)
  sizes = {count * dim * 4: 'float32', count * dim * 2: 'float16'}
  if magic == b'\x93NUMPY' or size in sizes:
    try:
      array = (
        np.memmap(path, sizes[size], 'r', shape=(count, dim))
        if magic != b'\x93NUMPY'
        else np.load(path, mmap_mode='r')
      )
    except ValueError as error:
      raise AdoptError(f'{path}: {error}') from None
    if array.ndim != 2 or str(array.dtype) not in vectors.DTYPES:
      raise AdoptError(
        f'{path}: holds {array.dtype} {array.shape}, not float32 or float16 '
        'of [passages, dimensions]'
      )
    form = 'npy' if magic == b'\x93NUMPY' else 'raw'
    stored = Stored(
      path,
      f'{form} {array.dtype}',
      array.shape,
      lambda start, n: array[start : start + n],
      str(array.dtype),
    )
  else:
    stored = _open_faiss(path, count, dim, size)
  if stored.shape != (count, dim):
    raise AdoptError(
      f'{path}: holds {stored.shape[0]} vectors of {stored.shape[1]} '
      f'dimensions; the corpus has {count} passages and the encoder {dim} '
      'dimensions. Another corpus or model made it, or a part is missing.'
    )
  return stored


def _open_faiss(path: pathlib.Path, count: int, dim: int, size: int) -> Stored:
  try:
    index = faiss_build.read(path)
  except RuntimeError as error:
    reason = str(error).partition('Error: ')[2] or str(error)
    raise AdoptError(
      f'{path}: {size} bytes are no .npy file, no whole FAISS index '
      f'({reason[:120]!r}), and not {count} raw vectors of {dim} dimensions, '
      f'which take {count * dim * 4} bytes as float32, half as float16. Is a '
      'part missing (give --adopt for each), or the corpus another?'
    ) from None
  if index.metric_type != faiss.METRIC_INNER_PRODUCT:
    raise AdoptError(
      f'{path}: a FAISS index of metric {index.metric_type}, not of inner '
      'product; its scores would mean something else. Build it anew from '
      'saved embeddings.'
    )
  exact, factory = True, None
  if isinstance(index, faiss.IndexHNSWFlat):
    factory = f'HNSW{index.hnsw.nb_neighbors(1)}'
  elif isinstance(index, faiss.IndexIVF):
    index.make_direct_map()
    flat = isinstance(index, faiss.IndexIVFFlat)
    if flat or isinstance(index, faiss.IndexIVFPQ):
      code = 'Flat' if flat else f'PQ{index.pq.M}x{index.pq.nbits}'
      factory, exact = f'IVF{index.nlist},{code}', flat
  elif isinstance(index, faiss.IndexFlat):
    factory = 'Flat'
  if factory is None:
    raise AdoptError(
      f'{path}: a FAISS {type(index).__name__}; known are Flat, HNSW, IVF-Flat '
      'and IVF-PQ. Give the saved embeddings instead.'
    )
  return Stored(
    path,
    f'FAISS {factory}',
    (index.ntotal, index.d),
    lambda start, n: index.reconstruct_n(start, n),
    exact=exact,
    factory=factory,
  )


@dataclasses.dataclass
class Fit:
  """How stored rows agree with what the encoder makes of the passages."""

  cosines: np.ndarray  # [n]
  nearest: float  # share whose own row is the nearest of the sample
  length: float  # median of stored over encoded

  @property
  def median(self) -> float:
    return float(np.median(self.cosines))

  def passes(self, exact: bool) -> bool:
    if not exact:
      return self.median >= 0.7 and self.nearest >= 0.9
    return (
      self.median >= 0.999
      and np.mean(self.cosines < 0.99) <= 0.1
      and self.nearest >= 0.95
      and abs(self.length - 1) <= 0.01
    )

  def __str__(self) -> str:
    return (
      f'cosine median {self.median:.4f}, least {self.cosines.min():.4f}; own '
      f'row nearest {self.nearest:.0%}; length ratio {self.length:.3f}'
    )


def compare(stored: np.ndarray, encoded: np.ndarray) -> Fit:
  """Compares rows [n, D] with the vectors [n, D] of their passages."""
  lengths = [np.linalg.norm(x, axis=1).clip(1e-30) for x in (stored, encoded)]
  near = (encoded / lengths[1][:, None]) @ (stored / lengths[0][:, None]).T
  own = near.diagonal()
  return Fit(
    own,
    float(np.mean(own >= near.max(axis=1) - 1e-6)),
    float(np.median(lengths[0] / lengths[1])),
  )


def adopt(
  paths: Sequence[str | os.PathLike],
  corpus: Corpus,
  make_encoder: Callable[..., Any],
  folder: pathlib.Path,
  index_path: Callable[[str], pathlib.Path],
  *,
  dtype: str | None = None,
  sample: int = 64,
) -> tuple[Stored, Any]:
  """Checks vectors of a user and brings them into an index folder.

  Args:
    paths: the file, or its parts in order.
    corpus: P passages.
    make_encoder: an Encoder; keywords replace its settings.
    folder: of the index.
    index_path: where an index of a FAISS factory string lies in it.
    dtype: of vectors.npy; None: as stored.
    sample: passages to encode again, the same each time.

  Returns:
    What was adopted, and the encoder that it fits. Exact vectors are in
    vectors.npy now, a FAISS index at its place besides.

  Raises:
    AdoptError: it does not fit.
  """
  paths = [pathlib.Path(p) for p in paths]
  for path in paths:
    if not path.is_file():
      raise AdoptError(f'{path}: no such file. Check --adopt.')
  whole = paths[0]
  if len(paths) > 1:
    whole = folder / 'adopted.joined'
    size = sum(p.stat().st_size for p in paths)
    if not whole.exists() or whole.stat().st_size != size:
      files.join(paths, whole)
  try:
    stored, encoder = _checked(whole, corpus, make_encoder, sample)
    if stored.exact:
      _keep_vectors(stored, corpus, encoder, folder, dtype or stored.dtype)
  except (AdoptError, vectors.VectorsError):
    if whole not in paths:  # another order of the parts may be the right one
      whole.unlink()
    raise
  if stored.factory:
    final = index_path(stored.factory)
    final.parent.mkdir(exist_ok=True)
    files.link(whole, final)
    lists, ours = map(faiss_build.lists_path, (whole, final))
    if lists.exists():
      files.link(lists, ours)
    else:
      ours.unlink(missing_ok=True)
  if whole not in paths:
    whole.unlink()
  return stored, encoder


def _checked(
  whole: pathlib.Path,
  corpus: Corpus,
  make_encoder: Callable[..., Any],
  sample: int,
) -> tuple[Stored, Any]:
  """The stored vectors and the encoder that made them; else AdoptError."""
  encoder = make_encoder()
  stored = open_stored(whole, len(corpus), encoder.dim)
  picked = np.sort(
    np.random.default_rng(0).choice(
      len(corpus), min(sample, len(corpus)), replace=False
    )
  )
  texts = [corpus.contents[int(i)] for i in picked]
  encoded = encoder.encode_passages(texts)
  fit = compare(stored.pick(picked), encoded)
  if not fit.passes(stored.exact):
    raise AdoptError(
      f'{whole}: does not fit. Of {len(picked)} passages encoded again: {fit}. '
      + _why(stored, picked, texts, encoded, make_encoder, corpus)
    )
  print(
    f'{whole.name}: {stored.kind}, {stored.shape[0]} x {stored.shape[1]}, '
    f'inner product\n{len(picked)} passages encoded again: {fit}'
  )
  return stored, encoder


def _keep_vectors(
  stored: Stored, corpus: Corpus, encoder: Any, folder: pathlib.Path, dtype: str
) -> None:
  about = vectors.identity(corpus, encoder, dtype)
  vectors.check_done(folder / 'vectors.json', about)
  linkable = (
    stored.kind == f'npy {dtype}' and stored.rows(0, 2).flags.c_contiguous
  )
  if linkable:
    files.link(stored.path, folder / 'vectors.npy')
    files.write_json(
      folder / 'vectors.json', {'identity': about, 'done': len(corpus)}
    )
  else:
    vectors.write(stored.blocks(), stored.shape, about, folder)


def _why(
  stored: Stored,
  picked: np.ndarray,
  texts: list[str],
  encoded: np.ndarray,
  make_encoder: Callable[..., Any],
  corpus: Corpus,
) -> str:
  """The likely cause, each tried rather than guessed."""
  for shift in (-1, 1):
    here = (picked + shift >= 0) & (picked + shift < len(corpus))
    moved = compare(stored.pick(picked[here] + shift), encoded[here])
    if moved.passes(stored.exact):
      return (
        f'Shifted by {-shift} row, it fits ({moved}): the corpus has a '
        f'passage {"more" if shift < 0 else "less"} at its beginning than '
        'the file.'
      )
  unit = encoded / np.linalg.norm(encoded, axis=1, keepdims=True).clip(1e-30)
  best, at, start = np.full(len(picked), -1.0), picked.copy(), 0
  for block in stored.blocks(_SCAN):
    block = np.asarray(block, np.float32)
    near = (
      unit
      @ (block / np.linalg.norm(block, axis=1, keepdims=True).clip(1e-30)).T
    )
    top = near.argmax(axis=1)
    value = near[np.arange(len(picked)), top]
    at = np.where(value > best, start + top, at)
    best, start = np.maximum(best, value), start + len(block)
  found = np.flatnonzero((best >= 0.999) & (at != picked))
  if stored.exact and len(found) > len(picked) * start / len(corpus) / 2:
    i = found[0]
    return (
      f'{len(found)} of them lie in other rows, passage {picked[i]} (id '
      f'{corpus.ids[int(picked[i])]!r}) in row {at[i]}: the corpus is in '
      'another order than the one that was encoded.'
    )
  rows = stored.pick(picked)
  for settings in _TRIED:
    other = compare(rows, make_encoder(**settings).encode_passages(texts))
    if stored.exact and other.passes(True):
      return (
        f'With {settings} it fits ({other}): give '
        + ' '.join(f'--{k}={v!r}' for k, v in settings.items())
        + '.'
      )
  fit = compare(rows, encoded)
  if abs(fit.length - 1) > 0.01 and fit.median >= 0.999:
    return 'Directions agree, lengths do not: try --[no]normalise.'
  return (
    'Neither a shift, another order, nor another pooling (mean, cls) or '
    'passage prefix explains it: another model made it, or another corpus.'
  )
