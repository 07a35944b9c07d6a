"""Downloads a file over HTTP and resumes interrupted transfers.

A file is written as NAME.part and renamed once its hash is correct, which also
detects a mix of two versions. The rest of a file is requested by Range (RFC
9110, 14).
"""

import dataclasses
import fcntl
import hashlib
import pathlib
import random
import re
import time
from typing import BinaryIO

import httpx

from retrieval import files
from retrieval.retry import retry_after

_ATTEMPTS = 6  # in a row without a new byte
_TIMEOUT = httpx.Timeout(60.0, connect=20.0)
_RETRY = (408, 425, 429, 500, 502, 503, 504)


class DownloadError(RuntimeError):
  """A file could not be downloaded; the message says how to fix it."""


class _Broken(Exception):
  """A retry may succeed, after `wait` seconds if the server sent that."""

  def __init__(self, message: str, wait: float = 0.0):
    super().__init__(message)
    self.wait = wait


@dataclasses.dataclass
class Remote:
  """A file to download, with its expected size and hash."""

  name: str  # below the output folder, with /
  url: str
  size: int  # bytes
  digest: str  # 'sha256:...' or 'git:...' (a blob's SHA-1)


def clean(text: object) -> str:
  """Untrusted text, escaped for a terminal."""
  return str(text)[:300].encode('unicode_escape').decode()


def digest_of(path: pathlib.Path, kind: str) -> str:
  """The hash of a file: 'sha256:...', or 'git:...' (a blob's SHA-1)."""
  found = hashlib.sha256()
  if kind == 'git':
    found = hashlib.sha1(b'blob %d\0' % path.stat().st_size)
  for block in files.read_blocks([path], f'check {path.name}'):
    found.update(block)
  return f'{kind}:{found.hexdigest()}'


def local_path(out: pathlib.Path, name: str) -> pathlib.Path:
  """The path of a remote name below `out`.

  Raises:
    DownloadError: the path would be outside `out`.
  """
  parts = name.split('/')
  if any(p in ('', '.', '..') or '\\' in p or '\0' in p for p in parts):
    raise DownloadError(f'{clean(name)}: not a name below a folder; refused')
  return out.joinpath(*parts)


Headers = dict[str, str]


def fetch(remote: Remote, out: pathlib.Path, headers: Headers) -> pathlib.Path:
  """Downloads one file to `out`; resumes an interrupted download.

  Args:
    remote: the file.
    out: the folder.
    headers: of each request.

  Raises:
    DownloadError: the server has no such file, or sent a different one.
  """
  final = local_path(out, remote.name)
  kind = remote.digest.partition(':')[0]
  if final.exists():
    if (digest := digest_of(final, kind)) != remote.digest:
      raise DownloadError(
        f'{final}: is there already with {final.stat().st_size} bytes and '
        f'{digest}, not {remote.digest}. Remove it or use another --out.'
      )
    return final
  final.parent.mkdir(parents=True, exist_ok=True)
  part = final.with_name(f'{final.name}.part')
  _fetch_bytes(remote, part, headers)
  if (digest := digest_of(part, kind)) != remote.digest:
    got = part.stat().st_size
    part.unlink()
    raise DownloadError(
      f'{clean(remote.url)}: {got} bytes with {digest} came, {remote.digest} '
      f'with {remote.size} bytes was due; removed. Run again; if it fails '
      'again, this server has another file.'
    )
  with open(part, 'rb') as file:
    files.commit(file, part, final)
  return final


def _fetch_bytes(remote: Remote, part: pathlib.Path, headers: Headers) -> None:
  """Writes NAME.part."""
  failed, locked = 0, f'{part}: another process writes this file. Wait for it.'
  with (
    open(part, 'ab') as file,
    files.progress(remote.size, remote.name) as bar,
    httpx.Client(follow_redirects=True, timeout=_TIMEOUT) as client,
  ):
    with files.convert(OSError, DownloadError, locked):
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if file.tell() > remote.size:  # of another file
      _start_over(file)
    while (before := file.tell()) < remote.size:
      try:
        _request(client, remote, file, headers, bar)
      except (_Broken, httpx.TransportError) as error:
        failed = 1 if file.tell() > before else failed + 1
        if failed >= _ATTEMPTS:
          problem = clean(error) or type(error).__name__
          raise DownloadError(
            f'{clean(remote.url)}: {problem}, {failed} times in a row; '
            f'{file.tell()} bytes are kept in {part.name}. Run again to resume.'
          ) from None
        own = min(2.0**failed, 30.0) * random.uniform(0.25, 0.5)
        time.sleep(min(getattr(error, 'wait', 0.0) or own, 120.0))


def _request(client, remote: Remote, file: BinaryIO, headers, bar) -> None:
  have, url = file.tell(), clean(remote.url)
  asked = {**headers, 'Accept-Encoding': 'identity'}
  if have:
    asked['Range'] = f'bytes={have}-'
  with client.stream('GET', remote.url, headers=asked) as answer:
    code = answer.status_code
    sent = answer.headers
    if code in _RETRY:
      wait = retry_after(sent.get('retry-after', ''))
      raise _Broken(f'status {code}', wait)
    if code not in (200, 206):
      fix = 'Check the names of repository, revision and file, and the mirror.'
      if code in (401, 403):
        fix = 'Set HF_TOKEN to a token that may read it.'
      raise DownloadError(f'{url}: status {code}. {fix}')
    if code == 206:
      span = sent.get('content-range', '')
      span = re.fullmatch(r'bytes (\d+)-\d+/(\d+)', span)
      if not span or int(span[1]) != have:
        _start_over(file)
        raise _Broken(f'the server did not send bytes from {have} on')
      total = int(span[2])
    else:
      have = _start_over(file)
      total = int(sent.get('content-length', remote.size))
    if total != remote.size:
      sizes = f'is {total} bytes, should be {remote.size}'
      raise DownloadError(f'{url}: {sizes}. This server has another file.')
    files.need_space(pathlib.Path(file.name), total - have)
    bar.n = have
    for block in answer.iter_raw():  # unbuffered: a cut loses nothing
      file.write(block)
      bar.update(len(block))
      if file.tell() > total:
        return
    if file.tell() < total:
      raise _Broken('the connection was cut')


def _start_over(file: BinaryIO) -> int:
  file.truncate(0)
  file.seek(0)
  return 0
