"""Dense search in a Milvus cluster, by its URL (http://host:19530).

The token comes from the environment, `MILVUS_TOKEN`. Tests run this code on
milvus-lite, which speaks Milvus' protocol.

A passage's primary key is its position in the corpus.
"""

from collections.abc import Iterator, Sequence
import contextlib
import logging
import os
from typing import Any

import grpc
import numpy as np
import pymilvus

from retrieval import files
from retrieval.dense_faiss import (
  QueryEncoder,
  blocks,
  check_search,
  check_vectors,
  encode,
  encoder_parameters,
  ranked,
)
from retrieval.metrics import stage

# It prints a traceback for every error that is raised anyway.
logging.getLogger('pymilvus').setLevel(logging.CRITICAL)

# Milvus' own limits: topk and nq of a request, and 64 MB of a message, of
# which half is left for overhead.
_K = 16384
_QUERIES = 16384
_MESSAGE_BYTES = 32 << 20
_RESULTS = 1 << 20  # of one request, all queries together
_VECTOR = 'vector'


class MilvusError(RuntimeError):
  """Milvus is not there or does not hold the corpus; names the mend."""


def build(
  vectors: np.ndarray, uri: str, collection: str, *, block: int = 4096
) -> None:
  """Writes a collection, or what is missing of it after a kill.

  Its index is FLAT, which is exact. A collection that is there, empty and
  with the fields id and vector, keeps the index that it has.

  Args:
    vectors: float32 or float16 [P, D], a memory map where it is large; one
      block is in memory at a time.
    uri: the URL of a server; see the module.
    collection: its name in Milvus.
    block: vectors sent at once, fewer where a message would be too large.

  Raises:
    MilvusError: no server, a collection of something else, a name or an index
      that Milvus refuses, or fewer rows arrived than were sent.
    ValueError: vectors that cannot be indexed.
  """
  check_vectors(vectors)
  count, dim = vectors.shape
  block = max(1, min(block, _MESSAGE_BYTES // (4 * dim)))
  with _told(uri), contextlib.closing(_connect(uri)) as client:
    if not client.has_collection(collection):
      schema = client.create_schema(auto_id=False)
      schema.add_field('id', pymilvus.DataType.INT64, is_primary=True)
      schema.add_field(_VECTOR, pymilvus.DataType.FLOAT_VECTOR, dim=dim)
      index = client.prepare_index_params()
      index.add_index(_VECTOR, index_type='FLAT', metric_type='IP')
      client.create_collection(collection, schema=schema, index_params=index)
    client.load_collection(collection)
    done = _resumed(client, uri, collection, vectors)
    # The block at which a build was killed may be there in part.
    start = done - done % block
    with files.progress(count, 'milvus', unit=' vectors', initial=start) as bar:
      for first, part in blocks(vectors, block, start):
        rows = [
          {'id': first + i, _VECTOR: vector} for i, vector in enumerate(part)
        ]
        write = client.upsert if first < done else client.insert
        write(collection, rows)
        bar.update(len(part))
    client.flush(collection)
    found = _count(client, collection)
    if found != count:
      raise MilvusError(
        f'{uri}: collection {collection!r} holds {found} vectors after the '
        f'build, not {count}; drop it and build again'
      )


def _resumed(
  client: pymilvus.MilvusClient, uri: str, collection: str, vectors: np.ndarray
) -> int:
  """How many vectors a collection holds already, if they are these."""
  done = _count(client, collection)
  if not done:
    return 0
  ids = [0, min(done, len(vectors)) - 1]
  try:
    dim = _dim(client, collection)
    held = {
      row['id']: row[_VECTOR]
      for row in client.get(collection, ids, output_fields=['id', _VECTOR])
    }
    same = (
      dim == vectors.shape[1]
      and done <= len(vectors)
      and all(
        np.array_equal(held[i], np.asarray(vectors[i], np.float32)) for i in ids
      )
    )
  except KeyError:
    same = False
  if not same:
    raise MilvusError(
      f'{uri}: collection {collection!r} holds {done} other vectors; drop it '
      'or choose another name'
    )
  return done


class Milvus:
  """An index over a collection; see `retrieval.core.Index`.

  Equal scores come in corpus order, but for ties that go on for more than
  1024 passages past the k-th. Scores may differ in the last digit with what
  else is asked at once: the library multiplies matrices.
  """

  name = 'milvus'

  def __init__(
    self,
    uri: str,
    collection: str,
    encoder: QueryEncoder | None,
    *,
    timeout_s: float = 60,
  ):
    """Connects, and loads the collection into the server's memory.

    Args:
      uri: the URL of a server; see the module.
      collection: what `build` wrote.
      encoder: of queries; None where only `search_vectors` is used.
      timeout_s: for each request.

    Raises:
      MilvusError: no server, no such collection, or one of another layout,
        dimension or metric.
    """
    self._uri, self._collection, self._encoder = uri, collection, encoder
    self._timeout_s = timeout_s
    with _told(uri):
      self._client = _connect(uri, timeout_s)
      if not self._client.has_collection(collection):
        known = ', '.join(map(ascii, self._client.list_collections())) or 'none'
        raise MilvusError(
          f'{uri}: no collection {collection!r} (there: {known[:200]}); build '
          'the index first'
        )
      self._client.load_collection(collection, timeout=timeout_s)
      try:
        self.dim = _dim(self._client, collection)
        index = self._client.describe_index(collection, _VECTOR)
      except KeyError:
        index = None
      if not index or index['metric_type'] != 'IP':
        raise MilvusError(
          f'{uri}: collection {collection!r} has no field {_VECTOR!r} indexed '
          'by inner product (IP); build it with this package'
        )
      self._index_type = index['index_type']
      self._count = _count(self._client, collection)
    if encoder is not None and encoder.dim != self.dim:
      raise MilvusError(
        f'{uri}: collection {collection!r} holds vectors of {self.dim} '
        f'dimensions, the encoder makes {encoder.dim}; use the encoder that '
        'it was built with'
      )
    if not self._count:
      raise MilvusError(
        f'{uri}: collection {collection!r} is empty; build the index again'
      )

  @property
  def parameters(self) -> dict[str, Any]:
    return {
      'name': self.name,
      'collection': self._collection,
      'index_type': self._index_type,
    } | encoder_parameters(self._encoder)

  def __len__(self) -> int:
    return self._count

  def search(
    self, queries: Sequence[str], k: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """See `retrieval.core.Index.search`.

    Raises:
      ValueError: k < 1, or both k and P above 16384, Milvus' limit.
      MilvusError: the server does not answer.
    """
    return self.search_vectors(encode(self._encoder, queries), k)

  def search_vectors(
    self, q: np.ndarray, k: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """The same for vectors of queries, [Q, D]."""
    k, q = check_search(k, q, len(self), self.dim, _K)
    most = min(len(self), _K, k + 1024)
    with stage('search'), _told(self._uri):
      # Each result travels: one more shows a tie.
      return ranked(self._ask, q, k, spare=1, most=most)

  def _ask(self, q: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.full((len(q), n), -1, np.int64)
    scores = np.full((len(q), n), -np.inf, np.float32)
    most = (_QUERIES, _RESULTS // n, _MESSAGE_BYTES // (4 * self.dim))
    step = max(1, min(most))
    for start in range(0, len(q), step):
      answers = self._client.search(
        self._collection,
        list(q[start : start + step]),
        limit=n,
        output_fields=['id'],
        anns_field=_VECTOR,
        timeout=self._timeout_s,
        search_params={'metric_type': 'IP'},
      )
      for row, hits in enumerate(answers, start):
        ids[row, : len(hits)] = [hit['id'] for hit in hits]
        scores[row, : len(hits)] = [hit['distance'] for hit in hits]
    return ids, scores


def _connect(uri: str, timeout_s: float = 60) -> pymilvus.MilvusClient:
  if '://' not in uri:
    raise MilvusError(
      f'{uri!r} is not the URL of a Milvus server, such as http://host:19530 '
      '(--milvus_uri)'
    )
  token = os.environ.get('MILVUS_TOKEN', '')
  return pymilvus.MilvusClient(uri, token=token, timeout=timeout_s)


def _count(client: pymilvus.MilvusClient, collection: str) -> int:
  rows = client.query(
    collection,
    filter='',
    output_fields=['count(*)'],
    consistency_level='Strong',
  )
  return int(rows[0]['count(*)'])


def _dim(client: pymilvus.MilvusClient, collection: str) -> int:
  """Of its vectors.

  Raises:
    KeyError: the collection has no such field.
  """
  fields = client.describe_collection(collection)['fields']
  return int({f['name']: f for f in fields}[_VECTOR]['params']['dim'])


@contextlib.contextmanager
def _told(uri: str) -> Iterator[None]:
  """Turns what the client library raises into one sentence."""
  try:
    yield
  except (pymilvus.MilvusException, grpc.RpcError) as error:
    reason = ascii(getattr(error, 'message', '') or str(error))[1:-1][:300]
    raise MilvusError(
      f'{uri}: Milvus: {reason}; is the server up, and MILVUS_TOKEN right?'
    ) from None
