"""Checkpoints by Orbax: everything that a run needs to go on exactly.

One folder for each step. Orbax writes it beside its place and renames it, so
that what stands under a step's name is whole; a checkpoint to be deleted is
renamed first, for the same reason. Arrays are written as plain uncompressed
zarr in chunks: Orbax's default store (OCDBT) keeps the whole compressed state
in host memory until the end of a save, 1.2 GB for a state of 1.35 GB where
chunked zarr took 0.1 to 0.25, and took longer.

    <folder>/00000050/arrays/...            one zarr store for each leaf
    <folder>/00000050/meta/meta.json        step, extras, metrics, shapes

`hf.save` exports the parameters for others to read.
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

FORMAT = 2  # of what `meta` holds and how leaves are named
_STEP = re.compile(r'\d{8}')
_LEFT = re.compile(r'\d{8}\.(orbax-checkpoint-tmp.*|deleted)')
_CHUNK = 32 << 20  # bytes in a file
_BUDGET = 256 << 20  # bytes on their way to or from the host, at least


class CheckpointError(RuntimeError):
  """A checkpoint that cannot be written, or that is not for this run."""


@dataclasses.dataclass(frozen=True)
class Restored:
  step: int
  state: Any  # as the target, with its shardings
  extras: dict[str, Any]
  arrays: dict[str, np.ndarray]
  metrics: dict[str, float]
  seconds: float


class Checkpointer:
  """Saves and restores the steps of one run.

  Args:
    folder: made if absent.
    keep: how many of the last steps stay; None = all, until `delete`.
    best: the name of a metric (higher is better) whose best step stays too;
      '' = none.
  """

  def __init__(self, folder, keep: int | None, best: str):
    if keep is not None and keep < 1:
      raise ValueError(f'config.checkpoint.keep={keep}: at least 1')
    # Orbax asks for absolute paths.
    self.folder = pathlib.Path(folder).absolute()
    self.keep = keep
    self.best_metric = best

  def steps(self) -> list[int]:
    """The steps of whole checkpoints, in order."""
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
    """The step with the best metric (of equals, the last), if any has it."""
    scored = [
      (value, step)
      for step in self.steps()
      if (value := self.meta(step)['metrics'].get(self.best_metric)) is not None
      and math.isfinite(value)
    ]
    return max(scored)[1] if scored else None

  def meta(self, step: int) -> dict[str, Any]:
    """What stands beside the arrays of a step; reads no array.

    Raises:
      CheckpointError: none there, unreadable, or of another format version.
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
    """Writes one step, then deletes those no longer kept. Returns seconds.

    Host memory: the largest array of the state plus some 0.3 GB.

    Args:
      state: a pytree of arrays and numbers (params, opt_state, step).
      extras: JSON (data cursor, random seeds, pools, weights version).
      metrics: of the last evaluation; chooses the best step.
      fingerprint: JSON; what a run must share to restore this.
      arrays: further numpy arrays by name (bytes: `np.frombuffer`).
      split: leaves whose name starts with one of these ('state.layers.') are
        written in chunks of one index of their first axis at most, for who
        reads them one by one.

    Raises:
      FileExistsError: this step is there already.
      CheckpointError: the disk; earlier checkpoints are as they were.
    """
    start = time.monotonic()
    path = self._path(step)
    if path.exists():
      raise FileExistsError(f'{path} exists: step {step} was saved before')
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
    meta = json.loads(json.dumps(meta))  # or a TypeError, before any write
    item = {k: v for k, v in (leaves | extra_arrays).items() if _size(v)}
    self._clean()
    try:
      self.folder.mkdir(parents=True, exist_ok=True)
      with _quiet(), ocp.Checkpointer(_handler(item)) as writer:
        writer.save(
          path,
          args=ocp.args.Composite(
            arrays=ocp.args.PyTreeSave(
              item,
              save_args={
                k: ocp.SaveArgs(
                  chunk_byte_size=_CHUNK, shard_axes=(0,) * k.startswith(split)
                )
                for k in item
              },
            ),
            meta=ocp.args.JsonSave(meta),
          ),
        )
    # Orbax passes on what its writers raise: OSError, ValueError (with a
    # status in the text) or JaxRuntimeError, for one and the same full disk.
    except Exception as e:
      # Orbax may still have writers at work in the folder of this step: what
      # they leave goes with the next save.
      self._clean(ignore_errors=True)
      free = (
        shutil.disk_usage(self.folder).free if (self.folder.exists()) else 0
      )
      raise CheckpointError(
        f'saving step {step} to {path} failed ({free / 1e9:.2f} GB free '
        f'there): {e}; checkpoints {self.steps()} are intact'
      ) from e
    self._delete_old()
    return time.monotonic() - start

  def delete(self, steps: Iterable[int]) -> None:
    """Removes checkpoints; one that is half removed is no checkpoint."""
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
        the default device), numpy arrays and numbers.
      step: a step, 'latest' or 'best'.
      fingerprint: compared with the saved one, unless None.
      partial: the checkpoint may hold more than the target asks for.

    Raises:
      CheckpointError: there is none, or it is of another model or config; the
        message names the field or the array that differs.
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
    with ocp.Checkpointer(_handler(item)) as reader:
      found = reader.restore(
        path,
        args=ocp.args.Composite(
          arrays=ocp.args.PyTreeRestore(
            item=item,
            restore_args={k: _restore_args(v) for k, v in item.items()},
            partial_restore=True,
          )
        ),
      )['arrays']
    flat = [
      _as_target(found.get(name), leaves[name], leaf)
      for name, leaf in zip(leaves, jax.tree.leaves(target))
    ]
    return Restored(
      step=step,
      state=jax.tree.unflatten(jax.tree.structure(target), flat),
      extras=meta['extras'],
      arrays={
        name: found[key] if key in found else np.zeros(shape, dtype)
        for name, (key, shape, dtype) in arrays.items()
      },
      metrics=meta['metrics'],
      seconds=time.monotonic() - start,
    )

  def _path(self, step: int) -> pathlib.Path:
    return self.folder / f'{step:08d}'

  def resolve(self, step: int | str) -> int:
    """The step that a number, its digits, 'latest' or 'best' names.

    Raises:
      CheckpointError: there is none.
    """
    found = int(step) if str(step).isdigit() else step
    if step == 'latest':
      found = self.latest()
    elif step == 'best':
      found = self.best()
    if found not in self.steps():
      what = f' with metric {self.best_metric!r}' if step == 'best' else ''
      raise CheckpointError(
        f'no checkpoint {step!r}{what} in {self.folder}; there are steps '
        f'{self.steps()}'
      )
    return found

  def _delete_old(self):
    steps = self.steps()
    kept = set(steps if self.keep is None else steps[-self.keep :])
    if self.best_metric:
      kept.add(self.best())
    self.delete(set(steps) - kept)

  def _clean(self, ignore_errors: bool = False):
    """Removes what killed saves and deletions left behind."""
    if jax.process_index() == 0 and self.folder.is_dir():
      for path in self.folder.iterdir():
        if _LEFT.fullmatch(path.name):
          shutil.rmtree(path, ignore_errors=ignore_errors)


@contextlib.contextmanager
def _quiet():
  """Drops Orbax's warning, at every save, that no OCDBT is there to merge."""
  drop = lambda record: 'merge of OCDBT' not in str(record.msg)
  logger = logging.get_absl_logger()
  logger.addFilter(drop)
  try:
    yield
  finally:
    logger.removeFilter(drop)


def _handler(item: Mapping[str, Any]) -> ocp.CompositeCheckpointHandler:
  """Reads and writes with a bound on what is on its way through the host."""
  largest = max(
    (_size(v) * _dtype(v).itemsize for v in item.values()), default=0
  )
  options = {
    'use_ocdbt': False,
    'use_zarr3': False,
    'use_compression': False,
    'multiprocessing_options': ocp.options.MultiprocessingOptions(),
  }
  impl = ocp.BasePyTreeCheckpointHandler(
    # A batch must be smaller than the budget, an array is never split.
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

  Typed random keys become the integers behind them, numbers become arrays.
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
      leaf = (
        data(leaf)
        if isinstance(leaf, jax.Array)
        else (jax.eval_shape(data, leaf))
      )
    out[name] = leaf
  return out


def _is_key(x) -> bool:
  return isinstance(x, (jax.Array, jax.ShapeDtypeStruct)) and (
    jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
  )


def _dtype(x) -> np.dtype:
  return np.dtype(x.dtype)


def _size(x) -> int:
  return math.prod(x.shape)


def _describe(x) -> list:
  return [list(x.shape), str(_dtype(x))]


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
  """The restored `value` as the type of the target's own `leaf`."""
  if value is None:  # no elements, so nothing was stored
    value = np.zeros(stored.shape, stored.dtype)
    if not isinstance(stored, np.ndarray):
      value = jax.device_put(value, stored.sharding)
  if isinstance(leaf, (bool, int, float, np.generic)):
    return type(leaf)(value.item())
  if _is_key(leaf):
    impl = (
      jax.random.key_impl(leaf)
      if isinstance(leaf, jax.Array)
      else (leaf.dtype._impl)
    )  # a ShapeDtypeStruct has no public way to say it
    return jax.random.wrap_key_data(value, impl=impl)
  return value


def _flat_json(value, prefix: str = '') -> dict[str, Any]:
  if not isinstance(value, dict) or not value:
    return {prefix: value}
  out = {}
  for k, v in value.items():
    out |= _flat_json(v, f'{prefix}.{k}' if prefix else str(k))
  return out


def compare(path, saved, ours):
  """Raises CheckpointError naming the fields in which two runs differ."""
  ours = _flat_json(json.loads(json.dumps(dict(ours))))
  saved = _flat_json(saved)
  absent = object()
  lines = [
    f'{k}: {saved.get(k, "(absent)")!r} there, {ours.get(k, "(absent)")!r} here'
    for k in sorted(saved.keys() | ours.keys())
    if saved.get(k, absent) != ours.get(k, absent)
  ]
  if lines:
    raise CheckpointError(
      f'{path} is of another model or config: ' + '; '.join(lines)
    )


def _compare_trees(path, saved, wanted):
  lines = []
  for name in sorted(saved.keys() | wanted.keys()):
    there, here = saved.get(name), wanted.get(name)
    if there != here:
      show = [
        'absent' if d is None else f'{tuple(d[0])} {d[1]}'
        for d in (there, here)
      ]
      lines.append(f'{name}: {show[0]} there, {show[1]} here')
  if lines:
    more = f' (and {len(lines) - 5} more)' if len(lines) > 5 else ''
    raise CheckpointError(
      f'{path} holds another state: {"; ".join(lines[:5])}{more}'
    )
