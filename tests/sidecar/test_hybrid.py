"""A real vLLM server with delta nets, which a CPU computes in bfloat16."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax.engines.weights import sync
from searchrl_jax.models import deltanet
from tests.conftest import ROOT
from tests.sidecar.test_plugin import UNTIED, make_params, started

pytestmark = pytest.mark.sidecar
# A period and a layer after it; fewer key heads than value heads.
HYBRID = dataclasses.replace(
  UNTIED,
  family='qwen3_5_text',
  n_layers=5,
  head_dim=64,
  tied=True,
  global_every=4,
  rotary_dim=16,
  delta=deltanet.Sizes(2, 4, 64, 64, 4),
)
HALF = dataclasses.replace(HYBRID, dtype='bfloat16')
FORWARD = [sync.forward_logps(cfg) for cfg in (HYBRID, HALF)]


@pytest.fixture(scope='module')
def hybrid(tmp_path_factory):
  folder = tmp_path_factory.mktemp('hybrid')
  with pytest.MonkeyPatch.context() as patch:
    if not [*(ROOT / '.venv-sidecar').glob('lib/*/site-packages/torchvision')]:
      patch.setenv('PYTHONPATH', str(ROOT / 'tests/sidecar/absent'))
    flags = dict(dtype='bfloat16', no_enable_prefix_caching=True)
    plugin = 'tests.sidecar.faults:Worker'
    with started(folder, HYBRID, plugin, **flags) as server:
      yield server


def errors(logps, params, ids):
  """Mean errors: of these log-probs, and of our own in bfloat16."""
  ours = (forward(params, jnp.asarray(ids))[1:] for forward in FORWARD)
  exact, half = (np.asarray(x, np.float64) for x in ours)
  return np.abs(np.asarray(logps) - exact).mean(), np.abs(half - exact).mean()


def test_the_server_holds_and_computes_what_was_published(hybrid):
  """To what our own forward pass in bfloat16 is exact to, for two prompts of
  several chunks and twelve short ones."""
  rng, found, means = np.random.default_rng(0), [], []
  prompts = [rng.integers(2, 500, n).tolist() for n in (100, 150, *[9] * 12)]
  for version in (1, 2, 1, 1):
    done = hybrid.load(version)
    assert hybrid.wrong(done) == set()
    found.append([hybrid.logps(ids) for ids in prompts])
    params = make_params(HYBRID, version)
    if len(means) < 2:
      pairs = [errors(x, params, i) for x, i in zip(found[-1], prompts)]
      means.append(np.array(pairs))
  for pairs in means:
    for part in (pairs[:1], pairs[1:2], pairs[2:]):
      theirs, own = part.mean(0)
      assert theirs < 2 * own < 0.4
  # A reload of the same weights changes nothing; of others, much.
  first, other, back, again = found
  assert first == back == again
  assert errors(other[0], make_params(HYBRID, 1), prompts[0])[0] > 1


@pytest.mark.parametrize(
  'path, name',
  [
    ('layers/delta_conv', 'model.layers.4.linear_attn.conv1d.weight'),
    ('layers/delta_a_log', 'model.layers.1.linear_attn.A_log'),
    ('layers/delta_dt_bias', 'model.layers.0.linear_attn.dt_bias'),
    ('layers/delta_norm', 'model.layers.2.linear_attn.norm.weight'),
  ],
)
def test_a_tensor_that_stays_old_is_named(hybrid, path, name):
  hybrid.load(1)
  done = hybrid.publish(2)
  hybrid.call('fault_load_without', str(done.path), name)
  # The way to load badly leaves a tied head as it was, as vLLM alone would.
  assert hybrid.wrong(done) == {path, 'head'}


@pytest.mark.parametrize('name', ['qkv', 'z', 'b', 'a', 'o'])
def test_parts_of_a_fused_tensor_are_told_apart(hybrid, name):
  """Each of them with other values is named, and no other is."""
  hybrid.told_apart(f'layers/delta_{name}', lambda x: x[::-1])


def test_the_engine_verifies_its_weights(hybrid, tmp_path):
  engine = hybrid.synced(tmp_path, 'bfloat16', FORWARD[0], 0.2)
  assert engine.exact == ('delta_a_log',)
