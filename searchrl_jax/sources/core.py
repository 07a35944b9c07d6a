"""The source contract: queries in, one answer each out.

An answer is a SearchResult or a SearchError, in the order of the requests; a
source never raises for one bad query, and never turns a failure into an
empty result. `fatal` errors of set-up (absent server at the start) raise
SourceError.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from searchrl_jax.types import SearchError, SearchRequest, SearchResult


class SourceError(RuntimeError):
  """The source cannot work at all; the message names the URL and the mend."""


class Source(Protocol):
  async def search(
    self, requests: Sequence[SearchRequest]
  ) -> list[SearchResult | SearchError]: ...

  async def check(self) -> Mapping[str, object]: ...  # raises SourceError
  async def close(self) -> None: ...
