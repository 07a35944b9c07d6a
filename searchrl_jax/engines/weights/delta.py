"""What changed between two versions of the weights, tensor by tensor.

    <folder>/00000013.delta/model.norm.weight    a piece for each that changed
    <folder>/00000013.delta/meta.json            base, version, names, checksums

`publication.Publisher` writes it, `bring` applies it to a publication of the
base version, which is that of the new version then. A piece is compressed:

    8 bytes     n, the number of elements that changed
    n or more   how many elements lie before each, since the last that changed:
                one byte, behind a 255 for each 255 of them
    2 n         how its bits, as an integer, changed: low bytes, then high bytes

A small step moves a 16-bit float to one of its neighbours, whose bits are one
more or less. Those differences are stored as 0, -1, 1, -2, ... -> 0, 1, 2, 3,
so that high bytes are mostly 0. Zstandard compresses this as much as DEFLATE in
an eighth of the time, and has a checksum of it. This module imports no JAX.
"""

from collections.abc import Iterator, Mapping
from concurrent import futures
import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
from typing import Any

import numba
import numpy as np
import zstandard

from searchrl_jax import lookup
from searchrl_jax.engines.weights import published
from searchrl_jax.engines.weights.published import Published, PublishedError

SUFFIX = '.delta'
_META = 'meta.json'
_MOST = 255  # that a byte can skip, and more follow
Changed = tuple[np.ndarray, np.ndarray]  # positions, int64; bits, uint16


def encode(old: np.ndarray, new: np.ndarray) -> bytes:
  """The piece of a tensor; b'' if nothing changed.

  old, new: the bits of its elements, uint16 [n].
  """
  what = f'{len(old)} and {len(new)} elements are not of one tensor'
  lookup.require(len(old) == len(new), what, ValueError)
  planes = np.empty((3, len(new)), np.uint8)  # of each, a part is used
  skipped, n = _compare(old, new, *planes)
  if not n:
    return b''
  used = zip(planes, (skipped, n, n))
  parts = [plane[:size].tobytes() for plane, size in used]
  pack = zstandard.ZstdCompressor(level=1, write_checksum=True)
  return pack.compress(b''.join([n.to_bytes(8, 'little'), *parts]))


def decode(piece: bytes) -> Changed:
  """Where a piece changes a tensor, and what it adds to the bits there.

  Raises:
    zstandard.ZstdError, MemoryError, IndexError: it is damaged.
  """
  raw = np.frombuffer(zstandard.ZstdDecompressor().decompress(piece), np.uint8)
  n = int.from_bytes(raw[:8].tobytes(), 'little')
  skips, low, high = np.split(raw[8:], [-2 * n, -n])
  at = np.empty(n, np.int64)
  at = at[: _locate(skips, at)]
  step = low | high.astype(np.uint16) << 8
  return at, (step >> 1) ^ -(step & 1)


def apply(bits: np.ndarray, at: np.ndarray, steps: np.ndarray) -> np.ndarray:
  """Changes the bits of a tensor, uint16 [n], in place; returns those at `at`.

  at, steps: of `decode`.

  Raises:
    IndexError, ValueError: they are of another tensor; nothing has changed.
  """
  new = np.take(bits, at) + steps
  bits[at] = new
  return new


# Single passes, where those of NumPy take twice as long.


@numba.njit(nogil=True)
def _compare(old, new, skips, low, high):
  """Writes how each element changed; returns how many skips and changes."""
  skipped = n = first = 0
  for i in range(len(new)):
    if old[i] != new[i]:
      skip, first = i - first, i + 1
      while skip >= _MOST:
        skips[skipped], skip = _MOST, skip - _MOST
        skipped += 1
      skips[skipped] = skip
      step = numba.int16(numba.int32(new[i]) - numba.int32(old[i]))
      step = (numba.int32(step) << 1) ^ (numba.int32(step) >> 15)
      low[n], high[n] = step & 255, step >> 8
      skipped, n = skipped + 1, n + 1
  return skipped, n


@numba.njit(nogil=True, boundscheck=True)
def _locate(skips, at):
  """Writes where the changes are; returns how many."""
  i = n = 0
  for skip in skips:
    i += skip
    if skip != _MOST:
      at[n] = i
      i, n = i + 1, n + 1
  return n


def write(
  folder: pathlib.Path, pieces: Mapping[str, bytes], base: int, new: Published
) -> None:
  """Writes the difference of `new` from the version `base`.

  folder: an empty one.
  pieces: those of tensors that changed, by their Hugging Face name.
  """
  for name, piece in pieces.items():
    (folder / name).write_bytes(piece)
  about = {
    'base': base,
    'version': new.version,
    'names': [*pieces],
    'checksums': dict(new.checksums),
  }
  (folder / _META).write_text(json.dumps(about))  # last: it is complete


def bring(
  copy: pathlib.Path, folder: pathlib.Path, locate: bool = False
) -> tuple[Published, int, dict[str, Changed] | None]:
  """Brings a publication to the version of a difference, in place.

  While it changes, and after an error in between, it is no publication; a
  difference that is damaged leaves it as it is. Several processes may call it:
  the first applies the difference.

  locate: what changed is wanted.

  Returns:
    The publication, the version before, and of each tensor that changed the
    positions and the bits that are there now, or None.

  Raises:
    PublishedError: it holds another version than the base, or is gone; the
      difference is damaged.
  """
  about = _about(folder)
  version, base = about['version'], about['base']
  what = f'{folder} has what changed from version {base} to {version}'
  fix = f'publish version {version} as a whole'
  with _locked(copy, f'{what}; {fix}'):
    held = published.open_published(copy)
    done = held.version == version
    if done and not locate:
      return held, base, None
    message = f'{what}, and {copy} holds version {held.version}; {fix}'
    lookup.require(done or held.version == base, message, PublishedError)

    def read(name: str) -> Changed:
      try:
        return decode((folder / name).read_bytes())
      except (OSError, MemoryError, IndexError, zstandard.ZstdError) as e:
        broken = f'the piece of tensor {name} is missing or damaged ({e!r})'
        raise PublishedError(f'{what}: {broken}; {fix}') from e

    def change(name: str, piece: Changed) -> Changed:
      bits = held.read(name, 'c' if done else 'r+').view(np.uint16).reshape(-1)
      at, steps = piece
      return at, bits[at] if done else apply(bits, at, steps)

    names = about['names']
    extras = {'version': version, 'checksums': about['checksums']}
    with futures.ThreadPoolExecutor() as pool:
      pieces = [*pool.map(read, names)]  # before anything changes
      with contextlib.nullcontext() if done else _rewritten(copy, **extras):
        found = [*pool.map(change, names, pieces)]
  changed = dict(zip(names, found)) if locate else None
  return dataclasses.replace(held, **extras), base, changed


def _about(folder: pathlib.Path) -> dict[str, Any]:
  """The description of a difference; PublishedError if it is incomplete."""
  try:
    return json.loads((folder / _META).read_text())
  except (OSError, ValueError) as e:
    what = f'{folder} is no complete difference ({e!r})'
    raise PublishedError(f'{what}; publish the weights as a whole') from e


@contextlib.contextmanager
def _locked(path: pathlib.Path, message: str) -> Iterator[None]:
  """Holds the lock of a folder, which no other process has meanwhile."""
  try:
    lock = os.open(path, os.O_RDONLY)
  except OSError as e:
    raise PublishedError(f'{path} is gone, and {message}') from e
  try:
    fcntl.flock(lock, fcntl.LOCK_EX)
    yield
  finally:
    os.close(lock)


@contextlib.contextmanager
def _rewritten(path: pathlib.Path, **extras: Any) -> Iterator[None]:
  """Takes a publication's description away; puts it back with new extras."""
  file = path / 'meta' / _META
  meta = json.loads(file.read_text())
  file.unlink()
  yield
  meta['extras'] |= extras
  part = file.with_suffix('.part')
  part.write_text(json.dumps(meta))
  part.rename(file)
