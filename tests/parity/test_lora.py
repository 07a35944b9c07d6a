"""Adapters against transformers and peft, live: make test-parity."""

import dataclasses
import warnings

import numpy as np
import pytest

torch = pytest.importorskip('torch', reason='torch is not installed')
peft = pytest.importorskip('peft', reason='peft is not installed')
transformers = pytest.importorskip('transformers')

import jax  # noqa: E402

from searchrl_jax.models import decoder, lora, pretrained  # noqa: E402
from tests.golden import make_models, models  # noqa: E402
from tests.models import test_parity as golden  # noqa: E402
from tests.parity.test_models import worst  # noqa: E402

pytestmark = pytest.mark.parity


def with_adapters(folder, targets=()):
  """targets: (): all."""
  cfg, params = pretrained.load(folder)
  targets = targets or tuple(decoder.projections(cfg))
  fields = decoder.Lora(4, 6.0, targets, 'float32')
  return dataclasses.replace(cfg, lora=fields), params


def random_adapters(cfg):
  fresh = lora.init(cfg, jax.random.key(0))
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda x: x + rng.normal(0, 0.1, x.shape).astype(np.float32), fresh
  )


def ours(cfg, params, rows):
  ids, lengths = golden.right_padded(rows, rubbish=3)
  out = np.asarray(golden.forward(params, cfg, ids))
  return [out[b, :n] for b, n in enumerate(lengths)]


@pytest.mark.parametrize('targets', [(), ('q', 'v')])
@pytest.mark.parametrize('name', models.CONFIGS)
def test_peft_loads_ours(tmp_path, name, targets):
  folder, rows = models.write(tmp_path, name), models.inputs(name)
  cfg, base = with_adapters(folder, targets)
  adapters = random_adapters(cfg)
  lora.save(tmp_path / 'adapter', cfg, adapters, model=str(folder))
  plain = make_models.reference(folder)
  without = make_models.unpadded(plain, rows)
  model = peft.PeftModel.from_pretrained(plain, tmp_path / 'adapter')
  want = make_models.unpadded(model.eval(), rows)
  got = ours(cfg, lora.join(adapters, base), rows)
  off = golden.tolerance(name)
  assert worst(got, want) <= off < 0.01 < worst(want, without)
  params = lora.merge(cfg, lora.join(adapters, base))
  pretrained.save(tmp_path / 'merged', lora.base(cfg), params)
  merged = make_models.reference(tmp_path / 'merged')
  assert worst(make_models.unpadded(merged, rows), want) <= off


def test_peft_loads_ours_into_gemma_3_with_images(tmp_path):
  """As AutoModelForCausalLM builds Gemma 3 from 4B on."""
  folder, rows = models.write(tmp_path, 'gemma3'), models.inputs('gemma3')
  cfg, base = with_adapters(folder)
  adapters = random_adapters(cfg)
  lora.save(tmp_path / 'adapter', cfg, adapters, wrapped=True)
  text = make_models.reference(folder)
  small = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1)
  small |= dict(num_attention_heads=2, image_size=28, patch_size=14)
  about = transformers.Gemma3Config(
    text_config=text.config.to_dict(), vision_config=small
  )
  whole = transformers.Gemma3ForConditionalGeneration(about)
  whole.model.language_model.load_state_dict(text.model.state_dict())
  whole.lm_head.load_state_dict(text.lm_head.state_dict())
  without = make_models.unpadded(whole.eval(), rows)
  with warnings.catch_warnings(action='error', category=UserWarning):
    model = peft.PeftModel.from_pretrained(whole, tmp_path / 'adapter')
  want = make_models.unpadded(model.eval(), rows)
  got = ours(cfg, lora.join(adapters, base), rows)
  assert worst(got, want) <= golden.tolerance('gemma3')
  assert worst(want, without) > 0.01


@pytest.mark.parametrize('name', models.CONFIGS)
def test_we_load_what_peft_saves(tmp_path, name):
  folder, rows = models.write(tmp_path, name), models.inputs(name)
  cfg, base = with_adapters(folder)
  attention = [f'{x}_proj' for x in 'qkvo']
  fields = peft.LoraConfig(
    r=4,
    lora_alpha=6.0,
    target_modules=attention if cfg.moe else 'all-linear',
    task_type='CAUSAL_LM',
    init_lora_weights=False,  # B is not 0
  )
  torch.manual_seed(0)
  model = peft.get_peft_model(make_models.reference(folder), fields).eval()
  model.save_pretrained(tmp_path / 'adapter')
  found = lora.load(tmp_path / 'adapter', cfg)
  want = make_models.unpadded(model, rows)
  got = ours(cfg, lora.join(found, base), rows)
  assert worst(got, want) <= golden.tolerance(name)
