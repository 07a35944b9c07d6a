"""Which golden answers of MATH-500 are found equal to another, and why.

  python -m experiments.ttrl.math500 --data_dir=DATA

compares all pairs of different answers in DATA/math500.json (a list of records
with `answer`) and writes those that are equal to math500_pairs.tsv. The reason,
the third column, is written by hand and kept; the command fails while a pair
has none. A minute.
"""

import itertools
import json
import pathlib

from absl import app, flags
import tqdm

from experiments.ttrl import mathematics

TABLE = pathlib.Path(__file__).with_name('math500_pairs.tsv')
_HEADER = ('answer', 'other', 'reason')


def read() -> list[tuple[str, str, str]]:
  """The rows of the table: two answers and why they are equal."""
  header, *rows = (
    tuple(line.split('\t')) for line in TABLE.read_text().splitlines()
  )
  if header != _HEADER or any(len(row) != 3 for row in rows):
    raise ValueError(f'{TABLE}: three columns are needed: {_HEADER}')
  return rows


def main(argv):
  del argv
  records = json.loads(pathlib.Path(_DATA.value, 'math500.json').read_text())
  golds = sorted({record['answer'] for record in records})
  reasons = {row[:2]: row[2] for row in read()} if TABLE.exists() else {}
  pairs = [*itertools.combinations(golds, 2)]
  rows = [
    (*pair, reasons.get(pair, ''))
    for pair in tqdm.tqdm(pairs, disable=None, unit=' pairs')
    if mathematics.equal(*pair)
  ]
  TABLE.write_text('\n'.join('\t'.join(row) for row in [_HEADER, *rows]) + '\n')
  missing = [row[:2] for row in rows if not row[2]]
  print(f'{len(rows)} pairs of {len(golds)} answers are equal: {TABLE}')
  if missing:
    raise SystemExit(f'write the reason of {len(missing)} of them: {missing}')


if __name__ == '__main__':
  _DATA = flags.DEFINE_string('data_dir', None, 'The folder of math500.json.')
  flags.mark_flag_as_required('data_dir')
  app.run(main)
