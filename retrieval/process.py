"""Starts and stops a retrieval server in a separate process.

with start_server('corpus.jsonl.gz', log_path='server.log') as server:
  ... RetrievalClient(server.url) ...
"""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

_ROOT = pathlib.Path(__file__).resolve().parent.parent


class ServerError(RuntimeError):
  """The server did not start; the message ends with its last log lines."""


class ServerProcess:
  """A running server: `url`, `pid`, `stop()`; a context manager."""

  def __init__(self, process: subprocess.Popen, url: str, log_path: str):
    self.url, self.log_path = url, log_path
    self._process, self.pid = process, process.pid

  @property
  def running(self) -> bool:
    return self._process.poll() is None

  def stop(self, timeout_s: float = 15.0) -> int:
    """Stops the server gracefully, and kills it after `timeout_s` seconds.

    Returns:
      Its exit status: 0 after a graceful stop. It may be called again.
    """
    if self.running:
      self._process.send_signal(signal.SIGTERM)
      try:
        self._process.wait(timeout_s)
      except subprocess.TimeoutExpired:
        self._process.kill()
    return self._process.wait()

  def __enter__(self) -> 'ServerProcess':
    return self

  def __exit__(self, *_: object) -> None:
    self.stop()


def start_server(
  corpus: str | os.PathLike | None = None,
  *,
  port: int = 0,
  host: str = '127.0.0.1',
  log_path: str | os.PathLike,
  timeout_s: float = 300.0,
  **server_flags: object,
) -> ServerProcess:
  """Starts `python -m retrieval.server` and waits until it is warm.

  The server ends with this process (--parent_pid). It has a separate session,
  so that Ctrl-C reaches only the caller, which can then save and stop it.

  Args:
    corpus: .jsonl or .jsonl.gz; None: `server_flags` name the source.
    port: 0 takes a free one.
    host: address to serve on.
    log_path: file to append its output to.
    timeout_s: of reading and indexing, seconds.
    **server_flags: further flags of the server: k1=0.9, topk=5,
      index=['bm25', 'milvus'], ...

  Raises:
    ServerError: the server ended or was not ready in time.
  """
  log_path = os.path.abspath(log_path)
  os.makedirs(os.path.dirname(log_path), exist_ok=True)
  with tempfile.TemporaryDirectory(prefix='retrieval') as folder:
    port_file = os.path.join(folder, 'port')
    values = {'port': port, 'host': host, 'port_file': port_file}
    values |= {'parent_pid': os.getpid(), **server_flags}
    if corpus is not None:
      values['corpus'] = os.path.abspath(corpus)
    command = [sys.executable, '-m', 'retrieval.server', *_argv(values)]
    paths = [str(_ROOT), os.environ.get('PYTHONPATH')]
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, paths)))
    how = {'env': env, 'start_new_session': True, 'stdin': subprocess.DEVNULL}
    with open(log_path, 'ab') as log:
      begin = log.tell()
      process = subprocess.Popen(command, stdout=log, stderr=log, **how)
    try:
      bound = _wait(process, port_file, timeout_s, log_path, begin)
    except BaseException:  # such as Ctrl-C
      process.kill()
      process.wait()
      raise
  name = f'[{host}]' if ':' in host else host
  scheme = 'https' if server_flags.get('tls_cert') else 'http'
  return ServerProcess(process, f'{scheme}://{name}:{bound}', log_path)


def _argv(values: dict[str, object]) -> list[str]:
  out = []
  for name, value in values.items():
    if isinstance(value, bool):
      out.append(f'--{"" if value else "no"}{name}')
    elif value is not None:
      several = value if isinstance(value, (list, tuple)) else [value]
      out += [f'--{name}={one}' for one in several]
  return out


def _wait(process, port_file: str, timeout_s: float, log_path, begin) -> int:
  deadline = time.monotonic() + timeout_s
  while not os.path.exists(port_file):
    status = process.poll()
    if status is not None:
      problem = f'ended with status {status}'
    elif time.monotonic() > deadline:
      problem = (
        f'was not ready after {timeout_s:g} s (of a large corpus, build an '
        'index by retrieval.build_index, serve it by retrieval.server, and '
        'give its URL)'
      )
    else:
      time.sleep(0.02)
      continue
    text = pathlib.Path(log_path).read_bytes()[begin:][-2000:]
    text = text.decode('utf-8', 'replace').strip() or '(nothing)'
    said = f'{log_path} ends:\n{textwrap.indent(text, "  ")}'
    raise ServerError(f'the retrieval server {problem}; {said}')
  return int(pathlib.Path(port_file).read_text())
