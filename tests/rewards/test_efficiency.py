"""What a trajectory is compared by."""

import dataclasses

from searchrl_jax.rewards import efficiency
from searchrl_jax.rewards.core import RewardContext
from searchrl_jax.types import Question
from tests.methods.played import ENV, after, attempt, says, search


def attempts(*group, credit='own', step=0, **fields):
  found = []

  def score(trajectory, one):
    found.append(one)
    return {'value': 0.0}

  context = RewardContext(step, env=ENV)
  rewards = efficiency.compared([group], context, score, credit=credit)
  return found, rewards


def test_the_fewest_are_those_of_right_trajectories_that_did_not_fail():
  lost = dataclasses.replace(after(1), end='failed')
  found, rewards = attempts(after(3), after(0, 'Bob'), lost, after(2))
  assert rewards.valid.tolist() == [True, True, False, True]
  assert [(a.right, a.searches, a.fewest) for a in found] == [
    (True, 3, 2), (False, 0, 2), (True, 2, 2),
  ]  # fmt: skip
  [found], _ = attempts(after(0, 'Bob'))
  assert found == efficiency.Attempt(False, 0, None, None)


def test_two_queries_of_one_search_count_as_two():
  [found], _ = attempts(attempt(search('a & b'), says('Ann')))
  assert found.searches == 2


def test_controls():
  group = [after(n, sample=i) for i, n in enumerate((1, 2, 4))]
  group += [after(n, 'Bob', i + 3) for i, n in enumerate((0, 3))]
  drawn = set()
  for step in range(20):
    found, _ = attempts(*group, credit='shuffled', step=step)
    assert all(a.searches in (1, 2, 4) for a in found[:3])
    assert all(a.searches in (0, 3) for a in found[3:])
    assert {a.fewest for a in found} == {1}
    drawn.add(tuple(a.searches for a in found))
  assert len(drawn) > 5
  # Of three facts one is recalled: two searches are needed.
  asked = Question('q', 'w?', ('Ann',), meta={'recalled': (False, True, False)})
  [found], _ = attempts(attempt(says('Ann'), question=asked), credit='oracle')
  assert (found.needed, found.fewest) == (2, 0)
