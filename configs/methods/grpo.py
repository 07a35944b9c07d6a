"""GRPO on the outcome alone: the baseline of the other methods.

DeepSeekMath (arXiv 2402.03300), with the base recipe's reward: every token of a
trajectory has the advantage (R - mean) / std of its group. As in most releases
of search agents, a loss token weighs the same in any trajectory (the paper:
any trajectory weighs the same), and there is no KL; algorithm.kl sets one.
"""

from configs import algorithms
from configs.methods import core


def get_config(arg=None):
  return core.on_base(arg, change)


def change(c, a):
  del a
  c.name = 'grpo'
  c.algorithm.advantage_kw = {}
  c.algorithm.update(
    algorithms.GRPO | dict(aggregation='token', kl='none', kl_coef=0.0)
  )
