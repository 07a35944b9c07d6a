"""Trajectories -> minibatches of fixed-shape microbatches (`types.Batch`).

A microbatch of the bucket of length T holds `rows` sequences, where rows x T
is about config.batch.tokens; its loss tokens fit a static size (`capacity`),
so that the head runs on loss tokens only and each bucket compiles once. A
row that would not fit opens another microbatch: no token is ever dropped.

On a mesh the rows lie in `shards` equal runs (one for each device along data
and fsdp), each with a capacity of its own, so that gathering loss tokens
never crosses devices.

Units: `rows` are trajectories, `tokens` are ids, `lengths` are tokens.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import NamedTuple

import numpy as np

from searchrl_jax.learn import advantages
from searchrl_jax.run import lookup
from searchrl_jax.types import Batch, Group, Rewards, Trajectory


def check(config) -> None:
  """Refuses sizes that cannot hold every trajectory, before anything loads.

  Raises:
    ValueError: names the field and the fix.
  """
  b = config.batch
  lengths = tuple(b.lengths)
  lookup.require(
    config.env.max_tokens <= lengths[-1],
    f'config.env.max_tokens={config.env.max_tokens} exceeds the last of '
    f'config.batch.lengths={lengths}: a trajectory might fit no bucket; '
    'raise the last length or lower env.max_tokens',
  )
  a = config.algorithm
  lookup.require(
    1 <= a.minibatches <= config.rollout.questions,
    f'config.algorithm.minibatches={a.minibatches}: between 1 and rollout.'
    f'questions={config.rollout.questions}, as a group is never split',
  )


def rows_of(batch_config, length: int, shards: int = 1) -> int:
  """Rows of a microbatch of this length: a multiple of `shards`."""
  rows = max(1, batch_config.tokens // length)
  return max(shards, rows // shards * shards)


def capacity(batch_config, length: int, shards: int = 1) -> int:
  """Loss tokens that one shard of a microbatch holds.

  loss_fraction of its tokens, and never less than one full row, so that a
  microbatch of one row always fits.
  """
  tokens = rows_of(batch_config, length, shards) // shards * length
  return max(math.ceil(batch_config.loss_fraction * tokens), length)


def bucket_of(lengths: Sequence[int], n: int) -> int:
  """The smallest of the buckets, config.batch.lengths, that holds n tokens.

  Raises:
    ValueError: none does (excluded by `check` for sampled ones).
  """
  lookup.require(
    n <= lengths[-1],
    f'a sequence of {n} tokens fits none of config.batch.lengths='
    f'{tuple(lengths)}; raise the last one',
  )
  return next(length for length in lengths if n <= length)


class Row(NamedTuple):
  """One trajectory as arrays of its own length n."""

  index: int  # of the trajectory, in the flat order of the groups
  ids: np.ndarray  # int32 [n]
  mask: np.ndarray  # bool [n]
  logps: np.ndarray  # float32 [n], NaN where nothing was recorded


def row_of(index: int, trajectory: Trajectory, need_logps: bool) -> Row:
  """Joins the segments that the trainer sees; the mask is their `train`.

  The first token of a sequence has no prediction and is never in the loss.

  Raises:
    ValueError: need_logps and the policy wrote a trained segment without
      recording log-probs.
  """
  segments = trajectory.trained
  for i, s in enumerate(segments):
    lookup.require(
      not (need_logps and s.train and s.author == 'policy' and s.logps is None),
      f"trajectory {trajectory.id}: segment {i} is the policy's and in the "
      'loss but has no log-probs; the engine must return them',
    )

  lengths = [len(s.ids) for s in segments]
  mask = np.repeat([s.train for s in segments], lengths).astype(bool)
  mask[:1] = False
  logps = [
    np.full(n, np.nan) if s.logps is None else s.logps
    for s, n in zip(segments, lengths)
  ]
  ids = np.concatenate([s.ids for s in segments]).astype(np.int32)
  return Row(index, ids, mask, np.concatenate(logps).astype(np.float32))


@dataclasses.dataclass(frozen=True)
class StepBatch:
  """The B trajectories of a step, and the minibatches of those that are kept.

  kept: bool [B]; group_ids: int [B]; returns: float64 [B], what each earned;
  masks: B bool arrays [n], which tokens are in the loss if the trajectory is
  kept (one that failed has a mask, and no row in `minibatches`); counts: for
  the log.
  """

  groups: Sequence[Group]
  trajectories: Sequence[Trajectory]  # flat, in the order of the groups
  reward: Rewards
  returns: np.ndarray
  group_ids: np.ndarray
  kept: np.ndarray
  counts: Mapping[str, int]
  masks: Sequence[np.ndarray]
  minibatches: Sequence[Sequence[Batch]]


def of_step(
  groups: Sequence[Group], reward: Rewards, config, *, shards: int, seed
) -> StepBatch:
  """Batches the trajectories of a step; see `kept_of` and `make`."""
  ids, kept, counts = kept_of(groups, reward, config)
  flat = [t for group in groups for t in group]
  minis = make(flat, kept, ids, config, shards=shards, seed=seed)
  returns = advantages.returns(reward.value)
  return StepBatch(
    groups, flat, reward, returns, ids, kept, counts, masks(flat), minis
  )


def kept_of(groups: Sequence[Group], reward: Rewards, config):
  """Which of B trajectories enter the batch, and why the others do not.

  Left out are those that are not valid (a failed service, an unusable reward)
  and, with config.algorithm.drop_zero_variance, groups whose valid values are
  all equal (no gradient: DAPO, arXiv 2503.14476, section 3.2).

  Returns:
    group_ids [B], kept [B], and counts for the log: `groups`,
    `groups_zero_variance`, `trajectories_invalid`.
  """
  group_ids = np.repeat(np.arange(len(groups)), [len(g) for g in groups])
  values = advantages.returns(reward.value)
  valid = np.asarray(reward.valid, bool)
  varies = [
    len(set(values[valid & (group_ids == g)])) > 1 for g in range(len(groups))
  ]
  kept = valid.copy()
  if config.algorithm.drop_zero_variance:
    kept &= np.array(varies, bool)[group_ids]
  counts = {
    'groups': len(groups),
    'groups_zero_variance': varies.count(False),
    'trajectories_invalid': int((~valid).sum()),
  }
  return group_ids, kept, counts


def _order(trajectories, indices):
  """By (question, role, sample): the order of arrival cannot show."""
  t = trajectories
  return sorted(
    indices, key=lambda i: (t[i].question.id, t[i].role, t[i].sample)
  )


def split(trajectories, kept, group_ids, minibatches: int, seed) -> list:
  """Splits the kept trajectories into minibatches, groups whole.

  Groups, ordered by question, are permuted by `seed` (an int or a sequence
  of ints: seed, step, epoch) and cut into parts whose numbers of groups
  differ by at most one. Parts left without a group are left out.

  Returns:
    a list of lists of indices into `trajectories`.
  """
  group_ids = np.asarray(group_ids)
  groups: dict = {}
  for i in _order(trajectories, np.flatnonzero(kept).tolist()):
    groups.setdefault(group_ids[i].item(), []).append(i)
  groups = list(groups.values())
  if minibatches > 1:
    rng = np.random.default_rng(seed)
    groups = [groups[i] for i in rng.permutation(len(groups))]
  parts = np.array_split(np.arange(len(groups)), minibatches)
  return [
    _order(trajectories, [i for g in part for i in groups[g]])
    for part in parts
    if len(part)
  ]


def _fill(batch_config, rows: Sequence[Row], length: int, shards: int):
  """Packs rows of one bucket, in order, into as few microbatches as fit."""
  n_rows = rows_of(batch_config, length, shards)
  room = capacity(batch_config, length, shards)
  out: list[Batch] = []
  # Free rows, and room for loss tokens, in the shards of the last one.
  free, left = np.zeros((2, shards), int)
  for row in rows:
    need = row.mask.sum()
    fits = np.flatnonzero((free > 0) & (left >= need))
    if not len(fits):
      out.append(empty(n_rows, length))
      free[:], left[:], fits = n_rows // shards, room, [0]
    shard = fits[0]
    _set_row(out[-1], (shard + 1) * (n_rows // shards) - free[shard], row)
    free[shard] -= 1
    left[shard] -= need
  return out


def empty(rows: int, length: int) -> Batch:
  """A microbatch without a single trajectory."""
  shape = (rows, length)
  return Batch(
    ids=np.zeros(shape, np.int32),
    lengths=np.zeros(rows, np.int32),
    mask=np.zeros(shape, bool),
    behaviour_logps=np.zeros(shape, np.float32),
    advantages=np.zeros(shape, np.float32),
    rows=np.full(rows, -1, np.int32),
  )


def _set_row(b: Batch, i: int, row: Row) -> None:
  b.lengths[i] = n = len(row.ids)
  b.ids[i, :n] = row.ids
  b.mask[i, :n] = row.mask
  b.behaviour_logps[i, :n] = np.where(row.mask, row.logps, 0.0)
  b.rows[i] = row.index


def pack(rows: Sequence[Row], batch_config, shards: int = 1) -> list[Batch]:
  """Rows of one minibatch -> microbatches, shortest bucket first.

  The rows that do not fill the last microbatch of a bucket move to the next
  bucket when its own last microbatch has room for them: one fewer to compute.

  Raises:
    ValueError: a row is longer than the last bucket.
  """
  buckets = {length: [] for length in batch_config.lengths}
  for row in rows:
    buckets[bucket_of(batch_config.lengths, len(row.ids))].append(row)
  lengths, out = list(buckets), []
  for i, length in enumerate(lengths):
    here = buckets[length]
    size = rows_of(batch_config, length, shards)
    rest = len(here) % size
    if rest and i + 1 < len(lengths):
      bigger = buckets[lengths[i + 1]]
      size = rows_of(batch_config, lengths[i + 1], shards)
      taken = len(bigger) % size
      if taken and taken + rest <= size:
        bigger.extend(here[-rest:])
        here = here[:-rest]
    out.extend(_fill(batch_config, here, length, shards))
  return out


def make(
  trajectories: Sequence[Trajectory],
  kept,
  group_ids,
  config,
  *,
  shards: int = 1,
  seed=0,
  supervised: bool = False,
) -> list[list[Batch]]:
  """Trajectories -> minibatches of microbatches, advantages still 0.

  Args:
    trajectories: flat, in the order of the groups; `Batch.rows` index them.
    kept: bool [B], from `kept_of`. Failed trajectories must not be in it.
    group_ids: int [B].
    config: reads config.batch and config.algorithm.minibatches.
    shards: devices along (data, fsdp) of the mesh.
    seed: an int or a sequence of ints, e.g. (config.seed, step, epoch).
    supervised: one minibatch, for which the engine's log-probs need not be
      there.

  Raises:
    ValueError: a kept trajectory failed, is too long or lacks log-probs.
  """
  for i in np.flatnonzero(kept):
    lookup.require(
      not trajectories[i].failed,
      f"trajectory {trajectories[i].id} failed (a service's fault) and "
      'cannot be trained on; mark it as not valid',
    )
  minibatches = 1 if supervised else config.algorithm.minibatches
  out = []
  for part in split(trajectories, kept, group_ids, minibatches, seed):
    rows = [row_of(i, trajectories[i], not supervised) for i in part]
    out.append(pack(rows, config.batch, shards))
  return out


def set_advantages(batches: Sequence[Batch], values) -> list[Batch]:
  """The same microbatches with advantages on their loss tokens.

  values: float [B], one for each trajectory, or B arrays of the
  trajectory's own length (one for each token).
  """
  out = []
  for b in batches:
    filled = np.zeros(b.ids.shape, np.float32)
    for i, r in enumerate(b.rows):
      if r >= 0:
        filled[i, : b.lengths[i]] = values[r]
    filled[~b.mask] = 0.0
    out.append(dataclasses.replace(b, advantages=filled))
  return out


def masks(trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
  """Which tokens are in the loss if a trajectory is kept, B bool arrays [n]."""
  return [row_of(i, t, False).mask for i, t in enumerate(trajectories)]


def rows(minibatches, arrays, masks: Sequence[np.ndarray]) -> list[np.ndarray]:
  """Arrays [B, T] of microbatches, cut to trajectories: float64 [n] each.

  Args:
    minibatches: of microbatches, as from `make`.
    arrays: one for each microbatch, nested likewise.
    masks: of all trajectories; see `masks`.

  Returns:
    one array for each trajectory: 0 off the loss tokens, and all 0 for a
    trajectory that is in no batch.
  """
  out = [np.zeros(len(m)) for m in masks]
  for mini, found in zip(minibatches, arrays, strict=True):
    for b, x in zip(mini, found, strict=True):
      x = np.where(b.mask, np.asarray(x, np.float64), 0.0)
      for i, r in enumerate(b.rows):
        if r >= 0:
          out[r][:] = x[i, : len(out[r])]
  return out


def plan(config, shards: int = 1) -> Mapping[str, int | tuple]:
  """The arithmetic of one step: prompts -> trajectories -> updates.

  Microbatches are bounds: the least, if every trajectory fits the shortest
  bucket, and the most by length, if every one needs the longest. More loss
  tokens than `loss_fraction` of a microbatch open further ones.
  """
  a, b, r = config.algorithm, config.batch, config.rollout
  largest = math.ceil(r.questions / a.minibatches) * r.group
  rows = [rows_of(b, length, shards) for length in b.lengths]
  return {
    'questions': r.questions,
    'trajectories_per_question': r.group,
    'trajectories': r.questions * r.group,
    'minibatches': a.minibatches,
    'trajectories_per_minibatch': largest,
    'microbatch_shapes_rows_x_tokens': tuple(zip(rows, b.lengths)),
    'microbatch_loss_tokens': tuple(
      capacity(b, length, shards) * shards for length in b.lengths
    ),
    'microbatches_per_update_least': math.ceil(largest / rows[0]),
    'microbatches_per_update_most': math.ceil(largest / rows[-1]),
    'updates_per_step': a.minibatches * a.epochs,
    'shards': shards,
  }
