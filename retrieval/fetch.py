"""Fetches a page that a stranger named, without being led inside.

A search result, or a redirect behind it, may name an address of this machine,
of its network or of its cloud's metadata service (server-side request
forgery). So the name is resolved once, every address it has must be public,
and the connection goes to the very address that was checked: the check sits
in the network backend, below TLS and HTTP, which keep the name for SNI,
certificate and Host header. There is no second resolution that could answer
otherwise (DNS rebinding), and a redirect is a request like the first.

No proxies and no cookies: httpcore knows neither unless given them.
"""

import asyncio
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

TRANSIENT = ('unreachable', 'timeout', 'busy', 'broken')  # kinds that may pass
MEDIA_TYPES = ('text/html', 'text/plain')
_REDIRECTS = (301, 302, 303, 307, 308)
# IANA's special-purpose registries (RFC 6890 and after); ipaddress.is_global
# differs between versions of Python, and holds multicast for global.
_REFUSED = tuple(
  map(
    ipaddress.ip_network,
    (
      '0.0.0.0/8',
      '10.0.0.0/8',
      '100.64.0.0/10',
      '127.0.0.0/8',
      '169.254.0.0/16',
      '172.16.0.0/12',
      '192.0.0.0/24',
      '192.0.2.0/24',
      '192.88.99.0/24',
      '192.168.0.0/16',
      '198.18.0.0/15',
      '198.51.100.0/24',
      '203.0.113.0/24',
      '224.0.0.0/4',
      '240.0.0.0/4',
      '168.63.129.16/32',  # Azure's host agent: public by number, not by nature
      '2001::/23',
      '2001:db8::/32',
      '2002::/16',
      '3fff::/20',
    ),
  )
)
_GLOBAL_V6 = ipaddress.ip_network('2000::/3')  # all that IANA gives out
_NAT64 = ipaddress.ip_network('64:ff9b::/96')  # the last 32 bits are IPv4
# The charsets of the WHATWG's standard that pages still use. Not any codec
# that Python has: some take quadratic time, some are no charsets.
_CHARSET = re.compile(
  r'utf-?8|utf-16(le|be)?|iso-8859-\d+|windows-125\d|koi8-[ru]|big5|gbk|'
  r'gb2312|gb18030|shift[_-]jis|euc-(jp|kr)|iso-2022-jp'
)
_META_CHARSET = re.compile(
  rb'<meta[^>]{0,200}charset=["\']?([\w-]{1,20})', re.I
)

# A name may hang for as long as the resolver likes, so names have threads of
# their own: asyncio's few serve the rest of the process.
_NAMES = concurrent.futures.ThreadPoolExecutor(64, 'names')

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class FetchFailed(Exception):
  """No page.

  Attributes:
    kind: one of `TRANSIENT`, or 'refused' (by the rules here: address, scheme,
      port, redirects), 'status', 'media_type', 'too_large'.
  """

  def __init__(self, kind: str, message: str):
    super().__init__(message)
    self.kind = kind


@dataclasses.dataclass(frozen=True)
class Page:
  """What a URL led to."""

  url: str  # after redirects
  media_type: str  # one of `MEDIA_TYPES`
  text: str  # decoded, markup and all


def is_public(address: Address, allow: Sequence[Network] = ()) -> bool:
  """Whether a fetch may connect to `address`.

  IPv4 within IPv6 (mapped, NAT64) is judged as IPv4; 6to4 and Teredo, long
  out of use, are not public whatever they hold.

  Args:
    address: any address, with its scope if it has one.
    allow: networks that count as public whatever they are, for tests and
      mirrors.
  """
  if address.version == 6:
    if address.ipv4_mapped is not None:
      address = address.ipv4_mapped
    elif address in _NAT64:
      address = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
  if any(address in network for network in allow):
    return True
  if address.version == 6 and address not in _GLOBAL_V6:
    return False
  return not any(address in network for network in _REFUSED)


async def resolve(host: str, port: int) -> list[str]:
  """The addresses of a name, in the system's order of preference."""
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
      timeout_s: for one page in all: names, redirects, the last byte.
      max_bytes: of a body, as sent and as decompressed.
      max_redirects: followed for one page.
      ports: that may be connected to.
      allow: networks that count as public, such as '127.0.0.0/8' in tests.
      resolve: a name's addresses, in place of the system's.

    Raises:
      ValueError: `allow` holds what is no network.
    """
    self.timeout_s, self.max_bytes = timeout_s, max_bytes
    self.max_redirects, self.ports = max_redirects, tuple(ports)
    self.allow = tuple(map(ipaddress.ip_network, allow))
    self.resolve = resolve
    self._ssl = httpx.create_ssl_context()

  async def fetch(self, url: str) -> Page:
    """Fetches one page.

    Args:
      url: http or https, without credentials; a fragment is left out.

    Raises:
      FetchFailed: no page; its message names the URL that failed, which a
        redirect may have brought in.
    """
    try:
      async with asyncio.timeout(self.timeout_s):
        return await self._fetch(url)
    except TimeoutError:
      raise FetchFailed(
        'timeout', f'{shown(url)}: no page within {self.timeout_s:g} s'
      ) from None

  async def _fetch(self, url: str) -> Page:
    for _ in range(self.max_redirects + 1):
      target = self._checked(url)
      try:
        page = await self._request(target)
      except FetchFailed as error:
        raise FetchFailed(error.kind, f'{shown(url)}: {error}') from None
      if isinstance(page, Page):
        return page
      try:
        url = str(target.join(page))
      except (httpx.InvalidURL, ValueError):
        raise FetchFailed(
          'refused', f'{shown(url)}: redirects to no URL, {shown(page)}'
        ) from None
    raise FetchFailed(
      'refused', f'{shown(url)}: more than {self.max_redirects} redirects'
    )

  def _checked(self, url: str) -> httpx.URL:
    try:
      parsed = httpx.URL(url)
      port = parsed.port
      if port is None:
        port = {'http': 80, 'https': 443}.get(parsed.scheme)
    except (httpx.InvalidURL, ValueError):
      raise FetchFailed('refused', f'{shown(url)}: no URL') from None
    # A percent sign is an escape, which no name has, or the scope of an
    # address of this network.
    if (
      parsed.scheme not in ('http', 'https')
      or not parsed.host
      or (b'%' in parsed.raw_host)
    ):
      problem = 'not of the form http(s)://host'
    elif parsed.userinfo:
      problem = 'holds credentials'
    elif port not in self.ports:
      problem = f'port {port} is not allowed'
    else:
      return parsed
    raise FetchFailed('refused', f'{shown(url)}: {problem}')

  async def _request(self, url: httpx.URL) -> Page | str:
    """The page, or where it redirects to."""
    headers = {
      'Host': url.netloc,
      'User-Agent': 'Mozilla/5.0 (compatible; searchrl-retrieval)',
      'Accept': ', '.join(MEDIA_TYPES),
      'Accept-Encoding': 'gzip',
      'Connection': 'close',
    }
    target = httpcore.URL(
      scheme=url.raw_scheme,
      host=url.raw_host,
      port=url.port,
      target=url.raw_path,
    )
    try:
      async with (
        httpcore.AsyncConnectionPool(
          ssl_context=self._ssl, network_backend=_Checked(self)
        ) as pool,
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
    if response.status != 200:
      busy = response.status in (408, 425, 429) or response.status >= 500
      raise FetchFailed('busy' if busy else 'status', f'HTTP {response.status}')
    media_type, _, parameters = headers.get('Content-Type', '').partition(';')
    media_type = media_type.strip().lower()
    if media_type not in MEDIA_TYPES:
      raise FetchFailed(
        'media_type', f'media type {media_type[:60]!r}, not a page'
      )
    body = await read_body(
      response.aiter_stream(),
      headers.get('Content-Encoding', ''),
      self.max_bytes,
    )
    return Page(str(url), media_type, _decoded(body, parameters))


class _Checked(httpcore.AsyncNetworkBackend):
  """Connects to public addresses only."""

  def __init__(self, fetcher: Fetcher):
    self._fetcher, self._backend = fetcher, httpcore.AnyIOBackend()

  async def connect_tcp(self, host, port, **options):
    try:
      found = await self._fetcher.resolve(host, port)
      addresses = [ipaddress.ip_address(address) for address in found]
    except (OSError, ValueError, UnicodeError) as error:
      raise FetchFailed(
        'unreachable', f'{shown(host)} has no address: {_said(error)}'
      ) from None
    # All of them: a name with one private address is up to something.
    for address in addresses:
      if not is_public(address, self._fetcher.allow):
        raise FetchFailed(
          'refused', f'{shown(host)} is at {address}, which is not public'
        )
    failure = httpcore.ConnectError(f'{shown(host)} has no address')
    # A share of the time each, or one dead address would take it all.
    options['timeout'] = self._fetcher.timeout_s / max(1, len(addresses))
    for address in addresses:
      try:
        return await self._backend.connect_tcp(str(address), port, **options)
      except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
        failure = error
    raise failure


async def read_body(
  chunks: AsyncIterable[bytes], encoding: str, max_bytes: int
) -> bytes:
  """Reads a body and unpacks it, never holding more than `max_bytes` of it.

  Args:
    chunks: the body as sent.
    encoding: Content-Encoding; '', 'identity' and 'gzip' are known.
    max_bytes: of the body, as sent and as unpacked.

  Raises:
    FetchFailed: too_large, or broken: another encoding, damaged or cut short.
  """
  encoding = encoding.strip().lower()
  if encoding not in ('', 'identity', 'gzip', 'x-gzip'):
    raise FetchFailed(
      'broken', f'content encoding {encoding[:40]!r}, gzip was asked for'
    )
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
  meta = _META_CHARSET.search(body[:2048])
  charset = (
    named.group(1) if named else meta.group(1).decode() if meta else 'utf-8'
  ).lower()
  # What calls itself Latin-1 is Windows-1252 (WHATWG, Encoding, 4.2).
  if charset in ('iso-8859-1', 'latin-1', 'latin1', 'us-ascii', 'ascii'):
    charset = 'windows-1252'
  if not _CHARSET.fullmatch(charset):
    charset = 'utf-8'
  try:
    text = body.decode(charset, 'replace')
  except LookupError:  # one of the standard's that Python lacks
    text = body.decode('utf-8', 'replace')
  return text.removeprefix('\ufeff')


def shown(text: str, size: int = 200) -> str:
  """Text of a stranger, as it may reach a terminal."""
  return ascii(text if len(text) <= size else text[: size - 3] + '...')[1:-1]


def _said(error: Exception) -> str:
  return shown(f'{type(error).__name__} {error}'.rstrip())
