"""Per-tensor checksums that the trainer and the engine both compute.

A checksum is a sum, modulo 2^32, over a tensor's elements of a hash of
(bits, linear index): it does not depend on the sharding, and the sums of the
layers of a stacked tensor add up to the checksum of the stack, so an engine
that holds one array for each layer can be compared with a trainer that
stacks them. A swapped, transposed or slightly older tensor changes it.
"""

import functools

import jax
import jax.numpy as jnp


def _mix(h):
  """MurmurHash3's 32-bit finaliser (public domain, A. Appleby)."""
  h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
  h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
  return h ^ (h >> 16)


def _sums(x, offset):
  """Two uint32 sums of an array whose first element has index `offset`."""
  size = x.dtype.itemsize
  kind = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[size]
  bits = jax.lax.bitcast_convert_type(x, kind).astype(jnp.uint32)
  index = jnp.full(x.shape, offset, jnp.uint32)
  stride = 1
  for axis in range(x.ndim - 1, -1, -1):
    step = jnp.uint32(stride & 0xFFFFFFFF)
    index += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * step
    stride *= x.shape[axis]
  low = _mix(bits + index * jnp.uint32(0x9E3779B1))
  high = _mix(low ^ bits)
  return jnp.stack([
    jnp.sum(low, dtype=jnp.uint32), jnp.sum(high, dtype=jnp.uint32)
  ])


@functools.partial(jax.jit, static_argnames='dtype')
def _all(parts: dict, dtype):
  out = {}
  for name, arrays in parts.items():
    offset, total = 0, jnp.zeros(2, jnp.uint32)
    for x in arrays:
      total += _sums(x.astype(dtype or x.dtype), offset & 0xFFFFFFFF)
      offset += x.size
    out[name] = total
  return out


def checksums(parts: dict, dtype: str | None = None) -> dict[str, str]:
  """{name: 'dtype[shape]:16 hex digits'}.

  parts: {name: array, or a list of arrays that stack on a new first axis}.
  dtype: checksum the tensors as cast to it (an engine may hold bfloat16 of a
  float32 trainer); None: as they are.
  """
  lists = {k: v if isinstance(v, list) else [v] for k, v in parts.items()}
  sums = jax.device_get(_all(lists, dtype))
  out = {}
  for name, value in parts.items():
    stacked = isinstance(value, list)
    one = value[0] if stacked else value
    shape = (len(value), *one.shape) if stacked else one.shape
    low, high = (int(v) for v in sums[name])
    kind = jnp.dtype(dtype or one.dtype).name
    dims = ','.join(map(str, shape))
    out[name] = f'{kind}[{dims}]:{low:08x}{high:08x}'
  return out
