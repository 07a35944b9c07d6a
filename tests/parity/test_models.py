"""The decoder against transformers, live: make test-parity."""

import copy
import dataclasses
import json

import numpy as np
import pytest

torch = pytest.importorskip('torch', reason='torch is not installed')
transformers = pytest.importorskip('transformers')

import jax  # noqa: E402

from searchrl_jax.models import pretrained  # noqa: E402
from tests.golden import make_models, models  # noqa: E402
from tests.models import test_parity as golden  # noqa: E402

pytestmark = pytest.mark.parity
TOLERANCE = 1e-4


def ours(folder, rows):
  cfg, params = pretrained.load(folder)
  ids, lengths = golden.right_padded(rows, rubbish=3)
  out = np.asarray(golden.forward(params, cfg, ids))
  return [out[b, :n] for b, n in enumerate(lengths)]


def worst(a, b) -> float:
  return max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize('name', models.CONFIGS)
def test_logits_padded_and_not(tmp_path, name):
  """Ours, padded on the right, against theirs alone and padded either way."""
  folder = models.write(tmp_path, name)
  rows = models.inputs(name)
  model = make_models.reference(folder)
  got = ours(folder, rows)
  tolerance = golden.tolerance(name)
  assert worst(got, make_models.unpadded(model, rows)) <= tolerance
  for side in ('left', 'right'):
    assert worst(got, make_models.padded(model, rows, side)) <= tolerance


@pytest.mark.parametrize('name', models.CONFIGS)
def test_golden_values_are_current(tmp_path, name):
  model = make_models.exact(models.write(tmp_path, name))
  rows = models.inputs(name)
  want = np.split(golden.golden()[name], [len(rows[0])])
  assert worst(make_models.unpadded(model, rows), want) <= 1e-5


@pytest.mark.parametrize(
  'name, dtype, stacked',
  [
    *((name, 'float32', False) for name in models.CONFIGS),
    ('llama3.1', 'bfloat16', False),
    ('qwen2.5', 'bfloat16', False),
    ('qwen3', 'bfloat16', False),
    ('gemma3', 'bfloat16', False),
    ('qwen3.5', 'bfloat16', False),
    ('qwen3.moe', 'bfloat16', False),
    ('qwen3.moe', 'float32', True),
  ],
)
def test_what_we_export_transformers_loads(tmp_path, name, dtype, stacked):
  source = models.write(tmp_path / 'source', name)
  cfg, params = pretrained.load(source)
  out = tmp_path / 'out'
  pretrained.save(
    out,
    cfg,
    params,
    max_shard_bytes=40_000,
    dtype=dtype,
    like=pretrained.read_json(source),
    stacked=stacked,
  )
  assert (out / 'model.safetensors.index.json').exists()
  model, info = transformers.AutoModelForCausalLM.from_pretrained(
    out,
    dtype=torch.float32,
    attn_implementation='eager',
    experts_implementation='eager',
    output_loading_info=True,
  )
  for kind in ('missing_keys', 'unexpected_keys', 'mismatched_keys'):
    assert not info[kind]
  rows = models.inputs(name)
  got = make_models.unpadded(model.eval(), rows)
  if dtype == 'float32':
    want = make_models.unpadded(make_models.reference(source), rows)
    assert worst(got, want) == 0.0
  else:
    assert worst(got, ours(out, rows)) <= golden.tolerance(name)
  assert model.config.max_position_embeddings == 256
  stored = transformers.AutoConfig.from_pretrained(out)
  assert str(stored.dtype).endswith(dtype)


def test_fresh_parameters_make_a_loadable_model(tmp_path):
  cfg = pretrained.decoder_config(models.CONFIGS['qwen3'])
  params = golden.decoder.init_params(cfg, jax.random.key(0), scale=0.3)
  pretrained.save(tmp_path / 'm', cfg, params)
  rows = models.inputs('qwen3')
  model = make_models.reference(tmp_path / 'm')
  assert (
    worst(make_models.unpadded(model, rows), ours(tmp_path / 'm', rows))
    <= TOLERANCE
  )


def test_what_transformers_saves_we_load(tmp_path):
  """Its own writer: rope_parameters, layer_types, shards of its making."""
  saved = 'llama3.1 qwen2.5 qwen3 gemma3 gemma3.linear qwen3.5 qwen3.5.untied '
  saved += 'qwen3.moe qwen3.moe.plain qwen3.moe.all'
  for name in saved.split():
    model = make_models.reference(models.write(tmp_path / name, name))
    model.save_pretrained(tmp_path / f'{name}.saved', max_shard_size='40KB')
    rows = models.inputs(name)
    assert worst(
      make_models.unpadded(model, rows), ours(tmp_path / f'{name}.saved', rows)
    ) <= golden.tolerance(name)


def compare(folder, config, kind, seed, rng, T, off=lambda name: 1e-4):
  """Logits, and the gradient of every tensor, of a model with random weights.

  kind: the names of config and model in transformers. off: tensor -> the error
  that its gradient may have, of its largest number; of an expert, which may
  have no token, of the largest of all.
  """
  names = 'architectures', 'model_type', 'torch_dtype'
  fields = {k: v for k, v in config.items() if k not in names}
  own, whole = (getattr(transformers, name) for name in kind)
  torch.manual_seed(seed)
  model = whole(own(**fields, attn_implementation='eager'))
  with torch.no_grad():
    for x in model.parameters():
      x += 0.2 * torch.randn_like(x)
  model.save_pretrained(folder)
  cfg, params = pretrained.load(folder)
  ids = rng.integers(0, 48, (2, T))
  weights = rng.normal(size=(*ids.shape, 48)).astype(np.float32)
  want = model(torch.tensor(ids)).logits
  (want * torch.tensor(weights)).sum().backward()
  want = want.detach().numpy()
  got = np.asarray(golden.forward(params, cfg, ids))
  assert np.abs(got - want).max() <= 2e-5 * np.abs(want).max()
  # In bfloat16 about as far from float32 as transformers is. Routes of experts
  # in a near tie differ, and then all that follows.
  half = dataclasses.replace(cfg, dtype='bfloat16')
  _, rounded = pretrained.load(folder, dtype='bfloat16', cfg=half)
  ours = golden.forward(rounded, half, ids)
  with torch.no_grad():
    theirs = copy.deepcopy(model).bfloat16()(torch.tensor(ids)).logits.float()
  far = [np.median(np.abs(np.asarray(x) - want)) for x in (ours, theirs)]
  assert far[0] <= (2 if cfg.moe else 1.1) * far[1]

  def weighed(p):
    return (golden.forward(p, cfg, ids) * weights).sum()

  grads = golden.decoder.flatten(jax.grad(weighed)(params))
  theirs = {}
  for name, x in model.named_parameters():
    theirs |= as_stored(name, x.grad.numpy())
  table = pretrained.tensor_table(cfg)
  assert theirs.keys() == table.keys()
  for name, tensor in table.items():
    every = np.asarray(grads[tensor.path])
    own = tensor.to_hf(every if tensor.layer is None else every[tensor.layer])
    expert = isinstance(tensor.layer, tuple)
    error = np.abs(own - theirs[name]).max()
    error /= np.abs(every if expert else theirs[name]).max()
    assert error <= off(name), (name, error)


def as_stored(name, x):
  """A tensor of the model as tensors of a checkpoint, which has each expert."""
  layer, _, kinds = name.partition('.experts.')
  if not kinds:
    return {name: x}
  kinds = kinds.removesuffix('_proj').split('_')
  return {
    f'{layer}.experts.{j}.{kind}_proj.weight': part[j]
    for kind, part in zip(kinds, np.split(x, len(kinds), 1))
    for j in range(len(x))
  }


@pytest.mark.parametrize('seed', range(4))
def test_qwen35_of_random_sizes(tmp_path, seed):
  """Logits and the gradient of every tensor, over chunk borders."""
  rng = np.random.default_rng(seed)
  pick = lambda *values: int(rng.choice(values))
  keys, kv = pick(1, 2, 3), pick(1, 2)
  config = models.QWEN35 | {
    # At least one layer has attention: transformers needs it for positions.
    'num_hidden_layers': pick(3, 4, 5, 6),
    'full_attention_interval': pick(2, 3),
    'num_key_value_heads': kv,
    'num_attention_heads': kv * pick(1, 3),
    'head_dim': pick(8, 16, 24),
    'partial_rotary_factor': float(rng.choice([0.25, 0.5, 1.0])),
    'linear_num_key_heads': keys,
    'linear_num_value_heads': keys * pick(1, 2),
    'linear_key_head_dim': pick(4, 8),
    'linear_value_head_dim': pick(4, 8),
    'linear_conv_kernel_dim': pick(2, 4),
    'tie_word_embeddings': bool(pick(0, 1)),
    'rope_theta': 100.0,
  }
  # Over all tokens, these few numbers are sums that cancel: transformers' own
  # move by 7e-4 if the last bits of the embedding change.
  few = lambda name: 1e-3 if name.endswith(('A_log', 'dt_bias')) else 1e-4
  kind = 'Qwen3_5TextConfig', 'Qwen3_5ForCausalLM'
  compare(tmp_path, config, kind, seed, rng, pick(5, 64, 100, 150), few)


@pytest.mark.parametrize('seed', range(3))
def test_gemma_of_random_sizes(tmp_path, seed):
  """Logits and the gradient of every tensor, with windows within the row."""
  rng = np.random.default_rng(seed)
  pick = lambda *values: int(rng.choice(values))
  kv = pick(1, 2)
  config = models.GEMMA3 | {
    'num_hidden_layers': pick(3, 4, 5),
    'sliding_window_pattern': pick(2, 3),
    'sliding_window': (window := pick(4, 12, 32)),
    'num_key_value_heads': kv,
    'num_attention_heads': kv * pick(1, 3),
    'head_dim': pick(8, 12, 24),
    'query_pre_attn_scalar': pick(8, 16),
    'tie_word_embeddings': bool(pick(0, 1)),
    'pad_token_id': None,  # torch gives its embedding no gradient
  }
  kind = 'Gemma3TextConfig', 'Gemma3ForCausalLM'
  compare(tmp_path, config, kind, seed, rng, window + pick(1, 29))


@pytest.mark.parametrize('seed', range(4))
def test_experts_of_random_sizes(tmp_path, seed):
  """Logits and the gradient of every tensor, all experts of a layer at once."""
  rng = np.random.default_rng(seed)
  pick = lambda *values: int(rng.choice(values))
  config = models.MOE | {
    'num_hidden_layers': pick(2, 3, 4),
    'num_experts': pick(4, 8, 12),
    'num_experts_per_tok': pick(2, 4),  # the weight of one is 1
    'moe_intermediate_size': pick(8, 16, 24),
    'norm_topk_prob': bool(seed % 2),
    'decoder_sparse_step': pick(1, 2),
    'tie_word_embeddings': bool(pick(0, 1)),
    'rope_theta': 100.0,
  }
  kind = 'Qwen3MoeConfig', 'Qwen3MoeForCausalLM'
  compare(tmp_path, config, kind, seed, rng, pick(5, 33, 64))


def test_greedy_continuation_of_a_trained_checkpoint(data_dir):
  want = json.loads((golden.GOLDEN / 'stories260K.json').read_text())
  model = make_models.reference(data_dir / 'stories260K')
  ids, _ = make_models.greedy(model, want['prompt'], 200)
  assert ids == want['continuation']
