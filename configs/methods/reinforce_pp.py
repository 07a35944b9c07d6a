"""REINFORCE++ on the outcome alone: a baseline without critic or groups.

arXiv 2501.03262: returns to go, whitened over all tokens of the batch (equation
9), PPO's bounds. Departs from it: no KL in the reward (algorithm.kl sets one),
and the base recipe's groups stay, so that arms sample as many tokens.
"""

from configs import algorithms
from configs.methods import core


def get_config(arg=None):
  return core.on_base(arg, change)


def change(c, a):
  del a
  c.name = 'reinforce_pp'
  whitened = dict(
    advantage='whitened_tokens', advantage_kw=dict(gamma=1.0, eps=1e-8)
  )
  core.set_algorithm(c, algorithms.REINFORCE_PP | whitened)
