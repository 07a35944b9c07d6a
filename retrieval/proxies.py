"""Servers of this machine, and the proxies of the environment.

httpx takes proxies from the environment (http_proxy, https_proxy, all_proxy,
no_proxy). Neither its errors nor those of a proxy say that there is one.
"""

from collections.abc import Callable
import os
import re
from typing import Any
import urllib.parse
import urllib.request

LOOPBACK = ('127.0.0.1', 'localhost', '::1')
_ANY = re.compile(r'(?<=://)(0\.0\.0\.0|\[::\])(?=[:/]|$)')
_LOGIN = re.compile(r'(^|//)[^/]*@')
_SCHEMES = ('http', 'https', 'all')


class ProxyError(RuntimeError):
  """A proxy of the environment cannot be used; names it and the fix."""


def is_near(url: str) -> bool:
  """Whether a URL names this machine, which a proxy cannot reach."""
  return urllib.parse.urlsplit(url).hostname in LOOPBACK


def askable(url: str) -> str:
  """The URL, with 0.0.0.0 or [::], which servers listen on, as loopback."""
  return _ANY.sub(lambda m: '[::1]' if m[0] == '[::]' else '127.0.0.1', url)


def open_client(kind: Callable[..., Any], **options: Any) -> Any:
  """Makes an httpx.Client or httpx.AsyncClient.

  Raises:
    ProxyError: a proxy of the environment is not of a form that httpx knows,
      or is of SOCKS, which needs a package.
  """
  import httpx  # the server, which has LOOPBACK from here, does without

  try:
    return kind(**options)
  except (ImportError, ValueError, httpx.InvalidURL) as error:
    proxies = urllib.request.getproxies()
    named = ', '.join(_named(s, proxies[s]) for s in _SCHEMES if s in proxies)
    if not named:
      raise
    problem = f'{named} cannot be used as a proxy ({error})'
    fix = 'Install httpx[socks] for socks5://, or unset the variable'
    raise ProxyError(f'{problem}. {fix}') from None


def via(url: str) -> str:
  """Names the proxy that a URL is asked through; '' without one."""
  parts = urllib.parse.urlsplit(url)
  proxies = urllib.request.getproxies()
  scheme = next((s for s in (parts.scheme, 'all') if proxies.get(s)), None)
  host = parts.hostname or ''
  if scheme is None or is_near(url) or urllib.request.proxy_bypass(host):
    return ''
  named = _named(scheme, proxies[scheme])
  return f', through the proxy {named} (hosts in no_proxy need none)'


def _named(scheme: str, value: str) -> str:
  """`variable=value`, without a password."""
  key = f'{scheme}_proxy'
  names = (n for n in (key, *os.environ) if n.lower() == key)
  name = next((n for n in names if os.environ.get(n)), key)
  return f'{name}={_LOGIN.sub("//", value)}'
