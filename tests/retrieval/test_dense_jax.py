"""Exact search: against numpy, on one device and on eight."""

import json
import math
import re
import sys

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np
import pytest

from retrieval.index import dense_programs
from retrieval.index.dense_jax import DenseJax, trace
from retrieval.index.dense_programs import GROUP, PRECISIONS, Programs, _top
from retrieval.index.encoder import Encoder
from tests import memory
from tests.golden import encoders
from tests.retrieval.test_encoder import compiled, random_texts
from tests.retrieval.vectors import recall

pytestmark = pytest.mark.slow

TIE = 2e-6
SMALL = 4 * 512 * 64  # bytes of scores: blocks of 64 passages


def unit(x):
  return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def clustered(P, D=48, seed=0):
  """A few directions, each with many near and some equal copies."""
  rng = np.random.default_rng(seed)
  centres = unit(rng.normal(size=(max(1, P // 40), D)))
  x = centres[rng.integers(len(centres), size=P)]
  x = unit(x + rng.choice([0, 1e-7, 1e-4], (P, 1)) * rng.normal(size=(P, D)))
  return x, unit(
    centres[:9] + 0.1 * rng.normal(size=(9, D))[: len(centres[:9])]
  )


def check(index, vectors, q, k):
  """`search_vectors` against a sort of all scores; the Index contract."""
  ids, scores = index.search_vectors(q, k)
  want = q @ vectors.T
  k = min(k, len(vectors))
  assert ids.dtype == np.int64 and scores.dtype == np.float32
  assert ids.shape == scores.shape == (len(q), k)
  best = -np.sort(-want, axis=1)[:, :k]
  np.testing.assert_allclose(scores, best, atol=TIE, rtol=0)
  np.testing.assert_allclose(
    np.take_along_axis(want, ids, 1), best, atol=TIE, rtol=0
  )
  for row, score in zip(ids.tolist(), scores):
    assert len(set(row)) == k and 0 <= min(row) and max(row) < len(vectors)
    assert np.all(np.diff(score) <= 0)
    for i in np.flatnonzero(np.diff(score) == 0):
      assert row[i] < row[i + 1]
  return ids


@pytest.fixture(scope='module')
def one():
  return Mesh(np.array(jax.devices()[:1]), ('data',))


@pytest.fixture(params=[False, True], ids=['blocks', 'maxima'])
def maxima(request, monkeypatch):
  """Both ways to select; the second with few queries and rows at once."""
  monkeypatch.setattr(dense_programs, '_SCORE_BYTES', SMALL)
  monkeypatch.setattr(dense_programs, '_MAXIMA_BYTES', 1 << 15)
  monkeypatch.setattr(dense_programs, '_LOADED', 1 << 12)
  return request.param


@pytest.mark.long
@pytest.mark.parametrize('P', [1, 65, 6592])
def test_float32_is_exact(one, P, maxima, monkeypatch):
  rng = np.random.default_rng(P)
  vectors = unit(rng.normal(size=(P, 48)))
  q = unit(rng.normal(size=(9, 48)))
  for mesh, size in ((one, 1 << 24), (None, SMALL)):
    monkeypatch.setattr(dense_programs, '_SCORE_BYTES', size)
    index = DenseJax(vectors, None, mesh=mesh, maxima=maxima)
    assert len(index) == P
    for k in (3, P + 5):
      check(index, vectors, q, k)


@pytest.mark.parametrize('P', [5, 901])
def test_clusters_and_ties(P, maxima):
  vectors, q = clustered(P)
  index = DenseJax(vectors, None, maxima=maxima)
  for k in (1, 3, 100):
    check(index, vectors, q, k)


@pytest.mark.parametrize('devices', [1, 8])
def test_equal_passages_come_in_corpus_order(devices, maxima):
  rng = np.random.default_rng(0)
  vectors = unit(rng.normal(size=(300, 48)))
  twins = [3, 64, 65, 131, 255, 299]
  vectors[twins] = vectors[3]
  mesh = Mesh(np.array(jax.devices()[:devices]), ('data',))
  index = DenseJax(vectors, None, mesh=mesh, maxima=maxima)
  for k in (2, 4, 6, 20):
    ids, scores = index.search_vectors(vectors[:5], k)
    assert ids[3, :6].tolist() == twins[:k]
    assert len(set(scores[3, :6].tolist())) == 1


def test_a_shorter_list_begins_a_longer_one():
  vectors, q = clustered(700)
  index = DenseJax(vectors, None)
  long, _ = index.search_vectors(q, 8)
  for k in (1, 2, 5):
    assert np.array_equal(index.search_vectors(q, k)[0], long[:, :k])


@pytest.mark.long
def test_many_queries_and_none(maxima):
  rng = np.random.default_rng(0)
  vectors = unit(rng.normal(size=(200, 16)))
  q = unit(rng.normal(size=(1100, 16)))
  index = DenseJax(vectors, None, maxima=maxima)
  check(index, vectors, q, 4)
  assert index.search_vectors(q[:0], 4)[0].shape == (0, 4)


@pytest.mark.parametrize('columns', [64, 1024])
@pytest.mark.parametrize('c', [1, 8, 64])
def test_top_of_a_block_is_exact(columns, c):
  rng = np.random.default_rng(c)
  # Few different values: the bound between groups is met with equality.
  scores = rng.integers(0, 30, (20, columns)).astype(np.float32)
  size = columns // 2 + 7  # what follows is padding, and larger
  scores[:, size:] = 99
  found, at = map(np.asarray, _top(scores, size, c))
  c = min(c, columns)
  scores[:, size:] = -np.inf
  np.testing.assert_array_equal(found, -np.sort(-scores, axis=1)[:, :c])
  first = np.argsort(-scores, axis=1, kind='stable')[:, :c]
  valid = found > -np.inf  # in what is not, any column will do
  np.testing.assert_array_equal(np.where(valid, at, 0), first * valid)


@pytest.mark.long
@pytest.mark.parametrize('precision', ['float16', 'bfloat16', 'int8'])
def test_lower_precisions_find_nearly_all(precision, maxima):
  rng = np.random.default_rng(0)
  vectors = unit(rng.normal(size=(3000, 48)))
  vectors[5] = 0  # no scale of its own
  q = unit(rng.normal(size=(32, 48)))
  blurred = DenseJax(
    vectors, None, precision=precision, rescore=10, maxima=maxima
  )
  rescored = DenseJax(vectors, None, precision=precision, maxima=maxima)
  few, all_ = (
    recall(index.search_vectors(q, 10)[0], vectors, q)
    for index in (blurred, rescored)
  )
  assert 0.9 < few <= all_
  least = {'float16': 0.999, 'bfloat16': 0.98}
  least = least[precision] if maxima and precision in least else 1.0
  assert all_ >= least
  # What is found has its float32 score: of what is stored, or of the vectors.
  ids, scores = blurred.search_vectors(q, 10)
  if least < 1:
    vectors = np.asarray(jnp.asarray(vectors, precision), np.float32)
    check(rescored, vectors, q, 10)
  want = np.take_along_axis(q @ vectors.T, ids, 1)
  np.testing.assert_allclose(scores, want, atol=TIE, rtol=0)


def test_scores_never_exceed_their_bytes(one, monkeypatch):
  vectors = unit(np.random.default_rng(0).normal(size=(40_000, 8)))
  for score_bytes in (1 << 20, 8 << 20):
    monkeypatch.setattr(dense_programs, '_SCORE_BYTES', score_bytes)
    index = DenseJax(vectors, None, mesh=one)
    q = np.zeros((512, 8), np.float32)
    memory = (
      index._search.lower(q, index._corpus, 8).compile().memory_analysis()
    )
    # A block, what is made of it, and the best 8 of all (number, score) twice;
    # all scores would be 82 MB.
    kept = 2 * 512 * index._plan.blocks * 8 * (4 + 4)
    assert memory.temp_size_in_bytes < 2.5 * score_bytes + kept


@pytest.mark.parametrize('platform', ['cuda', 'tpu'])
@pytest.mark.parametrize('precision', PRECISIONS)
def test_an_accelerator_writes_no_scores(platform, precision, one):
  """Only maxima leave the kernel, and the host has nothing to add."""
  P, Q, D = 1 << 22, 32, 128
  plan = Programs(P, D, one, precision, platform=platform)
  assert plan.host == (precision == 'int8')
  lowered = (
    jax.jit(plan.search, static_argnums=2)
    .trace(jax.ShapeDtypeStruct((Q, D), jnp.float32), plan.arrays(), 16)
    .lower(lowering_platforms=(platform,))
    .as_text()
  )
  kernel = {'cuda': 'triton', 'tpu': 'tpu_custom_call'}[platform]
  assert kernel in lowered
  found = {
    math.prod(map(int, shape.split('x')[:-1]))
    for shape in re.findall(r'tensor<((?:\d+x)+)f32>', lowered)
  }
  found.discard(P * D)  # the corpus itself, in float32
  # Maxima of all groups, and what is scored again.
  again = Q * 16 * GROUP * D
  assert max(found) <= max(Q * P // GROUP, again) < Q * P / 16


def test_vectors_on_the_device_are_searched_as_others_are(one):
  vectors = unit(np.random.default_rng(0).normal(size=(700, 16)))
  rounded = jnp.asarray(vectors, jnp.bfloat16)
  index = DenseJax(rounded, None, mesh=one, precision='bfloat16', maxima=True)
  check(index, np.asarray(rounded, np.float32), vectors[:9], 5)


def test_float16_memory_map(tmp_path):
  vectors = unit(np.random.default_rng(0).normal(size=(100, 16)))
  np.save(tmp_path / 'vectors.npy', vectors.astype(np.float16))
  mapped = np.load(tmp_path / 'vectors.npy', mmap_mode='r')
  check(DenseJax(mapped, None), mapped.astype(np.float32), vectors[:4], 3)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
@pytest.mark.parametrize(
  'precision, share', [('float32', 1), ('bfloat16', 0.5), ('int8', 0.25)]
)
def test_loading_holds_a_block_beside_the_corpus(
  precision, share, one, tmp_path, monkeypatch
):
  monkeypatch.setattr(dense_programs, '_SCORE_BYTES', 1 << 21)
  np.save(
    tmp_path / 'v.npy',
    np.random.default_rng(0).standard_normal((60_000, 256), np.float32),
  )
  vectors = np.load(tmp_path / 'v.npy', mmap_mode='r')

  def load():
    return DenseJax(vectors, None, mesh=one, precision=precision)

  load()  # compiles
  with memory.Peak() as peak:
    index = load()
  size = share * vectors.nbytes
  assert peak.end - peak.start > 0.9 * size  # what is measured is there
  assert peak.peak - peak.start < 1.1 * size + 8e6
  del index


@pytest.fixture(scope='module')
def encoder(tmp_path_factory):
  folder = encoders.write(tmp_path_factory.mktemp('models'), 'e5-tiny-v2')
  # Each length of a query is a program.
  return Encoder(folder, query_length=24, passage_length=48)


@pytest.mark.long
def test_search_is_encoding_then_searching(encoder, one):
  texts = [
    f'{a} {b}'
    for a in 'king play won the of'.split()
    for b in 'hamlet denmark capital x1'.split()
  ]
  vectors = encoder.encode_passages(texts)
  queries = ['who is the king?', '', '\ud800', *texts]
  q = encoder.encode_queries(queries)
  for mesh in (None, one):
    index = DenseJax(vectors, encoder, mesh=mesh)
    ids, scores = index.search(queries, 5)
    want, near = index.search_vectors(q, 5)
    np.testing.assert_allclose(scores, near, atol=TIE, rtol=0)
    products = q @ vectors.T
    np.testing.assert_allclose(
      np.take_along_axis(products, ids, 1),
      np.take_along_axis(products, want, 1),
      atol=2 * TIE,
      rtol=0,
    )
    assert index.search([], 5)[0].shape == (0, 5)
  parameters = json.loads(json.dumps(index.parameters))
  assert parameters['encoder'] == encoder.parameters


def test_shapes_alone_give_the_program_of_a_search(tmp_path):
  folder = encoders.write(tmp_path, 'e5-tiny-v2')
  encoder = Encoder(folder, query_length=64, dtype='bfloat16')
  vectors = unit(np.random.default_rng(0).normal(size=(900, 32)))
  index = DenseJax(vectors, encoder)
  args = index._params, *encoder.blank(8, 64), index._corpus
  want = index._encode_and_search.trace(*args, c=16).lower().as_text()
  found = trace(index._mesh, encoder.cfg, 'e5', 900, 8, 16).lower().as_text()
  assert '8x64xi32' in found and found == want


@pytest.mark.long
def test_nothing_compiles_after_the_programs(encoder):
  rng = np.random.default_rng(0)
  vectors = unit(rng.normal(size=(900, 32)))
  index = DenseJax(vectors, encoder)
  programs = index.programs(9, (1, 3, 5, 10))
  # Those of 1 to 4 passages, and of 5 to 16.
  assert len(programs) == 2 * len(encoder.shapes(9))
  for program in programs:
    program()
  with compiled() as found:
    for count in (0, 1, 9, *rng.integers(1, 10, 20)):
      index.search(random_texts(rng, count), int(rng.integers(1, 17)))
    assert found == []
    index.search(['king'], 17)
    assert found  # the listener works


def test_wrong_arguments(encoder):
  vectors = np.eye(4, 32, dtype=np.float32)
  with pytest.raises(ValueError, match="precision='int4'.*int8"):
    DenseJax(vectors, None, precision='int4')
  with pytest.raises(ValueError, match='16 dimensions.*32'):
    DenseJax(vectors[:, :16], encoder)
  for k in (0, -1):
    with pytest.raises(ValueError, match=f'k={k}'):
      DenseJax(vectors, encoder).search(['a'], k)
