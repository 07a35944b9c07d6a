"""Runs, evaluates and judges a recipe's table of arms x seeds; resumable.

  python -m experiments.rows --row=experiments.search_r1.rows \\
    --workdir=runs/search_r1 --out=experiments/search_r1/results.json \\
    [--only=grpo,ppo] [--seeds=0] [--parallel=2]

--row names a module with ROW, a `Row`: a sweep (searchrl_jax/sweep/core.py)
with bars. Arms of one world share a retrieval server. The JSON has the results
so far, of all arms:

  environment, command
  warm   name -> seed -> {seconds, commit}
  arms   name -> seeds: seed -> {seconds, commit, values, curve}
                 mean:  values -> {mean, low, high, n} over seeds
  bars   [{name, value, bar, holds}]; value is null if an arm is missing
  replication  {seeds, arms, bars} of seeds that the table does not list, if
               there are any (--seeds=11): the bars by these alone

`values` are {evaluation: {score: value}}: 'before' (the arm's first evaluation,
before any update), 'after', 'gain' (after - before) and further evaluations of
the arm. Intervals are Student's t over seeds, 95%. curves.png is in the folder
of the JSON.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import pathlib

from absl import flags

from experiments import common, table
from experiments.table import Bar
from searchrl_jax.run import command
from searchrl_jax.store import records
from searchrl_jax.sweep import core, figures
from searchrl_jax.sweep import runner as sweep
from searchrl_jax.sweep.core import Arm, Start, Sweep, evaluation

__all__ = ('Arm', 'Bar', 'Row', 'Start', 'evaluation')


@dataclasses.dataclass(frozen=True)
class Row(Sweep):
  """A recipe's table."""

  bars: Sequence[Bar] = ()


def write(
  row: Row,
  workdir: pathlib.Path,
  out: str,
  environment,
  by: str = 'experiments.rows',
) -> dict:
  """Returns the results; writes them to `out` ('' = not) with curves.png.

  by: the module of the command.
  """
  arms = figures.collect(row, workdir)
  record = {
    'environment': environment,
    'command': common.command(by),
    'warm': figures.starts(row, workdir),
    'arms': arms,
    'bars': table.judge(row.bars, arms),
  }
  again = figures.collect(row, workdir, core.REPLICATION)
  if again:
    bars = table.judge(row.bars, again)
    record['replication'] = {'arms': again, 'bars': bars}
  if out:
    records.write_json(out, record)
    if row.curves:
      figures.plot(row.curves, arms, pathlib.Path(out).with_name('curves.png'))
  return record


def columns(row: Row, arms: Mapping[str, dict]) -> list[str]:
  """The row's first score after training, of all questions and of slices."""
  after = (found['mean'].get('after', {}) for found in arms.values())
  names = dict.fromkeys(name for values in after for name in values)
  return [
    f'after:{name}'
    for name in names
    if name.rpartition('/')[2] == row.scores[0]
  ]


def run(module: str, out: str, **by: str) -> None:
  """Runs what the flags of `runner.define_flags` choose; prints the table.

  The arguments are those of `write`, and the module of the table.
  """
  folder = pathlib.Path(flags.FLAGS.workdir)
  row, environment = core.load(module), common.environment()
  planned = sweep.chosen(row, flags.FLAGS.only, flags.FLAGS.seeds)
  results = lambda: write(row, folder, out, environment, **by)
  figures.collect(row, folder)  # also checks the arms that are not chosen
  parallel = flags.FLAGS.parallel
  try:
    sweep.run(module, row, planned, folder, parallel=parallel, after=results)
  finally:
    record = results()
    for found in (record, record.get('replication')):
      if found:
        print(figures.show(found['arms'], columns(row, found['arms'])))
        print(*found['bars'], sep='\n')


if __name__ == '__main__':
  _ROW = flags.DEFINE_string('row', None, 'Module with ROW.', required=True)
  _OUT = flags.DEFINE_string('out', '', 'JSON file to write.')
  sweep.define_flags()
  command.run(lambda: run(_ROW.value, _OUT.value))
