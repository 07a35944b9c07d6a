"""Fetches a file over HTTP so that a broken transfer goes on where it was.

A file arrives as NAME.part and gets its name when its hash is right, which
also shows if bytes of two versions came together. The rest of a file is asked
for by Range (RFC 9110, 14).
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
import tqdm

from retrieval import files
from retrieval.retry import retry_after

_ATTEMPTS = 6  # in a row without a byte
_TIMEOUT = httpx.Timeout(60.0, connect=20.0)
_RETRY = (408, 425, 429, 500, 502, 503, 504)


class DownloadError(RuntimeError):
  """A file could not be fetched; the message names it and the fix."""


class _Broken(Exception):
  """Worth another attempt, after `wait` seconds where the server said."""

  def __init__(self, message: str, wait: float = 0.0):
    super().__init__(message)
    self.wait = wait


@dataclasses.dataclass
class Remote:
  """A file to fetch, and what is stated of it."""

  name: str  # below the output folder, with /
  url: str
  size: int  # bytes
  digest: str  # 'sha256:...' or 'git:...' (a blob's SHA-1)


def clean(text: object) -> str:
  """Text from outside, without what a terminal would obey."""
  return str(text)[:300].encode('unicode_escape').decode()


def digest_of(path: pathlib.Path, kind: str) -> str:
  """'sha256:...' or, as git hashes a file, 'git:...'; with a bar."""
  found = (
    hashlib.sha256()
    if kind == 'sha256'
    else hashlib.sha1(b'blob %d\0' % path.stat().st_size)
  )
  for block in files.read_blocks([path], f'check {path.name}'):
    found.update(block)
  return f'{kind}:{found.hexdigest()}'


def local_path(out: pathlib.Path, name: str) -> pathlib.Path:
  """Where a remote name lies below `out`.

  Raises:
    DownloadError: it would lie elsewhere.
  """
  parts = name.split('/')
  if any(p in ('', '.', '..') or '\\' in p or '\0' in p for p in parts):
    raise DownloadError(f'{clean(name)}: not a name below a folder; refused')
  return out.joinpath(*parts)


def fetch(
  remote: Remote, out: pathlib.Path, headers: dict[str, str]
) -> pathlib.Path:
  """Brings one file to `out`; goes on where an earlier call stopped.

  Args:
    remote: the file.
    out: the folder.
    headers: of each request.

  Raises:
    DownloadError: the server has no such file, or sent another one.
  """
  final = local_path(out, remote.name)
  kind = remote.digest.partition(':')[0]
  if final.exists():
    digest = digest_of(final, kind)
    if digest != remote.digest:
      raise DownloadError(
        f'{final}: is there already with {final.stat().st_size} bytes and '
        f'{digest}, and {remote.digest} is due. Remove it or choose another '
        '--out.'
      )
    return final
  final.parent.mkdir(parents=True, exist_ok=True)
  part = final.with_name(f'{final.name}.part')
  _fetch_bytes(remote, part, headers)
  digest = digest_of(part, kind)
  if digest != remote.digest:
    got = part.stat().st_size
    part.unlink()
    raise DownloadError(
      f'{clean(remote.url)}: {got} bytes with {digest} came, {remote.digest} '
      f'with {remote.size} bytes was due; removed. Run again; if it comes out '
      'the same, this server has another file.'
    )
  with open(part, 'rb') as file:
    files.commit(file, part, final)
  return final


def _fetch_bytes(
  remote: Remote, part: pathlib.Path, headers: dict[str, str]
) -> None:
  """Fills NAME.part."""
  failed = 0
  with (
    open(part, 'ab') as file,
    files.progress(remote.size, remote.name) as bar,
    httpx.Client(follow_redirects=True, timeout=_TIMEOUT) as client,
  ):
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
      raise DownloadError(
        f'{part}: another process writes this file. Wait for it.'
      ) from None
    if file.tell() > remote.size:  # another file's
      _start_over(file)
    while (before := file.tell()) < remote.size:
      try:
        _request(client, remote, file, headers, bar)
      except (_Broken, httpx.TransportError) as error:
        failed = 1 if file.tell() > before else failed + 1
        if failed >= _ATTEMPTS:
          raise DownloadError(
            f'{clean(remote.url)}: {clean(error) or type(error).__name__}, '
            f'{failed} times in a row; {file.tell()} bytes are kept in '
            f'{part.name}. Run again to go on from there.'
          ) from None
        own = min(2.0**failed, 30.0) * random.uniform(0.25, 0.5)
        time.sleep(min(getattr(error, 'wait', 0.0) or own, 120.0))


def _request(
  client: httpx.Client,
  remote: Remote,
  file: BinaryIO,
  headers: dict[str, str],
  bar: tqdm.tqdm,
) -> None:
  have = file.tell()
  asked = {**headers, 'Accept-Encoding': 'identity'}
  if have:
    asked['Range'] = f'bytes={have}-'
  with client.stream('GET', remote.url, headers=asked) as answer:
    code = answer.status_code
    if code in _RETRY:
      after = answer.headers.get('retry-after', '')
      raise _Broken(f'status {code}', retry_after(after))
    if code not in (200, 206):
      advice = (
        'Set HF_TOKEN to a token that may read it.'
        if code in (401, 403)
        else 'Check the names of repository, revision and file, and the mirror.'
      )
      raise DownloadError(f'{clean(remote.url)}: status {code}. {advice}')
    if code == 206:
      span = re.fullmatch(
        r'bytes (\d+)-\d+/(\d+)', answer.headers.get('content-range', '')
      )
      if not span or int(span[1]) != have:
        _start_over(file)
        raise _Broken(f'bytes from {have} on were asked, others came')
      total = int(span[2])
    else:
      have = _start_over(file)
      total = int(answer.headers.get('content-length', remote.size))
    if total != remote.size:
      raise DownloadError(
        f'{clean(remote.url)}: is {total} bytes, should be {remote.size}. This '
        'server has another file.'
      )
    files.need_space(pathlib.Path(file.name), total - have)
    bar.n = have
    for block in answer.iter_raw():  # as it comes: a cut loses none
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
