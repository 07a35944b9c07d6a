"""Fetching pages that strangers name: what must not be reached, is not."""

import asyncio
import contextlib
import gzip
import ipaddress
import shutil
import socket
import ssl
import subprocess
import threading
import zlib

import hypothesis
from hypothesis import strategies as st
import pytest

from retrieval.web import fetch as fetch_lib
from retrieval.web.fetch import Fetcher, FetchFailed, is_public, read_body

pytestmark = pytest.mark.slow

HOME = ['127.0.0.0/8']  # what tests allow


class Site:
  """A server of raw bytes on one loopback address.

  `answers` maps a path to bytes, or to a function that writes to the socket.
  """

  def __init__(self, answers=None, host='127.0.0.1', port=0, context=None):
    self.answers, self.requests = answers or {}, []
    self._context, self.hellos = context, []
    self._end = threading.Event()
    family = socket.AF_INET6 if ':' in host else socket.AF_INET
    self._socket = socket.create_server((host, port), family=family)
    self.port = self._socket.getsockname()[1]
    self.url = f'http://{host}:{self.port}'
    self._thread = threading.Thread(target=self._accept)

  def __enter__(self):
    self._thread.start()
    return self

  def __exit__(self, *_):
    self._end.set()
    self._socket.shutdown(socket.SHUT_RDWR)
    self._socket.close()
    self._thread.join(5)

  def _accept(self):
    while not self._end.is_set():
      try:
        connection, _ = self._socket.accept()
      except OSError:
        return
      threading.Thread(
        target=self._serve, args=(connection,), daemon=True
      ).start()

  def _serve(self, connection):
    connection.settimeout(10)
    try:
      if self._context is not None:
        connection = self._context.wrap_socket(connection, server_side=True)
      request = b''
      while b'\r\n\r\n' not in request:
        piece = connection.recv(65536)
        if not piece:
          return
        request += piece
      self.requests.append(request)
      path = request.split(b' ')[1].decode()
      answer = self.answers.get(path, reply(b'lost', status='404 Not Found'))
      if callable(answer):
        answer(connection, self._end)
      else:
        connection.sendall(answer)
    except OSError:
      pass  # the client had enough
    finally:
      connection.close()


def reply(body, status='200 OK', kind='text/html; charset=utf-8', **headers):
  headers = {'Content-Type': kind, 'Content-Length': len(body)} | {
    name.replace('_', '-'): value for name, value in headers.items()
  }
  lines = [
    f'{name}: {value}' for name, value in headers.items() if value is not None
  ]
  return (
    '\r\n'.join([f'HTTP/1.1 {status}', *lines]).encode() + b'\r\n\r\n' + body
  )


def redirect(url, status='302 Found'):
  return reply(b'', status, Location=url)


def fetch(url, *, allow=HOME, ports=None, **options):
  if ports is None:
    ports = (80, 443, *range(1024, 65536))
  fetcher = Fetcher(allow=allow, ports=ports, **options)
  return asyncio.run(fetcher.fetch(url))


def failure(url, **options):
  with pytest.raises(FetchFailed) as error:
    fetch(url, **options)
  return error.value


def names(**table):
  """A resolver over a table: name -> lists of addresses, one for each call."""
  asked = []

  async def resolve(host, port):
    answers = table[host.replace('.', '_')]
    asked.append(host)
    return answers[min(asked.count(host), len(answers)) - 1]

  resolve.asked = asked
  return resolve


# What an address is.

PRIVATE = """
0.0.0.0 0.1.2.3 10.0.0.1 10.255.255.255 100.64.0.1 100.100.100.200
100.127.255.255 127.0.0.1 127.255.255.254 169.254.169.254 169.254.170.2
172.16.0.1 172.31.255.255 192.0.0.1 192.0.0.192 192.0.2.1 192.88.99.1
192.168.0.1 198.18.0.1 198.19.255.255 198.51.100.1 203.0.113.1 224.0.0.1
224.0.1.1 239.255.255.255 240.0.0.1 255.255.255.255 168.63.129.16
:: ::1 ::2 ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:a9fe:a9fe ::127.0.0.1
::8.8.8.8 64:ff9b::127.0.0.1 64:ff9b::a9fe:a9fe 64:ff9b::10.0.0.1
64:ff9b:1::8.8.8.8 100::1 2001::1 2001:0:808:808::1 2001:2::1 2001:10::1
2001:20::1 2001:db8::1 2002:7f00:1:: 2002:a9fe:a9fe::1 2002:808:808::1
3fff::1 5f00::1 fc00::1 fd00:ec2::254 fd20:ce::254 fe80::1 fe80::1%lo
fec0::1 ff02::1 ff0e::1
""".split()
PUBLIC = """
1.1.1.1 8.8.8.8 9.255.255.255 11.0.0.0 100.63.255.255 100.128.0.0
126.255.255.255 128.0.0.0 169.253.255.255 172.15.255.255 172.32.0.0
192.0.1.0 192.167.255.255 198.17.255.255 198.20.0.0 223.255.255.255
::ffff:8.8.8.8 64:ff9b::8.8.8.8 2001:4860:4860::8888 2606:4700::1111
2a00:1450:4001::1
""".split()


@pytest.mark.parametrize('address', PRIVATE)
def test_private_addresses(address):
  assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize('address', PUBLIC)
def test_public_addresses(address):
  assert is_public(ipaddress.ip_address(address))


@hypothesis.given(st.ip_addresses())
def test_nothing_is_public_that_python_holds_for_local(address):
  if is_public(address):
    inner = getattr(address, 'ipv4_mapped', None)
    if address.version == 6 and address in ipaddress.ip_network('64:ff9b::/96'):
      inner = ipaddress.ip_address(int(address) % 2**32)
    address = inner or address
    assert not (
      address.is_private
      or address.is_loopback
      or address.is_multicast
      or address.is_link_local
      or address.is_reserved
      or address.is_unspecified
    )


@hypothesis.given(st.ip_addresses(v=4))
def test_an_embedded_address_is_judged_as_itself(address):
  for prefix in ('::ffff:', '64:ff9b::'):
    assert is_public(ipaddress.ip_address(f'{prefix}{address}')) == (
      is_public(address)
    )
  assert not is_public(
    ipaddress.IPv6Address((0x2002 << 112) | int(address) << 80)
  )


def test_what_is_allowed_is_allowed_and_no_more():
  allow = [ipaddress.ip_network('127.0.0.2/32')]
  for address, allowed in [
    ('127.0.0.2', True),
    ('::ffff:127.0.0.2', True),
    ('127.0.0.1', False),
    ('::1', False),
  ]:
    assert is_public(ipaddress.ip_address(address), allow) == allowed


# Pages.


def test_a_page_comes_back_decoded():
  with Site({'/ü?q=1'.encode().decode(): b''}) as site:
    site.answers['/%C3%BC?q=1'] = reply('<p>Café'.encode())
    page = fetch(site.url + '/ü?q=1#part')
  assert (page.media_type, page.text) == ('text/html', '<p>Café')
  assert page.url.startswith(site.url)
  (request,) = site.requests
  head = request.decode().lower()
  assert f'host: 127.0.0.1:{site.port}\r\n' in head
  assert 'cookie' not in head and 'authorization' not in head


@pytest.mark.parametrize(
  'body, kind, text',
  [
    ('ä'.encode('latin-1'), 'text/html; charset=ISO-8859-1', 'ä'),
    (b'\x93x\x94', 'text/html;charset="iso-8859-1"', '“x”'),
    ('字'.encode('gbk'), 'text/plain; charset=GBK', '字'),
    (
      b'<meta charset="windows-1251"><p>\xc4',
      'text/html',
      '<meta charset="windows-1251"><p>Д',
    ),
    (b'\xef\xbb\xbfx', 'text/plain', 'x'),
    (b'\xff\xfe', 'TEXT/HTML', '\ufffd\ufffd'),
    (b'caf\xc3\xa9', 'text/html; charset=punycode', 'café'),
    (b'\\x41', 'text/html; charset=unicode_escape', '\\x41'),
    (b'x\x9c', 'text/html; charset=zlib', 'x\ufffd'),
    (b'+AGE-', 'text/html; charset=utf-7', '+AGE-'),
    (b'x', 'text/html; charset=', 'x'),
  ],
)
def test_charsets(body, kind, text):
  with Site({'/': reply(body, kind=kind)}) as site:
    assert fetch(site.url + '/').text == text


@pytest.mark.parametrize('encoding', ['gzip', 'x-gzip', 'GZIP'])
def test_gzip(encoding):
  body = gzip.compress(b'<p>packed' * 1000)
  with Site({'/': reply(body, Content_Encoding=encoding)}) as site:
    assert fetch(site.url + '/').text == '<p>packed' * 1000


def test_a_body_that_ends_with_the_connection():
  with Site({'/': reply(b'<p>x', Content_Length=None)}) as site:
    assert fetch(site.url + '/').text == '<p>x'


# What is refused before anything is sent.


@pytest.mark.parametrize(
  'url',
  [
    '',
    'x',
    '//h/',
    'ftp://h/',
    'file:///etc/passwd',
    'gopher://h/',
    'javascript:alert(1)',
    'data:text/html,x',
    'http://',
    'http:///x',
    'unix:///run/docker.sock',
    'http://h:99999/',
    'http://h:x/',
    'http://u:p@h/',
    'http://u@h/',
    'https://169.254.169.254\\@h/',
    'http://h\r\nX: y/',
    'http://\x00/',
    'http://[::1/',
    'http://\udcff/',
    'http://h/' + 'a' * 70000,
  ],
)
def test_what_is_no_url_of_a_page_is_refused(url):
  async def resolve(host, port):
    raise AssertionError('resolved')

  error = failure(url, resolve=resolve)
  assert error.kind == 'refused'
  assert '\r' not in str(error) and len(str(error)) < 600


@pytest.mark.parametrize('port', [0, 22, 6379, 8080])
def test_other_ports_are_refused(port):
  error = failure(f'http://1.1.1.1:{port}/', ports=(80, 443))
  assert error.kind == 'refused' and f'port {port}' in str(error)


# Ways to write 127.0.0.1, ::1 and 169.254.169.254.
INSIDE = (
  '127.0.0.1',
  '127.1',
  '127.0.1',
  '2130706433',
  '0x7f000001',
  '0x7f.1',
  '0177.0.0.1',
  '017700000001',
  '0177.1',
  '0',
  '0.0.0.0',
  '127.127.127.127',
  '[::1]',
  '[::]',
  '[0:0:0:0:0:0:0:1]',
  '[::ffff:127.0.0.1]',
  '[::ffff:7f00:1]',
  '[::127.0.0.1]',
  '[64:ff9b::7f00:1]',
  '[2002:7f00:1::]',
  '[fe80::1]',
  '[fe80::1%25lo]',
  '[fe80::1%lo]',
  '169.254.169.254',
  '2852039166',
  '0xa9fea9fe',
  '0251.0376.0251.0376',
  '[::ffff:a9fe:a9fe]',
  '[fd00:ec2::254]',
  '100.100.100.200',
  '10.0.0.1',
  '192.168.1.1',
  '172.16.0.1',
  '224.0.0.1',
  '255.255.255.255',
  '１２７.0.0.1',
  '127。0。0。1',
  '①②⑦.0.0.1',
  'localhost',
  'LOCALHOST',
  'localhost.',
  '127.0.0.1.',
)


@pytest.mark.parametrize('host', INSIDE)
def test_no_spelling_of_an_inner_address_is_reached(host):
  with Site({'/': reply(b'secret')}) as site:
    error = failure(f'http://{host}:{site.port}/', allow=(), timeout_s=5)
    assert site.requests == []
  assert error.kind in ('refused', 'unreachable')


@pytest.mark.parametrize('host', INSIDE)
def test_no_redirect_leads_inside(host):
  with Site({'/': reply(b'secret')}, host='127.0.0.1') as inner:
    target = f'http://{host}:{inner.port}/'
    with Site({'/': redirect(target)}, host='127.0.0.2') as outer:
      error = failure(outer.url + '/', allow=['127.0.0.2/32'], timeout_s=5)
      assert len(outer.requests) == 1
    assert inner.requests == []
  assert error.kind in ('refused', 'unreachable')


@pytest.mark.parametrize(
  'status',
  ['301 Moved', '302 Found', '303 See', '307 Temporary', '308 Permanent'],
)
def test_redirects_are_followed_and_checked(status):
  with Site({'/end': reply(b'end')}, host='127.0.0.3') as last:
    with Site(
      {
        '/': redirect('/middle', status),
        '/middle': redirect(last.url + '/end', status),
      },
      host='127.0.0.2',
    ) as first:
      allow = ['127.0.0.2/31']
      assert fetch(first.url + '/', allow=allow).url == last.url + '/end'
      error = failure(first.url + '/', allow=['127.0.0.2/32'])
  assert error.kind == 'refused' and '127.0.0.3' in str(error)
  assert len(last.requests) == 1


@pytest.mark.parametrize(
  'location',
  [
    'file:///etc/passwd',
    'ftp://127.0.0.2/',
    'gopher://127.0.0.2/',
    'http://u:p@127.0.0.2/',
    'http://127.0.0.2:22/',
    'http://[',
    'http:///',
    '//127.0.0.1:80/',
    'http://[::1]/',
    '\\\\127.0.0.1\\x',
  ],
)
def test_a_redirect_to_no_page_is_refused(location):
  with Site({'/': redirect(location)}, host='127.0.0.2') as site:
    error = failure(
      site.url + '/', allow=['127.0.0.2/32'], ports=(80, 443, site.port)
    )
    assert error.kind in ('refused', 'status')


def test_redirects_end():
  with Site({'/': redirect('/')}) as site:
    error = failure(site.url + '/', max_redirects=3)
    assert len(site.requests) == 4
  assert error.kind == 'refused' and '3 redirects' in str(error)


# Names.


@contextlib.contextmanager
def at_one_port(outer, inner):
  """Sites of 127.0.0.2 and 127.0.0.1, at a port that both of them have free."""
  for _ in range(20):
    with Site(outer, host='127.0.0.2') as first:
      try:
        second = Site(inner, host='127.0.0.1', port=first.port)
      except OSError:  # another test has it there
        continue
      with second:
        yield first, second
        return
  raise AssertionError('no port is free on both')


def test_a_name_is_resolved_once_and_its_address_pinned():
  """DNS rebinding: a second answer would lead inside; nobody asks for it."""
  answers = {'/': reply(b'outside')}, {'/': reply(b'inside')}
  with at_one_port(*answers) as (outer, inner):
    resolve = names(pinned_example=[['127.0.0.2'], ['127.0.0.1']])
    page = fetch(
      f'http://pinned.example:{outer.port}/',
      allow=['127.0.0.2/32'],
      resolve=resolve,
    )
    assert page.text == 'outside'
    assert resolve.asked == ['pinned.example']
    assert f'pinned.example:{outer.port}'.encode() in outer.requests[0]
    assert inner.requests == []


def test_a_redirect_to_the_same_name_is_checked_anew():
  answers = {'/': redirect('/again')}, {'/again': reply(b'inside')}
  with at_one_port(*answers) as (outer, inner):
    resolve = names(pinned_example=[['127.0.0.2'], ['127.0.0.1']])
    error = failure(
      f'http://pinned.example:{outer.port}/',
      allow=['127.0.0.2/32'],
      resolve=resolve,
    )
    assert error.kind == 'refused' and '127.0.0.1' in str(error)
    assert len(resolve.asked) == 2 and inner.requests == []


@pytest.mark.parametrize(
  'addresses',
  [
    ['127.0.0.2', '127.0.0.1'],
    ['127.0.0.2', '::1'],
    ['127.0.0.1'],
    ['127.0.0.2', '169.254.169.254'],
    ['127.0.0.2', 'fe80::1%lo'],
    ['127.0.0.2', 'nonsense'],
    [],
  ],
)
def test_one_private_address_is_enough_to_refuse_a_name(addresses):
  with Site({'/': reply(b'x')}, host='127.0.0.2') as site:
    error = failure(
      f'http://two.example:{site.port}/',
      allow=['127.0.0.2/32'],
      resolve=names(two_example=[addresses]),
    )
    assert site.requests == []
  assert error.kind in ('refused', 'unreachable')


def test_the_next_address_is_tried_where_one_is_dead():
  with Site({'/': reply(b'alive')}, host='127.0.0.3') as site:
    page = fetch(
      f'http://two.example:{site.port}/',
      resolve=names(two_example=[['127.0.0.2', '127.0.0.3']]),
    )
  assert page.text == 'alive'


@pytest.mark.parametrize(
  'error',
  [
    socket.gaierror(-2, 'Name or service not known'),
    UnicodeError('label too long'),
    OSError('resolver \x1b[31m down'),
  ],
)
def test_a_name_without_address_is_unreachable(error):
  async def resolve(host, port):
    raise error

  failed = failure('http://none.example/', resolve=resolve)
  assert failed.kind == 'unreachable' and 'none.example' in str(failed)
  assert '\x1b' not in str(failed)


def test_a_resolver_that_hangs_is_left():
  async def resolve(host, port):
    await asyncio.sleep(60)

  assert (
    failure('http://slow.example/', resolve=resolve, timeout_s=0.2).kind
    == 'timeout'
  )


def test_names_do_not_wait_for_other_threads():
  async def run():
    go, loop = threading.Event(), asyncio.get_running_loop()
    busy = [loop.run_in_executor(None, go.wait) for _ in range(64)]
    try:
      return await asyncio.wait_for(fetch_lib.resolve('localhost', 80), 60)
    finally:
      go.set()
      await asyncio.gather(*busy)

  assert '127.0.0.1' in asyncio.run(run())


def test_the_environment_names_no_proxy(monkeypatch):
  with Site() as proxy, Site({'/': reply(b'direct')}) as site:
    for name in ('http_proxy', 'HTTP_PROXY', 'all_proxy', 'ALL_PROXY'):
      monkeypatch.setenv(name, proxy.url)
    assert fetch(site.url + '/').text == 'direct'
    assert proxy.requests == []


def test_cookies_are_not_kept():
  with Site(
    {
      '/': reply(b'', '302 Found', Location='/next', Set_Cookie='a=b; Path=/'),
      '/next': reply(b'x'),
    }
  ) as site:
    fetcher = Fetcher(allow=HOME, ports=(site.port,))
    for _ in range(2):
      asyncio.run(fetcher.fetch(site.url + '/'))
    assert len(site.requests) == 4
    assert all(b'cookie' not in r.lower() for r in site.requests)


# TLS keeps the name while the address is pinned.


def certificate(folder, name):
  key, cert = folder / 'key.pem', folder / 'cert.pem'
  subprocess.run(
    [
      'openssl',
      'req',
      '-x509',
      '-newkey',
      'ec',
      '-pkeyopt',
      'ec_paramgen_curve:P-256',
      '-nodes',
      '-keyout',
      key,
      '-out',
      cert,
      '-days',
      '1',
      '-subj',
      f'/CN={name}',
      '-addext',
      f'subjectAltName=DNS:{name}',
    ],
    check=True,
    capture_output=True,
  )
  return cert, key


@pytest.mark.skipif(shutil.which('openssl') is None, reason='needs openssl')
def test_a_certificate_is_checked_against_the_name(tmp_path, monkeypatch):
  cert, key = certificate(tmp_path, 'pinned.example')
  context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
  context.load_cert_chain(cert, key)
  asked = []
  context.sni_callback = lambda _, name, __: asked.append(name)
  resolve = names(pinned_example=[['127.0.0.2']], other_example=[['127.0.0.2']])
  with Site({'/': reply(b'safe')}, '127.0.0.2', context=context) as site:
    url = f'https://pinned.example:{site.port}/'
    error = failure(url, resolve=resolve)  # nobody vouches for it
    assert error.kind == 'unreachable' and 'CERTIFICATE' in str(error).upper()
    monkeypatch.setenv('SSL_CERT_FILE', str(cert))
    assert fetch(url, resolve=resolve).text == 'safe'
    error = failure(f'https://other.example:{site.port}/', resolve=resolve)
    assert error.kind == 'unreachable'
  assert asked == ['pinned.example', 'pinned.example', 'other.example']
  assert len(site.requests) == 1


# Bodies and heads that mean harm.


def test_more_bytes_than_allowed():
  with Site({'/': reply(b'x' * 100), '/long': reply(b'x' * 101)}) as site:
    assert len(fetch(site.url + '/', max_bytes=100).text) == 100
    error = failure(site.url + '/long', max_bytes=100)
  assert error.kind == 'too_large' and '100 bytes' in str(error)


def test_a_body_without_end_is_left():
  def pour(connection, end):
    connection.sendall(reply(b'', Content_Length=None))
    while not end.is_set():
      connection.sendall(b'x' * 65536)

  with Site({'/': pour}) as site:
    assert failure(site.url + '/').kind == 'too_large'


def test_a_gzip_bomb_is_not_unpacked():
  packer = zlib.compressobj(9, wbits=31)
  bomb = b''.join(packer.compress(bytes(1 << 20)) for _ in range(64))
  bomb += packer.flush()
  assert len(bomb) < 100_000
  with Site({'/': reply(bomb, Content_Encoding='gzip')}) as site:
    assert failure(site.url + '/').kind == 'too_large'


def test_unpacking_never_holds_more_than_the_bound(monkeypatch):
  largest = []

  class Unpacker:
    def __init__(self, inner):
      self.inner, self.eof = inner, False

    def decompress(self, data, most):
      out = self.inner.decompress(data, most)
      largest.append(len(out))
      return out

  real = zlib.decompressobj
  monkeypatch.setattr(zlib, 'decompressobj', lambda *a: Unpacker(real(*a)))

  async def chunks():
    yield gzip.compress(bytes(1 << 24))

  with pytest.raises(FetchFailed, match='1000 bytes'):
    asyncio.run(read_body(chunks(), 'gzip', 1000))
  assert largest == [1001]


@pytest.mark.parametrize(
  'body, encoding, words',
  [
    # Not the time: workers that collect a second apart must find one name.
    (gzip.compress(b'x' * 999, mtime=0)[:-9], 'gzip', 'cut short'),
    (b'no gzip at all', 'gzip', 'damaged'),
    (
      gzip.compress(gzip.compress(b'x', mtime=0), mtime=0),
      'gzip, gzip',
      'encoding',
    ),
    (b'x', 'br', 'encoding'),
    (b'x', 'zstd', 'encoding'),
  ],
)
def test_an_encoding_that_is_not_as_said(body, encoding, words):
  with Site({'/': reply(body, Content_Encoding=encoding)}) as site:
    error = failure(site.url + '/')
  assert error.kind == 'broken' and words in str(error)


@pytest.mark.parametrize('part', ['head', 'body'])
def test_a_drip_without_end_is_left(part):
  def drip(connection, end):
    connection.sendall(
      b'HTTP/1.1 200 OK\r\nX-A: '
      if part == 'head'
      else reply(b'', Content_Length=10**6)
    )
    while not end.wait(0.02):
      connection.sendall(b'x')

  with Site({'/': drip}) as site:
    error = failure(site.url + '/', timeout_s=0.5)
  assert error.kind == 'timeout' and '0.5 s' in str(error)


def test_the_time_is_for_all_redirects_together():
  def slow(connection, end):
    end.wait(0.2)
    connection.sendall(redirect('/'))

  with Site({'/': slow}) as site:
    error = failure(site.url + '/', timeout_s=0.5, max_redirects=10**6)
    assert len(site.requests) <= 4
  assert error.kind == 'timeout'


@pytest.mark.parametrize(
  'answer',
  [
    b'HTTP/1.1 200 OK\r\nX: ' + b'x' * 300_000 + b'\r\n\r\n',
    b'HTTP/1.1 200 OK\r\n' + b'X: y\r\n' * 60_000 + b'\r\n',
    b'SSH-2.0-OpenSSH_9.2\r\n',
    b'\x00\xff' * 50,
    b'',
    b'HTTP/1.1 200 OK\r\n',
    b'HTTP/1.1 \x1b[31m\r\n\r\n',
    reply(b'short', Content_Length=99),
    reply(b'x', Content_Length='-1'),
    reply(b'x', Content_Length='1, 2'),
    b'HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n'
    b'Transfer-Encoding: chunked\r\n\r\nZZ\r\n',
  ],
)
def test_what_is_no_answer_is_an_error(answer):
  with Site({'/': answer}) as site:
    error = failure(site.url + '/')
  assert error.kind in ('broken', 'unreachable')
  assert '\x1b' not in str(error) and len(str(error)) < 600


@pytest.mark.parametrize(
  'kind',
  [
    'application/pdf',
    'image/png',
    'application/octet-stream',
    None,
    '',
    'text/html, application/pdf',
    'text/htmlx',
    'application/json',
  ],
)
def test_other_media_types_are_refused(kind):
  with Site({'/': reply(b'x', Content_Type=kind)}) as site:
    assert failure(site.url + '/').kind == 'media_type'


@pytest.mark.parametrize(
  'status, kind',
  [
    ('204 No Content', 'status'),
    ('304 Not Modified', 'status'),
    ('401 Unauthorized', 'status'),
    ('404 Not Found', 'status'),
    ('302 Found', 'status'),
    ('429 Too Many Requests', 'busy'),
    ('500 Error', 'busy'),
    ('503 Service Unavailable', 'busy'),
  ],
)
def test_other_statuses_are_errors(status, kind):
  with Site({'/': reply(b'', status)}) as site:
    error = failure(site.url + '/')
  assert error.kind == kind and status[:3] in str(error)


def test_nobody_there():
  with socket.create_server(('127.0.0.1', 0)) as free:
    port = free.getsockname()[1]
  error = failure(f'http://127.0.0.1:{port}/')
  assert error.kind == 'unreachable' and f'127.0.0.1:{port}' in str(error)


def test_allow_must_be_networks():
  with pytest.raises(ValueError):
    Fetcher(allow=['localhost'])
