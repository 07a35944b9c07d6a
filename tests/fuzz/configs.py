"""Random configs: each trains, is killed and resumes, or is refused.

A refusal is an error of the checks, before a model is loaded, that names a
field. Rewards may be equal for all, or all invalid: then a step has nothing to
learn from, which is no reason to end.
"""

import math
import os
import pathlib
import random
import tempfile
from unittest import mock

from ml_collections import ConfigDict
import numpy as np

from configs import algorithms
from searchrl_jax import checks, train
from searchrl_jax.data.checks import DataError
from searchrl_jax.learn import update
from searchrl_jax.lookup import ConfigError
from searchrl_jax.rewards import core
from searchrl_jax.rewards.core import RewardError
from searchrl_jax.rollout import collector
from searchrl_jax.store import checkpoint
from searchrl_jax.types import Rewards
from tests import tiny
from tests.loop.test_train import Killed, lines

ALGORITHMS = [n for n in vars(algorithms) if n.isupper() and n[0] != '_']
HERE = 'tests.fuzz.configs'
REWARDS = ['tests.tiny.odd', 'tests.tiny.shortness', 'tests.tiny.by_turn']
REWARDS += [f'{HERE}.equal', f'{HERE}.invalid']
# Each is changed in a third of the cases.
CHANGES = {
  'algorithm.minibatches': [1, 2, 4],
  'algorithm.epochs': [1, 2],
  'algorithm.kl': ['none', 'loss', 'reward'],
  'algorithm.kl_coef': [0.0, 0.05],
  'algorithm.drop_zero_variance': [False, True],
  'algorithm.tis': ['none', 'token', 'sequence'],
  'algorithm.entropy_coef': [0.0, 0.01],
  'algorithm.horizon': [0, 16],
  'batch.lengths': [(96,), (48, 96)],
  'batch.prefix_tokens': [0, 192],
  'checkpoint.every': [0, 1, 2],
  'critic.pretrain_steps': [0, 1],
  'engine.slots': [2, 8],
  'env.max_turns': [0, 1, 2],
  'env.train_observations': [False, True],
  'eval.every': [0, 1, 2],
  'model.lora.rank': [0, 2],
  'optim.schedule': ['constant', 'linear', 'cosine'],
  'rollout.group': [1, 2, 3],
  'rollout.max_staleness': [0, 1],
  'rollout.questions': [1, 2, 4],
  'rollout.refill': [0, 2],
}
REFUSALS = (ConfigError, DataError, RewardError)


async def equal(groups, context):
  del context
  return core.per_trajectory(groups, lambda t: 1.0)


async def invalid(groups, context):
  del context
  count = sum(map(len, groups))
  return Rewards(np.zeros(count, np.float32), np.zeros(count, bool))


def draw(rng: random.Random, url: str) -> ConfigDict:
  c = tiny.config(url)
  c.train.steps = 3
  c.algorithm.advantage_kw = ConfigDict()
  c.algorithm.update(getattr(algorithms, name := rng.choice(ALGORITHMS)))
  # What its name does not say: a rate of the critic, and a horizon.
  c.critic.lr = 1e-3 if name == 'PPO' or rng.random() < 0.05 else 0.0
  c.algorithm.horizon = 16 if name == 'DR_GRPO' else 0
  reward = dict(fn=rng.choice(REWARDS), weight=1.0)
  c.reward = ConfigDict(dict(r=reward))
  if rng.random() < 0.2:
    c.rollout.update(sampler='tree', trees=1, rounds=rng.choice([1, 2]))
  if rng.random() < 0.1:
    c.data.eval = ConfigDict()
  for field, values in CHANGES.items():
    if rng.random() < 1 / 3:
      c.update_from_flattened_dict({field: rng.choice(values)})
  return c


def accepted(c: ConfigDict) -> bool:
  """Whether a config passes the checks; a refusal has to name a field."""
  try:
    checks.check(c)
    checks.check_data(c, ())
  except REFUSALS as error:
    assert 'config.' in str(error), error
    return False
  return True


def case(rng: random.Random, serve) -> str:
  """One config; returns 'ran' or 'refused'."""
  c = draw(rng, 'http://127.0.0.1:9')
  if not accepted(c):
    return 'refused'
  c.source.url = serve()
  owner, name = rng.choice(
    [
      (update.Updater, 'step'),
      (collector, 'rollout'),
      (checkpoint.Checkpointer, 'save'),
    ]
  )
  real, nth, calls = getattr(owner, name), rng.randint(1, 4), []

  def killed(*args, **kw):
    calls.append(1)
    if len(calls) == nth:
      raise Killed
    return real(*args, **kw)

  with tempfile.TemporaryDirectory() as folder:
    try:
      with mock.patch.object(owner, name, killed):
        train.train(c, folder)
    except Killed:
      train.train(c, folder)
    except REFUSALS:  # what only the data or the model shows
      if os.path.exists(pathlib.Path(folder, 'metrics.jsonl')):
        raise
      return 'refused'
    steps = lines(pathlib.Path(folder, 'metrics.jsonl'))
  found = [s['step'] for s in steps if s['step'] >= 0]
  assert found == [*range(c.train.steps)], found
  assert all(math.isfinite(s.get('train/loss', 0.0)) for s in steps)
  return 'ran'
