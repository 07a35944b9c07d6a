"""The sampler contract: questions in, groups of trajectories out.

A sampler is an async function that config.rollout.sampler names. Its
keyword-only parameters are fields of config.rollout:

  async def sample(questions, services, *, trees) -> list[Group]

It returns one group for each question, in order, whose trajectories are those
of `services.names`, so that identities are unique. `services` has what every
sampler needs, and closes at the end the handles that are still open. Set
`fn.check = f` for a function f(config.rollout) that raises on fields that
cannot work.

An attempt may start from a prompt, from another prompt than it is trained with
(a hint: `Trajectory.train_context`), or from what `turn` returned for another
attempt (`rollout.tree`).

The result must not depend on the order of arrival (design 5.10): a trajectory
draws from the stream of its identity, and a choice between rounds from a
stream of `services.stream` as well.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
import functools
import hashlib
from typing import Any, Protocol

from ml_collections import ConfigDict

from searchrl_jax.engines.core import Engine, Handle
from searchrl_jax.run import lookup
from searchrl_jax.sources.core import Source
from searchrl_jax.text.env import SearchEnv
from searchrl_jax.text.states import Action, Generate, State
from searchrl_jax.types import Group, Prompt, Question, Rewards, Trajectory

Name = tuple[str, int]  # (question id, sample): a trajectory within a step
Start = tuple[State, Generate]  # what `env.reset` returns
# (groups, training step) -> their rewards; awaited on the event loop.
Score = Callable[[Sequence[Group], int], Awaitable[Rewards]]


def trajectory_seed(
  seed: int,
  step: int,
  question: str,
  role: str,
  sample: int,
  branch: Sequence[str | int] = (),
) -> int:
  """Returns the seed of a trajectory's random stream, in [0, 2**32).

  It depends on the identity of the trajectory only, so samples do not depend on
  the order of questions or of arrival. `branch` names a stream besides the one
  of the trajectory that starts from the prompt.
  """
  name = repr((seed, step, question, role, sample, *branch)).encode()
  return int.from_bytes(hashlib.blake2b(name, digest_size=4).digest())


class Services(Protocol):
  """What a sampler works with, for one call of `chains.rollout`."""

  env: SearchEnv
  engine: Engine
  source: Source  # answers searches; `turn` asks it
  config: ConfigDict  # config.rollout
  step: int  # of training
  role: str  # see `env.reset`
  # What has ended, by name: trajectories of an earlier start of the step, and
  # those that were recorded. They are not sampled again.
  done: Mapping[Name, Trajectory]

  def names(self, questions: Sequence[Question]) -> list[list[Name]]:
    """The names of each group's trajectories: config.group each.

    A question that occurs twice has further samples in its second group.
    """

  def starts(self, questions: Sequence[Question]) -> list[Start]:
    """The start of each question.

    Raises:
      ValueError: a prompt is too long. Call this before anything runs.
    """

  def stream(
    self, question: Question, sample: int, branch: Sequence[str | int] = ()
  ) -> int:
    """The seed of a random stream; see `trajectory_seed`."""

  def slots(self, handles: int = 1) -> asyncio.Semaphore:
    """One place for each unit of work that the engine can serve at a time.

    handles: the most that a unit keeps open. A unit waits for its place, and
    opens handles only while it has it: otherwise units that wait for each
    other's room may never end (design 5.5).
    """

  # Handles: as of the engine. What is open at the end, or after an error, is
  # closed. `services.engine` truncates them.
  def open(self, prompt: Prompt) -> Handle: ...
  def fork(self, handle: Handle) -> Handle: ...
  def close(self, handle: Handle) -> None: ...

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

  async def attempt(
    self,
    handle: Handle,
    state: State,
    action: Action,
    sample: int,
    branch: Sequence[str | int] = (),
  ) -> Trajectory:
    """Plays to the end and closes the handle. Does not record the result."""

  async def gather(self, work: Iterable[Awaitable]) -> list[Any]:
    """Runs concurrently; results in order. An error cancels the others."""

  async def score(self, groups: Sequence[Group]) -> Rewards:
    """The rewards of config.reward, between rounds.

    Raises:
      ConfigError: the loop gives no rewards to this role's sampler.
    """

  def record(self, *trajectories: Trajectory) -> None:
    """Counts trajectories that have ended, and keeps them in `done`.

    A later start of the step does not sample them again. Record those that
    depend on each other (a shared prefix, rewards) in one call, and sample all
    of them again where `done` lacks one: another start may have other weights.

    Raises:
      RolloutError: more than config.max_failed of all trajectories failed.
    """

  def groups(self, questions: Sequence[Question]) -> list[Group]:
    """The groups of `names`, all of which are done."""


def sampler(config: ConfigDict) -> Callable[..., Awaitable[list[Group]]]:
  """The sampler of config.rollout, with its fields.

  config.sampler is the module of a function `sample` in searchrl_jax.rollout,
  or the dotted path of a function.

  Raises:
    ConfigError: there is no such function, config.rollout lacks a field of it,
      or the fields cannot work.
  """
  where, name = 'config.rollout.sampler', config.sampler
  try:
    fn = lookup.function(
      'searchrl_jax.rollout', name if '.' in name else f'{name}.sample'
    )
  except ValueError as e:
    raise lookup.ConfigError(f'{where}: {e}') from e
  given = lookup.arguments(fn, config, where)
  if hasattr(fn, 'check'):
    fn.check(config)
  return functools.partial(fn, **given)
