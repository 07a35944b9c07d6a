"""Other labels in the place of the majority's: what the vote is held against.

Votes, trained samples and parts are those of `rewards.vote.majority`, so that
an arm differs in its labels alone.
"""

from collections.abc import Sequence
import zlib

import numpy as np

from searchrl_jax.rewards import equivalence, vote
from searchrl_jax.rewards.core import RewardContext
from searchrl_jax.types import Group, Question, Rewards


async def golds(
  groups: Sequence[Group],
  context: RewardContext,
  *,
  votes: int,
  train: int,
  match: str,
  max_abstained: float,
) -> Rewards:
  """The golden answer: the ceiling. Where no vote has it, there is no label.

  Args: see `vote.majority`.
  """

  def choose(keys, question, step):
    return next(
      (
        key for key in keys if equivalence.correct(key, question.answers, match)
      ),
      None,
    )

  del max_abstained
  return vote.labelled(groups, context, choose, votes, train, match)


async def random(
  groups: Sequence[Group],
  context: RewardContext,
  *,
  votes: int,
  train: int,
  match: str,
  max_abstained: float,
) -> Rewards:
  """Any of the answers that the votes name, each as likely: what is learnt
  from groups, rewards and their spread without knowing which answer is right.

  Args: see `vote.majority`. The draw depends on question and step alone.
  """

  def choose(keys, question, step):
    return drawn(sorted(set(keys) - {None}), question, step)

  del max_abstained
  return vote.labelled(groups, context, choose, votes, train, match)


async def random_vote(
  groups: Sequence[Group],
  context: RewardContext,
  *,
  votes: int,
  train: int,
  match: str,
  max_abstained: float,
) -> Rewards:
  """The answer of any of the votes, so frequent answers more often: a vote of
  one, whose mean over draws still points to the majority.

  Args: see `random`.
  """

  def choose(keys, question, step):
    return drawn([key for key in keys if key], question, step)

  del max_abstained
  return vote.labelled(groups, context, choose, votes, train, match)


def drawn(keys: Sequence[str], question: Question, step: int) -> str | None:
  seed = zlib.crc32(repr((question.id, step)).encode())
  rng = np.random.default_rng(seed)
  return keys[rng.integers(len(keys))] if keys else None


for control in golds, random, random_vote:
  control.check, control.check_step = vote.check, vote.check_step
golds.needs = ('answers',)
