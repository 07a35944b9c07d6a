"""MaxRL: GRPO that divides by the mean reward instead of the deviation.

arXiv 2602.02710; PrimeIntellect-ai/prime-rl, algo/max_rl.py. Within the group
A = (R - mean(R)) / mean(R), and 0 where the mean is 0: of eight attempts, a
sole success gets 7. The rewards must not be negative. Departs from both: no KL
(algorithm.kl sets one), and the outcome is the base recipe's.
"""

import numpy as np

from configs import algorithms
from configs.methods import core
from searchrl_jax import lookup
from searchrl_jax.learn.advantages import by_cell, returns


def get_config(arg=None):
  return core.on_base(arg, change)


def change(c, a):
  del a
  c.name = 'maxrl'
  advantage = dict(advantage='configs.methods.maxrl.relative', advantage_kw={})
  core.set_algorithm(c, algorithms.GRPO | advantage | dict(aggregation='token'))


def relative(values, valid, group_ids):
  """(R - mean(R)) / mean(R) within the group; see `advantages` for the arrays.

  Raises:
    ValueError: a return is negative.
  """
  least = returns(values)[np.asarray(valid, bool)].min(initial=0.0)
  lookup.require(
    least >= 0,
    f'a return of {least}: configs/methods/maxrl.py divides by the mean of a '
    "group, so no term of config.reward may be negative; use 'grpo'",
    ValueError,
  )
  fn = lambda s, v: v / s.mean() - 1.0
  return by_cell(values, valid, group_ids, fn).astype(np.float32)


relative.needs_group = relative.divides_by_spread = True
