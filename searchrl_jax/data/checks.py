"""Builds checked Questions from raw fields, for every data module."""

from collections.abc import Iterable, Mapping, Sequence
import types
from typing import Any

import numpy as np

from searchrl_jax.run import lookup
from searchrl_jax.types import Question


class DataError(ValueError):
  """The data cannot be used; the message names file, line and the fix."""


def make_question(
  where: str,
  *,
  id: Any,
  text: Any,
  answers: Any = (),
  source: Any = '',
  hops: Any = 0,
  supporting: Any = (),
  messages: Sequence[Mapping[str, str]] = (),
  meta: Mapping[str, Any] = types.MappingProxyType({}),
) -> Question:
  """Checks raw fields and makes a Question.

  Args:
    where: 'file:line', for errors.
    id: a str or an int.
    text: the question, a str that is not blank.
    answers: None, a str, or any sequence (list, numpy array) of str.
    source: the data set; None = ''.
    hops: an int; None = 0 = unknown.
    supporting: corpus ids, given as the answers are.
    messages: the ready-made prompt.
    meta: more about the question.

  Raises:
    DataError: a field is absent or has the wrong type.
  """
  good_id = isinstance(id, (str, int, np.integer)) and type(id) is not bool
  of = f'of question {str(id)!r}'
  for good, message in (
    (good_id, f'the id is {_shown(id)}; give a string'),
    (id != '', 'the id is empty; give a string'),
    (
      isinstance(hops or 0, (int, np.integer)),
      f'the hops {of} are {_shown(hops)}; give an integer',
    ),
    (
      isinstance(text, str) and text.strip(),
      f'question {str(id)!r} has no text (found {_shown(text)}); give the '
      'question as a string, or remove the record',
    ),
  ):
    lookup.require(good, f'{where}: {message}', DataError)
  return Question(
    id=str(id),
    text=text.strip(),
    answers=strings(answers, f'{where}: the answers {of}'),
    source=str(source or ''),
    hops=int(hops or 0),
    supporting=strings(supporting, f'{where}: the supporting ids {of}'),
    messages=tuple(messages),
    meta=dict(meta),
  )


def strings(value: Any, what: str) -> tuple[str, ...]:
  """Converts None, a str or a sequence of str and numbers to a tuple of str."""
  if value is None:
    return ()
  if isinstance(value, str):
    return (value,)
  if isinstance(value, np.ndarray):
    value = value.tolist()
  if isinstance(value, Iterable) and not isinstance(value, (Mapping, bytes)):
    value = list(value)
    if all(
      isinstance(v, (str, int, float, np.number)) and not isinstance(v, bool)
      for v in value
    ):
      return tuple(str(v) for v in value)
  raise DataError(f'{what} are {_shown(value)}; give a list of strings')


def mapping(value: Any, what: str) -> dict[str, Any]:
  """Converts None or a mapping to a dict."""
  if value is None:
    return {}
  if isinstance(value, Mapping):
    return dict(value)
  raise DataError(f'{what} is {_shown(value)}; give an object')


def hops_of(metadata: Mapping[str, Any]) -> int:
  """Number of hops according to FlashRAG's metadata; 0 = unknown.

  MuSiQue: the number of its steps. HotpotQA and 2WikiMultihopQA, which have
  supporting facts: 2, or 4 for a 'bridge_comparison'.
  """
  steps = metadata.get('question_decomposition')
  if steps and isinstance(steps, list):
    return len(steps)
  facts = metadata.get('supporting_facts')
  if not isinstance(facts, Mapping) or not len(facts.get('title') or ()):
    return 0
  return 4 if metadata.get('type') == 'bridge_comparison' else 2


# Fields of FlashRAG's metadata that hold passages. They are left out because a
# log of trajectories would repeat them in every sample.
PASSAGES = ('context', 'question_decomposition')


def pick(record: Mapping[str, Any], field: str, where: str) -> Any:
  """Returns record['a']['b'] for the field 'a.b'.

  Raises:
    DataError: there is no such field; the message lists those that exist.
  """
  value: Any = record
  for i, key in enumerate(field.split('.')):
    if not isinstance(value, Mapping) or key not in value:
      inside = '.'.join(field.split('.')[:i])
      names = list(value) if isinstance(value, Mapping) else ()
      raise DataError(
        f'{where}: no field {field!r}'
        + (f' (looked in {inside!r})' if inside else '')
        + (f'; {lookup.near(key, names)}' if names else '')
      )
    value = value[key]
  return value


def mapped(
  rows: Iterable[Mapping[str, Any]],
  where: str,
  *,
  id: str,
  question: str,
  **fields: str,
) -> list[Question]:
  """Makes questions of rows, given the names of fields ('a.b' is nested).

  Args:
    rows: the records.
    where: name of the data set, for errors.
    id: field of the id; '' = the row's number.
    question: field of the text.
    **fields: parameter of `make_question`=name of the field; '' = unknown.

  Raises:
    DataError: a field is absent or has the wrong type; names the row.
  """

  def pairs():
    for i, row in enumerate(rows):
      at = f'{where} row {i}'
      values = {k: pick(row, name, at) for k, name in fields.items() if name}
      values['id'] = pick(row, id, at) if id else i
      yield at, make_question(at, text=pick(row, question, at), **values)

  return unique(pairs(), where)


def unique(pairs: Iterable[tuple[str, Question]], path: str) -> list[Question]:
  """Returns the questions of (where, question) pairs.

  Raises:
    DataError: an id occurs twice (names both places), or there is no question.
  """
  seen: dict[str, str] = {}
  out = []
  for where, q in pairs:
    if q.id in seen:
      raise DataError(
        f'{where}: id {q.id!r} was already used at {seen[q.id]}; give every '
        'question a different id'
      )
    seen[q.id] = where
    out.append(q)
  if not out:
    raise DataError(f'{path}: there is no question in it')
  return out


def choose(
  questions: Sequence[Question],
  *,
  path: str,
  source: str = '',
  hops: int = 0,
  split: str = '',
  n: int = 0,
  seed: int = 0,
) -> list[Question]:
  """Filters questions, then draws n without replacement, in file order.

  Args:
    questions: in file order.
    path: for errors.
    source: keep this source ('nq*' = by prefix); '' = all.
    hops: keep this number of hops; 0 = all.
    split: keep this meta['split']; '' = all.
    n: how many to draw; 0 = all.
    seed: of the draw.

  Raises:
    DataError: no question passes a filter, or fewer than n do.
  """
  kept = list(questions)
  for name, wanted, field in (
    ('source', source, lambda q: q.source),
    ('hops', hops, lambda q: q.hops),
    ('split', split, lambda q: q.meta.get('split', '')),
  ):
    if not wanted:
      continue
    values = {field(q) for q in kept}
    matching = {v for v in values if v == wanted}
    if name == 'source' and source.endswith('*'):
      matching = {v for v in values if v.startswith(source[:-1])}
    hint = 'there are: ' + str(sorted(values, key=str))
    if isinstance(wanted, str):
      hint = lookup.near(wanted, map(str, values))
    lookup.require(
      matching, f'{path}: no question has {name}={wanted!r}; {hint}', DataError
    )
    kept = [q for q in kept if field(q) in matching]
  lookup.require(n >= 0, f'{path}: n={n} must be 0 (all) or more', DataError)
  lookup.require(
    n <= len(kept),
    f'{path}: n={n} questions requested, {len(kept)} available; n=0 takes all',
    DataError,
  )
  drawn = np.random.default_rng(seed).permutation(len(kept))[: n or None]
  return [kept[i] for i in sorted(drawn)]


def require_answers(questions: Iterable[Question], what: str) -> None:
  """Checks that every question has a golden answer.

  Args:
    questions: the questions to check.
    what: what needs the answers, for the error ('reward answer.em').

  Raises:
    DataError: names the first questions without an answer.
  """
  bare = [q.id for q in questions if not any(a.strip() for a in q.answers)]
  lookup.require(
    not bare,
    f'{what} needs golden answers, but {len(bare)} questions have none: '
    f'{", ".join(map(repr, bare[:5]))}{", ..." if len(bare) > 5 else ""}; '
    'add answers, leave these questions out, or use a reward without answers',
    DataError,
  )


def _shown(value: Any) -> str:
  shown = repr(value)
  return shown if len(shown) <= 60 else shown[:57] + '...'
