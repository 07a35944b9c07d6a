"""SD-Search: what the teacher knows in hindsight, and where it is followed."""

import numpy as np

from configs.methods import sd_search
from searchrl_jax import checks
from searchrl_jax.learn import batching, teacher
from searchrl_jax.types import Rewards
from tests.methods import group as hand


def hints(returns, group=hand.GROUP, **kw):
  fields = dict(right=1.0, labels=True, words=('correct', 'incorrect')) | kw
  return teacher.queries(group, np.array(returns), hand.ENV, **fields)


def test_golden_hindsight():
  # Queries of the others, in order, and whether each was right; the idle one
  # has none.
  right = 'who wrote it where is Ann correct'
  wrong = 'who wrote who incorrect'
  assert hints([1.0, 0, 0]) == [
    f'{wrong} incorrect',
    f'{right} incorrect',
    f'{right} {wrong}',
  ]
  # Neither thoughts nor passages nor answers.
  assert not any('text of' in h or 'Bob' in h for h in hints([1.0, 0, 0]))


def test_a_failed_service_is_no_incorrect_attempt():
  assert hints([1.0, np.nan, 1]) == [None] * 3
  assert 'who wrote who' not in hints([1.0, np.nan, 0])[2]


def test_no_contrast_no_hint_and_a_control_of_labels():
  assert hints([1.0, 1, 1]) == hints([0.0, 0, 0]) == [None] * 3
  told = hints([1.0, 0, 0], labels=False)
  assert told[2].startswith('who wrote it where is Ann incorrect')


def test_only_queries_follow_the_teacher():
  c = sd_search.get_config('scale=0.3')
  checks.check(c)
  columns = c.teacher.columns
  assert (columns.distance, columns.alpha, columns.coef) == ('js', 0.5, 0.3)
  assert c.teacher.weights == 'live'
  assert c.algorithm.advantage == 'grpo'
  c.batch.lengths = (1024,)
  reward = Rewards(np.array([1, 0, 0], np.float32), np.ones(3, bool))
  batch = batching.of_step([hand.GROUP], reward, c, shards=1, seed=0)
  [asked] = teacher.ask(batch, c, hand.ENV, shards=1, seed=0)
  # The mean over the n tokens of queries, in a loss that is one over all N.
  N = sum(int(mask.sum()) for mask in batch.masks)
  n = sum(int((weight > 0).sum()) for weight in asked.weights)
  for t, weight in zip(batch.trajectories, asked.weights):
    np.testing.assert_allclose(weight[weight > 0], 0.3 * N / n, rtol=1e-6)
    own = np.repeat(
      [s.kind == 'search' and s.author == 'policy' for s in t.trained],
      [len(s.ids) for s in t.trained],
    )
    assert (weight > 0).tolist() == own.tolist()
