"""Wikipedia questions through real searches; from scratch, or any checkpoint.

  python -m searchrl_jax.sft --config=configs/wiki_nq.py --workdir=runs/warm
  python -m searchrl_jax.train --config=configs/wiki_nq.py \\
    --workdir=runs/wiki --config.train.init=runs/warm

needs the passages and questions of config.data.dir (corpus.jsonl.gz,
qa_train.jsonl.gz, qa_dev.jsonl.gz). experiments/search_r1/README.md has the
runtime and the figures of a run.

With a pretrained model, no warm start is needed:

  python -m searchrl_jax.train --config=configs/wiki_nq.py:model=/path/to/hf \\
    --workdir=runs/wiki_pretrained

uses its tokenizer, longer turns, and learning rates for a model of a few
billion parameters; `model=...,template=chat` is for an instruction-tuned model,
whose chat template then renders the prompt. `model=...,size=small` is for some
100 million parameters on a CPU (configs/gemma.py has a warm start for one).

Without pretrained weights a decoder of about a million parameters starts from
scratch: it must learn to copy a question into a query and a span of a passage
into an answer. Its warm start draws the kind of answer (a date, a name, a
title, ...) independently of the question; RL can then learn which kind a
question asks for, and whether to search. The reward is answer F1, because exact
matches are too rare to learn from. Figures are of the last checkpoint: none is
selected.
"""

from ml_collections import ConfigDict

from configs import machines
from searchrl_jax import schema


def get_config(arg=None):
  a = schema.parse_arg(arg, model='', template='', size='')
  if a.size not in ('', 'small') or a.size and not a.model:
    raise ValueError(
      f"config argument size={a.size!r}: '' or small, with model=PATH"
    )
  c = schema.base()
  c.name = 'wiki_nq'
  c.source.corpus = 'corpus.jsonl.gz'
  c.source.k = 3
  # All fields of a JSONL set, so that flags can change each.
  fields = dict(
    module='jsonl', layout='flashrag', source='', split='', hops=0, n=0, seed=0
  )
  c.data.train.nq = ConfigDict(dict(fields, path='qa_train.jsonl.gz'))
  c.data.eval.dev = ConfigDict(dict(fields, path='qa_dev.jsonl.gz'))
  c.checkpoint.best = ''  # the last checkpoint is reported
  c.algorithm.clip_high = 0.28
  if a.model:
    return _pretrained(c, a)

  c.model.tokenizer = 'bpe'
  c.model.bpe_vocab = 4096
  c.model.arch = ConfigDict(
    dict(
      model_type='qwen3',
      architectures=('Qwen3ForCausalLM',),
      hidden_size=128,
      num_hidden_layers=3,
      num_attention_heads=8,
      num_key_value_heads=8,
      head_dim=16,
      intermediate_size=384,
      rope_theta=100.0,  # copying is learned sooner, see configs/quickstart.py
      rms_norm_eps=1e-6,
      tie_word_embeddings=True,
      hidden_act='silu',
      max_position_embeddings=1024,
    )
  )
  c.model.init_scale = 0.05
  c.model.embed_scale = 0.09
  c.model.scan_unroll = 3
  c.env.template = a.template or 'plain'
  c.env.max_turns = 2
  c.env.max_turn_tokens = 64
  c.env.max_tokens = 384
  c.env.max_observation_tokens = 96
  c.engine.slots = 64
  c.engine.max_len = 384
  c.engine.prefill_rows = 16
  c.rollout.questions = 24
  c.rollout.group = 8
  c.reward.f1 = ConfigDict(dict(fn='answer.f1', weight=1.0))
  c.reward.format = ConfigDict(
    dict(fn='answer.format_valid', weight=0.1, require_think=True)
  )
  c.batch.lengths = (64, 128, 176, 256, 384)
  c.batch.tokens = 2048
  c.batch.loss_fraction = 0.4
  # A better query increases F1 little, so queries drift without this KL.
  c.algorithm.kl = 'loss'
  c.algorithm.kl_coef = 0.05
  c.optim.lr = 3e-4
  c.optim.b2 = 0.98
  c.train.steps = 1000
  c.eval.every = 60
  c.checkpoint.every = 20
  c.sft.data = ConfigDict(
    dict(
      module='experiments.search_r1.wiki_traces',
      path='qa_train.jsonl.gz',
      n=20_000,
      seed=0,
      k=3,
      good=0.0,
      poor=0.1,
      guess=0.1,
      max_answer_words=8,
      read=45,
      drills=20_000,
    )
  )
  c.sft.steps = 4000
  c.sft.rows = 32
  c.sft.lr = 2e-3
  c.sft.warmup = 50
  c.sft.save_every = 1000
  return c


def _pretrained(c, a):
  c.model.path = a.model
  c.model.dtype = 'bfloat16'
  c.model.remat = 'block'
  c.env.template = a.template or 'base'
  c.env.max_turns = 4
  c.env.max_turn_tokens = 500
  c.env.max_tokens = 4096
  c.env.max_observation_tokens = 500
  c.engine.dtype = 'bfloat16'
  c.engine.slots = 256
  # 16 observations in one prefill call.
  c.engine.prefill_rows = c.env.get_ref('max_observation_tokens') // 2
  c.engine.max_len = 4096
  # Log-probs of two programs in bfloat16 differ by about this much.
  c.engine.canary_tolerance = 0.1
  c.rollout.questions = 512
  c.rollout.group = 5
  c.algorithm.minibatches = 8
  c.algorithm.kl = 'loss'
  c.algorithm.kl_coef = 0.001
  c.reward.em = ConfigDict(dict(fn='answer.em', weight=1.0))
  c.batch.lengths = (1024, 2048, 4096)
  c.batch.tokens = 4096
  c.optim.lr = 1e-6
  c.optim.warmup = 30
  c.optim.weight_decay = 0.01
  c.train.steps = 200
  c.eval.every = 50
  c.checkpoint.every = 25
  if a.size:
    machines.small(c)
    c.env.template = a.template or c.env.template
  return c
