"""From rewards to advantages: each function is handed the arrays it takes.

Functions of whole trajectories (`advantages.grpo`, ...) see a return for each;
those of tokens (they take `mask`) see what each token earned. A KL in the
reward goes the same way: summed over a trajectory, or token by token.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from searchrl_jax import lookup
from searchrl_jax.learn import advantages, batching, losses
from searchrl_jax.learn.batching import StepBatch
from searchrl_jax.rewards import core as rewards
from searchrl_jax.text import structure

# What an advantage function may take besides values, valid and group_ids.
ARRAYS = ('greedy', 'mask', 'critic', 'structure', 'delta', 'gold')


def function(name: str) -> Callable:
  """The advantage function of this name or dotted path.

  Raises:
    ConfigError: there is none, or it takes what there is not.
  """
  where = f'config.algorithm.advantage={name!r}'
  with lookup.of(where):
    fn = lookup.function('searchrl_jax.learn', name, 'advantages')
  taken = lookup.inputs(fn)
  lookup.require(
    len(taken) >= 3 and set(taken[3:]) <= set(ARRAYS),
    f'{where} takes {taken}: it needs values, valid and group_ids, in order, '
    f'then any of {ARRAYS}; fields of config.algorithm.advantage_kw are '
    'keyword-only',
  )
  return fn


def needs(name: str) -> tuple[str, ...]:
  """Which of ARRAYS the advantage function of this name takes, in order."""
  return lookup.inputs(function(name))[3:]


class Credit(NamedTuple):
  advantages: Sequence  # [B], or B arrays [n]
  targets: Sequence | None  # B arrays [n] for the critic, if there is one
  metrics: dict[str, float]


def assign(
  config, batch: StepBatch, *, old, ref, values, greedy, told=None
) -> Credit:
  """The advantages of a step's trajectories, and what its critic learns.

  Args:
    config: reads config.algorithm.
    batch: B trajectories in all.
    old, ref, values: log-probs of the trainer and of the reference, and the
      critic's values: an array [B, T] for each microbatch, nested as the
      minibatches are; None where they are not needed.
    told: what a teacher has said (`teacher.Said`), or None.
    greedy: returns of greedy answers, one for each group, or None.
  """
  a = config.algorithm
  taken = needs(a.advantage)
  earned, masks, minibatches = batch.returns, batch.masks, batch.minibatches
  metrics, penalty = {}, None
  if a.kl == 'reward':
    kl = lambda x, r: losses.kl(x, r, a.kl_estimator)
    by_token = [[*map(kl, xs, rs)] for xs, rs in zip(old, ref)]
    penalty = batching.unpacked(minibatches, by_token, masks)
    tokens = sum(int(b.mask.sum()) for mini in minibatches for b in mini)
    metrics['kl_ref'] = sum(x.sum() for x in penalty) / max(tokens, 1)
  if 'mask' in taken:
    earned = rewards.at_tokens(batch.groups, batch.reward)
    if penalty is not None:
      earned = [x - a.kl_coef * kl for x, kl in zip(earned, penalty)]
  elif penalty is not None:
    earned = earned - a.kl_coef * np.array([kl.sum() for kl in penalty])
  arrays = {'mask': masks, 'greedy': greedy}
  if told is not None:
    arrays |= told.arrays
    metrics |= told.metrics
  if 'structure' in taken:
    arrays['structure'] = structure.of(batch.trajectories, masks)
  if values is not None:
    arrays['critic'] = batching.unpacked(minibatches, values, masks)
  # To an advantage, what is left out of the batch is not valid: its KL is not
  # known.
  valid, inputs = batch.kept, [arrays[name] for name in taken]
  kw = a.advantage_kw
  assign_to = function(a.advantage)
  assigned = assign_to(earned, valid, batch.group_ids, *inputs, **kw)
  carries = np.array([bool(np.any(x)) for x in assigned])
  if told is not None and told.compared is not None:
    carries |= told.compared
  carrying = np.unique(batch.group_ids[carries]).size
  metrics['gradient_groups'] = carrying / max(len(batch.groups), 1)
  targets = None
  if 'critic' in taken:
    of = getattr(assign_to, 'targets', advantages.lambda_returns)
    inputs = [arrays[name] for name in lookup.inputs(of)[2:]]
    fields = {name: kw[name] for name in lookup.fields(of)}
    targets = of(earned, valid, *inputs, **fields)
  return Credit(assigned, targets, metrics)
