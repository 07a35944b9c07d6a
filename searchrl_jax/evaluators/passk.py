"""pass@k, maj@k and best-of-k over the samples of each question.

pass@k is the unbiased estimator of Chen et al. 2021; maj@k is its
counterpart for the majority vote (`scores.maj_at_k`), certainty@k that for
the sample of greatest self-certainty (Kang et al. 2025, arXiv 2502.18581,
whose other form, votes weighted by rank, is not implemented). All are means
over questions with a bootstrap interval over questions.
"""

from collections.abc import Sequence
import functools
import math

from ml_collections import ConfigDict

from searchrl_jax.evaluators import grading
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
  chosen = f'config.eval.best_of is {e.best_of!r}'
  drawn = [f'config.eval.k holds {k}' for k in e.k if k > 1]
  drawn += [chosen] if e.best_of else []
  for good, message in (
    *(
      (
        1 <= k <= e.n,
        f'config.eval.k holds {k}, which needs config.eval.n >= {k} samples '
        f'(it is {e.n})',
      )
      for k in e.k
    ),
    (
      not e.best_of or e.n >= 2,
      f'{chosen}, which chooses among config.eval.n samples (it is {e.n}); '
      'use 2 or more',
    ),
    (
      not (e.best_of and training),
      f'{chosen}, which `evaluate` can do and a training run cannot; use '
      "best_of='' for training, and set it in `evaluate --workdir=RUN`",
    ),
    (
      e.temperature > 0 or not drawn,
      f'{", ".join(drawn)}, and config.eval.temperature=0 makes all samples '
      'of a question equal; use a temperature above 0',
    ),
  ):
    lookup.require(good, message)


def score(
  rows: Sequence[grading.Row], k: Sequence[int]
) -> dict[str, dict[tuple[str, str], float]]:
  """Returns {'pass@K', 'maj@K', 'certainty@K': {(set, question id): value}}.

  Failed trajectories do not count as samples. A question with fewer than K
  samples, or without golden answers, has no value at K. 'certainty@K' requires
  rows with certainty; a sample without one is chosen last.
  """
  questions: dict[tuple[str, str], list[grading.Row]] = {}
  for row in rows:
    if not row.failed and not math.isnan(row.em):
      questions.setdefault((row.set, row.question), []).append(row)
  certain = any(not math.isnan(row.certainty) for row in rows)
  out: dict[str, dict[tuple[str, str], float]] = {}
  for count in k:
    passed = out.setdefault(f'pass@{count}', {})
    voted = out.setdefault(f'maj@{count}', {})
    if certain:
      chosen = out.setdefault(f'certainty@{count}', {})
    for name, samples in questions.items():
      n = len(samples)
      if n < count:
        continue
      right = [row.em == 1.0 for row in samples]
      votes = [row.vote for row in samples]
      passed[name] = scores.pass_at_k(n, sum(right), count)
      # A vote for equal answers is right if any of these is right.
      good = {row.vote for row in samples if row.em == 1.0} - {None}
      voted[name] = scores.maj_at_k(votes, [v in good for v in votes], count)
      if certain:
        chosen[name] = scores.best_at_k(
          [row.certainty for row in samples], right, count
        )
  return out


def extra(config: ConfigDict):
  """The `extra` of `grading.Evaluator` for config.eval; None = no scores."""
  k = {*config.k, *([config.n] if config.best_of else ())}
  return functools.partial(score, k=sorted(k)) if k else None


def make(config: ConfigDict, sets, scorer=None, **kw) -> grading.Evaluator:
  """Checks config.eval and returns its evaluator.

  Args:
    config: the whole config.
    sets: name -> questions.
    scorer: `scoring.Scorer` of the policy, which config.eval.best_of needs.
    **kw: other arguments of `grading.Evaluator`.
  """
  check(config, training=scorer is None)
  scorer = scorer if config.eval.best_of else None
  more = extra(config.eval)
  return grading.Evaluator(sets, config=config, scorer=scorer, extra=more, **kw)
