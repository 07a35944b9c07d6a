"""BERT in JAX: the network of MiniLM, e5, bge, contriever, gte and rerankers.

Weights come from a Hugging Face folder (config.json, *.safetensors) of model
type `bert` (Devlin et al., NAACL 2019): absolute positions, exact GELU,
post-layer-norm. The names and shapes of all tensors are checked.
"""

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


def read_json(path: pathlib.Path) -> Any:
  """Reads a JSON file of a checkpoint; ValueError if there is none."""
  fix = 'a model is a Hugging Face folder with its config.json'
  problem = f'{path}: not JSON ({{}}); {fix}'
  with convert((OSError, ValueError), ValueError, problem):
    return json.loads(path.read_text(encoding='utf-8'))


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
  usual = {'layer_norm_eps': 1e-12, 'type_vocab_size': 2, 'pad_token_id': 0}
  fields = {n: found.get(n, usual.get(n)) for n in BertConfig.__annotations__}
  for name, value in fields.items():
    number = isinstance(value, (int, float))
    if not number or value < 0 or value == 0 and name != 'pad_token_id':
      raise ValueError(f'{path}: {name}={value!r}; expected a number > 0')
  cfg = BertConfig(**fields)
  width, heads = cfg.hidden_size, cfg.num_attention_heads
  if width % heads:
    problem = f'hidden_size={width} is not a multiple of'
    raise ValueError(f'{path}: {problem} num_attention_heads={heads}')
  return cfg


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
  cfg, tensors = read_config(path), {}
  for file in weight_files(path):
    damaged = f'{file}: cut short or no safetensors file ({{}}); copy it again'
    with (
      convert(safetensors.SafetensorError, ValueError, damaged),
      safetensors.safe_open(file, 'np') as stored,
    ):
      tensors |= {name: stored.get_tensor(name) for name in stored.keys()}

  def take(name, *shape):
    problem = ''
    if name not in tensors:
      problem = 'is missing'
    elif (found := tensors[name].shape) != shape:
      problem = f'has shape {found}; the config requires {shape}'
    if problem:
      raise ValueError(f'{path}: tensor {name!r} {problem}')
    return tensors.pop(name).astype(dtype)

  prefix = 'bert.' if head else ''
  params = _assemble(cfg, take, prefix, head)
  ignored = tuple(prefix + name for name in _IGNORED)
  if surplus := [name for name in tensors if not name.startswith(ignored)]:
    problem = f'tensor {surplus[0]!r} is not part of this model (surplus)'
    raise ValueError(f'{path}: {problem}')
  return cfg, params


def shapes(cfg: BertConfig, dtype) -> dict[str, Any]:
  """Shapes of the parameters of `load`, without a checkpoint."""
  params = _assemble(cfg, lambda _, *shape: np.zeros(shape, dtype))
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)


def _assemble(cfg: BertConfig, take, prefix='', head=False) -> dict[str, Any]:
  """The parameters, of tensors take(name, *shape)."""
  h, wide = cfg.hidden_size, cfg.intermediate_size
  # The queries include the attention's 1 / sqrt(head size).
  scale = 1 / math.sqrt(h // cfg.num_attention_heads)

  def weights(name, out=h, size=h):
    return take(f'{name}.weight', out, size).T, take(f'{name}.bias', out)

  def linear(*args):
    return dict(zip('wb', weights(*args)))

  def norm(name):
    return {'w': take(f'{name}.weight', h), 'b': take(f'{name}.bias', h)}

  def layer(at):
    names = (f'{at}attention.self.{name}' for name in ('query', 'key', 'value'))
    q, k, v = map(weights, names)
    q = [x * scale for x in q]
    qkv = (np.concatenate(x, -1).astype(v[0].dtype) for x in zip(q, k, v))
    return {
      'qkv': dict(zip('wb', qkv)),
      'out': linear(f'{at}attention.output.dense'),
      'norm1': norm(f'{at}attention.output.LayerNorm'),
      'up': linear(f'{at}intermediate.dense', wide),
      'down': linear(f'{at}output.dense', h, wide),
      'norm2': norm(f'{at}output.LayerNorm'),
    }

  rows = {'word': cfg.vocab_size, 'position': cfg.max_position_embeddings}
  rows['token_type'] = cfg.type_vocab_size
  params: dict[str, Any] = {
    name: take(f'{prefix}embeddings.{name}_embeddings.weight', count, h)
    for name, count in rows.items()
  }
  params['norm'] = norm(f'{prefix}embeddings.LayerNorm')
  layers = range(cfg.num_hidden_layers)
  params['layers'] = [layer(f'{prefix}encoder.layer.{i}.') for i in layers]
  if head:
    params['pooler'] = linear('bert.pooler.dense')
    params['classifier'] = linear('classifier', 1)
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


def classify(params, cfg: BertConfig, ids, types, lengths):
  """The logit of each row, float32 [B], by pooler and classifier; traceable."""
  first = encode(params, cfg, ids, lengths, types)[:, 0]
  pooled = jnp.tanh(_linear(params['pooler'], first))
  return _linear(params['classifier'], pooled)[:, 0].astype(jnp.float32)
