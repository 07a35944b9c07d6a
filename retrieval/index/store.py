"""The corpus on disk for random access: an Arrow IPC file, memory-mapped.

Columns `id` and `contents`, in record batches. The last batch is empty; its
metadata hold the count and the sha256, which are known only at the end. A
truncated file has no footer and is refused. An open store uses no memory but
the mapped pages in use, which the system may drop.
"""

from collections.abc import Iterator, Sequence
import itertools
import os
import pathlib

import pyarrow as pa

from retrieval import files
from retrieval.corpus import Corpus, CorpusError, Digest, iter_documents

_SCHEMA = pa.schema([('id', pa.string()), ('contents', pa.string())])
_BATCH = 4096  # passages; about 3 MB of 100-word passages


class _Column(Sequence):
  """Strings of a memory-mapped column; a slice is a list in memory."""

  def __init__(self, column: pa.ChunkedArray):
    self._column = column

  def __len__(self) -> int:
    return len(self._column)

  def __getitem__(self, key: int | slice) -> str | list[str]:
    found = self._column[key]
    return found.to_pylist() if isinstance(key, slice) else found.as_py()

  def __iter__(self) -> Iterator[str]:
    for chunk in self._column.chunks:
      yield from chunk.to_pylist()


def write_store(source: files.PathLike, out: files.PathLike) -> Corpus:
  """Writes any corpus as a store, in constant memory, and opens it.

  Args:
    source: see `corpus.iter_documents`.
    out: the file to write, atomically.

  Raises:
    CorpusError: the source is invalid; `out` is unchanged.
  """
  digest, count, documents = Digest(), 0, iter_documents(source)
  with (
    files.replacing(pathlib.Path(out)) as file,
    pa.ipc.new_file(file, _SCHEMA) as writer,
  ):
    while batch := list(itertools.islice(documents, _BATCH)):
      for doc in batch:
        digest.update(doc)
      count += len(batch)
      columns = [[d.id for d in batch], [d.contents for d in batch]]
      writer.write_batch(pa.record_batch(columns, _SCHEMA))
    about = {'count': str(count), 'sha256': digest.hexdigest()}
    empty = pa.record_batch([[], []], _SCHEMA)
    writer.write_batch(empty, custom_metadata=about)
  return open_store(out)


def open_store(path: files.PathLike) -> Corpus:
  """Opens what `write_store` wrote, memory-mapped.

  Raises:
    CorpusError: the file is absent, truncated or not a store.
  """
  path = os.fspath(path)
  fix = 'Write it again: python -m retrieval.build_index --corpus=...'
  problem = f'{path}: not a whole corpus store ({{}}). {fix}'
  damaged = (pa.ArrowException, OSError, KeyError, ValueError)
  with files.convert(damaged, CorpusError, problem):
    reader = pa.ipc.open_file(pa.memory_map(path))
    table = reader.read_all()
    last = reader.get_batch_with_custom_metadata(reader.num_record_batches - 1)
    about = dict(last.custom_metadata or {})
    count, sha256 = int(about[b'count']), about[b'sha256'].decode()
    if table.schema != _SCHEMA or len(table) != count:
      found = f'{len(table)} passages in columns {table.schema.names}'
      raise ValueError(f'{found}, not {count} in {_SCHEMA.names}')
  return Corpus(path, _Column(table['id']), _Column(table['contents']), sha256)
