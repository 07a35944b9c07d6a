"""PiCA: PPO with the potential of the history as a shaping reward.

arXiv 2605.09287; novdream/PiCA. Search t earns scale (Phi_t - Phi_(t-1)), Phi
the estimated chance to succeed. Here Phi is exact: the share of supporting
passages that have been found. Arguments:

  version  as_written: scale 0.3
           as_released: scale 1.3, since the code adds 0.3 times a view that the
           called function has written in place (StepSearch's fault)
  scale    of the shaping; 0 = the version's
  kind     difference; level: a control that is no potential, which repeated
           searches farm
  closed   True: the end gives Phi_m back

The paper calls the shaping neutral to the optimum. For that it lacks the last
term, without which it adds up to scale (Phi_m - Phi_0) and pays for evidence
that an answer did not need. With it (`closed`) no behaviour gains by it. At
lambda 1, without discount, nothing is then left but a target that the critic
has to follow; so it is off by default, and goes with
`--config.algorithm.advantage_kw.lam=0.95`.

Departs from both: an exact Phi for a trained scorer and its penalty; the base
recipe's outcome.
"""

from ml_collections import ConfigDict

from configs import algorithms
from configs.methods import core

VERSIONS = {'as_written': 0.3, 'as_released': 1.3}


def get_config(arg=None):
  return core.on_base(
    arg,
    change,
    version='as_written',
    scale=0.0,
    kind='difference',
    closed=False,
  )


def change(c, a):
  scale = core.chosen('version', a.version, VERSIONS)
  c.name = 'pica'
  core.set_algorithm(c, algorithms.PPO)
  core.set_critic(c)
  c.reward.progress = ConfigDict(
    core.PROGRESS | dict(scale=a.scale or scale, kind=a.kind, closed=a.closed)
  )
