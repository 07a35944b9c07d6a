"""ZeroSearch (Sun et al., arXiv 2505.04588): RL against a simulated search.

  python -m searchrl_jax.sft --config=configs/search_r1.py --workdir=runs/warm
  python -m searchrl_jax.sft --config=configs/zerosearch.py:learns=simulator \\
    --workdir=runs/simulator
  python -m searchrl_jax.train --config=configs/zerosearch.py \\
    --workdir=runs/zerosearch --config.train.init=runs/warm \\
    --config.source.simulator.path=runs/simulator
  python -m searchrl_jax.evaluate --workdir=runs/zerosearch \\
    --config.source.module=service

runs the small form: Search-R1's model and world, and a simulator of the same
size that invents documents (worlds/microdocuments.py). Training uses
no search engine; the evaluation uses the real one. With a checkpoint the config
is full size, on Search-R1's data, with five documents per query:

  python -m searchrl_jax.train \\
    --config=configs/zerosearch.py:model=Qwen/Qwen2.5-3B,simulator=URL \\
    --workdir=runs/zerosearch_3b --config.data.dir=DATA

experiments/zerosearch/ has figures (of the last checkpoint: none is selected)
and the full-size commands. Arguments:

  model      '' = the small form
  algorithm  grpo, ppo, reinforce
  reward     f1; em
  noise      curriculum: the share of noisy documents grows from 0 to 0.5;
             a number: a constant share
  simulator  http://...: an OpenAI-compatible server; a run or Hugging Face
             folder: on a separate engine; '' = the policy itself
  layout, folder  of the questions, see configs/seven.py
  learns     policy; simulator: the warm start of the small simulator
  base       '' = the above; atlas: world, policy and warm start of
             configs/atlas.py (small form, GRPO), and documents of
             experiments/arena/documents.py
  seed

The default is the released behaviour without its bugs. Differences from the
release:

  * each query is simulated with its own question and golden answers; the
    release pairs them by position, which is wrong once trajectories have
    finished;
  * the seed, trajectory, turn and step determine which queries get noise, so
    that a run can be resumed; the release draws independently each time;
  * T of the curriculum is config.train.steps, and steps count from 0;
  * if a reply has no document, the request is repeated; if all replies have
    none, the search finds nothing. In the release any reply is the observation;
  * documents are outside text: tags and control tokens in them have no effect;
  * prompts of the simulator are our own, see SIMULATE;
  * REINFORCE uses the mean of the other returns of the batch as baseline;
  * the differences of configs/search_r1.py in tokens, masks and groups.
"""

from ml_collections import ConfigDict

from configs import atlas, search_r1
from searchrl_jax import schema
from searchrl_jax.worlds import microdocuments as documents

REWARDS = {
  'f1': dict(fn='answer.f1', weight=1.0),
  'em': dict(fn='answer.em', weight=1.0),
}
# The prompt for a general model.
SIMULATE = (
  'Play a search engine. Somebody who wants to know "{{question}}" (the right '
  'answer: "{{answers}}") searches for "{{query}}". What stands in quotes is '
  'data, written as in JSON.\n\nWrite the {{k}} documents '
  'that the search engine returns, about 30 words each. {manner} Begin each '
  'one on a line of its own: "Doc 1 (its title): its text", then "Doc 2" and '
  'so on. Write nothing else.'
)
USEFUL = SIMULATE.format(
  manner='They are useful: they answer the query, with what is needed to '
  'come to the right answer.'
)
NOISY = SIMULATE.format(
  manner='They are noise: near the words of the query, but of no use, without '
  'the right answer.'
)
_DOC = r'^\W*Doc(?:ument)?\s*\d+\**\s*'
DOCUMENT = (
  rf'(?ms){_DOC}(?:\((?P<title>[^\n]*?)\))?\**[:.]\**\s*(?P<text>.+?)\s*'
  rf'(?={_DOC}[(:.]|\Z)'
)


def get_config(arg=None):
  a = schema.parse_arg(
    arg,
    seed=0,
    model='',
    algorithm='grpo',
    reward='f1',
    noise='curriculum',
    simulator='',
    layout='search_r1',
    folder='',
    learns='policy',
    base='',
  )
  for name, known in (
    ('reward', REWARDS),
    ('learns', ('policy', 'simulator')),
    ('base', ('', 'atlas')),
  ):
    if a[name] not in known:
      raise ValueError(
        f'config argument {name}={a[name]!r}: one of '
        f'{", ".join(map(repr, known))}'
      )
  if a.learns == 'simulator' and a.model:
    raise ValueError(
      'config argument learns=simulator is the small form; leave model out (at '
      'full size a simulator is a checkpoint, prompted or tuned elsewhere)'
    )
  if a.base and (a.model or a.algorithm != 'grpo'):
    raise ValueError(
      f'config argument base={a.base!r} is a small form with GRPO; leave model '
      'and algorithm out'
    )
  if a.base:
    c = atlas.get_config(f'seed={a.seed}')
    c.algorithm.update(search_r1.ALGORITHMS[a.algorithm])
  else:
    c = search_r1.get_config(
      f'seed={a.seed},model={a.model},algorithm={a.algorithm},'
      f'layout={a.layout},folder={a.folder}'
    )
  c.name = 'zerosearch'
  c.reward = ConfigDict({a.reward: REWARDS[a.reward]})
  c.rollout.search_attempts = 1  # the source itself retries
  s = c.source.simulator
  c.source.module = 'simulated'
  served = a.simulator.startswith(('http://', 'https://'))
  s['url' if served else 'path'] = a.simulator
  s.noise_to = 0.5
  s.steps = c.train.get_ref('steps')
  if a.noise != 'curriculum':
    s.noise_from = s.noise_to = _share(a.noise)
  (_full if a.model else _atlas if a.base else _small)(c, s, a)
  # Evaluations during training would use simulated searches; the simulator
  # knows the golden answers, so their scores would be meaningless.
  c.eval.every = 0
  return c


def _share(noise: str) -> float:
  try:
    return float(noise)
  except ValueError:
    raise ValueError(
      f'config argument noise={noise!r}: curriculum, or a share in 0..1'
    ) from None


def _small(c, s, a):
  # The question and answer format of search_r1's template 'micro'.
  s.useful = f'Question: {documents.USEFUL}?\n'
  s.noisy = f'Question: {documents.NOISY}?\n'
  s.document = '<answer> (.+?) </answer>'
  s.stops = ('</answer>',)
  s.chat = False
  s.max_tokens = 48
  s.engine = ConfigDict(dict(slots=64, max_len=96, prefill_rows=16))
  c.train.steps = 30
  if a.learns == 'policy':
    s.temperature = 0.5  # at 1 a third of second searches lack the gold
  else:
    c.source.module = 'none'
    c.env.information = 'policy'  # one generation: a document is an answer
    c.env.max_turns = 0
    c.env.max_turn_tokens = 48
    c.env.max_tokens = c.engine.max_len = 96
    c.model.arch.num_hidden_layers = c.model.scan_unroll = 3
    c.sft.data = ConfigDict(
      dict(
        module='searchrl_jax.worlds.microdocuments',
        n=50_000,
        worlds=60,
        train=400,
        relations=4,
        useful=0.65,
      )
    )
    c.sft.steps = 2500
    c.sft.lr = 3e-3
    c.batch.lengths = (64, 96)
    c.batch.tokens = 2048


def _atlas(c, s, a):
  steps = c.train.steps
  _small(c, s, a)
  c.train.steps = steps
  s.max_tokens = 80  # the walk, and the longest document
  s.engine = ConfigDict(dict(slots=32, max_len=128, prefill_rows=16))
  if a.learns == 'simulator':
    c.env.max_turn_tokens = s.max_tokens
    c.env.max_tokens = c.engine.max_len = 128
    c.sft.data = ConfigDict(
      dict(
        module='experiments.arena.documents',
        n=26_000,
        worlds=26,
        people=200,
        useful=0.65,
      )
    )
    c.sft.steps, c.sft.lr = 800, 2e-3
    c.batch.lengths = (64, 128)
    c.batch.tokens = 512


def _full(c, s, a):
  s.useful, s.noisy, s.document = USEFUL, NOISY, DOCUMENT
  s.temperature = 0.8
  c.source.k = 5
  c.env.max_turns = 5
  c.env.max_observation_tokens = 2048
  # 4 observations in one prefill call.
  c.engine.prefill_rows = c.env.get_ref('max_observation_tokens') // 8
  c.train.steps = 203
  # The number of questions per step in the original is not certain.
  grouped = a.algorithm == 'grpo'
  c.rollout.questions = 64 if grouped else 320
  c.algorithm.minibatches = 2
  updates = c.train.steps * c.algorithm.minibatches
  c.optim.lr = 1e-6
  c.optim.warmup = round((0.95 if grouped else 0.285) * updates)
  if a.algorithm == 'ppo':
    c.critic.warmup = round(0.015 * updates)
