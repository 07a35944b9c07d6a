"""Questions from Hugging Face `datasets`: the hub, or a local folder.

The library's variables HF_ENDPOINT (a mirror), HF_HOME (the cache) and
HF_HUB_OFFLINE apply.
"""

import pathlib
from typing import Any

from searchrl_jax.data import checks
from searchrl_jax.data.checks import DataError
from searchrl_jax.types import Question


def load(
  dataset: str,
  folder: str,
  split: str,
  subset: str = '',
  revision: str = '',
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
    dataset: a name on the hub ('RUC-NLPIR/FlashRAG_datasets'), or a folder,
      absolute or below the data folder: data files, or `save_to_disk`'s.
    folder: the data folder; '' = none.
    split: 'train', 'test[:100]', ...
    subset: the data set's configuration ('nq'); '' = its only one.
    revision: a branch, tag or commit of the hub; '' = the newest.
    id: the field of the id; '' = the row's number.
    question: the field of the question; 'a.b' reaches inside.
    answers: the field of the answers, a str or a list; '' = unlabelled.
    supporting: the field of the supporting corpus ids; '' = unknown.
    source: the field of the source; '' = the set's name.
    hops: the field of the hops; '' = unknown.
    n: questions drawn without replacement; 0 = all.
    seed: of the draw.

  Raises:
    DataError: the data set cannot be loaded (offline, wrong name), or a field
      or row is bad (the message suggests names, or gives the row).
  """
  name = f'{dataset}/{subset}' if subset else dataset
  where = f'{name}[{split}]'
  questions = checks.mapped(
    _open(dataset, folder, split, subset, revision),
    where,
    id=id,
    question=question,
    answers=answers,
    supporting=supporting,
    source=source,
    hops=hops,
  )
  return checks.choose(questions, path=where, n=n, seed=seed)


def _open(dataset, folder, split, subset, revision) -> Any:
  import datasets  # slow to import
  import httpx
  import huggingface_hub.errors

  local = pathlib.Path(folder, dataset).expanduser()
  # A folder takes precedence over a name on the hub.
  is_local = local.is_dir() and (folder or local.is_absolute())
  path = str(local) if is_local else dataset
  try:
    if is_local and (
      (local / 'dataset_dict.json').exists() or (local / 'state.json').exists()
    ):
      loaded = datasets.load_from_disk(path)
      if not isinstance(loaded, datasets.DatasetDict):
        return loaded
      if split in loaded:
        return loaded[split]
      raise DataError(f'{path}: no split {split!r}: {", ".join(loaded)}')
    return datasets.load_dataset(
      path, subset or None, split=split, revision=revision or None
    )
  except DataError:
    raise
  except (
    OSError,
    httpx.HTTPError,
    ValueError,
    datasets.exceptions.DatasetsError,
    huggingface_hub.errors.HfHubHTTPError,
  ) as e:
    fix = 'correct the folder, the subset or the split'
    if not is_local:
      fix = (
        'check the name, the subset, the split and the connection, set '
        'HF_ENDPOINT to a mirror, load it once while online if the library is '
        'offline (HF_HUB_OFFLINE or HF_DATASETS_OFFLINE) and the cache '
        '(HF_HOME) lacks it, or give a local folder'
      )
    raise DataError(
      f'{path} ({split}): cannot be loaded '
      f'({type(e).__name__}: {str(e)[:300]}); {fix}'
    ) from e
