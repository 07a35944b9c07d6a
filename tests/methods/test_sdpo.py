"""SDPO: who gets a teacher, and what it reads."""

import numpy as np

from configs.methods import sdpo
from searchrl_jax import checks
from searchrl_jax.learn import advantages, batching, teacher
from searchrl_jax.types import Rewards
from tests.methods import group as hand


def test_rows_without_another_right_one_learn_nothing():
  c = sdpo.get_config()
  c.batch.lengths = (1024,)
  group = (hand.RIGHT, hand.WRONG, hand.play(('w', 'ab'), sample=2))
  for earned, taught in (
    ((1, 0, 1), [True, True, True]),
    ((1, 0, 0), [False, True, True]),
    ((0, 0, 0), [False, False, False]),
  ):
    reward = Rewards(np.array(earned, np.float32), np.ones(3, bool))
    batch = batching.of_step([group], reward, c, shards=1, seed=0)
    rows = teacher.told_rows(batch, c, hand.ENV)
    assert rows.taught.tolist() == taught


def test_the_teacher_reads_what_the_policy_has_read():
  """The release's teacher cannot see observations."""
  c = sdpo.get_config()
  c.batch.lengths = (1024,)
  reward = Rewards(np.array([1, 0, 0], np.float32), np.ones(3, bool))
  batch = batching.of_step([hand.GROUP], reward, c, shards=1, seed=0)
  rows = teacher.told_rows(batch, c, hand.ENV)
  told = rows.trajectories[1].trained
  kinds = [(s.author, s.kind) for s in told]
  assert kinds.count(('environment', 'information')) == 2
  shown = hand.ENV.tokenizer.decode(told[0].ids.tolist())
  assert 'who wrote it' in shown and 'who?' in shown


def test_golden():
  # GRPO of 1 and 0 is +-.5 / sqrt(.5) = +-.70711, of which half is added to
  # Delta; without a teacher Delta is 0.
  delta = [np.array([0.5, 0, -0.25]), np.zeros(2)]
  args = np.array([1.0, 0]), [True, True], [0, 0], delta
  for outcome, wanted in ((0.0, 0.0), (0.5, 0.353553)):
    c = sdpo.get_config(f'outcome={outcome}').algorithm
    right, wrong = advantages.distilled(*args, **c.advantage_kw)
    np.testing.assert_allclose(right, delta[0] + wanted, atol=2e-6)
    np.testing.assert_allclose(wrong, -wanted, atol=2e-6)


def test_its_config():
  c = sdpo.get_config('rate=0.1,outcome=0.5,others=True')
  assert (c.teacher.weights, c.teacher.rate) == ('ema', 0.1)
  assert c.algorithm.loss == 'reinforce' and c.algorithm.tis_cap == 2.0
  checks.check(c)
  released = sdpo.get_config('version=as_released')
  assert released.teacher.columns.k == 100
  checks.check(released)
