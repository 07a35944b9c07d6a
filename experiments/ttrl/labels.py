"""What the labels of a run were, by the truth of its world.

  python -m experiments.ttrl.labels --runs=runs/x/arms/majority/0/run,... \\
    --out=labels.json

reads the trajectories that runs on a generated world have recorded. The label
of a question in a step is its most frequent answer (`vote.majority`), whatever
the run was rewarded for. It is

  right         a golden answer
  intermediate  the person that the question starts from, or one on the way to
                the answer (`meta.path`, walked in the world's facts)
  else          another answer; `none`: no sample has one

This is an analysis with golden answers and paths; no reward reads it. The JSON
has, for each run, means of `rows` by kind of question, `hard` (three hops or
more) and `all`, over the first and the last quarter of the steps (`first`,
`last`) and over all of them (`whole`). The figure beside it shows the labels of
hard questions, agreement, and searches.
"""

from collections.abc import Iterator, Mapping, Sequence
import pathlib
import statistics

from absl import app, flags
import numpy as np

from experiments.ttrl import coverage
from searchrl_jax import lookup, read
from searchrl_jax.rewards import equivalence, guarded, scores, vote
from searchrl_jax.run import build
from searchrl_jax.store import records
from searchrl_jax.types import SEARCH, Question, Trajectory
from searchrl_jax.worlds import atlas

KINDS = 'right', 'intermediate', 'else', 'none'  # of labels
HARD = 3  # hops, at least
WINDOW = 5  # steps of a point in the figure
# Numbers of a row, whose means are figures.
VALUES = (
  *KINDS, 'agreement', 'distinct', 'searches', 'ahead', 'found', 'covered',
  'flipped', 'revisit_flipped',
)  # fmt: skip


def on_the_way(question: Question, facts: Mapping) -> set[str]:
  """The keys of the persons of a path, without the answer at its end.

  facts: person -> {relation: value}, of the world.
  """
  name, *relations = question.meta['path']
  if question.meta.get('parallel'):  # two people, and no way
    return {scores.key(person) for person in (name, *relations)}
  steps = atlas.walk(facts, name, relations)
  return {scores.key(person) for person, _, _ in steps}


def rows(run: read.Run) -> list[dict]:
  """A row for each question of each step of a run.

  Besides what the module lists: step, id, hops, kind (the question's source);
  agreement (share of the label in the samples), distinct (answers), searches (a
  mean), ahead (mean searches of the votes for the label, less those of the
  others), found and covered (shares of the votes for the label that stand in an
  observation; that are behind a search which covers the question), flipped
  (another label than the start's, if the questions have its votes),
  revisit_flipped (another than at the last visit of the question, if there was
  one). NaN where there is none.

  Raises:
    DataError, ConfigError: the questions are not those of a generated world.
  """
  data, match = run.config.data, run.config.eval.match
  where = f'{run.folder}: config.data.world_module={data.world_module!r}'
  with lookup.of(f'{where} generates no world with paths'):
    make = lookup.function('searchrl_jax', f'{data.world_module}.generate')
  facts = make(data.world_seed, **data.world.to_dict()).facts
  env = build.environment(run.config, run.tokenizer)
  groups: dict[tuple[int, str], list[Trajectory]] = {}
  for record in run.records():
    t = record.trajectory
    if not t.failed:
      groups.setdefault((record.step, t.question.id), []).append(t)
  out: list[dict] = []
  last: dict[str, str | None] = {}
  for (step, id), group in sorted(groups.items(), key=lambda item: item[0][0]):
    group.sort(key=lambda t: t.sample)  # the earliest of tied votes wins
    question = group[0].question
    lookup.require(
      'path' in question.meta,
      f'{where}: question {id!r} has no meta.path, which names what is on the '
      'way to the answer: use a generated world',
    )
    answers = [*map(env.answer, group)]
    keys = equivalence.keys(answers, match)
    label = vote.most_frequent(keys, question, step)
    row = dict(step=step, id=id, hops=question.hops, kind=question.source)
    row |= _of_label(question, label, facts, match)
    row |= _of_votes(group, answers, keys, label, env)
    before, nan = question.meta.get('start_votes'), float('nan')
    row['flipped'] = float(label != before['label']) if before else nan
    id = id.partition('#')[0]  # asked twice in one step: Stream.next
    row['revisit_flipped'] = float(label != last[id]) if id in last else nan
    last[id] = label
    out.append(row)
  return out


def _of_label(question: Question, label, facts, match) -> dict[str, float]:
  """Which of KINDS a label is."""
  if label is None:
    kind = 'none'
  elif equivalence.correct(label, question.answers, match):
    kind = 'right'
  else:
    way = on_the_way(question, facts)
    kind = 'intermediate' if scores.key(label) in way else 'else'
  return {name: float(name == kind) for name in KINDS}


def _of_votes(group, answers, keys, label, env) -> dict[str, float]:
  """What the votes of a question have in common; see `rows`."""
  made = np.array([len(t.calls(SEARCH)) for t in group], float)
  agrees = np.array([label is not None and key == label for key in keys])
  row = dict(agreement=agrees.mean(), searches=made.mean())
  row |= dict(distinct=len({*keys} - {None}), ahead=np.nan)
  row |= dict(found=np.nan, covered=np.nan)
  if 0 < agrees.sum() < len(agrees):
    row['ahead'] = made[agrees].mean() - made[~agrees].mean()
  if agrees.any():
    own = [(t, a) for t, a, agree in zip(group, answers, agrees) if agree]
    row['found'] = np.mean(
      [
        any(scores.states(text, [a]) for text in env.retrieved(t))
        for t, a in own
      ]
    )
    share = (
      coverage.share(t.question.text, guarded.passages(t)) for t, _ in own
    )
    row['covered'] = np.mean([x is not None and x >= 1 for x in share])
  return {name: float(value) for name, value in row.items()}


def kinds(found: Sequence[Mapping]) -> dict[str, dict[str, dict[str, float]]]:
  """{'first', 'last', 'whole': {kind of question: {value: mean}}}."""
  steps = sorted({row['step'] for row in found})
  n = max(len(steps) // 4, 1)
  parts = {'first': steps[:n], 'last': steps[-n:], 'whole': steps}
  return {
    name: dict(_means([row for row in found if row['step'] in {*chosen}]))
    for name, chosen in parts.items()
  }


def _means(found: Sequence[Mapping]) -> Iterator[tuple[str, dict[str, float]]]:
  every = [{row['kind'], *(['hard'] * (row['hops'] >= HARD))} for row in found]
  for kind in (*sorted(set().union(*every)), 'all'):
    own = [r for r, k in zip(found, every) if kind == 'all' or kind in k]
    yield kind, {'n': len(own)} | {name: mean(own, name) for name in VALUES}


def mean(found: Sequence[Mapping], name: str) -> float:
  """Of the rows that have the value; NaN: none has."""
  known = [row[name] for row in found if not np.isnan(row[name])]
  return statistics.fmean(known) if known else np.nan


def measured(config, run: str, out: str) -> dict[str, float]:
  """'PART/KIND/VALUE' of a run (an `Evaluation`); OUT/labels.json has rows."""
  del config
  found = rows(read.run(run))
  records.write_json(pathlib.Path(out) / 'labels.json', found)
  return {
    f'{part}/{kind}/{name}': value
    for part, own in kinds(found).items()
    for kind in ('hard', 'all')
    if kind in own
    for name, value in own[kind].items()
  }


def figure(runs: Mapping[str, Sequence[Mapping]], path: pathlib.Path) -> None:
  """A column for each run: labels of long questions, agreement, searches.

  runs: name -> `rows`.
  """
  from matplotlib.figure import Figure

  size = 2.6 * len(runs) + 1.2, 6.4
  drawn = Figure(figsize=size, layout='constrained')
  axes = drawn.subplots(3, len(runs), squeeze=False, sharex=True, sharey='row')
  for column, (name, found) in zip(axes.T, runs.items()):
    lines = by_window([row for row in found if row['hops'] >= HARD])
    at, labels, shares, searches = lines['step'], *column
    parts = np.nan_to_num([lines[kind] for kind in KINDS])
    labels.stackplot(at, parts, labels=KINDS, colors=('C2', 'C3', 'C1', '0.7'))
    for value, style in (('agreement', '-'), ('flipped', '--'), ('found', ':')):
      shares.plot(at, lines[value], style, color='C0', label=value)
    for value, style in (('searches', '-'), ('ahead', '--')):
      searches.plot(at, lines[value], style, color='C4', label=value)
    labels.set(title=name, ylim=(0, 1))
    shares.set(ylim=(0, 1))
    searches.set(xlabel='step')
  for axis, label in zip(axes[:, 0], ('labels', 'share', 'searches')):
    axis.set_ylabel(f'{label}, {HARD} hops or more')
  for axis in axes[:, -1]:
    axis.legend(loc='center left', bbox_to_anchor=(1, 0.5), fontsize=8)
  drawn.savefig(path, dpi=80)


def by_window(found: Sequence[Mapping]) -> dict[str, list[float]]:
  """Means of the rows of WINDOW steps each; `step` is the middle of them."""
  parts: dict[int, list[Mapping]] = {}
  for row in found:
    parts.setdefault(row['step'] // WINDOW, []).append(row)
  parts = dict(sorted(parts.items()))
  out = {name: [mean(own, name) for own in parts.values()] for name in VALUES}
  return out | {'step': [(i + 0.5) * WINDOW for i in parts]}


def write(folders: Mapping[str, str], out: str) -> None:
  """Writes the JSON of runs, name -> folder, and the figure beside it."""
  found = {name: rows(read.run(path)) for name, path in folders.items()}
  content = {name: kinds(own) for name, own in found.items()}
  records.write_json(out, content)
  figure(found, pathlib.Path(out).with_suffix('.png'))


def main(argv: Sequence[str]) -> None:
  del argv
  write({folder: folder for folder in _RUNS.value}, _OUT.value)


if __name__ == '__main__':
  _RUNS = flags.DEFINE_list('runs', None, 'Folders of runs.', required=True)
  _OUT = flags.DEFINE_string('out', None, 'JSON to write.', required=True)
  app.run(main)
