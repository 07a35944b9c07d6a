"""Rollouts beside the update: the time that saves, and what staleness costs.

  python -m experiments.benchmarks.overlap --out=overlap.json
  python -m experiments.benchmarks.overlap --curves=runs/overlap \\
    --out=overlap_curves.json

The first measures seconds a step at staleness 0 and 1. The engine (the
in-process sampler, and this whole process) has one core. The update is a
process that computes on another core for as long as the rollouts of a step
take, by its own processor time. Rollouts, searches of 200 ms +- 100 ms and
syncs are real: the `collector` as train.py runs it, on the scripted lengths of
`multiturn`.

The second trains the quickstart from one warm start a seed: staleness 0, 1
and 4, with truncated importance weights and without, three seeds. All share
both cores, so its seconds say nothing.
"""

import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

# Before JAX counts the cores.
CORES = sorted(os.sched_getaffinity(0))
if __name__ == '__main__' and not any('--curves' in a for a in sys.argv):
  os.sched_setaffinity(0, CORES[:1])

# ruff: noqa: E402
from absl import app, flags
from ml_collections import ConfigDict
import numpy as np

from configs import quickstart
from experiments import common
from experiments.benchmarks import multiturn
from searchrl_jax import schema as config_lib
from searchrl_jax import sft, train
from searchrl_jax.devices.signals import Signals
from searchrl_jax.engines.core import WeightsUpdate
from searchrl_jax.learn import batching
from searchrl_jax.rewards.core import RewardContext
from searchrl_jax.rollout import collector
from searchrl_jax.run import build

STEPS, WARM = 8, 2  # of one run; those not counted
SLOTS, TRAJECTORIES = 48, 192  # four for each slot
SECONDS = 0.2  # a search
BAR = 1.4
ARMS = ((0, 'token'), (1, 'token'), (1, 'none'), (4, 'token'), (4, 'none'))

_UPDATE = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
for line in sys.stdin:
  until = time.process_time() + float(line)
  while time.process_time() < until:
    pass
  print(flush=True)
"""


class Update:
  """Computes on a core of its own; the caller waits."""

  def __init__(self, core: int):
    self._process = subprocess.Popen(
      [sys.executable, '-c', _UPDATE, str(core)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )

  def __call__(self, seconds: float) -> None:
    print(seconds, file=self._process.stdin, flush=True)
    self._process.stdout.readline()

  def close(self) -> None:
    self._process.stdin.close()
    self._process.wait()


class Stream:
  """The questions of `multiturn`, another draw each step."""

  def __init__(self):
    self._step = 0

  def state(self) -> dict:
    return {'step': self._step}

  def next(self, n: int):
    self._step += 1
    return multiturn.questions(n, seed=self._step)


def steps(engine, params, update, max_staleness: int, seconds: float) -> dict:
  """Seconds a step, and what the rollouts took of it."""
  count, rolled = WARM + STEPS, []
  config = config_lib.base()
  config.train.steps = count
  config.rollout.update(
    group=1, questions=TRAJECTORIES, max_staleness=max_staleness
  )
  config.reward.short = ConfigDict(
    dict(fn='length.overlong', weight=1.0, limit=100, cache=100)
  )
  context = RewardContext(
    env=multiturn.ScriptedEnv(),
    engine=engine,
    source=multiturn.SlowSource(SECONDS),
  )
  with Signals() as signals:
    rollouts = collector.Collector(config, Stream(), batching.useful)
    timer = lambda *_: contextlib.nullcontext()
    rollouts.open(signals, timer, context)
    for step in range(count):
      if step == WARM:
        begin = time.monotonic()
        rollouts.idle_seconds()
      rolled.append(rollouts.take(step).stats.seconds)
      update(seconds)

      async def publish(step=step):
        await engine.sync(WeightsUpdate(params, step + 1))
        await engine.resume()

      signals.finish(publish())
    total = time.monotonic() - begin
    idle = rollouts.idle_seconds()
  return {
    'step_s': total / STEPS,
    'engine_idle_s': idle / STEPS,
    'rollout_s': statistics.median(rolled[WARM:]),
  }


def timing(reps: int) -> tuple[list, list]:
  engine, params = multiturn.make_engine(SLOTS)
  update = Update(CORES[-1])
  try:
    alone = steps(engine, params, update, 0, 0.0)['rollout_s']
    found = common.interleave(
      {n: lambda n=n: steps(engine, params, update, n, alone) for n in (0, 1)},
      reps,
    )
  finally:
    update.close()
  rows = [
    {'max_staleness': n, 'repetition': i, 'update_s': alone, **row}
    for n, runs in found.items()
    for i, row in enumerate(runs)
  ]
  medians = {
    n: statistics.median(r['step_s'] for r in runs) for n, runs in found.items()
  }
  return rows, [common.bar('overlap_speedup', medians[0] / medians[1], BAR)]


def curves(folder: pathlib.Path, seeds: int, length: int) -> list[dict]:
  """The quickstart's RL at each staleness; what is done is not done again."""
  rows = []
  for seed in range(seeds):
    base = quickstart.get_config(f'seed={seed}')
    base.data.world_seed = seed
    home = folder / f'seed{seed}'
    home.mkdir(parents=True, exist_ok=True)
    with build.retrieval(base, str(home)) as url:
      base.source.url = url
      sft.sft(base, str(home / 'warm'))
      for staleness, tis in ARMS:
        config = base.copy_and_resolve_references()
        config.train.init = str(home / 'warm')
        config.train.steps = length
        config.rollout.max_staleness = staleness
        config.algorithm.tis = tis
        arm = home / f'staleness{staleness}_{tis}'
        train.train(config, str(arm))
        lines = [json.loads(x) for x in (arm / 'metrics.jsonl').open()]
        trained = [x for x in lines if 'reward' in x]
        rows.append(
          {
            'max_staleness': staleness,
            'correction': tis,
            'seed': seed,
            'em': next(x['eval/em'] for x in reversed(lines) if 'eval/em' in x),
            'staleness': float(np.mean([x['staleness/mean'] for x in trained])),
            'mismatch': float(
              np.mean([x['train/mismatch_abs'] for x in trained])
            ),
            'ess': float(np.mean([x['train/mismatch_ess'] for x in trained])),
            'reward_curve': [x['reward'] for x in trained],
            'em_curve': [
              [x['step'] + 1, x['eval/em']] for x in lines if 'eval/em' in x
            ],
          }
        )
  return rows


def plot(rows: list[dict], path: pathlib.Path) -> None:
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot

  figure, axis = pyplot.subplots(figsize=(6, 4))
  for staleness, tis in ARMS:
    own = [
      r['reward_curve']
      for r in rows
      if (r['max_staleness'], r['correction']) == (staleness, tis)
    ]
    mean = np.mean(own, 0)
    smooth = np.convolve(mean, np.ones(5) / 5, 'valid')
    axis.plot(
      np.arange(len(smooth)) + 5,
      smooth,
      '--' if tis == 'none' else '-',
      color=f'C{staleness}',
      label=f'staleness {staleness}'
      + (', not corrected' if tis == 'none' else ''),
    )
    axis.fill_between(
      np.arange(len(mean)) + 1,
      np.min(own, 0),
      np.max(own, 0),
      color=f'C{staleness}',
      alpha=0.06,
      linewidth=0,
    )
  axis.set(xlabel='step', ylabel='reward (mean of 5 steps, 3 seeds)')
  axis.legend(frameon=False)
  axis.spines[['top', 'right']].set_visible(False)
  figure.tight_layout()
  figure.savefig(path, dpi=100)
  pyplot.close(figure)


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  before = common.environment()
  if _CURVES.value:
    rows, bars = (
      curves(pathlib.Path(_CURVES.value), _SEEDS.value, _STEPS.value),
      [],
    )
    if _OUT.value:
      plot(rows, pathlib.Path(_OUT.value).with_suffix('.png'))
  else:
    if len(CORES) < 2:
      raise app.UsageError('needs two cores: one for the update')
    common.require_idle(allow=_ALLOW.value)
    rows, bars = timing(_REPS.value)
  common.report(_OUT.value, 'overlap', rows, bars, before)


if __name__ == '__main__':
  _OUT = flags.DEFINE_string('out', '', 'JSON file to write (and PNG: curves)')
  _REPS = flags.DEFINE_integer('reps', 3, 'interleaved repetitions', 3)
  _CURVES = flags.DEFINE_string(
    'curves', '', 'train the arms in this folder instead; it resumes'
  )
  _SEEDS = flags.DEFINE_integer('seeds', 3, 'of the curves', 1)
  _STEPS = flags.DEFINE_integer('steps', 60, 'of each arm', 1)
  _ALLOW = flags.DEFINE_bool(
    'allow_load', False, 'run on a busy machine; the load stands in the file'
  )
  app.run(main)
