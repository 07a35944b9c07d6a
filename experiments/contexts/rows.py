"""Contexts that change, on atlas: `python -m experiments.rows`.

Questions of four hops, with a limit to the tokens of a context. `cut` ends
there, `summary` carries a note of what it has found into a new context, `full`
has no limit. `cut_short` and `summary_short` have a limit at which only two
look-ups fit. All have the same skills and the same traces; where the traces of
`summary` reach the limit, they have the notes too.
"""

import functools

from configs import atlas
from configs.methods import contexts, grpo
from experiments import rows

# Half of the trajectories that `full` plays for such questions in its last five
# steps are longer (152 to 158 tokens; seed 0).
LIMIT = 154
SHORT = 112
NOTE = 12  # tokens of a note, at most
EM = 'eval/em'


def config(arm: str, limit: int, seed: int):
  """configs/atlas.py, with questions of four hops to evaluate on."""
  if arm == 'summary':
    kind = f'kind=summary,contexts=4,note={NOTE},limit={limit}'
    c = contexts.get_config(f'{kind},seed={seed}')
  else:
    c = grpo.get_config(f'seed={seed}')
  if arm == 'cut':
    c.env.max_tokens = limit
  c.data.eval.atlas.kinds, c.data.eval.atlas.n = ('4hop',), 240
  return c


def of(arm: str, limit: int = LIMIT):
  return functools.partial(config, arm, limit)


def above(arm: str, other: str):
  """The low end of the interval of the difference, paired by seed."""
  return lambda at: at(arm, 'after', EM, other).low


ROW = rows.Row(
  warm={
    'skills': rows.Start(lambda n: atlas.get_config(f'seed={n},mix=skills')),
    'even': rows.Start(of('full'), 'skills'),
    'notes': rows.Start(of('summary'), 'skills'),
    'notes_short': rows.Start(of('summary', SHORT), 'skills'),
  },
  arms=(
    rows.Arm('warm', of('full'), 'even', train=False),
    rows.Arm('full', of('full'), 'even'),
    rows.Arm('cut', of('cut'), 'even'),
    rows.Arm('summary', of('summary'), 'notes'),
    rows.Arm('cut_short', of('cut', SHORT), 'even'),
    rows.Arm('summary_short', of('summary', SHORT), 'notes_short'),
  ),
  bars=(
    rows.Bar('summary_above_cut', above('summary', 'cut'), 0.0, strict=True),
    rows.Bar(
      'summary_short_above_cut_short',
      above('summary_short', 'cut_short'),
      0.0,
      strict=True,
    ),
  ),
  scores=('em', 'searches', 'tokens', 'recall_all', 'em_found'),
  curves={
    'reward': 'reward in training',
    'rollout/sampled_tokens': 'tokens sampled in a step',
    'rollout/carried_tokens': 'tokens that new contexts repeat',
  },
)
