"""Levels of the golden answer, against the model called on each sequence."""

import dataclasses
import functools
import math

import numpy as np
import pytest

from searchrl_jax.learn import batching, potential, teacher
from searchrl_jax.text import structure
from tests.learn import test_teacher as by_hand
from tests.methods import group as hand


def config(**kw):
  c = by_hand.config(**kw)
  c.algorithm.advantage = 'configs.methods.trace.with_levels'
  return c


def levels(batch, c):
  """(B Levels, metrics) by the tiny model of test_teacher."""
  [asked] = teacher.ask(batch, c, hand.ENV, shards=1, seed=3)
  u = by_hand.updater()
  assert asked.name == 'gold'
  scored = u.outputs(by_hand.params(), asked.minibatches)
  return asked.read(scored, None)


@functools.cache
def mean(text, gold, first=1.0):
  tok = hand.ENV.tokenizer
  ids = tok.encode(f' {gold}')
  whole = np.array([*text, *tok.encode_template('<answer>'), *ids])
  own = by_hand.logps(whole)[-len(ids) :]
  weights = [first if n < 3 else 1.0 for n in range(len(ids))]
  return np.average(own, weights=weights)


def cuts(t):
  """What had been read before the first turn, and after each observation."""
  ids, out, n = by_hand.ids_of(t), [], 0
  for s in t.trained:
    n += len(s.ids)
    if s.author == 'prompt' or s.kind == 'information':
      out.append(tuple(ids[:n].tolist()))
  return out


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize('aliases, first', [(1, 1.0), (0, 3.0)])
def test_levels_are_those_of_the_model_called_on_each_history(aliases, first):
  named = dataclasses.replace(hand.QUESTION, answers=('Ann', 'Anna Bo'))
  group = tuple(dataclasses.replace(t, question=named) for t in hand.GROUP)
  fields = {'teacher.gold.aliases': aliases, 'teacher.gold.first': first}
  c = config(**fields)
  batch = by_hand.step((group,), (1, 0, 0), c)
  found, metrics = levels(batch, c)
  golds = named.answers[: aliases or None]
  for t, own in zip(group, found, strict=True):
    wanted = [
      np.logaddexp.reduce([mean(text, g, first) for g in golds])
      for text in cuts(t)
    ]
    np.testing.assert_allclose(own.real, wanted, atol=2e-5)
    assert not own.swapped.size
  # The prompt is scored once for the group: 1 + 2 + 2 histories.
  counts = {'gold_too_long': 0, 'gold_unswapped': 0}
  assert metrics == counts | {'gold_rows': 5 * len(golds)}


@pytest.mark.slow
def test_swapped_levels_are_of_other_observations_in_the_same_place():
  c = config(**{'teacher.gold.swaps': 2})
  # RIGHT has read ax, by; WRONG xz, axz; the other question's ab.
  batch = by_hand.step(c=c)
  found, metrics = levels(batch, c)
  alone = sum(np.isnan(own.swapped).sum() for own in found)
  assert metrics['gold_unswapped'] == alone > 0
  reads = {
    i: [s for s in t.trained if s.kind == 'information']
    for i, t in enumerate(batch.trajectories)
  }
  # In place of ax stands what has neither a nor x: by alone, but that is its
  # own. So nothing: NaN. In place of by: xz, axz, and not ab.
  assert math.isnan(found[0].swapped[0])
  before = by_hand.ids_of(hand.RIGHT)[: len(cuts(hand.RIGHT)[2])]
  before = before[: -len(reads[0][1].ids)]
  others = [(*before.tolist(), *s.ids.tolist()) for s in reads[1]]
  wanted = np.mean([mean(ids, 'Ann') for ids in others])
  np.testing.assert_allclose(found[0].swapped[1], wanted, atol=2e-5)


def test_what_does_not_fit_keeps_the_level_before_it():
  c = config(**{'batch.lengths': (64, 192)})
  c.batch.tokens = 192
  wide = by_hand.step((hand.GROUP,), (1, 0, 0), config())
  [asked] = teacher.ask(wide, c, hand.ENV, shards=1, seed=3)
  score = [[np.full(b.ids.shape, -2.0) for b in m] for m in asked.minibatches]
  found, metrics = asked.read(score, None)
  fits = [len(text) + len('<answer> Ann') <= 192 for text in cuts(hand.RIGHT)]
  assert fits == [True, True, False]
  np.testing.assert_allclose(found[0].real, [-2, -2, -2])
  assert metrics['gold_too_long'] == 2  # of WRONG too
  # Nothing is scored of what is in no batch.
  lost = dataclasses.replace(wide, kept=np.array([True, True, False]))
  [asked] = teacher.ask(lost, c, hand.ENV, shards=1, seed=3)
  found, _ = asked.read(score, None)
  assert not found[2].real.size


def test_steps_lie_on_the_turn_that_searched():
  masks = batching.masks(hand.GROUP)
  s = structure.of(hand.GROUP, masks)
  told = [
    potential.Levels(np.array([0.0, 1.0, 3.0]), np.zeros(2)),
    potential.Levels(np.array([0.0, math.nan, 2.0]), np.zeros(2)),
    potential.Levels(np.array([]), np.array([])),
  ]
  found = potential.steps(told, s, lambda g: np.diff(g.real))
  # RIGHT: 1, 2, and the answer nothing. WRONG: both steps are unknown.
  np.testing.assert_allclose(found, [1, 2, 0, 0, 0, 0, 0])
