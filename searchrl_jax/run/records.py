"""Files of a run: small ones whole or not at all, long ones line by line.

Trajectories are Parquet: a file for each step (NAME/step_00000012.parquet), a
row for each trajectory, which `read` gives back and pandas or DuckDB can open:

  step, id, role, sample, end, turns, invalid_actions, seconds, meta (JSON)
  question       id, text, answers, source, hops, supporting; messages and
                 meta (JSON)
  reward, valid  the sum over the trajectory, and whether it counts; rewards:
                 its parts; earned and earned_at: the rewards of segments or
                 tokens, where they are given so
  kept           whether it entered the batch
  segments       author, kind, agent, train; and by token: ids, logps (the
                 engine's), versions (weights that sampled it), trainer_logps
                 (before the step's first update) and advantages. Null for a
                 segment without them: what was not sampled has no logps, what
                 is not in the loss (`train`, in a row that was kept) has
                 neither of the last two, and trainer_logps are null wherever
                 the trainer did not score
  train_context  the segments that the trainer saw, where they are others; the
                 last two columns are theirs then
  searches       query, k, turn, seconds, passages (id, title, text, score) or
                 error (kind, message)

Log-probs and advantages are float16; in what a run resumes from (`exact`),
log-probs are float32. Ids and log-probs are stored with their bytes split by
position, everything else (passages, kinds, versions) by dictionary, and zstd
compresses both.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import io
import json
import math
import os
import pathlib
import re
import tempfile
from typing import Any

from ml_collections import ConfigDict
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from searchrl_jax.types import (
  Passage,
  Question,
  SearchError,
  SearchRequest,
  SearchResult,
  Segment,
  Trajectory,
)

CHECKPOINTS = 'checkpoints'
_STEP = re.compile(rb'\{"step": (-?\d+)[,}]')


class RunError(RuntimeError):
  """A run folder that cannot be used; the message names it and the mend."""


def begun(folder: os.PathLike | str) -> bool:
  """Whether a run left anything in its folder that a start would go on with.

  Before that (a first start that failed), another config may take the folder.
  """
  folder = pathlib.Path(folder)
  metrics = folder / 'metrics.jsonl'
  return (metrics.exists() and metrics.stat().st_size > 0) or any(
    (folder / CHECKPOINTS).glob('[0-9]*')
  )


@contextlib.contextmanager
def explained(path: os.PathLike | str) -> Iterator[None]:
  """Says which file could not be written, and what would help."""
  try:
    yield
  except OSError as error:
    raise RunError(
      f'{path} cannot be written: {error.strerror or error}. Free disk space '
      'or see to the permissions, then start again: the run resumes at its '
      'last checkpoint'
    ) from error


def write_text(path: os.PathLike | str, text: str) -> None:
  """`write_bytes` in UTF-8."""
  write_bytes(path, text.encode())


def write_bytes(path: os.PathLike | str, data: bytes) -> None:
  """Writes a file whole or not at all.

  Raises:
    RunError: the disk is full, or the place cannot be written.
  """
  path = pathlib.Path(path)
  with explained(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f'.{path.name}.', dir=path.parent)
    try:
      with os.fdopen(handle, 'wb') as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
      os.chmod(name, 0o644)  # mkstemp's 0600 would shut out other readers
      os.replace(name, path)
    except BaseException:
      pathlib.Path(name).unlink(missing_ok=True)
      raise


def write_json(path: os.PathLike | str, value: Any) -> None:
  """`write_text` of indented JSON; numpy values become plain, NaN null."""
  write_text(path, json.dumps(plain(value), indent=2) + '\n')


def plain(value: Any) -> Any:
  """JSON's own types. Not-a-number has none, so it becomes null."""
  if isinstance(value, ConfigDict):
    value = value.to_dict()
  if isinstance(value, Mapping):
    return {str(k): plain(v) for k, v in value.items()}
  if isinstance(value, (np.ndarray, np.generic)):
    value = value.tolist()
  if isinstance(value, (list, tuple, set, frozenset)):
    return [plain(v) for v in value]
  if isinstance(value, float):
    return value if math.isfinite(value) else None
  if value is None or isinstance(value, (str, int)):
    return value
  if hasattr(value, '__array__'):
    return plain(np.asarray(value))
  return str(value)


class JsonlFile:
  """Lines appended and flushed; a line is there whole or not at all."""

  def __init__(self, path: os.PathLike | str, step: int):
    """Opens `path`, without its lines of steps >= `step` or a cut-off end."""
    self._path = pathlib.Path(path)
    with explained(self._path):
      self._path.parent.mkdir(parents=True, exist_ok=True)
      if self._path.exists():
        _drop_from(self._path, step)
      self._file = open(self._path, 'ab')

  def write(self, records: Sequence[Mapping]) -> None:
    """Appends records; each has a 'step', which is its first field.

    Raises:
      RunError: the disk is full; what was written in part is taken back.
    """
    lines = [json.dumps(record) + '\n' for record in records]
    begin = self._file.tell()
    with explained(self._path):
      try:
        self._file.write(''.join(lines).encode())
        self._file.flush()
      except OSError:
        # What the buffer holds would be written again at closing.
        with contextlib.suppress(OSError):
          self._file.close()
        os.truncate(self._path, begin)
        raise

  def close(self) -> None:
    with explained(self._path):
      self._file.close()


def _drop_from(path: pathlib.Path, step: int) -> None:
  end = 0
  with open(path, 'rb') as f:
    for line in f:
      if not _kept(path, line, step):
        break  # steps never go back within a file
      end += len(line)
  os.truncate(path, end)


def _kept(path: pathlib.Path, line: bytes, step: int) -> bool:
  if not line.endswith(b'\n'):
    return False  # the process ended while it wrote
  match = _STEP.match(line)
  if match is None:
    raise RunError(
      f'{path}: a line without "step": {line[:60]!r}; this is no file of '
      'this writer, so choose another --workdir'
    )
  return int(match[1]) < step


def step_file(folder: pathlib.Path, step: int, part: str = '') -> pathlib.Path:
  """Where the trajectories of a step are; `part` where it has several."""
  return folder / f'step_{step:08d}{part and f"_{part}"}.parquet'


def drop_steps(folder: pathlib.Path, step: int) -> None:
  """Removes the files in its folders that belong to steps >= `step`, and what
  a process left that was killed while it wrote."""
  for path in [*folder.glob('*/step_*.parquet'), *folder.glob('*/.step_*')]:
    if path.name[0] == '.' or int(path.stem.split('_')[1]) >= step:
      path.unlink()


@dataclasses.dataclass(frozen=True)
class Record:
  """A trajectory and what a step made of it; None where it made nothing.

  n: tokens that the trainer sees (`trajectory.trained`). What comes from a
  file has its precision; its trainer_logps and advantages are NaN off the
  loss, and values in `meta` and `messages` are JSON's types.
  """

  step: int
  trajectory: Trajectory
  reward: float | None = None  # the sum over the trajectory
  valid: bool | None = None
  rewards: Mapping[str, float] = dataclasses.field(default_factory=dict)
  earned: np.ndarray | None = None  # float32, of each segment or token
  earned_at: str | None = None  # 'segment' or 'token'
  kept: bool | None = None
  trainer_logps: np.ndarray | None = None  # [n]
  advantages: np.ndarray | None = None  # [n], or [] where all are the same


def _list(element: pa.DataType) -> pa.DataType:
  return pa.list_(pa.field('element', element, nullable=False))


_TEXT, _TEXTS = pa.string(), _list(pa.string())
_QUESTION = pa.struct(
  {
    'id': _TEXT,
    'text': _TEXT,
    'answers': _TEXTS,
    'source': _TEXT,
    'hops': pa.int32(),
    'supporting': _TEXTS,
    'messages': _TEXT,
    'meta': _TEXT,
  }
)
_SEARCH = pa.struct(
  {
    'query': _TEXT,
    'k': pa.int32(),
    'turn': pa.int32(),
    'step': pa.int32(),
    'trajectory': _TEXT,
    'seconds': pa.float64(),
    'passages': _list(
      pa.struct(
        {'id': _TEXT, 'title': _TEXT, 'text': _TEXT, 'score': pa.float64()}
      )
    ),
    'error': pa.struct({'kind': _TEXT, 'message': _TEXT}),
  }
)
_ROW = pa.schema(
  {
    'step': pa.int32(),
    'id': _TEXT,
    'question': _QUESTION,
    'role': _TEXT,
    'sample': pa.int32(),
    'end': _TEXT,
    'turns': pa.int32(),
    'invalid_actions': pa.int32(),
    'seconds': pa.float64(),
    'meta': _TEXT,
    'reward': pa.float32(),
    'valid': pa.bool_(),
    'rewards': pa.map_(_TEXT, pa.float32()),
    'earned': _list(pa.float32()),
    'earned_at': _TEXT,
    'kept': pa.bool_(),
    'searches': _list(_SEARCH),
  }
)
_SEGMENT = {'author': _TEXT, 'kind': _TEXT, 'agent': _TEXT, 'train': pa.bool_()}
_MADE = ('trainer_logps', 'advantages')  # by a step, of its trajectories
_LOGPS = ('logps', 'trainer_logps')
_TOKENS = ('ids', 'versions', 'logps', *_MADE)
# Columns whose values hardly repeat.
_SPLIT = tuple(f'.{name}.list.element' for name in ('ids', *_LOGPS))
_SEQUENCES = ('segments', 'train_context')
# Fields of a record, and of its trajectory, that are columns as they are.
_GIVEN = ('step', 'reward', 'valid', 'earned', 'earned_at', 'kept')
_TRAJECTORY = ('role', 'sample', 'end', 'turns', 'invalid_actions', 'seconds')


def encode(records: Sequence[Record], exact: bool = False) -> bytes:
  """A Parquet file of the records; exact: log-probs as float32."""
  rows = [_row(r) for r in records]
  try:
    table = pa.Table.from_pylist(rows, _ROW)
  except UnicodeEncodeError:  # a lone surrogate, which JSON may hold
    table = pa.Table.from_pylist(_encodable(rows), _ROW)
  for name in _SEQUENCES:
    table = table.append_column(
      name, _pack([_segments(r, name) for r in records], exact)
    )
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


def _row(record: Record) -> dict[str, Any]:
  t = record.trajectory
  q = t.question
  return {
    **{name: getattr(record, name) for name in _GIVEN},
    **{name: getattr(t, name) for name in _TRAJECTORY},
    'id': t.id,
    'meta': json.dumps(plain(t.meta)),
    'question': vars(q)
    | {
      'messages': json.dumps(plain(q.messages)),
      'meta': json.dumps(plain(q.meta)),
    },
    'rewards': list(record.rewards.items()),
    'searches': [_search(s) for s in t.searches],
  }


def _search(search: SearchResult | SearchError) -> dict[str, Any]:
  out = dict(vars(search.request))
  if isinstance(search, SearchError):
    return out | {'error': {'kind': search.kind, 'message': search.message}}
  return out | {
    'seconds': search.seconds,
    'passages': [vars(p) for p in search.passages],
  }


def _encodable(value: Any) -> Any:
  if isinstance(value, str):
    return value.encode('utf-8', 'replace').decode()
  if isinstance(value, dict):
    return {k: _encodable(v) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return type(value)(map(_encodable, value))  # a tuple is a pair of a map
  return value


def _segments(record: Record, name: str) -> list[dict[str, Any]] | None:
  """The fields of each segment; None: the trajectory has no such context."""
  segments = getattr(record.trajectory, name)
  if segments is None:
    return None
  learnt = record.kept and segments is record.trajectory.trained
  out, at = [], 0
  for s in segments:
    fields = dict.fromkeys(_TOKENS) | vars(s)
    part = slice(at, at := at + len(s.ids))
    if learnt and s.train:
      if record.trainer_logps is not None:
        fields['trainer_logps'] = record.trainer_logps[part]
      if record.advantages is not None:
        x = np.asarray(record.advantages)
        fields['advantages'] = x[part] if x.ndim else np.full(len(s.ids), x)
    out.append(fields)
  return out


def _pack(rows: Sequence[list[dict] | None], exact: bool) -> pa.Array:
  """Segments of each row, by column."""
  flat = [segment for row in rows for segment in row or ()]
  columns = {
    name: pa.array([s[name] for s in flat], type_)
    for name, type_ in _SEGMENT.items()
  }
  for name in _TOKENS:
    parts = [s[name] for s in flat]
    dtype = (
      np.int32
      if name in ('ids', 'versions')
      else (np.float32 if exact and name in _LOGPS else np.float16)
    )
    known = [np.zeros(0, dtype), *(p for p in parts if p is not None)]
    values = np.concatenate(known)
    if dtype == np.float16:  # a sum of rewards may lie beyond its range
      values = values.clip(-65504, 65504)
    columns[name] = _nested(parts, pa.array(values.astype(dtype)))
  return _nested(
    rows, pa.StructArray.from_arrays(list(columns.values()), list(columns))
  )


def _nested(parts: Sequence, values: pa.Array) -> pa.Array:
  """Lists as long as `parts` of values in a row; null where a part is None."""
  ends = np.cumsum([0, *(0 if p is None else len(p) for p in parts)])
  return pa.ListArray.from_arrays(
    pa.array(ends, pa.int32()),
    values,
    _list(values.type),
    mask=pa.array([p is None for p in parts], pa.bool_()),
  )


def read(source: os.PathLike | str | bytes) -> Iterator[Record]:
  """The records of what `encode` made, of a file or of a folder of files.

  A run has its trajectories in RUN/trajectories, an evaluation in NAME.

  Raises:
    RunError: there are none, or a file holds something else.
  """
  if isinstance(source, bytes):
    files = [io.BytesIO(source)] if source else []
  else:
    source = pathlib.Path(source)
    files = (
      sorted(source.glob('step_*.parquet'))
      if source.is_dir()
      else ([source] * source.exists())
    )
    if not files:
      raise RunError(
        f'{source} holds no trajectories: `train` writes those of a step into '
        'RUN/trajectories where config.log.trajectories_every asks for them, '
        '`evaluate` writes into OUT/eval'
      )
  for file in files:
    try:
      with pq.ParquetFile(file) as table:
        for batch in table.iter_batches(256):
          yield from _records(batch)
    except (pa.ArrowException, KeyError) as error:
      raise RunError(f'{file} is no file of trajectories: {error}') from error


def _records(batch: pa.RecordBatch) -> Iterator[Record]:
  sequences = [_unpack(batch.column(name)) for name in _SEQUENCES]
  rows = batch.drop_columns(list(_SEQUENCES)).to_pylist()
  for row, segments, context in zip(rows, *sequences, strict=True):
    question = row['question']
    for name in ('messages', 'meta'):
      question[name] = json.loads(question[name])
    for name in ('answers', 'supporting', 'messages'):
      question[name] = tuple(question[name])
    question = Question(**question)
    learnt = segments if context is None else context
    trajectory = Trajectory(
      question,
      tuple(s for s, _ in segments),
      tuple(_read_search(s, question) for s in row['searches']),
      train_context=None if context is None else tuple(s for s, _ in context),
      meta=json.loads(row['meta']),
      **{name: row[name] for name in _TRAJECTORY},
    )
    earned = row.pop('earned')
    yield Record(
      **{name: row[name] for name in _GIVEN if name != 'earned'},
      trajectory=trajectory,
      rewards=dict(row['rewards']),
      earned=None if earned is None else np.array(earned, np.float32),
      **{name: _joined(learnt, name) for name in _MADE},
    )


def _joined(segments, name: str) -> np.ndarray | None:
  """By token, NaN for segments without; None if no segment has any."""
  if all(more[name] is None for _, more in segments):
    return None
  return np.concatenate(
    [
      np.full(len(s.ids), np.nan, np.float32)
      if more[name] is None
      else more[name]
      for s, more in segments
    ]
  )


def _unpack(array: pa.ListArray) -> list[list[tuple[Segment, dict]] | None]:
  """Of each row: its segments, and what a `Segment` has no field for."""
  struct, columns = array.values, {}
  for name in _SEGMENT:
    columns[name] = struct.field(name).to_pylist()
  for name in _TOKENS:
    lists = struct.field(name)
    values = lists.values.to_numpy()
    if values.dtype == np.float16:
      values = values.astype(np.float32)
    ends = lists.offsets.to_numpy()
    columns[name] = [
      values[a:b] if known else None
      for known, a, b in zip(
        lists.is_valid().to_pylist(), ends[:-1], ends[1:], strict=True
      )
    ]
  rows = [dict(zip(columns, x)) for x in zip(*columns.values(), strict=True)]
  more = [{name: r.pop(name) for name in _MADE} for r in rows]
  flat = [(Segment(**r), m) for r, m in zip(rows, more, strict=True)]
  ends = array.offsets.to_pylist()
  return [
    flat[a:b] if known else None
    for known, a, b in zip(
      array.is_valid().to_pylist(), ends[:-1], ends[1:], strict=True
    )
  ]


def _read_search(
  record: dict[str, Any], question: Question
) -> SearchResult | SearchError:
  passages, error = record.pop('passages'), record.pop('error')
  seconds = record.pop('seconds')
  request = SearchRequest(question=question, **record)
  if error is not None:
    return SearchError(request, **error)
  return SearchResult(request, tuple(Passage(**p) for p in passages), seconds)
