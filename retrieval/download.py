"""Downloads corpora, indexes and encoders; a download that broke goes on.

  python -m retrieval.download --bundle=wiki-18-corpus --out=DATA
  python -m retrieval.download --bundle=wiki-18-e5-flat --out=DATA
  python -m retrieval.download --repo=intfloat/e5-base-v2 --repo_type=model \\
    --file='*.json' --file='*.txt' --file=model.safetensors --out=DATA/e5

A file arrives as NAME.part and gets its name when its size and hash are
right: those that the hub states for it. Gzip stays gzip. Killed or cut off,
the same command asks for the missing bytes alone. What is there is kept, and
the same command then needs no network.

HF_ENDPOINT (or --mirror), HF_HOME (the token) and HF_TOKEN work as in
huggingface_hub. Its own hf_hub_download starts each file anew after a kill
(2.x), which costs days on files of 43 GB; the listing and the hashes are asked
of it.
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

# As Search-R1's docs/retriever.md names them; parts as its users join them.
BUNDLES = {
  'wiki-18-corpus': ('PeterJinGo/wiki-18-corpus', ('wiki-18.jsonl.gz',), None),
  'wiki-18-e5-flat': (
    'PeterJinGo/wiki-18-e5-index',
    ('part_*',),
    'e5_Flat.index',
  ),
  'wiki-18-e5-hnsw64': (
    'PeterJinGo/wiki-18-e5-index-HNSW64',
    ('part_*',),
    'e5_HNSW64.index',
  ),
  'wiki-18-bm25': ('PeterJinGo/wiki-18-bm25-index', ('*',), None),
}


def list_hub(
  repo: str,
  patterns: Sequence[str],
  revision: str,
  repo_type: str,
  endpoint: str,
) -> list[Remote]:
  """The files of a repository that match, with the hashes the hub states.

  Raises:
    DownloadError: no such repository or file, or the hub does not answer.
  """
  api = huggingface_hub.HfApi(endpoint=endpoint, token=_token(endpoint))
  try:
    info = api.repo_info(
      repo, revision=revision, repo_type=repo_type, files_metadata=True
    )
  except Exception as error:  # of its HTTP library, too, whichever it has
    raise DownloadError(
      f'{repo} at {endpoint}: {clean(error)}. Check the name, HF_TOKEN and the '
      'network; --mirror or HF_ENDPOINT names a mirror.'
    ) from None
  found = []
  for file in info.siblings:
    name = file.rfilename
    if not any(fnmatch.fnmatchcase(name, p) for p in patterns):
      continue
    local_path(pathlib.Path(), name)  # refuses what would lead elsewhere
    found.append(
      Remote(
        name,
        huggingface_hub.hf_hub_url(
          repo, name, revision=info.sha, repo_type=repo_type, endpoint=endpoint
        ),
        file.size,
        f'sha256:{file.lfs.sha256}' if file.lfs else f'git:{file.blob_id}',
      )
    )
  for pattern in patterns:
    if not any(fnmatch.fnmatchcase(r.name, pattern) for r in found):
      raise DownloadError(
        f'{repo} at {revision}: no file matches {pattern!r}; it has '
        f'{clean(", ".join(f.rfilename for f in info.siblings[:20]))}'
      )
  return sorted(found, key=lambda r: r.name)


def _token(endpoint: str) -> bool | None:
  """The user's token (None), but never in clear over a network (False)."""
  return None if endpoint.startswith('https:') else False


@contextlib.contextmanager
def record_of(out: pathlib.Path, source: str) -> Iterator[pathlib.Path]:
  """Where OUT/.downloads records what of one source is there; one at a time."""
  folder = out / '.downloads'
  folder.mkdir(parents=True, exist_ok=True)
  name = hashlib.sha256(source.encode()).hexdigest()[:16]
  with open(folder / f'{name}.lock', 'w') as lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
      raise DownloadError(
        f'{out}: another process downloads {clean(source)} there. Wait for it.'
      ) from None
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
  """Fetches the files of one source; see the module.

  Args:
    source: what is asked for, to tell one record from another.
    out: the folder.
    remotes: lists the files; called only where something is missing.
    headers: of each request.
    join: the file that the files, in the order of their names, are parts of.
    keep_parts: False removes them once they are joined.

  Returns:
    The files, or the joined one.
  """
  with record_of(out, source) as record:
    done = (files.read_json(record) or {}).get('done')
    if done and all(
      p.exists() and p.stat().st_size == size
      for p, size in ((local_path(out, n), s) for n, s in done.items())
    ):
      return [local_path(out, name) for name in done]
    paths = [fetch(remote, out, headers) for remote in remotes()]
    kept = paths
    if join:
      target = local_path(out, join)
      files.join(paths, target)
      kept = [target] + (paths if keep_parts else [])
    files.write_json(
      record,
      {
        'source': source,
        'done': {p.relative_to(out).as_posix(): p.stat().st_size for p in kept},
      },
    )
    if join and not keep_parts:
      for path in paths:
        path.unlink()
    return kept[:1] if join else kept


def define_flags() -> None:
  flags.DEFINE_enum(
    'bundle',
    None,
    sorted(BUNDLES),
    "A part of Search-R1's data: the corpus wiki-18 (gzipped, about 5 GB); "
    'its e5-base-v2 vectors as a FAISS index, Flat (64.6 GB) or HNSW64, parts '
    'joined; a Lucene index, for its own server (ours builds bm25 itself).',
  )
  flags.DEFINE_string('repo', None, 'A repository of the hub: OWNER/NAME.')
  flags.DEFINE_enum('repo_type', 'dataset', ['dataset', 'model'], 'Its type.')
  flags.DEFINE_multi_string(
    'file', ['*'], 'Files of it, * as in a shell; may be given many times.'
  )
  flags.DEFINE_string('revision', 'main', 'Branch, tag or commit of it.')
  flags.DEFINE_string(
    'mirror', None, 'Base URL instead of HF_ENDPOINT. A token goes to https.'
  )
  flags.DEFINE_string('join', None, 'Joins the files, by name, as this one.')
  flags.DEFINE_bool('keep_parts', True, 'Keeps the parts that were joined.')
  flags.DEFINE_string('out', None, 'The folder.', required=True)


def run(f: flags.FlagValues) -> list[pathlib.Path]:
  """Does what the flags say.

  Raises:
    DownloadError: it cannot be done.
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
  logging.getLogger('httpx').setLevel(logging.WARNING)  # a line a request
  try:
    for path in run(flags.FLAGS):
      print(path)
  except (
    DownloadError,
    files.FilesError,
    OSError,
    httpx.HTTPError,
    httpx.InvalidURL,
  ) as error:
    print(f'retrieval.download: error: {error}', file=sys.stderr)
    return 1
  return 0


if __name__ == '__main__':
  define_flags()
  absl_app.run(main)
