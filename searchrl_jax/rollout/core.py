"""The sampler contract: questions in, groups of trajectories out.

A sampler is an async function that config.rollout.sampler names. Its
keyword-only parameters are fields of config.rollout:

  async def sample(questions, services, *, trees) -> list[Group]

It returns one group for each question, in order, whose trajectories are those
of `services.names`, so that identities are unique. `services` has what every
sampler needs, and closes at the end the handles that are still open. Set
`fn.check = f` for a function f(config.rollout) that raises on fields that
cannot work, and `fn.opaque = True` if what is read stands in no observation.

An attempt may start from a prompt, from another prompt than it is trained with
(a hint: `Trajectory.train_context`), or from what `turn` returned for another
attempt (`rollout.tree`).

The result must not depend on the order of arrival (design 5.10): a trajectory
draws from the stream of its identity, and a choice between rounds from a
stream of `services.stream` as well.
"""

import asyncio
import collections
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
import dataclasses
import functools
import hashlib
import itertools
import time
from typing import Any

from ml_collections import ConfigDict

from searchrl_jax import lookup, types
from searchrl_jax.devices import signals
from searchrl_jax.engines.core import Completion, Engine, Handle, Sampling
from searchrl_jax.sources.core import Answer, Source
from searchrl_jax.text.env import SearchEnv
from searchrl_jax.text.states import Action, Done, Generate, State
from searchrl_jax.types import (
  Group,
  Prompt,
  Question,
  SearchRequest,
  Segment,
  Trajectory,
)

Name = tuple[str, int]  # (question id, sample): a trajectory within a step
Start = tuple[State, Generate]  # what `env.reset` returns
# (groups, training step) -> their rewards; awaited on the event loop.
RewardOf = Callable[[Sequence[Group], int], Awaitable[types.Rewards]]
Event = Segment | types.SearchRequest | types.SearchResult | types.SearchError


def trajectory_seed(*name: str | int) -> int:
  """Returns the seed of a trajectory's random stream, in [0, 2**32).

  name: seed, step, question, role and sample, so that samples do not depend on
  the order of questions or of arrival; then `branch` if it is not the stream of
  the trajectory that starts from the prompt.
  """
  digest = hashlib.blake2b(repr(name).encode(), digest_size=4).digest()
  return int.from_bytes(digest)


class RolloutError(RuntimeError):
  """Too many trajectories failed; the message has the last error."""


@dataclasses.dataclass
class RolloutStats:
  """Counters and times of a rollout.

  Counters are those of the step, whatever start of the run sampled; times, and
  rates by time, are of this start alone. Waiting times are sums over concurrent
  trajectories. Divided by `seconds` they are the mean number of trajectories
  that wait.
  """

  seconds: float = 0.0  # wall time
  trajectories: int = 0  # ended, including failed ones
  failed: int = 0
  generations: int = 0
  sampled_tokens: int = 0
  outside_tokens: int = 0  # observations and feedback, without prompts
  searches: int = 0  # queries, without retries
  tool_calls: int = 0  # of other tools, without retries
  search_retries: int = 0  # of any tool, as the failed ones
  failed_searches: int = 0  # queries without an answer after all attempts
  empty_searches: int = 0  # queries without passages or text
  tool_cost: float = 0.0  # sum of what the calls of tools cost
  contexts: int = 0  # that were begun in place of others
  carried_tokens: int = 0  # of earlier contexts, computed again in these
  traces: int = 0  # foreign trajectories, whole or in part; see the sampler
  traces_left_out: int = 0
  hinted: int = 0  # attempts with a hint in their prompt; see the sampler
  hints_left_out: int = 0
  engine_seconds: float = 0.0  # sum of waiting for the engine
  search_seconds: float = 0.0  # sum of waiting for the source
  trajectory_seconds: float = 0.0  # sum of durations
  # What an earlier start sampled, of `trajectories` and `sampled_tokens`.
  earlier_trajectories: int = 0
  earlier_tokens: int = 0

  def count(self, **counts: float) -> None:
    """Adds to counters."""
    for name, n in counts.items():
      setattr(self, name, getattr(self, name) + n)

  def resume(self, trajectory: Trajectory) -> None:
    """Counts a trajectory that an earlier start sampled."""
    spent = trajectory.spent
    tokens = spent.get('sampled_tokens', 0)
    self.count(trajectories=1, earlier_trajectories=1, earlier_tokens=tokens)
    self.count(**spent)

  def __add__(self, other: 'RolloutStats') -> 'RolloutStats':
    """The stats of two rollouts, one after the other."""
    pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other))
    return RolloutStats(*(a + b for a, b in pairs))

  def beside(self, other: 'RolloutStats') -> 'RolloutStats':
    """The stats of two rollouts, at the same time in two processes."""
    seconds = max(self.seconds, other.seconds)
    return dataclasses.replace(self + other, seconds=seconds)

  def metrics(self) -> dict[str, float]:
    """For the log. 'rollout/in_flight' is a mean over the wall time."""
    wall = max(self.seconds, 1e-9)
    values = dataclasses.asdict(self)
    tokens = self.sampled_tokens - self.earlier_tokens
    ended = self.trajectories - self.earlier_trajectories
    values |= {
      'in_flight': self.trajectory_seconds / wall,
      'waiting_for_engine': self.engine_seconds / wall,
      'waiting_for_search': self.search_seconds / wall,
      'tokens_per_second': tokens / wall,
      'trajectories_per_second': ended / wall,
      'failed_fraction': self.failed / max(self.trajectories, 1),
    }
    return {f'rollout/{name}': float(v) for name, v in values.items()}


@dataclasses.dataclass
class Services:
  """What a sampler works with, for one call of `chains.rollout`."""

  env: SearchEnv
  engine: Engine
  source: Source  # answers searches; `turn` asks it
  config: ConfigDict  # config.rollout
  seed: int
  step: int  # of training
  # What has ended, by name: trajectories of an earlier start of the step, and
  # those that were recorded. They are not sampled again.
  done: dict[Name, Trajectory]
  total: int  # trajectories
  role: str = 'solver'  # see `env.reset`
  on_trajectory: Callable[[Trajectory], None] | None = None
  on_event: Callable[[str, Event], None] | None = None
  on_group: Callable[[Group], None] | None = None
  rewards: RewardOf | None = None
  stats: RolloutStats = dataclasses.field(default_factory=RolloutStats)
  # The counters of what was played under a name and is not recorded yet.
  spent: dict[Name, collections.Counter] = dataclasses.field(
    default_factory=lambda: collections.defaultdict(collections.Counter)
  )
  handles: list[Handle] = dataclasses.field(default_factory=list)  # open ones
  # Whether trajectories have the experts that an engine recorded, as those that
  # are trained on need them; and those of the earlier contexts of a handle.
  with_routes: bool = False
  routes: dict[Handle, list] = dataclasses.field(
    default_factory=lambda: collections.defaultdict(list)
  )
  # What `on_group` was told of, by the identity of its trajectories.
  told: dict[tuple[int, ...], Group] = dataclasses.field(default_factory=dict)
  last_error: types.SearchError | None = None

  def names(self, questions: Sequence[Question]) -> list[list[Name]]:
    """The names of each group's trajectories: config.group each.

    A question that occurs twice has further samples in its second group.
    """
    size, seen = self.config.group, collections.defaultdict(itertools.count)
    return [[(q.id, next(seen[q.id])) for _ in range(size)] for q in questions]

  def starts(self, questions: Sequence[Question]) -> list[Start]:
    """The start of each question.

    Raises:
      ValueError: a prompt is too long. Call this before anything runs.
    """
    return [self.env.reset(question, self.role) for question in questions]

  def stream(
    self, question: Question, sample: int, branch: Sequence[str | int] = ()
  ) -> int:
    """The seed of a random stream; see `trajectory_seed`."""
    name = (self.seed, self.step, question.id, self.role, sample)
    return trajectory_seed(*name, *branch)

  def slots(self, handles: int = 1, timed=False) -> asyncio.Semaphore:
    """One place for each unit of work that the engine can serve at a time.

    handles: the most that a unit keeps open. A unit waits for its place, and
    opens handles only while it has it: otherwise units that wait for each
    other's room may never end (design 5.5). timed: it must not wait for room
    while it has its place, as its time runs.
    """
    room = self.engine.capacity(self.env.config.max_tokens)
    places = self.config.concurrency or room
    if handles > 1 or timed:
      # The engine admits forks of what has begun without asking for room:
      # leave enough for what all steps have begun.
      room //= 1 + self.config.max_staleness
      places = min(places, room) // handles
    return asyncio.Semaphore(max(1, places))

  # Handles: as of the engine. What is open at the end, or after an error, is
  # closed. `services.engine` truncates them.

  def open(self, prompt: Prompt) -> Handle:
    self.handles.append(self.engine.open(prompt))
    return self.handles[-1]

  def fork(self, handle: Handle) -> Handle:
    self.handles.append(self.engine.fork(handle))
    return self.handles[-1]

  def close(self, handle: Handle) -> None:
    self.handles.remove(handle)
    self.engine.close(handle)

  async def gather(self, work: Iterable[Coroutine]) -> list[Any]:
    """Runs concurrently; results in order. An error cancels the others."""
    return await signals.gather(work)

  async def whole(
    self, questions: Sequence[Question], play: Callable[..., Coroutine]
  ) -> list[Group]:
    """Plays groups whose trajectories depend on each other.

    play: (question, start, samples) -> None; records all trajectories of a
      group that lacks some.
    """
    names, starts = self.names(questions), self.starts(questions)
    await self.gather(
      play(question, start, [n for _, n in own])
      for question, start, own in zip(questions, starts, names, strict=True)
      if any(name not in self.done for name in own)
    )
    return self.groups(questions)

  async def reward(self, groups: Sequence[Group]) -> types.Rewards:
    """The rewards of config.reward, between rounds.

    Raises:
      ConfigError: the loop gives no rewards to this role's sampler.
    """
    what = f'config.rollout.sampler={self.config.sampler!r} asks for rewards'
    why = f"this loop gives none to role {self.role!r}; use 'chains'"
    lookup.require(self.rewards, f'{what}, and {why}')
    return await self.rewards(groups, self.step)

  def groups(self, questions: Sequence[Question]) -> list[Group]:
    """The groups of `names`, all of which are done."""
    names = self.names(questions)
    return [tuple(self.done[name] for name in group) for group in names]

  def record(self, *trajectories: Trajectory) -> None:
    """Counts trajectories that have ended, and keeps them in `done`; tells of
    the groups that have ended with them.

    A later start of the step does not sample them again. Record those that
    depend on each other (a shared prefix, rewards) in one call, and sample all
    of them again where `done` lacks one: another start may have other weights.
    Only failed trajectories that are recorded count towards config.max_failed;
    RolloutStats.failed_searches counts those of all attempts.

    Raises:
      RolloutError: more than config.max_failed of all trajectories failed.
    """
    stats = self.stats
    for trajectory in trajectories:
      stats.trajectories += 1
      stats.failed += trajectory.failed
      stats.trajectory_seconds += trajectory.seconds
      name = trajectory.question.id, trajectory.sample
      trajectory.spent.update(self.spent.pop(name, {}))
      self.done[name] = trajectory
      if self.on_trajectory is not None:
        self.on_trajectory(trajectory)
    if stats.failed > self.config.max_failed * self.total:
      error = self.last_error and self.last_error.message
      raise RolloutError(
        f'{stats.failed} of {self.total} trajectories failed, more than '
        f'config.rollout.max_failed={self.config.max_failed} allows; the last '
        f'error: {error}'
      )
    size = self.config.group
    ids = ((t.question.id, t.sample // size * size) for t in trajectories)
    for question, first in dict.fromkeys(ids):
      names = [(question, first + n) for n in range(size)]
      if all(name in self.done for name in names):
        self.tell(tuple(self.done[name] for name in names))

  def tell(self, group: Group) -> None:
    """Tells `on_group` of a group that has ended, once."""
    key = tuple(map(id, group))
    if self.on_group is not None and key not in self.told:
      self.told[key] = group
      self.on_group(group)

  async def fresh(
    self,
    slots: asyncio.Semaphore,
    start: Start,
    sample: int,
    branch: Sequence[str | int] = (),
  ) -> Trajectory:
    """`attempt` from the prompt, with a handle of its own and a place."""
    async with slots:
      handle = self.open(start[1].prompt)
      return await self.attempt(handle, *start, sample, branch)

  async def attempt(
    self,
    handle: Handle,
    state: State,
    action: Action,
    sample: int,
    branch: Sequence[str | int] = (),
  ) -> Trajectory:
    """Plays to the end and closes the handle. Does not record the result."""
    begin = time.monotonic()
    try:
      while not isinstance(action, Done):
        state, action = await self.turn(handle, state, action, sample, branch)
      seconds = time.monotonic() - begin
      return await self.trajectory(handle, state, sample, seconds)
    finally:
      self.close(handle)

  async def trajectory(
    self, handle: Handle, state: State, sample: int, seconds: float, meta=None
  ) -> Trajectory:
    """`env.trajectory` of what a handle has, with the experts of its tokens."""
    made = self.env.trajectory(state, sample, seconds, meta)
    await self._keep_routes(handle)
    routes = tuple(self.routes.pop(handle, ()))
    return dataclasses.replace(made, routes=routes) if routes else made

  async def _keep_routes(self, handle: Handle) -> None:
    """Keeps those of a context, if the engine records them."""
    recorded = self.with_routes and getattr(self.engine, 'routes', None)
    found = await recorded(handle) if recorded else None
    if found is not None:
      self.routes[handle].append(found)

  async def turn(
    self,
    handle: Handle,
    state: State,
    action: Action,
    sample: int,
    branch: Sequence[str | int] = (),
  ) -> tuple[State, Action]:
    """Plays one turn and the search that it asks for.

    Returns:
      The state with which the next turn begins, and its `Generate`; or the
      last state, and `Done`.
    """
    name = f'{state.name}/{sample}'  # Trajectory.id
    count = functools.partial(self.count, (state.question.id, sample))
    turn, reported = state.turn, types.length(state.segments)
    while state.turn == turn and not isinstance(action, Done):
      if isinstance(action, Generate):
        # Positions, on which draws depend, begin anew in each context.
        own = ('context', action.context) if action.context else ()
        seed = self.stream(state.question, sample, (*branch, *own))
        event = await self._generate(handle, action, seed, count)
      else:
        event = await self.search(name, action.requests, count)
      state, action = self.env.step(state, event)
      self._tell(name, types.cut(state.segments, reported))
      reported = types.length(state.segments)
    return state, action

  def _tell(self, name: str, events: Iterable[Event]) -> None:
    if self.on_event is not None:
      for event in events:
        self.on_event(name, event)

  def count(self, name: Name, **counts: float) -> None:
    self.stats.count(**counts)
    self.spent[name].update(counts)

  async def _generate(
    self, handle: Handle, action: Generate, seed: int, count: Callable
  ) -> Completion:
    if action.keep is not None:
      await self._keep_routes(handle)
      self.engine.truncate(handle, action.keep)
      count(contexts=1, carried_tokens=action.carried)
    if action.append:
      self.engine.append(handle, action.append)
      count(outside_tokens=len(action.append) - action.carried)
    sampling = Sampling(
      temperature=self.config.temperature,
      top_p=self.config.top_p,
      top_k=self.config.top_k,
      max_tokens=action.max_tokens,
      stops=action.stops,
      stop_ids=action.stop_ids,
      seed=seed,
      limit=self.env.config.max_tokens,
      priority=self.step,
    )
    begin = time.monotonic()
    completion = await self.engine.generate(handle, sampling)
    self.stats.engine_seconds += time.monotonic() - begin
    count(generations=1, sampled_tokens=len(completion.ids))
    return completion

  async def search(
    self, name: str, asked: Sequence[SearchRequest], count: Callable
  ) -> tuple[Answer, ...]:
    """Returns one answer per request, after retries of failed ones.

    name: Trajectory.id. count: `self.count` of the trajectory.
    """
    origin = dict(trajectory=name, step=self.step)
    requests = [dataclasses.replace(r, **origin) for r in asked]
    self._tell(name, requests)
    answers: dict[int, Answer] = {}
    open_ = list(range(len(requests)))
    begin = time.monotonic()
    for attempt in range(self.config.search_attempts):
      count(search_retries=len(open_) if attempt else 0)
      new = await self.source.search([requests[i] for i in open_])
      what = f'gave {len(new)} answers to {len(open_)} requests'
      message = f'source {type(self.source).__name__} {what}'
      lookup.require(len(new) == len(open_), message, ValueError)
      answers.update(zip(open_, new, strict=True))
      open_ = [i for i in open_ if isinstance(answers[i], types.SearchError)]
      if not open_:
        break
    self.stats.search_seconds += time.monotonic() - begin
    searched = [r.tool == types.SEARCH for r in requests]
    results = [a for a in answers.values() if isinstance(a, types.SearchResult)]
    count(
      searches=sum(searched),
      tool_calls=len(requests) - sum(searched),
      failed_searches=len(open_),
      empty_searches=sum(
        a.request.tool == types.SEARCH and not a.shown for a in results
      ),
      tool_cost=sum(a.cost for a in results),
    )
    ordered = tuple(answers[i] for i in range(len(requests)))
    if open_:
      self.last_error = answers[open_[-1]]
    self._tell(name, ordered)
    return ordered


def sampler(config: ConfigDict) -> functools.partial:
  """The sampler of config.rollout (`lookup.sampler`), with its fields.

  Raises:
    ConfigError: there is no such function, config.rollout lacks a field of it,
      or the fields cannot work.
  """
  fn = lookup.sampler(config.sampler)
  given = lookup.arguments(fn, config, 'config.rollout.sampler')
  if hasattr(fn, 'check'):
    fn.check(config)
  return functools.partial(fn, **given)
