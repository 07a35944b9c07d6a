"""A small corpus, and one real server over it for the whole session."""

import json

import pytest

from retrieval.corpus import join_contents, read_corpus
from retrieval.process import start_server

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
  with start_server(corpus_path, log_path=log, timeout_s=60) as process:
    yield process
