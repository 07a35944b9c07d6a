"""What the experiment found: results.json, hits.json and curves.png.

results.json
  environment (of the report), vocabulary (entries of the model that ran)
  warm   name -> seed -> {seconds, commit}
  arms   [{arm, seed, set, evaluation, n, em, em_interval, f1, f1_interval,
         searches, found, em_found, [pass@8], steps, seconds, commit,
         vocabulary}]; steps and seconds of RL, 0 without it (`warm` has
         those of supervised training); set
         'dev_short': the questions of 'dev' with a short answer that stands
         early in their passage. Of arms with several seeds, only seed 0 has
         evaluations but 'after' and 'sampled'
  gains  [{arm, start, evaluation, seeds, n, before, gain, interval, wins,
         losses}] on 'dev', or what TTRL was asked of it ('asked') or not
         ('after'); before: exact match of the start
  curves arm -> seed -> metric -> [[step, value]]
  bars   [{name, value, low, bar, holds}]
hits.json
  ids, and for each arm/seed/evaluation of them a string of 0 and 1: whether
  the answer to the question at this place of ids matched exactly (-: not asked)

With --keep, runs that these files have and the working folder has not stay in
them, so that parts of the experiment can be measured in several places: of one
model, with one vocabulary, and of configs that are the same.

Intervals are 95 %, percentile bootstrap over questions; those of gains are of
the differences of each question, averaged over seeds first.
"""

from collections.abc import Mapping, Sequence
import json
import pathlib
from typing import Any

import numpy as np

from experiments import common
from experiments.gemma import questions
from experiments.gemma.rows import HINTS, TRAINED
from searchrl_jax import lookup, schema
from searchrl_jax.data import core as data
from searchrl_jax.evaluate import files, grading
from searchrl_jax.rewards import scores
from searchrl_jax.store import records
from searchrl_jax.sweep import core, figures, stages

RESAMPLES = 10_000
Hits = Mapping[str, float]  # question -> exact match, the mean of its samples
Marks = dict[
  tuple[str, str], dict[str, Hits]
]  # arm, evaluation -> seed -> hits
SEEDS = 2  # of the trained arms
# (trained arm, start, evaluation, gain of exact match that is expected)
GAINS = (
  ('grpo_hesitant', 'hesitant', 'after', 0.08),
  ('grpo_hesitant', 'hesitant', 'sampled', 0.08),
  ('grpo_good', 'good', 'after', 0.03),
)
# Without what they search, policies are expected to know at most this.
BLIND = 0.05


def complete(sweep: core.Sweep, workdir: pathlib.Path):
  """(arm, case, evaluation, its folder) of all that is evaluated."""
  for arm in sweep.arms:
    for folder in sorted((workdir / 'arms' / arm.name).glob('*')):
      if sweep.purpose(arm, folder.name) != core.REPORT:
        continue
      # Refuses a run with another config.
      stages.done(sweep, f'arms/{arm.name}/{folder.name}', workdir)
      for name in arm.evaluations:
        if (folder / name / 'values.json').exists():
          yield arm, folder.name, name, folder / name


def hits(folder: pathlib.Path, evaluation: str = 'eval') -> dict[str, float]:
  """Exact match by question."""
  rows = files.read_rows(str(folder), evaluation)
  return {q: em for (_, q), em in grading.by_question(rows, 'em').items()}


def short_dev() -> set[str]:
  """Ids of 'dev_short'."""
  found = data.resolve('qa_dev.jsonl.gz', schema.base().data)
  folder = data.data_dir(schema.base().data)
  return {q.id for q in questions.load(found, folder, short=True)}


def mean(values: Sequence[float]) -> scores.Interval:
  return scores.bootstrap(values, resamples=RESAMPLES, seed=0)


def entries(arm: core.Arm, case: str, name: str, folder, short) -> list[dict]:
  """The entries of `arms` for one evaluation: one of each set and control."""
  values = json.loads((folder / 'values.json').read_text())
  if not values:  # only seed 0 has this evaluation
    return []
  rows = json.loads((folder / files.MANIFEST).read_text())
  done = json.loads((folder.parent / 'done.json').read_text())
  seconds = json.loads((folder.parent / 'seconds.json').read_text())
  (where,) = rows['sets']
  out = []
  for label in ('eval', 'shuffled', 'random', 'empty', 'no_search'):
    if f'{label}/em' not in values:
      continue
    parts = {where: None}
    if where == 'dev':
      parts['dev_short'] = short
    for part, ids in parts.items():
      kept = [
        row
        for row in files.read_rows(str(folder), label)
        if ids is None or row.question in ids
      ]
      entry: dict[str, Any] = {
        'arm': arm.name,
        'seed': int(case),
        'set': part,
        'evaluation': name if label == 'eval' else label,
      }
      for score in ('em', 'f1', 'searches', 'found', 'em_found'):
        found = mean([*grading.by_question(kept, score).values()])
        entry |= {'n': found.n} if score == 'em' else {}
        entry[score] = None if np.isnan(found.mean) else round(found.mean, 4)
        if score in ('em', 'f1'):
          ends = [round(found.low, 4), round(found.high, 4)]
          entry[f'{score}_interval'] = ends
      if f'{label}/pass@8' in values and ids is None:
        entry['pass@8'] = values[f'{label}/pass@8']
      entry['steps'] = done['config']['train']['steps'] if arm.train else 0
      entry['seconds'] = round(seconds.get('train', 0.0))
      entry['commit'] = done['commit']
      out.append(entry)
  return out


def chosen(name: str, arms: Sequence[dict]) -> str:
  """Of the arms NAME_*, that with the most exact matches on 'tune'."""
  of = [a for a in arms if a['set'] == 'tune' and a['arm'].startswith(name)]
  return max(of, key=lambda a: a['em'])['arm'] if of else name


def gain(ours: Sequence[Hits], theirs: Sequence[Hits]) -> dict[str, Any]:
  """Of the first against the second, each a run per seed, by question."""
  runs = (*ours, *theirs)
  ids = sorted(set.intersection(*(set(run) for run in runs)))
  of = lambda runs: np.array([[run[i] for i in ids] for run in runs]).mean(0)
  before = of(theirs)
  apart = of(ours) - before
  found = mean(apart.tolist())
  return {
    'seeds': len(ours),
    'n': len(ids),
    'before': round(float(before.mean()), 4),
    'gain': round(found.mean, 4),
    'interval': [round(found.low, 4), round(found.high, 4)],
    'wins': int((apart > 0).sum()),
    'losses': int((apart < 0).sum()),
  }


def judge(gains: Sequence[dict], arms: Sequence[dict]) -> list[dict]:
  """The bars; one whose arms are not complete has no value.

  A gain holds if also the low end of its interval is above 0.
  """
  out = []

  def above(name: str, found: Mapping[str, Any] | None, bar: float) -> None:
    judged = common.bar(name, found and found['gain'], bar)
    if found:
      low, _ = found['interval']
      judged |= {'low': low, 'holds': judged['holds'] and low > 0}
    out.append(judged)

  known = {
    (g['arm'], g['start'], g['evaluation']): g
    for g in gains
    if g['seeds'] == SEEDS
  }
  for *names, bar in GAINS:
    above('{} - {} ({})'.format(*names), known.get(tuple(names)), bar)
  over = [known.get((arm, 'rag_few_shot', 'after')) for arm in TRAINED]
  # Of two, and the interval is that of the better one alone.
  best = max(over, key=lambda g: g['gain']) if all(over) else None
  above('the better GRPO - rag_few_shot', best, 0.0)
  for control in ('no_search', 'random'):
    found = {
      a['arm']: a['em']
      for a in arms
      if (a['evaluation'], a['set']) == (control, 'dev') and a['arm'] in TRAINED
    }
    most = max(found.values()) if len(found) == len(TRAINED) else None
    name = f'{control}: exact match'
    out.append(common.bar(name, most, BLIND, at_most=True))
  return out


def earlier(out: pathlib.Path | None, vocabulary: int) -> tuple[dict, Marks]:
  """What results.json and hits.json of `out` have, if it is there.

  Raises:
    ConfigError: they have runs of a model with another vocabulary.
  """
  marks: Marks = {}
  if out is None or not (out / 'results.json').exists():
    return {'warm': {}, 'arms': [], 'curves': {}}, marks
  known = json.loads((out / 'results.json').read_text())
  others = {a['vocabulary'] for a in known['arms']} - {vocabulary}
  lookup.require(
    not others,
    f'--keep: {out} has runs of models with {sorted(others)} vocabulary '
    f'entries, this one has {vocabulary}; give another --out',
  )
  ids, *runs = json.loads((out / 'hits.json').read_text()).items()
  for name, row in runs:
    arm, case, evaluation = name.split('/')
    run = {i: float(x) for i, x in zip(ids[1], row) if x != '-'}
    marks.setdefault((arm, evaluation), {})[case] = run
  return known, marks


def compare(arms: Sequence[dict], marks: Marks) -> list[dict]:
  """The gains: of trained arms, of what else was trained, over baselines."""
  starts = {'lora_good': 'good', 'ttrl': 'good', 'zerosearch': 'good'}
  pairs = [*starts.items(), ('ssrl', 'own'), ('ssp', 'roles')]
  fine_tuned = chosen('rag_fine_tuned', arms)
  for arm, start in TRAINED.items():
    more = chosen(f'more_{start}', arms)
    pairs += [(arm, start), (more, start)]
    pairs += [(arm, other) for other in (more, 'rag_few_shot', fine_tuned)]
  methods = sorted({arm for arm, _ in marks if arm.startswith('method_')})
  pairs += [(arm, 'hinted') for arm in methods]
  pairs += [(arm, 'method_grpo') for arm in methods if arm != 'method_grpo']
  compared = [(*pair, e, e) for pair in pairs for e in ('after', 'sampled')]
  # Its questions are a part of those that the start was asked.
  compared.append(('ttrl', 'good', 'asked', 'after'))
  compared.append(('ssrl', 'own', 'real', 'real'))
  told, *others = HINTS
  compared += [('hinted', 'hinted', told, other) for other in others]
  gains = []
  for arm, start, evaluation, before in compared:
    two = marks.get((arm, evaluation)), marks.get((start, before))
    if all(two):
      ours, theirs = two
      # A run is compared with its own start, where that has a seed too.
      own = [theirs[case] for case in ours if case in theirs]
      own = own if len(own) == len(ours) else [*theirs.values()]
      of = f'{start} {before}' if arm == start else start
      named = {'arm': arm, 'start': of, 'evaluation': evaluation}
      gains.append(named | gain([*ours.values()], own))
  return gains


def plot(sweep: core.Sweep, record: Mapping, path: pathlib.Path) -> None:
  """The curves of GRPO, on 200 of the tuning questions."""
  arms: dict[str, dict] = {
    arm: {'seeds': {case: {'curve': x} for case, x in runs.items()}, 'mean': {}}
    for arm in TRAINED
    if (runs := record['curves'].get(arm))
  }
  if arms:
    figures.plot(sweep.curves, arms, path)


def write(
  sweep: core.Sweep,
  workdir,
  out: pathlib.Path,
  about,
  short: set[str],
  keep: bool = False,
) -> dict:
  """Writes the three files to `out`; returns the content of results.json.

  about: environment and vocabulary. short: the ids of 'dev_short'. keep:
  whether other runs that they have stay in them.
  """
  record, marks = earlier(out if keep else None, about['vocabulary'])
  arms: list[dict] = []
  curves = record['curves']
  done = list(complete(sweep, workdir))
  for arm, case, *_ in done:  # nothing stays of an earlier run of a seed
    for (name, _), runs in marks.items():
      if name == arm.name:
        runs.pop(case, None)
  for arm, case, name, folder in done:
    found = entries(arm, case, name, folder, short)
    if arm.train:
      of = curves.setdefault(arm.name, {})
      of[case] = figures.curve(folder.parent / 'run', sweep.curves)
    arms += [entry | {'vocabulary': about['vocabulary']} for entry in found]
    told = name in ('after', 'sampled', 'gold', 'asked', 'real', *HINTS)
    if told and found:
      marks.setdefault((arm.name, name), {})[case] = hits(folder)
  here = {(a['arm'], a['seed']) for a in arms}
  arms += [a for a in record['arms'] if (a['arm'], a['seed']) not in here]
  order = {arm.name: n for n, arm in enumerate(sweep.arms)}
  arms.sort(key=lambda a: (order.get(a['arm'], len(order)), a['seed']))
  gains = compare(arms, marks)
  record = {
    **about,
    'warm': record['warm'] | figures.starts(sweep, workdir),
    'arms': arms,
    'gains': gains,
    'curves': curves,
    'bars': judge(gains, arms),
  }
  records.write_json(out / 'results.json', record)
  ids = sorted(set().union(*(h for x in marks.values() for h in x.values())))
  rows = {
    '/'.join((arm, case, evaluation)): ''.join(
      '-' if i not in run else str(round(run[i])) for i in ids
    )
    for (arm, evaluation), runs in marks.items()
    for case, run in runs.items()
  }
  records.write_json(out / 'hits.json', {'ids': ids, **rows})
  plot(sweep, record, out / 'curves.png')
  return record


def show(record: Mapping[str, Any]) -> str:
  """The arms on 'dev', what hints are worth, the gains, the bars, as tables."""

  def line(entry, shown):
    cells = {k: entry[k] for k in shown.split() if entry.get(k) is not None}
    return {
      k: '{:.3f} to {:.3f}'.format(*v) if isinstance(v, list) else v
      for k, v in cells.items()
    }

  scored = 'arm seed evaluation em em_interval f1 searches found em_found'
  gained = 'arm start evaluation seeds n before gain interval wins losses'
  tables = (
    [line(a, scored) for a in record['arms'] if a['set'] == 'dev'],
    [line(a, scored) for a in record['arms'] if a['evaluation'] in HINTS],
    [line(g, gained) for g in record['gains']],
    record['bars'],
  )
  return '\n\n'.join(common.table(rows) for rows in tables if rows)
