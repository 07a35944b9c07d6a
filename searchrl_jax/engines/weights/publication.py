"""Publishes versions of the weights on disk, for the engines to load.

    <folder>/00000012/arrays/state.layers.q/...    one zarr store each
    <folder>/00000012/meta/meta.json               config, dtype, checksums

A version is an Orbax checkpoint of the parameters alone, cast to the dtype of
the engine, in chunks of one layer. A version's folder appears only when it is
complete. `weights.published` reads it.
"""

import pathlib
import shutil

import jax

from searchrl_jax.engines.weights import checksum, published
from searchrl_jax.models import decoder, families, lora
from searchrl_jax.models.decoder import DecoderConfig
from searchrl_jax.run import checkpoint, cluster

_ADAPTERS = 'adapters'  # below the folder: adapters, a folder for each version


class Publisher:
  """Writes versions into a folder and deletes old ones.

  Several processes call `publish` together; each writes its shards.

  Args:
    folder: made if absent; engines must see it under the same path.
    cfg: of the model.
    dtype: the engine's; parameters are cast to it on their devices.
  """

  def __init__(self, folder, cfg: DecoderConfig, dtype: str):
    self._files = checkpoint.Checkpointer(folder, None, '')
    self._cfg, self._dtype = cfg, dtype
    self._written: set[int] = set()  # versions
    self._adapters: dict[int, pathlib.Path] = {}  # version -> folder

  def publish(self, params: dict, version: int) -> published.Published:
    """Writes a version, shard by shard; returns when it is complete.

    Replaces an existing publication of the same version: it may be incomplete,
    or have been written before a resume.

    Raises:
      ValueError: parameters that are not those of the model, by name.
      CheckpointError: the disk; other versions are unchanged.
    """
    decoder.flatten_checked(lora.base(self._cfg), params)
    params = jax.tree.map(lambda x: x.astype(self._dtype), params)
    flat = decoder.flatten(params)
    extras = {
      'version': version,
      'dtype': self._dtype,
      'config': families.fields(self._cfg),
      'manifest': checksum.checksums(flat),
    }
    path = self.path(version)
    old = [version] if path.exists() else []
    cluster.first('publication', lambda: self._files.delete(old))
    self._files.save(
      version,
      params,
      extras={'published': published.FORMAT, **extras},
      metrics={},
      fingerprint={},
      split=(f'{published.PREFIX}.layers.',),
    )
    self._written.add(version)
    shapes = {name: tuple(x.shape) for name, x in flat.items()}
    return published.Published(path, **extras, shapes=shapes)

  def publish_adapter(self, adapters: dict, version: int) -> published.Adapter:
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
    return published.Adapter(
      path,
      self._dtype,
      manifest=checksum.checksums(flat),
      shapes={name: tuple(x.shape) for name, x in flat.items()},
    )

  def path(self, version: int):
    return self._files.folder / f'{version:08d}'

  def prune(self, acknowledged: int) -> None:
    """Deletes versions before `acknowledged`, which every server has loaded.

    With adapters, the version that they are on stays.
    """
    base = acknowledged
    if self._adapters:
      base = max(self._written)
    self._files.delete([v for v in self._files.steps() if v < base])
    self._delete_adapters([v for v in self._adapters if v < acknowledged])

  def clear(self) -> None:
    """Deletes the versions that this process wrote.

    Another may use the folder: `ask` about a run that is being trained.
    """
    self._files.delete(self._written.intersection(self._files.steps()))
    self._delete_adapters([*self._adapters])

  def _delete_adapters(self, versions: list[int]) -> None:
    for version in versions:
      shutil.rmtree(self._adapters.pop(version), ignore_errors=True)
