"""Tree-GRPO: leaves of a tree share turns, and are compared within it.

Ji et al., arXiv 2509.21240. The sampler (rollout/tree.py) plays `trees`
attempts at a question and expands each, in `rounds`, to `leaves` trajectories:

    A = z(R among the question's leaves) + scale * z(R among the tree's leaves)

with scale 1, which compares what follows the same turns: a preference between
turns, without a reward for turns. A turn that leaves share is in the loss of
each, with its advantage. Departures:

  * All leaves are trained on; the release keeps 3 of each tree at random, which
    are all with the values of its scripts (2 trees, 1 round, 3 leaves).
  * A tree whose other leaves failed gives 0 to the last one. In the release its
    mean is taken as 0 and its deviation as 1, so that the raw reward is pushed.
  * version='tree_2norm', an option of the release, normalises among the
    question's leaves and then within trees, which undoes the first: what is
    left compares within trees alone.
  * The reward is the base's; their scripts shape it by the format.

Compare it with others at equal sampled tokens: leaves cost less than chains.
Arguments: trees, rounds, leaves (of a tree), scale, version (as_written,
tree_2norm), credit (own; shuffled: the leaves of a question are dealt to its
trees by their names alone), and those of the base.
"""

import hashlib

import numpy as np

from configs.methods import core
from searchrl_jax import lookup
from searchrl_jax.learn import advantages
from searchrl_jax.rewards import ablations


def get_config(arg=None):
  known = dict(trees=2, rounds=1, leaves=3)
  known |= dict(scale=1.0, version='as_written', credit='own')
  return core.on_base(arg, change, **known)


def change(c, a):
  c.name = 'tree_grpo'
  c.rollout.update(sampler='tree', trees=a.trees, rounds=a.rounds)
  c.rollout.group = a.trees * a.leaves
  kw = dict(eps=1e-6, ddof=1)
  kw |= dict(scale=a.scale, version=a.version, credit=a.credit)
  name = 'configs.methods.tree_grpo.advantage'
  fields = dict(advantage=name, advantage_kw=kw)
  core.set_algorithm(c, core.GRPO | fields)


def advantage(
  values,
  valid,
  group_ids,
  structure,
  *,
  eps: float,
  ddof: int,
  scale: float,
  version: str,
  credit: str,
):
  """float32 [B]: see the module.

  Args:
    values, valid, group_ids, structure: see learn/advantages.py.
    eps, ddof: as in `advantages.grpo`.
    scale: of the comparison within trees.
    version, credit: see the module.
  """
  tree = np.full(len(valid), -1)
  tree[structure.owner] = structure.labels('tree')
  group_ids = np.asarray(group_ids)
  if credit == 'shuffled':
    tree = _dealt(tree, group_ids, [t.id for t in structure.trajectories])
  cells, z = [group_ids, tree], dict(eps=eps, ddof=ddof)
  between = advantages.normalised(values, valid, group_ids, **z)
  if version == 'tree_2norm':
    return advantages.normalised(between, valid, cells, **z).astype(np.float32)
  within = advantages.normalised(values, valid, cells, **z)
  return (between + scale * within).astype(np.float32)


def _dealt(tree: np.ndarray, group_ids: np.ndarray, names) -> np.ndarray:
  """The labels of each group, dealt to its rows in an order of their names."""
  out = tree.copy()
  digest = [hashlib.blake2b(name.encode()).digest() for name in names]
  for group in np.unique(group_ids):
    rows = np.flatnonzero(group_ids == group)
    out[sorted(rows, key=digest.__getitem__)] = tree[rows]
  return out


def _check(config, fields):
  ablations.choose(
    fields, version=('as_written', 'tree_2norm'), credit=('own', 'shuffled')
  )
  lookup.require(
    config.rollout.sampler != 'chains',
    "config.rollout.sampler='chains' gives no trees: use 'tree'",
  )


advantage.needs_group = advantage.divides_by_spread = True
advantage.check = _check
