"""What the start makes of the questions, before a run changes it.

A run visits a question of its test-time set about once, so that there is no
earlier vote on it that a label could differ from. Instead, samples of the
frozen start on all questions are kept, as an evaluation of it:

  python -m searchrl_jax.evaluate --config=configs/ttrl.py \\
    --workdir=runs/warm --out=runs/warm/votes \\
    --config.eval.n=16 --config.eval.temperature=1.0 --config.eval.top_p=1.0

`load` is a data module that adds them to the questions of another one, as
`meta['start_votes']`, from where rewards read them (rewards/vote.py). They are
samples of the policy: golden answers have no part in them.

  --config=configs/ttrl.py:label=restrain,start=runs/warm/votes
"""

import collections
from collections.abc import Mapping
import dataclasses
import functools
import pathlib

from ml_collections import ConfigDict

from searchrl_jax import lookup, read
from searchrl_jax import train as run
from searchrl_jax.data import core
from searchrl_jax.data.checks import require
from searchrl_jax.evaluate import policy as evaluate
from searchrl_jax.rewards import equivalence, vote
from searchrl_jax.store import folders, records
from searchrl_jax.types import SEARCH, Question

MODULE = 'experiments.ttrl.start'
FOLDER = 'votes'  # below the run of a start


def load(
  *,
  of: Mapping,
  votes: str,
  world_seed=0,
  prompt='template',
  folder='',
  world_module='',
  world=None,
) -> list[Question]:
  """Returns the questions of another set, with the votes of a start.

  Args:
    of: the set, {module, ...fields}.
    votes: the folder of an evaluation with several samples of each question.
    world_seed, prompt, folder, world_module, world: see `data.core`.

  Raises:
    DataError: a question has no votes.
  """
  data = ConfigDict(dict(world_seed=world_seed, prompt=prompt, dir=folder))
  data.update(world_module=world_module, world=world or {})
  (questions,) = core.load_sets({'': of}, data).values()
  known = read_votes(str(votes))
  for q in questions:
    require(
      q.id in known,
      f'{votes} has no samples of question {q.id!r}: evaluate the start on the '
      'set that is trained on (experiments/ttrl/start.py has the command)',
    )
  return [
    dataclasses.replace(q, meta={**q.meta, 'start_votes': known[q.id]})
    for q in questions
  ]


@functools.cache
def read_votes(folder: str) -> dict[str, dict]:
  """{id of a question: {label, share, searches}}; see rewards/vote.py.

  Raises:
    DataError: the evaluation has one sample of a question.
    RunError: there is no evaluation in the folder.
  """
  groups = collections.defaultdict(list)
  # live: another arm may have the lock of the folder for a moment.
  evaluated = read.run(folder, live=True)
  for record in evaluated.records('eval'):
    if not record.trajectory.failed:
      groups[record.trajectory.question.id].append(record.trajectory)
  found = {}
  for id, group in groups.items():
    require(
      len(group) > 1,
      f'{folder} has one sample of question {id!r}, which is no vote: evaluate '
      'with --config.eval.n=16 --config.eval.temperature=1.0',
    )
    answers = [*map(evaluated.answer, group)]
    keys = equivalence.keys(answers, evaluated.config.eval.match)
    label = vote.most_frequent(keys, group[0].question, 0)
    searches = [len(t.calls(SEARCH)) for t in group]
    found[id] = dict(
      label=label,
      share=keys.count(label) / len(keys) if label else 0.0,
      searches=sum(searches) / len(searches),
    )
  return found


def train(config: ConfigDict, workdir: str) -> None:
  """`train.train` with the votes of the start (the `loop` of an arm).

  They are sampled once, below the folder of train.init: arms that start from
  it share them. As many samples vote as in training, at its temperature.
  """
  out = pathlib.Path(config.train.init) / FOLDER
  sampled = config.copy_and_resolve_references()
  ((name, asked),) = sampled.data.train.items()
  sampled.data.eval = ConfigDict({name: asked})
  sampled.eval.update(
    n=config.rollout.group,
    temperature=config.rollout.temperature,
    top_p=config.rollout.top_p,
    questions=0,
    k=(),
  )
  with folders.locked(out, wait=True):  # another arm may be sampling them
    if not (out / records.EVAL).exists():
      evaluate.evaluate(sampled, config.train.init, str(out))
    known = records.config(out / 'config.json')
    changed = lookup.differences(
      *({'eval': records.plain(c.eval), 'data': records.plain(c.data.eval)}
        for c in (known, sampled))
    )  # fmt: skip
    lookup.require(
      not changed,
      f'{out} has votes that were sampled with others of {", ".join(changed)}; '
      'remove this folder',
    )
  fields = dict(module=MODULE, of=config.data.train[name], votes=str(out))
  config.data.train[name] = ConfigDict(fields)
  run.train(config, workdir)
