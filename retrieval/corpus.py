"""The corpus: passages in Search-R1's layout, read as a stream and checked.

A passage has a string `id` and string `contents`, `"Title"\\ntext`. It is a
line `{"id": "7", "contents": "\\"Title\\"\\ntext"}` of a JSONL file, plain,
gzipped or in a tar, or a row of a Parquet file, of an Arrow IPC file (`store`),
or of a Hugging Face dataset; files are told apart by their first bytes, not by
their names: Search-R1's wiki-18.jsonl.gz is said to be a tar. Other fields are
ignored. A bad passage stops the reading with its file and its line or row,
both from 1: an index built around it would answer with the wrong passages and
nobody would see it.
"""

import array
from collections.abc import Iterable, Iterator, Sequence
import contextlib
import dataclasses
import gzip
import hashlib
import io
import itertools
import json
import os
import shlex
import tarfile
from typing import Any
import zlib

import numpy as np
import tqdm

_GZIP, _PARQUET, _ARROW = b'\x1f\x8b', b'PAR1', b'ARROW1'
_COLUMNS = ['id', 'contents']
_ROWS = 1024  # read at once
MOST = 2_000_000  # passages to index in memory: more take minutes each time
_NAMES = 5  # of members of a tar in an error


class CorpusError(ValueError):
  """The corpus cannot be used; the message names file, line and mend."""


@dataclasses.dataclass(frozen=True)
class Document:
  """A passage; `contents` is a title line, a newline and the text."""

  id: str
  contents: str


@dataclasses.dataclass(frozen=True)
class Corpus:
  """P passages in file order; position p is what an index returns."""

  path: str
  ids: Sequence[str]  # [P], all different
  contents: Sequence[str]  # [P]
  sha256: str  # of ids and contents: the same in every form of storage

  def __len__(self) -> int:
    return len(self.ids)

  def __getitem__(self, position: int) -> Document:
    return Document(self.ids[position], self.contents[position])


def split_contents(contents: str) -> tuple[str, str]:
  """Splits `"Title"\\ntext` into (title, text); the title loses its quotes.

  Contents without a line break have no title: all of it is text.
  """
  head, newline, text = contents.partition('\n')
  if not newline:
    return '', contents
  title = head.strip()
  if len(title) >= 2 and title[0] == title[-1] == '"':
    title = title[1:-1]
  return title, text


def join_contents(title: str, text: str) -> str:
  """The inverse of `split_contents`: `"Title"\\ntext`."""
  return f'"{title}"\n{text}'


class Digest:
  """The sha256 of a corpus, passage by passage."""

  def __init__(self):
    self._hash = hashlib.sha256()

  def update(self, doc: Document) -> None:
    # Lengths first, so that no two corpora share a stream of bytes.
    self._hash.update(f'{len(doc.id)}:{len(doc.contents)}:'.encode())
    self._hash.update((doc.id + doc.contents).encode())

  def hexdigest(self) -> str:
    return self._hash.hexdigest()


def read_corpus(path: str | os.PathLike, most: int | None = None) -> Corpus:
  """Reads and checks a whole corpus into memory; see `iter_documents`.

  Raises:
    CorpusError: see there; or it has more than `most` passages.
  """
  ids, contents, digest = [], [], Digest()
  for doc in iter_documents(path):
    if len(ids) == most:
      source = shlex.quote(f'--corpus={os.fspath(path)}')
      raise CorpusError(
        f'{path}: more than {most:,} passages, too many to be indexed in '
        'memory at each start (--corpus). Build an index once: python -m '
        f'retrieval.build_index {source} --out=INDEX --index=bm25. Then give '
        '--index_folder=INDEX --index=bm25 instead of --corpus.'
      )
    ids.append(doc.id)
    contents.append(doc.contents)
    digest.update(doc)
  return Corpus(
    os.fspath(path), tuple(ids), tuple(contents), digest.hexdigest()
  )


def iter_documents(path: str | os.PathLike) -> Iterator[Document]:
  """Reads and checks a corpus as a stream, 8 bytes of memory a passage.

  Args:
    path: a file of JSONL (plain, gzipped, or the one file of a tar that is
      either), Parquet or Arrow IPC; a folder that
      `datasets.Dataset.save_to_disk` wrote; or `hf:NAME[:SPLIT]`, a dataset
      of the Hugging Face hub or of its cache (offline too).

  Yields:
    The passages in order, at least one.

  Raises:
    CorpusError: the source is absent, unreadable, cut short or empty, or a
      passage has no string `id` and string `contents`; after the last
      passage: an id was used twice.
  """
  path, hashes = os.fspath(path), array.array('q')
  for _, _, doc in _checked(path):
    hashes.append(hash(doc.id))
    yield doc
  if not hashes:
    raise CorpusError(
      f'{path}: the corpus is empty. Write at least one passage '
      '{"id": "0", "contents": "\\"Title\\"\\ntext"}.'
    )
  ordered = np.frombuffer(hashes, np.int64)
  ordered.sort()
  twice = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
  if not twice:
    return
  # Equal ids, or different ones of equal hash: a second reading tells.
  seen = {}
  for where, place, doc in _checked(path):
    if hash(doc.id) in twice and seen.setdefault(doc.id, place) != place:
      raise CorpusError(
        f'{where}: id {_shown(doc.id)} was already used on '
        f'{seen[doc.id]}. Give every passage an id of its own.'
      )


def _checked(path: str) -> Iterator[tuple[str, str, Document]]:
  """Yields (where for an error, "line N" or "row N", passage)."""
  stored = path.startswith('hf:') or os.path.isdir(path)
  magic = b'' if stored else _magic(path)
  if not stored and not magic.startswith((_PARQUET, _ARROW)):
    for number, line in _lines(path):
      where = f'{path}:{number}'
      yield where, f'line {number}', _parse(line, where)
    return
  with _tables(path, magic) as (count, tables), _bar(count, ' rows') as bar:
    number = 0
    for table in tables:
      for row in zip(*(table[name] for name in _COLUMNS)):
        number += 1
        where = f'{path}: row {number}'
        try:
          record = dict(zip(_COLUMNS, (value.as_py() for value in row)))
        except UnicodeDecodeError:
          raise CorpusError(
            f'{where}: not UTF-8. Write the column as text.'
          ) from None
        yield where, f'row {number}', _document(record, where)
      bar.update(number - bar.n)


@contextlib.contextmanager
def _tables(path: str, magic: bytes) -> Iterator[tuple[int, Iterator]]:
  """(number of rows, record batches) of anything stored in columns."""
  import pyarrow as pa  # slow to import, and a JSONL needs none of it
  import pyarrow.parquet

  try:
    if magic.startswith(_ARROW):
      with pa.memory_map(path) as file, pa.ipc.open_file(file) as reader:
        _require_columns(path, reader.schema.names)
        batches = range(reader.num_record_batches)
        rows = sum(reader.get_batch(i).num_rows for i in batches)
        yield rows, map(reader.get_batch, batches)
    elif magic.startswith(_PARQUET):
      # Mapped and not buffered ahead: a row group may be the whole corpus.
      with pyarrow.parquet.ParquetFile(
        path, memory_map=True, pre_buffer=False
      ) as file:
        _require_columns(path, file.schema_arrow.names)
        yield file.metadata.num_rows, file.iter_batches(_ROWS, columns=_COLUMNS)
    else:
      rows = _dataset(path)
      _require_columns(path, rows.column_names)
      rows = rows.select_columns(_COLUMNS).with_format('arrow')
      yield len(rows), rows.iter(_ROWS)
  except (pa.ArrowException, OSError) as error:
    raise CorpusError(
      f'{path}: cut short or damaged ({_shown(str(error), 160)}). Copy or '
      'write it again.'
    ) from None


def _dataset(path: str) -> Any:
  """The `datasets.Dataset` of a folder or of `hf:NAME[:SPLIT]`."""
  remote = path.startswith('hf:')
  marks = ('state.json', 'dataset_dict.json')
  if not remote and not any(os.path.exists(f'{path}/{m}') for m in marks):
    raise CorpusError(
      f'{path}: a directory, and no dataset was saved to it (save_to_disk). '
      'Name the file of the corpus.'
    )
  import datasets  # takes seconds

  name, _, split = path.removeprefix('hf:').partition(':')
  try:
    if remote:
      found = datasets.load_dataset(name, split=split or None)
    else:
      found = datasets.load_from_disk(path)
  except (OSError, ValueError, RuntimeError) as error:
    raise CorpusError(
      f'{path}: the dataset cannot be loaded: {_shown(str(error), 400)}'
    ) from None
  if isinstance(found, dict):
    if len(found) != 1:
      join = ':' if remote else '/'
      raise CorpusError(
        f'{path}: has the splits {", ".join(found)}. Name one: '
        f'{path}{join}{next(iter(found), "train")}.'
      )
    (found,) = found.values()
  return found


def _require_columns(path: str, names: Sequence[str]) -> None:
  for name in _COLUMNS:
    if names.count(name) != 1:
      raise CorpusError(
        f'{path}: {names.count(name) or "no"} column {name!r} (found: '
        f'{_listed(names)}). {_mend(name, names)}'
      )


def _open(path: str) -> io.BufferedReader:
  try:
    return open(path, 'rb')
  except FileNotFoundError:
    raise CorpusError(
      f'{path}: no such file. Check the path given as the corpus.'
    ) from None
  except OSError as error:
    raise CorpusError(f'{path}: cannot be read: {error.strerror}.') from None


def _magic(path: str) -> bytes:
  with _open(path) as file:
    return file.read(8)


def _bar(total: int, unit: str) -> tqdm.tqdm:
  # disable=None: no bar where stderr is a file.
  return tqdm.tqdm(
    total=total,
    unit=unit,
    unit_scale=True,
    desc='corpus',
    disable=None,
    delay=1.0,
  )


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
  """Yields (line number from 1, line), blank lines left out."""
  number = 0
  with _open(path) as raw:
    size = os.fstat(raw.fileno()).st_size
    zipped = raw.read(2) == _GZIP
    raw.seek(0)
    stream = io.BufferedReader(gzip.open(raw) if zipped else raw, 1 << 20)
    with _bar(size, 'B') as bar:
      try:
        for line in _unpacked(path, stream):
          number += 1
          if number % 4096 == 0:
            bar.update(raw.tell() - bar.n)  # of the compressed bytes
          if number == 1:
            line = line.removeprefix(b'\xef\xbb\xbf')
          if not line.isspace():
            yield number, line
      except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise CorpusError(
          f'{path}:{number + 1}: the gzip file is cut short or damaged '
          f'({error}). Copy or compress it again.'
        ) from None
      except tarfile.TarError as error:
        raise CorpusError(
          f'{path}:{number + 1}: the tar file is cut short or damaged '
          f'({error}). Copy or write it again.'
        ) from None


def _unpacked(path: str, stream: io.BufferedReader) -> Iterator[bytes]:
  """The lines of a stream, or of the one file in it where it is a tar."""
  head = stream.read(tarfile.BLOCKSIZE)
  stream.seek(0)
  # JSON has no NUL, so no passage about the format is taken for a tar.
  if head[257:262] != b'ustar' or b'\0' not in head:
    yield from stream
    return
  names = []
  with tarfile.open(fileobj=stream, mode='r|') as tar:
    for member in tar:
      # macOS adds ._NAME for what its files have beside their contents.
      if not member.isreg() or os.path.basename(member.name).startswith('._'):
        continue
      names.append(member.name)
      if len(names) == 1:
        yield from tar.extractfile(member)
      elif len(names) > _NAMES:
        break
  if len(names) != 1:
    more = ', ...' if len(names) > _NAMES else ''
    raise CorpusError(
      f'{path}: a tar with {"several files" if names else "no file"} '
      f'({_listed(names[:_NAMES])}{more}), not with one of JSONL. Unpack it '
      'and name the file of the corpus.'
    )
  while stream.read(1 << 20):  # the end of a gzip file holds its checksum
    pass


def _parse(line: bytes, where: str) -> Document:
  try:
    record = json.loads(line.decode('utf-8'))
  except UnicodeDecodeError as error:
    raise CorpusError(
      f'{where}: not UTF-8 (byte {error.start + 1} of the line). Convert the '
      'file to UTF-8.'
    ) from None
  except (ValueError, RecursionError) as error:
    raise CorpusError(
      f'{where}: not JSON: {error}. Each line must be one whole JSON object.'
    ) from None
  if not isinstance(record, dict):
    raise CorpusError(
      f'{where}: a JSON {type(record).__name__}, not an object. Write '
      '{"id": ..., "contents": ...}.'
    )
  doc = _document(record, where)
  if b'\\u' in line:  # only an escape can bring a lone surrogate in
    try:
      (doc.id + doc.contents).encode()
    except UnicodeEncodeError:
      raise CorpusError(
        f'{where}: an unpaired surrogate (\\ud800 to \\udfff), which is no '
        'character and cannot be sent. Remove it or repair the pair.'
      ) from None
  return doc


def _document(record: dict, where: str) -> Document:
  fields = {}
  for name in _COLUMNS:
    if name not in record:
      raise CorpusError(
        f'{where}: no field {name!r} (found: '
        f'{_listed(record)}). {_mend(name, record)}'
      )
    value = record[name]
    # Some published corpora number their passages; the protocol says string.
    if name == 'id' and isinstance(value, int) and not isinstance(value, bool):
      value = str(value)
    if not isinstance(value, str) or (name == 'id' and not value):
      raise CorpusError(
        f'{where}: field {name!r} is {_shown(value)}, not a '
        f'{"non-empty " if name == "id" else ""}string.'
      )
    fields[name] = value
  return Document(**fields)


def _mend(name: str, names: Iterable[str]) -> str:
  if name == 'contents' and 'text' in names:
    return 'Join title and text: contents = "\\"Title\\"\\ntext".'
  return f'Add {name!r} to every passage.'


def _listed(names: Iterable[str]) -> str:
  return ', '.join(map(_shown, itertools.islice(names, 20))) or 'none'


def _shown(value: object, most: int = 40) -> str:
  text = repr(value)
  return text if len(text) <= most else text[: most - 3] + '...'
