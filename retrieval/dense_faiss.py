"""Dense search with FAISS: Flat, IVF and HNSW indexes by factory string.

An index file is opened as a memory map (`IO_FLAG_MMAP_IFC`): pages come from
disk as they are needed and are shared between processes. In faiss-cpu 1.15.1
that holds for vectors, codes, inverted lists and HNSW's links alike; the older
`IO_FLAG_MMAP` maps inverted lists only and reads the rest into memory. Lists
in a file of their own (`faiss_build`) are mapped too.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import functools
import os
import pathlib
import shutil
from typing import Any, Protocol

import numpy as np

# FAISS's threads would spin after each search, on the cores that the encoder
# of the next query wants: a query took 14.5 instead of 11.1 ms on 2 cores.
os.environ.setdefault('OMP_WAIT_POLICY', 'passive')

import faiss  # noqa: E402

from retrieval import faiss_build, files  # noqa: E402
from retrieval.faiss_build import graph, reason  # noqa: E402
from retrieval.metrics import stage  # noqa: E402

_TIES = 1024  # how far down equal scores are followed, see `ranked`
_SPARE = 8  # results beyond k that cost FAISS next to nothing
_GPU_K = 2048  # the most results of a query that FAISS gives on a GPU
_NOTHING = np.iinfo(np.int64).max  # the place of -1 in corpus order
_TRAIN, _TRAIN_PER_LIST = 65536, 64  # vectors; k-means wants 39 to 256 a list


class FaissError(ValueError):
  """The index cannot be built or used; the message names the mend."""


class QueryEncoder(Protocol):
  """What dense indexes need of `encoder.Encoder`."""

  dim: int
  dtype: str
  query_length: int

  @property
  def parameters(self) -> Mapping[str, Any]: ...
  def encode_queries(self, texts: Sequence[str]) -> np.ndarray: ...


def encoder_parameters(encoder: QueryEncoder | None) -> dict[str, Any]:
  """What an encoder adds to the parameters of an index."""
  if encoder is None:
    return {}
  return {
    'encoder': dict(encoder.parameters),
    'encoder_dtype': encoder.dtype,
    'query_length': encoder.query_length,
  }


def encode(encoder: QueryEncoder | None, queries: Sequence[str]) -> np.ndarray:
  """The vectors of queries, float32 [Q, D].

  Raises:
    ValueError: the index was opened without an encoder.
  """
  if encoder is None:
    raise ValueError('this index has no encoder; use search_vectors')
  return encoder.encode_queries(queries)


def blocks(
  vectors: np.ndarray, size: int, start: int = 0
) -> Iterator[tuple[int, np.ndarray]]:
  """Yields (first row, float32 [n, D]) of vectors, n <= size, from `start`.

  Raises:
    ValueError: a vector that is not finite.
  """
  for first in range(start, len(vectors), size):
    part = np.ascontiguousarray(vectors[first : first + size], np.float32)
    bad = np.flatnonzero(~np.isfinite(part).all(axis=1))
    if len(bad):
      raise ValueError(
        f'vectors: row {first + bad[0]} is not finite; encode the corpus in '
        'float32'
      )
    yield first, part


def check_vectors(vectors: np.ndarray) -> None:
  """Raises ValueError for anything but [P, D], P >= 1."""
  if vectors.ndim != 2 or not len(vectors):
    raise ValueError(
      f'vectors has shape {vectors.shape}; expected [P, D], P >= 1'
    )


def check_search(
  k: int, q: np.ndarray, count: int, dim: int, limit: int
) -> tuple[int, np.ndarray]:
  """(min(k, count), q as float32 [Q, D]) for an index of that shape.

  Raises:
    ValueError: k < 1, or k and count above limit, or another D.
  """
  if k < 1:
    raise ValueError(f'k={k} must be at least 1')
  k = min(k, count)
  if k > limit:
    raise ValueError(f'k={k}: this index gives at most {limit} passages')
  q = np.ascontiguousarray(q, np.float32)
  if q.ndim != 2 or q.shape[1] != dim:
    raise ValueError(f'q has shape {q.shape}; expected [Q, {dim}]')
  return k, q


def ranked(
  ask: Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]],
  q: np.ndarray,
  k: int,
  *,
  spare: int = _SPARE,
  floor: int = 0,
  most: int = _TIES,
) -> tuple[np.ndarray, np.ndarray]:
  """The k best of each query, equal scores in corpus order.

  Libraries cut between equal scores wherever they come to. So a few more than
  k are asked for, and where the last of those still equals the k-th, up to
  `most`. Ties longer than that are cut as the library has it.

  Args:
    ask: vectors [Q, D] and n -> (ids, scores), [Q, n] each, best first in any
      order of ties; id -1 for none.
    q: [Q, D].
    k: >= 1, at most the size of the index.
    spare: results beyond k of the first call.
    floor: the least n to ask for.
    most: the largest n to ask for.

  Returns:
    ids: int64 [Q, k], -1 at the end of a row where there are no more.
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
  if n < most:
    tied = np.flatnonzero(
      (scores[:, -1] == scores[:, k - 1]) & (ids[:, -1] >= 0)
    )
    if len(tied):
      deeper = sort(q[tied], most)
      ids[tied, :k], scores[tied, :k] = (x[:, :k] for x in deeper)
  return ids[:, :k], scores[:, :k]


def build(
  vectors: np.ndarray,
  factory: str,
  path: str | os.PathLike,
  *,
  identity: Mapping[str, Any] | None = None,
  train: int | None = None,
  seed: int = 0,
  threads: int = 0,
  block: int = 16384,
  shard_bytes: int = 1 << 30,
) -> None:
  """Builds an inner-product index and writes it at once or not at all.

  Memory, beside one block of vectors: Flat none; IVF a shard; HNSW and all
  else the finished index (what grows by doubling there, as fast-scan codes do,
  up to twice). Training takes its sample two to three times. A build that is
  killed keeps what `faiss_build` says; the files are named there too.
  `vectors` stay on disk.

  The same input gives the same file, however often it was killed, but for
  HNSW: its graph depends on the order in which threads insert, so only
  `threads=1` repeats it for certain.

  Args:
    vectors: float32 or float16 [P, D], a memory map where it is large.
    factory: FAISS's factory string: 'Flat', 'HNSW64', 'IVF4096,Flat',
      'IVF4096,PQ64', ...
    path: the file; what is not finished lies in the folder PATH.build.
    identity: names the vectors, as JSON: a build of equal identity, shape and
      arguments goes on, any other starts over. None: nothing is kept.
    train: vectors that train centroids and codes, drawn without replacement;
      None: 64 for each inverted list, at least 65,536; all if they are fewer.
    seed: of that draw.
    threads: of FAISS; 0: as many as it has now.
    block: vectors added at once; HNSW's graph depends on it.
    shard_bytes: codes and ids in a shard of an IVF index.

  Raises:
    FaissError: a factory that FAISS does not know or that does not suit the
      vectors.
    ValueError: no vectors, or one that is not finite.
    files.FilesError: the file cannot be written. What is done is kept.
  """
  path = pathlib.Path(path)
  check_vectors(vectors)
  count, dim = vectors.shape
  try:
    index = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
  except RuntimeError as error:
    raise FaissError(
      f'factory={factory!r}: FAISS does not build it for {dim} dimensions '
      f'({reason(error)}); try Flat, HNSW64, "IVF4096,Flat" or "IVF4096,PQ64"'
    ) from None
  about = {
    'vectors': identity,
    'shape': [count, dim],
    'dtype': str(vectors.dtype),
    'factory': factory,
    'train': train,
    'seed': seed,
    'block': block,
    'shard_bytes': shard_bytes,
    'faiss': faiss.__version__,
  }
  work = path.with_name(f'{path.name}.build')
  before = faiss.omp_get_max_threads()
  faiss.omp_set_num_threads(threads or before)
  try:
    if identity is None:
      shutil.rmtree(work, ignore_errors=True)
    faiss_build.open_work(path, about)
    common = {'block': block, 'what': f'faiss {factory}'}
    get = functools.partial(blocks, vectors)
    start = work / 'start.index'
    if type(index) in (faiss.IndexFlat, faiss.IndexFlatIP):
      faiss_build.copy(index, vectors, get, work, path, **common)
    else:
      if not start.exists():
        if not index.is_trained:
          _train(index, vectors, factory, train, seed)
        faiss_build.save(index, start)
      if faiss_build.has_lists(index):
        faiss_build.join(
          start, count, get, path, shard_bytes=shard_bytes, **common
        )
      else:
        faiss_build.grow(start, count, get, path, **common)
  except BaseException as error:
    if identity is None or isinstance(error, ValueError):
      shutil.rmtree(work, ignore_errors=True)
    if isinstance(error, OSError):
      raise files.FilesError(
        f'{path}: cannot be written ({error}); is there a folder, and room?'
      ) from None
    raise
  finally:
    faiss.omp_set_num_threads(before)
  shutil.rmtree(work)


def defaults(index: faiss.Index) -> dict[str, int]:
  """How an index ought to be searched; FAISS's 1 list and 16 find little."""
  found = {}
  if ivf := faiss.try_extract_index_ivf(index):
    found['nprobe'] = max(1, round(ivf.nlist**0.5))
  if graph(index):
    found['ef_search'] = 64
  return found


def _train(
  index: faiss.Index,
  vectors: np.ndarray,
  factory: str,
  train: int | None,
  seed: int,
) -> None:
  ivf = faiss.try_extract_index_ivf(index)
  if train is None:
    train = max(_TRAIN, _TRAIN_PER_LIST * ivf.nlist if ivf else 0)
  if ivf and hasattr(ivf := faiss.downcast_index(ivf), 'pq'):
    # Orders codes for a search by Hamming distance that is not used here:
    # no score changes, and it takes longer than all the rest.
    ivf.do_polysemous_training = False
  rows = np.arange(len(vectors))
  if train < len(rows):
    rows = np.random.default_rng(seed).choice(
      len(rows), train, replace=False, shuffle=False
    )
    rows.sort()  # a memory map is read in order
  try:
    index.train(np.asarray(vectors[rows], np.float32))
  except RuntimeError as error:
    raise FaissError(
      f'factory={factory!r}: cannot be trained on {len(rows)} vectors '
      f'({reason(error)}); use Flat or HNSW64, or fewer lists (IVF) and codes'
    ) from None


class DenseFaiss:
  """An index over a FAISS file; see `retrieval.core.Index`.

  Flat is exact. Where passages are the same, their scores are too, unless
  FAISS multiplies matrices (20 queries or more at once), which rounds by
  place: such twins may then change places within 1e-6.

  A list of k is the beginning of a longer one, except from HNSW for k above
  ef_search, where FAISS looks further for a longer list.

  Search from one thread at a time: FAISS takes all cores for one call, and a
  GPU's memory is not shared between calls.
  """

  name = 'dense_faiss'

  def __init__(
    self,
    path: str | os.PathLike,
    encoder: QueryEncoder | None,
    *,
    nprobe: int | None = None,
    ef_search: int | None = None,
    gpu: bool = False,
  ):
    """Opens an index file, memory-mapped.

    Args:
      path: what `build` or any FAISS wrote, metric inner product.
      encoder: of queries; None where only `search_vectors` is used.
      nprobe: inverted lists visited, for IVF; None: see `defaults`.
      ef_search: width of the search, for HNSW; None: likewise.
      gpu: search on all GPUs, vectors as float16 and sharded over them.

    Raises:
      FaissError: no file, no index, one cut short, of another metric or
        dimension; an option that does not suit it; no GPU.
    """
    self._encoder, self._gpu = encoder, bool(gpu)
    index = _open(path)
    if encoder is not None and encoder.dim != index.d:
      raise FaissError(
        f'{path}: holds vectors of {index.d} dimensions, the encoder makes '
        f'{encoder.dim}; use the encoder that the index was built with'
      )
    usual = defaults(index)
    for option, name, value, kind in (
      ('nprobe', 'nprobe', nprobe, 'inverted lists (IVF)'),
      ('ef_search', 'efSearch', ef_search, 'a graph (HNSW)'),
    ):
      value = usual.get(option) if value is None else value
      if value is None:
        continue
      if value < 1:
        raise FaissError(f'{option}={value}; expected at least 1')
      if not _set(index, name, value):
        raise FaissError(
          f'{option}={value}: {path} is a {type(index).__name__} without '
          f'{kind}; leave {option} out'
        )
    ivf = faiss.try_extract_index_ivf(index)
    self.nprobe = ivf.nprobe if ivf else None
    linked = graph(index)
    self.ef_search = linked.hnsw.efSearch if linked else None
    self._about = {
      'name': self.name,
      'type': type(index).__name__,
      'sample_sha256': sample_sha256(path),
      'nprobe': self.nprobe,
      'ef_search': self.ef_search,
      'gpu': self._gpu,
    }
    self._index = _to_gpus(index, path) if gpu else index

  @property
  def parameters(self) -> dict[str, Any]:
    return self._about | encoder_parameters(self._encoder)

  def __len__(self) -> int:
    return self._index.ntotal

  def search(
    self, queries: Sequence[str], k: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """See `retrieval.core.Index.search`."""
    return self.search_vectors(encode(self._encoder, queries), k)

  def search_vectors(
    self, q: np.ndarray, k: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """The same for vectors of queries, [Q, D].

    Raises:
      ValueError: k < 1, k and P above 2048 on a GPU, or another D.
    """
    limit = min(len(self), _GPU_K) if self._gpu else len(self)
    k, q = check_search(k, q, len(self), self._index.d, limit)
    # More than ef_search of HNSW would search, and find, otherwise.
    most = self.ef_search or max(_TIES, k + _SPARE)
    with stage('search'):
      return ranked(
        self._ask, q, k, floor=self.ef_search or 0, most=min(limit, most)
      )

  def _ask(self, q: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    scores, ids = self._index.search(q, n)
    return ids, scores


def _open(path: str | os.PathLike) -> faiss.Index:
  if not os.path.isfile(path):
    raise FaissError(f'{path}: no such file; build the index first')
  try:
    index = faiss_build.read(pathlib.Path(path))
  except RuntimeError as error:
    raise FaissError(
      f'{path}: no FAISS index, or one cut short ({reason(error)}); build or '
      'copy it again'
    ) from None
  if index.metric_type != faiss.METRIC_INNER_PRODUCT:
    raise FaissError(
      f'{path}: its metric is {index.metric_type}, not inner product '
      f'({faiss.METRIC_INNER_PRODUCT}); build it again'
    )
  if not index.ntotal:
    raise FaissError(f'{path}: holds no vectors; build it again')
  return index


def _set(index: faiss.Index, name: str, value: int) -> bool:
  """Sets a search option wherever in the index it belongs; False: nowhere."""
  try:
    faiss.ParameterSpace().set_index_parameter(index, name, value)
  except RuntimeError:
    return False
  return True


def _to_gpus(index: faiss.Index, path: str | os.PathLike) -> faiss.Index:
  if not faiss.get_num_gpus():
    raise FaissError(
      'gpu=True: this FAISS sees no GPU; install a GPU build of FAISS in place '
      'of faiss-cpu, or leave gpu (--faiss_gpu) out'
    )
  options = faiss.GpuMultipleClonerOptions()
  options.useFloat16 = True
  options.shard = True
  try:
    return faiss.index_cpu_to_all_gpus(index, options)
  except RuntimeError as error:
    raise FaissError(
      f'{path}: cannot go to the GPUs ({reason(error)}): FAISS has Flat and '
      'IVF there, no HNSW, and they must have room for it'
    ) from None


def sample_sha256(path: str | os.PathLike) -> str:
  """Tells an index from others, by a sample of its file or files."""
  path = pathlib.Path(path)
  both = (path, faiss_build.lists_path(path))
  return files.sample_sha256(*(p for p in both if p.exists()))
