"""StepSearch: the release's arithmetic, and its two faults."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from configs.methods import step_search
from searchrl_jax import checks
from searchrl_jax.data.checks import DataError
from searchrl_jax.rewards import core
from tests.methods import group as hand
from tests.methods.group import CONTEXT, GROUP


def rewards(arg='', group=GROUP):
  c = step_search.get_config(arg)
  found = asyncio.run(core.combine(c.reward, [group], CONTEXT))
  return hand.credits(found, group), found.parts


def test_golden_as_written():
  # Searches: 0.6 (1/2 - 0) twice; 0.6 (0 - 0) and 0.6 (1/2 - 2/3) = -0.1.
  # Queries: both right, K = (1 + 1) / 2. "who wrote" has F1 2 (2/3) / (5/3) =
  # 0.8 with "who wrote it", "who" 2 (1/3) / (4/3) = 0.5: K = 0.8 / 2.
  # End: 1 + 0.618; 0.618 x 0.4 = 0.2472; 0.
  credit, _ = rewards()
  for found, wanted in zip(
    credit, [[0.3, 0.3, 1.618], [0, -0.1, 0.2472], [0]], strict=True
  ):
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_golden_as_released():
  # The code: reward = zeros; a function writes the steps into a view of it, and
  # 0.6 times the same view is added.
  step = np.array([0.5, 0.5, 0.0])
  reward = np.zeros(3)
  view = reward[:]
  view += step
  reward += 0.6 * view
  np.testing.assert_allclose(reward, 1.6 * step)
  # The last of the two queries counts: K = 0.5 / 2; 0.618 x 0.25 = 0.1545.
  credit, _ = rewards('version=as_released')
  for found, wanted in zip(
    credit,
    [[0.8, 0.8, 1.618], [0, 1.6 * (0.5 - 2 / 3), 0.1545], [0]],
    strict=True,
  ):
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_without_an_answer_the_end_is_minus_one_and_searches_earn_nothing():
  cut = hand.play(('who wrote it', 'ab'), answer=None)
  [credit], _ = rewards(group=(cut,))
  assert credit[-1] == -1 and not any(credit[:-1])


def test_a_passage_twice_in_a_search_is_redundant():
  # Gain 1/2, less 1/3: a of a x a came back; K = 1 / 2.
  twice = hand.play(('who wrote it', 'axa'), answer='Bob')
  [credit], _ = rewards(group=(twice,))
  np.testing.assert_allclose(credit, [0.6 * (1 / 2 - 1 / 3), 0.309], atol=1e-6)


# No more than a turn has room for.
WORDS = st.lists(
  st.sampled_from('who wrote it where is Ann x'.split()),
  min_size=1,
  max_size=20,
)
QUERIES = st.lists(WORDS.map(' '.join), min_size=1, max_size=3)


@settings(max_examples=25, deadline=None)
@given(QUERIES)
def test_a_further_query_never_lowers_k(queries):
  """As released it does: the last query of a look-up replaces a better one."""
  ks = [
    step_search.matched(hand.play(*((q, '') for q in queries[:n])), 'best')
    for n in range(len(queries) + 1)
  ]
  assert ks == sorted(ks) and 0 <= ks[-1] <= 1


def test_the_last_query_replaces_a_better_one_as_released():
  one, two = (
    hand.play(*((q, '') for q in queries))
    for queries in (['who wrote it'], ['who wrote it', 'who'])
  )
  ks = [step_search.matched(t, 'last') for t in (one, two)]
  assert ks == [0.5, 0.25]
  # A query like none of them replaces nothing.
  other = hand.play(('who wrote it', ''), ('zzz', ''))
  assert step_search.matched(other, 'last') == 0.5


def test_where_nothing_has_to_be_looked_up_no_query_earns():
  t = hand.play(('who wrote it', ''))
  question = core.dataclasses.replace(t.question, meta={'queries': ()})
  t = core.dataclasses.replace(t, question=question)
  assert step_search.matched(t, 'best') == 0.0


def test_what_data_it_needs():
  c = step_search.get_config()
  checks.check_data(c, [hand.QUESTION])
  lacking = core.dataclasses.replace(hand.QUESTION, meta={})
  with pytest.raises(DataError, match=r"meta\['queries'\].*config.reward.end"):
    checks.check_data(c, [lacking])
  checks.check_data(step_search.get_config('key=0'), [lacking])
  with pytest.raises(ValueError, match='version=.*as_written, as_released'):
    step_search.get_config('version=sound')
  assert step_search.get_config('scale=0.2').reward.progress.scale == 0.2
