"""Questions from TensorFlow Datasets, read without TensorFlow.

TFDS stores examples in ArrayRecord files and reads them by index through its
`data_source`; neither that nor `build` imports TensorFlow.
"""

import os
from typing import Any

import numpy as np

from searchrl_jax.data import checks, jsonl
from searchrl_jax.data.checks import DataError
from searchrl_jax.types import Question


def load(
  path: str,
  split: str,
  id: str = 'id',
  question: str = 'question',
  answers: str = 'golden_answers',
  supporting: str = '',
  source: str = '',
  hops: str = '',
  n: int = 0,
  seed: int = 0,
) -> list[Question]:
  """Loads a split, maps its fields and draws n questions, in order.

  Args:
    path: the prepared folder, with dataset_info.json and ArrayRecord files.
    split: 'train', 'dev[:100]', ...
    id: the field of the id; '' = the row's number.
    question: the field of the question; 'a.b' reaches inside.
    answers: the field of the answers; '' = unlabelled.
    supporting: the field of the supporting corpus ids; '' = unknown.
    source: the field of the source; '' = the set's name.
    hops: the field of the hops; '' = unknown.
    n: questions drawn without replacement; 0 = all.
    seed: of the draw.

  Raises:
    DataError: not a prepared folder, an unknown split or field, or a bad row.
  """
  import tensorflow_datasets as tfds  # slow to import

  if not os.path.exists(os.path.join(path, 'dataset_info.json')):
    raise DataError(
      f'{path}: there is no dataset_info.json; give the folder that TFDS '
      'prepared (NAME/VERSION), or make one with searchrl_jax.data.tfds.build'
    )
  builder = tfds.builder_from_directory(path)
  if split.partition('[')[0] not in builder.info.splits:
    raise DataError(
      f'{path}: no split {split!r}: {", ".join(builder.info.splits)}'
    )
  try:
    rows = builder.as_data_source(split=split)
  except ValueError as e:
    raise DataError(f'{path}: split {split!r}: {e}') from e
  except NotImplementedError as e:  # TFRecord cannot be read by index
    raise DataError(
      f'{path}: {str(e)[:300]}; prepare it again with file_format='
      "'array_record'"
    ) from e

  questions = checks.mapped(
    (_plain(r) for r in rows),
    f'{path}[{split}]',
    id=id,
    question=question,
    answers=answers,
    supporting=supporting,
    source=source,
    hops=hops,
  )
  return checks.choose(questions, path=path, n=n, seed=seed)


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

  questions = jsonl.load(jsonl_path, layout=layout)
  target = os.path.join(folder, name, '1.0.0')
  if os.path.exists(target):
    raise DataError(f'{target} already exists; remove it or change the name')
  text = tfds.features.Text()
  texts = tfds.features.Sequence(text)
  fields = {
    'id': (text, 'id'),
    'question': (text, 'text'),
    'golden_answers': (texts, 'answers'),
    'supporting_ids': (texts, 'supporting'),
    'source': (text, 'source'),
    'hops': (tfds.features.Scalar(np.int32), 'hops'),
  }
  features = tfds.features.FeaturesDict({k: f for k, (f, _) in fields.items()})
  examples = [
    {k: getattr(q, name) for k, (_, name) in fields.items()} for q in questions
  ]

  class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    VERSION = tfds.core.Version('1.0.0')
    # TFDS 4.9.10 searches the source of a builder through importlib_resources,
    # which it does not require; this builder has no source files.
    code_path = None

    def _info(self):
      info = tfds.core.DatasetInfo(
        builder=self,
        features=features,
        disable_shuffling=True,
        description=f'Questions of {os.path.basename(jsonl_path)}.',
      )
      # TFDS would look for a public data set of this name, over the network,
      # and leave an empty temporary folder.
      info.initialize_from_bucket = lambda: None
      return info

    def _split_generators(self, dl_manager):
      return {split: enumerate(examples)}

    def _generate_examples(self):
      raise NotImplementedError('the split already holds the examples')

  Builder.name = name
  builder = Builder(data_dir=folder, file_format='array_record')
  builder.download_and_prepare(
    download_config=tfds.download.DownloadConfig(try_download_gcs=False)
  )
  return target


def _plain(value: Any) -> Any:
  """Converts bytes to str and arrays to lists, recursively."""
  if isinstance(value, bytes):
    return value.decode('utf-8')
  if isinstance(value, dict):
    return {k: _plain(v) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [_plain(v) for v in value]
  if hasattr(value, 'tolist'):  # a numpy array or scalar
    return _plain(value.tolist())
  return value
