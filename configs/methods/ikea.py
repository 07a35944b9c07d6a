"""IKEA: recall what is known, search for what is not.

Huang et al., arXiv 2505.07596; the reward is that of the code they released:

    malformed          -1
    right, m searches  1 + bonus * max(1 - m / 3, 0)
    wrong, searched    .05
    wrong, idle        0

with bonus .6: 1.6, 1.4, 1.2, 1 for 0, 1, 2, 3 or more searches. It trains on
questions that the model can answer alone, mixed with others that it cannot, and
refuses data that does not say which (meta.known, as atlas has); as in the
release, the reward itself does not use it. Departures:

  * m counts the queries that were answered: a search for two things is two. The
    release counts opening tags in the decoded text, so that such a search is
    one, and a tag in a thought, or in a passage, is a search as well:
    version='as_released'. (Tags in passages are taken apart here.)
  * Malformed is: an invalid action, or no complete thought that holds text. The
    release also looks for tags in other brackets, such as "(search".

The algorithm is GRPO, with the base's group and learning rate. Arguments:
bonus, version (sound, as_released), credit (rewards/ablations.py; 'oracle'
counts only searches beyond those that the question needs), and those of the
base.
"""

from configs.methods import core
from searchrl_jax.rewards import ablations, efficiency


def get_config(arg=None):
  return core.on_base(arg, change, bonus=0.6, version='sound', credit='own')


def change(c, a):
  c.name = 'ikea'
  core.set_algorithm(c, core.GRPO)
  c.reward = dict(
    ikea=dict(
      fn='configs.methods.ikea.reward',
      weight=1.0,
      bonus=a.bonus,
      limit=3,
      searched=0.05,
      malformed=-1.0,
      version=a.version,
      credit=a.credit,
    )
  )


async def reward(
  groups, context, *, bonus, limit, searched, malformed, version, credit
):
  """The table of the module.

  Args:
    groups, context: see rewards/core.py.
    bonus: of a right answer without a search.
    limit: number of searches from which there is no bonus.
    searched: reward of a wrong answer after a search.
    malformed: reward of a malformed trajectory.
    version, credit: see the module.
  """
  env = context.env

  def tags(trajectory):
    written = [s.ids for s in trajectory.segments if s.author != 'prompt']
    text = ''.join(env.tokenizer.decode(ids) for ids in written)
    return text.count(env.template.search[0])

  def reward(trajectory, attempt):
    thought = any(
      b.kind == 'think' and b.author == 'policy' and b.complete and b.text
      for b in env.blocks(trajectory)
    )
    valid = thought and not trajectory.invalid_actions
    extra = max(attempt.searches - (attempt.needed or 0), 0)
    value = searched if attempt.searches else 0.0
    if attempt.right:
      value = 1 + bonus * max(1 - extra / limit, 0)
    value = value if valid else malformed
    return dict(value=value, em=attempt.right, valid=valid)

  count = tags if version == 'as_released' else efficiency.executed
  return efficiency.compared(
    groups, context, reward, credit=credit, count=count
  )


def _needs(fields):
  return *efficiency.needs(fields), 'meta.known'


def _check(config, fields):
  del config
  versions = ('sound', 'as_released')
  ablations.choose(fields, version=versions, credit=ablations.CREDITS)


reward.needs, reward.check = _needs, _check
reward.compares_group, reward.observes = ablations.shuffles, 'searches'
