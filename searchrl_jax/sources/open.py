"""Opens the document behind a passage, in pieces.

  config.tools.open = dict(module='open', found=True)

The retrieval server of config.source has the documents (`POST /document`): a
passage with its neighbours of the same title, or, where it shows pages of the
web, the page of a URL. The policy names the id of a passage, and a piece, from
1; in a block of a template it writes the id alone for the first one, or
{"name": "open", "arguments": {"id", "piece"}}. found: whether only what a
search of the trajectory found is opened.
"""

import asyncio
from collections.abc import Mapping, Sequence
import json
import time
from typing import Any

from retrieval.client import RetrievalClient, RetrievalError
from searchrl_jax import lookup
from searchrl_jax.sources.core import Answer, Source, SourceError
from searchrl_jax.text import calls
from searchrl_jax.types import SEARCH, SearchError, SearchRequest, SearchResult

_PIECES = 10_000  # more than any document has
_ID = {'type': 'string', 'description': 'The id of the passage.'}
_PIECE = {'type': 'integer', 'description': 'Which piece, from 1.'}
_NAMED = {'properties': {'id': _ID, 'piece': _PIECE}, 'required': ['id']}
_ABOUT = 'Shows the whole document of a passage that was found, in pieces.'
SCHEMA = calls.schema('open', _ABOUT, {'type': 'object'} | _NAMED)


class Open(Source):
  """See the module; source: config.source, with the URL of its server."""

  def __init__(self, config: Any, source: Any):
    seconds = dict(timeout_s=source.timeout, deadline_s=source.deadline)
    retries = source.attempts - 1
    self._client = RetrievalClient(source.url, retries=retries, **seconds)
    self._found = config.found

  async def search(self, requests: Sequence[SearchRequest]) -> list[Answer]:
    return await asyncio.gather(*map(self._one, requests))

  async def _one(self, request: SearchRequest) -> Answer:
    begin = time.monotonic()
    call = calls.read(request.query, [SCHEMA])
    good = call.status == 'ok'
    asked = json.loads(call.arguments) if good else {'id': request.query}
    try:
      text = await self._piece(request, asked['id'], asked.get('piece', 1))
    except RetrievalError as error:
      return SearchError(request, error.kind, str(error))
    return SearchResult(request, (), time.monotonic() - begin, text)

  async def _piece(self, request: SearchRequest, name: str, n: int) -> str:
    searches = [a for a in request.earlier if a.request.tool == SEARCH]
    if self._found and all(name != p.id for a in searches for p in a.passages):
      return f'error: no search has found {name}'
    part = await self._client.document(name, min(max(n, 1), _PIECES))
    if part is None:
      return f'error: there is no document {name}'
    text, pieces = part
    if not 1 <= n <= pieces:
      return f'error: {name} has the pieces 1 to {pieces}'
    return f'{name}, piece {n} of {pieces}:\n{text}'

  async def check(self) -> Mapping[str, object]:
    """Raises SourceError unless the server has documents."""
    where = "config.tools (module='open')"
    try:
      health = await self._client.health()
    except RetrievalError as error:
      raise SourceError(f'{where}: {error}') from error
    fix = 'serve a corpus, or the web with --web_mode=page'
    what = f'{where}: {self._client.url} has no documents; {fix}'
    lookup.require(health.get('documents'), what, SourceError)
    size = {'piece_chars': health['limits']['piece_chars']}
    return {'identity': {**health['identity'], **size}}

  async def close(self) -> None:
    await self._client.close()


def functions(config: Any) -> list[Mapping]:
  return [SCHEMA]


def make(config: Any, *, source: Any, **_: object) -> Open:
  """The tool of `config.tools.NAME` (module='open', found)."""
  return Open(config, source)
