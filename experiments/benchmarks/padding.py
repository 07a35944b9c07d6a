"""Padding of an update's rows, and what packing them is worth on a CPU.

    python -m experiments.benchmarks.padding --before=DIR --out=FILE.json

1. Share of the computed tokens that is padding, with lengths like Search-R1's
   (log-normal, mean 1.1k tokens, at most 4,608; 2,560 trajectories), on 1, 8
   and 32 shards, with the lengths, tokens and minibatches of
   configs/search_r1.py and with 5 minibatches. Beside it: each trajectory in a
   row of its own, padded to the shortest bucket that holds it, in microbatches
   of 18,432 tokens in all (the batching before packing). Seconds, on one core.
2. Tokens/s of `Updater.step` at 1M parameters on mixed lengths (32 to 256
   tokens), against the same program of a checkout from before packing. The
   sides take turns, each turn a new process. Skipped without --before.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

from absl import app, flags
import numpy as np

from experiments import common

LIMIT, MEAN = 4608, 1100
BEFORE = dict(lengths=(1024, 2048, 3072, 4608), tokens=18432)
MIXED = (64, 128, 192, 256)
SEEDS = 3
WASTE, SPEED = 0.05, 1.3  # the bars

_OUT = flags.DEFINE_string('out', '', 'JSON file to write.')
_LOAD = flags.DEFINE_bool('allow_load', False, 'Run on a busy machine.')
_REPS = flags.DEFINE_integer('reps', 3, 'Repetitions.', lower_bound=1)
_BEFORE = flags.DEFINE_string('before', '', 'A checkout from before packing.')


def lengths(rng, n: int) -> np.ndarray:
  """Log-normal, with a mean of MEAN after it is cut at LIMIT."""
  return np.clip(rng.lognormal(np.log(945), 0.56, n), 150, LIMIT).astype(int)


def unpacked(sizes, shards: int) -> int:
  """Computed tokens with one trajectory in a row, padded to its bucket."""
  total = 0
  for least, length in zip((0, *BEFORE['lengths']), BEFORE['lengths']):
    n = int(((sizes > least) & (sizes <= length)).sum())
    rows = max(1, BEFORE['tokens'] // length)
    rows = max(shards, rows // shards * shards)
    total += -(-n // rows) * rows * length
  return total


def waste(shards: int, minibatches: int) -> dict:
  """A row of the report: all minibatches of a step, of several seeds."""
  from configs import search_r1
  from searchrl_jax.learn import batching

  c = search_r1.get_config('model=qwen2.5-3b,algorithm=grpo').batch
  real = computed = before = micro = seconds = 0
  worst = 0.0
  for seed in range(SEEDS):
    rng = np.random.default_rng(seed)
    for sizes in np.array_split(lengths(rng, 2560), minibatches):
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
      before += unpacked(sizes, shards)
      micro += len(batches)
  return {
    'shards': shards,
    'minibatches': minibatches,
    'padding': 1 - real / computed,
    'padding_worst_minibatch': worst,
    'padding_unpacked': 1 - real / before,
    'microbatches_per_minibatch': micro / SEEDS / minibatches,
    'pack_seconds_per_step': seconds / SEEDS,
    'tokens_mean': real / SEEDS / 2560,
  }


def worker(updates: int) -> None:
  """Prints tokens/s of updates as JSON. Runs on the code of both checkouts,
  so it uses no helper that the older one lacks."""
  import jax

  from searchrl_jax import schema
  from searchrl_jax.learn import batching, objectives, optim, update
  from searchrl_jax.models import decoder

  c = schema.base()
  c.batch.lengths, c.batch.tokens = MIXED, 8192
  cfg = decoder.DecoderConfig(
    vocab_size=2048,
    d_model=128,
    n_layers=4,
    n_heads=4,
    n_kv_heads=2,
    head_dim=32,
    d_ff=416,
    family='qwen2',
    scan_unroll=4,
  )
  params = jax.jit(lambda key: decoder.init_params(cfg, key))(jax.random.key(0))
  u = update.Updater(
    cfg,
    c.batch,
    temperature=1.0,
    tx=optim.make(c.optim, 1000),
    objective=objectives.policy(c),
  )
  state = u.init(params)
  u.warmup(score=False)
  seconds, cpu, tokens, padding = 0.0, 0.0, 0, []
  for seed in range(1 + updates):
    rng = np.random.default_rng(seed)
    rows = []
    for i, n in enumerate(rng.integers(32, MIXED[-1] + 1, 256)):
      mask = np.zeros(n, bool)
      mask[1:] = rng.permutation(n - 1) < n * 0.4
      ids = rng.integers(0, cfg.vocab_size, n).astype(np.int32)
      rows.append(batching.Tokens(i, ids, mask, np.full(n, -8.0, np.float32)))
    batches = batching.pack(rows, c.batch)
    batches = batching.set_advantages(batches, rng.normal(size=256))
    start, busy = time.perf_counter(), time.process_time()
    state, metrics = u.step(state, batches)
    if seed:  # the first is a warm-up
      seconds += time.perf_counter() - start
      cpu += time.process_time() - busy
      tokens += sum(len(row.ids) for row in rows)
      padding.append(metrics['padding'])
  out = {
    'tokens_per_s': tokens / seconds,
    'tokens_per_cpu_s': tokens / cpu,  # of all threads: load shows less
    'padding': statistics.mean(padding),
    'loss': metrics['loss'],
    'microbatches': metrics['microbatches'],
  }
  print(json.dumps(out))


def side(tree: pathlib.Path):
  """Runs the worker on a checkout's code."""
  env = os.environ | {
    'PYTHONPATH': str(tree),
    'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=1',
    'JAX_PLATFORMS': 'cpu',
  }
  done = subprocess.run(
    [sys.executable, '-P', __file__, '--worker'],
    cwd=tree,
    env=env,
    stdout=subprocess.PIPE,
    text=True,
    check=True,
  )
  return json.loads(done.stdout)


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  if _BEFORE.value:
    common.require_idle(allow=_LOAD.value)
  before = common.environment()
  rows = [waste(s, m) for m in (5, 10) for s in (1, 8, 32)]
  bars = [
    common.bar(
      f'padding_{r["shards"]}_of_{r["minibatches"]}',
      r['padding'],
      WASTE,
      at_most=True,
    )
    for r in rows
  ]
  if _BEFORE.value:
    trees = {'packed': common.ROOT, 'before': pathlib.Path(_BEFORE.value)}
    found = common.interleave(
      {k: lambda tree=v: side(tree.resolve()) for k, v in trees.items()},
      _REPS.value,
    )
    speed = {
      k: statistics.median(x['tokens_per_s'] for x in v)
      for k, v in found.items()
    }
    ratio = speed['packed'] / speed['before']
    rows.append({'case': 'update_1m_mixed', 'ratio': ratio, 'sides': found})
    bars.append(common.bar('update_1m_mixed', ratio, SPEED))
  common.report(_OUT.value, 'padding', rows, bars, before)


if __name__ == '__main__':
  if sys.argv[1:] == ['--worker']:
    worker(2)
  else:
    app.run(main)
