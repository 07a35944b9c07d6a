"""Mixtures of experts in place of a feed-forward network, as in Qwen3 MoE.

A router chooses k of E experts for each token (Shazeer et al. 2017, arXiv
1701.06538), each a gated network, and y = sum_j w_j expert_j(x). The weights w
are the softmax over all experts, of the chosen ones, which `normalised` divides
by their sum.

On GPUs and TPUs the copies of the tokens are sorted by expert, and each is
computed once (`models.grouped`); a CPU computes every expert for every token,
which is for tests and models of few experts. The result of a token depends on
that token alone, bit by bit. Along `tensor`, devices compute different experts
for the same tokens. In training, the matrices are also divided along `fsdp`,
and gathered there for a product.

Axis letters: B sequences, T tokens, n = B T, D model, E experts (of a device,
where they are on several), k experts of a token, F features of an expert, R
rows that are computed.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import NamedTuple

from absl import logging
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from searchrl_jax import lookup
from searchrl_jax.devices import sharding
from searchrl_jax.models import grouped
from searchrl_jax.models.products import dense

MATRICES = 'experts_gate', 'experts_up', 'experts_down'
ROUTES = 'experts_routes'  # beside parameters: which experts to use
_NO_KERNEL = (
  'no kernel for experts of %d x %d in %s (it takes multiples of 16, and a GPU '
  'of the Ampere family or newer): every expert is computed for every token'
)


@dataclasses.dataclass(frozen=True)
class Sizes:
  """count: experts. chosen: for a token. dense: layers that have none."""

  count: int
  chosen: int
  d_ff: int
  normalised: bool
  dense: tuple[int, ...] = ()


def table(s: Sizes, D: int) -> dict[str, tuple[tuple, tuple]]:
  """Of a layer with D features: parameter -> (shape, logical axes)."""
  E, F = s.count, s.d_ff
  return {
    'router': ((D, E), ('embed', None)),
    'experts_gate': ((E, D, F), ('experts', None, None)),
    'experts_up': ((E, D, F), ('experts', None, None)),
    'experts_down': ((E, F, D), ('experts', None, None)),
  }


def route(s: Sizes, scores, given=None):
  """The experts of each token, and their weights: int32 and float32 [B, T, k].

  Args:
    scores: [B, T, E], of the router.
    given: int [B, T, k], experts to use instead; -1: not known.

  Returns:
    ids and weights of the experts to use, and the ids that the router chose.
  """
  shares = jax.nn.softmax(scores.astype(jnp.float32), -1)
  _, own = jax.lax.top_k(jax.lax.stop_gradient(shares), s.chosen)
  ids = own if given is None else jnp.where(given < 0, own, given)
  weights = jnp.take_along_axis(shares, ids, -1)
  if s.normalised:
    weights = weights / jnp.sum(weights, -1, keepdims=True)
  return ids, weights, own


def differ(own, given):
  """Whether known experts are others than `own`, in any order: bool [B, T]."""
  same = jnp.all(jnp.any(own[..., None] == given[..., None, :], -1), -1)
  return ~same & (given[..., 0] >= 0)


def require_divisible(s: Sizes | None, tensor: int, fsdp: int) -> None:
  """Raises ConfigError unless so many devices have equally many experts."""
  lookup.require(
    s is None or s.count % (fsdp * tensor) == 0,
    f'config.mesh fsdp={fsdp}, tensor={tensor}: together they do not divide '
    f'the {s and s.count} experts of the model, which lie along them',
  )


def compile_at_once(s: Sizes | None) -> bool:
  """Whether several threads may compile a model's programs.

  libtpu 0.0.42 crashes where two of them compile megablox.
  """
  return s is None or sharding.platform() != 'tpu'


class Parts(NamedTuple):
  """What `_local` is compiled for.

  tensor: devices that compute different experts for the same tokens. fsdp:
  devices among which the matrices of each of them are divided.
  """

  sizes: Sizes
  tensor: int = 1
  fsdp: int = 1

  @property
  def axis(self) -> str | None:
    """Along which the matrices are gathered."""
    return 'fsdp' if self.fsdp > 1 else None


def mix(p: Mapping, s: Sizes, activation: Callable, x, mesh=None):
  """y [B, T, D] of x [B, T, D], and the experts that the router chose.

  p: the parameters of `table`, of a layer; with ROUTES, the experts to use
  (`route`).

  Raises:
    ConfigError: the axes `fsdp` and `tensor` do not divide the experts.
  """
  scores, matrices = dense(x, p['router']), [p[name] for name in MATRICES]
  given = p.get(ROUTES)
  mesh, left = sharding.undivided(mesh)
  if not left:
    return _local(activation, Parts(s), x, scores, given, *matrices)
  own = [mesh.shape[a] if a in left else 1 for a in ('tensor', 'fsdp')]
  require_divisible(s, *own)
  experts = sharding.spec(mesh, ('experts', None, None), matrices[0].shape)
  rows = sharding.spec(mesh, ('batch', None, None), x.shape)
  return jax.shard_map(
    functools.partial(_local, activation, Parts(s, *own)),
    mesh=mesh,
    in_specs=(rows, rows, rows, experts, experts, experts),
    out_specs=(rows, rows),
    axis_names=left,
    check_vma=False,
  )(x, scores, given, *matrices)


def _local(activation, parts: Parts, x, scores, given, *matrices):
  """`mix` for the tokens of a device, and its experts.

  It chooses them too, because XLA does not divide a top-k.
  """
  ids, weights, own = route(parts.sizes, scores, given)
  if parts.tensor > 1:  # from 0; those of other devices are not in its range
    count = parts.sizes.count // parts.tensor
    ids = ids - jax.lax.axis_index('tensor') * count
  use = _dense
  if grouped.fits(x.dtype, *matrices):
    tile = grouped.tile(ids.size // parts.sizes.count)
    use = functools.partial(_grouped, tile)
  elif sharding.platform() != 'cpu':
    sizes = *matrices[0].shape[1:], x.dtype
    logging.log_first_n(logging.WARNING, _NO_KERNEL, 1, *sizes)
  y = use(activation, parts, x, ids, weights.astype(x.dtype), *matrices)
  return _sum(y) if parts.tensor > 1 else y, own


@jax.custom_vjp
def _sum(y):
  """The sum along `tensor`, which each device has then.

  `shard_map` gives each device its part of the gradient, 1 / devices of what
  all have, and another sum would follow.
  """
  return jax.lax.psum(y, 'tensor')


_sum.defvjp(
  lambda y: (_sum(y), None), lambda _, g: (g * jax.lax.axis_size('tensor'),)
)


def _dense(activation, parts: Parts, x, ids, weights, gate, up, down):
  """Every expert of every token, most of them with the weight 0."""
  gate, up, down = (
    grouped.whole(w, w.dtype, parts.axis) for w in (gate, up, down)
  )

  def add(y, expert):
    e, *matrices, down = expert
    chosen = ids == e
    share = jnp.sum(jnp.where(chosen, weights, 0), -1, keepdims=True)
    chosen = jnp.any(chosen, -1, keepdims=True)
    # What is not chosen may overflow in half precision.
    gate, up = (
      jnp.where(chosen, checkpoint_name(dense(x, w), 'mlp'), 0)
      for w in matrices
    )
    more = dense(activation(gate) * up * share, down)
    return y + more.astype(jnp.float32), None

  # One by one: a CPU has no product of several in mixed precision.
  experts = jnp.arange(len(gate)), gate, up, down
  y, _ = jax.lax.scan(add, jnp.zeros(x.shape, jnp.float32), experts)
  return y.astype(x.dtype)


class Plan(NamedTuple):
  """Which row computes which copy of a token; copies are n k, token by token.

  Rows are sorted by expert, and those of an expert are whole tiles: after its
  copies there are rows of none, and so there are after all experts.
  """

  copies: jax.Array  # int32 [R], of each row; n k: none
  rows: jax.Array  # int32 [n, k], of each copy; R: it is of another device
  counts: jax.Array  # int32 [E], rows of an expert, a multiple of the tile


def plan(ids, E: int, tile: int) -> Plan:
  """ids: int32 [n, k], other ones than 0 to E - 1 are of other devices."""
  (n, k), flat = ids.shape, ids.reshape(-1)
  flat = jnp.where((flat >= 0) & (flat < E), flat, E)
  R = grouped.rows(n * k + E * (tile - 1), tile)
  order = jnp.argsort(flat, stable=True).astype(jnp.int32)
  owner = flat[order]
  sizes = jnp.zeros(E + 1, jnp.int32).at[flat].add(1)
  counts = -(-sizes[:E] // tile) * tile
  before = lambda x: jnp.cumsum(x) - x
  first, begin = before(sizes), jnp.append(before(counts), R)
  rank = jnp.arange(n * k, dtype=jnp.int32) - first[owner]
  at = jnp.minimum(begin[owner] + rank, R)
  copies = jnp.full(R, n * k, jnp.int32).at[at].set(order, mode='drop')
  rows = jnp.zeros(n * k, jnp.int32).at[order].set(at)
  return Plan(copies, rows.reshape(n, k), counts)


def _take(x, at):
  """x[at], and 0 past the last."""
  return x.at[at].get(mode='fill', fill_value=0)


# Each is the gradient of the other, so that neither adds in an order that a
# device chooses.
@jax.custom_vjp
def _spread(x, plan: Plan):
  """The tokens [n, D] as rows [R, D]."""
  return _take(x, plan.copies // plan.rows.shape[1])


@jax.custom_vjp
def _collect(y, plan: Plan):
  """The sums of the rows [R, D] of each token: [n, D]."""
  each = _take(y, plan.rows)
  return jnp.sum(each, 1, dtype=jnp.float32).astype(y.dtype)


_spread.defvjp(
  lambda x, plan: (_spread(x, plan), plan),
  lambda plan, g: (_collect(g, plan), None),
)
_collect.defvjp(
  lambda y, plan: (_collect(y, plan), plan),
  lambda plan, g: (_spread(g, plan), None),
)


def _grouped(tile, activation, parts: Parts, x, ids, weights, gate, up, down):
  """Each expert of each token once. tile: of `plan`."""
  count = parts.sizes.count // parts.tensor
  at = plan(ids.reshape(-1, ids.shape[-1]), count, tile)
  how = grouped.How(tile, parts.axis, parts.tensor)
  rows = _spread(x.reshape(-1, x.shape[-1]), at)
  product = functools.partial(grouped.product, how, counts=at.counts)
  gate, up = (checkpoint_name(product(rows, w), 'mlp') for w in (gate, up))
  share = _take(weights.reshape(-1), at.copies)
  h = activation(gate) * up * share[:, None]
  y = product(h, down)
  return _collect(y, at).reshape(x.shape)
