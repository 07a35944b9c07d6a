"""The critic: a decoder of its own with a value head, for PPO.

V(what stands before token t) = h w + b, h the final hidden state that would
predict t: so the value of a loss token depends on nothing that the policy is
yet to write. Axis letters as in `models.decoder`.
"""

import dataclasses

import jax
import jax.numpy as jnp

from searchrl_jax.learn import logps
from searchrl_jax.models import decoder
from searchrl_jax.run import sharding


def config(cfg: decoder.DecoderConfig) -> decoder.DecoderConfig:
  """The same backbone; no vocabulary is predicted, so no head of its own."""
  return dataclasses.replace(cfg, tied=True)


def param_table(cfg: decoder.DecoderConfig) -> dict[str, tuple[tuple, tuple]]:
  """`decoder.param_table` of a critic."""
  return decoder.param_table(cfg) | {
    'value': ((cfg.d_model,), ('norm',)),
    'value_bias': ((1,), ('norm',)),
  }


def param_shardings(cfg: decoder.DecoderConfig, mesh) -> dict:
  """The NamedSharding of every parameter, nested as the parameters are."""
  return decoder.nest(
    {
      path: sharding.named(mesh, axes, shape)
      for path, (shape, axes) in param_table(cfg).items()
    }
  )


def init(params: dict, cfg: decoder.DecoderConfig) -> dict:
  """A critic on a policy's backbone, in buffers of its own.

  Its head is 0, and so is every value before the first update: GAE with
  lambda = 1 then gives plain returns, where a random head would give noise.
  """
  kept = {k: v for k, v in params.items() if k != 'head'}
  fresh = {
    name: jnp.zeros(param_table(cfg)[name][0], jnp.float32)
    for name in ('value', 'value_bias')
  }
  return jax.tree.map(lambda x: jnp.array(x, copy=True), kept) | fresh


def token_values(params, cfg: decoder.DecoderConfig, arrays: dict, mesh=None):
  """Values before each loss token, float32 [B, T], 0 on other tokens.

  arrays: as `logps.gather` takes them.
  """
  x, spread = logps.gather(params, cfg, arrays, mesh)
  value = jnp.sum(
    x.astype(jnp.float32) * params['value'].astype(jnp.float32), -1
  )
  return spread(value + params['value_bias'].astype(jnp.float32))
