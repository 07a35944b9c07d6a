"""Trajectories -> minibatches of fixed-shape microbatches (`types.Batch`).

A row of a microbatch holds several trajectories, one after another. Rows have
one of config.batch.lengths (a bucket), and a microbatch has equally many in
every bucket: as many of the longest as config.batch.tokens has room for.
Almost all trajectories go into the longest rows; shorter ones take the rest,
so that few computed tokens are padding (`pack`). With
config.batch.prefix_tokens the model runs on a prefix tree of a microbatch's
trajectories, which share a prompt, and often a query and its passages; losses
see the packed rows all the same. The loss tokens of a
microbatch fit a static size (`capacity`), so that the head runs on loss tokens
only and each bucket compiles once. No token is ever dropped.

On a mesh the rows lie in `shards` equal runs (one for each device along data
and fsdp), each with a capacity of its own, so that gathering loss tokens
never crosses devices. config.batch.tokens counts the tokens of one of them.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import itertools
import math
from typing import NamedTuple

import numpy as np

from searchrl_jax import lookup
from searchrl_jax.learn import advantages, objectives
from searchrl_jax.types import (
  Batch,
  Group,
  Lines,
  PrefixTree,
  Rewards,
  Trajectory,
)

PLACES = 8  # trajectories that any row has room for


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
  lookup.require(
    not b.prefix_tokens or b.prefix_tokens >= lengths[-1],
    f'config.batch.prefix_tokens={b.prefix_tokens} is below the last of '
    f'config.batch.lengths={lengths}: a trajectory might not fit; raise it, or '
    'set 0',
  )
  lookup.require(
    not b.prefix_tokens or len(lengths) == 1,
    f'config.batch.lengths={lengths} with prefix_tokens={b.prefix_tokens}: a '
    'tree has rows of one length; give the last one alone',
  )
  n = config.env.max_contexts
  lookup.require(
    n == 1 or not b.prefix_tokens,
    f'config.batch.prefix_tokens={b.prefix_tokens} with env.max_contexts={n}: '
    'a prefix tree has trajectories of one context; set it to 0',
  )
  room, most = capacity(b, lengths[-1]), n * lengths[-1]
  lookup.require(
    n == 1 or most <= room,
    f'config.env.max_contexts={n}: all contexts of a trajectory are in one '
    f'microbatch, with up to {most} tokens in the loss. There is room for '
    f'{room}: raise config.batch.tokens, or loss_fraction',
  )
  a = config.algorithm
  lookup.require(
    1 <= a.minibatches <= config.rollout.questions,
    f'config.algorithm.minibatches={a.minibatches}: between 1 and rollout.'
    f'questions={config.rollout.questions}, as a group is never split',
  )


def rows_of(batch_config, shards: int = 1) -> int:
  """Rows of a microbatch, in every bucket: a multiple of `shards`.

  With a prefix tree, of which many rows can be parts: four times its tokens.
  """
  tokens = 4 * batch_config.prefix_tokens or batch_config.tokens
  return shards * max(1, tokens // batch_config.lengths[-1])


def places_of(batch_config, length: int) -> int:
  """Trajectories that a row of this length holds, at most.

  Enough for trajectories that have the shortest length on average.
  """
  return max(PLACES, length // batch_config.lengths[0])


def capacity(batch_config, length: int) -> int:
  """Loss tokens that one shard of a microbatch holds.

  loss_fraction of its tokens, and never less than one full row, so that a
  microbatch of one row always fits.
  """
  tokens = rows_of(batch_config) * length
  return max(math.ceil(batch_config.loss_fraction * tokens), length)


def bucket_of(lengths: Sequence[int], n: int) -> int:
  """The smallest of the buckets, config.batch.lengths, that holds n tokens.

  Raises:
    ValueError: none does (excluded by `check` for sampled ones).
  """
  known = f'config.batch.lengths={tuple(lengths)}; raise the last one'
  message = f'a sequence of {n} tokens fits none of {known}'
  lookup.require(n <= lengths[-1], message)
  return next(length for length in lengths if n <= length)


class Tokens(NamedTuple):
  """One context of a trajectory as arrays of its own length n."""

  index: int  # of the trajectory, in the flat order of the groups
  ids: np.ndarray  # int32 [n]
  mask: np.ndarray  # bool [n]
  logps: np.ndarray  # float32 [n], NaN where nothing was recorded
  column: int = 0  # tokens of the trajectory's rows before it
  prompt: int = 0  # tokens that the context began with; 0 in the first
  start: int = 0  # tokens of `Trajectory.trained` before the others
  routes: np.ndarray | None = None  # int16 [n, L, k], see `Batch`


def tokens_of(index: int, trajectory: Trajectory) -> list[Tokens]:
  """Joins the segments of each row of `Trajectory.rows`; the mask is `train`.

  The first token of a sequence has no prediction and is never in the loss.

  Raises:
    ValueError: the policy wrote a trained segment without recording log-probs.
  """
  lookup.require(
    not trajectory.failed,
    f"trajectory {trajectory.id} failed (a service's fault) and cannot be "
    'trained on; mark it as not valid',
  )
  for i, s in enumerate(trajectory.trained):
    lookup.require(
      s.logps is not None or not s.train or s.author != 'policy',
      f"trajectory {trajectory.id}: segment {i} is the policy's and in the "
      'loss but has no log-probs; the engine must return them',
    )
  out: list[Tokens] = []
  [mask] = masks([trajectory])
  column = start = 0
  prompts = [0, *(len(c.prompt) for c in trajectory.contexts)]
  routes = [None] * len(prompts)
  # After a sync, what the first version chose is gone.
  known = (s.versions for s in trajectory.segments if s.versions is not None)
  versions = {v for each in known for v in each.tolist()}
  same = trajectory.train_context is None and len(versions) < 2
  if len(trajectory.routes) == len(prompts) and same:
    routes = trajectory.routes
  rows = zip(prompts, trajectory.rows, routes, strict=True)
  for prompt, row, chosen in rows:
    blank = lambda s: np.full(len(s.ids), np.nan)
    logps = [blank(s) if s.logps is None else s.logps for s in row]
    ids = np.concatenate([s.ids for s in row]).astype(np.int32)
    end = start + len(ids) - prompt
    own = np.concatenate([np.zeros(prompt, bool), mask[start:end]])
    logps = np.concatenate(logps).astype(np.float32)
    if chosen is not None:
      more = max(len(ids) - len(chosen), 0)  # behind the last one sampled
      chosen = np.pad(chosen, ((0, more), (0, 0), (0, 0)), constant_values=-1)
      chosen = chosen[: len(ids)]
    out.append(Tokens(index, ids, own, logps, column, prompt, start, chosen))
    column, start = column + len(ids), end
  return out


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
  """Batches the trajectories of a step; see `kept_of` and `make`.

  Raises:
    ConfigError: a trace is among them, and the loss takes no `foreign`.
  """
  ids, kept, counts = kept_of(groups, reward, config)
  flat = [t for group in groups for t in group]
  traces = [t.id for t in flat if t.foreign]
  lookup.require(
    not traces or objectives.takes_foreign(config.algorithm),
    f'config.algorithm.loss={config.algorithm.loss!r} has ratios to what '
    f'sampled a token, and the policy did not sample {traces[:3]}: use a loss '
    "that takes `foreign`, such as 'mixed'",
  )
  n = config.algorithm.minibatches
  how = dict(shards=shards, contexts=config.env.max_contexts)
  minis = make(flat, kept, ids, config.batch, n, seed=seed, **how)
  returns = advantages.returns(reward.value)
  return StepBatch(
    groups, flat, reward, returns, ids, kept, counts, masks(flat), minis
  )


def useful(groups: Sequence[Group], reward: Rewards, config) -> int:
  """Of how many groups a trajectory enters the batch."""
  group_ids, kept, _ = kept_of(groups, reward, config)
  return len(np.unique(group_ids[kept]))


def kept_of(groups: Sequence[Group], reward: Rewards, config):
  """Which of B trajectories enter the batch, and why the others do not.

  Left out are those that are not valid (a failed service, an unusable reward)
  and, with config.algorithm.drop_zero_variance, groups whose valid values are
  all equal but for rounding (no gradient: DAPO, arXiv 2503.14476, section 3.2).

  Returns:
    group_ids [B], kept [B], and counts for the log: `groups`,
    `groups_zero_variance`, `trajectories_invalid`.
  """
  group_ids = np.repeat(np.arange(len(groups)), [len(g) for g in groups])
  values = advantages.returns(reward.value)
  valid = np.asarray(reward.valid, bool)
  of_group = (values[valid & (group_ids == g)] for g in range(len(groups)))
  varies = [len(own) > 1 and advantages.differ(own) for own in of_group]
  kept = valid.copy()
  if config.algorithm.drop_zero_variance:
    kept &= np.array(varies, bool)[group_ids]
  counts = {
    'groups': len(groups),
    'groups_zero_variance': varies.count(False),
    'trajectories_invalid': int((~valid).sum()),
  }
  return group_ids, kept, counts


def split(trajectories, kept, group_ids, minibatches: int, seed) -> list:
  """Splits the kept trajectories into minibatches, groups whole.

  Groups, ordered by question, are permuted by `seed` (an int or a sequence
  of ints: seed, step, epoch) and cut into parts whose numbers of groups
  differ by at most one. Parts left without a group are left out.

  Returns:
    a list of lists of indices into `trajectories`.
  """

  def key(i):  # the order of arrival cannot show
    t = trajectories[i]
    return t.question.id, t.role, t.sample

  order, groups = sorted(np.flatnonzero(kept).tolist(), key=key), {}
  for rank, i in enumerate(order):
    groups.setdefault(group_ids[i], []).append(rank)
  ranks, drawn = list(groups.values()), np.arange(len(groups))
  if minibatches > 1:
    drawn = np.random.default_rng(seed).permutation(drawn)
  return [
    [order[rank] for rank in sorted(r for g in part for r in ranks[g])]
    for part in np.array_split(drawn, minibatches)
    if len(part)
  ]


def empty(
  batch_config,
  length: int,
  shards: int = 1,
  contexts: int = 1,
  routes: tuple[int, int] | None = None,
) -> Batch:
  """A microbatch without a single trajectory, of that many contexts at most.

  routes: layers that have experts, and experts of a token; None: no column.
  """
  shape = B, _ = rows_of(batch_config, shards), length
  places = B * places_of(batch_config, length)
  M, tree = batch_config.prefix_tokens, None
  if M:
    nodes = np.broadcast_to(np.arange(M, dtype=np.int32), (shards, M))
    ids, depths, at = np.zeros((3, shards, M), np.int32)
    at = np.zeros(shape, np.int32)
    tree = PrefixTree(ids, depths, nodes + np.int32(1), at)
  return Batch(
    ids=np.zeros(shape, np.int32),
    starts=np.full(places, length, np.int32),
    lengths=np.zeros(places, np.int32),
    mask=np.zeros(shape, bool),
    behaviour_logps=np.zeros(shape, np.float32),
    advantages=np.zeros(shape, np.float32),
    owner=np.full(places, -1, np.int32),
    tree=tree,
    lines=Lines(*np.zeros((4, places), np.int32)) if contexts > 1 else None,
    routes=np.full((*shape, *routes), -1, np.int16) if routes else None,
  )


def _routes_of(parts: Sequence[Tokens]) -> tuple[int, int] | None:
  """Layers that have experts, and experts of a token, if any part has them."""
  known = (x.routes.shape[1:] for x in parts if x.routes is not None)
  return next(known, None)


def add(b: Batch, row: int, trajectory: Tokens) -> int:
  """Puts a context behind those of a row, which has to have room for it.

  Returns:
    its entry n.
  """
  places = len(b.owner) // len(b.ids)
  first = row * places
  n = first + int((b.owner[first : first + places] >= 0).sum())
  start = b.lengths[first:n].sum()
  b.starts[n], b.lengths[n] = start, len(trajectory.ids)
  b.owner[n] = trajectory.index
  at = row, slice(start, start + len(trajectory.ids))
  mask = trajectory.mask
  b.ids[at], b.mask[at] = trajectory.ids, mask
  b.behaviour_logps[at] = np.where(mask, trajectory.logps, 0.0)
  if trajectory.routes is not None:
    b.routes[at] = trajectory.routes
  return n


def _place(batch_config, units: Sequence[Sequence[Tokens]], shards, buckets):
  """Best fit: each trajectory, of one context, in the row where it leaves the
  least.

  Args:
    units: the contexts of each trajectory, longest first.
    buckets: the lengths of the microbatches.

  Returns:
    the row of each context, counted through all microbatches, or None if one
    finds no room.
  """
  B, S = rows_of(batch_config, shards), shards
  free = np.repeat(buckets, B)
  places = np.repeat([places_of(batch_config, n) for n in buckets], B)
  left = np.repeat([capacity(batch_config, n) for n in buckets], S)
  shard = np.arange(len(free)) // (B // S)
  out = []
  for [part] in units:
    n, loss = len(part.ids), part.mask.sum()
    fits = (free >= n) & (places > 0) & (left[shard] >= loss)
    r = np.where(fits, free, buckets[0] + buckets[-1]).argmin()
    if not fits[r]:
      return None
    free[r] -= n
    places[r] -= 1
    left[shard[r]] -= loss
    out.append([r])
  return out


def _place_whole(
  batch_config, units: Sequence[Sequence[Tokens]], shards, buckets
):
  """`_place` for trajectories of several contexts, each in the first shard of a
  microbatch with room for all of it."""
  B, S = rows_of(batch_config, shards), shards
  free = np.repeat(buckets, B).reshape(-1, B // S)
  own = [places_of(batch_config, n) for n in buckets]
  places = np.repeat(own, B).reshape(free.shape)
  left = np.repeat([capacity(batch_config, n) for n in buckets], S)
  out = []
  for unit in units:
    loss = sum(int(part.mask.sum()) for part in unit)
    for shard in np.flatnonzero(left >= loss):
      room, more, rows = free[shard].copy(), places[shard].copy(), []
      for part in unit:
        fits = (room >= len(part.ids)) & (more > 0)
        r = np.where(fits, room, buckets[0] + buckets[-1]).argmin()
        if not fits[r]:
          break
        room[r] -= len(part.ids)
        more[r] -= 1
        rows.append(shard * (B // S) + r)
      if len(rows) == len(unit):
        free[shard], places[shard] = room, more
        left[shard] -= loss
        break
    else:
      return None
    out.append(rows)
  return out


def _buckets(lengths: Sequence[int], tokens: int) -> list[int]:
  """Lengths, longest first, that make up `tokens` and little more."""
  n, tokens = divmod(tokens, lengths[-1])
  short, rest = [], tokens
  for length in reversed(lengths[:-1]):
    m, rest = divmod(rest, length)
    short += [length] * m
  if rest:
    short.append(lengths[0])
  if tokens and (one := bucket_of(lengths, tokens)) <= sum(short):
    short = [one]
  return [lengths[-1]] * n + short


def pack(
  parts: Sequence[Tokens], batch_config, shards: int = 1, contexts: int = 1
) -> list[Batch]:
  """Trajectories of one minibatch -> microbatches, shortest rows first.

  parts: their contexts, at most `contexts` of each, one after another.

  As few tokens as best fit decreasing finds room in: from the least that
  could do, the rows become more until all trajectories fit.

  Raises:
    ValueError: a trajectory is longer than the last bucket.
  """
  if not parts:
    return []
  if batch_config.prefix_tokens:
    return _pack_trees(parts, batch_config, shards)
  lengths, B = list(batch_config.lengths), rows_of(batch_config, shards)
  sizes = [len(part.ids) for part in parts]
  bucket_of(lengths, max(sizes))
  whole = itertools.groupby(parts, lambda part: part.index)
  units = [[*unit] for _, unit in whole]
  units.sort(key=lambda unit: -sum(len(part.ids) for part in unit))
  place = _place if contexts == 1 else _place_whole
  loss = sum(int(part.mask.sum()) for part in parts)
  places = places_of(batch_config, lengths[-1]) / lengths[-1]
  room = shards * capacity(batch_config, lengths[-1]) / (B * lengths[-1])
  # Of one row of each microbatch, all together.
  tokens = math.ceil(max(sum(sizes), len(parts) / places, loss / room) / B)
  while True:
    buckets = _buckets(lengths, tokens)
    found = place(batch_config, units, shards, buckets)
    if found is not None:
      break
    tokens = sum(buckets) + max(1, sum(buckets) // 256)
  how = shards, contexts, _routes_of(parts)
  out = [empty(batch_config, length, *how) for length in buckets]
  for unit, rows in zip(units, found, strict=True):
    entries = [add(out[r // B], r % B, part) for part, r in zip(unit, rows)]
    lines = out[rows[0] // B].lines
    for n, part in zip(entries if lines else (), unit):
      size = len(lines.line) // shards
      lines.line[n], lines.column[n] = entries[0] % size, part.column
      lines.prompt[n], lines.start[n] = part.prompt, part.start
  return [b for b in reversed(out) if b.lengths.any()]


def _pack_trees(
  parts: Sequence[Tokens], batch_config, shards: int
) -> list[Batch]:
  """The same with a prefix tree for each device.

  In the order of their ids, a trajectory has most in common with the one
  before it, up to where they used other experts. Each goes into the tree, and
  into the first row with room, of the current device; where one of the two is
  full, the next device follows.
  """
  length, M = batch_config.lengths[-1], batch_config.prefix_tokens
  bucket_of(batch_config.lengths, max(len(part.ids) for part in parts))
  rows = rows_of(batch_config)
  most, loss = places_of(batch_config, length), capacity(batch_config, length)
  out: list[Batch] = []
  s, used = shards - 1, M  # as if all were full
  path, last = np.zeros(0, np.int32), parts[0]
  left, free, places = 0, np.zeros(rows, int), np.zeros(rows, int)
  for part in sorted(parts, key=lambda p: p.ids.astype('>i4').tobytes()):
    common = _common(last, part)
    fits = np.flatnonzero((free >= len(part.ids)) & (places > 0))
    full = used + len(part.ids) - common > M or part.mask.sum() > left
    if full or not fits.size:
      s, used, common, left = (s + 1) % shards, 0, 0, loss
      if s == 0:
        how = dict(shards=shards, routes=_routes_of(parts))
        out.append(empty(batch_config, length, **how))
      path, free, places = path[:0], np.full(rows, length), np.full(rows, most)
      fits = np.arange(rows)
    batch, r = out[-1], int(fits[0])
    assert batch.tree is not None
    new = np.arange(used, used + len(part.ids) - common, dtype=np.int32)
    path = np.concatenate([path[:common], new])
    used += len(new)
    batch.tree.ids[s, new] = part.ids[common:]
    batch.tree.depths[s, new] = np.arange(common, len(part.ids))
    batch.tree.ends[s, path] = used
    start = length - free[r]
    batch.tree.at[s * rows + r, start : start + len(path)] = path
    add(batch, s * rows + r, part)
    free[r] -= len(part.ids)
    places[r] -= 1
    left -= int(part.mask.sum())
    last = _with_known(part, last, common)
  return out


def _with_known(part: Tokens, last: Tokens, common: int) -> Tokens:
  """`part` with the experts that attempts before it used at its nodes.

  common: tokens that it has in common with `last`, whose nodes these are.
  """
  if last.routes is None or not common:
    return part
  routes = part.routes
  if routes is None:
    shape = len(part.ids), *last.routes.shape[1:]
    routes = np.full(shape, -1, last.routes.dtype)
  known = np.where(routes[:common] < 0, last.routes[:common], routes[:common])
  routes = np.concatenate([known, routes[common:]])
  return part._replace(routes=routes)


def _common(a: Tokens, b: Tokens) -> int:
  """Length of the longest beginning that two contexts share."""
  n = min(len(a.ids), len(b.ids))
  differ = a.ids[:n] != b.ids[:n]
  if a.routes is not None and b.routes is not None:
    one, other = (np.sort(x.routes[:n], -1) for x in (a, b))
    known = (one >= 0) & (other >= 0)
    differ |= ((one != other) & known).any((1, 2))
  places = np.flatnonzero(differ)
  return int(places[0]) if places.size else n


def make(
  trajectories: Sequence[Trajectory],
  kept,
  group_ids,
  batch_config,
  minibatches: int = 1,
  *,
  shards: int = 1,
  contexts: int = 1,
  seed=0,
) -> list[list[Batch]]:
  """Trajectories -> minibatches of microbatches, advantages still 0.

  Args:
    trajectories: flat, in the order of the groups; `Batch.owner` indexes them.
    kept: bool [B], from `kept_of`. Failed trajectories must not be in it.
    group_ids: int [B].
    batch_config: config.batch.
    minibatches: how many, at most; see `split`.
    shards: devices along (data, fsdp) of the mesh.
    contexts: config.env.max_contexts.
    seed: an int or a sequence of ints, e.g. (config.seed, step, epoch).

  Raises:
    ValueError: a kept trajectory failed, is too long or lacks log-probs.
  """
  how = batch_config, shards, contexts
  return [
    pack([x for i in part for x in tokens_of(i, trajectories[i])], *how)
    for part in split(trajectories, kept, group_ids, minibatches, seed)
  ]


def shares(batches: Sequence[Batch]) -> dict[str, float]:
  """Of a minibatch: the share of computed tokens that are padding, and of its
  tokens that were not computed again (`shared`, with prefix trees)."""
  tokens = sum(int(b.lengths.sum()) for b in batches)
  if batches[0].tree is None:
    return {'padding': 1.0 - tokens / sum(b.ids.size for b in batches)}
  once = sum(int(b.nodes().sum()) for b in batches)
  size = sum(b.tree.ids.size for b in batches if b.tree is not None)
  return {'padding': 1.0 - once / size, 'shared': 1.0 - once / tokens}


def set_advantages(batches: Sequence[Batch], values) -> list[Batch]:
  """The same microbatches with advantages on their loss tokens.

  values: float [B], one for each trajectory, or B arrays of the
  trajectory's own length (one for each token).
  """
  out = []
  for b in batches:
    filled = np.zeros(b.ids.shape, np.float32)
    for r, span, own in b.parts():
      filled[span] = values[r][own] if np.ndim(values[r]) else values[r]
    filled[~b.mask] = 0.0
    out.append(dataclasses.replace(b, advantages=filled))
  return out


def masks(trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
  """Which tokens are in the loss if a trajectory is kept, B bool arrays [n]."""
  out = []
  for t in trajectories:
    lengths = [len(s.ids) for s in t.trained]
    out.append(np.repeat([s.train for s in t.trained], lengths).astype(bool))
    out[-1][:1] = False
  return out


def unpacked(
  minibatches, arrays, masks: Sequence[np.ndarray]
) -> list[np.ndarray]:
  """Arrays [B, T] of microbatches, cut to trajectories: float64 [n] each.

  Args:
    minibatches: of microbatches, as from `make`.
    arrays: one for each microbatch, nested likewise; [B, T, K] gives [n, K].
    masks: of all trajectories; see `masks`.

  Returns:
    one array for each trajectory: 0 off the loss tokens, and all 0 for a
    trajectory that is in no batch.
  """
  more = next((x.shape[2:] for found in arrays for x in found), ())
  out = [np.zeros((len(m), *more)) for m in masks]
  for mini, found in zip(minibatches, arrays, strict=True):
    for b, x in zip(mini, found, strict=True):
      mask = b.mask.reshape(*b.mask.shape, *[1] * len(more))
      x = np.where(mask, np.asarray(x, np.float64), 0.0)
      for r, span, own in b.parts():
        out[r][own] = x[span]
  return out


def packed(minibatches, values: Sequence[np.ndarray], dtype) -> list:
  """What `unpacked` gave, [n, ...] each, as arrays [B, T, ...] again."""
  shape = values[0].shape[1:]

  def one(b: Batch):
    out = np.zeros((*b.ids.shape, *shape), dtype)
    for r, span, own in b.parts():
      out[span] = values[r][own]
    return out

  return [[*map(one, mini)] for mini in minibatches]
