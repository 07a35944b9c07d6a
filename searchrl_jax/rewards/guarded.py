"""Votes that are to keep a majority from turning wrong, without golden answers.

Variants of `vote.majority`, with its fields, parts and treatment of failed
services. Each takes what it needs from the group and the text of the question
alone.

  found     an answer votes if it stands in an observation of its trajectory. It
            cannot reject an intermediate entity, which was found too.
  covered   an answer votes if the passages that its trajectory found cover the
            whole question. Cycle-consistent search (An et al. 2026, arXiv
            2604.12967) lets a frozen model rebuild the question from what was
            found, and rewards the similarity; here `cover`, a function of the
            question's text and the passages, says exactly which share of the
            question they account for, and the answer has to agree with those
            of other complete searches. Departures: the reward of the paper
            looks at no answer, so that a guess behind a good search earns as
            much as the right answer; a share below 1 earns nothing here, as a
            part of it would pay for stopping a hop early.
  restrain  RESTRAIN (Yu et al. 2025, arXiv 2510.02172): every answer is a
            label, weighted by its share.

What does not vote earns 0, also if it agrees with the label: an answer without
its evidence is not what is to be learnt. A question without a vote is left out
and counted (`abstained`); `voting` is the share of the samples that vote.
"""

import collections
from collections.abc import Sequence
import math

import numpy as np

from searchrl_jax import lookup
from searchrl_jax.rewards import scores, vote
from searchrl_jax.rewards.core import RewardContext, require
from searchrl_jax.types import (
  SEARCH,
  Group,
  Passage,
  Question,
  Rewards,
  SearchResult,
  Trajectory,
)

_EPS = 1e-6  # of the deviation, as of GRPO


async def found(
  groups: Sequence[Group],
  context: RewardContext,
  *,
  votes: int,
  train: int,
  match: str,
  max_abstained: float,
) -> Rewards:
  """`vote.majority` of the answers that stand in an observation.

  In whole words, in their normal form. An answer that no passage states (yes or
  no, a number that was computed) never votes: not for such questions.

  Args:
    groups, context, votes, train, match, max_abstained: see `vote.majority`.
  """
  del max_abstained  # of a step: `vote.check_step`

  def stands(trajectory, answer):
    texts = context.env.retrieved(trajectory)
    return any(scores.states(text, [answer]) for text in texts)

  return vote.labelled(
    groups, context, vote.most_frequent, votes, train, match, counts=stands
  )


async def covered(
  groups: Sequence[Group],
  context: RewardContext,
  *,
  votes: int,
  train: int,
  match: str,
  max_abstained: float,
  cover: str,
) -> Rewards:
  """`vote.majority` of the answers behind a search that covers the question.

  Args:
    groups, context, votes, train, match, max_abstained: see `vote.majority`.
    cover: dotted name of a function (text of a question, passages) -> share of
      the question that the passages account for, or None if it cannot read the
      question. It gets nothing else of a question, so that golden answers and
      the path of a generated world cannot reach it.

  Raises:
    RewardError: `cover` cannot read a question.
  """
  del max_abstained
  share = lookup.function('searchrl_jax.rewards', cover)

  def complete(trajectory, answer):
    del answer
    question = trajectory.question
    known = share(question.text, passages(trajectory))
    require(
      known is not None,
      f'question {question.id!r}: cover={cover!r} cannot read {question.text!r}'
      '; leave such questions out, or name a function that reads them',
    )
    return known >= 1

  return vote.labelled(
    groups, context, vote.most_frequent, votes, train, match, counts=complete
  )


def passages(trajectory: Trajectory) -> list[Passage]:
  """What its searches found, in order."""
  made = trajectory.calls(SEARCH)
  return [p for s in made if isinstance(s, SearchResult) for p in s.passages]


async def restrain(
  groups: Sequence[Group],
  context: RewardContext,
  *,
  votes: int,
  train: int,
  match: str,
  max_abstained: float,
  centre: float,
  sigma: float,
  least: int,
  penalty: float,
) -> Rewards:
  """RESTRAIN's advantage, as a reward; with `algorithm.advantage='given'`.

      g(f)  = exp(-(f - centre)^2 / (2 sigma^2))
      w_j   = g(f_j) / sum_l g(f_l), f_j the share of answer j in the votes
      A_ij  = (r_ij - mean_i r_ij) / (std_i r_ij + 1e-6), r_ij = [answer i is j]
      A_i   = u sum_j w_j A_ij                if an answer has `least` votes
            = -u penalty                      else
      u     = g(share of the frozen start's most frequent answer)

  mean and std over the M trained samples; a sample without an answer agrees
  with none. Departures: a trajectory has one advantage, where the paper sums
  one clipped loss for each answer: the same as long as no ratio is clipped. The
  KL of the algorithm is not scaled by u. A group without any vote is left out,
  as in `vote.majority`, where the formula would punish it. There is no release,
  and our source is a summary of the paper: it has the formula, not the values
  of centre, sigma, least (kappa) and penalty (delta).

  Args:
    groups, context, votes, train, match, max_abstained: see `vote.majority`.
    centre: share of the largest weight, 0 to 1.
    sigma: of the Gaussian, in shares. Small: the majority alone has weight.
    least: kappa, votes.
    penalty: delta, in units of a normalised advantage.
  """
  del max_abstained

  def log_weight(share):
    return -((share - centre) ** 2) / (2 * sigma**2)

  def pay(keys, trained, question: Question):
    sizes = collections.Counter(key for key in keys if key is not None)
    reliable = math.exp(log_weight(question.meta['start_votes']['share']))
    if max(sizes.values()) < least:
      return np.full(len(keys), -reliable * penalty)
    logs = np.array([log_weight(n / len(keys)) for n in sizes.values()])
    weights = np.exp(logs - logs.max())  # of a small sigma, all would be 0
    out = np.zeros(len(keys))
    if trained.sum() < 2:  # services failed the others: there is no mean
      return out
    for answer, weight in zip(sizes, weights / weights.sum()):
      agrees = np.array([key == answer for key in keys], float)
      mean, std = agrees[trained].mean(), agrees[trained].std(ddof=1)
      out += weight * (agrees - mean) / (std + _EPS)
    return reliable * np.where(trained, out, 0.0)

  return vote.labelled(
    groups, context, vote.most_frequent, votes, train, match, pay=pay
  )


# What the config check has to know.


def _check_covered(config, fields) -> None:
  vote.check(config, fields)
  lookup.function('searchrl_jax.rewards', fields['cover'])


def _check_restrain(config, fields) -> None:
  """Raises RewardError; names the field, its value and the fix."""
  vote.check(config, fields)
  given = config.algorithm.advantage
  require(
    given == 'given',
    f'config.algorithm.advantage={given!r}: this reward is an advantage '
    "already; set it to 'given', with advantage_kw={}",
  )
  ranges = dict(
    train=(fields['train'] >= 2, 'samples are compared; at least 2'),
    centre=(0 <= fields['centre'] <= 1, 'a share, 0 to 1'),
    sigma=(fields['sigma'] > 0, 'above 0'),
    least=(1 <= fields['least'] <= fields['votes'], '1 to the number of votes'),
    penalty=(fields['penalty'] >= 0, 'at least 0'),
  )
  for name, (good, limits) in ranges.items():
    require(good, f'{name}={fields[name]}: {limits}')


found.check, covered.check = vote.check, _check_covered
restrain.check, restrain.needs = _check_restrain, ('meta.start_votes',)
found.observes = covered.observes = 'source'
for _fn in (found, covered, restrain):
  _fn.check_step, _fn.compares_group = vote.check_step, True
