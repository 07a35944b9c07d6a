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
"""

import array
import collections
import contextlib
import functools
import hashlib
import io
import itertools
import os
import pathlib
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np
import Stemmer

from retrieval import files
from retrieval.metrics import stage


@contextlib.contextmanager
def _without(*modules: str) -> Iterator[None]:
  """Lets imports of these modules fail, those already loaded too."""
  kept = {name: sys.modules.get(name) for name in modules}
  sys.modules.update(dict.fromkeys(modules))
  try:
    yield
  finally:
    for name, module in kept.items():
      if module is None:
        del sys.modules[name]
      else:
        sys.modules[name] = module


# Where JAX is installed, importing bm25s runs a computation with it: that
# opens the accelerator and takes most of its memory from the trainer beside
# this server, and 1.7 s. Nothing here uses it.
with _without('jax', 'jax.lax'):
  from bm25s import stopwords as bm25s_stopwords

# One word of one character counts too: "Henry V", "Vitamin C".
_WORD = re.compile(r'\w+')
_GROUPS = 64  # see _top
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

STOP_WORDS = {
  'none': frozenset(),
  'english': frozenset(bm25s_stopwords.STOPWORDS_EN),
  'english_plus': frozenset(bm25s_stopwords.STOPWORDS_EN_PLUS),
}
STEMMERS = ('none', *Stemmer.algorithms())


class Analyzer:
  """Text to the terms that are compared: lower case, stop words, stems."""

  def __init__(self, stemmer: str = 'english', stop_words: str = 'english'):
    """Makes an analyzer.

    Args:
      stemmer: 'none' or the name of a Snowball algorithm (`STEMMERS`).
      stop_words: a key of `STOP_WORDS`.

    Raises:
      ValueError: an unknown name; the message lists those that exist.
    """
    if stemmer not in STEMMERS:
      raise ValueError(f'stemmer {stemmer!r} is none of {", ".join(STEMMERS)}')
    if stop_words not in STOP_WORDS:
      raise ValueError(
        f'stop_words {stop_words!r} is none of {", ".join(STOP_WORDS)}'
      )
    self.stemmer, self.stop_words = stemmer, stop_words
    self._stop = STOP_WORDS[stop_words]
    self._stem = (
      None if stemmer == 'none' else Stemmer.Stemmer(stemmer).stemWord
    )
    self._lock = threading.Lock()  # a Stemmer is not thread-safe

  def term(self, word: str) -> str | None:
    """The term of one word, None for a stop word."""
    word = word.lower()
    if word in self._stop:
      return None
    if self._stem is None:
      return word
    with self._lock:
      return self._stem(word)

  def __call__(self, text: str) -> list[str]:
    """The terms of `text`, in order, repetitions kept."""
    terms = (self.term(word) for word in _WORD.findall(text))
    return [term for term in terms if term is not None]

  def spans(self, text: str, terms: set[str]) -> list[tuple[int, int]]:
    """The (start, end) of the words of `text` whose term is in `terms`."""
    return [
      match.span()
      for match in _WORD.finditer(text)
      if self.term(match.group()) in terms
    ]


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
    self._load(_build(
      texts, self, io.BytesIO(), lambda name, length: np.empty(
        length, _ARRAYS[name])
    ))

  @classmethod
  def build(
    cls, texts: Sequence[str], folder: str | os.PathLike, **options: Any
  ) -> 'BM25Index':
    """Builds the index in files, to be mapped: `BM25Index(texts).save(folder)`.

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
    self._describe(folder, arrays)
    return cls.open(folder)

  def save(self, folder: str | os.PathLike) -> None:
    """Writes the index; the folder is one when this returns, not before."""
    folder = _clear(folder)
    for name, found in self._arrays.items():
      with open(folder / f'{name}.npy', 'wb') as file:
        np.save(file, found)
        files.sync(file)
    self._describe(folder, self._arrays)

  @classmethod
  def open(cls, folder: str | os.PathLike) -> 'BM25Index':
    """Maps an index that was saved.

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
    # Padded to whole groups; the padding never scores.
    totals = np.zeros(-(-self._count // _GROUPS) * _GROUPS, np.float32)
    with stage('search'):
      for row, query in enumerate(queries):
        counts = collections.Counter(self._query_ids(query))
        if not counts:
          continue
        totals.fill(0)
        # Sorted: float32 sums then depend on the words alone, not their order.
        for term, count in sorted(counts.items()):
          span = slice(self._starts[term], self._starts[term + 1])
          added = self._values[span]
          np.add.at(
            totals, self._rows[span], added if count == 1 else count * added
          )
        best = _top(totals, k)
        ids[row, : len(best)] = best
        scores[row, : len(best)] = totals[best]
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
    self._arrays = arrays
    self._values, self._rows, self._starts, self._hashes, self._terms = (
      arrays[name] for name in _ARRAYS
    )
    if not len(self._values) == len(self._rows) == self._starts[-1]:
      raise ValueError('its arrays do not fit each other')
    self._starts = memoryview(self._starts)  # of which an item is an int
    self._cached = functools.lru_cache(_CACHED)(self._term_id)

  def _describe(
    self, folder: pathlib.Path, arrays: dict[str, np.ndarray]
  ) -> None:
    files.write_json(folder / 'bm25.json', {
      'format': _FORMAT, 'count': self._count, 'parameters': self._options,
      'lengths': {name: len(found) for name, found in arrays.items()},
    })

  def _query_ids(self, query: str) -> list[int]:
    ids = (
      # Queries come from outside: a word of a megabyte is not kept.
      (self._cached if len(word) <= _LONG else self._term_id)(word)
      for word in _WORD.findall(query.lower())
    )
    return [i for i in ids if i >= 0]

  def _term_id(self, word: str) -> int:
    """The id of the term of a word; -1: a stop word, or in no passage."""
    term = self.analyzer.term(word)
    if term is None:
      return -1
    key = np.uint64(_hash(term))
    at = int(np.searchsorted(self._hashes, key))
    found = at < len(self._hashes) and self._hashes[at] == key
    return int(self._terms[at]) if found else -1


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
    added[:len(sizes)] += sizes
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
      found = _WORD.findall(text.lower())
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
