"""The presets of configs/machines.py, compiled by the gate; the table of them.

    make aot
    .venv-aot/bin/python -m experiments.benchmarks.machines --run=h200x8/3b/4608
    python -m experiments.benchmarks.machines

--run compiles the programs of a preset (a minute on GPUs, many on TPUs) and
writes the gate's report, with its command, to results/aot_*.txt. Of the values
of `model.remat` it takes the one that computes least again and fits (--remat
gives others); the preset has to name it. Without --run, the reports are read
and the table of docs/machines.md is printed.
"""

import datetime
import pathlib
import re
import shlex
import subprocess
import sys
import time

from absl import app, flags

from configs import machines

RESULTS = pathlib.Path(__file__).parent / 'results'
_RUN = flags.DEFINE_string('run', '', 'MACHINE/PARAMETERS/TOKENS')
_REMAT = flags.DEFINE_list(
  'remat', ['matmuls', 'mlp', 'attention', 'block'], 'To try, in this order.'
)
_SECONDS = flags.DEFINE_integer('seconds', 1200, 'After which it is stopped.')

HEAD = (
  '| machine | model | tokens | mesh | slots | memory | update | decode '
  '| search | missed |'
)
# Names of checks, as a table has room for.
SHORT = {
  'at most 90% of the memory is used': 'memory',
  'gradients are reduce-scattered, not all-reduced': 'reduce-scatter',
  'an untruncated token reads at most 1.3 times weights and live cache': (
    'reads'
  ),
}


def path(key: tuple) -> pathlib.Path:
  """The report of a preset."""
  return RESULTS / f'aot_{"_".join(map(str, key))}.txt'


def model(size: str) -> str:
  """The name of a preset's model; '3b' and '7b' are of Qwen2.5."""
  return size if '-' in size else f'qwen2.5-{size}'


def arguments(key: tuple) -> list[str]:
  """Of `python -m searchrl_jax.doctor`."""
  machine, size, tokens = key
  return [
    f'--topology={machines.TOPOLOGIES[machine]}',
    '--config=configs/search_r1.py:'
    f'model={model(size)},machine={machine},tokens={tokens}',
    # Shorter rows take less memory, and minutes to compile for TPUs.
    f'--config.batch.lengths=({tokens},)',
  ]


def run(key: tuple, remat: str, seconds: int) -> bool:
  """Writes the report of a preset; returns whether it fits."""
  command = ['-m', 'searchrl_jax.doctor', *arguments(key)]
  command.append(f'--config.model.remat={remat}')
  shown = shlex.join(['.venv-aot/bin/python', *command])
  begun, partial = time.monotonic(), path(key).with_suffix('.partial')
  with partial.open('w') as out:
    print(f'{shown}\n# {datetime.date.today()}', file=out, flush=True)
    try:
      done = subprocess.run(
        [sys.executable, *command], stdout=out, timeout=seconds
      ).returncode
    except subprocess.TimeoutExpired:
      done = 'stopped'
    took = time.monotonic() - begun
    print(f'# exit status {done}, {took:.0f} s', file=out)
  partial.rename(path(key))
  return done == 0  # 2: over the budget; 1: the compiler ran out of memory


def row(key: tuple) -> str:
  """The line of a preset in the table."""
  machine, size, tokens = key
  preset, text = machines.PRESETS[key], path(key).read_text()

  def find(pattern, default=''):
    found = re.search(pattern, text, re.M)
    return ' '.join(found.groups()) if found else default

  def program(name):
    return find(rf'^{name}: .* estimate ([\d,.]+ ms \(\w+\))', 'not compiled')

  index = find(r'^search: arguments ([\d.]+) GiB, temporary ([\d.]+) GiB')
  missed: dict[str, None] = {}
  for what, found in re.findall(r' MISSED  (.*): (.*)', text):
    value = re.match(r'[\d.]+(?= \(|$)', found)
    shown = f' {value[0]}' if value else ''
    missed[SHORT.get(what, what) + shown] = None
  parts = ' '.join(
    f'{name} {n}'
    for name, n in zip(('data', 'fsdp', 'tensor'), preset.mesh)
    if n > 1
  )
  memory = find(r'is used: ([\d.]+) of (\d+) GiB')
  columns = [
    machine,
    f'{model(size)}{f", adapters of rank {preset.rank}" * bool(preset.rank)}',
    f'{tokens:,}',
    parts or 'one device',
    f'{preset.slots:,}',
    '{} of {} GiB'.format(*memory.split()) if memory else 'not known',
    program(f'accumulate/{tokens}'),
    program('decode'),
    f'{sum(map(float, index.split())):.1f} GiB' if index else 'not compiled',
    ', '.join(missed) or ('none' if memory else 'not known'),
  ]
  return f'| {" | ".join(columns)} |'


def table() -> list[str]:
  """The lines of the table of all presets."""
  line = re.sub(r'[^|]+', '---', HEAD)
  return [HEAD, line, *map(row, machines.PRESETS)]


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  if not _RUN.value:
    print('\n'.join(table()))
    return
  machine, size, tokens = _RUN.value.split('/')
  key = machine, size, int(tokens)
  if key not in machines.PRESETS:
    raise app.UsageError(f'--run={_RUN.value}: no such preset')
  fits = (r for r in _REMAT.value if run(key, r, _SECONDS.value))
  remat = next(fits, None)
  print(f'{_RUN.value}: remat={remat!r}, and the preset has', end=' ')
  print(repr(machines.PRESETS[key].remat))


if __name__ == '__main__':
  app.run(main)
