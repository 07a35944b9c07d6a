"""Statistics of the policy's distributions at given tokens.

Rows are teacher-forced as a whole; logits of all tokens are never in memory at
the same time (`logps.head_logps`). The certainty needs no second pass: the mean
log-prob over the vocabulary is x times the mean row of the head, minus the
log-sum-exp.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from searchrl_jax.learn import update
from searchrl_jax.learn.logps import head_logps
from searchrl_jax.models import decoder
from searchrl_jax.run import sharding


class Stats(NamedTuple):
  """Of one row; entry t is of the distribution of token t, entry 0 is NaN."""

  logps: np.ndarray  # float32 [n], nats
  entropy: np.ndarray  # float32 [n], nats
  # float32 [n], nats: KL(uniform || p) = -log V - mean_v log p_v, the
  # self-certainty of Kang et al. 2025, arXiv 2502.18581, eq. 7.
  certainty: np.ndarray


class Scorer:
  """Stats of rows of ids under the policy at one temperature.

  `params` may be replaced; the compiled programs, one per length, are kept.
  Rows of a length run together, up to max(lengths) tokens on each shard of the
  mesh.
  """

  def __init__(
    self,
    cfg: decoder.DecoderConfig,
    params: dict,
    *,
    temperature: float,
    mesh=None,
    lengths: Sequence[int],
    head_chunk: int,
  ):
    """Compiles nothing yet.

    Args:
      temperature: of the softmax; above 0.
      lengths: the buckets, in tokens; the last is the longest row.
      head_chunk: tokens, over all shards, whose logits are held at once.

    Raises:
      ValueError: a temperature that is not above 0.
    """
    if temperature <= 0:
      raise ValueError(
        f'temperature={temperature}: greedy decoding has no distribution to '
        'score; give one above 0'
      )
    self.cfg, self.params, self.mesh = cfg, params, mesh
    self.temperature, self.lengths = temperature, sorted(lengths)
    self._shards = update.shards(mesh)
    self._chunk = max(1, head_chunk // self._shards)
    self._program = jax.jit(self._stats)

  def __call__(self, rows: Sequence[Sequence[int]]) -> list[Stats]:
    """The stats of each row, in order.

    Raises:
      ValueError: a row is longer than the longest bucket.
    """
    buckets = {length: [] for length in self.lengths}
    for i, row in enumerate(rows):
      length = next((n for n in self.lengths if len(row) <= n), None)
      if length is None:
        raise ValueError(
          f'row {i} has {len(row)} tokens, and the longest bucket '
          f'{self.lengths[-1]}: raise the last of config.batch.lengths'
        )
      buckets[length].append(i)
    out = [None] * len(rows)
    for length, members in buckets.items():
      B = self.lengths[-1] // length * self._shards
      for at in range(0, len(members), B):
        part = members[at : at + B]
        ids = np.zeros((B, length), np.int32)
        lengths = np.zeros((B,), np.int32)
        for b, i in enumerate(part):
          lengths[b] = len(rows[i])
          ids[b, : lengths[b]] = rows[i]
        found = np.asarray(
          self._program(self.params, self._put(ids), self._put(lengths))
        )
        for b, i in enumerate(part):
          out[i] = Stats(*found[:, b, : lengths[b]])
    return out

  def _put(self, x):
    if self.mesh is None:
      return x
    axes = ('batch',) + (None,) * (x.ndim - 1)
    return jax.device_put(x, sharding.named(self.mesh, axes, x.shape))

  def _stats(self, params, ids, lengths):
    """float32 [3, B, T]."""
    (B, T), S = ids.shape, self._shards
    x = decoder.hidden_states(params, self.cfg, ids, lengths, self.mesh)
    x = x.reshape(S, B * T // S, -1)
    x = sharding.constrain(x, self.mesh, 'batch', 'time', 'features')
    # A position predicts the token after it; what the last one would predict
    # is cut off below.
    targets = jnp.roll(ids, -1, 1).reshape(S, -1)
    w = params['embed'] if self.cfg.tied else params['head'].T
    logps, entropy = head_logps(
      x, w, targets, self.temperature, self._chunk, False, self.mesh
    )
    # In the dtype that the logits were made in, as they must cancel.
    w = w.astype(x.dtype).astype(jnp.float32)
    lean = jnp.sum(x.astype(jnp.float32) * (w[targets] - w.mean(0)), -1)
    certainty = lean / self.temperature - logps - jnp.log(jnp.float32(len(w)))
    stats = jnp.stack([logps, entropy, certainty]).reshape(3, B, T)
    return jnp.pad(
      stats[..., :-1], ((0, 0), (0, 0), (1, 0)), constant_values=jnp.nan
    )
