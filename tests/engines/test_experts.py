"""The engine with experts: order and what shares the batch do not show."""

import asyncio
import dataclasses

import jax
import numpy as np
import pytest

from searchrl_jax.devices import sharding
from searchrl_jax.engines.core import Sampling, WeightsUpdate
from searchrl_jax.lookup import ConfigError
from searchrl_jax.models import decoder
from searchrl_jax.models.experts import Sizes
from tests.engines import common
from tests.engines import test_jax_engine as base
from tests.engines.contract import EngineContract, bits, prompt

pytestmark = [pytest.mark.slow, pytest.mark.exact]

# The first of three layers has none.
CFG = dataclasses.replace(
  common.CFG,
  family='qwen3_moe',
  n_layers=3,
  moe=Sizes(8, 2, 24, normalised=True, dense=(0,)),
)


class TestContract(EngineContract):
  pass


async def sampled(engine, others: int):
  """What one handle samples in two turns, beside others."""
  handle = engine.open(prompt(engine, 9))
  beside = [engine.open(prompt(engine, 5 + i, seed=i)) for i in range(others)]
  rest = [
    engine.generate(h, Sampling(max_tokens=9, seed=i))
    for i, h in enumerate(beside)
  ]
  own = engine.generate(handle, Sampling(max_tokens=7, seed=3))
  *_, first = await asyncio.gather(*rest, own)
  engine.append(handle, range(5))
  later = await engine.generate(handle, Sampling(max_tokens=6, seed=4))
  ids = list(handle.ids)
  for h in (handle, *beside):
    engine.close(h)
  return ids, bits(first), bits(later), later


def test_others_change_no_bit(engine):
  *alone, _ = asyncio.run(sampled(engine, 0))
  *beside, _ = asyncio.run(sampled(engine, 6))
  assert alone == beside


def test_its_log_probs_are_those_of_the_decoder(engine):
  ids, *_, later = asyncio.run(sampled(engine, 2))
  want = base.full_logps(ids, cfg=CFG)
  at = np.arange(len(ids) - 6, len(ids))
  np.testing.assert_allclose(later.logps, want[at - 1, later.ids], atol=1e-5)


async def recorded(engine):
  """Handles whose routes were recorded: cut, forked, evicted, beside others."""
  first = engine.open(prompt(engine, 9))
  others = [engine.open(prompt(engine, 5 + i, seed=i)) for i in range(6)]
  sample = lambda h, n: engine.generate(h, Sampling(max_tokens=n, seed=n))
  await sample(first, 9)
  child = engine.fork(first)
  engine.truncate(child, 14)
  engine.append(child, range(7))
  await asyncio.gather(sample(child, 6), *(sample(h, 5) for h in others))
  engine.append(first, range(3))
  await sample(first, 4)
  handles = first, child, *others
  return [(list(h.ids), await engine.routes(h)) for h in handles]


@pytest.mark.parametrize('mesh', [None, (2, 1, 2)])
def test_routes_are_those_that_the_decoder_chooses(engine, mesh):
  """Of all tokens but the last; recording them changes no bit."""
  made = (
    {}
    if mesh is None
    else {'mesh': sharding.make_mesh(*mesh, devices=jax.devices()[:4])}
  )
  many = common.make_engine(cfg=CFG, record_routes=True, **made)
  many.warmup()
  found = asyncio.run(recorded(many))
  assert many.stats()['evictions'] > 0
  params = common.make_params(cfg=CFG)
  size = len(found), max(len(ids) for ids, _ in found)
  rows, chosen = np.zeros(size, int), np.full((*size, 2, 2), -1)
  for i, (ids, routes) in enumerate(found):
    assert routes.shape == (len(ids), 2, 2)  # the first layer has none
    assert (routes[:-1] >= 0).all() and (routes[-1] == -1).all()
    rows[i, : len(ids)], chosen[i, : len(ids)] = ids, routes
  replay = jax.jit(decoder.replayed, static_argnums=1)
  assert not np.asarray(replay(params, CFG, rows, chosen)[1]).any()
  if mesh is None:
    assert (
      asyncio.run(sampled(many, 2))[:3] == asyncio.run(sampled(engine, 2))[:3]
    )
  # A sync drops what it has of a handle.
  handle = many.open(prompt(many, 9))
  asyncio.run(many.generate(handle, Sampling(max_tokens=3)))
  asyncio.run(many.sync(WeightsUpdate(params, 1)))
  asyncio.run(many.resume())
  assert (asyncio.run(many.routes(handle)) == -1).all()
  assert asyncio.run(engine.routes(engine.open(prompt(engine, 9)))) is None


@pytest.mark.long
@pytest.mark.parametrize('shape', [(2, 2, 2), (1, 1, 4)])
def test_on_a_mesh(engine, shape):
  """Experts lie along tensor; each device has all tokens of its rows."""
  mesh = sharding.make_mesh(*shape, devices=jax.devices()[: np.prod(shape)])
  params = common.make_params(cfg=CFG)
  params = jax.device_put(params, decoder.param_shardings(CFG, mesh))
  many = common.make_engine(cfg=CFG, mesh=mesh, params=params)
  assert many.checksums() == engine.checksums()
  ids, *_, got = asyncio.run(sampled(many, 2))
  want_ids, *_, want = asyncio.run(sampled(engine, 2))
  assert ids == want_ids
  np.testing.assert_allclose(got.logps, want.logps, atol=1e-5)


def test_slots_that_the_devices_do_not_divide_are_refused():
  with pytest.raises(ConfigError, match='slots=4.* of 8'):
    common.make_engine(cfg=CFG, mesh=sharding.make_mesh(8, 1, 1))
