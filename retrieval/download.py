"""Downloads corpora, indexes and encoders; resumes interrupted downloads.

  python -m retrieval.download --bundle=wiki-18-corpus --out=DATA
  python -m retrieval.download --bundle=wiki-18-e5-flat --out=DATA
  python -m retrieval.download --repo=intfloat/e5-base-v2 --repo_type=model \\
    --file='*.json' --file='*.txt' --file=model.safetensors --out=DATA/e5

A file is written as NAME.part and renamed once its size and hash are those of
the hub, which also detects a mix of two versions. Gzip files are not unpacked.
After an interruption, the same command requests only the missing bytes by Range
(RFC 9110, 14). Complete files are kept; the same command then needs no network.

HF_ENDPOINT (or --mirror), HF_HOME (the token) and HF_TOKEN work as in
huggingface_hub, which provides the listing and the hashes. Its own
hf_hub_download (2.x) starts each file again after a kill, which costs days on
files of 43 GB.
"""

from collections.abc import Callable, Sequence
import dataclasses
import fnmatch
import hashlib
import logging
import pathlib
import random
import re
import time
from typing import BinaryIO

from absl import app as absl_app
from absl import flags
import httpx
import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.utils import build_hf_headers

from retrieval import files, proxies
from retrieval.retry import retry_after

# (repository, files, name of the joined file), from Search-R1's
# docs/retriever.md.
_OWNER = 'PeterJinGo/wiki-18'
_PARTS = ('part_*',)
BUNDLES = {
  'wiki-18-corpus': (f'{_OWNER}-corpus', ('wiki-18.jsonl.gz',), None),
  'wiki-18-e5-flat': (f'{_OWNER}-e5-index', _PARTS, 'e5_Flat.index'),
  'wiki-18-e5-hnsw64': (f'{_OWNER}-e5-index-HNSW64', _PARTS, 'e5_HNSW64.index'),
  'wiki-18-bm25': (f'{_OWNER}-bm25-index', ('*',), None),
}
_BUNDLE = """A part of Search-R1's data: the corpus wiki-18 (gzipped, 5 GB); its
e5-base-v2 vectors as a FAISS index, Flat (64.6 GB) or HNSW64, parts joined; a
Lucene index for its own server (build_index builds bm25 itself)."""
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
  return files.shown(str(text), 300)


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


def fetch(remote: Remote, out: pathlib.Path, headers: dict) -> pathlib.Path:
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
      problem = f'is there already with {digest}, not {remote.digest}'
      raise DownloadError(f'{final}: {problem}. Remove it.')
    return final
  final.parent.mkdir(parents=True, exist_ok=True)
  part = final.with_name(f'{final.name}.part')
  _fetch_bytes(remote, part, headers)
  if (digest := digest_of(part, kind)) != remote.digest:
    got = part.stat().st_size
    part.unlink()
    came = f'{got} bytes with {digest} came, {remote.size} with {remote.digest}'
    raise DownloadError(f'{clean(remote.url)}: {came} was due; removed.')
  with open(part, 'rb') as file:
    files.commit(file, part, final)
  return final


def _fetch_bytes(remote: Remote, part: pathlib.Path, headers: dict) -> None:
  """Writes NAME.part."""
  failed, locked = 0, f'{part}: another process writes this file. Wait for it.'
  options = {'follow_redirects': True, 'timeout': _TIMEOUT}
  with (
    open(part, 'ab') as file,
    files.progress(remote.size, remote.name) as bar,
    proxies.open_client(httpx.Client, **options) as client,
  ):
    files.lock(file, DownloadError, locked)
    if file.tell() > remote.size:  # of another file
      _start_over(file)
    while (before := file.tell()) < remote.size:
      try:
        _request(client, remote, file, headers, bar)
      except (_Broken, httpx.HTTPError) as error:
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
      raise _Broken(f'status {code}', retry_after(sent.get('retry-after', '')))
    if code not in (200, 206):
      fix = 'Check the names of repository, revision and file, and the mirror.'
      if code in (401, 403):
        fix = 'Set HF_TOKEN to a token that may read it.'
      raise DownloadError(f'{url}: status {code}. {fix}')
    total = sent.get('content-length', remote.size)
    if code == 206:
      span = sent.get('content-range', '')
      span = re.fullmatch(r'bytes (\d+)-\d+/(\d+)', span)
      if not span or int(span[1]) != have:
        _start_over(file)
        raise _Broken(f'the server did not send bytes from {have} on')
      total = span[2]
    else:
      have = _start_over(file)
    if (total := int(total)) != remote.size:
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


def list_hub(
  repo: str, patterns: Sequence[str], revision: str, repo_type, endpoint: str
) -> list[Remote]:
  """The matching files of a repository, with the hashes of the hub.

  Raises:
    DownloadError: no such repository or file, or the hub does not answer.
  """
  api = huggingface_hub.HfApi(endpoint=endpoint, token=_token(endpoint))
  where = {'repo_type': repo_type, 'revision': revision}
  try:
    info = api.repo_info(repo, files_metadata=True, **where)
  except Exception as error:  # includes those of its HTTP library
    fix = 'Check the name, HF_TOKEN, and the network (--mirror).'
    problem = f'{repo} at {endpoint}: {clean(error)}'
    raise DownloadError(f'{problem}. {fix}') from None
  where = {'repo_type': repo_type, 'revision': info.sha, 'endpoint': endpoint}
  there, remote_files = {file.rfilename: file for file in info.siblings}, {}
  for pattern in patterns:
    names = [name for name in there if fnmatch.fnmatchcase(name, pattern)]
    if not names:
      listed = clean(', '.join([*there][:20]))
      problem = f'no file matches {pattern!r}; it has {listed}'
      raise DownloadError(f'{repo} at {revision}: {problem}')
    for name in names:
      local_path(pathlib.Path(), name)  # refuses paths outside the folder
      url = huggingface_hub.hf_hub_url(repo, name, **where)
      lfs, blob = there[name].lfs, there[name].blob_id
      digest = f'sha256:{lfs.sha256}' if lfs else f'git:{blob}'
      remote_files[name] = Remote(name, url, there[name].size, digest)
  return [remote_files[name] for name in sorted(remote_files)]


def _token(endpoint: str) -> bool | None:
  """None: the user's token; False: none, since the network could read it."""
  return None if endpoint.startswith('https:') else False


def download(
  source: str, out: pathlib.Path, remotes: Callable, headers, join, keep_parts
) -> list[pathlib.Path]:
  """Downloads the files of one source; see the module.

  Args:
    source: identifies the record.
    out: the folder.
    remotes: lists the files, as `Remote`; called only if something is missing.
    headers: of each request.
    join: the file to join all files into, in the order of their names, or None.
    keep_parts: whether to keep the parts after joining.

  Returns:
    The files, or the joined one.
  """
  name = hashlib.sha256(source.encode()).hexdigest()[:16]
  record = out / '.downloads' / f'{name}.json'
  record.parent.mkdir(parents=True, exist_ok=True)
  with open(record.with_suffix('.lock'), 'w') as lock:
    busy = f'another process downloads {clean(source)} there'
    files.lock(lock, DownloadError, f'{out}: {busy}. Wait for it.')
    done = (files.read_json(record) or {}).get('done', {})
    sizes = {local_path(out, name): size for name, size in done.items()}
    there = {p: p.stat().st_size for p in sizes if p.exists()}
    if sizes and there == sizes:
      return [*sizes]
    paths = [fetch(remote, out, headers) for remote in remotes()]
    kept = paths
    if join:
      target = local_path(out, join)
      files.join(paths, target)
      kept = [target] + (paths if keep_parts else [])
    done = {p.relative_to(out).as_posix(): p.stat().st_size for p in kept}
    files.write_json(record, {'source': source, 'done': done})
    if join and not keep_parts:
      for path in paths:
        path.unlink()
    return kept[:1] if join else kept


def define_flags() -> None:
  text = flags.DEFINE_string
  flags.DEFINE_enum('bundle', None, sorted(BUNDLES), _BUNDLE)
  text('repo', None, 'A repository of the hub: OWNER/NAME.')
  flags.DEFINE_enum('repo_type', 'dataset', ['dataset', 'model'], 'Its type.')
  flags.DEFINE_multi_string('file', ['*'], 'File pattern; may be repeated.')
  text('revision', 'main', 'Branch, tag or commit of the repository.')
  text('mirror', None, 'Base URL instead of HF_ENDPOINT; a token needs https.')
  text('join', None, 'File to join all files into, in the order of names.')
  flags.DEFINE_bool('keep_parts', True, 'Keeps the parts after joining.')
  text('out', None, 'The folder.', required=True)


def run(f: flags.FlagValues) -> list[pathlib.Path]:
  """Downloads what the flags name, and prints the paths.

  Raises:
    DownloadError: the download failed.
  """
  repo, patterns, join = f.repo, f.file, f.join
  if (f.bundle is None) == (repo is None):
    raise DownloadError('give one of --bundle and --repo')
  if f.bundle:
    repo, patterns, join = BUNDLES[f.bundle]
  endpoint = (f.mirror or constants.ENDPOINT).rstrip('/')
  named = f'{f.repo_type} {repo}@{f.revision} {patterns} {join}'
  remotes = lambda: list_hub(repo, patterns, f.revision, f.repo_type, endpoint)
  out, headers = pathlib.Path(f.out), build_hf_headers(token=_token(endpoint))
  found = download(named, out, remotes, headers, join, f.keep_parts)
  print(*found, sep='\n')
  return found


def main(argv: Sequence[str]) -> int:
  logging.getLogger('httpx').setLevel(logging.WARNING)  # logs every request
  return files.run_command('retrieval.download', argv, run, flags.FLAGS)


if __name__ == '__main__':
  define_flags()
  absl_app.run(main)
