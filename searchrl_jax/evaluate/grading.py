"""Evaluation of answers, format and searches.

`score` returns one row per trajectory. `Evaluator` runs a rollout and averages
rows with bootstrap intervals. Trajectories that failed (because a service did)
have no scores and are counted separately.
"""

import asyncio
import collections
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import hashlib
import logging
import math
from typing import Any, NamedTuple

from ml_collections import ConfigDict
import numpy as np

from searchrl_jax import checks, lookup
from searchrl_jax.devices import cluster
from searchrl_jax.engines.core import Engine
from searchrl_jax.rewards import answer as rewards
from searchrl_jax.rewards import equivalence
from searchrl_jax.rewards import judge as judging
from searchrl_jax.rewards import scores as metrics
from searchrl_jax.rollout import chains
from searchrl_jax.sources.core import Source
from searchrl_jax.store import records
from searchrl_jax.store.writer import Writer
from searchrl_jax.text.env import SearchEnv
from searchrl_jax.types import (
  SEARCH,
  Group,
  Question,
  SearchResult,
  Segment,
  Trajectory,
)

NAN = math.nan


@dataclasses.dataclass(frozen=True)
class Row:
  """The scores of one trajectory; NaN if a score does not apply."""

  set: str  # the evaluation set
  question: str  # its id
  source: str
  hops: int  # 0 = unknown
  sample: int
  failed: bool
  vote: str | None  # equal for equal answers; None = no answer
  # The fields in SCORES. NaN without golden answers:
  em: float = NAN
  f1: float = NAN
  sub_em: float = NAN
  answered: float = NAN  # 1 if there is an answer
  parsed: float = NAN  # 1 if there also was no invalid action
  valid_format: float = NAN  # see rewards/answer.py
  guessed: float = NAN  # 1 if answered without a search
  searches: float = NAN  # queries, also those not sent to the source
  real_searches: float = NAN  # number of queries answered by the source
  # NaN without a search:
  copied: float = NAN  # share of queries equal to the question, normalised
  # NaN if the supporting passages are unknown; over all searches:
  recall: float = NAN  # the share that was found
  recall_any: float = NAN
  recall_all: float = NAN
  # 1 if all supporting passages were retrieved or, where these are unknown, a
  # passage that states a golden answer; NaN if the policy informs itself:
  found: float = NAN
  em_found: float = NAN  # em; NaN unless `found` is 1
  # Shares of the policy's thoughts; NaN without thoughts:
  thoughts_complete: float = NAN  # closed, and not empty
  thoughts_repeated: float = NAN  # equal to an earlier one of the trajectory
  tokens: float = NAN  # number written by the policy
  # Mean log-prob of these, in nats, as sampled; NaN unless em is 1:
  logp_right: float = NAN
  truncated: float = NAN  # 1 if ended by a limit of tokens or turns
  judged: float = NAN  # 1 if right by config.judge; NaN without a verdict


SCORES = tuple(f.name for f in dataclasses.fields(Row) if f.default is NAN)


def score(
  trajectories: Sequence[Trajectory],
  env: SearchEnv,
  set: str = '',
  match: str = 'text',
) -> list[Row]:
  """One row for each trajectory, in order.

  Args:
    trajectories: as the environment recorded them.
    env: reads answers and blocks.
    set: name of the evaluation set, for the rows.
    match: config.eval.match.
  """
  answers = [None if t.failed else env.answer(t) for t in trajectories]
  samples = collections.defaultdict(list)
  for i, trajectory in enumerate(trajectories):
    samples[trajectory.question.id].append(i)
  votes = {}
  for at in samples.values():
    votes |= zip(at, equivalence.keys([answers[i] for i in at], match))
  return [
    Row(
      *(set, t.question.id, t.question.source, t.question.hops, t.sample),
      t.failed,
      votes[i],
      **({} if t.failed else _scores(t, env, match, answers[i])),
    )
    for i, t in enumerate(trajectories)
  ]


def _scores(trajectory, env: SearchEnv, match: str, answer) -> dict[str, float]:
  """The entries of SCORES that apply and need no judge."""
  question = trajectory.question
  answered = float(bool(answer))  # an empty block answers nothing
  golds = [a for a in question.answers if a.strip()]
  queries = _queries(trajectory, env)
  copies = [metrics.key(q) == metrics.key(question.text) for q in queries]
  searched = trajectory.calls(SEARCH)
  results = [s for s in searched if isinstance(s, SearchResult)]
  passages = [passage for result in results for passage in result.passages]
  retrieved = {passage.id for passage in passages}
  supports = [id in retrieved for id in question.supporting]
  own = [b for b in env.blocks(trajectory) if b.author == 'policy']
  thoughts = [b for b in own if b.kind == 'think']
  different = {b.text for b in thoughts}
  written = [s for s in trajectory.segments if s.author == 'policy']
  scores = dict(
    answered=answered,
    parsed=answered * (trajectory.invalid_actions == 0),
    valid_format=rewards.valid_format(trajectory, env, require_think=False),
    guessed=answered * (not queries),
    searches=len(queries),
    real_searches=len(searched),
    copied=_mean(copies),
    recall=_mean(supports),
    recall_any=max(supports, default=NAN),
    recall_all=min(supports, default=NAN),
    thoughts_complete=_mean([b.complete and b.text != '' for b in thoughts]),
    thoughts_repeated=1 - len(different) / len(thoughts) if thoughts else NAN,
    tokens=sum(len(s.ids) for s in written),
    truncated=trajectory.end in ('tokens', 'turns'),
  )
  if golds:
    scores['em'] = equivalence.correct(answer, golds, match)
    logps = [s.logps for s in written if s.logps is not None]
    if scores['em'] and logps:
      scores['logp_right'] = np.concatenate(logps).mean(dtype=np.float64)
    scores['f1'] = metrics.f1(answer, golds)
    scores['sub_em'] = metrics.sub_exact_match(answer, golds)
    if env.config.information == 'source' or passages:
      scores['found'] = scores['recall_all']
      if not supports:
        texts = (f'{p.title}\n{p.text}' for p in passages)
        scores['found'] = any(metrics.states(text, golds) for text in texts)
      scores['em_found'] = scores['em'] if scores['found'] else NAN
  return {name: float(value) for name, value in scores.items()}


def _queries(trajectory: Trajectory, env: SearchEnv) -> list[str]:
  """The queries that were sent, or that the policy answered itself."""
  if env.config.information == 'source':
    return [search.request.query for search in trajectory.calls(SEARCH)]
  return [
    block.text
    for block in env.blocks(trajectory)
    if block.author == 'policy' and block.kind == 'search' and block.complete
  ]


def _mean(values: Sequence[float]) -> float:
  # Exact, so that the order of samples cannot part equal means.
  return math.fsum(values) / len(values) if values else NAN


class Evaluation(NamedTuple):
  groups: list[Group]
  rows: list[Row]
  values: list[tuple[str, float]]  # (name, value) as `Evaluator.run` yields
  seconds: float  # wall time of the rollout


@dataclasses.dataclass
class Evaluator:
  """Runs questions and averages their rows.

  Names of values: 'eval/em' over all questions, and 'eval/set=dev/em',
  'eval/source=nq/em' and 'eval/hops=2/em' if there are several sets, sources or
  hops. Each name also has '/low', '/high' (95%, percentile bootstrap over
  questions) and '/n' (questions). Samples of a question are averaged first.
  """

  sets: Mapping[str, Sequence[Question]]
  _: dataclasses.KW_ONLY
  env: SearchEnv
  engine: Engine  # samples the policy's tokens
  source: Source  # answers searches
  config: ConfigDict  # the whole; reads config.eval and config.rollout
  # Writes the trajectories (NAME/) and the ids (NAME_ids.json).
  writer: Writer | None = None
  # Runs a coroutine, such as `asyncio.Runner().run`.
  runner: Callable[[Coroutine], Any] = asyncio.run
  name: str = 'eval'  # prefix of the names of values and files
  judge: Any = None  # `rewards.judge.Judge`, to fill in `judged`

  def __post_init__(self):
    """Selects the questions; nothing runs yet.

    Raises:
      ValueError: there are no questions, or a field of config.eval is wrong.
    """
    e = self.config.eval
    checks.check_evaluation(self.config)
    self.sets = {
      label: _choose(questions, e.questions, e.seed)
      for label, questions in sorted(self.sets.items())
    }
    lookup.require(
      any(self.sets.values()),
      'no questions to evaluate: config.data.eval has no set, or empty ones',
    )

  def run(self, step: int) -> Iterator[tuple[str, float]]:
    """Yields (name, value); see the class for the names."""
    yield from self.collect(step).values

  def sampled(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
    """'sampled/SCORE' of config.eval.sampled questions of each set, at the
    temperature of the rollouts.

    Warns if these answers are far worse, or worth nothing: RL learns from such
    samples.

    values: what `run` gave.
    """
    config = self.config.copy_and_resolve_references()
    e, r = config.eval, config.rollout
    if not e.sampled or e.temperature == r.temperature:
      return {}
    e.update(n=1, k=(), temperature=r.temperature, top_p=r.top_p)
    e.questions = min(e.questions or e.sampled, e.sampled)
    other = dataclasses.replace(self, config=config, name='sampled')
    found = {k: v for k, v in other.run(step) if '=' not in k}
    low, high = values.get('eval/f1/low', 0.0), found.get('sampled/f1/high')
    if high == 0:
      logging.warning(
        f'at config.rollout.temperature={r.temperature:g} the policy has F1 0 '
        'in all samples: RL learns from such samples, and finds nothing to '
        'select in them; see "A reward that stays at 0" in docs/diagnostics.md'
      )
    elif high is not None and high < low / 2:
      logging.warning(
        f'at config.rollout.temperature={r.temperature:g} the policy has F1 '
        f'{found["sampled/f1"]:.3f}, and {values["eval/f1"]:.3f} at '
        f'{self.config.eval.temperature:g}: RL learns from such samples, and '
        'may find little in them. Lower the temperature, or warm-start for '
        'longer (config.sft)'
      )
    return found

  def collect(self, step: int) -> Evaluation:
    """Runs the questions.

    The random streams do not depend on `step`, nor does the result depend on
    the order of the questions.
    """
    found = cluster.gather(self.name, self._own)
    groups, rows = ([x for part in found for x in part[i]] for i in (0, 1))
    seconds = max(part[2] for part in found)
    if self.judge is not None:
      judged = np.array([row.judged for row in rows])
      flat = [t for group in groups for t in group]
      check = functools.partial(self.judge.require, flat, ~np.isnan(judged))
      cluster.agree(f'{self.name} judge', check)
    if self.writer is not None:
      self.writer.trajectories(step, groups, name=self.name)
      path = self.writer.folder / f'{self.name}_ids.json'
      sets = {label: asked(qs) for label, qs in self.sets.items()}
      content = {'sampling': self.config.eval, 'sets': sets}
      cluster.first('ids', lambda: records.write_json(path, content))
    values = [
      value
      for label, part in slices(rows, self.name).items()
      for value in summary(part, label, self.config.eval)
    ]
    return Evaluation(groups, rows, values, seconds)

  def _own(self) -> tuple[list[Group], list[Row], float]:
    """Plays and scores this process's share of the questions."""
    e = self.config.eval
    own = cluster.part([(x, q) for x, qs in self.sets.items() for q in qs])
    ended: list[Trajectory] = []
    # Observations of the others: hundreds begin together, and end late.
    read = collections.Counter[str]()

    def on_trajectory(trajectory):
      ended.append(trajectory)
      read.pop(trajectory.id, None)

    def on_event(name, event):
      read[name] += isinstance(event, Segment) and event.author != 'policy'

    def count():
      parts = sum([*read.values()]) // (self.env.config.max_turns + 1)
      return len(ended) + parts, len(own) * e.n

    played = chains.rollout(
      [question for _, question in own],
      env=self.env,
      engine=self.engine,
      source=self.source,
      config=chains.evaluation(self.config),
      seed=e.seed,
      step=0,
      on_trajectory=on_trajectory,
      on_event=on_event,
    )
    with self._phase(self.name, count):
      result = self.runner(played)
    rows = [
      row
      for (label, _), group in zip(own, result.groups, strict=True)
      for row in score(group, self.env, label, e.match)
    ]
    flat = [t for group in result.groups for t in group]
    if self.judge is not None:
      grades = judging.grade(flat, self.env.answer, self.judge, after_em=False)
      with self._phase(f'{self.name} judge'):
        judged, unusable = self.runner(grades)
      if unusable.any():
        logging.warning(
          f'{int(unusable.sum())} of {len(flat)} answers have no usable verdict'
          ' and count as wrong: see the judge at config.judge.url'
        )
      rows = [
        dataclasses.replace(row, judged=value)
        for row, value in zip(rows, judged.tolist(), strict=True)
      ]
    return result.groups, rows, result.stats.seconds

  def _phase(self, name: str, count=None):
    """`Writer.phase`, if there is a writer."""
    if self.writer is None:
      return contextlib.nullcontext()
    return self.writer.phase(name, count)


def asked(questions: Sequence[Question]) -> dict[str, Any]:
  """What names the questions of a set: their ids, and a digest of these."""
  ids = [q.id for q in questions]
  digest = hashlib.sha256('\n'.join(ids).encode()).hexdigest()
  return {'n': len(ids), 'sha256': digest, 'ids': ids}


def _choose(
  questions: Sequence[Question], count: int, seed: int
) -> list[Question]:
  """Returns `count` of the questions (0 = all), sorted by id.

  The choice depends on their ids and the seed only.
  """

  def draw(question: Question) -> bytes:
    return hashlib.blake2b(repr((seed, question.id)).encode()).digest()

  if count:
    questions = sorted(questions, key=draw)[:count]
  return sorted(questions, key=lambda q: q.id)


def slices(rows: Sequence[Row], name: str) -> dict[str, list[Row]]:
  """Groups rows by set, source and hops, if there are several of these."""
  out = {name: list(rows)}
  for field in ('set', 'source', 'hops'):
    parts = collections.defaultdict(list)
    for row in rows:
      parts[getattr(row, field)].append(row)
    if len(parts) > 1:
      for value in sorted(parts):
        label = value if value not in ('', 0) else 'unknown'
        out[f'{name}/{field}={label}'] = parts[value]
  return out


def summary(
  rows: Sequence[Row], label: str, e: ConfigDict
) -> Iterator[tuple[str, float]]:
  """Yields 'LABEL/SCORE' and its /low, /high and /n, over questions.

  Scores that apply to no row are left out. 'LABEL/failed' is the number of
  failed trajectories.

  Args:
    rows: of one slice.
    label: of the slice.
    e: config.eval.
  """
  found = {name: by_question(rows, name) for name in SCORES}
  for score, means in (found | at_k(rows, sorted({*e.k}))).items():
    values = [means[question] for question in sorted(means)]
    name = f'{label}/{score}'
    interval = metrics.bootstrap(values, resamples=e.bootstrap, seed=e.seed)
    if interval.n:
      yield name, interval.mean
      yield f'{name}/low', interval.low
      yield f'{name}/high', interval.high
      yield f'{name}/n', float(interval.n)
  yield f'{label}/failed', float(sum(row.failed for row in rows))


def by_question(rows: Sequence[Row], name: str) -> dict[tuple[str, str], float]:
  """Returns {(set, question id): mean over its samples}, sorted, without NaN.

  The keys pair the values of two evaluations of the same questions.
  """
  parts = collections.defaultdict(list)
  for row in rows:
    value = getattr(row, name)
    if not math.isnan(value):
      parts[row.set, row.question].append(value)
  return {key: _mean(parts[key]) for key in sorted(parts)}


def at_k(
  rows: Sequence[Row], k: Sequence[int]
) -> dict[str, dict[tuple[str, str], float]]:
  """Returns {'pass@K', 'maj@K': {(set, question id): value}}.

  pass@k is the unbiased estimator of Chen et al. 2021; maj@k is its
  counterpart for the majority vote (`scores.maj_at_k`).

  Failed trajectories do not count as samples. A question with fewer than K
  samples, or without golden answers, has no value at K.
  """
  questions: dict[tuple[str, str], list] = {}
  for row in rows:
    if not row.failed and not math.isnan(row.em):
      questions.setdefault((row.set, row.question), []).append(row)
  out: dict[str, dict[tuple[str, str], float]] = collections.defaultdict(dict)
  for name, samples in questions.items():
    right = [row.em == 1.0 for row in samples]
    votes = [row.vote for row in samples]
    for n in (n for n in k if n <= len(samples)):
      out[f'pass@{n}'][name] = metrics.pass_at_k(len(right), sum(right), n)
      out[f'maj@{n}'][name] = metrics.maj_at_k(votes, right, n)
  return out
