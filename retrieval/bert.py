"""BERT in JAX: the network of MiniLM, e5, bge, contriever, gte and rerankers.

Weights come from a Hugging Face folder (config.json, *.safetensors) of model
type `bert` (Devlin et al., NAACL 2019): absolute positions, exact GELU,
post-layer-norm. The names and shapes of all tensors are checked.
"""

from collections.abc import Mapping
import dataclasses
import json
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors

from retrieval.files import convert

# The supported architecture; other values in a config.json are refused.
_ARCHITECTURE = {
  'model_type': 'bert',
  'hidden_act': 'gelu',
  'is_decoder': False,
  'position_embedding_type': 'absolute',
  'add_cross_attention': False,
}
# Tensors of checkpoints that an encoder does not use: a buffer, and the
# next-sentence head, which neither mean nor cls pooling reads.
_IGNORED = ('embeddings.position_ids', 'pooler.')


@dataclasses.dataclass(frozen=True)
class BertConfig:
  """The fields of config.json that shape the network."""

  vocab_size: int
  hidden_size: int
  num_hidden_layers: int
  num_attention_heads: int
  intermediate_size: int
  max_position_embeddings: int
  type_vocab_size: int
  layer_norm_eps: float
  pad_token_id: int


def read_json(path: pathlib.Path, kind: type = dict) -> Any:
  """Reads a JSON object (or list) from a file of a checkpoint.

  Raises:
    FileNotFoundError, ValueError: there is no file, or no such JSON in it.
  """
  if not path.exists():
    raise FileNotFoundError(
      f'{path}: no such file; a model is a Hugging Face folder with '
      'config.json, model.safetensors and tokenizer.json'
    )
  with convert(ValueError, ValueError, f'{path}: not JSON ({{}})'):
    value = json.loads(path.read_text(encoding='utf-8'))
  if not isinstance(value, kind):
    raise ValueError(f'{path}: expected a JSON {kind.__name__}')
  return value


def read_config(path: pathlib.Path) -> BertConfig:
  """Reads the config of a checkpoint folder.

  Raises:
    ValueError: another architecture, or a missing or invalid field.
  """
  path = path / 'config.json'
  found = read_json(path)
  for name, value in _ARCHITECTURE.items():
    other = found.get(name, None if name == 'model_type' else value)
    if other != value:
      problem = f'{name}={other!r}; only {value!r} is supported'
      raise ValueError(f'{path}: {problem}')
  fields = {'layer_norm_eps': 1e-12, 'type_vocab_size': 2, 'pad_token_id': 0}
  for name, kind in BertConfig.__annotations__.items():
    value, least = found.get(name, fields.get(name)), 1
    if kind is float:
      valid, expected = isinstance(value, float) and value > 0, 'a number > 0'
    else:
      least = 0 if name == 'pad_token_id' else 1
      valid = type(value) is int and value >= least
      expected = f'an integer >= {least}'
    if not valid:
      raise ValueError(f'{path}: {name}={value!r}; expected {expected}')
    fields[name] = value
  cfg = BertConfig(**fields)
  width, heads = cfg.hidden_size, cfg.num_attention_heads
  if width % heads:
    problem = f'hidden_size={width} is not a multiple of'
    raise ValueError(f'{path}: {problem} num_attention_heads={heads}')
  return cfg


def _shapes(cfg: BertConfig, prefix: str) -> dict[str, tuple[int, ...]]:
  """Name and shape of every tensor of the network."""
  h, wide = cfg.hidden_size, cfg.intermediate_size
  shapes = {
    'embeddings.word_embeddings.weight': (cfg.vocab_size, h),
    'embeddings.position_embeddings.weight': (cfg.max_position_embeddings, h),
    'embeddings.token_type_embeddings.weight': (cfg.type_vocab_size, h),
  }
  norms = ['embeddings.LayerNorm']
  linear = {}
  for i in range(cfg.num_hidden_layers):
    layer = f'encoder.layer.{i}.'
    for name in ('query', 'key', 'value'):
      linear[f'{layer}attention.self.{name}'] = (h, h)
    linear[f'{layer}attention.output.dense'] = (h, h)
    linear[f'{layer}intermediate.dense'] = (wide, h)
    linear[f'{layer}output.dense'] = (h, wide)
    norms += [f'{layer}attention.output.LayerNorm', f'{layer}output.LayerNorm']
  for name, shape in linear.items():
    shapes |= {f'{name}.weight': shape, f'{name}.bias': shape[:1]}
  for name in norms:
    shapes |= {f'{name}.weight': (h,), f'{name}.bias': (h,)}
  return {prefix + name: shape for name, shape in shapes.items()}


def weight_files(path: pathlib.Path) -> list[pathlib.Path]:
  """The safetensors files of a checkpoint folder, in order.

  Raises:
    FileNotFoundError: the folder has no such file.
  """
  files = sorted(path.glob('model*.safetensors'))
  if not files:
    fix = 'AutoModel.from_pretrained(path).save_pretrained(path)'
    problem = 'no model.safetensors; convert other weights with transformers'
    raise FileNotFoundError(f'{path}: {problem}: {fix}')
  return files


def load(
  path: pathlib.Path, dtype=np.float32, head: bool = False
) -> tuple[BertConfig, dict[str, Any]]:
  """Loads (config, parameters) of a checkpoint folder to the host.

  Args:
    path: the folder.
    dtype: of the parameters.
    head: whether the model is a BertForSequenceClassification of one label,
      with pooler and classifier, instead of a BertModel.

  Raises:
    FileNotFoundError, ValueError: see `read_config` and `weight_files`; or a
      tensor is missing, surplus or of another shape.
  """
  cfg = read_config(path)
  h = cfg.hidden_size
  prefix = 'bert.' if head else ''
  shapes = _shapes(cfg, prefix)
  if head:
    shapes |= {
      'bert.pooler.dense.weight': (h, h),
      'bert.pooler.dense.bias': (h,),
      'classifier.weight': (1, h),
      'classifier.bias': (1,),
    }
  tensors, ignored = {}, tuple(prefix + name for name in _IGNORED)
  for file in weight_files(path):
    damaged = f'{file}: cut short or no safetensors file ({{}}); copy it again'
    with (
      convert(safetensors.SafetensorError, ValueError, damaged),
      safetensors.safe_open(file, 'np') as stored,
    ):
      for name in stored.keys():  # noqa: SIM118, not a dict
        if name.startswith(ignored) and name not in shapes:
          continue
        shape, problem = tuple(stored.get_slice(name).get_shape()), ''
        if name not in shapes:
          problem = 'is not part of this model (surplus)'
        elif shape != shapes[name]:
          problem = f'has shape {shape}; the config requires {shapes[name]}'
        if problem:
          raise ValueError(f'{file}: tensor {name!r} {problem}')
        tensors[name] = stored.get_tensor(name).astype(dtype)
  for name in shapes:
    if name not in tensors:
      raise ValueError(f'{path}: tensor {name!r} is missing')
  return cfg, _arrange(cfg, tensors, prefix)


def _arrange(cfg: BertConfig, tensors: Mapping, prefix: str) -> dict[str, Any]:
  """Parameters for `encode`: [in, out], one matrix for q, k and v."""

  def weights(name, prefix=prefix):
    return tensors[f'{prefix}{name}.weight'].T, tensors[f'{prefix}{name}.bias']

  def linear(*args):
    return dict(zip('wb', weights(*args)))

  def qkv(attention):
    q, k, v = (weights(f'{attention}{n}') for n in ('query', 'key', 'value'))
    # The queries include the attention's 1 / sqrt(head size).
    scale = 1 / math.sqrt(cfg.hidden_size // cfg.num_attention_heads)
    q = [x * scale for x in q]
    w, b = (np.concatenate(x, -1).astype(x[1].dtype) for x in zip(q, k, v))
    return {'w': w, 'b': b}

  def layer(at):
    return {
      'qkv': qkv(f'{at}attention.self.'),
      'out': linear(f'{at}attention.output.dense'),
      'norm1': linear(f'{at}attention.output.LayerNorm'),
      'up': linear(f'{at}intermediate.dense'),
      'down': linear(f'{at}output.dense'),
      'norm2': linear(f'{at}output.LayerNorm'),
    }

  embeddings = {
    name: tensors[f'{prefix}embeddings.{name}_embeddings.weight']
    for name in ('word', 'position', 'token_type')
  }
  params = embeddings | {
    'norm': linear('embeddings.LayerNorm'),
    'layers': [
      layer(f'encoder.layer.{i}.') for i in range(cfg.num_hidden_layers)
    ],
  }
  if 'classifier.weight' in tensors:
    params['pooler'] = linear('pooler.dense')
    params['classifier'] = linear('classifier', '')
  return params


def _linear(p, x):
  # Some accelerators multiply float32 in lower precision by default.
  return jnp.dot(x, p['w'], precision='highest') + p['b']


def _norm(p, x, eps):
  x = x.astype(jnp.float32)
  mean = x.mean(-1, keepdims=True)
  variance = jnp.square(x - mean).mean(-1, keepdims=True)
  x = (x - mean) * jax.lax.rsqrt(variance + eps)
  return (x * p['w'] + p['b']).astype(p['w'].dtype)


def encode(params, cfg: BertConfig, ids, lengths, types=None):
  """Computes the last hidden states of a batch; traceable.

  Args:
    params: see `load`.
    cfg: the config.
    ids: int [B, T] token ids, padded on the right with any id.
    lengths: int [B], >= 1.
    types: int [B, T] token types; None: all 0.

  Returns:
    [B, T, H] in the dtype of the parameters; undefined past the lengths.
  """
  B, T = ids.shape
  heads, eps = cfg.num_attention_heads, cfg.layer_norm_eps
  types = params['token_type'][0 if types is None else types]
  x = params['word'][ids] + params['position'][:T] + types
  x = _norm(params['norm'], x, eps)
  inside = jnp.arange(T) < lengths[:, None]
  bias = jnp.where(inside, 0.0, -1e30)[:, None, None, :]
  for p in params['layers']:
    qkv = _linear(p['qkv'], x).reshape(B, T, 3, heads, -1)
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    options = {'precision': 'highest', 'preferred_element_type': jnp.float32}
    scores = jnp.einsum('bqhd,bkhd->bhqk', q, k, **options)
    weights = jax.nn.softmax(scores + bias, axis=-1).astype(x.dtype)
    mixed = jnp.einsum('bhqk,bkhd->bqhd', weights, v, precision='highest')
    x = _norm(p['norm1'], x + _linear(p['out'], mixed.reshape(B, T, -1)), eps)
    inner = jax.nn.gelu(_linear(p['up'], x), approximate=False)
    x = _norm(p['norm2'], x + _linear(p['down'], inner), eps)
  return x


def classify(params, cfg: BertConfig, ids, lengths, types):
  """The logit of each row, float32 [B], by pooler and classifier; traceable."""
  first = encode(params, cfg, ids, lengths, types)[:, 0]
  pooled = jnp.tanh(_linear(params['pooler'], first))
  return _linear(params['classifier'], pooled)[:, 0].astype(jnp.float32)
