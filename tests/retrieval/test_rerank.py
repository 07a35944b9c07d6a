"""The cross-encoder against committed values, and what it orders."""

import json

import jax
import numpy as np
import pytest
import safetensors.numpy

from retrieval.index.rerank import CrossEncoder, Rerank
from tests.conftest import ROOT
from tests.golden import encoders
from tests.retrieval.test_encoder import compiled, random_texts

pytestmark = pytest.mark.slow


class Fixed:
  """An index that ranks as it is told."""

  name = 'fixed'
  parameters = {'name': 'fixed'}

  def __init__(self, ids, size):
    self.ids, self.size = np.array(ids, np.int64), size

  def __len__(self):
    return self.size

  def search(self, queries, k):
    ids = self.ids[: len(queries), : min(k, self.size)]
    scores = -np.arange(ids.shape[1], dtype=np.float32) + np.zeros(ids.shape)
    return ids, np.where(ids < 0, -np.inf, scores).astype(np.float32)


class Lengths:
  """Scores a pair by a rule that knows query from passage."""

  parameters = {'name': 'lengths'}

  def score(self, pairs):
    self.pairs = list(pairs)
    return np.array(
      [d.count(q) * 10 - len(d) / 100 for q, d in pairs], np.float32
    )


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return encoders.write(tmp_path_factory.mktemp('models'), encoders.RERANKER)


@pytest.fixture(scope='module')
def model(folder):
  return CrossEncoder(folder, length=encoders.PAIR_LENGTH)


def test_logits_are_those_of_the_reference(model):
  want = np.load(ROOT / 'tests/golden/encoders.npz')['logits']
  got = model.score(encoders.PAIRS)
  assert got.dtype == np.float32 and want.std() > 0.1
  assert np.abs(got - want).max() <= 1e-4
  # The order of the pairs and their company change nothing.
  back = model.score(encoders.PAIRS[::-1])[::-1]
  np.testing.assert_allclose(got, back, atol=2e-6)
  assert model.score([]).shape == (0,)


def test_the_passage_is_cut_never_the_query(model):
  query = 'who wrote ' + 'the play of ' * 8 + 'king?'
  ids = {name: i for i, name in enumerate(encoders.VOCAB)}
  rows = model._encode([(query, 'denmark ' * 500)])
  whole = model._tokenizer.encode(query).ids
  assert rows[0].ids[: len(whole)] == whole
  assert len(rows[0].ids) == encoders.PAIR_LENGTH
  assert rows[0].ids[-2:] == [ids['denmark'], ids['[SEP]']]
  # A query that alone is too long is cut, and nothing fails.
  long = model._encode([('king ' * 500, 'denmark')])[0]
  assert len(long.ids) == encoders.PAIR_LENGTH
  assert long.ids.count(ids['[SEP]']) == 2
  assert np.isfinite(model.score([('king ' * 500, 'denmark')])).all()


def test_a_passage_holds_no_separator_of_its_own(model):
  row = model._encode([('[SEP] a', 'king [SEP] [CLS] \ud800')])[0]
  ids = {name: i for i, name in enumerate(encoders.VOCAB)}
  assert row.ids.count(ids['[SEP]']) == 2 and row.ids.count(ids['[CLS]']) == 1


def test_each_query_meets_its_own_documents():
  contents = ['aa b', 'b', 'a', 'bbb', 'aaaa', 'ab']
  index = Fixed([[0, 1, 2, 4, 5, 3], [1, 3, 0, 5, 2, 4]], 6)
  scorer = Lengths()
  ids, scores = Rerank(index, contents, scorer, 4).search(['a', 'b'], 3)
  # Not one pair of a query with the documents of the other.
  assert scorer.pairs == [
    ('a', 'aa b'),
    ('a', 'b'),
    ('a', 'a'),
    ('a', 'aaaa'),
    ('b', 'b'),
    ('b', 'bbb'),
    ('b', 'aa b'),
    ('b', 'ab'),
  ]
  assert ids.tolist() == [[4, 0, 2], [3, 1, 5]]
  assert ids.dtype == np.int64 and scores.dtype == np.float32
  np.testing.assert_allclose(scores[0], [39.96, 19.96, 9.99], rtol=1e-6)


def test_order_of_real_scores(model):
  contents = list(encoders.PASSAGES)
  P = len(contents)
  queries = list(encoders.QUERIES)
  index = Fixed(np.tile(np.arange(P), (len(queries), 1)), P)
  ids, scores = Rerank(index, contents, model, P).search(queries, P)
  want = np.load(ROOT / 'tests/golden/encoders.npz')['logits'].reshape(-1, P)
  np.testing.assert_array_equal(ids, np.argsort(-want, axis=1))
  np.testing.assert_allclose(scores, -np.sort(-want, axis=1), atol=1e-4)
  assert len({tuple(row) for row in ids.tolist()}) > 1


def test_ties_come_in_corpus_order_and_rows_end_early():
  contents = ['x1', 'x2', 'x3', 'x4', 'x5']
  index = Fixed([[3, 1, 2, 0, 4], [4, 2, -1, -1, -1]], 5)
  ids, scores = Rerank(index, contents, Lengths(), 3).search(['q', 'q'], 10)
  assert ids.tolist() == [[1, 2, 3, -1, -1], [2, 4, -1, -1, -1]]
  assert np.array_equal(np.isneginf(scores), ids < 0)
  ids, _ = Rerank(index, contents, Lengths(), 3).search(['q', 'q'], 1)
  assert ids.tolist() == [[1], [2]]


def test_parameters_are_json(model):
  index = Rerank(Fixed([[0]], 1), ['a'], model, 5)
  found = json.loads(json.dumps(index.parameters))
  assert found['n'] == 5 and found['index'] == {'name': 'fixed'}
  assert len(found['cross_encoder']['sha256']) == 64 and len(index) == 1


def test_wrong_arguments(folder, tmp_path):
  index = Fixed([[0, 1]], 2)
  with pytest.raises(ValueError, match='k=0'):
    Rerank(index, ['a', 'b'], Lengths(), 3).search(['q'], 0)
  with pytest.raises(ValueError, match='length=129.*3 to 128'):
    CrossEncoder(folder, length=129)
  with pytest.raises(ValueError, match="dtype='int8'"):
    CrossEncoder(folder, dtype='int8')
  # An encoder is no cross-encoder, nor is a classifier of three labels.
  other = encoders.write(tmp_path, 'gte-tiny')
  with pytest.raises(ValueError, match="'bert.embeddings"):
    CrossEncoder(other, length=64)
  labels = encoders.write(tmp_path, encoders.RERANKER)
  file = labels / 'model.safetensors'
  tensors = safetensors.numpy.load_file(file)
  tensors['classifier.weight'] = np.zeros((3, 32), np.float32)
  safetensors.numpy.save_file(tensors, file)
  with pytest.raises(ValueError, match=r'classifier.weight.*\(3, 32\)'):
    CrossEncoder(labels, length=64)


@pytest.mark.long
def test_nothing_compiles_after_the_programs(folder):
  model, rng = CrossEncoder(folder, length=40), np.random.default_rng(0)
  for program in model.programs(60):
    program()
  with compiled() as found:
    for count in (0, 1, 60, *rng.integers(1, 61, 20)):
      model.score([tuple(random_texts(rng, 2)) for _ in range(count)])
    assert found == []
    model.score([('king', 'hamlet')] * 100)
    assert found  # the listener works


def test_a_model_of_few_positions_reads_as_many(folder):
  assert CrossEncoder(folder).length == 128


def test_the_device_says_which_dtype(folder, monkeypatch):
  assert CrossEncoder(folder).dtype == 'float32'
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  assert CrossEncoder(folder).dtype == 'bfloat16'
  assert CrossEncoder(folder, dtype='float32').dtype == 'float32'
