"""The figure of the arena: experiments/arena/figure.png.

  python -m experiments.arena.figure

From results.json of both batches; of one that has no report yet, nothing. For
each, the paired difference of each claim to more exact match (over three and
four hops, or in training), with its interval, its margin shaded; below them,
what completing the corpus gains, and exact credit. Below a method, in grey, its
credit shuffled, and exact: as far from it as their paired difference is, which
has fewer seeds. Beside them, the rows that no claim is about, against the
baseline from the same warm start, or their own control without the method;
squares: at the end, where training does not compare.
"""

from collections.abc import Iterable
import json
import pathlib
import textwrap

from absl import flags

from experiments.arena import plans, results, second
from searchrl_jax import lookup
from searchrl_jax.run import command

ON = {'hard/em': '3 and 4 hops', 'run/em': 'in training'}
COLORS = {'shown': 'C2', 'contradicted': 'C3', 'equivalent': 'C0'}


def draw(parts: Iterable[tuple[plans.Batch, dict]]):
  """parts: batches, and the contents of their results.json.

  Raises:
    ConfigError: no claim has two runs.
  """
  parts = [x for x in parts if any(c['interval'] for c in x[1]['claims'])]
  message = 'results.json has no interval of a claim: run --phase=report first'
  lookup.require(parts, message)
  # Neither the backend nor the layout that a notebook has set.
  from matplotlib.figure import Figure

  panels = []
  for batch, found in parts:
    named = ('arm', 'against', 'metric')
    gains = {tuple(g[name] for name in named): g for g in found['gains']}
    panels.append((_differences, found, batch.score, gains))
    if others := [*_others(batch, gains)]:
      panels.append((_rows, others, batch.score))
  size = 1.0 + 3.1 * len(panels), 4.2
  figure = Figure(figsize=size, layout='constrained')
  axes = figure.subplots(1, len(panels), squeeze=False)[0]
  for axis, (panel, *of) in zip(axes, panels, strict=True):
    panel(*of, axis)
    axis.invert_yaxis()
    axis.spines[['top', 'right']].set_visible(False)
    axis.tick_params(labelsize=6)
    axis.xaxis.label.set_size(7)
  for verdict, color in COLORS.items():
    axes[0].plot([], [], 'o', color=color, label=verdict)
  axes[0].plot([], [], 'o', color='0.45', mfc='white', label='undecided')
  axes[0].plot([], [], 'x', color='0.6', label='shuffled credit')
  axes[0].plot([], [], '^', color='0.6', label='exact credit')
  ncols = 4 * len(panels)
  kw = dict(ncols=ncols, fontsize=6, frameon=False)
  figure.legend(loc='outside lower left', **kw)
  return figure


def _differences(found: dict, score: str, gains, axis) -> None:
  claims = [c for c in found['claims'] if c['interval']]
  claims = [c for c in claims if c['metric'] in ON and not c['within']]
  claims.sort(key=lambda c: (c['method'] == 'grpo', -c['value']))
  axis.axvline(0, color='0.5', lw=0.8)
  labels = []
  for y, claim in enumerate(claims):
    kw = dict(color='0.93', lw=0, zorder=0)
    axis.fill_betweenx(
      (y - 0.5, y + 0.5), -claim['margin'], claim['margin'], **kw
    )
    color = COLORS.get(claim['verdict'], '0.45')
    full = claim['verdict'] != 'undecided'
    axis.plot(claim['interval'], (y, y), color=color, lw=1.5)
    face = color if full else 'white'
    axis.plot(claim['value'], y, 'o', color=color, mfc=face, ms=5)
    corpus = claim['method'] == 'grpo'
    itself = claim['against'].startswith(f'{claim["method"]}-')  # a control
    for control, marker in zip(results.FIGURED, 'x^', strict=True):
      arm = f'{claim["method"]}-{control}'
      gain = gains.get((claim['method'], arm, claim['metric']))
      if gain and claim['phase'] == 'report' and not itself:
        at = claim['value'] - gain['mean']
        axis.plot(at, y + 0.3, marker, color='0.6', ms=3.5)
    stress = f' (lr x {plans.STRESS})' if claim['phase'] == 'stress' else ''
    other = '' if claim['metric'] == score else f', {ON[claim["metric"]]}'
    name = f'{claim["method"]}{stress} - {claim["against"]}{other}'
    name = 'complete - incomplete corpus' if corpus else name
    labels.append(textwrap.fill(name, 32, break_on_hyphens=False))
  exact = gains.get(('grpo-oracle', 'grpo', score))
  if exact and exact['n'] > 1:
    y = len(labels)
    axis.plot((exact['low'], exact['high']), (y, y), color='0.6', lw=1.5)
    axis.plot(exact['mean'], y, '^', color='0.6', ms=5)
    if shuffled := gains.get(('grpo-shuffled', 'grpo', score)):
      axis.plot(shuffled['mean'], y + 0.3, 'x', color='0.6', ms=3.5)
    labels.append('grpo, exact credit - grpo')
  axis.set_yticks(range(len(labels)), labels)
  axis.set_xlabel(f'difference of exact match, {ON[score]}')


def _others(batch: plans.Batch, gains) -> list[tuple[str, str, dict]]:
  """(row, metric, its gain) of the rows that no claim is about, best first."""
  found = []
  for row in (x for x in batch.methods if x.aside):
    plain = f'{row.name}-{results.PLAIN}'
    base = plain if results.PLAIN in row.controls else batch.baseline(row).name
    for metric in (batch.score, results.HARD):
      if gain := gains.get((row.name, base, metric)):
        found.append((row.name, metric, gain))
        break
  return sorted(found, key=lambda x: (x[1] != batch.score, -x[2]['mean']))


def _rows(others, score: str, axis) -> None:
  """others: of `_others`."""
  axis.axvline(0, color='0.5', lw=0.8)
  for y, (_, metric, gain) in enumerate(others):
    marker = 'o' if metric == score else 's'
    if gain['n'] > 1:
      axis.plot((gain['low'], gain['high']), (y, y), color='0.6', lw=1)
    axis.plot(gain['mean'], y, marker, color='0.3', ms=3.5)
  axis.set_yticks(range(len(others)), [name for name, *_ in others])
  squares = f'{ON[results.HARD]} (squares)'
  axis.set_xlabel(f'no claim: {ON[score]},\n{squares}')


def main():
  batches = second.BATCHES
  paths = {x: batch.folder / 'results.json' for x, batch in batches.items()}
  if flags.FLAGS.results:
    paths = {flags.FLAGS.batch: pathlib.Path(flags.FLAGS.results)}
  parts = [(batches[x], json.loads(at.read_text())) for x, at in paths.items()]
  path = [*paths.values()][0].with_name('figure.png')
  draw(parts).savefig(path, dpi=200)
  print(path)


if __name__ == '__main__':
  flags.DEFINE_string('results', '', 'results.json of another base recipe.')
  flags.DEFINE_enum('batch', 'first', second.BATCHES, 'Of --results.')
  command.run(main)
