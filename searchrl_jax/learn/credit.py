"""From rewards to advantages: each function is handed the arrays it takes.

Functions of whole trajectories (`advantages.grpo`, ...) see a return for each;
those of tokens (they take `mask`) see what each token earned. A KL in the
reward goes the same way: summed over a trajectory, or token by token.
"""

from collections.abc import Sequence
import inspect
from typing import NamedTuple

import numpy as np

from searchrl_jax.learn import advantages, batching, losses
from searchrl_jax.learn.batching import StepBatch
from searchrl_jax.rewards import core as rewards

ARRAYS = ('greedy', 'mask', 'critic')


def needs(name: str) -> tuple[str, ...]:
  """Which of ARRAYS the advantage function of this name takes, in order."""
  parameters = inspect.signature(getattr(advantages, name)).parameters
  return tuple(p for p in parameters if p in ARRAYS)


class Credit(NamedTuple):
  advantages: Sequence  # [B], or B arrays [n]
  targets: Sequence | None  # B arrays [n] for the critic, if there is one
  metrics: dict[str, float]


def assign(config, batch: StepBatch, *, old, ref, values, greedy) -> Credit:
  """The advantages of a step's trajectories, and what its critic learns.

  Args:
    config: reads config.algorithm.
    batch: B trajectories in all.
    old, ref, values: log-probs of the trainer and of the reference, and the
      critic's values: an array [B, T] for each microbatch, nested as the
      minibatches are; None where they are not needed.
    greedy: returns of greedy answers, one for each group, or None.
  """
  a = config.algorithm
  taken = needs(a.advantage)
  earned, masks, minibatches = batch.returns, batch.masks, batch.minibatches
  metrics, penalty = {}, None
  if a.kl == 'reward':
    penalty = batching.rows(
      minibatches,
      [
        [losses.kl(x, r, a.kl_estimator) for x, r in zip(xs, rs)]
        for xs, rs in zip(old, ref)
      ],
      masks,
    )
    tokens = sum(int(b.mask.sum()) for mini in minibatches for b in mini)
    metrics['kl_ref'] = sum(x.sum() for x in penalty) / max(tokens, 1)
  if 'mask' in taken:
    earned = rewards.at_tokens(batch.groups, batch.reward)
    if penalty is not None:
      earned = [x - a.kl_coef * kl for x, kl in zip(earned, penalty)]
  elif penalty is not None:
    earned = earned - a.kl_coef * np.array([kl.sum() for kl in penalty])
  arrays = {'mask': masks, 'greedy': greedy}
  if values is not None:
    arrays['critic'] = batching.rows(minibatches, values, masks)
  # What is left out of the batch is in no statistic: its KL is not known.
  found = getattr(advantages, a.advantage)(
    earned,
    batch.kept,
    batch.group_ids,
    *(arrays[name] for name in taken),
    **a.advantage_kw,
  )
  if 'critic' not in taken:
    return Credit(found, None, metrics)
  targets = advantages.lambda_returns(
    earned,
    batch.kept,
    masks,
    arrays['critic'],
    gamma=a.advantage_kw.gamma,
    lam=a.advantage_kw.lam,
  )
  return Credit(found, targets, metrics)
