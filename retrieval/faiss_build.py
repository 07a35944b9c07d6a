"""Writes FAISS indexes over vectors on the disk, such that a kill costs little.

FAISS builds in memory and writes at the end. Here an index is made in one of
three ways, by what it is:

  Flat         FAISS writes the vectors from a memory map: a copy of a file,
               which starts over. float16 is written as float32 before, which
               needs room for the index twice.
  IVF          shards of bounded size are added and written one after the
               other, each an index file; `faiss.contrib.ondisk` merges their
               lists into NAME.ivfdata, which NAME refers to. Goes on at the
               first shard that is missing. Needs room for the index twice.
  all others   a graph (HNSW) or lists of another form (refined, fast-scan):
               it grows in memory, and starts over once it was trained.

What is not finished lies in the folder NAME.build beside the index.
"""

from collections.abc import Callable, Iterator, Mapping
import math
import os
import pathlib
import shutil
from typing import Any

import faiss
from faiss.contrib.ondisk import merge_ondisk
import numpy as np

from retrieval import files

_SPARE = 1.01  # room for links of HNSW, whose levels are drawn

Blocks = Callable[[int, int], Iterator[tuple[int, np.ndarray]]]


def reason(error: RuntimeError) -> str:
  """What FAISS says, without where in its source it says so."""
  text = str(error).strip().rpartition('\n')[2]
  return ascii(text.partition('Error: ')[2] or text)[1:-1][-160:]


def graph(index: faiss.Index) -> faiss.IndexHNSW | None:
  """The HNSW index that finds vectors, below transforms too; or None."""
  while inner := getattr(index, 'index', getattr(index, 'base_index', None)):
    index = faiss.downcast_index(inner)
  return index if hasattr(index, 'hnsw') else None


def lists_path(path: pathlib.Path) -> pathlib.Path:
  """Where the lists of an IVF index lie."""
  return path.with_name(f'{path.name}.ivfdata')


def has_lists(index: faiss.Index) -> bool:
  """Whether lists on the disk can take the place of the index's own."""
  while isinstance(index, faiss.IndexPreTransform):
    index = faiss.downcast_index(index.index)
  return isinstance(index, faiss.IndexIVF) and isinstance(
    faiss.downcast_InvertedLists(index.invlists), faiss.ArrayInvertedLists
  )


def read(path: pathlib.Path) -> faiss.Index:
  """Opens an index file, memory-mapped.

  Raises:
    RuntimeError: FAISS cannot read it, or its lists are cut short.
  """
  lists = lists_path(path)
  if not lists.exists():
    return faiss.read_index(os.fspath(path), faiss.IO_FLAG_MMAP_IFC)
  index = faiss.read_index(
    os.fspath(path), faiss.IO_FLAG_SKIP_IVF_DATA | faiss.IO_FLAG_READ_ONLY
  )
  found = faiss.extract_index_ivf(index).invlists
  found = faiss.downcast_InvertedLists(found)
  if lists.stat().st_size != found.totsize:  # FAISS would read past the end
    raise RuntimeError(
      f'Error: {lists} has {lists.stat().st_size} bytes, not {found.totsize}'
    )
  found.filename = os.fspath(lists)  # the folder may have moved
  found.prefetch_nthread = 0  # it starts threads anew for each search
  found.do_mmap()
  return index


def open_work(path: pathlib.Path, about: Mapping[str, Any]) -> pathlib.Path:
  """The folder of an unfinished build, emptied where it is of another.

  Args:
    path: of the index.
    about: what the index depends on, as JSON has it.

  Raises:
    OSError: the folder cannot be made.
    files.FilesError: its record is damaged.
  """
  work = path.with_name(f'{path.name}.build')
  if work.exists():
    if files.read_json(work / 'identity.json') == about:
      return work
    shutil.rmtree(work)
  work.mkdir()
  files.write_json(work / 'identity.json', about)
  return work


def save(
  index: faiss.Index, final: pathlib.Path, flags: int = faiss.IO_FLAG_MMAP_IFC
) -> None:
  """Writes an index at once or not at all; flags: to read it with.

  Raises:
    files.FilesError, OSError: it cannot be written in full.
  """
  part = final.with_name(f'{final.name}.part')
  try:
    faiss.write_index(index, os.fspath(part))
    # FAISS does not say when closing a file failed.
    faiss.read_index(os.fspath(part), flags)
    with open(part, 'r+b') as file:
      files.commit(file, part, final)
  except (RuntimeError, OSError) as error:
    part.unlink(missing_ok=True)
    if isinstance(error, OSError):
      raise
    raise files.FilesError(
      f'{part}: cannot be written ({reason(error)}); is there a folder, and '
      'room?'
    ) from None


def load(path: pathlib.Path, flags: int = 0) -> faiss.Index:
  """Reads what `save` wrote.

  Raises:
    files.FilesError: it is damaged.
  """
  try:
    return faiss.read_index(os.fspath(path), flags)
  except RuntimeError as error:
    raise files.FilesError(
      f'{path}: is damaged ({reason(error)}); remove {path.parent} and build '
      'again'
    ) from None


def copy(
  index: faiss.IndexFlat,
  vectors: np.ndarray,
  blocks: Blocks,
  work: pathlib.Path,
  final: pathlib.Path,
  *,
  block: int,
  what: str,
) -> None:
  """A Flat index: FAISS writes the vectors, which it does not load.

  Args:
    index: an empty one.
    vectors: [P, D], float32 or float16.
    blocks: size, start -> (first row, float32 [n, D]), n <= size.
    work: see `open_work`.
    final: the file.
    block: vectors in memory at once.
    what: the name of the progress bar.
  """
  rows = work / 'rows'
  mapped = vectors.dtype == np.float32 and vectors.flags.c_contiguous
  files.need_space(final, 4 * vectors.size * (1 if mapped else 2))
  with (
    open(rows, 'wb') as file,
    files.progress(len(vectors), what, unit=' vectors') as bar,
  ):
    for _, part in blocks(block, 0):  # says where one is not finite, too
      if not mapped:
        file.write(part)
      bar.update(len(part))
  if not mapped:
    vectors = np.memmap(rows, np.float32, 'r', shape=vectors.shape)
  index.codes = type(index.codes).create_view(
    faiss.swig_ptr(vectors.reshape(-1).view(np.uint8)),
    vectors.nbytes,
    index.codes.owner,
  )
  index.ntotal = len(vectors)
  save(index, final)


def join(
  start: pathlib.Path,
  count: int,
  blocks: Blocks,
  final: pathlib.Path,
  *,
  block: int,
  shard_bytes: int,
  what: str,
) -> None:
  """An IVF index from shards; its lists lie in a file of their own.

  Args:
    start: the trained, empty index; shards lie beside it.
    count: P.
    blocks: see `copy`.
    final: the file.
    block: vectors added at once.
    shard_bytes: of codes and ids in a shard, at least one block; FAISS takes
      up to twice that while it adds.
    what: the name of the progress bar.
  """
  index, work = load(start), start.parent
  size = faiss.extract_index_ivf(index).code_size + 8
  rows = max(1, shard_bytes // (size * block)) * block
  paths = {n: work / f'{n:012d}.index' for n in range(0, count, rows)}
  missing = [n for n in paths if not paths[n].exists()]
  left = sum(min(rows, count - n) for n in missing)
  part = work / 'lists'
  part.unlink(missing_ok=True)  # what a kill left of them
  files.need_space(final, (left + count) * size)
  with files.progress(
    count, what, unit=' vectors', initial=count - left
  ) as bar:
    for first in missing:
      end = min(first + rows, count)
      shard = load(start)
      for at, vectors in blocks(block, first):
        shard.add_with_ids(vectors, np.arange(at, at + len(vectors)))
        bar.update(len(vectors))
        if at + len(vectors) == end:
          break
      save(shard, paths[first])
      del shard
  for path in paths.values():
    load(path, faiss.IO_FLAG_MMAP)  # names the one that is damaged
  try:
    merge_ondisk(
      index, [os.fspath(path) for path in paths.values()], os.fspath(part)
    )
  except RuntimeError as error:
    raise files.FilesError(
      f'{part}: cannot be written ({reason(error)}); is there room?'
    ) from None
  lists = faiss.extract_index_ivf(index).invlists
  lists = faiss.downcast_InvertedLists(lists)
  lists.filename = lists_path(final).name
  with open(part, 'r+b') as file:
    files.commit(file, part, lists_path(final))
  save(index, final, faiss.IO_FLAG_SKIP_IVF_DATA)


def grow(
  start: pathlib.Path,
  count: int,
  blocks: Blocks,
  final: pathlib.Path,
  *,
  block: int,
  what: str,
) -> None:
  """An index that is in memory until it is whole; see `join`."""
  index = load(start)
  if linked := graph(index):
    files.need_space(final, count * _reserve(linked, count))
  with files.progress(count, what, unit=' vectors') as bar:
    for _, part in blocks(block, 0):
      index.add(part)
      bar.update(len(part))
  save(index, final)


def _reserve(index: faiss.IndexHNSW, count: int) -> int:
  """Makes room in memory for count vectors; bytes that a file has for each.

  Arrays that double would take up to twice as much.
  """
  hnsw, storage = index.hnsw, faiss.downcast_index(index.storage)
  m = hnsw.nb_neighbors(1)
  links = math.ceil(_SPARE * (hnsw.nb_neighbors(0) + m / max(1, m - 1)))
  for array, size in (
    (storage.codes, storage.code_size),
    (hnsw.neighbors, links),
  ):
    array.resize(size * count)
    array.resize(0)  # the room stays
  return storage.code_size + 4 * links + 12  # its level, and where links are
