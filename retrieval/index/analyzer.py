"""Converts text to the terms that BM25 compares.

There are two ways to part text into words:

  words    runs of letters and digits
  scripts  the same, with two differences. In scripts without spaces between
           words, each letter and each pair of letters is a word (Savoy, 2005:
           both together find most in Chinese and Japanese). A combining mark
           belongs to its letter.

Unicode forms do not matter (`files.composed`). An index is built with the first
unless its passages need the second (`choose`), so that English ones have the
same terms as ever.
"""

from collections.abc import Sequence
import functools
import importlib.util
import itertools
import re
import runpy
import threading
import unicodedata

import Stemmer

from retrieval.files import UNSPACED, composed, require_one_of

# Its file of stop words alone: if JAX is installed, importing bm25s runs a
# computation with it. That takes 1.7 s, opens the accelerator and takes most of
# its memory from a trainer on the same machine.
_SPEC = importlib.util.find_spec('bm25s')
if _SPEC is None or not _SPEC.submodule_search_locations:
  raise ModuleNotFoundError("No module named 'bm25s'", name='bm25s')
_LISTS = runpy.run_path(f'{_SPEC.submodule_search_locations[0]}/stopwords.py')
# Words of one character count too: "Henry V", "Vitamin C".
WORD = re.compile(r'\w+')
STOP_WORDS = {
  'none': frozenset(),
  'english': frozenset(_LISTS['STOPWORDS_EN']),
  'english_plus': frozenset(_LISTS['STOPWORDS_EN_PLUS']),
}
STEMMERS = ('none', *Stemmer.algorithms())
KINDS = WORDS, SCRIPTS = 'words', 'scripts'

# Soft hyphen, joiners, variation selectors.
_UNSEEN = re.compile(
  '[\u00ad\u200c\u200d\u2060\ufe00-\ufe0f\U000e0100-\U000e01ef]'
)
_SAMPLE = 10_000  # passages, at least, by which an analyzer is chosen


def _prepared(text: str) -> str:
  """What `SCRIPTS` looks at."""
  return _UNSEEN.sub('', composed(text)).lower()


@functools.cache
def _patterns() -> tuple[re.Pattern, re.Pattern, re.Pattern]:
  """Of a letter with its marks, of a run of words, of what needs `SCRIPTS`.

  A run has the group 1 if its letters have no spaces between words.
  """
  every = map(chr, range(0x300, 0x20000))
  marks = ''.join(c for c in every if unicodedata.category(c) in ('Mn', 'Mc'))
  letter = f'[{UNSPACED}][{marks}]*'
  run = f'((?:{letter})+)|(?:[^\\W{UNSPACED}][{marks}]*)+'
  needs = f'[{UNSPACED}{marks}]'
  return re.compile(letter), re.compile(run), re.compile(needs)


def needs_scripts(text: str) -> bool:
  """Whether `WORDS` would not find many of its words."""
  if text.isascii():
    return False
  text = composed(text)
  return 5 * len(_patterns()[2].findall(text)) >= len(text)


def choose(texts: Sequence[str]) -> str:
  """The kind of analyzer for passages: `SCRIPTS` if one in 200 needs it."""
  step = max(1, len(texts) // _SAMPLE)
  found = [needs_scripts(texts[i]) for i in range(0, len(texts), step)]
  return SCRIPTS if 200 * sum(found) > len(found) else WORDS


class Analyzer:
  """Lowercases, removes stop words and stems."""

  def __init__(self, stemmer='english', stop_words='english', kind=WORDS):
    """Makes an analyzer.

    Args:
      stemmer: 'none' or the name of a Snowball algorithm (`STEMMERS`).
      stop_words: a key of `STOP_WORDS`.
      kind: one of `KINDS`, which the module explains.

    Raises:
      ValueError: an unknown name; the message lists the known ones.
    """
    require_one_of('stemmer', stemmer, STEMMERS)
    require_one_of('stop_words', stop_words, STOP_WORDS)
    require_one_of('analyzer', kind, KINDS)
    self.stemmer, self.stop_words, self.kind = stemmer, stop_words, kind
    self._stop = STOP_WORDS[stop_words]
    self._stem = Stemmer.Stemmer(stemmer).stemWord if stemmer != 'none' else str
    self._lock = threading.Lock()  # a Stemmer is not thread-safe

  def term(self, word: str) -> str | None:
    """The term of one word, None for a stop word."""
    word = word.lower()
    if word in self._stop:
      return None
    with self._lock:
      return self._stem(word)

  def words(self, text: str) -> list[str]:
    """The words of `text` in lower case, with repetitions."""
    if self.kind == WORDS:
      return WORD.findall(composed(text).lower())
    letter, run, _ = _patterns()
    out: list[str] = []
    for match in run.finditer(_prepared(text)):
      if not match[1]:
        out.append(match[0])
        continue
      letters = letter.findall(match[1])
      out += letters
      out += map(''.join, itertools.pairwise(letters))
    return out

  def __call__(self, text: str) -> list[str]:
    """The terms of `text`, with repetitions."""
    terms = map(self.term, self.words(text))
    return [term for term in terms if term is not None]

  def spans(self, text: str, terms: set[str]) -> list[tuple[int, int]]:
    """The (start, end) of what of `text` has a term in `terms`, in order."""
    if self.kind == WORDS:
      found = WORD.finditer(text)
      found = ((word.span(), composed(word[0])) for word in found)
      return [span for span, word in found if self.term(word) in terms]
    letter, run, _ = _patterns()
    out: list[tuple[int, int]] = []
    for match in run.finditer(text):
      parts = letter.findall(match[1] or '') or [match[0]]
      pairs, end = map(''.join, itertools.pairwise(parts)), match.start()
      around = ['', *pairs, '']
      for part, *both in zip(parts, around, around[1:]):
        start, end = end, end + len(part)
        if terms.isdisjoint(self.term(_prepared(x)) for x in (part, *both)):
          continue
        if out and out[-1][1] == start:  # letters side by side
          start = out.pop()[0]
        out.append((start, end))
    return out
