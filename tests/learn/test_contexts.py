"""How a trajectory falls into rows changes no loss and no gradient."""

import dataclasses
import functools
import json

import jax
from ml_collections import ConfigDict
import numpy as np
import pytest

from searchrl_jax.learn import batching, depth, objectives, optim, update
from searchrl_jax.lookup import ConfigError
from searchrl_jax.types import Context
from tests.learn import test_update
from tests.learn.test_update import CFG, world

pytestmark = pytest.mark.slow

MOST = 3


def config(**kw):
  c = test_update.config(**kw)
  c.batch.tokens = 128
  return c


def split(trajectory, rng):
  """The same trajectory with the whole history as the prompt of contexts."""
  ids = np.concatenate([s.ids for s in trajectory.segments])
  first = len(trajectory.segments[0].ids)
  starts = rng.integers(first, len(ids), rng.integers(0, MOST))
  contexts = [Context(int(n), ids[:n], 'test') for n in sorted({*starts})]
  return dataclasses.replace(trajectory, contexts=tuple(contexts))


@functools.cache
def updater(fields: str, contexts: int):
  c = ConfigDict(json.loads(fields))
  return update.Updater(
    CFG,
    c.batch,
    temperature=1.0,
    objective=objectives.policy(c),
    tx=optim.make(c.optim, 100),
    contexts=contexts,
  )


def gradient(c, trajectories, ids, advantages, contexts, old):
  """Loss, its gradient and metrics; old: noise for each trajectory's tokens."""
  u = updater(c.to_json(sort_keys=True), contexts)
  kept = np.ones(len(trajectories), bool)
  [mini] = batching.make(trajectories, kept, ids, c.batch, contexts=contexts)
  params = test_update.params()
  logps = batching.unpacked(
    [mini], [u.outputs(params, [mini])[0]], batching.masks(trajectories)
  )
  shifted = [x + noise for x, noise in zip(logps, old)]
  rows = [b.advantages for b in batching.set_advantages(mini, shifted)]
  filled = batching.set_advantages(mini, advantages)
  grads, sums = u.grads(u.init(update.copy(params)), filled, rows, rows)
  return jax.device_get((grads, sums)), logps, mini


@pytest.mark.long
@pytest.mark.parametrize(
  'fields',
  [
    dict(aggregation='token'),
    dict(aggregation='sequence'),
    dict(aggregation='sequence_sum', epochs=2),
    dict(aggregation='sequence', ratio='sequence', epochs=2),
    dict(aggregation='token', ratio='product', epochs=2),
    dict(aggregation='sequence', tis='sequence', kl='loss', kl_coef=0.1),
  ],
)
def test_a_trajectory_may_be_cut_anywhere(fields):
  c = config(**{f'algorithm.{k}': v for k, v in fields.items()})
  rng = np.random.default_rng(0)
  whole, ids, _ = world()
  parts = [split(t, rng) for t in whole]
  assert max(len(t.contexts) for t in parts) == MOST - 1
  lengths = [len(t) for t in whole]
  advantages = [rng.normal(size=n).astype(np.float32) for n in lengths]
  old = [0.1 * rng.normal(size=n) for n in lengths]
  (a, sums), logps, _ = gradient(c, whole, ids, advantages, 1, old)
  (b, more), again, mini = gradient(c, parts, ids, advantages, MOST, old)
  # Packed otherwise, and each token after all of its history.
  for x, y in zip(logps, again, strict=True):
    np.testing.assert_allclose(x, y, atol=1e-6)
  assert sum(int((b.owner >= 0).sum()) for b in mini) > len(whole)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
  for name, value in sums.items():
    again, deep = more[name], name.endswith(depth.SUFFIXES)
    if deep:  # deciles alone: a turn ends where its context does
      value, again = value[:, 0], again[:, 0]
    atol = deep * 1e-5  # a bin may have one token, with hardly a difference
    np.testing.assert_allclose(value, again, 1e-5, atol, err_msg=name)


def test_one_context_is_packed_as_ever():
  whole, ids, advantages = world(1)
  kept = np.ones(len(whole), bool)
  [a] = batching.make(whole, kept, ids, config().batch)
  [b] = batching.make(whole, kept, ids, config().batch, contexts=MOST)
  arrays = lambda mini: sum(int(x.mask.sum()) for x in mini)
  assert arrays(a) == arrays(b)
  for batch in b:
    line = batch.lines.line[batch.owner >= 0]
    assert len({*line}) == len(line)  # each in a line of its own


def test_contexts_of_a_trajectory_stay_in_one_shard():
  rng = np.random.default_rng(2)
  whole, ids, _ = world(2, questions=8)
  parts = [split(t, rng) for t in whole]
  c = config()
  [mini] = batching.make(
    parts, np.ones(len(parts), bool), ids, c.batch, shards=2, contexts=MOST
  )
  shards: dict[int, set] = {}
  for n, b in enumerate(mini):
    half = len(b.owner) // 2
    for entry in np.flatnonzero(b.owner >= 0):
      shards.setdefault(b.owner[entry], set()).add((n, entry // half))
  assert len(shards) == len(parts)
  assert all(len(found) == 1 for found in shards.values())


def test_a_microbatch_without_room_is_refused():
  c = config(**{'env.max_contexts': 3})
  batching.check(c)
  c.batch.tokens = 32
  with pytest.raises(ConfigError, match='config.batch.tokens'):
    batching.check(c)
  c.batch.prefix_tokens = 64
  with pytest.raises(ConfigError, match='prefix_tokens'):
    batching.check(c)
