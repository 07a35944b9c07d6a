"""PPO on the outcome: every token has its own step towards it."""

import numpy as np

from configs.methods import ppo
from searchrl_jax.learn import advantages
from tests.methods import group as hand
from tests.methods.group import GROUP


def test_golden_values():
  c = ppo.get_config()
  kw = c.algorithm.advantage_kw.to_dict() | dict(whiten=False)
  _, masks = hand.arrays()
  earned = hand.outcome(GROUP, (1, 0, 0))
  critic = [np.full(len(m), 0.25) for m in masks]
  found = advantages.gae(earned, [True] * 3, [0] * 3, masks, critic, **kw)
  # No discount, lambda 1: outcome less value, 0.75 or -0.25, at any token.
  for row, mask, wanted in zip(found, masks, (0.75, -0.25, -0.25), strict=True):
    np.testing.assert_allclose(row[mask], wanted)
    assert not row[~mask].any()
  assert c.algorithm.loss == 'clip' and list(c.reward) == ['em']


def test_the_critic_learns_at_search_r1s_rate_where_the_base_has_it():
  lr = [
    ppo.get_config(arg).critic.lr
    for arg in ('', 'base=search_r1,model=x', 'base=search_r1,algorithm=ppo')
  ]
  assert lr == [1e-3, 1e-5, 1e-3]
