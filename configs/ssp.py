"""SSP, search self-play (Lu et al., arXiv 2510.18821): the policy asks itself.

  python -m searchrl_jax.sft --config=configs/ssp.py:part=1 --workdir=runs/1
  python -m searchrl_jax.sft --config=configs/ssp.py:part=2 --workdir=runs/2 \\
    --config.train.init=runs/1
  (part=3 from runs/2, and part=4 from runs/3, into runs/warm)
  python -m experiments.ssp.train --config=configs/ssp.py \\
    --workdir=runs/ssp --config.train.init=runs/warm

runs the small form: a decoder of 0.4 million parameters in a world of invented
people (experiments/ssp/world.py), minutes on 2 cores. With a checkpoint the
config is full size, on SSP's own list of answers:

  python -m experiments.ssp.train --config=configs/ssp.py:model=PATH \\
    --workdir=runs/ssp_7b --config.source.url=http://127.0.0.1:8000

A proposer gets an answer and searches until it asks a question. A verifier,
which cannot search, must find the answer in the passages that the proposer
read. A solver gets the question. The solver is rewarded for correct answers,
the proposer for wrong ones; neither needs a gold question. experiments/ssp/ has
the loop, figures and memory requirements. Arguments:

  model     '' = the small form
  pairing   grpo+reinforce (solver + proposer), grpo+grpo, ppo+ppo
  arm       ssp; frozen: the proposer keeps its initial parameters;
            frozen_twice: as frozen, but each trajectory of the solver is used
            twice, for as many updates as with a trained proposer; no_verifier;
            golds: RL on gold questions instead (small form; by train.py)
  reward    of the proposer: 1-acc, intermediate_difficulty,
            linear_difficulty, format_only; '' = 1-acc at full size, as in their
            script, intermediate_difficulty in the small form, because there
            1-acc teaches the proposer to fool the verifier (README)
  hops      that a proposal is asked for: '' = its brief names none; drawn: 1 to
            4, as 4:3:2:1; or the key of Question.meta that has the number
            (search_turns in SSP's list). A proposal is compared with those of
            the step that were asked for as many; what else the number counts
            for is in config.selfplay.hops
  path      coefficient of the divergence from a solver that reads how its
            question came about; 0 = none
  part      of the small form's warm start, 1 to 4; see PARTS
  base      '' = the above; atlas: the world and budgets of configs/atlas.py,
            with a warm start that continues its `skills`
            (experiments/arena/selfplay.py)
  layout, folder  of the seven evaluation sets, see seven.py
  seed

Options of their train_ssp.sh and the corresponding fields (of config.selfplay,
unless another is named):

  proposer.n               n (their PROPOSER_N)
  proposer.reward_type     reward; left, right: the same
  proposer.format_penalty  penalty (script 0, YAML -1)
  proposer.adv_estimator   algorithm, with all fields of config.algorithm
  proposer.warm_up_steps   solver_from (their -1 is 0)
  use_rag_filter           verifier: 'policy', 'judge', 'none'
  noisy_RAG_materials      noise
  use_search_terms_filter  answer_unsearched
  answer_pattern           tag
  extraction_failure.strategy             invalid: 'reuse', 'dummy', 'drop'
  .reuse_success_rate_threshold           reuse_threshold
  .pool_clear_interval, .keep_ratio       clear_every, keep_ratio
  dynamic_sampling.enable, .max_retry_attempts   resample, rounds; 0 = off
  dynamic_sampling.min_valid_ratio        min_valid
  reward_dynamic_sampling  algorithm.drop_zero_variance: such groups are left
                           out; their option never samples again
  combine_update, mini_epochs, save_freq  no field: there are two updates, on
                           one set of solver data; all trajectories are written

Differences from SSP's release that affect results (each file has more):

  * tokens of the policy and of the environment are distinguished, so questions,
    queries, evidence and answers are not searched in decoded text;
  * the policy verifies, as in the paper; the release asks the judge. Exact
    match decides in both cases; in the release the judge's grade decides;
  * importance weights relative to the engine's log-probs correct both updates
    for staleness; in the release the solver's data are one update old;
  * a proposer's advantage is its reward minus the mean of the others of the
    step, so that worthless questions become less likely; in the release it is
    the reward itself. The gradient is not scaled by 256 / 640;
  * a slot without a question stays empty ('drop') instead of getting copies;
    resampling keeps the invalid proposals;
  * the pool, the noise and ended trajectories are in the checkpoint;
  * a question whose judge failed is left out, and too many failures stop the
    run; a judge without an answer rejects the question;
  * figures are of the last checkpoint: none is selected.

What is not SSP's, and what each leaves out:

  * hops, linear_difficulty and selfplay.hops.term: Dr. Zero (arXiv 2601.07055;
    facebookresearch/drzero). Its reward is F / 2 + D. D is linear_difficulty
    with 5 solvers. Of F only the share of the hops that were asked for is left,
    because a proposal without the rest does not stand: min(h / n, 1) of h
    searches, or with term='oracle' of the true hops, which Dr. Zero never
    checks. (There it is (1 + h) / n: a proposer begins with a document, here
    with an answer.) Advantages are not divided by the spread of the few
    proposals that were asked for as many hops;
  * path: pi-Play (arXiv 2604.14054; its code was not read). The teacher is the
    policy, and reads the thoughts, queries and passages of the proposal behind
    the question. The reverse KL to it over the policy's 20 likeliest ids, times
    `path`, is added to the loss of the solver, which is a mean over tokens
    then. Dummies have no teacher. Small forms have traces of solvers that read
    such a path.
"""

from ml_collections import ConfigDict

from configs import algorithms, atlas, seven
from configs.methods import core
from searchrl_jax import schema

WORLD = dict(play=300, heldout=150)
MODULE = 'experiments.ssp.world'
HUB = 'hf://datasets/Quark-LLM/SSP/'
# Solver, proposer.
PAIRINGS = {
  'grpo+reinforce': (algorithms.GRPO, algorithms.REINFORCE),
  'grpo+grpo': (algorithms.GRPO, algorithms.GRPO),
  'ppo+ppo': (algorithms.PPO, algorithms.PPO),
}
# Behaviours in the traces (experiments/ssp/traces.py). HABITS is the behaviour
# at the start of self-play: proposals mostly have one hop, solvers stop early.
HABITS = dict(
  asked=(0.80, 0.12, 0.05, 0.03),
  proposed=(0.9, 0.08, 0.02),
  short=(0.6, 0.7, 0.8),
  long=0.1,
  wrong=0.05,
  around=0.15,
  absent=0.2,
)
SKILLS = dict(
  asked=(0.25, 0.25, 0.25, 0.25),
  proposed=(0.4, 0.35, 0.25),
  short=(0.0, 0.0, 0.0),
  long=0.0,
  wrong=0.0,
  around=0.1,
  absent=0.2,
)
# The parts of the warm start, in order: copying names, looking statements up
# (by drills), chaining them, and the habits at the start of self-play.
PARTS = (
  (HABITS | dict(solver=0.3, proposer=0.4, drill=0.0), 2000, 3e-3),
  (HABITS | dict(solver=0.3, proposer=0.25, drill=0.15), 800, 2.5e-3),
  (SKILLS | dict(solver=0.35, proposer=0.35, drill=0.1), 600, 2e-3),
  (
    HABITS
    | dict(
      solver=0.35,
      proposer=0.35,
      drill=0.1,
      asked=(0.6, 0.2, 0.12, 0.08),
      short=(0.4, 0.5, 0.6),
    ),
    120,
    5e-4,
  ),
)
# Of traces whose briefs name a number of hops: how often 1, 2, ... are asked
# for, and how often a proposal heeds it. The others have fewer.
ASKED = dict(proposed=(0.4, 0.3, 0.2, 0.1), heeds=0.7)
# Of the small forms.
RULES = dict(noise=1, penalty=-0.25, dummy='What is not')
ARMS = ('ssp', 'frozen', 'frozen_twice', 'no_verifier', 'golds')


def get_config(arg=None):
  a = schema.parse_arg(
    arg,
    seed=0,
    model='',
    pairing='grpo+reinforce',
    arm='ssp',
    reward='',
    hops='',
    path=0.0,
    part=4,
    layout='flashrag',
    folder='',
    base='',
  )
  for name, known in (
    ('pairing', PAIRINGS),
    ('arm', ARMS),
    ('base', ('', 'atlas')),
  ):
    if a[name] not in known:
      raise ValueError(
        f'config argument {name}={a[name]!r}: one of '
        f'{", ".join(map(repr, known))}'
      )
  if a.model and a.arm == 'golds':
    raise ValueError(
      "config argument arm='golds' is a control of the small form, whose "
      'questions are known; leave model out'
    )
  if a.base and (a.model or a.arm == 'golds'):
    raise ValueError(
      f'config argument base={a.base!r} is a small form of self-play; leave '
      "model and arm='golds' out (GRPO of the arena is that arm)"
    )
  if not 1 <= a.part <= len(PARTS):
    raise ValueError(f'config argument part={a.part}: 1 to {len(PARTS)}')
  c = atlas.get_config(f'seed={a.seed}') if a.base else schema.base()
  c.name = 'ssp'
  c.seed = a.seed
  c.checkpoint.best = ''  # the last checkpoint is reported
  c.reward = ConfigDict(dict(em=dict(fn='answer.em', weight=1.0)))
  c.selfplay = selfplay()
  # One solver, as of PPO, is right or wrong: no difficulty is intermediate.
  alone = a.model or a.pairing == 'ppo+ppo'
  reward = '1-acc' if alone else 'intermediate_difficulty'
  c.selfplay.reward = a.reward or reward
  solver, proposer = PAIRINGS[a.pairing]
  c.algorithm.update(solver)
  c.selfplay.algorithm.update(proposer)
  (_full if a.model else _atlas if a.base else _small)(c, a)
  if a.pairing == 'grpo+grpo':
    c.selfplay.n = c.rollout.group
    c.rollout.questions //= c.rollout.group
  if a.pairing == 'ppo+ppo':
    c.rollout.group = 1
    c.critic.lr = 1e-5 if a.model else 1e-3
  if a.arm in ('frozen', 'frozen_twice'):
    c.selfplay.frozen = True
  if a.arm == 'frozen_twice':
    c.algorithm.epochs = 2
  if a.arm == 'no_verifier':
    c.selfplay.verifier = 'none'
  if a.arm == 'golds':
    _golds(c)
  if a.hops:
    _ask_hops(c, a)
  if a.path:
    _tell_path(c, a)
  return c


def selfplay() -> ConfigDict:
  """Every field of config.selfplay, which experiments/ssp reads."""
  s = ConfigDict()
  s.n = 1  # proposals of one answer
  s.tag = 'question'  # the tag around a proposer's question
  s.template = 'micro_proposer'  # of the proposer; its `answer` is the question
  # Its prompt's slot: {answer} {searches} {examples}. {searches} is the number
  # of hops that it is asked for, else Question.meta's search_turns.
  s.brief = '{answer}'
  s.reader = 'micro_evidence'  # the verifier's template
  s.reading = '{evidence}\nQuestion: {question}'  # its prompt's slot
  s.algorithm = ConfigDict(schema.base().algorithm.to_dict())  # the proposer's
  s.frozen = False  # the proposer keeps its initial parameters (a control)
  s.solver_from = 0  # first step in which the solver learns
  # Conditions on a question; further rules have no field.
  s.min_chars, s.max_chars = 10, 1000
  s.min_words = 10
  s.min_searches = 2
  s.answer_unsearched = False  # no query may contain the answer
  s.verifier = 'policy'  # policy; judge: the server of config.judge; none
  s.noise = 4  # bundles of other questions' evidence in the verifier's prompt
  # The proposer's reward.
  # 1-acc, intermediate_difficulty, linear_difficulty, format_only
  s.reward = '1-acc'
  s.left, s.right = 0.0, 1.0  # of intermediate_difficulty
  s.penalty = 0.0  # reward of an invalid proposal
  s.train_invalid = True  # invalid proposals are in the proposer's batch
  # Hops that a proposal is asked for.
  s.hops = ConfigDict()
  s.hops.asked = ''  # '' = none; drawn; or the key of Question.meta that has it
  s.hops.shares = (4.0, 3.0, 2.0, 1.0)  # of 1, 2, ... hops; of asked='drawn'
  s.hops.searched = False  # a proposal needs as many searches
  # searches, oracle: one that stands earns weight x min(h / n, 1) more, of n
  # hops and h searches, or h true hops by selfplay.oracle; '' = nothing more
  s.hops.term = ''
  s.hops.weight = 0.5
  s.hops.shuffled = False  # a control: rules and rewards see another's number
  # Slots of invalid proposals.
  s.invalid = 'reuse'  # reuse, dummy, drop
  s.empty_pool = 'dummy'  # dummy, drop: in place of reuse if the pool is empty
  s.dummy = 'no question'
  s.reuse_threshold = 1.0  # maximum success rate of a question that is reused
  s.clear_every = 10  # steps; 0 = never
  s.keep_ratio = 0.0  # share of the pool that is kept, the newest
  s.resample = 0  # maximum rounds of further answers for invalid proposals
  s.min_valid = 1.0  # share of valid slots at which these rounds end
  # A function of the config, for metrics and hops.term; '' = none
  s.oracle = ''
  return s


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
      intermediate_size=256,
      # For copying over 250 tokens; configs/quickstart.py needs 100.
      rope_theta=1000.0,
      rms_norm_eps=1e-6,
      tie_word_embeddings=True,
      hidden_act='silu',
      max_position_embeddings=512,
    )
  )
  c.model.init_scale = 0.05
  c.model.embed_scale = 0.09
  c.model.scan_unroll = 2

  c.data.world_module = MODULE
  c.data.world_seed = a.seed
  c.data.world = ConfigDict(WORLD)
  # By reference, so that all parts of a run use the same world.
  world = {name: c.data.world.get_ref(name) for name in WORLD}
  c.data.train.answers = ConfigDict(
    dict(module=MODULE, split='play', n=0, hops=(), **world)
  )
  for name, n, hops in (('onehop', 100, (1,)), ('multihop', 300, (2, 3, 4))):
    c.data.eval[name] = ConfigDict(
      dict(module=MODULE, split='heldout', n=n, hops=hops, **world)
    )
  c.source.corpus = 'world'
  c.source.k = 1
  c.env.template = 'micro'
  c.env.max_turns = 5
  c.env.max_turn_tokens = 40
  c.env.max_tokens = 320
  c.env.max_observation_tokens = 48
  c.engine.slots = 32
  c.engine.max_len = 320
  c.engine.chunk = 8
  c.engine.prefill_rows = 16

  mix, steps, lr = PARTS[a.part - 1]
  c.sft.data = ConfigDict(
    dict(
      module='experiments.ssp.traces',
      n=40_000,
      worlds=400,
      people=100,
      bundles=1,
      prompt_tokens=220,
      proposer='micro_proposer',
      verifier='micro_evidence',
      mix=mix,
    )
  )
  c.sft.steps = steps
  c.sft.rows = 32
  c.sft.lr = lr
  c.sft.warmup = 50
  c.sft.save_every = 250

  c.selfplay.update(RULES, min_words=7, oracle='experiments.ssp.oracle.make')
  c.rollout.questions = 48
  c.rollout.group = 4
  for one in (c.algorithm, c.selfplay.algorithm):
    one.update(dict(kl='none', kl_coef=0.0))
  c.batch.lengths = (64, 96, 160, 320)
  c.batch.tokens = 2048
  c.batch.loss_fraction = 0.7
  c.optim.lr = 3e-4
  c.optim.b2 = 0.99
  c.train.steps = 20
  c.eval.every = 5
  c.checkpoint.every = 5


def _atlas(c, a):
  module = 'experiments.arena.selfplay'
  world = {name: c.data.world.get_ref(name) for name in atlas.WORLD}
  c.data.world_module = module
  c.data.train = ConfigDict(
    dict(answers=dict(module=module, split='train', **world))
  )
  c.env.max_turn_tokens = 48  # a question of four hops, and a thought
  c.sft.data = ConfigDict(
    dict(
      module=module,
      mix='even',
      roles=dict(
        solver=0.3,
        proposer=0.25,
        drill=0.15,
        proposed=(0.6, 0.3, 0.1),
        wrong=0.05,
        absent=0.2,
      ),
      n=16_000,
      worlds=40,
      turns=c.env.get_ref('max_turns'),
      people=200,
      **world,
    )
  )
  c.sft.steps = 500
  c.sft.lr = 2e-3
  c.selfplay.update(
    RULES,
    template='experiments/arena/proposer.json',
    tag='refine',  # the vocabulary has no tag for a question
    min_words=5,
    min_searches=1,
    oracle=f'{module}.make',
  )
  c.rollout.questions = 24
  c.rollout.group = 4
  for one in (c.algorithm, c.selfplay.algorithm):
    one.update(dict(kl='none', kl_coef=0.0))
  c.eval.every = c.train.get_ref('steps')  # before and after


def _ask_hops(c, a):
  s = c.selfplay
  s.hops.asked = a.hops
  if s.algorithm.advantage == 'reinforce':
    s.algorithm.advantage = 'experiments.ssp.game.by_hops'
  if not a.model:
    s.brief = '{answer} {searches}'
    c.sft.data.brief = s.brief
    _behaviour(c).update(ASKED)
  if a.base:  # chains of four have to be learnt, and read by the verifier
    c.sft.data.n, c.sft.steps = 24_000, 1000


def _tell_path(c, a):
  core.make_room(c)
  c.algorithm.aggregation = 'token'  # which the teacher's distance needs
  c.teacher.context = 'experiments.ssp.game.told_path'
  # A teacher with the policy's own weights follows it wherever it drifts.
  c.teacher.weights = 'frozen'
  c.teacher.columns.update(k=20, distance='reverse', coef=a.path)
  if not a.model:
    _behaviour(c).told = 0.1


def _behaviour(c) -> ConfigDict:
  """Of the small forms' traces."""
  return c.sft.data.roles if 'roles' in c.sft.data else c.sft.data.mix


def _golds(c):
  """Gold questions of 1 to 4 hops, with as many trajectories as self-play."""
  c.data.train.answers.update(dict(n=1200, hops=(1, 2, 3, 4)))
  c.rollout.group += c.selfplay.n


def _full(c, a):
  c.model.path = a.model
  c.model.dtype = 'bfloat16'
  c.model.remat = 'block'
  c.data.train.answers = ConfigDict(
    dict(
      module='jsonl',
      layout='ssp',
      path=HUB + 'train_answers_random_hop_50000_proposer.jsonl',
    )
  )
  c.data.eval = seven.sets(a.layout, folder=a.folder)
  c.source.k = 3
  c.env.template = 'search_r1'
  s = c.selfplay
  s.template, s.reader = 'proposer', 'rag'
  s.brief = (
    'Answer: {answer}\nNumber of searches: {searches}\nExamples:\n{examples}'
  )
  s.reading = '{evidence}\n\nQuestion: {question}'
  s.dummy = 'There is no question. Write what you guess the answer to be.'
  c.env.max_turns = 9  # their tenth cannot use the result of its search
  c.env.max_turn_tokens = 2048
  c.env.max_observation_tokens = 1500
  c.env.max_tokens = 4096 + 8192
  c.engine.dtype = 'bfloat16'
  c.engine.slots = 256
  # 4 observations in one prefill call.
  c.engine.prefill_rows = c.env.get_ref('max_observation_tokens') // 8
  c.engine.max_len = 4096 + 8192
  # Log-probs of two programs in bfloat16 differ by about this much.
  c.engine.canary_tolerance = 0.1

  c.rollout.questions = 256
  c.rollout.group = 5
  for one in (c.algorithm, s.algorithm):
    one.clip_high = 0.285
    if one.loss == 'clip':
      one.clip_dual = 3.0
    if one.advantage != 'gae':
      one.update(dict(kl='loss', kl_estimator='k3', kl_coef=0.01))
      # Their microbatches have one sequence, so all have equal weight.
      one.aggregation = 'sequence'
  c.algorithm.minibatches = 2
  c.optim.lr = 1e-6
  c.optim.warmup = 5
  c.optim.weight_decay = 0.01
  c.batch.lengths = (1024, 2048, 4096, 8192, 12288)
  c.batch.tokens = 12288
  c.train.steps = 1950  # 10 epochs of 50,000 answers
  c.eval.every = 5
  c.eval.questions = 500  # of each set
  c.checkpoint.every = 5
