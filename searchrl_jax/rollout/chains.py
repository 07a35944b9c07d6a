"""Drives environment, engine and source into groups of trajectories.

Each trajectory is a task of its own and waits for nobody (design 5.5): while
one searches, the engine decodes the others, and searches that fall together
are batched by the source. The engine's handle lives as long as its
trajectory, so a search that is tried again finds it where it was.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import hashlib
import time
from typing import NamedTuple

from ml_collections import ConfigDict

from searchrl_jax.engines.core import Completion, Engine, Handle, Sampling
from searchrl_jax.run import lookup
from searchrl_jax.sources.core import Source
from searchrl_jax.text.env import (
  Action,
  Done,
  Generate,
  Search,
  SearchEnv,
  State,
)
from searchrl_jax.types import (
  Group,
  Prompt,
  Question,
  SearchError,
  SearchRequest,
  SearchResult,
  Segment,
  Trajectory,
)

Event = Segment | SearchRequest | SearchResult | SearchError


class RolloutError(RuntimeError):
  """Too many trajectories failed; the message has the last search's error."""


@dataclasses.dataclass
class RolloutStats:
  """What a rollout did and where its time went.

  Waiting seconds are summed over trajectories, which wait at the same time:
  divided by `seconds` they are the mean number of trajectories that wait.
  """

  seconds: float = 0.0  # wall time
  trajectories: int = 0  # ended, failed ones included
  failed: int = 0
  generations: int = 0
  sampled_tokens: int = 0
  outside_tokens: int = 0  # observations and feedback, prompts not counted
  searches: int = 0  # queries, each counted once however often it was tried
  search_retries: int = 0  # queries tried again on the live handle
  failed_searches: int = 0  # queries without an answer after all attempts
  empty_searches: int = 0  # queries that found nothing, or were of no use
  engine_seconds: float = 0.0  # waiting for the engine, summed
  search_seconds: float = 0.0  # waiting for the source, summed
  trajectory_seconds: float = 0.0  # from start to end, summed

  def __add__(self, other: 'RolloutStats') -> 'RolloutStats':
    """Of one rollout after the other."""
    return RolloutStats(
      *(
        a + b
        for a, b in zip(
          dataclasses.astuple(self), dataclasses.astuple(other), strict=True
        )
      )
    )

  def metrics(self) -> dict[str, float]:
    """For the log; 'rollout/in_flight' is a mean over the wall time."""
    wall = max(self.seconds, 1e-9)
    values = dataclasses.asdict(self)
    values |= {
      'in_flight': self.trajectory_seconds / wall,
      'waiting_for_engine': self.engine_seconds / wall,
      'waiting_for_search': self.search_seconds / wall,
      'tokens_per_second': self.sampled_tokens / wall,
      'trajectories_per_second': self.trajectories / wall,
      'failed_fraction': self.failed / max(self.trajectories, 1),
    }
    return {f'rollout/{name}': float(v) for name, v in values.items()}


class Rollout(NamedTuple):
  groups: list[Group]  # in the order of the questions, samples in order
  stats: RolloutStats


def trajectory_seed(
  seed: int, step: int, question: str, role: str, sample: int
) -> int:
  """The random stream of a trajectory, in [0, 2**32).

  It depends on who the trajectory is and on nothing else, so neither the
  order of questions nor that of arrival can show in what is sampled.
  """
  name = repr((seed, step, question, role, sample)).encode()
  return int.from_bytes(hashlib.blake2b(name, digest_size=4).digest())


def evaluation(config: ConfigDict) -> ConfigDict:
  """config.rollout as an evaluation has it: sampled as config.eval says."""
  rollout = ConfigDict(config.rollout.to_dict())
  rollout.group = config.eval.n
  rollout.temperature = config.eval.temperature
  rollout.top_p = config.eval.top_p
  rollout.top_k = 0
  return rollout


def greedy(config: ConfigDict) -> ConfigDict:
  """config.rollout for one greedy answer to each question.

  A question whose answer fails has no baseline; that ends no run.
  """
  rollout = ConfigDict(config.rollout.to_dict())
  rollout.group, rollout.temperature, rollout.max_failed = 1, 0.0, 1.0
  return rollout


def further(config: ConfigDict, groups: Sequence[Group], n: int) -> ConfigDict:
  """config.rollout for n more questions of a step that has these groups.

  config.rollout.max_failed is a share of all of them.
  """
  rollout = ConfigDict(config.rollout.to_dict())
  flat = [t for group in groups for t in group]
  more = n * rollout.group
  allowed = rollout.max_failed * (len(flat) + more)
  rollout.max_failed = (allowed - sum(t.failed for t in flat)) / more
  return rollout


async def rollout(
  questions: Sequence[Question],
  *,
  env: SearchEnv,
  engine: Engine,
  source: Source,
  config: ConfigDict,
  seed: int,
  step: int,
  role: str = 'solver',
  on_trajectory: Callable[[Trajectory], None] | None = None,
  on_event: Callable[[str, Event], None] | None = None,
  ended: Mapping[tuple[str, int], Trajectory] | None = None,
) -> Rollout:
  """Samples config.group trajectories of each question.

  Args:
    questions: a question that comes twice gets further samples, in a second
      group of its own.
    env: the text protocol.
    engine: writes the policy's tokens.
    source: answers its searches.
    config: config.rollout (or `evaluation(config)`): group, temperature,
      top_p, top_k, concurrency (trajectories in flight; 0: as many as the
      engine has capacity for), search_attempts (tries of a search, in all),
      max_failed.
    seed: config.seed, and
    step: the training step; both name the random streams.
    role: who acts, see `env.reset`.
    on_trajectory: called as each trajectory ends, in order of arrival.
    on_event: called with a trajectory's id and each segment after the
      prompt, request and answer as it comes (`ask` prints them).
      Neighbours may come as one segment that the record then joins.
    ended: (question id, sample) -> trajectories of this step that a run
      before this one finished; they are not sampled again.

  Returns:
    One group for each question, in order, and what it took.

  Raises:
    RolloutError: more than config.max_failed of all trajectories failed. It
      is raised as soon as that is certain.
    Whatever engine, environment, source or a callback raises. In every case,
    cancellation included, the other trajectories are ended and all handles
    closed.
  """
  run = _Run(
    env,
    engine,
    source,
    config,
    seed,
    step,
    role,
    on_trajectory,
    on_event,
    ended or {},
  )
  begin = time.monotonic()
  groups = await run.all(questions)
  run.stats.seconds = time.monotonic() - begin
  return Rollout(groups, run.stats)


class _Prompt:
  """The prompt of a group: opened by its first sample, forked by each."""

  def __init__(self, engine: Engine, prompt: Prompt, samples: int):
    self._engine, self._prompt, self._left = engine, prompt, samples
    self._handle: Handle | None = None

  def take(self) -> Handle:
    if self._handle is None:
      self._handle = self._engine.open(self._prompt)
    self._left -= 1
    if self._left:
      return self._engine.fork(self._handle)
    handle, self._handle = self._handle, None
    return handle  # the last sample needs no copy

  def close(self) -> None:
    if self._handle is not None:
      self._engine.close(self._handle)
      self._handle = None


@dataclasses.dataclass
class _Run:
  """One call of `rollout`."""

  env: SearchEnv
  engine: Engine
  source: Source
  config: ConfigDict
  seed: int
  step: int
  role: str
  on_trajectory: Callable[[Trajectory], None] | None
  on_event: Callable[[str, Event], None] | None
  ended: Mapping[tuple[str, int], Trajectory]

  def __post_init__(self):
    for name in ('group', 'search_attempts'):
      lookup.require(
        self.config[name] >= 1,
        f'config.rollout.{name}={self.config[name]}: at least 1 is needed',
      )
    lookup.require(
      self.config.concurrency >= 0,
      f'config.rollout.concurrency={self.config.concurrency}: the '
      'trajectories in flight, or 0 for as many as the engine serves',
    )
    self.stats = RolloutStats()
    self.total = 0
    self.last_error: SearchError | None = None

  async def all(self, questions: Sequence[Question]) -> list[Group]:
    size = self.config.group
    self.total = len(questions) * size
    slots = asyncio.Semaphore(
      self.config.concurrency
      or self.engine.capacity(self.env.config.max_tokens)
    )
    # A prompt that does not fit is found before anything runs.
    starts = [self.env.reset(question, self.role) for question in questions]
    prompts, tasks, seen, names = [], {}, {}, []
    try:
      for question, (state, action) in zip(questions, starts, strict=True):
        first = seen.get(question.id, 0)
        seen[question.id] = first + size
        samples = [(question.id, first + i) for i in range(size)]
        missing = [name for name in samples if name not in self.ended]
        names += samples
        prompt = _Prompt(self.engine, action.prompt, len(missing))
        prompts.append(prompt)
        # States are immutable: the samples start from the same one.
        for name in missing:
          tasks[name] = asyncio.create_task(
            self.one(slots, prompt, state, action, name[1])
          )
      found = await _gather(list(tasks.values()))
    finally:
      for prompt in prompts:
        prompt.close()
    done = {**self.ended, **dict(zip(tasks, found, strict=True))}
    flat = [done[name] for name in names]
    return [tuple(flat[i : i + size]) for i in range(0, len(flat), size)]

  async def one(
    self,
    slots: asyncio.Semaphore,
    prompt: _Prompt,
    state: State,
    action: Generate,
    sample: int,
  ) -> Trajectory:
    async with slots:
      begin = time.monotonic()
      handle = prompt.take()
      try:
        state = await self.play(handle, state, action, sample)
      finally:
        self.engine.close(handle)
      seconds = time.monotonic() - begin
      trajectory = self.env.trajectory(state, sample, seconds)
    stats = self.stats
    stats.trajectories += 1
    stats.failed += trajectory.failed
    stats.trajectory_seconds += trajectory.seconds
    if self.on_trajectory is not None:
      self.on_trajectory(trajectory)
    self.check()
    return trajectory

  async def play(
    self, handle: Handle, state: State, action: Action, sample: int
  ) -> State:
    """Environment, engine and source in turn until it is over."""
    name = f'{state.name}/{sample}'  # Trajectory.id
    seed = trajectory_seed(
      self.seed, self.step, state.question.id, state.role, sample
    )
    told = state.length
    while not isinstance(action, Done):
      if isinstance(action, Generate):
        event = await self.generate(handle, action, seed)
      else:
        event = await self.search(name, action)
      state, action = self.env.step(state, event)
      if self.on_event is not None:
        for segment in _after(state.segments, told):
          self.on_event(name, segment)
        told = state.length
    return state

  async def generate(
    self, handle: Handle, action: Generate, seed: int
  ) -> Completion:
    if action.append:
      self.engine.append(handle, action.append)
      self.stats.outside_tokens += len(action.append)
    sampling = Sampling(
      max_tokens=action.max_tokens,
      temperature=self.config.temperature,
      top_p=self.config.top_p,
      top_k=self.config.top_k,
      stops=action.stops,
      stop_ids=action.stop_ids,
      seed=seed,
      limit=self.env.config.max_tokens,
      priority=self.step,
    )
    begin = time.monotonic()
    completion = await self.engine.generate(handle, sampling)
    self.stats.engine_seconds += time.monotonic() - begin
    self.stats.generations += 1
    self.stats.sampled_tokens += len(completion.ids)
    return completion

  async def search(
    self, name: str, action: Search
  ) -> tuple[SearchResult | SearchError, ...]:
    """One answer for each request; failed ones are asked again."""
    requests = [
      dataclasses.replace(request, trajectory=name, step=self.step)
      for request in action.requests
    ]
    for request in requests:
      self.tell(name, request)
    answers: dict[int, SearchResult | SearchError] = {}
    open_ = list(range(len(requests)))
    begin = time.monotonic()
    for attempt in range(self.config.search_attempts):
      self.stats.search_retries += len(open_) if attempt else 0
      found = await self.source.search([requests[i] for i in open_])
      if len(found) != len(open_):
        raise ValueError(
          f'source {type(self.source).__name__} gave {len(found)} answers to '
          f'{len(open_)} requests'
        )
      answers.update(zip(open_, found, strict=True))
      open_ = [i for i in open_ if isinstance(answers[i], SearchError)]
      if not open_:
        break
    self.stats.search_seconds += time.monotonic() - begin
    self.stats.searches += len(requests)
    self.stats.failed_searches += len(open_)
    self.stats.empty_searches += sum(
      isinstance(a, SearchResult) and not a.passages for a in answers.values()
    )
    for i in open_:
      self.last_error = answers[i]
    for i in range(len(requests)):
      self.tell(name, answers[i])
    return tuple(answers[i] for i in range(len(requests)))

  def tell(self, name: str, event: Event) -> None:
    if self.on_event is not None:
      self.on_event(name, event)

  def check(self) -> None:
    stats = self.stats
    if stats.failed > self.config.max_failed * self.total:
      error = self.last_error
      raise RolloutError(
        f'{stats.failed} of {self.total} trajectories failed ('
        f'{stats.trajectories} have ended), more than '
        f'config.rollout.max_failed={self.config.max_failed} allows; the last '
        'search error: ' + (error.message if error else 'none')
      )


def _after(segments: Sequence[Segment], told: int) -> Iterator[Segment]:
  """What stands after the first `told` tokens."""
  for segment in segments:
    n = len(segment.ids)
    if told < n:
      yield dataclasses.replace(
        segment,
        **{
          field: getattr(segment, field)[told:]
          for field in ('ids', 'logps', 'versions')
          if getattr(segment, field) is not None
        },
      )
    told = max(0, told - n)


async def _gather(tasks: Sequence[asyncio.Task]) -> list[Trajectory]:
  """The results in order; the first error ends every other task first."""
  try:
    if tasks:
      await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
      for task in tasks:
        if task.done() and not task.cancelled() and task.exception():
          raise task.exception()
    return [task.result() for task in tasks]
  finally:
    for task in tasks:
      task.cancel()
    # Their handles are closed once they have ended, not when told to.
    await asyncio.gather(*tasks, return_exceptions=True)
