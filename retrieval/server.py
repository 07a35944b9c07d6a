"""Retrieval server: serves indexes over a corpus, or the web, by HTTP.

It implements Search-R1's protocol. To start it:

  python -m retrieval.server --corpus=corpus.jsonl.gz --port=8000
  python -m retrieval.server --index_folder=wiki --index=dense_jax --encoder=e5
  python -m retrieval.server --web=serper --record=answers.sqlite
  python -m retrieval.server --replay=answers.sqlite

To ask it:

  curl -s 127.0.0.1:8000/retrieve -H 'content-type: application/json' \\
    -d '{"queries": ["who wrote hamlet"], "topk": 3, "return_scores": true}'

See retrieval/README.md for the protocol and the limits.
"""

import asyncio
from collections.abc import Sequence
import contextlib
import dataclasses
import functools
import os
import pathlib
import signal
import socket
import ssl
import threading
import time

from absl import app as absl_app
from absl import flags
import fastapi
import uvicorn
from uvicorn.protocols.http import h11_impl

from retrieval import files
from retrieval.index import bm25
from retrieval.proxies import LOOPBACK
from retrieval.serve.app import create_app
from retrieval.serve.protocol import Limits
from retrieval.serve.searcher import open_searcher, say

TOKEN = 'RETRIEVAL_TOKEN'  # environment variable
SOURCES = ('corpus', 'index_folder', 'web', 'replay')
_NEEDS = {  # flag -> flags that require it
  'index_folder': """index encoder precision nprobe ef_search faiss_gpu
    milvus_uri rerank rerank_n rerank_dtype""",
  'encoder': 'dtype query_length',
  'corpus': 'bm25_preset k1 b analyzer stemmer stop_words',
  'web': """web_mode web_rate web_concurrency web_max_calls web_max_cost
    web_price web_ledger""",
  'replay': 'replay_identity',
  'tls_cert': 'tls_key',
  'rerank': 'rerank_n rerank_dtype',
}
_AT_MOST = {'topk': 'max_topk', 'max_queries': 'max_pending'}
_AT_MOST['max_body_bytes'] = 'max_bytes'
_STOP_S = 10.0  # that accepted requests get when the server stops
PRECISIONS = ('float32', 'float16', 'bfloat16', 'int8')  # without importing JAX
_PRECISION = 'Of dense_jax; float32 on CPU, float16 on GPUs, bfloat16 on TPUs.'
_CACHE = """Folder of compiled programs, '' for none; else
$JAX_COMPILATION_CACHE_DIR, or ~/.cache/searchrl_retrieval."""
_ALLOW_HOST = """Further value of the header Host that is accepted without a
token, if --host is this machine."""


class _Protocol(h11_impl.H11Protocol):
  """HTTP/1.1 with a time limit for the head of a request.

  uvicorn's own timer of idle connections stops at the first byte.
  """

  def __init__(self, *args, head_s: float, **kwargs):
    super().__init__(*args, **kwargs)
    self._head_s, self._due = head_s, None

  def connection_made(self, transport) -> None:
    super().connection_made(transport)
    self._await_head()

  def data_received(self, data: bytes) -> None:
    super().data_received(data)
    self._await_head()

  def _await_head(self) -> None:
    if self.cycle and not self.cycle.response_complete:
      self._due = None  # the application is working
    elif self.timeout_keep_alive_task is None:
      self._due = self._due or self.loop.time() + self._head_s
      self.timeout_keep_alive_task = self.loop.call_at(
        self._due, self.timeout_keep_alive_handler
      )

  def send_400_response(self, msg: str) -> None:
    # The body is malformed: h11 accepts no other answer to this request.
    if self.cycle and not self.cycle.response_complete:
      self.cycle.disconnected = True
      self.cycle.message_event.set()
      if self.cycle.response_started:
        return self.transport.close()
    super().send_400_response(msg)


class _Server(uvicorn.Server):
  """uvicorn, with a file that has the port once the server is ready."""

  def __init__(self, config: uvicorn.Config, url: str, port_file: str | None):
    super().__init__(config)
    self._url, self._port_file = url, port_file
    self.problem = ''  # why it stopped without a signal

  async def startup(self, sockets: list[socket.socket] | None = None) -> None:
    await super().startup(sockets)
    if self.started:
      say(f'listening at {self._url}')
      self._report = asyncio.create_task(self._report_ready())

  async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
    _exit_after(_STOP_S + 4)  # in case a search never ends
    await super().shutdown(sockets)

  async def _report_ready(self) -> None:
    try:
      await self.config.app.state.warm
      if self._port_file:
        port = int(self._url.rpartition(':')[2])
        files.write_json(pathlib.Path(self._port_file), port)
      say(f'ready at {self._url}')
    except Exception as error:
      self.problem = f'{type(error).__name__}: {error}'
      self.should_exit = True


def bind(host: str, port: int) -> socket.socket:
  """A bound socket that does not listen yet: connections are refused."""
  family = socket.AF_INET6 if ':' in host else socket.AF_INET
  sock = socket.socket(family, socket.SOCK_STREAM)
  # A restarted server can reuse the port at once.
  sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
  with _bound(host, port):
    sock.bind((host, port))
  return sock


def _bound(host: str, port: int) -> contextlib.AbstractContextManager[None]:
  fix = 'Free the port, or use another one (--port=0 takes a free one).'
  problem = f'cannot serve on {host}:{port}: {{}}. {fix}'
  return files.convert(OSError, OSError, problem)


def watch_parent(pid: int) -> None:
  """Stops this process when process `pid` ends for any reason.

  Raises:
    ValueError: there is no such process.
  """
  with files.convert(OSError, ValueError, f'no process --parent_pid={pid}'):
    os.kill(pid, 0)
  child = os.getppid() == pid

  def run() -> None:
    with contextlib.suppress(ProcessLookupError):
      while not child or os.getppid() == pid:  # a zombie still takes signals
        os.kill(pid, 0)
        time.sleep(0.5)
    say(f'process {pid} (--parent_pid) has ended: stopping')
    os.kill(os.getpid(), signal.SIGTERM)
    _exit_after(_STOP_S + 5)

  threading.Thread(target=run, daemon=True).start()


def _exit_after(seconds: float) -> None:
  """Ends the process after `seconds`, in case a thread does not return."""

  def run() -> None:
    time.sleep(seconds)
    say('a search or request did not end: killed')
    os._exit(1)

  threading.Thread(target=run, daemon=True).start()


def read_token(path: str | None) -> str | None:
  """The token of a file, else of the environment (`TOKEN`), else None.

  Raises:
    ValueError: it cannot be read or sent; the message does not show it.
  """
  where, token = TOKEN, os.environ.get(TOKEN)
  if path:
    where = f'--token_file={path}'
    unread = (OSError, UnicodeDecodeError)
    with files.convert(unread, ValueError, f'{where} cannot be read: {{}}'):
      token = pathlib.Path(path).read_text().strip()
  if token is not None and not (token and all('!' <= c <= '~' for c in token)):
    fix = 'write visible ASCII characters without spaces'
    raise ValueError(f'{where} holds no token: {fix}')
  return token


def define_flags() -> None:
  """Defines the flags; not on import, since other modules import this one."""
  text, number = flags.DEFINE_string, flags.DEFINE_integer
  choice = flags.DEFINE_enum
  dtypes = ['auto', 'float32', 'bfloat16']
  text('corpus', None, 'JSONL(.gz) of {"id", "contents"}: BM25 in memory.')
  text('index_folder', None, 'Folder of retrieval.build_index: see --index.')
  flags.DEFINE_multi_string('index', ['bm25'], 'Index; several are fused.')
  text('encoder', None, 'Folder of the query encoder.')
  choice('dtype', 'auto', dtypes, 'Arithmetic of the encoder.')
  number('query_length', None, 'Tokens of a query that are read; 256.', 3)
  text('compile_cache', None, _CACHE)
  choice('precision', None, [*PRECISIONS], _PRECISION)
  number('nprobe', None, 'Lists searched, of FAISS IVF.', 1)
  number('ef_search', None, 'Candidates kept, of HNSW.', 1)
  flags.DEFINE_bool('faiss_gpu', False, 'FAISS on all GPUs; no HNSW.')
  text('milvus_uri', None, 'URL of the Milvus server of this folder.')
  text('rerank', None, 'Folder of a cross-encoder.')
  number('rerank_n', 50, 'Passages that it reranks.', 1)
  choice('rerank_dtype', 'auto', dtypes, 'Arithmetic of the cross-encoder.')
  text('web', None, 'Search the web by: serpapi, serper or brave.')
  choice('web_mode', 'snippet', ['snippet', 'page'], 'What results show.')
  flags.DEFINE_float('web_rate', None, 'Most calls a second.', 0)
  number('web_concurrency', 8, 'Most calls at once.', 1)
  number('web_max_calls', None, 'Most calls in all.', 0)
  flags.DEFINE_float('web_max_cost', None, 'Most money in all.', 0)
  flags.DEFINE_float('web_price', None, 'Price of a call.', 0)
  text('web_ledger', None, 'SQLite file that counts calls and cost.')
  text('record', None, 'SQLite file that records all answers.')
  text('replay', None, 'SQLite file of recorded answers; the only source.')
  text('replay_identity', None, 'Which identity, if the file has several.')
  text('token_file', None, f'File with the token of clients; else ${TOKEN}.')
  text('host', '127.0.0.1', 'Address to serve on.')
  number('port', 8000, 'Port to serve on; 0 takes a free one.', 0, 65535)
  flags.DEFINE_multi_string('allow_host', [], _ALLOW_HOST)
  text('tls_cert', None, 'Certificate chain (PEM): https.')
  text('tls_key', None, 'Private key of --tls_cert, if not in that file.')
  text('port_file', None, 'File that gets the port once the server is ready.')
  number('parent_pid', None, 'Stop when this process ends.', 1)
  bm25.define_flags(' with --corpus')
  for field in dataclasses.fields(Limits):
    define = number if field.type is int else flags.DEFINE_float
    define(field.name, field.default, field.metadata['help'], field.type is int)


def check(args: flags.FlagValues, sources: Sequence[str] = SOURCES) -> None:
  """Checks the combination of flags.

  Raises:
    ValueError: flags that exclude or require each other.
  """
  given = ' and '.join(f'--{name}' for name in sources if args[name].value)
  if not given or ' and ' in given:
    known = ', '.join(f'--{name}' for name in sources)
    raise ValueError(f'give one of {known}; got {given or "none"}')
  if args.record and args.replay:
    raise ValueError('--record and --replay exclude each other')
  for needed, names in _NEEDS.items():
    for name in names.split():
      if args[name].present and not args[needed].value:
        raise ValueError(f'--{name} needs --{needed}')
  for less, more in _AT_MOST.items():
    if (low := args[less].value) > (high := args[more].value):
      raise ValueError(f'--{less}={low} exceeds --{more}={high}')


def run(args: flags.FlagValues) -> None:
  """Serves what the flags name until a signal.

  Raises:
    ValueError, OSError, RuntimeError: it cannot be served.
  """
  local_host, hosts = args.host in LOOPBACK, None
  if local_host:
    hosts = ['127.0.0.1', 'localhost', '[::1]', *args.allow_host]
  check(args)
  if args.parent_pid:
    watch_parent(args.parent_pid)
  token = read_token(args.token_file)
  tls = args.tls_cert and _tls(args.tls_cert, args.tls_key)
  # The port first: reading a large corpus in vain would waste minutes.
  sock = bind(args.host, args.port)
  if not local_host and token is None:
    say(
      f'WARNING: bound to {args.host} without a token: everyone who reaches '
      'this machine can read the whole corpus and use its CPU. Use '
      '--host=127.0.0.1, --token_file, or a firewall.'
    )
  searcher, local, programs = open_searcher(args)
  limits = Limits(*(args[f.name].value for f in dataclasses.fields(Limits)))
  served = {'local': local, 'programs': programs}
  app = create_app(searcher, limits, token=token, hosts=hosts, **served)
  _serve(app, sock, args, tls)
  say('stopped')


def main(argv: Sequence[str]) -> int:
  return files.run_command('retrieval.server', argv, run, flags.FLAGS)


def _tls(cert: str, key: str | None) -> ssl.SSLContext:
  context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
  given = f'--tls_cert={cert} --tls_key={key}'
  problem = f'{given}: not a certificate chain and its key in PEM: {{}}'
  with files.convert(OSError, ValueError, problem):
    context.load_cert_chain(cert, key)
  return context


def _serve(app: fastapi.FastAPI, sock: socket.socket, args, tls) -> None:
  with _bound(args.host, args.port):  # it may be taken since `bind`
    sock.listen(2048)
  port = sock.getsockname()[1]
  host = f'[{args.host}]' if ':' in args.host else args.host
  config = uvicorn.Config(
    app,
    log_level='warning',
    access_log=False,
    # Longer than clients keep idle connections, so that they close first.
    timeout_keep_alive=75,
    timeout_graceful_shutdown=int(_STOP_S),
    http=functools.partial(_Protocol, head_s=args.head_s),
    ssl_context_factory=(lambda *_: tls) if tls else None,
  )
  scheme = 'https' if tls else 'http'
  server = _Server(config, f'{scheme}://{host}:{port}', args.port_file)

  # uvicorn would raise a caught signal again after its graceful stop; the
  # process should then end with 0.
  for caught in (signal.SIGTERM, signal.SIGINT):
    signal.signal(caught, lambda *_: setattr(server, 'should_exit', True))
  server.run(sockets=[sock])
  if server.problem:
    raise RuntimeError(server.problem)


if __name__ == '__main__':
  define_flags()
  absl_app.run(main)
