"""What questions of atlas are worth to those who do not search for hops.

  python -m experiments.arena.shortcuts --seeds=0,1,2 \\
    --out=experiments/arena/shortcuts.json

Each shortcut is given more than a policy could have, so its exact match is an
upper bound (held-out questions, by kind; 95% bootstrap interval over
questions):

  frequent     the most frequent answer among the held-out questions of the kind
  closed book  the most frequent answer among train questions with the same
               last relation, or with most words in common: the better of both
  bare@k       one search, with the question: 1 if any of the k passages has
               the answer in it, whatever the policy would then read
  first@k      one search, worded as for the first hop: likewise. No shortcut
               where one hop is all that is needed; for comparison

The bar is 0.05, for the first three, k as in the recipe, and every kind but
`known` (whose answers the policy has read). With `--policy=FOLDER` of a run,
the policy itself answers without searching too (`config.env.max_turns=0`).
"""

import collections
import pathlib
import re
import sys
import tempfile

from absl import flags
from rich import console, table

from configs import atlas as recipe
from experiments import common
from searchrl_jax.evaluate import policy as evaluate
from searchrl_jax.rewards import scores
from searchrl_jax.run import build, command
from searchrl_jax.store import records
from searchrl_jax.types import Question
from searchrl_jax.worlds import atlas, atlas_traces

BAR = 0.05
KS = (1, 3)


def nearest(question: Question, train: list[Question]) -> str:
  """The most frequent answer of the train questions most like this one."""
  words = {*re.findall(r'\w+', question.text)}
  shared = [len(words & {*re.findall(r'\w+', q.text)}) for q in train]
  most = max(shared)
  answers = (q.answers[0] for q, n in zip(train, shared) if n == most)
  return collections.Counter(answers).most_common(1)[0][0]


def by_relation(train: list[Question]) -> dict[str, str]:
  """Last relation -> its most frequent answer."""
  found = collections.defaultdict(collections.Counter)
  for q in train:
    found[q.meta['facts'][-1][1]][q.answers[0]] += 1
  return {r: counts.most_common(1)[0][0] for r, counts in found.items()}


def shortcuts(seed: int, world_fields) -> dict[str, dict[str, list[float]]]:
  """{shortcut: {kind: exact match of each held-out question}} of a world."""
  world = atlas.generate(seed, **world_fields)
  train = [*world.questions['train']]
  heldout = world.questions['heldout']
  common_answer = by_relation(train)
  search = atlas_traces.searcher(world, [*world.facts], tuple(atlas.SECTION))
  out = collections.defaultdict(dict)
  for kind in atlas.KINDS:
    own = [q for q in heldout if q.source == kind]
    counts = collections.Counter(q.answers[0] for q in own)
    guess = counts.most_common(1)[0][0]
    frequent = [scores.exact_match(guess, q.answers) for q in own]
    out['frequent'][kind] = frequent
    similar = [scores.exact_match(nearest(q, train), q.answers) for q in own]
    likely = [
      scores.exact_match(common_answer[q.meta['facts'][-1][1]], q.answers)
      for q in own
    ]
    # The better of two readers, on the questions themselves.
    out['closed book'][kind] = max(similar, likely, key=sum)
    firsts = [
      f'{q.meta["path"][0]} {atlas.SECTION[q.meta["facts"][0][1]]}' for q in own
    ]
    for name, queries in (('bare', [q.text for q in own]), ('first', firsts)):
      for k in KS:
        found = search(queries, k)
        out[f'{name}@{k}'][kind] = [
          float(any(scores.states(p.text, q.answers) for p in passages))
          for q, passages in zip(own, found)
        ]
  return out


def closed(folder: str) -> dict[str, scores.Interval]:
  """Exact match of a run's policy without searches, by kind."""
  config = build.load_config(folder)
  config.env.max_turns = 0
  with tempfile.TemporaryDirectory() as out:
    values = evaluate.evaluate(config, folder, out)
  found = {}
  for kind in atlas.KINDS:
    name = f'eval/source={kind}/em'
    parts = [values[name + part] for part in ('', '/low', '/high')]
    found[kind] = scores.Interval(*parts, int(values[f'{name}/n']))
  return found


def measure(seeds, policy: str = '') -> dict:
  """{shortcut: {kind: [mean, low, high, n]}} over all seeds."""
  fields = recipe.get_config().data.world.to_dict()
  pooled = collections.defaultdict(lambda: collections.defaultdict(list))
  for seed in seeds:
    for shortcut, kinds in shortcuts(seed, fields).items():
      for kind, values in kinds.items():
        pooled[shortcut][kind] += values
  out = {
    shortcut: {
      k: list(scores.bootstrap(v, resamples=2000, seed=0))
      for k, v in kinds.items()
    }
    for shortcut, kinds in pooled.items()
  }
  if policy:
    out['policy without search'] = {k: [*v] for k, v in closed(policy).items()}
  return out


def failures(measured: dict, k: int) -> list[str]:
  """What is above the bar where nothing should be known."""
  judged = ['frequent', 'closed book', f'bare@{k}', 'policy without search']
  return [
    f'{shortcut}, {kind}: {measured[shortcut][kind][0]:.3f}'
    for shortcut in judged
    for kind in atlas.KINDS
    if shortcut in measured
    and kind != 'known'
    and measured[shortcut][kind][0] > BAR
  ]


def main():
  measured = measure([int(s) for s in _SEEDS.value], _POLICY.value)
  shown = table.Table('', *atlas.KINDS, title='exact match [95%] (questions)')
  for shortcut, kinds in measured.items():
    cells = (
      f'{m:.3f} [{a:.3f}, {b:.3f}] ({n})' for m, a, b, n in kinds.values()
    )
    shown.add_row(shortcut, *cells)
  console.Console(width=160).print(shown)
  failed = failures(measured, recipe.get_config().source.k)
  if _OUT.value:
    records.write_json(
      pathlib.Path(_OUT.value),
      {
        'environment': common.environment(),
        'command': common.command(__spec__.name),
        'bar': BAR,
        'above_bar': failed,
        'shortcuts': measured,
      },
    )
  print('above the bar: ' + ('; '.join(failed) or 'none'))
  if failed:
    sys.exit(1)


if __name__ == '__main__':
  _SEEDS = flags.DEFINE_list('seeds', ['0', '1', '2'], 'Seeds of worlds.')
  _POLICY = flags.DEFINE_string('policy', '', 'Run folder of a policy.')
  _OUT = flags.DEFINE_string('out', '', 'JSON file to write.')
  command.run(main)
