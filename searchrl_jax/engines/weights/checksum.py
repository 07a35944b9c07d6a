"""Per-tensor checksums that the trainer and the engine both compute.

A checksum is a sum, modulo 2^32, over a tensor's elements of a hash of
(bits, linear index). It does not depend on the sharding, and the sums of the
layers of a stacked tensor add up to the checksum of the stack: an engine with
one array for each layer can be compared with a trainer that stacks them. A
swapped, transposed or slightly older tensor changes it. -0.0 counts as 0.0: an
engine that packed a matrix can show only its products with unit vectors, which
do not distinguish the two.
"""

from collections.abc import Iterable, Mapping, Sequence
import functools

import jax
import jax.numpy as jnp

from searchrl_jax import lookup
from searchrl_jax.engines.core import SyncError
from searchrl_jax.models import families


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
  if jnp.issubdtype(x.dtype, jnp.floating):
    minus_zero = jnp.uint32(1 << 8 * size - 1)
    bits = jnp.where(bits == minus_zero, jnp.uint32(0), bits)
  index = jnp.full(x.shape, offset, jnp.uint32)
  stride = 1
  for axis in range(x.ndim - 1, -1, -1):
    step = jnp.uint32(stride & 0xFFFFFFFF)
    index += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * step
    stride *= x.shape[axis]
  low = _mix(bits + index * jnp.uint32(0x9E3779B1))
  high = _mix(low ^ bits)
  # One reduction for both: two would write the hashes, as large as the tensor,
  # to memory.
  zeros = (jnp.uint32(0), jnp.uint32(0))
  add = lambda a, b: (a[0] + b[0], a[1] + b[1])
  return jnp.stack(jax.lax.reduce((low, high), zeros, add, range(x.ndim)))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _all(parts: dict, dtype, exact):
  out = {}
  for name, arrays in parts.items():
    offset, total = 0, jnp.zeros(2, jnp.uint32)
    for x in arrays:
      kind = _kind(name, x, dtype, exact)
      total += _sums(x.astype(kind), offset & 0xFFFFFFFF)
      offset += x.size
    out[name] = total
  return out


def _kind(name: str, x, dtype: str | None, exact) -> str:
  return families.dtype_of(name, dtype, exact) if dtype else x.dtype.name


def checksums(
  parts: dict, dtype: str | None = None, exact=families.EXACT
) -> dict[str, str]:
  """{name: 'dtype[shape]:16 hex digits'}.

  parts: {name: array, or a list of arrays that stack on a new first axis}.
  dtype: checksum the tensors as cast to it (an engine may hold bfloat16 of a
  float32 trainer); None: as they are. exact: `families.EXACT`, of the engine.
  """
  lists = {k: v if isinstance(v, list) else [v] for k, v in parts.items()}
  sums = jax.device_get(_all(lists, dtype, exact))
  out = {}
  for name, (first, *_) in lists.items():
    stacked = (len(parts[name]),) * isinstance(parts[name], list)
    kind = _kind(name, first, dtype, exact)
    out[name] = _text(kind, (*stacked, *first.shape), *map(int, sums[name]))
  return out


def compare(
  published: Mapping[str, str],
  loaded: Mapping[str, str],
  engine: str = 'the engine',
) -> None:
  """Raises SyncError that names every tensor that differs."""
  lines = ''
  differ = {k for k, _ in published.items() ^ loaded.items()}
  for name in sorted(differ):
    want, got = published.get(name, 'absent'), loaded.get(name, 'absent')
    lines += f'\n  {name}: published {want}, loaded {got}'
  what = f'{len(differ)} of {len(published)} tensors differ:{lines}'
  message = f'{engine} does not hold the published weights; {what}'
  lookup.require(not differ, message, SyncError)


def combine(parts: Iterable[Mapping[str, Sequence]]) -> dict[str, str]:
  """The same strings from the sums that the workers of a server computed.

  parts: of each worker {name: [dtype, shape of the whole, low, high]}, sums
  over its part. A 'head' that equals 'embed' is omitted: the published model
  ties the two, and the server computes with a copy.
  """
  sums = {}
  for part in parts:
    for name, (dtype, shape, low, high) in part.items():
      *_, a, b = sums.get(name, (0, 0))
      sums[name] = dtype, shape, (a + low) % 2**32, (b + high) % 2**32
  out = {name: _text(*entry) for name, entry in sums.items()}
  if 'head' in out and out['head'] == out.get('embed'):
    del out['head']
  return out


def _text(dtype: str, shape: Sequence[int], low: int, high: int) -> str:
  return f'{dtype}[{",".join(map(str, shape))}]:{low:08x}{high:08x}'
