"""LoRA (Hu et al. 2021, arXiv 2106.09685): adapters of a frozen decoder.

`DecoderConfig.lora` names the projections with an adapter; a parameter tree
then has, for each of them, `layers/q_lora_a` [L, *input, rank] and
`layers/q_lora_b` [L, rank, *output] beside `layers/q`. A starts random and B at
0, so a fresh adapter changes nothing.

Adapters are read and written as PEFT does (adapter_config.json and
adapter_model.safetensors).
"""

from collections.abc import Mapping
import dataclasses
import json
import math
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from searchrl_jax import lookup
from searchrl_jax.models import decoder, families, hf_tensors
from searchrl_jax.models.decoder import DecoderConfig, Lora
from searchrl_jax.store import folders

CONFIG = 'adapter_config.json'
WEIGHTS = 'adapter_model.safetensors'
_PREFIX = 'base_model.model.'  # of PEFT's tensor names
_TEXT, _WRAPPED = 'model.layers.', 'model.language_model.layers.'
# Fields of an adapter_config.json that change the computation -> the values
# that are implemented. Any other field has to be in _IGNORED, or off.
_NEUTRAL = {
  'peft_type': ('LORA',),
  'bias': (None, 'none'),
  'use_rslora': (None, False),
  'use_dora': (None, False),
  'fan_in_fan_out': (None, False),
  'modules_to_save': (None, []),
  'rank_pattern': (None, {}),
  'alpha_pattern': (None, {}),
  'layers_to_transform': (None,),
  'layer_replication': (None,),
  'target_parameters': (None, []),
  'trainable_token_indices': (None,),
  'alora_invocation_tokens': (None,),
  'use_qalora': (None, False),
  'lora_bias': (None, False),
  'ensure_weight_tying': (None, False),
  # Those that leave the base as it is. Others (pissa, olora, corda, loftq,
  # lora_ga) take from it what the fresh adapter adds.
  'init_lora_weights': (None, False, 'gaussian', 'eva', 'orthogonal', True),
}
_IGNORED = frozenset(
  """
  auto_mapping base_model_name_or_path corda_config eva_config exclude_modules
  inference_mode layers_pattern lora_alpha lora_dropout lora_ga_config
  loftq_config megatron_config megatron_core peft_version qalora_group_size r
  revision runtime_config target_modules task_type
  """.split()
)


def parse(fields, dtype: str, cfg: DecoderConfig) -> Lora | None:
  """Of config.model.lora; None if its rank is 0.

  Args:
    dtype: of the frozen parameters, where the config names none.
    cfg: the model without adapters.

  Raises:
    ConfigError: a regex that matches no projection, or an unknown dtype.
  """
  if not fields.rank:
    return None
  known = decoder.projections(cfg)
  where = f'config.model.lora.target={fields.target!r}'
  with lookup.of(where, caught=re.error):
    found = [n for n in known if re.fullmatch(fields.target, n)]
  names = ', '.join(known)
  message = f'{where} matches no projection whole; there are: {names}'
  lookup.require(found, message)
  return Lora(fields.rank, fields.alpha, tuple(found), fields.dtype or dtype)


def base(cfg: DecoderConfig) -> DecoderConfig:
  """The same model without adapters."""
  return dataclasses.replace(cfg, lora=None)


def split(cfg: DecoderConfig, tree: dict) -> tuple[dict, dict]:
  """(what is trained, what is frozen) of parameters, shapes or layouts.

  Without adapters, everything is trained, and {} is frozen. A critic's head is
  trained.
  """
  if cfg.lora is None:
    return tree, {}
  fixed = decoder.param_table(base(cfg))
  parts: tuple[dict, dict] = ({}, {})
  for name, x in decoder.flatten(tree).items():
    parts[name in fixed][name] = x
  return decoder.nest(parts[0]), decoder.nest(parts[1])


def join(trained: dict, frozen: dict | None) -> dict:
  """The inverse of `split`; copies no array."""
  if not frozen:
    return trained
  return decoder.nest(decoder.flatten(trained) | decoder.flatten(frozen))


def dtypes(cfg: DecoderConfig) -> dict[str, str]:
  """The dtype of each frozen parameter; others are float32."""
  fixed = decoder.param_table(base(cfg)) if cfg.lora else {}
  return {name: families.dtype_of(name, cfg.lora.dtype) for name in fixed}


def init(cfg: DecoderConfig, key, mesh=None) -> dict:
  """Fresh adapters: A is normal with variance 1 / inputs, B is 0."""

  def fresh():
    flat = {}
    for i, (name, (shape, _)) in enumerate(adapter_table(cfg).items()):
      flat[name] = jnp.zeros(shape, jnp.float32)
      if name.endswith('a'):
        normal = jax.random.normal(jax.random.fold_in(key, i), shape)
        flat[name] = normal / math.sqrt(math.prod(shape[1:-1]))
    return decoder.nest(flat)

  return jax.jit(fresh, out_shardings=_layout(cfg, mesh))()


def adapter_table(cfg: DecoderConfig) -> dict:
  """The adapters' part of `decoder.param_table`."""
  return decoder.flatten(split(cfg, decoder.nest(decoder.param_table(cfg)))[0])


def _layout(cfg: DecoderConfig, mesh):
  return mesh and split(cfg, decoder.param_shardings(cfg, mesh))[0]


def freeze(cfg: DecoderConfig, params: dict) -> dict:
  """Parameters of `base(cfg)` in the dtype of frozen ones."""
  flat, kinds = decoder.flatten(params), dtypes(cfg)
  return decoder.nest({k: x.astype(kinds[k]) for k, x in flat.items()})


def merge(cfg: DecoderConfig, params: dict) -> dict:
  """float32 parameters of `base(cfg)`: W + scale A B in place of W.

  Without adapters, `params`.
  """
  if cfg.lora is None:
    return params
  adapters, frozen = split(cfg, params)

  def product(a, b):  # [*I, r], [r, *O] -> [*I, *O]
    return cfg.lora.scale * jnp.tensordot(a, b, 1, precision='highest')

  @jax.jit
  def whole(adapters, frozen):
    flat, low = decoder.flatten(frozen), decoder.flatten(adapters)
    flat = {name: x.astype(jnp.float32) for name, x in flat.items()}
    for target in cfg.lora.targets:
      name = f'layers/{target}'
      a, b = low[f'{name}_lora_a'], low[f'{name}_lora_b']
      flat[name] = flat[name] + jax.vmap(product)(a, b)
    return decoder.nest(flat)

  return whole(adapters, frozen)


def served(cfg: DecoderConfig, params: dict) -> tuple[DecoderConfig, dict]:
  """The same model with the scale in B, as engines take it.

  Servers multiply B by alpha / rank when they load it; with the product
  published, and a scale of 1, what they hold has the published checksums.
  params: of the model, or adapters alone.
  """
  if cfg.lora is None:
    return cfg, params
  scale = cfg.lora.scale
  flat = {
    name: x * scale if name.endswith('_lora_b') else x
    for name, x in decoder.flatten(params).items()
  }
  own = dataclasses.replace(cfg.lora, alpha=float(cfg.lora.rank))
  return dataclasses.replace(cfg, lora=own), decoder.nest(flat)


# PEFT's files.


def tensor_table(cfg: DecoderConfig) -> dict[str, hf_tensors.Tensor]:
  """Every tensor of an adapter by PEFT's name."""
  shapes = decoder.shapes_of(adapter_table(cfg))
  found = hf_tensors.table(shapes, families.fields(cfg))
  return {_PREFIX + name: tensor for name, tensor in found.items()}


def save(
  path,
  cfg: DecoderConfig,
  adapters: dict,
  *,
  dtype='float32',
  model='',
  wrapped=False,
  files: Mapping[str, str] | None = None,
):
  """Writes a folder that PEFT and vLLM load, whose name appears when complete.

  Args:
    adapters: as `split` returns them.
    dtype: of the stored tensors.
    model: name or folder of the base model, for PEFT.
    wrapped: the base model holds the text model beside others, as Gemma 3 from
      4B on does; adapters of the text model alone are then not found.
    files: name -> text of further files.

  Raises:
    FileExistsError: `path` exists.
  """
  path, host = pathlib.Path(path), {}
  if path.exists():
    raise FileExistsError(f'{path} exists; remove it or choose another')
  flat = jax.device_get(decoder.flatten(adapters))
  table = tensor_table(cfg)
  for name, tensor in table.items():
    x = tensor.to_hf(flat[tensor.path][tensor.layer])
    name = name.replace(_TEXT, _WRAPPED, 1) if wrapped else name
    host[name] = np.ascontiguousarray(x, np.dtype(dtype))
  modules = sorted({name.split('.')[-3] for name in table})
  fields = {
    'peft_type': 'LORA',
    'task_type': 'CAUSAL_LM',
    'base_model_name_or_path': model,
    'r': cfg.lora.rank,
    'lora_alpha': cfg.lora.alpha,
    'target_modules': rf'.*\.language_model\..*\.({"|".join(modules)})'
    if wrapped
    else modules,
    'lora_dropout': 0.0,
    'bias': 'none',
    'use_rslora': False,
    'use_dora': False,
    'fan_in_fan_out': False,
    'inference_mode': True,
  }
  texts = {CONFIG: json.dumps(fields, indent=2) + '\n', **(files or {})}
  with folders.beside(path) as part:
    safetensors.numpy.save_file(host, part / WEIGHTS, {'format': 'pt'})
    for name, text in texts.items():
      (part / name).write_text(text, encoding='utf-8')
    part.rename(path)


def load(path, cfg: DecoderConfig, mesh=None) -> dict:
  """The adapters of a PEFT folder, float32.

  Raises:
    ValueError: it is of another rank, alpha or set of projections, has a tensor
      that is missing, surplus or of another shape, or a variant of LoRA that is
      not implemented; the message names it.
    FileNotFoundError: it is no such folder.
  """
  about, weights = (pathlib.Path(path, name) for name in (CONFIG, WEIGHTS))
  for file, fix in (
    (about, 'give a folder that PEFT wrote'),
    (weights, 'load other formats (.bin) with PEFT and call save_pretrained'),
  ):
    message = f'{file}: no such file; {fix}'
    lookup.require(file.exists(), message, FileNotFoundError)
    lookup.require_content(file)
  with lookup.of(f'{about}: not JSON'):
    fields = json.loads(about.read_text())
  _check_fields(about, fields, cfg.lora)
  cut = f'{weights}: truncated or malformed'
  with lookup.of(cut, ValueError, safetensors.SafetensorError):
    stored = safetensors.numpy.load_file(weights)
  stored = {k.replace(_WRAPPED, _TEXT, 1): v for k, v in stored.items()}
  table, shapes = tensor_table(cfg), decoder.shapes_of(adapter_table(cfg))
  want = {name: tensor.shape for name, tensor in table.items()}
  decoder.check_shapes(f'{weights}: tensor', stored, want)
  flat = {path: np.empty(s, np.float32) for path, s in shapes.items()}
  for name, tensor in table.items():
    flat[tensor.path][tensor.layer] = tensor.to_ours(stored[name])
  return jax.device_put(decoder.nest(flat), _layout(cfg, mesh))


def _check_fields(file, fields: Mapping[str, Any], lora: Lora) -> None:
  moved = (
    '. It may have changed the base model: save it by PEFT with '
    'path_initial_model_for_weight_conversion'
  )
  for name, known in _NEUTRAL.items():
    value = fields.get(name)
    wanted = ' or '.join(map(repr, known))
    message = f'{file}: {name}={value!r} is not supported; expected {wanted}'
    message += moved if name == 'init_lora_weights' else ''
    lookup.require(value in known, message)
  # What PEFT adds to LoRA is off where a field is empty.
  for name in fields.keys() - _NEUTRAL.keys() - _IGNORED:
    message = f'{file}: {name}={fields[name]!r} is not known; expected none'
    lookup.require(not fields[name], message)
  for name, field in (('r', 'rank'), ('lora_alpha', 'alpha')):
    value, wanted = fields.get(name), getattr(lora, field)
    ours = f'config.model.lora.{field}={wanted}: make them equal'
    lookup.require(value == wanted, f'{file}: {name}={value!r}, and {ours}')
