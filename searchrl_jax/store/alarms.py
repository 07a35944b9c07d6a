"""Names a collapse of the policy as it begins, from the metrics of the steps.

The median of the last WINDOW values of a metric is compared with the best such
median among the MEMORY steps before: an alarm begins where it is worse by the
limits below and by NOISE x the usual change from step to step. A slow change of
the same size is no collapse: it is what learning does. Alarms depend on the
metrics alone, so that a resumed run, which reads them from metrics.jsonl, goes
on with the same ones.
"""

import collections
from collections.abc import Iterable, Mapping
import functools
import math
from typing import Any, NamedTuple

import numpy as np

WINDOW, MEMORY = 5, 100  # steps
NOISE = 4.0


class Sign(NamedTuple):
  """A metric that has gone wrong beyond `factor` x best + `margin`.

  alarm: whose sign it is. falls: whether it is bad that the metric falls.
  also: what must have gone wrong at the same time (of it, alarm and means are
  not read).
  """

  alarm: str
  metric: str
  falls: bool
  factor: float  # 0: `margin` is a limit, whatever was before
  margin: float
  means: str
  also: 'Sign | None' = None

  @property
  def parts(self) -> tuple['Sign', ...]:
    return (self,) if self.also is None else (self, self.also)


_ROLES = ('train', 'proposer', 'solver')  # the last two: of self-play
_ENTROPY = (
  (True, 0.15, 0.0, 'the policy explores less'),
  (False, 3.0, 0.3, 'the policy turns random'),
)
_LESS_LIKELY = (
  'right trajectories become less likely, which precedes a fall of the score'
)
_HEALTH = (
  ('length', 'tokens', True, 0.4, 0.0, 'it writes little'),
  ('length', 'tokens', False, 2.5, 0.0, 'it writes at length'),
  ('length', 'truncated', False, 1.0, 0.2, 'limits cut it off'),
  ('repetition', 'repetition', False, 1.0, 0.2, 'it repeats itself'),
  ('repetition', 'thoughts_repeated', False, 1.0, 0.3, 'its thoughts repeat'),
  ('format', 'valid_format', True, 1.0, -0.2, 'it loses the format'),
  ('likelihood', 'logp_right', True, 2.0, -0.15, _LESS_LIKELY),
)
_EQUAL = (
  'in the other groups all rewards are equal, which teaches nothing; ask other '
  'questions, sample more of each, or add a reward that is not all or nothing'
)
_VOTES = (
  'samples agree more and search less: what they agree on may be what a search '
  'found on the way. Read some; let evidence vote (rewards/guarded.py)'
)
_MISMATCH = (
  'the engine samples from another distribution than the trainer updates: too '
  'stale, or computed otherwise; train/mismatch_kl/turn=N says how deep'
)
SIGNS = (
  *(
    Sign('entropy', f'{role}/entropy', *limits)
    for role in _ROLES
    for limits in _ENTROPY
  ),
  *(
    Sign('mismatch', f'{role}/mismatch_kl', False, 0.0, 0.002, _MISMATCH)
    for role in _ROLES
  ),
  *(Sign(alarm, f'health/{name}', *limits) for alarm, name, *limits in _HEALTH),
  Sign('groups', 'train/gradient_groups', True, 0.0, 0.25, _EQUAL),
  # Of majority votes: against earlier steps, and against what the start made of
  # the same questions, which no step's mixture of questions can move.
  Sign(
    *('votes', 'reward/vote/agreement', False, 1.0, 0.1, _VOTES),
    also=Sign('votes', 'health/searches', True, 0.85, 0.0, ''),
  ),
  Sign(
    *('votes', 'reward/vote/gained', False, 0.0, 0.05, _VOTES),
    # Above what 26 runs on atlas lost that kept four hops (0.39), below the
    # least of the six that did not (0.42; experiments/ttrl/README.md).
    also=Sign('votes', 'reward/vote/lost', False, 0.0, 0.4, ''),
  ),
)


class Alarms:
  """Which alarms are on; call it with the metrics of each step.

  history: metrics of the steps before, each with its 'step'.
  """

  def __init__(self, history: Iterable[Mapping[str, Any]] = ()):
    seen = functools.partial(collections.deque, maxlen=MEMORY + WINDOW)
    # sign -> for each of its parts, (step, value)
    self._seen = {sign: [seen() for _ in sign.parts] for sign in SIGNS}
    self._on: set[Sign] = set()
    for metrics in history:
      self(metrics['step'], metrics)

  def __call__(
    self, step: int, metrics: Mapping[str, float | None]
  ) -> tuple[dict[str, float], list[str]]:
    """Takes the metrics of a step.

    Returns:
      'alarm/NAME': 1.0 while a sign of it lasts, else 0.0; absent before there
      are enough steps. A sentence for each sign that begins.
    """
    flags: dict[str, float] = {}
    begun = []
    for sign, seen in self._seen.items():
      values = [metrics.get(part.metric) for part in sign.parts]
      if all(value is not None and math.isfinite(value) for value in values):
        for column, value in zip(seen, values, strict=True):
          column.append((step, value))
        found = [*map(_found, sign.parts, seen)]
        if all(found) and sign not in self._on:
          begun.append(
            f'alarm/{sign.alarm} at step {step}: {", and ".join(found)}: '
            f'{sign.means}; see docs/diagnostics.md'
          )
        (self._on.add if all(found) else self._on.discard)(sign)
      if len(seen[0]) >= max(map(_least, sign.parts)):
        name = f'alarm/{sign.alarm}'
        flags[name] = max(flags.get(name, 0.0), float(sign in self._on))
    return flags, begun


def _least(sign: Sign) -> int:
  """Steps that it takes to judge."""
  return 2 * WINDOW if sign.factor else WINDOW


def _found(sign: Sign, seen: collections.deque) -> str:
  """What is wrong with one metric, or ''."""
  if len(seen) < _least(sign):
    return ''
  steps, values = zip(*seen)
  windows = np.lib.stride_tricks.sliding_window_view(values, WINDOW)
  *before, now = np.median(windows, axis=1).tolist()
  before = before[: 1 - WINDOW]  # windows that share no step with the last
  # There may be none before it where a limit does not depend on them.
  best = max(before, default=0.0) if sign.falls else min(before, default=0.0)
  limit = sign.factor * best + sign.margin
  noise = NOISE * np.median(np.abs(np.diff(values)))
  wrong = now < limit if sign.falls else now > limit
  if not wrong or sign.factor and abs(now - best) <= noise:
    return ''
  last = f'steps {steps[-WINDOW]} to {steps[-1]}'
  what = f'is {now:.3g} (median of {last}), beyond {limit:g}'
  if sign.factor:
    at, change = before.index(best), 'fell' if sign.falls else 'rose'
    first = f'steps {steps[at]} to {steps[at + WINDOW - 1]}'
    what = f'{change} from {best:.3g} (median of {first}) to {now:.3g} ({last})'
  return f'{sign.metric} {what}'
