"""Verdicts on claims, from values of paired runs.

A claim says that an arm has a higher (or lower) value of a metric than another
arm. Runs are paired by case: seed, and with it world, warm start and questions.
The interval is Student's t over the differences, 95 %; the p-value is two-sided
and corrected over all claims of all phases (Holm 1979). MARGIN is in units of
the metric. b is 0; of a claim `within` a margin, it is minus the margin. The
verdict is the first of these that holds:

    shown         above b with p <= 0.05 after the correction
    contradicted  below b with p <= 0.05 after the correction
    equivalent    the interval, uncorrected, lies within the claim's margin
    undecided     else; also where all differences are equal: they say nothing
                  of their spread (two arms that never collapse; an arm whose
                  method never acts); and while runs of the claim are left: a
                  verdict that may fall after any seed is wrong several times
                  as often

Where more is better and the means of both arms at the end are at most MARGIN,
both have collapsed: that they are equal, or not worse by a margin, says
nothing, and is undecided. A difference that is shown or contradicted may still
lie within the margin: `small` says so.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math

import numpy as np
import scipy.stats

from searchrl_jax.sweep import figures

MARGIN = 0.05
LEVEL = 0.05
ENDS = {'run/em': 'hard/em'}  # what a metric of training is at the end
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


def pairs(claim: Claim, values: Values) -> np.ndarray:
  """[n, 2]: the metric of both arms, for the cases that both have."""
  runs = values.get(claim.phase, {})
  a, b = (by_case(runs, x, claim.metric) for x in (claim.method, claim.against))
  cases = sorted(a.keys() & b.keys(), key=int)
  return np.array([(a[case], b[case]) for case in cases]).reshape(-1, 2)


def differences(claim: Claim, values: Values) -> np.ndarray:
  """In the claimed direction, for the cases that both arms have."""
  own, other = pairs(claim, values).T
  return claim.sign * (own - other)


def by_case(runs, arm: str, metric: str) -> dict[str, float]:
  """{case: value of an arm}."""
  found = runs.get(arm, {}).items()
  return {case: run[metric] for case, run in found if metric in run}


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
  the claimed direction, without the margin. end: the differences in ENDS of the
  metric. complete: whether all runs of a claim are there. If not, it is
  undecided, p_holm is None, and its p is 1 for the others, for which it becomes
  no worse when it is complete.
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
    record = dataclasses.asdict(claim) | {'n_seeds': len(x)}
    record |= {'value': None, 'interval': None, 'interquartile': None}
    record |= {'p_holm': p if whole else None, 'verdict': 'undecided'}
    record['small'] = record['end'] = None
    # A mean over training stays high where both fell in its middle.
    ends = ENDS.get(claim.metric, claim.metric)
    last = dataclasses.replace(claim, metric=ends)
    if len(x):
      record['value'] = float(np.mean(x))
    if spreads(x):
      mean, low, high, _ = figures.interval(x)
      record['interval'] = [low, high]
      record['interquartile'] = figures.interquartile([x])._asdict()
      record['small'] = -claim.margin <= low and high <= claim.margin
      if ends != claim.metric and spreads(at := differences(last, values)):
        record['end'] = figures.interval(at)._asdict()
      if whole:
        highest = pairs(last, values).mean(axis=0).max()
        record['verdict'] = verdict(claim, mean, low, high, p, highest)
    out.append(record)
  return out


def verdict(claim: Claim, mean, low, high, p: float, highest: float) -> str:
  """highest: the higher mean of the metric of both arms."""
  collapsed = claim.sign > 0 and highest <= MARGIN
  if p <= LEVEL and mean > bound(claim) and not (claim.within and collapsed):
    return 'shown'
  if p <= LEVEL and mean < bound(claim):
    return 'contradicted'
  if -claim.margin <= low and high <= claim.margin and not collapsed:
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


def agreement(scores: Sequence[Sequence[float]]) -> float:
  """Kendall's W, corrected for ties, of judges' scores of the same arms.

  scores: of each judge, of each of 3 arms or more.

  Returns:
    1 if all order the arms alike; about 1 / judges if they order by chance.
  """
  found = scipy.stats.friedmanchisquare(*zip(*scores, strict=True))
  judges, arms = len(scores), len(scores[0])
  return float(found.statistic) / (judges * (arms - 1))
