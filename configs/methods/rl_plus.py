"""RL-PLUS: a trace of the data in each group, its unlikely tokens first.

arXiv 2508.00222; YihongDong/RL-PLUS. As LUFFY (configs/methods/luffy.py), but
for the objective of the trace's tokens. What wrote them is taken to have each
with probability omega, the mean of pi_old and 1, and the weight is that of a
mixture of both policies (multiple importance sampling):

    2 pi / (pi_old + omega) (1 - pi)^0.5 A,  omega = (pi_old + 1) / 2

pi_old is the policy's, before the step's first update. No gradient passes
through (1 - pi)^0.5, which favours what the policy finds unlikely. Nothing is
clipped. Arguments:

  traces   where they are, see rollout/traces.py; '' = as LUFFY's
  most     traces of a group

Departs from the release as LUFFY does: the sum is divided by the number of
trajectories too, and entropy is in it.
"""

import jax
import jax.numpy as jnp

from configs.methods import core

POWER = 0.5


def get_config(arg=None):
  return core.on_base(arg, change, traces='', most=1)


def change(c, a):
  c.name = 'rl_plus'
  core.set_traces(c, a.traces, 'configs.methods.rl_plus.weighed')
  c.algorithm.update(core.UNCLIPPED)
  c.rollout.trace_most = a.most


def weighed(logps, old_logps, advantages):
  """The objective of foreign tokens, [B, T]; see the module."""
  p, old = jnp.exp(logps), jnp.exp(jax.lax.stop_gradient(old_logps))
  omega = (old + 1) / 2
  unlikely = jax.lax.stop_gradient(jnp.maximum(1 - p, 0.0)) ** POWER
  return 2 * p / (old + omega) * unlikely * advantages
