"""Advantages of flat rows, by name (`config.algorithm.advantage`).

Every function takes

    values: float [B], or per-token values float [B, T], or B arrays (one for
      each segment or token): the last two are summed into a return for each
      trajectory, as GRPO does with outcome rewards (R = sum of r).
    valid: bool [B]; a row that is not valid is in no statistic and gets 0.
    group_ids: int [B]; equal ids are the trajectories of one question. Groups
      need not be contiguous or of one size: they shrink when a service fails.

and returns float32 [B]. NumPy in float64, so that the result does not depend
on the device or on the order of the rows. Advantages are broadcast over the
loss tokens of a row in `batching`; a function may also return [B, T].

A group in which one valid row is left has no baseline: its advantage is 0
for every function that needs a group (Search-R1 takes mean 0 and std 1
there, so a lone row is pushed by its raw reward: not kept). A group whose
values are all equal gets exactly 0.
"""

import numpy as np

from searchrl_jax import masked

# Functions that compare a trajectory with others of its question: with
# rollout.group = 1 they would give 0 for ever.
FUNCTIONS = ('grpo', 'dr_grpo', 'rloo', 'whitened')
NEEDS_GROUP = ('grpo', 'dr_grpo', 'rloo')


def returns(values) -> np.ndarray:
  """float64 [B]: one number for each trajectory (see the module)."""
  if isinstance(values, np.ndarray) and values.dtype != object:
    if values.ndim not in (1, 2):
      raise ValueError(f'values must be [B] or [B, T], not {values.shape}')
    out = values.astype(np.float64)
    return out if out.ndim == 1 else out.sum(axis=1)
  return np.array([np.sum(v, dtype=np.float64) for v in values], np.float64)


def _prepare(values, valid, group_ids):
  values = returns(values)
  valid, group_ids = np.asarray(valid, bool), np.asarray(group_ids)
  if not values.shape == valid.shape == group_ids.shape:
    raise ValueError(
      f'advantages: values {values.shape}, valid {valid.shape} and group_ids '
      f'{group_ids.shape} must have one entry for each trajectory'
    )
  bad = np.flatnonzero(valid & ~np.isfinite(values))
  if bad.size:
    raise ValueError(
      f'advantages: the value of row {bad[0]} is {values[bad[0]]}; mark the '
      'row as not valid or mend its reward'
    )
  return np.where(valid, values, 0.0), valid, group_ids


def _by_group(values, valid, group_ids, fn) -> np.ndarray:
  """Applies fn to the valid values of each group with two or more of them."""
  values, valid, group_ids = _prepare(values, valid, group_ids)
  out = np.zeros_like(values)
  for g in np.unique(group_ids[valid]):
    rows = np.flatnonzero(valid & (group_ids == g))
    v = values[rows]
    # Equal values differ from their own mean by rounding alone, which a
    # division by a tiny standard deviation would blow up.
    if len(rows) > 1 and v.max() > v.min():
      out[rows] = fn(np.sort(v), v)
  return out.astype(np.float32)


def grpo(values, valid, group_ids, *, eps: float = 1e-6, ddof: int = 1):
  """A = (R - mean(R)) / (std(R) + eps) within the group.

  DeepSeekMath, arXiv 2402.03300, section 4.1.2 (no eps there). ddof=1, the
  unbiased standard deviation, and eps 1e-6 are Search-R1's and verl's.
  """
  return _by_group(
    values, valid, group_ids,
    lambda s, v: (v - s.mean()) / (s.std(ddof=ddof) + eps),
  )


def dr_grpo(values, valid, group_ids):
  """A = R - mean(R) within the group: no division by the deviation.

  Dr. GRPO, arXiv 2503.20783, equation 3; goes with
  `aggregation = 'sequence_sum'`, which divides by a constant.
  """
  return _by_group(values, valid, group_ids, lambda s, v: v - s.mean())


def rloo(values, valid, group_ids):
  """A_i = R_i - mean of the others' R = n / (n - 1) (R_i - mean(R)).

  Leave-one-out, arXiv 2402.14740, section 3.3 (Kool et al., 2019).
  """
  return _by_group(
    values, valid, group_ids,
    lambda s, v: (v - s.mean()) * (len(s) / (len(s) - 1)),
  )


def whitened(values, valid, group_ids, *, eps: float = 1e-8, ddof: int = 0):
  """A = (R - mean(R)) / (std(R) + eps) over the whole batch.

  REINFORCE++, arXiv 2501.03262, equation 9, for outcome rewards; over the
  trajectories, where the paper whitens over tokens. Groups play no part.
  """
  values, valid, _ = _prepare(values, valid, group_ids)
  v = np.sort(values[valid])
  if not v.size or v[0] == v[-1]:
    return np.zeros(values.shape, np.float32)
  # Statistics of the sorted values: their order cannot show in the sum.
  ones = np.ones(v.shape, bool)
  scale = masked.std(v, ones, ddof=ddof) + eps
  return np.where(valid, (values - masked.mean(v, ones)) / scale, 0.0).astype(
    np.float32
  )
