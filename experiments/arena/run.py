"""Runs a phase of the arena, and says what came out.

  python -m experiments.arena.run --phase=assay --workdir=runs/arena
  ... --phase=tune       then --phase=confirm, pilot, report, stress, mixtures
  ... --phase=recipes    rows outside the comparison
  ... --batch=second     the methods of 2026, in experiments/arena/second/
  ... --parallel=2       two arms at a time
  ... --only=grpo,otc --seeds=0,1
  ... --base=base=search_r1,model=Qwen/Qwen2.5-3B,folder=...

experiments/arena/plans.py has the phases, arms.py and second.py the batches of
methods. Each arm is a stage of a sweep (searchrl_jax/sweep): the same command
goes on where it was stopped. The values of arms that are complete are kept in
runs.csv of the batch's folder, so that what one machine has run, another leaves
out (it trains the warm starts of what is left again). An arm whose config has
changed since runs again, in another --workdir or after its folder is removed,
and what it was before counts no more; results leave out seeds that no phase
lists. Runs of a seed that began with other weights of a warm start than most,
as another machine may train them, are named, do not count, and run again in
the same way, where the warm start has the weights of most. Tuning writes
tuned.json, and every phase results.json, claims with their verdicts so far, and
means.csv, the means of all arms with intervals. With another base these files
lie in --workdir.
"""

import collections
from collections.abc import Mapping
import csv
import functools
import json
import pathlib
from typing import Any

from absl import flags
import pandas as pd

from experiments import common, rows
from experiments.arena import plans, recipes, results, second
from searchrl_jax import lookup
from searchrl_jax.run import command
from searchrl_jax.store import folders, records
from searchrl_jax.sweep import core, figures, stages
from searchrl_jax.sweep import runner as sweep

RUNS = 'runs.csv'
_NAMED = 'phase', 'arm', 'case'


def load_runs(out: pathlib.Path) -> dict:
  """{phase: {arm: {case: {'values', 'rewards' (of each step), ...}}}}."""
  path, runs = out / RUNS, {}
  if path.exists():
    with path.open(newline='') as file:
      for line in csv.DictReader(file):
        phase, arm, case = (line.pop(name) for name in _NAMED)
        about = {name: line.pop(name) for name in ('config', 'commit')}
        for name in ('code', 'start'):
          if known := line.pop(name, ''):
            about[name] = known
        about['seconds'] = float(line.pop('seconds'))
        about['rewards'] = [float(x) for x in line.pop('rewards').split()]
        about['values'] = {k: float(v) for k, v in line.items() if v}
        runs.setdefault(phase, {}).setdefault(arm, {})[case] = about
  return runs


def save_runs(out: pathlib.Path, runs: dict) -> None:
  """Writes what `load_runs` reads: a line for each run."""
  lines = [
    {
      **dict(zip(_NAMED, (phase, arm, case), strict=True)),
      **{k: v for k, v in about.items() if k != 'values'},
      'rewards': ' '.join(map(str, about['rewards'])),
      **about['values'],
    }
    for phase, kept in runs.items()
    for arm, cases in kept.items()
    for case, about in cases.items()
  ]
  table = pd.DataFrame(lines).to_csv(index=False)
  records.write_text(out / RUNS, table)


def keep(found: core.Sweep, left: set[str], phase: str, folder, out) -> dict:
  """Moves what is complete of the stages `left` to the runs; returns them."""
  new = {}
  for stage in sorted(left):
    _, name, case = stage.split('/')
    if _done(found, stage, folder):
      about = figures.of_run(found, found.arm(name), folder / stage)
      done = json.loads((folder / stage / 'done.json').read_text())
      start = done.get('contents', {}).get('config.train.init')
      new[stage] = {
        'config': digest(found, name, case),
        'commit': about['commit'],
        **({'code': about['code']} if 'code' in about else {}),
        **({'start': start} if start else {}),
        'seconds': round(sum(about['seconds'].values()), 1),
        'rewards': [round(v, 4) for _, v in about['curve']['reward']],
        'values': {k: round(v, 6) for k, v in about['values']['after'].items()},
      }
  with folders.locked(out, wait=True):  # another phase may save its own
    runs = load_runs(out)
    for stage, run in new.items():
      _, name, case = stage.split('/')
      runs.setdefault(phase, {}).setdefault(_row(name), {})[case] = run
    save_runs(out, runs)
  left -= {*new}
  return runs


def current(batch: plans.Batch, runs, base: str = '') -> dict:
  """Those of `load_runs` that count: with the configs that the arms have now.

  Runs that began with other weights of a warm start than most do not.

  base: arguments of another base recipe.
  """
  out: dict = {}
  for phase, kept in runs.items():
    # What a trial is does not depend on which are confirmed.
    name = 'tune' if phase == 'confirm' else phase
    try:
      found = batch.sweep(name, base)
    except lookup.ConfigError as e:  # the tuning has not chosen its settings
      print(f'Of phase {phase} nothing is counted: {e}')
      continue
    if known := alike(found, same(found, kept)):
      out[phase] = known
  return out


def same(found: core.Sweep, runs: Mapping[str, Any]) -> dict[str, dict]:
  """Those of a phase's runs with the configs that the arms have now."""
  out = {}
  for arm in found.arms:
    cases = {
      case: run
      for case, run in runs.get(_row(arm.name), {}).items()
      if run['config'] == digest(found, arm.name, case)
    }
    if cases:
      out[_row(arm.name)] = cases
  return out


def alike(found: core.Sweep, runs: Mapping[str, Any]) -> dict[str, dict]:
  """Those of a phase's runs that are not `unlike` the others."""
  apart = unlike(found, runs)
  return {
    arm: {case: run for case, run in cases.items() if (arm, case) not in apart}
    for arm, cases in runs.items()
  }


def unlike(found: core.Sweep, runs: Mapping[str, Any]) -> list[tuple[str, str]]:
  """(arm, case) of runs of a phase that are no pairs of the others of a case.

  They began with other weights of their warm start than most that began with
  it. (Runs of before 2026-12-01 do not say with which.)
  """
  seen: dict = collections.defaultdict(dict)
  for arm in found.arms:
    for case, run in runs.get(_row(arm.name), {}).items():
      if 'start' in run:
        seen[arm.warm, case][_row(arm.name), case] = run['start']
  out = []
  for starts in seen.values():
    [(usual, _)] = collections.Counter(starts.values()).most_common(1)
    out += [name for name, start in starts.items() if start != usual]
  return sorted(out)


def _done(found: core.Sweep, stage: str, folder: pathlib.Path) -> bool:
  try:
    return stages.done(found, stage, folder)
  except lookup.ConfigError:  # of another config; the sweep refuses the folder
    return False


def digest(found: core.Sweep, name: str, case: str) -> str:
  """What names a run (`rows.of_run`)."""
  return rows.of_run(found, f'arms/{name}/{case}')


def _row(name: str) -> str:
  """The name of an arm without that of its phase."""
  return name.removeprefix('stress-')


def main():
  values = flags.FLAGS
  batch = second.BATCHES[values.batch]
  phase, folder = values.phase, pathlib.Path(values.workdir)
  out = folder if values.base else batch.folder
  arg = ','.join(filter(None, (phase, values.base)))
  spec = f'experiments/arena/{batch.file}:{arg}'
  table = core.load(spec)
  environment = common.environment()
  out.mkdir(parents=True, exist_ok=True)
  known = load_runs(out).get(phase, {})
  known = alike(table, same(table, known))
  chosen = sweep.chosen(table, values.only, values.seeds)
  every = [stage for stage in chosen if stage.startswith('arms/')]
  kept = {stage for stage in every if _kept(stage, known)}
  wanted = [stage for stage in every if stage not in kept]
  # Warm starts that no arm needs any more are left out with them.
  planned = core.needed(table, chosen, kept)
  update = functools.partial(keep, table, {*wanted}, phase, folder, out)
  try:
    if planned:
      parallel = values.parallel
      sweep.run(spec, table, planned, folder, parallel=parallel, after=update)
  finally:
    runs = update()
    if phase in plans.TRIALS:
      tried = {name: runs.get(name, {}) for name in plans.TRIALS}
      tried = [current(batch, tried).get(name, {}) for name in plans.TRIALS]
      results.choose(batch, *tried, out, environment)
    said = common.command('experiments.arena.run')
    counted = current(batch, runs, values.base)
    written = results.write(batch, counted, out, environment, said)
    every = results.averaged(batch, results.planned(batch, counted))
    other = phase == recipes.PHASE
    columns = recipes.COLUMNS if other else results.columns(batch)
    print(results.show(every.get(phase, {}), columns))
    runs = counted.get(phase, {})
    named = {f'{a}/{c}': x for a, own in runs.items() for c, x in own.items()}
    if made := figures.versions(named):
      print(made)
    if apart := unlike(table, same(table, load_runs(out).get(phase, {}))):
      said = ', '.join(map('/'.join, apart))
      print(f'Of another warm start than most, and not counted: {said}')
    print(results.show_claims(written))
    print(results.show_mixtures(batch, written))


def _kept(stage: str, known: Mapping[str, Any]) -> bool:
  _, name, case = stage.split('/')
  return case in known.get(_row(name), {})


if __name__ == '__main__':
  flags.DEFINE_enum('phase', None, second.NAMES, 'See plans.py.', required=True)
  flags.DEFINE_enum('batch', 'first', second.BATCHES, 'See second.py.')
  flags.DEFINE_string('base', '', 'Arguments of another base recipe.')
  sweep.define_flags()
  command.run(main)
