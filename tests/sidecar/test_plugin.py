"""Each way in which a server can hold other weights is planted, and named."""

import asyncio
import contextlib
import dataclasses
import functools
import shutil

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax.engines.core import SyncError
from searchrl_jax.engines.vllm.client import VllmEngine
from searchrl_jax.engines.vllm.launcher import start_sidecar
from searchrl_jax.engines.weights import checksum, publication, published, sync
from searchrl_jax.models import decoder, families, pretrained
from searchrl_jax.text import tokenizer
from searchrl_jax.worlds import microworld
from tests.engines.fake_vllm import config
from tests.sidecar.conftest import FLAGS

pytestmark = pytest.mark.sidecar

# Square output projections, as the shared server's: transposed, they fit.
UNTIED = decoder.DecoderConfig(
  vocab_size=527,
  d_model=128,
  n_layers=2,
  n_heads=4,
  n_kv_heads=2,
  head_dim=32,
  d_ff=192,
  family='qwen2',
  tied=False,
)
# Windows shorter than IDS, and both kinds of layers.
GEMMA = dataclasses.replace(
  UNTIED,
  n_layers=4,
  family=families.GEMMA,
  tied=True,
  rope_theta=1e6,
  window=4,
  global_every=2,
)
IDS = [5, 17, 80, 3, 41, 250, 8, 66]


def make_params(cfg, seed):
  """Random biases and norms too: no tensor is what another version has."""
  flat = decoder.flatten(
    decoder.init_params(cfg, jax.random.key(seed), scale=0.25)
  )
  for i, (name, x) in enumerate(flat.items()):
    if name.endswith(('norm', 'bias')):
      key = jax.random.key(100 * seed + i)
      flat[name] = x + 0.1 * jax.random.normal(key, x.shape)
  return decoder.nest(flat)


class Server:
  """A server with the plugin, and a folder of publications."""

  def __init__(self, folder, cfg, url, dtype='float32'):
    self.cfg = cfg
    self.publisher = publication.Publisher(folder, cfg, dtype)
    # No connection is used twice: the server closes those idle for 5 s.
    self.http = httpx.Client(
      base_url=url,
      timeout=120,
      trust_env=False,
      limits=httpx.Limits(max_keepalive_connections=0),
    )

  def call(self, method, *args, **kwargs):
    """The result of the first worker; RuntimeError with the server's words."""
    return self.calls(method, *args, **kwargs)[0]

  def calls(self, method, *args, **kwargs):
    done = self.http.post(
      '/collective_rpc', json={'method': method, 'args': args, 'kwargs': kwargs}
    )
    if done.status_code != 200:
      raise RuntimeError(done.json()['error']['message'])
    return done.json()['results']

  def publish(self, version, params=None):
    params = make_params(self.cfg, version) if params is None else params
    return self.publisher.publish(params, version)

  def load(self, version, params=None):
    done = self.publish(version, params)
    self.call('searchrl_load', str(done.path))
    return done

  def checksums(self):
    return checksum.combine(self.calls('searchrl_checksums'))

  def wrong(self, done) -> set[str]:
    """The tensors that are not those published; sync names each of them."""
    held = self.checksums()
    names = {
      k
      for k in {*held, *done.checksums}
      if held.get(k) != done.checksums.get(k)
    }
    if names:
      with pytest.raises(SyncError) as e:
        sync.compare(done.checksums, held)
      assert all(f'  {name}:' in str(e.value) for name in names)
    else:
      sync.compare(done.checksums, held)
    return names

  def logps(self, ids=IDS):
    """The server's own log-probs of ids[1:]."""
    done = self.http.post(
      '/v1/completions',
      json={
        'model': 'policy',
        'prompt': ids,
        'max_tokens': 1,
        'temperature': 0,
        'prompt_logprobs': 0,
      },
    )
    assert done.status_code == 200, done.text
    found = done.json()['choices'][0]['prompt_logprobs'][1:]
    return [next(iter(x.values()))['logprob'] for x in found]

  def told_apart(self, path, change):
    """Asserts that a tensor with other values is named, and no other is."""
    done = self.load(3)
    params = decoder.flatten(make_params(self.cfg, 3))
    params[path] = change(params[path])
    other = self.publish(4, decoder.nest(params))
    held = self.checksums()
    differ = {k for k, v in other.checksums.items() if held[k] != v}
    assert differ == {path} and held == done.checksums

  def synced(self, folder, dtype, logps, tolerance):
    """An engine that has verified version 7 in the server, and is shut down.

    logps: (parameters, ids) -> log-probs.
    """
    path = microworld.tokenizer(folder / 'tokenizer')
    c = config(
      url=str(self.http.base_url).rstrip('/'),
      dtype=dtype,
      max_len=512,
      timeout=60.0,
      deadline=120.0,
    )
    engine = VllmEngine(self.cfg, None, tokenizer.load(path), c, None, folder)
    params, canary = make_params(self.cfg, 5), list(range(40, 90))
    own = functools.partial(logps, params)

    async def main():
      try:
        how = engine, params, 7, canary, own, tolerance
        return await sync.sync_and_verify(*how)
      finally:
        await engine.shutdown()

    assert asyncio.run(main()).version == 7
    return engine

  def check_logps(self, params):
    want = sync.forward_logps(self.cfg)(params, jnp.asarray(IDS))[1:]
    np.testing.assert_allclose(self.logps(), want, atol=1e-4)


@contextlib.contextmanager
def started(folder, cfg, plugin, **flags):
  """A server of its own, with random weights."""
  fields = families.fields(cfg)
  published.write_serving_folder(
    folder / 'model',
    fields,
    microworld.tokenizer(folder / 'tokenizer'),
    'float32',
  )
  flags = FLAGS | dict(plugin=plugin, load_format='dummy') | flags
  with start_sidecar(
    folder / 'model', log_file=folder / 'vllm.log', **flags
  ) as sidecar:
    yield Server(folder / 'published', cfg, sidecar.url, flags['dtype'])


@pytest.fixture(scope='module')
def untied(tmp_path_factory):
  """It has a way to load badly."""
  folder = tmp_path_factory.mktemp('untied')
  with started(folder, UNTIED, 'tests.sidecar.faults:Worker') as server:
    yield server


@pytest.fixture(scope='module')
def tied(served, tmp_path_factory):
  """The server of all tests, which gets its weights back."""
  one = Server(tmp_path_factory.mktemp('tied'), served.cfg, served.sidecar.url)
  yield one
  one.load(0, served.params)


@pytest.fixture(scope='module')
def gemma(tmp_path_factory):
  folder = tmp_path_factory.mktemp('gemma')
  with started(folder, GEMMA, 'tests.sidecar.faults:Worker') as server:
    yield server


@pytest.fixture(params=['untied', 'tied', 'gemma'])
def server(request):
  return request.getfixturevalue(request.param)


# --- Stands first: it needs a server that nothing was loaded into.


def test_a_tensor_that_stays_random_is_named(untied):
  assert untied.call('searchrl_describe')['loaded'] is None
  with pytest.raises(RuntimeError, match='no publication'):
    untied.checksums()
  done = untied.publish(1)
  name = 'model.layers.1.self_attn.v_proj.bias'
  loaded = untied.call('fault_load_without', str(done.path), name)
  assert name not in loaded and len(loaded) == 2 * 12 + 3 - 1
  assert untied.wrong(done) == {'layers/v_bias'}


# --- What should be.


def test_the_server_holds_and_computes_what_was_published(server):
  for version in (1, 2, 1):
    done = server.load(version)
    assert server.wrong(done) == set()
    server.check_logps(make_params(server.cfg, version))


def test_the_server_describes_itself(server):
  server.load(3)
  said = server.call('searchrl_describe')
  assert said.pop('loaded') == 3
  assert decoder.DecoderConfig(**said) == server.cfg


def test_every_bit_pattern_is_read_back_from_packed_matrices(server):
  """Zeros of both signs, subnormal and huge numbers."""
  rng = np.random.default_rng(0)
  odd = np.float32([0.0, -0.0, 1e-40, -1e-42, 1.2e-38, 3e38, -1e38])
  flat = decoder.flatten(make_params(server.cfg, 4))
  for name, x in flat.items():
    flat[name] = jnp.asarray(
      np.where(rng.random(x.shape) < 0.3, rng.choice(odd, x.shape), x)
    )
  assert server.wrong(server.load(4, decoder.nest(flat))) == set()


@pytest.mark.parametrize('is_tied', [True, False])
def test_two_workers_that_pack_nothing_hold_their_parts(
  is_tied, tmp_path, monkeypatch
):
  """As on GPUs: each maps the files and computes with what it loaded."""
  monkeypatch.setenv('VLLM_CPU_OMP_THREADS_BIND', 'nobind')
  cfg = dataclasses.replace(UNTIED, tied=is_tied)
  plugin = 'experiments.benchmarks.unpacked:Worker'
  with started(tmp_path, cfg, plugin, tensor_parallel_size=2) as server:
    for version in (1, 2):
      done = server.load(version)
      first, second = server.calls('searchrl_checksums')
      # A head that computes with the embedding is not hashed twice.
      assert ('head' in first) == (not is_tied)
      assert first['layers/up'] != second['layers/up']
      assert server.wrong(done) == set()
      server.check_logps(make_params(cfg, version))
    before = make_params(cfg, 2)
    after = jax.tree.map(lambda p: p - np.float32(1e-7) * jnp.sign(p), before)
    done = server.publish(3, after)
    assert server.wrong(done) == set(done.checksums)


# --- Faults.


def test_a_tied_head_that_vllm_forgets_is_named(tied, tmp_path):
  """vLLM's own reload on CPU answers 200 and keeps the old head's packing."""
  tied.load(5)
  after = make_params(tied.cfg, 6)
  done = tied.publish(6, after)
  pretrained.save(tmp_path / 'new', tied.cfg, after)
  tied.call('reload_weights', weights_path=str(tmp_path / 'new'))
  assert tied.wrong(done) == {'head'}
  tied.load(6)
  assert tied.wrong(done) == set()
  tied.check_logps(after)


@pytest.mark.parametrize(
  'name, ours',
  [
    ('model.embed_tokens.weight', 'embed'),
    ('model.layers.0.self_attn.k_proj.weight', 'layers/k'),
    ('model.layers.0.self_attn.q_proj.bias', 'layers/q_bias'),
    ('model.layers.1.self_attn.o_proj.weight', 'layers/o'),
    ('model.layers.1.mlp.up_proj.weight', 'layers/up'),
    ('model.layers.1.post_attention_layernorm.weight', 'layers/mlp_norm'),
    ('model.norm.weight', 'final_norm'),
    ('lm_head.weight', 'head'),
  ],
)
def test_a_tensor_that_was_not_loaded_is_named(untied, name, ours):
  """A small step from the one before: half a layer's matrix stays old."""
  before = make_params(UNTIED, 7)
  untied.load(7, before)
  after = jax.tree.map(lambda p: p - np.float32(1e-6) * jnp.sign(p), before)
  done = untied.publish(8, after)
  untied.call('fault_load_without', str(done.path), name)
  assert untied.wrong(done) == {ours}


def test_a_transposed_matrix_is_named(server):
  params = make_params(server.cfg, 9)
  right = checksum.checksums(decoder.flatten(params))
  o = params['layers']['o']
  params['layers']['o'] = (
    o.reshape(-1, 128, 128).swapaxes(1, 2).reshape(o.shape)
  )
  done = server.load(9, params)
  assert server.wrong(done) == set()  # what was loaded is what was published
  assert server.wrong(dataclasses.replace(done, checksums=right)) == {
    'layers/o'
  }


def test_the_version_before_is_told_where_logps_are_not(server):
  """One small step: the canary cannot see it, every tensor's sum does."""
  before = make_params(server.cfg, 10)
  server.load(10, before)
  after = jax.tree.map(lambda p: p - np.float32(1e-7) * jnp.sign(p), before)
  done = server.publish(11, after)
  server.check_logps(after)
  assert server.wrong(done) == set(done.checksums)
  server.load(11, after)
  assert server.wrong(done) == set()


# --- Publications that cannot be loaded.


def damaged(server, tmp_path, version=12):
  done = server.publish(version)
  return shutil.copytree(done.path, tmp_path / done.path.name)


def refused(server, path, match):
  """The error says why, and the server goes on with what it had."""
  before = server.load(13)
  with pytest.raises(RuntimeError, match=match):
    server.call('searchrl_load', str(path))
  assert server.wrong(before) == set()
  server.check_logps(make_params(server.cfg, 13))


def test_a_version_that_is_not_there_is_refused(server):
  refused(server, server.publisher.path(99), 'no complete.*00000013')


def test_half_a_version_is_refused(server, tmp_path):
  path = damaged(server, tmp_path)
  shutil.rmtree(path / 'arrays/state.model.layers.0.mlp.gate_proj.weight')
  refused(server, path, "'layers/gate'")


def test_a_load_that_breaks_halfway_can_be_made_good(server, tmp_path):
  path = damaged(server, tmp_path)
  name = 'model.layers.1.mlp.down_proj.weight'
  (path / f'arrays/state.{name}/0.0').unlink()
  with pytest.raises(RuntimeError, match='layers.1.mlp.down_proj'):
    server.call('searchrl_load', str(path))
  assert server.call('searchrl_describe')['loaded'] is None
  with pytest.raises(RuntimeError, match='no publication'):
    server.checksums()
  assert server.wrong(server.load(14)) == set()
  server.check_logps(make_params(server.cfg, 14))
