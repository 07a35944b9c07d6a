"""The optimizer: an optax chain by config, with schedules and freezing.

Order: clip by the global norm of the trained gradients, Adam, decoupled
weight decay (AdamW, arXiv 1711.05101) of matrices only, learning rate.
"""

import math
import re

import jax
import jax.numpy as jnp
import optax

from searchrl_jax.run import lookup


def schedule(config, total_updates: int):
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
    f'config.optim.warmup={warmup} updates must be fewer than the '
    f'{total_updates} of the run',
  )
  span = max(total_updates - warmup, 1)

  def rate(step):
    step = jnp.asarray(step, jnp.float32)
    rise = jnp.minimum((step + 1.0) / max(warmup, 1), 1.0)
    done = jnp.clip((step - warmup) / span, 0.0, 1.0)
    if kind == 'constant':
      fall = 1.0
    elif kind == 'linear':
      fall = 1.0 - done
    else:
      fall = 0.5 * (1.0 + jnp.cos(math.pi * done))
    return lr * rise * fall

  return rate


def updates(config) -> int:
  """The policy's optimizer updates in the whole training run of a config."""
  a = config.algorithm
  steps = config.train.steps - config.critic.pretrain_steps
  return steps * a.minibatches * a.epochs


def critic_updates(config) -> int:
  """The critic's updates, of the steps before the policy's too."""
  a = config.algorithm
  return config.train.steps * a.minibatches * a.epochs


def paths(params) -> list[str]:
  """'layers/q', ...: the path of every leaf, in tree order."""
  flat, _ = jax.tree_util.tree_flatten_with_path(params)
  return [
    '/'.join(str(getattr(k, 'key', getattr(k, 'name', k))) for k in path)
    for path, _ in flat
  ]


def _label(params, fn):
  leaves, tree = jax.tree.flatten(params)
  return jax.tree.unflatten(tree, [fn(p) for p in paths(params)])


def decayed(params):
  """True for matrices, False for norms and biases, in the params' tree.

  By name: layers are stacked, so a norm has two axes and a bias three.
  """
  return _label(params, lambda p: not p.endswith(('norm', 'bias')))


def trained(params, freeze: str):
  """False for what the regex `freeze` finds (re.search on the path).

  Raises:
    ValueError: not a regex, it matches nothing, or it matches everything.
  """
  names = paths(params)
  if not freeze:
    return _label(params, lambda p: True)
  try:
    pattern = re.compile(freeze)
  except re.error as e:
    raise ValueError(f'config.optim.freeze={freeze!r} is no regex: {e}') from e
  frozen = [p for p in names if pattern.search(p)]
  if not frozen:
    raise ValueError(
      f'config.optim.freeze={freeze!r} matches no parameter; there are: '
      f'{", ".join(names)}'
    )
  if len(frozen) == len(names):
    raise ValueError(
      f'config.optim.freeze={freeze!r} matches every parameter: nothing is '
      'left to train'
    )
  return _label(params, lambda p: not pattern.search(p))


def make(config, total_updates: int, params) -> optax.GradientTransformation:
  """The chain for these parameters (arrays or shapes; only paths are read).

  config: lr, schedule, warmup, b1, b2, eps, weight_decay, clip_norm (0 = no
  clipping), freeze ('' = nothing). Frozen parameters have no Adam state and
  do not count in the clipped norm.
  """
  steps = []
  if config.clip_norm > 0:
    steps.append(optax.clip_by_global_norm(config.clip_norm))
  steps.append(optax.scale_by_adam(config.b1, config.b2, config.eps))
  if config.weight_decay:
    steps.append(optax.add_decayed_weights(config.weight_decay, decayed))
  steps.append(optax.scale_by_learning_rate(schedule(config, total_updates)))
  tx = optax.chain(*steps)
  if not config.freeze:
    return tx
  labels = jax.tree.map(
    lambda t: 'trained' if t else 'frozen', trained(params, config.freeze)
  )
  return optax.multi_transform(
    {'trained': tx, 'frozen': optax.set_to_zero()}, labels
  )
