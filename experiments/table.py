"""The figures of a table of arms x seeds: intervals, bars, curves, markdown.

  python -m experiments.table experiments/search_r1/results.json \\
    after:eval/em after:eval/hops=2/em gain:eval/hops=2/em

prints some of them, for a README. Plain records, as experiments/rows.py writes
them to results.json.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
import pathlib
import textwrap
from typing import NamedTuple

from absl import app
import numpy as np
import scipy.stats

from experiments.benchmarks import common


class Missing(LookupError):
  """An arm that a bar needs is not complete."""


class Interval(NamedTuple):
  """Over n seeds; low and high are None for one seed."""

  mean: float
  low: float | None
  high: float | None
  n: int


@dataclasses.dataclass(frozen=True)
class Bar:
  """A threshold for a figure.

  value: computes the figure from a function (arm, evaluation, score) ->
  Interval.
  """

  name: str
  value: Callable[[Callable[[str, str, str], Interval]], float | None]
  bar: float
  at_most: bool = False
  strict: bool = False


def interval(values: Sequence[float]) -> Interval:
  """Mean and Student's t interval (95%) over seeds."""
  n, mean = len(values), float(np.mean(values))
  if n < 2:
    return Interval(mean, None, None, n)
  half = scipy.stats.t.ppf(0.975, n - 1) * np.std(values, ddof=1) / n**0.5
  return Interval(mean, mean - float(half), mean + float(half), n)


def means(seeds: Mapping[str, dict]) -> dict:
  """{evaluation: {score: Interval as a dict}}; scores that all seeds have."""
  every = [s['values'] for s in seeds.values()]
  return {
    variant: {
      score: interval([v[variant][score] for v in every])._asdict()
      for score in values
      if all(score in v.get(variant, {}) for v in every)
    }
    for variant, values in every[0].items()
  }


def judge(bars: Sequence[Bar], arms: Mapping[str, dict]) -> list[dict]:
  """The bars; one whose arm is not complete has no value and does not hold."""

  def look(arm: str, variant: str, score: str) -> Interval:
    try:
      return Interval(**arms[arm]['mean'][variant][score])
    except KeyError as e:
      raise Missing(f'{arm}: {variant}/{score}') from e

  out = []
  for bar in bars:
    try:
      value = bar.value(look)
    except Missing:
      value = None
    out.append(
      {'name': bar.name, 'value': None, 'bar': bar.bar, 'holds': False}
      if value is None
      else common.bar(
        bar.name, value, bar.bar, at_most=bar.at_most, strict=bar.strict
      )
    )
  return out


def plot(
  curves: Mapping[str, str], arms: Mapping[str, dict], path: pathlib.Path
) -> None:
  """One panel per curve: means over seeds, shaded from lowest to highest.

  An arm that was not trained is a dashed line at its score.
  """
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot

  figure, axes = pyplot.subplots(
    1, len(curves), figsize=(4.2 * len(curves), 3.2), squeeze=False
  )
  for axis, (name, label) in zip(axes[0], curves.items()):
    for n, (arm, found) in enumerate(arms.items()):
      color = f'C{n % 10}'
      runs = [
        dict(s['curve'][name])
        for s in found['seeds'].values()
        if s['curve'].get(name)
      ]
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
  # Below all panels, because a panel has no room for all names.
  named = dict(
    (text, line)
    for axis in axes[0]
    for line, text in zip(*axis.get_legend_handles_labels())
  )
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
  pyplot.close(figure)


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
      line.append(_cell(Interval(**value)) if value else '')
    lines.append(line)
  return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def _cell(value: Interval) -> str:
  if value.low is None:
    return f'{value.mean:.3f}'
  return f'{value.mean:.3f} ± {value.high - value.mean:.3f}'


def main(argv: Sequence[str]) -> None:
  record = json.loads(pathlib.Path(argv[1]).read_text())
  print(show(record['arms'], argv[2:]))
  for bar in record['bars']:
    print(bar)


if __name__ == '__main__':
  app.run(main)
