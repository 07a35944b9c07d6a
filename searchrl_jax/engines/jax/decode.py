"""The device programs of the in-process engine: load, prefill, decode, score.

Axis letters: B slots (decode) or rows (prefill), T tokens, S cache positions,
V vocabulary, D model, N/K query/kv heads, G = N / K, H head dim, C columns
and R rows of the vocabulary folded to [R, C].

Every program has one fixed shape for a width, and no operation mixes rows, so
the result of a row depends on that row alone (design 5.10), unless
`Shape.exact` is False. The caches (`engines.jax.caches`) are donated.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from searchrl_jax import lookup
from searchrl_jax.devices import sharding
from searchrl_jax.engines.jax import caches as kv
from searchrl_jax.engines.jax import states
from searchrl_jax.models import attention, decoder, deltanet, families
from searchrl_jax.models.decoder import DecoderConfig

MAX_STOP_IDS = 8  # stop ids of one slot that the device compares
MAX_WIDTH = 512  # tokens of a row in one prefill call
# Axes of parameters that lie otherwise than in training.
_SERVED = {'embed': None, 'experts': 'served_experts'}
_NOWHERE = 2**30  # a position that no cache has: what is written is dropped
SCORE_TOKENS = 512  # tokens whose logits are held at once when scoring


def served(cfg: DecoderConfig, config) -> DecoderConfig:
  """The config of the sampler's copy of a model, by config.engine."""
  how = dict(dtype=config.dtype, keeps_routes=config.record_routes or None)
  return dataclasses.replace(cfg, remat='none', **how)


@dataclasses.dataclass(frozen=True)
class Shape:
  """The static sizes that the programs are compiled for."""

  slots: int
  max_len: int
  chunk: int
  prefill_rows: int
  parts: int = 1  # of the slots, on different devices (sharding.parts)
  # Calls have one size; else, one that follows what there is to compute.
  exact: bool = True

  @property
  def widths(self) -> tuple[int, ...]:
    """Prefill widths: 16, 32, then steps of 3/2 and 4/3 up to the largest."""
    last = min(self.max_len, MAX_WIDTH)
    sizes = [16, 32]
    while sizes[-1] < last:
      base = 1 << (sizes[-1].bit_length() - 1)
      sizes.append(base * 3 // 2 if sizes[-1] == base else base * 2)
    return tuple(s for s in sizes if s < last) + (last,)

  @property
  def score_widths(self) -> tuple[int, ...]:
    sizes = [32]
    while sizes[-1] < self.max_len:
      sizes.append(2 * sizes[-1])
    return tuple(sizes)

  def rows(self, width: int) -> int:
    """Rows of a prefill call: about the same tokens at every width."""
    tokens = self.prefill_rows * 32 // self.parts
    return self.parts * max(1, tokens // max(width, 32))

  def prefill_sizes(self, width: int) -> tuple[int, ...]:
    """Rows that a prefill call may have, ascending."""
    return self._sizes(self.rows(width), 4, 1)

  @property
  def decode_sizes(self) -> tuple[int, ...]:
    """Slots that a decode call may have, ascending."""
    return self._sizes(self.slots, 2, 4)

  def _sizes(self, most: int, step: int, least: int) -> tuple[int, ...]:
    sizes = [most]
    while not self.exact and sizes[0] > least:
      sizes.insert(0, max(least, -(-sizes[0] // step)))
    return tuple(sizes)


def fit(sizes: tuple[int, ...], n: int) -> int:
  """The smallest of ascending `sizes` that holds n."""
  return next(s for s in sizes if s >= n)


@functools.partial(jax.jit, static_argnums=1)
def _split(params: dict, cfg: DecoderConfig) -> dict:
  """A copy of every parameter in its dtype, one tree for each layer."""

  def own(name, x):
    # A copy even if neither cast nor slice makes a new buffer.
    return jnp.copy(x.astype(families.dtype_of(name, cfg.dtype)))

  out = {k: own(k, v) for k, v in params.items() if k != 'layers'}
  out['layers'] = [
    {k: own(k, params['layers'][k][at]) for k, at in places.items()}
    for places in _places(cfg, params['layers'])
  ]
  return out


def _places(cfg: DecoderConfig, names) -> list[dict[str, int]]:
  """Of each layer: the parameters that it has -> the place in their stacks."""
  layers = {name: cfg.layers_with(name) for name in names}
  return [
    {name: own.index(i) for name, own in layers.items() if i in own}
    for i in range(cfg.n_layers)
  ]


def abstract(cfg: DecoderConfig, mesh=None) -> dict:
  """Shapes and shardings of the result of `load`.

  On a mesh, weights are sharded only along the axis `tensor`: otherwise every
  token would wait for weights from other devices.
  """
  out = {}
  for name, (shape, axes) in decoder.param_table(cfg).items():
    first = int(axes[0] == 'layers')
    axes = [_SERVED.get(a, a) for a in axes]
    dtype = families.dtype_of(name, cfg.dtype)
    out[name] = kv.like(cfg, mesh, axes[first:], shape[first:], dtype)
  out = decoder.nest(out)
  layers = out['layers']
  own = [{k: layers[k] for k in places} for places in _places(cfg, layers)]
  return out | {'layers': own}


def load(params: dict, cfg: DecoderConfig, mesh=None) -> dict:
  """The engine's own copy of the trainer's parameters, sliced by layer.

  params: all, or adapters alone.

  Returns {'embed', 'final_norm', ['head'], 'layers': [{...} per layer]} in
  cfg.dtype (`families.dtype_of`), placed as in `abstract`. No buffer is shared
  with `params` (the trainer donates its own).
  """
  tree, whole = _split(params, cfg), abstract(cfg, mesh)
  where = {k: whole[k].sharding for k in tree if k != 'layers'}
  layers = zip(tree['layers'], whole['layers'])
  where['layers'] = [{k: all_[k].sharding for k in own} for own, all_ in layers]
  return jax.device_put(tree, where)


def threefry(key, count):
  """Threefry-2x32, 20 rounds (Salmon et al. 2011): two uint32 words.

  key, count: pairs of uint32 arrays of one shape. Implemented here because the
  stream must not change with a JAX flag or release (design 5.10).
  """
  rotations = ((13, 15, 26, 6), (17, 29, 16, 24))
  k = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
  x0, x1 = count[0] + k[0], count[1] + k[1]
  for i in range(5):
    for r in rotations[i % 2]:
      x0 = x0 + x1
      x1 = ((x1 << r) | (x1 >> (32 - r))) ^ x0
    x0 = x0 + k[(i + 1) % 3]
    x1 = x1 + k[(i + 2) % 3] + jnp.uint32(i + 1)
  return x0, x1


def uniforms(seed, position):
  """Two float32 in [0, 1) for each (seed [..., 2] uint32, position)."""
  position = position.astype(jnp.uint32)
  key = seed[..., 0], seed[..., 1]
  words = threefry(key, (position, jnp.zeros_like(position)))
  return tuple((w >> 8).astype(jnp.float32) * 2.0**-24 for w in words)


def columns(vocab: int) -> int:
  """C of the vocabulary folded to [R, C]: a power of two near sqrt(V)."""
  return max(8, 1 << round(math.log2(max(vocab, 1)) / 2))


def first(ok):
  """Index of the first True along the last axis, and whether there is one."""
  n = ok.shape[-1]
  index = jnp.min(jnp.where(ok, jnp.arange(n, dtype=jnp.int32), n), axis=-1)
  return jnp.minimum(index, n - 1), index < n


def invert(weights, u):
  """Draws i with probability weights[..., i] / sum: int32 [...].

  Never draws an i of weight zero: if rounding leaves no cumulative sum above
  the target, it draws the largest weight.
  """
  c = jnp.cumsum(weights, -1)
  ok = (c > u[..., None] * c[..., -1:]) & (weights > 0)
  index, found = first(ok)
  largest, _ = first(weights == jnp.max(weights, -1, keepdims=True))
  return jnp.where(found, index, largest)


def ordered(x):
  """float32 -> int32 with the same order, so that a bisection is exact."""
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def truncation(x, top_k, top_p):
  """The order key below which a logit is excluded: int32 [B].

  x float32 [B, V] after temperature; top_k int32 [B] (0: all); top_p float32
  [B]. Top-k first, then the smallest set of the kept logits whose mass reaches
  top_p (nucleus, arXiv 1904.09751). Logits that tie with the last one kept
  are kept. A bisection on the bits finds the exact threshold without a sort.
  A GPU finds four bits at once, by 15 sums, and computes the keys and masses of
  x anew: the logits are read 16 times, not 96.
  """
  B, V = x.shape
  lowest = jnp.iinfo(jnp.int32).min
  top = jnp.max(x, -1, keepdims=True)
  terms = lambda: (ordered(x), jnp.exp(x - top))
  bits = 4
  if sharding.platform() != 'gpu':
    bits, made = 1, terms()
    terms = lambda: made

  def largest(weigh, goal):
    """The largest t of each row at which the weights sum up to its goal.

    weigh: (key, mass, t [B, 1]) -> [B, V], less for a larger t.
    """

    def step(i, t):
      shift = 32 - bits * (i + 1)
      # They overflow to where the order of int32 goes on, from the lowest.
      above = [t + (jnp.int32(d) << shift) for d in range(1, 2**bits)]
      weights = [weigh(*terms(), t[:, None]) for t in above]
      zeros = [jnp.zeros((), w.dtype) for w in weights]
      add = lambda a, b: [p + q for p, q in zip(a, b)]
      sums = jax.lax.reduce(weights, zeros, add, (1,))
      return t + (sum((s >= goal).astype(jnp.int32) for s in sums) << shift)

    return jax.lax.fori_loop(0, 32 // bits, step, jnp.full((B,), lowest))

  k = jnp.where(top_k > 0, jnp.minimum(top_k, V), V)
  by_k = largest(lambda key, _, t: (key >= t).astype(jnp.int32), k)

  def kept(key, mass, t):
    return jnp.where(key >= jnp.maximum(t, by_k[:, None]), mass, 0.0)

  goal = top_p * jnp.sum(kept(*terms(), lowest), -1)
  # top_p = 1 keeps the tail that float32 sums lose.
  by_p = jnp.where(top_p < 1.0, largest(kept, goal), lowest)
  return jnp.maximum(jnp.where(top_k > 0, by_k, lowest), by_p)


def draw(logits, u, state):
  """One id for each slot and its log-prob. logits float32 [B, V].

  Two levels instead of a cumulative sum over V: one word of the stream draws
  a column of the vocabulary folded to [R, C], the other a row in it. The
  distribution is the tempered, truncated one; a greedy slot takes the argmax
  (lowest id on ties) and reports its log-prob at temperature 1.
  """
  B, V = logits.shape
  C = columns(V)
  x = logits * state['inv_temperature'][:, None]
  truncates = (state['top_p'] < 1.0) | (state['top_k'] > 0)
  cut = jax.lax.cond(
    jnp.any(truncates),
    # Not x: the operands of a branch are written to memory in any case.
    lambda: truncation(
      logits * state['inv_temperature'][:, None], state['top_k'], state['top_p']
    ),
    lambda: jnp.full((B,), jnp.iinfo(jnp.int32).min, jnp.int32),
  )
  if V % C:
    x = jnp.pad(x, ((0, 0), (0, -V % C)), constant_values=-jnp.inf)
  x = x.reshape(B, -1, C)
  top = jnp.max(jnp.max(x, axis=1), axis=-1)

  def weigh(values, top, cut):
    return jnp.where(ordered(values) >= cut, jnp.exp(values - top), 0.0)

  sums = jnp.sum(weigh(x, top[:, None, None], cut[:, None, None]), axis=1)
  column = invert(sums, u[0])
  values = jnp.take_along_axis(x, column[:, None, None], axis=2)[..., 0]
  row = invert(weigh(values, top[:, None], cut[:, None]), u[1])
  ids = row * C + column
  chosen = jnp.take_along_axis(values, row[:, None], axis=1)[:, 0]

  greedy = state['greedy']
  index = jnp.arange(x.shape[1] * C, dtype=jnp.int32).reshape(-1, C)

  def first_of_largest():
    at = jnp.where(x == top[:, None, None], index, V - 1)
    return jnp.min(jnp.min(at, axis=1), -1)

  best = jax.lax.cond(jnp.any(greedy), first_of_largest, lambda: ids)
  ids = jnp.where(greedy, best, ids)
  chosen = jnp.where(greedy, top, chosen)
  return ids, chosen - top - jnp.log(jnp.sum(sums, -1))


def finish(weights, cfg, x):
  """float32 logits from the residual stream x [..., D]."""
  x = decoder.norm(cfg, x, weights['final_norm'])
  return decoder.logits(weights, cfg, x)


def decode(weights, caches, state, *, cfg, shape, mesh=None):
  """Samples up to `chunk` tokens in every active slot.

  state, all [B]: token int32 (the last of the sequence, not yet in the
  cache), length int32 (tokens in the sequence), left int32 (tokens still
  wanted; 0 = an idle slot, whose rows are untouched), inv_temperature, top_p
  float32, top_k int32, greedy bool, seed uint32 [B, 2], stop_ids int32
  [B, MAX_STOP_IDS] (-1 = none), replay int32 (tokens of the log that delta
  nets write first, see `states.accepted`). They are of all slots, or, without
  delta nets, of those that state['slot'], int32 [B], numbers.

  Returns caches, ids int32 [chunk, B], logps float32 [chunk, B], counts int32
  [B] (tokens sampled), and the steps that were run, int32 [1].
  """
  B, n = len(state['token']), shape.chunk
  some = state.get('slot')
  slots = jnp.arange(B) if some is None else some
  positions = state['length'] + jnp.arange(n)[:, None]
  u = uniforms(jnp.broadcast_to(state['seed'], (n, B, 2)), positions)
  nets = cfg.delta_layers
  caches = [
    states.begin(cache, state['replay']) if i in nets else cache
    for i, cache in enumerate(caches)
  ]

  def step(carry):
    t, token, counts, ended, caches, ids, logps = carry
    active = (counts < state['left']) & ~ended
    at = (state['length'] + counts - 1)[:, None]
    put = jnp.where(active[:, None], at, _NOWHERE)
    x = decoder.embed(weights, cfg, token)[:, None]
    new = []
    for p, cache, layer in zip(
      weights['layers'], caches, decoder.layers_of(cfg, at)
    ):
      chosen = []

      def attend(q, k, v, cache=cache, window=layer.window):
        new.append(kv.write(cfg, cache, slots, put, (k, v), mesh))
        return kv.attend(cfg, q, new[-1], at, window, mesh, some)

      def advance(*of_net, cache=cache):
        o, after = states.step(cfg, cache, t, active, at, *of_net, mesh)
        new.append(after)
        return o

      mix = advance if layer.delta else attend
      x = decoder.block(p, cfg, x, layer, mix, mesh, chosen.append)
      if cfg.keeps_routes:
        new[-1] += kv.write_routes(cfg, cache, slots, put, chosen, mesh)
    # Whole rows for the draw: its branches may contain no collective. Gathered
    # are the logits: without the first constraint XLA gathers the head.
    logits = finish(weights, cfg, x[:, 0])
    logits = sharding.constrain(logits, mesh, 'batch', 'vocab')
    logits = sharding.constrain(logits, mesh, 'batch', 'features')
    # An active slot has sampled in every step so far: counts == t.
    token_, logp = draw(logits, (u[0][t], u[1][t]), state)
    token = jnp.where(active, token_, token)
    stop = jnp.any(token[:, None] == state['stop_ids'], -1)
    ended = ended | (active & stop)
    ids = ids.at[t].set(token)
    logps = logps.at[t].set(logp)
    counts = counts + active.astype(jnp.int32)
    return t + 1, token, counts, ended, new, ids, logps

  # Parts of the batch end independently, unless they share collectives.
  together = shape.parts > 1 and mesh.shape['tensor'] > 1

  def go(carry):
    t, _, counts, ended, *_ = carry
    active = (counts < state['left']) & ~ended
    return (t < n) & (together | jnp.any(active))

  carry = (
    jnp.int32(0),
    state['token'],
    jnp.zeros((B,), jnp.int32),
    jnp.zeros((B,), bool),
    caches,
    jnp.zeros((n, B), jnp.int32),
    jnp.zeros((n, B), jnp.float32),
  )
  t, _, counts, _, caches, ids, logps = jax.lax.while_loop(go, step, carry)
  caches = [
    states.pinned(cfg, c.kept, mesh) if i in nets else c
    for i, c in enumerate(caches)
  ]
  return caches, ids, logps, counts, t[None]


def prefill(
  weights, caches, ids, slots, start, lengths, replay, *, cfg, fresh, mesh
):
  """Writes the K/V of ids [R, W] to rows `slots` from position `start`.

  lengths [R]: real tokens of a row; an empty row has slot == B. replay [R]:
  tokens of the log that delta nets write before, see `states.accepted`. fresh:
  every start is 0, and the cache is not read. No logits: `decode` always
  computes the last token of a sequence, so the last layer's attention and
  feed-forward are dead code here, but for what a router chose.
  """
  B, W = len(caches[0][0]), ids.shape[1]
  slots = sharding.own_rows(slots, B)
  index = jnp.arange(W)[None]
  at = start[:, None] + index
  put = jnp.where(index < lengths[:, None], at, _NOWHERE)
  x = decoder.embed(weights, cfg, ids)
  new = []
  for p, cache, layer in zip(
    weights['layers'], caches, decoder.layers_of(cfg, at)
  ):
    chosen = []

    def attend(q, k, v, cache=cache, window=layer.window):
      new.append(kv.write(cfg, cache, slots, put, (k, v), mesh))
      if fresh:
        own = lengths, cfg.attention
        return attention.causal(q, k, v, *own, window=window)
      return kv.attend(cfg, q, new[-1], at, window, mesh, slots)

    def advance(*of_net, cache=cache):
      place = slots, None if fresh else replay, at, lengths, mesh
      o, after = states.prefill(cfg, cache, *place, *of_net)
      new.append(after)
      return o

    mix = advance if layer.delta else attend
    x = decoder.block(p, cfg, x, layer, mix, mesh, chosen.append)
    if cfg.keeps_routes:
      new[-1] += kv.write_routes(cfg, cache, slots, put, chosen, mesh)
  return new


def score(weights, ids, *, cfg, mesh=None):
  """Teacher-forced log-probs float32 [R, W] of right-padded ids ([:, 0]: 0)."""
  R, W = ids.shape
  at = jnp.broadcast_to(jnp.arange(W, dtype=jnp.int32), (R, W))
  x = decoder.embed(weights, cfg, ids)
  for p, layer in zip(weights['layers'], decoder.layers_of(cfg, at)):
    mix = functools.partial(
      attention.causal, kernel=cfg.attention, window=layer.window
    )
    if layer.delta:
      where = dict(positions=at, segments=jnp.zeros_like(ids), mesh=mesh)
      mix = functools.partial(deltanet.causal, cfg.delta, **where)
    x = decoder.block(p, cfg, x, layer, mix, mesh)
  targets = jnp.pad(ids[:, 1:], ((0, 0), (0, 1))).reshape(-1)
  x = x.reshape(R * W, -1)

  def head(pair):
    hidden, target = pair
    logits = finish(weights, cfg, hidden)
    chosen = jnp.take_along_axis(logits, target[:, None], -1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, -1)

  n = math.gcd(R * W, SCORE_TOKENS)
  pairs = x.reshape(-1, n, x.shape[-1]), targets.reshape(-1, n)
  logps = jax.lax.map(head, pairs).reshape(R, W)[:, :-1]
  return jnp.pad(logps, ((0, 0), (1, 0)))


class Programs:
  """The jitted programs for one model and one set of sizes (`programs`)."""

  def __init__(self, cfg: DecoderConfig, shape: Shape, mesh=None):
    rows = mesh.size // mesh.shape['tensor'] if mesh else 1
    lookup.require(
      not cfg.moe or shape.parts == rows,
      f'config.engine.slots={shape.slots}: every token would gather experts; '
      f'give a multiple of {rows}, config.mesh data x fsdp',
    )
    left = mesh.size > shape.parts if mesh else False
    if left and (shape.parts > 1 or sharding.platform() == 'tpu'):
      # If `by_rows` leaves axes to the compiler, cuDNN's partitioner fails, and
      # splash attention has none.
      cfg = dataclasses.replace(cfg, attention='xla')

    def program(f, ins, outs, donate=1, **static):
      f = functools.partial(f, cfg=cfg, mesh=mesh, **static)
      f = sharding.by_rows(f, mesh, shape.slots, ins, outs)
      return jax.jit(f, donate_argnums=donate)

    self.decode = program(decode, (-1, 0, 0), (0, 1, 1, 0, 0), shape=shape)
    prefills = functools.partial(program, prefill, (-1, *[0] * 6), 0)
    self.fresh, self.extend = prefills(fresh=True), prefills(fresh=False)
    self.score = program(score, (-1, 0), 0, donate=())


# Engines of the same sizes share compiled programs.
programs = functools.lru_cache(maxsize=None)(Programs)


def idle_state(slots: int) -> dict:
  """The state of slots that do nothing (numpy)."""
  return {
    'token': np.zeros(slots, np.int32),
    'length': np.ones(slots, np.int32),
    'left': np.zeros(slots, np.int32),
    'inv_temperature': np.ones(slots, np.float32),
    'top_p': np.ones(slots, np.float32),
    'top_k': np.zeros(slots, np.int32),
    'greedy': np.zeros(slots, bool),
    'seed': np.zeros((slots, 2), np.uint32),
    'stop_ids': np.full((slots, MAX_STOP_IDS), -1, np.int32),
    'replay': np.zeros(slots, np.int32),
  }
