"""Each way in which a sync can go wrong is planted, and caught."""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax.engines.core import SyncError, WeightsUpdate
from searchrl_jax.engines.jax.engine import JaxEngine
from searchrl_jax.engines.weights import sync
from searchrl_jax.models import decoder
from tests.engines.common import CFG, make_engine, make_params

pytestmark = pytest.mark.slow

CANARY = [5, 17, 80, 3, 41, 41, 8, 66, 2, 30]
TOLERANCE = 1e-4


def trainer_logps(params):
  def run(ids):
    hidden = decoder.hidden_states(params, CFG, jnp.asarray(ids)[None])
    logps = jax.nn.log_softmax(decoder.logits(params, CFG, hidden)[0], -1)
    chosen = logps[np.arange(len(ids) - 1), ids[1:]]
    return np.concatenate([[0.0], np.asarray(chosen)])

  return run


def small_step(params):
  """What one update at a learning rate of 1e-6 does."""
  return jax.tree.map(lambda p: p - np.float32(1e-6) * jnp.sign(p), params)


def verify(engine, params, version=1):
  return checked(engine, params, version, CANARY, trainer_logps(params))


def checked(engine, params, version, canary, logps):
  return asyncio.run(
    sync.sync_and_verify(engine, params, version, canary, logps, TOLERANCE)
  )


# --- Checksums.


def numpy_checksum(x):
  """The hash of engines/weights/checksum.py again, with Python integers."""
  low = high = 0
  for i, bits in enumerate(np.asarray(x).reshape(-1).view(np.uint32).tolist()):
    h = (bits + i * 0x9E3779B1) % 2**32
    h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
    h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
    h ^= h >> 16
    low += h
    h = h ^ bits
    h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
    h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
    high += h ^ h >> 16
  return f'{low % 2**32:08x}{high % 2**32:08x}'


def test_checksum_is_the_documented_hash():
  x = np.random.default_rng(0).normal(size=(2, 3, 5)).astype(np.float32)
  want = {'a/b': f'float32[2,3,5]:{numpy_checksum(x)}'}
  assert sync.checksums({'a': {'b': jnp.asarray(x)}}) == want


def test_checksum_sees_every_small_change():
  x = np.random.default_rng(0).normal(size=(6, 6)).astype(np.float32)
  swapped, nudged = x.copy(), x.copy()
  swapped[0, 0], swapped[0, 1] = x[0, 1], x[0, 0]
  nudged[5, 5] = np.nextafter(x[5, 5], np.float32(9))
  sums = [
    sync.checksums({'x': jnp.asarray(v)})['x']
    for v in (x, swapped, nudged, x.T, -x, x.reshape(4, 9))
  ]
  assert len(set(sums)) == 6


def test_engine_and_trainer_agree_in_either_dtype():
  params = make_params()
  for dtype in ('float32', 'bfloat16'):
    engine = make_engine(dtype=dtype)
    assert engine.checksums() == sync.checksums(params, dtype)


def test_forward_logps_are_the_decoders():
  params, ids = make_params(1), np.array(CANARY)
  got = np.asarray(sync.forward_logps(CFG)(params, ids))
  assert got.dtype == np.float32
  np.testing.assert_allclose(got, trainer_logps(params)(ids), atol=1e-6)


# --- Syncs.


@pytest.mark.long
def test_a_good_sync_reports_what_it_loaded():
  engine, params = make_engine(), make_params(1)
  report = verify(engine, params, version=4)
  assert report.version == engine.version == 4
  assert report.checksums == sync.checksums(params)
  assert report.tensors == len(decoder.param_table(CFG))
  assert report.bytes == 4 * CFG.n_params
  assert 0 <= report.canary_max_diff <= 1e-5
  verify(engine, small_step(params), version=5)  # and again
  assert engine._table._held == {}  # the canary let go of its slot


class Planted(JaxEngine):
  """Loads what `spoil` makes of the published parameters."""

  spoil = staticmethod(lambda params: params)

  async def sync(self, update):
    return await super().sync(
      WeightsUpdate(self.spoil(update.params), update.version)
    )


def without(params, name):
  layers = dict(params['layers'])
  del layers[name]
  return {**params, 'layers': layers}


def transposed(params):
  """q [L, D, N, H] with D = N H: transposed, its shape stays."""
  q = params['layers']['q']
  L, D, N, H = q.shape
  turned = q.reshape(L, D, N * H).swapaxes(1, 2).reshape(q.shape)
  return {**params, 'layers': {**params['layers'], 'q': turned}}


@pytest.mark.parametrize(
  'spoil, match',
  [
    (lambda p: without(p, 'k_bias'), "'layers/k_bias'"),
    (transposed, 'layers/q:'),
    (lambda p: {**p, 'embed': p['embed'].T}, "'embed'"),
  ],
  ids=['missing', 'transposed', 'misshapen'],
)
def test_a_spoilt_tensor_is_named(spoil, match):
  engine = make_engine(Planted)
  engine.spoil = spoil
  with pytest.raises(SyncError, match=match):
    verify(engine, make_params(1))


def test_the_previous_version_is_caught_though_a_small_step_away():
  old = make_params()
  new = small_step(old)
  near = trainer_logps(old)(np.array(CANARY)) - trainer_logps(new)(
    np.array(CANARY)
  )
  assert np.abs(near).max() < TOLERANCE  # the canary alone would not see it
  engine = make_engine(Planted, params=old)
  engine.spoil = lambda params: old
  with pytest.raises(SyncError, match='13 of 13|layers/q'):
    verify(engine, new)


def test_an_engine_that_does_not_load_at_all():
  class Deaf(JaxEngine):
    async def sync(self, update):
      return await super().sync(WeightsUpdate(make_params(), self.version))

  with pytest.raises(SyncError, match='version 1'):
    verify(make_engine(Deaf), make_params(1))


class Forgetful(JaxEngine):
  """Swaps the weights and keeps the caches."""

  ready = False

  def _drop_caches(self):
    if not self.ready:
      super()._drop_caches()


@pytest.mark.parametrize('counted', [True, False])
def test_a_stale_cache_is_caught(counted):
  """By the tokens computed, and, without counters, by the log-probs."""
  engine = make_engine(Forgetful)
  engine.ready = True
  if not counted:
    engine.stats = lambda: {}
  match = 'computed 0 tokens' if counted else 'full forward'
  with pytest.raises(SyncError, match=f'(?s){match}.*'):
    verify(engine, make_params(1))


def test_a_stale_cache_is_caught_though_a_small_step_away():
  engine = make_engine(Forgetful)
  engine.ready = True
  with pytest.raises(SyncError, match='old weights'):
    verify(engine, small_step(make_params()))


def test_wrong_numerics_are_caught():
  params = make_params(1)
  other = trainer_logps(make_params(2))
  with pytest.raises(SyncError, match='canary: .*canary_tolerance=0.0001'):
    checked(make_engine(), params, 1, CANARY, other)
  nan = lambda ids: np.full(len(ids), np.nan)  # noqa: E731
  with pytest.raises(SyncError, match='canary: .* by inf '):
    checked(make_engine(), params, 1, CANARY, nan)
