"""Rollouts beside the update: the time that saves.

  python -m experiments.benchmarks.overlap --out=overlap.json

Seconds a step at staleness 0 and 1. The engine (the in-process engine, and
this whole process) has one core. The update is a process that computes on
another core for as long as the rollouts of a step take, by its own processor
time. Rollouts, searches of 200 ms +- 100 ms and syncs are real: the `collector`
as train.py runs it, on the scripted lengths of `multiturn`.
"""

import contextlib
import os
import statistics
import sys
import time

# Before JAX counts the cores.
CORES = sorted(os.sched_getaffinity(0))
if __name__ == '__main__':
  os.sched_setaffinity(0, CORES[:1])

# ruff: noqa: E402
from ml_collections import ConfigDict

from experiments import common
from experiments.benchmarks import harness, multiturn
from searchrl_jax import lookup
from searchrl_jax import schema as config_lib
from searchrl_jax.devices.signals import Signals
from searchrl_jax.engines.core import WeightsUpdate
from searchrl_jax.learn import batching
from searchrl_jax.rewards.core import RewardContext
from searchrl_jax.rollout import collector

STEPS, WARM = 8, 2  # of one run; those not counted
SLOTS, TRAJECTORIES = 48, 192  # four for each slot
SECONDS = 0.2  # a search
BAR = 1.4

# Computes on a core of its own for the seconds that it is sent.
_UPDATE = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
print('null', flush=True)
for line in sys.stdin:
  until = time.process_time() + float(line)
  while time.process_time() < until:
    pass
  print('null', flush=True)
"""


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


def measure() -> list[dict]:
  lookup.require(len(CORES) > 1, 'needs two cores: one for the update')
  engine, params = multiturn.make_engine(SLOTS)
  command = [sys.executable, '-c', _UPDATE, str(CORES[-1])]
  with harness.Process(command) as update:
    alone = steps(engine, params, update, 0, 0.0)['rollout_s']
    found = harness.turns(
      {n: lambda n=n: steps(engine, params, update, n, alone) for n in (0, 1)}
    )
  return [
    {'max_staleness': n, 'repetition': i, 'update_s': alone, **row}
    for n, runs in found.items()
    for i, row in enumerate(runs)
  ]


def bars(rows) -> list[dict]:
  synchronous, ahead = (
    statistics.median(r['step_s'] for r in rows if r['max_staleness'] == n)
    for n in (0, 1)
  )
  return [common.bar('overlap_speedup', synchronous / ahead, BAR)]


if __name__ == '__main__':
  harness.run('overlap', measure, bars, reps=3)
