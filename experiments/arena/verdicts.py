"""Verdicts on claims, from values of paired runs.

A claim says that an arm has a higher (or lower) value of a metric than another
arm. Runs are paired by case: seed, and with it world, warm start and questions.
The interval is Student's t over the differences, 95 %; the p-value is two-sided
and corrected over all claims (Holm 1979). MARGIN is in units of the metric.

    shown         p <= 0.05 after the correction, and the claimed direction
    contradicted  the interval lies on the other side of 0
    equivalent    the interval lies within the margin
    undecided     else
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math

import numpy as np
import scipy.stats

from searchrl_jax.sweeps import figures

MARGIN = 0.05
LEVEL = 0.05
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
  a, b = runs.get(claim.method, {}), runs.get(claim.against, {})
  cases = [c for c in a if c in b and claim.metric in {*a[c]} & {*b[c]}]
  shift = claim.margin if claim.within else 0.0
  return np.array(
    [claim.sign * (a[c][claim.metric] - b[c][claim.metric]) for c in cases]
  ) + (shift if cases else 0.0)


def p_value(x: np.ndarray) -> float:
  """Two-sided, that the mean difference is 0; 1 if nothing differs."""
  if len(x) < 2 or not np.any(x):
    return 1.0
  if np.ptp(x) == 0:
    return 0.0
  return float(scipy.stats.ttest_1samp(x, 0.0).pvalue)


def holm(ps: Sequence[float]) -> list[float]:
  """Adjusted p-values: max over smaller ones of (m - rank) p, at most 1."""
  order, out, most = np.argsort(ps, kind='stable'), [1.0] * len(ps), 0.0
  for rank, i in enumerate(order):
    most = max(most, (len(ps) - rank) * ps[i])
    out[i] = min(1.0, most)
  return out


def judge(claims: Sequence[Claim], values: Values) -> list[dict]:
  """A record for each claim, as results.json has them.

  value and interval are in the claimed direction: above 0 supports the claim.
  Of a claim `within` a margin, they include the margin.
  """
  found = [differences(claim, values) for claim in claims]
  adjusted = holm([p_value(x) for x in found])
  out = []
  for claim, x, p in zip(claims, found, adjusted, strict=True):
    record = dataclasses.asdict(claim) | {'n_seeds': len(x), 'p_holm': p}
    if len(x) < 2:
      record |= {'value': None, 'interval': None, 'verdict': 'undecided'}
    else:
      mean, low, high, _ = figures.interval(x)
      record |= {'value': mean, 'interval': [low, high]}
      record['verdict'] = verdict(claim, mean, low, high, p)
    out.append(record)
  return out


def verdict(claim: Claim, mean: float, low: float, high: float, p: float):
  if p <= LEVEL and mean > 0:
    return 'shown'
  if high < 0:
    return 'contradicted'
  if not claim.within and -claim.margin <= low and high <= claim.margin:
    return 'equivalent'
  return 'undecided'


def seeds_needed(differences: Sequence[float], half: float) -> int:
  """Runs for which a t interval (95 %) of such differences is +- half at most.

  From the standard deviation of a pilot's paired differences.
  """
  spread = float(np.std(differences, ddof=1))
  n = 2
  while scipy.stats.t.ppf(0.975, n - 1) * spread / math.sqrt(n) > half:
    n += 1
  return n


def agreement(ranks: Sequence[Sequence[float]]) -> float:
  """Kendall's W of the scores that several judges give to the same arms.

  ranks: of each judge (a warm-start mixture), a score of each arm. 1: all
  order them alike; 0: no agreement. Ties share their mean rank, uncorrected.
  """
  table = np.array([scipy.stats.rankdata(r) for r in ranks])
  m, n = table.shape
  sums = table.sum(0)
  return float(12 * np.sum((sums - sums.mean()) ** 2) / (m**2 * (n**3 - n)))
