"""The figures of a sweep: a tidy file, intervals, differences, curves, tables.

`write` makes, of what is complete,

  results.csv, results.parquet  one row per value: arm, world (null: the
      config's), seed, purpose (report, tuning, replication), evaluation
      ('before' the first update, 'after', 'gain' = after - before, further ones
      of the arm, or 'curve'), metric, step (of a curve; updates done), value
  table.md    per arm: mean, interquartile mean, difference from the first arm;
      and which code made which runs, if they are not of the same
  curves.png  means over runs, shaded from lowest to highest

Intervals are 95 %: Student's t for means and paired differences, over runs, or,
of several worlds, over the means of these (`over_worlds`). The interquartile
mean has a percentile bootstrap that resamples the runs of each world by
themselves (Agarwal et al. 2021, arXiv 2108.13264), and so holds for these
worlds. Seeds of different purposes never share a line.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import io
import json
import pathlib
import re
import textwrap
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import csv
import pyarrow.parquet as pq
import scipy.stats

from searchrl_jax.store import records
from searchrl_jax.sweep import core, stages
from searchrl_jax.sweep.core import Arm, Sweep

_SCHEMA = pa.schema({
  'arm': pa.string(), 'world': pa.int64(), 'seed': pa.int64(),
  'purpose': pa.string(), 'evaluation': pa.string(), 'metric': pa.string(),
  'step': pa.int64(), 'value': pa.float64(),
})  # fmt: skip


class Interval(NamedTuple):
  """Over n runs or worlds; low and high are None where these give none."""

  mean: float
  low: float | None
  high: float | None
  n: int

  def __str__(self) -> str:
    form = ',.0f' if abs(self.mean) >= 1000 else '.3f'
    if self.low is None:
      return f'{self.mean:{form}}'
    return f'{self.mean:{form}} ± {self.high - self.mean:{form}}'


def interval(values: Sequence[float]) -> Interval:
  """Mean and Student's t interval (95%) over runs."""
  n, mean = len(values), float(np.mean(values))
  if n < 2:
    return Interval(mean, None, None, n)
  half = scipy.stats.t.ppf(0.975, n - 1) * np.std(values, ddof=1) / n**0.5
  return Interval(mean, mean - float(half), mean + float(half), n)


def by_world(runs: Mapping[str, float]) -> list[list[float]]:
  """The values of the runs of each world, by case."""
  worlds: dict[int | None, list[float]] = {}
  for case, value in runs.items():
    worlds.setdefault(core.parse(case)[1], []).append(value)
  return [*worlds.values()]


def over_worlds(runs: Mapping[str, float]) -> Interval:
  """The `interval` of values by case.

  Runs of one world have that world in common: of several worlds, the interval
  is that of the means of each, and holds for other worlds too.
  """
  first, *others = worlds = by_world(runs)
  return interval([*map(np.mean, worlds)] if others else first)


def paired(a: Mapping[str, float], b: Mapping[str, float]) -> Interval | None:
  """`over_worlds` of a - b, for the cases of both; None: they share none."""
  differences = {case: a[case] - b[case] for case in a if case in b}
  return over_worlds(differences) if differences else None


RESAMPLES = 10_000  # of a bootstrap


def interquartile(worlds: Sequence[Sequence[float]]) -> Interval:
  """The mean of the middle half of all runs, and its stratified bootstrap.

  worlds: the values of each world's runs. Without two runs of each there is no
  interval.
  """
  value, n = float(_middle(*worlds, axis=0)), sum(map(len, worlds))
  if min(map(len, worlds)) < 2:
    return Interval(value, None, None, n)
  found = scipy.stats.bootstrap(
    worlds,
    _middle,
    vectorized=True,
    n_resamples=RESAMPLES,
    method='percentile',
    rng=np.random.default_rng(0),
  ).confidence_interval
  return Interval(value, float(found.low), float(found.high), n)


def _middle(*worlds, axis: int):
  return scipy.stats.trim_mean(np.concatenate(worlds, axis), 0.25, axis)


def means(seeds: Mapping[str, dict]) -> dict:
  """{evaluation: {score: Interval as a dict}}; scores that all seeds have."""
  every = {case: s['values'] for case, s in seeds.items()}
  first, *_ = every.values()
  return {
    variant: {
      score: over_worlds(
        {c: v[variant][score] for c, v in every.items()}
      )._asdict()
      for score in values
      if all(score in v.get(variant, {}) for v in every.values())
    }
    for variant, values in first.items()
  }


# ---- What is complete.


def complete(
  sweep: Sweep, workdir: pathlib.Path, purpose: str = ''
) -> dict[str, list[str]]:
  """{arm: its complete cases}, of seeds of a purpose; '' = of any.

  Raises:
    ConfigError: as `stages.done`.
  """
  out = {}
  case = re.compile(r'\d+-\d+' if sweep.worlds else r'\d+')
  for arm in sweep.arms:
    found = (workdir / 'arms' / arm.name).glob('*/done.json')
    names = filter(case.fullmatch, (path.parent.name for path in found))
    out[arm.name] = [
      name
      for name in sorted(names, key=core.parse)
      if purpose in ('', sweep.purpose(arm, name))
      and core.parse(name)[1] in (sweep.worlds or (None,))
      and stages.done(sweep, f'arms/{arm.name}/{name}', workdir)
    ]
  return out


def collect(
  sweep: Sweep, workdir: pathlib.Path, purpose: str = core.REPORT
) -> dict:
  """{arm: {'seeds': case -> its figures, 'mean'}} of seeds of a purpose."""
  out, cases = {}, complete(sweep, workdir, purpose)
  for arm in sweep.arms:
    seeds = {
      case: of_run(sweep, arm, workdir / f'arms/{arm.name}/{case}')
      for case in cases[arm.name]
    }
    if seeds:
      out[arm.name] = {'seeds': seeds, 'mean': means(seeds)}
  return out


def starts(sweep: Sweep, workdir: pathlib.Path) -> dict:
  """{warm start: {seed: its seconds and commit}} of the complete ones."""
  out = {}
  for stage in core.plan(sweep, sweep.arms):
    kind, name, case = stage.split('/')
    if kind == 'warm' and (workdir / stage / 'done.json').exists():
      out.setdefault(name, {})[case] = _about(workdir / stage)
  return out


def _about(folder: pathlib.Path) -> dict:
  done = json.loads((folder / 'done.json').read_text())
  return {
    'seconds': json.loads((folder / 'seconds.json').read_text()),
    **{name: done[name] for name in ('commit', 'code')},
  }


def versions(runs: Mapping[str, Mapping]) -> str:
  """A line if the code of the runs differs; '' if not, or if it is not known.

  runs: name -> its `commit` and `code`.
  """
  by_code: dict[str, list[str]] = {}
  for name, about in runs.items():
    if 'code' in about:
      by_code.setdefault(about['code'], []).append(name)
  parts = [
    f'{code} (commit {runs[names[0]]["commit"][:8]}): {" ".join(names)}'
    for code, names in by_code.items()
  ]
  return f'Made by different code. {"; ".join(parts)}' if parts[1:] else ''


def _same_questions(*evaluations: pathlib.Path) -> bool:
  """Whether evaluations asked the same, as far as they say what they asked."""
  paths = [folder / 'eval_ids.json' for folder in evaluations]
  said = [json.loads(p.read_text())['sets'] for p in paths if p.exists()]
  return all(sets == said[0] for sets in said)


def of_run(sweep: Sweep, arm: Arm, folder: pathlib.Path) -> dict:
  """The figures of a complete run: seconds, commit, values and curve.

  A gain is of the same questions, before training and after it.
  """

  def kept(values):
    return {
      name: value
      for name, value in values.items()
      if name.rsplit('/', 1)[-1] in sweep.scores and value is not None
    }

  values = {
    variant: kept(json.loads((folder / variant / 'values.json').read_text()))
    for variant in arm.evaluations
  }
  points = {}
  if arm.train:
    steps = _steps(folder / 'run')
    before = kept(steps[0]) if steps[0]['step'] == -1 else {}
    before = {k: v for k, v in before.items() if not k.startswith('sampled/')}
    if before:
      values = {'before': before, **values}
    if before and _same_questions(folder / 'run', folder / 'after'):
      both = [k for k in values['after'] if k in before]
      values['gain'] = {k: values['after'][k] - before[k] for k in both}
    points = curve(folder / 'run', sweep.curves)
  return {**_about(folder), 'values': values, 'curve': points}


def curve(run: pathlib.Path, metrics: Iterable[str]) -> dict[str, list]:
  """metric -> [[updates done, value]] of a run."""
  steps = _steps(run)
  return {
    name: [[s['step'] + 1, s[name]] for s in steps if s.get(name) is not None]
    for name in metrics
  }


def _steps(run: pathlib.Path) -> list[dict[str, Any]]:
  with (run / 'metrics.jsonl').open() as lines:
    return [json.loads(line) for line in lines]


def _rows(arms: Mapping[str, dict], purpose: str) -> Iterator[dict[str, Any]]:
  for arm, found in arms.items():
    for case, figures in found['seeds'].items():
      seed, world = core.parse(case)
      about = dict(arm=arm, world=world, seed=seed, purpose=purpose)
      for evaluation, values in figures['values'].items():
        for metric, value in values.items():
          about |= dict(evaluation=evaluation, metric=metric, value=value)
          yield dict(about)
      for metric, points in figures['curve'].items():
        for step, value in points:
          about |= dict(evaluation='curve', metric=metric, value=value)
          yield about | {'step': step}


def write(sweep: Sweep, workdir: pathlib.Path) -> str:
  """Writes the files that this module lists; returns the table."""
  purposes = core.REPORT, core.REPLICATION, core.TUNING
  found = {purpose: collect(sweep, workdir, purpose) for purpose in purposes}
  rows = [row for purpose, x in found.items() for row in _rows(x, purpose)]
  table = pa.Table.from_pylist(rows, _SCHEMA)
  for name, save in (('csv', csv.write_csv), ('parquet', pq.write_table)):
    save(table, out := io.BytesIO())
    records.write_bytes(workdir / f'results.{name}', out.getvalue())
  if found[core.REPORT]:
    plot(sweep.curves, found[core.REPORT], workdir / 'curves.png')
  text = compare(found, next(iter(sweep.curves)), sweep.arms[0].name)
  made = {
    f'{arm}/{case}': about
    for arms in found.values()
    for arm, x in arms.items()
    for case, about in x['seeds'].items()
  }
  text = '\n\n'.join(filter(None, (text, versions(made))))
  records.write_text(workdir / 'table.md', f'{text}\n')
  return text


# ---- Tables and curves.

_OF_WORLDS = (
  '± of several worlds is over the mean of each, and holds for other worlds; '
  'of one, and [ ], it is over seeds, and holds for these worlds.'
)


def compare(found: Mapping[str, dict], score: str, baseline: str) -> str:
  """Markdown: a line per purpose and arm.

  found: purpose -> what `collect` returns. score: of the evaluation 'after'.
  In a sweep with worlds a sentence below says what the intervals hold for.
  """
  lines = []
  for purpose, arms in found.items():
    values = {
      arm: {
        case: figures['values']['after'][score]
        for case, figures in x['seeds'].items()
        if score in figures['values'].get('after', {})
      }
      for arm, x in arms.items()
    }
    for arm, runs in values.items():
      if not runs:
        continue
      middle, bounds, shown = interquartile(by_world(runs)), '', ''
      both = [case for case in runs if case in values.get(baseline, {})]
      if arm != baseline and both:
        pairs = _worlds(both) or f' ({len(both)} pairs)'
        shown = f'{paired(runs, values[baseline])}{pairs}'
      if middle.low is not None:
        bounds = f' [{middle.low:.3f}, {middle.high:.3f}]'
      mean = f'{over_worlds(runs)}{_worlds(runs)}'
      inner = f'{middle.mean:.3f}{bounds}'
      lines.append((arm, purpose, ' '.join(runs), mean, inner, shown))
  head = 'arm', 'for', 'runs', score, 'interquartile mean', f'- {baseline}'
  table = _markdown([head, ['---'] * len(head), *lines])
  shown = [x['seeds'] for arms in found.values() for x in arms.values()]
  return f'{table}\n\n{_OF_WORLDS}' if any(map(_worlds, shown)) else table


def _worlds(cases: Iterable[str]) -> str:
  """' (2 worlds)', of cases that name theirs, else ''."""
  n = len({core.parse(case)[1] for case in cases} - {None})
  return f' ({n} world{"s" * (n > 1)})' if n else ''


def _markdown(lines: Sequence[Sequence[str]]) -> str:
  return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def show(arms: Mapping[str, dict], scores: Sequence[str]) -> str:
  """Markdown: a line per arm, mean and half of the interval over seeds.

  scores: 'evaluation:score'; blank if an arm does not have it.
  """
  lines = [['arm', 'seeds', *scores], ['---'] * (2 + len(scores))]
  for arm, found in arms.items():
    line = [arm, str(len(found['seeds']))]
    for name in scores:
      variant, _, score = name.partition(':')
      value = found['mean'].get(variant, {}).get(score)
      line.append(str(Interval(**value)) if value else '')
    lines.append(line)
  return _markdown(lines)


def plot(
  curves: Mapping[str, str], arms: Mapping[str, dict], path: pathlib.Path
) -> None:
  """One panel per curve: means over seeds, shaded from lowest to highest.

  An arm that was not trained is a dashed line at its score.
  """
  # Neither the backend nor the layout that a notebook has set.
  from matplotlib.figure import Figure

  figure = Figure(figsize=(4.2 * len(curves), 3.2), layout='none')
  (axes,) = figure.subplots(1, len(curves), squeeze=False)
  named: dict = {}  # name of an arm -> a line of it
  for axis, (name, label) in zip(axes, curves.items()):
    for n, (arm, found) in enumerate(arms.items()):
      color = f'C{n % 10}'
      every = (s['curve'].get(name) for s in found['seeds'].values())
      runs = [dict(points) for points in every if points]
      level = found['mean'].get('after', {}).get(name)
      if runs:
        steps = sorted(set.intersection(*map(set, runs)))
        at = np.array([[run[s] for s in steps] for run in runs])
        axis.plot(steps, at.mean(0), color=color, label=arm)
        axis.fill_between(
          steps, at.min(0), at.max(0), color=color, alpha=0.2, linewidth=0
        )
      elif level:
        axis.axhline(
          level['mean'], color=color, linestyle='--', linewidth=1, label=arm
        )
    # A longer line would be taller than its panel.
    axis.set(xlabel='step', ylabel=textwrap.fill(label, 30))
    axis.spines[['top', 'right']].set_visible(False)
    lines, names = axis.get_legend_handles_labels()
    named |= zip(names, lines)
  # Below all panels, because a panel has no room for all names.
  figure.tight_layout(rect=(0, 0.12, 1, 1))
  figure.legend(
    named.values(),
    named.keys(),
    loc='lower center',
    frameon=False,
    ncol=min(len(named), 6) or 1,
    fontsize=8,
  )
  figure.savefig(path, dpi=80)
