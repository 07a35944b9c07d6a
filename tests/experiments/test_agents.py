"""The example program plays as the native environment does, token by token."""

import asyncio
import random

import numpy as np
import pytest

from experiments.agents import program, rows
from searchrl_jax import schema
from searchrl_jax.rollout.chains import rollout
from searchrl_jax.sweep import core
from searchrl_jax.text import prompts
from searchrl_jax.text.env import SearchEnv
from searchrl_jax.types import Question
from tests.fakes import ByteTokenizer, FakeEngine, FakeSource

SAYS = (
  '<search>a b</search>',
  '<search> </search>',
  '<think>x</think>ab',
  '<think><answer>a',
  'no action',
  '',
  '<search>a<answer>b</answer>',
  '<answer>yes</answer>',
  '<answer>no</answer>',
)
QUESTIONS = [Question(f'q{n}', f'Who is {n}?', ('yes',)) for n in range(12)]


def says(history, seed):
  return random.Random(f'{history}{seed}').choice(SAYS)


def play(**fields):
  env = schema.base().env
  env.update(max_turns=3, max_turn_tokens=24, max_tokens=4000)
  config = schema.base().rollout
  config.update(group=3, program_seconds=60.0, **fields)
  engine = FakeEngine(says)
  played = rollout(
    QUESTIONS,
    env=SearchEnv(ByteTokenizer(), prompts.load('micro'), env, 'template', 1),
    engine=engine,
    source=FakeSource(),
    config=config,
    seed=0,
    step=0,
  )
  found = asyncio.run(played)
  assert engine.handles == {}
  return [t for group in found.groups for t in group], found.stats


def joined(trajectory, column):
  parts = [getattr(s, column) for s in trajectory.segments]
  return np.concatenate([p for p in parts if p is not None]).tolist()


def test_a_program_plays_as_the_native_environment():
  program = 'experiments.agents.program.play'
  native, stats = play(sampler='chains')
  own, counted = play(sampler='sessions', program=program)
  for a, b in zip(native, own, strict=True):
    assert (a.id, a.turns, a.contexts) == (b.id, b.turns, b.contexts)
    for column in ('ids', 'logps', 'versions'):
      assert joined(a, column) == joined(b, column)
    asked = [[s.request.query for s in t.searches] for t in (a, b)]
    assert asked[0] == asked[1]
    text = ByteTokenizer().decode(joined(a, 'ids'))
    assert b.meta['returned'] == float(text.endswith('<answer>yes</answer>'))
  for name in ('generations', 'sampled_tokens', 'searches', 'contexts'):
    assert getattr(stats, name) == getattr(counted, name)
  searches = [len(t.searches) for t in native]
  assert min(searches) == 0 and max(searches) > 1


def test_the_table_can_run():
  core.check(rows.ROW)
  assert core.plan(rows.ROW, rows.ROW.arms)[0] == 'warm/warm/0'


@pytest.mark.long
def test_the_benchmark_compares_equal_work(monkeypatch):
  from experiments.benchmarks import harness, sessions

  for name, value in dict(SIZE='1m', SESSIONS=8, TOKENS=16).items():
    monkeypatch.setattr(sessions, name, value)
  for name in ('action', 'TOKENS'):  # which it replaces
    monkeypatch.setattr(program, name, getattr(program, name))
  turns = lambda sides, warm: {name: [side()] for name, side in sides.items()}
  monkeypatch.setattr(harness, 'turns', turns)
  found = sessions.measure()
  assert [row['side'] for row in found] == ['chains', 'sessions']
  (bar,) = sessions.bars(found)
  assert bar['bar'] == 1.15 and bar['value'] > 0
