"""The checksums of `engines.weights.checksum`, of a torch tensor, without JAX.

On a CPU a compiled loop computes them as fast as memory is read. torch, which
writes each of some twenty steps of the hash, takes several times as long; it
computes them on other devices.
"""

from collections.abc import Callable
from concurrent import futures
import functools

import numpy as np

_BLOCK, _BLOCK_ELSE = 1 << 20, 1 << 24  # elements hashed at once; not on a CPU
_RATIO = 0x9E3779B1  # an index is multiplied by it


def sums(block, start: int, outer: int, inner: int) -> tuple[int, int]:
  """Two sums of hashes, modulo 2^32, of a block of a tensor.

  block: [n, m]; its element (i, j) has the index start + i * outer + j * inner
  in the whole, and 16 or 32 bits.
  """
  if block.stride(0) == 1:  # a transposed matrix: in the order of its memory
    block, outer, inner = block.T, inner, outer
  on = _on_host if block.device.type == 'cpu' else _on_device
  return on(block, start, outer, inner)


def _on_host(block, start: int, outer: int, inner: int):
  import torch

  block = block.contiguous()
  bits = block.view({2: torch.int16, 4: torch.int32}[block.element_size()])
  bits = bits.numpy().view(f'u{block.element_size()}')
  step = max(1, _BLOCK // bits.shape[1])

  def some(i: int) -> tuple[int, int]:
    return compiled()(bits[i : i + step], start + i * outer, outer, inner)

  with futures.ThreadPoolExecutor(torch.get_num_threads()) as pool:
    parts = pool.map(some, range(0, len(bits), step))
    low, high = zip((0, 0), *parts)
  return sum(low), sum(high)


@functools.cache
def compiled() -> Callable:
  """fn(bits [rows, columns], start, outer, inner) -> two sums modulo 2^32.

  The element (i, j) has the index start + i * outer + j * inner. torch would
  write each of some twenty steps of the hash to memory.
  """
  import numba

  u32 = numba.uint32

  @numba.njit(inline='always')
  def mix(h):
    h = u32(u32(h ^ (h >> u32(16))) * u32(0x85EBCA6B))
    h = u32(u32(h ^ (h >> u32(13))) * u32(0xC2B2AE35))
    return u32(h ^ (h >> u32(16)))

  @numba.njit(nogil=True)
  def sums(bits, minus_zero, start, outer, inner):
    low_sum = high_sum = u32(0)
    for i in range(bits.shape[0]):
      first = u32(start + u32(i) * outer)
      for j in range(bits.shape[1]):
        b = u32(bits[i, j])
        b = u32(0) if b == minus_zero else b
        low = mix(u32(b + first + u32(j) * inner))
        low_sum = u32(low_sum + low)
        high_sum = u32(high_sum + mix(low ^ b))
    return low_sum, high_sum

  def call(bits: np.ndarray, *steps: int) -> tuple[int, int]:
    hashed = [u32(x * _RATIO % 2**32) for x in steps]
    minus_zero = u32(1 << 8 * bits.itemsize - 1)
    low, high = sums(bits, minus_zero, *hashed)
    return int(low), int(high)

  return call


def _on_device(block, start: int, outer: int, inner: int):
  import torch

  inner_index = _steps(block.shape[1], inner, 0, block.device)
  low_sum = high_sum = 0
  step = max(1, _BLOCK_ELSE // block.shape[1])
  for i in range(0, len(block), step):
    bits = _bits(block[i : i + step])
    index = _steps(len(bits), outer, start + i * outer, block.device)
    hashes = _mix(bits + index[:, None] + inner_index)
    low_sum = low_sum + hashes.sum(dtype=torch.int32)
    hashes ^= bits
    high_sum = high_sum + _mix(hashes).sum(dtype=torch.int32)
  return int(low_sum), int(high_sum)


def _steps(n: int, step: int, start: int, device):
  """(start + i * step) * 0x9E3779B1 for i < n, in wrapping int32 [n]."""
  import torch

  index = np.arange(n, dtype=np.uint64) * np.uint64(step) + np.uint64(start)
  index = (index & np.uint64(0xFFFFFFFF)) * np.uint64(_RATIO)
  return torch.from_numpy(index.astype(np.uint32).view(np.int32)).to(device)


def _bits(x):
  """The bits of float32 or a 16-bit float as int32; -0.0 as 0.0."""
  import torch

  x = x.contiguous()
  if x.dtype == torch.float32:
    bits = x.view(torch.int32)
    return bits.masked_fill(bits == -(1 << 31), 0)
  bits = x.view(torch.int16).to(torch.int32) & 0xFFFF
  return bits.masked_fill_(bits == 1 << 15, 0)


def _mix(h):
  """MurmurHash3's finaliser, in place."""
  # A shift of int32 copies the sign bit, which the masks remove.
  h ^= (h >> 16).bitwise_and_(0xFFFF)
  h *= 0x85EBCA6B - (1 << 32)
  h ^= (h >> 13).bitwise_and_(0x7FFFF)
  h *= 0xC2B2AE35 - (1 << 32)
  h ^= (h >> 16).bitwise_and_(0xFFFF)
  return h
