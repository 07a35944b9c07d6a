"""Downloads corpora, indexes and encoders; resumes interrupted downloads.

  python -m retrieval.download --bundle=wiki-18-corpus --out=DATA
  python -m retrieval.download --bundle=wiki-18-e5-flat --out=DATA
  python -m retrieval.download --repo=intfloat/e5-base-v2 --repo_type=model \\
    --file='*.json' --file='*.txt' --file=model.safetensors --out=DATA/e5

A file is written as NAME.part and renamed once its size and hash are those of
the hub. Gzip files are not unpacked. After an interruption, the same command
requests only the missing bytes. Complete files are kept; the same command then
needs no network.

HF_ENDPOINT (or --mirror), HF_HOME (the token) and HF_TOKEN work as in
huggingface_hub, which provides the listing and the hashes. Its own
hf_hub_download (2.x) starts each file again after a kill, which costs days on
files of 43 GB.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import fcntl
import fnmatch
import hashlib
import logging
import pathlib
import sys

from absl import app as absl_app
from absl import flags
import httpx
import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.utils import build_hf_headers

from retrieval import files
from retrieval.transfer import DownloadError, Remote, clean, fetch, local_path

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


def list_hub(
  repo: str,
  patterns: Sequence[str],
  revision: str,
  repo_type: str,
  endpoint: str,
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
    raise DownloadError(
      f'{repo} at {endpoint}: {clean(error)}. Check the name, HF_TOKEN and the '
      'network; --mirror or HF_ENDPOINT names a mirror.'
    ) from None
  where = {'repo_type': repo_type, 'revision': info.sha, 'endpoint': endpoint}
  there, found = {file.rfilename: file for file in info.siblings}, {}
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
      found[name] = Remote(name, url, there[name].size, digest)
  return [found[name] for name in sorted(found)]


def _token(endpoint: str) -> bool | None:
  """None: the user's token; False: none, since the network could read it."""
  return None if endpoint.startswith('https:') else False


@contextlib.contextmanager
def record_of(out: pathlib.Path, source: str) -> Iterator[pathlib.Path]:
  """The record of one source in OUT/.downloads, locked meanwhile."""
  folder = out / '.downloads'
  folder.mkdir(parents=True, exist_ok=True)
  name = hashlib.sha256(source.encode()).hexdigest()[:16]
  with open(folder / f'{name}.lock', 'w') as lock:
    busy = f'another process downloads {clean(source)} there'
    with files.convert(OSError, DownloadError, f'{out}: {busy}. Wait for it.'):
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    yield folder / f'{name}.json'


def download(
  source: str,
  out: pathlib.Path,
  remotes: Callable[[], list[Remote]],
  *,
  headers: dict[str, str],
  join: str | None = None,
  keep_parts: bool = True,
) -> list[pathlib.Path]:
  """Downloads the files of one source; see the module.

  Args:
    source: identifies the record.
    out: the folder.
    remotes: lists the files; called only if something is missing.
    headers: of each request.
    join: the file to join all files into, in the order of their names.
    keep_parts: whether to keep the parts after joining.

  Returns:
    The files, or the joined one.
  """
  with record_of(out, source) as record:
    done = (files.read_json(record) or {}).get('done')
    sizes = {local_path(out, name): size for name, size in (done or {}).items()}
    if sizes and all(
      p.exists() and p.stat().st_size == size for p, size in sizes.items()
    ):
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
  """Downloads what the flags name.

  Raises:
    DownloadError: the download failed.
  """
  repo, patterns, join = f.repo, f.file, f.join
  if (f.bundle is None) == (repo is None):
    raise DownloadError('give one of --bundle and --repo')
  if f.bundle:
    repo, patterns, join = BUNDLES[f.bundle]
  endpoint = (f.mirror or constants.ENDPOINT).rstrip('/')
  return download(
    f'{f.repo_type} {repo}@{f.revision} {patterns} {join}',
    pathlib.Path(f.out),
    lambda: list_hub(repo, patterns, f.revision, f.repo_type, endpoint),
    headers=build_hf_headers(token=_token(endpoint)),
    join=join,
    keep_parts=f.keep_parts,
  )


def main(argv: Sequence[str]) -> int:
  if len(argv) > 1:
    print(f'error: unexpected {argv[1:]}', file=sys.stderr)
    return 2
  logging.getLogger('httpx').setLevel(logging.WARNING)  # logs every request
  try:
    for path in run(flags.FLAGS):
      print(path)
  except (RuntimeError, OSError, httpx.HTTPError, httpx.InvalidURL) as error:
    print(f'retrieval.download: error: {error}', file=sys.stderr)
    return 1
  return 0


if __name__ == '__main__':
  define_flags()
  absl_app.run(main)
