"""The vectors of a corpus: INDEX/vectors.npy, which every dense index reads.

Encoding 21 million passages takes hours to days, so it survives a kill: the
file is there in full from the start (`vectors.npy.part`), blocks of rows are
written and flushed to the disk, and only then does `vectors.json` count them
as done. That record also names corpus and encoder: what goes on is the same
work or an error.
"""

import pathlib
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from retrieval import files
from retrieval.corpus import Corpus

DTYPES = ('float32', 'float16')
_CALL = 1024  # passages of one call of the encoder, of like length


class VectorsError(ValueError):
  """The vectors cannot be made or used; the message names the mend."""


class PassageEncoder(Protocol):
  """What writing vectors needs of `encoder.Encoder`."""

  dim: int
  dtype: str  # of its arithmetic
  parameters: dict[str, Any]

  def encode_passages(self, passages: list[str]) -> np.ndarray: ...


def identity(corpus: Corpus, encoder: PassageEncoder, dtype: str) -> dict:
  """What vectors depend on: equal identities give equal vectors."""
  return {
    'corpus': {'count': len(corpus), 'sha256': corpus.sha256},
    'encoder': {**encoder.parameters, 'arithmetic': encoder.dtype},
    'dtype': dtype,
  }


def open_vectors(folder: pathlib.Path) -> np.ndarray:
  """vectors.npy, [P, D], memory-mapped."""
  return np.load(folder / 'vectors.npy', mmap_mode='r')


def encode(
  corpus: Corpus,
  encoder: PassageEncoder,
  folder: pathlib.Path,
  *,
  dtype: str = 'float32',
  block: int = 8192,
) -> np.ndarray:
  """Writes the vectors of a corpus, or what is missing of them.

  Args:
    corpus: P passages; one block of them is in memory at a time.
    encoder: turns passages into [n, D] float32.
    folder: where `vectors.npy` and `vectors.json` lie.
    dtype: of the file, one of `DTYPES`.
    block: passages between two records of progress. Sorted by length they
      waste little padding; rows are in corpus order whatever it is.

  Returns:
    [P, D], memory-mapped.

  Raises:
    VectorsError: what is there belongs to another corpus, encoder or dtype,
      or the encoder gave a vector that is not finite.
    files.FilesError: the disk is too small or a record damaged.
  """
  final, part = folder / 'vectors.npy', folder / 'vectors.npy.part'
  record = folder / 'vectors.json'
  about = identity(corpus, encoder, dtype)
  done = check_done(record, about)
  if final.exists() and done == len(corpus):
    return open_vectors(folder)
  shape = (len(corpus), encoder.dim)
  if not done or not part.exists():
    done = 0
    part.unlink(missing_ok=True)  # its blocks are free again
    files.need_space(part, shape[0] * shape[1] * np.dtype(dtype).itemsize)
    np.lib.format.open_memmap(part, 'w+', dtype, shape)
    files.write_json(record, {'identity': about, 'done': 0})
  rows = np.lib.format.open_memmap(part, 'r')
  if rows.shape != shape or rows.dtype != dtype:
    raise VectorsError(
      f'{part}: holds {rows.shape} {rows.dtype}, not {shape} {dtype}. Use '
      '--restart.'
    )
  start, row_bytes = rows.offset, rows.strides[0]
  del rows
  # Written, not mapped: a full disk is then an error instead of a SIGBUS.
  with (
    open(part, 'r+b') as file,
    files.progress(
      len(corpus), 'encode', unit=' passages', initial=done
    ) as bar,
  ):
    while done < len(corpus):
      texts = corpus.contents[done:done + block]
      vectors = np.empty((len(texts), encoder.dim), dtype)
      # The longest first: too little memory shows at once.
      order = np.argsort([-len(t) for t in texts], kind='stable')
      for few in np.split(order, range(_CALL, len(order), _CALL)):
        vectors[few] = encoder.encode_passages([texts[i] for i in few])
        bar.update(len(few))
      bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
      if len(bad):
        raise VectorsError(
          f'passage {done + int(bad[0])} (id {corpus.ids[done + bad[0]]!r}): '
          f'its vector is not finite in {dtype}. Try --vectors=float32, or '
          '--dtype=float32 for the encoder.'
        )
      file.seek(start + done * row_bytes)
      file.write(vectors)
      files.sync(file)
      done += len(texts)
      files.write_json(record, {'identity': about, 'done': done})
    files.commit(file, part, final)
  return open_vectors(folder)


def check_done(record: pathlib.Path, about: dict) -> int:
  """The rows that are on the disk already.

  Raises:
    VectorsError: they are of another identity.
  """
  saved = files.read_json(record)
  if saved is None:
    return 0
  differ = files.differences(saved['identity'], about)
  if differ:
    raise VectorsError(
      f'{record.parent}: holds vectors of something else: '
      f'{"; ".join(differ)}. Use another --out, or --restart to discard them.'
    )
  return saved['done']


def copy(
  rows: Iterator[np.ndarray],
  shape: tuple[int, int],
  dtype: str,
  about: dict,
  folder: pathlib.Path,
) -> np.ndarray:
  """Writes vectors that exist already, block by block, as vectors.npy.

  Args:
    rows: blocks [n, D] in corpus order.
    shape: [P, D].
    dtype: of the file.
    about: see `identity`.
    folder: of the index.

  Raises:
    VectorsError: a vector is not finite.
  """
  final, part = folder / 'vectors.npy', folder / 'vectors.npy.part'
  part.unlink(missing_ok=True)
  files.need_space(part, shape[0] * shape[1] * np.dtype(dtype).itemsize)
  np.lib.format.open_memmap(part, 'w+', dtype, shape)
  with (
    open(part, 'r+b') as file,
    files.progress(shape[0], 'copy', unit=' vectors') as bar,
  ):
    file.seek(np.lib.format.open_memmap(part, 'r').offset)
    for block in rows:
      block = np.ascontiguousarray(block, dtype)
      if not np.isfinite(block).all():
        bad = np.flatnonzero(~np.isfinite(block).all(axis=1))[0]
        raise VectorsError(
          f'vector {bar.n + bad} is not finite in {dtype}: the file is '
          'damaged, or was written in another number format.'
        )
      file.write(block)
      bar.update(len(block))
    files.commit(file, part, final)
  files.write_json(
    folder / 'vectors.json', {'identity': about, 'done': shape[0]}
  )
  return open_vectors(folder)
