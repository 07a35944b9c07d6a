"""Adapters through the loops: warm start, training, resume, export."""

import asyncio
import dataclasses
import json

import jax
from ml_collections import ConfigDict
import numpy as np
import pytest

from configs import algorithms
from searchrl_jax import checks, export, sft, train
from searchrl_jax.aot import costs
from searchrl_jax.engines.weights import sync
from searchrl_jax.evaluate import policy as evaluate
from searchrl_jax.learn import update
from searchrl_jax.lookup import ConfigError
from searchrl_jax.models import decoder, lora, parameters, pretrained
from searchrl_jax.run import build
from searchrl_jax.store import checkpoint
from tests import tiny
from tests.loop.test_train import Killed, lines, params_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('programs')]


def config(url, **fields):
  c = tiny.config(url)
  c.model.lora.update(rank=2, alpha=6.0)
  c.optim.lr = 1e-2
  c.algorithm.update(kl='loss', kl_coef=0.01, epochs=2)
  c.update_from_flattened_dict(fields)
  return c


@pytest.fixture(scope='module')
def warm(url, tmp_path_factory):
  """A warm start into adapters."""
  folder, c = tmp_path_factory.mktemp('warm'), config(url)
  c.sft.data.update(dict(n=40, worlds=2, train=40, relations=3))
  c.sft.update(steps=3, rows=4, warmup=1, save_every=2)

  async def cell():  # of a notebook, whose kernel runs an event loop
    sft.sft(c, str(folder))

  asyncio.run(cell())
  return c, folder


@pytest.fixture(scope='module')
def whole(url, warm, tmp_path_factory):
  folder, c = tmp_path_factory.mktemp('whole'), config(url)
  c.train.init = str(warm[1])
  kinds, real = [], sync.sync_and_verify

  def noted(*args):
    kinds.append(args[6])
    return real(*args)

  with pytest.MonkeyPatch.context() as m:
    m.setattr(sync, 'sync_and_verify', noted)
    train.train(c, str(folder))
  return c, folder, kinds


def flat(params):
  return decoder.flatten(params)


@pytest.mark.long
def test_a_warm_start_trains_adapters_on_a_base_that_stays(warm):
  c, folder = warm
  found = flat(params_of(c, folder))
  started = c.copy_and_resolve_references()
  started.model.lora.rank = 0
  tok = build.tokenizer(c, str(folder))
  cfg = parameters.model_config(started, tok.vocab_size)
  base = flat(parameters.initial(started, cfg, build.mesh(c)))
  assert base.keys() < found.keys()
  for name, x in found.items():
    if name in base:
      np.testing.assert_array_equal(x, base[name])
    else:
      assert np.abs(x).max() > 0, name


def test_another_dtype_of_the_computation_keeps_the_adapters(warm):
  c, folder = warm
  half = c.copy_and_resolve_references()
  half.model.dtype = 'bfloat16'
  before, after = (flat(params_of(x, folder)) for x in (c, half))
  for name, x in after.items():
    assert x.dtype == ('float32' if '_lora_' in name else 'bfloat16'), name
    np.testing.assert_array_equal(x, before[name].astype(x.dtype), name)


@pytest.mark.long
def test_training_goes_on_with_the_adapters_of_the_warm_start(warm, whole):
  c, folder, kinds = whole
  before, after = (flat(params_of(c, f)) for f in (warm[1], folder))
  for name, x in after.items():
    assert (x == before[name]).all() == ('_lora_' not in name), name
  steps = lines(folder / 'metrics.jsonl')
  # The reference is the warm start, not the base without adapters: at the first
  # step it is the policy before the step.
  first, last = steps[1], steps[-1]
  assert first['train/kl_ref'] == pytest.approx(first['train/kl_old'], rel=0.1)
  assert last['train/kl_ref'] > 2 * last['train/kl_old']
  assert steps[-1]['sync/canary_max_diff'] < 1e-4
  assert kinds == ['full'] + ['adapter'] * 4


def test_checkpoints_hold_adapters_and_what_is_fixed_lies_beside_them(whole):
  _, folder, _ = whole
  for step in (folder / 'checkpoints').glob('0*'):
    tree = json.loads((step / 'meta' / 'meta.json').read_text())['tree']
    names = {k for k, (shape, _) in tree.items() if shape}
    assert names and all('_lora_' in name for name in names), names
    # Parameters and two moments.
    assert len(names) == 3 * 2 * len(decoder.PROJECTIONS)
  for name in 'base', 'reference':
    assert [p.name for p in (folder / name).iterdir()] == ['00000000']


def test_resume_is_bitwise(whole, tmp_path, monkeypatch):
  c, folder, _ = whole
  real, calls = update.Updater.step, []

  def killed(*args, **kw):
    calls.append(1)
    if len(calls) == 4:
      raise Killed
    return real(*args, **kw)

  with monkeypatch.context() as m:
    m.setattr(update.Updater, 'step', killed)
    with pytest.raises(Killed):
      train.train(c, str(tmp_path))
  train.train(c, str(tmp_path))
  a, b = params_of(c, folder), params_of(c, tmp_path)
  jax.tree.map(np.testing.assert_array_equal, a, b)


def test_exports_load_and_evaluate(whole, tmp_path, url):
  c, folder, _ = whole
  export.export(str(folder), f'{tmp_path}/merged', 'latest', 'float32')
  cfg, merged = pretrained.load(tmp_path / 'merged')
  params = params_of(c, folder)
  own = parameters.model_config(c, cfg.vocab_size)
  assert dataclasses.replace(lora.base(own), scan_unroll=1) == cfg
  jax.tree.map(np.testing.assert_array_equal, merged, lora.merge(own, params))
  export.export(str(folder), f'{tmp_path}/peft', 'latest', 'float32', True)
  again = config(url)
  again.model.lora.path = f'{tmp_path}/peft'
  tok = build.tokenizer(c, str(folder))
  started = parameters.initial(again, own, build.mesh(again))
  want, got = (lora.split(own, x)[0] for x in (params, started))
  jax.tree.map(np.testing.assert_array_equal, got, want)
  assert tok.vocab_size == cfg.vocab_size
  found = evaluate.evaluate(c, str(folder), str(tmp_path / 'evaluation'))
  last = lines(folder / 'metrics.jsonl')[-1]
  assert found['eval/em'] == last['eval/em']


def test_adapters_of_a_model_of_no_checkpoint_are_exported(warm, tmp_path):
  c, folder = warm
  assert not (c.model.path or c.train.init)
  export.export(str(folder), f'{tmp_path}/peft', 'latest', 'float32', True)
  assert (tmp_path / 'peft' / lora.WEIGHTS).exists()


def test_full_training_starts_from_merged_adapters(warm):
  c, folder = warm
  full = c.copy_and_resolve_references()
  full.model.lora.rank = 0
  got = params_of(full, folder)
  tok = build.tokenizer(c, str(folder))
  cfg = parameters.model_config(c, tok.vocab_size)
  want = lora.merge(cfg, params_of(c, folder))
  jax.tree.map(np.testing.assert_array_equal, got, want)
  # Other adapters start afresh on them.
  full.model.lora.rank = 3
  other = flat(params_of(full, folder))
  assert other['layers/q_lora_a'].shape[-1] == 3
  np.testing.assert_array_equal(other['layers/q'], flat(want)['layers/q'])
  assert not other['layers/q_lora_b'].any()


@pytest.mark.long
def test_a_critic_has_adapters_on_the_same_base(url, tmp_path):
  c = tiny.config(url)
  c.algorithm.update(algorithms.PPO)
  c.critic.lr = 1e-2
  c.model.lora.rank = 2
  c.data.eval = ConfigDict()
  c.train.steps = 2
  metrics = train.train(c, str(tmp_path))
  assert np.isfinite(metrics['train/critic_loss'])
  tree = checkpoint.of_run(c, str(tmp_path)).meta(2)['tree']
  critic = {k for k, (shape, _) in tree.items() if shape and '.critic.' in k}
  assert critic and all('_lora_' in k or '.value' in k for k in critic)
  c.critic.path = 'elsewhere'
  with pytest.raises(ConfigError, match='config.critic.path'):
    checks.check(c)


def test_costs_count_the_base_once(url):
  c = config(url)
  cfg = parameters.model_config(c, 700)
  rows = costs.of_run(c, cfg, build.mesh(c), working=0).device
  base = 4 * lora.base(cfg).n_params
  assert rows['frozen parameters (float32)'] == base
  adapters = 4 * cfg.n_params - base
  assert rows['parameters (float32)'] == adapters
  assert rows['reference parameters'] == adapters
  assert rows['engine: weights'] == base + adapters
