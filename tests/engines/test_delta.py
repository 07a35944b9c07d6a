"""Differences of versions: exact, small, and nothing wrong is ever served."""

import asyncio
from concurrent import futures
import dataclasses
import errno
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import zstandard

from searchrl_jax.devices import sharding
from searchrl_jax.engines.core import (
  DeltaError,
  EngineError,
  Sampling,
  SyncError,
  WeightsUpdate,
)
from searchrl_jax.engines.vllm import plugin, servers
from searchrl_jax.engines.weights import delta, publication, published, sync
from searchrl_jax.engines.weights.published import PublishedError
from searchrl_jax.models import decoder
from searchrl_jax.run import session
from tests.conftest import ROOT
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
  piece = delta.encode(old, new)
  assert zstandard.get_frame_parameters(piece).has_checksum
  raw = zstandard.ZstdDecompressor().decompress(piece)
  at, steps = [2, 255, 0, 0], [2, 1, 1, 0, 0, 0]  # +1 -> 2, -1 -> 1
  assert list(raw) == [3, 0, 0, 0, 0, 0, 0, 0, *at, *steps]
  found, steps = delta.decode(piece)
  assert found.tolist() == [2, 258, 259]
  assert steps.tolist() == [1, 0xFFFF, 0xFFFF]
  assert delta.apply(old, found, steps).tolist() == [1, 0x3F7F, 0xFFFF]
  np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize('share', [0, 1e-4, 0.02, 0.5, 1])
def test_any_bits_come_back(share):
  rng = np.random.default_rng(0)
  n = (1 << 20) + 77
  old = rng.integers(0, 1 << 16, n, np.uint16)
  new = np.where(rng.random(n) < share, rng.integers(0, 1 << 16, n), old)
  new = new.astype(np.uint16)
  piece = delta.encode(old, new)
  assert (piece == b'') == (share == 0)
  if piece:
    at, steps = delta.decode(piece)
    assert (np.diff(at) > 0).all()
    delta.apply(old, at, steps)
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
    new, base, changed = delta.bring(done.path, done.delta.path, locate=True)
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
  assert delta.bring(same.path, same.delta.path, locate=True)[2] == {}


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
  # Another copy of the same version: `bring` would take it for done.
  assert out.publish_delta(step(params), 4).delta is None
  out.prune(4)
  out.publish_delta(params, 5)
  out.clear()
  assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize('first', [True, False])
def test_several_workers_bring_a_copy_once(tmp_path, first):
  """With `locate`, each has what changed."""
  out = acknowledged(tmp_path, make_params())
  before = dict(contents(out.path(1))[1])
  done = out.publish_delta(step(make_params()), 2)
  _, base, told = delta.bring(done.path, done.delta.path, locate=first)
  assert base == 1 and (told is None) != first
  want = contents(done.path)
  new, base, changed = delta.bring(done.path, done.delta.path, locate=True)
  assert (new.version, base) == (2, 1)
  assert contents(done.path) == want
  for name, found in changed.items():
    old, bits = (np.frombuffer(x[name], np.uint16) for x in (before, want[1]))
    at = np.flatnonzero(old != bits)
    np.testing.assert_equal(found, (at, bits[at]))
  np.testing.assert_equal(told, changed if first else None)
  assert delta.bring(done.path, done.delta.path)[2] is None


def test_workers_that_bring_a_copy_together_bring_it_once(
  tmp_path, monkeypatch
):
  out = acknowledged(tmp_path / 'a', make_params())
  done = out.publish_delta(step(make_params()), 2)
  change, begun = delta.apply, threading.Event()

  def slowly(*args):
    begun.wait(0.2)  # once: the other worker has time to begin
    begun.set()
    return change(*args)

  monkeypatch.setattr(delta, 'apply', slowly)
  with futures.ThreadPoolExecutor() as pool:
    args = [done.path] * 2, [done.delta.path] * 2
    found = [held.version for held, *_ in pool.map(delta.bring, *args)]
  want = publisher(tmp_path / 'b').publish(step(make_params()), 2)
  assert found == [2, 2] and contents(done.path) == contents(want.path)


def test_a_damaged_difference_leaves_the_copy_as_it_is(tmp_path):
  out = acknowledged(tmp_path, make_params())
  before = contents(out.path(1))
  done = out.publish_delta(step(make_params()), 2)
  file = done.delta.path / UP.format(1)
  piece = file.read_bytes()
  half = len(piece) // 2
  flipped = piece[:half] + bytes([piece[half] ^ 1]) + piece[half + 1 :]
  for damaged in flipped, piece[:-5], piece[:half], b'', None:
    file.unlink() if damaged is None else file.write_bytes(damaged)
    with pytest.raises(PublishedError, match='missing or damaged'):
      delta.bring(done.path, done.delta.path)
    assert contents(done.path) == before


def test_every_server_that_can_takes_over_only_what_changed(
  tmp_path, monkeypatch
):
  """One that holds another version than the base loads the whole copy."""
  out = acknowledged(tmp_path, make_params())
  done = out.publish_delta(step(make_params()), 2)
  monkeypatch.setattr(plugin, '_plain', lambda *unused: True)
  monkeypatch.setattr(plugin, '_tied', lambda *unused: False)
  wrote, whole = [], []
  monkeypatch.setattr(plugin, '_change', lambda *args: wrote.append(args[1]))
  for held in 1, 1, 0:
    worker = plugin.Worker()
    model = types.SimpleNamespace(modules=lambda: [])
    worker.model_runner = types.SimpleNamespace(get_model=lambda m=model: m)
    worker.parallel_config = types.SimpleNamespace(world_size=1)
    worker.reload_weights = lambda **how: whole.append(how)
    worker._searchrl_published = dataclasses.replace(done, version=held)
    worker.searchrl_load(str(done.path), str(done.delta.path))
    assert worker._searchrl_published.version == 2
  assert len(whole) == 1
  one, two = wrote
  assert one
  np.testing.assert_equal(one, two)


@pytest.mark.skipif(jax.device_count() < 8, reason='needs eight devices')
def test_of_shards_devices_gather_one_tensor_after_another(
  tmp_path, monkeypatch
):
  """In different orders, they would wait for each other."""
  gather, lock = publication._served, threading.Lock()

  def alone(*args):
    assert lock.acquire(blocking=False)
    time.sleep(0.001)
    out = gather(*args)
    lock.release()
    return out

  mesh = sharding.make_mesh(2, 2, 2)
  where = decoder.param_shardings(CFG, mesh)
  place = lambda params: jax.tree.map(jax.device_put, params, where)
  out = acknowledged(tmp_path / 'a', place(make_params()))
  after = step(make_params())
  monkeypatch.setattr(publication.os, 'cpu_count', lambda: 8)
  with monkeypatch.context() as m:
    m.setattr(publication, '_served', alone)
    done = out.publish_delta(place(after), 2)
  delta.bring(done.path, done.delta.path)
  want = publisher(tmp_path / 'b').publish(after, 2)
  assert contents(done.path) == contents(want.path)


# --- What is left of differences.


def left(folder):
  return sorted(p.name for p in folder.iterdir())


def no_room(folder, pieces, *unused):
  (folder / [*pieces][0]).write_bytes(b'part')
  raise OSError(errno.ENOSPC, 'No space left on device')


def test_without_room_for_what_changed_everything_is_to_be_published(
  tmp_path, monkeypatch
):
  out = acknowledged(tmp_path, make_params())
  after = step(make_params())
  with monkeypatch.context() as m:
    m.setattr(delta, 'write', no_room)
    with pytest.raises(DeltaError, match='since version 1 .* No space left'):
      out.publish_delta(after, 2)
  assert out.publish_delta(after, 2).delta is None
  assert left(tmp_path) == ['00000001', '00000002']


@pytest.mark.parametrize('by', ['publish', 'publish_delta', 'prune', 'clear'])
def test_what_a_killed_process_left_is_deleted(tmp_path, by):
  params = make_params()
  out = acknowledged(tmp_path, params)
  part = tmp_path / '00000009.delta'
  part.mkdir()
  (part / UP.format(1)).write_bytes(b'part')
  names = {
    'publish': ['00000001', '00000002'],
    'publish_delta': ['00000001', '00000002.delta'],
    'prune': ['00000001'],
    'clear': [],
  }
  args = {'prune': (1,), 'clear': ()}.get(by, (step(params), 2))
  getattr(out, by)(*args)
  assert left(tmp_path) == names[by]


HOLDS = """
import pathlib, sys
from searchrl_jax.engines.weights import memory
path = pathlib.Path(sys.argv[1])
path.mkdir()
held = memory.lock(path)
print('held', flush=True)
sys.stdin.read()
"""


def test_what_another_process_has_in_use_stays(tmp_path):
  out = acknowledged(tmp_path, make_params())
  args = [sys.executable, '-c', HOLDS, str(tmp_path / '00000002.delta')]
  pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
  with subprocess.Popen(args, cwd=ROOT, text=True, **pipes) as other:
    assert other.stdout.readline() == 'held\n'
    out.prune(1)
    assert left(tmp_path) == ['00000001', '00000002.delta']
    with pytest.raises(DeltaError, match='File exists'):
      out.publish_delta(step(make_params()), 2)
    other.stdin.close()
  out.prune(1)
  assert left(tmp_path) == ['00000001']


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


def remove(held):
  """Between two syncs: of what every server holds."""
  shutil.rmtree(held.path)


def shorten(held):
  file = held.path / 'arrays' / f'state.{UP.format(1)}' / '0.0'
  os.truncate(file, 100)


EARLIER = {
  remove: 'since version 1 could not be written: .*missing or damaged',
  shorten: f'since version 1 could not be written: .*{UP.format(1)}.* damaged',
}
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


async def play(
  fakes, engine, plant=lambda done: None, earlier=lambda held: None
):
  """Three versions, calls all the time; returns the reports of the syncs.

  plant: called with the difference of the second before servers load it.
  earlier: with the publication of the first before the second is made.
  """
  params = [make_params()]
  params += [step(params[0]), step(step(params[0]))]
  sums = [sync.checksums(p, 'bfloat16') for p in params]
  publish = engine._publisher.publish_delta

  def planted(params, version, known):
    if version == 2:
      earlier(engine._publisher._held)
    done = publish(params, version, known)
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
  assert not wholes(caplog)


def wholes(caplog):
  return [r.message for r in caplog.records if 'as a whole' in r.message]


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
  said = wholes(caplog)
  assert engine.stats()['refused_deltas'] == len(said)
  if FAULTS[fault]:
    [message] = said
    assert message.startswith('version 2 is published as a whole: ')
    assert FAULTS[fault] in message
    assert second > whole
  else:
    assert not said and second < whole / 2


@pytest.mark.parametrize('fault', EARLIER, ids=lambda f: f.__name__)
@pytest.mark.parametrize('fakes', [1, 2], indirect=True)
def test_a_copy_that_is_lost_between_syncs_is_published(
  fakes, tmp_path, caplog, fault
):
  engine = bfloat16(fakes, tmp_path)
  with caplog.at_level(logging.WARNING):
    reports = asyncio.run(play(fakes, engine, earlier=fault))
  whole, second, third = (r.bytes for r in reports)
  assert second == whole > 2 * third
  [message] = wholes(caplog)
  assert re.search(EARLIER[fault], message)
  assert engine.stats()['refused_deltas'] == 1


def other_model(fake):
  fake.describes['n_layers'] = 99
  restart(None, fake)


def gone(fake):
  fake.kill()


def keeps(fake):
  fake.reset_works = False


@pytest.mark.parametrize(
  'fault, error, message',
  [
    (other_model, EngineError, 'serves another model'),
    (gone, EngineError, 'no answer in config.engine.start_seconds=0.5'),
    (keeps, SyncError, 'did not drop its prefix cache'),
  ],
)
@pytest.mark.parametrize('fakes', [2], indirect=True)
def test_what_no_publication_heals_stops_the_run(
  fakes, tmp_path, caplog, fault, error, message
):
  """Though the difference fails at the other server."""
  engine = bfloat16(fakes, tmp_path, start_seconds=0.5)

  async def main():
    await load(engine, make_params(), 1)
    await asyncio.to_thread(fault, fakes[1])
    fakes[0].load_error = 'planted'
    with pytest.raises(error, match=message):
      await load(engine, step(make_params()), 2)
    await engine.shutdown()

  with caplog.at_level(logging.WARNING):
    asyncio.run(main())
  assert not wholes(caplog) and engine.stats()['refused_deltas'] == 0


@pytest.mark.parametrize(
  'how, stats, shown',
  [
    ('full', {'refused_deltas': 3}, None),
    ('delta', {'refused_deltas': 3}, 3),
    ('delta', {}, None),  # in process
  ],
)
def test_refused_differences_are_a_metric(how, stats, shown):
  """Also of a step whose sync fails."""
  error = EngineError('planted')

  def publish():
    raise error

  run = types.SimpleNamespace(
    config=types.SimpleNamespace(engine=types.SimpleNamespace(sync=how)),
    engine=types.SimpleNamespace(wake=lambda: None, stats=lambda: stats),
    signals=types.SimpleNamespace(finish=lambda result: result),
    _stops=lambda: False,
    publish=publish,
  )
  metrics, failure = session.Session._advance(run)
  assert failure is error
  assert metrics.get('sync/refused_deltas') == shown


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


def test_a_server_that_comes_back_later_loads_what_was_brought(fake, tmp_path):
  """The difference is gone then."""
  engine, after = bfloat16([fake], tmp_path), step(make_params())

  async def main():
    await load(engine, make_params(), 1)
    await load(engine, after, 2)
    await asyncio.to_thread(restart, None, fake)
    check((1, 2, 3), await once(engine, (1, 2, 3), Sampling(max_tokens=5)))
    await engine.shutdown()

  asyncio.run(main())
  assert fake.loaded.version == 2
  assert fake.served[-1] == sync.checksums(after, 'bfloat16')


def test_a_copy_that_was_left_half_changed_is_no_publication(
  tmp_path, monkeypatch
):
  """Its process was killed: a server that comes back does not load it."""
  out = acknowledged(tmp_path, make_params())
  done = out.publish_delta(step(make_params()), 2)

  def killed(bits, *piece):
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
