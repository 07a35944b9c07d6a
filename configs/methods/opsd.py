"""OPSD: the policy learns from itself with a demonstration in its prompt.

PrimeIntellect-ai/prime-rl, algo/opsd.py. The advantage of a token is c Delta_t,
log T - log S of what was sampled: the teacher T is the policy with a text of
the data beside the question. Its expectation is the gradient of the reverse KL
to the teacher. The reward is not used. Arguments:

  key      of Question.meta, where that text is; '' = demonstration, or in a
           generated world facts: all that a question needs, answer included
  scale    c
  outcome  weight of GRPO's advantage beside it
  weights  of the teacher: live, frozen, copy, ema
  others   True: the demonstration of another question, a control

Departs from it: the text stands behind the question, there before all of the
prompt; clipped as the base recipe's loss is, where the release squares
log ratios and drops tokens that became much less likely.
"""

from ml_collections import ConfigDict

from configs import algorithms
from configs.methods import core


def get_config(arg=None):
  known = dict(key='', scale=1.0, outcome=0.0, weights='live', others=False)
  return core.on_base(arg, change, **known)


def change(c, a):
  c.name = 'opsd'
  kw = dict(scale=a.scale, outcome=a.outcome, eps=1e-6, ddof=1)
  fields = dict(advantage='distilled', advantage_kw=kw, aggregation='token')
  core.set_algorithm(c, algorithms.GRPO | fields)
  key = a.key or ('demonstration' if c.model.path else 'facts')
  c.teacher.context = 'from_data'
  c.teacher.context_kw = ConfigDict(dict(key=key))
  c.teacher.weights, c.teacher.others = a.weights, a.others
  core.make_room(c)
