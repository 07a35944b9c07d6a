"""What the arena's runs say: tuned settings, claims, tables."""

import collections
from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import itertools
import pathlib
import statistics
from typing import Any

import numpy as np
import pandas as pd

from experiments.arena import arms, oracle, verdicts
from searchrl_jax.run import records
from searchrl_jax.sweeps import figures

SCORE = 'hard/em'
WINDOW = (0.3, 0.7)  # of GRPO's SCORE, which leaves room to both sides
COLUMNS = (
  SCORE,
  'all/em',
  'all/searches',
  'all/wasted',
  'known/search',
  'all/thoughts',
  'run/sampled',
  'run/collapse',
)
ECONOMY = 'all/searches', 'all/em'
FIGURED = 'shuffled', 'oracle'  # controls
Runs = Mapping[str, Mapping[str, Any]]  # arm -> case -> {'values', ...}


def values(runs: Runs) -> dict[str, dict[str, dict[str, float]]]:
  """{arm: {case: {name: value}}}."""
  return {
    arm: {case: run['values'] for case, run in cases.items()}
    for arm, cases in runs.items()
  }


def choose(tried: Runs, again: Runs, path: pathlib.Path, environment) -> None:
  """Writes the setting of each row of which all trials are complete.

  The best trial has the best mean over the TUNING seeds of the metric of the
  row's first claim, if that is better than the default's by more than the
  claim's margin. Where the claim is on another metric than SCORE, SCORE may be
  lower than the default's by the margin. It is the setting if it is better than
  the default on the CONFIRMING seeds (`again`), too.
  """
  settings, trials, bests, confirmed = {}, {}, {}, {}
  for row in arms.METHODS:
    plans = [p for p in arms.tune() if p.row is row]
    means = _trial_means(plans, tried, row, arms.TUNING)
    if not means:
      continue
    best, trials[row.name] = _best(row.goal, plans, means), means
    bests[row.name] = best.name
    if best is not plans[0]:
      means = _trial_means([plans[0], best], again, row, arms.CONFIRMING)
      if not means:
        continue
      confirmed[row.name] = means
      if _gain(row.goal, best, means, plans[0]) <= 0:
        best = plans[0]
    settings[row.name] = best.setting
  content = {
    'environment': environment,
    'seeds': {'tune': arms.TUNING, 'confirm': arms.CONFIRMING},
    'settings': settings,
    'best': bests,
    'confirmed': confirmed,
    'trials': trials,
  }
  records.write_json(path, content)


def _trial_means(plans, runs: Runs, row, seeds) -> dict[str, dict[str, float]]:
  """{trial: {metric: mean over the seeds}}; empty if one has not run."""
  cases = [*map(str, seeds)]
  if not all({*cases} <= {*runs.get(p.name, {})} for p in plans):
    return {}
  return {
    p.name: {
      metric: statistics.fmean(
        runs[p.name][case]['values'][metric] for case in cases
      )
      for metric in (SCORE, row.goal.metric)
    }
    for p in plans
  }


def _gain(goal: verdicts.Claim, plan, means, default) -> float:
  own, other = means[plan.name], means[default.name]
  return goal.sign * (own[goal.metric] - other[goal.metric])


def _best(goal: verdicts.Claim, plans, means) -> arms.Plan:
  least = means[plans[0].name][SCORE] - verdicts.MARGIN
  allowed = [p for p in plans if means[p.name][SCORE] >= least]
  best = max(allowed, key=lambda plan: _gain(goal, plan, means, plans[0]))
  return best if _gain(goal, best, means, plans[0]) > goal.margin else plans[0]


def write(runs: Mapping[str, Runs], out: pathlib.Path, environment, command):
  """Writes results.json and means.csv of what is complete.

  Returns:
    The content of results.json.
  """
  every = planned({phase: values(found) for phase, found in runs.items()})
  table = pd.DataFrame(_means(every)).to_csv(index=False, float_format='%.6g')
  records.write_text(out / 'means.csv', table)
  content = {
    'environment': environment,
    'command': command,
    'margin': verdicts.MARGIN,
    'assay': assay(every.get('assay', {})),
    'claims': judge(every),
    'seeds_needed': seeds_needed(every.get('pilot', {})),
    'agreement': agreement(every),
    'contrasts': [*contrasts(every.get('report', {}))],
    'gains': [*gains(every.get('report', {}))],
  }
  records.write_json(out / 'results.json', content)
  return content


def planned(every: verdicts.Values) -> verdicts.Values:
  """Of the phases that verdicts rest on, the seeds that arms.py lists."""
  phases = {phase: seeds for phase, (_, seeds) in arms.PHASES.items()}
  phases[arms.recipes.PHASE] = arms.recipes.SEEDS
  return {
    phase: {
      arm: {case: v for case, v in cases.items() if int(case) in phases[phase]}
      for arm, cases in found.items()
    }
    for phase, found in every.items()
  }


def judge(every: verdicts.Values) -> list[dict]:
  """Records of the claims, with `n_planned`, the number of the phase's seeds.

  every: of `planned` seeds.
  """
  complete = [_complete(claim, every) for claim in arms.CLAIMS]
  out = verdicts.judge(arms.CLAIMS, every, complete)
  for record in out:
    _, seeds = arms.PHASES[record['phase']]
    record['n_planned'] = len(seeds)
  return out


def _complete(claim: verdicts.Claim, every: verdicts.Values) -> bool:
  """Whether both arms have all seeds of the phase, and all repeats."""
  _, seeds = arms.PHASES[claim.phase]
  names = {claim.method, claim.against}
  if claim.phase == 'report':
    again = [row.again for row in arms.METHODS if row.name in names]
    names.update(*again)
  found = every.get(claim.phase, {})
  return all({*map(str, seeds)} <= {*found.get(name, {})} for name in names)


def assay(found) -> dict[str, Any]:
  """Of each mixture: paired differences of SCORE, and whether it is sensitive.

  The mean of GRPO has to lie within WINDOW, exact credit to be better than GRPO
  and than the same credit shuffled, and shuffled credit not to be better than
  GRPO. A mixture is left out until all seeds have run.
  """
  out = {}
  for mix in arms.MIXES:
    runs = {a: found.get(f'{a}-{mix}', {}) for a in ('grpo', *oracle.ARMS)}
    cases = [*map(str, arms.ASSAY)]
    if not all({*cases} <= {*run} for run in runs.values()):
      continue
    score = {a: [run[c][SCORE] for c in cases] for a, run in runs.items()}
    gains = {
      f'{a} - {b}': figures.interval(np.subtract(score[a], score[b]))
      for a, b in itertools.combinations(('oracle', 'shuffled', 'grpo'), 2)
    }
    grpo = figures.interval(score['grpo'])
    out[mix] = {
      'grpo': grpo._asdict(),
      **{name: gain._asdict() for name, gain in gains.items()},
      'sensitive': WINDOW[0] <= grpo.mean <= WINDOW[1]
      and gains['oracle - grpo'].low > 0
      and gains['oracle - shuffled'].low > 0
      and gains['shuffled - grpo'].low <= 0,
    }
  return out


def seeds_needed(pilot) -> int | None:
  """Runs that give a half interval of the margin, over the claims on SCORE."""
  found = [
    verdicts.differences(
      dataclasses.replace(claim, phase='pilot'), {'pilot': pilot}
    )
    for claim in arms.CLAIMS
    if claim.metric == SCORE
  ]
  known = [x for x in found if len(x) > 1]
  return verdicts.seeds_needed(known, verdicts.MARGIN) if known else None


def contrasts(report) -> Iterator[dict[str, Any]]:
  """Of each row, paired differences of SCORE beside the claims.

  That to each of its controls; and 'corpus', how much more the corpus that
  lacks nothing gains GRPO than the row gains on what it is claimed against.
  Intervals are not corrected: that the corpus gains more than every method is
  shown if all of these lie above 0.
  """
  corpus = {'grpo': 1, 'grpo-missing': -1}
  for row in arms.METHODS:
    for control in row.controls:
      weights = {row.name: 1, f'{row.name}-{control}': -1}
      yield from _contrast(row.name, control, weights, report)
    for claim in row.claims:
      if row.name != 'grpo' and (claim.metric, claim.within) == (SCORE, False):
        if claim.phase == 'report':
          weights = collections.Counter(corpus)
          weights.update({row.name: -1, claim.against: 1})
          yield from _contrast(row.name, 'corpus', weights, report)


def _contrast(method: str, name: str, weights, report):
  found = {arm: verdicts.by_case(report, arm, SCORE) for arm in weights}
  shared = set.intersection(*({*cases} for cases in found.values()))
  column = [
    sum(w * found[arm][case] for arm, w in weights.items())
    for case in sorted(shared, key=int)
  ]
  if column:
    about = dict(method=method, contrast=name, metric=SCORE)
    yield about | figures.interval(column)._asdict()


def gains(report) -> Iterator[dict[str, Any]]:
  """Paired differences that the figure shows beside the claims.

  Of each row to GRPO, and of its shuffled and exact credit to what its first
  claim is against (of GRPO's, to GRPO).
  """
  pairs = [
    (row.name, 'grpo', metric) for row in arms.METHODS[1:] for metric in ECONOMY
  ]
  pairs += [
    (f'{row.name}-{control}', row.goal.against if row.scale else 'grpo', SCORE)
    for row in arms.METHODS
    for control in FIGURED
  ]
  for arm, against, metric in pairs:
    found = (verdicts.by_case(report, x, metric) for x in (arm, against))
    if gain := figures.paired(*found):
      about = dict(arm=arm, against=against, metric=metric)
      yield about | gain._asdict()


def agreement(every: verdicts.Values) -> dict[str, float] | None:
  """Kendall's W of the order of rows from the mixtures of the warm start.

  Over the cases that all rows have from all mixtures. `w_same`: of disjoint
  sets of as many cases from one mixture, if there are enough: what the noise of
  the runs leaves.
  """
  main, others = every.get('report', {}), every.get('mixtures', {})
  found = [
    [main.get(row.name, {}) for row in arms.METHODS]
    if mix == arms.MIX
    else [others.get(f'{row.name}-{mix}', {}) for row in arms.METHODS]
    for mix in arms.MIXES
  ]
  shared = set.intersection(*({*run} for judge in found for run in judge))
  if not shared:
    return None

  def score(judge, cases):
    return [statistics.fmean(run[c][SCORE] for c in cases) for run in judge]

  out = verdicts.agreement([score(judge, shared) for judge in found])
  own = found[arms.MIXES.index(arms.MIX)]
  known = sorted(set.intersection(*({*run} for run in own)))
  parts = [known[i :: len(found)][: len(shared)] for i in range(len(found))]
  if len(parts[-1]) == len(shared):
    same = verdicts.agreement([score(own, part) for part in parts])
    out['w_same'] = same['w']
  return out


def _means(every: verdicts.Values) -> Iterator[dict[str, Any]]:
  """Rows: the mean over an arm's runs of a metric that all have.

  Of SCORE the interquartile mean, too.
  """
  for phase, found in every.items():
    for arm, cases in found.items() if phase not in arms.TRIALS else ():
      runs = [cases[case] for case in sorted(cases, key=int)]
      for metric in runs[0] if runs else ():
        if all(metric in run for run in runs):
          about = dict(phase=phase, arm=arm, metric=metric)
          column = [run[metric] for run in runs]
          kinds = {'mean': figures.interval(column)}
          if metric == SCORE:
            kinds['interquartile mean'] = figures.interquartile([column])
          for name, of in kinds.items():
            bounds = dict(value=of.mean, low=of.low, high=of.high, n=of.n)
            yield about | {'statistic': name} | bounds


def show_claims(records: Sequence[Mapping[str, Any]]) -> str:
  """Markdown: a line per claim that has two runs; '' if none has."""
  head = ['method', 'claim', 'against', 'metric', 'difference', 'verdict']
  lines = [head, ['---'] * len(head)]
  for record in records:
    if record['interval']:
      low, high = record['interval']
      about = [record[name] for name in head[:4]]
      value = f'{record["value"]:.3f} ({low:.3f} to {high:.3f})'
      kind = ' (mechanism)' if record['mechanism'] else ''
      lines.append([*about, value, record['verdict'] + kind])
  return _markdown(lines) if lines[2:] else ''


def show(runs: Runs) -> str:
  """Markdown: a line per arm."""
  lines = [['arm', 'runs', *COLUMNS], ['---'] * (2 + len(COLUMNS))]
  for arm, cases in runs.items():
    line = [arm, str(len(cases))]
    for name in COLUMNS:
      column = [
        run['values'][name] for run in cases.values() if name in run['values']
      ]
      line.append(str(figures.interval(column)) if column else '')
    lines.append(line)
  return _markdown(lines)


def _markdown(lines: Sequence[Sequence[str]]) -> str:
  return '\n'.join(f'| {" | ".join(line)} |' for line in lines)
