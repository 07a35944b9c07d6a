"""Sources that return the wrong passages, or none: controls of an evaluation.

A policy that scores as well with them does not use the passages. Tools other
than search are not changed.
"""

from collections.abc import Sequence
import dataclasses
import random

from searchrl_jax.sources.core import Answer, Source, SourceError
from searchrl_jax.types import (
  SEARCH,
  Question,
  SearchError,
  SearchRequest,
  SearchResult,
)


class Shuffled:
  """Answers each query with the passages for another question.

  The other question is the next in the order of ids whose answers differ. It is
  the same for every query of a question.
  """

  def __init__(self, source: Source, questions: Sequence[Question]):
    """Wraps `source`, for these questions.

    Raises:
      SourceError: no two questions have different answers.
    """
    self._source, self.check, self.close = source, source.check, source.close
    self._ordered = sorted(questions, key=lambda q: q.id)
    self._next = {}
    for i, question in enumerate(self._ordered):
      for step in range(1, len(self._ordered)):
        other = self._ordered[(i + step) % len(self._ordered)]
        if not set(other.answers) & set(question.answers):
          self._next[question.id] = other
          break
      else:
        raise SourceError('passages of other questions need two answers')

  async def search(self, requests: Sequence[SearchRequest]) -> list[Answer]:
    """One answer for each request, joined from those to other queries."""
    asked = [
      self._instead(r) if r.tool == SEARCH else [r.query] for r in requests
    ]
    sent = [
      dataclasses.replace(r, query=query, k=-(-r.k // len(queries)))
      for r, queries in zip(requests, asked)
      for query in queries
    ]
    found = iter(await self._source.search(sent) if sent else ())
    return [
      _joined(request, [next(found) for _ in queries])
      for request, queries in zip(requests, asked)
    ]

  def _instead(self, request: SearchRequest) -> list[str]:
    """The queries whose passages the request gets."""
    return [self._next[request.question.id].text]


class Random(Shuffled):
  """Answers each query with passages of different questions.

  Each passage is the best one for a question drawn at random, with
  replacement, among those with other answers. Equal requests get equal
  passages.
  """

  def _instead(self, request: SearchRequest) -> list[str]:
    own = set(request.question.answers)
    rng = random.Random(f'{request.question.id} {request.turn} {request.query}')
    queries = []
    while len(queries) < request.k:  # ends: `_next` is such a question
      other = rng.choice(self._ordered)
      if not set(other.answers) & own:
        queries.append(other.text)
    return queries


class Empty(Shuffled):
  """Finds nothing."""

  def _instead(self, request: SearchRequest) -> list[str]:
    return []


def _joined(request: SearchRequest, answers: Sequence[Answer]) -> Answer:
  """One answer to `request`: the first error, or the passages of all."""
  for answer in answers:
    if isinstance(answer, SearchError) or len(answers) == 1:
      return dataclasses.replace(answer, request=request)
  passages = [p for answer in answers for p in answer.passages]
  return SearchResult(request, tuple(passages[: request.k]))
