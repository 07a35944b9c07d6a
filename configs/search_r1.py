"""Search-R1 (Jin et al., arXiv 2503.09516): RL with searches inside a thought.

  python -m searchrl_jax.sft --config=configs/search_r1.py --workdir=runs/warm
  python -m searchrl_jax.train --config=configs/search_r1.py:algorithm=ppo \\
    --workdir=runs/ppo --config.train.init=runs/warm

runs the small form: the quickstart's model and world, 4 minutes on 2 cores.
With a checkpoint (a Hugging Face folder or name) the config is full size:

  python -m searchrl_jax.train \\
    --config=configs/search_r1.py:model=Qwen/Qwen2.5-3B,algorithm=grpo \\
    --workdir=runs/search_r1 --config.source.url=http://127.0.0.1:8000

experiments/search_r1/ has figures (of the last checkpoint: none is selected),
memory requirements, and the fields that correspond to each override of the
original's scripts. Arguments:

  model      '' = the small form
  algorithm  grpo, ppo, reinforce
  template   base, chat, search_r1, or a JSON file; small: micro
  reward     em; format: shaped by the format (as in their v0.3)
  version    released: the scripts in the root (2 searches, then an answer);
             v0.2: 4 searches, as in the paper's figures; v0.3: those with the
             format's learning rate for GRPO; paper: v0.2 with the paper's GRPO,
             in which all answers have equal weight
  baseline   no_search: RL without searches; direct, cot (chain of thought), rag
             (one search with the question): prompts only, for evaluation
  profile    search_r1: `evaluate` for checkpoints that Search-R1 trained, see
             the README; add version=v0.2 for checkpoints of v0.2
  layout, folder  of the questions, see configs/seven.py: Search-R1's
             train.parquet and test.parquet, or FlashRAG's files
  machine    mesh, slots and adapters for a machine by its name, such as h200x8
             (configs/machines.py); training, GRPO or REINFORCE
  tokens     of a trajectory at most: 4608, the released limits of the context
             of a last turn (4096) and of its reply; or 16384
  seed

The default is the released behaviour without its bugs. Differences from the
release:

  * training uses the token ids that were sampled; the release decodes, cuts and
    encodes them again, so the policy never learns to end a turn;
  * the loss is the mean over all tokens of a minibatch; the release averages
    the means of microbatches;
  * GAE, whitening and the critic also exclude observations;
  * training samples without nucleus sampling (0.95, a default that most of
    their scripts keep), because the trainer scores the whole distribution;
  * a trajectory without an answer has no answer; the release extracts and
    compares the example of the template, and its shaped reward is positive for
    any text (`released` of the reward restores that);
  * observations are cut between passages and keep their closing tag;
  * groups are formed by question; in the release, ids of merged sets collide;
  * evaluation is greedy; the release samples, because a flag has no effect;
  * truncated importance weights relative to the engine's log-probs correct the
    loss (algorithm.tis='none' gives their loss); groups are assigned to
    minibatches at random in each step;
  * "REINFORCE" is only in their paper and README; this recipe uses the mean of
    the other returns of the batch as baseline, and PPO's KL penalty.
"""

from ml_collections import ConfigDict

from configs import algorithms, machines, quickstart, seven
from searchrl_jax import schema

ALGORITHMS = {
  'grpo': algorithms.GRPO | dict(aggregation='token', kl_coef=0.001),
  'ppo': algorithms.PPO,
  'reinforce': algorithms.REINFORCE
  | dict(kl='reward', kl_estimator='k1', kl_coef=0.001),
}
VERSIONS = ('released', 'v0.2', 'v0.3', 'paper')
BASELINES = ('', 'no_search', 'direct', 'cot', 'rag')
REWARDS = {
  'em': dict(fn='answer.em', weight=1.0),
  'format': dict(
    fn='answer.search_r1_format',
    weight=1.0,
    structure=0.2,
    retrieval=0.0,
    final=0.1,
    require_think=True,
    released=False,
  ),
}


def get_config(arg=None):
  a = schema.parse_arg(
    arg,
    seed=0,
    model='',
    algorithm='grpo',
    template='',
    reward='em',
    version='released',
    baseline='',
    profile='',
    layout='search_r1',
    folder='',
    machine='',
    tokens=4608,
  )
  for name, known in (
    ('algorithm', ALGORITHMS),
    ('reward', REWARDS),
    ('version', VERSIONS),
    ('baseline', BASELINES),
    ('profile', ('', 'search_r1')),
    ('machine', ('', *machines.TOPOLOGIES)),
    ('tokens', machines.LENGTHS),
  ):
    if a[name] not in known:
      raise ValueError(
        f'config argument {name}={a[name]!r}: one of '
        f'{", ".join(map(repr, known))}'
      )
  for name, none in (('profile', ''), ('machine', ''), ('tokens', 4608)):
    if a[name] != none and not a.model:
      raise ValueError(
        f'config argument {name}={a[name]!r} needs model=PATH: the checkpoint'
      )
  c = _full(a) if a.model else _small(a)
  c.name = 'search_r1'
  c.seed = a.seed
  c.checkpoint.best = ''  # the last checkpoint is reported
  c.algorithm.update(ALGORITHMS[a.algorithm])
  c.algorithm.entropy_coef = 0.001
  if a.version == 'paper' and a.algorithm == 'grpo':
    c.algorithm.aggregation = 'sequence'
  c.reward = ConfigDict({a.reward: REWARDS[a.reward]})
  if a.baseline:
    c.env.max_turns = 0
  if a.baseline == 'rag':
    _one_shot(c)
  return c


def _small(a):
  if a.template:
    raise ValueError(
      f'config argument template={a.template!r} needs model=PATH: the small '
      "form knows the words of template 'micro' alone"
    )
  c = quickstart.get_config()
  c.data.world_seed = a.seed
  c.train.steps = 40  # greedy accuracy stops improving after 20 to 30
  if a.baseline == 'direct':
    c.env.template = 'micro_direct'
  if a.algorithm != 'grpo':
    # As many trajectories as 32 x 8, each of a different question.
    c.rollout.questions = 256
    c.rollout.group = 1
  if a.algorithm == 'ppo':
    c.critic.lr = 1e-3
  return c


def _full(a):
  c = schema.base()
  c.model.path = a.model
  c.model.dtype = 'bfloat16'
  c.model.remat = 'block'
  c.source.k = 3
  named = {'': 'base', 'no_search': 'cot'}.get(a.baseline, a.baseline)
  if a.profile:
    named = 'search_r1_released'
  c.env.template = a.template or named
  c.env.max_turns = 2 if a.version == 'released' else 4
  c.env.max_turn_tokens = 500
  c.env.max_observation_tokens = 500
  c.env.max_tokens = c.engine.max_len = c.batch.tokens = a.tokens
  c.engine.dtype = 'bfloat16'
  c.engine.slots = 256
  # 16 observations in one prefill call.
  c.engine.prefill_rows = c.env.get_ref('max_observation_tokens') // 2
  # Log-probs of two programs in bfloat16 differ by about this much.
  c.engine.canary_tolerance = 0.1

  c.train.steps = 1004  # their code does not run the last of its 1005
  grouped = a.algorithm == 'grpo'
  c.rollout.questions = 512
  c.rollout.group = 5 if grouped else 1
  c.algorithm.minibatches = 10 if grouped else 2  # of 256 trajectories
  # Their schedules count steps; ours count updates.
  c.optim.lr = 5e-7 if a.version == 'v0.3' and grouped else 1e-6
  c.optim.warmup = round(0.285 * 1005) * c.algorithm.minibatches
  c.optim.weight_decay = 0.01
  if a.algorithm == 'ppo':
    c.critic.lr = 1e-5
    c.critic.warmup = round(0.015 * 1005) * c.algorithm.minibatches
    c.critic.weight_decay = 0.01
  c.batch.lengths = machines.LENGTHS[a.tokens]
  c.checkpoint.every = 100
  c.eval.every = 50
  c.eval.questions = 512  # of each set, during training; 0 = all
  c.data.train = seven.sets(
    a.layout, 'train', names=('nq', 'hotpotqa'), folder=a.folder
  )
  c.data.eval = seven.sets(a.layout, folder=a.folder)
  if a.machine:
    machines.apply(c, a.machine, a.model, a.tokens)
  if a.profile:
    c.eval.questions = 0
    if not a.template:
      c.data.prompt = 'as_is'  # their prompt, from their file
  return c


def _one_shot(c):
  """Adds to each question the passages that a search with it finds."""
  k = c.source.get_ref('k') if c.source.corpus != 'world' else 3
  for sets in (c.data.train, c.data.eval):
    for name, fields in sets.items():
      sets[name] = ConfigDict(
        dict(
          module='experiments.search_r1.one_shot',
          of=fields,
          k=k,
          url=c.source.get_ref('url'),
        )
      )
