"""What every measurement shares: the environment, bars, a table and a file.

The JSON of a benchmark holds `environment` (machine, date, commit, load before
the run), `rows` (all raw repetitions) and `bars`, a list of {name, value, bar,
holds} computed from them.
"""

from collections.abc import Mapping, Sequence
import datetime
import importlib.metadata
import os
import pathlib
import platform
import re
import subprocess
import sys
from typing import Any

from experiments.benchmarks import LOAD
from searchrl_jax.store import records, writer

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'numpy')
# What nvidia-smi says of each GPU; clocks in MHz, memory in MiB.
_GPU = (
  'name driver_version memory.total clocks.sm clocks.mem clocks.max.sm '
  'clocks.max.mem power.draw power.limit temperature.gpu'
).split()


def command(module: str) -> str:
  """This process's, for a record: what lies elsewhere is shown under runs/."""
  elsewhere = r'(^|[=,:])/(?:[^/=,:]+/)*([^/=,:]+)'
  given = [re.sub(elsewhere, r'\1runs/\2', a) for a in sys.argv[1:]]
  return ' '.join(['python', '-m', module, *given])


def environment() -> dict[str, Any]:
  """Machine, date and commit; the load is that before this process."""
  commit = _run('git', 'rev-parse', 'HEAD')
  return {
    'date': datetime.datetime.now(datetime.UTC).isoformat('T', 'seconds'),
    'commit': commit or 'none',
    'changed_files': len(_run('git', 'status', '--porcelain').splitlines()),
    'machine': platform.platform(),
    'cpu': _field('/proc/cpuinfo', 'model name') or platform.processor(),
    'cores': writer.cores(),
    'memory': _field('/proc/meminfo', 'MemTotal'),
    'python': platform.python_version(),
    'packages': {p: importlib.metadata.version(p) for p in PACKAGES},
    'load_before': round(LOAD, 2),
    'gpus': gpus(),
  }


def gpus() -> list[dict[str, str]]:
  """Names, driver and present clocks of the NVIDIA GPUs; [] without any."""
  query = f'--query-gpu={",".join(_GPU)}'
  found = _run('nvidia-smi', query, '--format=csv,noheader')
  return [dict(zip(_GPU, x.split(', '))) for x in found.splitlines()]


def _run(*command: str) -> str:
  try:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  except FileNotFoundError:  # no git: the file then says commit "none"
    return ''
  return done.stdout.strip() if done.returncode == 0 else ''


def _field(path: str, name: str) -> str:
  if not os.path.exists(path):
    return ''
  for line in pathlib.Path(path).read_text().splitlines():
    key, _, value = line.partition(':')
    if key.strip() == name:
      return value.strip()
  return ''


def stored(checkpoint: pathlib.Path) -> dict[str, Any]:
  """The NumPy arrays of a checkpoint (a step's folder), as they were stored."""
  import tensorstore as ts

  found = {}
  for leaf in sorted((checkpoint / 'arrays').iterdir()):
    if (leaf / '.zarray').exists():
      store = {'driver': 'file', 'path': str(leaf)}
      spec = {'driver': 'zarr', 'kvstore': store}
      found[leaf.name] = ts.open(spec).result().read().result()
  if not found:
    raise ValueError(f'{checkpoint}: no array in the layout of Orbax')
  return found


def bar(
  name: str,
  value: float | None,
  bar: float,
  *,
  at_most: bool = False,
  strict: bool = False,
) -> dict:
  """One bar: holds if value >= bar, <= with at_most, never = with strict.

  value: None: it is not known, and the bar does not hold.
  """
  holds = value is not None and (value <= bar if at_most else value >= bar)
  holds = holds and not (strict and value == bar)
  return {'name': name, 'value': value, 'bar': bar, 'holds': bool(holds)}


def report(
  out: str,
  name: str,
  rows: Sequence[Mapping],
  bars: Sequence[dict],
  before: Mapping,
) -> None:
  """Prints the table and the bars; writes all of it to `out` ('' = nowhere).

  before: `environment()` as it was when the run started.
  """
  print(table(rows))
  for b in bars:
    print(
      f'{b["name"]}: {b["value"]:.4g} (bar {b["bar"]:g}) '
      f'{"holds" if b["holds"] else "DOES NOT HOLD"}'
    )
  if out:
    record = {'benchmark': name, 'environment': before}
    records.write_json(out, record | {'rows': rows, 'bars': bars})


def table(rows: Sequence[Mapping]) -> str:
  """Columns of the rows' scalar fields."""
  keys = list(
    dict.fromkeys(
      k
      for row in rows
      for k, v in row.items()
      if isinstance(v, (str, int, float))
    )
  )
  cells = [keys] + [[_cell(row.get(k, '')) for k in keys] for row in rows]
  widths = [max(map(len, column)) for column in zip(*cells)]
  return '\n'.join(
    '  '.join(c.ljust(w) for c, w in zip(line, widths)).rstrip()
    for line in cells
  )


def _cell(value: Any) -> str:
  return f'{value:.4g}' if isinstance(value, float) else str(value)
