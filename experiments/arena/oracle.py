"""Exact credit for turns: what the assay of the arena must be able to detect.

A = A_outcome + w z. A_outcome is GRPO's. z says whether a turn found a needed
passage that was not found before, compared among the turns of a question that
start from the same passages found: a search that finds the next one is above
them, one that finds nothing, or an answer before all is found, below. Where
nothing is left to find, z is 0. Facts that the policy has read need no passage.
"""

import numpy as np

from searchrl_jax.learn.advantages import normalised
from searchrl_jax.text.structure import Structure

# Changes of GRPO's config.
ARMS = {
  name: {
    'algorithm.advantage': 'experiments.arena.oracle.credited',
    'algorithm.advantage_kw': dict(
      weight=1.0, eps=1e-6, ddof=1, shuffle=shuffle
    ),
  }
  for name, shuffle in (('oracle', False), ('shuffled', True))
}


def credited(
  values,
  valid,
  group_ids,
  structure: Structure,
  *,
  weight: float,
  eps: float,
  ddof: int,
  shuffle: bool,
):
  """GRPO's advantage with exact credit; see the module.

  Args:
    values, valid, group_ids, structure: see `searchrl_jax.learn.advantages`.
    weight: w.
    eps, ddof: of both normalisations.
    shuffle: a trajectory's z go to its turns at random.
  """
  owner, how = structure.owner, dict(eps=eps, ddof=ddof)
  valid, group = np.asarray(valid, bool), np.asarray(group_ids)
  outcome = normalised(values, valid, group, **how)[owner]
  before, new = found(structure)
  cells = [group[owner], before]
  z = normalised(new, valid[owner], cells, **how)
  z = structure.shuffled(z) if shuffle else z
  return structure.over_tokens(outcome + weight * z)


def found(structure: Structure) -> tuple[np.ndarray, np.ndarray]:
  """Of each turn: the needed passages found before, and how many it found.

  Returns:
    int [N], equal for equal sets of them, and float64 [N].
  """
  before, new = [], []
  for i, trajectory in enumerate(structure.trajectories):
    question = trajectory.question
    recalled = question.meta.get('recalled', [False] * len(question.supporting))
    passages = zip(question.supporting, recalled, strict=True)
    needed = {passage for passage, read in passages if not read}
    seen: frozenset[str] = frozenset()
    for n in structure.number[structure.owner == i]:
      here = {
        p for s in structure.spans[i] if s.turn == n for p in s.passages
      } & needed
      before.append(seen)
      new.append(float(len(here - seen)))
      seen |= here
  labels = {state: i for i, state in enumerate(dict.fromkeys(before))}
  return np.array([labels[state] for state in before], int), np.array(new)


credited.needs = ('supporting',)  # type: ignore[attr-defined]
credited.observes = 'source'  # type: ignore[attr-defined]
credited.needs_group = credited.divides_by_spread = True  # type: ignore
