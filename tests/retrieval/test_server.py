"""The server as a process: start, stop, ports, parents, attacks by socket."""

import concurrent.futures
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time

import httpx
import pytest

from retrieval import process
from retrieval.client import RetrievalClient, RetrievalError, retrieve_sync
from retrieval.process import ServerError, start_server
from tests import here
from tests.golden import encoders

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(*args):
  """The command in this process: for what ends before it serves."""
  return here.run('retrieval.server', *args)


def wait_until(condition, seconds=60):
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end, 'waited in vain'
    time.sleep(0.05)


def alive(pid):
  try:
    stat = pathlib.Path(f'/proc/{pid}/stat').read_text()
  except OSError:
    return False
  return stat.rpartition(')')[2].split()[0] != 'Z'


@pytest.mark.long
def test_a_server_from_its_start_to_the_next_one(corpus_path, tmp_path):
  """Starts, answers, stops; its port is free at once; a kill is survived."""
  log = tmp_path / 'logs' / 'server.log'
  with start_server(
    corpus_path, log_path=log, topk=1, bm25_preset='search_r1', b=0.5
  ) as server:
    assert server.running and alive(server.pid)
    response = httpx.post(
      f'{server.url}/retrieve', json={'queries': ['hamlet']}
    )
    assert len(response.json()['result'][0]) == 1
    index = httpx.get(f'{server.url}/health').json()['index']
    assert (index['k1'], index['b']) == (0.9, 0.5)
    port = int(server.url.rpartition(':')[2])
  assert not server.running
  assert server.stop() == 0  # graceful, and twice is harmless
  text = log.read_text()
  assert '7 passages' in text and f'ready at {server.url}' in text
  assert 'WARNING' not in text and 'Traceback' not in text
  with pytest.raises(RetrievalError):
    retrieve_sync(server.url, ['x'], 1, retries=0)

  options = dict(backoff_s=0.2, retries=50, deadline_s=30, max_backoff_s=0.5)
  with concurrent.futures.ThreadPoolExecutor(1) as thread:
    with start_server(corpus_path, port=port, log_path=log) as server:
      assert retrieve_sync(server.url, ['hamlet'], 1)[0]
      os.kill(server.pid, signal.SIGKILL)
    waiting = thread.submit(retrieve_sync, server.url, ['hamlet'], 1, **options)
    with start_server(corpus_path, port=port, log_path=log):
      assert waiting.result(30)[0][0].id == '0'


def test_same_bytes_for_the_same_request(server):
  body = json.dumps({'queries': ['hamlet', 'same'], 'return_scores': True})
  answers = {
    httpx.post(f'{server.url}/retrieve', content=body).content for _ in range(5)
  }
  assert len(answers) == 1


def test_port_taken(corpus_path, tmp_path):
  with socket.create_server(('127.0.0.1', 0)) as taken:
    port = taken.getsockname()[1]
    done = run(f'--corpus={corpus_path}', f'--port={port}')
    assert done.returncode == 1
    assert f'127.0.0.1:{port}' in done.stderr and '--port=0' in done.stderr
    with pytest.raises(ServerError, match='in use') as error:
      start_server(corpus_path, port=port, log_path=tmp_path / 'log')
    assert 'status 1' in str(error.value)
    assert str(tmp_path / 'log') in str(error.value)
    assert 'Traceback' not in str(error.value)


@pytest.mark.parametrize(
  'content, said', [('', 'empty'), ('{"id": "1"}\n', ":1: no field 'contents'")]
)
def test_bad_corpus(tmp_path, content, said):
  path = tmp_path / 'c.jsonl'
  path.write_text(content)
  done = run(f'--corpus={path}', '--port=0')
  assert done.returncode == 1 and f'{path}' in done.stderr
  assert said in done.stderr


def test_absent_options_are_no_flags():
  assert process._argv({'record': None, 'topk': 5, 'index': ['a', 'b']}) == [
    '--topk=5',
    '--index=a',
    '--index=b',
  ]


def test_bad_flags(corpus_path):
  done = run()
  assert done.returncode == 1 and 'corpus' in done.stderr
  assert '--web' in done.stderr and 'none' in done.stderr
  done = run(f'--corpus={corpus_path}', '--replay=x', '--record=y')
  assert done.returncode == 1 and '--corpus and --replay' in done.stderr
  done = run(f'--corpus={corpus_path}', '--topk=9', '--max_topk=3')
  assert done.returncode == 1 and '--max_topk=3' in done.stderr
  for flag, needed in (
    ('--index=dense_jax', 'index_folder'),
    ('--web_max_calls=3', 'web'),
    ('--replay_identity=x', 'replay'),
    ('--rerank_n=3', 'index_folder'),
  ):
    done = run(f'--corpus={corpus_path}', flag)
    assert done.returncode == 1, flag
    assert f'{flag.partition("=")[0]} needs --{needed}' in done.stderr
  done = run(f'--corpus={corpus_path}', '--port=0', '--stemmer=klingon')
  assert done.returncode == 1 and 'klingon' in done.stderr


def test_not_ready_in_time(corpus_path, tmp_path):
  with pytest.raises(ServerError, match='0.01 s'):
    start_server(corpus_path, log_path=tmp_path / 'log', timeout_s=0.01)


def test_help_is_useful():
  text = run('--help').stdout
  for word in ('--corpus', '--port_file', '--parent_pid', 'curl', '8000'):
    assert word in text


def test_bound_elsewhere_is_loud(tmp_path):
  done = run(f'--corpus={tmp_path}/absent', '--host=0.0.0.0', '--port=0')
  assert 'WARNING: bound to 0.0.0.0' in done.stderr


def test_a_token_guards_a_server_bound_elsewhere(
  corpus_path, tmp_path, monkeypatch
):
  log, token = tmp_path / 'log', tmp_path / 'token'
  token.write_text('s3cret\n')
  monkeypatch.delenv('RETRIEVAL_TOKEN', raising=False)
  with start_server(
    corpus_path, log_path=log, host='0.0.0.0', token_file=token
  ) as server:
    url = server.url.replace('0.0.0.0', '127.0.0.1')
    with pytest.raises(RetrievalError) as error:
      retrieve_sync(url, ['hamlet'], 1)
    assert error.value.kind == 'unauthorised'
    assert retrieve_sync(url, ['hamlet'], 1, token='s3cret')[0]
    assert httpx.get(f'{url}/ready').status_code == 200
    assert 'corpus' not in httpx.get(f'{url}/health').json()
    monkeypatch.setenv('RETRIEVAL_TOKEN', 's3cret')
    assert retrieve_sync(url, ['hamlet'], 1)[0]
  assert 'WARNING' not in log.read_text() and 's3cret' not in log.read_text()


@pytest.mark.parametrize('content', ['', 'two words', 'ünicode'])
def test_a_token_that_is_none(corpus_path, tmp_path, content):
  token = tmp_path / 'token'
  token.write_text(content)
  done = run(f'--corpus={corpus_path}', '--port=0', f'--token_file={token}')
  assert done.returncode == 1 and str(token) in done.stderr
  assert content == '' or content not in done.stderr


@pytest.mark.long
def test_recorded_answers_are_replayed_without_the_corpus(
  corpus_path, tmp_path
):
  store, log = tmp_path / 'answers.sqlite', tmp_path / 'log'
  body = {'queries': ['hamlet', 'zzz', 'same'], 'return_scores': True}
  with start_server(corpus_path, log_path=log, record=store) as server:
    recorded = httpx.post(f'{server.url}/retrieve', json=body)
    health = httpx.get(f'{server.url}/health').json()
    assert health['corpus']['count'] == 7 and health['index']['name'] == 'bm25'
  assert recorded.status_code == 200
  with start_server(log_path=log, replay=store) as server:
    replayed = httpx.post(f'{server.url}/retrieve', json=body)
    assert replayed.content == recorded.content
    assert httpx.get(f'{server.url}/ready').status_code == 200
    again = httpx.get(f'{server.url}/health').json()
    assert again['identity'] == health['identity']
    # A miss is an error that names the query, and spoils no other request.
    missed = httpx.post(
      f'{server.url}/retrieve', json={'queries': ['hamlet', 'new one']}
    )
    assert missed.status_code == 502
    detail = missed.json()['detail']
    assert [d['loc'] for d in detail] == [['body', 'queries', 1]]
    assert 'new one' in detail[0]['msg']
    with pytest.raises(RetrievalError) as error:
      retrieve_sync(server.url, ['new one', 'hamlet'], 3)
    assert error.value.kind == 'search_failed' and error.value.queries == (0,)
    assert httpx.post(f'{server.url}/retrieve', json=body).status_code == 200
  done = run('--port=0', f'--replay={tmp_path}/absent')
  assert done.returncode == 1 and 'absent' in done.stderr


@pytest.fixture(scope='module')
def folder(corpus_path, tmp_path_factory):
  """An index folder over the corpus, and tiny models."""
  root = tmp_path_factory.mktemp('folder')
  encoder = encoders.write(root, 'e5-tiny-v2')
  with pytest.MonkeyPatch.context() as m:  # each length is a program
    m.setitem(encoders.CONFIG, 'max_position_embeddings', 24)
    reranker = encoders.write(root, encoders.RERANKER)
  done = here.run(
    'retrieval.build_index',
    f'--corpus={corpus_path}',
    f'--out={root}/index',
    f'--encoder={encoder}',
    '--index=bm25',
    '--index=dense_jax',
    '--index=dense_faiss:Flat',
  )
  assert done.returncode == 0, done.stderr
  return root / 'index', encoder, reranker


def loaded(server):
  """Which heavy libraries the process of a server has mapped."""
  maps = pathlib.Path(f'/proc/{server.pid}/maps').read_text()
  return {name for name in ('jaxlib', 'faiss', 'torch') if f'/{name}' in maps}


BODY = {
  'queries': ['hamlet prince', 'same', 'zzz'],
  'topk': 2,
  'return_scores': True,
}


def post(server):
  return httpx.post(f'{server.url}/retrieve', json=BODY, timeout=60)


def test_a_folder_with_bm25_answers_like_its_corpus(folder, server, tmp_path):
  path, *_ = folder
  with start_server(log_path=tmp_path / 'log', index_folder=path) as other:
    answers = [post(s) for s in (server, other)]
    health = httpx.get(f'{other.url}/health').json()
    assert loaded(other) == set()
  assert answers[0].status_code == 200
  assert answers[0].content == answers[1].content
  assert health['corpus']['count'] == 7 and health['index']['name'] == 'bm25'


@pytest.mark.long
def test_several_indexes_are_fused_and_reranked(folder, tmp_path, monkeypatch):
  path, encoder, reranker = folder
  smi = tmp_path / 'nvidia-smi'
  smi.write_text('#!/bin/sh\necho 81559\n')
  smi.chmod(0o755)
  monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')
  monkeypatch.delenv('JAX_PLATFORMS', raising=False)
  options = dict(
    log_path=tmp_path / 'log',
    index_folder=path,
    encoder=encoder,
    max_batch=3,
    query_length=24,
  )
  names = ['bm25', 'dense_faiss:Flat']
  with start_server(index=names, **options) as server:
    rows = post(server).json()['result']
    index = httpx.get(f'{server.url}/health').json()['index']
    metrics = httpx.get(f'{server.url}/metrics').text
  assert index['name'] == 'hybrid' and [len(row) for row in rows] == [2, 2, 2]
  assert rows[0][0]['document']['id'] in ('2', '0')
  for stage in ('encode', 'search', 'batch'):
    line = f'retrieval_stage_seconds_count{{stage="{stage}"}} '
    assert float(metrics.split(line)[1].split()[0]) > 0
  with start_server(
    index='dense_jax', precision='int8', rerank=reranker, rerank_n=2, **options
  ) as server:
    index = httpx.get(f'{server.url}/health').json()['index']
    rows = post(server).json()['result']
    metrics = httpx.get(f'{server.url}/metrics').text
  assert index['name'] == 'rerank' and index['n'] == 2
  assert index['index']['precision'] == 'int8'
  # A GPU would be taken in that part, had JAX found one.
  share = (tmp_path / 'log').read_text().split('MEM_FRACTION=')[1].split(':')[0]
  assert 0.03 < float(share) < 0.05
  assert all(row[0]['score'] >= row[1]['score'] for row in rows)
  assert 'stage="rerank"' in metrics


@pytest.mark.long
def test_a_folder_that_does_not_fit_is_refused(folder, tmp_path):
  path, encoder, _ = folder
  for said, flags in (
    ("'dense_faiss:HNSW64'", ['--index=dense_faiss:HNSW64']),
    ('--encoder', ['--index=dense_jax']),
    ('--faiss_gpu', ['--index=bm25', '--faiss_gpu']),
    ('no manifest.json', [f'--index_folder={tmp_path}']),
  ):
    done = run('--port=0', f'--index_folder={path}', *flags)
    assert done.returncode == 1 and said in done.stderr
  # A process of its own, since it opens an encoder.
  with pytest.raises(ServerError, match='GPU.*--faiss_gpu') as error:
    start_server(
      log_path=tmp_path / 'log',
      index_folder=path,
      index='dense_faiss:Flat',
      encoder=encoder,
      faiss_gpu=True,
    )
  assert 'Traceback' not in str(error.value)


_WARM = """
import json, pathlib, sys
import jax, numpy as np
from absl import flags
from retrieval import server
from tests.retrieval.test_encoder import compiled, random_texts
def home():
  raise RuntimeError('no home')
pathlib.Path.home = home
server.define_flags()
flags.FLAGS(sys.argv)
searcher, _, programs = server.open_searcher(flags.FLAGS)
for program in programs:
  program()
rng = np.random.default_rng(0)
with compiled() as found:
  most = flags.FLAGS.max_batch
  for count in (1, most, *rng.integers(1, most + 1, 12)):
    searcher.search(random_texts(rng, count), int(rng.integers(1, 11)))
print(len(programs), len(found), json.dumps(searcher.identity))
"""


@pytest.mark.long
@pytest.mark.parametrize(
  'index, rerank, most',
  [
    (['dense_faiss:Flat'], False, 9),
    (['dense_jax', 'dense_faiss:Flat', 'bm25'], True, 5),
  ],
)
def test_whatever_is_served_compiles_before_it_is_ready(
  folder, index, rerank, most
):
  path, encoder, reranker = folder
  flags = [
    f'--index_folder={path}',
    f'--encoder={encoder}',
    f'--max_batch={most}',
    '--query_length=24',
    '--dtype=bfloat16',
    *(f'--index={name}' for name in index),
  ]
  if rerank:  # of fewer positions than pairs usually have
    flags += [f'--rerank={reranker}', '--rerank_n=3', '--rerank_dtype=bfloat16']
  nowhere = ('XDG_CACHE_HOME', 'JAX_COMPILATION_CACHE_DIR')
  done = subprocess.run(
    [sys.executable, '-c', _WARM, *flags],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=300,
    env={k: v for k, v in os.environ.items() if k not in nowhere},
  )
  assert done.returncode == 0, done.stderr
  assert '--compile_cache' in done.stderr
  programs, compiled, identity = done.stdout.split(' ', 2)
  assert int(programs) > 3 and int(compiled) == 0
  assert '"encoder_dtype": "bfloat16"' in identity
  assert '"query_length": 24' in identity
  assert not rerank or '"dtype": "bfloat16"' in identity


def test_the_web_is_not_asked_beyond_its_budget(tmp_path, monkeypatch):
  log = tmp_path / 'log'
  monkeypatch.delenv('SERPER_API_KEY', raising=False)
  done = run('--port=0', '--web=serper')
  assert done.returncode == 1 and 'SERPER_API_KEY' in done.stderr
  monkeypatch.setenv('SERPER_API_KEY', 's3cret')
  with start_server(log_path=log, web='serper', web_max_calls=0) as server:
    assert httpx.get(f'{server.url}/ready').status_code == 200
    assert 'serper' in str(httpx.get(f'{server.url}/health').json()['identity'])
    answer = httpx.post(f'{server.url}/retrieve', json={'queries': ['hamlet']})
    assert answer.status_code == 502 and '0 calls' in answer.text
    assert loaded(server) == set()
  assert 's3cret' not in log.read_text() + answer.text


def test_a_warm_up_that_fails_ends_the_start(corpus_path, tmp_path):
  # A disk that fails only once the index is asked.
  script = textwrap.dedent(rf"""
    import sys
    from absl import app
    from retrieval.index import bm25
    from retrieval import server
    def search(*_):
      raise OSError('a bad sector \x1b[31m')
    bm25.BM25Index.search = search
    server.define_flags()
    sys.argv += ['--corpus={corpus_path}', '--port=0',
                 '--port_file={tmp_path}/port']
    app.run(server.main)
  """)
  done = subprocess.run(
    [sys.executable, '-c', script],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert done.returncode == 1
  assert 'error: OSError: a bad sector ?[31m' in done.stderr
  assert '\x1b' not in done.stderr and 'Traceback' not in done.stderr
  assert not (tmp_path / 'port').exists()


@pytest.mark.long
def test_sigterm_finishes_what_it_took(corpus_path, tmp_path):
  # Waiting for others stands for a slow search: 2 s, since a busy machine
  # takes its time to connect. The health says when all are taken.
  server = start_server(corpus_path, log_path=tmp_path / 'log', batch_ms=2000)
  with (
    server,
    concurrent.futures.ThreadPoolExecutor(4) as threads,
    httpx.Client(timeout=20) as client,
    httpx.Client() as idle,
  ):
    idle.get(f'{server.url}/health')  # kept alive, which holds nothing up
    answers = [
      threads.submit(
        client.post, f'{server.url}/retrieve', json={'queries': ['hamlet']}
      )
      for _ in range(4)
    ]
    while client.get(f'{server.url}/health').json()['served']['requests'] < 4:
      time.sleep(0.02)
    os.kill(server.pid, signal.SIGTERM)
    assert [a.result().status_code for a in answers] == [200] * 4
    assert server.stop() == 0


def test_dies_with_its_parent(corpus_path, tmp_path):
  """A trainer that is killed outright leaves no server behind."""
  log, told = tmp_path / 'log', tmp_path / 'told'
  script = textwrap.dedent(f"""
    import os, sys, time
    sys.path.insert(0, {str(ROOT)!r})
    from retrieval.process import start_server
    server = start_server({str(corpus_path)!r}, log_path={str(log)!r})
    with open({str(told)!r} + '.part', 'w') as f:
      f.write(f'{{server.pid}} {{server.url}}')
    os.replace({str(told)!r} + '.part', {str(told)!r})
    time.sleep(60)
  """)
  parent = subprocess.Popen([sys.executable, '-c', script])
  try:
    wait_until(told.exists)
    pid, url = told.read_text().split()
    assert retrieve_sync(url, ['hamlet'], 1)[0]
    parent.kill()
    # An unreaped parent is dead all the same.
    wait_until(lambda: not alive(int(pid)))
  finally:
    parent.kill()
    parent.wait()
  assert '--parent_pid' in log.read_text()


def test_parent_that_is_gone_already(corpus_path):
  gone = subprocess.Popen([sys.executable, '-c', ''])
  gone.wait()
  done = run(f'--corpus={corpus_path}', '--port=0', f'--parent_pid={gone.pid}')
  assert done.returncode == 1 and f'--parent_pid={gone.pid}' in done.stderr


@pytest.mark.parametrize(
  'raw',
  [
    b'\x16\x03\x01\x02\x00',
    b'GET\r\n\r\n',
    b'\x00' * 1000,
    b'POST /retrieve HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n{',
    b'POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n',
    b'POST /retrieve HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n'
    b'\r\nzz\r\n',
    b'POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{"que',
    b'GET /' + b'a' * 100_000 + b' HTTP/1.1\r\n\r\n',
  ],
)
def test_raw_rubbish_does_not_stop_it(server, raw):
  host, port = server.url.removeprefix('http://').split(':')
  with socket.create_connection((host, int(port)), 5) as connection:
    try:
      connection.sendall(raw)
      connection.shutdown(socket.SHUT_WR)
      connection.settimeout(5)
      answer = connection.recv(4096)
    except OSError:
      answer = b''
  assert not re.match(rb'HTTP/1.1 5', answer)
  assert retrieve_sync(server.url, ['hamlet'], 1)[0]
  assert 'Traceback' not in pathlib.Path(server.log_path).read_text()


def test_large_requests_over_http(server):
  post = f'{server.url}/retrieve'
  many = httpx.post(post, json={'queries': ['x'] * 10**6}, timeout=30)
  assert many.status_code == 422 and 'queries' in many.text
  long = httpx.post(post, json={'queries': ['x' * 100_000]}, timeout=30)
  assert long.status_code == 200 and long.json() == {'result': [[]]}  # cut
  # Nothing but words that occur everywhere, as long as may be.
  slow = httpx.post(post, json={'queries': ['same ' * 3276]}, timeout=30)
  assert len(slow.json()['result'][0]) == 3


@pytest.mark.long
def test_retrieval_never_imports_the_trainer():
  code = (
    'import sys, retrieval.server, retrieval.search, retrieval.process;'
    'sys.exit("jax" in sys.modules or "searchrl_jax" in sys.modules)'
  )
  assert subprocess.run([sys.executable, '-c', code], cwd=ROOT).returncode == 0
  # Nor is a JAX that is loaded already disturbed.
  code = (
    'import jax.lax, sys; a = sys.modules["jax"]; import retrieval.index.bm25;'
    'from jax._src import xla_bridge as x;'
    'sys.exit(x.backends_are_initialized() or sys.modules["jax"] is not a)'
  )
  assert subprocess.run([sys.executable, '-c', code], cwd=ROOT).returncode == 0


def test_client_needs_no_server_packages():
  code = (
    'import sys, retrieval.client;'
    'sys.exit("fastapi" in sys.modules or "bm25s" in sys.modules)'
  )
  assert subprocess.run([sys.executable, '-c', code], cwd=ROOT).returncode == 0
  assert RetrievalClient('http://127.0.0.1:1/').url == 'http://127.0.0.1:1'
