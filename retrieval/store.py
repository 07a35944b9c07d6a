"""The corpus on disk for random access: an Arrow IPC file, memory-mapped.

Columns `id` and `contents`, in record batches; the last batch is empty and
carries the count and the sha256, known only then, as its metadata. A file cut
short has no footer and is refused. Open, it takes no memory but the pages of
the file that are in use, which the system drops when it needs them.
"""

from collections.abc import Iterator, Sequence
import os

import pyarrow as pa

from retrieval.corpus import Corpus, CorpusError, Digest, iter_documents

_SCHEMA = pa.schema([('id', pa.string()), ('contents', pa.string())])
_BATCH = 4096  # passages; about 3 MB of 100-word ones


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


def write_store(source: str | os.PathLike, out: str | os.PathLike) -> Corpus:
  """Writes any corpus as a store, in constant memory, and opens it.

  Args:
    source: see `corpus.iter_documents`.
    out: the file to write; it appears under this name when it is whole.

  Raises:
    CorpusError: the source is no good; `out` is then as it was.
  """
  out = os.fspath(out)
  part = f'{out}.part'
  try:
    with open(part, 'wb') as file:
      with pa.ipc.new_file(file, _SCHEMA) as writer:
        digest, count, rows = Digest(), 0, ([], [])
        for doc in iter_documents(source):
          digest.update(doc)
          count += 1
          rows[0].append(doc.id)
          rows[1].append(doc.contents)
          if len(rows[0]) == _BATCH:
            writer.write_batch(_batch(rows))
            rows = ([], [])
        writer.write_batch(_batch(rows))
        about = {'count': str(count), 'sha256': digest.hexdigest()}
        writer.write_batch(_batch(([], [])), custom_metadata=about)
      file.flush()
      os.fsync(file.fileno())
    os.replace(part, out)
  finally:
    if os.path.exists(part):
      os.unlink(part)
  return open_store(out)


def open_store(path: str | os.PathLike) -> Corpus:
  """Opens what `write_store` wrote, memory-mapped.

  Raises:
    CorpusError: the file is absent, cut short or not a store.
  """
  path = os.fspath(path)
  mend = 'Write it again: python -m retrieval.build_index --corpus=...'
  try:
    reader = pa.ipc.open_file(pa.memory_map(path))
    table = reader.read_all()
    last = reader.get_batch_with_custom_metadata(reader.num_record_batches - 1)
    about = dict(last.custom_metadata or {})
    count, sha256 = int(about[b'count']), about[b'sha256'].decode()
  except FileNotFoundError:
    raise CorpusError(f'{path}: no such file. {mend}') from None
  except (pa.ArrowException, OSError, KeyError, ValueError) as error:
    raise CorpusError(
      f'{path}: not a whole corpus store ({str(error)[:160]!r}). {mend}'
    ) from None
  if table.schema != _SCHEMA or len(table) != count:
    raise CorpusError(
      f'{path}: holds {len(table)} passages in columns '
      f'{table.schema.names}, should hold {count} in {_SCHEMA.names}. {mend}'
    )
  return Corpus(path, _Column(table['id']), _Column(table['contents']), sha256)


def _batch(rows: tuple[list[str], list[str]]) -> pa.RecordBatch:
  return pa.record_batch(list(rows), _SCHEMA)
