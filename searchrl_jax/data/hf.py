"""Questions from Hugging Face `datasets`: the hub, or a local folder.

The library's variables HF_ENDPOINT (a mirror), HF_HOME (the cache) and
HF_HUB_OFFLINE apply.
"""

from collections.abc import Mapping
import pathlib

from searchrl_jax.data import checks
from searchrl_jax.types import Question


def load(
  dataset: str,
  folder: str,
  split: str,
  subset='',
  revision='',
  fields: Mapping[str, str] = checks.FIELDS,
  n=0,
  seed=0,
) -> list[Question]:
  """Draws n questions of a split, in its order.

  Args:
    dataset: a name on the hub ('RUC-NLPIR/FlashRAG_datasets'), or a folder,
      absolute or below the data folder: data files, or `save_to_disk`'s.
    folder: the data folder; '' = none.
    split: 'train', 'test[:100]', ...
    subset: the data set's configuration ('nq'); '' = its only one.
    revision: a branch, tag or commit of the hub; '' = the newest.
    fields: see `checks.mapped`.
    n: questions drawn without replacement; 0 = all.
    seed: of the draw.

  Raises:
    DataError: the data set cannot be loaded (offline, wrong name), or a row
      lacks a field.
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
    why = f'cannot be loaded ({type(e).__name__}: {str(e)[:300]})'
    fix = 'correct the name, the folder, the subset or the split; offline '
    fix += '(HF_HUB_OFFLINE), it must be in the cache (HF_HOME)'
    raise checks.DataError(f'{path} ({split}): {why}; {fix}') from e
  where = f'{dataset}/{subset}[{split}]'.replace('/[', '[')
  return checks.mapped(rows, where, fields, n=n, seed=seed)
