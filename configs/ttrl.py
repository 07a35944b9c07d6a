"""TTRL (Zuo et al., arXiv 2504.16084): the majority answer is the label.

  python -m searchrl_jax.sft --config=configs/ttrl.py --workdir=runs/warm
  python -m searchrl_jax.train --config=configs/ttrl.py \\
    --workdir=runs/ttrl --config.train.init=runs/warm

runs the small form on search questions: the quickstart's model and world, and a
warm start with many different wrong answers. Minutes on 2 cores. With a
checkpoint the config is full size, on TTRL's own JSON, read unchanged:

  python -m searchrl_jax.train \\
    --config=configs/ttrl.py:model=Qwen/Qwen2.5-Math-1.5B,base=math,path=AIME \\
    --workdir=runs/ttrl_aime --config.data.dir=DATA

experiments/ttrl/ has figures, memory requirements and the original's figures.
Arguments:

  model    '' = the small form
  base     search: searches on a server, as configs/search_r1.py; ssrl: the
           policy writes its information, as configs/ssrl.py; math: boxed
           answers, no search; atlas: the world and warm starts of
           configs/atlas.py, whose held-out questions are the test-time set
           (small form)
  path     the folder of train.json and test.json (base=math at full size)
  heldout  a folder with another test.json, also evaluated
  algorithm  grpo, ppo, reinforce
  label    majority; controls: golds (the upper bound), random (a uniform choice
           among the different answers), random_vote (a uniform choice among
           the votes); votes that are to keep a majority from turning wrong
           (rewards/guarded.py): found, covered (generated worlds), restrain;
           compared in experiments/ttrl/README.md
  start    the folder of an evaluation of the start, with samples of each
           question: steps then say what has changed since, and `restrain` needs
           it (experiments/ttrl/start.py has the command)
  planted  a control: the share of test-time questions whose top passage is
           contradicted by a planted one (small search form)
  seed

The run trains on the test-time set without its golden answers, which only the
metrics use, and evaluates on it; it also evaluates on a held-out set of the
same kind. The original trains and evaluates on one file only. No checkpoint is
selected, because golden answers would select on the reported scores: figures
are of the last one. Only the checkpoints of checkpoint.every are written.

rollout.group = N samples vote, and reward.vote.train = M of them are trained
on: 64 and 32 at full size, 16 and 8 in the small forms, so that they take
minutes. rewards/vote.py lists differences from the released code. Others:
  * the M samples are the first in the order of the requests; in the release
    they are the first after sorting by length;
  * evaluation is greedy in the small forms; pass@1 and maj@N are in
    experiments/ttrl/rows.py. At full size it samples like the release
    (temperature 0.6, nucleus 0.95, 16 samples), with exact maj@16 instead of a
    bootstrap;
  * truncated importance weights relative to the engine's log-probs correct the
    loss (algorithm.tis='none' gives their loss).
"""

from ml_collections import ConfigDict

from configs import algorithms, atlas, quickstart, search_r1, ssrl
from searchrl_jax import schema

BASES = ('search', 'ssrl', 'math', 'atlas')
LABELS = {
  'majority': 'vote.majority',
  'found': 'guarded.found',
  'covered': 'guarded.covered',
  'restrain': 'guarded.restrain',
  'golds': 'experiments.ttrl.controls.golds',
  'random': 'experiments.ttrl.controls.random',
  'random_vote': 'experiments.ttrl.controls.random_vote',
}
# Fields of a label besides those of the vote. Of restrain, ours: 6 of 16 votes
# against ten different ones have a weight of .83, and a Gaussian of .5 gives
# them .21. Two votes of 16 that agree by chance are no majority.
FIELDS = {
  'covered': dict(cover='experiments.ttrl.coverage.share'),
  'restrain': dict(centre=1.0, sigma=0.25, penalty=1.0),
}
ALGORITHMS = {
  'grpo': algorithms.GRPO
  | dict(aggregation='token', clip_dual=3.0, kl_coef=0.001),
  'ppo': algorithms.PPO,
  'reinforce': algorithms.REINFORCE
  | dict(kl='reward', kl_estimator='k1', kl_coef=0.001),
}
ASKED, HELDOUT = 160, 200  # questions of the small search form


def get_config(arg=None):
  a = schema.parse_arg(
    arg,
    seed=0,
    model='',
    base='search',
    path='',
    heldout='',
    algorithm='grpo',
    label='majority',
    start='',
    planted=0.0,
  )
  for name, known in (
    ('base', BASES),
    ('label', LABELS),
    ('algorithm', ALGORITHMS),
  ):
    if a[name] not in known:
      raise ValueError(
        f'config argument {name}={a[name]!r}: one of {", ".join(known)}'
      )
  if bool(a.path) != (a.base == 'math' and bool(a.model)):
    raise ValueError(
      f'config argument path={a.path!r}: the folder of train.json and '
      'test.json, required by base=math with model=PATH and not used otherwise'
    )
  if a.heldout and not a.path:
    raise ValueError(
      f'config argument heldout={a.heldout!r}: a folder beside that of path'
    )
  if a.model and a.base == 'atlas':
    raise ValueError(
      f'config argument model={a.model!r} with base=atlas, a small form: leave '
      'one of them out'
    )
  if a.planted and (a.base != 'search' or a.model):
    raise ValueError(
      f'config argument planted={a.planted}: a control of the small form on '
      'search questions; leave base and model out'
    )
  generated = not a.model and a.base in ('search', 'atlas')
  if a.label == 'covered' and not generated:
    raise ValueError(
      f'config argument label=covered with base={a.base}, model={a.model!r}: '
      'only questions of the generated worlds can be read (base=search or '
      'atlas, small form); on others use label=found or restrain'
    )
  if a.label == 'found' and a.base in ('math', 'ssrl'):
    raise ValueError(
      f'config argument label=found with base={a.base}, where no source is '
      'searched: use label=restrain'
    )
  if a.label == 'restrain' and a.algorithm != 'grpo':
    raise ValueError(
      f'config argument label=restrain with algorithm={a.algorithm}: it is an '
      'advantage of GRPO; use algorithm=grpo'
    )
  forms = {'search': _search, 'ssrl': _ssrl, 'math': _math, 'atlas': _atlas}
  c = forms[a.base](a)
  c.name = 'ttrl'
  c.seed = a.seed
  c.checkpoint.best = ''  # the last checkpoint is reported
  c.algorithm = schema.base().algorithm
  c.algorithm.update(ALGORITHMS[a.algorithm])
  c.algorithm.minibatches = 8 if a.model else 1
  if a.algorithm == 'ppo':
    c.critic.lr = 1e-5 if a.model else 1e-3
  c.rollout.group = 64 if a.model else 16
  c.reward = ConfigDict(
    dict(
      vote=dict(
        fn=LABELS[a.label],
        weight=1.0,
        votes=c.rollout.get_ref('group'),
        train=32 if a.model else 8,
        match=c.eval.get_ref('match'),
        # With golds, a question whose votes are all wrong has no label.
        max_abstained=1.0 if a.label == 'golds' else 0.5,
        **FIELDS.get(a.label, {}),
      )
    )
  )
  if a.label == 'restrain':
    c.reward.vote.least = 3 * c.rollout.group // 16
    c.algorithm.advantage, c.algorithm.advantage_kw = 'given', ConfigDict()
  if a.start:
    ((name, asked),) = c.data.train.items()
    c.data.train[name] = ConfigDict(
      dict(module='experiments.ttrl.start', of=asked, votes=a.start)
    )
  return c


def _search(a):
  c = search_r1.get_config(f'seed={a.seed},model={a.model}')
  if a.model:
    c.data.train = ConfigDict(dict(bamboogle=c.data.eval.bamboogle))
    return _schedule(c)
  world = {name: c.data.world.get_ref(name) for name in quickstart.WORLD}
  asked = dict(module=c.data.world_module, split='train', n=ASKED, **world)
  c.data.train = ConfigDict(dict(test=asked))
  c.data.eval = ConfigDict(
    dict(test=asked, heldout=dict(asked, split='heldout', n=HELDOUT))
  )
  if a.planted:
    c.data.world_module = 'experiments.ttrl.planted'
    c.data.world.update(asked=ASKED, share=a.planted)
  # Guesses have many different values; the quickstart's favour three.
  c.sft.data.update(
    good=0.58,
    poor=0.1,
    guess=0.32,
    tilt=0.8,
    short=0.3,
    again=0.5,
    favourites=24,
  )
  c.sft.steps = 1500
  c.rollout.questions = 16
  c.train.steps = 40
  c.eval.every = 5
  return c


def _ssrl(a):
  c = ssrl.get_config(f'seed={a.seed},model={a.model}')
  if a.model:
    c.data.train = ConfigDict(dict(ssrl=c.data.eval.ssrl))
    return _schedule(c)
  # People whose facts the policy has read, without questions about them.
  c.data.train = ConfigDict(dict(test=c.data.eval.heldout))
  c.data.train.test.n = ASKED
  c.data.eval = ConfigDict(
    dict(
      test=c.data.train.test,
      heldout=dict(c.data.eval.heldout, split='rl', n=HELDOUT),
    )
  )
  c.rollout.questions = 16
  c.train.steps = 30
  return c


def _atlas(a):
  c = atlas.get_config(f'seed={a.seed}')
  c.data.train = ConfigDict(dict(test=c.data.eval.atlas))
  c.rollout.questions = 8  # 128 trajectories, as the arms of the arena
  c.train.steps = 40  # half of them are trained on
  c.eval.every = c.train.get_ref('steps')  # before and after
  return c


def _math(a):
  c = _math_full(a) if a.model else _math_small(a)
  c.env.answer = 'boxed'
  c.env.template = 'boxed' if a.model else 'micro_boxed'
  c.env.max_turns = 0
  c.eval.match = 'experiments.ttrl.mathematics.equal'
  c.source.module = 'none'
  return c


def _math_small(a):
  c = quickstart.get_config()
  c.data.world_module = 'experiments.ttrl.arithmetic'
  c.data.world_seed = a.seed
  c.data.world = ConfigDict()
  c.source.corpus = ''
  sets = {
    split: dict(module=c.data.world_module, split=split, n=n)
    for split, n in (('test', 80), ('heldout', 160))
  }
  c.data.train = ConfigDict(dict(test=sets['test']))
  c.data.eval = ConfigDict(sets)
  c.env.max_turn_tokens = 48
  c.env.max_tokens = 80
  c.engine.max_len = 80
  c.batch.lengths = (32, 48, 80)
  c.sft.data = ConfigDict(
    dict(module=c.data.world_module, n=24_000, slip=0.25, hasty=0.45)
  )
  c.sft.steps = 1200
  c.rollout.questions = 16
  c.train.steps = 40
  return c


def _math_full(a):
  c = schema.base()
  c.model.path = a.model
  c.model.dtype = 'bfloat16'
  c.model.remat = 'block'
  c.data.prompt = 'as_is'  # bare questions in the model's chat template

  def asked(folder, name):
    return dict(module='jsonl', layout='ttrl', path=f'{folder}/{name}.json')

  c.data.train = ConfigDict(dict(test=asked(a.path, 'train')))
  c.data.eval = ConfigDict(dict(test=asked(a.path, 'test')))
  if a.heldout:
    c.data.eval.heldout = ConfigDict(asked(a.heldout, 'test'))
  c.env.max_turn_tokens = 3072
  c.env.max_tokens = 512 + 3072
  c.engine.dtype = 'bfloat16'
  c.engine.max_len = 512 + 3072
  c.engine.slots = 512
  c.engine.prefill_rows = 256  # 16 prompts of 512 tokens in one call
  # Log-probs of two programs in bfloat16 differ by about this much.
  c.engine.canary_tolerance = 0.1
  c.batch.lengths = (1024, 2048, 3584)
  c.batch.tokens = 3584
  return _schedule(c)


def _schedule(c):
  """The original's schedule, for any base."""
  c.rollout.questions = 8
  c.optim.lr = 5e-7
  c.optim.schedule = 'cosine'
  c.train.steps = 240  # AIME: 80 epochs of 30 questions
  c.optim.warmup = round(0.03 * 240) * 8
  c.optim.weight_decay = 0.01
  c.eval.every = 2
  c.eval.n = 16
  c.eval.temperature = 0.6
  c.eval.top_p = 0.95
  c.eval.k = (16,)
  c.checkpoint.every = 20
  return c
