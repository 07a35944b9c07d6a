"""Atomic file writes, progress bars, and small helpers of all modules.

Files are written as NAME.part, flushed to the disk and then renamed, so a
file under its final name is complete even if the process was killed.
"""

import bz2
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
import contextlib
import fcntl
import gzip
import hashlib
import io
import json
import lzma
import os
import pathlib
import re
import shutil
import sys
from typing import Any, BinaryIO, TextIO
import unicodedata
import zlib

import tqdm

PathLike = str | os.PathLike
# What reading an `unpacked` stream raises where it is damaged or cut short.
DAMAGED = (EOFError, OSError, zlib.error, lzma.LZMAError)
BLOCK = 1 << 24  # bytes read or written at once
_PIECE = 1 << 16  # bytes of each sampled piece
_WIDE = re.compile('[\uff01-\uffee]+')  # full-width and half-width forms


class FilesError(RuntimeError):
  """A file cannot be used or written; the message says how to fix it."""


@contextlib.contextmanager
def convert(caught: Any, kind: type[Exception], message: str) -> Iterator[None]:
  """Turns errors of the types `caught` into `kind`.

  `message` is the message of the new error; `{}` in it is replaced by the old
  one.
  """
  try:
    yield
  except caught as error:
    raise kind(message.replace('{}', str(error))) from None


def printable(text: str) -> str:
  """Text that may hold escape sequences, for a terminal or a log."""
  return ''.join(c if c.isprintable() or c == '\n' else '?' for c in text)


# Letters of scripts without spaces between words, and of Korean, whose words
# have particles: Thai, Lao, Myanmar, Khmer, Han, kana and Bopomofo, Yi, Hangul.
UNSPACED = (
  '\u0e01-\u0e3a\u0e40-\u0e4e\u0e80-\u0ecf\u0edc-\u0edf'
  '\u1000-\u103f\u1050-\u108f\u109a-\u109f\u1780-\u17d3\u17d7\u17dc\u17dd'
  '\u3005-\u3007\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff'
  '\u3105-\u312f\u31a0-\u31bf\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff'
  '\ua000-\ua48c\uf900-\ufaff\uac00-\ud7a3\U00020000-\U000323af'
)


def composed(text: str) -> str:
  """Text in NFC, in which full-width and half-width forms are the usual ones.

  Answers and words are compared in it. Not NFKC, in which "10\u2075" is "105",
  "x\u2122" is "xTM", and "1\u00bd" is two words.
  """
  if text.isascii():
    return text
  usual = lambda match: unicodedata.normalize('NFKC', match[0])
  return unicodedata.normalize('NFC', _WIDE.sub(usual, text))


def shown(text: str, size: int = 200) -> str:
  """Untrusted text, escaped and cut."""
  return ascii(text if len(text) <= size else text[: size - 3] + '...')[1:-1]


def say(who: str, message: str) -> None:
  """Prints a line of the command `who` on stderr."""
  print(f'{who}: {printable(message)}', file=sys.stderr, flush=True)


def run_command(who: str, argv: Sequence[str], run: Callable, *args) -> int:
  """Calls run(*args) for a command that has no positional arguments.

  Returns:
    Its exit status.
  """
  try:
    if argv[1:]:
      raise ValueError(f'arguments not understood: {" ".join(argv[1:])}')
    run(*args)
  except (ValueError, RuntimeError, OSError) as error:
    say(who, f'error: {error}')
    return 1
  return 0


def cache_folder(name: str) -> pathlib.Path:
  """A folder of the user's cache: XDG_CACHE_HOME, else ~/.cache.

  Raises:
    RuntimeError: this user has no home folder.
  """
  base = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  return pathlib.Path(base, name)


def lock(file: Any, kind: type[Exception], message: str) -> None:
  """Locks an open file until it is closed; raises `kind` if it is locked."""
  with convert(OSError, kind, message):
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def require_one_of(name: str, value: str, known: Collection[str]) -> None:
  """Raises ValueError unless `value` is in `known`."""
  if value not in known:
    raise ValueError(f'{name}={value!r}; expected one of {", ".join(known)}')


class _Lines:
  """Writes each state of a progress bar as one line, for log files."""

  def __init__(self, stream: TextIO):
    self._stream, self.flush = stream, stream.flush

  def write(self, text: str) -> None:
    if text := text.strip():
      self._stream.write(f'{text}\n')


def progress(
  total: int | None,
  what: str,
  *,
  unit: str = 'B',
  initial: int = 0,
  stream: TextIO | None = None,
  **options: Any,
) -> tqdm.tqdm:
  """A progress bar; in a log file, a line every 30 seconds.

  stream: None = stderr. options: further ones of tqdm.
  """
  stream = stream or sys.stderr
  terminal = stream.isatty()
  return tqdm.tqdm(
    total=total,
    desc=what,
    unit=unit,
    initial=initial,
    file=stream if terminal else _Lines(stream),
    mininterval=0.2 if terminal else 30.0,
    maxinterval=60.0,
    ncols=None if terminal else 80,
    **{'unit_scale': True, 'delay': 1.0} | options,
  )


def sync(file: Any) -> None:
  """Flushes an open file to the disk."""
  file.flush()
  os.fsync(file.fileno())


def commit(file: Any, part: pathlib.Path, final: pathlib.Path) -> None:
  """Flushes an open file to the disk, closes it and renames it."""
  sync(file)
  file.close()
  os.replace(part, final)
  folder = os.open(final.parent, os.O_RDONLY)
  try:
    os.fsync(folder)  # persists the rename
  finally:
    os.close(folder)


@contextlib.contextmanager
def replacing(final: pathlib.Path) -> Iterator[BinaryIO]:
  """Opens NAME.part; it replaces `final` unless the block raises."""
  part = final.with_name(f'{final.name}.part')
  try:
    with open(part, 'wb') as file:
      yield file
      commit(file, part, final)
  finally:
    part.unlink(missing_ok=True)


def _zstandard(raw: BinaryIO) -> Any:
  import pyarrow as pa  # slow to import

  return pa.CompressedInputStream(pa.PythonFile(raw, mode='r'), 'zstd')


_PACKED = {  # first bytes -> name, and what unpacks it
  b'\x1f\x8b': ('gzip', gzip.open),
  b'BZh': ('bzip2', bz2.open),
  b'\xfd7zXZ\0': ('xz', lzma.open),
  b']\0\0': ('lzma', lzma.open),
  b'\x28\xb5\x2f\xfd': ('Zstandard', _zstandard),
}


def unpacked(raw: BinaryIO) -> tuple[str, io.BufferedReader]:
  """The name of a file's compression, told by its bytes, and what is in it.

  Args:
    raw: an open file, at its beginning.

  Returns:
    '' and the file itself if it is not compressed.
  """
  head = raw.read(max(map(len, _PACKED)))
  raw.seek(0)
  found = (how for magic, how in _PACKED.items() if head.startswith(magic))
  name, unpack = next(found, ('', None))
  return name, io.BufferedReader(unpack(raw) if unpack else raw, 1 << 20)


def utf8_lines(stream: io.BufferedReader) -> Iterator[bytes]:
  """The lines of a stream; those of UTF-16 and UTF-32 in UTF-8."""
  encoding = json.detect_encoding(stream.peek(4)[:4])
  if encoding.startswith('utf-8'):
    yield from stream
  else:
    for line in io.TextIOWrapper(stream, encoding, newline='\n'):
      yield line.encode()


def write_json(path: pathlib.Path, value: Any) -> None:
  """Writes a JSON file atomically and flushes it to the disk."""
  with replacing(path) as file:
    file.write(f'{json.dumps(value, indent=1)}\n'.encode())


def read_json(path: pathlib.Path) -> dict[str, Any] | None:
  """Reads a JSON object; None if the file does not exist.

  Raises:
    FilesError: the file holds something else.
  """
  if not path.exists():
    return None
  with convert(ValueError, FilesError, f'{path}: is damaged. Remove it.'):
    return dict(json.loads(path.read_text()))


def sample_sha256(*paths: pathlib.Path) -> str:
  """Hashes the size of each file and 64 pieces spread over its length."""
  digest = hashlib.sha256()
  for path in paths:
    size = path.stat().st_size
    digest.update(str(size).encode())
    with open(path, 'rb') as file:
      for piece in range(64):
        file.seek(max(0, size - _PIECE) * piece // 63)
        digest.update(file.read(_PIECE))
  return digest.hexdigest()


def read_blocks(paths: Sequence[pathlib.Path], what: str) -> Iterator[bytes]:
  """Yields the bytes of several files, with a progress bar named `what`."""
  with progress(sum(path.stat().st_size for path in paths), what) as bar:
    for path in paths:
      with open(path, 'rb') as file:
        while block := file.read(BLOCK):
          yield block
          bar.update(len(block))


def join(paths: Sequence[pathlib.Path], out: pathlib.Path) -> None:
  """Concatenates files into `out`, in constant memory."""
  with replacing(out) as file:
    need_space(out, sum(path.stat().st_size for path in paths))
    for block in read_blocks(paths, f'write {out.name}'):
      file.write(block)


def link(path: pathlib.Path, out: pathlib.Path) -> None:
  """Hard-links a file to `out`; copies it if a link is not possible."""
  part = out.with_name(f'{out.name}.part')
  part.unlink(missing_ok=True)
  try:
    os.link(path.resolve(), part)
    os.replace(part, out)
    # Renaming onto another link of the same file leaves both names.
    part.unlink(missing_ok=True)
  except OSError:  # another disk, or a file system without links
    join([path], out)


def need_space(path: pathlib.Path, size: int) -> None:
  """Checks the free space before a large write.

  Raises:
    FilesError: fewer than `size` bytes are free.
  """
  free = shutil.disk_usage(path.parent).free
  if free < size:
    needs = f'needs {size / 1e9:.1f} GB and {free / 1e9:.1f} GB are free'
    raise FilesError(f'{path}: {needs}. Make room or choose another --out.')


def differences(then: Mapping, now: Mapping, name: str = '') -> list[str]:
  """Lists differences of two JSON objects, as `encoder.dim was 3, is 4`."""
  found = []
  for key in dict.fromkeys((*then, *now)):
    a, b = then.get(key), now.get(key)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
      found += differences(a, b, f'{name}{key}.')
    elif a != b:
      found.append(f'{name}{key} was {a!r}, is {b!r}')
  return found
