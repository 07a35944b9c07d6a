import io
import os
import subprocess
import sys

import pytest
import rich.console

from retrieval import files
from retrieval.client import Hit
from retrieval.index.bm25 import Analyzer, BM25Index
from retrieval.index.store import write_store
from retrieval.search import search_server, show
from tests import here
from tests.conftest import ROOT

pytestmark = pytest.mark.slow


def printed(query, hits, **options):
  out = io.StringIO()
  console = rich.console.Console(file=out, width=80, **options)
  show(console, query, hits, Analyzer())
  return out.getvalue()


def run(*args):
  return here.run('retrieval.search', *args)


def test_words_are_marked_as_the_server_compares_them(server):
  found, analyzer = search_server(server.url, ['hamlet prince', 'zzz'], 3)
  assert [hit.id for hit in found[0]] == ['2', '0'] and found[1] == []
  assert analyzer.stemmer == 'english'


def test_marks_by_stars_without_colour_and_by_colour_with():
  hits = [Hit('7', '', 'Swimming', 'They swim [bold]daily[/bold].', 1.25)]
  assert '1. T  id 8' in printed('x', [Hit('8', '', 'T', '', None)])
  plain = printed('he swims', hits)
  assert '1. *Swimming*  1.250  id 7' in plain
  assert 'They *swim* [bold]daily[/bold].' in plain
  colour = printed(
    'he swims', hits, force_terminal=True, color_system='standard'
  )
  assert '\x1b[1;33mswim\x1b[0m' in colour and '*swim*' not in colour


def test_escape_sequences_of_a_passage_do_not_reach_the_terminal():
  hits = [Hit('\x1b]0;x\x07', '', 'a\x1b[2J', 'b\x9b31m\u202ec \ud800', 1.0)]
  text = printed('\x1b[31mquery', hits)
  assert not set(text) & set('\x1b\x07\x9b\u202e\ud800')


def test_command(server, corpus_path):
  asked = '--topk=2', 'hamlet tragedy', 'zzz'
  # One is a process of its own: nothing else has set up logging there.
  command = sys.executable, '-m', 'retrieval.search', f'--url={server.url}'
  options = dict(capture_output=True, text=True, timeout=60, cwd=ROOT)
  env = dict(os.environ, COLUMNS='100')  # as `here.run`
  process = subprocess.run([*command, *asked], env=env, **options)
  for done in (process, run(f'--corpus={corpus_path}', *asked)):
    assert done.returncode == 0, done.stderr
    assert '*Hamlet* is a *tragedy*' in done.stdout
    assert 'no passage has any word' in done.stdout
    assert 'HTTP Request' not in done.stderr
    assert done.stdout == process.stdout


def test_command_errors(tmp_path, corpus_path):
  for args, said in (
    (['--url=http://127.0.0.1:1', 'x'], 'unreachable'),
    (['--url=127.0.0.1:1', 'x'], 'http://host:port'),
    ([f'--corpus={tmp_path}/absent', 'x'], 'No such file'),
    ([f'--corpus={corpus_path}'], '"query"'),
    (['x'], '--url, --corpus'),
    ([f'--corpus={corpus_path}', '--nprobe=3', 'x'], 'needs --index_folder'),
  ):
    done = run(*args)
    assert done.returncode != 0
    assert said in done.stderr and 'Traceback' not in done.stderr, done.stderr


def test_an_index_folder_answers_as_the_corpus_does(corpus_path, tmp_path):
  store = write_store(corpus_path, tmp_path / 'corpus.arrow')
  index = BM25Index.build(store.contents, tmp_path / 'bm25')
  files.write_json(
    tmp_path / 'manifest.json',
    {
      'format': 1,
      'vectors': None,
      'indexes': {'bm25': index.parameters},
      'corpus': {'count': len(store), 'sha256': store.sha256, 'source': 'c'},
    },
  )
  there = [
    run(source, '--topk=2', 'hamlet tragedy', 'same')
    for source in (f'--corpus={corpus_path}', f'--index_folder={tmp_path}')
  ]
  assert '*Hamlet* is a *tragedy*' in there[0].stdout, there[0].stderr
  assert there[0].stdout == there[1].stdout
  for flag, said in (
    ('--index=dense_jax', "'dense_jax'"),
    ('--faiss_gpu', '--faiss_gpu'),
  ):
    done = run(f'--index_folder={tmp_path}', flag, 'x')
    assert done.returncode == 1 and 'Traceback' not in done.stderr
    assert said in done.stderr
