"""Publishes versions of the weights on disk, for the engines to load.

    <folder>/00000012/arrays/state.layers.q/...    one zarr store each
    <folder>/00000012/meta/meta.json               config, dtype, checksums

A version is an Orbax checkpoint of the parameters alone, cast to the dtype of
the engine, in chunks of one layer. A version's folder appears only when it is
complete. `weights.published` reads it.
"""

import jax

from searchrl_jax.engines.weights import checksum, published
from searchrl_jax.models import decoder, families
from searchrl_jax.models.decoder import DecoderConfig
from searchrl_jax.run import checkpoint, cluster


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

  def publish(self, params: dict, version: int) -> published.Published:
    """Writes a version, shard by shard; returns when it is complete.

    Replaces an existing publication of the same version: it may be incomplete,
    or have been written before a resume.

    Raises:
      ValueError: parameters that are not those of the model, by name.
      CheckpointError: the disk; other versions are unchanged.
    """
    decoder.flatten_checked(self._cfg, params)
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

  def path(self, version: int):
    return self._files.folder / f'{version:08d}'

  def prune(self, acknowledged: int) -> None:
    """Deletes versions before `acknowledged`, which every server has loaded."""
    self._files.delete([v for v in self._files.steps() if v < acknowledged])

  def clear(self) -> None:
    """Deletes the versions that this process wrote.

    Another may use the folder: `ask` about a run that is being trained.
    """
    self._files.delete(self._written.intersection(self._files.steps()))
