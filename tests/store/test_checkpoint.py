"""Checkpoints: bitwise, whole or absent, kept and deleted as configured."""

import contextlib
import dataclasses
import errno
import json
import pathlib
import resource
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from searchrl_jax.devices import sharding
from searchrl_jax.store import checkpoint
from tests.engines.common import CFG

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parents[2]
FINGERPRINT = {'model': {'d_model': 64, 'tied': True}, 'seed': 0}


def state(seed=0, dtype=jnp.float32):
  keys = jax.random.split(jax.random.key(seed), 3)
  params = {
    'embed': jax.random.normal(keys[0], (16, 8), dtype),
    'layers': {
      'q': jax.random.normal(keys[1], (4, 8, 4, 2), jnp.bfloat16),
      'o': jax.random.normal(keys[2], (4, 8, 8), dtype),
    },
  }
  tx = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.masked(
      optax.adamw(1e-3), {'embed': True, 'layers': {'q': True, 'o': False}}
    ),
  )
  opt = tx.init(params)
  grads = jax.tree.map(lambda x: jnp.ones_like(x) / 3, params)
  _, opt = tx.update(grads, opt, params)
  return {
    'params': params,
    'opt_state': opt,
    'step': jnp.int32(7),
    'host': np.arange(5, dtype=np.int64) << 40,
  }


def save(ckpt, step, tree, **kw):
  kw = {'extras': {}, 'metrics': {}, 'fingerprint': FINGERPRINT} | kw
  return ckpt.save(step, tree, **kw)


def raw(x):
  return type(x), np.asarray(x).dtype, np.asarray(x).tobytes()


def assert_same(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
    assert raw(x) == raw(y)


@pytest.mark.long
def test_round_trip_is_bitwise_and_keeps_structure(tmp_path):
  ckpt = checkpoint.Checkpointer(tmp_path / 'c', 1, '')
  tree = state()
  extras = {'cursor': {'pos': 3, 'epoch': 1}, 'rng': 2**100, 'pool': ['a']}
  save(ckpt, 5, tree, extras=extras, metrics={'eval/em': 0.5})
  got = ckpt.restore(state(seed=1), 'latest', fingerprint=FINGERPRINT)
  assert_same(got.state, tree)
  assert (got.step, got.extras) == (5, extras)
  assert got.metrics == {'eval/em': 0.5}


def test_restores_from_shapes_alone(tmp_path):
  ckpt = checkpoint.Checkpointer(tmp_path, 1, '')
  tree = state()
  save(ckpt, 1, tree)
  host = {'host': tree['host']}
  shapes = host | jax.eval_shape(
    lambda: {k: v for k, v in tree.items() if k not in host}
  )
  assert_same(ckpt.restore(shapes, 1, fingerprint=FINGERPRINT).state, tree)


def test_a_part_can_be_restored(tmp_path):
  ckpt = checkpoint.Checkpointer(tmp_path, 1, '')
  tree = state()
  save(ckpt, 1, tree)
  part = {'params': state(seed=1)['params']}
  got = ckpt.restore(part, 1, fingerprint=None, partial=True)
  assert_same(got.state, {'params': tree['params']})
  with pytest.raises(checkpoint.CheckpointError, match='state.host: .*absent'):
    ckpt.restore(part, 1, fingerprint=None)


def test_keeps_the_last_and_the_best(tmp_path):
  ckpt = checkpoint.Checkpointer(tmp_path, 2, 'eval/em')
  tree = {'x': jnp.ones(3)}
  assert ckpt.latest() is None and ckpt.best() is None
  scores = [0.2, 0.9, 0.1, float('nan'), 0.9, 0.3, None, None]
  for step, em in enumerate(scores, 1):
    metrics = {} if em is None else {'eval/em': em}
    save(ckpt, step, {'x': jnp.full(3, float(step))}, metrics=metrics)
    if step == 4:
      assert ckpt.steps() == [2, 3, 4]
  # Of the equals 2 and 5 the later is the best; 6 and what has no finite
  # metric go as they age.
  assert ckpt.steps() == [5, 7, 8]
  assert ckpt.best() == 5 and ckpt.latest() == 8
  best = ckpt.restore(tree, 'best', fingerprint=None)
  assert best.step == 5 and best.state['x'][0] == 5.0
  assert sorted(p.name for p in tmp_path.iterdir()) == [
    '00000005',
    '00000007',
    '00000008',
  ]


@pytest.mark.parametrize('shape', [(1, 2, 4), (2, 4, 1), None])
def test_reshards_on_restore(tmp_path, shape):
  specs = {'q': ('embed', 'heads'), 'norm': ('norm',)}
  tree = {'q': jnp.arange(64.0).reshape(8, 8), 'norm': jnp.arange(8.0) / 3}
  mesh = sharding.make_mesh(1, 4, 2)
  saved = {
    k: jax.device_put(v, sharding.named(mesh, specs[k], v.shape))
    for k, v in tree.items()
  }
  ckpt = checkpoint.Checkpointer(tmp_path, 1, '')
  save(ckpt, 1, saved)
  if shape is None:
    where = {
      k: jax.sharding.SingleDeviceSharding(jax.devices()[3]) for k in tree
    }
  else:
    other = sharding.make_mesh(*shape)
    where = {
      k: sharding.named(other, specs[k], v.shape) for k, v in tree.items()
    }
  target = {
    k: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=where[k])
    for k, v in tree.items()
  }
  got = ckpt.restore(target, 1, fingerprint=None).state
  for k, v in tree.items():
    assert got[k].sharding.is_equivalent_to(where[k], v.ndim)
    assert np.array_equal(got[k], v)


def test_the_tokenizer_is_compared(tmp_path):
  ckpt = checkpoint.Checkpointer(tmp_path, 2, '')
  tree, named = {'x': jnp.ones(2)}, FINGERPRINT | {'tokenizer': 'a'}
  save(ckpt, 2, tree, fingerprint=named)
  assert_same(ckpt.restore(tree, 2, fingerprint=named).state, tree)
  other = named | {'tokenizer': 'b'}
  with pytest.raises(checkpoint.CheckpointError, match="tokenizer: 'a'.*'b'"):
    ckpt.restore(tree, 2, fingerprint=other)


FIELDS = """
  vocab_size d_model n_layers n_heads n_kv_heads head_dim d_ff family rope_theta
  norm_eps tied query_scale window global_every local_theta dtype remat
  scan_unroll attention
"""


def test_a_run_is_of_the_same_model_without_newer_fields(tmp_path):
  """What was made before there were delta nets, and others since."""
  ckpt = checkpoint.Checkpointer(tmp_path, 1, '')
  tree, now = {'x': jnp.ones(2)}, dataclasses.asdict(CFG)
  # A newer field is None where it says nothing.
  old = {k: v for k, v in now.items() if v is not None}
  assert {*old} == {*FIELDS.split()}
  save(ckpt, 1, tree, fingerprint=old)
  assert_same(ckpt.restore(tree, 1, fingerprint=now).state, tree)


def test_another_model_or_config_is_named(tmp_path):
  ckpt = checkpoint.Checkpointer(tmp_path, 1, '')
  tree = {'params': {'q': jnp.ones((2, 3)), 'k': jnp.ones(2)}}
  save(ckpt, 1, tree)
  other = {'model': {'d_model': 128, 'tied': True}, 'seed': 0, 'new': 1}
  with pytest.raises(
    checkpoint.CheckpointError, match='model.d_model: 64.*128.*new: .*absent'
  ):
    ckpt.restore(tree, 1, fingerprint=other)
  wrong = {'params': {'q': jnp.ones((2, 4)), 'k': jnp.ones(2)}}
  with pytest.raises(
    checkpoint.CheckpointError,
    match=r"q: \[\[2, 3\], 'float32'\].*\[\[2, 4\], 'float32'\]",
  ):
    ckpt.restore(wrong, 1, fingerprint=None)
  typed = {'params': {'q': jnp.ones((2, 3), jnp.bfloat16), 'k': jnp.ones(2)}}
  with pytest.raises(checkpoint.CheckpointError, match='bfloat16'):
    ckpt.restore(typed, 1, fingerprint=None)
  more = {'params': tree['params'] | {'v': jnp.ones(1)}}
  with pytest.raises(
    checkpoint.CheckpointError, match='state.params.v: absent'
  ):
    ckpt.restore(more, 1, fingerprint=None)


def test_missing_broken_and_foreign_steps_are_clear(tmp_path):
  ckpt = checkpoint.Checkpointer(tmp_path, 3, 'eval/em')
  tree = {'x': jnp.ones(3)}
  with pytest.raises(checkpoint.CheckpointError, match="'latest'.*steps"):
    ckpt.restore(tree, 'latest', fingerprint=None)
  for step in (1, 2):
    save(ckpt, step, tree)
  with pytest.raises(checkpoint.CheckpointError, match='eval/em'):
    ckpt.restore(tree, 'best', fingerprint=None)
  with pytest.raises(checkpoint.CheckpointError, match=r'9 .*\[1, 2\]'):
    ckpt.restore(tree, 9, fingerprint=None)
  with pytest.raises(checkpoint.CheckpointError, match='step 2 .*exists'):
    save(ckpt, 2, tree)
  with pytest.raises(checkpoint.CheckpointError, match='not JSON serializable'):
    save(ckpt, 3, tree, extras={'x': object()})
  assert ckpt.steps() == [1, 2]
  meta = tmp_path / '00000002/meta/meta.json'
  value = json.loads(meta.read_text())
  meta.write_text(json.dumps(value | {'format': 99}))
  with pytest.raises(checkpoint.CheckpointError, match='version 99'):
    ckpt.restore(tree, 'latest', fingerprint=None)
  meta.write_text('{')
  with pytest.raises(checkpoint.CheckpointError, match='meta.json'):
    ckpt.restore(tree, 'latest', fingerprint=None)
  assert ckpt.restore(tree, 1, fingerprint=None).step == 1
  for path in (tmp_path / '00000001/arrays').rglob('*'):
    if path.is_file():
      path.write_bytes(path.read_bytes()[:-1])
  with pytest.raises(checkpoint.CheckpointError, match=r'000001: .*\[1, 2\]'):
    ckpt.restore(tree, 1, fingerprint=None)


def test_what_killed_processes_left_is_no_checkpoint(tmp_path):
  ckpt = checkpoint.Checkpointer(tmp_path, 2, '')
  tree = {'x': jnp.ones(3)}
  save(ckpt, 1, tree)
  for name in ('00000002.orbax-checkpoint-tmp', '00000000.deleted'):
    (tmp_path / name / 'arrays').mkdir(parents=True)
  (tmp_path / 'notes').mkdir()
  (tmp_path / '00000001.copy').mkdir()  # a user's
  assert ckpt.steps() == [1]
  save(ckpt, 2, tree)
  assert ckpt.steps() == [1, 2]
  assert {p.name for p in tmp_path.iterdir()} == {
    '00000001',
    '00000001.copy',
    '00000002',
    'notes',
  }


@contextlib.contextmanager
def small_disk():
  """No file can have more than one MiB."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_is_clear_and_harmless(tmp_path):
  ckpt = checkpoint.Checkpointer(tmp_path, 1, '')
  small, large = {'x': jnp.arange(4.0)}, {'x': jnp.ones((512, 1024))}
  save(ckpt, 1, small)
  with small_disk(), pytest.raises(checkpoint.CheckpointError) as e:
    save(ckpt, 2, large)
  assert 'step 2' in str(e.value) and 'GB free' in str(e.value)
  assert '[1]' in str(e.value)
  assert [p.name for p in tmp_path.iterdir()] == ['00000001']
  got = ckpt.restore(small, 'latest', fingerprint=FINGERPRINT)
  assert np.array_equal(got.state['x'], small['x'])
  save(ckpt, 2, large)
  assert ckpt.steps() == [2]


@pytest.mark.parametrize('background', [False, True])
def test_no_space_is_passed_on(tmp_path, monkeypatch, background):
  def write(*args, **kw):
    raise OSError(errno.ENOSPC, 'No space left on device')

  ckpt = checkpoint.Checkpointer(tmp_path, 1, '')
  save(ckpt, 1, {'x': jnp.ones(2)})
  monkeypatch.setattr(checkpoint.ocp.JsonCheckpointHandler, 'save', write)
  monkeypatch.setattr(checkpoint.ocp.JsonCheckpointHandler, 'async_save', write)
  with pytest.raises(checkpoint.CheckpointError, match='No space left'):
    save(ckpt, 2, {'x': jnp.ones(2)}, background=background)
    ckpt.wait()
  assert ckpt.steps() == [1]


def test_a_full_disk_in_the_background_is_raised_by_the_next_call(tmp_path):
  ckpt = checkpoint.Checkpointer(tmp_path, 1, '')
  small, large = {'x': jnp.arange(4.0)}, {'x': jnp.ones((512, 1024))}
  save(ckpt, 1, small)
  with small_disk():
    save(ckpt, 2, large, background=True)
    with pytest.raises(checkpoint.CheckpointError, match='step 2 .*GB free'):
      save(ckpt, 3, small)
  ckpt.wait()  # raised once
  assert [p.name for p in tmp_path.iterdir()] == ['00000001']


def test_a_background_save_is_of_the_state_at_the_call(tmp_path):
  ckpt = checkpoint.Checkpointer(tmp_path, 1, '')
  update = jax.jit(lambda x: x + 1, donate_argnums=0)
  rng = np.random.default_rng(0)
  start = rng.normal(size=(16, 512, 1024)).astype(np.float32)
  state = {'x': jnp.array(start), 'host': np.arange(3)}
  save(ckpt, 1, state)
  save(ckpt, 2, state, background=True)
  for _ in range(5):  # as training goes on
    state['x'] = update(state['x'])
  jax.block_until_ready(state)
  ckpt.wait()
  assert ckpt.steps() == [2]  # the older one is deleted after the save
  got = ckpt.restore(state, 2, fingerprint=FINGERPRINT).state
  assert raw(got['x'])[1:] == raw(start)[1:]


KILLED = """
import sys
import jax.numpy as jnp
from searchrl_jax.store import checkpoint
ckpt = checkpoint.Checkpointer(sys.argv[1], 3, '')
kw = dict(extras={}, metrics={}, fingerprint={})
tree = {f'x{i}': jnp.full((2048, 2048), float(i)) for i in range(12)}
ckpt.save(1, tree, **kw)
print('saved', flush=True)
ckpt.save(2, tree, background=sys.argv[2] == 'True', **kw)
ckpt.wait()
"""


@pytest.mark.long
@pytest.mark.parametrize('background', [False, True])
def test_a_kill_in_the_middle_of_a_save(tmp_path, background):
  child = subprocess.Popen(
    [sys.executable, '-c', KILLED, str(tmp_path), str(background)],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    text=True,
  )
  try:
    assert child.stdout.readline() == 'saved\n'
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob('00000002.*/arrays*/state.x*')):
      assert time.monotonic() < deadline and child.poll() is None
      time.sleep(0.001)
  finally:
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
  ckpt = checkpoint.Checkpointer(tmp_path, 3, '')
  assert list(tmp_path.glob('00000002.*'))  # the kill came in time
  assert ckpt.steps() == [1]
  tree = {f'x{i}': jnp.zeros((2048, 2048)) for i in range(12)}
  got = ckpt.restore(tree, 'latest', fingerprint={}).state
  assert all(float(got[f'x{i}'].min()) == i for i in range(12))
  save(ckpt, 2, {'x': jnp.ones(2)})
  assert not list(tmp_path.glob('*.orbax*'))


MEMORY = """
import json, sys, jax, jax.numpy as jnp
from searchrl_jax.store import checkpoint
from tests import memory
# 8 arrays of 128 MB: what counts is that far less than all is held.
tree = {f'x{i}': jnp.full((16, 2048, 1024), 1.0 + i) for i in range(8)}
jax.block_until_ready(tree)
size = sum(x.nbytes for x in tree.values())
ckpt = checkpoint.Checkpointer(sys.argv[1], 1, '')
kw = dict(extras={}, metrics={}, fingerprint={})
with memory.Peak() as m:
  ckpt.save(1, tree, **kw)
shapes = jax.eval_shape(lambda: tree)
out = dict(size=size, save=m.peak - m.start)
del tree
got = ckpt.restore(shapes, 1, fingerprint={})
assert all(float(got.state[f'x{i}'][-1, -1, -1]) == 1 + i for i in range(8))
print(json.dumps(out))
"""


@pytest.mark.long
@pytest.mark.skipif(
  not pathlib.Path('/proc/self/smaps_rollup').exists(), reason='Linux only'
)
def test_host_memory_of_a_save_of_one_gigabyte(tmp_path):
  out = subprocess.run(
    [sys.executable, '-c', MEMORY, str(tmp_path)],
    cwd=ROOT,
    check=True,
    stdout=subprocess.PIPE,
    text=True,
    env={'PATH': '/usr/bin:/bin', 'JAX_PLATFORMS': 'cpu'},
  )
  got = json.loads(out.stdout.splitlines()[-1])
  print(got)
  assert got['size'] >= 1e9
  # What Orbax's default store needs here: the whole state.
  assert got['save'] <= 0.6 * got['size']
