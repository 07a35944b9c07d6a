"""pass@k, maj@k and best-of-k over the samples of each question.

pass@k is the unbiased estimator of Chen et al. 2021; maj@k is its
counterpart for the majority vote (`scores.maj_at_k`), certainty@k that for
the sample of greatest self-certainty (Kang et al. 2025, arXiv 2502.18581,
whose other form, votes weighted by its rank, is not here). All are means over
questions with a bootstrap interval over questions.
"""

from collections.abc import Iterator, Sequence
import math

from ml_collections import ConfigDict

from searchrl_jax.evaluators import answer
from searchrl_jax.rewards import equivalence, scores
from searchrl_jax.run import lookup

BEST_OF = ('', 'certainty')


def check(config: ConfigDict, training: bool = False) -> None:
  """What config.eval cannot be, found before any model loads.

  Args:
    config: the whole config.
    training: evaluations of a training run have no parameters beside the
      engine's that a scorer could use.

  Raises:
    ValueError: names the field, what it is and the mend.
  """
  e = config.eval
  for field, least in (
    ('n', 1),
    ('bootstrap', 1),
    ('questions', 0),
    ('temperature', 0),
  ):
    lookup.require(
      e[field] >= least,
      f'config.eval.{field}={e[field]}: at least {least} is needed',
    )
  if e.match != equivalence.TEXT:
    equivalence.function(e.match)
  lookup.require(
    0 < e.top_p <= 1, f'config.eval.top_p={e.top_p}: above 0, at most 1'
  )
  for k in e.k:
    lookup.require(
      1 <= k <= e.n,
      f'config.eval.k holds {k}, which needs config.eval.n >= {k} samples '
      f'(it is {e.n})',
    )
  drawn = [f'config.eval.k holds {k}' for k in e.k if k > 1]
  if e.best_of:
    lookup.require(
      e.best_of in BEST_OF,
      f'config.eval.best_of={e.best_of!r}: {lookup.near(e.best_of, BEST_OF)}',
    )
    drawn.append(f'config.eval.best_of is {e.best_of!r}')
    lookup.require(
      e.n >= 2,
      f'{drawn[-1]}, which chooses among config.eval.n samples (it is '
      f'{e.n}); use 2 or more',
    )
    lookup.require(
      not training,
      f'{drawn[-1]}, which `evaluate` can do and a training run cannot; '
      "leave it '' here and give it to `evaluate --workdir=RUN`",
    )
  lookup.require(
    e.temperature > 0 or not drawn,
    f'{", ".join(drawn)}, and config.eval.temperature=0 makes all samples of '
    'a question equal; use a temperature above 0',
  )


def score(
  rows: Sequence[answer.Row], k: Sequence[int]
) -> dict[str, dict[tuple[str, str], float]]:
  """{'pass@K', 'maj@K' or 'certainty@K': {(set, question id): value}}.

  Failed trajectories are no samples. A question with fewer than K samples, or
  without golden answers, has no value at K. 'certainty@K' is there where rows
  have their certainty; a sample without one is the last to be chosen.
  """
  questions: dict[tuple[str, str], list[answer.Row]] = {}
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
      # Names of one thing are one vote, which any of them makes right.
      good = {row.vote for row in samples if row.em == 1.0} - {None}
      voted[name] = scores.maj_at_k(votes, [v in good for v in votes], count)
      if certain:
        chosen[name] = scores.best_at_k(
          [row.certainty for row in samples], right, count
        )
  return out


class Evaluator:
  """The numbers of an answer evaluator, and pass@k of the same samples."""

  def __init__(self, answers: answer.Evaluator, config: ConfigDict):
    """Reads config.eval: k, n, best_of, bootstrap, seed; see `check`."""
    self._answers, self._config = answers, config
    self.sets = answers.sets
    more = {config.n} if config.best_of else set()
    self._k = sorted({*config.k, *more})

  def run(self, step: int) -> Iterator[tuple[str, float]]:
    """Yields (name, value), names as `answer.Evaluator` with 'pass@K'."""
    yield from self.collect(step).values

  def collect(self, step: int) -> answer.Evaluation:
    """As `answer.Evaluator.collect`, with more values."""
    evaluation = self._answers.collect(step)
    for label, rows in evaluation.slices.items():
      for name, values in score(rows, self._k).items():
        interval = scores.bootstrap(
          [values[q] for q in sorted(values)],
          resamples=self._config.bootstrap,
          seed=self._config.seed,
        )
        if interval.n:
          evaluation.values.extend(answer.named(f'{label}/{name}', interval))
    return evaluation


def make(config: ConfigDict, sets, scorer=None, **kw):
  """The evaluator that config.eval asks for, checked.

  Args:
    scorer: `scoring.Scorer` of the policy, which config.eval.best_of needs.
    kw: as `answer.Evaluator` takes them.
  """
  check(config, training=scorer is None)
  e = config.eval
  found = answer.Evaluator(
    sets, config=config, scorer=scorer if e.best_of else None, **kw
  )
  return Evaluator(found, e) if e.k or e.best_of else found
