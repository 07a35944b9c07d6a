"""Run folders and data at locations such as gs://bucket/run.

A run works in a local folder, which `fetch` fills from the location at the
start. Orbax writes checkpoints to the location itself; every other file goes
there by `push`, each time as a whole, because object stores do not append. So
the processes of a run need no common disk, and a machine with an empty disk
resumes it. Locations have no locks: two starts on one of them are not detected
across machines.
"""

from collections.abc import Callable, Iterator
import contextlib
import functools
import hashlib
import logging
import os
import pathlib
import re
import socket
from typing import Any

from searchrl_jax import lookup
from searchrl_jax.devices import cluster
from searchrl_jax.store import folders, records

CACHE = 'SEARCHRL_CACHE'  # variable: the folder below which `fetch` writes
_READ = 'read'  # below it: the copies of commands that only read a run
_MARK = '.location'  # file in the local folder of a run: the location
# Weights and checkpoints, which are read and written elsewhere.
_APART = re.compile(r'(^|/)(\d{8}|published)[./]')
_STEP = re.compile(r'(^|/)step_-?\d{7,8}[^/]*\.parquet$')
_OWNER = re.compile(r'(?:(?:^|/)process_|_p)(\d{3})(?:/|\.parquet$)')
# Run folder -> name -> size and time of the file when it was last the same.
_same: dict[pathlib.Path, dict[str, tuple[int, int]]] = {}


def is_remote(path: Any) -> bool:
  return '://' in str(path)


def _open(location: str) -> tuple[Any, str]:
  """The file system of a location, and its path there."""
  import fsspec  # takes a while, and most runs are local

  for name in 'gs', 'gcs':  # other machines write there too
    fsspec.config.conf.setdefault(name, {})['use_listings_cache'] = False
  # It prints the traceback of errors that it also raises.
  logging.getLogger('gcsfs').setLevel(logging.CRITICAL)
  return fsspec.url_to_fs(location)


@contextlib.contextmanager
def _explained(location: str) -> Iterator[None]:
  try:
    yield
  except ImportError as e:
    raise records.RunError(
      f"{location}: {e}; pip install 'searchrl_jax[gcs]' has the client of gs://"
    ) from e
  except Exception as e:  # each client has its own errors
    line = (str(e) or type(e).__name__).partition('\n')[0][:200]
    raise records.RunError(
      f'{location} cannot be used ({line}): check that the bucket exists, and '
      'that the credentials may read and write it (gs://: gcloud auth '
      'application-default login, or GOOGLE_APPLICATION_CREDENTIALS)'
    ) from e


def fetch(location: str) -> str:
  """A local copy of a file or folder, kept below SEARCHRL_CACHE.

  Files that are there already with the same size and time are not read again.

  Raises:
    RunError: there is no such file, or no access.
  """
  folder = _cache('data', location)
  names = _pull(location, folder)
  records.require(names, f'{location}: no such file or folder')
  # A file keeps its name, since its reader may go by the suffix.
  is_file = location.endswith(f'/{names[0]}')
  if not is_file:
    _prune(folder, lambda name: name not in names)
  return str(folder / names[0] if is_file else folder)


@functools.cache
def open_run(location: str, writes: bool = False, steps: bool = False) -> str:
  """The local folder of a run at a location; fetches what it needs.

  Args:
    writes: this command continues the run, and no other one may.
    steps: fetch the trajectories too. Checkpoints are never fetched.

  Raises:
    RunError: the location cannot be used, or a run on this machine uses it.
  """
  records.require(
    re.match('gs://[^/]+/.', location),
    f'{location}: a run folder is gs://BUCKET/FOLDER, or a local one, which '
    'may be a mounted bucket',
  )
  location = re.sub('(?<!:)/+', '/', location).rstrip('/')  # one cache of it
  folder = _cache('runs' if writes else _READ, location)
  with contextlib.ExitStack() as stack:
    if writes:
      # Processes that start together, which have a run in common, wait in turn.
      with lookup.of(location, records.RunError, records.RunError):
        stack.enter_context(folders.locked(f'{folder}.opening', wait=True))
        stack.enter_context(folders.locked(folder))
      with _explained(location):  # now, rather than at the first checkpoint
        fs, root = _open(location)
        test = f'{root}/.test_{socket.gethostname()}_{os.getpid()}'
        fs.pipe_file(test, b'writable')
        fs.rm_file(test)
    records.write_text(folder / _MARK, location)
    skip = lambda name: _APART.search(name) or not steps and _STEP.search(name)
    names = {*_pull(location, folder, skip)}
    # What an earlier start left here is not newer than what is there.
    drop = lambda name: (
      name not in names
      and not _APART.search(name)
      and (writes or steps or not _STEP.search(name))
    )
    _prune(folder, drop)
    _same[folder] = same = {}
    for name in _names(folder):
      with contextlib.suppress(FileNotFoundError):  # another reader prunes too
        same[name] = _stamp(folder / name)
  return str(folder)


def local_run(path: str) -> str:
  """A local folder for a run, or a model, that another one starts from."""
  return open_run(path) if is_remote(path) else path


def place(folder: pathlib.Path | str) -> Any:
  """Where the folder of a run is kept: its location, or the folder itself."""
  mark = pathlib.Path(folder) / _MARK
  if mark.exists():
    from etils import epath

    return epath.Path(mark.read_text())
  return pathlib.Path(folder)


def begun(folder: pathlib.Path | str) -> bool:
  """`records.begun`, with the checkpoints at the location of a run."""
  checkpoints = place(folder) / records.CHECKPOINTS
  return records.begun(folder) or (
    is_remote(checkpoints) and any(checkpoints.glob('[0-9]*'))
  )


def push(folder: pathlib.Path | str) -> None:
  """Writes files of this process that changed to the location of a run.

  Raises:
    RunError: the location cannot be written.
  """
  folder = pathlib.Path(folder)
  if not is_remote(place(folder)):
    return
  same, read = _same.setdefault(folder, {}), folder.parent.name == _READ
  with _explained(str(place(folder))):
    fs, root = _open(str(place(folder)))
    # Files that a push leaves when it is killed are known as those of a run, or
    # as made by one. It has begun when all are there.
    order = lambda name: (
      name.endswith('metrics.jsonl'),
      not name.endswith((records.ENVIRONMENT, folders.MADE)),
    )
    for name in sorted(_names(folder), key=order):
      owner = _OWNER.search(name)
      if int(owner[1] if owner else 0) != cluster.rank() or _APART.search(name):
        continue
      at, stamp = f'{root}/{name}', _stamp(folder / name)
      if same.get(name) == stamp:
        continue
      # The cache of commands that read is common: another one may have
      # fetched a file that the run has written again since.
      if not read or not fs.exists(at) or _time(fs.info(at)) < stamp[1]:
        fs.put_file(str(folder / name), at)
        same[name] = stamp


def push_all() -> None:
  """Calls `push` for every run that this process has opened."""
  for folder in [*_same]:
    push(folder)


def share(folder: pathlib.Path | str, name: str) -> None:
  """Brings a subfolder that process 0 wrote to processes on other machines.

  Raises:
    RunError: the location cannot be used.
  """
  location = str(place(folder))
  if cluster.size() > 1 and is_remote(location):
    cluster.first('share', lambda: push(folder))
    if not cluster.main():
      _pull(f'{location}/{name}', pathlib.Path(folder) / name)


def _cache(kind: str, location: str) -> pathlib.Path:
  base = os.environ.get(CACHE) or '~/.cache/searchrl_jax'
  digest = hashlib.sha256(location.encode()).hexdigest()[:12]
  name = re.sub(r'\W+', '_', location.partition('://')[2])[-40:]
  return pathlib.Path(base).expanduser() / kind / f'{name}_{digest}'


def _names(folder: pathlib.Path) -> list[str]:
  """Of the files below a folder that belong to a location."""
  paths = (p for p in folder.rglob('*') if p.is_file())
  names = (p.relative_to(folder).as_posix() for p in paths)
  return sorted(name for name in names if not _is_hidden(name))


def _is_hidden(name: str) -> bool:
  """Whether a file stays where it is: a lock, a part, a test of access."""
  return '/.' in f'/{name}'.removesuffix(f'/{folders.MADE}')


def _prune(folder: pathlib.Path, drop: Callable[[str], bool]) -> None:
  """Removes files of a local copy by their names, but for subfolders in use."""
  locked = (lock.parent for lock in folder.rglob('*/.lock'))
  used = [*filter(folders.in_use, locked)]
  for path in (folder / name for name in filter(drop, _names(folder))):
    if not any(home in path.parents for home in used):
      path.unlink(missing_ok=True)  # another reader prunes too


def _stamp(path: pathlib.Path) -> tuple[int, int]:
  found = path.stat()
  return found.st_size, found.st_mtime_ns


def _time(info: dict[str, Any]) -> int:
  """When an object was written, in nanoseconds; 0 = the store does not say."""
  times = map(info.get, ('mtime', 'LastModified', 'created'))
  when = next(filter(None, times), 0)
  when = when.timestamp() if hasattr(when, 'timestamp') else when
  return int(when * 1e6) * 1000


def _pull(
  location: str,
  folder: pathlib.Path,
  skip: Callable[[str], Any] = lambda name: False,
) -> list[str]:
  """Fetches a file, or those below a location; returns their names there."""
  from fsspec import callbacks

  out = []
  with _explained(location):
    fs, root = _open(location)
    found = fs.find(root, detail=True)
    base = root.rpartition('/')[0] if root in found else root
    for full, info in sorted(found.items()):
      name = full[len(base) :].strip('/')
      if full.endswith('/') or not name or _is_hidden(name) or skip(name):
        continue
      out.append(name)
      path = folder / name
      stamp = info['size'], _time(info)
      if path.exists() and _stamp(path) == stamp:
        continue
      path.parent.mkdir(parents=True, exist_ok=True)
      part = path.with_name(f'.{path.name}.{os.getpid()}')
      bar = {'desc': name, 'unit': 'B', 'unit_scale': True, 'delay': 2}
      bar |= {'disable': None, 'leave': False}  # shown in a terminal alone
      try:
        shown = callbacks.TqdmCallback(tqdm_kwargs=bar)
        fs.get_file(full, str(part), callback=shown)
        os.utime(part, ns=(stamp[1], stamp[1]))
        part.replace(path)
      finally:
        part.unlink(missing_ok=True)
  return out
