"""config.json <-> flags, and the key maps; both refuse what is not there."""

import dataclasses

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax.models import (
  decoder,
  families,
  hf_config,
  hf_tensors,
  pretrained,
  products,
)
from tests.golden import models

LLAMA = models.CONFIGS['llama3.1']
QWEN2 = models.CONFIGS['qwen2']
QWEN3 = models.CONFIGS['qwen3']
GEMMA = models.CONFIGS['gemma3']
QWEN35 = models.CONFIGS['qwen3.5']
MOE = models.CONFIGS['qwen3.moe']


def shapes(fields):
  """Our stacked shapes, written out again."""
  L, D, F = fields['n_layers'], fields['d_model'], fields['d_ff']
  N, K, H = fields['n_heads'], fields['n_kv_heads'], fields['head_dim']
  out = {
    'embed': (fields['vocab_size'], D),
    'layers/attn_norm': (L, D),
    'layers/q': (L, D, N, H),
    'layers/k': (L, D, K, H),
    'layers/v': (L, D, K, H),
    'layers/o': (L, N, H, D),
    'layers/mlp_norm': (L, D),
    'layers/gate': (L, D, F),
    'layers/up': (L, D, F),
    'layers/down': (L, F, D),
    'final_norm': (D,),
  }
  if fields['family'] == 'qwen2':
    out |= {
      'layers/q_bias': (L, N, H),
      'layers/k_bias': (L, K, H),
      'layers/v_bias': (L, K, H),
    }
  if fields['family'] in ('qwen3', 'qwen3_moe', 'gemma3_text'):
    out |= {'layers/q_norm': (L, H), 'layers/k_norm': (L, H)}
  if fields['family'] == 'gemma3_text':
    out |= {f'layers/{n}_post_norm': (L, D) for n in ('attn', 'mlp')}
  if fields['family'] == 'qwen3_5_text':
    full = L // fields['global_every']
    out |= {
      'layers/q': (full, D, N, 2 * H),
      'layers/k': (full, D, K, H),
      'layers/v': (full, D, K, H),
      'layers/o': (full, N, H, D),
      'layers/q_norm': (full, H),
      'layers/k_norm': (full, H),
    }
    sizes = fields['delta']
    V, E = sizes['value_heads'], sizes['value_dim']
    M = 2 * sizes['key_heads'] * sizes['key_dim'] + V * E
    out |= {
      'layers/delta_qkv': (L - full, D, M),
      'layers/delta_z': (L - full, D, V, E),
      'layers/delta_b': (L - full, D, V),
      'layers/delta_a': (L - full, D, V),
      'layers/delta_conv': (L - full, M, 1, sizes['taps']),
      'layers/delta_a_log': (L - full, V),
      'layers/delta_dt_bias': (L - full, V),
      'layers/delta_norm': (L - full, E),
      'layers/delta_o': (L - full, V, E, D),
    }
    out = {k: v for k, v in out.items() if v[0]}
  if moe := fields['moe']:
    E, wide, dense = moe['count'], moe['d_ff'], len(moe['dense'])
    n = L - dense
    out |= {
      'layers/gate': (dense, D, F),
      'layers/up': (dense, D, F),
      'layers/down': (dense, F, D),
      'layers/router': (n, D, E),
      'layers/experts_gate': (n, E, D, wide),
      'layers/experts_up': (n, E, D, wide),
      'layers/experts_down': (n, E, wide, D),
    }
    out = {k: v for k, v in out.items() if v[0]}
  if not fields['tied']:
    out['head'] = (D, fields['vocab_size'])
  return out


def test_published_configs():
  """Figures of the model cards."""
  qwen = hf_config.parse_config(
    {
      'model_type': 'qwen2',
      'hidden_size': 2048,
      'intermediate_size': 11008,
      'num_hidden_layers': 36,
      'num_attention_heads': 16,
      'num_key_value_heads': 2,
      'vocab_size': 151936,
      'rms_norm_eps': 1e-06,
      'rope_theta': 1000000.0,
      'tie_word_embeddings': True,
      'sliding_window': 32768,
      'max_window_layers': 70,
      'use_sliding_window': False,
      'hidden_act': 'silu',
    }
  )  # Qwen2.5-3B
  assert qwen == {
    'vocab_size': 151936,
    'd_model': 2048,
    'n_layers': 36,
    'n_heads': 16,
    'n_kv_heads': 2,
    'head_dim': 128,
    'd_ff': 11008,
    'family': 'qwen2',
    'rope_theta': 1e6,
    'rope_scaling': None,
    'norm_eps': 1e-6,
    'tied': True,
    'query_scale': 1.0,
    'window': 0,
    'global_every': 1,
    'local_theta': 1e4,
    'rotary_dim': None,
    'delta': None,
    'moe': None,
  }
  assert tuple(qwen) == families.FIELDS
  llama = hf_config.parse_config(
    {
      'architectures': ['LlamaForCausalLM'],
      'model_type': 'llama',
      'hidden_size': 2048,
      'intermediate_size': 8192,
      'head_dim': 64,
      'num_hidden_layers': 16,
      'num_attention_heads': 32,
      'num_key_value_heads': 8,
      'vocab_size': 128256,
      'rms_norm_eps': 1e-05,
      'rope_theta': 500000.0,
      'tie_word_embeddings': True,
      'rope_scaling': {
        'factor': 32.0,
        'high_freq_factor': 4.0,
        'low_freq_factor': 1.0,
        'original_max_position_embeddings': 8192,
        'rope_type': 'llama3',
      },
    }
  )  # Llama-3.2-1B
  assert llama['rope_scaling'] == {
    'kind': 'llama3',
    'factor': 32.0,
    'low_freq_factor': 1.0,
    'high_freq_factor': 4.0,
    'original_max_position': 8192,
  }
  assert llama['family'] == 'llama'


def test_gemma_by_its_card():
  """gemma-3-4b as published: text and images, defaults left out.

  Each sixth of 34 layers is global.
  """
  text = {
    'model_type': 'gemma3_text',
    'hidden_size': 2560,
    'intermediate_size': 10240,
    'num_hidden_layers': 34,
    'rope_scaling': {'factor': 8.0, 'rope_type': 'linear'},
    'sliding_window': 1024,
  }
  config = {'model_type': 'gemma3', 'text_config': text, 'eos_token_id': [1]}
  got = hf_config.parse_config(config)
  assert got == hf_config.parse_config(families.NAMED['gemma-3-4b'])
  assert (got['window'], got['global_every']) == (1024, 6)
  assert got['head_dim'] == 256 and got['tied'] and got['query_scale'] == 1.0
  assert got['rope_theta'] == 1e6 and got['local_theta'] == 1e4
  written = hf_config.format_config(got, like=config)
  assert written['architectures'] == ['Gemma3ForCausalLM']
  assert written['eos_token_id'] == [1] and 'text_config' not in written
  assert hf_config.parse_config(written) == got


def test_qwen35_by_its_card():
  """Qwen3.5-2B as published: text and images, each fourth of 24 layers full.

  Its GGUF file counts 1,942,653,248 parameters with the layer that predicts the
  next token but one: an attention layer, a matrix [D, 2 D] and three norms.
  """
  text = {k: v for k, v in QWEN35.items() if k not in families.SIZES.values()}
  text = {k: v for k, v in text.items() if not k.startswith('linear_')}
  text |= {
    'hidden_size': 2048, 'intermediate_size': 6144, 'num_hidden_layers': 24,
    'num_attention_heads': 8, 'num_key_value_heads': 2, 'layer_types': None,
    'linear_num_value_heads': 16, 'rms_norm_eps': 1e-6,
    'mtp_num_hidden_layers': 1,
    'mtp_use_dedicated_embeddings': False,
    'rope_parameters': QWEN35['rope_parameters'] | {'rope_theta': 10000000},
  }  # fmt: skip
  config = {
    'model_type': 'qwen3_5', 'text_config': text, 'language_model_only': False,
    'architectures': ['Qwen3_5ForConditionalGeneration'],
    'image_token_id': 248056, 'tie_word_embeddings': True,
    'vision_config': {'model_type': 'qwen3_5', 'depth': 24},
  }  # fmt: skip
  got = hf_config.parse_config(config)
  assert got == hf_config.parse_config(families.NAMED['qwen3.5-2b'])
  assert got['rotary_dim'] == 64 and got['head_dim'] == 256
  D, F, V = 2048, 6144, 248320
  mlp = 3 * D * F + 2 * D
  attention = mlp + D * (4096 + 2 * 512 + 2048) + 2 * 256
  delta = mlp + D * (6144 + 2 * 2048 + 2 * 16) + 6144 * 4 + 2 * 16 + 128
  whole = V * D + D + 6 * attention + 18 * delta
  assert pretrained.decoder_config(config).n_params == whole
  assert whole + attention + 2 * D * D + 3 * D == 1_942_653_248
  written = hf_config.format_config(got, like=config)
  assert written['architectures'] == ['Qwen3_5ForCausalLM']
  assert written['mamba_ssm_dtype'] == 'float32'
  assert not any(k.startswith('mtp') for k in written)
  assert hf_config.parse_config(written) == got


def test_qwen3_moe_by_its_card():
  """Qwen3-30B-A3B as published, and by either name of the experts' number."""
  config = {
    'architectures': ['Qwen3MoeForCausalLM'], 'attention_bias': False,
    'attention_dropout': 0.0, 'bos_token_id': 151643, 'eos_token_id': 151645,
    'decoder_sparse_step': 1, 'head_dim': 128, 'hidden_act': 'silu',
    'hidden_size': 2048, 'initializer_range': 0.02, 'intermediate_size': 6144,
    'max_position_embeddings': 40960, 'max_window_layers': 48,
    'mlp_only_layers': [], 'model_type': 'qwen3_moe',
    'moe_intermediate_size': 768, 'norm_topk_prob': True,
    'num_attention_heads': 32, 'num_experts': 128, 'num_experts_per_tok': 8,
    'num_hidden_layers': 48, 'num_key_value_heads': 4,
    'output_router_logits': False, 'rms_norm_eps': 1e-06, 'rope_scaling': None,
    'rope_theta': 1000000.0, 'router_aux_loss_coef': 0.001,
    'sliding_window': None, 'tie_word_embeddings': False,
    'torch_dtype': 'bfloat16', 'transformers_version': '4.51.0',
    'use_cache': True, 'use_sliding_window': False, 'vocab_size': 151936,
  }  # fmt: skip
  got = hf_config.parse_config(config)
  assert got == hf_config.parse_config(families.NAMED['qwen3-30b-a3b'])
  D, F, E = 2048, 768, 128
  attention = D * (4096 + 2 * 512) + 4096 * D + 2 * 128
  layer = attention + 2 * D + D * E + 3 * E * D * F
  whole = 48 * layer + 2 * 151936 * D + D
  assert pretrained.decoder_config(config).n_params == whole == 30_532_122_624
  del config['num_experts']
  assert hf_config.parse_config(config | {'num_local_experts': 128}) == got
  written = hf_config.format_config(got)
  assert written['num_experts'] == written['num_local_experts'] == 128


PUBLISHED = {
  'Llama-2-7b': dict(
    LLAMA, _name_or_path='x', bos_token_id=1, initializer_range=0.02,
    max_sequence_length=2048, pad_token_id=0, pretraining_tp=1,
    transformers_version='4.31.0', use_cache=True,
  ),
  'SmolLM2': {
    **LLAMA, 'is_llama_config': True, 'rope_interleaved': False,
    'transformers.js_config': {'dtype': 'q4'}, 'attention_dropout': 0.0,
  },
  'Qwen2.5-Math': dict(
    QWEN2, attention_dropout=0.0, eos_token_id=5, use_mrope=False,
    unsloth_fixed=True,
  ),
  'tuned': dict(
    QWEN2, architectures='Qwen2ForCausalLM', compression_config={},
    keys_to_ignore_at_inference=['past_key_values'], mlp_only_layers=[],
    model_max_length=32768, mtp_num_layers=0, neftune_noise_alpha=5.0,
    output_router_logits=False, router_aux_loss_coef=0.001, seq_length=8192,
    tokenizer_model_max_length=4096, tokenizer_padding_side='right',
    use_flash_attn=True, use_return_dict=True,
  ),
  'Qwen3': dict(
    QWEN3, max_window_layers=3, rope_scaling=None, sliding_window=None,
    use_sliding_window=False, layer_types=['full_attention'] * 3,
    architectures=['FSDPQwen3ForCausalLM'], dtype='bfloat16',
    id2label={'0': 'LABEL_0'}, _attn_implementation_autoset=True,
  ),
  'gemma-3-270m': dict(
    GEMMA, _sliding_window_pattern=3, attn_logit_softcapping=None,
    final_logit_softcapping=None, use_bidirectional_attention=False,
    cache_implementation='hybrid', attention_dropout=0.0, use_cache=True,
  ),
  'gemma-3-4b': dict(
    architectures=['Gemma3ForConditionalGeneration'], model_type='gemma3',
    boi_token_index=1, eoi_token_index=2, image_token_index=3,
    eos_token_id=[1, 106], initializer_range=0.02, mm_tokens_per_image=256,
    torch_dtype='bfloat16', vision_config={'model_type': 'siglip', 'x': 1},
    text_config=dict(GEMMA, cache_implementation='hybrid'),
  ),
}  # fmt: skip


@pytest.mark.parametrize('name', PUBLISHED)
def test_fields_of_published_models_are_known(name):
  config = PUBLISHED[name]
  bare = {'gemma3': GEMMA, 'qwen2': QWEN2, 'qwen3': QWEN3, 'llama': LLAMA}
  want = bare.get(config['model_type'], GEMMA)
  assert hf_config.parse_config(config) == hf_config.parse_config(want)


@pytest.mark.parametrize(
  'name',
  'Llama Qwen2 Qwen3 Qwen3Moe Gemma3Text Gemma3 Qwen3_5Text Qwen3_5'.split(),
)
def test_all_that_transformers_writes_is_known(name):
  import transformers

  made = getattr(transformers, f'{name}Config')()
  for fields in made.to_dict(), made.to_diff_dict():
    got = hf_config.parse_config(fields)
    assert got['n_layers'] == made.get_text_config().num_hidden_layers


@pytest.mark.parametrize(
  'field, value',
  [
    ('auto_map', {'AutoModelForCausalLM': 'modeling.Own'}),
    ('architectures', ['LlamaBidirectionalModel']),
    ('architectures', 'LlamaBidirectionalModel'),
    ('architectures', ['LlamaForCausalLM', 'LlamaForSequenceClassification']),
    ('use_bidirectional_attention', True),
    ('attention_multiplier', 0.1),
    ('residual_multiplier', 0.2),
    ('embedding_multiplier', 12),
    ('logit_scale', 0.5),
    ('rope_interleaved', True),
    ('rotary_dim', 4),
    ('query_pre_attn_scalar', 64),
    ('no_rope_layers', [1, 0]),
    ('attention_chunk_size', 8),
    ('per_layer_config', {'1': {'hidden_act': 'gelu'}}),
    ('dual_chunk_attention_config', {'chunk_size': 8}),
    ('some_flag_of_a_fork', False),
  ],
)
@pytest.mark.parametrize('inner', [False, True])
def test_a_field_that_is_not_known_is_refused(field, value, inner):
  config = LLAMA | {field: value}
  if inner:  # of a model of text and images: outside of its text
    config = dict(PUBLISHED['gemma-3-4b'], **{field: value})
  with pytest.raises(ValueError, match=f'config.json: {field}='):
    hf_config.parse_config(config)
  assert hf_config.parse_config(LLAMA | {field: None})
  if not inner and field not in hf_config._NEUTRAL:
    # A server adds fields of its own to what it says.
    assert hf_config.parse_config(config, strict=False)


def test_defaults_are_those_of_transformers():
  bare = {
    'model_type': 'llama',
    'hidden_size': 32,
    'intermediate_size': 48,
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
    'vocab_size': 8,
  }
  got = hf_config.parse_config(bare)
  assert got['n_kv_heads'] == 4 and got['head_dim'] == 8
  assert got['rope_theta'] == 1e4 and not got['tied']
  assert got['norm_eps'] == 1e-6
  # Qwen3's head_dim is 128 unless said otherwise, whatever the width.
  assert (
    hf_config.parse_config(bare | {'model_type': 'qwen3'})['head_dim'] == 128
  )


@pytest.mark.parametrize('name', models.CONFIGS)
def test_the_inverse(name):
  config = models.CONFIGS[name]
  fields = hf_config.parse_config(config)
  out = hf_config.format_config(
    fields, dtype='bfloat16', like=config | {'eos_token_id': [5, 6]}
  )
  assert hf_config.parse_config(out) == fields
  assert out['torch_dtype'] == 'bfloat16'
  assert out['eos_token_id'] == [5, 6]
  assert out['max_position_embeddings'] == 256
  assert out['architectures'] == config['architectures']
  # Readers of either generation find theta, scaling and windows.
  old = 'rope_theta', 'rope_scaling', 'rope_local_base_freq'
  for drop in (('rope_parameters', 'layer_types'), old):
    part = {k: v for k, v in out.items() if k not in drop}
    assert hf_config.parse_config(part) == fields


@pytest.mark.parametrize(
  'config, change, named',
  [
    (LLAMA, {'model_type': 'mixtral'}, "model_type='mixtral'.*llama, qwen2"),
    (LLAMA, {'model_type': None}, 'model_type=None'),
    (LLAMA, {'attention_bias': True}, 'attention_bias=True'),
    (QWEN3, {'attention_bias': True}, 'attention_bias=True'),
    (LLAMA, {'mlp_bias': True}, 'mlp_bias=True'),
    (LLAMA, {'hidden_act': 'gelu'}, "hidden_act='gelu'"),
    (LLAMA, {'num_local_experts': 8}, 'num_local_experts=8'),
    (MOE, {'num_local_experts': 4}, 'num_local_experts=4.*num_experts=8'),
    (MOE, {'num_experts_per_tok': 9}, 'num_experts_per_tok=9.*8 experts'),
    (MOE, {'num_experts': 0}, 'num_experts=0'),
    (MOE, {'norm_topk_prob': 'yes'}, "norm_topk_prob='yes'"),
    (MOE, {'mlp_only_layers': [[1]]}, r'mlp_only_layers=\[\[1\]\]'),
    (MOE, {'decoder_sparse_step': 4}, 'no layer with experts'),
    (
      MOE,
      {'sliding_window': 8, 'use_sliding_window': True},
      'sliding_window=8',
    ),
    (MOE, {'shared_expert_intermediate_size': 8}, 'shared_expert_inter'),
    (LLAMA, {'mtp_num_layers': 1}, 'mtp_num_layers=1'),
    (LLAMA, {'quantization_config': {'bits': 4}}, 'quantization_config'),
    (LLAMA, {'partial_rotary_factor': 0.5}, 'partial_rotary_factor=0.5'),
    (LLAMA, {'sliding_window': 64}, 'sliding_window=64'),
    (QWEN2, {'use_sliding_window': True}, 'sliding_window=8'),
    (
      QWEN2,
      {'layer_types': ['full_attention', 'sliding_attention']},
      'layer_types',
    ),
    (QWEN2, {'layer_types': ['full_attention'] * 2}, 'layer_types of 2.* of 3'),
    (QWEN2, {'layer_types': 5}, 'layer_types=5'),
    (LLAMA, {'rms_norm_eps': None}, 'rms_norm_eps=None'),
    (LLAMA, {'rope_theta': '1e4'}, "rope_theta='1e4'"),
    (LLAMA, {'rope_scaling': 'linear'}, "rope_scaling='linear'"),
    (LLAMA, {'tie_word_embeddings': 'no'}, "tie_word_embeddings='no'"),
    (GEMMA, {'query_pre_attn_scalar': None}, 'query_pre_attn_scalar=None'),
    (GEMMA, {'sliding_window_pattern': 0}, 'sliding_window_pattern=0'),
    (
      PUBLISHED['gemma-3-4b'],
      {'tie_word_embeddings': False},
      'tie_word_embeddings=False.*text_config',
    ),
    # Readers differ in which of the two they take, or in what stands for it.
    (
      LLAMA,
      {'original_max_position_embeddings': 4096},
      'original_max_position_embeddings=4096.*24',
    ),
    (
      LLAMA,
      {
        'original_max_position_embeddings': 24,
        'rope_scaling': {
          'rope_type': 'llama3',
          'factor': 8.0,
          'low_freq_factor': 1.0,
          'high_freq_factor': 4.0,
        },
      },
      'rope_scaling.original_max_position_embeddings=None',
    ),
    (LLAMA, {'hidden_size': None}, 'hidden_size=None'),
    (LLAMA, {'num_hidden_layers': '3'}, "num_hidden_layers='3'"),
    (LLAMA, {'num_key_value_heads': 0}, 'num_key_value_heads=0'),
    (
      LLAMA,
      {'rope_scaling': {'type': 'dynamic', 'factor': 2.0}},
      "rope_scaling.rope_type='dynamic'",
    ),
    (GEMMA, {'sliding_window': None}, 'sliding_window=None'),
    (GEMMA, {'hidden_activation': 'gelu'}, "hidden_activation='gelu'"),
    (GEMMA, {'use_bidirectional_attention': True}, 'bidirectional'),
    (GEMMA, {'attn_logit_softcapping': 50.0}, 'attn_logit_softcapping=50'),
    (
      GEMMA,
      {'layer_types': [*3 * ['full_attention', 'sliding_attention'], 'x']},
      r'layer_types\[1\]=.sliding_attention.*distances',
    ),
    (LLAMA, {'rope_scaling': {'rope_type': 'yarn', 'factor': 2.0}}, "'yarn'"),
    (LLAMA, {'attn_output_gate': True}, 'attn_output_gate=True'),
    (QWEN35, {'attn_output_gate': False}, 'attn_output_gate=False'),
    (QWEN35, {'output_gate_type': 'sigmoid'}, "output_gate_type='sigmoid'"),
    (QWEN35, {'mamba_ssm_dtype': 'bfloat16'}, "mamba_ssm_dtype='bfloat16'"),
    (QWEN35, {'linear_num_value_heads': 3}, 'linear_num_value_heads=3.*=2'),
    (QWEN35, {'linear_conv_kernel_dim': 0}, 'linear_conv_kernel_dim=0'),
    (QWEN35, {'partial_rotary_factor': 0.5}, r'partial_rotary_factor=.0.25, 0'),
    (QWEN35, {'sliding_window': 8}, 'sliding_window=8'),
    (
      QWEN35,
      {'layer_types': ['linear_attention'] * 2 + ['mamba'] * 3},
      r"layer_types\[2\]='mamba'.*'linear_attention'",
    ),
    (QWEN35, {'layer_types': 5}, 'layer_types=5'),
    (
      QWEN35,
      {'full_attention_interval': 6, 'layer_types': None},
      'no full_attention in 5 layers',
    ),
    (QWEN35, {'layer_types': ['linear_attention'] * 5}, 'no full_attention'),
    (QWEN35, {'mlp_only_layers': [1]}, 'mlp_only_layers'),
    (QWEN35, {'num_experts': 4}, 'num_experts=4'),
    (QWEN35, {'rope_parameters': {'rope_type': 'yarn'}}, "'yarn'"),
    (
      LLAMA,
      {'rope_scaling': {'rope_type': 'llama3', 'factor': 8.0}},
      'low_freq_factor=None',
    ),
    (
      QWEN2,
      {'rope_scaling': {'type': 'default', 'mrope_section': [1, 2]}},
      'rope_scaling.mrope_section',
    ),
    (
      QWEN2,
      {'rope_parameters': {'full_attention': {'rope_theta': 1.0}}},
      'rope_parameters.full_attention',
    ),
    (
      QWEN2,
      {'rope_parameters': {'rope_type': 'default', 'rope_theta': 5.0}},
      'rope_theta.*contradict',
    ),
    (
      LLAMA,
      {'rope_parameters': {'rope_type': 'default'}},
      'rope_scaling.*contradict',
    ),
  ],
)
def test_what_is_not_supported_is_named(config, change, named):
  with pytest.raises(ValueError, match=named):
    hf_config.parse_config(config | change)


@pytest.mark.parametrize(
  'config, change',
  [
    (QWEN2, {'use_sliding_window': True, 'max_window_layers': 3}),
    (QWEN2, {'layer_types': ['full_attention'] * 3}),
    (LLAMA, {'sliding_window': None, 'attention_dropout': 0.1}),
    (LLAMA, {'pretraining_tp': 2, 'head_dim': None}),
    (QWEN2, {'original_max_position_embeddings': 64}),
    (GEMMA, {'rope_theta': None}),
  ],
)
def test_what_does_not_matter_is_left_alone(config, change):
  assert hf_config.parse_config(config | change) == hf_config.parse_config(
    config
  )


def test_how_far_a_model_was_trained():
  assert hf_config.context(LLAMA) == hf_config.context(PUBLISHED['gemma-3-4b'])
  assert hf_config.context(LLAMA) == 256 and hf_config.context({}) is None


@pytest.mark.parametrize(
  'name, own',
  [
    ('_orig_mod.model.layers.1.mlp.up_proj.weight', None),
    ('module._orig_mod.model.layers.1.mlp.up_proj.weight', None),
    ('model.layers.1._checkpoint_wrapped_module.mlp.up_proj.weight', None),
    ('layers.1.mlp.up_proj.weight', None),
    ('language_model.layers.1.mlp.up_proj.weight', None),
    ('embed_tokens.weight', 'model.embed_tokens.weight'),
    ('norm.weight', 'model.norm.weight'),
    ('module.lm_head.weight', 'lm_head.weight'),
    ('_orig_mod.vision_tower.x', ''),
    ('model.visual.blocks.0.norm1.weight', ''),
    ('mtp.layers.0.mlp.up_proj.weight', ''),
    ('policy.model.norm.weight', 'policy.model.norm.weight'),
  ],
)
def test_what_wrappers_add_to_names_is_taken_off(name, own):
  want = 'model.layers.1.mlp.up_proj.weight' if own is None else own
  assert hf_tensors.text_name(name) == want


@pytest.mark.parametrize('name', models.CONFIGS)
def test_names_and_shapes_are_those_of_the_checkpoint(name):
  fields = hf_config.parse_config(models.CONFIGS[name])
  table = hf_tensors.table(shapes(fields), fields)
  assert {n: t.shape for n, t in table.items()} == models.shapes(
    models.CONFIGS[name]
  )
  for path in {t.path for t in table.values()}:
    layers = [t.layer for t in table.values() if t.path == path]
    n, *more = shapes(fields)[path]
    each = [*range(n)]
    if path.startswith('layers/experts_'):
      each = [(i, j) for i in each for j in range(more[0])]
    assert layers == (each if path.startswith('layers/') else [None])


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(
  st.sampled_from(sorted(models.CONFIGS)),
  st.integers(1, 3),
  st.integers(1, 3),
  st.integers(1, 4),
  st.data(),
)
def test_the_map_is_a_bijection(name, K, G, half, data):
  """There and back is the identity, whole and by blocks of rows."""
  fields = hf_config.parse_config(models.CONFIGS[name]) | {
    'n_layers': 1,
    'n_heads': K * G,
    'n_kv_heads': K,
    'head_dim': 2 * half,
    'd_model': data.draw(st.integers(1, 5)),
  }
  if fields['moe']:
    fields['moe'] |= {'dense': ()}
  for tensor in hf_tensors.table(shapes(fields), fields).values():
    x = np.arange(np.prod(tensor.shape)).reshape(tensor.shape)
    ours = tensor.to_ours(x)
    assert ours.shape == tensor.ours
    assert np.array_equal(tensor.to_hf(ours), x)
    n = tensor.ours[tensor.n_in]
    cut = data.draw(st.integers(0, n - 1)) if n > 1 else 0
    blocks = [
      tensor.to_hf(b) for b in np.split(ours, [cut], tensor.n_in) if b.size
    ]
    assert np.array_equal(np.concatenate(blocks), x)


def test_a_projection_by_hand():
  """q_proj [N H, D] -> [D, N, H]: row n H + h, column d."""
  fields = hf_config.parse_config(QWEN3)
  table = hf_tensors.table(shapes(fields), fields)
  D, N, H = 32, 4, 16
  tensor = table['model.layers.1.self_attn.q_proj.weight']
  x = np.arange(N * H * D).reshape(N * H, D)
  assert tensor.to_ours(x)[5, 3, 2] == x[3 * H + 2, 5]
  tensor = table['model.layers.2.self_attn.o_proj.weight']
  x = x.T
  assert tensor.to_ours(x)[3, 2, 5] == x[5, 3 * H + 2]


@pytest.mark.parametrize(
  'of', [products.dense, products.scaled, products.shifted]
)
def test_gradients_of_weights_are_sums_in_float32(of):
  """In half precision too: 257 is no bfloat16 (256 and 258 are)."""
  x = jnp.ones((1, 257, 1), jnp.bfloat16)
  w = jnp.ones((1, 1) if of is products.dense else (1,), jnp.float32)
  whole = lambda w: of(x, w).astype(jnp.float32).sum()
  grad = jax.grad(whole)(w)
  assert grad.dtype == jnp.float32 and float(grad.sum()) == 257.0
  # A CPU sums up in float32 whatever it is asked for.
  program = jax.make_jaxpr(jax.grad(whole))(w)
  sums = [e for e in program.eqns if e.primitive.name == 'reduce_sum']
  assert {str(e.invars[0].aval.dtype) for e in sums} <= {'float32'}


def test_a_rounded_weight_has_the_gradient_of_the_weight():
  w = jnp.float32([-4.01, 0.2609])
  value, grad = jax.value_and_grad(
    lambda w: products.rounded(w, jnp.bfloat16) @ jnp.float32([1, 10])
  )(w)
  assert float(value) == -4.0 + 2.6171875  # 10 x .26171875
  assert grad.tolist() == [1, 10]


@pytest.mark.parametrize('name', models.CONFIGS)
def test_the_trainer_computes_with_what_an_engine_holds(name, tmp_path):
  """In bfloat16: masters in float32 give what their rounded values give."""
  cfg, params = pretrained.load(models.write(tmp_path / 'model', name))
  cfg = dataclasses.replace(cfg, dtype='bfloat16')
  held = {
    path: x.astype(families.dtype_of(path, 'bfloat16'))
    for path, x in decoder.flatten(params).items()
  }
  ids = np.stack([row[:8] for row in models.inputs(name)])
  forward = jax.jit(lambda p: decoder.hidden_states(p, cfg, ids))
  np.testing.assert_array_equal(forward(params), forward(decoder.nest(held)))
