"""Log-probs, gradients and updates over the devices of all processes.

  python -m tests.cluster.program FOLDER DATA FSDP TENSOR

Writes what every process sees to FOLDER/RANK.npz, and the state after the first
update as a checkpoint.
"""

import pathlib
import sys

import jax
import numpy as np
import optax

from searchrl_jax.devices import cluster, sharding
from searchrl_jax.engines.weights import publication
from searchrl_jax.models import decoder
from searchrl_jax.store import checkpoint
from tests.learn import test_mesh_update as mesh_test
from tests.learn import test_update as base


def main(folder: str, *shape: str) -> None:
  cluster.initialize()
  mesh = sharding.make_mesh(*map(int, shape))
  config = base.config(**mesh_test.KW)
  updater = base.updater(config, cfg=mesh_test.CFG, mesh=mesh)
  fresh = jax.jit(
    lambda key: decoder.init_params(mesh_test.CFG, key, scale=0.3),
    out_shardings=decoder.param_shardings(mesh_test.CFG, mesh),
  )
  state = updater.init(fresh(jax.random.key(0)))
  batches = base.microbatches(config, shards=updater.shards)
  scores = np.zeros((12, 16))
  for b in batches:
    found = updater.output(state.params, b)
    for i, at in b.spans():
      scores[i, : found[at].size] = found[at]
  grads, sums = updater.grads(state, batches)
  state, metrics = updater.step(state, batches)
  layout = decoder.param_shardings(mesh_test.CFG, sharding.own_mesh(mesh))
  out = {'scores': scores, 'loss': np.asarray(sums['loss'])}
  trees = {'grads': grads, 'params': state.params}
  trees |= {k: optax.tree.get(state.opt_state, k) for k in ('mu', 'nu')}
  for name, tree in trees.items():
    if cluster.size() > 1:
      tree = sharding.own_copy(tree, mesh, layout)
    for path, x in decoder.flatten(tree).items():
      out[f'{name}/{path}'] = np.asarray(x)
  folder = pathlib.Path(folder)
  publisher = publication.Publisher(folder / 'own', mesh_test.CFG, 'float32')
  publisher.publish(state.params, 3)
  saver = checkpoint.Checkpointer(folder / 'checkpoints', None, '')
  saver.save(1, state, extras={}, metrics={}, fingerprint={})
  _, after = updater.step(state, batches)
  out |= {f'next/{k}': after[k] for k in ('loss', 'grad_norm')}
  np.savez(folder / f'{cluster.rank()}.npz', finite=metrics['finite'], **out)
  cluster.leave(None)


if __name__ == '__main__':
  main(*sys.argv[1:])
