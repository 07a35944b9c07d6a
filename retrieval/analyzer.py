"""Text to the terms that BM25 compares."""

from collections.abc import Iterator
import contextlib
import re
import sys
import threading

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
  from bm25s import stopwords as bm25s_stopwords

# One word of one character counts too: "Henry V", "Vitamin C".
WORD = re.compile(r'\w+')
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
    terms = (self.term(word) for word in WORD.findall(text))
    return [term for term in terms if term is not None]

  def spans(self, text: str, terms: set[str]) -> list[tuple[int, int]]:
    """The (start, end) of the words of `text` whose term is in `terms`."""
    return [
      match.span()
      for match in WORD.finditer(text)
      if self.term(match.group()) in terms
    ]
