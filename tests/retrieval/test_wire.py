"""What happens below the application: heads cut short, refusals, TLS."""

import pathlib
import re
import shutil
import socket
import ssl
import subprocess
import time

import httpx
import pytest

from retrieval.client import RetrievalClient, RetrievalError, retrieve_sync
from retrieval.process import start_server
from tests import here

pytestmark = pytest.mark.slow

GET = b'GET /health HTTP/1.1\r\nHost: localhost\r\n'
POST = b'POST /retrieve HTTP/1.1\r\nHost: localhost\r\n'


def connect(server):
  host, _, port = server.url.rpartition('/')[2].rpartition(':')
  return socket.create_connection((host, int(port)), 20)


def read(connection, until=None):
  """What comes, up to `until` or to the end; fails if neither comes."""
  data = b''
  while not (until and until in data) and (part := connection.recv(65536)):
    data += part
  return data


@pytest.fixture(scope='module')
def quick(corpus_path, tmp_path_factory):
  """A server with a token, and little patience with heads."""
  folder = tmp_path_factory.mktemp('quick')
  (folder / 'token').write_text('s3cret')
  with start_server(
    corpus_path,
    log_path=folder / 'log',
    head_s=0.5,
    token_file=folder / 'token',
  ) as server:
    yield server
  assert 'Traceback' not in (folder / 'log').read_text()


@pytest.mark.parametrize('head', [b'', b'P', GET, POST + b'Content-Le'])
def test_a_head_that_does_not_end_is_cut_off(quick, head):
  with connect(quick) as connection:
    connection.sendall(head)
    assert read(connection) == b''


def test_a_second_head_that_does_not_end_is_cut_off(quick):
  with connect(quick) as connection:
    connection.sendall(GET + b'\r\n')
    assert b'"status":"ok"' in read(connection, until=b'}')
    connection.sendall(GET)
    assert read(connection) == b''


def test_a_head_that_comes_byte_by_byte_is_cut_off(quick):
  with connect(quick) as connection:
    connection.settimeout(0.05)
    for byte in GET + b'X: ' + b'y' * 1000:
      try:
        connection.sendall(bytes([byte]))
        if not connection.recv(1):
          return
      except TimeoutError:  # nothing to read yet
        continue
      except OSError:  # reset: it has gone
        return
    raise AssertionError('50 s of single bytes were taken')


def test_a_connection_is_kept_between_requests(quick):
  with httpx.Client() as client:
    assert client.get(f'{quick.url}/health').status_code == 200
    time.sleep(1)  # longer than a head may take
    (connection,) = client._transport._pool.connections
    assert client.get(f'{quick.url}/health').status_code == 200
    assert client._transport._pool.connections == [connection]


@pytest.mark.long
@pytest.mark.parametrize(
  'more',
  [
    b'Content-Length: 30000000\r\n',
    b'Transfer-Encoding: chunked\r\n',
    b'Content-Length: 30000000\r\nExpect: 100-continue\r\n',
  ],
)
def test_who_has_no_token_is_refused_at_the_head(quick, more):
  with connect(quick) as connection:
    connection.sendall(POST + more + b'\r\n')  # and no byte of the body
    answer = read(connection, until=b'TOKEN')
    assert answer.startswith(b'HTTP/1.1 401') and b'Bearer' in answer
    assert b'connection: close' in answer.lower()
    assert read(connection).strip(b'"}') == b''  # and then it is closed


def test_a_client_amid_a_large_body_is_told_that_its_token_is_wrong(quick):
  with pytest.raises(RetrievalError) as error:
    retrieve_sync(quick.url, ['x' * 10_000] * 1000, 1, token='wrong', retries=0)
  assert error.value.kind == 'unauthorised'


def test_a_broken_body_of_who_has_no_token(quick):
  head = POST + b'Transfer-Encoding: chunked\r\n\r\n'
  for parts in ([head + b'zz\r\n'], [head, b'zz\r\n']):
    with connect(quick) as connection:
      for part in parts:
        connection.sendall(part)
        time.sleep(0.1)
      assert read(connection)[:12] in (b'HTTP/1.1 400', b'HTTP/1.1 401')


@pytest.fixture(scope='module')
def certificate(tmp_path_factory):
  """A self-signed certificate for 127.0.0.1, and its key."""
  if not shutil.which('openssl'):
    pytest.skip('needs openssl')
  folder = tmp_path_factory.mktemp('tls')
  cert, key = folder / 'cert.pem', folder / 'key.pem'
  subprocess.run(
    [
      'openssl',
      'req',
      '-x509',
      '-newkey',
      'ec',
      '-pkeyopt',
      'ec_paramgen_curve:prime256v1',
      '-nodes',
      '-keyout',
      key,
      '-out',
      cert,
      '-days',
      '2',
      '-subj',
      '/CN=127.0.0.1',
      '-addext',
      'subjectAltName=IP:127.0.0.1',
    ],
    check=True,
    capture_output=True,
  )
  return cert, key


def test_tls(corpus_path, tmp_path, certificate, monkeypatch):
  cert, key = certificate
  log = tmp_path / 'log'
  monkeypatch.delenv('RETRIEVAL_CA_FILE', raising=False)
  with start_server(
    corpus_path, log_path=log, tls_cert=cert, tls_key=key
  ) as server:
    assert server.url.startswith('https://')
    assert retrieve_sync(server.url, ['hamlet'], 1, ca_file=cert)[0]
    with pytest.raises(RetrievalError, match='RETRIEVAL_CA_FILE') as error:
      retrieve_sync(server.url, ['hamlet'], 1, retries=0)
    assert 'CERTIFICATE_VERIFY_FAILED' in str(error.value)
    monkeypatch.setenv('RETRIEVAL_CA_FILE', str(cert))
    assert retrieve_sync(server.url, ['hamlet'], 1)[0]
    context = ssl.create_default_context(cafile=cert)
    answer = httpx.get(f'{server.url}/health', verify=context)
    assert answer.status_code == 200
    with pytest.raises(httpx.TransportError):  # no answer without TLS
      httpx.get(f'{server.url}/health'.replace('https', 'http'))
  assert f'ready at {server.url}' in pathlib.Path(log).read_text()


def test_certificates_that_are_none(corpus_path, tmp_path, certificate):
  _, key = certificate
  options = f'--corpus={corpus_path}', f'--tls_cert={key}'
  done = here.run('retrieval.server', *options)
  assert done.returncode == 1
  assert re.search('--tls_cert=.*PEM', done.stderr)
  with pytest.raises(ValueError, match='ca_file=.*absent'):
    RetrievalClient('https://x', ca_file=str(tmp_path / 'absent'))


def test_a_host_is_allowed_by_a_flag(server):
  def get(host):
    return httpx.get(f'{server.url}/health', headers={'Host': host})

  for host in ('gpu01:8000', 'GPU01', 'LOCALHOST:8000', 'localhost'):
    assert get(host).status_code == 200
  refused = get('gpu02:8000')
  assert refused.status_code == 403
  assert "'gpu02:8000'" in refused.json()['detail']
  assert '--allow_host=NAME' in refused.json()['detail']


@pytest.mark.parametrize(
  'target, host, status',
  [
    ('HTTP://LocalHost:8000/health', 'x.example', 200),  # the target's counts
    ('http://x.example/health', 'localhost', 403),
    ('http://localhost@x.example/health', 'localhost', 403),
    ('http://localhost', 'localhost', 404),
    ('http://[localhost/health', 'localhost', 404),
  ],
)
def test_a_whole_url_may_be_the_target(server, target, host, status):
  with connect(server) as connection:
    head = f'GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close'
    connection.sendall(f'{head}\r\n\r\n'.encode())
    assert read(connection).startswith(f'HTTP/1.1 {status}'.encode())
