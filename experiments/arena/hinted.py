"""Hints in the warm start of the second batch, and what they are worth.

A teacher is the policy behind a prompt with a hint. A policy of atlas that has
never read one makes nothing of it. So a share of the warm start has hints: of
one of KINDS, what `searchrl_jax.learn.teacher` makes of GROUP scripted attempts
at the question, and after it an attempt that does all well.
"""

import collections
from collections.abc import Iterator, Mapping
import dataclasses
import functools
import itertools
import json
import pathlib
import statistics
import tempfile

import numpy as np

from configs import atlas as recipe
from searchrl_jax import read, schema, sft
from searchrl_jax.data.core import Trace
from searchrl_jax.evaluate import policy
from searchrl_jax.learn import teacher
from searchrl_jax.rewards import scores
from searchrl_jax.run import build
from searchrl_jax.store import records
from searchrl_jax.text.env import SearchEnv
from searchrl_jax.text.tokenizer import load as load_tokenizer
from searchrl_jax.types import Question, Trajectory
from searchrl_jax.worlds import atlas, atlas_traces, microtraces

GROUP = recipe.get_config().rollout.group
# Words of these worlds: what was right, and what was not.
LABELS = 'found', 'no'
# Name -> the function that gives the hints of a group, and its fields.
KINDS = {
  'anchors': (teacher.anchors, dict(right=1.0, wrong='not', everyone=True)),
  'wrong': (teacher.anchors, dict(right=1.0, wrong='not', everyone=False)),
  'queries': (teacher.queries, dict(right=1.0, labels=True, words=LABELS)),
  'sibling': (teacher.sibling, dict(right=1.0, fewest=False)),
  'facts': (teacher.from_data, dict(key='facts')),
  'wordings': (teacher.from_data, dict(key='queries')),
}
FRAME = schema.base().teacher.frame
_SURE = atlas_traces.Mix(
  good=1, retry=1, waste=0, stop=0, guess=0, recall=0.5, note=0.5, split=0.5
)
_APART = 500  # between the worlds of plain traces and those with hints


def traces(
  *,
  world_seed: int,
  mix: str,
  hinted=0.25,
  worlds=40,
  n=20_000,
  turns=6,
  people=200,
  seed=0,
  k=1,
  train=300,
  heldout=150,
  known=40,
) -> list[Trace]:
  """Returns traces as `atlas_traces.traces`, of which a share has hints.

  Args:
    hinted: the share. Of these, attempts that fail are left out. The other
      arguments are those of that function.
  """
  told = int(n * hinted)
  common = dict(worlds=worlds, turns=turns, people=people, seed=seed, k=k)
  common |= dict(train=train, heldout=heldout, known=known)
  out = atlas_traces.traces(
    world_seed=world_seed, mix=mix, n=n - told, **common
  )
  env = _environment()
  everyone, relations = atlas.names('train', False), tuple(atlas.SECTION)
  first = microtraces.TRACE_WORLDS + _APART
  for i, own_seed, count in microtraces.shares(world_seed, worlds, told, first):
    own = atlas.generate(own_seed, train=people, heldout=40, known=0)
    pool = itertools.cycle(atlas.pick(own, 'train', kinds=atlas.SEARCHED))
    asked = [*itertools.islice(pool, count)]
    search = atlas_traces.searcher(own, everyone, relations)
    script = functools.partial(atlas_traces.script, own, turns=turns, k=k)
    repeated = [q for q in asked for _ in range(GROUP)]
    # Of a mixture whose attempts are right and wrong, which some hints need.
    attempts = script(
      mix=atlas_traces.MIXES['even'],
      pool=repeated,
      n=len(repeated),
      seed=[seed, i, 0],
      search=search,
    )
    sure = script(
      mix=_SURE, pool=asked, n=count, seed=[seed, i, 1], search=search
    )
    # Kinds of questions alternate: those of hints must not do so with them.
    kinds_of = np.random.default_rng([seed, i, 2]).integers(
      len(KINDS), size=count
    )
    for j, trace in enumerate(sure):
      if not trace.good:  # a passage about somebody else came first
        continue
      tried = attempts[j * GROUP : (j + 1) * GROUP]
      played = (sft.render(t, env, sample) for sample, t in enumerate(tried))
      group = tuple(t for t in played if t is not None)
      out.append(_behind(trace, _hint(asked[j], group, env, kinds_of[j])))
  return out


def load(*, path: str) -> list[Question]:
  """Returns the questions of a file that `measured` has written."""
  rows = json.loads(pathlib.Path(path).read_text())
  return [Question(**row | {'answers': tuple(row['answers'])}) for row in rows]


def measured(config, run: str, out: str) -> Mapping[str, float]:
  """Exact match behind hints (an `Evaluation` of a sweep).

  Of the held-out questions that have a hint of a KIND: 'KIND/plain' without
  it, 'KIND/own' with it, and 'KIND/other' with that of another question;
  'KIND/gain' is own - plain, and 'KIND/specific' own - other. All three are
  asked anew: a question has a hint because of how its first attempts ended.
  """
  first, env = f'{out}/first', _environment()
  tried = config.copy_and_resolve_references()
  tried.eval.n = GROUP
  policy.evaluate(tried, run, first)
  groups = collections.defaultdict(list)
  for t in _played(first):
    groups[t.question.id].append(t)
  rows = []
  for kind, (fn, kw) in KINDS.items():
    told = []
    for group in groups.values():
      earned = [_right(t, env) for t in group]
      if hint := next(filter(None, fn(group, earned, env, **kw)), None):
        told.append((group[0].question, teacher.joined(hint)))
    hints = [hint for _, hint in told]
    given = dict(plain=[''] * len(hints), own=hints)
    for name, shown in (given | dict(other=[*hints[1:], *hints[:1]])).items():
      for (question, _), hint in zip(told, shown, strict=True):
        text = teacher.hinted(question, hint, FRAME).text
        id = f'{kind}/{name}/{question.id}'
        rows.append(dict(id=id, text=text, answers=question.answers))
  path = pathlib.Path(out) / 'questions.json'
  records.write_json(path, rows)
  behind = config.copy_and_resolve_references()
  make_room(behind)
  behind.data.eval = {'hinted': dict(module=__name__, path=str(path))}
  behind.eval.questions = 0
  policy.evaluate(behind, run, f'{out}/behind')
  found = collections.defaultdict(lambda: collections.defaultdict(list))
  for t in _played(f'{out}/behind'):
    kind, name, id = t.question.id.split('/', 2)
    found[kind][id, name].append(_right(t, env))
  values = {}
  for kind, known in found.items():
    names = 'plain', 'own', 'other'
    # Of a question whose service failed, one is missing.
    ids = [
      id
      for id in dict.fromkeys(id for id, _ in known)
      if all((id, name) in known for name in names)
    ]
    for name in names:
      means = [statistics.fmean(known[id, name]) for id in ids]
      values[f'{kind}/{name}'] = statistics.fmean(means)
    own = values[f'{kind}/own']
    values[f'{kind}/gain'] = own - values[f'{kind}/plain']
    values[f'{kind}/specific'] = own - values[f'{kind}/other']
  return values


def make_room(config) -> None:
  """Lets a prompt have a hint, which is as long as an attempt at most."""
  longest = 2 * config.env.max_tokens
  config.env.max_tokens = config.engine.max_len = longest
  config.batch.lengths = (*config.batch.lengths, longest)
  config.batch.tokens = max(config.batch.tokens, longest)
  see_far(config)


def see_far(config) -> None:
  """Declares the positions behind hints, in all arms alike."""
  config.model.arch.max_position_embeddings = 1024


def _played(folder: str) -> Iterator[Trajectory]:
  """Trajectories of the last evaluation in a folder, without failed ones."""
  found = read.run(folder)
  played = found.records('eval', [max(found.parts['eval'])])
  return (r.trajectory for r in played if not r.trajectory.failed)


def _right(t, env: SearchEnv) -> float:
  return scores.exact_match(env.answer(t), t.question.answers)


def _environment() -> SearchEnv:
  with tempfile.TemporaryDirectory() as folder:
    tok = load_tokenizer(atlas.tokenizer(folder))
  return build.environment(recipe.get_config(), tok)


def _hint(question: Question, group, env: SearchEnv, n: int) -> str:
  """Of the n-th kind, or of the first after it that has one."""
  earned = [_right(t, env) for t in group]
  for fn, kw in [*KINDS.values()][n:]:
    hints = fn(group, earned, env, **kw) if group else []
    if hint := next(filter(None, hints), None):
      return teacher.joined(hint)
  return teacher.told_by(question, 'facts')


def _behind(trace: Trace, hint: str) -> Trace:
  question = teacher.hinted(trace.question, hint, FRAME)
  return dataclasses.replace(trace, question=question)
