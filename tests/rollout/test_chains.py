import asyncio
import dataclasses
import random
import types

from ml_collections import ConfigDict
import numpy as np
import pytest

from searchrl_jax import schema
from searchrl_jax.engines.core import EngineError
from searchrl_jax.rollout import chains as lib
from searchrl_jax.rollout import core
from searchrl_jax.types import (
  Question,
  SearchError,
  SearchRequest,
  SearchResult,
  Segment,
)
from tests.clock import until
from tests.fakes import FakeEngine, FakeSource, make_env, searcher

QUESTIONS = [Question(f'q{i}', f'what is {i}', (str(i),)) for i in range(6)]


def config(**fields):
  c = schema.base().rollout
  c.update(dict(group=2) | fields)
  return c


def play(questions=QUESTIONS, *, engine=None, source=None, env=None, **kw):
  engine = engine or FakeEngine(searcher)
  fields = {k: kw.pop(k) for k in list(kw) if k in schema.base().rollout}
  try:
    return asyncio.run(
      lib.rollout(
        questions,
        env=env or make_env(),
        engine=engine,
        source=source or FakeSource(),
        config=config(**fields),
        seed=kw.pop('seed', 0),
        step=kw.pop('step', 5),
        **kw,
      )
    )
  finally:
    assert engine.handles == {}, 'every handle is closed'


def seen(groups):
  """All that can be seen of trajectories, but for seconds."""
  return [
    (
      t.id,
      t.end,
      tuple((s.author, s.kind, s.train, tuple(s.ids)) for s in t.segments),
      tuple(s.logps.tobytes() for s in t.segments if s.logps is not None),
      tuple(s.request.query for s in t.searches),
    )
    for group in groups
    for t in group
  ]


def test_groups_come_in_order_with_what_happened():
  engine, source = FakeEngine(searcher), FakeSource()
  found = play(engine=engine, source=source)
  assert [t.id for g in found.groups for t in g] == [
    f'q{i}/solver/{s}' for i in range(6) for s in range(2)
  ]
  one = found.groups[0][0]
  assert one.end == 'answer' and len(one.searches) == 2 and one.turns == 3
  assert [s.kind for s in one.segments] == [
    'other', 'think', 'search', 'information', 'think', 'search',
    'information', 'answer',
  ]  # fmt: skip
  assert one.searches[0].request.step == 5
  assert one.searches[0].request.trajectory == 'q0/solver/0'
  assert one.searches[0].request.turn == 0 and one.seconds > 0
  # A group opens its prompt once and forks it for all samples but the last.
  assert (engine.opened, engine.forked) == (6, 6)
  stats = found.stats
  sampled = sum(
    len(s.ids) for g in found.groups for t in g for s in t.segments
    if s.author == 'policy'
  )  # fmt: skip
  assert stats.sampled_tokens == sampled
  assert stats.outside_tokens == engine.appended > 0
  assert (stats.trajectories, stats.generations, stats.searches) == (12, 36, 24)
  assert (stats.failed, stats.search_retries, stats.failed_searches) == (0,) * 3
  values = stats.metrics()
  assert values['rollout/searches'] == 24.0
  assert values['rollout/tokens_per_second'] == pytest.approx(
    sampled / stats.seconds
  )


def test_sampling_is_the_configs_and_the_environments():
  taken = []

  class Engine(FakeEngine):
    async def generate(self, handle, sampling):
      taken.append(sampling)
      return await super().generate(handle, sampling)

  play(
    QUESTIONS[:1],
    engine=Engine(searcher),
    temperature=0.5,
    top_p=0.9,
    top_k=7,
    group=1,
    seed=9,
    step=2,
  )
  assert {(s.temperature, s.top_p, s.top_k) for s in taken} == {(0.5, 0.9, 7)}
  assert taken[0].stops == ('</search>', '</answer>')
  assert taken[0].stop_ids == (256,)
  # One stream for the whole trajectory: the position in it is the engine's.
  assert {s.seed for s in taken} == {
    core.trajectory_seed(9, 2, 'q0', 'solver', 0)
  }


def test_seeds_tell_everything_apart():
  base = (0, 1, 'q', 'solver', 2)
  other = [
    (1, 1, 'q', 'solver', 2), (0, 2, 'q', 'solver', 2),
    (0, 1, 'r', 'solver', 2), (0, 1, 'q', 'proposer', 2),
    (0, 1, 'q', 'solver', 3),
  ]  # fmt: skip
  seeds = {core.trajectory_seed(*a) for a in [base, *other]}
  assert len(seeds) == 6 and all(0 <= s < 2**32 for s in seeds)
  # The same on every machine (hash() is not): the first 32 bits that
  # `b2sum -l 32` gives for the text "(0, 1, 'q', 'solver', 2)".
  assert core.trajectory_seed(*base) == 3706608141


def test_arrival_order_cannot_show():
  rng = random.Random(0)

  def delays(*_):
    return rng.random() * 0.02

  quiet = play(group=4)
  for concurrency in (0, 3):
    noisy = play(
      engine=FakeEngine(searcher, delays, slots=5),
      source=FakeSource(delay=delays),
      group=4,
      concurrency=concurrency,
    )
    assert seen(noisy.groups) == seen(quiet.groups)
  back = play(QUESTIONS[::-1], group=4)
  assert seen(back.groups[::-1]) == seen(quiet.groups)
  assert seen(play(group=4, step=6).groups) != seen(quiet.groups)


def test_a_question_that_comes_twice_gets_further_samples():
  found = play([QUESTIONS[0], QUESTIONS[0]])
  assert [[t.sample for t in g] for g in found.groups] == [[0, 1], [2, 3]]
  answers = [t.segments[-1].ids.tobytes() for g in found.groups for t in g]
  assert len(set(answers)) == 4


def test_no_turn_barrier():
  # Each of 8 trajectories has one slow search, each at another turn, which
  # ends once all 8 are waited for. A barrier would never come to the later
  # turns.
  def script(history, seed):
    turn = history.count('<information>')
    question = int(history.split('\n')[0].split()[-1])
    if turn == 4:
      return '<answer>a</answer>'
    slow = 'slow' if turn == question % 4 else 'fast'
    return f'<search>{slow} {question} {turn}</search>'

  class Gated(FakeSource):
    waiting = 0
    opened = asyncio.Event()

    async def search(self, requests):
      self.waiting += sum('slow' in r.query for r in requests)
      if self.waiting == 8:
        self.opened.set()
      if any('slow' in r.query for r in requests):
        await asyncio.wait_for(self.opened.wait(), 60)
      return await super().search(requests)

  questions = [Question(f'q{i}', f'what is {i}') for i in range(8)]
  found = play(
    questions,
    engine=FakeEngine(script),
    env=make_env(max_turns=4),
    source=Gated(delay=lambda q: 0.3 if 'slow' in q else 0.0),
    group=1,
  )
  assert all(t.end == 'answer' for g in found.groups for t in g)
  stats = found.stats
  assert stats.search_seconds >= 8 * 0.29  # summed: they waited together
  # 9 s of waiting in 2 s: 4.5 trajectories wait on average.
  known = dataclasses.replace(stats, search_seconds=9.0, seconds=2.0)
  assert known.metrics()['rollout/waiting_for_search'] == 4.5


def test_a_source_that_asks_the_same_engine_does_not_deadlock():
  engine = FakeEngine(searcher, delay=lambda _: 0.002, slots=2)

  class Simulated(FakeSource):
    async def search(self, requests):
      from searchrl_jax.engines.core import Sampling
      from searchrl_jax.types import Prompt

      handle = engine.open(Prompt(tuple(b'simulate')))
      try:
        await engine.generate(handle, Sampling(50, stops=('</search>',)))
      finally:
        engine.close(handle)
      return await super().search(requests)

  async def main():
    return await asyncio.wait_for(
      lib.rollout(
        QUESTIONS, env=make_env(), engine=engine, source=Simulated(),
        config=config(group=4), seed=0, step=0,
      ),
      10,
    )  # fmt: skip

  found = asyncio.run(main())
  assert all(t.end == 'answer' for g in found.groups for t in g)
  assert engine.most_running == 2 and engine.handles == {}


def test_concurrency_bounds_trajectories_in_flight():
  engine = FakeEngine(searcher, delay=lambda _: 0.001)
  found = play(engine=engine, concurrency=3)
  assert engine.most_running <= 3
  few = FakeEngine(searcher, delay=lambda _: 0.001)
  few.holds = 2  # what 0 stands for
  play(engine=few, concurrency=0)
  assert few.most_running == 2
  # Mean in flight counts who holds a place, not who waits for one.
  assert found.stats.metrics()['rollout/in_flight'] <= 3.01


def test_a_failed_search_is_tried_again_on_the_live_handle():
  engine = FakeEngine(searcher)
  source = FakeSource(fails=lambda q, attempt: attempt == 1)
  found = play(engine=engine, source=source, search_attempts=2)
  assert all(t.end == 'answer' for g in found.groups for t in g)
  # Nothing was generated again, and a query tried twice is one search.
  assert found.stats.generations == 36 and found.stats.searches == 24
  assert found.stats.search_retries == 24 and found.stats.failed_searches == 0
  assert all(
    isinstance(s, SearchResult) for g in found.groups for t in g
    for s in t.searches
  )  # fmt: skip


def test_only_the_failed_queries_of_a_search_are_asked_again():
  def script(history, seed):
    if '<information>' in history:
      return '<answer>a</answer>'
    return '<search>one; bad; two</search>'

  source = FakeSource(fails=lambda q, attempt: q == 'bad' and attempt == 1)
  found = play(QUESTIONS[:1], engine=FakeEngine(script), source=source, group=1)
  assert source.asked == [['one', 'bad', 'two'], ['bad']]
  (trajectory,) = found.groups[0]
  assert [s.request.query for s in trajectory.searches] == ['one', 'bad', 'two']
  assert [s.passages[0].id for s in trajectory.searches] == [
    'id-one', 'id-bad', 'id-two'
  ]  # fmt: skip


def fails_for(bad):
  return FakeSource(fails=lambda q, attempt: q in bad)


def of_question(history, seed):
  if '<information>' in history:
    return '<answer>a</answer>'
  return f'<search>{history.split(chr(10))[0].split()[-1]}</search>'


def test_a_search_that_fails_for_good_marks_its_trajectory():
  found = play(
    engine=FakeEngine(of_question), source=fails_for({'2'}), max_failed=0.2
  )
  ends = [[t.end for t in g] for g in found.groups]
  assert ends == [['answer'] * 2] * 2 + [['failed'] * 2] + [['answer'] * 2] * 3
  failed = found.groups[2][0]
  assert isinstance(failed.searches[-1], SearchError)
  assert failed.segments[-1].kind == 'search'  # no text stands for the failure
  assert found.stats.failed == 2 and found.stats.failed_searches == 2
  assert found.stats.search_retries == 2


def test_too_many_failures_stop_the_run():
  ended = []
  with pytest.raises(core.RolloutError) as error:
    play(
      engine=FakeEngine(of_question),
      source=fails_for({'2', '4'}),
      max_failed=0.2,
      on_trajectory=ended.append,
    )
  # 0.2 of 12 is 2.4: the third failure makes it certain.
  assert '3 of 12' in str(error.value)
  assert 'max_failed=0.2' in str(error.value)
  assert 'error: late: ' in str(error.value)
  assert sum(t.failed for t in ended) >= 3


def test_each_end_is_told_once_as_it_comes():
  ended = []
  play(on_trajectory=ended.append, concurrency=1)
  assert [t.id for t in ended] == [
    f'q{i}/solver/{s}' for i in range(6) for s in range(2)
  ]


def test_events_come_as_they_happen():
  events = []

  def script(history, seed):
    if '<information>' in history:
      return '<answer>a</answer>'
    return '<think>hm</think><search>x</search>'

  play(
    QUESTIONS[:1],
    engine=FakeEngine(script),
    group=1,
    on_event=lambda name, event: events.append((name, event)),
  )
  assert {name for name, _ in events} == {'q0/solver/0'}
  kinds = [e.kind if isinstance(e, Segment) else type(e) for _, e in events]
  assert kinds == [
    'think', 'search', SearchRequest, SearchResult, 'information', 'answer'
  ]  # fmt: skip


@pytest.mark.parametrize('where', ['engine', 'source', 'callback'])
def test_an_error_ends_everything_and_closes_all_handles(where):
  def script(history, seed):
    if where == 'engine' and 'what is 3' in history:
      return EngineError('slots too small')
    return searcher(history, seed)

  class Source(FakeSource):
    async def search(self, requests):
      if where == 'source' and requests[0].question.id == 'q3':
        raise EngineError('slots too small')
      return await super().search(requests)

  def told(trajectory):
    if where == 'callback':
      raise EngineError('slots too small')

  source = Source(delay=lambda q: 0.01)
  with pytest.raises(EngineError, match='slots too small'):
    play(engine=FakeEngine(script), source=source, on_trajectory=told)


def test_a_source_with_too_few_answers_is_a_bug_not_a_result():
  class Source(FakeSource):
    async def search(self, requests):
      return []

  with pytest.raises(ValueError, match='Source .*0 answers.*1'):
    play(source=Source())


def test_a_prompt_that_does_not_fit_leaves_nothing_open():
  long = Question('long', 'x' * 5000)
  engine = FakeEngine(searcher)
  with pytest.raises(ValueError, match="'long'"):
    play([*QUESTIONS, long], engine=engine)
  assert engine.opened == 0


def test_cancellation_closes_all_handles():
  engine = FakeEngine(searcher)
  source = FakeSource(delay=lambda q: 30.0)

  async def main():
    task = asyncio.create_task(
      lib.rollout(
        QUESTIONS, env=make_env(), engine=engine, source=source,
        config=config(concurrency=5), seed=0, step=0,
      )
    )  # fmt: skip
    # 5 in flight, and the prompt of the group that is half begun.
    await until(lambda: len(engine.handles) >= 6)
    await asyncio.sleep(0.05)
    assert len(engine.handles) == 6
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task
    assert engine.handles == {}
    assert len(asyncio.all_tasks()) == 1

  asyncio.run(main())


def test_no_questions():
  assert play([]).groups == []


def test_evaluation_is_greedy_as_the_config_says():
  whole = schema.base()
  whole.rollout.top_k = 5
  whole.eval.n = 3
  found = lib.evaluation(whole)
  assert (found.group, found.temperature, found.top_p, found.top_k) == (
    3, 0.0, 1.0, 0
  )  # fmt: skip
  assert found.search_attempts == whole.rollout.search_attempts
  assert whole.rollout.group == 8 and isinstance(found, ConfigDict)


def test_stats_are_plain_numbers():
  stats = dataclasses.asdict(play(QUESTIONS[:1]).stats)
  assert all(isinstance(v, (int, float)) for v in stats.values())
  assert np.isfinite(list(stats.values())).all()


def test_a_round_may_fail_as_often_as_its_step_allows():
  config = schema.base()
  config.rollout.update(group=4, max_failed=0.2)

  def group(*failed):
    return tuple(types.SimpleNamespace(failed=bool(f)) for f in failed)

  whole = [group(0, 0, 0, 0)] * 8
  # Of 32 + 4, 7.2 may fail: all 4 of the round.
  assert lib.refill_config(config, whole, 1).max_failed == pytest.approx(1.8)
  # 6 have: 1.2 of the 4 are left.
  worn = [group(1, 1, 1, 0)] * 2 + whole[2:]
  assert lib.refill_config(config, worn, 1).max_failed == pytest.approx(0.3)
  assert config.rollout.max_failed == 0.2
  assert lib.greedy(config).max_failed == 1.0
