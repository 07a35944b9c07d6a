"""What every sampler must do, and what trees of attempts share."""

import asyncio
import dataclasses
import random

from ml_collections import ConfigDict
import numpy as np
import pytest

from searchrl_jax import schema
from searchrl_jax.engines.core import EngineError
from searchrl_jax.engines.jax import device
from searchrl_jax.learn import batching
from searchrl_jax.lookup import ConfigError
from searchrl_jax.rollout import chains, collector, core
from searchrl_jax.types import Rewards, SearchError
from tests.clock import until
from tests.engines.common import CFG, make_engine
from tests.fakes import (
  ByteTokenizer,
  FakeEngine,
  FakeSource,
  make_env,
  searcher,
)
from tests.rollout.test_chains import QUESTIONS as PLAIN
from tests.rollout.test_chains import of_question, seen

pytestmark = pytest.mark.slow

SAMPLERS = {
  'chains': dict(sampler='chains', group=6),
  'tree': dict(sampler='tree', group=6, trees=2, rounds=1),
  'rounds': dict(sampler='tree', group=5, trees=1, rounds=2),
  'best': dict(sampler='tests.samplers.best', group=2, attempts=3),
  'guided': dict(
    sampler='configs.methods.guide.guided',
    group=2,
    hint_key='hint',
    hint_frame='{text} {hint}',
    mismatch_alarm=0.0,
  ),
  'traces': dict(sampler='traces', group=3, traces='tests.samplers.told'),
  'revise': dict(sampler='revise', group=4, refiner='micro_refiner'),
  'behind': dict(
    sampler='configs.methods.seele.scaffolded',
    group=4,
    traces='tests.samplers.told',
    hint_rounds=2,
  ),
  'critiqued': dict(
    sampler='configs.methods.critique_grpo.critiqued',
    group=4,
    critique='{attempt} {verdict} {answer}',
    critique_words=('right', 'wrong'),
    grounded=False,
  ),
}
QUESTIONS = [dataclasses.replace(q, meta={'hint': 'psst'}) for q in PLAIN]
# How many trajectories depend on each other, if more than one.
DEPEND = {'tree': 3, 'rounds': 5, 'guided': 2, 'traces': 3, 'revise': 2}
DEPEND |= {'behind': 4, 'critiqued': 4}
EVERY = pytest.mark.parametrize('name', SAMPLERS)


def config(name='tree', **fields) -> ConfigDict:
  c = schema.base().rollout
  c.update(SAMPLERS[name] | fields)
  return c


async def length(groups, step):
  """A reward: the number of tokens, which differs between attempts."""
  assert step == 5
  flat = [t for group in groups for t in group]
  return Rewards(
    np.array([len(t) for t in flat], np.float32),
    np.array([not t.failed for t in flat]),
  )


async def told(groups, step):
  """`length`, but 0 of every other question that is asked without its hint."""
  found = await length(groups, step)
  known = [
    int(t.question.id[1:]) % 2 or 'psst' in t.question.text
    for group in groups
    for t in group
  ]
  return dataclasses.replace(found, value=found.value * np.array(known, bool))


def start(questions=QUESTIONS, *, engine, source=None, env=None, **kw):
  guided = 'guided' in kw['config'].sampler
  return chains.rollout(
    questions,
    env=env or make_env(),
    engine=engine,
    source=source or FakeSource(),
    seed=0,
    reward=told if guided else length,
    **dict(step=5) | kw,
  )


def play(name, questions=QUESTIONS, *, engine=None, **kw):
  engine = engine or FakeEngine(searcher)
  fields = {k: kw.pop(k) for k in list(kw) if k in schema.base().rollout}
  try:
    return asyncio.run(
      start(questions, engine=engine, config=config(name, **fields), **kw)
    )
  finally:
    assert engine.handles == {}, 'every handle is closed'


# --- What every sampler does.


@EVERY
def test_groups_are_those_of_the_questions_in_order(name):
  found = play(name, [*QUESTIONS, QUESTIONS[0]])
  size = config(name).group
  names = [[(t.question.id, t.sample) for t in g] for g in found.groups]
  assert names[:6] == [[(f'q{i}', n) for n in range(size)] for i in range(6)]
  assert names[6] == [('q0', n) for n in range(size, 2 * size)]
  flat = [t for g in found.groups for t in g]
  assert len({t.id for t in flat}) == len(flat) == found.stats.trajectories
  # Attempts differ: each has a stream of its own.
  own = [t for t in flat if not t.foreign]
  assert len({tuple(t.segments[-1].ids) for t in own}) == len(own)


@pytest.mark.long
@EVERY
def test_the_order_of_arrival_cannot_show(name):
  rng = random.Random(0)

  def delays(*_):
    return rng.random() * 0.01

  quiet = play(name)
  for concurrency in (0, 4):
    noisy = play(
      name,
      engine=FakeEngine(searcher, delays, slots=5),
      source=FakeSource(delay=delays),
      concurrency=concurrency,
    )
    assert seen(noisy.groups) == seen(quiet.groups)
    assert [t.meta for g in noisy.groups for t in g] == [
      t.meta for g in quiet.groups for t in g
    ]
  back = play(name, QUESTIONS[::-1])
  assert seen(back.groups[::-1]) == seen(quiet.groups)


@EVERY
@pytest.mark.parametrize('where', ['engine', 'source', 'callback'])
def test_an_error_ends_everything_and_closes_all_handles(name, where):
  def script(history, seed):
    if where == 'engine' and 'what is 3' in history and '<info' in history:
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

  with pytest.raises(EngineError, match='slots too small'):
    play(
      name,
      engine=FakeEngine(script),
      source=Source(delay=lambda q: 0.01),
      on_trajectory=told,
    )


@EVERY
def test_cancellation_closes_all_handles(name):
  engine = FakeEngine(searcher)
  # Each question's first trajectories search at once, further ones wait.
  source = FakeSource(delay=lambda q: 30.0 if q.endswith('-1') else 0.0)

  async def main():
    task = asyncio.create_task(
      start(engine=engine, source=source, config=config(name))
    )
    await until(lambda: len(source.asked) >= 8)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task
    assert engine.handles == {}
    assert len(asyncio.all_tasks()) == 1

  asyncio.run(main())


@EVERY
def test_failed_searches_are_counted_and_marked(name):
  source = FakeSource(fails=lambda q, attempt: q == '2')
  found = play(
    name, engine=FakeEngine(of_question), source=source, max_failed=0.2
  )
  size = config(name).group
  failed = [t for g in found.groups for t in g if t.failed]
  assert {t.question.id for t in failed} == {'q2'}
  assert len(failed) == size == found.stats.failed
  assert all(isinstance(t.searches[-1], SearchError) for t in failed)
  with pytest.raises(core.RolloutError, match='max_failed=0.1'):
    play(name, engine=FakeEngine(of_question), source=source, max_failed=0.1)


@EVERY
def test_each_end_is_told_once(name):
  ended = []
  found = play(name, on_trajectory=ended.append)
  assert sorted(t.id for t in ended) == sorted(
    t.id for g in found.groups for t in g
  )


@EVERY
def test_each_group_is_told_as_it_ends(name):
  ended, told = [], []

  def on_group(group):
    ids = {t.id for t in ended}
    told.append((group, len(ids)))
    assert {t.id for t in group} <= ids

  found = play(name, on_trajectory=ended.append, on_group=on_group)
  groups = [group for group, _ in told]
  assert {tuple(map(id, g)) for g in groups} == {
    tuple(map(id, g)) for g in found.groups
  }
  assert len(groups) == len(found.groups) == 6
  assert told[0][1] < found.stats.trajectories, 'others were still played'
  # Those of an earlier start are told too.
  done = {(t.question.id, t.sample): t for g in found.groups[:5] for t in g}
  again = []
  play(name, ended=done, on_group=again.append)
  assert len(again) == 6 and {id(t) for g in again for t in g} >= {
    id(t) for t in done.values()
  }


def counted(stats) -> dict[str, float]:
  """The counters of a step, without times."""
  found = dataclasses.asdict(stats)
  apart = 'seconds', 'earlier'
  return {k: v for k, v in found.items() if not any(x in k for x in apart)}


@EVERY
def test_what_an_earlier_start_ended_is_not_sampled_again(name):
  whole = play(name)
  kept = collector.encode({5: [t for g in whole.groups for t in g]})
  done = {(t.question.id, t.sample): t for _, t in collector.decode(kept)}
  engine = FakeEngine(searcher)
  again = play(name, engine=engine, ended=done)
  assert seen(again.groups) == seen(whole.groups) and not engine.opened
  # Counters are those of the step, rates those of this start.
  assert counted(again.stats) == counted(whole.stats)
  assert again.stats.sampled_tokens > 0
  assert again.stats.metrics()['rollout/tokens_per_second'] == 0.0
  # One trajectory is missing: it is sampled again, with those it depends on.
  lost = done.pop(('q2', 1))
  told = []
  again = play(name, ended=done, on_trajectory=told.append)
  assert seen(again.groups) == seen(whole.groups)
  assert counted(again.stats) == counted(whole.stats)
  sampled = again.stats.trajectories - again.stats.earlier_trajectories
  assert len(told) == sampled == DEPEND.get(name, 1)
  assert lost.id in {t.id for t in told}
  assert {t.question.id for t in told} == {'q2'}


@EVERY
def test_recorded_logps_are_the_engines(name):
  """On a real engine, whose handles are forked, cut and appended to."""
  cfg = dataclasses.replace(CFG, vocab_size=257)
  env = make_env(max_turns=2, max_turn_tokens=9, max_tokens=120)

  def run(**fields):
    options = dict(slots=4, max_len=120, prefill_rows=2) | fields
    engine = make_engine(cfg=cfg, tokenizer=ByteTokenizer(), **options)

    async def main():
      found = await start(
        QUESTIONS[:3], engine=engine, env=env, config=config(name)
      )
      stats = dict(engine.stats())
      scores = {}
      for t in found.groups[0] + found.groups[2]:
        ids = np.concatenate([s.ids for s in t.segments])
        scores[t.id] = await engine.logps(ids.tolist())
      return found, scores, stats

    return asyncio.run(main())

  found, scores, stats = run()
  checked = 0
  for t in found.groups[0] + found.groups[2]:
    at = 0
    for s in t.segments:
      part = scores[t.id][at : (at := at + len(s.ids))]
      if s.author == 'policy':
        np.testing.assert_allclose(s.logps, part, atol=1e-5)
        checked += len(part)
  assert checked >= 100 and max(t.turns for t in found.groups[0]) == 3
  assert stats['recomputed_tokens'] == 0
  # Another schedule: they come and go at other times.
  other, *_ = run(chunk=3)
  assert seen(other.groups) == seen(found.groups)


# --- The contract is held.


def test_other_trajectories_than_asked_for_are_refused():
  with pytest.raises(
    ValueError, match=r"\[\[\('q5', 0\), .*for \[\[\('q0', 0\), "
  ):
    play('chains', sampler='tests.samplers.reverse', group=2)


def test_what_a_sampler_leaves_open_is_closed():
  play('chains', sampler='tests.samplers.leaky')


def test_rewards_between_rounds_choose():
  values = {}

  async def reward(groups, step):
    found = await length(groups, step)
    for (t,), value in zip(groups, found.value):
      values.setdefault(t.id, []).append(value)
    return found

  engine = FakeEngine(searcher)
  found = asyncio.run(
    chains.rollout(
      QUESTIONS, env=make_env(), engine=engine, source=FakeSource(),
      config=config('best'), seed=0, step=5, reward=reward,
    )
  )  # fmt: skip
  for group in found.groups:
    for t in group:
      assert len(values[t.id]) == 3 and len(t) == max(values[t.id])
  assert any(len(set(x)) > 1 for x in values.values())
  with pytest.raises(ConfigError, match="'judge'"):
    asyncio.run(
      chains.rollout(
        QUESTIONS, env=make_env(), engine=FakeEngine(searcher),
        source=FakeSource(), config=config('best'), seed=0, step=5,
        role='judge',
      )
    )  # fmt: skip


@pytest.mark.parametrize(
  'fields, message',
  [
    (dict(sampler='chain'), "sampler: .*'chains'"),
    (dict(sampler='collector'), "'sample' in searchrl_jax.rollout.coll"),
    (dict(sampler='tests.samplers.bset'), "'best'"),
    (dict(sampler='tests.nowhere.best'), 'tests.nowhere'),
    (dict(sampler='tests.samplers.best'), "'attempts'.*config.rollout"),
    (dict(sampler='tree', group=6, trees=4), 'group=6, trees=4, rounds=1'),
    (dict(sampler='tree', group=6, trees=2, rounds=3), 'trees=2, rounds=3'),
    (dict(sampler='tree', group=6, trees=0), 'trees=0'),
    (dict(sampler='tree', group=6, rounds=0), 'rounds=0'),
    (dict(sampler='revise', group=3, refiner='refiner'), 'group=3.*even'),
    (dict(sampler='revise', group=4), "refiner=''.*template"),
    (dict(sampler='revise', group=4, refiner='refinr'), "'refiner'"),
  ],
)
def test_what_cannot_work_is_refused(fields, message):
  c = schema.base().rollout
  c.update(fields)
  with pytest.raises(ConfigError, match=message):
    core.sampler(c)


def test_evaluation_and_greedy_answers_are_chains():
  whole = schema.base()
  whole.rollout.sampler = 'tree'
  assert chains.evaluation(whole).sampler == 'chains'
  assert chains.greedy(whole).sampler == 'chains'
  assert chains.refill_config(whole, [], 1).sampler == 'tree'


def test_the_root_branch_has_the_stream_of_a_chain():
  # Values of the version before there were branches.
  golden = {
    (0, 1, 'q', 'solver', 2): 3706608141,
    (7, 0, 'q0', 'solver', 0): 2534515913,
    (1, 30, 'nq-12', 'proposer', 7): 3751102151,
  }
  for name, seed in golden.items():
    assert core.trajectory_seed(*name) == seed
    branches = [(), ('0.1',), ('0.1', '2.2'), ('nodes', 0), ('nodes', 1)]
    assert len({core.trajectory_seed(*name, *b) for b in branches}) == 5


# --- Trees.


def turns(t):
  """(ids, log-probs, versions) of what the policy wrote in each turn."""
  parts, last = [], ''
  for s in t.segments:
    if s.author == 'policy':
      if last != 'policy':
        parts.append([])
      columns = s.ids, s.logps, s.versions
      parts[-1].append(tuple(x.tobytes() for x in columns))
    last = s.author
  return [tuple(p) for p in parts]


@pytest.mark.parametrize('name', ['tree', 'rounds'])
def test_leaves_share_the_turns_that_their_paths_name(name):
  found = play(name)
  for group in found.groups:
    nodes = {}
    for t in group:
      path = t.meta['path']
      assert len(path) == t.turns == len(turns(t))
      # What has one name is the same, and what has another is not.
      for turn, what in zip(path, turns(t)):
        assert nodes.setdefault(turn, what) == what
      assert batching.tokens_of(0, t)[0].mask.sum() == sum(
        len(s.ids) for s in t.segments if s.author == 'policy'
      )
      own = [p for p in path if p.split('.')[0] == str(t.sample)]
      assert own == path[-len(own) :]
      assert t.meta['node'] == ([''] + path)[-len(own) - 1]
      trees = config(name).group // config(name).trees
      assert {int(p.split('.')[0]) // trees for p in path} == {
        t.meta['tree'] // trees
      }
    assert len(set(nodes.values())) == len(nodes)
  flat = [t for g in found.groups for t in g]
  once = {(t.question.id, p) for t in flat for p in t.meta['path']}
  assert found.stats.generations == len(once) < sum(t.turns for t in flat)
  parted = {t.meta['node'].partition('.')[2] for t in flat}
  assert parted == {'', '0', '1'}  # anywhere but after the last turn


def test_a_later_round_parts_from_leaves_of_the_one_before():
  found = play('rounds')
  roots = {
    t.meta['node'].partition('.')[0]
    for g in found.groups
    for t in g[3:]
    if t.meta['node']
  }
  assert roots > {'0'} and roots <= {'0', '1', '2'}


@pytest.mark.long
def test_nodes_are_drawn_evenly():
  found = play('tree', group=90, trees=1)
  drawn = [t.meta['node'] for g in found.groups for t in g[1:]]
  shares = [drawn.count(x) / len(drawn) for x in ('', '0.0', '0.1')]
  # 534 draws: a standard deviation is 0.02.
  np.testing.assert_allclose(shares, [1 / 3] * 3, atol=0.07)


def test_trees_without_expansions_are_chains():
  trees = play('tree', group=3, trees=3)
  assert seen(trees.groups) == seen(play('chains', group=3).groups)
  # So are expansions of the prompt, and the roots of all trees.
  tree = play('tree').groups
  for a, b in zip(tree, play('chains').groups):
    for x, y in zip(a, b):
      assert (seen([[x]]) == seen([[y]])) == (not x.meta['node'])


def test_trees_keep_no_more_handles_than_the_engine_serves():
  for staleness, most in ((0, 6), (1, 3), (9, 3)):
    engine = Counting(searcher, delay=lambda _: 0.001)
    engine.holds = 7
    play('tree', engine=engine, max_staleness=staleness)
    assert engine.most == most
  engine = Counting(searcher, delay=lambda _: 0.001)
  play('tree', engine=engine, concurrency=10)
  assert engine.most == 9


class Counting(FakeEngine):
  most = 0

  def _new(self, ids):
    found = super()._new(ids)
    self.most = max(self.most, len(self.handles))
    return found


@pytest.mark.long
@pytest.mark.parametrize('paused', [0, 4])
def test_trees_of_two_steps_end_in_the_memory_that_there_is(
  paused, monkeypatch
):
  """Steps that are under way at a time share slots and host memory."""
  monkeypatch.setattr(device, 'PIECE', 16)
  cfg = dataclasses.replace(CFG, vocab_size=257)
  env = make_env(max_turns=2, max_turn_tokens=9, max_tokens=112)
  budget = (paused * 112 + 128) * device.bytes_per_token(cfg)

  def run(**fields):
    options = dict(slots=2, max_len=128, prefill_rows=2) | fields
    engine = make_engine(cfg=cfg, tokenizer=ByteTokenizer(), **options)

    async def main():
      steps = [
        start(
          QUESTIONS[n : n + 3],
          engine=engine,
          env=env,
          config=config('tree', max_staleness=1),
          step=n,
        )
        for n in (0, 1)
      ]
      return await asyncio.wait_for(asyncio.gather(*steps), 120)

    return engine, [seen(x.groups) for x in asyncio.run(main())]

  engine, found = run(host_gib=budget / 2**30)
  assert engine.capacity(112) == 2 + paused
  stats = engine.stats()
  assert stats['evictions'] > 0 and stats['recomputed_tokens'] == 0
  # Without room for one tree, one grows all the same.
  assert stats['host_bytes'] <= budget or not paused
  assert engine._table._sizes == {} and engine._table._paused == 0
  assert found == run()[1]  # 1 GiB


def test_turns_before_a_failed_search_may_be_expanded():
  def script(history, seed):
    seen = history.count('<information>')
    # What the second turn searches depends on the stream.
    query = 'bad' if seen and seed % 2 else f'fine {seed % 97}'
    return f'<search>{query}</search>' if seen < 3 else '<answer>a</answer>'

  source = FakeSource(fails=lambda q, attempt: q == 'bad')
  found = play(
    'tree',
    engine=FakeEngine(script),
    source=source,
    group=20,
    trees=2,
    max_failed=1.0,
  )
  flat = {t.id: t for g in found.groups for t in g}
  from_failed = [
    t
    for t in flat.values()
    if t.meta['node']
    and flat[
      f'{t.question.id}/solver/{t.meta["node"].partition(".")[0]}'
    ].failed
  ]
  assert {t.failed for t in from_failed} == {True, False}
  assert found.stats.failed == sum(t.failed for t in flat.values())
