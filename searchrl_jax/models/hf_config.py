"""config.json of Hugging Face <-> the fields of `DecoderConfig`.

This module imports no JAX, so that code inside the vLLM sidecar can use it.
transformers 4.x writes `rope_theta` and `rope_scaling` at the top of
config.json, transformers 5.x writes `rope_parameters`. Both are read, and both
are written (with equal content), because a reader of the other generation
would silently use theta = 10000.

A field is computed with (`_used`), or known to change nothing (`_IGNORED`, or
`_NEUTRAL` and `_OWN` at these values); every other one is an error that names
it, because forks compute something else under the same `model_type`.
"""

from collections.abc import Iterable, Mapping, Sequence
import math
import textwrap
from typing import Any

from searchrl_jax import lookup
from searchrl_jax.models import families

# The values of these fields that the decoder implements.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
  **dict.fromkeys(
    'attention_bias mlp_bias qkv_bias bias use_qk_norm qk_norm qk_layernorm '
    'use_bidirectional_attention use_mrope rope_interleaved is_encoder_decoder '
    'add_cross_attention tie_encoder_decoder use_parallel_residual '
    'parallel_attn'.split(),
    (None, False),
  ),
  **dict.fromkeys(
    'partial_rotary_factor rotary_pct logits_scaling logit_scale '
    'residual_multiplier embedding_multiplier'.split(),
    (None, 1, 1.0),
  ),
  **dict.fromkeys(
    'num_experts num_local_experts n_routed_experts mtp_num_layers '
    'num_nextn_predict_layers'.split(),
    (None, 0),
  ),
  **dict.fromkeys(('pruned_heads', 'per_layer_config'), (None, {})),
  'quantization_config': (None,),
  'final_logit_softcapping': (None,),
  'attn_logit_softcapping': (None,),
  'is_causal': (None, True),
}
# Those of fields that one family alone has.
_OWN = {
  families.QWEN35: {
    'attn_output_gate': (None, True),
    'output_gate_type': (None, 'swish'),
    'mamba_ssm_dtype': (None, 'float32'),
  }
}
# The field of the activation, and its values, by that of a family.
_ACTIVATIONS = {
  'silu': ('hidden_act', (None, 'silu')),
  'gelu_tanh': ('hidden_activation', (None, 'gelu_pytorch_tanh')),
}
# Fields that change no log-prob: what made and stored the weights, dropout and
# initialisation, limits (`context`), what a server or generate() does with the
# model, and heads that a language model does not have. So do all ids of tokens.
_IGNORED = frozenset(
  """
  _commit_hash _name_or_path dtype is_llama_config name_or_path tokenizer_class
  torch_dtype transformers.js_config transformers_version unsloth_fixed
  unsloth_version use_bfloat16 vocab_file

  attention_dropout initializer_range max_position_embeddings
  max_sequence_length model_max_length neftune_noise_alpha pretraining_tp
  router_aux_loss_coef seq_length tokenizer_model_max_length

  _attn_implementation _attn_implementation_autoset attn_implementation
  cache_implementation chunk_size_feed_forward experts_implementation
  gradient_checkpointing is_decoder keys_to_ignore_at_inference
  output_attentions output_hidden_states output_router_logits output_scores
  return_dict return_dict_in_generate tf_legacy_loss tie_last_hidden_states
  tokenizer_padding_side torchscript use_cache use_flash_attn use_return_dict

  bad_words_ids begin_suppress_tokens diversity_penalty do_sample
  early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty
  epsilon_cutoff eta_cutoff exponential_decay_length_penalty length_penalty
  max_length max_new_tokens min_length no_repeat_ngram_size num_assistant_tokens
  num_assistant_tokens_schedule num_beam_groups num_beams num_return_sequences
  prefix remove_invalid_values repetition_penalty suppress_tokens
  task_specific_params temperature top_k top_p typical_p

  cross_attention_hidden_size finetuning_task id2label label2id num_labels
  problem_type
  """.split()
)
_IDS = '_token_id', '_token_ids', '_token_index'
# Of a model of text and images, beside its text.
_IMAGES = (
  'text_config vision_config mm_tokens_per_image model_type language_model_only'
).split()

_FULL, _LOCAL = 'full_attention', 'sliding_attention'
_LINEAR = 'linear_attention'
# Numbers of `RopeScaling` that have the same name in a config.json, by kind.
_SCALED = {
  'llama3': ('factor', 'low_freq_factor', 'high_freq_factor'),
  'linear': ('factor',),
}
_ORIGINAL, _OURS = 'original_max_position_embeddings', 'original_max_position'
# Of so many layers the last is global; transformers writes back what it read as
# the second.
_PATTERN = 'sliding_window_pattern', '_sliding_window_pattern'
_INTERVAL = 'full_attention_interval'
_PARTIAL = 'partial_rotary_factor'
# How RoPE counts the positions of images; those of text are plain.
_MROPE = 'mrope_section', 'mrope_interleaved'
# Another name of `num_experts`, which transformers 5 writes.
_LOCAL_EXPERTS = 'num_local_experts'
_NORMALISED = 'norm_topk_prob'
# Layers without experts: all but each so many-th, and these.
_DENSE = 'decoder_sparse_step', 'mlp_only_layers'
# Layers that predict several tokens, which are left out.
_MTP = 'mtp_num_hidden_layers', 'mtp_use_dedicated_embeddings'


def _used(name: str) -> set[str]:
  """The fields of a config.json that a family computes with."""
  own = 'sliding_window use_sliding_window max_window_layers'.split()
  if name == families.GEMMA:
    own = 'sliding_window query_pre_attn_scalar rope_local_base_freq'.split()
    own += _PATTERN
  elif name == families.QWEN35:
    own = [field for field, _ in families.DELTA.values()]
    own += [*_OWN[name], *_MTP, _INTERVAL, _PARTIAL]
  elif name == families.MOE:
    own += [field for field, _ in families.EXPERTS.values()]
    own += [_LOCAL_EXPERTS, _NORMALISED, *_DENSE]
  shared = (
    'model_type rms_norm_eps tie_word_embeddings layer_types rope_theta '
    'rope_scaling rope_parameters'
  )
  activation, _ = _ACTIVATIONS[families.FAMILIES[name].activation]
  sizes = families.SIZES.values()
  return {*sizes, *own, *shared.split(), activation, _ORIGINAL}


def _check_known(hf: Mapping[str, Any], name: str, used: Iterable[str]) -> None:
  """Raises ValueError for a field that is neither used nor neutral."""
  own = families.FAMILIES[name].architecture
  kinds = ['ForCausalLM', 'Model', 'TextModel', 'ForConditionalGeneration']
  classes = {f'{own}{kind}'.lower() for kind in kinds}
  listed = hf.get('architectures') or []
  for found in listed if isinstance(listed, (list, tuple)) else [listed]:
    # FSDP's wrapper names a class of its own.
    good = str(found).removeprefix('FSDP').lower() in classes
    _require(good, f'architectures={found!r}', f'{own}ForCausalLM')
  known = {*used, *_NEUTRAL, *_IGNORED, 'architectures'}
  for field, value in hf.items():
    # These ask for nothing; false may switch off what is usual.
    good = value in (None, [], {}) or field in known or field.endswith(_IDS)
    shown = textwrap.shorten(repr(value), 60)
    _require(
      good,
      f'{field}={shown}',
      'no such field: what it changes is not known here. Delete it from '
      'config.json if the model computes the same without it',
    )


def context(hf: Mapping[str, Any]) -> int | None:
  """The positions that a model was trained for, if its config.json says so."""
  if hf.get('model_type') in families.TEXT:
    hf = _object(hf, 'text_config')
  found = hf.get('max_position_embeddings')
  return found if type(found) is int else None


def parse_config(hf: Mapping[str, Any], strict: bool = True) -> dict[str, Any]:
  """The fields of `DecoderConfig` that a config.json states.

  `rope_scaling` is None or a dict with the fields of `RopeScaling`.

  Args:
    hf: the config.json.
    strict: refuse fields that are not known. Not for what a server says of a
      model: it adds fields of its own.

  Raises:
    ValueError: an unknown `model_type`, a missing field, or one with a value
      that the decoder does not implement; the message names the field.
  """
  name = hf.get('model_type')
  whole: Mapping[str, Any] = {}
  if name in families.TEXT:
    whole, name = hf, families.TEXT[name]
    hf = families.TEXT_DEFAULTS[name] | _object(hf, 'text_config')
  known = ', '.join([*families.FAMILIES, *families.TEXT])
  _require(name in families.FAMILIES, f'model_type={name!r}', known)
  family = families.FAMILIES[name]
  used = _used(name)
  limits = {k: v for k, v in _NEUTRAL.items() if k not in used}
  limits |= dict([_ACTIVATIONS[family.activation]]) | _OWN.get(name, {})
  for field, neutral in limits.items():
    for value in hf.get(field), whole.get(field):
      wanted = f'{neutral[-1]!r} or no such field'
      _require(value in neutral, f'{field}={value!r}', wanted)
  tied = hf.get('tie_word_embeddings', family.tied)
  for value in tied, whole.get('tie_word_embeddings', tied):
    good = value in (None, True, False) and bool(value) == bool(tied)
    wanted = 'true or false, and the same in text_config'
    _require(good, f'tie_word_embeddings={value!r}', wanted)
  if strict:
    _check_known(hf, name, used)
    _check_known(whole, name, [*_IMAGES, 'tie_word_embeddings'])
  sizes: dict[str, int] = {}
  for size, field in families.SIZES.items():
    value = hf.get(field)
    if value is None and size == 'n_kv_heads':
      value = sizes['n_heads']
    if value is None and size == 'head_dim':
      value = family.head_dim or sizes['d_model'] // sizes['n_heads']
    sizes[size] = _count(value, field)
  local = {'window': 0, 'global_every': 1, 'local_theta': 1e4}
  local |= {'rotary_dim': None, 'delta': None, 'moe': None}
  scale = 1.0
  if name == families.GEMMA:
    own, hf = _local_layers(hf, sizes['n_layers'])
    local |= own
    field = 'query_pre_attn_scalar'
    scalar = _number(hf.get(field, 256), field)
    scale = math.sqrt(sizes['head_dim'] / scalar)
  elif name == families.QWEN35:
    own, hf = _delta_layers(hf, sizes)
    local |= own
  else:
    _refuse_sliding_window(hf, name, sizes['n_layers'])
  if name == families.MOE:
    local['moe'] = _experts(hf, sizes['n_layers'])
  theta, scaling = _rope(hf)
  return sizes | {
    'family': name,
    'rope_theta': theta,
    'rope_scaling': scaling,
    'norm_eps': float(_number(hf.get('rms_norm_eps', 1e-6), 'rms_norm_eps')),
    'tied': bool(tied),
    'query_scale': scale,
    **local,
  }


def format_config(
  fields: Mapping[str, Any],
  *,
  dtype: str = 'float32',
  like: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
  """The inverse: a config.json that transformers and vLLM load.

  Args:
    fields: as `parse_config` returns them.
    dtype: of the stored tensors.
    like: a config.json whose other fields (token ids, context length, ...) are
      kept; None writes max_position_embeddings = 32768 and no token ids.
  """
  name = fields['family']
  theta, scaling = fields['rope_theta'], fields['rope_scaling']
  rope = {'rope_type': 'default', 'rope_theta': theta}
  if scaling is not None:
    kind = scaling['kind']
    rope |= {'rope_type': kind, **{k: scaling[k] for k in _SCALED[kind]}}
    if kind == 'llama3':
      rope[_ORIGINAL] = scaling[_OURS]
  if like and like.get('model_type') in families.TEXT:
    ids = {k: v for k, v in like.items() if k.endswith('_token_id')}
    like = {**like['text_config'], **ids}
  field, known = _ACTIVATIONS[families.FAMILIES[name].activation]
  out = {
    'max_position_embeddings': 32768,
    'bos_token_id': None,
    'eos_token_id': None,
    **(like or {}),
    'architectures': [f'{families.FAMILIES[name].architecture}ForCausalLM'],
    'model_type': name,
    'torch_dtype': dtype,
    **{field: fields[size] for size, field in families.SIZES.items()},
    field: known[-1],
    'rms_norm_eps': fields['norm_eps'],
    'tie_word_embeddings': fields['tied'],
    'rope_theta': theta,
    'rope_scaling': rope if scaling is not None else None,
    'rope_parameters': rope,
    'attention_dropout': 0.0,
  }
  other = ['dtype', 'transformers_version']
  if name == families.GEMMA:
    out |= _local_fields(fields, rope)
  elif name == families.QWEN35:
    out |= _delta_fields(fields, rope)
    other += _MTP
  else:
    out['mlp_bias' if name == 'llama' else 'use_sliding_window'] = False
    other.append('layer_types')
  if name == families.MOE:
    out |= _expert_fields(fields['moe'])
  if name != 'qwen2':
    out['attention_bias'] = False
  return {k: v for k, v in out.items() if k not in other}


def _require(good, found: str, expected: str) -> None:
  message = f'config.json: {found} is not supported; expected {expected}'
  lookup.require(good, message)


def _object(hf: Mapping[str, Any], field: str) -> Mapping[str, Any]:
  """A field that holds fields; {}: it is absent, or null."""
  value = hf.get(field)
  good = value is None or isinstance(value, Mapping)
  _require(good, f'{field}={value!r}', 'a JSON object')
  return value or {}


def _number(value: Any, field: str) -> float:
  good = type(value) in (int, float) and 0 < value < math.inf
  _require(good, f'{field}={value!r}', 'a positive number')
  return value


def _count(value: Any, field: str) -> int:
  good = type(value) is int and value >= 1
  _require(good, f'{field}={value!r}', 'a positive integer')
  return value


def _types(every: int, n_layers: int, other: str) -> list[str]:
  return [other if (i + 1) % every else _FULL for i in range(n_layers)]


def _layer_types(hf: Mapping[str, Any]) -> list[str]:
  """[]: the field is absent, null or empty."""
  types = hf.get('layer_types')
  good = types is None or isinstance(types, list | tuple)
  _require(good, f'layer_types={types!r}', 'a JSON list')
  return [*(types or ())]


def _check_types(types: Sequence[str], expected: Sequence[str], wanted: str):
  good = len(types) == len(expected)
  _require(good, f'layer_types of {len(types)} layers', wanted)
  for i, (kind, own) in enumerate(zip(types, expected, strict=True)):
    _require(kind == own, f'layer_types[{i}]={kind!r}', f'{own!r}: {wanted}')


def _period(hf, n_layers: int, other: str, default: int, *names: str) -> int:
  """Of so many layers the last sees all tokens, and the others are `other`.

  names: of the field, as readers spell it.
  """
  found = [hf[name] for name in names if hf.get(name) is not None]
  every = _count(found[0] if found else default, names[0])
  if types := _layer_types(hf):
    every = (types.index(_FULL) if _FULL in types else n_layers) + 1
    wanted = f'{_FULL} at equal distances, and {other}, of {n_layers} layers'
    _check_types(types, _types(every, n_layers, other), wanted)
  return every


def _local_layers(hf: Mapping[str, Any], n_layers: int):
  """Gemma's local layers: fields of `DecoderConfig`, and the config that is
  left for its global ones."""
  theta = hf.get('rope_theta')
  hf = {**hf, 'rope_theta': 1e6 if theta is None else theta}
  every = _period(hf, n_layers, _LOCAL, 6, *_PATTERN)
  field = 'rope_local_base_freq'
  theta = _number(hf.get(field, 1e4), field)
  window = _count(hf.get('sliding_window', 4096), 'sliding_window')
  # transformers 5 has the RoPE of either kind of layer.
  rope = _object(hf, 'rope_parameters')
  if _FULL in rope:
    where = f'rope_parameters.{_LOCAL}'
    own, scaling = _rope_fields(where, _object(rope, _LOCAL))
    theta = theta if own is None else _number(own, f'{_LOCAL}.rope_theta')
    kind = scaling and scaling['kind']
    _require(kind is None, f'{where}.rope_type={kind!r}', 'default')
    hf['rope_parameters'] = _object(rope, _FULL)
    hf['rope_theta'] = hf['rope_parameters'].get('rope_theta', hf['rope_theta'])
  out = {'window': window, 'global_every': every, 'local_theta': float(theta)}
  return out, hf


def _local_fields(fields: Mapping[str, Any], rope: Mapping[str, Any]):
  """The inverse, for readers of either generation."""
  every, n = fields['global_every'], fields['n_layers']
  scalar = fields['head_dim'] / fields['query_scale'] ** 2
  own = {'rope_type': 'default', 'rope_theta': fields['local_theta']}
  return {
    'query_pre_attn_scalar': round(scalar),
    'sliding_window': fields['window'],
    'sliding_window_pattern': every,
    'layer_types': _types(every, n, _LOCAL),
    'rope_local_base_freq': fields['local_theta'],
    'rope_parameters': {_FULL: dict(rope), _LOCAL: own},
  }


def _delta_layers(hf: Mapping[str, Any], sizes: Mapping[str, int]):
  """Delta nets and partial RoPE: fields of `DecoderConfig`, and the config that
  is left."""
  hf, factors = dict(hf), [hf.get(_PARTIAL)]
  for field in ('rope_scaling', 'rope_parameters'):
    rope = _object(hf, field)
    factors.append(rope.get(_PARTIAL))
    left = rope.keys() - {_PARTIAL, *_MROPE}
    hf[field] = {name: rope[name] for name in left}
  found = {x for x in factors if x is not None} or {0.25}
  wanted = 'one number, wherever it stands'
  _require(len(found) == 1, f'{_PARTIAL}={sorted(found)}', wanted)
  factor, H = _number(found.pop(), _PARTIAL), sizes['head_dim']
  rotary = int(H * factor)
  good = 0 < rotary <= H and rotary % 2 == 0
  _require(good, f'{_PARTIAL}={factor!r}', f'an even part of head_dim={H}')
  delta = {}
  for size, (field, default) in families.DELTA.items():
    value = hf.get(field)
    delta[size] = _count(default if value is None else value, field)
  keys, values = delta['key_heads'], delta['value_heads']
  wanted = f'a multiple of linear_num_key_heads={keys}'
  _require(values % keys == 0, f'linear_num_value_heads={values}', wanted)
  n = sizes['n_layers']
  every = _period(hf, n, _LINEAR, 4, _INTERVAL)
  _require(every <= n, f'no {_FULL} in {n} layers', f'one at least of {every}')
  return {'global_every': every, 'rotary_dim': rotary, 'delta': delta}, hf


def _delta_fields(fields: Mapping[str, Any], rope: Mapping[str, Any]):
  """The inverse."""
  every = fields['global_every']
  factor = (fields['rotary_dim'] or fields['head_dim']) / fields['head_dim']
  sizes = {f: fields['delta'][s] for s, (f, _) in families.DELTA.items()}
  return sizes | {
    _INTERVAL: every,
    'layer_types': _types(every, fields['n_layers'], _LINEAR),
    _PARTIAL: factor,
    'rope_parameters': {**rope, _PARTIAL: factor},
    'attn_output_gate': True,
    'mamba_ssm_dtype': 'float32',
  }


def _experts(hf: Mapping[str, Any], n_layers: int) -> dict[str, Any]:
  """The fields of `experts.Sizes`."""
  values, other = {}, hf.get(_LOCAL_EXPERTS)
  given = {'num_experts': other} | {
    k: v for k, v in hf.items() if v is not None
  }
  for size, (field, default) in families.EXPERTS.items():
    value = given.get(field)
    values[size] = _count(default if value is None else value, field)
  count, chosen = values['count'], values['chosen']
  good = other is None or other == count
  _require(good, f'{_LOCAL_EXPERTS}={other!r}', f'num_experts={count}')
  good = chosen <= count
  _require(good, f'num_experts_per_tok={chosen}', f'at most {count} experts')
  normalised = hf.get(_NORMALISED) or False
  good = isinstance(normalised, bool)
  _require(good, f'{_NORMALISED}={normalised!r}', 'true or false')
  step, only = (hf.get(field) for field in _DENSE)
  step = _count(1 if step is None else step, _DENSE[0])
  only = only or []
  good = isinstance(only, list | tuple) and all(type(i) is int for i in only)
  _require(good, f'{_DENSE[1]}={only!r}', 'a list of layers, from 0')
  dense = tuple(i for i in range(n_layers) if (i + 1) % step or i in only)
  good = len(dense) < n_layers
  _require(good, 'no layer with experts', 'one at least')
  return values | {'normalised': normalised, 'dense': dense}


def _expert_fields(moe: Mapping[str, Any]) -> dict[str, Any]:
  """The inverse."""
  sizes = {f: moe[s] for s, (f, _) in families.EXPERTS.items()}
  return sizes | {
    _LOCAL_EXPERTS: moe['count'],
    _NORMALISED: moe['normalised'],
    _DENSE[0]: 1,
    _DENSE[1]: [*moe['dense']],
  }


def _refuse_sliding_window(hf: Mapping[str, Any], name: str, n_layers: int):
  # Qwen has a switch, off by default, and a first layer, which models with
  # experts have not. A window in a Llama config has neither, and readers
  # interpret it differently.
  types, window = _layer_types(hf), hf.get('sliding_window')
  first = 0 if name == families.MOE else hf.get('max_window_layers', 28)
  on = name == 'llama' or (
    hf.get('use_sliding_window', False) and first < n_layers
  )
  wanted = f'{_FULL}, of each of {n_layers} layers'
  if types:
    _check_types(types, n_layers * [_FULL], wanted)
  else:
    _require(not (window and on), f'sliding_window={window}', 'no window')


def _rope(hf: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
  """rope theta, and the fields of `RopeScaling` or None."""
  # If both generations' fields are present, they must agree: transformers 5
  # reads the older one.
  found = [(hf.get('rope_theta'), None)]
  for field in ('rope_scaling', 'rope_parameters'):
    if rope := _object(hf, field):
      found.append(_rope_fields(field, rope))
  known = [theta for theta, _ in found if theta is not None]
  thetas = {float(_number(theta, 'rope_theta')) for theta in known}
  scalings = [scaling for _, scaling in found[1:]] or [None]
  _require(
    len(thetas) <= 1 and all(s == scalings[0] for s in scalings),
    f'rope_theta={sorted(thetas)}, rope_scaling={scalings}',
    'that rope_theta, rope_scaling and rope_parameters do not contradict',
  )
  # Some readers prefer this place, and others do not look at it.
  top, own = hf.get(_ORIGINAL), scalings[0] and scalings[0][_OURS]
  _require(not (top and own) or top == own, f'{_ORIGINAL}={top!r}', repr(own))
  return next(iter(thetas), 10_000.0), scalings[0]


def _rope_fields(field: str, rope: Mapping[str, Any]):
  """(theta or None, RopeScaling fields or None) of one dict."""
  kind = rope.get('rope_type', rope.get('type', 'default'))
  good = kind in ('default', *_SCALED)
  _require(good, f'{field}.rope_type={kind!r}', 'default, llama3 or linear')
  scaled = _SCALED.get(kind, ()) + (_ORIGINAL,) * (kind == 'llama3')
  known = ('rope_type', 'type', 'rope_theta', *scaled)
  for name, value in rope.items():
    neutral = name == 'partial_rotary_factor' and value in _NEUTRAL[name]
    good, names = neutral or name in known, ', '.join(known)
    _require(good, f'{field}.{name}={value!r}', f'{kind}: {names}')
  values = {k: _number(rope.get(k), f'{field}.{k}') for k in scaled}
  scaling: dict[str, Any] | None = None
  if scaled:
    scaling = dict.fromkeys(('low_freq_factor', 'high_freq_factor'), 0.0)
    scaling |= {k: float(values[k]) for k in _SCALED[kind]}
    scaling['kind'] = kind
    scaling[_OURS] = int(values.get(_ORIGINAL, 0))
  return rope.get('rope_theta'), scaling
