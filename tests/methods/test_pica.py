"""PiCA: the release's scale, and what a potential promises."""

import asyncio

import numpy as np
import pytest

from configs.methods import pica
from searchrl_jax.rewards import core
from tests.methods import group as hand
from tests.methods.group import CONTEXT, GROUP


def credits(arg, group=GROUP):
  c = pica.get_config(arg)
  found = asyncio.run(core.combine(c.reward, [group], CONTEXT))
  return hand.credits(found, group)


def test_golden_values():
  # Phi: right 0, 1/2, 1; wrong 0, 0, 1/2. The outcome is 1 for the right one.
  for arg, scale in (('', 0.3), ('version=as_released', 1.3), ('scale=2', 2.0)):
    found = credits(arg)
    np.testing.assert_allclose(found[0], [scale / 2, scale / 2, 1], atol=1e-6)
    np.testing.assert_allclose(found[1], [0, scale / 2, 0], atol=1e-6)
    assert found[2] == [0]
  # As in the release, which scales what it has written in place already.
  reward = np.zeros(1)
  view = reward[:]
  view += 1.0
  reward += 0.3 * view
  assert reward == pytest.approx(1.3)


def test_repeated_searches_farm_a_level_alone():
  once, often = (
    hand.play(*[('who wrote it', 'a')] * n, answer='Bob') for n in (1, 3)
  )
  for kind, farmed in (('difference', False), ('level', True)):
    less, more = (sum(credits(f'kind={kind}', (t,))[0]) for t in (once, often))
    assert (more > less) == farmed, kind


def test_closed_it_adds_up_to_the_outcome():
  for found, outcome in zip(credits('closed=True'), (1, 0, 0), strict=True):
    assert sum(found) == pytest.approx(outcome)
  # Without, it pays for evidence that the answer did not need.
  assert [sum(x) for x in credits('')] == pytest.approx([1.3, 0.15, 0])
