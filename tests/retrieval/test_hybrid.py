import numpy as np
import pytest

from retrieval.index.hybrid import Hybrid


class Listed:
  """An index that answers every query with one list."""

  name = 'listed'

  def __init__(self, ids, count=10, asked=None):
    self._ids, self._count = ids, count
    self.asked = [] if asked is None else asked

  @property
  def parameters(self):
    return {'name': self.name, 'ids': self._ids}

  def __len__(self):
    return self._count

  def search(self, queries, k):
    self.asked.append((list(queries), k))
    k = min(k, self._count)
    row = np.full(k, -1, np.int64)
    row[: len(self._ids)] = self._ids[:k]
    scores = np.where(row < 0, -np.inf, -np.arange(k, dtype=np.float32))
    return np.tile(row, (len(queries), 1)), np.tile(
      scores.astype(np.float32), (len(queries), 1)
    )


def ranked(hybrid, k=10):
  ids, scores = hybrid.search(['q'], k)
  return [(i, s) for i, s in zip(ids[0].tolist(), scores[0].tolist()) if i >= 0]


def test_golden():
  # constant 60, ranks from 1:
  #   4: 1/61 + 1/62 = 0.0163934 + 0.0161290 = 0.0325225
  #   2: 1/62 + 1/63 = 0.0161290 + 0.0158730 = 0.0320020
  #   7: 1/61 (second list), 5: 1/63 (first list)
  found = ranked(Hybrid([Listed([4, 2, 5]), Listed([7, 4, 2])]))
  assert [i for i, _ in found] == [4, 2, 7, 5]
  assert [s for _, s in found] == pytest.approx(
    [0.0325225, 0.0320020, 0.0163934, 0.0158730], abs=1e-7
  )


def test_ties_in_corpus_order_whatever_the_lists_order():
  # Each of 3, 6, 9 holds ranks 1, 2 and 3 once.
  lists = [Listed([9, 3, 6]), Listed([6, 9, 3]), Listed([3, 6, 9])]
  for turned in (lists, lists[::-1], [lists[1], lists[2], lists[0]]):
    found = ranked(Hybrid(turned))
    assert [i for i, _ in found] == [3, 6, 9]
    assert len({s for _, s in found}) == 1


def test_missing_passages_add_nothing():
  ids, scores = Hybrid([Listed([]), Listed([5])]).search(['q', 'r'], 3)
  assert ids.tolist() == [[5, -1, -1]] * 2
  np.testing.assert_allclose(scores[:, 0], 1 / 61, rtol=1e-6)
  assert (scores[:, 1:] == -np.inf).all()
  ids, scores = Hybrid([Listed([])]).search(['q'], 2)
  assert ids.tolist() == [[-1, -1]]


@pytest.mark.parametrize('k', [1, 3, 10, 10**9])
def test_each_is_asked_once_for_depth(k):
  asked = []
  lists = [Listed([1, 2, 3, 4], asked=asked), Listed([4], asked=asked)]
  ids, _ = Hybrid(lists, depth=2).search(['a', 'b'], k)
  assert asked == [(['a', 'b'], 2)] * 2
  assert ids.shape == (2, min(k, 10))
  # 4 is first in the second list; 3 lies below the depth of the first.
  assert ids[0].tolist()[:3] == [1, 4, 2][:k]


def test_parameters_name_the_parts():
  lists = [Listed([1]), Listed([2])]
  parameters = Hybrid(lists, depth=5).parameters
  assert parameters == {
    'name': 'hybrid',
    'constant': 60,
    'depth': 5,
    'indexes': [{'name': 'listed', 'ids': [1]}, {'name': 'listed', 'ids': [2]}],
  }
