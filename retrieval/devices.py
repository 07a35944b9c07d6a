"""The devices of this process, and a cache of compiled programs."""

import hashlib
import os
import pathlib
import platform
import stat
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from retrieval import files
from retrieval.files import PathLike

_KEPT_BYTES = 1 << 30  # of cached programs; those of a small model take 5 MB
_CPU_LINES = ('model name', 'flags', 'Features', 'CPU part')


def data_mesh() -> Mesh:
  """A mesh of all devices of this process along one axis."""
  return Mesh(np.array(jax.local_devices()), ('data',))


def put(mesh: Mesh, *arrays: np.ndarray) -> tuple[jax.Array, ...]:
  """Shards rows over the devices if they divide evenly, else copies them."""
  even = len(arrays[0]) % mesh.size == 0
  spec = PartitionSpec(mesh.axis_names[0] if even else None)
  return tuple(jax.device_put(a, NamedSharding(mesh, spec)) for a in arrays)


def replicate(mesh: Mesh, params: Any) -> Any:
  """Copies a tree of arrays to every device."""
  return jax.device_put(params, NamedSharding(mesh, PartitionSpec()))


def keep_programs(folder: PathLike | None) -> None:
  """Caches compiled programs on the disk for the next process.

  Call it before anything compiles. Processes may share the folder: an entry is
  identified by program, options, versions and device, and an unreadable one is
  compiled again. Each kind of CPU has a subfolder, since a program may hold
  instructions that another kind lacks. The least recently used programs are
  removed beyond 1 GiB, or JAX_COMPILATION_CACHE_MAX_SIZE.

  Args:
    folder: of the cache; '' disables it. None: JAX_COMPILATION_CACHE_DIR, else
      searchrl_retrieval in the user's cache folder (XDG_CACHE_HOME, else
      ~/.cache).

  Raises:
    OSError: the folder cannot be made or written, or others may write there;
      the cache is then neither written nor read.
    RuntimeError: this user has no home folder.
  """
  kept = jax.config.jax_enable_compilation_cache and folder != ''
  jax.config.update('jax_enable_compilation_cache', False)  # until it is safe
  if not kept:
    return
  folder = folder or jax.config.jax_compilation_cache_dir
  if not folder:
    folder = files.cache_folder('searchrl_retrieval')
  cpu = platform.machine()
  if os.path.exists('/proc/cpuinfo'):
    with open('/proc/cpuinfo') as file:
      cpu += ''.join(sorted({x for x in file if x.startswith(_CPU_LINES)}))
  name = hashlib.sha256(cpu.encode()).hexdigest()[:16]
  path = pathlib.Path(folder, name)
  for one in (path.parent, path):
    one.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_private(one, one is path)
  if not os.access(path, os.W_OK):
    raise PermissionError(f'{path}: cannot be written')
  for entry in path.glob('*-cache'):
    # JAX stops writing if a kill left a program without its access time.
    key = entry.name.removesuffix('-cache')
    if not entry.with_name(f'{key}-atime').exists():
      entry.unlink(missing_ok=True)
  limit = jax.config.jax_compilation_cache_max_size
  options = {
    'jax_compilation_cache_max_size': _KEPT_BYTES if limit < 0 else limit,
    'jax_compilation_cache_dir': str(path),
    'jax_persistent_cache_min_compile_time_secs': 0,
    'jax_persistent_cache_min_entry_size_bytes': -1,
    'jax_enable_compilation_cache': True,
  }
  for name, value in options.items():
    jax.config.update(name, value)


def _require_private(path: pathlib.Path, own: bool) -> None:
  """Refuses folders that others can write, since cached programs are executed.

  own: the folder must belong to this user. Else it may belong to root, and be
  one like /tmp, where users cannot rename the files of others.
  """
  found, user = path.stat(), os.getuid()
  if found.st_uid not in ((user,) if own else (user, 0)):
    problem = f'belongs to user {found.st_uid}, not to {user}'
    raise PermissionError(f'{path}: {problem}; use a folder that you own')
  shared = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
  if shared and (own or not found.st_mode & stat.S_ISVTX):
    fix = 'chmod go-w, or use another folder'
    raise PermissionError(f'{path}: others may write there; {fix}')
