"""Questions from JSON lines (or a JSON array), plain or gzipped.

Layouts:
  flashrag  `{"id", "question", "golden_answers", "metadata"}` of FlashRAG's
            datasets (hops by the metadata, whose passages are left out);
            our own files add `supporting_ids`, `source`, `hops`, `split`. A
            file of your own needs `id` and `question`.
  hotpotqa  HotpotQA's own (Yang et al., EMNLP 2018).
  2wiki     2WikiMultihopQA's own (Ho et al., COLING 2020).
  musique   MuSiQue's own (Trivedi et al., TACL 2022).
  ttrl      TTRL's (Zuo et al. 2025) of AIME, AMC, MATH-500 and GPQA: `prompt`,
            `answer`, `source`, `id`; its MATH-L1 to L5: `unique_id`, and
            `answer` or, without it, the box in `solution`. Prompts are bare
            questions: as they are, they are a chat of one message.
  ssp       SSP's (Lu et al. 2025), answers to ask about: `ground_truth`,
            `search_turns`, `sys_question_example`. The text is the answer,
            the id the place in the file.
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
    path: .jsonl, .json, or either gzipped (told by the content).
    layout: see the top of this file.
    source: keeps this source ('nq*' = by prefix); '' = all.
    hops: keeps questions of so many hops; 0 = all.
    split: keeps this split (the record's `split`); '' = all.
    n: questions drawn without replacement; 0 = all.
    seed: of the draw.

  Raises:
    DataError: names file and line.
  """
  lookup.require(
    layout in LAYOUTS,
    f'layout {layout!r}: {lookup.near(layout, LAYOUTS)}',
    DataError,
  )
  make = LAYOUTS[layout]
  questions = checks.unique(
    ((where, make(record, where)) for where, record in read(path)), path
  )
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
      f'{path}: the gzip file is cut short or damaged ({e}); copy or '
      'compress it again'
    ) from None
  except OSError as e:
    raise DataError(f'{path}: cannot be read ({e.strerror})') from None
  data = data.removeprefix(b'\xef\xbb\xbf')
  if data.lstrip()[:1] == b'[':
    try:
      found = json.loads(data)
    except ValueError as e:  # UnicodeDecodeError is one
      raise DataError(f'{path}: not a JSON array: {e}') from None
    for i, record in enumerate(found):
      yield f'{path}[{i}]', _object(record, f'{path}[{i}]')
    return
  # By '\n' alone: JSON strings may hold other line separators (U+2028).
  for i, line in enumerate(data.split(b'\n'), 1):
    if not line.strip():
      continue
    where = f'{path}:{i}'
    try:
      record = json.loads(line)
    except (ValueError, RecursionError) as e:
      raise DataError(
        f'{where}: not JSON ({e}); every line must be one whole JSON object'
      ) from None
    yield where, _object(record, where)


def _object(record: Any, where: str) -> dict[str, Any]:
  if not isinstance(record, dict):
    raise DataError(
      f'{where}: a JSON {type(record).__name__}, not an object; write '
      '{"id": ..., "question": ..., "golden_answers": [...]}'
    )
  return record


def _need(record: Mapping[str, Any], key: str, where: str) -> Any:
  if record.get(key) is None:
    raise DataError(
      f'{where}: there is no {key!r} (found: '
      f'{", ".join(map(repr, record)) or "nothing"}); add it, or correct '
      'config: layout'
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
    id=_need(record, 'id', where),
    text=_need(record, 'question', where),
    answers=answers,
    source=record.get('source', ''),
    hops=hops,
    supporting=record.get('supporting_ids', ()),
    meta=meta,
  )


def _titled(
  record: Mapping[str, Any], where: str, source: str, hops: int
) -> Question:
  """A question whose paragraphs have titles, not ids of a corpus."""
  return checks.make_question(
    where,
    id=_need(record, '_id', where),
    text=_need(record, 'question', where),
    answers=record.get('answer'),
    source=source,
    hops=hops,
    meta={
      'supporting_titles': list(
        dict.fromkeys(t for t, _ in _need(record, 'supporting_facts', where))
      ),
      'type': record.get('type', ''),
    },
  )


def hotpotqa(record: Mapping[str, Any], where: str) -> Question:
  return _titled(record, where, 'hotpotqa', 2)


def two_wiki(record: Mapping[str, Any], where: str) -> Question:
  hops = 4 if record.get('type') == 'bridge_comparison' else 2
  return _titled(record, where, '2wikimultihopqa', hops)


def musique(record: Mapping[str, Any], where: str) -> Question:
  name = str(_need(record, 'id', where))
  answers = checks.strings(record.get('answer'), f'{where}: the answers')
  answers += checks.strings(
    record.get('answer_aliases'), f'{where}: the answer_aliases'
  )
  paragraphs = _need(record, 'paragraphs', where)
  return checks.make_question(
    where,
    id=name,
    text=_need(record, 'question', where),
    answers=answers,
    source='musique',
    hops=int(name[0]) if name[:1].isdigit() else 0,  # '2hop__...'
    meta={
      'supporting_titles': [
        p['title'] for p in paragraphs if p.get('is_supporting')
      ],
      'answerable': record.get('answerable', True),
    },
  )


def ttrl(record: Mapping[str, Any], where: str) -> Question:
  answer = record.get('answer')
  if answer is None and isinstance(record.get('solution'), str):
    answer = parser.boxed(record['solution'])
  text = _need(record, 'prompt', where)
  return checks.make_question(
    where,
    id=_need(record, 'id' if 'id' in record else 'unique_id', where),
    text=text,
    answers=None if answer is None else [answer],
    source=record.get('source', ''),
    messages=({'role': 'user', 'content': text},),
  )


def ssp(record: Mapping[str, Any], where: str) -> Question:
  answers = checks.strings(
    _need(record, 'ground_truth', where), f'{where}: the ground_truth'
  )
  turns = _need(record, 'search_turns', where)
  lookup.require(
    re.fullmatch('0*[1-9][0-9]*', str(turns)),
    f'{where}: search_turns={turns!r}: a whole number of searches, at least 1',
    DataError,
  )
  examples = _need(record, 'sys_question_example', where)
  return checks.make_question(
    where,
    id=record.get('id', f'ssp-{re.findall("[0-9]+", where)[-1]}'),
    text=answers[0] if answers else '',
    answers=answers,
    source='ssp',
    meta={
      'search_turns': turns,
      'examples': '\n'.join(
        checks.strings(examples, f'{where}: the sys_question_example')
      ),
    },
  )


LAYOUTS = {
  'flashrag': flashrag,
  'hotpotqa': hotpotqa,
  '2wiki': two_wiki,
  'musique': musique,
  'ttrl': ttrl,
  'ssp': ssp,
}
