"""Tools of an MCP server (Model Context Protocol), by the package mcp.

  config.tools.files = dict(
    module='mcp', command='python server.py', url='', allow=('read_file',),
    timeout=30.0, max_bytes=16384,
  )

command: of a server that is started (stdio), or url: of one that runs
(streamable HTTP). allow: the tools that are used. timeout: seconds of a call,
with the connection. max_bytes: of a result, which is cut; its text alone is
shown.

What the server's tools are called and how they are described is in the prompts,
and part of the identity of the source: a run does not go on with others. A
tool's own error is a text that the policy reads, and so is an error that a
server answers over stdio: over HTTP it may be that of a proxy. A server that
hangs, dies or breaks the protocol has failed; the next request connects again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent import futures
import contextlib
import hashlib
import json
import shlex
import time
from typing import Any

from searchrl_jax import lookup
from searchrl_jax.devices.signals import Held
from searchrl_jax.sources.core import Answer, Source, SourceError
from searchrl_jax.text import calls
from searchrl_jax.types import SearchError, SearchRequest, SearchResult

_FIELDS = {'command', 'url', 'allow', 'timeout', 'max_bytes'}
_INVALID_PARAMS = -32602  # of JSON-RPC: the server refuses the arguments
_LOST = -32000, -32001  # of the package: no connection, no answer in time
# Fields of a tool -> the schemas that prompts show.
_shown: dict[str, list[dict]] = {}


def _package() -> Any:
  try:
    import mcp
  except ImportError as e:
    what = "module='mcp' needs the package mcp"
    raise lookup.ConfigError(f"{what}: pip install 'mcp>=2,<3'") from e
  return mcp


@contextlib.asynccontextmanager
async def _connected(config: Any):
  """A client, and the schemas of its tools."""
  mcp, server = _package(), config.url
  if not server:
    command, *args = shlex.split(config.command)
    parameters = mcp.StdioServerParameters(command=command, args=args)
    server = mcp.stdio_client(parameters)
  async with mcp.Client(server, cache=None) as client:
    yield client, await _schemas(client, config.allow)


async def _schemas(client: Any, allow: Sequence[str]) -> list[dict]:
  """Those of the tools that `allow` names, in its order."""
  tools, cursor = {}, ''
  while cursor is not None:
    page = await client.list_tools(cursor=cursor or None)
    tools |= {tool.name: tool for tool in page.tools}
    cursor = page.next_cursor
  missing = [name for name in allow if name not in tools]
  lookup.require(not missing, f'it has no tools {missing}; it has {[*tools]}')
  chosen = [tools[name] for name in allow]
  about = [(t.name, t.description or '', t.input_schema) for t in chosen]
  return [calls.schema(*one) for one in about]


class Mcp(Source):
  """See the module; shown: the schemas that prompts show, if they are known."""

  def __init__(self, config: Any, shown: list[dict] | None = None):
    self._config, self.schemas = config, shown
    where = config.command or config.url
    fix = f'try it by itself; timeout={config.timeout} s has to be enough'
    self._where = f'the MCP server {where!r} ({fix})'
    self._held: list[Held] = []  # connections; the last one is in use

  async def search(self, requests: Sequence[SearchRequest]) -> list[Answer]:
    return await asyncio.gather(*map(self._one, requests))

  async def _one(self, request: SearchRequest) -> Answer:
    begin, answer = time.monotonic(), self._answer
    try:
      text = await self._call(lambda client: answer(client, request.query))
    except Exception as e:  # whatever the package raises
      kind = 'timeout' if isinstance(e, TimeoutError) else 'bad_response'
      return SearchError(request, kind, f'{self._where}: {e!r}')
    return SearchResult(request, (), time.monotonic() - begin, text)

  async def _call(self, function: Callable[[Any], Awaitable]) -> Any:
    """What a function of the client returns, in time."""
    if not (self._held and self._held[-1].usable):
      self._held = [held for held in self._held if not held.task.done()]
      self._held.append(Held(_connected(self._config), self._where))
    held = self._held[-1]
    with held.used():
      async with asyncio.timeout(self._config.timeout):
        # Other calls wait for the same connection.
        client, schemas = await asyncio.shield(held.ready)
        self.schemas = schemas if self.schemas is None else self.schemas
        what = 'its tools, or what it says of them, are not those of the run'
        lookup.require(schemas == self.schemas, what, SourceError)
        return await function(client)

  async def _answer(self, client: Any, query: str) -> str:
    call = calls.read(query, self.schemas)
    if call.status != 'ok':
      return f'error: {call.error}'
    try:
      found = await client.call_tool(call.name, json.loads(call.arguments))
    except _package().MCPError as e:
      if e.code in _LOST or self._config.url and e.code != _INVALID_PARAMS:
        raise
      return f'error: {e}'
    shown = [getattr(x, 'text', f'[{x.type}]') for x in found.content]
    text = 'error: ' * found.is_error + '\n'.join(shown)
    data = text.encode(errors='replace')
    return data[: self._config.max_bytes].decode(errors='ignore')

  async def check(self) -> Mapping[str, object]:
    """Raises SourceError unless the server has the tools that are allowed."""
    try:
      await self._call(lambda client: asyncio.sleep(0))
    except Exception as e:
      raise SourceError(f'{self._where}: {e!r}') from e
    listed = json.dumps(self.schemas, sort_keys=True).encode()
    return {'identity': {'tools': hashlib.sha256(listed).hexdigest()[:16]}}

  async def close(self) -> None:
    for held in self._held:
      held.end()
    # That of an event loop that has ended is done.
    tasks = (held.task for held in self._held if not held.task.done())
    await asyncio.gather(*tasks, return_exceptions=True)


def _key(config: Any) -> str:
  """The fields as text; raises ConfigError for wrong ones, or no package."""
  _package()
  fields = config.to_dict()
  one = _FIELDS <= {*fields} and bool(config.command) != bool(config.url)
  what = f"module='mcp' needs {sorted(_FIELDS)}, with a command "
  what += f'or a URL, and at least one tool to allow; it has {fields}'
  lookup.require(one and config.allow, what)
  return repr(sorted(fields.items()))


def functions(config: Any) -> list[dict]:
  """The schemas of the tools, from the server; asked once in a process.

  Raises:
    ConfigError, SourceError: a wrong field; there is no such server.
  """
  key = _key(config)

  async def ask() -> list[dict]:
    source = Mcp(config)
    try:
      await source.check()
      return source.schemas or []
    finally:
      await source.close()

  if key not in _shown:
    with futures.ThreadPoolExecutor(1) as pool:  # this thread may have a loop
      _shown[key] = pool.submit(asyncio.run, ask()).result()
  return _shown[key]


def make(config: Any, **_: object) -> Mcp:
  """The tool of `config.tools.NAME` (module='mcp')."""
  return Mcp(config, _shown.get(_key(config)))


make.check = lambda config, fields: _key(fields)  # type: ignore[attr-defined]
