"""Log-probs of loss tokens: gathered hidden states, float32 head in blocks.

Logits of a whole batch are never held (design 5.8): the hidden states that
predict loss tokens are gathered into a static size and the head runs over
them in blocks of the vocabulary, forward and backward. Axis letters as in
`models.decoder`; S shards (mesh devices along data and fsdp), P = B T / S
positions and C loss tokens of a shard.
"""

import functools
import math

import jax
import jax.numpy as jnp

from searchrl_jax.devices import sharding
from searchrl_jax.models import attention, decoder


def _take(x, index):
  """x [S, P, ...] at index [S, C]; zeros where the index is P or more."""
  return jax.vmap(lambda a, i: a.at[i].get(mode='fill', fill_value=0))(x, index)


@jax.custom_vjp
def compact(x, index, inverse):
  """Rows `index` [S, C] of x [S, P, ...]; `inverse` [S, P] undoes it.

  index holds P, and inverse C, for 'none', which gives zeros. The gradient is
  a gather through `inverse` where autodiff would scatter, which XLA's CPU
  backend does one row at a time.
  """
  del inverse
  return _take(x, index)


compact.defvjp(
  lambda x, index, inverse: (_take(x, index), inverse),
  lambda inverse, g: (_take(g, inverse), None, None),
)


def _blocks(w, n: int, mesh):
  """Cuts the head [V, D] into about n runs of rows to scan over.

  On a tensor axis each device cuts its own rows. A number of runs that
  divides V needs no padding, so one is sought up to 2 n.

  Returns:
    (first [n, ways], rows [n, ways, Vb, D]) and whether there is padding.
  """
  V, D = w.shape
  ways = 1 if mesh is None else mesh.shape['tensor']
  ways = ways if V % ways == 0 else 1
  own = V // ways
  n = min(n, own)
  n = next((m for m in range(n, 2 * n + 1) if own % m == 0), n)
  Vb, padding = own // n, 0
  if own % n:
    # A padded head is no longer cut as it lies on the devices.
    ways, Vb = 1, -(-V // n)
    padding = n * Vb - V
    w = jnp.pad(w, ((0, padding), (0, 0)))
  rows = jnp.moveaxis(w.reshape(ways, n, Vb, D), 1, 0)
  first = jnp.arange(n)[:, None] * Vb + jnp.arange(ways) * (n * Vb)
  return (first, rows), padding > 0


def _whole(rows, dtype, mesh):
  """A run of rows of the head in `dtype`, gathered over fsdp only once."""
  return sharding.constrain(rows.astype(dtype), mesh, 'vocab', None, None)


def _logits(x, rows, temperature, mesh):
  """float32 [S, C, ways, Vb] of rows [ways, Vb, D]."""
  # Two axes, not three: see `products.dense`.
  flat = x.reshape(-1, x.shape[-1])
  table = rows.reshape(-1, rows.shape[-1])
  z = attention.einsum32('RD,VD->RV', flat, table)
  if temperature != 1.0:
    z = z * (1.0 / temperature)
  z = z.reshape(*x.shape[:2], *rows.shape[:2])
  return sharding.constrain(z, mesh, 'batch', 'time', 'vocab', None)


def _average(p, rows):
  """p [S, C, ways, Vb] times rows [ways, Vb, D] -> float32 [S, C, D]."""
  flat = p.reshape(math.prod(p.shape[:2]), -1).astype(rows.dtype)
  table = rows.reshape(-1, rows.shape[-1])
  return attention.einsum32('RV,VD->RD', flat, table).reshape(*p.shape[:2], -1)


def _normaliser(x, w, temperature, chunk, mesh, average: bool):
  """Log-sum-exp [S, C] of the logits and, if asked, a [S, C, D].

  One sweep over the vocabulary with a running maximum (as in online softmax,
  Milakov and Gimelshein, arXiv 1805.02867).
  """
  V = w.shape[0]
  blocks, padded = _blocks(w, -(-x.shape[1] // chunk), mesh)

  def step(carry, part):
    top, total, a = carry
    first, rows = part[0], _whole(part[1], x.dtype, mesh)
    z = _logits(x, rows, temperature, mesh)
    if padded:
      real = first[:, None] + jnp.arange(rows.shape[1]) < V
      z = jnp.where(real, z, -jnp.inf)
    new = jnp.maximum(top, jnp.max(z, (-2, -1)))
    e = jnp.exp(z - new[..., None, None])
    shrink = jnp.exp(top - new)
    total = total * shrink + jnp.sum(e, (-2, -1))
    if average:
      a = a * shrink[..., None] + _average(e, rows)
    return (new, total, a), None

  zero = jnp.zeros(x.shape[:2], jnp.float32)
  a = jnp.zeros(x.shape, jnp.float32) if average else None
  (top, total, a), _ = jax.lax.scan(step, (zero - jnp.inf, zero, a), blocks)
  return jnp.log(total) + top, a / total[..., None] if average else None


def _dot(x, y, temperature):
  """x y / temperature over D, in float32."""
  z = jnp.sum(x.astype(jnp.float32) * y.astype(jnp.float32), -1)
  return z * (1.0 / temperature)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def head_logps(
  x, w, targets, temperature: float, chunk: int, entropy_grad: bool, mesh
):
  """Log-probs of targets and entropies under softmax(x w' / temperature).

  With p the softmax and a = sum_v p_v w_v,

      H = log-sum-exp - x a / temperature
      d logp_t / dx = (w_t - a) / temperature
      d logp_t / dw_v = (1[v = t] - p_v) x / temperature

  Forward and backward sweep over the vocabulary in blocks, for all tokens at
  once: a block of the backward sweep is a finished piece of dw, so nothing
  of the size of the head is summed up, and dx needs no logits, as `a` is
  kept. Both sweeps compute the logits, of which chunk x S x V are held.

  Args:
    x: hidden states [S, C, D].
    w: the head as [V, D] (an embedding, or a transposed head).
    targets: int32 [S, C].
    temperature: that of sampling; positive.
    chunk: logits held at once, in tokens of a shard.
    entropy_grad: whether the entropy passes a gradient.
    mesh: pins the layout of the logits; may be None.

  Returns:
    logps and entropy, float32 [S, C], in nats.
  """
  return _head_fwd(x, w, targets, temperature, chunk, entropy_grad, mesh)[0]


def _head_fwd(x, w, targets, temperature, chunk, entropy_grad, mesh):
  lse, a = _normaliser(x, w, temperature, chunk, mesh, True)
  logps = _dot(x, w[targets].astype(x.dtype), temperature) - lse
  entropy = lse - _dot(x, a, temperature)
  return (logps, entropy), (x, w, targets, entropy, lse, a)


def _head_bwd(temperature, chunk, entropy_grad, mesh, saved, grads):
  x, w, targets, entropy, lse, a = saved
  (S, C, D), V = x.shape, w.shape[0]
  g, g_entropy = (y * (1.0 / temperature) for y in grads)
  blocks, _ = _blocks(w, -(-C // chunk), mesh)
  wide = lambda y: y[..., None, None]

  def step(dx, part):
    first, rows = part[0], _whole(part[1], x.dtype, mesh)
    logp = _logits(x, rows, temperature, mesh) - wide(lse)
    p = jnp.exp(logp)
    vocab = first[:, None] + jnp.arange(rows.shape[1])
    dz = jnp.where(wide(targets) == vocab, wide(g), 0.0) - wide(g) * p
    if entropy_grad:
      # dH / dz = -p (log p + H). Padding rows are zero: so is their share.
      more = wide(g_entropy) * p * (logp + wide(entropy))
      dz = dz - more
      dx = dx - _average(more, rows)
    flat = dz.astype(x.dtype).reshape(S * C, -1)
    dw = attention.einsum32('RV,RD->VD', flat, x.reshape(S * C, D))
    return dx, dw.reshape(rows.shape).astype(w.dtype)

  own = w[targets].astype(x.dtype).astype(jnp.float32)  # as in `a`
  dx = g[..., None] * (own - a)
  dx, dw = jax.lax.scan(step, dx, blocks)
  if dw.shape[1] > 1:
    dw = jnp.moveaxis(dw, 0, 1)
  dw = dw.reshape(-1, D)[:V]
  return dx.astype(x.dtype), dw, None


head_logps.defvjp(_head_fwd, _head_bwd)


def gather(params, cfg: decoder.DecoderConfig, arrays: dict, mesh=None):
  """What the loss tokens are predicted from, and what takes it back.

  Args:
    arrays: ids int32 [B, T], starts int32 [N] of the trajectories in them
      (`types.Batch`), and where the loss tokens are, index int32 [S, C] and
      inverse int32 [S, P] (`update.compaction`). routes int16 [B, T, L, k] (of
      the tree's nodes, if there is one): the experts to use, or None.

  Returns:
    hidden states [S, C, D], zeros past the loss tokens, a function of
    x [S, C, ...] that gives [B, T, ...], zeros off the loss tokens, and of
    routes float32 [2], sums over the loss tokens: 1 where they are not known,
    the share of layers in which the router would choose others; else None.
  """
  ids, index, inverse = arrays['ids'], arrays['index'], arrays['inverse']
  routes, (B, T), (S, C) = arrays.get('routes'), ids.shape, index.shape
  P = B * T // S
  # The token at p is predicted from p - 1. No loss token stands first in its
  # trajectory, so the step back never leaves it.
  before = jnp.where(index < P, index - 1, P)
  if arrays['tree'] is not None:
    tree = arrays['tree']
    nodes = attention.Nodes(tree.depths, tree.ends)
    x, differs = decoder.replayed(
      params, cfg, tree.ids, routes, mesh=mesh, tree=nodes, longest=T
    )
    # Trajectories share nodes: gradients are summed.
    M = tree.ids.shape[1]
    at = tree.at.reshape(S, P)
    places = jnp.where(index < P, _take(at, before), M)
    x = _take(x, places)
  else:
    starts = arrays['starts'].reshape(B, -1)
    x, differs = decoder.replayed(
      params, cfg, ids, routes, mesh=mesh, starts=starts
    )
    after = jnp.concatenate(
      [inverse[:, 1:], jnp.full((S, 1), C, inverse.dtype)], 1
    )
    places = before
    x = compact(x.reshape(S, P, -1), before, after)
  x = sharding.constrain(x, mesh, 'batch', 'time', 'features')
  replay = None
  if routes is not None:
    unknown = (routes[:, :, 0, 0] < 0).astype(jnp.float32)
    both = (_take(y.reshape(S, -1), places) for y in (unknown, differs))
    replay = jnp.stack([jnp.sum(y) for y in both])

  def spread(y):
    return compact(y, inverse, index).reshape(B, T, *y.shape[2:])

  return x, spread, replay


def columns(x, w, at, targets, logps, temperature: float, chunk: int):
  """Log-probs of further ids at each position, float32 [S, C, K].

  log p(v) = log p(target) + x (w_v - w_target) / temperature, so that the
  normaliser, and its gradient, are those of `head_logps`.

  Args:
    x, w, targets, temperature, chunk: see `head_logps`.
    at: int32 [S, C, K].
    logps: of the targets [S, C].
  """

  @jax.checkpoint  # K rows of the head for each token are not kept
  def step(part):
    x, at, target = part  # [S, D], [S, K], [S]
    z = attention.einsum32('SD,SKD->SK', x, w[at].astype(x.dtype))
    own = _dot(x, w[target].astype(x.dtype), temperature)
    return z * (1.0 / temperature) - own[:, None]

  parts = jax.tree.map(lambda y: jnp.moveaxis(y, 1, 0), (x, at, targets))
  z = jax.lax.map(step, parts, batch_size=min(chunk, x.shape[1]))
  return jnp.moveaxis(z, 0, 1) + logps[..., None]


def top(
  params,
  cfg: decoder.DecoderConfig,
  arrays: dict,
  temperature: float,
  head_chunk: int,
  k: int,
  mesh=None,
):
  """The k most likely ids of each loss token, int32 [B, T, k], likely first.

  See `token_logps`.
  """
  x, spread, _ = gather(params, cfg, arrays, mesh)
  w = params['embed'] if cfg.tied else params['head'].T
  blocks, padded = _blocks(w, -(-x.shape[1] // head_chunk), mesh)

  def step(best, part):
    first, rows = part[0], _whole(part[1], x.dtype, mesh)
    ids = first[:, None] + jnp.arange(rows.shape[1])
    z = _logits(x, rows, temperature, mesh)
    z = jnp.where(ids < len(w), z, -jnp.inf) if padded else z
    ids = jnp.broadcast_to(ids.reshape(-1), (*x.shape[:2], ids.size))
    z = jnp.concatenate([best[0], z.reshape(ids.shape)], -1)
    ids = jnp.concatenate([best[1], ids.astype(jnp.int32)], -1)
    z, at = jax.lax.top_k(z, k)
    return (z, jnp.take_along_axis(ids, at, -1)), None

  none = jnp.full((*x.shape[:2], k), -jnp.inf)
  (_, ids), _ = jax.lax.scan(
    step, (none, jnp.zeros_like(none, jnp.int32)), blocks
  )
  return spread(ids)


def token_logps(
  params,
  cfg: decoder.DecoderConfig,
  arrays: dict,
  temperature: float,
  head_chunk: int,
  mesh=None,
  entropy: bool = True,
  entropy_grad: bool = False,
):
  """Log-probs and entropy of the loss tokens at the sampling temperature.

  Args:
    arrays: see `gather`.
    temperature: that of sampling; positive.
    head_chunk: logits held at once, in tokens of a shard: times V.
    mesh: see `head_logps`.
    entropy: whether it is wanted; costs another product with the head.
    entropy_grad: whether the entropy is differentiated.

  Returns:
    logps and entropy in nats, float32 [B, T], 0 on other tokens, the
    log-probs of arrays['at'] [B, T, K], or None without them, and what `gather`
    says of routes. Entropy is None if not wanted, and then logps have no
    efficient gradient.
  """
  index = arrays['index']
  S = len(index)
  x, spread, replay = gather(params, cfg, arrays, mesh)
  targets = _take(arrays['ids'].reshape(S, -1), index)
  w = params['embed'] if cfg.tied else params['head'].T
  if entropy:
    logps, h = head_logps(
      x, w, targets, temperature, head_chunk, entropy_grad, mesh
    )
  else:
    lse, _ = _normaliser(x, w, temperature, head_chunk, mesh, False)
    logps = _dot(x, w[targets].astype(x.dtype), temperature) - lse
  at = arrays.get('at')
  if at is not None:
    own = _take(at.reshape(S, -1, at.shape[-1]), index)
    at = spread(columns(x, w, own, targets, logps, temperature, head_chunk))
  if not entropy:
    return spread(logps), None, at, replay
  both = spread(jnp.stack([logps, h], -1))
  return both[..., 0], both[..., 1], at, replay
