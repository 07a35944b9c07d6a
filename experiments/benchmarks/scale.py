"""What 21 million passages take of disk, memory and time, from a run on fewer.

  python -m experiments.benchmarks.scale --passages=1000000 --out=scale.json

Generates passages of 100 words (Zipf's law, the English stop words being the
most frequent), writes the JSONL, the store and a BM25 index of each, and asks
it questions of 9 words. All of it at a quarter of the size and at the full
size, each step in a process of its own: a line through the two tells what is
fixed from what grows. Words come independently, so that a passage has about
one and a half times as many different ones as a real passage: disk and time of
the index, and time of a search, are overstated by that. So is what grows with
the vocabulary, slower than a line: terms, and memory of the index build.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import numpy as np
from absl import app
from absl import flags

from experiments.benchmarks import common

WIKI = 21_015_324  # passages of wiki-18
STEPS = ('generate', 'store', 'bm25', 'search')
_WORDS, _VOCABULARY = 100, 8_000_000
_CHUNK = 10_000  # passages generated at once
_QUERY_WORDS, _QUERIES = 9, 128
_LETTERS = str.maketrans('0123456789abcdef', 'bcdfghjklmnpqrtv')

_PASSAGES = flags.DEFINE_integer('passages', 1_000_000, 'How many.', 1000)
_FOLDER = flags.DEFINE_string('folder', '', 'For the files; else temporary.')
_OUT = flags.DEFINE_string('out', '', 'JSON file to write.')
_LOAD = flags.DEFINE_bool('allow_load', False, 'Run on a busy machine.')


def texts(count: int, words: int, seed: int) -> Iterator[str]:
  """`count` texts by Zipf's law, steeper among rare words.

  The bend is that of Ferrer i Cancho and Sole, 2001: 100,000 different words
  in 26,000 passages, as in Wikipedia, and 4 million in 21 million.
  """
  from retrieval.bm25 import STOP_WORDS

  stop = sorted(STOP_WORDS['english'])
  rank = np.arange(_VOCABULARY)
  shares = np.cumsum((1 + rank / 5000) ** -0.7 / (rank + 2.7))
  shares /= shares[-1]
  rng = np.random.default_rng(seed)
  for first in range(0, count, _CHUNK):
    size = (min(_CHUNK, count - first), words)
    for row in np.searchsorted(shares, rng.random(size)).tolist():
      # Rank to word: digits are letters that no stemmer takes for a suffix.
      yield ' '.join(
        stop[r] if r < len(stop) else f'{r:x}'.translate(_LETTERS) for r in row
      )


def generate(folder: pathlib.Path, count: int) -> dict:
  with open(folder / 'corpus.jsonl', 'w') as f:
    for i, text in enumerate(texts(count, _WORDS, 0)):
      f.write(json.dumps({'id': str(i), 'contents': f'"{i}"\n{text}'}) + '\n')
  return {'disk_bytes': _size(folder / 'corpus.jsonl')}


def store(folder: pathlib.Path, count: int) -> dict:
  from retrieval.store import write_store

  write_store(folder / 'corpus.jsonl', folder / 'corpus.arrow')
  return {'disk_bytes': _size(folder / 'corpus.arrow')}


def bm25(folder: pathlib.Path, count: int) -> dict:
  from retrieval.bm25 import BM25Index
  from retrieval.store import open_store

  corpus = open_store(folder / 'corpus.arrow')
  BM25Index.build(corpus.contents, folder / 'bm25')
  lengths = json.loads((folder / 'bm25/bm25.json').read_text())['lengths']
  return {
    'disk_bytes': _size(folder / 'bm25'),
    'temporary_bytes': (8 + 4) * lengths['values'],
    'scores': lengths['values'], 'terms': lengths['terms'],
  }


def search(folder: pathlib.Path, count: int) -> dict:
  from retrieval.bm25 import BM25Index
  from retrieval.store import open_store

  begun = time.perf_counter()
  corpus = open_store(folder / 'corpus.arrow')
  index = BM25Index.open(folder / 'bm25')
  opened = time.perf_counter() - begun
  queries = list(texts(_QUERIES, _QUERY_WORDS, 1))
  index.search(queries, 3)  # pages of the index are in memory from here on
  single = []
  for query in queries:
    begun = time.perf_counter()
    ids, _ = index.search([query], 3)
    for i in ids[0]:
      if i >= 0:
        corpus[i]
    single.append(time.perf_counter() - begun)
  begun = time.perf_counter()
  index.search(queries, 3)
  batch = time.perf_counter() - begun
  return {
    'open_s': opened, 'one_query_s': float(np.median(single)),
    'one_query_p99_s': float(np.quantile(single, 0.99)), 'batch_128_s': batch,
  }


def _size(path: pathlib.Path) -> int:
  files = path.iterdir() if path.is_dir() else [path]
  return sum(file.stat().st_size for file in files)


class Peak:
  """The most memory that no file backs, while its block runs; Linux."""

  def __enter__(self):
    self.bytes, self._done = 0, threading.Event()
    self._thread = threading.Thread(target=self._watch)
    self._thread.start()
    return self

  def __exit__(self, *exc):
    self._done.set()
    self._thread.join()

  def _watch(self):
    while True:
      status = pathlib.Path('/proc/self/status').read_text()
      found = int(status.partition('RssAnon:')[2].split()[0]) * 1024
      self.bytes = max(self.bytes, found)
      if self._done.wait(0.02):
        return


def child(step: str, folder: str, count: str) -> None:
  begun = time.perf_counter()
  with Peak() as peak:
    found = globals()[step](pathlib.Path(folder), int(count))
  seconds = time.perf_counter() - begun
  print(json.dumps({
    'step': step, 'passages': int(count), 'seconds': seconds,
    'peak_bytes': peak.bytes, **found,
  }))


def run(count: int, folder: pathlib.Path) -> list[dict]:
  """All steps at one size; a row for each."""
  rows = []
  for step in STEPS:
    done = subprocess.run(
      [sys.executable, '-m', 'experiments.benchmarks.scale', '--child', step,
       str(folder), str(count)],
      cwd=common.ROOT, stdout=subprocess.PIPE, text=True, check=True,
      env={**os.environ, 'JAX_PLATFORMS': 'cpu'},
    )
    rows.append(json.loads(done.stdout.splitlines()[-1]))
    print(common.table(rows[-1:]), flush=True)
  return rows


def extrapolate(few: list[dict], many: list[dict]) -> list[dict]:
  """The line through two sizes, at 21 million passages."""
  plan = []
  for a, b in zip(few, many):
    for key, value in b.items():
      if key in ('step', 'passages'):
        continue
      # Nothing shrinks with the corpus: a negative slope is noise.
      slope = max(value - a[key], 0) / (b['passages'] - a['passages'])
      plan.append({
        'what': f'{b["step"]} {key}', 'measured': float(value),
        'per_million': slope * 1e6,
        'at_21M': value + slope * (WIKI - b['passages']),
      })
  return plan


def main(argv):
  del argv
  if not _LOAD.value:
    common.require_idle()
  environment = common.environment()
  rows = []
  for count in (_PASSAGES.value // 4, _PASSAGES.value):
    with tempfile.TemporaryDirectory(dir=_FOLDER.value or None) as folder:
      rows.append(run(count, pathlib.Path(folder)))
  plan = extrapolate(*rows)
  raw = {'what': 'raw rows', 'steps': [*rows[0], *rows[1]]}
  common.report(_OUT.value, 'scale', [*plan, raw], [], environment)


if __name__ == '__main__':
  if sys.argv[1:2] == ['--child']:
    child(*sys.argv[2:5])
  else:
    app.run(main)
