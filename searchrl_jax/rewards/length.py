"""Rewards for the length of the policy's text."""

from collections.abc import Sequence

from searchrl_jax.rewards.core import RewardContext, per_trajectory, require
from searchrl_jax.types import ACTORS, Group, Rewards


async def overlong(
  groups: Sequence[Group], context: RewardContext, *, limit: int, cache: int
) -> Rewards:
  """DAPO's soft penalty for long answers, arXiv 2503.14476, equation 13.

      n tokens                      reward
      n <= limit - cache            0
      up to limit                   (limit - cache - n) / cache
      more                          -1

  n counts the policy's tokens in all turns, without observations. In the paper
  n is the length of one answer.

  Args:
    groups: trajectories.
    context: not used.
    limit: in tokens; L_max in the paper.
    cache: number of tokens over which the penalty grows; L_cache in the paper.

  Raises:
    RewardError: cache is not in 1..limit.
  """
  del context
  what = f'overlong: cache={cache} must lie in 1..limit={limit} (tokens)'
  require(0 < cache <= limit, what)

  def reward(trajectory):
    n = sum(len(s.ids) for s in trajectory.segments if s.author in ACTORS)
    return -min(max(n - (limit - cache), 0) / cache, 1.0)

  return per_trajectory(groups, reward)
