"""The objective of an update: a loss per token, and the arrays it needs."""

from collections.abc import Callable
import dataclasses
import math

import jax
import jax.numpy as jnp

from searchrl_jax import lookup
from searchrl_jax.learn import losses


@dataclasses.dataclass(frozen=True)
class Objective:
  """A loss per token and how it is aggregated.

  fn(logps [B, T], entropy [B, T], arrays) -> (loss [B, T], sums), where
  `arrays` holds mask, behaviour_logps, advantages, old and ref, all [B, T].
  Hashable: one compiled program for each.

  For a critic (`value`): logps are its values, old those before the step's
  first update, and advantages the target returns; there is no entropy.
  """

  fn: Callable
  aggregation: str
  horizon: int = 0
  entropy_grad: bool = False  # whether the loss differentiates the entropy
  needs_old: bool = False
  needs_ref: bool = False
  critic: bool = False  # of learn/critic.py, not of a policy
  # Ids whose log-probs are compared with a teacher's, and by which distance.
  columns: int = 0
  distance: str = ''
  alpha: float = 0.0


def policy_loss(a) -> tuple[Callable, dict]:
  """The policy loss that config.algorithm names, and its fields.

  Raises:
    ConfigError: there is none, or config.algorithm lacks a field of it.
  """
  with lookup.of(f'config.algorithm.loss={a.loss!r}'):
    fn = lookup.function('searchrl_jax.learn', a.loss, 'losses')
  return fn, lookup.arguments(fn, a, 'config.algorithm.loss')


def takes_foreign(a) -> bool:
  """Whether the loss of config.algorithm has an objective for tokens that the
  policy did not sample."""
  return 'foreign' in lookup.inputs(policy_loss(a)[0])


def policy(config) -> Objective:
  """The objective that config.algorithm describes.

  loss = policy loss + kl_coef KL (if kl = 'loss') - entropy_coef entropy,
  for each token. If a step has one update, its old log-probs are those of the
  forward pass of the update and are not scored.

  Raises:
    ValueError: an invalid field of config.algorithm; names it and the fix.
  """
  a = config.algorithm.copy_and_resolve_references()
  losses.denominator([], a.aggregation, a.horizon)
  lookup.require(
    not a.tis_floor or a.tis_mode == 'mask',
    f'config.algorithm.tis_floor={a.tis_floor}: above 0 only with '
    f"tis_mode='mask' (it is {a.tis_mode!r})",
  )
  lookup.require(
    a.tis != 'none' or a.tis_mode == 'cap',
    f"config.algorithm.tis_mode={a.tis_mode!r} has no effect with tis='none'; "
    "use 'cap', or tis='token'",
  )
  lookup.require(
    a.kl != 'loss' or a.kl_estimator != 'k1',
    "config.algorithm.kl_estimator='k1' with kl='loss': its gradient is 0 on "
    "average; use 'k3', or kl='reward'",
  )
  needs_old = a.minibatches * a.epochs > 1
  fn, kw = policy_loss(a)
  mixes = takes_foreign(a)
  for field, neutral in (('ratio', 'token'), ('clip_dual', 0.0)):
    lookup.require(
      a[field] == neutral or field in kw,
      f'config.algorithm.{field}={a[field]!r} has no effect with loss='
      f'{a.loss!r}; use {neutral!r}',
    )

  def objective(logps, entropy, arrays):
    mask = arrays['mask']
    old = arrays['old'] if needs_old else jax.lax.stop_gradient(logps)
    # NaN: no log-prob was recorded (an observation in the loss): weight 1.
    behaviour = arrays['behaviour_logps']
    unknown = jnp.isnan(behaviour)
    behaviour = jnp.where(unknown, old, behaviour)
    given, sampled = [logps, old, behaviour, arrays['advantages'], mask], mask
    if mixes:
      sampled = mask & ~unknown
      given.append(mask & unknown)
    loss, sums = fn(*given, **kw)
    recorded = sampled & ~unknown
    sums = dict(sums) | losses.mismatch(old, behaviour, sampled, recorded)
    sums |= _spread(logps, entropy)
    if mixes:
      sums['sampled'] = jnp.sum(sampled, dtype=jnp.float32)
    if a.kl == 'loss':
      d = losses.kl(logps, arrays['ref'], a.kl_estimator)
      d = jnp.where(sampled, d, 0.0)
      loss = loss + a.kl_coef * d
      sums['kl_ref'] = jnp.sum(d)
    if a.entropy_coef:
      loss = loss - a.entropy_coef * jnp.where(mask, entropy, 0.0)
    if t.k:  # its weights are 0 outside the mask
      loss = loss + arrays['distance']
      sums['teacher_distance'] = jnp.sum(arrays['distance'])
    return loss, sums

  needs = bool(a.entropy_coef), needs_old, a.kl == 'loss'
  t = config.teacher.columns
  told = dict(columns=t.k, distance=t.distance, alpha=t.alpha) if t.k else {}
  return Objective(objective, a.aggregation, a.horizon, *needs, **told)


def _spread(logps, entropy) -> dict:
  return {'entropy': jnp.sum(entropy), 'nll': -jnp.sum(logps)}


def supervised() -> Objective:
  """Mean negative log-likelihood of the loss tokens."""

  def objective(logps, entropy, arrays):
    return jnp.where(arrays['mask'], -logps, 0.0), _spread(logps, entropy)

  return Objective(objective, 'token')


def value(config) -> Objective:
  """The critic's clipped squared error (`losses.value`), a mean over tokens."""
  clip = config.critic.clip

  def objective(values, entropy, arrays):
    del entropy
    mask, returns = arrays['mask'], arrays['advantages']
    loss, sums = losses.value(values, arrays['old'], returns, mask, clip=clip)
    # For the explained variance, 1 - E (G - V)^2 / Var G.
    returns = jnp.where(mask, returns, 0.0)
    return loss, dict(sums) | {
      'value': jnp.sum(values),
      'return': jnp.sum(returns),
      'return_squared': jnp.sum(returns**2),
    }

  return Objective(objective, 'token', needs_old=True, critic=True)


def explained(found: dict[str, float]) -> dict[str, float]:
  """The metrics of a critic's update, with names that begin with 'critic_'.

  `explained_variance` is 1 - E (G - V)^2 / Var G over the loss tokens: 0 if the
  critic predicts the mean, 1 if it is exact, NaN if all returns are equal.
  """
  variance = found['return_squared'] - found['return'] ** 2
  # Below this, the difference of float32 sums is rounding error.
  known = variance > 1e-5 * found['return_squared']
  share = found['value_error'] / variance if known else math.nan
  names = ('loss', 'value', 'return', 'value_clip', 'grad_norm')
  return {'critic_explained_variance': 1.0 - share} | {
    f'critic_{name}': found[name] for name in names
  }
