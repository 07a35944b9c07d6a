"""Checkpoints (with Orbax) that a run resumes from exactly.

One folder per step. Orbax writes a temporary folder and renames it, so a folder
named after a step is complete; for the same reason a checkpoint is renamed
before it is deleted. Arrays are stored as uncompressed zarr in chunks. Orbax's
default store (OCDBT) keeps the whole compressed state in host memory until the
end of a save: 1.2 GB for a state of 1.35 GB, where zarr takes 0.1 to 0.25 GB
and less time.

    <folder>/00000050/arrays/...            one zarr store per leaf
    <folder>/00000050/meta/meta.json        step, extras, metrics, shapes

`hf.save` exports the parameters in the Hugging Face format.
"""

from collections.abc import Iterable, Mapping
import contextlib
import dataclasses
import json
import math
import pathlib
import re
import shutil
import time
from typing import Any

from absl import logging
import jax
import numpy as np
import orbax.checkpoint as ocp

from searchrl_jax.run import records
from searchrl_jax.run.writer import differences

FORMAT = 2  # version of the content of `meta` and of the names of leaves
_STEP = re.compile(r'\d{8}')
_LEFTOVER = re.compile(r'\d{8}\.(orbax-checkpoint-tmp.*|deleted)')
_CHUNK = 32 << 20  # bytes per file
_BUDGET = 256 << 20  # least limit of bytes in transfer to or from the host


class CheckpointError(RuntimeError):
  """A checkpoint cannot be written or read, or belongs to another run."""


@dataclasses.dataclass(frozen=True)
class Restored:
  step: int
  state: Any  # with the structure and shardings of the target
  extras: dict[str, Any]
  arrays: dict[str, np.ndarray]
  metrics: dict[str, float]
  seconds: float


class Checkpointer:
  """Saves and restores the steps of one run.

  Args:
    folder: created if absent.
    keep: number of latest steps to keep; None = all, until `delete`.
    best: a metric (higher is better) whose best step is kept too; '' = none.
  """

  def __init__(self, folder, keep: int | None, best: str):
    if keep is not None and keep < 1:
      raise ValueError(f'config.checkpoint.keep={keep} must be at least 1')
    # Orbax requires absolute paths.
    self.folder = pathlib.Path(folder).absolute()
    self.keep = keep
    self.best_metric = best

  def steps(self) -> list[int]:
    """The steps of complete checkpoints, in order."""
    if not self.folder.is_dir():
      return []
    return sorted(
      int(p.name)
      for p in self.folder.iterdir()
      if _STEP.fullmatch(p.name) and p.is_dir()
    )

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
    file = self._path(step) / 'meta' / 'meta.json'
    try:
      meta = json.loads(file.read_text())
    except (OSError, ValueError) as e:
      raise CheckpointError(
        f'{file}: cannot be read ({e}); there are checkpoints of steps '
        f'{self.steps()} in {self.folder}'
      ) from e
    if meta.get('format') != FORMAT:
      raise CheckpointError(
        f'{file}: format version {meta.get("format")}; this code reads {FORMAT}'
      )
    return meta

  def save(
    self,
    step: int,
    state,
    *,
    extras: Mapping[str, Any],
    metrics: Mapping[str, float],
    fingerprint: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray] | None = None,
    split: tuple[str, ...] = (),
  ) -> float:
    """Writes one step, then deletes steps that are not kept. Returns seconds.

    Needs host memory for the largest array of the state plus about 0.3 GB.

    Args:
      state: a pytree of arrays and numbers (params, opt_state, step).
      extras: JSON (data cursor, random seeds, pools, weights version).
      metrics: of the last evaluation; they determine the best step.
      fingerprint: JSON that must be equal in a run that restores this step.
      arrays: more numpy arrays by name (bytes: `np.frombuffer`).
      split: leaves whose name starts with one of these ('state.layers.') are
        written in chunks of at most one index of their first axis, so that
        they can be read index by index.

    Raises:
      FileExistsError: the step exists already.
      CheckpointError: writing failed; earlier checkpoints are intact.
    """
    start = time.monotonic()
    path = self._path(step)
    if path.exists():
      raise FileExistsError(f'{path} exists: step {step} was saved already')
    leaves = _leaves(state)
    extra_arrays = {
      f'extra.{_safe(k)}': np.asarray(v) for k, v in (arrays or {}).items()
    }
    if len(extra_arrays) != len(arrays or {}):
      raise ValueError(f'names of arrays collide: {sorted(arrays)}')
    meta = {
      'format': FORMAT,
      'step': step,
      'extras': dict(extras),
      'metrics': {k: float(v) for k, v in metrics.items()},
      'fingerprint': dict(fingerprint),
      'tree': {k: _describe(v) for k, v in leaves.items()},
      'arrays': {
        name: [key, *_describe(value)]
        for name, (key, value) in zip(arrays or {}, extra_arrays.items())
      },
    }
    meta = json.loads(json.dumps(meta))  # a TypeError comes before any write
    item = {k: v for k, v in (leaves | extra_arrays).items() if _size(v)}
    self._clean()
    save_args = {
      k: ocp.SaveArgs(
        chunk_byte_size=_CHUNK, shard_axes=(0,) * k.startswith(split)
      )
      for k in item
    }
    args = ocp.args.Composite(
      arrays=ocp.args.PyTreeSave(item, save_args=save_args),
      meta=ocp.args.JsonSave(meta),
    )
    try:
      self.folder.mkdir(parents=True, exist_ok=True)
      with _quiet(), ocp.Checkpointer(_handler(item)) as writer:
        writer.save(path, args=args)
    # For one full disk, Orbax raises OSError, ValueError (with a status in its
    # text) or JaxRuntimeError, depending on the writer that failed.
    except Exception as e:
      # Orbax may still be writing into the step's folder. The next save
      # removes the rest.
      self._clean(ignore_errors=True)
      free = shutil.disk_usage(self.folder).free if self.folder.exists() else 0
      raise CheckpointError(
        f'saving step {step} to {path} failed ({free / 1e9:.2f} GB free '
        f'there): {e}; checkpoints {self.steps()} are intact'
      ) from e
    steps = self.steps()
    kept = set(steps if self.keep is None else steps[-self.keep :])
    if self.best_metric:
      kept.add(self.best())
    self.delete(set(steps) - kept)
    return time.monotonic() - start

  def amend(
    self, step: int, metrics: Mapping[str, float], **extras: Any
  ) -> None:
    """Replaces the metrics and some extras of a step, atomically."""
    meta = self.meta(step) | {'metrics': dict(metrics)}
    meta['extras'] |= extras
    file = self._path(step) / 'meta' / 'meta.json'
    records.write_text(file, json.dumps(meta))

  def delete(self, steps: Iterable[int]) -> None:
    """Removes checkpoints, each atomically."""
    if jax.process_index() == 0:
      for step in steps:
        path = self._path(step)
        path.rename(path.with_name(f'{path.name}.deleted'))
    self._clean()

  def restore(
    self,
    target,
    step: int | str,
    *,
    fingerprint: Mapping[str, Any] | None,
    partial: bool = False,
  ) -> Restored:
    """Reads a step into the structure, types and shardings of `target`.

    Args:
      target: a pytree of jax.Array, jax.ShapeDtypeStruct (with a sharding, or
        on the default device), numpy arrays and numbers.
      step: a step, 'latest' or 'best'.
      fingerprint: must equal the saved one; None = not compared.
      partial: allow arrays in the checkpoint that the target does not have.

    Raises:
      CheckpointError: no such checkpoint, or one of another model or config;
        the message names the fields or arrays that differ.
    """
    start = time.monotonic()
    step = self.resolve(step)
    path = self._path(step)
    meta = self.meta(step)
    if fingerprint is not None:
      compare(path, meta['fingerprint'], fingerprint)
    leaves = _leaves(target)
    wanted = {k: _describe(v) for k, v in leaves.items()}
    saved = meta['tree']
    if partial:
      saved = {k: v for k, v in saved.items() if k in wanted}
    _compare_trees(path, saved, wanted)
    arrays = meta['arrays']
    item = {k: v for k, v in leaves.items() if _size(v)}
    item |= {
      key: np.empty(shape, dtype)
      for key, shape, dtype in arrays.values()
      if math.prod(shape)
    }
    args = ocp.args.PyTreeRestore(
      item=item,
      restore_args={k: _restore_args(v) for k, v in item.items()},
      partial_restore=True,
    )
    try:
      with ocp.Checkpointer(_handler(item)) as reader:
        restored = reader.restore(path, ocp.args.Composite(arrays=args))
        restored = restored['arrays']
    except Exception as e:  # of Orbax or TensorStore, of many types
      raise CheckpointError(
        f'{path}: cannot be read ({str(e)[:200]}); there are checkpoints of '
        f'steps {self.steps()}. If it is damaged, remove it to resume from an '
        'earlier one'
      ) from e
    flat = [
      _as_target(restored.get(name), leaves[name], leaf)
      for name, leaf in zip(leaves, jax.tree.leaves(target))
    ]
    return Restored(
      step=step,
      state=jax.tree.unflatten(jax.tree.structure(target), flat),
      extras=meta['extras'],
      arrays={
        name: restored[key] if key in restored else np.zeros(shape, dtype)
        for name, (key, shape, dtype) in arrays.items()
      },
      metrics=meta['metrics'],
      seconds=time.monotonic() - start,
    )

  def _path(self, step: int) -> pathlib.Path:
    return self.folder / f'{step:08d}'

  def resolve(self, step: int | str) -> int:
    """The step that an int, its digits, 'latest' or 'best' names.

    Raises:
      CheckpointError: there is no such checkpoint.
    """
    named = {'latest': self.latest, 'best': self.best}
    if step in named:
      number = named[step]()
    else:
      number = int(step) if str(step).isdigit() else step
    if number not in self.steps():
      what = f' with metric {self.best_metric!r}' if step == 'best' else ''
      raise CheckpointError(
        f'no checkpoint {step!r}{what} in {self.folder}; there are steps '
        f'{self.steps()}'
      )
    return number

  def _clean(self, ignore_errors: bool = False):
    """Removes the leftovers of saves and deletions that were killed."""
    if jax.process_index() == 0 and self.folder.is_dir():
      for path in self.folder.iterdir():
        if _LEFTOVER.fullmatch(path.name):
          shutil.rmtree(path, ignore_errors=ignore_errors)


@contextlib.contextmanager
def _quiet():
  """Filters the warning about missing OCDBT files that every save causes."""
  drop = lambda record: 'merge of OCDBT' not in str(record.msg)
  logger = logging.get_absl_logger()
  logger.addFilter(drop)
  try:
    yield
  finally:
    logger.removeFilter(drop)


def _handler(item: Mapping[str, Any]) -> ocp.CompositeCheckpointHandler:
  """A handler that limits the bytes in transfer through the host."""
  largest = max(
    (_size(v) * np.dtype(v.dtype).itemsize for v in item.values()), default=0
  )
  options = {
    'use_ocdbt': False,
    'use_zarr3': False,
    'use_compression': False,
    'multiprocessing_options': ocp.options.MultiprocessingOptions(),
  }
  impl = ocp.BasePyTreeCheckpointHandler(
    # Arrays are not split, and a batch must be smaller than the budget.
    save_device_host_concurrent_bytes=max(largest + 1, _BUDGET),
    restore_concurrent_bytes=max(2 * largest + 1, _BUDGET),
    is_prioritized_key_fn=lambda path: False,
    **options,
  )
  return ocp.CompositeCheckpointHandler(
    arrays=ocp.PyTreeCheckpointHandler(handler_impl=impl, **options),
    meta=ocp.JsonCheckpointHandler(filename='meta.json'),
  )


def _safe(name: str) -> str:
  return re.sub(r'[^A-Za-z0-9_.-]', '_', name)


def _leaves(tree) -> dict[str, Any]:
  """Leaves by name ('state.params.layers.q'), in the tree's order.

  Typed random keys become their integers, numbers become arrays.
  """
  out = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    name = _safe(jax.tree_util.keystr(path, simple=True, separator='.'))
    name = f'state.{name}'
    if name in out:
      raise ValueError(f'two leaves of the state are named {name!r}')
    if isinstance(leaf, (bool, int, float, np.generic)):
      leaf = np.asarray(leaf)
    elif _is_key(leaf):
      data = jax.random.key_data
      is_array = isinstance(leaf, jax.Array)
      leaf = data(leaf) if is_array else jax.eval_shape(data, leaf)
    out[name] = leaf
  return out


def _is_key(x) -> bool:
  return isinstance(x, (jax.Array, jax.ShapeDtypeStruct)) and (
    jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
  )


def _size(x) -> int:
  return math.prod(x.shape)


def _describe(x) -> list:
  return [list(x.shape), str(np.dtype(x.dtype))]


def _restore_args(x):
  if isinstance(x, np.ndarray):
    return ocp.RestoreArgs(restore_type=np.ndarray, dtype=x.dtype)
  sharding = x.sharding
  if sharding is None:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return ocp.ArrayRestoreArgs(
    restore_type=jax.Array,
    dtype=x.dtype,
    sharding=sharding,
    global_shape=x.shape,
  )


def _as_target(value, stored, leaf):
  """Converts the restored `value` to the type of the target's `leaf`."""
  if value is None:  # an array without elements is not stored
    value = np.zeros(stored.shape, stored.dtype)
    if not isinstance(stored, np.ndarray):
      value = jax.device_put(value, stored.sharding)
  if isinstance(leaf, (bool, int, float, np.generic)):
    return type(leaf)(value.item())
  if _is_key(leaf):
    if isinstance(leaf, jax.Array):
      return jax.random.wrap_key_data(value, impl=jax.random.key_impl(leaf))
    # JAX has no public way to get the implementation of a ShapeDtypeStruct.
    return jax.random.wrap_key_data(value, impl=leaf.dtype._impl)
  return value


def compare(path, saved, ours):
  """Raises CheckpointError naming the fields in which two runs differ."""
  show = lambda value: '(absent)' if value is None else repr(value)
  fields = differences(saved, json.loads(json.dumps(dict(ours))))
  lines = [
    f'{k}: {show(a)} there, {show(b)} here' for k, (a, b) in fields.items()
  ]
  if lines:
    raise CheckpointError(
      f'{path} belongs to another model or config: ' + '; '.join(lines)
    )


def _compare_trees(path, saved, wanted):
  show = lambda d: 'absent' if d is None else f'{tuple(d[0])} {d[1]}'
  lines = [
    f'{k}: {show(saved.get(k))} there, {show(wanted.get(k))} here'
    for k in sorted(saved.keys() | wanted.keys())
    if saved.get(k) != wanted.get(k)
  ]
  if lines:
    more = f' (and {len(lines) - 5} more)' if len(lines) > 5 else ''
    raise CheckpointError(
      f'{path} holds another state: {"; ".join(lines[:5])}{more}'
    )
