"""When two answers are one: as text, or by a function of your own.

A match is 'text' (equal normal forms, as in exact match), or the dotted name of
a function `equal(a, b) -> bool` that says whether two texts are one answer.
`equal(a, a)` says whether a text is an answer at all. For mathematics there is
experiments.ttrl.mathematics.equal.
"""

from collections.abc import Callable, Iterable, Sequence

from searchrl_jax.rewards import scores
from searchrl_jax.run import lookup

TEXT = 'text'


def function(match: str) -> Callable[[str, str], bool]:
  """The function that a match other than 'text' names.

  Raises:
    ValueError: there is none.
  """
  try:
    return lookup.function('searchrl_jax', match)
  except ValueError as e:
    raise ValueError(
      f"match={match!r} is neither 'text' nor the dotted name of a function "
      f'equal(a, b), such as experiments.ttrl.mathematics.equal: {e}'
    ) from e


def correct(answer: str | None, golds: Iterable[str], match: str) -> float:
  """1.0 if the answer is a golden one, else 0.0."""
  if match == TEXT:
    return scores.exact_match(answer, golds)
  equal = function(match)
  return float(bool(answer) and any(equal(gold, answer) for gold in golds))


def keys(
  answers: Iterable[str | None],
  match: str,
  synonyms: Iterable[Sequence[str]] = (),
) -> list[str | None]:
  """A string for each answer, equal where the answers are.

  Equality may not carry over (50% is both 50 and 0.5 to some checkers): an
  answer belongs to the first one that it is equal to.

  Args:
    answers: None = there is none.
    match: see the top.
    synonyms: lists of names of one thing each, for 'text'.

  Returns:
    Text's normal form (of its first synonym, where it has any), or the first
    of the equal answers; None for one that says nothing.

  Raises:
    ValueError: names that are not in lists.
  """
  if match == TEXT:
    if any(isinstance(names, str) for names in synonyms):
      raise ValueError(
        f'synonyms={synonyms!r}: expected lists, each of the names of one thing'
      )
    first = {scores.key(n): scores.key(s[0]) for s in synonyms for n in s}
    found = [scores.key(answer or '') for answer in answers]
    return [first.get(key, key) or None for key in found]
  equal, firsts, out = function(match), [], []
  for answer in answers:
    mine = next(
      (
        one
        for one in firsts
        if answer and (one == answer or equal(one, answer))
      ),
      None,
    )
    if answer and mine is None and equal(answer, answer):
      firsts.append(answer)
      mine = answer
    out.append(mine)
  return out
