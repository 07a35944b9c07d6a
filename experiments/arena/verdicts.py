"""Verdicts on claims, from values of paired runs.

A claim says that an arm has a higher (or lower) value of a metric than another
arm. Runs are paired by case: seed, and with it world, warm start and questions.
An arm that many claims are against may have further runs of a case, whose
samples differ (REPEATS): their mean is compared, which has less noise.
The interval is Student's t over the differences, 95 %; the p-value is two-sided
and corrected over all claims of all phases (Holm 1979). MARGIN is in units of
the metric. b is 0; of a claim `within` a margin, it is minus the margin.

    shown         above b with p <= 0.05 after the correction
    contradicted  the interval, uncorrected, lies below b
    equivalent    the interval, uncorrected, lies within the claim's margin
    undecided     else; also where all differences are equal: they say nothing
                  of their spread (two arms that never collapse; an arm whose
                  method never acts); and while runs of the claim are left: a
                  verdict that may fall after any seed is wrong several times
                  as often
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math
import statistics

import numpy as np
import scipy.stats

from searchrl_jax.sweeps import figures

MARGIN = 0.05
LEVEL = 0.05
REPEATS = ('-2', '-3')  # after the name of an arm: further runs of its cases
# Phase -> arm -> case -> values by name.
Values = Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]]


@dataclasses.dataclass(frozen=True)
class Claim:
  """That `method` has a higher `metric` than `against` (sign -1: a lower one).

  margin: differences below it do not matter. within: the claim is that the
  method is not worse by more than the margin. phase: of the runs. mechanism:
  with an exact oracle in place of a trained scorer, a similarity of texts or a
  judge, the verdict is about the mechanism, not about the paper.
  """

  method: str
  claim: str
  metric: str = 'hard/em'
  against: str = 'grpo'
  sign: int = 1
  margin: float = MARGIN
  within: bool = False
  phase: str = 'report'
  mechanism: bool = False


def differences(claim: Claim, values: Values) -> np.ndarray:
  """In the claimed direction, for the cases that both arms have."""
  runs = values.get(claim.phase, {})
  a, b = (by_case(runs, x, claim.metric) for x in (claim.method, claim.against))
  cases = sorted(a.keys() & b.keys(), key=int)
  return np.array([claim.sign * (a[case] - b[case]) for case in cases])


def by_case(runs, arm: str, metric: str) -> dict[str, float]:
  """{case: value of an arm}: the mean of its run and of further ones."""
  again = [runs.get(arm + suffix, {}) for suffix in ('', *REPEATS)]
  return {
    case: statistics.fmean(
      run[case][metric] for run in again if metric in run.get(case, {})
    )
    for case, found in again[0].items()
    if metric in found
  }


def bound(claim: Claim) -> float:
  """What the mean difference has to be above."""
  return -claim.margin if claim.within else 0.0


def spreads(x: np.ndarray) -> bool:
  """Whether differences have a spread, but for rounding."""
  return len(x) > 1 and float(np.ptp(x)) > 1e-9


def p_value(x: np.ndarray, bound: float = 0.0) -> float:
  """Two-sided, that the mean difference is `bound`; 1 if it cannot be told."""
  if not spreads(x):
    return 1.0
  return float(scipy.stats.ttest_1samp(x, bound).pvalue)


def holm(ps: Sequence[float]) -> list[float]:
  """Adjusted p-values: max over smaller ones of (m - rank) p, at most 1."""
  order, out, most = np.argsort(ps, kind='stable'), [1.0] * len(ps), 0.0
  for rank, i in enumerate(order):
    most = max(most, (len(ps) - rank) * ps[i])
    out[i] = min(1.0, most)
  return out


def judge(
  claims: Sequence[Claim], values: Values, complete: Sequence[bool]
) -> list[dict]:
  """A record for each claim, as results.json has them.

  value (the mean), interval and interquartile mean are of the differences in
  the claimed direction, without the margin. complete: whether all runs of a
  claim are there. If not, it is undecided, and has a p of 1: what is corrected
  for it becomes no worse when it is complete.
  """
  found = [differences(claim, values) for claim in claims]
  adjusted = holm(
    [
      p_value(x, bound(claim)) if whole else 1.0
      for claim, x, whole in zip(claims, found, complete, strict=True)
    ]
  )
  out = []
  for claim, x, p, whole in zip(claims, found, adjusted, complete, strict=True):
    record = dataclasses.asdict(claim) | {'n_seeds': len(x), 'p_holm': p}
    record |= {'value': None, 'interval': None, 'interquartile': None}
    record['verdict'] = 'undecided'
    if len(x):
      record['value'] = float(np.mean(x))
    if spreads(x):
      mean, low, high, _ = figures.interval(x)
      record['interval'] = [low, high]
      record['interquartile'] = figures.interquartile([x])._asdict()
      if whole:
        record['verdict'] = verdict(claim, mean, low, high, p)
    out.append(record)
  return out


def verdict(claim: Claim, mean: float, low: float, high: float, p: float):
  if p <= LEVEL and mean > bound(claim):
    return 'shown'
  if high < bound(claim):
    return 'contradicted'
  if -claim.margin <= low and high <= claim.margin:
    return 'equivalent'
  return 'undecided'


def seeds_needed(pilot: Sequence[Sequence[float]], half: float) -> int:
  """Runs for which a t interval (95 %) of paired differences is +- half.

  pilot: differences of each of several claims, whose variances are averaged: of
  one claim and four runs, the number would lie anywhere between 4 and 18 where
  11 are needed.
  """
  spread = math.sqrt(np.mean([np.var(x, ddof=1) for x in pilot]))
  n = 2
  while scipy.stats.t.ppf(0.975, n - 1) * spread / math.sqrt(n) > half:
    n += 1
  return n


def agreement(scores: Sequence[Sequence[float]]) -> dict[str, float]:
  """Kendall's W, corrected for ties, of judges' scores of the same arms.

  scores: of each judge (a warm-start mixture), of each of 3 arms or more.

  Returns:
    W: 1: all order the arms alike; about 1 / judges if they order by chance;
    and p, that it is chance (Friedman's test).
  """
  found = scipy.stats.friedmanchisquare(*zip(*scores, strict=True))
  judges, arms = len(scores), len(scores[0])
  w = float(found.statistic) / (judges * (arms - 1))
  return {'w': w, 'p': float(found.pvalue)}
