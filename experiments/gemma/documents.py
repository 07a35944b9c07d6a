"""ZeroSearch with Gemma: a simulator of the same model, and what it learns.

A data module (`traces`). The simulator reads a question, its answers and a
query, and writes the passage that is found; a useful one states an answer. It
learns from the passages that the real index finds for a query: those with an
answer are useful, the others are noise.
"""

from collections.abc import Sequence
import dataclasses
import pathlib

from ml_collections import ConfigDict
import numpy as np

from experiments.gemma import questions
from experiments.search_r1.wiki_traces import query_of
from searchrl_jax.data.checks import DataError
from searchrl_jax.data.core import Search, Trace
from searchrl_jax.types import Passage

TEMPLATE = str(pathlib.Path(__file__).with_name('rag.json'))
_ASKED = 'Question: {question}\nAnswer: {answers}\nQuery: {query}\n'
USEFUL = f'{_ASKED}Which passage has the answer?'
NOISY = f'{_ASKED}Which passage lacks the answer?'
TOKENS = 192  # of a document


def document(passages: Sequence[Passage], words: int) -> str:
  """The first words of passages, as an observation has them."""
  text = ' '.join(f'{p.title} : {p.text}' for p in passages)
  return ' '.join(text.split()[:words])


def traces(
  path: str,
  search: Search,
  folder: str,
  n: int,
  seed: int,
  k: int = 1,
  words: int = 75,
) -> list[Trace]:
  """n documents, every other one useful, each the answer to a query.

  Args:
    path, search, folder, n, seed, k: see `questions.traces`.
    words: of a document, at most.

  Raises:
    DataError: the questions of the part 'train' give fewer.
  """
  rng = np.random.default_rng(seed)
  asked = questions.load(path, folder, part='train')
  out: list[Trace] = []
  for i in rng.permutation(len(asked)):
    if len(out) == n:
      return out
    question, query = asked[i], query_of(asked[i], rng)
    text = document(*search([query], k), words)
    useful = len(out) % 2 == 0
    if not text or useful != bool(questions.shown(question, text)):
      continue
    prompt = (USEFUL if useful else NOISY).format(
      question=question.text, answers=' or '.join(question.answers), query=query
    )
    asking = dataclasses.replace(question, text=prompt)
    out.append(Trace(asking, (('answer', text),)))
  raise DataError(f'n={n}: the questions of {path} give {len(out)} documents')


def simulate(c: ConfigDict) -> None:
  """Makes a run of configs/gemma.py search by source.simulator.path."""
  c.source.module = 'simulated'
  c.rollout.search_attempts = 1  # the source itself retries
  s = c.source.simulator
  # As rag.json has a prompt.
  s.useful, s.noisy = f'{USEFUL}\n', f'{NOISY}\n'
  s.document = r'(?s)<answer> (?:(?P<title>[^\n]*?) : )?(?P<text>.+?) </answer>'
  s.stops, s.chat, s.max_tokens = ('</answer>',), False, TOKENS
  s.temperature = 0.7
  s.noise_to, s.steps = 0.5, c.train.get_ref('steps')
  c.data.eval = ConfigDict()  # the simulator's prompt has the answers
