"""SSP's table on the generated world: `python -m experiments.rows`.

Each seed has a world, answers and held-out questions of its own; all share one
warm start, so intervals are over worlds and runs, not over warm starts.
README.md has the command and the figures.
"""

import json
import pathlib

from configs import ssp
from experiments import rows

MULTI = 'eval/set=multihop'
LOOP = 'experiments.ssp.train.train'
EDGE = 5  # steps: the first and the last ones are means over so many
WHOLE = ('oracle_valid', 'unique', 'distinct', 'starts')  # over all steps
# Over the first and the last steps: what weighs a step's value.
AT_EDGES = {
  'oracle_valid': 'stand',
  'unique': 'stand',
  'solver_success': 'stand',
  'share_2hop': 'stand',
  'share_3hop': 'stand',
  'share_4hop': 'stand',
  'valid_share': 'proposals',
  'searches': 'proposals',
  'hops': 'hops_n',
  'heeded': 'hops_n',
  **{
    f'{name}_asked_{n}': f'{name}_asked_{n}_n'
    for name in ('stand', 'hops')
    for n in range(1, 5)
  },
  'passes_valid': 'passes_valid_n',
  'passes_wrong': 'passes_wrong_n',
}


def small(arg: str = ''):
  """seed -> configs/ssp.py with an argument."""
  return lambda seed: ssp.get_config(f'seed={seed},{arg}')


def part(n: int):
  """Of the warm start, which all seeds share."""
  return lambda seed: ssp.get_config(f'part={n}')


def game(config, run: str, out: str) -> dict[str, float]:
  """What the accepted questions of a run were like, by the oracle.

  Means over accepted questions: 'oracle_valid', 'unique' of all, and 'X_first'
  and 'X_last' of the first and last EDGE steps; true hops are those of valid
  ones, and 'hops_gain' is the difference of theirs. 'distinct' and 'starts'
  are of a step, weighted by its questions; 'passes_X', 'valid_share' and
  'searches' are over proposals.
  """
  del config, out
  with (pathlib.Path(run) / 'metrics.jsonl').open() as lines:
    steps = [json.loads(line) for line in lines]
  steps = [s for s in steps if s['step'] >= 0]

  def mean(name, among, weight):
    known = [
      (s[f'selfplay/{name}'], s[f'selfplay/{weight}'])
      for s in among
      if s.get(f'selfplay/{name}') is not None
    ]
    total = sum(w for _, w in known)
    return sum(v * w for v, w in known) / total if total else None

  values = {name: mean(name, steps, 'stand') for name in WHOLE}
  for edge, among in (('first', steps[:EDGE]), ('last', steps[-EDGE:])):
    for name, weight in AT_EDGES.items():
      values[f'{name}_{edge}'] = mean(name, among, weight)
  if None not in (values['hops_first'], values['hops_last']):
    values['hops_gain'] = values['hops_last'] - values['hops_first']
  return {f'game/{k}': v for k, v in values.items() if v is not None}


PLAYED = {'after': rows.evaluation({}), 'game': game}


def arm(name: str, arg: str = '', **fields) -> rows.Arm:
  """An arm of self-play."""
  fields |= dict(evaluations=PLAYED, loop=LOOP)
  return rows.Arm(name, small(arg), 'warm', **fields)


def played(name: str):
  return lambda at: at('ssp', 'game', f'game/{name}').mean


def apart(at) -> float | None:
  """Between the low end of one interval and the high end of the other."""
  mine, theirs = (at(arm, 'after', f'{MULTI}/em') for arm in ('ssp', 'frozen'))
  if mine.low is None or theirs.high is None:
    return None  # of one seed
  return mine.low - theirs.high


ROW = rows.Row(
  warm={
    'part1': rows.Start(part(1), shared=True),
    'part2': rows.Start(part(2), init='part1', shared=True),
    'part3': rows.Start(part(3), init='part2', shared=True),
    'warm': rows.Start(part(4), init='part3', shared=True),
  },
  arms=(
    rows.Arm('warm', small(), 'warm', train=False),
    arm('ssp'),
    arm('frozen', 'arm=frozen'),
    arm('frozen_twice', 'arm=frozen_twice'),
    arm('format_only', 'reward=format_only'),
    arm('no_verifier', 'arm=no_verifier', seeds=(0,)),
    arm('one_minus_acc', 'reward=1-acc', seeds=(0,)),
    rows.Arm('golds', small('arm=golds'), 'warm', seeds=(0,)),
  ),
  bars=(
    rows.Bar('ssp_vs_frozen', apart, 0.0, strict=True),
    rows.Bar('ssp_hops_gain', played('hops_gain'), 0.3),
    rows.Bar('ssp_oracle_valid', played('oracle_valid'), 0.9),
  ),
  scores=(
    'em',
    'searches',
    'parsed',
    'tokens',
    'hops_gain',
    *WHOLE,
    *(f'{name}_{edge}' for edge in ('first', 'last') for name in AT_EDGES),
  ),
  curves={
    f'{MULTI}/em': 'exact match, two to four hops, held out',
    'selfplay/hops': 'true hops of accepted questions',
    'selfplay/oracle_valid': 'accepted and valid by the oracle',
    'selfplay/solver_success': 'solver right on accepted questions',
  },
)
