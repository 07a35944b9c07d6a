"""Checkpoints (with Orbax) that a run resumes from exactly.

One folder per step. Orbax writes a temporary folder and renames it, so a folder
named after a step is complete; for the same reason a checkpoint is renamed
before it is deleted. Arrays are stored as uncompressed zarr in chunks. Orbax's
default store (OCDBT) keeps the whole compressed state in host memory until the
end of a save: 1.2 GB for a state of 1.35 GB, where zarr takes 0.1 to 0.25 GB
and less time.

    <folder>/00000050/arrays/...            one zarr store per leaf
    <folder>/00000050/meta/meta.json        step, extras, metrics, shapes

`models.pretrained.save` exports the parameters in the Hugging Face format.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
import dataclasses
import functools
import json
import math
import pathlib
import re
import shutil
from typing import Any, NamedTuple

from absl import logging
import jax
from ml_collections import ConfigDict
import numpy as np
import orbax.checkpoint as ocp

from searchrl_jax import lookup
from searchrl_jax.devices import cluster
from searchrl_jax.store import records, remote

FORMAT = 2  # version of the content of `meta` and of the names of leaves
_STEP = '[0-9]' * 8
_CHUNK = 32 << 20  # bytes per file
_BUDGET = 256 << 20  # least limit of bytes in transfer from the host
_DEFERRED = 64 << 20  # bytes of deferred leaves that are computed together
_COMMIT = 'commit_success.txt'  # Orbax writes it last, where it cannot rename
_DELETED = 'deleted.txt'  # written before the former is removed
_TIMEOUT = 3600  # seconds that processes wait for the slowest
_STORE = {
  'use_ocdbt': False,
  'use_zarr3': False,
  'use_compression': False,
  'multiprocessing_options': ocp.options.MultiprocessingOptions(),
}
# Every save causes a warning about missing OCDBT files.
logging.get_absl_logger().addFilter(
  lambda record: 'merge of OCDBT' not in str(record.msg)
)


class CheckpointError(RuntimeError):
  """A checkpoint cannot be written or read, or belongs to another run."""


class Restored(NamedTuple):
  step: int
  state: Any  # with the structure and shardings of the target
  extras: dict[str, Any]
  metrics: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Deferred:
  """A leaf of a state that is computed when it is written: one file a shard."""

  shape: tuple[int, ...]
  dtype: np.dtype
  make: Callable[[], jax.Array]

  @property
  def size(self) -> int:
    return math.prod(self.shape)


class Checkpointer:
  """Saves and restores the steps of one run.

  Several processes call `save` and `restore` together, on one folder: each
  writes and reads its shards, and process 0 the rest.

  Args:
    folder: created if absent; a local one or an `epath.Path` of gs://.
    keep: number of latest steps to keep; None = all, until `delete`.
    best: a metric (higher is better) whose best step is kept too; '' = none.
  """

  def __init__(self, folder, keep: int | None, best: str):
    self._remote = remote.is_remote(folder)
    # Orbax requires absolute paths.
    self.folder = folder if self._remote else pathlib.Path(folder).absolute()
    self.keep = keep
    self.best_metric = best
    self._background: tuple[int, ocp.AsyncCheckpointer] | None = None

  def steps(self) -> list[int]:
    """The steps of complete checkpoints, in order."""
    return sorted(int(p.name) for p in self.folder.glob(_STEP) if self._ends(p))

  def _ends(self, path) -> bool:
    return (path / _COMMIT).exists() if self._remote else path.is_dir()

  def latest(self) -> int | None:
    return max(self.steps(), default=None)

  def best(self) -> int | None:
    """The step with the best metric (the last of equals); None = no step."""
    scored = [
      (self.meta(step)['metrics'].get(self.best_metric, math.nan), step)
      for step in self.steps()
    ]
    return max((s for s in scored if math.isfinite(s[0])), default=[None])[-1]

  def meta(self, step: int) -> dict[str, Any]:
    """The metadata of a step; reads no arrays.

    Raises:
      CheckpointError: it is absent, unreadable or of another format version.
    """
    file = self._meta(step)
    try:
      meta = json.loads(file.read_text())
      message = f'format version {meta["format"]}; this code reads {FORMAT}'
      lookup.require(meta['format'] == FORMAT, message)
    except (OSError, ValueError, KeyError) as e:
      raise CheckpointError(f'{file}: cannot be read ({e})') from e
    return meta

  def save(
    self, step, state, *, extras, metrics, fingerprint, background=False
  ) -> None:
    """Writes one step, then deletes steps that are not kept.

    Needs host memory for a copy of this process's part of the state, which a
    CPU shares with its arrays: about 0.3 GB then, if not in the background.

    Args:
      step: which has no checkpoint yet.
      state: a pytree of arrays with elements (params, opt_state, step), or of
        `Deferred` leaves alone.
      extras: JSON (data cursor, pools, trajectories, weights version).
      metrics: of the last evaluation; they determine the best step.
      fingerprint: JSON that must be equal in a run that restores this step.
      background: return once the arrays are copied. `wait` ends the save;
        before it, no other method sees the step.

    Raises:
      CheckpointError: writing this step, or the one before in the background,
        failed; earlier checkpoints are intact.
    """
    self.wait()
    path, leaves = self._path(step), _leaves(state)
    meta = {
      'format': FORMAT,
      'step': step,
      'extras': extras,
      'metrics': metrics,
      'fingerprint': fingerprint,
      'tree': {k: _describe(v) for k, v in leaves.items()},
    }
    save_args = {k: ocp.SaveArgs(chunk_byte_size=_CHUNK) for k in leaves}
    args = ocp.args.Composite(
      arrays=ocp.args.PyTreeSave(leaves, save_args=save_args),
      meta=ocp.args.JsonSave(meta),
    )
    self.folder.mkdir(parents=True, exist_ok=True)
    self._clean(step)
    with self._explained(step):
      if background:
        saver = ocp.AsyncCheckpointer(_handler(leaves), _TIMEOUT)
        saver.save(path, args=args)
        self._background = step, saver
        return
      with ocp.Checkpointer(_handler(leaves)) as saver:
        saver.save(path, args=args)
    self._delete_old()

  def wait(self) -> None:
    """Waits for a save in the background, if there is one.

    Raises:
      CheckpointError: it failed; earlier checkpoints are intact.
    """
    if self._background is None:
      return
    (step, saver), self._background = self._background, None
    with self._explained(step), contextlib.closing(saver):
      saver.wait_until_finished()
    self._delete_old()

  @contextlib.contextmanager
  def _explained(self, step: int) -> Iterator[None]:
    """Turns any error of a save into a CheckpointError."""
    try:
      yield
    # For one full disk, Orbax raises OSError, ValueError (with a status in its
    # text) or JaxRuntimeError, depending on the writer that failed.
    except Exception as e:
      # Orbax may still be writing into the step's folder. The next save
      # removes the rest.
      free, intact = '', 'earlier checkpoints'
      with contextlib.suppress(Exception):  # a bucket may not answer
        self._clean(step)
        intact = f'checkpoints {self.steps()}'
      if not self._remote:
        gigabytes = shutil.disk_usage(self.folder).free / 1e9
        free = f' ({gigabytes:.2f} GB free there)'
      raise CheckpointError(
        f'saving step {step} to {self._path(step)} failed{free}: {e}; '
        f'{intact} are intact'
      ) from e

  def _delete_old(self) -> None:
    if self.keep and cluster.main():
      kept = {*self.steps()[-self.keep :]}
      kept |= {self.best()} if self.best_metric else set()
      self.delete([s for s in self.steps() if s not in kept])

  def amend(self, step: int, metrics: Mapping[str, float], **extras) -> None:
    """Replaces the metrics and some extras of a step, atomically."""
    meta = self.meta(step) | {'metrics': metrics}
    meta['extras'] |= extras
    write = records.write_text
    if self._remote:  # an object is replaced as a whole
      write = lambda path, text: path.write_text(text)
    write(self._meta(step), json.dumps(meta))

  def delete(self, steps: Iterable[int]) -> None:
    """Removes checkpoints, each atomically."""
    for step in steps if cluster.main() else ():
      path = self._path(step)
      if self._remote:
        (path / _DELETED).write_text('')
        (path / _COMMIT).unlink()
      else:
        path.rename(path.with_name(f'{path.name}.deleted'))
    self._clean()

  def restore(
    self, target, step: int | str, *, fingerprint, partial: bool = False
  ) -> Restored:
    """Reads a step into the structure, types and shardings of `target`.

    Args:
      target: a pytree of jax.Array, jax.ShapeDtypeStruct (with a sharding, or
        on the default device) and numpy arrays.
      step: a step, 'latest' or 'best'.
      fingerprint: must equal the saved one; None = not compared.
      partial: allow arrays and fields of the fingerprint in the checkpoint that
        the target and `fingerprint` do not have.

    Raises:
      CheckpointError: no such checkpoint, or one of another model or config;
        the message names the fields or arrays that differ.
    """
    step = self.resolve(step)
    path, meta, leaves = self._path(step), self.meta(step), _leaves(target)
    if fingerprint is not None:
      _compare(path, meta['fingerprint'], dict(fingerprint), partial)
    wanted = {k: _describe(v) for k, v in leaves.items()}
    _compare(path, meta['tree'], wanted, partial)
    args = ocp.args.PyTreeRestore(
      item=leaves,
      restore_args={k: _restore_args(v) for k, v in leaves.items()},
      partial_restore=True,
    )
    try:
      with ocp.Checkpointer(_handler(leaves)) as reader:
        restored = reader.restore(path, ocp.args.Composite(arrays=args))
    except Exception as e:  # of Orbax or TensorStore, of many types
      raise CheckpointError(
        f'{path}: cannot be read ({str(e)[:200]}). If it is damaged, remove it '
        f'to resume from an earlier one; there are steps {self.steps()}'
      ) from e
    flat = [restored['arrays'][name] for name in leaves]
    state = jax.tree.unflatten(jax.tree.structure(target), flat)
    return Restored(step, state, meta['extras'], meta['metrics'])

  def _path(self, step: int) -> pathlib.Path:
    return self.folder / f'{step:08d}'

  def _meta(self, step: int) -> pathlib.Path:
    return self._path(step) / 'meta' / 'meta.json'

  def resolve(self, step: int | str) -> int:
    """The step that an int, its digits, 'latest' or 'best' names.

    Raises:
      CheckpointError: there is no such checkpoint.
    """
    named = {'latest': self.latest, 'best': self.best}
    found = named[step]() if step in named else step
    what = f' with metric {self.best_metric!r}' if step == 'best' else ''
    lookup.require(
      str(found) in map(str, self.steps()),
      f'no checkpoint {step!r}{what} in {self.folder}; steps: {self.steps()}',
      CheckpointError,
    )
    return int(found)

  def _clean(self, step: int | None = None) -> None:
    """Removes the leftovers of saves and deletions that were killed.

    Of saves at a location, those of `step` alone: another machine may be
    writing others.
    """
    if not cluster.main():
      return
    if self._remote:
      own = None if step is None else self._path(step).name
      for path in self.folder.glob(_STEP):
        gone = path.name == own or (path / _DELETED).exists()
        if gone and not self._ends(path):
          path.rmtree()
      return
    for kind in 'orbax-checkpoint-tmp*', 'deleted':
      for path in self.folder.glob(f'{_STEP}.{kind}'):
        shutil.rmtree(path, ignore_errors=True)


def of_run(config: ConfigDict, workdir: str) -> Checkpointer:
  """The checkpoints of a run, as config.checkpoint says."""
  c = config.checkpoint
  folder = remote.place(workdir) / records.CHECKPOINTS
  return Checkpointer(folder, c.keep, c.best)


class _DeferredHandler(ocp.type_handlers.ArrayHandler):
  """Writes deferred leaves some at a time, while the next are computed."""

  async def serialize(self, values, infos, args=None):
    writes, arrays, begin = [], [], 0
    for end, leaf in enumerate(values, 1):
      arrays.append(leaf.make())
      if end == len(values) or sum(x.nbytes for x in arrays) >= _DEFERRED:
        for write in writes:
          await asyncio.to_thread(write.result)
        # Without args no file is limited, so that a reader can map a shard.
        writes = await super().serialize(arrays, infos[begin:end])
        arrays, begin = [], end
    return writes


def _handler(item: Mapping[str, Any]) -> ocp.CompositeCheckpointHandler:
  """A handler that limits the bytes in transfer of a restore."""
  sizes = [v.size * np.dtype(v.dtype).itemsize for v in item.values()]
  largest = max(sizes, default=0)
  more: dict[str, Any] = {}
  if any(isinstance(v, Deferred) for v in item.values()):
    own = _DeferredHandler(enable_write_sharding_file=False)
    types = (Deferred, own), (jax.Array, own)  # Orbax asks for both
    register = ocp.type_handlers.create_type_handler_registry
    more['type_handler_registry'] = register(*types)
  impl = ocp.BasePyTreeCheckpointHandler(
    # Arrays are not split, and a batch must be smaller than the budget.
    restore_concurrent_bytes=max(2 * largest + 1, _BUDGET),
    **_STORE,
    **more,
  )
  return ocp.CompositeCheckpointHandler(
    arrays=ocp.PyTreeCheckpointHandler(handler_impl=impl, **_STORE),
    meta=ocp.JsonCheckpointHandler(filename='meta.json'),
  )


def _leaves(tree) -> dict[str, Any]:
  """Leaves by name ('state.params.layers.q'), in the tree's order."""
  name = functools.partial(jax.tree_util.keystr, simple=True, separator='.')
  safe = lambda path: re.sub(r'[^A-Za-z0-9_.-]', '_', name(path))
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {f'state.{safe(path)}': leaf for path, leaf in leaves}


def _describe(x) -> list:
  return [list(x.shape), str(np.dtype(x.dtype))]


def _restore_args(x) -> ocp.RestoreArgs:
  if isinstance(x, np.ndarray):
    return ocp.RestoreArgs(restore_type=np.ndarray, dtype=x.dtype)
  where = x.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return ocp.ArrayRestoreArgs(
    restore_type=jax.Array, dtype=x.dtype, sharding=where, global_shape=x.shape
  )


def _compare(path, saved: dict, ours: dict, partial: bool) -> None:
  """Raises CheckpointError naming what differs."""
  if partial:
    saved = {k: v for k, v in saved.items() if k in ours}
  found = lookup.differences(saved, json.loads(json.dumps(ours))).items()
  show = lambda value: 'absent' if value is None else repr(value)
  lines = [f'{k}: {show(a)} there, {show(b)} here' for k, (a, b) in found]
  text = '; '.join(lines[:9])
  lookup.require(
    not lines,
    f'{path} belongs to another model or config: {text}',
    CheckpointError,
  )
