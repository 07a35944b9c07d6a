"""Runs the rollouts of a step and, during its update, of later steps.

With `max_staleness` = 0 the rollouts of a step start with the step. With n,
those of the next n steps run at the same time: they start on weights at most n
versions older than those they will update, and continue with newer ones as
these are published, between and within the turns of a trajectory. Ended
trajectories that were not used yet are saved in the checkpoint. Of several
processes each runs the rollouts of its share of the questions.
"""

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent import futures
import dataclasses
import itertools
import time

import numpy as np

from searchrl_jax.data.core import Stream
from searchrl_jax.devices import cluster
from searchrl_jax.devices.signals import Signals
from searchrl_jax.rollout.chains import Rollout
from searchrl_jax.store import records
from searchrl_jax.types import Question, Trajectory

_SPENT = 'rollout.spent'  # in the `meta` of encoded trajectories
# (question id, sample) -> trajectory that has ended.
Ended = dict[tuple[str, int], Trajectory]


@dataclasses.dataclass
class _Step:
  """The rollouts of one step."""

  cursor: dict  # of the stream, before its questions
  ended: Ended  # trajectories that may be used
  asked: set[str]  # ids of its questions
  seen: list[Trajectory] = dataclasses.field(default_factory=list)
  future: futures.Future | None = None

  def keep(self, trajectory: Trajectory) -> None:
    self.seen.append(trajectory)
    name = trajectory.question.id, trajectory.sample
    # A trajectory that a service failed is sampled again. A sampler may have
    # replaced one that an earlier start finished.
    self.ended.pop(name, None)
    if not trajectory.failed:
      self.ended[name] = trajectory


class Collector:
  """Starts the rollouts of steps and returns them in order.

  Args:
    stream: of questions.
    questions: their number in a step.
    max_staleness: steps ahead, config.rollout.max_staleness.
    steps: of the run.
  """

  def __init__(
    self, stream: Stream, *, questions: int, max_staleness: int, steps: int
  ):
    self._stream = stream
    self._questions, self._ahead, self._steps = questions, max_staleness, steps
    self._under_way: dict[int, _Step] = {}
    self._taken: dict[int, _Step] = {}  # the last one
    self._saved: dict[int, Ended] = {}
    self._running = 0
    self._idle, self._idle_since = 0.0, time.monotonic()

  def open(self, signals: Signals, start: Callable[..., Coroutine]) -> None:
    """Sets the event loop and the function that starts rollouts.

    Call it before `take`.

    start: (questions, step=, ended=, on_trajectory=) -> coroutine of a
      `Rollout`, which does not sample the trajectories of `ended` again.
    """
    self._signals, self._start = signals, start
    self._idle_since = time.monotonic()

  # The state in a checkpoint (`run.session`).

  def state(self) -> dict:
    """The stream's cursor before the first step that was not taken."""
    steps = sorted(self._under_way)
    return self._under_way[steps[0]].cursor if steps else self._stream.state()

  def restore(self, state: dict) -> None:
    self._stream.restore(state)

  def encode(self) -> bytes:
    """The trajectories that have ended and were not taken, on any process."""
    ended: dict[int, Ended] = {}
    for found in cluster.gather('ended', self.ended):
      for step, own in found.items():
        # Those that an earlier start finished are known to all, until their
        # question is shared out (`_play`).
        ended.setdefault(step, {}).update(own)
    return encode({n: [*ended[n].values()] for n in sorted(ended)})

  def decode(self, data: bytes) -> None:
    """Restores what `encode` returned; call it before the first `take`."""
    for step, t in decode(data):
      self._saved.setdefault(step, {})[t.question.id, t.sample] = t

  def take(self, step: int) -> Rollout:
    """This process's rollouts of `step`; starts all that may start now.

    Raises:
      Stopped: by a signal. Any error of the rollout.
    """
    for ahead in range(step, min(step + self._ahead + 1, self._steps)):
      if ahead not in self._under_way:
        self._begin(ahead)
    self._taken = {}
    found = self._signals.wait(self._under_way[step].future)
    self._taken = {step: self._under_way.pop(step)}
    return found

  def count(self, group: int) -> tuple[int, int]:
    """Of the step that is waited for: trajectories that have ended, and all.

    group: trajectories of a question.
    """
    for one in [*self._taken.values(), *self._under_way.values()][:1]:
      return len(one.seen), group * len(cluster.part([*one.asked]))
    return 0, 0

  def more(self, step: int, n: int, **how) -> Rollout:
    """The rollouts of n further questions for a step that was taken.

    For max_staleness = 0: the questions that follow are the next step's.
    how: further arguments of `start`.

    Raises:
      as `take`.
    """
    one = self._taken[step]
    questions = []
    for q in self._stream.next(n):
      # A question that occurs twice in a step gets another id.
      name, again = q.id, itertools.count(2)
      while name in one.asked:
        name = f'{q.id}#{next(again)}'
      one.asked.add(name)
      questions.append(dataclasses.replace(q, id=name))
    return self._signals.wait(self._play(questions, step, one, **how))

  def give_back(self, step: int, usable: bool) -> tuple[Trajectory, ...]:
    """Cancels all rollouts; returns those of `step` that had ended.

    usable: whether ended rollouts may be used; if not, they are sampled again.
    """
    self.stop()
    self._under_way |= self._taken
    if not usable:
      for one in self._under_way.values():
        one.ended.clear()
    one = self._under_way.get(step)  # None: its questions could not be read
    return tuple(one.seen) if one else ()

  def _begin(self, step: int) -> None:
    cursor = self._stream.state()
    questions = self._stream.next(self._questions)
    one = _Step(cursor, self._saved.pop(step, {}), {q.id for q in questions})
    one.future = self._play(questions, step, one)
    self._under_way[step] = one

  def _play(
    self, questions: Sequence[Question], step: int, one: _Step, **how
  ) -> futures.Future:
    own = cluster.part(questions)
    # The process that plays a question decides what is kept of it.
    others = {q.id for q in questions} - {q.id for q in own}
    one.ended = {k: t for k, t in one.ended.items() if k[0] not in others}
    how |= dict(step=step, ended=dict(one.ended), on_trajectory=one.keep)
    return self._signals.start(self._counted(own, **how))

  async def _counted(self, questions: Sequence[Question], **how) -> Rollout:
    if not self._running:
      self._idle += time.monotonic() - self._idle_since
    self._running += 1
    try:
      return await self._start(questions, **how)
    finally:
      self._running -= 1
      self._idle_since = time.monotonic()

  def stop(self) -> None:
    """Cancels all running rollouts."""
    self._signals.cancel(*(s.future for s in self._under_way.values()))

  def idle_seconds(self) -> float:
    """Seconds without a running rollout since the last call."""
    idle, self._idle = self._idle, 0.0
    if not self._running:
      now = time.monotonic()
      idle, self._idle_since = idle + now - self._idle_since, now
    return idle

  def ended(self) -> dict[int, Ended]:
    """Trajectories that have ended and were not taken, by step."""
    steps = {n: s.ended for n, s in self._under_way.items()} | self._saved
    return {n: dict(ended) for n, ended in sorted(steps.items())}


def encode(ended: Mapping[int, Sequence[Trajectory]]) -> bytes:
  """Encodes `Collector.ended` exactly, for `decode`."""
  pairs = [(step, t) for step, found in ended.items() for t in found]
  kept = []
  for step, t in pairs:
    meta = {**t.meta, _SPENT: dict(t.spent)} if t.spent else t.meta
    kept.append(records.Record(step, dataclasses.replace(t, meta=meta)))
  return records.encode(kept, exact=True)


def decode(data: bytes) -> Iterator[tuple[int, Trajectory]]:
  """Yields (step, trajectory) of what `encode` returned."""
  for record in records.read(data):
    t = record.trajectory
    meta = dict(t.meta)
    spent = meta.pop(_SPENT, {})
    t = dataclasses.replace(t, meta=meta)
    t.spent.update(spent)
    yield record.step, t


def staleness(
  groups: Sequence[Sequence[Trajectory]], version: int, most: int
) -> dict[str, float]:
  """Ages, in versions, of the tokens that `version` is trained on.

  Returns:
    'staleness/mean' and 'staleness/max' in versions, and the share of tokens
    that are 0..most versions old as 'staleness/share_N'.
  """
  used = [t for group in groups for t in group if not t.failed]
  segments = [s for t in used for s in t.trained if s.train]
  written = [s.versions for s in segments if s.versions is not None]
  ages = version - np.concatenate([np.zeros(0, int), *written])
  n = max(len(ages), 1)
  found = {'mean': float(ages.sum()) / n, 'max': float(ages.max(initial=0))}
  for age in range(most + 1):
    found[f'share_{age}'] = float((ages == age).sum()) / n
  return {f'staleness/{name}': value for name, value in found.items()}
