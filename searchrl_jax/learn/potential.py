"""What a teacher makes of the golden answer, as a trajectory reads.

`gold` of an advantage function has the `Levels` of each trajectory: log-probs
of the golden answer after what had been read before the first turn, and after
each observation, behind the tag that opens an answer (config.teacher.gold has
this frame, and the other fields). A level is the mean over the answer's tokens,
of which the first three weigh `first`; with several golden answers (`aliases`)
it is the log of the sum of their exponentials. A history without room in
config.batch.lengths keeps the level before it.

With `swaps` = k each observation is also replaced by k others of the step that
share no passage with it, and `swapped` is the mean of their levels: what the
answer would be worth had something else been found there.
`train/gold_unswapped` counts observations without any.

config.teacher.weights are those that score, at config.rollout.temperature. An
advantage function that takes `gold` has `needs = ('answers',)`.
"""

from collections.abc import Sequence
import math
from typing import NamedTuple
import zlib

import numpy as np

from searchrl_jax.learn import batching
from searchrl_jax.learn.batching import StepBatch
from searchrl_jax.rewards import progress
from searchrl_jax.types import Segment, Trajectory

FIRST = 3  # tokens of an answer that may weigh more


class Levels(NamedTuple):
  """Of one trajectory, in nats; NaN where nothing could be scored."""

  real: np.ndarray  # float64 [1 + observations]
  swapped: np.ndarray  # float64 [observations]


def ask(batch: StepBatch, config, env, *, shards: int, seed):
  """(minibatches, read) of `teacher.Asked`."""
  c, wanted = config.teacher.gold, _Wanted(config, env)
  found = [progress.readings(t) for t in batch.trajectories]
  places = []  # of each trajectory: real levels, and swapped ones
  alone = 0
  for i, t in enumerate(batch.trajectories):
    real, swapped = [], []
    if batch.kept[i]:
      real = [wanted.add(t, t.before(n)) for n in progress.histories(t)]
      for k, span in enumerate(found[i] if c.swaps else ()):
        if real[k + 1] is None:  # too long: there is nothing to compare
          swapped.append([])
          continue
        before = t.before(span.end)[: span.start - span.end]
        others = _others(batch, found, i, k, c.swaps)
        alone += not others
        rows = [np.concatenate([before, o.segment.ids]) for o in others]
        swapped.append([wanted.add(t, ids) for ids in rows])
    places.append((real, swapped))
  minis = batching.make(
    wanted.rows,
    np.ones(len(wanted.rows), bool),
    np.arange(len(wanted.rows)),
    config.batch,
    shards=shards,
    contexts=config.env.max_contexts,
    seed=seed,
  )

  def read(scored, own):
    del own
    score = wanted.scores(minis, scored)
    levels = [_levels(score, *place) for place in places]
    return levels, {
      'gold_rows': float(len(wanted.rows)),
      'gold_too_long': float(wanted.too_long),
      'gold_unswapped': float(alone),
    }

  return minis, read


ask.observes = 'source'  # type: ignore[attr-defined]


def steps(levels: Sequence[Levels], structure, change) -> np.ndarray:
  """float64 [N]: of each turn, what the observation behind it changed.

  Args:
    levels: of the trajectories of the structure.
    structure: has the turns.
    change: Levels -> float [observations]; one that is NaN counts as 0.
  """
  out = np.zeros(len(structure.owner))
  at = dict(zip(zip(structure.owner, structure.number), range(len(out))))
  for i, (own, spans) in enumerate(zip(levels, structure.spans, strict=True)):
    if not len(own.real):  # in no batch
      continue
    read = [s for s in spans if s.observes]
    for span, x in zip(read, change(own), strict=True):
      if (i, span.turn) in at and np.isfinite(x):
        out[at[i, span.turn]] += x
  return out


class _Wanted:
  """Sequences that are scored, each once: histories with a golden answer."""

  def __init__(self, config, env):
    self._c, self._longest = config.teacher.gold, config.batch.lengths[-1]
    tok = self._tok = env.tokenizer
    frame = self._c.frame or env.template.answer[0]
    self._frame = np.asarray(tok.encode_template(frame), np.int32)
    self._index: dict[tuple, list[int]] = {}
    self.rows: list[Trajectory] = []
    self.too_long = 0

  def add(self, t: Trajectory, history: np.ndarray) -> tuple | None:
    """The key of its level; None if it is too long."""
    answers = t.question.answers[: self._c.aliases or None]
    golds = [self._tok.encode(f' {answer}') for answer in answers]
    key = t.question.id, tuple(history.tolist())
    if key in self._index:
      return key
    size = len(history) + len(self._frame) + max(map(len, golds))
    if size > self._longest:
      self.too_long += 1
      return None
    before = np.concatenate([history, self._frame]).astype(np.int32)
    self._index[key] = []
    for gold in golds:
      self._index[key].append(len(self.rows))
      ids, none = np.asarray(gold, np.int32), np.zeros(len(gold), np.float32)
      segments = (
        Segment(before, 'prompt', 'other'),
        Segment(ids, 'policy', 'answer', train=True, logps=none),
      )
      n = len(self.rows)
      self.rows.append(Trajectory(t.question, segments, (), 'answer', sample=n))
    return key

  def scores(self, minibatches, scored) -> dict[tuple | None, float]:
    masks = batching.masks(self.rows)
    logps = batching.unpacked(minibatches, scored, masks)
    means = []
    for row, mask in zip(logps, masks):
      own = row[mask]
      weights = np.where(np.arange(len(own)) < FIRST, self._c.first, 1.0)
      means.append(float(np.average(own, weights=weights)))
    out: dict[tuple | None, float] = {None: math.nan}
    for key, rows in self._index.items():
      out[key] = float(np.logaddexp.reduce([means[n] for n in rows]))
    return out


def _others(batch, found, i: int, k: int, n: int) -> list:
  """n observations of the step that share no passage with one, by chance."""
  own = {*found[i][k].passages}
  fits = [
    span
    for j, spans in enumerate(found)
    for span in spans
    if j != i and batch.kept[j] and own.isdisjoint(span.passages)
  ]
  t = batch.trajectories[i]
  named = [zlib.crc32(t.question.id.encode()), t.sample, k]
  order = np.random.default_rng(named).permutation(len(fits))
  return [fits[j] for j in order[:n]]


def _levels(score, real: Sequence, swapped: Sequence) -> Levels:
  levels: list[float] = []
  for key in real:
    last = levels[-1] if levels else math.nan
    levels.append(last if key is None else score[key])
  means = []
  for keys in swapped:
    known = [score[key] for key in keys if key is not None]
    means.append(float(np.mean(known)) if known else math.nan)
  return Levels(np.array(levels), np.array(means))
