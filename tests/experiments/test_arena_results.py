"""Verdicts, measures and phases of the arena."""

import copy
import json
import math
import re

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from experiments.arena import (
  arms,
  figure,
  measure,
  plans,
  recipes,
  results,
  run,
  second,
  verdicts,
)
from searchrl_jax import schema
from searchrl_jax.lookup import ConfigError
from searchrl_jax.store import records
from searchrl_jax.sweep import core, stages
from tests.conftest import ROOT


def cases(*values, name='em'):
  return {str(i): {name: v} for i, v in enumerate(values)}


def judged(claim, values, *others):
  """The record of a claim, where all runs of all claims are there."""
  claims = [claim, *others]
  return verdicts.judge(claims, values, [True] * len(claims))[0]


def test_a_verdict_follows_from_paired_differences():
  # Differences .1, .2, .3: mean .2, deviation .1, t = .2 / (.1 / sqrt 3) =
  # 3.464, p = .0742 with 2 degrees of freedom; half an interval is 4.303 x .1 /
  # sqrt 3 = .2484.
  values = {'a': cases(0.5, 0.5, 0.5), 'b': cases(0.4, 0.3, 0.2)}
  claim = verdicts.Claim('a', 'helps', 'em', 'b')
  found = judged(claim, {'report': values})
  assert found['value'] == pytest.approx(0.2)
  assert found['interval'] == pytest.approx([-0.0484, 0.4484], abs=1e-4)
  assert found['p_holm'] == pytest.approx(0.0742, abs=1e-4)
  assert found['n_seeds'] == 3 and found['verdict'] == 'undecided'


@pytest.mark.parametrize(
  'a, b, sign, within, verdict',
  [
    ((0.7, 0.8, 0.7), (0.3, 0.41, 0.31), 1, False, 'shown'),
    ((0.7, 0.8, 0.7), (0.3, 0.41, 0.31), -1, False, 'contradicted'),
    ((0.30, 0.41, 0.31), (0.31, 0.40, 0.31), 1, False, 'equivalent'),
    ((0.30, 0.41, 0.31), (0.31, 0.40, 0.31), 1, True, 'shown'),
    ((0.20, 0.30, 0.21), (0.31, 0.40, 0.31), 1, True, 'contradicted'),
    ((0.1, 0.8, 0.3), (0.3, 0.4, 0.3), 1, False, 'undecided'),
    ((0.3,), (0.1,), 1, False, 'undecided'),
    ((), (0.1, 0.2), 1, False, 'undecided'),
    # All differences are equal (one is .1 + 3e-17): no spread to judge by.
    ((0.5, 0.6), (0.4, 0.5), 1, False, 'undecided'),
    ((0.5, 0.6), (0.5, 0.6), 1, False, 'undecided'),
    ((0.5, 0.6), (0.5, 0.6), 1, True, 'undecided'),
  ],
)
def test_verdicts(a, b, sign, within, verdict):
  claim = verdicts.Claim('a', '', 'em', 'b', sign=sign, within=within)
  runs = {'report': {'a': cases(*a), 'b': cases(*b)}}
  found = judged(claim, runs)
  assert found['verdict'] == verdict


def test_only_cases_that_both_arms_have_are_paired():
  values = {'a': {'0': {'em': 0.5}, '2': {'em': 0.9}}, 'b': cases(0.1, 0.2)}
  claim = verdicts.Claim('a', '', 'em', 'b')
  assert verdicts.differences(claim, {'report': values}) == pytest.approx([0.4])


def test_further_runs_of_a_baseline_are_averaged():
  report = {
    'gigpo': cases(0.5, 0.6),
    'grpo': cases(0.2, 0.3),
    'grpo-2': cases(0.4, 0.5),
  }
  claim = verdicts.Claim('gigpo', '', 'em')
  found = results.averaged(arms.FIRST, {'report': report})
  # 0.5 - (0.2 + 0.4) / 2; 0.6 - (0.3 + 0.5) / 2.
  np.testing.assert_allclose(verdicts.differences(claim, found), [0.2, 0.2])
  # A case that lacks a run would have more noise, and other samples.
  report['grpo-3'] = {'0': {'em': 0.6}}
  found = results.averaged(arms.FIRST, {'report': report})
  assert {*found['report']} == {'gigpo', 'grpo'}
  np.testing.assert_allclose(verdicts.differences(claim, found), [0.1])
  assert {*report} == {'gigpo', 'grpo', 'grpo-2', 'grpo-3'}


def test_two_arms_that_collapsed_say_nothing():
  """But for a metric of which less is better."""
  low = (0.02, 0.0, 0.01), (0.01, 0.01, 0.0)
  for shift, sign, within, verdict in (
    (0.0, 1, False, 'undecided'),
    (0.0, 1, True, 'undecided'),
    (0.0, -1, False, 'equivalent'),
    (0.3, 1, False, 'equivalent'),
    (0.3, 1, True, 'shown'),
  ):
    a, b = (cases(*np.add(x, shift)) for x in low)
    claim = verdicts.Claim('a', '', 'em', 'b', sign=sign, within=within)
    found = judged(claim, {'report': {'a': a, 'b': b}})
    assert found['verdict'] == verdict and found['small']


def test_what_is_shown_may_be_below_the_margin():
  # .02, .021, .02: t = .0203 / (.000577 / sqrt 3) = 61.
  a, b = cases(0.42, 0.521, 0.42), cases(0.4, 0.5, 0.4)
  claim = verdicts.Claim('a', 'helps', 'em', 'b')
  found = judged(claim, {'report': {'a': a, 'b': b}})
  assert found['verdict'] == 'shown' and found['small']
  told = results.show_claims({'claims': [found], 'gains': []})
  assert '| shown, below the margin |' in told


def test_a_claim_within_a_margin_has_the_difference_as_its_value():
  # -.01, .01, 0: mean 0, deviation .01; half an interval .0248. The test is
  # against -.05: t = .05 / (.01 / sqrt 3) = 8.66, p = .0131.
  values = {'a': cases(0.30, 0.41, 0.31), 'b': cases(0.31, 0.40, 0.31)}
  claim = verdicts.Claim('a', '', 'em', 'b', within=True)
  found = judged(claim, {'report': values})
  assert found['value'] == pytest.approx(0.0, abs=1e-9)
  assert found['interval'] == pytest.approx([-0.0248, 0.0248], abs=1e-4)
  assert found['p_holm'] == pytest.approx(0.0131, abs=1e-4)


def test_a_claim_within_a_margin_can_be_equivalent():
  # -.02, .02, -.01, .01: half an interval .029, p = .0119 against -.05, which
  # Holm's correction multiplies by 5.
  b = (0.3, 0.4, 0.5, 0.6)
  a = np.add(b, (-0.02, 0.02, -0.01, 0.01))
  claim = verdicts.Claim('a', '', 'em', 'b', within=True)
  others = [verdicts.Claim('did not run', '', 'em', 'b')] * 4
  runs = {'report': {'a': cases(*a), 'b': cases(*b)}}
  found = judged(claim, runs, *others)
  assert found['p_holm'] == pytest.approx(5 * 0.0119, abs=1e-3)
  assert found['verdict'] == 'equivalent'


def test_a_claim_that_is_incomplete_helps_no_other():
  """Its p is 1 until it is complete, whatever its runs say so far."""
  base = {'b': cases(0.3, 0.4, 0.5, 0.6)}
  base['good'] = cases(0.5, 0.59, 0.71, 0.8)
  base['part'] = cases(0.9, 1.0, 1.1001)
  claims = [verdicts.Claim(name, '', 'em', 'b') for name in ('good', 'part')]
  found, part = verdicts.judge(claims, {'report': base}, [True, False])
  # .2, .19, .21, .2: t = .2 / (.00816 / 2) = 49, p = 1.87e-5, twice.
  assert found['p_holm'] == pytest.approx(2 * 1.87e-5, rel=1e-2)
  assert part['p_holm'] is None
  assert (part['verdict'], part['n_seeds']) == ('undecided', 3)
  assert part['value'] == pytest.approx(0.6, abs=1e-3)


def test_what_is_contradicted_is_corrected_too():
  # -.1, -.09, -.11, -.1: t = -.1 / (.00816 / 2) = -24.5, p = 1.5e-4, which is
  # multiplied by as many claims.
  b = (0.4, 0.5, 0.6, 0.7)
  runs = {'report': {'b': cases(*b), 'a': cases(0.3, 0.41, 0.49, 0.6)}}
  claim = verdicts.Claim('a', '', 'em', 'b')
  others = [verdicts.Claim('did not run', '', 'em', 'b')] * 400
  assert judged(claim, runs)['verdict'] == 'contradicted'
  assert judged(claim, runs, *others)['verdict'] == 'undecided'


def test_holm_by_hand():
  # Sorted .01 x 4, .02 x 3, .03 x 2 = .06 (not below .06), .5.
  assert verdicts.holm([0.03, 0.01, 0.5, 0.02]) == pytest.approx(
    [0.06, 0.04, 0.5, 0.06]
  )
  assert verdicts.holm([]) == []
  rng = np.random.default_rng(0)
  ps = rng.random(9) / 20
  adjusted = verdicts.holm(ps)
  assert all(q >= p for p, q in zip(ps, adjusted))
  assert (np.diff(np.array(adjusted)[np.argsort(ps)]) >= 0).all()


def test_the_pilot_fixes_the_seeds():
  spread = np.array([-1.0, 0.0, 1.0]) * 0.1  # deviation .1
  n = verdicts.seeds_needed([spread], 0.05)
  half = lambda n: scipy.stats.t.ppf(0.975, n - 1) * 0.1 / math.sqrt(n)
  assert half(n) <= 0.05 < half(n - 1)
  # Variances of .01 and .0004 x .01: the mean of .0052 has a deviation of .072.
  assert verdicts.seeds_needed([spread, 0.2 * spread], 0.072) == (
    verdicts.seeds_needed([np.sqrt(0.52) * spread], 0.072)
  )


def test_agreement_of_mixtures():
  assert verdicts.agreement([[1, 2, 3]] * 3) == pytest.approx(1.0)
  # Sums of ranks 4, 4, 4.
  assert verdicts.agreement([[1, 2, 3], [3, 2, 1]]) == pytest.approx(0.0)
  # Both judges order alike, with a tie.
  assert verdicts.agreement([[1, 1, 2]] * 2) == pytest.approx(1.0)


@pytest.mark.parametrize(
  'rewards, step',
  [
    ([0.1, 0.3, 0.5, 0.6], 4),  # never
    ([0.6, 0.6, 0.6, 0.6, 0.0, 0.0, 0.0], 5),
    ([0.6, 0.6, 0.6, 0.0, 0.0, 0.0, 0.6, 0.6, 0.6], 9),  # it recovers
    ([0.5, 0.1], 2),
    ([0.3, 0.08, 0.08, 0.08, 0.08, 0.08], 3),  # it falls at once
    ([-0.2] * 6, 6),  # a reward that is always below 0 does not fall
    ([-0.5, -0.4, -0.2, -0.1, -0.1, -0.1], 6),
    ([0.0] * 5, 5),  # it never rises
  ],
)
def test_collapse_is_a_fall_for_good(rewards, step):
  assert measure.collapse(np.array(rewards)) == step


def test_values_of_training_leave_out_the_first_evaluation():
  columns = ('reward', 'rollout/sampled_tokens', 'time/step')
  metrics = pd.DataFrame(
    [[math.nan] * 3, [0.5, 10, 2.0], [0.6, 12, 1.0], [0.7, 14, 1.0]],
    columns=columns,
    index=[-1, 0, 1, 2],
  )
  known = {'run/sampled': 36.0, 'run/collapse': 3.0, 'run/seconds': 4.0}
  assert measure.of_training(metrics) == known
  # Each of several starts counted its own tokens, before they counted all.
  assert 'run/sampled' not in measure.of_training(metrics, starts=2)
  metrics['rollout/earlier_tokens'] = [math.nan, math.nan, 0.0, 0.0]
  assert 'run/sampled' not in measure.of_training(metrics, starts=2)
  metrics['rollout/earlier_tokens'] = 0.0
  assert measure.of_training(metrics, starts=2) == known


@pytest.mark.parametrize(
  'column, step', [('reward/em', 3), ('reward/otc/em', 3), ('reward/otc', 6)]
)
def test_collapse_is_of_exact_match_where_it_is_known(column, step):
  columns = ['reward', 'rollout/sampled_tokens', 'time/step', column]
  rows = [[0.9, 1, 1.0, em] for em in (0.6, math.nan, 0.0, 0.0, math.nan, 0.0)]
  found = measure.of_training(pd.DataFrame(rows, columns=columns))
  assert found['run/collapse'] == step
  # A reward that has no exact match says nothing of it; a step without a valid
  # reward is as the one before.
  mean = (0.6 + 0.6) / 6 if column.endswith('/em') else None
  assert found.get('run/em') == (mean and pytest.approx(mean))


def test_what_was_trained_without_passages_is_evaluated_with_them(monkeypatch):
  lacks = {'source.dials': {'missing': plans.MISSING}}
  grpo = arms.METHODS[0]
  config = plans.config(grpo, grpo.default, lacks, '', 0)
  asked = []
  monkeypatch.setattr(
    measure.evaluate,
    'evaluate',
    lambda config, *_: asked.append(config.source.dials.missing),
  )
  monkeypatch.setattr(measure.read, 'run', lambda folder: folder)
  monkeypatch.setattr(measure, 'measured', lambda *_: {'hard/em': 0.2})
  monkeypatch.setattr(measure, '_values', lambda found, *_: {'hard/em': found})
  plan = plans.Plan('grpo-missing', grpo, grpo.default, lacks)
  found = plans._evaluation(plan)(config, 'run', 'out')
  assert asked == [0.0] and config.source.dials.missing == plans.MISSING
  assert found == {'hard/em': 'out', 'incomplete/hard/em': 0.2}
  assert plans._evaluation(plans.Plan('grpo', grpo, grpo.default)) is not (
    plans._evaluation(plan)
  )


def test_kinds_and_hard_questions():
  row = dict.fromkeys(measure.SCORES, math.nan)
  rows = [
    ('1hop', 1, row | {'em': 1.0}),
    ('3hop', 3, row | {'em': 0.0, 'wasted': 0.5}),
    ('4hop', 4, row | {'em': 1.0}),
  ]
  assert dict(measure.of_kinds(rows)) == {
    '1hop/em': 1.0,
    '3hop/em': 0.0,
    '3hop/wasted': 0.5,
    '4hop/em': 1.0,
    'hard/em': 0.5,
    'hard/wasted': 0.5,
    'all/em': 2 / 3,
    'all/wasted': 0.5,
  }


def test_every_method_has_a_row_and_every_row_a_claim_or_a_user():
  files = {p.stem for p in (ROOT / 'configs/methods').glob('[!_]*.py')}
  every = [row for batch in second.BATCHES.values() for row in batch.methods]
  rows = {row.file or row.name for row in every}
  # contexts: experiments/contexts/rows.py
  assert rows == files - {'core', 'contexts'}
  named = {row.name for row in arms.METHODS}
  assert {c.against for c in arms.FIRST.claims} <= named | {'grpo-missing'}
  assert all(c.method == row.name for row in arms.METHODS for c in row.claims)
  tested = {c.method for c in arms.FIRST.claims}
  assert len(tested - {'grpo'}) >= 12
  assert named - tested == {'ppo', 'reinforce_pp', 'grpo4'}


def test_outcome_arms_have_as_many_trials():
  trials = {row.name: len([*row.trials()]) for row in arms.METHODS}
  assert set(trials.values()) == {7}


def test_seeds_of_the_phases_are_apart():
  assert not {*plans.ASSAY, *plans.TUNING} & {*plans.PILOT, *plans.REPORTING}
  assert not {*plans.TUNING} & {*plans.CONFIRMING}
  assert not {*plans.PILOT} & {*plans.REPORTING}


def test_a_phase_is_a_sweep_of_configs():
  found = arms.get_sweep('assay')
  core.check(found)
  assert found.needs('arms/oracle-hasty/100') == {
    'train.init': 'warm/hasty/100'
  }
  assert found.needs('warm/hasty/100') == {'train.init': 'warm/skills/100'}
  assert found.arm('oracle-even').seeds == plans.ASSAY
  assert found.arm('oracle-hasty').seeds == plans.ASSAY[:3]
  shuffled = found.arm('shuffled-even').config(100)
  assert shuffled.algorithm.advantage == 'experiments.arena.oracle.credited'
  assert shuffled.algorithm.advantage_kw.shuffle
  with pytest.raises(ConfigError, match='phase .asay.*assay'):
    arms.get_sweep('asay')


def test_seeds_of_arms(monkeypatch):
  """All that a claim needs; fewer of what none does."""
  monkeypatch.setattr(plans.Batch, 'tuned', lambda _, row: row.default)
  report = {arm.name: arm.seeds for arm in arms.get_sweep('report').arms}
  assert report['gigpo'] == report['grpo-2'] == plans.REPORTING
  assert report['grpo-missing'] == plans.REPORTING
  assert report['gigpo-shuffled'] == tuple(range(6))
  assert report['grpo-shuffled'] == plans.REPORTING
  stress = {arm.name: arm.seeds for arm in arms.get_sweep('stress').arms}
  full = {name for name, seeds in stress.items() if seeds == plans.REPORTING}
  assert full == {f'stress-{n}' for n in ('grpo', 'grpo4', 'llds', 'calib_adv')}
  assert {len(s) for n, s in stress.items() if n not in full} == {3}


def test_what_is_tuned_runs_with_the_default_too():
  """Methods that keep the default rate are compared with it at that rate."""
  report = arms.get_sweep('report')
  names = {a.name for a in report.arms if a.name.endswith('-default')}
  assert names == {'grpo-default'}  # the only baseline that the tuning changed
  rate = lambda name: report.arm(name).config(0).optim.lr
  assert rate('grpo') == pytest.approx(2 * rate('grpo-default'))


def test_repeats_differ_in_every_case():
  """With one seed for all, their error would be the same in all cases."""
  found = arms.get_sweep('report')
  names = ['grpo', 'grpo-2', 'grpo-3']
  made = [found.arm(n).config(c) for n in names for c in plans.REPORTING]
  assert len({c.seed for c in made}) == len(made) == 3 * len(plans.REPORTING)
  assert [c.data.world_seed for c in made] == [*plans.REPORTING] * 3


def test_only_atlas_has_warm_starts_and_trials():
  base = 'base=search_r1,model=x'
  assert not arms.get_sweep(f'pilot,{base}').warm
  for phase in ('assay', 'tune', 'confirm', 'mixtures', 'recipes'):
    with pytest.raises(ConfigError, match=f'{phase}.*--base'):
      arms.get_sweep(f'{phase},{base}')


def test_only_runs_of_present_configs_count():
  found = arms.get_sweep('tune')
  old, new = {'config': 'x'}, {'config': run.digest(found, 'grpo', '100')}
  kept = {'grpo': {'100': new, '101': old}}
  kept |= {'otc': {'100': old}, 'gone': {'100': old}}
  assert run.current(arms.FIRST, {'tune': kept}) == {
    'tune': {'grpo': {'100': new}}
  }


def test_phases_after_tuning_need_it(monkeypatch, tmp_path):
  monkeypatch.setattr(plans, 'TUNED', tmp_path / 'tuned.json')
  with pytest.raises(ConfigError, match='tuned.json.*--phase=confirm'):
    arms.get_sweep('report')
  with pytest.raises(ConfigError, match='tuned.json.*--phase=tune'):
    arms.get_sweep('confirm')


def tune_runs():
  values = {arms.FIRST.goal(row).metric: 2.0 for row in arms.METHODS} | {
    'hard/em': 0.4
  }
  return {
    plan.name: {str(seed): {'values': {**values}} for seed in plans.TUNING}
    for plan in arms.FIRST.tune()
  }


def test_tuning_takes_the_best_trial(tmp_path, monkeypatch):
  runs = tune_runs()
  for name, metric, value in (
    ('gigpo,lr=2.0', 'hard/em', 0.46),
    ('gigpo,scale=0.3', 'hard/em', 0.5),
    ('pica,kl=0.03', 'hard/em', 0.44),  # 0.04 above the default, which stays
    # Claims fewer searches. Half as many, but exact match falls by 0.1;
    # 0.1 fewer, within the claim's margin; 0.5 fewer.
    ('otc,lr=2.0', 'all/searches', 1.0),
    ('otc,lr=2.0', 'hard/em', 0.3),
    ('otc,lr=0.5', 'all/searches', 1.9),
    ('otc,scale=0.6', 'all/searches', 1.5),
    ('otc,scale=0.6', 'hard/em', 0.36),
  ):
    for run_ in runs[name].values():
      run_['values'][metric] = value
  path = tmp_path / 'tuned.json'
  results.choose(arms.FIRST, runs, {}, tmp_path, {})
  content = json.loads(path.read_text())
  assert {*content['best']} - {*content['settings']} == {'gigpo', 'otc'}
  monkeypatch.setattr(plans, 'TUNED', path)
  confirmed = [arm.name for arm in arms.get_sweep('confirm').arms]
  assert confirmed == ['gigpo', 'gigpo,scale=0.3', 'otc', 'otc,scale=0.6']

  again = {
    name: {str(seed): {'values': {'hard/em': 0.4, 'all/searches': value}}
           for seed in plans.CONFIRMING}
    for name, value in zip(confirmed, (2.0, 2.0, 1.9, 1.8), strict=True)
  }  # fmt: skip
  again['gigpo,scale=0.3']['105']['values']['hard/em'] = 0.39
  results.choose(arms.FIRST, runs, again, tmp_path, {})
  settings = json.loads(path.read_text())['settings']
  assert json.loads(path.read_text())['share'] == {}  # nothing was counted
  for name, tokens in (('grpo', 10.0), ('gigpo', 11.0), ('otc,scale=0.6', 8.0)):
    for run_, more in zip(runs[name].values(), (1, -1), strict=True):
      run_['values']['run/sampled'] = tokens + more
  # As good as the default but for one run of four.
  assert settings['gigpo'] == {'lr': 1.0, 'kl': 0.0, 'scale': 1.0}
  again['gigpo,scale=0.3']['104']['values']['hard/em'] = 0.42
  del runs['igpo,kl=0.03']
  results.choose(arms.FIRST, runs, again, tmp_path, {})
  settings = json.loads(path.read_text())['settings']
  assert settings['gigpo'] == {'lr': 1.0, 'kl': 0.0, 'scale': 0.3}
  assert settings['otc'] == {'lr': 1.0, 'kl': 0.0, 'scale': 0.6}
  assert settings['pica'] == {'lr': 1.0, 'kl': 0.0, 'scale': 0.3}  # the default
  assert settings['grpo'] == {'lr': 1.0, 'kl': 0.0}
  assert 'igpo' not in settings  # a trial of it has not run
  # Of the setting that was chosen: 8 of the 10 of GRPO, on average.
  share = json.loads(path.read_text())['share']
  assert share == pytest.approx({'grpo': 1.0, 'otc': 0.8})


def test_what_is_kept_is_not_run_again_unless_its_config_changed(tmp_path):
  found = arms.get_sweep('tune')
  config = run.digest(found, 'grpo', '100')
  assert config != run.digest(found, 'otc', '100')
  known = {'grpo': {'100': {'config': config}}}
  assert run.same(found, known) == known
  assert not run.same(found, {'otc': known['grpo']})
  known['grpo']['100']['config'] = 'of another recipe'
  assert not run.same(found, known)


def test_a_field_that_the_schema_gains_drops_no_run(monkeypatch):
  found = arms.get_sweep('tune')
  before = run.digest(found, 'grpo', '100')
  base = schema.base

  def later():
    config = base()
    with config.unlocked():
      config.train.later = 0.0
    return config

  monkeypatch.setattr(schema, 'base', later)
  config = found.arm('grpo').config(100)
  assert config.train.later == 0.0
  assert run.digest(found, 'grpo', '100') == before


@pytest.mark.long
def test_configs_of_a_phase_have_digests_of_their_own():
  for phase in ('assay', 'tune', 'report', 'stress', 'mixtures'):
    found = arms.get_sweep(phase)
    # Arms from other warm starts have one config: train.init is set later.
    made = {
      arm.name: (arm.warm, run.digest(found, arm.name, '0'))
      for arm in found.arms
    }
    assert len({*made.values()}) == len(made)


def test_kept_runs_are_read_as_they_were_written(tmp_path):
  """Rows of the recipes have values that others do not."""
  about = dict(config='c', commit='d', seconds=1.5, rewards=[0.25, 1.0])
  runs = {
    'report': {
      'otc': {'0': {**about, 'values': {'all/em': 0.1234}}},
      'grpo': {'11': {**about, 'rewards': [], 'values': {'all/em': 0.0}}},
    },
    'recipes': {'ssp': {'0': {**about, 'values': {'before/all/em': 1.0}}}},
  }
  run.save_runs(tmp_path, runs)
  assert run.load_runs(tmp_path) == runs
  assert len((tmp_path / run.RUNS).read_text().splitlines()) == 4


@pytest.mark.parametrize(
  'grpo, oracle, shuffled, sensitive',
  [
    ((0.4, 0.5, 0.45), (0.5, 0.62, 0.54), (0.41, 0.49, 0.45), True),
    # Below the window; no better than GRPO; no better than shuffled credit.
    ((0.1, 0.2, 0.15), (0.2, 0.32, 0.24), (0.11, 0.19, 0.15), False),
    ((0.4, 0.5, 0.45), (0.5, 0.4, 0.45), (0.2, 0.2, 0.2), False),
    ((0.4, 0.5, 0.45), (0.5, 0.62, 0.54), (0.5, 0.6, 0.56), False),
  ],
)
def test_an_assay_is_sensitive(grpo, oracle, shuffled, sensitive, monkeypatch):
  runs = {'grpo-even': grpo, 'oracle-even': oracle, 'shuffled-even': shuffled}
  runs = {name: hard(*x) for name, x in runs.items()}
  tuned = zip(('grpo', 'grpo-oracle', 'grpo-shuffled'), runs.values())
  every = {'assay': runs, 'report': dict(tuned)}
  for name, key in (('ASSAY', 'even'), ('REPORTING', 'tuned')):
    monkeypatch.setattr(plans, 'ASSAY', (0, 1, 2, 3))
    monkeypatch.setattr(plans, 'REPORTING', (0, 1, 2, 3))
    assert results.assay(arms.FIRST, every) == {}  # seed 3 is left
    monkeypatch.setattr(plans, name, (0, 1, 2))
    found = results.assay(arms.FIRST, every)
    assert [*found] == [key] and found[key]['sensitive'] == sensitive
    gain = found[key]['oracle - grpo']['mean']
    assert gain == pytest.approx(np.mean(oracle) - np.mean(grpo))


def test_an_assay_from_another_mixture_needs_three_seeds(monkeypatch):
  monkeypatch.setattr(plans, 'ASSAY', (0, 1, 2, 3))
  run_ = hard(0.4, 0.5, 0.45)
  for mix, found in (('even', []), ('hasty', ['hasty'])):
    runs = {f'{name}-{mix}': run_ for name in ('grpo', 'oracle', 'shuffled')}
    assert [*results.assay(arms.FIRST, {'assay': runs})] == found


def report_runs():
  """Exact match of row n differs from GRPO's by +-0.001 n, by turns."""
  common = {'all/searches': 2.0, 'all/em': 0.5}
  return {
    name: {
      str(i): {'values': {'hard/em': 0.4 + 1e-3 * (-1) ** i * n} | common}
      for i in plans.REPORTING
    }
    for n, row in enumerate(arms.METHODS)
    for name in (row.name, *row.again)
  }


def test_results_have_the_claims_that_the_issue_asks_for(tmp_path):
  report = report_runs()
  written = results.write(
    arms.FIRST, {'report': report}, tmp_path, {}, '--phase'
  )
  assert written == json.loads((tmp_path / 'results.json').read_text())
  assert len(written['claims']) == len(arms.FIRST.claims)
  for record in written['claims']:
    assert {
      *('method', 'claim', 'metric', 'value', 'interval', 'n_seeds', 'verdict')
    } <= record.keys()
  by = {(c['method'], c['metric']): c for c in written['claims']}
  assert by['gigpo', 'hard/em']['verdict'] == 'equivalent'
  stress = by['llds', 'hard/em']  # of the last claim
  assert (stress['phase'], stress['verdict']) == ('stress', 'undecided')
  shown = results.show(
    results.planned(arms.FIRST, {'report': report})['report']
  )
  assert f'| otc | {len(plans.REPORTING)} | 0.400' in shown
  # Row 7: +-0.007 by turns is 0 on average; half = 2.201 x 0.00731 / 12 ** 0.5.
  interval = by['gigpo', 'hard/em']['interval']
  assert interval == pytest.approx([-0.00464, 0.00464], abs=1e-5)
  told = results.show_claims(written)
  assert '0.000 (-0.005 to 0.005) | equivalent |' in told


def test_claims_are_shown_at_the_default_rate_too(tmp_path):
  report = report_runs()
  for name, value in (('grpo-default', 0.3), ('otc', 0.4)):
    report[name] = {
      str(i): {'values': {'hard/em': value, 'all/searches': 10 * value + i % 2}}
      for i in plans.REPORTING
    }
  found = results.write(arms.FIRST, {'report': report}, tmp_path, {}, '')
  (line,) = (
    line
    for line in results.show_claims(found).splitlines()
    if line.startswith('| otc | fewer searches')
  )
  # 4 + i % 2 searches against 3 + i % 2: one more, where fewer is claimed.
  assert line.endswith('| -1.000 (-1.000 to -1.000) |  |')


def test_claims_about_training_say_what_is_left_of_them_at_the_end():
  """+.1, +.11, +.12 in training; -.2, -.3, -.1 at the end."""
  runs = {
    'a': {
      str(i): {'run/em': 0.6 + i / 100, 'hard/em': end}
      for i, end in enumerate((0.3, 0.2, 0.4))
    },
    'b': {str(i): {'run/em': 0.5, 'hard/em': 0.5} for i in range(3)},
  }
  claim = verdicts.Claim('a', 'helps', 'run/em', 'b')
  found = judged(claim, {'report': runs})
  told = results.show_claims({'claims': [found], 'gains': []}).splitlines()[-1]
  # 4.303 x .1 / sqrt 3 = .248.
  assert told.endswith('| shown |  | -0.200 (-0.448 to 0.048) |')


def test_the_page_has_the_committed_results():
  page = (ROOT / 'experiments/arena/README.md').read_text().splitlines()
  first, last = second.BATCHES.values()
  found, later = (
    json.loads((batch.folder / 'results.json').read_text())
    for batch in (first, last)
  )
  claims = [results.show_claims(x).splitlines() for x in (found, later)]
  table = '\n'.join([*claims[0], *claims[1][2:]])
  assert f'\n\n{table}\n\n' in '\n'.join(page)
  mixtures = results.show_mixtures(first, found)
  assert mixtures and f'\n\n{mixtures}\n\n' in '\n'.join(page)
  for name in ('oracle - grpo', 'oracle - shuffled', 'shuffled - grpo'):
    gains = [
      found['assay'][mix][name] for mix in ('even', 'tuned', *plans.MIXES[1:])
    ]
    ends = [
      f'{g["mean"]:.3f} ({g["low"]:.3f} to {g["high"]:.3f})' for g in gains
    ]
    assert any(line.endswith(f'| {" | ".join(ends)} |') for line in page)
  told: set[str] = set()
  known: set[str] = set()
  for batch in (first, last):
    runs = run.load_runs(batch.folder).items()
    shown = {phase: x for phase, x in runs if phase not in plans.TRIALS}
    kept = run.current(batch, shown)
    every = results.averaged(batch, results.planned(batch, kept))
    others = every.pop(recipes.PHASE, {})
    columns = results.columns(batch)
    names = [row.name for row in first.methods]
    for phase, of in every.items():
      known |= {*results.show(of, columns).splitlines()}
      if phase in ('report', 'stress'):
        rows = {x: of[x] for x in of if batch is last or x in names}
        told |= {*results.show(rows, columns).splitlines()}
    told |= {*results.show(others, recipes.COLUMNS).splitlines()}
  assert told <= {*page}
  of_arms = [line for line in page if re.match(r'\| [\w-]+ \| \d+ \| ', line)]
  assert {*of_arms} <= known | told  # no line of an earlier state


def test_the_figure_has_a_line_for_each_claim_on_exact_match(tmp_path):
  report = report_runs()
  report['gigpo-shuffled'] = {
    str(i): {'values': {**report['gigpo'][str(i)]['values'], 'hard/em': 0.3}}
    for i in plans.CONTROLS
  }
  report['grpo-oracle'] = report['llds']
  found = results.write(arms.FIRST, {'report': report}, tmp_path, {}, '')
  (left,) = figure.draw([(arms.FIRST, found)]).axes
  names = [label.get_text() for label in left.get_yticklabels()]
  on = [
    c for c in arms.FIRST.claims if (c.metric, c.phase) == ('hard/em', 'report')
  ]
  wanted = {f'{c.method} - {c.against}' for c in on if not c.within}
  wanted.remove('grpo - grpo-missing')  # which has not run
  assert {*names[:-1]} == wanted and names[-1] == 'grpo, exact credit - grpo'
  (shuffled,) = (
    x for x in left.lines if x.get_marker() == 'x' and len(x.get_xdata())
  )
  assert shuffled.get_ydata()[0] == names.index('gigpo - grpo') + 0.3
  # gigpo's mean is that of grpo, and 0.1 above the control's six seeds.
  assert shuffled.get_xdata()[0] == pytest.approx(-0.1)


def test_seeds_that_were_not_planned_are_in_no_difference(tmp_path):
  report = report_runs()
  want = results.write(arms.FIRST, {'report': report}, tmp_path, {}, '')
  for cases in report.values():
    cases['50'] = {'values': {'hard/em': 9.0, 'all/searches': 9, 'all/em': 9}}
  report['gigpo']['50']['values'] |= {'hard/em': 0.0}
  means = (tmp_path / 'means.csv').read_text()
  found = results.write(arms.FIRST, {'report': report}, tmp_path, {}, '')
  assert found == want and (tmp_path / 'means.csv').read_text() == means


def test_before_the_report_there_is_nothing_to_draw(tmp_path):
  found = results.write(arms.FIRST, {}, tmp_path, {}, '')
  assert results.show_claims(found) == ''
  with pytest.raises(ConfigError, match='--phase=report'):
    figure.draw([(arms.FIRST, found)])


def test_a_claim_is_undecided_until_all_planned_seeds_have_run():
  def verdict(seeds, repeated=plans.REPORTING):
    one = {str(s): {'values': {'hard/em': 0.3}} for s in seeds}
    report = {
      'gigpo': {str(s): {'values': {'hard/em': 0.6 + s / 1e3}} for s in seeds},
      'grpo': one,
      'grpo-2': one,
      'grpo-3': {str(s): {'values': {'hard/em': 0.3}} for s in repeated},
    }
    every = results.planned(arms.FIRST, {'report': report})
    by = {c['method']: c for c in results.judge(arms.FIRST, every)}
    return by['gigpo']['n_seeds'], by['gigpo']['verdict']

  n = len(plans.REPORTING)
  assert verdict(plans.REPORTING) == (n, 'shown')
  assert verdict(plans.REPORTING[1:]) == (n - 1, 'undecided')
  assert verdict(plans.REPORTING, plans.REPORTING[1:]) == (n - 1, 'undecided')
  # A seed that was not planned does not stand in for one.
  assert verdict((*plans.REPORTING[1:], 50)) == (n - 1, 'undecided')


def test_a_claim_needs_its_metric_in_all_runs():
  """Questions about known facts, say, which other data may lack."""
  report = report_runs()
  for cases in report.values():
    for run_ in cases.values():
      run_['values'] = run_['values'] | {'known/search': 0.5}
  by = lambda: {
    (c['method'], c['metric']): c['p_holm']
    for c in results.judge(
      arms.FIRST, results.planned(arms.FIRST, {'report': report})
    )
  }
  assert by()['ikea', 'known/search'] == 1.0
  del report['ikea']['3']['values']['known/search']
  assert by()['ikea', 'known/search'] is None
  assert by()['ikea', 'all/em'] == 1.0


def test_a_stopped_phase_keeps_what_is_complete(tmp_path):
  """Arms that have not ended are in no table, and tuning leaves them out."""
  found = arms.get_sweep('tune')
  runs = run.keep(found, {'arms/otc/100'}, 'tune', tmp_path / 'w', tmp_path)
  assert runs == {}
  results.choose(arms.FIRST, {}, {}, tmp_path, {})
  results.write(arms.FIRST, runs, tmp_path, {}, '--phase=tune')
  assert json.loads((tmp_path / 'tuned.json').read_text())['settings'] == {}


@pytest.mark.parametrize('steps, kept', [(20, True), (14, False)])
def test_a_folder_of_another_config_is_not_kept(
  tmp_path, monkeypatch, steps, kept
):
  found, stage = arms.get_sweep('tune'), 'arms/grpo/100'
  config = stages.config_of(found, stage, tmp_path)
  config.train.steps = steps
  records.write_json(
    tmp_path / stage / 'done.json',
    records.plain(
      {'config': config, 'contents': {}, 'commit': '0', 'code': 'c'}
    ),
  )
  for name in ('after/values.json', 'seconds.json'):
    records.write_json(tmp_path / stage / name, {'train': 1.0})
  (tmp_path / stage / 'run').mkdir()
  (tmp_path / stage / 'run' / 'metrics.jsonl').write_text('{"step": 0}\n')
  about = dict(config='a', commit='b', seconds=1.0, rewards=[], values={'x': 1})
  of_run = run.figures.of_run

  def meanwhile(*args):  # another phase saves a row of its own
    run.save_runs(tmp_path, {'report': {'grpo': {'0': about}}})
    return of_run(*args)

  monkeypatch.setattr(run.figures, 'of_run', meanwhile)
  runs = run.keep(found, {stage}, 'tune', tmp_path, tmp_path)
  assert ('tune' in runs) == kept == ('report' in runs)
  assert run.load_runs(tmp_path) == runs


def test_a_row_is_tuned_when_all_tuning_seeds_have_run(tmp_path):
  runs = tune_runs()
  del runs['otc,lr=2.0']['101']
  results.choose(arms.FIRST, runs, {}, tmp_path, {})
  tuned = json.loads((tmp_path / 'tuned.json').read_text())['settings']
  assert 'otc' not in tuned and 'igpo' in tuned


def test_trials_are_compared_by_the_tuning_seeds_alone(tmp_path):
  runs = tune_runs()
  for name, cases in runs.items():
    cases['102'] = copy.deepcopy(cases['101'])
    if name == 'otc,lr=2.0':
      cases['102']['values'] |= {'hard/em': 0.9, 'all/searches': 0.0}
  results.choose(arms.FIRST, runs, {}, tmp_path, {})
  tuned = json.loads((tmp_path / 'tuned.json').read_text())['settings']
  assert tuned['otc']['lr'] == 1.0


def hard(*scores):
  return {str(i): {'hard/em': v} for i, v in enumerate(scores)}


def test_what_the_corpus_gains_more_than_a_row():
  report = {
    'grpo': hard(0.5, 0.4),
    'grpo-missing': hard(0.2, 0.3),
    'gigpo': hard(0.6, 0.4),
    'ppo': hard(0.1, 0.2),
    'pica': hard(0.2, 0.6),
  }
  found = {c['method']: c['mean'] for c in results.corpus(arms.FIRST, report)}
  # (.5 - .2) - (.6 - .5), (.4 - .3) - (.4 - .4); against ppo for pica.
  want = {'gigpo': (0.2 + 0.1) / 2, 'pica': (0.2 - 0.3) / 2}
  assert found == pytest.approx(want)


def test_rows_and_their_controls_are_compared():
  report = {
    'grpo': hard(0.5, 0.4),
    'grpo-default': hard(0.3, 0.3),
    'gigpo': hard(0.6, 0.4),
    'gigpo-shuffled': hard(0.3, 0.3, 0.9),
    'igpo-oracle': hard(0.7, 0.7),
    'igpo-oracle-shuffled': hard(0.2, 0.4),
    'otc': {'0': {'hard/em': 0.4, 'all/searches': 2.0}},
    'otc-shuffled': {'0': {'hard/em': 0.5, 'all/searches': 3.0}},
  }
  found = {
    (g['arm'], g['against'], g['metric']): g['mean']
    for g in results.gains(arms.FIRST, report)
  }
  assert found == pytest.approx(
    {
      ('grpo', 'grpo-default', 'hard/em'): (0.2 + 0.1) / 2,
      ('gigpo', 'grpo', 'hard/em'): 0.1 / 2,
      ('otc', 'grpo', 'hard/em'): -0.1,
      ('gigpo-shuffled', 'grpo', 'hard/em'): (-0.2 - 0.1) / 2,
      ('gigpo', 'gigpo-shuffled', 'hard/em'): (0.3 + 0.1) / 2,
      ('gigpo', 'grpo-default', 'hard/em'): (0.3 + 0.1) / 2,
      ('igpo-oracle', 'grpo', 'hard/em'): (0.2 + 0.3) / 2,
      ('igpo-oracle-shuffled', 'grpo', 'hard/em'): -0.3 / 2,
      ('igpo-oracle', 'igpo-oracle-shuffled', 'hard/em'): (0.5 + 0.3) / 2,
      ('otc-shuffled', 'grpo', 'hard/em'): 0.0,
      ('otc', 'otc-shuffled', 'hard/em'): -0.1,
      ('otc', 'grpo-default', 'hard/em'): 0.1,
      ('otc', 'otc-shuffled', 'all/searches'): -1.0,
    }
  )


def agreement(order):
  """Of rows with scores n (order 1) or -n, by mixture and seed."""
  runs = {'report': {}, 'mixtures': {}}
  for n, row in enumerate(arms.METHODS):
    for mix in plans.MIXES:
      name = row.name if mix == arms.FIRST.mix else f'{row.name}-{mix}'
      seeds = plans.REPORTING[: 4 if mix == arms.FIRST.mix else 3]
      phase = 'report' if mix == arms.FIRST.mix else 'mixtures'
      runs[phase][name] = {
        str(seed): {'hard/em': n * order(mix, seed)} for seed in seeds
      }
  return runs, results.agreement(arms.FIRST, runs)


def test_mixtures_are_compared_as_runs_of_one_mixture_are():
  # One of three judges in reverse: ranks sum to n + 1 + r; the squares of their
  # deviations are those of one judge, where three that agree have 9 times that.
  other, last = plans.MIXES[-1], arms.METHODS[-1].name
  n = len(arms.METHODS) - 1
  _, found = agreement(lambda mix, seed: -1 if mix == other else 1)
  assert found['w'] == pytest.approx(1 / 9)
  assert found['w_same'] == pytest.approx(dict.fromkeys(plans.MIXES, 1.0))
  assert found['scores'][last] == {
    mix: -n if mix == other else n for mix in plans.MIXES
  }
  # Each judge has another seed, and one of them this one. The fourth seed has
  # run from one mixture only. The mean is that of -n, n and n.
  _, found = agreement(lambda mix, seed: -1 if seed == 1 else 1)
  assert found['w'] == pytest.approx(1 / 9)
  assert found['w_same'] == pytest.approx(dict.fromkeys(plans.MIXES, 1 / 9))
  assert found['scores'][last] == pytest.approx(
    dict.fromkeys(plans.MIXES, n / 3)
  )
  runs, found = agreement(lambda mix, seed: 1)
  assert found['w'] == pytest.approx(1.0)
  lines = results.show_mixtures(arms.FIRST, {'agreement': found}).splitlines()
  assert lines[-1] == f'| {last} | {n:.3f} | {n:.3f} | {n:.3f} |'
  del runs['mixtures'][f'grpo-{other}']['0']
  found = results.agreement(arms.FIRST, runs)
  assert (
    found is None
    and results.show_mixtures(arms.FIRST, {'agreement': found}) == ''
  )


def test_rates_are_relative_to_the_base_recipe():
  row = arms.METHODS[0]
  small, full = (
    plans.config(row, {'lr': 2.0, 'kl': 0.0}, {}, base, 0)
    for base in ('', 'base=search_r1,model=x')
  )
  assert small.optim.lr == pytest.approx(6e-4)
  assert full.optim.lr == pytest.approx(2e-6)
