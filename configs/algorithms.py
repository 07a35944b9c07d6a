"""Algorithms as fields of config.algorithm: functions by name, and numbers.

  from configs import algorithms
  c.algorithm.update(algorithms.DAPO)

If the recipe has set another advantage before, clear its fields first
(c.algorithm.advantage_kw = {}): `update` merges dicts.
A dict sets what makes the algorithm (advantage, loss, bounds, how tokens are
averaged, where a KL goes) and leaves alone what any of them may have: tis,
entropy_coef, minibatches, epochs. With one minibatch and one epoch a step is
on policy: every ratio is 1 and no bound acts.

Of all of them, unlike the papers:
  * where answers to a question are compared, one whose others failed gets 0.
  * the engine's mismatch is corrected by truncated weights; tis='none' is
    the papers'.
  * a KL in the reward is taken token by token where advantages are (PPO),
    and summed over the trajectory elsewhere; REINFORCE++'s paper has it token
    by token. Coefficients of a KL are where a public implementation starts.
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

# DeepSeekMath, arXiv 2402.03300: each answer weighs the same, its tokens share
# its weight; KL to the reference in the loss. eps and the unbiased deviation
# are verl's.
GRPO = _PLAIN | dict(
  advantage='grpo',
  advantage_kw=dict(eps=1e-6, ddof=1),
  aggregation='sequence',
  kl='loss',
  kl_coef=0.04,
)

# arXiv 2503.20783: neither the deviation nor the length of an answer divides.
# Set algorithm.horizon as well, to the most tokens that an answer may have
# (their code's constant; the paper's equation has none, which is horizon=1).
DR_GRPO = _PLAIN | dict(advantage='dr_grpo', aggregation='sequence_sum')

# arXiv 2402.14740: the mean of the other answers as baseline, an answer as one
# action, KL in the reward (0.05 in TRL). The paper is on policy and clips
# nothing; the clipped ratio of whole answers is TRL's.
RLOO = (
  _PLAIN
  | _IN_REWARD
  | dict(
    advantage='rloo', ratio='product', aggregation='sequence', kl_coef=0.05
  )
)

# Williams, 1992; the mean of the other returns of the batch as baseline. The
# sum over tokens is divided by the tokens of the minibatch, where the estimator
# divides by the answers. Search-R1's "REINFORCE" is not in its release.
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

# The same paper's variant for groups: less the group's mean, then whitened. A
# KL is left to the recipe.
REINFORCE_PP_BASELINE = _PLAIN | dict(
  advantage='reinforce_pp_baseline', advantage_kw=dict(eps=1e-8, ddof=0)
)

# arXiv 2310.10505: the greedy answer's return as baseline; one sampled answer
# to a question will do. A KL is left to the recipe.
REMAX = _PLAIN | dict(advantage='remax', loss='reinforce')

# PPO, arXiv 1707.06347, with GAE, as Search-R1 runs it: no discount, KL in the
# reward. Needs a critic: set config.critic.lr (1e-5 there) and the rest of it.
# There the mean is over the tokens of each microbatch, and GAE and whitening
# take in retrieved tokens: not kept.
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
# earn the same are left out; the paper samples others until the batch is full:
# as many rounds of that as rollout.refill says. Overlong shaping is a reward
# (rewards/length.py), and the filter sees it: equally right answers of other
# lengths stay.
DAPO = _PLAIN | dict(
  advantage='grpo',
  advantage_kw=dict(eps=1e-6, ddof=1),
  clip_high=0.28,
  drop_zero_variance=True,
)

# arXiv 2507.18071: the ratio of a whole answer, to the power of 1 / tokens;
# bounds of section 5.1.
GSPO = _PLAIN | dict(
  advantage='grpo',
  advantage_kw=dict(eps=1e-6, ddof=1),
  clip_low=3e-4,
  clip_high=4e-4,
  ratio='sequence',
  aggregation='sequence',
)

# MiniMax-M1, arXiv 2506.13585: no lower bound. It does not state the upper
# one; TRL's epsilon_high=5 bounds the ratio itself, which is 1 + clip_high.
CISPO = _PLAIN | dict(
  advantage='grpo',
  advantage_kw=dict(eps=1e-6, ddof=1),
  loss='cispo',
  clip_low=1.0,
  clip_high=4.0,
)

# "Tricks or traps?", arXiv 2508.08221: the group's mean, the batch's deviation,
# token mean, PPO's bounds, and nothing else.
LITE_PPO = _PLAIN | dict(
  advantage='lite_ppo', advantage_kw=dict(eps=1e-6, ddof=1)
)
