"""Search self-play."""

from configs import algorithms
from configs import common
from ml_collections import ConfigDict

WORLD = dict(play=300, heldout=150)
MODULE = 'experiments.ssp.world'


def get_config(arg=None):
  a = common.parse_arg(arg, seed=0, model='')
  c = common.base()
  c.name = 'ssp'
  c.seed = a.seed
  c.algorithm.update(algorithms.GRPO | dict(kl='none', kl_coef=0.0))
  c.selfplay = selfplay()
  _small(c, a)
  return c


def selfplay() -> ConfigDict:
  """Every field of config.selfplay, which experiments/ssp reads."""
  s = ConfigDict()
  s.n = 1  # proposals of one answer
  s.tag = 'question'  # what a proposer's question stands in
  s.template = 'micro_proposer'  # the proposer's, its `answer` the question
  s.brief = '{answer}'  # its prompt's slot: {answer} {searches} {examples}
  s.reader = 'micro_evidence'  # the verifier's template
  s.reading = '{evidence}\nQuestion: {question}'  # its prompt's slot
  s.algorithm = ConfigDict(common.base().algorithm.to_dict())  # the proposer's
  s.algorithm.update(algorithms.REINFORCE)
  s.frozen = False  # the proposer stays as it starts (a control)
  s.solver_from = 0  # first step in which the solver learns
  # What a question must be; further rules have no field.
  s.min_chars, s.max_chars = 10, 1000
  s.min_words = 10
  s.min_searches = 2
  s.answer_unsearched = False  # the answer in no query
  s.verifier = 'policy'  # policy; judge: the server of config.judge; none
  s.noise = 4  # foreign bundles of evidence that its reader sees
  # The proposer's reward.
  s.reward = '1-acc'  # 1-acc, intermediate_difficulty, format_only
  s.left, s.right = 0.0, 1.0  # of intermediate_difficulty
  s.penalty = 0.0  # of a proposal that does not stand
  s.train_invalid = True  # these are in the proposer's batch
  # Slots of proposals that do not stand.
  s.invalid = 'reuse'  # reuse, dummy, drop
  s.empty_pool = 'dummy'  # dummy, drop: what reuse does without a pool
  s.dummy = 'no question'
  s.reuse_threshold = 1.0  # largest success of a question that is reused
  s.clear_every = 10  # steps; 0 = never
  s.keep_ratio = 0.0  # of the pool, the newest
  s.resample = 0  # rounds of further answers while too few proposals stand
  s.min_valid = 1.0  # share of slots that these rounds want filled
  s.oracle = ''  # a function of the config, for metrics alone; '' = none
  return s


def _small(c, a):
  c.model.tokenizer = 'world'
  c.model.arch = ConfigDict(dict(
    model_type='qwen3', architectures=('Qwen3ForCausalLM',),
    hidden_size=128, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=8, head_dim=16, intermediate_size=256,
    rope_theta=100.0,  # copying is learned sooner, see configs/quickstart.py
    rms_norm_eps=1e-6, tie_word_embeddings=True, hidden_act='silu',
    max_position_embeddings=512,
  ))
  c.model.init_scale = 0.05
  c.model.embed_scale = 0.09
  c.model.scan_unroll = 2

  c.data.world_module = MODULE
  c.data.world_seed = a.seed
  c.data.world = ConfigDict(WORLD)
  # By reference: all parts of a run ask about one world.
  world = {name: c.data.world.get_ref(name) for name in WORLD}
  c.data.train.answers = ConfigDict(dict(
    module=MODULE, split='play', hops=(), **world
  ))
  c.data.eval.heldout = ConfigDict(dict(
    module=MODULE, split='heldout', n=400, hops=(1, 2, 3, 4), **world
  ))
  c.source.corpus = 'world'
  c.source.k = 1
  c.env.template = 'micro'
  c.env.max_turns = 5
  c.env.max_turn_tokens = 40
  c.env.max_tokens = 320
  c.env.max_observation_tokens = 48
  c.engine.slots = 128
  c.engine.max_len = 320
  c.engine.chunk = 8
  c.engine.prefill_rows = 16

  c.sft.data = ConfigDict(dict(
    module='experiments.ssp.traces', n=30_000, worlds=60, people=200,
    bundles=2, prompt_tokens=220, proposer='micro_proposer',
    verifier='micro_evidence', mix=dict(
      solver=0.4, proposer=0.35, asked=(0.80, 0.12, 0.05, 0.03),
      proposed=(0.9, 0.08, 0.02), short=(0.4, 0.6, 0.75), long=0.1, wrong=0.1,
      around=0.15, absent=0.25,
    ),
  ))
  c.sft.steps = 1500
  c.sft.rows = 32
  c.sft.lr = 2e-3
  c.sft.warmup = 50

  c.selfplay.min_words = 7
  c.selfplay.noise = 2
  c.selfplay.dummy = 'What is not'
  c.selfplay.oracle = 'experiments.ssp.oracle.make'

  c.rollout.questions = 48
  c.rollout.group = 4
  c.reward.em = ConfigDict(dict(fn='answer.em', weight=1.0))
  c.batch.lengths = (64, 96, 128, 192, 256, 320)
  c.batch.tokens = 2048
  c.batch.loss_fraction = 0.7
  c.optim.lr = 3e-4
  c.optim.b2 = 0.99
  c.train.steps = 30
  c.eval.every = 10
  c.checkpoint.every = 10
