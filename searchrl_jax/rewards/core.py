"""The reward contract, and the weighted sum that a config asks for.

A reward is `async def fn(groups, context, **fields) -> Rewards`, flat over the
trajectories in group order. It may ask an engine or a source, so it is
awaited. `fn.needs_answers = True` says that it needs golden answers, so that a
run can refuse unlabelled data at its start.

  config.reward.em = dict(fn='answer.em', weight=1.0)
  config.reward.format = dict(fn='answer.format_valid', weight=0.2)

Rewards given at different places add up at the finest of them: a trajectory's
value goes to its last trained segment or token, a segment's to its last token.
The sum over a trajectory is the same at every place.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import math
from typing import Any

from ml_collections import ConfigDict
import numpy as np

from searchrl_jax.run import lookup
from searchrl_jax.types import Group, Question, Rewards, Trajectory

PLACES = ('trajectory', 'segment', 'token')  # from coarse to fine
_PACKAGE = 'searchrl_jax.rewards'


class RewardError(ValueError):
  """A reward that cannot be computed; the message names it and the mend."""


@dataclasses.dataclass(frozen=True)
class RewardContext:
  """What a reward may look at besides the groups."""

  step: int = 0  # training step
  env: Any = None  # SearchEnv: reads answers and blocks from ids
  tokenizer: Any = None
  engine: Any = None
  source: Any = None
  judge: Any = None  # rewards.judge.Judge, if config.judge.url names one
  meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def flat(groups: Sequence[Group]) -> list[Trajectory]:
  """The B trajectories in the order that rewards have."""
  return [trajectory for group in groups for trajectory in group]


def per_trajectory(
  groups: Sequence[Group],
  score: Callable[[Trajectory], float | Mapping[str, float]],
) -> Rewards:
  """Rewards from a function of one trajectory; failed ones are not scored.

  Args:
    groups: trajectories.
    score: gives the reward, or {'value': the reward, part: value, ...}.
  """
  trajectories = flat(groups)
  columns: dict[str, np.ndarray] = {
    'value': np.zeros(len(trajectories), np.float32)
  }
  for i, trajectory in enumerate(trajectories):
    if trajectory.failed:
      continue
    found = score(trajectory)
    if not isinstance(found, Mapping):
      found = {'value': found}
    for name, value in found.items():
      empty = np.zeros(len(trajectories), np.float32)
      columns.setdefault(name, empty)[i] = value
  valid = np.array([not t.failed for t in trajectories], bool)
  return Rewards(columns.pop('value'), valid, parts=columns)


def check(
  config: ConfigDict,
  questions: Iterable[Question] = (),
  judge: str = '',
  whole: ConfigDict | None = None,
) -> None:
  """Finds what would fail later: names, fields, missing answers, no judge.

  Args:
    config: config.reward: name -> {fn, weight, ...fields of the function}.
    questions: those that the run will train on.
    judge: config.judge.url.
    whole: the whole config, for functions that check their fields against it
      (`fn.check(whole, fields)`).

  Raises:
    RewardError: it names the field, or the first question without answers.
  """
  terms = _terms(config)
  for name, function, _, fields in terms:
    if whole is not None and hasattr(function, 'check'):
      try:
        function.check(whole, fields)
      except ValueError as e:
        raise RewardError(f'config.reward.{name}: {e}') from e
    lookup.require(
      not getattr(function, 'needs_judge', False) or judge,
      f'config.reward.{name} asks a judge, and config.judge.url is empty: '
      'give the URL of an OpenAI-compatible server',
      RewardError,
    )
  names = [name for name, fn, _, _ in terms if _needs_answers(fn)]
  if names:
    for question in questions:
      _require_answers(names[0], question)


async def combine(
  config: ConfigDict, groups: Sequence[Group], context: RewardContext
) -> Rewards:
  """The weighted sum of the rewards that `config.reward` names.

  Args:
    config: config.reward.
    groups: B trajectories in all.
    context: handed to every function.

  Returns:
    Rewards at the finest place of the functions. A trajectory is valid if it
    did not fail and every function finds it valid; the value of an invalid
    one is 0. `parts` holds each function's own value without its weight,
    summed over the trajectory, float32 [B], by the name in the config, NaN
    where it is invalid; and its own parts by 'name/part', NaN where the
    trajectory failed or the function says so.

  Raises:
    RewardError: a name or field that does not exist, a question without
      answers where a function needs them, a result of the wrong shape or not
      finite.
  """
  terms = _terms(config)
  trajectories = flat(groups)
  for name, function, _, _ in terms:
    if _needs_answers(function):
      for trajectory in trajectories:
        _require_answers(name, trajectory.question)
  valid = alive = np.array([not t.failed for t in trajectories], bool)
  results, parts = [], {}
  for name, function, weight, fields in terms:
    result = await function(groups, context, **fields)
    _inspect(name, result, trajectories)
    valid = valid & np.asarray(result.valid, bool)
    results.append((weight, result))
    totals = np.array([np.sum(v) for v in result.value], np.float32)
    parts[name] = np.where(result.valid, totals, np.nan).astype(np.float32)
    for part, column in result.parts.items():
      parts[f'{name}/{part}'] = np.where(alive, column, np.nan).astype(
        np.float32
      )
  at = max((r.at for _, r in results), key=PLACES.index)
  values = []
  for i, trajectory in enumerate(trajectories):
    total = np.zeros(_shape(trajectory, at), np.float32)
    if valid[i]:
      for weight, result in results:
        total = total + np.float32(weight) * _place(
          trajectory, result.value[i], result.at, at
        )
    values.append(total)
  if at == 'trajectory':
    return Rewards(np.array(values, np.float32), valid, at, parts)
  return Rewards(tuple(values), valid, at, parts)


def at_tokens(groups: Sequence[Group], rewards: Rewards) -> list[np.ndarray]:
  """The same rewards token by token: B float32 arrays [n].

  n: the tokens that the trainer sees. What a whole trajectory earns, its last
  trained token has; what a segment earns, its last token.
  """
  return [
    _place(t, value, rewards.at, 'token')
    for t, value in zip(flat(groups), rewards.value, strict=True)
  ]


def join(first: Rewards, second: Rewards) -> Rewards:
  """The rewards of two lists of groups of one step as those of both."""
  value = (*first.value, *second.value)

  def part(rewards, name):
    # Absent where all of them failed.
    nothing = np.full(len(rewards.valid), np.nan, np.float32)
    return rewards.parts.get(name, nothing)

  return Rewards(
    np.array(value, np.float32) if first.at == 'trajectory' else value,
    np.concatenate([first.valid, second.valid]),
    first.at,
    {
      name: np.concatenate([part(first, name), part(second, name)])
      for name in {**first.parts, **second.parts}
    },
  )


def _terms(config: ConfigDict) -> list[tuple[str, Callable, float, dict]]:
  """[(name, function, weight, its own fields)]."""
  lookup.require(
    config,
    'config.reward is empty; give it a function, as in config.reward.em = '
    "dict(fn='answer.em', weight=1.0)",
    RewardError,
  )
  return [(name, *_term(name, config[name])) for name in sorted(config)]


def _term(name: str, entry: ConfigDict) -> tuple[Callable, float, dict]:
  where = f'config.reward.{name}'
  fields = dict(entry)
  for field in ('fn', 'weight'):
    lookup.require(
      field in fields, f'{where} has no field {field!r}', RewardError
    )
  weight = fields.pop('weight')
  lookup.require(
    not isinstance(weight, bool) and isinstance(weight, (int, float)),
    f'{where}.weight={weight!r} is not a number',
    RewardError,
  )
  lookup.require(
    math.isfinite(weight),
    f'{where}.weight={weight!r} is not finite',
    RewardError,
  )
  try:
    function = lookup.function(_PACKAGE, fields.pop('fn'))
  except ValueError as error:
    raise RewardError(f'{where}.fn: {error}') from error
  lookup.require_fields(where, function, fields, RewardError)
  return function, float(weight), fields


def _needs_answers(function: Callable) -> bool:
  return getattr(function, 'needs_answers', False)


def _require_answers(name: str, question: Question) -> None:
  lookup.require(
    any(answer.strip() for answer in question.answers),
    f'question {question.id!r} has no golden answers, and '
    f'config.reward.{name} needs them; leave such questions out, or use a '
    'reward without answers',
    RewardError,
  )


def _shape(trajectory: Trajectory, at: str) -> tuple[int, ...]:
  if at == 'trajectory':
    return ()
  if at == 'segment':
    return (len(trajectory.trained),)
  return (sum(len(s.ids) for s in trajectory.trained),)


def _inspect(
  name: str, result: Rewards, trajectories: Sequence[Trajectory]
) -> None:
  where = f'config.reward.{name}'
  if result.at not in PLACES:
    raise RewardError(f'{where}: at={result.at!r} is none of {PLACES}')
  count = len(trajectories)
  columns = {'value': result.value, 'valid': result.valid, **result.parts}
  for label, column in columns.items():
    if len(column) != count:
      raise RewardError(
        f'{where}: {label} has {len(column)} entries for {count} trajectories'
      )
  for trajectory, value, valid in zip(
    trajectories, result.value, result.valid, strict=True
  ):
    shape = _shape(trajectory, result.at)
    if np.shape(value) != shape:
      raise RewardError(
        f'{where}: trajectory {trajectory.id!r} has a value of shape '
        f'{np.shape(value)} where at={result.at!r} asks for {shape}'
      )
    if valid and not np.isfinite(value).all():
      raise RewardError(
        f'{where}: trajectory {trajectory.id!r} has the reward {value}; '
        'mark it invalid, or return a finite one'
      )


def _place(
  trajectory: Trajectory, value: Any, source: str, target: str
) -> np.ndarray:
  """The same total, given at a finer place."""
  value = np.asarray(value, np.float32)
  if source == target:
    return value
  out = np.zeros(_shape(trajectory, target), np.float32)
  segments = trajectory.trained
  ends = np.cumsum([len(s.ids) for s in segments], dtype=int)
  if source == 'segment':
    for segment, end, part in zip(segments, ends, value, strict=True):
      if len(segment.ids):
        out[end - 1] += part
      elif part:
        raise RewardError(
          f'trajectory {trajectory.id!r}: an empty segment has a reward'
        )
    return out
  trained = [i for i, s in enumerate(segments) if s.train and len(s.ids)]
  if trained:  # without a trained token nothing could learn from it
    last = trained[-1]
    out[last if target == 'segment' else ends[last] - 1] = value
  return out
