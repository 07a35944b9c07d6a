"""Writes FAISS indexes over vectors on the disk, so that a kill costs little.

FAISS builds in memory and writes at the end. Here an index is built in one of
three ways:

  Flat         FAISS writes the vectors from a memory map: a copy of a file,
               which starts over. float16 is first written as float32, which
               needs room for the index twice.
  IVF          shards of bounded size are added and written one after the
               other, each an index file; `faiss.contrib.ondisk` merges their
               lists into NAME.ivfdata, which NAME refers to. Continues with
               the first missing shard. Needs room for the index twice.
  all others   a graph (HNSW) or lists of another form (refined, fast-scan):
               grows in memory, and starts over after the training.

Unfinished work is in the folder NAME.build beside the index.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import math
import os
import pathlib
import shutil
from typing import Any

import faiss
from faiss.contrib.ondisk import merge_ondisk
import numpy as np

from retrieval import files

_SPARE = 1.01  # room for links of HNSW, whose levels are random
UNWRITTEN = '{}: cannot be written ({{}}). Free space on its disk.'


@dataclasses.dataclass(frozen=True)
class Plan:
  """Arguments that all methods of building an index need."""

  count: int  # P
  blocks: Callable[..., Iterator[tuple[int, np.ndarray]]]  # `vectors.blocks`
  work: pathlib.Path  # folder of unfinished work
  final: pathlib.Path  # the index file
  block: int  # vectors in memory at once
  what: str  # name of the progress bar

  @property
  def start(self) -> pathlib.Path:
    """The trained, empty index."""
    return self.work / 'start.index'

  def progress(self, done: int = 0):
    return files.progress(self.count, self.what, unit=' vectors', initial=done)


@contextlib.contextmanager
def converted(kind: type[Exception], message: str) -> Iterator[None]:
  """Turns errors of FAISS into `kind`; the reason replaces {} in `message`."""
  try:
    yield
  except RuntimeError as error:
    if type(error) is not RuntimeError:  # not FAISS's
      raise
    # Without the location in the source.
    text = str(error).strip().rpartition('\n')[2]
    text = ascii(text.partition('Error: ')[2] or text)[1:-1]
    raise kind(message.replace('{}', text[-160:])) from None


def graph(index: faiss.Index) -> faiss.IndexHNSW | None:
  """The HNSW index inside an index, also below transforms; or None."""
  while inner := getattr(index, 'index', getattr(index, 'base_index', None)):
    index = faiss.downcast_index(inner)
  return index if hasattr(index, 'hnsw') else None


def lists_path(path: pathlib.Path) -> pathlib.Path:
  """The file of the lists of an IVF index."""
  return path.with_name(f'{path.name}.ivfdata')


def _lists(index: faiss.Index):
  return faiss.downcast_InvertedLists(faiss.extract_index_ivf(index).invlists)


def has_lists(index: faiss.Index) -> bool:
  """Whether lists on the disk can replace those of the index."""
  while isinstance(index, faiss.IndexPreTransform):
    index = faiss.downcast_index(index.index)
  return isinstance(index, faiss.IndexIVF) and isinstance(
    _lists(index), faiss.ArrayInvertedLists
  )


def read(path: pathlib.Path) -> faiss.Index:
  """Opens an index file, memory-mapped.

  Raises:
    RuntimeError: FAISS cannot read it, or its lists are truncated.
  """
  lists = lists_path(path)
  if not lists.exists():
    return faiss.read_index(os.fspath(path), faiss.IO_FLAG_MMAP_IFC)
  flags = faiss.IO_FLAG_SKIP_IVF_DATA | faiss.IO_FLAG_READ_ONLY
  index = faiss.read_index(os.fspath(path), flags)
  found, size = _lists(index), lists.stat().st_size
  if size != found.totsize:  # FAISS would read past the end
    raise RuntimeError(f'Error: {lists} has {size} bytes, not {found.totsize}')
  found.filename = os.fspath(lists)  # the folder may have moved
  found.prefetch_nthread = 0  # it would start threads for each search
  found.do_mmap()
  return index


def open_work(work: pathlib.Path, about: Mapping[str, Any]) -> None:
  """Makes the folder of a build, or empties one of another build.

  Args:
    work: the folder.
    about: JSON of what the index depends on.

  Raises:
    OSError: the folder cannot be made.
    files.FilesError: its record is damaged.
  """
  if work.exists():
    same = files.read_json(work / 'identity.json') == about
    if same and about['vectors'] is not None:
      return
    shutil.rmtree(work)
  work.mkdir()
  files.write_json(work / 'identity.json', about)


def save(
  index: faiss.Index, final: pathlib.Path, flags: int = faiss.IO_FLAG_MMAP_IFC
) -> None:
  """Writes an index atomically and checks that it can be read with `flags`.

  Raises:
    files.FilesError, OSError: it cannot be written in full.
  """
  part = final.with_name(f'{final.name}.part')
  try:
    with converted(files.FilesError, UNWRITTEN.format(part)):
      faiss.write_index(index, os.fspath(part))
      # FAISS does not report a failure to close the file.
      faiss.read_index(os.fspath(part), flags)
    with open(part, 'r+b') as file:
      files.commit(file, part, final)
  finally:
    part.unlink(missing_ok=True)


def load(path: pathlib.Path, flags: int = 0) -> faiss.Index:
  """Reads what `save` wrote.

  Raises:
    files.FilesError: it is damaged.
  """
  fix = f'remove {path.parent} and build again'
  with converted(files.FilesError, f'{path}: is damaged ({{}}); {fix}'):
    return faiss.read_index(os.fspath(path), flags)


def copy(plan: Plan, index: faiss.IndexFlat, vectors: np.ndarray) -> None:
  """Builds a Flat index without loading the vectors.

  Args:
    plan: see `Plan`.
    index: an empty index.
    vectors: [P, D], float32 or float16.
  """
  rows = plan.work / 'rows'
  mapped = vectors.dtype == np.float32 and vectors.flags.c_contiguous
  files.need_space(plan.final, 4 * vectors.size * (1 if mapped else 2))
  with open(rows, 'wb') as file, plan.progress() as bar:
    for _, part in plan.blocks(plan.block):  # checks that vectors are finite
      if not mapped:
        file.write(part)
      bar.update(len(part))
  if not mapped:
    vectors = np.memmap(rows, np.float32, 'r', shape=vectors.shape)
  raw, owner = vectors.reshape(-1).view(np.uint8), index.codes.owner
  view = type(index.codes).create_view
  index.codes = view(faiss.swig_ptr(raw), vectors.nbytes, owner)
  index.ntotal = len(vectors)
  save(index, plan.final)


def join(plan: Plan, shard_bytes: int) -> None:
  """Builds an IVF index from shards, with its lists in a separate file.

  Args:
    plan: see `Plan`; the shards are in its folder.
    shard_bytes: of codes and ids in a shard, at least one block; FAISS uses
      up to twice that while it adds.
  """
  count, final, index = plan.count, plan.final, load(plan.start)
  size = faiss.extract_index_ivf(index).code_size + 8
  rows = max(1, shard_bytes // (size * plan.block)) * plan.block
  paths = {n: plan.work / f'{n:012d}.index' for n in range(0, count, rows)}
  missing = [n for n in paths if not paths[n].exists()]
  left = sum(min(rows, count - n) for n in missing)
  part = plan.work / 'lists'
  part.unlink(missing_ok=True)  # left by a kill
  files.need_space(final, (left + count) * size)
  with plan.progress(count - left) as bar:
    for first in missing:
      end = min(first + rows, count)
      shard = load(plan.start)
      for at, vectors in plan.blocks(plan.block, first):
        shard.add_with_ids(vectors, np.arange(at, at + len(vectors)))
        bar.update(len(vectors))
        if at + len(vectors) == end:
          break
      save(shard, paths[first])
      del shard
  for path in paths.values():
    load(path, faiss.IO_FLAG_MMAP)  # names the damaged one
  with converted(files.FilesError, UNWRITTEN.format(part)):
    merge_ondisk(index, [*map(os.fspath, paths.values())], os.fspath(part))
  _lists(index).filename = lists_path(final).name
  with open(part, 'r+b') as file:
    files.commit(file, part, lists_path(final))
  save(index, final, faiss.IO_FLAG_SKIP_IVF_DATA)


def grow(plan: Plan) -> None:
  """Builds an index that is in memory until it is complete."""
  index = load(plan.start)
  if linked := graph(index):
    files.need_space(plan.final, plan.count * _reserve(linked, plan.count))
  with plan.progress() as bar:
    for _, part in plan.blocks(plan.block):
      index.add(part)
      bar.update(len(part))
  save(index, plan.final)


def _reserve(index: faiss.IndexHNSW, count: int) -> int:
  """Reserves memory for count vectors; returns the bytes of each in a file.

  Arrays that grow by doubling would take up to twice as much.
  """
  hnsw, storage = index.hnsw, faiss.downcast_index(index.storage)
  m = hnsw.nb_neighbors(1)
  links = math.ceil(_SPARE * (hnsw.nb_neighbors(0) + m / max(1, m - 1)))
  sizes = ((storage.codes, storage.code_size), (hnsw.neighbors, links))
  for array, size in sizes:
    array.resize(size * count)
    array.resize(0)  # keeps the reserved memory
  return storage.code_size + 4 * links + 12  # its level, and where links are
