"""Servers that are full, taken by another, dying, asleep or lost."""

import asyncio
import logging
import types

import pytest

from searchrl_jax.engines.core import (
  EngineError,
  Sampling,
  SyncError,
  WeightsUpdate,
)
from searchrl_jax.engines.vllm.servers import Handle
from tests.clock import until
from tests.engines.common import make_params
from tests.engines.contract import once
from tests.engines.fake_vllm import check, load, make

pytestmark = pytest.mark.slow

two = pytest.mark.parametrize('fakes', [2], indirect=True)


async def restart(fake):
  await asyncio.to_thread(fake.kill)
  await asyncio.to_thread(fake.start)


def say(engine, n, tokens=5):
  """n calls at once."""
  return [
    asyncio.create_task(
      once(engine, (1, 2, i), Sampling(max_tokens=tokens, seed=i))
    )
    for i in range(n)
  ]


# --- More calls than places.


@pytest.mark.long
def test_calls_wait_here_and_at_nobodys_expense(fake, tmp_path):
  """All of them take longer than one may, each is served in time."""
  engine = make([fake], tmp_path, slots=2, timeout=4.0, deadline=4.0)

  async def main():
    await load(engine, 1)
    fake.delay = 0.08
    done = await asyncio.gather(*say(engine, 48))
    await engine.shutdown()
    return done

  for i, done in enumerate(asyncio.run(main())):
    check((1, 2, i), done)
  assert fake.most_running == 4 and len(fake.asked) == 48
  assert engine.stats()['retries'] == 0


def test_a_sync_and_its_checks_pass_those_that_wait(fake, tmp_path):
  engine = make([fake], tmp_path, slots=2)

  async def main():
    await load(engine, 1)
    fake.stalls_at = 2
    calls = say(engine, 12)
    await until(lambda: len(fake.stalled) == 4)
    assert len(await engine.logps((1, 2, 3))) == 3
    await engine.sync(WeightsUpdate(make_params(1), 2))
    fake.stalls_at = 10**9
    await once(engine, (1,), Sampling(max_tokens=1, probe=True))
    await asyncio.sleep(0.05)
    assert len(fake.asked) == 4 + 2  # no one that waits was sent
    await engine.resume()
    done = await asyncio.gather(*calls)
    await engine.shutdown()
    return done

  done = asyncio.run(main())
  for i, one in enumerate(done):
    check((1, 2, i), one)
  assert sum(1 in one.versions for one in done) == 4
  assert engine.stats()['aborted_requests'] == 4
  assert engine.stats()['retries'] == 0


@two
def test_those_that_wait_for_a_dead_server_go_to_another(fakes, tmp_path):
  engine = make(fakes, tmp_path, slots=1)

  async def main():
    await load(engine, 1)
    for fake in fakes:
      fake.stalls_at = 2
    calls = say(engine, 12)
    await until(lambda: all(len(f.running) == 2 for f in fakes))
    await asyncio.to_thread(fakes[0].kill)
    fakes[1].stalls_at = 10**9
    done = await asyncio.gather(*calls)
    await engine.shutdown()
    return done

  for i, done in enumerate(asyncio.run(main())):
    check((1, 2, i), done)
  assert fakes[1].most_running == 2
  assert engine.stats()['retries'] == 2  # of those that were under way


def test_a_server_that_is_gone_ends_no_call_of_another(tmp_path):
  urls = ('http://127.0.0.1:1', 'http://127.0.0.1:2')
  engine = make([types.SimpleNamespace(url=url) for url in urls], tmp_path)
  lost, late = engine._servers

  async def main():
    back = asyncio.Event()

    async def fails():
      raise EngineError(f'{lost.url} is gone')

    async def recovers():
      await back.wait()
      late.ready = True

    engine._enter()
    lost.prepare, late.prepare = fails, recovers
    choose = lambda: engine._choose(Handle([1]), None, False)
    call = asyncio.create_task(choose())
    await until(lambda: lost._recovery and lost._recovery.done())
    await asyncio.sleep(0.01)
    assert not call.done()
    back.set()
    assert await call is late
    late.ready, late._recovery, late.prepare = False, None, fails
    with pytest.raises(EngineError, match=lost.url):  # none is left
      await choose()
    await engine.shutdown()

  asyncio.run(main())


# --- Another client.


@pytest.mark.parametrize('seen_by', ['rest', 'sync'])
def test_weights_of_another_client_stop_the_run(fake, tmp_path, seen_by):
  ours = make([fake], tmp_path / 'ours')
  theirs = make([fake], tmp_path / 'theirs')

  async def main():
    await load(ours, 5, seed=1)
    await ours.rest()
    await ours.wake()
    await load(ours, 6, seed=1)
    # The same version, the same weights: still not ours.
    await load(theirs, 6, seed=1)
    with pytest.raises(SyncError, match='own servers') as e:
      await (ours.rest() if seen_by == 'rest' else load(ours, 7))
    assert fake.url in str(e.value)
    assert fake.loaded.version == 6
    await theirs.rest()
    await ours.shutdown()
    await theirs.shutdown()

  asyncio.run(main())


def test_a_restart_is_not_taken_for_another_client(fake, tmp_path):
  engine = make([fake], tmp_path)

  async def main():
    await load(engine, 5)
    await restart(fake)
    await engine.rest()
    check((1, 2), await once(engine, (1, 2), Sampling(max_tokens=3)))
    await asyncio.to_thread(fake.kill)
    await engine.rest()
    await asyncio.to_thread(fake.start)
    check((1, 2), await once(engine, (1, 2), Sampling(max_tokens=3)))
    await engine.shutdown()

  asyncio.run(main())
  assert engine.stats()['restarts'] == 2


# --- Dying.


@pytest.mark.parametrize(
  'call', ['pause', 'searchrl_load', 'reset_prefix_cache', 'searchrl_checksums']
)
def test_an_engine_that_dies_in_a_sync_ends_it(fake, tmp_path, call):
  """Nothing is sampled with what it may hold."""
  engine = make([fake], tmp_path)

  async def main():
    await load(engine, 1)
    fake.dies_at = call
    with pytest.raises((EngineError, SyncError), match=f'{fake.url}.*dead'):
      await load(engine, 2, seed=1)
    assert engine.version == 1 and not fake.asked
    await restart(fake)
    await load(engine, 3, seed=1)
    check((1, 2), await once(engine, (1, 2), Sampling(max_tokens=3)))
    await engine.shutdown()

  asyncio.run(main())
  assert engine.stats()['restarts'] == 1 and fake.loaded.version == 3


def test_a_server_whose_engine_is_dead_is_not_ready(fake, tmp_path):
  """Though it still lists its model."""
  engine = make([fake], tmp_path, start_seconds=0.5)

  async def main():
    await load(engine, 1)
    fake.dead, fake.faults = True, [500]
    with pytest.raises(EngineError, match='start_seconds=0.5.*/health'):
      await once(engine, (1, 2), Sampling(max_tokens=3))
    await engine.shutdown()

  asyncio.run(main())


# --- Sleep.


@two
def test_a_server_that_was_coming_back_wakes_with_the_weights(fakes, tmp_path):
  engine = make(fakes, tmp_path, sleep=True)

  async def main():
    await load(engine, 5, seed=1)
    await restart(fakes[1])
    engine._servers[1].ready = False
    engine._servers[1].recovery()
    await engine.rest()
    assert all(f.asleep for f in fakes)
    await engine.wake()
    one = engine.replicas[1]
    check((1, 2), await once(one, (1, 2), Sampling(max_tokens=4)))
    await engine.shutdown()

  asyncio.run(main())
  assert fakes[1].loaded.version == 5


def test_a_server_that_crashed_asleep_is_loaded_as_it_wakes(fake, tmp_path):
  engine = make([fake], tmp_path, sleep=True)

  async def main():
    await load(engine, 5)
    await engine.rest()
    await restart(fake)
    await engine.wake()
    assert fake.loaded.version == 5
    check((1, 2), await once(engine, (1, 2), Sampling(max_tokens=4)))
    await restart(fake)  # and one that crashed before it was sent to sleep
    await engine.rest()
    assert fake.asleep and fake.loaded.version == 5
    await engine.wake()
    await engine.shutdown()

  asyncio.run(main())


def test_a_sleep_that_fails_leaves_servers_to_be_brought_back(fake, tmp_path):
  engine = make([fake], tmp_path, sleep=True, start_seconds=0.3, deadline=5.0)

  async def main():
    await load(engine, 5)
    await asyncio.to_thread(fake.kill)
    with pytest.raises(EngineError, match='start_seconds'):
      await engine.rest()
    await asyncio.to_thread(fake.start)
    done = await once(engine, (1, 2), Sampling(max_tokens=4, probe=True))
    check((1, 2), done)
    await engine.shutdown()

  asyncio.run(main())


# --- Said aloud.


def test_who_is_lost_is_logged(fake, tmp_path, caplog):
  engine = make([fake], tmp_path, start_seconds=0.5)

  async def main():
    await load(engine, 5)
    fake.faults = [503]
    await once(engine, (1, 2), Sampling(max_tokens=2))
    await asyncio.to_thread(fake.kill)
    with pytest.raises(EngineError, match='start_seconds=0.5.*Connect'):
      await once(engine, (1, 2), Sampling(max_tokens=2))
    await engine.shutdown()
    await asyncio.to_thread(fake.start)

  with caplog.at_level(logging.WARNING):
    asyncio.run(main())
  said = [r.message for r in caplog.records if fake.url in r.message]
  assert len(said) == 2 and '503' in said[0] and 'Connect' in said[1]


def test_a_log_prob_that_is_no_number_is_refused(fake, tmp_path):
  engine = make([fake], tmp_path)

  async def main():
    await load(engine, 5)
    fake.logp_of_all = [None]
    with pytest.raises(EngineError, match=f'{fake.url}.*finite'):
      await once(engine, (1, 2), Sampling(max_tokens=2))
    await engine.shutdown()

  asyncio.run(main())


def test_nothing_published_stays_behind(fake, tmp_path):
  engine = make([fake], tmp_path)

  async def main():
    await load(engine, 5)
    assert [*(tmp_path / 'published').iterdir()]
    await engine.shutdown()

  asyncio.run(main())
  assert not [*(tmp_path / 'published').iterdir()]


def test_weights_for_servers_of_this_machine_stay_in_memory(fake, tmp_path):
  (tmp_path / 'memory').mkdir()
  engine = make([fake], tmp_path, memory=str(tmp_path / 'memory'))

  async def main():
    await load(engine, 5)
    assert fake.loaded.path.parents[1] == tmp_path / 'memory'
    await engine.shutdown()

  asyncio.run(main())
  assert not [*(tmp_path / 'memory').iterdir()]
  far = types.SimpleNamespace(url='http://10.0.0.1:8000')
  far = make([fake, far], tmp_path, memory=str(tmp_path / 'memory'))
  done = far._publisher.publish(make_params(), 6)
  assert done.path == tmp_path / 'published' / '00000006'


def test_a_server_that_does_not_stop_keeps_no_other_from_it(fake, tmp_path):
  engine, stopped = make([fake], tmp_path), []

  class Sidecar:
    def __init__(self, fault):
      self.fault = fault

    def stop(self):
      stopped.append(self.fault)
      if self.fault:
        raise self.fault

  async def main():
    await load(engine, 5)
    engine._sidecars = [Sidecar(OSError('not ended')), Sidecar(None)]
    with pytest.raises(OSError, match='not ended'):
      await engine.shutdown()

  asyncio.run(main())
  assert len(stopped) == 2
  assert not [*(tmp_path / 'published').iterdir()]
