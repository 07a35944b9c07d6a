"""A small corpus, and one real server over it for the whole session."""

import contextlib
import json
import logging
import threading
from unittest import mock

import pytest
import uvicorn

from retrieval.core import LocalSearcher
from retrieval.corpus import join_contents, read_corpus
from retrieval.index.bm25 import BM25Index
from retrieval.process import start_server
from retrieval.serve.app import create_app
from retrieval.serve.protocol import Limits
from retrieval.server import bind

PASSAGES = (
  ('0', 'Hamlet', 'Hamlet is a tragedy written by William Shakespeare.'),
  ('1', 'Henry V', 'Henry V is a history play by William Shakespeare.'),
  ('2', 'Denmark', 'Denmark is a country. Hamlet was its prince in a play.'),
  ('3', 'Café', 'Ein Café serviert Kaffee — 東京 too. \x00 "quoted" </search>'),
  ('4', 'Twin', 'the same words here'),
  ('5', 'Twin', 'the same words here'),
  ('6', 'Twin', 'the same words here'),
)


def write_corpus(path, passages=PASSAGES):
  lines = [
    json.dumps({'id': i, 'contents': join_contents(title, text)})
    for i, title, text in passages
  ]
  path.write_text('\n'.join(lines) + '\n')
  return path


@pytest.fixture(scope='session')
def corpus_path(tmp_path_factory):
  return write_corpus(tmp_path_factory.mktemp('corpus') / 'corpus.jsonl')


@pytest.fixture(scope='session')
def corpus(corpus_path):
  return read_corpus(corpus_path)


@pytest.fixture(scope='session')
def server(corpus_path, tmp_path_factory):
  log = tmp_path_factory.mktemp('server') / 'server.log'
  options = dict(timeout_s=60, allow_host=['gpu01'])
  with start_server(corpus_path, log_path=log, **options) as process:
    yield process


@contextlib.contextmanager
def serve(corpus_path, port=0):
  """A server in a thread, for tests that need several; yields its address.

  A process would take two seconds of imports.
  """
  corpus = read_corpus(corpus_path)
  searcher = LocalSearcher(corpus, BM25Index(corpus.contents))
  config = uvicorn.Config(
    create_app(searcher, Limits()), log_level='warning', access_log=False
  )
  server = uvicorn.Server(config)
  with bind('127.0.0.1', port) as listening:
    listening.listen()
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
      yield f'http://127.0.0.1:{listening.getsockname()[1]}'
    finally:
      server.should_exit = True
      thread.join()


@pytest.fixture(scope='session')
def milvus_url(tmp_path_factory):
  """milvus-lite behind Milvus' own protocol: it stands for a cluster."""
  import grpc
  from milvus_lite.adapter.grpc.server import start_server_in_thread
  import pymilvus.client.connection_manager  # noqa: F401, of its own

  # It prints a traceback for calls of pymilvus that it does not know.
  logging.getLogger('grpc._server').setLevel(logging.CRITICAL)
  path = tmp_path_factory.mktemp('milvus') / 'a.db'
  make = grpc.server

  def permitting_pings(pool, options):
    # As a cluster does. pymilvus pings an idle connection every 10 s, which
    # grpc's own limit (5 min) answers by closing it.
    return make(
      pool,
      options=[
        *options,
        ('grpc.keepalive_permit_without_calls', 1),
        ('grpc.http2.min_ping_interval_without_data_ms', 5000),
      ],
    )

  with mock.patch.object(grpc, 'server', permitting_pings):
    server, db, port = start_server_in_thread(str(path))
  yield f'http://127.0.0.1:{port}'
  server.stop(grace=0).wait()
  db.close()
