"""`train --dry_run`: what a config costs, before anything is allocated."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from searchrl_jax.engines import core as engines
from searchrl_jax.engines.jax import caches, decode, device
from searchrl_jax.learn import (
  batching,
  checks,
  learner,
  objectives,
  optim,
  update,
)
from searchrl_jax.models import decoder
from searchrl_jax.run import build, sharding

# Of a sampled token in a trajectory: its id, log-prob and version.
TOKEN_BYTES = 4 + 4 + 4


def report(config, vocab_size: int) -> str:
  """Memory for each device and of the host, and the arithmetic of a step, as a
  text table.

  The update's working memory is what the compiler says of the compiled
  program; nothing is run and no parameter is allocated.
  """
  checks.check(config)
  cfg = build.model_config(config, vocab_size)
  mesh = build.mesh(config)
  params = build.shapes(cfg, mesh)
  tx = optim.make(config.optim, max(optim.updates(config), 1), params)
  updater = update.Updater(
    cfg,
    config.batch,
    temperature=config.rollout.temperature,
    tx=tx,
    objective=objectives.policy(config),
    mesh=mesh,
  )
  own = _bytes(params, decoder.param_shardings(cfg, mesh))
  moments = _bytes(
    jax.eval_shape(tx.init, params), updater.shardings(params).opt_state
  )
  working = working_memory(updater, params)
  engine, limit = config.engine, config.env.max_tokens
  flying = min(
    config.rollout.concurrency
    or engines.module(engine.module).capacity(cfg, engine, limit),
    config.rollout.questions * config.rollout.group,
  )
  steps = 1 + config.rollout.max_staleness
  rows = [
    ('parameters (float32)', own),
    ('optimizer', moments),
    ('gradients, accumulated', own),
    ('update: activations, head, fresh gradients', working),
  ]
  if engine.module == 'jax_sampler':
    # Its own copy: the update gives the trainer's away.
    own_cfg = dataclasses.replace(cfg, dtype=engine.dtype)
    rows += [
      ('engine: weights', _bytes(decode.abstract(own_cfg, mesh))),
      (
        f'engine: cache, {engine.slots} slots x {engine.max_len} tokens',
        _bytes(caches.abstract(own_cfg, engine.slots, engine.max_len, mesh)),
      ),
    ]
  if config.algorithm.kl != 'none':
    rows.insert(1, ('reference parameters', own))
  if config.critic.lr:
    # Its working memory is the policy's without the head: one at a time.
    critic, shapes = learner.critic_updater(config, cfg, mesh)
    state, layout = critic.abstract(shapes), critic.shardings(shapes)
    rows.append(
      (
        'critic: parameters, optimizer, gradients',
        (
          2 * _bytes(shapes, layout.params)
          + _bytes(state.opt_state, layout.opt_state)
        ),
      )
    )
  rows.append(('in all', sum(n for _, n in rows)))
  lines = [
    f'{config.name}: {cfg.n_params:,} parameters, vocabulary '
    f'{cfg.vocab_size:,}, {jax.device_count()} x '
    f'{jax.devices()[0].device_kind}, mesh {dict(mesh.shape)}',
    '',
    'Memory of one device (MiB)',
  ]
  lines += [f'  {name:<48}{n / 2**20:>12,.1f}' for name, n in rows]
  if engine.module != 'jax_sampler':
    lines.append(
      f'  (the servers of engine {engine.module!r} come on top, on '
      f'{engine.url or engine.device})'
    )
  lines += ['', 'Memory of the host, of one process (MiB)']
  host = [
    (
      f'trajectories, {steps} steps at {limit} tokens each',
      steps
      * config.rollout.questions
      * config.rollout.group
      * limit
      * TOKEN_BYTES,
    )
  ]
  if engine.module == 'jax_sampler':
    room = device.room(own_cfg, engine)
    paused = min(steps * flying, room.capacity(limit)) - engine.slots
    host.insert(
      0,
      (
        f'engine: {max(paused, 0):,} paused sequences at {limit} tokens each, '
        f'of host_gib={engine.host_gib:g}',
        max(paused, 0) * room.size(limit) * device.bytes_per_token(own_cfg),
      ),
    )
  lines += [f'  {name:<68}{n / 2**20:>12,.1f}' for name, n in host]
  lines += ['', 'One step']
  plan = {'trajectories in flight, at most': flying}
  if engine.module == 'jax_sampler':
    shape = decode.Shape(
      engine.slots,
      engine.max_len,
      engine.chunk,
      engine.prefill_rows,
      sharding.parts(mesh, engine.slots),
    )
    tokens = min(config.env.max_observation_tokens, shape.widths[-1])
    plan[f'texts of {tokens} tokens prefilled together'] = shape.rows(
      decode.fit(shape.widths, tokens)
    )
  plan |= batching.plan(config, updater.shards)
  lines += [
    f'  {name.replace("_", " "):<48}{_plain(value):>12}'
    for name, value in plan.items()
  ]
  total = optim.updates(config)
  lines.append(f'  {"updates in the run":<48}{total:>12,}')
  return '\n'.join(lines)


def working_memory(updater: update.Updater, params) -> int:
  """Bytes that one microbatch needs beyond state and gradients.

  Of one device, for the bucket that needs most, as its compiled program says
  (0 where the backend does not tell). `params` are shapes with shardings.
  """

  def accumulate(params, grads, arrays):
    fresh, _ = jax.grad(updater.loss, has_aux=True)(
      params, arrays, jnp.float32(1)
    )
    return jax.tree.map(jnp.add, grads, fresh)

  layout = jax.tree.map(lambda x: x.sharding, params)
  program = jax.jit(accumulate, donate_argnums=1, out_shardings=layout)
  most = 0
  for length in updater.batch_config.lengths:
    rows = batching.rows_of(updater.batch_config, length, updater.shards)
    arrays = updater.put(batching.empty(rows, length))
    compiled = program.lower(params, params, arrays).compile()
    memory = compiled.memory_analysis()
    most = max(most, getattr(memory, 'temp_size_in_bytes', 0))
  return most


def _bytes(shapes, shardings=None) -> int:
  """Of one device. shardings: None = the shapes' own."""
  if shardings is None:
    shardings = jax.tree.map(lambda x: x.sharding, shapes)
  return sum(
    x.dtype.itemsize * math.prod(s.shard_shape(x.shape))
    for x, s in zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings))
  )


def _plain(value) -> str:
  if isinstance(value, tuple):
    return ', '.join(
      'x'.join(map(str, v)) if isinstance(v, tuple) else f'{v:,}' for v in value
    )
  return f'{value:,}'
