"""Natural Questions for a small pretrained model, and its warm starts.

A data module. `load` takes parts of a file that share no question, and, if
asked, only questions whose shortest answer is short and stands early in the
passage that supports them, or in the one that is found. `traces` scripts warm
starts without thoughts, which cost such a model tokens and help it little:
a search with the question, what was found, the answer in it. A `demonstration`
tells that passage and the answer, for teachers and for policies to read.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
import pathlib
import zlib

import numpy as np

from experiments.search_r1.wiki_traces import content_words, query_of
from retrieval import corpus as passages
from retrieval.index import bm25
from searchrl_jax import schema
from searchrl_jax.data import jsonl
from searchrl_jax.data.checks import DataError
from searchrl_jax.data.core import Search, Trace
from searchrl_jax.learn import teacher
from searchrl_jax.types import Passage, Question

TUNE = 12  # one of so many questions of the training file is for tuning
WORDS, EARLY = 5, 60  # of an answer; words of a passage that hold it
FRAME = schema.base().teacher.frame


read_corpus = functools.lru_cache(maxsize=2)(passages.read_corpus)


@functools.lru_cache(maxsize=2)
def texts(path: str) -> dict[str, str]:
  """The passages of a corpus by id."""
  corpus = read_corpus(path)
  return dict(zip(corpus.ids, corpus.contents, strict=True))


@functools.lru_cache(maxsize=2)
def indexed(path: str) -> tuple[Sequence[str], bm25.BM25Index]:
  """The passages of a corpus and their index, with the service's settings."""
  contents = read_corpus(path).contents
  return contents, bm25.BM25Index(contents)


def best(asked: Sequence[Question], path: str) -> list[str]:
  """The passage of a corpus that is found first for each question."""
  contents, index = indexed(path)
  ids, _ = index.search([q.text for q in asked], 1)
  return [contents[int(i)] if i >= 0 else '' for (i,) in ids]


def load(
  path: str,
  folder: str,
  source: str = 'nq*',
  part: str = '',
  short: bool = False,
  found: bool = False,
  corpus: str = 'corpus.jsonl.gz',
  n: int = 0,
  seed: int = 0,
  rest: bool = False,
  told: str = '',
) -> list[Question]:
  """The questions of a file (`jsonl.load`).

  Args:
    path: the file.
    folder: of the data; `corpus` is below it.
    source: see `jsonl.load`.
    part: 'train' or 'tune', which share no question; '' = all.
    short: only those whose shortest answer has at most WORDS words and occurs
      in the first EARLY words of a supporting passage.
    found: the same of the passage that is found first for the question.
    corpus: the passages, for `short` and `found`; where it is there, it must
      have some that support the questions.
    n, seed: draws n of them; 0 = all.
    rest: those that the draw leaves, in place of those that it takes.
    told: with `found`, each has its `demonstration`: 'meta', as a field of
      Question.meta; 'own', in its text, too; 'others': there that of another.

  Raises:
    DataError: an unknown part or value of told, no question is left, or the
      corpus has none of the supporting passages.
  """
  if told not in ('', 'meta', 'own', 'others') or told and not found:
    raise DataError(
      f"told={told!r}: 'meta', 'own' or 'others' with found=True, or ''"
    )
  if part not in ('', 'train', 'tune'):
    raise DataError(f"part={part!r} is none of '', 'train', 'tune'")
  kept = jsonl.load(path, source=source)
  if part:
    tune = [zlib.crc32(q.id.encode()) % TUNE == 0 for q in kept]
    kept = [q for q, t in zip(kept, tune) if t == (part == 'tune')]
  file = pathlib.Path(folder) / corpus
  place = str(file)
  named = [p for q in kept for p in q.supporting]
  if short or (named and (found or file.exists())):
    every = texts(place)
    if not any(p in every for p in named):
      raise DataError(
        f'{corpus} has none of the passages that support the questions of '
        f'{path}: give the corpus that belongs to them'
      )
  if short:
    given = [[every[p] for p in q.supporting if p in every] for q in kept]
    kept = [q for q, own in zip(kept, given) if shown(q, early(own))]
  if found:
    firsts = [early([text]) for text in best(kept, place)]
    pairs = [(q, x) for q, x in zip(kept, firsts) if shown(q, x)]
    kept = [_demonstrated(q, x) if told else q for q, x in pairs]
  if not kept:
    raise DataError(f'{path}: no question of source={source!r} is left')
  if n:
    order = np.random.default_rng(seed).permutation(len(kept))
    chosen = order[n:] if rest else order[:n]
    kept = [kept[i] for i in sorted(chosen)]
  if told in ('own', 'others'):
    hints = [q.meta['demonstration'] for q in kept]
    hints = hints if told == 'own' else [*hints[1:], *hints[:1]]
    kept = [teacher.hinted(q, x, FRAME) for q, x in zip(kept, hints)]
  return kept


def demonstration(question: Question, text: str) -> str:
  """What a passage says, and the answer in it."""
  return f'Hint: {text} The answer is {shown(question, text)}.'


def _demonstrated(question: Question, text: str) -> Question:
  told = {'demonstration': demonstration(question, text)}
  return dataclasses.replace(question, meta={**question.meta, **told})


def early(contents: Sequence[str]) -> str:
  """The first EARLY words of each passage."""
  return '\n'.join(' '.join(text.split()[:EARLY]) for text in contents)


def shown(question: Question, text: str) -> str:
  """The shortest answer of at most WORDS words that a text has; '': none."""
  known = [a for a in question.answers if a and len(a.split()) <= WORDS]
  return min((a for a in known if a in text), key=len, default='')


def traces(
  path: str,
  search: Search,
  folder: str,
  n: int,
  seed: int,
  k: int = 1,
  memory: float = 0.0,
  known: Sequence[str] = (),
  poor: float = 0.0,
  hinted: float = 0.0,
  closed_book: str = '',
  read: int = 75,
  source: str = 'nq*',
) -> list[Trace]:
  """n scripted attempts at questions of the part 'train'.

  A good one searches with the question, and answers with what was found. Each
  answer stands in the passage that it follows: where the search does not find
  one, the question is passed over.

  Args:
    path: see `load`.
    search: (queries, k) -> passages of each.
    folder: of the data.
    n: how many.
    seed: of every draw.
    k: passages of a search.
    memory: share that answers at once, with the answer of `closed_book`.
    known: only questions with these first words are answered so, such as
      ('who', 'when'); every kind may be searched for. () = all.
    poor: share that first searches with one or two words, and then again.
    hinted: share of good ones whose question has the `demonstration` in its
      text; memory and poor are shares of the others.
    closed_book: JSON lines of {id, answer}, the model's own without a search.
    read: words of an observation that answers are taken from, see
      `wiki_traces.traces`.
    source: see `load`.

  Raises:
    DataError: shares out of range, or fewer than n attempts can be scripted.
  """
  if min(memory, poor) < 0 or memory + poor > 1:
    raise DataError(f'memory={memory}, poor={poor}: shares, at most 1 together')
  if not 0 <= hinted <= 1:
    raise DataError(f'hinted={hinted}: a share')
  said = answers(closed_book) if memory else {}
  questions = load(path, folder, source, 'train')
  rng = np.random.default_rng(seed)
  out: list[Trace] = []
  shares = {'good': 1 - memory - poor, 'memory': memory, 'poor': poor}
  shares = {kind: x * (1 - hinted) for kind, x in shares.items()}
  shares['hinted'] = hinted
  made = dict.fromkeys(shares, 0)
  for i in rng.permutation(len(questions)):
    if len(out) == n:
      return out
    question = questions[i]
    # The shares hold for every beginning of the list, whichever questions the
    # kinds pass over.
    kind = max(shares, key=lambda k: shares[k] * (len(out) + 1) - made[k])
    if kind == 'memory':
      asked = not known or question.text.lower().split()[0] in known
      answer = asked and said.get(question.id)
      actions = answer and [('answer', answer)]
    else:
      words = [poor_query(question, rng)] if kind == 'poor' else []
      queries = [*words, query_of(question, rng)]
      actions = attempt(question, queries, search, k, read)
    if actions and kind == 'hinted':
      _, (_, found), _ = actions
      read_first = early(
        [passages.join_contents(p.title, p.text) for p in found]
      )
      if not shown(question, read_first):
        continue
      hint = demonstration(question, read_first)
      question = teacher.hinted(question, hint, FRAME)
    if actions:
      good = kind in ('good', 'hinted')
      out.append(Trace(question, tuple(actions), good=good))
      made[kind] += 1
  if len(out) < n:
    raise DataError(
      f'n={n}: the questions give {len(out)} attempts; lower n, or give '
      'closed_book more answers'
    )
  return out


def answers(closed_book: str) -> dict[str, str]:
  """Question id -> answer, of JSON lines."""
  if not pathlib.Path(closed_book).is_file():
    raise DataError(
      f'closed_book={closed_book!r}: no such file; experiments.gemma.run makes '
      'it (made/closed_book.jsonl)'
    )
  return {r['id']: r['answer'] for _, r in jsonl.read(closed_book)}


def poor_query(question: Question, rng: np.random.Generator) -> str:
  words = content_words(question.text) or question.text.split()
  return ' '.join(words[: 1 + rng.integers(2)])


def attempt(
  question: Question, queries: Sequence[str], search: Search, k: int, read: int
) -> list[tuple]:
  """Searches in turn and the answer that the last one shows; []: none does."""
  actions: list[tuple] = []
  for text, found in zip(queries, search(queries, k), strict=True):
    actions += [('search', text), ('information', tuple(found))]
  answer = shown(question, '\n'.join(visible(found, read)))
  return [*actions, ('answer', answer)] if answer else []


def visible(found: Sequence[Passage], words: int) -> Iterator[str]:
  """The passages within the first `words` words of an observation."""
  for passage in found:
    text = f'{passage.title}\n{passage.text}'.split(' ')[: max(words, 0)]
    words -= len(text)
    yield ' '.join(text)
