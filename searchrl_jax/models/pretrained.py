"""Hugging Face checkpoints in and out: config.json and safetensors.

The host holds one stacked parameter (import) or one file (export) beyond the
parameters themselves, never the model.
"""

import collections
from collections.abc import Callable, Mapping
import dataclasses
import functools
import json
import math
import os
import pathlib
import re
from typing import Any, NamedTuple

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from searchrl_jax import lookup
from searchrl_jax.devices import sharding
from searchrl_jax.models import (
  decoder,
  deltanet,
  experts,
  families,
  hf_config,
  hf_tensors,
  rotary,
)
from searchrl_jax.store import folders

INDEX = 'model.safetensors.index.json'
SINGLE = 'model.safetensors'
_SHARDS = re.compile(r'model-\d+-of-(\d+)\.safetensors')  # of one checkpoint
_VERL = {'fsdp': 'model_world_size_*_rank_*.pt', 'megatron': 'dist_ckpt'}
_HALF = 'BF16', 'F16'
_READ = 'F32', *_HALF, 'F64'
# All experts of a layer in one tensor [E, out, in], as transformers has them.
_STACKED = re.compile(r'(.*\.mlp\.experts)\.(gate_up|down)_proj')
_EACH = re.compile(r'(.*\.mlp\.experts)\.\d+\.(gate|up|down)_proj\.weight')
_ROWS = 32  # of a file's tensor, transposed at once


def read_json(path) -> dict[str, Any]:
  """The config.json of a checkpoint folder.

  Raises:
    FileNotFoundError, ValueError: it is absent, or not a JSON object.
  """
  folder = pathlib.Path(path)
  path = folder / 'config.json'
  lookup.require(
    path.exists(), f'{path}: no such file{_what(folder)}', FileNotFoundError
  )
  lookup.require_content(path)
  with lookup.of(f'{path}: not JSON'):
    value = json.loads(path.read_text())
  lookup.require(isinstance(value, dict), f'{path}: expected a JSON object')
  return value


def decoder_config(hf: Mapping[str, Any], **flags) -> decoder.DecoderConfig:
  """DecoderConfig from the fields of a config.json.

  flags: fields that a config.json does not have (dtype of activations, remat).

  Raises:
    ValueError: see `hf_config.parse_config`.
  """
  fields = hf_config.parse_config(hf)
  kinds = {
    'rope_scaling': rotary.RopeScaling,
    'delta': deltanet.Sizes,
    'moe': experts.Sizes,
  }
  for name, kind in kinds.items():
    if fields[name] is not None:
      fields[name] = kind(**fields[name])
  return decoder.DecoderConfig(**fields, **flags)


def read_config(path, **flags) -> decoder.DecoderConfig:
  """The same, from a checkpoint folder."""
  with lookup.of(str(path)):
    return decoder_config(read_json(path), **flags)


def tensor_table(cfg: decoder.DecoderConfig) -> dict[str, hf_tensors.Tensor]:
  """Every tensor of the checkpoint of such a model, by its name."""
  shapes = decoder.shapes_of(decoder.param_table(cfg))
  return hf_tensors.table(shapes, families.fields(cfg))


class Stored(NamedTuple):
  """A tensor of a checkpoint, before it is read."""

  file: str
  shape: tuple[int, ...]
  dtype: str
  read: Callable[[], np.ndarray]


def _what(folder: pathlib.Path) -> str:
  """What a folder without a checkpoint holds, and what to do, as '; ...'."""
  has = lambda pattern: next(folder.glob(pattern), None)
  if has('adapter_config.json'):
    return (
      '; it holds an adapter: give the folder as config.model.lora.path, and '
      'the model that it was trained on as config.model.path'
    )
  if within := has('*/model*.safetensors') or has('*/*/model*.safetensors'):
    return f'; {within.parent} holds one: give that folder'
  # `actor/huggingface` has the config, and the shards lie beside it.
  steps = folder.glob('global_step_*/actor')
  for place in folder, folder / 'actor', *steps, folder.parent:
    for backend, shards in _VERL.items():
      if any(place.glob(shards)):
        merge = f'python -m verl.model_merger merge --backend {backend}'
        return (
          f'; {place} holds shards of verl: merge them by `{merge} --local_dir '
          f'{place} --target_dir OUT`, and give OUT'
        )
  if found := has('*.gguf'):
    return f'; give the file {found} itself'
  if has('*.bin') or has('*.pt') or has('*.pth'):
    return (
      '; convert the weights (.bin) to safetensors: load the folder with '
      'transformers and call save_pretrained'
    )
  return '; give the folder of a Hugging Face checkpoint, with all its files'


def _files(path: pathlib.Path) -> tuple[list[str], dict[str, str]]:
  """The files of a checkpoint, and the index: tensor -> file, if it has one.

  Raises:
    FileNotFoundError: there are none, or not all shards.
    ValueError: the index is malformed.
  """
  if (path / SINGLE).exists():
    return [SINGLE], {}
  if (path / INDEX).exists():
    lookup.require_content(path / INDEX)
    try:
      holder = json.loads((path / INDEX).read_text())['weight_map']
      return sorted({*holder.values()}), holder
    except (ValueError, KeyError, TypeError, AttributeError) as e:
      raise ValueError(f'{path / INDEX}: malformed index: {e!r}') from e
  names = sorted(p.name for p in path.glob('model-*.safetensors'))
  counts = {int(found[1]) for n in names if (found := _SHARDS.fullmatch(n))}
  neither = f'{path}: contains neither {SINGLE} nor {INDEX}{_what(path)}'
  lookup.require(names, neither, FileNotFoundError)
  lookup.require(
    counts == {len(names)},
    f'{path}: {", ".join(names)} without {INDEX}: are these all files of one '
    'checkpoint? Download the rest, and the index',
    FileNotFoundError,
  )
  return names, {}


def _open_folder(path: pathlib.Path) -> dict[str, Stored]:
  """The tensors of a model of text, by name.

  Those of a checkpoint that has images too, or that a wrapper saved, are
  renamed, or left out. A tensor of all experts is listed as one for each.

  Raises:
    FileNotFoundError: there is no such file, or a shard of the index is absent.
    ValueError: a file is truncated or malformed, or two tensors are the same.
  """
  files, holder = _files(path)
  out: dict[str, Stored] = {}
  for file in files:
    lookup.require_content(path / file)
    cut = f'{path / file}: truncated or malformed'
    with lookup.of(cut, ValueError, safetensors.SafetensorError):
      opened = safetensors.safe_open(path / file, 'np')
    for name in opened.keys():
      ours = hf_tensors.text_name(name)
      if ours and holder.get(name, file) == file:
        entry = opened.get_slice(name)
        read = functools.partial(opened.get_tensor, name)
        shape = tuple(entry.get_shape())
        found = Stored(file, shape, entry.get_dtype(), read)
        parts = _of_each_expert(ours, found, entry)
        lookup.require(
          not parts.keys() & out.keys(),
          f'{path / file}: tensor {name!r} is there twice, with and without a '
          'prefix, of all experts and of each, or in two files',
          ValueError,
        )
        out |= parts
  return out


def _of_each_expert(name: str, stored: Stored, entry) -> dict[str, Stored]:
  """The tensors in one of all experts; any other, unchanged."""
  found = _STACKED.fullmatch(name)
  if not found or len(stored.shape) != 3:
    return {name: stored}
  (count, rows, columns), kinds = stored.shape, found[2].split('_')
  rows //= len(kinds)
  return {
    f'{found[1]}.{j}.{kind}_proj.weight': stored._replace(
      shape=(rows, columns),
      read=lambda j=j, i=i * rows: entry[j : j + 1, i : i + rows][0],
    )
    for j in range(count)
    for i, kind in enumerate(kinds)
  }


def _missing(name: str, stored: Mapping[str, Stored]) -> str:
  """What to say of a tensor that is not there."""
  if name == hf_tensors.TIED_HEAD:
    return (
      'is missing, and tie_word_embeddings is false in config.json: set it to '
      'true if the head is the embedding, or add the tensor'
    )
  for found in sorted(stored):
    prefix = found.removesuffix(name)
    if prefix != found:
      return f'is missing; there is {found!r}: remove the prefix {prefix!r}'
  return f'is missing; there is {min(stored, default=None)!r}'


def _check_tensors(path, table, stored: dict[str, Stored]):
  """Raises ValueError unless `stored` has exactly the tensors of `table`."""
  for name in (*table, *sorted(stored.keys() - table.keys())):
    entry = stored.get(name)
    problem = f'is {entry and (entry.shape, entry.dtype)}; the config asks for '
    if entry is None:
      good, problem = False, _missing(name, stored)
    elif name in table:
      good = entry.shape == table[name].shape and entry.dtype in _READ
      problem += f'{table[name].shape}, one of {", ".join(_READ)}'
    elif name == hf_tensors.TIED_HEAD:
      # Some writers store the tied head again.
      embedding = stored[next(iter(table))].read()
      good = np.array_equal(entry.read(), embedding)
      problem = 'differs from the embedding (tie_word_embeddings is set)'
    else:
      # Buffers in old Llama checkpoints; the config determines them.
      good, problem = name.endswith('rotary_emb.inv_freq'), problem + 'none'
    file = path / entry.file if entry else path
    lookup.require(good, f'{file}: tensor {name!r} {problem}')


def load(
  path, mesh=None, dtype=jnp.float32, cfg: decoder.DecoderConfig | None = None
):
  """(DecoderConfig, params) of a Hugging Face checkpoint folder.

  Checks all files before it allocates memory. Needs host memory for one
  stacked parameter beyond the parameters themselves.

  Args:
    mesh: parameters are laid out as `decoder.param_table` says; None puts them
      on the default device.
    dtype: of the parameters, but for those of `families.dtype_of`.
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
  a, b = families.fields(own), families.fields(cfg)
  differ = [f'{k}={a[k]!r}, expected {b[k]!r}' for k in a if a[k] != b[k]]
  lookup.require(not differ, f'{path} holds another model: {"; ".join(differ)}')
  table, stored = tensor_table(cfg), _open_folder(path)
  _check_tensors(path, table, stored)
  rounded = [
    name
    for name, tensor in table.items()
    if tensor.path.endswith(families.EXACT) and stored[name].dtype in _HALF
  ]
  if rounded:
    logging.warning(
      f'{path}: {len(rounded)} tensors such as {rounded[0]!r} are stored as '
      f'{stored[rounded[0]].dtype}, though they are computed with as float32'
    )
  flat = {}
  for name, (shape, axes) in decoder.param_table(cfg).items():
    host = np.empty(shape, families.dtype_of(name, np.dtype(dtype).name))
    for tensor in (t for t in table.values() if t.path == name):
      part = host if tensor.layer is None else host[tensor.layer]
      _copy(part, tensor, stored[tensor.name].read())
    layout = mesh and sharding.named(mesh, axes, shape)
    # The host's array is not kept, and is let go before the next is filled.
    whole = sharding.put(host, layout, may_alias=False)
    flat[name] = jax.block_until_ready(whole)
  return cfg, decoder.nest(flat)


def _copy(ours: np.ndarray, tensor: hf_tensors.Tensor, theirs: np.ndarray):
  """Writes a checkpoint's tensor to our array, in our layout, cast."""
  if not tensor.n_in:
    ours[...] = tensor.to_ours(theirs)
    return
  # Transposing everything at once misses the cache at every element; a few of
  # the file's rows at a time are 3 to 10 times as fast.
  ours = ours.reshape(theirs.shape[::-1])
  for i in range(0, len(theirs), _ROWS):
    ours[:, i : i + _ROWS] = theirs[i : i + _ROWS].T


def save(
  path,
  cfg: decoder.DecoderConfig,
  params: dict,
  tokenizer_dir=None,
  max_shard_bytes: float = 5e9,
  dtype='float32',
  like: Mapping[str, Any] | None = None,
  files: Mapping[str, str] | None = None,
  stacked: bool = False,
):
  """Writes a checkpoint that transformers and vLLM load.

  The folder is written beside `path` and renamed, so that it appears only when
  complete.

  Args:
    tokenizer_dir: a folder whose tokenizer files are copied along.
    max_shard_bytes: of one file, which the host holds; a larger tensor has a
      separate file.
    dtype: of the stored tensors: float32, bfloat16 or float16; those of
      `families.dtype_of` are float32.
    like: a config.json (`read_json`) whose other fields are kept.
    files: name -> text of further files, in place of the tokenizer's.
    stacked: all experts of a layer in one tensor, as transformers 5 holds them.
      vLLM may not load these.

  Raises:
    FileExistsError: `path` exists.
    ValueError: parameters that are not those of `cfg`, by name.
    OSError: the disk.
  """
  flat, table = decoder.flatten_checked(cfg, params), tensor_table(cfg)
  config = hf_config.format_config(dataclasses.asdict(cfg), like=like)

  def read(name: str) -> np.ndarray:
    x, tensor = flat[table[name].path], table[name]
    # A copy, since JAX would keep the host's with the parameter.
    x = np.asarray(x.copy() if tensor.layer is None else x[tensor.layer])
    return tensor.to_hf(x)

  def write(folder: pathlib.Path) -> None:
    if tokenizer_dir is not None:
      families.copy_tokenizer(tokenizer_dir, folder)
    for name, text in (files or {}).items():
      (folder / name).write_text(text, encoding='utf-8')

  written = table, read
  if stacked:
    written = _of_all_experts(*written)
  write_folder(path, config, *written, dtype, write, max_shard_bytes)


def _of_all_experts(table: dict[str, hf_tensors.Tensor], read):
  """`table` and `read` of `write_folder`, with the experts of a layer in one
  tensor: what `_of_each_expert` takes apart."""
  out, parts = {}, collections.defaultdict[str, dict](dict)
  for name, tensor in table.items():
    if found := _EACH.fullmatch(name):
      kind = 'down' if found[2] == 'down' else 'gate_up'
      own = parts[f'{found[1]}.{kind}_proj']
      own.setdefault(found[2], []).append(name)
    else:
      out[name] = tensor
  for name, kinds in parts.items():
    first, *others = next(iter(kinds.values()))
    rows, columns = table[first].shape
    shape = 1 + len(others), len(kinds) * rows, columns
    out[name] = dataclasses.replace(table[first], name=name, shape=shape)

  def read_all(name: str) -> np.ndarray:
    if name not in parts:
      return read(name)
    each = [np.stack([*map(read, names)]) for names in parts[name].values()]
    return np.concatenate(each, 1)

  return out, read_all


def write_folder(
  path,
  config: Mapping[str, Any],
  table: Mapping[str, hf_tensors.Tensor],
  read: Callable[[str], np.ndarray],
  dtype='float32',
  write: Callable[[pathlib.Path], None] = lambda folder: None,
  max_shard_bytes: float = 5e9,
) -> None:
  """Writes config.json and tensors beside `path`, which then gets its name.

  Args:
    config: of `hf_config.format_config`.
    table: the tensors by name.
    read: name -> the tensor in Hugging Face's layout.
    dtype: of the stored tensors.
    write: adds other files to the folder that is made.
    max_shard_bytes: see `save`.

  Raises:
    FileExistsError: `path` exists.
    OSError: the disk.
  """
  path, dtype = pathlib.Path(path), np.dtype(dtype)
  if path.exists():
    raise FileExistsError(f'{path} exists; remove it or choose another')
  text = json.dumps({**config, 'torch_dtype': dtype.name}, indent=2)
  caught = (OSError, safetensors.SafetensorError)
  with lookup.of(f'writing {path} failed', OSError, caught):
    with folders.beside(path) as part:
      _write_tensors(part, table, read, dtype, max_shard_bytes)
      (part / 'config.json').write_text(f'{text}\n', encoding='utf-8')
      write(part)
      os.sync()  # the files are on the disk before the folder has its name
      part.rename(path)


def _write_tensors(folder, tensors, read, dtype: np.dtype, most: float):
  """Writes one file, or shards of at most `most` bytes with an index."""
  from huggingface_hub import split_state_dict_into_shards_factory  # slow

  kind = lambda t: np.dtype(families.dtype_of(t.path, dtype.name))
  split = split_state_dict_into_shards_factory(
    tensors,
    get_storage_size=lambda t: math.prod(t.shape) * kind(t).itemsize,
    filename_pattern='model{suffix}.safetensors',
    max_shard_size=int(most),
  )
  for file, names in split.filename_to_tensors.items():
    safetensors.numpy.save_file(  # the tensors of one file are held at a time
      {n: np.ascontiguousarray(read(n), kind(tensors[n])) for n in names},
      folder / file,
      {'format': 'pt'},
    )
  if split.is_sharded:
    weight_map = split.tensor_to_filename
    index = {'metadata': split.metadata, 'weight_map': weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + '\n')
