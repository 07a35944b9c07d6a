"""The quickstart: a small model learns to search a generated world.

  make quickstart

or, stage by stage,

  python -m searchrl_jax.sft --config=configs/quickstart.py --workdir=runs/warm
  python -m searchrl_jax.train --config=configs/quickstart.py \\
    --workdir=runs/quick --config.train.init=runs/warm
  python -m searchrl_jax.evaluate --workdir=runs/quick --controls

A decoder of 0.4 million parameters is trained from scratch. The warm start
teaches the protocol and reading, on traces that mix good searches, poor
searches and guesses; its worlds and people differ from those of the run. GRPO
then selects among these behaviours: 32 questions x 8 trajectories per step,
with exact match as the only reward. These are GRPO's advantages and clipping
with the schema's other defaults, a mean over tokens and no KL;
`algorithms.GRPO` has the paper's. docs/benchmarks.md has the figures of a
run, for its last checkpoint; no checkpoint is selected. Arguments:

  seed
  lora   rank of adapters, which GRPO then trains in place of the parameters
         (16 ends as full training does); for sft, set it to 0
  hybrid 1: four layers of Qwen3.5, three of them delta nets, in place of two
         of Qwen3; about as many parameters
"""

from ml_collections import ConfigDict

from searchrl_jax import schema

WORLD = dict(train=400, heldout=150, relations=4)
HYBRID = dict(
  model_type='qwen3_5_text',
  architectures=('Qwen3_5ForCausalLM',),
  attention_bias=False,
  attn_output_gate=True,
  num_hidden_layers=4,
  num_attention_heads=4,
  num_key_value_heads=4,
  intermediate_size=112,
  partial_rotary_factor=0.5,
  linear_conv_kernel_dim=4,
  linear_key_head_dim=16,
  linear_num_key_heads=4,
  linear_num_value_heads=4,
  linear_value_head_dim=16,
  mamba_ssm_dtype='float32',
)


def get_config(arg=None):
  a = schema.parse_arg(arg, seed=0, lora=0, hybrid=0)
  c = schema.base()
  c.name = 'quickstart'
  c.seed = a.seed
  c.checkpoint.best = ''  # the last checkpoint is reported
  c.model.tokenizer = 'world'
  c.model.arch = ConfigDict(
    dict(
      model_type='qwen3',
      architectures=('Qwen3ForCausalLM',),
      hidden_size=128,
      num_hidden_layers=2,
      num_attention_heads=8,
      num_key_value_heads=8,
      head_dim=16,
      intermediate_size=256,
      # Positions are distinguished more sharply than with 10,000, so attention
      # to the previous token, which copying needs, is learned sooner.
      rope_theta=100.0,
      rms_norm_eps=1e-6,
      tie_word_embeddings=True,
      hidden_act='silu',
      max_position_embeddings=512,
    )
  )
  if a.hybrid:
    c.model.arch.update(HYBRID)
  c.model.init_scale = 0.05
  c.model.embed_scale = 0.09
  c.model.scan_unroll = 2

  c.data.world_seed = 0
  c.data.world = ConfigDict(WORLD)
  # By reference, so that questions and server always use the same world.
  world = {name: c.data.world.get_ref(name) for name in WORLD}
  c.data.train.micro = ConfigDict(
    dict(module=c.data.world_module, split='train', **world)
  )
  c.data.eval.micro = ConfigDict(
    dict(module=c.data.world_module, split='heldout', n=400, **world)
  )
  c.source.corpus = 'world'
  c.source.k = 1
  c.env.template = 'micro'
  c.env.max_turns = 3
  c.env.max_turn_tokens = 24
  c.env.max_tokens = 192
  c.env.max_observation_tokens = 48
  c.engine.slots = 32  # a CPU computes all slots for every token
  c.engine.max_len = 192
  c.engine.chunk = 8
  c.engine.prefill_rows = 16

  c.sft.data = ConfigDict(
    dict(
      module='searchrl_jax.worlds.microtraces',
      n=24_000,
      worlds=60,
      train=400,
      relations=4,
    )
  )
  c.sft.steps = 1200
  c.sft.rows = 32
  c.sft.lr = 2e-3
  c.sft.warmup = 50

  c.rollout.questions = 32
  c.rollout.group = 8
  c.reward.em = ConfigDict(dict(fn='answer.em', weight=1.0))
  c.batch.lengths = (32, 64, 96, 128, 192)
  c.batch.tokens = 1024
  c.batch.loss_fraction = 0.7
  c.optim.lr = 3e-4
  c.optim.b2 = 0.99
  c.model.lora.rank = a.lora
  if a.lora:
    c.optim.lr = 2e-3  # adapters start at 0 and take larger steps
  c.train.steps = 60
  c.eval.every = 10
  c.checkpoint.every = 20
  return c
