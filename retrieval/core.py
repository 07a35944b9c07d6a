"""The contracts of retrieval: what ranks passages, and what answers queries.

An `Index` ranks positions of one corpus. A `Searcher` answers with documents:
a corpus behind an index (`LocalSearcher`), the web, or a store of recorded
answers around either. The server knows searchers only.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
import json
from typing import Protocol

import numpy as np

from retrieval.corpus import Corpus


class Index(Protocol):
  """Ranks the P passages of a corpus; one contract test runs over all."""

  name: str

  @property
  def parameters(self) -> Mapping[str, object]:
    """What tells this index from another over the same corpus, for JSON."""

  def __len__(self) -> int: ...

  def search(
    self, queries: Sequence[str], k: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Finds the best passages of each query.

    Args:
      queries: [Q] texts, any Unicode, empty ones too.
      k: the most passages for one query, >= 1; may exceed P.

    Returns:
      ids: int64 [Q, min(k, P)], positions in the corpus, best first, none
        twice in a row, equal scores in corpus order; -1 where a query has no
        more passages, and only at the end of a row.
      scores: float32 of the same shape, finite and falling; -inf where ids
        is -1.

    Raises:
      ValueError: k < 1.
    """


@dataclasses.dataclass(frozen=True)
class Found:
  """A passage that answers a query."""

  id: str
  contents: str  # `"Title"\ntext`, see `corpus.split_contents`
  score: float  # finite; larger is better
  transient: bool = False  # asked again, it may be another; not recorded


class SearchFailed(Exception):
  """No answer for one query; the others of its batch have theirs.

  Attributes:
    retry_after_s: when it is worth asking again; None: never, as it stands.
  """

  def __init__(self, message: str, retry_after_s: float | None = None):
    super().__init__(message)
    self.retry_after_s = retry_after_s


class Searcher(Protocol):
  """Answers queries with documents.

  One that mostly waits has an attribute `threads`: as many may search at once,
  and queries are best asked one by one. Without it, one thread asks at a time,
  with as many queries as there are.
  """

  @property
  def identity(self) -> Mapping[str, object]:
    """What answers depend on: equal identities give equal answers. JSON."""

  def search(
    self, queries: Sequence[str], k: int
  ) -> list[list[Found] | SearchFailed]:
    """[Q] answers, at most k passages each, best first; blocks.

    A query's failure is in its place; what is raised failed the whole batch.
    """

  def close(self) -> None: ...


IDENTITY_HEADER = 'X-Identity'  # of an answer: `identity_hash` of its server


def identity_hash(identity: Mapping[str, object]) -> str:
  """A short hash of an identity, the same after a way through JSON."""
  text = json.dumps(identity, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:16]


class LocalSearcher:
  """A corpus behind an index over it."""

  def __init__(self, corpus: Corpus, index: Index):
    if len(corpus) != len(index):
      raise ValueError(
        f'the index holds {len(index)} passages, the corpus {len(corpus)}'
      )
    self.corpus, self.index = corpus, index

  @property
  def identity(self) -> dict[str, object]:
    return {
      'corpus': {'count': len(self.corpus), 'sha256': self.corpus.sha256},
      'index': dict(self.index.parameters),
    }

  def search(self, queries: Sequence[str], k: int) -> list[list[Found]]:
    ids, scores = self.index.search(queries, k)
    return [
      [self._found(i, s) for i, s in zip(*row, strict=True) if i >= 0]
      for row in zip(ids.tolist(), scores.tolist(), strict=True)
    ]

  def close(self) -> None:
    pass

  def _found(self, position: int, score: float) -> Found:
    document = self.corpus[position]
    return Found(document.id, document.contents, score)
