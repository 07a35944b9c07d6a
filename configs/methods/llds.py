"""LLDS: GRPO that holds the likelihood of actions which earned well.

arXiv 2512.04220; vengdeng/LLDS-On-Group-Relative-Policy-Optimization-Collapse-
in-Search-R1. Adds to the clipped loss, for each token of an active run,
coefficient x max(0, old - new log-prob). A run is a stretch of the policy's
tokens between observations with a good advantage; it is active if its
likelihood fell, in sum. Arguments:

  version    sound: good is A > 0; a fall below `tolerance` is none
             as_released: A >= 0, which holds wrong trajectories of all-equal
             groups in place; no tolerance, so that rounding between two forward
             passes decides at the first minibatch
  scale      lambda, the coefficient
  gate       run; row: the likelihood of all its good tokens (the paper's "R")
  minibatches  updates of a step, at least; with one, the term is 0

Departs from both: no KL (algorithm.kl sets one; they: 0.001 in the loss).
Compare with GRPO at as many minibatches.
"""

import jax
import jax.numpy as jnp

from configs import algorithms
from configs.methods import core
from searchrl_jax import lookup
from searchrl_jax.learn import losses
from searchrl_jax.rewards import ablations

VERSIONS = {
  'sound': dict(llds_zero=False, llds_tolerance=1e-3),
  'as_released': dict(llds_zero=True, llds_tolerance=0.0),
}


def get_config(arg=None):
  return core.on_base(
    arg, change, version='sound', scale=0.2, gate='run', minibatches=4
  )


def change(c, a):
  c.name = 'llds'
  ablations.choose(a, gate=('run', 'row'))
  fields = dict(aggregation='token', loss='configs.methods.llds.held')
  fields |= dict(llds_coef=a.scale, llds_gate=a.gate)
  fields |= core.chosen('version', a.version, VERSIONS)
  core.set_algorithm(c, algorithms.GRPO | fields)
  c.algorithm.minibatches = max(a.minibatches, c.algorithm.minibatches)


def held(
  logps,
  old_logps,
  behaviour_logps,
  advantages,
  mask,
  *,
  llds_coef: float,
  llds_gate: str,
  llds_zero: bool,
  llds_tolerance: float,
  clip_low: float,
  clip_high: float,
  clip_dual: float,
  ratio: str,
  tis: str,
  tis_cap: float,
  tis_floor: float,
  tis_mode: str,
):
  """`losses.clip` and llds_coef [run is active] max(0, old - log pi).

  Args:
    logps, old_logps, behaviour_logps, advantages, mask: [B, T], a trajectory in
      each row; see `losses.clip`, which the fields without `llds_` are of.
    llds_gate: 'token', 'run' or 'row', over which the fall is summed.
    llds_zero: whether an advantage of 0 is good.
    llds_tolerance: a change of a token that counts as none, in nats.
  """
  loss, sums = losses.clip(
    logps, old_logps, behaviour_logps, advantages, mask,
    clip_low=clip_low, clip_high=clip_high, clip_dual=clip_dual, ratio=ratio,
    tis=tis, tis_cap=tis_cap, tis_floor=tis_floor, tis_mode=tis_mode,
  )  # fmt: skip
  good = mask & ((advantages >= 0) if llds_zero else (advantages > 0))
  fall = jnp.where(good, jax.lax.stop_gradient(old_logps) - logps, 0.0)
  fall = jnp.where(jnp.abs(fall) > llds_tolerance, fall, 0.0)
  active = good & (of_runs(jax.lax.stop_gradient(fall), good, llds_gate) > 0)
  term = jnp.where(active, jnp.maximum(fall, 0.0), 0.0)
  more = {
    'llds': jnp.sum(term),
    'llds_active': jnp.sum(active, dtype=jnp.float32),
  }
  return loss + llds_coef * term, sums | jax.lax.stop_gradient(more)


def of_runs(x, good, gate: str):
  """The sum of x [B, T] over the run of each token, over its row, or x."""
  if gate == 'token':
    return x
  if gate == 'row':
    return jnp.broadcast_to(x.sum(-1, keepdims=True), x.shape)
  first = good & ~jnp.pad(good[:, :-1], ((0, 0), (1, 0)))
  run = jnp.cumsum(first.reshape(-1))  # 1, 2, ...: a row begins another
  return jax.ops.segment_sum(x.reshape(-1), run, x.size + 1)[run].reshape(
    x.shape
  )


def _check(config, fields):
  del fields
  n, epochs = config.algorithm.minibatches, config.algorithm.epochs
  lookup.require(
    n * epochs > 1,
    f'config.algorithm.minibatches={n} with epochs={epochs} is one update of a '
    'step, before which no likelihood has changed: use 2 or more',
  )


held.check = _check
