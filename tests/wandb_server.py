"""What `wandb sync` needs of a W&B server, for tests.

It answers three GraphQL operations and takes files; `Server.history` has the
rows of the runs' metrics that the client sent.
"""

from collections.abc import Iterator
import contextlib
import gzip
import http.server
import json
import threading


class Server(http.server.ThreadingHTTPServer):
  def __init__(self):
    super().__init__(('127.0.0.1', 0), Handler)
    self.url = f'http://127.0.0.1:{self.server_port}'
    self.history: list[dict] = []
    self.files: set[str] = set()
    self.complete = False

  def handle_error(self, request, client_address):
    """The client drops idle connections when it ends."""


class Handler(http.server.BaseHTTPRequestHandler):
  server: Server
  protocol_version = 'HTTP/1.1'

  def log_message(self, *args):
    pass

  def _answer(self):
    body = self.rfile.read(int(self.headers.get('content-length') or 0))
    if self.headers.get('content-encoding') == 'gzip':
      body = gzip.decompress(body)
    reply = {}
    if self.path == '/graphql':
      asked = json.loads(body)
      name, given = asked['operationName'], asked['variables']
      make = {'UpsertBucket': self._bucket, 'CreateRunFiles': self._files}
      reply = {'data': make[name](given) if name in make else {}}
    elif self.path.endswith('/file_stream'):
      sent = json.loads(body)
      rows = sent.get('files', {}).get('wandb-history.jsonl', {})
      self.server.history += map(json.loads, rows.get('content', ()))
      self.server.complete |= sent.get('complete', False)
    else:
      self.server.files.add(self.path.removeprefix('/upload/'))
    out = json.dumps(reply).encode()
    self.send_response(200)
    self.send_header('content-type', 'application/json')
    self.send_header('content-length', str(len(out)))
    self.end_headers()
    self.wfile.write(out)

  do_GET = do_POST = do_PUT = _answer

  def _bucket(self, given):
    project = {'id': 'p', 'name': given['project'], 'entity': {'name': 'e'}}
    run = {'id': 'r', 'name': given['name'], 'project': project}
    run |= {'displayName': given['displayName'], 'config': '{}'}
    run |= {'historyLineCount': 0, 'sweepName': None}
    return {'upsertBucket': {'bucket': run, 'inserted': True}}

  def _files(self, given):
    files = [
      {'name': name, 'uploadUrl': f'{self.server.url}/upload/{name}'}
      for name in given['files']
    ]
    return {'createRunFiles': {'uploadHeaders': [], 'files': files}}


@contextlib.contextmanager
def serve() -> Iterator[Server]:
  with Server() as server:
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
      yield server
    finally:
      server.shutdown()
      thread.join()
