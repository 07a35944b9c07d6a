"""OTC: an answer is worth more the fewer tool calls it took.

Wang et al., arXiv 2504.14870. The reward is the outcome times r, for m queries
of searches (calls of other tools are free) and n, the fewest of a correct
trajectory of the group:

    n > 0: r = sin(f pi / (2 n)), f = 2 n m / (m + n): 1 at m = n
    n = 0: r = cos(m pi / (2 m + smoothing)): 1 at m = 0

`form='ppo'` is the paper's for PPO, without groups: the second line always.
Wrong answers earn 0 however few searches they made. There is no release.
Departures:

  * n is of the step's group. The paper keeps the smallest ever seen for the
    question, which would be state of the reward in the checkpoint.
  * `scale` s interpolates: R (1 - s + s r); the paper's is s = 1. Its factor
    alpha is the term's weight, without effect on normalised advantages.
  * r multiplies an exact match; `version='ports'` is the sum of two public
    ports, (1 - s) R + s r with s = .3, which pays wrong answers too.

The algorithm is GRPO, or PPO with `form=ppo`. Arguments: scale, form (grpo,
ppo), version (as_written, ports), credit (rewards/ablations.py; 'oracle' takes
the searches that the question needs for n), and those of the base.
"""

import math

from configs import algorithms
from configs.methods import core
from searchrl_jax import lookup
from searchrl_jax.rewards import ablations, efficiency


def get_config(arg=None):
  known = dict(scale=1.0, form='grpo', version='as_written', credit='own')
  return core.on_base(arg, change, **known)


def change(c, a):
  c.name = 'otc'
  if a.form == 'ppo':
    core.set_algorithm(c, algorithms.PPO)
    core.set_critic(c)
  else:
    core.set_algorithm(c, core.GRPO)
  c.reward = dict(
    otc=dict(
      fn='configs.methods.otc.reward',
      weight=1.0,
      scale=a.scale,
      smoothing=c.env.get_ref('max_turns'),
      form=a.form,
      version=a.version,
      credit=a.credit,
    )
  )


def tool(m: int, n: int | None, smoothing: float) -> float:
  """r of m searches; n: the fewest of a correct trajectory, None = unknown."""
  if not n:
    return math.cos(m * math.pi / (2 * m + smoothing))
  return math.sin(m * math.pi / (m + n))


async def reward(groups, context, *, scale, smoothing, form, version, credit):
  """Outcome and r of each trajectory; see the module.

  Args:
    groups, context: see rewards/core.py.
    scale: s, 0 to 1.
    smoothing: c of the cosine; the paper ties it to the limit of calls.
    form, version, credit: see the module.
  """

  def reward(trajectory, attempt):
    del trajectory
    n = attempt.fewest if form == 'grpo' else None
    n = n if attempt.needed is None else attempt.needed
    r = tool(attempt.searches, n, smoothing)
    paid = r * attempt.right if version == 'as_written' else r
    value = (1 - scale) * attempt.right + scale * paid
    return dict(value=value, em=attempt.right, tool=r)

  return efficiency.compared(groups, context, reward, credit=credit)


def _check(config, fields):
  forms, versions = ('grpo', 'ppo'), ('as_written', 'ports')
  ablations.choose(
    fields, form=forms, version=versions, credit=ablations.CREDITS
  )
  lookup.require(
    fields['form'] == 'ppo' or config.rollout.group > 1,
    "form='grpo' compares the searches of a group, and config.rollout.group="
    "1: use form='ppo', or a larger group",
  )
  lookup.require(
    0 <= fields['scale'] <= 1 and fields['smoothing'] > 0,
    f'scale={fields["scale"]} must lie between 0 and 1, smoothing='
    f'{fields["smoothing"]} above 0',
  )


reward.needs, reward.check = efficiency.needs, _check
reward.observes = 'searches'
reward.compares_group = lambda fields: (
  fields['form'] == 'grpo' or ablations.shuffles(fields)
)
