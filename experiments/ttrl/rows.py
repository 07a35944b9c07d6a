"""TTRL's table: `python -m experiments.rows`.

Each seed has a world, a warm start, a test-time set and a held-out set of its
own; the arms of a seed share them. README.md has the command and the figures.
"""

from configs import ssrl, ttrl
from experiments import rows

SETS = ('test', 'heldout')


def small(arg: str = ''):
  """seed -> configs/ttrl.py with an argument."""
  return lambda seed: ttrl.get_config(f'seed={seed},{arg}')


EVALUATIONS = {
  'after': rows.evaluation({}),  # greedy
  'sampled': rows.evaluation(
    {'eval.temperature': 1.0, 'eval.n': 16, 'eval.k': (1, 16)}
  ),
}


def arm(
  name: str, arg: str, warm: str = 'warm', train: bool = True, seeds=(0,)
) -> rows.Arm:
  return rows.Arm(name, small(arg), warm, train, EVALUATIONS, seeds)


def gain(label: str, split: str):
  """Greedy exact match after - before; mean over seeds."""
  return lambda at: at(label, 'gain', f'eval/set={split}/em').mean


def beyond(split: str):
  """pass@1 after, less maj@16 of the warm start (the original's claim)."""
  return lambda at: (
    at('ttrl', 'sampled', f'eval/set={split}/pass@1').mean
    - at('warm', 'sampled', f'eval/set={split}/maj@16').mean
  )


def above(label: str, split: str):
  """By how much the majority's label gains more."""
  return lambda at: gain('ttrl', split)(at) - gain(label, split)(at)


def ahead(split: str):
  """maj@16 - greedy exact match of the warm start."""
  return lambda at: (
    at('warm', 'sampled', f'eval/set={split}/maj@16').mean
    - at('warm', 'after', f'eval/set={split}/em').mean
  )


def start(score: str):
  """Of 16 samples of the warm start on the questions it will train on."""
  return lambda at: at('warm', 'sampled', f'eval/set=test/{score}').mean


def below_0_85(at) -> float:
  return 0.85 - start('maj@16')(at)


ROW = rows.Row(
  warm={
    'warm': rows.Start(small()),
    'ssrl': rows.Start(lambda seed: ssrl.get_config(f'seed={seed}')),
    'math': rows.Start(small('base=math')),
  },
  arms=(
    arm('warm', '', train=False, seeds=(0, 1, 2)),
    arm('ttrl', '', seeds=(0, 1, 2)),
    arm('random', 'label=random', seeds=(0, 1, 2)),
    arm('golds', 'label=golds'),
    arm('random_vote', 'label=random_vote', seeds=(0, 1, 2)),
    arm('planted', 'planted=0.15'),
    arm('ssrl_warm', 'base=ssrl', 'ssrl', train=False),
    arm('ssrl', 'base=ssrl', 'ssrl'),
    arm('math_warm', 'base=math', 'math', train=False),
    arm('math', 'base=math', 'math'),
  ),
  bars=(
    rows.Bar('ttrl_start_label_accuracy', start('maj@16'), 0.5),
    rows.Bar('ttrl_start_label_accuracy_below_0.85', below_0_85, 0.0),
    rows.Bar('ttrl_start_parsed', start('parsed'), 0.95),
    *(
      rows.Bar(f'ttrl_start_majority_ahead ({s})', ahead(s), 0.05) for s in SETS
    ),
    *(rows.Bar(f'ttrl_greedy_gain ({s})', gain('ttrl', s), 0.10) for s in SETS),
    *(
      rows.Bar(
        f'ttrl_beyond_initial_majority ({s})', beyond(s), 0.0, strict=True
      )
      for s in SETS
    ),
    *(
      rows.Bar(
        f'ttrl_above_{label}_label ({s})', above(label, s), 0.0, strict=True
      )
      for label in ('random', 'random_vote')
      for s in SETS
    ),
  ),
  scores=('em', 'pass@1', 'maj@16', 'parsed'),
  curves={
    'eval/set=test/em': 'greedy EM, test-time',
    'eval/set=heldout/em': 'greedy EM, held out',
    'reward/vote/label_accuracy': 'label accuracy',
    'reward/vote/majority_ratio': 'majority ratio',
  },
)
