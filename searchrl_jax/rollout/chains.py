"""Drives environment, engine and source into groups of trajectories.

`rollout` runs the sampler of the config (`rollout.core`). The sampler of this
file, `sample`, plays independent trajectories.

Each trajectory is an asyncio task (design 5.5): while one searches, the engine
decodes the others, and the source batches searches that occur at the same time.
A trajectory keeps its engine handle until it ends, so a search can be retried.
"""

import asyncio
from collections.abc import (
  Awaitable,
  Callable,
  Iterable,
  Iterator,
  Mapping,
  Sequence,
)
import dataclasses
import time
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from searchrl_jax.engines.core import Completion, Engine, Handle, Sampling
from searchrl_jax.rollout import core
from searchrl_jax.rollout.core import (
  Name,
  Score,
  Services,
  Start,
  trajectory_seed,
)
from searchrl_jax.run import lookup
from searchrl_jax.sources.core import Source
from searchrl_jax.text.env import Done, Generate, Search, SearchEnv
from searchrl_jax.text.states import Action, State
from searchrl_jax.types import (
  Group,
  Prompt,
  Question,
  Rewards,
  SearchError,
  SearchRequest,
  SearchResult,
  Segment,
  Trajectory,
)

Event = Segment | SearchRequest | SearchResult | SearchError


class RolloutError(RuntimeError):
  """Too many trajectories failed; the message has the last search error."""


@dataclasses.dataclass
class RolloutStats:
  """Counters and times of a rollout.

  Waiting times are sums over concurrent trajectories. Divided by `seconds` they
  are the mean number of trajectories that wait.
  """

  seconds: float = 0.0  # wall time
  trajectories: int = 0  # ended, including failed ones
  failed: int = 0
  generations: int = 0
  sampled_tokens: int = 0
  outside_tokens: int = 0  # observations and feedback, without prompts
  searches: int = 0  # queries, without retries
  search_retries: int = 0  # retries of queries
  failed_searches: int = 0  # queries without an answer after all attempts
  empty_searches: int = 0  # queries without passages or text
  tool_cost: float = 0.0  # sum of what the calls of tools cost
  engine_seconds: float = 0.0  # sum of waiting for the engine
  search_seconds: float = 0.0  # sum of waiting for the source
  trajectory_seconds: float = 0.0  # sum of durations

  def __add__(self, other: 'RolloutStats') -> 'RolloutStats':
    """The stats of two rollouts, one after the other."""
    pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other))
    return RolloutStats(*(a + b for a, b in pairs))

  def metrics(self) -> dict[str, float]:
    """For the log. 'rollout/in_flight' is a mean over the wall time."""
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


def evaluation(config: ConfigDict) -> ConfigDict:
  """Returns config.rollout for chains with the sampling of config.eval."""
  e = config.eval
  sampling = dict(temperature=e.temperature, top_p=e.top_p, top_k=0)
  options = dict(sampler='chains', group=e.n, **sampling)
  return ConfigDict(config.rollout.to_dict() | options)


def greedy(config: ConfigDict) -> ConfigDict:
  """Returns config.rollout for one greedy answer per question.

  It never stops the run: a question whose answer fails has no baseline.
  """
  options = dict(sampler='chains', group=1, temperature=0.0, max_failed=1.0)
  return ConfigDict(config.rollout.to_dict() | options)


def refill_config(
  config: ConfigDict, groups: Sequence[Group], n: int
) -> ConfigDict:
  """Returns config.rollout for n more questions in a step with these groups.

  config.rollout.max_failed applies to all trajectories of the step together.
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
  ended: Mapping[Name, Trajectory] | None = None,
  score: Score | None = None,
) -> Rollout:
  """Samples config.group trajectories of each question, by config.sampler.

  Args:
    questions: a question that occurs twice gets a second group, with the next
      sample numbers.
    env: the environment.
    engine: samples the policy's tokens.
    source: answers searches.
    config: config.rollout (or `evaluation(config)`): sampler and its fields,
      group, temperature, top_p, top_k, concurrency (trajectories at a time;
      0 = the capacity of the engine), search_attempts (of a search, in total),
      max_failed, max_staleness (steps under way beside this one).
    seed: config.seed, for the random streams.
    step: the training step, for the random streams.
    role: see `env.reset`.
    on_trajectory: called when a trajectory ends, in order of arrival.
    on_event: called with a trajectory's id and each new segment, search request
      and search answer (`ask` prints them). The record may join segments.
    ended: (question id, sample) -> trajectories of this step that an earlier
      start finished; they are not sampled again (a sampler whose trajectories
      depend on each other samples all of those again that lack one).
    score: gives a sampler rewards between rounds; None: there are none.

  Returns:
    One group per question, in order, and statistics.

  Raises:
    RolloutError: more than config.max_failed of all trajectories failed; raised
      as soon as that is certain.
    ValueError: the sampler returned other trajectories than it was asked for.
    Any error of engine, environment, source or a callback. After an error or a
    cancellation, all other trajectories are cancelled and all handles closed.
  """
  sampler = core.sampler(config)
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
    score,
    dict(ended or {}),
    len(questions) * config.group,
  )
  begin = time.monotonic()
  try:
    groups = await sampler(questions, run)
  finally:
    for handle in [*run.handles]:
      run.close(handle)
  run.stats.seconds = time.monotonic() - begin
  found = [[(t.question.id, t.sample) for t in group] for group in groups]
  lookup.require(
    found == run.names(questions),
    f'config.rollout.sampler={config.sampler!r} returned {_differ(found)}; it '
    f'was asked for {_differ(run.names(questions))}, in this order',
    ValueError,
  )
  return Rollout(groups, run.stats)


async def sample(
  questions: Sequence[Question], services: Services
) -> list[Group]:
  """The sampler `chains`: trajectories that do not depend on each other."""
  starts, slots = services.starts(questions), services.slots()
  chains: list[Awaitable] = []
  for names, start in zip(services.names(questions), starts, strict=True):
    missing = [name for name in names if name not in services.done]
    prompt = _Prompt(services, start[1].prompt, len(missing))
    # All samples start from the same state, which is immutable.
    chains += [_chain(services, slots, prompt, start, n) for _, n in missing]
  await services.gather(chains)
  return services.groups(questions)


async def _chain(
  services: Services,
  slots: asyncio.Semaphore,
  prompt: '_Prompt',
  start: Start,
  sample: int,
) -> None:
  async with slots:
    found = await services.attempt(prompt.handle(), *start, sample)
  services.record(found)


class _Prompt:
  """The prompt of a group: opened for the first sample, forked for others."""

  def __init__(self, services: Services, prompt: Prompt, samples: int):
    self._services, self._prompt, self._left = services, prompt, samples
    self._handle: Handle | None = None

  def handle(self) -> Handle:
    """Returns a handle for the next sample."""
    if self._handle is None:
      self._handle = self._services.open(self._prompt)
    self._left -= 1
    if self._left:
      return self._services.fork(self._handle)
    handle, self._handle = self._handle, None
    return handle  # the last sample needs no fork


@dataclasses.dataclass
class _Run(Services):
  """One call of `rollout`: the services of its sampler."""

  env: SearchEnv
  engine: Engine
  source: Source
  config: ConfigDict
  seed: int
  step: int
  role: str
  on_trajectory: Callable[[Trajectory], None] | None
  on_event: Callable[[str, Event], None] | None
  rewards: Score | None
  done: dict[Name, Trajectory]
  total: int  # trajectories

  def __post_init__(self):
    self.stats = RolloutStats()
    self.handles: list[Handle] = []  # that are open
    self.last_error: SearchError | None = None

  def names(self, questions: Sequence[Question]) -> list[list[Name]]:
    size, seen, names = self.config.group, {}, []
    for question in questions:
      first = seen.get(question.id, 0)
      seen[question.id] = first + size
      names.append([(question.id, first + i) for i in range(size)])
    return names

  def starts(self, questions: Sequence[Question]) -> list[Start]:
    return [self.env.reset(question, self.role) for question in questions]

  def stream(
    self, question: Question, sample: int, branch: Sequence[str | int] = ()
  ) -> int:
    return trajectory_seed(
      self.seed, self.step, question.id, self.role, sample, branch
    )

  def slots(self, handles: int = 1) -> asyncio.Semaphore:
    room = self.engine.capacity(self.env.config.max_tokens)
    places = self.config.concurrency or room
    if handles > 1:
      # The engine admits forks of what has begun without asking for room:
      # leave enough for those of all steps that are under way.
      room //= 1 + self.config.max_staleness
      places = min(places, room) // handles
    return asyncio.Semaphore(max(1, places))

  def open(self, prompt: Prompt) -> Handle:
    self.handles.append(self.engine.open(prompt))
    return self.handles[-1]

  def fork(self, handle: Handle) -> Handle:
    self.handles.append(self.engine.fork(handle))
    return self.handles[-1]

  def close(self, handle: Handle) -> None:
    self.handles.remove(handle)
    self.engine.close(handle)

  async def gather(self, work: Iterable[Awaitable]) -> list[Any]:
    return await _gather([asyncio.ensure_future(x) for x in work])

  async def score(self, groups: Sequence[Group]) -> Rewards:
    if self.rewards is None:
      raise lookup.ConfigError(
        f'config.rollout.sampler={self.config.sampler!r} asks for rewards '
        f'between rounds, and this loop gives none to role {self.role!r}; use '
        "'chains'"
      )
    return await self.rewards(groups, self.step)

  def groups(self, questions: Sequence[Question]) -> list[Group]:
    names = self.names(questions)
    return [tuple(self.done[name] for name in group) for group in names]

  def record(self, *trajectories: Trajectory) -> None:
    stats = self.stats
    for trajectory in trajectories:
      stats.trajectories += 1
      stats.failed += trajectory.failed
      stats.trajectory_seconds += trajectory.seconds
      self.done[trajectory.question.id, trajectory.sample] = trajectory
      if self.on_trajectory is not None:
        self.on_trajectory(trajectory)
    if stats.failed > self.config.max_failed * self.total:
      error = self.last_error
      raise RolloutError(
        f'{stats.failed} of {self.total} trajectories failed ('
        f'{stats.trajectories} have ended), more than '
        f'config.rollout.max_failed={self.config.max_failed} allows; the last '
        'search error: ' + (error.message if error else 'none')
      )

  async def attempt(
    self,
    handle: Handle,
    state: State,
    action: Action,
    sample: int,
    branch: Sequence[str | int] = (),
  ) -> Trajectory:
    begin = time.monotonic()
    try:
      while not isinstance(action, Done):
        state, action = await self.turn(handle, state, action, sample, branch)
    finally:
      self.close(handle)
    return self.env.trajectory(state, sample, time.monotonic() - begin)

  async def turn(
    self,
    handle: Handle,
    state: State,
    action: Action,
    sample: int,
    branch: Sequence[str | int] = (),
  ) -> tuple[State, Action]:
    name = f'{state.name}/{sample}'  # Trajectory.id
    seed = self.stream(state.question, sample, branch)
    turn, reported = state.turn, state.length
    while state.turn == turn and not isinstance(action, Done):
      if isinstance(action, Generate):
        event = await self.generate(handle, action, seed)
      else:
        event = await self.search(name, action)
      state, action = self.env.step(state, event)
      if self.on_event is not None:
        for segment in _after(state.segments, reported):
          self.on_event(name, segment)
        reported = state.length
    return state, action

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
    """Returns one answer per request, after retries of failed ones."""
    requests = [
      dataclasses.replace(request, trajectory=name, step=self.step)
      for request in action.requests
    ]
    if self.on_event is not None:
      for request in requests:
        self.on_event(name, request)
    answers: dict[int, SearchResult | SearchError] = {}
    open_ = list(range(len(requests)))
    begin = time.monotonic()
    for attempt in range(self.config.search_attempts):
      self.stats.search_retries += len(open_) if attempt else 0
      new = await self.source.search([requests[i] for i in open_])
      lookup.require(
        len(new) == len(open_),
        f'source {type(self.source).__name__} gave {len(new)} answers to '
        f'{len(open_)} requests',
        ValueError,
      )
      answers.update(zip(open_, new, strict=True))
      open_ = [i for i in open_ if isinstance(answers[i], SearchError)]
      if not open_:
        break
    self.stats.search_seconds += time.monotonic() - begin
    self.stats.searches += len(requests)
    self.stats.failed_searches += len(open_)
    results = [a for a in answers.values() if isinstance(a, SearchResult)]
    self.stats.empty_searches += sum(not a.shown for a in results)
    self.stats.tool_cost += sum(a.cost for a in results)
    for i in open_:
      self.last_error = answers[i]
    ordered = tuple(answers[i] for i in range(len(requests)))
    if self.on_event is not None:
      for answer in ordered:
        self.on_event(name, answer)
    return ordered


def _after(segments: Sequence[Segment], start: int) -> Iterator[Segment]:
  """Yields the segments after the first `start` tokens."""
  for segment in segments:
    n = len(segment.ids)
    if start < n:
      columns = {f: getattr(segment, f) for f in ('ids', 'logps', 'versions')}
      rest = {f: x[start:] for f, x in columns.items() if x is not None}
      yield dataclasses.replace(segment, **rest)
    start = max(0, start - n)


def _differ(names: Sequence[Sequence[Name]]) -> str:
  """Names of trajectories, for an error message."""
  flat = [
    f'{question}/{sample}' for group in names for question, sample in group
  ]
  shown = ', '.join(flat[:8]) + (', ...' if len(flat) > 8 else '')
  return f'{len(names)} groups ({shown})'


async def _gather(tasks: Sequence[asyncio.Future]) -> list[Any]:
  """Returns the results in order; an error cancels all other tasks."""
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
    # Their handles are closed when they end, which cancel() does not wait for.
    await asyncio.gather(*tasks, return_exceptions=True)
