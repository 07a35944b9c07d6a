"""SCoRe: a second attempt that corrects the first, trained in two stages.

arXiv 2409.12917; no official code. The policy answers, and tries again in the
same context, as in configs/methods/mr_search.py. Each answer earns its exact
match, r1 and r2. Tokens of the two attempts have the returns

    stage   first attempt   second attempt
    1       r2              r2
    2       r1 + r2         r2 + alpha (r2 - r1)

less the mean of the others of the group, and - beta log(S / T) of the token, S
the policy and T the one that the run began with: beta is `strong` in the first
attempts of stage 1, `weak` elsewhere. Arguments:

  first   steps of stage 1: of trajectories that began with weights of an
          earlier version than this; -1: half of the steps of the recipe
  alpha   of a correction, and of what undoes one
  strong, weak  beta
  note    tokens of a reflection; 0: those of a turn
  tokens  of the context; 0: twice those of the base recipe

The sound reading: alpha is the second attempt's alone, to which r1 is a
baseline. With the sum of all that is earned, (1 + alpha) r2 + (1 - alpha) r1,
the first attempt would be paid for being wrong. Departs from the paper: it has
no mean of others; it asks for a correction by a fixed instruction, where the
policy here writes a reflection, which belongs to the second attempt; here a
token has no share in the KL of later ones. The values of beta are not its own.
"""

from ml_collections import ConfigDict
import numpy as np

from configs.methods import core, mr_search
from searchrl_jax import lookup
from searchrl_jax.learn.advantages import by_cell


def get_config(arg=None):
  known = dict(first=-1, alpha=10.0, strong=0.1, weak=0.01, note=0, tokens=0)
  return core.on_base(arg, change, **known)


def change(c, a):
  own = dict(attempts=2, contexts=1, note=a.note, tokens=a.tokens)
  mr_search.change(c, ConfigDict(own))
  c.name = 'score'
  first = c.train.steps // 2 if a.first < 0 else a.first
  kw = dict(first=first, alpha=a.alpha, strong=a.strong, weak=a.weak)
  fields = dict(advantage='configs.methods.score.corrected', advantage_kw=kw)
  core.set_algorithm(c, core.GRPO | fields)
  c.teacher.context, c.teacher.weights = 'own', 'frozen'


def corrected(
  values, valid, group_ids, mask, delta, structure, *, first, alpha, strong,
  weak,
):  # fmt: skip
  """Advantages of tokens; see the module.

  values, valid, group_ids, mask, delta, structure: see `advantages`. values:
    what each token earned, B arrays [n].
  """
  del mask  # so that `values` are of tokens
  s, n = structure, mr_search.attempts(structure)
  earned = np.zeros((2, len(valid)))
  np.add.at(earned, (n, s.owner), s.totals(values))
  tried = np.zeros(earned.shape, bool)
  tried[n, s.owner] = True
  (r1, r2), early = earned, _versions(s) < first
  goals = r1 + r2, r2 + alpha * (r2 - r1)
  less = lambda x, v: (v - x.mean()) * (len(x) / (len(x) - 1))
  a = [
    by_cell(np.where(early, r2, x), ok & valid, [group_ids, early], less)
    for x, ok in zip(goals, tried)
  ]
  held = np.where((n == 0) & early[s.owner], strong, weak)
  held = held * np.asarray(valid)[s.owner]
  tokens = s.over_tokens(np.array(a)[n, s.owner]), s.over_tokens(held), delta
  return [(x + k * d).astype(np.float32) for x, k, d in zip(*tokens)]


def _versions(structure) -> np.ndarray:
  """int [B]: that of the first token that the policy sampled."""
  told = [[s.versions for s in t.trained] for t in structure.trajectories]
  return np.array([next((v[0] for v in t if v is not None), 0) for t in told])


def _check(config, fields):
  env, of, most = config.env, config.teacher, config.train.steps - 1
  for name, end in dict(first=most, alpha=1e9, strong=1e9, weak=1e9).items():
    what = f'config.algorithm.advantage_kw.{name}={fields[name]}: 0 to {end}'
    lookup.require(0 <= fields[name] <= end, f'{what} (train.steps={most + 1})')
  fns = [term.fn for term in config.reward.values()]
  found = fns, env.attempts, env.max_contexts, of.context, of.weights
  what = 'config.reward, env.attempts, max_contexts, teacher.context, weights'
  wanted = ['answer.each_attempt'], 2, 1, 'own', 'frozen'
  lookup.require(found == wanted, f'{what}={found}: use {wanted}')


corrected.needs_group, corrected.check = True, _check
