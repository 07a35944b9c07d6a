"""What the sampler keeps of a delta net: states that can be cut back.

A state cannot be taken back, and after a stop string, or a call that is
cancelled, it has gone too far. So the state of a slot stays as it was when a
chunk of decoding began, and a log has what each token of the chunk did to it.
Whatever comes next, the next chunk, a prefill, first writes the tokens of the
log that were accepted, as the next call of the same sequence would have: what
was cut off does not show in a bit. The host knows how many those are
(`slots.Rows.since`).

Within the chunk a token is computed from both (`deltanet.step`): it reads the
state once, and writes a line of the log. The states of Qwen3.5-0.8B are as
large as keys and values of 1,536 tokens.

Where a chunk begins shows in last bits, and is of the sequence's own history: a
call of the engine begins one, and every C tokens of the call follow others. No
slot enters a chunk late, and it ends early where the call does (`decode`); for
forks and evictions, states and logs are copied as they are. A call that was cut
back into its last chunk left the state and the lines that one of fewer tokens
leaves; back to the chunk's beginning, the state that the next chunk would have
begun with. Two calls are not one of as many tokens, as two prefills are not.

Axis letters: B slots or rows, T tokens, C tokens of a chunk, K/V key/value
heads, H/E their dims, M channels of the convolution.
"""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from searchrl_jax.devices import sharding
from searchrl_jax.models import deltanet
from searchrl_jax.models.decoder import DecoderConfig


class State(NamedTuple):
  """Of a layer, in every slot."""

  state: jax.Array  # float32 [B, V, H, E]
  # The log of the last chunk: what each token wrote, and its channels, behind
  # those that the convolution of the first one sees.
  k: jax.Array  # float32 [B, C, K, H]
  u: jax.Array  # float32 [B, C, V, E]
  g: jax.Array  # float32 [B, C, V]
  x: jax.Array  # [B, taps - 1 + C, M]

  @property
  def earlier(self) -> int:
    """taps - 1"""
    return self.x.shape[1] - self.k.shape[1]


class Running(NamedTuple):
  """The same within a chunk."""

  kept: State
  # Of the state, and of each line of the log; 0: it is not written yet.
  left: jax.Array  # float32 [B, 1 + C, V], see `deltanet.step`


def layouts(cfg: DecoderConfig, slots: int, chunk: int) -> list[tuple]:
  """(axes, shape, dtype; '' is the model's) of the fields of a State."""
  s = cfg.delta
  K, H, V, E = s.key_heads, s.key_dim, s.value_heads, s.value_dim
  heads, rows = ('batch', 'time', 'heads', 'head_dim'), slots
  return [
    (('batch', 'heads', None, None), (rows, V, H, E), 'float32'),
    (heads, (rows, chunk, K, H), 'float32'),
    (heads, (rows, chunk, V, E), 'float32'),
    (heads[:3], (rows, chunk, V), 'float32'),
    (('batch', 'time', 'channels'), (rows, s.taps - 1 + chunk, s.channels), ''),
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
  return state, _behind(held.x, jnp.maximum(count, 0), held.earlier)


def _behind(x, count, n: int):
  """n rows of x [B, T, M], behind `count`."""
  at = count[:, None] + jnp.arange(n)
  return jnp.take_along_axis(x, at[..., None], 1)


def begin(held: State, count) -> Running:
  """A chunk of decoding behind `count` tokens of the log."""
  state, before = accepted(held, count)
  x = held.x.at[:, : held.earlier].set(before)
  left = jnp.pad(jnp.zeros_like(held.g), ((0, 0), (1, 0), (0, 0)))
  held = held._replace(state=state, x=x)
  return Running(held, left.at[:, 0].set(1.0))


def step(cfg: DecoderConfig, held: Running, t, active, at, w, x, g, beta, mesh):
  """The outputs [B, 1, V, E] of a delta net for one token, and what follows.

  Args:
    t: of the chunk; slots that are not active [B] keep their log.
    at: int32 [B, 1], positions.
    w, x, g, beta: see `deltanet.causal`.
  """
  kept, n = held.kept, held.kept.earlier

  def logged(old, new, t=t):
    mask = active.reshape(-1, *[1] * (new.ndim - 1))
    new = jnp.where(mask, new, lax.dynamic_index_in_dim(old, t, 1, False))
    return lax.dynamic_update_index_in_dim(old, new, t, 1)

  channels = logged(kept.x, x[:, 0], n + t)
  rows = lax.dynamic_slice_in_dim(channels, t, n + 1, 1)
  seen = deltanet.convolve(rows[:, n:], w, at, rows[:, :n])
  parts = *deltanet.heads(cfg.delta, seen, mesh), g, beta
  q, k, v, g, beta = (y[:, 0] for y in parts)
  left = held.left * jnp.exp(g)[:, None]
  ks = logged(kept.k, k)  # before it is read, or XLA copies it
  o, u = deltanet.step(q, k, v, beta, kept.state, ks, kept.u, left)
  after = State(kept.state, ks, logged(kept.u, u), logged(kept.g, g), channels)
  left = lax.dynamic_update_index_in_dim(left, jnp.ones_like(g), t + 1, 1)
  return o[:, None].astype(x.dtype), Running(after, left)


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
    before = jnp.zeros((len(slots), held.earlier, x.shape[-1]), x.dtype)
  else:
    own = (y.at[slots].get(mode='clip') for y in held)
    state, before = accepted(State(*own), count)
  real = (jnp.arange(x.shape[1]) < lengths[:, None])[..., None]
  g, beta = jnp.where(real, g, 0.0), jnp.where(real, beta, 0.0)
  parts = deltanet.heads(cfg.delta, deltanet.convolve(x, w, at, before), mesh)
  one = jnp.zeros(x.shape[:2], jnp.int32)
  o, state = deltanet.chunked(*parts, g, beta, one, state)
  before = _behind(jnp.concatenate([before, x], 1), lengths, held.earlier)
  new = held._replace(
    state=held.state.at[slots].set(state, mode='drop'),
    x=held.x.at[slots, : held.earlier].set(before, mode='drop'),
  )
  return o.astype(x.dtype), pinned(cfg, new, mesh)
