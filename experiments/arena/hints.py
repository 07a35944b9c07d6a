"""What hints are worth to the policy of the second batch, before RL.

  python -m experiments.rows --row=experiments.arena.hints \\
    --workdir=runs/second --out=experiments/arena/second/hints.json

Trains the warm start and nothing else. A hint has to help, and that of another
question less: a teacher that knows no more cannot teach.
"""

import functools

from configs import atlas as recipe
from experiments import rows
from experiments.arena import hinted, plans, second


def _above(kind: str, what: str) -> rows.Bar:
  value = lambda at: at('warm', 'after', f'{kind}/{what}').low
  return rows.Bar(f'{kind}_{what}', value, 0.0, strict=True)


ROW = rows.Row(
  warm={
    name: rows.Start(functools.partial(second.start, name), init)
    for name, init in (('skills', ''), (second.SECOND.mix, 'skills'))
  },
  arms=(
    rows.Arm(
      'warm',
      lambda seed: recipe.get_config(f'seed={seed}'),
      second.SECOND.mix,
      train=False,
      evaluations={'after': hinted.measured},
      seeds=plans.ASSAY[:3],
    ),
  ),
  bars=[
    _above(kind, what) for kind in hinted.KINDS for what in ('gain', 'specific')
  ],
  scores=('own', 'plain', 'other', 'gain', 'specific'),
  curves={},
)
