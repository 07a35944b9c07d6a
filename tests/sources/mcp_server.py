"""An MCP server for tests: python mcp_server.py [--port=N] [--about=TEXT]."""

import argparse
import asyncio
import os

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

parser = argparse.ArgumentParser()
parser.add_argument('--port', type=int, default=0)
parser.add_argument('--about', default='Writes a text in capitals.')
args = parser.parse_args()
server = MCPServer('tests')


@server.tool(description=args.about)
def shout(text: str) -> str:
  return text.upper()


@server.tool()
def add(a: int, b: int) -> str:
  """Adds two numbers."""
  return str(a + b)


@server.tool()
def fails(text: str) -> str:
  """Has no such page."""
  raise ToolError(f'no page {text}')


@server.tool()
async def hangs(text: str) -> str:
  """Takes minutes."""
  await asyncio.sleep(600)
  return text


@server.tool()
def dies(text: str) -> str:
  """Ends the server."""
  os._exit(3)


@server.tool()
def huge(text: str) -> str:
  """Says more than anybody reads."""
  return 'é' * 5_000_000


@server.tool()
def silent(text: str) -> None:
  """Says nothing."""


if __name__ == '__main__':
  if args.port:
    server.run('streamable-http', host='127.0.0.1', port=args.port)
  else:
    server.run('stdio')
