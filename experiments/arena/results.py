"""What the arena's runs say: tuned settings, claims, tables."""

from collections.abc import Mapping
import dataclasses
import pathlib
import statistics
from typing import Any

from experiments.arena import arms, verdicts
from searchrl_jax.run import records
from searchrl_jax.sweeps import figures

SCORE = 'hard/em'
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
Runs = Mapping[str, Mapping[str, Any]]  # arm -> case -> {'values', ...}


def values(runs: Runs) -> dict[str, dict[str, dict[str, float]]]:
  """{arm: {case: {name: value}}}."""
  return {
    arm: {case: run['values'] for case, run in cases.items()}
    for arm, cases in runs.items()
  }


def choose(runs: Runs, path: pathlib.Path, environment) -> None:
  """Writes the setting of each row that all of its trials are complete of.

  Of each field, the value whose arm has the highest mean of SCORE over the
  cases that all trials of the row have, the default where it is as high; fields
  were changed one at a time.
  """
  settings, trials = {}, {}
  for row in arms.METHODS:
    plans = [p for p in arms.tune() if p.row is row]
    cases = set.intersection(*({*runs.get(p.name, {})} for p in plans))
    if not cases:
      continue
    means = {
      p.name: statistics.fmean(runs[p.name][c]['values'][SCORE] for c in cases)
      for p in plans
    }
    trials[row.name] = means
    best = dict(row.default)
    for field, default in row.default.items():
      others = (p for p in plans if p.setting[field] != default)
      top = max(others, key=lambda p: means[p.name])
      if means[top.name] > means[row.name]:
        best[field] = top.setting[field]
    settings[row.name] = best
  content = {'environment': environment, 'score': SCORE, 'seeds': arms.TUNING}
  records.write_json(path, content | {'settings': settings, 'trials': trials})


def write(runs: Mapping[str, Runs], out: pathlib.Path, environment, command):
  """Writes results.json of what is complete."""
  every = {phase: values(found) for phase, found in runs.items()}
  table = {
    phase: {arm: _means(cases) for arm, cases in found.items()}
    for phase, found in runs.items()
    if phase != 'tune'
  }
  content = {
    'environment': environment,
    'command': f'python -m experiments.arena.run {command}',
    'margin': verdicts.MARGIN,
    'claims': verdicts.judge(arms.CLAIMS, every),
    'seeds_needed': seeds_needed(every.get('pilot', {})),
    'agreement': agreement(runs),
    'table': table,
  }
  records.write_json(out / 'results.json', content)


def seeds_needed(pilot) -> dict[str, int]:
  """Method -> runs that give a half interval of the margin; see verdicts.py."""
  out = {}
  for claim in arms.CLAIMS:
    own = dataclasses.replace(claim, phase='pilot', within=False)
    found = verdicts.differences(own, {'pilot': pilot})
    if claim.metric == SCORE and len(found) > 1:
      out[claim.method] = verdicts.seeds_needed(found, verdicts.MARGIN)
  return out


def agreement(runs: Mapping[str, Runs]) -> float | None:
  """Kendall's W of the order of rows from the mixtures of the warm start."""
  main = values(runs.get('report', {}))
  others = values(runs.get('mixtures', {}))
  ranks = []
  for mix in arms.MIXES:
    found, suffix = (main, '') if mix == arms.MIX else (others, f'-{mix}')
    scores = [
      [v[SCORE] for v in found.get(row.name + suffix, {}).values()]
      for row in arms.METHODS
    ]
    if not all(scores):
      return None
    ranks.append([statistics.fmean(s) for s in scores])
  return verdicts.agreement(ranks)


def _means(cases: Mapping[str, Any]) -> dict[str, dict]:
  """{name: mean, t interval and interquartile mean over the worlds}."""
  found = [run['values'] for run in cases.values()]
  shared = [n for n in found[0] if all(n in v for v in found)]
  out = {}
  for name in shared:
    column = [v[name] for v in found]
    out[name] = figures.interval(column)._asdict()
    out[name]['interquartile'] = figures.interquartile([column])._asdict()
  return out


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
  return '\n'.join(f'| {" | ".join(line)} |' for line in lines)
