"""ZeroSearch's table on the generated world: `python -m experiments.rows`.

Each seed has a world, a warm start and questions of its own, which its arms
share. All arms but `real` train on documents of one simulator, and all are
evaluated on the real search engine. README.md has the figures.
"""

from configs import search_r1, zerosearch
from experiments import rows
from experiments.zerosearch import check
from searchrl_jax.evaluate import policy as evaluate

ONE, TWO = 'eval/hops=1', 'eval/hops=2'


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


def before(config, run: str, out: str):
  """The start of an arm, on the real search engine."""
  changed = config.copy_and_resolve_references()
  changed.source.module = 'service'
  return evaluate.evaluate(changed, changed.train.init, out)


REAL = rows.evaluation({'source.module': 'service'})
TRAINED = {'after': REAL, 'documents': check.measure}
SIMULATED = dict(
  warm='warm',
  evaluations=TRAINED,
  folders={'source.simulator.path': 'simulator'},
)


def documents(score: str):
  return lambda at: at('curriculum', 'documents', f'documents/{score}').mean


def em(arm: str, when: str = 'after'):
  return lambda at: at(arm, when, 'eval/em').mean


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
      'zerosearch_gap',
      lambda at: em('real')(at) - em('curriculum')(at),
      0.10,
      at_most=True,
    ),
    rows.Bar(
      'zerosearch_real_queries', documents('real_queries'), 0.0, at_most=True
    ),
    rows.Bar('zerosearch_useful', documents('useful_gold'), 0.9),
    rows.Bar('zerosearch_noisy', documents('noisy_gold'), 0.1, at_most=True),
    rows.Bar(
      'zerosearch_noise_alone_gain',
      lambda at: em('p1')(at) - em('p1', 'before')(at),
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
    'useful_gold',
    'noisy_gold',
    'useful_gold_all',
    'noisy_gold_all',
    'useful_gold_n',
    'noisy_gold_n',
    'useful_gold_all_n',
    'noisy_gold_all_n',
    'real_queries',
    'noise',
    'failed',
  ),
  curves={
    'reward': 'reward (F1) in training',
    'health/searches': 'searches in training',
  },
)
