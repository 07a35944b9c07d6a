"""Reads a published version of the weights, tensor by tensor, without JAX.

`publication.Publisher` in the trainer writes the files. This module reads them
on any host that sees the folder, for example inside a vLLM worker, which has
NumPy, tensorstore and what `delta` needs, but neither JAX nor Orbax.
"""

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import functools
import json
import math
import pathlib
from typing import Any, Literal

import numpy as np
import tensorstore as ts

from searchrl_jax import lookup
from searchrl_jax.models import families, hf_config, hf_tensors

FORMAT = 5  # of a publication: its metadata, and how tensors are stored
PREFIX = 'state'  # of the names of stores


class PublishedError(RuntimeError):
  """A publication that is absent, damaged or of another format."""


@dataclasses.dataclass(frozen=True)
class Weights:
  """Tensors in a folder: adapters as PEFT writes them, of a scale of 1."""

  path: pathlib.Path
  dtype: str
  checksums: Mapping[str, str]  # our tensor name -> checksum
  shapes: Mapping[str, tuple[int, ...]]  # our tensor name -> shape

  @property
  def bytes(self) -> int:
    elements = sum(map(math.prod, self.shapes.values()))
    return elements * (4 if self.dtype == 'float32' else 2)


@dataclasses.dataclass(frozen=True)
class Delta:
  """A folder with what changed since another version, see `weights.delta`."""

  path: pathlib.Path
  bytes: int


@dataclasses.dataclass(frozen=True)
class Published(Weights):
  """One version; `tensors` reads its arrays."""

  version: int
  config: Mapping[str, Any]  # families.FIELDS of the model
  adapter: Weights | None = None  # on these weights, of the same version
  delta: Delta | None = None  # which a server has to apply to `path` first

  @property
  def sent(self) -> int:
    """Bytes that were written for the servers."""
    return self.delta.bytes if self.delta else self.bytes

  @functools.cached_property
  def table(self) -> dict[str, hf_tensors.Tensor]:
    """Every tensor by its Hugging Face name, in the order of the layers.

    A tied head is not included.
    """
    return hf_tensors.table(self.shapes, self.config)

  def tensors(self, tied: bool = False) -> Iterator[tuple[str, np.ndarray]]:
    """(Hugging Face name, array) of each, one in memory at a time.

    A tied model yields its embedding a second time, as the head, since a server
    may store the two separately; `tied`: it does not. An array that one process
    of the trainer wrote is a map of its file: only what is used of it is read.
    """
    for name in self.table:
      yield name, self.read(name)
    if self.config['tied'] and not tied:
      yield hf_tensors.TIED_HEAD, self.read(next(iter(self.table)))  # embedding

  def read(self, name: str, mode: Literal['c', 'r+'] = 'c') -> np.ndarray:
    """A tensor by its Hugging Face name, in that layout.

    mode: 'r+': what is written to the array is written to its file.

    Raises:
      KeyError: there is no such tensor.
      PublishedError: it is missing, damaged or of another shape.
    """
    store, shape = self.open(name), self.table[name].shape
    with self._checked(name):
      if store.chunk_layout.read_chunk.shape != shape:  # several shards
        return store.read().result()
      file = self._folder(name) / '.'.join('0' * len(shape))
      dtype = store.dtype.numpy_dtype
      # Else a private map: torch warns of arrays that it could not write to.
      return np.memmap(file, dtype, mode, shape=shape)

  def dtype_of(self, name: str) -> str:
    """Of a tensor by its Hugging Face name."""
    path = self.table[name].path
    return families.dtype_of(path, self.dtype, families.SERVED)

  def open(self, name: str) -> ts.TensorStore:
    """The store of a tensor; reads only its description.

    Raises:
      PublishedError: it is missing or of another shape or dtype.
    """
    kvstore = {'driver': 'file', 'path': str(self._folder(name))}
    # Otherwise a missing chunk would read as zeros.
    spec = dict(driver='zarr', kvstore=kvstore, fill_missing_data_reads=False)
    dtype, shape = ts.dtype(self.dtype_of(name)), self.table[name].shape
    expected = dict(dtype=dtype, shape=shape)
    with self._checked(name):
      return ts.open(spec, open=True, read=True, **expected).result()

  def _folder(self, name: str) -> pathlib.Path:
    return self.path / 'arrays' / f'{PREFIX}.{name}'

  @contextlib.contextmanager
  def _checked(self, name: str) -> Iterator[None]:
    """Names the tensor in an error of reading it."""
    try:
      yield
    except (OSError, ValueError) as e:
      line = str(e).partition('\n')[0]
      tensor = f'tensor {self.table[name].path!r} ({name})'
      what = f'{self.path}: {tensor} is missing or damaged'
      fix = f'publish version {self.version} again'
      raise PublishedError(f'{what} ({line}); {fix}') from e


def open_published(path) -> Published:
  """The publication in a version's folder.

  Raises:
    PublishedError: the folder is absent (the message lists the versions that
      exist), incomplete or of another format; or a tensor is missing or of
      another shape.
  """
  path = pathlib.Path(path)
  try:
    meta = json.loads((path / 'meta' / 'meta.json').read_text())
    format_ = meta['extras'].pop('published')
    if format_ != FORMAT:
      raise ValueError(f'format {format_}; this code reads {FORMAT}')
    shapes = {k: tuple(v) for k, v in meta['extras'].pop('shapes').items()}
    out = Published(path, **meta['extras'], shapes=shapes)
  except (OSError, ValueError, LookupError, TypeError) as e:
    raise PublishedError(
      f'{path} is no complete publication ({e!r}); beside it there are '
      f'{sorted(p.name for p in path.parent.glob("*"))}. Run trainer and '
      'server from the same commit'
    ) from e
  for name in out.table:
    out.open(name)
  return out


def write_serving_folder(
  path, config: Mapping[str, Any], tokenizer_dir, dtype: str, max_len: int = 0
) -> None:
  """Writes the folder that a server starts on before it gets weights.

  It contains config.json and the tokenizer.

  Args:
    config: families.FIELDS of the model.
    tokenizer_dir: a folder with the tokenizer's files.
    dtype: of the weights.
    max_len: tokens of a sequence. A server refuses more than config.json
      states, and no log-prob depends on that.

  Raises:
    ValueError: a model that no server can represent.
  """
  n, H, D = (config[name] for name in ('n_heads', 'head_dim', 'd_model'))
  what = f'n_heads={n} times head_dim={H} is {n * H}, d_model is {D}'
  why = 'vLLM computes the head_dim of a Qwen2 as d_model / n_heads'
  good = n * H == D or config['family'] != 'qwen2'
  lookup.require(good, f'{what}: {why}; make them equal')
  fields = hf_config.format_config(config, dtype=dtype)
  field = 'max_position_embeddings'
  text = json.dumps(fields | {field: max(fields[field], max_len)}, indent=2)
  path = pathlib.Path(path)
  path.mkdir(parents=True, exist_ok=True)
  families.copy_tokenizer(tokenizer_dir, path)
  (path / 'config.json').write_text(f'{text}\n')
