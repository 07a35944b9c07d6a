"""Majority vote: the most frequent answer is the label (TTRL).

Zuo et al. 2025, arXiv 2504.16084. All N samples of a question vote; the first M
are trained on, with reward 1 if the answer is the label, else 0. Golden answers
affect only the parts, never value or valid. Differences from the released code:
  * Votes are counted by equality of answers (`equivalence`). The released code
    compares strings, so 0.5 and 1/2 are different votes.
  * A missing answer is not a vote, and a question without votes is left out. In
    the released code the empty string is a vote, and unparsed samples are
    rewarded.
  * The label is compared with the golden answer unchanged. The released code
    extracts it once more, so 14/3 becomes 3.
  * GPQA's letter is the content of the box. In the released code it is the last
    A to D in the text, which may be the article "a".
  * Each reward is placed in its own trajectory. The released code places all of
    a batch at the length of the last sample, which only GRPO tolerates.

Of tied classes, the one with the earliest vote is the label. If the votes lost
to failed searches could have changed the majority, there is no label.

Agreement also rises where labels turn wrong. What else a step says of its votes
without golden answers is in the parts of `majority`; `guarded.py` has votes
that are to prevent it. What the frozen start made of a question may stand in
`Question.meta['start_votes']`: {label, share (of it among the samples),
searches (their mean)}; experiments/ttrl/start.py puts it there.
"""

import collections
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from searchrl_jax import lookup
from searchrl_jax.rewards import equivalence, scores
from searchrl_jax.rewards.core import RewardContext, require
from searchrl_jax.types import SEARCH, Group, Question, Rewards, Trajectory

# (keys of the votes, None = no vote; question; step) -> key of the label.
Choose = Callable[[list[str | None], Question, int], str | None]
# (trajectory, its answer) -> whether it votes.
Counts = Callable[[Trajectory, str], bool]
# (keys of the votes, which are trained on, question) -> their rewards.
Pay = Callable[[list[str | None], np.ndarray, Question], np.ndarray]


async def majority(
  groups: Sequence[Group],
  context: RewardContext,
  *,
  votes: int,
  train: int,
  match: str,
  max_abstained: float,
) -> Rewards:
  """1 if the answer is the most frequent one of its group.

  Args:
    groups: of `votes` samples each.
    context: its env reads answers.
    votes: N, equal to config.rollout.group.
    train: M; the reward of samples M and later is invalid.
    match: 'text' or a function's dotted name; see `equivalence`.
    max_abstained: allowed share of questions without a vote.

  Returns:
    Parts, for all N samples that did not fail: abstained, silent (no sample has
    an answer that can be parsed), voting (of a sample: whether it votes),
    distinct (number of different answers), agreement (share in N of the most
    frequent one, whether it votes or not); for questions with a vote, tie,
    majority_ratio (share of the label in N) and ahead (mean searches of those
    that vote for the label, less those of the others, if there are any); for
    questions with golden answers, label_accuracy, maj@N, pass@N, pass@M, right
    (of a sample; ground_truth_ratio in TTRL) and reward_accuracy (of the M).
    For questions with meta['start_votes'], what changed since the start:
    gained (agreement), lost (mean searches, those of the start less these) and,
    with a vote, flipped (whether the label is another).

  Raises:
    RewardError: a group of another size.
  """
  del max_abstained  # of a step: `check_step`
  return labelled(groups, context, most_frequent, votes, train, match)


def check(config, fields) -> None:
  """Checks the fields of `majority` against the whole config.

  Raises:
    RewardError: names the field, its value and the fix.
  """
  n, m, rollout = fields['votes'], fields['train'], config.rollout
  sample = lookup.sampler(rollout.sampler)
  cells = getattr(sample, 'cells', lambda r: ())
  others = getattr(sample, 'foreign', False) or 'role' in cells(rollout)
  require(
    n == rollout.group and n >= 2,
    f'votes={n} with config.rollout.group={rollout.group}: all samples of a '
    'question vote; set both to the same number, at least 2',
  )
  require(
    not rollout.refill,
    f'votes={n} with config.rollout.refill={rollout.refill}: max_abstained '
    'is meaningless for the few questions of a refill; use refill=0',
  )
  require(
    not others,
    f'votes={n} with config.rollout.sampler={rollout.sampler!r}: a group has '
    "verdicts or traces of others, which are no votes; use 'chains'",
  )
  what = f'train={m} of votes={n}: 1 to {n} samples are trained on'
  require(1 <= m <= n, what)
  equivalence.function(fields['match'])


def check_step(groups, reward: Rewards, context, fields) -> None:
  """Checks the votes of a step.

  Raises:
    RewardError: too many questions without a vote.
  """
  del context
  by_group = np.split(reward.parts['silent'], np.cumsum([*map(len, groups)]))
  names = [
    group[0].question.id
    for group, column in zip(groups, by_group)
    if (column == 1).any()
  ]
  most, match = fields['max_abstained'], fields['match']
  require(
    len(names) <= most * len(groups),
    f'{len(names)} of {len(groups)} questions have no vote under '
    f'match={match!r} ({", ".join(map(repr, names[:3]))}, ...), above '
    f'max_abstained={most}: none of their answers can be parsed. Inspect the '
    'trajectories; set match and config.env.answer for this data',
  )


majority.check, majority.check_step = check, check_step
majority.compares_group = True


def most_frequent(keys, question, step) -> str | None:
  del question, step
  votes = [key for key in keys if key is not None]
  return max(votes, key=votes.count) if votes else None  # the first of equals


def labelled(
  groups: Sequence[Group],
  context: RewardContext,
  choose: Choose,
  votes: int,
  train: int,
  match: str,
  counts: Counts | None = None,
  pay: Pay | None = None,
) -> Rewards:
  """Rewards as in `majority`, with the labels that `choose` returns.

  counts: which samples with an answer vote; None = all. The others earn 0.
  pay: what samples earn where there is a label; None = 1 for a vote for it.
  """
  n = sum(map(len, groups))
  value, valid = np.zeros(n, np.float32), np.zeros(n, bool)
  parts = collections.defaultdict(lambda: np.full(n, np.nan, np.float32))
  at = 0
  for group in groups:
    question = group[0].question
    require(
      len(group) == votes,
      f'question {question.id!r} has {len(group)} samples, but votes={votes}: '
      'all samples of a group vote; set it to config.rollout.group',
    )
    alive = [i for i, t in enumerate(group) if not t.failed]
    answers = [context.env.answer(group[i]) for i in alive]
    given = keys = equivalence.keys(answers, match)
    if counts is not None:
      keys = [
        key if key is not None and counts(group[i], answer) else None
        for i, answer, key in zip(alive, answers, given)
      ]
    own, at = at + np.array(alive, int), at + votes
    sizes = _sizes(keys)
    lead = sizes[-1] - sum(sizes[-2:-1]) if sizes else 0
    sure = len(alive) == votes or lead > votes - len(alive)
    label = choose(keys, question, context.step) if sure else None
    parts['abstained'][own] = label is None
    parts['silent'][own] = not _sizes(given)
    parts['voting'][own] = [key is not None for key in keys]
    now = np.array(alive, int) < train
    agrees = np.array([key == label for key in keys], bool)
    if label is not None:
      valid[own[now]] = True
      value[own] = agrees if pay is None else pay(keys, now, question)
      parts['tie'][own] = not lead
      parts['majority_ratio'][own] = keys.count(label) / votes
    searches = [len(group[i].calls(SEARCH)) for i in alive]
    for name, part in _signs(
      given, agrees, label, searches, question, votes, match
    ):
      parts[name][own] = part
    if not any(a.strip() for a in question.answers):
      continue
    golds = question.answers
    right = [bool(equivalence.correct(a, golds, match)) for a in answers]
    good = {key for key, ok in zip(keys, right) if ok} - {None}
    parts['right'][own] = right
    if len(alive) == votes:
      parts[f'pass@{votes}'][own] = any(right)
      parts[f'pass@{train}'][own] = scores.pass_at_k(votes, sum(right), train)
      parts[f'maj@{votes}'][own] = scores.maj_at_k(keys, right, votes)
    if label is not None:
      parts['label_accuracy'][own] = label in good
      parts['reward_accuracy'][own[now]] = (agrees == right)[now]
  return Rewards(value, valid, parts=dict(parts))


def _sizes(keys: Sequence[str | None]) -> list[int]:
  """The numbers of votes of the different answers, in increasing order."""
  return sorted(keys.count(key) for key in {*keys} - {None})


def _signs(
  given: list[str | None],
  agrees: np.ndarray,
  label: str | None,
  searches: Sequence[int],
  question: Question,
  votes: int,
  match: str,
) -> Iterator[tuple[str, float]]:
  """What a group shows without golden answers; see the parts of `majority`.

  Args:
    given: keys of all answers.
    agrees: bool [samples]: whether a sample votes for the label.
    label: None = there is none.
    searches: of each sample.
    question, votes, match: see `majority`.
  """
  if not given:  # a service failed all of them
    return
  sizes, made = _sizes(given), np.array(searches, float)
  agreement = sizes[-1] / votes if sizes else 0.0
  yield 'distinct', len(sizes)
  yield 'agreement', agreement
  if label is not None and 0 < agrees.sum() < len(agrees):
    yield 'ahead', made[agrees].mean() - made[~agrees].mean()
  start = question.meta.get('start_votes')
  if start:
    yield 'gained', agreement - start['share']
    yield 'lost', start['searches'] - made.mean()
    if label is not None:
      before = [start['label'] or '']
      yield 'flipped', 1 - equivalence.correct(label, before, match)
