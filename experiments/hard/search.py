"""The search of BrowseComp-Plus: of each document, its beginning.

Theirs shows 512 tokens of Qwen3-0.6B; this one a number of characters.
"""

from collections.abc import Sequence
import dataclasses

from searchrl_jax.sources.service import ServiceSource
from searchrl_jax.types import SearchError, SearchRequest

CHARACTERS = 2_000  # some 512 tokens of English


class Snippets(ServiceSource):
  async def search(self, requests: Sequence[SearchRequest]):
    def cut(found):
      if isinstance(found, SearchError):
        return found
      short = (
        dataclasses.replace(p, text=p.text[:CHARACTERS]) for p in found.passages
      )
      return dataclasses.replace(found, passages=tuple(short))

    return [cut(found) for found in await super().search(requests)]


def make(config, **_) -> Snippets:
  return Snippets(config)
