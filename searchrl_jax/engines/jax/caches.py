"""The sampler's caches of keys and values, and attention through them.

Axis letters: B slots or rows, T tokens, S cache positions, N/K query/kv heads,
G = N / K, H head dim. The caches of a layer (`axes`), or the `states.State` of
a delta net, are donated by the programs of `engines.jax.decode`: scatters
write in place.
"""

import functools
import math

import jax
from jax import lax
import jax.numpy as jnp

from searchrl_jax.devices import sharding
from searchrl_jax.engines.jax import live, ragged, states
from searchrl_jax.models import attention
from searchrl_jax.models.decoder import DecoderConfig

# Positions of a cache that `attention` reads at once: on a CPU as many as fit
# into its caches, otherwise enough to amortise a kernel launch.
BLOCKS = {'cpu': 128}
BLOCK = 1024
# Rows whose blocks a CPU reads together: always as many, because the product of
# fewer may have other last bits. Small blocks cost more calls than bytes.
PART, PART_BYTES = 8, 2**19


def block_size() -> int:
  return BLOCKS.get(sharding.platform(), BLOCK)


def length(max_len: int) -> int:
  """Positions of a slot's cache: max_len, in whole blocks if above two.

  On a GPU at least in whole blocks of `live`, on a TPU in pages of `ragged`.
  """
  block = block_size()
  if max_len <= 2 * block:
    least = {'gpu': live.BLOCK, 'tpu': ragged.PAGE}
    block = least.get(sharding.platform(), 1)
  return -(-max_len // block) * block


def like(
  cfg: DecoderConfig, mesh, axes, shape, dtype: str = ''
) -> jax.ShapeDtypeStruct:
  """An array; dtype: '' is cfg.dtype. Without a mesh its sharding names the
  device: an array that is not committed to a device causes another
  compilation."""
  if mesh is None:
    device = jax.config.jax_default_device or jax.local_devices()[0]
    where: jax.sharding.Sharding = jax.sharding.SingleDeviceSharding(device)
  else:
    where = sharding.named(mesh, axes, shape)
  dtype = jnp.dtype(dtype or cfg.dtype)
  return jax.ShapeDtypeStruct(shape, dtype, sharding=where)


def axes(cfg: DecoderConfig, mesh=None) -> tuple[tuple[str | None, ...], ...]:
  """The axes of a layer's keys, of its values, and of what routers chose.

  Values are [B, K, S, H]. Keys are [B, K, H, S] if several queries share them:
  scores are then a plain matrix product, which is twice as fast on a CPU. For
  one query that order is a third slower, so keys have the order of values. On a
  TPU both are one array, that of `ragged`, if its kernel takes it.
  With cfg.keeps_routes every layer has another, int16 [B, 1, S, k].
  """
  values = ('batch', 'kv_heads', 'time', 'head_dim')
  keys = values
  if cfg.n_heads != cfg.n_kv_heads:
    keys = ('batch', 'kv_heads', 'head_dim', 'time')
  one = ragged.fits(cfg, mesh)
  own = (ragged.axes(cfg, mesh),) if one else (keys, values)
  routes = ('batch', None, 'time', None)
  return (*own, routes) if cfg.keeps_routes else own


def abstract(
  cfg: DecoderConfig, slots: int, max_len: int, mesh=None, chunk: int = 1
) -> list:
  """Shapes and shardings of the result of `make`."""
  K, S, H = cfg.n_kv_heads, length(max_len), cfg.head_dim
  sizes = {'batch': slots, 'kv_heads': K, 'time': S, 'head_dim': H}
  names = axes(cfg, mesh)
  if ragged.fits(cfg, mesh):
    shapes = [(slots, S, 2 * K, H)]
  else:
    shapes = [tuple(sizes[axis] for axis in x) for x in names[:2]]
  pair = tuple(like(cfg, mesh, *x) for x in zip(names, shapes))
  if cfg.keeps_routes:
    size = slots, 1, S, cfg.moe.chosen
    pair = *pair, like(cfg, mesh, names[-1], size, 'int16')
  nets, state = cfg.delta_layers, None
  if nets:
    layouts = states.layouts(cfg, slots, chunk)
    state = states.State(*(like(cfg, mesh, *x) for x in layouts))
  return [state if i in nets else pair for i in range(cfg.n_layers)]


def make(
  cfg: DecoderConfig, slots: int, max_len: int, mesh=None, chunk: int = 1
) -> list:
  """Zeroed caches: for each layer those of `axes` over `slots` and
  `length(max_len)`, or the `states.State` of a delta net.

  chunk: tokens that one call decodes at most.
  """
  zeros = lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding)
  return jax.tree.map(zeros, abstract(cfg, slots, max_len, mesh, chunk))


def read(x, time: int, slots, start, size: int, mode: str = 'clip'):
  """`size` positions from start [R], in the rows slots [R] of a cache."""
  shape = [1, *x.shape[1:]]
  shape[time] = size
  numbers = lax.GatherDimensionNumbers((1, 2, 3), (0,), (0, time))
  at = jnp.stack([slots, start], -1)
  return lax.gather(x, at, numbers, tuple(shape), mode=mode, fill_value=0)


def attend(cfg, q, cache, positions, window: int = 0, mesh=None, slots=None):
  """q [B, T, N, H] at ascending positions [B, T] over rows of a layer's caches.

  A long cache is read block by block, with a running maximum, up to the last
  position that any row needs; on a CPU, of each row the blocks that it sees, if
  they are large (PART_BYTES) or `slots` names the rows. A TPU, and for a single
  token a GPU, read up to that of each row, by a kernel; where it does not fit,
  a single token reads the whole cache, because each block would be copied
  first, and the host waited for between them. A position beyond a row's own
  changes nothing in that row (a weight of 0, a factor of 1), so that a row's
  result does not depend on the positions of other rows (design 5.10).
  window: tokens that a token sees, itself included; 0: all before it.
  mesh: of the caches.
  slots: int32 [B], the rows of the caches (past the last: any row); None: all.
  """
  if ragged.fits(cfg, mesh):
    return ragged.attend(q, cache[0], positions, window, slots, mesh)
  (B, T, N, H), (k, v, *_) = q.shape, cache
  time = axes(cfg, mesh)[0].index('time')
  keys = 'BKHS' if time == 3 else 'BKSH'
  q, S = attention.grouped_queries(q, cfg.n_kv_heads), v.shape[2]
  block, cpu = block_size(), sharding.platform() == 'cpu'
  large = PART * math.prod(v.shape[1:]) // S * block * v.dtype.itemsize
  by_row = cpu and S > 2 * block
  by_row &= slots is not None or large >= PART_BYTES
  if slots is not None and not by_row:
    k, v = (x.at[slots].get(mode='clip') for x in (k, v))

  def masked(q, k, positions, first):
    s = attention.scores(f'BKGTH,{keys}->BKGTS', q, k)
    at = jnp.reshape(first, (-1, 1, 1)) + jnp.arange(k.shape[time])
    seen = at <= positions[:, :, None]
    if window:
      seen &= at > positions[:, :, None] - window
    # A run of positions may lie before the window as a whole: their weights of
    # 1, relative to a maximum of -1e30, are lost at the first that is seen.
    hidden = -1e30 if window else -jnp.inf
    return jnp.where(seen[:, None, None], s, hidden)

  def mixed(w, v):
    return attention.einsum32('BKGTS,BKSH->BKGTH', w.astype(v.dtype), v)

  def attend_run(top, q, k, v, positions, first):
    """Weights of one run of positions, relative to a maximum."""
    s = masked(q, k, positions, first)
    top = jnp.maximum(top, jnp.max(s, -1, keepdims=True))
    w = jnp.exp(s - top)
    return top, jnp.sum(w, -1, keepdims=True), mixed(w, v)

  def add(carry, *run):
    top, total, o = carry
    new, more, extra = attend_run(top, *run)
    shrink = jnp.exp(top - new)
    return new, total * shrink + more, o * shrink + extra

  one = T == 1 and not cpu
  if one and live.fits(q, v):
    total, o = 1.0, _live(q, k, v, positions, window, time, mesh)
  elif one:
    # One kernel reads the scores, and writes weights in half precision.
    total, o = 1.0, mixed(jax.nn.softmax(masked(q, k, positions, 0)), v)
  elif S <= 2 * block:
    _, total, o = attend_run(-jnp.inf, q, k, v, positions, 0)
  elif by_row:
    slots = jnp.arange(B) if slots is None else slots
    total, o = _by_row(add, q, k, v, positions, window, time, slots)
  else:

    def step(i, carry):
      part = lax.dynamic_slice_in_dim(k, i * block, block, time)
      values = lax.dynamic_slice_in_dim(v, i * block, block, 2)
      return add(carry, q, part, values, positions, i * block)

    blocks = jnp.minimum(jnp.max(positions) // block + 1, S // block)
    first = 0
    if window:
      first = jnp.maximum(jnp.min(positions) - window + 1, 0) // block
    _, total, o = lax.fori_loop(first, blocks, step, _nothing(q))
  o = o / total  # last: H numbers a head rather than S
  return o.astype(v.dtype).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def _nothing(q):
  """(maximum, sum of weights, of values) of no positions."""
  zero = jnp.zeros((*q.shape[:-1], 1), jnp.float32)
  return zero - jnp.inf, zero, jnp.zeros(q.shape, jnp.float32)


def _by_row(add, q, k, v, positions, window, time, slots):
  """Sums of weights and values: `add` for the blocks that each row sees.

  Rows are sorted by the number of these, so that those with an i-th block come
  first; some are read together. Each has its blocks in ascending order, whoever
  is beside it.
  """
  B, S, block = len(q), v.shape[2], block_size()
  together = -(-B // -(-B // PART))
  low = positions[:, 0] - window + 1 if window else jnp.zeros(B, jnp.int32)
  first = jnp.maximum(low, 0) // block
  count = jnp.minimum(positions[:, -1], S - 1) // block - first + 1
  order = jnp.argsort(-count)
  # Whole parts: what is added has been read, and what it gives is dropped.
  filled = jnp.pad(order, (0, -B % together), mode='edge')
  rows = [x[filled] for x in (q, positions, slots, first)]

  def part(i, p, carry):
    cut = lambda x: lax.dynamic_slice_in_dim(x, p * together, together)
    q, positions, slots, first = map(cut, rows)
    at = (first + i) * block
    keys, values = (
      read(x, t, slots, at, block) for x, t in ((k, time), (v, 2))
    )
    new = add(map(cut, carry), q, keys, values, positions, at)
    put = lambda x, y: lax.dynamic_update_slice_in_dim(x, y, p * together, 0)
    return tuple(map(put, carry, new))

  def column(i, carry):
    parts = -(-jnp.sum(count > i) // together)
    return lax.fori_loop(0, parts, functools.partial(part, i), carry)

  sums = lax.fori_loop(0, jnp.max(count), column, _nothing(rows[0]))
  back = jnp.argsort(order)
  return [x[back] for x in sums[1:]]


def _live(q, k, v, positions, window, time, mesh):
  """`live.attend`: float32 [B, K, G, 1, H]. Each device has its own heads."""

  def local(q, k, v, positions):
    return live.attend(q[:, :, :, 0], k, v, positions[:, 0], window, time)[0]

  mesh, left = sharding.undivided(mesh)
  if left:
    part = sharding.spec(mesh, ('batch', 'kv_heads', None, None), k.shape)
    rows = sharding.spec(mesh, ('batch', None), positions.shape)
    local = jax.shard_map(
      local,
      mesh=mesh,
      in_specs=(part, part, part, rows),
      out_specs=part,
      axis_names=left,
      check_vma=False,
    )
  return local(q, k, v, positions)[:, :, :, None]


def write(cfg, cache, slots, positions, new, mesh):
  """Writes k and v [R, T, K, H] to (slots [R], positions [R, T]) of a layer."""
  at = slots, positions, mesh
  if ragged.fits(cfg, mesh):
    new = (ragged.pairs(*new),)
  return tuple(map(functools.partial(_put, at), cache, new, axes(cfg, mesh)))


def write_routes(cfg, cache, slots, positions, chosen, mesh):
  """The same of the experts int32 [R, T, k] of a layer, if it has some.

  Returns its last cache.
  """
  if not chosen:
    return cache[-1:]
  (own,), names = chosen, axes(cfg, mesh)[-1]
  fresh = own[:, :, None].astype(jnp.int16)
  return (_put((slots, positions, mesh), cache[-1], fresh, names),)


def _put(at, x, fresh, names):
  slots, positions, mesh = at
  where = [slice(None)] * 4
  where[0], where[names.index('time')] = slots[:, None], positions
  x = x.at[tuple(where)].set(fresh, mode='drop')
  return sharding.constrain(x, mesh, *names)
