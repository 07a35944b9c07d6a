"""The source contract: queries in, one answer each out.

An answer is a SearchResult or a SearchError, in the order of the requests; a
source never raises for one bad query, and never turns a failure of its service
into an empty result. A service that is well, and cannot use the query, has
found nothing: or policies could leave the loss by what they search for.
`fatal` errors of set-up (absent server at the start) raise SourceError.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from searchrl_jax.types import SearchError, SearchRequest, SearchResult


class SourceError(RuntimeError):
  """The source cannot work at all; the message names the URL and the mend."""


def require_same(before: Mapping, now: Mapping) -> None:
  """Refuses to resume a run on a source that answers otherwise.

  Args:
    before: the `identity` of what `check` said when the run was saved.
    now: the same today. Servers that do not say who they are give {}, which
      is compared with nothing.

  Raises:
    SourceError: naming what differs.
  """
  if not before or not now:
    return
  lines = [
    f'{name}: {before.get(name)!r} before, {now.get(name)!r} now'
    for name in sorted(before.keys() | now.keys())
    if before.get(name) != now.get(name)
  ]
  if lines:
    raise SourceError(
      'the retrieval server is not the one that this run was trained with ('
      + '; '.join(lines)
      + '): serve what it had, or train into another '
      '--workdir with --config.train.init=THIS_RUN'
    )


class Source(Protocol):
  async def search(
    self, requests: Sequence[SearchRequest]
  ) -> list[SearchResult | SearchError]: ...

  async def check(self) -> Mapping[str, object]: ...  # raises SourceError
  async def close(self) -> None: ...
