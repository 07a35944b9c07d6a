"""Dense search in a Milvus cluster, by its URL (http://host:19530).

The token is read from the environment variable `MILVUS_TOKEN`. Tests run this
code on milvus-lite, which implements Milvus' protocol.

The primary key of a passage is its position in the corpus.
"""

from collections.abc import Iterator
import contextlib
import logging
import os

import grpc
import numpy as np
import pymilvus

from retrieval import files
from retrieval.core import Ranked, no_results
from retrieval.index.vectors import DenseIndex, blocks, ranked
from retrieval.metrics import stage

# It prints a traceback for every error that it raises.
logging.getLogger('pymilvus').setLevel(logging.CRITICAL)

# Milvus' own limits: topk and nq of a request, and 64 MB of a message, of
# which half is left for overhead.
_K = _QUERIES = 16384
_MESSAGE_BYTES = 32 << 20
_RESULTS = 1 << 20  # of all queries of one request
_VECTOR = 'vector'


class MilvusError(RuntimeError):
  """Milvus does not answer or does not hold the corpus; names the fix."""


def build(vectors: np.ndarray, uri: str, collection: str, block=4096) -> None:
  """Writes a collection, or the missing part after a killed build.

  Its index is FLAT, which is exact. An existing empty collection with the
  fields id and vector keeps its index.

  Args:
    vectors: float32 or float16 [P, D], a memory map if large; one block is in
      memory at a time.
    uri: the URL of a server; see the module.
    collection: its name in Milvus.
    block: vectors sent at once, fewer if a message would be too large.

  Raises:
    MilvusError: no server, a collection of other vectors, a name or an index
      that Milvus refuses, or fewer rows arrived than were sent.
    ValueError: vectors that cannot be indexed.
  """
  count, dim = vectors.shape
  block = max(1, min(block, _MESSAGE_BYTES // (4 * dim)))
  with _converting(uri), contextlib.closing(_connect(uri)) as client:
    if not client.has_collection(collection):
      schema = client.create_schema(auto_id=False)
      schema.add_field('id', pymilvus.DataType.INT64, is_primary=True)
      schema.add_field(_VECTOR, pymilvus.DataType.FLOAT_VECTOR, dim=dim)
      index = client.prepare_index_params()
      index.add_index(_VECTOR, index_type='FLAT', metric_type='IP')
      client.create_collection(collection, schema=schema, index_params=index)
    client.load_collection(collection)
    done = _resumed(client, uri, collection, vectors)
    # The block during which a build was killed may be incomplete.
    start = done - done % block
    with files.progress(count, 'milvus', unit=' vectors', initial=start) as bar:
      for first, part in blocks(vectors, block, start):
        rows = [{'id': i, _VECTOR: v} for i, v in enumerate(part, first)]
        write = client.upsert if first < done else client.insert
        write(collection, rows)
        bar.update(len(part))
    client.flush(collection)
    if (found := _count(client, collection)) != count:
      held = f'holds {found} vectors after the build, not {count}'
      raise _error(uri, collection, f'{held}; drop it and build again')


def _resumed(
  client: pymilvus.MilvusClient, uri: str, collection: str, vectors: np.ndarray
) -> int:
  """The number of vectors that a collection holds, if they are these."""
  done = _count(client, collection)
  if not done:
    return 0
  ids = [0, min(done, len(vectors)) - 1]
  try:
    rows = client.get(collection, ids, output_fields=['id', _VECTOR])
    held = {row['id']: row[_VECTOR] for row in rows}
    same = all(np.array_equal(held[i], vectors[i]) for i in ids)
  except KeyError:
    same = False
  if not same or done > len(vectors):
    fix = 'drop it or choose another name'
    raise _error(uri, collection, f'holds {done} other vectors; {fix}')
  return done


class Milvus(DenseIndex):
  """An index over a collection; see `retrieval.core.Index`.

  Equal scores are in corpus order, except for ties of more than 1024 passages
  past the k-th. Scores may differ in the last digit with the other queries of
  a call, since the library multiplies matrices.
  """

  name = 'milvus'

  def __init__(self, uri: str, collection: str, encoder, timeout_s: float = 60):
    """Connects, and loads the collection into the server's memory.

    Args:
      uri: the URL of a server; see the module.
      collection: what `build` wrote.
      encoder: of queries; None if only `search_vectors` is used.
      timeout_s: for each request.

    Raises:
      MilvusError: no server, no such collection, or one of another layout,
        dimension or metric.
    """
    self._uri, self._collection = uri, collection
    self._timeout_s = timeout_s
    with _converting(uri):
      self._client = client = _connect(uri, timeout_s)
      if not client.has_collection(collection):
        known = ', '.join(map(ascii, client.list_collections())) or 'none'
        there = f'no collection {collection!r} (there: {known[:200]})'
        raise MilvusError(f'{uri}: {there}; build the index first')
      client.load_collection(collection, timeout=timeout_s)
      index = client.describe_index(collection, _VECTOR)
      fields = client.describe_collection(collection)['fields']
      dims = {f['name']: f.get('params', {}).get('dim') for f in fields}
      dim, count = int(dims.get(_VECTOR) or 0), _count(client, collection)
      if not dim or not index or index['metric_type'] != 'IP':
        problem = f'has no field {_VECTOR!r} indexed by inner product (IP)'
        raise _error(uri, collection, f'{problem}; build it with this package')
    what = f'{uri}: collection {collection!r} holds vectors of'
    about = {'collection': collection, 'index_type': index['index_type']}
    super().__init__(encoder, (count, dim), what, **about)

  def search_vectors(self, q: np.ndarray, k: int) -> Ranked:
    """`search` for vectors of queries, [Q, D].

    Raises:
      ValueError: k < 1, or both k and P above 16384, Milvus' limit.
      MilvusError: the server does not answer.
    """
    k = self.check_k(k, _K)
    most = min(len(self), _K, k + 1024)
    with stage('search'), _converting(self._uri):
      # Each result is sent over the network: one more shows a tie.
      return ranked(self._ask, q, k, spare=1, most=most)

  def _ask(self, q: np.ndarray, n: int) -> Ranked:
    ids, scores = no_results(len(q), n)
    most = (_QUERIES, _RESULTS // n, _MESSAGE_BYTES // (4 * self.dim))
    step = max(1, min(most))
    options = {'limit': n, 'output_fields': ['id'], 'anns_field': _VECTOR}
    options |= {'timeout': self._timeout_s}
    options |= {'search_params': {'metric_type': 'IP'}}
    for start in range(0, len(q), step):
      part = list(q[start : start + step])
      answers = self._client.search(self._collection, part, **options)
      for row, hits in enumerate(answers, start):
        ids[row, : len(hits)] = [hit['id'] for hit in hits]
        scores[row, : len(hits)] = [hit['distance'] for hit in hits]
    return ids, scores


def _connect(uri: str, timeout_s: float = 60) -> pymilvus.MilvusClient:
  if '://' not in uri:
    problem = 'is not the URL of a Milvus server, such as http://host:19530'
    raise MilvusError(f'{uri!r} {problem} (--milvus_uri)')
  token = os.environ.get('MILVUS_TOKEN', '')
  return pymilvus.MilvusClient(uri, token=token, timeout=timeout_s)


def _count(client: pymilvus.MilvusClient, collection: str) -> int:
  options = {'filter': '', 'consistency_level': 'Strong'}
  rows = client.query(collection, output_fields=['count(*)'], **options)
  return int(rows[0]['count(*)'])


def _error(uri: str, collection: str, problem: str) -> MilvusError:
  return MilvusError(f'{uri}: collection {collection!r} {problem}')


@contextlib.contextmanager
def _converting(uri: str) -> Iterator[None]:
  """Converts errors of the client library to one sentence."""
  try:
    yield
  except (pymilvus.MilvusException, grpc.RpcError) as error:
    reason = files.shown(getattr(error, 'message', '') or str(error), 300)
    fix = 'is the server up, and MILVUS_TOKEN right?'
    raise MilvusError(f'{uri}: Milvus: {reason}; {fix}') from None
