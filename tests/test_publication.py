"""Versions on disk: whole or absent, the engine's dtype, pruned when told."""

import dataclasses
import errno
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from searchrl_jax.engines.weights import checksum, publication, published
from searchrl_jax.models import decoder, pretrained
from searchrl_jax.run import checkpoint, sharding
from tests.engines.common import CFG, make_params

pytestmark = pytest.mark.slow

UNTIED = dataclasses.replace(
  CFG,
  tied=False,
  qkv_bias=False,
  qk_norm=True,
  n_heads=2,
  head_dim=16,
  rope_scaling=decoder.RopeScaling(8.0, 1.0, 4.0, 64),
)


def versions(folder):
  return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit())


def publisher(folder, cfg=CFG, dtype='float32'):
  return publication.Publisher(folder, cfg, dtype)


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
    found.manifest
    == done.manifest
    == checksum.checksums(decoder.flatten(params), dtype)
  )
  assert done.bytes == cfg.n_params * np.dtype(jnp.dtype(dtype)).itemsize
  fields = dict(found.config)
  if fields['rope_scaling']:
    fields['rope_scaling'] = decoder.RopeScaling(**fields['rope_scaling'])
  assert decoder.DecoderConfig(**fields) == cfg


def test_a_chunk_holds_one_layer_at_most(tmp_path):
  done = publisher(tmp_path).publish(make_params(), 0)
  for name, shape in published.open_published(done.path).shapes.items():
    store = done.path / 'arrays' / f'state.{name.replace("/", ".")}'
    chunks = json.loads((store / '.zarray').read_text())['chunks']
    rows = [1] if name.startswith('layers/') else shape[:1]
    assert chunks == [*rows, *shape[1:]], name


def test_sharded_parameters_are_written_and_cast_where_they_lie(tmp_path):
  mesh = sharding.make_mesh(2, 2, 2)
  params = make_params()
  where = decoder.param_shardings(CFG, mesh)
  placed = jax.tree.map(jax.device_put, params, where)
  one = publisher(tmp_path / 'one', dtype='bfloat16').publish(params, 1)
  many = publisher(tmp_path / 'many', dtype='bfloat16').publish(placed, 1)
  assert many.manifest == one.manifest
  a = published.open_published(one.path).tensors()
  b = published.open_published(many.path).tensors()
  for (name, x), (other, y) in zip(a, b, strict=True):
    assert name == other and x.tobytes() == y.tobytes()


def test_the_same_version_again_replaces_it(tmp_path):
  pub = publisher(tmp_path)
  first = pub.publish(make_params(0), 2)
  assert pub.publish(make_params(0), 2).manifest == first.manifest
  # A run that was resumed trains otherwise from here.
  other = pub.publish(make_params(1), 2)
  assert other.manifest != first.manifest
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
  assert published.open_published(other.path).manifest == other.manifest
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
  with pytest.raises(ValueError, match=r"'layers/q' .* asks for \(2, 32"):
    publisher(tmp_path).publish(params, 0)
  with pytest.raises(ValueError, match="'head' has shape None"):
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
