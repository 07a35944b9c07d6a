"""A control in which every question gets the passages of another question.

A policy that scores well with these does not use the passages.
"""

from collections.abc import Sequence
import dataclasses

from searchrl_jax.sources.core import Answer, Source, SourceError
from searchrl_jax.types import SEARCH, Question, SearchRequest


class Shuffled:
  """Answers each query with the passages for another question.

  The other question is the next in the order of ids whose answers differ. It is
  the same for every query of a question. Tools other than search are not
  changed.
  """

  def __init__(self, source: Source, questions: Sequence[Question]):
    """Wraps `source`, for these questions.

    Raises:
      SourceError: no two questions have different answers.
    """
    self._source, self.check, self.close = source, source.check, source.close
    ordered = sorted(questions, key=lambda q: q.id)
    self._other = {}
    for i, question in enumerate(ordered):
      for other in ordered[i + 1 :] + ordered[:i]:
        if not set(other.answers) & set(question.answers):
          self._other[question.id] = other.text
          break
      else:
        raise SourceError('shuffled passages need two different answers')

  async def search(self, requests: Sequence[SearchRequest]) -> list[Answer]:
    replace = dataclasses.replace
    swapped = [
      replace(r, query=self._other[r.question.id]) if r.tool == SEARCH else r
      for r in requests
    ]
    answers = await self._source.search(swapped)
    pairs = zip(answers, requests, strict=True)
    return [replace(answer, request=request) for answer, request in pairs]
