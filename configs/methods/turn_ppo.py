"""Turn-level PPO: a turn is one action, with one value and one advantage.

Turn-PPO (arXiv 2512.17008): generalised advantage estimation over turns,

    delta_k = r_k + gamma V_(k+1) - V_k,  A_k = sum of (gamma lam)^l delta_(k+l)

V_k is the critic's value of the history before turn k: at its first loss token.
All tokens of the turn share A_k, and gamma and lambda count turns. gamma 0.99
and lambda 0.9 are those that summaries of the paper name; its text and code
were not read. Departs from the paper, as far as these say: the ratio is clipped
for each token, not for the turn. The critic learns the turn's return at each
token of the turn, and is read at the first one. An observation is of no turn,
so none is in the loss.

Its shaping is lambda: algorithm.advantage_kw.lam.
"""

import numpy as np

from configs import algorithms
from configs.methods import core
from searchrl_jax import lookup
from searchrl_jax.learn.advantages import normalised

ADVANTAGE = dict(
  advantage='configs.methods.turn_ppo.turn_gae',
  advantage_kw=dict(gamma=0.99, lam=0.9, eps=1e-8, shuffle=False),
)


def get_config(arg=None):
  return core.on_base(arg, change)


def change(c, a):
  del a
  c.name = 'turn_ppo'
  core.set_algorithm(c, algorithms.PPO | ADVANTAGE)
  core.set_critic(c)


def _returns(values, critic, structure, gamma: float, lam: float):
  """float64 [N]: values of turns, G_k and V_k.

  G_k = r_k + gamma ((1 - lam) V_(k+1) + lam G_(k+1)), 0 after the last turn.
  """
  owner, start = structure.owner, structure.start
  v = np.array([critic[i][t] for i, t in zip(owner, start)], np.float64)
  g = structure.totals(values)
  for k in reversed(range(len(g) - 1)):
    if owner[k] == owner[k + 1]:
      g[k] += gamma * ((1 - lam) * v[k + 1] + lam * g[k + 1])
  return g, v


def turn_gae(
  values,
  valid,
  group_ids,
  mask,
  critic,
  structure,
  *,
  gamma: float,
  lam: float,
  eps: float,
  shuffle: bool,
):
  """A_k = G_k - V_k, whitened over the turns of the batch, on each token.

  Args:
    values, valid, group_ids, mask, critic, structure: see
      `searchrl_jax.learn.advantages`.
    gamma, lam: for each turn.
    eps: added to the deviation.
    shuffle: control: a trajectory's advantages go to its turns at random.
  """
  del group_ids, mask
  g, v = _returns(values, critic, structure, gamma, lam)
  kept = np.asarray(valid, bool)[structure.owner]
  a = normalised(g - v, kept, np.zeros(len(g), int), eps=eps, ddof=0)
  return structure.over_tokens(structure.shuffled(a) if shuffle else a)


def targets(values, valid, mask, critic, structure, *, gamma, lam):
  """What the critic learns: G_k at each loss token of turn k."""
  del mask
  g, _ = _returns(values, critic, structure, gamma, lam)
  kept = np.asarray(valid, bool)[structure.owner]
  return structure.over_tokens(np.where(kept, g, 0.0))


def _check(config, fields):
  del fields
  lookup.require(
    not config.env.train_observations,
    'config.env.train_observations with turn_gae: an observation is part of no '
    'turn, and its values would be trained towards 0; set it to False',
  )


turn_gae.targets, turn_gae.check = targets, _check
