"""The vectors of a corpus: INDEX/vectors.npy, which every dense index reads.

Encoding 21 million passages takes hours to days, so it survives a kill: the
file is there in full from the start (`vectors.npy.part`), blocks of rows are
written and flushed to the disk, and only then does `vectors.json` count them
as done. That record also names corpus and encoder: what goes on is the same
work or an error.
"""

from collections.abc import Iterator
import pathlib
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
  about = identity(corpus, encoder, dtype)
  done = check_done(folder / 'vectors.json', about)
  if (folder / 'vectors.npy').exists() and done == len(corpus):
    return open_vectors(folder)
  if not (folder / 'vectors.npy.part').exists():
    done = 0

  def blocks():
    for start in range(done, len(corpus), block):
      texts = corpus.contents[start : start + block]
      vectors = np.empty((len(texts), encoder.dim), np.float32)
      # The longest first: too little memory shows at once.
      order = np.argsort([-len(t) for t in texts], kind='stable')
      for few in np.split(order, range(_CALL, len(order), _CALL)):
        vectors[few] = encoder.encode_passages([texts[i] for i in few])
      yield vectors

  return write(blocks(), (len(corpus), encoder.dim), about, folder, done)


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


def write(
  rows: Iterator[np.ndarray],
  shape: tuple[int, int],
  about: dict,
  folder: pathlib.Path,
  done: int = 0,
) -> np.ndarray:
  """Writes vectors.npy block by block; each that is written stays.

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
    part.unlink(missing_ok=True)  # its blocks are free again
    files.need_space(part, shape[0] * shape[1] * np.dtype(dtype).itemsize)
    np.lib.format.open_memmap(part, 'w+', dtype, shape)
    files.write_json(record, {'identity': about, 'done': 0})
  mapped = np.lib.format.open_memmap(part, 'r')
  if mapped.shape != shape or mapped.dtype != dtype:
    raise VectorsError(
      f'{part}: holds {mapped.shape} {mapped.dtype}, not {shape} {dtype}. Use '
      '--restart.'
    )
  # Written, not mapped: a full disk is then an error instead of a SIGBUS.
  with (
    open(part, 'r+b') as file,
    files.progress(shape[0], 'write', unit=' vectors', initial=done) as bar,
  ):
    file.seek(mapped.offset + done * mapped.strides[0])
    for block in rows:
      with np.errstate(over='ignore'):
        block = np.ascontiguousarray(block, dtype)
      bad = np.flatnonzero(~np.isfinite(block).all(axis=1))
      if len(bad):
        raise VectorsError(
          f'vector {done + bad[0]}, counted from 0, is not finite in {dtype}. '
          'Try --vectors=float32, or --dtype=float32 for the encoder; a file '
          'that was adopted is damaged, or of another number format.'
        )
      file.write(block)
      files.sync(file)
      done += len(block)
      bar.update(len(block))
      files.write_json(record, {'identity': about, 'done': done})
    files.commit(file, part, final)
  return open_vectors(folder)
