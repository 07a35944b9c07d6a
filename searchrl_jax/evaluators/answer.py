"""Answers, format and searches of trajectories.

`score` gives one row for each trajectory; `Evaluator` runs the rollout and
averages rows with bootstrap intervals. Failed trajectories (a service's fault)
have no scores and are counted apart.
"""

import asyncio
import collections
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
import dataclasses
import hashlib
import math
from typing import Any, NamedTuple

from ml_collections import ConfigDict
import numpy as np

from searchrl_jax.engines.core import Engine
from searchrl_jax.rewards import answer as rewards
from searchrl_jax.rewards import equivalence
from searchrl_jax.rewards import judge as judging
from searchrl_jax.rewards import scores as metrics
from searchrl_jax.rollout import chains
from searchrl_jax.run import records
from searchrl_jax.run.writer import Writer
from searchrl_jax.sources.core import Source
from searchrl_jax.text.env import SearchEnv
from searchrl_jax.types import Group, Question, SearchResult, Trajectory

NAN = math.nan


@dataclasses.dataclass(frozen=True)
class Row:
  """The scores of one trajectory; NaN where a score does not apply."""

  set: str  # the evaluation set
  question: str  # its id
  source: str
  hops: int  # 0 = unknown
  sample: int
  failed: bool
  vote: str | None  # equal votes are the same answer; None = no answer
  # Numbers, in the order of SCORES. NaN without golden answers:
  em: float
  f1: float
  sub_em: float
  answered: float  # an answer was parsed
  parsed: float  # ... and no action before it was invalid
  valid_format: float  # strict, see rewards/answer.py
  guessed: float  # answered without a search
  searches: float  # queries, those that the policy answers itself too
  real_searches: float  # of these, answered by the source
  # NaN without a search:
  copied: float  # share of queries that are the question, normalised
  # NaN where the supporting passages are unknown. Over all searches:
  recall_any: float
  recall_all: float
  tokens: float  # written by the policy
  truncated: float  # ended by a limit of tokens or turns
  # Self-certainty, the mean over the policy's tokens in nats; NaN unless
  # config.eval.best_of asks for it:
  certainty: float
  judged: float  # right by the judge of config.judge; NaN without a verdict


SCORES = (
  'em', 'f1', 'sub_em', 'answered', 'parsed', 'valid_format', 'guessed',
  'searches', 'real_searches', 'copied', 'recall_any', 'recall_all', 'tokens',
  'truncated', 'certainty', 'judged',
)  # fmt: skip


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
    set: the evaluation set, for the rows.
    match: config.eval.match.
  """
  answers = [None if t.failed else env.answer(t) for t in trajectories]
  asked = collections.defaultdict(list)
  for i, trajectory in enumerate(trajectories):
    asked[trajectory.question.id].append(i)
  votes = {}
  for at in asked.values():
    votes |= zip(
      at,
      equivalence.keys(
        [answers[i] for i in at],
        match,
        trajectories[at[0]].question.meta.get('synonyms', ()),
      ),
    )
  return [
    _row(trajectory, env, set, match, answers[i], votes[i])
    for i, trajectory in enumerate(trajectories)
  ]


def _row(trajectory, env: SearchEnv, set_name, match, answer, vote) -> Row:
  question = trajectory.question
  row = dict(
    set=set_name,
    question=question.id,
    source=question.source,
    hops=question.hops,
    sample=trajectory.sample,
    failed=trajectory.failed,
    vote=vote,
  )
  if trajectory.failed:
    return Row(**row, **dict.fromkeys(SCORES, NAN))
  answered = float(bool(answer))  # an empty block answers nothing
  golds = [a for a in question.answers if a.strip()]
  queries = _queries(trajectory, env)
  found = {
    passage.id
    for search in trajectory.searches
    if isinstance(search, SearchResult)
    for passage in search.passages
  }
  supports = [float(id in found) for id in question.supporting]
  return Row(
    **row,
    em=equivalence.correct(answer, golds, match) if golds else NAN,
    f1=metrics.f1(answer, golds) if golds else NAN,
    sub_em=metrics.sub_exact_match(answer, golds) if golds else NAN,
    answered=answered,
    parsed=answered * (trajectory.invalid_actions == 0),
    valid_format=float(
      rewards.valid_format(trajectory, env, require_think=False)
    ),
    guessed=answered * (not queries),
    searches=float(len(queries)),
    real_searches=float(len(trajectory.searches)),
    copied=_mean([_copies(query, question) for query in queries]),
    recall_any=max(supports, default=NAN),
    recall_all=min(supports, default=NAN),
    tokens=float(
      sum(len(s.ids) for s in trajectory.segments if s.author == 'policy')
    ),
    truncated=float(trajectory.end in ('tokens', 'turns')),
    certainty=NAN,
    judged=NAN,
  )


def certainties(
  trajectories: Sequence[Trajectory], scorer: Callable
) -> list[float]:
  """The mean self-certainty of the policy's tokens, in nats.

  NaN for a failed trajectory and for one in which the policy wrote nothing.

  Args:
    trajectories: as they were sampled; all that stands before a token
      conditions it, whoever wrote it.
    scorer: `scoring.Scorer`, at the temperature that sampled.
  """
  good = [
    i
    for i, t in enumerate(trajectories)
    if not t.failed and any(s.author == 'policy' for s in t.segments)
  ]
  out = [NAN] * len(trajectories)
  rows = [
    np.concatenate([s.ids for s in trajectories[i].segments]) for i in good
  ]
  for i, stats in zip(good, scorer(rows), strict=True):
    own = np.concatenate(
      [
        np.full(len(s.ids), s.author == 'policy')
        for s in trajectories[i].segments
      ]
    )
    if own.any():
      out[i] = float(stats.certainty[own].mean())
  return out


async def judged(
  trajectories: Sequence[Trajectory], env: SearchEnv, judge
) -> list[float]:
  """The verdicts on their answers; see `rewards.judge.grade`.

  NaN for a question without golden answers, too.
  """
  known = [
    i
    for i, t in enumerate(trajectories)
    if any(a.strip() for a in t.question.answers)
  ]
  grades, _ = await judging.grade(
    [trajectories[i] for i in known], env, judge, after_em=False
  )
  out = np.full(len(trajectories), NAN)
  out[known] = grades
  return out.tolist()


def _queries(trajectory: Trajectory, env: SearchEnv) -> list[str]:
  """Queries sent, or those that the policy answered itself."""
  if env.config.information == 'source':
    return [search.request.query for search in trajectory.searches]
  return [
    block.text
    for block in env.blocks(trajectory)
    if block.author == 'policy' and block.kind == 'search' and block.complete
  ]


def _copies(query: str, question: Question) -> float:
  return float(metrics.key(query) == metrics.key(question.text))


def _mean(values: Sequence[float]) -> float:
  return sum(values) / len(values) if values else NAN


class Evaluation(NamedTuple):
  groups: list[Group]
  rows: list[Row]
  slices: dict[str, list[Row]]  # label -> rows
  values: list[tuple[str, float]]  # what `run` yields
  seconds: float  # wall time of the rollout


class Evaluator:
  """Runs questions and averages their rows.

  Names: 'eval/em' over all questions; 'eval/source=nq/em' and
  'eval/hops=2/em' where there is more than one, 'eval/set=dev/em' likewise.
  Each has '/low', '/high' (95%, percentile bootstrap over questions) and
  '/n' (questions). Several samples of a question are averaged first.
  """

  def __init__(
    self,
    sets: Mapping[str, Sequence[Question]],
    *,
    env: SearchEnv,
    engine: Engine,
    source: Source,
    config: ConfigDict,
    writer: Writer | None = None,
    run: Callable[[Coroutine], Any] = asyncio.run,
    on_trajectory: Callable[[Trajectory], None] | None = None,
    name: str = 'eval',
    scorer: Callable | None = None,
    judge=None,
  ):
    """Chooses the questions; nothing runs yet.

    Args:
      sets: name -> questions.
      env: the text protocol.
      engine: writes the policy's tokens.
      source: answers its searches.
      config: the whole config; reads config.eval and config.rollout.
      writer: gets the trajectories (NAME/) and, in NAME_ids.json, the
        ids evaluated.
      run: runs the coroutine, `asyncio.Runner().run` for instance.
      on_trajectory: as in `rollout`.
      name: what the names of the values, and the files, begin with.
      scorer: `scoring.Scorer` of the policy, if rows shall have their
        certainty.
      judge: `rewards.judge.Judge`, if rows shall have its verdict.

    Raises:
      ValueError: no questions.
    """
    self._env, self._engine, self._source = env, engine, source
    self._config, self._rollout = config.eval, chains.evaluation(config)
    self._writer, self._run_coroutine = writer, run
    self._on_trajectory, self._name = on_trajectory, name
    self._scorer, self._judge = scorer, judge
    self.sets = {
      label: _choose(questions, config.eval.questions, config.eval.seed)
      for label, questions in sorted(sets.items())
    }
    if not any(self.sets.values()):
      raise ValueError(
        'no questions to evaluate: config.data.eval names none, or its sets '
        'are empty'
      )

  @property
  def ids(self) -> dict[str, list[str]]:
    """The ids that are evaluated, by set."""
    return {k: [q.id for q in v] for k, v in self.sets.items()}

  def run(self, step: int) -> Iterator[tuple[str, float]]:
    """Yields (name, value); see the class for the names."""
    yield from self.collect(step).values

  def collect(self, step: int) -> Evaluation:
    """Runs the questions: trajectories, rows and values.

    The random streams do not depend on `step`, nor the result on the order
    of the questions.
    """
    labels = [label for label, qs in self.sets.items() for _ in qs]
    result = self._run_coroutine(
      chains.rollout(
        [q for questions in self.sets.values() for q in questions],
        env=self._env,
        engine=self._engine,
        source=self._source,
        config=self._rollout,
        seed=self._config.seed,
        step=0,
        on_trajectory=self._on_trajectory,
      )
    )
    rows = [
      row
      for label, group in zip(labels, result.groups, strict=True)
      for row in score(group, self._env, label, self._config.match)
    ]
    flat = [t for group in result.groups for t in group]
    more = {}
    if self._scorer is not None:
      more['certainty'] = certainties(flat, self._scorer)
    if self._judge is not None:
      more['judged'] = self._run_coroutine(judged(flat, self._env, self._judge))
    for name, values in more.items():
      rows = [
        dataclasses.replace(row, **{name: value})
        for row, value in zip(rows, values, strict=True)
      ]
    if self._writer is not None:
      self._keep(step, result.groups)
    sliced = slices(rows, self._name)
    values = [
      value
      for label, part in sliced.items()
      for value in summary(
        part, label, resamples=self._config.bootstrap, seed=self._config.seed
      )
    ]
    return Evaluation(result.groups, rows, sliced, values, result.stats.seconds)

  def _keep(self, step: int, groups: Sequence[Group]) -> None:
    self._writer.trajectories(step, groups, name=self._name)
    manifest = {
      label: {'n': len(ids), 'sha256': digest(ids), 'ids': ids}
      for label, ids in self.ids.items()
    }
    records.write_json(
      self._writer.folder / f'{self._name}_ids.json',
      {'sampling': self._config, 'sets': manifest},
    )


def digest(ids: Sequence[str]) -> str:
  """What says that two lists of ids are the same."""
  return hashlib.sha256('\n'.join(ids).encode()).hexdigest()


def _choose(
  questions: Sequence[Question], count: int, seed: int
) -> list[Question]:
  """`count` of the questions (0 = all), in the order of their ids.

  Which ones depends on their ids and the seed alone.
  """

  def draw(question: Question) -> bytes:
    return hashlib.blake2b(repr((seed, question.id)).encode()).digest()

  if count:
    questions = sorted(questions, key=draw)[:count]
  return sorted(questions, key=lambda q: q.id)


def slices(rows: Sequence[Row], name: str) -> dict[str, list[Row]]:
  """Rows by set, source and hops, where there is more than one of them."""
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
  rows: Sequence[Row], label: str, *, resamples: int, seed: int
) -> Iterator[tuple[str, float]]:
  """Yields 'LABEL/SCORE' and its /low, /high and /n, over questions.

  A score that applies to no row is left out. 'LABEL/failed' counts failed
  trajectories.
  """
  for name in SCORES:
    interval = metrics.bootstrap(
      list(by_question(rows, name).values()), resamples=resamples, seed=seed
    )
    if interval.n:
      yield from named(f'{label}/{name}', interval)
  yield f'{label}/failed', float(sum(row.failed for row in rows))


def by_question(rows: Sequence[Row], name: str) -> dict[tuple[str, str], float]:
  """{(set, question id): mean over its samples}, sorted, NaN left out.

  The values of two evaluations of the same questions can be paired
  (`metrics.paired_bootstrap`) by these keys.
  """
  parts = collections.defaultdict(list)
  for row in rows:
    value = getattr(row, name)
    if not math.isnan(value):
      parts[row.set, row.question].append(value)
  return {key: _mean(parts[key]) for key in sorted(parts)}


def named(name: str, interval: metrics.Interval) -> Iterator[tuple[str, float]]:
  """The mean under `name`, the rest below it."""
  yield name, interval.mean
  yield f'{name}/low', interval.low
  yield f'{name}/high', interval.high
  yield f'{name}/n', float(interval.n)
