"""Answer metrics and their uncertainty, in pure Python and numpy.

`normalise`, `exact_match` and `f1` follow SQuAD's evaluation script
(Rajpurkar et al. 2016), with two differences. Text whose normal form is empty
("The", "A", "!!!") is compared without normalisation, and an empty prediction
matches nothing. In SQuAD's and Search-R1's scripts any two such texts are
equal, and such a golden answer is a substring of every prediction. And texts
that differ in their Unicode form alone are equal ("é" as one character or as
two, full-width digits), because a tokenizer that writes one form (Qwen's NFC)
cannot write a golden answer in another. ASCII text has one form.
"""

import collections
from collections.abc import Hashable, Iterable, Sequence
import math
import re
import string
from typing import NamedTuple

import numpy as np

from retrieval import files

# Of scripts without spaces too, which English text does not have.
_IDEOGRAPHIC = '。、・「」『』《》〈〉【】'
_PUNCTUATION = str.maketrans('', '', string.punctuation + _IDEOGRAPHIC)
_LETTER = re.compile(f'[{files.UNSPACED}]')
_ARTICLES = re.compile(r'\b(a|an|the)\b')
_CHUNK = 1 << 20  # random draws in memory at a time


class Interval(NamedTuple):
  """A mean with its bootstrap interval; n values were resampled."""

  mean: float
  low: float
  high: float
  n: int


def folded(text: str) -> str:
  """Lower case in one Unicode form, in which all answers are compared."""
  return files.composed(text).lower()


def normalise(text: str) -> str:
  """Folded, without punctuation and articles, with single spaces.

  Punctuation is deleted, not replaced: "U.S.-based" becomes "usbased".
  """
  text = folded(text).translate(_PUNCTUATION)
  return ' '.join(_ARTICLES.sub(' ', text).split())


def words(text: str) -> list[str]:
  """The words of the key; in scripts without spaces each letter is one.

  MLQA (Lewis et al. 2020) and KorQuAD compare these scripts by letter, too.
  """
  return _LETTER.sub(' \\g<0> ', key(text)).split()


def key(text: str) -> str:
  """Returns the key of an answer; answers with equal keys match exactly.

  The normal form; of a text that is articles alone, the same with these; of one
  that is punctuation alone, the folded text.
  """
  plain = folded(text).translate(_PUNCTUATION)
  return normalise(text) or ' '.join((plain.strip() or folded(text)).split())


def exact_match(prediction: str | None, golds: Iterable[str]) -> float:
  """1.0 if the prediction has the key of a golden answer, else 0.0."""
  if not prediction or not key(prediction):
    return 0.0
  return float(any(key(prediction) == key(gold) for gold in golds))


def f1(prediction: str | None, golds: Iterable[str]) -> float:
  """Largest F1 of bags of normalised words over the golden answers."""
  if not prediction:
    return 0.0
  return max((_f1(prediction, gold) for gold in golds), default=0.0)


def _f1(prediction: str, gold: str) -> float:
  a, b = words(prediction), words(gold)
  same = sum((collections.Counter(a) & collections.Counter(b)).values())
  return 2 * same / (len(a) + len(b)) if same else 0.0


def sub_exact_match(prediction: str | None, golds: Iterable[str]) -> float:
  """1.0 if a normalised golden answer is a substring of the prediction's.

  Character level, as in Search-R1 ("ann" is in "annual"); a golden answer
  that normalises to nothing never matches.
  """
  return float(prediction is not None and contains(prediction, golds))


def contains(text: str, golds: Iterable[str]) -> bool:
  """Whether `text` contains a golden answer (both normalised)."""
  text = normalise(text)
  return any(normal and normal in text for normal in map(normalise, golds))


def states(text: str, golds: Iterable[str]) -> bool:
  """Whether `text` contains a golden answer in whole words (both normalised).

  "no" is in "he said no", not in "known".
  """
  wanted = [words(gold) for gold in golds if normalise(gold)]
  # Mostly a word is missing, which is cheaper to see.
  plain = folded(text).translate(_PUNCTUATION)
  wanted = [w for w in wanted if all(word in plain for word in w)]
  whole = f' {" ".join(words(text))} ' if wanted else ''
  return any(f' {" ".join(w)} ' in whole for w in wanted)


def pass_at_k(n: int, correct: int, k: int) -> float:
  """Unbiased pass@k: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, eq. 1).

  1 <= k <= n.
  """
  return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def maj_at_k(
  votes: Sequence[Hashable | None], correct: Sequence[bool], k: int
) -> float:
  """Expected correctness of the majority vote of k of the n samples.

  Exact: the mean over all C(n, k) subsets. Ties are split evenly. None is not
  a vote, and a subset without votes is wrong.

  Args:
    votes: keys (`key`) of n answers; None = no answer.
    correct: n flags; a vote is right if that of any equal one is set.
    k: number of votes, at most n.
  """
  n, right = len(votes), {v for v, flag in zip(votes, correct) if flag}
  counts = collections.Counter(v for v in votes if v is not None)
  silent = n - counts.total()
  won = 0.0
  for vote in filter(right.__contains__, counts):
    others = [c for v, c in counts.items() if v != vote]
    for top in range(1, min(counts[vote], k) + 1):
      mine = math.comb(counts[vote], top)
      for ties, ways in _at_most(others, silent, k - top, top).items():
        won += mine * ways / (ties + 1)
  return won / math.comb(n, k)


def _at_most(
  counts: list[int], silent: int, picks: int, top: int
) -> dict[int, int]:
  """Ways to pick at most `top` of each class, by the number that have `top`."""
  ways = {(0, 0): 1}  # (picked, classes at top) -> number of ways
  for count in counts:
    grown: dict[tuple[int, int], int] = collections.defaultdict(int)
    for (picked, ties), number in ways.items():
      for take in range(min(count, top, picks - picked) + 1):
        at = (picked + take, ties + (take == top))
        grown[at] += number * math.comb(count, take)
    ways = grown
  out: dict[int, int] = collections.defaultdict(int)
  for (picked, ties), number in ways.items():
    out[ties] += number * math.comb(silent, picks - picked)
  return out


def bootstrap(
  values: Sequence[float], *, resamples: int, seed: int
) -> Interval:
  """Returns the mean of `values` [n] with its 95 % bootstrap interval.

  The interval is between percentiles. Values must be independent: one per
  question, not one per sample; of paired samples, their differences. NaN for
  an empty input. Deterministic in (values, seed).
  """
  x = np.asarray(values, np.float64)
  if not len(x):
    return Interval(math.nan, math.nan, math.nan, 0)
  rng = np.random.default_rng(seed)
  rows = max(1, _CHUNK // len(x))
  sizes = [min(rows, resamples - i) for i in range(0, resamples, rows)]
  draws = (rng.integers(len(x), size=(n, len(x))) for n in sizes)
  means = np.concatenate([x[drawn].mean(1) for drawn in draws])
  tail = (1.0 - 0.95) / 2
  low, high = np.quantile(means, (tail, 1.0 - tail))
  return Interval(float(x.mean()), float(low), float(high), len(x))
