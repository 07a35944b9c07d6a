"""The first batch of the arena: twelve methods and their claims.

  python -m experiments.arena.run --phase=tune --workdir=runs/arena

plans.py has the phases, second.py the methods of 2026.
"""

import pathlib

from configs.methods import core as methods
from experiments.arena import oracle, recipes
from experiments.arena.plans import NAMES, STRESS, Batch, Method
from experiments.arena.verdicts import MARGIN, Claim


def _credit(name: str, *credits: str) -> dict[str, dict]:
  return {credit: {f'reward.{name}.credit': credit} for credit in credits}


_SHUFFLED = {'algorithm.advantage_kw.shuffle': True}
_PROGRESS = {
  name: {f'reward.progress.{field}': True}
  for name, field in (('shuffled', 'shuffle'), ('at_end', 'at_end'))
}
# The exact Phi in place of IGPO's, and the same credit, shuffled.
_ORACLE = {
  name: {'reward.progress': methods.PROGRESS | fields}
  for name, fields in (
    ('oracle', {}),
    ('oracle-shuffled', {'shuffle': True}),
    ('oracle-at_end', {'at_end': True}),
  )
}


def _helps(name: str, claim: str, against='grpo', **kw) -> Claim:
  return Claim(name, claim, against=against, **kw)


def _lower(name: str, claim: str, metric: str, margin: float) -> Claim:
  return Claim(name, claim, metric, sign=-1, margin=margin)


def _not_worse(name: str, metric='hard/em') -> Claim:
  claim = f'{metric} is at most {MARGIN} worse'
  return Claim(name, claim, metric, within=True)


def _lasts(name: str, against='grpo') -> Claim:
  claim = f'is better at {STRESS} x the learning rate of the base recipe'
  return Claim(name, claim, against=against, phase='stress')


METHODS = (
  Method(
    'grpo',
    claims=(
      _helps('grpo', 'a corpus that lacks nothing helps', 'grpo-missing'),
    ),
    # The assay, against the baseline as it is tuned.
    controls=oracle.ARMS,
    repeats=2,
  ),
  Method('ppo', repeats=1),
  Method('reinforce_pp'),
  # LLDS needs several updates in a step.
  Method('grpo4', file='grpo', fields={'algorithm.minibatches': 4}, repeats=1),
  Method(
    'step_search',
    ('scale', (0.6, 1.6, 0.2)),
    (
      _helps(
        'step_search', 'a gain for each search helps', 'ppo', mechanism=True
      ),
    ),
    controls=_PROGRESS,
  ),
  Method(
    'pica',
    ('scale', (0.3, 1.3, 0.1)),
    (_helps('pica', 'differences of a potential help', 'ppo', mechanism=True),),
    controls=_PROGRESS,
  ),
  Method(
    'igpo',
    ('scale', (1.0, 0.3, 3.0)),
    (_helps('igpo', 'the likelihood of the answer as credit for turns helps'),),
    controls=_PROGRESS | _ORACLE,
  ),
  Method(
    'gigpo',
    ('weight', (1.0, 0.3, 3.0)),
    (_helps('gigpo', 'comparing turns that start alike helps'),),
    controls={'shuffled': _SHUFFLED},
  ),
  Method(
    'calib_adv',
    ('ratio', (1.0, 0.5, 2.0)),
    (
      _helps('calib_adv', 'sparing good searches of wrong trajectories helps'),
      _lasts('calib_adv'),
    ),
    controls={
      'shuffled': _SHUFFLED,
      'oracle': {'algorithm.advantage_kw.silver': 'oracle'},
    },
  ),
  Method(
    'llds',
    ('scale', (0.2, 0.05, 0.8)),
    (
      _helps('llds', 'holding the likelihood of good actions helps', 'grpo4'),
      _lasts('llds', 'grpo4'),
    ),
  ),
  Method(
    'turn_ppo',
    ('algorithm.advantage_kw.lam', (0.9, 0.5, 1.0)),
    (_helps('turn_ppo', 'turns as actions help', 'ppo'),),
    controls={'shuffled': _SHUFFLED},
  ),
  Method(
    'otc',
    ('scale', (1.0, 0.3, 0.6)),
    (_lower('otc', 'fewer searches', 'all/searches', 0.2), _not_worse('otc')),
    controls=_credit('otc', 'shuffled', 'oracle'),
  ),
  Method(
    'ikea',
    ('bonus', (0.6, 0.2, 1.2)),
    (
      _lower(
        'ikea', 'known facts are searched for less', 'known/search', MARGIN
      ),
      _not_worse('ikea', 'all/em'),
    ),
    controls=_credit('ikea', 'shuffled', 'oracle'),
  ),
  Method(
    'autorefine',
    ('bonus', (0.1, 0.03, 0.3)),
    (_helps('autorefine', 'rewarding notes that hold the answer helps'),),
    # Paper and file: F1. What it is compared with earns exact match.
    fields={'reward.autorefine.outcome': 'em'},
    controls=_credit('autorefine', 'shuffled', 'oracle'),
  ),
  Method(
    'tree_grpo',
    ('scale', (1.0, 0.3, 3.0)),
    (_helps('tree_grpo', 'comparing leaves that share turns helps'),),
    fields={'rollout.group': 8},  # two trees of four leaves
    controls={'shuffled': {'algorithm.advantage_kw.credit': 'shuffled'}},
  ),
  Method(
    'parallel_search',
    ('scale', (1.0, 0.3, 0.1)),
    (
      _lower(
        'parallel_search',
        'fewer turns where look-ups are independent',
        'comparison/turns',
        0.1,
      ),
      _not_worse('parallel_search', 'all/em'),
    ),
    controls=_credit('parallel', 'shuffled'),
  ),
)

FOLDER = pathlib.Path(__file__).parent
FIRST = Batch(METHODS, 'arms.py', FOLDER, (*NAMES, recipes.PHASE))
get_sweep = FIRST.get_sweep
