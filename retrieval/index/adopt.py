"""Adopts existing vectors: an index or saved embeddings of a user.

Supported are FAISS indexes of inner product (Search-R1's `e5_Flat.index` and
`e5_HNSW64.index`), its headerless `.memmap` of float32, the same of float16,
and .npy. A file in parts is joined. No file is loaded into memory as a whole.

To check that a file fits corpus and encoder, a sample of passages is encoded
again and compared with the rows at their positions. Criteria:

  exact storage   median cosine >= 0.999, at most 10 % of them below 0.99
  (float, HNSW,   (another length limit), own row the nearest of the sample
  IVF-Flat)       for >= 95 %, median length within 1 %
  lossy storage   median cosine >= 0.7, own row the nearest for >= 90 %; a
  (PQ, SQ)        different prefix or pooling may not be detected

Other files are refused. The error has the measured values and, if found, the
setting or order under which the file would fit.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import pathlib
from typing import Any

import faiss
import numpy as np

from retrieval import files
from retrieval.corpus import Corpus
from retrieval.index import faiss_build, vectors
from retrieval.index.folder import faiss_path

_BLOCK = 16384  # rows in memory at once
_SCAN = 1 << 18  # rows that are searched for misplaced passages
_TRIED = [(p, x) for p in ('mean', 'cls') for x in ('', 'passage: ', 'query: ')]


class AdoptError(ValueError):
  """The file does not fit; the message has the measured values."""


@dataclasses.dataclass
class Stored:
  """Vectors in a file of a user."""

  path: pathlib.Path
  kind: str  # for messages
  shape: tuple[int, int]  # [P, D]
  rows: Callable[[int, int], np.ndarray]  # (start, count) -> [count, D]
  dtype: str = 'float32'
  exact: bool = True
  factory: str | None = None  # of a FAISS index

  def pick(self, positions: Sequence[int]) -> np.ndarray:
    rows = [np.asarray(self.rows(int(i), 1), np.float32) for i in positions]
    return np.concatenate(rows)

  def blocks(self, most: int | None = None) -> Iterator[np.ndarray]:
    count = min(self.shape[0], most or self.shape[0])
    for start in range(0, count, _BLOCK):
      yield self.rows(start, min(_BLOCK, count - start))


def open_stored(path: pathlib.Path, count: int, dim: int) -> Stored:
  """Opens a file of vectors; detects the format from its bytes and size.

  Args:
    path: the file.
    count: P, the passages of the corpus.
    dim: D, of the encoder.

  Raises:
    AdoptError: an unknown format, or another P, D or metric.
  """
  size = path.stat().st_size
  with open(path, 'rb') as file:
    magic = file.read(6)
  sizes = {count * dim * 4: 'float32', count * dim * 2: 'float16'}
  npy = magic == b'\x93NUMPY'
  if npy or size in sizes:
    with files.convert(ValueError, AdoptError, f'{path}: {{}}'):
      if npy:
        array = np.load(path, mmap_mode='r')
      else:
        array = np.memmap(path, sizes[size], 'r', shape=(count, dim))
    dtype = str(array.dtype)
    if array.ndim != 2 or dtype not in vectors.DTYPES:
      expected = 'float32 or float16 of [passages, dimensions]'
      raise AdoptError(f'{path}: holds {dtype} {array.shape}, not {expected}')
    kind = f'{"npy" if npy else "raw"} {dtype}'
    get = lambda start, count: array[start : start + count]
    stored = Stored(path, kind, array.shape, get, dtype)
  else:
    stored = _open_faiss(path, count, dim, size)
  if stored.shape != (count, dim):
    found = f'{stored.shape[0]} vectors of {stored.shape[1]} dimensions'
    expected = f'the corpus has {count} passages and the encoder {dim}'
    raise AdoptError(f'{path}: holds {found}; {expected} dimensions.')
  return stored


def _open_faiss(path: pathlib.Path, count: int, dim: int, size: int) -> Stored:
  problem = (
    f'{path}: {size} bytes are neither a .npy file nor a whole FAISS index '
    f'({{}}) nor {count} raw vectors of {dim} dimensions, which take '
    f'{count * dim * 4} bytes as float32, half as float16. Give --adopt for '
    'each part, and the corpus of the vectors.'
  )
  with faiss_build.converted(AdoptError, problem):
    index = faiss_build.read(path)
  if (metric := index.metric_type) != faiss.METRIC_INNER_PRODUCT:
    problem = f'a FAISS index of metric {metric}, not of inner product'
    raise AdoptError(f'{path}: {problem}. Adopt the saved embeddings instead.')
  exact = not isinstance(index, faiss.IndexIVFPQ)
  fix = 'Adopt the saved embeddings.'
  problem = f'{path}: FAISS gives no vectors ({{}}). {fix}'

  def rows(start: int, count: int) -> np.ndarray:
    with faiss_build.converted(AdoptError, problem):
      return index.reconstruct_n(start, count)

  if isinstance(index, faiss.IndexHNSWFlat):
    factory = f'HNSW{index.hnsw.nb_neighbors(1)}'
  elif isinstance(index, faiss.IndexIVFFlat | faiss.IndexIVFPQ):
    _check_ids(index, path)
    with faiss_build.converted(AdoptError, problem):
      index.make_direct_map()
    code = 'Flat' if exact else f'PQ{index.pq.M}x{index.pq.nbits}'
    factory = f'IVF{index.nlist},{code}'
  elif isinstance(index, faiss.IndexFlat):
    factory = 'Flat'
  else:
    kinds = f'{type(index).__name__}; known are Flat, HNSW, IVF-Flat and IVF-PQ'
    raise AdoptError(f'{path}: a FAISS {kinds}. Adopt saved embeddings.')
  kind, shape = f'FAISS {factory}', (index.ntotal, index.d)
  return Stored(path, kind, shape, rows, exact=exact, factory=factory)


def _check_ids(index: faiss.IndexIVF, path: pathlib.Path) -> None:
  """Raises AdoptError unless the ids of the vectors are 0 to P - 1."""
  lists, found = index.invlists, [np.empty(0, np.int64)]
  for n in range(index.nlist):
    if size := lists.list_size(n):
      pointer = lists.get_ids(n)
      found.append(faiss.rev_swig_ptr(pointer, size).copy())
      lists.release_ids(n, pointer)
  ids = np.unique(np.concatenate(found))
  if not np.array_equal(ids, np.arange(index.ntotal)):
    named = f'from {ids[0]} to {ids[-1]}' if len(ids) else 'absent'
    problem = f'{index.ntotal} vectors with {len(ids)} different ids, {named}'
    fix = 'Add them again with index.add, or adopt the saved embeddings.'
    wanted = f'An id is the position in the corpus, 0 to {index.ntotal - 1}.'
    raise AdoptError(f'{path}: a FAISS index of {problem}. {wanted} {fix}')


@dataclasses.dataclass
class Fit:
  """Agreement of stored rows with the vectors of the encoder."""

  cosines: np.ndarray  # [n]
  nearest: float  # share whose own row is the nearest of the sample
  length: float  # median of stored over encoded

  @property
  def median(self) -> float:
    return float(np.median(self.cosines))

  def passes(self, exact: bool) -> bool:
    if not exact:
      return self.median >= 0.7 and self.nearest >= 0.9
    alike = self.median >= 0.999 and np.mean(self.cosines < 0.99) <= 0.1
    return alike and self.nearest >= 0.95 and abs(self.length - 1) <= 0.01

  def __str__(self) -> str:
    cosines = f'median {self.median:.4f}, least {self.cosines.min():.4f}'
    rows = f'own row nearest {self.nearest:.0%}'
    return f'cosine {cosines}; {rows}; length ratio {self.length:.3f}'


def compare(stored: np.ndarray, encoded: np.ndarray) -> Fit:
  """Compares rows [n, D] with the vectors [n, D] of their passages."""
  lengths = [np.linalg.norm(x, axis=1).clip(1e-30) for x in (stored, encoded)]
  near = (encoded / lengths[1][:, None]) @ (stored / lengths[0][:, None]).T
  own = near.diagonal()
  nearest = float(np.mean(own >= near.max(axis=1) - 1e-6))
  return Fit(own, nearest, float(np.median(lengths[0] / lengths[1])))


def adopt(
  paths: Sequence[files.PathLike],
  corpus: Corpus,
  make_encoder: Callable[..., Any],
  folder: pathlib.Path,
  dtype: str | None,
  sample: int,
) -> tuple[Stored, Any]:
  """Checks vectors of a user and adds them to an index folder.

  Args:
    paths: the file, or its parts in order.
    corpus: P passages.
    make_encoder: makes an Encoder; keywords override its settings.
    folder: of the index.
    dtype: of vectors.npy; None: as stored.
    sample: passages to encode again, the same each time.

  Returns:
    The adopted vectors and their encoder. Exact vectors are then in
    vectors.npy, and a FAISS index also at its own path.

  Raises:
    AdoptError: the vectors do not fit.
  """
  paths = [pathlib.Path(p) for p in paths]
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
    if whole not in paths:  # the parts may need another order
      whole.unlink()
    raise
  if stored.factory:
    final = faiss_path(folder, stored.factory)
    final.parent.mkdir(exist_ok=True)
    files.link(whole, final)
    lists, ours = map(faiss_build.lists_path, (whole, final))
    if not (lists.exists() and ours.exists() and lists.samefile(ours)):
      ours.unlink(missing_ok=True)
      if lists.exists():
        files.link(lists, ours)
  if whole not in paths:
    whole.unlink()
  return stored, encoder


def _checked(whole: pathlib.Path, corpus: Corpus, make_encoder, sample: int):
  """The stored vectors and the encoder that made them; else AdoptError."""
  encoder, count = make_encoder(), len(corpus)
  stored = open_stored(whole, count, encoder.dim)
  rng = np.random.default_rng(0)
  picked = np.sort(rng.choice(count, min(sample, count), replace=False))
  texts = [corpus.contents[int(i)] for i in picked]
  encoded = encoder.encode_passages(texts)
  fit = compare(stored.pick(picked), encoded)
  if not fit.passes(stored.exact):
    why = _why(stored, picked, texts, encoded, make_encoder, corpus)
    measured = f'Of {len(picked)} passages encoded again: {fit}'
    raise AdoptError(f'{whole}: does not fit. {measured}. {why}')
  print(f'{whole.name}: {stored.kind}, {count} x {encoder.dim}, inner product')
  print(f'{len(picked)} passages encoded again: {fit}')
  return stored, encoder


def _keep_vectors(
  stored: Stored, corpus: Corpus, encoder: Any, folder: pathlib.Path, dtype: str
) -> None:
  about = vectors.identity(corpus, encoder, dtype)
  vectors.check_done(folder / 'vectors.json', about)
  if stored.kind == f'npy {dtype}' and stored.rows(0, 2).flags.c_contiguous:
    files.link(stored.path, folder / 'vectors.npy')
    record = {'identity': about, 'done': len(corpus)}
    files.write_json(folder / 'vectors.json', record)
  else:
    vectors.write(stored.blocks(), stored.shape, about, folder)


def _why(stored: Stored, picked, texts, encoded, make_encoder, corpus) -> str:
  """Tries the likely causes and describes the one that applies."""

  def unit_rows(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(1e-30)

  unit = unit_rows(encoded)
  best, at, start = np.full(len(picked), -1.0), picked.copy(), 0
  for block in stored.blocks(_SCAN):
    near = unit @ unit_rows(np.asarray(block, np.float32)).T
    top = near.argmax(axis=1)
    value = near[np.arange(len(picked)), top]
    at = np.where(value > best, start + top, at)
    best, start = np.maximum(best, value), start + len(block)
  found = np.flatnonzero((best >= 0.999) & (at != picked))
  if stored.exact and len(found) > len(picked) * start / len(corpus) / 2:
    i, where = picked[found[0]], at[found[0]]
    cause = 'the corpus is in another order, or has a passage more or less'
    first = f'passage {i} (id {corpus.ids[int(i)]!r}) in row {where}'
    return f'{len(found)} of them are in other rows, {first}: {cause}.'
  rows = stored.pick(picked)
  for pooling, prefix in _TRIED:
    settings = {'pooling': pooling, 'passage_prefix': prefix}
    other = compare(rows, make_encoder(**settings).encode_passages(texts))
    if stored.exact and other.passes(True):
      given = ' '.join(f'--{k}={v!r}' for k, v in settings.items())
      return f'With {settings} it fits ({other}): give {given}.'
  fit = compare(rows, encoded)
  if abs(fit.length - 1) > 0.01 and fit.median >= 0.999:
    return 'Directions agree, lengths do not: try --[no]normalise.'
  return 'Probably another model or another corpus was used.'
