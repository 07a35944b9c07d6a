"""Self-Aligned Reward by hand, from perplexities."""

import numpy as np
import pytest

from configs.methods import self_aligned
from searchrl_jax import checks
from searchrl_jax.learn import batching, teacher
from searchrl_jax.types import Rewards
from tests.methods import group as hand

S, MASKS = hand.arrays()


def test_golden():
  # Mean log-probs with the question -1, without -1.5: perplexities e and
  # e^1.5, of which the question takes 1 - e^-.5. Then -1 and -1, and -1, -.2:
  # 1 - e^.8 = -1.23, at least -1.
  mean = [-0.5, 0.0, 0.8]
  assert (np.exp(1.5) - np.exp(1)) / np.exp(1.5) == pytest.approx(
    1 - np.exp(-0.5)
  )
  delta = [np.where(t >= 0, m, 9.0) for t, m in zip(S.turns, mean)]
  got = self_aligned.aligned(
    np.array([1.0, 1, 0]), [True] * 3, [0] * 3, S, delta, scale=0.2
  )
  earned = np.array([1 + 0.2 * (1 - np.exp(-0.5)), 1, -0.2])
  np.testing.assert_allclose(got, earned - earned.mean(), rtol=1e-5)


def test_the_teacher_has_not_been_asked():
  c = self_aligned.get_config()
  checks.check(c)
  c.batch.lengths = (1024,)
  reward = Rewards(np.zeros(3, np.float32), np.ones(3, bool))
  batch = batching.of_step([hand.GROUP], reward, c, shards=1, seed=0)
  rows = teacher.told_rows(batch, c, hand.ENV)
  assert rows.taught.all()
  for t in rows.trajectories:
    assert 'who' not in hand.ENV.tokenizer.decode(t.trained[0].ids.tolist())
