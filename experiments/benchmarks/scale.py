"""What 21 million passages take of disk, memory and time, from a run on fewer.

  python -m experiments.benchmarks.scale --passages=1000000 --out=scale.json

Generates passages of 100 words (Zipf's law, the English stop words being the
most frequent), writes the JSONL, the store and a BM25 index of each, and asks
it questions of 9 words; writes vectors of 768 numbers and FAISS indexes of
them. All of it at a quarter of the size and at the full size, each step in a
process of its own: a line through the two tells what is fixed from what grows.
The last table is the plan for wiki-18.

What the plan does not measure, it says. Vectors are generated (around 4096
centres), since a CPU would encode a million passages for days: how fast an
encoder of e5-base's size is, random weights, is measured on a few. `dense_jax`
is told from shapes. A graph (HNSW) over a million vectors takes long to build,
so one over fewer is: its bytes grow with them, its time by their number and
its logarithm, which leaves out that the fewer lie in the cache. IVF has as
many lists at both sizes; of the 16,384 that 21 million passages deserve,
k-means takes 256 times as long (64 vectors for each list), and finding the
list of each vector 16 times.

Words come independently, so that a passage has about one and a half times as
many different ones as a real passage: disk and time of the BM25 index, and
time of its search, are overstated by that. So is what grows with the
vocabulary, slower than a line: terms, and memory of the index build.
"""

from collections.abc import Sequence
import functools
import json
import math
import pathlib
import string
import tempfile
import time

from absl import flags
import numpy as np

from experiments import common
from experiments.benchmarks import generated, harness, memory

WIKI = 21_015_324  # passages of wiki-18
STEPS = ('generate', 'store', 'bm25', 'search', 'vectors', 'flat', 'ivf')
_WORDS = 100
_QUERY_WORDS, _QUERIES = 9, 128
_IVF = 'IVF1024,PQ64'
_HNSW, _LINKED = 'HNSW64', 65_536  # vectors in the graph
_ENCODED = 64  # passages


def generate(folder: pathlib.Path, count: int) -> dict:
  with open(folder / 'corpus.jsonl', 'w') as f:
    for i, text in enumerate(generated.texts(count, _WORDS, 0)):
      f.write(json.dumps({'id': str(i), 'contents': f'"{i}"\n{text}'}) + '\n')
  return {'disk_bytes': _size(folder / 'corpus.jsonl')}


def store(folder: pathlib.Path, count: int) -> dict:
  from retrieval.index.store import write_store

  write_store(folder / 'corpus.jsonl', folder / 'corpus.arrow')
  return {'disk_bytes': _size(folder / 'corpus.arrow')}


def bm25(folder: pathlib.Path, count: int) -> dict:
  from retrieval.index.bm25 import BM25Index
  from retrieval.index.store import open_store

  corpus = open_store(folder / 'corpus.arrow')
  BM25Index.build(corpus.contents, folder / 'bm25')
  lengths = json.loads((folder / 'bm25/bm25.json').read_text())['lengths']
  return {
    'disk_bytes': _size(folder / 'bm25'),
    # Of a file without a name, which `memory.Peak` does not see.
    'temporary_bytes': (8 + 4) * lengths['values'],
    'scores': lengths['values'],
    'terms': lengths['terms'],
  }


def search(folder: pathlib.Path, count: int) -> dict:
  from retrieval.index.bm25 import BM25Index
  from retrieval.index.store import open_store

  begun = time.perf_counter()
  corpus = open_store(folder / 'corpus.arrow')
  index = BM25Index.open(folder / 'bm25')
  opened = time.perf_counter() - begun
  queries = list(generated.texts(_QUERIES, _QUERY_WORDS, 1))

  def read(query: str) -> None:
    ids, _ = index.search([query], 3)
    for i in ids[0]:
      if i >= 0:
        corpus[i]

  index.search(queries, 3)  # pages of the index are in memory from here on
  single = [harness.seconds(read, query) for query in queries]
  return {
    'open_s': opened,
    'one_query_s': float(np.median(single)),
    'one_query_p99_s': float(np.quantile(single, 0.99)),
    'batch_128_s': harness.seconds(index.search, queries, 3),
  }


def vectors(folder: pathlib.Path, count: int) -> dict:
  from retrieval.index import vectors
  from retrieval.index.store import open_store

  corpus = open_store(folder / 'corpus.arrow')
  encoder = generated.Generated()
  seconds = harness.seconds(
    lambda: vectors.encode(corpus, encoder, folder, dtype='float16')
  )
  return {
    'disk_bytes': _size(folder / 'vectors.npy'),
    'work_s': seconds - encoder.seconds,
  }


def _faiss(folder: pathlib.Path, count: int, factory: str) -> dict:
  from retrieval.index import dense_faiss
  from retrieval.index.vectors import open_vectors

  rows, path = open_vectors(folder), folder / 'faiss.index'
  seconds = harness.seconds(dense_faiss.build, rows, factory, path)
  index, made = dense_faiss.DenseFaiss(path, None), [*folder.glob('faiss.*')]
  q = rows[:: len(rows) // _QUERIES][:_QUERIES].astype(np.float32)
  index.search_vectors(q, 3)  # pages of the index are in memory from here on
  single = [
    harness.seconds(index.search_vectors, one[None], 3) for one in q[:16]
  ]
  found = {
    'disk_bytes': sum(map(_size, made)),
    'work_s': seconds,
    'one_query_s': float(np.median(single)),
    'batch_128_s': harness.seconds(index.search_vectors, q, 3),
  }
  for part in made:
    part.unlink()
  return found


flat = functools.partial(_faiss, factory='Flat')
ivf = functools.partial(_faiss, factory=_IVF)


def hnsw(folder: pathlib.Path, count: int) -> dict:
  from retrieval.index import dense_faiss

  rows = generated.Generated().encode_passages([''] * count)
  path = folder / 'a.index'
  seconds = harness.seconds(dense_faiss.build, rows, _HNSW, path)
  return {'disk_bytes': _size(path), 'work_s': seconds}


def encode(folder: pathlib.Path, count: int) -> dict:
  """Passages a second of an encoder of e5-base's size, random weights."""
  import tokenizers

  from experiments.benchmarks import retrieval_gpu
  from retrieval.index.encoder import Encoder
  from tests.golden import encoders as golden

  model = retrieval_gpu.write_encoder(folder, generated.DIM)
  pieces = [c for c in string.printable if not c.isspace() and not c.isupper()]
  vocabulary = [*golden.VOCAB[:5], *pieces, *(f'##{c}' for c in pieces)]
  size = retrieval_gpu.E5_BASE['vocab_size']
  frequent = (generated.word(rank) for rank in range(2 * size))
  vocabulary = list(dict.fromkeys([*vocabulary, *frequent]))
  tokenizers.BertWordPieceTokenizer(
    {token: i for i, token in enumerate(vocabulary[:size])}
  ).save(str(model / 'tokenizer.json'))
  encoder = Encoder(model)
  passages = list(generated.texts(count, _WORDS, 0))
  tokens = sum(
    int(lengths[: len(at)].sum())
    for at, _, lengths in encoder.batches(passages, 'passage')
  )
  encoder.encode_passages(passages)  # compiles
  seconds = harness.seconds(encoder.encode_passages, passages)
  return {
    'passages_per_s': len(passages) / seconds,
    'tokens_per_passage': tokens / len(passages),
  }


def _size(path: pathlib.Path) -> int:
  files = path.iterdir() if path.is_dir() else [path]
  return sum(file.stat().st_size for file in files)


def measured(step: str, folder: str, count: int) -> dict:
  """The row of one step."""
  path = pathlib.Path(folder)
  before, begun = memory.used(path), time.perf_counter()
  with memory.Peak(path) as peak:
    found = globals()[step](path, count)
  seconds = time.perf_counter() - begun
  kept = found.get('disk_bytes', 0)
  return {
    'step': step,
    'passages': count,
    'seconds': seconds,
    'peak_bytes': peak.bytes,
    'temporary_bytes': max(0, peak.disk - before - kept),
    **found,
  }


def run(steps: Sequence[str], count: int) -> list[dict]:
  """Steps at one size, each in a process of its own; a row for each."""
  rows = []
  with tempfile.TemporaryDirectory(dir=_FOLDER.value or None) as folder:
    for step in steps:
      env = {'JAX_PLATFORMS': 'cpu'}
      rows.append(harness.apart(measured, step, folder, count, env=env))
      print(common.table(rows[-1:]), flush=True)
  return rows


def extrapolate(few: list[dict], many: list[dict]) -> list[dict]:
  """The line through two sizes, at 21 million passages."""
  lines = []
  for a, b in zip(few, many, strict=True):
    for key, value in b.items():
      if key in ('step', 'passages'):
        continue
      # Nothing shrinks with the corpus: a negative slope is noise.
      slope = max(value - a[key], 0) / (b['passages'] - a['passages'])
      lines.append(
        {
          'what': f'{b["step"]} {key}',
          'measured': float(value),
          'per_million': slope * 1e6,
          'at_21M': value + slope * (WIKI - b['passages']),
        }
      )
  return lines


def plan(
  lines: list[dict], encoding: dict, linked: dict, count: int
) -> list[dict]:
  """Disk, memory and time of each step at 21 million passages.

  Args:
    lines: of `extrapolate`.
    encoding: the row of `encode`.
    linked: the row of `hnsw`.
    count: passages of the larger run.
  """
  at = {line['what']: line['at_21M'] for line in lines}

  def row(name: str, step: str, seconds: str, served: float) -> dict:
    return {
      'step': name,
      'disk_GB': at[f'{step} disk_bytes'] / 1e9,
      'temporary_GB': at[f'{step} temporary_bytes'] / 1e9,
      'memory_GB': at[f'{step} peak_bytes'] / 1e9,
      'served_GB': served / 1e9,
      'hours': at[f'{step} {seconds}'] / 3600,
      'from': f'{count // 4:,} and {count:,} passages',
    }

  def resident(name: str, size: int) -> dict:
    return {
      'step': f'dense_jax {name}',
      'served_GB': size / 1e9,
      'from': 'its shapes, on the device; reads vectors',
    }

  encoded = {
    'step': 'vectors, encoded by e5-base on this CPU',
    'memory_GB': encoding['peak_bytes'] / 1e9,
    'hours': WIKI / encoding['passages_per_s'] / 3600,
    'from': (
      f'{_ENCODED} passages of {encoding["tokens_per_passage"]:.0f} tokens at '
      f'{encoding["passages_per_s"]:.2f}/s'
    ),
  }
  few = linked['passages']
  graph = WIKI / few * linked['disk_bytes'] / 1e9
  longer = WIKI / few * math.log(WIKI) / math.log(few)
  in_memory = {
    'step': f'dense_faiss {_HNSW}',
    'disk_GB': graph,
    'memory_GB': graph,
    'served_GB': graph,
    'hours': linked['work_s'] * longer / 3600,
    'from': f'{few:,} vectors, at least',
  }
  return [
    row('corpus, JSONL', 'generate', 'seconds', 0)
    | {'hours': '', 'memory_GB': ''},
    row('store', 'store', 'seconds', 0),
    row('bm25', 'bm25', 'seconds', at['bm25 disk_bytes']),
    encoded,
    row('vectors, float16', 'vectors', 'work_s', 0),
    row('dense_faiss Flat', 'flat', 'work_s', at['flat disk_bytes']),
    row(f'dense_faiss {_IVF}', 'ivf', 'work_s', at['ivf disk_bytes']),
    in_memory,
    resident('bfloat16', WIKI * generated.DIM * 2),
    # Beside each, a float32 scale.
    resident('int8', WIKI * (generated.DIM + 4)),
  ]


def markdown(rows: list[dict]) -> str:
  keys = list(rows[0])
  cells = [keys, ['---'] * len(keys)] + [
    [f'{v:.3g}' if isinstance(v := row.get(k, ''), float) else v for k in keys]
    for row in rows
  ]
  return '\n'.join(f'| {" | ".join(line)} |' for line in cells)


def measure() -> list[dict]:
  count = _PASSAGES.value
  few, many = (run(STEPS, size) for size in (count // 4, count))
  [encoding], [linked] = run(['encode'], _ENCODED), run(['hnsw'], _LINKED)
  lines = extrapolate(few, many)
  steps = plan(lines, encoding, linked, count)
  print(
    f'\nPLAN for {WIKI:,} passages (memory: to build; served: of files mapped '
    f'or arrays on the device that should be in memory)\n\n{markdown(steps)}\n'
  )
  return [
    *lines,
    {'what': 'plan', 'steps': steps},
    {'what': 'raw rows', 'steps': [*few, *many, encoding, linked]},
  ]


if __name__ == '__main__':
  _PASSAGES = flags.DEFINE_integer('passages', 1_000_000, 'How many.', 16_000)
  _FOLDER = flags.DEFINE_string('folder', '', 'For files; else temporary.')
  harness.run('scale', measure)
