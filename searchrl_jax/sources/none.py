"""No source, for a policy that answers all its searches itself (SSRL)."""

from collections.abc import Sequence

from searchrl_jax.sources.core import Answer, Source
from searchrl_jax.types import SearchError, SearchRequest

NONE = 'none'  # config.source.module


class NoSource(Source):
  """Returns an error for every query."""

  async def search(self, requests: Sequence[SearchRequest]) -> list[Answer]:
    message = "config.source.module='none' answers no search; use 'service'"
    return [SearchError(r, 'unreachable', message) for r in requests]


def make(config, **_: object) -> NoSource:
  """The source of `config.source` (module='none')."""
  return NoSource()
