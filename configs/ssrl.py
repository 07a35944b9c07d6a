"""SSRL (Fan et al., arXiv 2508.10874): the policy is its own search engine.

  python -m searchrl_jax.sft --config=configs/ssrl.py --workdir=runs/warm
  python -m searchrl_jax.train --config=configs/ssrl.py \\
    --workdir=runs/ssrl --config.train.init=runs/warm

runs the small form: a decoder of 0.5 million parameters, pretrained on a world
of invented people (experiments/ssrl/closedbook.py), minutes on 2 cores. With a
checkpoint the config is full size, on SSRL's own parquet, without a search
engine:

  python -m searchrl_jax.train \\
    --config=configs/ssrl.py:model=meta-llama/Llama-3.2-3B-Instruct \\
    --workdir=runs/ssrl_3b --config.data.dir=DATA

experiments/ssrl/ has figures (of the last checkpoint: none is selected), memory
requirements and the original's figures. Arguments:

  model           '' = the small form
  reward          graded: 0.9 exact match + 0.1 format_score, as released;
                  binary: the paper's form
  shuffled        a control with permuted golden answers (small form)
  no_information  a control with turns too short for information (small form)
  base            '' = the above; atlas: the world and budgets of
                  configs/atlas.py, from a warm start that continues its
                  `skills` (experiments/arena/recitals.py)
  seed

The recipe differs from Search-R1 in three fields: env.information='policy',
env.max_turns=0 (one generation contains think, search, information and answer)
and the reward. For sim-to-real, run `evaluate` with config.env.real_searches=K;
for entropy-guided search, also set config.env.search_when='entropy'.

The default is the released behaviour without its bugs. Differences from the
release:

  * the streaming parser finds information token by token. The release uses a
    regular expression that does not span lines, so information of several lines
    stays in its loss. env.train_information=True includes all information in
    the loss, unlike paper and release;
  * an answer within information has no reward (experiments/ssrl/reward.py lists
    the differences in the format);
  * the mask also applies to advantages and KL;
  * truncated importance weights relative to the engine's log-probs correct the
    loss (algorithm.tis='none' gives their loss);
  * a real search returns the same k passages every time, in the release a
    random 1 to 3; generations stop at the closing tag, whereas the release
    generates further text and discards it; prompt and answer are not cut to
    1,024 tokens;
  * uncertainty is the entropy of the whole distribution, in nats; the release
    uses -p log p of the sampled tokens (and this code path crashes);
  * an invalid action ends the trajectory, without feedback to the policy.
"""

from ml_collections import ConfigDict

from configs import algorithms, atlas
from searchrl_jax import schema

WORLD = dict(warm=240, rl=160, heldout=100, unseen=80)
REWARDS = ('graded', 'binary')
BASES = ('', 'atlas')


def get_config(arg=None):
  a = schema.parse_arg(
    arg,
    seed=0,
    model='',
    reward='graded',
    shuffled=False,
    no_information=False,
    base='',
  )
  if a.reward not in REWARDS:
    raise ValueError(
      f'config argument reward={a.reward!r}: one of {", ".join(REWARDS)}'
    )
  if a.model and (a.shuffled or a.no_information):
    raise ValueError(
      'config arguments shuffled and no_information are controls of the small '
      'form; leave model out'
    )
  if a.base not in BASES or a.base and (a.model or a.shuffled):
    raise ValueError(
      f'config argument base={a.base!r}: one of {", ".join(map(repr, BASES))}, '
      'without model or shuffled'
    )
  c = atlas.get_config(f'seed={a.seed}') if a.base else schema.base()
  c.name = 'ssrl'
  c.seed = a.seed
  c.checkpoint.best = ''  # the last checkpoint is reported
  c.env.information = 'policy'
  c.env.max_turns = 0
  c.algorithm.update(
    algorithms.GRPO | dict(aggregation='token', clip_dual=3.0, kl_coef=0.001)
  )
  c.reward = ConfigDict(
    dict(
      ssrl=dict(
        fn=f'experiments.ssrl.reward.{a.reward}', weight=1.0, format_weight=0.1
      )
    )
  )
  form = _full if a.model else _atlas if a.base else _small
  form(c, a)
  return c


def _small(c, a):
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
      intermediate_size=384,
      rope_theta=100.0,  # copying is learned sooner, see configs/quickstart.py
      rms_norm_eps=1e-6,
      tie_word_embeddings=True,
      hidden_act='silu',
      max_position_embeddings=512,
    )
  )
  c.model.init_scale = 0.05
  c.model.embed_scale = 0.09
  c.model.scan_unroll = 2

  c.data.world_module = 'experiments.ssrl.closedbook'
  c.data.world_seed = a.seed
  c.data.world = ConfigDict(WORLD)
  # By reference, so that all parts of a run use the same world.
  world = {name: c.data.world.get_ref(name) for name in WORLD}
  c.data.train.rl = ConfigDict(
    dict(module=c.data.world_module, split='rl', shuffled=a.shuffled, **world)
  )
  for split in ('heldout', 'unseen'):
    c.data.eval[split] = ConfigDict(
      dict(module=c.data.world_module, split=split, n=300, **world)
    )
  c.source.corpus = 'world'
  c.source.k = 1
  c.env.template = 'micro'
  # A whole attempt takes 30 to 85 tokens, an answer without a query 10.
  c.env.max_turn_tokens = 14 if a.no_information else 112
  c.env.max_tokens = 128
  c.env.max_observation_tokens = 48
  c.engine.slots = 32
  c.engine.max_len = 128
  c.engine.chunk = 8
  c.engine.prefill_rows = 16

  c.sft.data = ConfigDict(
    dict(
      module=c.data.world_module,
      n=16_000,
      queries=6_000,
      recalls=5_000,
      passages=1_500,
      pack=4,
      direct=0.1,
      poor=0.35,
      tilt=0.9,
      again=0.2,
      short=0.3,
      **world,
    )
  )
  c.sft.steps = 1000
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
  c.train.steps = 30
  c.eval.every = 10
  c.checkpoint.every = 10


def _atlas(c, a):
  # A whole attempt is one generation.
  c.env.max_turn_tokens = 14 if a.no_information else 288
  c.sft.data = ConfigDict(
    dict(
      module='experiments.arena.recitals',
      mix='skills',
      n=6_000,
      queries=2_000,
      recitals=40,
      turns=6,  # env.max_turns is 0
      **{name: c.data.world.get_ref(name) for name in atlas.WORLD},
    )
  )
  # Many small updates: facts are learned by repetition.
  c.sft.steps, c.sft.rows, c.sft.lr = 1900, 16, 2.5e-3
  c.eval.every = c.train.get_ref('steps')  # before and after


def _full(c, a):
  c.model.path = a.model
  c.model.dtype = 'bfloat16'
  c.model.remat = 'block'
  c.data.prompt = 'as_is'  # its prompts contain the instructions
  fields = dict(module='parquet', source='', split='', n=0, seed=0)
  c.data.train.ssrl = ConfigDict(dict(fields, path='ssrl/train.parquet'))
  c.data.eval.ssrl = ConfigDict(dict(fields, path='ssrl/test.parquet'))
  c.source.module = 'none'
  c.source.k = 3
  c.env.template = 'base'  # the tags, and the format of real observations
  c.env.max_turn_tokens = 4096
  c.env.max_tokens = 1024 + 4096
  c.env.max_observation_tokens = 500
  c.engine.dtype = 'bfloat16'
  c.engine.slots = 256
  c.engine.prefill_rows = 256  # 16 prompts of 512 tokens in one call
  c.engine.max_len = 1024 + 4096
  # Log-probs of two programs in bfloat16 differ by about this much.
  c.engine.canary_tolerance = 0.1
  c.rollout.questions = 256
  c.rollout.group = 5
  c.batch.lengths = (1024, 2048, 3072, 5120)
  c.batch.tokens = 5120
  c.optim.lr = 1e-6
  c.optim.warmup = 6  # 0.02 of the steps
  c.optim.weight_decay = 0.01
  c.train.steps = 300  # theirs: 5 epochs; set it to 5 x questions / 256
  c.eval.every = 16
  c.checkpoint.every = 50
