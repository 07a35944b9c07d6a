"""The update: gradient accumulation, one optimizer step.

A minibatch is a list of microbatches of a few shapes (`batching`); each shape
compiles once. Their gradients are sums with one common denominator (`losses`),
so the result does not depend on how a minibatch is split.

Axes: B rows, T tokens, N trajectories, S shards (mesh devices along data and
fsdp), C loss tokens of a shard.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from searchrl_jax.devices import compiling, sharding
from searchrl_jax.learn import batching, critic, logps, losses, optim
from searchrl_jax.learn.logps import compact
from searchrl_jax.learn.objectives import Objective
from searchrl_jax.models import attention, decoder, experts, lora, parameters
from searchrl_jax.types import Batch


class TrainState(NamedTuple):
  params: Any  # those that are trained
  opt_state: Any
  step: jax.Array  # int32 scalar, optimizer updates done


class Told(NamedTuple):
  """What a teacher says of a microbatch: ids, log-probs, weights."""

  at: np.ndarray  # int32 [B, T, K]
  log_t: np.ndarray  # float32 [B, T, K]
  weight: np.ndarray  # float32 [B, T], of the distance to it; 0: none


def copy(params):
  """Copies the parameters, since a donated buffer cannot be read again."""
  return jax.tree.map(lambda x: jnp.array(x, copy=True), params)


def like_rows(mesh, x) -> jax.ShapeDtypeStruct:
  """The shape and layout of `put_rows`."""
  layout = sharding.named(mesh, ('batch', *[None] * (x.ndim - 1)), x.shape)
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)


def put_rows(mesh, x) -> jax.Array:
  """An array of rows [B, ...] on the device(s)."""
  return sharding.put(x, like_rows(mesh, x).sharding)


def compaction(mask: np.ndarray, shards: int, room: int):
  """Where the loss tokens are: index int32 [S, C], inverse int32 [S, P].

  mask: bool [B, T]; P = B T / S. index lists the loss tokens of each shard in
  order and then P; inverse says which entry a position has, room = C for none.
  """
  mask = mask.reshape(shards, -1)
  index = np.full((shards, room), mask.shape[1], np.int32)
  inverse = np.full(mask.shape, room, np.int32)
  for s in range(shards):
    at = np.flatnonzero(mask[s])
    index[s, : len(at)] = at
    inverse[s, at] = np.arange(len(at))
  return index, inverse


def by_trajectory(arrays: dict, contexts: int = 1):
  """What makes one line of each trajectory, for losses over sequences.

  Args:
    arrays: of `Updater.put`.
    contexts: at most, of a trajectory.

  Returns:
    a function of x [B, T] that gives [N, contexts T]: the tokens of each
    trajectory from column 0 on, in all its contexts, then zeros.
  """
  if arrays['lines'] is not None:
    return _by_trajectory(arrays, contexts)
  (B, T), N = arrays['ids'].shape, arrays['starts'].size
  S, places = len(arrays['index']), N // B
  starts = arrays['starts'].reshape(B, places)
  lengths = arrays['lengths'].reshape(B, places)
  P, L = B * T // S, N * T // S
  at = jnp.arange(T, dtype=jnp.int32)
  row = jnp.arange(B, dtype=jnp.int32)[:, None] % (B // S)
  # From a place of a trajectory to that of the packed row, in its shard.
  first = row * T + starts
  real = at < lengths[..., None]
  index = jnp.where(real, first[..., None] + at, P)
  # And back.
  packed = attention.packed(starts, T)
  line = row * places + packed.segments
  own = jnp.take_along_axis(lengths, packed.segments, 1)
  inverse = jnp.where(packed.positions < own, line * T + packed.positions, L)
  index, inverse = index.reshape(S, L), inverse.reshape(S, P)

  def lines(x):
    return compact(x.reshape(S, P), index, inverse).reshape(N, T)

  return lines


def _by_trajectory(arrays: dict, contexts: int):
  """The same where a trajectory may have several contexts."""
  (B, T), N = arrays['ids'].shape, arrays['starts'].size
  S, W = len(arrays['index']), contexts * T
  P, L = B * T // S, N * W // S
  packed = attention.packed(arrays['starts'].reshape(B, -1), T)

  def of_token(x):  # [N] -> [B, T]
    return jnp.take_along_axis(x.reshape(B, -1), packed.segments, 1)

  first = of_token(arrays['lines'].line) * W + of_token(arrays['lines'].column)
  real = packed.positions < of_token(arrays['lengths'])
  inverse = jnp.where(real, first + packed.positions, L).reshape(S, P)
  shard, at = jnp.arange(S)[:, None], jnp.arange(P, dtype=jnp.int32)
  index = jnp.full((S, L + 1), P, jnp.int32)
  index = index.at[shard, inverse].set(jnp.broadcast_to(at, (S, P)))[:, :L]

  def lines(x):
    return compact(x.reshape(S, P), index, inverse).reshape(N, W)

  return lines


@dataclasses.dataclass(eq=False)
class Updater:
  """The compiled programs of one training run.

  Attributes:
    shapes: of the parameters that are trained, with shardings.
    frozen: parameters (or their shapes) beside them, see `lora.split`. {}: all
      are trained.
    abstract: the shapes of `init`, the target for restoring a checkpoint.
    shards: devices along which the rows of a microbatch lie.
    programs, traced: by name, or (name, shape of the microbatch); constant
      after `warmup`.
  """

  cfg: decoder.DecoderConfig
  batch_config: Any  # config.batch
  _: dataclasses.KW_ONLY
  temperature: float  # at which the policy was sampled (1.0 for supervised)
  tx: optax.GradientTransformation  # `optim.make`
  # `objectives.policy(config)`, `supervised()`, or `value(config)` of a critic.
  objective: Objective
  mesh: Any = None  # None: the default device alone
  contexts: int = 1  # of a trajectory, at most
  replays: bool = False  # whether experts are those of `Batch.routes`

  def __post_init__(self):
    self.mesh = self.mesh or sharding.make_mesh(devices=jax.devices()[:1])
    self.shards = self.mesh.shape['data'] * self.mesh.shape['fsdp']
    model = critic if self.objective.critic else decoder
    shapes = parameters.shapes(self.cfg, self.mesh, model)
    self.shapes, self.frozen = lora.split(self.cfg, shapes)
    self.traced: dict[Any, Any] = {}
    self.programs: dict[Any, Any] = {}
    whole = sharding.replicated(self.mesh)
    known = dict(zip(optim.paths(self.shapes), jax.tree.leaves(self.shapes)))

    def placed(path, leaf):
      # Adam's moments lie as their parameters do, scalars are replicated.
      name = optim.name(path)
      owners = [p for p in known if name.endswith('/' + p)]
      # 'x/head' ends with 'head' alone, but 'layers/q' also with 'q'.
      owner = max(owners, key=len, default=None)
      layout = known[owner].sharding if owner and leaf.ndim else whole
      return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout)

    moments = jax.eval_shape(self.tx.init, self.shapes)
    moments = jax.tree.map_with_path(placed, moments)
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
    self.abstract = TrainState(self.shapes, moments, step)
    layout = jax.tree.map(lambda x: x.sharding, self.abstract)
    scores = self.like(self.batch_config.lengths[0])['mask'].sharding
    if sharding.own_mesh(self.mesh) is not self.mesh:
      scores = whole  # every process reads all rows
    sums = layout.params, whole
    # Name -> (function, layout of its results, donated arguments).
    self._functions = {
      'zeros': (self._zeros, sums, ()),
      'accumulate': (self._accumulate, sums, (1,)),
      'apply': (self._apply, (layout, whole), (0,)),
      'score': (self._score, scores, ()),
      'top': (self._top, scores, ()),
      'columns': (self._columns, scores, ()),
    }

  # ---- state

  def init(self, params) -> TrainState:
    """A fresh optimizer around `params`, laid out on the mesh.

    The state owns the arrays, since `step` donates them: another user of the
    same parameters (a reference policy, an engine) needs `copy(params)`.
    """
    layout, _ = self._functions['apply'][1]
    params = jax.device_put(params, layout.params)
    opt_state = jax.jit(self.tx.init, out_shardings=layout.opt_state)(params)
    step = jax.device_put(jnp.zeros((), jnp.int32), layout.step)
    return TrainState(params, opt_state, step)

  # ---- microbatches

  def put(
    self, batch: Batch, old=None, ref=None, told=None, place=put_rows
  ) -> dict:
    """Arrays of a microbatch on the device(s), loss tokens indexed.

    told: of a teacher's columns (`Told`), if the objective has some.
    """
    room = batching.capacity(self.batch_config, batch.ids.shape[1])
    index, inverse = compaction(batch.mask, self.shards, room)
    zeros = np.zeros(batch.ids.shape, np.float32)
    arrays: dict[str, Any] = vars(batch) | {
      'index': index,
      'inverse': inverse,
      'old': zeros if old is None else old,
      'ref': zeros if ref is None else ref,
      'routes': self._routes(batch) if self.replays else None,
    }
    if k := self.objective.columns:
      none = np.zeros((*batch.ids.shape, k), np.float32)
      arrays |= (told or Told(none.astype(np.int32), none, zeros))._asdict()
    del arrays['owner']
    return jax.tree.map(functools.partial(place, self.mesh), arrays)

  def _routes(self, batch: Batch) -> np.ndarray:
    """`Batch.routes`, of the nodes if there is a tree; -1 if there are none."""
    layers = len(self.cfg.layers_with('router'))
    each, found, tree = (layers, self.cfg.moe.chosen), batch.routes, batch.tree
    if found is None:
      found = np.full((*batch.ids.shape, *each), -1, np.int16)
    if tree is None:
      return found
    nodes = np.full((*tree.ids.shape, *each), -1, np.int16)
    rows = len(batch.ids) // len(tree.ids)
    for _, (row, span) in batch.spans():
      own = found[row, span]
      known = own[:, 0, 0] >= 0  # of the last token another may know them
      nodes[row // rows, tree.at[row, span][known]] = own[known]
    return nodes

  def like(self, length: int) -> dict:
    """The shapes of `put` for microbatches with rows of this length."""
    shape = length, self.shards, self.contexts
    empty = batching.empty(self.batch_config, *shape)
    return self.put(empty, place=like_rows)

  # ---- programs

  def _logps(self, params, arrays, entropy: bool):
    """Of the loss tokens, their entropy, and those of a teacher's columns."""
    if self.objective.critic:
      values = critic.token_values(params, self.cfg, arrays, self.mesh)
      return values, None, None, None
    chunk, grad = self.batch_config.head_chunk, self.objective.entropy_grad
    how = self.temperature, chunk, self.mesh, entropy, grad
    return logps.token_logps(params, self.cfg, arrays, *how)

  def loss(self, params, arrays: dict, divisor, frozen=None):
    """Loss of one microbatch (its numerator / divisor) and metric sums."""
    lines = by_trajectory(arrays, self.contexts)
    params = lora.join(params, frozen)
    found, entropy, own, replay = self._logps(params, arrays, True)
    names = 'mask', 'behaviour_logps', 'advantages', 'old', 'ref'
    columns = {name: lines(arrays[name]) for name in names}
    o, mask = self.objective, columns['mask']
    if o.columns:
      far = losses.distance(own, arrays['log_t'], o.distance, o.alpha)
      far = jnp.where(arrays['mask'], arrays['weight'] * far, 0.0)
      columns['distance'] = lines(far)
    found, entropy = jax.tree.map(lines, (found, entropy))
    per_token, sums = o.fn(found, entropy, columns)
    loss = losses.aggregate(per_token, mask, o.aggregation)
    loss = loss / divisor
    sums = dict(sums) | {
      'loss': loss,
      'tokens': jnp.sum(mask, dtype=jnp.float32),
      'sequences': jnp.sum(jnp.any(mask, -1), dtype=jnp.float32),
    }
    if replay is not None:
      sums |= zip(('routes_unknown', 'routes_differ'), replay)
    return loss, jax.lax.stop_gradient(sums)

  def _accumulate(self, params, acc, arrays, divisor, frozen):
    grads, sums = acc
    grad = jax.grad(self.loss, has_aux=True)
    fresh, new = grad(params, arrays, divisor, frozen)
    return jax.tree.map(jnp.add, grads, fresh), losses.add(sums, new)

  @functools.cached_property
  def _sums(self) -> dict:
    """Names and shapes of the metrics."""
    arrays = self.like(self.batch_config.lengths[0])
    args = self.shapes, arrays, np.float32(1), self.frozen
    whole = sharding.replicated(self.mesh)
    return {
      k: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=whole)
      for k, v in jax.eval_shape(self.loss, *args)[1].items()
    }

  def _zeros(self, params):
    sums = {k: jnp.zeros(v.shape, v.dtype) for k, v in self._sums.items()}
    return jax.tree.map(jnp.zeros_like, params), sums

  def _apply(self, state, grads, loss):
    # optax mixes its int32 counters with floats; our own code promotes
    # nothing by accident (tests run strictly).
    with jax.numpy_dtype_promotion('standard'):
      updates, opt_state = self.tx.update(grads, state.opt_state, state.params)
    norm = optax.global_norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    params = optax.apply_updates(state.params, updates)
    new = TrainState(params, opt_state, state.step + 1)
    new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
    return new, {
      'grad_norm': norm,
      'update_norm': optax.global_norm(updates),
      'finite': finite,
    }

  def _score(self, params, arrays, frozen):
    return self._logps(lora.join(params, frozen), arrays, False)[0]

  def _columns(self, params, arrays, frozen):
    return self._logps(lora.join(params, frozen), arrays, False)[2]

  def _top(self, params, arrays, frozen):
    how = self.temperature, self.batch_config.head_chunk, self.objective.columns
    params = lora.join(params, frozen)
    return logps.top(params, self.cfg, arrays, *how, self.mesh)

  def _lower(self, key, *args):
    """A program by its key, ready to be compiled for the shapes of args."""
    name = key if isinstance(key, str) else key[0]
    function, out, donated = self._functions[name]
    jitted = jax.jit(function, out_shardings=out, donate_argnums=donated)
    self.traced[key] = jitted.trace(*args)
    return self.traced[key].lower()

  def _program(self, name: str, *args, shape=None):
    """A program, compiled for the shapes of args the first time.

    shape: of the microbatch among args.
    """
    key = name if shape is None else (name, shape)
    if key not in self.programs:
      self.programs[key] = self._lower(key, *args).compile()
    return self.programs[key]

  def warmup(self, *, score: bool) -> None:
    """Compiles every program for every bucket; runs none.

    score: whether `score` will be called (old or reference log-probs).
    """
    params, frozen, divisor = self.shapes, self.frozen, np.float32(1)
    wanted = {'zeros': (params,)}
    for length in self.batch_config.lengths:
      arrays = self.like(length)
      shape = arrays['ids'].shape
      names = ['score'] * score + ['top', 'columns'] * bool(
        self.objective.columns
      )
      wanted |= {(name, shape): (params, arrays, frozen) for name in names}
      # A gradient lies as its parameter does.
      sums = params, self._sums
      wanted['accumulate', shape] = params, sums, arrays, divisor, frozen
    wanted['apply'] = self.abstract, params, self._sums['loss']
    missing = {k: v for k, v in wanted.items() if k not in self.programs}
    lowered = (self._lower(key, *args) for key, args in missing.items())
    at_once = experts.compile_at_once(self.cfg.moe)
    self.programs |= zip(missing, compiling.concurrently(lowered, at_once))

  # ---- what a loop calls

  def output(
    self, params, batch: Batch, name: str = 'score', told=None
  ) -> np.ndarray:
    """Log-probs [B, T] of the loss tokens under `params`, 0 elsewhere.

    params: as those of the state, beside `frozen`.
    For log-probs before a step's first update, a reference policy, or a
    check against the engine's. A critic's values.
    name='top': the most likely ids int32 [B, T, K], K as the objective has.
    name='columns': log-probs [B, T, K] of the ids of `told`.
    """
    args = params, self.put(batch, told=told), self.frozen
    program = self._program(name, *args, shape=batch.ids.shape)
    return np.asarray(program(*args))

  def outputs(
    self, params, minibatches, name: str = 'score', told=None
  ) -> list[list[np.ndarray]]:
    """`output` of every microbatch of some minibatches; `told` is nested."""
    told = told or [[None] * len(mini) for mini in minibatches]
    return [
      [self.output(params, b, name, t) for b, t in zip(mini, of_mini)]
      for mini, of_mini in zip(minibatches, told, strict=True)
    ]

  def grads(
    self,
    state: TrainState,
    batches: Sequence[Batch],
    old=None,
    ref=None,
    told=None,
  ):
    """Gradients of a minibatch, accumulated over its microbatches.

    Returns:
      (gradients, metric sums): divided already by the denominator of the
      whole minibatch, metrics not yet means (`losses.summarise`).

    Raises:
      ValueError: log-probs that the objective needs are not given.
    """
    o = self.objective
    if (o.needs_old and old is None) or (o.needs_ref and ref is None):
      raise ValueError(
        'this objective needs old or ref: an array [B, T] for each microbatch, '
        'from Updater.output'
      )
    none = [None] * len(batches)
    masks: dict = {}  # of each trajectory, in all its contexts
    for n, b in enumerate(batches):
      for owner, span in b.spans():
        masks.setdefault((n, owner), []).append(b.mask[span])
    whole = [np.concatenate(own) for own in masks.values()]
    divisor = np.float32(losses.denominator(whole, o.aggregation, o.horizon))
    acc = self._program('zeros', state.params)(state.params)
    given_all = batches, old or none, ref or none, told or none
    for given in zip(*given_all, strict=True):
      args = state.params, acc, self.put(*given), divisor, self.frozen
      shape = given[0].ids.shape
      acc = self._program('accumulate', *args, shape=shape)(*args)
    return acc

  def step(
    self,
    state: TrainState,
    batches: Sequence[Batch],
    old=None,
    ref=None,
    told=None,
  ) -> tuple[TrainState, dict[str, float]]:
    """One optimizer update from the microbatches of a minibatch.

    `state` is donated: use the returned one. old and ref are lists of [B, T],
    one for each microbatch, where the objective needs them; told of `Told`.

    Returns:
      the new state and metrics: means over loss tokens (`losses.summarise`),
      grad_norm before clipping, update_norm, and `finite`: 0.0 if the loss or
      the gradient is not finite, in which case the state is what it was and
      the caller saves the batch and stops.
    """
    grads, sums = self.grads(state, batches, old, ref, told)
    args = state, grads, sums['loss']
    state, norms = self._program('apply', *args)(*args)
    sums, norms = jax.device_get((sums, norms))
    out = losses.summarise(sums) | {k: float(v) for k, v in norms.items()}
    out['microbatches'] = float(len(batches))
    out |= batching.shares(batches)
    return state, out
