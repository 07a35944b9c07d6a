"""The reward contract, and the weighted sum of the rewards of a config.

A reward is `async def fn(groups, context, **fields) -> Rewards`, flat over the
trajectories in group order. It is awaited because it may call an engine or a
source. Set `fn.needs = ('answers',)` if it needs golden answers, and names of
`data.checks.require_needs` for other things; a run then refuses data without
them at its start.

It is called with each group as soon as the last trajectory of the group has
ended, while others of the step are played, so the reward of a trajectory must
depend on its group alone, and the names of `parts` must be the same for all
groups. It shares the event loop with the rollouts: what blocks for long goes to
`asyncio.to_thread`. Further attributes:

  compares_group  True if it compares trajectories of a group; it is refused
                  where a single greedy answer is rewarded
  needs_step      True if it compares groups, or takes the weights of the step:
                  it is called once, with all groups of this process, when the
                  step is about to be trained on
  check_step      f(groups, reward, context, fields), which is called with all
                  groups of all processes and what the function gave them, and
                  may raise
  needs_judge     True if it asks the judge, which config.judge.url then names
  observes        what it reads of what was found: 'source', a source's
                  observations; 'any', also what the policy writes in their
                  place; 'searches', `Trajectory.searches` alone. It is refused
                  where there is none (`unobserved`)

`compares_group`, `needs_step`, `needs_judge` and `observes` may be functions of
the fields.

  config.reward.em = dict(fn='answer.em', weight=1.0)
  config.reward.format = dict(fn='answer.format_valid', weight=0.2)

Rewards for trajectories, segments and tokens are added at the finest of their
levels: the value of a trajectory is assigned to its last trained segment or
token, that of a segment to its last token. The sum over a trajectory does not
change.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import functools
import math
from typing import Any

from ml_collections import ConfigDict
import numpy as np

from searchrl_jax import lookup
from searchrl_jax.data import checks
from searchrl_jax.types import Group, Question, Rewards, Trajectory

LEVELS = ('trajectory', 'segment', 'token')  # from coarse to fine


class RewardError(ValueError):
  """A reward cannot be computed; the message names it and the fix."""


require = functools.partial(lookup.require, error=RewardError)


@dataclasses.dataclass(frozen=True)
class RewardContext:
  """What a reward function can use besides the groups."""

  step: int = 0  # training step
  env: Any = None  # SearchEnv, which reads answers and blocks
  tokenizer: Any = None
  engine: Any = None
  source: Any = None
  judge: Any = None  # rewards.judge.Judge, if config.judge.url names one


def flat(groups: Sequence[Group]) -> list[Trajectory]:
  """The B trajectories of the groups, in the order of rewards."""
  return [trajectory for group in groups for trajectory in group]


def per_trajectory(
  groups: Sequence[Group],
  score: Callable[[Trajectory], float | Mapping[str, float]],
) -> Rewards:
  """Applies a function to each trajectory that did not fail.

  Args:
    groups: trajectories.
    score: of a trajectory, returns the reward, or {'value': the reward, part:
      value, ...}.
  """
  trajectories = flat(groups)
  valid = np.array([not t.failed for t in trajectories], bool)
  columns = {'value': np.zeros(len(valid), np.float32)}
  for i in np.flatnonzero(valid):
    parts = score(trajectories[i])
    if not isinstance(parts, Mapping):
      parts = {'value': parts}
    for name, value in parts.items():
      columns.setdefault(name, np.zeros(len(valid), np.float32))[i] = value
  return Rewards(columns.pop('value'), valid, parts=columns)


def check(config: ConfigDict, questions: Iterable[Question] = ()) -> None:
  """Checks config.reward, the judge, and what rewards need of the questions.

  Args:
    config: the whole config. config.reward: name -> {fn, weight, ...fields of
      the function}. A function with an attribute `check` checks its fields
      against the whole config (`fn.check(config, fields)`).
    questions: the questions to train on.

  Raises:
    RewardError: names the field.
    DataError: a question lacks what a function needs (`require_needs`).
  """
  terms, advantage = _terms(config.reward), config.algorithm.advantage
  with lookup.of(f'config.algorithm.advantage={advantage!r}'):
    fn = lookup.function('searchrl_jax.learn', advantage, 'advantages')
  greedy = 'greedy' in lookup.inputs(fn)
  for name, function, _, fields in terms:
    require(
      not (greedy and _is('compares_group', function, fields)),
      f'config.reward.{name} compares trajectories of a group, and '
      f'config.algorithm.advantage={advantage!r} rewards a single greedy '
      'answer: use grpo, rloo or reinforce',
    )
    if hasattr(function, 'check'):
      with lookup.of(f'config.reward.{name}', RewardError):
        function.check(config, fields)
    blind = unobserved(config, function, fields)
    require(not blind, f'config.reward.{name}: {blind}')
    require(
      not _is('needs_judge', function, fields) or config.judge.url,
      f'config.reward.{name} needs a judge, but config.judge.url is empty: '
      'set it to the URL of an OpenAI-compatible server',
    )
  checks.require_needs(_users(terms), questions)


def unobserved(config: ConfigDict, function: Callable, fields) -> str:
  """Why a function has nothing to read by its attribute `observes`, or ''.

  Args:
    config: the whole config.
    function, fields: a reward, an advantage, a loss or a teacher's hint.
  """
  observes = getattr(function, 'observes', '')
  observes = observes(fields) if callable(observes) else observes
  name, env = config.rollout.sampler, config.env
  opaque = getattr(lookup.sampler(name), 'opaque', False)
  where = f'config.rollout.sampler={name!r}'
  none = f"{where} records nothing that is read as an observation; use 'chains'"
  if observes == 'source' and opaque:
    return none
  if observes == 'any' and opaque and env.max_turns:
    return f'{none}, or env.max_turns=0 for a program that reads nothing'
  searched = env.information == 'source' and (env.max_turns or opaque)
  if observes in ('source', 'searches') and not searched:
    return (
      f'config.env.information={env.information!r}, max_turns={env.max_turns}: '
      "no source answers; use 'source', and max_turns above 0"
    )
  return ''


async def combine(
  config: ConfigDict,
  groups: Sequence[Group],
  context: RewardContext,
  whole: bool = True,
) -> Rewards:
  """Returns the weighted sum of the rewards in `config.reward`.

  Args:
    config: config.reward.
    groups: B trajectories in total.
    context: passed to every function.
    whole: the groups are a whole step, which functions may refuse; not those of
      a round of a sampler.

  Returns:
    Rewards at the finest level of the functions. A trajectory is valid if it
    did not fail and is valid for every function; the value of an invalid one
    is 0. `parts` holds, by name, the unweighted value of each function, summed
    over the trajectory, float32 [B], NaN where it is invalid; and by
    'name/part' the function's parts, NaN where the trajectory failed or the
    function returns NaN.

  Raises:
    RewardError: an unknown function or field, or a result of the wrong shape
      or not finite.
    DataError: a question lacks what a function needs (`require_needs`).
    Any error of a function.
  """
  results = await of_groups(config, groups, context)
  reward = await of_step(config, groups, [results], context)
  if whole:
    check_step(config, groups, reward, context)
  return reward


async def of_groups(
  config: ConfigDict,
  groups: Sequence[Group],
  context: RewardContext,
  needs_step: bool = False,
) -> dict[str, Rewards]:
  """The unweighted rewards of functions, by name in config.reward.

  Args:
    config, groups, context: as of `combine`.
    needs_step: of the functions that need the whole step; else of the others.

  Raises:
    as `combine`.
  """
  terms = [
    (name, function, weight, fields)
    for name, function, weight, fields in _terms(config)
    if _is('needs_step', function, fields) == needs_step
  ]
  trajectories, results = flat(groups), {}
  checks.require_needs(_users(terms), [t.question for t in trajectories])
  for name, function, _, fields in terms:
    results[name] = await function(groups, context, **fields)
    _check_result(name, results[name], trajectories)
  return results


async def of_step(
  config: ConfigDict,
  groups: Sequence[Group],
  results: Sequence[Mapping[str, Rewards]],
  context: RewardContext,
) -> Rewards:
  """What `combine` returns for the groups of a step.

  Args:
    config, groups, context: as of `combine`.
    results: what `of_groups` returned for parts of the groups, in their order.

  Raises:
    as `combine`.
  """
  found = {n: join(*(part[n] for part in results)) for n in results[0]}
  found |= await of_groups(config, groups, context, needs_step=True)
  trajectories = flat(groups)
  valid = alive = np.array([not t.failed for t in trajectories], bool)
  weighted, parts = [], {}
  for name, _, weight, _ in _terms(config):
    result = found[name]
    valid = valid & np.asarray(result.valid, bool)
    weighted.append((weight, result))
    totals = np.array([np.sum(v) for v in result.value], np.float32)
    parts[name] = np.where(result.valid, totals, np.nan)
    for part, column in result.parts.items():
      parts[f'{name}/{part}'] = np.where(alive, column, np.nan)
  parts = {name: column.astype(np.float32) for name, column in parts.items()}
  at = max((r.at for _, r in weighted), key=LEVELS.index)
  values = []
  for i, trajectory in enumerate(trajectories):
    total = np.zeros(_shape(trajectory, at), np.float32)
    if valid[i]:
      for weight, result in weighted:
        value = _place(trajectory, result.value[i], result.at, at)
        total = total + np.float32(weight) * value
    values.append(total)
  whole = at == 'trajectory'
  value = np.array(values, np.float32) if whole else tuple(values)
  return Rewards(value, valid, at, parts)


def check_step(
  config: ConfigDict,
  groups: Sequence[Group],
  reward: Rewards,
  context: RewardContext,
) -> None:
  """Lets functions refuse a step (`fn.check_step`).

  Args:
    config, context: as of `combine`.
    groups: of the step, of all processes.
    reward: what `of_step` returned for them.
  """
  for name, function, _, fields in _terms(config):
    if hasattr(function, 'check_step'):
      value, start = reward.parts[name], f'{name}/'
      parts = {
        key.removeprefix(start): column
        for key, column in reward.parts.items()
        if key.startswith(start)
      }
      own = Rewards(np.nan_to_num(value), ~np.isnan(value), parts=parts)
      function.check_step(groups, own, context, fields)


def at_tokens(groups: Sequence[Group], rewards: Rewards) -> list[np.ndarray]:
  """Converts rewards to token level: B float32 arrays [n].

  n: number of tokens that the trainer sees. The last trained token gets the
  value of a trajectory, the last token of a segment that of the segment.
  """
  return [
    _place(t, value, rewards.at, 'token')
    for t, value in zip(flat(groups), rewards.value, strict=True)
  ]


def join(*several: Rewards) -> Rewards:
  """Concatenates the rewards of lists of groups of one step."""
  at, values = several[0].at, [v for r in several for v in r.value]
  names = dict.fromkeys(n for r in several for n in r.parts)

  def part(name):
    # A part is absent if all trajectories failed.
    nan = [np.full(len(r.valid), np.nan, np.float32) for r in several]
    return np.concatenate([r.parts.get(name, n) for r, n in zip(several, nan)])

  valid = np.concatenate([r.valid for r in several])
  whole = at == 'trajectory'
  value = np.array(values, np.float32) if whole else tuple(values)
  return Rewards(value, valid, at, {name: part(name) for name in names})


def mean(values: np.ndarray | Sequence[float]) -> float:
  """The mean of the values that are not NaN; NaN if all are."""
  known = not np.isnan(values).all()
  return float(np.nanmean(values)) if known else math.nan


def _terms(config: ConfigDict) -> list[tuple[str, Callable, float, dict]]:
  """Returns [(name, function, weight, fields of the function)]."""
  example = "config.reward.em = dict(fn='answer.em', weight=1.0)"
  require(config, f'config.reward is empty; add a function, such as {example}')
  out = []
  for name in sorted(config):
    where, fields = f'config.reward.{name}', dict(config[name])
    for field in ('fn', 'weight'):
      require(field in fields, f'{where} has no field {field!r}')
    weight = fields.pop('weight')
    require(
      isinstance(weight, (int, float)) and math.isfinite(weight),
      f'{where}.weight={weight!r} is not a finite number',
    )
    with lookup.of(f'{where}.fn', RewardError):
      function = lookup.function('searchrl_jax.rewards', fields.pop('fn'))
    lookup.require_fields(where, function, fields, RewardError)
    out.append((name, function, float(weight), fields))
  return out


def _is(attribute: str, function: Callable, fields: dict) -> bool:
  value = getattr(function, attribute, False)
  return value(fields) if callable(value) else value


def _users(terms) -> list[tuple[str, Callable, dict]]:
  return [(f'config.reward.{n}', fn, fields) for n, fn, _, fields in terms]


def _shape(trajectory: Trajectory, at: str) -> tuple[int, ...]:
  if at == 'trajectory':
    return ()
  lengths = [len(s.ids) for s in trajectory.trained]
  return (len(lengths) if at == 'segment' else sum(lengths),)


def _check_result(name: str, result: Rewards, trajectories: Sequence) -> None:
  where = f'config.reward.{name}'
  columns = {'value': result.value, 'valid': result.valid, **result.parts}
  for label, column in columns.items():
    require(
      len(column) == len(trajectories),
      f'{where}: {label} has {len(column)} entries for {len(trajectories)}',
    )
  for trajectory, value, valid in zip(trajectories, result.value, result.valid):
    has = f'{where}: trajectory {trajectory.id!r} has'
    found, shape = np.shape(value), _shape(trajectory, result.at)
    wanted = f'at={result.at!r} requires {shape}'
    require(found == shape, f'{has} a value of shape {found}; {wanted}')
    fix = 'mark it invalid, or return a finite one'
    finite = not valid or np.isfinite(value).all()
    require(finite, f'{has} the reward {value}; {fix}')


def _place(
  trajectory: Trajectory, value: Any, source: str, target: str
) -> np.ndarray:
  """Converts a value at level `source` to a finer level with the same sum."""
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
  if trained:  # a trajectory without trained tokens gets no reward
    last = trained[-1]
    out[last if target == 'segment' else ends[last] - 1] = value
  return out
