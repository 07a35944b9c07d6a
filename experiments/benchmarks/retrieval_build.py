"""What an index costs: seconds to build it, disk, and memory when it serves.

Of `retrieval`. Each build, and each index that serves, has a process of its
own, so that nothing is counted that another index left behind. Linux only.
"""

import ctypes
import functools
import gc
import importlib
import os
import pathlib
import statistics
import tempfile
import time

from experiments.benchmarks import harness, memory

K = 3
_READY = ('corpus.arrow', 'vectors.npy', 'vectors.json')


def ready(name: str) -> None:
  """Loads the code of an index and gives back what is free."""
  importlib.import_module(f'retrieval.index.{name.partition(":")[0]}')
  gc.collect()
  ctypes.CDLL('libc.so.6').malloc_trim(0)


def build(folder: str, out: str, name: str) -> dict:
  """Builds one index in `out`: seconds, peak MB, and the MB of its files.

  From the corpus and the vectors that the index folder `folder` holds.
  """
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
  with memory.Peak() as peak:
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
    'build_mb': (peak.bytes - peak.start) / 2**20,
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
  fields = {'anonymous_mb': 'RssAnon', 'mapped_mb': 'RssFile'}
  before = {k: memory.of(field) for k, field in fields.items()}
  index = folder_lib.open_index(folder, name, encoder=encoder)
  index.search(queries, K)
  return {k: (memory.of(fields[k]) - v) / 2**20 for k, v in before.items()}


def rows(
  folder: str, names: list[str], model: str, queries: list[str]
) -> list[dict]:
  """One row for each index, the median of builds taken in turns.

  Args:
    folder: an index folder with vectors.
    names: of indexes.
    model: folder of the encoder.
    queries: texts, all asked at once when memory is measured.
  """
  out = []
  with tempfile.TemporaryDirectory(dir=folder) as scratch:

    def once(name: str) -> dict:
      made = tempfile.mkdtemp(dir=scratch)
      return harness.apart(build, folder, made, name) | {'out': made}

    built = harness.turns({n: functools.partial(once, n) for n in names})
    for name, builds in built.items():
      last, seconds = builds[-1], [b['seconds'] for b in builds]
      out.append(
        {
          'case': f'build {name}',
          'build_s': statistics.median(seconds),
          'build_mb': max(b['build_mb'] for b in builds),
          'disk_mb': last['disk_mb'],
          **harness.apart(serve, last['out'], name, model, queries),
          'seconds': seconds,
        }
      )
  return out
