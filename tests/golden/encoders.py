"""Tiny BERT checkpoints of every family, made by numpy and a seed alone.

As in models.py: names and shapes are written out by hand, so that a mistake
in the package's table cannot hide on both sides.
"""

import json
import pathlib

import numpy as np
import safetensors.numpy
import tokenizers

VOCAB = (
  '[PAD]',
  '[UNK]',
  '[CLS]',
  '[SEP]',
  '[MASK]',
  *'abcdefghijklmnopqrstuvwxyz0123456789?!:,.',
  *(f'##{c}' for c in 'abcdefghijklmnopqrstuvwxyz0123456789'),
  'who',
  'what',
  'when',
  'wrote',
  'the',
  'of',
  'is',
  'a',
  'in',
  'was',
  'play',
  'query',
  'passage',
  'hamlet',
  'king',
  'denmark',
  'capital',
  'first',
  'won',
)
CONFIG = {
  'model_type': 'bert',
  'architectures': ['BertModel'],
  'vocab_size': len(VOCAB),
  'hidden_size': 32,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'intermediate_size': 64,
  'hidden_act': 'gelu',
  'max_position_embeddings': 128,
  'type_vocab_size': 2,
  'layer_norm_eps': 1e-12,
  'pad_token_id': 0,
  'hidden_dropout_prob': 0.1,
  'attention_probs_dropout_prob': 0.1,
}
# folder -> (family, fields of config.json)
CHECKPOINTS = {
  'all-MiniLM-tiny': ('minilm', {}),
  'e5-tiny-v2': (
    'e5',
    {'_name_or_path': 'someone/MiniLM-base', 'num_attention_heads': 2},
  ),
  'bge-tiny-en-v1.5': ('bge', {'layer_norm_eps': 1e-5}),
  'contriever': ('contriever', {'intermediate_size': 48}),
  'gte-tiny': ('gte', {'num_hidden_layers': 3}),
}
RERANKER = 'ms-marco-MiniLM-tiny'

QUERIES = (
  'who wrote hamlet',
  'a',
  '',
  'What is the capital of Denmark?',
  'who won the first nobel prize in physics in 1901, and what was it for?',
)
PASSAGES = (
  '"Hamlet"\nHamlet is a play of a king in Denmark.',
  '"Denmark"\nThe capital of Denmark is Copenhagen. ' + 'the king won. ' * 20,
  '',
  'x' * 300,
  'Caf\u00e9 \u6771\u4eac \u2014 \x00 play',
)
PAIRS = tuple((q, p) for q in QUERIES for p in PASSAGES)
QUERY_LENGTH, PASSAGE_LENGTH, PAIR_LENGTH = 96, 48, 72


def tensors(config, head: bool = False) -> dict[str, np.ndarray]:
  """Weights by their names in a checkpoint."""
  rng = np.random.default_rng(len(json.dumps(config, sort_keys=True)))
  h, wide = config['hidden_size'], config['intermediate_size']
  out = {}

  def add(name, *shape, mean=0.0, std=0.3):
    out[name] = rng.normal(mean, std, shape).astype(np.float32)

  def linear(name, n_out, n_in):
    add(f'{name}.weight', n_out, n_in)
    add(f'{name}.bias', n_out)

  def norm(name):
    add(f'{name}.LayerNorm.weight', h, mean=1.0)
    add(f'{name}.LayerNorm.bias', h)

  add('embeddings.word_embeddings.weight', config['vocab_size'], h)
  add(
    'embeddings.position_embeddings.weight',
    config['max_position_embeddings'],
    h,
  )
  add('embeddings.token_type_embeddings.weight', config['type_vocab_size'], h)
  norm('embeddings')
  for i in range(config['num_hidden_layers']):
    layer = f'encoder.layer.{i}'
    for name in ('query', 'key', 'value'):
      linear(f'{layer}.attention.self.{name}', h, h)
    linear(f'{layer}.attention.output.dense', h, h)
    norm(f'{layer}.attention.output')
    linear(f'{layer}.intermediate.dense', wide, h)
    linear(f'{layer}.output.dense', h, wide)
    norm(f'{layer}.output')
  linear('pooler.dense', h, h)
  if head:
    out = {f'bert.{name}': tensor for name, tensor in out.items()}
    linear('classifier', 1, h)
  return out


def write_json(path: pathlib.Path, value):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(value))


def write_tokenizer(folder: pathlib.Path):
  """tokenizer.json and vocab.txt; it asks for cuts and padding of its own."""
  (folder / 'vocab.txt').write_text('\n'.join(VOCAB) + '\n')
  tokenizer = tokenizers.BertWordPieceTokenizer(
    {token: i for i, token in enumerate(VOCAB)}
  )
  tokenizer.enable_truncation(8)  # as published files have it: not ours
  tokenizer.enable_padding(length=8)
  tokenizer.save(str(folder / 'tokenizer.json'))
  write_json(
    folder / 'tokenizer_config.json',
    {
      'tokenizer_class': 'BertTokenizer',
      'do_lower_case': True,
      'model_max_length': 128,
    },
  )


def write(parent, name: str) -> pathlib.Path:
  """A checkpoint folder `name` below `parent`."""
  folder = pathlib.Path(parent) / name
  head = name == RERANKER
  config = CONFIG | (
    {
      'architectures': ['BertForSequenceClassification'],
      'id2label': {'0': 'LABEL_0'},
      'label2id': {'LABEL_0': 0},
    }
    if head
    else CHECKPOINTS[name][1]
  )
  write_json(folder / 'config.json', config)
  safetensors.numpy.save_file(
    tensors(config, head),
    folder / 'model.safetensors',
    metadata={'format': 'pt'},
  )
  write_tokenizer(folder)
  if name in ('all-MiniLM-tiny', 'bge-tiny-en-v1.5', 'gte-tiny'):
    modules = ['Transformer', 'Pooling', 'Normalize']
    write_json(
      folder / 'modules.json',
      [
        {
          'idx': i,
          'name': str(i),
          'path': f'{i}_{kind}' if i else '',
          'type': f'sentence_transformers.models.{kind}',
        }
        for i, kind in enumerate(modules)
      ],
    )
    cls = name.startswith('bge')
    pooling = {
      'pooling_mode_cls_token': cls,
      'pooling_mode_mean_tokens': not cls,
      'pooling_mode_max_tokens': False,
      'word_embedding_dimension': 32,
    }
    if name == 'gte-tiny':  # as sentence-transformers 5 writes it
      pooling = {'embedding_dimension': 32, 'pooling_mode': 'mean'}
    write_json(folder / '1_Pooling/config.json', pooling)
  return folder
