"""Traces of another policy, played through the environment, in groups.

A trace (`data.core.Trace`) has contents without layout: the environment renders
them, as in a warm start (`sft.py`). `sample`, the sampler `traces`, puts some
in the place of attempts of the policy (LUFFY, arXiv 2504.14945). What a trace
searches for is asked of the source, and its reward is that of any trajectory.

Its tokens are foreign: the policy did not sample them. Their author is
`teacher`, and they have neither log-probs nor versions. No ratio to what
sampled them, importance weight, mismatch, KL or staleness has them: the loss is
one that takes `foreign` (`losses.mixed`), which `checks` requires.

config.rollout.traces names where the traces of a question are: a field of
Question.meta, or, with a dot, a function of the question that returns them. In
Question.meta they are a list of traces, each a list of (kind, text) as in
`data.core.Trace.actions`; ['information', ''] stands where it reads.

A trace is left out, and the policy plays, where it does not fit config.env or
does not follow the protocol, where a service fails, or where its searches do
not find what it goes on to state, Question.supporting. `rollout/traces` counts
those that have a place in a group, `rollout/traces_left_out` those that were
left out.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import math
import re

from ml_collections import ConfigDict
import numpy as np

from searchrl_jax import lookup, types
from searchrl_jax.data.core import Trace
from searchrl_jax.engines.core import Completion
from searchrl_jax.rollout.core import Services, Start
from searchrl_jax.text.states import Action, Done, Generate, Search, State
from searchrl_jax.text.untrusted import Part
from searchrl_jax.types import (
  Group,
  Question,
  SearchResult,
  Segment,
  Trajectory,
)

LEAST = 1e-3  # a return above it is a success

# A trace as text.


def turns(trace: Trace, template, recall=None) -> Iterator[tuple]:
  """A trace as (parts that the policy writes, passages it then reads or None).

  A block is written `<tag> content </tag>`, blocks of a turn on lines of
  their own. An answer ends a turn, and so does the block that is asked for
  after it. `recall`: passages -> their text, where the policy writes it.
  """
  said: list[Part] = []
  answered = False
  for kind, payload in trace.actions:
    if kind == 'information' and recall is None:
      yield said, payload
      said = []
      continue
    if said:
      said = [*said, ('\n', True)]
    if kind == 'information':
      said += _tagged(recall(payload).strip(), template)
    elif kind == 'other':
      said += [(payload, False)]
    elif kind in template.tags:
      said += block(kind, payload, template)
    else:
      raise ValueError(
        f'a trace writes the block {kind!r}, and the template {template.name!r}'
        f' has {", ".join(template.tags)}: use a template with this block'
      )
    if trace.question and (kind == 'answer' or answered):
      yield said, None
      said = []
    answered = kind == 'answer'
  if said:
    yield said, None


def _tagged(text: str, template) -> list[Part]:
  """An observation, in which passages hold no tags."""
  tags = [re.escape(tag) for pair in template.tags.values() for tag in pair]
  pieces = re.split(f'({"|".join(tags)})', text)
  return [(piece, n % 2 == 1) for n, piece in enumerate(pieces)]


def block(kind: str, text: str, template) -> list[Part]:
  opening, closing = template.tags[kind]
  return [(opening, True), (f' {text} ', False), (closing, True)]


def written(parts: Sequence[Part], env, action: Generate) -> Completion | None:
  """What the policy would have sampled; None if it is too long."""
  ids = env.tokenizer.encode_parts(parts)
  if not ''.join(text for text, _ in parts).endswith(action.stops):
    ids = [*ids, env.tokenizer.eos_ids[0]]  # what ends a boxed answer
  if len(ids) > action.max_tokens:
    return None
  nothing = np.zeros(len(ids), np.float32)
  version = np.zeros(len(ids), np.int32)
  return Completion(np.asarray(ids, np.int32), nothing, 'eos', version)


# A trace as a trajectory.


def taught(segments: Sequence[Segment]) -> tuple[Segment, ...]:
  """The segments with what the policy wrote as that of a teacher."""
  own = dict(author='teacher', logps=None, versions=None)
  of = lambda s: dataclasses.replace(s, **own) if s.author == 'policy' else s
  return tuple(map(of, segments))


def by_teacher(t: Trajectory) -> Trajectory:
  """The trajectory as that of a teacher, where it is trained."""
  field = 'segments' if t.train_context is None else 'train_context'
  return dataclasses.replace(t, **{field: taught(t.trained)})


async def play(
  services: Services, question: Question, trace: Trace, sample: int
) -> Trajectory | None:
  """The trajectory of a trace; None if it is left out.

  Args:
    services, question, trace, sample: see `points`.
  """
  found = await points(services, question, trace, sample)
  return found and by_teacher(services.env.trajectory(found[-1][0], sample))


async def points(
  services: Services, question: Question, trace: Trace, sample: int
) -> list[tuple[State, Action]] | None:
  """Where each turn of a trace begins, and its end; None if it is left out.

  Args:
    services: see `rollout.core`.
    question, trace: what is played.
    sample: that its searches count for.
  """
  env = services.env
  count = functools.partial(services.count, (question.id, sample))
  found: list = [env.reset(question, services.role)]
  for parts, _ in turns(trace, env.template):
    state, action = found[-1]
    if not isinstance(action, Generate):
      return None
    completion = written(parts, env, action)
    if completion is None:
      return None
    state, action = env.step(state, completion)
    if isinstance(action, Search):
      asked = f'{state.name}/{sample}', action.requests
      state, action = env.step(state, await services.search(*asked, count))
    found.append((state, action))
  state, action = found[-1]
  ended = isinstance(action, Done) and action.end == 'answer'
  if not ended or state.invalid_actions:
    return None
  answers = [s for s in state.searches if isinstance(s, SearchResult)]
  read = {p.id for s in answers for p in s.passages}
  return found if read.issuperset(question.supporting) else None


async def starts(
  services: Services, question: Question, known: Sequence[Trace], sample: int
) -> list[Start]:
  """Where the policy can go on behind the first turns of a trace: one, two and
  so on, without that which answers.

  Args:
    services, question, sample: see `points`.
    known: traces; the first one that is not left out gives the turns.
  """
  for trace in known:
    found = await points(services, question, trace, sample)
    services.count((question.id, sample), traces_left_out=found is None)
    if found:
      return [_behind(*point) for point in found[1:-1]]
  return []


def _behind(state: State, action: Action) -> Start:
  prompt = types.Prompt(tuple(state.ids.tolist()))
  own = dataclasses.replace(state, segments=taught(state.segments))
  return own, dataclasses.replace(action, prompt=prompt, append=())


async def likelihood(services: Services, t: Trajectory) -> float:
  """Mean log-prob of the golden answer in the place of a trace's own.

  -inf if there is no room for it.

  Args:
    services: see `rollout.core`.
    t: of `play`.
  """
  env = services.env
  last = max(i for i, s in enumerate(t.segments) if s.kind == 'answer')
  before = t.before(types.length(t.segments[:last]))
  parts = block('answer', t.question.answers[0], env.template)
  answer = env.tokenizer.encode_parts(parts)
  if len(before) + len(answer) > env.config.max_tokens:
    return -math.inf
  logps = await services.engine.logps([*before.tolist(), *answer])
  return float(np.mean(logps[len(before) :]))


# The sampler.


async def sample(
  questions: Sequence[Question],
  services: Services,
  *,
  traces: str,
  trace_most: int,
  trace_when: str,
) -> list[Group]:
  """Groups with traces in the place of their last attempts.

  Args:
    questions, services: see `rollout.core`.
    traces: see the module.
    trace_most: of a group, at most. Where a question has more, those that make
      the golden answer most likely (`likelihood`).
    trace_when: 'always'; 'failed': where no attempt earns more than LEAST.
  """
  slots, of_question = services.slots(), source_of(traces)
  attempt = functools.partial(services.fresh, slots)

  async def told(question: Question, samples: Sequence[int]) -> dict:
    """Trajectories of traces for the last samples, by sample."""
    known = of_question(question)
    played = (play(services, question, trace, samples[-1]) for trace in known)
    good = [t for t in await services.gather(played) if t is not None]
    name = question.id, samples[-1]
    services.count(name, traces_left_out=len(known) - len(good))
    if len(good) > trace_most:
      scores = await services.gather(likelihood(services, t) for t in good)
      best = np.argsort(-np.array(scores), kind='stable')
      good = [good[i] for i in best[:trace_most]]
    services.count(name, traces=len(good))
    pairs = zip(reversed(samples), good)
    return {n: dataclasses.replace(t, sample=n) for n, t in pairs}

  async def group(question: Question, start: Start, samples: list[int]):
    always = trace_when == 'always'
    own = samples[:-trace_most] if always else samples
    tried = await services.gather(attempt(start, n) for n in own)
    found = dict(zip(own, tried))
    if always or await _failed(services, tried):
      found |= await told(question, samples)
    left = [n for n in samples if n not in found]
    more = await services.gather(attempt(start, n) for n in left)
    found |= zip(left, more)
    services.record(*(found[n] for n in samples))

  return await services.whole(questions, group)


async def _failed(services: Services, tried: Sequence[Trajectory]) -> bool:
  """Whether all fail; those that a service failed do not count."""
  earned = await services.reward([tuple(tried)])
  known = [np.sum(x) for x, ok in zip(earned.value, earned.valid) if ok]
  return bool(known) and max(known) <= LEAST


def source_of(traces: str) -> Callable[[Question], Sequence[Trace]]:
  with lookup.of(f'config.rollout.traces={traces!r}'):
    if '.' in traces:
      return lookup.function('searchrl_jax.rollout', traces)
  return functools.partial(_recorded, key=traces)


def _recorded(question: Question, key: str) -> list[Trace]:
  """The traces of Question.meta[key].

  Raises:
    ValueError: they are something else.
  """
  try:
    return [_trace(question, actions) for actions in question.meta[key]]
  except (TypeError, ValueError) as e:
    what = f'question {question.id!r}: meta.{key} is no list of traces, each of'
    raise ValueError(f'{what} (kind, text): {e}') from e


def _trace(question: Question, actions) -> Trace:
  said = tuple((k, () if k == 'information' else text) for k, text in actions)
  return Trace(question, said, blocks=tuple(k for k, _ in said))


def _check(config: ConfigDict) -> None:
  source_of(config.traces)
  lookup.require(
    config.traces, "config.rollout.traces='': name what has the traces"
  )
  most, group = config.trace_most, config.group
  lookup.require(
    1 <= most < group,
    f'config.rollout.trace_most={most}: between 1 and group - 1, {group - 1}',
  )


def needs(fields) -> tuple[str, ...]:
  where = fields['traces']
  known = getattr(source_of(where), 'needs', ()) if '.' in where else ()
  return (*known, 'answers') if '.' in where else (f'meta.{where}', 'answers')


sample.check = _check  # type: ignore[attr-defined]
sample.needs = needs  # type: ignore[attr-defined]
sample.foreign = True  # type: ignore[attr-defined]
