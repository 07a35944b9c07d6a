"""SSP with Gemma: answers to ask about, and a warm start of the three roles.

A data module. The proposer gets an answer, searches for it, and asks a question
that the passage answers; the verifier reads this passage and that of another
question; the solver searches as ever. The roles' traces take turns. Proposals
of traces are questions of people for which the answer, as a query, finds the
passage that supports them.
"""

import dataclasses
import pathlib

from ml_collections import ConfigDict
import numpy as np

from configs import algorithms, ssp
from experiments.gemma import questions
from experiments.gemma.documents import TEMPLATE as READER
from experiments.gemma.documents import document
from searchrl_jax.data.checks import DataError
from searchrl_jax.data.core import Search, Trace
from searchrl_jax.types import Question

MODULE = 'experiments.gemma.selfplay'
TEMPLATE = str(pathlib.Path(__file__).with_name('proposer.json'))
ROLES = 3


def short(question: Question) -> str:
  """The shortest answer of at most questions.WORDS words; '': none."""
  return questions.shown(question, '\n'.join(question.answers))


def load(
  path: str, folder: str, corpus: str = 'corpus.jsonl.gz'
) -> list[Question]:
  """Short answers to questions of the part 'train' that a search finds.

  Each is the first answer, and the text, of a question of its own.

  Args:
    path, folder, corpus: see `questions.load`.
  """
  given = {}
  for q in questions.load(path, folder, part='train', corpus=corpus):
    if answer := short(q):
      others = [a for a in q.answers if a != answer]
      asked = Question(f'answer-{q.id}', answer, (answer, *others), 'answer')
      given.setdefault(answer, asked)
  found = questions.best([*given.values()], str(pathlib.Path(folder) / corpus))
  pairs = zip(given.values(), found, strict=True)
  return [q for q, text in pairs if questions.shown(q, questions.early([text]))]


def traces(
  path: str,
  search: Search,
  folder: str,
  n: int,
  seed: int,
  k: int = 1,
  read: int = 75,
) -> list[Trace]:
  """n traces: a solver's, a proposer's, a verifier's, and so on.

  Args:
    path, search, folder, n, seed, k, read: see `questions.traces`.

  Raises:
    DataError: the questions of the part 'train' give fewer.
  """
  rng = np.random.default_rng(seed)
  solve, propose, verify = (len(range(i, n, ROLES)) for i in range(ROLES))
  good = questions.traces(
    path, search, folder, solve + verify, seed, k, read=read
  )
  out: list = [None] * n
  out[::ROLES] = good[:solve]
  out[1::ROLES] = _proposals(path, search, folder, propose, rng, k, read)
  for i, trace in enumerate(good[solve:]):
    other = good[i % solve]
    texts = [document(t.actions[1][1], read) for t in (trace, other)]
    first, second = rng.permutation(texts)
    text = f'{first}\n{second}\nQuestion: {trace.question.text}'
    asked = dataclasses.replace(trace.question, text=text)
    out[2 + ROLES * i] = Trace(asked, trace.actions[-1:], template=READER)
  return out


def _proposals(path, search, folder, n: int, rng, k, read) -> list[Trace]:
  asked = questions.load(path, folder, part='train')
  out: list[Trace] = []
  for i in rng.permutation(len(asked)):
    if len(out) == n:
      return out
    question, answer = asked[i], short(asked[i])
    if not answer or answer.lower() in question.text.lower():
      continue
    (found,) = search([answer], k)
    own = [p for p in found if p.id in question.supporting]
    if own and answer in document(own, read):
      actions = ('search', answer), ('information', tuple(found))
      told = Question(question.id, answer, (answer,))
      asking = *actions, ('answer', question.text)
      out.append(Trace(told, asking, template=TEMPLATE))
  raise DataError(f'n={n}: the questions of {path} give {len(out)} proposals')


def play(c: ConfigDict) -> None:
  """Makes a run of configs/gemma.py self-play (experiments.ssp.train)."""
  c.data.train = ConfigDict(
    dict(answers=dict(module=MODULE, path='qa_train.jsonl.gz'))
  )
  # A question's share of solvers is the mean of their rewards.
  c.reward = ConfigDict(dict(em=dict(fn='answer.em', weight=1.0)))
  c.selfplay = ssp.selfplay()
  # One proposal in four stands, since a verifier of this size reads one passage
  # in three right, so that the solver has some eight questions.
  c.rollout.questions = 32
  c.selfplay.update(
    ssp.RULES,
    template=TEMPLATE,
    reader=READER,
    min_words=5,
    min_searches=1,
    reward='intermediate_difficulty',
    invalid='drop',
    train_invalid=False,
  )
  c.selfplay.algorithm.update(c.algorithm.to_dict())
  c.selfplay.algorithm.advantage_kw = {}
  c.selfplay.algorithm.update(algorithms.REINFORCE)
