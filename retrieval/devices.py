"""The devices of this process, and the programs compiled for them."""

import hashlib
import os
import pathlib
import platform
import stat

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

_KEPT_BYTES = 1 << 30  # of programs on the disk; a small model's take 5 MB


def data_mesh() -> Mesh:
  """All devices of this process in a row."""
  return Mesh(np.array(jax.local_devices()), ('data',))


def put(mesh: Mesh, *arrays: np.ndarray) -> tuple[jax.Array, ...]:
  """Rows spread over the devices where they divide, else on each."""
  even = len(arrays[0]) % mesh.size == 0
  spec = PartitionSpec(mesh.axis_names[0] if even else None)
  return tuple(jax.device_put(a, NamedSharding(mesh, spec)) for a in arrays)


def keep_programs(folder: str | os.PathLike | None) -> None:
  """Keeps compiled programs on the disk: the next process has them at once.

  To be called before anything compiles. Processes may share the folder: an
  entry is told by program, options, versions and device, and one that cannot
  be read is compiled anew. Each kind of CPU has a folder of its own, since a
  program may hold instructions that another kind lacks. Of the programs there
  the ones used last are kept, 1 GiB or JAX_COMPILATION_CACHE_MAX_SIZE.

  Args:
    folder: where; '' keeps none. None: where JAX is told to
      (JAX_COMPILATION_CACHE_DIR), else searchrl_retrieval in the user's cache
      folder (XDG_CACHE_HOME, else ~/.cache).

  Raises:
    OSError: the folder cannot be made or written, or others may write there;
      nothing is kept then, nor taken from it.
    RuntimeError: this user has no home.
  """
  kept = jax.config.jax_enable_compilation_cache and folder != ''
  jax.config.update('jax_enable_compilation_cache', False)  # until it is safe
  if not kept:
    return
  if folder is None:
    folder = jax.config.jax_compilation_cache_dir or pathlib.Path(
      os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache',
      'searchrl_retrieval',
    )
  cpu = platform.machine()
  if os.path.exists('/proc/cpuinfo'):
    with open('/proc/cpuinfo') as file:
      cpu += ''.join(
        sorted(
          {
            line
            for line in file
            if line.startswith(('model name', 'flags', 'Features', 'CPU part'))
          }
        )
      )
  name = hashlib.sha256(cpu.encode()).hexdigest()[:16]
  path = pathlib.Path(folder, name)
  for one in (path.parent, path):
    one.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_private(one, one is path)
  if not os.access(path, os.W_OK):
    raise PermissionError(f'{path}: cannot be written')
  for entry in path.glob('*-cache'):
    # A kill came between the program and its time: JAX would write no more.
    key = entry.name.removesuffix('-cache')
    if not entry.with_name(f'{key}-atime').exists():
      entry.unlink(missing_ok=True)
  if jax.config.jax_compilation_cache_max_size < 0:
    jax.config.update('jax_compilation_cache_max_size', _KEPT_BYTES)
  jax.config.update('jax_compilation_cache_dir', str(path))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
  jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)
  jax.config.update('jax_enable_compilation_cache', True)


def _require_private(path: pathlib.Path, own: bool) -> None:
  """Programs are run as they are: nobody else may put one into a folder.

  own: it is this user's. Else it may be the system's, and one like /tmp, where
  all write and none can rename what is another's.
  """
  found = path.stat()
  if found.st_uid not in ((os.getuid(),) if own else (os.getuid(), 0)):
    raise PermissionError(
      f'{path}: belongs to user {found.st_uid}, not to {os.getuid()}; use a '
      'folder of your own'
    )
  shared = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
  if shared and (own or not found.st_mode & stat.S_ISVTX):
    raise PermissionError(
      f'{path}: others may write there; chmod go-w, or use another folder'
    )
