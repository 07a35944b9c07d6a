"""Hugging Face families: config.json <-> decoder flags, tensor names <-> paths.

This module imports no JAX, so that code inside the vLLM sidecar can use it.
transformers 4.x writes `rope_theta` and `rope_scaling` at the top of
config.json, transformers 5.x writes `rope_parameters`. Both are read, and both
are written (with equal content), because a reader of the other generation
would silently use theta = 10000.

A field that changes the computation and that the decoder does not implement is
an error that names the field; other fields (dropout, initialisation) are
ignored.
"""

from collections.abc import Mapping
import dataclasses
import math
import pathlib
import shutil
from typing import Any, NamedTuple

from searchrl_jax.run import lookup


class Family(NamedTuple):
  """Properties that a `model_type` determines, independent of its config."""

  qkv_bias: bool = False
  qk_norm: bool = False
  head_dim: int | None = None  # default; None = hidden_size / heads


FAMILIES = {
  'llama': Family(),
  'qwen2': Family(qkv_bias=True),
  'qwen3': Family(qk_norm=True, head_dim=128),
}

# Sizes in `DecoderConfig` -> in config.json.
_SIZES = {
  'vocab_size': 'vocab_size',
  'd_model': 'hidden_size',
  'n_layers': 'num_hidden_layers',
  'n_heads': 'num_attention_heads',
  'n_kv_heads': 'num_key_value_heads',
  'head_dim': 'head_dim',
  'd_ff': 'intermediate_size',
}
# Shapes of well-known models, for reports that need no checkpoint: fields of
# a config.json, by the name that config.model.path takes where there is no
# folder of that name. The models' cards have the figures.
NAMED = {
  name: {
    'model_type': 'qwen2',
    'rope_theta': 1e6,
    'rms_norm_eps': 1e-6,
    'max_position_embeddings': 32768,
    'tie_word_embeddings': tied,
    **dict(zip(_SIZES.values(), sizes)),
  }
  for name, tied, *sizes in (
    ('qwen2.5-1.5b', True, 151936, 1536, 28, 12, 2, 128, 8960),
    ('qwen2.5-3b', True, 151936, 2048, 36, 16, 2, 128, 11008),
    ('qwen2.5-7b', False, 152064, 3584, 28, 28, 4, 128, 18944),
  )
}
# The result of `parse_config`: the architecture, not how it is run.
_FLAGS = 'rope_theta rope_scaling norm_eps qkv_bias qk_norm tied'
FIELDS = (*_SIZES, *_FLAGS.split())
# File names of tokenizers of every kind.
_TOKENIZER = (
  'tokenizer* vocab.json merges.txt special_tokens_map.json added_tokens.json '
  'chat_template* generation_config.json'
)

# The values of these fields that the decoder implements.
_NEUTRAL = {
  'hidden_act': (None, 'silu'),
  'attention_bias': (None, False),
  'mlp_bias': (None, False),
  'partial_rotary_factor': (None, 1, 1.0),
  'quantization_config': (None,),
  'num_experts': (None, 0),
  'num_local_experts': (None, 0),
  'is_causal': (None, True),
  'logits_scaling': (None, 1, 1.0),
  'final_logit_softcapping': (None,),
  'attn_logit_softcapping': (None,),
}

_FULL = 'full_attention'
_LLAMA3 = ('factor', 'low_freq_factor', 'high_freq_factor')
_ORIGINAL = 'original_max_position_embeddings'


def fields(cfg) -> dict[str, Any]:
  """FIELDS of a `decoder.DecoderConfig`."""
  values = dataclasses.asdict(cfg)
  return {name: values[name] for name in FIELDS}


def copy_tokenizer(source, target) -> None:
  """Copies a tokenizer's files to another folder."""
  for pattern in _TOKENIZER.split():
    found = pathlib.Path(source).glob(pattern)
    for file in filter(pathlib.Path.is_file, found):
      shutil.copyfile(file, pathlib.Path(target) / file.name)


def parse_config(hf: Mapping[str, Any]) -> dict[str, Any]:
  """The fields of `DecoderConfig` that a config.json states.

  `rope_scaling` is None or a dict with the fields of `RopeScaling`.

  Raises:
    ValueError: an unknown `model_type`, a missing field, or one with a value
      that the decoder does not implement; the message names the field.
  """
  name = hf.get('model_type')
  _require(name in FAMILIES, f'model_type={name!r}', ', '.join(FAMILIES))
  family = FAMILIES[name]
  for field, neutral in _NEUTRAL.items():
    value, wanted = hf.get(field), f'{neutral[-1]!r} or no such field'
    _require(value in neutral, f'{field}={value!r}', wanted)
  sizes: dict[str, int] = {}
  for size, field in _SIZES.items():
    value = hf.get(field)
    if value is None and size == 'n_kv_heads':
      value = sizes['n_heads']
    if value is None and size == 'head_dim':
      value = family.head_dim or sizes['d_model'] // sizes['n_heads']
    good = type(value) is int and value >= 1
    _require(good, f'{field}={value!r}', 'a positive integer')
    sizes[size] = value
  _refuse_sliding_window(hf, name == 'llama', sizes['n_layers'])
  theta, scaling = _rope(hf)
  return sizes | {
    'rope_theta': theta,
    'rope_scaling': scaling,
    'norm_eps': float(hf.get('rms_norm_eps', 1e-6)),
    'qkv_bias': family.qkv_bias,
    'qk_norm': family.qk_norm,
    'tied': bool(hf.get('tie_word_embeddings', False)),
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
  by_flags = {(f.qkv_bias, f.qk_norm): n for n, f in FAMILIES.items()}
  name = by_flags[fields['qkv_bias'], fields['qk_norm']]
  theta, scaling = fields['rope_theta'], fields['rope_scaling']
  rope = {'rope_type': 'default', 'rope_theta': theta}
  if scaling is not None:
    rope |= {'rope_type': 'llama3', **{k: scaling[k] for k in _LLAMA3}}
    rope[_ORIGINAL] = scaling['original_max_position']
  out = {
    'max_position_embeddings': 32768,
    'bos_token_id': None,
    'eos_token_id': None,
    **(like or {}),
    'architectures': [f'{name.capitalize()}ForCausalLM'],
    'model_type': name,
    'torch_dtype': dtype,
    **{field: fields[size] for size, field in _SIZES.items()},
    'hidden_act': 'silu',
    'rms_norm_eps': fields['norm_eps'],
    'tie_word_embeddings': fields['tied'],
    'rope_theta': theta,
    'rope_scaling': rope if scaling is not None else None,
    'rope_parameters': rope,
    'attention_dropout': 0.0,
    'mlp_bias' if name == 'llama' else 'use_sliding_window': False,
  } | ({'attention_bias': False} if name != 'qwen2' else {})
  other = ('dtype', 'layer_types', 'transformers_version', 'auto_map')
  return {k: v for k, v in out.items() if k not in other}


@dataclasses.dataclass(frozen=True)
class Tensor:
  """One tensor of a checkpoint and where it lives in the parameters.

  Projections are [out, in] in the checkpoint and [in..., out...] in our
  parameters, with the heads split; `n_in` is the number of our leading axes
  that form `in`, and 0 means that nothing is transposed.
  """

  name: str  # 'model.layers.3.self_attn.q_proj.weight'
  shape: tuple[int, ...]  # of the checkpoint's tensor
  path: str  # 'layers/q'
  layer: int | None  # index on the leading L of our array; None: not stacked
  ours: tuple[int, ...]  # our shape, without L
  n_in: int = 0

  def to_ours(self, x):
    """A view of the checkpoint's tensor in our layout (numpy)."""
    return (x.T if self.n_in else x).reshape(self.ours)

  def to_hf(self, x):
    """The inverse, of our array or a block of it along our axis `n_in`."""
    if not self.n_in:
      return x.reshape(-1, *self.shape[1:])
    return x.reshape(self.shape[-1], -1).T


# Our name -> (theirs, number of our leading axes that are their `in`).
_NAMES = {
  'embed': ('model.embed_tokens.weight', 0),
  'attn_norm': ('input_layernorm.weight', 0),
  **{x: (f'self_attn.{x}_proj.weight', 1) for x in 'qkv'},
  **{f'{x}_bias': (f'self_attn.{x}_proj.bias', 0) for x in 'qkv'},
  **{f'{x}_norm': (f'self_attn.{x}_norm.weight', 0) for x in 'qk'},
  'o': ('self_attn.o_proj.weight', 2),
  'mlp_norm': ('post_attention_layernorm.weight', 0),
  **{x: (f'mlp.{x}_proj.weight', 1) for x in ('gate', 'up', 'down')},
  'final_norm': ('model.norm.weight', 0),
  'head': ('lm_head.weight', 1),
}
# Those of adapters are PEFT's: '...q_proj.lora_A.weight'.
_NAMES |= {
  f'{x}_lora_{kind}': (
    name.replace('.weight', f'.lora_{kind.upper()}.weight'),
    n,
  )
  for x, (name, n_in) in [*_NAMES.items()]
  if '_proj.weight' in name
  for kind, n in (('a', n_in), ('b', 1))
}
TIED_HEAD = 'lm_head.weight'  # may be present, equal to the embedding


def tensors(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
  """Every tensor of a checkpoint by its name, in the order of the layers.

  Args:
    shapes: our path -> shape, stacked, as `decoder.param_table` gives them:
      of the whole model, or of its layers alone.
  """
  stacked = [path for path in shapes if path.startswith('layers/')]
  n_layers = shapes[stacked[0]][0]
  places: list[tuple[str, int | None]] = [('embed', None)] * ('embed' in shapes)
  places += [(path, i) for i in range(n_layers) for path in stacked]
  places += [(p, None) for p in ('final_norm', 'head') if p in shapes]
  out = {}
  for path, layer in places:
    name, n_in = _NAMES[path.split('/')[-1]]
    shape = tuple(shapes[path])
    if layer is not None:
      name, shape = f'model.layers.{layer}.{name}', shape[1:]
    hf = shape
    if n_in:
      hf = (math.prod(shape[n_in:]), math.prod(shape[:n_in]))
    elif path.endswith('_bias'):
      hf = (math.prod(shape),)
    out[name] = Tensor(name, hf, path, layer, shape, n_in)
  return out


def _require(good, found: str, expected: str) -> None:
  message = f'config.json: {found} is not supported; expected {expected}'
  lookup.require(good, message)


def _refuse_sliding_window(hf: Mapping[str, Any], llama: bool, n_layers: int):
  # Qwen has a switch, off by default, and a first layer. A window in a Llama
  # config has neither, and readers interpret it differently.
  types, window = hf.get('layer_types'), hf.get('sliding_window')
  first = hf.get('max_window_layers', 28)
  on = llama or (hf.get('use_sliding_window', False) and first < n_layers)
  full = not (window and on) if types is None else {*types} <= {_FULL}
  _require(full, f'layer_types={types}, sliding_window={window}', _FULL)


def _rope(hf: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
  """rope theta, and the fields of `RopeScaling` or None."""
  # If both generations' fields are present, they must agree: transformers 5
  # reads the older one.
  found = [(hf.get('rope_theta'), None)]
  for field in ('rope_scaling', 'rope_parameters'):
    if rope := hf.get(field):
      found.append(_rope_fields(field, rope, hf))
  thetas = {float(theta) for theta, _ in found if theta is not None}
  scalings = [scaling for _, scaling in found[1:]] or [None]
  _require(
    len(thetas) <= 1 and all(s == scalings[0] for s in scalings),
    f'rope_theta={sorted(thetas)}, rope_scaling={scalings}',
    'that rope_theta, rope_scaling and rope_parameters do not contradict',
  )
  return next(iter(thetas), 10_000.0), scalings[0]


def _rope_fields(field: str, rope: Mapping[str, Any], hf: Mapping[str, Any]):
  """(theta or None, RopeScaling fields or None) of one dict."""
  kind = rope.get('rope_type', rope.get('type', 'default'))
  good = kind in ('default', 'llama3')
  _require(good, f'{field}.rope_type={kind!r}', 'default or llama3')
  scaled = (*_LLAMA3, _ORIGINAL) if kind == 'llama3' else ()
  known = ('rope_type', 'type', 'rope_theta', *scaled)
  for name, value in rope.items():
    neutral = name == 'partial_rotary_factor' and value in _NEUTRAL[name]
    good, names = neutral or name in known, ', '.join(known)
    _require(good, f'{field}.{name}={value!r}', f'{kind}: {names}')
  values = {k: rope.get(k) or hf.get(k) for k in scaled}
  for name, value in values.items():
    good = isinstance(value, (int, float)) and value > 0
    _require(good, f'{field}.{name}={value!r}', 'a positive number')
  scaling = {k: float(values[k]) for k in _LLAMA3 if scaled}
  if scaled:
    scaling['original_max_position'] = int(values[_ORIGINAL])
  return rope.get('rope_theta'), scaling or None
