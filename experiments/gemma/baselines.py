"""What the policy is compared with: its prompts, its questions, gold passages.

A data module (`load`, `traces`): each question behind a passage, as retrieval-
augmented generation has it. A source (`make`): every search finds a passage
that supports the question. `few_shot` writes templates whose prompts show
examples; they hold text of the data, so they are made where it is.
"""

from collections.abc import Sequence
import dataclasses
import pathlib

import numpy as np

from experiments.gemma import questions
from retrieval import corpus as corpora
from searchrl_jax.data.checks import DataError
from searchrl_jax.data.core import Trace
from searchrl_jax.sources.core import Source
from searchrl_jax.store import records
from searchrl_jax.types import Passage, Question, SearchRequest, SearchResult

WORDS = 80  # of a passage in a prompt: about those of an observation
# The fields of a template that a prompt without searches does not use.
_UNUSED = {
  'think': ['<think>', '</think>'],
  'search': ['<search>', '</search>'],
  'information': ['<information>', '</information>'],
  'question_mark': True,
  'observation': '<information>{passages}</information>',
  'passage': '{title} : {text}',
  'passage_separator': '\n',
  'no_results': 'nothing',
  'cut': 'passages',
  'query_separator': '',
  'max_queries': 1,
  'invalid': '\n',
  'last_turn': '',
}


def behind(question: Question, contents: str) -> Question:
  """The question after the first WORDS words of a passage."""
  title, text = corpora.split_contents(contents)
  text = ' '.join(text.split()[:WORDS])
  passage = f'Passage: {title} : {text}\nQuestion: {question.text.strip()}'
  return dataclasses.replace(question, text=passage)


def answer_in_passage(question: Question) -> str:
  """The short answer that the passage before a question shows; '': none."""
  return questions.shown(question, question.text.rpartition('\nQuestion:')[0])


def load(
  path: str,
  folder: str,
  gold: bool = False,
  source: str = 'nq*',
  part: str = '',
  short: bool = False,
  corpus: str = 'corpus.jsonl.gz',
  n: int = 0,
) -> list[Question]:
  """Questions behind the best passage for them, or behind a supporting one.

  Args:
    path, folder, source, part, short, corpus, n: see `questions.load`.
    gold: a passage that supports the question.

  Raises:
    DataError: see `questions.load`.
  """
  asked = questions.load(path, folder, source, part, short, False, corpus, n)
  place = str(pathlib.Path(folder) / corpus)
  if gold:
    every = questions.texts(place)
    given = ([every[p] for p in q.supporting if p in every] for q in asked)
    found = [next(iter(own), '') for own in given]
  else:
    found = questions.best(asked, place)
  return list(map(behind, asked, found))


def traces(
  path: str, folder: str, n: int, seed: int, corpus: str = 'corpus.jsonl.gz'
) -> list[Trace]:
  """n questions behind their best passage with an answer that it shows."""
  asked = load(path, folder, part='train', corpus=corpus)
  order = np.random.default_rng(seed).permutation(len(asked))
  out = []
  for i in order:
    answer = answer_in_passage(asked[i])
    if answer:
      out.append(Trace(asked[i], (('answer', answer),)))
    if len(out) == n:
      return out
  raise DataError(f'n={n}: the passages of {path} show {len(out)} answers')


def few_shot(folder: str, out: pathlib.Path, shots: int, passage: bool) -> None:
  """Writes a template whose prompt shows questions of the training file.

  Args:
    folder: of the data.
    out: the JSON file.
    shots: examples, whose passage holds a short answer.
    passage: whether they, and the question, stand behind a passage.
  """
  path = str(pathlib.Path(folder) / 'qa_train.jsonl.gz')
  module = load if passage else questions.load
  asked = {q.id: q for q in module(path, folder, part='train', short=True)}
  if passage:  # only those whose passage shows an answer
    asked = {i: q for i, q in asked.items() if answer_in_passage(q)}
  ids = np.random.default_rng(0).permutation(sorted(asked))[:shots]
  text = ''
  for q in map(asked.get, ids):
    answer = answer_in_passage(q) if passage else min(q.answers, key=len)
    question = q.text.strip() + '?' * (not q.text.strip().endswith('?'))
    text += f'{"" if passage else "Question: "}{question}\nAnswer: {answer}\n\n'
  text += '{question}\n' if passage else 'Question: {question}\n'
  template = {
    **_UNUSED,
    'answer': ['Answer:', '\n'],
    'prompt': text,
    'stops': ['</search>', '\n'],
  }
  records.write_json(out, template)


class Gold(Source):
  """Finds the first supporting passages of a question, whatever is asked."""

  def __init__(self, corpus: str):
    self._every = questions.texts(corpus)

  async def search(self, requests: Sequence[SearchRequest]):
    out = []
    for r in requests:
      known = r.question.supporting if r.question else ()
      places = [p for p in known if p in self._every][: r.k]
      passages = [
        Passage(p, *corpora.split_contents(self._every[p])) for p in places
      ]
      out.append(SearchResult(r, tuple(passages)))
    return out


def make(config, **_: object) -> Gold:
  """The source of `config.source`; its corpus is a whole path."""
  return Gold(config.corpus)
