"""What the arena's runs say: tuned settings, claims, tables."""

import collections
from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import itertools
import math
import pathlib
import statistics
from typing import Any

import numpy as np
import pandas as pd

from experiments.arena import oracle, plans, recipes, verdicts
from searchrl_jax.store import records
from searchrl_jax.sweep import figures

HARD, TRAINED, SAMPLED = 'hard/em', 'run/em', 'run/sampled'
ONCE = 'once/hard/em'
SHOWN = 'mean', 'low', 'high'
COLUMNS = (
  HARD,
  'all/em',
  'all/searches',
  'all/wasted',
  'known/search',
  'all/thoughts',
  'run/sampled',
  'run/collapse',
)
ECONOMY = 'all/searches', 'all/em'
BASES = 'grpo', 'grpo-default', 'grpo4'  # what each row is compared with
FIGURED = 'shuffled', 'oracle'  # controls
PLAIN = 'plain'  # the control that a row has in the place of a baseline
Runs = Mapping[str, Mapping[str, Any]]  # arm -> case -> {'values', ...}


def choose(
  batch: plans.Batch, tried: Runs, again: Runs, out: pathlib.Path, environment
) -> None:
  """Writes the setting of each row of which all trials are complete.

  The best trial has the best mean over the TUNING seeds of the metric of the
  row's first claim, if that is better than the default's by more than the
  claim's margin. Where the claim is on another metric than the batch's score,
  that may be lower than the default's by the margin. It is the setting if it is
  better than the default on the CONFIRMING seeds (`again`), too. `share`: the
  tokens that it samples, of those of the baseline.
  """
  settings, trials, bests, confirmed, sampled = {}, {}, {}, {}, {}
  for row in batch.rows:
    candidates = [p for p in batch.tune() if p.row is row]
    means = _trial_means(batch, candidates, tried, row, plans.TUNING)
    if not means:
      continue
    best, trials[row.name] = _best(batch, row, candidates, means), means
    bests[row.name] = best.name
    if best is not candidates[0]:
      both, seeds = [candidates[0], best], plans.CONFIRMING
      means = _trial_means(batch, both, again, row, seeds)
      if not means:
        continue
      confirmed[row.name] = means
      if _gain(batch.goal(row), best, means, candidates[0]) <= 0:
        best = candidates[0]
    settings[row.name] = best.setting
    sampled[row.name] = statistics.fmean(
      tried[best.name][str(seed)]['values'].get(SAMPLED, math.nan)
      for seed in plans.TUNING
    )
  base = {
    row.name: sampled.get(batch.baseline(row).name, math.nan)
    for row in batch.rows
  }
  content = {
    'environment': environment,
    'seeds': {'tune': plans.TUNING, 'confirm': plans.CONFIRMING},
    'settings': settings,
    'share': {
      name: x / base[name]
      for name, x in sampled.items()
      if math.isfinite(x / base[name])
    },
    'best': bests,
    'confirmed': confirmed,
    'trials': trials,
  }
  records.write_json(out / plans.TUNED, content)


def _trial_means(
  batch: plans.Batch, plans, runs: Runs, row, seeds
) -> dict[str, dict[str, float]]:
  """{trial: {metric: mean over the seeds}}; empty if one has not run."""
  cases = [*map(str, seeds)]
  if not all({*cases} <= {*runs.get(p.name, {})} for p in plans):
    return {}
  return {
    p.name: {
      metric: statistics.fmean(
        runs[p.name][case]['values'][metric] for case in cases
      )
      for metric in (batch.score, batch.goal(row).metric)
    }
    for p in plans
  }


def _gain(goal: verdicts.Claim, plan, means, default) -> float:
  own, other = means[plan.name], means[default.name]
  return goal.sign * (own[goal.metric] - other[goal.metric])


def _best(batch: plans.Batch, row, plans, means) -> plans.Plan:
  goal = batch.goal(row)
  least = means[plans[0].name][batch.score] - batch.margin
  allowed = [p for p in plans if means[p.name][batch.score] >= least]
  best = max(allowed, key=lambda plan: _gain(goal, plan, means, plans[0]))
  return best if _gain(goal, best, means, plans[0]) > goal.margin else plans[0]


def write(
  batch: plans.Batch,
  runs: Mapping[str, Runs],
  out: pathlib.Path,
  environment,
  command,
):
  """Writes results.json and means.csv of what is complete.

  Returns:
    The content of results.json.
  """
  found = planned(batch, runs)
  every = averaged(batch, found)
  table = pd.DataFrame(_means(batch, every)).to_csv(
    index=False, float_format='%.6g'
  )
  records.write_text(out / 'means.csv', table)
  content = {
    'environment': environment,
    'command': command,
    'margin': batch.margin,
    'assay': assay(batch, every),
    'claims': judge(batch, found),
    'seeds_needed': seeds_needed(batch, every.get('pilot', {})),
    'agreement': agreement(batch, found),
    'gains': [*gains(batch, every.get('report', {}))],
    'corpus': [*corpus(batch, every.get('report', {}))],
  }
  records.write_json(out / 'results.json', content)
  return content


def planned(batch: plans.Batch, runs: Mapping[str, Runs]) -> verdicts.Values:
  """The values of the seeds that are listed for each phase.

  Those of `guided` rows are without TRAINED.
  """
  phases = {phase: seeds for phase, (_, seeds) in batch.phases.items()}
  phases[recipes.PHASE] = recipes.SEEDS
  guided = {row.name for row in batch.methods if row.guided}
  return {
    phase: {
      arm: {
        case: {
          name: value
          for name, value in run['values'].items()
          if name != TRAINED or arm not in guided
        }
        for case, run in cases.items()
        if int(case) in phases[phase]
      }
      for arm, cases in found.items()
    }
    for phase, found in runs.items()
  }


def averaged(batch: plans.Batch, every: verdicts.Values) -> verdicts.Values:
  """With the mean over all runs of a case in the place of a row's first run.

  Of the cases that all of its arms have that have begun; the other arms are
  left out.
  """
  report = {**every.get('report', {})}
  for row in batch.methods:
    runs = [report.get(row.name, {})]
    runs += [x for name in row.again if (x := report.pop(name, {}))]
    shared = set.intersection(*({*cases} for cases in runs))
    if runs[1:]:
      report[row.name] = {
        case: {
          metric: statistics.fmean(run[case][metric] for run in runs)
          for metric in first
          if all(metric in run[case] for run in runs)
        }
        for case, first in runs[0].items()
        if case in shared
      }
  return {**every, 'report': report}


def judge(batch: plans.Batch, every: verdicts.Values) -> list[dict]:
  """Records of the claims, with `n_planned`, the number of the phase's seeds.

  every: of `planned` seeds.
  """
  complete = [_complete(batch, claim, every) for claim in batch.claims]
  out = verdicts.judge(batch.claims, averaged(batch, every), complete)
  for record in out:
    _, seeds = batch.phases[record['phase']]
    record['n_planned'] = len(seeds)
  return out


def _complete(
  batch: plans.Batch, claim: verdicts.Claim, every: verdicts.Values
) -> bool:
  """Whether both arms have all seeds of the phase, and all repeats."""
  _, seeds = batch.phases[claim.phase]
  names = {claim.method, claim.against}
  if claim.phase == 'report':
    again = [row.again for row in batch.methods if row.name in names]
    names.update(*again)
  found = every.get(claim.phase, {})
  known = [verdicts.by_case(found, name, claim.metric) for name in names]
  return all({*map(str, seeds)} <= {*cases} for cases in known)


def assay(batch: plans.Batch, every: verdicts.Values) -> dict[str, Any]:
  """Paired differences of the batch's score, and whether they are sensitive.

  Of each mixture with GRPO's default setting, and ('tuned') of the reporting
  runs, with the one that claims are against. The mean of GRPO has to lie within
  the batch's window, exact credit to be better than GRPO and than the same
  credit shuffled, and shuffled credit not to be better than GRPO. What has not
  run on all seeds is left out.
  """
  found, report = every.get('assay', {}), every.get('report', {})
  arms = 'grpo', *oracle.ARMS
  sets = {
    mix: ([f'{a}-{mix}' for a in arms], found, batch.assayed(mix))
    for mix in batch.mixes
  }
  names = ['grpo', *(f'grpo-{a}' for a in oracle.ARMS)]
  sets['tuned'] = names, report, batch.reporting
  out = {}
  for key, (names, runs, seeds) in sets.items():
    by = [verdicts.by_case(runs, name, batch.score) for name in names]
    if not all({*map(str, seeds)} <= {*cases} for cases in by):
      continue
    columns = [[cases[str(seed)] for seed in seeds] for cases in by]
    score = dict(zip(arms, columns, strict=True))
    gains = {
      f'{a} - {b}': figures.interval(np.subtract(score[a], score[b]))
      for a, b in itertools.combinations(('oracle', 'shuffled', 'grpo'), 2)
    }
    grpo = figures.interval(score['grpo'])
    out[key] = {
      'grpo': grpo._asdict(),
      **{name: gain._asdict() for name, gain in gains.items()},
      'sensitive': batch.window[0] <= grpo.mean <= batch.window[1]
      and gains['oracle - grpo'].low > 0
      and gains['oracle - shuffled'].low > 0
      and gains['shuffled - grpo'].low <= 0,
    }
  return out


def seeds_needed(batch: plans.Batch, pilot) -> int | None:
  """Runs that give a half interval of the margin, over claims on the score."""
  found = [
    verdicts.differences(
      dataclasses.replace(claim, phase='pilot'), {'pilot': pilot}
    )
    for claim in batch.claims
    if claim.metric == batch.score
  ]
  known = [x for x in found if len(x) > 1]
  return verdicts.seeds_needed(known, batch.margin) if known else None


def gains(batch: plans.Batch, report) -> Iterator[dict[str, Any]]:
  """Paired differences beside the claims: of `arm` - `against`.

  Of each row to BASES, or to the baseline from its own warm start, on the
  batch's score, HARD, ECONOMY and the metrics of its claims, and on HARD to the
  baseline that samples as many tokens (for other questions), if it has one; and
  on the score, HARD and the metric of the row's first claim: of the row to its
  controls, and of these to what the claim is against, or to the baseline. ONCE:
  of a single attempt of a row that has several. Intervals are not corrected.
  """
  pairs = []
  for row in batch.methods:
    bases = (batch.baseline(row).name,) if row.start else BASES
    claimed = (claim.metric for claim in row.claims)
    for metric in dict.fromkeys((batch.score, HARD, *ECONOMY, *claimed)):
      pairs += [(row.name, x, metric) for x in bases if x != row.name]
    tokens = batch.as_many_tokens(row)
    pairs.append((row.name, tokens, HARD))
    pairs += [(row.name, x, ONCE) for x in (*bases, tokens)]
    base = batch.goal(row).against if row.scale else row.name
    if row.aside:
      base = batch.baseline(row).name
    for metric in dict.fromkeys((batch.score, HARD, batch.goal(row).metric)):
      for control in row.controls:
        arm = f'{row.name}-{control}'
        if control != PLAIN:
          pairs.append((arm, base, metric))
        parent = arm.rpartition('-')[0]  # X-oracle of X-oracle-shuffled
        if parent != base or control == PLAIN:
          pairs.append((parent, arm, metric))
  for arm, against, metric in pairs:
    ours, theirs = (verdicts.by_case(report, x, metric) for x in (arm, against))
    if metric == ONCE:  # all of the others' attempts are single
      theirs = theirs or verdicts.by_case(report, against, HARD)
    if gain := figures.paired(ours, theirs):
      about = dict(arm=arm, against=against, metric=metric)
      yield about | gain._asdict()


def corpus(batch: plans.Batch, report) -> Iterator[dict[str, Any]]:
  """How much more the corpus that lacks nothing gains GRPO than a row gains.

  Of each row with a claim on the batch's score, against what that claim is
  against. That the corpus gains more than every one of them is shown if all
  intervals lie above 0: they need no correction.
  """
  for row in batch.methods:
    goal = batch.goal(row)
    if row.scale and goal.metric == batch.score:
      weights = collections.Counter({'grpo': 1, 'grpo-missing': -1})
      weights.update({row.name: -1, goal.against: 1})
      found = {
        arm: verdicts.by_case(report, arm, batch.score) for arm in weights
      }
      shared = set.intersection(*({*cases} for cases in found.values()))
      column = [
        sum(w * found[arm][case] for arm, w in weights.items())
        for case in sorted(shared, key=int)
      ]
      if column:
        yield {'method': row.name} | figures.interval(column)._asdict()


def agreement(
  batch: plans.Batch, every: verdicts.Values
) -> dict[str, Any] | None:
  """Kendall's W of rows by the score, from as many runs as mixtures.

  Of the first run of each row, with seeds that all rows have from all mixtures.

  Returns:
    w: each run from another mixture of the warm start and another seed, the
    mean over all ways to choose the seeds. w_same: {mixture: the same, with all
    runs from this one}, which says how much the seeds alone change the order.
    scores: {row: {mixture: the mean of the score}}. None if seeds are missing,
    or there is one mixture.
  """
  main, others = every.get('report', {}), every.get('mixtures', {})
  by_mix = {
    mix: [
      main.get(row.name, {})
      if mix == batch.mix
      else others.get(f'{row.name}-{mix}', {})
      for row in batch.methods
    ]
    for mix in batch.mixes
  }
  cases = set.intersection(*({*x} for runs in by_mix.values() for x in runs))
  n = len(by_mix)
  if len(cases) < n or n == 1:
    return None

  def w(judges):
    orders = itertools.permutations(sorted(cases, key=int), n)
    return statistics.fmean(
      verdicts.agreement(
        [
          [x[case][batch.score] for x in judge]
          for judge, case in zip(judges, order, strict=True)
        ]
      )
      for order in orders
    )

  return {
    'w': w([*by_mix.values()]),
    'w_same': {mix: w([runs] * n) for mix, runs in by_mix.items()},
    'scores': {
      row.name: {
        mix: statistics.fmean(runs[i][case][batch.score] for case in cases)
        for mix, runs in by_mix.items()
      }
      for i, row in enumerate(batch.methods)
    },
  }


def _means(
  batch: plans.Batch, every: verdicts.Values
) -> Iterator[dict[str, Any]]:
  """Rows: the mean over an arm's runs of a metric that all have.

  Of the batch's score the interquartile mean, too.
  """
  found = [
    (phase, arm, [cases[case] for case in sorted(cases, key=int)])
    for phase, kept in every.items()
    for arm, cases in kept.items()
    if phase not in plans.TRIALS and cases
  ]
  for phase, arm, runs in found:
    for metric in (m for m in runs[0] if all(m in run for run in runs)):
      column = [run[metric] for run in runs]
      kinds = {'mean': figures.interval(column)}
      if metric == batch.score:
        kinds['interquartile mean'] = figures.interquartile([column])
      for kind, (value, low, high, n) in kinds.items():
        about = dict(phase=phase, arm=arm, metric=metric, statistic=kind)
        yield about | dict(value=value, low=low, high=high, n=n)


def columns(batch: plans.Batch) -> list[str]:
  """The metrics of a batch's tables."""
  return [*dict.fromkeys((batch.score, *COLUMNS))]


def show_claims(content: Mapping[str, Any]) -> str:
  """Markdown: a line per claim that has two runs; '' if none has.

  Differences are in the claimed direction. The last columns: of claims against
  GRPO as tuned, the difference to GRPO with its default setting; of those about
  training, that of the same arms at the end.

  Args:
    content: of results.json.
  """
  gain = {(g['arm'], g['against'], g['metric']): g for g in content['gains']}
  head = ['method', 'claim', 'against', 'metric', 'gain', 'verdict']
  head += ['gain at the default rate', 'at the end']
  lines = [head, ['---'] * len(head)]
  for record in content['claims']:
    if record['interval']:
      about = [record[name] for name in head[:4]]
      said = record['verdict']
      if said in ('shown', 'contradicted') and record['small']:
        said += ', below the margin' if not record['within'] else ''
      kind = ' (mechanism)' if record['mechanism'] else ''
      value = _with_interval(record['value'], *record['interval'])
      method, _, against, metric = about
      other, rate = gain.get((method, f'{against}-default', metric)), ''
      if other and record['phase'] == 'report':
        ends = sorted(record['sign'] * other[x] for x in SHOWN[1:])
        rate = _with_interval(record['sign'] * other['mean'], *ends)
      end = record.get('end')
      end = _with_interval(*(end[x] for x in SHOWN)) if end else ''
      lines.append([*about, value, said + kind, rate, end])
  return _markdown(lines) if lines[2:] else ''


def _with_interval(value: float, low: float, high: float) -> str:
  return f'{value:.3f} ({low:.3f} to {high:.3f})'


def show(
  found: Mapping[str, Mapping[str, Mapping[str, float]]],
  columns: Sequence[str] = COLUMNS,
) -> str:
  """Markdown: a line per arm of a phase, with the means of its metrics.

  In brackets, how many runs have a metric that not all have.
  """
  lines = [['arm', 'seeds', *columns], ['---'] * (2 + len(columns))]
  for arm, cases in found.items():
    line = [arm, str(len(cases))]
    for name in columns:
      column = [*verdicts.by_case(found, arm, name).values()]
      cell = str(figures.interval(column)) if column else ''
      some = f' ({len(column)})' if 0 < len(column) < len(cases) else ''
      line.append(cell + some)
    lines.append(line)
  return _markdown(lines)


def show_mixtures(batch: plans.Batch, content: Mapping[str, Any]) -> str:
  """Markdown: the score of each row from each mixture; '' if one has not run.

  Args:
    content: of results.json.
  """
  if not content['agreement']:
    return ''
  mixes = batch.mixes
  lines = [['method', *mixes], ['---'] * (1 + len(mixes))]
  for name, found in content['agreement']['scores'].items():
    lines.append([name, *(f'{found[mix]:.3f}' for mix in mixes)])
  return _markdown(lines)


def _markdown(lines: Sequence[Sequence[str]]) -> str:
  return '\n'.join(f'| {" | ".join(line)} |' for line in lines)
