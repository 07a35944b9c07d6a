"""StepSearch: PPO that rewards what a search adds, less what it repeats.

arXiv 2505.15107; Zillwang/StepSearch. Search t earns gain_t - redundancy_t: the
share of supporting passages that it is the first to find, less the share of its
passages that were found before. At the end, 0.618 K rewards the queries, with K
the mean over needed look-ups of the F1 of the query matched to each; without an
answer the end earns -1 and searches nothing. Arguments:

  version  as_written: scale 0.6, K keeps the best query of a look-up
           as_released: scale 1.6, since the code adds 0.6 times a view that the
           called function has written in place; K keeps the last query
  scale    of the searches' reward; 0 = the version's
  key      of K; 0 = without, for data that have no meta['queries']

Departs from both: a passage is found or not (`Question.supporting`), where they
take TF-IDF cosines; the outcome is the base recipe's, where they take F1; an
observation that did not fit earns nothing. Text after the answer cannot occur.
"""

from ml_collections import ConfigDict

from configs import algorithms
from configs.methods import core
from searchrl_jax.rewards import scores
from searchrl_jax.rewards.core import per_trajectory
from searchrl_jax.types import SEARCH

VERSIONS = {
  'as_written': dict(scale=0.6, match='best'),
  'as_released': dict(scale=1.6, match='last'),
}


def get_config(arg=None):
  return core.on_base(arg, change, version='as_written', scale=0.0, key=0.618)


def change(c, a):
  version = core.chosen('version', a.version, VERSIONS)
  c.name = 'step_search'
  core.set_algorithm(c, algorithms.PPO)
  core.set_critic(c)
  c.reward.progress = ConfigDict(
    core.PROGRESS
    | dict(
      kind='gain',
      scale=a.scale or version['scale'],
      redundancy=1.0,
      forfeit=True,
    )
  )
  c.reward.end = ConfigDict(
    dict(
      fn='configs.methods.step_search.end',
      weight=1.0,
      key=a.key,
      match=version['match'],
      unanswered=-1.0,
    )
  )


async def end(groups, context, *, key: float, match: str, unanswered: float):
  """key K for a trajectory with an answer, `unanswered` for another.

  match: which F1 counts of a look-up that several queries match: 'best', or
  'last', as released. A query matches the look-up that it is most like.
  """

  def reward(t):
    if context.env.answer(t) is None:
      return unanswered
    return key * matched(t, match) if key else 0.0

  return per_trajectory(groups, reward)


def matched(trajectory, match: str) -> float:
  """K, 0 to 1; meta['queries'] has the wordings of each needed look-up."""
  golds, found = trajectory.question.meta['queries'], {}
  if not golds:  # nothing has to be looked up
    return 0.0
  for result in trajectory.calls(SEARCH):
    each = [scores.f1(result.request.query, words) for words in golds]
    score = max(each)
    best = each.index(score)
    if score > (0.0 if match == 'last' else found.get(best, 0.0)):
      found[best] = score
  return sum(found.values()) / len(golds)


end.needs = lambda fields: ('meta.queries',) if fields['key'] else ()
end.observes = lambda fields: 'searches' if fields['key'] else ''
