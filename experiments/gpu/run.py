"""Runs the stages of `stages.py`, one process after another.

  sh experiments/gpu/run.sh

A stage whose record (OUT/STAGE.json) says that it is done is not run again;
one that failed, was stopped or skipped is. The processes share a cache of
compiled programs, OUT/programs, so that a stage that was stopped gets further
the next time. OUT/summary.json has all records. Exits 1 if a stage failed or
was not started, and lists them.
"""

from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

from absl import app, flags

from experiments import common

LIMIT = 480.0  # seconds of a stage
_QUICK = '--xla_backend_optimization_level=0'
LEAST = 45.0  # seconds: less than that is not worth a start


@dataclasses.dataclass(frozen=True)
class Stage:
  """One process: `of` is a function of stages.py, `fields` of its config.

  memory: the share of a GPU's memory that JAX may take.
  model: of the recipe.
  """

  name: str
  of: str = ''
  fields: Sequence[str] = ()
  memory: float = 0.95
  model: str = 'qwen2.5-3b'

  def command(self, out: pathlib.Path, small: bool) -> list[str]:
    command = [sys.executable, '-m', 'experiments.gpu.stages']
    command += [f'--stage={self.of or self.name}', f'--name={self.name}']
    command += [f'--out={out}', f'--model={self.model}']
    command += ['--small'] if small else []
    return command + [f'--set={field}' for field in self.fields]


def plan(small: bool) -> tuple[Stage, ...]:
  """The stages, the most valuable ones first."""
  server = 'cpu' if small else 'gpus:0'
  vllm = (
    'engine.module=vllm',
    f'engine.device={server}',
    'engine.gpu_memory=0.3',
  )
  return (
    Stage('update'),
    Stage('grpo'),
    Stage('search'),
    Stage('sampler'),
    Stage('memory'),
    Stage('lora', 'grpo', ('model.lora.rank=32',)),
    Stage('vllm', fields=vllm, memory=0.65),
  )


def model() -> str:
  """The recipe's model for the memory of the first GPU here."""
  gpus = common.gpus()
  large = not gpus or float(gpus[0]['memory.total'].split()[0]) > 100_000
  return 'qwen2.5-3b' if large else 'qwen2.5-1.5b'


def environment(stage: Stage, out: pathlib.Path, small: bool) -> dict[str, str]:
  # Unoptimized programs compile in half the time, and little is computed.
  quick = {'XLA_FLAGS': f'{_QUICK} {os.environ.get("XLA_FLAGS", "")}'}
  return (
    os.environ
    | (quick if small else {})
    | {
      'XLA_PYTHON_CLIENT_MEM_FRACTION': f'{stage.memory}',
      'JAX_COMPILATION_CACHE_DIR': str(out / 'programs'),
      'JAX_COMPILATION_CACHE_MAX_SIZE': f'{8 << 30}',
      'PYTHONUNBUFFERED': '1',
    }
  )


def run(stage: Stage, out: pathlib.Path, small: bool, limit: float) -> dict:
  """The record of one stage: what it wrote, or why it failed."""
  path, log = out / f'{stage.name}.json', out / f'{stage.name}.log'
  path.unlink(missing_ok=True)
  begin = time.monotonic()
  with open(log, 'wb') as file:
    process = subprocess.Popen(
      stage.command(out, small),
      cwd=common.ROOT,
      env=environment(stage, out, small),
      stdout=file,
      stderr=subprocess.STDOUT,
      process_group=0,  # so that what it started ends with it
    )
    try:
      status = f'exit status {process.wait(limit)}'
    except subprocess.TimeoutExpired:
      status = f'stopped after {limit:.0f} s'
    finally:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
      process.wait()
  found = read(path)
  if not found:
    found = {'stage': stage.name, 'status': 'failed', 'reason': status}
    found['log'] = log.read_text(errors='replace')[-4000:]
    path.write_text(json.dumps(found, indent=2) + '\n')
  return found | {'seconds': time.monotonic() - begin}


def read(path: pathlib.Path) -> dict:
  return json.loads(path.read_text()) if path.exists() else {}


def run_all(
  stages: Sequence[Stage],
  out: pathlib.Path,
  small: bool,
  seconds: float,
  start=run,
) -> dict[str, dict]:
  """The records of the stages by name; those that are done are read.

  Args:
    stages: in this order. A record of another model does not count.
    out: their folder.
    small: at sizes for a CPU.
    seconds: for all of them; a stage is not started in the last `LEAST`.
    start: of a stage, gives its record.
  """
  end, records = time.monotonic() + seconds, {}
  for stage in stages:
    found, left = read(out / f'{stage.name}.json'), end - time.monotonic()
    if found.get('model') != stage.model or found.get('status') != 'done':
      if left < LEAST:
        found = {'status': 'not started', 'reason': 'no time was left'}
      else:
        print(f'{stage.name} ...', flush=True)
        found = start(stage, out, small, min(LIMIT, left))
    records[stage.name] = found
    print(common.table(rows({stage.name: found})), flush=True)
  return records


def rows(records: Mapping[str, Mapping]) -> list[dict]:
  """The table: a row for each bar, or one for a stage without any."""
  out = []
  for name, record in records.items():
    status, seconds = record['status'], round(record.get('seconds', 0))
    last = {'verdict': status, 'seconds': seconds}
    blank = {'stage': name, 'figure': '', 'value': '', 'bar': '', 'goal': ''}
    if status != 'done':
      out.append(blank | last | {'reason': record['reason']})
      continue
    for bar in record['bars']:
      verdict = 'holds' if bar['holds'] else 'MISSED'
      if record['small']:
        verdict = 'tried'  # the bars are those of an H200 at full size
      out.append(
        blank
        | {'figure': bar['name'], 'value': bar['value'], 'bar': bar['bar']}
        | {'goal': bar.get('goal', ''), 'verdict': verdict, 'seconds': seconds}
      )
    if not record['bars']:
      out.append(blank | record.get('figure', {}) | last)
  return out


def failed(records: Mapping[str, Mapping]) -> list[str]:
  """Names of the stages that were to run and have not."""
  good = 'done', 'skipped'
  return [n for n, found in records.items() if found['status'] not in good]


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  small = _SMALL.value
  if not (small or shutil.which('nvidia-smi')):
    raise SystemExit('there is no nvidia-smi; SMALL=1 tries this on a CPU')
  stages = {stage.name: stage for stage in plan(small)}
  if unknown := [n for n in _STAGES.value if n not in stages]:
    raise app.UsageError(f'--stages: {unknown} not in {list(stages)}')
  # `run` then ends the stage that is running.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
  out = pathlib.Path(_OUT.value or ('runs/gpu_small' if small else 'runs/gpu'))
  out = out.resolve()
  out.mkdir(parents=True, exist_ok=True)
  fitting = _MODEL.value or model()
  chosen = [
    dataclasses.replace(stages[n], model=fitting)
    for n in _STAGES.value or stages
  ]
  records = run_all(chosen, out, small, _SECONDS.value)
  everything = {n: read(out / f'{n}.json') for n in stages}
  everything = {n: found for n, found in everything.items() if found}
  summary = out / 'summary.json'
  summary.write_text(json.dumps(everything | records, indent=2) + '\n')
  print(f'\n{common.table(rows(records))}\n{summary}')
  if names := failed(records):
    print(f'did not run: {", ".join(names)}; their logs are in {out}')
    raise SystemExit(1)


if __name__ == '__main__':
  small = os.environ.get('SMALL', '') not in ('', '0')
  _OUT = flags.DEFINE_string('out', '', 'Folder; default: runs/gpu[_small].')
  _SMALL = flags.DEFINE_bool('small', small, 'Sizes for a CPU (SMALL=1).')
  _MODEL = flags.DEFINE_string('model', '', "Default: by the GPU's memory.")
  _STAGES = flags.DEFINE_list('stages', [], 'Which; default: all.')
  _SECONDS = flags.DEFINE_float('seconds', 1500, 'For all stages together.', 1)
  app.run(main)
