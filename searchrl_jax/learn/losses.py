"""Policy losses, by name (`config.algorithm.loss`): arrays in, arrays out.

Sums, then one division: a loss returns a value for each token and metrics as
sums over loss tokens; `aggregate` turns the first into a numerator, and the
denominator (`denominator`) is computed up front from the masks of the whole
minibatch. So microbatches add up to the minibatch exactly, on any mesh, and
an empty microbatch gives 0, not 0/0.

GRPO and PPO have no loss of their own: they are `clip` with an advantage and an
aggregation (configs/algorithms.py). `train._train` calls
`Learner.update`, which calls `Updater.step`; its compiled program calls the
objective of `objectives.policy`, which calls the loss.

Axes: B trajectories, each a line of its own (`update.by_trajectory` unpacks
rows), T tokens. mask [B, T] is True for target tokens in the loss.
Log-probs are natural logarithms, float32, of the token at the same position,
and arbitrary outside the mask.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from searchrl_jax import lookup
from searchrl_jax.learn import depth

# exp() of a log-ratio beyond this would overflow or drown every other token;
# verl clamps at the same place.
MAX_LOG_RATIO = 20.0

NAMES = ('clip', 'cispo', 'reinforce', 'mixed')
# Metrics of what the policy sampled: ratios to it, and weights.
_OF_SAMPLED = ('clip_', 'kl_', 'mismatch_', 'tis_')


def _exp(x):
  return jnp.exp(jnp.clip(x, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _sum(x, mask):
  return jnp.sum(jnp.where(mask, x.astype(jnp.float32), 0.0))


def _per_trajectory(x, mask):
  """Sum over the loss tokens of each trajectory, [B, 1]."""
  return jnp.sum(jnp.where(mask, x, 0.0), axis=-1, keepdims=True)


def _trajectory_tokens(mask):
  """Loss tokens of each trajectory, at least 1: float32 [B, 1]."""
  n = jnp.sum(mask, axis=-1, keepdims=True, dtype=jnp.float32)
  return jnp.maximum(n, 1.0)


def _masked(mask, *arrays):
  return (jnp.where(mask, x, 0.0) for x in arrays)


def _ratio(logps, old_logps, mask, ratio: str):
  """pi / pi_old of each token, or of its trajectory (see `clip`), [B, T]."""
  log_r = logps - old_logps
  if ratio in ('sequence', 'product'):
    n = _trajectory_tokens(mask) if ratio == 'sequence' else 1.0
    log_r = jnp.broadcast_to(_per_trajectory(log_r, mask) / n, mask.shape)
  return _exp(log_r)


def _metrics(logps, old_logps, weights, truncated, mask):
  """The metrics that every policy loss has, as sums over loss tokens."""
  d = logps - old_logps
  return {
    # k3 of KL(old || policy): the actions are old's.
    'kl_old': _sum(_exp(d) - 1 - d, mask),
    'tis_weight': _sum(weights, mask),
    'tis_truncated': _sum(truncated, mask),
  }


def kl(logps, ref_logps, estimator: str):
  """Estimates KL(policy || reference) for each token sampled by the policy.

  Schulman, "Approximating KL divergence" (2020), with d = ref - logp:

      k1 = -d              unbiased; as a loss its gradient is 0 on average,
                           so it belongs in the reward
      k2 = d^2 / 2         biased, gradient of the true KL on policy
      k3 = exp(d) - d - 1  unbiased, never negative (GRPO, arXiv 2402.03300,
                           equation 4; Search-R1's low_var_kl, which also
                           clamps the value to 10: not kept)
  """
  d = ref_logps - logps
  if estimator == 'k1':
    return -d
  if estimator == 'k2':
    return 0.5 * d * d
  return _exp(d) - d - 1.0


def importance_weights(
  old_logps, behaviour_logps, mask, tis: str, cap: float, floor: float, mode
):
  """Truncated importance weights of pi_old / pi_behaviour, [B, T].

  They correct for what the engine sampled from (its numerics, its staleness)
  to what the trainer scores. 'token': a weight for each token (Yao et
  al., "Your efficient RL framework secretly brings you off-policy RL
  training", 2025). 'sequence': the product over the loss tokens of the
  trajectory, truncated, on every token of it. No gradient passes through.

  mode='cap': min(w, cap). mode='mask': 0 outside [floor, cap], so that
  tokens that the current policy would hardly sample have no gradient (IcePop,
  Ling team, "Every step evolves", arXiv 2510.18855); the divisor of the loss
  is unchanged.

  Returns:
    weights [B, T] and whether each was truncated or masked, bool [B, T].
  """
  log_w = jnp.where(mask, old_logps - behaviour_logps, 0.0)
  if tis == 'none':
    return jnp.ones_like(log_w), jnp.zeros(mask.shape, bool)
  if tis == 'sequence':
    log_w = jnp.broadcast_to(_per_trajectory(log_w, mask), mask.shape)
  w = jax.lax.stop_gradient(_exp(log_w))
  if mode == 'mask':
    outside = (w > cap) | (w < floor)
    return jnp.where(outside, 0.0, w), outside & mask
  return jnp.minimum(w, cap), (w > cap) & mask


def clip(
  logps,
  old_logps,
  behaviour_logps,
  advantages,
  mask,
  *,
  clip_low: float,
  clip_high: float,
  clip_dual: float,
  ratio: str,
  tis: str,
  tis_cap: float,
  tis_floor: float,
  tis_mode: str,
):
  """PPO's clipped objective with separate bounds, as a loss per token.

      loss = -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

  PPO, arXiv 1707.06347, equation 7; separate bounds: DAPO, arXiv 2503.14476,
  equation 8. ratio='token': r = pi / pi_old of the token. ratio='sequence':
  the geometric mean over the trajectory's loss tokens (GSPO, arXiv 2507.18071,
  equation 7), the same on each of them. ratio='product': their product, so
  that a trajectory is one action (RLOO, arXiv 2402.14740, as TRL has it; with
  aggregation='sequence' its loss is r A). w is the truncated
  importance weight of `importance_weights`; it multiplies the clipped term, so
  clipping never sees the engine's mismatch and truncation never sees the
  policy's step.

  clip_dual = c, if above 0: where A < 0 the loss is at most -w c A, so that a
  token that became many times as likely cannot drown the others (dual clip,
  Ye et al., arXiv 1912.09729; TRL calls it delta).

  Args:
    logps: [B, T] of the policy, differentiated.
    old_logps: [B, T] of the trainer's weights before the step's first update.
    behaviour_logps: [B, T] that the engine recorded.
    advantages: [B, T].
    mask: bool [B, T].

  Returns:
    loss [B, T], 0 outside the mask, and metrics as sums over loss tokens.
  """
  logps, old_logps, behaviour_logps, advantages = _masked(
    mask, logps, old_logps, behaviour_logps, advantages
  )
  r = _ratio(logps, old_logps, mask, ratio)
  free = r * advantages
  bound = jnp.clip(r, 1.0 - clip_low, 1.0 + clip_high) * advantages
  # `where`, not `minimum`: at a tie (r = 1, every first update) minimum would
  # share the gradient between the two branches.
  objective = jnp.where(bound < free, bound, free)
  least = clip_dual * advantages
  beyond = (advantages < 0) & (objective < least) & (clip_dual > 0)
  objective = jnp.where(beyond, least, objective)
  weights, truncated = importance_weights(
    old_logps, behaviour_logps, mask, tis, tis_cap, tis_floor, tis_mode
  )
  loss = jnp.where(mask, -weights * objective, 0.0)
  sums = _metrics(logps, old_logps, weights, truncated, mask) | {
    'clip_low': _sum((advantages < 0) & (r < 1 - clip_low), mask),
    'clip_high': _sum((advantages > 0) & (r > 1 + clip_high), mask),
    'clip_dual': _sum(beyond, mask),
  }
  return loss, jax.lax.stop_gradient(sums)


def cispo(
  logps,
  old_logps,
  behaviour_logps,
  advantages,
  mask,
  *,
  clip_low: float,
  clip_high: float,
  ratio: str,
  tis: str,
  tis_cap: float,
  tis_floor: float,
  tis_mode: str,
):
  """CISPO: the ratio is a clipped weight, and no token loses its gradient.

      loss = -w sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi

  MiniMax-M1, arXiv 2506.13585, equations 4 and 5; sg stops the gradient. The
  paper has no lower bound: clip_low = 1. Arrays, r, w and what is returned
  are those of `clip`; the value of the loss means nothing, its gradient does.
  """
  logps, old_logps, behaviour_logps, advantages = _masked(
    mask, logps, old_logps, behaviour_logps, advantages
  )
  r = _ratio(logps, old_logps, mask, ratio)
  weights, truncated = importance_weights(
    old_logps, behaviour_logps, mask, tis, tis_cap, tis_floor, tis_mode
  )
  bounded = jax.lax.stop_gradient(jnp.clip(r, 1 - clip_low, 1 + clip_high))
  loss = jnp.where(mask, -weights * bounded * advantages * logps, 0.0)
  sums = _metrics(logps, old_logps, weights, truncated, mask)
  sums['clip_low'] = _sum(r < 1 - clip_low, mask)
  sums['clip_high'] = _sum(r > 1 + clip_high, mask)
  return loss, jax.lax.stop_gradient(sums)


def reinforce(
  logps,
  old_logps,
  behaviour_logps,
  advantages,
  mask,
  *,
  tis: str,
  tis_cap: float,
  tis_floor: float,
  tis_mode: str,
):
  """REINFORCE with importance weights of the current policy.

      loss = -w A log pi, w = min(pi / pi_behaviour, tis_cap), no gradient

  Williams (1992), with the truncated weights of V-trace (IMPALA, arXiv
  1802.01561, section 4.2). One weight corrects for the engine, for staleness
  and for the updates of this step. Nothing else is clipped; only the metrics
  use old_logps. tis='none': no correction, which is correct on policy only.
  See `clip` for the arrays and the result.
  """
  logps, old_logps, behaviour_logps, advantages = _masked(
    mask, logps, old_logps, behaviour_logps, advantages
  )
  weights, truncated = importance_weights(
    logps, behaviour_logps, mask, tis, tis_cap, tis_floor, tis_mode
  )
  loss = jnp.where(mask, -weights * advantages * logps, 0.0)
  sums = _metrics(logps, old_logps, weights, truncated, mask)
  return loss, jax.lax.stop_gradient(sums)


def mixed(
  logps,
  old_logps,
  behaviour_logps,
  advantages,
  mask,
  foreign,
  *,
  foreign_objective: str,
  clip_low: float,
  clip_high: float,
  clip_dual: float,
  ratio: str,
  tis: str,
  tis_cap: float,
  tis_floor: float,
  tis_mode: str,
):
  """`clip`, and another objective where the policy did not sample the token.

      loss = -f(log pi, log pi_old, A)  if foreign

  What sampled a foreign token is not known, so there is no ratio to it: `clip`,
  its weights and its metrics have the other tokens alone.

  Args:
    logps, old_logps, behaviour_logps, advantages, mask: see `clip`.
    foreign: bool [B, T], within the mask. Of these tokens behaviour_logps means
      nothing, and old_logps is the policy's.
    foreign_objective: the dotted path of f, whose arrays are [B, T].
  """
  loss, sums = clip(
    logps, old_logps, behaviour_logps, advantages, mask & ~foreign,
    clip_low=clip_low, clip_high=clip_high, clip_dual=clip_dual, ratio=ratio,
    tis=tis, tis_cap=tis_cap, tis_floor=tis_floor, tis_mode=tis_mode,
  )  # fmt: skip
  objective = lookup.function('searchrl_jax.learn', foreign_objective)
  arrays = [*_masked(foreign, logps, old_logps, advantages)]
  loss = jnp.where(foreign, -objective(*arrays), loss)
  prob = _sum(jnp.exp(arrays[0]), foreign)
  return loss, sums | {'foreign_prob': jax.lax.stop_gradient(prob)}


def _check_mixed(config, fields):
  a, env = config.algorithm, config.env
  with lookup.of('config.algorithm.foreign_objective'):
    fn = lookup.function('searchrl_jax.learn', fields['foreign_objective'])
  imitates = getattr(fn, 'imitates', False)
  lookup.require(
    not (imitates and a.drop_zero_variance),
    'config.algorithm.drop_zero_variance leaves out groups of equal rewards, '
    f'from which {fields["foreign_objective"]} learns: set it to False',
  )
  lookup.require(
    not env.train_observations,
    'config.env.train_observations: the policy did not sample observations '
    "either, and loss='mixed' would take them for those of a trace; use False",
  )
  lookup.require(
    a.kl != 'reward',
    "config.algorithm.kl='reward' estimates a KL from tokens that the policy "
    "sampled, which those of a trace are not; use 'loss' or 'none'",
  )


mixed.check = _check_mixed  # type: ignore[attr-defined]


def value(values, old_values, targets, mask, *, clip: float):
  """The critic's squared error, its step clipped; a loss per token, [B, T].

      loss = 1/2 max((V - G)^2, (V_old + clamp(V - V_old, -clip, clip) - G)^2)

  As in OpenAI's baselines (PPO2), which PPO, arXiv 1707.06347, does not
  state, and in Search-R1 (clip 0.5), there over retrieved tokens too.

  Args:
    values: [B, T] of the critic, differentiated.
    old_values: [B, T] before the step's first update.
    targets: [B, T], `advantages.lambda_returns`.
    mask: bool [B, T].
    clip: distance in units of the return; 0 = not clipped.

  Returns:
    loss [B, T], 0 outside the mask, and metrics as sums over loss tokens.
  """
  values, old_values, targets = _masked(mask, values, old_values, targets)
  error = (values - targets) ** 2
  near = old_values + jnp.clip(values - old_values, -clip, clip)
  bounded = (near - targets) ** 2
  beyond = (bounded > error) & (clip > 0)
  loss = 0.5 * jnp.where(beyond, bounded, error)
  sums = {'value_error': _sum(error, mask), 'value_clip': _sum(beyond, mask)}
  return jnp.where(mask, loss, 0.0), jax.lax.stop_gradient(sums)


DISTANCES = ('forward', 'reverse', 'js')


def distance(log_s, log_t, kind: str, alpha: float):
  """A distance of two distributions, from log-probs of K ids: [B, T].

  What the other ids have is one more bucket.

      forward  sum T (log T - log S)
      reverse  sum S (log S - log T)
      js       (1 - alpha) KL(S || M) + alpha KL(T || M), M = (1 - alpha) S +
               alpha T; its size, and its gradient, shrink with alpha

  Args:
    log_s, log_t: [B, T, K]; the second is without gradient.
    kind: one of DISTANCES.
    alpha: of js.
  """
  log_s, log_t = map(_with_rest, (log_s, jax.lax.stop_gradient(log_t)))
  s, t = jnp.exp(log_s), jnp.exp(log_t)
  if kind == 'forward':
    return jnp.sum(t * (log_t - log_s), -1)
  if kind == 'reverse':
    return jnp.sum(s * (log_s - log_t), -1)
  log_m = jnp.logaddexp(math.log(1 - alpha) + log_s, math.log(alpha) + log_t)
  of = lambda p, log_p: jnp.sum(p * (log_p - log_m), -1)
  return (1 - alpha) * of(s, log_s) + alpha * of(t, log_t)


def _with_rest(log_p):
  """Log-probs [..., K] -> [..., K + 1], the last of what is left."""
  known = jnp.sum(jnp.exp(log_p), -1, keepdims=True)
  # At least 1e-6 (no teacher: zeros, K); the gradient of less is too small.
  same, held = jax.lax.stop_gradient((known, jnp.minimum(known, 1 - 1e-6)))
  rest = jnp.log1p(-held) - (known - same) / (1 - held)
  return jnp.concatenate([log_p, rest], -1)


def mismatch(old_logps, behaviour_logps, mask, recorded):
  """What the trainer's log-probs and the engine's differ by, as sums.

  Design 5.7. Token ratios are exp(old - behaviour), not truncated; names that
  end in `_max` are maxima, joined by max (`add`). By depth (`depth`), of the
  `recorded` tokens [B, T] alone: those whose log-prob the engine recorded;
  `mismatch_kl` is k3 of KL(engine || trainer).
  """
  d = jnp.where(mask, old_logps - behaviour_logps, 0.0)
  w = _exp(d)
  outside = (w < 0.9) | (w > 1.1)
  sums = {
    'mismatch_abs': jnp.sum(jnp.abs(d)),
    'mismatch_max': jnp.max(jnp.abs(d), initial=0.0),
    'mismatch_outside': _sum(outside, mask),
    'mismatch_w': _sum(w, mask),
    'mismatch_w2': _sum(w * w, mask),
  }
  # Not w - 1: of a small d, that is rounding.
  kl = jnp.expm1(jnp.clip(d, -MAX_LOG_RATIO, MAX_LOG_RATIO)) - d
  deep = {'abs': jnp.abs(d), 'outside': outside, 'kl': kl}
  sums |= depth.sums(recorded, **{f'mismatch_{k}': x for k, x in deep.items()})
  sums |= depth.maxima(recorded, mismatch_max=jnp.abs(d))
  return jax.lax.stop_gradient(sums)


def aggregate(loss, mask, aggregation: str):
  """The numerator of the minibatch's loss: a scalar sum.

  token: every loss token weighs the same (DAPO, arXiv 2503.14476, section
  3.3). sequence: every sequence weighs the same, its tokens share its weight
  (GRPO, arXiv 2402.03300, equation 3). sequence_sum: tokens summed, divided
  by a constant horizon (Dr. GRPO, arXiv 2503.20783, appendix).
  """
  if aggregation == 'sequence':
    return jnp.sum(_per_trajectory(loss, mask) / _trajectory_tokens(mask))
  return _sum(loss, mask)


def denominator(masks, aggregation: str, horizon: int) -> float:
  """What the numerators of a minibatch are divided by, from NumPy masks.

  token: loss tokens. sequence: trajectories with one. sequence_sum: those x
  horizon (in tokens). At least 1: an empty minibatch has loss 0.

  Raises:
    ValueError: sequence_sum without a horizon.
  """
  if aggregation == 'token':
    return float(max(sum(int(np.sum(m)) for m in masks), 1))
  rows = max(sum(int(np.any(m, axis=-1).sum()) for m in masks), 1)
  if aggregation == 'sequence':
    return float(rows)
  lookup.require(
    horizon > 0,
    f'config.algorithm.horizon={horizon}: aggregation=sequence_sum '
    'divides by it; set it to the largest number of sampled tokens',
  )
  return float(rows * horizon)


def add(a: dict, b: dict) -> dict:
  """Joins the metrics of two microbatches: sums add, `_max` takes the max."""
  return {
    k: jnp.maximum(a[k], b[k]) if k.endswith('_max') else a[k] + b[k] for k in a
  }


def summarise(sums: dict) -> dict[str, float]:
  """Means over loss tokens from joined sums (which hold `tokens`).

  `loss`, and what ends in `_max`, pass through. `mismatch_ess` is the
  effective sample size (sum w)^2 / (n sum w^2), in (0, 1]; `routes_differ` a
  mean over the tokens whose routes are known. Where the policy did
  not sample all of them (`sampled`), ratios are means over those that it did,
  what begins with `foreign_` over the others, whose share is `foreign`. Sums by
  depth become `depth.means`.
  """
  deep = {k: sums[k] for k in sums if k.endswith(depth.SUFFIXES)}
  sums = {k: float(v) for k, v in sums.items() if k not in deep}
  n = max(sums['tokens'], 1.0)
  mixes, sampled = 'sampled' in sums, sums.pop('sampled', sums['tokens'])
  own, foreign = max(sampled, 1.0), sums['tokens'] - sampled
  routed = max(sums['tokens'] - sums.get('routes_unknown', 0.0), 1.0)
  out = {k: sums.pop(k) for k in ('tokens', 'loss', 'sequences') if k in sums}
  w, w2 = sums.pop('mismatch_w', None), sums.pop('mismatch_w2', None)
  if w is not None:
    out['mismatch_ess'] = w * w / (own * w2) if w2 > 0 else 1.0
  if mixes:
    out['foreign'] = foreign / n

  def tokens(name: str) -> float:
    if name == 'routes_differ':
      return routed
    if name.startswith('foreign_'):
      return max(foreign, 1.0)
    return own if name.startswith(_OF_SAMPLED) else n

  out |= {
    k: v if k.endswith('_max') else v / tokens(k) for k, v in sums.items()
  }
  return depth.means(deep) | out  # whose means are over `mask`, as all others
