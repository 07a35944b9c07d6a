"""Metrics by how deep in its trajectory a token was sampled.

A mean over all tokens hides what grows with depth. Two measures of it: tenths
of the tokens that the policy sampled in a trajectory, in their order
(`decile`), and the number of the turn (`turn`), which is a run of such tokens
without another between them.

Axes: B trajectories, T tokens, each trajectory in a line of its own, as in
`losses`.
"""

import jax.numpy as jnp
import numpy as np

BINS = 10  # deciles; turns, the last of which counts all later ones too
MEASURES = ('decile', 'turn')
SUFFIX = '_by_depth'  # of the name of sums
MAXIMA = '_by_depth_max'  # of that of maxima
SUFFIXES = SUFFIX, MAXIMA


def bins(mask):
  """The bin of each token by each of MEASURES, int32 [2, B, T].

  mask: bool [B, T], the tokens that are counted; others have any bin.
  """
  count = jnp.cumsum(mask, -1, dtype=jnp.int32)
  decile = BINS * (count - 1) // jnp.maximum(count[:, -1:], 1)
  before = jnp.pad(mask[:, :-1], ((0, 0), (1, 0)))
  turn = jnp.cumsum(mask & ~before, -1, dtype=jnp.int32) - 1
  return jnp.stack([decile, jnp.minimum(turn, BINS - 1)])


def _own(mask):
  """Which masked tokens each bin has, bool [2, BINS, B, T]."""
  return (bins(mask)[:, None] == jnp.arange(BINS)[:, None, None]) & mask


def maxima(mask, **values):
  """The largest of values [B, T] >= 0 over the masked tokens of each bin.

  Returns:
    name + MAXIMA -> as of `sums`, but for maxima, of the values and of 1.
  """
  own = _own(mask)
  largest = lambda x: jnp.max(jnp.where(own, x, 0.0), (-2, -1), initial=0.0)
  both = lambda x: jnp.stack([largest(x), largest(1.0)])
  return {f'{name}{MAXIMA}': both(x) for name, x in values.items()}


def sums(mask, **values):
  """Sums of values [B, T] over the masked tokens of each bin.

  Returns:
    name + SUFFIX -> float32 [2, 2, BINS]: of the values and of 1, which counts
    the tokens, by each of MEASURES.
  """
  own = _own(mask)
  add = lambda x: jnp.sum(jnp.where(own, x, 0.0), (-2, -1))
  tokens = add(1.0)
  deep = lambda x: jnp.stack([add(x.astype(jnp.float32)), tokens])
  return {f'{name}{SUFFIX}': deep(x) for name, x in values.items()}


def means(sums: dict) -> dict[str, float]:
  """Means from joined `sums`: of all tokens (NAME), and of each bin that has
  some ('NAME/decile=0' to 9, 'NAME/turn=0' to 9). `maxima` are those of bins
  alone."""
  out = {}
  for key, x in sums.items():
    name, (values, tokens) = key.removesuffix(MAXIMA), np.asarray(x, np.float64)
    if name == key:
      name = key.removesuffix(SUFFIX)
      out[name] = float(values[0].sum() / max(tokens[0].sum(), 1.0))
    for of, v, n in zip(MEASURES, values, tokens):
      own = np.flatnonzero(n)
      out |= {f'{name}/{of}={i}': float(v[i] / n[i]) for i in own}
  return out
