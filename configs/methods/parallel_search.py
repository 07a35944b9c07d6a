"""ParallelSearch: look-ups that do not need each other go into one search.

Zhao et al., arXiv 2508.09303. A search may hold several queries, which the
template separates; each gets its passages. The reward is

    Search-R1's format table (structure .1, final 0; rewards/answer.py)
    + scale * shape of the searches, for n own searches (not queries):

    parallel    .45 if the first search is split, + .35 (1 - |n - 1|)
    sequential  .15 if it is not split,           + .35 (1 - max(n* - n, 0))

by meta.parallel of the question; n* is 2 in the release. Departures:

  * Only right answers earn the shape. version='as_released' pays it always: a
    wrong answer in the right shape then earns .9, more than a right one of
    three separate searches, .65.
  * n* is the number of hops of the question, if it is known: not all questions
    here need two searches. What a number of searches adds is 0 at least; in the
    release it falls without bound (n = 5: -1.05).
  * Searches that were made count. The release counts opening tags in prompt
    and text, less the two of its prompt.

The algorithm is GRPO, in the release PPO. At full size the template is
`parallel`, and an observation may have 1000 tokens. Arguments: scale, version
(sound, as_released), credit (own; shuffled, see rewards/ablations.py), and
those of the base.
"""

import itertools

from configs.methods import core
from searchrl_jax import lookup
from searchrl_jax.rewards import ablations, answer, scores
from searchrl_jax.rewards.core import per_trajectory
from searchrl_jax.text import prompts
from searchrl_jax.types import SEARCH

STRUCTURE, SPLIT, COUNT = 0.1, 0.15, 0.35


def get_config(arg=None):
  return core.on_base(arg, change, scale=1.0, version='sound', credit='own')


def change(c, a):
  c.name = 'parallel_search'
  core.set_algorithm(c, core.GRPO)
  if c.model.path and not prompts.load(c.env.template).query_separator:
    c.env.template = 'parallel'
    c.env.max_observation_tokens = 1000
  c.reward = dict(
    parallel=dict(
      fn='configs.methods.parallel_search.reward',
      weight=1.0,
      scale=a.scale,
      # Notes take the place of thoughts in atlas.
      require_think=bool(c.model.path),
      version=a.version,
      credit=a.credit,
    )
  )


def shape(trajectory, released: bool) -> float:
  """What the shape of a trajectory's searches earns; see the module."""
  question = trajectory.question
  searches = trajectory.calls(SEARCH)
  runs = itertools.groupby(searches, lambda s: s.request.turn)
  queries = [len([*run]) for _, run in runs]
  n, split = len(queries), queries[:1] > [1]
  if question.meta['parallel']:
    earned, off = 3 * SPLIT * split, abs(n - 1)
  else:
    least = 2 if released else question.hops or 2
    earned, off = SPLIT * (not split), max(least - n, 0)
  return earned + COUNT * (1 - off if released else max(1 - off, 0))


async def reward(groups, context, *, scale, require_think, version, credit):
  """Format table and shape of each trajectory; see the module.

  Args:
    groups, context: see rewards/core.py.
    scale: of the shape.
    require_think: an action needs a thought before it, as in the release.
    version, credit: see the module. 'shuffled': the shape of a trajectory of
      the group with the same place in the table.
  """
  env, found, released = context.env, {}, version == 'as_released'
  for group in groups:
    alive = [t for t in group if not t.failed]
    table = [
      (
        scores.exact_match(env.answer(t), t.question.answers) > 0,
        answer.valid_format(t, env, require_think),
      )
      for t in alive
    ]
    shapes = [shape(t, released) for t in alive]
    if credit == 'shuffled':
      shapes = [shapes[i] for i in ablations.drawn(alive, table, context.step)]
    for t, (right, valid), earned in zip(alive, table, shapes):
      value = 1 - STRUCTURE * (not valid) if right else STRUCTURE * valid
      value += scale * earned * (right or released)
      found[id(t)] = dict(value=value, em=right, valid=valid, shape=earned)
  return per_trajectory(groups, lambda t: found[id(t)])


def _check(config, fields):
  ablations.choose(
    fields, version=('sound', 'as_released'), credit=('own', 'shuffled')
  )
  template = prompts.load(config.env.template)
  lookup.require(
    template.query_separator and template.max_queries > 1,
    f'config.env.template={template.name!r} splits no search into queries: it '
    'needs query_separator and max_queries > 1, as parallel and micro_notes '
    'have',
  )


reward.needs, reward.check = ('answers', 'meta.parallel'), _check
reward.compares_group, reward.observes = ablations.shuffles, 'source'
