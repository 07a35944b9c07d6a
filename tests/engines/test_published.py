"""What is read without JAX, and what is said of what cannot be read."""

import dataclasses
import json
import shutil
import subprocess
import sys

import pytest

from searchrl_jax.engines.weights import publication, published
from searchrl_jax.engines.weights.published import PublishedError
from searchrl_jax.models import families, hf_config
from tests.conftest import ROOT
from tests.engines.common import CFG, make_params

FIELDS = {k: getattr(CFG, k) for k in families.FIELDS}


@pytest.fixture(scope='module')
def one(tmp_path_factory):
  folder = tmp_path_factory.mktemp('published')
  return (
    publication.Publisher(folder, CFG, 'float32').publish(make_params(), 4).path
  )


@pytest.fixture
def path(one, tmp_path):
  """A publication of its own to damage."""
  return shutil.copytree(one, tmp_path / one.name)


def read_all(path):
  return dict(published.open_published(path).tensors())


def edit(path, change):
  file = path / 'meta/meta.json'
  meta = json.loads(file.read_text())
  change(meta)
  file.write_text(json.dumps(meta))


def test_a_version_that_is_not_there_lists_those_that_are(path):
  with pytest.raises(PublishedError, match=r"00000005.*\['00000004'\]"):
    published.open_published(path.with_name('00000005'))


def test_half_a_publication_is_refused(path):
  tmp = path.with_name('00000006.orbax-checkpoint-tmp')
  shutil.copytree(path, tmp)
  shutil.rmtree(tmp / 'meta')
  with pytest.raises(PublishedError, match='00000006'):
    published.open_published(tmp)
  (path / 'meta/meta.json').write_text('{"extras"')
  with pytest.raises(PublishedError, match='JSONDecodeError'):
    published.open_published(path)


def test_a_checkpoint_of_training_is_no_publication(path):
  edit(path, lambda meta: meta.update(extras={'version': 4}))
  with pytest.raises(PublishedError, match="'published'"):
    published.open_published(path)


def test_another_format_is_refused_by_its_number(path):
  edit(path, lambda meta: meta['extras'].update(published=99))
  with pytest.raises(PublishedError, match='format 99'):
    published.open_published(path)


def test_a_tensor_that_is_gone_is_named(path):
  shutil.rmtree(path / 'arrays/state.model.layers.0.mlp.up_proj.weight')
  with pytest.raises(PublishedError, match=r"'layers/up'"):
    published.open_published(path)


def test_a_chunk_that_is_gone_is_no_zeros(path):
  name = 'model.layers.1.self_attn.k_proj.weight'
  (path / f'arrays/state.{name}/0.0').unlink()
  with pytest.raises(PublishedError, match='layers/k.*layers.1.*k_proj'):
    read_all(path)


def test_a_chunk_that_is_cut_is_named(path):
  file = path / 'arrays/state.model.embed_tokens.weight/0.0'
  file.write_bytes(file.read_bytes()[:-4])
  with pytest.raises(PublishedError, match='embed.*damaged'):
    read_all(path)


def test_a_misshapen_tensor_is_named(path):
  name = 'model.layers.0.mlp.gate_proj.weight'
  store = path / f'arrays/state.{name}/.zarray'
  meta = json.loads(store.read_text())
  meta['shape'].reverse()
  store.write_text(json.dumps(meta))
  with pytest.raises(PublishedError, match=r"'layers/gate'.*shape"):
    published.open_published(path)


def test_an_unknown_name_is_an_error(path):
  with pytest.raises(KeyError, match='nothing'):
    published.open_published(path).read('nothing')


def test_a_publication_is_read_without_jax(path):
  code = (
    'import sys; from searchrl_jax.engines.weights import published\n'
    f'print(len(dict(published.open_published({str(path)!r}).tensors())))\n'
    'sys.exit("jax" in sys.modules or "orbax" in sys.modules)'
  )
  done = subprocess.run(
    [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True
  )
  assert (done.returncode, done.stdout) == (0, '27\n'), done.stderr


# --- The folder that a server starts on.


def test_a_server_starts_with_the_config_and_the_tokenizers_files(tmp_path):
  source = tmp_path / 'tokenizer'
  source.mkdir()
  for name in ('tokenizer.json', 'tokenizer_config.json', 'vocab.json'):
    (source / name).write_text(name)
  (source / 'model.safetensors').write_text('not this one')
  for _ in range(2):  # a run that is resumed writes it again
    where = tmp_path / 's', FIELDS, source
    published.write_serving_folder(*where, 'bfloat16', max_len=40_000)
  config = json.loads((tmp_path / 's/config.json').read_text())
  assert config['torch_dtype'] == 'bfloat16'
  assert config['max_position_embeddings'] == 40_000
  assert hf_config.parse_config(config) == FIELDS
  assert {p.name for p in (tmp_path / 's').iterdir()} == {
    'config.json',
    'tokenizer.json',
    'tokenizer_config.json',
    'vocab.json',
  }


def test_what_no_server_can_hold_is_refused(tmp_path):
  wide = dataclasses.replace(CFG, head_dim=16)
  fields = {k: getattr(wide, k) for k in families.FIELDS}
  (tmp_path / 'tokenizer.json').touch()
  with pytest.raises(ValueError, match='head_dim=16.*d_model.*32'):
    published.write_serving_folder(tmp_path / 's', fields, tmp_path, 'float32')
