"""Drives environment, engine and source into groups of trajectories.

`rollout` runs the sampler of the config (`rollout.core`). The sampler of this
file, `sample`, plays independent trajectories.

Each trajectory is an asyncio task (design 5.5): while one searches, the engine
decodes the others, and the source batches searches that occur at the same time.
A trajectory keeps its engine handle until it ends, so a search can be retried.
"""

from collections.abc import Coroutine, Iterator, Mapping, Sequence
import time
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from searchrl_jax.engines.core import Handle
from searchrl_jax.rollout import core
from searchrl_jax.rollout.core import Services, Start
from searchrl_jax.types import Group, Prompt, Question, Trajectory


class Rollout(NamedTuple):
  groups: list[Group]  # in the order of the questions, samples in order
  stats: core.RolloutStats


def _changed(rollout: ConfigDict, **fields: Any) -> ConfigDict:
  return ConfigDict(rollout.to_dict() | fields)


def evaluation(config: ConfigDict) -> ConfigDict:
  """Returns config.rollout for chains with the sampling of config.eval."""
  e = config.eval
  sampling = dict(temperature=e.temperature, top_p=e.top_p, top_k=0)
  return _changed(config.rollout, sampler='chains', group=e.n, **sampling)


def greedy(config: ConfigDict) -> ConfigDict:
  """Returns config.rollout for one greedy answer per question.

  It never stops the run: a question whose answer fails has no baseline.
  """
  options = dict(sampler='chains', group=1, temperature=0.0, max_failed=1.0)
  return _changed(config.rollout, **options)


def refill_config(
  config: ConfigDict, groups: Sequence[Group], n: int
) -> ConfigDict:
  """Returns config.rollout for n more questions in a step with these groups.

  config.rollout.max_failed applies to all trajectories of the step together.
  """
  failed = [t.failed for group in groups for t in group]
  more = n * config.rollout.group
  allowed = config.rollout.max_failed * (len(failed) + more)
  return _changed(config.rollout, max_failed=(allowed - sum(failed)) / more)


async def rollout(
  questions: Sequence[Question],
  *,
  config: ConfigDict,
  ended: Mapping[core.Name, Trajectory] | None = None,
  reward: core.RewardOf | None = None,
  **fields: Any,
) -> Rollout:
  """Samples config.group trajectories of each question, by config.sampler.

  Args:
    questions: a question that occurs twice gets a second group, with the next
      sample numbers.
    config: config.rollout (or `evaluation(config)`): sampler and its fields,
      group, temperature, top_p, top_k, concurrency (trajectories at a time;
      0 = the capacity of the engine), search_attempts (of a search, in total),
      max_failed, max_staleness (steps under way beside this one).
    ended: (question id, sample) -> trajectories of this step that an earlier
      start finished; they are not sampled again (a sampler whose trajectories
      depend on each other samples all of those again that lack one).
    reward: gives a sampler rewards between rounds; None: there are none.
    **fields: further fields of `core.Services`.
      env: the environment.
      engine: samples the policy's tokens.
      source: answers searches.
      seed: config.seed, for the random streams.
      step: the training step, for the random streams.
      role: see `env.reset`; the default is 'solver'.
      with_routes: keeps what an engine recorded of experts, for training.
      on_trajectory: called when a trajectory ends, in order of arrival.
      on_group: called with each group that is returned, most of them as soon as
        their last trajectory has ended, in order of arrival.
      on_event: called with a trajectory's id and each new segment, search
        request and search answer (`ask` prints them). The record may join
        segments.

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
  total = len(questions) * config.group
  run = core.Services(
    config=config, done=dict(ended or {}), total=total, rewards=reward, **fields
  )
  asked = run.names(questions)
  begin = time.monotonic()
  try:
    groups = await sampler(questions, run)
  finally:
    for handle in [*run.handles]:
      run.close(handle)
  run.stats.seconds = time.monotonic() - begin
  for name in (name for group in asked for name in group):
    earlier = (ended or {}).get(name)
    if earlier is not None and run.done[name] is earlier:
      run.stats.resume(earlier)
  found = [[(t.question.id, t.sample) for t in group] for group in groups]
  if found != asked:
    raise ValueError(
      f'config.rollout.sampler={config.sampler!r} returned groups of '
      f'{str(found)[:300]}; it was asked for {str(asked)[:300]}, in this order'
    )
  for group in groups:  # those too that nobody recorded in this start
    run.tell(tuple(group))
  return Rollout(groups, run.stats)


async def sample(
  questions: Sequence[Question], services: Services
) -> list[Group]:
  """The sampler `chains`: trajectories that do not depend on each other."""
  starts, slots = services.starts(questions), services.slots()

  async def play(handles: Iterator[Handle], start: Start, sample: int) -> None:
    async with slots:
      found = await services.attempt(next(handles), *start, sample)
    services.record(found)

  chains: list[Coroutine] = []
  for names, start in zip(services.names(questions), starts, strict=True):
    missing = [n for name, n in names if (name, n) not in services.done]
    handles = _handles(services, start[1].prompt, len(missing))
    # All samples start from the same state, which is immutable.
    chains += [play(handles, start, n) for n in missing]
  await services.gather(chains)
  return services.groups(questions)


def _handles(services: Services, prompt: Prompt, n: int) -> Iterator[Handle]:
  """Opens the prompt of n samples when the first asks, forks it for others."""
  handle = services.open(prompt)
  for _ in range(n - 1):
    yield services.fork(handle)
  yield handle  # the last sample needs no fork
