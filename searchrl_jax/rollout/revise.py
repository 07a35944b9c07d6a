"""Attempts that are cut where the policy says that they went wrong.

Search-R2 (He et al. 2026, arXiv 2602.03647). An attempt is played to its end.
The policy then reads it as a text of numbered steps, in the role `refiner`, and
writes a number: 0 accepts it; k rejects its step k, a turn and what it found.
What was written from step k on is cut off and sampled again, once. What stands
before it stays as it is, with the log-probs that it was sampled with.

The first half of a group has the attempts, as they end; the second half has the
verdict on each, in their order, a trajectory of its own with the prompt of the
template config.rollout.refiner. What was cut is in no trajectory.

`meta` of an attempt has `cut`, the step that was cut, or 0; `draft`, its answer
before, or None; `found`, for each step the ids of the passages that it found.
That of a verdict has `on`, the sample of the attempt; `found`, of the attempt
that was read; `step`, the number, or None if the reply has none that names a
step, which accepts the attempt; `asked`, False where a service failed the
attempt, or its text leaves no room for a whole turn in config.env.max_tokens.
The verdict is then the attempt once more, with no token in the loss, and
rewards leave it out.
"""

from collections.abc import Sequence
import dataclasses
import re
import time

from ml_collections import ConfigDict

from searchrl_jax import lookup, types
from searchrl_jax.engines.core import Handle
from searchrl_jax.rollout.core import Services, Start
from searchrl_jax.text import prompts, structure
from searchrl_jax.text.states import Action, Done, State
from searchrl_jax.types import Group, Question, Trajectory

REFINER = 'refiner'
Point = tuple[State, Action]  # before a step, or at the end
_NUMBER = re.compile('[0-9]{1,4}')


async def sample(
  questions: Sequence[Question], services: Services, *, refiner: str
) -> list[Group]:
  """config.group / 2 attempts at each question, and the verdicts on them.

  Args:
    questions, services: see `rollout.core`.
    refiner: a template, whose {question} is the question with the attempt.

  Raises:
    ConfigError: the engine has no room for an attempt and its verdict.
  """
  most, r = services.env.config.max_tokens, services.config
  room = services.engine.capacity(most) // (1 + r.max_staleness)
  lookup.require(
    room >= 2,
    f'config.rollout.sampler={r.sampler!r}: an attempt is kept while its '
    f'verdict is sampled, and config.engine.slots and engine.host_gib hold '
    f'{room} sequences of env.max_tokens={most} of each of '
    f'{1 + r.max_staleness} steps (max_staleness): increase them',
  )
  starts, slots = services.starts(questions), services.slots(handles=2)
  env, n = _reading(services.env, refiner), services.config.group // 2
  refiners = dataclasses.replace(services, env=env, role=REFINER)

  async def pair(start: Start, attempt: int, verdict: int) -> None:
    async with slots:
      found = await _revised(services, refiners, start, attempt, verdict)
    services.record(*found)

  names = services.names(questions)
  await services.gather(
    pair(start, attempt[1], verdict[1])
    for start, own in zip(starts, names, strict=True)
    for attempt, verdict in zip(own[:n], own[n:], strict=True)
    if attempt not in services.done or verdict not in services.done
  )
  return services.groups(questions)


def check(config: ConfigDict) -> None:
  """Refuses a config.rollout without a refiner, or with an odd group.

  Raises:
    ConfigError: names the fields.
  """
  group, name = config.group, config.refiner
  what = f'config.rollout.group={group}: half of a group are attempts, half the'
  lookup.require(group % 2 == 0, f'{what} verdicts on them; use an even number')
  example = "such as 'refiner'"
  lookup.require(name, f"config.rollout.refiner='': name a template, {example}")
  with lookup.of(f'config.rollout.refiner={name!r}'):
    prompts.load(name)


sample.check = check  # type: ignore[attr-defined]
sample.cells = lambda c: {'role': c.group // 2}  # type: ignore[attr-defined]


def shown(env, attempt: Trajectory) -> str:
  """What a refiner reads: all but the environment's feedback and notes."""
  written = (
    (b.turn, b.kind, b.text)
    for b in env.blocks(attempt)
    if b.author == 'policy' or b.kind != prompts.OUTSIDE
  )
  return structure.numbered(attempt.question.text, written)


def _reading(env, template: str):
  """The environment in which a reply is one turn, without a search."""
  fields = dict(max_turns=0, answer='tags', attempts=1, on_answer='')
  fields['max_note_tokens'] = 0  # nothing else asks for notes: one context
  config = ConfigDict(env.config.to_dict() | fields)
  read = prompts.load(template)
  return type(env)(env.tokenizer, read, config, 'template', env.k)


async def _revised(
  services: Services,
  refiners: Services,
  start: Start,
  attempt: int,
  verdict: int,
) -> tuple[Trajectory, Trajectory]:
  """An attempt as it ends, and the verdict on it."""
  env, begin = services.env, time.monotonic()
  handle = services.open(start[1].prompt)
  points = await _play(services, handle, start, attempt)
  draft = env.trajectory(points[-1][0], attempt)
  found = _found(points[-1][0])
  said = await _verdict(services, refiners, draft, found, verdict)
  cut = said.meta['step'] or 0
  if cut:
    state, action = points[cut - 1]
    services.engine.truncate(handle, state.length)
    # What the draft appended after this state is in the handle.
    again = state, dataclasses.replace(action, append=())
    points = await _play(services, handle, again, attempt, ['cut'])
  seconds = time.monotonic() - begin
  state = points[-1][0]
  meta = {'cut': cut, 'draft': env.answer(draft), 'found': _found(state)}
  final = await services.trajectory(handle, state, attempt, seconds, meta)
  services.close(handle)
  return final, said


async def _play(
  services: Services,
  handle: Handle,
  point: Point,
  sample: int,
  branch: Sequence[str] = (),
) -> list[Point]:
  """Plays from a point to the end; this point, and those after each step."""
  points = [point]
  while not isinstance(points[-1][1], Done):
    state, action = points[-1]
    points.append(await services.turn(handle, state, action, sample, branch))
  return points


def _found(state: State) -> list[list[str]]:
  """Of each step of an attempt, the ids of the passages that it found."""
  found: list[list[str]] = [[] for _ in range(state.turn + 1)]
  for answer in state.searches:
    searched = answer.request.tool == types.SEARCH
    if searched and isinstance(answer, types.SearchResult):
      found[answer.request.turn] += [p.id for p in answer.passages]
  return found


async def _verdict(
  services: Services,
  refiners: Services,
  draft: Trajectory,
  found: list[list[str]],
  sample: int,
) -> Trajectory:
  """What the policy says of an attempt; found: see `_found`."""
  meta = {'on': draft.sample, 'step': None, 'found': found, 'asked': True}
  text = shown(services.env, draft)
  asked = dataclasses.replace(draft.question, text=text, messages=())
  try:
    start = None if draft.failed else refiners.env.reset(asked, REFINER)
  except ValueError:  # it is too long
    start = None
  # A reply that the end of the sequence cuts off says nothing of the policy.
  whole = services.env.config.max_turn_tokens
  if start is None or start[1].max_tokens < whole:
    silent = (dataclasses.replace(s, train=False) for s in draft.segments)
    own = dict(segments=tuple(silent), sample=sample, role=REFINER)
    return dataclasses.replace(draft, **own, meta=meta | {'asked': False})
  handle = refiners.open(start[1].prompt)
  said = await refiners.attempt(handle, *start, sample)
  number = _NUMBER.search(refiners.env.answer(said) or '')
  if number and int(number[0]) <= len(found):
    meta['step'] = int(number[0])
  return dataclasses.replace(said, meta={**said.meta, **meta})
