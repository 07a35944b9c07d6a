"""Efficiency: own searches against those of correct ones of the group.

OTC, IKEA and their kin earn more for an answer that took fewer searches. They
differ in one function of an `Attempt`, which a method gives to `compared`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from searchrl_jax.rewards import ablations, scores
from searchrl_jax.rewards.core import RewardContext, per_trajectory
from searchrl_jax.types import SEARCH, Group, Question, Rewards, Trajectory


class Attempt(NamedTuple):
  """What a trajectory is compared by.

  right: whether its answer is an exact match.
  searches: the number of its searches.
  fewest: that of a right trajectory of its group, the smallest; None if none
    is right.
  needed: that which the question needs, if the credit is 'oracle', else None.
  """

  right: bool
  searches: int
  fewest: int | None
  needed: int | None


def executed(trajectory: Trajectory) -> int:
  """The number of queries that were answered; a search may hold several.

  Calls of other tools are no searches.
  """
  return len(trajectory.calls(SEARCH))


def needed(question: Question) -> int:
  """The number of its facts that the policy has not read in its warm start."""
  return sum(not recalled for recalled in question.meta['recalled'])


def compared(
  groups: Sequence[Group],
  context: RewardContext,
  score: Callable[[Trajectory, Attempt], Mapping[str, float]],
  *,
  credit: str,
  count: Callable[[Trajectory], int] = executed,
) -> Rewards:
  """Applies a function to each trajectory that did not fail.

  Args:
    groups: trajectories.
    context: its env reads answers.
    score: returns {'value': the reward, part: value, ...}.
    credit: one of ablations.CREDITS. 'shuffled': `searches` is that of a
      trajectory of the group that is right, or wrong, too.
    count: the number of searches of a trajectory.
  """
  attempts = {}
  for group in groups:
    alive = [t for t in group if not t.failed]
    pairs = [(context.env.answer(t), t.question.answers) for t in alive]
    right = [scores.exact_match(*pair) > 0 for pair in pairs]
    counts = [count(t) for t in alive]
    fewest = min((n for n, ok in zip(counts, right) if ok), default=None)
    if credit == 'shuffled':
      counts = [counts[i] for i in ablations.drawn(alive, right, context.step)]
    for t, ok, n in zip(alive, right, counts):
      least = needed(t.question) if credit == 'oracle' else None
      attempts[id(t)] = Attempt(ok, n, fewest, least)
  return per_trajectory(groups, lambda t: score(t, attempts[id(t)]))


def needs(fields: Mapping[str, Any]) -> tuple[str, ...]:
  """What rewards of `compared` with a field `credit` need of a question."""
  oracle = ('meta.recalled',) if fields['credit'] == 'oracle' else ()
  return 'answers', *oracle
