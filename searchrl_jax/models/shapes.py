"""Shapes of well-known models, for reports that need no checkpoint.

Fields of a Hugging Face config.json, by the name that config.model.path takes
where there is no folder of that name. The models' cards have the figures.
"""

_QWEN2 = {
  'model_type': 'qwen2',
  'rope_theta': 1e6,
  'rms_norm_eps': 1e-6,
  'max_position_embeddings': 32768,
}
NAMED = {
  'qwen2.5-3b': _QWEN2
  | {
    'hidden_size': 2048,
    'num_hidden_layers': 36,
    'num_attention_heads': 16,
    'num_key_value_heads': 2,
    'intermediate_size': 11008,
    'vocab_size': 151936,
    'tie_word_embeddings': True,
  },
  'qwen2.5-7b': _QWEN2
  | {
    'hidden_size': 3584,
    'num_hidden_layers': 28,
    'num_attention_heads': 28,
    'num_key_value_heads': 4,
    'intermediate_size': 18944,
    'vocab_size': 152064,
    'tie_word_embeddings': False,
  },
}
