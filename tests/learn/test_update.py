"""The update against plain autodiff over full logits, and its invariants."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np
import pytest

from searchrl_jax import lookup, schema
from searchrl_jax.aot import hlo
from searchrl_jax.learn import (
  batching,
  logps,
  losses,
  objectives,
  optim,
  update,
)
from searchrl_jax.models import decoder, flops, remat
from searchrl_jax.schema import CHOICES
from searchrl_jax.types import Question, Segment, Trajectory

pytestmark = pytest.mark.slow

CFG = decoder.DecoderConfig(
  vocab_size=37,
  d_model=16,
  n_layers=2,
  n_heads=4,
  n_kv_heads=2,
  head_dim=4,
  d_ff=24,
  family='qwen2',
)


def config(**kw):
  c = schema.base()
  c.batch.lengths, c.batch.tokens, c.env.max_tokens = (8, 16), 64, 16
  c.batch.loss_fraction, c.batch.head_chunk = 1.0, 24
  c.optim.lr = 1e-2
  c.algorithm.horizon = 16
  c.update_from_flattened_dict(kw)
  return c


@functools.cache
def params(tied: bool = True):
  cfg = CFG if tied else UNTIED
  return decoder.init_params(cfg, jax.random.key(0), scale=0.3)


UNTIED = decoder.DecoderConfig(**{**vars(CFG), 'tied': False})


def world(seed=0, questions=4, group=3, most=16):
  """Trajectories with random advantages, ready for `batching.make`."""
  rng = np.random.default_rng(seed)
  out = []
  for q in range(questions):
    for s in range(group):
      n = int(rng.integers(4, most + 1))
      k = int(rng.integers(1, n - 1))
      ids = rng.integers(0, CFG.vocab_size, n).astype(np.int32)
      out.append(
        Trajectory(
          Question(f'q{q}', ''),
          (
            Segment(ids[:k], 'prompt', 'other'),
            Segment(
              ids[k:],
              'policy',
              'think',
              train=True,
              logps=rng.normal(-3.5, 0.3, n - k).astype(np.float32),
            ),
          ),
          (),
          'answer',
          sample=s,
        )
      )
  ids = np.repeat(np.arange(questions), group)
  return out, ids, rng.normal(size=len(out))


def microbatches(c, seed=0, shards=1, **kw):
  ts, ids, advantages = world(seed, **kw)
  [part] = batching.make(
    ts, np.ones(len(ts), bool), ids, c.batch, shards=shards
  )
  return batching.set_advantages(part, advantages)


def updater(c, *, cfg=CFG, supervised=False, mesh=None, temperature=1.0):
  """One for each config: programs compiled for one test serve the next."""
  return _updater(c.to_json(sort_keys=True), cfg, supervised, mesh, temperature)


@functools.cache
def _updater(fields, cfg, supervised, mesh, temperature):
  c = ConfigDict(json.loads(fields))
  objective = objectives.supervised() if supervised else objectives.policy(c)
  return update.Updater(
    cfg,
    c.batch,
    temperature=temperature,
    mesh=mesh,
    objective=objective,
    tx=optim.make(c.optim, 100),
  )


def alone(batch):
  """ids [12, T], a trajectory in each row, and what packs x [12, T]."""
  spans = [at for _, at in batch.spans()]
  ids = np.zeros((12, batch.ids.shape[1]), np.int32)  # one shape for all
  line, column = np.zeros((2, *batch.ids.shape), np.int32)
  for i, at in enumerate(spans):
    n = batch.ids[at].size
    ids[i, :n] = batch.ids[at]
    line[at], column[at] = i, np.arange(n)

  def pack(x):
    return jnp.where(batch.mask, x[line, column], 0.0)

  return ids, pack


def plain_logps(p, cfg, batch, temperature=1.0):
  """Each trajectory by itself, full logits, one log-softmax: [B, T]."""
  ids, pack = alone(batch)
  z = decoder.logits(p, cfg, decoder.hidden_states(p, cfg, ids))
  lp = jax.nn.log_softmax(z[:, :-1] / temperature)
  picked = jnp.take_along_axis(lp, ids[:, 1:, None], -1)[..., 0]
  entropy = -jnp.sum(jnp.exp(lp) * lp, -1)
  return [pack(jnp.pad(x, ((0, 0), (1, 0)))) for x in (picked, entropy)]


# Blocks: 1; many, padded.
@pytest.mark.long
@pytest.mark.parametrize('tied, chunk', [(False, 1000), (True, 10)])
def test_log_probs_and_their_gradients(tied, chunk):
  """Chunked and gathered = full; the hand-written gradient = autodiff."""
  cfg, p = (CFG if tied else UNTIED), params(tied)
  c = config(**{'batch.loss_fraction': 0.6})
  batch = microbatches(c)[-1]
  T = batch.ids.shape[1]
  index, inverse = update.compaction(
    batch.mask, 1, batching.capacity(c.batch, T)
  )
  arrays = {
    'ids': batch.ids,
    'starts': batch.starts,
    'index': index,
    'inverse': inverse,
    'tree': None,
  }
  rng = np.random.default_rng(0)
  u, v = rng.normal(size=(2, *batch.ids.shape)).astype(np.float32)

  def ours(p):
    a, b, *_ = logps.token_logps(
      p, cfg, arrays, 0.7, chunk, None, entropy=True, entropy_grad=True
    )
    return jnp.sum(a * u + b * v), (a, b)

  def plain(p):
    a, b = plain_logps(p, cfg, batch, 0.7)
    return jnp.sum(a * u + b * v), (a, b)

  (_, got), g = jax.jit(jax.value_and_grad(ours, has_aux=True))(p)
  (_, want), h = jax.jit(jax.value_and_grad(plain, has_aux=True))(p)
  for x, y in zip(got, want):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
  for x, y in zip(jax.tree.leaves(g), jax.tree.leaves(h)):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-5)


def close(a, b, tol=1e-5):
  """Relative to the largest entry of each tensor."""
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    x, y = np.asarray(x), np.asarray(y)
    assert np.abs(x - y).max() <= tol * np.abs(y).max() + 1e-9


@pytest.mark.parametrize('aggregation', CHOICES['algorithm.aggregation'])
def test_microbatches_cannot_show(aggregation):
  """A minibatch cut by other budgets and buckets: same loss and gradient."""
  kw = {
    'algorithm.aggregation': aggregation,
    'algorithm.tis': 'sequence',
    'algorithm.entropy_coef': 0.01,
  }
  reference = None
  for shape in (
    {'batch.lengths': (16,), 'batch.tokens': 16 * 12},
    {'batch.lengths': (8, 16), 'batch.tokens': 32},
  ):
    c = config(**kw, **shape)
    u = updater(c)
    state = u.init(update.copy(params()))
    batches = microbatches(c)
    grads, sums = u.grads(state, batches)
    metrics = losses.summarise(jax.device_get(sums))
    if reference is None:
      assert len(batches) == 1
      reference = grads, metrics
      continue
    assert len(batches) > 2
    close(grads, reference[0])
    for k, v in reference[1].items():
      np.testing.assert_allclose(metrics[k], v, rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_loss_and_gradient_equal_plain_autodiff():
  c = config(
    **{
      'batch.lengths': (16,),
      'batch.tokens': 16 * 12,
      'algorithm.aggregation': 'sequence',
      'algorithm.tis': 'none',
    }
  )
  [batch] = microbatches(c)
  u = updater(c)
  state = u.init(update.copy(params()))
  grads, sums = u.grads(state, [batch])
  weights = np.zeros(batch.ids.shape, np.float32)
  for _, at in batch.spans():
    weights[at] = 1 / batch.mask[at].sum()

  def plain(p):
    lp, _ = plain_logps(p, CFG, batch)
    ratio = jnp.exp(lp - jax.lax.stop_gradient(lp))
    # Advantages are 0 outside the mask.
    return jnp.sum(-ratio * batch.advantages * weights) / np.float32(12)

  value, want = jax.value_and_grad(plain)(params())
  np.testing.assert_allclose(sums['loss'], value, rtol=1e-5)
  close(grads, want, 2e-5)


@pytest.mark.long
def test_empty_rows_change_nothing():
  c = config(**{'batch.lengths': (16,), 'batch.tokens': 16 * 12})
  more = config(**{'batch.lengths': (16,), 'batch.tokens': 16 * 15})
  out = []
  for x in (c, more):
    u = updater(x)
    state = u.init(update.copy(params()))
    batches = microbatches(x)
    out.append(u.grads(state, batches))
  close(out[1], out[0])
  # A microbatch without any trajectory adds exactly nothing.
  empty = batching.empty(more.batch, 16)
  again = u.grads(state, [*batches, empty])
  jax.tree.map(np.testing.assert_array_equal, again, out[1])


def test_what_changes_in_a_trajectory_stays_in_it():
  """No bit of its neighbours' log-probs, or of their gradients."""
  c = config(**{'batch.lengths': (48,), 'batch.tokens': 96})
  u = updater(c)
  state = u.init(update.copy(params()))
  batch = microbatches(c)[0]
  spans = dict(batch.spans())
  rows = [row for row, _ in spans.values()]
  assert any(rows.count(row) >= 3 for row in rows)
  middle = next(
    r for r, (row, at) in spans.items() if at.start and rows.count(row) >= 3
  )
  row, at = spans[middle]
  ids = batch.ids.copy()
  ids[row, at] = (ids[row, at] + 1) % CFG.vocab_size
  other = dataclasses.replace(batch, ids=ids)
  a, b = u.output(state.params, batch), u.output(state.params, other)
  changed = a != b
  assert changed[row, at].any()
  changed[row, at] = False
  assert not changed.any()
  advantages = np.ones(12)
  advantages[middle] = 0.0
  grads = [
    u.grads(state, batching.set_advantages([x], advantages))[0]
    for x in (batch, other)
  ]
  jax.tree.map(np.testing.assert_array_equal, *grads)


@pytest.mark.long
def test_zero_advantages_give_zero_gradients():
  c = config()
  u = updater(c)
  state = u.init(update.copy(params()))
  batches = microbatches(c)
  batches = batching.set_advantages(batches, np.zeros(12))
  grads, sums = u.grads(state, batches)
  assert sums['loss'] == 0
  assert not any(np.any(np.asarray(g)) for g in jax.tree.leaves(grads))


@pytest.mark.long
def test_score_is_what_the_step_sees():
  """With scored old log-probs, the first update is on policy: ratio 1."""
  c = config(
    **{
      'algorithm.minibatches': 2,
      'rollout.temperature': 0.8,
      'batch.lengths': (16,),
    }
  )
  u = updater(c, temperature=0.8)
  state = u.init(update.copy(params()))
  batches = microbatches(c)
  old = [u.output(state.params, b) for b in batches]
  for b, x in zip(batches, old):
    want, _ = plain_logps(params(), CFG, b, 0.8)
    np.testing.assert_allclose(x, want, rtol=1e-5, atol=1e-5)
    assert not x[~b.mask].any()
  state, m = u.step(state, batches, old)
  assert m['kl_old'] < 1e-9 and m['clip_low'] == m['clip_high'] == 0
  # The second update has moved away from `old`.
  state, m = u.step(state, batches, old)
  assert m['kl_old'] > 1e-6
  diff = np.concatenate(
    [(x - b.behaviour_logps)[b.mask] for b, x in zip(batches, old)]
  )
  np.testing.assert_allclose(m['mismatch_abs'], np.abs(diff).mean(), rtol=1e-4)
  np.testing.assert_allclose(m['mismatch_max'], np.abs(diff).max(), rtol=1e-4)
  with pytest.raises(ValueError, match='old or ref'):
    u.step(state, batches)


def test_kl_in_the_loss():
  c = config(
    **{'algorithm.kl': 'loss', 'algorithm.kl_coef': 0.5, 'batch.lengths': (16,)}
  )
  u = updater(c)
  other = decoder.init_params(CFG, jax.random.key(1), scale=0.3)
  state = u.init(update.copy(params()))
  batches = batching.set_advantages(microbatches(c), np.zeros(12))
  ref = [u.output(other, b) for b in batches]
  mine = [u.output(state.params, b) for b in batches]
  state, m = u.step(state, batches, ref=ref)
  d = np.concatenate(
    [(r - x)[b.mask] for r, x, b in zip(ref, mine, batches)]
  ).astype(np.float64)
  want = (np.exp(d) - d - 1).mean()
  np.testing.assert_allclose(m['kl_ref'], want, rtol=1e-4)
  np.testing.assert_allclose(m['loss'], 0.5 * want, rtol=1e-4)
  with pytest.raises(ValueError, match='old or ref'):
    u.step(state, batches)


def test_supervised_learns_by_heart():
  c = config(**{'optim.lr': 3e-2, 'batch.lengths': (16,)})
  u = updater(c, supervised=True)
  state = u.init(update.copy(params()))
  batches = microbatches(c, questions=1, group=2)
  total, n = 0.0, 0
  for b in batches:
    lp, _ = plain_logps(params(), CFG, b)
    total, n = total - float(lp.sum()), n + int(b.mask.sum())
  state, first = u.step(state, batches)
  np.testing.assert_allclose(first['loss'], total / n, rtol=1e-5)
  np.testing.assert_allclose(first['nll'], total / n, rtol=1e-5)
  for _ in range(40):
    state, m = u.step(state, batches)
  assert m['loss'] < 0.1 < first['loss']
  assert int(state.step) == 41


def test_unmasked_observations_weigh_one():
  """NaN behaviour log-probs (state masking off) act as the trainer's own."""
  c = config()
  u = updater(c)
  state = u.init(update.copy(params()))
  batches = microbatches(c)
  bare = [
    dataclasses.replace(
      b, behaviour_logps=np.where(b.mask, np.nan, 0).astype(np.float32)
    )
    for b in batches
  ]
  _, m = u.step(state, bare)
  assert m['finite'] == 1 and m['mismatch_abs'] == 0 and m['tis_weight'] == 1


@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_a_bad_number_leaves_the_state_as_it_was(bad):
  c = config()
  u = updater(c)
  state = u.init(update.copy(params()))
  batches = microbatches(c)
  state, m = u.step(state, batches)
  assert m['finite'] == 1
  before = jax.device_get(state)
  advantages = np.zeros(12, np.float32)
  advantages[3] = bad
  state, m = u.step(state, batching.set_advantages(batches, advantages))
  assert m['finite'] == 0
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), before)
  # And the run can go on from it.
  state, m = u.step(state, batches)
  assert m['finite'] == 1 and int(state.step) == 2


@pytest.mark.long
@pytest.mark.parametrize('tree', [{}, {'batch.prefix_tokens': 48}], ids=len)
def test_twenty_random_steps_compile_nothing(tree):
  c = config(**{'algorithm.minibatches': 2, **tree})
  u = updater(c)
  state = u.init(update.copy(params()))
  u.warmup(score=True)
  compiled = len(u.programs)
  assert compiled == 6  # zeros, apply; score and accumulate for 8 and 16
  events = []
  jax.monitoring.register_event_duration_secs_listener(
    lambda name, *a, **k: events.append(name)
  )
  try:
    jax.jit(lambda x: x * 3.5 + 1)(np.float32(1))
    assert any('compile' in e for e in events)  # the listener works
    events.clear()
    for seed in range(20):
      batches = microbatches(c, seed=seed, questions=1 + seed % 4)
      assert all((b.tree is not None) == bool(tree) for b in batches)
      old = [u.output(state.params, b) for b in batches]
      state, m = u.step(state, batches, old)
      assert m['finite'] == 1
  finally:
    jax.monitoring.clear_event_listeners()
  assert len(u.programs) == compiled
  assert not [e for e in events if 'compile' in e]


@pytest.mark.parametrize('name', ['accumulate', 'score'])
def test_logits_of_a_whole_batch_are_never_held(name):
  """But where one chunk has all tokens."""
  V, held = CFG.vocab_size, {}
  for chunk in (4, 1024):
    c = config(**{'batch.head_chunk': chunk})
    u = _updater.__wrapped__(c.to_json(sort_keys=True), CFG, False, None, 1.0)
    length, *_ = c.batch.lengths
    zeros = [jax.eval_shape(u._zeros, u.shapes)] * (name == 'accumulate')
    divisor = [np.float32(1)] * len(zeros)
    u._lower(name, u.shapes, *zeros, u.like(length), *divisor, u.frozen)
    found = computed(u.traced[name].jaxpr)
    held[chunk] = {x.size for x in found if V in x.shape}
    held[chunk] -= {V, V * CFG.d_model}  # sums, the embedding
  tokens = u.like(length)['ids'].size
  assert held == {4: set(), 1024: {tokens * V}}


def computed(jaxpr):
  """All that a program and its loops compute."""
  for equation in jaxpr.eqns:
    yield from (v.aval for v in equation.outvars)
    for inner in jax.core.jaxprs_in_params(equation.params):
      yield from computed(inner)


def test_bitwise_repeatable():
  c = config()
  out = []
  for _ in range(2):
    u = _updater.__wrapped__(c.to_json(sort_keys=True), CFG, False, None, 1.0)
    state = u.init(update.copy(params()))
    for seed in range(3):
      state, _ = u.step(state, microbatches(c, seed=seed))
    out.append(jax.device_get(state))
  jax.tree.map(np.testing.assert_array_equal, *out)


def test_errors():
  with pytest.raises(ValueError, match='clap'):
    objectives.policy(config(**{'algorithm.loss': 'clap'}))
  with pytest.raises(ValueError, match='horizon'):
    objectives.policy(
      config(
        **{'algorithm.aggregation': 'sequence_sum', 'algorithm.horizon': 0}
      )
    )


def test_flops_golden():
  # Matrices of a layer: q, o 16 x 16 each, k, v 16 x 8 each, three of 16 x
  # 24: 512 + 256 + 1152 = 1920; two layers 3840.
  b = batching.empty(config().batch, 8)
  b.lengths[:2] = 5, 3
  b.mask[0, 1:3] = True
  want = 6 * 3840 * 8 + 12 * 2 * 16 * (25 + 9) + 6 * 16 * 37 * 2
  assert flops.update_flops(CFG, [b]) == want
  assert flops.peak_flops() == 0.0  # a CPU is in no table


def test_the_head_s_gradient_is_of_the_weights_that_it_multiplies():
  """w_t - a = (1 - p) (w_t - w_other), both as bfloat16 rounds them.

  .0203 is .020263671875 there, -.01 is -.010009765625. Times 228 they are
  6.9023 apart: 1 - p = .0010048, and the gradient .000030419.
  """
  w = jnp.array([[0.0203], [-0.01]], jnp.float32)
  x = jnp.full((1, 1, 1), 228, jnp.bfloat16)
  targets = jnp.zeros((1, 1), jnp.int32)
  of = lambda x: logps.head_logps(x, w, targets, 1.0, 1, False, None)[0].sum()
  assert float(jax.grad(of)(x)[0, 0, 0]) == pytest.approx(3.0419e-5, rel=0.01)


@pytest.mark.long
def test_remat_and_bfloat16():
  """Remat cannot show, but in the products of a backward pass; bfloat16
  activations agree to their precision."""
  c = config(**{'batch.lengths': (16,)})
  batches = microbatches(c)
  ids = batches[0].ids
  B, T = ids.shape
  rng = np.random.default_rng(0)
  weights = rng.normal(size=(B, T, CFG.d_model)).astype(np.float32)
  out, products = {}, {}
  for name in ('none', *remat.SAVED):
    cfg = dataclasses.replace(CFG, remat=name)

    def weighed(p, cfg=cfg):
      return jnp.sum(decoder.hidden_states(p, cfg, ids) * weights)

    traced = jax.jit(jax.grad(weighed)).trace(params())
    products[name] = hlo.dot_flops(traced.jaxpr)
    out[name] = traced.lower().compile()(params())
  again = {name: products[name] - products['none'] for name in remat.SAVED}
  # A product [B, T, D] x [D, F] takes 2 B T D F. Gate and up are two of them,
  # and q, k and v are (N + 2 K) H wide in all.
  of_width = 2 * B * T * CFG.d_model * CFG.n_layers
  heads = (CFG.n_heads + 2 * CFG.n_kv_heads) * CFG.head_dim
  assert again['block'] - again['mlp'] == of_width * 2 * CFG.d_ff
  assert again['block'] - again['attention'] >= of_width * heads
  assert again['attention'] - again['matmuls'] == of_width * 2 * CFG.d_ff
  for name in remat.SAVED:
    close(out[name], out['none'])
  for dtype in ('float32', 'bfloat16'):
    u = updater(c, cfg=dataclasses.replace(CFG, dtype=dtype))
    out[dtype], _ = u.grads(u.init(update.copy(params())), batches)
  close(out['bfloat16'], out['float32'], 0.1)
  assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(out['bfloat16']))


@pytest.mark.parametrize(
  'fields, message',
  [
    (
      {'algorithm.tis': 'none', 'algorithm.tis_mode': 'mask'},
      "tis_mode='mask' has no effect",
    ),
    (
      {'algorithm.kl': 'loss', 'algorithm.kl_estimator': 'k1'},
      "kl_estimator='k1' with kl='loss'.*'k3'",
    ),
  ],
)
def test_fields_without_an_effect_are_refused(fields, message):
  with pytest.raises(lookup.ConfigError, match=message):
    objectives.policy(config(**fields))
