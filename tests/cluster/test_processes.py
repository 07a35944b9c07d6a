"""Two and four processes of two devices each train as one (make test-cluster).

The processes meet over the loopback interface, and their collectives are those
of gloo.
"""

import json
import pathlib
import signal
import time

import jax
import numpy as np
import optax
import pytest

from searchrl_jax.devices import sharding
from searchrl_jax.engines.weights import published
from searchrl_jax.models import decoder, parameters
from searchrl_jax.run import build
from searchrl_jax.store import checkpoint, records
from tests.cluster import launch, recipe
from tests.learn import test_mesh_update as mesh_test
from tests.learn import test_update as base

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

STEPS = 4
START_S = 240  # of a run of a few steps, on two slow cores


def end(processes, seconds=START_S) -> None:
  statuses = processes.wait(seconds)
  assert not any(statuses), processes.said(0)[-2000:]


def metrics(folder) -> dict[int, dict]:
  path = pathlib.Path(folder) / 'run' / 'metrics.jsonl'
  found = [json.loads(line) for line in path.open()]
  return {line['step']: line for line in found}


def params(workdir) -> dict[str, np.ndarray]:
  """Of the last checkpoint, read by this one process."""
  workdir = str(workdir)
  config = recipe.get_config()
  config.mesh.data, config.mesh.fsdp = 1, 1
  tok = build.tokenizer(config, workdir)
  cfg = parameters.model_config(config, tok.vocab_size)
  mesh = build.mesh(config, jax.devices()[:1])
  found = parameters.restore(config, workdir, cfg, mesh)
  return {k: np.asarray(v) for k, v in decoder.flatten(found).items()}


def trajectories(folder, step: int = 0) -> dict:
  path = pathlib.Path(folder) / 'run' / 'trajectories'
  found = [r for r in records.read(path) if r.step == step]
  assert len({r.trajectory.id for r in found}) == len(found) == 12
  return {r.trajectory.id: r for r in found}


def wait_for(path: pathlib.Path, processes) -> None:
  limit = time.monotonic() + START_S
  while not path.exists():
    assert time.monotonic() < limit, processes.said(0)[-2000:]
    assert all(p.poll() is None for p in processes.running)
    time.sleep(0.05)


@pytest.fixture(scope='module')
def alone(tmp_path_factory, url):
  folder = tmp_path_factory.mktemp('alone')
  with launch.train(1, folder, url, steps=STEPS) as processes:
    end(processes)
  return folder


@pytest.fixture(scope='module')
def two(tmp_path_factory, url):
  folder = tmp_path_factory.mktemp('two')
  with launch.train(2, folder, url, steps=STEPS) as processes:
    end(processes)
  return folder


def same_step(folder, alone) -> None:
  """The first step is that of one process."""
  ours, theirs = trajectories(folder), trajectories(alone)
  assert ours.keys() == theirs.keys()
  for name, record in theirs.items():
    got = ours[name]
    for a, b in zip(
      got.trajectory.segments, record.trajectory.segments, strict=True
    ):
      np.testing.assert_array_equal(a.ids, b.ids, err_msg=name)
    # The file has them as float16.
    np.testing.assert_allclose(
      got.trainer_logps, record.trainer_logps, rtol=1e-3, err_msg=name
    )
    assert got.reward == record.reward
  a, b = metrics(folder)[0], metrics(alone)[0]
  for name in ('loss', 'entropy', 'nll', 'grad_norm', 'tokens'):
    name = f'train/{name}'
    assert a[name] == pytest.approx(b[name], rel=1e-5, abs=1e-7), name
  assert a['reward'] == b['reward']
  assert a['rollout/sampled_tokens'] == b['rollout/sampled_tokens']


def test_two_processes_do_what_one_does(alone, two):
  same_step(two, alone)
  steps = metrics(two)
  assert sorted(steps) == list(range(STEPS))
  assert all(0 < s['time/exchange'] < s['time/step'] for s in steps.values())
  asked, count = steps[STEPS - 1], metrics(alone)[STEPS - 1]['eval/em/n']
  assert asked['eval/em/n'] == count > 0
  files = sorted(p.name for p in (two / 'run' / 'trajectories').iterdir())
  assert files[:2] == [f'step_00000000_p00{i}.parquet' for i in (0, 1)]
  starts = json.loads((two / 'run' / 'environment.json').read_text())['starts']
  assert len(starts) == 1
  want = params(alone / 'run')
  for name, value in params(two / 'run').items():
    np.testing.assert_allclose(value, want[name], rtol=0, atol=1e-4)


def evaluated(folder) -> tuple[dict, dict]:
  """The figures but the seconds, and the token ids of each trajectory."""
  found = json.loads((folder / 'eval.json').read_text())
  values = {k: v for k, v in found.items() if not k.endswith('seconds')}
  ids = {
    r.trajectory.id: [s.ids.tolist() for s in r.trajectory.segments]
    for r in records.read(folder / 'eval')
  }
  return values, ids


def test_sft_and_evaluate_do_what_they_do_in_one_process(tmp_path, url):
  one, two = tmp_path / 'one', tmp_path / 'two'
  with (
    launch.sft(1, one, url, steps=3) as first,
    launch.sft(2, two, url, steps=3) as second,
  ):
    end(first), end(second)
  ours, theirs = metrics(two), metrics(one)
  assert sorted(ours) == sorted(theirs) == [0, 1, 2]
  for step, line in theirs.items():
    for name in ('nll', 'grad_norm', 'tokens'):
      name = f'sft/{name}'
      assert ours[step][name] == pytest.approx(line[name], rel=1e-5), name
  want = params(one / 'run')
  for name, value in params(two / 'run').items():
    np.testing.assert_allclose(value, want[name], rtol=0, atol=1e-4)

  args = [f'--workdir={two}/run', '--config.source.servers=one']
  args.append('--config.data.eval.micro.n=10')
  module = 'searchrl_jax.evaluate'
  with (
    launch.start(1, one, module, *args, f'--out={one}/out') as first,
    launch.start(2, two, module, *args, f'--out={two}/out') as second,
  ):
    end(first), end(second)
  values, ids = evaluated(two / 'out')
  assert (values, ids) == evaluated(one / 'out')
  assert values['eval/em/n'] == len(ids) == 10
  parts = sorted(p.name for p in (two / 'out' / 'eval').iterdir())
  assert parts == [f'step_00000000_p00{i}.parquet' for i in (0, 1)]
  # One retrieval server for both, which listens where the processes meet.
  logs = [*(two / 'out').rglob('retrieval.log')]
  assert logs == [two / 'out' / 'retrieval.log']
  assert 'WARNING: bound to 0.0.0.0' not in logs[0].read_text()
  tables = ['bootstrap intervals' in second.said(rank) for rank in (0, 1)]
  assert tables == [True, False]


def test_four_processes_whose_engines_read_files(alone, tmp_path, url):
  engine = '--config.engine.module=tests.cluster.file_engine'
  with launch.train(4, tmp_path, url, engine, steps=1) as processes:
    end(processes)
  same_step(tmp_path, alone)
  assert not [*(tmp_path / 'run' / 'published').iterdir()]


def test_a_killed_process_ends_the_others_and_is_made_up_for(
  two, tmp_path, url
):
  with launch.train(2, tmp_path, url, steps=STEPS) as processes:
    wait_for(tmp_path / 'run' / 'checkpoints' / '00000001', processes)
    processes.send(1, signal.SIGKILL)
    status, killed = processes.wait(START_S)
    assert killed == -signal.SIGKILL and status != 0
    said = processes.said(0)
    assert 'process' in said and any(
      x in said for x in ('task:1', 'Connection', 'heartbeat', 'process 1')
    ), said[-2000:]
  with launch.train(2, tmp_path, url, steps=STEPS) as processes:
    end(processes)
  want = params(two / 'run')
  for name, value in params(tmp_path / 'run').items():
    np.testing.assert_array_equal(value, want[name], err_msg=name)


def test_a_signal_to_one_saves_all_and_one_process_goes_on(two, tmp_path, url):
  with launch.train(2, tmp_path, url, steps=STEPS) as processes:
    wait_for(tmp_path / 'run' / 'checkpoints' / '00000001', processes)
    processes.send(1, signal.SIGTERM)
    assert processes.wait(START_S) == [143, 143], processes.said(0)[-2000:]
    said = [
      processes.said(rank).count('stopped by a signal') for rank in (0, 1)
    ]
    assert sum(said) == 1
  saved = sorted((tmp_path / 'run' / 'checkpoints').iterdir())[-1].name
  assert int(saved) < STEPS
  with launch.train(1, tmp_path, url, steps=STEPS) as processes:
    end(processes)
  want = params(two / 'run')
  for name, value in params(tmp_path / 'run').items():
    np.testing.assert_allclose(value, want[name], rtol=0, atol=1e-4)
  assert sorted(metrics(tmp_path)) == list(range(STEPS))


@pytest.mark.parametrize(
  'argument, message',
  [
    ('--config.optim.lr=0.5', 'config.optim.lr'),
    ('--config.data.train.micro.module=none_such', 'none_such'),
  ],
)
def test_processes_that_differ_say_so_once(argument, message, tmp_path, url):
  each = {1: (argument,)}
  with launch.train(2, tmp_path, url, steps=1, each=each) as processes:
    assert processes.wait(START_S) == [2, 2]
    said = [processes.said(rank) for rank in (0, 1)]
  lines = [x for text in said for x in text.splitlines() if message in x]
  assert len(lines) == 1 and lines[0].startswith('error: ')
  assert not (tmp_path / 'run' / 'metrics.jsonl').exists()


def test_processes_with_unequal_devices_are_refused(tmp_path, url):
  mesh = '--config.mesh.fsdp=1'
  with launch.train(2, tmp_path, url, mesh, devices=[2, 1]) as processes:
    assert processes.wait(START_S) == [2, 2]
    said = ''.join(processes.said(rank) for rank in (0, 1))
  assert said.count('takes [2, 1] devices') == 1


def test_a_signal_before_the_run_begins_ends_all(tmp_path, url):
  with launch.train(2, tmp_path, url) as processes:
    wait_for(tmp_path / 'run' / 'tokenizer', processes)
    processes.send(1, signal.SIGTERM)
    assert processes.wait(START_S) == [143, 143], processes.said(0)[-2000:]
    said = ''.join(processes.said(rank) for rank in (0, 1))
  assert said.count('without a save') == 1
  assert not (tmp_path / 'run' / 'checkpoints').exists()


@pytest.fixture(scope='module')
def program(tmp_path_factory):
  folder = tmp_path_factory.mktemp('program')
  with launch.start(1, folder, 'tests.cluster.program', folder, 2, 1, 1) as p:
    end(p)
  return np.load(folder / '0.npz')


@pytest.mark.parametrize('shape', [(1, 4, 1), (2, 2, 2)])
def test_log_probs_gradients_and_updates_agree(shape, program, tmp_path):
  """So do the state that is restored elsewhere, and what follows from it."""
  count = int(np.prod(shape)) // launch.DEVICES
  module = 'tests.cluster.program'
  with launch.start(count, tmp_path, module, tmp_path, *shape) as processes:
    end(processes)
  written = published.open_published(tmp_path / 'own' / '00000003')
  for rank in range(count):
    found = np.load(tmp_path / f'{rank}.npz')
    for name, tensor in written.table.items():
      ours = found[f'params/{tensor.path}']
      ours = ours if tensor.layer is None else ours[tensor.layer]
      want = tensor.to_hf(ours)
      np.testing.assert_array_equal(written.read(name), want, name)
    assert found['finite'] == 1
    for name in program.files:
      a, b = found[name], program[name]
      error = np.abs(a - b).max() / max(np.abs(b).max(), 1e-12)
      # Adam divides gradients near 0 by their size.
      assert error <= (1e-4 if name.startswith('params') else 1e-5), name
  for other in ((1, 1, 1), (2, 1, 2)):
    mesh = sharding.make_mesh(*other)
    config = base.config(**mesh_test.KW)
    updater = base.updater(config, cfg=mesh_test.CFG, mesh=mesh)
    like = updater.abstract
    saver = checkpoint.Checkpointer(tmp_path / 'checkpoints', None, '')
    state = saver.restore(like, 'latest', fingerprint={}).state
    for name in ('mu', 'nu', 'params'):
      tree = optax.tree.get(state.opt_state, name, state.params)
      for path, x in decoder.flatten(tree).items():
        np.testing.assert_array_equal(x, found[f'{name}/{path}'], name)
    batches = base.microbatches(config, shards=updater.shards)
    _, after = updater.step(state, batches)
    for name in ('loss', 'grad_norm'):
      want = pytest.approx(float(found[f'next/{name}']), rel=1e-5)
      assert after[name] == want, (name, other)
