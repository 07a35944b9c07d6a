"""Adapters on a real server: loaded alone, verified, and lost with it."""

import asyncio
import dataclasses
import functools
import os
import signal

import jax
import numpy as np
import pytest

from searchrl_jax import train
from searchrl_jax.engines.core import Sampling, SyncError, WeightsUpdate
from searchrl_jax.engines.vllm import client
from searchrl_jax.engines.vllm.launcher import start_sidecar
from searchrl_jax.engines.vllm.servers import Server
from searchrl_jax.engines.weights import sync
from searchrl_jax.models import decoder, lora
from tests import tiny
from tests.engines.contract import once, prompt
from tests.engines.fake_vllm import config as engine_config
from tests.loop.test_train import lines
from tests.sidecar import conftest

pytestmark = pytest.mark.sidecar
LORA = decoder.Lora(4, 4.0, tuple(decoder.PROJECTIONS), 'float32')
CFG = dataclasses.replace(conftest.CFG, lora=LORA)


@pytest.fixture(scope='module')
def engine(tmp_path_factory):
  folder = tmp_path_factory.mktemp('lora')
  _, tok = conftest.write_model(folder)
  flags = conftest.FLAGS | client.lora_flags(LORA)
  with start_sidecar(
    folder / 'model', log_file=folder / 'vllm.log', **flags
  ) as sidecar:
    config = engine_config(
      url=sidecar.url,
      max_len=512,
      timeout=60.0,
      deadline=240.0,
      start_seconds=240.0,
      attempts=4,
      slots=32,
    )
    engine = client.VllmEngine(CFG, None, tok, config, None, folder)
    engine.sidecar = sidecar
    yield engine
    asyncio.run(engine.shutdown())


def weights(seed):
  base = decoder.init_params(CFG, jax.random.key(0), scale=0.25)
  rng = np.random.default_rng(seed)
  adapters = jax.tree.map(
    lambda x: x + rng.normal(0, 0.1, x.shape).astype(np.float32),
    lora.init(CFG, jax.random.key(seed)),
  )
  return lora.join(adapters, base)


async def verify(engine, version, kind):
  params = weights(version)
  logps = functools.partial(sync.forward_logps(CFG), params)
  sent = params if kind == 'full' else lora.split(CFG, params)[0]
  return await sync.sync_and_verify(
    engine, sent, version, [*range(40, 90)], logps, 1e-4, kind
  )


def test_an_adapter_is_loaded_alone_and_verified(engine):
  with pytest.raises(client.EngineError, match='full sync'):
    update = WeightsUpdate(lora.split(CFG, weights(1))[0], 1, 'adapter')
    asyncio.run(engine.sync(update))
  full = asyncio.run(verify(engine, 1, 'full'))
  for version in (2, 3):
    report = asyncio.run(verify(engine, version, 'adapter'))
    assert report.canary_max_diff < 1e-4
    adapters, _ = lora.split(CFG, weights(version))
    assert report.checksums == sync.checksums(adapters)
    assert report.bytes == sum(x.nbytes for x in jax.tree.leaves(adapters))
    assert full.bytes > report.bytes
  kept = engine._publisher.path(1), engine._publisher.path(1).parent
  assert kept[0].exists() and [p.name for p in (kept[1] / 'adapters').iterdir()]
  assert len([*(kept[1] / 'adapters').iterdir()]) == 1


def test_an_adapter_that_differs_stops_the_run(engine, monkeypatch):
  """The server loads another file than the one that was published."""
  load = Server._load_adapter

  async def stale(self, adapter):
    other = lora.split(CFG, weights(9))[0]
    path = adapter.path.with_name('other')
    if not path.exists():
      lora.save(path, CFG, other)
    await load(self, dataclasses.replace(adapter, path=path))

  asyncio.run(verify(engine, 4, 'full'))
  with monkeypatch.context() as m:
    m.setattr(Server, '_load_adapter', stale)
    with pytest.raises(SyncError, match='layers/q_lora_a'):
      asyncio.run(verify(engine, 5, 'adapter'))
  asyncio.run(verify(engine, 6, 'adapter'))


def test_a_run_syncs_adapters_to_the_server_that_it_starts(tmp_path):
  config = tiny.config()
  config.source.corpus = 'world'
  config.model.arch.update(
    dict(num_attention_heads=1, num_key_value_heads=1, head_dim=32)
  )
  config.model.lora.update(rank=2, alpha=6.0)
  config.optim.lr = 1e-2
  config.engine.module = 'vllm'
  config.engine.kv_cache_gib = 0.25
  config.eval.every = 0
  metrics = train.train(config, str(tmp_path))
  assert metrics['sync/canary_max_diff'] < 1e-3
  assert metrics['train/mismatch_max'] < 0.5
  assert len(lines(tmp_path / 'metrics.jsonl')) == 3


def test_a_server_that_dies_comes_back_with_base_and_adapter(engine):
  asyncio.run(verify(engine, 7, 'full'))
  asyncio.run(verify(engine, 8, 'adapter'))

  async def main():
    os.kill(engine.sidecar.server_pid, signal.SIGKILL)
    return await once(engine, prompt(engine).ids, Sampling(max_tokens=4))

  done = asyncio.run(main())
  assert engine.stats()['restarts'] == 1
  ids = np.array([*prompt(engine).ids, *done.ids], np.int32)
  want = sync.forward_logps(CFG)(weights(8), ids)
  np.testing.assert_allclose(done.logps, np.asarray(want)[-4:], atol=1e-4)
