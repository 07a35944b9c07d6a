"""A published version of the weights, read tensor by tensor and without JAX.

The trainer's `publication.Publisher` writes what is read here, on any host
that sees the folder: inside a vLLM worker, which has numpy and tensorstore
but neither JAX nor Orbax.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import functools
import json
import pathlib
import re
import shutil
from typing import Any

import numpy as np
import tensorstore as ts

from searchrl_jax.models import families

FORMAT = 1  # of a publication: its extras, and how tensors are stored
PREFIX = 'state'  # of the names of stores
_VERSION = re.compile(r'\d{8}')
# Whatever a tokenizer may consist of.
_TOKENIZER = (
  'tokenizer*',
  'vocab.json',
  'merges.txt',
  'special_tokens_map.json',
  'added_tokens.json',
  'chat_template*',
  'generation_config.json',
)


class PublishedError(RuntimeError):
  """A publication that is absent, damaged or of another format."""


@dataclasses.dataclass(frozen=True)
class Published:
  """One version; nothing is read before a tensor is asked for."""

  path: pathlib.Path
  version: int
  dtype: str
  config: Mapping[str, Any]  # families.FIELDS of the model
  manifest: Mapping[str, str]  # our tensor name -> checksum
  shapes: Mapping[str, tuple[int, ...]]  # our tensor name -> shape

  @functools.cached_property
  def table(self) -> dict[str, families.Tensor]:
    """Every tensor by its Hugging Face name, in the order of the layers.

    A tied head is not among them.
    """
    return families.tensors(self.shapes)

  @property
  def names(self) -> list[str]:
    """The Hugging Face names that `tensors` gives: with a tied head."""
    return [*self.table, *[families.TIED_HEAD] * self.config['tied']]

  def read(self, name: str) -> np.ndarray:
    """A tensor by its Hugging Face name, in that layout; not contiguous.

    Raises:
      KeyError: there is no such tensor.
      PublishedError: it is missing, damaged or of another shape.
    """
    if name == families.TIED_HEAD and self.config['tied']:
      name = next(iter(self.table))  # the embedding stands first
    tensor = self.table[name]
    store = self.open(tensor.path)
    if tensor.layer is not None:
      store = store[tensor.layer]
    try:
      return tensor.to_hf(store.read().result())
    except ValueError as e:
      raise PublishedError(
        f'{self.path}: tensor {tensor.path!r} ({name}) is damaged or half '
        f'written ({_first_line(e)}); publish version {self.version} again'
      ) from e

  def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
    """(Hugging Face name, array) of each, one in memory at a time.

    A tied model gives its embedding a second time, as the head: a server
    that holds the two apart needs both.
    """
    for name in self.names:
      yield name, self.read(name)

  def open(self, name: str) -> ts.TensorStore:
    """The store of a tensor by our name; reads its description only.

    Raises:
      PublishedError: it is missing or of another shape or dtype.
    """
    folder = self.path / 'arrays' / f'{PREFIX}.{name.replace("/", ".")}'
    try:
      store = ts.open(
        {
          'driver': 'zarr',
          'kvstore': {'driver': 'file', 'path': str(folder)},
          # Or a chunk that is gone would read as zeros.
          'fill_missing_data_reads': False,
        },
        open=True,
        read=True,
      ).result()
    except ValueError as e:
      raise PublishedError(
        f'{self.path}: tensor {name!r} is missing or damaged '
        f'({_first_line(e)}); publish version {self.version} again'
      ) from e
    found = (tuple(store.shape), store.dtype.name)
    if found != (self.shapes[name], self.dtype):
      raise PublishedError(
        f'{self.path}: tensor {name!r} is {found}, expected '
        f'{(self.shapes[name], self.dtype)}; publish version {self.version} '
        'again'
      )
    return store


def versions(folder) -> list[int]:
  """The versions that stand in a folder of publications, in order."""
  folder = pathlib.Path(folder)
  if not folder.is_dir():
    return []
  return sorted(
    int(p.name)
    for p in folder.iterdir()
    if _VERSION.fullmatch(p.name) and p.is_dir()
  )


def open_published(path) -> Published:
  """The publication in a version's folder.

  Raises:
    PublishedError: there is none (says which there are), or one that is half
      written or of another format; or a tensor is missing or misshapen.
  """
  path = pathlib.Path(path)
  if not path.is_dir():
    raise PublishedError(
      f'{path}: no such version; there are versions {versions(path.parent)} '
      f'in {path.parent}'
    )
  file = path / 'meta' / 'meta.json'
  try:
    meta = json.loads(file.read_text())
    extras, tree = meta['extras'], meta['tree']
    found = extras['published']
    if found != FORMAT:
      raise PublishedError(
        f'{file}: a publication of format {found!r}; this code reads '
        f'{FORMAT}: run trainer and server from the same commit'
      )
    out = Published(
      path=path,
      version=extras['version'],
      dtype=extras['dtype'],
      config=extras['config'],
      manifest=extras['manifest'],
      shapes={
        k.removeprefix(f'{PREFIX}.').replace('.', '/'): tuple(shape)
        for k, (shape, _) in tree.items()
      },
    )
  except (OSError, ValueError, KeyError, TypeError) as e:
    raise PublishedError(
      f'{file}: cannot be read ({e!r}): no publication, or half of one; there '
      f'are versions {versions(path.parent)} in {path.parent}'
    ) from e
  for name in out.shapes:
    out.open(name)
  return out


def write_serving_folder(
  path, config: Mapping[str, Any], tokenizer_dir, dtype: str
) -> None:
  """What a server starts on before any weights: config.json and tokenizer.

  Args:
    config: families.FIELDS of the model.
    tokenizer_dir: a folder with the tokenizer's files.
    dtype: of the weights.

  Raises:
    ValueError: a model that no family, or no server, can hold.
    FileNotFoundError: no tokenizer there.
  """
  width = config['n_heads'] * config['head_dim']
  if config['qkv_bias'] and width != config['d_model']:
    raise ValueError(
      f'n_heads={config["n_heads"]} times head_dim={config["head_dim"]} is '
      f'{width}, d_model is {config["d_model"]}: vLLM takes d_model / n_heads '
      'for the head_dim of a Qwen2; make them equal'
    )
  path, source = pathlib.Path(path), pathlib.Path(tokenizer_dir)
  files = {f for glob in _TOKENIZER for f in source.glob(glob)}
  if not files:
    raise FileNotFoundError(
      f'{source}: no tokenizer files (tokenizer.json, or vocab.json and '
      'merges.txt)'
    )
  text = json.dumps(families.format_config(config, dtype=dtype), indent=2)
  path.mkdir(parents=True, exist_ok=True)
  (path / 'config.json').write_text(f'{text}\n')
  for file in files:
    shutil.copyfile(file, path / file.name)


def _first_line(e: Exception) -> str:
  return str(e).partition('\n')[0]
