"""The safetensors format: folders of tensors, read and written in pieces.

A file is an 8-byte little-endian length, a JSON header of that length, and
the raw tensors. The library's numpy binding supports neither bfloat16 nor
writing a file in parts.
"""

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import json
import math
import os
import pathlib
from typing import Any

import ml_dtypes
import numpy as np

INDEX = 'model.safetensors.index.json'
SINGLE = 'model.safetensors'
DTYPES = {
  'F64': np.dtype(np.float64),
  'F32': np.dtype(np.float32),
  'F16': np.dtype(np.float16),
  'BF16': np.dtype(ml_dtypes.bfloat16),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000  # bytes; the format's own limit


@dataclasses.dataclass(frozen=True)
class Stored:
  """The position of a tensor in a file."""

  file: pathlib.Path
  dtype: np.dtype | None  # None: not supported
  dtype_name: str
  shape: tuple[int, ...]
  offset: int  # bytes from the start of the file

  def open(self) -> np.ndarray:
    """The tensor, memory-mapped: nothing is read yet."""
    return np.memmap(
      self.file, self.dtype, 'r', offset=self.offset, shape=self.shape
    )


def read_file(file) -> dict[str, Stored]:
  """The tensors of one file, checked against its size.

  Raises:
    ValueError: truncated or malformed; the message names file and tensor.
  """
  file = pathlib.Path(file)
  size = file.stat().st_size
  with file.open('rb') as f:
    n = int.from_bytes(f.read(8), 'little')
    if n > min(size - 8, _MAX_HEADER):
      raise ValueError(
        f'{file}: truncated or no safetensors file ({size} bytes, header of '
        f'{n})'
      )
    try:
      header = json.loads(f.read(n))
      header.pop('__metadata__', None)
      entries = {
        name: (e['dtype'], tuple(e['shape']), *e['data_offsets'])
        for name, e in header.items()
      }
    except (ValueError, KeyError, TypeError, AttributeError) as e:
      raise ValueError(f'{file}: malformed safetensors header: {e!r}') from e
  out = {}
  for name, (dtype_name, shape, begin, end) in entries.items():
    dtype = DTYPES.get(dtype_name)
    start, stop, problem = 8 + n + begin, 8 + n + end, ''
    if stop > size:
      problem = (
        f'ends at byte {stop}, the file at {size}: the file is truncated'
      )
    elif (
      begin < 0 or dtype and end - begin != math.prod(shape) * dtype.itemsize
    ):
      problem = f'has bytes {begin} to {end} for shape {shape} of {dtype_name}'
    if problem:
      raise ValueError(f'{file}: tensor {name!r} {problem}')
    out[name] = Stored(file, dtype, dtype_name, shape, start)
  return out


def read_folder(path) -> dict[str, Stored]:
  """The tensors of a checkpoint folder: one file, or a sharded index.

  Raises:
    FileNotFoundError: there is no such file, or a shard of the index is absent.
    ValueError: as `read_file`, or the index contradicts a shard.
  """
  path = pathlib.Path(path)
  if (path / SINGLE).exists():
    return read_file(path / SINGLE)
  if not (path / INDEX).exists():
    raise FileNotFoundError(
      f'{path}: contains neither {SINGLE} nor {INDEX}; convert other formats '
      '(.bin, .gguf) to safetensors'
    )
  try:
    weight_map = json.loads((path / INDEX).read_text())['weight_map']
    files = sorted(set(weight_map.values()))
  except (ValueError, KeyError, TypeError, AttributeError) as e:
    raise ValueError(f'{path / INDEX}: malformed index: {e!r}') from e
  out, actual = {}, {}
  for file in files:
    if not (path / file).exists():
      raise FileNotFoundError(
        f'{path / file}: no such file, but {INDEX} refers to it'
      )
    stored = read_file(path / file)
    actual |= dict.fromkeys(stored, file)
    out |= stored
  for name in sorted(actual.keys() | weight_map.keys()):
    place = actual.get(name, 'missing')
    if place != weight_map.get(name):
      raise ValueError(
        f'{path}: tensor {name!r} is {place}, but {INDEX} places it in '
        f'{weight_map.get(name)}'
      )
  return out


def write_folder(
  path,
  shapes: Mapping[str, tuple[int, ...]],
  blocks: Callable[[str], Iterable[np.ndarray]],
  dtype: np.dtype,
  max_shard_bytes: float,
):
  """Writes one file, or shards with an index, block by block.

  Args:
    shapes: name -> shape, in the order in which they are written.
    blocks: name -> the tensor in blocks of rows, cast here.
    max_shard_bytes: of one file; a larger tensor has a separate file.
  """
  path = pathlib.Path(path)
  shards: list[list[str]] = [[]]
  size = total = 0
  for name, shape in shapes.items():
    n = math.prod(shape) * dtype.itemsize
    if shards[-1] and size + n > max_shard_bytes:
      shards.append([])
      size = 0
    shards[-1].append(name)
    size += n
    total += n
  weight_map = {}
  for i, names in enumerate(shards, 1):
    file = f'model-{i:05d}-of-{len(shards):05d}.safetensors'
    file = file if len(shards) > 1 else SINGLE
    _write_file(path / file, {n: shapes[n] for n in names}, blocks, dtype)
    weight_map |= dict.fromkeys(names, file)
  if len(shards) > 1:
    metadata = {'total_size': total}
    write_json(path / INDEX, {'metadata': metadata, 'weight_map': weight_map})


def _write_file(file: pathlib.Path, shapes, blocks, dtype: np.dtype):
  header: dict[str, Any] = {'__metadata__': {'format': 'pt'}}
  end = 0
  for name, shape in shapes.items():
    begin, end = end, end + math.prod(shape) * dtype.itemsize
    header[name] = {
      'dtype': NAMES[dtype],
      'shape': shape,
      'data_offsets': [begin, end],
    }
  raw = json.dumps(header).encode()
  raw += b' ' * (-len(raw) % 8)  # aligns the data
  with file.open('wb') as f:
    f.write(len(raw).to_bytes(8, 'little'))
    f.write(raw)
    for name in shapes:
      for block in blocks(name):
        block = np.ascontiguousarray(block, dtype)
        f.write(block.reshape(-1).view(np.uint8).data)
    f.flush()
    os.fsync(f.fileno())


def write_json(file: pathlib.Path, value):
  with file.open('w') as f:
    json.dump(value, f, indent=2)
    f.write('\n')
    f.flush()
    os.fsync(f.fileno())
