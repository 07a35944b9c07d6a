"""Signs of collapse in the trajectories of a training step."""

from collections.abc import Callable, Sequence
import math
import statistics

import numpy as np

from searchrl_jax.evaluate import grading
from searchrl_jax.learn.advantages import differ
from searchrl_jax.text.env import SearchEnv
from searchrl_jax.types import Group, Trajectory

_SCORES = (
  'answered parsed valid_format guessed searches copied tokens truncated found '
  'em_found thoughts_complete thoughts_repeated'
).split()


def signs(
  groups: Sequence[Group],
  env: SearchEnv,
  values=None,
  valid=None,
  *,
  match: str,
) -> dict[str, float]:
  """Returns signs of collapse as 'health/NAME' (design 5.15).

  Means over trajectories of the policy, not traces, that did not fail; scores
  are those of `grading.Row`. `think_tokens` counts the policy's tokens in
  thoughts; `end_X` is the share of trajectories with this end; `logp_right` and
  `logp_wrong` are mean log-probs, in nats, of the policy's tokens when the
  engine sampled them, in trajectories with an exact match (without golden
  answers: a positive reward) and in others; `hops=N/searches` is of questions
  with N hops, if there are several N.

  Args:
    groups: B trajectories in total.
    env: reads answers and blocks.
    values: rewards [B], for the share of groups whose rewards are all equal
      but for rounding.
    valid: bool [B], which rewards count; given with values.
    match: config.eval.match, what makes answers equal.
  """
  flat = [t for group in groups for t in group]
  good = [t for t in flat if not (t.failed or t.foreign)]
  out = {'failed': float(sum(t.failed for t in flat))}
  rows = grading.score(good, env, match=match)
  for name in _SCORES:
    known = [getattr(row, name) for row in rows]
    known = [value for value in known if not math.isnan(value)]
    if known:
      out[name] = statistics.fmean(known)
  counts: dict[str, Callable[[Trajectory], float]] = {
    'invalid_actions': lambda t: t.invalid_actions,
    'turns': lambda t: t.turns,
    'think_tokens': _think_tokens,
    'repetition': repetition,
    'end_tokens': lambda t: t.end == 'tokens',
    'end_turns': lambda t: t.end == 'turns',
    'end_eos': lambda t: t.end == 'eos',
  }
  for name, count in counts.items() if good else ():
    out[name] = statistics.fmean(float(count(t)) for t in good)
  for label, part in grading.slices(rows, '').items():
    if '/hops=' in label:
      searches = [row.searches for row in part]
      out[f'{label[1:]}/searches'] = statistics.fmean(searches)
  earned = np.full(len(flat), math.nan)
  if values is not None:
    earned = np.where(valid, values, math.nan)
  earned = [
    value for value, t in zip(earned, flat) if not (t.failed or t.foreign)
  ]
  out |= _logps(good, [_right(*known) for known in zip(rows, earned)])
  if values is not None and groups:
    out['zero_variance'] = _zero_variance(groups, values, valid)
  return {f'health/{name}': float(value) for name, value in out.items()}


def _right(row: grading.Row, reward: float) -> bool | None:
  """Whether a trajectory is right; None if that is not known."""
  value = reward if math.isnan(row.em) else row.em
  return None if math.isnan(value) else bool(value > 0)


def _logps(trajectories, right) -> dict[str, float]:
  """Mean log-probs of the policy's tokens, where it is right and wrong."""
  out = {}
  for name, wanted in (('logp_right', True), ('logp_wrong', False)):
    chosen = [t for t, known in zip(trajectories, right) if known is wanted]
    own = [s for t in chosen for s in t.segments if s.author == 'policy']
    parts = [s.logps for s in own if s.logps is not None and len(s.logps)]
    if parts:
      out[name] = np.concatenate(parts).mean(dtype=np.float64)
  return out


def _think_tokens(trajectory: Trajectory) -> int:
  own = (s for s in trajectory.segments if s.author == 'policy')
  return sum(len(s.ids) for s in own if s.kind == 'think')


def repetition(trajectory: Trajectory, n: int = 4) -> float:
  """Share of the policy's n-grams that occurred before; 0 if there are none.

  n-grams do not span turns: tokens before and after a search are not
  neighbours.
  """
  runs, run = [], 0  # ids of the policy's tokens, index of their turn
  for s in trajectory.segments:
    if s.author == 'policy':
      runs.append((s.ids, np.full(len(s.ids), run)))
    else:
      run += 1
  if sum(len(ids) for ids, _ in runs) < n:
    return 0.0
  ids, run = (np.concatenate(x) for x in zip(*runs))
  # Each n-gram as one integer modulo 2^64. In a trajectory of 10,000 tokens,
  # two different n-grams have the same one with a probability below 1e-11.
  grams = ids = ids.astype(np.uint64)
  for i in range(1, n):
    grams = grams[:-1] * np.uint64(0x9E3779B97F4A7C15) + ids[i:]
  grams = grams[run[: len(run) - n + 1] == run[n - 1 :]]
  return 1.0 - len(np.unique(grams)) / len(grams) if len(grams) else 0.0


def _zero_variance(groups: Sequence[Group], values, valid) -> float:
  """Share of groups of two or more whose valid rewards are all equal."""
  ends = np.cumsum([len(group) for group in groups])[:-1]
  parts = zip(np.split(values, ends), np.split(valid, ends))
  flags = [not differ(v[ok]) for v, ok in parts if sum(ok) > 1]
  return statistics.fmean(flags) if flags else 0.0
