"""Reads and writes the files of a run folder.

Small files are written atomically, metrics line by line. Trajectories are
Parquet, one file a step (NAME/step_00000012.parquet) and one row a trajectory.
`read` returns them; pandas and DuckDB can open them. The columns:

  step, id, role, sample, end, turns, invalid_actions, seconds, meta (JSON)
  question       id, text, answers, source, hops, supporting; messages and
                 meta (JSON)
  reward, valid  sum over the trajectory; whether it counts. rewards: its
                 parts. earned, earned_at: rewards by segment or token, if the
                 reward functions gave them so
  kept           whether the trajectory entered the batch
  segments       author, kind, agent, train; by token: ids, logps (of the
                 engine), versions (of the weights that sampled it),
                 trainer_logps (before the step's first update), advantages.
                 Null for a segment without them: tokens that were not sampled
                 have no logps; segments outside the loss (train=False, or the
                 row was not kept) have no trainer_logps and no advantages
  train_context  the segments that the trainer saw, if they differ; the last
                 two columns are then in these
  contexts       where the policy went on from other tokens (`types.Context`):
                 start, prompt, reason; null in files of earlier versions
  searches       query, k, turn, tool, seconds, cost, and passages (id, title,
                 text, score), text or error (kind, message). Files of earlier
                 versions have no tool, text and cost: all were searches

Log-probs and advantages are float16; log-probs that a run resumes from
(`exact`) are float32. Ids and log-probs are stored with their bytes split by
position, other columns by dictionary; both are compressed by zstd.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import io
import json
import math
import os
import pathlib
import re
from typing import Any

from ml_collections import ConfigDict
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from retrieval import files
from searchrl_jax import lookup, schema, types

CHECKPOINTS, TOKENIZER = 'checkpoints', 'tokenizer'
ENVIRONMENT = 'environment.json'
EVAL = 'eval.json'  # scores and costs of an evaluation
# Folders of trajectories: of training, evaluations and controls.
PARTS = ('trajectories eval sampled shuffled random empty no_search').split()
_STEP = re.compile(r'step_(-?\d{7,8})(_\w+)?\.parquet')
UNREADABLE = (
  'it was cut off, or another version wrote it; environment.json names the '
  'commit that reads it'
)


class RunError(RuntimeError):
  """The run folder cannot be used; the message names the file and the fix."""


require = functools.partial(lookup.require, error=RunError)  # good, message


def begun(folder: os.PathLike | str) -> bool:
  """Whether the folder holds metrics or a checkpoint of an earlier start.

  If not (a first start that failed), a run of another config may use it.
  """
  folder = pathlib.Path(folder)
  metrics = folder / 'metrics.jsonl'
  saved = [*(folder / CHECKPOINTS).glob('[0-9]*')]
  return bool(saved) or metrics.exists() and metrics.stat().st_size > 0


def starts(folder: os.PathLike | str) -> list[dict[str, Any]]:
  """What environment.json of a run or an evaluation says of its starts.

  Raises:
    RunError: the file is something else.
  """
  path = pathlib.Path(folder) / ENVIRONMENT
  try:
    found = json.loads(path.read_text())['starts'] if path.exists() else []
  except (ValueError, TypeError, KeyError):
    found = None
  require(
    isinstance(found, list) and all(isinstance(x, dict) for x in found),
    f'{path} is in the way: no run wrote it. Use another folder; or remove the '
    'file, if it is damaged',
  )
  return found


def require_ours(folder: os.PathLike | str) -> None:
  """Raises RunError if the folder has files that a run would replace."""
  folder = pathlib.Path(folder)
  steps = (p for name in PARTS for p in (folder / name).glob('step_*.parquet'))
  ours = starts(folder) or begun(folder)
  for path in () if ours else (folder / 'config.json', *steps):
    require(
      not path.exists(),
      f'{path} is in the way: no run wrote it. Use another folder',
    )


@contextlib.contextmanager
def explained(path: os.PathLike | str) -> Iterator[None]:
  """Turns an OSError inside into a RunError that names `path` and the fix."""
  try:
    yield
  except (FileExistsError, NotADirectoryError) as error:
    raise RunError(
      f'{path} cannot be written: {error.filename} is a file, and no folder'
    ) from error
  except OSError as error:
    raise RunError(
      f'{path} cannot be written: {error.strerror or error}. Free disk space '
      'or correct the permissions; the run resumes from its last checkpoint'
    ) from error


def write_text(path: os.PathLike | str, text: str) -> None:
  """Calls `write_bytes` with `text` in UTF-8."""
  write_bytes(path, text.encode())


def write_bytes(path: os.PathLike | str, data: bytes) -> None:
  """Writes a file atomically.

  Raises:
    RunError: the disk is full, or the folder cannot be written to.
  """
  path = pathlib.Path(path)
  part = path.with_name(f'.{path.name}.{os.getpid()}')
  with explained(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
      with open(part, 'wb') as file:
        file.write(data)
        files.commit(file, part, path)
    finally:
      part.unlink(missing_ok=True)


def write_json(path: os.PathLike | str, value: Any) -> None:
  """Writes indented JSON atomically; see `plain` for the conversion."""
  write_text(path, json.dumps(plain(value), indent=2) + '\n')


def plain(value: Any) -> Any:
  """Converts to JSON's types; numbers that are not finite become None."""
  if isinstance(value, ConfigDict):
    value = value.to_dict()
  if isinstance(value, Mapping):
    return {str(k): plain(v) for k, v in value.items()}
  if hasattr(value, '__array__'):  # of NumPy or JAX
    value = np.asarray(value).tolist()
  if isinstance(value, (list, tuple, set, frozenset)):
    return [plain(v) for v in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  known = value is None or isinstance(value, (str, int, float))
  return value if known else str(value)


def config(path: pathlib.Path) -> ConfigDict:
  """The config that a run wrote as JSON, `filled`.

  Raises:
    ConfigError: the file is no JSON, or of another type.
  """
  with lookup.of(str(path), caught=(ValueError, TypeError, AttributeError)):
    return filled(json.loads(path.read_text(), object_hook=tuples))


def filled(fields: Mapping[str, Any]) -> ConfigDict:
  """The config of a run from its fields.

  Those that were added to the schema since the run get their neutral value,
  with which the run behaves as it did.
  """
  found = schema.base()
  found.update(fields)
  return found


def tuples(fields: dict) -> dict:
  """An object of JSON with tuples for its lists, as configs write them."""
  return {k: tuple(v) if type(v) is list else v for k, v in fields.items()}


def step_file(folder: pathlib.Path, step: int, part: str = '') -> pathlib.Path:
  """The trajectory file of a step; `part` names one of several."""
  return folder / f'step_{step:08d}{part and f"_{part}"}.parquet'


def drop_steps(folder: pathlib.Path, step: int) -> None:
  """Removes trajectory files of steps >= `step`, and partial ones, in PARTS.

  Those of -1, from before the first step, go with those of 0.
  """
  for path in (path for name in PARTS for path in (folder / name).glob('*')):
    found = _STEP.fullmatch(path.name)
    if (
      path.name.startswith('.step_') or found and int(found[1]) >= (step or -1)
    ):
      path.unlink()


@dataclasses.dataclass(frozen=True)
class Record:
  """A trajectory with its rewards and training data; None = not computed.

  n: number of tokens that the trainer sees (`trajectory.trained`). In records
  read from a file, values have the file's precision, trainer_logps and
  advantages are NaN outside the loss, and `meta` and `messages` hold JSON's
  types.
  """

  step: int
  trajectory: types.Trajectory
  reward: float | None = None  # the sum over the trajectory
  valid: bool | None = None
  rewards: Mapping[str, float] = dataclasses.field(default_factory=dict)
  earned: np.ndarray | None = None  # float32, of each segment or token
  earned_at: str | None = None  # 'segment' or 'token'
  kept: bool | None = None
  trainer_logps: np.ndarray | None = None  # [n]
  advantages: np.ndarray | None = None  # [n], or a scalar for all tokens


def _list(element: pa.DataType) -> pa.DataType:
  return pa.list_(pa.field('element', element, nullable=False))


_TEXT, _INT, _SECONDS, _REWARD = (
  pa.string(), pa.int32(), pa.float64(), pa.float32(),
)  # fmt: skip
_QUESTION = pa.struct({
  'id': _TEXT, 'text': _TEXT, 'answers': _list(_TEXT), 'source': _TEXT,
  'hops': _INT, 'supporting': _list(_TEXT), 'messages': _TEXT, 'meta': _TEXT,
})  # fmt: skip
_PASSAGE = pa.struct({
  'id': _TEXT, 'title': _TEXT, 'text': _TEXT, 'score': pa.float64(),
})  # fmt: skip
_SEARCH = pa.struct({
  'query': _TEXT, 'k': _INT, 'turn': _INT, 'step': _INT, 'trajectory': _TEXT,
  'tool': _TEXT, 'seconds': _SECONDS, 'passages': _list(_PASSAGE),
  'text': _TEXT, 'cost': pa.float64(),
  'error': pa.struct({'kind': _TEXT, 'message': _TEXT}),
})  # fmt: skip
_CONTEXT = pa.struct({'start': _INT, 'prompt': _list(_INT), 'reason': _TEXT})
_ROW = pa.schema({
  'step': _INT, 'id': _TEXT, 'question': _QUESTION, 'role': _TEXT,
  'sample': _INT, 'end': _TEXT, 'turns': _INT, 'invalid_actions': _INT,
  'seconds': _SECONDS, 'meta': _TEXT, 'reward': _REWARD, 'valid': pa.bool_(),
  'rewards': pa.map_(_TEXT, _REWARD), 'earned': _list(_REWARD),
  'earned_at': _TEXT, 'kept': pa.bool_(), 'searches': _list(_SEARCH),
  'contexts': _list(_CONTEXT),
})  # fmt: skip
_SEGMENT = {'author': _TEXT, 'kind': _TEXT, 'agent': _TEXT, 'train': pa.bool_()}
# Columns by token: what the trainer adds to a segment, log-probs, all of them.
_TRAINER = ('trainer_logps', 'advantages')
_LOGPS = ('logps', 'trainer_logps')
_TOKENS = {'ids': _INT, 'versions': _INT, 'logps': pa.float16()}
_TOKENS |= dict.fromkeys(_TRAINER, pa.float16())
# Columns whose values hardly repeat: stored with their bytes split.
_SPLIT = tuple(f'.{name}.list.element' for name in ('ids', *_LOGPS))
_SEQUENCES = ('segments', 'train_context')
_JSON = ('messages', 'meta')  # fields of a question that are written as JSON
# Fields of a trajectory that are columns unchanged.
_TRAJECTORY = ('role', 'sample', 'end', 'turns', 'invalid_actions', 'seconds')


def encode(records: Sequence[Record], exact: bool = False) -> bytes:
  """Returns the records as a Parquet file; `exact`: log-probs as float32."""
  types_ = _TOKENS | dict.fromkeys(_LOGPS if exact else (), _REWARD)
  segments = pa.struct(_SEGMENT | {k: _list(v) for k, v in types_.items()})
  schema = pa.schema([*_ROW, *((name, _list(segments)) for name in _SEQUENCES)])
  rows = [_row(r, types_) for r in records]
  try:
    table = pa.Table.from_pylist(rows, schema)
  except UnicodeEncodeError:  # a lone surrogate, which JSON allows
    table = pa.Table.from_pylist(_encodable(rows), schema)
  out = io.BytesIO()
  pq.write_metadata(table.schema, out)
  leaves = {column.path for column in pq.read_metadata(out).schema}
  split = {p for p in leaves if p.endswith(_SPLIT)}
  pq.write_table(
    table,
    out := io.BytesIO(),
    compression='zstd',
    compression_level=3,
    use_dictionary=[*leaves - split],
    column_encoding=dict.fromkeys(split, 'BYTE_STREAM_SPLIT'),
    dictionary_pagesize_limit=1 << 28,
    write_statistics=False,
  )
  return out.getvalue()


def _row(record: Record, types_: dict[str, pa.DataType]) -> dict[str, Any]:
  """The columns of a file; `types_` are those by token."""
  t, q = record.trajectory, record.trajectory.question
  return {
    **vars(t),
    **vars(record),
    'id': t.id,
    'meta': json.dumps(plain(t.meta)),
    'question': vars(q) | {k: json.dumps(plain(vars(q)[k])) for k in _JSON},
    'rewards': list(record.rewards.items()),
    'searches': [_search(s) for s in t.searches],
    'contexts': [vars(context) for context in t.contexts],
    **{name: _segments(record, name, types_) for name in _SEQUENCES},
  }


def _search(search: types.SearchResult | types.SearchError) -> dict[str, Any]:
  out = vars(search.request) | vars(search)
  if isinstance(search, types.SearchError):
    return out | {'error': vars(search)}
  return out | {'passages': [vars(p) for p in search.passages]}


def _encodable(value: Any) -> Any:
  if isinstance(value, str):
    return value.encode('utf-8', 'replace').decode()
  if isinstance(value, dict):
    return {k: _encodable(v) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return type(value)(map(_encodable, value))  # a tuple is a pair of a map
  return value


def _segments(record: Record, name: str, types_) -> list[dict] | None:
  """The fields of each segment; None if the trajectory has no train_context."""
  segments = getattr(record.trajectory, name)
  if segments is None:
    return None
  trained = record.kept and segments is record.trajectory.trained
  out, at = [], 0
  for s in segments:
    fields = dict.fromkeys(_TOKENS) | vars(s)
    part = slice(at, at := at + len(s.ids))
    for column in _TRAINER if trained and s.train else ():
      x = getattr(record, column)
      if x is not None:
        fields[column] = x[part] if np.ndim(x) else np.full(len(s.ids), x)
    for column, type_ in types_.items():
      fields[column] = _values(fields[column], type_.to_pandas_dtype())
    out.append(fields)
  return out


def _values(x, dtype) -> np.ndarray | None:
  if x is None:
    return None
  if dtype == np.float16:
    x = np.clip(x, -65504, 65504)  # a sum of rewards may be outside its range
  return np.asarray(x, dtype)


def read(source: os.PathLike | str | bytes) -> Iterator[Record]:
  """Yields the records of bytes from `encode`, a file or a folder of files.

  A run's trajectories are in RUN/trajectories, an evaluation's in OUT/NAME.

  Raises:
    RunError: there are no files, or one is not a trajectory file.
  """
  if isinstance(source, bytes):
    found: list = [io.BytesIO(source)] if source else []
  else:
    source = pathlib.Path(source)
    found = [source] if source.is_file() else [*source.glob('step_*.parquet')]
    require(
      found,
      f'{source} holds no trajectories; they are in RUN/trajectories (see '
      'config.log.trajectories_every) and, of an evaluation, in OUT/eval',
    )
  for file in sorted(found):
    try:
      with pq.ParquetFile(file) as table:
        for batch in table.iter_batches(256):
          yield from _records(batch)
    except (pa.ArrowException, KeyError, TypeError) as error:
      what = f'{file} is not a trajectory file: {error}'
      raise RunError(f'{what}; {UNREADABLE}') from error


def _records(batch: pa.RecordBatch) -> Iterator[Record]:
  # pandas has an array where `to_pylist` would have an object for each token.
  columns = [batch.column(name).to_pandas() for name in _SEQUENCES]
  sequences = [map(_unpacked, column) for column in columns]
  rows = batch.drop_columns(list(_SEQUENCES)).to_pylist()
  for row, segments, context in zip(rows, *sequences, strict=True):
    question = row.pop('question')
    question |= {name: json.loads(question[name]) for name in _JSON}
    for name in ('answers', 'supporting', 'messages'):
      question[name] = tuple(question[name])
    question = types.Question(**question)
    trajectory = types.Trajectory(
      question,
      tuple(s for s, _ in segments),
      tuple(_read_search(s, question) for s in row.pop('searches')),
      train_context=None if context is None else tuple(s for s, _ in context),
      contexts=tuple(map(_read_context, row.pop('contexts', None) or ())),
      meta=json.loads(row.pop('meta')),
      **{name: row.pop(name) for name in _TRAJECTORY},
    )
    trained = segments if context is None else context
    earned, rewards = row.pop('earned'), dict(row.pop('rewards'))
    del row['id']
    yield Record(
      trajectory=trajectory,
      rewards=rewards,
      earned=None if earned is None else np.array(earned, np.float32),
      **{name: _joined(trained, name) for name in _TRAINER},
      **row,
    )


def _joined(segments, name: str) -> np.ndarray | None:
  """The column by token, NaN for segments without it; None if all are."""
  if all(extra[name] is None for _, extra in segments):
    return None
  blank = lambda s: np.full(len(s.ids), np.nan, np.float32)
  parts = [blank(s) if x[name] is None else x[name] for s, x in segments]
  return np.concatenate(parts)


def _unpacked(sequence) -> list | None:
  """The segments of a row, each with its columns in _TRAINER."""
  if sequence is None:
    return None
  for row in sequence:
    for name in (*_LOGPS, 'advantages'):
      row[name] = _values(row[name], np.float32)
  extra = [{name: row.pop(name) for name in _TRAINER} for row in sequence]
  return [(types.Segment(**row), x) for row, x in zip(sequence, extra)]


def _read_context(record: dict[str, Any]) -> types.Context:
  prompt = np.array(record.pop('prompt'), np.int32)
  return types.Context(prompt=prompt, **record)


def _read_search(record: dict[str, Any], question: types.Question):
  passages, error = record.pop('passages'), record.pop('error')
  answer = {name: record.pop(name) for name in ('seconds', 'text', 'cost')}
  request = types.SearchRequest(question=question, **record)
  if error is not None:
    return types.SearchError(request, **error)
  found = tuple(types.Passage(**p) for p in passages)
  return types.SearchResult(request, found, **answer)
