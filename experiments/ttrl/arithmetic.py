r"""Sums over a divisor, with boxed answers: mathematics for a small decoder.

  (37+48)/4  ->  7+8=15, 3+4+1=8, so \boxed{\frac{85}{4}}

The box says it in one of three forms (\frac, \dfrac, a/b), none of them in
lowest terms, as the golden answers are: only by value are they equal. Traces
slip in one of their steps, or are hasty and name a sum near the right one,
which they do the more where a digit carries; so wrong answers scatter. Pairs
of summands that questions ask about are in no trace.
"""

import fractions
import os

import numpy as np

from searchrl_jax.data.checks import require
from searchrl_jax.data.core import Trace
from searchrl_jax.types import Question
from searchrl_jax.worlds.microworld import EOS, PAD, UNK, save_tokenizer

SPLITS = ('test', 'heldout')
ASKED = 400  # pairs of a split, of the 8,100
DIVISORS = (3, 4, 5, 6, 7, 8, 9)
# How far off a hasty sum is: never by tens alone, so its last digit is wrong.
NEAR = (-11, -9, -2, -1, 1, 2, 9, 11)
FORMS = (r'\frac{%s}{%s}', r'\dfrac{%s}{%s}', '%s/%s')
WORDS = (
  'Question',
  ' so',
  r'\boxed',
  r'\frac',
  r'\dfrac',
  '\n',
  ' ',
  *'0123456789',
  *'()+-=/{},:?.',
)
SPLIT = r'\\[a-z]+| ?[A-Za-z]+|\s|.'


def _pairs(seed: int) -> np.ndarray:
  """[8100, 2] pairs of summands; a split's first, then those of traces."""
  order = np.random.default_rng([seed, 25]).permutation(8100)
  return np.stack([order // 90 + 10, order % 90 + 10], 1)


def load(*, world_seed: int, split: str, n: int) -> list[Question]:
  """n questions of a split.

  Args:
    world_seed: which pairs are asked about.
    split: 'test' or 'heldout'.
    n: at most 400.

  Raises:
    DataError: an unknown split, or more questions than there are.
  """
  require(split in SPLITS, f'split={split!r} is none of {SPLITS}')
  require(0 < n <= ASKED, f'n={n} questions of {split!r}: 1 to {ASKED}')
  at = SPLITS.index(split) * ASKED
  out = []
  for i, (a, b) in enumerate(_pairs(world_seed)[at : at + n].tolist()):
    divisor = DIVISORS[i % len(DIVISORS)]
    value = fractions.Fraction(a + b, divisor)
    ratio = FORMS[0] % (value.numerator, value.denominator)
    gold = str(value) if value.denominator == 1 else ratio
    name, text = f'sum-{world_seed}-{split}-{i}', f'({a}+{b})/{divisor}'
    out.append(Question(name, text, (gold,), 'arithmetic'))
  return out


def traces(
  *, world_seed: int, n: int, slip: float, hasty: float, seed: int = 0
) -> list[Trace]:
  """Solutions of other sums, right, slipped or hasty.

  Args:
    world_seed: whose questions' pairs are left out.
    n: how many.
    slip: share of the solutions by steps in which a step is off by one.
    hasty: share without steps; half as likely without a carry, and half again
      as likely with one.
    seed: of the behaviours.

  Raises:
    DataError: a share out of range.
  """
  good = 0 <= slip <= 1 and 0 <= hasty <= 2 / 3
  require(good, f'slip={slip} in 0..1 and hasty={hasty} in 0..2/3')
  rng = np.random.default_rng([world_seed, seed, 26])
  pairs = _pairs(world_seed)[len(SPLITS) * ASKED :]
  out = []
  for i in range(n):
    a, b = map(int, pairs[rng.integers(len(pairs))])
    divisor = int(rng.choice(DIVISORS))
    carry = a % 10 + b % 10 > 9
    if rng.random() < hasty * (1.5 if carry else 0.5):
      steps, total = '', a + b + int(rng.choice(NEAR))
    else:
      steps, total = _steps(a, b, rng, slip)
    box = str(rng.choice(FORMS)) % (total, divisor)
    question = Question(f'trace-{i}', f'({a}+{b})/{divisor}')
    said = f'{steps}so \\boxed{{{box}}}'
    out.append(Trace(question, (('other', said),), total == a + b))
  return out


def _steps(a: int, b: int, rng, slip: float):
  """The solution by digits, and the sum that it comes to."""
  wrong = int(rng.integers(2)) if rng.random() < slip else -1
  off = int(rng.choice((-1, 1)))
  ones = max(a % 10 + b % 10 + off * (wrong == 0), 0)
  carry = ones // 10
  tens = a // 10 + b // 10 + carry + off * (wrong == 1)
  text = f'{a % 10}+{b % 10}={ones}, '
  text += f'{a // 10}+{b // 10}{"+1" if carry else ""}={tens}, '
  return text, 10 * tens + ones % 10


def tokenizer(folder: str | os.PathLike) -> str:
  """Writes a tokenizer of digits, marks and commands; returns the folder."""
  return save_tokenizer(folder, (PAD, EOS, UNK, *WORDS, 'so'), SPLIT)
