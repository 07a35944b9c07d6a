"""Runs that are killed at random times, against one that nobody disturbed.

Each start is a process, which gets SIGKILL or SIGTERM after a random time, up
to some times; then it may end. Metrics, but for times and memory, and every
recorded trajectory are bitwise those of the undisturbed run.
"""

import functools
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

from ml_collections import ConfigDict

from configs import algorithms
from searchrl_jax import schema
from tests import tiny

ROOT = pathlib.Path(__file__).resolve().parents[2]
KILLS = 4
# What depends on the time that things took.
MEASURED = re.compile(
  '^time/|seconds|per_second|in_flight|waiting_for|mfu|/earlier_'
)


def get_config(arg=None):
  """A small run whose state is more than parameters: train's --config."""
  a = schema.parse_arg(arg, variant='plain')
  c = tiny.config()
  c.train.steps, c.eval.every = 4, 2
  c.reward = ConfigDict(dict(r=dict(fn='tests.tiny.odd', weight=1.0)))
  if a.variant == 'critic':
    c.algorithm.advantage_kw = ConfigDict()
    c.algorithm.update(algorithms.PPO)
    c.algorithm.advantage_kw.lam = 0.9
    c.algorithm.epochs, c.critic.lr = 2, 1e-3
    c.env.train_observations = True
  elif a.variant == 'tree':
    c.algorithm.update(algorithms.DAPO)
    c.rollout.update(sampler='tree', group=3, trees=1, rounds=2, refill=2)
    c.env.max_turns = 2
  elif a.variant == 'lora':
    c.model.lora.update(rank=2, alpha=6.0)
    c.algorithm.update(kl='loss', kl_coef=0.01, minibatches=2)
  return c


VARIANTS = ('plain', 'critic', 'tree', 'lora')


def start(variant: str, folder: pathlib.Path, url: str) -> subprocess.Popen:
  recipe = f'--config={ROOT}/tests/fuzz/kills.py:variant={variant}'
  command = [sys.executable, '-m', 'searchrl_jax.train', recipe]
  command += [f'--workdir={folder}', f'--config.source.url={url}']
  log = open(folder.with_suffix('.log'), 'ab')  # noqa: SIM115
  with log:
    options = dict(stdout=log, stderr=log, cwd=ROOT)
    return subprocess.Popen(command, **options)


def read(folder: pathlib.Path):
  """Metrics without what was measured, and all of the trajectories."""
  from tests.loop.test_samplers import sampled
  from tests.loop.test_train import lines

  steps = [
    {k: v for k, v in row.items() if not MEASURED.search(k)}
    for row in lines(folder / 'metrics.jsonl')
  ]
  return steps, sampled(folder)


@functools.cache
def undisturbed(variant: str, url: str):
  """What a run becomes, and the seconds that it takes, compiled before."""
  with tempfile.TemporaryDirectory() as scratch:
    for name in 'ab':
      begun, folder = time.monotonic(), pathlib.Path(scratch, name)
      status = start(variant, folder, url).wait(600)
      assert status == 0, folder.with_suffix('.log').read_text()[-3000:]
    return read(folder), time.monotonic() - begun


def case(rng: random.Random, serve) -> str:
  """One run with its kills; returns the variant."""
  variant, url = rng.choice(VARIANTS), serve()
  wanted, seconds = undisturbed(variant, url)
  with tempfile.TemporaryDirectory() as scratch:
    folder, told = pathlib.Path(scratch, 'run'), []
    for kill in range(KILLS + 1):
      process = start(variant, folder, url)
      try:
        last = kill == KILLS
        process.wait(600 if last else rng.uniform(0.2, 1.1) * seconds)
      except subprocess.TimeoutExpired:
        number = rng.choice([signal.SIGKILL, signal.SIGTERM])
        told.append(number.name)
        os.kill(process.pid, number)
      status = process.wait(120)
      log = folder.with_suffix('.log').read_text()[-3000:]
      assert status in (0, -signal.SIGKILL, -signal.SIGTERM, 143), log
      if status == 0:
        break
    got = read(folder)
  for a, b in zip(wanted, got, strict=True):
    assert len(a) == len(b), (variant, told, len(a), len(b))
    for x, y in zip(a, b, strict=True):
      assert x == y, (variant, told, differing(x, y))
  return variant


def differing(x, y):
  if isinstance(x, dict):
    keys = [k for k in {*x} | {*y} if x.get(k) != y.get(k)]
    return x['step'], {k: (x.get(k), y.get(k)) for k in keys}
  return x[:2], y[:2]
