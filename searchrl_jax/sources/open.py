"""Opens the document behind a passage, in pieces.

  config.tools.open = dict(module='open', found=True, chars=500)

The retrieval server of config.source has the documents (`POST /document`): a
passage with its neighbours of the same title, or, where it shows pages of the
web, the page of a URL. The policy names the id of a passage, and a piece, from
1; in a block of a template it writes the id alone for the first one, or
{"name": "open", "arguments": {"id", "piece"}}. found: whether only what a
search of the trajectory found is opened. chars: of a piece, which an
observation has to show whole, beside those of other calls of a turn: up to two
for each of its tokens.
"""

import asyncio
from collections.abc import Mapping, Sequence
import json
import time
from typing import Any

from retrieval.client import RetrievalClient, RetrievalError
from searchrl_jax import lookup
from searchrl_jax.sources import none, simulated
from searchrl_jax.sources.core import Answer, Source, SourceError
from searchrl_jax.text import calls, prompts
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
    self._found, self._chars = config.found, config.chars

  async def search(self, requests: Sequence[SearchRequest]) -> list[Answer]:
    return await asyncio.gather(*map(self._one, requests))

  async def _one(self, request: SearchRequest) -> Answer:
    begin = time.monotonic()
    name, n, wrong = read(request.query)
    try:
      text = f'error: {wrong}' if wrong else await self._piece(request, name, n)
    except RetrievalError as error:
      return SearchError(request, error.kind, str(error))
    return SearchResult(request, (), time.monotonic() - begin, text)

  async def _piece(self, request: SearchRequest, name: str, n: int) -> str:
    searches = [a for a in request.earlier if a.request.tool == SEARCH]
    if self._found and all(name != p.id for a in searches for p in a.passages):
      return f'error: no search has found {name}'
    which = min(max(n, 1), _PIECES), self._chars
    part = await self._client.document(name, *which)
    if part is None:
      return f'error: there is no document {name}, or it cannot be read'
    text, pieces = part
    if not 1 <= n <= pieces:
      return f'error: {name} has the pieces 1 to {pieces}'
    return f'{name}, piece {n} of {pieces}:\n{text}'

  async def check(self) -> Mapping[str, object]:
    """Raises SourceError unless every server that answers has documents."""
    asked = map(self._client.health, self._client.urls)
    answers = await asyncio.gather(*asked, return_exceptions=True)
    identity: Any = None
    for url, told in zip(self._client.urls, answers):
      if not isinstance(told, BaseException):
        what = f'{url} has no documents to open: serve a corpus, or the web '
        what += 'with --web_mode=page; update an older server'
        lookup.require(told.get('documents'), what, SourceError)
        identity, most = told['identity'], told['limits']['piece_chars']
        what = f'chars={self._chars}: {url} has --piece_chars={most}; raise it'
        lookup.require(self._chars <= most, what, SourceError)
    lookup.require(identity is not None, f'{answers[0]}', SourceError)
    return {'identity': {**identity, 'chars': self._chars}}

  async def close(self) -> None:
    await self._client.close()


def read(query: str) -> tuple[str, int, str]:
  """The id and the number of a piece that a query names, and what is wrong with
  a call; '' = nothing."""
  call = calls.read(query, [SCHEMA])
  if call.status == 'bad_arguments':
    return '', 1, call.error
  good = call.status == 'ok'
  asked = json.loads(call.arguments) if good else {'id': query.strip(' []')}
  return asked['id'], asked.get('piece', 1), ''


def _check(config: Any, fields: Any) -> None:
  """Raises ConfigError for a source without documents, or pieces too long."""
  source, env = config.source, config.env
  what = f'config.source.module={source.module!r} has no documents: use '
  good = source.module not in (none.NONE, simulated.SIMULATED)
  lookup.require(good, f"{what}'service', or leave the tool out")
  dials = [n for n in ('missing', 'contradict') if source.dials[n]]
  what = 'a document has passages that config.source.dials take out or change'
  lookup.require(not dials, f'{what}: set {dials} to 0, or leave the tool out')
  template, limit = prompts.load(env.template), env.max_observation_tokens
  shared = template.calls and template.max_queries or 1
  chars, most = fields.get('chars', 0), 2 * limit // shared
  what = f'chars={chars}: give 1 to {most}, 2 for each token of '
  what += f'env.max_observation_tokens={limit}, which {shared} results share; '
  lookup.require(0 < chars <= most, what + 'the rest could never be read')


def functions(config: Any) -> list[Mapping]:
  return [SCHEMA]


def make(config: Any, *, source: Any, **_: object) -> Open:
  """The tool of `config.tools.NAME` (module='open', found, chars)."""
  return Open(config, source)


make.check = _check  # type: ignore[attr-defined]
