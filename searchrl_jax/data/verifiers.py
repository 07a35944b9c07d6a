"""Environments of the library `verifiers` (0.4: verifiers.v1).

  c.data.train.words = dict(
    module='verifiers',
    environment=dict(
      taskset=dict(id='wiki-search'),
      agent=dict(harness=dict(id='null'), runtime=dict(type='subprocess')),
    ),
  )
  c.rollout.sampler = 'sessions'
  c.rollout.program = 'searchrl_jax.data.verifiers.play'
  c.reward.own = dict(fn='program.returned', weight=1.0)

`environment` is what a config of verifiers has as `env`. Without a runtime it
is a sandbox elsewhere; 'subprocess' is this machine. Its tasks are the
questions, and an episode talks to the session as to any OpenAI server.
"""

import asyncio
import contextlib
import functools
import itertools
import json
import os
from typing import Any
import uuid

from searchrl_jax.data.checks import DataError, make_question, require
from searchrl_jax.devices.signals import Held
from searchrl_jax.store import records
from searchrl_jax.types import Question


class _Environment:
  """One that is loaded; `serving` while an episode is under way."""

  def __init__(self, config: dict[str, Any]):
    try:
      from verifiers.v1.configs.agent import agent_config_fields
      from verifiers.v1.utils import loaders  # heavy, with pins of its own
    except ImportError as e:
      what = "module='verifiers' needs the package: pip install 'verifiers==0.4"
      raise DataError(f"{what}.*' (docs/agents.md); {e}") from e

    self.env = loaders.load_environment(loaders.resolve_env_config(config))
    agents = agent_config_fields(self.env.config)
    what = f'environment {self.env.config.env_id!r}'
    many = f'{what} has the agents {[*agents]}, and a session has one policy '
    require(len(agents) == 1, f'{many}and reward: load one with a single agent')
    [(name, agent)] = agents.items()
    again = agent.retries.max_retries or getattr(agent.retries, 'rules', ())
    what += f': {name}.retries would play on in the same session, whose reward'
    require(not again, f'{what} would also be of what failed; leave it out')
    self._rest, self._read = iter(self.env.taskset), []
    self._held: Held | None = None

  def tasks(self, n: int) -> list:
    """The first n; 0 = all."""
    more = max(n - len(self._read), 0) if n else None
    self._read += itertools.islice(self._rest, more)
    return self._read[: n or None]

  @contextlib.asynccontextmanager
  async def serving(self):
    """Tool servers, shared by the episodes of an event loop up to its end.

    After an episode that failed, later ones have others.
    """
    if self._held is None or not self._held.usable:
      self._held = Held(self.env.serving(), 'tool servers')
    held = self._held
    with held.used():
      await asyncio.shield(held.ready)
      yield


@functools.cache
def _environment(config: str) -> _Environment:
  return _Environment(json.loads(config))


def load(environment, n=0) -> list[Question]:
  """The first n tasks; 0 = all.

  Raises:
    DataError: verifiers is not installed, or the environment plays several
      agents, plays again, or has endless tasks and n is 0.
    ModuleNotFoundError: no such environment is installed.
  """
  config = records.plain(environment)
  made = _environment(json.dumps(config, sort_keys=True))
  name = made.env.config.env_id
  what = f'environment {name!r} has endless tasks: give n'
  require(n or made.env.taskset.bounded, what)
  return [
    make_question(
      name,
      id=f'{name}-{i}',
      text=task.data.prompt_text or task.data.name or name,
      meta={'environment': config, 'task': i},
    )
    for i, task in enumerate(made.tasks(n))
  ]


async def play(base_url: str, api_key: str, question: Question) -> float:
  """An episode; returns its reward.

  Raises:
    RuntimeError: it failed; with its last error.
  """
  from verifiers import v1 as vf

  meta = question.meta
  made = _environment(json.dumps(meta['environment'], sort_keys=True))
  task = made.tasks(meta['task'] + 1)[meta['task']]
  # A client of verifiers reads its key from a variable. Names with API_KEY do
  # not reach the processes that it starts.
  name = f'SEARCHRL_API_KEY_{uuid.uuid4().hex}'
  os.environ[name] = api_key
  try:
    client = vf.EvalClientConfig(base_url=base_url, api_key_var=name)
    async with made.serving():
      context = vf.ModelContext('policy', client)
      episode = await made.env.run_episode(task, context)
      found = [*episode.traces, episode]
      errors = [f'{e.type}: {e.message}' for part in found for e in part.errors]
      if not episode.ok:
        raise RuntimeError(errors[-1] if errors else 'the episode failed')
  finally:
    del os.environ[name]
  return episode.traces[0].reward
