"""Publishes versions of the weights on disk, for the engines to load.

    <folder>/00000012/arrays/state.model.norm.weight/...    zarr, one for each
    <folder>/00000012/meta/meta.json                config, dtype, checksums

A version is an Orbax checkpoint of the tensors as a server stores them: in the
Hugging Face names and layout, in the dtype of the engine. They are converted on
their devices, some at a time, and cross the host once; what one process has as
a whole is one file, which a server maps. A version's folder appears only when
it is complete. `weights.published` reads it. With `Publisher.publish_delta`, a
version is what changed since the last one (`weights.delta`).
"""

from collections.abc import Mapping
from concurrent import futures
import dataclasses
import functools
import os
import pathlib
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np

from searchrl_jax.devices import cluster, sharding
from searchrl_jax.engines.core import DeltaError
from searchrl_jax.engines.weights import checksum, delta, memory, published
from searchrl_jax.models import decoder, families, hf_tensors, lora
from searchrl_jax.models.decoder import DecoderConfig
from searchrl_jax.store import checkpoint

_ADAPTERS = 'adapters'  # below the folder: adapters, a folder for each version
_ROOM = 3  # copies that memory must hold: during a sync there are two
_THREADS = 8  # that compare; each holds a tensor
_MOST = 0.5  # of all bytes, above which all are published


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _convert(x, layer, tensor: hf_tensors.Tensor, dtype, where):
  x = tensor.to_hf(x if layer is None else x[layer]).astype(dtype)
  return x if where is None else jax.lax.with_sharding_constraint(x, where)


def _served(x, tensor: hf_tensors.Tensor, dtype, turn: int) -> jax.Array:
  """A tensor of our array as a server stores it.

  If this process has all shards, the devices gather it, and the host takes it
  from one of them: in turns, so that all links to the host are used.
  """
  gather = x.is_fully_addressable and not x.is_fully_replicated
  where = sharding.replicated(x.sharding.mesh) if gather else None
  if where or x.shape != tensor.shape or x.dtype != dtype or tensor.n_in:
    kind = dataclasses.replace(tensor, name='', layer=None)  # compiled once
    x = _convert(x, tensor.layer, kind, dtype, where)
  if x.is_fully_addressable:
    x = x.addressable_shards[turn % len(x.addressable_shards)].data
  return x


def _checksums(flat, dtype: str, known: Mapping[str, str] | None):
  if known is None:
    return checksum.checksums(flat, dtype, families.SERVED)
  return {name: known[name] for name in flat}


class Publisher:
  """Writes versions into a folder and deletes old ones.

  Several processes call `publish` together; each writes its shards.

  Args:
    folder: made if absent; engines must see it under the same path.
    cfg: of the model.
    dtype: the engine's; parameters are cast to it on their devices.
    in_memory: a folder in memory, used instead if it has room; '' = none.
  """

  def __init__(self, folder, cfg: DecoderConfig, dtype: str, in_memory=''):
    self._files = checkpoint.Checkpointer(folder, None, '')
    self._cfg, self._dtype, self._in_memory = cfg, dtype, in_memory
    self._memory: memory.Folder | None = None
    self._written: set[int] = set()  # versions
    self._adapters: dict[int, pathlib.Path] = {}  # version -> folder
    self._last: published.Published | None = None  # published
    self._held: published.Published | None = None  # by every server
    self._lock: int | None = None  # of the difference that is in use

  def publish(
    self, params: dict, version: int, checksums: Mapping[str, str] | None = None
  ) -> published.Published:
    """Writes a version, shard by shard; returns when it is complete.

    Replaces an existing publication of the same version: it may be incomplete,
    or have been written before a resume.

    checksums: checksums of the parameters, if they are known; or of more.

    Raises:
      ValueError: parameters that are not those of the model, by name.
      CheckpointError: the disk; other versions are unchanged.
    """
    flat = decoder.flatten_checked(lora.base(self._cfg), params)
    extras = {
      'version': version,
      'dtype': self._dtype,
      'config': families.fields(self._cfg),
      'checksums': _checksums(flat, self._dtype, checksums),
      'shapes': {name: tuple(flat[name].shape) for name in sorted(flat)},
    }
    done = published.Published(pathlib.Path(), **extras)
    tensors = {}
    for i, t in enumerate(done.table.values()):
      dtype = jnp.dtype(done.dtype_of(t.name))
      make = functools.partial(_served, flat[t.path], t, dtype, i)
      tensors[t.name] = checkpoint.Deferred(t.shape, dtype, make)
    self._delete_deltas()
    self._choose(_ROOM * done.bytes)
    path = self.path(version)
    old = [version] if path.exists() else []
    cluster.first('publication', lambda: self._files.delete(old))
    about = {'published': published.FORMAT, **extras}
    self._files.save(version, tensors, extras=about, metrics={}, fingerprint={})
    self._written.add(version)
    self._last = dataclasses.replace(done, path=path)
    return self._last

  def publish_delta(
    self, params: dict, version: int, checksums: Mapping[str, str] | None = None
  ) -> published.Published:
    """Writes what changed since the version that every server holds.

    As `publish`, by one process alone, in a dtype of 16 bits. It is `publish`
    without such a version, for the same one again, and if most bytes changed.

    Returns:
      The publication of that version, which `delta.bring` makes the new one.

    Raises:
      ValueError, CheckpointError: as `publish`.
      DeltaError: that version is lost or damaged, or the disk; `publish` then.
    """
    base, self._held = self._held, None  # until every server has the new one
    if base is None or base.version == version:
      return self.publish(params, version, checksums)
    flat = decoder.flatten_checked(self._cfg, params)
    sums = _checksums(flat, self._dtype, checksums)
    new = dataclasses.replace(base, version=version, checksums=sums)
    try:
      made = self._write_delta(flat, base, new)
    except (published.PublishedError, OSError) as e:
      what = f'what changed since version {base.version}'
      raise DeltaError(f'{what} could not be written: {e}') from e
    if made is None:
      return self.publish(params, version, checksums)
    self._last = dataclasses.replace(new, delta=made)
    return self._last

  def _write_delta(
    self, flat, base: published.Published, new: published.Published
  ) -> published.Delta | None:
    """Writes what changed; None if that is most bytes."""
    dtype, launch = jnp.dtype(self._dtype), threading.Lock()

    def compare(i: int, t: hf_tensors.Tensor) -> bytes:
      with launch:  # all devices must gather in one order
        x = _served(flat[t.path], t, dtype, i)
      bits = np.asarray(x).view(np.uint16)
      old = base.read(t.name).view(np.uint16)
      return delta.encode(old.reshape(-1), bits.reshape(-1))

    with futures.ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
      made = pool.map(compare, range(len(new.table)), new.table.values())
      pieces = {k: v for k, v in zip(new.table, made) if v}
    size = sum(map(len, pieces.values()))
    if size > _MOST * new.bytes:
      return None
    self._delete_deltas()
    path = self.path(new.version).with_suffix(delta.SUFFIX)
    path.mkdir()
    self._lock = memory.lock(path)
    delta.write(path, pieces, base.version, new)
    return published.Delta(path, size)

  def _choose(self, size: int) -> None:
    """Before the first version: uses memory if it has room."""
    parent, self._in_memory = self._in_memory, ''
    self._memory = self._memory or memory.claim(parent, size)
    if parent and self._memory:
      self._files = checkpoint.Checkpointer(self._memory.path, None, '')

  def publish_adapter(
    self,
    adapters: dict,
    version: int,
    checksums: Mapping[str, str] | None = None,
  ) -> published.Weights:
    """Writes adapters alone, see `models.lora`; otherwise as `publish`.

    They must have a scale of 1 (`lora.served`): a server multiplies B by it.
    """
    table = lora.adapter_table(self._cfg)
    adapters = jax.tree.map(lambda x: x.astype(self._dtype), adapters)
    flat = decoder.flatten_checked(self._cfg, adapters, table)
    path = self._files.folder / _ADAPTERS / f'{version:08d}'
    shutil.rmtree(path, ignore_errors=True)
    lora.save(path, self._cfg, adapters, dtype=self._dtype)
    self._adapters[version] = path
    sums = _checksums(flat, self._dtype, checksums)
    shapes = {name: tuple(x.shape) for name, x in flat.items()}
    return published.Weights(path, self._dtype, sums, shapes)

  def path(self, version: int):
    return self._files.folder / f'{version:08d}'

  def prune(self, acknowledged: int) -> None:
    """Deletes versions before `acknowledged`, which every server has loaded.

    With adapters, the version that they are on stays.
    """
    base = acknowledged
    if self._adapters:
      base = max(self._written)
    if self._last and self._last.version == acknowledged:
      self._held = dataclasses.replace(self._last, delta=None)
      base = min(base, int(self._held.path.name))  # it was brought to `version`
    self._files.delete([v for v in self._files.steps() if v < base])
    self._delete_deltas()
    self._delete_adapters([v for v in self._adapters if v < acknowledged])

  def clear(self) -> None:
    """Deletes the versions that this process wrote.

    Another may use the folder: a second `ask` about a run.
    """
    self._files.delete(self._written.intersection(self._files.steps()))
    self._delete_deltas()
    self._delete_adapters([*self._adapters])
    if self._memory:
      self._memory.close()
      self._memory = None

  def _delete_deltas(self) -> None:
    """Deletes differences, also those of processes that were killed.

    What another process has in use stays.
    """
    if self._lock is not None:
      os.close(self._lock)
      self._lock = None
    memory.sweep(self._files.folder, f'*{delta.SUFFIX}')

  def _delete_adapters(self, versions: list[int]) -> None:
    for version in versions:
      shutil.rmtree(self._adapters.pop(version), ignore_errors=True)
