"""BERT in JAX: the network of MiniLM, e5, bge, contriever, gte and rerankers.

Weights come from a Hugging Face folder (config.json, *.safetensors) of model
type `bert` (Devlin et al., NAACL 2019): absolute positions, exact GELU,
post-layer-norm. Every tensor is accounted for before the first is used.
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

# What this network does; a config.json that asks for more is refused.
_ARCHITECTURE = {
  'model_type': 'bert',
  'hidden_act': 'gelu',
  'is_decoder': False,
  'position_embedding_type': 'absolute',
  'add_cross_attention': False,
}
# In checkpoints, but no weight of an encoder: a buffer, and the next-sentence
# head, which neither mean nor cls pooling reads.
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
  """A JSON object (or list) from a file of a checkpoint.

  Raises:
    FileNotFoundError, ValueError: there is none, or it is no such JSON.
  """
  try:
    value = json.loads(path.read_text(encoding='utf-8'))
  except FileNotFoundError:
    raise FileNotFoundError(
      f'{path}: no such file; a model is a Hugging Face folder with '
      'config.json, model.safetensors and tokenizer.json'
    ) from None
  except ValueError as error:
    raise ValueError(f'{path}: not JSON ({error})') from None
  if not isinstance(value, kind):
    raise ValueError(f'{path}: expected a JSON {kind.__name__}')
  return value


def read_config(path: pathlib.Path) -> BertConfig:
  """The config of a checkpoint folder.

  Raises:
    ValueError: another architecture, or a field that is missing or wrong.
  """
  path = path / 'config.json'
  found = read_json(path)
  for name, value in _ARCHITECTURE.items():
    if found.get(name, value if name != 'model_type' else None) != value:
      raise ValueError(
        f'{path}: {name}={found.get(name)!r}; this encoder has {value!r} only'
      )
  fields = {'layer_norm_eps': 1e-12, 'type_vocab_size': 2, 'pad_token_id': 0}
  for field in dataclasses.fields(BertConfig):
    value = found.get(field.name, fields.get(field.name))
    whole = isinstance(value, int) and not isinstance(value, bool)
    small = 0 if field.name == 'pad_token_id' else 1
    if not (
      isinstance(value, float) and value > 0
      if field.type is float
      else whole and value >= small
    ):
      raise ValueError(
        f'{path}: {field.name}={value!r}; expected a number > 0'
        if field.type is float
        else f'{path}: {field.name}={value!r}; expected an integer >= {small}'
      )
    fields[field.name] = value
  cfg = BertConfig(**fields)
  if cfg.hidden_size % cfg.num_attention_heads:
    raise ValueError(
      f'{path}: hidden_size={cfg.hidden_size} is no multiple of '
      f'num_attention_heads={cfg.num_attention_heads}'
    )
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
    FileNotFoundError: there is none.
  """
  files = sorted(path.glob('model*.safetensors'))
  if not files:
    raise FileNotFoundError(
      f'{path}: no model.safetensors; convert other weights with '
      'transformers: AutoModel.from_pretrained(path).save_pretrained(path)'
    )
  return files


def load(
  path: pathlib.Path, dtype=np.float32, head: bool = False
) -> tuple[BertConfig, dict[str, Any]]:
  """(config, parameters) of a checkpoint folder, on the host.

  Args:
    path: the folder.
    dtype: of the parameters.
    head: a BertForSequenceClassification of one label, whose pooler and
      classifier are read too, rather than a BertModel.

  Raises:
    FileNotFoundError, ValueError: see `read_config` and `weight_files`; or a
      tensor that is missing, surplus or of another shape, by name.
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
  tensors = {}
  for file in weight_files(path):
    try:
      with safetensors.safe_open(file, 'np') as stored:
        for name in stored.keys():  # noqa: SIM118, not a dict
          if name in shapes:
            tensors[name] = _tensor(file, stored, name, shapes[name], dtype)
          elif not name.startswith(tuple(prefix + n for n in _IGNORED)):
            raise ValueError(
              f'{file}: tensor {name!r} has no place in this model (surplus)'
            )
    except safetensors.SafetensorError as error:
      raise ValueError(
        f'{file}: cut short or no safetensors file ({error}); copy it again'
      ) from None
  for name in shapes:
    if name not in tensors:
      raise ValueError(f'{path}: tensor {name!r} is missing')
  return cfg, _arrange(cfg, tensors, prefix)


def _tensor(file, stored, name, shape, dtype) -> np.ndarray:
  found = tuple(stored.get_slice(name).get_shape())
  if found != shape:
    raise ValueError(
      f'{file}: tensor {name!r} has shape {found}; the config asks for {shape}'
    )
  return stored.get_tensor(name).astype(dtype)


def _arrange(cfg: BertConfig, tensors: Mapping, prefix: str) -> dict[str, Any]:
  """Parameters as `encode` wants them: [in, out], one matrix for q, k, v."""

  def linear(*names, scale=1.0):
    weights = [tensors[f'{prefix}{name}.weight'].T for name in names]
    biases = [tensors[f'{prefix}{name}.bias'] for name in names]
    dtype = biases[0].dtype
    # The queries carry the attention's 1 / sqrt(head size).
    weights[0], biases[0] = weights[0] * scale, biases[0] * scale
    return {
      'w': np.concatenate(weights, 1).astype(dtype),
      'b': np.concatenate(biases).astype(dtype),
    }

  def norm(name):
    return {
      'w': tensors[f'{prefix}{name}.weight'],
      'b': tensors[f'{prefix}{name}.bias'],
    }

  scale = 1 / math.sqrt(cfg.hidden_size // cfg.num_attention_heads)
  layers = []
  for i in range(cfg.num_hidden_layers):
    layer = f'encoder.layer.{i}.'
    self = f'{layer}attention.self.'
    layers.append(
      {
        'qkv': linear(
          self + 'query', self + 'key', self + 'value', scale=scale
        ),
        'out': linear(f'{layer}attention.output.dense'),
        'norm1': norm(f'{layer}attention.output.LayerNorm'),
        'up': linear(f'{layer}intermediate.dense'),
        'down': linear(f'{layer}output.dense'),
        'norm2': norm(f'{layer}output.LayerNorm'),
      }
    )
  params = {
    name: tensors[f'{prefix}embeddings.{name}_embeddings.weight']
    for name in ('word', 'position', 'token_type')
  }
  params |= {'norm': norm('embeddings.LayerNorm'), 'layers': layers}
  if 'classifier.weight' in tensors:
    params['pooler'] = linear('pooler.dense')
    params['classifier'] = {
      'w': tensors['classifier.weight'].T,
      'b': tensors['classifier.bias'],
    }
  return params


def _linear(p, x):
  # HIGHEST: some accelerators multiply float32 in lower precision unless told.
  return jnp.dot(x, p['w'], precision='highest') + p['b']


def _norm(p, x, eps):
  x = x.astype(jnp.float32)
  mean = x.mean(-1, keepdims=True)
  variance = jnp.square(x - mean).mean(-1, keepdims=True)
  x = (x - mean) * jax.lax.rsqrt(variance + eps)
  return (x * p['w'] + p['b']).astype(p['w'].dtype)


def encode(params, cfg: BertConfig, ids, lengths, types=None):
  """Last hidden states of a batch; traceable.

  Args:
    params: see `load`.
    ids: int [B, T] token ids, padded on the right with any.
    lengths: int [B], >= 1.
    types: int [B, T] token types; None: all 0.

  Returns:
    [B, T, H] in the dtype of the parameters; rubbish past the lengths.
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
    scores = jnp.einsum(
      'bqhd,bkhd->bhqk',
      q,
      k,
      precision='highest',
      preferred_element_type=jnp.float32,
    )
    weights = jax.nn.softmax(scores + bias, axis=-1).astype(x.dtype)
    mixed = jnp.einsum('bhqk,bkhd->bqhd', weights, v, precision='highest')
    x = _norm(p['norm1'], x + _linear(p['out'], mixed.reshape(B, T, -1)), eps)
    inner = jax.nn.gelu(_linear(p['up'], x), approximate=False)
    x = _norm(p['norm2'], x + _linear(p['down'], inner), eps)
  return x


def classify(params, cfg: BertConfig, ids, lengths, types):
  """The logit of each row, float32 [B]: pooler and one label; traceable."""
  first = encode(params, cfg, ids, lengths, types)[:, 0]
  pooled = jnp.tanh(_linear(params['pooler'], first))
  return _linear(params['classifier'], pooled)[:, 0].astype(jnp.float32)
