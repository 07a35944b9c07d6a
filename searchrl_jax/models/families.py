"""Hugging Face families: what tells one from another, and shapes by name.

This module imports no JAX, so that code inside the vLLM sidecar can use it.
`hf_config` reads and writes a config.json, `hf_tensors` names the tensors.
"""

from collections.abc import Mapping
import dataclasses
import pathlib
import shutil
from typing import Any, NamedTuple


class Family(NamedTuple):
  """What a `model_type` determines, independent of its config.

  Attributes:
    architecture: of the class in transformers and vLLM, without 'ForCausalLM'.
    head_dim: where the config has none; None: hidden_size / heads.
    tied: whether embedding and head are one where the config does not say.
    post_norms: norms after attention and feed-forward too, before the sums.
    norm_offset: the factor of a norm is this + its weight.
    scaled_embedding: embeddings are multiplied by sqrt(d_model).
    gated_attention: `q` makes a gate too, which multiplies the heads' outputs.
    names: of tensors that differ from those of `hf_tensors`.
  """

  architecture: str
  qkv_bias: bool = False
  qk_norm: bool = False
  head_dim: int | None = None
  tied: bool = False
  activation: str = 'silu'
  post_norms: bool = False
  norm_offset: float = 0.0
  scaled_embedding: bool = False
  gated_attention: bool = False
  names: Mapping[str, tuple[str, int]] = {}


FAMILIES = {
  'llama': Family('Llama'),
  'qwen2': Family('Qwen2', qkv_bias=True),
  'qwen3': Family('Qwen3', qk_norm=True, head_dim=128),
  'qwen3_moe': Family('Qwen3Moe', qk_norm=True),
  'gemma3_text': Family(
    'Gemma3',
    qk_norm=True,
    head_dim=256,
    tied=True,
    activation='gelu_tanh',
    post_norms=True,
    norm_offset=1.0,
    scaled_embedding=True,
    names={
      'attn_post_norm': ('post_attention_layernorm.weight', 0),
      'mlp_norm': ('pre_feedforward_layernorm.weight', 0),
      'mlp_post_norm': ('post_feedforward_layernorm.weight', 0),
    },
  ),
  'qwen3_5_text': Family(
    'Qwen3_5', qk_norm=True, head_dim=256, norm_offset=1.0, gated_attention=True
  ),
}
GEMMA, QWEN35, MOE = 'gemma3_text', 'qwen3_5_text', 'qwen3_moe'
# A model of text and images -> the family of its text.
TEXT = {'gemma3': GEMMA, 'qwen3_5': QWEN35}
# What the published configs leave out: defaults of Gemma3TextConfig and
# Qwen3_5TextConfig of transformers.
TEXT_DEFAULTS = {
  GEMMA: {
    'vocab_size': 262_208,
    'hidden_size': 2304,
    'intermediate_size': 9216,
    'num_hidden_layers': 26,
    'num_attention_heads': 8,
    'num_key_value_heads': 4,
    'head_dim': 256,
    'sliding_window': 4096,
  },
  QWEN35: {
    'vocab_size': 248_320,
    'hidden_size': 4096,
    'intermediate_size': 12_288,
    'num_hidden_layers': 32,
    'num_attention_heads': 16,
    'num_key_value_heads': 4,
  },
}
# Sizes in `DecoderConfig` -> in config.json.
SIZES = {
  'vocab_size': 'vocab_size',
  'd_model': 'hidden_size',
  'n_layers': 'num_hidden_layers',
  'n_heads': 'num_attention_heads',
  'n_kv_heads': 'num_key_value_heads',
  'head_dim': 'head_dim',
  'd_ff': 'intermediate_size',
}
# Sizes in `deltanet.Sizes` -> in config.json, and their defaults there.
DELTA = {
  'key_heads': ('linear_num_key_heads', 16),
  'value_heads': ('linear_num_value_heads', 32),
  'key_dim': ('linear_key_head_dim', 128),
  'value_dim': ('linear_value_head_dim', 128),
  'taps': ('linear_conv_kernel_dim', 4),
}
# The same of `experts.Sizes`.
EXPERTS = {
  'count': ('num_experts', 128),
  'chosen': ('num_experts_per_tok', 8),
  'd_ff': ('moe_intermediate_size', 768),
}
# Parameters that are float32 in checkpoints, frozen and in an engine, whatever
# the others are; and in a vLLM server.
EXACT = ('delta_a_log', 'delta_norm')
SERVED = ('delta_a_log',)
_ALIKE = dict(rope_theta=1e6, rms_norm_eps=1e-6, max_position_embeddings=32768)
# Shapes of well-known models, for reports that need no checkpoint: fields of
# a config.json, by the name that config.model.path takes where there is no
# folder of that name. The models' cards have the figures.
NAMED = {
  name: {
    'model_type': 'qwen2',
    **_ALIKE,
    'tie_word_embeddings': tied,
    **dict(zip(SIZES.values(), sizes)),
  }
  for name, tied, *sizes in (
    ('qwen2.5-1.5b', True, 151936, 1536, 28, 12, 2, 128, 8960),
    ('qwen2.5-3b', True, 151936, 2048, 36, 16, 2, 128, 11008),
    ('qwen2.5-7b', False, 152064, 3584, 28, 28, 4, 128, 18944),
  )
}
NAMED |= {
  name: {
    'model_type': GEMMA,
    **_ALIKE,
    'rope_scaling': factor and {'rope_type': 'linear', 'factor': factor},
    'query_pre_attn_scalar': 256,
    'sliding_window': window,
    **dict(zip(SIZES.values(), sizes)),
  }
  for name, factor, window, *sizes in (
    ('gemma-3-270m', None, 512, 262144, 640, 18, 4, 1, 256, 2048),
    ('gemma-3-1b', None, 512, 262144, 1152, 26, 4, 1, 256, 6912),
    ('gemma-3-4b', 8.0, 1024, 262208, 2560, 34, 8, 4, 256, 10240),
  )
}
NAMED |= {
  name: {
    'model_type': QWEN35,
    'rms_norm_eps': 1e-6,
    'max_position_embeddings': 262_144,
    'rope_theta': 1e7,
    'tie_word_embeddings': tied,
    'linear_num_value_heads': value_heads,
    **dict(zip(SIZES.values(), sizes)),
  }
  for name, tied, value_heads, *sizes in (
    ('qwen3.5-0.8b', True, 16, 248320, 1024, 24, 8, 2, 256, 3584),
    ('qwen3.5-2b', True, 16, 248320, 2048, 24, 8, 2, 256, 6144),
    ('qwen3.5-4b', True, 32, 248320, 2560, 32, 16, 4, 256, 9216),
    ('qwen3.5-9b', False, 32, 248320, 4096, 32, 16, 4, 256, 12288),
    ('qwen3.5-27b', False, 48, 248320, 5120, 64, 24, 4, 256, 17408),
  )
}
NAMED['qwen3-30b-a3b'] = {
  'model_type': MOE,
  **_ALIKE,
  'max_position_embeddings': 40_960,
  'tie_word_embeddings': False,
  'norm_topk_prob': True,
  **{field: default for field, default in EXPERTS.values()},
  **dict(zip(SIZES.values(), (151936, 2048, 48, 32, 4, 128, 6144))),
}
# The result of `hf_config.parse_config`: the architecture, not how it is run.
_REST = (
  'family rope_theta rope_scaling norm_eps tied query_scale window '
  'global_every local_theta rotary_dim delta moe'
)
FIELDS = (*SIZES, *_REST.split())
# File names of tokenizers of every kind.
_TOKENIZER = (
  'tokenizer* vocab.json merges.txt special_tokens_map.json added_tokens.json '
  'chat_template* generation_config.json'
)


def fields(cfg) -> dict[str, Any]:
  """FIELDS of a `decoder.DecoderConfig`."""
  values = dataclasses.asdict(cfg)
  return {name: values[name] for name in FIELDS}


def dtype_of(path: str, dtype: str, exact: tuple[str, ...] = EXACT) -> str:
  """Of a parameter 'layers/q' or its name, where others are in `dtype`."""
  return 'float32' if path.endswith(exact) else dtype


def layers_with(fields: Mapping[str, Any], name: str) -> list[int]:
  """The layers that have a parameter, in the order of its stack.

  fields: FIELDS. name: of the parameter, 'q' or 'delta_conv'.
  """
  layers, every = range(fields['n_layers']), fields['global_every']
  part = name.split('_')[0]
  if fields['delta'] and part in ('delta', 'q', 'k', 'v', 'o'):
    return [i for i in layers if (part == 'delta') == bool((i + 1) % every)]
  if part in ('router', 'experts', 'gate', 'up', 'down'):
    # Publications of earlier versions have no such field.
    dense = (fields.get('moe') or {'dense': layers})['dense']
    in_dense = part not in ('router', 'experts')
    return [i for i in layers if (i in dense) == in_dense]
  return [*layers]


def copy_tokenizer(source, target) -> None:
  """Copies a tokenizer's files to another folder."""
  for pattern in _TOKENIZER.split():
    found = pathlib.Path(source).glob(pattern)
    for file in filter(pathlib.Path.is_file, found):
      shutil.copyfile(file, pathlib.Path(target) / file.name)
