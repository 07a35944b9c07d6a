"""Atlas: chains of one to four look-ups in a generated world, as a test bed.

  python -m searchrl_jax.sft --config=configs/atlas.py:mix=skills \\
    --workdir=runs/skills
  python -m searchrl_jax.sft --config=configs/atlas.py:mix=even \\
    --workdir=runs/even --config.train.init=runs/skills
  python -m searchrl_jax.train --config=configs/atlas.py \\
    --workdir=runs/grpo --config.train.init=runs/even

A decoder of 0.6 million parameters is trained from scratch. The warm start has
two parts: skills (reading, wording queries, going on to the next hop; known
facts), which all mixtures of a seed share, and a short one that sets habits
(searchrl_jax/worlds/atlas_traces.py). GRPO then selects among these, with exact
match as the only reward, and questions of train people. Evaluation is on
held-out people, by kind of question, of the last checkpoint: none is selected.
experiments/arena/ has figures. Arguments:

  mix    of the warm start: skills, even, hasty, wanderer
  seed   of the world, and of everything that is drawn
"""

from ml_collections import ConfigDict

from configs import quickstart
from searchrl_jax import schema
from searchrl_jax.worlds import atlas, atlas_traces

WORLD = dict(train=300, heldout=150, known=40)
MODULE = 'searchrl_jax.worlds.atlas'


def get_config(arg=None):
  a = schema.parse_arg(arg, seed=0, mix='even')
  schema.lookup.require(
    a.mix in atlas_traces.MIXES,
    f'config argument mix={a.mix!r}: one of {", ".join(atlas_traces.MIXES)}',
  )
  c = quickstart.get_config()
  c.name = 'atlas'
  c.seed = a.seed
  c.model.arch.num_hidden_layers = 3
  c.model.scan_unroll = 3

  c.data.world_module = MODULE
  c.data.world_seed = a.seed
  c.data.world = ConfigDict(WORLD)
  # By reference, so that all parts of a run use the same world.
  world = {name: c.data.world.get_ref(name) for name in WORLD}
  kinds = atlas.KINDS
  c.data.train = ConfigDict(
    dict(atlas=dict(module=MODULE, split='train', kinds=kinds, **world))
  )
  c.data.eval = ConfigDict(
    dict(
      atlas=dict(module=MODULE, split='heldout', n=300, kinds=kinds, **world)
    )
  )
  c.env.template = 'micro_notes'  # with notes, and two queries in a search
  c.env.max_turns = 6
  c.env.max_turn_tokens = 32
  c.env.max_tokens = 320
  c.env.max_observation_tokens = 64  # the longest passages of two queries
  c.engine.max_len = 320
  # On a CPU, all slots are computed for every token, and long trajectories are
  # few: with 128, three of four would be empty.
  c.engine.slots = 32
  c.batch.tokens = 512  # small microbatches stay within the CPU's caches
  c.batch.lengths = (64, 128, 192, 320)
  c.batch.loss_fraction = 1.0  # stated facts are all in the loss

  c.sft.data = ConfigDict(
    dict(
      module='searchrl_jax.worlds.atlas_traces',
      mix=a.mix,
      n=12_000,
      worlds=20,
      turns=c.env.get_ref('max_turns'),
      people=200,
      **world,
    )
  )
  c.sft.steps = 700
  if a.mix != 'skills':
    c.sft.data.n, c.sft.data.worlds = 6_000, 10
    c.sft.steps, c.sft.lr, c.sft.warmup = 150, 1e-3, 10

  c.rollout.questions = 16
  c.train.steps = 20
  c.eval.every = 0
  # As in training: greedy answers of a warm start whose most frequent behaviour
  # is good hide what RL changes.
  c.eval.n = 4
  c.eval.temperature = 1.0
  c.checkpoint.every = 20
  return c
