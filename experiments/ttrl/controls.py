"""Other labels in the place of the majority's: what the vote is held against.

Votes, trained samples and parts are those of `rewards.vote.majority`, so that
an arm differs in its labels alone.
"""

from collections.abc import Callable, Sequence
import functools
import zlib

import numpy as np

from searchrl_jax.rewards import equivalence, vote
from searchrl_jax.types import Question


def _control(choose: Callable):
  """A reward as `vote.majority`, with another label.

  choose: (keys of the votes, question, step, match) -> key of the label, None:
  there is none; see `vote.Choose`.
  """

  async def control(groups, context, *, votes, train, match, max_abstained):
    del max_abstained  # of a step: `vote.check_step`
    own = functools.partial(choose, match=match)
    return vote.labelled(groups, context, own, votes, train, match)

  control.__name__, control.__doc__ = choose.__name__, choose.__doc__
  control.check, control.check_step = vote.check, vote.check_step
  control.compares_group = True
  return control


@_control
def golds(keys, question, step, match) -> str | None:
  """The golden answer: the ceiling. Where no vote has it, there is no label."""
  del step
  answers = question.answers
  right = (key for key in keys if equivalence.correct(key, answers, match))
  return next(right, None)


@_control
def random(keys, question, step, match) -> str | None:
  """Any of the answers that the votes name, each as likely: what is learnt
  from groups, rewards and their spread without knowing which answer is right.

  The draw depends on question and step alone.
  """
  del match
  return drawn(sorted(set(keys) - {None}), question, step)


@_control
def random_vote(keys, question, step, match) -> str | None:
  """The answer of any of the votes, so frequent answers more often: a vote of
  one, whose mean over draws still points to the majority; drawn as `random`.
  """
  del match
  return drawn([key for key in keys if key], question, step)


def drawn(keys: Sequence[str], question: Question, step: int) -> str | None:
  seed = zlib.crc32(repr((question.id, step)).encode())
  rng = np.random.default_rng(seed)
  return keys[rng.integers(len(keys))] if keys else None


golds.needs = ('answers',)
