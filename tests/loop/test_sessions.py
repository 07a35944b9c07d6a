"""A program with OpenAI's client trains the policy that it talks to."""

import asyncio
from concurrent import futures
import pathlib
import sys
import threading

import httpx
import numpy as np
import openai
import pytest

from searchrl_jax import checks, train
from searchrl_jax.engines.core import EngineError
from searchrl_jax.engines.jax.engine import JaxEngine
from searchrl_jax.learn import batching
from searchrl_jax.lookup import ConfigError
from searchrl_jax.rewards.core import RewardError
from searchrl_jax.rollout import sessions
from searchrl_jax.rollout.core import RolloutError
from searchrl_jax.store import records
from searchrl_jax.types import Question
from tests import tiny
from tests.retrieval.test_server import alive, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('programs')]


def agent(base_url, api_key, question):
  """Asks, searches by HTTP, asks again; earns by what it reads."""
  client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
  messages = [{'role': 'user', 'content': f'Question: {question.text}\n'}]
  say = lambda: client.chat.completions.create(
    model='policy', messages=messages, max_tokens=8
  )
  first = say().choices[0].message.content
  found = httpx.post(
    base_url.replace('/v1', '/retrieve'),
    json={'queries': [question.text], 'topk': 1},
    headers={'Authorization': f'Bearer {api_key}'},
  ).json()
  text = found['result'][0][0]['document']['contents']
  messages.append({'role': 'assistant', 'content': first})
  messages.append({'role': 'user', 'content': text})
  second = say()
  if question.id.endswith('3'):  # history that it has changed
    messages[0]['content'] = 'Question: again?'
    say()
  return float(second.usage.completion_tokens % 3)


def crashes(base_url, api_key, question):
  if question.id.endswith(('1', '2')):
    raise RuntimeError('I broke')
  return agent(base_url, api_key, question)


def hangs(base_url, api_key, question):
  if question.id.endswith('1'):
    threading.Event().wait()
  return agent(base_url, api_key, question)


def leaves_the_stream(base_url, api_key, question):
  """Reads until it knows enough."""
  client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
  stream = client.chat.completions.create(
    model='policy',
    messages=[{'role': 'user', 'content': f'Question: {question.text}\n'}],
    stream=True,
  )
  for chunk in stream:
    if chunk.choices and chunk.choices[0].delta.content:
      return 1.0
  return 0.0


def asks_nothing(base_url, api_key, question):
  return 1.0


def config(url, program):
  c = tiny.config(url)
  c.rollout.update(sampler='sessions', program=f'{__name__}.{program}')
  c.env.max_contexts, c.env.max_tokens = 3, 96
  c.batch.tokens = 480  # has room for the loss of three contexts
  c.reward = dict(own=dict(fn='program.returned', weight=1.0))
  c.rollout.max_failed = 1.0
  c.eval.every = 0
  return c


@pytest.mark.long
def test_what_a_program_samples_is_trained(url, tmp_path):
  c = config(url, 'agent')
  before = threading.active_count()
  train.train(c, str(tmp_path))
  found = [*records.read(tmp_path / 'trajectories')]
  assert len(found) == 3 * 4 * 2
  for r in found:
    t = r.trajectory
    assert t.end == 'answer' and len(t.searches) == 1 and t.turns >= 2
    assert r.reward == t.meta['returned']
    own = [s for s in t.segments if s.author == 'policy']
    parts = batching.tokens_of(0, t)
    trained = [i for p in parts for i in p.ids[p.mask].tolist()]
    assert trained == [i for s in own for i in s.ids.tolist()]
    assert (np.isfinite(r.advantages) == batching.masks([t])[0]).all()
  assert threading.active_count() <= before + 8


@pytest.mark.long
def test_a_program_that_crashes_costs_its_trajectory(url, tmp_path):
  train.train(config(url, 'crashes'), str(tmp_path))
  found = [*records.read(tmp_path / 'trajectories')]
  broken = {r.trajectory.id for r in found if r.trajectory.failed}
  errors = [r.trajectory.meta['error'] for r in found if r.trajectory.failed]
  assert {*errors} == {'RuntimeError: I broke'}
  assert broken and all(i.split('/')[0].endswith(('1', '2')) for i in broken)
  assert not any(r.valid for r in found if r.trajectory.failed)


@pytest.mark.long
def test_a_stream_that_is_left_is_trained_up_to_there(url, tmp_path):
  c = config(url, 'leaves_the_stream')
  c.train.steps = 1
  train.train(c, str(tmp_path))
  found = [*records.read(tmp_path / 'trajectories')]
  assert len(found) == 8 and all(r.valid for r in found)
  for r in found:
    own = [s for s in r.trajectory.segments if s.author == 'policy']
    assert sum(len(s.ids) for s in own) > 0


@pytest.mark.long
def test_a_program_that_asks_nothing_has_failed(url, tmp_path):
  c = config(url, 'asks_nothing')
  c.rollout.max_failed = 0.2
  with pytest.raises(RolloutError, match='without a reply'):
    train.train(c, str(tmp_path))


@pytest.mark.long
def test_a_program_that_hangs_keeps_nobody(url, tmp_path):
  c = config(url, 'hangs')
  c.rollout.program_seconds, c.train.steps = 5.0, 1
  train.train(c, str(tmp_path))
  left = [t for t in threading.enumerate() if t.name == 'program']
  assert left and all(t.daemon for t in left)  # the process can end
  found = [*records.read(tmp_path / 'trajectories')]
  late = {r.trajectory.id for r in found if r.trajectory.failed}
  assert late == {
    r.trajectory.id for r in found if r.trajectory.question.id.endswith('1')
  }
  assert 0 < len(late) < len(found)


@pytest.mark.long
def test_a_command_plays_too(url, tmp_path):
  script = tmp_path / 'agent.py'
  script.write_text("""
import json, os, urllib.request as http
body = {'messages': [{'role': 'user', 'content': 'hi'}], 'max_tokens': 4}
def post(path, body):
  request = http.Request(
    os.environ['OPENAI_BASE_URL'] + path, json.dumps(body).encode(),
    {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']})
  return json.load(http.urlopen(request))
reply = post('/chat/completions', body)
question = json.loads(os.environ['SEARCHRL_QUESTION'])
post('/reward', {'reward': len(question['id']) % 2})
""")
  c = config(url, 'agent')
  c.rollout.program = f'{sys.executable} {script}'
  c.train.steps = 1
  train.train(c, str(tmp_path / 'run'))
  found = [*records.read(tmp_path / 'run/trajectories')]
  assert {r.reward for r in found} <= {0.0, 1.0}
  assert all(r.trajectory.turns == 1 for r in found)


@pytest.mark.parametrize('program', ['nobody', './nothing here', 'x "', ' '])
def test_a_program_that_there_is_not_is_named(url, program):
  c = config(url, 'nobody')
  c.rollout.program = program if ' ' in program else c.rollout.program
  with pytest.raises(ConfigError, match='config.rollout.program'):
    checks.check(c)


def test_attempts_that_no_program_plays_are_refused(url):
  c = config(url, 'agent')
  c.algorithm.advantage = 'remax'
  with pytest.raises(ConfigError, match='remax.*greedy'):
    checks.check(c)


def swallows(base_url, api_key, question):
  try:
    return agent(base_url, api_key, question)
  except Exception:
    return 0.0


def test_an_error_of_the_engine_is_no_reward(url, tmp_path, monkeypatch):
  async def lost(self, handle, sampling):
    raise EngineError('the device is gone')

  c = config(url, 'swallows')
  monkeypatch.setattr(JaxEngine, 'generate', lost)
  with pytest.raises(EngineError, match='gone'):
    train.train(c, str(tmp_path))


def silent(base_url, api_key, question):
  agent(base_url, api_key, question)


@pytest.mark.long
def test_a_program_without_rewards_stops_the_run(url, tmp_path):
  with pytest.raises(RewardError, match='return a number'):
    train.train(config(url, 'silent'), str(tmp_path))


def run(program, *args):
  return asyncio.run(sessions._program(program)(*args))


def finds_nothing(*args):
  return next(iter(()))


async def leaves(*args):
  sys.exit(3)


def gives_up_there(*args):
  task = futures.Future()
  task.cancel()
  task.result()


async def interrupts(*args):
  raise KeyboardInterrupt


class Odd(BaseException):
  pass


async def raises_its_own(*args):
  raise Odd


async def cancels_itself(*args):
  asyncio.current_task().cancel()
  await asyncio.sleep(1)


async def gives_up(*args):
  task = asyncio.ensure_future(asyncio.sleep(9))
  task.cancel()
  await task


@pytest.mark.parametrize(
  'name, error',
  [
    ('finds_nothing', 'StopIteration'),
    ('leaves', 'SystemExit'),
    ('gives_up', 'CancelledError'),
    ('interrupts', 'KeyboardInterrupt'),
    ('raises_its_own', 'Odd'),
    ('cancels_itself', 'CancelledError'),
    ('gives_up_there', 'CancelledError'),
  ],
)
def test_whatever_a_program_raises_is_an_error_of_its_own(name, error):
  with pytest.raises(RuntimeError, match=error):
    run(f'{__name__}.{name}', '', '', tiny)


async def waits(*args):
  await asyncio.Event().wait()


def waits_there(*args):
  threading.Event().wait(0.1)


async def will_not_go(*args):
  try:
    await asyncio.Event().wait()
  except asyncio.CancelledError:
    await asyncio.sleep(0.1)
    return 0.7  # too late


@pytest.mark.parametrize('name', ['waits', 'waits_there', 'will_not_go'])
def test_a_program_can_be_cancelled(name):
  async def main():
    with pytest.raises(TimeoutError):
      async with asyncio.timeout(0.01):
        await sessions._program(f'{__name__}.{name}')('', '', tiny)
    await asyncio.sleep(0.2)  # the thread ends, and nobody waits for it

  asyncio.run(main())


class Silent(Exception):
  __str__ = None


@pytest.mark.parametrize('reward', [float('nan'), '1', [1, 2], 1e30, object()])
def test_what_is_no_reward_is_named(reward):
  with pytest.raises((TypeError, ValueError), match='its reward is'):
    sessions._number(reward)
  assert sessions._number(np.float32(0.5)) == 0.5
  assert sessions._described(Silent()) == 'Silent'


def test_a_command_may_leave_something_behind(tmp_path):
  script = tmp_path / 'forks.sh'
  question = Question('q', 'who?', meta={'rank': np.int64(3)})
  script.write_text('sleep 600 & echo $! > "$0.pid"; echo lost >&2; exit $1')
  run(f'sh {script} 0', '', '', question)
  with pytest.raises(RuntimeError, match='status 3: lost'):
    run(f'sh {script} 3', '', '', question)
  left = int(pathlib.Path(f'{script}.pid').read_text())
  wait_until(lambda: not alive(left))
