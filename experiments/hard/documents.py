"""The tool get_document of BrowseComp-Plus: a document by its id.

  c.tools.get_document = dict(module='experiments.hard.documents', path=...)

The whole corpus is in memory. An observation shows as much of a document as
config.env.max_observation_tokens allows.
"""

from collections.abc import Sequence

from retrieval.corpus import iter_documents
from searchrl_jax.sources.core import Source
from searchrl_jax.types import SearchRequest, SearchResult


class Documents(Source):
  def __init__(self, path: str):
    self._contents = {d.id: d.contents for d in iter_documents(path)}

  async def search(self, requests: Sequence[SearchRequest]):
    absent = 'There is no document with this id.'
    return [
      SearchResult(r, (), text=self._contents.get(r.query.strip('[] '), absent))
      for r in requests
    ]


def make(config, **_) -> Documents:
  return Documents(config.path)
