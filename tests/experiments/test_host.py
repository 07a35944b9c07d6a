"""The benchmark of host time runs what a step of training runs."""

import numpy as np

from configs import search_r1
from experiments.benchmarks import host
from searchrl_jax.devices.signals import Loop
from searchrl_jax.store import records
from searchrl_jax.store.writer import Writer
from tests import fakes


def test_a_small_step(tmp_path):
  config = search_r1.get_config('model=none')
  config.log.tensorboard = False
  config.batch.lengths, config.batch.tokens = (8192,), 16384
  env = fakes.make_env(
    max_turns=host.SEARCHES, max_turn_tokens=600, max_tokens=8000
  )
  passages = [(f'title {i}', f'a passage of words {i} ' * 9) for i in range(99)]
  script = host.Script(env.tokenizer, env.template, passages, 2, 5)
  writer = Writer(tmp_path, config, step=0, steps=1)
  with Loop() as loop:
    found = host.step(
      config, env, env.tokenizer, script, script.questions, writer, loop
    )
  assert [row['stage'] for row in found['stages']] == [
    'rollout', 'reward', 'batch', 'credit', 'advantages', 'health', 'write',
    'background',
  ]  # fmt: skip
  kept = [*records.read(tmp_path / 'trajectories')]
  assert len(kept) == found['trajectories'] == 10
  assert found['tokens'] == sum(len(r.trajectory) for r in kept)
  assert found['disk_bytes'] > found['tokens']
  assert found['health']['health/searches'] == host.SEARCHES
  for r in kept:
    assert r.kept and np.isfinite(r.trainer_logps).any()
    assert len(r.trajectory.searches) == host.SEARCHES
