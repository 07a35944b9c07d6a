"""`train --dry_run`: what a config costs, before anything is allocated."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from searchrl_jax.engines import core as engines
from searchrl_jax.engines.jax import caches, decode, device
from searchrl_jax.learn import batching, checks, learner, optim, update
from searchrl_jax.run import build, parameters, sharding

# Of a sampled token in a trajectory: its id, log-prob and version.
TOKEN_BYTES = 4 + 4 + 4


def report(config, vocab_size: int) -> str:
  """Memory for each device and of the host, and the arithmetic of a step, as a
  text table.

  The update's working memory is what the compiler says of the compiled
  program; nothing is run and no parameter is allocated.
  """
  checks.check(config)
  cfg = parameters.model_config(config, vocab_size)
  mesh = build.mesh(config)
  return render(config, cfg, mesh, costs(config, cfg, mesh))


class Costs(NamedTuple):
  """By name: bytes of a device and of the host, and what a step consists of."""

  device: dict[str, int]
  host: dict[str, int]
  step: dict[str, Any]


def costs(config, cfg, mesh, working: int | None = None) -> Costs:
  """What a run takes.

  working: bytes of temporaries of the program that needs most; None: of the
  update, which is compiled for it.
  """
  trained = learner.Learner(config, cfg, mesh)
  like = trained.like()
  state, critic = like['state'], like['critic']
  own = _bytes(state.params)
  engine, limit, r = config.engine, config.env.max_tokens, config.rollout
  inside = engine.module == 'jax_sampler'
  # Its own copy: the update gives the trainer's away.
  own_cfg = dataclasses.replace(cfg, dtype=engine.dtype)
  # A process has an engine of its own, and a share of the questions.
  here = sharding.own_mesh(mesh)
  flying = min(
    r.concurrency or engines.module(engine.module).capacity(cfg, engine, limit),
    -(-r.questions * here.size // mesh.size) * r.group,
  )
  update_name = 'update: activations, head, fresh gradients'
  rows = {'parameters (float32)': own}
  if trained.frozen:
    rows[f'frozen parameters ({cfg.lora.dtype})'] = _bytes(trained.frozen)
  if ref := trained.fixed['reference']:
    rows['reference parameters'] = _bytes(ref)
  rows |= {
    'optimizer': _bytes(state.opt_state),
    'gradients, accumulated': own,
    update_name: working_memory(trained.updater)
    if working is None
    else working,
  }
  host = {}
  plan: dict = {'trajectories in flight in a process, at most': flying}
  steps = 1 + r.max_staleness
  if inside:
    cache = caches.abstract(own_cfg, engine.slots, engine.max_len, here)
    name = f'engine: cache, {engine.slots} slots x {engine.max_len} tokens'
    rows['engine: weights'] = _bytes(decode.abstract(own_cfg, here))
    rows[name] = _bytes(cache)
    room = device.room(own_cfg, engine)
    paused = min(steps * flying, room.capacity(limit)) - engine.slots
    paused = max(paused, 0)
    name = f'engine: {paused:,} paused sequences at {limit} tokens each, '
    name += f'of host_gib={engine.host_gib:g}'
    host[name] = paused * room.size(limit) * device.bytes_per_token(own_cfg)
    shape = decode.Shape(
      engine.slots,
      engine.max_len,
      engine.chunk,
      engine.prefill_rows,
      sharding.parts(here, engine.slots),
    )
    tokens = min(config.env.max_observation_tokens, shape.widths[-1])
    width = decode.fit(shape.widths, tokens)
    plan[f'texts of {tokens} tokens prefilled together'] = shape.rows(width)
  if critic:
    # Its working memory is the policy's without the head: one at a time.
    size = 2 * _bytes(critic.params) + _bytes(critic.opt_state)
    rows['critic: parameters, optimizer, gradients'] = size
  rows['in all'] = sum(rows.values())
  size = steps * r.questions * r.group * limit * TOKEN_BYTES
  host[f'trajectories, {steps} steps at {limit} tokens each'] = size
  host['checkpoint, while it is written'] = _bytes(like) * here.size
  plan |= batching.plan(config, trained.shards)
  plan['updates in the run'] = optim.updates(config)
  return Costs(rows, host, plan)


def render(config, cfg, mesh, found: Costs) -> str:
  """The text of `report`."""
  engine = config.engine
  lines = [
    f'{config.name}: {cfg.n_params:,} parameters, vocabulary '
    f'{cfg.vocab_size:,}, {mesh.size} x '
    f'{mesh.devices.flat[0].device_kind}, mesh {dict(mesh.shape)}',
    '',
    'Memory of one device (MiB)',
    *(f'  {name:<48}{n / 2**20:>12,.1f}' for name, n in found.device.items()),
  ]
  if engine.module != 'jax_sampler':
    lines.append(
      f'  (the servers of engine {engine.module!r} come on top, on '
      f'{engine.url or engine.device})'
    )
  lines += ['', 'Memory of the host, of one process (MiB)']
  lines += [
    f'  {name:<68}{n / 2**20:>12,.1f}' for name, n in found.host.items()
  ]
  lines += ['', 'One step']
  lines += [
    f'  {name.replace("_", " "):<48}{_plain(value):>12}'
    for name, value in found.step.items()
  ]
  return '\n'.join(lines)


def working_memory(updater: update.Updater) -> int:
  """Bytes that one microbatch needs beyond state and gradients.

  Of one device, for the bucket that needs most, as its compiled program says
  (0 where the backend does not tell).
  """

  def accumulate(params, grads, arrays, frozen):
    grad, divisor = jax.grad(updater.loss, has_aux=True), jnp.float32(1)
    fresh, _ = grad(params, arrays, divisor, frozen)
    return jax.tree.map(jnp.add, grads, fresh)

  params, most = updater.shapes, 0
  layout = jax.tree.map(lambda x: x.sharding, params)
  program = jax.jit(accumulate, donate_argnums=1, out_shardings=layout)
  for length in updater.batch_config.lengths:
    arrays = updater.like(length)
    lowered = program.lower(params, params, arrays, updater.frozen)
    memory = lowered.compile().memory_analysis()
    most = max(most, getattr(memory, 'temp_size_in_bytes', 0))
  return most


def _bytes(shapes) -> int:
  """Of one device."""
  return sum(
    x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape))
    for x in jax.tree.leaves(shapes)
  )


def _plain(value) -> str:
  if isinstance(value, tuple):
    return ', '.join(
      'x'.join(map(str, v)) if isinstance(v, tuple) else f'{v:,}' for v in value
    )
  return f'{value:,}'
