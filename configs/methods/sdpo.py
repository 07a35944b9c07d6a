"""SDPO: the policy learns from itself with a right attempt in its prompt.

arXiv 2601.20802; lasgroup/SDPO. The teacher reads the first other attempt of
the group that was right, and its weights are an average of the policy's. A sole
success gets no teacher. The reward chooses the demonstration, and nothing else.
Arguments:

  version  sampled: the advantage of a token is Delta_t, log T - log S of what
           was sampled, as in TRL's experimental trainer by default; importance
           weights to the engine are capped at 2
           as_released: the Jensen-Shannon divergence over the policy's 100
           likeliest ids and the rest
  outcome  of `sampled`: weight of GRPO's advantage beside Delta (TRL: 1 -
           lambda; 0)
  rate     of the average, which each step takes
  others   True: the attempt at another question, a control

Departs from both: the release's teacher does not see observations, here it
reads what the policy has read, in words whose tags are neutralised, and its
divergence is not weighted by min(pi / pi_old, 2). TRL's `sampled` divides by
the tokens of all trajectories, those without a teacher included, and so does
this one.
"""

from ml_collections import ConfigDict

from configs import algorithms
from configs.methods import core

VERSIONS = {'sampled': False, 'as_released': True}


def get_config(arg=None):
  known = dict(version='sampled', outcome=0.0, rate=0.05, others=False)
  return core.on_base(arg, change, **known)


def change(c, a):
  c.name = 'sdpo'
  released = core.chosen('version', a.version, VERSIONS)
  kw = dict(scale=1.0, outcome=a.outcome, eps=1e-6, ddof=1)
  fields = dict(advantage='distilled', advantage_kw=kw, loss='reinforce')
  if released:
    fields = dict(advantage='zero', advantage_kw={})
    c.teacher.columns.update(k=100, distance='js', alpha=0.5)
  core.set_algorithm(c, algorithms.GRPO | fields | dict(aggregation='token'))
  c.algorithm.tis, c.algorithm.tis_cap = 'token', 2.0
  core.make_room(c)
  c.teacher.context = 'sibling'
  c.teacher.context_kw = ConfigDict(dict(right=1.0, fewest=False))
  c.teacher.weights, c.teacher.rate = 'ema', a.rate
  c.teacher.others = a.others
