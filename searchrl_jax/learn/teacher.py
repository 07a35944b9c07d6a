"""A teacher: the policy, or a copy of it, that is asked about a step's rows.

It samples nothing. What it is asked follows from the arrays that the advantage
function takes, `delta` or `gold` (`learn.potential`), and from
config.teacher.columns.

For `delta` its prompt tells it more than that of the policy, and it scores the
tokens that the policy wrote, observations between them included. `delta` is,
for each loss token,

    delta_t = log T(a_t) - log S(a_t)

of the teacher T and of the policy S before the step's first update, both
without gradient. It is 0 where there is no teacher: for a trajectory without a
hint, with several contexts, or too long with the hint for config.batch.lengths.

config.teacher.columns with k > 0 adds to the loss the mean distance of the two
distributions (`losses.distance`) over the policy's tokens with a teacher, of
the segment kinds that it names: of the k ids that the policy itself finds most
likely before the first update, and of the rest together.

config.teacher.context names what gives the hints of a group, a function of this
module or any other by its dotted path:

    f(group, returns, env, **config.teacher.context_kw) -> a hint, or None, for
    each trajectory

returns: float [G], what each earned, NaN if it is in no batch. A hint is a
text, or two: of the question, and of the trajectory. It stands in the
question's text, by config.teacher.frame, which may leave either out, and is
outside text as that is. An attribute `needs` is that of other functions
(`data.checks.require_needs`).
config.teacher.others = True gives every trajectory the hint that one of another
question has, of two texts the first: a control.

config.teacher.weights are those of the policy ('live'), those it started with
('frozen'), its weights of every `every`-th step ('copy'), or their average, of
which each step takes `rate` ('ema').
"""

from collections.abc import Callable, Sequence
import dataclasses
import itertools
import math
import re
from typing import NamedTuple

import numpy as np

from searchrl_jax import lookup, types
from searchrl_jax.learn import batching, credit, potential, update
from searchrl_jax.learn.batching import StepBatch
from searchrl_jax.text import prompts
from searchrl_jax.types import Trajectory


class Asked(NamedTuple):
  """Rows for a teacher to score, and what reads the array `name` from them.

  read(log-probs [B, T] of the microbatches, nested as they are, B arrays [n] of
  the policy's or None) -> (one value for each trajectory, metrics).
  """

  name: str
  minibatches: list
  read: Callable[..., tuple[list, dict[str, float]]]


class Columns(NamedTuple):
  """Rows whose distributions a teacher is asked for, see `compare`."""

  rows: 'Rows'
  minibatches: list
  weights: list[np.ndarray]  # B float32 arrays [n], of the distance


class Said(NamedTuple):
  """Of a step, by all that was asked."""

  arrays: dict[str, list]  # for advantages
  metrics: dict[str, float]
  columns: list[list[update.Told]] | None = None  # of each microbatch
  compared: np.ndarray | None = None  # bool [B]: in the distance to it


class Rows(NamedTuple):
  """B trajectories, of which those that are taught have another prompt."""

  trajectories: Sequence[Trajectory]
  taught: np.ndarray  # bool [B]
  untold: int  # kept ones without a hint, or with several contexts
  too_long: int  # hints that did not fit


def context(config) -> Callable:
  """The function that config.teacher.context names.

  Raises:
    ConfigError: there is none.
  """
  with lookup.of(f'config.teacher.context={config.context!r}'):
    return lookup.function('searchrl_jax.learn', config.context, 'teacher')


def check(config) -> None:
  """Refuses fields of config.teacher that cannot work, and unused ones.

  Raises:
    ConfigError: names the field.
  """
  c = config.teacher
  if not c.context:
    return
  lookup.require(
    not config.engine.record_routes,
    f'config.engine.record_routes=True with teacher.context={c.context!r}: a '
    'teacher chooses experts anew, which would be a part of its difference '
    'from the policy; use False',
  )
  k, how = c.columns.k, config.algorithm.aggregation
  lookup.require(
    not k or how == 'token',
    f'config.teacher.columns.k={k} with algorithm.aggregation={how!r}: the '
    "distance is a mean over tokens; use 'token'",
  )
  template = prompts.load(config.env.template)
  known = [*template.kinds, 'other']
  if config.env.information != 'policy':
    known.remove('information')  # which the policy does not write
  for kind in c.columns.kinds:
    hint = lookup.near(kind, known)
    message = f'config.teacher.columns.kinds: {kind!r}: {hint}'
    lookup.require(kind in known, message)
  lookup.require_fields('config.teacher.context_kw', context(c), c.context_kw)
  lookup.require_format('config.teacher.frame', c.frame, 'text', 'hint')


def ask(
  batch: StepBatch, config, env, *, shards: int, seed
) -> list[Asked | Columns]:
  """What the config wants to know of a step.

  Args:
    batch: of the step.
    config: the whole.
    env: the `SearchEnv` that made the prompts.
    shards, seed: those of `batch`. With the policy's own prompts the rows are
      those of `batch`, and so are the programs: every delta is 0.
  """
  known = {'delta': _ask_delta, 'gold': potential.ask}
  taken = credit.needs(config.algorithm.advantage)
  how = dict(shards=shards, seed=seed)
  asked: list[Asked | Columns] = [
    Asked(name, *fn(batch, config, env, **how))
    for name, fn in known.items()
    if name in taken
  ]
  if config.teacher.columns.k:
    rows, minis = _make(batch, config, env, **how)
    weights = _weights(batch, rows, config.teacher.columns)
    asked.append(Columns(rows, minis, weights))
  return asked


def _ask_delta(batch: StepBatch, config, env, **how):
  rows, minis = _make(batch, config, env, **how)
  read = lambda scored, old: deltas(rows, minis, scored, old, batch.masks)
  return minis, read


def _make(batch: StepBatch, config, env, *, shards: int, seed):
  rows = told_rows(batch, config, env)
  return rows, batching.make(
    rows.trajectories,
    rows.taught,
    batch.group_ids,
    config.batch,
    config.algorithm.minibatches,
    shards=shards,
    contexts=config.env.max_contexts,
    seed=seed,
  )


def _weights(batch: StepBatch, rows: Rows, c) -> list[np.ndarray]:
  """coef x N / n on the n tokens that are compared, of N loss tokens."""
  out = []
  for t, mask, ok in zip(batch.trajectories, batch.masks, rows.taught):
    own = mask & _written(t.trained, c.kinds) & ok
    out.append(own.astype(np.float32))
  tokens = sum(int(m.sum()) for m, ok in zip(batch.masks, batch.kept) if ok)
  compared = sum(w.sum() for w in out)
  return [c.coef * tokens / max(compared, 1.0) * w for w in out]


def _written(segments, kinds: Sequence[str] = ()) -> np.ndarray:
  """bool [n]: whether the policy wrote a token; as one of `kinds`, if given."""
  own = [
    s.author == 'policy' and (not kinds or s.kind in kinds) for s in segments
  ]
  return np.repeat(own, [len(s.ids) for s in segments]).astype(bool)


def told_rows(batch: StepBatch, config, env) -> Rows:
  """The trajectories of a step behind prompts with hints."""
  c, longest = config.teacher, config.batch.lengths[-1]
  hints = _hints(batch, c, env)
  told, taught, too_long = [*batch.trajectories], batch.kept.copy(), 0
  for i, hint in enumerate(hints):
    taught[i] &= hint is not None and not told[i].contexts
    if taught[i]:
      told[i] = _told(told[i], hint, c.frame, env)
      taught[i] = sum(len(s.ids) for s in told[i].trained) <= longest
      too_long += not taught[i]
  untold = int(batch.kept.sum() - taught.sum()) - too_long
  return Rows(told, taught, untold, too_long)


def _counts(rows: Rows) -> dict[str, float]:
  return {
    'teacher_rows': float(rows.taught.sum()),
    'teacher_untold': float(rows.untold),
    'teacher_too_long': float(rows.too_long),
  }


Hint = str | tuple[str, str]


def joined(hint: Hint | None) -> str | None:
  """The whole text of a hint."""
  return ' '.join(filter(None, hint)) if isinstance(hint, tuple) else hint


def _hints(batch: StepBatch, c, env) -> list[str | None]:
  fn, hints, first = context(c), [], 0
  returns = np.where(batch.kept, batch.returns, math.nan)
  for group in batch.groups:
    of_group = returns[first : first + len(group)]
    hints.append([*fn(group, of_group, env, **c.context_kw)])
    first += len(group)
  if c.others:
    # Of the next question, around the end; each that has a hint gets another.
    known = [[h for h in of_group if h is not None] for of_group in hints]
    for g, of_group in enumerate(hints):
      others = itertools.chain(*known[g + 1 :], *known[:g])
      other = itertools.cycle([*others] or [None])
      hints[g] = [
        None if h is None else _of_another(h, next(other)) for h in of_group
      ]
  return [*map(joined, itertools.chain(*hints))]


def _of_another(hint: Hint, other: Hint | None) -> Hint | None:
  if isinstance(hint, tuple) and isinstance(other, tuple):
    return other[0], hint[1]
  return other


def _told(t: Trajectory, hint: str, frame: str, env) -> Trajectory:
  """The trajectory behind a prompt with the hint."""
  ids = env.prompt(hinted(t.question, hint, frame))[1]
  ids = np.asarray(ids, np.int32)
  prompt = types.Segment(ids, 'prompt', 'other', t.trained[0].agent, False)
  return dataclasses.replace(t, train_context=(prompt, *_response(t)))


def hinted(question: types.Question, hint: str, frame: str) -> types.Question:
  """The question with a hint in its text, and in its last user message.

  Without one ('') a frame that has the question leaves it as it is.
  """
  bare = not hint and '{text}' in frame
  show = lambda text: text if bare else frame.format(text=text, hint=hint)
  messages = [dict(m) for m in question.messages]
  for m in [m for m in messages if m['role'] == 'user'][-1:]:
    m['content'] = show(m['content'])
  told = dict(text=show(question.text), messages=(*messages,))
  return dataclasses.replace(question, **told)


def plainly(t: Trajectory, question: types.Question, state, **meta):
  """A trajectory of a hinted question, trained behind the plain one's prompt.

  Args:
    question: the plain one, of which the trajectory is from now on.
    state: with which an attempt at it begins.
    meta: is added to the trajectory's.
  """
  prompt = tuple(s for s in state.segments if s.author == 'prompt')
  return dataclasses.replace(
    t,
    question=question,
    train_context=(*prompt, *(s for s in t.segments if s.author != 'prompt')),
    meta={**t.meta, 'hinted': True, **meta},
  )


def _response(t: Trajectory) -> tuple:
  return tuple(s for s in t.trained if s.author != 'prompt')


def _sizes(rows: Rows) -> list[int]:
  """Tokens of each response that a teacher scores; 0 without one."""
  return [
    types.length(_response(t)) if ok else 0
    for t, ok in zip(rows.trajectories, rows.taught)
  ]


def deltas(
  rows: Rows, minibatches, scored: Sequence, old: Sequence[np.ndarray], masks
) -> tuple[list[np.ndarray], dict[str, float]]:
  """B float32 arrays [n], and metrics.

  Args:
    rows, minibatches: of the step.
    scored: log-probs [B, T] of the microbatches, nested as they are.
    old: B arrays [n] of the policy (`batching.unpacked`).
    masks: B bool arrays [n], of the policy's rows.
  """
  told = batching.masks(rows.trajectories)
  teacher, values = batching.unpacked(minibatches, scored, told), []
  for t, n, new, own, mask in zip(
    rows.trajectories, _sizes(rows), teacher, old, masks, strict=True
  ):
    delta = np.zeros(len(own), np.float32)
    if n:
      mask = mask[-n:] & _written(_response(t))
      delta[-n:] = np.where(mask, new[-n:] - own[-n:], 0.0)
    values.append(delta)
  taught = [m for m, ok in zip(masks, rows.taught) if ok]
  tokens = sum(int(m.sum()) for m in taught)
  size = sum(float(np.abs(d).sum()) for d in values)
  return values, _counts(rows) | {'teacher_delta_abs': size / max(tokens, 1)}


def compare(
  asked: Columns, batch: StepBatch, updater, params, teacher
) -> tuple[list[list[update.Told]], dict[str, float]]:
  """What `Updater.step` needs of a teacher, for each microbatch; and metrics.

  Args:
    asked: of the step.
    batch: of the step.
    updater: of the policy.
    params, teacher: of the policy, and of its teacher.
  """
  own, rows, told = batch.minibatches, asked.rows, asked.minibatches
  likely = updater.outputs(params, own, 'top')
  at = batching.unpacked(own, likely, batch.masks)
  masks, sizes = batching.masks(rows.trajectories), _sizes(rows)

  def moved(values, masks):
    """The response's values, behind another prompt."""
    out = [np.zeros((len(m), *values[0].shape[1:])) for m in masks]
    for new, old, n in zip(out, values, sizes, strict=True):
      if n:
        new[-n:] = old[-n:]
    return out

  there = batching.packed(told, moved(at, masks), np.int32)
  wanted = [
    [update.Told(x, np.zeros(x.shape, np.float32), b.advantages) for x, b in p]
    for p in map(zip, there, told)
  ]
  log_t = [np.zeros(x.shape) for x in at]
  if told:  # else nobody has a hint
    found = updater.outputs(teacher, told, 'columns', wanted)
    log_t = moved(batching.unpacked(told, found, masks), batch.masks)
  parts = (
    batching.packed(own, at, np.int32),
    batching.packed(own, log_t, np.float32),
    batching.packed(own, asked.weights, np.float32),
  )
  out = [[update.Told(*of) for of in zip(*mini)] for mini in zip(*parts)]
  tokens = float(sum((w > 0).sum() for w in asked.weights))
  return out, _counts(rows) | {'teacher_tokens': tokens}


# Hints.


def own(group, returns, env):
  """Nothing more: a control, for which every delta is 0."""
  del returns, env
  return [''] * len(group)


def anchors(group, returns, env, *, right: float, wrong: str, everyone: bool):
  """Passages without the true answer, and a wrong one that was given.

  The passages of `Question.supporting` that any trajectory of the group has
  read, each without the golden answers. Without any there are no hints.

  Args:
    right: return from which a trajectory is right.
    wrong: text before the answer of one that is not; '': it is left out.
    everyone: right ones get the passages; False: no hint.
  """
  question = group[0].question
  read = {
    p.id: p.text
    for t in group
    for s in t.calls(types.SEARCH)
    if isinstance(s, types.SearchResult)
    for p in s.passages
  }
  texts = [read[i] for i in question.supporting if i in read]
  for answer in sorted(question.answers, key=len, reverse=True):
    whole = re.compile(rf'(?<!\w){re.escape(answer)}(?!\w)', re.I)
    texts = [' '.join(whole.sub(' ', text).split()) for text in texts]
  hints: list[Hint | None] = []
  for t, earned in zip(group, returns, strict=True):
    answer = env.answer(t) if wrong and earned < right else None
    said = f'{wrong} {answer}' if answer else ''
    told = (' '.join(texts), said)
    hints.append(told if everyone or earned < right else None)
  return hints if texts else [None] * len(group)


anchors.needs = ('supporting', 'answers')  # type: ignore[attr-defined]
anchors.observes = 'searches'  # type: ignore[attr-defined]


def queries(group, returns, env, *, right: float, labels: bool, words):
  """The queries of the other trajectories, and which of these were right.

  Thoughts, passages and answers are left out. A group that is all right or all
  wrong has no contrast, and no hint.

  Args:
    right: return from which a trajectory is right.
    labels: False: the labels are those of the next trajectory, a control.
    words: the labels of those that are right, and of the others.
  """
  del env
  known = [i for i, earned in enumerate(returns) if np.isfinite(earned)]
  good = [bool(returns[i] >= right) for i in known]
  if len({*good}) < 2:
    return [None] * len(group)
  shown = good if labels else [*good[1:], good[0]]
  told = {}
  for i, ok in zip(known, shown):
    asked = [s.request.query for s in group[i].calls(types.SEARCH)]
    told[i] = ' '.join([*asked, words[not ok]])
  return [
    ' '.join(text for j, text in told.items() if j != i)
    for i in range(len(group))
  ]


queries.observes = 'searches'  # type: ignore[attr-defined]


def sibling(group, returns, env, *, right: float, fewest: bool):
  """What another trajectory of the group wrote and read that was right.

  A sole success gets none: it would be told its own reply.

  Args:
    right: return from which a trajectory is right.
    fewest: that with the fewest searches, which gets none itself; False: the
      first.
  """
  good = [i for i, earned in enumerate(returns) if earned >= right]
  if fewest:
    good.sort(key=lambda i: len(group[i].searches))
  hints: list[str | None] = []
  for i in range(len(group)):
    chosen = next((j for j in good if j != i), None)
    if fewest and good[:1] == [i]:
      chosen = None
    text = None
    if chosen is not None:
      ids = [x for s in _response(group[chosen]) for x in s.ids.tolist()]
      text = env.tokenizer.decode(ids).strip()
    hints.append(text)
  return hints


def from_data(group, returns, env, *, key: str):
  """What Question.meta[key] says: a text, or texts in any nesting."""
  del returns, env
  return [told_by(t.question, key) for t in group]


def told_by(question: types.Question, key: str) -> str:
  """Question.meta[key], a text or texts in any nesting, as one text."""

  def words(value) -> list[str]:
    if isinstance(value, (str, int, float)):
      return [str(value)]
    return [word for part in value for word in words(part)]

  return ' '.join(words(question.meta[key]))


def _key(fields):
  return (f'meta.{fields["key"]}',)


from_data.needs = _key  # type: ignore[attr-defined]
