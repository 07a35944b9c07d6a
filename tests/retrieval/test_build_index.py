import contextlib
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import types

import numpy as np
import pytest

from retrieval import build_index, files
from retrieval.corpus import CorpusError
from retrieval.index import dense_faiss, vectors
from retrieval.index.encoder import Encoder
from retrieval.index.folder import FolderError, open_folder, open_index
from retrieval.index.store import open_store
from tests import memory
from tests.conftest import ROOT
from tests.golden import encoders
from tests.retrieval.conftest import write_corpus
from tests.retrieval.fakes import FakeEncoder, generate

pytestmark = pytest.mark.slow

DEFAULTS = dict(
  corpus=None,
  index=[],
  encoder='fake',
  vectors=None,
  block=64,
  restart=False,
  adopt=[],
  sample=64,
  bm25_preset='lucene',
  k1=None,
  b=None,
  analyzer='auto',
  stemmer='english',
  stop_words='english',
  milvus_uri=None,
  milvus_collection='passages',
  **dict.fromkeys(build_index._ENCODER),
)


def flag_values(out, **given):
  assert not set(given) - set(DEFAULTS)
  return types.SimpleNamespace(out=str(out), **{**DEFAULTS, **given})


def build(out, **given):
  return build_index.run(flag_values(out, **given))


@pytest.fixture(autouse=True)
def fake(monkeypatch):
  import retrieval.index.encoder

  monkeypatch.setattr(retrieval.index.encoder, 'Encoder', FakeEncoder)
  monkeypatch.setattr(FakeEncoder, 'encoded', 0)
  monkeypatch.setattr(FakeEncoder, 'pause', None)


@pytest.fixture(scope='module')
def source(tmp_path_factory):
  path = tmp_path_factory.mktemp('source') / 'corpus.jsonl'
  return str(write_corpus(path, generate(500)))


def manifest(out):
  return json.loads((out / 'manifest.json').read_text())


def contents(out):
  """Bytes of every file, without what names the moment or the place."""
  return {
    p.relative_to(out).as_posix(): p.read_bytes()
    for p in sorted(out.rglob('*'))
    if p.is_file() and p.name != '.lock'
  }


def test_one_build_at_a_time(source, tmp_path):
  with contextlib.closing(build_index.Folder(tmp_path)):
    with pytest.raises(files.FilesError, match='another build'):
      build(tmp_path, corpus=source, index=['bm25'])
  build(tmp_path, corpus=source, index=['bm25'])


def test_restart_discards_index_folders_only(source, tmp_path):
  (tmp_path / 'bm25').mkdir()
  (tmp_path / 'bm25/of_another_program').write_text('x')
  with pytest.raises(files.FilesError, match='no corpus.arrow'):
    build(tmp_path, corpus=source, index=['bm25'], restart=True)
  assert (tmp_path / 'bm25/of_another_program').exists()


def test_arithmetic_is_part_of_the_work(source, tmp_path, monkeypatch):
  build(tmp_path, corpus=source, index=['dense_jax'])
  real = FakeEncoder.__init__

  def lower(self, *args, **settings):
    real(self, *args, **settings)
    self.dtype = 'bfloat16'

  monkeypatch.setattr(FakeEncoder, '__init__', lower)
  with pytest.raises(vectors.VectorsError, match='arithmetic was .float32'):
    build(tmp_path, index=['dense_faiss:Flat'])


def test_rows_are_the_passages(source, tmp_path):
  build(tmp_path, corpus=source, index=['dense_jax', 'bm25'])
  corpus = open_store(tmp_path / 'corpus.arrow')
  found = vectors.open_vectors(tmp_path)
  expected = FakeEncoder().encode_passages(corpus.contents[:])
  np.testing.assert_array_equal(found, expected)
  encoder = FakeEncoder().parameters
  assert manifest(tmp_path) == {
    'format': 1,
    'corpus': {'count': 500, 'sha256': corpus.sha256, 'source': source},
    'vectors': {
      'dim': 32,
      'dtype': 'float32',
      'encoder': encoder,
      'sample_sha256': files.sample_sha256(tmp_path / 'vectors.npy'),
    },
    'indexes': {
      'dense_jax': {},
      'bm25': {
        'name': 'bm25',
        'k1': 1.2,
        'b': 0.75,
        'stemmer': 'english',
        'stop_words': 'english',
        'analyzer': 'words',
      },
    },
  }


def test_float16(source, tmp_path):
  build(tmp_path, corpus=source, index=['dense_jax'], vectors='float16')
  found = vectors.open_vectors(tmp_path)
  assert (
    found.dtype == 'float16'
    and manifest(tmp_path)['vectors']['dtype'] == 'float16'
  )
  corpus = open_store(tmp_path / 'corpus.arrow')
  expected = FakeEncoder().encode_passages(corpus.contents[:20])
  np.testing.assert_allclose(found[:20], expected, atol=1e-3)


def test_another_index_later_encodes_nothing(source, tmp_path):
  build(tmp_path, corpus=source, index=['dense_jax'])
  encoded = FakeEncoder.encoded
  assert encoded == 500
  build(tmp_path, index=['bm25', 'dense_jax'])
  build(tmp_path, corpus=source, index=['dense_faiss:Flat'], encoder=None)
  assert FakeEncoder.encoded == encoded
  assert list(manifest(tmp_path)['indexes']) == [
    'dense_jax',
    'bm25',
    'dense_faiss:Flat',
  ]
  assert (tmp_path / 'faiss/Flat.index').exists()


class Killed(BaseException):
  pass


@pytest.mark.parametrize('at', [0, 1, 4, 7])
def test_stopped_encoding_goes_on(source, tmp_path, monkeypatch, at):
  whole, cut = tmp_path / 'whole', tmp_path / 'cut'
  build(whole, corpus=source, index=['dense_jax'])
  left = [at]

  def pause():
    if not left[0]:
      raise Killed
    left[0] -= 1

  monkeypatch.setattr(FakeEncoder, 'pause', pause)
  with pytest.raises(Killed):
    build(cut, corpus=source, index=['dense_jax'])
  assert not (cut / 'manifest.json').exists()
  monkeypatch.setattr(FakeEncoder, 'pause', None)
  monkeypatch.setattr(FakeEncoder, 'encoded', 0)
  build(cut, corpus=source, index=['dense_jax'])
  assert FakeEncoder.encoded == 500 - 64 * at
  assert contents(cut) == contents(whole)


@pytest.mark.parametrize(
  'change, said',
  [
    (dict(encoder='other'), "encoder.sha256 .*'fake'.*'other'"),
    (dict(pooling='cls'), "encoder.pooling .*'mean'.*'cls'"),
    (dict(passage_prefix=''), "encoder.passage_prefix .*'passage: '"),
    (dict(vectors='float16'), "dtype .*'float32'.*'float16'"),
  ],
)
def test_other_work_is_refused_by_name(source, tmp_path, change, said):
  build(tmp_path, corpus=source, index=['dense_jax'])
  before = contents(tmp_path)
  with pytest.raises(vectors.VectorsError, match=f'{said}.*--restart'):
    build(tmp_path, corpus=source, index=['dense_faiss:Flat'], **change)
  assert contents(tmp_path) == before
  build(tmp_path, corpus=source, index=['dense_jax'], restart=True, **change)


def test_other_corpus_is_refused(source, tmp_path):
  build(tmp_path / 'x', corpus=source)
  other = write_corpus(tmp_path / 'other.jsonl', generate(500, seed=1))
  with pytest.raises(CorpusError, match='other.jsonl'):
    build(tmp_path / 'x', corpus=str(other), index=['bm25'])
  same = tmp_path / 'same.gz'
  same.write_bytes(gzip.compress(open(source, 'rb').read()))
  build(tmp_path / 'x', corpus=str(same), index=['bm25'])
  with pytest.raises(CorpusError, match='Give --corpus'):
    build(tmp_path / 'y', index=['bm25'])
  # Vectors of one corpus beside another one's store.
  build(tmp_path / 'x', index=['dense_jax'])
  build(tmp_path / 'z', corpus=str(other))
  shutil.copy(tmp_path / 'z/corpus.arrow', tmp_path / 'x/corpus.arrow')
  with pytest.raises(FolderError, match='corpus.arrow.*manifest'):
    build(tmp_path / 'x', index=['bm25'])


@pytest.mark.parametrize(
  'name', ['dense', 'bm25:x', '', 'dense_faiss', 'dense_faiss:']
)
def test_wrong_index_is_refused_before_work(source, tmp_path, name):
  with pytest.raises(ValueError, match=f'--index={name}: '):
    build(tmp_path / 'x', corpus=source, index=['bm25', name])
  assert not (tmp_path / 'x').exists()


@pytest.mark.parametrize('factory', ['Foo9', 'IVF4,PQ5', ' '])
def test_wrong_factory_is_refused_before_encoding(source, tmp_path, factory):
  with pytest.raises(ValueError, match='32 dimensions'):
    build(tmp_path, corpus=source, index=[f'dense_faiss:{factory}'])
  assert FakeEncoder.encoded == 0


def test_dense_without_encoder(source, tmp_path):
  with pytest.raises(ValueError, match='--encoder'):
    build(tmp_path, corpus=source, index=['dense_jax'], encoder=None)


def test_vectors_that_are_no_numbers_name_the_passage(
  source, tmp_path, monkeypatch
):
  real = FakeEncoder._encode

  def broken(self, text):
    v = real(self, text)
    return v * np.nan if 'title333"' in text else v

  monkeypatch.setattr(FakeEncoder, '_encode', broken)
  with pytest.raises(vectors.VectorsError, match='vector 333'):
    build(tmp_path, corpus=source, index=['dense_jax'])


def test_damaged_state(source, tmp_path):
  build(tmp_path, corpus=source, index=['dense_jax'])
  (tmp_path / 'manifest.json').write_text('{"format"')
  with pytest.raises(files.FilesError, match='manifest.json'):
    build(tmp_path, index=['dense_jax'])
  build(tmp_path, corpus=source, index=['dense_jax'], restart=True)
  os.truncate(tmp_path / 'corpus.arrow', 1000)
  with pytest.raises(CorpusError, match='corpus.arrow'):
    build(tmp_path, index=['bm25'])


def test_full_disk(source, tmp_path, monkeypatch):
  usage = types.SimpleNamespace(free=1000)
  monkeypatch.setattr(files.shutil, 'disk_usage', lambda path: usage)
  with pytest.raises(files.FilesError, match='vectors.npy.part'):
    build(tmp_path, corpus=source, index=['dense_jax'])


@pytest.mark.long
def test_memory_is_constant(tmp_path, monkeypatch):
  rng = np.random.default_rng(0)
  monkeypatch.setattr(  # words would take the time, not the memory
    FakeEncoder, '_encode', lambda self, text: np.zeros(256, np.float32)
  )
  monkeypatch.setattr(
    FakeEncoder,
    'encode_passages',
    lambda self, texts: rng.random((len(texts), 256), np.float32),
  )
  peaks = []
  for count in (2_000, 40_000):
    path = tmp_path / f'{count}.jsonl'
    with open(path, 'w') as file:
      for i in range(count):
        file.write(json.dumps({'id': str(i), 'contents': f'{i} ' * 100}) + '\n')
    monkeypatch.setattr(
      FakeEncoder,
      '__init__',
      lambda self, path, **k: vars(self).update(dim=256, parameters={}),
    )
    build(tmp_path / f'{count}', corpus=str(path))
    with memory.Peak() as peak:
      build(tmp_path / f'{count}', index=['dense_jax'], block=1024)
    peaks.append(peak.peak - peak.start)
  # The vectors alone are 41 MB, the texts 24.
  assert peaks[1] - peaks[0] < 8e6, peaks


KILLED = """
import sys
sys.path.insert(0, {root!r})
import retrieval.index.encoder
from tests.retrieval.fakes import FakeEncoder
from tests.retrieval.test_build_index import flag_values
from retrieval import build_index
retrieval.index.encoder.Encoder = FakeEncoder
calls = 0
def pause():
  global calls
  calls += 1
  if calls == 5:
    print('here', flush=True)
    sys.stdin.read()
FakeEncoder.pause = pause
build_index.run(flag_values({out!r}, corpus={source!r}, index={index!r}))
"""


@pytest.mark.long
def test_kill_9_and_again_gives_the_same_bytes(source, tmp_path):
  cut, whole = tmp_path / 'cut', tmp_path / 'whole'
  index = ['bm25', 'dense_jax', 'dense_faiss:Flat']
  code = KILLED.format(root=str(ROOT), out=str(cut), source=source, index=index)
  process = subprocess.Popen(
    [sys.executable, '-c', code],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    cwd=ROOT,
  )
  assert process.stdout.readline() == b'here\n'
  process.send_signal(signal.SIGKILL)
  process.communicate()
  assert json.loads((cut / 'vectors.json').read_text())['done'] == 4 * 64
  assert list(manifest(cut)['indexes']) == ['bm25']
  build(cut, corpus=source, index=index)
  assert FakeEncoder.encoded == 500 - 4 * 64
  build(whole, corpus=source, index=index)
  assert contents(cut) == contents(whole)


def test_a_stopped_faiss_index_goes_on(source, tmp_path, monkeypatch):
  cut, whole = tmp_path / 'cut', tmp_path / 'whole'
  index = ['dense_faiss:IVF8,Flat', 'dense_faiss:Flat']
  build(whole, corpus=source, index=index)
  real, read, stop = dense_faiss.blocks, [], [256]

  def blocks(vectors, size, start=0):
    for first, part in real(vectors, 64, start):
      if stop and first == stop[0]:
        raise Killed
      read.append(first)
      yield first, part

  monkeypatch.setattr(dense_faiss, 'blocks', blocks)
  with pytest.raises(Killed):
    build(cut, corpus=source, index=index)
  assert not (cut / 'faiss/IVF8_Flat.index').exists()
  stop.clear()
  read.clear()
  build(cut, index=index, encoder=None)
  assert read == 2 * [*range(0, 500, 64)]  # of one shard, and of a copy
  assert contents(cut) == contents(whole)


@pytest.mark.long
def test_every_index_opens_and_finds(source, tmp_path, monkeypatch, milvus_url):
  # The real one.
  monkeypatch.setattr('retrieval.index.encoder.Encoder', Encoder)
  model = encoders.write(tmp_path, 'e5-tiny-v2')
  names = [
    'bm25',
    'dense_jax',
    'dense_faiss:Flat',
    'dense_faiss:HNSW8',
    'milvus',
  ]
  # Passages, asked as queries, find themselves where both are encoded alike.
  alike = dict(passage_length=48, query_length=48, query_prefix='passage: ')
  given = dict(encoder=str(model), **alike)
  with pytest.raises(ValueError, match='--milvus_uri'):
    build(tmp_path / 'x', corpus=source, index=names, **given)
  build(
    tmp_path / 'x',
    corpus=source,
    index=names,
    milvus_uri=milvus_url,
    milvus_collection='built',
    **given,
  )
  folder = open_folder(tmp_path / 'x')
  assert list(folder.manifest['indexes']) == names
  assert folder.manifest['vectors']['encoder']['passage_length'] == 48
  encoder = Encoder(model, **alike)
  asked = [0, 7, 499]
  texts = [folder.corpus.contents[i] for i in asked]
  for name in names:
    index = open_index(
      folder, name, **({} if name == 'bm25' else dict(encoder=encoder))
    )
    assert index.search(texts, 3)[0][:, 0].tolist() == asked, name
  del index
  # What was built is adopted elsewhere: an index, and the vectors alone.
  for path in ('faiss/Flat.index', 'faiss/HNSW8.index', 'vectors.npy'):
    build(
      tmp_path / path.replace('/', '_'),
      corpus=source,
      adopt=[str(tmp_path / 'x' / path)],
      **given,
    )
    taken = open_folder(tmp_path / path.replace('/', '_'))
    np.testing.assert_allclose(taken.vectors, folder.vectors, atol=1e-6)
    for name in taken.manifest['indexes']:
      index = open_index(taken, name, encoder=encoder)
      assert index.search(texts, 3)[0][:, 0].tolist() == asked


def test_other_options_of_bm25_are_not_passed_over(source, tmp_path):
  build(tmp_path, corpus=source, index=['bm25'], k1=0.9)
  with pytest.raises(ValueError, match='k1 .*0.9.*1.2'):
    build(tmp_path, index=['bm25'])
  build(tmp_path, index=['bm25'], k1=0.9)


def test_the_analyzer_is_that_of_the_build(source, tmp_path):
  build(tmp_path, corpus=source, index=['bm25'])
  build(tmp_path, index=['bm25'], analyzer='words')  # what auto was
  with pytest.raises(ValueError, match="analyzer .*'words'.*'scripts'"):
    build(tmp_path, index=['bm25'], analyzer='scripts')
  build(
    tmp_path, restart=True, corpus=source, index=['bm25'], analyzer='scripts'
  )
  assert manifest(tmp_path)['indexes']['bm25']['analyzer'] == 'scripts'
  build(tmp_path, index=['bm25'])
  assert open_index(open_folder(tmp_path), 'bm25').analyzer.kind == 'scripts'


def test_the_manifest_states_the_parameters_of_a_preset(source, tmp_path):
  build(tmp_path, corpus=source, index=['bm25'], bm25_preset='search_r1')
  stated = manifest(tmp_path)['indexes']['bm25']
  assert (stated['k1'], stated['b']) == (0.9, 0.4)
  with pytest.raises(ValueError, match='k1 .*0.9.*; b .*0.4'):
    build(tmp_path, index=['bm25'])
