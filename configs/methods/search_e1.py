"""Search-E1's second phase: imitate one's own shortest right attempt.

arXiv 2605.22511, from summaries. Between phases of GRPO the policy learns,
without a policy gradient, the distribution that it had itself with the shortest
right attempt of the group in its prompt: forward KL on the tokens that it
wrote. The teacher is the policy at the start of the phase, so a phase is a run
that starts from the GRPO run:

  python -m searchrl_jax.train --workdir=runs/e1 \\
    --config=configs/methods/search_e1.py --config.train.init=runs/grpo

Arguments:

  k        ids of a token that are compared, the policy's likeliest
  others   True: the attempt at another question, a control

Departs from it: every other trajectory of the group learns from that one, where
they take the one most unlike it; k ids and the rest, unclipped, where
they clip each entry of the vocabulary (the clip was not found).
"""

from ml_collections import ConfigDict

from configs import algorithms
from configs.methods import core


def get_config(arg=None):
  return core.on_base(arg, change, k=20, others=False)


def change(c, a):
  c.name = 'search_e1'
  fields = dict(advantage='zero', advantage_kw={}, aggregation='token')
  core.set_algorithm(c, algorithms.GRPO | fields)
  core.make_room(c)
  c.teacher.context, c.teacher.others = 'sibling', a.others
  c.teacher.context_kw = ConfigDict(dict(right=1.0, fewest=True))
  c.teacher.columns.update(k=a.k, distance='forward')
  c.teacher.weights = 'frozen'
