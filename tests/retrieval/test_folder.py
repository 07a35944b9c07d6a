import copy
import functools
import json
import shutil

import numpy as np
import pytest

from retrieval import files
from retrieval.core import LocalSearcher
from retrieval.corpus import CorpusError
from retrieval.index.bm25 import BM25Index
from retrieval.index.folder import (
  FolderError,
  faiss_path,
  open_folder,
  open_index,
)
from retrieval.index.store import open_store, write_store
from tests.retrieval.conftest import PASSAGES, write_corpus
from tests.retrieval.vectors import FakeEncoder

ENCODER = FakeEncoder()
DENSE = ('dense_jax', 'dense_faiss:Flat', 'dense_faiss:IVF1,Flat', 'milvus')


@pytest.fixture(scope='session')
def made(corpus_path, tmp_path_factory, milvus_url):
  """A folder with every index but one."""
  from retrieval.index import dense_faiss, milvus

  path = tmp_path_factory.mktemp('index') / 'wiki 18'
  path.mkdir()
  corpus = write_store(corpus_path, path / 'corpus.arrow')
  vectors = ENCODER.encode_passages(list(corpus.contents))
  np.save(path / 'vectors.npy', vectors)
  index = BM25Index.build(corpus.contents, path / 'bm25', b=0.5)
  (path / 'faiss').mkdir()
  for factory in ('Flat', 'IVF1,Flat'):
    dense_faiss.build(vectors, factory, faiss_path(path, factory))
  milvus.build(vectors, milvus_url, 'folder')
  files.write_json(
    path / 'manifest.json',
    {
      'format': 1,
      'corpus': {
        'count': len(corpus),
        'sha256': corpus.sha256,
        'source': 'c.jsonl',
      },
      'vectors': {
        'dim': ENCODER.dim,
        'dtype': 'float32',
        'encoder': ENCODER.parameters,
        'sample_sha256': files.sample_sha256(path / 'vectors.npy'),
      },
      'indexes': {
        'bm25': index.parameters,
        **{
          f'dense_faiss:{factory}': {
            'factory': factory,
            'sample_sha256': dense_faiss.sample_sha256(
              faiss_path(path, factory)
            ),
          }
          for factory in ('Flat', 'IVF1,Flat')
        },
        'milvus': {'collection': 'folder', 'uri': milvus_url},
      },
    },
  )
  return path


@pytest.fixture
def spoiled(made, tmp_path):
  """A folder to spoil."""
  return shutil.copytree(made, tmp_path / 'index')


def change(folder, edit):
  path = folder / 'manifest.json'
  manifest = json.loads(path.read_text())
  edit(manifest)
  files.write_json(folder / 'manifest.json', manifest)


def test_opens_what_was_made(made, corpus):
  folder = open_folder(str(made))
  assert folder.path == made
  assert folder.corpus.sha256 == corpus.sha256
  assert isinstance(folder.vectors, np.memmap)
  np.testing.assert_array_equal(
    folder.vectors, ENCODER.encode_passages(corpus.contents)
  )
  assert folder.manifest['corpus']['count'] == len(PASSAGES)
  index = open_index(folder, 'bm25')
  found = LocalSearcher(folder.corpus, index).search(['hamlet'], 2)
  assert {f.id for f in found[0]} == {'0', '2'}
  assert index.b == 0.5


@pytest.mark.parametrize('name', DENSE)
def test_dense_indexes_find_a_passage_by_its_words(made, name):
  folder = open_folder(made)
  index = open_index(folder, name, encoder=ENCODER)
  want = folder.vectors @ ENCODER.encode_queries([PASSAGES[3][2]])[0]
  ids, scores = index.search([PASSAGES[3][2]], 1)
  assert ids[0, 0] == want.argmax()
  assert scores[0, 0] == pytest.approx(want.max(), abs=1e-6)


def test_options_reach_the_index(made):
  folder = open_folder(made)
  index = open_index(folder, 'dense_faiss:IVF1,Flat', encoder=ENCODER, nprobe=1)
  assert index.parameters['nprobe'] == 1
  index = open_index(folder, 'dense_jax', encoder=ENCODER, precision='int8')
  assert index.parameters['precision'] == 'int8'
  with pytest.raises(ValueError, match='ef_search'):
    open_index(folder, 'dense_faiss:Flat', encoder=ENCODER, ef_search=8)


def test_without_vectors_there_is_no_dense_index(spoiled):
  def edit(m):
    m['vectors'], m['indexes'] = None, {'bm25': m['indexes']['bm25']}

  change(spoiled, edit)
  (spoiled / 'vectors.npy').unlink()
  folder = open_folder(spoiled)
  assert folder.vectors is None and len(open_index(folder, 'bm25')) == 7
  with pytest.raises(FolderError, match="'dense_jax'; .*'bm25'. "):
    open_index(folder, 'dense_jax', encoder=ENCODER)


def test_an_absent_index_comes_with_the_command_that_makes_it(made):
  folder = open_folder(made)
  with pytest.raises(FolderError) as error:
    open_index(folder, 'dense_faiss:HNSW64', encoder=ENCODER)
  said = str(error.value)
  assert "'bm25', 'dense_faiss:Flat', 'dense_faiss:IVF1,Flat'" in said
  assert said.endswith(
    'python -m retrieval.build_index --corpus=c.jsonl '
    f"'--out={made}' --index=dense_faiss:HNSW64"
  )
  with pytest.raises(FolderError, match="'dense'.*bm25, dense_jax"):
    open_index(folder, 'dense')
  hostile = copy.deepcopy(folder.manifest)
  hostile['corpus']['source'] = '\x1b]0;x\x07'
  hostile['indexes']['\x1b[2J'] = {}
  write = type(folder)(folder.path, hostile, folder.corpus, None)
  with pytest.raises(FolderError) as error:
    open_index(write, 'x')
  assert str(error.value).isprintable()


@pytest.mark.parametrize(
  'path, value, said',
  [
    ('format', 2, 'format is 2'),
    ('format', None, 'format is None'),
    ('corpus.count', 8, r'corpus.count .*8.*7'),
    ('corpus.count', '7', "corpus.count .*'7'.* 7"),
    ('corpus.sha256', 'abc', r"corpus.sha256 .*'abc'.* '[0-9a-f]{64}'"),
    ('corpus', None, 'manifest.json.*damaged'),
    ('vectors.dim', 31, r'vectors.shape.*\[7, 31\].*\[7, 32\]'),
    ('vectors.dtype', 'float16', "dtype .*'float16'.*'float32'"),
    ('vectors', 3, 'manifest.json.*damaged'),
  ],
)
def test_a_manifest_that_does_not_match_names_the_field(
  spoiled, path, value, said
):
  def edit(manifest):
    *parents, last = path.split('.')
    for name in parents:
      manifest = manifest[name]
    manifest[last] = value

  change(spoiled, edit)
  with pytest.raises(FolderError, match=said) as error:
    open_folder(spoiled)
  assert str(spoiled) in str(error.value)


def test_another_corpus_is_refused(spoiled, tmp_path):
  other = write_corpus(tmp_path / 'c', [('x', 'T', 'x'), *PASSAGES[1:]])
  write_store(other, spoiled / 'corpus.arrow')
  with pytest.raises(FolderError, match='corpus.arrow.*manifest') as e:
    open_folder(spoiled)
  assert open_store(spoiled / 'corpus.arrow').sha256 in str(e.value)
  assert 'count' not in str(e.value)  # which is the same


def test_swapped_files_of_equal_shape_are_refused(spoiled):
  vectors = np.load(spoiled / 'vectors.npy')
  from retrieval.index import dense_faiss

  dense_faiss.build(-vectors, 'Flat', faiss_path(spoiled, 'Flat'))
  dense_faiss.build(-vectors, 'IVF1,Flat', faiss_path(spoiled, 'IVF1,Flat'))
  folder = open_folder(spoiled)
  for factory, file in (('Flat', 'Flat'), ('IVF1,Flat', 'IVF1_Flat')):
    with pytest.raises(
      FolderError, match=f'faiss/{file}.index.*Flat.sample_sha256'
    ):
      open_index(folder, f'dense_faiss:{factory}', encoder=ENCODER)
  np.save(spoiled / 'vectors.npy', vectors[::-1].copy())
  with pytest.raises(FolderError, match='vectors.npy.*vectors.sample_sha256'):
    open_folder(spoiled)


def test_an_index_over_another_number_of_passages_is_refused(spoiled):
  BM25Index.build(['one', 'two'], spoiled / 'bm25', b=0.5)
  with pytest.raises(FolderError, match=r'bm25 .*corpus.count .*7.*2'):
    open_index(open_folder(spoiled), 'bm25')


def test_bm25_built_otherwise_is_refused(spoiled):
  folder = open_folder(spoiled)
  assert open_index(folder, 'bm25', b=0.5, stemmer='english').b == 0.5
  with pytest.raises(FolderError, match=r'bm25.b .*0.75.*0.5'):
    open_index(folder, 'bm25', b=0.75)
  BM25Index.build(folder.corpus.contents, spoiled / 'bm25', k1=2)
  with pytest.raises(FolderError, match=r'bm25.k1 .*1.2.*2.0.*bm25.b'):
    open_index(folder, 'bm25')


@pytest.mark.parametrize('name', DENSE)
def test_another_encoder_is_refused(made, name):
  folder = open_folder(made)
  with pytest.raises(FolderError, match='fake.*--encoder'):
    open_index(folder, name)
  with pytest.raises(FolderError, match="encoder.family.*'fake'.*'other'"):
    open_index(folder, name, encoder=FakeEncoder(name='other'))


def test_a_model_is_used_as_the_manifest_says(spoiled, tmp_path, monkeypatch):
  from retrieval.index.dense_jax import Encoder
  from tests.golden import encoders

  path = encoders.write(tmp_path, 'all-MiniLM-tiny')
  short = {'query_length': 32, 'passage_length': 24}
  encoder = Encoder(path, pooling='cls', passage_prefix='p: ', **short)
  vectors = encoder.encode_passages(list(open_folder(spoiled).corpus.contents))
  np.save(spoiled / 'vectors.npy', vectors)

  def edit(m):
    m['vectors'] |= {
      'dim': encoder.dim,
      'encoder': encoder.parameters,
      'sample_sha256': files.sample_sha256(spoiled / 'vectors.npy'),
    }

  change(spoiled, edit)
  folder = open_folder(spoiled)
  # Opened with other settings, the path alone would be another encoder.
  with pytest.raises(FolderError, match="pooling.*'cls'.*'mean'"):
    open_index(folder, 'dense_jax', encoder=Encoder(path, **short))
  monkeypatch.setattr(  # this model has too few positions for the usual
    'retrieval.index.encoder.Encoder',
    functools.partial(Encoder, query_length=32),
  )
  index = open_index(folder, 'dense_jax', encoder=str(path))
  assert index.parameters['encoder']['passage_prefix'] == 'p: '
  assert len(index) == 7


def test_an_adopted_index_states_its_own_encoder(spoiled):
  def edit(m):
    m['vectors'] = None
    m['indexes']['dense_faiss:Flat']['encoder'] = {'family': 'e5', 'dim': 32}

  change(spoiled, edit)
  folder = open_folder(spoiled)
  with pytest.raises(FolderError, match="encoder.family.*'e5'.*'fake'"):
    open_index(folder, 'dense_faiss:Flat', encoder=ENCODER)
  with pytest.raises(FolderError, match='IVF1,Flat.*--adopt'):
    open_index(folder, 'dense_faiss:IVF1,Flat', encoder=ENCODER)


@pytest.mark.parametrize('keep', [0, 60, 0.5, -1])
def test_vectors_cut_short_are_refused(spoiled, keep):
  path = spoiled / 'vectors.npy'
  whole = path.read_bytes()
  path.write_bytes(whole[: int(keep * len(whole)) if keep == 0.5 else keep])
  with pytest.raises(FolderError, match='vectors.npy'):
    open_folder(spoiled)


def test_damaged_parts_are_named(spoiled):
  path = spoiled / 'vectors.npy'
  whole = path.read_bytes()
  path.write_bytes(whole + b'0000')
  with pytest.raises(FolderError, match='4 bytes'):
    open_folder(spoiled)
  np.save(path, np.asfortranarray(np.load(path)))
  with pytest.raises(FolderError, match='C order'):
    open_folder(spoiled)
  path.unlink()
  with pytest.raises(FolderError, match='vectors.npy'):
    open_folder(spoiled)
  path.write_bytes(whole)
  store = spoiled / 'corpus.arrow'
  store.write_bytes(store.read_bytes()[:-1])
  with pytest.raises(CorpusError, match='corpus.arrow'):
    open_folder(spoiled)
  for text in ('{"format": 1', '[]', '', '\udcff'):
    (spoiled / 'manifest.json').write_text(text, errors='surrogateescape')
    with pytest.raises((ValueError, RuntimeError), match='manifest.json'):
      open_folder(spoiled)
  (spoiled / 'manifest.json').unlink()
  with pytest.raises(FolderError, match='manifest.json.*build_index'):
    open_folder(spoiled)
  with pytest.raises(FolderError, match='nowhere'):
    open_folder(spoiled / 'nowhere')
