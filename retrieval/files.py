"""Files that a kill leaves whole or absent, and progress that a log can hold.

What takes long is written as NAME.part, flushed to the disk and renamed: a
file under its own name is complete.
"""

from collections.abc import Iterator, Mapping, Sequence
import errno
import hashlib
import json
import os
import pathlib
import shutil
import sys
from typing import Any, TextIO

import tqdm

BLOCK = 1 << 24  # bytes read or written at once
_PIECE = 1 << 16  # bytes of a sample


class FilesError(RuntimeError):
  """A file cannot be used or written; the message names it and the mend."""


class _Lines:
  """A log instead of a terminal: each state of a bar is a line of its own."""

  def __init__(self, stream: TextIO):
    self._stream = stream

  def write(self, text: str) -> None:
    if text := text.strip():
      self._stream.write(f'{text}\n')

  def flush(self) -> None:
    self._stream.flush()


def progress(
  total: int | None, what: str, *, unit: str = 'B', initial: int = 0
) -> tqdm.tqdm:
  """A bar with rate and ETA on stderr; twice a minute a line in a log."""
  terminal = sys.stderr.isatty()
  return tqdm.tqdm(
    total=total,
    desc=what,
    unit=unit,
    unit_scale=True,
    initial=initial,
    file=sys.stderr if terminal else _Lines(sys.stderr),
    mininterval=0.2 if terminal else 30.0,
    maxinterval=60.0,
    ncols=None if terminal else 80,
    delay=1.0,
  )


def sync(file: Any) -> None:
  """Brings what was written to an open file onto the disk."""
  file.flush()
  os.fsync(file.fileno())


def commit(file: Any, part: pathlib.Path, final: pathlib.Path) -> None:
  """Flushes an open file to the disk, closes it and gives it its name."""
  sync(file)
  file.close()
  os.replace(part, final)
  folder = os.open(final.parent, os.O_RDONLY)
  try:
    os.fsync(folder)  # the name too
  finally:
    os.close(folder)


def write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
  """Writes JSON at once or not at all; on the disk when this returns."""
  part = path.with_name(f'{path.name}.part')
  with open(part, 'w') as file:
    json.dump(value, file, indent=1)
    file.write('\n')
    commit(file, part, path)


def read_json(path: pathlib.Path) -> dict[str, Any] | None:
  """The object in a JSON file, None where there is no file.

  Raises:
    FilesError: it holds something else.
  """
  try:
    value = json.loads(path.read_text())
  except FileNotFoundError:
    return None
  except ValueError:
    value = None
  if not isinstance(value, dict):
    raise FilesError(f'{path}: is damaged: not a JSON object. Remove it.')
  return value


def sample_sha256(*paths: pathlib.Path) -> str:
  """Tells files from others: their sizes, and 64 pieces over each length."""
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
  """The bytes of files, one after the other, with a bar named `what`."""
  total = sum(path.stat().st_size for path in paths)
  with progress(total, what) as bar:
    for path in paths:
      with open(path, 'rb') as file:
        while block := file.read(BLOCK):
          yield block
          bar.update(len(block))


def join(paths: Sequence[pathlib.Path], out: pathlib.Path) -> None:
  """Concatenates files as `out`, in constant memory."""
  part = out.with_name(f'{out.name}.part')
  part.unlink(missing_ok=True)
  need_space(out, sum(path.stat().st_size for path in paths))
  with open(part, 'wb') as file:
    for block in read_blocks(paths, f'write {out.name}'):
      file.write(block)
    commit(file, part, out)


def link(path: pathlib.Path, out: pathlib.Path) -> None:
  """Makes a file appear as `out` too: a hard link, a copy across disks."""
  part = out.with_name(f'{out.name}.part')
  part.unlink(missing_ok=True)
  try:
    os.link(path.resolve(), part)
    os.replace(part, out)
    # A rename onto a link to the same file does nothing and leaves both.
    part.unlink(missing_ok=True)
  except OSError as error:
    if error.errno not in (
      errno.EXDEV,
      errno.EPERM,
      errno.EOPNOTSUPP,
      errno.EMLINK,
    ):
      raise
    join([path], out)


def need_space(path: pathlib.Path, size: int) -> None:
  """Stops early where a disk cannot hold what is to be written.

  Raises:
    FilesError: fewer than `size` bytes are free.
  """
  free = shutil.disk_usage(path.parent).free
  if free < size:
    raise FilesError(
      f'{path}: needs {size / 1e9:.1f} GB and {free / 1e9:.1f} GB are free on '
      'its disk. Make room or choose another --out.'
    )


def differences(
  then: Mapping[str, Any], now: Mapping[str, Any], name: str = ''
) -> list[str]:
  """What differs between two JSON objects: `encoder.dim was 3, is 4`."""
  found = []
  for key in dict.fromkeys((*then, *now)):
    a, b = then.get(key), now.get(key)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
      found += differences(a, b, f'{name}{key}.')
    elif a != b:
      found.append(f'{name}{key} was {a!r}, is {b!r}')
  return found
