"""Drives environment, engine and source into groups of trajectories.

`rollout` runs the sampler of the config (`rollout.core`). The sampler of this
file, `sample`, plays independent trajectories.

Each trajectory is an asyncio task (design 5.5): while one searches, the engine
decodes the others, and the source batches searches that occur at the same time.
A trajectory keeps its engine handle until it ends, so a search can be retried.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
import time
from typing import NamedTuple

from ml_collections import ConfigDict

from searchrl_jax.engines.core import Engine, Handle
from searchrl_jax.rollout import core
from searchrl_jax.rollout.core import (
  Event,
  Name,
  RolloutStats,
  Score,
  Services,
  Start,
)
from searchrl_jax.run import lookup
from searchrl_jax.sources.core import Source
from searchrl_jax.text.env import SearchEnv
from searchrl_jax.types import Group, Prompt, Question, Trajectory


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
  run = Services(
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


def _differ(names: Sequence[Sequence[Name]]) -> str:
  """Names of trajectories, for an error message."""
  flat = [
    f'{question}/{sample}' for group in names for question, sample in group
  ]
  shown = ', '.join(flat[:8]) + (', ...' if len(flat) > 8 else '')
  return f'{len(names)} groups ({shown})'
