"""The loop over a vLLM server that it starts: trained, killed, resumed."""

import pytest

from searchrl_jax import train
from searchrl_jax.engines.vllm.client import VllmEngine
from searchrl_jax.learn import update
from searchrl_jax.store import checkpoint, records
from tests import tiny

pytestmark = pytest.mark.sidecar


class Killed(BaseException):
  """Stands for a kill: nothing in the loop catches it."""


def test_a_run_is_killed_and_goes_on_with_the_checkpoints_version(
  tmp_path, monkeypatch
):
  config = tiny.config()
  config.source.corpus = 'world'
  config.model.arch.update(
    dict(num_attention_heads=1, num_key_value_heads=1, head_dim=32)
  )
  config.engine.module = 'vllm'
  config.engine.kv_cache_gib = 0.25
  config.rollout.max_staleness = 1
  config.eval.every = 0
  first, syncs = [], []
  real_step, real_sync = update.Updater.step, VllmEngine.sync

  def step(*args, **kw):
    first.append(1)
    if len(first) == 3:
      raise Killed
    return real_step(*args, **kw)

  async def sync(self, request):
    syncs.append(request.version)
    return await real_sync(self, request)

  monkeypatch.setattr(update.Updater, 'step', step)
  monkeypatch.setattr(VllmEngine, 'sync', sync)
  with pytest.raises(Killed):
    train.train(config, str(tmp_path))
  assert checkpoint.of_run(config, str(tmp_path)).latest() == 2
  assert syncs == [0, 1, 2]
  metrics = train.train(config, str(tmp_path))
  # Its server holds what the checkpoint has before the first rollout.
  assert syncs == [0, 1, 2, 2, 3]
  assert metrics['sync/canary_max_diff'] < 1e-3
  assert metrics['train/mismatch_max'] < 0.5
  kept = [*records.read(tmp_path / 'trajectories')]
  names = {(r.step, r.trajectory.id) for r in kept}
  assert len(names) == len(kept) == 3 * 4 * 2
  for r in kept:
    for s in r.trajectory.segments:
      if s.author == 'policy':
        assert r.step - 1 <= s.versions.min() <= s.versions.max() <= r.step
