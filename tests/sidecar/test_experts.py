"""A real vLLM server with experts."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax.engines.weights import sync
from searchrl_jax.models.experts import Sizes
from tests.sidecar.test_plugin import IDS, UNTIED, make_params, started

pytestmark = pytest.mark.sidecar
# The second of three layers has none.
EXPERTS = dataclasses.replace(
  UNTIED,
  family='qwen3_moe',
  n_layers=3,
  moe=Sizes(6, 2, 64, normalised=True, dense=(1,)),
)


@pytest.fixture(scope='module')
def server(tmp_path_factory):
  folder = tmp_path_factory.mktemp('experts')
  with started(folder, EXPERTS, 'tests.sidecar.faults:Worker') as server:
    yield server


def test_the_server_holds_and_computes_what_was_published(server):
  """A reload leaves experts as vLLM's kernel for CPUs cannot read them."""
  for version in (1, 2, 1):
    done = server.load(version)
    assert server.wrong(done) == set()
    server.check_logps(make_params(EXPERTS, version))


def test_what_vllm_alone_leaves_is_named(server):
  """Its own reload answers 200; the experts are then not those of any model."""
  server.load(1)
  done = server.publish(2)
  server.call('fault_load_without', str(done.path), '')
  assert server.wrong(done) == {
    f'layers/experts_{name}' for name in ('gate', 'up', 'down')
  }


@pytest.mark.parametrize(
  'name', ['router', 'experts_gate', 'experts_up', 'experts_down']
)
def test_tensors_are_told_apart(server, name):
  """Each of them with other values is named, and no other is."""
  # Of one layer and expert.
  change = lambda x: x.at[1, 2].set(x[1, 2][::-1])
  server.told_apart(f'layers/{name}', change)


def test_the_engine_verifies_its_weights(server, tmp_path):
  server.synced(tmp_path, 'float32', sync.forward_logps(EXPERTS), 1e-3)


def test_two_workers_hold_their_parts(tmp_path, monkeypatch):
  """In bfloat16, in which the log-probs are not exact."""
  monkeypatch.setenv('VLLM_CPU_OMP_THREADS_BIND', 'nobind')
  plugin = 'searchrl_jax.engines.vllm.plugin:Worker'
  flags = dict(tensor_parallel_size=2, dtype='bfloat16')
  with started(tmp_path, EXPERTS, plugin, **flags) as server:
    for version in (1, 2):
      done = server.load(version)
      first, second = server.calls('searchrl_checksums')
      assert 'layers/router' not in second
      assert first['layers/experts_down'] != second['layers/experts_down']
      assert server.wrong(done) == set()
      exact = sync.forward_logps(EXPERTS)(
        make_params(EXPERTS, version), jnp.asarray(IDS)
      )
      np.testing.assert_allclose(server.logps(), exact[1:], atol=0.3)
