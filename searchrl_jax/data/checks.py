"""Builds checked Questions from raw fields, for every data module."""

import ast
from collections.abc import Iterable, Mapping
import fnmatch
import io
import itertools
import json
import math
import re
import tokenize
from typing import Any

import numpy as np

from searchrl_jax import lookup
from searchrl_jax.types import Question

# Begins and ends like the text of a list of texts or of objects, or is cut.
_LISTED = re.compile(
  r"""array\(\[.*
  | [\[{]\s* ["'] [^\]}]*
  | [\[{]\s* (
      (np\. | nan\b | array\( | \{\s*["']) .*
      | (["']) .*? \3 \s* [,:] .*
      | ["'] .* ["'] \s*
    ) [\]}]""",
  re.DOTALL | re.VERBOSE,
)


class DataError(ValueError):
  """The data cannot be used; the message names file, line and the fix."""


def require(good: Any, message: str) -> None:
  lookup.require(good, message, DataError)


def make_question(
  where: str, *, id, text, answers=(), supporting=(), source='', hops=0, **more
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
    **more: messages (the ready-made prompt), meta.

  Raises:
    DataError: a field is absent or has the wrong type.
  """
  good = isinstance(id, (str, int, np.integer)) and type(id) is not bool
  of = f'of question {str(id)!r}'
  require(good and id != '', f'{where}: the id is {id!r:.60}; give a string')
  good = isinstance(hops or 0, (int, np.integer))
  require(good, f'{where}: the hops {of} are {hops!r:.60}, not an integer')
  good, found = isinstance(text, str) and text.strip(), f'{text!r:.60}'
  require(good, f'{where}: question {str(id)!r} has no text (found {found})')
  return Question(
    id=str(id),
    text=text.strip(),
    answers=strings(answers, f'{where}: the answers {of}'),
    source=str(source or ''),
    hops=int(hops or 0),
    supporting=strings(supporting, f'{where}: the supporting ids {of}'),
    **more,
  )


def strings(value: Any, what: str) -> tuple[str, ...]:
  """Converts None, a str or a sequence of str and numbers to a tuple of str.

  The text of a list (see `unpacked`) is this list. In a list, that of a list of
  numbers stays a string: it may be an interval, "[-2, 7]". Blank texts, such as
  the empty cell of a table, are left out.

  Raises:
    DataError: it is anything else, or a number is not finite; names `what`.
  """
  if isinstance(value, np.ndarray):
    value = value.tolist()
  if value is None:
    return ()
  alone = isinstance(value, str)
  wrong = f'{what} are {value!r:.60}; give a list of strings'
  require(alone or isinstance(value, (list, tuple)), wrong)
  out: list[str] = []
  for entry in [value] if alone else value:
    found = unpacked(entry, wrong) if isinstance(entry, str) else entry
    if isinstance(entry, str) and isinstance(found, list):
      several = alone or any(isinstance(x, str) for x in found)
      out += [_string(x, wrong) for x in found] if several else [entry]
    elif isinstance(entry, str) and isinstance(found, dict) and not alone:
      out.append(entry)  # a call of a tool, as text
    else:
      out.append(_string(found, wrong))
  return tuple(text for text in out if text.strip())


def _string(value: Any, wrong: str) -> str:
  """A whole float was an integer before pandas or JSON: 1995.0 is "1995"."""
  known = (str, int, float, np.number)
  require(isinstance(value, known) and not isinstance(value, bool), wrong)
  if isinstance(value, (float, np.floating)):
    require(math.isfinite(value), wrong)
    value = int(value) if value == int(value) else value
  return str(value)


def unpacked(text: str, wrong: str) -> Any:
  """The list or dict that `text` is the JSON or Python form of, else `text`.

  Tables (CSV, pandas) hold lists in this form, some as JSON of such a text.

  Raises:
    DataError(wrong): it looks like one and cannot be read as one.
  """
  bare = text.replace('\ufeff', '').strip()
  if not bare.startswith(('[', '{', '(', 'array(', '"[', '"{')):
    return text
  value: Any = None
  try:
    value = json.loads(bare)
  except (ValueError, RecursionError):
    try:
      value = ast.literal_eval(bare)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
      pass
    # Python joins texts that stand side by side: NumPy's "['a' 'b']" is ['ab'].
    value = None if value is not None and _side_by_side(bare) else value
  if isinstance(value, str) and bare[0] == '"':
    return unpacked(value, wrong)
  if isinstance(value, (list, dict)):
    return value
  # "(1, 2)" is a point.
  if isinstance(value, tuple) and any(isinstance(x, str) for x in value):
    return [*value]
  # A longer text is no cell of answers, and the pattern would take long.
  require(len(bare) > 10_000 or not _LISTED.fullmatch(bare), wrong)
  return text


def _side_by_side(code: str) -> bool:
  """Whether two texts of a Python value have nothing between them."""
  tokens = tokenize.generate_tokens(io.StringIO(code).readline)
  kinds = [token.type for token in tokens if token.type != tokenize.NL]
  return (tokenize.STRING, tokenize.STRING) in itertools.pairwise(kinds)


def mapping(value: Any, what: str) -> dict[str, Any]:
  """Converts None, a mapping or the text of one to a dict."""
  wrong = f'{what} is {value!r:.60}; give an object'
  value = unpacked(value, wrong) if isinstance(value, str) else value
  require(value is None or isinstance(value, Mapping), wrong)
  return dict(value or {})


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


def unique(pairs: Iterable[tuple[str, Question]], path: str) -> list[Question]:
  """Returns the questions of (where, question) pairs.

  Raises:
    DataError: an id occurs twice (names both places), or there is no question.
  """
  seen: dict[str, tuple[str, Question]] = {}
  for where, q in pairs:
    if q.id in seen:
      there = seen[q.id][0]
      raise DataError(f'{where}: id {q.id!r} was already used at {there}')
    seen[q.id] = where, q
  require(seen, f'{path}: there is no question in it')
  return [q for _, q in seen.values()]


def choose(
  pairs: Iterable[tuple[str, Question]],
  *,
  path,
  source='',
  hops=0,
  split='',
  n=0,
  seed=0,
) -> list[Question]:
  """Filters questions, then draws n without replacement, in file order.

  Args:
    pairs: (where, question), in file order. Ids have to differ among those that
      pass the filters: a file of several sources may count each from 0.
    path: for errors.
    source: keep this source ('nq*' = by prefix); '' = all.
    hops: keep this number of hops; 0 = all.
    split: keep this meta['split'], also by prefix; '' = all.
    n: how many to draw; 0 = all.
    seed: of the draw.

  Raises:
    DataError: no question passes a filter, or fewer than n do; see `unique`.
  """
  kept = [*pairs]
  for name, wanted, field in (
    ('source', source, lambda q: q.source),
    ('hops', hops, lambda q: q.hops),
    ('split', split, lambda q: q.meta.get('split', '')),
  ):
    if not wanted or not kept:
      continue
    values = {field(q) for _, q in kept}
    matching = {v for v in values if fnmatch.fnmatchcase(str(v), str(wanted))}
    hint = lookup.near(str(wanted), map(str, values))
    require(matching, f'{path}: no question has {name}={wanted!r}; {hint}')
    kept = [(where, q) for where, q in kept if field(q) in matching]
  left = unique(kept, path)
  good, there = 0 <= n <= len(left), f'{len(left)} available; n=0 takes all'
  require(good, f'{path}: n={n} questions requested, {there}')
  drawn = np.random.default_rng(seed).permutation(len(left))[: n or None]
  return [left[i] for i in sorted(drawn)]


def require_needs(users: Iterable[tuple], questions: Iterable[Question]):
  """Checks that questions have what the functions of a config need.

  A function says so in an attribute: `fn.needs = ('answers', 'supporting',
  'meta.known')`, or a function of its fields that returns such names. A key
  of Question.meta may have any value.

  Args:
    users: (where the config names it, function, its fields) of each.
    questions: the questions to check.

  Raises:
    DataError: names the first question that lacks something, the field of the
      config, and what would provide it.
  """
  wanted = []
  for where, fn, fields in users:
    names = getattr(fn, 'needs', ())
    names = names(fields) if callable(names) else names
    wanted += [(where, name) for name in names]
  for question in questions if wanted else ():
    for where, name in wanted:
      has, what, fix = _has(question, name)
      lack = f'question {question.id!r} has no {what}, which {where} needs'
      require(has, f'{lack}; {fix}')


def _has(question: Question, name: str) -> tuple[bool, str, str]:
  """Whether it has `name`, what this is, and what to do if it has not."""
  if name == 'answers':
    has = any(answer.strip() for answer in question.answers)
    fix = 'leave such questions out, or use another function'
    return has, 'golden answers', fix
  if name == 'supporting':
    fix = 'use a generated world, or a JSONL file with `supporting_ids`'
    return bool(question.supporting), 'supporting passages', fix
  key = name.removeprefix('meta.')
  fix = 'its data module has to set it; so does `metadata` in a JSONL file'
  return key in question.meta, f'meta[{key!r}]', fix
