"""Traces in groups: what is played, what is left out, and which are chosen."""

import asyncio
import dataclasses

import numpy as np
import pytest

from searchrl_jax import checks, schema, sft
from searchrl_jax.data.checks import DataError, require_needs
from searchrl_jax.data.core import Trace
from searchrl_jax.evaluate import health
from searchrl_jax.learn import batching
from searchrl_jax.lookup import ConfigError
from searchrl_jax.rewards import length
from searchrl_jax.rollout import chains, collector, core, traces
from searchrl_jax.text import structure
from searchrl_jax.types import Question, Rewards
from tests import tiny
from tests.fakes import ByteTokenizer, FakeEngine, FakeSource, make_env

SEARCHES = [
  ['think', 'find it'],
  ['search', 'author'],
  ['information', ''],
  ['think', 'so'],
  ['answer', 'right'],
]
DIRECT = [['answer', 'right']]
ENV = make_env()


def question(*known, name='q', **fields) -> Question:
  meta = {'traces': [*known]}
  return Question(name, 'who?', ('right',), meta=meta, **fields)


class Engine(FakeEngine):
  """Finds an answer the likelier the more was read or written before it."""

  async def logps(self, ids):
    text = ByteTokenizer().decode(ids)
    self.scored = [*getattr(self, 'scored', ()), text]
    out = np.full(len(ids), 1e6, np.float32)  # of what is not asked
    out[text.rindex('<answer>') :] = len(text) - 2000
    return out


def play(
  questions,
  script=lambda history, seed: '<answer>wrong</answer>',
  source=None,
  env=ENV,
  **fields,
):
  async def reward(groups, step):
    del step
    flat = [t for group in groups for t in group]
    value = [float(env.answer(t) == 'right') for t in flat]
    valid = [not t.failed for t in flat]
    return Rewards(np.array(value, np.float32), np.array(valid))

  c = schema.base().rollout
  c.update(dict(sampler='traces', group=4, traces='traces') | fields)
  engine = Engine(script)
  found = asyncio.run(
    chains.rollout(
      questions, env=env, engine=engine, source=source or FakeSource(),
      config=c, seed=0, step=5, reward=reward,
    )
  )  # fmt: skip
  assert engine.handles == {}
  return found, engine


def counts(found):
  return found.stats.traces, found.stats.traces_left_out


def test_a_trace_is_a_trajectory_of_a_teacher():
  source = FakeSource(text='what the source says')
  found, _ = play([question(SEARCHES)], source=source)
  *own, t = found.groups[0]
  assert (
    t.foreign and not any(x.foreign for x in own) and counts(found) == (1, 0)
  )
  assert (t.id, t.end, t.turns, t.invalid_actions) == (
    'q/solver/3',
    'answer',
    2,
    0,
  )
  assert [(s.author, s.kind) for s in t.segments] == [
    ('prompt', 'other'),
    ('teacher', 'think'), ('teacher', 'other'), ('teacher', 'search'),
    ('environment', 'information'),
    ('teacher', 'think'), ('teacher', 'other'), ('teacher', 'answer'),
  ]  # fmt: skip
  for s in t.segments:
    assert s.train == (s.author == 'teacher')
    assert s.logps is None and s.versions is None
  # What it reads is the source's, asked as for any trajectory.
  assert source.asked == [['author']]
  [search] = t.searches
  assert search.request.step == 5 and search.request.trajectory == t.id
  assert ENV.retrieved(t) == ['T: what the source says']
  # Its tokens are those of a warm start on the same trace and passages.
  actions = tuple(
    (k, search.passages if k == 'information' else x) for k, x in SEARCHES
  )
  taught = sft.render(Trace(question(), actions), ENV, 0)
  join = lambda t: np.concatenate([s.ids for s in t.segments])
  np.testing.assert_array_equal(join(t), join(taught))
  [mask], [as_taught] = batching.masks([t]), batching.masks([taught])
  np.testing.assert_array_equal(mask, as_taught)


def test_it_earns_and_is_batched_as_others_without_log_probs():
  found, _ = play([question(SEARCHES)])
  own, *_, t = found.groups[0]
  assert ENV.answer(t) == 'right' and ENV.answer(own) == 'wrong'
  assert {b.author for b in ENV.blocks(t)} == {'policy', 'environment'}
  n = sum(len(s.ids) for s in t.segments if s.author == 'teacher')
  penalty = asyncio.run(length.overlong([(t,)], None, limit=n, cache=n))
  assert penalty.value.tolist() == [-1.0]
  [row] = batching.tokens_of(0, t)
  assert np.isnan(row.logps[row.mask]).all() and row.mask.sum() == n
  # Its turns are turns, for advantages of turns.
  s = structure.of([t], batching.masks([t]))
  assert s.number.tolist() == [0, 1]
  # Written and read again for a later start, it is the same.
  [(_, again)] = collector.decode(collector.encode({5: [t]}))
  assert again.foreign and batching.tokens_of(0, again)[0].mask.sum() == n


def test_signs_of_collapse_and_staleness_are_of_the_policy_alone():
  found, _ = play([question(SEARCHES)])
  group = found.groups[0]
  how = dict(match='text')
  signs = health.signs(
    [group], ENV, np.array([0, 0, 0, 1.0]), np.ones(4, bool), **how
  )
  alone = health.signs([group[:3]], ENV, np.zeros(3), np.ones(3, bool), **how)
  assert signs.pop('health/zero_variance') == 0
  assert alone.pop('health/zero_variance') == 1
  assert signs == alone and signs['health/searches'] == 0
  assert collector.staleness([group], 5, 2) == collector.staleness(
    [group[:3]], 5, 2
  )


@pytest.mark.parametrize(
  'name, known, fields, env',
  [
    ('too long a turn', [['think', 'x' * 300], *DIRECT], {}, {}),
    ('too many tokens', SEARCHES, {}, dict(max_tokens=60)),
    ('no protocol', [['think', 'x'], ['information', ''], *DIRECT], {}, {}),
    ('no end', SEARCHES[:2], {}, {}),
    ('more after its end', [*DIRECT, ['information', ''], *DIRECT], {}, {}),
    ('what it states was not found', SEARCHES, dict(supporting=('7',)), {}),
    ('the service failed', SEARCHES, {}, {}),
  ],
)
def test_a_trace_that_cannot_be_played_is_left_out_and_counted(
  name, known, fields, env
):
  fails = (lambda q, attempt: True) if 'service' in name else lambda q, n: False
  found, _ = play(
    [question(known, **fields)], source=FakeSource(fails), env=make_env(**env)
  )
  [group] = found.groups
  assert counts(found) == (0, 1)
  assert not any(t.foreign for t in group) and len(group) == 4
  # The policy plays in its place, with the stream of that sample, and a failed
  # service is no failure of anybody.
  plain, _ = play([question()], env=make_env(**env))
  logps = lambda found: [
    t.segments[-1].logps.tobytes() for t in found.groups[0]
  ]
  assert logps(found) == logps(plain) and found.stats.failed == 0


def test_where_an_attempt_succeeds_there_is_no_trace():
  def script(history, seed):
    del history
    return f'<answer>{"right" if seed % 2 else "no"}</answer>'

  asked = [question(DIRECT, name=f'q{i}') for i in range(12)]
  found, _ = play(asked, script, trace_when='failed', group=2)
  solved = [
    any(ENV.answer(t) == 'right' for t in group if not t.foreign)
    for group in found.groups
  ]
  told = [any(t.foreign for t in group) for group in found.groups]
  assert told == [not ok for ok in solved] and {*told} == {True, False}
  assert found.stats.generations == 12 * 2
  assert counts(found) == (told.count(True), 0)


def test_attempts_that_a_service_failed_are_no_failures_of_the_policy():
  source = FakeSource(fails=lambda q, attempt: True)
  searches = lambda history, seed: '<search>x</search>'
  found, _ = play(
    [question(DIRECT)], searches, source, trace_when='failed', max_failed=1.0
  )
  assert counts(found) == (0, 0) and found.stats.failed == 4


def test_the_traces_that_make_the_golden_answer_likely_are_chosen():
  short, long = DIRECT, [['think', 'because'], *DIRECT]
  wrong = [['think', 'because of all this'], ['answer', 'no']]
  found, engine = play(
    [question(short, wrong, long)], trace_when='failed', trace_most=2
  )
  # The likelier, the longer what stands before the answer: wrong, then long.
  a, b, second, first = found.groups[0]
  assert not (a.foreign or b.foreign)
  text = lambda t: ENV.tokenizer.decode(
    np.concatenate([s.ids for s in t.segments])
  )
  assert 'because of all this' in text(first) and 'because <' in text(second)
  # Each is asked for the golden answer in the place of its own.
  assert len(engine.scored) == 3
  assert all(x.endswith('<answer> right </answer>') for x in engine.scored)
  assert not any('no </answer>' in x for x in engine.scored)
  assert counts(found) == (2, 0)
  # With no choice, nothing is scored.
  _, engine = play([question(short, wrong)], trace_when='failed', trace_most=2)
  assert not hasattr(engine, 'scored')


def test_a_golden_answer_without_room_is_the_least_likely():
  env = make_env(max_tokens=150)
  asked = dataclasses.replace(question(DIRECT, SEARCHES), answers=('x' * 140,))
  found, engine = play([asked], env=env)
  assert not hasattr(engine, 'scored') and counts(found) == (1, 0)


def test_what_cannot_work_is_refused():
  c = schema.base().rollout
  c.sampler = 'traces'
  for fields, message in (
    (dict(traces=''), "traces=''"),
    (dict(traces='traces', trace_most=8), 'trace_most=8.*1 and group - 1, 7'),
    (dict(traces='traces', trace_most=0), 'trace_most=0'),
    (dict(traces='tests.samplers.tld', trace_most=1), "'told'"),
  ):
    c.update(fields)
    with pytest.raises(ConfigError, match=message):
      core.sampler(c)
  with pytest.raises(ValueError, match="'q': meta.traces is no list of traces"):
    play([question('<answer>right</answer>')])


def test_what_it_needs_of_the_questions():
  for where, lacks in (('traces', 'traces'), (EXPERT, 'facts')):
    needs = traces.sample.needs(dict(traces=where))
    bare = Question('q', 'who?', ('right',))
    with pytest.raises(DataError, match=lacks):
      require_needs(
        [('config.rollout.sampler', NEEDY, dict(needs=needs))], [bare]
      )


def test_a_sampler_that_does_not_say_so_is_caught_at_the_batch():
  found, _ = play([question(DIRECT)])
  earned = Rewards(np.array([0.0, 0, 0, 1]), np.ones(4, bool))
  c = mixed()
  c.batch.lengths, c.batch.tokens = (256,), 1024
  how = dict(shards=1, seed=0)
  batch = batching.of_step(found.groups, earned, c, **how)
  assert batch.kept.all()
  c.algorithm.loss = 'clip'
  with pytest.raises(ConfigError, match="'clip'.*'q/solver/3'"):
    batching.of_step(found.groups, earned, c, **how)
  own = Rewards(earned.value[:3], earned.valid[:3])
  batching.of_step([found.groups[0][:3]], own, c, **how)  # nobody's but its own


EXPERT = 'searchrl_jax.worlds.atlas_traces.expert'


def NEEDY():
  pass


NEEDY.needs = lambda fields: fields['needs']


def mixed(**fields):
  c = tiny.config()
  c.rollout.update(sampler='traces', traces='tests.samplers.told')
  c.algorithm.update(
    loss='mixed', foreign_objective='tests.learn.test_foreign.f'
  )
  c.update_from_flattened_dict(fields)
  return c


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'algorithm.loss': 'clip'}, "loss='clip' has ratios.*'mixed'"),
    ({'env.information': 'policy', 'env.max_turns': 0}, "information='policy'"),
    (
      {
        'env.template': 'micro_contexts',
        'env.attempts': 2,
        'env.on_answer': 'refine',
        'env.max_note_tokens': 9,
      },
      'env.attempts=2: a trace',
    ),
    ({'env.train_observations': True}, 'train_observations'),
    ({'env.answer': 'boxed', 'rollout.trace_when': 'failed'}, "answer='boxed'"),
    (
      {'algorithm.kl': 'reward', 'algorithm.kl_coef': 0.1},
      "kl='reward' estimates",
    ),
    ({'algorithm.foreign_objective': ''}, 'foreign_objective'),
    ({'rollout.trace_when': 'sometimes'}, 'trace_when'),
  ],
)
def test_configs_that_would_take_a_ratio_to_nothing_are_refused(
  fields, message
):
  checks.check(mixed())
  with pytest.raises(ConfigError, match=message):
    checks.check(mixed(**fields))
