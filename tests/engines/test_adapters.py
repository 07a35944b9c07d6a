"""Syncs of adapters alone, to both engines."""

import asyncio
import dataclasses
import functools

import jax
import numpy as np
import pytest

from searchrl_jax.engines.core import (
  EngineError,
  Sampling,
  SyncError,
  WeightsUpdate,
)
from searchrl_jax.engines.vllm import client
from searchrl_jax.engines.weights import publication, sync
from searchrl_jax.models import decoder, lora
from tests.engines import common, fake_vllm
from tests.engines.contract import once, prompt

pytestmark = pytest.mark.slow

LORA = decoder.Lora(4, 4.0, ('q', 'o', 'down'), 'float32')
CFG = dataclasses.replace(common.CFG, lora=LORA)


def adapters(seed):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: x + rng.normal(0, 0.1, x.shape).astype(np.float32),
    lora.init(CFG, jax.random.key(seed)),
  )


def whole(seed):
  return lora.join(adapters(seed), common.make_params())


@pytest.mark.long
def test_the_sampler_takes_adapters_alone():
  engine = common.make_engine(params=whole(0), cfg=CFG)
  forward, canary = sync.forward_logps(CFG), [*range(30, 60)]
  reports = [
    asyncio.run(
      sync.sync_and_verify(
        engine,
        whole(seed) if kind == 'full' else adapters(seed),
        seed,
        canary,
        functools.partial(forward, whole(seed)),
        1e-4,
        kind,
      )
    )
    for seed, kind in ((1, 'full'), (2, 'adapter'))
  ]
  assert reports[1].checksums == sync.checksums(adapters(2))
  size = sum(x.nbytes for x in jax.tree.leaves(adapters(2)))
  base = sum(x.nbytes for x in jax.tree.leaves(common.make_params()))
  assert [r.bytes for r in reports] == [base + size, size]
  start = prompt(engine).ids
  got = asyncio.run(once(engine, start, Sampling(max_tokens=8)))
  fresh = common.make_engine(params=whole(2), cfg=CFG)
  want = asyncio.run(once(fresh, start, Sampling(max_tokens=8)))
  np.testing.assert_array_equal(got.ids, want.ids)
  np.testing.assert_array_equal(got.logps, want.logps)


def test_the_sampler_refuses_an_adapter_of_another_shape():
  engine = common.make_engine(params=whole(0), cfg=CFG)
  before = engine.checksums()
  bad = adapters(1)
  bad['layers'].pop('o_lora_b')
  with pytest.raises(SyncError, match="'layers/o_lora_b'"):
    asyncio.run(engine.sync(WeightsUpdate(bad, 1, 'adapter')))
  assert engine.checksums() == before and engine.version == 0


@pytest.fixture
def fake():
  fake = fake_vllm.server()
  yield fake
  fake.kill()


async def load(engine, version, kind, seed=None):
  seed = version if seed is None else seed
  params = whole(seed) if kind == 'full' else adapters(seed)
  report = await engine.sync(WeightsUpdate(params, version, kind))
  await engine.resume()
  return report


@pytest.mark.long
@pytest.mark.slow
def test_a_server_is_sent_adapters_alone_and_all_when_it_comes_back(
  fake, tmp_path
):
  engine = fake_vllm.make([fake], tmp_path, CFG)
  start = prompt(engine)

  async def main():
    with pytest.raises(EngineError, match='full sync'):
      await load(engine, 1, 'adapter')
    await load(engine, 1, 'full')
    del fake.calls[:]
    report = await load(engine, 2, 'adapter')
    assert report.checksums == sync.checksums(adapters(2))
    assert report.bytes == sum(x.nbytes for x in jax.tree.leaves(adapters(2)))
    assert 'searchrl_load' not in fake.calls
    assert fake.calls.count('load_lora_adapter') == 1 == len(fake.adapters)
    done = await once(engine, start.ids, Sampling(max_tokens=4))
    fake_vllm.check(start.ids, done)
    assert fake.asked[-1]['model'] in fake.adapters
    folder = tmp_path / 'published'
    assert (folder / '00000001').exists()  # the base
    assert [p.name for p in (folder / 'adapters').iterdir()] == ['00000002']
    fake.kill()
    fake.start()
    del fake.calls[:]
    done = await once(engine, start.ids, Sampling(max_tokens=4))
    fake_vllm.check(start.ids, done)
    assert set(done.versions.tolist()) == {2}
    assert {'searchrl_load', 'load_lora_adapter'} <= {*fake.calls}
    await engine.shutdown()
    assert not [*(folder / 'adapters').iterdir()]

  asyncio.run(main())


@pytest.mark.slow
def test_a_server_with_another_adapter_stops_the_run(
  fake, tmp_path, monkeypatch
):
  engine, save = fake_vllm.make([fake], tmp_path, CFG), lora.save

  async def main():
    await load(engine, 1, 'full')
    with monkeypatch.context() as m:
      other = lambda path, cfg, _, **kw: save(path, cfg, adapters(9), **kw)
      m.setattr(publication.lora, 'save', other)
      with pytest.raises(SyncError, match='layers/q_lora_a'):
        await load(engine, 2, 'adapter')
    await load(engine, 2, 'adapter')
    await engine.shutdown()

  asyncio.run(main())


def test_ranks_that_a_server_takes():
  assert client.lora_flags(None) == {}
  assert client.lora_flags(LORA)['max_lora_rank'] == 8
  with pytest.raises(EngineError, match='rank=600'):
    client.lora_flags(dataclasses.replace(LORA, rank=600))
