"""SDPO: the policy learns from itself with a right attempt in its prompt.

arXiv 2601.20802, as TRL's experimental trainer has it by default. The advantage
of a token is Delta_t, log T - log S of what was sampled: the teacher T reads
the first other attempt of the group that was right, and its weights are an
average of the policy's. A sole success gets no teacher. The reward chooses the
demonstration, and nothing else. Importance weights to the engine are capped at
2. Arguments:

  outcome  weight of GRPO's advantage beside Delta (TRL: 1 - lambda; 0)
  rate     of the average, which each step takes
  others   True: the attempt at another question, a control

Departs from both: the release compares distributions over the 100 most likely
tokens instead of the sampled one; there the teacher's mask hides observations
from it, and here it reads what the policy has read; TRL divides by the tokens
of all trajectories, those without a teacher included, and so does this.
"""

from ml_collections import ConfigDict

from configs import algorithms
from configs.methods import core


def get_config(arg=None):
  return core.on_base(arg, change, outcome=0.0, rate=0.05, others=False)


def change(c, a):
  c.name = 'sdpo'
  kw = dict(scale=1.0, outcome=a.outcome, eps=1e-6, ddof=1)
  fields = dict(advantage='distilled', advantage_kw=kw, aggregation='token')
  core.set_algorithm(c, algorithms.GRPO | fields | dict(loss='reinforce'))
  c.teacher.context = 'sibling'
  c.teacher.context_kw = ConfigDict(dict(right=1.0, fewest=False))
  c.teacher.weights, c.teacher.rate = 'ema', a.rate
  c.teacher.others = a.others
