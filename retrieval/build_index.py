"""Builds an index folder over a corpus.

  python -m retrieval.build_index --corpus=corpus.jsonl.gz --out=INDEX \\
    --index=bm25 --index=dense_faiss:HNSW64 --encoder=path/to/e5-base-v2

Killed anywhere, the same command goes on where it was; given one --index
more, it builds that from the vectors that are there. INDEX alone is enough
then: --corpus may be left out. With --adopt=FILE the vectors come from an
index or saved embeddings that exist already: see `retrieval.adopt`.

Indexes: bm25, dense_jax, dense_faiss:FACTORY (Flat, HNSW64, "IVF4096,Flat",
"IVF4096,PQ64", ...), milvus.
"""

from collections.abc import Callable, Sequence
import contextlib
import fcntl
import functools
import os
import pathlib
import shutil
import sys
from typing import Any

from absl import app as absl_app
from absl import flags
import numpy as np

from retrieval import bm25 as bm25_lib
from retrieval import files, vectors
from retrieval.corpus import Corpus, CorpusError, Digest, iter_documents
from retrieval.folder import (
  FORMAT,
  KINDS,
  faiss_path,
  open_vectors,
  write_manifest,
)
from retrieval.store import open_store, write_store

_OWN = (  # what --restart removes
  'manifest.json',
  'corpus.arrow',
  'vectors.npy',
  'vectors.npy.part',
  'vectors.json',
  'adopted.joined',
  'bm25',
  'faiss',
)
_ENCODER = (  # flags that are keywords of Encoder
  'family',
  'dtype',
  'pooling',
  'normalise',
  'query_prefix',
  'passage_prefix',
  'query_length',
  'passage_length',
  'batch',
)


class Folder:
  """An index folder while it is built; manifest.json tells what is whole."""

  def __init__(self, out: str | os.PathLike, *, restart: bool = False):
    self.path = pathlib.Path(out)
    self.path.mkdir(parents=True, exist_ok=True)
    self._lock = open(self.path / '.lock', 'w')  # noqa: SIM115, until the end
    try:
      fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
      raise files.FilesError(
        f'{self.path}: another build is at work there. Wait until it ends, or '
        'use another --out.'
      ) from None
    if restart:
      self._discard()
    self.manifest: dict[str, Any] | None = files.read_json(
      self.path / 'manifest.json'
    )

  def close(self) -> None:
    """Lets another build have the folder."""
    self._lock.close()

  def _discard(self) -> None:
    # bm25/ and faiss/ of a folder that is none of ours may hold anything.
    if any(p.name != '.lock' for p in self.path.iterdir()) and not (
      (self.path / 'corpus.arrow').exists()
    ):
      raise files.FilesError(
        f'{self.path}: holds no corpus.arrow, so it is no index folder to '
        'discard (--restart). Use another --out, or empty it yourself.'
      )
    for name in _OWN:
      _remove(self.path / name)

  def open_corpus(self, source: str | None) -> Corpus:
    """Stores the corpus, or checks that it is the one that is stored.

    Raises:
      CorpusError: the source is no good or differs from what is stored.
    """
    store = self.path / 'corpus.arrow'
    if not store.exists():
      if source is None:
        raise CorpusError(f'{self.path}: holds no corpus yet. Give --corpus.')
      corpus = write_store(source, store)
    else:
      corpus = open_store(store)
      if source is not None:
        _check_same(source, corpus, self.path)
    about = {'count': len(corpus), 'sha256': corpus.sha256}
    if self.manifest is None:
      self.manifest = {
        'format': FORMAT,
        'corpus': {**about, 'source': source or str(store)},
        'vectors': None,
        'indexes': {},
      }
    stated = {key: self.manifest['corpus'].get(key) for key in about}
    if differ := files.differences(stated, about, 'corpus.'):
      raise CorpusError(
        f'{self.path}: manifest.json and corpus.arrow disagree: '
        f'{"; ".join(differ)}. Use --restart, or another --out.'
      )
    return corpus

  def add_vectors(self, found: Any, encoder: dict[str, Any]) -> None:
    self.manifest['vectors'] = {
      'dim': found.shape[1],
      'dtype': str(found.dtype),
      'sample_sha256': files.sample_sha256(self.path / 'vectors.npy'),
      'encoder': encoder,
    }
    self.save()

  def add_index(self, name: str, parameters: dict[str, Any]) -> None:
    self.manifest['indexes'][name] = parameters
    self.save()

  def add_faiss(self, factory: str, **about: Any) -> None:
    """States an index file that is there, and how it is to be searched."""
    from retrieval.dense_faiss import DenseFaiss

    found = DenseFaiss(faiss_path(self.path, factory), None).parameters
    stated = ('sample_sha256', 'nprobe', 'ef_search')
    self.add_index(
      f'dense_faiss:{factory}',
      {
        'factory': factory,
        **{k: found[k] for k in stated if found[k]},
        **about,
      },
    )

  def save(self) -> None:
    write_manifest(self.path, self.manifest)


def _say(message: str) -> None:
  print(f'retrieval.build_index: {message}', file=sys.stderr, flush=True)


def _remove(path: pathlib.Path) -> None:
  if path.is_dir() and not path.is_symlink():
    shutil.rmtree(path)
  else:
    path.unlink(missing_ok=True)


def _check_same(source: str, corpus: Corpus, out: pathlib.Path) -> None:
  digest = Digest()
  for doc in iter_documents(source):
    digest.update(doc)
  if digest.hexdigest() != corpus.sha256:
    raise CorpusError(
      f'{source}: is not the corpus in {out} (its sha256 is '
      f'{digest.hexdigest()}, there it is {corpus.sha256}). Use another --out, '
      'or --restart to discard what is there.'
    )


def check_names(names: Sequence[str]) -> None:
  """Refuses what could not be built, before hours are spent on vectors.

  Raises:
    ValueError: an unknown name.
  """
  for name in names:
    kind, colon, factory = name.partition(':')
    if not (factory if kind == 'dense_faiss' else not colon and kind in KINDS):
      raise ValueError(f'--index={name}: not one of {", ".join(KINDS)}')


def check_factories(names: Sequence[str], dim: int) -> None:
  """The same for FAISS factory strings, which must suit the dimension."""
  factories = [n.partition(':')[2] for n in names if n.startswith('dense_f')]
  if factories:
    import faiss
  for factory in factories:
    try:
      faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError:
      raise ValueError(
        f'--index=dense_faiss:{factory}: FAISS builds no such index of {dim} '
        'dimensions. Write Flat, HNSW64, "IVF4096,Flat" or "IVF4096,PQ64".'
      ) from None


def build_indexes(
  folder: Folder,
  corpus: Corpus,
  names: Sequence[str],
  get_vectors: Callable[[], np.ndarray],
  bm25: dict[str, Any],
  uri: str | None = None,
  collection: str = 'passages',
) -> None:
  """Builds the indexes that are not there yet, and states each when whole."""
  for name in names:
    kind, _, factory = name.partition(':')
    there = folder.manifest['indexes'].get(name)
    if there is not None and (  # else of an earlier version
      kind != 'dense_faiss' or 'sample_sha256' in there
    ):
      stated = {key: there.get(key) for key in bm25}
      if kind == 'bm25' and (differ := files.differences(stated, bm25)):
        raise ValueError(
          f'{folder.path}: its bm25 was built otherwise: {"; ".join(differ)}. '
          'Use another --out, or --restart.'
        )
      continue
    _say(f'builds {name}')
    parameters: dict[str, Any] = {}
    # Before the import of a library: what is wrong with them is told first.
    found = None if kind == 'bm25' else get_vectors()
    if kind == 'bm25':
      index = bm25_lib.BM25Index.build(
        corpus.contents, folder.path / 'bm25', **bm25
      )
      parameters = dict(index.parameters)
    elif kind == 'dense_faiss':
      from retrieval import dense_faiss

      final = faiss_path(folder.path, factory)
      final.parent.mkdir(exist_ok=True)
      dense_faiss.build(
        found,
        factory,
        final,
        identity={'corpus': corpus.sha256, **folder.manifest['vectors']},
      )
      folder.add_faiss(factory)
      continue
    elif kind == 'milvus':
      from retrieval import milvus

      parameters = {'collection': collection, 'uri': uri}
      milvus.build(found, uri, collection)
    folder.add_index(name, parameters)


def run(f: flags.FlagValues) -> Folder:
  """Does what the flags say.

  Raises:
    ValueError, RuntimeError, OSError: it cannot be done; the message says
      why and what would mend it.
  """
  check_names(f.index)
  if 'milvus' in f.index and not f.milvus_uri:
    raise ValueError('--index=milvus needs --milvus_uri=http://HOST:19530')
  with contextlib.closing(Folder(f.out, restart=f.restart)) as folder:
    _fill(f, folder)
  return folder


def _fill(f: flags.FlagValues, folder: Folder) -> None:
  corpus = folder.open_corpus(f.corpus)

  def make_encoder(**settings: Any) -> Any:
    if f.encoder is None:
      raise ValueError('--encoder is missing: dense indexes need one')
    from retrieval.encoder import Encoder

    given = {name: getattr(f, name) for name in _ENCODER}
    return Encoder(
      f.encoder,
      **{k: v for k, v in {**given, **settings}.items() if v is not None},
    )

  def get_vectors() -> np.ndarray:
    stated = folder.manifest['vectors']
    whole = stated and 'sample_sha256' in stated  # else of an earlier version
    if whole and f.encoder is None and not f.vectors:
      return open_vectors(folder.path, stated, len(corpus))
    encoder = make_encoder()
    check_factories(f.index, encoder.dim)
    found = vectors.encode(
      corpus,
      encoder,
      folder.path,
      block=f.block,
      dtype=f.vectors or (stated or {}).get('dtype', vectors.DTYPES[0]),
    )
    folder.add_vectors(found, encoder.parameters)
    return found

  if f.adopt:
    from retrieval.adopt import adopt

    stored, encoder = adopt(
      f.adopt,
      corpus,
      make_encoder,
      folder.path,
      lambda factory: faiss_path(folder.path, factory),
      dtype=f.vectors,
      sample=f.sample,
    )
    if stored.exact:
      found = vectors.open_vectors(folder.path)
      folder.add_vectors(found, encoder.parameters)
    if stored.factory:
      folder.add_faiss(
        stored.factory,
        adopted=[str(p) for p in f.adopt],
        encoder=encoder.parameters,
      )
  build_indexes(
    folder,
    corpus,
    f.index,
    functools.cache(get_vectors),
    bm25_lib.options(f),
    f.milvus_uri,
    f.milvus_collection,
  )
  folder.save()


def define_flags() -> None:
  flags.DEFINE_string('out', None, 'The index folder.', required=True)
  flags.DEFINE_string(
    'corpus', None, 'JSONL, JSONL.gz, Parquet, or hf:NAME of a data set.'
  )
  flags.DEFINE_multi_string(
    'index', [], 'bm25, dense_jax, dense_faiss:FACTORY or milvus; repeatable.'
  )
  flags.DEFINE_string('encoder', None, 'Folder of the model, for dense ones.')
  flags.DEFINE_enum(
    'vectors',
    None,
    vectors.DTYPES,
    'Numbers of vectors.npy: P x D x 4 bytes or half. float32 if not given; '
    'with --adopt, as it is.',
  )
  flags.DEFINE_integer(
    'block', 8192, 'Passages between two records of progress.', 1
  )
  flags.DEFINE_bool('restart', False, 'Discards what --out holds.')
  flags.DEFINE_multi_string(
    'adopt',
    [],
    'FAISS index, .npy or raw embeddings to take over; its parts '
    'in order, where it has parts.',
  )
  flags.DEFINE_integer('sample', 64, 'Passages to check --adopt with.', 8)
  flags.DEFINE_string('family', None, 'Of the encoder; told from its name.')
  flags.DEFINE_string('dtype', None, 'Of its arithmetic: float32, bfloat16.')
  flags.DEFINE_string('pooling', None, 'mean or cls, instead of its own.')
  flags.DEFINE_bool('normalise', None, 'Vectors of length 1 or as they come.')
  flags.DEFINE_string('query_prefix', None, 'Instead of its own.')
  flags.DEFINE_string('passage_prefix', None, 'Instead of its own.')
  flags.DEFINE_integer('query_length', None, 'Tokens of a query.')
  flags.DEFINE_integer('passage_length', None, 'Tokens of a passage.')
  flags.DEFINE_integer('batch', None, 'Most tokens of a batch.')
  flags.DEFINE_string(
    'milvus_uri', None, 'Of the Milvus server that holds the index milvus.'
  )
  flags.DEFINE_string('milvus_collection', 'passages', 'The name there.')
  bm25_lib.define_flags()


def main(argv: Sequence[str]) -> int:
  if len(argv) > 1:
    _say(f'error: unexpected {argv[1:]}')
    return 2
  try:
    folder = run(flags.FLAGS)
  except (ValueError, RuntimeError, OSError) as error:
    _say(f'error: {error}')
    return 1
  _say(
    f'{folder.path}: {folder.manifest["corpus"]["count"]} passages, '
    f'{", ".join(folder.manifest["indexes"]) or "no index"}'
  )
  return 0


if __name__ == '__main__':
  define_flags()
  absl_app.run(main)
