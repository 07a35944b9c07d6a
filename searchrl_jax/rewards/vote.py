"""Majority vote: the answer that most samples agree on is the label (TTRL).

Zuo et al. 2025, arXiv 2504.16084. Of the N samples of a question all vote and
the first M are trained on: 1 where the answer is the label, else 0. Golden
answers reach the parts alone, never value or valid. Otherwise than released:
  * votes are counted by what answers mean (`equivalence`); there by the exact
    string, so that 0.5 and 1/2 split;
  * no answer is no vote, and without any vote a question is left out; there
    the empty string is a vote, and unparsed samples reward each other;
  * the label is compared with the golden answer as it stands; there it is
    extracted once more, and 14/3 becomes 3;
  * GPQA's letter is what the box holds; there the last A to D in the text,
    which the article "a" is;
  * a trajectory's reward is its own; there all of a batch stand at the last
    sample's length, which only GRPO forgives.

Ties go to the class whose first vote is the earliest sample. Where the votes
that a service's failures took could have changed who leads, there is no label.
"""

import collections
from collections.abc import Callable, Sequence

import numpy as np

from searchrl_jax.rewards import equivalence, scores
from searchrl_jax.rewards.core import RewardContext, RewardError
from searchrl_jax.run import lookup
from searchrl_jax.types import Group, Question, Rewards

# (a key for each vote, or None; the question; the step) -> the label's key.
Choose = Callable[[list[str | None], Question, int], str | None]


async def majority(
  groups: Sequence[Group],
  context: RewardContext,
  *,
  votes: int,
  train: int,
  match: str,
  max_abstained: float,
) -> Rewards:
  """1 where the answer is the one that most of its group give.

  Args:
    groups: of `votes` samples each.
    context: its env reads answers.
    votes: N, as config.rollout.group.
    train: M; of samples M and later the reward is invalid.
    match: 'text' or a function's dotted name; see `equivalence`. Text also
      counts names of one thing as one answer, where the data knows them:
      question.meta['synonyms'], [[name, name, ...], ...], of anything that may
      be answered. (Golden answers and their aliases are none of these.)
    max_abstained: share of questions without a vote beyond which it raises.

  Returns:
    Parts, of all N samples but failed ones: abstained, and of questions with
    a vote tie and majority_ratio (the label's share of N); where there are
    golden answers, label_accuracy, maj@N, pass@N, pass@M, right (a sample's
    own; TTRL's ground_truth_ratio) and reward_accuracy (of the M).

  Raises:
    RewardError: groups of another size, or too many questions without a vote.
  """
  return labelled(
    groups,
    context,
    most_frequent,
    votes=votes,
    train=train,
    match=match,
    max_abstained=max_abstained,
  )


def check(config, fields) -> None:
  """What the fields of `majority` cannot be beside the whole config.

  Raises:
    RewardError: names the field, what it is and the mend.
  """
  n, m = fields['votes'], fields['train']
  lookup.require(
    n == config.rollout.group and n >= 2,
    f'votes={n} with config.rollout.group={config.rollout.group}: all '
    'samples of a question vote, 2 or more; give both the same number',
    RewardError,
  )
  lookup.require(
    not config.rollout.refill,
    f'votes={n} with config.rollout.refill={config.rollout.refill}: of a few '
    'further questions the share without a vote says nothing; use 0',
    RewardError,
  )
  lookup.require(
    1 <= m <= n,
    f'train={m} of votes={n}: 1 to {n} samples are trained',
    RewardError,
  )
  lookup.require(
    config.algorithm.advantage != 'remax',
    "config.algorithm.advantage='remax' takes the reward of one greedy "
    'answer, and one answer is no majority; use another advantage',
    RewardError,
  )
  if fields['match'] != equivalence.TEXT:
    equivalence.function(fields['match'])


majority.check = check


def most_frequent(keys, question, step) -> str | None:
  del question, step
  found = [key for key in keys if key is not None]
  return max(found, key=found.count) if found else None  # the first of equals


def labelled(
  groups: Sequence[Group],
  context: RewardContext,
  choose: Choose,
  *,
  votes: int,
  train: int,
  match: str,
  max_abstained: float,
) -> Rewards:
  """As `majority`, with labels that `choose` takes from the votes."""
  lookup.require(
    context.env, 'votes on answers need RewardContext.env', RewardError
  )
  n = sum(map(len, groups))
  value, valid = np.zeros(n, np.float32), np.zeros(n, bool)
  parts = collections.defaultdict(lambda: np.full(n, np.nan, np.float32))
  silent, at = [], 0
  for group in groups:
    if len(group) != votes:
      raise RewardError(
        f'question {group[0].question.id!r} has {len(group)} samples and '
        f'votes={votes}: all of a group vote; set it to config.rollout.group'
      )
    question = group[0].question
    alive = [i for i, t in enumerate(group) if not t.failed]
    answers = [context.env.answer(group[i]) for i in alive]
    keys = equivalence.keys(answers, match, question.meta.get('synonyms', ()))
    rows, at = at + np.array(alive, int), at + votes
    counts = sorted(keys.count(key) for key in set(keys) - {None})
    lead = counts[-1] - sum(counts[-2:-1]) if counts else 0
    sure = len(alive) == votes or lead > votes - len(alive)
    label = choose(keys, question, context.step) if sure else None
    parts['abstained'][rows] = label is None
    if alive and not counts:
      silent.append(question.id)
    trained = rows[np.array(alive, int) < train]
    if label is not None:
      valid[trained] = True
      value[rows] = [key == label for key in keys]
      parts['tie'][rows] = not lead
      parts['majority_ratio'][rows] = keys.count(label) / votes
    if not any(a.strip() for a in question.answers):
      continue
    right = [
      bool(equivalence.correct(a, question.answers, match)) for a in answers
    ]
    good = {key for key, own in zip(keys, right) if own} - {None}
    parts['right'][rows] = right
    if len(alive) == votes:
      parts[f'pass@{votes}'][rows] = any(right)
      parts[f'pass@{train}'][rows] = scores.pass_at_k(votes, sum(right), train)
      parts[f'maj@{votes}'][rows] = scores.maj_at_k(
        keys, [key in good for key in keys], votes
      )
    if label is not None:
      parts['label_accuracy'][rows] = label in good
      parts['reward_accuracy'][trained] = (value[rows] == right)[: len(trained)]
  if len(silent) > max_abstained * len(groups):
    raise RewardError(
      f'{len(silent)} of {len(groups)} questions have no vote under '
      f'match={match!r} ({", ".join(map(repr, silent[:3]))}, ...), above '
      f'max_abstained={max_abstained}: no answer of theirs parses. Look at the '
      'trajectories; use the match, and the config.env.answer, of such answers'
    )
  return Rewards(value, valid, parts=dict(parts))
