"""Tiny models of every family, with weights that only numpy and a seed make.

Nothing here uses searchrl_jax: configs, tensor names and shapes are written
out by hand, and the file by the safetensors library, so that a mistake in our
key maps cannot hide on both sides.
"""

import json
import pathlib

import numpy as np
import safetensors.numpy

BASE = {
  'hidden_size': 32,
  'intermediate_size': 48,
  'num_hidden_layers': 3,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'vocab_size': 48,
  'max_position_embeddings': 256,
  'hidden_act': 'silu',
  'rms_norm_eps': 1e-6,
  'torch_dtype': 'float32',
}
LLAMA = BASE | {
  'architectures': ['LlamaForCausalLM'],
  'model_type': 'llama',
  'rms_norm_eps': 1e-5,
  'attention_bias': False,
  'mlp_bias': False,
}
QWEN2 = BASE | {
  'architectures': ['Qwen2ForCausalLM'],
  'model_type': 'qwen2',
  'use_sliding_window': False,
  'sliding_window': 8,
  'max_window_layers': 1,
}
QWEN3 = BASE | {
  'architectures': ['Qwen3ForCausalLM'],
  'model_type': 'qwen3',
  'attention_bias': False,
  'head_dim': 16,
}
# Windows of 12 tokens, so that rows of 40 and 17 reach past them. The 270m has
# 18 layers, of which each sixth is global; here each third of 7 is.
GEMMA3 = {k: v for k, v in BASE.items() if k != 'hidden_act'} | {
  'architectures': ['Gemma3ForCausalLM'],
  'model_type': 'gemma3_text',
  'hidden_activation': 'gelu_pytorch_tanh',
  'head_dim': 12,
  'num_hidden_layers': 7,
  'num_key_value_heads': 1,
  'query_pre_attn_scalar': 16,
  'sliding_window': 12,
  'attention_bias': False,
  'rope_theta': 1000000.0,
  'rope_local_base_freq': 100.0,
}
# Key and value heads of other sizes, and a last layer after whole periods.
# With the usual 1e-6, the norm after a delta net amplifies the rounding of
# tokens whose vector is small: transformers' own logits move by 2e-3 of the
# largest if the last bits of the embedding change, with 1e-2 by 1e-5.
QWEN35 = BASE | {
  'rms_norm_eps': 1e-2,
  'architectures': ['Qwen3_5ForCausalLM'],
  'model_type': 'qwen3_5_text',
  'attention_bias': False,
  'attn_output_gate': True,
  'head_dim': 16,
  'num_hidden_layers': 5,
  'linear_conv_kernel_dim': 4,
  'linear_key_head_dim': 8,
  'linear_num_key_heads': 2,
  'linear_num_value_heads': 4,
  'linear_value_head_dim': 12,
  'mamba_ssm_dtype': 'float32',
}
MOE = QWEN3 | {
  'architectures': ['Qwen3MoeForCausalLM'],
  'model_type': 'qwen3_moe',
  'decoder_sparse_step': 1,
  'moe_intermediate_size': 24,
  'num_experts': 8,
  'num_experts_per_tok': 2,
}
# The context of the pretraining is short, so that 40 tokens reach past it.
LLAMA3_SCALING = {
  'factor': 8.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 24,
}
CONFIGS = {
  # No GQA, every optional field left to its default.
  'llama2': {k: v for k, v in LLAMA.items() if k != 'num_key_value_heads'}
  | {'rope_scaling': None},
  'llama3': LLAMA | {'rope_theta': 500000.0, 'tie_word_embeddings': False},
  # As transformers 4 writes it.
  'llama3.1': LLAMA
  | {
    'rope_theta': 500000.0,
    'rope_scaling': LLAMA3_SCALING | {'rope_type': 'llama3'},
  },
  # As transformers 5 writes it.
  'llama3.2': LLAMA
  | {
    'head_dim': 8,
    'tie_word_embeddings': True,
    'rope_parameters': LLAMA3_SCALING
    | {'factor': 32.0, 'rope_type': 'llama3', 'rope_theta': 500000.0},
  },
  'qwen2': QWEN2 | {'rope_theta': 1000000.0, 'tie_word_embeddings': False},
  'qwen2.5': QWEN2
  | {
    'tie_word_embeddings': True,
    'num_key_value_heads': 1,
    'rope_parameters': {'rope_type': 'default', 'rope_theta': 1000000.0},
  },
  'qwen3': QWEN3 | {'rope_theta': 1000000.0, 'tie_word_embeddings': True},
  'qwen3.untied': QWEN3 | {'rope_theta': 50000.0, 'head_dim': 12},
  'gemma3': GEMMA3 | {'sliding_window_pattern': 3},
  # As transformers 5 writes it; the scaling of 4b and larger.
  'gemma3.linear': {
    k: v for k, v in GEMMA3.items() if not k.startswith('rope_')
  }
  | {
    'layer_types': (
      ['sliding_attention', 'sliding_attention', 'full_attention'] * 3
    )[:7],
    'tie_word_embeddings': True,
    'rope_parameters': {
      'full_attention': {
        'rope_type': 'linear',
        'factor': 8.0,
        'rope_theta': 1000000.0,
      },
      'sliding_attention': {'rope_type': 'default', 'rope_theta': 100.0},
    },
  },
  # As published, but for the sizes.
  'qwen3.5': QWEN35
  | {
    'full_attention_interval': 4,
    'layer_types': [*3 * ['linear_attention'], 'full_attention']
    + ['linear_attention'],
    'partial_rotary_factor': 0.25,
    'rope_parameters': {
      'mrope_interleaved': True,
      'mrope_section': [11, 11, 10],
      'partial_rotary_factor': 0.25,
      'rope_theta': 100.0,
      'rope_type': 'default',
    },
    'tie_word_embeddings': True,
  },
  'qwen3.5.untied': QWEN35
  | {
    'full_attention_interval': 2,
    'num_hidden_layers': 4,
    'linear_num_value_heads': 2,
    'linear_conv_kernel_dim': 3,
    'partial_rotary_factor': 0.5,
    'rope_theta': 1000000.0,
  },
  # A layer without experts between two that have some.
  'qwen3.moe': MOE
  | {'rope_theta': 1e6, 'norm_topk_prob': True, 'mlp_only_layers': [1]},
  # Every second layer has experts.
  'qwen3.moe.plain': MOE
  | {
    'decoder_sparse_step': 2,
    'norm_topk_prob': False,
    'num_hidden_layers': 4,
    'tie_word_embeddings': True,
  },
  # All layers have, as published.
  'qwen3.moe.all': MOE
  | {'norm_topk_prob': True, 'mlp_only_layers': [], 'head_dim': 12},
}


def lengths(name: str) -> tuple[int, int]:
  """Tokens of the two rows of a case; chunks of 64 are crossed."""
  return (150, 70) if name.startswith('qwen3.5') else (40, 17)


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
  """Every tensor of such a checkpoint, as the model cards list them."""
  D, F = config['hidden_size'], config['intermediate_size']
  N = config['num_attention_heads']
  K = config.get('num_key_value_heads', N)
  H = config.get('head_dim', D // N)
  V = config['vocab_size']
  out = {'model.embed_tokens.weight': (V, D)}
  for i in range(config['num_hidden_layers']):
    at = f'model.layers.{i}.'
    out |= {
      f'{at}input_layernorm.weight': (D,),
      f'{at}self_attn.q_proj.weight': (N * H, D),
      f'{at}self_attn.k_proj.weight': (K * H, D),
      f'{at}self_attn.v_proj.weight': (K * H, D),
      f'{at}self_attn.o_proj.weight': (D, N * H),
      f'{at}post_attention_layernorm.weight': (D,),
      f'{at}mlp.gate_proj.weight': (F, D),
      f'{at}mlp.up_proj.weight': (F, D),
      f'{at}mlp.down_proj.weight': (D, F),
    }
    if config['model_type'] == 'qwen3_moe' and has_experts(config, i):
      out = {k: v for k, v in out.items() if f'{at}mlp' not in k}
      E, F_e = config['num_experts'], config['moe_intermediate_size']
      out[f'{at}mlp.gate.weight'] = (E, D)
      for j in range(E):
        own = f'{at}mlp.experts.{j}'
        out |= {f'{own}.{x}_proj.weight': (F_e, D) for x in ('gate', 'up')}
        out[f'{own}.down_proj.weight'] = (D, F_e)
    if config['model_type'] == 'qwen3_5_text':
      out[f'{at}self_attn.q_proj.weight'] = (2 * N * H, D)
      if (i + 1) % config['full_attention_interval']:
        out = {k: v for k, v in out.items() if f'{at}self_attn' not in k}
        out |= {f'{at}linear_attn.{k}': v for k, v in delta(config).items()}
        continue
    if config['model_type'] == 'qwen2':
      for name, n in (('q', N * H), ('k', K * H), ('v', K * H)):
        out[f'{at}self_attn.{name}_proj.bias'] = (n,)
    if config['model_type'] not in ('llama', 'qwen2'):
      out[f'{at}self_attn.q_norm.weight'] = (H,)
      out[f'{at}self_attn.k_norm.weight'] = (H,)
    if config['model_type'] == 'gemma3_text':
      out[f'{at}pre_feedforward_layernorm.weight'] = (D,)
      out[f'{at}post_feedforward_layernorm.weight'] = (D,)
  out['model.norm.weight'] = (D,)
  tied = config['model_type'] == 'gemma3_text'  # unless the config says more
  if not config.get('tie_word_embeddings', tied):
    out['lm_head.weight'] = (V, D)
  return out


def has_experts(config: dict, layer: int) -> bool:
  only = config.get('mlp_only_layers', [])
  return layer not in only and (layer + 1) % config['decoder_sparse_step'] == 0


def delta(config: dict) -> dict[str, tuple[int, ...]]:
  """Those of a delta net."""
  D, V = config['hidden_size'], config['linear_num_value_heads']
  keys = config['linear_num_key_heads'] * config['linear_key_head_dim']
  values = V * config['linear_value_head_dim']
  channels = 2 * keys + values
  return {
    'in_proj_qkv.weight': (channels, D),
    'in_proj_z.weight': (values, D),
    'in_proj_b.weight': (V, D),
    'in_proj_a.weight': (V, D),
    'conv1d.weight': (channels, 1, config['linear_conv_kernel_dim']),
    'A_log': (V,),
    'dt_bias': (V,),
    'norm.weight': (config['linear_value_head_dim'],),
    'out_proj.weight': (D, values),
  }


def weights(name: str, seed: int = 0) -> dict[str, np.ndarray]:
  """float32 weights of a case."""
  rng = np.random.default_rng([seed, list(CONFIGS).index(name)])
  out = {}
  for key, shape in shapes(CONFIGS[name]).items():
    x = rng.standard_normal(shape)
    if key.endswith('norm.weight'):
      kind = CONFIGS[name]['model_type']
      plain = kind not in ('gemma3_text', 'qwen3_5_text')
      # Otherwise its factors are 1 + weight.
      x = 0.3 * x + (plain or 'linear_attn' in key)
    elif key.endswith('A_log'):
      x = np.log(0.01 + 4 * np.abs(x))  # decays of all kinds
    elif key.endswith(('dt_bias', 'conv1d.weight')):
      pass
    elif 'embed' not in key and 'lm_head' not in key:
      x = 0.2 * x  # a little above 1 / sqrt(D): every part matters
    out[key] = x.astype(np.float32)
  return out


def inputs(name: str) -> list[np.ndarray]:
  """Token ids of the two rows of a case."""
  rng = np.random.default_rng([1, list(CONFIGS).index(name)])
  return [
    rng.integers(0, CONFIGS[name]['vocab_size'], n) for n in lengths(name)
  ]


def write(folder, name: str, *, tensors=None, config=None) -> pathlib.Path:
  """The checkpoint of a case as a folder."""
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  config = CONFIGS[name] if config is None else config
  (folder / 'config.json').write_text(json.dumps(config))
  safetensors.numpy.save_file(
    weights(name) if tensors is None else tensors,
    folder / 'model.safetensors',
    metadata={'format': 'pt'},
  )
  return folder
