"""Weights by version on disk: how the trainer hands them to its engines.

    <folder>/00000012/arrays/state.layers.q/...    one zarr store each
    <folder>/00000012/meta/meta.json               config, dtype, checksums

A version is an Orbax checkpoint of the parameters alone, cast to the dtype of
the engine, in chunks of one layer. It appears whole or not at all; engines
read it by `engines.published`.
"""

from collections.abc import Mapping
import dataclasses
import pathlib
import time

import jax

from searchrl_jax.engines.weights import checksum, published
from searchrl_jax.models import decoder, families
from searchrl_jax.models.decoder import DecoderConfig
from searchrl_jax.run import checkpoint


@dataclasses.dataclass(frozen=True)
class Publication:
  path: pathlib.Path
  version: int
  manifest: Mapping[str, str]  # our tensor name -> its checksum
  bytes: int
  seconds: float


class Publisher:
  """Writes versions into a folder and deletes those that are done with.

  Args:
    folder: made if absent; engines must see it under the same path.
    cfg: of the model.
    dtype: the engine's; parameters are cast to it where they lie.
  """

  def __init__(self, folder, cfg: DecoderConfig, dtype: str):
    self._files = checkpoint.Checkpointer(folder, None, '')
    self._shapes = {k: s for k, (s, _) in decoder.param_table(cfg).items()}
    fields = dataclasses.asdict(cfg)
    self._config = {name: fields[name] for name in families.FIELDS}
    self._dtype = dtype
    self._written: set[int] = set()  # versions

  def publish(self, params: dict, version: int) -> Publication:
    """Writes a version, shard by shard; returns when it stands whole.

    What stands of the same version is removed first: no engine may load
    weights that this version no longer means, or what a kill left of them.

    Raises:
      ValueError: parameters that are not those of the model, by name.
      CheckpointError: the disk; other versions are as they were.
    """
    start = time.monotonic()
    self._check(decoder.flatten(params))
    params = jax.tree.map(lambda x: x.astype(self._dtype), params)
    flat = decoder.flatten(params)
    extras = {
      'published': published.FORMAT,
      'version': version,
      'dtype': self._dtype,
      'config': self._config,
      'manifest': checksum.checksums(flat),
    }
    path = self.path(version)
    if path.exists():
      self._files.delete([version])
    self._files.save(
      version,
      params,
      extras=extras,
      metrics={},
      fingerprint={},
      split=(f'{published.PREFIX}.layers.',),
    )
    self._written.add(version)
    return Publication(
      path,
      version,
      extras['manifest'],
      sum(x.nbytes for x in flat.values()),
      time.monotonic() - start,
    )

  def path(self, version: int) -> pathlib.Path:
    return self._files.folder / f'{version:08d}'

  def prune(self, acknowledged: int) -> None:
    """Deletes versions before `acknowledged`, which every server has."""
    self._files.delete([v for v in self._files.steps() if v < acknowledged])

  def clear(self) -> None:
    """Deletes the versions that this process wrote."""
    self._files.delete([v for v in self._files.steps() if v in self._written])
    self._written.clear()

  def _check(self, flat: dict) -> None:
    for name in sorted(self._shapes.keys() | flat.keys()):
      want = self._shapes.get(name)
      have = tuple(flat[name].shape) if name in flat else None
      if want != have:
        raise ValueError(
          f'parameter {name!r} has shape {have}; the config asks for {want}'
        )
