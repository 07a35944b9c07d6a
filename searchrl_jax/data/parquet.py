"""Questions from the parquet files of Search-R1 and its relatives, unchanged.

A row of Search-R1 has data_source, prompt = [{role, content}], ability,
reward_model = {style, ground_truth: {target: [str]}} and extra_info = {split,
index}. Its merged sets add id, question, golden_answers and metadata, from
which the number of hops follows. In SSRL the target is a string or a list; in
verl's data ground_truth may be the answer itself. A list or an object may also
be written as text (JSON, or Python's form).

`prompt` already contains instructions, so `config.data.prompt` selects one of
  as_is     the messages of the row, without a template
  template  the `question` column, in the template of config.env
"""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from searchrl_jax.data import checks
from searchrl_jax.data.checks import DataError, mapping, require
from searchrl_jax.types import Question

# Those that are read, if a file has them. The rest of the metadata is passages.
_COLUMNS = """
  id question golden_answers data_source prompt reward_model extra_info
  metadata.type metadata.supporting_facts metadata.question_decomposition
""".split()


def load(
  path: str, prompt: str, source='', hops=0, split='', n=0, seed=0
) -> list[Question]:
  """Reads a file, filters it, and draws n questions, in file order.

  Ids become 'data_source/id' (id: the column, else extra_info.index, else the
  row): merged sets count each of their sources from 0.

  Args:
    path: a .parquet file.
    prompt: 'as_is' or 'template'; config.data.prompt.
    source: keep this data_source ('nq*' = by prefix); '' = all.
    hops: keep this number of hops; 0 = all.
    split: keep this extra_info.split; '' = all.
    n: questions drawn without replacement; 0 = all.
    seed: of the draw.

  Raises:
    DataError: names the file and the row, or the column that is missing.
  """
  try:
    table = pq.ParquetFile(path)
  except (pa.ArrowInvalid, OSError) as e:
    raise DataError(f'{path}: not a readable parquet file ({e})') from None
  names = table.schema_arrow.names
  modes = {'template': ('question', 'as_is'), 'as_is': ('prompt', 'template')}
  column, other = modes[prompt]
  what = f'data.prompt={prompt!r} needs a column {column!r}, not in {names}'
  fix = f'add it, or set config.data.prompt={other!r}'
  require(column in names, f'{path}: {what}; {fix}')

  columns = _COLUMNS
  kind = dict(zip(names, table.schema_arrow.types)).get('metadata', pa.null())
  if pa.types.is_string(kind) or pa.types.is_large_string(kind):
    columns = [c for c in _COLUMNS if '.' not in c] + ['metadata']

  def rows():
    row = 0
    try:
      for batch in table.iter_batches(columns=columns):
        for record in batch.to_pylist():
          where = f'{path} row {row}'
          yield where, make(record, where, row, prompt)
          row += 1
    except pa.ArrowException as e:
      raise DataError(f'{path} after row {row}: damaged ({e})') from None

  filters = dict(source=source, hops=hops, split=split, n=n, seed=seed)
  return checks.choose(rows(), path=path, **filters)


def make(record: Mapping, where: str, row: int, prompt: str) -> Question:
  """Makes the Question of one row."""
  record = {**record, 'metadata': _metadata(record.get('metadata'))}
  extra, reward, metadata = (
    mapping(record.get(column), f'{where}: {column}')
    for column in ('extra_info', 'reward_model', 'metadata')
  )
  source = str(record.get('data_source') or '')
  names = (record.get('id'), extra.get('index'), row)
  name = next(name for name in names if name is not None)
  messages: tuple[Mapping[str, str], ...] = ()
  text = record.get('question')
  if prompt == 'as_is':
    messages = _messages(record.get('prompt'), where)
    if text is None:
      # Used by logs and simulators: the last message of the user, including
      # its instructions, because the position of the question is unknown.
      text = [m['content'] for m in messages if m['role'] == 'user'][-1]
  # What a reward compares with: the target, else golden_answers.
  truth, golds = reward.get('ground_truth'), record.get('golden_answers')
  wrong = f'{where}: ground_truth is {truth!r:.60}; give a target, or a text'
  if isinstance(truth, str):
    given = checks.unpacked(truth, wrong)
    # In a list, as it may be an interval, "[-2, 7]".
    truth = given if isinstance(given, Mapping) else [truth]
  if isinstance(truth, Mapping):
    require('target' in truth or golds is not None, wrong)
    truth = truth.get('target')
    truth = [truth] if isinstance(truth, str) else truth
  return checks.make_question(
    where,
    id=f'{source}/{name}' if source else str(name),
    text=text,
    answers=golds if truth is None else truth,
    source=source,
    hops=checks.hops_of(metadata),
    messages=messages,
    meta={'split': extra['split']} if extra.get('split') else {},
  )


def _metadata(value: Any) -> Any:
  """The object that a text holds; None for a free text, which is not read."""
  if not isinstance(value, str):
    return value
  try:
    found = checks.unpacked(value, '')
  except DataError:  # it begins like an object
    return None
  return found if isinstance(found, dict) else None


def _messages(value: Any, where: str) -> tuple[Mapping[str, str], ...]:
  wrong = f"{where}: 'prompt' is no list of {{role, content}} with a user"
  if isinstance(value, str):
    given = checks.unpacked(value, wrong)
    listed = isinstance(given, list) and any(isinstance(m, dict) for m in given)
    # A prompt without roles is a user's message.
    value = given if listed else [{'role': 'user', 'content': value}]
  keys = ('role', 'content')
  good = (
    isinstance(value, list)
    and all(isinstance(m, dict) for m in value)
    and all(isinstance(m.get(k), str) for m in value for k in keys)
    and any(m['role'] == 'user' for m in value)
  )
  require(good, wrong)
  return tuple({k: m[k] for k in keys} for m in value)
