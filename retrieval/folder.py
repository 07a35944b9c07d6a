"""An index folder: a corpus, its vectors, and the indexes built over them.

  FOLDER/manifest.json   what is in it, see below; written last
  FOLDER/corpus.arrow    the passages, see `store`
  FOLDER/vectors.npy     [P, D] float32 or float16, of every dense index
  FOLDER/bm25/           see `bm25`
  FOLDER/faiss/*.index   one for each factory string; of IVF built here also
                         *.index.ivfdata

The manifest: {"format": 1, "corpus": {"count", "sha256", "source"}, "vectors":
null or {"dim", "dtype", "sample_sha256", "encoder": Encoder.parameters},
"indexes": {name: parameters}}. Names are bm25, dense_jax, dense_faiss:FACTORY
and milvus, whose collection is in a Milvus server. Those of FAISS state
"sample_sha256" too, and how they are searched unless the flags say otherwise:
"nprobe", "ef_search".

An index over another corpus, or asked in another encoder's space, answers
with the wrong passages and nobody sees it: what does not match is refused.
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
from retrieval.store import open_store

FORMAT = 1
KINDS = ('bm25', 'dense_jax', 'dense_faiss:FACTORY', 'milvus')
# What the manifest must hold: field -> its type.
_FIELDS = {
  'corpus': {'count': int, 'sha256': str, 'source': str},
  'vectors': {'dim': int, 'dtype': str, 'sample_sha256': str, 'encoder': dict},
}
# Settings of an Encoder that its parameters state.
_SETTINGS = (
  'family',
  'pooling',
  'normalise',
  'query_prefix',
  'passage_prefix',
  'passage_length',
)


class FolderError(ValueError):
  """The folder or index cannot be used; names the field and the mend."""


@dataclasses.dataclass(frozen=True)
class IndexFolder:
  """An index folder whose parts fit each other."""

  path: pathlib.Path
  manifest: dict[str, Any]
  corpus: Corpus  # memory-mapped
  vectors: np.ndarray | None  # [P, D], memory-mapped


def faiss_path(folder: str | os.PathLike, factory: str) -> pathlib.Path:
  """The file of a FAISS index, by its factory string."""
  return pathlib.Path(folder, 'faiss', f'{factory.replace(",", "_")}.index')


def write_manifest(
  path: str | os.PathLike, manifest: Mapping[str, Any]
) -> None:
  """Writes manifest.json of the folder `path`, at once or not at all."""
  files.write_json(pathlib.Path(path, 'manifest.json'), manifest)


def open_folder(path: str | os.PathLike) -> IndexFolder:
  """Opens an index folder, and checks that its parts fit each other.

  Raises:
    FolderError: there is no manifest, it is of another format, or it differs
      from the corpus or the vectors; says in which field.
    CorpusError, files.FilesError: corpus.arrow or the manifest is damaged.
  """
  path = pathlib.Path(path)
  manifest = files.read_json(path / 'manifest.json')
  if manifest is None:
    raise FolderError(
      f'{path}: no index folder (no manifest.json). Make one: '
      f'{_command("FILE", path, "bm25")}'
    )
  _check_manifest(path, manifest)
  corpus, stated = open_store(path / 'corpus.arrow'), manifest['corpus']
  _require_same(
    path,
    'corpus.arrow is not the corpus of manifest.json',
    'corpus.',
    {'count': stated['count'], 'sha256': stated['sha256']},
    {'count': len(corpus), 'sha256': corpus.sha256},
  )
  vectors = None
  if stated := manifest['vectors']:
    vectors = open_vectors(path, stated, len(corpus))
  return IndexFolder(path, manifest, corpus, vectors)


def open_vectors(
  folder: pathlib.Path, stated: Mapping[str, Any], count: int
) -> np.ndarray:
  """vectors.npy, [P, D], memory-mapped.

  Args:
    folder: of the index.
    stated: what the manifest says of them.
    count: P.

  Raises:
    FolderError: they are others, absent or damaged.
  """
  file = folder / 'vectors.npy'
  vectors = _vectors(file)
  _require_same(
    folder,
    'vectors.npy is not that of manifest.json',
    'vectors.',
    {
      'shape': [count, stated['dim']],
      'dtype': stated['dtype'],
      'sample_sha256': stated['sample_sha256'],
    },
    {
      'shape': list(vectors.shape),
      'dtype': str(vectors.dtype),
      'sample_sha256': files.sample_sha256(file),
    },
  )
  return vectors


def open_index(
  folder: IndexFolder, name: str, *, encoder: Any = None, **options: Any
) -> Index:
  """Opens an index of the folder.

  Args:
    folder: see `open_folder`.
    name: bm25, dense_jax, dense_faiss:FACTORY or milvus.
    encoder: of the dense ones: an `encoder.Encoder`, or the folder of a
      model, used as the manifest says.
    options: of the index: precision (dense_jax), nprobe or ef_search
      (dense_faiss), uri (milvus), ...; k1, b, stemmer and stop_words of bm25
      were settled when it was built and can only be confirmed.

  Raises:
    FolderError: the folder has no such index, or it does not fit its corpus,
      the encoder or the options; says in which field.
  """
  kind, _, factory = name.partition(':')
  path, indexes = folder.path, folder.manifest['indexes']
  _require_index(folder, name)
  if kind == 'bm25':
    from retrieval.bm25 import BM25Index

    index = BM25Index.open(path / 'bm25')
    asked = {**index.parameters, **indexes[name], **options}
    _require_same(
      path, 'bm25 was built otherwise', 'bm25.', asked, index.parameters
    )
  else:
    encoder = open_encoder(folder, name, encoder)
    if kind == 'dense_jax':
      from retrieval.dense_jax import DenseJax

      index = DenseJax(folder.vectors, encoder, **options)
    elif kind == 'dense_faiss':
      from retrieval.dense_faiss import DenseFaiss

      stated = indexes[name]
      file = faiss_path(path, factory)
      usual = {k: stated[k] for k in ('nprobe', 'ef_search') if k in stated}
      index = DenseFaiss(file, encoder, **usual | options)
      _require_same(
        path,
        f'faiss/{file.name} is not that of manifest.json',
        f'{name}.',
        {'sample_sha256': stated.get('sample_sha256')},
        {'sample_sha256': index.parameters['sample_sha256']},
      )
    else:
      from retrieval.milvus import Milvus

      stated = indexes[name]
      uri = options.pop('uri', None)
      if not uri and os.environ.get('MILVUS_TOKEN') and 'uri' in stated:
        raise FolderError(
          f'{path}: manifest.json, which may come from anywhere, names the '
          f'server {stated["uri"]!a}. MILVUS_TOKEN is set: say yourself where '
          'it may be sent (--milvus_uri).'
        )
      uri = uri or stated.get('uri', '')
      collection = options.pop('collection', stated['collection'])
      index = Milvus(uri, collection, encoder, **options)
  _require_same(
    path,
    f'{name} is not an index over corpus.arrow',
    'corpus.',
    {'count': len(folder.corpus)},
    {'count': len(index)},
  )
  return index


def _require_index(folder: IndexFolder, name: str) -> None:
  there = dict.fromkeys(folder.manifest['indexes'])
  if folder.vectors is not None:
    there['dense_jax'] = None  # needs nothing else
  if name not in there:
    raise FolderError(
      f'{folder.path}: no index {name!r}; there are: '
      f'{", ".join(map(ascii, there)) or "none"}. '
      f'Names are {", ".join(KINDS)}. Make it: '
      + _command(folder.manifest['corpus']['source'], folder.path, name)
    )


def stated_encoder(folder: IndexFolder, name: str) -> dict[str, Any] | None:
  """What the manifest says of the encoder behind an index."""
  stated = folder.manifest['indexes'].get(name, {}).get('encoder')
  return stated or (folder.manifest['vectors'] or {}).get('encoder')


def open_encoder(
  folder: IndexFolder, name: str, encoder: Any, **options: Any
) -> Any:
  """The query encoder of an index: of the model that made its vectors.

  Args:
    folder: see `open_folder`.
    name: of the index.
    encoder: the folder of the model, or an encoder that is there already.
    options: of one that is opened: dtype, query_length.

  Raises:
    FolderError: there is no such index, or it is not that model.
  """
  _require_index(folder, name)
  stated = stated_encoder(folder, name)
  if not stated:
    raise FolderError(
      f'{folder.path}: manifest.json does not say which encoder made {name}. '
      'Adopt it again: python -m retrieval.build_index --adopt=FILE ...'
    )
  if encoder is None:
    raise FolderError(
      f'{folder.path}: {name} needs an encoder for queries: give the folder '
      f'of the {stated.get("family", "same")} model that made its vectors '
      '(--encoder)'
    )
  if isinstance(encoder, str | os.PathLike):
    from retrieval.encoder import Encoder

    settings = {key: stated[key] for key in _SETTINGS if key in stated}
    encoder = Encoder(encoder, **settings, **options)
  _require_same(
    folder.path,
    f'{name} was made with another encoder',
    'encoder.',
    stated,
    dict(encoder.parameters),
  )
  return encoder


def _check_manifest(path: pathlib.Path, manifest: dict[str, Any]) -> None:
  file, mend = path / 'manifest.json', 'Build the folder again.'
  if manifest.get('format') != FORMAT:
    raise FolderError(
      f'{file}: format is {manifest.get("format")!r}, this version reads '
      f'{FORMAT}. {mend}'
    )
  indexes = manifest.get('indexes')
  if not isinstance(indexes, dict) or not all(
    isinstance(about, dict) for about in indexes.values()
  ):
    raise FolderError(f'{file}: indexes is no object of objects. {mend}')
  for part, fields in _FIELDS.items():
    about = manifest.get(part, ())
    if part == 'vectors' and about is None:
      continue
    for field, kind in fields.items():
      if not isinstance(about, dict) or type(about.get(field)) is not kind:
        raise FolderError(
          f'{file}: {part}.{field} is not of type {kind.__name__}. {mend}'
        )


def _vectors(path: pathlib.Path) -> np.ndarray:
  mend = 'Write it again: python -m retrieval.build_index --restart ...'
  try:
    found = np.load(path, mmap_mode='r')
    extra = path.stat().st_size - found.offset - found.nbytes
  except (OSError, EOFError, ValueError) as error:
    raise FolderError(
      f'{path}: absent, cut short or damaged ({error}). {mend}'
    ) from None
  if extra or not found.flags.c_contiguous:
    raise FolderError(
      f'{path}: {extra} bytes too many, or not in C order. {mend}'
    )
  return found


def _require_same(
  path: pathlib.Path, what: str, prefix: str, stated: Mapping, found: Mapping
) -> None:
  if differ := files.differences(stated, found, prefix):
    raise FolderError(
      f'{path}: {what}: {"; ".join(differ)}. Use what it was built with, or '
      'build it again.'
    )


def _command(source: str, path: pathlib.Path, name: str) -> str:
  # The source is told by the manifest, which may come from anywhere.
  source = source if source.isprintable() else 'FILE'
  return 'python -m retrieval.build_index ' + shlex.join(
    [f'--corpus={source}', f'--out={path}', f'--index={name}']
  )
