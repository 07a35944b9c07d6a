"""Trajectories that begin alike, computed once: as if each were alone."""

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import numpy as np
import pytest

from searchrl_jax.devices import sharding
from searchrl_jax.learn import batching
from searchrl_jax.models import decoder, flops
from searchrl_jax.types import Question, Segment, Trajectory
from tests.learn import test_update as base

pytestmark = pytest.mark.slow

CFG = base.CFG
# Three layers, windows within the trajectories.
LOCAL = dataclasses.replace(
  CFG, family='gemma3_text', n_layers=3, window=5, global_every=2
)
LENGTH = 16
KW = {
  'batch.lengths': (LENGTH,),
  'batch.tokens': 32,
  'batch.loss_fraction': 0.5,
  'algorithm.aggregation': 'sequence',
  'algorithm.entropy_coef': 0.01,
}


def branches(rng, depth=0):
  """Ids [n] that share beginnings, as lists: the leaves of a random tree."""
  own = rng.integers(0, 5, int(rng.integers(1, 4))).tolist()
  if depth == 2:
    return [own]
  return [
    own + rest
    for _ in range(int(rng.integers(1, 4)))
    for rest in branches(rng, depth + 1)
  ]


def world(seed):
  """Trajectories of some groups; their group ids and advantages."""
  rng, out, ids = np.random.default_rng(seed), [], []
  for q in range(5):
    for sample, tokens in enumerate(branches(rng)):
      tokens = np.array([q, *tokens, 9], np.int32)
      k = int(rng.integers(1, len(tokens) - 1))
      logps = rng.normal(-3, 0.3, len(tokens) - k).astype(np.float32)
      segments = (
        Segment(tokens[:k], 'prompt', 'other'),
        Segment(tokens[k:], 'policy', 'think', train=True, logps=logps),
      )
      question = Question(f'q{q}', '')
      out.append(Trajectory(question, segments, (), 'answer', sample=sample))
      ids.append(q)
  return out, np.array(ids), rng.normal(size=len(out))


def batches(config, seed, shards=1):
  trajectories, ids, advantages = world(seed)
  kept = np.ones(len(ids), bool)
  [mini] = batching.make(trajectories, kept, ids, config.batch, shards=shards)
  return trajectories, batching.set_advantages(mini, advantages)


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.sampled_from([1, 2]), st.integers(16, 60))
def test_every_token_is_a_node_below_those_before_it(seed, shards, M):
  config = base.config(**KW, **{'batch.prefix_tokens': M})
  trajectories, mini = batches(config, seed, shards)
  seen = []
  for b in mini:
    rows = len(b.ids) // shards
    assert b.mask.reshape(shards, -1).sum(1).max() <= batching.capacity(
      config.batch, LENGTH
    )
    for owner, (row, span) in b.spans():
      seen.append(owner)
      nodes, s = b.tree.at[row, span], row // rows
      ids = np.concatenate([x.ids for x in trajectories[owner].segments])
      np.testing.assert_array_equal(b.tree.ids[s, nodes], ids)
      np.testing.assert_array_equal(
        b.tree.depths[s, nodes], np.arange(len(ids))
      )
      # What the last token sees are the tokens of the trajectory, in order.
      i, every = nodes[-1], np.arange(M)
      visible = (every <= i) & (i < b.tree.ends[s])
      np.testing.assert_array_equal(np.flatnonzero(visible), nodes)
  assert sorted(seen) == list(range(len(trajectories)))
  # Each distinct beginning once, where one tree holds all.
  if len(mini) == shards == 1:
    distinct = set()
    for t in trajectories:
      ids = np.concatenate([x.ids for x in t.segments]).tolist()
      distinct |= {tuple(ids[: n + 1]) for n in range(len(ids))}
    assert mini[0].nodes().sum() == len(distinct)
  found = batching.shares(mini)
  assert 0 <= found['shared'] < 1 and 0 <= found['padding'] < 1


@pytest.mark.long
@pytest.mark.parametrize(
  'cfg, shape',
  [(CFG, None), (LOCAL, None), (CFG, (2, 1, 1)), (LOCAL, (1, 2, 2))],
  ids=['global', 'local', 'global-2x1x1', 'local-1x2x2'],
)
def test_loss_gradient_and_scores_are_those_of_packed_rows(cfg, shape):
  mesh = shape and sharding.make_mesh(
    *shape, devices=jax.devices()[: np.prod(shape)]
  )
  p = decoder.init_params(cfg, jax.random.key(0), scale=0.3)
  found = {}
  for M in (0, 40):
    config = base.config(**KW, **{'batch.prefix_tokens': M})
    u = base.updater(config, cfg=cfg, mesh=mesh)
    _, mini = batches(config, 3, u.shards)
    assert len(mini) > 1 and (M == 0) == (mini[0].tree is None)
    state = u.init(jax.tree.map(lambda x: x.copy(), p))
    scores = u.outputs(state.params, [mini])[0]
    masks = batching.masks(world(3)[0])
    logps = batching.unpacked([mini], [scores], masks)
    grads, sums = jax.device_get(u.grads(state, mini))
    found[M] = grads, sums, np.concatenate(logps)
  (grads, sums, logps), (own, own_sums, own_logps) = found[0], found[40]
  np.testing.assert_allclose(own_logps, logps, atol=1e-5)
  for name in sums:
    np.testing.assert_allclose(own_sums[name], sums[name], rtol=2e-5, atol=1e-6)
  for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(grads), strict=True):
    np.testing.assert_allclose(a, b, atol=2e-5 * max(1.0, np.abs(b).max()))


def test_a_token_changes_no_bit_of_a_branch_without_it():
  config = base.config(**KW, **{'batch.prefix_tokens': 60})
  u = base.updater(config)
  trajectories, mini = batches(config, 3)
  p = u.init(base.params()).params
  before = u.output(p, mini[0])
  b = mini[0]
  paths = [(s, b.tree.at[s].tolist()) for _, s in b.spans()]
  # A token that some branches go on behind, and others are without.
  own = next(
    n
    for _, path in paths
    for n in path[:-1]
    if any(n not in other for _, other in paths)
  )
  ids = b.tree.ids.copy()
  ids[0, own] += 1
  other = dataclasses.replace(b, tree=b.tree._replace(ids=ids))
  changed = u.output(p, other) != before
  assert changed.any()
  for (row, span), path in paths:
    if own not in path:
      assert not changed[row, span].any()


@pytest.mark.parametrize('cfg', [CFG, LOCAL], ids=['global', 'local'])
def test_work_is_that_of_the_nodes(cfg):
  """One trajectory: that of its row. Two that are equal: of one."""
  config = base.config(**KW, **{'batch.prefix_tokens': 40})
  trajectories, ids, _ = world(0)
  plain = base.config(**KW)

  def of(chosen, config):
    kept = np.isin(np.arange(len(ids)), chosen)
    [mini] = batching.make(trajectories, kept, ids, config.batch)
    loss = sum(int(b.mask.sum()) for b in mini)
    head = 6 * cfg.d_model * cfg.vocab_size * loss
    return flops.update_flops(cfg, mini) - head

  assert of([0], config) == pytest.approx(of([0], plain))
  trajectories[1] = dataclasses.replace(trajectories[0], sample=1)
  assert of([0, 1], config) == pytest.approx(of([0], config))


def test_a_tree_below_a_trajectory_is_refused():
  config = base.config(**KW, **{'batch.prefix_tokens': 15})
  with pytest.raises(ValueError, match='prefix_tokens=15 '):
    batching.check(config)


@pytest.mark.long
def test_a_model_of_local_layers_alone():
  """Two layers of a period of six. With windows of 3, a token sees 4 back."""
  cfg = dataclasses.replace(LOCAL, n_layers=2, window=3, global_every=6)
  params = decoder.init_params(cfg, jax.random.key(0))
  ids = np.arange(1, 13, dtype=np.int32)[None]
  other = ids.copy()
  other[0, 0] += 7
  a, b = (
    np.asarray(decoder.hidden_states(params, cfg, x))[0] for x in (ids, other)
  )
  differ = np.abs(a - b).max(-1) > 0
  assert differ.tolist() == [True] * 5 + [False] * 7
