"""TTRL on atlas: rows outside the comparison.

  python -m experiments.arena.run --phase=recipes --workdir=runs/arena

Each row is its recipe with `base=atlas`. It has no claim and is not tuned: it
differs from the methods in more than its credit. Values are those of measure.py
on the held-out questions of atlas, before the first update ('before/...') and
after the last, and

  ttrl  'run/label_accuracy' and 'run/majority_ratio' of all steps. The held-out
        questions, without their answers, are what it trains on. It starts from
        `skills`: from `even`, most votes on a hard question are one of three
        guesses, and all that is learnt is to guess (experiments/LOG.md).
"""

from collections.abc import Callable, Mapping
import functools
import importlib

from ml_collections import ConfigDict

from configs import atlas
from experiments.arena import measure
from searchrl_jax import read
from searchrl_jax.sweeps import core

PHASE, SEEDS = 'recipes', (0, 1, 2, 3)
SCORES = ('label_accuracy', 'majority_ratio')


def of(name: str, arg: str = '') -> Callable[[int], ConfigDict]:
  """seed -> configs/NAME.py on atlas, with an argument."""
  module = importlib.import_module(f'configs.{name}')
  return lambda seed: module.get_config(f'base=atlas,seed={seed},{arg}')


def start(mix: str) -> Callable[[int], ConfigDict]:
  """seed -> a part of the warm start of the methods."""
  return lambda seed: atlas.get_config(f'mix={mix},seed={seed}')


def voted(config, run: str, out: str) -> Mapping[str, float]:
  """TTRL: also how good the labels were."""
  metrics = read.run(run).metrics
  means = {
    f'run/{name}': float(metrics[f'reward/vote/{name}'].mean())
    for name in ('label_accuracy', 'majority_ratio')
  }
  return measure.compared(config, run, out) | means


def get_sweep() -> core.Sweep:
  """The rows, with warm starts of their own where they need them."""
  arm = functools.partial(core.Arm, seeds=SEEDS)
  return core.Sweep(
    warm={'skills': core.Start(start('skills'))},
    arms=[arm('ttrl', of('ttrl'), 'skills', evaluations={'after': voted})],
    scores=[*measure.SCORES, *measure.TRAINING, *SCORES],
    curves={'reward': 'reward', 'health/searches': 'searches'},
  )
