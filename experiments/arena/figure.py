"""The figure of the arena: experiments/arena/figure.png.

  python -m experiments.arena.figure

Left, from results.json: the paired difference of each claim on exact match over
three and four hops, with its interval, the margin shaded; below them, what
completing the corpus gains. Below a method, in grey, its credit shuffled over
turns, and exact. Right, from runs.json: paired differences to GRPO, over all
questions, of exact match and of searches.
"""

import json
import pathlib

from absl import flags

from experiments.arena import arms, results, run, verdicts
from searchrl_jax.run import command, lookup
from searchrl_jax.sweeps import figures

COLORS = {'shown': 'C2', 'contradicted': 'C3', 'equivalent': 'C0'}


def draw(found: dict, report: results.Runs):
  """found: the content of results.json; report: the runs of that phase.

  Raises:
    ConfigError: no claim has two runs.
  """
  judged = any(claim['interval'] for claim in found['claims'])
  message = 'results.json has no interval of a claim: run --phase=report first'
  lookup.require(judged, message)
  # Neither the backend nor the layout that a notebook has set.
  from matplotlib.figure import Figure

  figure = Figure(figsize=(7.2, 4.2), layout='constrained')
  left, right = figure.subplots(1, 2, width_ratios=(1.2, 1))
  values = results.values(report)
  _differences(found, values, left)
  _economy(values, right)
  figure.legend(loc='outside lower left', ncols=6, fontsize=7, frameon=False)
  for axis in left, right:
    axis.spines[['top', 'right']].set_visible(False)
  return figure


def _differences(found: dict, report, axis) -> None:
  claims = [c for c in found['claims'] if c['interval']]
  claims = [c for c in claims if c['metric'] == results.SCORE]
  claims = [c for c in claims if not c['within']]
  claims.sort(key=lambda c: (c['method'] == 'grpo', -c['value']))
  axis.axvspan(-found['margin'], found['margin'], color='0.93', lw=0)
  axis.axvline(0, color='0.5', lw=0.8)
  labels = []
  for y, claim in enumerate(claims):
    color = COLORS.get(claim['verdict'], '0.45')
    full = claim['verdict'] != 'undecided'
    axis.plot(claim['interval'], (y, y), color=color, lw=1.5)
    face = color if full else 'white'
    axis.plot(claim['value'], y, 'o', color=color, mfc=face, ms=5)
    for control, marker in (('shuffled', 'x'), ('oracle', '^')):
      arm = f'{claim["method"]}-{control}'
      gain = _gain(report, arm, claim['against'], results.SCORE)
      if gain and claim['phase'] == 'report':
        axis.plot(gain.mean, y + 0.3, marker, color='0.6', ms=3.5)
    stress = f' (lr x {arms.STRESS})' if claim['phase'] == 'stress' else ''
    corpus = claim['method'] == 'grpo'
    name = f'{claim["method"]}{stress} - {claim["against"]}'
    labels.append('complete - incomplete corpus' if corpus else name)
  axis.set_yticks(range(len(labels)), labels, fontsize=7)
  axis.invert_yaxis()
  axis.set_xlabel('difference of exact match, 3 and 4 hops')
  for verdict, color in COLORS.items():
    axis.plot([], [], 'o', color=color, label=verdict)
  axis.plot([], [], 'o', color='0.45', mfc='white', label='undecided')
  axis.plot([], [], 'x', color='0.6', label='shuffled credit')
  axis.plot([], [], '^', color='0.6', label='exact credit')


def _economy(report, axis) -> None:
  axis.axvline(0, color='0.5', lw=0.8)
  axis.axhline(0, color='0.5', lw=0.8)
  for row in arms.METHODS:
    names = 'all/searches', 'all/em'
    gains = [_gain(report, row.name, 'grpo', name) for name in names]
    if row.name != 'grpo' and all(gains):
      at = [gain.mean for gain in gains]
      half = [gain.high - gain.mean if gain.high else 0.0 for gain in gains]
      color = 'C1' if row.scale else 'black'
      bars = dict(xerr=half[0], yerr=half[1], lw=0.6, alpha=0.4)
      axis.errorbar(*at, color=color, **bars)
      axis.plot(*at, 'o', color=color, ms=3.5)
      offset = dict(xytext=(3, 3), textcoords='offset points')
      axis.annotate(row.name, at, fontsize=6, color=color, **offset)
  axis.set_xlabel('searches per question, - GRPO')
  axis.set_ylabel('exact match, all questions, - GRPO')


def _gain(report, arm: str, against: str, metric: str):
  pair = (verdicts.by_case(report, one, metric) for one in (arm, against))
  return figures.paired(*pair)


def main():
  folder = pathlib.Path(__file__).parent
  source = pathlib.Path(flags.FLAGS.results or folder / 'results.json')
  path = source.with_name('figure.png')
  report = run.load_runs(source.parent).get('report', {})
  draw(json.loads(source.read_text()), report).savefig(path, dpi=200)
  print(path)


if __name__ == '__main__':
  flags.DEFINE_string('results', '', 'results.json of another base recipe.')
  command.run(main)
