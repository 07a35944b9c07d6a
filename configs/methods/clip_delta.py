"""Clip and Delta: rewards of steps that repetition cannot farm.

arXiv 2410.15115. Two mechanisms around a reward r_t of each step, beside the
outcome: Clip gives min(r_t - eta, 0), so that a further step never pays; Delta
gives r_t - r_(t+1), and the last step its own, so that all add up to r_1. Here
r_t is StepSearch's gain (configs/methods/step_search.py) without its penalty
for redundancy, which a policy can farm; the answer is the last step, with r =
0. Arguments:

  kind     clip, delta; none: the reward itself, a control
  eta      of Clip
  scale    of the reward

Departs from the paper: search instead of mathematics, an exact gain instead of
a reward model; the algorithm is GRPO over turns that are summed up (the
trajectory's return), as for other credit of this folder.
"""

from ml_collections import ConfigDict
import numpy as np

from configs.methods import core
from searchrl_jax.rewards import ablations, progress
from searchrl_jax.types import Rewards

KINDS = ('clip', 'delta', 'none')


def get_config(arg=None):
  return core.on_base(arg, change, kind='delta', eta=0.1, scale=1.0)


def change(c, a):
  c.name = 'clip_delta'
  ablations.choose(a, kind=KINDS)
  core.set_algorithm(c, core.GRPO)
  fields = dict(kind=a.kind, eta=a.eta, scale=a.scale, weight=1.0)
  name = 'configs.methods.clip_delta.reward'
  c.reward.steps = ConfigDict(dict(fn=name) | fields)


async def reward(groups, context, *, kind: str, eta: float, scale: float):
  """The wrapped gain of each search, at segments; see the module."""
  fields = {n: v for n, v in core.PROGRESS.items() if n not in ('fn', 'weight')}
  fields |= dict(kind='gain', scale=scale)
  found = await progress.progress(groups, context, **fields)
  value = []
  trajectories = [t for group in groups for t in group]
  for t, given in zip(trajectories, found.value, strict=True):
    out, at = np.array(given), [*progress.last_segments(t).values()]
    own = given[at]
    if kind == 'clip':
      out[at] = np.minimum(own - eta, 0.0)
    elif kind == 'delta' and at:
      out[at] = own - np.append(own[1:], 0.0)
    value.append(out)
  return Rewards(tuple(value), found.valid, 'segment', found.parts)


reward.needs, reward.observes = progress.supporting.needs, 'source'
