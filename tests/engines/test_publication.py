"""Versions: whole or absent, the engine's dtype, pruned, in memory."""

import dataclasses
import errno
import signal
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from searchrl_jax.devices import sharding
from searchrl_jax.engines.weights import (
  checksum,
  memory,
  publication,
  published,
)
from searchrl_jax.models import decoder, pretrained, rotary
from searchrl_jax.store import checkpoint
from tests import memory as used
from tests.conftest import ROOT
from tests.engines.common import CFG, make_params
from tests.engines.test_states import CFG as HYBRID

pytestmark = pytest.mark.slow

UNTIED = dataclasses.replace(
  CFG,
  tied=False,
  family='qwen3',
  n_heads=2,
  head_dim=16,
  rope_scaling=rotary.RopeScaling('llama3', 8.0, 1.0, 4.0, 64),
)


def versions(folder):
  return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit())


def publisher(folder, cfg=CFG, dtype='float32'):
  return publication.Publisher(folder, cfg, dtype)


@pytest.mark.long
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('cfg', [CFG, UNTIED], ids=['tied', 'untied'])
def test_what_is_read_is_what_an_export_holds(tmp_path, cfg, dtype):
  params = make_params(cfg=cfg)
  params['layers']['mlp_norm'] = jnp.zeros_like(params['layers']['mlp_norm'])
  done = publisher(tmp_path / 'p', cfg, dtype).publish(params, 3)
  pretrained.save(tmp_path / 'hf', cfg, params, dtype=dtype)
  want = safetensors.numpy.load_file(tmp_path / 'hf' / 'model.safetensors')
  if cfg.tied:
    want['lm_head.weight'] = want['model.embed_tokens.weight']
  found = published.open_published(done.path)
  got = dict(found.tensors())
  assert set(got) == set(want)
  assert list(dict(found.tensors(tied=True))) == list(found.table)
  for name, value in want.items():
    assert got[name].dtype == value.dtype and got[name].shape == value.shape
    assert got[name].tobytes() == value.tobytes(), name
  assert (found.version, found.dtype) == (3, dtype)
  assert (
    found.checksums
    == done.checksums
    == checksum.checksums(decoder.flatten(params), dtype)
  )
  assert done.bytes == cfg.n_params * np.dtype(jnp.dtype(dtype)).itemsize
  fields = dict(found.config)
  if fields['rope_scaling']:
    fields['rope_scaling'] = rotary.RopeScaling(**fields['rope_scaling'])
  assert decoder.DecoderConfig(**fields) == cfg


@pytest.mark.long
def test_half_precision_keeps_what_a_server_keeps_whole(tmp_path):
  """The decays of delta nets, and not their norms."""
  done = publisher(tmp_path, HYBRID, 'bfloat16').publish(
    make_params(cfg=HYBRID), 1
  )
  found, parts = published.open_published(done.path), {}
  for name, tensor in found.table.items():
    array = found.read(name)
    assert (array.dtype == np.float32) == name.endswith('.A_log')
    ours = parts.setdefault(tensor.path, [])
    ours.append(tensor.to_ours(array))
  whole = {k: v[0] for k, v in parts.items() if '/' not in k}
  assert checksum.checksums(parts | whole) == done.checksums


def resident(file) -> int:
  """Bytes of a file's maps that this process has in memory."""
  size, ours = 0, False
  for line in open('/proc/self/smaps'):
    first, *rest = line.split()
    if '-' in first:
      ours = bool(rest[4:]) and rest[4] == str(file)
    elif first == 'Rss:' and ours:
      size += int(rest[0]) << 10
  return size


@pytest.mark.long
@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
def test_a_tensor_is_a_file_of_which_only_what_is_used_is_read(tmp_path):
  """A worker of several takes its rows; the file is not read as a whole."""
  cfg = dataclasses.replace(CFG, d_ff=1 << 15, n_layers=1)
  done = publisher(tmp_path, cfg).publish(make_params(cfg=cfg), 0)
  name = 'model.layers.0.mlp.gate_proj.weight'
  file = done.path / 'arrays' / f'state.{name}' / '0.0'
  array = published.open_published(done.path).read(name)
  assert array.shape == (1 << 15, cfg.d_model) and array.flags.c_contiguous
  assert file.read_bytes() == array.tobytes()
  array = published.open_published(done.path).read(name)
  assert resident(file) == 0
  mine = np.array(array[1 << 14 :])
  assert mine.nbytes <= resident(file) <= 1.1 * mine.nbytes


@pytest.mark.long
@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
def test_publishing_needs_a_fifth_of_the_weights_as_memory(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(checkpoint, '_DEFERRED', 2 << 20)
  # 8 to 12 MB, as the threads of writers come to run; of layers of 6 MB.
  cfg = dataclasses.replace(CFG, d_model=512, d_ff=1024, n_layers=16)
  params = jax.block_until_ready(make_params(cfg=cfg))
  pub = publisher(tmp_path, cfg)
  size = pub.publish(params, 0).bytes  # compiles
  assert size > 80 << 20
  with used.Peak() as peak:
    pub.publish(params, 1)
  assert peak.peak - peak.start < 0.2 * size


def test_sharded_parameters_are_written_and_cast_where_they_lie(tmp_path):
  mesh = sharding.make_mesh(2, 2, 2)
  params = make_params()
  where = decoder.param_shardings(CFG, mesh)
  placed = jax.tree.map(jax.device_put, params, where)
  one = publisher(tmp_path / 'one', dtype='bfloat16').publish(params, 1)
  many = publisher(tmp_path / 'many', dtype='bfloat16').publish(placed, 1)
  assert many.checksums == one.checksums
  # One process has all shards, so that a server can map each tensor.
  maps = published.open_published(many.path).tensors()
  assert all(isinstance(x, np.memmap) for _, x in maps)
  a = published.open_published(one.path).tensors()
  b = published.open_published(many.path).tensors()
  for (name, x), (other, y) in zip(a, b, strict=True):
    assert name == other and x.tobytes() == y.tobytes()


def test_the_same_version_again_replaces_it(tmp_path):
  pub = publisher(tmp_path)
  first = pub.publish(make_params(0), 2)
  assert pub.publish(make_params(0), 2).checksums == first.checksums
  # A run that was resumed trains otherwise from here.
  other = pub.publish(make_params(1), 2)
  assert other.checksums != first.checksums
  embed = published.open_published(other.path).read('model.embed_tokens.weight')
  np.testing.assert_array_equal(embed, make_params(1)['embed'])
  # Half of one, as a disk that failed leaves it, to this process and to one
  # that does not know how it came there.
  chunk = next(
    p
    for p in sorted((other.path / 'arrays').rglob('*'))
    if p.is_file() and not p.name.startswith('.')
  )
  chunk.write_bytes(b'')
  publisher(tmp_path).publish(make_params(1), 2)
  got = dict(published.open_published(other.path).tensors())
  np.testing.assert_array_equal(
    got['model.embed_tokens.weight'], make_params(1)['embed']
  )
  (other.path / 'meta/meta.json').write_text('{')
  pub.publish(make_params(1), 2)
  assert published.open_published(other.path).checksums == other.checksums
  assert [p.name for p in tmp_path.iterdir()] == ['00000002']


def test_another_dtype_of_the_same_version_replaces_it(tmp_path):
  publisher(tmp_path).publish(make_params(), 2)
  done = publisher(tmp_path, dtype='bfloat16').publish(make_params(), 2)
  assert published.open_published(done.path).dtype == 'bfloat16'


def test_versions_stay_until_they_are_acknowledged(tmp_path):
  pub = publisher(tmp_path)
  for version in (0, 1, 2, 3):
    pub.publish(make_params(version), version)
  assert versions(tmp_path) == [0, 1, 2, 3]
  pub.prune(2)
  assert versions(tmp_path) == [2, 3]
  pub.clear()
  assert versions(tmp_path) == []


def test_a_process_takes_away_what_it_wrote_alone(tmp_path):
  one, other = publisher(tmp_path), publisher(tmp_path)
  one.publish(make_params(), 1)
  other.publish(make_params(), 2)
  for _ in range(2):
    one.clear()
    assert versions(tmp_path) == [2]
    one.publish(make_params(), 1)


def test_parameters_of_another_model_are_named(tmp_path):
  params = make_params()
  params['layers']['q'] = jnp.swapaxes(params['layers']['q'], 2, 3)
  with pytest.raises(ValueError, match=r"'layers/q' .* \(2, 32"):
    publisher(tmp_path).publish(params, 0)
  with pytest.raises(ValueError, match="'head'"):
    publisher(tmp_path, UNTIED).publish(make_params(), 0)
  assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_the_other_versions(tmp_path, monkeypatch):
  pub = publisher(tmp_path)
  pub.publish(make_params(0), 0)

  def full(*args, **kw):
    raise OSError(errno.ENOSPC, 'No space left on device')

  with monkeypatch.context() as m:
    m.setattr(checkpoint.ocp.Checkpointer, 'save', full)
    with pytest.raises(checkpoint.CheckpointError, match='step 1.*No space'):
      pub.publish(make_params(1), 1)
  assert versions(tmp_path) == [0]
  assert pub.publish(make_params(1), 1).version == 1


# --- In memory.


def in_memory(tmp_path, room='memory'):
  (tmp_path / 'memory').mkdir(exist_ok=True)
  where = tmp_path / 'run', CFG, 'float32', str(tmp_path / room)
  return publication.Publisher(*where)


def test_versions_lie_in_memory_and_leave_nothing(tmp_path):
  one, other = in_memory(tmp_path), in_memory(tmp_path)
  done = one.publish(make_params(), 1)
  assert done.path.parent.parent == tmp_path / 'memory'
  assert done.path.parent != other.publish(make_params(), 1).path.parent
  one.publish(make_params(1), 2)
  one.prune(2)
  assert versions(done.path.parent) == [2]
  for last in (one, other):
    last.clear()
  assert not [*(tmp_path / 'memory').iterdir()]
  assert not (tmp_path / 'run').exists()


def test_without_such_a_folder_they_lie_in_the_run_folder(tmp_path):
  pub = in_memory(tmp_path, 'absent')
  assert pub.publish(make_params(), 1).path == tmp_path / 'run' / '00000001'


@pytest.mark.parametrize('copies, where', [(2, 'run'), (4, 'memory')])
def test_memory_must_have_room(copies, where, tmp_path, monkeypatch):
  usage = types.SimpleNamespace(free=copies * 4 * CFG.n_params)
  monkeypatch.setattr(memory.shutil, 'disk_usage', lambda _: usage)
  path = in_memory(tmp_path).publish(make_params(), 1).path
  assert path.relative_to(tmp_path).parts[0] == where


def test_what_a_killed_process_left_goes_with_the_next(tmp_path):
  code = (
    'import sys; from searchrl_jax.engines.weights import memory\n'
    f'folder = memory.claim({str(tmp_path)!r}, 0)\n'
    '(folder.path / "weights").write_text("old")\n'
    'print(flush=True); sys.stdin.read()'
  )
  start = [sys.executable, '-c', code]
  pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
  with (
    subprocess.Popen(start, cwd=ROOT, **pipes) as killed,
    subprocess.Popen(start, cwd=ROOT, **pipes) as alive,
  ):
    for process in (killed, alive):
      process.stdout.readline()
    assert len([*tmp_path.iterdir()]) == 2
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    folder = memory.claim(str(tmp_path), 0)
    assert len([*tmp_path.iterdir()]) == 2  # ours, and that of the living
    assert len([*tmp_path.glob('*/weights')]) == 1
    folder.close()
    alive.stdin.close()
    alive.wait()
  memory.claim(str(tmp_path), 0).close()
  assert not [*tmp_path.iterdir()]
