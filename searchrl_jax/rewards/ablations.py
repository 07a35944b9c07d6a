"""Controls of rewards that compare trajectories: what their credit is worth.

own       what the trajectory did
shuffled  what one of its group with the same outcome did: the same credit in
          all, which says nothing about who earned it
oracle    what the question itself says (Question.meta of a generated world)
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
import hashlib
from typing import Any

from searchrl_jax import lookup
from searchrl_jax.types import Trajectory

CREDITS = ('own', 'shuffled', 'oracle')


def drawn(
  trajectories: Sequence[Trajectory], outcomes: Sequence[Hashable], step: int
) -> list[int]:
  """For each trajectory of a group, the index of one with the same outcome.

  The draw depends on (question id, sample, step) alone. It may be the
  trajectory itself: without it, two would always swap, and the credit would be
  reversed instead of absent.

  Args:
    trajectories: of one question.
    outcomes: of each, what must be equal.
    step: training step.
  """
  out = []
  for trajectory, outcome in zip(trajectories, outcomes, strict=True):
    same = [i for i, other in enumerate(outcomes) if other == outcome]
    name = repr((trajectory.id, step)).encode()
    number = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest())
    out.append(same[number % len(same)])
  return out


def shuffles(fields: Mapping[str, Any]) -> bool:
  """`compares_group` of a reward with a field `credit` (rewards/core.py)."""
  return fields['credit'] == 'shuffled'


def choose(fields: Mapping[str, Any], **allowed: Collection[str]) -> None:
  """Refuses the value of a field that is none of those allowed.

  Raises:
    ConfigError: names the field, its value and near ones.
  """
  for name, choices in allowed.items():
    hint = lookup.near(str(fields[name]), choices)
    lookup.require(fields[name] in choices, f'{name}={fields[name]!r}: {hint}')
