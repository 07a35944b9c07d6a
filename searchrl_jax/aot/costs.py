"""What a run takes: memory, and the arithmetic of a step."""

from collections.abc import Mapping
import math
from typing import NamedTuple

import jax

from searchrl_jax.devices import sharding
from searchrl_jax.engines import core as engines
from searchrl_jax.engines.jax import caches, decode, device
from searchrl_jax.learn import batching, learner, optim

_MIB = 2**20
# Of a sampled token in a trajectory: its id, log-prob and version.
TOKEN_BYTES = 4 + 4 + 4


class Costs(NamedTuple):
  """By name: bytes of a device and of the host, and what a step consists of."""

  device: dict[str, int]
  host: dict[str, int]
  step: dict[str, str]


def of_run(config, cfg, mesh, working: int | None = None) -> Costs:
  """What a run takes; no parameter is allocated.

  working: bytes of temporaries, on one device, of the program that needs most;
  None: of the update, which is compiled for it.
  """
  trained = learner.Learner(config, cfg, mesh)
  like = trained.like()
  state, critic = like['state'], like['critic']
  own = nbytes(state.params)
  engine, limit, r = config.engine, config.env.max_tokens, config.rollout
  # Its own copy: the update gives the trainer's away.
  own_cfg = decode.served(cfg, engine)
  # A process has an engine of its own, and a share of the questions.
  here = sharding.own_mesh(mesh)
  flying = min(
    r.concurrency or engines.module(engine.module).capacity(cfg, engine, limit),
    -(-r.questions * here.size // mesh.size) * r.group,
  )
  if working is None:  # 0 where the backend does not tell
    trained.updater.warmup(score=False)
    found = [p.memory_analysis() for p in trained.updater.programs.values()]
    working = max(getattr(x, 'temp_size_in_bytes', 0) for x in found)
  rows = {'parameters (float32)': own}
  if trained.frozen:
    rows[f'frozen parameters ({cfg.lora.dtype})'] = nbytes(trained.frozen)
  if ref := trained.fixed['reference']:
    rows['reference parameters'] = nbytes(ref)
  if teacher := like.get('teacher'):
    rows["teacher's parameters"] = nbytes(teacher)
  rows |= {
    'optimizer': nbytes(state.opt_state),
    'gradients, accumulated': own,
    'update: activations, head, fresh gradients': working,
  }
  host = {}
  plan = {'trajectories in flight in a process, at most': f'{flying:,}'}
  steps = 1 + r.max_staleness
  if engine.module == 'jax':
    sizes = engine.slots, engine.max_len, here, engine.chunk
    cache = caches.abstract(own_cfg, *sizes)
    name = f'engine: cache, {engine.slots} slots x {engine.max_len} tokens'
    rows['engine: weights'] = nbytes(decode.abstract(own_cfg, here))
    rows[name] = nbytes(cache)
    room = device.room(own_cfg, engine)
    paused = min(steps * flying, room.capacity(limit)) - engine.slots
    paused = max(paused, 0)
    name = f'engine: {paused:,} paused sequences at {limit} tokens each, '
    name += f'of host_gib={engine.host_gib:g}'
    host[name] = paused * room.size(limit) * device.bytes_per_token(own_cfg)
  if critic:
    # Its working memory is the policy's without the head: one at a time.
    size = 2 * nbytes(critic.params) + nbytes(critic.opt_state)
    rows['critic: parameters, optimizer, gradients'] = size
  rows['in all'] = sum(rows.values())
  size = TOKEN_BYTES
  if engine.record_routes:  # in trajectories, and in the batch
    size += 2 * 2 * len(cfg.layers_with('router')) * cfg.moe.chosen
  size *= steps * r.questions * r.group * limit
  host[f'trajectories, {steps} steps at {limit} tokens each'] = size
  host['checkpoint, while it is written'] = nbytes(like) * here.size
  plan |= arithmetic(config, trained.shards)
  plan['updates in the run'] = f'{optim.updates(config):,}'
  return Costs(rows, host, plan)


def render(config, cfg, mesh, found: Costs) -> str:
  """Memory of each device and of the host, and one step, as a text table."""
  engine = config.engine
  lines = [
    f'{config.name}: {cfg.n_params:,} parameters, vocabulary '
    f'{cfg.vocab_size:,}, {mesh.size} x '
    f'{mesh.devices.flat[0].device_kind}, mesh {dict(mesh.shape)}',
    *_table('Memory of one device (MiB)', 48, found.device, _MIB),
  ]
  if engine.module != 'jax':
    lines.append(
      f'  (the servers of engine {engine.module!r} come on top, on '
      f'{engine.url or engine.device})'
    )
  if config.source.simulator.path:
    path = config.source.simulator.path
    lines.append(f'  (the model of the simulator, {path}, comes on top)')
  of_host = 'Memory of the host, of one process (MiB)'
  lines += _table(of_host, 68, found.host, _MIB)
  return '\n'.join(lines + _table('One step', 48, found.step))


def arithmetic(config, shards: int = 1) -> dict[str, str]:
  """The arithmetic of one step: prompts -> trajectories -> updates.

  Microbatches are bounds: the least, if the longest rows are filled to their
  last place, and the most by length, if every trajectory needs a row, or the
  tokens of a tree, for itself. More loss tokens than `loss_fraction` of a
  microbatch open further ones.
  """
  a, b, r = config.algorithm, config.batch, config.rollout
  largest = math.ceil(r.questions / a.minibatches) * r.group
  B = batching.rows_of(b, shards)
  most = B * batching.places_of(b, b.lengths[-1])  # in a microbatch
  alone = B  # trajectories of a microbatch that share nothing
  if b.prefix_tokens:
    alone = shards * (b.prefix_tokens // b.lengths[-1])
  counts = {
    'questions': r.questions,
    'trajectories': r.questions * r.group,
    'trajectories per minibatch': largest,
    'microbatches per update least': math.ceil(largest / most),
    'microbatches per update most': math.ceil(largest / alone),
    'updates per step': a.minibatches * a.epochs,
  }
  room = [f'{batching.capacity(b, length) * shards:,}' for length in b.lengths]
  return {name: f'{n:,}' for name, n in counts.items()} | {
    'microbatch shapes rows x tokens': ', '.join(f'{B}x{n}' for n in b.lengths),
    'microbatch loss tokens': ', '.join(room),
  }


def _table(title: str, width: int, rows: Mapping, unit: int = 0) -> list[str]:
  values = {k: f'{v / unit:,.1f}' if unit else v for k, v in rows.items()}
  return ['', title, *(f'  {k:<{width}}{v:>12}' for k, v in values.items())]


def nbytes(shapes) -> int:
  """Of one device."""
  own = lambda x: math.prod(x.sharding.shard_shape(x.shape))
  return sum(own(x) * x.dtype.itemsize for x in jax.tree.leaves(shapes))
