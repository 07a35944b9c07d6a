"""How processes find each other; what one process does alone."""

import pickle
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from searchrl_jax.devices import cluster, sharding
from searchrl_jax.devices.signals import Stopped
from searchrl_jax.lookup import ConfigError
from searchrl_jax.types import Question, Trajectory
from tests.conftest import ROOT

NAMES = (
  'NNODES', 'RANK', 'MASTER_ADDR', 'MASTER_PORT', 'SLURM_STEP_NUM_TASKS',
  'SLURM_STEP_TASKS_PER_NODE', 'CUDA_VISIBLE_DEVICES', 'TPU_WORKER_HOSTNAMES',
  'JAX_CUDA_VISIBLE_DEVICES',
)  # fmt: skip


@pytest.fixture
def environ(monkeypatch):
  for name in NAMES:
    monkeypatch.delenv(name, raising=False)

  def set(**values):
    for name, value in values.items():
      monkeypatch.setenv(name, value)

  return set


def given(coordinator='', processes=0, process_id=-1):
  return cluster._given(coordinator, processes, process_id)


def test_alone_where_nothing_names_others(environ):
  assert given() is None
  environ(NNODES='1', RANK='0', SLURM_STEP_NUM_TASKS='1')
  assert given() is None
  assert given('here:1', 1, 0) is None


def test_variables_and_flags(environ):
  found = {
    'coordinator_address': 'a:29400',
    'num_processes': 4,
    'process_id': 3,
    'cluster_detection_method': 'deactivate',
  }
  assert given('a:29400', 4, 3) == found
  environ(NNODES='4', RANK='3', MASTER_ADDR='a')
  assert given() == found
  environ(MASTER_PORT='7')
  assert given() == found | {'coordinator_address': 'a:7'}
  assert given('b:8', 2, 0)['coordinator_address'] == 'b:8'  # flags first


@pytest.mark.parametrize(
  'values, message',
  [
    (dict(NNODES='2', RANK='0'), "MASTER_ADDR=':29400'"),
    (dict(NNODES='2', MASTER_ADDR='a'), "RANK=''"),
    (dict(NNODES='x', RANK='0', MASTER_ADDR='a'), "NNODES='x'"),
    (dict(NNODES='2', RANK='2', MASTER_ADDR='a'), 'RANK=2 of 2'),
  ],
)
def test_wrong_variables_are_named(environ, values, message):
  environ(**values)
  with pytest.raises(ConfigError) as e:
    given()
  assert message in str(e.value)


def test_wrong_flags_are_named():
  for flags, message in (
    (('a:1', 2, -1), '--process_id=-1 of 2'),
    (('a', 2, 0), "--coordinator='a'"),
    (('a:1', 0, 0), '--processes=0'),
  ):
    with pytest.raises(ConfigError, match=message):
      given(*flags)


def test_slurm_gives_the_only_task_of_a_node_all_gpus(environ):
  environ(SLURM_STEP_NUM_TASKS='4', CUDA_VISIBLE_DEVICES='4,5,6')
  assert given()['local_device_ids'] is None
  environ(SLURM_STEP_TASKS_PER_NODE='1(x4)')
  assert given() == {
    'cluster_detection_method': 'slurm',
    'local_device_ids': [0, 1, 2],
  }
  environ(JAX_CUDA_VISIBLE_DEVICES='0,2')  # others are of servers
  assert given()['local_device_ids'] == [0, 2]
  environ(CUDA_VISIBLE_DEVICES='')
  assert given()['local_device_ids'] == [0, 2]


def test_hosts_of_a_tpu_slice_are_found_by_jax(environ):
  environ(TPU_WORKER_HOSTNAMES='localhost')
  assert given() is None
  environ(TPU_WORKER_HOSTNAMES='t0,t1')
  assert given() == {}


def test_shares_follow_each_other(monkeypatch):
  for size in (1, 3, 4):
    shares = []
    for rank in range(size):
      monkeypatch.setattr(cluster, 'size', lambda: size)  # noqa: B023
      monkeypatch.setattr(cluster, 'rank', lambda: rank)  # noqa: B023
      shares.append(cluster.part(range(10)))
    assert [i for share in shares for i in share] == [*range(10)]
    assert {len(share) for share in shares} <= {10 // size, -(-10 // size)}


@pytest.mark.parametrize('size, taken', [(1, [1, 0]), (3, [2, 1])])
def test_a_mesh_takes_as_much_of_each_process(size, taken, monkeypatch):
  monkeypatch.setattr(cluster, 'size', lambda: 2)
  devices = [SimpleNamespace(process_index=i // 2) for i in range(4)]
  with pytest.raises(ConfigError) as e:
    sharding.make_mesh(size, 1, 1, devices)
  assert f'takes {taken} devices' in str(e.value)


class Store:
  """The key-value store of JAX's coordinator, in a dictionary."""

  def __init__(self):
    self.kept, self.change = {}, threading.Condition()

  def key_value_try_get(self, key):
    if key not in self.kept:
      raise RuntimeError(f'NOT_FOUND: {key}')
    return self.kept[key]

  def key_value_set(self, key, value):
    with self.change:
      if key in self.kept:
        raise RuntimeError(f'ALREADY_EXISTS: {key}')
      self.kept[key] = value
      self.change.notify_all()

  key_value_set_bytes = key_value_set

  def blocking_key_value_get_bytes(self, key, ms):
    with self.change:
      if not self.change.wait_for(lambda: key in self.kept, ms / 1000):
        raise RuntimeError('DEADLINE_EXCEEDED')
      return self.kept[key]

  def key_value_delete(self, key):
    with self.change:
      for name in [k for k in self.kept if k.startswith(f'{key}/')]:
        del self.kept[name]


@pytest.fixture
def together(monkeypatch):
  """Calls a function of each of two processes; returns results or errors."""
  here = threading.local()

  class Own:
    """The `_World` of the thread."""

    def __getattr__(self, name):
      return getattr(here.world, name)

  monkeypatch.setattr(cluster, '_world', Own())
  store = Store()
  worlds = [cluster._World(store, rank, 2, 'host') for rank in (0, 1)]

  def call(*functions):
    found = [None, None]

    def run(rank):
      here.world = worlds[rank]
      try:
        found[rank] = functions[rank]()
      except Exception as e:
        found[rank] = type(e), str(e), cluster.alone(e)

    threads = [threading.Thread(target=run, args=[rank]) for rank in (0, 1)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    return found

  call.store = store
  yield call
  for world in worlds:
    world.closed.set()


def fails(error):
  def work():
    raise error

  return lambda: cluster.gather('x', work)


def test_all_have_what_each_has_gathered(together):
  each = [lambda n=n: cluster.gather('x', lambda: n) for n in 'ab']
  for _ in range(3):
    assert together(*each) == [['a', 'b']] * 2
  assert len({key.split('/')[1] for key in together.store.kept}) == 1
  large = [lambda n=n: cluster.gather('x', lambda: [n] * 10**6) for n in (0, 1)]
  assert [len(x[1]) for x in together(*large)] == [10**6] * 2


def test_an_error_of_one_is_raised_by_all(together):
  """And none of them takes it for one that the others do not know of."""
  fine = lambda: cluster.gather('x', lambda: 1)
  there = cluster.ProcessError, 'process 1: bad', False
  own = ValueError, 'bad', False
  assert together(fine, fails(ValueError('bad'))) == [there, own]


@pytest.mark.parametrize('stops', [0, 1])
def test_an_error_comes_before_a_stop(together, stops):
  works = [fails(OSError('bad')), fails(OSError('bad'))]
  works[stops] = fails(Stopped('enough'))
  found = together(*works)
  assert found[1 - stops] == (OSError, 'bad', False)
  said = f'process {1 - stops}: bad'
  assert found[stops] == (cluster.ProcessError, said, False)


def test_of_two_errors_all_raise_the_first(together):
  found = together(fails(OSError('a')), fails(ValueError('b')))
  there = cluster.ProcessError, 'process 0: a', False
  assert found == [(OSError, 'a', False), there]


def test_a_stop_stops_all(together):
  fine = lambda: cluster.gather('x', lambda: 1)
  stopped = Stopped, 'enough', False
  assert together(fine, fails(Stopped('enough'))) == [stopped, stopped]


def test_processes_in_different_calls_say_so(together):
  one, other = (lambda n=n: cluster.gather(n, lambda: 1) for n in 'ab')
  kind, said, _ = together(one, other)[0]
  assert kind is cluster.ProcessError
  assert said == "process 1 is at 'b' and process 0 at 'a'"


def test_who_waits_for_one_that_left_has_its_error(together):
  left = lambda: cluster.leave(ValueError('no memory'))
  waits = lambda: cluster.gather('x', lambda: 1)
  found = together(waits, left)
  gone = cluster.ProcessError, 'process 1: no memory', False
  assert found == [gone, True]  # process 1 prints it
  root = lambda: cluster.leave(cluster.ProcessError(gone[1], 'no memory'))
  assert together(root, lambda: True) == [False, True]  # process 0 does not


def test_one_process_works_alone(tmp_path):
  assert cluster.gather('x', lambda: 3) == [3]
  assert cluster.first('x', lambda: 4) == cluster.agree('x', lambda: 4) == 4
  with pytest.raises(OSError):
    cluster.gather('x', lambda: (tmp_path / 'absent').read_text())
  assert cluster.folder(tmp_path) == tmp_path and cluster.main()
  cluster.require_agreement(
    lambda: pytest.fail('there is nobody to compare with')
  )
  assert cluster.leave(ValueError('x'))


def test_it_imports_no_jax():
  code = 'import sys, searchrl_jax.devices.cluster as c; c.initialize()\n'
  code += "assert 'jax' not in sys.modules"
  subprocess.run([sys.executable, '-c', code], cwd=ROOT, check=True)


def test_a_trajectory_travels_without_what_an_environment_read():
  sent = Trajectory(Question('q', 'who?'), (), (), 'answer')
  sent.parsed[object()] = lambda: 'no pickle'
  got = pickle.loads(pickle.dumps(sent))
  assert got == sent and got.parsed == {}


def test_code_is_of_recipes_and_experiments_too(tmp_path, monkeypatch):
  package = tmp_path / 'searchrl_jax' / 'devices' / 'cluster.py'
  recipe, other = tmp_path / 'configs' / 'a.py', tmp_path / 'tests' / 'b.py'
  for path in package, recipe, other:
    path.parent.mkdir(parents=True)
    path.write_text('1')
  monkeypatch.setattr(cluster, '__file__', str(package))
  seen = [cluster.code()]
  for path in other, recipe, package:
    path.write_text('2')
    seen.append(cluster.code())
  assert seen[0] == seen[1] and len({*seen}) == 3
