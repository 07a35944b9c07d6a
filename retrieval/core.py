"""The contracts of retrieval: `Index` and `Searcher`.

An `Index` ranks the positions of one corpus. A `Searcher` answers queries with
documents: from a corpus and an index (`LocalSearcher`), from the web, or from
a store of recorded answers around either. The server knows only searchers.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
import json
from typing import Protocol

import numpy as np

from retrieval.corpus import Corpus, join_contents, split_contents

# (ids int64 [Q, k], scores float32 [Q, k]); see `Index.search`.
Ranked = tuple[np.ndarray, np.ndarray]
MOST_PARTS = 1000  # of a document, before and after a passage of it


def check_k(k: int) -> None:
  """Raises ValueError for k < 1."""
  if k < 1:
    raise ValueError(f'k={k} must be at least 1')


def no_results(queries: int, k: int) -> Ranked:
  """Arrays of an `Index.search` without results, to be filled."""
  ids = np.full((queries, k), -1, np.int64)
  return ids, np.full((queries, k), -np.inf, np.float32)


class Index(Protocol):
  """Ranks the P passages of a corpus; tests/retrieval/test_contract.py."""

  name: str

  @property
  def parameters(self) -> Mapping[str, object]:
    """JSON that identifies this index among those over the same corpus."""

  def __len__(self) -> int: ...

  def search(self, queries: Sequence[str], k: int) -> Ranked:
    """Finds the best passages of each query.

    Args:
      queries: [Q] texts, any Unicode, possibly empty.
      k: the maximal number of passages per query, >= 1; may exceed P.

    Returns:
      ids: int64 [Q, min(k, P)], positions in the corpus, best first, without
        duplicates in a row, equal scores in corpus order. A row with fewer
        passages ends with -1.
      scores: float32 of the same shape, finite and descending; -inf where ids
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
  transient: bool = False  # may differ when asked again; not recorded


class SearchFailed(Exception):
  """One query could not be answered; other queries of its batch could.

  Attributes:
    retry_after_s: seconds after which a retry may succeed; None: never.
  """

  def __init__(self, message: str, retry_after_s: float | None = None):
    super().__init__(message)
    self.retry_after_s = retry_after_s


Answer = list[Found] | SearchFailed


class Searcher(Protocol):
  """Answers queries with documents.

  A searcher that mostly waits has an attribute `threads`, the number of threads
  that may search at once, with one query each. Otherwise one thread searches at
  a time, with all waiting queries.

  One that has whole documents has an attribute `document`, a function that
  blocks: the id of a passage -> the contents of its document, or None if there
  is no such document. Without, or where it is None, there are none.
  """

  @property
  def identity(self) -> Mapping[str, object]:
    """JSON; searchers of equal identity give equal answers."""

  def search(self, queries: Sequence[str], k: int) -> list[Answer]:
    """[Q] answers, at most k passages each, best first; blocks.

    A query that fails has a SearchFailed in its place. An exception means that
    the whole batch failed.
    """

  def close(self) -> None: ...


IDENTITY_HEADER = 'X-Identity'  # response header: `identity_hash` of a server


def identity_hash(identity: Mapping[str, object]) -> str:
  """A short hash of an identity; a JSON round trip does not change it."""
  text = json.dumps(identity, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:16]


class LocalSearcher:
  """A corpus behind an index over it."""

  def __init__(self, corpus: Corpus, index: Index):
    if (count := len(index)) != len(corpus):
      other = f'the corpus {len(corpus)}'
      raise ValueError(f'the index holds {count} passages, {other}')
    self.corpus, self.index = corpus, index

  @property
  def identity(self) -> dict[str, object]:
    return {'corpus': self.corpus.identity, 'index': {**self.index.parameters}}

  def search(self, queries: Sequence[str], k: int) -> list[list[Found]]:
    ids, contents = self.corpus.ids, self.corpus.contents
    found = (x.tolist() for x in self.index.search(queries, k))
    return [
      [Found(ids[i], contents[i], s) for i, s in zip(*row) if i >= 0]
      for row in zip(*found, strict=True)
    ]

  def document(self, name: str) -> str | None:
    """The passage with this id, between its neighbours of the same title.

    A corpus of parts (wiki-18) has the parts of an article one after another.
    At most MOST_PARTS on each side.
    """
    at, contents = self.corpus.position(name), self.corpus.contents
    if at is None:
      return None
    title, _ = split_contents(contents[at])
    same = lambda i: title and split_contents(contents[i])[0] == title
    first = last = at
    while first > max(0, at - MOST_PARTS) and same(first - 1):
      first -= 1
    while last + 1 < min(len(contents), at + MOST_PARTS) and same(last + 1):
      last += 1
    if first == last:
      return contents[at]
    texts = [split_contents(contents[i])[1] for i in range(first, last + 1)]
    return join_contents(title, '\n'.join(texts))

  def close(self) -> None:
    pass
