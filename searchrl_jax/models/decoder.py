"""One decoder for Qwen2/2.5/3/3.5, Qwen3 MoE, Llama 2/3.x and Gemma 3.

Axis letters: B sequences, T query tokens, S key tokens, V vocabulary, D model,
N/K query/kv heads, H head dim, F feed-forward, L layers.

The parameters are a nested dict of arrays, layers stacked on a leading L (so
that training scans over them); where layers differ in their parameters, those
that have one are stacked. `block` is the one definition of a layer: training
and the sampler differ in the `mix` function that they pass to it (of whole
sequences, or through a cache). What a family fixes is in `families.Family`;
layers of one model may differ in their window and RoPE, or be delta nets
(`Layer`), or have experts in place of one feed-forward network.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import NamedTuple

from flax import traverse_util
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from searchrl_jax import lookup
from searchrl_jax.devices import sharding
from searchrl_jax.models import (
  attention,
  deltanet,
  experts,
  families,
  remat,
  rotary,
)
from searchrl_jax.models.products import dense, rounded, scaled, shifted


@dataclasses.dataclass(frozen=True)
class Lora:
  """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685), see `models.lora`.

  A projection x W becomes x W + alpha / rank (x A) B. A and B are trained,
  every other parameter is frozen.
  """

  rank: int
  alpha: float
  targets: tuple[str, ...]  # of `projections`
  dtype: str  # of the frozen parameters; A and B are float32

  @property
  def scale(self) -> float:
    return self.alpha / self.rank


# Of a layer: name -> leading axes of its matrix that are its input.
PROJECTIONS = {n: 1 + (n == 'o') for n in 'q k v o gate up down'.split()}
_OF_DELTA = {f'delta_{n}': 1 + (n == 'o') for n in 'qkv z b a o'.split()}
INPUTS = PROJECTIONS | _OF_DELTA  # of a layer of any kind


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
  """An architecture, and how it is computed.

  Attributes:
    family: a key of `families.FAMILIES`.
    query_scale: of the queries, beside 1 / sqrt(head_dim).
    window: tokens that a local layer attends to, itself included.
    global_every: of so many layers the last is global and the others are local,
      or delta nets; 1: all are global.
    local_theta: RoPE of local layers, which have no rope_scaling.
    rotary_dim: leading numbers of a head that RoPE rotates; None: all.
    delta: sizes of the delta nets, where there are any.
    moe: of the experts, the same.
    dtype: of activations; logits are always float32.
    remat: 'none' or a key of `remat.SAVED`.
    scan_unroll: layers unrolled in each step of the scan.
    attention: auto, xla, cudnn, splash.
    keeps_routes: whether the sampler keeps the experts of each token (None: no,
      as in checkpoints of earlier versions).
  """

  vocab_size: int
  d_model: int
  n_layers: int
  n_heads: int
  n_kv_heads: int
  head_dim: int
  d_ff: int
  family: str = 'llama'
  rope_theta: float = 10_000.0
  rope_scaling: rotary.RopeScaling | None = None
  norm_eps: float = 1e-6
  tied: bool = True
  query_scale: float = 1.0
  window: int = 0
  global_every: int = 1
  local_theta: float = 10_000.0
  rotary_dim: int | None = None
  delta: deltanet.Sizes | None = None
  moe: experts.Sizes | None = None
  dtype: str = 'float32'
  remat: str = 'none'
  scan_unroll: int = 1
  attention: str = 'auto'
  lora: Lora | None = None
  keeps_routes: bool | None = None

  def __post_init__(self):
    N, K, H = self.n_heads, self.n_kv_heads, self.head_dim
    lookup.require(N % K == 0, f'n_heads={N} is no multiple of n_kv_heads={K}')
    lookup.require(H % 2 == 0, f'head_dim={H} must be even for RoPE')

  @property
  def traits(self) -> families.Family:
    return families.FAMILIES[self.family]

  def window_of(self, layer: int) -> int:
    """The window of a layer; 0: it is global."""
    return self.window if (layer + 1) % self.global_every else 0

  def layers_with(self, name: str) -> list[int]:
    """The layers that have the parameter `layers/name`, in its order."""
    moe = {'moe': self.moe and vars(self.moe)}
    return families.layers_with(vars(self) | moe, name)

  @property
  def delta_layers(self) -> list[int]:
    """The layers that are delta nets."""
    return self.layers_with('delta_o') if self.delta else []

  @property
  def n_params(self) -> int:
    return sum(math.prod(s) for s, _ in param_table(self).values())


def projections(cfg: DecoderConfig) -> dict[str, int]:
  """Of a model's layers: name -> leading axes that are the matrix's input.

  Of a model with experts, those of attention: adapters of others would have the
  names that PEFT has for adapters of experts.
  """
  known = INPUTS if cfg.delta else PROJECTIONS
  of_mlp = ('gate', 'up', 'down') if cfg.moe else ()
  return {name: n for name, n in known.items() if name not in of_mlp}


def param_table(cfg: DecoderConfig) -> dict[str, tuple[tuple, tuple]]:
  """Every parameter: 'path/with/slashes' -> (shape, logical axes)."""
  D, F = cfg.d_model, cfg.d_ff
  N, K, H = cfg.n_heads, cfg.n_kv_heads, cfg.head_dim
  own = H * (1 + cfg.traits.gated_attention)  # a query, and its gate
  layers = {
    'attn_norm': ((D,), ('norm',)),
    'q': ((D, N, own), ('embed', 'heads', 'head_dim')),
    'k': ((D, K, H), ('embed', 'kv_heads', 'head_dim')),
    'v': ((D, K, H), ('embed', 'kv_heads', 'head_dim')),
    'o': ((N, H, D), ('heads', 'head_dim', 'embed')),
    'mlp_norm': ((D,), ('norm',)),
    'gate': ((D, F), ('embed', 'mlp')),
    'up': ((D, F), ('embed', 'mlp')),
    'down': ((F, D), ('mlp', 'embed')),
  }
  if cfg.traits.qkv_bias:  # of the output axes
    layers |= {f'{n}_bias': tuple(x[1:] for x in layers[n]) for n in 'qkv'}
  if cfg.traits.qk_norm:
    layers |= {f'{n}_norm': ((H,), ('norm',)) for n in 'qk'}
  if cfg.traits.post_norms:
    layers |= {f'{n}_post_norm': ((D,), ('norm',)) for n in ('attn', 'mlp')}
  if cfg.delta:
    layers |= deltanet.table(cfg.delta, D)
  if cfg.moe:
    layers |= experts.table(cfg.moe, D)
  if cfg.lora:
    inputs, r = projections(cfg), cfg.lora.rank
    for name in cfg.lora.targets:
      (shape, axes), n = layers[name], inputs[name]
      layers[f'{name}_lora_a'] = ((*shape[:n], r), (*axes[:n], 'rank'))
      layers[f'{name}_lora_b'] = ((r, *shape[n:]), ('rank', *axes[n:]))
  table = {'embed': ((cfg.vocab_size, D), ('vocab', 'embed'))}
  for name, (shape, axes) in layers.items():
    if n := len(cfg.layers_with(name)):
      table[f'layers/{name}'] = ((n, *shape), ('layers', *axes))
  table['final_norm'] = ((D,), ('norm',))
  if not cfg.tied:
    table['head'] = ((D, cfg.vocab_size), ('embed', 'vocab'))
  return table


def nest(flat: dict) -> dict:
  """{'a/b': x} -> {'a': {'b': x}}."""
  return traverse_util.unflatten_dict(flat, sep='/')


def flatten(tree: dict) -> dict:
  """The inverse of `nest`."""
  return traverse_util.flatten_dict(tree, sep='/')


def param_shardings(cfg: DecoderConfig, mesh) -> dict:
  """The NamedSharding of every parameter, nested as the parameters are."""
  table = param_table(cfg).items()
  return nest({k: sharding.named(mesh, axes, s) for k, (s, axes) in table})


def shapes_of(table: dict) -> dict[str, tuple[int, ...]]:
  """Name -> shape, of a table as `param_table` returns it."""
  return {name: shape for name, (shape, _) in table.items()}


def check_shapes(what: str, arrays: dict, want: dict) -> None:
  """Raises ConfigError unless the arrays have these names and shapes."""
  have = {name: tuple(x.shape) for name, x in arrays.items()}
  for name in sorted(want.keys() | have.keys()):
    found, wanted = have.get(name), want.get(name)
    asks = f'has shape {found}; the config asks for {wanted}'
    lookup.require(found == wanted, f'{what} {name!r} {asks}')


def flatten_checked(
  cfg: DecoderConfig, params: dict, table: dict | None = None
) -> dict:
  """`flatten(params)`; raises ValueError unless names and shapes are cfg's.

  table: of the parameters to expect; None: `param_table(cfg)`.
  """
  flat = flatten(params)
  check_shapes('parameter', flat, shapes_of(table or param_table(cfg)))
  return flat


def init_params(
  cfg: DecoderConfig,
  key,
  *,
  scale: float = 0.02,
  embed_scale: float | None = None,
  dtype=jnp.float32,
) -> dict:
  """Initial parameters: normal(scale), factors of norms 1, biases 0; no
  adapters.

  Those of delta nets are `deltanet.initial`. `o` and `down`, of experts too,
  are divided by sqrt(2 L), as GPT-2 does. embed_scale (of the embedding and an
  untied head) defaults to `scale`.
  """
  small = scale / math.sqrt(2 * cfg.n_layers)
  embed = scale if embed_scale is None else embed_scale
  scales = dict.fromkeys(('o', 'delta_o', 'down', 'experts_down'), small)
  scales |= {'embed': embed, 'head': embed}
  flat = {}
  table = param_table(dataclasses.replace(cfg, lora=None))
  for i, (path, (shape, _)) in enumerate(table.items()):
    name, own = path.rsplit('/', 1)[-1], jax.random.fold_in(key, i)
    if (value := deltanet.initial(name, own, shape)) is not None:
      flat[path] = value.astype(dtype)
    elif name.endswith(('norm', 'bias')):
      one = 1.0 - cfg.traits.norm_offset
      flat[path] = jnp.full(shape, one * name.endswith('norm'), dtype)
    else:
      normal = jax.random.normal(own, shape, dtype)
      flat[path] = scales.get(name, scale) * normal
  return nest(flat)


def rms_norm(x, weight, eps: float):
  """In float32 whatever the activations' dtype."""
  x32 = x.astype(jnp.float32)
  scale = jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps)
  return scaled((x32 * scale).astype(x.dtype), weight)


def norm(cfg: DecoderConfig, x, weight):
  """The model's RMS norm. Gemma's factor is 1 + weight, in float32."""
  offset = cfg.traits.norm_offset
  if not offset:
    return rms_norm(x, weight, cfg.norm_eps)
  factor = rounded(weight, x.dtype) + offset
  return rms_norm(x.astype(jnp.float32), factor, cfg.norm_eps).astype(x.dtype)


def embed(params: dict, cfg: DecoderConfig, ids):
  """The residual stream [..., D] before the first layer, in cfg.dtype."""
  x = params['embed'][ids].astype(cfg.dtype)
  if cfg.traits.scaled_embedding:
    x = x * jnp.asarray(math.sqrt(cfg.d_model), cfg.dtype)
  return x


class Layer(NamedTuple):
  """What a layer has beside its parameters."""

  window: int  # 0: it is global
  rope: tuple[jax.Array, jax.Array]  # `rotary.tables`
  delta: bool  # whether it is a delta net, which has no use for the others


def layers_of(cfg: DecoderConfig, positions) -> list[Layer]:
  """Every layer, at these positions; layers of one kind share their tables."""
  windows = [cfg.window_of(i) for i in range(cfg.n_layers)]
  ropes = {w: rotary.tables(cfg, positions, w > 0) for w in {*windows}}
  nets = cfg.delta_layers
  return [Layer(w, ropes[w], i in nets) for i, w in enumerate(windows)]


def project(p: dict, cfg: DecoderConfig, x, name: str):
  """x [B, T, *I] through a projection of a layer, with adapter and bias."""
  inputs = INPUTS[name]
  y = dense(x, p[name], inputs)
  if cfg.lora and name in cfg.lora.targets:
    if sharding.platform() == 'gpu':
      # Else XLA makes one product of both, and copies the frozen matrix for it.
      x = jax.lax.optimization_barrier(x)
    low = dense(x, p[f'{name}_lora_a'], inputs)
    y = y + cfg.lora.scale * dense(low, p[f'{name}_lora_b'])
  if cfg.traits.qkv_bias and name in 'qkv':
    y = shifted(y, p[f'{name}_bias'])
  return y


ACTIVATIONS = {
  'silu': jax.nn.silu,
  'gelu_tanh': functools.partial(jax.nn.gelu, approximate=True),
}


def _attention(p: dict, cfg: DecoderConfig, h, rope, mix: Callable, mesh):
  """What attention adds to the residual stream, before a post-norm."""
  q, k, v = (project(p, cfg, h, name) for name in 'qkv')
  gate = None
  if cfg.traits.gated_attention:
    q, gate = jnp.split(q, 2, -1)
    gate = checkpoint_name(gate, 'attention')
  if cfg.traits.qk_norm:
    q, k = norm(cfg, q, p['q_norm']), norm(cfg, k, p['k_norm'])
  if cfg.query_scale != 1.0:
    q = q * jnp.asarray(cfg.query_scale, q.dtype)
  q, k = (rotary.apply(y, *rope) for y in (q, k))
  q = sharding.constrain(q, mesh, 'batch', 'time', 'heads', 'head_dim')
  k = sharding.constrain(k, mesh, 'batch', 'time', 'kv_heads', 'head_dim')
  v = sharding.constrain(v, mesh, 'batch', 'time', 'kv_heads', 'head_dim')
  q, k, v = (checkpoint_name(y, 'attention') for y in (q, k, v))
  o = checkpoint_name(mix(q, k, v), 'attention')
  if gate is not None:
    o = o * jax.nn.sigmoid(gate)
  return project(p, cfg, o, 'o')


def _delta_net(p: dict, cfg: DecoderConfig, h, mix: Callable):
  """The same of a delta net."""
  x, z = (project(p, cfg, h, f'delta_{n}') for n in ('qkv', 'z'))
  if sharding.platform() == 'gpu':
    # Else XLA makes one product of all four, and copies the matrices for it.
    h = jax.lax.optimization_barrier(h)
  b, a = (project(p, cfg, h, f'delta_{n}') for n in 'ba')
  x, z = (checkpoint_name(y, 'attention') for y in (x, z))
  g, beta = deltanet.gates(a, b, p['delta_a_log'], p['delta_dt_bias'])
  o = mix(p['delta_conv'], x, g, beta)
  o = checkpoint_name(o, 'attention').astype(jnp.float32)
  o = rms_norm(o, p['delta_norm'], cfg.norm_eps)
  o = o * jax.nn.silu(z.astype(jnp.float32))
  return project(p, cfg, o.astype(h.dtype), 'delta_o')


def block(
  p: dict,
  cfg: DecoderConfig,
  x,
  layer: Layer,
  mix: Callable,
  mesh=None,
  told: Callable = lambda _: None,
):
  """One layer. p: this layer's parameters (no L). x [B, T, D].

  told(ids int32 [B, T, k]) of the experts that a router chose.

  mix(q [B, T, N, H], k [B, T, K, H], v [B, T, K, H]) -> [B, T, N, H]; it
  may also write k and v to a cache. Of a delta net: mix(w, x, g, beta), see
  `deltanet.causal`.
  """
  h = norm(cfg, x, p['attn_norm'])
  if layer.delta:
    o = _delta_net(p, cfg, h, mix)
  else:
    o = _attention(p, cfg, h, layer.rope, mix, mesh)
  post = cfg.traits.post_norms
  x = x + (norm(cfg, o, p['attn_post_norm']) if post else o)
  h = norm(cfg, x, p['mlp_norm'])
  activation = ACTIVATIONS[cfg.traits.activation]
  if 'router' in p:
    h, chosen = experts.mix(p, cfg.moe, activation, h, mesh)
    told(chosen)
  else:
    gate, up = (project(p, cfg, h, name) for name in ('gate', 'up'))
    h = activation(checkpoint_name(gate, 'mlp')) * checkpoint_name(up, 'mlp')
    h = sharding.constrain(h, mesh, 'batch', 'time', 'mlp')
    h = project(p, cfg, h, 'down')
  x = x + (norm(cfg, h, p['mlp_post_norm']) if post else h)
  return sharding.constrain(x, mesh, 'batch', 'time', 'features')


def hidden_states(
  params: dict,
  cfg: DecoderConfig,
  ids,
  mesh=None,
  starts=None,
  tree: attention.Nodes | None = None,
  longest: int = 0,
):
  """Final hidden states [B, T, D] of ids int32 [B, T].

  Padding on the right is not told: causality hides it from the tokens before.
  starts: int32 [B, M] where the rows are packed (`attention.Packed`). tree:
  where they are prefix trees. longest: tokens of a sequence in such a row, at
  most; 0: T. The caller applies the head to the tokens that need it.
  """
  return replayed(params, cfg, ids, None, mesh, starts, tree, longest)[0]


def replayed(
  params: dict,
  cfg: DecoderConfig,
  ids,
  routes,
  mesh=None,
  starts=None,
  tree: attention.Nodes | None = None,
  longest: int = 0,
):
  """`hidden_states` with given experts, and where others would be chosen.

  routes: int [B, T, L, k], of the layers that have experts; -1: not known.
  None: those that are chosen.

  Returns:
    hidden states, and float32 [B, T], the share of these layers; None without
    routes.
  """
  B, T = ids.shape
  x = embed(params, cfg, ids)
  x = sharding.constrain(x, mesh, 'batch', 'time', 'features')
  packing: attention.Packed | attention.Nodes | None = tree
  if tree is not None:
    positions = tree.positions
  elif starts is None:
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
  else:
    arrays = attention.packed(starts, T)
    arrays = (sharding.constrain(a, mesh, 'batch', None) for a in arrays)
    packing = attention.Packed(*arrays)
    positions = packing.positions
  layers = layers_of(cfg, positions)
  how = dict(kernel=cfg.attention, packing=packing, mesh=mesh)
  if cfg.delta:
    why = 'a delta net has no prefix trees; set config.batch.prefix_tokens=0'
    lookup.require(tree is None, f'{cfg.family}: {why}')
    segments = jnp.zeros_like(ids) if starts is None else packing.segments
    places = dict(positions=positions, segments=segments, mesh=mesh)

  stacked, differs = params['layers'], None
  if routes is not None:
    given = jnp.moveaxis(routes.astype(jnp.int32), 2, 0)
    stacked = stacked | {experts.ROUTES: given}
    differs = jnp.zeros(ids.shape, jnp.float32)

  def apply(state, p, rope, window, net):
    x, differs = state
    chosen = []
    if net:
      mix = functools.partial(deltanet.causal, cfg.delta, **places)
    else:
      mix = functools.partial(attention.causal, window=window, **how)
    x = block(p, cfg, x, Layer(window, rope, net), mix, mesh, chosen.append)
    if experts.ROUTES in p:
      other = experts.differ(chosen[0], p[experts.ROUTES])
      differs = differs + other.astype(jnp.float32) / routes.shape[2]
    return x, differs

  alone = apply
  if cfg.remat != 'none':
    fields = dict(policy=remat.policy(cfg.remat), static_argnums=(3, 4))
    alone = jax.checkpoint(apply, **fields)
    # Within a scan, nothing can be merged with what is computed again.
    apply = jax.checkpoint(apply, prevent_cse=False, **fields)
  state = _through(
    cfg, apply, alone, (x, differs), stacked, layers, longest or T
  )
  return norm(cfg, state[0], params['final_norm']), state[1]


def _through(
  cfg,
  apply: Callable,
  alone: Callable,
  state,
  stacked: dict,
  layers: list[Layer],
  longest: int,
):
  """After all layers; apply(state, p, rope, window, delta) is one of them.

  alone: the same for a layer outside the scan.

  A scan over layers, in which RoPE may differ. A window within a sequence is a
  constant of its kernel, and a delta net has other parameters, so the scan is
  then over periods of `global_every` layers, and layers after the last whole
  period follow it. Where some layers have experts and others have none, they
  are one after another.
  """
  L, P = cfg.n_layers, cfg.global_every
  mixed = cfg.moe and cfg.moe.dense
  if not mixed and (not (cfg.delta or 0 < cfg.window < longest) or P == 1):
    kinds = list(dict.fromkeys(layer.window for layer in layers))
    ropes = [next(y.rope for y in layers if y.window == w) for w in kinds]
    which = None
    if len(ropes) > 1:
      which = jnp.array([kinds.index(y.window) for y in layers])

    def step(state, layer):
      p, own = layer
      rope = ropes[0]
      if own is not None:
        rope = jax.tree.map(lambda a, b: jnp.where(own, b, a), *ropes)
      return apply(state, p, rope, 0, False), None

    scanned = stacked, which
    return jax.lax.scan(step, state, scanned, unroll=cfg.scan_unroll)[0]

  own = {name: cfg.layers_with(name) for name in stacked}

  def some(apply, state, ps, count):  # one by one, from the first of a period
    for i in range(count):
      p = {k: v[own[k].index(i)] for k, v in ps.items() if i in own[k]}
      layer = layers[i]
      state = apply(state, p, layer.rope, layer.window, layer.delta)
    return state

  n = 0 if mixed else L // P
  # Of each stack, how many are in the whole periods.
  whole = {k: sum(i < n * P for i in own[k]) for k in stacked}
  if n:
    periods = {
      k: v[: whole[k]].reshape(n, -1, *v.shape[1:]) for k, v in stacked.items()
    }
    state, _ = jax.lax.scan(
      lambda state, ps: (some(apply, state, ps, P), None),
      state,
      periods,
      unroll=max(1, cfg.scan_unroll // P),
    )
  rest = {k: v[whole[k] :] for k, v in stacked.items()}
  return some(alone, state, rest, L - n * P)


def logits(params: dict, cfg: DecoderConfig, hidden):
  """float32 [..., V] from hidden [..., D]."""
  w = params['embed'].T if cfg.tied else params['head']
  return attention.einsum32('...D,DV->...V', hidden, w.astype(hidden.dtype))
