"""Search-R1's table on the generated world: `python -m experiments.rows`.

Each seed has a world, a warm start and questions of its own; the arms of a
seed share them. README.md has the command and the figures.
"""

from ml_collections import ConfigDict

from configs import search_r1
from experiments import rows

HOPS = 'eval/hops=2'


def small(arg: str = ''):
  """seed -> configs/search_r1.py with an argument."""
  return lambda seed: search_r1.get_config(f'seed={seed},{arg}')


def unmasked(seed: int):
  c = small()(seed)
  c.env.train_observations = True
  c.batch.loss_fraction = 1.0  # all but the prompt is in the loss
  return c


def reading(seed: int):
  """A warm start of its own: it reads the passages in its prompt."""
  c = small('baseline=no_search')(seed)
  names = ('n', 'worlds', 'train', 'relations')
  kept = {name: c.sft.data[name] for name in names}
  module = 'experiments.search_r1.one_shot'
  c.sft.data = ConfigDict(dict(module=module, **kept, k=3))
  return c


def mean(when: str, score: str):
  return lambda at: at('grpo', when, f'{HOPS}/{score}').mean


def gain(arm: str):
  """The low end of its interval over seeds."""
  return lambda at: at(arm, 'gain', f'{HOPS}/em').low


ROW = rows.Row(
  warm={'warm': rows.Start(small()), 'reading': rows.Start(reading)},
  arms=(
    rows.Arm('warm', small(), 'warm', train=False),
    rows.Arm('grpo', small('algorithm=grpo'), 'warm'),
    rows.Arm('ppo', small('algorithm=ppo'), 'warm'),
    rows.Arm('reinforce', small('algorithm=reinforce'), 'warm'),
    rows.Arm('no_search', small('baseline=no_search'), 'warm', seeds=(0,)),
    rows.Arm(
      'one_shot', small('baseline=rag'), 'reading', train=False, seeds=(0,)
    ),
    rows.Arm('cot', small('baseline=cot'), 'warm', train=False),
    rows.Arm('direct', small('baseline=direct'), 'warm', train=False),
    rows.Arm('unmasked', unmasked, 'warm', seeds=(0,)),
  ),
  bars=(
    rows.Bar('search_r1_grpo_gain', mean('gain', 'em'), 0.20),
    rows.Bar('search_r1_grpo_searches', mean('after', 'searches'), 1.8),
    rows.Bar('search_r1_ppo_gain', gain('ppo'), 0.0, strict=True),
    rows.Bar('search_r1_reinforce_gain', gain('reinforce'), 0.0, strict=True),
  ),
  scores=('em', 'f1', 'searches', 'guessed', 'parsed', 'tokens'),
  curves={
    'eval/em': 'exact match',
    f'{HOPS}/em': 'exact match, two hops',
    f'{HOPS}/searches': 'searches, two hops',
  },
)
