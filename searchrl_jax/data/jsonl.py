"""Questions from JSON lines (or a JSON array), plain or compressed.

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
  tau2      tasks of tau2-bench (Barres et al. 2025), banking_knowledge: `id`,
            `scenario`, `supporting_ids`. The text is what the customer wants;
            there is no answer, but documents that the task requires.
"""

from collections.abc import Iterable, Iterator, Mapping
import json
import re
from typing import Any

from retrieval import corpus, files
from searchrl_jax.data import checks
from searchrl_jax.data.checks import DataError, make_question, require
from searchrl_jax.lookup import near
from searchrl_jax.text import parser
from searchrl_jax.types import Question

_ANSWERS = ('golden_answers', 'answers', 'answer')


def load(
  path: str, layout='flashrag', source='', hops=0, split='', n=0, seed=0
) -> list[Question]:
  """Reads a file, filters it, and draws n questions, in file order.

  Args:
    path: .jsonl or .json, compressed or not (`files.unpacked`), in UTF-8 or 16.
    layout: see the module docstring.
    source: keep this source ('nq*' = by prefix); '' = all.
    hops: keep this number of hops; 0 = all.
    split: keep this split (the record's `split`); '' = all.
    n: questions drawn without replacement; 0 = all.
    seed: of the draw.

  Raises:
    DataError: the file cannot be used; names file and line.
  """
  filters = dict(source=source, hops=hops, split=split, n=n, seed=seed)
  return questions(read(path), path, layout, **filters)


def questions(
  records: Iterable[tuple[str, Mapping]], path: str, layout: str, **filters: Any
) -> list[Question]:
  """Of (where, record) pairs in a layout, by the filters of `checks.choose`."""
  known = layout in LAYOUTS
  require(known, f'layout {layout!r} is unknown: {near(layout, LAYOUTS)}')
  fields = LAYOUTS[layout]
  pairs = ((at, make_question(at, **fields(r, at))) for at, r in records)
  return checks.choose(pairs, path=path, **filters)


def read(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yields ('file:line', record); for a JSON array ('file[index]', record).

  Raises:
    DataError: the file is absent, damaged or not UTF-8, or a line is not a
      JSON object.
  """
  try:
    with open(path, 'rb') as file:
      data = b''.join(files.utf8_lines(files.unpacked(file)[1]))
  except (*files.DAMAGED, UnicodeError) as e:
    raise DataError(f'{path}: cannot be read ({e})') from e
  data = data.removeprefix(b'\xef\xbb\xbf')
  if data.lstrip()[:1] == b'[':
    array = enumerate(_parsed(data, path))
    found = ((f'{path}[{i}]', record) for i, record in array)
  else:
    # Split at '\n' only: JSON strings may hold other separators (U+2028).
    lines = enumerate(data.split(b'\n'), 1)
    places = ((f'{path}:{i}', line) for i, line in lines if line.strip())
    found = ((where, _parsed(line, where)) for where, line in places)
  for where, record in found:
    kind = type(record).__name__
    require(isinstance(record, dict), f'{where}: a JSON {kind}, not an object')
    yield where, record


def _parsed(text: bytes, where: str) -> Any:
  try:
    return json.loads(text)
  except (ValueError, RecursionError) as e:  # UnicodeDecodeError is one
    array = text.lstrip().startswith(b'[')
    fix = '' if array else corpus.other_format(text)
    problem = f'{where}: not JSON, one object a line ({e})'
    raise DataError(f'{problem}. {fix}' if fix else problem) from None


def _required(record: Mapping[str, Any], where: str, *keys: str) -> list[Any]:
  for key in keys:
    fields = f'(fields: {str([*record])[1:-1]})'
    what = f'{where}: there is no {key!r} {fields}; is the layout another?'
    require(record.get(key) is not None, what)
  return [record[key] for key in keys]


# Layouts: the arguments of `make_question` for a record.


def flashrag(record: Mapping[str, Any], where: str) -> dict:
  name, text = _required(record, where, 'id', 'question')
  meta = checks.mapping(record.get('metadata'), f'{where}: the metadata')
  hops = record.get('hops') or checks.hops_of(meta)
  meta = {k: v for k, v in meta.items() if k not in checks.PASSAGES}
  if record.get('split'):
    meta['split'] = record['split']
  # Of merged sets, some columns are empty.
  full = [k for k in _ANSWERS if record.get(k) not in (None, [], '')]
  key = next(iter(full), '')
  answers = record.get(key, ())
  if key == 'answer' and isinstance(answers, str):
    answers = [answers]  # one answer, which may be an interval, "[-2, 7]"
  return dict(
    id=name,
    text=text,
    answers=answers,
    source=record.get('source', ''),
    hops=hops,
    supporting=record.get('supporting_ids', ()),
    meta=meta,
  )


def _titled(record, where: str, **about) -> dict:
  """Of a question whose supporting paragraphs have titles, not corpus ids."""
  keys = ('_id', 'question', 'supporting_facts')
  name, text, facts = _required(record, where, *keys)
  what = f'{where}: supporting_facts are {facts!r:.60}, not [title, sentence]'
  if isinstance(facts, str):
    facts = checks.unpacked(facts, what)
  if isinstance(facts, dict) and isinstance(facts.get('title'), list):
    facts = [(title, None) for title in facts['title']]  # as `datasets` has it
  pair = lambda x: isinstance(x, (list, tuple)) and len(x) == 2
  good = isinstance(facts, list) and all(pair(x) for x in facts)
  require(good and all(isinstance(title, str) for title, _ in facts), what)
  titles = list(dict.fromkeys(title for title, _ in facts))
  meta = {'supporting_titles': titles, 'type': record.get('type', '')}
  answers = record.get('answer')
  return dict(id=name, text=text, answers=answers, meta=meta, **about)


def hotpotqa(record: Mapping[str, Any], where: str) -> dict:
  return _titled(record, where, source='hotpotqa', hops=2)


def two_wiki(record: Mapping[str, Any], where: str) -> dict:
  hops = 4 if record.get('type') == 'bridge_comparison' else 2
  return _titled(record, where, source='2wikimultihopqa', hops=hops)


def musique(record: Mapping[str, Any], where: str) -> dict:
  keys = ('id', 'question', 'paragraphs')
  name, text, paragraphs = _required(record, where, *keys)
  what = f'{where}: the paragraphs are {paragraphs!r:.60}, no list of objects'
  if isinstance(paragraphs, str):
    paragraphs = checks.unpacked(paragraphs, what)
  good = isinstance(paragraphs, list)
  require(good and all(isinstance(p, dict) for p in paragraphs), what)
  titles = [p.get('title') for p in paragraphs if p.get('is_supporting')]
  good = all(isinstance(title, str) for title in titles)
  require(good, f'{where}: a supporting paragraph has no title')
  answers = ()
  for field in ('answer', 'answer_aliases'):
    answers += checks.strings(record.get(field), f'{where}: the field {field}')
  answerable = record.get('answerable', True)
  return dict(
    id=str(name),
    text=text,
    answers=answers,
    source='musique',
    hops=int(str(name)[0]) if str(name)[:1].isdigit() else 0,  # '2hop__...'
    meta={'supporting_titles': titles, 'answerable': answerable},
  )


def ttrl(record: Mapping[str, Any], where: str) -> dict:
  key = 'id' if 'id' in record else 'unique_id'
  text, name = _required(record, where, 'prompt', key)
  answer = record.get('answer')
  if answer is None and isinstance(record.get('solution'), str):
    answer = parser.boxed(record['solution'])
  return dict(
    id=name,
    text=text,
    answers=None if answer is None else [answer],
    source=record.get('source', ''),
    messages=({'role': 'user', 'content': text},),
  )


def ssp(record: Mapping[str, Any], where: str) -> dict:
  keys = ('ground_truth', 'sys_question_example', 'search_turns')
  *texts, turns = _required(record, where, *keys)
  listed = lambda name, text: checks.strings(text, f'{where}: the {name}')
  answers, examples = map(listed, keys, texts)
  good = re.fullmatch('0*[1-9][0-9]*', str(turns))
  require(good, f'{where}: search_turns={turns!r} must be an integer above 0')
  return dict(
    id=record.get('id', f'ssp-{re.findall("[0-9]+", where)[-1]}'),
    text=answers[0] if answers else '',
    answers=answers,
    source='ssp',
    meta={'search_turns': turns, 'examples': '\n'.join(examples)},
  )


def tau2(record: Mapping[str, Any], where: str) -> dict:
  name, text = _required(record, where, 'id', 'scenario')
  found = record.get('supporting_ids')
  return dict(id=name, text=text, supporting=found, source='tau2_banking')


LAYOUTS = dict(
  flashrag=flashrag, hotpotqa=hotpotqa, musique=musique, ttrl=ttrl, ssp=ssp
) | {'2wiki': two_wiki, 'tau2': tau2}
