"""BM25 over the words of a corpus, on precomputed scores as bm25s has them.

For every term, the passages that have it and what it adds to each of their
scores (bm25s: Lu, 2024; Lucene's variant: Kamphuis et al., ECIR 2020):

    score(q, d) = sum over words w of q of count(w in q) * idf(w) * tf / (
        tf + k1 * (1 - b + b * |d| / mean |d|))
    idf(w) = ln(1 + (P - df + 0.5) / (df + 0.5))

The scores are those of bm25s to the last bit. They are computed here, block
by block, because bm25s needs the corpus as lists of Python numbers, 40 bytes
for each score and the vocabulary as a dictionary: too much for 21 million
passages. Adding up and choosing the best are done here rather than by
`bm25s.retrieve` for three reasons: equal scores come in corpus order whatever
the batch, the order of the words in a query cannot show, and passages without
any word of the query are never returned.

Threads search shards: of every query, every range of `_SHARD` passages. There
is one for each core, or as many as $NUMBA_NUM_THREADS says. Numba compiles the
loop over postings, at the first search, so that it runs without Python's
global lock; NumPy releases that lock in the rest.
"""

import array
import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from retrieval.analyzer import STEMMERS, STOP_WORDS, WORD, Analyzer
from retrieval.metrics import stage

_GROUPS = 64  # see _top
# Passages whose scores a thread holds at once: 16 MB, so that its memory does
# not grow with the corpus and much of it stays in the cache. A multiple of 64.
_SHARD = 1 << 22
_FEW = 1 << 17  # passages that threads would not search faster
_TINY = 1 << 9  # passages, of a web page say, that are not worth compiling for
_BLOCK = 1 << 16  # passages counted at once, about 300 MB
_WORDS = 1 << 20  # words whose terms are remembered, at most 150 MB
_CACHED, _LONG = 1 << 16, 40  # words of queries remembered; longest of them
_LEAST = np.nextafter(np.float32(0), np.float32(1))  # score above 0
_FORMAT = 1
# The arrays of an index with N scores of T terms.
_ARRAYS = {
  'values': np.float32,  # [N] what a term adds, by term, then by passage
  'rows': np.int32,  # [N] the passage of each
  'starts': np.int64,  # [T + 1] where each term's begin
  'hashes': np.uint64,  # [T] of the terms, ascending
  'terms': np.int32,  # [T] the term of each hash
}
PRESETS = {  # k1, b
  'lucene': (1.2, 0.75),
  'search_r1': (0.9, 0.4),  # Pyserini's, which Search-R1's server leaves as is
}


def define_flags(note: str = '') -> None:
  """Flags of the parameters; `note` says when they matter."""
  note = f'BM25{note}: '
  flags.DEFINE_enum('bm25_preset', 'lucene', [*PRESETS], f'{note}k1 and b.')
  flags.DEFINE_float(
    'k1', None, f'{note}saturation of repeated words; else the preset.', 0
  )
  flags.DEFINE_float(
    'b', None, f'{note}discount of long passages; else the preset.', 0, 1
  )
  flags.DEFINE_enum('stemmer', 'english', STEMMERS, f'{note}word stems.')
  flags.DEFINE_enum(
    'stop_words', 'english', [*STOP_WORDS], f'{note}words left out.'
  )


def options(args: Any) -> dict[str, Any]:
  """The keywords of `BM25Index` that the flags of `define_flags` name."""
  k1, b = PRESETS[args.bm25_preset]
  return {
    'k1': k1 if args.k1 is None else args.k1,
    'b': b if args.b is None else args.b,
    'stemmer': args.stemmer,
    'stop_words': args.stop_words,
  }


class BM25Index:
  """An index of P texts: `search(queries, k) -> ids, scores`."""

  name = 'bm25'

  def __init__(
    self,
    texts: Sequence[str],
    *,
    k1: float = 1.2,
    b: float = 0.75,
    stemmer: str = 'english',
    stop_words: str = 'english',
  ):
    """Builds the index in memory.

    Args:
      texts: [P] what is searched, titles included.
      k1: how slowly repetitions of a word saturate, >= 0.
      b: how much long passages are discounted, 0 to 1.
      stemmer: see `Analyzer`.
      stop_words: see `Analyzer`.

    Raises:
      ValueError: no texts, or a parameter out of its range.
    """
    self._configure(len(texts), k1, b, stemmer, stop_words)
    self._load(
      _build(
        texts,
        self,
        io.BytesIO(),
        lambda name, length: np.empty(length, _ARRAYS[name]),
      )
    )

  @classmethod
  def build(
    cls, texts: Sequence[str], folder: str | os.PathLike, **options: Any
  ) -> 'BM25Index':
    """Builds the index in files, and maps them.

    Memory: 4 bytes a passage, about 100 bytes a distinct word, and 0.5 GB.
    Disk: 8 bytes for each different word of each passage, and 12 more until
    it is done. The folder is an index once it is whole.
    """
    self = cls.__new__(cls)
    self._configure(len(texts), **options)
    folder = _clear(folder)

    def make(name: str, length: int) -> np.ndarray:
      path = folder / f'{name}.npy'
      # A write to mapped pages that the disk cannot hold kills the process.
      files.need_space(path, length * np.dtype(_ARRAYS[name]).itemsize)
      found = np.lib.format.open_memmap(path, 'w+', _ARRAYS[name], (length,))
      with open(path, 'r+b') as file:  # else the file is sparse
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
      return found

    with tempfile.TemporaryFile(dir=folder) as spool:
      arrays = _build(_watched(texts), self, spool, make)
    for found in arrays.values():
      found.flush()
    files.write_json(
      folder / 'bm25.json',
      {
        'format': _FORMAT,
        'count': self._count,
        'parameters': self._options,
        'lengths': {name: len(found) for name, found in arrays.items()},
      },
    )
    return cls.open(folder)

  @classmethod
  def open(cls, folder: str | os.PathLike) -> 'BM25Index':
    """Maps an index that was built.

    Raises:
      ValueError: the folder holds no whole index of this format.
    """
    folder = pathlib.Path(folder)
    mend = 'Build it again: python -m retrieval.build_index --index=bm25'
    about = files.read_json(folder / 'bm25.json')
    if about is None:
      raise ValueError(f'{folder}: no whole BM25 index (no bm25.json). {mend}')
    if about.get('format') != _FORMAT:
      raise ValueError(
        f'{folder}: format {about.get("format")!r} of a BM25 index, this '
        f'version reads {_FORMAT}. {mend}'
      )
    self = cls.__new__(cls)
    try:
      self._configure(about['count'], **about['parameters'])
      arrays = {}
      for name, length in about['lengths'].items():
        found = np.load(folder / f'{name}.npy', mmap_mode='r')
        if (found.dtype, found.shape) != (_ARRAYS[name], (length,)):
          raise ValueError(f'{name}.npy holds {found.dtype} {found.shape}')
        arrays[name] = found.view(np.ndarray)  # whose slices are cheaper
      self._load(arrays)
    except (OSError, EOFError, KeyError, TypeError, ValueError) as error:
      raise ValueError(
        f'{folder}: the BM25 index is cut short or damaged ({error}). {mend}'
      ) from None
    return self

  def __len__(self) -> int:
    return self._count

  @property
  def parameters(self) -> dict[str, object]:
    """What tells this index from another over the same corpus."""
    return {'name': self.name, **self._options}

  @property
  def _options(self) -> dict[str, object]:
    return {
      'k1': self.k1,
      'b': self.b,
      'stemmer': self.analyzer.stemmer,
      'stop_words': self.analyzer.stop_words,
    }

  def search(
    self, queries: Sequence[str], k: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Finds the best passages of each query.

    Args:
      queries: [Q] texts.
      k: the most passages for one query, >= 1; may exceed P.

    Returns:
      ids: int64 [Q, min(k, P)], positions in the corpus, best first, equal
        scores in corpus order; -1 where a query has no more passages with any
        of its words.
      scores: float32 of the same shape, > 0; -inf where ids is -1.
    """
    if k < 1:
      raise ValueError(f'k={k} must be at least 1')
    k = min(k, self._count)
    ids = np.full((len(queries), k), -1, np.int64)
    scores = np.full((len(queries), k), -np.inf, np.float32)
    shards = range(len(self._borders) - 1)
    found = [[None] * len(shards) for _ in queries]
    add = _add.py_func if self._count <= _TINY else _add
    with stage('search'):
      asked = [self._postings(query) for query in queries]
      todo = [(row, shard) for row in range(len(queries)) for shard in shards]
      rest = iter(todo)

      def work(_: int) -> None:
        # Padded to whole groups; the padding never scores.
        size = min(_SHARD, -(-self._count // _GROUPS) * _GROUPS)
        totals = np.empty(size, np.float32)
        for row, shard in rest:  # whichever no other thread has taken
          edges, counts = asked[row]
          first = self._borders[shard]
          add(self._rows, self._values, edges, shard, counts, first, totals)
          best = _top(totals, k)
          found[row][shard] = first + best, totals[best]

      threads = min(len(todo), 1 if self._count < _FEW else self._threads)
      if threads > 1:
        list(self._pool.map(work, range(threads)))
      else:
        work(0)
      for row, parts in enumerate(found):
        best, total = map(np.concatenate, zip(*parts))
        order = np.argsort(-total, kind='stable')[:k]
        ids[row, : len(order)] = best[order]
        scores[row, : len(order)] = total[order]
    return ids, scores

  def _configure(
    self,
    count: int,
    k1: float = 1.2,
    b: float = 0.75,
    stemmer: str = 'english',
    stop_words: str = 'english',
  ) -> None:
    if not count:
      raise ValueError('an index needs at least one text')
    if not k1 >= 0:
      raise ValueError(f'k1={k1} must be at least 0')
    if not 0 <= b <= 1:
      raise ValueError(f'b={b} must lie between 0 and 1')
    self.k1, self.b = float(k1), float(b)
    self.analyzer = Analyzer(stemmer, stop_words)
    self._count = count

  def _load(self, arrays: dict[str, np.ndarray]) -> None:
    for found in arrays.values():  # as mapped files are: `_add` compiles once
      found.setflags(write=False)
    self._values, self._rows, self._starts, self._hashes, self._terms = (
      arrays[name] for name in _ARRAYS
    )
    if not len(self._values) == len(self._rows) == self._starts[-1]:
      raise ValueError('its arrays do not fit each other')
    self._starts = memoryview(self._starts)  # of which an item is an int
    shards = range(0, self._count, _SHARD)
    # int32 as `rows`: for another type NumPy would convert all rows.
    self._borders = np.array([*shards, self._count], np.int32)
    self._cached = functools.lru_cache(_CACHED)(self._edges)
    self._threads = numba.config.NUMBA_NUM_THREADS
    self._pool = concurrent.futures.ThreadPoolExecutor(self._threads, 'bm25')

  def _postings(self, query: str) -> tuple[np.ndarray, np.ndarray]:
    """Edges [T, shards + 1] and counts float32 [T] of a query's terms.

    In the order of the terms: float32 sums then depend on the words alone, not
    on their order in the query.
    """
    counts = collections.Counter(
      # Queries come from outside: a word of a megabyte is not kept.
      (self._cached if len(word) <= _LONG else self._edges)(word)
      for word in WORD.findall(query.lower())
    )
    del counts[()]
    edges = sorted(counts)
    return (
      np.array(edges, np.int64).reshape(-1, len(self._borders)),
      np.array([counts[e] for e in edges], np.float32),
    )

  def _edges(self, word: str) -> tuple[int, ...]:
    """Where the postings of a word's term begin in each shard, and end.

    () for a stop word, and for a term of no passage.
    """
    term = self.analyzer.term(word)
    if term is None:
      return ()
    key = np.uint64(_hash(term))
    at = int(np.searchsorted(self._hashes, key))
    if at == len(self._hashes) or self._hashes[at] != key:
      return ()
    term = int(self._terms[at])
    first, end = self._starts[term], self._starts[term + 1]
    inner = self._rows[first:end].searchsorted(self._borders[1:-1])
    return (first, *(first + inner).tolist(), end)


class _TermIds(dict):
  """Word -> id of its term, -1 for a stop word; terms numbered as they come.

  Words are far fewer than their occurrences, so each is stemmed once, or
  again where so many words have come that they were forgotten.
  """

  def __init__(self, analyzer: Analyzer):
    super().__init__()
    self._analyzer, self.terms = analyzer, {}

  def __missing__(self, word: str) -> int:
    if len(self) >= _WORDS:
      self.clear()
    term = self._analyzer.term(word)
    found = -1
    if term is not None:
      found = self.terms.setdefault(term, len(self.terms))
    self[word] = found
    return found


def _build(
  texts: Iterable[str],
  index: BM25Index,
  spool: BinaryIO,
  make: Callable[[str, int], np.ndarray],
) -> dict[str, np.ndarray]:
  """The arrays of `_ARRAYS`: counts all blocks into `spool`, then scores them.

  make: an empty array for a name and a length.
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
  # As bm25s has it: idf in float32, the rest in float64.
  idf = np.log(1 + (len(lengths) - sizes + 0.5) / (sizes + 0.5)).astype('f4')
  lengths = np.frombuffer(lengths, np.int32)
  mean = lengths.mean()
  filled = starts[:-1].copy()  # where the next passage of each term goes
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
      found = WORD.findall(text.lower())
      flat.extend([ids[word] for word in found])
      words.append(len(found))
    term = np.frombuffer(flat, np.int32)
    row = np.repeat(np.arange(len(block)), np.frombuffer(words, np.int32))
    row, term = row[term >= 0], term[term >= 0]
    keys = term.astype(np.int64) << 32 | (first + row)
    yield (
      *np.unique(keys, return_counts=True),
      np.bincount(row, minlength=len(block)),
    )
    first += len(block)


def _hash(term: str) -> int:
  # 64 bits: of 10 million terms, two are alike in one of 300,000 corpora.
  encoded = term.encode('utf-8', 'surrogatepass')
  return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest())


def _clear(folder: str | os.PathLike) -> pathlib.Path:
  """Makes the folder, or what is in it no index; who has it open keeps it."""
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  for name in ('bm25.json', *(f'{name}.npy' for name in _ARRAYS)):
    (folder / name).unlink(missing_ok=True)
  return folder


def _watched(texts: Sequence[str]) -> Iterator[str]:
  with files.progress(len(texts), 'bm25', unit=' passages') as bar:
    for text in texts:
      yield text
      bar.update()


@numba.njit(nogil=True)
def _add(rows, values, edges, shard, counts, first, totals):
  """Sets `totals` of a shard, which starts at passage `first`.

  Term by term in float32: the bits of the sums are those of NumPy.
  """
  totals[:] = 0
  for term in range(len(edges)):
    for i in range(edges[term, shard], edges[term, shard + 1]):
      # Unsigned: a negative index would be checked for.
      totals[np.uint64(rows[i] - first)] += counts[term] * values[i]


def _top(totals: np.ndarray, k: int) -> np.ndarray:
  """Positions of the k largest totals above 0, best first, ties in order.

  The k-th largest of the groups' maxima is a lower bound of the k-th largest
  total (k groups hold one such value each), found in one vectorised pass; few
  groups reach it, and only their totals are looked at again.
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
