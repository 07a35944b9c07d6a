"""Steps ahead: begun in time, handed out in order, kept when a run ends."""

import asyncio
from concurrent import futures
import contextlib
import dataclasses
import operator
import os
import signal
import threading
import time
import types
from unittest import mock

from ml_collections import ConfigDict
import numpy as np
import pytest

from searchrl_jax import schema
from searchrl_jax.devices import signals
from searchrl_jax.devices.signals import Loop, Signals, Stopped
from searchrl_jax.learn import batching
from searchrl_jax.rewards import core as rewards
from searchrl_jax.rollout import collector, core
from searchrl_jax.rollout.chains import Rollout
from searchrl_jax.rollout.core import RolloutStats
from searchrl_jax.store import records
from searchrl_jax.types import Question, Segment, Trajectory
from tests.clock import until
from tests.fakes import FakeEngine, FakeSource, make_env, searcher
from tests.rollout.test_chains import seen


class Stream:
  """Questions q0, q1, ... by number."""

  def __init__(self):
    self.at = 0

  def state(self):
    return {'at': self.at}

  def restore(self, state):
    self.at = state['at']

  def next(self, n):
    self.at += n
    return [Question(f'q{i}', 'who') for i in range(self.at - n, self.at)]


def trajectory(question, sample=0, end='answer', version=0, train=True):
  ids = np.array([5, 6], np.int32)
  segment = Segment(
    ids,
    'policy',
    'answer',
    train=train,
    logps=np.float32([-0.1, -1 / 3]),
    versions=np.full(2, version, np.int32),
  )
  return Trajectory(question, (segment,), (), end, sample=sample)


class Rollouts:
  """Stands for `rollout`: a step ends when the test says so."""

  def __init__(self):
    self.begun, self.sampled, self.cancelled = [], [], []
    self.go = {n: threading.Event() for n in range(9)}

  async def __call__(
    self, questions, *, step, ended, on_trajectory, on_group, **_
  ):
    self.begun.append(step)
    groups = []
    try:
      for q in questions:
        found = ended.get((q.id, 0))
        if found is None:
          found = trajectory(q, end='failed' if q.id == 'q1' else 'answer')
          on_trajectory(found)
          self.sampled.append((step, q.id))
        groups.append((found,))
        on_group(groups[-1])
      while not self.go[step].is_set():
        await asyncio.sleep(0.001)
    except asyncio.CancelledError:
      await asyncio.sleep(0.01)  # cleaning up takes time
      self.cancelled.append(step)
      raise
    return Rollout(groups, RolloutStats())


async def ended_at_once(questions, *, on_trajectory, on_group, **_):
  groups = [(trajectory(q),) for q in questions]
  for group in groups:
    on_trajectory(group[0])
    on_group(group)
  return Rollout(groups, RolloutStats())


async def one_each(groups, context):
  return rewards.per_trajectory(groups, lambda t: 1.0)


def configured(reward='one_each', steps=6, **fields):
  c = schema.base()
  c.train.steps = steps
  c.rollout.update(dict(questions=2, group=1) | fields)
  reward = dict(fn=f'{__name__}.{reward}', weight=1.0)
  c.reward = ConfigDict(dict(r=reward))
  return c


def opened(config, signals, stream, useful=batching.useful, **services):
  rollouts = collector.Collector(config, stream, useful)
  timer = lambda *_: contextlib.nullcontext()
  rollouts.open(signals, timer, rewards.RewardContext(**services))
  return rollouts


@pytest.fixture
def make(monkeypatch):
  """Collectors whose rollouts are those of `start`."""

  def make(signals, stream, start, most, useful=batching.useful, **fields):
    monkeypatch.setattr(collector, 'rollout', start)
    config = configured(max_staleness=most, **fields)
    return opened(config, signals, stream, useful)

  return make


@pytest.mark.parametrize('most', [0, 1, 3])
def test_steps_begin_as_many_versions_ahead_as_allowed(make, most):
  start, stream = Rollouts(), Stream()
  for event in start.go.values():
    event.set()
  with Signals() as signals:
    rollouts = make(signals, stream, start, most)
    for step in range(6):
      found = rollouts.take(step)
      assert [g[0].question.id for g in found.groups] == [
        f'q{2 * step}',
        f'q{2 * step + 1}',
      ]
      # At the update of `step`: those of `most` steps beyond it, no more.
      wanted = list(range(min(step + most + 1, 6)))
      until = time.monotonic() + 10
      while len(start.begun) < len(wanted) and time.monotonic() < until:
        time.sleep(0.01)
      time.sleep(0.02)
      assert start.begun == wanted
    assert rollouts.state() == stream.state()


def test_questions_that_cannot_be_read_are_the_error(make):
  start, stream = Rollouts(), Stream()

  def unreadable(n):
    raise OSError('the disk is gone')

  stream.next = unreadable
  with Signals() as signals:
    rollouts = make(signals, stream, start, 0)
    with pytest.raises(OSError, match='disk is gone'):
      rollouts.take(0)
    assert rollouts.give_back(True) == []


def test_what_ended_and_was_not_taken_is_kept_and_not_sampled_again(make):
  start, stream = Rollouts(), Stream()
  start.go[0].set()
  with Signals() as signals:
    rollouts = make(signals, stream, start, 2)
    rollouts.take(0)
    while len(start.sampled) < 6:
      time.sleep(0.001)
    cursor, kept = rollouts.state(), rollouts.encode()
    rollouts.stop()
  assert sorted(start.cancelled) == [1, 2]  # tasks end in any order
  assert cursor == {'at': 2}

  again, stream = Rollouts(), Stream()
  for event in again.go.values():
    event.set()
  stream.restore(cursor)
  with Signals() as signals:
    rollouts = make(signals, stream, again, 2)
    rollouts.decode(kept)
    # Before its step begins it is still there, for the next checkpoint.
    assert rollouts.encode() == kept
    first, second = rollouts.take(1), rollouts.take(2)
  got = [g[0] for r in (first, second) for g in r.groups]
  assert [t.question.id for t in got] == ['q2', 'q3', 'q4', 'q5']
  assert not {(1, 'q2'), (1, 'q3'), (2, 'q4'), (2, 'q5')} & set(again.sampled)
  np.testing.assert_array_equal(
    got[0].segments[0].logps, np.float32([-0.1, -1 / 3])
  )


def test_what_a_service_failed_is_sampled_again(make):
  start = Rollouts()
  with Signals() as signals:
    rollouts = make(signals, Stream(), start, 0)
    signals.start(_later(start.go[0]))
    rollouts.take(0)
    seen = rollouts.give_back(True)
    assert [t.question.id for t in seen] == ['q0', 'q1']
    assert rollouts.state() == {'at': 0}
    (kept,) = rollouts.ended()[0]
    assert kept.question.id == 'q0'  # q1 failed


def test_a_step_that_ends_early_leaves_the_one_before_it_used(make):
  start = Rollouts()
  start.go[0].set()
  with Signals() as signals:
    rollouts = make(signals, Stream(), start, 0)
    rollouts.take(0)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(Stopped):
      rollouts.take(1)
    rollouts.give_back(True)
    assert rollouts.state() == {'at': 2}
    assert list(rollouts.ended()) == [1]


def test_what_other_weights_wrote_is_sampled_again(make):
  start = Rollouts()
  start.go[0].set()
  with Signals() as signals:
    rollouts = make(signals, Stream(), start, 1)
    rollouts.take(0)
    seen = rollouts.give_back(False)
    assert len(seen) == 2 and not any(rollouts.ended().values())
    assert rollouts.state() == {'at': 0}


def test_the_process_that_plays_a_question_decides_what_is_kept(
  make, monkeypatch
):
  """Each of two processes samples its question of a resumed step again."""
  questions = [Question(f'q{i}', 'who') for i in (0, 1)]
  saved = collector.encode({0: [trajectory(q) for q in questions]})

  async def again(questions, *, ended, on_trajectory, on_group, **_):
    assert [name for name, _ in ended] == [q.id for q in questions]
    groups = [(trajectory(q, version=1),) for q in questions]
    for group in groups:
      on_trajectory(group[0])
      on_group(group)
    return Rollout(groups, RolloutStats())

  parts = []
  for own in (slice(0, 1), slice(1, 2)):
    share = operator.itemgetter(own)
    monkeypatch.setattr(collector.cluster, 'part', share)
    with Signals() as signals:
      rollouts = make(signals, Stream(), again, 0)
      rollouts.decode(saved)
      rollouts.take(0)
      rollouts.give_back(True)
      parts.append(rollouts.ended())
  monkeypatch.setattr(collector.cluster, 'gather', lambda *_: parts)
  kept = [r.trajectory for r in records.read(rollouts.encode())]
  versions = {t.question.id: t.segments[0].versions.tolist() for t in kept}
  assert versions == {'q0': [1, 1], 'q1': [1, 1]}


async def _later(event):
  await asyncio.sleep(0.02)
  event.set()


def test_a_signal_ends_the_wait_and_keeps_the_step(make, capfd):
  start = Rollouts()
  timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM))
  with Signals() as signals:
    rollouts = make(signals, Stream(), start, 1)
    timer.start()
    with pytest.raises(Stopped):
      rollouts.take(0)
    rollouts.give_back(True)
    assert sorted(start.cancelled) == [0, 1]  # and they have cleaned up
    assert rollouts.state() == {'at': 0}
    assert sorted(rollouts.ended()) == [0, 1]
    with pytest.raises(Stopped):
      signals.run(asyncio.sleep(0))
  assert 'SIGTERM: sampling ends now' in capfd.readouterr().err


def test_an_error_of_a_step_ahead_comes_with_its_step(make):
  async def start(questions, *, step, **fields):
    if step == 1:
      raise ValueError('step 1')
    return await ended_at_once(questions, **fields)

  with Signals() as signals:
    rollouts = make(signals, Stream(), start, 1)
    rollouts.take(0)
    with pytest.raises(ValueError, match='step 1'):
      rollouts.take(1)


def test_idle_is_when_nothing_is_under_way(make, monkeypatch):
  clock = [0.0]
  # Its own clock alone: the event loop needs the real one.
  monkeypatch.setattr(
    collector, 'time', types.SimpleNamespace(monotonic=lambda: clock[0])
  )

  async def start(questions, **fields):
    clock[0] = 100.0  # under way
    return await ended_at_once(questions, **fields)

  with Signals() as signals:
    rollouts = make(signals, Stream(), start, 0)
    clock[0] = 5.0  # nothing yet
    rollouts.take(0)
    assert rollouts.idle_seconds() == 5.0
    clock[0] = 107.0
    assert rollouts.idle_seconds() == 7.0


def test_staleness_counts_the_tokens_that_are_trained_on():
  q = Question('q', 'who')
  groups = [
    (trajectory(q, version=7), trajectory(q, version=5)),
    (
      trajectory(q, version=6),
      trajectory(q, version=1, end='failed'),
      trajectory(q, version=2, train=False),
    ),
  ]
  assert collector.staleness(groups, 7, 2) == {
    'staleness/mean': (0 + 2 + 1) / 3,
    'staleness/max': 2.0,
    'staleness/share_0': 1 / 3,
    'staleness/share_1': 1 / 3,
    'staleness/share_2': 1 / 3,
  }
  assert collector.staleness([], 7, 0)['staleness/mean'] == 0.0


def test_a_wait_after_a_signal_cancels_what_was_started():
  with Signals() as signals:
    future = signals.start(asyncio.sleep(60))
    signals.stop = True
    with pytest.raises(Stopped):
      signals.wait(future)
    assert future.cancelled()


def test_a_cancellation_without_a_signal_is_not_taken_for_one():
  async def cancelled():
    raise asyncio.CancelledError

  with Signals() as signals:
    with pytest.raises(futures.CancelledError):
      signals.run(cancelled())


def test_a_loop_outlives_who_wants_to_exit():
  async def leave():
    raise SystemExit(3)

  with Loop() as loop:
    with pytest.raises(RuntimeError, match='SystemExit'):
      loop.run(leave())
    loop.run(asyncio.sleep(0))


def test_one_that_fails_to_close_does_not_keep_the_others():
  order = []

  async def close(name):
    order.append(name)
    if name == 'bad':
      raise ValueError('bad')

  with pytest.raises(ValueError, match='bad'):
    with Loop() as loop:
      loop.at_exit(lambda: close('good'))
      loop.at_exit(lambda: close('bad'))
  assert order == ['bad', 'good']
  with pytest.raises(KeyError):  # the first error is told
    with Loop() as loop:
      loop.at_exit(lambda: close('bad'))
      raise KeyError


def test_every_error_of_closing_is_reported():
  async def fail(name):
    raise ValueError(name)

  with pytest.raises(ValueError, match='second') as caught:
    with Loop() as loop:
      loop.at_exit(lambda: fail('first'))
      loop.at_exit(lambda: fail('second'))
  assert caught.value.__notes__ == ['After that: first']


def test_a_loop_ends_what_runs_then_closes_in_reverse():
  order = []

  async def close(name):
    order.append(name)

  async def forever():
    try:
      await asyncio.sleep(60)
    finally:
      order.append('ended')

  with Loop() as loop:
    loop.at_exit(lambda: close('first'))
    loop.at_exit(lambda: close('second'))
    loop.start(forever())
    loop.run(asyncio.sleep(0.01))
  assert order == ['ended', 'second', 'first']


def test_units_whose_time_runs_have_room_beside_those_of_other_steps():
  """Of 12 places two steps are under way, so 6; forks keep two open each."""
  asked = mock.Mock(config=schema.base().rollout)
  asked.engine.capacity.return_value = 12
  asked.config.max_staleness = 1
  places = lambda **kw: core.Services.slots(asked, **kw)._value
  assert (places(), places(timed=True), places(handles=2)) == (12, 6, 3)
  asked.config.concurrency = 4
  assert (places(), places(timed=True)) == (4, 4)


def test_a_loop_leaves_alone_what_does_not_end(monkeypatch, caplog):
  """Or a signal would not save the run: a program may catch everything."""
  monkeypatch.setattr(signals, 'PATIENCE', 0.05)
  over = threading.Event()

  async def stubborn():
    while not over.is_set():
      with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(0.01)

  with Loop() as loop:
    started = loop.start(stubborn())
    loop.run(asyncio.sleep(0.02))
    loop.cancel(started)
    assert 'left alone' in caplog.text
    caplog.clear()
  assert 'left alone' in caplog.text
  over.set()


def none_useful(groups, reward, config):
  return 0


def names(groups):
  return [g[0].question.id for g in groups]


def test_further_questions_of_a_step_are_its_own_when_it_is_taken_again(make):
  start, stream = Rollouts(), Stream()
  for go in start.go.values():
    go.set()
  with Signals() as signals:
    one = make(signals, stream, start, 0, none_useful, refill=1)
    before = one.state()
    played = one.take(0)
    assert names(played.groups) == ['q0', 'q1', 'q2', 'q3']
    # That of the failed one, q1, is not valid.
    np.testing.assert_array_equal(played.reward.valid, [1, 0, 1, 1])
    ended = one.give_back(True)
    assert [t.question.id for t in ended] == ['q0', 'q1', 'q2', 'q3']
    assert one.state() == before
    kept = one.encode()
  start, stream = Rollouts(), Stream()
  for go in start.go.values():
    go.set()
  with Signals() as signals:
    again = make(signals, stream, start, 0, none_useful, refill=1)
    again.decode(kept)
    again.take(0)
    # The failed one alone is sampled again.
    assert start.sampled == [(0, 'q1')]
    assert again.state() == {'at': 4}


def test_further_questions_are_asked_as_long_as_groups_are_of_no_use(make):
  asked = []

  def useful(groups, reward, config):
    asked.append(len(groups))
    return len(groups) - 1  # one group of the first round learns nothing

  with Signals() as signals:
    one = make(signals, Stream(), ended_at_once, 0, useful, refill=3)
    assert names(one.take(0).groups) == ['q0', 'q1', 'q2']
    assert asked == [2, 3]  # then there are two, and no further round


def test_a_question_that_comes_again_in_a_step_has_samples_of_its_own(make):
  class Same(Stream):
    def next(self, n):
      self.at += n
      return [Question(f'q{i % 2}', 'who') for i in range(self.at - n, self.at)]

  with Signals() as signals:
    one = make(signals, Same(), ended_at_once, 0, none_useful, refill=2)
    want = ['q0', 'q1', 'q0#2', 'q1#2', 'q0#3', 'q1#3']
    assert names(one.take(0).groups) == want
    assert names(one.take(1).groups) == want


def test_what_a_checkpoint_cannot_hold_is_sampled_again():
  """Its experts are in no file; within its process it is used."""
  q = Question('q', 'who')
  routed = dataclasses.replace(
    trajectory(q), routes=(np.zeros((2, 1, 1), np.int16),)
  )
  ended = collector.Ended([routed, trajectory(q, 1)])
  assert [t.sample for t in ended.kept()] == [1]
  assert {*ended.named()} == {('q', 0), ('q', 1)}


def test_what_failed_takes_the_place_of_what_an_earlier_start_ended():
  """A sampler sampled it again, with others that depend on it."""
  q = Question('q', 'who')
  one = collector.Ended([trajectory(q, sample=0)])
  one.keep(trajectory(q, sample=1))
  one.keep(failed := trajectory(q, sample=0, end='failed'))
  assert list(one.named('solver')) == [('q', 1)] and one.named('judge') == {}
  one.keep(dataclasses.replace(trajectory(q, sample=2), role='judge'))
  assert [*one.named('judge')] == [('q', 2)]
  assert [*one.named()] == [('q', 1), ('q', 2)]
  assert len(one.all()) == 3 and failed in one.all()


# --- Rewards.


class Asked(Stream):
  """Questions that tests.fakes can play."""

  def next(self, n):
    found = super().next(n)
    return [Question(q.id, f'what is {q.id[1:]}', ('1',)) for q in found]


def real(signals, engine=None, stream=None, **fields):
  """A collector that plays on a scripted engine."""
  return opened(
    configured(**dict(group=3, questions=4) | fields),
    signals,
    stream or Asked(),
    env=make_env(),
    engine=engine or FakeEngine(searcher),
    source=FakeSource(),
  )


# (question ids, step) of each call of a reward.
CALLS: list[tuple[tuple[str, ...], int]] = []


@pytest.fixture(autouse=True)
def no_calls():
  CALLS.clear()


async def tokens(groups, context):
  """The number of tokens, which differs within a group."""
  CALLS.append((tuple(g[0].question.id for g in groups), context.step))
  found = rewards.per_trajectory(groups, lambda t: {'value': len(t), 'x': 0.1})
  await asyncio.sleep(0)
  return found


async def tokens_of_step(groups, context):
  return await tokens(groups, context)


tokens_of_step.needs_step = True


async def fails_once(groups, context):
  found = await tokens(groups, context)
  if groups[0][0].question.id == 'q1' and len(CALLS) < 99:
    raise ZeroDivisionError('q1')
  return found


class Waits(FakeEngine):
  """Plays the last question once `so_far` is true."""

  def __init__(self, so_far):
    super().__init__(searcher)
    self._so_far = so_far

  async def generate(self, handle, sampling):
    if bytes(i for i in self.handles[handle][:12] if i < 256)[11:] == b'3':
      await until(self._so_far)
    return await super().generate(handle, sampling)


def test_a_group_is_rewarded_while_others_are_played():
  engine = Waits(lambda: len(CALLS) == 3)
  with Signals() as signals:
    played = real(signals, engine, reward='tokens').take(0)
  assert sorted(CALLS[:3]) == [((f'q{i}',), 0) for i in range(3)]
  assert CALLS[3:] == [(('q3',), 0)]
  assert names(played.groups) == ['q0', 'q1', 'q2', 'q3']


def test_rewards_are_those_of_a_step_that_is_rewarded_at_once():
  found = []
  for reward in ('tokens', 'tokens_of_step'):
    rng = np.random.default_rng(len(found))
    engine = FakeEngine(searcher, lambda _, r=rng: r.random() * 0.01)
    with Signals() as signals:
      found.append(real(signals, engine, reward=reward).take(0))
  assert CALLS[-1] == (('q0', 'q1', 'q2', 'q3'), 0) and len(CALLS) == 4 + 1
  one, two = found
  assert seen(one.groups) == seen(two.groups)
  lengths = [len(t) for group in one.groups for t in group]
  assert len({*lengths}) > 1 and one.reward.value.tolist() == lengths
  for a, b in (
    (one.reward.value, two.reward.value),
    (one.reward.valid, two.reward.valid),
    *((one.reward.parts[n], two.reward.parts[n]) for n in ('r', 'r/x')),
  ):
    assert a.tobytes() == b.tobytes() and a.dtype == b.dtype
  assert [*one.reward.parts] == [*two.reward.parts]


def test_a_reward_that_needs_the_step_waits_until_it_is_taken():
  with Signals() as signals:
    config = dict(max_staleness=1, steps=2)
    rollouts = real(signals, reward='tokens_of_step', **config)
    rollouts.take(0)
    assert [step for _, step in CALLS] == [0]
    rollouts.take(1)
    assert CALLS[1:] == [(('q4', 'q5', 'q6', 'q7'), 1)]


def test_a_reward_that_fails_ends_its_step_and_nothing_is_lost():
  with Signals() as signals:
    rollouts = real(signals, reward='fails_once')
    before = rollouts.state()
    with pytest.raises(ZeroDivisionError, match='q1'):
      rollouts.take(0)
    assert len(rollouts.give_back(True)) == 4 * 3
    assert rollouts.state() == before
    kept = rollouts.encode()
  assert len([*records.read(kept)]) == 4 * 3
  CALLS.extend([((), 0)] * 99)  # no further failure
  engine = FakeEngine(searcher)
  with Signals() as signals:
    again = real(signals, engine, reward='fails_once')
    again.decode(kept)
    played = again.take(0)
  assert engine.opened == 0  # all had ended
  assert sorted(CALLS[-4:]) == [((f'q{i}',), 0) for i in range(4)]
  with Signals() as signals:
    whole = real(signals, reward='tokens').take(0)
  assert seen(played.groups) == seen(whole.groups)
  assert played.reward.value.tolist() == whole.reward.value.tolist()


CANCELLED: list[str] = []


async def endless(groups, context):
  try:
    await tokens(groups, context)
    await asyncio.sleep(60)
  except asyncio.CancelledError:
    CANCELLED.append(groups[0][0].question.id)
    raise


def test_a_step_that_is_given_back_cancels_its_rewards():
  CANCELLED.clear()

  def stop():
    asyncio.run(until(lambda: len(CALLS) == 4))
    os.kill(os.getpid(), signal.SIGTERM)

  with Signals() as signals:
    rollouts = real(signals, reward='endless')
    threading.Thread(target=stop).start()
    with pytest.raises(Stopped):
      rollouts.take(0)
    assert len(rollouts.give_back(True)) == 4 * 3
    assert sorted(CANCELLED) == ['q0', 'q1', 'q2', 'q3']


def test_a_baseline_is_one_greedy_answer_to_each_question():
  asked = []

  class Greedy(FakeEngine):
    async def generate(self, handle, sampling):
      asked.append(sampling.temperature)
      return await super().generate(handle, sampling)

  with Signals() as signals:
    rollouts = real(signals, Greedy(searcher), reward='tokens')
    groups = rollouts.take(0).groups
    asked.clear()
    CALLS.clear()
    assert len(rollouts.baseline(groups).value) == 4
    assert {*asked} == {0.0} and len(CALLS) == 4
    assert len(rollouts.give_back(True)) == 4 * 3  # it is not kept


def test_a_signal_that_does_not_wake_the_main_thread_is_seen():
  """As if it had come just before that thread blocked."""

  async def signalled():
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(60)

  blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
  try:
    with Signals() as signals:
      # Its thread takes the signal; only Python's main thread handles it.
      signals.start(_unblock()).result()
      with pytest.raises(Stopped):
        signals.run(signalled())
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


async def _unblock():
  signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
