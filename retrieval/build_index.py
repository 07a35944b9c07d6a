"""Builds an index folder over a corpus.

  python -m retrieval.build_index --corpus=corpus.jsonl.gz --out=INDEX \\
    --index=bm25 --index=dense_faiss:HNSW64 --encoder=path/to/e5-base-v2

After a kill, the same command continues the work. With a further --index it
builds that index from the existing vectors; --corpus may then be omitted. With
--adopt=FILE the vectors come from an existing index or saved embeddings: see
`retrieval.index.adopt`.

Indexes: bm25, dense_jax, dense_faiss:FACTORY (Flat, HNSW64, "IVF4096,Flat",
"IVF4096,PQ64", ...), milvus.
"""

from collections.abc import Callable, Sequence
import contextlib
import functools
import pathlib
import shutil
from typing import Any

from absl import app as absl_app
from absl import flags
import numpy as np

from retrieval import files
from retrieval.corpus import Corpus, CorpusError, Digest, iter_documents
from retrieval.index import bm25 as bm25_lib
from retrieval.index import folder as folders
from retrieval.index import vectors
from retrieval.index.folder import FORMAT, KINDS, SETTINGS
from retrieval.index.store import open_store, write_store

_OWN = """manifest.json corpus.arrow vectors.npy vectors.npy.part vectors.json
  adopted.joined bm25 faiss"""  # what --restart removes
# Flags that are keywords of Encoder.
_ENCODER = (*SETTINGS, 'dtype', 'query_length', 'batch')
_VECTORS = """Type of vectors.npy, P x D x 4 or 2 bytes; default: float32, or
with --adopt as stored."""


class Folder:
  """An index folder during a build; manifest.json lists the complete parts."""

  def __init__(self, out: files.PathLike, *, restart: bool = False):
    self.path = pathlib.Path(out)
    self.path.mkdir(parents=True, exist_ok=True)
    self._lock = open(self.path / '.lock', 'w')  # noqa: SIM115, until the end
    problem = f'{self.path}: another build uses this folder. Wait for it.'
    files.lock(self._lock, files.FilesError, problem)
    if restart:
      self._discard()
    self.manifest = files.read_json(self.path / 'manifest.json')

  def close(self) -> None:
    """Releases the lock of the folder."""
    self._lock.close()

  def _discard(self) -> None:
    # bm25/ and faiss/ of another folder may hold anything.
    there = {path.name for path in self.path.iterdir()} - {'.lock'}
    if there and 'corpus.arrow' not in there:
      problem = 'is not an index folder to discard: it has no corpus.arrow'
      raise files.FilesError(f'{self.path}: {problem}. Empty it yourself.')
    for name in _OWN.split():
      path = self.path / name
      if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
      else:
        path.unlink(missing_ok=True)

  def open_corpus(self, source: str | None) -> Corpus:
    """Stores the corpus, or checks that it is the stored one.

    Raises:
      CorpusError: the source is invalid or differs from the stored corpus.
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
    if self.manifest is None:
      about = {**corpus.identity, 'source': source or str(store)}
      self.manifest = {'format': FORMAT, 'corpus': about}
      self.manifest |= {'vectors': None, 'indexes': {}}
    folders.check_corpus(self.path, self.manifest, corpus)
    return corpus

  def add_vectors(self, found: Any, encoder: dict[str, Any]) -> None:
    about = {'dim': found.shape[1], 'dtype': str(found.dtype)}
    sample = files.sample_sha256(self.path / 'vectors.npy')
    about |= {'sample_sha256': sample, 'encoder': encoder}
    self.manifest['vectors'] = about
    self.save()

  def add_faiss(self, factory: str, **about: Any) -> None:
    """Adds an existing index file, with its search options."""
    from retrieval.index.dense_faiss import DenseFaiss

    found = DenseFaiss(folders.faiss_path(self.path, factory), None).parameters
    stated = ('sample_sha256', 'nprobe', 'ef_search')
    stated = {k: found[k] for k in stated if found[k]}
    about = {'factory': factory, **stated, **about}
    self.manifest['indexes'][f'dense_faiss:{factory}'] = about
    self.save()

  def save(self) -> None:
    files.write_json(self.path / 'manifest.json', self.manifest)


_say = functools.partial(files.say, 'retrieval.build_index')


def _check_same(source: str, corpus: Corpus, out: pathlib.Path) -> None:
  digest = Digest()
  for doc in iter_documents(source):
    digest.update(doc)
  if (found := digest.hexdigest()) != corpus.sha256:
    fix = 'Use another --out, or --restart.'
    raise CorpusError(f'{source}: is not the corpus in {out} ({found}). {fix}')


def check_names(names: Sequence[str]) -> None:
  """Checks the names of indexes, before hours are spent on vectors.

  Raises:
    ValueError: an unknown name.
  """
  for name in names:
    kind, colon, factory = name.partition(':')
    if not (factory if kind == 'dense_faiss' else not colon and kind in KINDS):
      raise ValueError(f'--index={name}: not one of {", ".join(KINDS)}')


def check_factories(names: Sequence[str], dim: int) -> None:
  """Checks FAISS factory strings, which must suit the dimension."""
  factories = [n.partition(':')[2] for n in names if n.startswith('dense_f')]
  if factories:
    import faiss
  for factory in factories:
    fix = 'Use Flat, HNSW64, "IVF4096,Flat" or "IVF4096,PQ64".'
    problem = f'--index={factory}: no such index of {dim} dimensions. {fix}'
    with files.convert(RuntimeError, ValueError, problem):
      faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)


def build_indexes(
  folder: Folder,
  corpus: Corpus,
  names: Sequence[str],
  get_vectors: Callable[[], np.ndarray],
  bm25: dict[str, Any],
  uri: str | None = None,
  collection: str = 'passages',
) -> None:
  """Builds the missing indexes and adds each to the manifest."""
  indexes = folder.manifest['indexes']
  for name in names:
    kind, _, factory = name.partition(':')
    if name in indexes:
      if kind == 'bm25':
        what = 'its bm25 was built otherwise'
        folders.require_same_parts(folder.path, what, '', indexes[name], bm25)
      continue
    _say(f'builds {name}')
    # Before the import of a library, so that its errors come first.
    encoded = None if kind == 'bm25' else get_vectors()
    if kind == 'bm25':
      place = folder.path / 'bm25'
      index = bm25_lib.BM25Index.build(corpus.contents, place, **bm25)
      indexes[name] = dict(index.parameters)
    elif kind == 'dense_faiss':
      from retrieval.index import dense_faiss

      final = folders.faiss_path(folder.path, factory)
      final.parent.mkdir(exist_ok=True)
      identity = {'corpus': corpus.sha256, **folder.manifest['vectors']}
      dense_faiss.build(encoded, factory, final, identity=identity)
      folder.add_faiss(factory)
    elif kind == 'milvus':
      from retrieval.index import milvus

      milvus.build(encoded, uri, collection)
      indexes[name] = {'collection': collection, 'uri': uri}
    else:
      indexes[name] = {}
    folder.save()


def run(f: flags.FlagValues) -> None:
  """Builds what the flags name.

  Raises:
    ValueError, RuntimeError, OSError: the build failed; the message says why
      and how to fix it.
  """
  check_names(f.index)
  if 'milvus' in f.index and not f.milvus_uri:
    raise ValueError('--index=milvus needs --milvus_uri=http://HOST:19530')
  with contextlib.closing(Folder(f.out, restart=f.restart)) as folder:
    _fill(f, folder)
  count = folder.manifest['corpus']['count']
  made = ', '.join(folder.manifest['indexes']) or 'no index'
  _say(f'{folder.path}: {count} passages, {made}')


def _fill(f: flags.FlagValues, folder: Folder) -> None:
  corpus = folder.open_corpus(f.corpus)

  def make_encoder(**settings: Any) -> Any:
    if f.encoder is None:
      raise ValueError('--encoder is missing: dense indexes need one')
    from retrieval.index.encoder import Encoder

    given = {name: getattr(f, name) for name in _ENCODER} | settings
    given = {k: v for k, v in given.items() if v is not None}
    return Encoder(f.encoder, **given)

  def get_vectors() -> np.ndarray:
    stated = folder.manifest['vectors']
    if stated and f.encoder is None and not f.vectors:
      return folders.open_vectors(folder.path, stated, len(corpus))
    encoder = make_encoder()
    check_factories(f.index, encoder.dim)
    dtype = f.vectors or (stated or {}).get('dtype', vectors.DTYPES[0])
    options = {'block': f.block, 'dtype': dtype}
    encoded = vectors.encode(corpus, encoder, folder.path, **options)
    folder.add_vectors(encoded, encoder.parameters)
    return encoded

  if f.adopt:
    from retrieval.index.adopt import adopt

    where = make_encoder, folder.path
    stored, encoder = adopt(f.adopt, corpus, *where, f.vectors, f.sample)
    if stored.exact:
      encoded = vectors.open_vectors(folder.path)
      folder.add_vectors(encoded, encoder.parameters)
    if stored.factory:
      about = {'adopted': [*map(str, f.adopt)], 'encoder': encoder.parameters}
      folder.add_faiss(stored.factory, **about)
  encoded, bm25 = functools.cache(get_vectors), bm25_lib.options(f)
  milvus = f.milvus_uri, f.milvus_collection
  build_indexes(folder, corpus, f.index, encoded, bm25, *milvus)
  folder.save()


def define_flags() -> None:
  text, number = flags.DEFINE_string, flags.DEFINE_integer
  several = flags.DEFINE_multi_string
  text('out', None, 'The index folder.', required=True)
  text('corpus', None, 'JSONL, JSONL.gz, Parquet, or hf:NAME of a data set.')
  several('index', [], f'{", ".join(KINDS)}; may be repeated.')
  text('encoder', None, 'Folder of the model, for dense indexes.')
  flags.DEFINE_enum('vectors', None, vectors.DTYPES, _VECTORS)
  number('block', 8192, 'Passages between two records of progress.', 1)
  flags.DEFINE_bool('restart', False, 'Discards the content of --out.')
  several('adopt', [], 'FAISS index, .npy or raw embeddings, or its parts.')
  number('sample', 64, 'Passages that check --adopt.', 8)
  text('family', None, 'Family of the encoder, if not known from its name.')
  text('dtype', None, 'Arithmetic of the encoder: float32, bfloat16.')
  text('pooling', None, "mean or cls, instead of the family's.")
  flags.DEFINE_bool('normalise', None, 'Whether vectors get length 1.')
  text('query_prefix', None, "Instead of the family's.")
  text('passage_prefix', None, "Instead of the family's.")
  number('query_length', None, 'Tokens of a query.')
  number('passage_length', None, 'Tokens of a passage.')
  number('batch', None, 'Most tokens of a batch.')
  text('milvus_uri', None, 'URL of the Milvus server of the index milvus.')
  text('milvus_collection', 'passages', 'Name of the collection in Milvus.')
  bm25_lib.define_flags()


def main(argv: Sequence[str]) -> int:
  return files.run_command('retrieval.build_index', argv, run, flags.FLAGS)


if __name__ == '__main__':
  define_flags()
  absl_app.run(main)
