"""The second batch of the arena, and its warm start with hints."""

import asyncio
import collections
import dataclasses
import json

import pandas as pd
import pytest

from configs.methods import mr_search
from experiments.arena import (
  figure,
  hinted,
  measure,
  plans,
  results,
  run,
  second,
  verdicts,
)
from searchrl_jax import sft
from searchrl_jax.lookup import ConfigError
from searchrl_jax.rewards import core as rewards
from searchrl_jax.run import build
from searchrl_jax.sweep import core
from tests.methods import played

REPORTING = second.SECOND.reporting


@pytest.fixture
def report(monkeypatch):
  monkeypatch.setattr(plans.Batch, 'tuned', lambda _, row: row.default)
  share = {'mr_search': 2.6, 'igpo': 0.8, 'trace': 0.89, 'maxrl': 1.05}
  monkeypatch.setattr(
    plans.Batch, 'share', lambda _, row: share.get(row.name, 1.0)
  )
  return second.get_sweep('report')


def test_every_claim_has_its_arms_and_seeds(report):
  core.check(report)
  seeds = {arm.name: arm.seeds for arm in report.arms}
  stress = second.get_sweep('stress')
  seeds |= {arm.name: arm.seeds for arm in stress.arms}
  at = {'report': '', 'stress': 'stress-'}
  for claim in second.SECOND.claims:
    for name in (claim.method, claim.against):
      assert seeds[at[claim.phase] + name] == REPORTING, claim
  assert seeds['sspo-others'] == REPORTING
  assert seeds['sd_search-labels'] == REPORTING[:6]
  assert seeds['opsd'] == seeds['opsd-others'] == REPORTING[:3]
  assert seeds['opsd-repeated'] == seeds['opsd-repeated-live'] == REPORTING[3:]
  other = {*plans.REPORTING, *plans.ASSAY, *plans.PILOT}
  assert len(REPORTING) == len(plans.REPORTING) and not {*REPORTING} & other


def test_rows_are_tuned_and_judged_by_exact_match_in_training():
  score = ('run/em', 0.02)
  goals = {row.name: second.SECOND.goal(row) for row in second.SECOND.rows}
  found = {name: (c.metric, c.margin) for name, c in goals.items()}
  # Three attempts earn up to three in training.
  assert found == dict.fromkeys(found, score) | {'mr_search': ('hard/em', 0.05)}
  runs = {
    f'{arm}-wanderer': {
      str(seed): {'run/em': em + 0.01 * (seed % 2), 'hard/em': 0.9}
      for seed in plans.ASSAY
    }
    for arm, em in (('grpo', 0.5), ('oracle', 0.54), ('shuffled', 0.5))
  }
  # The same differences with all seeds have no spread: one is larger.
  runs['oracle-wanderer']['100']['run/em'] += 0.02
  runs['shuffled-wanderer']['101']['run/em'] -= 0.02
  (found,) = results.assay(second.SECOND, {'assay': runs}).values()
  assert found['sensitive']
  assert found['oracle - grpo']['mean'] == pytest.approx(0.04 + 0.02 / 6)


def test_rows_have_the_learning_rate_of_their_baseline(monkeypatch, tmp_path):
  path, batch = tmp_path / 'tuned.json', second.SECOND
  monkeypatch.setattr(plans, 'TUNED', path)
  rows = {row.name: row for row in batch.methods}
  names = lambda: {plan.row.name for plan in batch.tune()}
  assert names() == {'grpo', 'grpo4'}
  with pytest.raises(ConfigError, match="'grpo': run --phase=confirm"):
    batch.tuned(rows['opsd'])
  settings = {'grpo': {'lr': 2.0, 'kl': 0.0}}
  path.write_text(json.dumps({'settings': settings, 'best': {}}))
  assert names() == {row.name for row in batch.rows} - {'sapo'}
  trials = {plan.name: plan.setting for plan in batch.tune()}
  assert 'trace,lr=4.0' not in trials and 'grpo,lr=4.0' in trials
  assert trials['trace'] == {'lr': 2.0, 'kl': 0.0, 'scale': 0.2}
  assert trials['trace,scale=0.8'] == {'lr': 2.0, 'kl': 0.0, 'scale': 0.8}
  assert batch.tuned(rows['opsd'])['lr'] == 2.0
  assert {plan.setting['lr'] for plan in batch.assay()} == {2.0}


def test_exact_match_in_training_is_not_compared_where_it_is_another_thing():
  runs = {'300': {'values': {'run/em': 1.4, 'hard/em': 0.5}}}
  report = {'mr_search': runs, 'maxrl': runs}
  found = results.planned(second.SECOND, {'report': report})['report']
  assert found['mr_search']['300'] == {'hard/em': 0.5}
  assert found['maxrl']['300'] == runs['300']['values']


def test_runs_from_other_weights_of_a_warm_start_do_not_count(report):
  runs = {
    'grpo': {'300': {'start': 'a'}, '301': {'start': 'b'}},
    'grpo4': {'301': {'start': 'c'}},
    'maxrl': {'300': {'start': 'a'}, '301': {'start': 'c'}, '302': {}},
    'reseek': {'300': {'start': 'd'}},  # a warm start of its own
  }
  assert run.unlike(report, runs) == [('grpo', '301')]
  for arm, cases in runs.items():
    for case, one in cases.items():
      one['config'] = run.digest(report, arm, case)
  found = run.current(second.SECOND, {'report': runs})['report']
  assert [*found['grpo']] == ['300'] and [*found['maxrl']] == [*runs['maxrl']]
  known = run.alike(report, run.same(report, runs))
  assert run._kept('arms/grpo/300', known)
  assert not run._kept('arms/grpo/301', known)  # it runs again
  # Runs with another config than now are no majority: `c` is one of two.
  runs['maxrl']['301']['config'] = 'of before'
  known = run.alike(report, run.same(report, runs))
  assert {*known['grpo']} == {'300', '301'} and '301' not in known['maxrl']


def test_runs_that_fell_in_training_are_not_equivalent():
  (claim,) = (c for c in second.SECOND.claims if c.phase == 'stress')

  def verdict(end):
    stress = {
      arm: {
        str(i): {'run/em': 0.2 + 0.001 * (-1) ** i * sign, 'hard/em': end}
        for i in range(12)
      }
      for arm, sign in ((claim.method, 1), (claim.against, -1))
    }
    found = verdicts.judge([claim], {'stress': stress}, [True])[0]
    assert found['end'] is None  # no spread
    return found['verdict']

  assert (verdict(0.0), verdict(0.5)) == ('undecided', 'equivalent')


@pytest.mark.parametrize(
  'row',
  [row for row in second.METHODS if not row.guided and row.name != 'igpo'],
  ids=lambda row: row.name,
)
def test_rows_that_are_compared_in_training_log_exact_match(
  row, report, monkeypatch
):
  """(IGPO's reward asks the policy.)"""
  monkeypatch.setattr(plans.Batch, 'rate', lambda *_: 1.0)
  meta = dict(facts=(('A', 'home', 'Ann'),), parallel='', path=('a',))
  asked = dataclasses.replace(played.QUESTION, supporting=('a',), meta=meta)
  t = played.attempt(played.search(), played.says('Ann'), question=asked)
  terms = report.arm(row.name).config(300).reward
  context = rewards.RewardContext(0, env=played.ENV)
  found = asyncio.run(rewards.combine(terms, [(t,)], context))
  metrics = {f'reward/{name}': x for name, x in found.parts.items()}
  metrics |= {'rollout/sampled_tokens': [9.0], 'time/step': [1.0]}
  assert measure.of_training(pd.DataFrame(metrics))['run/em'] == 1


def test_the_committed_claims_are_these():
  path = second.SECOND.folder / 'results.json'
  names = 'method', 'claim', 'metric', 'against', 'margin', 'phase'
  known = [
    tuple(c[n] for n in names) for c in json.loads(path.read_text())['claims']
  ]
  made = [tuple(getattr(c, n) for n in names) for c in second.SECOND.claims]
  assert known == made


def test_rows_that_sample_other_numbers_of_tokens_have_a_baseline(report):
  """16 questions a step x 2.6, and x 0.89; rows without a claim need none."""
  questions = {
    arm.name: arm.config(300).rollout.questions
    for arm in report.arms
    if '-as-' in arm.name
  }
  assert questions == {'grpo-attempts-as-mr_search': 42, 'grpo-as-trace': 14}
  assert report.arm('grpo-attempts-as-mr_search').warm == 'mr_search'


def test_tokens_are_compared_with_those_from_the_same_warm_start(tmp_path):
  """60 of 40, not of the 50 of GRPO from another warm start."""
  tokens = {'grpo': 50, 'maxrl': 55, 'mr_search': 60, 'grpo-attempts': 40}
  tried = {
    plan.name: {
      str(seed): {
        'values': {
          'run/em': 0.5,
          'hard/em': 0.5,
          'run/sampled': tokens[plan.row.name],
        }
      }
      for seed in plans.TUNING
    }
    for plan in second.SECOND.tune()
    if plan.row.name in tokens
  }
  results.choose(second.SECOND, tried, {}, tmp_path, {})
  share = json.loads((tmp_path / plans.TUNED).read_text())['share']
  assert share == {
    'grpo': 1.0,
    'maxrl': 1.1,
    'mr_search': 1.5,
    'grpo-attempts': 1.0,
  }


def test_rows_are_compared_with_those_from_the_same_warm_start():
  report = {
    name: {'300': {'hard/em': em}}
    for name, em in {
      'grpo': 0.4,
      'sdpo': 0.5,
      'reseek': 0.7,
      'reseek-plain': 0.6,
      'search_r2': 0.2,
      'grpo-refined': 0.5,
    }.items()
  }
  gains = results.gains(second.SECOND, report)
  found = {(g['arm'], g['against']): g['mean'] for g in gains}
  assert found == pytest.approx(
    {
      ('sdpo', 'grpo'): 0.1,
      ('reseek', 'reseek-plain'): 0.1,
      ('search_r2', 'grpo-refined'): -0.3,
    }
  )


def test_single_attempts_are_compared_with_single_attempts():
  names = 'mr_search', 'grpo-attempts-as-mr_search', 'grpo-attempts'
  report = {
    name: {'300': {'hard/em': em}} for name, em in zip(names, (0.7, 0.6, 0.4))
  }
  report['mr_search']['300']['once/hard/em'] = 0.5
  found = {
    g['against']: g['mean']
    for g in results.gains(second.SECOND, report)
    if (g['arm'], g['metric']) == ('mr_search', 'once/hard/em')
  }
  assert found == pytest.approx({names[1]: -0.1, names[2]: 0.1})


def test_rows_without_a_claim_are_beside_their_baseline(tmp_path):
  ends = {'reseek': 0.7, 'reseek-plain': 0.6, 'guide': 0.8, 'grpo': 0.5}
  ends |= {'tips': 0.4, 'tips-plain': 0.6}  # PPO, of which there is no row
  report = {
    name: {
      str(i): {'values': {'hard/em': em, 'run/em': em - 0.1 + i % 2 / 10}}
      for i in second.SECOND.few
    }
    for name, em in ends.items()
  }
  report['maxrl'] = {
    case: {'values': {'hard/em': 0.5, 'run/em': int(case) / 1e3}}
    for case in report['grpo']
  }
  found = results.write(second.SECOND, {'report': report}, tmp_path, {}, '')
  _, right = figure.draw([(second.SECOND, found)]).axes
  names = [x.get_text() for x in right.get_yticklabels()]
  assert names == ['reseek', 'tips', 'guide']
  one, worse, two = (x for x in right.lines if x.get_marker() in ('o', 's'))
  assert worse.get_xdata() == pytest.approx([-0.2])
  assert one.get_xdata() == pytest.approx([0.1])
  # guide's training samples have hints: the end is compared.
  assert two.get_xdata() == pytest.approx([0.3])
  assert [x.get_marker() for x in (one, worse, two)] == ['o', 'o', 's']


def test_controls_of_rows_without_a_claim_are_beside_the_baseline():
  ends = {'grpo': 0.5, 'opsd': 0.8, 'opsd-others': 0.6}
  report = {
    arm: {str(i): {'run/em': em} for i in range(2)} for arm, em in ends.items()
  }
  found = {
    (g['arm'], g['against']): g['mean']
    for g in results.gains(second.SECOND, report)
  }
  wanted = {
    ('opsd', 'grpo'): 0.3,
    ('opsd', 'opsd-others'): 0.2,
    ('opsd-others', 'grpo'): 0.1,
  }
  assert found == pytest.approx(wanted)


def test_configs_have_digests_of_their_own(report):
  made = {  # opsd-repeated is opsd-frozen with other seeds
    a.name: (a.warm, run.digest(report, a.name, '0'), a.seeds)
    for a in report.arms
  }
  assert len({*made.values()}) == len(made)


def test_a_digest_says_which_warm_start_an_arm_has(report, monkeypatch):
  before = run.digest(report, 'grpo', '0')
  monkeypatch.setattr(second, 'SHARE', 0.25)
  assert run.digest(report, 'grpo', '0') != before


def test_rows_with_a_warm_start_of_their_own_have_its_traces(report):
  own = report.start('reseek').config(0)
  assert own.sft.data.judged == 1 and 'hinted' not in own.sft.data
  assert own.sft.data.mix == second.MIX
  arm = report.arm('reseek').config(0)
  assert 'hinted' not in arm.sft.data and arm.sft.data.judged == 1
  positions = lambda c: c.model.arch.max_position_embeddings
  skills = report.start('skills').config(0)
  assert positions(own) == positions(arm) == positions(skills) == 1024


def test_warm_starts_have_hints(report):
  start = report.start(second.MIX).config(3)
  assert start.sft.data.module == 'experiments.arena.hinted'
  assert start.data.world_seed == 3 and start.sft.data.mix == 'wanderer'
  arm = report.arm('grpo').config(3)
  assert start.env.max_tokens == 2 * arm.env.max_tokens
  assert report.needs('warm/wanderer/3') == {'train.init': 'warm/skills/3'}


@pytest.mark.parametrize('contexts', [1, 3])
def test_a_policy_with_attempts_can_be_asked_once(contexts, tmp_path):
  config = mr_search.get_config(f'base=atlas,contexts={contexts},note=8')
  tok = build.tokenizer(config, str(tmp_path))
  assert build.environment(config, tok).config.attempts == 3
  sft.one_attempt(config.env)
  assert build.environment(config, tok).config.attempts == 1


@pytest.fixture(scope='module')
def traces():
  found = dict(
    world_seed=1, mix=second.MIX, worlds=2, n=120, people=60, known=0
  )
  return hinted.traces(hinted=0.5, **found)


def test_half_of_the_traces_have_hints_and_fit(traces):
  env = hinted._environment()
  told = [t for t in traces if not t.question.text.endswith('?')]
  assert len(traces) - len(told) == 60 and 50 <= len(told) <= 60
  config = second.start(second.MIX, 0)
  limit = config.env.max_tokens
  roomy = type(env)(
    env.tokenizer, env.template, config.env, env.prompt_mode, env.k
  )
  for trace in told:
    played = sft.render(trace, roomy, 0)
    assert played is not None and len(played) <= limit
    # The attempt behind a hint does all well.
    assert env.answer(played) in trace.question.answers


def kind_of(hint):
  if hint.endswith(hinted.LABELS):
    return 'queries'
  if '<think>' in hint:
    return 'sibling'
  return 'anchors' if '.' in hint else 'facts or wordings'


def test_hints_of_all_kinds_are_about_questions_of_all_kinds(traces):
  told = [
    (t.question.source, t.question.text.partition('? ')[2]) for t in traces
  ]
  pairs = collections.Counter((kind_of(h), kind) for kind, h in told if h)
  for kind in ('1hop', '2hop', '3hop', '4hop', 'comparison'):
    assert sum(pairs[hint, kind] > 0 for hint in {h for h, _ in pairs}) >= 3
  hints = collections.Counter(kind_of(h) for _, h in told if h)
  assert len(hints) == 4 and min(hints.values()) > 3


def test_hints_have_words_that_the_policy_reads(traces):
  """But for tags, which outside text has none of."""
  tok = hinted._environment().tokenizer
  found, no = (tok.encode(f' {word}') for word in hinted.LABELS)
  assert found != no and len(found) == len(no) == 1
  unknown = tok.encode(' correct')
  assert unknown == tok.encode(' incorrect')
  for trace in traces:
    text = trace.question.text
    if kind_of(text) != 'sibling':
      assert not {*unknown} & {*tok.encode(text)}, text
