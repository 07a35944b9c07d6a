"""Against milvus-lite behind Milvus' protocol, which stands for a cluster."""

import numpy as np
import pymilvus
import pytest

from retrieval.index import milvus
from retrieval.index.milvus import Milvus, MilvusError
from tests.retrieval.vectors import (
  FakeEncoder,
  assert_exact,
  clustered,
  recall,
  unit,
)

pytestmark = pytest.mark.slow

VECTORS = clustered(700, 16, spread=0.3)
QUERIES = unit(VECTORS[:30] + 0.1 * clustered(30, 16, seed=5))


@pytest.fixture
def build(milvus_url, request):
  """Builds a collection of the test's own; returns where it is."""
  name = ''.join(c if c.isalnum() else '_' for c in request.node.name)

  def build(vectors=VECTORS, **options):
    milvus.build(vectors, milvus_url, name, **options)
    return milvus_url, name

  return build


@pytest.fixture(scope='module')
def there(milvus_url):
  """A collection that tests read only."""
  milvus.build(VECTORS, milvus_url, 'there', block=100)
  return milvus_url, 'there'


def test_build_reads_a_float16_map(build, tmp_path):
  half = VECTORS.astype(np.float16)
  np.save(tmp_path / 'v.npy', half)
  mapped = np.load(tmp_path / 'v.npy', mmap_mode='r')
  index = Milvus(*build(mapped), None)
  assert_exact(
    index.search_vectors(QUERIES, 9), half.astype(np.float32), QUERIES, 9
  )


def counted(monkeypatch):
  """(operation, first id, rows) of each write."""
  seen = []
  for name in ('insert', 'upsert'):
    write = getattr(pymilvus.MilvusClient, name)

    def watched(self, collection, data, *args, _write=write, _name=name, **kw):
      seen.append((_name, data[0]['id'], len(data)))
      return _write(self, collection, data, *args, **kw)

    monkeypatch.setattr(pymilvus.MilvusClient, name, watched)
  return seen


def test_build_goes_on_after_a_kill(build, monkeypatch):
  seen = counted(monkeypatch)
  calls = []

  class Killed(BaseException):
    pass

  def insert(
    self, collection, data, *args, _write=pymilvus.MilvusClient.insert, **kwargs
  ):
    calls.append(data)
    if len(calls) == 3:  # a block arrives in part
      _write(self, collection, data[:30], *args, **kwargs)
      raise Killed
    return _write(self, collection, data, *args, **kwargs)

  with monkeypatch.context() as patch:
    patch.setattr(pymilvus.MilvusClient, 'insert', insert)
    with pytest.raises(Killed):
      build(block=100)
  assert seen == [('insert', 0, 100), ('insert', 100, 100), ('insert', 200, 30)]
  seen.clear()
  index = Milvus(*build(block=100), None)
  assert seen == [('upsert', 200, 100)] + [
    ('insert', n, 100) for n in range(300, 700, 100)
  ]
  assert len(index) == 700
  assert_exact(index.search_vectors(QUERIES, 20), VECTORS, QUERIES, 20)


def test_a_whole_collection_is_not_built_again(there, monkeypatch):
  seen = counted(monkeypatch)
  milvus.build(VECTORS, *there, block=100)
  assert seen == []


@pytest.mark.parametrize(
  'other', [VECTORS[::-1], VECTORS[:300], np.ones((700, 5), np.float32)]
)
def test_other_vectors_are_not_mixed_in(other, there):
  with pytest.raises(MilvusError, match='700 other'):
    milvus.build(other, *there)


def test_a_collection_that_is_there_keeps_its_index(milvus_url):
  client = pymilvus.MilvusClient(milvus_url)
  schema = client.create_schema(auto_id=False)
  schema.add_field('id', pymilvus.DataType.INT64, is_primary=True)
  schema.add_field('vector', pymilvus.DataType.FLOAT_VECTOR, dim=16)
  params = client.prepare_index_params()
  params.add_index('vector', index_type='HNSW', metric_type='IP')
  client.create_collection('hnsw', schema=schema, index_params=params)
  client.close()
  milvus.build(VECTORS, milvus_url, 'hnsw')
  index = Milvus(milvus_url, 'hnsw', None)
  assert index.parameters['index_type'] == 'HNSW'
  share = recall(index.search_vectors(QUERIES, 10)[0], VECTORS, QUERIES)
  assert share > 0.95


@pytest.mark.parametrize('twins', [2, 40])
def test_ties_at_the_cut_come_in_corpus_order(twins, build):
  vectors = VECTORS.copy()
  where = np.sort(np.random.default_rng(0).permutation(700)[:twins])
  vectors[where] = vectors[where[0]]
  index = Milvus(*build(vectors), None)
  for k in (1, 2, 7):
    ids, _ = index.search_vectors(vectors[where[:1]], k)
    assert ids[0].tolist()[:twins] == where[:k].tolist()


def test_requests_are_split(there, monkeypatch):
  index, sizes = Milvus(*there, None), []
  search = pymilvus.MilvusClient.search

  def watched(self, collection, data, *args, limit, **kwargs):
    sizes.append((len(data), limit))
    return search(self, collection, data, *args, limit=limit, **kwargs)

  want = index.search_vectors(QUERIES, 4)
  monkeypatch.setattr(pymilvus.MilvusClient, 'search', watched)
  for limit, value in (
    ('_QUERIES', 7),
    ('_RESULTS', 35),
    ('_MESSAGE_BYTES', 7 * 4 * 16),
  ):
    sizes.clear()
    with monkeypatch.context() as patch:
      patch.setattr(milvus, limit, value)
      ids, scores = index.search_vectors(QUERIES, 4)
    assert sizes == [(7, 5)] * 4 + [(2, 5)]
    np.testing.assert_array_equal(ids, want[0])
    np.testing.assert_allclose(scores, want[1], atol=2e-6)


def test_k_beyond_the_limit_of_milvus(there, monkeypatch):
  index = Milvus(*there, None)
  monkeypatch.setattr(milvus, '_K', 50)
  assert index.search_vectors(QUERIES, 50)[0].shape == (30, 50)
  with pytest.raises(ValueError, match='k=51.*50'):
    index.search_vectors(QUERIES, 51)


def test_collections_of_something_else(there):
  url, name = there

  def refuses(words, collection=name, encoder=None):
    with pytest.raises((MilvusError, ValueError), match=words):
      Milvus(url, collection, encoder)

  refuses("'other' .there: '", 'other')
  refuses('16 dimensions.*32', encoder=FakeEncoder(32))
  it = pymilvus.MilvusClient(url)
  it.create_collection('l2', dimension=16, metric_type='L2')
  schema = it.create_schema()
  schema.add_field('id', pymilvus.DataType.INT64, is_primary=True)
  schema.add_field('v', pymilvus.DataType.FLOAT_VECTOR, dim=16)
  params = it.prepare_index_params()
  params.add_index('v', index_type='FLAT', metric_type='IP')
  it.create_collection('names', schema=schema, index_params=params)
  it.close()
  refuses('indexed by inner product', 'l2')
  refuses('indexed by inner product', 'names')


def test_a_build_that_lost_rows(build, monkeypatch):
  insert = pymilvus.MilvusClient.insert
  monkeypatch.setattr(
    pymilvus.MilvusClient,
    'insert',
    lambda self, name, rows: insert(self, name, rows[1:]),
  )
  with pytest.raises(MilvusError, match='693.*700'):
    build(block=100)


def test_vectors_that_are_none(build):
  bad = VECTORS.copy()
  bad[444, 3] = np.nan
  with pytest.raises(ValueError, match='row 444'):
    build(bad, block=100)


@pytest.mark.parametrize(
  'uri, words',
  [
    ('http://127.0.0.1:9', 'http://127.0.0.1:9: .*MILVUS_TOKEN'),
    ('a.db', "'a.db'.*--milvus_uri"),
  ],
)
def test_no_milvus_there(uri, words):
  with pytest.raises(MilvusError, match=words):
    Milvus(uri, 'passages', None, timeout_s=2)
  with pytest.raises(MilvusError, match=words):
    milvus.build(VECTORS, uri, 'passages')


def test_the_token_comes_from_the_environment(monkeypatch):
  seen = {}
  monkeypatch.setattr(
    pymilvus, 'MilvusClient', lambda uri, **kwargs: seen.update(kwargs, uri=uri)
  )
  monkeypatch.setenv('MILVUS_TOKEN', 'root:secret')
  milvus._connect('http://host:19530', 7)
  assert seen == {
    'uri': 'http://host:19530',
    'token': 'root:secret',
    'timeout': 7,
  }


def test_a_server_that_goes_away(tmp_path, capfd):
  from milvus_lite.adapter.grpc.server import start_server_in_thread
  import pymilvus.client.connection_manager  # noqa: F401, a server of its own

  server, db, port = start_server_in_thread(str(tmp_path / 'a.db'))
  url = f'http://127.0.0.1:{port}'
  milvus.build(VECTORS, url, 'passages')
  index = Milvus(url, 'passages', FakeEncoder(16), timeout_s=2)
  assert index.search(['w'], 3)[0].shape == (1, 3)
  server.stop(grace=0).wait()
  db.close()
  with pytest.raises(MilvusError, match=f'{url}: .*MILVUS_TOKEN'):
    index.search(['w'], 3)
  assert 'Traceback' not in capfd.readouterr().err
