"""Statistics of the policy's distributions at given tokens.

Rows are teacher-forced as a whole; logits of all tokens are never in memory at
the same time (`logps.head_logps`).
"""

from collections.abc import Sequence
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from searchrl_jax.devices import sharding
from searchrl_jax.learn import batching, update
from searchrl_jax.learn.logps import head_logps
from searchrl_jax.models import decoder


class Stats(NamedTuple):
  """Of one row; entry t is of the distribution of token t, entry 0 is NaN."""

  logps: np.ndarray  # float32 [n], nats
  entropy: np.ndarray  # float32 [n], nats


@dataclasses.dataclass(eq=False)
class Entropies:
  """Stats of rows of ids under the policy at one temperature.

  `params` may be replaced; the compiled programs, one per length, are kept.
  Rows of a length run together, up to max(lengths) tokens on each shard of the
  mesh.
  """

  cfg: decoder.DecoderConfig
  params: dict
  _: dataclasses.KW_ONLY
  mesh: Any
  temperature: float  # of the softmax; above 0
  lengths: Sequence[int]  # the buckets, in tokens; the last: the longest row
  head_chunk: int  # tokens of a shard whose logits are held at once

  def __post_init__(self):
    self.lengths = sorted(self.lengths)
    self._shards = self.mesh.shape['data'] * self.mesh.shape['fsdp']
    self._program = jax.jit(self._stats)

  def __call__(self, rows: Sequence[Sequence[int]]) -> list[Stats]:
    """The stats of each row, in order.

    Raises:
      ValueError: a row is longer than the longest bucket.
    """
    buckets = {length: [] for length in self.lengths}
    for i, row in enumerate(rows):
      buckets[batching.bucket_of(self.lengths, len(row))].append(i)
    out = [None] * len(rows)
    for length, members in buckets.items():
      B = self.lengths[-1] // length * self._shards
      for at in range(0, len(members), B):
        part = members[at : at + B]
        ids = np.zeros((B, length), np.int32)
        for b, i in enumerate(part):
          ids[b, : len(rows[i])] = rows[i]
        ids = update.put_rows(self.mesh, ids)
        found = np.asarray(self._program(self.params, ids))
        for b, i in enumerate(part):
          out[i] = Stats(*found[:, b, : len(rows[i])])
    return out

  def _stats(self, params, ids):
    """float32 [2, B, T]."""
    (B, T), S = ids.shape, self._shards
    x = decoder.hidden_states(params, self.cfg, ids, self.mesh)
    x = x.reshape(S, B * T // S, -1)
    x = sharding.constrain(x, self.mesh, 'batch', 'time', 'features')
    # A position predicts the token after it; what the last one would predict
    # is cut off below.
    targets = jnp.roll(ids, -1, 1).reshape(S, -1)
    w = params['embed'] if self.cfg.tied else params['head'].T
    logps, entropy = head_logps(
      x, w, targets, self.temperature, self.head_chunk, False, self.mesh
    )
    stats = jnp.stack([logps, entropy]).reshape(2, B, T)
    first = ((0, 0), (0, 0), (1, 0))
    return jnp.pad(stats[..., :-1], first, constant_values=jnp.nan)
