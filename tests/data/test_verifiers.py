"""Environments of verifiers, without the package; tests/endpoint has it."""

import asyncio
import contextlib
import sys
import types

import pytest

from searchrl_jax.data import verifiers
from searchrl_jax.data.checks import DataError


class Env:
  """Counts its servers; `broken` ones raise as they end."""

  def __init__(self, agents):
    self.config = types.SimpleNamespace(env_id='e', agents=agents)
    self.taskset, self.log, self.broken = (), [], False

  @contextlib.asynccontextmanager
  async def serving(self):
    task = asyncio.current_task()
    self.log.append('begin')
    try:
      yield
    finally:
      assert asyncio.current_task() is task
      self.log.append('end')
      if self.broken:
        raise RuntimeError('broken')


def made(monkeypatch, agents):
  env = Env(agents)
  loaders = types.SimpleNamespace(
    load_environment=lambda config: env, resolve_env_config=dict
  )
  fields = lambda config: config.agents
  for name, module in {
    'verifiers': {},
    'verifiers.v1': {},
    'verifiers.v1.configs': {},
    'verifiers.v1.configs.agent': {'agent_config_fields': fields},
    'verifiers.v1.utils': {'loaders': loaders},
  }.items():
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**module))
  return verifiers._Environment({}), env


def agent(**retries):
  usual = dict(max_retries=0, rules=[])
  return types.SimpleNamespace(retries=types.SimpleNamespace(**usual | retries))


def test_what_is_not_installed_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, 'verifiers', None)
  with pytest.raises(DataError, match='pip install .*docs/agents.md'):
    verifiers.load(dict(taskset=dict(id='none')))


@pytest.mark.parametrize(
  'agents, named',
  [
    (dict(a=agent(), b=agent()), r"agents \['a', 'b'\].*single agent"),
    (dict(a=agent(max_retries=1)), 'a.retries.*leave it out'),
    (dict(a=agent(rules=['x'])), 'a.retries.*leave it out'),
  ],
)
def test_environments_that_cannot_be_played(monkeypatch, agents, named):
  with pytest.raises(DataError, match=named):
    made(monkeypatch, agents)


def test_servers_are_those_of_a_loop(monkeypatch):
  it, env = made(monkeypatch, dict(a=agent()))
  env.broken = True  # which costs no episode its reward

  async def episode(fails=False):
    async with it.serving():
      await asyncio.sleep(0)
      if fails:
        raise ValueError('failed')
      return 1.0

  async def run(fails):
    one, *rest = await asyncio.gather(
      episode(fails), *(episode() for _ in range(3)), return_exceptions=True
    )
    assert isinstance(one, ValueError) == fails and rest == [1.0] * 3
    assert await episode() == 1.0

  asyncio.run(run(False))
  assert env.log == ['begin', 'end']
  env.log.clear()
  asyncio.run(run(True))  # the last one has servers of its own
  assert sorted(env.log) == ['begin'] * 2 + ['end'] * 2


def test_servers_that_do_not_start_fail_the_episode(monkeypatch):
  it, env = made(monkeypatch, dict(a=agent()))

  @contextlib.asynccontextmanager
  async def serving():
    raise OSError('no port')
    yield

  env.serving = serving

  async def run():
    for _ in range(2):
      with pytest.raises(OSError, match='no port'):
        async with it.serving():
          pass

  asyncio.run(run())
