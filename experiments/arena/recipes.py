"""TTRL, SSRL, ZeroSearch and SSP on atlas: rows outside the comparison.

  python -m experiments.arena.run --phase=recipes --workdir=runs/arena

Each row is its recipe with `base=atlas`. It has no claim and is not tuned: it
differs from the methods in more than its credit. Values are those of measure.py
on the held-out questions of atlas, before the first update ('before/...') and
after the last, and

  ttrl  'run/label_accuracy' and 'run/majority_ratio' of all steps. The held-out
        questions, without their answers, are what it trains on. It starts from
        `skills`: from `even`, most votes on a hard question are one of three
        guesses, and all that is learnt is to guess (experiments/LOG.md). From
        `skills`, two of four seeds lose the questions of three and four hops.
  ssrl  'real/...': the same policy, all of whose searches are answered by the
        real source (sim-to-real).
  zerosearch  evaluated on the real source, which it never met in training:
        'documents/real_queries' is 0. 'documents/...' says how many documents
        held the golden answer (experiments/zerosearch/check.py).
  ssp   'game/...': what its proposals were like (experiments/ssp/rows.py).
"""

from collections.abc import Callable, Mapping
import functools
import importlib

from ml_collections import ConfigDict

from configs import atlas
from experiments.arena import documents, measure
from experiments.ssp import rows as ssp
from experiments.zerosearch import check
from searchrl_jax import read
from searchrl_jax.sweep import core

PHASE, SEEDS = 'recipes', (0, 1, 2, 3)
SIMULATOR_SEED = 0
SCORES = (
  *('label_accuracy', 'majority_ratio'),
  *('useful_gold', 'noisy_gold', 'noise', 'real_queries'),
)
COLUMNS = (
  *('before/all/em', 'all/em', 'real/all/em'),
  *('before/hard/em', 'hard/em', 'real/hard/em'),
)


def of(name: str, arg: str = '') -> Callable[[int], ConfigDict]:
  """seed -> configs/NAME.py on atlas, with an argument."""
  module = importlib.import_module(f'configs.{name}')
  return lambda seed: module.get_config(f'base=atlas,seed={seed},{arg}')


def start(mix: str) -> Callable[[int], ConfigDict]:
  """seed -> a part of the warm start of the methods."""
  return lambda seed: atlas.get_config(f'mix={mix},seed={seed}')


def zerosearch(seed: int) -> ConfigDict:
  c = of('zerosearch')(seed)
  # At the end it evaluates with simulated searches, which says nothing.
  c.eval.questions = 6
  return c


def voted(config, run: str, out: str) -> Mapping[str, float]:
  """TTRL: also how good the labels were."""
  metrics = read.run(run).metrics
  means = {
    f'run/{name}': float(metrics[f'reward/vote/{name}'].mean())
    for name in ('label_accuracy', 'majority_ratio')
  }
  return measure.compared(config, run, out) | means


def recited(config, run: str, out: str) -> Mapping[str, float]:
  """SSRL: with itself, and with the real source."""
  real = measure.evaluated(
    config, {'env.real_searches': -1}, run, f'{out}/real'
  )
  return measure.compared(config, run, out) | measure.prefixed('real', real)


def simulated(config, run: str, out: str) -> Mapping[str, float]:
  """ZeroSearch: on the real source, and what the documents were worth."""
  fields = {'source.module': 'service', 'eval.questions': 0}
  before, after = (
    measure.evaluated(config, fields, folder, f'{out}/{name}')
    for folder, name in ((config.train.init, 'before'), (run, 'after'))
  )
  believed = documents.beliefs(SIMULATOR_SEED)
  asks = functools.partial(documents.asks, believed=believed)
  found = check.read(run, asks=asks)
  known = {name: value for name, value in found.items() if value is not None}
  trained = read.run(run)
  return {
    **after,
    **measure.prefixed('before', before),
    **measure.prefixed('documents', known),
    **measure.of_training(trained.metrics, len(trained.starts)),
  }


def played(config, run: str, out: str) -> Mapping[str, float]:
  """SSP: the solver, and the game."""
  return measure.compared(config, run, out) | ssp.game(config, run, out)


def get_sweep() -> core.Sweep:
  """The rows, with warm starts of their own where they need them."""
  arm = functools.partial(core.Arm, seeds=SEEDS)
  return core.Sweep(
    warm={
      'skills': core.Start(start('skills')),
      'even': core.Start(start('even'), 'skills'),
      'recitals': core.Start(of('ssrl'), 'skills'),
      # One for all seeds: of the known facts that `skills` states, it has read
      # those of seed 0, which no document is about.
      'simulator': core.Start(
        lambda seed: of('zerosearch', 'learns=simulator')(SIMULATOR_SEED),
        'skills',
        shared=True,
      ),
      'roles': core.Start(of('ssp'), 'skills'),
    },
    arms=[
      arm('ttrl', of('ttrl'), 'skills', evaluations={'after': voted}),
      arm('ssrl', of('ssrl'), 'recitals', evaluations={'after': recited}),
      arm(
        'zerosearch',
        zerosearch,
        'even',
        evaluations={'after': simulated},
        folders={'source.simulator.path': 'simulator'},
      ),
      arm(
        'ssp', of('ssp'), 'roles', evaluations={'after': played}, loop=ssp.LOOP
      ),
    ],
    scores=[*measure.SCORES, *measure.TRAINING, *SCORES, *ssp.ROW.scores],
    curves={'reward': 'reward', 'health/searches': 'searches'},
  )
