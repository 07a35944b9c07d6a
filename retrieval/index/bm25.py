"""BM25 over the words of a corpus, with precomputed scores like bm25s.

The index has, for every term, the passages with that term and what it adds to
their scores (bm25s: Lu, 2024; Lucene's variant: Kamphuis et al., ECIR 2020):

    score(q, d) = sum over words w of q of count(w in q) * idf(w) * tf / (
        tf + k1 * (1 - b + b * |d| / mean |d|))
    idf(w) = ln(1 + (P - df + 0.5) / (df + 0.5))

The scores equal those of bm25s to the last bit. They are computed here, block
by block, because bm25s needs the corpus as lists of Python numbers, 40 bytes
for each score and the vocabulary as a dictionary, which is too much for 21
million passages. The search is also implemented here instead of
`bm25s.retrieve`, so that equal scores are in corpus order for any batch, the
order of the words in a query does not matter, and passages without any word of
the query are never returned.

Threads search shards: for every query, every range of `_SHARD` passages. There
is one thread per core, or $NUMBA_NUM_THREADS. Numba compiles the loop over
postings at the first search, so that it runs without the global interpreter
lock; NumPy releases the lock elsewhere.
"""

import array
import collections
from collections.abc import Iterable, Iterator, Sequence
import concurrent.futures
import functools
import hashlib
import io
import itertools
import os
import pathlib
import tempfile
from typing import Any, BinaryIO

from absl import flags
import numba
import numpy as np

from retrieval import files
from retrieval.core import Ranked, check_k, no_results
from retrieval.index import analyzer as analyzers
from retrieval.index.analyzer import STOP_WORDS, WORDS, Analyzer, choose
from retrieval.metrics import stage

_GROUPS = 64  # see _top
# Passages whose scores a thread has in memory at once: 16 MB, so that memory
# does not grow with the corpus and is mostly cached. A multiple of 64.
_SHARD = 1 << 22
_FEW = 1 << 17  # passages for which several threads are not faster
_TINY = 1 << 9  # passages (such as of a web page) too few to compile for
_BLOCK = 1 << 16  # passages counted at once, about 300 MB
_WORDS = 1 << 20  # words whose terms are cached, at most 150 MB
_CACHED, _LONG = 1 << 16, 40  # cached words of queries; the longest of them
_LEAST = np.nextafter(np.float32(0), np.float32(1))  # score above 0
_FORMAT = 2
_AUTO = 'auto'  # of --analyzer: as the passages need it
# The arrays of an index with N scores of T terms.
_ARRAYS = {
  'values': np.float32,  # [N] what a term adds, by term, then by passage
  'rows': np.int32,  # [N] the passage of each
  'starts': np.int64,  # [T + 1] where each term's begin
  'hashes': np.uint64,  # [T] of the terms, ascending
  'terms': np.int32,  # [T] the term of each hash
}
PRESETS = {
  'lucene': {'k1': 1.2, 'b': 0.75},
  # Pyserini's defaults, used by Search-R1's server.
  'search_r1': {'k1': 0.9, 'b': 0.4},
}


def define_flags(note: str = '') -> None:
  """Defines flags of the parameters; `note` says when they apply."""
  note, choice, number = f'BM25{note}: ', flags.DEFINE_enum, flags.DEFINE_float
  choice('bm25_preset', 'lucene', [*PRESETS], f'{note}k1 and b.')
  number('k1', None, f'{note}saturation of repeated words.', 0)
  number('b', None, f'{note}discount of long passages.', 0, 1)
  kinds = f'{note}how text is parted into words; auto: as passages need it.'
  choice('analyzer', _AUTO, [_AUTO, *analyzers.KINDS], kinds)
  choice('stemmer', 'english', analyzers.STEMMERS, f'{note}word stems.')
  choice('stop_words', 'english', [*STOP_WORDS], f'{note}ignored words.')


def options(args: Any) -> dict[str, Any]:
  """The keywords of `BM25Index`, from the flags of `define_flags`."""
  names = ('k1', 'b', 'stemmer', 'stop_words', 'analyzer')
  given = {name: getattr(args, name) for name in names}
  given = {k: v for k, v in given.items() if v not in (None, _AUTO)}
  return PRESETS[args.bm25_preset] | given


class BM25Index:
  """An index of P texts: `search(queries, k) -> ids, scores`."""

  name = 'bm25'

  def __init__(self, texts: Sequence[str], **options: Any):
    """Builds the index in memory.

    Args:
      texts: [P] passages, including titles, P >= 1.
      options: k1 (1.2), the saturation of repeated words, >= 0; b (0.75), the
        discount of long passages, 0 to 1; stemmer and stop_words of `Analyzer`;
        analyzer, its kind (what `analyzer.choose` says of the texts).
    """
    self._configure(texts, **options)
    make = lambda name, length: np.empty(length, _ARRAYS[name])
    self._load(_build(texts, self, io.BytesIO(), make))

  @classmethod
  def build(
    cls, texts: Sequence[str], folder: files.PathLike, **options: Any
  ) -> 'BM25Index':
    """Builds the index in files and maps them.

    Memory: 4 bytes per passage, about 100 bytes per distinct word, and 0.5 GB.
    Disk: 8 bytes for each distinct word of each passage, and 12 more during the
    build. An incomplete folder is not recognised as an index.
    """
    self, folder = cls.__new__(cls), pathlib.Path(folder)
    self._configure(texts, **options)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ('bm25.json', *(f'{name}.npy' for name in _ARRAYS)):
      (folder / name).unlink(missing_ok=True)  # open maps remain valid

    def make(name: str, length: int) -> np.ndarray:
      path = folder / f'{name}.npy'
      # Writing to mapped pages on a full disk kills the process.
      files.need_space(path, length * np.dtype(_ARRAYS[name]).itemsize)
      found = np.lib.format.open_memmap(path, 'w+', _ARRAYS[name], (length,))
      with open(path, 'r+b') as file:  # else the file would be sparse
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
      return found

    shown = {'unit': ' passages', 'iterable': texts}
    watched = files.progress(len(texts), 'bm25', **shown)
    with tempfile.TemporaryFile(dir=folder) as spool, watched:
      arrays = _build(watched, self, spool, make)
    for found in arrays.values():
      found.flush()
    lengths = {name: len(found) for name, found in arrays.items()}
    about = {'format': _FORMAT, 'count': self._count, 'lengths': lengths}
    about |= {'parameters': self._options, 'sample_sha256': _sample(folder)}
    files.write_json(folder / 'bm25.json', about)
    return cls.open(folder)

  @classmethod
  def open(cls, folder: files.PathLike) -> 'BM25Index':
    """Maps an existing index.

    Raises:
      ValueError: the folder has no complete index of this format.
    """
    folder = pathlib.Path(folder)
    fix = 'Build it again: python -m retrieval.build_index --index=bm25'
    about = files.read_json(folder / 'bm25.json')
    if about is None:
      raise ValueError(f'{folder}: no whole BM25 index (no bm25.json). {fix}')
    self = cls.__new__(cls)
    problem = f'{folder}: the BM25 index is cut short or damaged ({{}}). {fix}'
    damaged = (OSError, EOFError, KeyError, TypeError, ValueError)
    with files.convert(damaged, ValueError, problem):
      if (form := about['format']) != _FORMAT:
        raise ValueError(f'format {form!r}, this version reads {_FORMAT}')
      self._configure(range(about['count']), **about['parameters'])
      arrays = {}
      for name, length in about['lengths'].items():
        found = np.load(folder / f'{name}.npy', mmap_mode='r')
        if (found.dtype, found.shape) != (_ARRAYS[name], (length,)):
          raise ValueError(f'{name}.npy holds {found.dtype} {found.shape}')
        arrays[name] = found.view(np.ndarray)  # has cheaper slices
      self._load(arrays)
      if about['sample_sha256'] != _sample(folder):
        raise ValueError('another sample_sha256')
    return self

  def __len__(self) -> int:
    return self._count

  @property
  def parameters(self) -> dict[str, object]:
    """See `core.Index`."""
    return {'name': self.name, **self._options}

  def search(self, queries: Sequence[str], k: int) -> Ranked:
    """See `core.Index.search`.

    A row has only passages with a word of the query; scores are > 0.
    """
    check_k(k)
    k = min(k, self._count)
    ids, scores = no_results(len(queries), k)
    shards = range(len(self._borders) - 1)
    best_of = [[None] * len(shards) for _ in queries]
    add = _add.py_func if self._count <= _TINY else _add
    with stage('search'):
      asked = [self._postings(query) for query in queries]
      for query, (edges, _) in zip(queries, asked):
        if not len(edges):
          self._warn(query)
      todo = [(row, shard) for row in range(len(queries)) for shard in shards]
      rest = iter(todo)

      def work(_: int) -> None:
        # Padded to whole groups; the padding has no score.
        size = min(_SHARD, -(-self._count // _GROUPS) * _GROUPS)
        totals = np.empty(size, np.float32)
        for row, shard in rest:  # the next one that no thread has taken
          edges, counts = asked[row]
          first = self._borders[shard]
          add(self._rows, self._values, edges, shard, counts, first, totals)
          best = _top(totals, k)
          best_of[row][shard] = first + best, totals[best]

      threads = min(len(todo), 1 if self._count < _FEW else self._threads)
      if threads > 1:
        list(_pool(os.getpid()).map(work, range(threads)))
      else:
        work(0)
      for row, parts in enumerate(best_of):
        best, total = map(np.concatenate, zip(*parts))
        order = np.argsort(-total, kind='stable')[:k]
        ids[row, : len(order)] = best[order]
        scores[row, : len(order)] = total[order]
    return ids, scores

  def _configure(
    self,
    texts: Sequence,
    k1=1.2,
    b=0.75,
    stemmer='english',
    stop_words='english',
    analyzer=None,
  ) -> None:
    self.k1, self.b, self._count = float(k1), float(b), len(texts)
    self.analyzer = Analyzer(stemmer, stop_words, analyzer or choose(texts))
    words = {'stemmer': stemmer, 'stop_words': stop_words}
    self._options = {'k1': self.k1, 'b': self.b, **words}
    self._options['analyzer'] = self.analyzer.kind
    self._warned: set[str] = set()

  def _load(self, arrays: dict[str, np.ndarray]) -> None:
    for found in arrays.values():  # like mapped files: `_add` compiles once
      found.setflags(write=False)
    self._values, self._rows, self._starts, self._hashes, self._terms = (
      arrays[name] for name in _ARRAYS
    )
    if not len(self._values) == len(self._rows) == self._starts[-1]:
      raise ValueError('its arrays do not fit each other')
    self._starts = memoryview(self._starts)  # its items are Python ints
    shards = range(0, self._count, _SHARD)
    # int32 like `rows`, since NumPy would convert all rows otherwise.
    self._borders = np.array([*shards, self._count], np.int32)
    self._cached = functools.lru_cache(_CACHED)(self._edges)
    self._threads = numba.config.NUMBA_NUM_THREADS

  def _warn(self, query: str) -> None:
    """Says why a query cannot find anything in any passage, each cause once."""
    cause = ''
    if not self.analyzer(query):
      cause = 'has no word but stop words'
    elif self.analyzer.kind == WORDS and analyzers.needs_scripts(query):
      cause = 'needs an index that is built with --analyzer=scripts'
    if cause and query.strip() and cause not in self._warned:
      self._warned.add(cause)
      said = f'WARNING: the query {query[:80]!r} {cause}; it finds nothing'
      files.say('retrieval.index.bm25', said)

  def _postings(self, query: str) -> tuple[np.ndarray, np.ndarray]:
    """Edges [T, shards + 1] and counts float32 [T] of a query's terms.

    They are sorted, so that float32 sums do not depend on the order of words.
    """
    counts = collections.Counter(
      # Queries are not trusted: very long words are not cached.
      (self._cached if len(word) <= _LONG else self._edges)(word)
      for word in self.analyzer.words(query)
    )
    del counts[()]
    edges = sorted(counts)
    counts = np.array([counts[e] for e in edges], np.float32)
    return np.array(edges, np.int64).reshape(-1, len(self._borders)), counts

  def _edges(self, word: str) -> tuple[int, ...]:
    """Begins of the postings of a word's term in each shard, and the end.

    () for a stop word, and for a term without passages.
    """
    term = self.analyzer.term(word)
    key = np.uint64(_hash(term or ''))
    at = int(np.searchsorted(self._hashes, key))
    if term is None or at == len(self._hashes) or self._hashes[at] != key:
      return ()
    term = int(self._terms[at])
    first, end = self._starts[term], self._starts[term + 1]
    inner = self._rows[first:end].searchsorted(self._borders[1:-1])
    return (first, *(first + inner).tolist(), end)


class _TermIds(dict):
  """Word -> id of its term, -1 for a stop word; ids by first occurrence.

  Words are far fewer than their occurrences, so each is stemmed once, or again
  if the cache was full.
  """

  def __init__(self, analyzer: Analyzer):
    super().__init__()
    self.analyzer, self.terms = analyzer, {}

  def __missing__(self, word: str) -> int:
    if len(self) >= _WORDS:
      self.clear()
    term = self.analyzer.term(word)
    found = -1
    if term is not None:
      found = self.terms.setdefault(term, len(self.terms))
    self[word] = found
    return found


def _build(texts: Iterable[str], index: BM25Index, spool: BinaryIO, make):
  """Makes `_ARRAYS`: counts all blocks into `spool`, then computes scores.

  make: returns an empty array for a name and a length.
  """
  ids = _TermIds(index.analyzer)
  lengths, sizes = array.array('i'), np.zeros(0, np.int64)
  for keys, counts, words in _counted(texts, ids):
    np.save(spool, keys)
    np.save(spool, counts.astype(np.int32))
    lengths.frombytes(words.astype(np.int32).tobytes())
    added = np.bincount(keys >> 32, minlength=len(ids.terms))
    added[: len(sizes)] += sizes
    sizes = added
  starts = make('starts', len(sizes) + 1)
  starts[0] = 0
  np.cumsum(sizes, out=starts[1:])
  values, rows = (make(name, int(starts[-1])) for name in ('values', 'rows'))
  # Like bm25s: idf in float32, the rest in float64.
  idf = np.log(1 + (len(lengths) - sizes + 0.5) / (sizes + 0.5)).astype('f4')
  lengths = np.frombuffer(lengths, np.int32)
  mean = lengths.mean()
  filled = starts[:-1].copy()  # position of the next passage of each term
  spool.seek(0)
  for _ in range(0, len(lengths), _BLOCK):
    keys, tf = np.load(spool), np.load(spool)
    term, row = keys >> 32, keys & 0xFFFFFFFF
    norm = index.k1 * ((1 - index.b) + index.b * lengths[row] / (mean or 1))
    first = np.flatnonzero(np.diff(term, prepend=-1))  # of each term's run
    runs = np.diff(first, append=len(term))
    at = np.repeat(filled[term[first]] - first, runs) + np.arange(len(term))
    values[at] = idf[term] * (tf / (norm + tf))
    rows[at] = row
    filled[term[first]] += runs
  hashes = np.fromiter(map(_hash, ids.terms), np.uint64, len(sizes))
  order = np.argsort(hashes)
  found = {'values': values, 'rows': rows, 'starts': starts}
  for name, content in (('hashes', hashes[order]), ('terms', order)):
    found[name] = make(name, len(sizes))
    found[name][:] = content
  return found


def _counted(
  texts: Iterable[str], ids: _TermIds
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
  """Yields blocks: (term << 32 | passage, ascending; occurrences; lengths)."""
  texts, first = iter(texts), 0
  while block := list(itertools.islice(texts, _BLOCK)):
    flat, words = array.array('i'), array.array('i')
    for text in block:
      found = ids.analyzer.words(text)
      flat.extend([ids[word] for word in found])
      words.append(len(found))
    term = np.frombuffer(flat, np.int32)
    row = np.repeat(np.arange(len(block)), np.frombuffer(words, np.int32))
    row, term = row[term >= 0], term[term >= 0]
    keys = term.astype(np.int64) << 32 | (first + row)
    sizes = np.bincount(row, minlength=len(block))
    yield *np.unique(keys, return_counts=True), sizes
    first += len(block)


def _hash(term: str) -> int:
  # 64 bits: 10 million terms have a collision in one of 300,000 corpora.
  encoded = term.encode('utf-8', 'surrogatepass')
  return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest())


def _sample(folder: pathlib.Path) -> str:
  return files.sample_sha256(*(folder / f'{name}.npy' for name in _ARRAYS))


@functools.cache
def _pool(pid: int) -> concurrent.futures.ThreadPoolExecutor:
  """The threads of process `pid`: a forked process has none of its parent."""
  del pid
  threads = numba.config.NUMBA_NUM_THREADS
  return concurrent.futures.ThreadPoolExecutor(threads, 'bm25')


@numba.njit(nogil=True)
def _add(rows, values, edges, shard, counts, first, totals):
  """Sets `totals` of a shard, which starts at passage `first`.

  It adds term by term in float32, with the same rounding as NumPy.
  """
  totals[:] = 0
  for term in range(len(edges)):
    for i in range(edges[term, shard], edges[term, shard + 1]):
      # Unsigned, which avoids a check for negative indexes.
      totals[np.uint64(rows[i] - first)] += counts[term] * values[i]


def _top(totals: np.ndarray, k: int) -> np.ndarray:
  """Positions of the k largest totals above 0, best first, ties in order.

  The k-th largest maximum of the groups is a lower bound of the k-th largest
  total, since k groups have such a value. Few groups reach it, and only their
  totals are compared again.
  """
  grid = totals.reshape(_GROUPS, -1)
  maxima = grid.max(axis=0)
  bound = _LEAST
  if k <= len(maxima):
    bound = max(np.partition(maxima, len(maxima) - k)[len(maxima) - k], _LEAST)
  columns = np.flatnonzero(maxima >= bound)
  values = grid[:, columns]
  row, column = np.nonzero(values >= bound)  # in the order of positions
  best = np.argsort(-values[row, column], kind='stable')[:k]
  return row[best] * grid.shape[1] + columns[column[best]]
