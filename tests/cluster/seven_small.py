"""configs/search_r1.py with a checkpoint, small enough for a CPU."""

from configs import search_r1


def get_config(arg=None):
  c = search_r1.get_config(arg)
  c.model.dtype = c.engine.dtype = 'float32'
  c.model.remat = 'none'
  c.engine.canary_tolerance = 1e-3
  c.engine.slots = 16
  c.engine.prefill_rows = 4
  c.env.max_turn_tokens = 8
  c.env.max_observation_tokens = 64
  c.env.max_tokens = c.engine.max_len = 640
  c.rollout.questions = 4
  c.rollout.group = 2
  c.algorithm.minibatches = 1
  c.optim.warmup = 0
  c.batch.lengths = (640,)
  c.batch.tokens = 1280
  c.train.steps = 3
  c.checkpoint.every = 1
  c.eval.every = 0
  c.log.tensorboard = False
  c.log.progress = False
  return c
