"""Several tools as one source: each request goes to the tool that it names."""

import asyncio
from collections.abc import Mapping, Sequence

from searchrl_jax.sources.core import Answer, Source, named
from searchrl_jax.types import SEARCH, SearchRequest


class Tools:
  """Calls tools by name; those of one call to `search` at the same time."""

  def __init__(self, tools: Mapping[str, Source]):
    """tools: name -> tool; `search` is one of them."""
    self._tools = dict(tools)

  async def search(self, requests: Sequence[SearchRequest]) -> list[Answer]:
    """One answer for each request, in order.

    Raises:
      KeyError: there is no such tool.
      ValueError: a tool gave too few answers.
    """
    places: dict[str, list[int]] = {}
    for i, request in enumerate(requests):
      places.setdefault(request.tool, []).append(i)
    asked = lambda at: [requests[i] for i in at]
    calls = (self._tools[n].search(asked(at)) for n, at in places.items())
    answers: dict[int, Answer] = {}
    for at, new in zip(places.values(), await asyncio.gather(*calls)):
      answers.update(zip(at, new, strict=True))
    return [answers[i] for i in range(len(requests))]

  async def check(self) -> Mapping[str, object]:
    """Checks all tools; entries of tools other than search are 'TOOL/X'."""
    served = await self._tools[SEARCH].check()
    identity = dict(served.get('identity') or {})
    for name, tool in self._tools.items():
      if name != SEARCH:
        with named(name):
          told = await tool.check()
        own = dict(told.get('identity') or {})
        identity |= {f'{name}/{key}': value for key, value in own.items()}
    return {**served, 'identity': identity}

  async def close(self) -> None:
    await asyncio.gather(*(tool.close() for tool in self._tools.values()))
