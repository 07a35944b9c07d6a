"""Credit for each search: what it changed in a potential of the history.

StepSearch (arXiv 2505.15107), PiCA (2605.09287) and IGPO (2510.14967) differ
in their potential Phi, in how a step of it becomes a reward, and in scale. With
Phi_0 before the first call of a tool and Phi_t once the policy has read what
call t found, a search t earns

    scale (step_t - redundancy u_t)

    kind 'difference'  step_t = Phi_t - Phi_(t-1)
         'gain'        step_t = max(Phi_t - Phi_(t-1), 0)
         'level'       step_t = Phi_t

u_t is the share of the passages of search t that an earlier search, or an
earlier place of its own results, has shown. Credit lies on the last segment
that the policy wrote before the observation. A search without an observation
(there was no room for it) earns nothing. A call of another tool earns its own
step of Phi, so that no search does, but no level.

Only the differences add up to what was reached, Phi_m - Phi_0. The level pays
again for each further search, and so does the gain where Phi can fall: both can
be farmed. `closed` takes Phi_m back at the end, which makes the differences a
potential-based shaping in the sense of Ng, Harada and Russell (1999): its sum
does not depend on what the policy does.

`shuffle` and `at_end` are controls. Both keep the sum of a trajectory. The
first says nothing about which turn earned it, the second comes too late to.

A potential is `async fn(trajectories, context, *, fields) -> arrays`, for each
trajectory float [1 + observations]. Its keyword-only parameters are `phi_kw`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict
import numpy as np

from searchrl_jax import lookup
from searchrl_jax.rewards.core import RewardContext, flat, require
from searchrl_jax.text import structure
from searchrl_jax.types import Group, Rewards, Trajectory

NAMES = ('supporting',)
KINDS = ('difference', 'gain', 'level')


def readings(trajectory: Trajectory) -> list[structure.Span]:
  """The observations of a trajectory, in order."""
  return [s for s in structure.spans_of(trajectory) if s.observes]


def histories(trajectory: Trajectory) -> list[int]:
  """Lengths in tokens: before the first turn, after each observation."""
  spans = structure.spans_of(trajectory)
  first = next((s.start for s in spans if s.acts), len(trajectory))
  return [first, *(s.end for s in spans if s.observes)]


async def supporting(
  trajectories: Sequence[Trajectory], context: RewardContext
) -> list[np.ndarray]:
  """Phi = the share of Question.supporting whose passages have been found."""
  del context
  out = []
  for t in trajectories:
    golds, found = {*t.question.supporting}, [frozenset()]
    for reading in readings(t):
      found.append(found[-1] | (golds & {*reading.passages}))
    out.append(np.array([len(f) / max(len(golds), 1) for f in found]))
  return out


supporting.needs = ('supporting',)  # type: ignore[attr-defined]


async def progress(
  groups: Sequence[Group],
  context: RewardContext,
  *,
  phi: str,
  phi_kw: Mapping[str, Any],
  kind: str,
  scale: float,
  redundancy: float,
  forfeit: bool,
  closed: bool,
  shuffle: bool,
  at_end: bool,
) -> Rewards:
  """The credit of searches, at segments; see the module.

  Args:
    groups: trajectories.
    context: for the potential; its step is part of the draw of `shuffle`.
    phi: the potential: 'supporting', or a dotted path.
    phi_kw: fields of the potential.
    kind: one of KINDS.
    scale: of the credit, in units of the return.
    redundancy: weight of u_t against a step of Phi.
    forfeit: a trajectory without an answer has no credit.
    closed: the last turn gives the last Phi back.
    shuffle: control: the credits of a trajectory go to its turns, the last one
      among them, in an order that depends on question, sample and step alone.
    at_end: control: their sum goes to the last turn.

  Returns:
    Parts: phi, the last of each trajectory, and redundant, the sum of its u_t.
  """
  trajectories = flat(groups)
  valid = np.array([not t.failed for t in trajectories], bool)
  alive = [t for t in trajectories if not t.failed]
  found = await potential(phi)(alive, context, **phi_kw)
  levels = dict(zip(np.flatnonzero(valid).tolist(), found, strict=True))
  value = [np.zeros(len(t.trained), np.float32) for t in trajectories]
  parts = {n: np.zeros(len(valid), np.float32) for n in ('phi', 'redundant')}
  for i, level in levels.items():
    t, level = trajectories[i], np.asarray(level, np.float64)
    read, last = readings(t), last_segments(t)
    again = np.array(_redundant(read))
    parts['phi'][i], parts['redundant'][i] = level[-1], again.sum()
    if not last or (forfeit and context.env.answer(t) is None):
      continue
    searched = np.array([span.searched for span in read], bool)
    step = level[1:] * searched if kind == 'level' else np.diff(level)
    step = np.maximum(step, 0.0) if kind == 'gain' else step
    credit = dict.fromkeys(last, 0.0)
    for span, x in zip(read, step - redundancy * again, strict=True):
      if span.turn in credit:  # not of a turn that is not trained on
        credit[span.turn] += scale * x
    earned = np.array([*credit.values()])
    earned[-1] -= scale * level[-1] * closed
    if at_end:
      earned = np.append(0.0 * earned[1:], earned.sum())
    if shuffle:
      earned = earned[structure.order(t, len(earned), context.step)]
    value[i][[*last.values()]] = earned
  return Rewards(tuple(value), valid, 'segment', parts)


def potential(name: str) -> Callable:
  """The potential of this name or dotted path."""
  return lookup.function('searchrl_jax.rewards', name, 'progress')


def last_segments(trajectory: Trajectory) -> dict[int, int]:
  """Turn -> the index of the last segment of it that is trained on."""
  spans = structure.spans_of(trajectory)
  return {s.turn: i for i, s in enumerate(spans) if s.acts and s.segment.train}


def _redundant(read: Sequence[structure.Span]) -> list[float]:
  """u_t of each observation."""
  seen: set[str] = set()
  out = []
  for span in read:
    new = {*span.passages} - seen
    out.append(1.0 - len(new) / len(span.passages) if span.passages else 0.0)
    seen |= new
  return out


def check(config: ConfigDict, fields: Mapping[str, Any]) -> None:
  """Checks the fields of `progress`.

  Raises:
    RewardError: names the field, its value and the fix.
  """
  fn, kind = potential(fields['phi']), fields['kind']
  shuffle, at_end = fields['shuffle'], fields['at_end']
  lookup.require_fields('phi_kw', fn, fields['phi_kw'])
  require(kind in KINDS, f'kind={kind!r}: {lookup.near(kind, KINDS)}')
  both = shuffle and at_end
  require(not both, 'shuffle and at_end are two controls: use one')
  advantage = config.algorithm.advantage
  fn = lookup.function('searchrl_jax.learn', advantage, 'advantages')
  require(
    not shuffle or 'mask' in lookup.inputs(fn),
    f'shuffle=True has no effect with config.algorithm.advantage={advantage!r},'
    " which sees the sum of a trajectory alone; use 'turn_normalised' or 'gae'",
  )


def _needs(fields: Mapping[str, Any]) -> tuple[str, ...]:
  return getattr(potential(fields['phi']), 'needs', ())


def _needs_step(fields: Mapping[str, Any]) -> bool:
  return getattr(potential(fields['phi']), 'needs_step', False)


progress.check, progress.needs = check, _needs  # type: ignore[attr-defined]
progress.needs_step = _needs_step  # type: ignore[attr-defined]
progress.observes = 'source'  # type: ignore[attr-defined]
