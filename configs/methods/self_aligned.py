"""Self-Aligned Reward: what the question makes of a reply's perplexity.

arXiv 2509.05489; amazon-science/Self-Aligned-Reward. The reward is

    R + scale x max((ppl(a) - ppl(a | q)) / ppl(a), -1)

with perplexities of the policy's tokens, without the question and with it: what
would be written whatever was asked earns nothing. With delta, log T - log S of
a token for the teacher T whose prompt lacks the question, the fraction is 1 -
exp(mean delta). Argument:

  scale    of the term

Departs from both: observations are read in both perplexities and counted in
none; a trajectory that the teacher cannot score (several contexts) gets 0;
compared as Dr. GRPO does, without a deviation, with the base recipe's divisor;
no KL (algorithm.kl sets one).
"""

import numpy as np

from configs import algorithms
from configs.methods import core
from searchrl_jax.learn.advantages import centred, returns


def get_config(arg=None):
  return core.on_base(arg, change, scale=0.2)


def change(c, a):
  c.name = 'self_aligned'
  name = 'configs.methods.self_aligned.aligned'
  fields = dict(advantage=name, advantage_kw=dict(scale=a.scale))
  core.set_algorithm(c, algorithms.GRPO | fields | dict(aggregation='token'))
  c.teacher.context, c.teacher.frame = 'own', ''


def aligned(values, valid, group_ids, structure, delta, *, scale: float):
  """R - mean(R) within the group, R with the term; see the module."""
  means = [
    d[turns >= 0].mean() if (turns >= 0).any() else 0.0
    for d, turns in zip(delta, structure.turns, strict=True)
  ]
  term = np.maximum(1.0 - np.exp(np.minimum(means, 20.0)), -1.0)
  earned = returns(values) + scale * term
  return centred(earned, valid, group_ids).astype(np.float32)


aligned.needs_group = True
