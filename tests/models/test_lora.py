"""Adapters: what they compute, what is trained, and PEFT's files."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from searchrl_jax import schema
from searchrl_jax.devices import sharding
from searchrl_jax.learn import update
from searchrl_jax.lookup import ConfigError
from searchrl_jax.models import decoder, lora
from tests.learn import test_update as common
from tests.models import test_deltanet as deltanets

pytestmark = pytest.mark.slow

LORA = decoder.Lora(4, 8.0, tuple(decoder.PROJECTIONS), 'float32')
CFG = dataclasses.replace(common.CFG, lora=LORA)


# Windows, norms behind the products, scaled embeddings.
GEMMA = dataclasses.replace(
  CFG, family='gemma3_text', n_layers=3, window=4, global_every=2
)
HYBRID = dataclasses.replace(
  deltanets.CFG,
  lora=decoder.Lora(
    4, 8.0, tuple(decoder.projections(deltanets.CFG)), 'float32'
  ),
)


def base_params(seed=0, cfg=CFG):
  return decoder.init_params(lora.base(cfg), jax.random.key(seed), scale=0.2)


def random_adapters(seed=1, cfg=CFG):
  """Adapters whose B is not 0."""
  fresh = lora.init(cfg, jax.random.key(seed))
  keys = jax.random.split(jax.random.key(seed + 1), 100)
  return jax.tree.map(
    lambda x, k: x + 0.1 * jax.random.normal(k, x.shape),
    fresh,
    jax.tree.unflatten(
      jax.tree.structure(fresh), keys[: len(jax.tree.leaves(fresh))]
    ),
  )


def logits(cfg, params, seed=0):
  ids = np.random.default_rng(seed).integers(0, cfg.vocab_size, (2, 9))
  hidden = decoder.hidden_states(params, cfg, jnp.asarray(ids, jnp.int32))
  return np.asarray(decoder.logits(params, cfg, hidden))


def test_fresh_adapters_change_no_bit():
  base = base_params()
  params = lora.join(lora.init(CFG, jax.random.key(1)), base)
  decoder.flatten_checked(CFG, params)
  want = logits(lora.base(CFG), base)
  np.testing.assert_array_equal(logits(CFG, params), want)


@pytest.mark.long
@pytest.mark.parametrize(
  'cfg', [CFG, GEMMA, HYBRID], ids=['llama', 'gemma', 'qwen3.5']
)
def test_adapters_compute_what_merged_and_scaled_weights_do(cfg):
  plain = base_params(cfg=cfg)
  params = lora.join(random_adapters(cfg=cfg), plain)
  got = logits(cfg, params)
  assert np.abs(got - logits(lora.base(cfg), plain)).max() > 0.1
  merged = lora.merge(cfg, params)
  np.testing.assert_allclose(logits(lora.base(cfg), merged), got, atol=2e-5)
  scaled, served = lora.served(cfg, params)
  assert scaled.lora.scale == 1.0
  np.testing.assert_allclose(logits(scaled, served), got, atol=1e-6)
  a = np.einsum(
    'LDR,LRNH->LDNH', params['layers']['q_lora_a'], params['layers']['q_lora_b']
  )
  np.testing.assert_allclose(
    merged['layers']['q'], params['layers']['q'] + 2.0 * a, atol=1e-6
  )


@pytest.mark.long
@pytest.mark.parametrize('mesh', [None, dict(data=2, fsdp=2, tensor=2)])
def test_an_update_trains_adapters_alone(mesh):
  mesh = mesh and sharding.make_mesh(**mesh)
  c = common.config(**{'batch.lengths': (16,)})
  u = common.updater(c, cfg=CFG, mesh=mesh)
  batches = common.microbatches(c, shards=u.shards)
  trained, frozen = random_adapters(), base_params()
  if mesh:
    frozen = jax.device_put(
      frozen, lora.split(CFG, decoder.param_shardings(CFG, mesh))[1]
    )
  u.frozen = frozen
  state = u.init(update.copy(trained))
  names = set(decoder.flatten(trained))
  moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
  assert len(moments) == 2 * len(names)
  old = [u.output(state.params, b) for b in batches]
  grads, sums = u.grads(state, batches, old, old)

  def whole(trained):
    total = 0.0
    for b, o in zip(batches, old):
      loss, _ = alone.loss(trained, alone.put(b, o, o), sums['tokens'], frozen)
      total += loss
    return total

  alone = common.updater(c, cfg=CFG)
  if mesh is None:
    want = jax.jit(jax.grad(whole))(trained)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)
  else:
    layout = {x.sharding.spec for x in jax.tree.leaves(state.params)}
    assert len(layout) > 1  # A along fsdp, B along tensor
    alone.frozen = base_params()
    ones = common.microbatches(c)
    one = alone.init(update.copy(random_adapters()))
    before = [alone.output(one.params, b) for b in ones]
    expected, _ = alone.grads(one, ones, before, before)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected)):
      np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-6)
  state, metrics = u.step(state, batches, old, old)
  assert metrics['finite'] and set(decoder.flatten(state.params)) == names
  for name, x in decoder.flatten(state.params).items():
    assert np.abs(x - decoder.flatten(trained)[name]).max() > 0, name


@pytest.mark.long
def test_frozen_parameters_are_stored_in_their_dtype():
  cfg = dataclasses.replace(
    CFG, dtype='bfloat16', lora=dataclasses.replace(LORA, dtype='bfloat16')
  )
  frozen = lora.freeze(cfg, base_params())
  assert {x.dtype.name for x in jax.tree.leaves(frozen)} == {'bfloat16'}
  fresh = lora.init(cfg, jax.random.key(0))
  assert {x.dtype.name for x in jax.tree.leaves(fresh)} == {'float32'}
  want = logits(dataclasses.replace(lora.base(cfg)), base_params())
  np.testing.assert_array_equal(logits(cfg, lora.join(fresh, frozen)), want)


def test_decays_of_frozen_delta_nets_stay_float32():
  cfg = dataclasses.replace(
    HYBRID, lora=dataclasses.replace(HYBRID.lora, dtype='bfloat16')
  )
  frozen = lora.freeze(cfg, base_params(cfg=cfg))['layers']
  whole = {k for k, x in frozen.items() if x.dtype == jnp.float32}
  assert whole == {'delta_a_log', 'delta_norm'}


def test_the_target_is_a_regex_of_projections():
  fields = schema.base().model.lora
  assert lora.parse(fields, 'float32', common.CFG) is None
  fields.update(rank=2, target='[qv]')
  assert lora.parse(fields, 'bfloat16', common.CFG) == decoder.Lora(
    2, 32.0, ('q', 'v'), 'bfloat16'
  )
  fields.target = 'delta_.*'
  found = lora.parse(fields, 'float32', deltanets.CFG).targets
  assert found == tuple(f'delta_{x}' for x in ('qkv', 'z', 'b', 'a', 'o'))
  for target in ('embed', '['):
    fields.target = target
    with pytest.raises(ConfigError, match='config.model.lora.target'):
      lora.parse(fields, 'float32', common.CFG)


def test_peft_files_round_trip(tmp_path):
  adapters = random_adapters()
  lora.save(tmp_path / 'a', CFG, adapters)
  found = lora.load(tmp_path / 'a', CFG)
  jax.tree.map(np.testing.assert_array_equal, found, adapters)
  stored = safetensors.numpy.load_file(tmp_path / 'a' / lora.WEIGHTS)
  name = 'base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight'
  N, H = CFG.n_heads, CFG.head_dim
  want = np.asarray(adapters['layers']['q_lora_b'][1]).reshape(4, N * H).T
  np.testing.assert_array_equal(stored[name], want)
  with pytest.raises(FileExistsError):
    lora.save(tmp_path / 'a', CFG, adapters)


def test_adapters_of_a_wrapped_text_model(tmp_path):
  adapters = random_adapters()
  lora.save(tmp_path / 'a', CFG, adapters, wrapped=True)
  fields = json.loads((tmp_path / 'a' / lora.CONFIG).read_text())
  matches = re.compile(fields['target_modules']).fullmatch
  assert matches('model.language_model.layers.1.self_attn.q_proj')
  assert not matches('model.vision_tower.encoder.layers.1.self_attn.q_proj')
  stored = safetensors.numpy.load_file(tmp_path / 'a' / lora.WEIGHTS)
  assert {name.split('.layers.')[0] for name in stored} == {
    'base_model.model.model.language_model'
  }
  found = lora.load(tmp_path / 'a', CFG)
  jax.tree.map(np.testing.assert_array_equal, found, adapters)


@pytest.mark.parametrize(
  'field, value, match',
  [
    ('r', 8, 'config.model.lora.rank=4'),
    ('lora_alpha', 4, 'config.model.lora.alpha=8.0'),
    ('use_dora', True, 'use_dora=True'),
    ('modules_to_save', ['lm_head'], 'modules_to_save'),
    # Their base is not the model: it lacks what the fresh adapter adds.
    ('init_lora_weights', 'pissa', "'pissa' .*path_initial_model_for_weight"),
    ('init_lora_weights', 'pissa_niter_4', "init_lora_weights='pissa_niter_4'"),
    ('init_lora_weights', 'olora', "'olora'.*'gaussian' or 'eva'"),
    ('init_lora_weights', 'loftq', "init_lora_weights='loftq'"),
    ('init_lora_weights', 'of_2027', "init_lora_weights='of_2027'"),
    ('lora_bias', True, 'lora_bias=True'),
    ('kasa_config', {'beta': 1.0}, r"kasa_config=\{'beta': 1.0\}"),
  ],
)
def test_another_adapter_is_refused(tmp_path, field, value, match):
  lora.save(tmp_path / 'a', CFG, random_adapters())
  file = tmp_path / 'a' / lora.CONFIG
  file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
  with pytest.raises(ValueError, match=match):
    lora.load(tmp_path / 'a', CFG)


def test_what_peft_writes_of_plain_lora_is_known(tmp_path):
  adapters = random_adapters()
  lora.save(tmp_path / 'a', CFG, adapters)
  file = tmp_path / 'a' / lora.CONFIG
  fields = json.loads(file.read_text()) | {
    'auto_mapping': None, 'corda_config': None, 'eva_config': {'rho': 2.0},
    'exclude_modules': None, 'init_lora_weights': 'eva', 'kasa_config': None,
    'loftq_config': {}, 'megatron_core': 'megatron.core', 'lora_dropout': 0.1,
    'peft_version': '0.21.2', 'qalora_group_size': 16, 'revision': None,
    'target_parameters': None, 'use_bdlora': None, 'use_of_2027': False,
  }  # fmt: skip
  file.write_text(json.dumps(fields))
  found = lora.load(tmp_path / 'a', CFG)
  jax.tree.map(np.testing.assert_array_equal, found, adapters)
  (tmp_path / 'a' / lora.WEIGHTS).unlink()
  with pytest.raises(FileNotFoundError, match='PEFT'):
    lora.load(tmp_path / 'a', CFG)


def test_an_adapter_of_other_projections_is_refused(tmp_path):
  lora.save(tmp_path / 'a', CFG, random_adapters())
  fewer = dataclasses.replace(
    CFG, lora=dataclasses.replace(LORA, targets=('q',))
  )
  with pytest.raises(ValueError, match='down_proj.lora_A.weight'):
    lora.load(tmp_path / 'a', fewer)
