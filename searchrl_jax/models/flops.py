"""Floating-point operations: of an update, and of a device at its peak.

Their quotient is the model FLOPs utilisation (MFU) of the log.
"""

from collections.abc import Callable, Sequence
import math

import jax
import numpy as np

from searchrl_jax.models import decoder, experts, lora
from searchrl_jax.types import Batch

# Dense bfloat16 peak, FLOP/s of one device, by jax's device_kind
# (manufacturers' data sheets).
PEAK_FLOPS = {
  'NVIDIA A100': 312e12,
  'NVIDIA H100': 989e12,
  'NVIDIA H200': 989e12,
  'NVIDIA L4': 121e12,
  'NVIDIA B200': 2250e12,
  'TPU v4': 275e12,
  'TPU v5 lite': 197e12,
  'TPU v5': 459e12,
  'TPU v6 lite': 918e12,
}


def peak_flops(device=None) -> float:
  """Peak FLOP/s of a device (default: the first), 0 if it is in no table."""
  device = jax.local_devices()[0] if device is None else device
  known = [k for k in PEAK_FLOPS if device.device_kind.startswith(k)]
  return PEAK_FLOPS[max(known, key=len)] if known else 0.0


def update_flops(cfg: decoder.DecoderConfig, batches: Sequence[Batch]) -> float:
  """FLOPs of a forward and backward pass over the tokens of a minibatch that
  are computed: none of padding, and a shared beginning once.

  See `of_rows`. MFU = this / (seconds x devices x `peak_flops`).
  """
  total = 0.0
  for b in batches:
    if b.tree is None:
      total += of_rows(cfg, b.lengths, b.mask.sum())
      continue
    depths = b.tree.depths[b.nodes()].astype(np.float64)
    pairs = lambda window, d=depths: np.minimum(2 * d + 1, 2 * window).sum()
    total += _flops(cfg, depths.size, pairs, b.mask.sum())
  return total


def of_rows(cfg: decoder.DecoderConfig, lengths, loss_tokens: int) -> float:
  """FLOPs of a forward and backward pass over sequences of these lengths [B].

  PaLM, arXiv 2204.02311, appendix B: 6 n for each parameter of the layers'
  matrices and token (of experts, those that a token has), 12 N H n^2 for the
  attention of a layer (causality not discounted; of a shorter window w:
  2 n w - w^2 in place of n^2), and 6 D V for each loss token, as the head runs
  on those alone. Of a delta net, 24 for each token and number of the state, by
  the recurrence: its decay, two reads and a write. With adapters, 4 in place of
  each 6: frozen matrices have no gradient, and the adapters' own products are
  left out. Recomputation, padding and the optimizer are not counted. A forward
  pass alone is a third.
  """
  n = np.asarray(lengths, np.float64)

  def pairs(window):
    m = np.minimum(n, window)
    return (m * (2 * n - m)).sum()

  return _flops(cfg, n.sum(), pairs, loss_tokens)


def _flops(cfg, tokens, pairs: Callable, loss_tokens) -> float:
  """pairs(window): pairs of tokens that attend, twice those that a causal
  mask lets through."""
  each, D, N = 4.0 if cfg.lora else 6.0, cfg.d_model, cfg.n_heads
  table = decoder.shapes_of(decoder.param_table(lora.base(cfg)))
  of = lambda names: sum(
    math.prod(table.get(f'layers/{name}', (0,))) for name in names
  )
  matrices = of([*decoder.INPUTS, 'delta_conv', 'router'])
  if cfg.moe:
    matrices += of(experts.MATRICES) * cfg.moe.chosen / cfg.moe.count
  total = each * matrices * tokens
  for i in range(cfg.n_layers):
    if i not in cfg.delta_layers:
      total += 12 * N * cfg.head_dim * pairs(cfg.window_of(i) or np.inf)
  if s := cfg.delta:
    state = s.value_heads * s.key_dim * s.value_dim
    total += 24 * len(cfg.delta_layers) * state * tokens
  return float(total + each * D * cfg.vocab_size * loss_tokens)
