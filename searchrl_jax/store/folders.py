"""Folders that commands write to: their locks, and what is made in them.

A command holds the lock of a folder before it reads or writes there, and
deletes only what a command made (`make` marks it).
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import pathlib
import socket
import tempfile
import threading
import time
from typing import Any

import numpy as np

from searchrl_jax.devices import cluster
from searchrl_jax.store.records import explained, require, require_ours

_LOCK, _OWNER, MADE = '.lock', '.owner', '.made'
# Folder -> its lock file and the thread that has it, of this process.
_held: dict[pathlib.Path, tuple[Any, int]] = {}


def in_use(folder: os.PathLike | str) -> bool:
  """Whether a command writes to the folder."""
  folder = pathlib.Path(folder)
  try:
    with open(folder / _LOCK) as file:
      fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
  except BlockingIOError:
    return True
  except OSError:  # none, or a file system without locks
    text = _text(folder / _OWNER)
    return text is not None and bool(_owner(folder, text))
  return False


@contextlib.contextmanager
def locked(folder: os.PathLike | str, wait: bool = False) -> Iterator[Any]:
  """Holds the lock of a folder, which is made if it is absent.

  No other process or thread has it meanwhile. What is called within the block
  takes part in it: a command holds its folder before it reads or writes
  anything there. The lock ends with the process, however that ends.

  wait: until another one that has it ends, which a line of the log names.

  Yields:
    the open lock file.

  Raises:
    RunError: another one has the folder, or it cannot be written to.
  """
  path, me = pathlib.Path(folder), threading.get_ident()
  name = path.resolve()
  held, owner = _held.get(name, (None, me))
  if held is not None and owner == me and os.fstat(held.fileno()).st_nlink:
    yield held
    return
  with contextlib.ExitStack() as stack:
    with explained(path):
      path.mkdir(parents=True, exist_ok=True)
      file = stack.enter_context(open(path / _LOCK, 'a'))
      said = ''
      while used := _taken(file, path, stack):
        require(wait, used)
        if used != said:
          logging.warning(said := used)
        time.sleep(0.2)
    _held[name] = mine = file, me
    try:
      yield file
    finally:
      if _held.get(name) is mine:  # else it was removed, and made anew
        del _held[name]


@contextlib.contextmanager
def locked_once(folder: os.PathLike | str) -> Iterator[None]:
  """`locked`, by process 0 for all processes of a run.

  Raises:
    RunError: as `locked`; or the folder has files that no run wrote.
  """
  with contextlib.ExitStack() as stack:

    def hold() -> None:
      stack.enter_context(locked(folder))
      require_ours(folder)

    cluster.first('lock', hold)
    yield


def _taken(file: Any, folder: pathlib.Path, stack: contextlib.ExitStack) -> str:
  """Locks the open lock file of a folder until `stack` closes.

  Returns:
    '', or that another process has it.
  """
  used = (
    f'{folder} is in use by another process; wait for its end, or use another '
    '--workdir'
  )
  for seconds in (0.05, 0):  # `in_use` has it for a moment
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      return ''
    except BlockingIOError:
      time.sleep(seconds)
    except OSError as e:
      # Of a file system without locks (some NFS, FUSE and Lustre mounts).
      if e.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
        raise
      break
  else:
    return used
  path = folder / _OWNER
  text, hint = _text(path), f'if it has ended, remove {path}'
  owner = text is not None and _owner(folder, text)
  if owner:
    return f'{used} ({owner}; {hint})'
  try:
    if text is not None:
      # Of a process that died. One start removes it, and this mark stays:
      # another start may have read it before, and come here later.
      name = hashlib.sha256(text.encode()).hexdigest()[:16]
      open(path.with_name(f'{_OWNER}.{name}'), 'x').close()
      if _text(path) != text:  # it ended before, and another one has the folder
        return f'{used} ({hint})'
      path.unlink()
    with open(path, 'x') as mine:
      me = json.dumps([socket.gethostname(), os.getpid(), time.time_ns()])
      stack.callback(_release, path, me)
      mine.write(me)
  except FileExistsError:
    return f'{used} ({hint})'
  return ''


def _release(path: pathlib.Path, own: str) -> None:
  """Removes the file of a folder's owner if it is this one, or not written."""
  if _text(path) in (own, ''):
    path.unlink(missing_ok=True)


def _text(path: pathlib.Path) -> str | None:
  """Of a file that another process may remove; None = it is absent."""
  try:
    return path.read_text()
  except (FileNotFoundError, NotADirectoryError):
    return None


def _owner(folder: pathlib.Path, text: str) -> str:
  """Who has a folder without locks; '' if the process has died.

  text: of its file.
  """
  try:
    host, process, *_ = json.loads(text)
  except (TypeError, ValueError):  # it is being written
    return 'a process that has just begun'
  if host == socket.gethostname():
    try:
      os.kill(process, 0)  # asks whether it lives
    except ProcessLookupError:
      return ''
    except PermissionError:
      pass  # it does, and is another user's
    if process == os.getpid() and folder.resolve() not in _held:
      return ''  # of one before a restart of the machine
  return f'{process} on {host}'


def digest(content: Any) -> str:
  """Names a content: of the files of a folder but hidden ones, or of values
  that JSON holds; of a value of another type, the type counts alone."""
  found = hashlib.sha256()
  if isinstance(content, pathlib.Path):
    for path in _shown(content):
      found.update(f'{path.relative_to(content)}\n'.encode())
      found.update(path.read_bytes())
  else:
    text = json.dumps(content, skipkeys=True, default=_stable)
    found.update(text.encode())
  return found.hexdigest()[:16]


def _shown(folder: pathlib.Path) -> list[pathlib.Path]:
  """The files below a folder, without hidden ones and those of hidden folders.

  What editors and notebooks leave (.ipynb_checkpoints) is no content.
  """
  found = ((path, path.relative_to(folder).parts) for path in folder.rglob('*'))
  hidden = lambda parts: any(part.startswith('.') for part in parts)
  return sorted(p for p, parts in found if p.is_file() and not hidden(parts))


def _stable(value: Any) -> Any:
  """What JSON has no type for, equal in every process."""
  if isinstance(value, (set, frozenset)):
    return sorted(map(str, value))
  if isinstance(value, Mapping):
    return dict(value)
  if hasattr(value, '__array__'):
    return np.asarray(value).tolist()
  return type(value).__name__


@contextlib.contextmanager
def beside(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """A new folder beside `path`, to be renamed to it when it is complete.

  What was not renamed is removed at the end of the block.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  place = dict(dir=path.parent, prefix=f'.{path.name}.')
  with tempfile.TemporaryDirectory(**place) as home:
    part = pathlib.Path(home, path.name)
    part.mkdir()  # not private, as `home` is
    yield part


def make(folder: pathlib.Path, write: Callable[[pathlib.Path], Any]) -> None:
  """Makes a folder by write(folder), instead of what an earlier call made.

  Nothing is touched if it is there already, with the same content.

  Raises:
    RunError: something else is there, which is left as it is; another process
      has the folder that it is in; or the disk is full.
  """
  with explained(folder):
    with beside(folder) as part:
      write(part)
      same = lambda: folder.exists() and digest(folder) == digest(part)
      if same():
        return
      with locked(folder.parent):
        if same():  # another process has made it meanwhile
          return
        if folder.exists():
          require(
            _is_made(folder),
            f'{folder} is in the way: no run made it, or it was changed since. '
            'Move it to another place, or use another --workdir',
          )
          folder.rename(part.with_name('old'))
        (part / MADE).write_text(json.dumps(_digests(part)))
        part.rename(folder)


def _is_made(folder: pathlib.Path) -> bool:
  """Whether all that is in a folder was made by `make`.

  Files may be missing: an object store has them one after another.
  """
  if folder.is_symlink() or not folder.is_dir():
    return False
  mark = folder / MADE
  try:
    made = dict(json.loads(mark.read_text()) if mark.exists() else {})
  except (TypeError, ValueError):  # somebody else's file
    return False
  return _digests(folder).items() <= made.items()


def _digests(folder: pathlib.Path) -> dict[str, str]:
  """Of all that is below a folder but folders: name -> digest."""
  paths = (p for p in folder.rglob('*') if p.is_symlink() or not p.is_dir())
  names = {p.relative_to(folder).as_posix(): p for p in paths}
  return {
    name: '' if p.is_symlink() else hashlib.sha256(p.read_bytes()).hexdigest()
    for name, p in names.items()
    # Jupyter copies what is opened there.
    if name != MADE and not name.startswith('.ipynb_checkpoints/')
  }
