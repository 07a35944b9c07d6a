"""The models of the benchmarks: sizes, random weights, layout of Qwen2."""

_FIELDS = 'vocab_size d_model n_layers n_heads n_kv_heads head_dim d_ff'.split()
_TABLE = {
  '1m': (2048, 128, 4, 4, 2, 32, 416),
  '28m': (2048, 512, 8, 8, 2, 64, 1792),
  '500m': (151936, 896, 24, 14, 2, 64, 4864),  # Qwen2.5-0.5B
}
SIZES = {size: dict(zip(_FIELDS, values)) for size, values in _TABLE.items()}
SMALL = '1m', '28m'


def config(size: str, **fields):
  """A `DecoderConfig`; `fields` are further ones, or others in their place."""
  from searchrl_jax.models import decoder

  return decoder.DecoderConfig(**SIZES[size] | dict(family='qwen2') | fields)
