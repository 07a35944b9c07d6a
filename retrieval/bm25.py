"""BM25 over the words of a corpus, on bm25s' precomputed scores.

bm25s holds, for every word, the passages that have it and what it adds to
each of their scores (Lucene's variant: Kamphuis et al., ECIR 2020):

    score(q, d) = sum over words w of q of count(w in q) * idf(w) * tf / (
        tf + k1 * (1 - b + b * |d| / mean |d|))
    idf(w) = ln(1 + (P - df + 0.5) / (df + 0.5))

Adding up and choosing the best are done here rather than by `bm25s.retrieve`,
for three reasons: equal scores come in corpus order whatever the batch, the
order of the words in a query cannot show, and passages without any word of
the query are never returned. It is also faster (see `_top`).
"""

import collections
import contextlib
import logging
import re
import sys
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import Stemmer


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
  import bm25s
  from bm25s import stopwords as bm25s_stopwords

# It tells each step of an index at INFO.
logging.getLogger('bm25s').setLevel(logging.WARNING)

# One word of one character counts too: "Henry V", "Vitamin C".
_WORD = re.compile(r'\w+')
_GROUPS = 128  # see _top

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
    if not texts:
      raise ValueError('an index needs at least one text')
    if not k1 >= 0:
      raise ValueError(f'k1={k1} must be at least 0')
    if not 0 <= b <= 1:
      raise ValueError(f'b={b} must lie between 0 and 1')
    self.k1, self.b = float(k1), float(b)
    self.analyzer = Analyzer(stemmer, stop_words)
    self._count = len(texts)
    self._term_ids: dict[str, int] = {}
    # Words are far fewer than their occurrences, so each is stemmed once.
    self._word_ids: dict[str, int] = {}  # word -> term id, -1 a stop word
    rows = [self._index_row(text) for text in texts]
    self._load(rows)

  def __len__(self) -> int:
    return self._count

  @property
  def parameters(self) -> dict[str, object]:
    """What tells this index from another over the same corpus."""
    return {
      'name': self.name,
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
    for row, query in enumerate(queries):
      counts = collections.Counter(self._query_ids(query))
      if not counts:
        continue
      totals.fill(0)
      # Sorted: float32 sums then depend on the words alone, not their order.
      for term, count in sorted(counts.items()):
        low, high = self._starts[term], self._starts[term + 1]
        added = self._values[low:high]
        np.add.at(
          totals, self._rows[low:high], added if count == 1 else count * added
        )
      best = _top(totals, k)
      ids[row, : len(best)] = best
      scores[row, : len(best)] = totals[best]
    return ids, scores

  def _index_row(self, text: str) -> list[int]:
    row = []
    for word in _WORD.findall(text.lower()):
      term_id = self._word_ids.get(word)
      if term_id is None:
        term = self.analyzer.term(word)
        term_id = -1
        if term is not None:
          term_id = self._term_ids.setdefault(term, len(self._term_ids))
        self._word_ids[word] = term_id
      if term_id >= 0:
        row.append(term_id)
    return row

  def _load(self, rows: list[list[int]]) -> None:
    if self._term_ids:
      model = bm25s.BM25(k1=self.k1, b=self.b, method='lucene')
      # A copy: bm25s keeps the vocabulary it is given.
      model.index(
        (rows, dict(self._term_ids)),
        create_empty_token=False,
        show_progress=False,
      )
      self._values = model.scores['data']  # float32 [N]
      self._rows = model.scores['indices']  # int32 [N], ascending in a term
      self._starts = model.scores['indptr'].tolist()  # [terms + 1]
    else:  # nothing but stop words and punctuation; bm25s divides by zero
      self._values = np.zeros(0, np.float32)
      self._rows = np.zeros(0, np.int32)
      self._starts = [0]

  def _query_ids(self, query: str) -> list[int]:
    ids = []
    for word in _WORD.findall(query.lower()):
      term_id = self._word_ids.get(word)
      if term_id is None:  # not a word of the corpus, but its stem may be
        # Not remembered: queries come from outside and never end.
        term = self.analyzer.term(word)
        term_id = -1 if term is None else self._term_ids.get(term, -1)
      if term_id >= 0:
        ids.append(term_id)
    return ids


def _top(totals: np.ndarray, k: int) -> np.ndarray:
  """Positions of the k largest totals above 0, best first, ties in order.

  The k-th largest of the groups' maxima is a lower bound of the k-th largest
  total (k groups hold one such value each), found in one vectorised pass; few
  totals reach it, so the sort is short. A partition of all P totals is six
  times slower here, since most of them are equal (0).
  """
  maxima = totals.reshape(_GROUPS, -1).max(axis=0)
  bound = np.float32(0)
  if k <= len(maxima):
    bound = np.partition(maxima, len(maxima) - k)[len(maxima) - k]
  found = np.flatnonzero(totals >= bound if bound > 0 else totals > 0)
  return found[np.argsort(-totals[found], kind='stable')[:k]]
