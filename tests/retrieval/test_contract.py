"""One contract, every index: see `retrieval.core.Index`."""

import functools
import json

import faiss
import numpy as np
import pytest

from retrieval.core import LocalSearcher
from retrieval.index import dense_faiss, milvus
from retrieval.index.bm25 import BM25Index
from retrieval.index.dense_jax import DenseJax
from retrieval.index.hybrid import Hybrid
from retrieval.index.rerank import Rerank
from tests.retrieval.vectors import (
  FakeCrossEncoder,
  FakeEncoder,
  assert_exact,
  clustered,
  recall,
  unit,
)

pytestmark = pytest.mark.slow

P = 2000
TWINS = (7, 50, 51, 300, 1999)  # the same text


def _texts():
  rng = np.random.default_rng(0)
  texts = [' '.join(f'w{w}' for w in rng.zipf(1.3, 12) % 400) for _ in range(P)]
  for twin in TWINS:
    texts[twin] = 'twin of five w1 w2'
  return texts


TEXTS = _texts()
QUERIES = [
  *(' '.join(text.split()[:4]) for text in TEXTS[100:130]),
  'twin of five w1 w2',
  'w1',
  'w399 nowhere',
]
ODD = {
  'empty': '',
  'blank': ' \n\t',
  'unknown': 'zzzz',
  'surrogate': 'w1 \ud800 w2',
  'nul': 'w1\x00w2',
  'emoji': 'w1 \U0001f9d1\u200d\U0001f680',
  'rtl': 'שלום w3',
  'token': '[CLS] w1 [SEP] </search> <|im_end|>',
  'long': 'w1 w2 ' * 17000,
  'escape': '\x1b[31mw1',
  'combining': 'w1' + '\u0301' * 2000,
}
ENCODER = FakeEncoder()
VECTORS = ENCODER.encode_passages(TEXTS)


@pytest.fixture(scope='module', autouse=True)
def one_thread():
  """FAISS' threads wait for each other by turning round: slow if shared."""
  before = faiss.omp_get_max_threads()
  faiss.omp_set_num_threads(1)
  yield
  faiss.omp_set_num_threads(before)


def _bm25(folder):
  return BM25Index(TEXTS)


def _bm25_folder(folder):
  if not folder.exists():
    BM25Index.build(TEXTS, folder)
  return BM25Index.open(folder)


def _faiss(factory, folder, **options):
  folder.mkdir(exist_ok=True)
  path = folder / 'a.index'
  if not path.exists():
    dense_faiss.build(VECTORS, factory, path, threads=1)
  return dense_faiss.DenseFaiss(path, ENCODER, **options)


def _milvus(url):
  milvus.build(VECTORS, url, 'contract')  # nothing where it is there
  return milvus.Milvus(url, 'contract', ENCODER)


def _hybrid(folder):
  return Hybrid([_bm25(folder), _faiss('HNSW32', folder)], depth=80)


def _rerank(folder):
  return Rerank(_bm25(folder), TEXTS, FakeCrossEncoder(), 50)


MAKERS = {
  'bm25': _bm25,
  'bm25_folder': _bm25_folder,
  'faiss_flat': functools.partial(_faiss, 'Flat'),
  'faiss_hnsw': functools.partial(_faiss, 'HNSW32'),
  'faiss_ivf': functools.partial(_faiss, 'IVF16,Flat', nprobe=8),
  'faiss_ivfpq': functools.partial(_faiss, 'IVF16,PQ8', nprobe=8),
  'milvus': _milvus,
  'dense_jax': lambda folder: DenseJax(VECTORS, ENCODER),
  'dense_jax_int8': lambda folder: DenseJax(VECTORS, ENCODER, precision='int8'),
  'hybrid': _hybrid,
  'rerank': _rerank,
}
# Recall@10 that each must reach over the vectors, where chance finds 0.005;
# 1: exact, so that scores are compared instead.
DENSE = {
  'faiss_flat': 1,
  'dense_jax': 1,
  'milvus': 1,
  'faiss_hnsw': 0.97,
  'faiss_ivf': 0.9,
  'faiss_ivfpq': 0.5,
  'dense_jax_int8': 0.98,
}
EXACT = ('bm25', 'bm25_folder', *(n for n, bar in DENSE.items() if bar == 1))


@pytest.fixture(scope='module')
def make(tmp_path_factory, milvus_url):
  """Opens an index by name, a new instance for each call."""
  root = tmp_path_factory.mktemp('indexes')
  return lambda name: MAKERS[name](
    milvus_url if name == 'milvus' else root / name
  )


@pytest.fixture(scope='module', params=MAKERS)
def kind(request):
  return request.param


@pytest.fixture(scope='module')
def index(kind, make):
  return make(kind)


def check(found, queries, k):
  """What holds for every answer."""
  ids, scores = found
  assert ids.shape == scores.shape == (queries, min(k, P))
  assert ids.dtype == np.int64 and scores.dtype == np.float32
  for row, score in zip(ids.tolist(), scores.tolist()):
    n = sum(i >= 0 for i in row)
    assert row[n:] == [-1] * (len(row) - n), '-1 only at the end'
    assert all(s == -np.inf for s in score[n:])
    assert len(set(row[:n])) == n and all(i < P for i in row)
    assert np.isfinite(score[:n]).all()
    for a, b in zip(range(n), range(1, n)):
      assert (-score[a], row[a]) < (-score[b], row[b]), 'best first, ties too'


def same(a, b, within=2e-6):
  """Equal up to float noise: only what is as good as the last may differ."""
  np.testing.assert_allclose(a[1], b[1], rtol=0, atol=within)
  for ids_a, scores_a, ids_b, scores_b in zip(*a, *b):
    x, y = (
      {i: s for i, s in zip(ids.tolist(), scores.tolist()) if i >= 0}
      for ids, scores in ((ids_a, scores_a), (ids_b, scores_b))
    )
    for i in {*x, *y}:
      if i in x and i in y:
        assert abs(x[i] - y[i]) <= within
      else:
        assert x.get(i, y.get(i)) <= min(x.values()) + 2 * within


def test_length(index):
  assert len(index) == P


@pytest.mark.parametrize('k', [1, 3, 100, P - 1, 10**9])
def test_shapes_and_order(index, k):
  queries = QUERIES if k <= 100 else QUERIES[-2:]
  check(index.search(queries, k), len(queries), k)


@pytest.mark.parametrize('k', [0, -1, -(10**9)])
def test_k_below_one(index, k):
  with pytest.raises(ValueError, match=f'k={k}'):
    index.search(['w1'], k)


def test_no_queries(index):
  ids, scores = index.search([], 5)
  assert ids.shape == scores.shape == (0, 5)


def test_odd_queries(index):
  together = index.search(list(ODD.values()), 5)
  check(together, len(ODD), 5)
  for row, query in enumerate(ODD.values()):
    same([x[row : row + 1] for x in together], index.search([query], 5))


def test_duplicates_in_a_batch(index):
  ids, scores = index.search(['w1', 'twin of five w1 w2', 'w1'], 10)
  same((ids[:1], scores[:1]), (ids[2:], scores[2:]))


def test_answers_do_not_depend_on_company(index):
  together = index.search(QUERIES, 10)
  for row, query in enumerate(QUERIES):
    same([x[row : row + 1] for x in together], index.search([query], 10))
  turned = index.search(QUERIES[::-1], 10)
  same(together, [x[::-1] for x in turned])


def test_short_list_begins_the_long_one(index):
  few, many = index.search(QUERIES[:9], 3), index.search(QUERIES[:9], 50)
  same(few, [x[:, :3] for x in many])


def test_repeats(index):
  first, again = (index.search(QUERIES, 20) for _ in range(2))
  for a, b in zip(first, again):
    np.testing.assert_array_equal(a, b)


def test_instances_agree(kind, index, make):
  other = make(kind)
  assert json.loads(json.dumps(dict(index.parameters))) == other.parameters
  assert index.parameters['name'] == index.name
  for a, b in zip(index.search(QUERIES, 9), other.search(QUERIES, 9)):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize('exact', EXACT)
@pytest.mark.parametrize('k', [1, 2, 3, 5])
def test_twins_in_corpus_order(make, exact, k):
  index = make(exact)
  ids, scores = index.search(['twin of five w1 w2'], k)
  assert ids.tolist() == [list(TWINS[:k])]
  assert len(set(scores[0].tolist())) == 1


@pytest.mark.parametrize('dense', DENSE)
@pytest.mark.parametrize('queries', [1, 64])
def test_recall(make, dense, queries):
  q = unit(VECTORS[:queries] + 0.1 * clustered(queries, ENCODER.dim, seed=3))
  found = make(dense).search_vectors(q, 10)
  if DENSE[dense] == 1:
    assert_exact(found, VECTORS, q, 10)
  elif queries > 1:
    assert recall(found[0], VECTORS, q) >= DENSE[dense]


@pytest.mark.parametrize('dense', [n for n, bar in DENSE.items() if bar == 1])
def test_clustered_vectors_are_told_apart(dense, tmp_path, milvus_url):
  vectors = clustered(1500, 24, spread=1e-3)
  q = clustered(40, 24, spread=1e-3, seed=0)
  if dense == 'faiss_flat':
    dense_faiss.build(vectors, 'Flat', tmp_path / 'a.index')
    index = dense_faiss.DenseFaiss(tmp_path / 'a.index', None)
  elif dense == 'milvus':
    milvus.build(vectors, milvus_url, 'clustered')
    index = milvus.Milvus(milvus_url, 'clustered', None)
  else:
    index = DenseJax(vectors, None)
  assert_exact(index.search_vectors(q, 20), vectors, q, 20)


def test_a_searcher_takes_it(index, corpus):
  with pytest.raises(ValueError, match=f'{P} passages'):
    LocalSearcher(corpus, index)
