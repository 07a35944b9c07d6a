"""Log-probs of loss tokens: gathered hidden states, float32 head by chunk.

Logits of a whole batch are never held (design 5.8): the hidden states that
predict loss tokens are gathered into a static size and the head runs over
them in chunks, forward and backward. Axis letters as in `models.decoder`;
S shards (mesh devices along data and fsdp), P = B T / S positions and C loss
tokens of a shard.
"""

import functools

import jax
import jax.numpy as jnp

from searchrl_jax import sharding
from searchrl_jax.models import decoder


def _take(x, index):
  """x [S, P, ...] at index [S, C]; zeros where the index is P or more."""
  return jax.vmap(lambda a, i: a.at[i].get(mode='fill', fill_value=0))(
    x, index
  )


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


def _chunked(x, n: int):
  """[S, n c, ...] -> [n, S, c, ...]."""
  S, C = x.shape[:2]
  return jnp.moveaxis(x.reshape(S, n, C // n, *x.shape[2:]), 1, 0)


def _whole(x):
  """[n, S, c, ...] -> [S, n c, ...]."""
  x = jnp.moveaxis(x, 0, 1)
  return x.reshape(x.shape[0], -1, *x.shape[3:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6, 7))
def head_logps(x, w, targets, tied: bool, temperature: float, chunk: int,
               entropy_grad: bool, mesh):
  """Log-probs of targets and entropies under softmax(x w / temperature).

  Args:
    x: hidden states [S, C, D].
    w: the head [D, V], or the embedding [V, D] if tied.
    targets: int32 [S, C].
    temperature: that of sampling; positive.
    chunk: tokens of a shard scored at once.
    entropy_grad: whether the entropy passes a gradient.
    mesh: pins the layout of the logits; may be None.

  Returns:
    logps and entropy, float32 [S, C], in nats. The backward pass computes the
    logits of each chunk again, unless there is only one chunk.
  """
  return _head_fwd(
    x, w, targets, tied, temperature, chunk, entropy_grad, mesh
  )[0]


def _logits(x, w, tied, temperature, mesh):
  eq = 'SCD,VD->SCV' if tied else 'SCD,DV->SCV'
  z = jnp.einsum(
    eq, x, w.astype(x.dtype), preferred_element_type=jnp.float32
  )
  if temperature != 1.0:
    z = z * (1.0 / temperature)
  return sharding.constrain(z, mesh, 'batch', 'time', 'vocab')


def _split(C: int, chunk: int) -> tuple[int, int]:
  """Number of chunks and the padding that makes them equal."""
  n = -(-C // chunk)
  return n, -C % n


def _pad(x, pad: int):
  return jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))


def _is_target(z, targets):
  vocab = jax.lax.broadcasted_iota(jnp.int32, z.shape, 2)
  return vocab == targets[..., None]


def _score(z, targets):
  """logps, entropy, log-sum-exp [S, C] of logits [S, C, V]."""
  top = jax.lax.stop_gradient(jnp.max(z, -1, keepdims=True))
  d = z - top
  e = jnp.exp(d)
  total = jnp.sum(e, -1)
  # sum p log p = sum p d - log(total), as log p = d - log(total).
  entropy = jnp.log(total) - jnp.sum(e * d, -1) / total
  lse = jnp.log(total) + top[..., 0]
  hit = jnp.take_along_axis(z, targets[..., None], -1)[..., 0]
  return hit - lse, entropy, lse


def _head_fwd(x, w, targets, tied, temperature, chunk, entropy_grad, mesh):
  n, pad = _split(x.shape[1], chunk)
  if n == 1:
    z = _logits(x, w, tied, temperature, mesh)
    logps, entropy, lse = _score(z, targets)
    return (logps, entropy), (x, w, targets, z, lse, entropy)

  def one(part):
    h, t = part
    return _score(_logits(h, w, tied, temperature, mesh), t)

  parts = _chunked(_pad(x, pad), n), _chunked(_pad(targets, pad), n)
  logps, entropy, lse = (
    _whole(y)[:, :x.shape[1]] for y in jax.lax.map(one, parts)
  )
  return (logps, entropy), (x, w, targets, None, lse, entropy)


def _head_bwd(tied, temperature, chunk, entropy_grad, mesh, saved, grads):
  x, w, targets, z, lse, entropy = saved
  g, g_entropy = grads
  n, pad = _split(x.shape[1], chunk)
  eq_x = 'SCV,VD->SCD' if tied else 'SCV,DV->SCD'
  eq_w = 'SCV,SCD->VD' if tied else 'SCV,SCD->DV'

  def one(z, h, t, lse, entropy, g, g_entropy):
    """d logp_t / dz = onehot(t) - p;  dH / dz = -p (log p + H)."""
    logp = z - lse[..., None]
    p = jnp.exp(logp)
    dz = jnp.where(_is_target(z, t), g[..., None], 0.0) - g[..., None] * p
    if entropy_grad:
      dz = dz - g_entropy[..., None] * p * (logp + entropy[..., None])
    if temperature != 1.0:
      dz = dz * (1.0 / temperature)
    dz = sharding.constrain(dz, mesh, 'batch', 'time', 'vocab')
    dz = dz.astype(h.dtype)
    dh = jnp.einsum(eq_x, dz, w.astype(h.dtype))
    dw = jnp.einsum(eq_w, dz, h, preferred_element_type=jnp.float32)
    return dh.astype(x.dtype), dw

  rows = (targets, lse, entropy, g, g_entropy)
  if n == 1:
    dx, dw = one(z, x, *rows)
    return dx, dw.astype(w.dtype), None

  def step(dw, part):
    h, *rest = part
    dh, more = one(_logits(h, w, tied, temperature, mesh), h, *rest)
    return dw + more, dh

  parts = [_chunked(_pad(y, pad), n) for y in (x, *rows)]
  dw, dx = jax.lax.scan(step, jnp.zeros(w.shape, jnp.float32), parts)
  return _whole(dx)[:, :x.shape[1]], dw.astype(w.dtype), None


head_logps.defvjp(_head_fwd, _head_bwd)


def token_logps(params, cfg: decoder.DecoderConfig, arrays: dict, *,
                temperature: float, head_chunk: int, mesh=None,
                entropy_grad: bool = False):
  """Log-probs and entropy of the loss tokens at the sampling temperature.

  Args:
    arrays: ids int32 [B, T], lengths int32 [B], and where the loss tokens
      are, index int32 [S, C] and inverse int32 [S, P] (`update.compaction`).
    head_chunk: loss tokens scored at once, over all shards.
    entropy_grad: whether the entropy is differentiated.

  Returns:
    logps and entropy in nats, float32 [B, T], 0 on other tokens.
  """
  ids, index, inverse = arrays['ids'], arrays['index'], arrays['inverse']
  (B, T), (S, C) = ids.shape, index.shape
  P = B * T // S
  x = decoder.hidden_states(params, cfg, ids, arrays['lengths'], mesh)
  # The token at p is predicted from p - 1. No loss token stands first in its
  # row, so the step back never leaves the row.
  before = jnp.where(index < P, index - 1, P)
  after = jnp.concatenate(
    [inverse[:, 1:], jnp.full((S, 1), C, inverse.dtype)], 1
  )
  x = compact(x.reshape(S, P, -1), before, after)
  x = sharding.constrain(x, mesh, 'batch', 'time', 'features')
  targets = _take(ids.reshape(S, P), index)
  w = params['embed'] if cfg.tied else params['head']
  logps, entropy = head_logps(
    x, w, targets, cfg.tied, temperature, max(1, head_chunk // S),
    entropy_grad, mesh,
  )
  both = compact(jnp.stack([logps, entropy], -1), inverse, index)
  both = both.reshape(B, T, 2)
  return both[..., 0], both[..., 1]
