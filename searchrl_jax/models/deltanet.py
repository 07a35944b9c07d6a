"""Gated delta nets (Yang et al. 2024, arXiv 2412.06464), as Qwen3.5 has them.

Of each value head a state S [H, E] is kept, with a decay e^g and a rate beta:

  S <- e^g S;  u = beta (v - S^T k);  S <- S + k u^T;  o = S^T q

All of this is float32, and its products are in full precision: half precision
in the state, or in g, costs two digits. `chunked` computes a sequence in chunks
by products of matrices, `step` one token.

Axis letters: B rows, T tokens, C tokens of a chunk, K/V key/value heads,
G = V / K, H/E dims of a key/value head, M channels of the convolution.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from searchrl_jax.devices import sharding
from searchrl_jax.models.products import rounded

CHUNK = 64
_matmul = functools.partial(jnp.matmul, precision='highest')


@dataclasses.dataclass(frozen=True)
class Sizes:
  """taps: tokens that the convolution sees, the own one included."""

  key_heads: int
  value_heads: int
  key_dim: int
  value_dim: int
  taps: int

  @property
  def channels(self) -> int:
    """Of the convolution: queries, keys and values."""
    keys = self.key_heads * self.key_dim
    return 2 * keys + self.value_heads * self.value_dim


def table(s: Sizes, D: int) -> dict[str, tuple[tuple, tuple]]:
  """Of a layer with D features: parameter -> (shape, logical axes)."""
  M, V, E = s.channels, s.value_heads, s.value_dim
  return {
    'delta_qkv': ((D, M), ('embed', 'channels')),
    'delta_z': ((D, V, E), ('embed', 'heads', 'head_dim')),
    'delta_b': ((D, V), ('embed', 'heads')),
    'delta_a': ((D, V), ('embed', 'heads')),
    'delta_conv': ((M, 1, s.taps), ('channels', None, None)),
    'delta_a_log': ((V,), ('heads',)),
    'delta_dt_bias': ((V,), ('heads',)),
    'delta_norm': ((E,), ('norm',)),
    'delta_o': ((V, E, D), ('heads', 'head_dim', 'embed')),
  }


def initial(name: str, key, shape):
  """Initial values; None: as of other matrices.

  Those of transformers, but that the bias of a step (what softplus gives) is of
  steps from 0.001 to 0.1, as the authors train: with 1 a head forgets at once.
  """
  if name == 'delta_conv':
    most = shape[-1] ** -0.5
    return jax.random.uniform(key, shape, minval=-most, maxval=most)
  if name == 'delta_a_log':
    return jnp.log(jax.random.uniform(key, shape, minval=0.01, maxval=16.0))
  if name == 'delta_dt_bias':
    low, high = jnp.log(1e-3), jnp.log(0.1)
    steps = jnp.exp(jax.random.uniform(key, shape, minval=low, maxval=high))
    return jnp.log(jnp.expm1(steps))
  return jnp.ones(shape) if name == 'delta_norm' else None


def gates(a, b, a_log, dt_bias):
  """g and beta, float32 [B, T, V], from projections of the input."""
  dt_bias = rounded(dt_bias, a.dtype)
  a, b, a_log = (x.astype(jnp.float32) for x in (a, b, a_log))
  return -jnp.exp(a_log) * jax.nn.softplus(a + dt_bias), jax.nn.sigmoid(b)


def convolve(x, w, positions, before=None):
  """SiLU of the causal convolution of each channel: [B, T, M], in x's dtype.

  Args:
    x: [B, T, M].
    w: [M, 1, taps].
    positions: int32 [B, T]; tokens of an earlier sequence do not count.
    before: [B, taps - 1, M], the tokens before x; None: x is the beginning.
  """
  (B, T, M), taps = x.shape, w.shape[-1]
  if before is None:
    before = jnp.zeros((B, taps - 1, M), x.dtype)
  rows = jnp.concatenate([before, x], 1).astype(jnp.float32)
  w, out = rounded(w[:, 0], x.dtype), jnp.zeros((), jnp.float32)
  if T == 1 and sharding.platform() == 'cpu':
    # A sum that XLA computes once, not in each loop that needs a part of it.
    near = (positions >= jnp.arange(taps)[::-1])[..., None]
    out = jnp.sum(jnp.where(near, rows * w.T, 0.0), 1, keepdims=True)
    return jax.nn.silu(out).astype(x.dtype)
  for j in range(taps):
    at = taps - 1 - j
    near = (positions >= j)[..., None]
    out += jnp.where(near, rows[:, at : at + T] * w[:, at], 0.0)
  return jax.nn.silu(out).astype(x.dtype)


def heads(s: Sizes, x, mesh=None):
  """q, k [B, T, K, H] and v [B, T, V, E], float32, of convolved x [B, T, M].

  q and k have unit length, and q is divided by sqrt(H).
  """
  keys = s.key_heads * s.key_dim
  parts = jnp.split(x.astype(jnp.float32), [keys, 2 * keys], -1)
  q, k = (y.reshape(*x.shape[:2], s.key_heads, s.key_dim) for y in parts[:2])
  v = parts[2].reshape(*x.shape[:2], s.value_heads, s.value_dim)
  unit = lambda y: y * jax.lax.rsqrt(jnp.sum(y * y, -1, keepdims=True) + 1e-6)
  out = unit(q) * s.key_dim**-0.5, unit(k), v
  axes = 'batch', 'time', 'heads', 'head_dim'
  return tuple(sharding.constrain(y, mesh, *axes) for y in out)


def _inverse(x):
  """The inverse of I + the part of x [..., C, C] below its diagonal.

  Blocks on the diagonal are inverted in pairs, of 1, 2, 4, ... rows:
  [[A, 0], [L, B]]^-1 = [[A^-1, 0], [-B^-1 L A^-1, B^-1]]. LAPACK's solver of a
  CPU waits for free threads in one of them: as many of it as there are threads
  wait forever (jaxlib 0.10.2).
  """
  C, s = x.shape[-1], 1
  found = jnp.ones((*x.shape[:-2], C, 1, 1), x.dtype)
  while s < C:
    pairs = x.reshape(*x.shape[:-2], C // s // 2, 2, s, C // s // 2, 2, s)
    same = jnp.eye(C // s // 2, dtype=bool)[:, None, :, None]
    low = jnp.sum(pairs[..., 1, :, :, 0, :], -2, where=same)
    first, second = found[..., 0::2, :, :], found[..., 1::2, :, :]
    low = -_matmul(_matmul(second, low), first)
    top = jnp.concatenate([first, jnp.zeros_like(low)], -1)
    found = jnp.concatenate([top, jnp.concatenate([low, second], -1)], -2)
    s *= 2
  return found[..., 0, :, :]


def chunked(q, k, v, g, beta, segments, state=None):
  """Outputs float32 [B, T, V, E] and the state after the last token.

  Within a chunk, the u of all tokens solve a triangular system (section 3.3 of
  the paper; arXiv 2406.06484). Sequences of a packed row do not see each other:
  what a state or a token passes on across a boundary is 0.

  Args:
    q, k: [B, T, K, H], see `heads`; v: [B, T, V, E].
    g, beta: [B, T, V]; 0 and 0 leave the state as it is.
    segments: int32 [B, T], which sequence a token is of.
    state: float32 [B, V, H, E], of the first token's sequence; None: zeros.
  """
  (B, T, K, H), (V, E) = q.shape, v.shape[2:]
  G, n = V // K, -(-T // CHUNK)

  def cut(x, groups):  # [B, T, ...] -> [n, B, K, groups, C, ...]
    x = jnp.pad(x, ((0, 0), (0, n * CHUNK - T)) + ((0, 0),) * (x.ndim - 2))
    x = x.reshape(B, n, CHUNK, K, groups, *x.shape[3:])
    return jnp.moveaxis(x, (1, 2), (0, 4))

  q, k = cut(q, 1), cut(k, 1)
  v, g, beta = cut(v, G), cut(g, G), cut(beta, G)[..., None]
  s = jnp.pad(segments, ((0, 0), (0, n * CHUNK - T)), 'edge')
  s = s.reshape(B, n, CHUNK).swapaxes(0, 1)
  last = s[..., -1:]
  entering = jnp.concatenate([s[:1, :, :1], last[:-1]])
  group = lambda x: x[:, :, None, None]  # beside the heads

  # Sums of g behind each token: [n, B, K, G, C, C], and from the chunk's start.
  # Differences of the latter would lose the digits of a strong decay before.
  seen = group((s[..., None] == s[..., None, :]) & jnp.tri(CHUNK, dtype=bool))
  behind = jnp.tri(CHUNK, k=-1) * g[..., None]
  behind = _matmul(jnp.tri(CHUNK), behind)
  total = g[..., :1, None] + behind[..., :1]
  # Masked before the exponential, which could overflow.
  power = lambda mask, x: jnp.exp(jnp.where(mask, x, -jnp.inf))
  between = power(seen, behind)
  from_start = power(group(s == entering)[..., None], total)
  to_end = behind[..., -1:, :].swapaxes(-1, -2)
  to_end = power(group(s == last)[..., None], to_end)
  whole = power(group(last == entering)[..., None], total[..., -1:, :])

  system = beta * _matmul(k, k.swapaxes(-1, -2)) * between
  right = jnp.concatenate([beta * v, beta * from_start * k], -1)
  solved = _matmul(_inverse(system), right)
  scores = _matmul(q, k.swapaxes(-1, -2)) * between
  parts = solved[..., :E], solved[..., E:], from_start * q, scores
  parts += (to_end * k, whole)

  def step(state, part):
    own, past, q, scores, k, whole = part
    u = own - _matmul(past, state)
    out = _matmul(q, state) + _matmul(scores, u)
    return whole * state + _matmul(k.swapaxes(-1, -2), u), out

  start = jnp.zeros((B, V, H, E)) if state is None else state
  state, out = jax.lax.scan(step, start.reshape(B, K, G, H, E), parts)
  out = jnp.moveaxis(out, (0, 4), (1, 2)).reshape(B, n * CHUNK, V, E)
  return out[:, :T], state.reshape(B, V, H, E)


def written(state, k, u, g):
  """The state [B, V, H, E] after a token that writes u [B, V, E] at k [B, K, H]
  and has the decay g [B, V]."""
  k = jnp.repeat(k, u.shape[1] // k.shape[1], axis=1)
  decay = jnp.exp(g)[..., None, None]
  return decay * state + k[..., None] * u[:, :, None]


def _sums(terms, axis):
  """Of two arrays, in one pass over what both are computed of."""
  zeros = [jnp.zeros((), x.dtype) for x in terms]
  add = lambda a, b: [p + q for p, q in zip(a, b)]
  return jax.lax.reduce(terms, zeros, add, (axis,))


def step(q, k, v, beta, state, ks, us, left):
  """One token: outputs float32 [B, V, E], and u.

  Arguments: those of `chunked`, without T, but the state is that before C
  earlier tokens, which is read once, and these are in a log: with
  S = left_0 state + sum_i left_i k_i u_i^T, u = beta (v - S^T k) and
  o = S^T q + (k q) u.

  Args:
    ks, us: [B, C, K, H] and [B, C, V, E], what the earlier tokens wrote.
    left: [B, 1 + C, V], what decays, this token's too, leave of the state and
      of these. 0: what is there is not read.
  """
  wide = lambda x, axis=1: jnp.repeat(x, v.shape[1] // k.shape[1], axis=axis)
  sums = _sums
  if sharding.platform() == 'cpu':
    # In one pass XLA uses no vectors, and computes q and k again for each line.
    sums = lambda terms, axis: [jnp.sum(x, axis) for x in terms]
  later = left[:, 1:, :, None]
  us = jnp.where(later != 0, us, 0.0)

  def left_of(scores):  # [B, C, K] -> [B, C, V, 1]
    return jnp.where(later != 0, later * wide(scores, 2)[..., None], 0.0)

  scores = map(left_of, sums([x[:, None] * ks for x in (q, k)], 3))
  logged = _sums([x * us for x in scores], 1)
  kept = sums([wide(x)[..., None] * state for x in (q, k)], 2)
  of_q, of_k = (left[:, 0, :, None] * x + y for x, y in zip(kept, logged))
  u = beta[..., None] * (v - of_k)
  near = wide(jnp.sum(q * k, -1, keepdims=True))
  return of_q + near * u, u


def causal(s: Sizes, w, x, g, beta, positions, segments, mesh=None):
  """Outputs [B, T, V, E], in x's dtype, of whole sequences.

  Args:
    w: of the convolution [M, 1, taps].
    x: [B, T, M], queries, keys and values before it.
    g, beta: see `gates`.
    positions, segments: int32 [B, T], of a token in its sequence, and which it
      is.
  """
  q, k, v = heads(s, convolve(x, w, positions), mesh)
  return chunked(q, k, v, g, beta, segments)[0].astype(x.dtype)
