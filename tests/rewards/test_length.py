"""The soft punishment of length, with its arithmetic."""

import asyncio

from ml_collections import ConfigDict
import numpy as np
import pytest

from searchrl_jax.rewards import core
from searchrl_jax.types import Question, Segment, Trajectory


def wrote(*lengths, end='answer'):
  """The policy wrote so many tokens in each turn, between observations."""
  segments = [Segment(np.zeros(50, np.int32), 'prompt', 'other')]
  for n in lengths:
    segments += [
      Segment(np.zeros(n, np.int32), 'policy', 'think', train=True),
      Segment(np.zeros(30, np.int32), 'environment', 'information'),
    ]
  return Trajectory(Question('q', ''), tuple(segments), (), end)


def overlong(*trajectories, limit=20, cache=8):
  config = ConfigDict(
    dict(long=dict(fn='length.overlong', weight=1.0, limit=limit, cache=cache))
  )
  return asyncio.run(core.combine(config, [trajectories], core.RewardContext()))


def test_golden_overlong():
  # Free to 20 - 8 = 12; 14 is 2 / 8 over; 20 is 8 / 8; more is no worse.
  found = overlong(
    wrote(3), wrote(5, 7), wrote(14), wrote(9, 7), wrote(20), wrote(40)
  )
  np.testing.assert_array_equal(found.value, [0, 0, -0.25, -0.5, -1, -1])


def test_a_failed_trajectory_is_not_punished():
  found = overlong(wrote(40, end='failed'), wrote(40))
  assert found.valid.tolist() == [False, True]
  assert found.value.tolist() == [0, -1]


@pytest.mark.parametrize('cache', [0, -1, 21])
def test_a_cache_that_cannot_be_is_refused(cache):
  with pytest.raises(core.RewardError, match=f'cache={cache}.*limit=20'):
    overlong(wrote(1), cache=cache)
