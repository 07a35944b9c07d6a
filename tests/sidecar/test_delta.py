"""A real server follows by what changed, packed and plain, through a kill."""

import asyncio
import dataclasses
import functools
import os
import signal

import httpx
import jax
import jax.numpy as jnp
import pytest

from searchrl_jax.engines.vllm.client import VllmEngine
from searchrl_jax.engines.vllm.launcher import start_sidecar
from searchrl_jax.engines.weights import published, sync
from searchrl_jax.models import decoder, families
from searchrl_jax.text import tokenizer
from searchrl_jax.worlds import microworld
from tests.engines.fake_vllm import config as engine_config
from tests.sidecar.conftest import FLAGS
from tests.sidecar.test_plugin import UNTIED, make_params

pytestmark = pytest.mark.sidecar

CFG = dataclasses.replace(UNTIED, tied=True)
DTYPE = 'bfloat16'
PLUGINS = ['tests.sidecar.faults:Worker', 'tests.sidecar.plain:Worker']


def moved(params):
  """Each parameter by 1e-4: every tensor of bfloat16 changes in places."""
  return jax.tree.map(lambda x: x + 1e-4 * jnp.where(x > 0.1, 1, -1), params)


@pytest.fixture(params=PLUGINS, ids=['packed', 'plain'])
def served(request, tmp_path):
  """A server, and an engine of it."""
  fields = {k: getattr(CFG, k) for k in families.FIELDS}
  folder = microworld.tokenizer(tmp_path / 'tokenizer')
  published.write_serving_folder(tmp_path / 'model', fields, folder, DTYPE)
  flags = FLAGS | dict(dtype=DTYPE, plugin=request.param, load_format='dummy')
  log = tmp_path / 'vllm.log'
  with start_sidecar(tmp_path / 'model', log_file=log, **flags) as sidecar:
    config = engine_config(
      url=sidecar.url,
      dtype=DTYPE,
      sync='delta',
      memory='/dev/shm',
      max_len=512,
      timeout=60.0,
      deadline=240.0,
      start_seconds=240.0,
    )
    tok = tokenizer.load(folder)
    engine = VllmEngine(CFG, None, tok, config, None, tmp_path / 'run')
    yield sidecar, engine, request.param == PLUGINS[1]
    asyncio.run(engine.shutdown())


def test_a_server_follows_by_what_changed(served):
  sidecar, engine, plain = served
  forward, canary = sync.forward_logps(CFG), list(range(40, 90))
  # Rounding, and a canary of 50 tokens, are no part of this test.
  verify = functools.partial(sync.sync_and_verify, engine, tolerance=0.5)

  def follow(params, version):
    logps = functools.partial(forward, params)
    report = asyncio.run(
      verify(
        params=params,
        version=version,
        canary_ids=canary,
        trainer_logps_fn=logps,
      )
    )
    assert report.checksums == sync.checksums(params, DTYPE)
    return report.bytes

  params = make_params(CFG, 1)
  whole = follow(params, 1)
  assert whole == 2 * sum(x.size for x in decoder.flatten(params).values())
  if plain:  # what changed is written where the server computes
    call = {'method': 'fault_no_reload', 'args': []}
    httpx.post(f'{sidecar.url}/collective_rpc', json=call, trust_env=False)
  for version in (2, 3):
    params = moved(params)
    assert follow(params, version) < 0.3 * whole
  if plain:
    return  # how changes are written does not matter to what follows
  publish, pid = engine._publisher.publish_delta, sidecar.server_pid

  def killed(*args):
    done = publish(*args)
    os.kill(pid, signal.SIGKILL)
    return done

  engine._publisher.publish_delta = killed
  params = moved(params)
  assert follow(params, 4) < 0.3 * whole
  assert engine.stats()['restarts'] == 1 and sidecar.server_pid != pid
  engine._publisher.publish_delta = publish
  params = moved(params)
  assert follow(params, 5) < 0.3 * whole
