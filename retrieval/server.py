"""Retrieval server: BM25 over a corpus, Search-R1's protocol.

Start it:

  python -m retrieval.server --corpus=corpus.jsonl.gz --port=8000

Ask it:

  curl -s 127.0.0.1:8000/retrieve -H 'content-type: application/json' \\
    -d '{"queries": ["who wrote hamlet"], "topk": 3, "return_scores": true}'

retrieval/README.md describes the protocol and the limits.
"""

import dataclasses
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence

import fastapi
import uvicorn
from absl import app as absl_app
from absl import flags

from retrieval.app import Limits, create_app
from retrieval.bm25 import STEMMERS, STOP_WORDS, BM25Index
from retrieval.corpus import CorpusError, read_corpus

LOOPBACK = ('127.0.0.1', 'localhost', '::1')
_STOP_S = 10.0  # what a stop grants to requests already taken


class _Server(uvicorn.Server):
  """uvicorn, with a file that says when and where it serves."""

  def __init__(self, config: uvicorn.Config, url: str, port_file: str | None):
    super().__init__(config)
    self._url, self._port_file = url, port_file

  async def startup(self, sockets: list[socket.socket] | None = None) -> None:
    await super().startup(sockets)
    if self.started:
      if self._port_file:
        _write_atomically(self._port_file, self._url.rpartition(':')[2])
      _say(f'ready at {self._url}')


def _write_atomically(path: str, text: str) -> None:
  part = f'{path}.{os.getpid()}.part'
  with open(part, 'w') as f:
    f.write(text + '\n')
  os.replace(part, path)


def _say(message: str) -> None:
  print(f'retrieval.server: {message}', file=sys.stderr, flush=True)


def _fail(message: str) -> int:
  _say(f'error: {message}')
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
  try:
    descriptor = os.pidfd_open(pid)  # Linux: no confusion by a reused pid

    def wait() -> None:
      poll = select.poll()
      poll.register(descriptor, select.POLLIN)
      poll.poll()

  except (AttributeError, PermissionError, NotImplementedError):
    os.kill(pid, 0)
    child = os.getppid() == pid

    def wait() -> None:
      while True:
        try:
          os.kill(pid, 0)
        except ProcessLookupError:
          return
        if child and os.getppid() != pid:  # a zombie still takes signals
          return
        time.sleep(0.5)

  def run() -> None:
    wait()
    _say(f'process {pid} (--parent_pid) has ended: stopping')
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_STOP_S + 5)
    os._exit(1)

  threading.Thread(target=run, daemon=True).start()


def define_flags() -> None:
  """Defines the command's flags; not on import, since others import this."""
  limits = Limits()
  flags.DEFINE_string(
    'corpus', None, 'JSONL or JSONL.gz of {"id", "contents"}.', required=True
  )
  flags.DEFINE_string('host', '127.0.0.1', 'Address to serve on.')
  flags.DEFINE_integer(
    'port', 8000, 'Port to serve on; 0 takes a free one.', 0, 65535
  )
  flags.DEFINE_string(
    'port_file', None, 'File that gets the port once the server is ready.'
  )
  flags.DEFINE_integer(
    'parent_pid', None, 'Stop when this process ends (no orphans).', 1
  )
  flags.DEFINE_float('k1', 1.2, 'BM25: saturation of repeated words.', 0)
  flags.DEFINE_float('b', 0.75, 'BM25: discount of long passages.', 0, 1)
  flags.DEFINE_enum('stemmer', 'english', STEMMERS, 'Word stems.')
  flags.DEFINE_enum('stop_words', 'english', [*STOP_WORDS], 'Words left out.')
  for name, text in (
    ('topk', 'Passages for a query when a request names no topk.'),
    ('max_topk', 'Largest topk.'),
    ('max_queries', 'Most queries in one request, and in one batch.'),
    ('max_query_bytes', 'Longest query, in bytes of UTF-8.'),
    ('max_pending', 'Most queries waiting, before 503.'),
  ):
    flags.DEFINE_integer(name, getattr(limits, name), text, 1)
  flags.DEFINE_float(
    'batch_ms', limits.batch_ms, 'How long a request waits for others.', 0
  )


def main(argv: Sequence[str]) -> int:
  if len(argv) > 1:
    return _fail(f'arguments not understood: {" ".join(argv[1:])}')
  args = flags.FLAGS
  if args.topk > args.max_topk:
    return _fail(f'--topk={args.topk} exceeds --max_topk={args.max_topk}')
  if args.max_queries > args.max_pending:
    return _fail(
      f'--max_queries={args.max_queries} exceeds '
      f'--max_pending={args.max_pending}'
    )
  if args.parent_pid:
    try:
      watch_parent(args.parent_pid)
    except ProcessLookupError:
      return _fail(f'no process --parent_pid={args.parent_pid}')
  # The port first: reading a large corpus for nothing would waste minutes.
  try:
    sock = bind(args.host, args.port)
  except OSError as error:
    return _fail(
      f'cannot serve on {args.host}:{args.port}: {error.strerror}. Stop what '
      'holds the port, or choose another (--port=0 takes a free one).'
    )
  port = sock.getsockname()[1]
  if args.host not in LOOPBACK:
    _say(
      f'WARNING: bound to {args.host}: everyone who reaches this machine can '
      'read the whole corpus and use its CPU. There is no password. Use '
      '--host=127.0.0.1 or a firewall.'
    )
  try:
    corpus = read_corpus(args.corpus)
  except CorpusError as error:
    return _fail(str(error))
  begun = time.time()
  index = BM25Index(
    corpus.contents,
    k1=args.k1,
    b=args.b,
    stemmer=args.stemmer,
    stop_words=args.stop_words,
  )
  _say(
    f'{len(corpus)} passages of {args.corpus} indexed in '
    f'{time.time() - begun:.1f} s'
  )
  limits = Limits(
    **{f.name: args[f.name].value for f in dataclasses.fields(Limits)}
  )
  return _serve(create_app(corpus, index, limits), sock, args, port)


def _serve(app: fastapi.FastAPI, sock: socket.socket, args, port: int) -> int:
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
  )
  server = _Server(config, f'http://{host}:{port}', args.port_file)

  # uvicorn raises a caught signal again after its graceful stop; the stop was
  # asked for, so the process then ends with 0.
  def stop(*_: object) -> None:
    server.should_exit = True

  signal.signal(signal.SIGTERM, stop)
  signal.signal(signal.SIGINT, stop)
  try:
    server.run(sockets=[sock])
  except OSError as error:  # the port file cannot be written
    return _fail(str(error))
  _say('stopped')
  return 0


if __name__ == '__main__':
  define_flags()
  absl_app.run(main)
