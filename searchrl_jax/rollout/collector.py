"""Plays and rewards the questions of a step and, meanwhile, of later steps.

With `max_staleness` = 0 the rollouts of a step start with the step. With n,
those of the next n steps run at the same time: they start on weights at most n
versions older than those they will update, and continue with newer ones as
these are published, between and within the turns of a trajectory. Ended
trajectories that were not used yet are saved in the checkpoint. Of several
processes each plays and rewards its share of the questions.

A group is rewarded as soon as its last trajectory has ended, while others are
played (`rewards.core`). Rewards are not saved: the next start computes them
again. They are joined in the order of the questions, so that the order in
which groups end cannot show.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
import dataclasses
import functools
import itertools
import time
from typing import NamedTuple

from ml_collections import ConfigDict
import numpy as np

from searchrl_jax.data.core import Stream
from searchrl_jax.devices import cluster
from searchrl_jax.devices.signals import Signals
from searchrl_jax.rewards import core as rewards
from searchrl_jax.rollout.chains import Rollout, greedy, refill_config, rollout
from searchrl_jax.rollout.core import Name, RolloutStats
from searchrl_jax.store import records
from searchrl_jax.types import Group, Question, Rewards, Trajectory

_SPENT = 'rollout.spent'  # in the `meta` of encoded trajectories


class Played(NamedTuple):
  """The groups of a step, of all processes, and what they earned."""

  groups: list[Group]
  stats: RolloutStats
  reward: Rewards


class Ended:
  """The trajectories of a step that have ended.

  One that is sampled again takes the place of the earlier one: a service failed
  that one, or what depends on it is sampled again.

  trajectories: of an earlier start of the step.
  """

  def __init__(self, trajectories: Iterable[Trajectory] = ()):
    self._all = {t.id: t for t in trajectories}

  def keep(self, trajectory: Trajectory) -> None:
    self._all[trajectory.id] = trajectory

  def all(self) -> list[Trajectory]:
    """All of them; the event loop may add others meanwhile."""
    return [*self._all.values()]

  def usable(self) -> list[Trajectory]:
    """Those that are not sampled again: no service failed."""
    return [t for t in self.all() if not t.failed]

  def kept(self) -> list[Trajectory]:
    """Those of them that a checkpoint holds. Experts are in no file: what was
    sampled with recorded ones is sampled again."""
    return [t for t in self.usable() if not t.routes]

  def named(self, role: str = '') -> dict[Name, Trajectory]:
    """The usable ones of a role, or all, for `rollout`."""
    own = (t for t in self.usable() if role in ('', t.role))
    return {(t.question.id, t.sample): t for t in own}


class _Step:
  """The rollouts and rewards of one step, on this process.

  cursor: of the stream, before its questions.
  trajectories: those that an earlier start finished.
  """

  def __init__(self, cursor: dict, trajectories: Iterable[Trajectory] = ()):
    self.cursor, self.ended = cursor, Ended(trajectories)
    self.asked: set[str] = set()  # ids of its questions, on all processes
    self.expected = 0  # trajectories
    self.future: futures.Future  # of the last rollouts
    # The name of a group's first trajectory -> `rewards.of_groups`.
    self.rewards: dict[Name, futures.Future] = {}

  def share(self, questions: Iterable[Question], size: int) -> list[Question]:
    """This process's share of further questions, with groups of `size`."""
    new = []
    for q in questions:
      # A question that occurs twice in a step gets another id.
      name, again = q.id, itertools.count(2)
      while name in self.asked:
        name = f'{q.id}#{next(again)}'
      self.asked.add(name)
      new.append(dataclasses.replace(q, id=name))
    own = [*cluster.part(new)]
    # The process that plays a question decides what is kept of it.
    others = {q.id for q in new} - {q.id for q in own}
    kept = [t for t in self.ended.all() if t.question.id not in others]
    self.ended = Ended(kept)
    self.expected += size * len(own)
    return own

  def count(self) -> tuple[int, int]:
    """Trajectories that have ended, and all; see `Writer.phase`."""
    return min(len(self.ended.all()), self.expected), self.expected


class Collector:
  """Starts the rollouts of steps, rewards them, and returns them in order.

  Args:
    config: the whole.
    stream: of questions.
    useful: (groups, reward, config) -> of how many groups a trajectory can be
      trained on, for config.rollout.refill.
  """

  def __init__(self, config: ConfigDict, stream: Stream, useful: Callable):
    self._config, self._stream, self._useful = config, stream, useful
    self._step = 0  # the one that was asked for
    self._under_way: dict[int, _Step] = {}
    self._taken: dict[int, _Step] = {}  # the last one
    self._greedy = _Step({})  # its `baseline`
    self._saved: dict[int, list[Trajectory]] = {}
    self._running = 0
    self._idle, self._idle_since = 0.0, time.monotonic()

  def open(
    self, signals: Signals, timer: Callable, context: rewards.RewardContext
  ) -> None:
    """Sets the event loop and the services; call it before `take`.

    Args:
      signals: starts what runs, and waits for it.
      timer: `Writer.timer`. 'rollout' is the time in which a step waits for
        its trajectories, 'reward' that in which it then waits for rewards.
      context: what questions are played with, and rewarded.
    """
    self._signals, self._timer, self._context = signals, timer, context
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
    ended: dict[int, dict[str, Trajectory]] = {}
    for of_process in cluster.gather('ended', self.ended):
      for step, trajectories in of_process.items():
        # Those that an earlier start finished are known to all, until their
        # question is shared out (`_Step.share`).
        ended.setdefault(step, {}).update({t.id: t for t in trajectories})
    return encode({n: [*ended[n].values()] for n in sorted(ended)})

  def decode(self, data: bytes) -> None:
    """Restores what `encode` returned; call it before the first `take`."""
    for step, t in decode(data):
      self._saved.setdefault(step, []).append(t)

  def ended(self) -> dict[int, list[Trajectory]]:
    """Usable trajectories that have ended and were not taken, by step."""
    steps = {n: one.ended.kept() for n, one in self._under_way.items()}
    return dict(sorted((steps | self._saved).items()))

  # The steps.

  def take(self, step: int) -> Played:
    """The groups of `step` and their rewards; starts all that may start now.

    config.rollout.refill: up to so many rounds of further questions in place of
    groups whose rewards are all equal (DAPO, arXiv 2503.14476, section 3.2).

    Raises:
      Stopped: by a signal. Any error of a rollout or a reward, of any process.
    """
    self._step, self._taken, c = step, {}, self._config.rollout
    last = min(step + c.max_staleness + 1, self._config.train.steps)
    for ahead in range(step, last):
      if ahead not in self._under_way:
        cursor, questions = self._stream.state(), self._stream.next(c.questions)
        one = _Step(cursor, self._saved.pop(ahead, ()))
        questions = one.share(questions, c.group)
        one.future = self._signals.start(self._play(ahead, one, questions, c))
        self._under_way[ahead] = one
    one = self._under_way[step]
    groups, stats, reward = self._together('rollout', one)
    self._check(groups, reward)
    for _ in range(c.refill):
      short = c.questions - self._useful(groups, reward, self._config)
      if not short:
        break
      # With max_staleness = 0 the questions that follow are the next step's.
      questions = one.share(self._stream.next(short), c.group)
      again = refill_config(self._config, groups, short)
      one.future = self._signals.start(self._play(step, one, questions, again))
      more, further, earned = self._together('rollout', one)
      groups, stats = groups + more, stats + further
      reward = rewards.join(reward, earned)
      self._check(groups, reward)
    self._taken[step] = self._under_way.pop(step)
    return Played(groups, stats, reward)

  def baseline(self, groups: Sequence[Group]) -> Rewards:
    """What one greedy answer to the question of each group earns, in order.

    groups: of the step that was taken.

    Raises:
      as `take`.
    """
    one, c = _Step({}), greedy(self._config)
    self._greedy = one
    questions = one.share([group[0].question for group in groups], c.group)
    one.future = self._signals.start(self._play(self._step, one, questions, c))
    played = self._together('greedy', one)
    self._check(played.groups, played.reward)
    return played.reward

  def give_back(self, usable: bool) -> list[Trajectory]:
    """Cancels all that runs; returns what had ended of the last step.

    usable: whether ended rollouts may be used; if not, they are sampled again.
    """
    self.stop()
    self._under_way |= self._taken
    ended = []
    if self._step in self._under_way:  # else its questions could not be read
      one = self._under_way[self._step]
      ended = [t for t in one.ended.all() if t.question.id in one.asked]
    if not usable:
      for one in self._under_way.values():
        one.ended = Ended()
    return ended

  def stop(self) -> None:
    """Cancels all running rollouts, then the rewards that these started."""
    steps = [*self._under_way.values()]
    self._signals.cancel(*(one.future for one in steps))
    steps.append(self._greedy)
    self._signals.cancel(*(x for one in steps for x in one.rewards.values()))

  def idle_seconds(self) -> float:
    """Seconds without a running rollout since the last call."""
    idle, self._idle = self._idle, 0.0
    if not self._running:
      now = time.monotonic()
      idle, self._idle_since = idle + now - self._idle_since, now
    return idle

  async def _play(
    self, step: int, one: _Step, questions: Sequence[Question], c: ConfigDict
  ) -> Rollout:
    """Plays questions of a step; starts to reward each group as it ends.

    c: config.rollout, or what it is changed to.
    """
    if not self._running:
      self._idle += time.monotonic() - self._idle_since
    self._running += 1
    try:
      return await rollout(
        questions,
        config=c,
        env=self._context.env,
        engine=self._context.engine,
        source=self._context.source,
        seed=self._config.seed,
        step=step,
        ended=one.ended.named(),
        on_trajectory=one.ended.keep,
        on_group=functools.partial(self._reward, step, one),
        reward=self._between_rounds,
        with_routes=True,
      )
    finally:
      self._running -= 1
      self._idle_since = time.monotonic()

  def _reward(self, step: int, one: _Step, group: Group) -> None:
    """Starts to reward a group that has ended; on the event loop."""
    earned = rewards.of_groups(self._config.reward, [group], self._at(step))
    one.rewards[_name(group)] = self._signals.start(earned)

  async def _between_rounds(
    self, groups: Sequence[Group], step: int
  ) -> Rewards:
    """Rewards between the rounds of a sampler."""
    terms, context = self._config.reward, self._at(step)
    return await rewards.combine(terms, groups, context, whole=False)

  def _check(self, groups: Sequence[Group], reward: Rewards) -> None:
    """Lets the functions refuse a step, of all processes."""
    terms, context = self._config.reward, self._at(self._step)
    check = functools.partial(
      rewards.check_step, terms, groups, reward, context
    )
    cluster.agree('rewards', check)

  def _at(self, step: int) -> rewards.RewardContext:
    return dataclasses.replace(self._context, step=step)

  def _together(self, timer: str, one: _Step) -> Played:
    """What all processes played last; an error of one is one of all."""
    parts = cluster.gather(timer, lambda: self._own(timer, one))
    groups, stats, earned = zip(*parts)
    whole = functools.reduce(RolloutStats.beside, stats)
    reward = rewards.join(*filter(None, earned))
    return Played([*itertools.chain(*groups)], whole, reward)

  def _own(
    self, timer: str, one: _Step
  ) -> tuple[list[Group], RolloutStats, Rewards | None]:
    """Waits for what this process plays: groups, stats and their rewards."""
    wait, context = self._signals.wait, self._at(self._step)
    with self._timer(timer, one.count):
      groups, stats = wait(one.future)
    if not groups:  # there are more processes than questions
      return groups, stats, None
    with self._timer('reward'):
      results = [wait(one.rewards[_name(group)]) for group in groups]
      joined = rewards.of_step(self._config.reward, groups, results, context)
      return groups, stats, self._signals.run(joined)


def _name(group: Group) -> Name:
  """The name of its first trajectory."""
  return group[0].question.id, group[0].sample


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
