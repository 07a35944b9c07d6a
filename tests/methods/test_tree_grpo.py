"""Tree-GRPO: the sum of two comparisons by hand, and what the release adds."""

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from configs.methods import tree_grpo
from searchrl_jax import checks
from searchrl_jax.learn import batching
from searchrl_jax.lookup import ConfigError
from searchrl_jax.text import structure
from tests.rollout.test_samplers import play
from tests.text.test_structure import searching

TREES = (0, 0, 0, 3, 3, 3)


def credit(arg, rewards, trees=TREES, valid=None, ids=None, **fields):
  rows = [
    searching('a', sample=i, meta={'tree': t}) for i, t in enumerate(trees)
  ]
  kw = tree_grpo.get_config(arg).algorithm.advantage_kw.to_dict() | fields
  found = structure.of(rows, batching.masks(rows))
  valid = np.ones(len(rows), bool) if valid is None else np.array(valid)
  ids = np.zeros(len(rows), int) if ids is None else np.array(ids)
  return tree_grpo.advantage(np.array(rewards, float), valid, ids, found, **kw)


def released(rewards, cells):
  """The release's normaliser: a lone row has mean 0 and deviation 1."""
  rewards, cells = np.array(rewards, float), np.array(cells)
  out = np.zeros(len(rewards))
  for cell in set(cells.tolist()):
    own = rewards[cells == cell]
    mean, std = (own.mean(), own.std(ddof=1)) if len(own) > 1 else (0, 1)
    out[cells == cell] = (own - mean) / (std + 1e-6)
  return out


def test_golden_values():
  # All leaves, 1 0 0 1 1 0: mean .5, deviation sqrt(6 / 4 / 5) = .54772, z
  # +-.91287. First tree, 1 0 0: mean 1/3, sqrt(1/3) = .57735, z 1.15470 and
  # -.57735. Second, 1 1 0: .57735 twice and -1.15470.
  a, b, c = 0.91287, 1.15470, 0.57735
  rewards = [1, 0, 0, 1, 1, 0]
  wanted = [a + b, -a - c, -a - c, a + c, a + c, -a - b]
  np.testing.assert_allclose(credit('', rewards), wanted, atol=1e-4)
  both = released(rewards, [0] * 6) + released(rewards, TREES)
  np.testing.assert_allclose(credit('', rewards), both, atol=1e-5)
  half = credit('scale=0.5', rewards)
  np.testing.assert_allclose(half[:2], [a + b / 2, -a - c / 2], atol=1e-4)
  # The second normalisation undoes the first: trees alone are left.
  np.testing.assert_allclose(
    credit('version=tree_2norm', rewards), [b, -c, -c, c, c, -b], atol=1e-4
  )


def test_questions_are_compared_apart():
  # Samples, and so trees, have the same numbers in each question.
  rewards = [1, 0, 0, 1, 1, 0], [0, 0, 1, 0, 0, 0]
  for arg in ('', 'version=tree_2norm'):
    both = credit(arg, sum(rewards, []), TREES * 2, ids=[0] * 6 + [1] * 6)
    alone = [credit(arg, r) for r in rewards]
    np.testing.assert_allclose(both, np.concatenate(alone), atol=1e-5)
  dealt = tree_grpo._dealt(
    np.array([0, 1, 2, 3]), np.array([0, 0, 1, 1]), 'abcd'
  )
  assert {*dealt[:2]} == {0, 1} and {*dealt[2:]} == {2, 3}


@settings(max_examples=30, deadline=None)
@given(
  st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=6, max_size=6),
  st.floats(-3, 3),
)
def test_a_constant_added_to_all_rewards_changes_nothing(rewards, shift):
  """As released it does where one leaf of a tree is left."""
  valid = [True, False, False, True, True, True]
  for arg in ('', 'version=tree_2norm', 'credit=shuffled'):
    a = credit(arg, rewards, valid=valid)
    b = credit(arg, np.add(rewards, shift), valid=valid)
    np.testing.assert_allclose(a, b, atol=1e-3)
  assert not a[[1, 2]].any()
  lone = [released(r, [0])[0] for r in ([1.0], [2.0])]
  assert lone[1] - lone[0] == pytest.approx(1, abs=1e-3)


def test_shuffled_trees_are_as_large_and_other_ones():
  rewards = [1, 1, 1, 0, 0, 0]
  # Within its trees all earn the same; among leaves dealt anew they do not.
  between = credit('scale=0.0', rewards)
  np.testing.assert_array_equal(credit('', rewards), between)
  found = credit('credit=shuffled', rewards)
  assert (found != between).any()
  dealt = tree_grpo._dealt(
    np.array(TREES), np.zeros(6, int), [f'q/solver/{i}' for i in range(6)]
  )
  assert sorted(dealt) == sorted(TREES)


def test_leaves_of_the_sampler_say_which_tree_they_are_of():
  groups = play('tree').groups
  rows = [t for g in groups for t in g]
  ids = np.repeat(np.arange(len(groups)), 6)
  found = structure.of(rows, batching.masks(rows))
  rewards = np.tile([1.0, 0, 0, 1, 1, 0], len(groups))
  kw = tree_grpo.get_config().algorithm.advantage_kw.to_dict()
  valid = np.ones(len(rows), bool)
  credits = tree_grpo.advantage(rewards, valid, ids, found, **kw)
  one = credit('', [1, 0, 0, 1, 1, 0])
  np.testing.assert_allclose(credits.reshape(-1, 6), [one] * len(groups))


def test_what_is_refused():
  c = tree_grpo.get_config('trees=2,leaves=4')
  assert c.rollout.group == 8
  checks.check(c)
  c.rollout.sampler = 'chains'
  with pytest.raises(ConfigError, match="sampler='chains'"):
    checks.check(c)
  with pytest.raises(ConfigError, match='group=4, trees=2, rounds=2'):
    checks.check(tree_grpo.get_config('leaves=2,rounds=2'))
