"""TIPS: PPO whose reward is shaped by the likelihood of the golden answers.

arXiv 2603.22293; ucsd-wang-lab-lm/tips. Phi is the log of the sum over golden
answers of exp(their mean log-prob), by a copy of the policy after what has been
read. Where a call of a tool ends, the last token of the turn earns scale x the
change of Phi. Arguments:

  scale    of the change
  weights  that score: copy, frozen, live, ema
  every    steps between two copies

Departs from both: in the release a call of the scorer that fails gives 0, the
best Phi that there is; here it stops the run. Its filter of unlikely texts is
commented out there. No KL (algorithm.kl sets one).
"""

import numpy as np

from configs import algorithms
from configs.methods import core
from searchrl_jax.learn import advantages, potential


def get_config(arg=None):
  return core.on_base(arg, change, scale=0.02, weights='copy', every=50)


def change(c, a):
  c.name = 'tips'
  kw = dict(algorithms.PPO['advantage_kw']) | dict(scale=a.scale)
  name = 'configs.methods.tips.shaped_gae'
  core.set_algorithm(c, algorithms.PPO | dict(advantage=name, advantage_kw=kw))
  core.set_critic(c)
  c.teacher.gold.aliases = 0
  c.teacher.weights, c.teacher.every = a.weights, a.every


def shaped_gae(
  values,
  valid,
  group_ids,
  mask,
  critic,
  structure,
  gold,
  *,
  scale: float,
  gamma: float,
  lam: float,
  whiten: bool,
  eps: float,
):
  """`advantages.gae` of the shaped rewards."""
  shaped = _shaped(values, structure, gold, scale)
  kw = dict(gamma=gamma, lam=lam, whiten=whiten, eps=eps)
  return advantages.gae(shaped, valid, group_ids, mask, critic, **kw)


def _targets(
  values, valid, mask, critic, structure, gold, *, scale, gamma, lam
):
  shaped = _shaped(values, structure, gold, scale)
  how = dict(gamma=gamma, lam=lam)
  return advantages.lambda_returns(shaped, valid, mask, critic, **how)


def _shaped(values, structure, gold, scale: float) -> list[np.ndarray]:
  s = structure
  earned = potential.steps(gold, s, lambda g: np.diff(g.real))
  out = [np.array(v, np.float64) for v in values]
  for k, (i, x) in enumerate(zip(s.owner, earned)):
    out[i][np.flatnonzero(s.turns[i] == k)[-1]] += scale * x
  return out


shaped_gae.needs, shaped_gae.targets = ('answers',), _targets
