"""What an arm of the arena is compared by, from the folder of its run.

Values by name, 'KIND/SCORE' over the held-out questions of the last evaluation:
KIND is a `Question.source`, `hard` (three hops or more) or `all`. Scores:

  em         exact match; the mean over the samples of config.eval
  found      whether every needed passage was found
  searches   queries; `needed`: those that the question needs (0 if the policy
             has read every fact)
  wasted, repeated   shares of the queries that found no needed fact, or only
             some that were found before (searchrl_jax/worlds/atlas.progress)
  search     whether it searched at all
  thoughts   share of thoughts that are complete and not repeated
  tokens     that the policy wrote
  turns      of the policy

and of training ('run/...'): `em`, exact match in training, the mean over the
steps, which is higher the sooner a policy learns (if it is a part of the
reward); `sampled`, tokens that the policy wrote in all; `collapse`, the step at
which exact match in training had fallen below COLLAPSED x its best for good, or
the number of steps if it never did (the reward where there is no exact match;
rewards of methods differ, and may lie below 0); `seconds` of all steps."""

import collections
from collections.abc import Iterator, Mapping, Sequence
import math
import pathlib
import statistics

import numpy as np

from searchrl_jax import read, sft
from searchrl_jax.evaluate import grading
from searchrl_jax.evaluate import policy as evaluate
from searchrl_jax.run import build
from searchrl_jax.store import records
from searchrl_jax.text.env import SearchEnv
from searchrl_jax.types import SEARCH, SearchResult, Trajectory
from searchrl_jax.worlds import atlas

HARD = 3  # hops, at least
COLLAPSED = 0.5
# Scores by name; see the module.
SCORES = (
  'em found searches needed wasted repeated search thoughts tokens turns'
).split()
TRAINING = ['em', 'sampled', 'collapse', 'seconds']


def measured(config, run: str, out: str) -> dict[str, float]:
  """The values of a run folder (an `Evaluation` of a sweep)."""
  del config
  trained = read.run(run)
  training = of_training(trained.metrics, len(trained.starts))
  return _values(trained, trained, out) | training


def compared(config, run: str, out: str) -> dict[str, float]:
  """As `measured`, with 'before/...' of the first evaluation."""
  trained = read.run(run)
  before = _values(trained, trained, f'{out}/before', min)
  return measured(config, run, out) | prefixed('before', before)


def prefixed(name: str, values: Mapping[str, float]) -> dict[str, float]:
  return {f'{name}/{key}': value for key, value in values.items()}


def evaluated(
  config, fields: Mapping[str, object], run: str, out: str
) -> dict[str, float]:
  """The values of another evaluation of a run, with changed fields."""
  changed = config.copy_and_resolve_references()
  changed.update_from_flattened_dict(dict(fields))
  evaluate.evaluate(changed, run, out)
  return _values(read.run(out), read.run(run), out)


def attempted(config, run: str, out: str) -> dict[str, float]:
  """As `measured`, with 'once/...' where an answer is the last word.

  That attempt has as many tokens as an answer of the other arms.
  """
  changed = config.copy_and_resolve_references()
  if changed.env.max_contexts == 1:
    changed.env.max_tokens //= changed.env.attempts
  sft.one_attempt(changed.env)
  once = evaluated(changed, {}, run, f'{out}/once')
  return measured(config, run, out) | prefixed('once', once)


def on_whole_corpus(config, run: str, out: str) -> dict[str, float]:
  """As `measured`, but evaluated on a corpus that lacks nothing.

  Where the policy was trained without some passages, evaluation on the same
  corpus is limited by what it lacks: that value is 'incomplete/hard/em'.
  """
  whole = evaluated(config, {'source.dials.missing': 0.0}, run, out)
  values = measured(config, run, f'{out}/incomplete')
  return values | whole | {'incomplete/hard/em': values['hard/em']}


def _values(
  found: read.Run, trained: read.Run, out: str, which=max
) -> dict[str, float]:
  """Of the last evaluation that is found; OUT/rows.json has each row's."""
  folder = pathlib.Path(out)
  step = which(found.parts['eval'])
  env = build.environment(trained.config, trained.tokenizer)
  alive = (r.trajectory for r in found.records('eval', [step]))
  rows = [
    (t.question.source, t.question.hops, scores(t, env))
    for t in alive
    if not t.failed
  ]
  folder.mkdir(parents=True, exist_ok=True)
  content = [{'kind': kind, 'hops': hops, **row} for kind, hops, row in rows]
  records.write_json(folder / 'rows.json', content)
  return dict(of_kinds(rows))


def scores(trajectory: Trajectory, env: SearchEnv) -> dict[str, float]:
  """The scores of one trajectory."""
  (row,) = grading.score([trajectory], env)
  question = trajectory.question
  searched = trajectory.calls(SEARCH)
  results = [s for s in searched if isinstance(s, SearchResult)]
  ids = [[p.id for p in s.passages] for s in results]
  worth = atlas.progress(question.supporting, ids)
  made = len(worth)
  recalled = question.meta.get('recalled', ())
  out = dict(
    em=row.em,
    found=row.found,
    searches=row.searches,
    needed=question.hops - sum(recalled),
    wasted=worth.count('wasted') / made if made else math.nan,
    repeated=worth.count('repeated') / made if made else math.nan,
    search=float(made > 0),
    thoughts=row.thoughts_complete * (1 - row.thoughts_repeated),
    tokens=row.tokens,
    turns=float(trajectory.turns),
  )
  return {name: float(value) for name, value in out.items()}


def of_kinds(
  rows: Sequence[tuple[str, int, Mapping[str, float]]],
) -> Iterator[tuple[str, float]]:
  """Means over the questions of each kind, of `hard` and of `all`."""
  parts = collections.defaultdict(list)
  for kind, hops, row in rows:
    for label in (kind, 'all', *(['hard'] if hops >= HARD else [])):
      parts[label].append(row)
  for label, chosen in parts.items():
    for name in SCORES:
      known = [row[name] for row in chosen if not math.isnan(row[name])]
      if known:
        yield f'{label}/{name}', statistics.fmean(known)


def of_training(metrics, starts: int = 1) -> dict[str, float]:
  """Values of training, from a data frame of metrics by step.

  Without `sampled` where a run had several starts by earlier code, of which
  each counted what itself had sampled.
  """
  steps = metrics[metrics.index >= 0]
  matches = [
    name
    for name in steps
    if name.startswith('reward/') and name.endswith('/em')
  ]
  name = 'reward/em' if 'reward/em' in steps else [*matches, 'reward'][0]
  # A step without a valid reward (NaN) says nothing.
  rewards = steps[name].ffill().fillna(0.0).to_numpy()
  out = {'run/em': float(rewards.mean())} if name != 'reward' else {}
  counted = steps.get('rollout/earlier_tokens')
  if starts < 2 or (counted is not None and counted.notna().all()):
    out['run/sampled'] = float(steps['rollout/sampled_tokens'].sum())
  return out | {
    'run/collapse': float(collapse(rewards)),
    'run/seconds': float(steps['time/step'].sum()),
  }


def collapse(rewards: np.ndarray) -> int:
  """The first step from which the reward stays below COLLAPSED x its best.

  Means of three steps, at the start of fewer, are compared: a fall in the first
  steps is one too. The number of steps if there is none. A best of 0 or less is
  no height to fall from.
  """
  n = len(rewards)
  smooth = np.array([rewards[max(i - 2, 0) : i + 1].mean() for i in range(n)])
  best = np.maximum.accumulate(smooth)
  low = (best > 0) & (smooth < COLLAPSED * best)
  lasting = np.flip(np.logical_and.accumulate(np.flip(low)))
  return int(np.argmax(lasting)) if lasting.any() else n
