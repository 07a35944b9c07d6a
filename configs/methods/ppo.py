"""PPO on the outcome alone: a baseline with a critic.

PPO (arXiv 1707.06347) with GAE (1506.02438), each token an action, as Search-R1
(2503.09516) trains: no discount, lambda 1. Departs from it: only loss tokens
are steps, no KL in the reward (algorithm.kl sets one), and the groups of the
base recipe stay, of which PPO makes no use, so that arms sample as many tokens.
"""

from configs import algorithms
from configs.methods import core


def get_config(arg=None):
  return core.on_base(arg, change)


def change(c, a):
  del a
  c.name = 'ppo'
  core.set_algorithm(c, algorithms.PPO)
  core.set_critic(c)
