"""The second batch of the arena: teachers, potentials, guidance, attempts.

  python -m experiments.arena.run --batch=second --phase=tune \\
    --workdir=runs/second
  ... --phase=confirm    then assay; tune and confirm again, for the other
                         rows; then report, stress

Methods of 2026 that ask the policy, or a copy of it, about what it has sampled,
and others of that year. Worlds, questions and seeds are those of the first
batch, but for those that are reported. Half of the warm start has hints
(hinted.py), but for the second part of rows with one of their own, and its
first part is twice as long; the other half is of MIX; arms have half of the
steps: with all, exact credit ends where GRPO does (../LOG.md). The learning
rate is tuned for GRPO, with one update a step and with four, and is that of all
other rows, so that a claim is about one change. Most rows without a claim have
three seeds and else default settings.
"""

from ml_collections import ConfigDict

from configs import atlas as recipe
from experiments.arena import arms, hinted, measure, oracle, plans
from experiments.arena.arms import FOLDER
from experiments.arena.plans import Method
from experiments.arena.verdicts import Claim

SHARE = 0.5  # of the warm start
# Searches for everything, poorly, and more than it needs: turns differ in what
# they are worth. From `even` GRPO at its tuned rate learns within four steps to
# look on, and exact credit adds 0.01 (../LOG.md).
MIX = 'wanderer'
STEPS = recipe.get_config().train.steps // 2
# Exact match in training: exact credit is ahead of GRPO in it, with a small
# spread; at the end by as much, with a spread of 0.07 (../LOG.md).
SCORE, MARGIN = 'run/em', 0.02
_OTHERS = {'others': {'teacher.others': True}}
# 50 steps, as in SSPO, would be a frozen teacher, and .05, as in SDPO, nearly.
_COPIES, _AVERAGE = f'every={STEPS // 4}', f'rate={4 / STEPS}'
_FROZEN = 'weights=frozen,outcome=1.0'
_NOTHING = {'plain': {'algorithm.advantage_kw.scale': 0.0}}


def start(mix: str, seed: int) -> ConfigDict:
  c = recipe.get_config(f'mix={mix},seed={seed}')
  c.sft.data.module, c.sft.data.hinted = 'experiments.arena.hinted', SHARE
  if mix == 'skills':
    data, c.sft.steps = c.sft.data, 2 * c.sft.steps
    data.n, data.worlds = 2 * data.n, 2 * data.worlds
  hinted.make_room(c)
  return c


def change(config: ConfigDict, row: Method) -> None:
  """What all arms have in common, beside their start."""
  del row
  hinted.see_far(config)
  config.train.steps = STEPS


def _ahead(name: str, claim: str, against='grpo', **kw) -> Claim:
  return Claim(name, claim, SCORE, against, margin=MARGIN, **kw)


def _row(name: str, *of, rate='grpo', **kw) -> Method:
  return Method(name, *of, rate=rate, **kw)


def _aside(name: str, file='', arg='', **kw) -> Method:
  return _row(name, file=file, arg=arg, aside=True, **kw)


METHODS = (
  # No repeats: they ask other questions, by which 'run/em' differs more than by
  # what is sampled.
  Method('grpo', controls=oracle.ARMS),
  Method('grpo4', file='grpo', fields={'algorithm.minibatches': 4}),
  _row('igpo', ('scale', (1.0, 0.3, 3.0))),
  _row(
    'sspo',
    ('algorithm.advantage_kw.most', (1.2, 1.05, 2.0)),
    (
      _ahead('sspo', 'weighing wrong turns by a teacher that reads helps'),
      _ahead('sspo', 'what it reads matters', 'sspo-others'),
    ),
    arg=_COPIES,
    controls=_OTHERS
    | {'shuffled': {'algorithm.advantage_kw.pool': 'shuffled'}},
  ),
  _row(
    'sd_search',
    ('scale', (1.0, 0.3, 3.0)),
    (
      _ahead('sd_search', 'queries like those in hindsight help'),
      _ahead('sd_search', 'whose hindsight matters', 'sd_search-others'),
    ),
    controls=_OTHERS | {'labels': {'teacher.context_kw.labels': False}},
  ),
  _row(
    'trace',
    ('scale', (0.2, 0.05, 0.8)),
    (
      _ahead('trace', 'what searches make of the answer helps'),
      _ahead('trace', 'is better than IGPO', 'igpo'),
    ),
    controls={'live': {'teacher.weights': 'live'}},
  ),
  _row(
    'sapo',
    claims=(
      _ahead(
        'sapo',
        f'is better at {plans.STRESS} x the learning rate of the base recipe',
        'grpo4',
        phase='stress',
      ),
    ),
    rate='grpo4',
  ),
  _row('maxrl', claims=(_ahead('maxrl', 'dividing by the mean helps'),)),
  _row(
    'mr_search',
    # Evaluated with three, too: 'once/...' is of one.
    claims=(
      Claim(
        'mr_search',
        'three attempts, in evaluation too, are better at equal tokens in '
        'training',
        against='grpo-attempts-as-mr_search',
      ),
    ),
    start='mr_search',
    evaluation=measure.attempted,
    guided=True,
  ),
  # Behind traces of several attempts, which no other warm start has.
  _row('grpo-attempts', file='grpo', start='mr_search'),
  _aside('rlsd', 'sspo', f'arm=rlsd,{_COPIES}', controls=_OTHERS),
  _aside('opsd', controls=_OTHERS),
  _aside('opsd-frozen', 'opsd', _FROZEN),
  # The best row of the first three seeds, on the others.
  _aside(
    'opsd-repeated',
    'opsd',
    _FROZEN,
    later=True,
    controls=_OTHERS
    | {
      'alone': {'algorithm.advantage_kw.outcome': 0.0},
      'live': {'teacher.weights': 'live'},
    },
  ),
  _aside('sdpo', arg=_AVERAGE, controls=_OTHERS),
  _aside('sdpo-released', 'sdpo', f'version=as_released,{_AVERAGE}'),
  # Its second phase alone: no GRPO comes before it.
  _aside('search_e1', controls=_OTHERS),
  _aside('tips', arg=_COPIES, controls=_NOTHING),  # without it, PPO
  _aside('ig_search'),
  _aside('guide', guided=True),
  _aside('luffy', guided=True),
  _aside('ampo', 'luffy', 'arm=ampo', guided=True),
  _aside('rl_plus', guided=True),
  _aside('critique_grpo', guided=True),
  _aside('seele', guided=True),
  _aside(
    'score',
    arg=f'first={STEPS // 2}',
    start='mr_search',
    evaluation=measure.attempted,
    guided=True,
  ),
  _aside('echo'),
  _aside('clip', 'clip_delta', 'kind=clip'),
  _aside('delta', 'clip_delta', 'kind=delta'),
  _aside('simpletir'),
  _aside('self_aligned'),
  # Rewards of notes; what they are compared with earns exact match.
  _aside('r_search', arg='outcome=em'),
  _aside('evinote', arg='outcome=em,version=as_released'),  # see its docstring
  _aside('inforage', arg='outcome=em'),
  # From warm starts of their own, with a baseline from each.
  _aside('reseek', start='reseek'),
  _aside('reseek-plain', 'reseek', 'match=0.0,mismatch=0.0', start='reseek'),
  _aside('global_rag', start='global_rag'),
  _aside('global_rag-plain', 'global_rag', 'scale=0.0', start='global_rag'),
  _aside('co_rewarding', start='co_rewarding', guided=True),
  _aside(
    'grpo-reworded', 'co_rewarding', 'labels=golden', start='co_rewarding'
  ),
  _aside('search_r2', start='search_r2', guided=True),
  _aside('grpo-refined', 'grpo', start='search_r2'),
)

NAMES = arms.FIRST.names
OWN = 'assay', *plans.TRIALS, 'report', 'stress'
SECOND = plans.Batch(
  METHODS,
  'second.py',
  FOLDER / 'second',
  OWN,
  start=start,
  change=change,
  mixes=(MIX,),
  kls=plans.KLS[:1],  # none of the others was chosen for any row of the first
  first=300,
  score=SCORE,
  margin=MARGIN,
  window=(0.45, 0.75),  # it begins at 0.36, and ends at 0.76
  by_tokens=True,
  tuned_first=True,
)
BATCHES = {'first': arms.FIRST, 'second': SECOND}

get_sweep = SECOND.get_sweep
