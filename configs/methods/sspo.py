"""SSPO: GRPO whose wrong trajectories are weighed by a teacher, turn by turn.

arXiv 2608.12764; its parent by token: RLSD, arXiv 2604.03128. Delta_t is log T
- log S of a sampled token: the teacher T reads evidence beside the question
(`learn.teacher.anchors`), the policy S does not. A token's advantage is
multiplied by w = exp(sign(A) Delta), Delta the sum over its turn, at most 1.2,
in trajectories that are not right; the others are GRPO's. Arguments:

  arm      sspo; rlsd: by token, in every trajectory, w within 1 -+ 0.2, and
           half of the credit stays uniform
  pool     of Delta over a turn: sum; mean, which long turns do not saturate;
           shuffled: the sum over another wrong turn, a control
  others   True: the evidence of another question, a control
  every    steps between two copies of the policy, which the teacher is; up to
           the first it is the policy that the run began with

Departs from both: no code was released and the texts were read in translation;
the evidence is what the group's own searches have found of the supporting
passages; RLSD's share of uniform credit follows a schedule there, its teacher
reads a reference answer and may be the policy itself. A group that has read no
supporting passage has no teacher. Behind the own prompt Delta is 0 only in the
step after a copy. No KL (algorithm.kl sets one).
"""

from ml_collections import ConfigDict
import numpy as np

from configs import algorithms
from configs.methods import core
from searchrl_jax.learn.advantages import normalised, returns
from searchrl_jax.rewards import ablations

RIGHT = 1.0
ARMS = {
  'sspo': dict(pool='sum', wrong=True, least=0.0, most=1.2, share=1.0),
  'rlsd': dict(pool='token', wrong=False, least=0.8, most=1.2, share=0.5),
}


def get_config(arg=None):
  known = dict(arm='sspo', pool='sum', others=False, every=50)
  return core.on_base(arg, change, **known)


def change(c, a):
  c.name = a.arm
  kw = core.chosen('arm', a.arm, ARMS) | dict(right=RIGHT, eps=1e-6, ddof=1)
  ablations.choose(a, pool=('sum', 'mean', 'shuffled'))
  if a.arm == 'sspo':
    kw['pool'] = a.pool
  fields = dict(advantage='configs.methods.sspo.weighed', advantage_kw=kw)
  core.set_algorithm(c, algorithms.GRPO | fields | dict(aggregation='token'))
  c.teacher.context, c.teacher.others = 'anchors', a.others
  some = kw['wrong']  # the teacher of RLSD is told of no wrong answer
  told = dict(right=RIGHT, wrong='not' if some else '', everyone=not some)
  c.teacher.context_kw = ConfigDict(told)
  core.make_room(c)
  c.teacher.weights, c.teacher.every = 'copy', a.every


def weighed(
  values,
  valid,
  group_ids,
  structure,
  delta,
  *,
  pool: str,
  wrong: bool,
  least: float,
  most: float,
  share: float,
  right: float,
  eps: float,
  ddof: int,
):
  """GRPO's advantage times 1 + share (w - 1); see the module.

  Args:
    values, valid, group_ids, structure, delta: see `advantages`.
    pool: what w is of: token, or sum or mean over the turn, or the sum over
      another turn that is weighed: half of all in the step further on.
    wrong: only trajectories that earned less than `right` are weighed.
    least, most: bounds of w.
  """
  score = returns(values)
  a = normalised(score, valid, group_ids, eps=eps, ddof=ddof)
  if pool != 'token':
    total = structure.totals(delta)
    if pool == 'mean':
      turns = np.concatenate(structure.turns)
      total = total / np.bincount(turns[turns >= 0], minlength=len(total))
    if pool == 'shuffled':
      at = np.flatnonzero(((a != 0) & (score < right))[structure.owner])
      total[at] = np.roll(total[at], len(at) // 2)
    delta = structure.over_tokens(total)
  out = []
  for x, earned, d, turn in zip(a, score, delta, structure.turns, strict=True):
    w = np.clip(np.exp(np.clip(np.sign(x) * d, -20.0, 20.0)), least, most)
    w = np.ones(len(d)) if wrong and earned >= right else 1 + share * (w - 1)
    out.append((x * w * (turn >= 0)).astype(np.float32))
  return out


weighed.needs_group = weighed.divides_by_spread = True
