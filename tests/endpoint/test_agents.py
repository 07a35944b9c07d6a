"""Agents and environments of others play sessions (make test-agents)."""

import asyncio
import pathlib

import pytest

from searchrl_jax import schema
from searchrl_jax.data import core as data
from searchrl_jax.rollout.chains import rollout
from tests.endpoint.scripted import Calls, Says, call, served
from tests.endpoint.test_sessions import check
from tests.fakes import FakeEngine, FakeSource, make_env

pytestmark = pytest.mark.agents

FOLDER = pathlib.Path(__file__).with_name('environments')
WHY = 'make test-agents installs it'


def test_smolagents_plays_a_session():
  """Its client replays calls as text: each turn is a context of its own."""
  smolagents = pytest.importorskip('smolagents', reason=WHY)

  class Find(smolagents.Tool):
    name, description = 'find', 'Finds a passage.'
    inputs = {'query': {'type': 'string', 'description': 'What to find.'}}
    output_type = 'string'

    def forward(self, query: str) -> str:
      return f'Ann wrote {query}.'

  def program(url, key):
    model = smolagents.OpenAIModel('policy', api_base=url, api_key=key)
    agent = smolagents.ToolCallingAgent(
      tools=[Find()], model=model, max_steps=4, verbosity_level=0
    )
    return agent.run('Who wrote it?')

  async def main():
    engine = Says(
      call('find', query='it'),
      call('find', query='that'),
      call('final_answer', answer='Ann'),
    )
    async with served(engine, Calls(), most=100_000) as (url, session):
      answer = await asyncio.to_thread(program, url, session.key)
    assert (answer, session.edits) == ('Ann', 2)
    said = bytes(i for i in engine.asked[-1][0] if i < 256).decode()
    assert 'Ann wrote it.' in said and 'Ann wrote that.' in said
    check(session, engine)

  asyncio.run(main())


def played(monkeypatch, says):
  """The trajectories of tiny_questions, two for each task."""
  pytest.importorskip('verifiers.v1', reason=WHY)
  monkeypatch.syspath_prepend(str(FOLDER))
  own = dict(
    taskset=dict(id='tiny-questions'),
    agent=dict(runtime=dict(type='subprocess')),
  )
  sets = dict(tiny=dict(module='verifiers', environment=own, n=4))
  (questions,) = data.load_sets(sets, schema.base().data).values()
  config = schema.base().rollout
  config.update(group=2, sampler='sessions', max_failed=1.0)
  config.program = 'searchrl_jax.data.verifiers.play'
  engine = FakeEngine(says)
  found = rollout(
    questions,
    env=make_env(),
    engine=engine,
    source=FakeSource(),
    config=config,
    seed=0,
    step=0,
  )
  groups = asyncio.run(found).groups
  assert engine.handles == {}
  return [t for group in groups for t in group]


def test_an_environment_of_verifiers_is_played(monkeypatch):
  for _ in range(2):  # a second event loop
    found = played(monkeypatch, lambda history, seed: f'say {seed % 7}')
    assert [t.question.text for t in found[::2]] == ['Q0?', 'Q1?', 'Q2?', 'Q3?']
    for t in found:
      assert (t.turns, t.contexts, t.end) == (2, (), 'answer')
      assert t.meta['returned'] == 2.0 * t.question.meta['task']


def test_an_episode_that_fails_is_no_reward(monkeypatch):
  found = played(monkeypatch, lambda history, seed: 'crash')
  assert all(t.failed and 'returned' not in t.meta for t in found)
