"""What each method claims here: fixed before the reporting seeds run.

Metrics are those of experiments/arena/measure.py; `against` names an arm of the
same phase. Claims of phase 'stress' are about stability at STRESS x the
learning rate, the others about the phase 'report'. Holm's correction is over
all of them.

With an exact oracle in place of a TF-IDF score, a trained scorer or a judge, a
verdict is about the mechanism, not about the paper: `mechanism` says so.
"""

import dataclasses

from experiments.arena.verdicts import Claim

HARD = 'hard/em'


@dataclasses.dataclass(frozen=True)
class Row(Claim):
  phase: str = 'report'
  mechanism: bool = False


def higher(method, claim, against='grpo', metric=HARD, **kw):
  return Row(method, claim, metric, against, **kw)


def lower(method, claim, metric, against='grpo', **kw):
  return Row(method, claim, metric, against, sign=-1, **kw)


def not_worse(method, metric=HARD, against='grpo'):
  claim = f'{metric} at most 0.05 worse'
  return Row(method, claim, metric, against, within=True)


CLAIMS = (
  higher('step_search', 'a gain for each search helps', 'ppo', mechanism=True),
  higher('pica', 'differences of a potential help', 'ppo', mechanism=True),
  higher('igpo', 'the likelihood of the answer, by turn, helps'),
  higher('gigpo', 'comparing turns that start alike helps'),
  higher('calib_adv', 'sparing good searches of wrong trajectories helps'),
  higher(
    'calib_adv',
    'it puts a collapse off',
    metric='run/collapse',
    phase='stress',
    margin=1.0,
  ),
  higher('llds', 'holding the likelihood of right actions helps', 'grpo4'),
  higher(
    'llds',
    'it puts a collapse off',
    'grpo4',
    'run/collapse',
    phase='stress',
    margin=1.0,
  ),
  higher('turn_ppo', 'turns as actions help', 'ppo'),
  lower('otc', 'fewer searches', 'all/searches'),
  not_worse('otc'),
  lower('ikea', 'known facts are searched for less often', 'known/search'),
  not_worse('ikea', 'all/em'),
  higher('autorefine', 'rewarding notes that hold the answer helps'),
  higher('tree_grpo', 'comparing leaves that share turns helps'),
  lower(
    'parallel_search',
    'fewer turns where look-ups are independent',
    'comparison/turns',
  ),
  not_worse('parallel_search', 'comparison/em'),
  higher('grpo', 'a complete corpus helps', 'grpo-missing'),
)
