"""Raw fields to checked Questions: what every data module shares."""

from collections.abc import Iterable, Mapping, Sequence
import types
from typing import Any

import numpy as np

from searchrl_jax.run import lookup
from searchrl_jax.types import Question


class DataError(ValueError):
  """The data cannot be used; the message names file, line and mend."""


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

  Raises:
    DataError: a field that is absent or of another kind.
  """
  if isinstance(id, bool) or not isinstance(id, (str, int, np.integer)):
    raise DataError(f'{where}: the id is {_shown(id)}; give a string')
  if id == '':
    raise DataError(f'{where}: the id is empty; give a string')
  if not isinstance(hops or 0, (int, np.integer)):
    raise DataError(
      f'{where}: the hops of question {str(id)!r} are {_shown(hops)}; give '
      'an integer'
    )
  if not isinstance(text, str) or not text.strip():
    raise DataError(
      f'{where}: question {str(id)!r} has no text (found {_shown(text)}); '
      'give the question as a string, or remove the record'
    )
  return Question(
    id=str(id),
    text=text.strip(),
    answers=strings(answers, f'{where}: the answers of question {str(id)!r}'),
    source=str(source or ''),
    hops=int(hops or 0),
    supporting=strings(
      supporting, f'{where}: the supporting ids of question {str(id)!r}'
    ),
    messages=tuple(messages),
    meta=dict(meta),
  )


def strings(value: Any, what: str) -> tuple[str, ...]:
  """A str, None, or a sequence of str and numbers, as a tuple of str."""
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
  """None or a mapping, as a dict."""
  if value is None:
    return {}
  if isinstance(value, Mapping):
    return dict(value)
  raise DataError(f'{what} is {_shown(value)}; give an object')


def hops_of(metadata: Mapping[str, Any]) -> int:
  """Hops by what FlashRAG keeps of a multi-hop set; 0 = unknown.

  MuSiQue: its steps. HotpotQA and 2WikiMultihopQA, which name supporting
  facts: two, and four of a comparison of bridges.
  """
  steps = metadata.get('question_decomposition')
  if steps and isinstance(steps, list):
    return len(steps)
  facts = metadata.get('supporting_facts')
  if not isinstance(facts, Mapping) or not len(facts.get('title') or ()):
    return 0
  return 4 if metadata.get('type') == 'bridge_comparison' else 2


# Of FlashRAG's metadata: passages, for readers that are given them. A log of
# trajectories would hold them once a sample.
PASSAGES = ('context', 'question_decomposition')


def pick(record: Mapping[str, Any], field: str, where: str) -> Any:
  """record['a']['b'] for the field 'a.b'.

  Raises:
    DataError: there is no such field; names those that exist.
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
  answers: str,
  supporting: str,
  source: str,
  hops: str,
) -> list[Question]:
  """Questions of rows by their fields' names ('a.b' reaches inside).

  id = '' takes the row's number; another '' leaves that field unknown.

  Raises:
    DataError: a field that is absent (near names) or of another kind; the
      message names the row.
  """
  fields = {
    'answers': answers,
    'supporting': supporting,
    'source': source,
    'hops': hops,
  }

  def made():
    for i, row in enumerate(rows):
      at = f'{where} row {i}'
      yield (
        at,
        make_question(
          at,
          id=pick(row, id, at) if id else i,
          text=pick(row, question, at),
          **{k: pick(row, name, at) for k, name in fields.items() if name},
        ),
      )

  return unique(made(), where)


def unique(found: Iterable[tuple[str, Question]], path: str) -> list[Question]:
  """Keeps (where, question) pairs whose ids are all different.

  Raises:
    DataError: a repeated id, with both places; or no question at all.
  """
  seen: dict[str, str] = {}
  out = []
  for where, q in found:
    if q.id in seen:
      raise DataError(
        f'{where}: id {q.id!r} was already used at {seen[q.id]}; give every '
        'question an id of its own'
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
  """Filters, then draws n of them without replacement, in file order.

  Args:
    source: keeps questions of this source; '' = all. 'nq*' = by prefix.
    hops: keeps questions of so many hops; 0 = all.
    split: keeps questions whose meta['split'] is this; '' = all.
    n: how many to draw; 0 = all.
    seed: of the draw.

  Raises:
    DataError: a filter that leaves nothing, or fewer than n.
  """
  kept = list(questions)
  if source:
    match = (
      (lambda s: s.startswith(source[:-1]))
      if source.endswith('*')
      else (lambda s: s == source)
    )
    kept = [q for q in kept if match(q.source)]
    lookup.require(
      kept,
      f'{path}: no question of source={source!r}: '
      f'{lookup.near(source, {q.source for q in questions})}',
      DataError,
    )
  if hops:
    has = sorted({q.hops for q in kept})
    kept = [q for q in kept if q.hops == hops]
    lookup.require(
      kept, f'{path}: no question of hops={hops}; there are: {has}', DataError
    )
  if split:
    has = {str(q.meta.get('split', '')) for q in kept}
    kept = [q for q in kept if q.meta.get('split') == split]
    lookup.require(
      kept,
      f'{path}: no question of split={split!r}: {lookup.near(split, has)}',
      DataError,
    )
  lookup.require(n >= 0, f'{path}: n={n} must be 0 (all) or more', DataError)
  if n:
    lookup.require(
      n <= len(kept),
      f'{path}: n={n} questions asked for, {len(kept)} there; n=0 takes all',
      DataError,
    )
    drawn = np.random.default_rng(seed).permutation(len(kept))[:n]
    kept = [kept[i] for i in sorted(drawn)]
  return kept


def require_answers(questions: Iterable[Question], what: str) -> None:
  """Checks that every question has a golden answer.

  Args:
    what: who needs them, for the error ('reward answer.em').

  Raises:
    DataError: names the first questions without one.
  """
  bare = [q.id for q in questions if not any(a.strip() for a in q.answers)]
  lookup.require(
    not bare,
    f'{what} needs golden answers, and {len(bare)} questions have none: '
    f'{", ".join(map(repr, bare[:5]))}{", ..." if len(bare) > 5 else ""}; '
    'add them, leave these questions out, or choose a reward without them',
    DataError,
  )


def _shown(value: Any) -> str:
  shown = repr(value)
  return shown if len(shown) <= 60 else shown[:57] + '...'
