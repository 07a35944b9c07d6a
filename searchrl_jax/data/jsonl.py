"""Questions from JSON lines (or a JSON array), plain or gzipped.

Layouts:
  flashrag  FlashRAG's `{"id", "question", "golden_answers", "metadata"}`. Hops
            follow from the metadata, whose passages are left out. This
            project's files add `supporting_ids`, `source`, `hops`, `split`.
            Only `id` and `question` are required.
  hotpotqa  HotpotQA (Yang et al., EMNLP 2018).
  2wiki     2WikiMultihopQA (Ho et al., COLING 2020).
  musique   MuSiQue (Trivedi et al., TACL 2022).
  ttrl      TTRL (Zuo et al. 2025): AIME, AMC, MATH-500 and GPQA with `prompt`,
            `answer`, `source`, `id`; MATH-L1 to L5 with `unique_id`, and
            `answer` or else the box in `solution`. A prompt is a bare
            question; with data.prompt='as_is' it is a chat of one message.
  ssp       SSP (Lu et al. 2025), answers to ask questions about:
            `ground_truth`, `search_turns`, `sys_question_example`. The text is
            the answer, the id the position in the file.
"""

from collections.abc import Iterator, Mapping
import gzip
import json
import re
from typing import Any
import zlib

from searchrl_jax.data import checks
from searchrl_jax.data.checks import DataError
from searchrl_jax.run import lookup
from searchrl_jax.text import parser
from searchrl_jax.types import Question

_GZIP_MAGIC = b'\x1f\x8b'
_ANSWERS = ('golden_answers', 'answers', 'answer')


def load(
  path: str,
  layout: str = 'flashrag',
  source: str = '',
  hops: int = 0,
  split: str = '',
  n: int = 0,
  seed: int = 0,
) -> list[Question]:
  """Reads a file, filters it, and draws n questions, in file order.

  Args:
    path: .jsonl or .json, gzipped or not (detected by the content).
    layout: see the module docstring.
    source: keep this source ('nq*' = by prefix); '' = all.
    hops: keep this number of hops; 0 = all.
    split: keep this split (the record's `split`); '' = all.
    n: questions drawn without replacement; 0 = all.
    seed: of the draw.

  Raises:
    DataError: the file cannot be used; names file and line.
  """
  lookup.require(
    layout in LAYOUTS,
    f'layout {layout!r} is unknown: {lookup.near(layout, LAYOUTS)}',
    DataError,
  )
  make = LAYOUTS[layout]
  pairs = ((where, make(record, where)) for where, record in read(path))
  questions = checks.unique(pairs, path)
  return checks.choose(
    questions, path=path, source=source, hops=hops, split=split, n=n, seed=seed
  )


def read(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yields ('file:line', record); for a JSON array ('file[index]', record).

  Raises:
    DataError: the file is absent, damaged or not UTF-8, or a line is not a
      JSON object.
  """
  try:
    with open(path, 'rb') as f:
      zipped = f.read(2) == _GZIP_MAGIC
    with (gzip.open if zipped else open)(path, 'rb') as f:
      data = f.read()
  except (EOFError, zlib.error, gzip.BadGzipFile) as e:
    raise DataError(
      f'{path}: the gzip file is cut short or damaged ({e}); copy it again'
    ) from None
  except OSError as e:
    raise DataError(f'{path}: cannot be read ({e.strerror})') from None
  data = data.removeprefix(b'\xef\xbb\xbf')
  if data.lstrip()[:1] == b'[':
    try:
      items = json.loads(data)
    except ValueError as e:  # UnicodeDecodeError is one
      raise DataError(f'{path}: not a JSON array: {e}') from None
    for i, record in enumerate(items):
      yield f'{path}[{i}]', _object(record, f'{path}[{i}]')
    return
  # Split at '\n' only: JSON strings may hold other line separators (U+2028).
  for i, line in enumerate(data.split(b'\n'), 1):
    if not line.strip():
      continue
    where = f'{path}:{i}'
    try:
      record = json.loads(line)
    except (ValueError, RecursionError) as e:
      raise DataError(
        f'{where}: not JSON ({e}); every line must be a complete JSON object'
      ) from None
    yield where, _object(record, where)


def _object(record: Any, where: str) -> dict[str, Any]:
  if not isinstance(record, dict):
    raise DataError(
      f'{where}: a JSON {type(record).__name__}, not an object; write '
      '{"id": ..., "question": ..., "golden_answers": [...]}'
    )
  return record


def _required(record: Mapping[str, Any], key: str, where: str) -> Any:
  if record.get(key) is None:
    raise DataError(
      f'{where}: there is no {key!r} (fields: '
      f'{", ".join(map(repr, record)) or "none"}); add it, or set another '
      'layout in the config'
    )
  return record[key]


def flashrag(record: Mapping[str, Any], where: str) -> Question:
  answers = next((record[k] for k in _ANSWERS if k in record), ())
  meta = checks.mapping(record.get('metadata'), f'{where}: the metadata')
  hops = record.get('hops') or checks.hops_of(meta)
  meta = {k: v for k, v in meta.items() if k not in checks.PASSAGES}
  if record.get('split'):
    meta['split'] = record['split']
  return checks.make_question(
    where,
    id=_required(record, 'id', where),
    text=_required(record, 'question', where),
    answers=answers,
    source=record.get('source', ''),
    hops=hops,
    supporting=record.get('supporting_ids', ()),
    meta=meta,
  )


def _titled(
  record: Mapping[str, Any], where: str, source: str, hops: int
) -> Question:
  """A question whose supporting paragraphs have titles, not corpus ids."""
  keys = ('_id', 'question', 'supporting_facts')
  name, text, facts = [_required(record, key, where) for key in keys]
  titles = list(dict.fromkeys(title for title, _ in facts))
  return checks.make_question(
    where,
    id=name,
    text=text,
    answers=record.get('answer'),
    source=source,
    hops=hops,
    meta={'supporting_titles': titles, 'type': record.get('type', '')},
  )


def hotpotqa(record: Mapping[str, Any], where: str) -> Question:
  return _titled(record, where, 'hotpotqa', 2)


def two_wiki(record: Mapping[str, Any], where: str) -> Question:
  hops = 4 if record.get('type') == 'bridge_comparison' else 2
  return _titled(record, where, '2wikimultihopqa', hops)


def musique(record: Mapping[str, Any], where: str) -> Question:
  name = str(_required(record, 'id', where))
  answers = ()
  for field in ('answer', 'answer_aliases'):
    answers += checks.strings(record.get(field), f'{where}: the field {field}')
  titles = [
    p['title']
    for p in _required(record, 'paragraphs', where)
    if p.get('is_supporting')
  ]
  return checks.make_question(
    where,
    id=name,
    text=_required(record, 'question', where),
    answers=answers,
    source='musique',
    hops=int(name[0]) if name[:1].isdigit() else 0,  # '2hop__...'
    meta={
      'supporting_titles': titles,
      'answerable': record.get('answerable', True),
    },
  )


def ttrl(record: Mapping[str, Any], where: str) -> Question:
  answer = record.get('answer')
  if answer is None and isinstance(record.get('solution'), str):
    answer = parser.boxed(record['solution'])
  text = _required(record, 'prompt', where)
  return checks.make_question(
    where,
    id=_required(record, 'id' if 'id' in record else 'unique_id', where),
    text=text,
    answers=None if answer is None else [answer],
    source=record.get('source', ''),
    messages=({'role': 'user', 'content': text},),
  )


def ssp(record: Mapping[str, Any], where: str) -> Question:
  answers, examples = (
    checks.strings(_required(record, name, where), f'{where}: the {name}')
    for name in ('ground_truth', 'sys_question_example')
  )
  turns = _required(record, 'search_turns', where)
  lookup.require(
    re.fullmatch('0*[1-9][0-9]*', str(turns)),
    f'{where}: search_turns={turns!r} must be an integer of at least 1',
    DataError,
  )
  return checks.make_question(
    where,
    id=record.get('id', f'ssp-{re.findall("[0-9]+", where)[-1]}'),
    text=answers[0] if answers else '',
    answers=answers,
    source='ssp',
    meta={'search_turns': turns, 'examples': '\n'.join(examples)},
  )


LAYOUTS = dict(
  flashrag=flashrag, hotpotqa=hotpotqa, musique=musique, ttrl=ttrl, ssp=ssp
) | {'2wiki': two_wiki}
