"""Share of the computed tokens of an update that is padding.

    python -m experiments.benchmarks.padding --out=FILE.json

Lengths like Search-R1's (log-normal, mean 1.1k tokens, at most 4,608; 2,560
trajectories), on 1, 8 and 32 shards, with the lengths, tokens and minibatches
of configs/search_r1.py and with 5 minibatches. Seconds, on one core.
"""

import time

import numpy as np

from configs import search_r1
from experiments import common
from experiments.benchmarks import harness
from searchrl_jax.learn import batching

LIMIT, TRAJECTORIES = 4608, 2560
SEEDS = 3
BAR = 0.05


def lengths(rng, n: int) -> np.ndarray:
  """Log-normal, with a mean of 1,100 after it is cut at LIMIT."""
  return np.clip(rng.lognormal(np.log(945), 0.56, n), 150, LIMIT).astype(int)


def waste(shards: int, minibatches: int) -> dict:
  """A row of the report: all minibatches of a step, of several seeds."""
  c = search_r1.get_config('model=qwen2.5-3b,algorithm=grpo').batch
  real = computed = micro = seconds = 0
  worst = 0.0
  for seed in range(SEEDS):
    rng = np.random.default_rng(seed)
    for sizes in np.array_split(lengths(rng, TRAJECTORIES), minibatches):
      trajectories = [
        batching.Tokens(
          i, np.ones(n, np.int32), np.arange(n) >= n // 2, np.zeros(n)
        )
        for i, n in enumerate(sizes)
      ]
      start = time.process_time()
      batches = batching.pack(trajectories, c, shards)
      seconds += time.process_time() - start
      assert sum(int(b.lengths.sum()) for b in batches) == sizes.sum()
      own = sum(b.ids.size for b in batches)
      worst = max(worst, 1 - sizes.sum() / own)
      real, computed = real + int(sizes.sum()), computed + own
      micro += len(batches)
  return {
    'shards': shards,
    'minibatches': minibatches,
    'padding': 1 - real / computed,
    'padding_worst_minibatch': worst,
    'microbatches_per_minibatch': micro / SEEDS / minibatches,
    'pack_seconds_per_step': seconds / SEEDS,
    'tokens_mean': real / SEEDS / TRAJECTORIES,
  }


def measure() -> list[dict]:
  return [waste(s, m) for m in (5, 10) for s in (1, 8, 32)]


def bars(rows) -> list[dict]:
  names = (f'padding_{r["shards"]}_of_{r["minibatches"]}' for r in rows)
  return [
    common.bar(name, row['padding'], BAR, at_most=True)
    for name, row in zip(names, rows)
  ]


if __name__ == '__main__':
  harness.run('padding', measure, bars, timed=lambda: False)
