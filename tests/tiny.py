"""A config small enough to train in a test, and its retrieval server."""

from ml_collections import ConfigDict
import numpy as np

from configs import quickstart

WORLD = dict(train=40, heldout=20, relations=3)


def config(url: str = '') -> ConfigDict:
  """The quickstart's config, shrunk: two steps of four questions."""
  c = quickstart.get_config()
  c.name = 'tiny'
  c.model.arch.update(
    dict(
      hidden_size=32,
      num_hidden_layers=1,
      num_attention_heads=2,
      num_key_value_heads=2,
      head_dim=16,
      intermediate_size=64,
    )
  )
  c.mesh.data = 1
  c.data.world_seed = 3
  c.data.world = ConfigDict(WORLD)
  c.data.train.micro.update(WORLD)
  c.data.eval.micro.update(dict(WORLD, n=4))
  c.source.url = url
  c.env.max_turns = 1
  c.env.max_turn_tokens = 12
  c.env.max_tokens = 96
  c.engine.slots = 8
  c.engine.max_len = 96
  c.engine.chunk = 4
  c.engine.prefill_rows = 4
  c.rollout.questions = 4
  c.rollout.group = 2
  # Something to learn from for a policy that knows nothing yet.
  c.reward = ConfigDict(
    dict(length=dict(fn='tests.tiny.shortness', weight=1.0))
  )
  c.batch.lengths = (96,)
  c.batch.tokens = 384
  c.train.steps = 3
  c.eval.every = 3
  c.eval.bootstrap = 50
  c.checkpoint.every = 1
  c.log.tensorboard = False
  c.log.progress = False
  return c


async def by_turn(groups, context):
  """A reward of each segment of the policy: a test of per-turn credit."""
  from searchrl_jax.rewards import core
  from searchrl_jax.types import Rewards

  del context
  flat = core.flat(groups)
  value = tuple(
    np.array(
      [
        0.1 * (int(s.ids.sum()) % 7) * (s.author == 'policy') for s in t.trained
      ],
      np.float32,
    )
    for t in flat
  )
  return Rewards(value, np.array([not t.failed for t in flat]), 'segment')


async def same(groups, context):
  """A reward that all trajectories earn alike."""
  from searchrl_jax.rewards import core

  del context
  return core.per_trajectory(groups, lambda t: {'value': 1.0, 'half': 0.5})


async def unusable(groups, context):
  """A reward that can be used of no trajectory."""
  from searchrl_jax.types import Rewards

  del context
  n = sum(map(len, groups))
  nothing = np.full(n, np.nan, np.float32)
  return Rewards(np.zeros(n), np.zeros(n, bool), parts={'half': nothing})


async def odd(groups, context):
  """1 or 0: many groups earn all the same."""
  from searchrl_jax.rewards import core

  del context
  return core.per_trajectory(
    groups,
    lambda t: float(
      sum(int(s.ids.sum()) for s in t.segments if s.author == 'policy') % 2
    ),
  )


async def shortness(groups, context):
  """A reward that differs between samples whatever they say."""
  from searchrl_jax.rewards import core

  del context
  return core.per_trajectory(
    groups,
    lambda t: float(
      sum(int(s.ids.sum()) % 7 for s in t.segments if s.author == 'policy')
    ),
  )


def first_turn(values, valid, group_ids, structure, *, scale: float):
  """An advantage of one's own: scale (R - mean(R)) for first turns alone."""
  from searchrl_jax.learn import advantages

  x = scale * advantages.centred(values, valid, group_ids)
  return structure.over_tokens(x[structure.owner] * (structure.number == 0))


first_turn.needs_group = True


def unknown_array(values, valid, group_ids, masks):
  """An advantage that takes what there is not."""


def critic_without_fields(values, valid, group_ids, mask, critic):
  """An advantage with a critic whose returns have no discount."""


def too_few(values, valid):
  """Not an advantage."""
