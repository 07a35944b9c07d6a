"""BM25 over a million passages, against the same scores added up by NumPy.

  python -m experiments.benchmarks.bm25 --data_dir=DATA --out=FILE.json

Generates a quarter of --passages and all of them, builds an index of each in
--folder (minutes; later runs use it again), and searches them for 1,000 real
questions (qa_dev.jsonl.gz of --data_dir): 128 at once, and one after another.
The peer is the algorithm before threads: for each term, NumPy's add.at over
all of its postings; both take turns, and must find the same 10 passages. The
line through the two sizes is followed to the 21,015,324 passages of wiki-18:
an extrapolation, which no run confirms.

Words come by the frequencies of `generated`, most frequent first those of the
corpus in --data_dir and of the questions, stop words included. A quarter of
the words of a passage repeats an earlier one (Simon, 1955): as real passages
of 100 words, they then have 53 different terms. Passages have 100 words on
average, with a standard deviation of 20. Without --data_dir words and
questions are generated too.
"""

import collections
from collections.abc import Callable, Iterator
import itertools
import pathlib
import re
import statistics
import time

from absl import flags
import numpy as np

from experiments import common
from experiments.benchmarks import generated, harness, scale
from retrieval import corpus as corpora
from retrieval.index import bm25
from searchrl_jax.data import jsonl
from searchrl_jax.run import command

K, BATCH = 10, 128
_QUESTIONS, _CHUNK = 1000, 10_000
_MEAN, _SPREAD, _MOST, _REPEATED = 100, 20, 160, 0.25


def inputs() -> tuple[list[str], list[str]]:
  """The words of the data folder, most frequent first, and its questions."""
  folder = flags.FLAGS.data_dir
  if not folder:
    return [], list(generated.texts(_QUESTIONS, 9, 1))
  asked = jsonl.read(f'{folder}/qa_dev.jsonl.gz')
  questions = [row['question'] for _, row in asked]
  counts = collections.Counter()
  passages = corpora.iter_documents(f'{folder}/corpus.jsonl.gz')
  for text in itertools.chain((p.contents for p in passages), questions):
    counts.update(re.findall(r'\w+', text.lower()))
  return [word for word, _ in counts.most_common()], questions[:_QUESTIONS]


class Passages:
  """`count` texts of the words given and, past those, of generated ones."""

  def __init__(self, count: int, words: list[str]):
    self._count, self._words = count, words

  def __len__(self) -> int:
    return self._count

  def __iter__(self) -> Iterator[str]:
    rng, shares = np.random.default_rng(0), generated.shares()
    words, known = self._words, len(self._words)
    for first in range(0, self._count, _CHUNK):
      size = min(_CHUNK, self._count - first), _MOST
      ranks = np.searchsorted(shares, rng.random(size))
      repeated = rng.random(size) < _REPEATED
      source = (rng.random(size) * np.arange(_MOST)).astype(int)
      for at in range(1, _MOST):
        rows = np.flatnonzero(repeated[:, at])
        ranks[rows, at] = ranks[rows, source[rows, at]]
      lengths = rng.normal(_MEAN, _SPREAD, size[0]).clip(20, _MOST)
      for row, length in zip(ranks.tolist(), lengths.astype(int)):
        yield ' '.join(
          [
            words[rank] if rank < known else generated.word(rank)
            for rank in row[:length]
          ]
        )


def open_index(count: int, words: list[str]) -> bm25.BM25Index:
  folder = pathlib.Path(_FOLDER.value, f'{count}_{len(words)}')
  try:
    return bm25.BM25Index.open(folder)
  except ValueError:  # there is none, or of another format
    passages = Passages(count, words)
    return bm25.BM25Index.build(passages, folder, analyzer=bm25.WORDS)


class Peer:
  """The same index, one query after another on one core."""

  def __init__(self, index: bm25.BM25Index):
    self._values, self._rows = index._values, index._rows
    self._index, self._size = index, -(-len(index) // 64) * 64

  def search(self, queries: list[str], k: int):
    ids = np.full((len(queries), k), -1, np.int64)
    scores = np.full((len(queries), k), -np.inf, np.float32)
    totals = np.zeros(self._size, np.float32)
    for row, query in enumerate(queries):
      totals.fill(0)
      for edges, count in zip(*self._index._postings(query)):
        span = slice(edges[0], edges[-1])
        added = self._values[span]
        np.add.at(
          totals, self._rows[span], added if count == 1 else count * added
        )
      # The k-th largest maximum of 64 passages bounds the k-th best below.
      maxima = totals.reshape(64, -1).max(axis=0)
      bound = np.partition(maxima, len(maxima) - k)[len(maxima) - k]
      columns = np.flatnonzero(maxima >= max(bound, 1e-9))
      part = totals.reshape(64, -1)[:, columns]
      at, column = np.nonzero(part >= max(bound, 1e-9))
      best = np.argsort(-part[at, column], kind='stable')[:k]
      best = at[best] * len(maxima) + columns[column[best]]
      ids[row, : len(best)], scores[row, : len(best)] = best, totals[best]
    return ids, scores


def seconds(
  search: Callable, questions: list[str], size: int
) -> tuple[list[float], float]:
  """Of each call, `size` questions a call; processor time of all."""
  out, cpu = [], time.process_time()
  for first in range(0, len(questions), size):
    begun = time.perf_counter()
    search(questions[first : first + size], K)
    out.append(time.perf_counter() - begun)
  return out, time.process_time() - cpu


def searched(count: int, words: list[str], questions: list[str]) -> dict:
  """The row of one size."""
  index = open_index(count, words)
  peer = Peer(index)
  (ids, scores), (want, expected) = (
    side.search(questions, K)
    for side in (index, peer)  # and warms both up
  )
  postings = [
    int((edges[:, -1] - edges[:, 0]).sum())
    for edges, _ in map(index._postings, questions)
  ]
  runs = harness.turns(
    {
      'batch': lambda: seconds(index.search, questions, BATCH),
      'one': lambda: seconds(index.search, questions, 1),
      'peer': lambda: seconds(peer.search, questions, BATCH),
    }
  )
  row = {
    'passages': count,
    'questions': len(questions),
    'postings_per_query': statistics.fmean(postings),
    # Where scores are equal to the bit, ties have one order: the corpus's.
    'same_ids': float((ids == want).all(axis=1).mean()),
    'same_scores': float((scores == expected).all(axis=1).mean()),
  }
  for name, turns in runs.items():
    each = 1e3 / len(questions)
    row[f'{name}_ms'] = each * statistics.median(sum(t) for t, _ in turns)
    # Says more than the clock where the machine is at other work too.
    row[f'{name}_cpu_ms'] = each * statistics.median(cpu for _, cpu in turns)
  singles = [second for turn, _ in runs['one'] for second in turn]
  row['one_p99_ms'] = 1e3 * float(np.quantile(singles, 0.99))
  # Of each turn: what is at work beside touches both sides of a turn.
  row['ratio'] = statistics.median(
    sum(b) / sum(a) for (a, _), (b, _) in zip(runs['batch'], runs['peer'])
  )
  row['seconds'] = {n: [(sum(t), cpu) for t, cpu in r] for n, r in runs.items()}
  return row


def followed(few: dict, many: dict) -> dict:
  """Milliseconds at 21 million passages, by the line through two sizes."""
  times = (scale.WIKI - many['passages']) / (many['passages'] - few['passages'])
  sides = itertools.product(('batch', 'one', 'peer'), ('ms', 'cpu_ms'))
  names = 'postings_per_query', *map('_'.join, sides)
  return {'passages': scale.WIKI, 'extrapolated': True} | {
    name: many[name] + times * (many[name] - few[name]) for name in names
  }


def measure(words: list[str], questions: list[str]) -> list[dict]:
  sizes = _PASSAGES.value // 4, _PASSAGES.value
  for count in sizes:
    open_index(count, words)
  rows = [searched(count, words, questions) for count in sizes]
  return [*rows, followed(*rows)]


def bars(rows) -> list[dict]:
  return [
    common.bar('bm25_1m', rows[1]['ratio'], 2),
    common.bar('bm25_same_ids', rows[1]['same_ids'], 1),
  ]


if __name__ == '__main__':
  command.define_data_dir()
  _PASSAGES = flags.DEFINE_integer('passages', 1_000_000, 'How many.', 16_000)
  _FOLDER = flags.DEFINE_string(
    'folder', 'runs/bm25_benchmark', 'Of the indexes; made if it is not there.'
  )
  harness.run('bm25', measure, bars, reps=5, inputs=inputs)
