"""Batches hold every loss token once, whatever the order of arrival."""

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from searchrl_jax import schema
from searchrl_jax.aot import costs
from searchrl_jax.learn import batching
from searchrl_jax.types import Question, Rewards, Segment, Trajectory


def config(**kw):
  c = schema.base()
  c.batch.lengths, c.batch.tokens, c.env.max_tokens = (8, 16, 32), 64, 32
  for k, v in kw.items():
    c.update_from_flattened_dict({k: v})
  return c


def trajectory(question, sample, rng, n=None, end='answer'):
  """prompt | policy | observation | policy; ids tell who wrote them."""
  n = int(rng.integers(6, 33)) if n is None else n
  a = int(rng.integers(1, n - 4))
  b = int(rng.integers(1, n - a - 2))
  c = int(rng.integers(0, n - a - b))
  d = n - a - b - c

  def policy(m):
    return Segment(
      rng.integers(10, 50, m).astype(np.int32),
      'policy',
      'think',
      train=True,
      logps=-rng.random(m).astype(np.float32),
      versions=np.full(m, 3, np.int32),
    )

  segments = (
    Segment(np.ones(a, np.int32), 'prompt', 'other'),
    policy(b),
    Segment(np.full(c, 2, np.int32), 'environment', 'information'),
    policy(d),
  )
  return Trajectory(Question(question, 'x'), segments, (), end, sample=sample)


def world(seed, questions=5, group=3):
  rng = np.random.default_rng(seed)
  ts = [
    trajectory(f'q{q}', s, rng) for q in range(questions) for s in range(group)
  ]
  return ts, np.repeat(np.arange(questions), group)


def contents(batches):
  """index of a trajectory -> (ids, mask, logps) of its own length."""
  out = {}
  for b in batches:
    held = np.zeros(b.ids.shape, bool)
    for r, at in b.spans():
      assert r not in out and not held[at].any() and not b.mask[at][0]
      held[at] = True
      arrays = b.ids, b.mask, b.behaviour_logps
      out[r] = tuple(x[at].tobytes() for x in arrays)
    for x in (b.ids, b.mask, b.behaviour_logps):
      assert not x[~held].any()
    assert (np.diff(held.astype(int)) <= 0).all()  # one after another
    none = b.owner < 0
    assert (b.starts[none] == b.ids.shape[1]).all() and not b.lengths[
      none
    ].any()
    starts = b.starts.reshape(len(b.ids), -1)
    assert (np.diff(starts) >= 0).all()
  return out


@settings(max_examples=20, deadline=None)
@given(
  st.integers(0, 10**6),
  st.sampled_from([1, 2, 4]),
  st.sampled_from([1, 2, 3]),
  st.sampled_from([0.1, 0.5, 1.0]),
)
def test_every_token_once(seed, shards, minibatches, fraction):
  ts, groups = world(seed)
  c = config(**{'batch.loss_fraction': fraction})
  made = batching.make(
    ts,
    np.ones(len(ts), bool),
    groups,
    c.batch,
    minibatches=minibatches,
    shards=shards,
  )
  assert len(made) == minibatches
  seen = {}
  for part in made:
    here = contents(part)
    # Groups are whole: all rows of a question are in one minibatch.
    questions = [ts[i].question.id for i in here]
    assert all(questions.count(q) == 3 for q in questions)
    seen |= here
    for b in part:
      T = b.ids.shape[1]
      assert b.ids.shape[0] == batching.rows_of(c.batch, shards)
      loss = b.mask.reshape(shards, -1).sum(1)
      assert loss.max() <= batching.capacity(c.batch, T)
  assert sorted(seen) == list(range(len(ts)))
  for i, t in enumerate(ts):
    mask = np.concatenate([np.full(len(s.ids), s.train) for s in t.segments])
    logps = np.concatenate(
      [
        s.logps if s.train else np.zeros(len(s.ids), np.float32)
        for s in t.segments
      ]
    )
    ids = np.concatenate([s.ids for s in t.segments])
    want = ids, mask, logps.astype(np.float32)
    assert seen[i] == tuple(x.tobytes() for x in want)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.randoms(use_true_random=False))
def test_arrival_order_cannot_show(seed, random):
  ts, groups = world(seed)
  order = list(range(len(ts)))
  random.shuffle(order)
  c = config().batch
  ok = np.ones(len(ts), bool)
  how = dict(minibatches=2, seed=(1, 7))
  a = batching.make(ts, ok, groups, c, **how)
  b = batching.make([ts[i] for i in order], ok, 9 - groups[order], c, **how)
  assert len(a) == len(b)
  for x, y in zip(a, b):
    for p, q in zip(x, y, strict=True):
      for f in dataclasses.fields(p):
        v, w = getattr(p, f.name), getattr(q, f.name)
        if f.name == 'owner':
          w = np.where(w >= 0, np.array(order)[w], -1)
        np.testing.assert_array_equal(v, w)


def test_minibatches_change_with_the_seed():
  ts, groups = world(0, questions=8)
  ok = np.ones(len(ts), bool)
  parts = [batching.split(ts, ok, groups, 2, (0, step)) for step in range(6)]
  assert len({str(p) for p in parts}) > 1
  assert str(batching.split(ts, ok, groups, 2, (0, 0))) == str(parts[0])
  # Fewer groups than minibatches: no empty one.
  assert len(batching.split(ts, groups < 2, groups, 4, 0)) == 2


def test_mask_follows_train_not_text():
  rng = np.random.default_rng(0)
  t = trajectory('q', 0, rng, n=20)
  forged = dataclasses.replace(
    t.segments[2], ids=t.segments[1].ids, train=False
  )
  t = dataclasses.replace(
    t, segments=(t.segments[0], t.segments[1], forged, t.segments[3])
  )
  [row] = batching.tokens_of(0, t)
  a, b = len(t.segments[0].ids), len(t.segments[1].ids)
  assert row.mask[a : a + b].all() and not row.mask[a + b : a + 2 * b].any()


def test_first_token_is_never_in_the_loss():
  s = Segment(
    np.arange(4), 'policy', 'think', train=True, logps=np.zeros(4, np.float32)
  )
  t = Trajectory(Question('q', ''), (s,), (), 'eos')
  np.testing.assert_array_equal(
    batching.tokens_of(0, t)[0].mask, [False, True, True, True]
  )


def test_train_context_replaces_segments():
  rng = np.random.default_rng(0)
  t = trajectory('q', 0, rng, n=20)
  t = dataclasses.replace(t, train_context=t.segments[:2])
  [row] = batching.tokens_of(0, t)
  assert len(row.ids) == len(t.segments[0].ids) + len(t.segments[1].ids)


def test_an_unmasked_observation_has_no_logps():
  rng = np.random.default_rng(0)
  t = trajectory('q', 0, rng, n=24)
  shown = dataclasses.replace(t.segments[2], train=True)
  t = dataclasses.replace(t, segments=(*t.segments[:2], shown, t.segments[3]))
  [[b]] = batching.make([t], [True], [0], config().batch)
  inside = b.behaviour_logps[b.mask]
  assert np.isnan(inside).sum() == len(shown.ids)


def test_keep():
  # What differs by rounding alone is equal.
  values = np.array([1.0, 0, 1, 1 + 3e-8, 0, 9, 2, 2])
  valid = np.array([1, 1, 1, 1, 1, 0, 1, 0], bool)
  groups, reward, c = [(None, None)] * 4, Rewards(values, valid), config()
  ids, kept, counts = batching.kept_of(groups, reward, c)
  np.testing.assert_array_equal(ids, [0, 0, 1, 1, 2, 2, 3, 3])
  np.testing.assert_array_equal(kept, valid)
  assert counts == {
    'groups': 4,
    'groups_zero_variance': 3,
    'trajectories_invalid': 2,
  }
  c.algorithm.drop_zero_variance = True
  _, kept, _ = batching.kept_of(groups, reward, c)
  np.testing.assert_array_equal(np.flatnonzero(kept), [0, 1])


def test_advantages_land_on_loss_tokens():
  ts, groups = world(1)
  [part] = batching.make(ts, np.ones(15, bool), groups, config().batch)
  per_token = [
    np.arange(len(t), dtype=np.float32) + i for i, t in enumerate(ts)
  ]
  for values in (np.arange(1.0, 16.0), per_token):
    for b in batching.set_advantages(part, values):
      want = np.zeros(b.ids.shape)
      for r, at in b.spans():
        want[at] = values[r]
      np.testing.assert_array_equal(b.advantages, np.where(b.mask, want, 0))
      assert b.advantages.any()


def test_rows_undo_the_batch():
  ts, groups = world(2)
  kept = np.ones(15, bool)
  kept[4] = False
  parts = batching.make(ts, kept, groups, config().batch, minibatches=2)
  masks = batching.masks(ts)
  found = batching.unpacked(
    parts, [[b.behaviour_logps for b in mini] for mini in parts], masks
  )
  for i, t in enumerate(ts):
    want = np.concatenate(
      [s.logps if s.train else np.zeros(len(s.ids)) for s in t.segments]
    )
    np.testing.assert_array_equal(
      masks[i], [s.train for s in t.segments for _ in s.ids]
    )
    np.testing.assert_allclose(found[i], want * (i != 4), rtol=1e-6)


def plain(lengths, loss=0):
  """Trajectories of these lengths, of which the last `loss` are in the loss."""
  return [
    batching.Tokens(
      i, np.ones(n, np.int32), np.arange(n) >= n - loss, np.zeros(n)
    )
    for i, n in enumerate(lengths)
  ]


def padding(batches):
  computed = sum(b.ids.size for b in batches)
  return 1 - sum(int(b.lengths.sum()) for b in batches) / computed


def test_rows_are_filled():
  c = config(**{'batch.loss_fraction': 1.0})  # two rows in a microbatch
  # 20 + 12 fill the rows of a long microbatch, 16 and 10 + 6 those of 16.
  sizes = [20, 12, 20, 12, 16, 10, 6]
  part = batching.pack(plain(sizes), c.batch)
  assert [b.ids.shape for b in part] == [(2, 16), (2, 32)]
  assert padding(part) == 0
  assert contents(part).keys() == set(range(7))


@pytest.mark.long
@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 8, 32]))
def test_little_of_a_search_r1_step_is_padding(seed, shards):
  rng = np.random.default_rng(seed)
  sizes = np.clip(rng.lognormal(np.log(950), 0.55, 2560), 128, 4608).astype(int)
  lengths = 256, 512, 1024, 2048, 4608
  c = config(**{'batch.lengths': lengths, 'batch.tokens': 4608})
  step = []
  for own in np.split(sizes, 5):
    part = batching.pack(plain(own, 100), c.batch, shards)
    assert sorted(contents(part)) == list(range(512))
    step += part
  assert padding(step) <= 0.05
  for b in step:
    assert b.ids.shape[0] == shards


@settings(max_examples=20, deadline=None)
@given(
  st.lists(st.integers(1, 32), min_size=1, max_size=60), st.sampled_from([1, 3])
)
def test_short_trajectories_are_padded_to_the_shortest_rows_at_most(sizes, n):
  c = config(**{'batch.loss_fraction': 1.0})
  part = batching.pack(plain(sizes), c.batch, n)
  assert sorted(contents(part)) == list(range(len(sizes)))
  # Alone in the shortest rows that hold them, and a last microbatch.
  alone = sum(8 if x <= 8 else 16 if x <= 16 else 32 for x in sizes)
  assert sum(b.ids.size for b in part) <= alone + 2 * n * 32


def test_loss_tokens_beyond_the_static_size_take_more_rows():
  # A twentieth of 2 x 8 tokens is 1, but one row of 8 must fit.
  c = config(**{'batch.loss_fraction': 0.05, 'batch.lengths': (8,)})
  c.batch.tokens = 16
  assert batching.capacity(c.batch, 8) == 8
  part = batching.pack(plain([8] * 8, loss=7), c.batch)
  assert [int(b.mask.sum()) for b in part] == [7] * 8
  c.batch.loss_fraction = 1.0
  assert len(batching.pack(plain([8] * 8, loss=7), c.batch)) == 4


def test_errors():
  rng = np.random.default_rng(0)
  long = trajectory('long', 2, rng, n=40)
  with pytest.raises(ValueError, match='40 tokens.*config.batch'):
    batching.make([long], [True], [0], config().batch)
  failed = trajectory('q', 1, rng, end='failed')
  with pytest.raises(ValueError, match='q/solver/1'):
    batching.make([failed], [True], [0], config().batch)
  bare = dataclasses.replace(
    long,
    segments=tuple(dataclasses.replace(s, logps=None) for s in long.segments),
  )
  with pytest.raises(ValueError, match='long/solver/2: segment 1'):
    batching.make([bare], [True], [0], config().batch)
  assert len(batching.masks([bare])[0]) == 40


@pytest.mark.parametrize(
  'field, value, message',
  [
    ('env.max_tokens', 33, 'env.max_tokens=33 exceeds'),
    ('algorithm.minibatches', 33, 'between 1 and'),
  ],
)
def test_check(field, value, message):
  batching.check(config())
  with pytest.raises(ValueError, match=message):
    batching.check(config(**{field: value}))


def test_plan_golden():
  # 32 questions x 8 = 256 trajectories, 4 minibatches of 64; 64 tokens hold 2
  # rows of 32 with up to 8 trajectories each: 4 to 32 microbatches.
  plan = costs.arithmetic(
    config(**{'algorithm.minibatches': 4, 'algorithm.epochs': 2})
  )
  assert plan['trajectories'] == '256'
  assert plan['trajectories per minibatch'] == '64'
  assert plan['microbatch shapes rows x tokens'] == '2x8, 2x16, 2x32'
  assert plan['microbatches per update least'] == '4'
  assert plan['microbatches per update most'] == '32'
  assert plan['updates per step'] == '8'
