"""Trees of attempts, whose leaves share the turns before they part.

Tree-GRPO (Ji et al. 2025, arXiv 2509.21240, section 3.1). A node is one turn of
the policy and the environment's answer to it. Each question gets `trees` trees:
an attempt is played to its end; then, in each of `rounds`, n nodes of the tree
are drawn with replacement among the prompt and the turns that did not end an
attempt, and each is played from there to the end. A leaf is a trajectory, and
the turns that leaves share are sampled once.

It departs from the paper's code in one way: every leaf is trained on, so
config.rollout.group = trees * (1 + rounds * n). The code keeps a part of them
at random; with its values (trees=2, rounds=1, n=2, group=6) that is all.

Leaves say in `meta` what they share: `tree`, the sample that is the root's
attempt; `path`, a name for each of its turns, the same in all leaves that have
this turn ('SAMPLE.TURN' of the leaf for which it was sampled); `node`, the turn
after which it parted ('' = the prompt).
"""

from collections.abc import Sequence
import dataclasses
import time
from typing import NamedTuple

from ml_collections import ConfigDict
import numpy as np

from searchrl_jax import lookup
from searchrl_jax.engines.core import Handle
from searchrl_jax.rollout.core import Services, Start
from searchrl_jax.text.states import Action, Done, State
from searchrl_jax.types import Group, Question, Trajectory


async def sample(
  questions: Sequence[Question], services: Services, *, trees: int, rounds: int
) -> list[Group]:
  """config.group leaves of each question; see the module."""
  starts, size = services.starts(questions), services.config.group // trees
  slots = services.slots(handles=size)

  async def grow(start: Start, samples: Sequence[int]) -> None:
    async with slots:
      leaves = await _grow(services, start, samples, rounds)
    services.record(*leaves)

  work = []
  for start, group in zip(starts, services.names(questions), strict=True):
    for names in (group[i : i + size] for i in range(0, len(group), size)):
      # Other weights may have sampled what is done: a tree is used whole.
      if any(name not in services.done for name in names):
        work.append(grow(start, [n for _, n in names]))
  await services.gather(work)
  return services.groups(questions)


def check(config: ConfigDict) -> None:
  """Refuses a config.rollout whose group is not made of equal trees.

  Raises:
    ConfigError: names the fields.
  """
  group, trees, rounds = config.group, config.trees, config.rounds
  good = trees >= 1 and rounds >= 1 and group % trees == 0
  good = good and (group // trees - 1) % rounds == 0
  what = f'config.rollout.group={group}, trees={trees}, rounds={rounds}'
  why = 'a group is trees * (1 + rounds * n) leaves, for a whole n (0 = chains)'
  lookup.require(good, f'{what}: {why}')


sample.check = check  # type: ignore[attr-defined]


class _Node(NamedTuple):
  """The prompt, or the end of a turn that did not end its attempt."""

  handle: Handle  # its first state.length tokens are the node's
  state: State
  action: Action
  path: tuple[str, ...]  # names of the turns up to it


async def _grow(
  services: Services, start: Start, samples: Sequence[int], rounds: int
) -> list[Trajectory]:
  """The leaves of one tree, numbered by `samples`."""
  state, action = start
  tree, *others = samples
  width = len(others) // rounds
  root = _Node(services.open(action.prompt), state, action, ())
  handles = [root.handle]  # open until the tree is whole

  async def play(node: _Node, sample: int) -> tuple[Trajectory, list[_Node]]:
    """From a node to the end, from the root as a chain would; its nodes."""
    handle, state, action, path = node
    if sample != tree:
      handle = services.fork(handle)
      handles.append(handle)
      services.engine.truncate(handle, state.length)
      # The leaf of the node went on: what it appended is in the handle.
      action = dataclasses.replace(action, append=())
    begin, nodes = time.monotonic(), []
    while not isinstance(action, Done):
      state, action = await services.turn(
        handle, state, action, sample, node.path
      )
      path = (*path, f'{sample}.{len(path)}')
      nodes.append(_Node(handle, state, action, path))
    seconds = time.monotonic() - begin
    parted = node.path[-1] if node.path else ''
    meta = {'tree': tree, 'node': parted, 'path': list(path)}
    found = await services.trajectory(handle, state, sample, seconds, meta)
    return found, nodes[:-1]

  leaves = [await play(root, tree)]
  for n in range(rounds):
    nodes = [root, *(node for _, added in leaves for node in added)]
    stream = services.stream(state.question, tree, ('nodes', n))
    drawn = np.random.default_rng(stream).integers(len(nodes), size=width)
    names = others[n * width : (n + 1) * width]
    leaves += await services.gather(
      play(nodes[i], name) for i, name in zip(drawn, names, strict=True)
    )
  for handle in handles:
    services.close(handle)
  return [leaf for leaf, _ in leaves]
