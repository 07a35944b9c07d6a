"""TRACE: GRPO, and for each search what it made of the golden answer.

arXiv 2607.13988, from a port's equations. A frozen copy of the policy, from
before RL, scores the golden answer after each observation: l_t is its mean
log-prob, d_t = 0.1 - l_t, and V_t = log(d_0 / d_t). Of T turns that read
something, t = 0, ... earns V_(t+1) - V_t. Its credit is the average of what it
and the next two earned, weighted by 0.8^l; if these reach the last one, the
outcome is added with 2 x 0.8^(T - t). A = A_out + scale x credit; A_out is
GRPO's, by the population's deviation, and the credit is not normalised.
Arguments:

  scale    of the credit
  weights  that score: frozen, live, copy, ema

Other turns, the answer among them, have A_out alone, as in the port; what the
paper does with an answer was not found. Departs from it: no KL (algorithm.kl
sets one).
"""

import numpy as np

from configs import algorithms
from configs.methods import core
from searchrl_jax.learn import potential
from searchrl_jax.learn.advantages import normalised, returns


def get_config(arg=None):
  return core.on_base(arg, change, scale=0.2, weights='frozen')


def change(c, a):
  c.name = 'trace'
  kw = dict(scale=a.scale, least=0.1, gamma=0.8, window=3, end=2.0)
  name = 'configs.methods.trace.with_levels'
  fields = dict(advantage=name, advantage_kw=kw, aggregation='token')
  core.set_algorithm(c, algorithms.GRPO | fields)
  c.algorithm.advantage_kw.eps = 1e-6
  c.teacher.weights = a.weights


def with_levels(
  values,
  valid,
  group_ids,
  structure,
  gold,
  *,
  scale: float,
  least: float,
  gamma: float,
  window: int,
  end: float,
  eps: float,
):
  """A_out + scale x the credit of the turn; see the module.

  Args:
    values, valid, group_ids, structure, gold: see `advantages`.
    least: added to -l, so that no distance is 0.
    gamma, window: of the average; end: weight of the outcome.
  """
  s, valid = structure, np.asarray(valid, bool)
  score = returns(values)
  outcome = normalised(score, valid, group_ids, eps=eps, ddof=0)[s.owner]
  distance = lambda levels: np.log(least - levels.real)
  earned = potential.steps(gold, s, lambda g: -np.diff(distance(g)))
  credit = np.zeros(len(earned))
  for i, spans in enumerate(s.spans):
    read = [span.turn for span in spans if span.observes]
    at = np.flatnonzero((s.owner == i) & np.isin(s.number, read))
    for t, k in enumerate(at):
      ahead = earned[at[t : t + window]]
      weights = gamma ** np.arange(len(ahead))
      credit[k] = np.average(ahead, weights=weights)
      if t + window >= len(at):
        credit[k] += end * gamma ** (len(at) - t) * outcome[k]
  return s.over_tokens(valid[s.owner] * (outcome + scale * credit))


def _check(config, fields):
  del fields
  n = config.teacher.gold.aliases
  core.lookup.require(
    n == 1,
    f'config.teacher.gold.aliases={n}: of one answer no level is above 0',
  )


with_levels.needs, with_levels.check = ('answers',), _check
with_levels.needs_group = with_levels.divides_by_spread = True
