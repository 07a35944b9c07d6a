"""Sizes of prefill calls, from the recipes' own configs."""

import pytest

from configs import search_r1, ssp, ssrl, ttrl, wiki_nq, zerosearch
from searchrl_jax.engines.jax import decode


def together(c, tokens: int, parts: int = 1) -> int:
  """How many pieces of `tokens` one prefill call takes."""
  e = c.engine
  shape = decode.Shape(e.slots, e.max_len, e.chunk, e.prefill_rows, parts)
  return shape.rows(decode.fit(shape.widths, min(tokens, shape.widths[-1])))


@pytest.mark.parametrize('module', [search_r1, ssp, wiki_nq, zerosearch])
def test_full_size_recipes_prefill_observations_together(module):
  c = module.get_config('model=/m')
  # Of those longer than a call is wide, in pieces.
  tokens = min(c.env.max_observation_tokens, 512)
  assert 8 <= together(c, tokens) <= 16
  before = c.engine.prefill_rows
  c.env.max_observation_tokens //= 2  # as --config.env.... does
  assert before / 2 - 1 <= c.engine.prefill_rows <= before / 2


@pytest.mark.parametrize('module', [ssrl, ttrl])
def test_full_size_recipes_prefill_prompts_together(module):
  assert together(module.get_config('model=/m'), 512) >= 15


def test_parts_share_a_call_evenly():
  c = search_r1.get_config('model=/m')
  assert together(c, 500) == 15 and together(c, 500, parts=4) == 12
  assert together(c, 500, parts=8) == 8 and together(c, 32, parts=8) == 248
