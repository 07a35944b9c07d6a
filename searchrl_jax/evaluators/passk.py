"""pass@k and maj@k over the samples of each question.

pass@k is the unbiased estimator of Chen et al. 2021; maj@k is its
counterpart for the majority vote (`metrics.maj_at_k`). Both are means over
questions with a bootstrap interval over questions.
"""

import math
from collections.abc import Iterator, Sequence

from ml_collections import ConfigDict

from searchrl_jax import metrics
from searchrl_jax.evaluators import answer


def score(
  rows: Sequence[answer.Row], k: Sequence[int]
) -> dict[str, dict[tuple[str, str], float]]:
  """{'pass@K' or 'maj@K': {(set, question id): value}}.

  Failed trajectories are no samples. A question with fewer than K samples, or
  without golden answers, has no value at K.
  """
  questions: dict[tuple[str, str], list[answer.Row]] = {}
  for row in rows:
    if not row.failed and not math.isnan(row.em):
      questions.setdefault((row.set, row.question), []).append(row)
  out: dict[str, dict[tuple[str, str], float]] = {}
  for count in k:
    passed = out.setdefault(f'pass@{count}', {})
    voted = out.setdefault(f'maj@{count}', {})
    for name, samples in questions.items():
      n = len(samples)
      if n < count:
        continue
      right = [row.em == 1.0 for row in samples]
      votes = [row.vote for row in samples]
      passed[name] = metrics.pass_at_k(n, sum(right), count)
      voted[name] = metrics.maj_at_k(votes, right, count)
  return out


class Evaluator:
  """The numbers of an answer evaluator, and pass@k of the same samples."""

  def __init__(self, answers: answer.Evaluator, config: ConfigDict):
    """Reads config.eval: k, n, bootstrap, seed.

    Raises:
      ValueError: a k that is not within 1..config.eval.n, or one above 1 of
        greedy samples, which are all equal.
    """
    for k in config.k:
      if not 1 <= k <= config.n:
        raise ValueError(
          f'config.eval.k holds {k}, which needs config.eval.n >= {k} samples '
          f'(it is {config.n})'
        )
      if k > 1 and config.temperature == 0:
        raise ValueError(
          f'config.eval.k holds {k}, and config.eval.temperature=0 makes all '
          'samples of a question equal; use a temperature above 0, or k=(1,)'
        )
    self._answers, self._config = answers, config

  def run(self, step: int) -> Iterator[tuple[str, float]]:
    """Yields (name, value), names as `answer.Evaluator` with 'pass@K'."""
    evaluation = self._answers.collect(step)
    yield from evaluation.values
    for label, rows in evaluation.slices.items():
      for name, values in score(rows, self._config.k).items():
        interval = metrics.bootstrap(
          [values[q] for q in sorted(values)],
          resamples=self._config.bootstrap,
          seed=self._config.seed,
        )
        if interval.n:
          yield from answer.named(f'{label}/{name}', interval)


def make(config: ConfigDict, sets, **kw):
  """The evaluator that config.eval asks for: with pass@k if eval.k names any.

  kw: as `answer.Evaluator` takes them.
  """
  found = answer.Evaluator(sets, config=config, **kw)
  return Evaluator(found, config.eval) if config.eval.k else found
