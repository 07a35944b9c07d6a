"""On a mesh: every row where its slot is, every weight where it is used."""

import asyncio
import re

import jax
import numpy as np
import pytest

from searchrl_jax.devices import sharding
from searchrl_jax.engines.core import Sampling
from searchrl_jax.engines.jax import decode
from searchrl_jax.models import decoder
from searchrl_jax.types import Prompt
from tests.engines.common import CFG, make_engine, make_params

SHAPES = ((1, 8, 1), (4, 1, 2), (2, 2, 2))
pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(jax.device_count() < 8, reason='needs eight devices'),
]


def engine_on(mesh):
  """Its weights come from the layout that training has."""
  params = make_params()
  if mesh is not None:
    params = jax.device_put(params, decoder.param_shardings(CFG, mesh))
  return make_engine(mesh=mesh, params=params, slots=8, prefill_rows=8)


async def trajectories(engine):
  """20 of 7 questions, two turns each: shared prompts, pauses, evictions."""

  async def one(i):
    rng = np.random.default_rng(i // 3)
    ids = rng.integers(0, 90, 21 + i // 3).tolist()
    handle, out = engine.open(Prompt(tuple(ids))), []
    for turn in range(2):
      out.append(
        await engine.generate(
          handle, Sampling(max_tokens=5 + i % 4, seed=2 * i + turn)
        )
      )
      engine.append(handle, rng.integers(0, 90, 3 + i % 5))
      await asyncio.sleep(0)
    out.append(await engine.logps(handle.ids))
    engine.close(handle)
    return out

  return await asyncio.gather(*map(one, range(20)))


@pytest.fixture(scope='module')
def alone():
  engine = engine_on(None)
  return asyncio.run(trajectories(engine)), engine.checksums()


@pytest.mark.long
@pytest.mark.parametrize('shape', SHAPES)
def test_it_samples_what_one_device_samples(shape, alone):
  engine = engine_on(sharding.make_mesh(*shape))
  engine.warmup()
  compiled = []
  jax.monitoring.register_event_duration_secs_listener(
    lambda name, *_, **about: (
      compiled.append(about)
      if name == '/jax/core/compile/backend_compile_duration'
      else None
    )
  )
  try:
    got = asyncio.run(trajectories(engine))
    assert compiled == []
  finally:
    jax.monitoring.clear_event_listeners()
  stats = engine.stats()
  assert stats['evictions'] > 0 and stats['prefix_hits'] > 0
  for (*a, a_score), (*b, b_score) in zip(got, alone[0], strict=True):
    for x, y in zip(a, b, strict=True):
      assert x.ids.tolist() == y.ids.tolist()
      np.testing.assert_allclose(x.logps, y.logps, atol=1e-5)
    np.testing.assert_allclose(a_score, b_score, atol=1e-5)
  assert engine.checksums() == alone[1]


COLLECTIVE = re.compile(
  r' = (.*?) ((?:all|reduce-scatter|collective|ragged)-[\w-]+)\((.*)'
)


@pytest.mark.long
@pytest.mark.parametrize('shape', SHAPES)
def test_no_weight_and_no_cache_travels(shape):
  device = engine_on(sharding.make_mesh(*shape))._device
  programs, tensor = device._programs, shape[2]
  weights, (caches,) = device._weights, device._caches
  held = {
    tuple(s)
    for x in jax.tree.leaves((weights, caches))
    if x.ndim > 1
    for s in (x.shape, x.sharding.shard_shape(x.shape))
  }
  rows = device._arrays([], device._shape.rows(16), 16)
  # XLA's compiler for TPUs gathers the head unless its product is in parts.
  lowered = programs.decode.lower(weights, caches, decode.idle_state(8))
  part = rf'\[{{}}, {{"tensor"}}\]> : tensor<\d+x{CFG.vocab_size}xf32>'
  assert bool(re.search(part, lowered.as_text())) == (tensor > 1)
  for program, args in (
    (programs.decode, (caches, decode.idle_state(8))),
    (programs.fresh, (caches, *rows)),
    (programs.extend, (caches, *rows)),
    (programs.score, rows[:1]),
  ):
    text = program.lower(weights, *args).compile().as_text()
    found = COLLECTIVE.findall(text)
    assert bool(found) == (tensor > 1), found
    for result, name, rest in found:
      # Sums of activations, and the logits whole, among neighbours on the
      # last axis: those that share the heads of the same rows.
      logits = name.startswith('all-gather') and f',{CFG.vocab_size}]' in result
      assert name.startswith('all-reduce') or logits, (result, name)
      assert f'replica_groups=[{8 // tensor},{tensor}]<=[8]' in rest, rest
      for dims in re.findall(r'\[([\d,]+)\]', result):
        assert tuple(map(int, dims.split(','))) not in held, (result, name)
