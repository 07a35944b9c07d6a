"""The corpus: passages in Search-R1's layout, read as a stream and checked.

A passage has a string `id` and string `contents`, `"Title"\\ntext`. It is a
line `{"id": "7", "contents": "\\"Title\\"\\ntext"}` of a JSONL file (plain,
compressed or in a tar), or a row of a Parquet file, of an Arrow IPC file
(`store`) or of a Hugging Face dataset. Formats, compression and UTF-16 are
recognised by the first bytes of a file, not by its name: Search-R1's
wiki-18.jsonl.gz is reportedly a tar. A field `title` is put before contents
that do not begin with it (`titled`); other fields are ignored. An invalid
passage stops the reading, with its file and its line or row (from 1) in the
error: an index built around it would silently return the wrong passages.
"""

import array
from collections.abc import Iterable, Iterator, Sequence
import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import os
import shlex
import tarfile
from typing import Any

import numpy as np

from retrieval import files
from retrieval.files import PathLike, convert, progress, shown

_PARQUET, _ARROW = b'PAR1', b'ARROW1'
_COLUMNS = ['id', 'contents']
_TITLE = 'title'  # a field that a passage may have
_ROWS = 1024  # read at once
MOST = 2_000_000  # passages to index in memory: more take minutes each time


class CorpusError(ValueError):
  """The corpus cannot be used; the message names file, line and fix."""


@dataclasses.dataclass(frozen=True)
class Document:
  """A passage; `contents` is a title line, a newline and the text."""

  id: str
  contents: str


@dataclasses.dataclass(frozen=True)
class Corpus:
  """P passages in file order; an index returns positions in it."""

  path: str
  ids: Sequence[str]  # [P], all different
  contents: Sequence[str]  # [P]
  sha256: str  # of ids and contents: the same in every form of storage

  @property
  def identity(self) -> dict[str, object]:
    """JSON that identifies it."""
    return {'count': len(self), 'sha256': self.sha256}

  def __len__(self) -> int:
    return len(self.ids)

  def __getitem__(self, position: int) -> Document:
    return Document(self.ids[position], self.contents[position])

  def position(self, name: str) -> int | None:
    """Where the passage with this id is; None: there is none."""
    # Ids that count the passages, as those of wiki-18, need no table.
    if name.isdecimal() and name.isascii() and len(name) < 10:
      at = int(name)
      if at < len(self) and self.ids[at] == name:
        return at
    hashes, order = self._table
    same = (np.searchsorted(hashes, hash(name), s) for s in ('left', 'right'))
    found = (int(at) for at in order[slice(*same)])
    return next((at for at in found if self.ids[at] == name), None)

  @functools.cached_property
  def _table(self) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of the ids in order, and where each id is; 16 bytes a passage."""
    hashes = np.fromiter(map(hash, self.ids), np.int64, len(self))
    order = np.argsort(hashes)
    return hashes[order], order


def split_contents(contents: str) -> tuple[str, str]:
  """Splits `"Title"\\ntext` into (title, text) and removes the quotes.

  Contents without a line break have no title: all of it is text.
  """
  head, newline, text = contents.partition('\n')
  if not newline:
    return '', contents
  return _unquoted(head.strip()), text


def join_contents(title: str, text: str) -> str:
  """The inverse of `split_contents`: `"Title"\\ntext`."""
  return f'"{title}"\n{text}'


def titled(title: str, contents: str) -> str:
  """Contents with a title that was in a field of its own, unless they have it.

  Line breaks in the title become spaces, because a title is one line.
  """
  line = lambda text: files.composed(' '.join(text.split()))
  title = _unquoted(' '.join(title.split()))
  if not title or line(split_contents(contents)[0]) == line(title):
    return contents
  return join_contents(title, contents)


def _unquoted(title: str) -> str:
  quoted = len(title) >= 2 and title[0] == title[-1] == '"'
  return title[1:-1] if quoted else title


class Digest:
  """The sha256 of a corpus, updated passage by passage."""

  def __init__(self):
    self._hash = hashlib.sha256()
    self.hexdigest = self._hash.hexdigest

  def update(self, doc: Document) -> None:
    # Lengths first, so that two different corpora never hash the same bytes.
    self._hash.update(f'{len(doc.id)}:{len(doc.contents)}:'.encode())
    self._hash.update((doc.id + doc.contents).encode())


def read_corpus(path: PathLike, most: int | None = None) -> Corpus:
  """Reads and checks a whole corpus into memory; see `iter_documents`.

  Raises:
    CorpusError: see there; or the corpus has more than `most` passages.
  """
  ids, contents, digest = [], [], Digest()
  for doc in iter_documents(path):
    if len(ids) == most:
      source = shlex.quote(f'--corpus={os.fspath(path)}')
      raise CorpusError(
        f'{path}: more than {most:,} passages, too many to index in memory at '
        'each start (--corpus). Build an index once: python -m '
        f'retrieval.build_index {source} --out=INDEX --index=bm25. Then give '
        '--index_folder=INDEX --index=bm25 instead of --corpus.'
      )
    ids.append(doc.id)
    contents.append(doc.contents)
    digest.update(doc)
  return Corpus(os.fspath(path), (*ids,), (*contents,), digest.hexdigest())


def iter_documents(path: PathLike) -> Iterator[Document]:
  """Reads and checks a corpus as a stream; needs 8 bytes per passage.

  Args:
    path: a file of JSONL (plain, compressed by gzip, bzip2, xz or Zstandard, or
      the only file of a tar that is either), Parquet or Arrow IPC; a folder
      written by `datasets.Dataset.save_to_disk`; or `hf:NAME[:SPLIT]`, a
      dataset of the Hugging Face hub or of its cache (also offline).

  Yields:
    The passages in order, at least one.

  Raises:
    CorpusError: the source is absent, unreadable, truncated or empty, or a
      passage lacks a string `id` or string `contents`; after the last
      passage: an id was used twice.
  """
  path, hashes = os.fspath(path), array.array('q')
  for _, _, doc in _checked(path):
    hashes.append(hash(doc.id))
    yield doc
  if not hashes:
    raise CorpusError(f'{path}: the corpus is empty. Write a passage.')
  ordered = np.frombuffer(hashes, np.int64)
  ordered.sort()
  twice = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
  if not twice:
    return
  # Equal ids, or different ids of equal hash: a second pass decides.
  seen = {}
  for where, place, doc in _checked(path):
    if hash(doc.id) in twice and seen.setdefault(doc.id, place) != place:
      problem = f'id {shown(repr(doc.id))} was already used on {seen[doc.id]}'
      raise CorpusError(f'{where}: {problem}. Make all ids different.')


def _checked(path: str) -> Iterator[tuple[str, str, Document]]:
  """Yields (location for an error, "line N" or "row N", passage)."""
  magic = b''
  if not path.startswith('hf:') and not os.path.isdir(path):
    with _open(path) as file:
      magic = file.read(8)
    if not magic.startswith((_PARQUET, _ARROW)):
      for number, line in _lines(path):
        where = f'{path}:{number}'
        yield where, f'line {number}', _parse(line, where)
      return
  with _tables(path, magic) as (count, names, tables):
    for name in _COLUMNS:
      if name not in names:
        raise CorpusError(f'{path}: no column {_missing(name, names)}')
    columns = [*_COLUMNS, _TITLE] if _TITLE in names else _COLUMNS
    rows = (row for t in tables for row in zip(*(t[c] for c in columns)))
    with progress(count, 'corpus', unit=' rows', iterable=rows) as watched:
      for number, row in enumerate(watched, 1):
        where = f'{path}: row {number}'
        wrong = f'{where}: not UTF-8. Write the column as text.'
        with convert(UnicodeDecodeError, CorpusError, wrong):
          record = dict(zip(columns, (value.as_py() for value in row)))
        yield where, f'row {number}', _document(record, where)


@contextlib.contextmanager
def _tables(path: str, magic: bytes) -> Iterator[tuple]:
  """(rows, names of columns, record batches)."""
  import pyarrow as pa  # slow to import, and JSONL does not need it
  from pyarrow import parquet

  problem = f'{path}: cut short or damaged ({{}}). Copy or write it again.'
  with convert((pa.ArrowException, OSError), CorpusError, problem):
    if magic.startswith(_ARROW):
      with pa.memory_map(path) as file, pa.ipc.open_file(file) as reader:
        batches = range(reader.num_record_batches)
        count = sum(reader.get_batch(i).num_rows for i in batches)
        yield count, reader.schema.names, map(reader.get_batch, batches)
    elif magic.startswith(_PARQUET):
      # Mapped and not buffered ahead: a row group may be the whole corpus.
      with parquet.ParquetFile(path, memory_map=True, pre_buffer=False) as file:
        some = [*_COLUMNS, _TITLE]  # absent ones are left out
        found = file.iter_batches(_ROWS, columns=some)
        yield file.metadata.num_rows, file.schema_arrow.names, found
    else:
      rows = _dataset(path)
      found = rows.with_format('arrow').iter(_ROWS)
      yield len(rows), rows.column_names, found


def _dataset(path: str) -> Any:
  """The `datasets.Dataset` of a folder or of `hf:NAME[:SPLIT]`."""
  import datasets  # takes seconds

  remote = path.startswith('hf:')
  name, _, split = path.removeprefix('hf:').partition(':')
  # ImportError: a SOCKS proxy without the package that httpx needs for it.
  failed = (OSError, ValueError, RuntimeError, ImportError)
  fix = '' if remote else ' Join the parts of a file: cat FOLDER/* > FILE.'
  with convert(failed, CorpusError, f'{path}: cannot be loaded: {{}}{fix}'):
    if remote:
      found = datasets.load_dataset(name, split=split or None)
    else:
      found = datasets.load_from_disk(path)
  if isinstance(found, dict):
    if len(found) != 1:
      one = path + (':' if remote else '/') + next(iter(found), 'train')
      listed = ', '.join(found)
      raise CorpusError(f'{path}: has the splits {listed}. Name one: {one}.')
    (found,) = found.values()
  return found


def _open(path: str) -> io.BufferedReader:
  with convert(OSError, CorpusError, f'{path}: cannot be read: {{}}'):
    return open(path, 'rb')


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
  """Yields (line number from 1, line) without blank lines."""
  number = 0
  with _open(path) as raw:
    packed, stream = files.unpacked(raw)
    with progress(os.fstat(raw.fileno()).st_size, 'corpus') as bar:
      try:
        for line in _unpacked(path, stream):
          number += 1
          if number % 4096 == 0:
            bar.update(raw.tell() - bar.n)  # compressed bytes
          if number == 1:
            line = line.removeprefix(b'\xef\xbb\xbf')
          if not line.isspace():
            yield number, line
      except (*files.DAMAGED, tarfile.TarError, UnicodeError) as e:
        kind = 'tar ' if isinstance(e, tarfile.TarError) else f'{packed} '
        kind = 'text of the ' if isinstance(e, UnicodeError) else kind
        problem = f'the {kind.lstrip()}file is cut short or damaged ({e})'
        raise CorpusError(f'{path}:{number + 1}: {problem}.') from None


def _unpacked(path: str, stream: io.BufferedReader) -> Iterator[bytes]:
  """The lines of a stream, or of its only file if it is a tar."""
  head = stream.peek(tarfile.BLOCKSIZE)[: tarfile.BLOCKSIZE]
  # JSON has no NUL, so a passage that mentions "ustar" is not a tar.
  if head[257:262] != b'ustar' or b'\0' not in head:
    yield from files.utf8_lines(stream)
    return
  names = []
  with tarfile.open(fileobj=stream, mode='r|') as tar:
    for member in tar:
      # macOS adds ._NAME with the extended attributes of NAME.
      if member.isreg() and not os.path.basename(member.name).startswith('._'):
        names.append(member.name)
        if len(names) > 1:
          break
        yield from files.utf8_lines(tar.extractfile(member))
  if len(names) != 1:
    found = f'{"several files" if names else "no file"} ({_listed(names)})'
    fix = 'Unpack it and give the path of the corpus file.'
    raise CorpusError(f'{path}: a tar with {found}, not one JSONL file. {fix}')
  while stream.read(1 << 20):  # a compressed file ends with its checksum
    pass


def _parse(line: bytes, where: str) -> Document:
  try:
    record = json.loads(line.decode('utf-8'))
  except (ValueError, RecursionError) as error:
    fix = other_format(line) or 'Write one JSON object per line.'
    raise CorpusError(f'{where}: not JSON: {error}. {fix}') from None
  if not isinstance(record, dict):
    kind = type(record).__name__
    fix = other_format(line) or 'Write {"id": ..., "contents": ...}.'
    raise CorpusError(f'{where}: a JSON {kind}, not an object. {fix}')
  doc = _document(record, where)
  if b'\\u' in line:  # only an escape can produce an unpaired surrogate
    wrong = f'{where}: an unpaired surrogate (\\ud800 to \\udfff). Remove it.'
    with convert(UnicodeEncodeError, CorpusError, wrong):
      (doc.id + doc.contents).encode()
  return doc


def other_format(line: bytes) -> str:
  """How to convert what this line looks like a part of; '' for JSONL."""
  head = line.strip()
  if b'\0' in head or head.decode('utf-8', 'ignore').encode() != head:
    return 'Convert the file to UTF-8 (iconv), or unpack it if it is packed.'
  if head.startswith(b'['):
    return 'Of a JSON array, write the objects: jq -c ".[]" FILE > OUT.'
  if head.startswith(b'{') and head.endswith((b'{', b'[', b',')):
    return 'If an object takes several lines: jq -c . FILE > OUT.'
  if head.startswith(b'version https://git-lfs'):
    return 'This is a Git LFS pointer. Get the file: git lfs pull.'
  separator = next((s for s in '\t,' if s.encode() in head), '')
  if separator and not head.startswith(b'{'):
    return (
      f'If this is a table: pandas.read_csv(FILE, sep={separator!r}, '
      'dtype=str).to_json(OUT, orient="records", lines=True).'
    )
  return ''


def _document(record: dict, where: str) -> Document:
  fields = {}
  for name in (*_COLUMNS, _TITLE):
    if name not in record and name != _TITLE:
      raise CorpusError(f'{where}: no field {_missing(name, record)}')
    value = record.get(name)
    # Some published corpora have integer ids; the protocol requires strings.
    if name != 'contents' and type(value) is int:
      value = str(value)
    if name == _TITLE and value is None:
      value = ''
    if not isinstance(value, str) or (name == 'id' and not value):
      kind = 'non-empty string' if name == 'id' else 'string'
      found = shown(repr(value), 40)
      raise CorpusError(f'{where}: field {name!r} is {found}, not a {kind}.')
    fields[name] = value
  return Document(fields['id'], titled(fields[_TITLE], fields['contents']))


def _missing(name: str, names: Iterable[str]) -> str:
  fix = f'Add {name!r} to every passage.'
  if name == 'contents' and 'text' in names:
    fix = 'Join title and text: contents = "\\"Title\\"\\ntext".'
  return f'{name!r} (found: {_listed(names)}). {fix}'


def _listed(names: Iterable[str]) -> str:
  return shown(', '.join(map(repr, names)) or 'none')
