"""What simulated documents are worth: how many of them hold the gold.

  python -m experiments.zerosearch.check --workdir=runs/zerosearch

counts the documents that a training run has asked for (its trajectories).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import json
import pathlib

from searchrl_jax.rewards import scores
from searchrl_jax.run import command
from searchrl_jax.sources import simulated
from searchrl_jax.store import records
from searchrl_jax.types import SEARCH, SearchResult, Trajectory

# Shares of documents that hold the gold; see `count`.
GOLD = ('useful_gold', 'noisy_gold', 'useful_gold_all', 'noisy_gold_all')


def asks(trajectory: Trajectory) -> Iterator[bool]:
  """Of each search, whether it asks for what the gold answers.

  Such a query names the person whose relation the gold is: that of the
  question, if it has one hop; if two, the person that a useful document on the
  first one has named. Only generated worlds know (meta['path']).
  """
  person, *path = trajectory.question.meta.get('path', (None,))
  holder = person if len(path) == 1 else None
  for search in trajectory.calls(SEARCH):
    query = search.request.query
    yield query == holder
    found = getattr(search, 'passages', ())
    if len(path) == 2 and query == person and found:
      if simulated.kind_of(found[0]) == 'useful':
        text = ' '.join(p.text for p in found)
        _, linked, after = text.partition(f'{path[0]} ')
        holder = after.split(';')[0].rstrip('.') if linked else None


def count(
  trajectories: Iterable[Trajectory],
  asks: Callable[[Trajectory], Iterable[bool]] = asks,
) -> dict[str, float | None]:
  """Shares of documents that hold the gold, and what they are shares of.

  useful_gold, noisy_gold: among queries that ask for what the gold answers
  (`asks`), of those that were to get useful or noisy documents.
  useful_gold_all, noisy_gold_all: among all queries. None: there are none.
  Names with '_n' are the numbers of queries. real_queries: those that a
  search engine answered; noise: share of noisy ones among the others; empty:
  queries without a document or passage; failed: queries without an answer.
  """
  holds_by_kind = {name: [] for name in GOLD}
  real = failed = empty = 0
  for trajectory in trajectories:
    for search, right in zip(trajectory.calls(SEARCH), asks(trajectory)):
      if not isinstance(search, SearchResult):
        failed += 1
        continue
      if not search.passages:
        empty += 1
        continue
      kind = simulated.kind_of(search.passages[0])
      if not kind:
        real += 1
        continue
      text = ' '.join(p.text for p in search.passages)
      holds = scores.states(text, trajectory.question.answers)
      holds_by_kind[f'{kind}_gold_all'].append(holds)
      if right:
        holds_by_kind[f'{kind}_gold'].append(holds)
  out = {}
  for name, held in holds_by_kind.items():
    out[name] = sum(held) / len(held) if held else None
    out[f'{name}_n'] = len(held)
  asked = out['useful_gold_all_n'] + out['noisy_gold_all_n']
  noise = out['noisy_gold_all_n'] / asked if asked else None
  counts = dict(real_queries=real, empty=empty, failed=failed)
  return out | counts | dict(noise=noise)


def read(
  run: str, name: str = 'trajectories', asks=asks
) -> dict[str, float | None]:
  """`count` of all trajectories that a run was trained on ('eval': was
  evaluated with)."""
  found = records.read(pathlib.Path(run) / name)
  return count((record.trajectory for record in found), asks)


def measure(config, run: str, out: str) -> Mapping[str, float | None]:
  """An evaluation of experiments/rows.py."""
  del config, out
  return {f'documents/{name}': value for name, value in read(run).items()}


def main():
  print(json.dumps(read(_WORKDIR.value), indent=2))


if __name__ == '__main__':
  _WORKDIR = command.define_workdir()
  command.run(main)
