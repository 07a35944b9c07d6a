"""Attention over the live part of a cache on TPUs, by JAX's ragged kernel.

Axis letters: B slots, S cache positions, R rows, T tokens, N query heads, K kv
heads, G = N / K, H head dim.

JAX's `ragged_paged_attention` reads pages of keys and values that lie in one
array, a key beside its value. A slot is a run of pages here, so that a cache
[B, S, 2K, H] is an array of pages as it lies, and XLA writes a token into it
without a copy. Each row reads the pages from the first that it sees to the last
in order, and no other: its result does not depend on other rows, bit by bit
(design 5.10).
"""

import math

import jax
import jax.numpy as jnp

from searchrl_jax.devices import sharding
from searchrl_jax.engines.jax import live
from searchrl_jax.models.decoder import DecoderConfig

PAGE = 128  # positions
# That are read at once. A window begins anywhere in its first page.
_PAGES, _PAGES_OF_WINDOW = 2, 1
# Queries that share what is read: rows of one token, or tokens of a row.
# With 64 heads, many more do not fit in a core.
_ROWS, _TOKENS = 8, 32


def fits(cfg: DecoderConfig, mesh=None) -> bool:
  """Whether caches of this model on this mesh are those of the kernel.

  It takes bfloat16, and of a device one kv head whose dim is a multiple of 128,
  or several of 128 that fill tiles of memory. It compiles for v5e and v5p (and
  for v6e, where no test says so).
  """
  if sharding.platform() != 'tpu' or jnp.dtype(cfg.dtype) != jnp.bfloat16:
    return False
  K, H = cfg.n_kv_heads // (_divided(cfg, mesh) or 1), cfg.head_dim
  return (K == 1 and H % 128 == 0) or (H == 128 and (K in (2, 4) or K % 8 == 0))


def axes(cfg: DecoderConfig, mesh=None) -> tuple[str | None, ...]:
  """The axes of a cache: its third has 2K, and is cut where K is."""
  heads = 'kv_heads' if _divided(cfg, mesh) else None
  return 'batch', 'time', heads, 'head_dim'


def pairs(k, v):
  """Keys and values [R, T, K, H] as a cache has them, [R, T, 2K, H]."""
  R, T, K, H = k.shape
  return jnp.stack([k, v], 3).reshape(R, T, 2 * K, H)


def attend(q, cache, positions, window=0, slots=None, mesh=None):
  """Softmax(q k) v over the positions that each token sees.

  Args:
    q: bfloat16 [R, T, N, H].
    cache: bfloat16 [B, S, 2K, H]; S is a multiple of PAGE.
    positions: int32 [R, T], ascending by one.
    window: positions that a token sees, its own included; 0: all.
    slots: int32 [R], the rows of the cache (past the last: any row); None: all.
    mesh: of the cache; each device computes its own heads.

  Returns:
    bfloat16 [R, T, N, H].
  """
  from jax.experimental.pallas.ops.tpu import ragged_paged_attention as jax_tpu

  (R, T, _, H), (B, S, heads, _) = q.shape, cache.shape
  pages, size = S // PAGE, _ROWS if T == 1 else max(16, math.gcd(T, _TOKENS))
  slots = jnp.arange(R) if slots is None else jnp.minimum(slots, B - 1)
  wide = window and window + T - 1  # positions that a row sees
  most = min(pages, -(-wide // PAGE) + 1) if window else pages
  low = jnp.maximum(positions[:, 0] - window + 1, 0) if window else 0
  first = jnp.broadcast_to(low // PAGE, R)  # page
  block = min(_PAGES_OF_WINDOW if window else _PAGES, most)
  index = jnp.minimum(first[:, None] + jnp.arange(most), pages - 1)
  index = (slots[:, None] * pages + index).astype(jnp.int32)
  # Tokens from the beginning of a row's first page to its last token.
  length = (positions[:, -1] + 1 - first * PAGE).astype(jnp.int32)

  def local(q, cache, length, index):
    with jax.named_scope(live.scope(wide, block * PAGE, R * -(-T // size), B)):
      return jax_tpu.ragged_paged_attention(
        q.reshape(R * T, *q.shape[2:]),
        cache.reshape(B * pages, PAGE, *cache.shape[2:]),
        length,
        index,
        jnp.arange(0, (R + 1) * T, T, dtype=jnp.int32),
        jnp.array([R], jnp.int32),
        sm_scale=1 / math.sqrt(H),
        sliding_window=window or None,
        num_kv_pages_per_block=block,
        num_queries_per_block=min(size, R * T),
      ).reshape(q.shape)

  mesh, left = sharding.undivided(mesh)
  if left:
    K = heads // 2
    cut = sharding.spec(mesh, (None, None, 'kv_heads', None), (1, 1, K, 1))
    whole = jax.sharding.PartitionSpec()
    local = jax.shard_map(
      local,
      mesh=mesh,
      in_specs=(cut, cut, whole, whole),
      out_specs=cut,
      axis_names=left,
      check_vma=False,
    )
  return local(q, cache, length, index)


def compiling_for(device_kind: str) -> None:
  """Compiles for TPUs that are only described, from now on.

  As of JAX 0.11, Pallas asks the device, and what it knows is private.
  """
  try:
    from jax._src.pallas.mosaic import tpu_info
  except ImportError:
    return
  version = tpu_info.chip_version_from_device_kind(device_kind)
  known = lambda: tpu_info.get_tpu_info_for_chip(version, 1)
  tpu_info.registry.setdefault('cpu', known)


def _divided(cfg: DecoderConfig, mesh) -> int:
  """How many parts the kv heads of a cache are cut into; 0: they are whole."""
  n = mesh.shape['tensor'] if mesh else 1
  return n if n > 1 and cfg.n_kv_heads % n == 0 else 0
