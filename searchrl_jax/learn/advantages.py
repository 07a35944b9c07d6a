"""Advantages of trajectories (`config.algorithm.advantage`).

A config names a function of this module, or any other by its dotted path.
Every function takes

    values: float [B], or per-token values float [B, T], or B arrays (one for
      each segment or token): the last two are summed into a return for each
      trajectory, as GRPO does with outcome rewards (R = sum of r).
    valid: bool [B]; a trajectory that is not is in no statistic and gets 0.
    group_ids: int [B]; equal ids are the trajectories of one question. Groups
      need not be contiguous or of one size: they shrink when a service fails.

then the arrays that it alone needs, each for all B trajectories (not yet cut
into microbatches), then the fields of `config.algorithm.advantage_kw`, by
keyword. These arrays are:

    greedy: float [n_groups], indexed by group id: the return of the policy's
      greedy answer to that question, NaN where a service failed it (`remax`).
    mask: B bool arrays [n], the loss tokens of a trajectory of n tokens, as
      `batching.tokens_of` has them.
    critic: B float arrays [n]: at a loss token, the critic's value of what
      stands before it. Elsewhere anything, NaN included (`gae`).
    delta: B float arrays [n]: log-prob of each loss token by the teacher, less
      that by the policy; 0 without a teacher (learn/teacher.py).
    gold: B `potential.Levels`: what the teacher makes of the golden answer
      before the first turn and after each observation (learn/potential.py).
    structure: the `structure.Structure` of the batch: segments and their
      spans, turns, passages, and labels to group turns by (`turn_normalised`).

It returns float32 [B], which `batching` broadcasts over the loss tokens of a
trajectory, or B float32 arrays [n]. NumPy in float64, so that the result
depends neither on the device nor on the order of the trajectories.

What the config check has to know of a function are attributes of it:

    needs_group = True: it compares a trajectory with others of its question;
      with rollout.group = 1 it would give 0 for ever.
    divides_by_spread = True: it divides by a deviation within a cell, which
      would blow up the noise of a KL in the reward (`algorithm.kl`).
    observes: what it reads of what was found; see `rewards.core`.
    needs, check: see `data.checks.require_needs` and `checks`.
    targets(values, valid, [arrays], *, fields) -> B arrays [n]: what its critic
      learns, from some of its own fields; the default is `lambda_returns`.

`by_cell` compares values within the cells of any partition, groups or others.

A function with `mask` takes values float [B], which the last loss token
earns, or B arrays [n], one for each token. Its steps are the loss tokens
alone: what stands between two of them is skipped, not decayed through, and a
reward given there is earned by the loss token before it. A reward given before
the first one follows from no action and counts for nothing.

A group in which one valid trajectory is left has no baseline: its advantage is
0 for every function that needs a group (Search-R1 takes mean 0 and std 1 there,
so its raw reward pushes it: not kept). A group whose values are all equal gets
exactly 0. A function that compares turns compares those of one trajectory too:
`turn_normalised` of a lone one need not be 0.
"""

from collections.abc import Callable

import numpy as np

from searchrl_jax import lookup
from searchrl_jax.text.structure import Structure

NAMES = (
  'grpo dr_grpo rloo reinforce whitened whitened_tokens reinforce_pp_baseline '
  'lite_ppo remax gae turn_normalised distilled given zero grpo_within'
).split()


def returns(values) -> np.ndarray:
  """float64 [B]: one number for each trajectory (see the module)."""
  if isinstance(values, np.ndarray) and values.dtype != object:
    out = values.astype(np.float64)
    return out if out.ndim == 1 else out.sum(axis=1)
  return np.array([np.sum(v, dtype=np.float64) for v in values], np.float64)


def differ(values: np.ndarray) -> bool:
  """Whether values differ by more than their sums are rounded.

  Rewards are float32: 3 x 1/3 and 2/3 + 1/3 differ in the eighth digit.
  """
  return bool(np.ptp(values) > max(1e-6, 4e-7 * np.abs(values).max()))


def _prepare(values, valid, group_ids):
  valid, group_ids = np.asarray(valid, bool), np.asarray(group_ids)
  return np.where(valid, returns(values), 0.0), valid, group_ids


def by_cell(values, valid, partition, fn: Callable) -> np.ndarray:
  """Applies fn to the valid values of each cell of a partition.

  Args:
    values: float [N], of trajectories or of turns (see `returns`).
    valid: bool [N]; the others are in no statistic and get 0.
    partition: labels [N], or K kinds of them [K, N]: a cell is where all are
      equal. `group_ids` is one; of turns, `[group_ids[structure.owner],
      structure.number]` is another.
    fn: (s, v) -> float [n]. v are the values of a cell and s the same in
      increasing order: a statistic of s does not depend on the order of values.

  Returns:
    float64 [N]; 0 in a cell with one valid value, and where all are equal.
  """
  cells = np.asarray(partition)
  if cells.ndim == 2:
    cells = np.unique(cells, axis=1, return_inverse=True)[1].reshape(-1)
  values, valid, cells = _prepare(values, valid, cells)
  out = np.zeros_like(values)
  for cell in np.unique(cells[valid]):
    own = np.flatnonzero(valid & (cells == cell))
    v = values[own]
    # Equal values differ from each other and from their mean by rounding alone,
    # which a division by a tiny standard deviation would blow up.
    if differ(v):
      out[own] = fn(np.sort(v), v)
  return out


def centred(values, valid, partition) -> np.ndarray:
  """x - mean(x) within the cells of a partition; see `by_cell`."""
  return by_cell(values, valid, partition, lambda s, v: v - s.mean())


def normalised(values, valid, partition, *, eps: float, ddof: int):
  """(x - mean(x)) / (std(x) + eps) within the cells; see `by_cell`."""
  fn = lambda s, v: (v - s.mean()) / (s.std(ddof=ddof) + eps)
  return by_cell(values, valid, partition, fn)


def _whiten(x: np.ndarray, chosen: np.ndarray, eps: float, ddof: int):
  """(x - mean) / (std + eps) over the chosen ones; float32, 0 elsewhere.

  0 where all are equal. Sums are over sorted values: their order cannot show.
  """
  out, s = np.zeros(x.shape, np.float32), np.sort(x[chosen])
  if s.size and differ(s):
    out[chosen] = (x[chosen] - s.mean()) / (s.std(ddof=ddof) + eps)
  return out


def grpo(values, valid, group_ids, *, eps: float = 1e-6, ddof: int = 1):
  """A = (R - mean(R)) / (std(R) + eps) within the group.

  DeepSeekMath, arXiv 2402.03300, section 4.1.2 (no eps there). ddof=1, the
  unbiased standard deviation, and eps 1e-6 are Search-R1's and verl's.
  """
  out = normalised(values, valid, group_ids, eps=eps, ddof=ddof)
  return out.astype(np.float32)


def grpo_within(
  values,
  valid,
  group_ids,
  structure: Structure,
  *,
  label: str,
  eps: float,
  ddof: int,
):
  """`grpo` among the trajectories of a group that have the same label.

  Args:
    values, valid, group_ids, structure: see the module.
    label: 'role' of the trajectory, or a name in `Trajectory.meta`.
    eps, ddof: as in `grpo`.

  Raises:
    ValueError: a trajectory that is valid lacks the label.
  """
  told = structure.trajectories
  labels = [t.role if label == 'role' else t.meta.get(label) for t in told]
  lack = [t.id for t, x, ok in zip(told, labels, valid) if ok and x is None]
  lookup.require(
    not lack,
    f'trajectories {lack[:3]} have no meta[{label!r}], which the sampler has '
    'to set',
    ValueError,
  )
  first = {x: i for i, x in enumerate(dict.fromkeys(labels))}
  cells = [group_ids, [first[x] for x in labels]]
  out = normalised(values, valid, cells, eps=eps, ddof=ddof)
  return out.astype(np.float32)


def dr_grpo(values, valid, group_ids):
  """A = R - mean(R) within the group: no division by the deviation.

  Dr. GRPO, arXiv 2503.20783, equation 3; goes with
  `aggregation = 'sequence_sum'`, which divides by a constant.
  """
  return centred(values, valid, group_ids).astype(np.float32)


def rloo(values, valid, group_ids):
  """A_i = R_i - mean of the others' R = n / (n - 1) (R_i - mean(R)).

  Leave-one-out, arXiv 2402.14740, section 3.3 (Kool et al., 2019).
  """
  fn = lambda s, v: (v - s.mean()) * (len(s) / (len(s) - 1))
  return by_cell(values, valid, group_ids, fn).astype(np.float32)


def reinforce(values, valid, group_ids):
  """A_i = R_i - b_i, b_i the mean of all other R of the batch.

  REINFORCE with a baseline (Williams, "Simple statistical gradient-following
  algorithms for connectionist reinforcement learning", 1992). Its own
  return is not in its baseline, so that the gradient stays unbiased. Groups
  play no part, and one trajectory a question is enough.
  """
  return rloo(values, valid, np.zeros(np.shape(group_ids), int))


def whitened(values, valid, group_ids, *, eps: float, ddof: int):
  """A = (R - mean(R)) / (std(R) + eps) over the whole batch.

  REINFORCE++, arXiv 2501.03262, equation 9, for outcome rewards; over the
  trajectories, where the paper whitens over tokens (`whitened_tokens`).
  Groups play no part.
  """
  values, valid, _ = _prepare(values, valid, group_ids)
  return _whiten(values, valid, eps, ddof)


def reinforce_pp_baseline(values, valid, group_ids, *, eps: float, ddof: int):
  """A = C / (std(C) + eps), C = R - mean(R) within the group, std over all.

  REINFORCE++ with baseline, arXiv 2501.03262. Over trajectories, where verl
  whitens over tokens: here a long answer weighs no more in the deviation than
  a short one. The mean of C over the batch is taken off too; it is 0 but for
  rounding. Rows without another of their question are in no statistic.
  """
  less_mean = centred(values, valid, group_ids)
  valid = np.asarray(valid, bool)
  _, group = np.unique(group_ids, return_inverse=True)
  compared = valid & (np.bincount(group, valid)[group] > 1)
  return _whiten(less_mean, compared, eps, ddof)


def lite_ppo(values, valid, group_ids, *, eps: float, ddof: int):
  """A = (R - mean(R) within the group) / (std(R) over the batch + eps).

  Lite PPO, "Tricks or traps?", arXiv 2508.08221: a question that
  nearly all answers get right has no larger advantages than another one. The
  deviation is that of the raw returns, not of the centred ones
  (`reinforce_pp_baseline`).
  """
  less_mean = centred(values, valid, group_ids)
  values, valid, _ = _prepare(values, valid, group_ids)
  if not less_mean.any():
    return less_mean.astype(np.float32)
  spread = np.sort(values[valid]).std(ddof=ddof)
  return (less_mean / (spread + eps)).astype(np.float32)


def remax(values, valid, group_ids, greedy):
  """A = R - R of the policy's greedy answer to the same question.

  ReMax, arXiv 2310.10505, algorithm 1. Groups of one will do. A question whose
  greedy answer failed (NaN) has no baseline: its trajectories get 0.
  """
  values, valid, group_ids = _prepare(values, valid, group_ids)
  baseline = np.asarray(greedy, np.float64)[group_ids]
  known = valid & ~np.isnan(baseline)
  return np.where(known, values - baseline, 0.0).astype(np.float32)


def lambda_returns(
  values, valid, mask, critic, *, gamma: float, lam: float
) -> list[np.ndarray]:
  """TD(lambda) returns of loss tokens, what a critic is trained towards.

      G_t = r_t + gamma ((1 - lam) V_u + lam G_u)

  u is the loss token after t; past the last one V = G = 0, also where the
  token budget cut a trajectory short. GAE's advantage is G_t - V_t (Schulman
  et al., arXiv 1506.02438, equation 16: G_t - V_t = sum (gamma lam)^l delta).

  Args:
    values, valid, mask, critic: see the module.
    gamma: discount for each loss token. lam: 1 = Monte Carlo, 0 = TD(0).

  Returns:
    B float64 arrays [n], 0 off the loss tokens and in trajectories not valid.
  """
  steps = [
    np.flatnonzero(m) if ok else [] for m, ok in zip(mask, valid, strict=True)
  ]
  longest = max(map(len, steps), default=0)
  # One column more: what follows the last step.
  r, v, g = np.zeros((3, len(steps), longest + 1))
  for i, at in enumerate(steps):
    if len(at):
      r[i, : len(at)] = np.add.reduceat(_earned(values[i], mask[i]), at)
      v[i, : len(at)] = np.asarray(critic[i], np.float64)[at]
  for t in reversed(range(longest)):
    g[:, t] = r[:, t] + gamma * ((1 - lam) * v[:, t + 1] + lam * g[:, t + 1])
  out = [np.zeros(len(m)) for m in mask]
  for i, at in enumerate(steps):
    out[i][at] = g[i, : len(at)]
  return out


def _earned(value, mask) -> np.ndarray:
  """Rewards of the tokens of a trajectory [n], from one for each or for all."""
  value = np.asarray(value, np.float64)
  if value.ndim:
    return value
  out = np.zeros(len(mask))
  out[np.flatnonzero(mask)[-1:]] = value
  return out


def _whiten_tokens(values, mask, valid, eps: float) -> list[np.ndarray]:
  """`_whiten` over the loss tokens of what is valid; float32 [n] each."""
  kept = [np.asarray(m, bool) & ok for m, ok in zip(mask, valid)]
  flat = _whiten(np.concatenate(values), np.concatenate(kept), eps, 0)
  return np.split(flat, np.cumsum([len(m) for m in mask])[:-1])


def whitened_tokens(
  values, valid, group_ids, mask, *, gamma: float, eps: float
):
  """A_t = (G_t - mean(G)) / (std(G) + eps), G_t = sum of gamma^l r_(t+l).

  REINFORCE++, arXiv 2501.03262, token by token: returns to go, whitened
  over all loss tokens of the batch (so a long answer weighs more in the
  statistics). Groups play no part.
  """
  _, valid, _ = _prepare(values, valid, group_ids)
  none = [np.zeros(len(m)) for m in mask]
  found = lambda_returns(values, valid, mask, none, gamma=gamma, lam=1.0)
  return _whiten_tokens(found, mask, valid, eps)


def gae(
  values,
  valid,
  group_ids,
  mask,
  critic,
  *,
  gamma: float,
  lam: float,
  whiten: bool,
  eps: float,
):
  """A_t = sum of (gamma lam)^l delta_(t+l), delta_t = r_t + gamma V_u - V_t.

  Generalised advantage estimation, arXiv 1506.02438, equation 16, over loss
  tokens (u is the one after t). Search-R1 runs it through retrieved tokens
  and whitens over them too, values of the critic there included: not kept.

  Args:
    values, valid, group_ids, mask, critic: see the module.
    gamma, lam: as in `lambda_returns`, whose result minus V this is.
    whiten: to mean 0 and deviation 1 over the loss tokens of the batch, as
      PPO's implementations do. The critic's targets stay as they are.
    eps: added to that deviation.
  """
  _, valid, _ = _prepare(values, valid, group_ids)
  targets = lambda_returns(values, valid, mask, critic, gamma=gamma, lam=lam)
  found = [
    np.where(np.asarray(m, bool) & ok, target - np.asarray(v, np.float64), 0.0)
    for m, ok, target, v in zip(mask, valid, targets, critic)
  ]
  if whiten:
    return _whiten_tokens(found, mask, valid, eps)
  return [x.astype(np.float32) for x in found]


def turn_normalised(
  values,
  valid,
  group_ids,
  mask,
  structure: Structure,
  *,
  gamma: float,
  eps: float,
  ddof: int,
  same_turn: bool,
):
  """A_k = sum of gamma^l z_(k+l), z = (r - mean(r)) / (std(r) + eps).

  r_k is what turn k earned, z compares it with other turns of the question,
  and each loss token of the turn gets A_k. With rewards given at segments, a
  question whose trajectories all earn the same can have a gradient.

  IGPO, arXiv 2510.14967: all turns of a group are normalised together, then
  summed with a discount for each turn. Its reward (the gain in likelihood of
  the golden answer) is not part of this. Its release normalises by position of
  the token and cuts the sum at observations: not kept. What is in the loss of
  an observation gets 0.

  Args:
    values, valid, group_ids, mask, structure: see the module.
    gamma: discount for each turn.
    eps, ddof: as in `grpo`.
    same_turn: compare a turn only with those of its number, which IGPO does
      not: a first search is then measured against first searches. A number
      that one trajectory alone reaches gets z = 0.
  """
  _, valid, group_ids = _prepare(values, valid, group_ids)
  earned = structure.totals([_earned(v, m) for v, m in zip(values, mask)])
  group = group_ids[structure.owner]
  cells = [group, structure.number] if same_turn else group
  z = normalised(earned, valid[structure.owner], cells, eps=eps, ddof=ddof)
  return structure.over_tokens(structure.discounted(z, gamma))


def distilled(
  values,
  valid,
  group_ids,
  delta,
  *,
  scale: float,
  outcome: float,
  eps: float,
  ddof: int,
):
  """A_t = scale delta_t + outcome A, with A of `grpo`.

  With outcome 0 the expected gradient is that of the reverse KL to the teacher,
  without what a token changes for later ones (on-policy distillation). A
  trajectory without a teacher has delta 0.

  Args:
    values, valid, group_ids, delta: see the module.
  """
  whole = outcome * normalised(values, valid, group_ids, eps=eps, ddof=ddof)
  return [
    (ok * (scale * d + a)).astype(np.float32)
    for d, a, ok in zip(delta, whole, np.asarray(valid, bool), strict=True)
  ]


def given(values, valid, group_ids):
  """A = R, for a reward that is an advantage already (`guarded.restrain`)."""
  values, valid, _ = _prepare(values, valid, group_ids)
  return np.where(valid, values, 0.0).astype(np.float32)


def zero(values, valid, group_ids):
  """A = 0: nothing is learned but what the loss has beside it (a teacher)."""
  del values, group_ids
  return np.zeros(len(valid), np.float32)


def _check_distilled(config, fields):
  n, outcome = config.rollout.group, fields['outcome']
  what = (
    f'config.rollout.group={n}: outcome={outcome} compares trajectories of '
  )
  lookup.require(n >= 2 or not outcome, what + 'one question; use 2 or more')


distilled.divides_by_spread = True  # type: ignore[attr-defined]
distilled.check = _check_distilled  # type: ignore[attr-defined]
_divides = (grpo, grpo_within, reinforce_pp_baseline, lite_ppo, turn_normalised)
for _fn in _divides:
  _fn.divides_by_spread = True  # type: ignore[attr-defined]
for _fn in (*_divides, dr_grpo, rloo):
  _fn.needs_group = True  # type: ignore[attr-defined]
