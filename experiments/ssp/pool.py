"""The pool of questions that stood, to fill the slots of those that do not.

The checkpoint has the pool. At intervals it is cut to its newest questions. If
a question is asked again, its share is replaced; SSP's release stores it once
more, so that reused questions are reused more and more often.
"""

import collections
from collections.abc import Mapping, Sequence
import math
import statistics
from typing import Any

from ml_collections import ConfigDict

from searchrl_jax.checks import ConfigError
from searchrl_jax.types import Question


class Pool:
  """Questions with the share of solvers that answered them, oldest first.

  Args:
    config: config.selfplay: reuse_threshold (largest share of a question that
      is drawn), clear_every (steps; 0 = never), keep_ratio (share of
      questions, the newest, that stay then).
    fingerprint: of answers, corpus and templates; `restore` requires the same.
  """

  def __init__(self, config: ConfigDict, fingerprint: str):
    self._config, self._fingerprint = config, fingerprint
    self._known: dict[str, tuple[Question, float]] = {}

  def __len__(self) -> int:
    return len(self._known)

  def add(
    self, questions: Sequence[Question], shares: Mapping[str, float]
  ) -> None:
    """Adds the `questions` that have a share.

    A question that was asked several times gets the mean of its shares.
    """
    found = collections.defaultdict(list)
    for q in questions:
      if q.id in shares:
        found[q.meta.get('reuse_of', q.id)].append((q, shares[q.id]))
    for name, asked in found.items():
      known = self._known.get(name, asked[0])[0]
      self._known[name] = known, statistics.fmean(s for _, s in asked)

  def draw(self, n: int, rng) -> list[Question]:
    """Draws n questions with replacement; none if the pool is empty.

    They are within the threshold, unless no question is.
    """
    most = self._config.reuse_threshold
    fit = [q for q, share in self._known.values() if share <= most]
    fit = fit or [q for q, _ in self._known.values()]
    if not fit:
      return []
    return [fit[i] for i in rng.integers(len(fit), size=n)]

  def tick(self, step: int) -> None:
    """After `step` steps: cuts the pool, if it is time."""
    every = self._config.clear_every
    if every and step % every == 0:
      kept = math.ceil(len(self) * self._config.keep_ratio)
      self._known = dict(list(self._known.items())[len(self) - kept :])

  def state(self) -> dict[str, Any]:
    """Plain JSON."""
    return {
      'fingerprint': self._fingerprint,
      'questions': [
        {
          'id': name,
          'text': q.text,
          'answers': list(q.answers),
          'source': q.source,
          'share': share,
          **({'meta': dict(q.meta)} if q.meta else {}),
        }
        for name, (q, share) in self._known.items()
      ],
    }

  def restore(self, state: Mapping[str, Any]) -> None:
    """Takes a saved state.

    Raises:
      ConfigError: it is of other questions.
    """
    if state['fingerprint'] != self._fingerprint:
      raise ConfigError(
        'the saved pool holds questions of another config (fingerprint '
        f'{state["fingerprint"]}, now {self._fingerprint}): its answers, '
        'corpus or templates differ; continue with those of the saved run, or '
        'start a new run folder'
      )
    self._known = {
      r['id']: (
        Question(
          r['id'],
          r['text'],
          tuple(r['answers']),
          r['source'],
          meta=r.get('meta', {}),
        ),
        r['share'],
      )
      for r in state['questions']
    }
