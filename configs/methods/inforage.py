"""InForage: an answer, and what the searches found, less for each search.

arXiv 2505.09316; qhjqhj00/InForage. The reward is

    (F1(answer) + scale C) p,   p = decay^(m - 1) from m = 3 searches on, else 1

with C the share of the supporting passages that were found. Arguments:

  scale    .2
  decay    .95: .9025 for three searches, .857 for four
  outcome  f1, em: that of the base recipe
  version  as_written: C of all searches together, the sum of what each adds
           as_released: C of the best search alone; where each look-up needs a
           search of its own it stays at 1 / hops
  credit   own; shuffled (rewards/ablations.py): C of a trajectory of the group
           with the same outcome, a control

Departs from both: passages are compared by id, where the release compares urls,
and the paper's formula, a sum over steps, is taken for C alone. The release
gives C and p to wrong trajectories: it counts among those that still search,
and reorders rows without them. credit='shuffled' is a mild form of it, which
must not help. A search for two things is one. The `evidence` block of the
paper has no reward, and is left out.

The algorithm is GRPO; the release has PPO, after a warm start, with a KL of
.001.
"""

from configs.methods import core
from searchrl_jax.rewards import ablations, blocks, progress
from searchrl_jax.rewards.core import per_trajectory
from searchrl_jax.types import SEARCH


def get_config(arg=None):
  known = dict(scale=0.2, decay=0.95, outcome='f1')
  return core.on_base(arg, change, **known, version='as_written', credit='own')


def change(c, a):
  c.name = 'inforage'
  core.set_algorithm(c, core.GRPO)
  c.reward = dict(
    inforage=dict(
      fn='configs.methods.inforage.reward',
      weight=1.0,
      scale=a.scale,
      decay=a.decay,
      outcome=a.outcome,
      version=a.version,
      credit=a.credit,
    )
  )


def coverage(trajectory, version: str) -> float:
  """C of a trajectory, 0 to 1."""
  golds = {*trajectory.question.supporting}
  found = [golds & {*r.passages} for r in progress.readings(trajectory)]
  if version == 'as_released':
    return max(map(len, found), default=0) / len(golds)
  return len(set[str]().union(*found)) / len(golds)


async def reward(groups, context, *, scale, decay, outcome, version, credit):
  """The reward of each trajectory; see the module.

  Args:
    groups, context: see rewards/core.py.
    scale, decay, outcome, version, credit: see the module.
  """
  score, values = blocks.OUTCOMES[outcome], {}
  for group in groups:
    alive = [t for t in group if not t.failed]
    earned = [score(context.env.answer(t), t.question.answers) for t in alive]
    shares = [coverage(t, version) for t in alive]
    if credit == 'shuffled':
      drawn = ablations.drawn(alive, earned, context.step)
      shares = [shares[i] for i in drawn]
    for t, s, share in zip(alive, earned, shares):
      m = len({result.request.turn for result in t.calls(SEARCH)})
      p = decay ** (m - 1) if m >= 3 else 1.0
      value = (s + scale * share) * p
      values[id(t)] = {'value': value, outcome: s, 'coverage': share, 'p': p}
  return per_trajectory(groups, lambda t: values[id(t)])


def _check(config, fields):
  del config
  ablations.choose(
    fields,
    outcome=blocks.OUTCOMES,
    version=('as_written', 'as_released'),
    credit=('own', 'shuffled'),
  )


reward.needs, reward.check = ('answers', 'supporting'), _check
reward.compares_group, reward.observes = ablations.shuffles, 'source'
