# ruff: noqa: E402, an environment variable is set before FAISS is imported
"""Dense search with FAISS: Flat, IVF and HNSW indexes by factory string.

An index file is memory-mapped (`IO_FLAG_MMAP_IFC`): pages are read from disk
on demand and shared between processes. In faiss-cpu 1.15.1 that holds for
vectors, codes, inverted lists and the links of HNSW; the older `IO_FLAG_MMAP`
maps only inverted lists. Lists in a separate file (`faiss_build`) are also
mapped.
"""

from collections.abc import Mapping
import functools
import os
import pathlib
import shutil
from typing import Any

import numpy as np

# FAISS's threads would spin after each search, on the cores that the encoder
# of the next query needs: a query took 14.5 instead of 11.1 ms on 2 cores.
os.environ.setdefault('OMP_WAIT_POLICY', 'passive')

import faiss

from retrieval import files
from retrieval.core import Ranked
from retrieval.index import faiss_build
from retrieval.index.faiss_build import UNWRITTEN, Plan, converted, graph
from retrieval.index.vectors import SPARE, TIES, DenseIndex, blocks, ranked
from retrieval.metrics import stage

_GPU_K = 2048  # the most results of a query that FAISS gives on a GPU
_TRAIN, _TRAIN_PER_LIST = 65536, 64  # vectors; k-means wants 39 to 256 a list


class FaissError(ValueError):
  """The index cannot be built or used; the message says how to fix it."""


def build(
  vectors: np.ndarray,
  factory: str,
  path: files.PathLike,
  *,
  identity: Mapping[str, Any] | None = None,
  train: int | None = None,
  seed: int = 0,
  threads: int = 0,
  block: int = 16384,
  shard_bytes: int = 1 << 30,
) -> None:
  """Builds an inner-product index and writes it atomically.

  Memory, beside one block of vectors: Flat none; IVF a shard; HNSW and all
  others the finished index (up to twice that for arrays that grow by doubling,
  such as fast-scan codes). Training takes its sample two to three times. What
  a killed build keeps, and its files, are described in `faiss_build`.
  `vectors` stay on disk.

  The same input gives the same file, also after kills, except for HNSW: its
  graph depends on the order in which threads insert, so only `threads=1` is
  reproducible.

  Args:
    vectors: float32 or float16 [P, D], a memory map if large.
    factory: FAISS's factory string: 'Flat', 'HNSW64', 'IVF4096,Flat',
      'IVF4096,PQ64', ...
    path: the file; unfinished work is in the folder PATH.build.
    identity: JSON that identifies the vectors. A build of equal identity,
      shape and arguments is continued, any other starts over. None: nothing is
      kept.
    train: vectors that train centroids and codes, drawn without replacement;
      None: 64 per inverted list, at least 65,536; at most all.
    seed: of that draw.
    threads: of FAISS; 0: as many as it has now.
    block: vectors added at once; HNSW's graph depends on it.
    shard_bytes: codes and ids in a shard of an IVF index.

  Raises:
    FaissError: FAISS does not know the factory, or it does not suit the
      vectors.
    ValueError: a vector is not finite.
    files.FilesError: the file cannot be written. Finished work is kept.
  """
  path, dim = pathlib.Path(path), vectors.shape[1]
  unknown = f'factory={factory!r}: FAISS does not build it ({{}})'
  with converted(FaissError, unknown):
    index = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
  about = {'vectors': identity, 'shape': [*vectors.shape], 'factory': factory}
  about |= {'train': train, 'seed': seed, 'block': block}
  about |= {'shard_bytes': shard_bytes, 'faiss': faiss.__version__}
  about['dtype'] = str(vectors.dtype)
  work = path.with_name(f'{path.name}.build')
  before = faiss.omp_get_max_threads()
  faiss.omp_set_num_threads(threads or before)
  try:
    with (
      files.convert(OSError, files.FilesError, UNWRITTEN.format(path)),
      converted(FaissError, unknown),
    ):
      faiss_build.open_work(work, about)
      get = functools.partial(blocks, vectors)
      plan = Plan(len(vectors), get, work, path, block, f'faiss {factory}')
      if type(index) in (faiss.IndexFlat, faiss.IndexFlatIP):
        faiss_build.copy(plan, index, vectors)
      else:
        if not plan.start.exists():
          if not index.is_trained:
            _train(index, vectors, factory, train, seed)
          faiss_build.save(index, plan.start)
        if faiss_build.has_lists(index):
          faiss_build.join(plan, shard_bytes)
        else:
          faiss_build.grow(plan)
  except BaseException as error:
    if identity is None or isinstance(error, ValueError):
      shutil.rmtree(work, ignore_errors=True)
    raise
  finally:
    faiss.omp_set_num_threads(before)
  shutil.rmtree(work)


def _train(index, vectors, factory: str, train: int | None, seed: int) -> None:
  ivf = faiss.try_extract_index_ivf(index)
  if train is None:
    train = max(_TRAIN, _TRAIN_PER_LIST * ivf.nlist if ivf else 0)
  if ivf and hasattr(ivf := faiss.downcast_index(ivf), 'pq'):
    # Orders codes for a search by Hamming distance that is not used here: it
    # changes no score and takes longer than everything else.
    ivf.do_polysemous_training = False
  rows = np.arange(len(vectors))
  if train < len(rows):
    rng = np.random.default_rng(seed)
    rows = rng.choice(len(rows), train, replace=False, shuffle=False)
    rows.sort()  # a memory map is read in order
  problem = f'factory={factory!r}: cannot be trained on {len(rows)} vectors'
  fix = 'use Flat or HNSW64, or fewer lists (IVF) and codes'
  with converted(FaissError, f'{problem} ({{}}); {fix}'):
    index.train(np.asarray(vectors[rows], np.float32))


class DenseFaiss(DenseIndex):
  """An index over a FAISS file; see `retrieval.core.Index`.

  Flat is exact. Equal passages have equal scores, unless FAISS multiplies
  matrices (20 or more queries at once), whose rounding depends on the position:
  equal passages may then be swapped within 1e-6.

  The results for a small k begin those for a larger one, except for HNSW with
  k above ef_search, since FAISS then searches further.

  Search from one thread at a time: FAISS uses all cores for one call, and
  calls do not share the memory of a GPU.
  """

  name = 'dense_faiss'

  def __init__(
    self, path: files.PathLike, encoder, nprobe=None, ef_search=None, gpu=False
  ):
    """Opens an index file, memory-mapped.

    Args:
      path: what `build` or any FAISS wrote, metric inner product.
      encoder: of queries; None if only `search_vectors` is used.
      nprobe: inverted lists visited, for IVF; None: the square root of their
        number.
      ef_search: width of the search, for HNSW; None: 64.
      gpu: search on all GPUs, with float16 vectors sharded over them.

    Raises:
      FaissError: the file is absent, truncated, not an index, or of another
        metric or dimension; an option does not suit the index; no GPU.
    """
    index = _open(path)
    ivf, linked = faiss.try_extract_index_ivf(index), graph(index)
    # FAISS's own (nprobe 1, efSearch 16) find too little.
    usual = {'nprobe': max(1, round(ivf.nlist**0.5))} if ivf else {}
    usual |= {'ef_search': 64} if linked else {}
    given = {'nprobe': nprobe, 'ef_search': ef_search}
    given = {k: v for k, v in given.items() if v is not None}
    kinds = {'nprobe': 'inverted lists (IVF)', 'ef_search': 'a graph (HNSW)'}
    for option, value in (usual | given).items():
      name = {'ef_search': 'efSearch'}.get(option, option)
      problem = f'{option}={value}: {path} is an index without {kinds[option]}'
      with files.convert(RuntimeError, FaissError, problem):
        faiss.ParameterSpace().set_index_parameter(index, name, value)
    self.ef_search = linked.hnsw.efSearch if linked else None
    about = {'type': type(index).__name__, 'sample_sha256': sample_sha256(path)}
    about |= {'nprobe': ivf.nprobe if ivf else None}
    about |= {'ef_search': self.ef_search, 'gpu': bool(gpu)}
    shape = index.ntotal, index.d
    super().__init__(encoder, shape, f'{path}: holds vectors of', **about)
    self._limit = min(index.ntotal, _GPU_K) if gpu else index.ntotal
    self._index = _to_gpus(index, path) if gpu else index
    self._path = path

  def search_vectors(self, q: np.ndarray, k: int) -> Ranked:
    """`search` for vectors of queries, [Q, D].

    Raises:
      ValueError: k < 1, or k and P above 2048 on a GPU.
    """
    k, q = self.check_k(k, self._limit), np.ascontiguousarray(q, np.float32)
    # With more than ef_search, HNSW would search differently.
    most = min(self._limit, self.ef_search or max(TIES, k + SPARE))
    with stage('search'):
      return ranked(self._ask, q, k, floor=self.ef_search or 0, most=most)

  def _ask(self, q: np.ndarray, n: int) -> Ranked:
    problem = f'{self._path}: FAISS cannot search it ({{}})'
    with converted(FaissError, f'{problem}; build it again'):
      return self._index.search(q, n)[::-1]


def sample_sha256(path: files.PathLike) -> str:
  """Identifies an index by a sample of its file or files."""
  both = pathlib.Path(path), faiss_build.lists_path(pathlib.Path(path))
  return files.sample_sha256(*(p for p in both if p.exists()))


def _open(path: files.PathLike) -> faiss.Index:
  problem = f'{path}: no FAISS index, or one cut short ({{}})'
  with converted(FaissError, f'{problem}; build or copy it again'):
    index = faiss_build.read(pathlib.Path(path))
  if index.metric_type != faiss.METRIC_INNER_PRODUCT:
    problem = f'its metric is {index.metric_type}, not inner product'
    raise FaissError(f'{path}: {problem}; build it again')
  return index


def _to_gpus(index: faiss.Index, path: files.PathLike) -> faiss.Index:
  if not faiss.get_num_gpus():
    fix = 'install a GPU build of FAISS, or leave --faiss_gpu out'
    raise FaissError(f'gpu=True: this FAISS sees no GPU; {fix}')
  options = faiss.GpuMultipleClonerOptions()
  options.useFloat16 = options.shard = True
  limits = 'FAISS supports Flat and IVF on GPUs, not HNSW, and it must fit'
  problem = f'{path}: cannot be copied to the GPUs ({{}}): {limits}'
  with converted(FaissError, problem):
    return faiss.index_cpu_to_all_gpus(index, options)
