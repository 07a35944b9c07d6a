"""The update: gradient accumulation, one optimizer step.

A minibatch is a list of microbatches of a few shapes (`batching`); each shape
compiles once. Their gradients are sums with one common denominator (`losses`),
so the result does not depend on how a minibatch is split.

Axes: B sequences, T tokens, S shards (mesh devices along data and fsdp), C loss
tokens of a shard.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from searchrl_jax.learn import batching, losses, optim
from searchrl_jax.learn.logps import token_logps
from searchrl_jax.learn.objectives import Objective
from searchrl_jax.models import critic, decoder
from searchrl_jax.run import sharding
from searchrl_jax.types import Batch


class TrainState(NamedTuple):
  params: Any
  opt_state: Any
  step: jax.Array  # int32 scalar, optimizer updates done


def shards(mesh) -> int:
  """Devices along which the rows of a microbatch lie."""
  return 1 if mesh is None else mesh.shape['data'] * mesh.shape['fsdp']


def copy(params):
  """Copies the parameters, since a donated buffer cannot be read again."""
  return jax.tree.map(lambda x: jnp.array(x, copy=True), params)


def compaction(mask: np.ndarray, shards: int, room: int):
  """Where the loss tokens are: index int32 [S, C], inverse int32 [S, P].

  mask: bool [B, T]; P = B T / S. index lists the loss tokens of each shard in
  order and then P; inverse says which entry a position has, C for none.

  Raises:
    ValueError: a shard has more than room = C loss tokens.
  """
  mask = mask.reshape(shards, -1)
  index = np.full((shards, room), mask.shape[1], np.int32)
  inverse = np.full(mask.shape, room, np.int32)
  for s in range(shards):
    at = np.flatnonzero(mask[s])
    if len(at) > room:
      raise ValueError(
        f'{len(at)} loss tokens in shard {s} of a microbatch; '
        f'config.batch.loss_fraction leaves room for {room}: make batches '
        'with batching.make for this config and mesh'
      )
    index[s, : len(at)] = at
    inverse[s, at] = np.arange(len(at))
  return index, inverse


class Updater:
  """The compiled programs of one training run.

  Args:
    cfg: the decoder's flags.
    batch_config: config.batch.
    temperature: at which the policy was sampled (1.0 for supervised).
    tx: the optimizer (`optim.make`).
    objective: `objectives.policy(config)`, `supervised()` or `value(config)`;
      the last is of a critic's parameters.
    mesh: None for the default device alone.
  """

  def __init__(
    self,
    cfg: decoder.DecoderConfig,
    batch_config,
    *,
    temperature: float,
    tx: optax.GradientTransformation,
    objective: Objective,
    mesh=None,
  ):
    if temperature <= 0:
      raise ValueError(
        f'temperature={temperature}: scoring needs a positive one'
      )
    self.cfg, self.mesh, self.tx = cfg, mesh, tx
    self.batch_config, self.objective = batch_config, objective
    self.temperature = float(temperature)
    self.shards = shards(mesh)
    self._programs: dict[tuple[str, int], Any] = {}
    self._sums = None  # names and shapes of the metrics

  @property
  def compilations(self) -> int:
    """Programs compiled so far; constant after `warmup`."""
    return len(self._programs)

  # ---- state

  def init(self, params) -> TrainState:
    """A fresh optimizer around `params`, laid out on the mesh.

    The state owns the arrays, since `step` donates them: another user of the
    same parameters (a reference policy, an engine) needs `copy(params)`.
    """
    step = jnp.zeros((), jnp.int32)
    if self.mesh is None:
      params = jax.tree.map(jnp.asarray, params)
      return TrainState(params, jax.jit(self.tx.init)(params), step)
    params = jax.device_put(params, self._param_shardings())
    shards = self.shardings(params)
    opt_state = jax.jit(self.tx.init, out_shardings=shards.opt_state)(params)
    return TrainState(params, opt_state, jax.device_put(step, shards.step))

  def abstract(self, shapes) -> TrainState:
    """The shapes of `init` for parameters of these shapes (`build.shapes`).

    The target for restoring a checkpoint; nothing is allocated.
    """
    state = TrainState(
      shapes,
      jax.eval_shape(self.tx.init, shapes),
      jax.ShapeDtypeStruct((), jnp.int32),
    )
    layout = self.shardings(shapes)
    if layout is None:
      return state
    return jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      state,
      layout,
    )

  def _param_shardings(self):
    model = critic if self.objective.critic else decoder
    return model.param_shardings(self.cfg, self.mesh)

  def shardings(self, params) -> TrainState | None:
    """The layout of a state with these params (arrays or shapes).

    Adam's moments lie as their parameters do, scalars are replicated. None
    without a mesh.
    """
    if self.mesh is None:
      return None
    whole = sharding.replicated(self.mesh)
    layout = self._param_shardings()
    known = dict(zip(optim.paths(params), jax.tree.leaves(layout)))
    shapes = jax.eval_shape(self.tx.init, params)
    leaves, tree = jax.tree.flatten(shapes)
    out = []
    for path, leaf in zip(optim.paths(shapes), leaves):
      owners = [p for p in known if path.endswith('/' + p)]
      # 'x/head' ends with 'head' alone, but 'layers/q' also with 'q'.
      owner = max(owners, key=len, default=None)
      out.append(known[owner] if owner and leaf.ndim else whole)
    return TrainState(layout, jax.tree.unflatten(tree, out), whole)

  # ---- microbatches

  def put(self, batch: Batch, old=None, ref=None) -> dict:
    """Arrays of a microbatch on the device(s), loss tokens indexed.

    Raises:
      ValueError: more loss tokens than the bucket's capacity (a batch not
        made by `batching` for this config and mesh).
    """
    room = batching.capacity(self.batch_config, batch.ids.shape[1], self.shards)
    index, inverse = compaction(batch.mask, self.shards, room)
    zeros = np.zeros(batch.ids.shape, np.float32)
    arrays = {
      'ids': batch.ids,
      'lengths': batch.lengths,
      'mask': batch.mask,
      'index': index,
      'inverse': inverse,
      'advantages': batch.advantages,
      'behaviour_logps': batch.behaviour_logps,
      'old': zeros if old is None else old,
      'ref': zeros if ref is None else ref,
    }
    if self.mesh is None:
      return {k: jnp.asarray(v) for k, v in arrays.items()}
    return {
      k: jax.device_put(
        v,
        sharding.named(self.mesh, ('batch',) + (None,) * (v.ndim - 1), v.shape),
      )
      for k, v in arrays.items()
    }

  # ---- programs

  def _logps(self, params, arrays, entropy: bool):
    if self.objective.critic:
      return critic.token_values(params, self.cfg, arrays, self.mesh), None
    return token_logps(
      params,
      self.cfg,
      arrays,
      temperature=self.temperature,
      head_chunk=self.batch_config.head_chunk,
      mesh=self.mesh,
      entropy=entropy,
      entropy_grad=self.objective.entropy_grad,
    )

  def loss(self, params, arrays: dict, divisor):
    """Loss of one microbatch (its numerator / divisor) and metric sums."""
    logps, entropy = self._logps(params, arrays, True)
    mask = arrays['mask']
    per_token, sums = self.objective.fn(logps, entropy, arrays)
    loss = losses.aggregate(per_token, mask, self.objective.aggregation)
    loss = loss / divisor
    sums = dict(sums) | {
      'loss': loss,
      'tokens': jnp.sum(mask, dtype=jnp.float32),
      'sequences': jnp.sum(jnp.any(mask, -1), dtype=jnp.float32),
    }
    return loss, jax.lax.stop_gradient(sums)

  def _accumulate(self, params, acc, arrays, divisor):
    grads, sums = acc
    fresh, new = jax.grad(self.loss, has_aux=True)(params, arrays, divisor)
    return jax.tree.map(jnp.add, grads, fresh), losses.add(sums, new)

  def _zeros(self, params):
    return jax.tree.map(jnp.zeros_like, params), {
      k: jnp.zeros(v.shape, v.dtype) for k, v in self._sums.items()
    }

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

  def _program(self, key, fn, args, donate=(), out=None):
    """The program `key`, compiled for the shapes of args the first time."""
    if key not in self._programs:
      out = out() if out is not None and self.mesh is not None else None
      jitted = jax.jit(fn, donate_argnums=donate, out_shardings=out)
      self._programs[key] = jitted.lower(*args).compile()
    return self._programs[key]

  def _acc_shardings(self):
    whole = sharding.replicated(self.mesh)
    return self._param_shardings(), {k: whole for k in self._sums}

  def _zeros_program(self, params, arrays, divisor):
    if self._sums is None:
      _, self._sums = jax.eval_shape(self.loss, params, arrays, divisor)
    return self._program(
      ('zeros', 0), self._zeros, (params,), out=self._acc_shardings
    )

  def _accumulate_program(self, params, acc, arrays, divisor):
    args = params, acc, arrays, divisor
    return self._program(
      ('accumulate', arrays['ids'].shape[1]),
      self._accumulate,
      args,
      donate=(1,),
      out=self._acc_shardings,
    )

  def _apply_program(self, state, grads, loss):
    def out():
      return self.shardings(state.params), sharding.replicated(self.mesh)

    return self._program(
      ('apply', 0), self._apply, (state, grads, loss), donate=(0,), out=out
    )

  def _score_program(self, params, arrays):
    def score(params, arrays):
      return self._logps(params, arrays, False)[0]

    return self._program(
      ('score', arrays['ids'].shape[1]),
      score,
      (params, arrays),
      out=lambda: arrays['mask'].sharding,
    )

  def warmup(self, state: TrainState, *, score: bool) -> dict[str, int]:
    """Compiles every program for every bucket; only `zeros` is run.

    Args:
      score: whether `score` will be called (old or reference log-probs).

    Returns:
      bytes on one device that each program needs beyond its arguments, by
      'name/length' (0 if the backend does not report it).
    """
    acc = None
    for length in self.batch_config.lengths:
      rows = batching.rows_of(self.batch_config, length, self.shards)
      arrays = self.put(batching.empty(rows, length))
      if score:
        self._score_program(state.params, arrays)
      divisor = np.float32(1)
      if acc is None:
        zeros = self._zeros_program(state.params, arrays, divisor)
        acc = zeros(state.params)
      self._accumulate_program(state.params, acc, arrays, divisor)
    self._apply_program(state, acc[0], acc[1]['loss'])
    out = {}
    for (name, length), program in self._programs.items():
      memory = program.memory_analysis()
      out[f'{name}/{length}'] = getattr(memory, 'temp_size_in_bytes', 0)
    return out

  # ---- what a loop calls

  def score(self, params, batch: Batch) -> np.ndarray:
    """Log-probs [B, T] of the loss tokens under `params`, 0 elsewhere.

    For log-probs before a step's first update, a reference policy, or a
    check against the engine's. A critic's values.
    """
    arrays = self.put(batch)
    return np.asarray(self._score_program(params, arrays)(params, arrays))

  def scores(self, params, minibatches) -> list[list[np.ndarray]]:
    """`score` of every microbatch of some minibatches."""
    return [[self.score(params, b) for b in mini] for mini in minibatches]

  def grads(
    self, state: TrainState, batches: Sequence[Batch], old=None, ref=None
  ):
    """Gradients of a minibatch, accumulated over its microbatches.

    Returns:
      (gradients, metric sums): divided already by the denominator of the
      whole minibatch, metrics not yet means (`losses.summarise`).

    Raises:
      ValueError: no microbatch, or log-probs that the objective needs are
        not given.
    """
    if not batches:
      raise ValueError(
        'an update needs at least one microbatch; skip the update when every '
        'trajectory was left out'
      )
    o = self.objective
    for name, needed, given in (
      ('old', o.needs_old, old),
      ('ref', o.needs_ref, ref),
    ):
      if needed and given is None:
        raise ValueError(
          f'this objective needs {name}: one array [B, T] for each '
          'microbatch, from Updater.score'
        )
    none = [None] * len(batches)
    divisor = np.float32(
      losses.denominator([b.mask for b in batches], o.aggregation, o.horizon)
    )
    params, acc = state.params, None
    for batch, before, reference in zip(
      batches, old or none, ref or none, strict=True
    ):
      arrays = self.put(batch, before, reference)
      if acc is None:
        acc = self._zeros_program(params, arrays, divisor)(params)
      program = self._accumulate_program(params, acc, arrays, divisor)
      acc = program(params, acc, arrays, divisor)
    return acc

  def step(
    self, state: TrainState, batches: Sequence[Batch], old=None, ref=None
  ) -> tuple[TrainState, dict[str, float]]:
    """One optimizer update from the microbatches of a minibatch.

    `state` is donated: use the returned one. old and ref are lists of [B, T],
    one for each microbatch, where the objective needs them.

    Returns:
      the new state and metrics: means over loss tokens (`losses.summarise`),
      grad_norm before clipping, update_norm, and `finite`: 0.0 if the loss or
      the gradient is not finite, in which case the state is what it was and
      the caller saves the batch and stops.
    """
    grads, sums = self.grads(state, batches, old, ref)
    program = self._apply_program(state, grads, sums['loss'])
    state, norms = program(state, grads, sums['loss'])
    sums, norms = jax.device_get((sums, norms))
    out = losses.summarise(sums) | {k: float(v) for k, v in norms.items()}
    out['microbatches'] = float(len(batches))
    out['padding'] = 1.0 - sum(int(b.lengths.sum()) for b in batches) / sum(
      b.ids.size for b in batches
    )
    return state, out
