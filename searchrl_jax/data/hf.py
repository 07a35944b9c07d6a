"""Questions from Hugging Face `datasets`: the hub, or a local folder.

The library's variables HF_ENDPOINT (a mirror), HF_HOME (the cache) and
HF_HUB_OFFLINE apply.
"""

import pathlib
from typing import Any

from searchrl_jax.data import checks


@checks.mapped
def load(
  dataset: str, folder: str, split: str, subset='', revision=''
) -> tuple[str, Any]:
  """Opens a split; `checks.mapped` has the other fields.

  Args:
    dataset: a name on the hub ('RUC-NLPIR/FlashRAG_datasets'), or a folder,
      absolute or below the data folder: data files, or `save_to_disk`'s.
    folder: the data folder; '' = none.
    split: 'train', 'test[:100]', ...
    subset: the data set's configuration ('nq'); '' = its only one.
    revision: a branch, tag or commit of the hub; '' = the newest.

  Raises:
    DataError: the data set cannot be loaded (offline, wrong name).
  """
  import datasets  # slow to import
  from datasets.exceptions import DatasetsError
  import httpx

  local = pathlib.Path(folder, dataset).expanduser()
  # A folder takes precedence over a name on the hub.
  is_local = local.is_dir() and (folder or local.is_absolute())
  path = str(local) if is_local else dataset
  files = ('dataset_dict.json', 'state.json')
  try:
    if is_local and any((local / name).exists() for name in files):
      rows = datasets.load_from_disk(path)
      if isinstance(rows, datasets.DatasetDict):
        checks.require(split in rows, f'no split {split!r}: {", ".join(rows)}')
        rows = rows[split]
    else:
      rows = datasets.load_dataset(
        path, subset or None, split=split, revision=revision or None
      )
  # OSError includes the errors of huggingface_hub.
  except (OSError, httpx.HTTPError, ValueError, DatasetsError) as e:
    fix = 'correct the folder, the subset or the split'
    if not is_local:
      fix += ', the connection or HF_ENDPOINT, or give a local folder; while '
      fix += 'offline (HF_HUB_OFFLINE), it must be in the cache (HF_HOME)'
    why = f'{type(e).__name__}: {str(e)[:300]}'
    message = f'{path} ({split}): cannot be loaded ({why}); {fix}'
    raise checks.DataError(message) from e
  return f'{dataset}/{subset}[{split}]'.replace('/[', '['), rows
