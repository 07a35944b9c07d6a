"""The tiny run of tests/tiny.py on all devices of all processes."""

from ml_collections import ConfigDict

from searchrl_jax import schema
from tests import tiny


def get_config(arg=None):
  a = schema.parse_arg(arg, steps=2, seed=0, traces=False)
  c = tiny.config()
  c.seed = a.seed
  c.mesh.data, c.mesh.fsdp = -1, 2
  # Log-probs before the update, and those of a reference, are in the reward.
  c.algorithm.update(dict(advantage='rloo', kl='reward', kl_coef=0.05))
  c.algorithm.advantage_kw = ConfigDict()
  c.rollout.questions = 6  # not a multiple of four processes
  c.train.steps = c.sft.steps = a.steps
  c.sft.rows, c.sft.warmup = 8, 1
  c.sft.data.update(dict(n=40, worlds=2, train=40, relations=3))
  if a.traces:  # are longer than the turns of the tiny run
    c.env.update(max_turns=3, max_turn_tokens=24, max_tokens=192)
    c.engine.max_len, c.batch.lengths = 192, (192,)
  c.eval.every = 0
  return c
