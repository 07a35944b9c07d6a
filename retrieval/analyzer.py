"""Converts text to the terms that BM25 compares."""

from collections.abc import Iterator
import contextlib
import re
import sys
import threading

import Stemmer

from retrieval.files import require_one_of


@contextlib.contextmanager
def _without(*modules: str) -> Iterator[None]:
  """Makes imports of these modules fail, even if they are loaded."""
  kept = {name: sys.modules[name] for name in modules if name in sys.modules}
  sys.modules.update(dict.fromkeys(modules))
  try:
    yield
  finally:
    for name in modules:
      del sys.modules[name]
    sys.modules.update(kept)


# If JAX is installed, importing bm25s runs a computation with it. That takes
# 1.7 s, opens the accelerator and takes most of its memory from a trainer on
# the same machine. Nothing here uses it.
with _without('jax', 'jax.lax'):
  from bm25s.stopwords import STOPWORDS_EN, STOPWORDS_EN_PLUS

# Words of one character count too: "Henry V", "Vitamin C".
WORD = re.compile(r'\w+')
STOP_WORDS = {
  'none': frozenset(),
  'english': frozenset(STOPWORDS_EN),
  'english_plus': frozenset(STOPWORDS_EN_PLUS),
}
STEMMERS = ('none', *Stemmer.algorithms())


class Analyzer:
  """Lowercases, removes stop words and stems."""

  def __init__(self, stemmer: str = 'english', stop_words: str = 'english'):
    """Makes an analyzer.

    Args:
      stemmer: 'none' or the name of a Snowball algorithm (`STEMMERS`).
      stop_words: a key of `STOP_WORDS`.

    Raises:
      ValueError: an unknown name; the message lists the known ones.
    """
    require_one_of('stemmer', stemmer, STEMMERS)
    require_one_of('stop_words', stop_words, STOP_WORDS)
    self.stemmer, self.stop_words = stemmer, stop_words
    self._stop = STOP_WORDS[stop_words]
    stems = stemmer != 'none'
    self._stem = Stemmer.Stemmer(stemmer).stemWord if stems else str
    self._lock = threading.Lock()  # a Stemmer is not thread-safe

  def term(self, word: str) -> str | None:
    """The term of one word, None for a stop word."""
    word = word.lower()
    if word in self._stop:
      return None
    with self._lock:
      return self._stem(word)

  def __call__(self, text: str) -> list[str]:
    """The terms of `text` in order, with repetitions."""
    terms = (self.term(word) for word in WORD.findall(text))
    return [term for term in terms if term is not None]

  def spans(self, text: str, terms: set[str]) -> list[tuple[int, int]]:
    """The (start, end) of the words of `text` whose term is in `terms`."""
    found = WORD.finditer(text)
    return [word.span() for word in found if self.term(word.group()) in terms]
