"""ZeroSearch's table on the generated world: `python -m experiments.rows`.

Each seed has a world, a warm start and questions of its own, which its arms
share. All arms but `real` train on documents of one simulator, and all are
evaluated on the real search engine. README.md has the figures.
"""

from configs import search_r1, zerosearch
from experiments import rows
from experiments.zerosearch import check


def small(arg: str = ''):
  """seed -> configs/zerosearch.py with an argument."""

  def config(seed: int):
    c = zerosearch.get_config(f'seed={seed},{arg}')
    # Evaluations while it trains would be of simulated searches.
    c.eval.every = 0
    return c

  return config


def real(seed: int):
  """All else equal, on the real search engine."""
  c = small()(seed)
  c.source.module = 'service'
  c.source.simulator.temperature = 1.0  # neutral: nothing is simulated
  return c


REAL = rows.evaluation({'source.module': 'service'})


def before(config, run: str, out: str):
  """The start of an arm, on the real search engine."""
  del run
  return REAL(config, config.train.init, out)


TRAINED = {'after': REAL, 'documents': check.measure}
SIMULATED = dict(
  warm='warm',
  evaluations=TRAINED,
  folders={'source.simulator.path': 'simulator'},
)


def documents(score: str):
  return lambda at: at('curriculum', 'documents', f'documents/{score}').mean


def em_above(arm: str, other: str, when: str = 'after'):
  """By how much an arm's exact match is above another's, as it was `when`."""
  return lambda at: (
    at(arm, 'after', 'eval/em').mean - at(other, when, 'eval/em').mean
  )


ROW = rows.Row(
  warm={
    # Search-R1's own: the policy learns to search a real index.
    'warm': rows.Start(lambda seed: search_r1.get_config(f'seed={seed}')),
    # One for all seeds: it knows none of their worlds.
    'simulator': rows.Start(lambda seed: small('learns=simulator')(0)),
  },
  arms=(
    rows.Arm('warm', real, 'warm', train=False),
    rows.Arm('curriculum', small(), **SIMULATED),
    rows.Arm('real', real, 'warm', evaluations=TRAINED),
    rows.Arm('ppo', small('algorithm=ppo'), seeds=(0,), **SIMULATED),
    rows.Arm(
      'reinforce', small('algorithm=reinforce'), seeds=(0,), **SIMULATED
    ),
    rows.Arm('p0', small('noise=0'), seeds=(0,), **SIMULATED),
    rows.Arm(
      'p1',
      small('noise=1'),
      seeds=(0,),
      **SIMULATED | dict(evaluations=TRAINED | {'before': before}),
    ),
  ),
  bars=(
    rows.Bar(
      'zerosearch_gap', em_above('real', 'curriculum'), 0.10, at_most=True
    ),
    rows.Bar(
      'zerosearch_real_queries', documents('real_queries'), 0.0, at_most=True
    ),
    rows.Bar('zerosearch_useful', documents('useful_gold'), 0.9),
    rows.Bar('zerosearch_noisy', documents('noisy_gold'), 0.1, at_most=True),
    rows.Bar(
      'zerosearch_noise_alone_gain',
      em_above('p1', 'p1', 'before'),
      0.02,
      at_most=True,
    ),
  ),
  scores=(
    'em',
    'f1',
    'searches',
    'guessed',
    'parsed',
    'tokens',
    *(f'{name}{end}' for end in ('', '_n') for name in check.GOLD),
    'real_queries',
    'noise',
    'failed',
  ),
  curves={
    'reward': 'reward (F1) in training',
    'health/searches': 'searches in training',
  },
)
