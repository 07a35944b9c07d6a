"""REINFORCE++ on the outcome: whitened over the tokens of the batch."""

import numpy as np

from configs.methods import reinforce_pp
from searchrl_jax.learn import advantages
from tests.methods import group as hand
from tests.methods.group import GROUP


def test_golden_values():
  c = reinforce_pp.get_config()
  assert c.algorithm.advantage == 'whitened_tokens' and c.critic.lr == 0
  _, masks = hand.arrays()
  earned = hand.outcome(GROUP, (1, 0, 0))
  found = advantages.whitened_tokens(
    earned, [True] * 3, [0] * 3, masks, **c.algorithm.advantage_kw
  )
  # Without a discount every token of the right one has 1, n of N tokens: mean
  # p = n / N, deviation sqrt(p (1 - p)); 1 becomes sqrt((1 - p) / p).
  n = np.array([m.sum() for m in masks])
  p = n[0] / n.sum()
  for row, mask, wanted in zip(
    found, masks, [((1 - p) / p) ** 0.5] + [-((p / (1 - p)) ** 0.5)] * 2,
    strict=True,
  ):  # fmt: skip
    np.testing.assert_allclose(row[mask], wanted, rtol=1e-5)
