"""pass@k, maj@k and best-of-k over the samples of each question.

pass@k is the unbiased estimator of Chen et al. 2021; maj@k is its
counterpart for the majority vote (`scores.maj_at_k`), certainty@k that for
the sample of greatest self-certainty (Kang et al. 2025, arXiv 2502.18581,
whose other form, votes weighted by rank, is not implemented). All are means
over questions with a bootstrap interval over questions.
"""

import collections
from collections.abc import Sequence
import math

from ml_collections import ConfigDict

from searchrl_jax.rewards import equivalence, scores
from searchrl_jax.run import lookup


def check(config: ConfigDict, training: bool = False) -> None:
  """Checks config.eval, before any model is loaded.

  Args:
    config: the whole config.
    training: it is the config of a training run, which has no scorer.

  Raises:
    ValueError: names the field, its value and the fix.
  """
  e = config.eval
  if e.match != equivalence.TEXT:
    equivalence.function(e.match)
  lookup.require(
    all(1 <= k <= e.n for k in e.k),
    f'config.eval.k={tuple(e.k)} needs numbers from 1 up to eval.n={e.n}',
  )
  lookup.require(
    not e.best_of or (e.n >= 2 and not training),
    f'config.eval.best_of={e.best_of!r} chooses among config.eval.n={e.n} '
    "samples: use 2 or more, and best_of='' in training (`evaluate` takes it)",
  )
  lookup.require(
    e.temperature > 0 or not (e.best_of or max(e.k, default=1) > 1),
    f'config.eval.k={tuple(e.k)}, best_of={e.best_of!r} with temperature=0, '
    'which makes all samples of a question equal; use one above 0',
  )


def score(
  rows: Sequence, k: Sequence[int]
) -> dict[str, dict[tuple[str, str], float]]:
  """Returns {'pass@K', 'maj@K', 'certainty@K': {(set, question id): value}}.

  rows: `grading.Row`. Failed trajectories do not count as samples. A question
  with fewer than K samples, or without golden answers, has no value at K.
  'certainty@K' requires rows with certainty; a sample without one is chosen
  last.
  """
  questions: dict[tuple[str, str], list] = {}
  for row in rows:
    if not row.failed and not math.isnan(row.em):
      questions.setdefault((row.set, row.question), []).append(row)
  certain = any(not math.isnan(row.certainty) for row in rows)
  out: dict[str, dict[tuple[str, str], float]] = collections.defaultdict(dict)
  for name, samples in questions.items():
    right = [row.em == 1.0 for row in samples]
    votes, certainties = zip(*((row.vote, row.certainty) for row in samples))
    for n in (n for n in k if n <= len(samples)):
      out[f'pass@{n}'][name] = scores.pass_at_k(len(right), sum(right), n)
      out[f'maj@{n}'][name] = scores.maj_at_k(votes, right, n)
      if certain:
        out[f'certainty@{n}'][name] = scores.best_at_k(certainties, right, n)
  return out
