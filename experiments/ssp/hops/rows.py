"""What keeps SSP's proposer from one hop, on atlas.

  python -m experiments.rows --row=experiments.ssp.hops.rows \\
    --workdir=runs/ssp_hops --out=experiments/ssp/hops/results.json --parallel=2

Each arm is `configs/ssp.py:base=atlas,hops=drawn` with further fields. For each
seed there is one warm start, whose proposers read a number of hops, and whose
solvers have read how a question came about.

  frozen      the proposer keeps its initial parameters
  asked       the number is in the brief, and partitions the advantages
  searched    and a proposal needs as many searches
  term        asked, and half of min(searches / n, 1) is added to the reward
  oracle      searched, and half of min(true hops / n, 1) is
  difficulty  searched, with linear_difficulty in place of 4 s (1 - s)
  dr_zero     term with linear_difficulty: the reward of Dr. Zero
  path        difficulty, with the construction path as the solver's teacher,
              whose weights are the solver's own
  others      path, with the path of another question: a control
  path-frozen, others-frozen
              the same, with the solver's first weights and a smaller weight
  shuffled    difficulty, with the number of another proposal: a control
  alone       difficulty, whose verifier reads the proposal's evidence alone
  unverified  difficulty, where what keeps the rules stands

Values: those of experiments/arena/recipes.py, 'gain/...' (after - before) and
'game/...'. The bars are about `difficulty` and `path-frozen`: the true hops of
the last five steps, the share of their proposals that stands, the share of
these that is valid, the low ends of the intervals of the gains on two hops, and
on three and four, and the difference from `frozen`. Controls: a number that
does not count must keep nobody from one hop, the path of another question must
teach less.
"""

from collections.abc import Mapping
import functools

from experiments import rows
from experiments.arena import recipes
from experiments.ssp import rows as ssp
from searchrl_jax.sweep import core

SEEDS = (0, 1, 2, 3)
CLAIMED = ('difficulty', 'path-frozen')
KINDS = ('1hop', '2hop', 'hard', 'all')

_SEARCHED = {'selfplay.hops.searched': True}
_TERM = {'selfplay.hops.term': 'searches'}
_LINEAR = {'selfplay.reward': 'linear_difficulty'}
_LIVE, _OTHERS = {'teacher.weights': 'live'}, {'teacher.others': True}
# Name -> (further arguments of the recipe, fields).
ARMS: Mapping[str, tuple[str, Mapping]] = {
  'frozen': ('arm=frozen', _SEARCHED),
  'asked': ('', {}),
  'searched': ('', _SEARCHED),
  'term': ('', _TERM),
  'oracle': ('', _SEARCHED | {'selfplay.hops.term': 'oracle'}),
  'difficulty': ('', _SEARCHED | _LINEAR),
  'dr_zero': ('', _TERM | _LINEAR),
  'path': ('path=0.5', _SEARCHED | _LINEAR | _LIVE),
  'others': ('path=0.5', _SEARCHED | _LINEAR | _LIVE | _OTHERS),
  'path-frozen': ('path=0.1', _SEARCHED | _LINEAR),
  'others-frozen': ('path=0.1', _SEARCHED | _LINEAR | _OTHERS),
  'shuffled': ('', _SEARCHED | _LINEAR | {'selfplay.hops.shuffled': True}),
  'alone': ('', _SEARCHED | _LINEAR | {'selfplay.noise': 0}),
  'unverified': ('', _SEARCHED | _LINEAR | {'selfplay.verifier': 'none'}),
}


def config(arg: str, fields: Mapping, seed: int):
  return core.changed(recipes.of('ssp', f'hops=drawn,{arg}'), fields, seed)


def played(config, run: str, out: str) -> dict[str, float]:
  """The solver before and after, what it gained, and the game."""
  values = recipes.played(config, run, out)
  gains = {
    f'gain/{kind}/em': values[f'{kind}/em'] - values[f'before/{kind}/em']
    for kind in KINDS
  }
  return {**values, **gains}


def arm(name: str) -> rows.Arm:
  return rows.Arm(
    name,
    functools.partial(config, *ARMS[name]),
    'asked',
    evaluations={'after': played},
    seeds=SEEDS,
    loop=ssp.LOOP,
  )


def mean(arm: str, score: str, less: str = ''):
  return lambda at: at(arm, 'after', score, less).mean


def low(arm: str, score: str, less: str = ''):
  return lambda at: at(arm, 'after', score, less).low


def bars(arm: str) -> list[rows.Bar]:
  return [
    rows.Bar(f'{arm}_true_hops', mean(arm, 'game/hops_last'), 1.8),
    rows.Bar(f'{arm}_stand', mean(arm, 'game/valid_share_last'), 0.75),
    rows.Bar(f'{arm}_valid', mean(arm, 'game/oracle_valid_last'), 0.75),
    rows.Bar(f'{arm}_two_hops', low(arm, 'gain/2hop/em'), 0.0, strict=True),
    rows.Bar(f'{arm}_hard', low(arm, 'gain/hard/em'), 0.0, strict=True),
    rows.Bar(f'{arm}_vs_frozen', mean(arm, 'hard/em', 'frozen'), 0.05),
  ]


ROW = rows.Row(
  warm={
    'skills': rows.Start(recipes.start('skills')),
    'asked': rows.Start(functools.partial(config, *ARMS['path']), 'skills'),
  },
  arms=[*map(arm, ARMS)],
  bars=[
    *(bar for name in CLAIMED for bar in bars(name)),
    rows.Bar(
      'difficulty_vs_shuffled',
      low('difficulty', 'game/hops_last', 'shuffled'),
      0.0,
      strict=True,
    ),
    rows.Bar(
      'path_vs_others',
      low('path-frozen', 'hard/em', 'others-frozen'),
      0.0,
      strict=True,
    ),
  ],
  scores=['em', 'searches', *ssp.ROW.scores],
  curves={
    'selfplay/hops': 'true hops of valid questions',
    'selfplay/heeded': 'as many as were asked for',
    'selfplay/valid_share': 'proposals that stand',
    'selfplay/oracle_valid': 'valid by the oracle, of these',
    'selfplay/solver_success': 'solver right on these',
  },
)
