"""Questions from TensorFlow Datasets, read without TensorFlow.

TFDS stores examples in ArrayRecord files and reads them by index through its
`data_source`, which does not import TensorFlow.
"""

import os
from typing import Any

from searchrl_jax.data import checks, jsonl
from searchrl_jax.types import Question


def load(
  path: str, split: str, layout='flashrag', n=0, seed=0
) -> list[Question]:
  """Draws n questions of a split, in its order.

  Args:
    path: the prepared folder, with dataset_info.json and ArrayRecord files.
    split: 'train', 'dev[:100]', ...
    layout: of an example; see `jsonl`.
    n: questions drawn without replacement; 0 = all.
    seed: of the draw.

  Raises:
    DataError: not a prepared folder, an unknown split, or an example of another
      layout.
  """
  import tensorflow_datasets as tfds  # slow to import

  there = os.path.exists(os.path.join(path, 'dataset_info.json'))
  what = f'{path}: there is no dataset_info.json, as in a folder NAME/VERSION'
  checks.require(there, f'{what} that TFDS prepared')
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


def _plain(value: Any) -> Any:
  """Converts bytes to str and arrays to lists, recursively."""
  if hasattr(value, 'tolist'):  # a numpy array or scalar
    value = value.tolist()
  if isinstance(value, dict):
    return {k: _plain(v) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [_plain(v) for v in value]
  return value.decode('utf-8') if isinstance(value, bytes) else value
