"""What the sampler keeps of a delta net: states that can be cut back.

A state cannot be taken back, and after a stop string, or a call that is
cancelled, it has gone too far. So the state of a slot stays as it was when a
chunk of decoding began, and a log has what each token of the chunk did to it.
Whatever comes next, the next chunk, a prefill, first writes the tokens of the
log that were accepted, as the next call of the same sequence would have: what
was cut off does not show in a bit. The host knows how many those are
(`slots.Rows.since`).

Axis letters: B slots or rows, T tokens, C tokens of a chunk, K/V key/value
heads, H/E their dims, M channels of the convolution.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from searchrl_jax.devices import sharding
from searchrl_jax.models import deltanet
from searchrl_jax.models.decoder import DecoderConfig


class State(NamedTuple):
  """Of a layer, in every slot."""

  state: jax.Array  # float32 [B, V, H, E]
  before: jax.Array  # [B, taps - 1, M], what the convolution sees next
  # The log of the last chunk: what each token wrote, and its channels.
  k: jax.Array  # float32 [B, C, K, H]
  u: jax.Array  # float32 [B, C, V, E]
  g: jax.Array  # float32 [B, C, V]
  x: jax.Array  # [B, C, M]


class Running(NamedTuple):
  """The same within a chunk."""

  kept: State
  state: jax.Array
  before: jax.Array


def layouts(cfg: DecoderConfig, slots: int, chunk: int) -> list[tuple]:
  """(axes, shape, dtype; '' is the model's) of the fields of a State."""
  s = cfg.delta
  K, H, V, E = s.key_heads, s.key_dim, s.value_heads, s.value_dim
  heads, rows = ('batch', 'time', 'heads', 'head_dim'), slots
  return [
    (('batch', 'heads', None, None), (rows, V, H, E), 'float32'),
    (('batch', 'time', 'channels'), (rows, s.taps - 1, s.channels), ''),
    (heads, (rows, chunk, K, H), 'float32'),
    (heads, (rows, chunk, V, E), 'float32'),
    (heads[:3], (rows, chunk, V), 'float32'),
    (('batch', 'time', 'channels'), (rows, chunk, s.channels), ''),
  ]


def pinned(cfg: DecoderConfig, held: State, mesh) -> State:
  """In the layout of `layouts`."""
  rows, chunk = held.g.shape[:2]
  kinds = zip(held, layouts(cfg, rows, chunk))
  return State(*(sharding.constrain(x, mesh, *axes) for x, (axes, *_) in kinds))


def accepted(held: State, count) -> tuple[jax.Array, jax.Array]:
  """The state and what the convolution sees next, after `count` int32 [B]
  tokens of the log; -1: at the beginning of a sequence."""
  wide = lambda x: x[:, None, None, None]
  state = jnp.where(wide(count < 0), 0.0, held.state)
  for t in range(held.k.shape[1]):  # one pass over the state
    new = deltanet.written(state, held.k[:, t], held.u[:, t], held.g[:, t])
    state = jnp.where(wide(t < count), new, state)
  # At the beginning, positions tell the convolution that nothing was before.
  return state, _ending(held.before, held.x, jnp.maximum(count, 0))


def _ending(before, x, count):
  """The last rows of `before` [B, n, M] and `count` of x [B, T, M]."""
  rows = jnp.concatenate([before, x], 1)
  at = count[:, None] + jnp.arange(before.shape[1])
  return jnp.take_along_axis(rows, at[..., None], 1)


def begin(held: State, count) -> Running:
  """A chunk of decoding behind `count` tokens of the log."""
  state, before = accepted(held, count)
  return Running(held._replace(state=state, before=before), state, before)


def step(cfg: DecoderConfig, held: Running, t, active, at, w, x, g, beta, mesh):
  """The outputs [B, 1, V, E] of a delta net for one token, and what follows.

  Args:
    t: of the chunk; slots that are not active [B] keep their log.
    at: int32 [B, 1], positions.
    w, x, g, beta: see `deltanet.causal`.
  """
  seen = deltanet.convolve(x, w, at, held.before)
  parts = *deltanet.heads(cfg.delta, seen, mesh), g, beta
  q, k, v, g, beta = (y[:, 0] for y in parts)
  o, u, state = deltanet.step(q, k, v, g, beta, held.state)

  def logged(old, new):
    mask = active.reshape(-1, *[1] * (new.ndim - 1))
    return old.at[:, t].set(jnp.where(mask, new, old[:, t]))

  kept = held.kept
  log = (*kept[:2], *map(logged, kept[2:], (k, u, g, x[:, 0])))
  before = jnp.concatenate([held.before, x], 1)[:, 1:]
  return o[:, None].astype(x.dtype), Running(State(*log), state, before)


def prefill(
  cfg: DecoderConfig,
  held: State,
  slots,
  count,
  at,
  lengths,
  mesh,
  w,
  x,
  g,
  beta,
):
  """The outputs [R, T, V, E] of a delta net, and the states of all slots.

  Args:
    slots: int32 [R]; B: none.
    count: int32 [R], tokens of the log before these; None: they are the first.
    at: int32 [R, T], positions.
    lengths: int32 [R], real tokens of a row.
    w, x, g, beta: see `deltanet.causal`.
  """
  if count is None:
    state = None
    before = jnp.zeros((len(slots), *held.before.shape[1:]), x.dtype)
  else:
    own = (y.at[slots].get(mode='clip') for y in held)
    state, before = accepted(State(*own), count)
  real = (jnp.arange(x.shape[1]) < lengths[:, None])[..., None]
  g, beta = jnp.where(real, g, 0.0), jnp.where(real, beta, 0.0)
  parts = deltanet.heads(cfg.delta, deltanet.convolve(x, w, at, before), mesh)
  one = jnp.zeros(x.shape[:2], jnp.int32)
  o, state = deltanet.chunked(*parts, g, beta, one, state)
  put = lambda old, new: old.at[slots].set(new, mode='drop')
  before = _ending(before, x, lengths)
  new = put(held.state, state), put(held.before, before)
  return o.astype(x.dtype), pinned(cfg, State(*new, *held[2:]), mesh)
