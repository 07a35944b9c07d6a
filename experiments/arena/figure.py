"""The figure of the arena: experiments/arena/figure.png.

  python -m experiments.arena.figure --batch=first

From results.json. Left: the paired difference of each claim to more exact match
(over three and four hops, or in training), with its interval, the margin
shaded; below them, what completing the corpus gains, and exact credit. Below a
method, in grey, its credit shuffled, and exact: as far from it as their paired
difference is, which has fewer seeds. Right: paired differences to GRPO, over
all questions, of searches and of exact match; of rows from the same warm start.
"""

import json
import pathlib

from absl import flags

from experiments.arena import plans, results, second
from searchrl_jax import lookup
from searchrl_jax.run import command

OUTCOME = 'ppo', 'reinforce_pp', *results.BASES  # no method shapes these
SHOWN = 'searches - GRPO', 'exact match - GRPO'  # of ECONOMY
ON = {'hard/em': '3 and 4 hops', 'run/em': 'in training'}
COLORS = {'shown': 'C2', 'contradicted': 'C3', 'equivalent': 'C0'}


def draw(batch: plans.Batch, found: dict):
  """found: the content of its results.json.

  Raises:
    ConfigError: no claim has two runs.
  """
  judged = any(claim['interval'] for claim in found['claims'])
  message = 'results.json has no interval of a claim: run --phase=report first'
  lookup.require(judged, message)
  # Neither the backend nor the layout that a notebook has set.
  from matplotlib.figure import Figure

  named = ('arm', 'against', 'metric')
  gains = {tuple(g[name] for name in named): g for g in found['gains']}
  of_row = lambda x: [gains.get((x, 'grpo', name)) for name in results.ECONOMY]
  rows = [(row.name, of_row(row.name)) for row in batch.methods]
  rows = [(name, found) for name, found in rows if all(found)]
  rows.sort(key=lambda row: -row[1][-1]['mean'])
  size = 7.2, max(3.6, 0.8 + 0.12 * len(rows))
  figure = Figure(figsize=size, layout='constrained')
  left, *right = figure.subplots(1, 3, width_ratios=(2, 1, 1))
  _differences(found, batch.score, gains, left)
  _economy(rows, right)
  figure.legend(loc='outside lower left', ncols=8, fontsize=6, frameon=False)
  for axis in left, *right:
    axis.spines[['top', 'right']].set_visible(False)
    axis.tick_params(labelsize=7)
    axis.xaxis.label.set_size(7)
  return figure


def _differences(found: dict, score: str, gains, axis) -> None:
  claims = [c for c in found['claims'] if c['interval']]
  claims = [c for c in claims if c['metric'] in ON and not c['within']]
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
    for control, marker in zip(results.FIGURED, 'x^', strict=True):
      arm = f'{claim["method"]}-{control}'
      gain = gains.get((claim['method'], arm, claim['metric']))
      if gain and claim['phase'] == 'report' and claim['method'] != 'grpo':
        at = claim['value'] - gain['mean']
        axis.plot(at, y + 0.3, marker, color='0.6', ms=3.5)
    stress = f' (lr x {plans.STRESS})' if claim['phase'] == 'stress' else ''
    corpus = claim['method'] == 'grpo'
    other = '' if claim['metric'] == score else f', {ON[claim["metric"]]}'
    name = f'{claim["method"]}{stress} - {claim["against"]}{other}'
    labels.append('complete - incomplete corpus' if corpus else name)
  exact = gains.get(('grpo-oracle', 'grpo', score))
  if exact and exact['n'] > 1:
    y = len(labels)
    axis.plot((exact['low'], exact['high']), (y, y), color='0.6', lw=1.5)
    axis.plot(exact['mean'], y, '^', color='0.6', ms=5)
    if shuffled := gains.get(('grpo-shuffled', 'grpo', score)):
      axis.plot(shuffled['mean'], y + 0.3, 'x', color='0.6', ms=3.5)
    labels.append('grpo, exact credit - grpo')
  axis.set_yticks(range(len(labels)), labels)
  axis.invert_yaxis()
  axis.set_xlabel(f'difference of exact match, {ON[score]}')
  for verdict, color in COLORS.items():
    axis.plot([], [], 'o', color=color, label=verdict)
  axis.plot([], [], 'o', color='0.45', mfc='white', label='undecided')
  axis.plot([], [], 'x', color='0.6', label='shuffled credit')
  axis.plot([], [], '^', color='0.6', label='exact credit')


def _economy(rows, axes) -> None:
  """rows: name and gains of methods. axes: one for each of results.ECONOMY."""
  names = [name for name, _ in rows]
  for axis, label, *column in zip(
    axes, SHOWN, *(pair for _, pair in rows), strict=True
  ):
    axis.axvline(0, color='0.5', lw=0.8)
    for y, (name, gain) in enumerate(zip(names, column, strict=True)):
      color = 'black' if name in OUTCOME else 'C1'
      axis.plot(gain['mean'], y, 'o', color=color, ms=3.5)
      if gain['n'] > 1:
        axis.plot((gain['low'], gain['high']), (y, y), color=color, lw=1)
    axis.set_yticks(range(len(rows)), names)
    axis.tick_params(labelleft=axis is axes[0])
    axis.invert_yaxis()
    axis.set_xlabel(label)
  axes[0].plot([], [], 'o', color='black', ms=3.5, label='outcome only')
  axes[0].plot([], [], 'o', color='C1', ms=3.5, label='method')


def main():
  batch = second.BATCHES[flags.FLAGS.batch]
  source = pathlib.Path(flags.FLAGS.results or batch.folder / 'results.json')
  path = source.with_name('figure.png')
  draw(batch, json.loads(source.read_text())).savefig(path, dpi=200)
  print(path)


if __name__ == '__main__':
  flags.DEFINE_enum('batch', 'first', second.BATCHES, 'See second.py.')
  flags.DEFINE_string('results', '', 'results.json of another base recipe.')
  command.run(main)
