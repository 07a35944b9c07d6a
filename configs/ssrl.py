"""SSRL: the policy is its own search engine (Fan et al., arXiv 2508.10874).

  python -m searchrl_jax.sft --config=configs/ssrl.py --workdir=runs/warm
  python -m searchrl_jax.train --config=configs/ssrl.py \\
    --workdir=runs/ssrl --config.train.init=runs/warm
"""

from configs import algorithms
from configs import common
from ml_collections import ConfigDict

WORLD = dict(warm=240, rl=160, heldout=100, unseen=80)


def get_config(arg=None):
  a = common.parse_arg(arg, seed=0)
  c = common.base()
  c.name = 'ssrl'
  c.seed = a.seed
  c.env.information = 'policy'
  c.env.max_turns = 0
  c.algorithm.update(algorithms.GRPO | dict(
    aggregation='token', kl_coef=0.001, clip_dual=3.0,
  ))
  c.reward.ssrl = ConfigDict(dict(fn='ssrl.graded', weight=1.0,
                                  format_weight=0.1))

  c.model.tokenizer = 'world'
  c.model.arch = ConfigDict(dict(
    model_type='qwen3', architectures=('Qwen3ForCausalLM',),
    hidden_size=128, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=8, head_dim=16, intermediate_size=384,
    rope_theta=100.0,  # copying is learned sooner, see configs/quickstart.py
    rms_norm_eps=1e-6, tie_word_embeddings=True, hidden_act='silu',
    max_position_embeddings=512,
  ))
  c.model.init_scale = 0.05
  c.model.embed_scale = 0.09
  c.model.scan_unroll = 2

  c.data.world_module = 'closedbook'
  c.data.world_seed = a.seed
  c.data.world = ConfigDict(WORLD)
  # By reference: all parts of a run ask about one world.
  world = {name: c.data.world.get_ref(name) for name in WORLD}
  c.data.train.rl = ConfigDict(dict(
    module='closedbook', split='rl', shuffled=False, **world
  ))
  for split in ('heldout', 'unseen'):
    c.data.eval[split] = ConfigDict(dict(
      module='closedbook', split=split, n=300, **world
    ))
  c.source.corpus = 'world'
  c.source.k = 1
  c.env.template = 'micro'
  c.env.max_turn_tokens = 112
  c.env.max_tokens = 128
  c.env.max_observation_tokens = 48
  c.engine.slots = 128
  c.engine.max_len = 128
  c.engine.chunk = 8
  c.engine.prefill_rows = 16

  c.sft.data = ConfigDict(dict(
    module='closedbook', n=16_000, queries=6_000, recalls=5_000,
    passages=1_500, pack=4, direct=0.1, poor=0.4, tilt=0.9, again=0.2,
    short=0.3, **world
  ))
  c.sft.steps = 1200
  c.sft.rows = 32
  c.sft.lr = 3e-3
  c.sft.warmup = 50

  c.rollout.questions = 32
  c.rollout.group = 8
  c.batch.lengths = (32, 64, 96, 128)
  c.batch.tokens = 1024
  c.batch.loss_fraction = 1.0
  c.optim.lr = 3e-4
  c.optim.b2 = 0.99
  c.train.steps = 60
  c.eval.every = 20
  c.checkpoint.every = 20
  return c
