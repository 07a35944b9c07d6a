"""Rewards for blocks of the policy that the template names."""

from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from searchrl_jax.rewards import scores
from searchrl_jax.rewards.core import RewardContext, per_trajectory
from searchrl_jax.run import lookup
from searchrl_jax.text import prompts
from searchrl_jax.types import Group, Rewards


async def states_answer(
  groups: Sequence[Group], context: RewardContext, *, block: str
) -> Rewards:
  """1 if a complete block of this name states a golden answer, else 0.

  Whole words of one block count. AutoRefine (arXiv 2505.11277) rewards
  refinements for a golden answer too; its code takes a substring of all of
  them, joined, so that "no" is found in "know".

  Args:
    groups: trajectories.
    context: its env reads the blocks.
    block: name of a block of the template, such as 'refine'.
  """

  def score(trajectory):
    golds = trajectory.question.answers
    found = (
      b.text
      for b in context.env.blocks(trajectory)
      if b.author == 'policy' and b.kind == block and b.complete
    )
    return float(any(scores.states(text, golds) for text in found))

  return per_trajectory(groups, score)


def _check(config: ConfigDict, fields: Mapping[str, Any]) -> None:
  kinds = prompts.load(config.env.template).kinds
  lookup.require(
    fields['block'] in kinds,
    f'block={fields["block"]!r} is none of the template config.env.template='
    f'{config.env.template!r}: {lookup.near(fields["block"], kinds)}',
  )


states_answer.needs = ('answers',)
states_answer.check = _check
