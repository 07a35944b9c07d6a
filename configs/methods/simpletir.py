"""SimpleTIR: GRPO without the trajectories that have a void turn.

arXiv 2509.02479; ltzheng/SimpleTIR. A turn without an action (neither a search
nor an answer) is void, also one that a limit of tokens cuts. A trajectory with
one stays in the mean and deviation of its group and has no gradient. Argument:

  version  as_written
           removed: out of the statistics too

Departs from both: a trajectory goes on after a void turn, where theirs ends;
malformed calls count as void, and so does a query after the last that is
allowed; its tokens still count in the divisor of the
loss. Their clip bounds (0.2 and 0.28, dual 3) and refill are fields of
algorithm and rollout. The release's script leaves the filter off, its default
is on.
"""

import numpy as np

from configs import algorithms
from configs.methods import core
from searchrl_jax.learn.advantages import normalised

VERSIONS = {'as_written': False, 'removed': True}


def get_config(arg=None):
  return core.on_base(arg, change, version='as_written')


def change(c, a):
  c.name = 'simpletir'
  kw = dict(removed=core.chosen('version', a.version, VERSIONS))
  kw |= dict(eps=1e-6, ddof=1)
  name = 'configs.methods.simpletir.unless_void'
  fields = dict(advantage=name, advantage_kw=kw, aggregation='token')
  core.set_algorithm(c, algorithms.GRPO | fields)


def unless_void(
  values, valid, group_ids, structure, *, removed: bool, eps: float, ddof: int
):
  """GRPO's advantage, 0 for a trajectory with a void turn."""
  good = np.array([not _void(t) for t in structure.trajectories], bool)
  counted = np.asarray(valid, bool) & (good | (not removed))
  a = normalised(values, counted, group_ids, eps=eps, ddof=ddof)
  return (a * good).astype(np.float32)


def _void(trajectory) -> bool:
  # A turn that ends with the whole trajectory counts as truncated alone.
  cut = trajectory.meta.get('truncated_turns', 0)
  return trajectory.invalid_actions > 0 or cut > 0


unless_void.needs_group = unless_void.divides_by_spread = True
