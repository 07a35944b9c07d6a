"""The critic: a second decoder with a value head, for PPO.

V(tokens before t) = h w + b, where h is the final hidden state that would
predict token t: the value of a loss token does not depend on that token or on
later ones. Axis letters as in `models.decoder`.
"""

import dataclasses

import jax
import jax.numpy as jnp

from searchrl_jax.learn import logps
from searchrl_jax.models import decoder


def config(cfg: decoder.DecoderConfig) -> decoder.DecoderConfig:
  """The same backbone, without an output head for the vocabulary."""
  return dataclasses.replace(cfg, tied=True)


def param_table(cfg: decoder.DecoderConfig) -> dict[str, tuple[tuple, tuple]]:
  """`decoder.param_table` of a critic."""
  return decoder.param_table(cfg) | {
    'value': ((cfg.d_model,), ('norm',)),
    'value_bias': ((1,), ('norm',)),
  }


def init(params: dict, cfg: decoder.DecoderConfig) -> dict:
  """A critic on a copy of a policy's backbone.

  The head is 0, and so is every value before the first update: GAE with
  lambda = 1 then gives plain returns, where a random head would add noise.
  """
  backbone = {k: v for k, v in params.items() if k != 'head'}
  backbone = jax.tree.map(lambda x: jnp.array(x, copy=True), backbone)
  value, bias = (jnp.zeros(n, jnp.float32) for n in (cfg.d_model, 1))
  return backbone | {'value': value, 'value_bias': bias}


def token_values(params, cfg: decoder.DecoderConfig, arrays: dict, mesh=None):
  """Values before each loss token, float32 [B, T], 0 on other tokens.

  arrays: as `logps.gather` takes them.
  """
  x, spread, _ = logps.gather(params, cfg, arrays, mesh)
  w, b = (params[k].astype(jnp.float32) for k in ('value', 'value_bias'))
  return spread(jnp.sum(x.astype(jnp.float32) * w, -1) + b)
