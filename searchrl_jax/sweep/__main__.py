"""Runs a sweep: arms x seeds (x worlds), each in a process of its own.

  python -m searchrl_jax.sweep --sweep=configs/sweeps/kl.py --workdir=runs/kl
  ... --parallel=2              two at a time
  ... --seeds=11,12             others than it reports, to tune or to replicate
  ... --slurm --sbatch='--time=4:00:00 --gpus-per-node=1'
  ... --table                   runs nothing: what is done so far

The same command goes on where it was killed and leaves out what is done. An arm
that fails does not stop the others; the same command tries it again. The output
of each process is in WORKDIR/logs. sweep/core.py says what a sweep is, and
sweep/figures.py what is written.
"""

import pathlib
import shlex

from absl import flags

from searchrl_jax.run import command
from searchrl_jax.sweep import core, figures, runner, stages


def main():
  values, folder = flags.FLAGS, pathlib.Path(flags.FLAGS.workdir)
  if values.stage:
    if values.child:
      stages.end_with_parent()
    runner.run_child(values.sweep, values.stage, folder, values.url)
    return
  sweep = core.load(values.sweep)
  planned = runner.chosen(sweep, values.only, values.seeds)
  if values.slurm:
    jobs = runner.submit(
      values.sweep, sweep, planned, folder, shlex.split(values.sbatch)
    )
    print(f'jobs: {" ".join(jobs) or "none, all is done"}')
    return
  figures.complete(sweep, folder)  # refuses what is stale now, not at the end
  try:
    if not values.table:
      runner.run(values.sweep, sweep, planned, folder, parallel=values.parallel)
  finally:
    print(figures.write(sweep, folder))
    print(f'figures: {folder}/results.csv, results.parquet, curves.png')


if __name__ == '__main__':
  flags.DEFINE_string(
    'sweep', None, 'FILE.py[:ARG] with get_sweep.', required=True
  )
  runner.define_flags()
  flags.DEFINE_bool('slurm', False, 'Submit SLURM arrays instead.')
  flags.DEFINE_string('sbatch', '', 'Further options of sbatch.')
  flags.DEFINE_bool('table', False, 'Run nothing; write what is done so far.')
  flags.DEFINE_string('stage', '', 'Runs only this stage (internal).')
  flags.DEFINE_string('url', '', 'The retrieval server of the stage.')
  flags.DEFINE_bool('child', False, 'Ends with the process of the sweep.')
  command.run(main)
