"""SD-Search: GRPO, and queries like those of a policy that knows in hindsight.

arXiv 2605.18299, from summaries. The teacher's prompt has the queries of the
other trajectories of the group, each with whether its answer was right, and
nothing else of them (`learn.teacher.queries`). The Jensen-Shannon divergence of
its distribution and the policy's, on the tokens of queries, is added to GRPO's
loss. The weights are those of the policy. Arguments:

  scale    of the divergence
  k        ids of a token that are compared, the policy's likeliest
  labels   False: the labels of another trajectory, a control
  others   True: the queries of another question, a control

A group that is all right or all wrong has no teacher, and as in GRPO no outcome
to learn from; the mean is over the tokens that have one, so that the fewer
groups are mixed, the more each weighs. Behind its own prompt the distance is 0
up to rounding, of two programs, at the first update of a step.

Departs from it: whether a trajectory's own later queries are shown was not
found, here they are not; the label is by the base recipe's reward (they: F1); k
ids and the rest, where they seem to compare all; the coefficient was not found;
tags count as tokens of a query; no KL (algorithm.kl sets one).
"""

from ml_collections import ConfigDict

from configs.methods import core
from searchrl_jax.text import prompts


def get_config(arg=None):
  known = dict(scale=1.0, k=20, labels=True, others=False)
  return core.on_base(arg, change, **known)


def change(c, a):
  c.name = 'sd_search'
  core.set_algorithm(c, core.GRPO)
  c.teacher.context, c.teacher.others = 'queries', a.others
  # A generated world has few words.
  words = ('correct', 'incorrect') if c.model.path else ('found', 'no')
  c.teacher.context_kw = ConfigDict(
    dict(right=1.0, labels=a.labels, words=words)
  )
  core.make_room(c)
  kind = prompts.CALL if prompts.load(c.env.template).calls else 'search'
  c.teacher.columns.update(
    k=a.k, distance='js', alpha=0.5, coef=a.scale, kinds=(kind,)
  )
