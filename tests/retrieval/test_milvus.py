import contextlib
import os
import subprocess
import sys

import numpy as np
import pymilvus
import pytest

from retrieval import milvus
from retrieval.milvus import Milvus, MilvusError
from tests.conftest import ROOT
from tests.retrieval.vectors import (
  FakeEncoder, assert_exact, clustered, recall, unit
)

VECTORS = clustered(700, 16, spread=0.3)
QUERIES = unit(VECTORS[:30] + 0.1 * clustered(30, 16, seed=5))


def built(uri, vectors=VECTORS, collection='passages', **options):
  milvus.build(vectors, str(uri), collection, **options)
  return str(uri)


@pytest.fixture(scope='module')
def uri(tmp_path_factory):
  return built(tmp_path_factory.mktemp('milvus') / 'a.db', block=100)


def test_build_reads_a_float16_map(tmp_path):
  half = VECTORS.astype(np.float16)
  np.save(tmp_path / 'v.npy', half)
  mapped = np.load(tmp_path / 'v.npy', mmap_mode='r')
  index = Milvus(built(tmp_path / 'a.db', mapped), 'passages', None)
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


def test_build_goes_on_after_a_kill(tmp_path, monkeypatch):
  seen = counted(monkeypatch)
  uri, calls = tmp_path / 'a.db', []

  class Killed(BaseException):
    pass

  def insert(self, collection, data, *args, _write=pymilvus.MilvusClient.insert,
             **kwargs):
    calls.append(data)
    if len(calls) == 3:  # a block arrives in part
      _write(self, collection, data[:30], *args, **kwargs)
      raise Killed
    return _write(self, collection, data, *args, **kwargs)

  with monkeypatch.context() as patch:
    patch.setattr(pymilvus.MilvusClient, 'insert', insert)
    with pytest.raises(Killed):
      built(uri, block=100)
  assert seen == [('insert', 0, 100), ('insert', 100, 100), ('insert', 200, 30)]
  seen.clear()
  index = Milvus(built(uri, block=100), 'passages', None)
  assert seen == [('upsert', 200, 100)] + [
    ('insert', n, 100) for n in range(300, 700, 100)]
  assert len(index) == 700
  assert_exact(index.search_vectors(QUERIES, 20), VECTORS, QUERIES, 20)


def test_a_whole_collection_is_not_built_again(tmp_path, monkeypatch):
  uri = built(tmp_path / 'a.db', block=100)
  seen = counted(monkeypatch)
  built(uri, block=100)
  assert seen == []


@pytest.mark.parametrize('other', [
  VECTORS[::-1], VECTORS[:300], np.ones((700, 5), np.float32)
])
def test_other_vectors_are_not_mixed_in(other, uri):
  with pytest.raises(MilvusError, match='holds 700 other vectors; drop it'):
    built(uri, other)


def test_a_built_file_can_be_moved(tmp_path):
  built(tmp_path / 'a.db')
  os.replace(tmp_path / 'a.db', tmp_path / 'b.db')
  index = Milvus(str(tmp_path / 'b.db'), 'passages', None)
  assert_exact(index.search_vectors(QUERIES, 5), VECTORS, QUERIES, 5)


def test_another_process_is_told_who_holds_the_file(uri):
  index = Milvus(uri, 'passages', None)
  code = f"from retrieval import milvus; milvus.Milvus({uri!r}, 'p', None)"
  held = subprocess.run(
    [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True
  )
  assert held.returncode == 1
  assert 'MilvusError' in held.stderr.splitlines()[-1]
  assert 'no other process hold the file?' in held.stderr.splitlines()[-1]
  assert len(index) == 700


@pytest.mark.parametrize('index_type, params, search', [
  ('HNSW', {'M': 16, 'efConstruction': 100}, {'ef': 64}),
  ('IVF_FLAT', {'nlist': 8}, {'nprobe': 8}),
  ('IVF_FLAT', {'nlist': 64}, {'nprobe': 1}),
])
def test_other_indexes(index_type, params, search, tmp_path):
  uri = built(tmp_path / 'a.db', index_type=index_type, index_params=params)
  index = Milvus(uri, 'passages', None, search_params=search)
  assert index.parameters['index_type'] == index_type
  assert index.parameters['search_params'] == search
  share = recall(index.search_vectors(QUERIES, 10)[0], VECTORS, QUERIES)
  if index_type == 'HNSW':
    assert share > 0.95
  else:  # all lists, or one of many: the parameters arrive
    assert share == 1 if search['nprobe'] == 8 else 0.05 < share < 0.8


def test_an_index_type_that_there_is_not(tmp_path):
  with pytest.raises(ValueError, match="index_type='SCANN': milvus-lite has"):
    built(tmp_path / 'a.db', index_type='SCANN')


@pytest.mark.parametrize('twins', [2, 40])
def test_ties_at_the_cut_come_in_corpus_order(twins, tmp_path):
  vectors = VECTORS.copy()
  where = np.sort(np.random.default_rng(0).permutation(700)[:twins])
  vectors[where] = vectors[where[0]]
  index = Milvus(built(tmp_path / 'a.db', vectors), 'passages', None)
  for k in (1, 2, 7):
    ids, _ = index.search_vectors(vectors[where[:1]], k)
    assert ids[0].tolist()[:twins] == where[:k].tolist()


def test_requests_are_split(uri, monkeypatch):
  index, sizes = Milvus(uri, 'passages', None), []
  search = pymilvus.MilvusClient.search

  def watched(self, collection, data, *args, limit, **kwargs):
    sizes.append((len(data), limit))
    return search(self, collection, data, *args, limit=limit, **kwargs)

  want = index.search_vectors(QUERIES, 4)
  monkeypatch.setattr(pymilvus.MilvusClient, 'search', watched)
  for limit, value in (
    ('_QUERIES', 7), ('_RESULTS', 35), ('_MESSAGE_BYTES', 7 * 4 * 16)
  ):
    sizes.clear()
    with monkeypatch.context() as patch:
      patch.setattr(milvus, limit, value)
      ids, scores = index.search_vectors(QUERIES, 4)
    assert sizes == [(7, 5)] * 4 + [(2, 5)]
    np.testing.assert_array_equal(ids, want[0])
    np.testing.assert_allclose(scores, want[1], atol=2e-6)


def test_k_beyond_the_limit_of_milvus(uri, monkeypatch):
  index = Milvus(uri, 'passages', None)
  monkeypatch.setattr(milvus, '_K', 50)
  assert index.search_vectors(QUERIES, 50)[0].shape == (30, 50)
  with pytest.raises(ValueError, match='k=51: this index gives at most 50'):
    index.search_vectors(QUERIES, 51)


@contextlib.contextmanager
def client(uri):
  with milvus._connected(uri) as client:
    yield client


def test_collections_of_something_else(tmp_path):
  uri = built(tmp_path / 'a.db')

  def refuses(words, collection='passages', encoder=None):
    with pytest.raises(MilvusError, match=words):
      Milvus(uri, collection, encoder)

  refuses("no collection 'other' .there: 'passages'", 'other')
  refuses('16 dimensions, the encoder makes 32', encoder=FakeEncoder(32))
  with client(uri) as it:
    it.create_collection('l2', dimension=16, metric_type='L2')
    schema = it.create_schema()
    schema.add_field('id', pymilvus.DataType.INT64, is_primary=True)
    schema.add_field('v', pymilvus.DataType.FLOAT_VECTOR, dim=16)
    params = it.prepare_index_params()
    params.add_index('v', index_type='FLAT', metric_type='IP')
    it.create_collection('names', schema=schema, index_params=params)
    it.create_collection('none', dimension=16, metric_type='IP')
  refuses('indexed by inner product', 'l2')
  refuses('indexed by inner product', 'names')
  refuses("'none' is empty", 'none')


def test_a_build_that_lost_rows(tmp_path, monkeypatch):
  insert = pymilvus.MilvusClient.insert
  monkeypatch.setattr(
    pymilvus.MilvusClient, 'insert',
    lambda self, name, rows: insert(self, name, rows[1:]),
  )
  with pytest.raises(MilvusError, match='holds 693 vectors.*not 700; drop it'):
    built(tmp_path / 'a.db', block=100)


def test_vectors_that_are_none(tmp_path):
  bad = VECTORS.copy()
  bad[444, 3] = np.nan
  with pytest.raises(ValueError, match='row 444 is not finite'):
    built(tmp_path / 'a.db', bad, block=100)
  with pytest.raises(ValueError, match='P >= 1'):
    built(tmp_path / 'b.db', VECTORS[:0])


@pytest.mark.parametrize('uri, words', [
  ('http://127.0.0.1:9', 'http://127.0.0.1:9: Milvus: .*is the server up'),
  ('a.sqlite', 'no such file; build the index first'),
])
def test_no_milvus_there(uri, words):
  with pytest.raises(MilvusError, match=words):
    Milvus(uri, 'passages', None, timeout_s=2)


def test_places_that_take_no_file(tmp_path):
  with pytest.raises(MilvusError, match='neither a path ending in .db nor'):
    built(tmp_path / 'a.sqlite')
  with pytest.raises(MilvusError, match='does its folder exist'):
    built(tmp_path / 'absent' / 'a.db')
  (tmp_path / 'a.db').write_bytes(b'\x1b[31mSQLite format 3\0')
  with pytest.raises(MilvusError, match='no other process') as error:
    built(tmp_path / 'a.db')
  assert '\x1b' not in str(error.value)


def test_the_token_comes_from_the_environment(monkeypatch):
  seen = {}
  monkeypatch.setattr(
    pymilvus, 'MilvusClient', lambda uri, **kwargs: seen.update(kwargs, uri=uri)
  )
  monkeypatch.setenv('MILVUS_TOKEN', 'root:secret')
  milvus._connect('http://host:19530', 7)
  assert seen == {
    'uri': 'http://host:19530', 'token': 'root:secret', 'timeout': 7
  }


def test_a_server_that_goes_away(tmp_path, capfd):
  import pymilvus.client.connection_manager  # noqa: F401, a server of its own
  from milvus_lite.adapter.grpc.server import start_server_in_thread

  built(tmp_path / 'a.db')
  server, db, port = start_server_in_thread(str(tmp_path / 'a.db'))
  url = f'http://127.0.0.1:{port}'
  index = Milvus(url, 'passages', FakeEncoder(16), timeout_s=2)
  assert index.search(['w'], 3)[0].shape == (1, 3)
  server.stop(grace=0).wait()
  db.close()
  with pytest.raises(MilvusError, match=f'{url}: Milvus: .*is the server up'):
    index.search(['w'], 3)
  assert 'Traceback' not in capfd.readouterr().err
