"""What an index costs: seconds to build it, disk, and memory when it serves.

    python -m experiments.benchmarks.retrieval_build build FOLDER OUT NAME
    python -m experiments.benchmarks.retrieval_build serve OUT NAME MODEL

`build` makes the index NAME in OUT from the corpus and the vectors that the
index folder FOLDER holds; `serve` opens it and answers the queries that stdin
has as a JSON list. Each prints one line of JSON, from a process of its own, so
that nothing is counted that another index left behind. Linux only.
"""

import ctypes
import gc
import importlib
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np

from experiments import common

K = 3
_SECONDS = 0.02  # between two looks at the memory of a build
_READY = ('corpus.arrow', 'vectors.npy', 'vectors.json')


def ready(name: str) -> None:
  """Loads the code of an index and gives back what is free."""
  importlib.import_module(f'retrieval.{name.partition(":")[0]}')
  gc.collect()
  ctypes.CDLL('libc.so.6').malloc_trim(0)


def resident() -> dict[str, float]:
  """MB of this process's memory, its own and mapped from files."""
  text = pathlib.Path('/proc/self/status').read_text()
  return {
    name: int(re.search(rf'{field}:\s+(\d+) kB', text)[1]) / 1024
    for name, field in (('anonymous', 'RssAnon'), ('mapped', 'RssFile'))
  }


def grown(before: dict[str, float]) -> dict[str, float]:
  now = resident()
  return {f'{name}_mb': now[name] - before[name] for name in now}


class Peak:
  """The most anonymous memory while its block runs, beyond the beginning."""

  def __enter__(self):
    self._start = self._most = resident()['anonymous']
    self._ended = threading.Event()
    self._thread = threading.Thread(target=self._look)
    self._thread.start()
    return self

  def __exit__(self, *unused):
    self._ended.set()
    self._thread.join()
    self.mb = self._most - self._start

  def _look(self):
    while not self._ended.wait(_SECONDS):
      self._most = max(self._most, resident()['anonymous'])


def build(folder: str, out: str, name: str) -> dict:
  """Builds one index in `out`: seconds, peak MB, and the MB of its files."""
  from retrieval import build_index
  from retrieval.index import folder as folder_lib

  found = folder_lib.open_folder(folder)
  for file in _READY:
    os.link(found.path / file, pathlib.Path(out, file))
  target = build_index.Folder(out)
  corpus = target.open_corpus(None)
  target.manifest['vectors'] = found.manifest['vectors']
  target.save()
  known = {*pathlib.Path(out).rglob('*')}
  settings = found.manifest['indexes'].get('bm25', {})
  ready(name)
  with Peak() as peak:
    start = time.perf_counter()
    build_index.build_indexes(
      target,
      corpus,
      [name],
      lambda: found.vectors,
      {k: v for k, v in settings.items() if k != 'name'},
    )
    seconds = time.perf_counter() - start
  target.close()
  made = [p for p in pathlib.Path(out).rglob('*') if p not in known]
  if name == 'dense_jax':  # searches the vectors as they are
    made = [pathlib.Path(out, 'vectors.npy')]
  return {
    'seconds': seconds,
    'build_mb': peak.mb,
    'disk_mb': sum(p.stat().st_size for p in made if p.is_file()) / 2**20,
  }


def serve(out: str, name: str, model: str, queries: list[str]) -> dict:
  """MB that one index adds to a process that can encode already."""
  from retrieval.index import folder as folder_lib
  from retrieval.index.encoder import Encoder

  encoder = None
  if name != 'bm25':
    encoder = Encoder(model)
    encoder.encode_queries(queries)
  folder = folder_lib.open_folder(out)
  ready(name)
  before = resident()
  index = folder_lib.open_index(folder, name, encoder=encoder)
  index.search(queries, K)
  return grown(before)


def recall_of_exact(index, vectors, q, k: int, block: int = 16384) -> float:
  """The share of the k best passages that an index finds, in [0, 1].

  The best are those of exact float32 scores, made in numpy block by block.

  Args:
    index: over the vectors, with `search_vectors`.
    vectors: [P, D].
    q: [Q, D] vectors of queries.
    k: how many count.
    block: passages scored at once.
  """
  k = min(k, len(vectors))
  scores = np.empty((len(q), 0), np.float32)
  ids = np.empty((len(q), 0), np.int64)
  for start in range(0, len(vectors), block):
    part = np.asarray(vectors[start : start + block], np.float32)
    scores = np.concatenate([scores, q @ part.T], 1)
    new = np.arange(start, start + len(part))
    ids = np.concatenate([ids, np.tile(new, (len(q), 1))], 1)
    best = np.argsort(-scores, axis=1, kind='stable')[:, :k]
    scores, ids = (np.take_along_axis(x, best, 1) for x in (scores, ids))
  found, _ = index.search_vectors(q, k)
  hits = [len(set(a) & set(b)) for a, b in zip(found.tolist(), ids.tolist())]
  return sum(hits) / (k * len(q))


def rows(
  folder: str, names: list[str], model: str, queries: list[str], reps: int
) -> list[dict]:
  """One row for each index, median of `reps` builds taken in turns.

  Args:
    folder: an index folder with vectors.
    names: of indexes.
    model: folder of the encoder.
    queries: texts, all asked at once when memory is measured.
    reps: builds of each.
  """
  with tempfile.TemporaryDirectory(dir=folder) as scratch:
    built = common.interleave(
      {
        name: lambda name=name: _build_once(folder, scratch, name)
        for name in names
      },
      reps,
    )
    return [
      {
        'case': f'build {name}',
        'build_s': statistics.median(b['seconds'] for b in built[name]),
        'build_mb': max(b['build_mb'] for b in built[name]),
        'disk_mb': built[name][-1]['disk_mb'],
        **_child(
          'serve',
          built[name][-1]['out'],
          name,
          model,
          given=json.dumps(queries),
        ),
        'seconds': [b['seconds'] for b in built[name]],
      }
      for name in names
    ]


def _build_once(folder: str, scratch: str, name: str) -> dict:
  out = tempfile.mkdtemp(dir=scratch)
  return _child('build', folder, out, name) | {'out': out}


def _child(*arguments: str, given: str = '') -> dict:
  done = subprocess.run(
    [
      sys.executable,
      '-m',
      'experiments.benchmarks.retrieval_build',
      *arguments,
    ],
    cwd=common.ROOT,
    input=given,
    stdout=subprocess.PIPE,
    text=True,
    check=True,
  )
  return json.loads(done.stdout.splitlines()[-1])


if __name__ == '__main__':
  if sys.argv[1] == 'build':
    print(json.dumps(build(*sys.argv[2:])))
  else:
    print(json.dumps(serve(*sys.argv[2:], json.load(sys.stdin))))
