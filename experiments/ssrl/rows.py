"""SSRL's table on the generated world: `python -m experiments.rows`.

Each seed has a world and a warm start of its own; the arms of a seed share
them. README.md has the command and the figures.
"""

from configs import ssrl
from experiments import rows
from experiments.ssrl import curve

HELDOUT, UNSEEN = 'eval/set=heldout', 'eval/set=unseen'
GUESS = 1 / 80  # the fewest values that a relation has


def small(arg: str = ''):
  """seed -> configs/ssrl.py with an argument."""
  return lambda seed: ssrl.get_config(f'seed={seed},{arg}')


def real(searches: int, when: str = 'always'):
  """Sim-to-real: the first K searches of a trajectory are answered."""
  return rows.evaluation(
    {'env.real_searches': searches, 'env.search_when': when}
  )


def em(arm: str, when: str, part: str):
  return lambda at: at(arm, when, f'{part}/em').mean


SIM_TO_REAL = {
  'after': rows.evaluation({}),
  'k1': real(1),
  'k3': real(3),
  'all': real(-1),
  'guided': real(-1, 'entropy'),
}
FULL = SIM_TO_REAL | {'curve': curve.measure}

ROW = rows.Row(
  warm={'warm': rows.Start(small())},
  arms=(
    rows.Arm('warm', small(), 'warm', train=False, evaluations=FULL),
    rows.Arm('grpo', small(), 'warm', evaluations=FULL),
    rows.Arm('shuffled', small('shuffled'), 'warm', seeds=(0,)),
    rows.Arm('no_information', small('no_information'), 'warm', seeds=(0,)),
  ),
  bars=(
    rows.Bar('ssrl_heldout_gain', em('grpo', 'gain', HELDOUT), 0.15),
    rows.Bar(
      'ssrl_unseen', em('grpo', 'after', UNSEEN), GUESS + 0.05, at_most=True
    ),
    rows.Bar(
      'ssrl_shuffled_gain', em('shuffled', 'gain', HELDOUT), 0.02, at_most=True
    ),
  ),
  scores=(
    'em',
    'searches',
    'real_searches',
    'guessed',
    'valid_format',
    'tokens',
    *curve.SCORES,
  ),
  curves={
    f'{HELDOUT}/em': 'exact match, held out',
    f'{UNSEEN}/em': 'exact match, unseen',
    f'{HELDOUT}/searches': 'searches, held out',
  },
)
