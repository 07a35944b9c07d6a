"""A tiny model, a stand-in tokenizer and an engine over them."""

import jax
from ml_collections import ConfigDict

from searchrl_jax.engines.jax.engine import JaxEngine
from searchrl_jax.models import decoder

CFG = decoder.DecoderConfig(
  vocab_size=90,
  d_model=32,
  n_layers=2,
  n_heads=4,
  n_kv_heads=2,
  head_dim=8,
  d_ff=48,
  family='qwen2',
)


class Letters:
  """Ids 0..89 are the printable characters from '!' on."""

  vocab_size = 90

  def token_bytes(self, i: int) -> bytes:
    return bytes([33 + i])


def make_params(seed=0, cfg=CFG):
  # Wide enough that distributions are neither flat nor one-hot.
  return decoder.init_params(cfg, jax.random.key(seed), scale=0.25)


def config(**changes) -> ConfigDict:
  fields = dict(
    slots=4,
    max_len=64,
    chunk=4,
    prefill_rows=2,
    exact=True,
    record_routes=False,
    dtype='float32',
    canary_tolerance=1e-3,
    host_gib=1.0,
  )
  return ConfigDict(fields | changes)


def make_engine(
  kind=JaxEngine, params=None, cfg=CFG, tokenizer=None, mesh=None, **changes
):
  return kind(
    cfg,
    make_params(cfg=cfg) if params is None else params,
    tokenizer or Letters(),
    config(**changes),
    mesh,
  )
