"""What the backward pass of a layer finds saved, and what it computes again."""

from collections.abc import Callable

import jax

# Saved besides the layer's input, by the names that `decoder.block` gives; the
# rest is computed again. From the least memory to the most; 'none' saves
# everything.
SAVED = {
  'block': (),
  'attention': ('attention',),
  'mlp': ('mlp',),
  'matmuls': ('attention', 'mlp'),
}


def policy(name: str) -> Callable[..., bool]:
  """The policy of `jax.checkpoint` for a key of SAVED."""
  names = SAVED[name]
  named = jax.checkpoint_policies.save_only_these_names(*names)

  def saved(primitive, *avals, **params):
    # cuDNN's kernel returns what its gradient needs, which has no name.
    kernel = primitive.name.startswith('dot_product_attention_fwd')
    return kernel and 'attention' in names or named(primitive, *avals, **params)

  return saved
