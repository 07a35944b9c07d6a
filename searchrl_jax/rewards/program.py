"""What a program says that its trajectory earned (rollout/sessions.py)."""

from collections.abc import Sequence

import numpy as np

from searchrl_jax.rewards.core import RewardContext, flat
from searchrl_jax.types import Group, Rewards


async def returned(groups: Sequence[Group], context: RewardContext) -> Rewards:
  """What it returned or sent; a trajectory without one is not valid."""
  del context
  found = [t.meta.get('returned') for t in flat(groups)]
  valid = np.array([x is not None for x in found], bool)
  value = np.array([0.0 if x is None else x for x in found], np.float32)
  return Rewards(value, valid)


def _check(config, fields) -> None:
  del fields
  sampler = config.rollout.sampler
  if sampler != 'sessions':
    what = f'config.rollout.sampler={sampler!r} plays no program'
    raise ValueError(f"{what}: use 'sessions'")


returned.check = _check  # type: ignore[attr-defined]
