"""Fetches pages from untrusted URLs, from public addresses only.

A search result, or a redirect, may name an address of this machine, of its
network or of the cloud's metadata service (server-side request forgery). So
the name is resolved once, all its addresses must be public, and the connection
goes to the address that was checked. The check is in the network backend, below
TLS and HTTP, which use the name for SNI, certificate and Host header. There is
no second resolution with another result (DNS rebinding), and redirects are
checked like the first request.

httpcore uses neither proxies nor cookies unless they are given.
"""

import asyncio
import codecs
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
import concurrent.futures
import contextlib
import dataclasses
import ipaddress
import re
import socket
import zlib

import httpcore
import httpx

from retrieval.files import convert, shown

TRANSIENT = ('unreachable', 'timeout', 'busy', 'broken')  # kinds
MEDIA_TYPES = ('text/html', 'text/plain')
_REDIRECTS = (301, 302, 303, 307, 308)
# IANA's special-purpose registries (RFC 6890 and later), and 168.63.129.16,
# Azure's host agent. ipaddress.is_global differs between versions of Python and
# includes multicast.
_SPECIAL = """
  0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12
  192.0.0.0/24 192.0.2.0/24 192.88.99.0/24 192.168.0.0/16 198.18.0.0/15
  198.51.100.0/24 203.0.113.0/24 224.0.0.0/4 240.0.0.0/4 168.63.129.16/32
  2001::/23 2001:db8::/32 2002::/16 3fff::/20"""
_REFUSED = tuple(map(ipaddress.ip_network, _SPECIAL.split()))
_GLOBAL_V6 = ipaddress.ip_network('2000::/3')  # all that IANA assigns
_NAT64 = ipaddress.ip_network('64:ff9b::/96')  # the last 32 bits are IPv4
# The charsets of the WHATWG standard that pages still use. Other codecs of
# Python take quadratic time or are not charsets.
_CHARSET = re.compile(
  r'utf-?8|utf-16(le|be)?|iso-8859-\d+|windows-125\d|koi8-[ru]|big5|gbk|'
  r'gb2312|gb18030|shift[_-]jis|euc-(jp|kr)|iso-2022-jp'
)
_META = re.compile(rb'<meta[^>]{0,200}charset=["\']?([\w-]{1,20})', re.I)

# Resolving a name may block for long, so it has its own threads: the few of
# asyncio serve the rest of the process.
_NAMES = concurrent.futures.ThreadPoolExecutor(64, 'names')

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class FetchFailed(Exception):
  """A page could not be fetched.

  Attributes:
    kind: one of `TRANSIENT`, or 'refused' (by the rules of this module for
      addresses, schemes, ports and redirects), 'status', 'media_type',
      'too_large'.
  """

  def __init__(self, kind: str, message: str):
    super().__init__(message)
    self.kind = kind


class _Refused(FetchFailed):
  def __init__(self, message: str):
    super().__init__('refused', message)


@dataclasses.dataclass(frozen=True)
class Page:
  """The page of a URL."""

  url: str  # after redirects
  media_type: str  # one of `MEDIA_TYPES`
  text: str  # decoded, markup and all


def is_public(address: Address, allow: Sequence[Network] = ()) -> bool:
  """Whether a fetch may connect to `address`.

  IPv4 within IPv6 (mapped, NAT64) is checked as IPv4; 6to4 and Teredo, which
  are obsolete, are never public.

  Args:
    address: any address, with its scope if it has one.
    allow: networks that always count as public, for tests and mirrors.
  """
  if address.version == 6:
    if address.ipv4_mapped is not None:
      address = address.ipv4_mapped
    elif address in _NAT64:
      address = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
  refused = any(address in network for network in _REFUSED)
  refused |= address.version == 6 and address not in _GLOBAL_V6
  return not refused or any(address in network for network in allow)


async def resolve(host: str, port: int) -> list[str]:
  """The addresses of a name in the system's order of preference."""
  found = await asyncio.get_running_loop().run_in_executor(
    _NAMES, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
  )
  return list(dict.fromkeys(entry[4][0] for entry in found))


class Fetcher:
  """Fetches pages; safe to share between tasks and event loops."""

  def __init__(
    self,
    *,
    timeout_s: float = 10.0,
    max_bytes: int = 2 << 20,
    max_redirects: int = 5,
    ports: Sequence[int] = (80, 443),
    allow: Sequence[str] = (),
    resolve: Callable[[str, int], Awaitable[Sequence[str]]] = resolve,
  ):
    """Makes a fetcher; nothing is sent yet.

    Args:
      timeout_s: of one page: resolution, redirects, to the last byte.
      max_bytes: of a body, as sent and as decompressed.
      max_redirects: followed for one page.
      ports: allowed ports.
      allow: networks that count as public, such as '127.0.0.0/8' in tests.
      resolve: returns the addresses of a name, instead of the system's.

    Raises:
      ValueError: an item of `allow` is not a network.
    """
    self.timeout_s, self.max_bytes = timeout_s, max_bytes
    self.max_redirects, self.ports = max_redirects, tuple(ports)
    self.allow = tuple(map(ipaddress.ip_network, allow))
    self.resolve = resolve
    self._ssl = httpx.create_ssl_context()

  async def fetch(self, url: str) -> Page:
    """Fetches one page.

    Args:
      url: http or https, without credentials; a fragment is ignored.

    Raises:
      FetchFailed: there is no page; the message has the URL that failed, which
        may be that of a redirect.
    """
    try:
      async with asyncio.timeout(self.timeout_s):
        for _ in range(self.max_redirects + 1):
          target = self._checked(url)
          page = await self._request(target)
          if isinstance(page, Page):
            return page
          problem = f'redirects to no URL, {shown(page)}'
          with convert((httpx.InvalidURL, ValueError), _Refused, problem):
            url = str(target.join(page))
        raise _Refused(f'more than {self.max_redirects} redirects')
    except TimeoutError:
      kind, problem = 'timeout', f'no page within {self.timeout_s:g} s'
    except FetchFailed as error:
      kind, problem = error.kind, str(error)
    raise FetchFailed(kind, f'{shown(url)}: {problem}')

  def _checked(self, url: str) -> httpx.URL:
    with convert((httpx.InvalidURL, ValueError), _Refused, 'no URL'):
      parsed = httpx.URL(url)
    usual = {'http': 80, 'https': 443}.get(parsed.scheme)
    port = usual if parsed.port is None else parsed.port
    # A percent sign is an escape, which no name has, or the scope of a local
    # address.
    named = parsed.host and b'%' not in parsed.raw_host
    if not usual or not named or parsed.userinfo:
      raise _Refused('not of the form http(s)://host')
    if port not in self.ports:
      raise _Refused(f'port {port} is not allowed')
    return parsed

  async def _request(self, url: httpx.URL) -> Page | str:
    """Returns the page, or the location of a redirect."""
    headers = {
      'Host': url.netloc,
      'User-Agent': 'Mozilla/5.0 (compatible; searchrl-retrieval)',
      'Accept': ', '.join(MEDIA_TYPES),
      'Accept-Encoding': 'gzip',
      'Connection': 'close',
    }
    names = {'scheme': url.raw_scheme, 'host': url.raw_host, 'port': url.port}
    target = httpcore.URL(**names, target=url.raw_path)
    backend = {'ssl_context': self._ssl, 'network_backend': _Checked(self)}
    try:
      async with (
        httpcore.AsyncConnectionPool(**backend) as pool,
        pool.stream('GET', target, headers=headers) as response,
      ):
        return await self._page(url, response)
    except (httpcore.NetworkError, httpcore.TimeoutException) as error:
      raise FetchFailed('unreachable', _said(error)) from None
    except httpcore.ProtocolError as error:
      raise FetchFailed('broken', _said(error)) from None

  async def _page(self, url: httpx.URL, response: httpcore.Response):
    headers = httpx.Headers(response.headers)
    if response.status in _REDIRECTS and 'Location' in headers:
      return headers['Location']
    if (status := response.status) != 200:
      busy = status in (408, 425, 429) or status >= 500
      raise FetchFailed('busy' if busy else 'status', f'HTTP {status}')
    kind, _, parameters = headers.get('Content-Type', '').partition(';')
    if (kind := kind.strip().lower()) not in MEDIA_TYPES:
      raise FetchFailed('media_type', f'media type {kind[:60]!r}, not a page')
    encoding = headers.get('Content-Encoding', '')
    body = await read_body(response.aiter_stream(), encoding, self.max_bytes)
    return Page(str(url), kind, _decoded(body, parameters))


class _Checked(httpcore.AsyncNetworkBackend):
  """Connects to public addresses only."""

  def __init__(self, fetcher: Fetcher):
    self._fetcher, self._backend = fetcher, httpcore.AnyIOBackend()

  async def connect_tcp(self, host, port, **options):
    try:
      found = await self._fetcher.resolve(host, port)
      addresses = [ipaddress.ip_address(address) for address in found]
    except (OSError, ValueError, UnicodeError) as error:
      problem = f'{shown(host)} has no address: {_said(error)}'
      raise FetchFailed('unreachable', problem) from None
    # A name with any private address is refused, since it is suspicious.
    for address in addresses:
      if not is_public(address, self._fetcher.allow):
        raise _Refused(f'{shown(host)} is at {address}, which is not public')
    failure = httpcore.ConnectError(f'{shown(host)} has no address')
    # Each address gets a share of the time, in case the first does not answer.
    options['timeout'] = self._fetcher.timeout_s / max(1, len(addresses))
    for address in addresses:
      try:
        return await self._backend.connect_tcp(str(address), port, **options)
      except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
        failure = error
    raise failure


async def read_body(chunks: AsyncIterable, encoding: str, max_bytes: int):
  """Reads and unpacks a body, with at most `max_bytes` of it in memory.

  Args:
    chunks: the body as sent.
    encoding: Content-Encoding; '', 'identity' and 'gzip' are supported.
    max_bytes: of the body, as sent and as unpacked.

  Raises:
    FetchFailed: too_large, or broken: another encoding, damaged or truncated.
  """
  encoding = encoding.strip().lower()
  if encoding not in ('', 'identity', 'gzip', 'x-gzip'):
    raise FetchFailed('broken', f'content encoding {encoding[:40]!r}, not gzip')
  unpacker = zlib.decompressobj(31) if encoding.endswith('gzip') else None
  body, sent = bytearray(), 0
  async with contextlib.aclosing(aiter(chunks)) as stream:
    async for chunk in stream:
      sent += len(chunk)
      if unpacker is not None:
        try:
          # One byte more than fits, to know that it does not.
          chunk = unpacker.decompress(chunk, max_bytes + 1 - len(body))
        except zlib.error:
          raise FetchFailed('broken', 'damaged gzip') from None
      body += chunk
      if max(sent, len(body)) > max_bytes:
        raise FetchFailed('too_large', f'more than {max_bytes} bytes')
  if unpacker is not None and sent and not unpacker.eof:
    raise FetchFailed('broken', 'gzip that is cut short')
  return bytes(body)


def _decoded(body: bytes, parameters: str) -> str:
  named = re.search(r'charset\s*=\s*["\']?([\w-]{1,20})', parameters, re.I)
  meta = _META.search(body[:2048])
  charset = named[1] if named else meta[1].decode() if meta else 'utf-8'
  charset = charset.lower()
  # Pages labelled Latin-1 are Windows-1252 (WHATWG, Encoding, 4.2).
  if charset in ('iso-8859-1', 'latin-1', 'latin1', 'us-ascii', 'ascii'):
    charset = 'windows-1252'
  try:
    known = _CHARSET.fullmatch(charset) and codecs.lookup(charset)
  except LookupError:  # a charset of the standard that Python lacks
    known = None
  text = body.decode(charset if known else 'utf-8', 'replace')
  return text.removeprefix('\ufeff')


def _said(error: Exception) -> str:
  return shown(f'{type(error).__name__} {error}'.rstrip())
