"""Votes that are to keep TTRL from collapse, eight seeds, and an alarm.

  python -m experiments.ttrl.guards --workdir=runs/ttrl_guards --parallel=2
  ... --only=majority,covered --seeds=0,1

On atlas, from the warm start `skills`, as the row `ttrl` of the arena: 40 steps
of 8 questions x 16 votes, 8 of which are trained on. `majority` is TTRL, which
lost three and four hops wholly with two of the first four seeds; the other arms
are the labels of rewards/guarded.py. `small-...` are the recipe's own small
form, three seeds: what is to be its default has to hold there too. All arms of
a seed start from the same votes of the same start (experiments/ttrl/start.py).

The same command goes on where it stopped. --out gets, besides results.json and
curves.png (experiments/rows.py), labels.json and labels.png (labels.py, of the
runs of `majority`); results.json also has

  verdicts  arm -> hard/em before and after by seed, the lowest, the paired
            gain, and whether the bar holds: all SEEDS, none at 0 (below ZERO),
            and a mean of at least that of the start + GAIN. `failed`: how many
            are at 0, and a 95 % interval (Clopper and Pearson) of the share;
            `than_majority`: the paired difference, and the p of McNemar's exact
            test that as many fail (null: the same do). Where `majority` never
            fails, that a guard holds does not say that it guards
  alarm     of the runs of each arm on atlas, and of all: `failed` (those at 0),
            `named` (run -> the first step with alarm/votes), and whether the
            alarm names all failed ones within WITHIN steps, and no other.
            `now`: as `named`, by the limits that the alarm has now, and
            `peaks`: the highest median of five steps of LOST.
            `signals`: of each signal without golden answers, the lowest and
            highest mean over these steps of runs that failed and of the others,
            whether a threshold separates them, and of one arm the probability
            that one of the signals would, if seeds failed at random

About an hour on two cores for atlas and 20 minutes for the small form.
"""

from collections.abc import Mapping
import json
import math
import pathlib
from typing import Any

from absl import flags
from scipy import stats

from configs import atlas, ttrl
from experiments import rows
from experiments.arena import measure
from experiments.ttrl import labels
from searchrl_jax import read
from searchrl_jax.run import command
from searchrl_jax.store import alarms, records
from searchrl_jax.sweep import figures, runner

MODULE = 'experiments.ttrl.guards'
ARMS = 'majority', 'found', 'covered', 'restrain'
SEEDS, SMALL_SEEDS = tuple(range(8)), (0, 1, 2)
LOOP = 'experiments.ttrl.start.train'
HARD, BEFORE = 'hard/em', 'before/hard/em'
ZERO, GAIN, WITHIN = 0.02, 0.10, 10
ALARM, LOST = 'alarm/votes', 'reward/vote/lost'
# What a run without golden answers can know of its votes.
SIGNALS = (
  *(f'reward/vote/{name}' for name in (
    'agreement', 'distinct', 'ahead', 'gained', 'lost', 'flipped', 'voting',
  )),
  *('health/searches', 'health/tokens', 'train/entropy'),
)  # fmt: skip


def of(base: str, label: str):
  """seed -> configs/ttrl.py."""
  return lambda seed: ttrl.get_config(f'base={base},label={label},seed={seed}')


ROW = rows.Row(
  warm={
    'skills': rows.Start(lambda n: atlas.get_config(f'mix=skills,seed={n}')),
    'small': rows.Start(of('search', 'majority')),
  },
  arms=(
    *(
      rows.Arm(
        name,
        of('atlas', name),
        'skills',
        evaluations={'after': measure.compared, 'labels': labels.measured},
        seeds=SEEDS,
        loop=LOOP,
      )
      for name in ARMS
    ),
    *(
      rows.Arm(
        f'small-{name}',
        of('search', name),
        'small',
        seeds=SMALL_SEEDS,
        loop=LOOP,
      )
      for name in ARMS
    ),
  ),
  scores=('em', *labels.VALUES),
  curves={
    'reward/vote/label_accuracy': 'label accuracy',
    'reward/vote/agreement': 'agreement',
    'health/searches': 'searches',
  },
)


def verdict(
  values: Mapping[str, Mapping[str, float]],
  majority: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
  """The bar of an arm.

  Args:
    values: seed -> HARD and BEFORE.
    majority: those of TTRL.
  """
  after = {seed: own[HARD] for seed, own in values.items()}
  others = {seed: own[HARD] for seed, own in majority.items()}
  lost = [seed for seed, value in after.items() if value < ZERO]
  share = stats.binomtest(len(lost), len(after)).proportion_ci()
  both = [
    (after[seed] < ZERO, others[seed] < ZERO) for seed in after.keys() & others
  ]
  alone = [own for own, other in both if own != other]
  before = {seed: own[BEFORE] for seed, own in values.items()}
  gain, lowest = figures.paired(after, before), min(after.values())
  than = figures.paired(after, others)
  complete = {*values} >= {*map(str, SEEDS)}
  return {
    'before': before,
    'after': after,
    'lowest': lowest,
    'gain': gain._asdict(),
    'failed': [len(lost), share.low, share.high],
    'than_majority': {
      'difference': than and than._asdict(),
      'p': stats.binomtest(sum(alone), len(alone)).pvalue if alone else None,
    },
    'complete': complete,
    'holds': complete and lowest >= ZERO and gain.mean >= GAIN,
  }


def alarm(
  metrics: Mapping[str, Any], failed: set[str], several: bool = False
) -> dict[str, Any]:
  """What the alarm and the signals say of runs; see the module.

  Args:
    metrics: name of a run -> the data frame of its metrics by step.
    failed: the names of those that lost the hard questions.
    several: the runs are of several arms, which have their seeds in common: no
      run fails by itself.
  """
  named, now, peaks = {}, {}, {}
  means: dict[str, dict] = {signal: {} for signal in SIGNALS}
  for name, frame in metrics.items():
    on = frame.index[frame[ALARM] == 1] if ALARM in frame else []
    named[name] = int(on[0]) if len(on) else None
    again = alarms.Alarms()
    flags = [
      again(step, row)[0] for step, row in frame.to_dict('index').items()
    ]
    steps = [step for step, x in zip(frame.index, flags) if x.get(ALARM)]
    now[name] = int(steps[0]) if steps else None
    if LOST in frame:
      of_five = frame[LOST].dropna().rolling(alarms.WINDOW).median()
      peaks[name] = float(of_five.max())
    early = frame[(frame.index >= 0) & (frame.index < WITHIN)]
    for signal in SIGNALS:
      if signal in early and early[signal].notna().any():
        means[signal][name] = float(early[signal].mean())
  ever = {name for name, step in named.items() if step is not None}
  soon = {name for name in ever if named[name] < WITHIN}
  return {
    'failed': sorted(failed),
    'named': named,
    'now': now,
    'peaks': peaks,
    # Without a failure there is nothing to name, and only a false alarm to see.
    'holds': failed == soon == ever if failed or ever else None,
    'signals': {
      signal: _separated(known, failed, several)
      for signal, known in means.items()
    },
  }


def _separated(
  means: Mapping[str, float], failed: set[str], several: bool
) -> dict[str, Any]:
  """Whether a threshold tells the failed runs from the others."""
  theirs = [x for name, x in means.items() if name in failed]
  others = [x for name, x in means.items() if name not in failed]
  if not theirs or not others:
    return {'separates': None}  # there is nothing to tell apart
  apart = max(theirs) < min(others) or max(others) < min(theirs)
  out = {
    'failed': [min(theirs), max(theirs)],
    'others': [min(others), max(others)],
    'separates': apart,
  }
  if not several:
    # Of all ways to choose who failed, two lie at an end of a signal's order.
    ways = math.comb(len(means), len(theirs))
    out['by_chance'] = min(2 * len(SIGNALS) / ways, 1.0)
  return out


def conclude(folder: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
  """Adds verdicts and alarms of what is complete to results.json.

  folder: of the sweep. out: of the results.
  """
  arms = figures.collect(ROW, folder)
  runs = {
    name: {seed: own['values']['after'] for seed, own in found['seeds'].items()}
    for name, found in arms.items()
    if name in ARMS
  }
  folders, failed = {}, set()
  for name, seeds in runs.items():
    for seed, values in seeds.items():
      run = f'{name}/{seed}'
      folders[run] = str(folder / 'arms' / run / 'run')
      failed |= {run} if values[HARD] < ZERO else set()
  metrics = {run: read.run(path).metrics for run, path in folders.items()}
  path = out / 'results.json'
  record = json.loads(path.read_text())
  record['verdicts'] = {
    name: verdict(seeds, runs.get(ARMS[0], {})) for name, seeds in runs.items()
  }
  record['alarm'] = {}
  for name in (*runs, ''):
    own = {run: x for run, x in metrics.items() if run.startswith(name)}
    record['alarm'][name or 'all'] = alarm(own, failed & own.keys(), not name)
  records.write_json(path, record)
  shown = {run: x for run, x in folders.items() if run.startswith(ARMS[0])}
  if shown:
    labels.write(shown, str(out / 'labels.json'))
  return record


def main():
  out = pathlib.Path(_OUT.value)
  try:
    rows.run(MODULE, str(out / 'results.json'), by=MODULE)
  finally:
    if (out / 'results.json').exists():
      record = conclude(pathlib.Path(flags.FLAGS.workdir), out)
      for name, found in record['verdicts'].items():
        print(name, {k: v for k, v in found.items() if k != 'before'})
      for name, found in record['alarm'].items():
        print(name, {k: v for k, v in found.items() if k != 'signals'})


if __name__ == '__main__':
  runner.define_flags()
  _OUT = flags.DEFINE_string(
    'out', 'experiments/ttrl/guarded', 'Folder of the results.'
  )
  command.run(main)
