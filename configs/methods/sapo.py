"""SAPO: GRPO that holds the likelihood of each good token which fell far.

arXiv 2603.10069 (Tencent). Adds to the clipped loss, for each token whose
trajectory earned well and whose ratio rho = pi / pi_old is at most t,
coefficient x -log rho. It is LLDS's term (configs/methods/llds.py) with a gate
for each token. Arguments:

  version  sound: earned well is A > 0
           as_written: A >= 0, which also holds all-equal groups in place, the
           wrong ones (a fault) and the right ones
  t        the ratio from which a token is held, below 1
  scale    w, the coefficient
  minibatches  updates of a step, at least; with one, the term is 0

Departs from the paper: the sum is divided by all loss tokens, not by those of
good trajectories alone, so that a step without one is no 0 / 0; values of t and
w were not found; no KL (algorithm.kl sets one).
"""

import math

from configs import algorithms
from configs.methods import core
from searchrl_jax import lookup

VERSIONS = {'sound': False, 'as_written': True}


def get_config(arg=None):
  known = dict(version='sound', t=0.9, scale=0.2, minibatches=4)
  return core.on_base(arg, change, **known)


def change(c, a):
  c.name = 'sapo'
  lookup.require(0 < a.t < 1, f'config argument t={a.t}: between 0 and 1')
  fields = dict(aggregation='token', loss='configs.methods.llds.held')
  fields |= dict(llds_coef=a.scale, llds_gate='token')
  fields |= dict(llds_zero=core.chosen('version', a.version, VERSIONS))
  fields |= dict(llds_tolerance=-math.log(a.t))
  core.set_algorithm(c, algorithms.GRPO | fields)
  c.algorithm.minibatches = max(a.minibatches, c.algorithm.minibatches)
