"""Writes FAISS indexes over vectors on the disk, such that a kill costs little.

FAISS builds in memory and writes at the end. Here an index is made in one of
three ways, by what its file looks like:

  Flat         the vectors follow a header: copied block by block, in constant
               memory; goes on at the last block that reached the disk.
  IVF          codes and ids follow a header, list by list: shards of bounded
               size are added and written one after the other, then their
               lists are joined in the file, from memory maps; goes on at the
               first shard that is missing. Needs room for the index twice.
  all others   a graph (HNSW) or what has no such end (refined, fast-scan): it
               grows in memory, and a checkpoint is written where that takes
               at most a tenth of the time and the disk has room; goes on at
               the checkpoint.

What is not finished lies in the folder NAME.build beside the index.
"""

import math
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import faiss
import numpy as np

from retrieval import files

_SYNC = 1 << 28  # bytes of a Flat index between two records of progress
_SPARE = 1.01  # room for links of HNSW, whose levels are drawn

Blocks = Callable[[int, int], Iterator[tuple[int, np.ndarray]]]


def reason(error: RuntimeError) -> str:
  """What FAISS says, without where in its source it says so."""
  text = str(error).strip().rpartition('\n')[2]
  return ascii(text.partition('Error: ')[2] or text)[1:-1][-160:]


def graph(index: faiss.Index) -> Any:
  """The graph that finds vectors, below transforms too; None without one."""
  while inner := getattr(index, 'index', getattr(index, 'base_index', None)):
    index = faiss.downcast_index(inner)
  return getattr(index, 'hnsw', None)


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


def save(index: faiss.Index, final: pathlib.Path) -> None:
  """Writes an index at once or not at all.

  Raises:
    files.FilesError, OSError: it cannot be written in full.
  """
  part = final.with_name(f'{final.name}.part')
  try:
    faiss.write_index(index, os.fspath(part))
    # FAISS does not say when closing a file failed.
    faiss.read_index(os.fspath(part), faiss.IO_FLAG_MMAP_IFC)
  except RuntimeError as error:
    part.unlink(missing_ok=True)
    raise files.FilesError(
      f'{part}: cannot be written ({reason(error)}); is there a folder, and '
      'room?'
    ) from None
  try:
    with open(part, 'r+b') as file:
      files.commit(file, part, final)
  except OSError:
    part.unlink(missing_ok=True)
    raise


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
  index: faiss.Index,
  shape: tuple[int, int],
  blocks: Blocks,
  work: pathlib.Path,
  final: pathlib.Path,
  *,
  block: int,
  what: str,
) -> None:
  """A Flat index: FAISS's header and the vectors, float32, in their order.

  Args:
    index: an empty IndexFlat.
    shape: [P, D].
    blocks: size, start -> (first row, float32 [n, D]), n <= size.
    work: see `open_work`.
    final: the file.
    block: vectors in memory at once.
    what: the name of the progress bar.
  """
  (count, dim), row = shape, 4 * shape[1]
  index.ntotal = count
  # It ends with the number of floats, of which there are none yet.
  head = faiss.serialize_index(index).tobytes()[:-8] + _u64(count * dim)
  part, record = work / 'part', work / 'done.json'
  done = (files.read_json(record) or {'done': 0})['done']
  if not part.exists() or part.stat().st_size < len(head) + done * row:
    done = 0
  if not done:
    part.write_bytes(head)
  files.need_space(part, (count - done) * row)
  with (
    open(part, 'r+b') as file,
    files.progress(count, what, unit=' vectors', initial=done) as bar,
  ):
    file.seek(len(head) + done * row)
    for first, rows in blocks(block, done):
      file.write(rows)
      bar.update(len(rows))
      end = first + len(rows)
      if (end - done) * row >= _SYNC:
        files.sync(file)
        files.write_json(record, {'done': end})
        done = end
    files.commit(file, part, final)


def empty_lists(index: faiss.Index) -> bytes:
  """How the file of an empty IVF index ends; b'' if it is not with lists."""
  ivf = faiss.try_extract_index_ivf(index)
  if not ivf:
    return b''
  end = b'ilar' + _u64(ivf.nlist, ivf.code_size) + b'sprs' + _u64(0)
  return end if faiss.serialize_index(index).tobytes().endswith(end) else b''


def join(
  start: pathlib.Path,
  count: int,
  blocks: Blocks,
  finish: Callable[[faiss.Index], None],
  work: pathlib.Path,
  final: pathlib.Path,
  *,
  block: int,
  shard_bytes: int,
  what: str,
) -> None:
  """An IVF index from shards; the bytes of one that FAISS makes at once.

  Args:
    start: the trained, empty index.
    count: P.
    blocks: see `copy`.
    finish: changes what the file says of searching, at the end.
    work: see `open_work`.
    final: the file.
    block: vectors added at once.
    shard_bytes: of codes and ids in a shard, at least one block; FAISS takes
      up to twice that while it adds.
    what: the name of the progress bars.
  """
  index = load(start)
  size = faiss.extract_index_ivf(index).code_size + 8
  rows = max(1, shard_bytes // (size * block)) * block
  paths = {n: work / f'{n:012d}.index' for n in range(0, count, rows)}
  missing = [n for n in paths if not paths[n].exists()]
  left = sum(min(rows, count - n) for n in missing)
  (work / 'part').unlink(missing_ok=True)  # what a kill left of the lists
  files.need_space(final, (left + count) * size)
  with files.progress(
    count, what, unit=' vectors', initial=count - left
  ) as bar:
    for first in missing:
      end = min(first + rows, count)
      shard = load(start)
      for at, part in blocks(block, first):
        shard.add_with_ids(part, np.arange(at, at + len(part)))
        bar.update(len(part))
        if at + len(part) == end:
          break
      save(shard, paths[first])
      del shard
  finish(index)
  shards = [load(p, faiss.IO_FLAG_MMAP_IFC) for p in paths.values()]
  _join_lists(index, shards, count, work / 'part', final, f'{what}, lists')


def _join_lists(
  index: faiss.Index, shards: list[faiss.Index], count: int,
  part: pathlib.Path, final: pathlib.Path, what: str,
) -> None:
  ivf, end = faiss.extract_index_ivf(index), empty_lists(index)
  lists = [faiss.extract_index_ivf(shard).invlists for shard in shards]
  sizes = np.array(
    [[x.list_size(i) for x in lists] for i in range(ivf.nlist)], np.uint64
  )
  totals = sizes.sum(1, dtype=np.uint64)
  some = np.flatnonzero(totals).astype(np.uint64)
  if len(some) > ivf.nlist // 2:
    table = b'full' + _u64(ivf.nlist) + totals.tobytes()
  else:
    pairs = np.stack([some, totals[some]], 1)
    table = b'sprs' + _u64(pairs.size) + pairs.tobytes()
  index.ntotal = ivf.ntotal = count
  head = faiss.serialize_index(index).tobytes()[:-len(end)]
  width = ivf.code_size
  with (
    open(part, 'wb') as file,
    files.progress(count * (width + 8), what) as bar,
  ):
    file.write(head + end[:20] + table)
    for i in some.tolist():
      pieces = [(x, int(n)) for x, n in zip(lists, sizes[i]) if n]
      for x, n in pieces:
        file.write(faiss.rev_swig_ptr(x.get_codes(i), n * width))
      for x, n in pieces:
        file.write(faiss.rev_swig_ptr(x.get_ids(i), n))
      bar.update(int(totals[i]) * (width + 8))
    files.commit(file, part, final)


def grow(
  start: pathlib.Path,
  count: int,
  blocks: Blocks,
  finish: Callable[[faiss.Index], None],
  final: pathlib.Path,
  *,
  block: int,
  checkpoint_s: float,
  what: str,
) -> None:
  """An index that is in memory until it is whole.

  A graph needs all of itself and all vectors at hand. Room for both is made at
  once, as arrays that double would take up to twice as much.

  Args:
    start: the trained index, empty or a checkpoint; replaced by checkpoints.
    count: P.
    blocks: see `copy`.
    finish: see `join`.
    final: the file.
    block: vectors added at once.
    checkpoint_s: the least seconds between checkpoints, see the module;
      infinity for none.
    what: the name of the progress bar.

  Raises:
    files.FilesError: the disk has no room for the index, or it cannot be
      written in the end. A checkpoint that cannot be is done without.
  """
  index = load(start, faiss.IO_FLAG_MMAP_IFC)
  if any(isinstance(part, faiss.IndexIVF) for part in _parts(index)):
    index = load(start)  # lists that are mapped take no more
  if hnsw := graph(index):
    # A file does not say how far the draw of levels has come.
    for _ in range(index.ntotal):
      hnsw.random_level()
  _reserve(index, count)
  row = _row_bytes(index)
  # The checkpoint makes way for what it became.
  files.need_space(final, count * row - start.stat().st_size)
  due = time.monotonic() + checkpoint_s
  with files.progress(
    count, what, unit=' vectors', initial=index.ntotal
  ) as bar:
    for _, part in blocks(block, index.ntotal):
      index.add(part)
      bar.update(len(part))
      if (begin := time.monotonic()) >= due and index.ntotal < count:
        try:
          files.need_space(start, index.ntotal * row)
          save(index, start)
        except (files.FilesError, OSError) as error:
          bar.write(
            f'{what}: goes on without a checkpoint: {error}', file=sys.stderr
          )
        end = time.monotonic()
        due = end + max(checkpoint_s, 10 * (end - begin))
  finish(index)
  if shutil.disk_usage(final.parent).free < count * row:
    start.unlink()
  save(index, final)


def _parts(index: faiss.Index) -> Iterator[faiss.Index]:
  """An index and all in it, below transforms and graphs too."""
  index = faiss.downcast_index(index)
  yield index
  for name in ('index', 'base_index', 'refine_index', 'storage'):
    if inner := getattr(index, name, None):
      yield from _parts(inner)


def _links(hnsw: Any) -> float:
  """Links of a vector, those that are expected of drawn levels included."""
  m = hnsw.nb_neighbors(1)
  return _SPARE * (hnsw.nb_neighbors(0) + m / max(1, m - 1))


def _row_bytes(index: faiss.Index) -> int:
  """What the file of an index takes for each vector, about."""
  size = 0
  for part in _parts(index):
    size += getattr(part, 'code_size', 0)
    if isinstance(part, faiss.IndexIVF):
      size += 8  # the id
    if hnsw := getattr(part, 'hnsw', None):
      size += math.ceil(4 * _links(hnsw)) + 12  # the level, and where they are
  return size


def _reserve(index: faiss.Index, count: int) -> None:
  """Makes room for count vectors; growing by doubling takes twice that.

  Arrays mapped from a file are copied into it: read, they would be in memory
  beside it.
  """
  for part in _parts(index):
    wanted = []
    if hnsw := getattr(part, 'hnsw', None):
      wanted.append((hnsw, 'neighbors', int(_links(hnsw) * count)))
    if hasattr(part, 'codes'):
      wanted.append((part, 'codes', count * part.code_size))
    for owner, name, size in wanted:
      array, mapped = getattr(owner, name), None
      there = array.size()
      if not getattr(array, 'is_owned', True):
        mapped, empty = type(array)(array), type(array)()
        setattr(owner, name, empty)
        array = getattr(owner, name)
      array.resize(max(size, there))
      array.resize(there)  # the room stays
      if mapped and there:
        faiss.rev_swig_ptr(array.data(), there)[:] = faiss.rev_swig_ptr(
          mapped.data(), there
        )


def _u64(*numbers: int) -> bytes:
  return np.array(numbers, '<u8').tobytes()
