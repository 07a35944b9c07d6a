"""Packed rows against trajectories alone, by a loss written anew.

Random losses, aggregations, weights, KLs, batches, meshes and models: scores,
loss and gradients of the packed minibatch are those of plain autodiff over
rows of one trajectory each, with none of the update's own code.
"""

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np

from searchrl_jax.devices import sharding
from searchrl_jax.learn import batching, objectives, optim, update
from searchrl_jax.models import decoder
from searchrl_jax.types import Question, Segment, Trajectory
from tests.learn.test_update import CFG, UNTIED, close, config, params

NEAR = 1e-4  # of a bound: rounding might decide


FIELDS = {
  'algorithm.loss': ('clip', 'clip', 'cispo', 'reinforce'),
  'algorithm.ratio': ('token', 'sequence', 'product'),
  'algorithm.clip_low': (0.05, 0.2),
  'algorithm.clip_high': (0.05, 0.3),
  'algorithm.clip_dual': (0.0, 1.1),
  'algorithm.aggregation': ('token', 'sequence', 'sequence_sum'),
  'algorithm.horizon': (20,),
  'algorithm.tis': ('none', 'token', 'sequence'),
  'algorithm.tis_mode': ('cap', 'mask'),
  'algorithm.tis_cap': (1.1, 2.0),
  'algorithm.tis_floor': (0.0, 0.9),
  'algorithm.kl': ('none', 'loss'),
  'algorithm.kl_estimator': ('k2', 'k3'),  # k1 has no place in a loss
  'algorithm.kl_coef': (0.1,),
  'algorithm.entropy_coef': (0.0, 0.02),
  'algorithm.minibatches': (1, 2),  # 2: old log-probs are given
  'rollout.temperature': (0.7, 1.0),
  'batch.lengths': ((16,), (32,), (8, 32)),
  'batch.tokens': (32, 64, 96),
  'batch.loss_fraction': (0.4, 1.0),
  'batch.head_chunk': (5, 24, 1000),
  'batch.prefix_tokens': (0, 0, 64),
}


def draw(rng: random.Random):
  """A config, of fields that go together."""
  found = {name: rng.choice(values) for name, values in FIELDS.items()}
  if found['algorithm.loss'] == 'reinforce':
    found['algorithm.ratio'] = 'token'
  if found['algorithm.loss'] != 'clip':
    found['algorithm.clip_dual'] = 0.0
  if found['algorithm.tis'] == 'none':
    found['algorithm.tis_mode'] = 'cap'
  if found['algorithm.tis_mode'] != 'mask':
    found['algorithm.tis_floor'] = 0.0
  if found['batch.prefix_tokens']:
    found['batch.lengths'] = found['batch.lengths'][-1:]
  return config(**found)


def trajectories(rng: random.Random, longest: int, behaviour) -> list:
  """Of groups that share a prompt; observations may be in the loss."""
  observed, out = rng.random() < 0.5, []

  def ids(n):
    return np.array([rng.randrange(CFG.vocab_size) for _ in range(n)], np.int32)

  for q in range(rng.randint(2, 5)):
    prompt = ids(rng.randint(1, longest // 3))
    for sample in range(rng.randint(1, 4)):
      segments, left = [Segment(prompt, 'prompt', 'other')], longest
      left -= len(prompt)
      for turn in range(rng.randint(1, 3)):
        new = ids(rng.randint(1, max(1, left // 2)))
        if len(new) > left:
          break
        left -= len(new)
        if turn % 2:
          read = 'environment', 'information', 'policy', observed
          segments.append(Segment(new, *read))
        else:
          logps = behaviour.normal(-3.6, 0.2, len(new)).astype(np.float32)
          kind = 'policy', 'think', 'policy', True
          segments.append(Segment(new, *kind, logps))
      given = Question(f'q{q}', ''), tuple(segments), (), 'answer'
      out.append(Trajectory(*given, sample=sample))
  return out


def alone(found, longest: int):
  """ids, mask and recorded log-probs [N, T] of a trajectory in each row."""
  ids = np.zeros((len(found), longest), np.int32)
  mask, logps = np.zeros(ids.shape, bool), np.zeros(ids.shape, np.float32)
  for n, t in enumerate(found):
    at = 0
    for s in t.segments:
      here = n, slice(at, at := at + len(s.ids))
      ids[here], mask[here] = s.ids, s.train
      logps[here] = np.nan if s.logps is None else s.logps
  mask[:, 0] = False
  return ids, mask, logps


def scores(p, cfg, ids, temperature: float):
  """Log-probs and entropy of each token by full logits, [N, T]; first 0."""
  z = decoder.logits(p, cfg, decoder.hidden_states(p, cfg, ids))[:, :-1]
  every = jax.nn.log_softmax(z / temperature)
  logp = jnp.take_along_axis(every, ids[:, 1:, None], -1)[..., 0]
  entropy = -jnp.sum(jnp.exp(every) * every, -1)
  return [jnp.pad(x, ((0, 0), (1, 0))) for x in (logp, entropy)]


def loss(a, logp, entropy, old, ref, advantages, mask, recorded):
  """The minibatch's loss, and how near a value is to a bound of it.

  By config.algorithm, a; arrays [N, T]. old None: the policy's own.
  """
  fixed = jax.lax.stop_gradient
  old = fixed(logp) if old is None else old
  recorded = jnp.where(jnp.isnan(recorded), old, recorded)
  count = jnp.maximum(mask.sum(1, keepdims=True), 1)

  def total(x):
    return jnp.where(mask, x, 0.0).sum(1, keepdims=True) + 0 * x

  change = jnp.where(mask, logp - old, 0.0)
  if a.ratio != 'token':
    change = total(change) / (count if a.ratio == 'sequence' else 1)
  r = jnp.exp(change)
  w = jnp.where(mask, (logp if a.loss == 'reinforce' else old) - recorded, 0.0)
  w = fixed(jnp.exp(total(w) if a.tis == 'sequence' else w))
  bounds = [(w, a.tis_cap), (w, a.tis_floor)] if a.tis != 'none' else []
  if a.tis == 'none':
    weight = jnp.ones_like(w)
  elif a.tis_mode == 'cap':
    weight = jnp.where(w < a.tis_cap, w, a.tis_cap)
  else:
    weight = jnp.where((w <= a.tis_cap) & (w >= a.tis_floor), w, 0.0)
  near = jnp.clip(r, 1 - a.clip_low, 1 + a.clip_high)
  if a.loss != 'reinforce':
    bounds += [(r, 1 - a.clip_low), (r, 1 + a.clip_high)]
  if a.loss == 'clip':
    gain = jnp.where(
      r * advantages <= near * advantages, r * advantages, near * advantages
    )
    if a.clip_dual:
      bounds.append((jnp.maximum(r, near), a.clip_dual))
      least = a.clip_dual * advantages
      gain = jnp.where((advantages < 0) & (gain < least), least, gain)
  else:
    gain = advantages * logp * (fixed(near) if a.loss == 'cispo' else 1.0)
  each = -weight * gain - a.entropy_coef * entropy
  if a.kl == 'loss':
    d = ref - logp
    kl = {'k1': -d, 'k2': d * d / 2, 'k3': jnp.exp(d) - 1 - d}
    each += a.kl_coef * kl[a.kl_estimator]
  each, rows = jnp.where(mask, each, 0.0), mask.any(1).sum()
  value = {
    'token': each.sum() / mask.sum(),
    'sequence': (each / count).sum() / rows,
    'sequence_sum': each.sum() / (rows * a.horizon),
  }[a.aggregation]
  far = [jnp.where(mask, jnp.abs(x - y), 1.0).min() for x, y in bounds]
  return value, (jnp.stack([*far, jnp.float32(1)]).min(), logp)


def case(rng: random.Random, serve=None) -> str:
  """One minibatch; returns the loss, or why it says nothing."""
  del serve
  c, noise = draw(rng), np.random.default_rng(rng.getrandbits(32))
  tied = rng.random() < 0.5
  remat = rng.choice(['none', 'block', 'mlp'])
  cfg = dataclasses.replace(CFG if tied else UNTIED, remat=remat)
  longest, shards = c.batch.lengths[-1], rng.choice([1, 1, 2, 4])
  found = trajectories(rng, longest, noise)
  ids, mask, recorded = alone(found, longest)
  advantages = noise.normal(size=ids.shape).astype(np.float32)
  if rng.random() < 0.5:  # one for each trajectory
    advantages[:] = advantages[:, :1]

  def moved(x):
    x = np.asarray(x)
    return (x + 0.03 * noise.normal(size=x.shape)).astype(np.float32)

  now = params(tied)
  before, reference = jax.tree.map(moved, now), jax.tree.map(moved, now)
  a, temperature = c.algorithm, c.rollout.temperature
  old, ref = (scores(p, cfg, ids, temperature)[0] for p in (before, reference))
  given = (old if a.minibatches > 1 else None), ref

  def plain(p):
    logp, entropy = scores(p, cfg, ids, temperature)
    return loss(a, logp, entropy, *given, advantages, mask, recorded)

  both = jax.jit(jax.value_and_grad(plain, has_aux=True))
  (value, (near, logp)), grads = both(now)
  if near < NEAR:
    return 'near a bound'

  mesh = sharding.make_mesh(shards, devices=jax.devices()[:shards])
  updater = update.Updater(
    cfg,
    c.batch,
    temperature=temperature,
    tx=optim.make(c.optim, 10),
    objective=objectives.policy(c),
    mesh=mesh,
  )
  groups = [int(t.question.id[1:]) for t in found]
  everyone = np.ones(len(found), bool)
  [batches] = batching.make(found, everyone, groups, c.batch, shards=shards)
  sizes = [sum(len(s.ids) for s in t.segments) for t in found]
  own = [x[:n] for x, n in zip(advantages, sizes)]
  batches = batching.set_advantages(batches, own)
  states = [updater.init(update.copy(p)) for p in (now, before, reference)]
  theirs = [[updater.output(s.params, b) for b in batches] for s in states]
  for packed, rows in zip(theirs, (logp, old, ref), strict=True):
    for b, x in zip(batches, packed, strict=True):
      for n, at in b.spans():
        want = np.where(mask, rows, 0.0)[n, : sizes[n]]
        np.testing.assert_allclose(x[at], want, rtol=2e-5, atol=2e-5)
  _, olds, refs = theirs
  got, sums = updater.grads(states[0], batches, olds, refs)
  np.testing.assert_allclose(sums['loss'], value, rtol=1e-4, atol=1e-6)
  close(got, grads, 5e-5)
  return a.loss
