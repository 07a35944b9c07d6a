"""What a program says that its trajectory earned (rollout/sessions.py)."""

from collections.abc import Sequence

import numpy as np

from searchrl_jax.rewards.core import RewardContext, flat, require
from searchrl_jax.types import Group, Rewards


async def returned(groups: Sequence[Group], context: RewardContext) -> Rewards:
  """What it returned or sent; a trajectory without one is not valid."""
  del context
  found = [t.meta.get('returned') for t in flat(groups)]
  valid = np.array([x is not None for x in found], bool)
  value = np.array([0.0 if x is None else x for x in found], np.float32)
  return Rewards(value, valid)


def _check(config, fields) -> None:
  """Raises ValueError where nothing returns a reward."""
  del fields
  sampler = config.rollout.sampler
  if sampler != 'sessions':
    what = f'config.rollout.sampler={sampler!r} plays no program'
    raise ValueError(f"{what}: use 'sessions'")


def _check_step(groups, reward: Rewards, context, fields) -> None:
  """Raises RewardError if most of a step has no reward."""
  del context, fields
  played = [not t.failed for t in flat(groups)]
  silent = int(sum(np.array(played) & ~reward.valid))
  require(
    2 * silent <= sum(played),
    f'{silent} of {sum(played)} trajectories have no reward: return a number '
    'from config.rollout.program, or send it to /v1/reward',
  )


returned.check, returned.check_step = _check, _check_step  # type: ignore[attr-defined]
