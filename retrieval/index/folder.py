"""An index folder: a corpus, its vectors, and the indexes over them.

  FOLDER/manifest.json   the content, see below; written last
  FOLDER/corpus.arrow    the passages, see `store`
  FOLDER/vectors.npy     [P, D] float32 or float16, of every dense index
  FOLDER/bm25/           see `bm25`
  FOLDER/faiss/*.index   one for each factory string; for IVF indexes built
                         here also *.index.ivfdata

The manifest: {"format": 1, "corpus": {"count", "sha256", "source"}, "vectors":
null or {"dim", "dtype", "sample_sha256", "encoder": Encoder.parameters},
"indexes": {name: parameters}}. Names are bm25, dense_jax, dense_faiss:FACTORY
and milvus, whose collection is in a Milvus server. Those of FAISS also have
"sample_sha256", and the default search options "nprobe" and "ef_search".

An index over another corpus, or searched with another encoder, would silently
return the wrong passages. So parts that do not match are refused.
"""

from collections.abc import Mapping
import dataclasses
import os
import pathlib
import shlex
from typing import Any

import numpy as np

from retrieval import files
from retrieval.core import Index
from retrieval.corpus import Corpus
from retrieval.index.store import open_store

FORMAT = 1
KINDS = ('bm25', 'dense_jax', 'dense_faiss:FACTORY', 'milvus')
# Keywords of an Encoder that its parameters include.
SETTINGS = """family pooling normalise query_prefix passage_prefix
  passage_length""".split()


class FolderError(ValueError):
  """The folder or index cannot be used; names the field and the fix."""


@dataclasses.dataclass(frozen=True)
class IndexFolder:
  """An index folder whose parts match."""

  path: pathlib.Path
  manifest: dict[str, Any]
  corpus: Corpus  # memory-mapped
  vectors: np.ndarray | None  # [P, D], memory-mapped


def faiss_path(folder: files.PathLike, factory: str) -> pathlib.Path:
  """The file of a FAISS index, by its factory string."""
  return pathlib.Path(folder, 'faiss', f'{factory.replace(",", "_")}.index')


def open_folder(path: files.PathLike) -> IndexFolder:
  """Opens an index folder and checks that its parts match.

  Raises:
    FolderError: there is no manifest, it has another format, or it differs
      from the corpus or the vectors; names the field.
    CorpusError, files.FilesError: corpus.arrow or the manifest is damaged.
  """
  path = pathlib.Path(path)
  manifest = files.read_json(path / 'manifest.json')
  if manifest is None:
    fix = f'Make one: {_command("FILE", path, "bm25")}'
    raise FolderError(f'{path}: no index folder (no manifest.json). {fix}')
  file = path / 'manifest.json'
  if (form := manifest.get('format')) != FORMAT:
    problem = f'format is {form!r}, this version reads {FORMAT}'
    raise FolderError(f'{file}: {problem}. Build the folder again.')
  corpus, vectors = open_store(path / 'corpus.arrow'), None
  problem = f'{file}: is damaged ({{}}). Build the folder again.'
  damaged = (AttributeError, KeyError, TypeError)
  with files.convert(damaged, FolderError, problem):
    check_corpus(path, manifest, corpus)
    if stated := manifest['vectors']:
      vectors = open_vectors(path, stated, len(corpus))
    return IndexFolder(path, manifest, corpus, vectors)


def check_corpus(path: pathlib.Path, manifest: Mapping, corpus: Corpus) -> None:
  """Raises FolderError if the corpus is not the one of the manifest."""
  what = 'corpus.arrow is not the corpus of manifest.json'
  require_same_parts(path, what, 'corpus.', manifest['corpus'], corpus.identity)


def open_vectors(
  folder: pathlib.Path, stated: Mapping[str, Any], count: int
) -> np.ndarray:
  """vectors.npy, [P, D], memory-mapped.

  Args:
    folder: of the index.
    stated: their entry of the manifest.
    count: P.

  Raises:
    FolderError: the file differs from its entry, or is absent or damaged.
  """
  path = folder / 'vectors.npy'
  fix = 'Write it again: python -m retrieval.build_index --restart ...'
  problem = f'{path}: absent, cut short or damaged ({{}}). {fix}'
  with files.convert((OSError, EOFError, ValueError), FolderError, problem):
    vectors = np.load(path, mmap_mode='r')
    extra = path.stat().st_size - vectors.offset - vectors.nbytes
    if extra or not vectors.flags.c_contiguous:
      raise ValueError(f'{extra} bytes too many, or not in C order')
  found = {'shape': list(vectors.shape), 'dtype': str(vectors.dtype)}
  found['sample_sha256'] = files.sample_sha256(path)
  stated = {**stated, 'shape': [count, stated['dim']]}
  what = 'vectors.npy is not that of manifest.json'
  require_same_parts(folder, what, 'vectors.', stated, found)
  return vectors


def open_index(
  folder: IndexFolder, name: str, *, encoder: Any = None, **options: Any
) -> Index:
  """Opens an index of the folder.

  Args:
    folder: see `open_folder`.
    name: bm25, dense_jax, dense_faiss:FACTORY or milvus.
    encoder: of dense indexes: an `encoder.Encoder`, or the folder of a model,
      used according to the manifest.
    options: of the index: precision (dense_jax), nprobe or ef_search
      (dense_faiss), uri (milvus), ...; k1, b, analyzer, stemmer and stop_words
      of bm25 must be those of the build.

  Raises:
    FolderError: the folder has no such index, or it does not match its corpus,
      the encoder or the options; names the field.
  """
  kind, _, factory = name.partition(':')
  path, stated = folder.path, _stated(folder, name)
  if kind != 'bm25':
    encoder = open_encoder(folder, name, encoder)
  if kind == 'bm25':
    from retrieval.index.bm25 import BM25Index

    index = BM25Index.open(path / 'bm25')
    asked = {**index.parameters, **stated, **options}
    what = 'bm25 was built otherwise'
    require_same_parts(path, what, 'bm25.', asked, index.parameters)
  elif kind == 'dense_jax':
    from retrieval.index.dense_jax import DenseJax

    index = DenseJax(folder.vectors, encoder, **options)
  elif kind == 'dense_faiss':
    from retrieval.index.dense_faiss import DenseFaiss

    file = faiss_path(path, factory)
    usual = {k: stated[k] for k in ('nprobe', 'ef_search') if k in stated}
    index = DenseFaiss(file, encoder, **usual | options)
    what = f'faiss/{file.name} is not that of manifest.json'
    sample = {'sample_sha256': index.parameters['sample_sha256']}
    require_same_parts(path, what, f'{name}.', stated, sample)
  else:
    from retrieval.index.milvus import Milvus

    uri = options.pop('uri', None)
    if not uri and os.environ.get('MILVUS_TOKEN') and 'uri' in stated:
      problem = f'the server {stated["uri"]!a} is from manifest.json'
      fix = 'Give --milvus_uri to send it MILVUS_TOKEN.'
      raise FolderError(f'{path}: {problem}, which is not trusted. {fix}')
    found = {'uri': uri or stated['uri'], 'collection': stated['collection']}
    index = Milvus(**found | options, encoder=encoder)
  what, count = f'{name} is not an index over corpus.arrow', len(folder.corpus)
  found = {'count': len(index)}
  require_same_parts(path, what, 'corpus.', {'count': count}, found)
  return index


def _stated(folder: IndexFolder, name: str) -> dict[str, Any]:
  """What the manifest says of an index; FolderError if there is none."""
  there = dict(folder.manifest['indexes'])
  if folder.vectors is not None:
    there.setdefault('dense_jax', {})  # needs nothing else
  if name not in there:
    listed = ', '.join(map(ascii, there)) or 'none'
    command = _command(folder.manifest['corpus']['source'], folder.path, name)
    fix = f'Names are {", ".join(KINDS)}. Make it: {command}'
    problem = f'no index {name!r}; there are: {listed}'
    raise FolderError(f'{folder.path}: {problem}. {fix}')
  return there[name]


def stated_encoder(folder: IndexFolder, name: str) -> dict[str, Any] | None:
  """The parameters of the encoder of an index, by the manifest."""
  vectors = folder.manifest['vectors'] or {}
  return _stated(folder, name).get('encoder') or vectors.get('encoder')


def open_encoder(folder: IndexFolder, name: str, encoder, **options) -> Any:
  """The query encoder of an index: of the model that made its vectors.

  Args:
    folder: see `open_folder`.
    name: of the index.
    encoder: the folder of the model, or an open encoder.
    options: for opening it: dtype, query_length.

  Raises:
    FolderError: there is no such index, or it is another model.
  """
  stated = stated_encoder(folder, name)
  if not stated:
    problem = f'manifest.json does not say which encoder made {name}'
    raise FolderError(f'{folder.path}: {problem}. Adopt it again (--adopt).')
  if encoder is None:
    fix = f'give the {stated.get("family", "same")} model that made its vectors'
    problem = f'{name} needs an encoder for queries'
    raise FolderError(f'{folder.path}: {problem}: {fix} (--encoder)')
  if isinstance(encoder, str | os.PathLike):
    from retrieval.index.encoder import Encoder

    settings = {key: stated[key] for key in SETTINGS if key in stated}
    encoder = Encoder(encoder, **settings, **options)
  what, found = f'{name} was made with another encoder', encoder.parameters
  require_same_parts(folder.path, what, 'encoder.', stated, found)
  return encoder


def require_same_parts(
  path: pathlib.Path, what: str, prefix: str, stated: Mapping, found: Mapping
) -> None:
  """Raises FolderError unless all values of `found` are as stated."""
  stated = {key: stated.get(key) for key in found}
  if differ := '; '.join(files.differences(stated, found, prefix)):
    fix = 'Use what it was built with, or build it again.'
    raise FolderError(f'{path}: {what}: {differ}. {fix}')


def _command(source: str, path: pathlib.Path, name: str) -> str:
  # The source comes from the manifest, which is not trusted.
  source = source if source.isprintable() else 'FILE'
  return 'python -m retrieval.build_index ' + shlex.join(
    [f'--corpus={source}', f'--out={path}', f'--index={name}']
  )
