"""Retrieval server: indexes over a corpus, or the web; Search-R1's protocol.

Start it:

  python -m retrieval.server --corpus=corpus.jsonl.gz --port=8000
  python -m retrieval.server --index_folder=wiki --index=dense_jax --encoder=e5
  python -m retrieval.server --web=serper --record=answers.sqlite
  python -m retrieval.server --replay=answers.sqlite

Ask it:

  curl -s 127.0.0.1:8000/retrieve -H 'content-type: application/json' \\
    -d '{"queries": ["who wrote hamlet"], "topk": 3, "return_scores": true}'

retrieval/README.md describes the protocol and the limits.
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

from retrieval import bm25, files
from retrieval.app import LOOPBACK, create_app
from retrieval.protocol import Limits
from retrieval.served import open_searcher, say

TOKEN = 'RETRIEVAL_TOKEN'  # the environment's name of the token
SOURCES = ('corpus', 'index_folder', 'web', 'replay')
_NEEDS = {  # flag -> flags that mean nothing without it
  'index_folder': (
    'index',
    'encoder',
    'precision',
    'nprobe',
    'ef_search',
    'faiss_gpu',
    'milvus_uri',
    'rerank',
    'rerank_n',
    'rerank_dtype',
  ),
  'encoder': ('dtype', 'query_length'),
  'corpus': ('bm25_preset', 'k1', 'b', 'stemmer', 'stop_words'),
  'web': (
    'web_mode',
    'web_rate',
    'web_concurrency',
    'web_max_calls',
    'web_max_cost',
    'web_price',
    'web_ledger',
  ),
  'replay': ('replay_identity',),
  'tls_cert': ('tls_key',),
  'rerank': ('rerank_n', 'rerank_dtype'),
}
_NAMES = ['127.0.0.1', 'localhost', '[::1]']  # of this machine, as Host
_STOP_S = 10.0  # what a stop grants to requests already taken


class _Protocol(h11_impl.H11Protocol):
  """HTTP/1.1, with a time for the head of a request.

  uvicorn's own timer of an idle connection stops at the first byte.
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
      self._due = None  # it is the application's turn
    elif self.timeout_keep_alive_task is None:
      self._due = self._due or self.loop.time() + self._head_s
      self.timeout_keep_alive_task = self.loop.call_at(
        self._due, self.timeout_keep_alive_handler
      )

  def send_400_response(self, msg: str) -> None:
    # The body is broken: h11 takes no other answer to this request.
    if self.cycle and not self.cycle.response_complete:
      self.cycle.disconnected = True
      self.cycle.message_event.set()
      if self.cycle.response_started:
        return self.transport.close()
    super().send_400_response(msg)


class _Server(uvicorn.Server):
  """uvicorn, with a file that says where it serves once it is warm."""

  def __init__(self, config: uvicorn.Config, url: str, port_file: str | None):
    super().__init__(config)
    self._url, self._port_file = url, port_file
    self.problem = ''  # why it ended of itself

  async def startup(self, sockets: list[socket.socket] | None = None) -> None:
    await super().startup(sockets)
    if self.started:
      say(f'listening at {self._url}')
      self._told = asyncio.create_task(self._tell())

  async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
    _exit_after(_STOP_S + 4)  # a search that never ends holds no stop up
    await super().shutdown(sockets)

  async def _tell(self) -> None:
    try:
      await self.config.app.state.warm
      if self._port_file:
        port = int(self._url.rpartition(':')[2])
        files.write_json(pathlib.Path(self._port_file), port)
      say(f'ready at {self._url}')
    except Exception as error:
      self.problem = f'{type(error).__name__}: {error}'
      self.should_exit = True


def _fail(message: str) -> int:
  say(f'error: {message}')
  return 1


def bind(host: str, port: int) -> socket.socket:
  """A bound socket that does not listen yet: connecting to it is refused.

  Raises:
    OSError: the port is taken, or the host is not one of this machine's.
  """
  family = socket.AF_INET6 if ':' in host else socket.AF_INET
  sock = socket.socket(family, socket.SOCK_STREAM)
  try:
    # Lets a restart have the port of a server that stopped just now.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, port))
  except BaseException:
    sock.close()
    raise
  return sock


def watch_parent(pid: int) -> None:
  """Stops this process when process `pid` ends, however it ends.

  Raises:
    ProcessLookupError: there is no such process.
  """
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
  """Ends the process if it is there still: some thread does not return."""

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
  if path:
    where = f'--token_file={path}'
    try:
      with open(path) as f:
        token = f.read().strip()
    except (OSError, UnicodeDecodeError) as error:
      raise ValueError(f'{where} cannot be read: {error}') from None
  else:
    where, token = TOKEN, os.environ.get(TOKEN)
    if token is None:
      return None
  if not token or not all('!' <= c <= '~' for c in token):
    raise ValueError(
      f'{where} holds no token: write visible ASCII characters without spaces'
    )
  return token


def define_flags() -> None:
  """Defines the command's flags; not on import, since others import this."""
  dtypes = ['auto', 'float32', 'bfloat16']
  flags.DEFINE_string(
    'corpus', None, 'JSONL(.gz) of {"id", "contents"}: BM25 in memory.'
  )
  flags.DEFINE_string(
    'index_folder', None, 'Folder of retrieval.build_index: see --index.'
  )
  flags.DEFINE_multi_string(
    'index', ['bm25'], 'Index of the folder; several are fused by rank'
  )
  flags.DEFINE_string('encoder', None, 'Folder of the query encoder.')
  flags.DEFINE_enum('dtype', 'auto', dtypes, 'Of its arithmetic.')
  flags.DEFINE_integer(
    'query_length', None, 'Tokens that it reads; 256, or all that it can.', 3
  )
  flags.DEFINE_string(
    'compile_cache',
    None,
    "Folder of compiled programs, '' for none; else "
    '$JAX_COMPILATION_CACHE_DIR, or ~/.cache/searchrl_retrieval.',
  )
  flags.DEFINE_enum(
    'precision',
    None,
    ['float32', 'float16', 'bfloat16', 'int8'],
    'Of dense_jax; float32 on CPU, float16 on GPUs, bfloat16 on TPUs.',
  )
  flags.DEFINE_integer('nprobe', None, 'Cells searched, of FAISS IVF.', 1)
  flags.DEFINE_integer('ef_search', None, 'Candidates kept, of HNSW.', 1)
  flags.DEFINE_bool(
    'faiss_gpu', False, 'FAISS on all GPUs, in float16; not HNSW.'
  )
  flags.DEFINE_string('milvus_uri', None, 'Where milvus serves this folder.')
  flags.DEFINE_string('rerank', None, 'Folder of a cross-encoder.')
  flags.DEFINE_integer('rerank_n', 50, 'Passages that it reranks.', 1)
  flags.DEFINE_enum('rerank_dtype', 'auto', dtypes, 'Of its arithmetic.')
  flags.DEFINE_string(
    'web', None, 'Search the web by: serpapi, serper or brave.'
  )
  flags.DEFINE_enum('web_mode', 'snippet', ['snippet', 'page'], 'With --web.')
  flags.DEFINE_float('web_rate', None, 'Most calls a second.', 0)
  flags.DEFINE_integer('web_concurrency', 8, 'Most calls at once.', 1)
  flags.DEFINE_integer('web_max_calls', None, 'Most calls in all.', 0)
  flags.DEFINE_float('web_max_cost', None, 'Most money in all.', 0)
  flags.DEFINE_float('web_price', None, 'Money for a call.', 0)
  flags.DEFINE_string('web_ledger', None, 'File that remembers what was spent.')
  flags.DEFINE_string('record', None, 'SQLite file that keeps all answers.')
  flags.DEFINE_string('replay', None, 'SQLite file that answers, no other.')
  flags.DEFINE_string(
    'replay_identity', None, 'Whose answers, where the file has several.'
  )
  flags.DEFINE_string(
    'token_file',
    None,
    f'File with the token that clients must send; else ${TOKEN}, else none.',
  )
  flags.DEFINE_string('host', '127.0.0.1', 'Address to serve on.')
  flags.DEFINE_integer(
    'port', 8000, 'Port to serve on; 0 takes a free one.', 0, 65535
  )
  flags.DEFINE_multi_string(
    'allow_host',
    [],
    'Name that the header Host may have, beside those of '
    'this machine, without a token; where --host is this machine.',
  )
  flags.DEFINE_string('tls_cert', None, 'Certificate chain (PEM): https.')
  flags.DEFINE_string('tls_key', None, 'Its private key, if not in there.')
  flags.DEFINE_string(
    'port_file', None, 'File that gets the port once the server is ready.'
  )
  flags.DEFINE_integer(
    'parent_pid', None, 'Stop when this process ends (no orphans).', 1
  )
  bm25.define_flags(' with --corpus')
  for field in dataclasses.fields(Limits):
    define = flags.DEFINE_integer if field.type is int else flags.DEFINE_float
    define(field.name, field.default, field.metadata['help'], field.type is int)


def check(args: flags.FlagValues, sources: Sequence[str] = SOURCES) -> None:
  """Refuses flags that do not go together.

  Raises:
    ValueError: says which.
  """
  given = [f'--{name}' for name in sources if args[name].value]
  if len(given) != 1:
    raise ValueError(
      f'give one of {", ".join(f"--{name}" for name in sources)}; got '
      + (' and '.join(given) or 'none')
    )
  if args.record and args.replay:
    raise ValueError('--record and --replay exclude each other')
  for needed, names in _NEEDS.items():
    for name in names:
      if args[name].present and not args[needed].value:
        raise ValueError(f'--{name} needs --{needed}')
  for less, more in (
    ('topk', 'max_topk'),
    ('max_queries', 'max_pending'),
    ('max_body_bytes', 'max_bytes'),
  ):
    if args[less].value > args[more].value:
      raise ValueError(
        f'--{less}={args[less].value} exceeds --{more}={args[more].value}'
      )


def main(argv: Sequence[str]) -> int:
  if len(argv) > 1:
    return _fail(f'arguments not understood: {" ".join(argv[1:])}')
  args = flags.FLAGS
  try:
    check(args)
    if args.parent_pid:
      watch_parent(args.parent_pid)
    token = read_token(args.token_file)
    tls = args.tls_cert and _tls(args.tls_cert, args.tls_key)
  except ProcessLookupError:
    return _fail(f'no process --parent_pid={args.parent_pid}')
  except ValueError as error:
    return _fail(str(error))
  # The port first: reading a large corpus for nothing would waste minutes.
  try:
    sock = bind(args.host, args.port)
  except OSError as error:
    return _fail(
      f'cannot serve on {args.host}:{args.port}: {error.strerror}. Stop what '
      'holds the port, or choose another (--port=0 takes a free one).'
    )
  port = sock.getsockname()[1]
  if args.host not in LOOPBACK and token is None:
    say(
      f'WARNING: bound to {args.host} without a token: everyone who reaches '
      'this machine can read the whole corpus and use its CPU. Use '
      '--host=127.0.0.1, --token_file, or a firewall.'
    )
  try:
    searcher, local, programs = open_searcher(args)
  except (ValueError, OSError, RuntimeError) as error:
    return _fail(str(error))
  limits = Limits(
    **{f.name: args[f.name].value for f in dataclasses.fields(Limits)}
  )
  app = create_app(
    searcher,
    limits,
    local=local,
    programs=programs,
    token=token,
    hosts=_NAMES + args.allow_host if args.host in LOOPBACK else None,
  )
  return _serve(app, sock, args, port, tls)


def _tls(cert: str, key: str | None) -> ssl.SSLContext:
  context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
  try:
    context.load_cert_chain(cert, key)
  except OSError as error:
    raise ValueError(
      f'--tls_cert={cert} --tls_key={key}: not a certificate chain and its '
      f'key in PEM: {error}'
    ) from None
  return context


def _serve(
  app: fastapi.FastAPI,
  sock: socket.socket,
  args,
  port: int,
  tls: ssl.SSLContext | None,
) -> int:
  try:
    sock.listen(2048)
  except OSError as error:  # taken between bind and now
    return _fail(f'cannot serve on {args.host}:{port}: {error.strerror}.')
  host = f'[{args.host}]' if ':' in args.host else args.host
  config = uvicorn.Config(
    app,
    log_level='warning',
    access_log=False,
    # Longer than clients keep idle connections: else they meet ours closing.
    timeout_keep_alive=75,
    timeout_graceful_shutdown=int(_STOP_S),
    http=functools.partial(_Protocol, head_s=args.head_s),
    ssl_context_factory=(lambda *_: tls) if tls else None,
  )
  scheme = 'https' if tls else 'http'
  server = _Server(config, f'{scheme}://{host}:{port}', args.port_file)

  # uvicorn raises a caught signal again after its graceful stop; the stop was
  # asked for, so the process then ends with 0.
  def stop(*_: object) -> None:
    server.should_exit = True

  signal.signal(signal.SIGTERM, stop)
  signal.signal(signal.SIGINT, stop)
  server.run(sockets=[sock])
  if server.problem:
    return _fail(server.problem)
  say('stopped')
  return 0


if __name__ == '__main__':
  define_flags()
  absl_app.run(main)
