"""The quickstart: a small model learns to search a generated world."""

from configs import common
from ml_collections import ConfigDict


def get_config(arg=None):
  a = common.parse_arg(arg, seed=0)
  c = common.base()
  c.name = 'quickstart'
  c.seed = a.seed
  c.model.arch = ConfigDict(dict(
    model_type='qwen3', architectures=('Qwen3ForCausalLM',),
    hidden_size=128, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=8, head_dim=16, intermediate_size=256,
    rope_theta=10000.0, rms_norm_eps=1e-6, tie_word_embeddings=True,
    hidden_act='silu', max_position_embeddings=512,
  ))
  c.model.init_scale = 0.05
  c.model.embed_scale = 0.09
  c.model.scan_unroll = 2
  c.data.world_seed = 1000
  c.data.train.micro = ConfigDict(dict(module='microworld', split='train'))
  c.data.eval.micro = ConfigDict(
    dict(module='microworld', split='heldout', n=400))
  c.source.corpus = 'world'
  c.source.k = 1
  c.env.template = 'micro'
  c.env.max_turns = 3
  c.env.max_turn_tokens = 32
  c.env.max_tokens = 192
  c.env.max_observation_tokens = 48
  c.engine.slots = 128
  c.engine.max_len = 192
  c.engine.chunk = 8
  c.engine.prefill_rows = 16
  c.rollout.questions = 32
  c.rollout.group = 8
  c.reward.em = ConfigDict(dict(fn='answer.em', weight=1.0))
  c.batch.lengths = (64, 96, 128, 192)
  c.batch.tokens = 2048
  c.optim.lr = 3e-4
  c.train.steps = 100
  c.eval.every = 25
  c.checkpoint.every = 25
  c.sft.data = ConfigDict(dict(module='microworld'))
  c.sft.steps = 600
  return c
