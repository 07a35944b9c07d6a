"""Search-E1's second phase: who learns from whom, and from nothing else."""

import numpy as np

from configs.methods import search_e1
from searchrl_jax import checks
from searchrl_jax.learn import advantages, batching, losses, teacher
from searchrl_jax.types import Rewards
from tests.methods import group as hand


def test_the_shortest_right_one_is_shown():
  c = search_e1.get_config()
  checks.check(c)
  c.batch.lengths = (1024,)
  short = hand.play(('once', 'ab'), sample=2)
  group = (hand.RIGHT, hand.WRONG, short)
  reward = Rewards(np.array([1, 0, 1], np.float32), np.ones(3, bool))
  batch = batching.of_step([group], reward, c, shards=1, seed=0)
  rows = teacher.told_rows(batch, c, hand.ENV)
  shown = [
    hand.ENV.tokenizer.decode(t.trained[0].ids.tolist())
    for t in rows.trajectories
  ]
  assert 'once' in shown[0] and 'once' in shown[1]
  assert rows.taught.tolist() == [True, True, False]  # it is the shortest
  assert c.teacher.weights == 'frozen' and c.algorithm.advantage == 'zero'
  assert c.teacher.columns.distance == 'forward'


def test_golden():
  # S = .5 .3 and .2 of the rest, T = .25 .5 .25: sum of T log(T / S).
  c = search_e1.get_config().teacher.columns
  log_s, log_t = np.log([[[0.5, 0.3]]]), np.log([[[0.25, 0.5]]])
  found = losses.distance(log_s, log_t, c.distance, c.alpha)
  wanted = 0.25 * np.log(0.5) + 0.5 * np.log(0.5 / 0.3) + 0.25 * np.log(1.25)
  np.testing.assert_allclose(found, [[wanted]], rtol=1e-5)


def test_there_is_no_policy_gradient():
  found = advantages.zero(np.array([1.0, 0]), [True, True], [0, 0])
  assert found.tolist() == [0, 0]
