import os
import subprocess
import sys
from unittest import mock

import faiss
import numpy as np
import prometheus_client
import pytest

from retrieval import files
from retrieval.index import dense_faiss
from retrieval.index.dense_faiss import DenseFaiss, FaissError, ranked
from tests.conftest import ROOT
from tests.retrieval.vectors import (
  FakeEncoder,
  assert_exact,
  clustered,
  recall,
  unit,
)

pytestmark = pytest.mark.slow

VECTORS = clustered(1200, 16, spread=0.3)
QUERIES = unit(VECTORS[:40] + 0.1 * clustered(40, 16, seed=5))
FACTORIES = ('Flat', 'HNSW8', 'IVF16,Flat', 'IVF16,PQ4x4', 'PCA8,HNSW8')


@pytest.fixture(scope='module', autouse=True)
def one_thread():
  before = faiss.omp_get_max_threads()
  faiss.omp_set_num_threads(1)
  yield
  faiss.omp_set_num_threads(before)


def built(path, factory='Flat', vectors=VECTORS, **options):
  dense_faiss.build(vectors, factory, path, threads=1, **options)
  return path


@pytest.fixture(scope='module')
def paths(tmp_path_factory):
  folder = tmp_path_factory.mktemp('faiss')
  return {f: built(folder / f'{i}.index', f) for i, f in enumerate(FACTORIES)}


@pytest.mark.parametrize('factory', FACTORIES)
def test_build_repeats(factory, paths, tmp_path):
  # HNSW takes the vectors of a block by their level.
  block = 16384 if 'HNSW' in factory else 100
  name = paths[factory].name
  again = built(tmp_path / name, factory, train=10**6, block=block)
  assert again.read_bytes() == paths[factory].read_bytes()
  lists = {f'{name}.ivfdata'} if 'IVF' in factory else set()
  assert {p.name for p in tmp_path.iterdir()} == {name, *lists}  # no part left
  for name in lists:
    assert (tmp_path / name).read_bytes() == (
      paths[factory].with_name(name).read_bytes()
    )


def test_build_reads_a_float16_map(tmp_path):
  half = VECTORS.astype(np.float16)
  np.save(tmp_path / 'v.npy', half)
  mapped = np.load(tmp_path / 'v.npy', mmap_mode='r')
  index = DenseFaiss(built(tmp_path / 'a', vectors=mapped, block=7), None)
  assert_exact(
    index.search_vectors(QUERIES, 9), half.astype(np.float32), QUERIES, 9
  )


def test_training_sample_follows_the_seed(tmp_path):
  a, b, c = (
    built(tmp_path / 'a', 'IVF8,Flat', train=400, seed=seed).read_bytes()
    for seed in (0, 0, 1)
  )
  assert a == b != c


def test_build_keeps_the_number_of_threads(tmp_path):
  dense_faiss.build(VECTORS, 'Flat', tmp_path / 'a', threads=2)
  assert faiss.omp_get_max_threads() == 1


@pytest.mark.parametrize('value', [np.nan, np.inf])
def test_a_failed_build_leaves_what_was_there(value, tmp_path):
  path = built(tmp_path / 'a')
  before = path.read_bytes()
  bad = VECTORS.copy()
  bad[777, 3] = value
  with pytest.raises(ValueError, match='row 777'):
    built(path, vectors=bad, block=100)
  assert path.read_bytes() == before
  assert [p.name for p in tmp_path.iterdir()] == ['a']


@pytest.mark.parametrize(
  'factory, vectors, words',
  [
    ('Flatt', VECTORS, "factory='Flatt'"),
    ('IVF16,PQ5', VECTORS, "factory='IVF16,PQ5'"),  # 5 does not divide 16
    ('IVF4000,Flat', VECTORS, '1200 vectors'),
    ('IDMap,Flat', VECTORS, "factory='IDMap,Flat'"),
  ],
)
def test_build_refuses(factory, vectors, words, tmp_path):
  with pytest.raises(ValueError, match=words):
    built(tmp_path / 'a', factory, vectors)
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('factory', FACTORIES[:3])
def test_a_place_that_takes_no_file(factory, tmp_path):
  for folder in ('absent', 'file'):
    (tmp_path / 'file').write_text('not a folder')
    with pytest.raises(files.FilesError, match='/a: '):
      built(tmp_path / folder / 'a', factory)
  assert [p.name for p in tmp_path.iterdir()] == ['file']


def test_fewer_than_k_in_the_lists_visited(paths):
  index = DenseFaiss(paths['IVF16,Flat'], None, nprobe=1)
  ids, scores = index.search_vectors(QUERIES, 1000)
  ends = (ids < 0).argmax(1)
  assert (ids[:, -1] == -1).all() and (ends > 1).all()
  for row, end in enumerate(ends):
    assert (ids[row, :end] >= 0).all() and (ids[row, end:] == -1).all()
    assert np.isfinite(scores[row, :end]).all()
    assert (scores[row, end:] == -np.inf).all()


def test_options_are_used_and_told(paths):
  found = {}
  for nprobe in (1, 16):
    index = DenseFaiss(paths['IVF16,Flat'], None, nprobe=nprobe)
    assert index.parameters['nprobe'] == nprobe
    assert index.parameters['ef_search'] is None
    found[nprobe] = recall(
      index.search_vectors(QUERIES, 10)[0], VECTORS, QUERIES
    )
  assert found[1] < 0.95 < found[16] == 1
  for ef in (1, 200):
    index = DenseFaiss(paths['HNSW8'], None, ef_search=ef)
    assert index.parameters['ef_search'] == ef
    found[ef] = recall(index.search_vectors(QUERIES, 1)[0], VECTORS, QUERIES)
  assert found[1] < found[200]
  assert DenseFaiss(paths['IVF16,Flat'], None).parameters['nprobe'] == 4
  assert DenseFaiss(paths['HNSW8'], None).parameters['ef_search'] == 64
  # Below a transform too.
  index = DenseFaiss(paths['PCA8,HNSW8'], None, ef_search=33)
  assert index.parameters['ef_search'] == 33


@pytest.mark.parametrize(
  'factory, option, words',
  [
    ('Flat', dict(nprobe=4), 'nprobe=4'),
    ('HNSW8', dict(nprobe=4), 'nprobe=4'),
    ('IVF16,PQ4x4', dict(ef_search=4), 'ef_search=4'),
  ],
)
def test_unsuited_options(factory, option, words, paths):
  with pytest.raises(FaissError, match=words):
    DenseFaiss(paths[factory], None, **option)


def test_parameters_tell_indexes_apart(paths, tmp_path):
  def sample(path):
    return DenseFaiss(path, None).parameters['sample_sha256']

  assert len({sample(path) for path in paths.values()}) == len(paths)
  moved = VECTORS.copy()
  moved[0] = -moved[0]
  assert sample(built(tmp_path / 'a')) == sample(paths['Flat'])
  assert sample(built(tmp_path / 'b', vectors=moved)) != sample(paths['Flat'])
  parameters = DenseFaiss(paths['Flat'], FakeEncoder(16)).parameters
  assert parameters['encoder'] == {'family': 'fake', 'dim': 16}
  assert parameters['query_length'] == 256


@pytest.mark.parametrize('factory', FACTORIES[:4])
@pytest.mark.parametrize('left', [0, 1, 5, 60, 0.3, 0.7, -9])
def test_cut_short(factory, left, paths, tmp_path):
  whole = paths[factory].read_bytes()
  size = left if isinstance(left, int) else int(left * len(whole))
  (tmp_path / 'a').write_bytes(whole[:size])
  with pytest.raises(FaissError, match='/a: '):
    DenseFaiss(tmp_path / 'a', None)


def test_no_index_of_ours(paths, tmp_path):
  def refuses(words, encoder=None):
    with pytest.raises(ValueError, match=words) as error:
      DenseFaiss(tmp_path / 'a', encoder)
    assert '\x1b' not in str(error.value)

  refuses('No such file')
  (tmp_path / 'a').write_bytes(b'\x1b[31mnot an index' * 100)
  refuses('no FAISS index')
  faiss.write_index(faiss.IndexFlatL2(16), str(tmp_path / 'a'))
  refuses('inner product')
  (tmp_path / 'a').write_bytes(paths['Flat'].read_bytes())
  refuses('16 dimensions.*32', FakeEncoder(32))
  (tmp_path / 'a').unlink()
  (tmp_path / 'a').mkdir()
  refuses('no FAISS index')


@pytest.mark.parametrize('twins', [2, 30, 1000])
@pytest.mark.parametrize('factory', ['Flat', 'IVF4,Flat'])
def test_ties_at_the_cut_come_in_corpus_order(factory, twins, tmp_path):
  vectors = VECTORS.copy()
  where = np.sort(np.random.default_rng(0).permutation(1200)[:twins])
  vectors[where] = vectors[where[0]]
  index = DenseFaiss(
    built(tmp_path / 'a', factory, vectors),
    None,
    nprobe=4 if 'IVF' in factory else None,
  )
  for k in (1, 2, 7):
    q = vectors[where[:1]]
    ids, _ = index.search_vectors(np.concatenate([q, QUERIES[5:9]]), k)
    assert ids[0].tolist()[:twins] == where[:k].tolist()


def test_ties_beyond_reach_are_still_valid(tmp_path):
  same = np.tile(VECTORS[:1], (3000, 1))
  index = DenseFaiss(built(tmp_path / 'a', vectors=same), None)
  ids, scores = index.search_vectors(VECTORS[:1], 5)
  assert len(set(ids[0].tolist())) == 5 and (np.diff(ids[0]) > 0).all()
  assert len(set(scores[0].tolist())) == 1


def test_ranked_asks_again_only_where_a_tie_goes_on():
  scores = np.array([[3, 2, 2, 2, 2, 2, 1, 0], [8, 7, 6, 5, 4, 3, 2, 1]])
  asked = []

  def ask(q, n):
    asked.append((q[:, 0].tolist(), n))
    # As libraries do: the last of equal ones first.
    order = np.argsort(-scores[q[:, 0]], axis=1, kind='stable')
    order[:, 1:6] = order[:, 5:0:-1] if len(q) == 1 else order[:, 1:6]
    ids = order[:, :n]
    return ids, np.take_along_axis(scores[q[:, 0]], ids, 1)

  ids, _ = ranked(ask, np.array([[0], [1]]), 3, spare=1, most=8)
  assert asked == [([0, 1], 4), ([0], 8)]
  assert ids.tolist() == [[0, 1, 2], [0, 1, 2]]


def test_hnsw_finds_the_same_for_any_k_within_its_width(paths):
  index = DenseFaiss(paths['HNSW8'], None, ef_search=20)
  ids, _ = index.search_vectors(QUERIES, 20)
  for k in (1, 5, 19):
    np.testing.assert_array_equal(
      index.search_vectors(QUERIES, k)[0], ids[:, :k]
    )


def test_no_gpu(paths):
  if faiss.get_num_gpus():
    pytest.skip('there is one')
  with pytest.raises(FaissError, match='gpu=True'):
    DenseFaiss(paths['Flat'], None, gpu=True)


def test_what_goes_to_the_gpus(paths, monkeypatch):
  # The calls that a GPU build of FAISS documents; none is at hand.
  class Options:
    useFloat16 = shard = False

  def to_all(index, co):
    assert co.useFloat16 and co.shard
    if hasattr(index, 'hnsw'):
      raise RuntimeError('Error in x: Error: not implemented on GPU')
    return index

  monkeypatch.setattr(faiss, 'get_num_gpus', lambda: 2)
  for name, value in (
    ('GpuMultipleClonerOptions', Options),
    ('index_cpu_to_all_gpus', to_all),
  ):
    monkeypatch.setattr(faiss, name, value, raising=False)
  index = DenseFaiss(paths['IVF16,Flat'], None, nprobe=16, gpu=True)
  assert index.parameters['gpu'] is True
  assert_exact(index.search_vectors(QUERIES, 5), VECTORS, QUERIES, 5)
  with pytest.raises(FaissError, match='GPU.*HNSW'):
    DenseFaiss(paths['HNSW8'], None, gpu=True)


def test_stages_are_timed(paths):
  def count():
    return (
      prometheus_client.REGISTRY.get_sample_value(
        'retrieval_stage_seconds_count', {'stage': 'search'}
      )
      or 0
    )

  before = count()
  DenseFaiss(paths['Flat'], FakeEncoder(16)).search(['a'], 2)
  assert count() == before + 1


@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
@pytest.mark.parametrize('factory', ['Flat', 'HNSW4', 'IVF4,Flat'])
def test_opened_as_a_memory_map(factory, tmp_path):
  vectors = clustered(20000 if factory != 'HNSW4' else 6000, 256)
  path = built(tmp_path / 'a', factory, vectors, train=200)
  code = f"""
from retrieval.index.dense_faiss import DenseFaiss
def kb():
  lines = open('/proc/self/status').read().splitlines()
  return int([x for x in lines if x.startswith('RssAnon')][0].split()[1])
before = kb()
index = DenseFaiss({str(path)!r}, None)
print(kb() - before)
"""
  grown = subprocess.run(
    [sys.executable, '-c', code],
    cwd=ROOT,
    check=True,
    capture_output=True,
    text=True,
  ).stdout
  size = sum(part.stat().st_size for part in tmp_path.iterdir())
  assert int(grown) * 1024 < 0.5 * size


@pytest.mark.skipif(sys.platform != 'linux', reason='of GNU OpenMP')
@pytest.mark.parametrize('given, spins', [(None, '0'), ('active', '300000000')])
def test_threads_of_faiss_wait_without_spinning_unless_told(given, spins):
  env = {k: v for k, v in os.environ.items() if k != 'OMP_WAIT_POLICY'}
  env |= {'OMP_DISPLAY_ENV': 'verbose'} | (
    {'OMP_WAIT_POLICY': given} if given else {}
  )
  done = subprocess.run(
    [sys.executable, '-c', 'import retrieval.index.dense_faiss'],
    cwd=ROOT,
    env=env,
    capture_output=True,
    text=True,
    check=True,
  )
  found = done.stderr.split("GOMP_SPINCOUNT = '")[1].partition("'")[0]
  assert found.startswith(spins)


def test_what_a_search_of_faiss_says_names_the_file(paths):
  index = DenseFaiss(paths['Flat'], None)
  said = "Error in x at y.cpp:1: Error: 'k > 0' failed: too many"
  index._index = mock.Mock(
    ntotal=9, search=mock.Mock(side_effect=[RuntimeError(said)])
  )
  with pytest.raises(FaissError) as error:
    index.search_vectors(QUERIES, 3)
  assert f'{paths["Flat"]}: ' in str(error.value)
  assert 'too many' in str(error.value) and '.cpp' not in str(error.value)
