"""Equality of answers: as text, or by a user's function.

`match` is 'text' (equal normal forms, as in exact match) or the dotted name of
a function `equal(a, b) -> bool`. `equal(a, a)` is False if a text is not an
answer. experiments.ttrl.mathematics.equal compares mathematical answers.
"""

from collections.abc import Callable, Iterable

from searchrl_jax import lookup
from searchrl_jax.rewards import scores

TEXT = 'text'


def function(match: str) -> Callable[[str, str], bool]:
  """Returns the function of a match.

  Raises:
    ValueError: there is no such function.
  """
  if match == TEXT:
    return lambda gold, answer: scores.exact_match(answer, [gold]) == 1.0
  with lookup.of(
    f"match={match!r} is neither 'text' nor the dotted name of a function "
    'equal(a, b), such as experiments.ttrl.mathematics.equal'
  ):
    return lookup.function('searchrl_jax', match)


def correct(answer: str | None, golds: Iterable[str], match: str) -> float:
  """1.0 if the answer equals a golden answer, else 0.0."""
  equal = function(match)
  return float(bool(answer) and any(equal(gold, answer) for gold in golds))


def keys(answers: Iterable[str | None], match: str) -> list[str | None]:
  """Returns a key per answer; equal answers have equal keys.

  Equality may not be transitive (for some checkers 50% equals 50 and 0.5). An
  answer gets the key of the first answer that it equals.

  Args:
    answers: None = no answer.
    match: see the module docstring.

  Returns:
    For 'text' the normal form, else the first of the equal answers; None if
    there is no answer.
  """
  if match == TEXT:
    return [scores.key(answer or '') or None for answer in answers]
  equal, firsts, out = function(match), [], []
  for answer in answers:
    same = (f for f in firsts if answer and (f == answer or equal(f, answer)))
    key = next(same, None)
    if answer and key is None and equal(answer, answer):
      firsts.append(answer)
      key = answer
    out.append(key)
  return out
