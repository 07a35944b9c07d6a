"""The engine of servers: nothing lost, nothing twice, versions told apart."""

import asyncio
import dataclasses
import types

import numpy as np
import pytest

from searchrl_jax.engines.core import (
  EngineError,
  Sampling,
  SyncError,
  WeightsUpdate,
)
from searchrl_jax.engines.vllm import client, plugin
from searchrl_jax.engines.vllm.client import VllmEngine
from searchrl_jax.engines.weights import checksum, sync
from searchrl_jax.models import decoder, deltanet, families
from searchrl_jax.models.experts import Sizes
from searchrl_jax.text.tokenizer import train_bpe
from searchrl_jax.types import Prompt
from tests.clock import until
from tests.engines.common import CFG, Letters, make_params
from tests.engines.contract import EngineContract, once, prompt
from tests.engines.fake_vllm import check, config, load, make, server, toy_logps

pytestmark = pytest.mark.slow

two = pytest.mark.parametrize('fakes', [2], indirect=True)


class TestContract(EngineContract):
  tolerance = 1e-5
  draws_by_token = False

  @pytest.fixture(scope='class')
  def engine(self, tmp_path_factory):
    fake = server()
    engine = make([fake], tmp_path_factory.mktemp('run'))
    asyncio.run(load(engine, 0))
    yield engine
    asyncio.run(engine.shutdown())
    fake.kill()


# --- Weights.


def test_a_sync_holds_calls_and_parts_their_tokens_by_version(fake, tmp_path):
  engine = make([fake], tmp_path)
  start = prompt(engine)

  async def main():
    await load(engine, 3)
    fake.stalls_at = 12
    handle = engine.open(start)
    task = asyncio.create_task(
      engine.generate(handle, Sampling(max_tokens=30, seed=1))
    )
    await until(lambda: fake.stalled)
    report = await engine.sync(WeightsUpdate(make_params(1), 7))
    fake.stalls_at = 10**9
    assert (report.version, engine.version) == (7, 7)
    asked = len(fake.asked)
    probe = await once(engine, start.ids, Sampling(max_tokens=3, probe=True))
    assert set(probe.versions.tolist()) == {7}
    assert len(await engine.logps(start.ids)) == len(start.ids)
    await asyncio.sleep(0.05)
    assert len(fake.asked) == asked + 2 and not task.done()
    await engine.resume()
    done = await task
    assert len(handle) == len(start.ids) + 30
    await engine.shutdown()
    return done

  done = asyncio.run(main())
  assert np.unique(done.versions).tolist() == [3, 7]
  assert (np.diff(done.versions) >= 0).all() and len(done.ids) == 30
  check(start.ids, done)
  assert engine.stats()['aborted_requests'] == 1


@pytest.mark.parametrize('queues', [True, False])
def test_a_request_that_came_after_the_pause_is_not_served_by_new_weights(
  fake, tmp_path, queues
):
  engine = make([fake], tmp_path)
  start = prompt(engine)
  fake.queues_when_paused = queues

  async def main():
    await load(engine, 1, seed=1)
    await load(engine, 0)
    fake.late = True
    task = asyncio.create_task(
      once(engine, start.ids, Sampling(max_tokens=5, seed=1))
    )
    await until(lambda: fake.asked)
    # It is written already, so that the pause comes at once.
    await engine.sync(WeightsUpdate(tmp_path / 'published/00000001', 1))
    assert not task.done() and len(fake.asked) <= 2
    await engine.resume()
    done = await task
    await engine.shutdown()
    return done

  done = asyncio.run(main())
  assert set(done.versions.tolist()) == {1}
  check(start.ids, done)


def test_a_stop_that_begins_before_a_sync_and_ends_after_it_is_found(
  fake, tmp_path
):
  engine = make([fake], tmp_path)
  start = prompt(engine)

  async def main():
    await load(engine, 1)

    async def run(stops):
      fake.stalls_at = 15
      task = asyncio.create_task(
        once(
          engine,
          start.ids,
          Sampling(max_tokens=40, temperature=0.0, stops=stops),
        )
      )
      await until(lambda: fake.stalled)
      # The same weights: the text goes on as it was.
      await engine.sync(WeightsUpdate(make_params(), 1))
      fake.stalls_at = 10**9
      await engine.resume()
      return await task

    free = await run(())
    text = b''.join(map(Letters().token_bytes, free.ids.tolist())).decode()
    # The whole completion is the stop: wherever the cut falls, it is inside.
    stopped = await run((text[:38],))
    await engine.shutdown()
    return free, text, stopped

  free, text, stopped = asyncio.run(main())
  assert stopped.stop == text[:38]
  assert stopped.ids.tolist() == free.ids[:38].tolist()
  assert engine.stats()['aborted_requests'] == 2
  assert engine.stats()['discarded_tokens'] == 2


@two
def test_versions_go_when_every_server_has_a_newer_one(fakes, tmp_path):
  engine, folder = make(fakes, tmp_path), tmp_path / 'published'

  async def main():
    await load(engine, 1)
    await load(engine, 2, seed=1)
    assert versions(folder) == [2]
    fakes[1].load_error = 'tensor embed is missing'
    with pytest.raises(SyncError, match='embed is missing') as e:
      await load(engine, 3, seed=2)
    assert fakes[1].url in str(e.value) and 'version 3' in str(e.value)
    assert str(folder / '00000003') in str(e.value)
    assert versions(folder) == [2, 3]
    assert engine.version == 2
    fakes[1].load_error = ''
    await load(engine, 4, seed=3)
    assert versions(folder) == [4]
    # A publication of somebody else's is loaded, and none is deleted.
    await engine.sync(WeightsUpdate(folder / '00000004', 4))
    await engine.resume()
    await engine.shutdown()

  asyncio.run(main())


def test_what_a_server_holds_is_reported_as_the_trainer_sums_it(fake, tmp_path):
  engine, params = make([fake], tmp_path), make_params()

  async def main():
    report = await engine.sync(WeightsUpdate(params, 1))
    await engine.shutdown()
    return report

  report = asyncio.run(main())
  want = sync.checksums(params)
  assert (
    report.checksums
    == want
    == checksum.checksums(
      {k: v for k, v in sync.decoder.flatten(params).items()}
    )
  )
  assert report.tensors == len(want) and 'head' not in want
  assert report.bytes == CFG.n_params * 4


@pytest.mark.parametrize('name', ['layers/q', 'head'])
def test_a_tensor_that_was_not_loaded_is_named(fake, tmp_path, name):
  engine = make([fake], tmp_path)
  fake.sums = {name: [1, 2]}

  async def main():
    with pytest.raises(SyncError, match=f'1 of .* differ:\n  {name}: publ'):
      await load(engine, 1)
    await engine.shutdown()

  asyncio.run(main())


def test_a_cache_that_was_not_dropped_stops_the_run(fake, tmp_path):
  engine = make([fake], tmp_path)
  fake.reset_works = False

  async def main():
    with pytest.raises(SyncError, match=f'{fake.url}.*prefix cache'):
      await load(engine, 1)
    await engine.shutdown()

  asyncio.run(main())


@two
@pytest.mark.parametrize('stale', [None, 0, 1])
def test_each_server_is_verified(fakes, tmp_path, stale):
  """A stale cache in either one is found, whatever the server says."""
  engine, canary = make(fakes, tmp_path), tuple(range(1, 30))

  def trainer(version):
    return lambda ids: np.array(
      [0.0]
      + [
        toy_logps(version, ids[:n].tolist())[i] for n, i in enumerate(ids) if n
      ]
    )

  async def main():
    for version in (1, 2):
      if version == 2 and stale is not None:
        fakes[stale].keeps_cache = True
        # Its blocks stand there without a salt.
        await once(
          engine.replicas[stale],
          canary,
          Sampling(max_tokens=1, temperature=0.0),
        )
      await sync.sync_and_verify(
        engine, make_params(version), version, canary, trainer(version), 1e-4
      )

  if stale is None:
    asyncio.run(main())
  else:
    with pytest.raises(SyncError, match='old weights'):
      asyncio.run(main())


# --- Failures.


@pytest.mark.long
@pytest.mark.parametrize('fault', [503, 500, 429, 'hang'])
def test_a_request_that_failed_is_sent_again_as_it_was(fake, tmp_path, fault):
  engine = make([fake], tmp_path, timeout=2.0 if fault == 'hang' else 5.0)
  start = prompt(engine)

  async def main():
    await load(engine, 0)
    want = await once(engine, start.ids, Sampling(max_tokens=6, seed=9))
    del fake.asked[:]
    fake.faults = [fault]
    handle = engine.open(start)
    done = await engine.generate(handle, Sampling(max_tokens=6, seed=9))
    assert done.ids.tolist() == want.ids.tolist()
    assert handle.ids == [*start.ids, *done.ids.tolist()]
    first, second = fake.asked
    assert first == second
    await engine.shutdown()

  asyncio.run(main())
  assert engine.stats()['retries'] == 1
  assert engine.stats()['generated_tokens'] == 12


@pytest.mark.long
def test_attempts_and_deadlines_end_a_call_with_the_reason(fake, tmp_path):
  async def main():
    engine = make([fake], tmp_path / 'a', attempts=2)
    await load(engine, 0)
    fake.faults = [503, 503, 503]
    with pytest.raises(EngineError, match='status 503.*planted.*2 attempts'):
      await once(engine, (1, 2), Sampling(max_tokens=2))
    assert fake.faults == [503]
    fake.faults = [400]
    with pytest.raises(EngineError, match='status 400.*planted'):
      await once(engine, (1, 2), Sampling(max_tokens=2))
    await engine.shutdown()
    engine = make([fake], tmp_path / 'b', deadline=1.0)
    await load(engine, 0)
    fake.delay = 0.1
    with pytest.raises(EngineError, match='config.engine.deadline=1.0'):
      await once(engine, (1, 2), Sampling(max_tokens=60))
    # A hold does not count.
    fake.delay = 0.0
    await engine.sync(WeightsUpdate(make_params(), 1))
    task = asyncio.create_task(once(engine, (1, 2), Sampling(max_tokens=2)))
    await asyncio.sleep(1.2)
    await engine.resume()
    assert len((await task).ids) == 2
    await engine.shutdown()

  asyncio.run(main())


def test_a_cancelled_call_leaves_the_handle_and_the_server(fake, tmp_path):
  engine = make([fake], tmp_path)

  async def main():
    await load(engine, 0)
    fake.delay = 0.02
    handle = engine.open(prompt(engine))
    task = asyncio.create_task(engine.generate(handle, Sampling(max_tokens=50)))
    await until(lambda: fake.running)
    with pytest.raises(EngineError, match='generating'):
      engine.append(handle, [1])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task
    assert len(handle) == 7
    fake.delay = 0.0
    assert len((await engine.generate(handle, Sampling(max_tokens=3))).ids) == 3
    await engine.shutdown()

  asyncio.run(main())


def versions(folder):
  return sorted(int(p.name) for p in folder.iterdir())


async def trajectory(engine, i, turns=3):
  """Generates and appends in turn; [(prefix, completion)]."""
  handle, out = engine.open(prompt(engine, 5 + i % 3, seed=i)), []
  for turn in range(turns):
    before = tuple(handle.ids)
    done = await engine.generate(handle, Sampling(max_tokens=6, seed=i))
    assert handle.ids == [*before, *done.ids.tolist()]
    out.append((before, done))
    engine.append(handle, [turn, i])
  engine.close(handle)
  return out


async def fleet(engine, n, **fields):
  """n trajectories at once; every token of theirs is as its version says."""
  ended = await asyncio.gather(
    *[trajectory(engine, i, **fields) for i in range(n)]
  )
  for turns in ended:
    for before, done in turns:
      assert len(done.ids) == 6
      check(before, done)
  return ended


def test_a_server_killed_in_the_middle_comes_back_with_the_weights(
  fake, tmp_path
):
  engine = make([fake], tmp_path)

  async def main():
    await load(engine, 4)
    want = await fleet(engine, 16)
    fake.stalls_at = 3
    rollout = asyncio.create_task(fleet(engine, 16))
    await until(lambda: len(fake.stalled) > 6)
    await asyncio.to_thread(fake.kill)
    fake.stalls_at = 10**9
    await asyncio.sleep(0.3)
    await asyncio.to_thread(fake.start)
    ended = await rollout
    await engine.shutdown()
    return want, ended

  want, ended = asyncio.run(main())
  # The same trajectories as without the accident, each once.
  assert [[d.ids.tolist() for _, d in t] for t in ended] == [
    [d.ids.tolist() for _, d in t] for t in want
  ]
  assert {v for t in ended for _, d in t for v in d.versions.tolist()} == {4}
  assert engine.stats()['restarts'] == 1 and fake.loaded.version == 4


def test_a_restart_that_no_request_saw_is_told_by_the_models_name(
  fake, tmp_path
):
  engine = make([fake], tmp_path)

  async def main():
    await load(engine, 4)
    await once(engine, (1, 2), Sampling(max_tokens=2))
    await asyncio.to_thread(fake.kill)
    await asyncio.to_thread(fake.start)
    done = await once(engine, (1, 2), Sampling(max_tokens=5))
    check((1, 2), done)
    # Again, and now a sync is the first to see it.
    await asyncio.to_thread(fake.kill)
    await asyncio.to_thread(fake.start)
    await load(engine, 5, seed=1)
    check((1, 2), await once(engine, (1, 2), Sampling(max_tokens=5)))
    await engine.shutdown()
    return done

  assert set(asyncio.run(main()).versions.tolist()) == {4}
  assert engine.stats()['restarts'] == 2


def test_a_restarted_server_that_cannot_be_loaded_stops_the_run(fake, tmp_path):
  engine = make([fake], tmp_path)

  async def main():
    await load(engine, 4)
    await asyncio.to_thread(fake.kill)
    await asyncio.to_thread(fake.start)
    fake.sums = {'final_norm': [0, 0]}
    with pytest.raises(SyncError, match='version 4.*\n  final_norm'):
      await fleet(engine, 4)
    await engine.shutdown()

  asyncio.run(main())


@two
def test_the_other_server_takes_over_and_the_lost_one_comes_back(
  fakes, tmp_path
):
  engine = make(fakes, tmp_path)

  async def main():
    await load(engine, 2)
    for fake in fakes:
      fake.stalls_at = 3
    rollout = asyncio.create_task(fleet(engine, 12))
    await until(lambda: len(fakes[0].stalled) > 3)
    await asyncio.to_thread(fakes[0].kill)
    for fake in fakes:
      fake.stalls_at = 10**9
    await rollout  # all of it: with what the lost one had under way
    assert engine.stats()['retries'] >= 1
    # Six trajectories are its own; it served the lost one's too.
    served = {tuple(body['prompt'][:5]) for body in fakes[1].asked}
    assert len(served) > 6
    await asyncio.to_thread(fakes[0].start)
    # Loaded, verified and among those that are asked.
    await until(lambda: engine._servers[0].ready)
    del fakes[0].asked[:]
    await fleet(engine, 12)
    assert len(fakes[0].asked) >= 12
    await engine.shutdown()

  asyncio.run(main())


@two
def test_load_is_balanced_and_a_handle_stays_with_its_cache(fakes, tmp_path):
  engine = make(fakes, tmp_path)

  async def main():
    await load(engine, 0)
    for fake in fakes:
      fake.stalls_at = 2
      del fake.asked[:]
    all_of_them = asyncio.create_task(fleet(engine, 10))
    await until(lambda: [len(f.stalled) for f in fakes] == [5, 5])
    for fake in fakes:
      fake.stalls_at = 10**9
    await all_of_them
    await engine.shutdown()

  asyncio.run(main())
  assert [len(f.asked) for f in fakes] == [15, 15]
  assert [f.most_running for f in fakes] == [5, 5]
  first = [{tuple(b['prompt'][:5]) for b in f.asked} for f in fakes]
  assert not first[0] & first[1]
  # All but the last block of what a turn sees was seen by the turn before.
  stats = engine.stats()
  assert stats['prefix_tokens'] > 0.5 * stats['prefilled_tokens']


@two
def test_a_fork_goes_where_the_prefix_is(fakes, tmp_path):
  engine = make(fakes, tmp_path)

  async def main():
    await load(engine, 0)
    handle = engine.open(prompt(engine, 20))
    await engine.generate(handle, Sampling(max_tokens=4))
    before = engine.stats()['prefix_tokens']
    child = engine.fork(handle)
    await engine.generate(child, Sampling(max_tokens=4))
    assert engine.stats()['prefix_tokens'] - before == 16
    await engine.shutdown()

  asyncio.run(main())


def test_no_two_requests_of_a_trajectory_share_a_stream(fake, tmp_path):
  engine = make([fake], tmp_path)

  async def main():
    await load(engine, 0)
    await asyncio.gather(*[trajectory(engine, i % 2) for i in range(4)])
    await engine.shutdown()

  asyncio.run(main())
  streams = {(b['seed'], tuple(b['prompt'])) for b in fake.asked}
  assert len(fake.asked) == 12 and len(streams) == 6
  assert len({seed for seed, _ in streams}) == 6


def test_prefixes_are_salted_by_version(fake, tmp_path):
  engine = make([fake], tmp_path)

  async def main():
    for version in (1, 2):
      await load(engine, version)
      await once(engine, (1, 2), Sampling(max_tokens=1))
    await engine.shutdown()

  asyncio.run(main())
  assert [b['cache_salt'] for b in fake.asked] == ['v1', 'v2']


def test_a_sleeping_engine_holds_its_calls(fake, tmp_path):
  engine = make([fake], tmp_path, sleep=True)

  async def main():
    await load(engine, 1)
    fake.stalls_at = 3
    task = asyncio.create_task(trajectory(engine, 0, turns=1))
    await until(lambda: fake.stalled)
    await engine.rest()
    fake.stalls_at = 10**9
    assert fake.asleep and not fake.running
    await asyncio.sleep(0.05)
    assert not task.done()
    await engine.wake()
    assert not fake.asleep
    ((before, done),) = await task
    check(before, done)
    await engine.shutdown()

  asyncio.run(main())


def test_a_pause_and_a_sleep_left_by_a_dead_trainer_are_ended(fake, tmp_path):
  fake.paused = fake.asleep = True
  engine = make([fake], tmp_path)

  async def main():
    # As sync.py does: a probe of what is there comes first.
    async with asyncio.timeout(5):
      await once(engine, (1, 2), Sampling(max_tokens=1, probe=True))
    await load(engine, 1)
    check((1, 2), await once(engine, (1, 2), Sampling(max_tokens=3)))
    await engine.shutdown()

  asyncio.run(main())


# --- Strangers.


@pytest.mark.parametrize(
  'fields, message',
  [
    (dict(name='Qwen/Qwen2.5-3B'), "serves 'Qwen/Qwen2.5-3B'.*vllm.launcher"),
    (dict(max_len=None, name='gguf'), "serves 'gguf'.*vllm.launcher"),
    (dict(max_len=64), 'max_model_len=64.*config.engine.max_len=64'),
    (dict(vocab_size=91), 'vocab_size=91.* 90'),
    (dict(n_layers=3), 'n_layers=3.* 2'),
    (dict(dtype='bfloat16'), "dtype='bfloat16'.* 'float32'"),
  ],
  ids=lambda x: next(iter(x)) if isinstance(x, dict) else '',
)
def test_a_server_that_is_not_ours_is_refused(fake, tmp_path, fields, message):
  for name, value in fields.items():
    if name in (*families.FIELDS, 'dtype'):
      fake.describes[name] = value
    else:
      setattr(fake, name, value)
  engine = make([fake], tmp_path)

  async def main():
    with pytest.raises(EngineError, match=message) as e:
      await load(engine, 1)
    assert fake.url in str(e.value)
    await engine.shutdown()

  asyncio.run(main())
  assert fake.loaded is None


def test_nobody_there_and_no_url(fake, tmp_path):
  engine = make([fake], tmp_path, start_seconds=0.5)
  fake.kill()

  async def main():
    with pytest.raises(EngineError, match=f'{fake.url}.*start_seconds=0.5'):
      await load(engine, 1)
    await engine.shutdown()

  asyncio.run(main())
  fake.start()
  with pytest.raises(EngineError, match="'127.0.0.1:80'"):
    VllmEngine(CFG, None, Letters(), config(url='127.0.0.1:80'), None, tmp_path)


@pytest.mark.parametrize('url', ['', 'http://127.0.0.1:80'])
@pytest.mark.parametrize('adapters', [True, False])
@pytest.mark.parametrize(
  'what, has',
  [
    ('delta nets', dict(delta=deltanet.Sizes(2, 4, 8, 12, 4))),
    ('experts', dict(family='qwen3_moe', moe=Sizes(8, 2, 24, True))),
  ],
)
def test_what_goes_without_adapters_and_differences(
  what, has, url, adapters, tmp_path
):
  cfg = dataclasses.replace(CFG, **has)
  c = config(url=url, sync='full' if adapters else 'delta', dtype='bfloat16')
  if adapters:
    cfg = dataclasses.replace(cfg, lora=decoder.Lora(4, 8.0, ('q',), 'float32'))
  with pytest.raises(EngineError, match=f"{what}.*'full'.*rank=0"):
    VllmEngine(cfg, None, Letters(), c, None, tmp_path)


def experts(d_ff: int, held: int, **kernel):
  """A layer of vLLM's as far as the plugin asks; held: columns with padding."""
  fused = types.SimpleNamespace(isa='vec', **kernel)
  how = types.SimpleNamespace(
    moe_kernel=types.SimpleNamespace(fused_experts=fused)
  )
  w13 = np.zeros((4, 2 * held, 32))
  return types.SimpleNamespace(
    quant_method=how, intermediate_size_per_partition=d_ff, w13_weight=w13
  )


def test_experts_that_a_cpu_packs_and_pads():
  assert plugin._experts_isa(experts(64, 64)) == 'vec'
  assert plugin._experts_isa(experts(64, 64, _use_zentorch=True)) == ''
  assert plugin._experts_isa(types.SimpleNamespace()) == ''
  plugin._check_width(experts(64, 64))
  with pytest.raises(RuntimeError, match='experts of 48.*multiple of 32'):
    plugin._check_width(experts(48, 64))


def test_delta_nets_have_one_worker():
  worker = plugin.Worker()
  model = types.SimpleNamespace(get_mamba_state_shape_from_config=None)
  worker.model_runner = types.SimpleNamespace(get_model=lambda: model)
  worker.parallel_config = types.SimpleNamespace(world_size=2)
  with pytest.raises(RuntimeError, match='has one worker: one GPU'):
    worker.searchrl_load('never read')


def test_routes_are_of_the_engine_in_process(tmp_path):
  c = config(url='http://127.0.0.1:80', record_routes=True)
  with pytest.raises(EngineError, match='record_routes=False'):
    VllmEngine(CFG, None, Letters(), c, None, tmp_path)


def test_nothing_is_sampled_before_the_first_sync(fake, tmp_path):
  engine = make([fake], tmp_path)

  async def main():
    with pytest.raises(EngineError, match='call sync'):
      await engine.generate(engine.open(Prompt((1,))), Sampling(max_tokens=1))
    await engine.shutdown()

  asyncio.run(main())
  assert fake.asked == []


def test_an_adapter_is_refused(fake, tmp_path):
  engine = make([fake], tmp_path)
  update = dataclasses.replace(WeightsUpdate(make_params(), 1), kind='adapter')
  with pytest.raises(EngineError, match='adapter'):
    asyncio.run(engine.sync(update))


@pytest.mark.parametrize(
  'device, servers',
  [
    ('cpu', [{'cpu': True, 'kv_cache_gib': 1.0}]),
    ('gpus:0', [{'gpus': '0', 'gpu_memory_utilization': 0.5}]),
    (
      'gpus:0,1;2',
      [
        {'gpus': '0,1', 'gpu_memory_utilization': 0.5},
        {'gpus': '2', 'gpu_memory_utilization': 0.5},
      ],
    ),
  ],
)
def test_servers_are_started_on_the_devices_named(
  monkeypatch, tmp_path, device, servers
):
  started, stopped = [], []

  class Started:
    failure = None

    def __init__(self, model, **flags):
      assert (model / 'config.json').exists()
      started.append(flags)
      self.url = f'http://127.0.0.1:{len(started)}'

    def stop(self):
      stopped.append(self.url)

  monkeypatch.setattr(client.launcher, 'start_sidecar', Started)
  tok = train_bpe(['a b'], CFG.vocab_size + 200, tmp_path / 'tok')
  cfg = dataclasses.replace(CFG, vocab_size=CFG.vocab_size + 200)

  def build(device):
    return VllmEngine(
      cfg, None, tok, config(device=device), None, tmp_path / 'run'
    )

  engine = build(device)
  # They start side by side, in any order.
  started.sort(key=lambda flags: flags.get('gpus', ''))
  for flags, wanted in zip(started, servers, strict=True):
    assert wanted.items() <= flags.items()
    assert flags['max_model_len'] == 65 and flags['max_num_seqs'] == 4
    assert flags['dtype'] == 'float32'
  asyncio.run(engine.shutdown())
  assert len(stopped) == len(servers)


@pytest.mark.parametrize('device', ['gpu', 'gpus:', 'tpu:0'])
def test_a_device_that_is_none_is_refused(tmp_path, device):
  with pytest.raises(EngineError, match='--gpus: invalid'):
    client._start(config(device=device), tmp_path, CFG)


def test_a_server_that_is_not_started_again_stops_the_run_at_once(
  fake, tmp_path
):
  engine = make([fake], tmp_path, start_seconds=60.0)

  async def main():
    await load(engine, 1)
    await asyncio.to_thread(fake.kill)
    engine._servers[0]._sidecar = types.SimpleNamespace(
      failure='crash 2: out of memory'
    )
    async with asyncio.timeout(5):
      with pytest.raises(EngineError, match='crash 2: out of memory'):
        await once(engine, (1, 2), Sampling(max_tokens=2))
    await engine.shutdown()

  asyncio.run(main())
  fake.start()
