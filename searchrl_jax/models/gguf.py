"""GGUF files (llama.cpp's format) as Hugging Face folders.

Weights are de-quantised by the library `gguf`, which is optional (`pip install
searchrl_jax[gguf]`); the tokenizer is made by transformers from the file's
vocabulary. Nothing of a file that changes the computation is ignored: other
families, fields and tensors are refused by name.
"""

import functools
import json
import pathlib
from typing import Any

import numpy as np

from searchrl_jax import lookup
from searchrl_jax.models import families, hf_config, hf_tensors, pretrained

VERSION = 2  # of what `to_folder` makes of a file
_FAMILIES = {
  'llama': 'llama',
  'qwen2': 'qwen2',
  'qwen3': 'qwen3',
  'gemma3': families.GEMMA,
}
# Fields of a config.json, of the file's fields after the architecture's name.
_FIELDS = {
  'hidden_size': 'embedding_length',
  'num_hidden_layers': 'block_count',
  'intermediate_size': 'feed_forward_length',
  'num_attention_heads': 'attention.head_count',
  'num_key_value_heads': 'attention.head_count_kv',
  'head_dim': 'attention.key_length',
  'rms_norm_eps': 'attention.layer_norm_rms_epsilon',
  'rope_theta': 'rope.freq_base',
  'max_position_embeddings': 'context_length',
}
_LOCAL = {'sliding_window': 'attention.sliding_window'}
_SCALING = {'rope_type': 'rope.scaling.type', 'factor': 'rope.scaling.factor'}
# Fields that change nothing, or that are checked or written with others.
_KNOWN = {
  *_FIELDS.values(),
  *_SCALING.values(),
  'attention.value_length',
  'rope.dimension_count',
  'rope.scaling.finetuned',
  'vocab_size',
}
# Of byte-level tokenizers, those whose texts begin with a token where the file
# does not say so, as in llama.cpp.
_WITH_BOS = (
  *('llama3', 'llama-v3', 'llama-bpe', 'falcon3', 'falcon-h1', 'pixtral'),
  *('tekken', 'midm-2.0', 'lfm2', 'jina-v5-nano'),
)
# Our parameters -> tensors of the file.
_NAMES = {
  'embed': 'token_embd.weight',
  'final_norm': 'output_norm.weight',
  'head': 'output.weight',
  'attn_norm': 'attn_norm.weight',
  **{f'{x}': f'attn_{x}.weight' for x in 'qkv'},
  **{f'{x}_bias': f'attn_{x}.bias' for x in 'qkv'},
  **{f'{x}_norm': f'attn_{x}_norm.weight' for x in 'qk'},
  'o': 'attn_output.weight',
  'attn_post_norm': 'post_attention_norm.weight',
  'mlp_norm': 'ffn_norm.weight',
  'mlp_post_norm': 'post_ffw_norm.weight',
  **{x: f'ffn_{x}.weight' for x in ('gate', 'up', 'down')},
}
EMBEDDING = _NAMES['embed']
_TOKENS = 'tokenizer.ggml.'
_SPECIAL = {
  'bos_token': 'bos_token_id',
  'eos_token': 'eos_token_id',
  'unk_token': 'unknown_token_id',
  'pad_token': 'padding_token_id',
}


def to_folder(file, out, dtype: str = 'float32') -> None:
  """Writes a GGUF file as a Hugging Face folder, which appears when complete.

  Args:
    file: its path.
    out: the folder.
    dtype: of the stored tensors; float32 keeps every value of the file.

  Raises:
    FileExistsError: `out` exists.
    ValueError: no GGUF file, a truncated one, or one of a family, with a field,
      a tensor or a quantisation that is not known; the message names it.
    OSError: the disk.
  """
  file = pathlib.Path(file)
  fields, tensors = read(file)
  with lookup.of(str(file)):
    config = config_of(fields, tensors)
    cfg = pretrained.decoder_config(config)
    table = pretrained.tensor_table(cfg)
    stored = _match(table, tensors)

  def read_one(name: str) -> np.ndarray:
    found = stored[name]
    return weights(cfg, table[name], found.data, found.tensor_type)

  write = functools.partial(_write_tokenizer, fields)
  pretrained.write_folder(out, config, table, read_one, dtype, write)


def _library():
  try:
    import gguf
  except ImportError as e:
    raise lookup.ConfigError(
      'a GGUF file needs the library gguf: pip install "gguf>=0.17"'
    ) from e
  return gguf


def read(file: pathlib.Path):
  """(fields by name, tensors by name) of a file."""
  gguf, found = _library(), f'{file}: a truncated or malformed GGUF file'
  lookup.require(file.is_file(), f'{file}: no such file', FileNotFoundError)
  lookup.require_content(file)
  # The library checks nothing: a file that is cut fails in NumPy.
  cut = (ValueError, IndexError, KeyError, TypeError, OverflowError)
  with lookup.of(found, ValueError, cut):
    reader = gguf.GGUFReader(file)
    fields = {k: x.contents() for k, x in reader.fields.items()}
    tensors = {x.name: x for x in reader.tensors}
  lookup.require(
    fields.get('split.count', 0) <= 1,  # 0 in a file that was joined
    f'{file}: one of {fields.get("split.count")} parts of a model; join them '
    'with `llama-gguf-split --merge`',
  )
  return fields, tensors


def config_of(fields: dict[str, Any], tensors) -> dict[str, Any]:
  """The config.json of a file's fields and tensors (only their names count)."""
  name = fields.get('general.architecture')
  known = ', '.join(_FAMILIES)
  lookup.require(
    name in _FAMILIES,
    f'general.architecture={name!r} is not supported; expected one of {known}',
  )
  family = _FAMILIES[name]
  # Of float32, such as 9.99999997e-07, as it is written in a config.json.
  plain = lambda v: float(f'{v:.7g}') if isinstance(v, float) else v
  own = {
    k.removeprefix(f'{name}.'): plain(v)
    for k, v in fields.items()
    if k.startswith(f'{name}.')
  }
  wanted = _FIELDS | (_LOCAL if family == families.GEMMA else {})
  for field, value in own.items():
    lookup.require(
      field in _KNOWN or field in wanted.values(),
      f'{name}.{field}={value!r} is not supported; expected no such field',
    )
  out = {'model_type': family}
  out |= {k: own[v] for k, v in wanted.items() if v in own}
  heads, width = out['num_attention_heads'], out['hidden_size']
  # Written where it is not d_model / heads, in place of the family's default.
  size = out.setdefault('head_dim', width // heads)
  for field in ('attention.value_length', 'rope.dimension_count'):
    value = own.get(field, size)
    lookup.require(
      value == size, f'{name}.{field}={value} is not supported; expected {size}'
    )
  scaling = {k: own[v] for k, v in _SCALING.items() if v in own}
  if 'factor' in scaling:  # a factor alone is linear, as in llama.cpp
    scaling.setdefault('rope_type', 'linear')
  if scaling.get('rope_type', 'none') != 'none':
    out['rope_scaling'] = scaling
  out['vocab_size'] = len(fields[f'{_TOKENS}tokens'])
  out['tie_word_embeddings'] = _NAMES['head'] not in tensors
  if family == families.GEMMA:
    # Not in the file; llama.cpp too tells the 27B by its layers.
    large = out['num_hidden_layers'] == 62
    out['query_pre_attn_scalar'] = width // heads if large else size
  ids = {f'{name}_id': i for name, i in _special(fields).items()}
  full = hf_config.parse_config(out)
  return hf_config.format_config(full, like={**out, **ids})


def _special(fields: dict[str, Any]) -> dict[str, int]:
  """Name -> id of the special tokens that a file has."""
  found = {name: fields.get(_TOKENS + key) for name, key in _SPECIAL.items()}
  return {name: i for name, i in found.items() if i is not None}


def name_of(tensor: hf_tensors.Tensor) -> str:
  """Of a tensor of ours, in the file."""
  name = _NAMES[tensor.path.split('/')[-1]]
  return name if tensor.layer is None else f'blk.{tensor.layer}.{name}'


def _match(table: dict[str, hf_tensors.Tensor], tensors) -> dict[str, Any]:
  """The file's tensor of each of the model's."""
  lookup.require(
    'rope_freqs.weight' not in tensors,
    "tensor 'rope_freqs.weight' is not supported: the file holds the scaled "
    'RoPE of Llama 3.1 as numbers, not as fields of a config.json; take the '
    "model's Hugging Face folder",
  )
  out = {}
  for name, tensor in table.items():
    theirs = name_of(tensor)
    found = tensors.get(theirs)
    shape = found and tuple(int(n) for n in reversed(found.shape))
    asks = f'has shape {shape}; the config asks for {tensor.shape}'
    lookup.require(shape == tensor.shape, f'tensor {theirs!r} {asks}')
    out[name] = found
  surplus = tensors.keys() - {x.name for x in out.values()}
  lookup.require(not surplus, f'tensors that are not known: {sorted(surplus)}')
  gguf = _library()
  for x in out.values():
    try:
      row = x.data.reshape(-1, x.data.shape[-1])[:1]
      gguf.quants.dequantize(row, x.tensor_type)
    except NotImplementedError as e:
      what = f'tensor {x.name!r} has the quantisation {x.tensor_type.name}'
      raise ValueError(f'{what}, which the library gguf cannot read') from e
  return out


def weights(cfg, tensor: hf_tensors.Tensor, raw, kind) -> np.ndarray:
  """A tensor in Hugging Face's layout, float32.

  raw: as the file has it. kind: a gguf.GGMLQuantizationType, or its number.
  """
  gguf = _library()
  x = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(kind))
  x = x.reshape(tensor.shape)
  name = tensor.path.split('/')[-1]
  if name.endswith('norm'):
    return x - np.float32(cfg.traits.norm_offset)
  if cfg.family == 'llama' and name in ('q', 'k'):
    # llama.cpp rotates neighbours, and has the halves of a head interleaved.
    heads = cfg.n_heads if name == 'q' else cfg.n_kv_heads
    x = x.reshape(heads, -1, 2, tensor.shape[1]).swapaxes(1, 2)
  return np.ascontiguousarray(x.reshape(tensor.shape))


def _write_tokenizer(fields: dict[str, Any], folder: pathlib.Path) -> None:
  """Writes the tokenizer's files, and which tokens end a turn."""
  import transformers
  from transformers.integrations.gguf import gguf_tokenizer_mapping as mapping

  names = mapping.GGUF_TOKENIZER_MAPPING['tokenizer'].items()
  about = {
    own: fields[f'tokenizer.{k}']
    for k, own in names
    if f'tokenizer.{k}' in fields
  }
  kind, pre = fields[f'{_TOKENS}model'], fields.get(f'{_TOKENS}pre', 'default')
  known = {'default', *mapping.GGUF_PRE_TOKENIZER_SPLITS}
  lookup.require(
    kind != 'gpt2' or pre in known,
    f'{_TOKENS}pre={pre!r} is not supported; expected one of '
    f'{", ".join(sorted(known))}',
  )
  backend, _ = mapping.convert_gguf_tokenizer(
    fields['general.architecture'], about
  )
  tokens = fields[f'{_TOKENS}tokens']
  special = {name: tokens[i] for name, i in _special(fields).items()}
  begins = kind == 'llama' or (pre in _WITH_BOS and 'bos_token' in special)
  if fields.get(f'{_TOKENS}add_bos_token', begins):
    from tokenizers import processors

    bos = special['bos_token']
    backend.post_processor = processors.TemplateProcessing(
      single=f'{bos} $A',
      pair=f'{bos} $A {bos} $B:1',
      special_tokens=[(bos, fields[f'{_TOKENS}bos_token_id'])],
    )
  hf = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special)
  hf.chat_template = fields.get('tokenizer.chat_template')
  hf.save_pretrained(folder)
  ends = [fields.get(f'{_TOKENS}{x}_token_id') for x in ('eos', 'eot')]
  ends = list(dict.fromkeys(i for i in ends if i is not None))
  text = json.dumps({'eos_token_id': ends}) + '\n'
  (folder / 'generation_config.json').write_text(text)
