"""Algorithms as fields of config.algorithm: functions by name, and numbers.

  from configs import algorithms
  c.algorithm.update(algorithms.DAPO)

If the recipe has set another advantage before, clear its fields first
(c.algorithm.advantage_kw = {}): `update` merges dicts.

A dict sets the fields that define the algorithm (advantage, loss, clip bounds,
aggregation over tokens, place of the KL). It does not set the fields that are
independent of the algorithm: tis, entropy_coef, minibatches, epochs. With one
minibatch and one epoch, a step is on policy: every ratio is 1 and no clip bound
is active.

All of them differ from the papers as follows:
  * where the answers to a question are compared, an answer gets advantage 0 if
    all other answers failed.
  * truncated importance weights correct the mismatch between engine and
    trainer; tis='none' gives the papers' loss.
  * a KL in the reward is per token if advantages are per token (PPO), and
    summed over the trajectory otherwise; REINFORCE++'s paper uses it per token.
    KL coefficients are the defaults of a public implementation.
"""

_PLAIN = dict(
  advantage_kw={},
  loss='clip',
  clip_low=0.2,
  clip_high=0.2,
  clip_dual=0.0,
  ratio='token',
  aggregation='token',
  kl='none',
  kl_estimator='k3',
  kl_coef=0.0,
  drop_zero_variance=False,
)
_IN_REWARD = dict(kl='reward', kl_estimator='k1')

# DeepSeekMath, arXiv 2402.03300: all answers have equal weight, divided equally
# among the tokens of an answer; KL to the reference in the loss. eps and the
# unbiased standard deviation are verl's.
GRPO = _PLAIN | dict(
  advantage='grpo',
  advantage_kw=dict(eps=1e-6, ddof=1),
  aggregation='sequence',
  kl='loss',
  kl_coef=0.04,
)

# arXiv 2503.20783: no division by the standard deviation or by the length of an
# answer. Also set algorithm.horizon to the maximum number of tokens of an
# answer (their code's constant; the paper's equation has none: horizon=1).
DR_GRPO = _PLAIN | dict(advantage='dr_grpo', aggregation='sequence_sum')

# arXiv 2402.14740: the mean of the other answers is the baseline, an answer is
# one action, KL in the reward (0.05 in TRL). The paper is on policy and does
# not clip; the clipped ratio of whole answers is TRL's.
RLOO = (
  _PLAIN
  | _IN_REWARD
  | dict(
    advantage='rloo', ratio='product', aggregation='sequence', kl_coef=0.05
  )
)

# Williams, 1992; the mean of the other returns of the batch is the baseline.
# The sum over tokens is divided by the number of tokens of the minibatch; the
# original estimator divides by the number of answers. Search-R1's release does
# not contain its "REINFORCE".
REINFORCE = _PLAIN | dict(advantage='reinforce', loss='reinforce')

# arXiv 2501.03262: returns whitened over the batch, PPO's bounds, KL in the
# reward (0.01 in OpenRLHF). The paper whitens over tokens ('whitened_tokens'),
# this over trajectories.
REINFORCE_PP = (
  _PLAIN
  | _IN_REWARD
  | dict(
    advantage='whitened', advantage_kw=dict(eps=1e-8, ddof=0), kl_coef=0.01
  )
)

# The same paper's variant for groups: the group's mean is subtracted, then
# returns are whitened. The recipe sets the KL.
REINFORCE_PP_BASELINE = _PLAIN | dict(
  advantage='reinforce_pp_baseline', advantage_kw=dict(eps=1e-8, ddof=0)
)

# arXiv 2310.10505: the greedy answer's return is the baseline; one sampled
# answer per question suffices. The recipe sets the KL.
REMAX = _PLAIN | dict(advantage='remax', loss='reinforce')

# PPO, arXiv 1707.06347, with GAE, as Search-R1 runs it: no discount, KL in the
# reward. It needs a critic: set config.critic.lr (1e-5 in Search-R1) and its
# other fields. Search-R1 averages over the tokens of each microbatch and
# includes retrieved tokens in GAE and whitening; this project does neither.
PPO = (
  _PLAIN
  | _IN_REWARD
  | dict(
    advantage='gae',
    advantage_kw=dict(gamma=1.0, lam=1.0, whiten=True, eps=1e-8),
    kl_coef=0.001,
  )
)

# arXiv 2503.14476: clip-higher, token mean, no KL. Questions whose answers all
# have the same reward are left out. The paper samples further questions until
# the batch is full; rollout.refill sets the number of such rounds. Overlong
# shaping is a reward (rewards/length.py) that the filter includes: equally
# correct answers of different lengths are kept.
DAPO = _PLAIN | dict(
  advantage='grpo',
  advantage_kw=dict(eps=1e-6, ddof=1),
  clip_high=0.28,
  drop_zero_variance=True,
)

# arXiv 2507.18071: the ratio of a whole answer, to the power of 1 / tokens;
# clip bounds of section 5.1.
GSPO = _PLAIN | dict(
  advantage='grpo',
  advantage_kw=dict(eps=1e-6, ddof=1),
  clip_low=3e-4,
  clip_high=4e-4,
  ratio='sequence',
  aggregation='sequence',
)

# MiniMax-M1, arXiv 2506.13585: no lower bound. The paper does not state the
# upper bound; TRL's epsilon_high=5 bounds the ratio itself, 1 + clip_high.
CISPO = _PLAIN | dict(
  advantage='grpo',
  advantage_kw=dict(eps=1e-6, ddof=1),
  loss='cispo',
  clip_low=1.0,
  clip_high=4.0,
)

# "Tricks or traps?", arXiv 2508.08221: the group's mean, the batch's standard
# deviation, token mean, PPO's bounds.
LITE_PPO = _PLAIN | dict(
  advantage='lite_ppo', advantage_kw=dict(eps=1e-6, ddof=1)
)
