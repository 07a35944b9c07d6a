"""Prepares a data set for TFDS, without TensorFlow."""

import os

import numpy as np
import tensorflow_datasets as tfds

from searchrl_jax.data import jsonl

TEXT = tfds.features.Text()
TEXTS = tfds.features.Sequence(TEXT)
FIELDS = {
  'id': TEXT,
  'question': TEXT,
  'golden_answers': TEXTS,
  'supporting_ids': TEXTS,
  'source': TEXT,
  'hops': tfds.features.Scalar(np.int32),
}


class Builder(tfds.dataset_builders.AdhocBuilder, skip_registration=True):
  """Writes `split_datasets`, {split: examples}."""

  # TFDS 4.9.10 searches the source of a builder through importlib_resources,
  # which it does not require; this builder has no source files.
  code_path = None

  def _info(self):
    info = super()._info()
    # TFDS would look for a public data set of this name, over the network, and
    # leave an empty temporary folder.
    info.initialize_from_bucket = lambda: None
    return info

  def _split_generators(self, dl_manager):
    # The base class needs TensorFlow.
    return {split: enumerate(x) for split, x in self._split_datasets.items()}


def build(jsonl_path, folder, *, name: str, split: str) -> str:
  """The questions of a file in FlashRAG's layout as 'NAME/1.0.0'; its path."""
  examples = [
    dict(zip(FIELDS, (q.id, q.text, q.answers, q.supporting, q.source, q.hops)))
    for q in jsonl.load(str(jsonl_path))
  ]
  builder = Builder(
    name=name,
    version='1.0.0',
    features=tfds.features.FeaturesDict(FIELDS),
    split_datasets={split: examples},
    data_dir=str(folder),
    disable_shuffling=True,
    file_format='array_record',
  )
  config = tfds.download.DownloadConfig(try_download_gcs=False)
  builder.download_and_prepare(download_config=config)
  return os.path.join(folder, name, '1.0.0')
