"""Questions from TensorFlow Datasets, read without TensorFlow.

TFDS stores examples in ArrayRecord files and reads them by index through its
`data_source`; neither that nor `build` imports TensorFlow.
"""

import os
from typing import Any

import numpy as np

from searchrl_jax.data import checks, jsonl
from searchrl_jax.types import Question


def load(
  path: str, split: str, layout='flashrag', n=0, seed=0
) -> list[Question]:
  """Draws n questions of a split, in its order.

  Args:
    path: the prepared folder, with dataset_info.json and ArrayRecord files.
    split: 'train', 'dev[:100]', ...
    layout: of an example; see `jsonl`. `build` writes FlashRAG's.
    n: questions drawn without replacement; 0 = all.
    seed: of the draw.

  Raises:
    DataError: not a prepared folder, an unknown split, or an example of another
      layout.
  """
  import tensorflow_datasets as tfds  # slow to import

  there = os.path.exists(os.path.join(path, 'dataset_info.json'))
  what = f'{path}: there is no dataset_info.json, as in a folder NAME/VERSION'
  checks.require(there, f'{what} that TFDS or data.tfds.build prepared')
  builder = tfds.builder_from_directory(path)
  known = builder.info.splits
  good = split.partition('[')[0] in known
  checks.require(good, f'{path}: no split {split!r}: {", ".join(known)}')
  try:
    rows = builder.as_data_source(split=split)
  except (ValueError, NotImplementedError) as e:  # a TFRecord has no index
    what = f"{str(e)[:300]} (the file_format must be 'array_record')"
    raise checks.DataError(f'{path}: split {split!r}: {what}') from e
  where = f'{path}[{split}]'
  found = ((f'{where} row {i}', _plain(row)) for i, row in enumerate(rows))
  return jsonl.questions(found, where, layout, n=n, seed=seed)


def build(
  jsonl_path: str, folder: str, *, name: str, split: str, layout: str
) -> str:
  """Writes the questions of a JSON-lines file as an ArrayRecord data set.

  Args:
    jsonl_path: read by `jsonl.load`.
    folder: where the data set 'NAME/1.0.0' is written.
    name: of the data set: letters, digits, '_'.
    split: name of the split.
    layout: of the file; see `jsonl`.

  Returns:
    The prepared folder, the `path` of `load`. The order is that of the file;
    the fields are id, question, golden_answers, supporting_ids, source, hops.

  Raises:
    DataError: a bad file or record, or the data set exists already.
  """
  import tensorflow_datasets as tfds

  target = os.path.join(folder, name, '1.0.0')
  there = os.path.exists(target)
  checks.require(not there, f'{target} exists; remove it or change the name')
  text, number = tfds.features.Text(), tfds.features.Scalar(np.int32)
  texts = tfds.features.Sequence(text)
  fields = dict(id=text, question=text, golden_answers=texts)
  fields |= dict(supporting_ids=texts, source=text, hops=number)
  examples = [
    dict(zip(fields, (q.id, q.text, q.answers, q.supporting, q.source, q.hops)))
    for q in jsonl.load(jsonl_path, layout=layout)
  ]

  class Builder(tfds.dataset_builders.AdhocBuilder, skip_registration=True):
    # TFDS 4.9.10 searches the source of a builder through importlib_resources,
    # which it does not require; this builder has no source files.
    code_path = None

    def _info(self):
      info = super()._info()
      # TFDS would look for a public data set of this name, over the network,
      # and leave an empty temporary folder.
      info.initialize_from_bucket = lambda: None
      return info

    def _split_generators(self, dl_manager):
      return {split: enumerate(examples)}  # the base class needs TensorFlow

  builder = Builder(
    name=name,
    version='1.0.0',
    features=tfds.features.FeaturesDict(fields),
    split_datasets={},
    data_dir=folder,
    disable_shuffling=True,
    file_format='array_record',
  )
  config = tfds.download.DownloadConfig(try_download_gcs=False)
  builder.download_and_prepare(download_config=config)
  return target


def _plain(value: Any) -> Any:
  """Converts bytes to str and arrays to lists, recursively."""
  if hasattr(value, 'tolist'):  # a numpy array or scalar
    value = value.tolist()
  if isinstance(value, dict):
    return {k: _plain(v) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [_plain(v) for v in value]
  return value.decode('utf-8') if isinstance(value, bytes) else value
