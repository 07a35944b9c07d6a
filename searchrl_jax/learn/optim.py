"""The optimizer: an optax chain by config, with schedules.

Order: clip by the global norm of the gradients, Adam, decoupled
weight decay (AdamW, arXiv 1711.05101) of matrices only, learning rate.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

from searchrl_jax import lookup
from searchrl_jax.devices import sharding


def schedule(config, total_updates: int, where: str = 'config.optim'):
  """step -> learning rate of that update; step counts from 0.

  Warm-up rises in equal steps and reaches lr at update `warmup - 1` (so the
  first update is not lost at rate 0). Then constant; or linear, or half a
  cosine, towards 0 at `total_updates`.

  Raises:
    ValueError: a warm-up as long as the run.
  """
  lr, warmup, kind = config.lr, config.warmup, config.schedule
  lookup.require(
    kind == 'constant' or warmup < total_updates,
    f'{where}.warmup={warmup} updates must be fewer than the '
    f'{total_updates} of the run',
  )
  span = max(total_updates - warmup, 1)

  def rate(step):
    step = jnp.asarray(step, jnp.float32)
    rise = jnp.minimum((step + 1.0) / max(warmup, 1), 1.0)
    done = jnp.clip((step - warmup) / span, 0.0, 1.0)
    cosine = 0.5 * (1.0 + jnp.cos(math.pi * done))
    fall = {'constant': 1.0, 'linear': 1.0 - done, 'cosine': cosine}
    return lr * rise * fall[kind]

  return rate


def step_updates(config) -> int:
  """The optimizer updates of a step; fewer, if minibatches have no group."""
  return config.algorithm.minibatches * config.algorithm.epochs


def updates(config) -> int:
  """The policy's optimizer updates in the whole training run of a config."""
  steps = config.train.steps - config.critic.pretrain_steps
  return steps * step_updates(config)


def critic_updates(config) -> int:
  """The critic's updates, of the steps before the policy's too."""
  return config.train.steps * step_updates(config)


def paths(params) -> list[str]:
  """'layers/q', ...: the path of every leaf, in tree order."""
  return [name(path) for path, _ in jax.tree.leaves_with_path(params)]


def name(path) -> str:
  """'layers/q', from a path of JAX."""
  return jax.tree_util.keystr(path, simple=True, separator='/')


def decayed(params):
  """True for matrices, False for norms, biases and decays, in params' tree.

  By name: layers are stacked, so a norm has two axes and a bias three.
  """
  return jax.tree.map_with_path(
    lambda path, _: not name(path).endswith(('norm', 'bias', 'log')), params
  )


def _is_schedule(state) -> bool:
  return isinstance(state, optax.ScaleByScheduleState)


def scheduled(opt_state) -> int:
  """The update that the schedule has reached."""
  leaves = jax.tree.leaves(opt_state, is_leaf=_is_schedule)
  return int(next(filter(_is_schedule, leaves)).count)


def move(config, opt_state, update: int):
  """The state of `make`, its schedule at this update of the run.

  Updates that did not take place count for the schedule, not for Adam, nor for
  the warm-up. A constant rate has nothing else.
  """
  if config.schedule == 'constant':
    return opt_state
  done = scheduled(opt_state)
  if done < config.warmup or done == update:
    return opt_state

  def moved(x):
    if not _is_schedule(x):
      return x
    count = np.asarray(update, x.count.dtype)
    return x._replace(count=sharding.put(count, x.count.sharding))

  return jax.tree.map(moved, opt_state, is_leaf=_is_schedule)


def make(config, total_updates: int) -> optax.GradientTransformation:
  """The chain.

  config: lr, schedule, warmup, b1, b2, eps, weight_decay, clip_norm (0 = no
  clipping).
  """
  steps = []
  if config.clip_norm > 0:
    steps.append(optax.clip_by_global_norm(config.clip_norm))
  steps.append(optax.scale_by_adam(config.b1, config.b2, config.eps))
  if config.weight_decay:
    steps.append(optax.add_decayed_weights(config.weight_decay, decayed))
  steps.append(optax.scale_by_learning_rate(schedule(config, total_updates)))
  return optax.chain(*steps)
