"""Hugging Face checkpoints in and out: config.json and safetensors.

Import and export convert one tensor at a time between the files and the target
sharding: the host holds one shard of one stacked parameter (import) or one
block of rows (export), never the model.
"""

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import errno
import functools
import json
import math
import os
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from searchrl_jax.models import decoder, families, safetensors

_ROWS = 32  # of a file's tensor, transposed at once
_COMPARE_BYTES = 1 << 23  # compared at once
_BLOCK_BYTES = 1 << 26  # exported at once


def read_json(path) -> dict[str, Any]:
  """The config.json of a checkpoint folder.

  Raises:
    FileNotFoundError, ValueError: it is absent, or not a JSON object.
  """
  path = pathlib.Path(path) / 'config.json'
  try:
    value = json.loads(path.read_text())
  except FileNotFoundError as e:
    raise FileNotFoundError(
      f'{path}: no such file; a Hugging Face checkpoint is a folder with a '
      'config.json'
    ) from e
  except ValueError as e:
    raise ValueError(f'{path}: not JSON ({e})') from e
  if not isinstance(value, dict):
    raise ValueError(f'{path}: expected a JSON object')
  return value


def decoder_config(hf: Mapping[str, Any], **flags) -> decoder.DecoderConfig:
  """DecoderConfig from the fields of a config.json.

  flags: fields that a config.json does not have (dtype of activations, remat).

  Raises:
    ValueError: see `families.parse_config`.
  """
  fields = families.parse_config(hf)
  if fields['rope_scaling'] is not None:
    fields['rope_scaling'] = decoder.RopeScaling(**fields['rope_scaling'])
  return decoder.DecoderConfig(**fields, **flags)


def read_config(path, **flags) -> decoder.DecoderConfig:
  """The same, from a checkpoint folder."""
  try:
    return decoder_config(read_json(path), **flags)
  except ValueError as e:
    raise ValueError(f'{path}: {e}') from e


def tensor_table(cfg: decoder.DecoderConfig) -> dict[str, families.Tensor]:
  """Every tensor of the checkpoint of such a model, by its name."""
  return families.tensors(
    {path: shape for path, (shape, _) in decoder.param_table(cfg).items()}
  )


def _check_tensors(path, table, stored):
  """Raises ValueError unless `stored` has exactly the tensors of `table`."""
  for name, tensor in table.items():
    if name not in stored:
      raise ValueError(f'{path}: tensor {name!r} is missing')
    entry, problem = stored[name], ''
    if entry.shape != tensor.shape:
      problem = f'shape {entry.shape}; the config asks for {tensor.shape}'
    elif entry.dtype is None:
      allowed = ', '.join(safetensors.DTYPES)
      problem = f'dtype {entry.dtype_name}; expected one of {allowed}'
    if problem:
      raise ValueError(f'{entry.file}: tensor {name!r} has {problem}')
  for name in sorted(stored.keys() - table.keys()):
    if name == families.TIED_HEAD:
      _check_tied_head(stored[name], stored[next(iter(table))])
    elif not families.ignored(name):
      raise ValueError(
        f'{stored[name].file}: tensor {name!r} is not part of this model '
        '(surplus)'
      )


def _check_tied_head(head: safetensors.Stored, embed: safetensors.Stored):
  """Some writers store the tied head again; it must equal the embedding."""
  same = (head.shape, head.dtype) == (embed.shape, embed.dtype)
  if same:
    a, b = head.open(), embed.open()
    rows = max(1, _COMPARE_BYTES // max(1, a[0].nbytes))
    same = all(
      a[i : i + rows].tobytes() == b[i : i + rows].tobytes()
      for i in range(0, len(a), rows)
    )
  if not same:
    raise ValueError(
      f'{head.file}: tensor {families.TIED_HEAD!r} differs from the '
      'embedding, but config.json says tie_word_embeddings'
    )


def _copy(
  dst: np.ndarray, tensor: families.Tensor, stored: safetensors.Stored, index
):
  """Copies the part of a tensor at `index` of our layout to dst, cast."""
  src = tensor.to_ours(stored.open())[index]
  if not tensor.n_in:
    np.copyto(dst, src, casting='unsafe')
    return
  # Transposing everything at once misses the cache at every element; a few of
  # the file's rows at a time are 3 to 10 times as fast.
  axis = tensor.row_axis
  step = max(1, _ROWS // math.prod(src.shape[axis + 1 :]))
  for i in range(0, src.shape[axis], step):
    part = (slice(None),) * axis + (slice(i, i + step),)
    np.copyto(dst[part], src[part], casting='unsafe')


def _read_shard(stored, tensors, index, shape, dtype) -> np.ndarray:
  """One shard of one of our parameters, from the files."""
  sizes = [len(range(*s.indices(n))) for s, n in zip(index, shape)]
  out = np.empty(sizes, dtype)
  if tensors[0].layer is None:
    _copy(out, tensors[0], stored[tensors[0].name], index)
    return out
  for row, tensor in zip(out, tensors[index[0]]):
    _copy(row, tensor, stored[tensor.name], index[1:])
  return out


def load(
  path, mesh=None, dtype=jnp.float32, cfg: decoder.DecoderConfig | None = None
):
  """(DecoderConfig, params) of a Hugging Face checkpoint folder.

  Checks all files before it allocates memory. Needs host memory for one shard
  of one stacked parameter beyond the parameters themselves.

  Args:
    mesh: parameters are laid out by `decoder.param_shardings`; None puts them
      on the default device.
    dtype: of the parameters.
    cfg: a config to use instead of `read_config(path)`, with other flags
      (activation dtype, remat, ...) but of the same architecture.

  Raises:
    FileNotFoundError, ValueError: an unknown architecture, a file that is
      absent or truncated, a tensor that is missing, surplus or of another
      shape; the message names it.
  """
  path = pathlib.Path(path)
  own = read_config(path)
  cfg = own if cfg is None else cfg
  differ = [
    f'{name}={getattr(own, name)!r}, expected {getattr(cfg, name)!r}'
    for name in families.FIELDS
    if getattr(own, name) != getattr(cfg, name)
  ]
  if differ:
    raise ValueError(f'{path} holds another model: {"; ".join(differ)}')
  table = tensor_table(cfg)
  stored = safetensors.read_folder(path)
  _check_tensors(path, table, stored)
  dtype = np.dtype(dtype)
  shapes = {p: s for p, (s, _) in decoder.param_table(cfg).items()}
  shardings = {}
  if mesh is not None:
    shardings = decoder.flatten(decoder.param_shardings(cfg, mesh))
  flat = {}
  for name, tensors in families.by_path(table):
    read = functools.partial(
      _read_shard, stored, tensors, shape=shapes[name], dtype=dtype
    )
    flat[name] = _place(read, shapes[name], shardings.get(name))
  # In the table's order, as init_params has it.
  return cfg, decoder.nest({p: flat[p] for p in shapes})


def _place(read, shape, sharding):
  """The array whose shard at `index` is read(index); one shard at a time."""
  if sharding is None:
    host = read((slice(None),) * len(shape))
    return jax.block_until_ready(jax.device_put(host, may_alias=False))
  groups: dict[tuple, list] = {}
  for device, index in sharding.addressable_devices_indices_map(shape).items():
    key = tuple(s.indices(n) for s, n in zip(index, shape))
    groups.setdefault(key, []).append((device, index))
  arrays = []
  for members in groups.values():
    host = read(members[0][1])
    arrays += jax.block_until_ready(
      [jax.device_put(host, device, may_alias=False) for device, _ in members]
    )
    del host
  return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def save(
  path,
  cfg: decoder.DecoderConfig,
  params: dict,
  tokenizer_dir=None,
  max_shard_bytes: float = 5e9,
  dtype='float32',
  like: Mapping[str, Any] | None = None,
  overwrite: bool = False,
):
  """Writes a checkpoint that transformers and vLLM load.

  The folder is written beside `path` and renamed, so that it appears only when
  complete. Tensors go to disk in blocks of rows; the host holds one block.

  Args:
    tokenizer_dir: a folder whose tokenizer files are copied along.
    max_shard_bytes: of one file; a larger tensor has a separate file.
    dtype: of the stored tensors: float32, bfloat16 or float16.
    like: a config.json (`read_json`) whose other fields are kept.
    overwrite: replace an existing folder.

  Raises:
    FileExistsError: `path` exists and overwrite is False.
    ValueError: parameters that are not those of `cfg`, by name.
    OSError: the disk; an existing folder at `path` is unchanged.
  """
  path = pathlib.Path(path)
  dtype = np.dtype(dtype)
  if dtype not in safetensors.NAMES:
    raise ValueError(
      f'dtype={dtype}: expected one of {sorted(map(str, safetensors.NAMES))}'
    )
  if path.exists() and not overwrite:
    raise FileExistsError(f'{path} exists; remove it or choose another')
  flat = decoder.flatten_checked(cfg, params)
  config = families.format_config(
    dataclasses.asdict(cfg), dtype=str(dtype), like=like
  )
  tensors = tensor_table(cfg)
  path.parent.mkdir(parents=True, exist_ok=True)
  with _whole_folder(path) as tmp:
    safetensors.write_folder(
      tmp,
      {name: t.shape for name, t in tensors.items()},
      lambda name: _blocks(flat[tensors[name].path], tensors[name]),
      dtype,
      max_shard_bytes,
    )
    if tokenizer_dir is not None:
      families.copy_tokenizer(tokenizer_dir, tmp)
    safetensors.write_json(tmp / 'config.json', config)


@contextlib.contextmanager
def _whole_folder(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """A folder to write to, which becomes `path` if the block succeeds."""
  tmp = path.with_name(f'.{path.name}.tmp')
  old = path.with_name(f'.{path.name}.old')
  if old.exists() and not path.exists():
    old.rename(path)  # a writer was killed between its two renames
  shutil.rmtree(tmp, ignore_errors=True)
  tmp.mkdir()
  try:
    yield tmp
    if path.exists():
      shutil.rmtree(old, ignore_errors=True)
      path.rename(old)
    tmp.rename(path)
    parent = os.open(path.parent, os.O_RDONLY)
    try:
      os.fsync(parent)  # makes the rename durable
    finally:
      os.close(parent)
  except OSError as e:
    full = e.errno in (errno.ENOSPC, errno.EDQUOT)
    hint = '; free some space and try again' * full
    raise OSError(
      e.errno, f'writing {path} failed: {e}{hint}; existing files are unchanged'
    ) from e
  finally:
    if old.exists() and not path.exists():
      old.rename(path)
    shutil.rmtree(old, ignore_errors=True)
    shutil.rmtree(tmp, ignore_errors=True)


def _blocks(array, tensor: families.Tensor) -> Iterator[np.ndarray]:
  """The checkpoint's tensor in blocks of rows, fetched one by one.

  Each shard is sliced on its own device: to slice the global array, XLA would
  gather it on every device.
  """
  axis = tensor.row_axis
  shards = list(_shards(array, tensor))
  n = tensor.ours[axis]
  row = math.prod(tensor.ours) // n * array.dtype.itemsize
  step = max(1, _BLOCK_BYTES // row)
  # Blocks do not span shards, so that they have few sizes.
  edges = sorted({0, n, *(index[axis].start for index, _, _ in shards)})
  for begin, end in zip(edges, edges[1:]):
    for start in range(begin, end, step):
      stop = min(start + step, end)
      shape = list(tensor.ours)
      shape[axis] = stop - start
      block = np.empty(shape, array.dtype)
      for index, layer, data in shards:
        own = index[axis]
        if own.start <= start and stop <= own.stop:
          where = list(index)
          where[axis] = slice(0, stop - start)
          block[tuple(where)] = _fetch(
            data, layer, start - own.start, stop - start, axis
          )
      yield tensor.to_hf(block)


def _shards(array, tensor: families.Tensor):
  """(index in this layer, layer within the shard or None, data) of each."""
  stacked = tensor.layer is not None
  if isinstance(array, np.ndarray):
    pieces = [((slice(None),) * array.ndim, array)]
  else:
    if not array.is_fully_addressable:
      raise ValueError(
        f'parameter {tensor.path!r} is partly on other hosts; gather it before '
        'exporting'
      )
    pieces = [
      (s.index, s.data) for s in array.addressable_shards if not s.replica_id
    ]
  for index, data in pieces:
    index = tuple(slice(*i.indices(n)) for i, n in zip(index, array.shape))
    if not stacked:
      yield index, None, data
    elif index[0].start <= tensor.layer < index[0].stop:
      yield index[1:], tensor.layer - index[0].start, data


def _fetch(x, layer, start: int, size: int, axis: int) -> np.ndarray:
  if isinstance(x, np.ndarray):
    x = x if layer is None else x[layer]
    return x[(slice(None),) * axis + (slice(start, start + size),)]
  return np.asarray(_slice(x, layer, start, size, axis))


@jax.jit(static_argnums=(3, 4))
def _slice(x, layer, start, size, axis):
  # The layer and the start are traced, so that one program serves all.
  if layer is not None:
    x = jax.lax.dynamic_index_in_dim(x, layer, 0, keepdims=False)
  return jax.lax.dynamic_slice_in_dim(x, start, size, axis)
