"""What a policy works with: how it is opened, and in which order it closes."""

import contextlib
import sys
import types
from unittest import mock

import jax
import pytest

from searchrl_jax import checks, train
from searchrl_jax.devices import sharding
from searchrl_jax.engines.core import EngineError
from searchrl_jax.evaluate import policy
from searchrl_jax.lookup import ConfigError
from searchrl_jax.models import decoder
from searchrl_jax.run import services, session
from searchrl_jax.sources.core import SourceError
from tests import tiny
from tests.conftest import ROOT
from tests.models import test_deltanet as deltanets

CFG = types.SimpleNamespace(lora=None)


class Service:
  """An engine, a source or a judge that says when it is closed."""

  def __init__(self, name: str, closed: list[str], version: int | None = 0):
    self.name, self.closed, self.version = name, closed, version

  async def check(self):
    return {'identity': {'corpus': 'this'}}

  async def close(self):
    self.closed.append(self.name)

  shutdown = close


@pytest.fixture
def closed(monkeypatch):
  """Names of what was closed, in order; engine, source, server are stubs."""
  names = []

  @contextlib.contextmanager
  def retrieval(*_):
    yield 'http://127.0.0.1:9'
    names.append('server')

  monkeypatch.setattr(services, 'retrieval', retrieval)
  monkeypatch.setattr(services, 'source', lambda *_: Service('source', names))
  monkeypatch.setattr(services, 'engine', lambda *_: Service('engine', names))
  return names


def opened(folder):
  mesh = sharding.make_mesh(data=1)
  return services.opened(tiny.config(), str(folder), CFG, mesh)


def test_the_last_service_closes_first_and_the_server_last(closed, tmp_path):
  with opened(tmp_path) as opener:
    assert opener.open(None) is None  # there is no judge
    opener.open(Service('judge', closed))
    opener.open_engine(None, None, {})
    opener.open_source()
    assert opener.identity == {'corpus': 'this'}
  assert closed == ['source', 'engine', 'judge', 'server']


def test_a_source_of_another_identity_is_refused_and_closed(closed, tmp_path):
  with pytest.raises(SourceError, match='corpus'):
    with opened(tmp_path) as opener:
      opener.identity = {'corpus': 'that'}
      opener.open_source()
  assert closed[0] == 'source'


@pytest.mark.parametrize(
  'version, canary, loaded',
  [(None, [1, 2], True), (None, None, False), (0, [1, 2], False)],
)
def test_an_engine_without_weights_gets_them_verified(
  closed, tmp_path, monkeypatch, version, canary, loaded
):
  verified = []

  async def sync_and_verify(engine, params, version, ids, *_):
    verified.append((engine, params, version, ids))

  monkeypatch.setattr(services.sync, 'sync_and_verify', sync_and_verify)
  monkeypatch.setattr(services.sync, 'forward_logps', lambda *_: print)
  server = Service('engine', closed, version)
  monkeypatch.setattr(services, 'engine', lambda *_: server)
  with opened(tmp_path) as opener:
    params = {'embed': 0}
    assert opener.open_engine(None, canary, params) is server
    assert opener.engines == [server]
  assert verified == [(server, params, 0, canary)] * loaded


def test_only_training_is_refused_for_rollouts_ahead(tmp_path, monkeypatch):
  config = tiny.config('http://127.0.0.1:9')
  config.rollout.max_staleness = 1
  two, made = sharding.make_mesh(data=2), Service('engine', [])
  module = types.SimpleNamespace(make=lambda *_: made)
  monkeypatch.setattr(services.engines, 'module', lambda _: module)
  with services.opened(config, str(tmp_path), CFG, two) as opener:
    assert opener.open_engine(None, None, {}) is made  # an evaluation's
  run = object.__new__(session.Session)
  run.config, run.mesh = config, two
  with pytest.raises(ConfigError, match='config.rollout.max_staleness'):
    run.open_engine(None, None)
  services.check_ahead(config, sharding.make_mesh(data=1))
  config.engine.module = 'vllm'
  services.check_ahead(config, two)


def test_an_engine_refuses_a_model_before_it_is_loaded(tmp_path, monkeypatch):
  config = tiny.config('http://127.0.0.1:9')
  config.engine.host_gib = 1e-6
  loaded = mock.Mock()
  for name in ('initial', 'restore'):
    monkeypatch.setattr(services.parameters, name, loaded)
  folder = str(tmp_path)
  for start in (
    lambda: train.train(config, folder),
    lambda: policy.loaded(config, folder, folder).__enter__(),
  ):
    with pytest.raises(EngineError, match='host_gib=1e-06'):
      start()
  assert not loaded.called


@pytest.mark.parametrize(
  'field, has, lacks',
  [
    ('engine', 'make', 'capacity'),
    ('engine', 'capacity', 'make'),
    ('source', 'check', 'make'),
  ],
)
def test_what_a_module_of_ones_own_lacks_is_named(
  monkeypatch, field, has, lacks
):
  mine = types.SimpleNamespace(**{has: print})
  monkeypatch.setitem(sys.modules, 'mine.part', mine)
  config = tiny.config('http://127.0.0.1:9')
  config[field].module = 'mine.part'
  with pytest.raises(
    ConfigError,
    match=f"config.{field}.module='mine.part' has no function {lacks}: "
    f'.* searchrl_jax/{field}s/core.py',
  ):
    checks.check_engine(config)


def test_one_module_opens_services():
  opening = 'start_server(', '.at_exit('
  found = {
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / 'searchrl_jax').rglob('*.py')
    if any(call in path.read_text() for call in opening)
  }
  loop = 'searchrl_jax/devices/signals.py'
  assert found == {'searchrl_jax/run/services.py', loop}


def test_what_processes_share_keeps_decays_in_float32(monkeypatch):
  """Of delta nets, in half precision: e ** log(10) is 9.94 in bfloat16."""
  cfg, mesh = deltanets.CFG, sharding.make_mesh(-1, 1, 1)
  own = sharding.make_mesh(1, -1, 1)  # as if it were of this process alone
  other = types.SimpleNamespace(
    config=types.SimpleNamespace(
      engine=types.SimpleNamespace(module='jax', dtype='bfloat16')
    ),
    mesh=mesh,
    cfg=cfg,
  )
  monkeypatch.setattr(sharding, 'own_mesh', lambda _: own)
  params = decoder.init_params(cfg, jax.random.key(0))
  params = jax.device_put(params, decoder.param_shardings(cfg, mesh))
  found = decoder.flatten(services.Opener.share(other, params))
  whole = {path for path, x in found.items() if x.dtype.name == 'float32'}
  assert whole == {'layers/delta_a_log', 'layers/delta_norm'}
