"""Scripted warm-start traces on real questions, with real search results.

A model trained from scratch must first meet the protocol. These traces show
it several ways to search and to answer, on train questions alone, and most of
them do not look at what is asked for: a date is taken where a person is asked
for, a title where a number is. Reinforcement learning then has something to
select, as it has in a pretrained model.

An attempt: a thought, a search, what it found, (a second search,) a thought
that names the kind of answer and the passage, an answer of that kind.
"""

from collections.abc import Sequence
import dataclasses
import re

import numpy as np

from searchrl_jax.data import jsonl
from searchrl_jax.data.checks import require
from searchrl_jax.data.core import Search, Trace
from searchrl_jax.rewards import scores
from searchrl_jax.types import Passage, Question

load = jsonl.load

KINDS = ('title', 'name', 'date', 'number', 'phrase', 'lead')
STOP_WORDS = frozenset(
  (
    'a an the of in on at to for by with from is are was were be been do does '
    'did has have had who what when where which whom whose why how many much '
    'and or as that this it its there s'
  ).split()
)
_MONTHS = (
  'January|February|March|April|May|June|July|August|September|October|'
  'November|December'
)
_YEAR = r'(?:1\d{3}|20\d{2})'
_DATE = re.compile(
  rf'\b(?:(?:{_MONTHS}) \d{{1,2}} ?, ?{_YEAR}|\d{{1,2}} (?:{_MONTHS}) {_YEAR}'
  rf'|(?:{_MONTHS}) {_YEAR}|{_YEAR})\b'
)
_NUMBER = re.compile(
  r'\b(?:\d[\d,.]*\d|\d|one|two|three|four|five|six|seven|eight|nine|ten|'
  r'eleven|twelve|thirteen|fifteen|twenty|thirty)\b'
  r'(?: (?:million|billion|hundred|thousand)\b)?'
)
_CAPITAL = r"[A-Z][\w.'-]*\w"
_NAME = re.compile(rf'\b{_CAPITAL}(?: (?:(?:of|the|de|von|van) )?{_CAPITAL})*')
_OPENERS = frozenset(
  (
    'The A An In On At As By After For It He She His Her They This These '
    'When While Although During'
  ).split()
)
_PHRASE = re.compile(
  r'\b(?:is|was|are|were)(?: (?:a|an|the))? ([^.,;()]{3,80})'
)
_PHRASE_WORDS = 6
_LEAD_WORDS = 10
_DRILL_WORDS = (4, 12)
_DRILL_TEXT = (12, 30)


def traces(
  path: str,
  search: Search,
  n: int,
  seed: int,
  k: int,
  good: float,
  poor: float,
  guess: float,
  max_answer_words: int,
  read: int,
  drills: int,
  source: str = '',
  split: str = 'train',
) -> list[Trace]:
  """n scripted traces and some drills; questions come in turn, reshuffled.

  The rest of the shares (1 - good - poor - guess) searches well and answers
  blindly, by a kind drawn without a look at the question.

  Args:
    path: a JSON-lines file with answers and supporting ids (`jsonl.load`).
    search: (queries, k) -> the passages of each query, best first.
    n: how many traces.
    seed: of every draw; the same seed, file and search give the same traces.
    k: passages of a search.
    good: share that searches and answers right, where the search finds it.
    poor: share that searches for too little, or for something else.
    guess: share that answers without a search.
    max_answer_words: a longer golden answer is not shown.
    read: words of an observation that answers are taken from. What the
      environment cuts off (config.env.max_observation_tokens) must lie
      beyond, or the traces teach to make answers up.
    drills: how many drills in copying to add: the question is a run of words
      from a passage, the search repeats it and finds the first words of that
      passage, the answer is a title, a name, ... in them. A third as long as
      a trace, they teach a model that starts from nothing to copy rare
      words; 0 for one that can.
    source: keeps questions of this source ('nq*' = by prefix); '' = all.
    split: keeps this split. Held-out questions must not be in it.

  Raises:
    DataError: shares out of range, or a file without answers.
  """
  fit = min(good, poor, guess) >= 0 and good + poor + guess <= 1
  said = f'good={good}, poor={poor}, guess={guess}'
  require(fit, f'{said} must be shares, 1 in all at the most')
  questions = jsonl.load(path, source=source, split=split)
  known = any(q.answers for q in questions)
  require(known, f'{path}: no question has an answer to script from')
  rng = np.random.default_rng(seed)
  order = np.concatenate(
    [rng.permutation(len(questions)) for _ in range(-(-n // len(questions)))]
  )[:n]
  drawn = [questions[i] for i in order]
  plans = rng.choice(
    4, size=n, p=[good, poor, guess, max(0.0, 1 - good - poor - guess)]
  )
  queries = [
    '' if plan == 2 else _poor(q, drawn, rng) if plan == 1 else query_of(q, rng)
    for q, plan in zip(drawn, plans)
  ]
  first = _answers(search, queries, k)
  # A second search where the first did not find everything: sometimes.
  seconds = [
    _second(q, query, found, rng) if query and plan != 1 else ''
    for q, query, found, plan in zip(drawn, queries, first, plans)
  ]
  second = _answers(search, seconds, k)
  out = []
  for i, q in enumerate(drawn):
    actions = []
    seen: list[Passage] = []
    for query, found in ((queries[i], first[i]), (seconds[i], second[i])):
      if not query:
        continue
      actions += _look_up('search again' if seen else 'search', query, found)
      seen += _visible(found, read)
    thought, answer, right = _answer(
      q, seen, plans[i] == 0, drawn, rng, max_answer_words
    )
    actions += [('think', thought), ('answer', answer)]
    out.append(Trace(q, tuple(actions), good=bool(right and plans[i] == 0)))
  return out + _drills([p for found in first for p in found], drills, rng)


def _look_up(thought: str, query: str, found: Sequence[Passage]) -> list:
  actions = dict(think=thought, search=query, information=tuple(found))
  return list(actions.items())


def content_words(text: str) -> list[str]:
  """The words of a text that are no stop words, in order."""
  return [w for w in re.findall(r'\w+', text) if w.lower() not in STOP_WORDS]


def bare_title(title: str) -> str:
  """A title without what Wikipedia adds in brackets."""
  return re.sub(r' \([^()]*\)$', '', title)


def candidates(passage: Passage, question: str, kind: str) -> list[str]:
  """What a passage offers of a kind, in order of occurrence."""
  if kind == 'title':
    return [bare_title(passage.title)] if passage.title else []
  if kind == 'date':
    return [m.group() for m in _DATE.finditer(passage.text)]
  if kind == 'number':
    return [m.group() for m in _NUMBER.finditer(passage.text)]
  if kind == 'phrase':
    return [
      ' '.join(m.group(1).split()[:_PHRASE_WORDS])
      for m in _PHRASE.finditer(passage.text)
    ]
  if kind == 'lead':
    words = passage.text.split()[:_LEAD_WORDS]
    return [' '.join(words)] if words else []
  if kind != 'name':
    raise ValueError(f'kind={kind!r} is none of {KINDS}')
  title = scores.normalise(passage.title)
  asked = question.lower()
  out = []
  for m in _NAME.finditer(passage.text):
    words = m.group().split()
    while words and words[0] in _OPENERS:
      words = words[1:]
    name = ' '.join(words)
    known = all(w.lower() in asked for w in words)
    if name and not known and scores.normalise(name) not in title:
      out.append(name)
  return out


def kind_of(answer: str, passage: Passage) -> str:
  """The kind of a golden answer, by its form."""
  if scores.key(answer) == scores.key(bare_title(passage.title)):
    return 'title'
  if _DATE.search(answer):
    return 'date'
  if _NUMBER.search(answer.lower()):
    return 'number'
  return 'name' if answer[:1].isupper() else 'phrase'


def query_of(q: Question, rng) -> str:
  """A good query: the question, or its content words."""
  words = content_words(q.text)
  if words and rng.random() < 0.3:
    return ' '.join(words)
  return q.text.rstrip(' ?')


def _poor(q: Question, others: Sequence[Question], rng) -> str:
  """Too few of the question's words, or another question's."""
  if rng.random() < 0.3:
    q = others[rng.integers(len(others))]
  words = content_words(q.text) or q.text.split()
  return ' '.join(words[: 1 + rng.integers(2)])


def _second(q: Question, query: str, found: Sequence[Passage], rng) -> str:
  """What to ask next: what the question says beyond the first title.

  On HotpotQA dev it lifts recall of all supports at 3 from 0.36 to 0.53.
  """
  have = {p.id for p in found}
  if not found or set(q.supporting) <= have or rng.random() < 0.5:
    return ''
  known = {w.lower() for w in content_words(found[0].title)}
  rest = [w for w in content_words(q.text) if w.lower() not in known]
  again = ' '.join(rest)
  return '' if again.lower() == query.lower() else again


def _answers(search: Search, queries: Sequence[str], k: int):
  """Searches for the queries that are not empty; () for the others."""
  asked = [i for i, query in enumerate(queries) if query]
  out: list[Sequence[Passage]] = [()] * len(queries)
  if asked:
    for i, found in zip(asked, search([queries[i] for i in asked], k)):
      out[i] = tuple(found)
  return out


def _answer(q, seen, good, others, rng, max_words):
  """(thought, answer, whether it is right and read from a passage)."""
  if not seen:
    other = others[rng.integers(len(others))]
    text = min(other.answers or (other.text,), key=len)
    return 'guess', ' '.join(text.split()[:max_words]), False
  if good:
    for p in seen:
      if q.supporting and p.id not in q.supporting:
        continue
      shown = [
        a
        for a in q.answers
        if a and (a in p.text or a in p.title) and len(a.split()) <= max_words
      ]
      if shown:
        answer = min(shown, key=len)
        return _thought(kind_of(answer, p), p), answer, True
  return *_blind(seen[0], q.text, rng), False


def _blind(passage: Passage, question: str, rng) -> tuple[str, str]:
  """(thought, answer) of a kind drawn without a look at the question."""
  for kind in rng.permutation(KINDS):
    found = candidates(passage, question, str(kind))
    if found:
      # The first mostly: one habit of each kind is easier to learn.
      i = 0 if rng.random() < 0.8 else rng.integers(len(found))
      return _thought(str(kind), passage), found[i]
  return 'guess', 'unknown'  # an empty passage offers nothing


def _visible(found: Sequence[Passage], words: int) -> list[Passage]:
  """The passages that lie within the first `words` words; the last cut."""
  out = []
  for p in found:
    words -= len(p.title.split())
    if words <= 0:
      break
    text = p.text.split()[:words]
    out.append(dataclasses.replace(p, text=' '.join(text)))
    words -= len(text)
  return out


def _drills(passages: Sequence[Passage], n: int, rng) -> list[Trace]:
  texts = [p for p in passages if len(p.text.split()) > _DRILL_WORDS[1]]
  require(texts or not n, 'drills need a search that finds passages')
  out = []
  for i in range(n):
    p = texts[rng.integers(len(texts))]
    words = p.text.split()
    size = rng.integers(*_DRILL_WORDS, endpoint=True)
    start = rng.integers(len(words) - size)
    text = ' '.join(words[start : start + size]).lower()
    size = rng.integers(*_DRILL_TEXT, endpoint=True)
    short = dataclasses.replace(p, text=' '.join(words[:size]))
    thought, answer = _blind(short, text, rng)
    actions = _look_up('search', text, (short,))
    actions += [('think', thought), ('answer', answer)]
    question = Question(f'drill/{i}', text, source='drill')
    out.append(Trace(question, tuple(actions), good=False))
  return out


def _thought(kind: str, passage: Passage) -> str:
  return f'{kind} in {bare_title(passage.title)}'
