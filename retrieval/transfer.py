"""Fetches a file over HTTP so that a broken transfer goes on where it was.

A file arrives as NAME.part and gets its name when size and hash are right.
The rest of a file is asked for by Range; where no hash would show it, If-Range
keeps bytes of two versions apart (RFC 9110, 13.1.5 and 14).
"""

import dataclasses
import fcntl
import hashlib
import pathlib
import random
import re
import time
from collections.abc import Callable
from typing import BinaryIO

import httpx
import tqdm

from retrieval import files

_ATTEMPTS = 6  # in a row without a byte
_TIMEOUT = httpx.Timeout(60.0, connect=20.0)
_RETRY = (408, 425, 429, 500, 502, 503, 504)


class DownloadError(RuntimeError):
  """A file could not be fetched; the message names it and the mend."""


class _Broken(Exception):
  """Worth another attempt, after `wait` seconds where the server said."""

  def __init__(self, message: str, wait: float | None = None):
    super().__init__(message)
    self.wait = wait


@dataclasses.dataclass
class Remote:
  """A file to fetch, and what is known of it beforehand."""

  name: str  # below the output folder, with /
  url: str
  size: int | None = None  # bytes
  digest: str | None = None  # 'sha256:...' or 'git:...' (a blob's SHA-1)
  cached: str | None = None  # where the hub's cache has it


def clean(text: object) -> str:
  """Text from outside, without what a terminal would obey."""
  return str(text)[:300].encode('unicode_escape').decode()


def digest_of(path: pathlib.Path, kind: str) -> str:
  """'sha256:...' or, as git hashes a file, 'git:...'; with a bar."""
  found = hashlib.sha256() if kind == 'sha256' else hashlib.sha1(
    b'blob %d\0' % path.stat().st_size
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
  remote: Remote,
  out: pathlib.Path,
  state: dict,
  save: Callable[[], None],
  headers: dict[str, str],
) -> pathlib.Path:
  """Brings one file to `out`; goes on where an earlier call stopped.

  Args:
    remote: the file.
    out: the folder.
    state: what is recorded of the file: `etag` of an unfinished one,
      `size` and `digest` of a finished one. Changed here.
    save: writes the record to the disk.
    headers: of each request.

  Raises:
    DownloadError: the server has no such file, or sent another one.
  """
  final = local_path(out, remote.name)
  if final.exists():
    _check_present(final, remote, state)
    save()
    return final
  final.parent.mkdir(parents=True, exist_ok=True)
  part = final.with_name(f'{final.name}.part')
  if remote.cached:
    files.link(pathlib.Path(remote.cached), part)
    size = part.stat().st_size
  else:
    size = _fetch_bytes(remote, part, state, save, headers)
  digest = digest_of(part, (remote.digest or 'sha256:').split(':')[0])
  if size != part.stat().st_size or digest != (remote.digest or digest):
    got = part.stat().st_size
    part.unlink()
    state.clear()
    save()
    raise DownloadError(
      f'{clean(remote.url)}: {got} bytes with {digest} came, {remote.digest} '
      f'with {size} bytes was due; removed. Run again; if it comes out the '
      'same, this server has another file.'
    )
  state.clear()
  state.update(size=size, digest=digest)
  save()
  with open(part, 'rb') as file:
    files.commit(file, part, final)
  return final


def _check_present(final: pathlib.Path, remote: Remote, state: dict) -> None:
  """A file that has its name already: ours and whole, or the one due."""
  size = final.stat().st_size
  due = remote.digest or state.get('digest')
  if due and (state.get('digest'), state.get('size')) == (due, size):
    return
  digest = digest_of(final, due.split(':')[0]) if due else None
  if due is None or digest != due:
    raise DownloadError(
      f'{final}: is there already with {size} bytes and {digest}, and '
      f'{due or "nothing is known of it (give --sha256)"} is due. Remove it '
      'or choose another --out.'
    )
  state.clear()
  state.update(size=size, digest=digest)


def _fetch_bytes(
  remote: Remote,
  part: pathlib.Path,
  state: dict,
  save: Callable[[], None],
  headers: dict[str, str],
) -> int:
  """Fills NAME.part; returns the size that the server states."""
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
    while True:
      before = file.tell()
      try:
        return _request(client, remote, file, state, save, headers, bar)
      except (_Broken, httpx.TransportError) as error:
        failed = 1 if file.tell() > before else failed + 1
        if failed >= _ATTEMPTS:
          raise DownloadError(
            f'{clean(remote.url)}: {clean(error) or type(error).__name__}, '
            f'{failed} times in a row; {file.tell()} bytes are kept in '
            f'{part.name}. Run again to go on from there.'
          ) from None
        wait = getattr(error, 'wait', None)
        if wait is None:
          wait = min(2.0 ** failed, 30.0) * random.uniform(0.25, 0.5)
        time.sleep(min(wait, 120.0))


def _request(
  client: httpx.Client,
  remote: Remote,
  file: BinaryIO,
  state: dict,
  save: Callable[[], None],
  headers: dict[str, str],
  bar: tqdm.tqdm,
) -> int:
  have, etag = file.tell(), state.get('etag')
  if have and not (remote.digest or etag):
    have = 0  # nothing would show that the rest belongs to another file
  asked = {**headers, 'Accept-Encoding': 'identity'}
  if have:
    asked['Range'] = f'bytes={have}-'
    if not remote.digest:
      asked['If-Range'] = etag
  with client.stream('GET', remote.url, headers=asked) as answer:
    code, total = answer.status_code, None
    if code in _RETRY:
      after = answer.headers.get('retry-after', '')
      raise _Broken(
        f'status {code}', float(after) if after.isdecimal() else None
      )
    span = re.fullmatch(
      r'bytes (?:(\d+)-\d+|\*)/(\d+)', answer.headers.get('content-range', '')
    )
    if code == 416 and have:
      if span and int(span[2]) == have:
        return have  # all of it was there
      _start_over(file)
      raise _Broken(f'the server has fewer than {have} bytes')
    if code not in (200, 206):
      raise DownloadError(
        f'{clean(remote.url)}: status {code}. {_mend(code)}'
      )
    # A weak tag does not promise the same bytes.
    tag = answer.headers.get('etag', 'W/')
    tag = answer.headers.get('last-modified') if tag[:2] == 'W/' else tag
    if code == 206:
      right = have and span and span[1] and int(span[1]) == have
      if not right or not (remote.digest or tag == etag):
        _start_over(file)
        raise _Broken(f'bytes from {have} on were asked, others came')
      total = int(span[2])
    else:
      have = _start_over(file)
      length = answer.headers.get('content-length', '')
      total = int(length) if length.isdecimal() else None
      encoding = answer.headers.get('content-encoding', 'identity')
      if encoding != 'identity' and not remote.name.endswith('.gz'):
        raise DownloadError(
          f'{clean(remote.url)}: comes as {clean(encoding)} though it was '
          'asked for as it is. Use another mirror.'
        )
      if total is None and remote.digest is None and (
        answer.headers.get('transfer-encoding') != 'chunked'
      ):
        raise DownloadError(
          f'{clean(remote.url)}: the server does not say how long it is, so '
          'that its end would not show. Give --sha256.'
        )
      state.clear()
      state['etag'] = tag
      save()
    due = remote.size if total is None else total
    if remote.size not in (None, due):
      raise DownloadError(
        f'{clean(remote.url)}: is {due} bytes, should be {remote.size}. This '
        'server has another file.'
      )
    files.need_space(pathlib.Path(file.name), (due or 0) - have)
    bar.total, bar.n = due, have
    for block in answer.iter_raw():  # as it comes: a cut loses none
      file.write(block)
      bar.update(len(block))
      if due is not None and file.tell() > due:
        break
    if due is not None and file.tell() < due:
      raise _Broken('the connection was cut')
    return file.tell() if due is None else due


def _start_over(file: BinaryIO) -> int:
  file.truncate(0)
  file.seek(0)
  return 0


def _mend(code: int) -> str:
  if code in (401, 403):
    return 'Set HF_TOKEN to a token that may read it.'
  return 'Check the names of repository, revision and file, and the mirror.'
