"""The bars of a table of arms x seeds, and the table as markdown.

  python -m experiments.table experiments/search_r1/results.json \\
    after:eval/em after:eval/hops=2/em gain:eval/hops=2/em

prints some of its figures, for a README. Plain records, as experiments/rows.py
writes them to results.json.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
import pathlib

from absl import app

from experiments import common
from searchrl_jax.sweep.figures import Interval, interval, show


class Missing(LookupError):
  """An arm that a bar needs is not complete."""


@dataclasses.dataclass(frozen=True)
class Bar:
  """A threshold for a figure.

  value: computes the figure from a function (arm, evaluation, score, less='')
  -> Interval; of the difference to the arm `less`, paired by seed, if it is
  given.
  """

  name: str
  value: Callable[[Callable[..., Interval]], float | None]
  bar: float
  at_most: bool = False
  strict: bool = False


def judge(
  bars: Sequence[Bar],
  arms: Mapping[str, dict],
  planned: Mapping[str, int] = {},
  paired: bool = False,
) -> list[dict]:
  """The bars; one whose arm is not complete has no value and does not hold.

  planned: of an arm, the number of its seeds. paired: the arms of a bar have to
  have the same seeds.
  """
  looked: set[frozenset] = set()  # the seeds of the arms of a bar

  def look(arm: str, variant: str, score: str, less: str = '') -> Interval:
    for name in filter(None, (arm, less)):
      seeds = arms.get(name, {}).get('seeds', {})
      if len(seeds) < planned.get(name, 0):
        raise Missing(f'{name}: {len(seeds)} of {planned[name]} seeds')
      looked.add(frozenset(seeds))
    if paired and len(looked) > 1:
      raise Missing(f'{arm}: other seeds than those of another arm')
    try:
      if less:
        mine, theirs = (arms[name]['seeds'] for name in (arm, less))
        value = lambda runs, seed: runs[seed]['values'][variant][score]
        return interval([value(mine, s) - value(theirs, s) for s in mine])
      return Interval(**arms[arm]['mean'][variant][score])
    except KeyError as e:
      raise Missing(f'{arm}, {less}: {variant}/{score}') from e

  out = []
  for bar in bars:
    looked.clear()
    try:
      value = bar.value(look)
    except Missing:
      value = None
    how = {'at_most': bar.at_most, 'strict': bar.strict}
    out.append(common.bar(bar.name, value, bar.bar, **how))
  return out


def main(argv: Sequence[str]) -> None:
  record = json.loads(pathlib.Path(argv[1]).read_text())
  print(show(record['arms'], argv[2:]))
  for bar in record['bars']:
    print(bar)


if __name__ == '__main__':
  app.run(main)
