"""Runs, evaluates and judges a recipe's table of arms x seeds; resumable.

  python -m experiments.rows --row=experiments.search_r1.rows \\
    --workdir=runs/search_r1 --out=experiments/search_r1/results.json \\
    [--only=grpo,ppo] [--seeds=0] [--parallel=2]

--row names a module with ROW, a `Row`: a sweep (searchrl_jax/sweep/core.py)
with bars. Arms of one world share a retrieval server. With --keep, runs that
the JSON has already, from another machine or --workdir, are left out and stay
in it while their configs are the same, so that a table can be run in pieces:
commit the JSON after each. It has the results so far, of all arms:

  environment, command
  warm   name -> seed -> {seconds, commit}
  arms   name -> seeds: seed -> {seconds, commit, config, values, curve}
                 mean:  values -> {mean, low, high, n} over seeds
  bars   [{name, value, bar, holds}]; value is null if a run is missing
  replication  {seeds, arms, bars} of seeds that the table does not list, if
               there are any (--seeds=11): the bars by these alone

`values` are {evaluation: {score: value}}: 'before' (the arm's first evaluation,
before any update), 'after', 'gain' (after - before) and further evaluations of
the arm. Intervals are Student's t over seeds, 95%. curves.png is in the folder
of the JSON.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
import json
import pathlib

from absl import flags
from ml_collections import ConfigDict

from configs import ssp
from experiments import common, table
from experiments.table import Bar
from searchrl_jax import lookup, schema
from searchrl_jax.run import command
from searchrl_jax.store import folders, records
from searchrl_jax.sweep import core, figures
from searchrl_jax.sweep import runner as sweep
from searchrl_jax.sweep.core import Arm, Start, Sweep, evaluation

__all__ = ('Arm', 'Bar', 'Row', 'Start', 'evaluation')


@dataclasses.dataclass(frozen=True)
class Row(Sweep):
  """A recipe's table."""

  bars: Sequence[Bar] = ()


def digest(config: ConfigDict) -> str:
  """What names a config.

  Of the fields that differ from the schema's neutral values, so that a field
  that the schema gains changes none. A neutral value that is changed goes
  unseen: remove the runs that it concerns from the file.
  """
  base, now = records.plain(schema.base()), records.plain(config)
  # Fields that self-play has gained, with its copy of config.algorithm: runs
  # from before have none.
  own, neutral = now.get('selfplay', {}), records.plain(ssp.selfplay())
  for part, known, name in (
    (own, neutral, 'hops'),
    (own.get('algorithm', {}), neutral['algorithm'], 'foreign_objective'),
  ):
    if part.get(name) == known[name]:
      del part[name]
  changed = {k: new for k, (_, new) in lookup.differences(base, now).items()}
  return _hashed(changed)


def of_run(row: Sweep, stage: str) -> str:
  """What names a run: its `digest`, those of the warm starts that it needs, its
  loop and its evaluations. Of the code it says nothing: `figures.versions`."""
  arm, _ = row.stage(stage)
  configs = [
    digest(one.config(core.parse(case)[0]))
    for one, case in map(row.stage, core.before(row, stage))
  ]
  evaluations = {name: core.named(fn) for name, fn in arm.evaluations.items()}
  loop = arm.loop if arm.train else ''
  return _hashed([configs, loop, evaluations])


def _hashed(content) -> str:
  text = json.dumps(content, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def earlier(row: Row, out: str) -> dict[str, dict]:
  """What a JSON that `write` has written has of this table.

  Returns:
    'arms', 'again': arm -> case -> figures, of seeds that the table lists and
    of others, without those that `of_run` names otherwise now, which 'stale'
    lists. 'warm': as in the JSON.
  """
  path = pathlib.Path(out)
  known = json.loads(path.read_text()) if path.is_file() else {}
  every = known.get('arms', {}), known.get('replication', {}).get('arms', {})
  found: dict = {'arms': {}, 'again': {}, 'stale': []}
  found['warm'] = known.get('warm', {})
  arms = {arm.name: arm for arm in row.arms}
  for name, case, about in (
    (name, case, about)
    for of in every
    for name, own in of.items()
    for case, about in own['seeds'].items()
  ):
    stage = f'arms/{name}/{case}'
    if name in arms and about.get('config') == of_run(row, stage):
      listed = row.purpose(arms[name], case) == core.REPORT
      own = found['arms' if listed else 'again']
      own.setdefault(name, {})[case] = about
    else:
      found['stale'].append(stage)
  return found


def write(
  row: Row,
  workdir: pathlib.Path,
  out: str,
  environment,
  by: str = 'experiments.rows',
  known: Mapping[str, dict] | None = None,
) -> dict:
  """Returns the results; writes them to `out` ('' = not) with curves.png.

  by: the module of the command. known: `earlier`.
  """
  known, warm = known or {}, figures.starts(row, workdir)
  for name, own in known.get('warm', {}).items():
    warm[name] = {**own, **warm.get(name, {})}
  arms = _merged(row, workdir, core.REPORT, known.get('arms', {}))
  planned = {arm.name: len(arm.seeds) for arm in row.arms}
  record = {
    'environment': environment,
    'command': common.command(by),
    'warm': warm,
    'arms': arms,
    'bars': table.judge(row.bars, arms, planned),
  }
  again = _merged(row, workdir, core.REPLICATION, known.get('again', {}))
  if again:
    bars = table.judge(row.bars, again, paired=True)
    record['replication'] = {'arms': again, 'bars': bars}
  if out:
    records.write_json(out, record)
    if row.curves:
      figures.plot(row.curves, arms, pathlib.Path(out).with_name('curves.png'))
  return record


def _merged(row: Row, workdir: pathlib.Path, purpose: str, known) -> dict:
  """`figures.collect`, with what is known of other machines."""
  found, out = figures.collect(row, workdir, purpose), {}
  for arm in row.arms:
    name, own = arm.name, found.get(arm.name, {}).get('seeds', {})
    for case, about in own.items():
      about['config'] = of_run(row, f'arms/{name}/{case}')
    if own := {**known.get(name, {}), **own}:
      seeds = {case: own[case] for case in sorted(own, key=core.parse)}
      out[name] = {'seeds': seeds, 'mean': figures.means(seeds)}
  return out


def columns(row: Row, arms: Mapping[str, dict]) -> list[str]:
  """The row's first score after training, of all questions and of slices."""
  after = (found['mean'].get('after', {}) for found in arms.values())
  names = dict.fromkeys(name for values in after for name in values)
  return [
    f'after:{name}'
    for name in names
    if name.rpartition('/')[2] == row.scores[0]
  ]


def run(module: str, out: str, keep: bool = False, **by: str) -> None:
  """Runs what the flags of `runner.define_flags` choose; prints the table.

  The arguments are those of `write`, and the module of the table. keep: whether
  the runs that `out` has already are left out, and stay in it.

  Raises:
    ConfigError: some of these had other configs, and would be lost.
  """
  folder = pathlib.Path(flags.FLAGS.workdir)
  row, environment = core.load(module), common.environment()
  known = earlier(row, out if keep else '')
  kept = {
    f'arms/{arm}/{case}'
    for seeds in ('arms', 'again')
    for arm, own in known[seeds].items()
    for case in own
  }

  def require_kept(known):
    gone = [
      stage
      for stage in known['stale']
      if not (folder / stage / 'done.json').exists()
    ]
    lookup.require(
      not gone,
      f'--keep: {out} has runs that had other configs, or none on record: '
      f'{", ".join(gone)}; give another --out, or remove them from it',
    )

  require_kept(known)
  chosen = sweep.chosen(row, flags.FLAGS.only, flags.FLAGS.seeds)
  planned = core.needed(row, chosen, kept)

  def results():
    if not (keep and out):
      return write(row, folder, out, environment, **by)
    with folders.locked(pathlib.Path(out).parent, wait=True):
      known = earlier(row, out)  # another command may have added to it
      require_kept(known)
      return write(row, folder, out, environment, known=known, **by)

  figures.collect(row, folder)  # also checks the arms that are not chosen
  parallel = flags.FLAGS.parallel
  try:
    if planned:
      sweep.run(module, row, planned, folder, parallel=parallel, after=results)
  finally:
    record = results()
    for found in (record, record.get('replication')):
      if found:
        arms = found['arms']
        print(figures.show(arms, columns(row, arms)))
        print(*found['bars'], sep='\n')
        if made := figures.versions(
          {
            f'{name}/{case}': about
            for name, own in arms.items()
            for case, about in own['seeds'].items()
          }
        ):
          print(made)


if __name__ == '__main__':
  _ROW = flags.DEFINE_string('row', None, 'Module with ROW.', required=True)
  _OUT = flags.DEFINE_string('out', '', 'JSON file to write.')
  sweep.define_flags()
  _KEEP = flags.DEFINE_bool(
    'keep', False, 'Leave out the runs that --out has, and keep them in it.'
  )
  command.run(lambda: run(_ROW.value, _OUT.value, _KEEP.value))
