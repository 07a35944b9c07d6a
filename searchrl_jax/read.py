"""Reads run folders as pandas data frames.

  from searchrl_jax import read

  run = read.run('runs/quickstart')
  run.metrics['eval/em'].dropna()                      # by step
  run.trajectories().groupby('step').reward.mean()     # a row a trajectory
  run.trajectories('eval', steps=[59]).query('em == 0')
  run.segments(steps=[59]).query("author == 'policy'").text
  run.tokens(steps=[59]).groupby('kind').logp.mean()
  run.searches(steps=[59])                             # a row a passage
  run.evaluations()                                    # what `evaluate` scored
  run.config.optim.lr

Steps count from 0; -1 is the evaluation before the first update. The frames of
a trajectory share the columns `step` and `id` (of its question, role and
sample). The formats are those of `store/writer.py`, `store/records.py` and
`evaluate/files.py`, which also read and write them.
"""

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import functools
import itertools
import json
import os
import pathlib
from typing import Any

from ml_collections import ConfigDict
import numpy as np
import pandas as pd

from searchrl_jax import lookup
from searchrl_jax.evaluate import files
from searchrl_jax.rewards import equivalence
from searchrl_jax.run import build
from searchrl_jax.store import folders, records
from searchrl_jax.store.records import Record, RunError
from searchrl_jax.text import parser, untrusted
from searchrl_jax.text import tokenizer as tokenizers
from searchrl_jax.types import SEARCH, SearchError, Segment, Trajectory

TRAIN = 'trajectories'  # the part of a run that was trained on


def run(folder: os.PathLike | str, live: bool = False) -> 'Run':
  """Opens the folder of a training run, or one that `evaluate` wrote.

  Args:
    folder: of the run.
    live: also opens a folder that is being written, and leaves out what is not
      complete yet.

  Raises:
    RunError: it is no such folder, it is being written, or it cannot be read.
  """
  path = pathlib.Path(folder)
  config = path / 'config.json'
  records.require(path.is_dir(), f'{path}: no such folder')
  records.require(
    config.exists(),
    f'{path} is no run folder: it has no config.json; give the --workdir of a '
    'run or the --out of an evaluation',
  )
  records.require(
    live or not folders.in_use(path),
    f'{path} is being written: wait for its end, or read what is complete with '
    'live=True (`view`: --serve)',
  )
  try:
    return Run(path, build.load_config(str(path)), live)
  except (ValueError, KeyError) as e:
    raise RunError(f'{e}: {records.UNREADABLE}') from e


@dataclasses.dataclass(frozen=True)
class Run:
  """A run folder.

  Methods that take `part` and `steps` read trajectories: `part` is one of
  `parts`, `steps` are those to read (None = all that were written). They raise
  RunError if there are none, or a file cannot be read.
  """

  folder: pathlib.Path
  config: ConfigDict
  live: bool = False

  @property
  def metrics(self) -> pd.DataFrame:
    """metrics.jsonl: a row a step, a column a metric, NaN where it has none.

    Raises:
      RunError: the file is absent, or a line of it is not complete.
    """
    path, rows = self.folder / 'metrics.jsonl', []
    records.require(path.exists(), f'{self.folder} has no metrics.jsonl yet')
    *lines, rest = path.read_text('utf-8').split('\n')
    records.require(
      self.live or not rest,
      f'{path} ends within a line: its run was killed; start the run again, '
      'which repairs the file, or delete the last line',
    )
    for number, line in enumerate(lines, 1):
      try:
        rows.append({'step': int(json.loads(line)['step'])} | json.loads(line))
      except (ValueError, KeyError, TypeError) as e:
        raise RunError(
          f'{path}:{number}: no metrics of a step: {records.UNREADABLE}'
        ) from e
    frame = pd.DataFrame(rows, columns=None if rows else ['step'])
    return frame.set_index('step').astype(float)

  @property
  def starts(self) -> list[dict[str, Any]]:
    """environment.json: versions, commit, machine and time of each start."""
    path = self.folder / 'environment.json'
    with lookup.of(str(path), RunError):
      return json.loads(path.read_text())['starts'] if path.exists() else []

  @property
  def parts(self) -> dict[str, list[int]]:
    """Folders of trajectories -> the steps in them.

    'trajectories' were trained on; 'eval' and controls were evaluated.
    """
    names = {p.parent.name for p in self.folder.glob('*/step_*.parquet')}
    names = sorted(names, key=lambda name: (name != TRAIN, name))
    return {name: [*self.files(name)] for name in names}

  def files(self, part: str) -> dict[int, list[pathlib.Path]]:
    """The trajectory files of a part by step."""
    paths = sorted((self.folder / part).glob('step_*.parquet'))
    step = lambda path: int(path.stem.split('_')[1])
    found = itertools.groupby(sorted(paths, key=step), step)
    return {number: [*group] for number, group in found}

  def records(
    self, part: str = TRAIN, steps: Iterable[int] | None = None
  ) -> Iterator[Record]:
    """Yields the records of trajectories, in the order of the steps."""
    files = self.files(part)
    records.require(
      files,
      f'{self.folder} has no trajectories in {part!r}; there are: '
      f'{", ".join(self.parts) or "none (see config.log.trajectories_every)"}',
    )
    for step in files if steps is None else sorted(files.keys() & {*steps}):
      for path in files[step]:
        yield from records.read(path)

  def trajectories(
    self, part: str = TRAIN, steps: Iterable[int] | None = None
  ) -> pd.DataFrame:
    """A row for each trajectory, with its question, its end and what it earned.

    tokens, sampled: all, and those that the policy wrote. answer: its last, or
    None. em: whether that is right (config.eval.match); NaN without golden
    answers. advantage: the mean over the tokens in the loss. `reward/NAME`: the
    parts of the reward.
    """
    return pd.DataFrame(map(self.row, self.records(part, steps)))

  def row(self, record: Record) -> dict[str, Any]:
    """The row of a record in `trajectories`."""
    t, q = record.trajectory, record.trajectory.question
    answer = self.answer(t)
    row = {'step': record.step, 'id': t.id, 'question_id': q.id}
    row |= {'question': q.text, 'answers': q.answers, 'source': q.source}
    row |= {'hops': q.hops, 'role': t.role, 'sample': t.sample, 'end': t.end}
    row |= {'turns': t.turns, 'invalid_actions': t.invalid_actions}
    row |= {'searches': len(t.calls(SEARCH)), 'seconds': t.seconds}
    own = [len(s.ids) for s in t.segments if s.author == 'policy']
    row |= {'tokens': len(t), 'sampled': sum(own)}
    row |= {'answer': answer, 'em': self.em(t, answer)}
    row |= {'reward': record.reward, 'valid': record.valid}
    row |= {'kept': record.kept, 'advantage': _mean(record.advantages)}
    return row | {f'reward/{k}': v for k, v in record.rewards.items()}

  def segments(
    self,
    part: str = TRAIN,
    steps: Iterable[int] | None = None,
    trained: bool = False,
  ) -> pd.DataFrame:
    """A row for each segment, with its text.

    trained: the segments that the trainer saw, where they differ from those
    that were sampled (`Trajectory.train_context`).
    """
    fields = ('author', 'kind', 'agent', 'train')
    return pd.DataFrame(
      {'step': r.step, 'id': r.trajectory.id, 'segment': number}
      | {name: getattr(s, name) for name in fields}
      | {'tokens': len(s.ids), 'text': ''.join(self.pieces(s.ids))}
      for r in self.records(part, steps)
      for number, (s, *_) in enumerate(by_segment(r, trained))
    )

  def tokens(
    self,
    part: str = TRAIN,
    steps: Iterable[int] | None = None,
    trained: bool = False,
  ) -> pd.DataFrame:
    """A row for each token; NaN where it has no such value.

    in_loss: has an advantage. logp: of the engine that sampled it;
    trainer_logp: before the step's first update; version: of the weights.
    """
    frames = []
    for r in self.records(part, steps):
      for number, (s, logps, advantages) in enumerate(by_segment(r, trained)):
        columns = {'step': r.step, 'id': r.trajectory.id, 'segment': number}
        columns |= {'author': s.author, 'kind': s.kind}
        columns |= {'token': s.ids, 'text': self.pieces(s.ids)}
        columns |= {'in_loss': False, 'logp': s.logps, 'trainer_logp': logps}
        columns |= {'advantage': advantages, 'version': s.versions}
        if advantages is not None:
          columns['in_loss'] = np.isfinite(advantages)
        # A column of None would hide the type of the others.
        columns = {k: np.nan if v is None else v for k, v in columns.items()}
        frames.append(pd.DataFrame(columns, index=range(len(s.ids))))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()

  def searches(
    self, part: str = TRAIN, steps: Iterable[int] | None = None
  ) -> pd.DataFrame:
    """A row for each passage, or one for a search that returned none.

    supporting: whether the passage is one that answers the question. error: of
    a search that failed.
    """
    rows = []
    for r in self.records(part, steps):
      supporting = r.trajectory.question.supporting
      for number, call in enumerate(r.trajectory.searches):
        ask = call.request
        row = {'step': r.step, 'id': r.trajectory.id, 'search': number}
        row |= {'turn': ask.turn, 'tool': ask.tool, 'query': ask.query}
        if isinstance(call, SearchError):
          rows.append(row | {'error': f'{call.kind}: {call.message}'})
          continue
        row |= {'seconds': call.seconds, 'cost': call.cost}
        for rank, p in enumerate(call.passages):
          place = {'rank': rank, 'passage': p.id, 'title': p.title}
          place |= {'text': p.text, 'score': p.score}
          gold = ask.tool == SEARCH and p.id in supporting
          rows.append(row | place | {'supporting': gold})
        if not call.passages:
          rows.append(row | {'text': call.text})
    return pd.DataFrame(rows)

  def evaluations(self) -> pd.DataFrame:
    """rows.jsonl of this folder and of those below: a row a trajectory.

    folder: which `evaluate` wrote. evaluation: 'eval', or a control. The other
    columns are those of `evaluate.grading.Row`.

    Raises:
      RunError: there is none.
    """
    paths = sorted(self.folder.glob(f'**/{files.ROWS}'))
    records.require(
      paths,
      f'{self.folder} holds no evaluation ({files.ROWS}): `evaluate` writes '
      'one; those made while it trained are in `metrics` and the part eval',
    )
    return pd.DataFrame(
      {'folder': str(path.parent), 'evaluation': name} | dataclasses.asdict(row)
      for path in paths
      for name, rows in files.read_all(path.parent).items()
      for row in rows
    )

  # What the text of a trajectory says.

  @functools.cached_property
  def tokenizer(self) -> tokenizers.Tokenizer:
    """That of the run; an evaluation uses that of the folder above it."""
    for folder in (self.folder, self.folder.absolute().parent):
      if (folder / records.TOKENIZER).is_dir():
        return tokenizers.load(folder / records.TOKENIZER)
    raise RunError(
      f'{self.folder} has no folder {records.TOKENIZER!r}: copy that of its '
      'run into it'
    )

  @functools.cached_property
  def _template(self):
    return build.template(self.config)

  @functools.cached_property
  def _piece(self) -> Callable[[int], str | None]:
    """Token id -> its text; None if it is a part of a character."""

    @functools.cache
    def piece(token: int) -> str | None:
      try:
        return self.tokenizer.token_bytes(token).decode()
      except UnicodeDecodeError:
        return None

    return piece

  def pieces(self, ids: np.ndarray) -> list[str]:
    """The text of each token; together, that of the ids.

    A character of several tokens is in the last of them; control tokens have
    no text.
    """
    found = [*map(self._piece, ids.tolist())]
    if None not in found:
      return found
    decode = codecs.getincrementaldecoder('utf-8')('replace').decode
    raw = [self.tokenizer.token_bytes(i) for i in ids.tolist()]
    return [decode(x, n == len(raw)) for n, x in enumerate(raw, 1)]

  def answer(self, trajectory: Trajectory) -> str | None:
    """The policy's last answer, as `SearchEnv.answer` finds it."""
    template, mode = self._template, self.config.data.prompt
    begun = untrusted.begun(template, trajectory.question, mode)
    made_of = trajectory.segments, template, self.tokenizer
    how = dict(begun=begun, history=trajectory.history)
    found = parser.blocks(*made_of, **how)
    noted = trajectory.meta.get('noted', ())
    return parser.answer(found, self.config.env.answer, noted)

  def em(self, trajectory: Trajectory, answer: str | None) -> float:
    """1.0 if the answer is right, by config.eval.match; NaN if unknown."""
    golds = [a for a in trajectory.question.answers if a.strip()]
    if not golds or trajectory.failed:
      return np.nan
    return equivalence.correct(answer, golds, self.config.eval.match)


def by_segment(
  record: Record, trained: bool
) -> Iterator[tuple[Segment, np.ndarray | None, np.ndarray | None]]:
  """Yields segments with their trainer's log-probs and advantages.

  These are None where the trainer did not see the segment.
  """
  t, at = record.trajectory, 0
  segments: Sequence[Segment] = t.trained if trained else t.segments
  seen = segments is t.trained
  columns = (record.trainer_logps, record.advantages) if seen else (None, None)
  for s in segments:
    part = slice(at, at := at + len(s.ids))
    yield s, *(None if x is None else x[part] for x in columns)


def _mean(values: np.ndarray | None) -> float:
  """The mean of the finite values; NaN if there are none."""
  known = np.empty(0) if values is None else values[np.isfinite(values)]
  return float(known.mean()) if known.size else np.nan
