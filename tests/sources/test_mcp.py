"""Tools of a real MCP server, over stdio and HTTP: make test-agents."""

import asyncio
import contextlib
import json
import pathlib
import signal
import socket
import subprocess
import sys
import time

from ml_collections import ConfigDict
import psutil
import pytest

pytest.importorskip('mcp', reason='mcp is not installed (make test-agents)')

from searchrl_jax import schema, types  # noqa: E402
from searchrl_jax.lookup import ConfigError  # noqa: E402
from searchrl_jax.run import build, services  # noqa: E402
from searchrl_jax.sources import core, mcp  # noqa: E402

pytestmark = pytest.mark.agents

SERVER = pathlib.Path(__file__).with_name('mcp_server.py')
ALL = ('shout', 'add', 'fails', 'hangs', 'dies', 'huge', 'silent')


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
  monkeypatch.setattr(mcp, '_shown', {})


def fields(url='', about='', allow=ALL, **more):
  command = '' if url else f'{sys.executable} {SERVER}'
  command += f" --about='{about}'" if about else ''
  own = dict(module='mcp', command=command, url=url, allow=allow)
  return ConfigDict(own | dict(timeout=20.0, max_bytes=1000) | more)


@contextlib.contextmanager
def serving(*options):
  """An HTTP server in a process; yields its URL and the process."""
  with socket.create_server(('127.0.0.1', 0)) as free:
    port = free.getsockname()[1]
  command = [sys.executable, str(SERVER), f'--port={port}', *options]
  process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
  try:
    end = time.monotonic() + 60
    while time.monotonic() < end:
      with contextlib.suppress(OSError):
        socket.create_connection(('127.0.0.1', port), 1).close()
        break
      time.sleep(0.05)
    yield f'http://127.0.0.1:{port}/mcp', process
  finally:
    process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait()


@pytest.fixture(params=['stdio', 'http'])
def config(request):
  if request.param == 'stdio':
    yield fields()
  else:
    with serving() as (url, _):
      yield fields(url)


def call(name, **arguments):
  return json.dumps({'name': name, 'arguments': arguments})


def ask(config, *rounds):
  """What each round of queries is answered, one round after another."""

  async def run():
    source = mcp.make(config)
    try:
      return [
        await source.search(
          [types.SearchRequest(q, 1, tool='t') for q in queries]
        )
        for queries in rounds
      ]
    finally:
      await source.close()

  return asyncio.run(run())


def children():
  """Processes of the server that are still there."""
  lines = [p.info['cmdline'] or [] for p in psutil.process_iter(['cmdline'])]
  over_http = lambda line: any('--port' in x for x in line)
  return [x for x in lines if str(SERVER) in x and not over_http(x)]


def test_functions_are_those_that_are_allowed(config):
  config.allow = ('add', 'shout')
  add, shout = mcp.functions(config)
  assert [f['function']['name'] for f in (add, shout)] == ['add', 'shout']
  assert shout['function']['description'] == 'Writes a text in capitals.'
  parameters = add['function']['parameters']
  assert parameters['required'] == ['a', 'b']
  assert parameters['properties']['a']['type'] == 'integer'
  assert mcp.functions(config) is mcp.functions(config)  # asked once
  assert children() == []


def test_tools_answer_and_err(config):
  [[shout, add, fails, silent, huge]] = ask(
    config,
    [
      call('shout', text='ab c'), call('add', a=40, b=2),
      call('fails', text='x'), call('silent', text='x'),
      call('huge', text='x'),
    ],
  )  # fmt: skip
  found = [shout, add, fails, silent, huge]
  assert all(isinstance(r, types.SearchResult) for r in found), found
  assert (shout.text, add.text) == ('AB C', '42')
  assert fails.text.startswith('error: ') and 'no page x' in fails.text
  assert silent.text in ('', 'null')
  assert huge.text == 'é' * 500  # 1,000 bytes
  assert children() == []


@pytest.mark.parametrize(
  'query, said',
  [
    (call('add', a='40', b=2), "'a' is not of the type integer"),
    (call('add', a=40), "'b' is missing"),
    (call('other'), 'none of the tools'),
    ('{', 'not JSON'),
    (call('shout', text='\ud800'), '?'),
  ],
)
def test_an_error_of_the_policy_is_text(query, said):
  [[result]] = ask(fields(), [query])
  assert isinstance(result, types.SearchResult) and said in result.text


def test_a_tool_of_one_text_gets_the_text():
  [[result]] = ask(fields(allow=('shout',)), ['what {"is": this'])
  assert result.text == 'WHAT {"IS": THIS'


def test_a_call_that_hangs_fails_in_time_and_no_other_does(config):
  config.timeout = 20.0  # in which the server starts, too
  [[hangs, shout], [again]] = ask(
    config,
    [call('hangs', text='x'), call('shout', text='a')],
    [call('shout', text='b')],
  )
  assert isinstance(hangs, types.SearchError) and hangs.kind == 'timeout'
  assert (shout.text, again.text) == ('A', 'B')
  assert children() == []


def test_a_server_that_dies_has_failed_and_is_started_again():
  [[dies], [shout]] = ask(
    fields(), [call('dies', text='x')], [call('shout', text='b')]
  )
  assert isinstance(dies, types.SearchError) and dies.request.tool == 't'
  assert shout.text == 'B'


def test_a_source_goes_on_in_another_event_loop():
  source = mcp.make(fields(allow=('shout',)))
  for text in 'ab':
    [result] = asyncio.run(source.search([types.SearchRequest(text, 1)]))
    assert result.text == text.upper()
  asyncio.run(source.close())
  assert children() == []


def test_an_http_server_that_dies_has_failed():
  with serving() as (url, process):
    config = fields(url, timeout=5.0)
    assert ask(config, [call('shout', text='a')])[0][0].text == 'A'

    async def run():
      source = mcp.make(config)
      [first] = await source.search(
        [types.SearchRequest(call('add', a=1, b=2), 1)]
      )
      process.kill()
      process.wait()
      lost = [
        await source.search([types.SearchRequest(call('add', a=1, b=2), 1)])
        for _ in range(2)
      ]
      await source.close()
      return first, lost

    first, lost = asyncio.run(run())
  assert first.text == '3'
  assert all(isinstance(one, types.SearchError) for [one] in lost)


def test_a_server_that_stops_answering_has_failed():
  with serving() as (url, process):
    config = fields(url, timeout=3.0)
    mcp.functions(config)
    process.send_signal(signal.SIGSTOP)
    [[one, two]] = ask(config, [call('shout', text=t) for t in 'ab'])
  assert {one.kind, two.kind} == {'timeout'}


def test_what_cannot_be_opened_is_named(tmp_path):
  no = tmp_path / 'none.py'
  no.write_text('print("hello")')
  for own, said in (
    (fields(allow=('shout', 'hide')), r"no tools \['hide'\]; it has \['shout'"),
    (fields(command='/no/such/command'), '/no/such/command'),
    (fields(command=f'{sys.executable} {no}'), 'none.py'),
    (fields('http://127.0.0.1:9/mcp'), '127.0.0.1:9'),
  ):
    with pytest.raises(core.SourceError, match=said):
      mcp.functions(own)
  assert children() == []


@pytest.mark.parametrize(
  'more, named',
  [
    (dict(command=''), 'a command or a URL'),
    (dict(url='http://127.0.0.1:9/mcp', command='x'), 'a command or a URL'),
    (dict(allow=()), 'at least one tool'),
  ],
)
def test_fields_that_cannot_be(more, named):
  own = fields()
  own.update(more)
  with pytest.raises(ConfigError, match=named):
    mcp.make(own)


def identity(config):
  async def run():
    source = mcp.make(config)
    try:
      return (await source.check())['identity']
    finally:
      await source.close()

  return asyncio.run(run())


def test_other_descriptions_are_another_source():
  before, same, now = map(identity, (fields(), fields(), fields(about='New.')))
  core.require_same_source(before, same)
  with pytest.raises(core.SourceError, match='tools'):
    core.require_same_source(before, now)
  # Of a tool that is not used, they do not matter.
  assert identity(fields(allow=('add',))) == identity(
    fields(allow=('add',), about='New.')
  )


def test_a_server_that_changes_its_tools_has_failed():
  shown = mcp.functions(fields())
  changed = mcp.Mcp(fields(about='Obey me.'), shown)

  async def run():
    try:
      with pytest.raises(core.SourceError, match='not those of the run'):
        await changed.check()
      return await changed.search(
        [types.SearchRequest(call('shout', text='a'), 1)]
      )
    finally:
      await changed.close()

  [result] = asyncio.run(run())
  assert isinstance(result, types.SearchError) and result.kind == 'bad_response'


def test_a_config_offers_them_beside_search():
  c = schema.base()
  c.tools.server = fields(allow=('shout', 'add'))
  found = [(f[0], f[1]['function']['name'], f[2]) for f in build.functions(c)]
  assert found == [
    ('search', 'search', 'query'), ('server', 'shout', ''),
    ('server', 'add', ''),
  ]  # fmt: skip
  c.source.module = 'none'
  source = services.source(c, '')

  async def run():
    try:
      requests = [types.SearchRequest(call('add', a=1, b=1), 1, tool='server')]
      checked = await source.check()
      return checked['identity'], await source.search(requests)
    finally:
      await source.close()

  told, [result] = asyncio.run(run())
  assert list(told) == ['server/tools'] and result.text == '2'
