"""GiGPO: GRPO over trajectories, plus GRPO over turns that start alike.

arXiv 2505.10978; for search, SearchAgentReview (2605.27881). A = A_episode +
w A_step. A_episode is GRPO's. A_step compares what turns earned from then on,
discounted by turn, among the turns of a question with the same anchor: what the
policy has just read. A turn without another like it has A_step = 0. Arguments:

  version  sound: each trajectory counts once in the statistics of its group
           as_released: once for each of its turns, so that long ones weigh more
  weight   w, of A_step

Departs from both: the anchor is the set of passages that the last observation
shows (`structure.labels('anchor')`), where the release clusters texts by
similarity of at least 0.9, and all last turns without an observation as one.
The outcome is the base recipe's; there is no KL, and both clip bounds are 0.2
(they: 0.2 and 0.28).
"""

import numpy as np

from configs import algorithms
from configs.methods import core
from searchrl_jax.learn.advantages import normalised, returns

VERSIONS = {'sound': False, 'as_released': True}


def get_config(arg=None):
  return core.on_base(arg, change, version='sound', weight=1.0)


def change(c, a):
  c.name = 'gigpo'
  kw = dict(
    weight=a.weight,
    gamma=0.9,
    eps=1e-6,
    ddof=1,
    by_turn=core.chosen('version', a.version, VERSIONS),
    shuffle=False,
  )
  core.set_algorithm(
    c,
    algorithms.GRPO
    | dict(
      advantage='configs.methods.gigpo.two_levels',
      advantage_kw=kw,
      aggregation='token',
    ),
  )


def two_levels(
  values,
  valid,
  group_ids,
  mask,
  structure,
  *,
  weight: float,
  gamma: float,
  eps: float,
  ddof: int,
  by_turn: bool,
  shuffle: bool,
):
  """A_episode + weight A_step, on each loss token of a turn.

  Args:
    values, valid, group_ids, mask, structure: see
      `searchrl_jax.learn.advantages`; values are those of tokens.
    weight: of A_step.
    gamma: discount for each turn.
    eps, ddof: of both normalisations.
    by_turn: a trajectory counts once for each of its turns in A_episode.
    shuffle: control: a trajectory's A_step go to its turns at random.
  """
  del mask
  owner, total = structure.owner, returns(values)
  valid, group = np.asarray(valid, bool), np.asarray(group_ids)
  how = dict(eps=eps, ddof=ddof)
  if by_turn:
    episode = normalised(total[owner], valid[owner], group[owner], **how)
  else:
    episode = normalised(total, valid, group, **how)[owner]
  earned = structure.discounted(structure.totals(values), gamma)
  cells = [group[owner], structure.labels('anchor')]
  step = normalised(earned, valid[owner], cells, **how)
  step = structure.shuffled(step) if shuffle else step
  return structure.over_tokens(episode + weight * step)


two_levels.needs_group = two_levels.divides_by_spread = True
two_levels.observes = 'source'
