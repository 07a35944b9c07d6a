"""Random cases against the whole system, until the time is over.

  python -m tests.fuzz --seed=0 --minutes=60
  python -m tests.fuzz --only=plays,packed --minutes=5
  python -m tests.fuzz --only=packed --case=0/17

The kinds get equal time. A case that fails is printed with the command that
repeats it, and the exit status is 1. `make test` tries a few of each.
"""

import tests.conftest  # noqa: F401, I001, first: CPU devices, kept programs

import argparse
import collections
import contextlib
import functools
import pathlib
import random
import sys
import tempfile
import time
import traceback

import tqdm

from retrieval import process
from searchrl_jax.worlds import microworld
from tests import tiny
from tests.fuzz import configs, kills, packed, plays

CASES = {
  m.__name__.rpartition('.')[2]: m for m in (plays, packed, configs, kills)
}


@contextlib.contextmanager
def server():
  """The URL of a retrieval server over the world of `tests.tiny`, a function.

  It starts with the first call.
  """
  with contextlib.ExitStack() as stack:

    @functools.cache
    def serve() -> str:
      folder = stack.enter_context(tempfile.TemporaryDirectory())
      world = microworld.generate(3, **tiny.WORLD)
      corpus = microworld.write(world, pathlib.Path(folder))['corpus']
      started = process.start_server(corpus, log_path=f'{folder}/log')
      return stack.enter_context(started).url

    yield serve


def attempt(kind: str, name: str, serve) -> str:
  """What a case returns; 'FAILED' after printing why."""
  try:
    return CASES[kind].case(random.Random(f'{kind}/{name}'), serve)
  except Exception:
    traceback.print_exc()
    print(f'FAILED: python -m tests.fuzz --only={kind} --case={name}')
    return 'FAILED'


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--seed', default='0')
  parser.add_argument('--minutes', type=float, default=60.0)
  parser.add_argument('--only', default=','.join(CASES))
  parser.add_argument('--case', help='SEED/NUMBER of one case to repeat')
  given = parser.parse_args()
  kinds = given.only.split(',')
  outcomes = {kind: collections.Counter() for kind in kinds}
  spent = dict.fromkeys(kinds, 0.0)
  total = 0 if given.case else round(60 * given.minutes)
  with server() as serve, tqdm.tqdm(total=total, unit='s', disable=None) as bar:
    if given.case:
      (kind,) = kinds
      outcomes[kind][attempt(kind, given.case, serve)] += 1
    while sum(spent.values()) < total:
      kind, begun = min(spent, key=spent.get), time.monotonic()
      name = f'{given.seed}/{outcomes[kind].total()}'
      bar.set_description(f'{kind} {name}')
      outcomes[kind][attempt(kind, name, serve)] += 1
      seconds = time.monotonic() - begun
      spent[kind] += seconds
      bar.update(seconds)
  for kind, found in outcomes.items():
    listed = ', '.join(f'{n} {name}' for name, n in found.most_common())
    print(f'{kind}: {found.total()} cases in {spent[kind]:.0f} s: {listed}')
  return int(any(found['FAILED'] for found in outcomes.values()))


if __name__ == '__main__':
  sys.exit(main())
