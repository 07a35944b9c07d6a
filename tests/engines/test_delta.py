"""Differences of versions: exact, small, and nothing wrong is ever served."""

import asyncio
import dataclasses
import json
import logging
import shutil
import zlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from searchrl_jax.engines.core import EngineError, Sampling, WeightsUpdate
from searchrl_jax.engines.vllm import servers
from searchrl_jax.engines.weights import (
  checksum,
  delta,
  publication,
  published,
  sync,
)
from searchrl_jax.engines.weights.published import PublishedError
from tests.engines.common import CFG, make_params
from tests.engines.contract import once
from tests.engines.fake_vllm import check, make

pytestmark = pytest.mark.slow

UP = 'model.layers.{}.mlp.up_proj.weight'


def step(params, rate=1e-4):
  """Each parameter moves by `rate`: the first step of Adam."""
  return jax.tree.map(lambda x: x + rate * jnp.where(x > 0.1, 1, -1), params)


# --- Pieces.


def test_a_piece_by_hand():
  old = np.zeros(600, np.uint16)
  old[258] = 0x3F80
  new = old.copy()
  new[2] += 1
  new[258] -= 1  # 255 elements lie between the two
  new[259] = 0xFFFF  # 0 - 1, in 16 bits
  raw = zlib.decompress(delta.encode(old, new))
  at, steps = [2, 255, 0, 0], [2, 1, 1, 0, 0, 0]  # +1 -> 2, -1 -> 1
  assert list(raw) == [3, 0, 0, 0, 0, 0, 0, 0, *at, *steps]
  assert delta.apply(raw, old).tolist() == [2, 258, 259]
  np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize('share', [0, 1e-4, 0.02, 0.5, 1])
def test_any_bits_come_back(share):
  rng = np.random.default_rng(0)
  n = (1 << 20) + 77  # more than one block
  old = rng.integers(0, 1 << 16, n, np.uint16)
  new = np.where(rng.random(n) < share, rng.integers(0, 1 << 16, n), old)
  new = new.astype(np.uint16)
  piece = delta.encode(old, new)
  assert (piece == b'') == (share == 0)
  if piece:
    at = delta.apply(zlib.decompress(piece), old)
    assert (np.diff(at) > 0).all()
  np.testing.assert_array_equal(old, new)


def test_a_step_of_adamw_takes_a_tenth_of_the_bytes():
  """By the weights of a model of 28M: N(0, 0.02), lr 1e-6, bfloat16."""
  rng = np.random.default_rng(0)
  params = jnp.asarray(rng.normal(0, 0.02, 1 << 20).astype(np.float32))
  adamw = optax.adamw(1e-6)
  grads = jnp.asarray(rng.normal(size=params.shape), jnp.float32)
  with jax.numpy_dtype_promotion('standard'):
    updates, _ = adamw.update(grads, adamw.init(params), params)
  after = optax.apply_updates(params, updates)
  bits = [
    np.asarray(x.astype(jnp.bfloat16)).view(np.uint16) for x in (params, after)
  ]
  assert 0.01 < np.mean(bits[0] != bits[1]) < 0.1
  assert 0 < len(delta.encode(*bits)) < 0.1 * bits[0].nbytes


# --- Versions.


def publisher(folder, cfg=CFG, dtype='bfloat16'):
  return publication.Publisher(folder, cfg, dtype)


def acknowledged(folder, params, version=1, **kw):
  out = publisher(folder, **kw)
  done = out.publish_delta(params, version)
  assert done.delta is None  # there is none before it
  out.prune(version)
  return out


def contents(path):
  found = published.open_published(path)
  return found.version, {k: x.tobytes() for k, x in found.tensors()}


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
@pytest.mark.parametrize('tied', [True, False])
def test_a_copy_brought_to_a_version_is_that_version(tmp_path, dtype, tied):
  cfg = dataclasses.replace(CFG, tied=tied)
  params = make_params(cfg=cfg)
  out = acknowledged(tmp_path / 'a', params, cfg=cfg, dtype=dtype)
  for version in (2, 3):
    params = step(params)
    done = out.publish_delta(params, version)
    assert 0 < done.sent == done.delta.bytes < done.bytes / 2
    sizes = [p.stat().st_size for p in done.delta.path.iterdir()]
    assert done.sent < sum(sizes) < done.sent + 5000
    new, base, changed = delta.bring(done.path, done.delta.path)
    assert (new.version, base) == (version, version - 1)
    whole = publisher(tmp_path / f'b{version}', cfg, dtype)
    want = whole.publish(params, version)
    assert contents(done.path) == contents(want.path)
    read = published.open_published(done.path)
    assert read.checksums == new.checksums == want.checksums
    before = published.open_published(want.path)
    assert {*changed} <= {*before.table}
    out.prune(version)
    assert [p.name for p in done.path.parent.iterdir()] == ['00000001']


def test_what_did_not_change_has_no_piece(tmp_path):
  params = make_params()
  out = acknowledged(tmp_path, params)
  params['final_norm'] = params['final_norm'] * 2
  done = out.publish_delta(params, 2)
  names = [p.name for p in done.delta.path.iterdir()]
  assert sorted(names) == ['meta.json', 'model.norm.weight']
  delta.bring(done.path, done.delta.path)
  out.prune(2)
  same = out.publish_delta(params, 3)
  assert same.sent == 0
  assert delta.bring(same.path, same.delta.path)[2] == {}


def test_most_bytes_or_a_doubt_publish_everything(tmp_path):
  params = make_params()
  out = acknowledged(tmp_path, params)
  assert out.publish_delta(make_params(1), 2).delta is None
  # Nobody has said that every server holds version 2.
  assert out.publish_delta(step(params), 3).delta is None
  out.prune(3)
  assert [p.name for p in tmp_path.iterdir()] == ['00000003']
  done = out.publish_delta(params, 4)
  assert done.delta
  assert out.publish(params, 4).delta is None
  assert not done.delta.path.exists()
  out.prune(4)
  out.publish_delta(step(params), 5)
  out.clear()
  assert not [*tmp_path.iterdir()]


def test_several_workers_bring_a_copy_once(tmp_path):
  out = acknowledged(tmp_path, make_params())
  done = out.publish_delta(step(make_params()), 2)
  assert delta.bring(done.path, done.delta.path)[2]
  want = contents(done.path)
  new, _, changed = delta.bring(done.path, done.delta.path)
  assert changed is None and new.version == 2
  assert contents(done.path) == want


def test_a_version_that_is_gone_is_one_sentence(tmp_path):
  out = acknowledged(tmp_path, make_params())
  done = out.publish_delta(step(make_params()), 2)
  place(done, base=7)
  with pytest.raises(
    PublishedError,
    match='from version 7 to 2, and .*00000001 holds version 1; publish '
    'version 2 as a whole',
  ):
    delta.bring(done.path, done.delta.path)
  assert contents(done.path)[0] == 1
  shutil.rmtree(done.path)
  with pytest.raises(PublishedError, match='00000001 is gone, and .* to 2; '):
    delta.bring(done.path, done.delta.path)
  shutil.rmtree(done.delta.path)
  with pytest.raises(PublishedError, match='2.delta is no complete difference'):
    delta.bring(done.path, done.delta.path)


# --- Faults between the trainer and a server: caught or healed, never served.


def place(done, **fields):
  """Changes the description of a difference."""
  file = done.delta.path / 'meta.json'
  file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def lose(done, fake):
  del fake
  (done.delta.path / UP.format(1)).unlink()


def base(done, fake):
  """The server's copy is another version than the trainer believes."""
  del fake
  file = done.path / 'meta/meta.json'
  meta = json.loads(file.read_text())
  meta['extras']['version'] = 0
  file.write_text(json.dumps(meta))


def reorder(done, fake):
  del fake
  one, two = (done.delta.path / UP.format(i) for i in (0, 1))
  pieces = one.read_bytes(), two.read_bytes()
  two.write_bytes(pieces[0])
  one.write_bytes(pieces[1])


def truncate(done, fake):
  del fake
  file = done.delta.path / UP.format(1)
  file.write_bytes(file.read_bytes()[:-5])


def restart(done, fake):
  del done
  fake.kill()
  fake.start()


FAULTS = {
  lose: 'tensor model.layers.1.mlp.up_proj.weight is missing',
  base: 'holds version 0',
  reorder: 'layers/up: published',
  truncate: 'tensor model.layers.1.mlp.up_proj.weight is missing or damaged',
  restart: '',  # it reads the whole copy
}


def bfloat16(fakes, folder, **changes):
  for fake in fakes:
    fake.reads = True
    fake.describes['dtype'] = 'bfloat16'
  return make(fakes, folder, sync='delta', dtype='bfloat16', **changes)


async def load(engine, params, version):
  report = await engine.sync(WeightsUpdate(params, version))
  await engine.resume()
  return report


async def play(fakes, engine, plant=lambda done: None):
  """Three versions, calls all the time; returns the reports of the syncs.

  plant: called with the difference of the second before servers load it.
  """
  params = [make_params()]
  params += [step(params[0]), step(step(params[0]))]
  sums = [sync.checksums(p, 'bfloat16') for p in params]
  publish = engine._publisher.publish_delta

  def planted(*args):
    done = publish(*args)
    if done.delta and done.version == 2:
      plant(done)
    return done

  engine._publisher.publish_delta = planted
  reports, calls = [await load(engine, params[0], 1)], []
  for version in (2, 3):
    calls += [
      asyncio.create_task(
        once(engine, (1, 2, i), Sampling(max_tokens=20, seed=i))
      )
      for i in range(6)
    ]
    await asyncio.sleep(0.05)
    reports.append(await load(engine, params[version - 1], version))
    for fake in fakes:
      assert fake.held == sums[version - 1]
  for i, done in enumerate(await asyncio.gather(*calls)):
    check((1, 2, i % 6), done)
  assert engine.version == 3
  for fake in fakes:
    assert fake.served and all(held in sums for held in fake.served)
  await engine.shutdown()
  return reports


@pytest.mark.parametrize('fakes', [1, 2], indirect=True)
def test_servers_follow_by_what_changed(fakes, tmp_path, caplog):
  with caplog.at_level(logging.WARNING):
    reports = asyncio.run(play(fakes, bfloat16(fakes, tmp_path)))
  whole, *parts = (r.bytes for r in reports)
  assert all(0 < part < whole / 2 for part in parts)
  assert not [r for r in caplog.records if 'as a whole' in r.message]


@pytest.mark.parametrize('fault', FAULTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize('fakes', [1, 2], indirect=True)
def test_a_fault_is_never_served(fakes, tmp_path, caplog, fault):
  engine = bfloat16(fakes, tmp_path)
  plant = lambda done: fault(done, fakes[-1])
  for fake in fakes:
    fake.delay = 0.01
  with caplog.at_level(logging.WARNING):
    reports = asyncio.run(play(fakes, engine, plant))
  whole, second, third = (r.bytes for r in reports)
  assert third < whole / 2  # by what changed, again
  said = [r.message for r in caplog.records if 'as a whole' in r.message]
  if FAULTS[fault]:
    [message] = said
    assert message.startswith('version 2 is published as a whole: ')
    assert FAULTS[fault] in message
    assert second > whole
  else:
    assert not said and second < whole / 2


@pytest.mark.parametrize('call', ['searchrl_load', 'searchrl_checksums'])
def test_a_server_that_dies_as_it_applies_gets_everything(
  fake, tmp_path, monkeypatch, caplog, call
):
  """It comes back while the trainer waits for it."""
  engine, died = bfloat16([fake], tmp_path), []

  def dies(done):
    del done
    fake.dies_at = call

  connect = servers.Server._connect

  async def back(self):
    if fake.dead and not died:
      died.append(call)
      await asyncio.to_thread(restart, None, fake)
    await connect(self)

  monkeypatch.setattr(servers.Server, '_connect', back)
  with caplog.at_level(logging.WARNING):
    reports = asyncio.run(play([fake], engine, dies))
  assert died and reports[1].bytes > reports[0].bytes > 2 * reports[2].bytes
  assert engine.stats()['restarts'] == 1


def test_a_copy_that_was_left_half_changed_is_no_publication(
  tmp_path, monkeypatch
):
  """Its process was killed: a server that comes back does not load it."""
  out = acknowledged(tmp_path, make_params())
  done = out.publish_delta(step(make_params()), 2)

  def killed(piece, bits):
    bits[:1] += 1
    raise SystemExit

  with monkeypatch.context() as m:
    m.setattr(delta, 'apply', killed)
    with pytest.raises(SystemExit):
      delta.bring(done.path, done.delta.path)
  for load_it in (
    lambda: published.open_published(done.path),
    lambda: delta.bring(done.path, done.delta.path),
  ):
    with pytest.raises(PublishedError, match='no complete publication'):
      load_it()


def test_servers_elsewhere_are_refused(tmp_path):
  class Far:
    url = 'http://10.0.0.1:8000'

  with pytest.raises(EngineError, match="engine.sync='delta' with .*10.0.0.1"):
    make([Far], tmp_path, sync='delta', dtype='bfloat16')


# --- The checksums of a server on a CPU, without one.


@pytest.mark.parametrize('dtype', [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize('transposed', [False, True])
def test_the_compiled_checksum_is_the_trainers(dtype, transposed):
  pytest.importorskip('numba')
  from searchrl_jax.engines.vllm import hashes

  rng = np.random.default_rng(0)
  x = rng.normal(size=(3, 37, 50)).astype(dtype)
  x[rng.random(x.shape) < 0.2] = -0.0
  [text] = checksum.checksums({'x': x}).values()
  bits = x.view(f'u{x.itemsize}')
  low = high = 0
  for i, layer in enumerate(bits):
    steps = (50, 1)
    if transposed:
      layer, steps = np.ascontiguousarray(layer.T), (1, 50)
    a, b = hashes.compiled()(layer, i * 37 * 50, *steps)
    low, high = low + a, high + b
  assert text.endswith(f':{low % 2**32:08x}{high % 2**32:08x}')
