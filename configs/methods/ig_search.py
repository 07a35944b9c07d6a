"""IG-Search: GRPO, and for each search what it found beyond chance.

arXiv 2604.15148; MaYufei-NPU/IG-Search. The gain of a search is the mean
log-prob of the golden answer after what it found, less the mean of the same
after three other observations in its place. The first three tokens of the
answer weigh 3. The current policy scores. A = A_out + scale x gain for the
tokens of the turn that searched. Arguments:

  scale    of the gain
  swaps    replacements

Departs from both: the release takes replacements from the same step whatever
they hold, here they share no passage with what they replace, and there an
observation goes with the note on it; how the gain
enters the advantage was not found; a search without a replacement has gain 0;
no KL (algorithm.kl sets one).
"""

import numpy as np

from configs import algorithms
from configs.methods import core
from searchrl_jax.learn import potential
from searchrl_jax.learn.advantages import normalised, returns


def get_config(arg=None):
  return core.on_base(arg, change, scale=0.2, swaps=3)


def change(c, a):
  c.name = 'ig_search'
  kw = dict(scale=a.scale, eps=1e-6, ddof=1)
  name = 'configs.methods.ig_search.with_gains'
  fields = dict(advantage=name, advantage_kw=kw, aggregation='token')
  core.set_algorithm(c, algorithms.GRPO | fields)
  c.teacher.gold.first, c.teacher.gold.swaps = 3.0, a.swaps


def with_gains(
  values,
  valid,
  group_ids,
  structure,
  gold,
  *,
  scale: float,
  eps: float,
  ddof: int,
):
  """GRPO's advantage plus scale x the gain of the turn; see the module."""
  s, valid = structure, np.asarray(valid, bool)
  score = returns(values)
  outcome = normalised(score, valid, group_ids, eps=eps, ddof=ddof)[s.owner]
  gains = potential.steps(gold, s, lambda g: g.real[1:] - g.swapped)
  return s.over_tokens(valid[s.owner] * (outcome + scale * gains))


def _check(config, fields):
  del fields
  swaps = config.teacher.gold.swaps
  core.lookup.require(swaps > 0, f'config.teacher.gold.swaps={swaps}: above 0')


with_gains.needs, with_gains.check = ('answers',), _check
with_gains.needs_group = with_gains.divides_by_spread = True
