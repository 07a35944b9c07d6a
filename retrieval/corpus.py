"""The corpus: passages in Search-R1's layout, read once and checked.

One JSON object a line, `{"id": "7", "contents": "\\"Title\\"\\ntext"}`, plain
or gzipped (told by the first bytes, not by the name). Other fields are
ignored. A bad line stops the reading with its file and number: an index built
around it would answer with the wrong passages and nobody would see it.
"""

import dataclasses
import gzip
import hashlib
import io
import json
import os
import zlib
from collections.abc import Iterator

import tqdm

_GZIP_MAGIC = b'\x1f\x8b'


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
  ids: tuple[str, ...]  # [P], all different
  contents: tuple[str, ...]  # [P]
  sha256: str  # of ids and contents: the same for .jsonl and .jsonl.gz

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


def read_corpus(path: str | os.PathLike) -> Corpus:
  """Reads and checks a whole corpus.

  Args:
    path: a .jsonl or .jsonl.gz file.

  Returns:
    The corpus, P >= 1 passages in file order.

  Raises:
    CorpusError: the file is absent, unreadable, cut short or empty, or a line
      is not an object with a string `id` not seen before and a string
      `contents`.
  """
  path = os.fspath(path)
  ids, contents = [], []
  line_of = {}  # id -> the line that holds it, to name both in the error
  digest = hashlib.sha256()
  for number, line in _lines(path):
    doc = _parse(line, f'{path}:{number}')
    if doc.id in line_of:
      raise CorpusError(
        f'{path}:{number}: id {doc.id!r} was already used on line '
        f'{line_of[doc.id]}. Give every passage an id of its own.'
      )
    line_of[doc.id] = number
    ids.append(doc.id)
    contents.append(doc.contents)
    # Lengths first, so that no two corpora share a stream of bytes.
    digest.update(f'{len(doc.id)}:{len(doc.contents)}:'.encode())
    digest.update((doc.id + doc.contents).encode())
  if not ids:
    raise CorpusError(
      f'{path}: the corpus is empty. Write at least one line '
      '{"id": "0", "contents": "\\"Title\\"\\ntext"}.'
    )
  return Corpus(path, tuple(ids), tuple(contents), digest.hexdigest())


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
  """Yields (line number from 1, line), blank lines left out."""
  try:
    raw = open(path, 'rb')  # noqa: SIM115, closed below
  except FileNotFoundError:
    raise CorpusError(
      f'{path}: no such file. Check the path given as the corpus.'
    ) from None
  except OSError as error:
    raise CorpusError(f'{path}: cannot be read: {error.strerror}.') from None
  number = 0
  with raw:
    size = os.fstat(raw.fileno()).st_size
    zipped = raw.read(2) == _GZIP_MAGIC
    raw.seek(0)
    stream = gzip.open(raw) if zipped else raw
    # disable=None: no bar where stderr is a file.
    with tqdm.tqdm(
      total=size, unit='B', unit_scale=True, desc='corpus', disable=None,
      delay=1.0,
    ) as bar:
      try:
        for line in io.BufferedReader(stream, 1 << 20):
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
  fields = {}
  for name in ('id', 'contents'):
    if name not in record:
      raise CorpusError(
        f'{where}: no field {name!r} (found: '
        f'{", ".join(map(repr, record)) or "none"}). {_mend(name, record)}'
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
  if b'\\u' in line:  # only an escape can bring a lone surrogate in
    try:
      ''.join(fields.values()).encode()
    except UnicodeEncodeError:
      raise CorpusError(
        f'{where}: an unpaired surrogate (\\ud800 to \\udfff), which is no '
        'character and cannot be sent. Remove it or repair the pair.'
      ) from None
  return Document(**fields)


def _mend(name: str, record: dict) -> str:
  if name == 'contents' and 'text' in record:
    return 'Join title and text: contents = "\\"Title\\"\\ntext".'
  return f'Add {name!r} to the line.'


def _shown(value: object) -> str:
  text = repr(value)
  return text if len(text) <= 40 else text[:37] + '...'
