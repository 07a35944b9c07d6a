"""Sources with wrong passages, or none: controls of an evaluation.

A policy that scores as well with them does not use the passages. Tools other
than search are not changed.
"""

from collections.abc import Sequence
import dataclasses
import itertools
import random

from searchrl_jax.sources.core import Answer, Source
from searchrl_jax.sources.dials import Dials, Setting
from searchrl_jax.types import (
  SEARCH,
  Question,
  SearchError,
  SearchRequest,
  SearchResult,
)


def shuffled(source: Source, questions: Sequence[Question]) -> Dials:
  """Every query of a question gets the passages for one other question.

  Raises:
    SourceError: no two questions have different answers.
  """
  return Dials(source, Setting(random=1.0), 0, questions)


def empty(source: Source) -> Dials:
  """Finds nothing."""
  return Dials(source, Setting(empty=1.0), 0)


class Random:
  """Answers each query with passages of different questions.

  Each passage is the best one for a question drawn at random, with
  replacement, among those with other answers. Equal requests get equal
  passages.
  """

  def __init__(self, source: Source, questions: Sequence[Question]):
    """Wraps `source`; each question needs one with other answers, which
    `shuffled` checks."""
    self._source, self.check, self.close = source, source.check, source.close
    self._questions = sorted(questions, key=lambda q: q.id)

  async def search(self, requests: Sequence[SearchRequest]) -> list[Answer]:
    """One answer for each request, joined from those to other queries."""
    asked = [self._instead(r) if r.tool == SEARCH else [r] for r in requests]
    found = iter(await self._source.search([*itertools.chain(*asked)]))
    return [
      _joined(request, [next(found) for _ in sent])
      for request, sent in zip(requests, asked, strict=True)
    ]

  def _instead(self, request: SearchRequest) -> list[SearchRequest]:
    """The requests whose passages this one gets."""
    own = set(request.question.answers)
    rng = random.Random(f'{request.question.id} {request.turn} {request.query}')
    out: list[SearchRequest] = []
    while len(out) < request.k:
      other = rng.choice(self._questions)
      if not set(other.answers) & own:
        out.append(dataclasses.replace(request, query=other.text, k=1))
    return out


def _joined(request: SearchRequest, answers: Sequence[Answer]) -> Answer:
  """One answer to `request`: the first error, or the passages of all."""
  for answer in answers:
    if isinstance(answer, SearchError) or request.tool != SEARCH:
      return dataclasses.replace(answer, request=request)
  passages = [p for answer in answers for p in answer.passages]
  return SearchResult(request, tuple(passages))
