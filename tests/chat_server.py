"""An OpenAI-compatible server of scripted replies, for tests."""

from collections.abc import Callable, Iterator
import contextlib
import http.server
import json
import threading


class Chats:
  """What it was asked, and what it says.

  script: the request's body -> the reply's text; an int is a status instead,
  a pair one with its message, bytes are a whole body, None hangs up, an event
  sends a byte now and then until it is set. models: names of those served, or a
  whole body.
  """

  def __init__(
    self, script: Callable[[dict], str | int | tuple | bytes | None]
  ):
    self.script = script
    self.asked: list[dict] = []
    self.tokens: list[str] = []
    self.models = ['judge']
    self.finish = 'stop'
    self.running = self.most = 0
    self.lock = threading.Lock()
    self.url = ''


@contextlib.contextmanager
def serve(script) -> Iterator[Chats]:
  chats = Chats(script)

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
      if isinstance(chats.models, bytes):
        self._send(200, chats.models)
        return
      names = [{'id': m, 'object': 'model'} for m in chats.models]
      self._send(200, {'object': 'list', 'data': names})

    def do_POST(self):
      body = json.loads(self.rfile.read(int(self.headers['content-length'])))
      with chats.lock:
        chats.asked.append(body)
        chats.tokens.append(self.headers.get('authorization', ''))
        chats.running += 1
        chats.most = max(chats.most, chats.running)
      said = chats.script(body)
      with chats.lock:
        chats.running -= 1
      if said is None:
        self.close_connection = True
      elif isinstance(said, threading.Event):
        self.send_response(200)
        self.send_header('content-length', '1000')
        self.end_headers()
        with contextlib.suppress(OSError):
          while not said.wait(0.1):
            self.wfile.write(b' ')
      elif isinstance(said, int):
        self._send(said, {'error': {'message': f'status {said}'}})
      elif isinstance(said, tuple):
        self._send(said[0], {'error': {'message': said[1]}})
      elif isinstance(said, bytes):
        self._send(200, said)
      else:
        self._send(
          200,
          {
            'id': 'x',
            'object': 'chat.completion',
            'created': 0,
            'model': body['model'],
            'choices': [
              {
                'index': 0,
                'finish_reason': chats.finish,
                'message': {'role': 'assistant', 'content': said},
              }
            ],
          },
        )

    def _send(self, status, body):
      data = body if isinstance(body, bytes) else json.dumps(body).encode()
      self.send_response(status)
      self.send_header('content-type', 'application/json')
      self.send_header('content-length', str(len(data)))
      self.end_headers()
      # Who asked may have gone: a timeout is one of the cases.
      with contextlib.suppress(OSError):
        self.wfile.write(data)

    def log_message(self, *_):
      pass

  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
  server.daemon_threads = True
  thread = threading.Thread(target=server.serve_forever, daemon=True)
  thread.start()
  chats.url = f'http://127.0.0.1:{server.server_port}'
  try:
    yield chats
  finally:
    server.shutdown()
    thread.join()
    server.server_close()
