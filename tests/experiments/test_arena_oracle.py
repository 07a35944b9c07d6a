"""The assay's credit by hand, and that shuffling keeps its sum."""

import numpy as np

from experiments.arena import oracle
from tests.methods import group as hand


def credited(name: str, **fields):
  kw = oracle.ARMS[name]['algorithm.advantage_kw'] | fields
  s, _ = hand.arrays()
  found = oracle.credited([1, 0, 0], [True] * 3, [0] * 3, s, **kw)
  return hand.by_turn(s, found)


def test_golden_values():
  # Outcome, 1 0 0: 1.1547, -.57735 x 2. Nothing found before: right finds a,
  # wrong nothing and then a, idle answers: 1 0 1 0, mean .5, deviation .57735:
  # +-.86603. a found before: right finds b, wrong answers: +-.70711. Both
  # found: right's answer is alone, 0.
  a, b, c, d = 1.1547, 0.57735, 0.86603, 0.70711
  wanted = [[a + c, a + d, a], [-b - c, -b + c, -b - d], [-b - c]]
  for found, row in zip(credited('oracle'), wanted, strict=True):
    np.testing.assert_allclose(found, row, atol=1e-4)


def test_shuffling_keeps_the_sum_of_a_trajectory():
  exact, shuffled = credited('oracle'), credited('shuffled')
  assert shuffled != exact
  for x, y in zip(exact, shuffled, strict=True):
    np.testing.assert_allclose(sorted(x), sorted(y), atol=1e-6)


def test_a_fact_that_the_policy_has_read_needs_no_search(monkeypatch):
  monkeypatch.setitem(hand.QUESTION.meta, 'recalled', (False, True))
  _, new = oracle.found(hand.arrays()[0])
  assert new.tolist() == [1, 0, 0, 0, 1, 0, 0]  # a, and not b
