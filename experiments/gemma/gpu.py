"""The warm start and GRPO on one GPU; see gpu.sh.

OUT/gpu.json has, as far as it got, seconds of each stage, the steps, the GPU,
and exact match on the 683 dev questions and on 300 tuning questions: greedy
before, during and after, and, if time is left, as in rollouts after.
"""

import json
import os
import pathlib
import subprocess
import sys
import time

from absl import flags

from experiments import common
from experiments.gemma import carry
from searchrl_jax import lookup
from searchrl_jax.run import command
from searchrl_jax.store import records

RECORD = 'gpu.json'
# A CPU tries the commands with these.
TRY = (
  'rollout.questions=2 rollout.group=4 train.steps=2 eval.questions=8 '
  'engine.slots=8 engine.prefill_rows=16 sft.steps=2 sft.warmup=0 '
  'optim.warmup=0 batch.tokens=768 sft.data.n=16'
).split()


def main():
  begin = time.monotonic()
  default = 'runs/gemma_gpu_small' if _SMALL.value else 'runs/gemma_gpu'
  out = pathlib.Path(_OUT.value or default).resolve()
  carried = pathlib.Path(_CARRIED.value).resolve()
  out.mkdir(parents=True, exist_ok=True)
  os.environ['SEARCHRL_DATA'] = str(carried)
  os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(out / 'programs'))
  # Fewer kernels to measure, so that a warm start takes 50 s instead of 150 s
  # (docs/gpu.md; on two kinds of GPU).
  no_triton = '--xla_gpu_enable_triton_gemm=false'
  os.environ['XLA_FLAGS'] = f'{no_triton} {os.environ.get("XLA_FLAGS", "")}'
  path = out / RECORD
  known = json.loads(path.read_text()) if path.exists() else {}
  seconds = known.get('seconds', {})  # of all starts
  whole = begin - seconds.pop('in all', 0.0)

  def left() -> float:
    return _SECONDS.value - (time.monotonic() - begin)

  def run(stage: str, module: str, *arguments: str) -> None:
    started = time.monotonic()
    print(f'{stage} ...', flush=True)
    call = [sys.executable, '-m', module, *arguments]
    status = subprocess.run(call, cwd=common.ROOT).returncode
    seconds[stage] = seconds.get(stage, 0.0) + time.monotonic() - started
    report(out, seconds, whole)
    if status:
      raise SystemExit(
        f'{stage}: exit status {status}; what it had is in {out}'
      )

  start, book = _START.value, carried / carry.CLOSED_BOOK
  lookup.require(
    start == 'good' or book.is_file(),
    f'--start={start} needs {book}: pack it with --closed_book (carry)',
  )
  model = out / 'model'
  if not model.exists():
    started = time.monotonic()
    carry.unpack(carried, model)
    seconds['unpack'] = time.monotonic() - started
  config = f'configs/gemma.py:model={model},machine=gpu,start={start}'
  config += f',closed_book={book}'
  small = [f'--config.{field}' for field in TRY] if _SMALL.value else []
  warm, run_ = out / start, out / 'grpo'
  shared = [
    f'--config={config}',
    *small,
    '--config.log.tensorboard=False',
    f'--config.seed={_SEED.value}',
  ]
  # It refuses the folder of another config.
  done = out / f'{start}.done'
  if not done.exists() or done.read_text() != ' '.join(shared):
    run('warm start', 'searchrl_jax.sft', f'--workdir={warm}', *shared)
    done.write_text(' '.join(shared))
  run(
    'grpo',
    'searchrl_jax.train',
    f'--workdir={run_}',
    f'--config.train.init={warm}',
    f'--config.train.seconds={max(left() - _END.value, 1):.0f}',
    '--config.eval.every=20',
    *shared,
    *(f'--config.{field}' for field in _SET.value),
  )
  if left() > _LEAST.value:
    steps = len((run_ / 'metrics.jsonl').read_text().splitlines())
    run(
      'sampled',
      'searchrl_jax.evaluate',
      f'--workdir={run_}',
      f'--out={out / f"sampled_{steps}"}',
      '--config.eval.temperature=1',
    )
  print(f'{time.monotonic() - whole:.0f} s in all; {path}')


def report(out: pathlib.Path, seconds: dict, begin: float) -> None:
  """Writes gpu.json from what the stages have left."""
  log = out / 'grpo' / 'metrics.jsonl'
  lines = log.read_text().splitlines() if log.exists() else []
  steps = [json.loads(line) for line in lines]
  scored = [s | {'step': s['step'] + 1} for s in steps if 'eval/em' in s]
  for path in out.glob('sampled_*/eval.json'):
    after = json.loads(path.read_text())
    scored.append({'step': after['checkpoint'], 'sampled': True} | after)
  shown = [
    f'eval/set={name}/{score}'
    for name in ('dev', 'tune')
    for score in ('em', 'em/low', 'em/high', 'em/n', 'f1', 'searches')
  ]
  record = {
    'environment': common.environment(),
    'command': common.command('experiments.gemma.gpu'),
    'seconds': {**seconds, 'in all': time.monotonic() - begin},
    'evaluations': [
      {k: s[k] for k in ('step', 'sampled', *shown) if k in s} for s in scored
    ],
    'steps': steps,
  }
  records.write_json(out / RECORD, record)
  for row in record['evaluations']:
    print(row, flush=True)


if __name__ == '__main__':
  small = os.environ.get('SMALL', '') not in ('', '0')
  _CARRIED = flags.DEFINE_string('carried', None, 'Of carry.', required=True)
  _OUT = command.define_out(
    '', 'Folder of model, runs, record; default: runs/gemma_gpu[_small].'
  )
  _SMALL = flags.DEFINE_bool('small', small, 'Sizes for a CPU (SMALL=1).')
  _SECONDS = flags.DEFINE_float('seconds', 360, 'For everything.', 1)
  _END = flags.DEFINE_float('end', 30, 'Of these, for what ends the run.', 0)
  _LEAST = flags.DEFINE_float(
    'least', 60, 'Seconds left after GRPO that evaluate samples too.', 0
  )
  _START = flags.DEFINE_enum('start', 'good', ('good', 'hesitant'), 'Traces.')
  _SET = flags.DEFINE_multi_string('set', [], 'FIELD=VALUE of the config.')
  _SEED = flags.DEFINE_integer('seed', 0, 'Of the run.')
  command.run(main)
