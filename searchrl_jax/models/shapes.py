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
# Sizes of each model, in the order of the names.
_SIZES = """
  hidden_size num_hidden_layers num_attention_heads num_key_value_heads
  intermediate_size vocab_size tie_word_embeddings
""".split()
_MODELS = {
  'qwen2.5-3b': (2048, 36, 16, 2, 11008, 151936, True),
  'qwen2.5-7b': (3584, 28, 28, 4, 18944, 152064, False),
}
NAMED = {
  name: _QWEN2 | dict(zip(_SIZES, sizes)) for name, sizes in _MODELS.items()
}
