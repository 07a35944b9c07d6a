import errno
import types

import faiss
import numpy as np
import pytest

from retrieval import files
from retrieval.index import vectors
from retrieval.index.adopt import AdoptError, compare
from retrieval.index.folder import open_folder, open_index
from retrieval.index.store import open_store
from retrieval.index.vectors import VectorsError
from tests import memory
from tests.retrieval.conftest import write_corpus
from tests.retrieval.fakes import FakeEncoder, generate
from tests.retrieval.test_build_index import build, fake, manifest

pytestmark = pytest.mark.slow

__all__ = ['fake']  # an autouse fixture
COUNT, DIM = 600, 32
_INNER = faiss.METRIC_INNER_PRODUCT


@pytest.fixture(scope='module')
def source(tmp_path_factory):
  path = tmp_path_factory.mktemp('source') / 'corpus.jsonl'
  return str(write_corpus(path, generate(COUNT)))


def encode(source, **settings):
  """The vectors of the corpus [P, D], by these settings."""
  texts = [f'"{title}"\n{text}' for _, title, text in generate(COUNT)]
  return FakeEncoder(**settings).encode_passages(texts).astype(np.float32)


@pytest.fixture(scope='module')
def right(source):
  return encode(source)


def write_faiss(path, x, factory, metric=faiss.METRIC_INNER_PRODUCT):
  faiss.omp_set_num_threads(1)
  index = faiss.index_factory(x.shape[1], factory, metric)
  if hasattr(index, 'pq'):
    index.pq.cp.niter = 2
  index.train(x)
  index.add(x)
  faiss.write_index(index, str(path))
  return str(path)


def write_ids(path, x, ids):
  index = faiss.index_factory(x.shape[1], 'IVF8,Flat', _INNER)
  index.train(x)
  index.add_with_ids(x, ids)
  faiss.write_index(index, str(path))
  return str(path)


@pytest.mark.parametrize(
  'ids, said',
  [
    (np.arange(COUNT) + 1, 'from 1 to 600.'),
    (np.arange(COUNT) // 2, '300 different ids, from 0 to 299.'),
    (np.arange(COUNT) * 2**40, '600 different ids, from 0'),
  ],
)
def test_ids_that_are_no_positions(source, right, tmp_path, ids, said):
  said_of = refused(tmp_path, source, write_ids(tmp_path / 'their', right, ids))
  assert f'{tmp_path}/their: ' in said_of and said in said_of
  assert '0 to 599' in said_of


def write_raw(path, x):
  x.tofile(path)
  return str(path)


def take(tmp_path, source, *paths, **given):
  return build(
    tmp_path / 'x', corpus=source, adopt=[str(p) for p in paths], **given
  )


def refused(tmp_path, source, path, **given):
  with pytest.raises(AdoptError) as error:
    take(tmp_path, source, path, **given)
  assert not (tmp_path / 'x/vectors.npy').exists()
  assert not (tmp_path / 'x/manifest.json').exists()
  return str(error.value)


@pytest.mark.parametrize(
  'factory, name',
  [('Flat', 'Flat'), ('HNSW8', 'HNSW8'), ('IVF8,Flat', 'IVF8,Flat')],
)
def test_faiss_index(source, right, tmp_path, capsys, factory, name):
  path = write_faiss(tmp_path / 'e5.index', right, factory)
  take(tmp_path, source, path, index=['dense_jax'])
  out = capsys.readouterr().out
  assert f'FAISS {name}, 600 x 32' in out and 'cosine median 1.0000' in out
  found = vectors.open_vectors(tmp_path / 'x')
  np.testing.assert_allclose(found, right, atol=1e-6)
  about = manifest(tmp_path / 'x')
  assert about['vectors'] == {
    'dim': DIM,
    'dtype': 'float32',
    'encoder': FakeEncoder().parameters,
    'sample_sha256': files.sample_sha256(tmp_path / 'x/vectors.npy'),
  }
  assert list(about['indexes']) == [f'dense_faiss:{name}', 'dense_jax']
  # Only the sample was encoded, and nothing of it again later.
  assert FakeEncoder.encoded == 64
  build(tmp_path / 'x', index=['bm25', 'dense_jax'])
  assert FakeEncoder.encoded == 64
  linked = next((tmp_path / 'x/faiss').iterdir())
  assert linked.samefile(path)
  # FAISS's own defaults are 1 list, and 16.
  searched = {'HNSW8': {'ef_search': 64}, 'IVF8,Flat': {'nprobe': 3}}
  stated = about['indexes'][f'dense_faiss:{name}']
  encoder = types.SimpleNamespace(
    dim=DIM, dtype='float32', query_length=9, parameters=stated['encoder']
  )
  for option, value in searched.get(name, {}).items():
    assert stated[option] == value
    folder = open_folder(tmp_path / 'x')
    folder.manifest['indexes'][f'dense_faiss:{name}'][option] = 5
    for given, used in (({}, 5), ({option: 7}, 7)):
      index = open_index(
        folder, f'dense_faiss:{name}', encoder=encoder, **given
      )
      assert index.parameters[option] == used


def test_an_index_of_this_folder_keeps_its_lists(source, tmp_path):
  build(tmp_path / 'x', corpus=source, index=['dense_faiss:IVF8,Flat'])
  there = tmp_path / 'x/faiss'
  before = {path.name: path.read_bytes() for path in there.iterdir()}
  assert len(before) == 2  # the lists are a file of their own
  take(tmp_path, source, there / 'IVF8_Flat.index')
  after = {path.name: path.read_bytes() for path in there.iterdir()}
  assert after == before


@pytest.mark.long
def test_lossy_index_gives_no_vectors(source, right, tmp_path):
  path = write_faiss(tmp_path / 'pq.index', right, 'IVF4,PQ16x4')
  take(tmp_path, source, path)
  about = manifest(tmp_path / 'x')
  assert about['vectors'] is None
  encoder = about['indexes']['dense_faiss:IVF4,PQ16x4']['encoder']
  assert encoder == FakeEncoder().parameters


@pytest.mark.parametrize('dtype', ['float32', 'float16'])
@pytest.mark.parametrize('form', ['memmap', 'npy'])
def test_saved_embeddings(source, right, tmp_path, form, dtype):
  path, x = tmp_path / f'emb_e5.{form}', right.astype(dtype)
  write_raw(path, x) if form == 'memmap' else np.save(path, x)
  take(tmp_path, source, path)
  found = vectors.open_vectors(tmp_path / 'x')
  assert found.dtype == dtype
  np.testing.assert_array_equal(found, x)
  if form == 'npy':
    assert (tmp_path / 'x/vectors.npy').samefile(path)
  build(tmp_path / 'x', index=['dense_jax'], vectors=dtype)
  assert FakeEncoder.encoded == 64


def test_other_number_format(source, right, tmp_path):
  path = write_faiss(tmp_path / 'e5.index', right, 'Flat')
  take(tmp_path, source, path, vectors='float16')
  found = vectors.open_vectors(tmp_path / 'x')
  np.testing.assert_array_equal(found, right.astype(np.float16))
  np.save(tmp_path / 'f.npy', np.asfortranarray(right))
  take(tmp_path / 'y', source, tmp_path / 'f.npy')
  np.testing.assert_array_equal(vectors.open_vectors(tmp_path / 'y/x'), right)


@pytest.mark.parametrize('form', ['index', 'memmap'])
def test_parts_are_joined(source, right, tmp_path, form):
  whole = tmp_path / 'whole'
  if form == 'index':
    write_faiss(whole, right, 'Flat')
  else:
    write_raw(whole, right)
  data = whole.read_bytes()
  parts = [tmp_path / 'part_aa', tmp_path / 'part_ab', tmp_path / 'part_ac']
  for i, part in enumerate(parts):
    part.write_bytes(data[i * 30_000 : (i + 1) * 30_000])
  take(tmp_path, source, *parts)
  np.testing.assert_array_equal(vectors.open_vectors(tmp_path / 'x'), right)
  assert not list((tmp_path / 'x').glob('adopted*'))
  if form == 'index':
    assert (tmp_path / 'x/faiss/Flat.index').read_bytes() == data
  said = refused(tmp_path / 'other', source, parts[0])
  assert 'each part' in said


def test_parts_in_the_wrong_order_can_be_given_again(source, right, tmp_path):
  data = right.tobytes()
  parts = [tmp_path / 'part_aa', tmp_path / 'part_ab']
  for part, half in zip(parts, (data[:38400], data[38400:]), strict=True):
    part.write_bytes(half)
  with pytest.raises(AdoptError, match='another order'):
    take(tmp_path, source, *reversed(parts))
  take(tmp_path, source, *parts)
  np.testing.assert_array_equal(vectors.open_vectors(tmp_path / 'x'), right)


def test_vectors_of_another_encoder_are_not_overwritten(
  source, right, tmp_path
):
  build(tmp_path / 'x', corpus=source, index=['dense_faiss:Flat'])
  other = encode(source, path='other')
  np.save(tmp_path / 'other.npy', other)
  with pytest.raises(VectorsError, match='something else'):
    take(tmp_path, source, tmp_path / 'other.npy', encoder='other')
  np.testing.assert_array_equal(vectors.open_vectors(tmp_path / 'x'), right)


def test_across_disks_it_is_copied(source, right, tmp_path, monkeypatch):
  def link(*args):
    raise OSError(errno.EXDEV, 'cross-device')

  monkeypatch.setattr(files.os, 'link', link)
  path = write_faiss(tmp_path / 'e5.index', right, 'Flat')
  take(tmp_path, source, path)
  copied = tmp_path / 'x/faiss/Flat.index'
  assert copied.read_bytes() == open(path, 'rb').read()
  assert not copied.samefile(path)


@pytest.mark.parametrize(
  'move, said',
  [
    (lambda x: np.roll(x, 1, axis=0), 'in row'),
    (lambda x: np.roll(x, -1, axis=0), 'in row'),
    (lambda x: np.random.default_rng(1).permutation(x), 'in row'),
    (lambda x: x * 3, '--[no]normalise'),
    (
      lambda x: np.random.default_rng(1).normal(size=x.shape).astype('f4'),
      'another model',
    ),
  ],
)
@pytest.mark.parametrize('form', ['index', 'memmap'])
def test_misplaced_rows_are_named(source, right, tmp_path, move, said, form):
  x = move(right)
  write = (
    write_raw
    if form == 'memmap'
    else (lambda path, x: write_faiss(path, x, 'Flat'))
  )
  found = refused(tmp_path, source, write(tmp_path / 'e5', x))
  assert said in found and 'cosine median' in found


@pytest.mark.parametrize(
  'made, given, said',
  [
    (dict(passage_prefix=''), {}, "--passage_prefix=''"),
    (dict(passage_prefix='query: '), {}, "--passage_prefix='query: '"),
    (dict(pooling='cls'), {}, "--pooling='cls'"),
    (dict(path='other'), {}, 'another model'),
  ],
)
def test_wrong_settings_are_named(source, tmp_path, made, given, said):
  path = write_raw(tmp_path / 'emb.memmap', encode(source, **made))
  assert said in refused(tmp_path, source, path, **given)
  if 'path' not in made:  # and what it advises works
    take(tmp_path / 'again', source, path, **made)


@pytest.mark.parametrize(
  'form, said',
  [
    ('fewer', '599 vectors'),
    ('narrow', '16 dimensions'),
    ('L2', 'metric 1'),
    ('raw fewer', '76800'),
    ('cut', '76800'),
    ('empty', '76800'),
    ('junk', '76800'),
    ('npy cut', 'emb'),
    ('npy int', 'holds int64'),
    ('npy object', 'emb'),
    ('npy 1d', '(19200,)'),
    ('SQ', 'IndexScalarQuantizer'),
  ],
)
def test_wrong_files(source, right, tmp_path, form, said):
  path = tmp_path / 'emb'
  if form in ('fewer', 'narrow', 'L2', 'cut', 'SQ'):
    x = {'fewer': right[:-1], 'narrow': right[:, :16].copy()}.get(form, right)
    metric = faiss.METRIC_L2 if form == 'L2' else faiss.METRIC_INNER_PRODUCT
    write_faiss(path, x, 'SQfp16' if form == 'SQ' else 'Flat', metric)
    if form == 'cut':
      path.write_bytes(path.read_bytes()[:50_000])
  elif form == 'raw fewer':
    write_raw(path, right[:-1])
  elif form.startswith('npy'):
    x = {
      'npy int': np.zeros((COUNT, DIM), int),
      'npy 1d': right.ravel(),
      'npy object': np.array([{}]),
    }.get(form, right)
    with open(path, 'wb') as file:
      np.save(file, x, allow_pickle=True)
    if form == 'npy cut':
      path.write_bytes(path.read_bytes()[:50_000])
  else:
    path.write_bytes(b'x' * 1000 if form == 'junk' else b'')
  assert said in refused(tmp_path, source, path)


def test_rows_that_are_no_numbers(source, right, tmp_path):
  x = right.copy()
  x[377, 3] = np.inf
  with pytest.raises(VectorsError, match='vector 377'):
    take(tmp_path, source, write_raw(tmp_path / 'emb', x), sample=8)


def test_few_passages_cut_elsewhere_are_tolerated(right):
  x = right[:64].copy()
  x[:5] = np.roll(x[:5], 1, axis=1) * 0.5 + x[:5]
  assert compare(right[:64], right[:64] + 1e-5).passes(True)
  x[:5] /= np.linalg.norm(x[:5], axis=1, keepdims=True)
  fit = compare(x, right[:64])
  assert fit.cosines.min() < 0.99 and fit.passes(True)
  x[:8] = -x[:8]
  assert not compare(x, right[:64]).passes(True)


def test_memory_is_constant(source, tmp_path, monkeypatch):
  from retrieval.index import adopt

  monkeypatch.setattr(adopt, '_BLOCK', 1024)
  path, dim = tmp_path / 'big', 256
  rows = np.random.default_rng(0).random((60_000, dim), np.float32)
  write_faiss(path, rows, 'Flat')
  del rows
  stored = adopt.open_stored(path, 60_000, dim)
  with memory.Peak() as peak:
    stored = adopt.open_stored(path, 60_000, dim)
    about = {'dtype': 'float32'}
    vectors.write(stored.blocks(), stored.shape, about, tmp_path)
  assert peak.peak - peak.start < 30e6  # of 61 MB; other threads use some


def test_corpus_that_changed_is_refused_first(source, right, tmp_path):
  path = write_raw(tmp_path / 'emb', right)
  take(tmp_path, source, path)
  assert len(open_store(tmp_path / 'x/corpus.arrow')) == COUNT
  with pytest.raises(VectorsError, match="encoder.pooling .*'mean'"):
    build(tmp_path / 'x', index=['dense_jax'], pooling='cls')
