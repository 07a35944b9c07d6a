"""Files of a run: small ones whole or not at all, long ones line by line.

A trajectory is one JSON line with everything that was recorded: ids, authors,
kinds, log-probs, versions, passages; `read_trajectory` reads it back exactly.
"""

import contextlib
import json
import math
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

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
  """Writes a small file whole or not at all.

  Raises:
    RunError: the disk is full, or the place cannot be written.
  """
  path = pathlib.Path(path)
  with explained(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f'.{path.name}.', dir=path.parent)
    try:
      with os.fdopen(handle, 'w', encoding='utf-8') as f:
        f.write(text)
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
  kept_end = 0  # end of the lines to keep, while they are the file's head
  mixed = False
  with open(path, 'rb') as f:
    position = 0
    for line in f:
      position += len(line)
      if _kept(path, line, step):
        mixed = mixed or kept_end + len(line) != position
        kept_end += len(line)
  if not mixed:
    os.truncate(path, kept_end)
    return
  copy = path.with_name(f'.{path.name}.kept')
  with open(path, 'rb') as f, open(copy, 'wb') as out:
    out.writelines(line for line in f if _kept(path, line, step))
  os.replace(copy, path)


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


def trajectory_record(
  trajectory: Trajectory, decode: Callable[[Sequence[int]], str]
) -> dict[str, Any]:
  """A trajectory as JSON's types; `text` of the segments is for people."""
  question = trajectory.question
  context = trajectory.train_context
  return {
    'id': trajectory.id,
    'question': {
      'id': question.id,
      'text': question.text,
      'answers': list(question.answers),
      'source': question.source,
      'hops': question.hops,
      'supporting': list(question.supporting),
      'messages': plain(question.messages),
      'meta': plain(question.meta),
    },
    'role': trajectory.role,
    'sample': trajectory.sample,
    'end': trajectory.end,
    'turns': trajectory.turns,
    'invalid_actions': trajectory.invalid_actions,
    'seconds': trajectory.seconds,
    'segments': [_segment_record(s, decode) for s in trajectory.segments],
    'train_context': None
    if context is None
    else [_segment_record(s, decode) for s in context],
    'searches': [_search_record(s) for s in trajectory.searches],
    'meta': plain(trajectory.meta),
  }


def _segment_record(segment: Segment, decode: Callable) -> dict[str, Any]:
  ids = [int(i) for i in segment.ids]
  logps, versions = segment.logps, segment.versions
  if versions is not None:
    versions = [int(v) for v in versions]
    if len(set(versions)) == 1:
      versions = versions[0]
  return {
    'author': segment.author,
    'kind': segment.kind,
    'agent': segment.agent,
    'train': segment.train,
    'text': decode(ids),
    'ids': ids,
    # Nine digits give every float32 back.
    'logps': None
    if logps is None
    else [float(f'{value:.9g}') for value in logps.tolist()],
    'versions': versions,
  }


def _search_record(search: SearchResult | SearchError) -> dict[str, Any]:
  request = search.request
  out = {
    'query': request.query,
    'k': request.k,
    'turn': request.turn,
    'step': request.step,
    'trajectory': request.trajectory,
  }
  if isinstance(search, SearchError):
    return {**out, 'error': {'kind': search.kind, 'message': search.message}}
  passages = [
    {'id': p.id, 'title': p.title, 'text': p.text, 'score': p.score}
    for p in search.passages
  ]
  return {**out, 'seconds': search.seconds, 'passages': passages}


def read_trajectory(line: str | bytes | Mapping) -> Trajectory:
  """The trajectory of a line of trajectories.jsonl (or of its record).

  Its ids, log-probs (float32) and versions are exactly those written. Values
  in `meta` and `messages` come back as JSON's types.

  Raises:
    ValueError: the line is not JSON, or lacks a field.
  """
  record = line if isinstance(line, Mapping) else json.loads(line)
  try:
    fields = dict(record['question'])
    for name in ('answers', 'supporting', 'messages'):
      fields[name] = tuple(fields[name])
    question = Question(**fields)
    context = record['train_context']
    return Trajectory(
      question=question,
      segments=tuple(map(_read_segment, record['segments'])),
      searches=tuple(_read_search(s, question) for s in record['searches']),
      train_context=None
      if context is None
      else tuple(map(_read_segment, context)),
      **{
        name: record[name]
        for name in (
          'role', 'sample', 'end', 'turns', 'invalid_actions', 'seconds', 'meta'
        )
      },
    )  # fmt: skip
  except (KeyError, TypeError) as error:
    raise ValueError(f'no record of a trajectory: {error!r}') from error


def _read_segment(record: Mapping) -> Segment:
  ids = np.array(record['ids'], np.int32)
  logps, versions = record['logps'], record['versions']
  if isinstance(versions, int):
    versions = np.full(len(ids), versions, np.int32)
  elif versions is not None:
    versions = np.array(versions, np.int32)
  return Segment(
    ids=ids,
    author=record['author'],
    kind=record['kind'],
    agent=record['agent'],
    train=record['train'],
    logps=None if logps is None else np.array(logps, np.float32),
    versions=versions,
  )


def _read_search(
  record: Mapping, question: Question
) -> SearchResult | SearchError:
  request = SearchRequest(
    query=record['query'],
    k=record['k'],
    question=question,
    trajectory=record['trajectory'],
    turn=record['turn'],
    step=record['step'],
  )
  if 'error' in record:
    return SearchError(request, **record['error'])
  passages = tuple(Passage(**p) for p in record['passages'])
  return SearchResult(request, passages, record['seconds'])
