"""The search of BrowseComp-Plus: of each document, its beginning.

Theirs shows 512 tokens of Qwen3-0.6B; this one a number of characters.
"""

from collections.abc import Sequence
import dataclasses

from searchrl_jax.sources.service import ServiceSource
from searchrl_jax.types import SearchRequest, SearchResult

CHARACTERS = 2_000  # some 512 tokens of English


class Snippets(ServiceSource):
  async def search(self, requests: Sequence[SearchRequest]):
    short = lambda p: dataclasses.replace(p, text=p.text[:CHARACTERS])
    answers = await super().search(requests)
    for n, found in enumerate(answers):
      if isinstance(found, SearchResult):
        cut = tuple(map(short, found.passages))
        answers[n] = dataclasses.replace(found, passages=cut)
    return answers


def make(config, **_) -> Snippets:
  return Snippets(config)
