"""Folders in memory that no run leaves behind.

A process holds a lock on its folder. The kernel releases it however the process
ends, so whoever makes the next folder finds and deletes those of the dead.
"""

import contextlib
import fcntl
import os
import pathlib
import shutil
import tempfile

import psutil

_PREFIX = 'searchrl-weights-'


class Folder:
  """A folder of this process alone, until `close`; `path` is where it is."""

  def __init__(self, parent: pathlib.Path):
    # Hidden from `sweep` until it is locked.
    hidden = pathlib.Path(tempfile.mkdtemp('', f'.{_PREFIX}', parent))
    self._lock = lock(hidden)
    self.path = hidden.rename(parent / hidden.name[1:])

  def close(self) -> None:
    shutil.rmtree(self.path, ignore_errors=True)
    os.close(self._lock)


def claim(parent: str, size: int) -> Folder | None:
  """A folder below `parent` if it has room for `size` bytes, else None."""
  path = pathlib.Path(parent)
  if not (parent and path.is_dir() and os.access(path, os.W_OK)):
    return None
  sweep(path, f'{_PREFIX}*')
  free = shutil.disk_usage(path).free
  room = min(free, psutil.virtual_memory().available)
  return Folder(path) if room > size else None


def lock(path: pathlib.Path) -> int:
  """Keeps a folder from `sweep` until the file returned is closed."""
  held = os.open(path, os.O_RDONLY)
  fcntl.flock(held, fcntl.LOCK_EX)
  return held


def sweep(parent: pathlib.Path, pattern: str) -> None:
  """Deletes folders that no process has locked: theirs have ended."""
  for path in parent.glob(pattern):
    with contextlib.suppress(OSError):  # of another user, or just deleted
      held = os.open(path, os.O_RDONLY)
      try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
      finally:
        os.close(held)
